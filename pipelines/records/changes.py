"""The changes between the last two samplings: their receipts compared, in the words of the inputs."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from ...compat.errors import PackError
from ..latents import recovery
from ..requests import LOAD_INPUTS
from .job import Content, job_in
from .receipts import differing, read_receipt

UNNAMED = ("settings", "load", "text", "file")  # groups of a job that add nothing to the names of what is in them
OWN = ("width", "height", "frames", "steps", "fps", "guidance", "cfg", "shift")  # 0 is the model's own value
MODELS_OWN, NONE, MORE, BREAK = "the model's own", "none", "…", "⏎"
RESOLVED = "resolved "  # prefix of what auto became, which is listed where the input itself did not change
HASH = 6  # letters of a content that tell two of one name apart
CONTEXT = 3  # words that stay on each side of what changed in a long text


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that was otherwise before, as text."""

    subject: str
    before: str
    now: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """The last sampling beside the one before it."""

    before: str  # when the earlier one was, in local time
    same: bool  # whether both made the same latents, bit for bit
    changes: tuple[Change, ...]
    missing: tuple[str, ...] = ()  # what made one of them and is in no receipt, such as a noise mask

    @property
    def headline(self) -> str:
        if self.same:
            return "The same latents, bit for bit" + (", although this changed:" if self.changes else ".")
        if self.changes:
            return "This changed:"
        return "Other latents, although nothing changed that a receipt records."


def last_two(folder: Path) -> Comparison | None:
    """The newest saved latents with a receipt compared with those before them, by headers; None for fewer than two."""
    records: list[tuple[float, Mapping[str, Any]]] = []
    for path in recovery.by_date(folder):
        with suppress(PackError, OSError):  # of core's samplings, damaged, or removed just now
            records.append((path.stat().st_mtime, read_receipt(path)))
        if len(records) == 2:
            (_, now), (date, before) = records
            when = datetime.datetime.fromtimestamp(date).isoformat(" ", "minutes")
            lists = (record.get("missing") for record in (before, now))
            missing = dict.fromkeys(str(text) for each in lists if isinstance(each, list) for text in each)
            same = isinstance(now.get("latents"), str) and now["latents"] == before.get("latents")
            return Comparison(when, same, changes(before, now), tuple(missing))
    return None


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[Change, ...]:
    """The differences of two receipts: inputs first, then device, versions and decisions. A value that ``auto`` became
    is listed only if both receipts have one and the input itself did not change."""
    earlier, later = _inputs(before), _inputs(now)
    rows: dict[str, Change] = {}
    for name in dict.fromkeys((*later, *earlier)):
        pair = earlier.get(name, NONE), later.get(name, NONE)
        whole = all(isinstance(value, Content) and value.whole for value in pair)  # both have a hash of every byte
        old, new = (_file(value, whole) if isinstance(value, Content) else value for value in pair)
        plain = name.removeprefix(RESOLVED)
        if old != new and (plain == name or not (plain in rows or NONE in pair)):
            rows[plain] = Change(plain, *_trimmed(old, new))
    further = [
        Change(name, NONE if old is None else str(old), NONE if new is None else str(new))
        for name, old, new in differing(before, now)
        if name not in rows
    ]
    return (*rows.values(), *further)


def _inputs(record: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that a receipt's job sets, by the names that people know; empty where it has none."""
    with suppress(PackError):  # somebody edited it, or it was not written down
        job, defaults = job_in(record.get("job")), {name: row.default for name, row in LOAD_INPUTS.items()}
        return dict(_leaves(replace(job, family="", load={**defaults, **job.load}), ()))  # the model says its family
    return {}


def _leaves(value: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """The plain values in ``value`` by name, such as ``LoRA 1 strength``."""
    if is_dataclass(value) and not isinstance(value, (type, Content)):  # a Content is one value: a file
        for item in fields(value):
            yield from _leaves(getattr(value, item.name), (*path, item.name))
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _leaves(inner, (*path, str(name)))
    elif isinstance(value, tuple) and value and not isinstance(value[0], (int, float)):  # numbers are one value
        for number, inner in enumerate(value, 1):
            yield from _leaves(inner, (*path[:-1], f"{path[-1].removesuffix('s')} {number}"))
    elif value is not None:
        words = (" ".join(part for part in path if part not in UNNAMED) or path[-1]).replace("_", " ")
        known = re.sub(r"\blora (?=\d)", "LoRA ", words).replace("prompt negative", "negative prompt")
        yield known, _text(path[-1], value)


def _file(value: Content, whole: bool) -> str:
    """A file by its name and the first digits of its hash: that of every byte if ``whole``."""
    digits = (value.whole if whole else value.content)[:HASH]
    return " ".join(filter(None, (value.name, f"({digits})" if digits else "")))


def _text(name: str, value: Any) -> Any:
    """A value as people read it; a file as it is."""
    if isinstance(value, Content):
        return value
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return ", ".join(_text(name, item) for item in value) or NONE
    if isinstance(value, (int, float)):
        return MODELS_OWN if name in OWN and value == 0 else f"{value:g}" if isinstance(value, float) else str(value)
    return str(value) or NONE


def _trimmed(before: str, now: str) -> tuple[str, str]:
    """Two texts without most of the words that both begin and end with."""
    old, new = (text.replace("\n", f" {BREAK} ").split(" ") for text in (before, now))
    shortest = min(len(old), len(new))
    head = next((n for n in range(shortest) if old[n] != new[n]), shortest)
    tail = next((n for n in range(shortest - head) if old[-1 - n] != new[-1 - n]), shortest - head)
    first, last = max(head - CONTEXT, 0), max(tail - CONTEXT, 0)

    def part(words: list[str]) -> str:
        shown = (*([MORE] if first else ()), *words[first : len(words) - last], *([MORE] if last else ()))
        return " ".join(shown) or NONE

    return part(old), part(new)
