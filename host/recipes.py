"""Distillations that core's own samplers run, and what a graph behind AnyGPU Fit sets otherwise than their recipes: of
each setting core_recipes.json has the usual value, the least and the most in its source or a template of core's."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..compat.errors import InputError
from ..pipelines.files.evidence import Evidence, names_of_file, published

ROWS, FITS, WEIGHTS = "core_recipes", ("AnyGPUFit", "AnyGPUFitModel"), (".safetensors", ".sft", ".gguf")
MOST, MOST_NAME, LARGEST = 64, 260, 1e9  # nodes on a way back, and samplers; characters of a path; above any widget
PARTS = ("guider", "sampler", "sigmas")  # inputs whose nodes hold the settings of SamplerCustomAdvanced
SHIFTS = ("ModelSampling", "MiniMaxH3SigmaShift")  # nodes behind a model that shift its noise levels
RENAMED = {"video_cfg": "cfg", "shift_video": "shift"}
SETTINGS = {"steps": "{:g} steps", "cfg": "cfg {:g}", "shift": "shift {:g}", "sampler": "{}", "scheduler": "{}"}
UNFIT = ("karras", "exponential")  # spend too few of a flow model's few steps on high noise
FROM_NOISE, ROUNDED = 0.99, 1e-6  # a denoise below is a second pass; how far rounding moves a setting
Prompt = Row = Mapping[str, Any]


def recipe_of(path: Path) -> Row | None:
    """The row of the distillation that a file's name, or a folder's name before it, stands for; None for none."""
    own, *folders = names_of_file(path) or ("",)
    names, rows = (own, *(f"{each} {path.stem}" for each in folders)), published(ROWS)
    around = [Evidence(names=(each,)) for each in names]
    return next((row for each in around for row in rows if each.name_with(row["named"])), None)


def advice(prompt: Prompt | None, fit: str = "") -> dict[str, InputError]:
    """Id of a sampler -> an error on settings that its model's distillation was not made for, if the model comes
    through the node ``fit``, by default any fit node. Samplers that differ alike, as Wan 2.2's two, count once."""
    errors: dict[tuple[str, str], tuple[str, InputError]] = {}  # by recipe and differences
    prompt = {key: entry for key, entry in (prompt or {}).items() if entry.keys() >= {"class_type", "inputs"}}
    for node in [node for node, entry in prompt.items() if "latent_image" in entry["inputs"]][:MOST]:
        found = settings(prompt, node)
        apart = [differences(row, found) for row in found["files"].values()]
        if apart and all(apart) and (fit in found["fits"] if fit else found["fits"]):
            name, row = next(iter(found["files"].items()))
            usual = [text.format(row[setting][0]) for setting, text in SETTINGS.items() if setting in row]
            fix = f"Set these around {prompt[node]['class_type']}. {row.get('note', '')}Source: {row['source']}."
            error = InputError(f"{name} in a graph with {apart[0]}", expected=", ".join(usual), fix=fix)
            errors.setdefault((row["named"], apart[0]), (node, error))
    return dict(errors.values())


def differences(row: Row, found: Mapping[str, Any]) -> str:
    """The settings ``found`` in a graph that are outside the recipe ``row``, in words; empty for none."""
    words = [found["unfit"]] if "steps" in row and found["unfit"] else []
    for name in (name for name in SETTINGS if name in found and name in row):
        (_, least, most), (value, low, high) = row[name], found[name]
        if low < least - ROUNDED or high > most + ROUNDED:
            words.append(SETTINGS[name].format(value))
    return ", ".join(words)


def _inputs_of(prompt: Prompt, nodes: Sequence[str]) -> dict[str, Any]:
    """Numbers and texts that ``nodes`` are given, by our names; of two nodes with one name the first counts."""
    pairs = [pair for each in nodes for pair in prompt[each]["inputs"].items()]
    values = ((name, value_of(prompt, value)) for name, value in reversed(pairs))  # a later entry replaces earlier ones
    given = {RENAMED.get(name, name): value for name, value in values if isinstance(value, (int, float, str))}
    if levels := re.findall(r"\d*\.?\d+", str(given.get("sigmas", ""))):
        given |= {"steps": len(levels) - 1, "denoise": float(levels[0])}
    return given | ({"cfg": 1.0} if any(prompt[each]["class_type"] == "BasicGuider" for each in nodes) else {})


def settings(prompt: Prompt, node: str) -> dict[str, Any]:
    """Settings around a sampler: ``steps``, ``cfg`` and ``shift``, where known, each as (value, the value that may be
    too low, the value that may be too high); ``unfit``, a scheduler or False; and, on the model's way to it, the
    distilled ``files`` -> their rows, and the fit nodes ``fits``, nearest first."""
    nodes = [node, *(each for name in PARTS for each in back(prompt, node, name))]
    models = [*back(prompt, next((each for each in nodes if "model" in prompt[each]["inputs"]), node), "model")]
    shifts = [each for each in models if prompt[each]["class_type"].startswith(SHIFTS)]
    given = _inputs_of(prompt, (*nodes, *shifts))
    numbers = {k: float(v) for k, v in given.items() if type(v) in (int, float) and abs(v) < LARGEST}
    found: dict[str, Any] = {name: (numbers[name],) * 3 for name in ("steps", "cfg", "shift") if name in numbers}
    if steps := numbers.get("steps", 0.0):
        run = min(steps, numbers.get("end_at_step", steps)) - numbers.get("start_at_step", 0.0)
        found["steps"] = (steps, steps if numbers.get("denoise", 1.0) >= FROM_NOISE else LARGEST, run)
    unfit = given.get("scheduler") in UNFIT and given["scheduler"]
    fits = [each for each in models if prompt[each]["class_type"] in FITS]
    return {**found, "unfit": unfit, "files": _distillations(prompt, models), "fits": fits}


def _distillations(prompt: Prompt, models: list[str]) -> dict[str, Row]:
    """Stem of each distilled checkpoint or LoRA that the nodes ``models`` load at enough strength -> its row."""
    inputs = [{name: value_of(prompt, value) for name, value in prompt[each]["inputs"].items()} for each in models]
    files: dict[str, Row] = {}
    for fields in (each for own in inputs for each in (own, *own.values()) if isinstance(each, dict)):  # or in a stack
        strength = fields.get("strength_model", fields.get("strength", 1.0)) if fields.get("on", True) else 0.0
        for name in (each for each in fields.values() if isinstance(each, str) and each.endswith(WEIGHTS)):
            path = Path(name[-MOST_NAME:].replace("\\", "/"))
            row = recipe_of(path)
            if row and (not isinstance(strength, (int, float)) or strength >= row.get("strength", 0.5)):
                files.setdefault(path.stem, row)
    return files


def back(prompt: Prompt, node: str, name: str) -> Iterator[str]:
    """The nodes on the way back through the inputs ``name``, the nearest first."""
    for _ in range(MOST):
        link = value_of(prompt, prompt[node]["inputs"].get(name))
        if not isinstance(link, list):
            return
        yield (node := link[0])


def value_of(prompt: Prompt, given: Any, most: int = MOST) -> Any:
    """The value of an input, through Primitive and Switch nodes; a link for one that is computed, None if unknown."""
    if not isinstance(given, list):
        return given
    entry = prompt.get(given[0]) if most and len(given) == 2 and isinstance(given[0], str) else None
    if entry is None or not entry["class_type"].startswith(("Primitive", "ComfySwitch")):
        return given if entry else None
    inputs = entry["inputs"]
    switch = value_of(prompt, inputs.get("switch"), most // 2)
    name = ("on_false", "on_true")[switch] if isinstance(switch, bool) else "value"
    return value_of(prompt, inputs.get(name), most // 2)
