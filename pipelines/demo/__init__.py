"""The demo models that ship with the pack: small, trained from nothing, of the real classes in the real folder layout.

They draw what ``scenes.py`` describes; each is a folder in ``models/`` with its card, ``loras/`` has LoRAs for them."""

from __future__ import annotations

import functools
from contextlib import suppress
from pathlib import Path

from ..files.models import family_of_folder, find_models
from ..pipeline import DEMO_LORAS as LORAS
from ..pipeline import DEMOS as MODELS

__all__ = ["LORAS", "MODELS", "demo_folder", "demo_loras", "demo_models"]


@functools.cache
def demo_models() -> dict[str, Path]:
    """The folder of each demo model by its choice, such as ``demo: LTX-Video (4 MB)``; the smallest family's first."""
    named = {}
    for folder in find_models([MODELS]):
        with suppress(OSError):  # nodes list their choices even where a demo cannot be read
            family = family_of_folder(folder)
            size = sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
            if family is not None and size:
                named[family.order] = f"demo: {family.title} ({round(size / 1e6)} MB)", folder
    return dict(named[order] for order in sorted(named))


def demo_folder(choice: str) -> Path | None:
    """The folder of a choice, whatever size in MB it names; None where the choice is no demo model."""
    folders = {known.rpartition(" (")[0]: folder for known, folder in demo_models().items()}
    return folders.get(choice.rpartition(" (")[0] or choice)


@functools.cache
def demo_loras() -> dict[str, Path]:
    """The file of each demo LoRA by its choice, such as ``demo: ltx_night``: the model it is for, and what it does."""
    return {f"demo: {file.stem}": file for file in sorted(LORAS.glob("*.safetensors"))}
