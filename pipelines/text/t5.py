"""Shared code of several families' text encoders: limits, T5, trimming and batching of embeddings."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from ...compat.checkpoints.identity import picture_content
from ...compat.checkpoints.packed import without_unpacking
from ...compat.device.execution import checked_layers, to_host
from ...compat.errors import InputError
from ...compat.packages import beginning
from ..base import EMBEDS, ENCODING, MASK, Forwards, Latents, Progress, Prompt, PromptRequest
from ..pipeline import Pipeline
from ..sizes import PAIR, beside_text, texts_at_once

ZEROED = "force_zeros_for_empty_prompt"


@contextmanager
def held_encoder(pipeline: Pipeline, part: str, texts: int, progress: Progress) -> Iterator[Any]:
    """A text encoder on its device, with room for a forward of ``texts`` texts; a cancel is obeyed in each layer."""
    hold = pipeline.offloader.hold(part, beside_text(pipeline, part, texts), progress)
    with hold as encoder, checked_layers(encoder, progress.check):
        yield encoder


def shortened(tokenizer: Any, text: str, room: int, subject: str, progress: Progress) -> str:
    """``text``, cut to ``room`` tokens, special ones included, with a note on what is left out. ``subject`` names the
    text in messages. Raises InputError where no word has room."""
    whole, text = text, beginning(tokenizer, text, room, progress.check)
    total, more = len(tokenizer(text, verbose=False)["input_ids"]), "more than " if len(text) < len(whole) else ""
    if total <= room:
        if more:
            progress.notify(f"the {subject} is read up to character {len(text):,} of {len(whole):,}")
        return text
    tokens = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    kept = max(0, min(len(tokens), room - (total - len(tokens))))
    shorter = tokenizer.decode(tokens[:kept], skip_special_tokens=True)
    # A cut inside a character leaves U+FFFD, and a text that was cut can have other tokens.
    while kept and (shorter.endswith("\ufffd") or len(tokenizer(shorter)["input_ids"]) > room):
        kept -= 1
        shorter = tokenizer.decode(tokens[:kept], skip_special_tokens=True)
    if not kept:
        fix = "Raise max_tokens; 0 takes the model's own limit."
        raise InputError(f"max_tokens leaves {room} tokens for the {subject}", expected="room for a word", fix=fix)
    lost = tokenizer.decode(tokens[kept:], skip_special_tokens=True)[:40].strip()
    left = f"what begins with {lost!r}" if lost else "the rest"  # signs that the tokenizer does not know decode to none
    progress.notify(f"the {subject} is shortened from {more}{total} to {room} tokens: {left} is left out")
    return shorter


def t5_embeds(
    pipeline: Pipeline, pipeline_class: Any, request: PromptRequest, progress: Progress, **configuration: Any
) -> tuple[dict[str, torch.Tensor], ...]:
    """T5 embeddings of prompt and negative: ``prompt_embeds`` (1, N, D) and their mask (1, N), trimmed, on the CPU. The
    encoding is that of the diffusers pipeline ``pipeline_class``, with ``configuration`` for its constructor."""
    tokenizer, limit = pipeline.tools["tokenizer"], request.max_tokens
    texts = [
        shortened(tokenizer, text, limit, subject, progress)
        for text, subject in ((request.text, "prompt"), (request.negative, "negative prompt"))
    ]
    device, encoded = pipeline.offloader.device_of("text_encoder"), list[dict[str, torch.Tensor]]()
    count = 1 if _alone(texts, configuration.get(ZEROED, False)) else texts_at_once(pipeline, "text_encoder")
    with held_encoder(pipeline, "text_encoder", count, progress) as encoder, without_unpacking(encoder):
        pipe = bare_pipeline(pipeline_class, text_encoder=encoder, tokenizer=tokenizer, **configuration)
        for batch in in_batches(texts, count):
            found = pipe._get_t5_prompt_embeds(
                batch, max_sequence_length=request.max_tokens, device=device, dtype=pipeline.precision.text
            )
            encoded += by_text(*found)
            progress.step(len(encoded), len(texts), ENCODING)
    return tuple(encoded)


def t5_forwards(pipeline: Pipeline, request: PromptRequest | None, zeroed: bool = False) -> Forwards:
    """Tokens of each text, padded to one length, in each forward of T5; ``zeroed``: upstream zeroes empty texts."""
    texts = ("some", "some") if request is None else (request.text, request.negative)
    length = (request.max_tokens if request is not None else 0) or pipeline.spec.sizes.defaults.max_tokens
    batches = in_batches(texts, 1 if _alone(texts, zeroed) else PAIR)
    return {"text_encoder": tuple((length,) * len(batch) for batch in batches)}


def _alone(texts: Sequence[str], zeroed: bool) -> bool:
    """True if each text is encoded by itself: upstream zeroes a whole batch if its last text is empty."""
    return zeroed and not all(texts)


def in_batches(texts: Sequence[str], count: int) -> list[list[str]]:
    return [list(texts[first : first + count]) for first in range(0, len(texts), count)]


def bare_pipeline(cls: Any, **parts: Any) -> Any:
    """The diffusers pipeline ``cls`` with these of its parts and settings, and nothing else."""
    names = (name for name, given in inspect.signature(cls.__init__).parameters.items() if given.default is given.empty)
    return cls(**{**dict.fromkeys(name for name in names if name != "self"), **parts})


def by_text(embeds: torch.Tensor, masks: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    """The embeddings of each text of a batch (B, N, D), trimmed, on the CPU."""
    return [trimmed({EMBEDS: own, MASK: mask}) for own, mask in zip(embeds.split(1), masks.split(1), strict=True)]


def trimmed(embeds: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Embeddings cut to their valid tokens (at least one), on the CPU; the mask must have its padding on the right."""
    length = max(1, int(embeds[MASK].long().sum()))
    return {name: to_host(tensor[:, :length]) for name, tensor in embeds.items()}


def batched(prompt: Prompt, guided: bool) -> dict[str, torch.Tensor]:
    """Negative above positive, padded on the right to one length, for transformers that take both in one batch; the
    prompt's embeddings alone if not ``guided``, or without a negative."""
    if not guided or prompt.negative is None:
        return dict(prompt.embeds)
    pair = (prompt.negative, prompt.embeds)
    return {name: pad_sequence([text[name][0] for text in pair], batch_first=True) for name in (EMBEDS, MASK)}


def t5_from_core(embeds: torch.Tensor, extra: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Core's CONDITIONING of a T5 family, (1, N, D) and its dict, under the family's own names, trimmed, on the CPU."""
    mask = extra.get("attention_mask")
    valid = torch.ones(embeds.shape[:2], dtype=torch.bool) if mask is None else mask.reshape(1, -1).bool()
    return trimmed({EMBEDS: embeds.float(), MASK: valid.to(embeds.device)})


def texts_of(request: PromptRequest) -> dict[str, Any]:
    """Entries of ``Prompt.extra``, for receipts and for people: the request with its texts, its image as a hash."""
    seen = {} if request.image is None else {"looks_at": picture_content(request.image)}
    texts = {"text": request.text, "negative_text": request.negative}
    return {**texts, **seen, "request": replace(request, image=None)}


def described(latents: Latents, prompt: Prompt) -> Latents:
    """``latents`` that know the words they were made of, where the prompt does."""
    texts = {"prompt": prompt.extra.get("text", ""), "negative": prompt.extra.get("negative_text", "")}
    return replace(latents, extra={**latents.extra, **{name: text for name, text in texts.items() if text}})
