"""Kernels, compile and step cache inside a real ComfyUI: chosen on nodes, said under them, changed without loading."""

import pytest

from host.client import Client
from host.prompts import Graph, text_to_video
from host.server import Server

pytestmark = pytest.mark.host


def sped_up(server: Server, preset: str, **chosen: object) -> tuple[Graph, str]:
    """A graph with a step cache between the load node and the sampler, and the sampler's id."""
    graph = text_to_video(server.model("LTX-Video"))
    kinds = {node["class_type"]: name for name, node in graph.prompt.items()}
    load, sample = kinds["AnyGPULoadPipeline"], kinds["AnyGPUSample"]
    graph.prompt[load]["inputs"] |= {"kernels": "reference", **chosen}
    graph.prompt[sample]["inputs"]["steps"] = 6
    asked = {"preset": preset, "kind": "auto", "threshold": 0.5, "interval": 3, "cache_device": "device"}
    cache = graph.add("AnyGPUStepCache", pipeline=graph.link(load), start_percent=0.0, end_percent=1.0)
    graph.prompt[cache]["inputs"] |= asked
    graph.prompt[sample]["inputs"]["pipeline"] = graph.link(cache)
    return graph, sample


def test_kernels_and_a_step_cache_are_said_and_changed_without_loading_again(server: Server, client: Client) -> None:
    for preset, expected in (("custom", True), ("off", False)):
        graph, sample = sped_up(server, preset)
        run = client.finished(graph.prompt)
        text = "\n".join(run.texts_of(sample))
        assert "12 of 12 fusion points (reference)" in text
        assert ("block passes skipped" in text) == expected, text
        assert "AnyGPULoadPipeline" not in text


@pytest.mark.full
def test_compile_does_without_the_memory_manager_that_it_cannot_have(server: Server, client: Client) -> None:
    graph, sample = sped_up(server, "off", compile=True)
    load = next(name for name, node in graph.prompt.items() if node["class_type"] == "AnyGPULoadPipeline")
    run = client.finished(graph.prompt, timeout=400)  # a C++ compiler at work
    assert "offload none" in "\n".join(run.texts_of(load))
    assert "offload auto does without comfyui" in server.log, "reasons are in the log, and in the side bar"
    assert "compile on: " in "\n".join(run.texts_of(sample))
