"""What stands under a node is text, and stands there only in the window that queued the prompt.

No name from a file or a folder becomes HTML or Markdown in the page.
"""

from __future__ import annotations

import html
import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


class Sockets:
    """ComfyUI's server as far as a message knows it: who queued the prompt that runs, and what was sent to whom.

    ``None`` is everybody, as for ComfyUI.
    """

    def __init__(self) -> None:
        self.client_id: str | None = "window"
        self.last_prompt_id = "prompt"
        self.texts: list[tuple[str, str | None]] = []
        self.events: list[tuple[dict[str, Any], str | None]] = []

    def send_progress_text(self, text: str, node_id: str, sid: str | None = None) -> None:
        """As the server's own."""
        self.texts.append((text, sid))

    def send_sync(self, event: str, data: dict[str, Any], sid: str | None = None) -> None:
        """As the server's own."""
        self.events.append((data, sid))


@pytest.fixture
def progress(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Sockets]:
    """The progress of a node, on stand-ins for ComfyUI and the side bar."""
    server = Sockets()
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
    return module.NodeProgress("1"), server


@pytest.mark.parametrize(
    "name", ["<img src=http://tracker/a.png>", "![seen](http://tracker/a.png)", "[here](http://x)", "**b** ~~c~~ `d`"]
)
def test_names_are_shown_as_they_are_and_lines_stay_lines(progress, name):
    node, server = progress
    node.notify(f"from {name}")
    node.finish("done")
    text, _ = server.texts[-1]
    assert not set(text) & set("<>[]`*~\\"), "nothing that HTML or Markdown acts on"
    assert html.unescape(text) == f"done  \nfrom {name}"


def test_the_window_that_queued_the_prompt_is_told_and_no_other(progress):
    node, server = progress
    node.finish("done")
    server.client_id, server.last_prompt_id = "another", "later"
    node.finish("done again")
    assert [client for _, client in server.texts] == ["window", "another"]
    assert [(data["prompt_id"], data["node"], client) for data, client in server.events] == [
        ("prompt", "1", "window"),
        ("later", "1", "another"),
    ]


def test_a_prompt_that_names_no_window_is_shown_in_none(progress):
    """A message to nobody goes to everybody: it would stand under other people's nodes."""
    node, server = progress
    server.client_id = None
    node.finish("done")
    assert server.texts == server.events == []
