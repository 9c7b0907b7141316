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


def test_a_prompt_that_names_no_window_is_shown_in_none(progress):
    """A message to nobody goes to everybody: it would stand under other people's nodes."""
    node, server = progress
    server.client_id = None
    node.finish("done")
    assert server.texts == server.events == []


def test_a_stage_that_does_not_count_itself_is_counted(progress, monkeypatch):
    from anygpu.compat.memory.parts import ProgressStage

    node, server = progress
    monkeypatch.setitem(node._text.__globals__, "TEXT_SECONDS", 0.0)
    node.step(1, 2, ProgressStage("encoding", "image"))
    node.step(1, 2, ProgressStage("moving", "vae 1 of 2 GB", counted=True))
    assert [text for text, _ in server.texts] == ["encoding image 1/2", "moving vae 1 of 2 GB"]


@pytest.mark.parametrize(
    "seconds_of",
    [
        pytest.param(lambda step: 4.0, id="even"),
        pytest.param(lambda step: 4.0 if step < 20 else 12.0, id="three times as slow from step 20 on"),
        pytest.param(lambda step: 12.0 if step < 20 else 4.0, id="three times as fast from step 20 on"),
        pytest.param(lambda step: 4.0 + 2.0 * (-1) ** step, id="every other step three times as long"),
    ],
)
def test_what_is_left_follows_the_last_steps(progress, monkeypatch, seconds_of):
    """From a tenth of the steps on within 25 %, but for the tenth after a change, which is not known yet."""
    from anygpu.compat.memory.parts import ProgressStage

    node, server = progress
    room, total, now = node._text.__globals__, 60, [0.0]
    monkeypatch.setitem(room, "TEXT_SECONDS", 0.0)
    monkeypatch.setitem(room, "time", SimpleNamespace(monotonic=lambda: now[0]))
    for step in range(total):
        now[0] += seconds_of(step)
        node.step(step + 1, total, ProgressStage("sampling"))
        left = sum(map(seconds_of, range(step + 1, total)))
        if step > 56 or step < 6 or 20 <= step < 26 or (step < 20 and seconds_of(0) != seconds_of(20)):
            continue
        found = re.search(r"about (\d+(?:\.\d)?) (s|min|h) left", server.texts[-1][0])
        said = float(found[1]) * {"s": 1, "min": 60, "h": 3600}[found[2]]
        assert abs(said / left - 1) <= 0.25, f"{said} s of {left} s after step {step + 1}"
        entry = server.events[-1][0]["entry"]
        assert entry["status"] + entry["left"] == server.texts[-1][0], "the tab says the same"
