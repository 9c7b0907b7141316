"""Every shipped workflow, as ComfyUI's own frontend posts it, runs to a saved video on tiny checkpoints."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from host import lora_files, videos
from host.client import Client
from host.prompts import SAVE, WORKFLOWS, filmed, pictured, replay, shrunk
from host.server import Server

pytestmark = pytest.mark.host

FRAMES = {  # where it is not the 9 frames asked for
    "mochi_text_to_video": 13,  # the next of its counts
    "ltx_video_to_video": 17,  # the clip's own
    "framepack_first_last_frame": 17,  # the end image is at the end of the last section
}
RATES = {"ltx_video_to_video": 8}  # the clip's own rate


@pytest.mark.parametrize("workflow", filmed(), ids=lambda path: path.stem)
def test_saves_a_video_of_the_asked_size_length_and_rate(server: Server, client: Client, workflow: Path) -> None:
    server.every_model()
    prompt = shrunk(replay(workflow))
    lora_files.furnish(server, prompt)
    sampler = next(node for node in prompt.values() if node["class_type"].startswith("AnyGPUSample"))
    run = client.run(prompt)
    assert run.ending == "execution_success", run.message
    ours = {node for node, facts in prompt.items() if facts["class_type"].startswith("AnyGPU")}
    assert ours <= set(run.executed)
    (record,) = run.files()
    rate = RATES.get(workflow.stem, sampler["inputs"]["fps"])
    expected = videos.Facts(width=64, height=64, frames=FRAMES.get(workflow.stem, 9), fps=rate)
    assert videos.facts(server.output(record)) == expected
    assert record["subfolder"] == "video" and record["filename"].startswith(workflow.stem)
    moving = videos.frames(server.output(record)).astype(np.int16)
    assert np.ptp(moving) > 0, "every pixel of every frame is the same"


@pytest.mark.parametrize("workflow", filmed(), ids=lambda path: path.stem)
def test_ends_in_core_save_video(workflow: Path) -> None:
    prompt = replay(workflow)
    assert [node["class_type"] for node in prompt.values()].count(SAVE) == 1


def test_what_was_sampled_comes_back_by_the_workflow_for_it(server: Server, client: Client) -> None:
    server.every_model()
    names = ("ltx_text_to_video", "ltx_recover_latents")
    runs = [client.run(pictured(shrunk(replay(WORKFLOWS / f"{name}.json")))) for name in names]
    sampled, recovered = (videos.pictures(server, run) for run in runs)
    assert np.array_equal(recovered, sampled)
