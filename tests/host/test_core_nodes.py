"""Core nodes between ours: their latents into our nodes, ours into theirs."""

import json
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from host import videos
from host.client import Client
from host.inside.asking import Inside
from host.prompts import SAVE, Graph, loading, pictured, text_to_video
from host.server import Server

pytestmark = pytest.mark.host

LOAD, PROMPT, SAMPLE, DECODE = "1234"

EMPTY = {
    "HunyuanVideo": ("EmptyHunyuanLatentVideo", 9),
    "HunyuanVideo-1.5-Diffusers-480p_t2v": ("EmptyHunyuanVideo15Latent", 9),
    "mochi-1-preview": ("EmptyMochiLatentVideo", 7),
    "LTX-Video": ("EmptyLTXVLatentVideo", 9),
}


def saved_latents(server: Server, client: Client, graph: Graph, source: str) -> np.ndarray:
    """The latents of a node, as core's Save Latent wrote them."""
    keeper = graph.add("SaveLatent", samples=graph.link(source), filename_prefix="latent")
    run = client.finished(graph.prompt)
    return load_file(server.output(run.outputs[keeper]["latents"][0]))["latent_tensor"]


def config_of(server: Server, model: str, part: str = "transformer") -> dict[str, Any]:
    """The configuration of a part of a tiny checkpoint."""
    folder = server.base / "models" / "diffusers" / server.model(model)
    return json.loads((folder / part / "config.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("cell", [8, 32])
def test_a_noise_mask_lies_where_core_has_it(inside: Inside, cell: int) -> None:
    ours, cores = inside.play("whole", "masked_beside_core", cell=cell)
    assert ours == pytest.approx(cores, abs=0.15), "of a cell"


def test_a_forecast_takes_what_core_takes_of_empty_latents(client: Client) -> None:
    for kind, _ in EMPTY.values():
        inputs = client.get(f"/object_info/{kind}")[kind]["input"]["required"]
        assert max(inputs[name][1]["max"] for name in ("width", "height", "length", "batch_size")) == 16384


@pytest.mark.parametrize("model", EMPTY)
def test_empty_core_latents_decode(server: Server, client: Client, model: str) -> None:
    kind, length = EMPTY[model]
    graph = Graph()
    pipe = graph.link(graph.add("AnyGPULoadPipeline", **loading(server.model(model))))
    empty = graph.add(kind, width=64, height=64, length=length, batch_size=1)
    decode = graph.add("AnyGPUDecode", pipeline=pipe, latent=graph.link(empty), fps=12.0)
    graph.add(SAVE, video=graph.link(decode, 1), filename_prefix="core", format="auto", codec="auto")
    run = client.finished(graph.prompt)
    assert "these latents come from another node" in run.texts_of(decode)[-1]
    assert videos.facts(server.output(run.files()[0])) == videos.Facts(64, 64, length, 12)


def test_our_latents_through_core_arithmetic(server: Server, client: Client) -> None:
    graph = text_to_video(server.model("HunyuanVideo"))
    doubled = graph.add("LatentMultiply", samples=graph.link(SAMPLE), multiplier=2.0)
    graph.prompt[DECODE]["inputs"]["latent"] = graph.link(doubled)
    plain = saved_latents(server, client, graph, SAMPLE)
    assert np.array_equal(saved_latents(server, client, graph, doubled), plain * 2)


def test_video_to_video_under_a_core_noise_mask(server: Server, client: Client) -> None:
    """Where the mask is 0 the latents stay; where it is 1 they are sampled anew."""
    graph = text_to_video(server.model("HunyuanVideo"), seed=1)
    mask = graph.add("SolidMask", value=0.0, width=64, height=64)
    right = graph.add("SolidMask", value=1.0, width=32, height=64)
    masks = {"destination": graph.link(mask), "source": graph.link(right)}
    half = graph.add("MaskComposite", **masks, x=32, y=0, operation="add")
    masked = graph.add("SetLatentNoiseMask", samples=graph.link(SAMPLE), mask=graph.link(half))
    second = dict(graph.prompt[SAMPLE]["inputs"], latent=graph.link(masked), denoise=0.7, seed=2, steps=4)
    again = graph.add("AnyGPUSample", **second)
    before = saved_latents(server, client, graph, SAMPLE)
    after = saved_latents(server, client, graph, again)
    assert np.allclose(after[..., :4], before[..., :4], atol=1e-5)
    assert not np.allclose(after[..., 4:], before[..., 4:], atol=1e-2)


def test_core_sigmas_replace_the_schedule(server: Server, client: Client) -> None:
    graph = text_to_video(server.model("LTX-Video"), steps=7)
    sigmas = graph.add("ManualSigmas", sigmas="1.0, 0.8, 0.4, 0.0")
    graph.prompt[SAMPLE]["inputs"]["sigmas"] = graph.link(sigmas)
    run = client.finished(graph.prompt)
    assert max(total for node, _, total in run.progress if node == SAMPLE and total < 100) == 3


def test_our_frames_through_core_images_to_core_video(server: Server, client: Client) -> None:
    graph = text_to_video(server.model("LTX-Video"))
    graph.prompt.pop("5")
    scaling = {"upscale_method": "bilinear", "width": 96, "height": 96, "crop": "disabled"}
    larger = graph.add("ImageScale", image=graph.link(DECODE), **scaling)
    made = graph.add("CreateVideo", images=graph.link(larger), fps=10.0)
    graph.add(SAVE, video=graph.link(made), filename_prefix="made", format="mp4", codec="h264")
    run = client.finished(graph.prompt)
    assert videos.facts(server.output(run.files()[0])) == videos.Facts(96, 96, 9, 10)


def test_our_latents_survive_core_save_and_load(server: Server, client: Client) -> None:
    """Core keeps the tensor only; the other node's latents then decode as text to video with seed 0, and say so."""
    graph = text_to_video(server.model("HunyuanVideo"))
    keeper = graph.add("SaveLatent", samples=graph.link(SAMPLE), filename_prefix="kept")
    run = client.run(pictured(graph.prompt))
    saved = server.output(run.outputs[keeper]["latents"][0])
    saved.rename(server.base / "input" / "kept.latent")
    again = Graph()
    pipe = again.link(again.add("AnyGPULoadPipeline", **loading("HunyuanVideo")))
    pipeline = again.add("LoadLatent", latent="kept.latent")
    decode = again.add("AnyGPUDecode", pipeline=pipe, latent=again.link(pipeline), fps=8.0)
    again.add(SAVE, video=again.link(decode, 1), filename_prefix="kept", format="auto", codec="auto")
    second = client.run(pictured(again.prompt))
    assert np.array_equal(videos.pictures(server, second), videos.pictures(server, run))


@pytest.mark.parametrize(
    ("model", "width", "pooled"),
    [
        ("LTX-Video", "caption_channels", ""),
        ("mochi-1-preview", "text_embed_dim", ""),
        ("HunyuanVideo", "text_embed_dim", "pooled_projection_dim"),
    ],
)
def test_core_conditioning_is_a_prompt(server: Server, client: Client, model: str, width: str, pooled: str) -> None:
    config = config_of(server, model)
    sizes = {"tokens": 7, "width": config[width], "pooled": config[pooled] if pooled else 0}
    graph = text_to_video(model, cfg=3.0)
    for name, seed in (("prompt", 1), ("negative", 2)):
        made = graph.add("StandInConditioning", seed=seed, **sizes)
        graph.prompt[SAMPLE]["inputs"][name] = graph.link(made)
    first = saved_latents(server, client, graph, SAMPLE)
    graph.prompt[made]["inputs"]["seed"] = 3  # another negative prompt
    assert not np.array_equal(saved_latents(server, client, graph, SAMPLE), first)


def test_core_conditioning_of_another_width(server: Server, client: Client) -> None:
    graph = text_to_video(server.model("LTX-Video"), cfg=1.0)
    made = graph.add("StandInConditioning", seed=1, tokens=7, width=24, pooled=0)
    graph.prompt[SAMPLE]["inputs"]["prompt"] = graph.link(made)
    run = client.run(graph.prompt)
    assert run.message.startswith("CONDITIONING of width 24; expected width 32, as LTX-Video takes it.")


def test_core_vision_output_replaces_the_image_encoder(server: Server, client: Client) -> None:
    model = server.model("HunyuanVideo-1.5-Diffusers-480p_i2v")
    graph = text_to_video(model)
    picture = graph.add("LoadImage", image="example.png")
    width = config_of(server, model, "image_encoder")["hidden_size"]
    seen = graph.add("StandInVision", seed=1, tokens=729, width=width)
    fitting = {"width": 64, "height": 64, "fit": "crop", "clip_vision_output": graph.link(seen)}
    encoded = graph.add("AnyGPUEncodeImage", pipeline=graph.link(LOAD), image=graph.link(picture), **fitting)
    graph.prompt[SAMPLE]["inputs"]["image"] = graph.link(encoded)
    first = saved_latents(server, client, graph, SAMPLE)
    graph.prompt[seen]["inputs"]["seed"] = 2
    assert not np.array_equal(saved_latents(server, client, graph, SAMPLE), first)
