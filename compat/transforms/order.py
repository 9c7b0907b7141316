"""The rewrites of a part between reading and moving it: one plan, in the one order of operations, and the only place
where rewrites are applied. It runs right after a part is read, on the CPU and before any offloader hooks it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..device.execution import add_hook
from ..device.quirks import works
from ..memory.parts import Undo, full_name, role_of
from .attention import SPARSE, Attention
from .attention_processors import BLOCKS, CROPPED, PROCESSORS, Attend, JointProcessor, Padding, cropping
from .conv3d import history_tables, swap_conv3d
from .conv3d_choice import PREFERRED, Timings, choose_by
from .conv3d_methods import exact
from .sparse_attention import SparseAttention

log = logging.getLogger(__name__)
Back = Callable[[], Any]
Apply = Callable[[str, nn.Module], Back | None]


class Order(IntEnum):
    """Position of a step; steps of the same order run as they were given."""

    STORAGE = 10
    LORA = 20
    CONV3D = 30
    PRECISION = 35
    KERNELS = 40
    ATTENTION = 50
    SPLIT = 55
    COMPILE = 60
    GUARD = 70


@dataclass(frozen=True, slots=True)
class Step:
    """One change to the modules of a pipeline."""

    order: Order  # when
    name: str  # for people and logs
    apply: Apply  # changes a part in place; returns an undo, or None where it leaves the part alone


class Done:
    """The steps applied to a part; undoes all of them when called, or those from an order on."""

    def __init__(self) -> None:
        self.undo: list[tuple[Order, Back]] = []

    def __call__(self) -> None:
        self.back_to(Order.STORAGE)

    def back_to(self, order: Order) -> None:
        """Take back the steps of ``order`` and later, last one first."""
        while self.undo and self.undo[-1][0] >= order:
            self.undo.pop()[1]()


@dataclass(frozen=True, slots=True)
class Preparation:
    """The steps that each part of one pipeline goes through; facts and choices are bound into them."""

    steps: tuple[Step, ...] = ()

    def __call__(self, part: str, module: nn.Module) -> Done:
        """Apply the steps to a part that was just read; returns their undo, which goes back from the last one."""
        return self.apply_from(part, module, Done(), Order.STORAGE)

    def apply_from(self, part: str, module: nn.Module, done: Done, order: Order) -> Done:
        """Apply the steps of ``order`` and later, add them to ``done``, which holds the earlier ones, and return it.
        Where a step raises, those applied before it in this call are undone."""
        try:
            with torch.inference_mode(False), torch.no_grad():
                for step in sorted((step for step in self.steps if step.order >= order), key=lambda step: step.order):
                    if (back := step.apply(part, module)) is not None:
                        log.debug("%s: %s", part, step.name)
                        done.undo.append((step.order, back))
        except BaseException:
            done.back_to(order)
            raise
        return done

    def with_steps(self, steps: Iterable[Step]) -> Preparation:
        return Preparation((*self.steps, *steps))


def convolution_step(abilities: Mapping[str, Any], timings: Timings | None = None) -> Step:
    """The step that swaps the 3-D convolutions of transformers and VAEs as ``choose_by`` says for ``quirks.abilities``
    and ``timings``, and FramePack's pooling of rotary tables. In any part, 2-D ones, as in patch embeddings, run in
    fp32 where their dtype fails: a part's dtype was chosen by its products and attention."""

    def apply(part: str, module: nn.Module) -> Back | None:
        undo, dtypes = Undo(), {torch.float32, *(p.dtype for p in module.parameters())}
        for layer in module.modules():
            if isinstance(layer, nn.Conv2d) and not works(abilities, "conv2d", layer.weight.dtype):
                undo.set(layer, "_conv_forward", partial(_in_fp32, layer._conv_forward))
        native = timings is None and _runs_natively(abilities, dtypes)
        if native or role_of(part) not in ("transformer", "vae"):
            return undo.restore if undo else None
        swapped = swap_conv3d(module, choose_by(abilities, timings))
        if swapped.choices:
            undo.append(swapped.restore)
            log.info("%s: %s", part, swapped)
        if hasattr(module, "_pad_rotary_emb") and not (abilities["pad3d"]["fp32"] and abilities["conv3d"]["fp32"]):
            undo.set(module, "_pad_rotary_emb", history_tables)
        return undo.restore if undo else None

    return Step(Order.CONV3D, "convolutions", apply)


def _in_fp32(convolve: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``nn.Conv2d._conv_forward`` from fp32 operands, in the dtype of ``x``."""
    with exact(x.device):
        return convolve(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)


def _runs_natively(abilities: Mapping[str, Any], dtypes: Iterable[torch.dtype]) -> bool:
    """True where ``choose_by``, without timings, leaves every layer in one of ``dtypes`` as it is."""
    preferred = any(backend == abilities.get("backend") for backend, _ in PREFERRED)
    able = all(works(abilities, name, dtype) for name in ("conv3d", "pad3d") for dtype in dtypes)
    return able and not (preferred or abilities.get("conv_bytes") or abilities.get("contiguous_weights"))


def attention_step(attention: Attention) -> Step:
    """The step that sets ``attention``, or its sparse form, on transformers, and ``auto`` on VAEs, whose heads are too
    wide for the others; it leaves other parts alone."""
    of_vae = Attention("auto", attention.budget_bytes, avoided=attention.avoided)

    def apply(part: str, module: nn.Module) -> Back | None:
        if role_of(part) == "transformer":
            return replace_attention(module, SparseAttention(attention) if attention.choice == SPARSE else attention)
        return replace_attention(module, of_vae) if part == "vae" else None

    return Step(Order.ATTENTION, f"attention {attention.label}", apply)


def replace_attention(module: nn.Module, attend: Attend) -> Back:
    """Make every attention that we know in a transformer or VAE call ``attend``; returns a function that undoes it.
    ``attend`` maps query (B, H, N, D), key, value, an optional mask and, of a VAE, ``causal`` to (B, H, N, D). A layer
    gets our processor, a block our forward; an earlier rewrite's processor stays and gets ``attend`` and, if it has
    that attribute, the shared ``padding``, which a pre-hook on a transformer in ``CROPPED`` sets in each call."""
    padding, undo, plain = Padding(), Undo(), attend
    if isinstance(attend, SparseAttention):  # sparse in joint attention alone
        plain = attend.attention
        undo.append(add_hook(module, attend.note, before=True, with_kwargs=True).remove)
    for owner in module.modules():
        processor: Any = getattr(owner, "processor", None)
        ours, forward = PROCESSORS.get(full_name(processor)), BLOCKS.get(full_name(owner))
        chosen = attend if issubclass(ours or type(processor), JointProcessor) else plain
        if ours is not None and ours.replaces(owner):
            undo.set(owner, "processor", ours(chosen, padding))
        elif forward is not None and "forward" not in vars(owner):
            undo.patch(owner, forward(plain, padding))
            undo.set(owner, "attend", plain)  # for decoders in chunks or streamed, which walk through it themselves
        elif hasattr(processor, "attend"):  # of another rewrite
            undo.set(processor, "attend", chosen)
            if hasattr(processor, "padding"):
                undo.set(processor, "padding", padding)
    if (cropped := CROPPED.get(type(module).__name__)) is not None:
        # A hook, not a patched forward: it survives accelerate's and diffusers' own re-wrapping of forward.
        undo.append(add_hook(module, cropping(cropped, padding), before=True, with_kwargs=True).remove)
    return undo.restore
