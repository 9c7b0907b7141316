"""Every shipped workflow, as ComfyUI's own frontend posts it, runs to a saved video on tiny checkpoints.

With the demo model, where it can run one, and then the video shows what was asked for.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from anygpu.pipelines.demo import demo_models
from anygpu.pipelines.demo.scenes import scene_of

from host import lora_files, single_files, videos
from host.client import Client
from host.prompts import (
    DEMO_RATE,
    PREFIX,
    SAVE,
    SCENE,
    WORKFLOWS,
    Prompt,
    filmed,
    from_files,
    pictured,
    replay,
    shrunk,
    with_demo_model,
)
from host.server import Server

pytestmark = pytest.mark.host

EXPORTED = ("framepack_first_last_frame", "hunyuan_video_image_to_video", "hunyuan_video_15_text_to_video")
MOCHI = ("anygpu_mochi_text_to_video", "anygpu_mochi_text_to_video_from_files")
ASKED = dict.fromkeys(MOCHI, 7)  # frames, where they are not 9: what its demo model draws
RATES = {"anygpu_ltx_two_passes": 30, "anygpu_ltx": 25, "anygpu_mochi": 30, "anygpu_hunyuan": 24}  # of the models' own
DRAWN = {  # workflow: the prompt for the demo model of the family. It never saw a last frame, so that one is missing
    "anygpu_ltx_text_to_video": "a white triangle grows on black",
    "anygpu_ltx_image_to_video": SCENE,
    "anygpu_ltx_video_to_video": "a green square moves left on blue",  # the clip's square is red
    "anygpu_hunyuan_video_text_to_video": "a black triangle moves up on yellow",
    "anygpu_hunyuan_video_15_text_to_video": "a green square moves down on red",
    "anygpu_mochi_text_to_video": "a yellow circle grows on blue",
}


@pytest.mark.parametrize("workflow", [*filmed(), *from_files()], ids=lambda path: path.stem)
def test_saves_a_video_of_the_asked_size_length_and_rate(server: Server, client: Client, workflow: Path) -> None:
    if workflow.stem not in DRAWN:
        server.every_model()
    asked = ASKED.get(workflow.stem, 9)
    prompt = drawable(shrunk(replay(workflow), frames=asked), workflow.stem)
    lora_files.install(server, prompt)
    single_files.install(server, prompt, workflow.stem)
    sampler = next(node for node in prompt.values() if node["class_type"].startswith("AnyGPUSample"))
    run = client.finished(prompt)
    ours = {node for node, facts in prompt.items() if facts["class_type"].startswith("AnyGPU")}
    assert ours <= set(run.executed)
    (record,) = run.files()
    own = next((rate for name, rate in RATES.items() if workflow.stem.startswith(name)), 0)
    rate = DEMO_RATE if workflow.stem in DRAWN else sampler["inputs"]["fps"] or own
    expected = videos.Facts(width=64, height=64, frames=asked, fps=rate)
    assert videos.facts(server.output(record)) == expected
    assert record["subfolder"] == "video" and record["filename"].startswith(workflow.stem)
    moving = videos.frames(server.output(record))
    if workflow.stem in DRAWN:
        assert seen(moving) == DRAWN[workflow.stem]
    else:
        assert np.ptp(moving.astype(np.int16)) > 0, "every pixel of every frame is the same"


@pytest.mark.parametrize("name", ["anygpu_ltx_text_to_video", "anygpu_framepack_image_to_video"])
def test_a_prompt_without_what_may_be_left_out_gives_the_same_video(server: Server, client: Client, name: str) -> None:
    server.every_model()
    whole = shrunk(replay(WORKFLOWS / f"{name}.json"), frames=9)
    short = {node: {**made, "inputs": dict(made["inputs"])} for node, made in whole.items()}
    left_out = []
    for node in short.values():
        offered = client.get(f"/object_info/{node['class_type']}")[node["class_type"]]["input"]
        optional = {key: given[1] for key, given in offered.get("optional", {}).items() if len(given) > 1}
        for key, options in optional.items():
            if "default" in options and node["inputs"].get(key, []) == options["default"]:
                left_out.append(key)
                del node["inputs"][key]
    assert {"variant", "base", "image_encoder", "scheduler", "shift", "cfg_start", "cfg_end"} <= set(left_out)
    shown, runs = [], []
    for prompt in (whole, short):
        runs.append(run := client.run(pictured(prompt)))
        shown.append(videos.pictures(server, run).astype(np.int16))
        client.free()
    apart = np.abs(shown[0] - shown[1])
    said = "\n".join(f"{run.cached}: {run.texts}" for run in runs)  # as text, which is shown whole
    assert not apart.any(), f"off by {apart.max()} in frames {apart.any((1, 2, 3))}\n{said}"
    assert np.ptp(shown[0]) > 0


@pytest.mark.parametrize(
    "name", ["ltx_text_to_video", *(pytest.param(name, marks=pytest.mark.full) for name in EXPORTED)]
)
def test_an_export_of_a_version_before_still_runs(server: Server, client: Client, name: str) -> None:
    server.every_model()
    saved = WORKFLOWS.parent / "tests" / "fixtures" / "saved" / f"{name}.json"
    run = client.run(pictured(shrunk(json.loads(saved.read_text(encoding="utf-8"))["prompt"])))
    assert run.ending == "execution_success" and run.files(), run.message


def drawable(prompt: Prompt, name: str) -> Prompt:
    """The replay of a workflow, with the demo model where that can run it."""
    models = {folder.name: choice for choice, folder in demo_models().items()}
    if name not in DRAWN:
        return prompt
    family = max(filter(name.removeprefix(PREFIX).startswith, models), key=len)
    return with_demo_model(prompt, models[family], DRAWN[name])


def seen(frames: np.ndarray) -> str:
    """What the checker reads in frames (F, H, W, 3) uint8, as a prompt."""
    return scene_of(torch.from_numpy(frames) / 255).caption


@pytest.mark.parametrize("workflow", filmed(), ids=lambda path: path.stem)
def test_ends_in_core_save_video(workflow: Path) -> None:
    prompt = replay(workflow)
    assert [node["class_type"] for node in prompt.values()].count(SAVE) == 1


def test_what_was_sampled_comes_back_by_the_workflow_for_it(server: Server, client: Client) -> None:
    names, text = ("anygpu_ltx_text_to_video", "anygpu_ltx_recover_latents"), "a yellow circle moves up on green"
    model = next(choice for choice, folder in demo_models().items() if folder.name == "ltx")
    prompts = [with_demo_model(shrunk(replay(WORKFLOWS / f"{name}.json")), model, text) for name in names]
    sampled, recovered = (videos.pictures(server, client.run(pictured(prompt))) for prompt in prompts)
    assert np.array_equal(recovered, sampled) and seen(recovered) == text
