"""Unfinished samplings on disk: one file each, replaced after steps, removed when the sampling has ended."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ...compat.checkpoints.latents import read_record, record_in, write_record
from ...compat.device.execution import generator_for, to_host
from ...compat.errors import PackError
from ..sampling.resume import StepState
from .recovery import UNLISTED

log = logging.getLogger(__name__)

FOLDER = "steps"  # below that of finished latents, whose list leaves it out
KIND, VERSION = "steps", 1
SHARE = 0.008  # of the time of the steps that saving them takes: 1 % at most, with room for a slow moment of the disk
FIRST_SECONDS = 0.1  # that the first state is taken to cost, before one was measured
MOST = 32  # unfinished samplings, those of paused runs among them: 30 MB each at 720p, with a multistep solver more
LATENTS, SOLVER = "latents", "solver"


@dataclass(slots=True)
class SavedSteps:
    """Unfinished samplings in a folder, which several machines may share."""

    folder: Path  # of their files
    notify: Callable[[str], None]  # called once if the disk fails
    share: float = SHARE  # of the time that saving may take
    keeps: bool = False  # the last step of a sampling that has ended
    cost: float = FIRST_SECONDS  # seconds that the last state took
    spent: float = 0.0  # that all of them took since ``begun``
    failed: bool = False
    begun: float = field(default_factory=time.perf_counter)

    def found(self, key: str) -> StepState | None:
        """The saved state of a sampling, None where none can be read; restarts the clock that :meth:`due` goes by."""
        self.begun, self.spent = time.perf_counter(), 0.0
        path = self._path(key)
        if not path.is_file():
            return None
        try:
            tensors, metadata = read_record(path, "steps")
            return _state(tensors, record_in(metadata, path), key)
        except (*UNLISTED, RuntimeError) as error:
            log.warning("AnyGPU: cannot go on from %s: %s", path.name, error)
            return None

    def due(self) -> bool:
        """True if saving another state keeps the time spent on saving within ``share`` of the time until now."""
        return not self.failed and (time.perf_counter() - self.begun) * self.share >= self.spent + self.cost

    def save(self, key: str, state: StepState) -> bool:
        """Replace the saved state of this sampling; False once the disk failed, of which the user is told."""
        tensors = {LATENTS: to_host(state.latents)}  # waits for the device to finish the step: no cost of ours
        begun = time.perf_counter()
        solver: dict[str, Any] = {}
        for name, value in state.solver.items():
            items = value if isinstance(value, list) else [value]
            tensors |= {f"{SOLVER}.{name}.{n}": item for n, item in enumerate(items) if isinstance(item, torch.Tensor)}
            plain = [None if isinstance(item, torch.Tensor) else item for item in items]  # ``tensors`` has those
            solver[name] = plain if isinstance(value, list) else {"value": plain[0]}
        record = {"kind": KIND, "version": VERSION, "key": key, "done": state.done, "section": state.section}
        record |= {SOLVER: solver, "generator_state": state.generator_state.hex()}
        try:
            write_record(self._path(key), tensors, record)
            self._sweep(self._path(key))
        except (OSError, PackError) as error:
            self.failed = True
            self.notify(f"unfinished steps cannot be kept: {error}")
        self.cost = time.perf_counter() - begun
        self.spent += self.cost
        return not self.failed

    def drop(self, key: str) -> None:
        with suppress(OSError):
            self._path(key).unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.safetensors"

    def _sweep(self, saved: Path) -> None:
        """Remove the oldest beyond :data:`MOST`, half-written files of dead writers too; ``saved`` always stays."""
        dated = []
        for path in {*self.folder.glob("*.safetensors"), *self.folder.glob(".*.part")} - {saved}:
            with suppress(OSError):  # another process may have removed it
                dated.append((path.stat().st_mtime, path))
        for _, path in sorted(dated, reverse=True)[MOST - 1 :]:
            with suppress(OSError):  # another process may read it: that costs room, not what was just saved
                path.unlink(missing_ok=True)


def _state(tensors: Mapping[str, torch.Tensor], record: Mapping[str, Any], key: str) -> StepState:
    """The state in a file that may have been edited; raises one of UNLISTED or RuntimeError where it cannot be one."""
    if record.get("kind") != KIND or record.get("version") != VERSION or record.get("key") != key:
        raise ValueError("another kind of file, or of another sampling")
    solver: dict[str, Any] = {}
    for name, kept in dict(record[SOLVER]).items():
        items = kept if isinstance(kept, list) else [kept["value"]]
        whole = [tensors.get(f"{SOLVER}.{name}.{n}", item) for n, item in enumerate(items)]
        solver[str(name)] = whole if isinstance(kept, list) else whole[0]
    done, section = record["done"], record["section"]
    if type(done) is not int or type(section) is not int or not torch.isfinite(tensors[LATENTS]).all():
        raise ValueError("values that no sampling has")
    state = bytes.fromhex(record["generator_state"])
    generator_for(0, state)  # raises where this is none
    return StepState(done=done, section=section, latents=tensors[LATENTS], solver=solver, generator_state=state)
