"""The content of a model, a file or pictures as hashes that are the same on every machine, without paths or times.
A file above :data:`WHOLE_BYTES` is hashed by its size and evenly spread samples: training changes nearly every weight.
Only :func:`whole_of`, a Merkle tree made once in the background, proves two of them equal."""

from __future__ import annotations

import hashlib
import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import torch

from ..device.execution import to_host
from ..device.facts import value_or
from ..durable import saved_json, write_json
from .headers import unreadable

WHOLE_BYTES = 64 * 1024**2  # up to which a file is hashed whole: LoRAs, encoders' tokenizers, configurations
SAMPLES, SAMPLE_BYTES = 64, 64 * 1024  # of a larger one: one per block of the largest transformers here
BLOCK_BYTES = 16 * 1024**2  # of the tree's leaves; a cancel is obeyed between two
SUFFIXES = frozenset((".safetensors", ".gguf", ".bin", ".json", ".txt", ".model"))
INDEX = "model_index.json"
DIGITS = 32  # of a hash: 128 bits
LENGTHS = (0, DIGITS, 2 * DIGITS)
WHOLES = "whole_files.json"
MOST_FILES = 4096  # of an index: the newest
RESTING_NS = 3 * 10**9  # a file that changed just now can change again in the same tick: FAT's is 2 s
log = logging.getLogger(__name__)


class FileIndex:
    """Texts about files by what identifies one that has not changed: device, inode, size, and two times in ns.
    ``path`` is the JSON file that keeps them, None for memory; one that is damaged or not writable is passed over."""

    def __init__(self, path: Path | None) -> None:
        self.path, self.changed, self.texts = path, False, _texts_in(path)

    def of(self, path: Path, make: Callable[[], str | None]) -> str | None:
        """The saved text about a file, else ``make()``, saved unless that is None or the file changed just now."""
        facts = facts_of(path)
        if facts not in self.texts:
            text, status = make(), path.stat()
            age = time.time_ns() - max(status.st_mtime_ns, status.st_ctime_ns)
            if text is None or facts_of(path) != facts or 0 <= age < RESTING_NS:
                return text
            self.texts[facts], self.changed = text, True
        return self.texts[facts]

    def save(self) -> None:
        """Write the texts, if there are new ones, with those of other processes; a failure is logged."""
        if self.path is None or not self.changed:
            return
        self.changed = False  # first: what another thread adds during the write is for the next one
        try:
            every = {**_texts_in(self.path), **self.texts}  # other processes have added theirs
            write_json(self.path, dict(list(every.items())[-MOST_FILES:]))
        except OSError as error:
            self.changed = True
            log.debug("%s is not written: %s", self.path, error)


def _texts_in(path: Path | None) -> dict[str, str]:
    """The saved texts of a :class:`FileIndex`; entries that are not hashes are left out."""
    record = None if path is None else saved_json(path)
    items = record.items() if isinstance(record, dict) else ()
    return {key: text for key, text in items if isinstance(text, str) and len(text) in LENGTHS}


_sampled = FileIndex(None)
_wholes: dict[Path | None, FileIndex] = {}
_waiting: queue.SimpleQueue[tuple[Path, Path | None]] = queue.SimpleQueue()
_asked: set[Path] = set()  # that wait for the thread
_one = threading.RLock()


def facts_of(path: Path) -> str:
    """A text that stays the same while a file is unchanged; its ctime is, on Windows, the time of creation."""
    now = path.stat()
    return f"{now.st_dev} {now.st_ino or path} {now.st_size} {now.st_mtime_ns} {now.st_ctime_ns}"  # FAT has no inodes


def content_of(path: Path) -> str:
    """The hash by which a file or model folder is found, large files by samples; 32 digits, none for a missing path."""
    return _hash_of(path, lambda file: str(_sampled.of(file, lambda: _by_samples(file))))[:DIGITS]


def whole_of(path: Path, state: Path | None, check: Callable[[], None] | None = None) -> str:
    """The hash of every byte of a file or model folder, in 64 digits; empty for a missing path, or if not ready yet.
    ``state`` is the folder that saves hashes (None: in memory); ``check`` is called between blocks of a file, and None
    leaves large files to a background thread, so that a later call has the hash."""
    with _one:
        index = _wholes.setdefault(state, FileIndex(None if state is None else state / WHOLES))
    missing: list[Path] = []

    def file_hash(file: Path) -> str:
        later = check is None and file.stat().st_size > WHOLE_BYTES
        found = index.of(file, lambda: None if later else _merkle(file, check or (lambda: None)))
        missing.extend([] if found else [file])
        return found or ""

    whole = _hash_of(path, file_hash)
    index.save()
    if not missing:
        return whole
    with _one:
        if path not in _asked:
            _asked.add(path)
            _waiting.put((path, state))
            if len(_asked) == 1:  # it was empty, so that no thread runs
                threading.Thread(target=_hash_in_background, name="anygpu-hashes", daemon=True).start()
    return ""


def _hash_in_background() -> None:
    """Hash the paths in ``_waiting`` until there are none."""
    while True:
        path, state = _waiting.get()
        value_or(partial(whole_of, path, state, lambda: None), "")  # what cannot be read is asked for again
        with _one:  # whoever adds the first path after this starts another thread
            _asked.discard(path)
            if not _asked:
                return


def picture_content(frames: torch.Tensor) -> str:
    """The hash of frames (F, H, W, 3 or 4) in 0..1, rounded to 8 bits as files have them."""
    levels = to_host(frames).clamp(0, 1).mul(255).round().to(torch.uint8)
    return levels_content(tuple(levels.shape), [bytes_of(levels)])


def levels_content(shape: Sequence[int], parts: Iterable[bytes | memoryview]) -> str:
    """The hash of :func:`picture_content` for 8-bit frames of ``shape``, whose bytes come in ``parts``."""
    digest = hashlib.sha256(json.dumps(list(shape)).encode())
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:DIGITS]


def values_hash(*values: torch.Tensor) -> str:
    """The hash of tensors: of every bit, their dtypes and shapes."""
    digest = hashlib.sha256()
    for each in values:
        digest.update(json.dumps([str(each.dtype), list(each.shape)]).encode())
        digest.update(bytes_of(each))
    return digest.hexdigest()[:DIGITS]


def bytes_of(values: torch.Tensor) -> bytes:
    """Every bit of a tensor of any dtype, in the order of its indices."""
    return to_host(values).contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _hash_of(path: Path, file_hash: Callable[[Path], str]) -> str:
    """The ``file_hash`` of a file, empty for a missing path; of a folder, even an empty one, a hash over the names and
    hashes of its files, links included, that decide its output (:data:`SUFFIXES`), in parts that a pipeline's index
    names, else in all. Parts that a demo model borrows do not count: both ship with the pack, and change together."""
    try:
        if path.is_file():
            return file_hash(path)
        if not path.is_dir():
            return ""
        index = saved_json(path / INDEX)
        named = {INDEX, *index} if isinstance(index, dict) else None
        parts = [part for part in path.iterdir() if named is None or part.name in named]
        files = (file for part in parts for file in (part.rglob("*") if part.is_dir() else [part]))
        digest = hashlib.sha256()
        for place in sorted(file.relative_to(path).as_posix() for file in files):
            file, hidden = path / place, any(name.startswith(".") for name in place.split("/"))
            if file.suffix in SUFFIXES and not hidden and file.is_file():
                digest.update(f"{place}\0{file_hash(file)}\0".encode())
        return digest.hexdigest()
    except OSError as error:
        raise unreadable(path, error) from error


def _by_samples(path: Path) -> str:
    """The hash of a file's size and all its bytes; above :data:`WHOLE_BYTES` of its size and evenly spread samples."""
    with path.open("rb") as file:
        size = path.stat().st_size
        digest = hashlib.sha256(f"{size}\0".encode())
        if size <= WHOLE_BYTES:
            digest.update(file.read())
        else:
            for index in range(SAMPLES):
                file.seek((size - SAMPLE_BYTES) * index // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:DIGITS]


def _merkle(path: Path, check: Callable[[], None]) -> str:
    """The root of a tree over a file's blocks: leaf ``sha256(0, block)``, root ``sha256(1, leaves)``; 64 digits."""
    root = hashlib.sha256(b"\1")
    with path.open("rb") as file:
        for block in iter(lambda: file.read(BLOCK_BYTES), b""):
            check()
            root.update(hashlib.sha256(b"\0" + block).digest())
    return root.hexdigest()
