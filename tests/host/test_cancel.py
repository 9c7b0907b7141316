"""Cancel is obeyed long before the run would end, and the next run equals a fresh one bit for bit."""

import re

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file

from host.client import Client, Run
from host.prompts import Graph, film, text_to_video
from host.server import Server

pytestmark = pytest.mark.host

MODELS = ("LTX-Video", "HunyuanVideo", "HunyuanVideo-1.5-Diffusers-480p_t2v", "mochi-1-preview")
PROMPT, SAMPLE, DECODE = "2", "3", "4"  # ids in text_to_video
STEPS = 1000  # of a sampling that is cancelled near its start


def watched(model: str, **settings: int) -> Graph:
    """Text to video whose latents and frames are saved without loss too."""
    graph = text_to_video(model, **settings)
    graph.add("SaveLatent", samples=graph.link(SAMPLE), filename_prefix="latent")
    graph.add("SaveImage", images=graph.link(DECODE), filename_prefix="frame")
    return graph


def steps_done(run: Run) -> float:
    """Denoising steps that the bar has shown."""
    return max((done for node, done, total in run.progress if node == SAMPLE and total == STEPS), default=0)


def parts_decoded(run: Run) -> float:
    """Parts of the decoding that the bar has shown; before them it shows the bytes of the VAE being read."""
    return max((done for node, done, total in run.progress if node == DECODE and total < 10_000), default=0)


def results(server: Server, run: Run) -> tuple[np.ndarray, np.ndarray]:
    """The latents and the frames that a run saved."""
    assert run.ending == "execution_success", run.message
    latent = run.outputs["6"]["latents"][0]
    frames = [np.asarray(Image.open(server.output(record))) for record in run.outputs["7"]["images"]]
    return load_file(server.output(latent))["latent_tensor"], np.stack(frames)


def assert_next_run_is_fresh(server: Server, client: Client, model: str, cancelled: Run) -> None:
    """The run after ``cancelled``, in the same server with what that left, equals one where nothing was before."""
    assert cancelled.ending == "execution_interrupted", cancelled.message
    shown = [cancelled.texts_of(node)[-1] for node in (SAMPLE, DECODE) if cancelled.texts_of(node)]
    assert re.match("cancelled at (sampling|decoding)", shown[-1]), shown
    after = client.run(watched(model).prompt)
    assert "1" in after.cached, "the loaded pipeline of the cancelled run was to be used again"
    client.free()
    fresh = client.run(watched(model).prompt)
    assert not fresh.cached
    for found, expected in zip(results(server, after), results(server, fresh), strict=True):
        assert np.array_equal(found, expected)


@pytest.mark.parametrize("model", MODELS)
def test_in_sampling(server: Server, client: Client, model: str) -> None:
    server.model(model)
    long = watched(model, steps=STEPS)
    run = client.run(long.prompt, cancel_when=lambda node, run: steps_done(run) >= 3)
    assert DECODE not in run.executed and steps_done(run) < STEPS / 2
    assert_next_run_is_fresh(server, client, model, run)


@pytest.mark.parametrize("model", MODELS)
def test_in_decode(server: Server, client: Client, model: str) -> None:
    server.model(model)
    big = watched(model, width=256, height=256, frames=49)
    run = client.run(big.prompt, cancel_when=lambda node, run: parts_decoded(run) >= 2)
    total = max(total for node, _, total in run.progress if node == DECODE and total < 10_000)
    assert "5" not in run.executed and parts_decoded(run) < total
    assert_next_run_is_fresh(server, client, model, run)


def test_of_framepack_keeps_the_finished_sections(server: Server, client: Client) -> None:
    for model in ("FramePackI2V_HY", "HunyuanVideo", "flux_redux_bfl"):
        server.model(model)
    graph, sample = film(seed=1)
    kept = server.base / "user" / "anygpu" / "kept"
    finished_two = lambda node, run: any("section 2 of" in text for text in server.unfinished())  # noqa: E731
    run = client.run(graph.prompt, cancel_when=finished_two)
    assert run.ending == "execution_interrupted", run.message
    (finished,) = [path for path in kept.glob("*_framepack_1_*.safetensors")]
    assert "finished sections are saved" in server.log
    assert np.isfinite(load_file(finished)["latent_tensor"]).all()
    again = client.finished(graph.prompt)
    went_on = re.search(r"continues after section (\d+) of", " ".join(again.texts_of(sample)))
    assert went_on and int(went_on[1]) >= 2, "the next may have been finished before the cancel came"
    assert not server.unfinished(), "what is whole is not gone on with"
    client.free()
    fresh = client.run(graph.prompt)
    records = [server.output(run.outputs["6"]["latents"][0]) for run in (again, fresh)]
    first, second = (load_file(path)["latent_tensor"] for path in records)
    assert np.array_equal(first, second), "going on changed the video"
