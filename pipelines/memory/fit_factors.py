"""Factors of the forecasts, as `estimates.Fit` names them; by ``python benchmarks/memory_fits.py``."""

from __future__ import annotations

FACTORS: dict[str, dict[str, float]] = {
    "framepack": {
        "tokens": 13.18,
        "latents": 1.13,
        "pixels": 4.53,
        "plain": 5.6,
        "text": 4.31,
        "streamed": 13.29,
    },
    "hunyuan_video": {
        "tokens": 12.25,
        "latents": 2.84,
        "pixels": 4.53,
        "plain": 5.6,
        "text": 4.31,
        "streamed": 13.29,
    },
    "hunyuan_video_15": {
        "tokens": 8.33,
        "latents": 2.27,
        "pixels": 6.01,
        "plain": 0.0,
        "text": 3.42,
        "streamed": 13.18,
        "chunked": 1.27,
    },
    "ltx": {
        "tokens": 13.47,
        "latents": 6.73,
        "pixels": 4.16,
        "plain": 6.2,
        "text": 4.34,
        "streamed": 9.25,
    },
    "mochi": {
        "tokens": 16.88,
        "latents": 3.16,
        "pixels": 4.15,
        "plain": 0.0,
        "text": 4.31,
        "streamed": 6.82,
        "chunked": 1.46,
    },
}
