"""Build a pipeline from a model folder: its family, its parts, and the dtype of each part. Only configurations and
headers are read, so that a missing shard is noticed at once, and a part that a run does not use is never read."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...compat.checkpoints.headers import reading
from ...compat.checkpoints.weights import read_json
from ...compat.decision import AUTO, Decision
from ...compat.device.execution import HOST
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
from ...compat.errors import CheckpointError, MissingPackageError, UnsupportedError
from ...compat.memory.offloader import Offloader
from ...compat.memory.parts import denoises, role_of
from ...compat.memory.standalone import offloader_for
from ...compat.packages import attribute
from ...compat.probe_results import probe_results_of
from ...compat.transforms.attention import SPARSE, Attention, attention_for, avoided_by, by_time
from ...compat.transforms.conv3d_choice import stored_timings
from ...compat.transforms.fp16 import stored_dtype
from ...compat.transforms.order import Order, Preparation, Step, attention_step, convolution_step
from ..base import Progress, Silent
from ..family import FamilySpec
from ..files.evidence import cautions_of, evidence_of, published, recipe_named, variant_of
from ..files.models import INDEX, folders_in, index_beside, part_folders, task_beside
from ..files.part import PartFiles, part_files, require_plausible
from ..files.single_file import Composed, composed, family_in
from ..forecast.fit import host_weight_decisions, offload_options, require_room
from ..forecast.placement import share_out
from ..keys import TRANSFORMER
from ..pipeline import Checkpoint, Device, Parts, Pipeline, PipelinePlan, Tools
from ..requests import LoadRequest as LoadRequest
from ..settings import recipe_decisions
from ..speed import speed_for
from .reading import (
    SafeFp16,
    fit_host_memory,
    reader_of,
    sizes_of,
    storage_choices,
    storage_decisions,
    storage_step,
    stored_as_chosen,
    tool_reader,
)

HEAD_WIDTH = 128  # of a transformer whose configuration leaves it to the class


def load(
    request: LoadRequest,
    progress: Progress | None = None,
    make_room: Callable[[int, torch.device], None] | None = None,
    hosted: Callable[..., Offloader] | None = None,
) -> Pipeline:
    """The pipeline in ``request.model``, ready to run; weights are read when a stage first needs them. A host around us
    gives ``make_room`` to free memory, and ``hosted``, its own offloader, which offload ``auto`` then means. Raises
    PackError for files that are missing, damaged or unknown, or a choice that this model or machine cannot do."""
    progress = progress or Silent()
    with reading(request.model):
        request, single, family, folders, tools, source_decisions = _sources(request, progress)
    facts, probes = _machine(request)
    precision = precision_for(family.rewrites.precision, facts, request.precision, probes)
    files = _part_files(family, folders, precision, {} if single is None else single.files)
    files = stored_as_chosen(files, request, family.files.text_parts, facts, probes)
    progress.check()
    sizes = {name: part.total_bytes for name, part in files.items()}
    files, host = fit_host_memory(files, facts, _host_room(sum(sizes.values())), swap_free_bytes())
    free, weights = free_bytes(facts.device), sizes_of(files.values())
    options = offload_options(request.devices, request.keep_free_gb, request.state, host)
    require_room(weights, facts.device, (facts.total_bytes or None) if make_room or hosted else free, options)
    transformer = files["transformer"]
    around = evidence_of(transformer.folder if single else request.model, transformer.config, transformer.entries)
    variant, guessed = variant_of(family, request, around)
    recipe, name = recipe_named(family, around.names if (request.variant, *request.earlier) == (AUTO, "", "") else ())
    attention = _attention(request, family, transformer.config, precision, facts, probes)
    safe = SafeFp16(family.id, options.place("transformer", facts.device), active=precision.safe)
    convolutions = convolution_step(abilities(facts, probes), None if probes is None else stored_timings(facts, probes))
    speed = speed_for(request.speed, facts, request.devices, precision, probes, attention)
    guards = _guards(request, facts, probes)
    fp16_step = Step(Order.PRECISION, "safe fp16", safe.apply)
    steps = (storage_step(files), convolutions, fp16_step, attention_step(attention), *speed.steps(), *guards)
    parts = _parts(files, Preparation(steps), safe if request.precision == AUTO else None)
    hosted = speed.host_for(request.offload, hosted)
    offloader, offload = offloader_for(
        request.offload, parts, facts.device, sizes, free=free, make_room=make_room, hosted=hosted, options=options
    )
    speed.settle_offload(offloader.mode, request.offload != AUTO)
    more = (*storage_decisions(files), *speed.decisions(), *host_weight_decisions(offloader), *source_decisions)
    model = Checkpoint(
        task=task_beside(family, folders["transformer"]) if single is None else single.task,
        variant=variant,
        source=request.model,
        request=request,
        configs={name: part.config for name, part in files.items()},
        weights=weights,
        storage=storage_choices(files),
        stands_in_for=request.stands_in_for,
        recipe=recipe or request.earlier[1],
        names=around.names,
    )
    decisions = (precision.decision, offload, attention.decision, *copies_decision(precision, facts, probes), *more)
    device, plan = Device(facts, precision, probes), PipelinePlan(offloader, speed, decisions)
    pipeline = Pipeline(spec=family, model=model, parts=parts, tools=tools, device=device, plan=plan)
    more = recipe_decisions(pipeline, (*guessed, *cautions_of(family, transformer, around.names)), name)
    return replace(pipeline, plan=replace(plan, decisions=(*decisions, *more)))


def _guards(request: LoadRequest, facts: DeviceFacts, probes: ProbeStore | None) -> tuple[Step, ...]:
    """The step that checks results during a run and works around faulty calls; none on a CPU. With compiled blocks,
    whose values are hidden, it only works around."""
    if facts.device.type == HOST.type:
        return ()
    from ...compat.transforms.guard import guard_step

    return (guard_step(None if request.speed.compile else probes, facts),)


def load_placed(
    request: LoadRequest,
    progress: Progress | None = None,
    make_room: Callable[[int, torch.device], None] | None = None,
    hosted: Callable[..., Offloader] | None = None,
) -> Pipeline:
    """The pipeline that :func:`load` gives, its parts on those of ``request.cards`` where a run is quickest. Parts do
    not move with fewer than two cards, from a device that is none of them, or if the user placed the transformer, whose
    card then decides on precision and workarounds."""
    home, place = facts_for(request.device).device, torch.device(request.devices.get("transformer", HOST))
    if place in request.cards and place != home:
        others = dict.fromkeys(("text_encoder", "vae"), home)
        request = replace(request, device=place, devices={**others, **request.devices})
    first = load(request, progress, make_room, hosted)
    with suppress(MissingPackageError):  # imports what a run needs of diffusers; a failure is reported at its use
        for name in first.spec.files.pipelines:
            attribute("diffusers", name)
    if len(request.cards) < 2 or "transformer" in request.devices or first.facts.device not in request.cards:
        return first

    def load_on(device: torch.device, devices: Mapping[str, torch.device]) -> Pipeline:
        return load(replace(request, device=device, devices={**devices, **request.devices}), None, make_room, hosted)

    return share_out(first, request.cards, request.devices, load_on)


def _machine(request: LoadRequest) -> tuple[DeviceFacts, ProbeStore | None]:
    """Facts and probe results (None without a state folder) of the device; unless quiet, raises if it is unusable."""
    facts = facts_for(request.device)
    if fault := "" if request.quiet else device_fault(facts.device):
        raise unusable_device(facts, fault)
    return facts, None if request.state is None else probe_results_of(facts, request.state, request.quiet)


def _sources(
    request: LoadRequest, progress: Progress
) -> tuple[LoadRequest, Composed | None, FamilySpec, dict[str, Path], Tools, tuple[Decision, ...]]:
    """The request, completed with the file of each part where there are single files; those as composed, or None; the
    family; the folder of each part; the tools; and decisions about what was guessed."""
    if request.files is None:
        given = {"base": request.base, "image_encoder": request.image_encoder}
        family, folders = part_folders(request.model, given, request.search, progress)
        index = {"index": partial(index_beside, folders["transformer"])}
        return request, None, family, folders, _tools(family, folders, index), ()
    wanted = family_in(request.files.parts["transformer"])
    providers = [folders_in(folder) for folder in (request.base, request.image_encoder) if folder is not None]
    offered = {name: folder for provider in providers for name, folder in provider.items() if folder.is_dir()}
    provided = {name: folder for name, folder in offered.items() if name in (*wanted.files.parts, *wanted.files.tools)}
    single = composed(replace(request.files, provided=provided), progress)
    found = {name: part.folder for name, part in single.files.items() if part.folder.is_file()}
    parts = {**request.files.parts, **found}
    request = replace(request, files=replace(request.files, parts=parts, known=single.known))
    tools = _tools(single.family, single.folder_tools, single.tools)
    return request, single, single.family, dict(single.folders), tools, single.decisions


def _host_room(wanted: int, free: Callable[[], int] = host_free_bytes) -> int:
    """Bytes of host memory that this process may take; if ``wanted`` does not fit, unused pipelines are collected."""
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


def _attention(
    request: LoadRequest,
    family: FamilySpec,
    config: Mapping[str, Any],
    precision: Precision,
    facts: DeviceFacts,
    probes: ProbeStore | None,
) -> Attention:
    """The attention of a transformer, tried out on its device, and timed there where it is left to ``auto``."""
    width = int(config.get("attention_head_dim", HEAD_WIDTH))
    operands = precision.compute or precision.transformer
    avoided = avoided_by(probes, (operands, precision.vae), wide=(precision.vae, FP32))
    quiet = probes is not None and probes.quiet
    attention = attention_for(request.attention, facts, operands, width, avoided, family.rewrites.sparse, quiet=quiet)
    if attention.choice == SPARSE and request.speed.compile is not None:
        raise UnsupportedError("attention 'sparse' with compile", expected="one of the two", fix="Switch compile off.")
    return by_time(attention, facts, probes, operands, width)


def _part_files(
    family: FamilySpec, folders: Mapping[str, Path], precision: Precision, single: Mapping[str, PartFiles]
) -> dict[str, PartFiles]:
    """Every part with the dtype it gets: of ``single`` files, else of its folder; without those that have neither."""
    files: dict[str, PartFiles] = {}
    for name, (library, *classes) in family.files.parts.items():
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
    """``vae`` with its publisher's attributes, which are set once it is built and left out of its config: those of the
    family, and over them those that its files name."""
    settings = dict(family.rewrites.vae_settings)
    if family.code.vae_settings_in is not None:
        settings |= family.code.vae_settings_in(evidence_of(vae.folder, vae.config, vae.entries), vae.folder)
    known = {name: value for name, value in vae.config.items() if name not in settings}  # diffusers warns of others
    return replace(vae, config=known, settings=settings)


def _require_plausible(family: FamilySpec, name: str, library: str, folder: Path) -> None:
    """Raise CheckpointError where a diffusers part's config.json has a value that no published one could have."""
    known, path = family.files.kinds.get(name), folder / "config.json"
    kind = f"{family.id}{TRANSFORMER}" if denoises(name) else "" if known is None else known.kind
    if library == "diffusers" and kind and path.is_file():
        config = read_json(path, f"the configuration of the {name}")
        require_plausible(name, path, config, [row["config"] for row in published(kind)])


def _class_of(name: str, folder: Path, allowed: Sequence[str]) -> str:
    """The class of a part: the only one ``allowed``, else the one of these that its pipeline's index or, after that,
    its configuration names; raises CheckpointError for another."""
    if len(allowed) == 1:
        return allowed[0]
    config = read_json(folder / "config.json", f"the configuration of the {name}") if folder.is_dir() else {}
    named = [config.get("_class_name"), *(config.get("architectures") or ())]
    if (folder.parent / INDEX).is_file():
        entry = read_json(folder.parent / INDEX, "a diffusers pipeline").get(folder.name)
        named = [entry[1] if isinstance(entry, list) and len(entry) == 2 else None, *named]
    chosen = next((cls for cls in named if cls in allowed), None)
    if chosen is None:
        found = f"the {name} in {str(folder)!r} is a {next(filter(None, named), 'model without a class name')}"
        fix = "Choose a model folder of a supported family."
        raise CheckpointError(found, expected=f"one of {', '.join(allowed)}", fix=fix)
    return chosen


def _tools(family: FamilySpec, folders: Mapping[str, Path], plain: Mapping[str, Callable[[], Any]]) -> Tools:
    """The family's tokenizers and processors in ``folders``, and the ``plain`` readers; each is read at its use."""
    libraries = {name: library for name, library in family.files.tools.items() if name in folders}
    readers = {name: tool_reader(family, library, folders[name]) for name, library in libraries.items()}
    return Tools({**plain, **readers})
