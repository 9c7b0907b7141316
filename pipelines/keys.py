"""Tensor names of other layouts as data: which tensor of a file is which of a diffusers or transformers model. ``#``
stands for a number and ``*``, at the end, for the rest of a name, in the same order on both sides. A tensor that holds
several of the model's is cut along its rows, which are bytes side by side: nothing is read or held twice for it."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial, reduce
from pathlib import Path
from typing import Any

from ..compat.checkpoints.headers import TensorEntry
from ..compat.errors import CheckpointError, json_file

Entries = Mapping[str, TensorEntry]
MOST_UNKNOWN = 16  # tensors beyond those of a model; with more of them it is another model
TRANSFORMER = "/transformer"  # what the kinds of transformers end with


@dataclass(frozen=True, slots=True)
class Row:
    source: str  # names in the file, separated by ``|``: releases name one tensor in several ways
    targets: str  # names in the model, separated by blanks; several share the rows of the tensor
    swapped: bool = False  # the halves of the tensor's rows change places: shift and scale, or gate and projection
    first_square: bool = False  # the first targets have as many rows as the weight has columns, the last the rest
    flat: bool = False  # axes of length one at the end are dropped: a convolution that is a matrix in the model
    last: str = ""  # the name in the model for the highest ``#``, where it differs
    heads: int = 0  # see ``TensorEntry.heads``


@dataclass(frozen=True, slots=True)
class Layout:
    """The names that one release gives to the tensors of one model."""

    kind: str  # which model, such as ``ltx/transformer``
    name: str  # which release, for people
    marks: tuple[str, ...]  # names that are there in this layout and in no other; ``|`` separates ways to write one
    rows: tuple[Row, ...] | Callable[[Iterable[str]], tuple[Row, ...]]  # or what makes them of the names
    absent: tuple[str, ...] = ()  # names that must not be there
    words: tuple[tuple[str, str], ...] = ()  # parts of names that are replaced before the rules are asked
    ignored: tuple[str, ...] = ()  # regular expressions of tensors that are not part of the model
    half_of: str = ""  # the kind of which this is one half, in a file of its own; ignored in a file that has the whole

    def fits(self, names: Mapping[str, object]) -> bool:
        """Tell whether tensors of these names, without their common prefix, are of this layout."""
        marked = all(any(way in names for way in mark.split("|")) for mark in self.marks)
        return marked and not any(name in names for name in self.absent)


SAME = (Row("*", "*"),)


def layouts_beside(file: str) -> tuple[Layout, ...]:
    """The layouts in the ``layouts.json`` beside a Python ``file``: fields of :class:`Layout`, whose rows have those of
    :class:`Row`. Sources: diffusers' conversion scripts; ComfyUI's ``supported_models`` for the names it saves."""

    def layout(rows: list[dict[str, Any]], words: Iterable[Iterable[str]] = (), **given: Any) -> Layout:
        values: dict[str, Any] = {key: tuple(item) if isinstance(item, list) else item for key, item in given.items()}
        return Layout(rows=tuple(Row(**row) for row in rows), words=tuple((old, new) for old, new in words), **values)

    return tuple(layout(**entry) for entry in json_file(Path(file).with_name("layouts.json")))


def listed(names: Sequence[str], most: int = 3) -> str:
    """The first few of ``names``, quoted, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(repr, names[:most])) + more


def is_another_model(unused: Collection[str], wanted: Iterable[str]) -> bool:
    """True if ``unused`` tensors show another model: too many, or ``wanted`` names but for the number of the block."""
    unnumbered = partial(re.sub, r"\d+", "#")
    return len(unused) > MOST_UNKNOWN or not {*map(unnumbered, unused)}.isdisjoint(map(unnumbered, wanted))


def renamed(entries: Entries, layout: Layout, path: Path, unknown: list[str] | None = None) -> dict[str, TensorEntry]:
    """``entries`` of a file, without a prefix, under the model's names; appends up to MOST_UNKNOWN that match no row to
    ``unknown``. Raises CheckpointError for more, or any without that list, and for rows that cannot be cut as said."""
    most_unknown, unknown = (0, []) if unknown is None else (MOST_UNKNOWN, unknown)
    rows = layout.rows if isinstance(layout.rows, tuple) else layout.rows(entries)
    ignored = [re.compile(pattern) for pattern in layout.ignored]
    named: dict[str, TensorEntry] = {}
    last: dict[int, int] = {}  # index of a row to the highest number in its names
    for name, entry in entries.items():
        if any(pattern.search(name) for pattern in ignored):
            continue
        for index, row in enumerate(rows):
            parts = _parts(row, reduce(lambda text, word: text.replace(*word), layout.words, name))
            if parts is None:
                continue
            targets = [filled(target, parts) for target in row.targets.split()]
            if row.last:
                last[index] = max(last.get(index, 0), int(parts[0]))
            named |= dict(zip(targets, _cut(name, entry, row, len(targets), entries, path), strict=True))
            break
        else:
            unknown.append(name)
    if len(unknown) > most_unknown:
        found = f"unknown tensors {listed(sorted(unknown))} in {str(path)!r}"
        fix = "Use the file as published, or put its config.json beside it as a diffusers folder."
        raise CheckpointError(found, expected=f"the tensors of {layout.name}", fix=fix)
    for index, number in last.items():  # tensors of the last block under the names that only it has
        pattern = name_pattern(rows[index].targets.split()[0])
        for name in list(named):
            match = pattern.fullmatch(name)
            if match is not None and int(match[1]) == number:
                named[filled(rows[index].last, match.groups())] = named.pop(name)
    return named


def _cut(name: str, entry: TensorEntry, row: Row, count: int, entries: Entries, path: Path) -> Iterable[TensorEntry]:
    """``entry`` cut along its rows into the ``count`` tensors of ``row``: in equal shares, or with ``first_square``
    into shares of as many rows as the weight has columns, such as queries, keys and values, and the rest last.
    Raises CheckpointError for rows that cannot be shared out."""
    if row.flat:  # a 1x1 convolution in place of a Linear
        shape = entry.shape
        while len(shape) > 2 and shape[-1] == 1:
            shape = shape[:-1]
        entry = replace(entry, shape=shape)
    entry = replace(entry, swapped=row.swapped, heads=row.heads) if row.swapped or row.heads else entry
    if count == 1:
        return [entry]
    rows = entry.shape[0] if entry.shape else 0
    sizes = [rows // count] * count
    if row.first_square:
        weight = entries.get(name.removesuffix("bias") + "weight", entry)
        side = weight.shape[1] if len(weight.shape) > 1 else 0
        sizes = [side] * (count - 1) + [rows - side * (count - 1)]
    if sum(sizes) != rows or min(sizes) <= 0:
        found = f"tensor {name!r} of shape {entry.shape} in {str(path)!r}"
        fix = "Use the file as published, or another version of it."
        raise CheckpointError(found, expected=f"rows for {count} tensors", fix=fix)
    return [entry.rows(sum(sizes[:index]), size) for index, size in enumerate(sizes)]


def _parts(row: Row, name: str) -> tuple[str, ...] | None:
    """The texts that stand for ``#`` and ``*`` of the row's source in ``name``; None where the row does not match."""
    for beginning, pattern in _sources(row.source):
        match = pattern.fullmatch(name) if name.startswith(beginning) else None
        if match is not None:
            return match.groups()
    return None


@lru_cache(maxsize=4096)
def _sources(source: str) -> tuple[tuple[str, re.Pattern[str]], ...]:
    """For each alternative of a row's source its literal beginning, which is quick to compare, and its pattern."""
    return tuple((re.split(r"[#*]", name)[0], name_pattern(name)) for name in source.split("|"))


def filled(target: str, parts: Iterable[str]) -> str:
    """``target`` with ``parts`` for its ``#`` and ``*``, in order."""
    remaining = iter(parts)
    return re.sub(r"[#*]", lambda _: next(remaining), target)


@lru_cache(maxsize=4096)
def name_pattern(name: str) -> re.Pattern[str]:
    """The regular expression of one name of a row, with a group for each ``#`` (a number) and ``*`` (anything)."""
    return re.compile(re.escape(name).replace(r"\#", r"(\d+)").replace(r"\*", "(.+)"))
