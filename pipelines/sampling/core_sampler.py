"""Transformers as a foreign sampler drives them: latents and a noise level in, velocity out, for every video family.

A sampler of ComfyUI's core knows noise levels, text and pictures under its own names; ``host/core_models.py`` puts them
into a :class:`Call`. Each family then calls its transformer as its own :func:`sample` does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ...compat.errors import InputError
from ..base import FramePackSettings, Pipeline, SampleSettings

VELOCITY_SIGN = {"mochi": -1.0}  # predicts data minus noise; the others noise minus data
TIME = 1000.0  # what the transformers call the highest noise level


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a transformer, batch B, everything on the device.

    Args:
        latents: (B, C, T, H, W) in the transformer's space, with what is put beside the noise already in C.
        time: noise level times 1000, (B,), or (B, N) where tokens differ (LTX-Video).
        embeds: text (B, N, D). mask: (B, N), 1 where it is valid; None where all is.
        pooled: (B, D). guidance: (B,). quotes: ByT5 states. vision: SigLIP states. picture: latents of the start
            picture in the transformer's space, (B, C, 1, H, W). later: time of the next step, (B,). fps: of the video.
        branch: which prompts are in the batch, for caches that keep them apart.
    """

    latents: torch.Tensor
    time: torch.Tensor
    embeds: torch.Tensor
    mask: torch.Tensor | None = None
    pooled: torch.Tensor | None = None
    guidance: torch.Tensor | None = None
    quotes: torch.Tensor | None = None
    vision: torch.Tensor | None = None
    picture: torch.Tensor | None = None
    later: torch.Tensor | None = None
    fps: float = 25.0
    branch: str = "cond"

    @property
    def valid(self) -> torch.Tensor:
        """(B, N), bool: which text tokens count."""
        if self.mask is None:
            return torch.ones(self.embeds.shape[:2], dtype=torch.bool, device=self.embeds.device)
        # Core's mask of a HunyuanVideo text still covers the template, which is cut off the states.
        return self.mask.reshape(self.mask.shape[0], -1)[:, -self.embeds.shape[1] :] > 0.5


@dataclass(frozen=True, slots=True)
class BlockPatches:
    """What a sampler does to single blocks: index to a function of (arguments, {"original_block": function}).

    Both dictionaries have ``img`` (B, N, D) and ``txt`` (B, M, D), as the patches of ComfyUI's own transformers.
    """

    double: Mapping[int, Callable[..., Any]] = field(default_factory=dict)
    single: Mapping[int, Callable[..., Any]] = field(default_factory=dict)


def velocity(
    pipeline: Pipeline, transformer: Any, call: Call, block_patches: BlockPatches | None = None
) -> torch.Tensor:
    """Noise minus data, shaped as the sampled latents, fp32.

    Raises:
        InputError: the text is not this family's, or something the family needs is not there.
    """
    if call.embeds is None:
        raise InputError("a MODEL call without text", expected="CONDITIONING", fix="Connect a text encoder.")
    width = pipeline.configs["transformer"].get(_text_width(pipeline))
    if width is not None and call.embeds.shape[-1] != width:
        raise InputError(
            f"CONDITIONING of width {call.embeds.shape[-1]}",
            expected=f"width {width}",
            fix="Use positive and negative of AnyGPU Encode Prompt, or this model's own text encoder files.",
        )
    with ExitStack() as stack:
        stack.enter_context(transformer.cache_context(call.branch))
        if block_patches is not None:
            stack.enter_context(with_block_patches(transformer, block_patches))
        output = CALLS[pipeline.family](pipeline, transformer, call)
    return output.float() * VELOCITY_SIGN.get(pipeline.family, 1.0)


@contextmanager
def with_block_patches(transformer: nn.Module, block_patches: BlockPatches) -> Any:
    """``transformer`` with its blocks replaced as ``block_patches`` says, for one call."""
    lists = ((block_patches.double, "transformer_blocks"), (block_patches.single, "single_transformer_blocks"))
    changed: list[nn.Module] = []
    try:
        for patches, name in lists:
            blocks: Any = getattr(transformer, name, ())
            for index, patch in patches.items():
                if 0 <= index < len(blocks):
                    block = blocks[index]
                    changed.append(block)
                    block.__dict__["driven_forward"] = block.__dict__.get("forward")
                    block.forward = _patched(block.forward, patch, type(block).__name__ in RETURNS_ALONE)
        yield
    finally:
        for block in reversed(changed):
            own = block.__dict__.pop("driven_forward", None)
            if own is None:
                block.__dict__.pop("forward", None)
            else:
                block.forward = own


def _patched(original: Callable[..., Any], patch: Callable[..., Any], returns_alone: bool) -> Callable[..., Any]:
    def forward(hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor, *rest: Any, **named: Any) -> Any:
        alone = False

        def run(arguments: Mapping[str, Any], _extra: Any = None) -> dict[str, Any]:
            nonlocal alone
            found = original(arguments["img"], arguments["txt"], *rest, **named)
            alone = isinstance(found, torch.Tensor)
            return {"img": found, "txt": arguments["txt"]} if alone else {"img": found[0], "txt": found[1]}

        out = patch({"img": hidden_states, "txt": encoder_hidden_states}, {"original_block": run})
        pair = out["img"], out.get("txt", encoder_hidden_states)
        return pair[0] if alone or returns_alone else pair

    return forward


RETURNS_ALONE = ("LTXVideoTransformerBlock",)  # blocks that return their tokens without the text


def _text_width(pipeline: Pipeline) -> str:
    from ..registry import family_named

    return str(family_named(pipeline.family).FAMILY.text_width)


def _hunyuan_video(pipeline: Pipeline, transformer: Any, call: Call) -> torch.Tensor:
    output: torch.Tensor = transformer(
        hidden_states=call.latents,
        timestep=call.time.float(),
        encoder_hidden_states=call.embeds,
        encoder_attention_mask=call.valid,
        pooled_projections=_needed(call.pooled, "pooled_output", "Use AnyGPU Encode Prompt or core's DualCLIPLoader."),
        guidance=_guidance(pipeline, call),
        return_dict=False,
    )[0]
    return output


def _hunyuan_video_15(pipeline: Pipeline, transformer: Any, call: Call) -> torch.Tensor:
    config, like = pipeline.configs["transformer"], call.latents
    rows = like.shape[0]
    quotes = call.quotes if call.quotes is not None else like.new_zeros(rows, 0, int(config["text_embed_2_dim"]))
    vision = call.vision if call.vision is not None else like.new_zeros(rows, 0, int(config["image_embed_dim"]))
    later = call.later if config.get("use_meanflow") and call.vision is not None else None
    output: torch.Tensor = transformer(
        hidden_states=like,
        timestep=call.time.to(like.dtype),
        timestep_r=None if later is None else later.to(like.dtype),
        encoder_hidden_states=call.embeds,
        encoder_attention_mask=call.valid,
        encoder_hidden_states_2=quotes,
        encoder_attention_mask_2=torch.ones(quotes.shape[:2], dtype=torch.bool, device=quotes.device),
        image_embeds=vision,
        return_dict=False,
    )[0]
    return output


def _framepack(pipeline: Pipeline, transformer: Any, call: Call) -> torch.Tensor:
    from ..families.framepack.sections import History, plan_for

    frames = call.latents.shape[2]
    plan = plan_for(pipeline.variant, FramePackSettings(0.0, window=frames), 1, ended=False)
    fix = "Connect AnyGPU Image Conditioning with the start image of AnyGPU Encode Image."
    start, like = _needed(call.picture, "start image", fix), call.latents
    seen = {name: value.to(like) for name, value in History(plan, start).seen().items()}
    output: torch.Tensor = transformer(
        hidden_states=like,
        timestep=call.time,
        encoder_hidden_states=call.embeds,
        encoder_attention_mask=call.valid,
        pooled_projections=_needed(call.pooled, "pooled_output", "Use AnyGPU Encode Prompt or core's DualCLIPLoader."),
        image_embeds=_needed(call.vision, "image states", fix),
        guidance=_guidance(pipeline, call),
        return_dict=False,
        **seen,
        **plan.indices(0),
    )[0]
    return output


def _ltx(pipeline: Pipeline, transformer: Any, call: Call) -> torch.Tensor:
    from diffusers import LTXPipeline

    from ..families.ltx.conditions import SPATIAL_RATIO, TEMPORAL_RATIO, Canvas, conditioned_start, plain_start
    from ..families.ltx.pipeline import is_condition

    rows, _, frames, height, width = call.latents.shape
    size = SampleSettings(
        width * SPATIAL_RATIO, height * SPATIAL_RATIO, (frames - 1) * TEMPORAL_RATIO + 1, fps=call.fps
    )
    canvas = Canvas(size, call.latents.device, call.latents[:1], 1.0)
    start = (conditioned_start if is_condition(pipeline) else plain_start)(canvas, None, (), torch.Generator())
    place = {
        name: value.expand(rows, *value.shape[1:]) if isinstance(value, torch.Tensor) else value
        for name, value in start.place.items()
    }
    output: torch.Tensor = transformer(
        hidden_states=LTXPipeline._pack_latents(call.latents),
        encoder_hidden_states=call.embeds,
        timestep=call.time,
        encoder_attention_mask=call.valid,
        return_dict=False,
        **place,
    )[0]
    return LTXPipeline._unpack_latents(output, frames, height, width)


def _mochi(pipeline: Pipeline, transformer: Any, call: Call) -> torch.Tensor:
    output: torch.Tensor = transformer(
        hidden_states=call.latents,
        encoder_hidden_states=call.embeds,
        timestep=(TIME - call.time).to(call.latents.dtype),
        encoder_attention_mask=call.valid,
        return_dict=False,
    )[0]
    return output


def _guidance(pipeline: Pipeline, call: Call) -> torch.Tensor | None:
    if not pipeline.configs["transformer"].get("guidance_embeds", pipeline.family == "framepack"):
        return None
    given = call.guidance if call.guidance is not None else call.latents.new_tensor([6.0])
    return given.to(call.latents.dtype).reshape(-1).expand(call.latents.shape[0]) * TIME


def _needed(value: torch.Tensor | None, name: str, fix: str) -> torch.Tensor:
    if value is None:
        raise InputError(f"no {name} in the CONDITIONING", expected="it beside the text", fix=fix)
    return value


CALLS: dict[str, Callable[[Pipeline, Any, Call], torch.Tensor]] = {
    "hunyuan_video": _hunyuan_video,
    "hunyuan_video_15": _hunyuan_video_15,
    "framepack": _framepack,
    "ltx": _ltx,
    "mochi": _mochi,
}
