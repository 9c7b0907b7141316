"""Sizes a family can make: the one place where width, height and frame count are rounded."""

from __future__ import annotations

from dataclasses import dataclass

from ..compat.errors import InputError
from .family import FamilySpec

SMALLEST_SIDE, LARGEST_SIDE, MOST_FRAMES, MOST_STEPS = 32, 4096, 4097, 1000


@dataclass(frozen=True, slots=True)
class Size:
    """Width, height and frames on the family's grid, and what was changed, in words (empty when nothing was)."""

    width: int
    height: int
    frames: int
    said: str = ""


def snap(family: FamilySpec, width: int, height: int, frames: int) -> Size:
    """The nearest size that the family can make; frames go up, never down, and a side at least to 32 pixels.

    Args:
        width, height: pixels; 0 means the family's default. frames: pixel frames; 0 means the default.

    Raises:
        InputError: a side or the frame count is out of range, with the nearest valid values.
    """
    width, height = width or family.defaults.width, height or family.defaults.height
    frames = frames or family.defaults.frames
    smallest = _up(SMALLEST_SIDE, family.multiple)
    for name, side in (("width", width), ("height", height)):
        nearest = _nearest(min(max(side, smallest), LARGEST_SIDE), family.multiple)
        require_range(name, side, 1, LARGEST_SIDE, "pixels", nearest)
    require_range("frames", frames, 1, MOST_FRAMES, "frames")
    across, down = (max(smallest, _nearest(side, family.multiple)) for side in (width, height))
    snapped = across, down, snap_frames(family, frames)
    changes = [
        f"{name} {asked} -> {got}"
        for name, asked, got in zip(("width", "height", "frames"), (width, height, frames), snapped, strict=True)
        if asked != got
    ]
    grid = f"{family.title} needs multiples of {family.multiple} pixels and {family.stride}n+1 frames"
    return Size(*snapped, f"{', '.join(changes)} ({grid})" if changes else "")


def snap_frames(family: FamilySpec, frames: int) -> int:
    """The smallest frame count of the form ``stride * n + 1`` that is not less than ``frames``."""
    return _up(frames - 1, family.stride) + 1


def check_steps(family: FamilySpec, steps: int) -> int:
    """``steps``, or the family's default for 0.

    Raises:
        InputError: fewer than the family allows, or more than 1000.
    """
    steps = steps or family.defaults.steps
    require_range("steps", steps, family.min_steps, MOST_STEPS, f"steps for {family.title}")
    return steps


def require_range(
    name: str, value: float, low: float, high: float, unit: str = "", nearest: int | None = None, advice: str = ""
) -> None:
    """Raise where ``value`` is not in ``low`` to ``high``, with the ``nearest`` valid value and ``advice``."""
    if not low <= value <= high:
        valid = min(max(value, low), high) if nearest is None else nearest
        fix = f"The nearest valid value is {valid:g}{advice}."
        raise InputError(f"{name} {value}", expected=f"{low} to {high} {unit}".strip(), fix=fix)


def _nearest(value: int, multiple: int) -> int:
    return max(multiple, (value + multiple // 2) // multiple * multiple)


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
