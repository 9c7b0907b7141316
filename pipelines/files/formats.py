"""The contents of a single file, from its header alone: which models, in which layout, with which configuration: the
JSON file of the same name, else the published one (``configs/*.json`` or in its family's folder) with the file's
shapes. What no shape tells, such as image to video by the first frame, is taken from the file's name and said."""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from ...compat.checkpoints.gguf_file import gguf_header
from ...compat.checkpoints.headers import TensorEntry, entries_and_notes, unreadable
from ...compat.checkpoints.quantised import with_scales
from ...compat.checkpoints.weights import PICKLES, read_json
from ...compat.errors import CheckpointError, PackError
from ...compat.packages import attribute
from ..keys import Layout, is_another_model, layouts_beside, renamed
from ..registry import FAMILIES
from .evidence import cautions_by_name, evidence_of, other_model, published, recipe_named, refusal, says
from .part import MOST_TENSORS, construction

ENDINGS = (".safetensors", ".sft", ".gguf")
LONGEST = 260  # characters of a tensor's name
NAMED = 3  # misfits that an error names
SHAPELESS = ("task_type", "target_size", "image_condition_type", "scaling_factor")  # settings


@dataclass(frozen=True, slots=True)
class StoredModel:
    kind: str  # which, such as ``ltx/transformer`` or ``t5``
    layout: str  # in whose names
    prefix: str  # what all names begin with
    entries: Mapping[str, TensorEntry]  # its tensors under the names of the model
    path: Path  # the file
    unknown: tuple[str, ...] = ()  # names in the file that no rule of the layout knows


@dataclass(frozen=True, slots=True)
class Configured:
    """The configuration of a model, what it was published as, and the settings of its pipeline that go with it."""

    config: Mapping[str, Any]
    name: str
    task: str
    tools: Mapping[str, Mapping[str, Any]]
    why: str  # the reason to take it of several with the same shapes; empty where one fits, or the user chose
    unused: tuple[str, ...] = ()  # tensors of the file that it has no place for


def contents(path: Path) -> list[StoredModel]:
    """The models in a file that are known here; none where it holds something else. Raises CheckpointError for a file
    that is missing, damaged, a pickle, or has tensors that its layout does not know, UnsupportedError for weights
    stored in a way that is not read, MissingPackageError for GGUF without the package gguf."""
    try:
        status = path.stat()
    except OSError as error:
        raise unreadable(path, error) from error
    return list(_contents(path, (status.st_size, status.st_mtime_ns)))


@lru_cache(maxsize=16)  # headers only; one loading asks for the same few files again and again
def _contents(path: Path, _stamp: tuple[int, int]) -> tuple[StoredModel, ...]:
    entries = entries_in(path)
    models = _recognised(entries)
    return tuple(_content(entries, prefix, layout, models, path) for prefix, layout in models)


def _content(
    entries: Mapping[str, TensorEntry], prefix: str, layout: Layout, models: Iterable[tuple[str, Layout]], path: Path
) -> StoredModel:
    """The model of ``layout`` below ``prefix``, one of the ``models`` in a file. Raises CheckpointError as
    :func:`renamed` does, or in its place the :func:`refusal` of a model that another program runs."""
    unknown: list[str] = []
    try:
        named = renamed(_under(entries, prefix, models), layout, path, unknown)
    except CheckpointError:
        if other := other_model(entries):
            raise refusal(other, path) from None
        raise
    return StoredModel(layout.kind, layout.name, prefix, entries=named, path=path, unknown=tuple(sorted(unknown)))


def kinds(path: Path) -> tuple[str, ...]:
    """The kinds of the models in a file, as :func:`contents` has them; none where it cannot be read."""
    try:
        return tuple(layout.kind for _, layout in _recognised(entries_in(path)))
    except Exception:  # a list of files for a menu: what is wrong with one is said when it is chosen
        return ()


def config_of(content: StoredModel, task: str = "", known: str = "") -> Configured:
    """The configuration of a model in a file: that of the JSON beside it (unless another program's), else a published
    one, of ``task`` if any is. It has to fit the shapes of the file and leave the fewest of its tensors unused; of
    several the one called ``known`` is taken, else the one that the names around the file say, else the first, as
    assumed. Raises CheckpointError where none fits, or where the tensors show a model that another program runs."""
    beside, rows = content.path.with_suffix(".json"), list(published(content.kind))
    config = read_json(beside, "a model configuration") if beside.is_file() else {}
    inner = config.get(content.kind.rpartition("/")[2])
    config = inner if isinstance(inner, dict) else config
    if not config.keys().isdisjoint(("_class_name", "model_type", "architectures")):  # else another program's
        rows, task = [{"name": repr(beside.name), "config": config}], ""
    if not rows:
        found = f"no configuration for {content.layout} in {str(content.path)!r}"
        fix = f"Put its config.json beside it as {beside.name!r}."
        raise CheckpointError(found, expected="it beside the file", fix=fix)
    wanted = [row for row in rows if not task or row.get("task", task) == task] or rows
    misfits = [(row, *_misfit(row, content)) for row in wanted]
    complete = [(row, unused) for row, misfit, unused in misfits if not misfit]
    left_out = min((unused for _, unused in complete), key=len, default=())
    fitting = [row for row, unused in complete if unused == left_out]
    if (content.unknown or left_out or not fitting) and (other := other_model(entries_in(content.path))):
        raise refusal(other, content.path)
    if not fitting:
        row, reasons, _ = min(misfits, key=lambda item: len(item[1]))
        more = f" and {len(reasons) - NAMED} more" if len(reasons) > NAMED else ""
        raise CheckpointError(
            f"{content.layout} in {str(content.path)!r} does not fit {row['name']}: {'; '.join(reasons[:NAMED])}{more}",
            expected=f"the shapes of {', '.join(row['name'] for row in wanted[:4])}",
            fix=f"Use the file as published, with its own config.json beside it as {beside.name!r}.",
        )
    fitting = [row for row in fitting if row["name"] == known] or fitting
    around = evidence_of(content.path, {}).names
    for index in range(len(around)) if len(fitting) > 1 else ():
        # A name alone, then with ever more of the folders around it, which may say what the name leaves out.
        rated = [_best_by_name(fitting, "/".join(around[index : end + 1])) for end in range(index, len(around))]
        if rated[0] is not None:
            _, best, why = min(filter(None, rated), key=lambda each: each[0])
            return _configured(best, why, left_out)
    unsaid = "no name around it says otherwise" if len(fitting) > 1 else ""
    if unsaid and (family := FAMILIES.get(content.kind.partition("/")[0])) is not None:
        key, said = recipe_named(family, around)
        if cautions_by_name(family, around):
            unsaid = "its name has a caution"
        elif key:
            return _configured(fitting[0], f"the name {said!r} says {family.published.recipes[key].name}", left_out)
    return _configured(fitting[0], unsaid and f"assumed: {unsaid}", left_out)


def _best_by_name(rows: Iterable[Mapping[str, Any]], name: str) -> tuple[int, Mapping[str, Any], str] | None:
    """(gaps, row, reason) for the row with the most ``named`` patterns, all of them found in ``name``; ``gaps`` counts
    words of the row, such as 720 or i2v, that ``name`` does not say. None where no row is named so."""
    named = [row for row in rows if row.get("named") and all(says(name, each) for each in row["named"])]
    if not named:
        return None
    best = max(named, key=lambda row: len(row["named"]))
    known = f"{best['named']}{name.lower()}"
    gaps = [word for word in re.findall(r"\d{3,}|[it]2v", best["name"]) if word not in known]
    assumed = f", but for {' and '.join(gaps)}, which is assumed" if gaps else ""
    return len(gaps), best, f"the name {name!r} says so{assumed}"


def _configured(row: Mapping[str, Any], why: str, unused: tuple[str, ...]) -> Configured:
    return Configured(row["config"], row["name"], row.get("task", ""), row.get("tools", {}), why=why, unused=unused)


def layouts() -> tuple[Layout, ...]:
    return (*(layout for family in FAMILIES.values() for layout in family.files.layouts), *TEXT)


def width_of(content: StoredModel) -> int:  # features of an encoder's states; 0 where no tensor tells
    name, axis = WIDTHS.get(content.kind, ("", 0))
    return content.entries[name].shape[axis] if name in content.entries else 0


WIDTHS = {
    "t5": ("shared.weight", 1),
    "llama": ("embed_tokens.weight", 1),
    "qwen2_5_vl": ("embed_tokens.weight", 1),
    "clip_l": ("text_model.final_layer_norm.weight", 0),
    "siglip": ("vision_model.post_layernorm.weight", 0),
}


def entries_in(path: Path) -> dict[str, TensorEntry]:
    """The tensors of a file by its own names, scales attached. Raises CheckpointError for a pickle and, where the
    scales are not readable, for a model that another program runs."""
    if path.suffix in PICKLES:
        found = f"{str(path)!r} is a pickle"
        fix = "Download the safetensors version. Pickles can run code and are refused."
        raise CheckpointError(found, expected=f"a file that ends with {', '.join(ENDINGS)}", fix=fix)
    if path.suffix == ".gguf":
        return gguf_header(path)[0]
    entries, notes = entries_and_notes(path)
    try:
        return with_scales(entries, notes, path)
    except PackError:
        if other := other_model(entries):
            raise refusal(other, path) from None
        raise


def _recognised(entries: Mapping[str, TensorEntry]) -> list[tuple[str, Layout]]:
    """(prefix, layout) of each model whose marking names are there: the first of each kind, shortest prefix first; a
    half only where the whole was not found before it."""
    known = layouts()
    ends = {name for layout in known for name in layout.marks[0].split("|")}
    ordered = sorted(name for name in entries if len(name) <= LONGEST)
    prefixes = {
        name[: -len(end)]
        for name in ordered
        for end in ends
        if name.endswith(end) and (name == end or name[-len(end) - 1] == ".")
    }
    by_kind: dict[str, tuple[str, Layout]] = {}
    for prefix in sorted(prefixes, key=lambda prefix: (len(prefix), prefix)):
        below = ordered[bisect_left(ordered, prefix) : bisect_left(ordered, f"{prefix}\U0010ffff")]
        names = {name[len(prefix) :]: None for name in below}
        layout = next((layout for layout in known if layout.fits(names)), None)
        if layout is not None and layout.kind not in by_kind and layout.half_of not in by_kind:
            by_kind[layout.kind] = (prefix, layout)
    return list(by_kind.values())


def _under(
    entries: Mapping[str, TensorEntry], prefix: str, models: Iterable[tuple[str, Layout]]
) -> dict[str, TensorEntry]:
    """The entries below ``prefix``, named without it; those of other ``models`` that lie inside are left out."""
    inner = tuple(other for other, _ in models if other != prefix and other.startswith(prefix))
    own = (name for name in entries if name.startswith(prefix) and not name.startswith(inner))
    return {name[len(prefix) :]: entries[name] for name in own}


def _misfit(row: Mapping[str, Any], content: StoredModel) -> tuple[list[str], tuple[str, ...]]:
    """The differences of a file from the configuration in ``row``, as phrases, and the file's tensors without a place
    in it, which differ only if :func:`is_another_model`. Only shapes in ``where`` are compared if it has them."""
    entries = content.entries
    if "where" in row:
        different = [
            f"{name!r} is {tuple(entries[name].shape) if name in entries else 'missing'}"
            for name, shape in row["where"].items()
            if name not in entries or not _same_shape(entries[name].shape, shape)
        ]
        return different, ()
    if "_class_name" not in row["config"]:  # of an encoder, given beside the file; its own class checks it
        return [], ()
    shapes = _shapes(json.dumps({k: v for k, v in row["config"].items() if k not in SHAPELESS}, sort_keys=True))
    unused = tuple(sorted(entries.keys() - shapes.keys()))
    missing = [f"no tensor {name!r}" for name in sorted(shapes.keys() - entries.keys())]
    missing += [f"tensor {name!r} too many" for name in unused] if is_another_model(unused, shapes) else []
    reshaped = [
        f"{name!r} is {entries[name].shape}, not {shape}"
        for name, shape in shapes.items()
        if name in entries and not _same_shape(entries[name].shape, shape)
    ]
    return missing + reshaped, unused


@lru_cache(maxsize=8)
def _shapes(settings: str) -> dict[str, tuple[int, ...]]:
    """Name to shape of the tensors of the diffusers model with the configuration ``settings`` (JSON), on ``meta``."""
    config = json.loads(settings)
    cls: Any = attribute("diffusers", str(config["_class_name"]))
    with construction("model", Path("config.json"), MOST_TENSORS, lambda: None), torch.device("meta"):
        module = cls.from_config(dict(config))
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}


def _same_shape(shape: Iterable[int], wanted: Iterable[int | None]) -> bool:  # None fits any length
    shape, wanted = tuple(shape), tuple(wanted)
    return len(shape) == len(wanted) and all(w is None or f == w for f, w in zip(shape, wanted, strict=True))


# Text and image encoders: as published, as ComfyUI has them, and in the names of GGUF, in which ``heads`` are those of
# Llama 3 8B, the only one that these models use.
TEXT = layouts_beside(__file__)
