"""Tensor names of FramePack in single files."""

from __future__ import annotations

from ...loading.keys import SAME, Layout

LAYOUTS: tuple[Layout, ...] = (
    Layout(
        "framepack/transformer",
        "FramePack",
        ("clean_x_embedder.proj.weight", "single_transformer_blocks.0.proj_mlp.weight"),
        SAME,
    ),
)
