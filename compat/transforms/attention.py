"""Which attention kernel runs, decided before the call by the size of its score matrix; exact query chunks elsewhere.

Torch's `scaled_dot_product_attention` takes a fused kernel where device, dtype and head width have one, and otherwise
builds the whole score matrix without a word: 28.8 GiB in the first step of FramePack on Turing
(lllyasviel/FramePack#161). Here torch is asked first, and a matrix above the budget is computed in chunks of queries.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional

from ..decision import AUTO, CHOSEN, Decision
from ..device.facts import DeviceFacts
from ..device.probe_store import UNUSABLE, WRONG, ProbeResult
from ..errors import InputError, UnsupportedError

CHOICES = (
    "auto",
    "native",
    "native_cudnn",
    "native_efficient",
    "native_flash",
    "native_math",
    "sage",
    "flash",
    "xformers",
)
MEANINGS: dict[str, str] = {
    "auto": "torch's fused kernel where this device has one, else exact in chunks of queries",
    "native": "torch's fused kernels, whichever torch prefers",
    "native_cudnn": "torch's cuDNN kernel, often the fastest on Hopper and Blackwell",
    "native_efficient": "torch's memory-efficient kernel",
    "native_flash": "torch's own FlashAttention",
    "native_math": "plain matrix products, exact, in chunks of queries",
    "sage": "the package sageattention: 8-bit products, fast, not exact",
    "flash": "the package flash-attn",
    "xformers": "the package xformers",
}
TORCH_KERNELS = {1: "flash", 2: "memory-efficient", 3: "cuDNN", 4: "the device's own"}  # SDPBackend; 0 is math
BACKENDS = {
    "native_cudnn": "CUDNN_ATTENTION",
    "native_efficient": "EFFICIENT_ATTENTION",
    "native_flash": "FLASH_ATTENTION",
}
MEBIBYTE = 1024**2
LEAST_BUDGET, UNKNOWN_BUDGET, MOST_BUDGET = 64 * MEBIBYTE, 256 * MEBIBYTE, 1024 * MEBIBYTE
BUDGET_SHARE = 16  # the budget is this part of the device's memory
LONG = 1024  # tokens from which on kernels differ by more than their start
MATH_COPIES = 3  # scores, softmax, and the scaled or masked scores between them are alive together in torch's math
SCORE_BYTES = 4  # scores are fp32 in torch's math and here, whatever the operands are
WORKED_ON = torch.float32
UNDECIDED = Decision("attention", AUTO, MEANINGS[AUTO])
PROBED = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}  # as probes name them


@dataclass(frozen=True, slots=True)
class Attention:
    """The attention of one pipeline's modules: call it on queries, keys and values.

    Args:
        choice: one of :data:`CHOICES`.
        budget_bytes: most that one call may take beside operands and result.
        decision: what runs and why, for people.
        kernel: torch's fused kernel for these operands; empty where it has none.
        avoided: dtypes in which torch's fused kernel of this device was seen to be wrong, with the reason.
        fused: (dtype, head width) for which torch has a fused kernel here; asked beforehand, for graphs that are
            compiled, in which torch cannot be asked.
        fastest: the kernel that was timed fastest here, for long sequences without a mask; empty for torch's choice.
    """

    choice: str = AUTO
    budget_bytes: int = UNKNOWN_BUDGET
    decision: Decision = UNDECIDED
    kernel: str = ""
    avoided: Mapping[torch.dtype, str] = field(default_factory=dict)
    fused: frozenset[tuple[torch.dtype, int]] = frozenset()
    fastest: str = ""

    @property
    def label(self) -> str:
        """What runs, in a word or two."""
        return self.fastest or (self.choice if self.choice != AUTO else self.kernel or "in chunks")

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None = None,
        causal: bool = False,
    ) -> torch.Tensor:
        """Values of ``value`` weighted by how well their keys fit each query, as ``scaled_dot_product_attention``.

        An explicit kernel runs every call without mask; a call with one takes the way of ``auto``, since not every
        kernel reads masks.

        Args:
            query: (B, H, N, D). key, value: (B, H, M, D). One device, one dtype.
            mask: broadcast to (B, H, N, M); bool, True where a key counts, or floating, added to the scores.
            causal: query n sees the keys up to n.

        Returns:
            (B, H, N, D) of the queries' dtype; peak extra memory is the kernel's own, at most ``budget_bytes``
            (one row of scores where even that is more).
        """
        if mask is None and not causal and self.choice in EXPLICIT:
            return EXPLICIT[self.choice](query, key, value)
        if self.fastest and mask is None and not causal and key.shape[-2] >= LONG and query.dtype.itemsize < 4:
            return EXPLICIT[self.fastest](query, key, value)
        if self.choice != "native_math" and query.dtype not in self.avoided:
            if self._has_fused(query, key, value, mask, causal):
                return functional.scaled_dot_product_attention(query, key, value, mask, is_causal=causal)
            if mask is None and not causal and query.dtype.itemsize < 4 and WORKED_ON not in self.avoided:
                wide = stand_in(query, WORKED_ON)
                if self._has_fused(wide, wide, wide):
                    return widened(query, key, value, self.budget_bytes)
        if query.dtype not in self.avoided and MATH_COPIES * score_bytes(query, key) <= self.budget_bytes:
            return functional.scaled_dot_product_attention(query, key, value, mask, is_causal=causal)
        return chunked(query, key, value, mask, causal, self.budget_bytes)

    def _has_fused(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None = None,
        causal: bool = False,
    ) -> bool:
        if torch.compiler.is_compiling():
            return (query.dtype, query.shape[-1]) in self.fused
        return bool(fused_kernel(query, key, value, mask, causal))


def attention_for(
    choice: str,
    facts: DeviceFacts,
    dtype: torch.dtype,
    head_width: int,
    avoided: Mapping[torch.dtype, str] | None = None,
) -> Attention:
    """The attention for a choice on the device of ``facts``, tried out there once.

    Args:
        choice: one of :data:`CHOICES`. dtype, head_width: of the queries that the transformer will pass.
        avoided: dtypes in which a probe found torch's fused kernel wrong, with the reason.

    Raises:
        InputError: unknown choice. UnsupportedError, MissingPackageError: an explicit choice this machine cannot do.
    """
    if choice not in CHOICES:
        raise InputError(f"attention {choice!r}", expected=f"one of {', '.join(CHOICES)}", fix="Choose one of these.")
    budget, avoided = budget_for(facts), dict(avoided or {})
    probe = torch.zeros(1, 1, 16, head_width, dtype=dtype, device=facts.device)
    kernel = "" if dtype in avoided else fused_kernel(probe, probe, probe)
    wide = stand_in(probe, WORKED_ON)
    asked = {dtype: kernel, WORKED_ON: fused_kernel(wide, wide, wide)}
    fused = frozenset((kind, head_width) for kind, name in asked.items() if name and kind not in avoided)
    name, size = str(dtype).removeprefix("torch."), f"{budget / 1e6:.0f} MB"
    verdict, why = choice, MEANINGS[choice]
    if choice == "native_math":
        why = f"{why} of at most {size}"
    elif choice == AUTO and kernel:
        verdict, why = f"torch's fused kernel ({kernel})", f"exact in chunks of {size} where it has none"
    elif choice == AUTO:
        widened_first = (WORKED_ON, head_width) in fused and dtype not in avoided
        how = "by torch's fused fp32 kernel, else in chunks" if widened_first else "in chunks of queries"
        verdict = f"exact, {how} of at most {size}"
        why = avoided.get(dtype) or f"this device has no fused kernel for {name}"
    elif choice == "native" and not kernel:
        raise UnsupportedError(
            f"attention 'native' in {name} on {facts.name}",
            expected="a fused kernel of this torch for it",
            fix="Choose auto, which computes it exactly in chunks.",
        )
    elif choice != "native":
        from .attention_kernels import require_usable

        require_usable(choice, facts, dtype, head_width)
    decision = Decision("attention", verdict, why, AUTO if choice == AUTO else CHOSEN)
    return Attention(choice, budget, decision, kernel=kernel, avoided=avoided, fused=fused)


def avoided_by(probes: Mapping[str, ProbeResult] | None, dtypes: Iterable[torch.dtype]) -> dict[torch.dtype, str]:
    """The dtypes in which a probe found torch's attention wrong or absent on this device, with the reason.

    What it is with a mask counts for nothing: none is passed here.
    """
    avoided = {}
    for dtype in dict.fromkeys(dtypes if probes else ()):
        name = f"attention.{PROBED.get(dtype)}"
        answer = probes[name] if probes and name in probes else None
        if answer is not None and answer.status in (WRONG, UNUSABLE):
            avoided[dtype] = f"torch's attention is {answer.status} in {PROBED[dtype]} here ({answer.detail})"
    return avoided


def budget_for(facts: DeviceFacts) -> int:
    """Bytes that one attention call may take: a sixteenth of the device's memory, from 64 MiB to 1 GiB."""
    if not facts.total_bytes:
        return UNKNOWN_BUDGET
    most = UNKNOWN_BUDGET if facts.backend == "cpu" else MOST_BUDGET  # more does not stay in a CPU's caches anyway
    return max(LEAST_BUDGET, min(most, facts.total_bytes // BUDGET_SHARE))


def score_bytes(query: torch.Tensor, key: torch.Tensor) -> int:
    """Bytes of the whole score matrix of one call, which a fused kernel never builds."""
    return math.prod(query.shape[:-1]) * key.shape[-2] * SCORE_BYTES


def fused_kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None, causal: bool = False
) -> str:
    """The name of the fused kernel that torch would take for this call; empty where it would build the whole matrix.

    Torch is asked, since no list of cards, dtypes and head widths stays right; a backend that cannot be asked (MPS,
    DirectML) is one that builds the matrix.
    """
    try:
        chosen = torch._fused_sdp_choice(query, key, value, mask, 0.0, causal)
    except (AttributeError, NotImplementedError, RuntimeError):
        return ""
    return TORCH_KERNELS.get(int(chosen), "")


def stand_in(like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A small tensor with the head width and device of ``like``, to ask about another dtype."""
    return torch.zeros(1, 1, 16, like.shape[-1], dtype=dtype, device=like.device)


def widened(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, budget_bytes: int) -> torch.Tensor:
    """Attention by the fused fp32 kernel for narrower operands that have none: bf16 before sm80.

    Nothing is lost: each value is exact in fp32. A group of heads is cast at a time.
    """
    found = torch.empty_like(query)
    per_head = 2 * query.shape[0] * (query.shape[2] + key.shape[2]) * query.shape[3] * WORKED_ON.itemsize
    step = min(query.shape[1], max(1, budget_bytes // per_head))
    for first in range(0, query.shape[1], step):
        part = slice(first, first + step)
        # No names for the casts: they would be alive while those of the next heads are made.
        found[:, part] = functional.scaled_dot_product_attention(
            query[:, part].to(WORKED_ON), key[:, part].to(WORKED_ON), value[:, part].to(WORKED_ON)
        ).to(query.dtype)
    return found


def chunked(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    budget_bytes: int = UNKNOWN_BUDGET,
) -> torch.Tensor:
    """Exact attention, some queries at a time: each row of scores is whole, so the sums are those of torch's math.

    Scores, softmax and products are fp32 whatever the operands are, as in torch's math; a query that sees no key gets
    zeros, as there. Needs matrix products and elementwise arithmetic only.

    Args:
        query, key, value, mask, causal: as for :class:`Attention`. budget_bytes: most bytes alive beside operands and
            result, except that one row of scores is always computed whole.
    """
    size = chunk_size(query, key, value, mask, causal, budget_bytes)
    found = query.new_empty(*query.shape[:-1], value.shape[-1])
    if mask is not None:
        mask = mask.expand(*query.shape[:-1], key.shape[-2])  # a view: no copy is made until a chunk is taken
    for rows in _parts(query.shape[0], size[0]):
        for heads in _parts(query.shape[1], size[1]):
            keys, values = key[rows, heads].to(WORKED_ON).transpose(-1, -2), value[rows, heads].to(WORKED_ON)
            for queries in _parts(query.shape[2], size[2]):
                hidden = None if mask is None else mask[rows, heads, queries]
                found[rows, heads, queries] = _chunk(
                    query[rows, heads, queries], keys, values, hidden, queries.start if causal else None
                )
            del keys, values  # before those of the next head are cast
    return found


def chunk_size(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    budget_bytes: int,
) -> tuple[int, int, int]:
    """How many batch rows, heads and queries :func:`chunked` takes at a time."""
    batch, heads, count, width = query.shape
    keys = key.shape[-2]
    # Beside the scores: the fp32 copy of the queries (twice, scaled), the result, and what hides scores.
    per_query = SCORE_BYTES * (keys + 2 * width + 2 * value.shape[-1] + 2)
    per_query += keys * (0 if mask is None else 2 * SCORE_BYTES) + keys * (2 if causal else 0)
    per_head = SCORE_BYTES * keys * (width + value.shape[-1])
    queries = _even(count, (budget_bytes - per_head) // per_query)
    if queries < count:
        return 1, 1, queries
    whole = per_head + count * per_query
    at_once = _even(heads, budget_bytes // whole)
    return (1 if at_once < heads else _even(batch, budget_bytes // (heads * whole))), at_once, count


def _even(count: int, most: int) -> int:
    """At most ``most`` and at least 1, so that the parts of ``count`` are nearly equal."""
    if count <= most or count == 0:
        return max(count, 1)
    return math.ceil(count / math.ceil(count / max(most, 1)))


def _parts(count: int, size: int) -> list[slice]:
    return [slice(first, min(first + size, count)) for first in range(0, count, size)]


def _chunk(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, first: int | None
) -> torch.Tensor:
    """Attention of some queries over all keys (B, H, D, M), in fp32; ``first`` is the number of the first, if causal.

    A function of its own, so that the scores are gone before those of the next chunk are made.
    """
    scores = torch.matmul(query.to(WORKED_ON) * query.shape[-1] ** -0.5, keys)
    _hide(scores, mask, first)
    # In place, so that one copy of the scores is alive. A row of -inf alone must not become NaN.
    scores.sub_(scores.amax(-1, keepdim=True).clamp_(min=torch.finfo(WORKED_ON).min)).exp_()
    total = scores.sum(-1, keepdim=True).clamp_(min=1.0)  # the largest score gives 1; no score gives 0
    return torch.matmul(scores, values).div_(total)


def _hide(scores: torch.Tensor, mask: torch.Tensor | None, first: int | None) -> None:
    """Set scores that do not count to -inf, or add a floating mask, in place."""
    if mask is not None and mask.dtype == torch.bool:
        scores.masked_fill_(mask.logical_not(), -math.inf)
    elif mask is not None:
        scores.add_(mask)
    if first is not None:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1 + first)
        scores.masked_fill_(later, -math.inf)


def _by_package(choice: str) -> Any:
    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        from .attention_kernels import run

        return run(choice, query, key, value)

    return attend


def _by_torch(choice: str) -> Any:
    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        with only(choice):
            return functional.scaled_dot_product_attention(query, key, value)

    return attend


def only(choice: str) -> AbstractContextManager[Any]:
    """Torch limited to one of its kernels for a block; what was allowed before is allowed again afterwards."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel([getattr(SDPBackend, BACKENDS[choice])]) if choice in BACKENDS else nullcontext()


EXPLICIT = {name: _by_torch(name) for name in BACKENDS}
EXPLICIT |= {name: _by_package(name) for name in ("sage", "flash", "xformers")}
