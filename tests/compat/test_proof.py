"""A proof grows part by part: it is resumed, survives what a part raises, and refuses what it did not write."""

import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from anygpu.compat import proof
from anygpu.compat.device.facts import facts_for
from anygpu.compat.errors import InputError
from anygpu.compat.proof import ENDED, Figure, Part, proof_in, proof_of, run_parts

FRESH = replace(proof_of(facts_for("cpu"), {"torch": "2.13"}), device="a <card>")


class Counted:
    """Parts that say how often they ran; ``raises`` names what one of them raises."""

    def __init__(self, raises: dict[str, BaseException] | None = None) -> None:
        self.ran: list[str] = []
        self.raises = raises or {}

    def parts(self) -> list[Part]:
        return [Part(name, lambda name=name: self.figures(name)) for name in ("one", "two", "three")]

    def figures(self, name: str):
        self.ran.append(name)
        yield Figure(f"{name} first", "ms", 1.23456789, 2.0)
        if name in self.raises:
            raise self.raises[name]
        yield Figure(f"{name} second", "GiB", None, float("nan"))


def test_parts_run_once_and_a_second_call_goes_on(tmp_path: Path) -> None:
    path, said, now = tmp_path / "a.json", [], iter(range(0, 10_000, 100))
    first = Counted()
    run_parts(first.parts(), FRESH, path, said.append, clock=lambda: next(now), seconds=250)
    assert first.ran == ["one"] and said[-1].endswith("the same command goes on at part 2")
    second = Counted()
    done = run_parts(second.parts(), FRESH, path, said.append)
    assert second.ran == ["two", "three"] and proof_in(path.read_bytes()) == done
    assert [part.name for part in done.parts] == ["one", "two", "three"] and done.running == ""
    assert "part 1 of 3: one: done before" in said and "part 3 of 3: three" in said


def test_what_a_part_raises_is_a_figure_and_the_next_part_runs(tmp_path: Path) -> None:
    counted = Counted({"one": RuntimeError("out of paper in /home/annette/tray\nmore"), "two": SystemError("x" * 999)})
    counted.raises["three"] = SystemExit(3)
    done = run_parts(counted.parts(), FRESH, tmp_path / "a.json", lambda text: None)
    assert counted.ran == ["one", "two", "three"]
    kept, fault = done.parts[0].figures
    assert kept == Figure("one first", "ms", 1.2346, 2.0)
    assert fault == Figure("one", fault="RuntimeError: out of paper in <path>")
    assert len(done.parts[1].figures[-1].fault) <= proof.MOST_TEXT
    assert done.parts[2].figures[-1] == Figure("three", fault="SystemExit: 3")
    (fine,) = run_parts(Counted().parts()[:1], FRESH, tmp_path / "b.json", lambda text: None).parts
    assert fine.figures[-1] == Figure("one second", "GiB"), "JSON has no NaN"


def test_ctrl_c_loses_the_part_that_ran_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    with pytest.raises(KeyboardInterrupt):
        run_parts(Counted({"two": KeyboardInterrupt()}).parts(), FRESH, path, lambda text: None)
    assert proof_in(path.read_bytes()).running == ""
    again = Counted()
    run_parts(again.parts(), FRESH, path, lambda text: None)
    assert again.ran == ["two", "three"]


def test_a_process_that_died_in_a_part_does_not_die_in_it_again(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    counted = Counted({"two": KeyboardInterrupt()})

    class DiedError(BaseException):
        """As nothing else of this process runs."""

    counted.raises["two"] = DiedError()
    with pytest.raises(DiedError):
        run_parts(counted.parts(), FRESH, path, lambda text: None)
    assert proof_in(path.read_bytes()).running == "two"
    again = Counted()
    done = run_parts(again.parts(), FRESH, path, lambda text: None)
    assert again.ran == ["three"] and done.parts[1].figures == (Figure("two", fault=ENDED),)


def test_the_file_of_another_device_is_not_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    run_parts(Counted().parts(), FRESH, path, lambda text: None)
    with pytest.raises(InputError, match=r"is the proof of a <card>.*Choose another --output"):
        run_parts(Counted().parts(), replace(FRESH, device="another"), path, lambda text: None)


@pytest.mark.parametrize(
    "change",
    [
        {"anygpu_proof": 2},
        {"anygpu_proof": None},
        {"more": 1},
        {"memory_gb": "much"},
        {"parts": [{"name": "one", "seconds": 1.0, "figures": [{"what": "x", "measured": "fast"}]}]},
    ],
)
def test_an_edited_file_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(InputError):
        proof_in(json.dumps(json.loads(FRESH.text()) | change))


@pytest.mark.parametrize("name, drawn", [("a.json", "a.svg"), ("a.svg", "a.picture.svg")])
def test_the_picture_has_a_bar_for_each_figure_and_no_markup_of_others(name: str, drawn: str, tmp_path: Path) -> None:
    path, odd = tmp_path / name, replace(FRESH, device="a <card>\x1b\ufffe")
    done = run_parts(Counted({"one": RuntimeError("<b>\x00")}).parts(), odd, path, lambda text: None)
    assert proof_in(path.read_bytes()) == done
    svg = ElementTree.fromstring((tmp_path / drawn).read_text(encoding="utf-8"))
    texts = [text.text or "" for text in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[0].startswith("a <card>") and "RuntimeError: <b>" in texts
    bars = [bar for bar in svg.iter("{http://www.w3.org/2000/svg}rect") if bar.get("height") == "12"]
    assert len(bars) == sum(len(part.figures) for part in done.parts)
