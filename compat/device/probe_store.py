"""Probe results: measured on first use, saved in one JSON file per device, driver, torch build and set of flags."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..durable import write_json
from ..errors import first_line, json_file
from . import probes as suite
from .facts import DeviceFacts, device_fault, flags, gone, value_or
from .failures import is_passing

log = logging.getLogger(__name__)

OK, WRONG, UNUSABLE, UNKNOWN = "ok", "wrong", "unusable", "unknown"
STATUSES = (OK, WRONG, UNUSABLE, UNKNOWN)
ENDED = "the process ended while it was asked"
UNSEEN_SECONDS = 600.0  # for which a process of another machine or container, which cannot be looked for, may be asking
IN_RUNS = "size classes in runs"  # key of what the guard of runs found: the fallback of each, empty if it is right
PACKED = "packed."  # probes of products that are known to end processes: only a new driver mends them


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Result of a probe."""

    status: str  # ``wrong``: the result is; ``unusable``: it raised; ``unknown``: not asked, never kept
    detail: str = ""  # what is wrong, the message raised, or a remark on a right answer
    milliseconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.status}: {self.detail}" if self.detail else self.status


Probes = Mapping[str, ProbeResult] | None  # answers by name, asked when they are read; None asks nothing
UNASKED = ProbeResult(UNKNOWN, "not tested yet")


class ProbeStore(Mapping[str, ProbeResult]):
    """The probe results of one device by name, saved in ``folder`` (None: in memory). A missing one is measured when
    it is read, but a ``quiet`` store measures nothing and returns ``unknown``, or None.
    ``more`` has probes of other layers, ``asked`` the flags of torch that results are for (None: the current ones)."""

    def __init__(
        self, facts: DeviceFacts, folder: Path | None = None, more: Mapping[str, suite.Probe] | None = None,
        asked: Mapping[str, bool] | None = None, quiet: bool = False,
    ) -> None:  # fmt: skip
        self.facts, self.folder, self.quiet = facts, folder, quiet
        self.probes: dict[str, suite.Probe] = {**suite.standard(), **(more or {})}
        self.key = key_of(facts, flags() if asked is None else asked)
        self.note = ""
        self._answers: dict[str, ProbeResult] = {}
        self._remembered: dict[str, Any] = {}
        self._asking = ""  # the probe that runs, saved in case it ends the process
        self._new: set[str] = set()  # names measured here that are not in the file yet
        self._lock = threading.RLock()
        self._read()

    @property
    def path(self) -> Path | None:
        return None if self.folder is None else self.folder / f"probes-{self.key}.json"

    def __getitem__(self, name: str) -> ProbeResult:
        with self._lock:
            if name not in self._answers:
                if name not in self.probes:
                    raise KeyError(name)
                if self.quiet:
                    return UNASKED
                self._ask([name])
            return self._answers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.probes)

    def __len__(self) -> int:
        return len(self.probes)

    def __contains__(self, name: object) -> bool:
        return name in self.probes

    def known(self) -> dict[str, ProbeResult]:
        """The results measured so far."""
        return dict(self._answers)

    def without_asking(self) -> dict[str, ProbeResult]:
        """Every answer, ``unknown`` where the device was not tested yet."""
        return {name: self._answers.get(name, UNASKED) for name in self.probes}

    def ask_all(self, again: bool = False) -> dict[str, ProbeResult]:
        """Run every probe and write the results; ``again`` forgets all but packed products that ended a process."""
        with self._lock:
            if again:
                answers = self._answers.items()
                self._answers = {name: one for name, one in answers if name.startswith(PACKED) and one.detail == ENDED}
                self._remembered.clear()
                self._write(merged=False)
            self._ask([name for name in self.probes if name not in self._answers])
            return {name: self[name] for name in self.probes}  # another store may have cleared the file meanwhile

    def remember(self, name: str, measure: Callable[[], Any]) -> Any:
        """A value for JSON, such as a timing, measured once per device and saved; None in a quiet store without it.
        None also where an earlier process died or was killed while it measured: until all probes are asked again."""
        with self._lock:
            if self.quiet:
                return self._remembered.get(name)
            if name not in self._remembered:
                with self._announced(name):
                    self._remembered[name] = measure()
                self._new.add(name)
                self._write()
            return self._remembered[name]

    def keep(self, name: str, value: Any) -> None:
        """Save a plain value that was measured elsewhere, in place of an earlier one; without syncing the disk."""
        with self._lock:
            self._remembered[name] = value
            self._new.add(name)
            self._write(synced=False)

    def recall(self, name: str, fresh: bool = False) -> Any:
        """The saved value, None without one; ``fresh`` reads the file again, which another store may have written."""
        if fresh:
            with self._lock:
                self._read()
        return self._remembered.get(name)

    def misses(self) -> dict[str, str]:
        """Size class of an operation whose result a run on this device found wrong -> the fallback that replaces it."""
        kept = self.recall(IN_RUNS)
        return {str(key): str(path) for key, path in kept.items() if path} if isinstance(kept, dict) else {}

    def _ask(self, names: list[str]) -> None:
        """Run these probes, and save their results."""
        if not names:
            return
        for name in names:
            with self._announced(name):
                self._answers[name] = answer(self.probes[name], self.facts)
            self._new.add(name)
        self._write()

    @contextmanager
    def _announced(self, name: str) -> Iterator[None]:
        """Save the name of the probe that the block runs, so that the next start knows if it ended the process."""
        outer, self._asking = self._asking, name
        try:
            self._write(synced=self.facts.device.type != "cpu")
            yield
        except (Exception, KeyboardInterrupt):  # the process goes on, or is ended by its user
            self._asking = outer
            self._write()
            raise
        self._asking = outer

    def _read(self) -> None:
        """Load the saved results, which another store may have written; those new here win. A damaged file is ignored.
        The probe that was running when its process ended counts as unusable, the value measured then as None."""
        if self.path is None:
            return
        try:
            content = json_file(self.path)
            answers = {name: _saved_result(entry) for name, entry in content["answers"].items() if name in self.probes}
            remembered = dict(content["remembered"])
            asked, *asker = content.get("asking") or ("", 0, 0.0)
            unanswered = isinstance(asked, str) and asked not in ("", *answers, *remembered)
            if unanswered and not _is_running(self.path, *asker):
                log.warning("AnyGPU: %s %s: it counts as unusable", asked, ENDED)
                if asked in self.probes:
                    answers[asked] = ProbeResult(UNUSABLE, ENDED)
                else:
                    remembered[asked] = None
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
            log.warning("AnyGPU: %s is damaged (%s): its probes run again", self.path, first_line(error))
            return
        self._answers = answers | {name: new for name, new in self._answers.items() if name in self._new}
        self._remembered = remembered | {name: new for name, new in self._remembered.items() if name in self._new}

    def _write(self, synced: bool = True, merged: bool = True) -> None:
        """Write all results, ``merged`` with the file's; ``synced``: reach the disk, for what follows may crash the
        machine. A failure is put into ``note``, after which nothing is written."""
        if self.path is None or self.folder is None or self.note:
            return
        if merged:
            self._read()
        answers = {name: asdict(result) for name, result in self._answers.items() if result.status != UNKNOWN}
        content: dict[str, Any] = {"device": str(self.facts), "versions": dict(self.facts.versions)}
        content |= {"answers": answers, "remembered": self._remembered}
        if self._asking:
            content["asking"] = [self._asking, os.getpid(), _started(os.getpid()), value_or(platform.node, "")]
        try:
            write_json(self.path, content, indent=1, synced=synced)
            self._new.clear()
        except OSError as error:
            self.note = (
                f"probe results cannot be kept in {str(self.folder)!r} ({first_line(error)}); expected a writable "
                "folder. The probes run again at every start: make the folder writable."
            )
            log.warning("AnyGPU: %s", self.note)


def answer(probe: suite.Probe, facts: DeviceFacts) -> ProbeResult:
    """The result of a probe on the device of ``facts``; UnsupportedError if it raises and the device is silent then."""
    started = time.perf_counter()
    try:
        with torch.inference_mode(False), torch.no_grad():
            fault = probe(facts.device)
    except Exception as error:  # Triton's errors, for one, have no base class but this
        if is_passing(error):
            return ProbeResult(UNKNOWN, f"no room for the test ({first_line(error)})", _since(started))
        silent = device_fault(facts.device)
        if silent:
            raise gone(facts.device, silent, facts.name) from error
        return ProbeResult(UNUSABLE, first_line(error), _since(started))
    return ProbeResult(OK if not fault or isinstance(fault, suite.Loose) else WRONG, str(fault), _since(started))


def key_of(facts: DeviceFacts, asked: Mapping[str, bool]) -> str:
    """Key of stored answers: device, driver, torch's build and flags, probes; none depends on the system's kernel."""
    versions = {name: version for name, version in facts.versions.items() if name != "kernel"}  # new each week
    device = (facts.backend, facts.name, facts.arch, facts.total_bytes, facts.driver)
    parts = (*device, facts.torch_version, facts.torch_build, versions, dict(asked), suite.SUITE)
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _saved_result(entry: Any) -> ProbeResult:
    """The result of an entry of a file that may have been edited; ValueError or TypeError if it has none."""
    result = ProbeResult(**entry)
    if result.status not in STATUSES or not isinstance(result.detail, str):
        raise ValueError(f"status {result.status!r}")
    return ProbeResult(result.status, result.detail, float(result.milliseconds))


def _is_running(path: Path, process: int, started: float, machine: str | None = None) -> bool:
    """True if the process that wrote ``path`` still runs; on another machine, if the file is young.
    Process ids repeat, in containers at each start, so that the start times must agree too."""
    if machine not in (None, value_or(platform.node, "")):
        return time.time() - path.stat().st_mtime < UNSEEN_SECONDS
    return abs(_started(process) - started) < 3.0  # processes do not agree on when the computer started


def _started(process: int) -> float:
    """Start time of a process in seconds; 0 if there is no such process, or the time is unknown."""

    def create_time() -> float:
        import psutil

        return float(psutil.Process(process).create_time())

    return value_or(create_time, 0.0)


def _since(started: float) -> float:
    """Milliseconds since ``started``, in seconds of ``time.perf_counter``."""
    return round(1e3 * (time.perf_counter() - started), 3)
