"""The network of drafts and previews beside core's own class, and when previews take it."""

from pathlib import Path

import pytest
from anygpu.pipelines.registry import FAMILIES
from anygpu.pipelines.vae.draft import Network
from safetensors.torch import save_file

from host.client import Client
from host.inside.asking import Inside
from host.prompts import text_to_video
from host.server import Server

pytestmark = pytest.mark.host


def test_the_network_is_cores(inside: Inside) -> None:
    found = inside.play("tiny_decoders", "against_core")
    assert set(found) == {"16", "32"} and max(found.values()) <= 1e-5, found


def test_previews_take_it_where_comfyui_is_to_draw_with_such_decoders(inside: Inside, tmp_path: Path) -> None:
    found = inside.play("tiny_decoders", "previews", folder=str(tmp_path))
    for family in ("hunyuan_video", "mochi"):
        assert found[f"{family} taesd"] == "TinyPreviewer" and found[f"{family} size"] == "48x32"
        assert found[f"{family} latent2rgb"] == found[f"{family} auto"] == "Latent2RGBPreviewer"
        assert found[f"{family} none"] == "NoneType"


def test_a_draft_and_later_the_video_of_the_same_latents(server: Server, client: Client) -> None:
    """In one graph: the draft by the file in vae_approx, and the final decode."""
    folder = server.base / "models" / "vae_approx"
    folder.mkdir(parents=True, exist_ok=True)
    row = FAMILIES["hunyuan_video"].published.tiny_decoders[0]
    state = Network(16, (1, 2, 2), 1, row).state_dict()
    save_file({f"decoder.{name}": tensor for name, tensor in state.items()}, folder / "taehv.safetensors")
    try:
        graph = text_to_video(server.model("HunyuanVideo"), width=64, height=64, frames=5, steps=2)
        links = {"pipeline": graph.link("1"), "latent": graph.link("3")}
        draft = graph.add("AnyGPUDecode", **links, method="draft")
        graph.add("SaveVideo", video=graph.link(draft, 1), filename_prefix="draft", format="auto", codec="auto")
        run = client.finished(graph.prompt)
        assert "a draft by taehv.safetensors" in run.texts_of(draft)[-1]
        assert all("64x64, 5 frames" in run.texts_of(node)[-1] for node in (draft, "4"))
    finally:
        (folder / "taehv.safetensors").unlink()
    graph.prompt[draft]["inputs"]["method"] = "draft"
    client.free()
    gone = client.run(graph.prompt)
    assert gone.ending != "execution_success" and "no tiny decoder for HunyuanVideo" in gone.message
