"""What the text encoders of several families share: limits, T5, trimming and batching of embeddings."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional

from ...compat.checkpoints.packed import without_unpacking
from ...compat.device.execution import checked_leaves
from ...compat.errors import InputError
from ..base import ENCODING, Latents, Pipeline, Progress, Prompt, PromptRequest
from ..memory.estimates import beside_text

EMBEDS, MASK = "prompt_embeds", "prompt_attention_mask"


def too_long(tokenizer: Any, tokens: Sequence[int], room: int, limit: int, subject: str) -> InputError:
    """The refusal of a text that goes on beyond ``room`` tokens, inside a template that takes some of ``limit``."""
    lost = tokenizer.decode(tokens[room:])[:40].strip()
    return InputError(
        f"the {subject} has {len(tokens)} tokens",
        expected=f"at most {room} tokens, {limit} with what the template adds",
        fix=f"Shorten it (everything from {lost!r} on would be lost), or raise max_tokens.",
    )


@contextmanager
def held_encoder(pipeline: Pipeline, part: str, progress: Progress) -> Iterator[Any]:
    """A text encoder on its device, with room for its forward; a cancel is obeyed inside of it."""
    hold = pipeline.offloader.hold(part, beside_text(pipeline, part), progress)
    with hold as encoder, checked_leaves(encoder, progress.check):
        yield encoder


def require_fitting(tokenizer: Any, text: str, limit: int, subject: str = "prompt") -> None:
    """Raise when ``text`` has more tokens than ``limit``, saying how many and where it would be cut.

    Raises:
        InputError: too long; nothing was encoded.
    """
    tokens = tokenizer(text, add_special_tokens=True)["input_ids"]
    if len(tokens) > limit:
        lost = tokenizer.decode(tokens[limit - 1 :], skip_special_tokens=True).strip()
        raise InputError(
            f"the {subject} has {len(tokens)} tokens",
            expected=f"at most {limit} tokens",
            fix=f"Shorten it: everything after {lost[:40]!r} would be lost. Or raise max_tokens where the model "
            "allows it.",
        )


def t5_embeds(
    pipeline: Pipeline,
    pipeline_class: Any,
    request: PromptRequest,
    progress: Progress,
    **configuration: Any,
) -> tuple[dict[str, torch.Tensor], ...]:
    """T5 embeddings of prompt and negative: ``prompt_embeds`` (1, N, D) and their mask (1, N), trimmed, on the CPU.

    Args:
        pipeline_class: the diffusers pipeline whose own encoding is used.
        configuration: further arguments of its constructor.
    """
    tokenizer, texts = pipeline.tools["tokenizer"], (request.text, request.negative)
    for text, subject in zip(texts, ("prompt", "negative prompt"), strict=True):
        require_fitting(tokenizer, text, request.max_tokens, subject)
    device = pipeline.offloader.device_of("text_encoder")
    with (
        held_encoder(pipeline, "text_encoder", progress) as encoder,
        without_unpacking(encoder),
    ):  # T5 asks for their dtypes
        pipe = bare_pipeline(pipeline_class, text_encoder=encoder, tokenizer=tokenizer, **configuration)
        encoded = []
        for index, text in enumerate(texts):
            embeds, mask = pipe._get_t5_prompt_embeds(
                [text], max_sequence_length=request.max_tokens, device=device, dtype=pipeline.precision.text
            )
            encoded.append(trimmed({EMBEDS: embeds, MASK: mask}))
            progress.step(index + 1, len(texts), ENCODING)
    return tuple(encoded)


def bare_pipeline(cls: Any, **parts: Any) -> Any:
    """The diffusers pipeline ``cls`` with these of its parts and settings, and nothing else."""
    names = (name for name, given in inspect.signature(cls.__init__).parameters.items() if given.default is given.empty)
    return cls(**{**dict.fromkeys(name for name in names if name != "self"), **parts})


def trimmed(embeds: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Embeddings cut to their valid tokens (at least one), on the CPU; the mask must have its padding on the right."""
    length = max(1, int(embeds[MASK].long().sum()))
    return {name: tensor[:, :length].cpu() for name, tensor in embeds.items()}


def batched(prompt: Prompt, guided: bool) -> dict[str, torch.Tensor]:
    """Negative above positive, padded on the right to one length, for transformers that take both in one batch."""
    if not guided or prompt.negative is None:
        return dict(prompt.embeds)
    pair = (prompt.negative, prompt.embeds)
    length = max(int(item[EMBEDS].shape[1]) for item in pair)
    return {
        EMBEDS: torch.cat([functional.pad(i[EMBEDS], (0, 0, 0, length - i[EMBEDS].shape[1])) for i in pair]),
        MASK: torch.cat([functional.pad(i[MASK], (0, length - i[MASK].shape[1])) for i in pair]),
    }


def t5_from_core(embeds: torch.Tensor, extra: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Core's CONDITIONING of a T5 family, (1, N, D) and its dict, under the family's own names, trimmed, on the CPU."""
    mask = extra.get("attention_mask")
    valid = torch.ones(embeds.shape[:2], dtype=torch.bool) if mask is None else mask.reshape(1, -1).bool()
    return trimmed({EMBEDS: embeds.float(), MASK: valid.to(embeds.device)})


def described(latents: Latents, prompt: Prompt) -> Latents:
    """``latents`` that know the words they were made of, where the prompt does."""
    texts = {"prompt": prompt.extra.get("text", ""), "negative": prompt.extra.get("negative_text", "")}
    return replace(latents, extra={**latents.extra, **{name: text for name, text in texts.items() if text}})
