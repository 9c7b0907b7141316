"""Capabilities of the device of one of core's models, and the decisions that follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import comfy.ldm.modules.attention as core_attention
import torch
from comfy.cli_args import args as options

from ...compat.decision import AUTO, CHOSEN, Decision
from ...compat.device.facts import DeviceFacts, facts_for
from ...compat.device.precision import FP16, FP32, NAMES, PLAIN, SAFE, Precision, precision_for
from ...compat.device.probe_store import ProbeStore
from ...compat.device.quirks import Abilities, abilities, abilities_of, policy_for
from ...compat.probe_results import probe_results_of
from ...compat.report import HEAD_WIDTH
from ...compat.transforms.attention import Attention, attention_for, avoided_by, fused_kernel
from ...compat.transforms.conv3d_choice import Chooser, choose_by, stored_timings
from ...compat.transforms.guard import Guard, guard_of
from ...compat.transforms.plain_calls import PLAIN_FORMS, PlainCalls, plain_calls
from ..folders import state_folder
from .attention import BUILDS_SCORES, MISSES_KERNELS, SUMS_IN_FP16

AS_LOADED = "as loaded"
PRECISIONS = (AUTO, SAFE, "fp32", AS_LOADED)  # grows at the end
ATTENTIONS = (AUTO, "bounded", AS_LOADED)
FLAGS = ("use_split_cross_attention", "use_quad_cross_attention")  # command line choices of core's kernel
# Back ends where core takes torch's attention by a list of devices: ENABLE_PYTORCH_ATTENTION in model_management.py.
LISTED = {"rocm": "its list of Radeons with torch's kernel lacks this one"}
TOKENS = 16  # of the small tensors that show whether torch has a kernel
_machines: dict[torch.device, ModelDevice] = {}  # by load device


@dataclass(frozen=True, slots=True)
class Kernels:
    attention: Attention  # the choice of ``auto`` for operands of one dtype
    fused: bool  # whether torch has a fused kernel for them, also with a mask, that is right here


@dataclass(frozen=True)
class ModelDevice:
    """The device on which a patcher loads its model: facts, and probe results, each probe run when first read."""

    facts: DeviceFacts
    probes: ProbeStore

    def __deepcopy__(self, _memo: Any) -> ModelDevice:  # other packs copy whole VAEs
        return self

    @cached_property
    def precision(self) -> Precision:
        return precision_for(PLAIN, self.facts, AUTO, self.probes)

    @cached_property
    def abilities(self) -> Abilities:
        return abilities_of(self.facts, self.probes)

    @cached_property
    def able(self) -> Mapping[str, Any]:
        return abilities(self.facts, self.probes)

    @cached_property
    def convolutions(self) -> Chooser:
        return choose_by(self.able, stored_timings(self.facts, self.probes))

    @cached_property
    def guard(self) -> Guard | None:
        return guard_of(self.probes, self.facts.device)

    @cached_property
    def calls(self) -> PlainCalls | None:
        return plain_calls(policy_for(self.facts))

    def care(self, dtype: torch.dtype) -> list[Decision]:
        """Decisions on calls of torch that are wrong on this device in ``dtype``, and that :attr:`calls` replaces."""
        return policy_for(self.facts).care(*(PLAIN_FORMS if dtype is FP32 else PLAIN_FORMS - {"product_rows"}))

    @cached_property
    def fp32_output(self) -> bool:
        return self.probes["output.fp16_to_fp32"].status == "ok"

    @cached_property
    def fp16_convolutions(self) -> bool:
        """True if 2-D convolutions in fp16 are right here: on some GTX 16xx they are NaN."""
        return bool(self.able["conv2d"].get("fp16", True))

    @cached_property
    def _kernels(self) -> dict[torch.dtype, Kernels]:
        return {}

    def kernels(self, dtype: torch.dtype) -> Kernels:
        """The attention for operands of ``dtype``, and if torch has a fused kernel for them, found out once."""
        if dtype not in self._kernels:
            avoided = avoided_by(self.probes, (dtype,), wide=(dtype, FP32))
            chosen = attention_for(AUTO, self.facts, dtype, HEAD_WIDTH, avoided)
            query = torch.zeros(1, 1, TOKENS, HEAD_WIDTH, dtype=dtype, device=self.facts.device)
            mask = torch.zeros(1, 1, TOKENS, TOKENS, dtype=dtype, device=self.facts.device)
            kernel = fused_kernel(query, query, query) and fused_kernel(query, query, query, mask)
            self._kernels[dtype] = Kernels(chosen, bool(kernel) and dtype not in chosen.avoided)
        return self._kernels[dtype]


def machine_of(device: Any) -> ModelDevice:
    """The ModelDevice of a patcher's load device, made anew when other probe results are stored."""
    facts = facts_for(device)
    probes, machine = probe_results_of(facts, state_folder()), _machines.get(facts.device)
    same = machine is not None and (machine.facts, machine.probes.path) == (facts, probes.path)
    if machine is None or not same or machine.probes.known() != probes.known():
        machine = _machines[facts.device] = ModelDevice(facts, probes)
    return machine


@dataclass(frozen=True, slots=True)
class Fit:
    safe: bool = False  # products and attention in fp16 around a stream in fp32
    dtype: torch.dtype | None = None  # for core to compute in; None for its own choice
    attention: Attention | None = None  # for calls without a fused kernel; None leaves all to core
    decisions: Sequence[Decision] = field(default_factory=tuple)  # to show; also on what stays as it is
    plain: bool = False  # whether blocks whose values fit compute in plain fp16 instead

    @property
    def needed(self) -> bool:
        return self.safe or self.dtype is not None or self.attention is not None


def fit_for(
    machine: ModelDevice, dtype: torch.dtype, precision: str, attention: str, unfit: str = "",
    offered: Sequence[str] = PRECISIONS,
) -> Fit:  # fmt: skip
    """The fit of one of core's networks, which it computes in ``dtype``, from the precisions ``offered``.
    ``unfit``: why ``auto`` leaves it as it is, or empty. UnsupportedError for a chosen fp16-safe that cannot be."""
    if precision == SAFE:
        precision_for(PLAIN, machine.facts, SAFE, machine.probes, offered)  # raises if this device cannot
    safe, compute, decided = _precision(machine, dtype, precision, unfit)
    bounded, attention_decision = _attention(machine, FP16 if safe else compute or dtype, attention, safe)
    narrow = machine.abilities.transformer(NAMES[FP16])
    plain = safe and precision == AUTO and bounded is not None and narrow.usable and not narrow.costly
    return Fit(safe=safe, dtype=compute, attention=bounded, decisions=(decided, attention_decision), plain=plain)


def _precision(
    machine: ModelDevice, dtype: torch.dtype, choice: str, unfit: str
) -> tuple[bool, torch.dtype | None, Decision]:
    """(whether to use safe fp16, the dtype that core is to compute in or None for its own, the decision)."""
    here, wide = NAMES.get(dtype, str(dtype)), None if dtype is FP32 else FP32
    if choice == SAFE:
        return True, wide, Decision("precision", SAFE, f"core would compute in {here}", CHOSEN)
    if choice == "fp32":
        return False, wide, Decision("precision", "fp32", f"core would compute in {here}", CHOSEN)
    if choice == AS_LOADED:
        return False, None, Decision("precision", f"{here} as loaded", "", CHOSEN)
    row = machine.precision
    if row.safe and not unfit:
        return True, wide, Decision("precision", SAFE, f"core would compute in {here}; {row.why}", AUTO)
    if (row.safe or row.transformer is FP32) and wide and dtype in NAMES:
        plain = machine.abilities.transformer(here)
        if not plain.usable or plain.costly:
            return False, wide, Decision("precision", "fp32", f"core would compute in {here}; {plain.why}", AUTO)
    why = unfit if row.safe else f"this device computes {here} well"
    return False, None, Decision("precision", f"{here} as loaded", why, AUTO)


def _attention(machine: ModelDevice, dtype: torch.dtype, choice: str, safe: bool) -> tuple[Attention | None, Decision]:
    """The attention for calls without a fused kernel, or None to leave them to core, and the decision."""
    if choice == AS_LOADED or dtype not in NAMES:
        return None, Decision("attention", "as loaded", "", CHOSEN if choice == AS_LOADED else AUTO)
    flag = next((name for name in FLAGS if getattr(options, name, False)), "")
    if choice == AUTO and flag:
        return None, Decision("attention", "as loaded", f"ComfyUI was started with --{flag.replace('_', '-')}", AUTO)
    cores = core_attention.optimized_attention.__name__
    kernels = machine.kernels(dtype)
    chosen = kernels.attention
    if choice == AUTO and kernels.fused and not safe:
        why = f"torch has fused kernels for {NAMES[dtype]} here; core takes {cores}"
        if cores in MISSES_KERNELS and machine.facts.backend in LISTED:
            why = f"{why}: {LISTED[machine.facts.backend]}"
            return chosen, Decision("attention", chosen.decision.verdict, why, AUTO)
        if cores not in SUMS_IN_FP16:
            return None, Decision("attention", "as loaded", why, AUTO)
    source = AUTO if choice == AUTO else CHOSEN
    if cores not in BUILDS_SCORES:
        why = "exact where its operands have no fp16 form" if safe else "values within what its sums hold"
        return chosen, Decision("attention", f"core's {cores}", why, source)
    return chosen, Decision("attention", chosen.decision.verdict, chosen.decision.why, source)
