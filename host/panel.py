"""What the side bar shows, as plain values: the machine, the pipelines of a graph, the last run, kept latents."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ..compat import plan
from ..compat.accounts import kept_stages
from ..compat.answers import answers_of
from ..compat.compiling import CACHE_SIZE, CompileSettings
from ..compat.device import GIBIBYTE, DeviceFacts, facts_for, free_bytes
from ..compat.errors import PackError
from ..compat.lights import lights
from ..compat.probe_store import UNKNOWN
from ..compat.report import report_on
from ..pipelines import limits
from ..pipelines.cards import card_of
from ..pipelines.contract import Loaded
from ..pipelines.downloads import first_steps
from ..pipelines.estimates import Size, forecast
from ..pipelines.grid import snap
from ..pipelines.hardware import TITLES
from ..pipelines.loading import AUTO, LoadRequest, load
from ..pipelines.speed import SpeedRequest
from ..pipelines.stages import of_checkpoint
from . import folders, memory

LOAD_NODE, SAMPLE_NODES = "AnyGPULoadPipeline", ("AnyGPUSample", "AnyGPUSampleFramePack")
MOST_PIPELINES, MOST_STEPS = 8, 32
LARGEST = 1e9  # of a number that a widget holds
OUTLOOK = {  # offload mode -> what its numbers mean
    "comfyui": "The least: ComfyUI keeps as many weights on the device as fit beside the rest.",
}
PLAIN_FIELDS = {"variant": AUTO, "precision": AUTO, "offload": AUTO, "attention": AUTO, "weights": AUTO}
PLAIN_FIELDS |= {"text_weights": AUTO, "keep_free_gb": 0.0}
DEVICE = re.compile(r"cpu|gpu:\d{1,3}")

_facts: dict[str, DeviceFacts] = {}
_tooltips: dict[tuple[str, str], str] = {}


def facts() -> DeviceFacts:
    """Facts about the device that ComfyUI computes on, gathered once per device."""
    return _facts_of(str(memory.compute_device()))


def limit_tooltip(name: str) -> str:
    """What an input of the load node cannot do on this machine, to append to its tooltip; empty for nothing."""
    key = (str(memory.compute_device()), name)
    if key not in _tooltips:
        _tooltips[key] = limits.tooltip(facts(), name)
    return _tooltips[key]


def limit_lines() -> list[str]:
    """What cannot work on this machine, as the last line of the status under the load node; none for nothing."""
    return [line] if (line := limits.line(facts())) else []


def first_run() -> str:
    """What to do while no model is installed; empty once there is one."""
    if folders.models():
        return ""
    here, host = facts(), _facts_of("cpu").total_bytes
    size = f"{here.name}, {host / GIBIBYTE:.0f} GB of host memory"
    return first_steps(folders.model_roots(), size, host)


def memory_now() -> dict[str, Any]:
    """Bytes free and in all, of the device and of the host; ``free`` of the device is None where nobody tells."""
    here, host = facts(), _facts_of("cpu")
    return {
        "device": {"name": here.name, "free": free_bytes(here.device), "total": here.total_bytes},
        "host": {"name": host.name, "free": free_bytes(host.device), "total": host.total_bytes},
        "shared": here.device.type == host.device.type,
    }


def machine(again: bool = False) -> dict[str, Any]:
    """The device, its memory, a light per probe, and the report on it; nothing is asked unless ``again``.

    Raises:
        UnsupportedError: the device has gone.
    """
    here = facts()
    store = answers_of(here, folders.state_folder())
    if again:
        store.ask_all(again=True)
    known = store.without_asking()
    report = report_on(here, known, TITLES, free_bytes(here.device), note=store.note)
    return {
        "device": str(here),
        "memory": memory_now(),
        "lights": [asdict(light) for light in lights(here, known)],
        "asked": all(answer.status != UNKNOWN for answer in known.values()),
        "sections": [
            {"heading": heading, "lines": [asdict(line) for line in lines]} for heading, lines in report.sections
        ],
        "limits": limits.limits(here),
        "first_run": first_run(),
    }


def graph(prompt: Mapping[str, Any]) -> dict[str, Any]:
    """What would be decided for each load node of a prompt, and what each sample node will need; no weights are read.

    Args:
        prompt: node id to ``class_type`` and ``inputs``, as the frontend posts it; checked by the caller.
    """
    loaders = {node: entry["inputs"] for node, entry in prompt.items() if entry["class_type"] == LOAD_NODE}
    cards, pipelines = [], {}
    for node, inputs in list(loaders.items())[:MOST_PIPELINES]:
        card, pipelines[node] = _card(node, inputs)
        cards.append(card)
    samples = [node for node, entry in prompt.items() if entry["class_type"] in SAMPLE_NODES]
    found = [(node, pipelines.get(_loader_of(prompt, node))) for node in samples[:MOST_PIPELINES]]
    told = [_outlook(node, prompt[node]["inputs"], loaded) for node, loaded in found if loaded is not None]
    return {"pipelines": cards, "forecasts": told}


def last_costs(since: str) -> list[dict[str, Any]]:
    """Peak and moved bytes of the stages that ended at ``since`` (year-month-day hour:minute) or later."""
    found = [cost for cost in kept_stages(folders.state_folder()) if since and cost.date >= since]
    return [{"stage": cost.stage, "text": str(cost), "peak": cost.peak_bytes} for cost in found]


def said(error: PackError) -> dict[str, str]:
    """An error as its three parts."""
    return {"found": error.found, "expected": error.expected, "fix": error.fix}


def _facts_of(device: str) -> DeviceFacts:
    if device not in _facts:
        _facts[device] = facts_for(device)
    return _facts[device]


def _loader_of(prompt: Mapping[str, Any], node: str) -> str:
    """The load node that a pipeline comes from, through nodes that pass it on; empty where there is none."""
    for _ in range(MOST_STEPS):
        entry = prompt.get(node)
        if entry is None or entry["class_type"] == LOAD_NODE:
            return "" if entry is None else node
        link = entry["inputs"].get("pipeline")
        if not (isinstance(link, list) and len(link) == 2 and isinstance(link[0], str)):
            return ""
        node = link[0]
    return ""


def _outlook(node: str, inputs: Mapping[str, Any], loaded: Loaded) -> dict[str, Any]:
    """What each stage will need beside what is free, for the size on a sample node; linked values count as unset."""
    family = of_checkpoint(loaded)
    plain = {name: value for name, value in inputs.items() if isinstance(value, (int, float)) and 0 < value < LARGEST}
    try:
        frames = int(plain.get("frames", 0))
        if "clip_seconds" in plain:
            frames = int(plain["clip_seconds"] * plain.get("fps", family.defaults.fps))
        size = snap(family, int(plain.get("width", 0)), int(plain.get("height", 0)), frames)
    except PackError as error:
        return {"node": node, "error": said(error)}
    cfg = plain.get("cfg", family.defaults.cfg)
    needs = forecast(loaded, Size(size.width, size.height, size.frames, cfg > 1.0, int(plain.get("window", 9))))
    free = free_bytes(facts().device)
    stages = [
        {"stage": stage.name, "peak": stage.total, "free": free, "fits": _fits(stage.total, free)}
        for stage in needs.stages
    ]
    found = f"{size.width}x{size.height}, {size.frames} frames, offload {needs.mode}"
    return {"node": node, "found": found, "stages": stages, "verdict": OUTLOOK.get(needs.mode, "")}


def _fits(needed: int, free: int | None) -> str:
    return "" if free is None else "fits" if needed <= free else "too much"


def _card(node: str, inputs: Mapping[str, Any]) -> tuple[dict[str, Any], Loaded | None]:
    """The card of a load node, and its pipeline where it can be loaded."""
    store = answers_of(facts(), folders.state_folder())
    known = store.without_asking()
    asked = all(answer.status != UNKNOWN for answer in known.values())
    try:
        loaded = load(_request(inputs, asked), hosted=memory.managed)
        return {"node": node, **card_of(loaded, known), "by_tables": not asked}, loaded
    except PackError as error:
        return {"node": node, "model": str(inputs.get("model", "")), "error": said(error)}, None


def _request(inputs: Mapping[str, Any], asked: bool) -> LoadRequest:
    """What the load node would ask, from its widget values; a linked input, or one of another type, counts as not set.

    Where the device was not asked everything yet, its state is left out, so that this asks nothing either.
    """

    def given(name: str, default: Any) -> Any:
        value = inputs.get(name, default)
        if type(default) is float and type(value) is int and abs(value) < LARGEST:  # JSON writes 2.0 as 2
            value = float(value)
        return value if type(value) is type(default) else default

    own = {name: given(name, default) for name, default in PLAIN_FIELDS.items()}
    places = [given(f"{part}_device", AUTO) for part in ("transformer", "text", "vae")]
    graphs = CompileSettings(
        given("compile_mode", "default"), given("compile_dynamic", "text"), given("compile_cache_size", CACHE_SIZE)
    )
    return LoadRequest(
        folders.model_folder(given("model", folders.NO_MODEL)),
        folders.lender_folder(given("base", AUTO)),
        folders.lender_folder(given("image_encoder", AUTO)),
        device=facts(),
        search=(*folders.model_roots(), *folders.encoder_roots()),
        state=folders.state_folder() if asked else None,
        speed=SpeedRequest(given("kernels", AUTO), graphs if given("compile", False) else None),
        devices=plan.places(*(place if DEVICE.fullmatch(place) else AUTO for place in places)),
        **own,
    )
