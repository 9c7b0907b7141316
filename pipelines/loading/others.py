"""Models that are not run here, recognised by names and shapes of their tensors, and what runs them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ...compat.checkpoints.headers import TensorEntry
from ...compat.errors import CheckpointError
from ..family import OtherModel
from ..registry import FAMILIES

ELSEWHERE = (
    OtherModel("Wan", ("blocks.0.self_attn.norm_q.weight", "head.modulation"), classes="Wan"),
    OtherModel("FLUX", ("double_blocks.0.img_attn.norm.key_norm.scale", "guidance_in.in_layer.weight"), classes="Flux"),
)


def other_model(entries: Mapping[str, TensorEntry]) -> OtherModel | None:
    """The model that is known by name although nothing here runs it; None for an unknown one."""
    return next((row for row in _rows() if _fits(row, entries)), None)


def other_class(name: str) -> OtherModel | None:
    """The model of a diffusers class that nothing here runs; None for an unknown one."""
    return next((row for row in _rows() if row.classes and name.startswith(row.classes)), None)


def _rows() -> tuple[OtherModel, ...]:
    return (*(other for family in FAMILIES.values() for other in family.published.others), *ELSEWHERE)


def refusal(other: OtherModel, path: Path) -> CheckpointError:
    """The error for a file that holds another model."""
    return CheckpointError(
        f"{str(path)!r} holds {other.title}", expected="a model that AnyGPU runs", fix=f"Use {other.runs}."
    )


def _fits(row: OtherModel, entries: Mapping[str, TensorEntry]) -> bool:
    """Whether its tensors are there, under any prefix, and the distinguishing one has its number of columns."""
    ends = {mark: next((name for name in entries if f".{name}".endswith(f".{mark}")), "") for mark in row.marks}
    if not all(ends.values()):
        return False
    shape = entries[ends[row.marks[0]]].shape
    return not row.columns or (len(shape) > 1 and shape[1] == row.columns)
