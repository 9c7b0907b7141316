"""Core's loaders, KSampler and VAE Decode with our nodes between them, through a real server."""

import numpy as np
import pytest

from host.client import Client
from host.inside.asking import Inside
from host.prompts import PICTURES, Graph, pictured
from host.server import Server
from host.videos import pictures

pytestmark = pytest.mark.host


ALONE, TOGETHER = "AnyGPUFitModel", "AnyGPUFit"


def graph_of(files: dict[str, str], fitted: str = "") -> tuple[Graph, str]:
    """A short text to video with core's nodes; and the id of the node ``fitted``, which fits its MODEL."""
    graph, fit = Graph(), ""
    model = graph.link(graph.add("UNETLoader", unet_name=files["model"], weight_dtype="default"))
    vae = graph.link(graph.add("VAELoader", vae_name=files["vae"]))
    if fitted == TOGETHER:
        clip = graph.link(graph.add("StandInClip"))
        fit = graph.add(TOGETHER, model=model, vae=vae, clip=clip, precision="auto")
        model, vae = graph.link(fit), graph.link(fit, 1)
    elif fitted:
        chosen = {"precision": "auto", "attention": "bounded", "keep_latents": "always"}
        fit = graph.add(ALONE, model=model, **chosen)
        model = graph.link(fit)
        vae = graph.link(graph.add("AnyGPUFitVAE", vae=vae, precision="auto", causal_masks=True, keep_latents="auto"))
    made = {"tokens": 7, "width": files["width"], "pooled": 0}
    positive, negative = (graph.link(graph.add("StandInConditioning", seed=seed, **made)) for seed in (1, 2))
    empty = graph.link(graph.add("EmptyHunyuanLatentVideo", width=64, height=64, length=5, batch_size=1))
    chosen = {"seed": 5, "steps": 2, "cfg": 2.0, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0}
    links = {"model": model, "positive": positive, "negative": negative, "latent_image": empty}
    sampled = graph.link(graph.add("KSampler", **links, **chosen))
    graph.add("VAEDecode", samples=sampled, vae=vae)
    return graph, fit


def test_core_graph_with_our_nodes_gives_the_same_video_and_its_latents_come_back(
    server: Server, client: Client, inside: Inside
) -> None:
    files = inside.play("core_files", "write", models=str(server.base / "models"))
    plain = client.finished(pictured(graph_of(files)[0].prompt))
    graph, fit = graph_of(files, ALONE)
    run = client.finished(pictured(graph.prompt))
    lines = run.texts_of(fit)[-1].splitlines()
    assert any(line.startswith("precision") for line in lines) and "latents kept" in run.texts_of(fit)[-1]
    assert np.abs(pictures(server, run).astype(int) - pictures(server, plain)).max() <= 1, "a CPU needs nothing"
    again = Graph()
    latent = again.link(again.add("AnyGPURecoverLatents", kept="newest"))
    vae = again.link(again.add("VAELoader", vae_name=files["vae"]))
    again.add("VAEDecode", samples=latent, vae=vae)
    back = client.run(pictured(again.prompt))
    assert PICTURES in back.outputs and np.array_equal(pictures(server, back), pictures(server, run))


def test_one_node_fits_all_three_and_says_one_line_for_each(server: Server, client: Client, inside: Inside) -> None:
    files = inside.play("core_files", "write", models=str(server.base / "models"))
    plain = client.run(pictured(graph_of(files)[0].prompt))
    graph, fit = graph_of(files, TOGETHER)
    run = client.finished(pictured(graph.prompt))
    nothing = "nothing to change on this device; precision fp32 as loaded; attention"
    starts = f"model: {nothing}", "vae: fitted to this device; precision ", f"clip: {nothing}"
    said = run.texts_of(fit)[-1].splitlines()
    assert [line[: len(start)] for line, start in zip(said, starts, strict=True)] == list(starts)
    assert np.array_equal(pictures(server, run), pictures(server, plain))
    del graph.prompt[fit]["inputs"]["vae"]
    assert "connect vae to AnyGPU Fit" in client.run(pictured(graph.prompt)).message
