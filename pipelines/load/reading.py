"""Readers of a pipeline's parts, strict about configuration and weights, and of its tools: tokenizers, processors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...compat.checkpoints import packed
from ...compat.checkpoints.headers import STORED
from ...compat.checkpoints.packed import Stored, is_table, pack, packable
from ...compat.checkpoints.weights import is_view, read_json, read_sides, read_tensors
from ...compat.decision import Decision
from ...compat.device import probes
from ...compat.device.execution import HOST
from ...compat.device.facts import GIBIBYTE, DeviceFacts, facts_for, locks_host_memory, value_or
from ...compat.device.failures import is_shortage
from ...compat.device.precision import FP32
from ...compat.device.probe_store import UNUSABLE, WRONG, ProbeStore
from ...compat.device.quirks import policy_for
from ...compat.errors import CheckpointError, MissingPackageError, UnsupportedError, first_line, sentence
from ...compat.memory.offloader import DISK, HostWeights, Views, choose_host_weights, mark_views
from ...compat.memory.parts import PartBytes, denoises, part_bytes, role_of
from ...compat.memory.statistics import amount_of, reading_of
from ...compat.memory.transfer import casts_wrongly, maps_files
from ...compat.output_check import fault_in_weight
from ...compat.packages import attribute, empty_encoder, fill, names_in, unusable
from ...compat.transforms.fp16 import apply_fp16_safe, fp32_output_works
from ...compat.transforms.order import Order, Step
from ..base import Progress
from ..family import FamilySpec
from ..files.part import PartFiles, construction, empty_weights, require_counts, require_plausible, stays, tool_configs
from ..keys import is_another_model, listed
from ..pipeline import Parts
from ..vae.tiled import decode_as_published


def reader_of(files: PartFiles) -> Callable[[Progress], nn.Module]:
    """A function that reads the part when it is called: on the CPU, in evaluation mode, outside inference mode."""

    def read(progress: Progress) -> nn.Module:
        with torch.inference_mode(False), torch.no_grad():
            build = _built_by_diffusers if files.library == "diffusers" else _built_by_transformers
            views: set[int] = set()
            module = build(files, progress, views).eval().requires_grad_(False)
            for name, value in files.settings.items():
                setattr(module, name, value)
            decode_as_published(module)
            mark_views(module, Views(frozenset(views), files.staged))
            return module

    return read


def _tensors(
    files: PartFiles, advance: Callable[[int], None], views: set[int], leave: Container[str] = ()
) -> dict[str, torch.Tensor]:
    """The tensors of a part, without those named in ``leave``, in their dtypes (where fp16 overflows, the part's own);
    adds to ``views`` the addresses of views of a file. Raises CheckpointError for a spoilt weight."""
    tensors: dict[str, torch.Tensor] = {}
    wanted = {name: entry for name, entry in files.entries.items() if name not in leave}
    for dtype in sorted({files.becomes(name) for name in wanted}, key=str):
        mine = {name: entry for name, entry in wanted.items() if files.becomes(name) is dtype}
        tensors |= read_tensors(mine, dtype, advance, files.mapped)
        if dtype is torch.float16 and dtype is not files.dtype:  # what overflows in it keeps the part's dtype
            high = {name for name in mine if tensors[name].is_floating_point() and not tensors[name].isfinite().all()}
            tensors |= read_tensors({name: mine[name] for name in high}, files.dtype, lambda _: None)
    for name, tensor in tensors.items():
        if files.mapped and files.may_be_view(name, files.entries[name]):
            views.add(tensor.data_ptr())
        _require_sound(files, name, tensor)
    return tensors


def _require_sound(files: PartFiles, name: str, tensor: torch.Tensor) -> None:  # else CheckpointError
    fault = fault_in_weight(name, tensor)
    if fault:
        found = f"{fault} in the weight {name!r} of {str(files.entries[name].file)!r}"
        fix = "Download this file again. A download that was not resumed properly can leave zeros."
        raise CheckpointError(found, expected="weights as published", fix=fix)


def _built_by_diffusers(files: PartFiles, progress: Progress, views: set[int]) -> nn.Module:
    """The module as diffusers builds it, with its weights; those that stay packed are packed as in the file."""
    cls: Any = attribute("diffusers", files.cls)
    with construction(files.name, files.folder, len(files.entries), progress.check), empty_weights():
        module: nn.Module = cls.from_config(dict(files.config))
    files = _fitting(files, module, progress)
    advance = reading_of(files.name, sum(entry.total_bytes for entry in files.entries.values()), progress)
    layers = packable(module, exact=True) if files.keeps_packed or files.storage != "auto" else {}
    kept = {
        name: layers[layer]
        for name, entry in files.entries.items()
        if (layer := name.removesuffix(".weight")) in layers and stays(files, name, entry)
    }
    tensors = _tensors(files, advance, views, kept)
    for name, linear in kept.items():
        _keep_packed(files, name, linear, advance, views)
    module.load_state_dict(tensors, strict=False, assign=True)  # what is packed is there already
    return module


def _fitting(files: PartFiles, module: nn.Module, progress: Progress) -> PartFiles:
    """``files`` with just the tensors of the empty ``module``; the user is told of the few that it has no place for.
    Raises CheckpointError for a missing one, another shape, or tensors of another model."""
    wanted = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    unused = sorted(files.entries.keys() - wanted.keys())
    strange = unused if unused and is_another_model(unused, wanted) else []
    _require_same(files, wanted.keys() - files.entries.keys(), strange)
    for name, shape in wanted.items():
        _require_shape(files, name, shape)
    if not unused:
        return files
    progress.notify(f"{files.name}: tensors that {files.cls} has no place for are left out: {listed(unused)}")
    return replace(files, entries={name: files.entries[name] for name in wanted})


def _keep_packed(
    files: PartFiles, name: str, layer: nn.Linear | nn.Embedding, advance: Callable[[int], None], views: set[int]
) -> None:
    """Read the packed weight ``name`` and its scales into ``layer``; adds the address of a view to ``views``."""
    entry = files.entries[name]
    _require_shape(files, name, tuple(layer.weight.shape))
    stored = read_tensors({name: entry}, None, advance, files.mapped)[name]
    if files.mapped and is_view(entry):
        views.add(stored.data_ptr())
    sides = read_sides(entry)
    _require_sound(files, name, stored)
    for side in sides.values():
        _require_sound(files, name, side.flatten())
    pack(layer, stored, files.becomes(name), entry.codec, sides=sides, group=entry.group, by_bits=files.by_bits)


def _built_by_transformers(files: PartFiles, progress: Progress, views: set[int]) -> nn.Module:
    """The module as transformers builds it, which knows the older names of its tensors; unknown ones are left out,
    packed ones packed as in the file, tied tables shared. CheckpointError for missing tensors or other shapes."""
    cls: Any = attribute("transformers", files.cls)
    with construction(files.name, files.folder, len(files.entries), progress.check):
        if files.folder.is_dir():
            config = cls.config_class.from_pretrained(str(files.folder), local_files_only=True, trust_remote_code=False)
        else:
            config = cls.config_class.from_dict(dict(files.config))
        module: Any = empty_encoder(cls, config, files.dtype)
        names = names_in(module, files.entries)
    shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    for name, there in names.items():
        _require_shape(files, name, shapes[there])
    files = replace(files, entries={name: files.entries[name] for name in names})
    advance = reading_of(files.name, sum(entry.total_bytes for entry in files.entries.values()), progress)
    layers = {f"{name}.weight": layer for name, layer in module.named_modules()}
    kept = {
        name: layers[there]
        for name, there in names.items()
        if stays(files, name, files.entries[name])
        and (type(layers.get(there)) is nn.Linear or (type(layers.get(there)) is nn.Embedding and is_table(name)))
    }
    tensors = _tensors(files, advance, views, kept)
    missing = set(fill(module, {names[name]: tensor for name, tensor in tensors.items()}, files.dtype))
    for name, layer in kept.items():
        if not isinstance(layer, Stored):  # a file may have a table under two names
            _keep_packed(files, name, layer, advance, views)
    for one, other in module.all_tied_weights_keys.items():  # two tables of one weight
        for target, source in ((one, other), (other, one)):
            if target in missing and isinstance(layers.get(source), Stored):
                if not isinstance(layers[target], Stored):  # newer transformers share the table itself
                    own = layers[source]
                    pack(layers[target], own.stored, files.dtype, codec=own.codec, sides=own.sides, group=own.group)
                missing.discard(target)
    _require_same(files, missing - {names[name] for name in kept})
    return module


def _require_same(files: PartFiles, missing: Collection[str], unexpected: Collection[str] = ()) -> None:
    if missing or unexpected:
        wrong = f"{'missing' if missing else 'unexpected'} tensors {listed(sorted(missing or unexpected))}"
        found = f"{wrong} in the {files.name} of {str(files.folder)!r}"
        fix = "Download config.json and weights from the same place."
        raise CheckpointError(found, expected=f"the tensors of {files.cls} as config.json describes it", fix=fix)


def _require_shape(files: PartFiles, name: str, shape: tuple[int, ...]) -> None:  # else CheckpointError
    found = tuple(files.entries[name].shape)
    if found != shape:
        raise CheckpointError(
            f"the weights of the {files.name} in {str(files.folder)!r} do not fit its config.json ({name} is {found})",
            expected=f"{shape}, as {files.cls} is described",
            fix="Download config.json and weights from the same place.",
        )


def tool_reader(family: FamilySpec, library: str, folder: Path) -> Callable[[], Any]:
    """The function that reads a configuration (``diffusers``), or a tokenizer or processor (``transformers``)."""

    def read() -> Any:
        if library == "diffusers":
            file = next(iter(sorted(folder.glob("*_config.json"))), folder / "scheduler_config.json")
            config = read_json(file, f"the {folder.name}")
            require_plausible(folder.name, file, config, [tool_configs(family).get(folder.name, {})])
            return config
        for file in folder.glob("*config.json"):
            require_counts(file, read_json(file, f"the {folder.name}"))
        cls: Any = attribute("transformers", _processor_class(folder))
        try:
            return cls.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        except ModuleNotFoundError as error:  # transformers' own modules are imported late
            raise unusable("transformers", error) from error
        except ImportError as error:  # its text names a package that this tokenizer or processor needs
            found, expected = f"{str(folder)!r} cannot be read ({first_line(error)})", "the package that it requires"
            fix = "Install that package into the Python that runs ComfyUI or anygpu."
            raise MissingPackageError(found, expected=expected, fix=fix) from error
        except Exception as error:  # each tokenizer's reader has errors of its own for a damaged file
            found, expected = f"{str(folder)!r} cannot be read ({first_line(error)})", f"the files of a {folder.name}"
            raise CheckpointError(found, expected=expected, fix="Download this folder again.") from error

    return read


def _processor_class(folder: Path) -> str:
    """The transformers class that reads a tokenizer or an image processor. transformers 5.0 rebuilds a Llama 3
    ``tokenizer.json`` as another kind and drops all spaces (huggingface/transformers#45488): it is taken as it is."""
    if folder.name.endswith(("processor", "extractor")):
        return "AutoImageProcessor"
    config = folder / "tokenizer_config.json"
    named = read_json(config, "a tokenizer").get("tokenizer_class", "") if config.is_file() else ""
    whole = (folder / "tokenizer.json").is_file()
    return "PreTrainedTokenizerFast" if whole and str(named).startswith("Llama") else "AutoTokenizer"


log = logging.getLogger(__name__)
FILE_CHOICES, FLOAT8 = ("auto", "as in file"), "float8"


def stored_as_chosen(
    files: Mapping[str, PartFiles],
    chosen: Any,
    text_parts: tuple[str, ...],
    facts: DeviceFacts,
    results: ProbeStore | None = None,
) -> dict[str, PartFiles]:
    """``files`` of every part with how it is kept: transformer and text encoders as chosen, all else as it computes.
    Where fp32 computes on anything but the CPU, ``auto`` keeps the 16 bits that a file has: half as much to hold and to
    send, widened exactly at each use. The VAE is small, and its convolutions run once per tile. Each device is asked
    how it casts, but goes by ``results`` where these are quiet. ``chosen`` is a ``LoadRequest``, or has its
    ``weights``, ``text_weights`` and ``devices``. PackError for a choice that is unknown or impossible here."""
    packed.require_storable(weights=chosen.weights, text_weights=chosen.text_weights)
    choices = {name: chosen.weights for name in files if denoises(name)}
    choices |= dict.fromkeys(text_parts, chosen.text_weights)
    places = {name: torch.device(chosen.devices.get(role_of(name), facts.device)) for name in files}
    wrong = partial(_wrong, results if results is not None and results.quiet else None)
    by_bits = {place: wrong("bf16", place) for place in set(places.values())}
    mapped, stored = maps_files(facts, results), {}
    for name, part in files.items():
        place, choice = places[name], choices.get(name, "auto")
        if name in choices and place.type != HOST.type:
            choice = _narrow(part, place, wrong) if choice == "auto" else choice
            _require_castable(part, choice, place, wrong)
        stored[name] = replace(_stored(part, choice, place, wrong), by_bits=by_bits[place], mapped=mapped)
    return stored


Wrong = Callable[[str, torch.device], bool]  # True if a device spoils a dtype: ``bf16``, ``fp16`` or ``float8``


def _wrong(kept: ProbeStore | None, name: str, device: torch.device) -> bool:
    """True if ``device`` spoils the dtype ``name``: by the results that are ``kept``, which know of their own device
    alone, else by a probe, which raises torch.OutOfMemoryError with advice where the device has no room for it."""
    if kept is not None:
        answer = kept[name if name == FLOAT8 else f"cast.{name}_to_fp32"]
        return device == kept.facts.device and answer.status in (WRONG, UNUSABLE)
    if name == FLOAT8:
        return bool(value_or(lambda: probes.eight_bits(device), "no answer"))
    try:
        return casts_wrongly(device, probes.DTYPES[name])
    except TypeError:  # of MPS before macOS 14, which has no such dtype: widened by bits
        return True
    except RuntimeError as error:
        if not is_shortage(error):
            facts_for(device)  # says in one line that it does not answer
            raise
        found, fix = f"no free memory on {device}", "Close other programs that use this device, or choose another one."
        expected = "room for 128 KB, to ask how it casts, and for one layer"
        raise torch.OutOfMemoryError(sentence(found, expected, fix)) from error


def storage_step(files: Mapping[str, PartFiles]) -> Step:
    """The step that packs weights as chosen; those that a file has packed were read so."""

    def store(part: str, module: nn.Module) -> Callable[[], Any] | None:  # the undo, None where nothing is packed
        described = files.get(part)
        if described is None or described.storage == "auto":
            return None
        own = {name: STORED[e.dtype] for name, e in described.entries.items() if not e.is_packed}
        back = packed.packed(module, described.storage, own, described.by_bits)
        if back is not None:
            log.info("%s: weights %s", part, described.storage)
        return back

    return Step(Order.STORAGE, "storage of weights", store)


def storage_decisions(files: Mapping[str, PartFiles]) -> tuple[Decision, ...]:
    """A decision for each part whose weights are stored smaller than they compute."""
    made = []
    for name, choice in storage_choices(files).items():
        how = "as in the file" if choice in FILE_CHOICES else choice
        size = f"{files[name].total_bytes / GIBIBYTE:.1f} of {_dense_bytes(files[name]) / GIBIBYTE:.1f} GB"
        made.append(Decision(f"{name} weights", f"kept {how}", size))
    return tuple(made)


def storage_choices(files: Mapping[str, PartFiles]) -> dict[str, str]:
    """Part to its choice of storage, where its weights are stored smaller than they compute."""
    return {name: part.storage for name, part in files.items() if part.total_bytes < _dense_bytes(part)}


def _dense_bytes(part: PartFiles) -> int:
    return replace(part, storage="auto", keeps_packed=False).total_bytes


def _narrow(part: PartFiles, device: torch.device, wrong: Wrong) -> str:
    """The storage that ``auto`` means on ``device``: ``as in file`` for a part that computes all in fp32 from 16 bits
    that ``device`` widens correctly (bf16 always, by bits), else ``auto``."""
    halves = {entry.dtype for entry in part.entries.values()} & {"BF16", "F16"}
    if part.dtype is not torch.float32 or part.dtype_of is not None or not halves:
        return "auto"
    return "auto" if "F16" in halves and wrong("fp16", device) else "as in file"


def _require_castable(part: PartFiles, choice: str, device: torch.device, wrong: Wrong) -> None:
    """Raise UnsupportedError for float8 that ``device`` lacks, and fp16 weights that it would widen wrongly."""
    if choice == "fp8" and wrong(FLOAT8, device):
        expected, fix = "a device with float8", "Choose weights int8, which take no more memory."
        raise UnsupportedError(f"weights 'fp8' on {device}, which has no float8", expected=expected, fix=fix)
    half = choice in ("as in file", "fp16") and any(entry.dtype == "F16" for entry in part.entries.values())
    if half and part.dtype is not torch.float16 and wrong("fp16", device):
        found = f"weights {choice!r} of a file in fp16, which {device} casts wrongly"
        fix = "Choose weights auto, which casts them on the host."
        raise UnsupportedError(found, expected="a device that casts fp16 to fp32 and back correctly", fix=fix)


def _stored(part: PartFiles, choice: str, device: torch.device, wrong: Wrong) -> PartFiles:
    """``part`` stored by ``choice``. Its packed weights stay so with one of FILE_CHOICES, unless the file has float8,
    which ``device`` lacks: then they are made dense on the host while they are read."""
    lacks = any(e.dtype in ("F8_E4M3", "F8_E5M2") for e in part.entries.values()) and wrong(FLOAT8, device)
    packs = any(packed.stays_packed(name, entry) for name, entry in part.entries.items())
    return replace(part, storage=choice, keeps_packed=packs and choice in FILE_CHOICES and not lacks)


@dataclass(slots=True)
class SafeFp16:
    """The rewrite of one pipeline's transformer, until it is abandoned."""

    family: str  # a family id
    device: Any  # where the transformer will run; it is asked once for fp32-output products
    active: bool = True  # whether the transformer is rewritten when it is next read

    def abandon(self, parts: Parts, files: PartFiles) -> None:
        """Make the transformer fp32, from its next reading on."""
        self.active = False
        parts.readers[files.name] = reader_of(replace(files, dtype=FP32, dtype_of=None))

    def apply(self, part: str, module: nn.Module) -> Callable[[], None] | None:
        """Rewrite ``module`` if ``part`` denoises and this is active; returns the undo, else None."""
        if not denoises(part) or not self.active:
            return None
        applied = apply_fp16_safe(module, self.family, fp32_output_works(self.device))
        (log.warning if applied.left else log.info)("%s", applied)
        return applied.restore


def sizes_of(files: Iterable[PartFiles]) -> dict[str, PartBytes]:
    """The bytes of each part, by its name: as stored, per block and layer, and dense."""
    sizes = {}
    for part in files:
        size = part_bytes({name: part.bytes_of(name, entry) for name, entry in part.entries.items()})
        sizes[part.name] = replace(size, dense=part.dense_bytes, forms=part.forms)
    return sizes


def fit_host_memory(
    files: Mapping[str, PartFiles], facts: DeviceFacts, free: int, swap: int
) -> tuple[dict[str, PartFiles], HostWeights]:
    """``files``, of which parts that do not fit in host memory together are read as views of their files, and how the
    host weights of each part are kept. The part that saves most becomes views first; a device that avoids views gets
    its weights by way of ordinary memory. Raises UnsupportedError where a part that no view can hold does not fit."""
    sizes = {name: part.total_bytes for name, part in files.items()}
    views = {name: part.view_bytes for name, part in files.items()}
    pins = policy_for(facts).pins and locks_host_memory(facts.device)
    host_weights = choose_host_weights(sizes, views, free, pins, facts.unified)
    left = host_weights.of(DISK)
    for name, part in files.items():
        held = sizes[name] - (views[name] if part.mapped or name in left else 0)
        if held > free + swap:
            raise UnsupportedError(
                f"{amount_of(free + swap)} of host memory for the {name}, which takes {amount_of(held)} of it",
                expected=f"{amount_of(held - free - swap)} more",
                fix="Close other programs, add swap (on Windows: enlarge the page file), or use a safetensors file in "
                "the precision that computes: it can stay on disk.",
            )
    kept = {name: replace(files[name], mapped=True, staged=not files[name].mapped) for name in left}
    return {**files, **kept}, host_weights
