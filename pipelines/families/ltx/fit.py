"""Factors of the memory forecast; written by ``python benchmarks/memory_fits.py``."""

from __future__ import annotations

from ...family import Fit

FIT = Fit(
    tokens=13.47,
    latents=6.73,
    pixels=4.16,
    plain=6.2,
    text=4.34,
    streamed=9.25,
)
