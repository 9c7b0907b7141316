"""LoRAs on a pipeline's transformer: the same pipeline with one more LoRA, which shares every part with the old one.
LoRAs are on the transformer while it is held, so several chains can start from one pipeline."""

from __future__ import annotations

import math
import re
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...compat.checkpoints.headers import json_object
from ...compat.checkpoints.packed import Stored, StoredLinear, is_exact, opened, without_unpacking
from ...compat.checkpoints.weights import read_json, tensor_file
from ...compat.decision import Decision
from ...compat.device.facts import host_free_bytes, swap_free_bytes
from ...compat.errors import CheckpointError, InputError, UnsupportedError, first_line, require_choice
from ...compat.memory.parts import PartBytes
from ...compat.memory.statistics import amount_of
from ...compat.packages import attribute
from ...compat.transforms.order import Order, Step
from ..base import Progress
from ..files.evidence import Names, cautions_by_name, changes_recipe, names_of_file, recipe_named
from ..files.lora_keys import matched
from ..files.lora_kinds import ALPHA, HADA, KRON, MAGNITUDE, PEFT_MAGNITUDE, UP, Delta, LoRAPair, role_of
from ..files.part import MOST_TENSORS, construction, empty_weights
from ..pipeline import Pipeline
from ..requests import LORA_MODES
from ..settings import OWN_DEFAULTS, defaults_in, recipe_decisions, with_defaults

MOST = 10.0  # strength in either direction
METHODS = {"LORA": (UP,), "LOHA": HADA, "LOKR": KRON}  # of peft that are read, with the roles of their tensors
STARTS = ("True", "False", "gaussian", "eva", "orthogonal", "mica")  # that leave the model's weights alone
WIDE = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
LAYERS = (nn.Linear, nn.Conv2d, nn.Conv3d)
ATOMS = r"(?:[\w-]|\\?\.|\\d|\[[\w-]+\])*"
SIMPLE = re.compile(rf"\^?{ATOMS}(?:[+*?]{ATOMS})?(?:\([\w.|-]+\){ATOMS})?\$?")  # of layers: one repeat, one choice
MOST_PATTERNS, MOST_NAME = 8, 128  # in characters
FACTORS = {"reference_downscale_factor": "[1-8]", "reference_temporal_scale_factor": "1"}  # IC-LoRA's that are read
NAMED = re.compile(r"(.+?\.(?:safetensors|sft))(?::([^:]*)(?::(.*))?)?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class LoRA:
    """One LoRA as a user chose it."""

    path: Path  # its file
    strength: float  # times what it was trained for
    blocks: str  # filter as :func:`lora_keys.chosen` takes it
    mode: str  # one of :data:`LORA_MODES`
    pairs: Mapping[str, LoRAPair]  # the tensors of each layer, by the layer's name
    stamp: tuple[int, int]  # the file's size and time
    scales: Mapping[str, float]  # alpha over rank by layer name, 1 where the file has no alpha
    of_weight: frozenset[str]  # always merged: layers on whose weights it or a later one depends (DoRA, OFT …), norms
    tensors: Mapping[str, torch.Tensor] = field(repr=False, compare=False)  # of the file, on the CPU

    def delta(self, layer: str) -> Delta:
        return self.pairs[layer].delta(self.tensors, self.scales[layer])

    @property
    def in_weights(self) -> bool:
        return self.mode == "merged" or bool(self.of_weight)

    @property
    def key(self) -> Hashable:
        """The key of its layers; a strength in the weights is part of it."""
        return (self.path, self.stamp, self.blocks, self.mode, self.in_weights and self.strength, *self.scales.values())


def with_lora(pipeline: Pipeline, path: Path, strength: float, blocks: str, mode: str, progress: Progress) -> Pipeline:
    """``pipeline`` with one LoRA more, which its transformer gets when it is next held; tells the user how many keys
    match. ``strength`` is -10 to 10; 0 leaves the pipeline as it is. ``blocks`` are such as ``double 0-9, single``,
    empty for all. ``mode``: ``separate`` computes beside each layer, ``merged`` adds to the weights, of which host
    memory keeps the old ones. Raises InputError for a choice out of range, CheckpointError for a damaged file or one
    for another model, MissingPackageError for ``separate`` without the package peft, UnsupportedError for a merge
    without memory for it, or an adapter that is not read."""
    if not (math.isfinite(strength) and abs(strength) <= MOST):
        raise InputError(f"strength {strength}", expected=f"{-MOST:g} to {MOST:g}", fix="The usual value is 1.")
    require_choice("mode", mode, LORA_MODES, "Choose separate.")
    with tensor_file(path) as file:
        shapes = {name: tuple(entry.shape) for name, entry in file.entries.items()}
        factor = _control_factor(path, file.metadata, pipeline.model.control_factor)
        noted = _metadata(file.metadata) or _adapter_config(path, shapes)
        layers = _layers_of(pipeline)
        biased = {name for name, layer in layers.items() if getattr(layer, "bias", None) is not None}
        own = {name: tuple(layer.weight.shape) for name, layer in layers.items()}
        match = matched(path, shapes, own, pipeline.spec, blocks, biased)
        progress.notify(match.message(path.stem))
        if strength == 0.0:
            progress.notify(f"{path.stem} has no effect at strength 0")
            return pipeline
        if mode == "separate":
            attribute("peft", "LoraConfig")
        copied = [own[name] for name, pair in match.pairs.items() if mode == "merged" or pair.of_weight]
        _require_room(path, sum(map(math.prod, copied)) * pipeline.precision.transformer.itemsize)
        wanted = {name for pair in match.pairs.values() for name in pair.names.values()}
        with torch.inference_mode(False):  # ComfyUI runs nodes inside it, and its tensors could not go on a layer
            tensors = file.read(wanted, lambda _bytes: progress.check())
    added = LoRA(
        path=path,
        strength=strength,
        blocks=blocks,
        mode=mode,
        pairs=match.pairs,
        tensors=tensors,
        stamp=next(iter(file.entries.values())).stamp,
        scales=_scales(match.pairs, tensors, noted),
        of_weight=frozenset(name for name, pair in match.pairs.items() if pair.of_weight),
    )
    before = (replace(each, of_weight=each.of_weight | (added.of_weight & {*each.pairs})) for each in on(pipeline))
    loras = LoRAs((*before, added), pipeline.precision.transformer, pipeline.spec.transformers)
    decision = Decision("LoRA", f"{path.stem} {strength:g}{f' ({blocks})' if blocks.strip() else ''}, {mode}")
    names = names_of_file(path, file.metadata)
    cautions = cautions_by_name(pipeline.spec, names, base=pipeline.model.names)
    for caution in cautions:
        progress.notify(f"{path.stem}: {caution.verdict}")
    decisions = (*pipeline.plan.decisions, decision, *cautions)
    plan = replace(pipeline.plan, offloader=pipeline.offloader.with_adapters(loras), decisions=decisions)
    weights = _unpacked(pipeline, added, own, progress)
    changed = replace(pipeline, plan=plan, model=replace(pipeline.model, weights=weights, control_factor=factor))
    trained = defaults_in(pipeline, json_object(file.metadata.get(OWN_DEFAULTS, "")))
    return _with_recipe(changed, added, names, trained, progress)


def _with_recipe(pipeline: Pipeline, lora: LoRA, names: Names, trained: dict[str, Any], progress: Progress) -> Pipeline:
    """``pipeline`` with the recipe that one of the ``names`` of ``lora`` gives away, a demo model with the defaults
    that it was ``trained`` for; tells the user. Unchanged in a replay, and for little strength or some blocks alone."""
    stem, model = lora.path.stem, pipeline.model
    recipe, name = recipe_named(pipeline.spec, () if any(model.request.earlier) else names, model.names)
    if not (trained if pipeline.is_demo else recipe):
        return pipeline
    if not changes_recipe(lora.strength, lora.blocks):
        where = f"strength {lora.strength:g}{f' ({lora.blocks})' if lora.blocks.strip() else ''}"
        progress.notify(f"{stem}: its recipe is not taken at {where}")
        return pipeline
    if pipeline.is_demo:
        pipeline = with_defaults(pipeline, trained)
    else:
        pipeline = replace(pipeline, model=replace(model, recipe=recipe))
    said = recipe_decisions(pipeline, (), name)
    progress.notify(f"{stem} changes the recipe: {said[0].verdict}")
    others = (each for each in pipeline.plan.decisions if each.subject != said[0].subject)
    return replace(pipeline, plan=replace(pipeline.plan, decisions=(*others, *said)))


def named(text: str) -> tuple[Path, float, str]:  # raises InputError for another text
    """File, strength and blocks of a text such as ``style.safetensors:0.8:double 0-9``; 1 and all by default."""
    match = NAMED.fullmatch(text)
    try:
        strength = float((match and match[2]) or 1.0)
    except ValueError:
        match = None
    if match is None:
        expected = "FILE.safetensors, then optionally a strength and blocks, with a colon before each"
        fix = "Write for example: style.safetensors:0.8:double 0-9, single"
        raise InputError(f"LoRA {text!r}", expected=expected, fix=fix)
    return Path(match[1]), strength, match[3] or ""


def _layers_of(pipeline: Pipeline) -> dict[str, Any]:
    """The layers of all transformers that a LoRA may change, by name, on the meta device."""
    layers: dict[str, Any] = {}
    for part in pipeline.spec.transformers:
        config = pipeline.configs[part]
        _, *classes = pipeline.spec.files.parts[part]
        named = str(config.get("_class_name"))
        cls: Any = attribute("diffusers", named if named in classes else classes[0])
        with construction(part, pipeline.model.source, MOST_TENSORS, lambda: None), empty_weights():
            module = cls.from_config(dict(config))
        layers |= {name: layer for name, layer in module.named_modules() if _is_layer(layer)}
    return layers


def on(pipeline: Pipeline) -> tuple[LoRA, ...]:
    adapters = pipeline.offloader.adapters
    return adapters.loras if isinstance(adapters, LoRAs) else ()


@dataclass(frozen=True, eq=False, repr=False)
class LoRAs:
    """The LoRAs of one pipeline, first to last, as an offloader's adapters."""

    loras: tuple[LoRA, ...]
    dtype: torch.dtype  # of factors beside weights that are narrower than 16 bits
    parts: tuple[str, ...]  # the transformers that they are on

    def __repr__(self) -> str:
        return str([(lora.path.name, lora.stamp, lora.strength, lora.blocks, lora.mode) for lora in self.loras])

    @property
    def key(self) -> Hashable:
        """Equal for the same files, blocks and modes in the same order, whatever the strengths beside the weights."""
        return tuple(lora.key for lora in self.loras)

    @property
    def in_weights(self) -> bool:
        return any(lora.in_weights for lora in self.loras)

    @property
    def separate(self) -> dict[str, LoRA]:
        """The LoRAs that compute beside the weights, by the names of their adapters in peft."""
        return {f"lora_{index}": lora for index, lora in enumerate(self.loras) if lora.mode == "separate"}

    def step(self) -> Step:
        return Step(Order.LORA, "LoRA", self._apply)

    def tune(self, module: nn.Module, active: bool) -> None:
        """Set the strengths of separate LoRAs in ``module``; unless ``active``, its layers compute without them."""
        if not (separate := self.separate):
            return
        from peft.tuners.tuners_utils import BaseTunerLayer

        layers: Any = ((name, layer) for name, layer in module.named_modules() if isinstance(layer, BaseTunerLayer))
        for layer_name, layer in layers:
            layer.enable_adapters(active)
            if active:
                layer.set_adapter(list(separate))
                for adapter, lora in separate.items():
                    if adapter in layer.scaling:
                        layer.set_scale(adapter, lora.strength * lora.scales[layer_name])
        module.requires_grad_(False)

    def _apply(self, part: str, module: Any) -> Callable[[], None] | None:
        """Put all LoRAs on the transformer ``part``; returns the undo, None for another part."""
        if part not in self.parts:
            return None
        with ExitStack() as undo:
            for lora in self.loras:
                if lora.in_weights:
                    undo.callback(_merge(module, lora))
            if self.separate:
                undo.callback(lambda: module.unload_lora() if getattr(module, "peft_config", None) else None)
            for adapter, lora in self.separate.items():
                _inject(module, lora, adapter, self.dtype)
            return undo.pop_all().close


def _unpacked(pipeline: Pipeline, lora: LoRA, shapes: Mapping[str, Any], progress: Progress) -> dict[str, PartBytes]:
    """The bytes of each part once ``lora`` made packed layers dense (blocks grow in proportion); the user is told."""
    before, weights = frozenset[str]().union(*map(_opened, on(pipeline))), dict(pipeline.weights)
    for part in (part for part in pipeline.spec.transformers if pipeline.model.storage.get(part)):
        own, left, more = weights[part], Counter(dict(weights[part].forms)), 0
        for name in _opened(lora) - before:
            alike = [each for each, count in left.items() if count and each[-1][0] == shapes[name]]
            form = next((each for each in alike if name in lora.of_weight or not each[0]), None)
            if form is not None:
                _, stored, beside, _, dense = form
                left[form] -= 1
                more += _bytes_of(dense) - sum(map(_bytes_of, (stored, *(each for _, each in beside))))
        if count := sum(dict(own.forms).values()) - left.total():
            share = 1 + more / own.total
            grown = (int(getattr(own, each.name) * share) for each in fields(own) if each.name != "forms")
            weights[part] = PartBytes(*grown, forms=tuple((+left).items()))
            progress.notify(f"{lora.path.stem}: {count} packed layers of {part} are dense now, {amount_of(more)} more")
    return weights


def _opened(lora: LoRA) -> frozenset[str]:  # layers that it makes dense where they are packed; merged, of exact codecs
    return frozenset(lora.pairs) if lora.mode == "merged" else lora.of_weight


def _bytes_of(described: tuple[Sequence[int], torch.dtype]) -> int:
    return math.prod(described[0]) * described[1].itemsize


class Alphas:
    """The ``alpha_pattern`` of a file: row numbers by the end of a layer's dotted name (``ends``) or by a simple
    regular expression (``patterns``). ValueError for an impossible alpha, or a search without end, as peft has."""

    def __init__(self, rows: Mapping[str, float]) -> None:
        self.values = list(rows.values())
        self.ends: dict[str, int] = {}
        self.patterns: list[tuple[int, re.Pattern[str]]] = []
        for index, (key, value) in enumerate(rows.items()):
            if not _plausible(value):
                raise ValueError(f"{value!r} is no strength")
            if re.fullmatch(r"\^?(\w|-|\\?\.)+", key):
                self.ends.setdefault(key.replace("\\", ""), index)
                continue
            if len(key) > MOST_NAME or not SIMPLE.fullmatch(key):
                raise ValueError(f"{key[:40]!r} is no simple pattern")
            self.patterns.append((index, re.compile(rf"(.*\.)?({key})")))
        if len(self.patterns) > MOST_PATTERNS:
            raise ValueError(f"{len(self.patterns)} patterns, {MOST_PATTERNS} at most")

    def of(self, names: Sequence[str], usual: float) -> float:
        """The alpha of the first row that fits one of a layer's ``names``, else ``usual``."""
        names = [name for name in names if len(name) <= MOST_NAME]
        found = [self.ends[end] for name in names for end in _ends(name) if end in self.ends]
        found += [index for index, pattern in self.patterns if any(map(pattern.fullmatch, names))]
        return self.values[min(found)] if found else usual


def _ends(name: str) -> Iterator[str]:
    """A dotted name behind ``^``, which stands for the whole, then as it is, and what is left of it behind each dot."""
    yield f"^{name}"
    while name:
        yield name
        name = name.partition(".")[2]


def _scales(
    pairs: Mapping[str, LoRAPair], tensors: Mapping[str, torch.Tensor], trained: Mapping[str, Any]
) -> dict[str, float]:
    """Alpha over rank of each layer: by its own alpha tensor, else (over the root of the rank with rsLoRA) by peft's
    settings ``trained``, if they are for such tensors; else 1."""
    alphas, scales = _pattern(trained, "alpha_pattern"), {}
    for name, pair in pairs.items():
        scales[name] = 1.0
        if pair.rank and ALPHA in pair.names:
            scales[name] = float(tensors[pair.names[ALPHA]].float()) / pair.rank
        elif trained and not pair.names.keys().isdisjoint(METHODS.get(str(trained.get("peft_type")), (UP,))):
            known = (name, role_of(next(iter(pair.names.values())))[1])  # ours, and the one that it was trained under
            # a LoKr of two whole matrices shows no rank
            rank = pair.rank or max(_pattern(trained, "rank_pattern").of(known, trained["r"]), 1.0)
            alpha = alphas.of(known, float(trained["lora_alpha"]))
            scales[name] = alpha / (math.sqrt(rank) if trained.get("use_rslora") else rank)
    return scales


def _pattern(trained: Mapping[str, Any], name: str) -> Alphas:  # CheckpointError for rows that Alphas refuses
    try:
        return Alphas({str(key): value for key, value in (trained.get(name) or {}).items()})
    except (ArithmeticError, AttributeError, TypeError, ValueError, re.error) as error:
        found = f"{name} {str(trained[name])[:60]} of a LoRA ({first_line(error)})"
        fix = "Export the LoRA again, or correct its adapter_config.json."
        raise CheckpointError(found, expected="patterns of layers with a number for each", fix=fix) from error


def _metadata(notes: Mapping[str, str]) -> dict[str, Any]:
    """The notes of diffusers on a transformer's LoRA in its file: ``lora_alpha``, ``alpha_pattern``, ``use_rslora``; or
    Genmo's for Mochi; empty for an absurd alpha or rank. Source: genmoai/mochi ``demos/fine_tuner/train.py``."""
    noted = json_object(notes.get("lora_adapter_metadata", "{}")) or {}
    own = {key.removeprefix("transformer."): value for key, value in noted.items() if "text_encoder" not in key}
    genmo = json_object(notes.get("kwargs", "{}")) or {}
    if "qkv_proj_lora_alpha" in genmo and "out_proj_lora_alpha" in genmo:
        outputs = dict.fromkeys(("proj_x", "proj_y"), genmo["out_proj_lora_alpha"])
        own = {"lora_alpha": genmo["qkv_proj_lora_alpha"], "alpha_pattern": outputs}
    own = {"r": 8, **own}  # peft's own
    return own if all(_plausible(own.get(name)) for name in ("lora_alpha", "r")) else {}


def _plausible(strength: Any) -> bool:
    return isinstance(strength, (int, float)) and abs(strength) < 1e9  # which NaN is not


def _control_factor(path: Path, metadata: Mapping[str, str], before: int) -> int:
    """The factor by which the control clip of an IC-LoRA is smaller than the video; that of LoRAs ``before`` where the
    file says none. Raises UnsupportedError for another factor than theirs, or one that is not read. Source: ComfyUI
    0.33 ``comfy_extras/nodes_lt.py`` ``LTXICLoRALoaderModelOnly``; Lightricks/LTX-2 400fd31."""
    for name in FACTORS:
        value = next((value for key, value in metadata.items() if key.endswith(name)), "1")
        known = re.fullmatch(rf"({FACTORS[name]})(?:\.0+)?", value if value not in ("", "None", "null") else "1")
        if known is None or (int(known[1]) != before and 1 not in (int(known[1]), before)):
            expected = f"{before if before > 1 and FACTORS[name] != '1' else FACTORS[name].strip('[]')}, or none"
            raise UnsupportedError(f"{path.name!r} with {name} {value[:20]}", expected=expected, fix="Load it alone.")
        before = max(before, int(known[1]))
    return before


def _adapter_config(path: Path, names: Mapping[str, Any]) -> dict[str, Any]:
    """The adapter_config.json beside a file of peft's, whose tensor ``names`` have peft's prefix, with each method's
    alpha as ``lora_alpha``; empty where there is none. Raises UnsupportedError for a method that is not read, and
    CheckpointError for a file that cannot be read, whose strengths would be missed."""
    beside, is_named = path.with_name("adapter_config.json"), path.stem == "adapter_model"  # as peft names it
    alone = is_named or len([*path.parent.glob("*.safetensors")]) == 1  # else it may be of another file
    if not (alone and beside.is_file() and any(name.startswith("base_model.model.") for name in names)):
        return {}
    noted = read_json(beside, "an adapter's configuration")
    method = str(noted.get("peft_type"))
    for name, read in (("peft_type", METHODS), ("init_lora_weights", STARTS)):
        if noted and (value := str(noted.get(name, True))) not in read:
            found = f"{path.name!r} beside an adapter_config.json with {name} {value[:20]!r}"
            fix = "Merge it into the model with peft, and load that."
            raise UnsupportedError(found, expected=", ".join(read), fix=fix)
    alpha, rank = noted.get("lora_alpha" if method == "LORA" else "alpha"), noted.get("r", 8)  # 8: peft's own
    known = method in METHODS and _plausible(alpha) and _plausible(rank) and rank > 0
    return {**noted, "lora_alpha": alpha, "r": rank} if known else {}


def _require_room(path: Path, more: int) -> None:
    """Raise UnsupportedError where the host has no room for weights merged beside the old ones, which are kept."""
    if more > (room := host_free_bytes() + swap_free_bytes()):
        found = f"{amount_of(room)} of host memory to merge {path.stem!r}, which takes {amount_of(more)} of it"
        fix = "Set mode to separate, or close other programs."
        raise UnsupportedError(found, expected=f"{amount_of(more - room)} more", fix=fix)


def _merge(module: nn.Module, lora: LoRA) -> Callable[[], None]:
    """Add the products to weights and biases, in fp32 and rounded once; the undo puts the very tensors back. A packed
    Linear is made dense if it is exact or the LoRA depends on it (``of_weight``); else raises UnsupportedError."""
    layers: dict[str, Any] = {name: module.get_submodule(name) for name in _names_in(module, lora, merged=True)}
    dense = {name for name in lora.of_weight if isinstance(layers.get(name), StoredLinear)}
    quantised = [each for name, each in layers.items() if not (name in dense or _is_plain(each) or is_exact(each))]
    if quantised:
        layer = quantised[0]
        stored = layer.stored if isinstance(layer, Stored) else layer.weight
        raise UnsupportedError(
            f"merging {lora.path.stem!r} into {type(layer).__name__} weights kept as {stored.dtype} in "
            f"{len(quantised)} of {len(layers)} layers",
            expected="weights in the dtype that computes, 16 bits or more",
            fix="Set mode to separate, or weights on the load node to bf16 or fp16.",
        )
    with ExitStack() as undo:  # closed by a failure, so that another try begins with the same weights
        for name, layer in layers.items():
            if isinstance(layer, StoredLinear):  # what is added must not be rounded to its few bits
                undo.callback(opened(layer))
            weight, delta = layer.weight, lora.delta(name)
            own = weight.data.float()
            product = lora.pairs[name].product(lora.tensors, own, delta)
            if delta.magnitude is None:
                changed = own + (lora.strength * lora.scales[name]) * product
            else:
                of_sum = PEFT_MAGNITUDE in lora.pairs[name].names[MAGNITUDE]
                longer = _lengthened(own, lora.scales[name] * product, delta.magnitude, of_sum)
                changed = own + lora.strength * (longer - own)
            # by the layer: a host may have put another Parameter there
            undo.callback(lambda of, data: setattr(of.weight, "data", data), layer, weight.data)
            weight.data = changed.to(weight.dtype)
            if delta.bias is not None:
                undo.callback(lambda of, data: setattr(of.bias, "data", data), layer, layer.bias.data)
                layer.bias.data = (layer.bias.data.float() + lora.strength * delta.bias.float()).to(layer.bias.dtype)
        return undo.pop_all().close


def _lengthened(weight: torch.Tensor, product: torch.Tensor, magnitude: torch.Tensor, of_sum: bool) -> torch.Tensor:
    """The sum of a weight and what a DoRA adds, its rows (or columns) as long as the file says; rows are measured after
    the sum (``of_sum``, as peft does) or before it (as ComfyUI). Source: peft ``tuners/lora/dora.py``; ComfyUI
    ``comfy/weight_adapter/base.py``."""
    flat, changed = weight.flatten(1), (weight + product).flatten(1)
    if magnitude.shape[0] == flat.shape[0]:
        length = (changed if of_sum else flat).norm(dim=1, keepdim=True)
    else:  # of a convolution's input channels, each with its window
        magnitude, changed = magnitude[..., None], changed.unflatten(1, (magnitude.shape[1], -1))
        length = changed.norm(dim=(0, 2), keepdim=True)
    return (changed * (magnitude / (length + torch.finfo(torch.float32).eps))).view_as(weight)


def _inject(module: Any, lora: LoRA, adapter: str, dtype: torch.dtype) -> None:
    """Put peft's layers, named ``adapter``, around the layers of the LoRA, factors in the dtype of the weights beside
    them, or ``dtype`` where that is narrower than 16 bits; does nothing if all of it is merged."""
    state: dict[str, torch.Tensor] = {}
    with without_unpacking(module), warnings.catch_warnings():
        names = _names_in(module, lora, merged=False)
        biased = any(lora.pairs[name].has_bias for name in names)
        for name in names:
            layer: Any = module.get_submodule(name)
            layer = getattr(layer, "base_layer", layer)  # where peft has put an earlier LoRA around it
            weight = layer.weight
            down, up, bias, _ = lora.delta(name)
            wide = weight.dtype if weight.dtype in WIDE else dtype
            if isinstance(layer, (nn.Conv2d, nn.Conv3d)):
                down, up = down.reshape(-1, *weight.shape[1:]), up.reshape(up.shape[0], -1, *[1] * (weight.ndim - 2))
            else:  # some trainers write those of a Linear as of a convolution
                down, up = down.flatten(1), up.flatten(1)
            state[f"{name}.lora_A.weight"] = down.to(wide).contiguous()
            state[f"{name}.lora_B.weight"] = up.to(wide).contiguous()
            if biased:  # peft's layers have all of them one, which it scales as it does the product
                given = torch.zeros(up.shape[0]) if bias is None else bias.float() / (lora.scales[name] or 1.0)
                state[f"{name}.lora_B.bias"] = given.to(wide)
        warnings.filterwarnings("ignore", module="peft")  # of a second LoRA, and of layers whose names only end alike
        if not state:
            return
        module.load_lora_adapter(state, prefix=None, adapter_name=adapter, low_cpu_mem_usage=True)
    module.requires_grad_(False)


def _names_in(module: nn.Module, lora: LoRA, merged: bool) -> list[str]:
    """The layers of ``lora`` in this transformer whose additions go into the weights (``merged``), or those beside."""
    layers = {name for name, _ in module.named_modules()}
    inside = layers if lora.mode == "merged" else lora.of_weight
    return [name for name in lora.pairs if name in layers and merged == (name in inside)]


def _is_plain(layer: nn.Module) -> bool:
    """Tell whether an addition to ``weight`` stays: packed layers make theirs again at each use."""
    weight = layer._parameters.get("weight")
    return _is_layer(layer) and weight is not None and type(weight.data) is torch.Tensor and weight.dtype in WIDE


def _is_layer(layer: nn.Module) -> bool:
    """Tell whether a LoRA may be for this module: a matrix, a convolution, or a norm, whose weight has one axis."""
    weight = layer._parameters.get("weight")
    return isinstance(layer, LAYERS) or (weight is not None and weight.ndim == 1)
