"""What stands under a node is text: no name from a file or a folder becomes HTML or Markdown in the page."""

from __future__ import annotations

import html
import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


@pytest.fixture
def progress(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[str]]:
    """The progress of a node, on stand-ins for ComfyUI and the side bar, and the texts that it sends."""
    sent: list[str] = []
    server = SimpleNamespace(send_progress_text=lambda text, node: sent.append(text), send_sync=lambda *_event: None)
    run = SimpleNamespace(finish=lambda *_ended: None, snapshot=dict, entry={"said": []})
    stand_ins: dict[str, dict[str, Any]] = {
        "comfy": {},
        "comfy.model_management": {},
        "comfy.utils": {},
        "latent_preview": {},
        "server": {"PromptServer": SimpleNamespace(instance=server)},
        "anygpu.host.families": {"latent_format_of": None},
        "anygpu.host.server.panel": {"memory_now": dict},
        "anygpu.host.server.runs": {"NodeRun": lambda _node: run, "stop": None},
    }
    for name, attributes in stand_ins.items():
        module = ModuleType(name)
        module.__dict__.update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "anygpu.host.progress", raising=False)
    module = importlib.import_module("anygpu.host.progress")
    monkeypatch.setitem(sys.modules, "anygpu.host.progress", module)
    return module.NodeProgress("1"), sent


@pytest.mark.parametrize(
    "name", ["<img src=http://tracker/a.png>", "![seen](http://tracker/a.png)", "[here](http://x)", "**b** ~~c~~ `d`"]
)
def test_names_are_shown_as_they_are_and_lines_stay_lines(progress, name):
    node, sent = progress
    node.notify(f"from {name}")
    node.finish("done")
    assert not set(sent[-1]) & set("<>[]`*~\\"), "nothing that HTML or Markdown acts on"
    assert html.unescape(sent[-1]) == f"done  \nfrom {name}"
