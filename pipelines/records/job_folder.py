"""A folder through which jobs are handed over and results come back, for programs that share nothing but its files.

    NAME.jsonl         jobs, one to a line, in the order in which they were asked for
    inputs/            the pictures and meshes that jobs name
    results/KEY.mp4    a finished job's file, and KEY.json, which is written last: with it the job is done
    failed/KEY.txt     why a job has failed, in one line
    cancel/KEY         asks for the end of a job
    state/             steps of unfinished jobs, from which another machine can go on
    workers/NAME.json  what the workers of one driver did lately

Every file is written beside its place and renamed, so that a reader on another machine sees all of it or nothing."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from ...compat.checkpoints.headers import plain_status
from ...compat.device.facts import value_or
from ...compat.durable import write_file
from ...compat.errors import CheckpointError, InputError, json_within
from ...compat.records import shown
from ..base import HALF
from .job import MOST_BYTES

JOBS = ".jsonl"
MOST_JOBS = 1_000_000  # of one file
MOST_CUT = 64  # times MOST_BYTES of its lines that are too long for a job: a file may claim more than its disk has
MOST_NAME_BYTES = 200  # file systems take 255, with the suffix and what stands around it while it is written
MOST_NOTE_BYTES = 16 * 1024**2
INPUTS = (".png", ".jpg", ".jpeg", ".webp", ".mp4", ".glb", ".obj", ".ply", ".stl")
MOST_INPUT_BYTES = 500_000_000
KEY = re.compile(r"[0-9a-f]{16,64}")
NAME = re.compile(r"(?!(?i:con|prn|aux|nul|(?:com|lpt)[\d¹²³]) *(?:\.|$))\w[\w .-]{0,99}")  # no device of Windows
SUFFIXES = (".mp4", ".png", ".glb")
SILENT_SECONDS = 60.0  # without a word, after which a driver, which writes every few, has ended


@dataclass(frozen=True, slots=True)
class JobFolder:
    """One such folder; it is made when something is first written to it."""

    root: Path

    @property
    def inputs(self) -> Path:
        return self.root / "inputs"

    @property
    def results(self) -> Path:
        return self.root / "results"

    @property
    def state(self) -> Path:
        return self.root / "state"

    def job_files(self) -> list[Path]:
        """The folder's files of jobs, oldest first."""
        dated = []
        for path in self.root.glob(f"*{JOBS}"):
            with suppress(OSError):
                dated.append((path.stat().st_mtime_ns, path.name, path))
        return [path for *_, path in sorted(dated)]

    def jobs_file(self, name: str) -> Path:
        """The file of jobs that is called ``name``; InputError for a name that some systems do not take."""
        if not NAME.fullmatch(name) or len(name.encode()) > MOST_NAME_BYTES:
            raise InputError(
                f"the name {name!r} for jobs",
                expected="a letter, digit or _, then letters, digits, spaces, dots, - and _: at most 100 characters "
                f"and {MOST_NAME_BYTES} bytes, and not what Windows calls a device, such as CON",
                fix="Choose another name, such as foxes.",
            )
        return self.root / f"{name}{JOBS}"

    def write_jobs(self, name: str, lines: Iterable[str]) -> Path:
        """Write ``lines``, each a job, as :meth:`jobs_file` of ``name``, over an older one; return its path."""
        path = self.jobs_file(name)
        write_file(path, "".join(f"{line}\n" for line in lines))
        return path

    def add_input(self, file: Path) -> str:
        """The name, relative to the folder, under which jobs find a copy of ``file``."""
        return self.add_content(file.read_bytes(), file.suffix.lower())

    def add_content(self, content: bytes, suffix: str) -> str:
        """Write a file's bytes into ``inputs/``, named by their hash and ``suffix``; return its name in the folder."""
        path = self.inputs / f"{hashlib.sha256(content).hexdigest()[:32]}{suffix}"
        if not path.is_file():
            write_file(path, content)
        return path.relative_to(self.root).as_posix()

    def input_file(self, name: str) -> Path:
        """The path of the picture, mesh or video that a job calls ``name``; its content is not checked. CheckpointError
        for a path outside ``inputs/``, no file, a suffix that is not in :data:`INPUTS`, or a file that is too large."""
        paths = inside((self.root,), name)
        # Half a character is a ValueError; before Python 3.13 a loop of links is a RuntimeError.
        path = value_or(paths[0].resolve, self.root) if paths else self.root
        if not path.is_relative_to(self.inputs.resolve()) or path.suffix.lower() not in INPUTS or not path.is_file():
            found = f"{shown(name)} as a file of a job"
            expected = f"a file in {str(self.inputs)!r} that ends in {', '.join(INPUTS)}"
            fix = "Queue the jobs again with AnyGPU Queue Jobs, which copies their files there."
            raise CheckpointError(found, expected=expected, fix=fix)
        if path.stat().st_size > MOST_INPUT_BYTES:
            found = f"{path.stat().st_size} bytes in {name!r}"
            raise CheckpointError(found, expected=f"{MOST_INPUT_BYTES} at most", fix="Make it smaller.")
        return path

    def is_done(self, key: str) -> bool:
        return (self.results / f"{key}.json").is_file()

    def done_keys(self) -> set[str]:
        return {path.stem for path in self.results.glob("*.json") if KEY.fullmatch(path.stem)}

    def show(self, name: str, title: str) -> None:
        """Hard-link the result file ``name`` as ``named/TITLE``, for people, over an older link; errors are ignored."""
        path = self.root / "named" / re.sub(r"[^\w.-]+", "_", title)
        with suppress(OSError):
            path.parent.mkdir(exist_ok=True)
            path.unlink(missing_ok=True)
            path.hardlink_to(self.results / name)

    def result(self, key: str) -> Path | None:
        """The file that the job of ``key`` made; None while it is not done, or if its file is gone."""
        if not self.is_done(key):
            return None
        return next((path for suffix in SUFFIXES if (path := self.results / f"{key}{suffix}").is_file()), None)

    def finish(self, key: str, record: Mapping[str, Any]) -> None:
        """Write ``record`` as KEY.json, which marks the job done: its file must be there. Half-written files of other
        workers, the job's saved steps and its failure are removed."""
        for half in self.results.glob(f".{key}.*"):
            with suppress(OSError):  # of another worker, which has just finished it too
                half.unlink(missing_ok=True)
        write_file(self.results / f"{key}.json", json.dumps(record, indent=1, sort_keys=True))
        shutil.rmtree(self.state / key, ignore_errors=True)
        with suppress(OSError):
            (self.root / "failed" / f"{key}.txt").unlink(missing_ok=True)

    def fail(self, key: str, text: str) -> None:
        write_file(self.root / "failed" / f"{key}.txt", " ".join(text.split()))

    def failure(self, key: str) -> str:
        return value_or(lambda: _text(self.root / "failed" / f"{key}.txt"), "")

    def ask_again(self, keys: Iterable[str]) -> None:
        """Forget that jobs failed or were cancelled, so that they are tried once more."""
        for key in keys:
            with suppress(OSError):
                (self.root / "failed" / f"{key}.txt").unlink(missing_ok=True)
                (self.root / "cancel" / key).unlink(missing_ok=True)

    def cancel(self, keys: Iterable[str]) -> None:
        for key in keys:
            if KEY.fullmatch(key):
                write_file(self.root / "cancel" / key, "")

    def cancelled(self) -> set[str]:
        return {path.name for path in (self.root / "cancel").glob("*") if KEY.fullmatch(path.name)}

    def write_workers(self, driver: str, states: list[dict[str, Any]]) -> None:
        """Replace the states of the workers of ``driver``; files of drivers silent for SILENT_SECONDS are removed."""
        path = self.root / "workers" / f"{driver}.json"
        write_file(path, json.dumps(states, indent=1))
        with suppress(OSError):
            oldest = path.stat().st_mtime - SILENT_SECONDS  # by the clock of the disk: machines have others
            for other in path.parent.glob("*.json"):
                if other.stat().st_mtime < oldest:
                    other.unlink(missing_ok=True)

    def workers(self) -> list[dict[str, Any]]:
        """The state of each worker, from the newest file that names it; damaged files and states are skipped."""
        states: dict[str, dict[str, Any]] = {}
        files = (self.root / "workers").glob("*.json")
        for path in sorted(files, key=lambda file: value_or(lambda: file.stat().st_mtime_ns, 0)):
            with suppress(OSError, ValueError):
                read = json_within(_text(path), path.name)
                for state in read if isinstance(read, list) else ():
                    if isinstance(state, dict) and isinstance(state.get("worker"), str):
                        states[state["worker"]] = state
        return list(states.values())


def each_line(path: Path) -> Iterator[str]:
    """The lines of a file of jobs that are not blank. Only a line feed ends one: prompts may hold other separators.
    A line of MOST_BYTES or more is cut to 60, and bytes that are not UTF-8 become lone surrogates, so that either is
    refused later as one job. Raises CheckpointError for an unreadable file, or one of too many or too long lines."""
    cut = 0
    try:
        plain_status(path)
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(MOST_BYTES), b"")):
                piece = line
                while len(piece) == MOST_BYTES and not piece.endswith(b"\n") and cut < MOST_CUT:  # its rest is skipped
                    line, piece, cut = line[:60], file.readline(MOST_BYTES), cut + 1
                if number == MOST_JOBS or cut == MOST_CUT:
                    found = f"more than {MOST_JOBS} lines or {MOST_CUT * MOST_BYTES} bytes"
                    raise CheckpointError(found, expected="fewer", fix="Write several files.")
                if line.strip():
                    yield line.decode("utf-8", "surrogateescape").rstrip("\r\n")
    except OSError as error:  # a CheckpointError is one, too, and has its own advice
        raise _unreadable(path, getattr(error, "found", str(error)), getattr(error, "fix", "")) from error


def lines_of(path: Path) -> list[str]:
    """All lines of :func:`each_line`; raises CheckpointError for a file that is not UTF-8, too."""
    lines = list(each_line(path))
    if any(HALF.search(line) for line in lines):
        raise _unreadable(path, "not UTF-8")
    return lines


def inside(roots: tuple[Path, ...], name: str) -> list[Path]:
    """``name`` below each of ``roots``, existing or not; [] for one that leads out of them or that no file can have."""
    place = PurePosixPath(name)
    if not name or "\0" in name or "\\" in name or place.is_absolute() or ".." in place.parts or ":" in name:
        return []
    longest = max(len(part.encode("utf-8", "surrogatepass")) for part in place.parts or ("",))
    return [root / place for root in roots] if longest <= 255 else []


def _unreadable(path: Path, why: str, fix: str = "") -> CheckpointError:
    return CheckpointError(
        f"{str(path)!r} cannot be read ({why})",
        expected=f"a text file with one job per line, {MOST_JOBS} at most",
        fix=fix or "Write it again with AnyGPU Queue Jobs.",
    )


def _text(path: Path) -> str:
    """The first MOST_NOTE_BYTES of a file as text, other bytes than UTF-8 replaced; raises OSError, for a pipe too."""
    plain_status(path)
    with path.open("rb") as file:
        return file.read(MOST_NOTE_BYTES).decode("utf-8", "replace")
