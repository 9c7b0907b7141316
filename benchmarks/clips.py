"""Whole clips with neither, kernels, compile and both, side by side: load excluded, decode included.

    python benchmarks/clips.py --model models/LTX-Video     # appends rows to benchmarks/results/clips.csv

Same seed and prompt, forms in shuffled order, medians. ``warm_up_s`` is the first clip, which compiles; ``pays_after``
the number of clips after which that is won back against ``neither``. Without ``--model`` a tiny LTX-Video on the CPU
shows that the script runs, and nothing is appended: its times say nothing about a real model; ``--heavy`` measures the
heavy tiny model of a family instead, and appends.
"""

from __future__ import annotations

import argparse
import math
import platform
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from table import append, machine

SEED, PROMPT = 7, "a red fox walks through fresh snow"
FORMS = {"neither": ("off", False), "kernels": ("auto", False), "compile": ("off", True), "both": ("auto", True)}


def clips(model: Path, arguments: argparse.Namespace):
    """For each form a function that makes one clip, and its pipeline."""
    from anygpu.compat.transforms.compile import CompileSettings
    from anygpu.pipelines import stages
    from anygpu.pipelines.base import PromptRequest, SampleSettings, Silent
    from anygpu.pipelines.load.folder import load
    from anygpu.pipelines.requests import LoadRequest
    from anygpu.pipelines.speed import SpeedRequest

    settings = SampleSettings(arguments.width, arguments.height, arguments.frames, arguments.steps, SEED)
    for name, (kernels, compiled) in FORMS.items():
        speed = SpeedRequest(kernels, CompileSettings() if compiled else None)
        pipeline = load(LoadRequest(model, device=arguments.device, speed=speed))
        with torch.no_grad():
            prompt = stages.encode_prompt(pipeline, PromptRequest(PROMPT), Silent())
            pipeline.parts.read("transformer")
            pipeline.parts.read("vae")

        def one(pipeline=pipeline, prompt=prompt):
            with torch.no_grad():
                return stages.decode(pipeline, stages.sample(pipeline, prompt, None, settings, Silent()), Silent())

        yield name, one, pipeline


def device_name(facts) -> str:
    """What the table calls a device; a CPU, which torch does not name, goes by its kind and threads."""
    return facts.name if facts.backend != "cpu" else f"CPU {platform.machine()}, {torch.get_num_threads()} threads"


def seconds(call) -> float:
    """Of one clip, which ends with frames on the host."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def rows(model: Path, arguments: argparse.Namespace):
    """A row per form."""
    made, says, warm = {}, {}, {}
    for name, one, pipeline in clips(model, arguments):
        warm[name] = seconds(one)
        made[name], says[name] = one, pipeline.plan.speed.line(pipeline.family)
    spent = {name: [] for name in made}
    for _ in range(arguments.rounds):
        for name in random.sample(list(made), len(made)):
            spent[name].append(seconds(made[name]))
    middle = {name: statistics.median(times) for name, times in spent.items()}
    for name in made:
        gain, cost = middle["neither"] - middle[name], warm[name] - middle[name]
        yield machine() | {
            "device": device_name(pipeline.facts),
            "family": pipeline.family,
            "model": model.name,
            "form": name,
            "clip_s": round(middle[name], 3),
            "over_neither": round(middle["neither"] / middle[name], 3),
            "warm_up_s": round(warm[name], 2),
            "pays_after": max(1, math.ceil(cost / gain)) if gain > 0 and name != "neither" else "",
            "rounds": arguments.rounds,
            "line": says[name],
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a diffusers folder")
    parser.add_argument("--heavy", help="a family whose heavy tiny model is measured on the CPU")
    parser.add_argument("--device", default=None)
    parser.add_argument("--rounds", type=int, default=5)
    for name in ("--width", "--height", "--frames", "--steps"):
        parser.add_argument(name, type=int, default=0, help="0: the model's default")
    arguments = parser.parse_args()
    if arguments.model:
        append("clips", rows(Path(arguments.model), arguments))
        return 0
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
    import tiny
    from heavy import build_heavy

    torch.set_num_threads(1)
    if arguments.heavy:
        arguments.device = "cpu"
        with tempfile.TemporaryDirectory() as folder:
            append("clips", rows(build_heavy(arguments.heavy, Path(folder)), arguments))
        return 0
    arguments.device, arguments.width, arguments.height, arguments.frames, arguments.steps = "cpu", 64, 64, 9, 4
    with tempfile.TemporaryDirectory() as folder:
        for row in rows(tiny.build("ltx", Path(folder)), arguments):
            print(row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
