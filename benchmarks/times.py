"""Times of models at published widths: forecasts beside runs, and how work grows.

`minutes`: one call of each family's transformer and decoder at published widths, three sizes; one block of each kind,
of delighting the whole UNet; weights that are all alike, fp32, one CPU thread. The device is probed once, before
anything is loaded, as in use: later the C library has memory to spare that the system has filled, and copies that need
no new pages are up to three times as quick. `corrected_s` is the forecast after a run of the first size.

`growth`: FLOPs of a step and of a decode of the published models, counted without data, at twice and four times the
frames and the pixels. The exponent is the slope between the last two, in logarithms: 1 is linear, 2 is attention alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from anygpu.compat.device.work import META, PROBED, Pace, counting, measured_pace
from anygpu.compat.memory.statistics import StageCost
from anygpu.paint.networks.multiview import TEXT_TOKENS, TEXT_WIDTH
from anygpu.paint.networks.published import DELIGHT_CHANNELS, networks_for
from anygpu.paint.networks.unet import STABLE_DIFFUSION_2, set_attention
from anygpu.paint.networks.vae import REDUCTION
from anygpu.pipelines import base as runs
from anygpu.pipelines import stages
from anygpu.pipelines.forecast import counts
from anygpu.pipelines.forecast.times import corrected
from anygpu.pipelines.load.folder import LoadRequest, load
from anygpu.pipelines.pipeline import Pipeline
from anygpu.pipelines.registry import FAMILIES as FAMILY_SPECS
from anygpu.pipelines.sizes import Size, latent_shape
from anygpu.pipelines.stacks import published_config
from anygpu.pipelines.vae.tiled import decoder_call
from runner import SCRATCH, Row, processor
from tiny import TINY, build
from torch import Tensor

SIZES = ((320, 192), (416, 256), (512, 320))  # pixels of a call of the transformer
PICTURES = ((96, 96), (128, 96), (128, 128))  # of a decode
LARGER = {"ltx": 4}  # sides of a decode, whose latents are smaller: below 12 cells torch has slow convolutions
TOKENS = 256  # of text
PAINTED = (384, 448, 512)  # pixels of a delighted picture
HOST = torch.device("cpu")
FACTORS = (1, 2, 4)
LATENT_FRAMES, SIDE = 8, 256  # of the smallest
Measured = Iterator[tuple[str, float, float]]


def opened(family: str, folder: Path = SCRATCH, **terms: Any) -> Pipeline:
    """The tiny model of a family, on the CPU unless ``terms`` of the request name another device."""
    paths = [build(name, folder) for name in (family, *TINY[family].beside)]
    return load(LoadRequest(*paths, **{"device": "cpu", **terms}))


def latents_for(pipeline: Pipeline, size: Size, seed: int) -> runs.Latents:
    """Random latents of a video."""
    shape = (1, int(pipeline.configs["vae"].get("latent_channels", 16)), *latent_shape(pipeline, size))
    samples = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return runs.Latents(samples, pipeline.family, "text", size.frames, size.width, size.height, 24.0, seed)


def sampled_latents(
    pipeline: Pipeline,
    request: runs.PromptRequest,
    settings: runs.SampleSettings,
    sections: runs.FramePackSettings,
    picture: tuple[int, int] = (64, 64),
) -> tuple[runs.Prompt, runs.Latents]:
    """The encoded prompt and latents of a run; of a family with ``sections`` after a ``picture`` of random pixels."""
    prompt = stages.encode_prompt(pipeline, request, runs.Silent())
    if not pipeline.spec.recipes.sections:
        return prompt, stages.sample(pipeline, prompt, None, settings, runs.Silent())
    pixels = torch.rand(1, *picture, 3, generator=torch.Generator().manual_seed(0))
    image = runs.ImageRequest(pixels, settings.width, settings.height)
    start = stages.encode_image(pipeline, image, "stretch", runs.Silent())
    return prompt, stages.sample_framepack(pipeline, prompt, start, settings, sections, runs.Silent())


def published(pipeline: Pipeline, whole: bool = False) -> Pipeline:
    """``pipeline`` with the published configurations in fp32, and one block of each kind or the ``whole`` depth."""
    configs = {}
    for part in ("transformer", "vae"):
        owner = pipeline.spec if (pipeline.spec.folder / f"{part}.json").is_file() else FAMILY_SPECS["hunyuan_video"]
        configs[part] = published_config(owner, part)  # framepack has the other family's VAE
    short = {key: 1 for key in counts.BLOCKS if key in configs["transformer"] and not whole}
    return configured(pipeline, torch.float32, vae=configs["vae"], transformer={**configs["transformer"], **short})


def configured(pipeline: Pipeline, dtype: torch.dtype, **configs: dict[str, Any]) -> Pipeline:
    """``pipeline`` with these configurations of parts, in one dtype."""
    single = dict.fromkeys(("residual", "compute", "transformer", "vae"), dtype)
    return replace(
        pipeline,
        model=replace(pipeline.model, configs={**pipeline.configs, **configs}),
        device=replace(pipeline.device, precision=replace(pipeline.precision, **single)),
    )


def transformer_call(
    pipeline: Pipeline, module: Any, size: Size, rows: int, some: Callable[..., Tensor], **more: tuple[int, ...]
) -> Any:
    """The family's own call of its transformer, on tensors that ``some`` makes by shape; ``more`` states by name."""
    outline = counts.empty_call(pipeline, size, rows)
    shapes = {name: getattr(outline, name) for name in outline.__slots__}
    given = {name: some(*tensor.shape) for name, tensor in shapes.items() if isinstance(tensor, Tensor)}
    given |= {name: some(*shape) for name, shape in more.items()}
    given |= {name: torch.ones_like(given[name]) for name in ("mask", "time")}
    return pipeline.spec.code.call_transformer(pipeline, module, replace(outline, **given))


def filled(module: Any) -> Any:
    """``module`` on the CPU with weights that are all alike."""
    module = module.to_empty(device=HOST)
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data.fill_(0.01)
    return module.eval()


def seconds(call: Callable[[], Any]) -> float:
    """Processor seconds of the quicker of two calls: other programs take the caches."""
    with torch.no_grad():
        return min(processor(call) for _ in range(2))


def sampled(pipeline: Pipeline, pace: Pace) -> Measured:
    """Size, forecast and processor seconds of a call of the transformer."""
    module = filled(counts.built(pipeline, "transformer", pipeline.configs["transformer"], torch.float32))
    for width, height in SIZES:
        size = Size(width, height, pipeline.spec.sizes.stride + 1, window=3, text=TOKENS)
        measured = seconds(partial(transformer_call, pipeline, module, size, 1, torch.ones))
        yield f"{width}x{height}", pace.seconds(counts.transformer_work(pipeline, size)), measured


def decoded(pipeline: Pipeline, pace: Pace) -> Measured:
    """Size, forecast and processor seconds of a call of the decoder."""
    config, times = pipeline.configs["vae"], LARGER.get(pipeline.family, 1)
    vae = filled(counts.built(pipeline, "vae", config, torch.float32))
    counts.decode_as_published(vae)
    for width, height in ((times * width, times * height) for width, height in PICTURES):
        size = Size(width, height, pipeline.spec.sizes.stride + 1)
        latents = torch.ones(1, int(config.get("latent_channels", 16)), *latent_shape(pipeline, size))
        moment = torch.ones(1) if config.get("timestep_conditioning") else None
        measured = seconds(partial(decoder_call, vae, latents, moment))
        yield f"{width}x{height}", pace.seconds(counts.decoding_work(pipeline, size)), measured


def delighted(pace: Pace) -> Measured:
    """Size, forecast and processor seconds of a call of the delight UNet."""
    with META:
        unet = networks_for("delight", STABLE_DIFFUSION_2)["unet"]
    unet = filled(unet)
    set_attention(unet, F.scaled_dot_product_attention)
    text = torch.ones(1, TEXT_TOKENS, TEXT_WIDTH)
    for side in PAINTED:
        given = (torch.ones(1, DELIGHT_CHANNELS, side // REDUCTION, side // REDUCTION), torch.ones(1), text)
        with counting() as work:
            unet(*given)
        yield f"{side}x{side}x1", pace.seconds(work), seconds(partial(unet, *given))


def minutes_rows(families: tuple[str, ...]) -> Iterator[Row]:
    """A row per family, stage and size."""
    pace = measured_pace(HOST, torch.float32, time.process_time)
    for family in families:
        measures: dict[str, Callable[[Pace], Measured]] = {"sampling": delighted}
        if family != "delight":
            pipeline = published(opened(family))
            measures = {"sampling": partial(sampled, pipeline), "decoding": partial(decoded, pipeline)}
        if family == "framepack":  # whose decoder is that of hunyuan_video
            del measures["decoding"]
        for stage, measure in measures.items():
            first: list[StageCost] = []
            for size, modelled, taken in measure(pace):
                later = corrected(stage, modelled, PROBED, first).seconds
                yield {
                    "family": family, "stage": stage, "size": size, "forecast_s": round(modelled, 3),
                    "cpu_s": round(taken, 3), "ratio": round(modelled / taken, 2),
                    "corrected_s": round(later, 3) if first else "",
                    "corrected_ratio": round(later / taken, 2) if first else "",
                }  # fmt: skip
                first = first or [StageCost(stage, family, "none", "cpu", seconds=taken, modelled_seconds=modelled)]


def exponent(costs: list[float]) -> dict[str, float]:
    """The slope between the last two of ``costs``, each at twice the size of the one before."""
    return {"exponent": round(math.log2(costs[-1] / costs[-2]), 2)}


def growth_rows(families: tuple[str, ...]) -> Iterator[Row]:
    """FLOPs of one call of the transformer and of one decode, along frames and along pixels."""
    for family in families:
        pipeline = published(opened(family), whole=True)
        stride = pipeline.spec.sizes.stride
        for axis in ("frames", "pixels"):
            along: dict[str, list[float]] = {"sampling": [], "decoding": []}
            for factor in FACTORS:
                frames = (LATENT_FRAMES * (factor if axis == "frames" else 1) - 1) * stride + 1
                size = Size(SIDE, SIDE * (factor if axis == "pixels" else 1), frames, window=(frames - 1) // stride + 1)
                along["sampling"].append(counts.transformer_work(pipeline, replace(size, text=64)).flops / 1e12)
                along["decoding"].append(counts.decoding_work(pipeline, size).flops / 1e12)
            for stage, work in along.items():
                columns = {f"tflops_{factor}x": round(each, 3) for factor, each in zip(FACTORS, work, strict=True)}
                yield {"family": family, "stage": stage, "axis": axis, **columns, **exponent(work)}
