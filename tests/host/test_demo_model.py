"""Without any model installed, the first choice of the load node draws what it is asked, at once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from anygpu.pipelines.demo import demo_models
from anygpu.pipelines.demo.scenes import scene_of
from anygpu.pipelines.loading.folder import family_of_folder

from host.client import Client
from host.prompts import WORKFLOWS, Graph, pictured, replay, text_to_video
from host.server import Server
from host.videos import pictures

pytestmark = pytest.mark.host
PUBLISHED = {
    "LTX-Video": "ltx_text_to_video",
    "HunyuanVideo": "hunyuan_video_text_to_video",
    "FramePackI2V_HY": "framepack_image_to_video",
}


def test_a_demo_model_draws_what_is_asked_with_nothing_chosen(server: Server, client: Client) -> None:
    own = dict.fromkeys(("width", "height", "frames", "steps", "fps"), 0)
    for choice, folder in demo_models().items():
        if family_of_folder(folder).sections:
            continue  # it starts from a picture, in nodes of its own
        prompt = "a white square stays still on blue"
        graph = text_to_video(choice, prompt, **own)
        frames = torch.from_numpy(pictures(server, client.run(pictured(graph.prompt)))) / 255
        assert frames.shape == (9, 64, 64, 3)
        assert scene_of(frames).caption == prompt


def test_the_shipped_workflows_draw_with_one_while_no_model_is_installed(server: Server, client: Client) -> None:
    models = server.base / "models" / "diffusers"
    away = models.rename(models.with_name("away"))
    models.mkdir()
    try:
        runs = {name: client.run(pictured(replay(WORKFLOWS / f"{file}.json"))) for name, file in PUBLISHED.items()}
    finally:
        models.rmdir()
        away.rename(models)
    for name, run in runs.items():
        assert run.ending == "execution_success", run.message
        seen = scene_of(torch.from_numpy(pictures(server, run)) / 255)
        assert seen.caption == "a red circle moves left on blue"
        assert any(f"in place of {name!r}" in text for _, text in run.texts)


def test_a_batch_is_the_videos_of_its_seeds_and_core_picks_one(server: Server, client: Client) -> None:
    own = dict.fromkeys(("width", "height", "frames", "steps", "fps"), 0)

    def graph(**settings: int) -> Graph:
        return text_to_video(next(iter(demo_models())), "a green square grows on white", **own, **settings)

    alone = [pictures(server, client.run(pictured(graph(seed=seed).prompt))) for seed in (7, 8)]
    both = graph(seed=7, batch_size=2)
    run = client.run(pictured(both.prompt))
    assert np.array_equal(pictures(server, run), np.concatenate(alone))
    assert len([record for record in run.files() if record["filename"].endswith(".mp4")]) == 2
    picked = both.add("LatentFromBatch", samples=both.link("3"), batch_index=1, length=1)
    both.prompt["4"]["inputs"]["latent"] = both.link(picked)
    assert np.array_equal(pictures(server, client.run(pictured(both.prompt))), alone[1])
