"""The keys of a LoRA file as layers of a diffusers transformer. Styles differ in the prefix, in the layer's name
(diffusers' or the original release's, from the tables of whole checkpoints, with ``_`` for ``.`` as kohya writes
it), and in what its tensors are called (:mod:`.lora_kinds`)."""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ...compat.errors import CheckpointError, InputError
from ..family import FamilySpec
from ..keys import SAME, TRANSFORMER, Layout, Row, filled, listed, name_pattern
from . import lora_kinds as kinds

PREFIXES = (
    "base_model.model.",
    "model.diffusion_model.",
    "diffusion_model.",
    "transformer.",
    "lora_unet_",
    "lora_transformer_",
    "lycoris_",
    "Hunyuan_video_I2V_lora_",
    "unet.",
    "model.",
)
TEXT = ("lora_te", "text_encoder", "lora_te1", "te1.", "te2.")
ALONE = kinds.MULTIPLIERS | {kinds.DIFFERENCE, kinds.RESCALE}  # roles that do not count beside those of a plain LoRA
BLOCKS = {"double": "transformer_blocks", "single": "single_transformer_blocks", "rest": ""}
TERM = re.compile(r"(double|single|rest)(?:\s+(\d+)(?:\s*-\s*(\d+))?)?")


@dataclass(frozen=True, slots=True)
class Match:
    """The keys of a file by the layer that they belong to, keys of no use here, and keys the filter left out."""

    pairs: Mapping[str, kinds.LoRAPair]
    unmatched: Sequence[str] = ()
    text_encoder: int = 0
    total: int = 0
    filtered: int = 0

    def message(self, name: str) -> str:  # for the user: how much of the file ``name`` is used
        layers, keys = len(self.pairs), self.total - len(self.unmatched) - self.text_encoder
        text = f"{name}: {layers} layer{'s' * (layers != 1)}, {keys} of {self.total} keys match"
        if self.text_encoder:
            belong = "belongs to text encoders and is" if self.text_encoder == 1 else "belong to text encoders and are"
            text += f"; {self.text_encoder} {belong} ignored"
        if self.unmatched:
            text += f"; not {listed(self.unmatched)}"
        if self.filtered:
            text += f"; {self.filtered} {'layer is' if self.filtered == 1 else 'layers are'} outside the chosen blocks"
        return text


def matched(
    path: Path,
    tensors: kinds.Shapes,
    layers: kinds.Shapes,
    family: FamilySpec,
    blocks: str = "",
    biased: Container[str] | None = None,
) -> Match:
    """Match the ``tensors`` of a LoRA file to the model's ``layers``, both name to shape, and filter them by
    ``blocks``. A bias is unmatched for a layer not in ``biased`` (None: each has one); keys of text encoders are only
    counted. Raises CheckpointError where no key matches, InputError for a filter that is wrong or leaves nothing."""
    names = _Names(layers, family.files.lora_layouts or family.files.layouts)
    pairs: dict[str, kinds.LoRAPair] = {}
    unmatched, text_keys = [], 0
    groups: dict[str, dict[str, str]] = {}  # from a layer's name in the file to its keys by role
    for name in tensors:
        role, base = kinds.role_of(name)
        groups.setdefault(base, {})[role] = name
    for base, group in groups.items():
        keys = list(group.values())
        if base.startswith(TEXT):
            text_keys += len(keys)
            continue
        pairs_here = _pairs_of(base, group, tensors, layers, names)
        if not kinds.BIASES.isdisjoint(group) and any(biased is not None and name not in biased for name in pairs_here):
            group = {role: name for role, name in group.items() if role not in kinds.BIASES}
            pairs_here = _pairs_of(base, group, tensors, layers, names)
        used = {key for pair in pairs_here.values() for key in pair.names.values()}
        unmatched += [key for key in keys if key not in used]
        pairs |= pairs_here
    if not pairs:
        found = f"none of {len(tensors)} keys of {path.name!r} match, such as {listed(sorted(tensors))}"
        fix = "Choose a LoRA trained for this model."
        raise CheckpointError(found, expected=f"a LoRA for the transformer of {family.title}", fix=fix)
    wanted = set(chosen(blocks, pairs, layers))
    kept = {name: pair for name, pair in pairs.items() if name in wanted}
    return Match(kept, sorted(unmatched), text_encoder=text_keys, total=len(tensors), filtered=len(pairs) - len(kept))


def chosen(blocks: str, names: Iterable[str], layers: Iterable[str] = ()) -> list[str]:
    """The layers of ``names`` that the filter ``blocks``, such as ``double 0-9, single``, keeps; all for an empty one.
    InputError for an unknown term, a block that the model's ``layers`` lack, or a filter that leaves nothing."""
    names = list(names)
    if not blocks.strip():
        return names
    tests = [_term(term.strip().lower(), list(layers)) for term in blocks.split(",") if term.strip()]
    kept = [name for name in names if any(test.fullmatch(name) for test in tests)]
    if not kept:
        found = f"blocks {blocks!r} leaves none of {len(names)} layers"
        raise InputError(found, expected="blocks that the LoRA has", fix="Empty means all of them.")
    return kept


def _term(term: str, layers: Sequence[str]) -> re.Pattern[str]:
    """The pattern of the layers that a filter's ``term`` keeps, where ``rest`` is all outside of blocks; raises
    InputError for an unknown term, or a block beyond those in ``layers``."""
    match = TERM.fullmatch(term)
    if match is None or (match[1] == "rest" and match[2] is not None):
        expected = "double, single (each optionally with a number or a range) or rest, separated by commas"
        raise InputError(f"blocks {term!r}", expected=expected, fix="For example: double 0-9, single, rest.")
    if match[1] == "rest":
        return re.compile(rf"(?!(?:{'|'.join(filter(None, BLOCKS.values()))})\.).+")
    stem = BLOCKS[match[1]]
    last = max([int(index[1]) for name in layers if (index := re.match(rf"{stem}\.(\d+)\.", name))], default=-1)
    low, high = int(match[2] or 0), int(match[3] or match[2] or max(last, 0))
    if low > high or high > last:
        expected = f"{match[1]} 0-{last}" if last >= 0 else f"a model with {match[1]} blocks"
        raise InputError(f"blocks {term!r}", expected=expected, fix="Choose blocks that this model has.")
    return re.compile(rf"{stem}\.(?:{'|'.join(map(str, range(low, high + 1)))})\..+")


def _pairs_of(
    base: str, group: Mapping[str, str], tensors: kinds.Shapes, layers: kinds.Shapes, names: _Names
) -> dict[str, kinds.LoRAPair]:
    """By layer, the tensors that ``group``, role to name, has for it. Empty where no layer is called ``base`` or has
    their shape, for a multiplier of a weight that the model splits, and for a DoRA's norms of the wrong number."""
    size, target = kinds.size_of(group, tensors), names.target(base)
    if size is None or target is None:
        return {}
    if len(target.layers) > 1 and not kinds.MULTIPLIERS.isdisjoint(group):  # it multiplies the fused weight, not these
        return {}
    total, inside, rank = size
    norms = total, *(layers[target.layers[0]][1:2] if len(target.layers) == 1 else ())  # one a row, or one a column
    if kinds.MAGNITUDE in group and math.prod(tensors[group[kinds.MAGNITUDE]]) not in norms:
        return {}
    own = {role: name for role, name in group.items() if role not in ALONE or kinds.UP not in group}
    first, pairs = 0, dict[str, kinds.LoRAPair]()
    for name, count in target.counts(total, inside or math.prod(layers[target.layers[0]][1:])):
        shape = layers[name]
        narrower = kinds.DOWN in group and kinds.is_narrower(tensors[group[kinds.DOWN]], shape)
        if count != shape[0] or not (narrower or inside in (0, math.prod(shape[1:]))):
            return {}
        rows = None if len(target.layers) == 1 else (first, count)
        pairs[name] = kinds.LoRAPair(names=own, shape=shape, rank=rank, rows=rows, swapped=target.row.swapped)
        first += count
    return pairs


class Target(NamedTuple):
    """The layers of the model under one name of a file, and the table's row, which says how their rows are cut."""

    layers: list[str]
    row: Row = SAME[0]

    def counts(self, total: int, side: int) -> list[tuple[str, int]]:
        """Each layer with its number of the ``total`` rows: equal shares, or with ``first_square`` as many as ``side``,
        the columns, for all but the last, which has the rest."""
        count = side if self.row.first_square else total // len(self.layers)
        *first, last = self.layers
        return [*((name, count) for name in first), (last, total - count * len(first))]


class _Names:  # finds layers by the names that LoRA files give them
    def __init__(self, layers: kinds.Shapes, layouts: Sequence[Layout]) -> None:
        self.layers = layers
        self.flat = {name.replace(".", "_"): name for name in layers}  # as kohya writes them
        named = [layout for layout in layouts if layout.kind.endswith(TRANSFORMER)]
        rows = [row for layout in named if isinstance(layout.rows, tuple) for row in layout.rows]
        self.rows = [row for row in rows if row.source != "*"]

    def target(self, base: str) -> Target | None:
        """The layers for ``base``, a file's name with or without prefixes: one of ours, or those of a row, or None."""
        for stem in self._stems(base):
            if stem in self.layers or stem in self.flat:
                return Target([stem if stem in self.layers else self.flat[stem]])
            for row in self.rows:
                layers = self._layers_in(row, stem)
                if layers is not None:
                    return Target(layers, row)
        return None

    def _stems(self, base: str) -> Iterator[str]:  # the name as it is, then without each prefix that it begins with
        yield base
        for _ in PREFIXES:
            if prefix := next((prefix for prefix in PREFIXES if base.startswith(prefix)), ""):
                yield (base := base.removeprefix(prefix))

    def _layers_in(self, row: Row, stem: str) -> list[str] | None:
        """The layers that ``row`` names for ``stem``, written with dots or underscores, by its ``targets``, else its
        ``last``; None where the row does not match or the model lacks one."""
        for source in row.source.split("|"):
            dotted = name_pattern(source).fullmatch(f"{stem}.weight")
            flat = name_pattern(source.replace(".", "_")).fullmatch(f"{stem}_weight")
            for targets in (row.targets.split(), row.last.split()):
                layers: list[str] = []
                if dotted is not None:
                    layers = [filled(name, dotted.groups()).removesuffix(".weight") for name in targets]
                elif flat is not None:
                    names = [filled(name.replace(".", "_"), flat.groups()).removesuffix("_weight") for name in targets]
                    layers = [self.flat.get(name, "") for name in names]
                if layers and all(layer in self.layers for layer in layers):
                    return layers
        return None
