"""The templates of core's own models, as the frontend posts them, on a card without fast bf16.

Only size, length and steps are smaller than shipped. The files have the published names and the formats that these
tell; their transformers leave fp16's range, and the sizes of encoders and VAEs are those of `small_core`.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from host import videos
from host.client import Client
from host.inside.asking import Inside
from host.prompts import SAVE, WORKFLOWS, Prompt, pictured, replay, shrunk_core
from host.server import Server, served

pytestmark = pytest.mark.host

MODELS = ("ltx2", "wan22", "minimax_h3", "hunyuan_video_15", "kandinsky5", "cosmos_predict2", "wan_animate")
LTX2, WAN22, H3, HUNYUAN, KANDINSKY, COSMOS, ANIMATE = (f"anygpu_{model}_on_an_older_gpu" for model in MODELS)
FRAMES = {LTX2: 9, WAN22: 9, H3: 22, HUNYUAN: 5, KANDINSKY: 5, COSMOS: 5, ANIMATE: 5}  # 22 is H3's next count
CORE = {LTX2: "fp32", WAN22: "fp16", H3: "fp32", HUNYUAN: "fp16", KANDINSKY: "fp32", COSMOS: "fp16", ANIMATE: "fp16"}
RATES = {COSMOS: 16, ANIMATE: 8}
SOUNDING = (LTX2, H3)
FIT, FIT_VAE = "AnyGPUFit", "AnyGPUFitVAE"


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path, inside: Inside) -> Iterator[Server]:
    """A server of this file alone, with the files; skips where there is no ComfyUI."""

    def write(server: Server) -> None:
        inside.play("template_files", "write", models=str(server.base / "models"))

    with served(tmp_path_factory.mktemp("older"), tiny_folder, write, gpu=True, older=True) as running:
        yield running


@pytest.fixture
def client(older: Server) -> Client:
    """A new connection; what earlier tests left is forgotten."""
    connection = Client(older.url)
    connection.free()
    return connection


def template(name: str) -> Prompt:
    """The prompt of a template, small."""
    prompt = shrunk_core(replay(WORKFLOWS / f"{name}.json"))
    for inputs in (made["inputs"] for made in prompt.values()):
        if FRAMES.get(name) == 5 and isinstance(inputs.get("length"), int):
            inputs |= {"length": 5, "width": 32, "height": 32}
    return prompt


def nodes(prompt: Prompt, kind: str) -> list[str]:
    """The ids of the nodes of a class."""
    return [node for node, made in prompt.items() if made["class_type"] == kind]


def without(prompt: Prompt, *names: str, dtype: str = "") -> Prompt:
    """The prompt with what our nodes are given in the place of their outputs of these names, a MODEL in ``dtype``."""
    outputs = {FIT: ("model", "vae", "clip"), FIT_VAE: ("vae",)}
    typed: Prompt = {}

    def linked(value: Any) -> Any:
        made = prompt[value[0]] if isinstance(value, list) else {"class_type": ""}
        name = outputs.get(made["class_type"], ("",) * 9)[value[1]] if isinstance(value, list) else ""
        if name not in names:
            return value
        if name != "model" or not dtype:
            return made["inputs"][name]
        chosen = {"model": made["inputs"][name], "dtype": dtype}
        typed["typed"] = {"class_type": "ModelComputeDtype", "inputs": chosen, "_meta": {"title": "typed"}}
        return ["typed", 0]

    relinked = {
        node: {**made, "inputs": {name: linked(value) for name, value in made["inputs"].items()}}
        for node, made in prompt.items()
    }
    return relinked | typed


def drawn(server: Server, client: Client, prompt: Prompt) -> np.ndarray:
    """The frames of a prompt without its video file, whose encoder refuses sound that is NaN; (F, H, W, 3), signed."""
    silent = {node: made for node, made in prompt.items() if made["class_type"] != SAVE}
    return videos.pictures(server, client.run(pictured(silent))).astype(int)


@pytest.mark.parametrize("name", FRAMES)
def test_draws_what_fp32_draws_where_plain_fp16_is_black(older: Server, client: Client, name: str) -> None:
    prompt = template(name)
    (fit,) = nodes(prompt, FIT)
    run = client.run(pictured(prompt))
    seen, said = videos.pictures(older, run).astype(int), run.texts_of(fit)[-1].splitlines()
    prompt[fit]["inputs"]["precision"] = "fp32"
    exact = drawn(older, client, prompt)
    plain = without(prompt, "model", "vae", "clip", dtype="fp16")
    assert not drawn(older, client, plain).any(), "the residual stays in fp16's range"
    frames = FRAMES[name]
    side = 32 if frames == 5 else 64
    assert seen.shape == (frames, side, side, 3) and seen.std() > 20, "black, or one colour"
    assert np.abs(seen - exact).max() <= 4
    assert [line.partition(";")[0] for line in said] == [
        "model: fitted to this device",
        "vae: fitted to this device",
        "clip: nothing to change on this device",
    ]
    layers = r"; ((?:plain fp16|fp16-safe) in .*) of (\d+) layers called(?: \(left: (\d+) Conv3d\))?"
    counted = re.search(r"; precision fp16-safe; .*" + layers, said[0])
    own, called, left = re.findall(r" in (\d+)", counted[1]), int(counted[2]), int(counted[3] or 0)
    assert sum(map(int, own)) == called - left, said
    assert f"AnyGPU: model: precision fp16-safe: auto: core would compute in {CORE[name]}" in older.log
    record = next(record for record in run.files() if record["filename"].startswith(name))
    assert videos.facts(older.output(record)) == videos.Facts(side, side, frames, RATES.get(name, 24))
    with av.open(str(older.output(record))) as video:
        sound = [np.abs(frame.to_ndarray()).max() for frame in video.decode(audio=0)] if video.streams.audio else []
    assert (max(sound) > 0) if name in SOUNDING else not sound


def test_a_video_that_its_vae_made_black_is_rescued(older: Server, client: Client, inside: Inside) -> None:
    """The sampling of one template, and the template that decodes it again."""
    inside.play("template_files", "write_loud_vae", models=str(older.base / "models"))
    black = drawn(older, client, without(template(WAN22), "vae"))
    assert not black.any(), "this VAE works in fp16: the test tests nothing"
    prompt = template("anygpu_rescue_a_vae_decode")
    (fit,), (decode,) = nodes(prompt, FIT_VAE), nodes(prompt, "VAEDecode")
    run = client.run(pictured(prompt))
    seen, said = videos.pictures(older, run).astype(int), run.texts_of(decode)[-1]
    prompt[fit]["inputs"]["precision"] = "fp32"
    assert seen.shape == black.shape and seen.std() > 20
    assert np.array_equal(seen, drawn(older, client, prompt))
    fault = "decode as it is: NaN or infinite values; now "
    assert said.splitlines() == ["decode: fp32", f"{fault}as it is once more", f"{fault}fp32"]
