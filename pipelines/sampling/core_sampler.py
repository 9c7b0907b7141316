"""Calls of a transformer by core's samplers: latents and a noise level in, velocity out, for every video family.

A sampler of ComfyUI's core knows noise levels, text and pictures under its own names; ``host/core_models.py`` puts them
into a :class:`Call`. Each family's ``call_transformer`` then does as its own ``sample``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ...compat.errors import InputError
from ..base import Pipeline

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
    width = pipeline.configs["transformer"].get(pipeline.spec.text_width)
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
        output: torch.Tensor = pipeline.spec.code.call_transformer(pipeline, transformer, call)
    return output.float()


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
            tokens = original(arguments["img"], arguments["txt"], *rest, **named)
            alone = isinstance(tokens, torch.Tensor)
            return {"img": tokens, "txt": arguments["txt"]} if alone else {"img": tokens[0], "txt": tokens[1]}

        out = patch({"img": hidden_states, "txt": encoder_hidden_states}, {"original_block": run})
        pair = out["img"], out.get("txt", encoder_hidden_states)
        return pair[0] if alone or returns_alone else pair

    return forward


RETURNS_ALONE = ("LTXVideoTransformerBlock",)  # blocks that return their tokens without the text


def guidance_of(pipeline: Pipeline, call: Call, default: bool = False) -> torch.Tensor | None:
    """The distilled guidance (B,) as a transformer takes it; None for one that takes none.

    Args:
        default: whether one whose configuration does not say takes it.
    """
    if not pipeline.configs["transformer"].get("guidance_embeds", default):
        return None
    given = call.guidance if call.guidance is not None else call.latents.new_tensor([6.0])
    return given.to(call.latents.dtype).reshape(-1).expand(call.latents.shape[0]) * TIME


def required(value: torch.Tensor | None, name: str, fix: str) -> torch.Tensor:
    """``value``, which the CONDITIONING must have.

    Raises:
        InputError: it has none.
    """
    if value is None:
        raise InputError(f"no {name} in the CONDITIONING", expected="it beside the text", fix=fix)
    return value
