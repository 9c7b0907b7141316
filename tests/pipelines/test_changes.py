"""What changed since the sampling before is read from two receipts, in the words of the inputs."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from anygpu.pipelines.base import RECEIPT, Latents
from anygpu.pipelines.latents import recovery
from anygpu.pipelines.records.changes import Change, Comparison, changes, last_two

TEXT = "a red circle moves left on blue"
RECORD: dict[str, Any] = {
    "anygpu_receipt": 1,
    "latents": "00",
    "job": {
        "anygpu_job": 1,
        "model": {"name": "LTX-Video", "content": "0123456789"},
        "prompt": {"text": TEXT, "negative": ""},
        "settings": {"width": 64, "height": 64, "frames": 9, "seed": 5},
        "loras": [{"file": {"name": "style.safetensors", "content": "ab"}, "strength": 0.5}],
    },
    "made_with": {"torch": "2.12.0"},
    "device": {"device": "CPU", "driver": ""},
    "decisions": [["precision", "transformer fp32"], ["attention", "flash"]],
}


def changed(path: str, value: Any) -> dict[str, Any]:
    """The record with another value at a path such as ``job.settings.seed``."""
    record = copy.deepcopy(RECORD)
    *groups, name = path.split(".")
    place: Any = record
    for group in groups:
        place = place[int(group)] if isinstance(place, list) else place.setdefault(group, {})
    place[name] = value
    return record


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("job.settings.seed", 6, Change("seed", "5", "6")),
        ("job.settings.steps", 20, Change("steps", "the model's own", "20")),
        ("job.settings.cfg", 3.5, Change("cfg", "the model's own", "3.5")),
        ("job.settings.sigmas", [1.0, 0.5, 0.0], Change("sigmas", "none", "1, 0.5, 0")),
        ("job.prompt.text", TEXT.replace("left", "right"),
         Change("prompt", "… red circle moves left on blue", "… red circle moves right on blue")),
        ("job.prompt.text", TEXT.replace("circle ", "circle\n"),
         Change("prompt", "a red circle moves left on …", "a red circle ⏎ moves left on …")),
        ("job.prompt.negative", "blurry", Change("negative prompt", "none", "blurry")),
        ("job.model.content", "9876543210", Change("model", "LTX-Video (012345)", "LTX-Video (987654)")),
        ("job.load.weights", "int8", Change("weights", "auto", "int8")),
        ("job.load.fp16_accumulation", True, Change("fp16 accumulation", "off", "on")),
        ("job.loras.0.strength", 1.0, Change("LoRA 1 strength", "0.5", "1")),
        ("job.step_cache", {"preset": "fast"}, Change("step cache preset", "off", "fast")),
        ("made_with.torch", "2.13.0", Change("torch", "2.12.0", "2.13.0")),
        ("device.device", "NVIDIA L4", Change("device", "CPU", "NVIDIA L4")),
        ("decisions", [["precision", "transformer fp32"], ["attention", "math"]], Change("attention", "flash", "math")),
        ("decisions", RECORD["decisions"][:1], Change("attention", "flash", "none")),
    ],
)  # fmt: skip
def test_each_change_is_one_row(path: str, value: Any, expected: Change) -> None:
    assert changes(RECORD, changed(path, value)) == (expected,)
    back = Change(expected.subject, expected.now, expected.before)
    assert changes(changed(path, value), RECORD) == (back,)


def test_models_are_equal_by_every_byte_where_both_are_known_by_it() -> None:
    first, second = (changed("job.model.whole", letter * 64) for letter in "ab")
    assert not changes(RECORD, first) and not changes(first, first)
    assert changes(first, second) == (Change("model", "LTX-Video (aaaaaa)", "LTX-Video (bbbbbb)"),)


def test_what_was_asked_for_is_told_once_and_before_what_follows_from_it() -> None:
    now = changed("job.load.precision", "bf16")
    now["decisions"] = [["precision", "transformer bf16"], ["attention", "math"]]
    assert [row.subject for row in changes(RECORD, now)] == ["precision", "attention"]


def test_what_auto_became_is_told_where_the_input_is_as_before() -> None:
    was, now = changed("job.resolved", {"steps": 20, "seed": 5}), changed("job.resolved", {"steps": 30, "seed": 5})
    for record in (was, now):
        record["job"]["resolved"] |= {"width": 64, "height": 64, "frames": 9}
    assert changes(was, now) == (Change("steps", "20", "30"),)
    now["job"]["settings"]["steps"] = 30
    assert changes(was, now) == (Change("steps", "the model's own", "30"),)
    assert not changes(RECORD, was)


@pytest.mark.parametrize("path", ["job", "made_with", "device", "decisions", "missing", "latents"])
@pytest.mark.parametrize("value", [None, 1, "x", [], [1], [[1]], {}, {"anygpu_job": 1}])
def test_a_receipt_that_somebody_edited_breaks_nothing(path: str, value: Any) -> None:
    assert isinstance(changes(RECORD, changed(path, value)), tuple)


def test_the_last_two_with_a_receipt_are_compared(tmp_path: Path) -> None:
    def kept(**extra: Any) -> None:
        samples = torch.zeros(1, 4, 2, 8, 8)
        assert recovery.save(tmp_path, Latents(samples, "ltx", "text", 9, 64, 64, 8.0, 3, extra=extra), print)

    assert last_two(tmp_path) is None
    kept(**{RECEIPT: changed("job.settings.seed", 1)})
    kept(**{RECEIPT: RECORD})
    kept(**{RECEIPT: {**changed("job.settings.seed", 6), "latents": "01", "missing": ["a noise mask"]}})
    kept()  # as without metadata
    compared = last_two(tmp_path)
    assert compared is not None and compared.changes == (Change("seed", "5", "6"),)
    assert (compared.same, compared.headline, compared.missing) == (False, "This changed:", ("a noise mask",))
    kept(**{RECEIPT: {**changed("job.settings.seed", 6), "latents": "01"}})
    again = last_two(tmp_path)
    assert again is not None and (again.same, again.changes) == (True, ())
    assert again.headline == "The same latents, bit for bit."


@pytest.mark.parametrize(
    ("same", "rows", "said"),
    [
        (True, (Change("torch", "1", "2"),), "The same latents, bit for bit, although this changed:"),
        (False, (), "Other latents, although nothing changed that a receipt records."),
    ],
)
def test_what_surprises_is_said(same: bool, rows: tuple[Change, ...], said: str) -> None:
    assert Comparison("now", same, rows).headline == said
