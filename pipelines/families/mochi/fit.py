"""Factors of the memory forecast; written by ``python benchmarks/memory_fits.py``."""

from __future__ import annotations

from ...family import Fit

FIT = Fit(
    tokens=16.88,
    latents=3.16,
    pixels=4.15,
    plain=0.0,
    text=4.31,
    streamed=6.82,
    chunked=1.46,
)
