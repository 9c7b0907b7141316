"""Which of torch's exact attention kernels is the fastest on this device: timed once, kept with the probes, and said.

cuDNN's kernel was seen 1.7 to 2.3 times as fast as torch's own choice on Hopper and slower on Ampere
(huggingface/transformers#48163). No list of cards stays right, so the device is asked, at the transformer's head width.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch.nn import functional

from ..device.facts import CLOCKED, DeviceFacts
from ..device.probe_store import ProbeStore
from ..errors import PackError
from .attention import BACKENDS, EXPLICIT, Attention
from .attention_kernels import require_usable

TOKENS, HEADS = 8192, 24  # a short clip of every family; from here on the ratio of the kernels hardly changes
REPEATS, WORTH = 10, 0.95  # another kernel is taken where it needs at most this share of the time
DEFAULT = "native"  # torch's own choice
Measure = Callable[[str, torch.device, torch.dtype, int], float]


def by_time(
    attention: Attention,
    facts: DeviceFacts,
    store: ProbeStore | None,
    dtype: torch.dtype,
    head_width: int,
    measure: Measure | None = None,
) -> Attention:
    """``attention`` with the kernel that is fastest here, where it was left to ``auto`` and torch has a fused one.

    A CPU has one kernel: nothing is timed there. Nothing is timed either where nothing can be kept.

    Args:
        measure: from kernel, device, dtype and head width to milliseconds; the device's clock where None.
    """
    asked = attention.choice == "auto" and (dtype, head_width) in attention.fused
    clock = measure is not None or facts.device.type in CLOCKED
    if not asked or facts.backend == "cpu" or store is None or not clock:
        return attention
    timed = measure or milliseconds

    def times() -> dict[str, float]:
        found = {name: timed(name, facts.device, dtype, head_width) for name in candidates(facts, dtype, head_width)}
        return found if len(found) > 1 else {}

    name = f"attention {str(dtype).removeprefix('torch.')} heads of {head_width}"
    found: Mapping[str, float] | None = store.remember(name, times)
    if not found or DEFAULT not in found:
        return attention
    best = min(found, key=lambda kernel: found[kernel])
    said = ", ".join(f"{kernel} {found[kernel]:.2f} ms" for kernel in sorted(found, key=lambda k: found[k]))
    if best == DEFAULT or found[best] > WORTH * found[DEFAULT]:
        why = f"{attention.decision.why}; timed on this device: {said}"
        return replace(attention, decision=replace(attention.decision, why=why))
    decision = replace(attention.decision, verdict=best, why=f"the fastest of {said} on this device, timed once")
    return replace(attention, fastest=best, decision=decision)


def candidates(facts: DeviceFacts, dtype: torch.dtype, head_width: int) -> list[str]:
    """Torch's own choice, and those of its kernels that run here and gave the right answer."""
    found = [DEFAULT]
    for name in BACKENDS:
        try:
            require_usable(name, facts, dtype, head_width)
        except PackError:
            continue
        found.append(name)
    return found


def milliseconds(name: str, device: torch.device, dtype: torch.dtype, head_width: int) -> float:
    """The median of ten runs of a kernel at the shape of a short clip."""
    query = torch.randn(1, HEADS, TOKENS, head_width, device=device, dtype=dtype)
    attend = EXPLICIT.get(name, functional.scaled_dot_product_attention)
    spent = []
    for _ in range(REPEATS + 1):
        torch.accelerator.synchronize(device)
        started = time.perf_counter()
        attend(query, query, query)
        torch.accelerator.synchronize(device)
        spent.append(1e3 * (time.perf_counter() - started))
    return round(sorted(spent[1:])[REPEATS // 2], 4)  # the first run loads and tunes
