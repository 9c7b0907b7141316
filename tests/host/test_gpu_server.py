"""A real ComfyUI server that computes on the simulated accelerator: its buttons, a full device, core's nodes."""

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from host.client import Client
from host.prompts import PICTURES, Graph, core_sampled, pictured, replay, shrunk_core, text_to_video
from host.server import Server, served
from host.videos import pictures

pytestmark = pytest.mark.host

LOAD, PROMPT, SAMPLE, DECODE, SAVE = "12345"
SOON = 60.0  # seconds at most until the server's worker has done what a button asks


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Iterator[Server]:
    """A server of this file alone; skips where there is no ComfyUI."""
    with served(tmp_path_factory.mktemp("gpu"), tiny_folder, gpu=True) as running:
        yield running


@pytest.fixture
def client(gpu: Server) -> Client:
    """A new connection to a device without a limit, on which nothing is."""
    connection = Client(gpu.url)
    connection.post("/simulated/limit", {"bytes": None})
    connection.free()
    emptied(connection)
    return connection


def on_device(client: Client) -> int:
    """Bytes on the simulated device."""
    return int(client.get("/simulated/memory")["allocated_bytes"])


def emptied(client: Client, **asked: bool) -> None:
    """Returns once nothing is on the device. Core loses a wish that comes as its worker begins to wait, so it is
    ``asked`` again."""
    until = time.monotonic() + SOON
    while on_device(client) and time.monotonic() < until:
        if asked:
            client.post("/free", asked)
        time.sleep(0.1)
    assert on_device(client) == 0, "something stayed on the device"


def test_unload_models_leaves_results_and_free_memory_forgets_them(gpu: Server, client: Client) -> None:
    prompt = pictured(text_to_video(gpu.model("LTX-Video")).prompt)
    first = client.run(prompt)
    assert "offload comfyui on acc:0" in " ".join(first.texts_of(LOAD)) and on_device(client) > 0
    client.post("/free", {"unload_models": True})
    emptied(client, unload_models=True)
    assert client.run(prompt).executed == [], "what was computed is forgotten"
    prompt[SAMPLE]["inputs"]["seed"] = 2
    assert set(client.run(prompt).executed) == {SAMPLE, DECODE, SAVE, PICTURES}
    assert on_device(client) > 0
    client.post("/free", {"unload_models": True, "free_memory": True})
    emptied(client)
    prompt[SAMPLE]["inputs"]["seed"] = 1
    again = client.run(prompt)
    assert set(again.executed) == {LOAD, PROMPT, SAMPLE, DECODE, SAVE, PICTURES}
    assert np.array_equal(pictures(gpu, again), pictures(gpu, first))


def test_another_graph_leaves_nothing_of_the_first(gpu: Server, client: Client) -> None:
    client.run(text_to_video(gpu.model("mochi-1-preview")).prompt)
    assert on_device(client) > 0
    other = Graph()
    empty = other.add("EmptyImage", width=64, height=64, batch_size=1, color=0)
    other.add("SaveImage", images=other.link(empty), filename_prefix="other")
    client.post("/free", {"free_memory": True})
    client.finished(other.prompt)
    emptied(client)


def test_a_cancel_between_steps_and_the_next_run(gpu: Server, client: Client) -> None:
    prompt = pictured(text_to_video(gpu.model("HunyuanVideo")).prompt)
    expected = pictures(gpu, client.run(prompt))
    client.free()
    long = text_to_video("HunyuanVideo", steps=1000)
    run = client.run(long.prompt, cancel_when=lambda node, run: any(total == 1000 for _, _, total in run.progress))
    assert run.ending == "execution_interrupted"
    assert max(done for _, done, total in run.progress if total == 1000) < 500, "near its start, as it was asked"
    assert on_device(client) > 0, "nothing says that it was to leave"
    assert np.array_equal(pictures(gpu, client.run(prompt)), expected)


def test_a_full_device_costs_one_run_and_nothing_that_was_done(gpu: Server, client: Client) -> None:
    prompt = pictured(text_to_video(gpu.model("LTX-Video"), seed=2).prompt)
    expected = pictures(gpu, client.run(prompt))
    client.free()
    client.run(text_to_video("LTX-Video", seed=1).prompt)
    client.post("/free", {"unload_models": True})
    emptied(client, unload_models=True)
    client.post("/simulated/limit", {"bytes": 30_000})
    full = client.run(prompt)
    assert full.ending == "execution_error" and full.error["node_id"] == SAMPLE
    assert full.message.startswith("out of memory while sampling 64x64, 9 frames on Simulated accelerator 0")
    assert full.error["exception_type"].endswith("OutOfMemoryError"), "ComfyUI unloads for no other"
    emptied(client)
    client.post("/simulated/limit", {"bytes": None})
    again = client.run(prompt)
    assert set(again.executed) == {SAMPLE, DECODE, SAVE, PICTURES}, "what was done is done again"
    assert np.array_equal(pictures(gpu, again), expected)


@pytest.mark.parametrize("workflow", core_sampled(), ids=lambda path: path.stem)
def test_core_sampler_and_vae_nodes_give_the_device_back(gpu: Server, client: Client, workflow: Path) -> None:
    """One workflow per family: the models that core's nodes hold leave when asked to, and come again."""
    gpu.every_model()
    prompt = pictured(shrunk_core(replay(workflow)))
    expected = pictures(gpu, client.run(prompt))
    assert on_device(client) > 0
    client.post("/free", {"unload_models": True, "free_memory": True})
    emptied(client)
    assert np.array_equal(pictures(gpu, client.run(prompt)), expected)
