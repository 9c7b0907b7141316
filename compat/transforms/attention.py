"""The attention of a call: a fused kernel where one takes the call, else exact attention in chunks of queries.
Torch silently builds the full score matrix where it has no fused kernel: 28.8 GiB in the first step of FramePack on
Turing (lllyasviel/FramePack#161). Here torch is asked first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from ..decision import AUTO, CHOSEN, Decision
from ..device.execution import current
from ..device.facts import MEBIBYTE, DeviceFacts, version_of
from ..device.precision import NAMES
from ..device.probe_store import UNUSABLE, WRONG, Probes, ProbeStore
from ..device.timed_choice import fastest, milliseconds, stored_times
from ..errors import PackError, UnsupportedError, require_choice
from .attention_chunks import UNKNOWN_BUDGET, WORKED_ON, chunk_size, chunked, fp32_attention, score_bytes
from .attention_kernels import BACKENDS, EXPLICIT, LOSSY, SWITCHES, kernels_for, require_usable

MEANINGS: dict[str, str] = {
    "auto": "torch's fused kernel if this device has one, otherwise exact in chunks of queries",
    "native": "torch's fused kernels, whichever torch prefers",
    "native_cudnn": "torch's cuDNN kernel, often the fastest on Hopper and Blackwell",
    "native_efficient": "torch's memory-efficient kernel",
    "native_flash": "torch's own FlashAttention",
    "native_math": "plain matrix products, exact, in chunks of queries",
    "sage": "the package sageattention, or comfy-kitchen's int8 where that is faster: 8-bit products, not exact",
    "flash": "the package flash-attn",
    "xformers": "the package xformers",
    "sparse": "HunyuanVideo 1.5 alone: each part of the video sees those around it and those most like it; not exact, "
    "but what models with sparse in their name were trained with",
}
SPARSE = "sparse"
CHOICES = tuple(MEANINGS)
UNET_CHOICES = tuple(choice for choice in CHOICES if choice != SPARSE)  # of paint
TORCH_KERNELS = {1: "flash", 2: "memory-efficient", 3: "cuDNN", 4: "the device's own"}  # SDPBackend; 0 is math
LEAST_BUDGET, MOST_BUDGET = 64 * MEBIBYTE, 1024 * MEBIBYTE
BUDGET_SHARE = 16  # the budget is this part of the device's memory
TOKENS, HEADS = 8192, 24  # of the timing: a short clip; for more tokens the ratio of the kernels hardly changes
REPEATS, WORTH = 10, 0.95  # another kernel is taken where it needs at most this share of the time
DEFAULT = "native"  # torch's own choice
MOST_ROWS = 2**15  # of a batch in one call, as core has it: on NVIDIA torch's kernels have failed above 65,535
LONG = 1024  # tokens from which on kernels differ by more than their start
WIDE = 256  # head width above which some devices take a kernel that is not there; VAEs have such heads
MATH_COPIES = 3  # of the scores in torch's math: scores, masked scores and softmax are alive together
UNMASKED_COPIES = 2  # without a mask: scores and softmax
IN_CHUNKS = ("in chunks", "native_math")  # labels
Avoided = torch.dtype | tuple[torch.dtype, int]
UNDECIDED = Decision("attention", AUTO, MEANINGS[AUTO])


@dataclass(frozen=True, slots=True)
class Attention:
    """The attention of one pipeline's modules: call it on queries, keys and values."""

    choice: str = AUTO
    budget_bytes: int = UNKNOWN_BUDGET  # most extra memory of one call, besides operands and result
    decision: Decision = UNDECIDED
    kernel: str = ""  # torch's fused kernel for these operands; empty where it has none
    avoided: Mapping[Avoided, str] = field(default_factory=dict)  # in which torch's fused kernel is wrong, and why
    fused: frozenset[tuple[torch.dtype, int]] = frozenset()  # with a fused kernel, for graphs, which cannot ask torch
    fastest: str = ""  # the kernel timed as the fastest, for long sequences without a mask
    tried: tuple[torch.dtype, int] | None = None  # dtype and head width of the chosen or timed kernel; None for any

    @property
    def label(self) -> str:
        """The name of the kernel that runs most calls."""
        return self.fastest or (self.choice if self.choice != AUTO else self.kernel or IN_CHUNKS[0])

    def extra_bytes(self, query: torch.Tensor) -> int:
        """Bytes of scores that self-attention of ``query`` (B, H, N, D) holds at its peak; 0 for a fused kernel, which
        builds none. Only the shape and dtype of ``query`` count."""
        if self.label not in IN_CHUNKS:
            return 0
        if query.dtype.itemsize >= 4 and MATH_COPIES * score_bytes(query, query) <= self.budget_bytes:
            return UNMASKED_COPIES * score_bytes(query, query)
        rows, heads, queries = chunk_size(query, query, query, None, False, self.budget_bytes)
        return score_bytes(query[:rows, :heads, :queries], query)

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None,
        causal: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        """Attention (B, H, N, D) of queries (B, H, N, D) to keys and values (B, H, M, D), in the queries' dtype.
        ``mask`` broadcasts to (B, H, N, M): bool, True where a key counts, or floating, added to the scores; ``causal``
        lets query n see the keys up to n. A kernel chosen, or timed for long keys, runs calls without either, of the
        dtype and head width that it was tried with. Others take the first that can: torch's fused kernel, torch's math
        or fused kernel in fp32, chunks. Peak extra memory: ``budget_bytes``, or one row of scores."""
        if query.shape[0] > MOST_ROWS and (mask is None or mask.ndim < 4 or mask.shape[0] == 1):
            rows = zip(*(each.split(MOST_ROWS) for each in (query, key, value)), strict=True)
            return torch.cat([self(q, k, v, mask, causal) for q, k, v in rows])
        chosen = self.choice in EXPLICIT or (self.fastest and key.shape[-2] >= LONG)
        if chosen and mask is None and not causal and self.tried in (None, (query.dtype, query.shape[-1])):
            return EXPLICIT[self.fastest or self.choice](query, key, value)
        if self.choice == "native_math" or self.avoids(query.dtype, query.shape[-1]):
            return chunked(query, key, value, mask, causal, self.budget_bytes)
        with nullcontext() if torch.compiler.is_compiling() else SWITCHES:  # else another thread may allow one kernel
            if self._has_fused(query, key, value, mask, causal):
                return functional.scaled_dot_product_attention(query, key, value, mask, is_causal=causal)
            if query.dtype.itemsize >= 4:  # else the scores of torch's math may be 16-bit too
                if MATH_COPIES * score_bytes(query, key) <= self.budget_bytes:
                    return functional.scaled_dot_product_attention(query, key, value, mask, is_causal=causal)
            elif mask is None and not causal and not self.avoids(WORKED_ON, query.shape[-1]):
                probe = query.new_zeros(1, 1, 16, query.shape[-1], dtype=WORKED_ON)  # torch looks at dtype and width
                if self._has_fused(probe, probe, probe):
                    return fp32_attention(query, key, value, self.budget_bytes)
        return chunked(query, key, value, mask, causal, self.budget_bytes)

    def avoids(self, dtype: torch.dtype, width: int) -> bool:
        """True if torch's fused kernel was seen to be wrong here for heads of this width."""
        return dtype in self.avoided or (width > WIDE and (dtype, WIDE) in self.avoided)

    def _has_fused(self, query: torch.Tensor, *rest: Any) -> bool:
        """True if torch has a fused kernel for these arguments: by :func:`fused_kernel`, or in a graph by ``fused``."""
        if torch.compiler.is_compiling():
            return (query.dtype, query.shape[-1]) in self.fused
        return bool(fused_kernel(query, *rest))


def attention_for(
    choice: str, facts: DeviceFacts, dtype: torch.dtype, head_width: int, avoided: Mapping[Avoided, str] | None = None,
    sparse: bool = False, quiet: bool = False,
) -> Attention:  # fmt: skip
    """The attention of ``choice`` for queries of ``dtype`` and ``head_width`` on the device of ``facts``.
    A chosen kernel is tried out there once, unless ``quiet``: the trial sets torch's switches for the whole process,
    and another thread may be in a run. ``avoided`` is as :func:`avoided_by` finds it; ``sparse`` models allow "sparse".
    Raises InputError for an unknown choice, UnsupportedError or MissingPackageError for one this machine cannot do."""
    require_choice("attention", choice, CHOICES)
    if choice == SPARSE and not sparse:
        raise UnsupportedError("attention 'sparse'", expected="it for HunyuanVideo 1.5 alone", fix="Choose auto.")
    budget, avoided = budget_for(facts), dict(avoided or {})
    name, size = str(dtype).removeprefix("torch."), f"{budget / 1e6:.0f} MB"
    probe = torch.zeros(1, 1, 16, head_width, dtype=dtype, device=facts.device)
    kernel = "" if dtype in avoided else fused_kernel(probe, probe, probe)
    if choice == "native" and not kernel:
        found, expected = f"attention 'native' in {name} on {facts.name}", "a fused kernel of this torch for it"
        raise UnsupportedError(found, expected=expected, fix="Choose auto, which computes attention exactly in chunks.")
    upcast = probe.to(WORKED_ON)
    asked = {dtype: kernel, WORKED_ON: fused_kernel(upcast, upcast, upcast)}
    fused = frozenset((kind, head_width) for kind, name in asked.items() if name and kind not in avoided)
    verdict, why = choice, MEANINGS[choice]
    if choice == "native_math":
        why = f"{why} of at most {size}"
    elif choice == AUTO and kernel:
        verdict, why = f"torch's fused kernel ({kernel})", f"exact in chunks of {size} otherwise"
    elif choice == AUTO:
        in_fp32 = (WORKED_ON, head_width) in fused and dtype not in avoided
        how = "by torch's fused fp32 kernel, else in chunks" if in_fp32 else "in chunks of queries"
        verdict = f"exact, {how} of at most {size}"
        why = avoided.get(dtype) or f"this device has no fused kernel for {name}"
    elif choice not in ("native", SPARSE):
        verdict = kernels_for(choice, facts, dtype, head_width, quiet)[0]
    decision = Decision("attention", verdict, why, AUTO if choice == AUTO else CHOSEN)
    fastest = verdict if choice in LOSSY and verdict != choice else ""
    tried = dtype, head_width
    return Attention(choice, budget, decision, kernel, avoided=avoided, fused=fused, fastest=fastest, tried=tried)


def by_time(
    attention: Attention, facts: DeviceFacts, store: ProbeStore | None, dtype: torch.dtype, head_width: int
) -> Attention:
    """``attention`` with the kernel fastest here, where it is ``auto`` with torch's fused one, or lossy; else as it is.
    cuDNN's was seen 1.7 to 2.3 times as fast as torch's choice on Hopper and slower on Ampere
    (huggingface/transformers#48163), so the device is timed at the transformer's head width; a CPU has one kernel."""
    lossy = attention.choice in LOSSY
    fused = attention.choice == AUTO and (dtype, head_width) in attention.fused
    if not (lossy or fused) or facts.backend == "cpu":
        return attention
    kind = f"lossy {version_of('sageattention')} " if lossy else ""
    name = f"{kind}attention {str(dtype).removeprefix('torch.')} heads of {head_width}"
    times = stored_times(name, lambda: kernel_times(facts, dtype, head_width, lossy), facts, store)
    default = LOSSY[0] if lossy else DEFAULT
    if default not in times:
        return attention
    best, decision = fastest(times, default, WORTH), attention.decision
    ranked = ", ".join(f"{kernel} {times[kernel]:.2f} ms" for kernel in sorted(times, key=times.__getitem__))
    if best == default:
        return replace(attention, decision=replace(decision, why=f"{decision.why}; timed on this device: {ranked}"))
    decision = replace(decision, verdict=best, why=f"the fastest of {ranked} on this device, timed once")
    return replace(attention, fastest=best, decision=decision)


def kernel_times(facts: DeviceFacts, dtype: torch.dtype, head_width: int, lossy: bool = False) -> dict[str, float]:
    """Milliseconds for a short clip, by kernel: of torch's own choice and each of its kernels, or of the ``lossy``
    ones; empty where only one can run, so that there is nothing to choose."""
    query = torch.randn(1, HEADS, TOKENS, head_width, device=facts.device, dtype=dtype)
    runs: dict[str, Any] = {}
    if not lossy:
        runs[DEFAULT] = lambda: functional.scaled_dot_product_attention(query, query, query)
    for kernel in LOSSY if lossy else BACKENDS:
        try:
            require_usable(kernel, facts, dtype, head_width)
        except PackError:
            continue
        runs[kernel] = partial(EXPLICIT[kernel], query, query, query)
    with current(facts.device):
        return milliseconds(runs, facts.device, REPEATS) if len(runs) > 1 else {}


def avoided_by(probes: Probes, dtypes: Iterable[torch.dtype], wide: Iterable[torch.dtype] = ()) -> dict[Avoided, str]:
    """Reasons against torch's attention, by probes without mask that found it wrong or absent: by dtype, for ``dtypes``
    and for fp32, to which others are cast; by (dtype, WIDE), for ``wide`` dtypes in heads wider than that."""
    avoided: dict[Avoided, str] = {}
    asked: list[tuple[Avoided, torch.dtype, str]] = [(dtype, dtype, "attention") for dtype in (*dtypes, WORKED_ON)]
    asked += [((dtype, WIDE), dtype, "wide_attention") for dtype in wide]
    for key, dtype, probe in dict.fromkeys(asked):
        name = f"{probe}.{NAMES.get(dtype)}"
        answer = probes[name] if probes and name in probes else None
        if answer is not None and answer.status in (WRONG, UNUSABLE):
            avoided[key] = f"torch's attention is {answer.status} in {NAMES[dtype]} here ({answer.detail})"
    return avoided


def budget_for(facts: DeviceFacts) -> int:
    """Bytes that one attention call may take: 1/16 of the device's memory, 64 MiB to 1 GiB; at most 256 MiB on CPUs."""
    if not facts.total_bytes:
        return UNKNOWN_BUDGET
    most = UNKNOWN_BUDGET if facts.backend == "cpu" else MOST_BUDGET  # more does not stay in a CPU's caches anyway
    return max(LEAST_BUDGET, min(most, facts.total_bytes // BUDGET_SHARE))


def fused_kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None, causal: bool = False
) -> str:
    """The name of the fused kernel that torch would take for this call; empty where it would build the whole matrix.
    A backend that cannot be asked (MPS, DirectML) is one that builds it."""
    try:
        chosen = torch._fused_sdp_choice(query, key, value, mask, 0.0, causal)
    except (AttributeError, NotImplementedError, RuntimeError):
        return ""
    return TORCH_KERNELS.get(int(chosen), "")
