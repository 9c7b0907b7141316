"""Checks whether pictures, latents and weights can be right: finite, not empty, not a single colour."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .errors import InputError

BROKEN, COLOUR, ZEROS, CONSTANT = "NaN or infinite values", "one colour", "nothing but zeros", "one value everywhere"
FRAME, REGION = "a frame of one colour", "a region of one colour"
SATURATED, ENDS = "values far outside those of a picture", "half of the values at the ends of their range"
FINEST = 16  # cells per side into which a frame is divided, at least
DEAD = 1 / 16  # share of a frame's cells in one colour from which on they are a fault where latents vary
RANGE, FAR, HALF = 4.0, 0.01, 0.5  # decoders end near -1..1; the share that may lie beyond; that may be at the ends
SAMPLES = 4096  # values of a weight that are looked at, at even steps
CAST = "values that this device changes when casting to fp32 or back"
Validator = Callable[[torch.Tensor], str]


class InvalidOutputError(Exception):
    """Raised for a result that cannot be right; the text is one of the faults above."""


class NotFinite(InputError):
    """Values that are NaN or infinite."""


FIX = "Choose precision fp32 (or bf16 if the device supports it) on the load node"
FIX += "; if it is fp32 already, use the default settings, and no LoRA."


def require_finite(tensor: torch.Tensor, subject: str, fix: str = FIX) -> None:
    """Raise NotFinite, naming the ``subject``, where any value of ``tensor`` is NaN or infinite."""
    if broken := int((~torch.isfinite(tensor)).sum()):
        found = f"{broken} of {tensor.numel()} values of the {subject} are NaN or infinite"
        raise NotFinite(found, expected="finite values", fix=fix)


def fault_in_frames(video: torch.Tensor, cell: int = 1, latents: torch.Tensor | None = None) -> str:
    """The fault of decoded frames (B, C, F, H, W), on any device; empty for none. A decoder that lost its input repeats
    one pattern exactly in all cells of ``cell`` x ``cell`` pixels, a latent's size: :data:`COLOUR`. ``latents`` (B, C,
    T, H / cell, W / cell) reveal frames and regions of one colour and saturation, too, if cells divide the frame.
    A right picture may, rarely, have any fault but :data:`BROKEN`: decode in another way and compare."""
    rows, columns = video.shape[-2:]
    if rows % cell or columns % cell or rows * columns == cell * cell:
        return BROKEN if not bool(video.isfinite().all()) else COLOUR if is_flat(video) else ""
    parts = max(1, FINEST // min(rows // cell, columns // cell))  # per side, into which a cell is divided
    fine = cell // parts if latents is not None and cell % parts == 0 else cell
    cells = video.unflatten(-1, (columns // fine, fine)).unflatten(-3, (rows // fine, fine))
    low, high = cells.amin((-3, -1)), cells.amax((-3, -1))
    least, most = low.amin(), high.amax()
    if not bool((least.isfinite() & most.isfinite()).all()):
        return BROKEN
    if all(bool((each.amin((-2, -1)) == each.amax((-2, -1))).all()) for each in (low, high)):
        cells = video.unflatten(-1, (columns // cell, cell)).unflatten(-3, (rows // cell, cell))
        if bool((cells.amin((-4, -2)) == cells.amax((-4, -2))).all()):
            return COLOUR
    if latents is None:
        return ""
    share = float(dead_cells(torch.cat((low, high), 1), latents).float().mean((-2, -1)).amax())
    return _saturated(video, low, high) or (FRAME if share > 1 - DEAD else REGION if share >= DEAD else "")


def dead_cells(video: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
    """The cells of ``video`` (B, C, F, H, W), a value each, that equal a neighbour where latents vary: (B, F, H, W)."""
    per_latent, fewer = latent_step(video.shape[2], latents.shape[2])
    index = ((torch.arange(video.shape[2]) + fewer) // per_latent).clamp(max=latents.shape[2] - 1)
    parts = video.shape[-1] // latents.shape[-1]
    varied = ~_repeated(latents.to(video.device))[:, index.to(video.device)]
    return _repeated(video) & varied.repeat_interleave(parts, -1).repeat_interleave(parts, -2)


def latent_step(frames: int, count: int) -> tuple[int, int]:
    """The pixel frames per latent frame, and how many fewer the first of ``count`` has: in causal VAEs, else 0."""
    if count > 1 and (frames - 1) % (count - 1) == 0:
        return max(1, (frames - 1) // (count - 1)), max(1, (frames - 1) // (count - 1)) - 1
    return max(1, frames // count), 0


def _repeated(grid: torch.Tensor) -> torch.Tensor:
    """The cells of (B, C, F, H, W) that equal a neighbour in all channels: (B, F, H, W)."""
    found = torch.zeros_like(grid[:, 0], dtype=torch.bool)
    for axis in (-2, -1):  # of two that are equal, both
        same = (grid.narrow(axis, 1, grid.shape[axis] - 1) == grid.narrow(axis, 0, grid.shape[axis] - 1)).all(1)
        for start in (0, 1):
            found.narrow(axis, start, grid.shape[axis] - 1).logical_or_(same)
    return found


def _saturated(video: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> str:
    """The fault of frames (B, C, F, H, W) that leave a decoder's range, or half of whose values are at its ends; empty
    for none. ``low`` and ``high``, the extremes of each cell, tell first, as they are fewer."""
    far = torch.maximum(high, -low) > RANGE
    if float(far.float().mean()) > FAR and float((video.abs() > RANGE).float().mean()) > FAR:
        return SATURATED
    least, most = low.amin(), high.amax()
    if least >= 0 and most <= 1:  # a decoder that clamps to 0..1, where half of a right picture may well be black
        return ""
    ends = float(((low == least) | (high == most)).float().mean())
    return ENDS if ends > HALF and float(((video == least) | (video == most)).float().mean()) > HALF else ""


def fault_in_latents(latents: torch.Tensor) -> str:
    """The fault of encoded latents (B, C, T, H, W), on any device; none if channels are flat, as for a plain wall."""
    if not bool(latents.isfinite().all()):
        return BROKEN
    low, high = latents.amin(), latents.amax()
    return "" if bool(low != high) else CONSTANT if bool(low) else ZEROS


def is_flat(tensor: torch.Tensor) -> bool:
    """True if every channel of (B, C, ...) is one value."""
    rows = tensor.flatten(2)
    return bool((rows.amin(-1) == rows.amax(-1)).all())


def fault_in_weight(name: str, tensor: torch.Tensor) -> str:
    """The fault of the weight ``name`` just read, on the host; empty for none.
    Some thousand values are checked, and all where these are zeros; a bias or a norm may be zero throughout."""
    if not tensor.is_floating_point() or not tensor.numel():
        return ""
    some = tensor.reshape(-1)[:: tensor.numel() // SAMPLES | 1].float()  # odd: through all columns; 8 bits have no ops
    if not bool(some.isfinite().all()):
        return BROKEN
    matrix = tensor.ndim > 1 and tensor.numel() > 1 and name.endswith("weight")
    if not matrix or bool(some.any()):
        return ""
    bits = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor  # float8 has no any()
    return "" if bool(bits.any()) else ZEROS
