"""Weights that a file has packed, made dense: one table of formats, each with its tensors and its arithmetic in fp32.
Values equal comfy-kitchen's eager ones to fp32 bit for bit, bitsandbytes' of nf4, and gguf's of blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..device.execution import bf16_bits_to_fp32
from ..packages import imported
from .gguf_blocks import CODECS, decoded

Sides = Mapping[str, Tensor]
ROW, ROWS, COLUMNS, ALL = "row", "rows", "columns", "all"  # a number per row; several, rows first; rows last; for all
SIZES = {"codebook": 16, "nested_map": 256, "scale_2": 1}  # numbers in side tensors for all rows
SCALED, W4A8, NESTED = "scaled", "asym_w4a8_int8", 256
W4A8_SIDES = {"s_rel": ROWS, "s_channel": ROW, "codebook": ALL, "correction": COLUMNS}
NF4_TABLES = ("codebook", "state", "nested", "nested_map")
VALUES, FP32_COPIES = 2**22, 4  # values unpacked at once, and their copies in fp32 at the peak
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Packing(NamedTuple):
    """One format: the layout of each side tensor, the unpacking to fp32, and the values in one stored element."""

    sides: Mapping[str, str | int]
    unpack: Callable[[Tensor, Sides], Tensor]
    values: int = 1
    optional: frozenset[str] = frozenset()


def unpacked(codec: str, stored: Tensor, sides: Sides, group: int, dtype: torch.dtype) -> Tensor:
    """Dense rows (N, K) as ``dtype`` on the device of ``stored`` (N, elements), computed in fp32 and rounded once.
    ``codec`` is a key of :data:`PACKINGS`, unpacked some rows at a time, or a GGUF type, all at once; ``sides`` are as
    of :func:`laid_out`, of which ``pre_scale`` multiplies columns last; ``group``: columns rotated together, or 0."""
    packing, rows = PACKINGS.get(codec), stored.shape[0]
    if packing is None:
        return _blocks(stored, codec).to(dtype)
    columns = stored.shape[1] * packing.values
    if rows > 1 and rows * columns > VALUES:
        dense = torch.empty((rows, columns), dtype=dtype, device=stored.device)
        count = max(1, VALUES // columns)
        for first in range(0, rows, count):
            part = slice(first, first + count)
            dense[part] = unpacked(codec, stored[part], rows_of(sides, rows, part), group, dtype)
        return dense
    values = packing.unpack(stored, sides)
    values = rotated(values, group) if group else values
    return (values * _fp32(sides["pre_scale"]) if "pre_scale" in sides else values).to(dtype)


def rows_of(sides: Sides, rows: int, part: Any) -> dict[str, Tensor]:
    """``sides`` for the rows ``part``, a slice or tensor of indices, of ``rows``; a side for all rows is kept whole."""
    return {name: side[part] if side.shape[0] == rows else side for name, side in sides.items()}


def laid_out(side: Tensor, how: str | int, rows: int, columns: int) -> Tensor:
    """The side tensor of a weight (``rows``, ``columns``), with a row for each of the weight's rows, or one for all.
    ``how`` is :data:`ROW`, :data:`ROWS`, :data:`COLUMNS`, :data:`ALL`, or the length of the blocks whose scales lie in
    the tiles of 128 rows and 4 blocks that cuBLAS reads. 8-bit dtypes come back as uint8, which any device holds."""
    side = side.view(torch.uint8) if side.dtype.itemsize == 1 else side
    if how == ALL or side.numel() == 1:
        return side.reshape(1, -1)
    if how in (ROW, ROWS):
        return side.reshape(rows, -1)
    if how == COLUMNS:
        return side.reshape(-1, rows).t().contiguous()
    high, wide = -(-rows // 128), -(-(columns // int(how)) // 4)
    tiles = side.reshape(high, wide, 32, 4, 4).permute(0, 3, 2, 1, 4).reshape(high * 128, wide * 4)
    return tiles[:rows, : columns // int(how)].contiguous()


def fits(name: str, how: str | int, count: int, rows: int, columns: int) -> bool:
    """True where ``count`` numbers, laid out as ``how``, can be side ``name`` of a weight (``rows``, ``columns``)."""
    if how == ALL:
        return 0 < count == {**SIZES, "pre_scale": columns}.get(name, count)
    if how == ROW:
        return count in (1, rows)
    if how in (ROWS, COLUMNS):
        return count > 0 and count % rows == 0 and columns % (count // rows) == 0
    return columns % int(how) == 0 and count == -(-rows // 128) * 512 * -(-(columns // int(how)) // 4)


def largest_group(columns: int) -> int:
    """The most columns, up to 256, that ConvRot can rotate together in rows of ``columns``; 0 for none."""
    return next((group for group in (256, 64, 16) if columns % group == 0), 0)


def rotated(values: Tensor, group: int) -> Tensor:
    """``values`` (..., K) with each run of ``group`` columns multiplied by ConvRot's matrix, its own inverse."""
    return torch.matmul(values.unflatten(-1, (-1, group)), _table(group, values.device)).flatten(-2)


@lru_cache(maxsize=64)
def _table(name: str | int, device: torch.device) -> Tensor:
    """A format's fp32 values by code, for devices without its dtype; for a number ConvRot's matrix of that side."""
    if isinstance(name, int):
        matrix = four = torch.ones(4, 4) - 2 * torch.eye(4).flip(1)
        while len(matrix) < name:
            matrix = torch.kron(matrix, four)
        return (matrix / name**0.5).to(device)
    codes = torch.arange(256, dtype=torch.uint8)
    made = {
        "e2m1": lambda: torch.tensor([*E2M1, *(-value for value in E2M1)]),
        "e4m3": lambda: codes.view(torch.float8_e4m3fn).float(),
        "e5m2": lambda: codes.view(torch.float8_e5m2).float(),
        "e8m0": lambda: (codes.int() << 23).view(torch.float32),  # 2^(e - 127); its ends 0 and infinity, as kitchen's
    }
    return made[name]().to(device)


def float8_values(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """The fp32 values of bytes that are float8 of ``dtype``, on a device that may have none."""
    return _table("e5m2" if dtype is torch.float8_e5m2 else "e4m3", codes.device)[codes.int()]


def _fp32(side: Tensor, codes: str = "e4m3") -> Tensor:
    """A side tensor in fp32; bytes are float8 in the format ``codes``, a name of :func:`_table`."""
    if side.dtype is torch.uint8:
        return _table(codes, side.device)[side.int()]
    return bf16_bits_to_fp32(side) if side.dtype is torch.bfloat16 else side.float()


def _halves(stored: Tensor, high_first: bool = False) -> Tensor:
    """The two 4-bit codes of each byte side by side, int32."""
    high, low = stored.view(torch.uint8) >> 4, stored.view(torch.uint8) & 15
    return torch.stack([high, low] if high_first else [low, high], -1).flatten(-2).int()


def _scale_runs(values: Tensor, scale: Tensor, added: Tensor | None = None) -> Tensor:
    """``values`` (N, K), each run of columns times its ``scale`` (N, runs) and plus its ``added`` number (N, runs)."""
    values = (values.unflatten(1, (scale.shape[1], -1)) * scale.unsqueeze(-1)).flatten(1)
    return values if added is None else (values.unflatten(1, (added.shape[1], -1)) + added.unsqueeze(-1)).flatten(1)


def _scaled(stored: Tensor, sides: Sides) -> Tensor:
    return stored.float().mul_(_fp32(sides["scale"])) if "scale" in sides else stored.float()


def _w4a8(stored: Tensor, sides: Sides) -> Tensor:
    """W4A8 as fp32: codes by the codebook, else -8 to 7, scaled to int8 by run, then scaled by row and corrected."""
    codes = _halves(stored)
    values = sides["codebook"].float()[0][codes] if "codebook" in sides else codes.float() - 8
    values = _scale_runs(values, _fp32(sides["s_rel"])).round_().clamp_(-127, 127)  # rounding belongs to the format
    return _scale_runs(values, _fp32(sides["s_channel"]), _fp32(sides["correction"]) if "correction" in sides else None)


def _nvfp4(stored: Tensor, sides: Sides) -> Tensor:
    values = _table("e2m1", stored.device)[_halves(stored, high_first=True)]
    return _scale_runs(values, _fp32(sides["scale_2"]) * _fp32(sides["scale"]))


def _awq(stored: Tensor, sides: Sides) -> Tensor:
    return _scale_runs(_halves(stored).float() - 8, _fp32(sides["scale"]), _fp32(sides["zeros"]))


def _nf4(stored: Tensor, sides: Sides) -> Tensor:
    """nf4 as fp32: codebook values times the ``absmax`` of their run, which is itself unpacked if it is nested."""
    absmax = sides["absmax"]
    if "nested" in sides:  # the scales are packed too, in runs that do not end with a row
        index = (sides["start"] + torch.arange(absmax.shape[1], device=absmax.device)) // NESTED
        absmax = sides["nested_map"].float()[0][absmax.int()] * sides["nested"].gather(1, index) + sides["offset"]
    return _scale_runs(sides["codebook"].float()[0][_halves(stored, high_first=True)], absmax.float())


def unnested(sides: dict[str, Tensor], offset: float) -> dict[str, Tensor]:
    """Side tensors of nf4 whose scales (``absmax``) are packed too, in runs of :data:`NESTED`: each row gets the scales
    ``nested`` of the runs that it touches, and ``start``, where in the first it begins; ``offset`` is added last."""
    rows, wide = sides["absmax"].shape
    start, nested = torch.arange(rows)[:, None] * wide, sides["nested"].flatten().float()
    runs = start // NESTED + torch.arange((wide - 2) // NESTED + 2)  # a row of ``wide`` scales touches at most so many
    nested = nested[runs.clamp_(max=len(nested) - 1)]
    return {**sides, "start": start % NESTED, "nested": nested, "offset": torch.tensor([[offset]])}


def _blocks(stored: Tensor, codec: str) -> Tensor:
    """Dense rows in fp32 of a GGUF type's blocks, ``stored`` (N, bytes), by our code or diffusers'."""
    gguf = imported("gguf")
    kind = gguf.GGMLQuantizationType[codec]
    block, size = gguf.GGML_QUANT_SIZES[kind]
    raw = stored.view(-1, size)
    if codec in CODECS:
        return decoded(raw, codec).reshape(stored.shape[0], -1)
    theirs = imported("diffusers.quantizers.gguf.utils").dequantize_functions[kind]
    rows: Tensor = theirs(raw, block, size, torch.float32)
    return rows.reshape(stored.shape[0], -1)


PACKINGS: dict[str, Packing] = {  # by the names that files give them, but for SCALED: fp8 and int8 times a scale
    SCALED: Packing({"scale": ROW}, _scaled, 1, frozenset({"scale"})),
    "convrot_w4a4": Packing({"scale": ROW}, lambda stored, sides: _scaled((_halves(stored) ^ 8) - 8, sides), 2),
    W4A8: Packing(W4A8_SIDES, _w4a8, 2, frozenset({"codebook", "correction"})),
    "nvfp4": Packing({"scale": 16, "scale_2": ALL}, _nvfp4, 2),
    "mxfp8": Packing({"scale": 32}, lambda stored, sides: _scale_runs(stored.float(), _fp32(sides["scale"], "e8m0"))),
    "awq_w4a16": Packing({"scale": COLUMNS, "zeros": COLUMNS}, _awq, 2),
    "nf4": Packing({"absmax": ROWS, **dict.fromkeys(NF4_TABLES, ALL)}, _nf4, 2, frozenset(NF4_TABLES[2:])),
}
ROTATES = ("convrot_w4a4", W4A8)  # in any case
