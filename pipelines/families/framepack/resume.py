"""The key by which an interrupted sampling is found again: what must be the same to resume it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch

from ....compat.precision import Precision
from ...base import FramePackSettings, ImageCondition, Pipeline, Prompt, SampleSettings

STORED = (".safetensors", ".gguf", ".bin", ".json")


def resume_key(
    pipeline: Pipeline, prompt: Prompt, image: ImageCondition, settings: SampleSettings, framepack: FramePackSettings
) -> str:
    """A hash of all that decides the latents: model files and how they are kept, precision, LoRAs, step cache,
    embeddings, pictures and settings.

    How parts are moved and which attention kernel runs are left out: who ran out of memory changes just these.
    """
    digest = hashlib.sha256()
    adapted = str(pipeline.offloader.adapters or "")
    kinds = {field.name: getattr(pipeline.precision, field.name) for field in fields(Precision) if field.name != "why"}
    stored = pipeline.storage.get("transformer", "")
    model = [pipeline.family, pipeline.variant, kinds, stored, adapted, pipeline.step_cache]
    for item in _plain([*model, _files(pipeline.source)]):
        digest.update(item)
    for item in _plain([prompt.embeds, prompt.negative, prompt.sections, image, settings, framepack]):
        digest.update(item)
    return digest.hexdigest()


def _files(source: Path) -> list[tuple[str, int, int]]:
    """Name, size and time of each file of a model; a file beside others is its own model."""
    found = sorted(source.rglob("*")) if source.is_dir() else [source]
    return [
        (str(path), path.stat().st_size, path.stat().st_mtime_ns)
        for path in found
        if path.suffix in STORED and path.is_file()
    ]


def _plain(value: Any) -> Iterator[bytes]:
    """The bytes of nested values: names, numbers and every bit of every tensor."""
    if isinstance(value, torch.Tensor):
        yield f"{value.dtype}{tuple(value.shape)}".encode()
        yield value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    elif isinstance(value, Mapping):
        for key in sorted(value):
            yield f"<{key}>".encode()
            yield from _plain(value[key])
    elif is_dataclass(value) and not isinstance(value, type):
        yield from _plain({item.name: getattr(value, item.name) for item in fields(value)})
    elif isinstance(value, (list, tuple)):
        yield f"[{len(value)}]".encode()
        for item in value:
            yield from _plain(item)
    else:
        yield f"{json.dumps(value, default=str)};".encode()
