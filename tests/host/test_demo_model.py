"""Without any model installed, the first choice of the load node draws what it is asked, at once."""

from __future__ import annotations

import pytest
import torch
from anygpu.pipelines.demo import demo_models
from anygpu.pipelines.demo.scenes import scene_of

from host.client import Client
from host.prompts import pictured, text_to_video
from host.server import Server
from host.videos import pictures

pytestmark = pytest.mark.host


def test_a_demo_model_draws_the_asked_colours_with_nothing_chosen(server: Server, client: Client) -> None:
    own = dict.fromkeys(("width", "height", "frames", "steps", "fps"), 0)
    for choice in demo_models():
        graph = text_to_video(choice, "a white square stays still on blue", **own)
        frames = torch.from_numpy(pictures(server, client.run(pictured(graph.prompt)))) / 255
        assert frames.shape == (9, 64, 64, 3)
        assert (scene_of(frames).colour, scene_of(frames).ground) == ("white", "blue")
