"""Forecasts of time beside runs: one call of each family's transformer and decoder at published widths, three sizes.

    OMP_NUM_THREADS=1 python benchmarks/minutes.py                # appends to benchmarks/results/minutes.csv
    OMP_NUM_THREADS=1 python benchmarks/minutes.py --families ltx delight

One block of each kind, of delighting the whole UNet; weights that are all alike, fp32, CPU, one thread. The device is
probed once, before anything is loaded, as in use: later the C library has memory to spare that the system has filled,
and copies that need no new pages are up to three times as quick.
Seconds are CPU time of the process, so other programs disturb them little. `corrected_s` is what is said after a run of
the first size: the forecast times how much longer that one was.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from anygpu.compat.device.work import META, PROBED, Pace, _measured, counting
from anygpu.compat.memory.statistics import StageCost
from anygpu.paint.networks.multiview import TEXT_TOKENS, TEXT_WIDTH
from anygpu.paint.networks.published import DELIGHT_CHANNELS, networks_for
from anygpu.paint.networks.unet import set_attention
from anygpu.paint.networks.vae import REDUCTION
from anygpu.pipelines.forecast import counts
from anygpu.pipelines.forecast.times import corrected
from anygpu.pipelines.load.folder import load
from anygpu.pipelines.pipeline import Pipeline
from anygpu.pipelines.requests import LoadRequest
from anygpu.pipelines.sizes import Size, latent_shape
from anygpu.pipelines.vae.tiled import decoder_call
from table import append, machine
from tiny import build

FAMILIES = ("ltx", "hunyuan_video", "hunyuan_video_15", "framepack", "mochi")
SIZES = ((320, 192), (416, 256), (512, 320))  # pixels of a call of the transformer
PICTURES = ((96, 96), (128, 96), (128, 128))  # of a decode
LARGER = {"ltx": 4}  # sides of a decode, whose latents are smaller: below 12 cells torch has slow convolutions
TOKENS = 256  # of text
PAINTED = (384, 448, 512)  # pixels of a delighted picture
HOST = torch.device("cpu")
clock = time.process_time


def opened(family: str, folder: Path) -> Pipeline:
    """The tiny model of a family on the CPU."""
    extra = {"base": build("hunyuan_video", folder), "image_encoder": build("siglip", folder)}
    return load(LoadRequest(build(family, folder), **(extra if family == "framepack" else {}), device="cpu"))


def published(pipeline: Pipeline, whole: bool = False) -> Pipeline:
    """``pipeline`` with the published configurations in fp32, and one block of each kind or the ``whole`` depth."""
    configs = dict(pipeline.configs)
    for part in ("transformer", "vae"):
        file = pipeline.spec.folder / f"{part}.json"
        if not file.is_file():  # it has another family's
            file = pipeline.spec.folder.parent / "hunyuan_video" / f"{part}.json"
        content = json.loads(file.read_text(encoding="utf-8"))
        first = content[0] if isinstance(content, list) else content
        configs[part] = first.get("config", first)
    short = {key: 1 for key in counts.BLOCKS if key in configs["transformer"] and not whole}
    configs["transformer"] = {**configs["transformer"], **short}
    single = {name: torch.float32 for name in ("residual", "compute", "transformer", "vae")}
    return replace(
        pipeline,
        model=replace(pipeline.model, configs=configs),
        device=replace(pipeline.device, precision=replace(pipeline.precision, **single)),
    )


def filled(module: Any) -> Any:
    """``module`` on the CPU with weights that are all alike."""
    module = module.to_empty(device=HOST)
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data.fill_(0.01)
    return module.eval()


def seconds(call: Callable[[], Any]) -> float:
    """CPU seconds of the quicker of two calls: other programs take the caches."""
    taken = []
    with torch.no_grad():
        for _ in range(2):
            started = clock()
            call()
            taken.append(clock() - started)
    return min(taken)


def sampled(pipeline: Pipeline, pace: Pace) -> Iterator[tuple[str, float, float]]:
    """Size, forecast and CPU seconds of a call of the transformer."""
    module = filled(counts._built(pipeline, "transformer", pipeline.configs["transformer"], torch.float32))
    for width, height in SIZES:
        size = Size(width, height, pipeline.spec.sizes.stride + 1, window=3, text=TOKENS)
        empty = counts._call(pipeline, size, 1)
        tensors = {name: getattr(empty, name) for name in empty.__slots__}
        ones = {name: torch.ones(t.shape) for name, t in tensors.items() if isinstance(t, torch.Tensor)}
        call = replace(empty, **ones)
        spent = seconds(partial(pipeline.spec.code.call_transformer, pipeline, module, call))
        yield f"{width}x{height}", pace.seconds(counts.transformer_work(pipeline, size)), spent


def decoded(pipeline: Pipeline, pace: Pace) -> Iterator[tuple[str, float, float]]:
    """Size, forecast and CPU seconds of a call of the decoder."""
    config = pipeline.configs["vae"]
    vae = filled(counts._built(pipeline, "vae", config, torch.float32))
    counts.decode_as_published(vae)
    times = LARGER.get(pipeline.family, 1)
    for width, height in ((times * width, times * height) for width, height in PICTURES):
        size = Size(width, height, pipeline.spec.sizes.stride + 1)
        latents = torch.ones(1, int(config.get("latent_channels", 16)), *latent_shape(pipeline, size))
        moment = torch.ones(1) if config.get("timestep_conditioning") else None
        spent = seconds(partial(decoder_call, vae, latents, moment))
        yield f"{width}x{height}", pace.seconds(counts.decoding_work(pipeline, size)), spent


def delighted(pace: Pace) -> Iterator[tuple[str, float, float]]:
    """Size, forecast and CPU seconds of a call of the delight UNet."""
    with META:
        unet = networks_for("delight")["unet"]
    unet = filled(unet)
    set_attention(unet, F.scaled_dot_product_attention)
    text = torch.ones(1, TEXT_TOKENS, TEXT_WIDTH)
    for side in PAINTED:
        given = (torch.ones(1, DELIGHT_CHANNELS, side // REDUCTION, side // REDUCTION), torch.ones(1), text)
        with counting() as work:
            unet(*given)
        yield f"{side}x{side}x1", pace.seconds(work), seconds(partial(unet, *given))


def rows(family: str, folder: Path, pace: Pace) -> Iterator[dict[str, Any]]:
    """The rows of one family."""
    measures: dict[str, Callable[[Pace], Iterator[tuple[str, float, float]]]] = {}
    if family == "delight":
        measures["sampling"] = delighted
    else:
        pipeline = published(opened(family, folder))
        measures["sampling"] = partial(sampled, pipeline)
        if family != "framepack":  # whose decoder is that of hunyuan_video
            measures["decoding"] = partial(decoded, pipeline)
    for stage, measure in measures.items():
        first: list[StageCost] = []
        for size, modelled, spent in measure(pace):
            later = corrected(stage, modelled, PROBED, first).seconds
            row = {"family": family, "stage": stage, "size": size, "forecast_s": round(modelled, 3)}
            yield {
                **row,
                "cpu_s": round(spent, 3),
                "ratio": round(modelled / spent, 2),
                "corrected_s": round(later, 3) if first else "",
                "corrected_ratio": round(later / spent, 2) if first else "",
            }
            first = first or [StageCost(stage, family, "none", "cpu", seconds=spent, modelled_seconds=modelled)]


def main() -> None:
    """Measure, print and append the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", nargs="*", default=[*FAMILIES, "delight"])
    torch.set_num_threads(1)
    folder = Path(__file__).resolve().parent.parent / ".build" / "time"
    folder.mkdir(parents=True, exist_ok=True)
    arguments, pace = parser.parse_args(), _measured(HOST, torch.float32, clock)
    for family in arguments.families:
        append("minutes", ({**machine(), **row} for row in rows(family, folder, pace)))


if __name__ == "__main__":
    main()
