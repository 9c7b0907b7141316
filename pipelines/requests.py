"""The request that plain values of the load inputs ask for, as widgets, a graph's JSON or flags give them; load
nodes, side bar and command refuse the same. A new input is one row of :data:`LOAD_INPUTS` beside its widget."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..compat.decision import AUTO
from ..compat.device import precision
from ..compat.device.execution import HOST
from ..compat.device.facts import default_device, device_count
from ..compat.errors import InputError, UnsupportedError
from ..compat.transforms.compile import CACHE_SIZE, CompileSettings
from .speed import Profile, SpeedRequest


@dataclass(frozen=True, slots=True)
class Files:
    parts: Mapping[str, Path]  # part name to its file; ``transformer`` is needed, others are searched in ``offered``
    offered: Mapping[Path, tuple[str, ...]] = field(default_factory=dict)  # all files of the model folders to kinds
    task: str = AUTO  # ``text``, ``image``, or ``auto`` where the files decide
    tokenizers: Mapping[str, Path] = field(default_factory=dict)  # kind to folder, such as ComfyUI's own
    provided: Mapping[str, Path] = field(default_factory=dict)  # folders of parts and tools that no file brings
    known: str = ""  # its published configuration: as loaded, or in the run that this repeats; empty where that is open


@dataclass(frozen=True, slots=True)
class LoadRequest:
    model: Path  # folder of a diffusers pipeline, or of a transformer alone
    base: Path | None = None  # folder of the pipeline with the parts that a lone transformer lacks; ``auto`` searches
    image_encoder: Path | None = None  # folder with ``image_encoder`` and ``feature_extractor``; None searches
    variant: str = AUTO
    earlier: tuple[str, str] = ("", "")  # variant and recipe that ``auto`` became in the run that this repeats
    precision: str = AUTO
    offload: str = AUTO
    device: Any = None  # None for the default device; facts that were gathered before stand for the device they are of
    search: Sequence[Path] = ()  # folders in which ``auto`` looks for other models
    attention: str = AUTO  # which kernel the transformer's attention runs, for this pipeline alone
    state: Path | None = None  # folder of probe results; None asks the device nothing and relies on the tables
    files: Files | None = None  # single files to compose the pipeline of; ``model`` is then the transformer's
    weights: str = AUTO  # how the transformer's are kept, of ``packed.CHOICES``
    text_weights: str = AUTO  # and those of text encoders
    speed: SpeedRequest = field(default_factory=SpeedRequest)  # fused kernels, compile, profile
    devices: Mapping[str, Any] = field(default_factory=dict)  # ``transformer``, ``text_encoder`` or ``vae`` to device
    keep_free_gb: float = 0.0  # memory of the device that offload ``auto`` leaves to others
    quiet: bool = False  # goes by what is kept there, so that the device is neither asked nor timed
    stands_in_for: str = ""  # the published model in whose place this demo model runs; empty otherwise
    cards: Mapping[torch.device, int | None] = field(default_factory=dict)  # those for the parts, to free bytes


class LoadInput(NamedTuple):
    default: Any  # its value if none was chosen, of the input's type
    target: Callable[..., Any] | None = LoadRequest  # takes the value as an argument; None: this module does
    argument: str = ""  # name of that argument, where it is not the input's own


def part_devices(transformer: str = "auto", text: str = "auto", vae: str = "auto") -> dict[str, str]:
    """Part to device, without those left to ``auto``; ``gpu:1`` becomes ``cuda:1`` or the like. Raises UnsupportedError
    for an accelerator that torch does not see."""
    asked = {"transformer": transformer, "text_encoder": text, "vae": vae}
    chosen = {part: name for part, name in asked.items() if name not in ("auto", "")}
    for part, name in chosen.items():
        if name.startswith("gpu:"):
            kind, index = default_device().type, int(name.removeprefix("gpu:"))
            count = 0 if kind == HOST.type else device_count()
            if index >= count:
                found = f"device {name!r} where torch sees {count} accelerator{'' if count == 1 else 's'}"
                fix = "Choose auto."
                raise UnsupportedError(found, expected="auto, cpu, or the number of an existing accelerator", fix=fix)
            chosen[part] = f"{kind}:{index}"
    return chosen


LOAD_INPUTS: dict[str, LoadInput] = {
    "variant": LoadInput(AUTO),
    "precision": LoadInput(AUTO),
    "offload": LoadInput(AUTO),
    "attention": LoadInput(AUTO),
    "weights": LoadInput(AUTO),
    "text_weights": LoadInput(AUTO),
    "keep_free_gb": LoadInput(0.0),
    "transformer_device": LoadInput(AUTO, part_devices, "transformer"),
    "text_device": LoadInput(AUTO, part_devices, "text"),
    "vae_device": LoadInput(AUTO, part_devices, "vae"),
    "kernels": LoadInput(AUTO, SpeedRequest),
    "fp16_accumulation": LoadInput(False, SpeedRequest, "fp16_sums"),
    "stored_products": LoadInput(False, SpeedRequest),
    "compile": LoadInput(False, None),
    "compile_mode": LoadInput("default", CompileSettings, "mode"),
    "compile_dynamic": LoadInput("text", CompileSettings, "dynamic"),
    "compile_cache_size": LoadInput(CACHE_SIZE, CompileSettings, "cache_size"),
    "compile_vae": LoadInput(False, CompileSettings, "vae"),
}


BECAME = ("resolved_variant", "resolved_recipe", "resolved_model")  # of a job: what the model became by ``auto``
LORA_MODES = ("separate", "merged")  # how a LoRA is put on; grows at the end
# What kijai's wrappers and core's loaders call a precision, as the way of storing weights that it is here.
STORED: dict[str, str] = {"fp8_e4m3fn": "fp8", "fp8_e4m3fn_fast": "fp8", "fp8_scaled": "as in file"}
PRECISIONS = (*precision.CHOICES, *STORED)


def with_storage(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """``values``, where a precision that names a way of storing weights (:data:`STORED`) is moved to ``weights``;
    InputError where ``weights`` names another."""
    named, stored = values.get("precision"), values.get("weights", AUTO)
    if named not in STORED:
        return values
    if stored not in (AUTO, STORED[named]):
        found = f"precision {named!r} with weights {stored!r}"
        fix = f"Set precision to auto, or weights to auto: {named} stores them as {STORED[named]!r}."
        raise InputError(found, expected="one way of storing weights", fix=fix)
    return {**values, "precision": AUTO, "weights": STORED[named]}


def load_request(values: Mapping[str, Any], trace: Path | None = None, **folders: Any) -> LoadRequest:
    """The request that the inputs ``values`` make; a missing input has its default, unknown names are ignored.
    ``trace`` is the file of a profile; ``folders`` are the arguments of :class:`LoadRequest` that are no inputs. Raises
    InputError for a value out of range, UnsupportedError for an absent accelerator."""
    values = with_storage(values)

    def chosen(target: Callable[..., Any]) -> dict[str, Any]:
        rows = ((name, row) for name, row in LOAD_INPUTS.items() if row.target is target)
        return {row.argument or name: values.get(name, row.default) for name, row in rows}

    compiling = CompileSettings(**chosen(CompileSettings)) if values.get("compile") else None
    speed = SpeedRequest(compile=compiling, profile=None if trace is None else Profile(trace), **chosen(SpeedRequest))
    return LoadRequest(**folders, speed=speed, devices=part_devices(**chosen(part_devices)), **chosen(LoadRequest))


def inputs_of(request: LoadRequest) -> dict[str, Any]:
    """The load inputs, by name, that make ``request``, without the devices of parts, and compile's if it is off."""
    compiling = request.speed.compile
    holders: dict[Any, Any] = {LoadRequest: request, SpeedRequest: request.speed, CompileSettings: compiling}
    values: dict[str, Any] = {"compile": compiling is not None}
    for name, row in LOAD_INPUTS.items():
        holder = holders.get(row.target)
        if holder is not None:
            values[name] = getattr(holder, row.argument or name)
    return values
