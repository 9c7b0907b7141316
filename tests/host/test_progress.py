"""What the user sees while a workflow runs: a bar over real work, previews, and text under each node."""

from collections.abc import Iterator
from typing import Any

import pytest

from host.client import ENDINGS, NOTHING, Client, Prompt
from host.prompts import text_to_video
from host.server import Server

pytestmark = pytest.mark.host

LOAD, PROMPT, SAMPLE, DECODE = "1234"


def test_bar_previews_and_texts(server: Server, client: Client) -> None:
    server.model("HunyuanVideo")
    run = client.finished(text_to_video("HunyuanVideo", steps=5).prompt)
    steps = [(done, total) for node, done, total in run.progress if node == SAMPLE and total == 5]
    assert steps == sorted(steps) and steps[-1] == (5, 5)
    assert run.previews >= 1
    assert all(run.texts_of(node) for node in (LOAD, PROMPT, SAMPLE, DECODE))
    assert run.texts_of(LOAD)[-1].splitlines()[0] == "HunyuanVideo: fp32, offload comfyui, on CPU"
    size, how, pace = run.texts_of(SAMPLE)[-1].split("; ")
    assert (size, how) == ("64x64, 9 frames at 8 fps", "fp32, offload comfyui") and pace.endswith(" s per step")
    assert any(text.startswith("reading transformer") for text in run.texts_of(SAMPLE))


def test_what_was_rounded_and_what_has_no_effect_is_said(server: Server, client: Client) -> None:
    server.model("LTX-Video")
    run = client.run(text_to_video("LTX-Video", width=80, frames=10, guidance=5.0).prompt)
    said = run.texts_of(SAMPLE)[-1]
    assert "width 80 → 96" in said and "frames 10 → 17" in said
    assert "guidance has no effect on LTX-Video" in said
    assert "AnyGPU: guidance has no effect on LTX-Video" in server.log


def heard(client: Client, events: Iterator[tuple[str, Any]], prompt: Prompt) -> tuple[str, list[Any]]:
    """The id of a prompt that ``client`` queues now, and every event that it hears until the end of that."""
    known, found = client.post("/prompt", {"prompt": prompt, "client_id": client.id})["prompt_id"], []
    for kind, data in events:
        found.append((kind, data))
        if kind in ENDINGS and data["prompt_id"] == known:
            break
    return known, found


def test_a_window_hears_of_its_own_runs_and_of_no_other(server: Server, client: Client) -> None:
    """The other has the same node ids, so that what it heard would stand under its nodes; a script names no window."""
    server.model("LTX-Video")
    other = Client(server.url)
    with other._socket(60) as events, client._socket(60) as own:
        known, told = heard(client, own, text_to_video("LTX-Video", seed=5).prompt)
        records = [data for kind, data in told if kind == "anygpu.run"]
        assert any(kind == "text" for kind, _ in told) and {data["node"] for data in records} >= {LOAD, SAMPLE}
        assert {data["prompt_id"] for data in records} == {known}
        client.post("/prompt", {"prompt": text_to_video("LTX-Video", seed=6).prompt})
        _, overheard = heard(other, events, NOTHING)  # ended after both
    ours = [kind for kind, _ in overheard if kind in ("text", "preview", "anygpu.run")]
    assert ours == [], "what stands under nodes went to a window that did not queue it"
