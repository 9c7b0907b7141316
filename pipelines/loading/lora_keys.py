"""The keys of a LoRA file, in any of the usual styles, as layers of a diffusers transformer.

Three things differ: what stands in front (``diffusion_model.``, ``lora_unet_`` …), what the layer is called (diffusers'
name, the original release's, either with ``_`` for ``.`` as kohya's trainers write it) and what the two factors are
called. Names of the original releases come from the same tables that read whole checkpoints.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ...compat.errors import CheckpointError, InputError, UnsupportedError
from ..family import FamilySpec
from .keys import TRANSFORMER, Layout, Row, filled, listed, name_pattern

PREFIXES = (
    "base_model.model.",
    "model.diffusion_model.",
    "diffusion_model.",
    "transformer.",
    "lora_unet_",
    "lora_transformer_",
    "unet.",
    "model.",
)
DOWN = (".lora_down.weight", ".lora_A.weight", ".lora.down.weight", ".lora_A.default.weight")
UP = (".lora_up.weight", ".lora_B.weight", ".lora.up.weight", ".lora_B.default.weight")
ALPHA = (".alpha",)
OTHER_KINDS = re.compile(r"dora_scale|lora_magnitude_vector|\.lokr_|\.hada_|\.b?oft_|glora|\.diff(_b)?$")
TEXT = ("lora_te", "text_encoder", "lora_te1", "te1.", "te2.")
BLOCKS = {"double": "transformer_blocks", "single": "single_transformer_blocks", "rest": ""}
TERM = re.compile(r"(double|single|rest)(?:\s+(\d+)(?:\s*-\s*(\d+))?)?")
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Pair:
    """The two factors of one layer.

    Args:
        down, up: names of the tensors in the file. rows: first row and count of ``up`` that are this layer's; None
            for all. turned: whether the halves of these rows change places. alpha: name of the tensor; empty for none.
    """

    down: str
    up: str
    rows: tuple[int, int] | None = None
    turned: bool = False
    alpha: str = ""


@dataclass(frozen=True, slots=True)
class Match:
    """What of a file belongs where: layer name to its factors, keys of no layer here, and keys the filter left out."""

    pairs: Mapping[str, Pair]
    unmatched: Sequence[str] = ()
    text_encoder: int = 0
    total: int = 0
    filtered: int = 0

    def said(self, name: str) -> str:
        """One line: how many matched, and some that did not."""
        text = f"{name}: {len(self.pairs)} layers, {self.total - len(self.unmatched) - self.text_encoder} of "
        text += f"{self.total} keys match"
        if self.text_encoder:
            text += f"; {self.text_encoder} belong to text encoders and are ignored"
        if self.unmatched:
            text += f"; not {listed(self.unmatched)}"
        if self.filtered:
            text += f"; {self.filtered} layers are outside the chosen blocks"
        return text


def matched(path: Path, tensors: Shapes, layers: Shapes, family: FamilySpec, blocks: str = "") -> Match:
    """Which tensors of a LoRA file belong to which layers.

    Args:
        tensors: names and shapes in the file. layers: names and weight shapes of the transformer's layers.
        blocks: which blocks take part, such as ``double 0-9, single``; empty for all.

    Raises:
        UnsupportedError: another kind of adapter. CheckpointError: no key matches. InputError: a filter that is not
            understood or leaves nothing.
    """
    strange = [name for name in tensors if OTHER_KINDS.search(name)]
    if strange:
        raise UnsupportedError(
            f"{listed(strange)} in {path.name!r}",
            expected="a plain LoRA: lora_down and lora_up, or lora_A and lora_B",
            fix="Use a plain LoRA. DoRA, LoKr, LoHa and full weight differences are not supported.",
        )
    names = _Names(layers, family.lora_layouts or family.layouts)
    pairs: dict[str, Pair] = {}
    unmatched, text = [], 0
    for base, group in _groups(tensors).items():
        keys = list(group.values())
        if base.startswith(TEXT):
            text += len(keys)
            continue
        pairs_here = _pairs_of(base, group, tensors, layers, names)
        if pairs_here is None:
            unmatched += keys
        else:
            pairs |= pairs_here
    if not pairs:
        raise CheckpointError(
            f"none of {len(tensors)} keys of {path.name!r} match, such as {listed(sorted(tensors))}",
            expected=f"a LoRA for the transformer of {family.title}",
            fix="Choose a LoRA trained for this model.",
        )
    wanted = set(chosen(blocks, pairs, layers))
    kept = {name: pair for name, pair in pairs.items() if name in wanted}
    return Match(kept, sorted(unmatched), text, len(tensors), len(pairs) - len(kept))


def chosen(blocks: str, names: Iterable[str], layers: Iterable[str] = ()) -> list[str]:
    """The layers of ``names`` that a filter such as ``double 0-9, single`` keeps; all for an empty one.

    Raises:
        InputError: a term that is not understood, a block that is not there, or a filter that leaves nothing.
    """
    names = list(names)
    if not blocks.strip():
        return names
    tests = [_term(term.strip().lower(), list(layers)) for term in blocks.split(",") if term.strip()]
    kept = [name for name in names if any(test.fullmatch(name) for test in tests)]
    if not kept:
        raise InputError(
            f"blocks {blocks!r} leaves none of {len(names)} layers",
            expected="blocks that the LoRA has",
            fix="Empty means all of them.",
        )
    return kept


def _term(term: str, layers: Sequence[str]) -> re.Pattern[str]:
    match = TERM.fullmatch(term)
    if match is None or (match[1] == "rest" and match[2] is not None):
        raise InputError(
            f"blocks {term!r}",
            expected="double, single (each optionally with a number or a range) or rest, separated by commas",
            fix="For example: double 0-9, single, rest.",
        )
    if match[1] == "rest":
        return re.compile(rf"(?!(?:{'|'.join(filter(None, BLOCKS.values()))})\.).+")
    stem = BLOCKS[match[1]]
    numbers = [int(index[1]) for name in layers if (index := re.match(rf"{stem}\.(\d+)\.", name))]
    last = max(numbers, default=-1)
    low, high = int(match[2] or 0), int(match[3] or match[2] or max(last, 0))
    if low > high or high > last:
        raise InputError(
            f"blocks {term!r}",
            expected=f"{match[1]} 0-{last}" if last >= 0 else f"a model with {match[1]} blocks",
            fix="Choose blocks that this model has.",
        )
    return re.compile(rf"{stem}\.(?:{'|'.join(map(str, range(low, high + 1)))})\..+")


def _groups(tensors: Iterable[str]) -> dict[str, dict[str, str]]:
    """From layer name in the file to its keys by role; a key of no role is a group of its own."""
    groups: dict[str, dict[str, str]] = {}
    for name in tensors:
        for role, ends in (("down", DOWN), ("up", UP), ("alpha", ALPHA)):
            end = next((end for end in ends if name.endswith(end)), None)
            if end is not None:
                groups.setdefault(name.removesuffix(end), {})[role] = name
                break
        else:
            groups[name] = {"other": name}
    return groups


def _pairs_of(
    base: str, group: Mapping[str, str], tensors: Shapes, layers: Shapes, names: _Names
) -> dict[str, Pair] | None:
    """The layers that one pair of factors is for; None where there is no such layer, or its shape is another."""
    if not {"down", "up"} <= set(group):
        return None
    down, up = tensors[group["down"]], tensors[group["up"]]
    place = names.of(base)
    if place is None:
        return None
    targets, row = place
    sizes = [up[0] // len(targets)] * len(targets)
    if row is not None and row.first_square:
        sizes = [down[1]] * (len(targets) - 1) + [up[0] - down[1] * (len(targets) - 1)]
    pairs: dict[str, Pair] = {}
    for index, (target, size) in enumerate(zip(targets, sizes, strict=True)):
        shape = layers[target]
        inside = down[1] if len(down) == 2 else math.prod(down[1:])
        if (size, inside) != (shape[0], math.prod(shape[1:])) or up[1] != down[0]:
            return None
        rows = None if len(targets) == 1 else (sum(sizes[:index]), size)
        pairs[target] = Pair(group["down"], group["up"], rows, row is not None and row.turned, group.get("alpha", ""))
    return pairs


class _Names:
    """From a layer's name in a file to its names in the model."""

    def __init__(self, layers: Shapes, layouts: Sequence[Layout]) -> None:
        self.layers = layers
        self.flat = {name.replace(".", "_"): name for name in layers}
        named = [layout for layout in layouts if layout.kind.endswith(TRANSFORMER)]
        rows = [row for layout in named if isinstance(layout.rows, tuple) for row in layout.rows]
        self.rows = [row for row in rows if row.source != "*"]

    def of(self, base: str) -> tuple[list[str], Row | None] | None:
        """The layers and the table's row, which says how to cut; None where no layer has that name."""
        for stem in self._stems(base):
            if stem in self.layers:
                return [stem], None
            if stem in self.flat:
                return [self.flat[stem]], None
            for row in self.rows:
                targets = self._targets(row, stem)
                if targets is not None:
                    return targets, row
        return None

    def _stems(self, base: str) -> Iterator[str]:
        yield base
        for prefix in PREFIXES:
            if base.startswith(prefix):
                yield from self._stems(base.removeprefix(prefix))
                return

    def _targets(self, row: Row, stem: str) -> list[str] | None:
        for source in row.source.split("|"):
            dotted = name_pattern(source).fullmatch(f"{stem}.weight")
            flat = name_pattern(_flat(source)).fullmatch(f"{stem}_weight")
            for written in (row.targets, row.last):
                parts: list[str | None] = []
                for name in written.split():
                    if dotted is not None:
                        full = filled(name, dotted.groups()).removesuffix(".weight")
                        parts.append(full if full in self.layers else None)
                    elif flat is not None:
                        full = filled(_flat(name), flat.groups()).removesuffix("_weight")
                        parts.append(self.flat.get(full))
                if parts and None not in parts:
                    return [name for name in parts if name is not None]
        return None


def factors(pair: Pair, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Down (rank, in …) and up (out, rank …) of one layer."""
    down, up = tensors[pair.down], tensors[pair.up]
    if pair.rows is not None:
        up = up[pair.rows[0] : pair.rows[0] + pair.rows[1]]
    if pair.turned:
        up = torch.cat(tuple(reversed(up.chunk(2))))
    return down, up


def _flat(source: str) -> str:
    return source.replace(".", "_")
