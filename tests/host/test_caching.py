"""ComfyUI runs again only what a change touches."""

import pytest

from host.client import Client
from host.inside.asking import Inside
from host.prompts import Graph, loading, text_to_video
from host.server import Server

pytestmark = pytest.mark.host

LOAD, PROMPT, SAMPLE, DECODE, SAVE = "12345"


@pytest.fixture
def ran(server: Server, client: Client) -> Client:
    """A client whose first run of LTX-Video, seed 1, is done."""
    server.model("LTX-Video")
    assert client.run(text_to_video("LTX-Video", seed=1).prompt).executed == [LOAD, PROMPT, SAMPLE, DECODE, SAVE]
    return client


def test_nothing_changes_nothing_runs(ran: Client) -> None:
    assert ran.run(text_to_video("LTX-Video", seed=1).prompt).executed == []


def test_the_seed_runs_sampling_again_and_what_follows(ran: Client) -> None:
    run = ran.run(text_to_video("LTX-Video", seed=2).prompt)
    assert run.executed == [SAMPLE, DECODE, SAVE]
    assert run.cached >= {LOAD, PROMPT}


def test_the_prompt_does_not_load_again(ran: Client) -> None:
    run = ran.run(text_to_video("LTX-Video", text="a dog runs", seed=1).prompt)
    assert run.executed == [PROMPT, SAMPLE, DECODE, SAVE]


def test_new_files_of_the_model_load_again(ran: Client, server: Server) -> None:
    index = server.base / "models" / "diffusers" / "LTX-Video" / "model_index.json"
    index.touch()
    assert ran.run(text_to_video("LTX-Video", seed=1).prompt).executed[0] == LOAD


@pytest.mark.parametrize("touched", ["HunyuanVideo/vae/config.json", "flux_redux_bfl/image_encoder/config.json"])
def test_new_files_of_a_folder_that_provides_parts_load_again(server: Server, client: Client, touched: str) -> None:
    for model in ("FramePackI2V_HY", "HunyuanVideo", "flux_redux_bfl"):
        server.model(model)
    graph = Graph()
    load = graph.add("AnyGPULoadPipeline", **loading("FramePackI2V_HY"))
    plan = graph.add("AnyGPUMemoryPlan", pipeline=graph.link(load), width=64, height=64, frames=9)
    client.run(graph.prompt)
    assert client.run(graph.prompt).executed == [plan]
    (server.base / "models" / "diffusers" / touched).touch()
    assert client.run(graph.prompt).executed == [load, plan]


@pytest.mark.parametrize("boxes", [0, 1, 2])
def test_core_takes_a_paused_prompt_with_lists_of_widgets_again(inside: Inside, boxes: int) -> None:
    found = inside.play("list_widgets", "paused", boxes=boxes)
    assert found.pop("unwrapped") is False, "core takes them as they are: the wrapping can go"
    assert found == {"queued": True, "known": True, "nodes": ["1", "2"], "resumed": True}
