"""Our path against the bare diffusers call: same model, same seed, side by side in one run.

    python benchmarks/overhead.py            # appends a row to benchmarks/results/overhead.csv

Time: ten interleaved repeats of sampling whose steps take at least half a second, medians. Memory: the peak of a fresh
process per path, the load included. Latents must be identical in fp32.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from table import append, machine

WIDTH, HEIGHT, FRAMES, STEPS, SEED, PROMPT = 256, 224, 33, 2, 7, "a red fox walks through fresh snow"
LAYERS, HEADS, HEAD_SIZE = 6, 16, 64


def model(folder: Path) -> Path:
    """A tiny LTX-Video whose transformer is large enough for a step of half a second."""
    import tiny
    from diffusers import LTXVideoTransformer3DModel

    target = folder / "ltx"
    shutil.copytree(tiny.build("ltx", folder / "tiny"), target)
    config = json.loads((target / "transformer" / "config.json").read_text())
    config |= {
        "num_layers": LAYERS,
        "num_attention_heads": HEADS,
        "attention_head_dim": HEAD_SIZE,
        "cross_attention_dim": HEADS * HEAD_SIZE,
    }
    shutil.rmtree(target / "transformer")
    torch.manual_seed(0)
    LTXVideoTransformer3DModel.from_config(config).save_pretrained(target / "transformer")
    return target


def ours(folder: Path):
    """A function that samples through our stages; prompt encoded and weights read before."""
    from anygpu.pipelines import stages
    from anygpu.pipelines.base import PromptRequest, SampleSettings, Silent
    from anygpu.pipelines.load.folder import load
    from anygpu.pipelines.requests import LoadRequest

    pipeline = load(LoadRequest(folder, precision="fp32", device="cpu"))
    prompt = stages.encode_prompt(pipeline, PromptRequest(PROMPT), Silent())
    settings = SampleSettings(WIDTH, HEIGHT, FRAMES, STEPS, SEED, 24.0, cfg=1.0)
    pipeline.parts.read("transformer")
    return lambda: stages.sample(pipeline, prompt, None, settings, Silent()).samples


def bare(folder: Path):
    """The same through the diffusers pipeline."""
    from diffusers import LTXPipeline

    pipeline = LTXPipeline.from_pretrained(folder, torch_dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    embeds, mask, _, _ = pipeline.encode_prompt(PROMPT, do_classifier_free_guidance=False, max_sequence_length=128)
    rows, columns, count = HEIGHT // 32, WIDTH // 32, (FRAMES - 1) // 8 + 1

    def run() -> torch.Tensor:
        packed = pipeline(
            prompt_embeds=embeds,
            prompt_attention_mask=mask,
            width=WIDTH,
            height=HEIGHT,
            num_frames=FRAMES,
            frame_rate=24.0,
            num_inference_steps=STEPS,
            guidance_scale=1.0,
            output_type="latent",
            generator=torch.Generator().manual_seed(SEED),
        ).frames
        return pipeline._unpack_latents(packed, count, rows, columns)

    return run


PATHS = {"ours": ours, "bare": bare}


def once(name: str, folder: Path) -> None:
    """One sampling in this process; prints its peak in KiB."""
    with torch.no_grad():
        PATHS[name](folder)()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def peak(name: str, folder: Path) -> int:
    """Peak KiB of a fresh process that loads and samples once."""
    command = [sys.executable, __file__, "--once", name, "--model", str(folder)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def main() -> None:
    """Measure, print, and append the row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--once", choices=PATHS)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--repeats", type=int, default=10)
    arguments = parser.parse_args()
    if arguments.once:
        once(arguments.once, arguments.model)
        return
    with tempfile.TemporaryDirectory() as scratch, torch.no_grad():
        folder = model(Path(scratch))
        peaks = {name: statistics.median(peak(name, folder) for _ in range(3)) for name in PATHS}
        runs = {name: path(folder) for name, path in PATHS.items()}
        results = {name: run() for name, run in runs.items()}
        difference = float((results["ours"] - results["bare"]).abs().max())
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for repeat in range(arguments.repeats):
            for name in sorted(runs, reverse=repeat % 2 == 1):
                started = time.perf_counter()
                runs[name]()
                seconds[name].append(time.perf_counter() - started)
    import diffusers

    medians = {name: statistics.median(values) for name, values in seconds.items()}
    row = {
        **machine(),
        "diffusers": diffusers.__version__,
        "seconds_per_step_bare": round(medians["bare"] / STEPS, 3),
        "time_ratio": round(medians["ours"] / medians["bare"], 4),
        "peak_bare_mib": round(peaks["bare"] / 1024),
        "peak_ratio": round(peaks["ours"] / peaks["bare"], 4),
        "largest_difference": difference,
    }
    append("overhead", [row])


if __name__ == "__main__":
    main()
