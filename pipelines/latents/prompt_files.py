"""Encoded prompts as files, so that a machine on which no text encoder fits can still sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ...compat.checkpoints.latents import finite, read_record, record_in, require_version, write_record
from ...compat.errors import CheckpointError
from ..base import Prompt
from ..registry import FAMILIES
from . import musubi
from .store import PROMPT, Origin, now

PROMPT_VERSION = 1
EMBEDS, NEGATIVE, SECTION = "embeds", "negative", "section"
AGAIN = "Encode the text again with precision fp32 or bf16."
TEXTS = ("text", "negative_text")


def save_prompt(path: Path, prompt: Prompt, origin: Origin | None = None) -> Path:
    """Write a prompt with its negative and section prompts; returns ``path``. InputError for NaN or infinity."""
    origin = origin or Origin()
    tensors = _named(EMBEDS, prompt.embeds) | _named(NEGATIVE, prompt.negative or {})
    for index, section in enumerate(prompt.sections):
        tensors |= _named(f"{SECTION}.{index}", section)
    for name, tensor in tensors.items():
        finite(tensor, f"prompt ({name})", "refuse", AGAIN)
    texts = {name: str(prompt.extra.get(name, "")) if origin.texts else "" for name in TEXTS}
    known = {"kind": PROMPT, "version": PROMPT_VERSION, "family": prompt.family, "opposed": prompt.has_negative}
    known |= {"sections": len(prompt.sections), "saved": now()}
    return write_record(path, tensors, {**known, **texts, **origin.record}, origin.metadata)


def load_prompt(path: Path, notify: Callable[[str], None]) -> Prompt:
    """The prompt in a file of ours or in a Musubi Tuner text cache, on the CPU. Raises CheckpointError for one that is
    damaged, changed meanwhile, or has no prompt, InputError for a newer version, or NaN and infinity."""
    tensors, metadata = read_record(path, "a prompt")
    if metadata.keys() >= {"architecture", "caption1"}:
        prompt = musubi.prompt_of(path, tensors, metadata)
        notify(f"embeddings of Musubi Tuner, {prompt.family}, without a negative prompt")
    else:
        prompt = _own(path, tensors, record_in(metadata, path))
    groups = (prompt.embeds, prompt.negative or {}, *prompt.sections)
    for name, tensor in (item for group in groups for item in group.items()):
        finite(tensor, f"prompt ({name})", "refuse", AGAIN)
    return prompt


def _named(group: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"{group}.{name}": tensor for name, tensor in tensors.items()}


def _group(group: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors that :func:`_named` gave the name of their ``group``, by their own names."""
    return {name.removeprefix(f"{group}."): t for name, t in tensors.items() if name.startswith(f"{group}.")}


def _own(path: Path, tensors: Mapping[str, torch.Tensor], record: Mapping[str, Any]) -> Prompt:
    """The prompt in a file of ours, whose record may have been edited; raises as :func:`load_prompt`."""
    if record.get("kind") != PROMPT or str(record.get("family")) not in FAMILIES:
        found = f"{record.get('kind', 'no prompt')!r} in {str(path)!r}"
        fix = "Choose a file written by AnyGPU Save Prompt or Musubi Tuner."
        raise CheckpointError(found, expected="an encoded prompt of a video family", fix=fix)
    require_version(path, record, "a prompt", PROMPT_VERSION)
    embeds, negative, count = _group(EMBEDS, tensors), _group(NEGATIVE, tensors), record.get("sections", 0)
    counted = type(count) is int and 0 <= count <= len(tensors)
    sections = [_group(f"{SECTION}.{index}", tensors) for index in range(count if counted else 0)]
    wrong = [] if embeds else [EMBEDS]
    wrong += [] if counted else ["number of sections"]
    wrong += [f"{SECTION}.{index}" for index, section in enumerate(sections) if not section]
    wrong += [name for name, tensor in tensors.items() if tensor.ndim < 2 or len(tensor) != 1]
    if wrong:
        found = f"the prompt in {str(path)!r} has no usable {wrong[0]}"
        fix = "Save the prompt again; this file was edited or made by hand."
        raise CheckpointError(found, expected="tensors (1, N, D) for the prompt and each section", fix=fix)
    texts = {name: str(record.get(name, "")) for name in TEXTS}
    opposed = bool(record.get("opposed"))
    return Prompt(record["family"], embeds, negative or None, tuple(sections), has_negative=opposed, extra=texts)
