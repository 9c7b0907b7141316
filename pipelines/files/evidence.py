"""Evidence of which model a checkpoint is, one that is not run here too: the words of its file, the names around it,
the published configurations, names and shapes of tensors."""

from __future__ import annotations

import json
import re
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from ...compat.checkpoints.gguf_file import gguf_header
from ...compat.checkpoints.headers import TensorEntry, entries_and_notes
from ...compat.decision import AUTO, CHOSEN, Decision
from ...compat.errors import CheckpointError, json_within, require_choice
from ..family import FamilySpec, OtherModel
from ..registry import FAMILIES
from ..requests import LoadRequest
from .part import PartFiles

CONFIGS = Path(__file__).parents[1] / "configs"
Names = tuple[str, ...]
MOST_NAMES, LONGEST = 6, 260  # of a model; characters of a title that are looked at, as of a file's name
FULL = 0.5  # strength of a LoRA from which on its recipe is taken
TITLES = ("modelspec.title", "ss_output_name", "general.name")  # in a file's metadata, as trainers and GGUF have them
SNAPSHOTS = "snapshots"  # whose folders are named by commits there
CACHED = re.compile(r"^models--(?:.+--)?(.+)$")  # a repository in Hugging Face's cache
PLAIN = re.compile(  # names that every model has
    r"(?:transformers?|snapshots|blobs|weights|split_files"
    r"|(?:diffusion_pytorch_model|pytorch_model|model|dit)(?:[-.]\d+-of-\d+)?(?:[._]?(?:bf16|fp16|fp32|fp8))?)",
    re.IGNORECASE,
)
COMMON = re.compile(  # words of names that many files have: parts, models, sizes and formats
    r"|pytorch|diffusion|adapter|model|transformer|unet|dit|loras?|weights|comfy(?:ui)?|converted|fun|video|hunyuan|hyvid"
    r"|wan\d*|ltxv?\d*|mochi|high|low|noise|rank\d*|[a-z]{0,2}\d+[a-z]?|e4m3(?:fn)?|e5m2|scaled|of|[a-z]"
)
DENIED = re.compile(r"(?<![a-z])(?:un|non?|not)[ ._-]?(?:distil|fast|turbo)\w*", re.IGNORECASE)
ELSEWHERE = (  # models of other packs
    OtherModel("Wan", ("blocks.0.self_attn.norm_q.weight", "head.modulation"), classes="Wan"),
    OtherModel("FLUX", ("double_blocks.0.img_attn.norm.key_norm.scale", "guidance_in.in_layer.weight"), classes="Flux"),
)
ROOTS = ("models", "diffusers", "diffusion_models", "unet", "checkpoints", "loras", "hub", "comfyui")  # tops of names


@dataclass(frozen=True, slots=True)
class Evidence:
    """Evidence of which variant a checkpoint is, the surest first."""

    notes: Mapping[str, str] = field(default_factory=dict)  # the metadata of its file
    names: tuple[str, ...] = ()  # of the file and the folders around it, the nearest first, without common ones
    config: Mapping[str, Any] = field(default_factory=dict)  # its configuration

    def name_with(self, pattern: str) -> str:
        """The nearest name in which ``pattern`` is found; empty for none."""
        return next((name for name in self.names if says(name, pattern)), "")

    def note(self, *path: str) -> Any:
        """The value in the metadata under a key and, where that is JSON, under further ones; None for nothing."""
        value: Any = self.notes.get(path[0])
        try:
            for key in path[1:]:
                value = (json_within(value, "metadata") if isinstance(value, str) else value)[key]
        except (ValueError, KeyError, TypeError, IndexError, CheckpointError):  # another program's words
            return None
        return value


@lru_cache(maxsize=32)
def published(kind: str) -> tuple[dict[str, Any], ...]:
    """The published configurations of models of a ``kind``; none for a family that is read from folders alone."""
    family, _, part = kind.rpartition("/")
    path = (FAMILIES[family].folder if family else CONFIGS) / f"{part}.json"
    return tuple(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else ()


def evidence_of(path: Path, config: Mapping[str, Any], entries: Mapping[str, TensorEntry] | None = None) -> Evidence:
    """The evidence of a file, or a folder with these ``entries``: metadata, names (its titles first), config."""
    file = next(iter(entries.values())).file if entries else path
    read = gguf_header if file.suffix == ".gguf" else entries_and_notes
    notes = {key: each for key, each in read(file)[1].items() if isinstance(each, str)} if file.is_file() else {}
    return Evidence(notes, names_around(path, notes), config)


def says(name: str, pattern: str) -> bool:
    """True if ``pattern`` is found in a name outside of words that deny it, such as ``undistilled``."""
    return re.search(pattern, DENIED.sub("", name), re.IGNORECASE) is not None


def names_around(path: Path, notes: Mapping[str, str] | None = None) -> Names:
    """The names that may say something of a model: the titles in its metadata, its own, those of the folders around.

    Nearest first, :data:`MOST_NAMES` at most, up to one of :data:`ROOTS` or a repository in the Hub's cache; names that
    every model has are left out."""
    names = [str(notes[key])[:LONGEST] for key in TITLES if notes.get(key)] if notes else []
    own = path.stem if path.suffix in (".safetensors", ".sft", ".gguf") else path.name
    for place, name in ((path, own), *((parent, parent.name) for parent in path.parents)):
        if name.lower() in ROOTS or len(names) == MOST_NAMES:
            break
        cached = CACHED.match(name)
        if cached is not None:
            return (*names, cached[1])
        if name and place.parent.name != SNAPSHOTS and not PLAIN.fullmatch(name):
            names.append(name)
    return tuple(names)


def names_of_file(path: Path, notes: Mapping[str, str] | None = None) -> Names:
    """:func:`names_around` one of many files, such as a LoRA; with folders only where its own name says nothing."""
    names = names_around(path, notes)
    plain = all(map(COMMON.fullmatch, re.split(r"[ ._-]+", path.stem.lower())))
    return names if plain or path.stem not in names else names[: names.index(path.stem) + 1]


def variant_choices() -> list[str]:
    """Every variant of every family, ``auto`` first, newer ones last: one list on every machine."""
    each = [(family.recipes.variants, family.recipes.newer_variants) for family in FAMILIES.values()]
    first = [variant for variants, newer in each for variant in variants[: len(variants) - newer]]
    return [AUTO, *dict.fromkeys([*first, *(variant for variants, _ in each for variant in variants)])]


def variant_of(family: FamilySpec, request: LoadRequest, around: Evidence) -> tuple[str, tuple[Decision, ...]]:
    """The variant of a model: the repeated run's, as asked, or guessed, and any decision; InputError if unknown."""
    known, where = (AUTO, *family.recipes.variants), f" for {family.title}"
    asked = request.earlier[0] if request.earlier[0] in family.recipes.variants else request.variant
    require_choice("variant", asked, known, "Choose auto or one of these.", where=where)
    if not family.recipes.variants:
        return family.id, ()
    if asked != AUTO:
        return asked, (Decision("variant", asked, source=CHOSEN),)
    variant, why = family.code.guess_variant(around)
    return variant, (Decision("variant", variant, why, AUTO, guessed=True),) if why else ()


def recipe_named(family: FamilySpec, names: Names, base: Names = ()) -> tuple[str, str]:
    """The key of the recipe that one of ``names``, of a distilled model or a LoRA, gives away, and that name; empty
    texts for none. A pattern with `` on `` also needs a name in ``base``, the model that the LoRA is for."""
    rows = [(key, *pattern.split(" on ")) for pattern, key in family.published.recipe_names.items()]
    pairs = ((key, name, on) for name in names for key, own, *on in rows if says(name, own))
    return next(((key, name) for key, name, on in pairs if not on or Evidence(names=base).name_with(on[0])), ("", ""))


def changes_recipe(strength: float, blocks: str) -> bool:
    """True for a LoRA that acts on all blocks, in full or nearly: the model is then run as that LoRA was trained."""
    return strength >= FULL and not blocks.strip()


def cautions_of(family: FamilySpec, transformer: PartFiles, names: Names) -> tuple[Decision, ...]:
    """:func:`cautions_by_name` with the dtypes and the channels of a transformer's files."""
    plain = {entry.dtype for entry in transformer.entries.values() if len(entry.shape) == 2 and not entry.codec}
    return cautions_by_name(family, names, plain, int(transformer.config.get("in_channels") or 0))


def cautions_by_name(
    family: FamilySpec, names: Names, stored: Container[str] = (), channels: int = 0, base: Names = ()
) -> tuple[Decision, ...]:
    """The family's cautions about a model or a LoRA of these ``names``, without those that a name with a recipe makes
    needless. ``base`` names the LoRA's model; ``stored`` has the dtypes of its plain matrices; ``channels`` are its
    transformer's input, 0 where they are not known."""
    return tuple(
        Decision("caution", row.text, source=row.source, alarming=True)
        for row in family.published.cautions
        if (not row.stored or row.stored in stored)
        and (not row.channels or channels in (0, row.channels))
        and not (row.unlisted and recipe_named(family, names, base)[0])
        and Evidence(names=names).name_with(row.named)
    )


def other_model(entries: Mapping[str, TensorEntry]) -> OtherModel | None:
    """The known model that the tensors are of, although nothing here runs it; None for an unknown one."""
    return next((row for row in _others() if _fits(row, entries)), None)


def other_class(name: str) -> OtherModel | None:  # the same by the name of a diffusers class
    return next((row for row in _others() if row.classes and name.startswith(row.classes)), None)


def refusal(other: OtherModel, path: Path) -> CheckpointError:  # for the file of a model that another program runs
    found = f"{str(path)!r} holds {other.title}"
    return CheckpointError(found, expected="a model that AnyGPU runs", fix=f"Use {other.runs}.")


def _fits(row: OtherModel, entries: Mapping[str, TensorEntry]) -> bool:
    """True if a tensor is there for each of the model's marks, under any prefix, and the first has its columns."""

    def marked(mark: str) -> str:
        whole = mark[-1] == "."  # a module: any tensor below it
        return next((name for name in entries if f".{mark}" in f".{name}" and (whole or name.endswith(mark))), "")

    found = [marked(mark) for mark in row.marks]
    if not all(found):
        return False
    shape = entries[found[0]].shape
    return not row.columns or (len(shape) > 1 and shape[1] == row.columns)


def _others() -> tuple[OtherModel, ...]:
    return (*(other for family in FAMILIES.values() for other in family.published.others), *ELSEWHERE)
