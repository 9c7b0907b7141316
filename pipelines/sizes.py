"""Memory that each stage needs, known before anything is read: weights from headers, activations by formulas whose
factors ``benchmarks/memory.py`` fits to measured peaks of the simulated accelerator and writes into each
``spec.py``. They count tensors; what a vendor's library takes for itself comes on top."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..compat.device.execution import HOST
from ..compat.device.facts import free_bytes
from ..compat.memory.offloader import HOSTED
from ..compat.memory.parts import denoises
from ..compat.transforms.attention import SPARSE
from ..compat.transforms.sparse_attention import shares
from .base import Prompt, SampleSettings
from .family import FamilySpec
from .pipeline import Pipeline

TRANSFORMER, VAE = "transformer", "vae"
PLANES = 4  # activations that a streamed decode has in host memory at once
MARGIN = 1.15  # what a forecast may be off by
SPARSE_COPIES = 4  # of the tokens: queries, keys and values in tiles, and one of them before that
PAIR = 2  # texts: a prompt and its negative
SPARE = 1.05  # of what a forecast says, before a mode or a form is taken


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a run; 0 for a count that is not known yet."""

    width: int
    height: int
    frames: int
    guided: bool = False  # whether true guidance runs a second forward
    window: int = 9  # latent frames of a section
    text: int = 0  # tokens of the prompt
    sections: int = 0  # those of a video that is sampled in several
    clip: bool = False  # whether it goes on with a clip, of which each section sees more than of a picture


def latent_shape(pipeline: Pipeline, size: Size) -> tuple[int, int, int]:  # latent frames, rows, columns
    spatial, temporal = pipeline.spec.sizes.ratios
    return (size.frames - 1) // temporal + 1, size.height // spatial, size.width // spatial


def transformer_bytes(pipeline: Pipeline, mode: str, forward: int = 0) -> int:
    """Bytes of transformer weights on the device beside ``forward`` bytes: all in mode ``none``, else the largest."""
    each = [weights.resident(mode, part, forward) for part, weights in pipeline.weights.items() if denoises(part)]
    return sum(each) if mode == "none" else max(each)


def sampling_bytes(pipeline: Pipeline, size: Size) -> int:
    """Bytes at the peak of one forward of the transformer, on one rank: activations and the largest weight unpacked."""
    fit, (token_bytes, latent_bytes) = pipeline.spec.memory.fit, sampling_terms(pipeline, size)
    dense = max(_dense(pipeline, part) for part in pipeline.spec.transformers)
    batch, heads, width, item = _state_shape(pipeline, size)
    tokens = token_bytes // (batch * heads * width * item)
    if pipeline.run.group is not None:  # a rank has a share of the tokens; in attention all, with a share of the heads
        token_bytes, heads = token_bytes // pipeline.run.group.fewest, max(1, heads // pipeline.run.group.fewest)
    copies, attention = fit.tokens, pipeline.plan.speed.attention
    if attention.choice == SPARSE:
        copies += SPARSE_COPIES * shares(latent_shape(pipeline, size))[2]
        dense += attention.budget_bytes  # of the keys and values that are gathered
    forward = int(copies * token_bytes + fit.latents * latent_bytes)
    dtype = pipeline.precision.compute or pipeline.precision.transformer
    queries = torch.empty(batch, heads, tokens, width, dtype=dtype, device="meta")
    return max(forward, int(fit.attending * forward) + attention.extra_bytes(queries)) + dense


def sampling_terms(pipeline: Pipeline, size: Size) -> tuple[int, int]:
    """Bytes of one copy of the token states, and of one of the latents in fp32; ``FitFactors`` has how many of each.
    For a family that samples in sections these are one section's, with the context that it sees."""
    config = pipeline.configs[TRANSFORMER]
    frames, rows, columns = latent_shape(pipeline, size)
    patch, patch_time = int(config.get("patch_size") or 1), int(config.get("patch_size_t") or 1)
    seen, terms = float(frames), pipeline.spec.memory
    if terms.section_context is not None:
        clean, more = terms.section_context
        near = terms.clip.seen.get(pipeline.variant, 0) if size.clip else 0
        seen, frames = size.window + near + clean, size.window + near + more
    tokens = int(seen / patch_time * (rows // patch) * (columns // patch))
    tokens += (size.text or terms.text_tokens if terms.text_tokens else 0) + terms.history_tokens
    channels = int(config.get("in_channels", 16))
    batch, heads, width, item = _state_shape(pipeline, size)
    return batch * tokens * heads * width * item, batch * channels * frames * rows * columns * 4


def _state_shape(pipeline: Pipeline, size: Size) -> tuple[int, int, int, int]:
    """Batch of one transformer forward, attention heads, features per head, and bytes of a value of the states."""
    config, batched = pipeline.configs[TRANSFORMER], size.guided and pipeline.spec.recipes.batched_cfg
    heads, width = int(config.get("num_attention_heads", 24)), int(config.get("attention_head_dim", 128))
    return 2 if batched else 1, heads, width, pipeline.precision.residual.itemsize


def beside_transformer(
    pipeline: Pipeline, settings: SampleSettings, window: int = 9, beside: int = 0, clip: bool = False
) -> int:
    """Bytes that one forward of the transformer needs in addition to its weights, with the margin of the forecast;
    ``beside`` counts pixel frames of condition clips, whose tokens join the video's."""
    frames = settings.frames + beside
    size = Size(settings.width, settings.height, frames, settings.cfg > 1.0, window=window, clip=clip)
    return int(MARGIN * sampling_bytes(pipeline, size))


def texts_at_once(pipeline: Pipeline, part: str) -> int:
    """Texts in one forward of a text encoder: two, so that weights are streamed once; one where memory is short."""
    offloader, device = pipeline.offloader, pipeline.offloader.device_of(part)
    free = free_bytes(device)
    if free is None or device.type == HOST.type or offloader.mode == HOSTED or part not in pipeline.weights:
        return PAIR
    room = free + bytes_on(device, pipeline.parts.get(part)) - offloader.options.keep_free_bytes
    needed = beside_text(pipeline, part, PAIR)
    return PAIR if pipeline.weights[part].resident(offloader.mode, part, needed) + needed <= room else 1


def beside_text(pipeline: Pipeline, part: str, texts: int) -> int:
    """Bytes that one forward of a text encoder needs in addition to its weights, with the margin of the forecast."""
    return int(MARGIN * text_bytes(pipeline, part, texts))


def text_bytes(pipeline: Pipeline, part: str, texts: int) -> int:  # at the peak of a forward, without weights
    return int(pipeline.spec.memory.fit.text * text_term(pipeline, part, texts)) + _dense(pipeline, part)


def text_term(pipeline: Pipeline, part: str, texts: int) -> int:  # bytes of one copy of the widest activation
    config = pipeline.configs[part]
    config = config.get("text_config", config)
    wide = max(int(config.get(key) or 0) for key in ("d_ff", "intermediate_size", "d_model", "hidden_size"))
    return texts * pipeline.spec.memory.reference_tokens * wide * pipeline.precision.text.itemsize


def _dense(pipeline: Pipeline, part: str) -> int:  # bytes of the largest weight unpacked, see ``PartBytes``
    return pipeline.weights[part].dense if part in pipeline.weights else 0


def decoding_bytes(pipeline: Pipeline, size: Size, frames: int = 0, tile: int = 0) -> int:
    """Activation bytes at a decode's peak, by latent ``frames`` at once and pixels of a ``tile``'s side; 0 for all."""
    fit, (wide, plain) = pipeline.spec.memory.fit, decoding_terms(pipeline, size, frames, tile)
    return int(fit.pixels * wide + fit.plain * plain)


def decoding_terms(pipeline: Pipeline, size: Size, frames: int = 0, tile: int = 0) -> tuple[float, int]:
    """Bytes of the decoder's widest full-size activation, and of a channel of the video; see decoding_bytes."""
    pixel_frames = min(size.frames, pipeline.spec.memory.decode_window or sys.maxsize)
    if frames:
        pixel_frames = min(pixel_frames, frames * pipeline.spec.sizes.stride)
    rows, columns = (min(edge, tile) if tile else edge for edge in (size.height, size.width))
    plain = pixel_frames * rows * columns * pipeline.precision.vae.itemsize
    return widest(pipeline.configs[VAE]) * plain, plain


def method_bytes(pipeline: Pipeline, size: Size, frames: int, tile: int, stream: int) -> int:
    """Activation bytes at a decode's peak, by latent frames per chunk and sides of tile and streamed region; 0: off."""
    if stream:
        return int(pipeline.spec.memory.fit.streamed * streamed_term(pipeline, size, frames, tile, stream))
    chunk = decoding_bytes(pipeline, size, frames, tile)
    return int(chunk * pipeline.spec.memory.fit.chunked) if frames else chunk


def streamed_term(pipeline: Pipeline, size: Size, frames: int, tile: int, stream: int) -> float:
    """Bytes of the decoder's widest full-size activation in a streamed region of ``stream`` pixels a side."""
    wide, plain = decoding_terms(pipeline, size, frames, tile)
    area = min(stream, size.width) * min(stream, size.height)
    return max(wide, plain) * min(1.0, area / (size.width * size.height))


def plane_bytes(pipeline: Pipeline, size: Size, frames: int = 0) -> int:
    """Bytes of host memory of a streamed decode of ``frames`` latent frames at once: a few widest activations."""
    return int(decoding_terms(pipeline, size, frames)[0]) * PLANES


def bytes_on(device: torch.device, *modules: nn.Module | None) -> int:  # of parameters and buffers
    tensors = (each for module in modules if module is not None for each in (*module.parameters(), *module.buffers()))
    return sum(tensor.nbytes for tensor in tensors if tensor.device == device)


def widest(config: Mapping[str, Any]) -> float:
    """Channels per pixel of the decoder's widest activation at full size."""
    widths = tuple(config.get("decoder_block_out_channels") or config.get("block_out_channels") or (128,))
    patch = int(config.get("patch_size") or 1) if "decoder_block_out_channels" in config else 1
    grown = "norm_num_groups" in config and len(widths) > 1  # HunyuanVideo upsamples before it narrows
    return float((widths[1] if grown else widths[0]) / patch**2)


def default_size(family: FamilySpec) -> Size:
    defaults = family.sizes.defaults
    return Size(defaults.width, defaults.height, defaults.frames, defaults.cfg > 1.0)


def size_of(settings: SampleSettings, prompt: Prompt, window: int = 9) -> Size:
    """The size of a run, with the tokens of its prompt, or of its negative where that is longer."""
    asked, both = (settings.width, settings.height, settings.frames), (prompt.embeds, prompt.negative or {})
    text = max(sum(states.shape[1] for states in each.values() if states.ndim == 3) for each in both)
    return Size(*asked, guided=settings.cfg > 1.0, window=window, text=text)
