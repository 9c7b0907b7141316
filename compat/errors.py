"""Errors that a user can act on, in a line (found; expected; fix), and checks that raise them: choices, ranges, memory
for files. ComfyUI shows ``__module__`` before the message and loads this file under its folder's name; so it is set."""

from __future__ import annotations

import csv
import json
from collections import deque
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

READING_TIMES, READING_BYTES = 10, 200 * 10**6  # small files can claim anything
JSON_BYTES = 100_000_000  # of one text: the safetensors library's own limit of a header
TOKEN_BYTES, PAIR_BYTES = 64, 192  # that Python takes for each value in a list, such as an empty one; for each pair
MOST_SHOWN = 700  # of what was found, which may quote a text of any length
_recent: deque[tuple[str, dict[str, str]]] = deque(maxlen=64)  # texts of errors made lately, with their parts


def remember(text: str, found: str, expected: str, fix: str, button: Mapping[str, str] | None = None) -> str:
    """Remember the parts of an error's ``text`` for :func:`parts_of`, and return ``text``: ComfyUI hands on no more."""
    _recent.append((text, {"found": found, "expected": expected, "fix": fix, **(button or {})}))
    return text


def sentence(found: str, expected: str, fix: str, button: Mapping[str, str] | None = None) -> str:
    """The text of an error of these parts, which :func:`parts_of` gives back."""
    return remember(f"{found}; expected {expected}. {fix}", found, expected, fix, button)


def parts_of(message: str) -> dict[str, str]:
    """The parts of our error whose text ``message``, as ComfyUI hands it on, begins with; else ``found`` alone."""
    newest_first = (parts for text, parts in reversed(tuple(_recent)) if message.startswith(text))
    return next(newest_first, {"found": message.strip()})


class PackError(Exception):
    """A failure with its remedy: ``found``, quoted; ``expected``, with units; ``fix``, one sentence on what to do.
    ``button`` does it in the browser: ``press``, its text; the ``node`` whose ``input`` becomes ``value``."""

    __module__ = "anygpu"

    def __init_subclass__(cls) -> None:
        cls.__module__ = PackError.__module__

    def __init__(self, found: str, *, expected: str, fix: str, button: Mapping[str, str] | None = None) -> None:
        self.found, self.expected, self.fix = (" ".join(text.split()) for text in (found, expected, fix))
        if len(self.found) > MOST_SHOWN:
            self.found = f"{self.found[: MOST_SHOWN // 2]} … {self.found[-MOST_SHOWN // 2 :]}"
        super().__init__(sentence(self.found, self.expected, self.fix, button))


class InputError(PackError, ValueError):
    """A value that the user entered cannot be used."""


class CheckpointError(PackError, OSError):
    """A model file or folder is missing, damaged or of another kind."""


class UnsupportedError(PackError, RuntimeError):
    """This machine, version or family cannot do what was asked, whatever the input."""


class MissingPackageError(PackError, ImportError):
    """A Python package that this feature needs is absent or broken."""


def require_range(
    name: str, value: float, low: float, high: float, unit: str = "", nearest: int | None = None, advice: str = ""
) -> None:
    """Raise InputError unless ``low <= value <= high``; its fix is ``nearest`` or the nearer limit, then ``advice``."""
    if not low <= value <= high:
        valid = min(max(low, value), high) if nearest is None else nearest
        fix = f"The nearest valid value is {valid:g}{advice}."
        raise InputError(f"{name} {value}", expected=f"{low} to {high} {unit}".strip(), fix=fix)


def require_choice(
    name: str, value: str, known: Collection[str], fix: str = "Choose one of these.", where: str = ""
) -> None:
    """Raise InputError unless ``value`` of the input ``name`` is in ``known``; ``where`` follows it in the message."""
    if value not in known:
        raise InputError(f"{name} {value!r}{where}", expected=f"one of {', '.join(known)}", fix=fix)


def reading_budget(size: int) -> int:
    """The bytes of memory that reading a file of ``size`` bytes may take, besides the result."""
    return READING_TIMES * size + READING_BYTES


def afford(subject: str, cost: int, size: int, fix: str = "Export or download it again.") -> int:
    """``cost``, the bytes to read ``subject``; CheckpointError if above the :func:`reading_budget` of its ``size``."""
    if cost > reading_budget(size):
        found = f"{subject} of {size / 1e6:.3g} MB, which takes {cost / 1e6:,.0f} MB to read"
        expected = f"at most {reading_budget(size) / 1e6:,.0f} MB, 10 x the file + {READING_BYTES // 10**6} MB"
        raise CheckpointError(found, expected=expected, fix=fix)
    return cost


def json_cost(text: bytes) -> int:
    """The bytes of memory that the values of a JSON text take, with the text itself."""
    values = TOKEN_BYTES * sum(map(text.count, (b",", b"[", b"{"))) + PAIR_BYTES * text.count(b":")
    return values + (3 if text.isascii() else 9) * len(text)  # bytes, text and strings in it: 1 or 4 a character


def json_within(text: str | bytes, subject: str, **options: Any) -> Any:
    """The value of a JSON text, read as ``json.loads`` with ``options`` does.
    Raises CheckpointError above :func:`reading_budget`, ValueError if no JSON, above JSON_BYTES, or nested too deep."""
    raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    if len(raw) > JSON_BYTES:
        raise ValueError(f"more than {JSON_BYTES:,} bytes")
    afford(subject, json_cost(raw), len(raw))
    try:
        return json.loads(text, **options)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def json_file(path: Path) -> Any:
    """The value in a JSON file; raises as :func:`json_within`, and OSError where it cannot be read."""
    with path.open("rb") as file:
        size = min(path.stat().st_size, JSON_BYTES)  # read() asks for room for as much as it may read
        return json_within(file.read(size + 1).decode("utf-8"), repr(str(path)))


def csv_file(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file of this pack, as dicts by the names in its first line."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def first_line(error: BaseException) -> str:
    """The first line of an error's text, at most 160 characters; the name of its class where it has no text."""
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return line if len(line) <= 160 else f"{line[:157]}..."
