"""The speed choices of a pipeline: fused kernels, compiled blocks, step cache, profile; what a stage costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..compat.decision import AUTO, CHOSEN, Decision
from ..compat.device.execution import COMPILED, add_hook
from ..compat.device.facts import DeviceFacts
from ..compat.device.precision import NAMES
from ..compat.device.probe_store import OK, ProbeResult, ProbeStore
from ..compat.device.quirks import abilities_of
from ..compat.errors import UnsupportedError, require_choice
from ..compat.memory.offloader import HOSTED
from ..compat.memory.parts import denoises, role_of
from ..compat.probe_results import GELU, TRITON
from ..compat.transforms import compile as compiling
from ..compat.transforms import fused
from ..compat.transforms.attention import Attention
from ..compat.transforms.compile import Compilation, CompileSettings
from ..compat.transforms.fp16 import require_fp16_sums
from ..compat.transforms.fused import FusionPoints
from ..compat.transforms.fused_vae import fuse_vae
from ..compat.transforms.order import Order, Step, Undo
from ..compat.transforms.products import multiply_as_stored, require_stored_matmuls

RANGE = "anygpu"  # begins the name of every range of ours
HostOffloader = Callable[..., Any]
UNCOMPILED = Decision("compile", "off", "as set on the load node")  # the default, which needs no reason
TRANSFORMER, VAE = "transformer", "vae"


class Profile:
    """Profiles a whole run into the file ``path``, or a stage that runs alone into a numbered file beside it."""

    def __init__(self, path: Path) -> None:
        self.path, self.running = path, False
        self._open: list[tuple[nn.Module, Any]] = []  # modules that run now, and their ranges

    def whole(self) -> AbstractContextManager[None]:
        return self._traced(self.path)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """A profiler range around a stage, and a trace of its own in a numbered file if no whole run is traced."""
        from torch.profiler import record_function

        trace = nullcontext() if self.running else self._traced(self._next_path(name.replace(" ", "-")))
        with trace, record_function(f"{RANGE} stage: {name}"):
            yield

    def step(self) -> Step:
        """The step that gives the modules of a newly read part their ranges, after all other changes."""
        return Step(Order.COMPILE, "profile ranges", self._add_ranges)

    def _next_path(self, stage: str) -> Path:
        """The next numbered file of a stage: earlier runs are kept, to compare them."""
        number = 1
        while (path := self.path.with_name(f"{self.path.stem}-{stage}-{number:03}{self.path.suffix}")).exists():
            number += 1
        return path

    @contextmanager
    def _traced(self, target: Path) -> Iterator[None]:
        """Trace the ``with`` block into the file ``target``. Ranges that a cancel left open end before their trace:
        torch writes the end of a range into the trace that began it, and the process dies where that one is gone."""
        from torch.profiler import profile, supported_activities

        target.parent.mkdir(parents=True, exist_ok=True)
        with profile(activities=supported_activities()) as trace:
            self.running = True
            try:
                yield
            finally:
                self.running = False
                self._close_down_to(0)
        trace.export_chrome_trace(str(target))

    def _add_ranges(self, part: str, module: nn.Module) -> Callable[[], None] | None:
        """Give ranges to blocks in ``module``'s lists and to children of uncompiled ones; returns the undo, or None."""
        undo = Undo()
        for name, owner in module.named_modules():
            if not isinstance(owner, nn.ModuleList):
                continue
            for index, block in enumerate(owner):
                self._add_range(f"{RANGE} block: {part}.{name}.{index}", block, undo)
                if not hasattr(block, COMPILED):
                    for child_name, child in block.named_children():
                        if not isinstance(child, nn.ModuleList):
                            self._add_range(f"{RANGE} op: {part}.{name}.{index}.{child_name}", child, undo)
        return undo.restore if undo else None

    def _add_range(self, text: str, module: nn.Module, undo: Undo) -> None:
        """Open and close a range ``text`` by hooks, which survive an offloader's wrapping of ``forward``."""
        undo.append(add_hook(module, partial(self._enter, text), before=True, prepend=True).remove)
        undo.append(add_hook(module, self._leave, always_call=True).remove)

    def _enter(self, text: str, module: nn.Module, inputs: Any) -> None:  # begins a range while a trace runs
        from torch.profiler import record_function

        if self.running:
            self._open.append((module, record_function(text)))
            self._open[-1][1].__enter__()

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """End the range of ``module`` and those inside it that an exception left open."""
        depth = max((place for place, (owner, _) in enumerate(self._open) if owner is module), default=len(self._open))
        self._close_down_to(depth)

    def _close_down_to(self, depth: int) -> None:
        """End the open ranges above the first ``depth``, innermost first."""
        while len(self._open) > depth:
            self._open.pop()[1].__exit__(None, None, None)


@dataclass(frozen=True, slots=True)
class SpeedRequest:
    kernels: str = fused.AUTO  # one of ``fused.CHOICES``
    compile: CompileSettings | None = None  # None for off
    profile: Profile | None = None  # where traces go; None for none
    fp16_sums: bool = False  # whether sampling's fp16 products sum in fp16; lossy
    stored_products: bool = False  # whether 8-bit weights are multiplied as they are stored; lossy

    def traced(self) -> AbstractContextManager[None]:
        """Around a whole run: one trace of it in the profile's file; nothing without a profile."""
        return nullcontext() if self.profile is None else self.profile.whole()


@dataclass(eq=False)
class Speed:
    """The choices of one pipeline, resolved for its device, and what came of them."""

    request: SpeedRequest
    forms: Mapping[str, str]  # by part, in which fused operations run; empty for none
    kernels: Decision
    attention: Attention
    formats: tuple[str, ...] = ()  # of weights that are multiplied as they are stored
    epilogue: bool = False  # whether the transformer's products may end in GELU
    multiplied: dict[str, int] = field(default_factory=dict)  # layers by part
    fused: dict[str, FusionPoints] = field(default_factory=dict)
    compiled: dict[str, Compilation] = field(default_factory=dict)
    compile: Decision = UNCOMPILED

    def __post_init__(self) -> None:
        if self.request.compile is not None:
            self.compile = Decision("compile", "on", "", CHOSEN)
            parts = (TRANSFORMER, VAE) if self.request.compile.vae else (TRANSFORMER,)
            self.compiled = {part: Compilation(self.request.compile) for part in parts}

    def steps(self) -> tuple[Step, ...]:
        """The changes that these choices make to each newly read part; what they did is counted in this object."""
        steps: list[Step] = []
        if self.formats:
            steps.append(Step(Order.KERNELS, "products of stored weights", self._multiply))
        if any(self.forms.values()):
            steps.append(Step(Order.KERNELS, "fused kernels", self._fuse))
        if self.compiled:
            steps.append(Step(Order.COMPILE, "compiled blocks", self._compile))
        if self.request.profile is not None:
            steps.append(self.request.profile.step())
        return tuple(steps)

    def host_for(self, offload: str, hosted: HostOffloader | None) -> HostOffloader | None:
        """``hosted``; None with offload ``auto`` and compile, which ``hosted`` cannot run: see ``self.compile``."""
        if hosted is None or offload != AUTO or not self.compiled:
            return hosted
        self.compile = replace(self.compile, why=f"offload auto does without {HOSTED}, in which no block is one graph")
        return None

    def settle_offload(self, mode: str, chosen: bool) -> None:
        """Refuse compile with an offload mode that was chosen; with one that ``auto`` found, leave it off."""
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
        return self.kernels, self.compile

    def line(self, title: str) -> str:
        """Summary such as ``LTX-Video: 168 of 168 fusion points (triton), attention cuDNN, compile off``."""
        kernels = self.fused.get(TRANSFORMER) or self.kernels
        compiled = self.compiled.get(TRANSFORMER, "compile off")
        lossy = ", fp16 accumulation" if self.request.fp16_sums else ""
        if self.formats:
            lossy += f", {sum(self.multiplied.values())} layers multiplied as stored"
        return f"{title}: {kernels}, attention {self.attention.label}, {compiled}{lossy}"

    def notify(self, title: str, notify: Callable[[str], None]) -> None:  # the line, and what had no effect
        if self.formats and not any(self.multiplied.values()):
            kinds = " or ".join(self.formats)
            notify(f"stored_products has no effect: no transformer weight is {kinds}, which this device multiplies")
        if self.forms.get(TRANSFORMER) or self.compiled or self.request.fp16_sums or any(self.multiplied.values()):
            notify(self.line(title))

    def _multiply(self, part: str, module: Any) -> Undo | None:  # None: nothing changed
        if not denoises(part):
            return None
        self.multiplied[part], undo = multiply_as_stored(module, self.formats)
        return undo

    def _fuse(self, part: str, module: Any) -> Undo | None:
        """Put fused operations into a part that was just read, in the form of its role; returns an undo, or None."""
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
    """``request`` resolved for the device of ``facts`` and those of ``elsewhere``, by part; ``probes`` outrank the
    table of known bugs. Raises InputError for an unknown choice, UnsupportedError for one that cannot run here."""
    dtype = precision.compute or precision.transformer
    device, vae_device = (torch.device(elsewhere.get(part, facts.device)) for part in (TRANSFORMER, VAE))
    if request.fp16_sums:
        require_fp16_sums(facts, dtype)
    formats = require_stored_matmuls(facts) if request.stored_products else ()
    form, kernels = form_for(request.kernels, device, dtype, _unusable(device, dtype, facts, probes))
    against_vae = fused.reason_against(vae_device, precision.vae) or _unusable(vae_device, precision.vae, facts, probes)
    launched = fused.AUTO, fused.TRITON  # the other choices run anywhere
    launchable = not against_vae and vae_device == facts.device  # the probes ran on that device only
    vae_off = request.kernels == fused.OFF or (request.kernels in launched and not launchable)
    vae_form = "" if vae_off else request.kernels
    for of_vae, place, operands, chosen in ((False, device, dtype, form), (True, vae_device, precision.vae, vae_form)):
        if chosen in launched and isinstance(probes, ProbeStore):
            fused.leave_wrong(place, operands, probes, of_vae)
    gelu = (probes or {}).get(f"{GELU}.{NAMES[dtype]}") if form in launched else None
    epilogue = gelu is not None and gelu.status == OK  # a matmul that ends in GELU is as exact here as the two apart
    return Speed(request, {TRANSFORMER: form, VAE: vae_form}, kernels, attention, formats=formats, epilogue=epilogue)


def form_for(choice: str, device: torch.device, dtype: torch.dtype, unusable: str = "") -> tuple[str, Decision]:
    """The form that operations on token states of ``dtype`` run in, empty for none, and the decision about it.
    ``unusable`` is a further reason against Triton, empty for none. Raises InputError for an unknown choice,
    UnsupportedError for ``triton`` where nothing can be launched."""
    require_choice("kernels", choice, fused.CHOICES)
    against = fused.reason_against(device, dtype) or unusable
    if choice == fused.TRITON and against:
        found, fix = f"kernels 'triton' on {device}: {against}", "Choose auto."
        raise UnsupportedError(found, expected="a GPU that Triton launches on, and fp32, fp16 or bf16", fix=fix)
    if choice == AUTO:
        return ("" if against else AUTO), Decision("kernels", fused.OFF if against else fused.TRITON, against, AUTO)
    return ("" if choice == fused.OFF else choice), Decision("kernels", choice, "", CHOSEN)


def _unusable(
    device: torch.device, dtype: torch.dtype, facts: DeviceFacts, probes: Mapping[str, ProbeResult] | None
) -> str:
    """The reason against Triton on ``device`` by a probe or a known bug. Empty where it runs, and where
    ``reason_against`` gives a reason of its own."""
    if fused.reason_against(device, dtype):
        return ""
    launches = abilities_of(facts, probes).verdict(TRITON)
    return "" if launches.usable else launches.why
