"""Factors of the memory forecast; written by ``python benchmarks/memory_fits.py``."""

from __future__ import annotations

from ...family import Fit

FIT = Fit(
    tokens=8.33,
    latents=2.27,
    pixels=6.01,
    plain=0.0,
    text=3.42,
    streamed=13.18,
    chunked=1.27,
)
