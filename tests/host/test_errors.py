"""What goes wrong ends in one line that says what was found, what was expected and what to do."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny

from host.client import Client, Refused, Run
from host.prompts import Graph, loading, sampling, text_to_video
from host.server import PUBLISHED, Server

pytestmark = pytest.mark.host

LOAD, PROMPT, SAMPLE, DECODE = "1234"
Damage = Callable[[Path], None]


def assert_readable(run: Run, node_type: str, *parts: str) -> None:
    """The run ended in ``node_type`` with one line that has every one of ``parts``, an expectation and a remedy."""
    assert run.ending == "execution_error", run.ending
    assert run.error["node_type"] == node_type, run.message
    assert "\n" not in run.message and "; expected " in run.message and run.message.endswith("."), run.message
    for part in parts:
        assert part in run.message, run.message


def assert_still_alive(server: Server, client: Client) -> None:
    """A good prompt runs after the bad one."""
    server.model("LTX-Video")
    client.finished(text_to_video("LTX-Video").prompt)


def test_no_model_at_all(server: Server, client: Client) -> None:
    with server.without_models() as models:
        run = client.run(text_to_video("no model found").prompt)
    assert_readable(
        run, "AnyGPULoadPipeline", "no model in", str(models), "LTX-Video. Download https://huggingface.co/"
    )
    assert_still_alive(server, client)


def test_a_model_that_is_not_there_is_named_before_anything_is_read(server: Server, client: Client) -> None:
    server.model("LTX-Video")
    run = client.run(text_to_video("Nowhere").prompt)
    assert_readable(run, "AnyGPULoadPipeline", "Nowhere")
    assert_still_alive(server, client)


def _cut_shard(folder: Path) -> None:
    (shard,) = (folder / "transformer").glob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-100])


def _pickle(folder: Path) -> None:
    (weights,) = (folder / "vae").glob("*.safetensors")
    weights.rename(weights.with_suffix(".bin"))


DAMAGES: dict[str, tuple[Damage, tuple[str, ...]]] = {
    "broken_index": (lambda folder: (folder / "model_index.json").write_text("{") and None, ("model_index.json",)),
    "unknown_family": (
        lambda folder: (folder / "model_index.json").write_text(json.dumps({"_class_name": "OtherPipeline"})) and None,
        ("'OtherPipeline'", "LTX-Video"),
    ),
    "missing_part": (lambda folder: shutil.rmtree(folder / "vae"), ("vae",)),
    "cut_weights": (_cut_shard, ("safetensors",)),
    "pickle": (_pickle, ("vae", "safetensors")),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_model(server: Server, client: Client, tmp_path: Path, damage: str) -> None:
    broken, parts = DAMAGES[damage]
    copied = tmp_path / damage
    shutil.copytree(tiny.build(PUBLISHED["LTX-Video"], server.tiny_folder), copied)
    broken(copied)
    name = server.weights_on(copied, damage)
    try:
        run = client.run(text_to_video(name).prompt)
    finally:
        (server.base / "models" / "diffusers" / name).unlink()
    assert_readable(run, "AnyGPULoadPipeline", *parts)


BAD_INPUT: dict[str, tuple[dict[str, object], str, tuple[str, ...]]] = {
    "few_steps": ({"steps": 1}, "AnyGPUSample", ("steps 1", "at least 2 steps", "Set steps to 2 or more")),
    "large_size": (
        {"width": 4096, "height": 4096, "frames": 4097},
        "AnyGPUSample",
        ("4096x4096, 4097 frames", "small enough for this model's noise schedule", "Lower width, height or frames"),
    ),
    "cfg_order": ({"cfg_start": 0.9, "cfg_end": 0.1}, "AnyGPUSample", ("cfg_start 0.9", "Swap them")),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input(server: Server, client: Client, case: str) -> None:
    settings, node_type, parts = BAD_INPUT[case]
    run = client.run(text_to_video(server.model("LTX-Video"), **settings).prompt)
    assert_readable(run, node_type, *parts)


def test_out_of_the_inputs_range_is_refused_before_anything_runs(server: Server, client: Client) -> None:
    with pytest.raises(Refused, match="bigger than max"):
        client.run(text_to_video(server.model("LTX-Video"), steps=1001).prompt)


def test_offload_on_a_cpu(server: Server, client: Client) -> None:
    graph = text_to_video(server.model("LTX-Video"))
    graph.prompt[LOAD]["inputs"]["offload"] = "group"
    assert_readable(client.run(graph.prompt), "AnyGPULoadPipeline", "group", "auto")


@pytest.mark.parametrize("node", [DECODE, SAMPLE])
def test_latents_and_a_prompt_of_another_family(server: Server, client: Client, node: str) -> None:
    graph = text_to_video(server.model("LTX-Video"))
    other = graph.add("AnyGPULoadPipeline", **loading(server.model("mochi-1-preview")))
    graph.prompt[node]["inputs"]["pipeline"] = graph.link(other)
    assert_readable(client.run(graph.prompt), graph.prompt[node]["class_type"], "'ltx'", "'mochi'")


def test_latents_of_a_picture(server: Server, client: Client) -> None:
    graph = text_to_video(server.model("LTX-Video"))
    flat = graph.add("EmptyLatentImage", width=64, height=64, batch_size=1)
    graph.prompt[DECODE]["inputs"]["latent"] = graph.link(flat)
    assert_readable(client.run(graph.prompt), "AnyGPUDecode", "LATENT of (1, 4, 8, 8)", "(1, C, T, H, W)")


def with_picture(server: Server, model: str, kind: str = "LoadImage") -> tuple[Graph, str]:
    """Text to video and a picture that is encoded and given to the sampler; the graph and the encoder's id."""
    graph = text_to_video(server.model(model))
    picture = graph.add("LoadImage", image="example.png")
    if kind == "alpha":
        picture = graph.add("JoinImageWithAlpha", image=graph.link(picture), alpha=graph.link(picture, 1))
    encoded = graph.add(
        "AnyGPUEncodeImage", pipeline=graph.link(LOAD), image=graph.link(picture), width=64, height=64, fit="crop"
    )
    graph.prompt[SAMPLE]["inputs"]["image"] = graph.link(encoded)
    return graph, encoded


@pytest.mark.parametrize(
    ("model", "kind", "width", "node", "parts"),
    [
        ("LTX-Video", "alpha", 64, "AnyGPUEncodeImage", ("alpha channel", "3 channels")),
        ("LTX-Video", "LoadImage", 128, "AnyGPUSample", ("64x64", "128x64")),
        ("HunyuanVideo", "LoadImage", 64, "AnyGPUSample", ("text-to-video checkpoint 'HunyuanVideo'",)),
        ("mochi-1-preview", "LoadImage", 64, "AnyGPUEncodeImage", ("Mochi 1",)),
    ],
)
def test_a_picture_that_does_not_fit(
    server: Server, client: Client, model: str, kind: str, width: int, node: str, parts: tuple[str, ...]
) -> None:
    graph, _ = with_picture(server, model, kind)
    graph.prompt[SAMPLE]["inputs"]["width"] = width
    assert_readable(client.run(graph.prompt), node, *parts)


def test_no_picture_for_an_image_checkpoint(server: Server, client: Client) -> None:
    run = client.run(text_to_video(server.model("HunyuanVideo-1.5-Diffusers-480p_i2v")).prompt)
    assert_readable(run, "AnyGPUSample", "no image", "AnyGPU Encode Image")


def test_framepack_sampler_with_another_family(server: Server, client: Client) -> None:
    graph, encoded = with_picture(server, "LTX-Video")
    inputs = {name: value for name, value in sampling().items() if name not in ("width", "height", "frames")}
    links = {"pipeline": graph.link(LOAD), "prompt": graph.link(PROMPT), "image": graph.link(encoded)}
    graph.prompt[SAMPLE] = {"class_type": "AnyGPUSampleFramePack", "inputs": {**inputs, **links, "clip_seconds": 1.0}}
    assert_readable(client.run(graph.prompt), "AnyGPUSampleFramePack", "LTX-Video", "Use AnyGPU Sample")


def test_framepack_without_the_parts_it_borrows(server: Server, client: Client) -> None:
    models = server.base / "models" / "diffusers"
    server.model("FramePackI2V_HY")
    providers = [link for link in models.iterdir() if link.name != "FramePackI2V_HY"]
    targets = {link: link.resolve() for link in providers}
    for link in providers:
        link.unlink()
    try:
        run = client.run(text_to_video("FramePackI2V_HY").prompt)
    finally:
        for link, target in targets.items():
            link.symlink_to(target, target_is_directory=True)
    assert_readable(run, "AnyGPULoadPipeline", "no base found for FramePack", "huggingface.co/hunyuanvideo-community")


def test_after_all_this_a_good_prompt_runs(server: Server, client: Client) -> None:
    assert_still_alive(server, client)
    known = client.get("/object_info")
    assert all(f"AnyGPU{name}" in known for name in ("LoadPipeline", "EncodePrompt", "Sample", "Decode"))
