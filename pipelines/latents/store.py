"""Saves and loads core's LATENT with all our metadata, without changing a bit. The tensor has the name that core's own
latent files use, so core reads ours (the tensor only) and we read core's."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import lt
from pathlib import Path
from typing import Any

import torch

from ...compat.checkpoints import latents
from ...compat.errors import CheckpointError, require_choice
from ..base import FINAL, LATENT_VERSION, RECEIPT
from ..settings import LARGEST_SIDE
from . import musubi
from .convert import CELLS, KEY, MORE, PLAIN, samples_of

LATENT, PROMPT = "latent", "prompt"
SAMPLES, MASK, CORE_VERSION = "latent_tensor", "noise_mask", "latent_format_version_0"
LISTED, NESTED = "listed", "nested"  # what a list shows of a plain LATENT; further latents beside its samples
DTYPES = ("float32", "as in file")  # what a loaded LATENT has; grows at the end
HEX = re.compile(r"(?:[0-9a-f]{2})*")
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
NUMBERS = ("frames", "height", "width", "seed", "version")
TEXTS = ("prompt", "negative", RECEIPT)  # in ``Latents.extra``, where it says what was prompted


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of a file's content."""

    metadata: Mapping[str, str] = field(default_factory=dict)  # ComfyUI's own JSON texts: ``prompt`` and ``workflow``
    record: Mapping[str, Any] = field(default_factory=dict)  # further plain values for our own record
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)  # further tensors, under names of their own
    texts: bool = True  # whether the file may say what was prompted


def save_latent(
    path: Path,
    latent: Mapping[str, Any],
    notify: Callable[[str], None],
    not_finite: str = "refuse",
    origin: Origin | None = None,
) -> Path:
    """Write a LATENT, from any device; returns ``path``. ``not_finite``: ``refuse``, or ``clamp`` with a note. Raises
    InputError for no video latents, or NaN and infinity in them, CheckpointError for a file that cannot be written."""
    origin = origin or Origin()
    samples = _finite(samples_of(latent), notify, not_finite)
    tensors = {SAMPLES: samples, CORE_VERSION: torch.tensor([]), **origin.tensors}
    if isinstance(latent.get(MASK), torch.Tensor):
        tensors[MASK] = latent[MASK]
    ours = dict(latent.get(KEY, {}))
    if not origin.texts and "extra" in ours:
        ours["extra"] = {name: each for name, each in ours["extra"].items() if name not in TEXTS}
    for name, tensor in ours.pop(MORE, {}).items():
        tensors[f"{MORE}.{name}"] = _finite(tensor, notify, not_finite)
    known = {"kind": LATENT, "shape": list(samples.shape), "dtype": latents.dtype_name(samples.dtype)}
    return latents.write_record(path, tensors, {**ours, **known, "saved": now(), **origin.record}, origin.metadata)


def save_plain(path: Path, samples: Sequence[torch.Tensor], listed: Mapping[str, Any]) -> Path:
    """Write the ``samples`` of a LATENT that none of our stages made, of any shape, from any device (more than one
    where it is nested, such as video and audio), and ``listed``, plain values for :func:`recovery.listing`; returns
    ``path``. Raises InputError for NaN and infinity, CheckpointError for a file that cannot be written."""
    names = [SAMPLES, *(f"{SAMPLES}.{index}" for index in range(1, len(samples)))]
    fix = "Sample again with precision fp32 or bf16."
    checked = [latents.finite(tensor, "latents", "refuse", fix)[0] for tensor in samples]
    tensors = {**dict(zip(names, checked, strict=True)), CORE_VERSION: torch.tensor([])}
    return latents.write_record(path, tensors, {"kind": LATENT, "saved": now(), LISTED: dict(listed)})


def load_latent(
    path: Path, notify: Callable[[str], None], not_finite: str = "refuse", dtype: str = DTYPES[0]
) -> dict[str, Any]:
    """The LATENT in a file of ours, of core's Save Latent, or of a Musubi Tuner latent cache, in fp32 or as stored
    (``dtype``). Raises CheckpointError for one that is damaged, changed while it was read, or has no latents;
    InputError for a newer version, or NaN and infinity where ``not_finite`` is ``refuse``."""
    require_choice("dtype", dtype, DTYPES, "Choose float32.")
    tensors, metadata = latents.read_record(path, "latents")
    if "architecture" in metadata and any(map(musubi.LATENTS.fullmatch, tensors)):
        latent = musubi.latent_of(path, tensors, metadata)
        notify(f"latents of Musubi Tuner, {latent[KEY]['family']}: training data, not sampled; seed 0")
    else:
        latent = _own(path, tensors, latents.record_in(metadata, path))
    values = [_finite(each, notify, not_finite) for each in (latent["samples"], *latent.get(NESTED, ()))]
    samples, *nested = [each.float() for each in values] if dtype == DTYPES[0] else values
    return {**latent, "samples": samples, **({NESTED: nested} if nested else {})}


def described(latent: Mapping[str, Any]) -> str:
    """A LATENT in one line: family, size, length, seed and shape of the tensor; a prompt stands on a second."""
    known, shape = latent.get(KEY, {}), "x".join(map(str, latent["samples"].shape))
    if not known:
        return f"latents {shape} of another node"
    words = [f"{known['family']}, {known['width']}x{known['height']}, {known['frames']} frames at {known['fps']:g} fps"]
    words += [f"seed {known['seed']}", f"latents {shape}"]
    text = str(known.get("extra", {}).get("prompt", ""))
    return ", ".join(words) + (f"\n{text}" if text else "")


def kind_of(path: Path) -> str:
    """``latent``, ``prompt``, or empty for a file that no load node takes; only the header is read."""
    try:
        metadata = latents.metadata_of(path)
        record = latents.record_in(metadata, path)
    except (CheckpointError, OSError):
        return ""
    if record:
        return str(record.get("kind", ""))
    return musubi.kind_in(metadata, path.name) or (LATENT if path.suffix == ".latent" else "")


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S")


def _finite(samples: torch.Tensor, notify: Callable[[str], None], choice: str) -> torch.Tensor:
    """``samples`` after :func:`latents.finite`, which raises or clamps by ``choice``; the user is told of a change."""
    samples, done = latents.finite(samples, "latents", choice)
    if done:
        notify(done)
    return samples


def _own(path: Path, tensors: Mapping[str, torch.Tensor], record: Mapping[str, Any]) -> dict[str, Any]:
    """The LATENT in a file of ours, or of core's, which has no ``record``; raises as :func:`load_latent`."""
    samples = tensors.get(SAMPLES)
    if samples is None or record.get("kind", LATENT) != LATENT:
        found = f"{record.get('kind', 'no latents')!r} in {str(path)!r}"
        fix = "Choose a file written by AnyGPU Save Latent, core's Save Latent or Musubi Tuner."
        raise CheckpointError(found, expected=f"a file of latents, with a tensor {SAMPLES!r}", fix=fix)
    if samples.dtype not in FLOATS:
        found = f"latents of {latents.dtype_name(samples.dtype)} in {str(path)!r}"
        expected = ", ".join(map(latents.dtype_name, FLOATS))
        raise CheckpointError(found, expected=expected, fix="Save them again as float32.")
    if not record and CORE_VERSION not in tensors:
        samples = samples.float() / 0.18215  # as core's Load Latent; before May 2023 its Save Latent wrote SD's scaled
    latent: dict[str, Any] = {"samples": samples}
    if MASK in tensors:
        latent[MASK] = tensors[MASK]
    nested = sorted((name for name in tensors if name.startswith(f"{SAMPLES}.")), key=lambda name: (len(name), name))
    if nested:
        latent[NESTED] = [tensors[name] for name in nested]
    if "family" in record:
        latent[KEY] = _checked(path, samples, record)
        more = {name.removeprefix(f"{MORE}."): t for name, t in tensors.items() if name.startswith(f"{MORE}.")}
        latent[KEY] |= {MORE: more} if more else {}
    return latent


def _checked(path: Path, samples: torch.Tensor, record: Mapping[str, Any]) -> dict[str, Any]:
    """The values that our nodes carry along, from a file's record that may have been edited. Raises CheckpointError for
    one that no node of ours writes, InputError for a newer version."""
    latents.require_version(path, record, "latents", LATENT_VERSION)
    fps: Any = record.get("fps")
    right = {name: name in record for name in PLAIN}
    right |= {name: type(record[name]) is int for name in NUMBERS if name in record}
    right |= {name: isinstance(record.get(name), str) for name in ("family", "task", "space")}
    right["fps"] = type(fps) in (int, float) and 0 <= fps <= sys.float_info.max  # of any size as an int in JSON
    right |= {"shape": record.get("shape") == list(samples.shape), "extra": _is_extra(record.get("extra", {}))}
    cells = record.get(CELLS, list(samples.shape[-3:]))  # earlier versions wrote none
    right[CELLS] = isinstance(cells, list) and [type(cell) for cell in cells] == [int] * 3
    wrong = [name for name, is_right in right.items() if not is_right]
    if wrong:
        found = f"the record of {str(path)!r} is wrong about {', '.join(wrong)}"
        fix = "Save the latents again; this file was edited or made by hand."
        raise CheckpointError(found, expected=f"what belongs to a tensor {tuple(samples.shape)}", fix=fix)
    return {**{name: record[name] for name in PLAIN}, "extra": dict(record.get("extra", {})), CELLS: cells}


def _is_extra(extra: Any) -> bool:
    """True if every entry of a record's ``extra`` that we compute with has a type and range that our stages write."""
    if not isinstance(extra, dict):
        return False
    lengths, state = extra.get("section_lengths", []), extra.get("generator_state", "")
    window, dropped = extra.get("window", 0), extra.get("drop_frames", 0)
    whole = isinstance(lengths, list) and all(type(number) is int for number in (window, dropped, *lengths))
    whole = whole and all(map(lt, [0, *lengths], lengths)) and (not lengths or 0 < window <= LARGEST_SIDE)
    first, toned = extra.get("first_size", [1, 1]), extra.get("tone_map", 0.0)
    sides = [*(extra.get(name, LARGEST_SIDE) for name in FINAL), *(first if isinstance(first, list) else [])]
    sizes = len(sides) == len(FINAL) + 2 and all(type(side) is int and 0 < side <= LARGEST_SIDE for side in sides)
    toned = isinstance(toned, (int, float)) and 0 <= toned <= 1
    return whole and sizes and toned and isinstance(state, str) and HEX.fullmatch(state) is not None
