"""Weights stored in fewer bits than the dtype that computes: packed in memory, unpacked at each use.

A packed layer is the original linear layer, or table of embeddings, under another class. Its values are stored as 16
or 8 bits with a scale, or in the file's own blocks, and ``weight`` is computed from them on access. Offload therefore
moves the small tensors, LoRA and rewrites see an ordinary layer, and unpacking it gives exactly the values that were
computed with.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..device.execution import bf16_bits_to_fp32
from ..errors import InputError, UnsupportedError
from .headers import STORED, TensorEntry

CHOICES = ("auto", "as in file", "bf16", "fp16", "fp8", "int8")
MEANINGS: dict[str, str] = {
    "auto": "in the dtype that computes, or, if the file has fewer bits, exactly as in the file",
    "as in file": "in the file's own dtype, cast at each use; exact",
    "bf16": "2 bytes per weight; exact if the file is bf16",
    "fp16": "2 bytes per weight; exact if the file is fp16; values above 65504 are an error",
    "fp8": "1 byte per weight and a scale per row: about half the memory of bf16, not exact",
    "int8": "1 byte per weight and a scale per row: like fp8, but with evenly spaced values",
}
PLAIN: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}
EIGHT: dict[str, tuple[torch.dtype, float]] = {"fp8": (torch.float8_e4m3fn, 448.0), "int8": (torch.int8, 127.0)}
# What no packing that rounds may touch, besides layers outside the repeated blocks: modulations decide how strong
# everything else is. Source: diffusers' ``_skip_layerwise_casting_patterns``.
DENSE = re.compile(r"norm|embed|proj_in|relative_attention_bias|adaln", re.IGNORECASE)
TABLE = re.compile(r"relative_attention_bias")  # an embedding in a block: its name alone would pass for a layer's
EMBEDDINGS = re.compile(r"(^|\.)(shared|embed_tokens)\.weight$")  # an eighth of a Llama in blocks of 4 bits
BLOCK = re.compile(r"\.\d+\.|^\d+\.")


class Stored(nn.Module):
    """A layer whose weight is packed; made of another one by :func:`pack`, never constructed.

    ``stored`` holds the packed rows, ``factors`` one scale per row (rows, 1) or one for all, or nothing; ``codec`` is a
    GGUF type, ``dense_dtype`` what ``weight`` comes as.
    """

    stored: nn.Parameter
    factors: torch.Tensor | None
    codec: str
    dense_dtype: torch.dtype
    by_bits: bool

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """The dense weight where the packed one is. Peak extra memory: that of :meth:`dense`."""
        outline: torch.Tensor | None = self.__dict__.get("outline")
        return self.dense(self.dense_dtype) if outline is None else outline

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight as ``dtype``; multiplied out in fp32. Peak extra memory: the weight in fp32 and in ``dtype``."""
        if self.codec:
            return _blocks(self.stored, self.codec).to(dtype)
        if self.factors is None:
            if self.by_bits and self.stored.dtype is torch.bfloat16:
                return bf16_bits_to_fp32(self.stored).to(dtype)
            return self.stored.to(dtype)
        return self.stored.float().mul_(self.factors).to(dtype)


class StoredLinear(Stored, nn.Linear):  # type: ignore[misc,override]
    """A linear layer whose weight is packed."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The layer's output in the dtype of ``input``."""
        multiply = self.__dict__.get("multiply")  # as it is stored, where that was chosen
        output: torch.Tensor | None = None if multiply is None else multiply(self, input)
        if output is not None:
            return output
        bias = None if self.bias is None else self.bias.to(input.dtype)
        return F.linear(input, self.dense(input.dtype), bias)


class StoredEmbedding(Stored, nn.Embedding):  # type: ignore[misc,override]
    """A table of embeddings in GGUF blocks, of which only the rows that are asked for are unpacked."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The rows of ``input`` in the dtype that computes."""
        rows = _blocks(self.stored[input.flatten()], self.codec).to(self.dense_dtype)
        return rows.unflatten(0, input.shape)


def pack(
    layer: nn.Linear | nn.Embedding,
    stored: torch.Tensor,
    factors: torch.Tensor | None,
    dtype: torch.dtype,
    codec: str = "",
    by_bits: bool = False,
) -> None:
    """Turn ``layer`` into a :class:`Stored` one of the given rows; its own weight is forgotten.

    Args:
        stored: rows in 16 or 8 bits, or bytes of GGUF blocks.
        factors: what they are multiplied by, (rows, 1) or (1,).
        dtype: of the dense weight.
        codec: GGUF's name of the blocks.
        by_bits: whether bf16 is widened by integers, on a device whose own cast is broken.
    """
    del layer._parameters["weight"]
    layer.__class__ = StoredLinear if isinstance(layer, nn.Linear) else StoredEmbedding
    tied = isinstance(stored, nn.Parameter)  # two layers of one weight
    layer.stored = stored if tied else nn.Parameter(stored, requires_grad=False)  # type: ignore[assignment]
    layer.register_buffer("factors", factors)
    layer.codec, layer.dense_dtype, layer.by_bits = codec, dtype, by_bits  # type: ignore[assignment]


def unpack(layer: StoredLinear) -> None:
    """The plain linear layer with the values that ``layer`` computes with."""
    weight = layer.weight
    del layer._parameters["stored"], layer._buffers["factors"], layer.codec, layer.dense_dtype, layer.by_bits
    layer.__class__ = nn.Linear  # type: ignore[assignment]
    layer.weight = nn.Parameter(weight, requires_grad=False)  # type: ignore[assignment,misc]


def opened(layer: StoredLinear) -> Callable[[], None]:
    """Make a layer that is kept in plain 16 bits dense, so that something can be added to it; returns the way back."""
    stored, dtype, by_bits = layer.stored, layer.dense_dtype, layer.by_bits
    unpack(layer)
    return partial(pack, layer, stored.data, None, dtype, by_bits=by_bits)


def is_exact(layer: nn.Module) -> bool:
    """Tell whether a layer is packed without rounding: 16-bit values that are widened at each use."""
    return isinstance(layer, StoredLinear) and not layer.codec and layer.factors is None


@contextmanager
def without_unpacking(module: nn.Module) -> Iterator[None]:
    """For the block, packed layers tell dtype, shape and device of their weight, and nothing is made dense for it.

    Who puts something around layers asks for these dozens of times, and for no value.
    """
    layers = [owner for owner in module.modules() if isinstance(owner, Stored)]
    for layer in layers:
        one = torch.empty((), dtype=layer.dense_dtype, device=layer.stored.device)
        sides = ("out_features", "in_features") if isinstance(layer, nn.Linear) else ("num_embeddings", "embedding_dim")
        layer.__dict__["outline"] = one.expand([int(getattr(layer, side)) for side in sides])
    try:
        yield
    finally:
        for layer in layers:
            layer.__dict__.pop("outline")


def is_packed(module: nn.Module) -> bool:
    """Tell whether any layer of ``module`` is packed: merging something into its weights would be lost."""
    return any(isinstance(owner, Stored) for owner in module.modules())


def packable(module: nn.Module, exact: bool = False) -> dict[str, nn.Linear]:
    """The layers that may be packed, by name: plain linear ones in the repeated blocks, without those that modulate.

    Args:
        exact: whether the packing rounds nothing, so that all linear layers may be packed.
    """
    return {
        name: owner
        for name, owner in module.named_modules()
        if type(owner) is nn.Linear and (exact or (BLOCK.search(name) and not DENSE.search(name)))
    }


def stays_packed(name: str, entry: TensorEntry) -> bool:
    """Tell whether a weight that its file has in 8 bits or in blocks can stay so in memory, if its layer is linear.

    That rounds nothing, so it holds for every matrix, modulations included.
    """
    if len(entry.shape) != 2 or entry.mask is not None or not name.endswith(".weight") or TABLE.search(name):
        return False
    return codec_is_usable(entry.codec) if entry.codec else STORED[entry.dtype].itemsize == 1 and not is_table(name)


def is_table(name: str) -> bool:
    """Tell whether a weight is a table of token embeddings, by its name."""
    return bool(EMBEDDINGS.search(name))


def is_eligible(name: str, entry: TensorEntry, exact: bool = False) -> bool:
    """Tell whether a tensor is, by name and shape, the weight of a layer that may be packed; ``exact`` as above."""
    named = name.endswith(".weight") and BLOCK.search(name) and not (TABLE if exact else DENSE).search(name)
    return bool(named) and len(entry.shape) == 2


def stays_plain(name: str, entry: TensorEntry, choice: str, dense: torch.dtype) -> bool:
    """Tell whether a weight's own dtype in the file is what the choice keeps, so that reading casts nothing."""
    own = STORED[entry.dtype]
    if entry.is_packed or entry.swapped or entry.heads or not own.is_floating_point or own.itemsize < 2 or own == dense:
        return False
    if choice == "as in file":
        return is_eligible(name, entry, exact=own.itemsize < dense.itemsize)
    return PLAIN.get(choice) is own and is_eligible(name, entry)


def memory_bytes(name: str, entry: TensorEntry, choice: str, keeps: bool, dense: torch.dtype) -> int:
    """Bytes of a floating tensor in memory under a storage choice.

    Args:
        keeps: whether what the file has packed stays so.
        dense: the dtype that computes.
    """
    count = math.prod(entry.shape)
    if stays_plain(name, entry, choice, dense) or (keeps and stays_packed(name, entry)):
        scale = 0 if entry.scale is None else 4 * math.prod(entry.scale.shape)
        return entry.total_bytes + scale
    if not is_eligible(name, entry):
        return count * dense.itemsize
    if choice in EIGHT:
        return count + 4 * entry.shape[0]
    if choice in PLAIN:
        return 2 * count
    exact = choice == "as in file" and not entry.is_packed and STORED[entry.dtype].itemsize >= 2
    return count * (STORED[entry.dtype] if exact else dense).itemsize


def dense_bytes(name: str, entry: TensorEntry, choice: str, keeps: bool, dense: torch.dtype) -> int:
    """Bytes at the peak of making a packed weight dense, at most; 0 for one that is not packed. Args as above."""
    count, held = math.prod(entry.shape), memory_bytes(name, entry, choice, keeps, dense)
    if held >= count * dense.itemsize or is_table(name):  # of a table only a few rows are
        return 0
    return count * (dense.itemsize if dense is torch.float32 or held >= 2 * count else 4 + dense.itemsize)


def packed(
    module: nn.Module, choice: str, file_dtypes: Mapping[str, torch.dtype] | None = None, by_bits: bool = False
) -> Callable[[], None] | None:
    """Pack the linear layers of the blocks of ``module``; returns a function that undoes it, or None if there were
    none.

    Args:
        choice: one of :data:`CHOICES`.
        file_dtypes: of each weight in its file, for ``as in file``.
        by_bits: as in :func:`pack`.

    Raises:
        UnsupportedError: weights beyond what fp16 holds.
    """
    done: list[StoredLinear] = []
    for name, layer in packable(module).items():
        dtype = layer.weight.dtype
        wanted = PLAIN.get(choice) or (file_dtypes or {}).get(f"{name}.weight", dtype)
        if choice in EIGHT:
            stored, factors = eight_bits(layer.weight.detach(), choice)
        elif choice == "auto" or wanted == dtype or not wanted.is_floating_point or wanted.itemsize < 2:
            continue
        else:
            stored, factors = _narrowed(layer.weight.detach(), wanted, name), None
        pack(layer, stored, factors, dtype, by_bits=by_bits)
        done.append(layer)  # type: ignore[arg-type]

    def back() -> None:
        for layer in done:
            unpack(layer)

    return back if done else None


def eight_bits(weight: torch.Tensor, choice: str) -> tuple[torch.Tensor, torch.Tensor]:
    """``weight`` in one byte per value, and what its rows are multiplied by, (rows, 1) in fp32."""
    dtype, largest = EIGHT[choice]
    wide = weight.float()
    factors = (wide.abs().amax(1, keepdim=True) / largest).clamp(min=torch.finfo(torch.float32).tiny)
    scaled = wide / factors
    return (scaled.round() if dtype is torch.int8 else scaled).clamp(-largest, largest).to(dtype), factors


def require_storable(choice: str, subject: str, precision: Any) -> None:
    """Raise unless a storage choice goes with the precision; called before anything is read.

    Raises:
        InputError: unknown choice. UnsupportedError: a pair that cannot be.
    """
    if choice not in CHOICES:
        raise InputError(f"{subject} {choice!r}", expected=f"one of {', '.join(CHOICES)}", fix="Choose one of these.")
    if choice != "auto" and getattr(precision, "safe", False) and subject == "weights":
        raise UnsupportedError(
            f"weights {choice!r} with precision fp16-safe",
            expected="weights auto, because fp16-safe stores them as fp16 itself",
            fix="Choose weights auto, or another precision.",
        )


def _narrowed(weight: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    stored = weight.to(dtype)
    if dtype is torch.float16 and not bool(stored.isfinite().all()):
        raise UnsupportedError(
            f"weights of {name} up to {float(weight.abs().max()):.3g} as fp16",
            expected="at most 65504",
            fix="Choose weights bf16 or auto.",
        )
    return stored


def _blocks(stored: torch.Tensor, codec: str) -> torch.Tensor:
    """Dense rows in fp32 of GGUF blocks, by diffusers' own functions, on the device where the blocks are."""
    import gguf
    from diffusers.quantizers.gguf import utils

    kind = gguf.GGMLQuantizationType[codec]
    block, size = gguf.GGML_QUANT_SIZES[kind]
    rows: Any = utils.dequantize_functions[kind](stored.view(-1, size), block, size, torch.float32)
    return rows.reshape(stored.shape[0], -1)


@lru_cache(maxsize=64)
def codec_is_usable(codec: str) -> bool:
    """Tell whether blocks of this GGUF type can stay packed in memory: diffusers has a function for them."""
    import gguf
    from diffusers.quantizers.gguf import utils

    return gguf.GGMLQuantizationType[codec] in utils.dequantize_functions
