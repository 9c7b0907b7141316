"""What each stage of a run needs on the device, before anything is read: weights by part, and activations by size.

Weights are counted from file headers. Activations follow formulas whose factors were fitted to measured peaks of the
simulated accelerator at other sizes than the tests use: `python benchmarks/memory_fits.py` measures, adds rows to
`benchmarks/results/memory_fits.csv` and writes `fits.py` anew. They count tensors; what a vendor's library takes for
itself comes on top.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...compat.memory.estimates import PartBytes, part_bytes
from ...compat.memory.statistics import StageNeed
from ..base import Pipeline
from ..family import Family
from ..loading.part import PartFiles
from . import fit_factors

TRANSFORMER, VAE = "transformer", "vae"
MARGIN = 1.15  # what a forecast may be off by
MODE_ORDER = ("none", "model", "group", "sequential")  # the fastest first
REFERENCE_TOKENS = {"ltx": 128, "mochi": 256, "hunyuan_video": 334, "hunyuan_video_15": 160, "framepack": 334}
HISTORY_TOKENS = 729  # of FramePack's and HunyuanVideo 1.5's pictures


@dataclass(frozen=True, slots=True)
class Fit:
    """Fitted factors of one family.

    Args:
        tokens: copies of the token states alive at the peak of a transformer's forward.
        latents: copies of the latents in fp32 beside them.
        pixels: copies of the decoder's widest full-size activation. plain: further channels per pixel.
        text: copies of a text encoder's widest activation, which is that of its feed-forward.
        streamed: copies of a tile of the last layer that a streamed decode holds. chunked: what the frames remembered
            make of a chunk.
    """

    tokens: float
    latents: float
    pixels: float
    plain: float
    text: float
    streamed: float
    chunked: float = 1.0


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a run: pixels, frames, whether true guidance runs a second forward, latent frames of a section.

    ``text`` counts the tokens of the prompt; 0 where it is not known yet.
    """

    width: int
    height: int
    frames: int
    guided: bool = False
    window: int = 9
    text: int = 0


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a run needs under one mode, stage by stage."""

    mode: str
    stages: tuple[StageNeed, ...]

    @property
    def peak(self) -> int:
        """Bytes at the highest point of the run."""
        return max(stage.total for stage in self.stages)


def forecast(pipeline: Pipeline, size: Size, mode: str = "") -> Forecast:
    """What a run of ``size`` needs under ``mode``, by default the pipeline's own."""
    mode = mode or pipeline.offloader.mode
    weights, stays = pipeline.weights, mode == "none"
    stages, vae = [], weights[VAE].resident(mode, VAE)
    text = [part for part in weights if part.startswith("text_encoder")]
    kept = 0
    if "image_encoder" in weights and pipeline.task == "image":
        own = max(weights["image_encoder"].total, vae)
        stages.append(StageNeed("image", 0, own, decoding_bytes(pipeline, sized(size, frames=1))))
        kept = vae if stays else 0
    if text:
        active = {part: text_bytes(pipeline, part) for part in text}
        needs = [
            StageNeed("text", kept, weights[part].resident(mode, part, active[part]), active[part]) for part in text
        ]
        stages.append(max(needs, key=lambda need: need.total))
    forward = sampling_bytes(pipeline, size)
    own = weights[TRANSFORMER].resident(mode, TRANSFORMER, forward)
    stages.append(StageNeed("sampling", kept, own, forward))
    stages.append(
        StageNeed("decoding", weights[TRANSFORMER].total if stays else 0, vae, decoding_bytes(pipeline, size))
    )
    return Forecast(mode, tuple(stages))


def forecasts(pipeline: Pipeline, size: Size) -> tuple[Forecast, ...]:
    """The forecast of every mode, the fastest first."""
    return tuple(forecast(pipeline, size, mode) for mode in MODE_ORDER)


def latent_shape(pipeline: Pipeline, size: Size) -> tuple[int, int, int]:
    """Latent frames, rows and columns of a run."""
    from ..registry import family_named

    spatial, temporal = family_named(pipeline.family).ratios(pipeline)
    return (size.frames - 1) // temporal + 1, size.height // spatial, size.width // spatial


def sampling_bytes(pipeline: Pipeline, size: Size) -> int:
    """Activations at the peak of one forward of the transformer."""
    fit, (tokens, latents) = FITS[pipeline.family], sampling_terms(pipeline, size)
    return int(fit.tokens * tokens + fit.latents * latents) + _dense(pipeline, TRANSFORMER)


def sampling_terms(pipeline: Pipeline, size: Size) -> tuple[int, int]:
    """Bytes of one copy of the token states, and of the latents in fp32: what :class:`Fit` counts copies of."""
    config = pipeline.configs[TRANSFORMER]
    frames, rows, columns = latent_shape(pipeline, size)
    patch, patch_time = int(config.get("patch_size") or 1), int(config.get("patch_size_t") or 1)
    seen = float(frames)
    if pipeline.family == "framepack":  # one section, two clean frames, and eighteen more at lower scales
        seen, frames = size.window + 2.5, size.window + 21
    tokens = int(seen / patch_time * (rows // patch) * (columns // patch))
    width = int(config.get("num_attention_heads", 24)) * int(config.get("attention_head_dim", 128))
    batch = 2 if size.guided and pipeline.family in ("ltx", "mochi") else 1
    beside = HISTORY_TOKENS if pipeline.family == "framepack" else 0
    joined = TEXT_TOKENS.get(pipeline.family, 0)
    tokens += (size.text or joined if joined else 0) + beside
    channels = int(config.get("in_channels", 16))
    item = pipeline.precision.residual.itemsize
    return batch * tokens * width * item, batch * channels * frames * rows * columns * 4


def text_bytes(pipeline: Pipeline, part: str) -> int:
    """Activations at the peak of a text encoder's forward."""
    return int(FITS[pipeline.family].text * text_term(pipeline, part)) + _dense(pipeline, part)


def text_term(pipeline: Pipeline, part: str) -> int:
    """Bytes of one copy of a text encoder's widest activation."""
    config = pipeline.configs[part]
    config = config.get("text_config", config)
    wide = max(int(config.get(key) or 0) for key in ("d_ff", "intermediate_size", "d_model", "hidden_size"))
    return REFERENCE_TOKENS[pipeline.family] * wide * pipeline.precision.text.itemsize


def _dense(pipeline: Pipeline, part: str) -> int:
    return pipeline.weights[part].dense if part in pipeline.weights else 0


def decoding_bytes(pipeline: Pipeline, size: Size, frames: int = 0, tile: int = 0) -> int:
    """Activations at the peak of a decode.

    Args:
        frames: latent frames per chunk, tile: pixels per tile; 0 for all.
    """
    fit, (wide, plain) = FITS[pipeline.family], decoding_terms(pipeline, size, frames, tile)
    return int(fit.pixels * wide + fit.plain * plain)


def decoding_terms(pipeline: Pipeline, size: Size, frames: int = 0, tile: int = 0) -> tuple[float, int]:
    """Bytes of one copy of the decoder's widest full-size activation, and of one channel of the video."""
    ratio = TEMPORAL[pipeline.family]
    pixel_frames = size.frames if pipeline.family != "mochi" else size.frames + ratio - 1
    if pipeline.family in ("hunyuan_video", "framepack"):
        pixel_frames = min(pixel_frames, WINDOW_FRAMES)
    if frames:
        pixel_frames = min(pixel_frames, frames * ratio)
    rows, columns = (min(edge, tile) if tile else edge for edge in (size.height, size.width))
    plain = pixel_frames * rows * columns * pipeline.precision.vae.itemsize
    return widest(pipeline.configs[VAE]) * plain, plain


def attempt_bytes(pipeline: Pipeline, size: Size, frames: int, tile: int, stream: int) -> int:
    """Activations at the peak of a decode: latent frames per chunk, pixels per tile, pixels streamed; 0 is off."""
    if stream:
        return int(FITS[pipeline.family].streamed * streamed_term(pipeline, size, frames, tile, stream))
    chunk = decoding_bytes(pipeline, size, frames, tile)
    return int(chunk * FITS[pipeline.family].chunked) if frames else chunk


def streamed_term(pipeline: Pipeline, size: Size, frames: int, tile: int, stream: int) -> float:
    """Bytes of one tile of the last layer of a decode that streams."""
    wide, plain = decoding_terms(pipeline, size, frames, tile)
    area = min(stream, size.width) * min(stream, size.height)
    return max(wide, plain) * min(1.0, area / (size.width * size.height))


def plane_bytes(pipeline: Pipeline, size: Size) -> int:
    """The largest activation of a decode, as a whole."""
    return int(decoding_terms(pipeline, size)[0])


def widest(config: Mapping[str, Any]) -> float:
    """Channels per pixel of the decoder's widest activation at full size."""
    widths = tuple(config.get("decoder_block_out_channels") or config.get("block_out_channels") or (128,))
    patch = int(config.get("patch_size") or 1) if "decoder_block_out_channels" in config else 1
    grown = "norm_num_groups" in config and len(widths) > 1  # HunyuanVideo upsamples before it narrows
    return float((widths[1] if grown else widths[0]) / patch**2)


def sizes_of(files: Iterable[PartFiles]) -> dict[str, PartBytes]:
    """Part name to the bytes of the part, from what was read of its headers."""
    sizes = {}
    for part in files:
        size = part_bytes({name: part.bytes_of(name, entry) for name, entry in part.entries.items()})
        sizes[part.name] = replace(size, dense=part.dense_bytes)
    return sizes


def default_size(family: Family) -> Size:
    """The size that the family's own pipeline makes."""
    defaults = family.defaults
    return Size(defaults.width, defaults.height, defaults.frames, defaults.cfg > 1.0)


def sized(size: Size, **changes: Any) -> Size:
    """``size`` with some of it changed."""
    return replace(size, **changes)


TEMPORAL = {"ltx": 8, "mochi": 6, "hunyuan_video": 4, "hunyuan_video_15": 4, "framepack": 4}
WINDOW_FRAMES = 17  # of HunyuanVideo's framewise decode
TEXT_TOKENS = {"hunyuan_video": 64, "hunyuan_video_15": 64, "framepack": 64}  # valid ones, where they join the video's
FITS: Mapping[str, Fit] = {family: Fit(**factors) for family, factors in fit_factors.FACTORS.items()}
