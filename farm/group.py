"""Several processes of Ray's, one per device, that render each video together, and the worker that leads them.
Where one of its ranks dies or hangs, all of them are replaced, and the job goes on from its last step."""

from __future__ import annotations

import math
import os
import secrets
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from ..compat.device.execution import HOST
from ..compat.device.facts import facts_for, value_or
from ..compat.errors import UnsupportedError
from ..compat.ranks import LEADER, Group, Ranks
from ..compat.ray_clusters import answer
from ..pipelines.base import Progress, ProgressStage
from . import worker
from .render import KINDS, Renderer, job_of
from .worker import Ended, Outcome, RenderCancelled, RenderWatch, bind, during, outcome_of

BACKENDS = {"cuda": "nccl", "xpu": "xccl"}  # torch's own for devices that can send to one another
GLOO = "gloo"  # the others' backend, which takes tensors of the host
MEETINGS = "groups"  # folder, of the jobs' folder, through which ranks find one another
FORM_SECONDS = 600.0  # that processes have to come up, with a busy or sleeping machine among them
PATIENCE_SECONDS = 600.0  # that a rank waits for the others: also while one reads its model from a slow disk
CANCEL_SECONDS = 1.0  # that ranks have to agree on an end, at their next step
GRACE_SECONDS = 5.0  # after the first failure of a rank, until the others have ended too or are taken to be stuck
LOOK_SECONDS = 0.25
SAMPLING = "sampling"
_ORDER = {worker.REFUSED: 1, worker.FAILED: 1, worker.LOST: 2}  # 0 for others; the lowest tells why, a lost rank least


class AgreedWatch(RenderWatch):
    """The progress of a rank: it ends at a step, and at the same one as the others."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self._ranks = ranks

    def step(self, done: int, total: int, stage: ProgressStage, preview: Any = None) -> None:
        """Note the progress; after each step of the sampling, which all ranks take, end if any rank was cancelled."""
        ended = stage.name == SAMPLING and self._ranks.any(self.ended.is_set())
        super().step(done, total, stage, preview)
        if ended:
            raise RenderCancelled

    def check(self) -> None:
        """Nothing: a rank that ended between two steps would leave the others waiting."""


class Rank:
    """One process of a group. Ray makes an actor of it, with threads, so that it answers during a render."""

    def __init__(self, renderer: Renderer, rank: int, size: int, halves: bool, patience: float) -> None:
        self.renderer, self.rank, self.size, self.halves, self.patience = renderer, rank, size, halves, patience
        self._watch = RenderWatch()
        self._group: Group | None = None

    def join(self, meeting: str, loopback: str) -> dict[str, Any]:
        """Form the group with the other ranks, found through the file ``meeting``; returns facts about this rank.
        ``loopback`` names the network interface to stay on; empty for the one of the machine's name."""
        if loopback:
            os.environ.update({"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback})
        bind(self.renderer)
        facts = facts_for(self.renderer.device)
        own = BACKENDS.get(facts.device.type, GLOO)
        backend = own if distributed.is_backend_available(own) else GLOO
        device = HOST if backend == GLOO else facts.device
        self._group = self.renderer.group = self._new_group(meeting, backend, device)
        self._group.world.any(False)  # the first exchange is what opens the connections
        alike = {"device": facts.name, "torch": torch.__version__, "anygpu": version("anygpu")}
        return {**alike, "host": socket.gethostname(), "pid": os.getpid(), "backend": backend}

    def _new_group(self, meeting: str, backend: str, device: torch.device) -> Group:
        """Join torch's process group; returns the group of all ranks, and with ``halves`` this rank's half."""
        patience, store = timedelta(seconds=self.patience), distributed.FileStore(meeting, self.size)
        distributed.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, timeout=patience)
        world, middle = Ranks(None, self.rank, self.size, device), self.size // 2
        if not self.halves:
            return Group(world)
        lists = [*range(middle)], [*range(middle, self.size)]
        groups = [distributed.new_group(ranks, timeout=patience) for ranks in lists]  # each rank forms both
        return Group(world, Ranks(groups[self.rank // middle], self.rank % middle, middle, device))

    def render(self, line: str) -> dict[str, Any] | Outcome:
        """Render a job with the other ranks; returns the job's record, or its outcome if it failed."""
        assert self._group is not None
        self._watch = AgreedWatch(self._group.world)
        try:
            return self.renderer.render(line, self._watch)
        except RenderCancelled:
            return Outcome(worker.CANCELLED, "cancelled")
        except Exception as error:  # whatever it is: the worker decides what becomes of the group
            return outcome_of(error, self.renderer.device)

    def state(self) -> dict[str, Any]:
        watch = self._watch
        return {"done": watch.done, "total": watch.total, "stage": watch.stage, "notes": list(watch.notes)}

    def preview(self) -> Any:
        return self._watch.picture()

    def cancel(self) -> None:
        self._watch.ended.set()


@dataclass
class GroupRenderer:
    """Renders with a group of ranks, which it starts for its first job."""

    renderer: Renderer  # what each rank renders with
    size: int  # of the group
    needs: Mapping[str, float]  # of each rank (num_cpus, num_gpus)
    placement: Any  # Ray's room for them
    halves: bool = False  # each branch of guidance goes to half of the ranks
    loopback: str = ""  # interface to stay on; empty for any
    patience: float = PATIENCE_SECONDS  # seconds that ranks wait for one another
    device: str = "cpu"  # of the process that leads; a rank whose device fails is replaced
    _ranks: list[Any] = field(default_factory=list, repr=False)
    _names: list[str] = field(default_factory=list, repr=False)
    _meeting: str = field(default_factory=lambda: secrets.token_hex(8))

    @property
    def folder(self) -> Path:
        return self.renderer.folder

    def render(self, line: str, progress: Progress) -> dict[str, Any]:
        """Render a job on all ranks; returns the leader's record. UnsupportedError for a mesh, Ended if one fails."""
        if KINDS[job_of(line).kind].split is None:
            found = f"a mesh to texture on {self.size} devices"
            expected = "a video: only videos are split over the devices of a group"
            raise UnsupportedError(found, expected=expected, fix="Run the same folder once more without --group.")
        if not self._ranks:
            self._form(progress)
        return self._result([rank.render.remote(line) for rank in self._ranks], progress)

    def _form(self, progress: Progress) -> None:
        """Start the ranks and have them join; an error kills them all, and one of Ray's becomes Ended."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        meetings = self.folder / MEETINGS
        with during(worker.MACHINE):
            meetings.mkdir(parents=True, exist_ok=True)
            for former in meetings.glob(f"{self._meeting}-*"):
                former.unlink(missing_ok=True)
        meeting = meetings / f"{self._meeting}-{secrets.token_hex(4)}"
        actor: Any = ray.remote(Rank)
        try:
            for rank in range(self.size):
                place = PlacementGroupSchedulingStrategy(self.placement, placement_group_bundle_index=rank)
                made = actor.options(max_concurrency=4, scheduling_strategy=place, **self.needs)  # see Rank
                self._ranks.append(made.remote(self.renderer, rank, self.size, self.halves, self.patience))
            answer(ray, [rank.state.remote() for rank in self._ranks], progress.check, FORM_SECONDS)  # all are up
            joining = [rank.join.remote(str(meeting), self.loopback) for rank in self._ranks]
            each = answer(ray, joining, progress.check, FORM_SECONDS)
            _require_alike(each)
        except BaseException as error:
            self._give_up()
            if not isinstance(error, ray.exceptions.RayError):
                raise
            text = f"{self.size} ranks did not form a group ({(str(error).strip() or 'one died').splitlines()[-1]})"
            raise Ended(Outcome(worker.LOST, _advice(text, "leave out --group where they do not help."))) from error
        self._names = [
            f"rank {rank} of {self.size} ({one['host']}, process {one['pid']})" for rank, one in enumerate(each)
        ]

    def _result(self, calls: list[Any], progress: Progress) -> dict[str, Any]:
        """The leader's record, once each rank has answered its call of ``calls``; Ended if any failed or died."""
        import ray

        waiting, ended = dict(zip(calls, range(self.size), strict=True)), {}
        notes, deadline, dead = 0, math.inf, list[int]()  # notes passed on; when ranks that go on are stuck
        while waiting and time.monotonic() <= deadline:
            ready, _ = ray.wait(list(waiting), num_returns=1, timeout=LOOK_SECONDS)
            for call in ready:
                rank = waiting.pop(call)
                try:
                    ended[rank] = ray.get(call)
                except (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError):  # the memory monitor's too
                    dead.append(rank)
                if rank in dead or isinstance(ended[rank], Outcome):
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
            try:
                if waiting and deadline == math.inf:
                    notes = self._report(progress, notes)
            except RenderCancelled:
                self._cancel(list(waiting))
                raise
        failures = [ended[rank] for rank in sorted(ended) if isinstance(ended[rank], Outcome)]
        if failures or dead:
            raise Ended(self._settle_failure(failures, dead, sorted(waiting.values())))
        record: dict[str, Any] = ended[LEADER]
        return record

    def _settle_failure(self, failures: list[Outcome], dead: list[int], stuck: list[int]) -> Outcome:
        """The cause of a group's failure; kills its ranks if any is ``dead`` or ``stuck``, or the job is not at fault.
        Ranks that wait for one that fails fail too, so that not every failure is the cause."""
        reason = min(failures, key=lambda one: _ORDER.get(one.status, 0), default=Outcome(worker.LOST))
        if dead or stuck or reason.status in (worker.LOST, worker.BROKEN):
            self._give_up()
        gone, silent = (" and ".join(self._names[rank] for rank in some) for some in (dead, stuck))
        if dead:
            return Outcome(worker.LOST, _advice(f"{gone} died{f', and {silent} did not end' if stuck else ''}"))
        if stuck and reason.status == worker.LOST:
            return Outcome(worker.LOST, _advice(f"{silent} hangs: no answer to the others for {self.patience:g} s"))
        return reason

    def _report(self, progress: Progress, told: int) -> int:
        """Pass on the leader's progress, and its notes after the first ``told``; returns the number of notes now."""
        import ray

        leader = self._ranks[LEADER]
        with suppress(ray.exceptions.RayError, TimeoutError):  # of a leader that is gone, its call tells
            state = answer(ray, leader.state.remote(), progress.check, GRACE_SECONDS)
            for note in state["notes"][told:]:
                progress.notify(note)
            told = len(state["notes"])
            picture = (lambda: self._preview(progress)) if state["stage"].name == SAMPLING else None
            progress.step(state["done"], state["total"], state["stage"], picture)
        progress.check()
        return told

    def _preview(self, progress: Progress) -> torch.Tensor:
        """Frames (1, H, W, 3) in 0..1 of the leader's next step; raises TimeoutError where there is none in time."""
        import ray

        pixels = answer(ray, self._ranks[LEADER].preview.remote(), progress.check, worker.PREVIEW_SECONDS)
        if pixels is None:
            raise TimeoutError
        return torch.tensor(pixels)[None].float() / 255

    def _cancel(self, waiting: list[Any]) -> None:
        """Have the ranks end together at their next step; kill them if that takes long."""
        import ray

        for rank in self._ranks:
            rank.cancel.remote()
        _, late = ray.wait(waiting, num_returns=len(waiting), timeout=CANCEL_SECONDS)
        if late:
            self._give_up()

    def _give_up(self) -> None:
        """Kill the ranks; the next job starts others."""
        import ray

        for rank in self._ranks:
            ray.kill(rank)
        self._ranks = []


def _advice(found: str, fix: str = "raise --patience where devices, disks or the network are that slow.") -> str:
    expected = "every rank alive, and its part of each exchange in time"
    return f"{found}; expected {expected}. See Ray's logs of that machine; {fix}"


def _require_alike(ranks: list[dict[str, Any]]) -> None:
    """Raise UnsupportedError for ranks whose numbers would differ: each goes on with its own copy of the latents."""
    for name in ("device", "torch", "anygpu"):
        different = list(dict.fromkeys(str(rank[name]) for rank in ranks))
        if len(different) > 1:
            found = f"one video on {name} {' and '.join(different)}"
            fix = "Render whole videos on unlike devices: leave out --group; or install the same versions."
            raise UnsupportedError(found, expected="alike devices with the same versions", fix=fix)


def loopback_name() -> str:
    """The name of the network interface with 127.0.0.1; empty if unknown."""
    import psutil

    named = value_or(psutil.net_if_addrs, {}).items()
    return next((str(name) for name, found in named if any(one.address == "127.0.0.1" for one in found)), "")
