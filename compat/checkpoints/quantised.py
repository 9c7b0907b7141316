"""Packed weights as safetensors files describe them: the side tensors of each, such as scales, and its format."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from .headers import STORED, TensorEntry, bytes_of, damaged, json_object, unread
from .unpacking import ALL, PACKINGS, ROTATES, SCALED, W4A8, fits

NF4, MARK = ".weight.quant_state.bitsandbytes__nf4", "scaled_fp8"
PREFIXES = "", "model.diffusion_model."  # of tensors that a file's description of formats may leave out, as in core
DATA = "._data"  # which quanto puts behind the name of a weight
BLOCKS = {"Q4_0": 18, "Q8_0": 34}  # GGUF's, in bytes for 32 values; as ``.Q4_0_qweight`` in Kijai's files of Mochi
BYTES = ("F8_E4M3", "F8_E5M2", "I8")  # stored dtypes of weights with one scale, or one per row
PLAIN = ("float8_e4m3fn", "float8_e5m2", "int8_tensorwise")  # ComfyUI's names of these formats
KITCHEN = ("scale", "scale_2", "s_rel", "s_channel", "codebook", "correction", "zeros")
# Ends of names beside a weight, and what they hold: ComfyUI's, Tencent's, quanto's, ModelOpt's, bitsandbytes'.
SIDES = {f".weight_{side}": side for side in KITCHEN} | dict.fromkeys((".scale_weight", ".fp8_scale"), "scale")
SIDES |= {".weight._scale": "scale", ".pre_quant_scale": "pre_scale", ".weight.absmax": "absmax", NF4: "state"}
SIDES |= {".weight.nested_absmax": "nested", ".weight.nested_quant_map": "nested_map", ".weight.quant_map": "codebook"}
SIDES |= dict.fromkeys((".comfy_quant", ".scale_input", ".input_scale", ".output_scale"), "")  # not about its values
STRANGERS = {".proj_down": "SVDQuant (nunchaku)", ".smooth_factor": "SVDQuant (nunchaku)", ".qzeros": "GPTQ or AutoAWQ"}
STRANGERS |= {".wzeros": "AWQ as nunchaku stores it", ".weight._shift": "quanto in 4 or 2 bits"}
STRANGERS |= {".quant_state.bitsandbytes__fp4": "fp4 (bitsandbytes)", ".SCB": "int8 of bitsandbytes"}
STRANGERS |= {".weight_scale_inv": "fp8 in blocks (transformers)"}


def with_scales(entries: Mapping[str, TensorEntry], notes: Mapping[str, str], path: Path) -> dict[str, TensorEntry]:
    """``entries`` under their models' names, packed weights with their side tensors, without what only describes a
    format. Raises UnsupportedError for formats that are not read, CheckpointError for a side tensor of no weight."""
    for suffix, kind in STRANGERS.items():
        if stranger := next((name for name in entries if name.endswith(suffix)), ""):
            raise unread(path, stranger.removesuffix(suffix), kind)
    kept: dict[str, TensorEntry] = {}
    for name, entry in entries.items():
        stem, _, last = name.rpartition(".")
        codec = last.removesuffix("_qweight")
        if codec in BLOCKS:
            kept[f"{stem}.weight"] = replace(entry, codec=codec)
        elif last != MARK:
            kept[name.removesuffix(DATA)] = entry
    beside: dict[str, dict[str, TensorEntry]] = {}
    for name in list(kept):
        end = next((end for end in SIDES if name.endswith(end)), None)
        if end is None:
            continue
        entry, owner = kept.pop(name), name.removesuffix(end)
        if SIDES[end]:
            beside.setdefault(owner, {})[SIDES[end]] = entry
            if f"{owner}.weight" not in kept:
                raise _misfit(path, name, entry, f"{owner}.weight")
    formats = _formats(entries, notes)
    for name, entry in kept.items():
        owner = name.removesuffix(".weight")
        if entry.dtype == "I8" or owner in beside or owner in formats:
            kept[name] = _packed_entry(path, name, entry, beside.get(owner, {}), formats.get(owner, {}))
        elif entry.codec in BLOCKS or (entry.dtype == "U8" and len(entry.shape) == 2 and owner != name):
            kept[name] = _of_blocks(path, name, entry, entry.codec or "Q4_0")
    return kept


def _packed_entry(
    path: Path, name: str, weight: TensorEntry, sides: dict[str, TensorEntry], about: Mapping[str, Any]
) -> TensorEntry:
    """The entry of ``weight`` with its ``sides``, by what the file says ``about`` its format; returned as it is if
    plain. CheckpointError for sides that are missing or do not fit, UnsupportedError for unknown formats."""
    inner = about.get("params")
    about = {**(inner if isinstance(inner, dict) else {}), **about}
    codec = str(about.get("format") or _format_by(sides))
    codec = SCALED if codec in PLAIN else codec
    packing, shape, dense_shape = PACKINGS.get(codec), tuple(weight.shape), about.get("shape")
    if packing is None:
        raise unread(path, name, codec)
    plain = weight.dtype not in BYTES or (not sides and weight.dtype != "I8")  # then scales are another program's
    if codec == SCALED and plain and "pre_scale" not in sides:
        return weight
    if codec == "nf4" and isinstance(dense_shape, list) and all(type(n) is int and n > 0 for n in dense_shape):
        shape = tuple(dense_shape)
    elif packing.values > 1:
        shape = (*shape[:-1], math.prod(shape[-1:]) * packing.values)
    rows, columns = (shape[0], math.prod(shape[1:])) if shape else (0, 0)
    size = STORED[weight.dtype].itemsize
    held = rows * columns if weight.mask else weight.total_bytes // size * packing.values
    if not rows * columns or rows * columns != held or (codec != SCALED and (size > 1 or weight.mask is not None)):
        raise _misfit(path, next(iter(sides), name), weight, name)
    needs_all = (codec == SCALED and weight.dtype == "I8") or "nested" in sides  # no side of the format is optional
    optional = frozenset() if needs_all else packing.optional
    missing = sorted(packing.sides.keys() - optional - sides.keys())
    if missing:
        found = f"no {missing[0]} for the weight {name!r} in {str(path)!r}, which is stored as {codec}"
        raise CheckpointError(found, expected="it beside the weight", fix="Use another version of this file.")
    wanted = {**packing.sides, "pre_scale": ALL}
    mine = {side: sides[side] for side in wanted if side in sides}
    for side, entry in mine.items():
        readable = STORED[entry.dtype].is_floating_point or STORED[entry.dtype].itemsize == 1
        if not (readable and fits(side, wanted[side], math.prod(entry.shape), rows, columns)):
            raise _misfit(path, f"{name}: {side}", entry, name)
    rotated = codec in ROTATES or bool(about.get("convrot"))
    group = about.get("convrot_groupsize", 256) if rotated else 0
    if rotated and (type(group) is not int or group not in (4, 16, 64, 256, 1024) or columns % group):
        raise unread(path, name, f"{codec} rotated in groups of {group} of its {columns} columns")
    return replace(weight, shape=shape, codec=codec, sides=tuple(mine.items()), group=group)


def _of_blocks(path: Path, name: str, weight: TensorEntry, codec: str) -> TensorEntry:
    """The entry of a weight whose uint8 rows are GGUF blocks of ``codec``; CheckpointError for no whole blocks."""
    size, shape = BLOCKS[codec], weight.shape
    if weight.mask or weight.dtype != "U8" or len(shape) != 2 or not math.prod(shape) or shape[1] % size:
        raise damaged(path, f"{weight.dtype} {shape} for {name!r}, no whole blocks of {codec} ({size} bytes each)")
    return replace(weight, shape=(shape[0], shape[1] // size * 32), codec=codec)


def _format_by(sides: Mapping[str, TensorEntry]) -> str:
    """The format that has these side tensors, for a file that does not name it; :data:`SCALED` if none else does."""
    if "scale" in sides and sides["scale"].dtype in ("U8", "F8_E8M0"):
        return f"{'nvfp4' if 'scale_2' in sides else 'mxfp8'} that no comfy_quant describes"
    own = {"s_rel": W4A8, "zeros": "awq_w4a16", "scale_2": "nvfp4 that no comfy_quant describes", "absmax": "nf4"}
    return next((codec for side, codec in own.items() if side in sides), SCALED)


def _misfit(path: Path, name: str, entry: TensorEntry, weight: str) -> CheckpointError:
    """The error for the side tensor ``name`` that does not fit its ``weight``."""
    found = f"the scale {name!r} of {entry.shape} in {str(path)!r} fits no weight {weight!r}"
    fix = "Use another version of this file, or download it again if its size is not the published one."
    return CheckpointError(found, expected="one number per weight, per row, or per block", fix=fix)


def _formats(entries: Mapping[str, TensorEntry], notes: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Descriptions of formats by layer: from the file's metadata, or JSON in a tensor beside the weight, which wins."""
    formats: dict[str, dict[str, Any]] = {}
    if "_quantization_metadata" in notes:
        layers = (json_object(notes["_quantization_metadata"]) or {}).get("layers")
        known = layers.items() if isinstance(layers, dict) else ()
        named = [(f"{prefix}{name}", about) for name, about in known for prefix in PREFIXES]
        formats |= {name: about for name, about in named if isinstance(about, dict)}
    for name, entry in entries.items():
        end = next((end for end in (".comfy_quant", NF4) if name.endswith(end)), "")
        if end and entry.total_bytes < 4096:
            about = json_object(bytes_of(entry)) or {}
            formats[name.removesuffix(end)] = {**about, "format": "nf4"} if end == NF4 else about
    return formats
