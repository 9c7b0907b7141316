"""Factors of the memory forecast; written by ``python benchmarks/memory_fits.py``."""

from __future__ import annotations

from ...family import Fit

FIT = Fit(
    tokens=12.25,
    latents=2.84,
    pixels=4.53,
    plain=5.6,
    text=4.31,
    streamed=13.29,
)
