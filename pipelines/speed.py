"""The speed choices of a pipeline: fused kernels, compiled blocks, step cache, profile; what a stage costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..compat.decision import AUTO, CHOSEN, Decision
from ..compat.device.facts import DeviceFacts
from ..compat.device.failures import is_shortage
from ..compat.device.precision import NAMES
from ..compat.device.probe_store import OK, ProbeResult
from ..compat.device.quirks import abilities_of
from ..compat.errors import InputError, PackError, UnsupportedError, first_line
from ..compat.memory.offloader import HOSTED
from ..compat.memory.parts import denoises, role_of
from ..compat.memory.statistics import stage_cost
from ..compat.probe_results import GELU, TRITON
from ..compat.transforms import compile as compiling
from ..compat.transforms import fused
from ..compat.transforms.attention import Attention
from ..compat.transforms.compile import Compilation, CompileSettings
from ..compat.transforms.fp16 import fp16_sums, require_fp16_sums
from ..compat.transforms.fused import FusedSites
from ..compat.transforms.fused_vae import fuse_vae
from ..compat.transforms.order import Order, Step, Undo
from ..compat.transforms.products import multiply_as_stored, require_products
from ..compat.transforms.step_cache import StepCacheSettings, cached, require_usable, settings_for
from .base import Latents, Pipeline, Progress, SampleSettings
from .forecast.seconds import Run, expected, work_key
from .forecast.shortage import EXPLAINED, explain_shortage
from .profiling import Profile

HostOffloader = Callable[..., Any]
TRANSFORMER, VAE = "transformer", "vae"
STEP_CACHE = "step cache"
UNEXPECTED = (  # not OSError: of a disk or a driver, whose own words say more
    *(TypeError, ValueError, LookupError, AttributeError, ArithmeticError),
    *(AssertionError, RuntimeError, ImportError),
)
MISFITS = ("shape", "size of tensor", "size mismatch", "channels", "config")  # in an error: not of its configuration


@dataclass(frozen=True, slots=True)
class Stage:
    """What a stage is called in a profile, in the memory statistics, and in a sentence."""

    range: str
    cost: str
    title: str
    part: str  # whose device it computes on

    @property
    def again(self) -> str:
        """What is said before it is run again, with a place for what was done."""
        return f"{self.title} ran out of memory: again {{}}"


@dataclass(frozen=True, slots=True)
class SpeedRequest:
    """What the user asks of speed.

    Args:
        kernels: one of ``fused.CHOICES``.
        compile: None for off.
        profile: where traces go; None for none.
        fp16_sums: whether sampling's fp16 products sum in fp16; lossy.
        stored_products: whether 8-bit weights are multiplied as they are stored; lossy.
    """

    kernels: str = fused.AUTO
    compile: CompileSettings | None = None
    profile: Profile | None = None
    fp16_sums: bool = False
    stored_products: bool = False

    def traced(self) -> AbstractContextManager[None]:
        """Around a whole run: one trace of it in the profile's file; nothing without a profile."""
        return nullcontext() if self.profile is None else self.profile.whole()


class Speed:
    """The choices of one pipeline, resolved for its device, and what came of them.

    Args:
        forms: by part, in which fused operations run; empty for none.
        kernels: the decision about them.
        attention: of the transformer.
        formats: of weights that are multiplied as they are stored.
        epilogue: whether the transformer's products may end in GELU.
    """

    def __init__(
        self,
        request: SpeedRequest,
        forms: Mapping[str, str],
        kernels: Decision,
        attention: Attention,
        formats: tuple[torch.dtype, ...] = (),
        epilogue: bool = False,
    ) -> None:
        self.formats, self.multiplied, self.epilogue = formats, 0, epilogue
        self.request, self.forms, self.kernels, self.attention = request, forms, kernels, attention
        self.fused: dict[str, FusedSites] = {}
        self.compiled: dict[str, Compilation] = {}
        off = Decision("compile", "off", "as set on the load node")  # the default, which needs no reason
        self.compile = Decision("compile", "on", "", CHOSEN) if request.compile else off
        self.profile = request.profile
        if request.compile is not None:
            parts = (TRANSFORMER, VAE) if request.compile.vae else (TRANSFORMER,)
            self.compiled = {part: Compilation(request.compile) for part in parts}

    def steps(self) -> tuple[Step, ...]:
        """The changes to parts, for their preparation."""
        steps: list[Step] = []
        if self.formats:
            steps.append(Step(Order.KERNELS, "products of stored weights", self._multiply))
        if any(self.forms.values()):
            steps.append(Step(Order.KERNELS, "fused kernels", self._fuse))
        if self.compiled:
            steps.append(Step(Order.COMPILE, "compiled blocks", self._compile))
        if self.profile is not None:
            steps.append(self.profile.step())
        return tuple(steps)

    def host_for(self, offload: str, hosted: HostOffloader | None) -> HostOffloader | None:
        """The host's offloader for ``offload``; none for ``auto`` with compile, which that offloader cannot have."""
        if hosted is None or offload != AUTO or not self.compiled:
            return hosted
        why = f"offload auto does without {HOSTED}, in which no block is one graph"
        self.compile = replace(self.compile, why=why)
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
        except UnsupportedError:
            if chosen:
                raise
            self.compiled.clear()
            why = f"offload {mode} was found fastest, and {compiling.WITH_OFFLOAD[mode]}"
            self.compile = Decision("compile", "off", why, AUTO)

    def decisions(self) -> tuple[Decision, ...]:
        """What was decided, for the load node."""
        return self.kernels, self.compile

    def line(self, title: str) -> str:
        """What runs, such as ``LTX-Video: 168 of 168 sites fused (triton), attention cuDNN, compile off``."""
        kernels = self.fused.get(TRANSFORMER) or self.kernels
        compiled = self.compiled.get(TRANSFORMER, "compile off")
        lossy = ", fp16 accumulation" if self.request.fp16_sums else ""
        if self.formats:
            lossy += f", {self.multiplied} layers multiplied as stored"
        return f"{title}: {kernels}, attention {self.attention.label}, {compiled}{lossy}"

    def notify(self, title: str, progress: Progress) -> None:
        """Say :meth:`line` where something is on."""
        if self.formats and not self.multiplied:
            progress.notify("stored_products has no effect: no weights of the transformer are in int8 or fp8")
        if self.forms.get(TRANSFORMER) or self.compiled or self.request.fp16_sums or self.multiplied:
            progress.notify(self.line(title))

    def notify_decoded(self, progress: Progress) -> None:
        """Say what was fused in the VAE, where something was."""
        if VAE in self.fused:
            progress.notify(f"VAE kernels: {self.fused[VAE]}")

    def _multiply(self, part: str, module: Any) -> Undo | None:
        if not denoises(part):
            return None
        self.multiplied, undo = multiply_as_stored(module, self.formats)
        return undo

    def _fuse(self, part: str, module: Any) -> Undo | None:
        form = self.forms.get(role_of(part), "")
        if not form:
            return None
        self.fused[part] = fused.fuse(module, form, self.epilogue) if denoises(part) else fuse_vae(module, form)
        return self.fused[part].restore

    def _compile(self, part: str, module: Any) -> Undo | None:
        if role_of(part) not in self.compiled or self.request.compile is None:
            return None
        return self.compiled.setdefault(part, Compilation(self.request.compile)).attach(module)


def speed_for(
    request: SpeedRequest,
    facts: DeviceFacts,
    elsewhere: Mapping[str, Any],
    precision: Any,
    probes: Mapping[str, ProbeResult] | None,
    attention: Attention,
) -> Speed:
    """The choices of ``request`` on the device of ``facts``.

    Args:
        elsewhere: part to its own device.
        precision: of the pipeline.
        probes: what the device answered; its word outranks a known bug's row.
        attention: of the transformer.

    Raises:
        InputError: an unknown choice. UnsupportedError: an explicit choice that cannot run here.
    """
    dtype = precision.compute or precision.transformer
    device, beside = (torch.device(elsewhere.get(part, facts.device)) for part in (TRANSFORMER, VAE))
    if request.fp16_sums:
        require_fp16_sums(facts, dtype)
    formats = require_products(facts) if request.stored_products else ()
    form, kernels = form_for(request.kernels, device, dtype, _unusable(device, dtype, facts, probes))
    against = fused.reason_against(beside, precision.vae) or _unusable(beside, precision.vae, facts, probes)
    needed = request.kernels in (fused.AUTO, fused.TRITON)  # the other choices run anywhere
    other = "" if request.kernels == fused.OFF or (needed and against) else request.kernels
    epilogue = form in (fused.AUTO, fused.TRITON) and probes is not None and _ends_in_gelu(probes, dtype)
    return Speed(
        request=request,
        forms={TRANSFORMER: form, VAE: other},
        kernels=kernels,
        attention=attention,
        formats=formats,
        epilogue=epilogue,
    )


def form_for(choice: str, device: torch.device, dtype: torch.dtype, unusable: str = "") -> tuple[str, Decision]:
    """The form that operations run in, empty for none, and the decision about it.

    Args:
        choice: one of :data:`fused.CHOICES`.
        dtype: of the token states.
        unusable: why a probe found launches unusable.

    Raises:
        InputError: unknown choice. UnsupportedError: ``triton`` where nothing can be launched.
    """
    if choice not in fused.CHOICES:
        raise InputError(
            f"kernels {choice!r}", expected=f"one of {', '.join(fused.CHOICES)}", fix="Choose one of these."
        )
    against = fused.reason_against(device, dtype) or unusable
    if choice == fused.TRITON and against:
        raise UnsupportedError(
            f"kernels 'triton' on {device}: {against}",
            expected="a GPU that Triton launches on, and fp32, fp16 or bf16",
            fix="Choose auto.",
        )
    if choice == AUTO:
        return ("" if against else AUTO), Decision("kernels", fused.OFF if against else fused.TRITON, against, AUTO)
    return ("" if choice == fused.OFF else choice), Decision("kernels", choice, "", CHOSEN)


def _ends_in_gelu(probes: Mapping[str, ProbeResult], dtype: torch.dtype) -> bool:
    """Whether a product was seen to end in GELU as well as two operations do it."""
    answer = probes.get(f"{GELU}.{NAMES[dtype]}")
    return answer is not None and answer.status == OK


def _unusable(
    device: torch.device, dtype: torch.dtype, facts: DeviceFacts, probes: Mapping[str, ProbeResult] | None
) -> str:
    """Why nothing is launched where nothing else speaks against it: what the probe says, else a known bug."""
    if fused.reason_against(device, dtype):
        return ""
    launches = abilities_of(facts, probes).verdict(TRITON)
    return "" if launches.usable else launches.why


def with_step_cache(pipeline: Pipeline, preset: str, asked: StepCacheSettings) -> Pipeline:
    """The pipeline with a step cache for its samplings, without one for ``off``; nothing is read again for it.

    Raises:
        InputError: a choice or number out of range. UnsupportedError: a kind that does not act on this family.
    """
    settings = settings_for(pipeline.spec.title, pipeline.spec.step_caches, preset, asked)
    decisions = [decision for decision in pipeline.decisions if decision.subject != STEP_CACHE]
    if settings is not None:
        decisions.append(Decision(STEP_CACHE, str(settings), "", CHOSEN))
    return replace(pipeline, step_cache=settings, decisions=tuple(decisions))


@contextmanager
def running(
    stage: Stage,
    pipeline: Pipeline,
    progress: Progress,
    size: Latents | SampleSettings | None = None,
    hint: str = "",
    run: Callable[[], Run] | None = None,
) -> Iterator[None]:
    """Around a stage: its range in a profile, its peak, traffic and time, and what to lower where memory runs out.

    Progress that has ``cost`` is given the line of what the stage cost; all of it is in the offloader's statistics.

    Args:
        size: has the width, height and frames that ran out; None for a stage that they do not matter to.
        hint: a way out that only this stage has.
        run: what its forecast of time is for, asked for where what it takes is kept; None for a stage that has none.
    """
    kept = pipeline.offloader.options.state is not None
    asked = run() if run is not None and kept else None
    time = None if asked is None else expected(pipeline, stage.cost, asked)
    seconds = {} if time is None else {"modelled_seconds": time.modelled, "forecast_seconds": time.seconds}
    device = pipeline.offloader.device_of(stage.part)
    profile = getattr(pipeline.speed, "profile", None)
    with (
        nullcontext() if profile is None else profile.stage(stage.range),
        stage_cost(pipeline, stage.cost, progress, device, **seconds) as cost,
    ):
        try:
            yield
            if time is not None and asked is not None:  # named at the end: the stage may have fallen back
                cost.work = work_key(pipeline, stage.cost, asked)
            if pipeline.resuming is not None and pipeline.resuming.skipped:  # a part of it: no measure of the whole
                cost.modelled_seconds = cost.forecast_seconds = 0.0
        except PackError:
            raise
        except Exception as error:
            if hasattr(error, EXPLAINED):
                raise
            if is_shortage(error):
                raise explain_shortage(error, pipeline, pipeline.spec, stage.title, size, hint, device) from error
            if isinstance(error, UNEXPECTED):
                raise _unexpected(error, stage, pipeline.source, device) from error
            raise


def _unexpected(error: Exception, stage: Stage, source: Path, device: torch.device) -> UnsupportedError:
    """The error for the unforeseen: a configuration that does not go with its weights, or a bug."""
    text = str(error).lower()
    misfit = isinstance(error, LookupError) or any(word in text for word in MISFITS)
    where, report = f"{stage.title} with {source.name!r}, {stage.part} on {device}", "please report this with the log"
    return UnsupportedError(
        f"{type(error).__name__} while {where}: {first_line(error)}",
        expected="a model whose settings belong together" if misfit else "no error that AnyGPU does not know",
        fix=f"Compare its JSON files with the published ones; if they are the same, {report}."
        if misfit
        else f"This is a bug of AnyGPU, or of this device's driver: {report}.",
    )


@contextmanager
def sampling_speed(pipeline: Pipeline, settings: SampleSettings, progress: Progress) -> Iterator[None]:
    """Around a sampling: the pipeline's step cache and fp16 sums; says what ran and what was skipped.

    Raises:
        UnsupportedError: a cache beside guidance or compiled blocks that it cannot share a transformer with.
    """
    cache, speed = pipeline.step_cache, pipeline.speed
    with ExitStack() as stack:
        if speed is not None and speed.request.fp16_sums:
            stack.enter_context(fp16_sums())
        counts: dict[str, Any] = {}
        if cache is not None and pipeline.group is not None:
            raise UnsupportedError(
                f"step cache {cache.kind!r} on {pipeline.group.world.size} devices",
                expected="no step cache, since each device would decide by its own tokens what to skip",
                fix="Set the step cache to off for these jobs.",
            )
        for part in () if cache is None else pipeline.spec.transformers:
            transformer = pipeline.parts.read(part, progress)
            require_usable(cache, transformer, settings.cfg, pipeline.spec.batched_cfg)
            counts[part] = stack.enter_context(cached(transformer, cache, settings.steps))
        yield
    for part, count in counts.items():
        progress.notify(f"{STEP_CACHE} {cache}{'' if part == TRANSFORMER else f', {part}'}: {count}")
    if speed is not None:
        speed.notify(pipeline.spec.title, progress)
