"""A window of a decode, which the CPU in fp32 decodes too: proof for the rest of the frames, in seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...compat.device.execution import to_host
from ...compat.output_check import BROKEN, dead_cells, fault_in_frames, latent_step

CONTEXT_LATENTS, SIDE = 2, 16  # latent frames of context around the compared one; rows and columns of a window
SAME = 1e-3  # root mean square of the difference of pictures in 0..1 that count as equal
NEAR, CONTEXT = 5e-2, 0.3  # relative L2 of one window by two devices, and of a window alone and in its picture


@dataclass(frozen=True)
class ProofWindow:
    """A small window of the latents of a decode, to be decoded alone and compared with the same part of all frames."""

    whole: Tensor  # latents (B, C, T, H, W)
    flat: bool  # whether the VAE decodes pictures, not videos
    batch: int  # this and the next three are the index of the latent in the middle
    frame: int
    row: int
    column: int

    @classmethod
    def of(cls, vae: Any, given: Tensor, frames: Tensor | None = None) -> ProofWindow:
        """The window at the middle of ``given`` latents, or where their decoded ``frames`` have most dead cells."""
        latents = latents_of(vae, given)
        place = [0, 0, latents.shape[-2] // 2, latents.shape[-1] // 2]
        if frames is not None:
            dead = dead_cells(_cells(_video(frames), frames.shape[-2] // latents.shape[-1]), latents)
            place[:2] = divmod(int(dead.float().mean((-2, -1)).argmax()), dead.shape[1])
            where = dead[place[0], place[1]].nonzero()
            place[2:] = to_host(where[len(where) // 2]).tolist() if len(where) else place[2:]
            every, less = latent_step(dead.shape[1], latents.shape[2])
            place[1] = min(latents.shape[2] - 1, (place[1] + less) // every)
        return cls(latents, vae.latent_dim == 2, *place)

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """(begin, end) of the window in latent frames, rows and columns."""
        first, last = self.frame - CONTEXT_LATENTS, max(1, self.frame) + 1 + CONTEXT_LATENTS
        spans = [(max(0, first), min(self.whole.shape[2], last))]
        for size, middle in zip(self.whole.shape[3:], (self.row, self.column), strict=True):
            begin = max(0, min(middle - SIDE // 2, size - SIDE))
            spans.append((begin, min(size, begin + SIDE)))
        return tuple(spans)

    @property
    def latents(self) -> Tensor:
        return self.whole[(slice(self.batch, self.batch + 1), slice(None), *(slice(*span) for span in self.spans))]

    def cut(self) -> Tensor:
        return self.latents[:, :, 0] if self.flat else self.latents

    def inner(self, frames: Tensor) -> Tensor:
        """``frames``, decoded from the window alone, without their context: the part to compare."""
        video, ((first, last), _, (left, right)) = frames if frames.ndim == 5 else frames.unsqueeze(1), self.spans
        every, _ = latent_step(video.shape[1], last - first)
        return self._without_context(video, every, cell=video.shape[3] // (right - left))

    def frames_of(self, frames: Tensor) -> Tensor:
        """The part of ``frames``, of the whole decode, that shows the same as :meth:`inner`."""
        video = frames if frames.ndim == 5 else frames.unsqueeze(1)
        every, less = latent_step(video.shape[1], self.whole.shape[2])
        cell, ((first, last), *sides) = video.shape[3] // self.whole.shape[4], self.spans
        begin = max(0, first * every - less)
        rows, columns = (slice(start * cell, end * cell) for start, end in sides)
        cut = video[self.batch : self.batch + 1, begin : last * every - less, rows, columns]
        return self._without_context(cut, every, cell)

    def _without_context(self, video: Tensor, every: int, cell: int) -> Tensor:
        """``video`` of the window, ``every`` frames and ``cell`` pixels to a latent, less margins but at the edges."""
        (first, last), *sides = self.spans
        if first:  # frames that have some before them
            video = video[:, -every * (last - first - CONTEXT_LATENTS) :]
        if last < self.whole.shape[2]:  # and after them: not every decoder is causal
            video = video[:, : -every * CONTEXT_LATENTS]
        for axis, (begin, end) in enumerate(sides, 2):
            margin, size = (end - begin) // 4 * cell, self.whole.shape[axis + 1]
            low, high = margin * (begin > 0), video.shape[axis] - margin * (end < size)
            video = video.narrow(axis, low, high - low)
        return video


def fault_in_pictures(vae: Any, frames: Tensor, latents: Tensor) -> str:
    """The fault of frames (B, H, W, 3) or (B, F, H, W, 3) in 0..1 from ``latents``; of other shapes only NaN or inf."""
    if frames.ndim not in (4, 5) or latents.ndim < 4:
        return "" if bool(frames.isfinite().all()) else BROKEN
    return fault_in_frames(_video(frames) * 2 - 1, frames.shape[-2] // latents.shape[-1], latents_of(vae, latents))


def latents_of(vae: Any, given: Tensor) -> Tensor:
    return given.unsqueeze(2) if given.ndim == 4 else given[:, :, :1] if vae.latent_dim == 2 else given


def _video(frames: Tensor) -> Tensor:
    return (frames if frames.ndim == 5 else frames.unsqueeze(1)).movedim(-1, 1)


def _cells(video: Tensor, cell: int) -> Tensor:
    """The least, then the largest values of (B, C, F, H, W) in squares of ``cell`` pixels: (B, 2C, F, h, w)."""
    rows, columns = (size // cell for size in video.shape[-2:])
    cells = video.unflatten(-1, (columns, cell)).unflatten(-3, (rows, cell))
    return torch.cat((cells.amin((-3, -1)), cells.amax((-3, -1))), 1)


def agree(frames: Tensor, others: Tensor, dtype: torch.dtype) -> bool:
    """True if pictures in 0..1 are the same but for the rounding of ``dtype``."""
    error = (to_host(frames).float() - to_host(others).float()).square().mean().sqrt()
    return bool(error <= max(SAME, torch.finfo(dtype).eps))


def apart(frames: Tensor, others: Tensor, least: float = 1e-6) -> float:
    """The L2 distance of ``frames`` from ``others``, relative to those, or to a picture of the value ``least``."""
    here, there = to_host(frames).float(), to_host(others).float()
    return float((here - there).norm() / there.norm().clamp(min=least * there.numel() ** 0.5))
