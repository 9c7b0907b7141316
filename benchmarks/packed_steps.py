"""The cost of a step with every matrix packed, against packed but for modulations and embedders.

Modulations are a third of HunyuanVideo's weights. Packed they save memory and are unpacked at each step. Models as wide
and deep as `tests/heavy.py`, random weights quantised to fp8 with a scale per row and, as random blocks, to GGUF's
Q4_K, 512 x 512 pixels; both ways alternate, and the fastest of several steps counts, in seconds of the processor.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import tiny
import torch
from anygpu.compat.checkpoints import packed
from anygpu.pipelines import stages
from anygpu.pipelines.base import FramePackSettings, ImageRequest, PromptRequest, SampleSettings, Silent
from anygpu.pipelines.load.folder import LoadRequest, load
from heavy import build_heavy
from runner import SCRATCH, Case, Row, in_turn, processor
from torch import nn

WAYS = ("fp8", "Q4_K")
FRAMES = {"ltx": 9, "hunyuan_video": 5, "hunyuan_video_15": 5, "framepack": 5, "mochi": 7}
SIDE, ROUNDS = 512, 3  # pixels of a side; steps of each way


def pack(layer: nn.Linear, way: str) -> None:
    """Pack a layer: fp8 as its own values, Q4_K as random blocks, which are unpacked just as slowly."""
    if way == "fp8":
        stored, factors = packed.eight_bits(layer.weight.detach(), "fp8")
        packed.pack(layer, stored, factors, layer.weight.dtype)
        return
    raw = numpy.random.default_rng(0).integers(0, 256, (layer.out_features, layer.in_features // 256 * 144), "uint8")
    packed.pack(layer, torch.from_numpy(raw), None, layer.weight.dtype, way)


def recorded(family: str, folder: Path) -> tuple[nn.Module, dict[str, Any]]:
    """A family's heavy transformer, and what one step gives it."""
    base, encoder = [tiny.build(name, folder) for name in tiny.TINY[family].beside] or (None, None)
    pipeline = load(LoadRequest(build_heavy(family, folder), base, encoder, precision="fp32", device="cpu"))
    transformer, given = pipeline.parts["transformer"], {}
    hook = transformer.register_forward_pre_hook(lambda _m, _a, named: given.update(named), with_kwargs=True)
    settings = SampleSettings(SIDE, SIDE, FRAMES[family], 2, cfg=1.0)
    with torch.no_grad():
        prompt = stages.encode_prompt(pipeline, PromptRequest("a red fox"), Silent())
        if pipeline.spec.recipes.sections:
            picture = torch.rand(1, SIDE, SIDE, 3, generator=torch.Generator().manual_seed(0))
            image = stages.encode_image(pipeline, ImageRequest(picture, SIDE, SIDE), "stretch", Silent())
            stages.sample_framepack(pipeline, prompt, image, settings, FramePackSettings(13 / 30, 2), Silent())
        else:
            stages.sample(pipeline, prompt, None, settings, Silent())
    hook.remove()
    return transformer, given


def row(family: str, way: str, transformer: nn.Module, given: dict[str, Any]) -> dict[str, Any]:
    """Seconds of a step in both ways, and what they hold."""
    both = {}
    for name in ("but modulations", "all"):
        module = copy.deepcopy(transformer)
        layers = packed.packable(module, exact=True)
        chosen = [layer for key, layer in layers.items() if name == "all" or not packed.DENSE.search(key)]
        for layer in chosen:
            if way == "fp8" or layer.in_features % 256 == 0:
                pack(layer, way)
        both[name] = module
    with torch.no_grad():
        calls = {name: partial(module, **given) for name, module in both.items()}
        seconds = {name: min(times) for name, times in in_turn(calls, ROUNDS, processor, warm_up=0).items()}
    held = {name: sum(t.nbytes for t in module.state_dict().values()) / 2**20 for name, module in both.items()}
    return {
        "model": f"heavy {family}",
        "weights": way,
        "mib_but_modulations": round(held["but modulations"], 1),
        "mib_all": round(held["all"], 1),
        "seconds_but_modulations": round(seconds["but modulations"], 3),
        "seconds_all": round(seconds["all"], 3),
        "ratio": round(seconds["all"] / seconds["but modulations"], 3),
    }


def rows(families: tuple[str, ...]) -> Iterator[Row]:
    """A row per family and way."""
    for family in families:
        transformer, given = recorded(family, SCRATCH)
        yield from (row(family, way, transformer, given) for way in WAYS)


CASES = [Case("packed_steps", rows, {"families": tuple(FRAMES)}, "packed_steps")]
