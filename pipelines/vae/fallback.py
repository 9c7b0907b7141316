"""The ladder of a VAE pass that failed: what is tried next, and when nothing is left to try."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ...compat.errors import PackError
from ...compat.output_check import UnsoundError
from ...compat.precision import DTYPES

MEMORY, KERNEL, VALUES = "memory", "kernel", "values"
NO_ROOM = ("out of memory", "can't allocate memory", "not enough memory", "could not allocate")
MISTAKES = ("same device", "should be the same")  # of ours: another dtype or device would only hide them


@dataclass(frozen=True, slots=True)
class Attempt:
    """One way to run a VAE.

    Args:
        dtype: of its weights and activations. tile: pixels, 0 for whole. on_host: on the CPU instead of the device.
        library: whether torch's convolution library (cuDNN, MIOpen) may be used.
        frames: latent frames per call of a causal decoder, 0 for all; exact. overlap: pixels of a tile that blend into
            the next one; -1 for a quarter. stream: pixels of the tiles in which each layer runs by itself, with the
            rest of its activations in host memory; exact; 0 for all layers at once.
    """

    dtype: torch.dtype
    tile: int = 0
    on_host: bool = False
    library: bool = True
    frames: int = 0
    overlap: int = -1
    stream: int = 0

    def __str__(self) -> str:
        forms = [f"in tiles of {self.tile} pixels"] * (self.tile > 0)
        forms += [f"in chunks of {self.frames} latent frame{'s' * (self.frames > 1)}"] * (self.frames > 0)
        forms += [f"layer by layer over {self.stream} pixels"] * (self.stream > 0)
        shape = ", ".join(forms) or "whole"
        name = next((name for name, dtype in DTYPES.items() if dtype is self.dtype), str(self.dtype))
        where = " on the CPU, which is slow" if self.on_host else "" if self.library else " without MIOpen"
        return f"{shape} in {name}{where}"


@dataclass(frozen=True, slots=True)
class Allowed:
    """What may be changed without breaking a choice that the user made.

    Args:
        dtype: to fp32. host: onto the CPU, there in tiles of ``host_tile`` pixels, 0 for whole.
        tiles: the sizes that may be used, in pixels, falling. chunks: latent frames per call, falling; streams: pixels
            of a layer's tile, falling; empty where the decoder can do neither, or where the user chose otherwise.
    """

    dtype: bool
    host: bool
    tiles: tuple[int, ...]
    host_tile: int = 0
    chunks: tuple[int, ...] = ()
    streams: tuple[int, ...] = ()


def kind_of(error: BaseException) -> str:
    """What a failure was about: memory, a kernel, or values; empty for one that no other attempt can cure."""
    text = str(error).lower()
    if isinstance(error, UnsoundError):
        return VALUES
    if isinstance(error, PackError) or not isinstance(error, (RuntimeError, TypeError)):
        return ""
    if isinstance(error, torch.OutOfMemoryError) or any(words in text for words in NO_ROOM):
        return MEMORY
    if isinstance(error, TypeError):  # what MPS raises for a dtype it lacks
        return KERNEL if "float64" in text or "backend" in text else ""
    return "" if any(words in text for words in MISTAKES) else KERNEL


def following(attempt: Attempt, kind: str, text: str, allowed: Allowed) -> Attempt | None:
    """What to try after ``attempt`` failed; None when nothing allowed is left.

    Each attempt is wider, smaller or nearer than the one before, so the ladder ends: chunks of time, which are exact,
    tiles, layer by layer, which is exact and slow, and the CPU.
    """
    if attempt.on_host:
        return None
    if kind == KERNEL and attempt.library and "miopen" in text.lower():
        return replace(attempt, library=False)
    if kind != MEMORY and allowed.dtype and attempt.dtype is not torch.float32:
        return replace(attempt, dtype=torch.float32)
    if kind == MEMORY and not attempt.stream:
        shorter = [count for count in allowed.chunks if not attempt.frames or count < attempt.frames]
        if shorter:  # exact, so before tiles
            return replace(attempt, frames=shorter[0])
    smaller = [tile for tile in allowed.tiles if not attempt.tile or tile < attempt.tile]
    if smaller and not attempt.stream:
        return replace(attempt, tile=smaller[0])
    finer = [side for side in allowed.streams if not attempt.stream or side < attempt.stream]
    if finer and kind == MEMORY:
        return replace(attempt, tile=0, stream=finer[0])
    return Attempt(torch.float32, allowed.host_tile, on_host=True) if allowed.host else None
