"""Faults of frames over their latents: those that are finite too, and none where the latents say so."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from anygpu.compat.output_check import BROKEN, COLOUR, ENDS, FRAME, REGION, SATURATED, fault_in_frames, fault_in_weight

CELL, FRAMES = 8, 9  # three latent frames: one frame, then four each


def part(rows: slice, columns: slice, frames: slice = slice(None), value: float = 0.3) -> Callable[..., torch.Tensor]:
    """Frames of one value in a part of them."""

    def act(video: torch.Tensor, _latents: torch.Tensor) -> torch.Tensor:
        video[:, :, frames, rows, columns] = value
        return video

    return act


ALL = slice(None)
FAULTS: dict[str, tuple[Callable[..., torch.Tensor], str]] = {
    "none": (lambda video, _: video, ""),
    "nothing": (part(ALL, ALL), COLOUR),
    "NaN": (part(slice(1), slice(1), value=float("nan")), BROKEN),
    "all but the first": (part(ALL, ALL, slice(1, None)), FRAME),
    "one frame": (part(ALL, ALL, slice(6, 7)), FRAME),
    "a half": (part(ALL, slice(32, None)), REGION),
    "a sixteenth": (part(slice(16), slice(16), slice(4, 5)), REGION),
    "a band": (part(slice(4), ALL, slice(4, 5)), REGION),
    "less": (part(slice(8), slice(16)), ""),
    "far": (lambda video, _: video * 1e6, SATURATED),
    "clamped": (lambda video, _: (video * 1e6).clamp(-1, 1), ENDS),
    "clamped by the decoder": (lambda video, _: (video * 0.3 - 0.1).clamp(0, 1), ""),
    "flat latents": (lambda video, latents: part(ALL, slice(32, None))(video, latents[..., 4:].zero_()), ""),
    "a flat latent frame": (lambda video, latents: part(ALL, ALL, slice(5, 9))(video, latents[:, :, 2].zero_()), ""),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_faults_of_frames_over_latents(fault: str, dtype: torch.dtype) -> None:
    spoil, expected = FAULTS[fault]
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(1, 4, 3, 8, 8, generator=generator)
    video = torch.randn(1, 3, FRAMES, 64, 64, generator=generator).clamp(-3, 3)
    assert fault_in_frames(spoil(video, latents).to(dtype), CELL, latents) == (
        BROKEN if fault == "far" and dtype is torch.float16 else expected
    )


@pytest.mark.parametrize("rows, columns", [(4096, 4096), (4096, 1024), (1280, 3072), (64, 64)])
def test_a_column_of_infinite_values_is_seen_in_any_place(rows: int, columns: int) -> None:
    for column in (0, 1, columns // 2, columns - 1):
        weight = torch.ones(rows, columns, dtype=torch.float16)
        weight[:, column] = torch.inf
        assert fault_in_weight("a.weight", weight) == BROKEN, column
