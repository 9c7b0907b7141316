"""A trained model as a diffusers folder."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import packing
import torch
from anygpu.compat.checkpoints.packed import StoredLinear, unpack
from anygpu.pipelines.demo import MODELS
from anygpu.pipelines.files.models import OF_DEMOS
from anygpu.pipelines.load.folder import load
from anygpu.pipelines.requests import LoadRequest
from torch import nn

FAST = ("T5Tokenizer", "LlamaTokenizer", "Qwen2Tokenizer")  # their class in an index is the one that reads one file


def shipped(name: str, parts: Iterable[str]) -> dict[str, nn.Module]:
    """These parts of a demo model as the pack ships them, in fp32 and to be trained on: plain layers, packed tables."""
    whole = load(LoadRequest(MODELS / name, precision="fp32", device="cpu")).parts
    for part in (chosen := {part: whole[part] for part in parts}).values():
        for module in part.modules():
            if isinstance(module, StoredLinear):
                unpack(module)
        for weight in part.train().parameters():
            weight.requires_grad_(weight.is_floating_point())
    return chosen


def write_folder(
    folder: Path,
    pipeline: str,
    parts: Mapping[str, Any],
    tokenizers: Mapping[str, Mapping[str, str]],
    defaults: Mapping[str, float],
    shared: Mapping[str, str] | None = None,
) -> None:
    """Write every part, packed, the tokenizers' files and ``model_index.json``; a model card there stays.

    Args:
        shared: parts that another demo model ships, whose files are not written again.
        defaults: what the model was trained for, which the load and sample nodes take where 0 is chosen.
    """
    import diffusers

    rows, shared = {}, shared or {}
    for name, part in parts.items():
        if isinstance(part, nn.Module):
            nn.Module.to(part, torch.bfloat16)
        if name not in shared:
            part.save_pretrained(folder / name)
        library = "transformers" if type(part).__module__.startswith("transformers") else "diffusers"
        rows[name] = [library, type(part).__name__.removesuffix("Pil")]  # so it is called where torchvision is missing
    for name, files in tokenizers.items():
        if name not in shared:
            (folder / name).mkdir(parents=True, exist_ok=True)
        for file, text in files.items() if name not in shared else ():
            (folder / name / file).write_text(text, encoding="utf-8", newline="\n")
        cls = json.loads(files["tokenizer_config.json"])["tokenizer_class"]
        rows[name] = ["transformers", f"{cls}Fast" if cls in FAST else cls]
    about: dict[str, Any] = {
        "_class_name": pipeline,
        "_diffusers_version": diffusers.__version__,
        "_anygpu_defaults": dict(defaults),
    }
    if shared:
        about[OF_DEMOS] = dict(sorted(shared.items()))
    index = json.dumps({**about, **dict(sorted(rows.items()))}, indent=2) + "\n"
    (folder / "model_index.json").write_text(index, encoding="utf-8", newline="\n")
    if folder.parent == MODELS:
        packing.write(folder.name)
