"""Saved states of a sampling after its steps and sections, from which the next run of the same one resumes."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from ...compat.checkpoints.identity import bytes_of, whole_of
from ...compat.decision import Decision
from ...compat.device.execution import generator_for, placed, state_of
from ...compat.device.precision import Precision
from ...compat.output_check import NotFinite
from ...compat.ranks import Group
from ...compat.transforms.attention import SPARSE
from ..base import RECEIPT, Latents, Progress, Prompt
from ..pipeline import Pipeline, Resuming, StepState, StepStore
from .schedules import copied

log = logging.getLogger(__name__)

PLAIN = (type(None), bool, int, float, str)
LOSSY = "steps are not kept beside a step cache, whose memory would be lost: after a crash, {} begins anew"


@dataclass(frozen=True, slots=True)
class SectionState:
    """The state of a sampling between two sections."""

    latents: torch.Tensor  # so far, (1, C, T, H, W), fp32, in the transformer's space, so that no bit is lost
    lengths: tuple[int, ...]  # latent frames there were after each section
    generator_state: bytes  # for the noise of the next one


class SectionStore(Protocol):
    """Saves finished sections, and returns them when the same video is sampled again."""

    def found(self, key: str) -> SectionState | None:
        """State of an interrupted sampling of the same ``key``; None if there is none."""

    def save(self, key: str, index: int, count: int, latents: Latents, standing: SectionState) -> None:
        """Take in all sections so far, after section ``index`` of ``count``; ``latents`` can be decoded."""

    def drop(self, key: str) -> None:
        """Let no sampling go on from these sections."""


@dataclass(slots=True)
class InMemorySections:
    """Keeps finished sections during one sampling, so that none is lost if it has to start again."""

    beyond: SectionStore | None  # who saves them for longer
    standing: SectionState | None = None

    def found(self, key: str) -> SectionState | None:
        return self.standing or (None if self.beyond is None else self.beyond.found(key))

    def save(self, key: str, index: int, count: int, latents: Latents, standing: SectionState) -> None:
        self.standing = standing
        if self.beyond is not None:
            self.beyond.save(key, index, count, latents, standing)

    def drop(self, key: str) -> None:
        self.standing = None
        if self.beyond is not None:
            self.beyond.drop(key)


@dataclass(frozen=True, slots=True)
class LeaderStore:
    """Unfinished steps or sections that the leader saves in ``store``: every rank goes on where the leader does."""

    group: Group
    store: Any

    @property
    def keeps(self) -> bool:
        return bool(self.store.keeps)

    def found(self, key: str) -> Any:
        return self.group.on_leader(lambda: self.store.found(key))

    def due(self) -> bool:
        return self.group.leads and bool(self.store.due())

    def save(self, key: str, *state: Any) -> Any:
        return self.group.leads and self.store.save(key, *state)

    def drop(self, key: str) -> None:
        if self.group.leads:
            self.store.drop(key)


@dataclass(slots=True)
class Steps:
    """The steps of one run of the loop, saved by ``resuming``, which may go on after the last that was saved."""

    resuming: Resuming
    generator: torch.Generator  # draws the noise of later steps
    section: int = 0  # of a sampling in sections
    began: Mapping[str, Any] = field(default_factory=dict)  # the solver's fields before its first step
    last: StepState | None = None  # the state after the newest step but the very last; None before the first
    saved: StepState | None = None  # the one that is on disk, as far as is known
    ended: bool = False  # whether the very last step is done, after which a pause would only repeat it

    def restored(self, latents: torch.Tensor, solver: Any, count: int) -> tuple[torch.Tensor, int]:
        """The latents to go on from and how many steps are done, with ``solver`` and the generator set as they were
        then; ``latents`` and 0 where nothing is saved for this section and shape."""
        self.began = dict(vars(solver))
        state = None if self.resuming.broken else self.resuming.store.found(self.resuming.key())
        if state is None or state.section != self.section or not 0 < state.done < count:
            return latents, 0
        # A file that somebody edited may set the solver's values, but no method or property of its class.
        if state.latents.shape != latents.shape or any(hasattr(type(solver), name) for name in state.solver):
            return latents, 0
        for name, value in state.solver.items():
            setattr(solver, name, placed(value, latents.device))
        self.generator.set_state(generator_for(0, state.generator_state).get_state())
        where = f"after step {state.done} of {count}"
        decision = Decision("sampling", f"goes on {where}", "an earlier run of the same request was cut short there")
        self.resuming.progress.notify(str(decision))
        self.resuming.skipped += state.done
        self.last = self.saved = state
        return placed(state.latents, latents.device, latents.dtype), state.done

    def save(self, done: int, latents: torch.Tensor, solver: Any, count: int) -> None:
        """Keep the state after ``done`` of ``count`` steps in ``last``, and save it to disk if that is due; the last
        step leaves the one before. A field of ``solver`` that is no plain value or tensor ends saving for this run."""
        self.ended = done >= count
        if self.resuming.broken or self.ended:
            return
        self.last = None
        changed = {name: value for name, value in vars(solver).items() if self._differs(name, value)}
        items = {name: value if isinstance(value, list) else [value] for name, value in changed.items()}
        odd = [name for name, each in items.items() if not all(isinstance(e, (*PLAIN, torch.Tensor)) for e in each)]
        if odd:
            log.warning("AnyGPU: steps are not kept: the solver's %s is not a plain value", odd[0])
            self.resuming.broken = True
            return
        kept, drawn = copied(changed), state_of(self.generator)
        self.last = StepState(done=done, section=self.section, latents=latents, solver=kept, generator_state=drawn)
        if self.resuming.store.due() and self.resuming.save(self.last):
            self.saved = self.last

    def resumable(self) -> bool:
        """True if a sampling that is interrupted now would go on after its last step."""
        return self.last is not None and not (self.ended or self.resuming.broken) and bool(self.resuming.key())

    @contextmanager
    def saved_when_interrupted(self, count: int) -> Iterator[None]:
        """Around the loop of ``count`` steps: a cancel or an error saves the last finished step, but NotFinite forgets
        all, as the fault may lie in earlier ones; and so does the end, as what the loop made is saved elsewhere, unless
        the store keeps the last step for another try of what follows."""
        try:
            yield
            if not self.resuming.store.keeps:
                self.resuming.store.drop(self.resuming.key())
            elif self.last and self.last is not self.saved and not self.resuming.broken:
                self.resuming.save(self.last)
        except BaseException as error:
            with suppress(Exception):  # the device may be what failed
                if isinstance(error, NotFinite):
                    self.resuming.store.drop(self.resuming.key())
                elif self.last is not None and not self.resuming.broken and self.resuming.save(self.last):
                    self.resuming.progress.notify(
                        f"step {self.last.done} of {count} is saved: to go on from there, run it again with seed "
                        f"{self.resuming.seed} and the same inputs"
                    )
            raise

    def _differs(self, name: str, value: Any) -> bool:  # the solver's field, from what it was before the first step
        before = self.began.get(name)
        same = value is before or (isinstance(value, PLAIN) and value == before)
        return isinstance(value, list) or not same  # the solver puts a list's items in place


def with_steps(
    pipeline: Pipeline, store: StepStore, progress: Progress, stage: str, seed: int, prompt: Prompt, *request: Any
) -> Pipeline:
    """``pipeline`` whose next sampling saves its steps in ``store`` and goes on after those that are there, if
    ``prompt`` and ``request`` are the same. With a step cache it is returned as it is, and the user is told that
    ``stage``, in words, would begin anew after a crash."""
    if pipeline.plan.step_cache is not None:
        progress.notify(LOSSY.format(stage))
        return pipeline
    resuming = Resuming(store, resume_key(pipeline, prompt, *request), progress, seed)
    return replace(pipeline, run=replace(pipeline.run, resuming=resuming))


def resume_key(pipeline: Pipeline, prompt: Prompt, *request: Any) -> Callable[[], str]:
    """A function that gives the hash of all that decides the latents; "" until the model's bytes have been hashed.
    ``request`` is pictures and settings. The key leaves out the offload and the attention kernel, which a shortage
    changes, and names and times of files, which differ by machine; so also the receipt of latents to start from."""
    loras = getattr(pipeline.offloader.adapters, "loras", ())
    applied = [(lora.strength, lora.blocks, lora.mode, lora.scales) for lora in loras] or ""
    stored = [pipeline.model.storage.get("transformer", ""), *pipeline.parts.fallbacks]  # gone where fp32 came for fp16
    beside = [pipeline.model.configs["transformer"], pipeline.tools["scheduler"]]  # in no byte of a single file
    model = [stored, applied, pipeline.plan.step_cache, *beside, prompt.embeds, prompt.negative, prompt.sections]
    asked, sparse = pipeline.plan.speed.request, pipeline.plan.speed.attention.choice == SPARSE
    model += [asked.fp16_sums, asked.stored_products, sparse, *filter(None, [pipeline.model.recipe])]
    files = [pipeline.model.source, *(lora.path for lora in loras)]
    return _key_of(pipeline, [*model, *request], files, pipeline.model.request.state)


def painting_steps(
    store: StepStore, progress: Progress, pipeline: Any, generator: torch.Generator, seed: int, *request: Any
) -> Steps | None:
    """The steps of a painting, saved in ``store``, from which the same painting goes on: one of the same weights and
    ``request``, all else that decides its picture. None for weights that come from no file."""
    asked, names = pipeline.request, ("adapter", "lora", "vae", "image_encoder")
    model = asked.model if isinstance(asked.model, Path) else asked.model.file
    if model is None:
        return None
    files = {"model": model} | {name: path for name in names if (path := getattr(asked, name, None)) is not None}
    values = [[*files], getattr(asked, "weights", ""), getattr(asked, "lora_strength", 0), *request]
    return Steps(Resuming(store, _key_of(pipeline, values, [*files.values()], asked.state), progress, seed), generator)


def _key_of(pipeline: Any, values: list[Any], files: list[Path], state: Path | None) -> Callable[[], str]:
    """A function that gives the hash of ``values``, dtypes and every byte of ``files``; "" until those are hashed."""
    dtypes = {item.name: getattr(pipeline.precision, item.name) for item in fields(Precision) if item.name != "why"}
    digest = hashlib.sha256()
    for item in _bytes_in([pipeline.family, pipeline.variant, dtypes, *values]):
        digest.update(item)

    def key() -> str:
        wholes = [whole_of(path, state) for path in files]
        return hashlib.sha256(" ".join([digest.hexdigest(), *wholes]).encode()).hexdigest() if all(wholes) else ""

    return key


def _bytes_in(value: Any) -> Iterator[bytes]:
    """Bytes of ``value`` to hash, the same in every process: tensors bit for bit, mappings by name, no receipt."""
    if isinstance(value, torch.Tensor):
        yield f"{value.dtype}{tuple(value.shape)}".encode()
        yield bytes_of(value)
    elif isinstance(value, Mapping):
        for key in sorted(value.keys() - {RECEIPT}):
            yield f"<{key}>".encode()
            yield from _bytes_in(value[key])
    elif is_dataclass(value) and not isinstance(value, type):
        yield from _bytes_in({item.name: getattr(value, item.name) for item in fields(value)})
    elif isinstance(value, (list, tuple)):
        yield f"[{len(value)}]".encode()
        for item in value:
            yield from _bytes_in(item)
    else:
        yield f"{json.dumps(value, default=str)};".encode()
