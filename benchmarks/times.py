"""Times of models at published widths: forecasts beside runs, ours beside bare diffusers', and how work grows.

`minutes`: one call of each family's transformer and decoder at published widths, three sizes; one block of each kind,
of delighting the whole UNet; weights that are all alike, fp32, one CPU thread. The device is probed once, before
anything is loaded, as in use: later the C library has memory to spare that the system has filled, and copies that need
no new pages are up to three times as quick. `corrected_s` is the forecast after a run of the first size.

`peers`: each family's step and decode beside bare diffusers', called in turn in one process: one block of each kind
with random weights, tiny text encoders, CPU, one thread, processor time of the quickest call. Steps are measured with a
short text, whose padding we leave out, and with one that has no padding.

`growth`: FLOPs of a step and of a decode of the published models, counted without data, at twice and four times the
frames and the pixels. The exponent is the slope between the last
two, in logarithms: 1 is linear, 2 is attention alone.
"""

from __future__ import annotations

import gc
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
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
from runner import SCRATCH, Row, data, in_turn, processor
from tiny import TINY, build, one_shot
from torch import Tensor

FAMILIES = ("ltx", "hunyuan_video", "hunyuan_video_15", "framepack", "mochi")
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


TEXTS = {"short": "a red fox walks through fresh snow", "full": "fox " * 1200}  # the latter fills every token
SEED, STEPS = 7, 2
TEXT = ("caption_channels", "text_embed_dim", "text_embed_2_dim", "pooled_projection_dim", "image_proj_dim")
NARROW = (*TEXT, "image_embed_dim")  # as wide as the tiny encoders
PICTURE = torch.rand(1, 3, 128, 192, generator=torch.Generator().manual_seed(0))


@dataclass(frozen=True)
class Peer:
    """What is measured of a family.

    Args:
        frames: of a video. decode: width and height of the decoded one; none where the VAE is another family's.
        cfg: guidance of both paths. given: further arguments of the bare pipeline.
        decoder: the dtype of the decode.
    """

    frames: int
    decode: tuple[int, int] | None
    cfg: float
    given: dict[str, Any]
    decoder: str = "fp32"
    width: int = 192
    height: int = 128


PEERS = {family: Peer(**given) for family, given in data("peers").items()}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def widened(part: str, family: str, home: Path, dtype: torch.dtype) -> None:
    """Put ``part`` at its published widths, with one block of each kind and random weights, into its tiny folder."""
    folder, tiny = home if (home / "config.json").is_file() else home / part, opened(family)
    narrow = {key: value for key, value in tiny.configs[part].items() if key in NARROW}
    config = {**tiny.configs[part], **published(tiny).configs[part], **narrow}
    module = counts.built(tiny, part, config, dtype).to_empty(device=HOST)
    torch.manual_seed(0)
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data.uniform_(-0.03, 0.03)
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    module.save_pretrained(folder)


def checkpoints(family: str, part: str, scratch: Path, dtype: torch.dtype) -> Path:
    """A folder of tiny checkpoints, where ``part`` of ``family`` has its published widths."""
    for name in (family, *TINY[family].beside):
        shutil.copytree(build(name, SCRATCH), scratch / name)
    widened(part, family, scratch / family, dtype)
    return scratch


def bare(family: str, folder: Path, dtype: torch.dtype) -> Any:
    """The bare diffusers pipeline, which encodes a text once."""
    pipe, known = one_shot(family, folder, dtype=dtype), {}
    encode = pipe.encode_prompt

    def once(*values: Any, **named: Any) -> Any:
        key = repr((values, named))
        if key not in known:
            known[key] = encode(*values, **named)
        return known[key]

    pipe.encode_prompt = once
    return pipe


def sampling(family: str, case: Peer, folder: Path, text: str) -> dict[str, Callable[[], Any]]:
    """Both ways to sample."""
    pipeline, pipe = opened(family, folder, precision="fp32"), bare(family, folder, torch.float32)
    prompt = stages.encode_prompt(pipeline, runs.PromptRequest(text), runs.Silent())
    settings = runs.SampleSettings(case.width, case.height, case.frames, STEPS, SEED, cfg=case.cfg)
    size = {"width": case.width, "height": case.height}
    given = {**size, "num_frames": case.frames, "num_inference_steps": STEPS, "prompt": text, **case.given}
    if family == "framepack":
        given["image"] = PICTURE
        picture = runs.ImageRequest(PICTURE.permute(0, 2, 3, 1), case.width, case.height, prepare=False)
        image = stages.encode_image(pipeline, picture, "stretch", runs.Silent())
        asked = runs.FramePackSettings(case.frames / 30, 2)

    def by_us() -> Any:
        if family == "framepack":
            return stages.sample_framepack(pipeline, prompt, image, settings, asked, runs.Silent())
        return stages.sample(pipeline, prompt, None, settings, runs.Silent())

    def by_diffusers() -> Any:
        return pipe(**given, generator=torch.Generator().manual_seed(SEED), output_type="latent")

    return {"ours": by_us, "bare": by_diffusers}


def decoding(family: str, case: Peer, folder: Path) -> dict[str, Callable[[], Any]]:
    """Both ways to decode."""
    dtype = DTYPES[case.decoder]
    pipeline, pipe = opened(family, folder, precision=case.decoder), bare(family, folder, dtype)
    latents = latents_for(pipeline, Size(*case.decode, case.frames), SEED)
    moment = {"temb": torch.zeros(1, dtype=dtype)} if pipe.vae.config.get("timestep_conditioning") else {}

    def by_us() -> Any:
        return stages.decode(pipeline, latents, runs.Silent())

    def by_diffusers() -> Any:
        with torch.no_grad():
            frames = pipe.vae.decode(latents.samples.to(dtype), **moment, return_dict=False)[0]
            return pipe.video_processor.postprocess_video(frames, output_type="pt")

    return {"ours": by_us, "bare": by_diffusers}


def peer_row(family: str, stage: str, part: str, precision: str, make: Callable[..., Any], repeats: int) -> Row:
    """One row.

    Args:
        make: from family, case and folder to both ways.
    """
    case = PEERS[family]
    with tempfile.TemporaryDirectory(dir=SCRATCH) as scratch:
        ways = make(family, case, checkpoints(family, part, Path(scratch), DTYPES[precision]))
        taken = in_turn(ways, repeats, processor)
        del ways
        gc.collect()
    width, height = case.decode if stage == "decoding" else (case.width, case.height)
    calls = STEPS if stage == "sampling" else 1
    least = {name: min(seconds) / calls for name, seconds in taken.items()}
    return {
        "diffusers": diffusers.__version__, "family": family, "stage": stage,
        "size": f"{width}x{height}x{case.frames}", "precision": precision, "bare_s": round(least["bare"], 3),
        "ours_s": round(least["ours"], 3), "ratio": round(least["ours"] / least["bare"], 3),
        "spread": round(max(taken["bare"]) / min(taken["bare"]), 3),
    }  # fmt: skip


def peer_rows(families: tuple[str, ...], stages: tuple[str, ...], repeats: int) -> Iterator[Row]:
    """A row per family, stage and text."""
    for family in families:
        if "sampling" in stages:
            for name, text in TEXTS.items():
                make = partial(sampling, text=text)
                yield peer_row(family, "sampling", "transformer", "fp32", make, repeats) | {"text": name}
        if "decoding" in stages and PEERS[family].decode is not None:
            yield peer_row(family, "decoding", "vae", PEERS[family].decoder, decoding, repeats) | {"text": ""}


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
