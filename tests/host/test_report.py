"""The hardware report inside a real ComfyUI: it runs by itself, says its text and shows its table."""

import pytest

from host.client import Client
from host.prompts import Graph
from host.server import Server

pytestmark = pytest.mark.host


@pytest.mark.parametrize("check", [False, True])
def test_the_report_runs_alone_and_shows_its_table(server: Server, client: Client, check: bool) -> None:
    graph = Graph()
    node = graph.add("AnyGPUHardwareReport", check=check)
    run = client.finished(graph.prompt)
    assert any(shown == node and "torch" in text for shown, text in run.texts)
    (picture,) = run.outputs[node]["images"]
    assert picture["type"] == "temp"
    assert list(server.base.rglob("user/**/anygpu/probes-*.json")), "answers are kept in the user directory"


def test_its_text_goes_to_core(server: Server, client: Client) -> None:
    graph = Graph()
    node = graph.add("AnyGPUHardwareReport", check=False)
    shown = graph.add("PreviewAny", source=graph.link(node))
    run = client.finished(graph.prompt)
    (text,) = run.outputs[shown]["text"]
    for heading in ("Device", "Precision", "Kernels and care", "What the device answered"):
        assert f"{heading}\n" in text
