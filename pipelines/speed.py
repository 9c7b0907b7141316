"""What makes a pipeline faster, as it was chosen: fused kernels, compiled blocks, a step cache; and its profile."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from ..compat.device.facts import DeviceFacts
from ..compat.device.probe_results import TRITON
from ..compat.device.probe_store import OK, ProbeResult
from ..compat.errors import UnsupportedError
from ..compat.memory.offloader import HOSTED
from ..compat.transforms import compile as compiling
from ..compat.transforms import fused
from ..compat.transforms.compile import Compilation, CompileSettings
from ..compat.transforms.fp16 import fp16_sums, require_fp16_sums
from ..compat.transforms.fused import FusedSites
from ..compat.transforms.fused_vae import fuse_vae
from ..compat.transforms.order import Order, Step, Undo
from ..compat.transforms.step_cache import StepCacheSettings, cached, require_usable, settings_for
from .base import Pipeline, Progress, SampleSettings
from .profiling import Profile
from .registry import family_named

Result = TypeVar("Result")
Hosted = Callable[..., Any]
OFFLOAD_AUTO = "auto"
TRANSFORMER, VAE = "transformer", "vae"


@dataclass(frozen=True, slots=True)
class SpeedRequest:
    """What the user asks of speed.

    Args:
        kernels: one of ``compat.rewrites.CHOICES``. compile: None for off. profile: where traces go; None for none.
        fp16_sums: whether sampling's fp16 products sum in fp16; lossy.
    """

    kernels: str = fused.AUTO
    compile: CompileSettings | None = None
    profile: Profile | None = None
    fp16_sums: bool = False

    def traced(self) -> AbstractContextManager[None]:
        """Around a whole run: one trace of it in the profile's file; nothing without a profile."""
        return nullcontext() if self.profile is None else self.profile.whole()


class Speed:
    """The choices of one pipeline, resolved for its device, and what came of them.

    Args:
        forms: by part, in which fused operations run; empty for none. why: of kernels, in a sentence.
        attention: why which kernel attention runs, in a sentence.
    """

    def __init__(self, request: SpeedRequest, forms: Mapping[str, str], why: str, attention: str) -> None:
        self.request, self.forms, self.why = request, forms, why
        kernel = re.search(r"fused kernel \(([^)]*)\)|auto: (\w+), the fastest", attention)
        self.attention = (kernel[1] or kernel[2]) if kernel else attention.split(":")[0]
        self.fused: dict[str, FusedSites] = {}
        self.compiled: dict[str, Compilation] = {}
        self.compile_refused = self.beside_host = ""
        self.profile = request.profile
        if request.compile is not None:
            parts = (TRANSFORMER, VAE) if request.compile.vae else (TRANSFORMER,)
            self.compiled = {part: Compilation(request.compile) for part in parts}

    def steps(self) -> tuple[Step, ...]:
        """The changes to parts, for their preparation."""
        found: list[Step] = []
        if any(self.forms.values()):
            found.append(Step(Order.KERNELS, "fused kernels", self._fuse))
        if self.compiled:
            found.append(Step(Order.COMPILE, "compiled blocks", self._compile))
        if self.profile is not None:
            found.append(self.profile.step())
        return tuple(found)

    def host_for(self, offload: str, hosted: Hosted | None) -> Hosted | None:
        """The host's offloader for ``offload``; none for ``auto`` with compile, which that offloader cannot have."""
        if hosted is None or offload != OFFLOAD_AUTO or not self.compiled:
            return hosted
        self.beside_host = f"compile: offload auto does without {HOSTED}, in which no block is one graph"
        return None

    def settle_offload(self, mode: str, chosen: bool) -> None:
        """Refuse compile with an offload mode that was chosen; with one that `auto` found, leave it off and say so.

        Raises:
            UnsupportedError: the pair does not work.
        """
        if not self.compiled:
            return
        try:
            compiling.require_offload(mode)
        except UnsupportedError as error:
            if chosen:
                raise
            self.compiled.clear()
            self.compile_refused = f"compile off: offload {mode} was found fastest, and {compiling.WITH_OFFLOAD[mode]}"
            del error

    def notes(self) -> tuple[str, ...]:
        """What was decided, for the load node."""
        compiled = self.beside_host or ("compile on" if self.compiled else "compile off")
        return (self.why, self.compile_refused or compiled)

    def line(self, family: str) -> str:
        """What runs, such as ``LTX-Video: 168 of 168 sites fused (triton), attention cuDNN, compile off``."""
        fused = self.fused.get(TRANSFORMER)
        kernels = self.why if fused is None else str(fused).removeprefix("kernels: ")
        states = [str(made) for part, made in self.compiled.items() if part == TRANSFORMER]
        compiled = states[0] if states else "compile off"
        lossy = ", fp16 accumulation" if self.request.fp16_sums else ""
        return f"{family_named(family).FAMILY.title}: {kernels}, attention {self.attention}, {compiled}{lossy}"

    def notify(self, family: str, progress: Progress) -> None:
        """Say :meth:`line` where something is on."""
        if self.forms.get(TRANSFORMER) or self.compiled or self.request.fp16_sums:
            progress.notify(self.line(family))

    def notify_decoded(self, progress: Progress) -> None:
        """Say what was fused in the VAE, where something was."""
        if VAE in self.fused:
            progress.notify(f"VAE {self.fused[VAE]}")

    def _fuse(self, part: str, module: Any) -> Undo | None:
        form = self.forms.get(part, "")
        if not form:
            return None
        found = fused.fuse(module, form) if part == TRANSFORMER else fuse_vae(module, form)
        self.fused[part] = found
        return found.restore

    def _compile(self, part: str, module: Any) -> Undo | None:
        return self.compiled[part].attach(module) if part in self.compiled else None


def speed_for(
    request: SpeedRequest,
    facts: DeviceFacts,
    elsewhere: Mapping[str, Any],
    precision: Any,
    probes: Mapping[str, ProbeResult] | None,
    attention: str,
) -> Speed:
    """The choices of ``request`` on the device of ``facts``.

    Args:
        elsewhere: part to its own device. precision: of the pipeline.

    Raises:
        InputError: an unknown choice. UnsupportedError: an explicit choice that cannot run here.
    """
    dtype = precision.compute or precision.transformer
    device, beside = (torch.device(elsewhere.get(part, facts.device)) for part in (TRANSFORMER, VAE))
    if request.fp16_sums:
        require_fp16_sums(facts, dtype)
    form, why = fused.form_for(request.kernels, device, dtype, _probed(device, dtype, probes))
    against = fused.reason_against(beside, precision.vae) or _probed(beside, precision.vae, probes)
    needed = request.kernels in (fused.AUTO, fused.TRITON)  # the other choices run anywhere
    other = "" if request.kernels == fused.OFF or (needed and against) else request.kernels
    return Speed(request, {TRANSFORMER: form, VAE: other}, why, attention)


def _probed(device: torch.device, dtype: torch.dtype, probes: Mapping[str, ProbeResult] | None) -> str:
    """Why a probe found launches on ``device`` unusable; empty where nothing speaks against them."""
    if fused.reason_against(device, dtype) or probes is None or TRITON not in probes:
        return ""
    answer = probes[TRITON]
    return "" if answer.status == OK else f"its probe is {answer.status}: {answer.detail}"


def with_step_cache(pipeline: Pipeline, preset: str, asked: StepCacheSettings) -> Pipeline:
    """The pipeline with a step cache for its samplings, without one for ``off``; nothing is read again for it.

    Raises:
        InputError: a choice or number out of range. UnsupportedError: a kind that does not act on this family.
    """
    return replace(pipeline, step_cache=settings_for(pipeline.family, preset, asked))


def sped_up(pipeline: Pipeline, settings: SampleSettings, progress: Progress, run: Callable[[], Result]) -> Result:
    """What ``run``, a sampling, returns, under the pipeline's step cache; says what runs and what was skipped.

    Raises:
        UnsupportedError: a cache beside guidance or compiled blocks that it cannot share a transformer with.
    """
    cache, speed = pipeline.step_cache, pipeline.speed
    with fp16_sums(speed is not None and speed.request.fp16_sums):
        if cache is None:
            found = run()
        else:
            transformer = pipeline.parts.read(TRANSFORMER, progress)
            require_usable(cache, pipeline.family, transformer, settings.cfg)
            with cached(transformer, cache, settings.steps) as count:
                found = run()
            progress.notify(f"{cache}: {count}")
    if speed is not None:
        speed.notify(pipeline.family, progress)
    return found
