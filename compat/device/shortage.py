"""Out-of-memory errors of each back end: by class, by number, or by wording, of which ``shortage.csv`` has the rows."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from ..errors import PackError, csv_file


class Wording(NamedTuple):
    """One back end's wording of out of memory, in lower case with blanks for "_", and its source."""

    text: str
    backend: str
    source: str


def _rows(unsure: str) -> tuple[Wording, ...]:
    rows = (row for row in csv_file(Path(__file__).with_suffix(".csv")) if row["unsure"] == unsure)
    return tuple(Wording(row["text"], row["backend"], row["source"]) for row in rows)


SHORTAGE = _rows("")
UNSURE = _rows("yes")  # a shortage or something else, which the device alone can tell: `failures.is_shortage` asks it
KERNEL_LIMIT = "out of resource: "  # Triton on shared memory or registers; Inductor puts "OutOfMemoryError" before it
# ERROR_ARENA_TRASHED, _NOT_ENOUGH_MEMORY, _INVALID_BLOCK, _OUTOFMEMORY, _NO_SYSTEM_RESOURCES, _COMMITMENT_LIMIT,
# _NOT_ENOUGH_QUOTA of winerror.h: localised texts (Comfy-Org/ComfyUI#6606), three EINVAL in CPython (PC/errmap.h).
WINDOWS = (7, 8, 9, 14, 1450, 1455, 1816)
NUMBER = re.compile(r"\[winerror (\d+)\]|\(os error (\d+)\)")  # CPython's and Rust's ways to write one


def words_of(error: BaseException) -> str:
    """The text of an error as the rows have it."""
    return str(error).lower().replace("_", " ").replace("`", "")


def has_row(error: BaseException, rows: Sequence[Wording]) -> bool:
    """True if ``error``, of a class that back ends raise, has the words of one of ``rows`` and of no kernel's limit."""
    text = words_of(error)
    raised = isinstance(error, (RuntimeError, OSError)) and KERNEL_LIMIT not in text
    return raised and any(row.text in text for row in rows)


def says_shortage(error: BaseException) -> bool:
    """True if ``error`` reports out of memory in any back end's way; False for this pack's own errors."""
    if isinstance(error, PackError):
        return False
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or getattr(error, "errno", None) == errno.ENOMEM:
        return True
    return _is_of_windows(error) or has_row(error, SHORTAGE)


def _is_of_windows(error: BaseException) -> bool:
    """True if ``error`` has a number of :data:`WINDOWS`. Rust writes other systems' in the same way: they are told
    apart by this system's text for the number, which stands beside it."""
    text = words_of(error)
    for python, rust in NUMBER.findall(text):
        if int(python or rust) in WINDOWS and (python or os.strerror(int(rust)).lower() not in text):
            return True
    return getattr(error, "winerror", None) in WINDOWS
