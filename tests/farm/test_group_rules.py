"""What a group refuses before any process of Ray starts, and how its ranks end; needs no Ray."""

from __future__ import annotations

from pathlib import Path

import pytest
from anygpu.compat.errors import UnsupportedError
from anygpu.compat.memory.parts import StageText
from anygpu.compat.ranks import Ranks
from anygpu.farm import cli
from anygpu.farm.group import AgreedWatch, _require_alike
from anygpu.farm.worker import Cancelled


def test_unlike_ranks_are_refused() -> None:
    ranks = [{"device": name, "torch": "2.8", "anygpu": "1"} for name in ("RTX 4090", "RTX 4090")]
    _require_alike(ranks)
    with pytest.raises(UnsupportedError, match="one video on device RTX 4090 and RTX 3060; expected alike devices"):
        _require_alike([*ranks, {**ranks[0], "device": "RTX 3060"}])


@pytest.mark.parametrize("words", [["--group", "0"], ["--group", "3", "--branches"]])
def test_groups_that_cannot_be_are_refused(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_text("{}\n", encoding="utf-8")
    assert cli.main(["run", str(tmp_path), *words]) == 2
    assert f"--group {words[1]}" in capsys.readouterr().err


def test_a_rank_ends_at_a_step_of_the_sampling_and_nowhere_else() -> None:
    watch = AgreedWatch(Ranks())
    watch.end()
    watch.check()
    watch.step(1, 2, StageText("encoding", "prompt"))
    with pytest.raises(Cancelled):
        watch.step(1, 2, StageText("sampling", "section 1 of 2", True))
    assert (watch.done, watch.total) == (1, 2)
