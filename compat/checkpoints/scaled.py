"""Files whose weights are stored with scales: finds the scales and attaches them to their weights.

A dropped scale raises no error but makes weights wrong by a factor, so unknown kinds are refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, UnsupportedError
from .headers import TensorEntry, damaged, entries_and_notes, json_object, possible_shape, reading_budget

SCALES = (".scale_weight", ".weight_scale", ".fp8_scale")  # of a weight: before and after ComfyUI 0.4, Tencent's
ASIDE = (".scale_input", ".input_scale", ".comfy_quant", ".pre_quant_scale")  # about the matrix product, not the weight
MARK = "scaled_fp8"
FORMATS = ("float8_e4m3fn", "float8_e5m2", "int8_tensorwise")  # values times one number, or one per row
NARROW = ("F8_E4M3", "F8_E5M2", "I8")
SPARSE, MASK = "anygpu_sparse", ".mask"  # shapes of tensors whose zeros a file leaves out, and the bitmap of each
WIDEST = 4  # bytes of a value in fp32


def described(files: Sequence[Path]) -> dict[str, TensorEntry]:
    """All tensors of a part's ``files`` by name, each with its scale and its mask.

    Raises:
        CheckpointError: a file is damaged, or two of them have a tensor of the same name. UnsupportedError: as
            :func:`with_scales`.
    """
    entries: dict[str, TensorEntry] = {}
    for file in files:
        found, notes = entries_and_notes(file)
        mine = with_scales(with_masks(found, notes, file), notes, file)
        twice = sorted(entries.keys() & mine.keys())
        if twice:
            raise damaged(file, f"tensor {twice[0]!r}, which {entries[twice[0]].file.name} has too")
        entries.update(mine)
    return entries


def with_masks(entries: Mapping[str, TensorEntry], notes: Mapping[str, str], path: Path) -> dict[str, TensorEntry]:
    """``entries`` with the masks of sparse tensors attached, in the shapes that the file's metadata gives them.

    A mask has a bit for each element, so that a file cannot claim more than eight elements a byte; in fp32 all of them
    may take what :func:`reading_budget` gives the file.

    Raises:
        CheckpointError: a shape, a mask and its values that do not go together, or too many values.
    """
    kept, dense = dict(entries), 0
    for name, sides in (json_object(notes.get(SPARSE, "{}")) or {}).items():
        values, mask = kept.get(name), kept.pop(name + MASK, None)
        try:
            shape = possible_shape(map(int, sides))
        except (TypeError, ValueError):
            shape = ()
        count = math.prod(shape)
        fits = mask is not None and mask.dtype == "U8" and mask.shape == ((count + 7) // 8,)
        if not shape or values is None or mask is None or not fits or len(values.shape) != 1 or values.shape[0] > count:
            raise damaged(path, f"the sparse tensor {name!r} of {sides} without a mask that fits")
        dense += count * WIDEST
        if dense > reading_budget(values.stamp[0]):
            raise damaged(path, f"sparse tensors of {dense / 1e6:,.0f} MB in {values.stamp[0] / 1e6:,.0f} MB")
        kept[name] = replace(values, shape=shape, mask=mask)
    return kept


def with_scales(entries: Mapping[str, TensorEntry], notes: Mapping[str, str], path: Path) -> dict[str, TensorEntry]:
    """``entries`` with each scale attached to its weight, and without the tensors that only describe scales.

    Raises:
        UnsupportedError: weights in a format other than :data:`FORMATS`. CheckpointError: a scale without its weight,
            or one that is neither a number nor one number per row.
    """
    for name, kind in _formats(entries, notes, path).items():
        if kind not in FORMATS:
            raise UnsupportedError(
                f"the weight {name!r} of {str(path)!r} is stored as {kind}",
                expected=f"bf16, fp16, fp32, GGUF, or {', '.join(FORMATS)}",
                fix="Use another version of this file, such as bf16, scaled fp8 or GGUF.",
            )
    kept = {name: e for name, e in entries.items() if not name.endswith(ASIDE) and name.rpartition(".")[2] != MARK}
    for name in [name for name in kept if name.endswith(SCALES)]:
        owner, scale = name.rpartition(".")[0] + ".weight", kept.pop(name)
        weight = entries.get(owner)
        empty = weight is None or 0 in (len(weight.shape), math.prod(weight.shape))
        if weight is None or empty or not scale.is_floating or math.prod(scale.shape) not in (1, weight.shape[0]):
            raise CheckpointError(
                f"the scale {name!r} of {scale.shape} in {str(path)!r} fits no weight {owner!r}",
                expected="one number per weight, or one per row",
                fix="Download this file again, or use another version of it.",
            )
        kept[owner] = replace(weight, scale=scale) if weight.dtype in NARROW else weight
    missing = sorted(name for name, e in kept.items() if e.dtype == "I8" and not e.is_packed)
    if missing:
        raise CheckpointError(
            f"no scale for the 8-bit weight {missing[0]!r} in {str(path)!r}",
            expected="its weight_scale beside it",
            fix="Use another version of this file.",
        )
    return kept


def _formats(entries: Mapping[str, TensorEntry], notes: Mapping[str, str], path: Path) -> dict[str, str]:
    """The format that the file names for each of its layers, from its metadata or from a small tensor beside each."""
    formats: dict[str, str] = {}
    if "_quantization_metadata" in notes:
        layers = (json_object(notes["_quantization_metadata"]) or {}).get("layers")
        formats |= {name: _named(about) for name, about in layers.items()} if isinstance(layers, dict) else {}
    for name, entry in entries.items():
        if name.endswith(".comfy_quant") and entry.total_bytes < 4096:
            with path.open("rb") as file:
                file.seek(entry.start)
                formats[name.removesuffix(".comfy_quant")] = _named(json_object(file.read(entry.total_bytes)) or {})
    return formats


def _named(about: Any) -> str:
    """A format's name; one with a rotation before it is another format."""
    if not isinstance(about, dict):
        return "an unknown format"
    inner = about.get("params")
    rotated = about.get("convrot") or (isinstance(inner, dict) and inner.get("convrot"))
    return f"{about.get('format')}{' with convrot' if rotated else ''}"
