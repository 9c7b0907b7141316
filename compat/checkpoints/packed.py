"""Weights stored in fewer bits than the dtype that computes: packed in memory, unpacked at each use.
A packed layer is the original Linear or table of embeddings under another class; ``weight`` is computed on access, to
exactly the values computed with. So offload moves small tensors, and LoRA and rewrites see a layer."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..device.execution import bf16_bits_to_fp32
from ..errors import UnsupportedError, require_choice
from ..packages import imported
from .headers import STORED, TensorEntry
from .unpacking import SCALED, W4A8, largest_group, rotated, rows_of, unpacked

MEANINGS: dict[str, str] = {
    "auto": "in the dtype that computes, or, if the file has fewer bits, exactly as in the file",
    "as in file": "in the file's own dtype, cast at each use; exact",
    "bf16": "2 bytes per weight; exact if the file is bf16",
    "fp16": "2 bytes per weight; exact if the file is fp16; values above 65504 are an error",
    "fp8": "1 byte per weight and a scale per row: about half the memory of bf16, not exact",
    "int8": "1 byte per weight and a scale per row: like fp8, but with evenly spaced values",
    "int8_convrot": "int8 of weights rotated first, so that stored_products stands a few large activations",
    "w4a8": "4 bits per weight and small scales, rotated too: a quarter of bf16, about 7 % off; loads slowly",
}
CHOICES = tuple(MEANINGS)
PLAIN: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}
EIGHT: dict[str, tuple[torch.dtype, float]] = {"fp8": (torch.float8_e4m3fn, 448.0), "int8": (torch.int8, 127.0)}
ROTATED = ("int8_convrot", "w4a8")
ROUNDED = (*EIGHT, *ROTATED)
# Never rounded: modulations decide how strong all else is. Source: diffusers' ``_skip_layerwise_casting_patterns``.
DENSE = re.compile(r"norm|embed|proj_in|relative_attention_bias|adaln", re.IGNORECASE)
TABLE = re.compile(r"relative_attention_bias")  # an embedding in a block: its name alone would pass for a layer's
EMBEDDINGS = re.compile(r"(^|\.)(shared|embed_tokens|cond_type_embed)\.weight$")  # an eighth of a Llama in 4 bits
BLOCK = re.compile(r"\.\d+\.|^\d+\.")


class Stored(nn.Module):
    """A layer whose weight is packed; made of another one by :func:`pack`, never constructed.
    Buffers hold what belongs to the packed rows, such as ``scale``, (rows, 1) or one for all."""

    stored: nn.Parameter  # the packed rows
    codec: str  # their format; empty for plain values
    group: int  # columns that were rotated together
    dense_dtype: torch.dtype  # of ``weight``
    by_bits: bool  # bf16 is widened by integers, on a device whose own cast is broken

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """The dense weight, at the cost of :meth:`dense`; in :func:`without_unpacking` an outline without values."""
        outline: torch.Tensor | None = self.__dict__.get("outline")
        return self.dense(self.dense_dtype) if outline is None else outline

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight as ``dtype``; multiplied out in fp32. Peak extra memory: the weight in fp32 and in ``dtype``."""
        if self.codec:
            return unpacked(self.codec, self.stored, self.sides, self.group, dtype)
        if self.by_bits and self.stored.dtype is torch.bfloat16:
            return bf16_bits_to_fp32(self.stored).to(dtype)
        return self.stored.to(dtype)

    @property
    def sides(self) -> dict[str, torch.Tensor]:
        return {name: side for name, side in self._buffers.items() if side is not None}


class StoredLinear(Stored, nn.Linear):  # type: ignore[misc,override]
    """A linear layer whose weight is packed."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        multiply = self.__dict__.get("multiply")  # transforms.products.product; None: declined
        output: torch.Tensor | None = None if multiply is None else multiply(self, input)
        if output is not None:
            return output
        return F.linear(input, self.dense(input.dtype), None if self.bias is None else self.bias.to(input.dtype))


class StoredEmbedding(Stored, nn.Embedding):  # type: ignore[misc,override]
    """A packed table of embeddings, of which only the rows that are asked for are unpacked."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        ids = input.flatten()
        sides = rows_of(self.sides, self.stored.shape[0], ids)
        return unpacked(self.codec, self.stored[ids], sides, self.group, self.dense_dtype).unflatten(0, input.shape)


def pack(
    layer: nn.Linear | nn.Embedding, stored: torch.Tensor, dtype: torch.dtype, codec: str = "",
    sides: Mapping[str, torch.Tensor] | None = None, group: int = 0, by_bits: bool = False,
) -> None:  # fmt: skip
    """Turn ``layer`` into a :class:`Stored` one with these fields, ``dtype`` as ``dense_dtype``; its weight is dropped.
    ``stored`` has values of 16 or 8 bits, or packed by ``codec``; ``sides`` are as of :func:`.weights.read_sides`."""
    del layer._parameters["weight"]
    layer.__class__ = StoredLinear if isinstance(layer, nn.Linear) else StoredEmbedding
    tied = isinstance(stored, nn.Parameter)  # two layers of one weight
    layer.stored = stored if tied else nn.Parameter(stored, requires_grad=False)  # type: ignore[assignment]
    for name, side in (sides or {}).items():
        layer.register_buffer(name, side)
    layer.codec, layer.group, layer.dense_dtype, layer.by_bits = codec, group, dtype, by_bits  # type: ignore[assignment]


def unpack(layer: StoredLinear) -> None:
    """Make ``layer`` the plain linear layer with the values that it computes with."""
    weight = layer.weight
    layer._buffers.clear()
    del layer._parameters["stored"], layer.codec, layer.group, layer.dense_dtype, layer.by_bits
    layer.__class__ = nn.Linear  # type: ignore[assignment]
    layer.weight = nn.Parameter(weight, requires_grad=False)  # type: ignore[assignment,misc]


def opened(layer: StoredLinear) -> Callable[[], None]:
    """Make a layer dense, so that a LoRA can be added; returns a function that packs it again, bit for bit."""
    form: dict[str, Any] = {"codec": layer.codec, "sides": layer.sides, "group": layer.group, "by_bits": layer.by_bits}
    back = partial(pack, layer, layer.stored.data, layer.dense_dtype, **form)
    unpack(layer)
    return back


def is_exact(layer: nn.Module) -> bool:
    """True for a layer that is packed without rounding: 16-bit values that are widened at each use."""
    return isinstance(layer, StoredLinear) and not layer.codec


@contextmanager
def without_unpacking(module: nn.Module) -> Iterator[None]:
    """For the block, give packed layers a ``weight`` of right dtype, shape and device, but no values. Not to nest."""
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


def packable(module: nn.Module, exact: bool = False) -> dict[str, nn.Linear]:
    """The Linears that may be packed, by name: those in blocks, less :data:`DENSE`; all if packing is ``exact``."""
    linear = {name: owner for name, owner in module.named_modules() if type(owner) is nn.Linear}
    return {name: layer for name, layer in linear.items() if exact or (BLOCK.search(name) and not DENSE.search(name))}


def stays_packed(name: str, entry: TensorEntry) -> bool:
    """True for a matrix that its file has in 8 bits or a packed format, and that can stay so if its layer is linear.
    As nothing is rounded, modulations may too; sparse weights, :data:`TABLE` and embeddings in 8 bits may not."""
    if len(entry.shape) != 2 or entry.mask is not None or not name.endswith(".weight") or TABLE.search(name):
        return False
    return bool(entry.codec) or (STORED[entry.dtype].itemsize == 1 and not is_table(name))


def is_table(name: str) -> bool:
    """True for the name of the weight of a table of embeddings."""
    return bool(EMBEDDINGS.search(name))


def is_eligible(name: str, entry: TensorEntry, exact: bool = False) -> bool:
    """True for a matrix named as a weight in a block that may be packed; ``exact`` packing may take more."""
    named = name.endswith(".weight") and BLOCK.search(name) and not (TABLE if exact else DENSE).search(name)
    return bool(named) and len(entry.shape) == 2


def stays_plain(name: str, entry: TensorEntry, choice: str, dense: torch.dtype) -> bool:
    """True for a plain float weight that ``choice`` keeps in its file's dtype, which is not ``dense``, the model's.
    Among weights that may be packed, ``as in file`` keeps any such dtype; ``bf16`` and ``fp16`` keep only their own."""
    own = STORED[entry.dtype]
    if entry.is_packed or entry.swapped or entry.heads or not own.is_floating_point or own.itemsize < 2 or own == dense:
        return False
    if choice == "as in file":
        return is_eligible(name, entry, exact=own.itemsize < dense.itemsize)
    return PLAIN.get(choice) is own and is_eligible(name, entry)


def packed(
    module: nn.Module, choice: str, file_dtypes: Mapping[str, torch.dtype] | None = None, by_bits: bool = False
) -> Callable[[], None] | None:
    """Pack the linear layers of the blocks of ``module``; returns a function that makes them dense again, with values
    as rounded, or None if none is packed. ``file_dtypes``, of the file's weights by name, are for ``as in file``.
    Raises UnsupportedError, before any layer is packed, for weights beyond fp16."""
    layers, narrow = packable(module), dict[str, torch.dtype]()
    for name, layer in layers.items():
        own = layer.weight.dtype
        wanted = PLAIN.get(choice) or (file_dtypes or {}).get(f"{name}.weight", own)
        if choice not in ("auto", *ROUNDED) and wanted != own and wanted.is_floating_point and wanted.itemsize > 1:
            _require_finite(layer.weight.detach(), wanted, name)  # before any layer is packed
            narrow[name] = wanted
    chosen: Mapping[str, Any] = layers if choice in ROUNDED else narrow
    for name in chosen:
        weight = layers[name].weight.detach()
        form = {"stored": weight.to(narrow[name])} if name in narrow else rounded(weight, choice)
        pack(layers[name], dtype=weight.dtype, by_bits=by_bits, **form)

    def back() -> None:
        for name in chosen:
            unpack(layers[name])  # type: ignore[arg-type]

    return back if chosen else None


def rounded(weight: torch.Tensor, choice: str) -> dict[str, Any]:
    """``weight`` packed by a choice of :data:`ROUNDED`, as keyword arguments of :func:`pack`.
    Where no ConvRot group divides the columns, ``int8_convrot`` and ``w4a8`` are int8 with a scale per row."""
    wide, group = weight.float(), largest_group(weight.shape[1]) if choice in ROTATED else 0
    if choice == "w4a8" and group:
        quantise = imported("comfy_kitchen").quantize_w4a8_int8_weight
        stored, s_rel, s_channel, _, codebook = quantise(wide, convrot_groupsize=group)
        sides = {"s_rel": s_rel.view(torch.uint8), "s_channel": s_channel[:, None], "codebook": codebook[None]}
        return {"stored": stored, "codec": W4A8, "sides": sides, "group": group}
    dtype, largest = EIGHT.get(choice, EIGHT["int8"])
    wide = rotated(wide, group) if group else wide
    scale = (wide.abs().amax(1, keepdim=True) / largest).clamp(min=torch.finfo(torch.float32).tiny)
    values = wide / scale
    stored = (values.round() if dtype is torch.int8 else values).clamp(-largest, largest).to(dtype)
    return {"stored": stored, "codec": SCALED, "sides": {"scale": scale}, "group": group}


def as_in_files(module: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of ``module``, by name, with packed weights as ComfyUI's own files have them: with a mark and scales.
    Weights packed otherwise than by :func:`rounded` are made dense, in ``module`` too."""
    layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, StoredLinear)}
    for name, layer in list(layers.items()):
        if layer.codec not in ("", SCALED, W4A8) or layer.sides.keys() & {"pre_scale", "correction"}:
            unpack(layers.pop(name))
    tensors = module.state_dict()
    for name, layer in layers.items():
        tensors[f"{name}.weight"] = stored = tensors.pop(f"{name}.stored")
        for side in layer.sides:
            values = tensors.pop(f"{name}.{side}")
            values = values.view(torch.float8_e4m3fn) if values.dtype is torch.uint8 else values  # bytes by laid_out
            tensors[f"{name}.weight_{side}"] = values if side in ("scale", "s_rel") else values.flatten()
        kind = "int8_tensorwise" if stored.dtype is torch.int8 else str(stored.dtype).removeprefix("torch.")
        about: dict[str, Any] = {"format": kind if layer.codec == SCALED else layer.codec}
        if layer.group:
            about |= {"convrot": True, "convrot_groupsize": layer.group}
        if layer.codec:
            tensors[f"{name}.comfy_quant"] = torch.tensor(list(json.dumps(about).encode()), dtype=torch.uint8)
    return tensors


def require_storable(**choices: str) -> None:
    """Raise for a choice, by the name of its input, that is unknown or lacks its package; before anything is read."""
    for subject, choice in choices.items():
        require_choice(subject, choice, CHOICES)
        if choice == "w4a8":
            imported("comfy_kitchen")


def _require_finite(weight: torch.Tensor, dtype: torch.dtype, name: str) -> None:
    """Raise UnsupportedError for weights that are not finite as fp16; other dtypes hold weights of any size."""
    if dtype is torch.float16 and not bool(weight.to(dtype).isfinite().all()):
        sound, found = bool(weight.isfinite().all()), f"weights of {name} up to {float(weight.abs().max()):.3g} as fp16"
        fix = "Choose weights auto." if sound else "Download the file again: it is damaged."
        raise UnsupportedError(found, expected="at most 65504", fix=fix)
