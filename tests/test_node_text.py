"""What stands under a node is text, and stands there only in the window that queued the prompt.

No name from a file or a folder becomes HTML or Markdown in the page.
"""

import html
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_comfyui import comfyui


@pytest.fixture
def progress(tmp_path: Path) -> Iterator[tuple[Any, Any]]:
    """The progress of a node, and the server that its texts are sent by."""
    with comfyui(tmp_path) as module:
        room = module("host.progress")
        yield room.NodeProgress("1"), room.PromptServer.instance


@pytest.mark.parametrize(
    "name", ["<img src=http://tracker/a.png>", "![seen](http://tracker/a.png)", "[here](http://x)", "**b** ~~c~~ `d`"]
)
def test_names_are_shown_as_they_are_and_lines_stay_lines(progress, name):
    node, server = progress
    like = str.maketrans("&<>[]*`~|\\", "＆‹›()∗'∼¦/")
    node.notify(f"from {name}")
    node.finish("done")
    text, _ = server.texts[-1]
    assert not set(text) & set("&<>[]`*~|\\"), "nothing that HTML or Markdown acts on, and no entity"
    assert text == f"done  \nfrom {name.translate(like)}" and text == html.unescape(text)


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


def test_a_node_that_speaks_late_is_not_one_that_runs(progress):
    """AnyGPU Fit counts while a later node samples, and the tab offers Pause as long as a node runs."""
    node, server = progress
    node.notify("12 of 12 layers")
    node.show()
    assert node._run.entry["done"] and server.texts[-1][0] == "12 of 12 layers"


def test_a_prompt_that_names_no_window_is_shown_in_none(progress):
    """A message to nobody goes to everybody: it would stand under other people's nodes."""
    node, server = progress
    server.client_id = None
    node.finish("done")
    assert server.texts == server.events == []


def test_views_are_drawn_once_a_step_for_the_window_of_the_run_alone(progress):
    from anygpu.compat.memory.parts import ProgressStage

    node, server = progress
    painting, asked = node._send_throttled.__globals__["PaintProgress"]("1"), []
    for server.client_id, count in ((None, 0), ("window", 1)):
        painting.step(1, 2, ProgressStage("painting"), lambda: [asked.append(1) or torch.zeros(4, 4, 3)])
        assert len(asked) == count
    _, picture, longest = painting._picture(lambda: [torch.zeros(4, 4, 3)] * 6)
    assert picture.size == (24, 4) and longest == 768, "ComfyUI fits it to the longest side itself"


def test_a_stage_that_does_not_count_itself_is_counted(progress, monkeypatch):
    from anygpu.compat.memory.parts import ProgressStage

    node, server = progress
    monkeypatch.setitem(node._send_throttled.__globals__, "TEXT_SECONDS", 0.0)
    node.step(1, 2, ProgressStage("encoding", "image"))
    node.step(1, 2, ProgressStage("moving", "vae 1 of 2 GB", counted=True))
    assert [text for text, _ in server.texts] == ["encoding image 1/2", "moving vae 1 of 2 GB"]


def test_the_pace_of_a_stage_that_begins_anew_is_its_own(progress, monkeypatch):
    from anygpu.compat.memory.parts import ProgressStage

    (node, _), now = progress, [0.0]
    monkeypatch.setitem(node._send_throttled.__globals__, "time", SimpleNamespace(monotonic=lambda: now[0]))
    for now[0], step in ((0.0, 1), (10.0, 2), (900.0, 1), (902.0, 2)):
        node.step(step, 2, ProgressStage("sampling"))
    assert node._pace == "2 s per step"


def test_node_tab_and_command_say_what_is_left_of_all_sections(progress, monkeypatch):
    """The first step also loads; the second section of three runs beside another program."""
    from anygpu import cli
    from anygpu.compat.memory.parts import ProgressStage
    from anygpu.pipelines.base import SubProgress

    node, server = progress
    now, command = [0.0], cli.Printed()
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setitem(node._send_throttled.__globals__, "TEXT_SECONDS", 0.0)
    monkeypatch.setitem(node._send_throttled.__globals__, "time", clock)
    monkeypatch.setattr(cli, "time", clock)
    for section, seconds in enumerate((4.0, 12.0, 4.0)):
        for step in range(20):
            now[0] += seconds + 60.0 * (section == step == 0)
            for shown in (node, command):
                shown.step(1, 2, ProgressStage("moving", "transformer 1 of 2 GB", counted=True))
                SubProgress(shown, section, 3, "section").step(step + 1, 20, ProgressStage("sampling"))
            if 5 < step < 19:
                text, left = server.texts[-1][0], (59 - step - 20 * section) * seconds
                assert text.startswith(f"sampling section {section + 1} of 3, {seconds} s each, about ")
                number, unit = re.search(r"about ([\d.]+) (s|min) left", text).groups()
                assert float(number) * {"s": 1, "min": 60}[unit] == pytest.approx(left, rel=0.05)
                entry = server.events[-1][0]["entry"]
                assert entry["status"] + entry["left"] == text, "the tab says the same"
                assert command._bar.postfix == text.partition(", ")[2], "and the command"
    assert {*node.time_left} == {*command.time_left} == {"sampling"}, "where a run puts its forwards; no bytes"
