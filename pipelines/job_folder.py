"""A folder through which jobs are handed over and results come back, for programs that share nothing but its files.

    NAME.jsonl         jobs, one to a line, in the order in which they were asked for
    inputs/            the pictures and meshes that jobs name
    results/KEY.mp4    a finished job's file, and KEY.json, which is written last: with it the job is done
    failed/KEY.txt     why a job has failed, in one line
    cancel/KEY         asks for the end of a job
    state/             steps of unfinished jobs, from which another machine can go on
    workers/NAME.json  what the workers of one driver did lately

Every file is written beside its place and renamed, so that a reader on another machine sees all of it or nothing.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..compat.durable import replacing
from ..compat.errors import CheckpointError, InputError

JOBS = ".jsonl"
KEY = re.compile(r"[0-9a-f]{16,64}")
NAME = re.compile(r"[\w][\w .-]{0,99}")
SUFFIXES = (".mp4", ".png", ".glb")
SILENT_SECONDS = 60.0  # without a word, after which a driver, which writes every few, has ended


@dataclass(frozen=True, slots=True)
class JobFolder:
    """One such folder; it is made when something is first written to it."""

    root: Path

    @property
    def inputs(self) -> Path:
        """Where the files are that jobs name."""
        return self.root / "inputs"

    @property
    def results(self) -> Path:
        """Where finished jobs are."""
        return self.root / "results"

    @property
    def state(self) -> Path:
        """Where the steps of unfinished jobs are kept."""
        return self.root / "state"

    def job_files(self) -> list[Path]:
        """The files with jobs, oldest first."""
        dated = []
        for path in self.root.glob(f"*{JOBS}"):
            with suppress(OSError):
                dated.append((path.stat().st_mtime_ns, path.name, path))
        return [path for *_, path in sorted(dated)]

    def write_jobs(self, name: str, lines: Iterable[str]) -> Path:
        """The file of ``lines``, each a job.

        Raises:
            InputError: a name that is none for a file.
        """
        if not NAME.fullmatch(name):
            raise InputError(
                f"the name {name!r} for jobs",
                expected="letters, digits, spaces, dots, - and _, 100 at most",
                fix="Choose another name, such as foxes.",
            )
        path = self.root / f"{name}{JOBS}"
        _write(path, "".join(f"{line}\n" for line in lines))
        return path

    def add_input(self, file: Path) -> str:
        """The name, relative to the folder, under which jobs find a copy of ``file``."""
        content = file.read_bytes()
        return self.add_content(content, file.suffix.lower())

    def add_content(self, content: bytes, suffix: str) -> str:
        """As :meth:`add_input`, for the bytes of a file that ends in ``suffix``."""
        path = self.inputs / f"{hashlib.sha256(content).hexdigest()[:32]}{suffix}"
        if not path.is_file():
            with replacing(path) as temporary:
                temporary.write_bytes(content)
        return path.relative_to(self.root).as_posix()

    def is_done(self, key: str) -> bool:
        """Whether the job of ``key`` is finished."""
        return (self.results / f"{key}.json").is_file()

    def done_keys(self) -> set[str]:
        """The keys of all finished jobs."""
        return {path.stem for path in self.results.glob("*.json") if KEY.fullmatch(path.stem)}

    def result(self, key: str) -> Path | None:
        """The file that the job of ``key`` made; None while it is not done."""
        if not self.is_done(key):
            return None
        return next((path for suffix in SUFFIXES if (path := self.results / f"{key}{suffix}").is_file()), None)

    def finish(self, key: str, record: Mapping[str, Any]) -> None:
        """Say that the job of ``key`` is done, after its file has been written.

        What a worker that died while it wrote left half done is removed.
        """
        for half in self.results.glob(f".{key}.*"):
            with suppress(OSError):  # of another worker, which has just finished it too
                half.unlink(missing_ok=True)
        _write(self.results / f"{key}.json", json.dumps(record, indent=1, sort_keys=True))
        with suppress(OSError):
            (self.root / "failed" / f"{key}.txt").unlink(missing_ok=True)

    def fail(self, key: str, text: str) -> None:
        """Say why the job of ``key`` will not be done."""
        _write(self.root / "failed" / f"{key}.txt", " ".join(text.split()))

    def failure(self, key: str) -> str:
        """Why the job of ``key`` failed; empty where it did not."""
        try:
            return (self.root / "failed" / f"{key}.txt").read_text(encoding="utf-8")
        except OSError:
            return ""

    def ask_again(self, keys: Iterable[str]) -> None:
        """Forget that jobs failed or were cancelled, so that they are tried once more."""
        for key in keys:
            with suppress(OSError):
                (self.root / "failed" / f"{key}.txt").unlink(missing_ok=True)
                (self.root / "cancel" / key).unlink(missing_ok=True)

    def cancel(self, keys: Iterable[str]) -> None:
        """Ask for the end of jobs."""
        for key in keys:
            if KEY.fullmatch(key):
                _write(self.root / "cancel" / key, "")

    def cancelled(self) -> set[str]:
        """The keys of jobs that are to be cancelled."""
        return {path.name for path in (self.root / "cancel").glob("*") if KEY.fullmatch(path.name)}

    def write_workers(self, driver: str, states: list[dict[str, Any]]) -> None:
        """Show what each worker of ``driver`` does, and no more what those of drivers did that ended."""
        path = self.root / "workers" / f"{driver}.json"
        _write(path, json.dumps(states, indent=1))
        with suppress(OSError):
            oldest = path.stat().st_mtime - SILENT_SECONDS  # by the clock of the disk: machines have others
            for other in path.parent.glob("*.json"):
                if other.stat().st_mtime < oldest:
                    other.unlink(missing_ok=True)

    def workers(self) -> list[dict[str, Any]]:
        """What each worker did when it was last written down; nothing if there are none."""
        states: list[Any] = []
        for path in sorted((self.root / "workers").glob("*.json")):
            with suppress(OSError, ValueError, RecursionError):
                read = json.loads(path.read_text(encoding="utf-8"))
                states += read if isinstance(read, list) else []
        return [state for state in states if isinstance(state, dict)]


def lines_of(path: Path) -> list[str]:
    """The jobs of a file, one to a line.

    Raises:
        CheckpointError: a file that cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{str(path)!r} cannot be read ({error})",
            expected="a text file with one job per line",
            fix="Write it again with AnyGPU Queue Jobs.",
        ) from error
    return [line for line in text.splitlines() if line.strip()]


def _write(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
