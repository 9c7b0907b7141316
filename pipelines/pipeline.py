"""The pipeline that everybody is handed: its model, parts, device and plan, and the options of one run."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from ..compat.decision import Decision
from ..compat.device.facts import DeviceFacts, empty_cache, value_or
from ..compat.device.failures import DEVICE_ERRORS, is_shortage
from ..compat.device.precision import Precision
from ..compat.device.probe_store import ProbeStore
from ..compat.doctor import Doctor
from ..compat.memory.offloader import Offloader
from ..compat.memory.parts import KnownToHost, PartBytes, Parts
from ..compat.ranks import Group, Value
from ..compat.transforms.step_cache import StepCacheSettings
from .base import DecodeRequest, Progress
from .family import FamilySpec
from .requests import LoadRequest
from .speed import Speed

DEMOS = Path(__file__).resolve().parent / "demo" / "models"  # the models that ship with the pack
DEMO_LORAS = DEMOS.with_name("loras")  # for them


@dataclass(frozen=True, slots=True)
class StepState:
    """The state of a sampling between two steps."""

    done: int  # steps
    section: int  # of a sampling in sections, else 0
    latents: torch.Tensor  # as the loop has them
    solver: Mapping[str, Any]  # its fields that steps have changed: plain values, tensors, lists of tensors
    generator_state: bytes  # for noise that later steps draw


class StepStore(Protocol):
    """Saves unfinished steps, and returns them when the same video is sampled again."""

    @property
    def keeps(self) -> bool:
        """True for the last step of a sampling that has ended, too: its owner forgets all when the job is done."""

    def found(self, key: str) -> StepState | None:
        """State of an interrupted sampling of the same ``key``; None if there is none."""

    def due(self) -> bool:
        """True once enough time has passed that saving a state costs next to nothing."""

    def save(self, key: str, state: StepState) -> bool:
        """Replace the saved state of this sampling; returns True if that was done."""

    def drop(self, key: str) -> None:
        """Forget this sampling: it has ended."""


@dataclass(slots=True)
class Resuming:
    """The store of the steps of one sampling, and how far it is."""

    store: StepStore  # where
    key: Callable[[], str]  # of the sampling; "" until its model is known by every byte
    progress: Progress  # told where it goes on
    seed: int = 0  # of the request, which a user must give again
    broken: bool = False  # True once nothing more is saved, since the saved state may be the fault
    skipped: int = 0  # steps that an earlier run had done

    def abandon(self) -> None:
        """Forget the saved state and save no more: the sampling starts again in another precision."""
        self.broken = True
        self.store.drop(self.key())

    def save(self, state: StepState) -> bool:
        key = self.key()
        return bool(key) and self.store.save(key, state)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The model that a pipeline runs, by its files."""

    task: str  # ``text`` or ``image``
    variant: str  # of its family
    source: Path  # the folder or file it was loaded from
    request: LoadRequest  # the one it was loaded by
    configs: Mapping[str, Mapping[str, Any]]  # contents of each part's ``config.json``
    weights: Mapping[str, PartBytes]  # bytes of each part, for forecasts
    storage: Mapping[str, str]  # choice of storage of each part whose weights are stored smaller than they compute
    stands_in_for: str = ""  # the published model in whose place this demo model runs; empty otherwise
    recipe: str = ""  # the one of its family's that a name gave away; empty for its variant's
    names: tuple[str, ...] = ()  # that may say something of it, the nearest first
    control_factor: int = 1  # by which the control clip of its IC-LoRA is smaller than the video


@dataclass(frozen=True, slots=True)
class Device:
    facts: DeviceFacts  # of it
    precision: Precision  # dtype of each part there
    probes: ProbeStore | None  # answers of the device, saved as they come; None asks it nothing


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    offloader: Offloader  # moves its parts
    speed: Speed  # kernels, compile, profile
    decisions: tuple[Decision, ...] = ()  # of loading, in order
    step_cache: StepCacheSettings | None = None  # steps that its samplings skip; None for none


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The options of one run, put on the pipeline that this run is handed."""

    doctor: Doctor | None = None  # watches its samplings; None for none
    resuming: Resuming | None = None  # saves the steps of its sampling; None for none
    group: Group | None = None  # the processes that render one video together; None for this one alone
    decode: DecodeRequest | None = None  # the decode that a forecast counts; None for auto


@dataclass(frozen=True, slots=True)
class Pipeline(KnownToHost):
    """A pipeline that is ready to run."""

    spec: FamilySpec
    model: Checkpoint
    parts: Parts
    tools: Tools  # tokenizers, scheduler, image processors
    device: Device
    plan: PipelinePlan
    run: RunOptions = RunOptions()

    def __repr__(self) -> str:
        return f"<{self.family} {self.variant} {self.model.source.name!r}: {self.precision}; {self.offloader}>"

    @property
    def family(self) -> str:
        return self.spec.id

    @property
    def variant(self) -> str:
        return self.model.variant

    @property
    def configs(self) -> Mapping[str, Mapping[str, Any]]:
        return self.model.configs

    @property
    def weights(self) -> Mapping[str, PartBytes]:
        return self.model.weights

    @property
    def facts(self) -> DeviceFacts:
        return self.device.facts

    @property
    def precision(self) -> Precision:
        return self.device.precision

    @property
    def offloader(self) -> Offloader:
        return self.plan.offloader

    @property
    def patcher(self) -> Any:
        """The host's own handle of the transformer, by which its caches know a pipeline; None without a host."""
        return self.offloader.patcher

    @property
    def is_demo(self) -> bool:
        """True if its model ships with the pack, however it was chosen: by name, by path, or in another's place."""
        return DEMOS in value_or(self.model.source.resolve, self.model.source).parents

    def on_leader(self, call: Callable[[], Value]) -> Value:
        """Return the result of ``call``; of a group only the leader calls it: texts and pictures are encoded once."""
        return call() if self.run.group is None else self.run.group.on_leader(call)


class Tools:  # by name, each read when it is first asked for
    def __init__(self, readers: Mapping[str, Callable[[], Any]]) -> None:
        self.readers, self._read = dict(readers), dict[str, Any]()

    def __getitem__(self, name: str) -> Any:
        if name not in self._read:
            self._read[name] = self.readers[name]()
        return self._read[name]


GIVEN_UP = "_anygpu_given_up"  # on an error that every way on was tried for


def make_room_and_retry(
    pipeline: Pipeline,
    progress: Progress,
    parts: tuple[str, ...] = (),
    message: str = "sampling ran out of memory: continuing {}, after the last finished step",
) -> Callable[[BaseException], bool]:
    """Handler that a stage calls after an error: frees memory and returns True to try again. Where memory ran out,
    other parts leave the device; then ``parts`` (by default the transformers) move by block, then by layer; ``message``
    tells the user. The last try changes nothing: another program may have had the room. It returns False after that,
    for any other error, and in a group, whose other ranks wait inside the step."""
    parts = tuple(part for part in parts or pipeline.spec.transformers if part in pipeline.parts.readers)
    once_more = True

    def again(error: BaseException) -> bool:
        nonlocal once_more
        grouped = pipeline.run.group is not None  # the other ranks wait inside the step for data from this one
        if grouped or not parts or not is_shortage(error) or hasattr(error, GIVEN_UP):
            return False
        try:
            done = pipeline.offloader.reduce_memory(*parts)
        except DEVICE_ERRORS:  # no room to move parts either; the part may have left the device, its inputs not
            done, once_more = "", False
        if not done and once_more:
            done, once_more = "once more", False
        if not done:
            setattr(error, GIVEN_UP, True)  # a stage around a step must not start again for it
            return False
        gc.collect()
        empty_cache(pipeline.offloader.device)
        progress.notify(message.format(done))
        return True

    return again


@contextmanager
def held_once(
    pipeline: Pipeline, part: str, read: Callable[[Progress], nn.Module], activation_bytes: int, progress: Progress
) -> Iterator[Any]:
    """A network outside the pipeline: read and put on the device as ``part`` for the block, then dropped."""
    pipeline.parts.readers[part] = read
    try:
        with pipeline.offloader.hold(part, activation_bytes, progress) as network:
            yield network
    finally:
        pipeline.offloader.release(part)
        pipeline.parts.drop(part)
        pipeline.parts.readers.pop(part)
