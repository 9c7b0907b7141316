"""Calls of a transformer by core's samplers: latents and a noise level in, velocity out, for every video family.

Core's samplers have names of their own for levels, text and pictures: ``host/diffusion_model.py`` makes a ``Call``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from ...compat.device.execution import add_hook
from ...compat.errors import InputError
from ...compat.memory.parts import Undo
from ..base import Call
from ..pipeline import Pipeline

TIME = 1000.0  # what the transformers call the highest noise level
DOUBLE, SINGLE = "double", "single"
LISTS = ((DOUBLE, "transformer_blocks"), (SINGLE, "single_transformer_blocks"))
Attend = Callable[..., Tensor]
OutputPatch = Callable[[Tensor, dict[str, Any]], Tensor]


@dataclass(frozen=True, slots=True)
class BlockPatches:
    """Patches by a sampler to single blocks and to attention.

    ``double`` and ``single`` have functions of (arguments, {"original_block": function}) by index; both dictionaries
    have ``img`` (B, N, D) and ``txt`` (B, M, D), as the patches of ComfyUI's own transformers. ``attend`` replaces
    attention: from (the one it replaces, query, key, value (B, H, N, D), mask). ``outputs`` has for ``attn1`` (of the
    video) and ``attn2`` (of video to text) functions from what attention gives, (B, N, D) before its projection, and
    a dictionary that describes the place."""

    double: Mapping[int, Callable[..., Any]] = field(default_factory=dict)
    single: Mapping[int, Callable[..., Any]] = field(default_factory=dict)
    attend: Callable[..., Tensor] | None = None
    outputs: Mapping[str, list[OutputPatch]] = field(default_factory=dict)
    values: frozenset[int] = frozenset()  # double blocks whose attention hands its values on as they are
    options: Mapping[str, Any] = field(default_factory=dict)  # for output patches, beside the place


def velocity(pipeline: Pipeline, transformer: Any, call: Call, block_patches: BlockPatches | None = None) -> Tensor:
    """Noise minus data, shaped as the sampled latents, fp32; InputError for no text, or text of another width."""
    if call.embeds is None:
        raise InputError("a MODEL call without text", expected="CONDITIONING", fix="Connect a text encoder.")
    width = pipeline.configs["transformer"].get(pipeline.spec.files.text_width)
    if width is not None and call.embeds.shape[-1] != width:
        found = f"CONDITIONING of width {call.embeds.shape[-1]}"
        fix = "Use positive and negative of AnyGPU Encode Prompt, or this model's own text encoder files."
        raise InputError(found, expected=f"width {width}", fix=fix)
    alone = pipeline.spec.rewrites.returns_alone
    with ExitStack() as stack:
        stack.enter_context(transformer.cache_context(call.branch))
        if block_patches is not None:
            stack.enter_context(with_block_patches(transformer, block_patches, alone))
        output: Tensor = pipeline.spec.code.call_transformer(pipeline, transformer, call)
    return output.float()


def guidance_of(pipeline: Pipeline, call: Call) -> Tensor | None:
    """The distilled guidance (B,) of ``call``, 6.0 where it has none, times TIME; None for a transformer without."""
    if not pipeline.configs["transformer"].get("guidance_embeds", True):
        return None
    given = call.guidance if call.guidance is not None else call.latents.new_full((1,), 6.0)
    return given.to(call.latents.dtype).reshape(-1).expand(call.latents.shape[0]) * TIME


def required(value: Tensor | None, name: str, fix: str) -> Tensor:
    """``value``, which the CONDITIONING must carry; InputError where it is None."""
    if value is None:
        raise InputError(f"no {name} in the CONDITIONING", expected="CONDITIONING that carries it", fix=fix)
    return value


def blocks_of(transformer: nn.Module) -> Iterator[tuple[str, int, Any]]:
    """Each transformer block with its kind, :data:`DOUBLE` or :data:`SINGLE`, and index, in the order of a forward."""
    for kind, name in LISTS:
        for index, block in enumerate(getattr(transformer, name, ())):
            yield kind, index, block


def attentions_of(block: Any) -> dict[str, Any]:
    """A block's attention of the video, alone or with text, as ``attn1``, of video to text as ``attn2``; if present."""
    places = {"attn1": getattr(block, "attn1", None) or getattr(block, "attn", None)}
    places["attn2"] = getattr(block, "attn2", None)
    return {name: attention for name, attention in places.items() if attention is not None}


@contextmanager
def with_block_patches(transformer: nn.Module, block_patches: BlockPatches, returns_alone: bool) -> Iterator[None]:
    """Put ``block_patches`` on the blocks of ``transformer`` and their attention for one call. ``returns_alone``: its
    blocks return the video's tokens alone, without the text's."""
    with Undo() as undo:
        if block_patches.attend is not None:
            for owner in transformer.modules():
                _attend_by(undo, owner, block_patches.attend)
        for kind, index, block in blocks_of(transformer):
            attentions = attentions_of(block)
            if kind == DOUBLE and index in block_patches.values:
                _attend_by(undo, attentions["attn1"], lambda _attend, _query, _key, value, *_: value)
            for name, patches in block_patches.outputs.items():
                if name in attentions:
                    place = {"block": (kind, index), "block_type": kind, "block_index": index}
                    _patch_output(undo, attentions[name], patches, {**block_patches.options, **place})
            patch = (block_patches.double if kind == DOUBLE else block_patches.single).get(index)
            if patch is not None:
                undo.set(block, "forward", _patched(block.forward, patch, returns_alone))
        yield


def _attend_by(undo: Undo, owner: Any, attend: Attend) -> None:
    """Replace the kernel of the attention ``owner``, if it is one, by ``attend``, which gets the old one first."""
    processor: Any = getattr(owner, "processor", None)
    if hasattr(processor, "attend"):
        undo.set(processor, "attend", partial(attend, processor.attend))


def _patch_output(undo: Undo, attention: Any, patches: list[OutputPatch], options: dict[str, Any]) -> None:
    """Put ``patches`` between attention and its projection, or after an attention without one, whose block projects.
    ``options`` gets ``n_heads``, and ``img_slice`` where text is attended to as well."""
    options["n_heads"] = attention.heads
    to_out = getattr(attention, "to_out", None)

    def applied(tokens: Tensor) -> Tensor:
        if hasattr(attention, "add_q_proj") or to_out is None:  # of video and text together; this is the video's share
            options["img_slice"] = [0, tokens.shape[1]]
        for patch in patches:
            tokens = patch(tokens, options)
        return tokens

    def before(_module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        return (applied(given[0]), *given[1:])

    def after(_module: nn.Module, _given: Any, out: Any) -> Any:
        return (applied(out[0]), *out[1:])

    if to_out is not None:
        undo.append(add_hook(to_out[0], before, before=True).remove)
    else:
        undo.append(add_hook(attention, after).remove)


def _patched(original: Callable[..., Any], patch: Callable[..., Any], returns_alone: bool) -> Callable[..., Any]:
    """The forward of a block that calls ``patch`` with its tokens and the ``original`` forward, as ComfyUI does;
    without the text's tokens if ``original`` leaves them out, or ``returns_alone``."""

    def forward(hidden_states: Tensor, encoder_hidden_states: Tensor, *rest: Any, **named: Any) -> Any:
        alone = False

        def run(arguments: Mapping[str, Any], _extra: Any = None) -> dict[str, Any]:
            nonlocal alone
            tokens = original(arguments["img"], arguments["txt"], *rest, **named)
            alone = isinstance(tokens, Tensor)
            return {"img": tokens, "txt": arguments["txt"]} if alone else {"img": tokens[0], "txt": tokens[1]}

        out = patch({"img": hidden_states, "txt": encoder_hidden_states}, {"original_block": run})
        pair = out["img"], out.get("txt", encoder_hidden_states)
        return pair[0] if alone or returns_alone else pair

    return forward
