"""The five video families by id."""

from __future__ import annotations

from types import ModuleType

from ..compat.errors import InputError
from .families.framepack import pipeline as framepack
from .families.hunyuan_video import pipeline as hunyuan_video
from .families.hunyuan_video_15 import pipeline as hunyuan_video_15
from .families.ltx import pipeline as ltx
from .families.mochi import pipeline as mochi
from .family import Family

MODULES: dict[str, ModuleType] = {
    module.FAMILY.id: module for module in (ltx, hunyuan_video, hunyuan_video_15, framepack, mochi)
}
FAMILIES: dict[str, Family] = {name: module.FAMILY for name, module in MODULES.items()}


def family_named(family: str) -> ModuleType:
    """The module of a family.

    Raises:
        InputError: no such family.
    """
    if family not in MODULES:
        raise InputError(f"family {family!r}", expected=f"one of {', '.join(MODULES)}", fix="Load a supported model.")
    return MODULES[family]
