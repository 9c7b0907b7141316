"""What a step costs with every matrix packed, against packed but for modulations and embedders, in one run.

    python benchmarks/packed_steps.py     # appends rows to benchmarks/results/packed_steps.csv

Modulations are a third of HunyuanVideo's weights. Packed they save memory and are unpacked at each step; this measures
what that costs. Models as wide and deep as `tests/heavy.py`, random weights quantised to fp8 with a scale per row and,
as random blocks, to GGUF's Q4_K, 512 x 512 pixels; both ways alternate, and the fastest of several steps counts, in
seconds of the processor.
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy
import torch
from steps import CHECKPOINTS, FRAMES
from table import append, machine
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from anygpu.compat.checkpoints import packed

WAYS = ("fp8", "Q4_K")
SIDE, ROUNDS = 512, 3
"""Pixels of a side; steps of each way, of which the fastest counts."""


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
    import tiny
    from anygpu.pipelines import stages
    from anygpu.pipelines.base import FramePackSettings, ImageRequest, PromptRequest, SampleSettings, Silent
    from anygpu.pipelines.load.folder import load
    from anygpu.pipelines.requests import LoadRequest
    from heavy import build_heavy

    first, *beside = CHECKPOINTS[family]
    base, encoder = [tiny.build(name, folder) for name in beside] or (None, None)
    pipeline = load(LoadRequest(build_heavy(first, folder), base, encoder, precision="fp32", device="cpu"))
    transformer, given = pipeline.parts["transformer"], {}
    hook = transformer.register_forward_pre_hook(lambda _m, _a, named: given.update(named), with_kwargs=True)
    settings = SampleSettings(SIDE, SIDE, FRAMES.get(family, 5), 2, cfg=1.0)
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
    seconds = dict.fromkeys(both, math.inf)
    with torch.no_grad():
        for _ in range(ROUNDS):
            for name, module in both.items():
                started = time.process_time()
                module(**given)
                seconds[name] = min(seconds[name], time.process_time() - started)
    held = {name: sum(t.nbytes for t in module.state_dict().values()) / 2**20 for name, module in both.items()}
    return machine() | {
        "model": f"heavy {family}",
        "weights": way,
        "mib_but_modulations": round(held["but modulations"], 1),
        "mib_all": round(held["all"], 1),
        "seconds_but_modulations": round(seconds["but modulations"], 3),
        "seconds_all": round(seconds["all"], 3),
        "ratio": round(seconds["all"] / seconds["but modulations"], 3),
    }


def main() -> None:
    """Measure each family in each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="*", default=list(CHECKPOINTS))
    torch.set_num_threads(1)
    for family in parser.parse_args().families:
        with tempfile.TemporaryDirectory() as folder:
            transformer, given = recorded(family, Path(folder))
            append("packed_steps", [row(family, way, transformer, given) for way in WAYS])


if __name__ == "__main__":
    main()
