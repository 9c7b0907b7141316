"""Builds a pipeline from a model folder: its family, its parts, and the dtype of each part.

Nothing heavy is read here: configurations and safetensors headers only, so that a missing shard is noticed at once, and
a part that a run does not use is never read.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...compat.checkpoints.headers import reading
from ...compat.checkpoints.weights import read_json
from ...compat.decision import AUTO, Decision
from ...compat.device.facts import (
    DeviceFacts,
    device_fault,
    empty_host_cache,
    facts_for,
    free_bytes,
    host_free_bytes,
    swap_free_bytes,
)
from ...compat.device.precision import FP32, Precision, copies_decision, precision_for
from ...compat.device.probe_store import ProbeStore
from ...compat.device.quirks import abilities
from ...compat.device.wheels import unusable_device
from ...compat.errors import CheckpointError
from ...compat.memory.offloader import Offloader, offloader_for
from ...compat.memory.parts import denoises, role_of
from ...compat.probe_results import probe_results_of
from ...compat.transforms.attention import Attention, attention_for, avoided_by, by_time
from ...compat.transforms.conv3d_choice import kept_timings
from ...compat.transforms.fp16 import stored_dtype
from ...compat.transforms.order import Preparation, attention_step, conv3d_step
from ..base import DEMOS, Parts, Pipeline, Progress, Silent, Tools
from ..family import FamilySpec
from ..memory.estimates import sizes_of
from ..memory.fit import fit_host_memory, host_weight_decisions, offload_options, require_room
from ..registry import FAMILIES
from ..settings import recipe_decisions
from ..speed import SpeedRequest, speed_for
from . import storage
from .configs import require_plausible
from .evidence import evidence_of, published, variant_of
from .keys import TRANSFORMER
from .others import other_class
from .part import PartFiles, part_files, reader_of, tool_reader, without_text
from .single_file import Composed, Files, composed, encoder_task, family_in, lone_task, transformer_file
from .storage import SafeFp16

INDEX = "model_index.json"
OF_DEMOS = "_anygpu_parts_of"  # part to the demo model that ships it, for a part that two of them have
HEAD_WIDTH = 128  # of a transformer whose configuration leaves it to the class


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """What the user asks of loading.

    Args:
        model: folder of a diffusers pipeline, or of a transformer alone.
        base: folder of the pipeline with the parts that a lone transformer lacks; ``auto`` searches.
        image_encoder: folder with ``image_encoder`` and ``feature_extractor`` (FramePack); ``auto`` searches.
        variant, precision, offload: choices; ``auto`` decides.
        device: None for the default device; facts that were gathered before stand for the device they are of.
        search: folders in which ``auto`` looks for other models.
        attention: which kernel the transformer's attention runs, for this pipeline alone.
        state: folder where probe results are kept; None asks the device nothing and relies on the tables.
        quiet: goes by what is kept there, so that the device is neither asked nor timed.
        files: single files to compose the pipeline of; ``model`` is then the transformer's.
        weights, text_weights: how those of transformer and text encoders are kept, of ``packed.CHOICES``.
        speed: fused kernels, compile, profile.
        devices: part (``transformer``, ``text_encoder`` for all of them, ``vae``) to where it computes; ``auto`` for
            ``device``.
        keep_free_gb: memory of the device that offload ``auto`` leaves to others.
        stands_in_for: the published model in whose place this demo model runs; empty otherwise.
        cards: the accelerators, ``device`` among them, that :mod:`~anygpu.pipelines.placement` may share the parts out
            to, with the bytes that a run may take there, None where unknown; empty for ``device`` alone.
    """

    model: Path
    base: Path | None = None
    image_encoder: Path | None = None
    variant: str = AUTO
    precision: str = AUTO
    offload: str = AUTO
    device: Any = None
    search: Sequence[Path] = ()
    attention: str = AUTO
    state: Path | None = None
    files: Files | None = None
    weights: str = AUTO
    text_weights: str = AUTO
    speed: SpeedRequest = field(default_factory=SpeedRequest)
    devices: Mapping[str, Any] = field(default_factory=dict)
    keep_free_gb: float = 0.0
    quiet: bool = False
    stands_in_for: str = ""
    cards: Mapping[torch.device, int | None] = field(default_factory=dict)


def load(
    request: LoadRequest,
    progress: Progress | None = None,
    make_room: Callable[[int, torch.device], None] | None = None,
    hosted: Callable[..., Offloader] | None = None,
) -> Pipeline:
    """The pipeline in ``request.model``, ready to run; weights are read when a stage first needs them.

    Args:
        make_room, hosted: how a host around us frees memory, and its own offloader, which offload ``auto`` then means.

    Raises:
        PackError: files that are missing, damaged or unknown; a choice that this model or machine cannot do.
    """
    progress = progress or Silent()
    with reading(request.model):
        single, family, folders, tools, told = _sources(request, progress)
    facts, probes = _machine(request)
    precision = precision_for(family.precision, facts, request.precision, probes)
    files = _part_files(family, folders, precision, {} if single is None else single.files)
    files = storage.with_storage(files, request, family.text_parts, precision, facts, probes)
    progress.check()
    sizes = {name: part.total_bytes for name, part in files.items()}
    files, host = fit_host_memory(files, facts, _host_room(sum(sizes.values())), swap_free_bytes())
    free, weights = free_bytes(facts.device), sizes_of(files.values())
    options = offload_options(request.devices, request.keep_free_gb, request.state, host)
    require_room(weights, facts.device, facts.total_bytes or None if make_room or hosted else free, options)
    variant, guessed = variant_of(family, request.variant, request.model, files["transformer"])
    attention = _attention(request.attention, files["transformer"].config, precision, facts, probes)
    safe = SafeFp16(family.id, facts.device, active=precision.safe)
    convolutions = conv3d_step(abilities(facts, probes), kept_timings(facts, probes))
    speed = speed_for(request.speed, facts, request.devices, precision, probes, attention)
    steps = (storage.storage_step(files), convolutions, safe.step(), attention_step(attention), *speed.steps())
    parts = _parts(files, Preparation(steps), safe if request.precision == AUTO else None)
    hosted = speed.host_for(request.offload, hosted)
    offloader, offload = offloader_for(
        request.offload, parts, facts.device, sizes, free=free, make_room=make_room, hosted=hosted, options=options
    )
    speed.settle_offload(offloader.mode, request.offload != AUTO)
    more = (*storage.decisions(files), *speed.decisions(), *host_weight_decisions(offloader))
    pipeline = Pipeline(
        spec=family,
        task=_task(family, folders["transformer"]) if single is None else single.task,
        parts=parts,
        facts=facts,
        precision=precision,
        offloader=offloader,
        tools=tools,
        configs={name: part.config for name, part in files.items()},
        variant=variant,
        source=request.model,
        decisions=(precision.decision, offload, attention.decision, *copies_decision(precision, facts, probes), *more),
        speed=speed,
        weights=weights,
        probes=probes,
        storage=storage.smaller(files),
        stands_in_for=request.stands_in_for,
        request=request if single is None else _resolved(request, single),
    )
    return replace(pipeline, decisions=(*pipeline.decisions, *told, *recipe_decisions(pipeline, guessed)))


def _machine(request: LoadRequest) -> tuple[DeviceFacts, ProbeStore | None]:
    """The facts of the device, and what it answered; raises for a device that does not answer."""
    facts = facts_for(request.device)
    if fault := device_fault(facts.device):
        raise unusable_device(facts, fault)
    return facts, None if request.state is None else probe_results_of(facts, request.state, request.quiet)


def _resolved(request: LoadRequest, single: Composed) -> LoadRequest:
    """``request`` with the file of each part, also of those that were left to ``auto``."""
    assert request.files is not None
    files = {name: part.folder for name, part in single.files.items() if part.folder.is_file()}
    return replace(request, files=replace(request.files, parts={**request.files.parts, **files}))


def _sources(
    request: LoadRequest, progress: Progress
) -> tuple[Composed | None, FamilySpec, dict[str, Path], Tools, tuple[Decision, ...]]:
    """The composed single files, None for a folder; family; folders of its parts; tools; what was guessed of them."""
    if request.files is None:
        family, folders = part_folders(request, progress)
        index = {"index": partial(_index_beside, folders["transformer"])}
        return None, family, folders, _tools(family, folders, index), ()
    single = _composed(request, request.files, progress)
    tools = _tools(single.family, single.folder_tools, single.tools)
    return single, single.family, dict(single.folders), tools, single.decisions


def _host_room(wanted: int, free: Callable[[], int] = host_free_bytes) -> int:
    """Bytes of host memory that this process may take, after what former pipelines left where ``wanted`` do not fit.

    Rewritten blocks refer to themselves, so a pipeline that is no longer used stays until such cycles are collected.
    """
    room = free()
    if room >= wanted:
        return room
    gc.collect()
    empty_host_cache()
    return free()


def _parts(files: Mapping[str, PartFiles], prepare: Preparation, safe: SafeFp16 | None) -> Parts:
    """The parts, none of them read; the transformer with a way back from safe fp16 where that was left to ``auto``."""
    parts = Parts({name: reader_of(part) for name, part in files.items()}, prepare)
    if safe is not None and safe.active:
        parts.fallbacks = {name: partial(safe.abandon, parts, part) for name, part in files.items() if denoises(name)}
    return parts


def find_models(roots: Iterable[Path]) -> list[Path]:
    """Folders under ``roots`` that hold a pipeline or a lone transformer of a known family, sorted by path.

    Looks three levels deep, into hidden folders never, follows no folder twice, and leaves out what cannot be read,
    such as ``lost+found``.
    """
    folders: dict[Path, None] = {}
    for root in roots:
        level, seen = [Path(root)], set()
        for _ in range(4):
            deeper: list[Path] = []
            for folder in level:
                with suppress(OSError, RuntimeError):  # before Python 3.13 a loop of links is a RuntimeError
                    real = folder.resolve()
                    if real in seen or not folder.is_dir():
                        continue
                    seen.add(real)
                    if _is_model(folder):
                        folders[folder] = None
                    else:
                        deeper += [child for child in folder.iterdir() if not child.name.startswith(".")]
            level = deeper
    return sorted(folders)


def family_of_folder(folder: Path) -> FamilySpec | None:
    """The family of a pipeline or transformer folder; None for any other folder.

    Raises:
        CheckpointError: it cannot be read.
    """
    with reading(folder):
        if (folder / INDEX).is_file():
            name = str(read_json(folder / INDEX, "a diffusers pipeline").get("_class_name"))
            return next((family for family in FAMILIES.values() if name in family.pipelines), None)
        if (folder / "config.json").is_file():
            name = str(read_json(folder / "config.json", "a model configuration").get("_class_name"))
            return next((family for family in FAMILIES.values() if name in family.transformer_classes), None)
    return None


def _is_model(folder: Path) -> bool:
    if (folder / INDEX).is_file():
        return True
    try:
        return family_of_folder(folder) is not None
    except CheckpointError:
        return False


def part_folders(request: LoadRequest, progress: Progress | None = None) -> tuple[FamilySpec, dict[str, Path]]:
    """The family, and the folder of every part and tool it has."""
    progress, model = progress or Silent(), request.model
    if not model.is_dir():
        raise CheckpointError(
            f"no model folder {str(model)!r}",
            expected="a folder with model_index.json or a transformer's config.json",
            fix="Put the model into ComfyUI/models/diffusers and refresh, or correct the path.",
        )
    family = family_of_folder(model)
    if family is None:
        raise _unknown(model)
    whole = (model / INDEX).is_file()
    folders = _folders_in(model) if whole else {"transformer": model}
    wanted = [*family.parts, *family.tools]
    for name, given in (("base", request.base), ("image_encoder", request.image_encoder)):
        missing = [part for part in wanted if part not in folders and (name == "base") == (part not in ENCODER_FOLDER)]
        if missing and (given is not None or (not whole and any(part not in family.optional for part in missing))):
            source = given or _searched(name, family, request)
            progress.notify(f"{name} from {source.name}{'' if given else ' (auto)'}")
            offered = _folders_in(source)
            if name == "base" and request.image_encoder is None:
                missing += [part for part in ENCODER_FOLDER if part in wanted and part not in folders]
            folders.update({part: offered[part] for part in missing if part in offered})
    spared = without_text(family, lambda part: part in folders and folders[part].is_dir(), progress)
    folders = {part: folder for part, folder in folders.items() if part not in spared}
    for tool in family.tools:
        if tool in folders and not any(folders[tool].glob("*.json")) and not any(folders[tool].glob("*.model")):
            raise CheckpointError(
                f"no files in {str(folders[tool])!r}",
                expected=f"the {tool} of this model",
                fix="Download the missing folder, and keep its published name.",
            )
    absent = [part for part in wanted if part not in folders and part not in (*family.optional, *spared)]
    if absent:
        raise CheckpointError(
            f"no {absent[0]} for {str(model)!r}",
            expected=f"the parts {', '.join(family.parts)}",
            fix="Download the missing folder, or choose the folder that has it as base or image_encoder.",
        )
    return family, {part: folder for part, folder in folders.items() if part in wanted}


def _attention(
    choice: str, config: Mapping[str, Any], precision: Precision, facts: DeviceFacts, probes: ProbeStore | None
) -> Attention:
    """The attention of a transformer, tried out on its device, and timed there where it is left to ``auto``."""
    width = int(config.get("attention_head_dim", HEAD_WIDTH))
    operands = precision.compute or precision.transformer
    avoided = avoided_by(probes, (operands, precision.vae))
    attention = attention_for(choice, facts, operands, width, avoided)
    return by_time(attention, facts, probes, operands, width)


def _composed(request: LoadRequest, files: Files, progress: Progress) -> Composed:
    """The pipeline of single files, with what a folder named as base provides."""
    wanted = family_in(files.parts["transformer"])
    providers = [_folders_in(folder) for folder in (request.base, request.image_encoder) if folder is not None]
    offered = {name: folder for provider in providers for name, folder in provider.items()}
    provided = {name: folder for name, folder in offered.items() if name in (*wanted.parts, *wanted.tools)}
    return composed(replace(files, provided=provided), progress)


ENCODER_FOLDER = ("image_encoder", "feature_extractor")


def _folders_in(folder: Path) -> dict[str, Path]:
    """The folders of parts and tools that the index of a pipeline names; without an index, all of them."""
    if (folder / INDEX).is_file():
        index = read_json(folder / INDEX, "a diffusers pipeline")
        pairs = {name: entry for name, entry in index.items() if isinstance(entry, list) and len(entry) == 2}
        shared = index.get(OF_DEMOS)
        there = shared if isinstance(shared, dict) else {}
        offered = {child.name: child for child in DEMOS.iterdir()} if there else {}
        homes = {name: offered.get(str(there.get(name)), folder) for name in pairs}
        return {name: homes[name] / name for name, (_, cls) in pairs.items() if cls is not None}
    if not folder.is_dir():
        raise CheckpointError(
            f"no folder {str(folder)!r}",
            expected="a folder with the parts that this model lacks",
            fix="Choose another folder.",
        )
    return {child.name: child for child in folder.iterdir() if child.is_dir()}


def _searched(name: str, family: FamilySpec, request: LoadRequest) -> Path:
    """The first folder beside the model, or in the search folders, that has the missing parts."""
    roots = [request.model.parent, *request.search]
    if name == "base":
        own = request.model / "transformer" if (request.model / INDEX).is_file() else request.model
        provider, task = family.base or family.id, "text" if family.base else _encoder_task(family, own)
        for spared in ((), family.text_parts):  # one with text encoders is better; without them a prompt is loaded
            for folder in find_models(roots):
                offered = family_of_folder(folder)
                if (
                    offered is None
                    or offered.id != provider
                    or not (folder / INDEX).is_file()
                    or folder == request.model
                ):
                    continue
                if _encoder_task(offered, folder / "transformer") != task:  # its text encoder is another
                    continue
                own_parts = (*family.transformers, *ENCODER_FOLDER, *spared)
                provided = [part for part in family.parts if part not in own_parts]
                if all((folder / part).is_dir() for part in provided):
                    return folder
    else:
        for root in roots:
            files = [*root.glob("*/image_encoder/config.json"), *root.glob("*/*/image_encoder/config.json")]
            # One on its own was put there for this; that of another pipeline may be another training of it.
            for config in sorted(files, key=lambda file: ((file.parent.parent / INDEX).is_file(), file)):
                if read_json(config, "an image encoder").get("model_type") == "siglip_vision_model":
                    return config.parent.parent
    raise CheckpointError(
        f"no {name} found for {family.title} in {', '.join(map(str, dict.fromkeys(roots)))}",
        expected=f"a folder with the missing parts of {family.title}",
        fix=f"Download it ({'; '.join(family.pages)}) or choose its folder as {name}.",
    )


def _part_files(
    family: FamilySpec, folders: Mapping[str, Path], precision: Precision, single: Mapping[str, PartFiles]
) -> dict[str, PartFiles]:
    """Every part with the dtype it gets: of ``single`` files, else of its folder."""
    files: dict[str, PartFiles] = {}
    for name, (library, *classes) in family.parts.items():
        dtype = {"transformer": precision.transformer, "vae": precision.vae}.get(role_of(name), precision.text)
        if name in single:
            files[name] = replace(single[name], dtype=dtype)
        elif name in folders:
            _require_plausible(family, name, library, folders[name])
            files[name] = part_files(name, library, _class_of(name, folders[name], classes), folders[name], dtype)
        else:
            continue
        if name == "vae":
            files[name] = _as_published(family, files[name])
        if precision.safe and denoises(name):  # the matrices of its blocks are read as fp16, all else as fp32
            files[name] = replace(files[name], dtype=FP32, dtype_of=stored_dtype)
    return files


def _as_published(family: FamilySpec, vae: PartFiles) -> PartFiles:
    """``vae`` with what its publisher has otherwise than its diffusers class, also where only its files say so."""
    settings = dict(family.vae_settings)
    if hasattr(family.code, "vae_settings_in"):
        settings |= family.code.vae_settings_in(evidence_of(vae.folder, vae.config), vae.folder)
    known = {name: value for name, value in vae.config.items() if name not in settings}  # diffusers warns of others
    return replace(vae, config=known, settings=settings)


def _require_plausible(family: FamilySpec, name: str, library: str, folder: Path) -> None:
    """Raise where the config.json of a part of ``family`` has a value that no published one could have."""
    kind = f"{family.id}{TRANSFORMER}" if denoises(name) else family.files[name].kind if name in family.files else ""
    path = folder / "config.json"
    if library == "diffusers" and kind and path.is_file():
        require_plausible(
            name, path, read_json(path, f"the configuration of the {name}"), [row["config"] for row in published(kind)]
        )


def _class_of(name: str, folder: Path, allowed: Sequence[str]) -> str:
    """The class of a part: the one its configuration or its pipeline names, if the family knows it."""
    if len(allowed) == 1:
        return allowed[0]
    config = read_json(folder / "config.json", f"the configuration of the {name}") if folder.is_dir() else {}
    named = [config.get("_class_name"), *(config.get("architectures") or ())]
    if (folder.parent / INDEX).is_file():
        entry = read_json(folder.parent / INDEX, "a diffusers pipeline").get(folder.name)
        named = [entry[1] if isinstance(entry, list) and len(entry) == 2 else None, *named]
    chosen = next((cls for cls in named if cls in allowed), None)
    if chosen is None:
        raise CheckpointError(
            f"the {name} in {str(folder)!r} is a {next(filter(None, named), 'model without a class name')}",
            expected=f"one of {', '.join(allowed)}",
            fix="Choose a model folder of a supported family.",
        )
    return chosen


def _task(family: FamilySpec, transformer: Path) -> str:
    """The task of the pipeline around ``transformer``, or of a lone one by its own configuration."""
    index = _index_beside(transformer)
    if not index:
        return lone_task(family, read_json(transformer / "config.json", "a model configuration"))
    return family.pipelines.get(str(index.get("_class_name")), family.lone_task)


def _encoder_task(family: FamilySpec, transformer: Path) -> str:
    """The task of the pipelines whose text encoder goes with ``transformer``."""
    config = transformer / "config.json"
    settings = read_json(config, "a model configuration") if config.is_file() else {}
    return encoder_task(family, settings, _task(family, transformer))


def _tools(family: FamilySpec, folders: Mapping[str, Path], plain: Mapping[str, Callable[[], Any]]) -> Tools:
    """The tools in ``folders``, and ``plain`` readers of others."""
    libraries = {name: library for name, library in family.tools.items() if name in folders}
    readers = {name: tool_reader(family, library, folders[name]) for name, library in libraries.items()}
    return Tools({**plain, **readers})


def _index_beside(transformer: Path) -> dict[str, Any]:
    """The ``model_index.json`` of the pipeline around ``transformer``; empty for a lone one."""
    index = transformer.parent / INDEX
    return read_json(index, "a diffusers pipeline") if index.is_file() else {}


def _unknown(model: Path) -> CheckpointError:
    index, single = model / (INDEX if (model / INDEX).is_file() else "config.json"), transformer_file(model)
    if index.is_file():
        name = str(read_json(index, "a model description").get("_class_name"))
        other = other_class(name)
        found = f"{str(index)!r} describes a {name!r}{f', which is {other.title}' if other else ''}"
        expected = f"one of {', '.join(f.title for f in FAMILIES.values())}"
        fix = f"Use its single file with {other.runs}." if other else "Choose a model of these families."
    else:
        found, expected = f"neither model_index.json nor config.json in {str(model)!r}", "a diffusers model folder"
        fix = "Choose the folder that directly contains model_index.json, or download the model again."
    if single is not None:
        fix = f"Move this folder into models/diffusion_models and choose {single.name} in AnyGPU Compose Pipeline."
    return CheckpointError(found, expected=expected, fix=fix)
