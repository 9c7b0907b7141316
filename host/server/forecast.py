"""Decisions and memory forecasts for the pipelines of a prompt, before anything is read or run."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ...compat.checkpoints.headers import reading
from ...compat.device.probe_store import UNKNOWN
from ...compat.errors import InputError, PackError
from ...compat.memory.offloader import DEVICE_CHOICES, HOSTED, MODES
from ...compat.memory.statistics import StageNeed, amount_of
from ...compat.probe_results import probe_results_of
from ...compat.transforms.step_cache import StepCacheSettings
from ...paint import forecast as painting
from ...paint.adapter_loading import AdapterRequest, load_adapter
from ...paint.choices import DEMO_SIZE, is_demo
from ...paint.loading import PaintPipeline, PaintRequest, load_paint
from ...paint.networks.stable_diffusion import joined_files
from ...paint.networks.weights import Weights
from ...pipelines.base import DecodeRequest, FramePackSettings, Latents, PromptRequest, SampleSettings
from ...pipelines.decisions import card_of
from ...pipelines.demo.stand_in import own_inputs
from ...pipelines.family import FITS as PICTURE_FITS
from ...pipelines.files.evidence import changes_recipe, names_of_file, recipe_named
from ...pipelines.forecast.counts import text_forwards
from ...pipelines.forecast.memory import forecast
from ...pipelines.forecast.savings import savings
from ...pipelines.forecast.seconds import planned_run
from ...pipelines.forecast.times import Times, known_or_why, times_of
from ...pipelines.latents.batch import videos_of
from ...pipelines.latents.convert import from_core
from ...pipelines.latents.store import LATENT, load_latent
from ...pipelines.load.folder import load_placed
from ...pipelines.pictures import picture_size
from ...pipelines.pipeline import Pipeline
from ...pipelines.settings import MOST_STEPS, SIDES, clip_frames, of_checkpoint, require_family, snap, with_step_cache
from ...pipelines.sizes import Size, latent_shape
from ...pipelines.vae.plan import METHODS, checked_request
from .. import folders, memory_manager, recovery, requests, saved
from ..recipes import Prompt, advice, back, value_of
from .panel import error_message, facts

MOST_PIPELINES = 8
DELIGHTS, ENCODES, LOADS = "AnyGPUDelightImage", "AnyGPUEncodeImage", "LoadImage"
FILM = re.compile("video|frames|gif|anygpudecode", re.IGNORECASE)  # in names of nodes whose pictures are a clip
LEVELS = re.compile(r"[-+]?\d*\.*\d+")  # as core's Manual Sigmas reads its text
TAKEN = ("length", "num_frames")  # inputs of nodes that take frames out of a clip: one frame is no clip
DERIVED = ("texts", "clip", "latents", "sigmas")  # settings that a forecast adds itself: no widget has them
COUNTED = ("cfg", "cfg_start", "cfg_end", "stg", "guidance_rescale", "shift", "denoise", "fps", "latents", "sigmas")
CLIP = ("clip_seconds", "window", "single_frame")
SIZE, USUAL = ("width", "height", "frames"), {"batch_size": 1, "window": 9, "single_frame": False}
EMPTY = ("width", "height", "length")  # inputs of core's nodes that make latents of a size
SAVE, UPSCALE = "AnyGPUSaveLatent", "AnyGPUUpscaleLatents"
LARGEST = 1e9  # beyond what any widget takes
LARGEST_EMPTY = 16384  # core's MAX_RESOLUTION; its batches have at most 4096
MV_ADAPTER, CHECKPOINT = "AnyGPULoadMVAdapter", ("ckpt_name", "checkpoints")
CORE_FILES = {  # core's loaders -> the input that names their file, and the kind of its folder
    **dict.fromkeys(("CheckpointLoaderSimple", "CheckpointLoader"), CHECKPOINT),
    "VAELoader": ("vae_name", "vae"),
}
CHOICES = {
    "task": requests.TASKS,
    "method": METHODS,
    **dict.fromkeys(("transformer_device", "text_device", "vae_device"), DEVICE_CHOICES),
}
FITS, STREAMS, PARTS, TOO_MUCH = "fits", "streams", "in parts", "too much"
MEANING = {  # how a stage fits -> what that means for the run
    STREAMS: "streams: weights that do not fit stay in host memory and are copied at each use. Same video, but slower.",
    PARTS: "in parts: AnyGPU Decode decodes one part after another, by its method or since all does not fit at once.",
    TOO_MUCH: "too much: this will run out of memory.",
}
LIGHTER = {"text": {"text_device": "cpu", "text_weights": "fp8"}, "sampling": {"weights": "fp8"}}  # by the load node
LESS_BY = 0.9  # of the bytes, below which a change is worth a line
OWN = StepCacheSettings()
CACHED = {"preset": "balanced", "kind": OWN.kind, "threshold": OWN.threshold, "interval": OWN.interval}
CACHED |= {"start_percent": OWN.start, "end_percent": OWN.end}
LORA = {"strength": 1.0, "blocks": ""}
DECODED = {"method": "auto", "tile_size": 0, "tile_overlap": -1, "frames_per_chunk": 0}
Inputs = Mapping[str, Any]
Asked = tuple[str, Callable[[str], Sequence[StageNeed]], Times]  # a run's size, stages by offload mode, and time


def graph(prompt: Prompt) -> dict[str, Any]:
    """A card for each load node, a forecast for each node that runs its pipeline, and advice on core's recipes."""
    cards = {node: _card(prompt, node) for node in _nodes_of(prompt, LOADERS)}
    loaded = {node: pipeline for node, (_, pipeline) in cards.items()}
    forecasts = []
    for node in _nodes_of(prompt, RUNS):
        loader = _loader_of(prompt, node)
        if _takes(prompt[node]["class_type"], loaded.get(loader)):
            made = _forecast(prompt, node, loaded)
            made["advice"] = [*made.get("advice", ()), *_lighter_choices(prompt, node, loaded, made.get("stages", ()))]
            forecasts.append({"node": node, "loader": loader, **made})
    recipes = [{"node": node, **error_message(error)} for node, error in advice(prompt).items()]
    return {"pipelines": [card for card, _ in cards.values()], "forecasts": forecasts, "recipes": recipes}


def _takes(kind: str, pipeline: Any) -> bool:
    """True if a node of class ``kind`` can run ``pipeline``; False for None, which could not be loaded."""
    if isinstance(pipeline, PaintPipeline):
        return RUNS[kind] is _plan_painting and (pipeline.family == "delight") == (kind == DELIGHTS)
    return pipeline is not None and RUNS[kind] is not _plan_painting


def _nodes_of(prompt: Prompt, kinds: Mapping[str, Any]) -> list[str]:
    """Ids of the nodes whose class is among ``kinds``, at most :data:`MOST_PIPELINES`."""
    return [node for node, entry in prompt.items() if entry["class_type"] in kinds][:MOST_PIPELINES]


def _loader_of(prompt: Prompt, node: str) -> str:
    """The id of the load node that ``node`` is or gets its pipeline from; empty for none."""
    return next((each for each in (node, *back(prompt, node, "pipeline")) if prompt[each]["class_type"] in LOADERS), "")


def _core_weights(prompt: Prompt, node: str) -> dict[str, Weights]:
    """``loaded``: weights in files that core's loaders give a Load MV-Adapter, if any; InputError if one is unknown."""
    names = requests.CORE_INPUTS if prompt[node]["class_type"] == MV_ADAPTER else ()
    sources = {name: next(back(prompt, node, name), "") for name in names}
    if not any(sources.values()):
        return {}
    files = []
    for name, source in sources.items():
        *_, loader = source, *(back(prompt, source, name.removeprefix("core_")) if source else ())  # past LoRAs
        kind = prompt[loader]["class_type"] if source else ""
        key, folder = CORE_FILES.get(kind, ("", ""))
        path = folders.core_file(folder, value_of(prompt, prompt[loader]["inputs"].get(key))) if key else None
        if path is None:
            raise InputError(
                f"memory and time unknown: {name} is {f'from {kind}' if source else 'not connected'}",
                expected="a .safetensors file of core's Load Checkpoint, or of Load VAE for core_vae",
                fix="Run it: what is connected counts, not model." if source else "Connect all three, or none.",
            )
        files.append(path)
    return {"loaded": joined_files(*files)}


def _card(prompt: Prompt, node: str) -> tuple[dict[str, Any], Any]:
    """The card of a load node, and its pipeline, None where it cannot load. Runs no probe: the device may be busy."""
    entry, inputs = prompt[node], prompt[node]["inputs"]
    known = probe_results_of(facts(), folders.state_folder()).without_asking()
    asked = all(answer.status != UNKNOWN for answer in known.values())
    defaults, request_for = LOADERS[entry["class_type"]]
    named = str(inputs.get("model", inputs.get("transformer", "")))
    try:
        values = {name: _widget(prompt, inputs, name, default) for name, default in defaults.items()}
        given = {"device": facts(), "state": folders.state_folder(), **_core_weights(prompt, node)}
        with reading(Path(named)):
            request = request_for(values, quiet=True, **given)
            pipeline = READERS.get(type(request), load_placed)(request, hosted=memory_manager.offloader_on)
            return {"node": node, **card_of(pipeline, known), "by_tables": not asked}, pipeline
    except PackError as error:
        return {"node": node, "model": named, "error": error_message(error)}, None


def _widget(prompt: Prompt, inputs: Inputs, name: str, default: Any) -> Any:
    """The value of a widget, or of a Primitive linked to it; the default for computed values and invalid ones."""
    value = value_of(prompt, inputs.get(name, default))
    if type(default) is float and type(value) is int and abs(value) < LARGEST:  # JSON writes 2.0 as 2
        value = float(value)
    return value if type(value) is type(default) and value in CHOICES.get(name, (value,)) else default


def _numbers(prompt: Prompt, node: str) -> dict[str, float]:
    """A node's numeric inputs by name, if in range; 0 only where it does not mean the default."""
    given = ((name, value_of(prompt, each)) for name, each in prompt[node]["inputs"].items() if name not in DERIVED)
    numbers = ((name, value) for name, value in given if isinstance(value, (int, float)) and 0 <= value < LARGEST)
    return {name: value for name, value in numbers if value or name in ("cfg_end", "stg", "clip_seconds")}


def _views(prompt: Prompt, node: str) -> int:
    """The most views that an AnyGPU Paint Cameras gives ``node`` to paint; 0 where none does."""
    *_, source = node, *back(prompt, node, "cameras")
    given = prompt[source]["inputs"]
    if given.get("choose") == "list":
        return str(value_of(prompt, given.get("azimuths"))).count(",") + 1
    return int(_numbers(prompt, source).get("max_views", 0))


def _picture_inputs(prompt: Prompt, node: str, pipeline: Pipeline) -> dict[str, float]:
    """``width`` and ``height`` at which the start picture of ``node`` is encoded, or ``clip`` for film; else empty."""
    encoder = next(back(prompt, node, "image"), node)
    *_, encoder = encoder, *back(prompt, encoder, "previous")  # the first of joined pictures sets the size
    if prompt[encoder]["class_type"] != ENCODES:
        return {}
    sources = [*back(prompt, encoder, "image")] or [encoder]
    if prompt[sources[-1]]["class_type"] != LOADS:
        return {"clip": True} if _is_film(prompt, sources) else {}
    sides = folders.picture_sides(prompt[sources[-1]]["inputs"].get("image"))
    if sides is None:
        return {}
    sizes = {name: value for name, value in _numbers(prompt, encoder).items() if name in SIDES}
    if len(sources) > 1 and len(sizes) < len(SIDES):  # a node between may change its size
        return {}
    fit = prompt[encoder]["inputs"].get("fit")
    fit = fit if fit in PICTURE_FITS else PICTURE_FITS[0]
    asked = own_inputs(pipeline, {"width": 0, "height": 0, "fit": fit, **sizes}, lambda _: None)
    picture = torch.empty((1, sides[1], sides[0], 3), device="meta")
    width, height = picture_size(pipeline, picture, int(asked["width"]), int(asked["height"]), asked["fit"])
    return {"width": width, "height": height}


def _sampling_inputs(prompt: Prompt, node: str, loaded: Inputs) -> tuple[dict[str, Any], Pipeline]:
    """The settings by name with which ``node`` samples, and its pipeline with the LoRAs and step cache on its way.
    The size is that of the latents, which are followed from the node that makes them, else of the picture or the
    widgets; a demo model has its own. Raises InputError where the size of latents is not known before a run."""
    last, latents, settings = loaded[_loader_of(prompt, node)], None, dict[str, Any]()
    takes_latents = "latents" in last.spec.recipes.effective and not last.is_demo
    for each in (*reversed([*back(prompt, node, "latent")] if takes_latents else ()), node):
        kind, pipeline = prompt[each]["class_type"], loaded.get(_loader_of(prompt, each))
        if RUNS.get(kind) is _plan_sampling and isinstance(pipeline, Pipeline):
            pipeline = _pipeline_at(prompt, each, pipeline)
            widgets = {**USUAL, **_picture_inputs(prompt, each, pipeline), **_numbers(prompt, each)}
            settings = {**own_inputs(pipeline, widgets, lambda _: None), "latents": latents}
            if latents is not None:
                settings |= {name: getattr(latents, name) for name in SIZE}
                settings["batch_size"] *= latents.extra["batch_size"]
            elif "clip_seconds" in settings and pipeline.spec.recipes.sections:
                clip = FramePackSettings(**{name: settings[name] for name in CLIP})
                settings["frames"] = clip_frames(pipeline, clip, settings.get("fps", 0.0))
            size = snap(of_checkpoint(pipeline), *(int(settings.get(name, 0)) for name in SIZE))
            sides = {name: getattr(size, name) for name in SIZE}
            settings |= sides
            more = {"fps": 0.0, "seed": 0, "extra": {"batch_size": settings["batch_size"]}}
            latents = Latents(torch.empty(0), pipeline.family, pipeline.model.task, **sides, **more)
        elif kind == UPSCALE and latents is not None and isinstance(pipeline, Pipeline) and pipeline.spec.code.enlarged:
            file = folders.upscaler_file(str(value_of(prompt, prompt[each]["inputs"].get("upscaler"))))
            latents = pipeline.spec.code.enlarged(latents, file)
        elif kind != SAVE:
            latents = _start_latents(prompt, each, last)
    return settings, pipeline


def _start_latents(prompt: Prompt, node: str, pipeline: Pipeline) -> Latents:
    """The size and batch of the latents that ``node`` reads from a file or makes empty; InputError for other nodes."""
    kind, inputs, sizes = prompt[node]["class_type"], prompt[node]["inputs"], _numbers(prompt, node)
    empty = [int(sizes.get(name, name == "batch_size")) for name in (*EMPTY, "batch_size")]
    if kind == "AnyGPULoadLatent":
        latent = load_latent(saved.file_named(LATENT, str(inputs.get("file"))), lambda _: None, "clamp")
    elif kind == "AnyGPURecoverLatents":
        latent = recovery.load(str(inputs.get("kept")), lambda _: None, pipeline.family if "pipeline" in inputs else "")
    elif kind.startswith("Empty") and 0 < min(empty) <= max(empty) <= LARGEST_EMPTY:
        *size, count = empty
        latent = {"samples": torch.zeros(1).expand(count, 1, *latent_shape(pipeline, Size(*size)))}
    else:
        found, fix = f"memory and time unknown: latent is from {kind}", "Run it: it has the size of these latents."
        raise InputError(found, expected="latents of AnyGPU Sample, of a file, or empty ones", fix=fix)
    first, *more = videos_of(latent)
    latents = from_core(pipeline, first, lambda _: None)
    require_family(latents.family, pipeline.spec, "these latents")
    return replace(latents, samples=torch.empty(0), extra={**latents.extra, "batch_size": 1 + len(more)})


def _linked_sigmas(prompt: Prompt, node: str) -> tuple[dict[str, Any], str]:
    """Settings for the ``sigmas`` that are linked to ``node``: their number, which the time depends on, and even values
    in their place. Empty for none; empty, with a reason, where the prompt does not say their number."""
    source = next(back(prompt, node, "sigmas"), "")
    if not source:
        return {}, ""
    inputs, usual = prompt[source]["inputs"], {"sigmas": "", "steps": 0, "denoise": 1}
    text, steps, denoise = (value_of(prompt, inputs.get(name, value)) for name, value in usual.items())
    steps = len(LEVELS.findall(text)) - 1 if text and isinstance(text, str) else steps
    if denoise != 1 or not isinstance(text, str) or type(steps) is not int or not 0 < steps <= MOST_STEPS:
        return {}, f"sigmas is from {prompt[source]['class_type']}"
    return {"steps": steps, "sigmas": tuple(level / steps for level in range(steps, -1, -1))}, ""


def _is_film(prompt: Prompt, nodes: Sequence[str]) -> bool:
    """True if the pictures that come through ``nodes``, nearest first, are a clip's frames, not one taken from it."""
    for node in (*nodes, *back(prompt, nodes[-1], "images")):
        if any(prompt[node]["inputs"].get(name) == 1 for name in TAKEN):
            return False
        if FILM.search(prompt[node]["class_type"]):
            return True
    return False


def _section_texts(prompt: Prompt, node: str, pipeline: Pipeline) -> PromptRequest | None:
    """The prompts of a video in sections; None for other families and computed texts. InputError for refused ones."""
    inputs = prompt.get(next(back(prompt, node, "prompt"), ""), {}).get("inputs", {})
    text, more = (value_of(prompt, inputs.get(name, "")) for name in ("text", "section_prompts"))
    if not (pipeline.spec.recipes.sections and isinstance(text, str) and isinstance(more, str)):
        return None
    texts = PromptRequest(text, sections=tuple(filter(str.strip, more.splitlines())))
    text_forwards(pipeline, texts)
    return texts


def _decode_request(prompt: Prompt, node: str) -> DecodeRequest:
    """The settings of the first AnyGPU Decode of the latents that ``node`` samples; the defaults without one."""
    for each in (name for name, entry in prompt.items() if entry["class_type"] == "AnyGPUDecode"):
        samplers = (one for one in back(prompt, each, "latent") if prompt[one]["class_type"] in RUNS)
        if next(samplers, "") == node:
            inputs = prompt[each]["inputs"]
            return DecodeRequest(*(_widget(prompt, inputs, name, value) for name, value in DECODED.items()))
    return DecodeRequest()


def _pipeline_at(prompt: Prompt, node: str, pipeline: Pipeline) -> Pipeline:
    """``pipeline`` with the step cache and the LoRA's recipe that nodes on its way to ``node`` give it."""
    for each in reversed([*back(prompt, node, "pipeline")]):
        kind, inputs = prompt[each]["class_type"], prompt[each]["inputs"]
        if kind == "AnyGPUStepCache":
            preset, *own = (_widget(prompt, inputs, name, value) for name, value in CACHED.items())
            pipeline = with_step_cache(pipeline, preset, StepCacheSettings(*own))
        elif kind == "AnyGPULoRA" and not pipeline.is_demo:
            strength, blocks = (_widget(prompt, inputs, name, value) for name, value in LORA.items())
            if not changes_recipe(strength, blocks):
                continue
            names, base = names_of_file(Path(str(inputs.get("lora", "")))), pipeline.model.names
            recipe = recipe_named(pipeline.spec, names, base)[0] or pipeline.model.recipe
            pipeline = replace(pipeline, model=replace(pipeline.model, recipe=recipe))
    return pipeline


def _advice_row(prompt: Prompt, node: str, text: str, inputs: Inputs) -> dict[str, Any]:
    """Advice to set one of ``inputs``, with the first widget for it on ``node`` or on the pipeline's way there."""
    places = ((each, name) for each in (node, *back(prompt, node, "pipeline")) for name in inputs)
    widgets = ((each, name) for each, name in places if not isinstance(prompt[each]["inputs"].get(name, []), list))
    at, name = next(widgets, ("", ""))  # a list is a link
    text += "" if at else "; no widget of this graph sets it"
    return {"text": text, "node": at, "input": name, "value": inputs.get(name)}


def _lighter_choices(prompt: Prompt, node: str, loaded: Inputs, stages: Iterable[Inputs]) -> Iterator[dict[str, Any]]:
    """Advice for stages that lack room: choices of the load node with which they need less, by a forecast of each."""
    loader = _loader_of(prompt, node)
    for before in (each for each in stages if each["fits"] in (STREAMS, TOO_MUCH)):
        stage, entry = before["stage"], prompt[loader]
        for name, value in LIGHTER.get(stage, {}).items():
            changed = {**prompt, loader: {**entry, "inputs": {**entry["inputs"], name: value}}}
            _, pipeline = _card(changed, loader)
            made = {} if pipeline is None else _forecast(changed, node, {**loaded, loader: pipeline})
            after = next((each for each in made.get("stages", ()) if each["stage"] == stage), before)
            now_fits = before["fits"] == TOO_MUCH and after["fits"] != TOO_MUCH
            if now_fits or after["whole"] < LESS_BY * before["whole"]:
                less = f"{amount_of(after['whole'])} instead of {amount_of(before['whole'])}, {after['fits']}"
                yield _advice_row(prompt, node, f"{name} {value} on the load node: {stage} {less}", {name: value})


def _forecast(prompt: Prompt, node: str, loaded: Inputs) -> dict[str, Any]:
    """The panel's row on a run of ``node``: memory by stage, verdict, seconds, advice; or ``error`` of its inputs."""
    kind, pipeline, numbers = prompt[node]["class_type"], loaded[_loader_of(prompt, node)], _numbers(prompt, node)
    mode, room = pipeline.offloader.mode, memory_manager.room_on(pipeline.offloader.device)
    try:
        if isinstance(pipeline, Pipeline):
            numbers, pipeline = _sampling_inputs(prompt, node, loaded)
            numbers["texts"] = _section_texts(prompt, node, pipeline)
            decode = checked_request(_decode_request(prompt, node), pipeline.spec.sizes.ratio)
            pipeline = replace(pipeline, run=replace(pipeline.run, decode=decode))
        else:
            numbers.setdefault("max_views", _views(prompt, node))
            if not prompt[node]["inputs"].get("negative_prompt"):
                numbers.pop("text_guidance", None)  # no effect without a negative prompt
        levels, why = _linked_sigmas(prompt, node)
        words, stages_in, times = RUNS[kind](numbers | levels, pipeline, room)
        lowest = MODES[-1] if mode in MODES and pipeline.offloader.device.type != "cpu" else mode
        most, least = stages_in("none" if mode == HOSTED else mode), stages_in(lowest)  # ComfyUI keeps all that fits
        stages = [_stage_row(*pair, room) for pair in zip(most, least, strict=True)]
        if mode != lowest and any(stage["peak"] < stage["whole"] for stage in stages):
            why = why or f"offload {mode} lacks room and steps down"
        if why:
            times.clear()
            times.why, times.less = why, ()
    except PackError as error:
        return {"error": error_message(error)}
    verdicts = dict.fromkeys(stage["fits"] for stage in stages)
    elsewhere = " and ".join(f"{need.name} on {need.device}" for need in least if need.device)
    time = times.get(mode)
    summary = f", {time or times.unknown}" if time or times.unknown else ""
    paint_size = "size" if kind == DELIGHTS else "view_size"
    lower = "width and height, or frames" if isinstance(pipeline, Pipeline) else paint_size
    headline = _headline(stages, summary, lower)
    return {
        "found": f"{'picture' if kind == DELIGHTS else words}, offload {mode}",
        "stages": stages,
        "verdict": "\n".join(MEANING[each] for each in verdicts if each in MEANING),
        "headline": f"{headline} {elsewhere[0].upper()}{elsewhere[1:]}." if elsewhere else headline,
        "seconds": {} if time is None else {stage.name: round(stage.seconds, 1) for stage in time.stages},
        "advice": [_advice_row(prompt, node, str(each), each.inputs) for each in times.less],
    }


def _headline(stages: Sequence[Mapping[str, Any]], time: str, lower: str) -> str:
    """A line on whether a run fits, its ``time`` and its peak; if it does not, with the widgets to ``lower``."""
    if not stages or any(stage["free"] is None for stage in stages):
        return f"free memory unknown{time}"
    worst = max(stages, key=lambda stage: ((FITS, PARTS, STREAMS, TOO_MUCH).index(stage["fits"]), stage["peak"]))
    name, fits = worst["stage"], worst["fits"]
    if fits == TOO_MUCH:
        advice = "" if name.startswith("text") else f" Lower {lower}."
        return f"Too much: {name} needs {amount_of(worst['least'])}, {amount_of(worst['free'])} free.{advice}"
    how = {PARTS: f", {name} in parts", STREAMS: f", streaming weights in {name}: slower"}.get(fits, "")
    peak = max(stages, key=lambda stage: stage["peak"])
    return f"Fits{how}{time}. {amount_of(peak['peak'])} at its peak ({peak['stage']}), {amount_of(peak['free'])} free."


def _stage_row(most: StageNeed, least: StageNeed, room: int | None) -> dict[str, Any]:
    """Fit of a stage in ``room`` bytes (None: unknown); ``most``: its need with all weights, ``least``: streamed."""
    room = most.room if most.device else room
    if room is None or most.total <= room:
        peak, fits = most.total + most.ahead, "" if room is None else FITS
    elif least.total <= room:
        peak, fits = room, STREAMS
    else:
        peak, fits = least.total, TOO_MUCH
    form = most.form if peak >= most.total else least.form
    fits = PARTS if form and fits in (FITS, STREAMS) else fits
    return {"stage": most.name, "peak": peak, "least": least.total, "whole": most.total, "free": room, "fits": fits}


def _plan_sampling(inputs: Inputs, pipeline: Pipeline, room: int | None) -> Asked:
    """The forecast of sampling with the ``inputs`` of a node by name, where ``room`` bytes of the device are free."""
    width, height, frames = (inputs[name] for name in SIZE)
    clips, mode, rooms = int(inputs["batch_size"]), pipeline.offloader.mode, memory_manager.room_on
    given = {name: inputs[name] for name in COUNTED if name in inputs}
    settings = SampleSettings(width, height, frames, steps=int(inputs.get("steps", 0)), **given)
    asked = Size(width, height, frames, window=int(inputs["window"]), clip="clip" in inputs)
    run = planned_run(pipeline, asked, settings, inputs.get("texts"))
    times = times_of(pipeline, run, [mode], room, rooms)
    if times:
        less = known_or_why(lambda: savings(pipeline, run, mode, room, rooms))[0] or ()
        times.less = [replace(one, seconds=clips * one.seconds) for one in less]
    times.update({name: one.of_clips(clips) for name, one in times.items()})
    words = f"{width}x{height}, {frames} frames" + f", {clips} videos" * (clips > 1)
    return words, lambda mode: forecast(pipeline, run.size, mode, room, rooms).stages, times


def _plan_painting(inputs: Inputs, pipeline: PaintPipeline, room: int | None) -> Asked:
    """The size unit of painting or delighting with a node's ``inputs``, the memory of its stages by offload
    mode, and times with ``room`` bytes free. An empty negative prompt has no ``text_guidance`` here."""
    scale = inputs.get("guidance", inputs.get("image_guidance"))
    guided = None if scale is None else int(scale != 1.0)  # rows of the batch beside the first
    if inputs.get("text_guidance", 1.0) != 1.0:
        guided = 2  # guidance by the text as well takes another
    size = DEMO_SIZE if is_demo(pipeline.source) else int(inputs.get("view_size", inputs.get("size", 0)))
    views = int(inputs.get("max_views", 0)) if pipeline.family == "paint_pbr" else 0  # others paint the six fixed ones
    run = painting.planned_run(pipeline, size, views, int(inputs.get("steps", 0)), guided)
    times = times_of(pipeline, run, (pipeline.offloader.mode,), room)
    return "views", lambda mode: painting.paint_needs(pipeline, run, mode, room), times


LOADERS: dict[str, tuple[Inputs, Callable[..., Any]]] = {  # inputs with their defaults, and what they ask of loading
    "AnyGPULoadPipeline": (requests.FOLDER_INPUTS, requests.folder_request),
    "AnyGPUComposePipeline": (requests.FILE_INPUTS, requests.files_request),
    "AnyGPULoadPaintPipeline": (requests.PAINT_INPUTS, requests.paint_request),
    MV_ADAPTER: (requests.ADAPTER_INPUTS, requests.adapter_request),
}
READERS: dict[type, Callable[..., Any]] = {PaintRequest: load_paint, AdapterRequest: load_adapter}
RUNS: dict[str, Callable[[Any, Any, int | None], Asked]] = {
    "AnyGPUSample": _plan_sampling,
    "AnyGPUSampleFramePack": _plan_sampling,
    DELIGHTS: _plan_painting,
    "AnyGPUPaintViews": _plan_painting,
    "AnyGPUTextureMesh": _plan_painting,
}
