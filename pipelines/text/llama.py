"""The text encoding of the Llama families (HunyuanVideo, FramePack): Llama states, and one pooled CLIP vector."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ...compat.device.execution import checked_leaves, execution_device
from ...compat.errors import InputError
from ..base import ENCODING, Pipeline, Progress, PromptRequest
from ..memory.estimates import beside_text
from .t5 import EMBEDS, MASK, trimmed

POOLED = "pooled_prompt_embeds"
CLIP_TOKENS = 77
PICTURE, HEADER_END = "<image>", "<|end_header_id|>"
PICTURE_TOKENS = 576  # what one <image> of a template becomes


@dataclass(frozen=True, slots=True)
class Sight:
    """What an encoder that also looks (Llava) is shown.

    Args:
        positive, negative: PIL pictures beside the prompt and beside the negative prompt.
        processor: the pipeline's image processor. interleave: every so many of the 576 picture states are kept.
    """

    positive: Any
    negative: Any
    processor: Any
    interleave: int


def llama_embeds(
    pipeline: Pipeline, pipeline_class: Any, request: PromptRequest, progress: Progress, sight: Sight | None = None
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], tuple[dict[str, torch.Tensor], ...]]:
    """Embeddings of the prompt, of its negative, and of each section's prompt, on the CPU, padding trimmed.

    Each is a dict: ``prompt_embeds`` (1, N, 4096), ``pooled_prompt_embeds`` (1, 768), ``prompt_attention_mask``
    (1, N), N being the valid tokens.

    Args:
        pipeline_class: the diffusers pipeline whose own encoding is used.
        sight: the pictures, for a pipeline whose encoder looks at one.

    Raises:
        InputError: a text of more than ``request.max_tokens`` Llama tokens, or a template that does not fit.
    """
    template = _template(pipeline, pipeline_class, request, sight)
    texts = (request.text, request.negative, *request.sections)
    for index, text in enumerate(texts):
        subject = ("prompt", "negative prompt")[index] if index < 2 else f"prompt of section {index}"
        _require_fitting(pipeline, template, text, request.max_tokens, subject, progress, looks=sight is not None)
    encode = _Encoding(pipeline, pipeline_class, progress, 2 * len(texts))
    states = encode.llama(texts, template, request.max_tokens, sight)
    pipeline.offloader.release("text_encoder")  # 16 GB that CLIP does not need beside it
    pooled = encode.clip(texts)
    found = [trimmed({EMBEDS: s, MASK: mask}) | {POOLED: p.cpu()} for (s, mask), p in zip(states, pooled, strict=True)]
    return found[0], found[1], tuple(found[2:])


def llama_from_core(embeds: torch.Tensor, extra: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Core's CONDITIONING of a HunyuanVideo text encoder under the names of :func:`llama_embeds`, on the CPU.

    Args:
        embeds: (1, N, 4096), the template cropped already. extra: ``pooled_output`` (1, 768) and, where there is
            padding, ``attention_mask``, whose last N entries are for these states.

    Raises:
        InputError: no pooled CLIP vector.
    """
    pooled = extra.get("pooled_output")
    if pooled is None:
        raise InputError(
            "CONDITIONING without a pooled CLIP vector",
            expected="Llama states with the pooled output of CLIP-L",
            fix="Use DualCLIPLoader with type hunyuan_video, which loads both text encoders.",
        )
    mask, count = extra.get("attention_mask"), embeds.shape[1]
    valid = torch.ones(1, count, dtype=torch.long) if mask is None else mask.reshape(1, -1)[:, -count:].long().cpu()
    return trimmed({EMBEDS: embeds.float().cpu(), MASK: valid}) | {POOLED: pooled.float().cpu()}


@dataclass(slots=True)
class _Encoding:
    """One run over both encoders, which are on the device one after the other."""

    pipeline: Pipeline
    pipeline_class: Any
    progress: Progress
    total: int
    done: int = 0

    def llama(
        self, texts: tuple[str, ...], template: Mapping[str, Any], limit: int, sight: Sight | None
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """States and mask of each text, template cropped, still padded."""
        tools, dtype, found = self.pipeline.tools, self.pipeline.precision.text, []
        # The template is cropped off the left, so padding belongs on the right, whatever the tokenizer's files say.
        tools["tokenizer"].padding_side = "right"
        given = {"tokenizer": tools["tokenizer"]} | ({} if sight is None else {"image_processor": sight.processor})
        with self._pipeline("text_encoder", **given) as pipeline:
            for index, text in enumerate(texts):
                looking = {}
                if sight is not None:
                    picture = sight.negative if index == 1 else sight.positive
                    looking = {"image": picture, "image_embed_interleave": sight.interleave}
                found.append(
                    pipeline._get_llama_prompt_embeds(
                        prompt=text,
                        prompt_template=template,
                        max_sequence_length=limit,
                        dtype=dtype,
                        device=execution_device(self.pipeline.offloader, part="text_encoder"),
                        **looking,
                    )
                )
                self._advance()
        return found

    def clip(self, texts: tuple[str, ...]) -> list[torch.Tensor]:
        """The pooled vector of each text's first 77 tokens."""
        found = []
        with self._pipeline("text_encoder_2", tokenizer_2=self.pipeline.tools["tokenizer_2"]) as pipeline:
            for text in texts:
                device = execution_device(self.pipeline.offloader, part="text_encoder")
                found.append(pipeline._get_clip_prompt_embeds(text, device=device, dtype=self.pipeline.precision.text))
                self._advance()
        return found

    @contextmanager
    def _pipeline(self, part: str, **tools: Any) -> Iterator[Any]:
        """The pipeline with one encoder and nothing else."""
        signature = inspect.signature(self.pipeline_class.__init__)
        empty = dict.fromkeys(name for name in signature.parameters if name != "self")
        hold = self.pipeline.offloader.hold(part, beside_text(self.pipeline, part), self.progress)
        with hold as encoder, checked_leaves(encoder, self.progress.check):
            yield self.pipeline_class(**{**empty, part: encoder, **tools})

    def _advance(self) -> None:
        self.done += 1
        self.progress.step(self.done, self.total, ENCODING)


def _template(
    pipeline: Pipeline, pipeline_class: Any, request: PromptRequest, sight: Sight | None
) -> Mapping[str, Any]:
    """The template dict that upstream takes: its own, or the user's with the number of leading tokens to crop.

    Upstream's search for the crop is not used: it pads the template to the tokenizer's longest length first, and so
    finds that length.
    """
    if not request.template:
        own: Mapping[str, Any] = inspect.signature(pipeline_class.encode_prompt).parameters["prompt_template"].default
        return own
    text = request.template
    head, _, tail = text.partition("{}")
    if "{" in head + tail or "}" in head + tail:
        raise InputError(
            "a template with braces around something else than the prompt",
            expected="no braces except {}",
            fix="Remove the other braces.",
        )
    tokens = pipeline.tools["tokenizer"](head)["input_ids"]
    crop = len(tokens) if request.template_crop < 0 else request.template_crop
    if crop > len(tokens):
        raise InputError(
            f"template_crop {crop}",
            expected=f"at most the {len(tokens)} tokens before the prompt",
            fix="Choose -1 to count them automatically.",
        )
    found: dict[str, Any] = {"template": text, "crop_start": crop}
    if sight is None:
        return found
    pictures, headers = head.count(PICTURE), text.count(HEADER_END)
    if pictures != 1 or tail.count(PICTURE) or headers != 3:
        # Upstream takes the states of the picture out, and cuts the header of the answer off by its third mark.
        raise InputError(
            f"a template with {pictures} {PICTURE} before the prompt and {headers} {HEADER_END} in all",
            expected=f"one {PICTURE} before the prompt, and three {HEADER_END}: of system, user and assistant",
            fix="Start from upstream's template: system with the picture, user with {}, an empty assistant.",
        )
    start = tokens.index(pipeline.tools["tokenizer"].convert_tokens_to_ids(PICTURE))
    return found | {"image_emb_start": start, "image_emb_end": start + PICTURE_TOKENS, "image_emb_len": PICTURE_TOKENS}


def _require_fitting(
    pipeline: Pipeline,
    template: Mapping[str, Any],
    text: str,
    limit: int,
    subject: str,
    progress: Progress,
    looks: bool,
) -> None:
    """Raise when ``text`` and the template around it are longer than ``limit``; say what CLIP will cut."""
    tokenizer, clip = pipeline.tools["tokenizer"], pipeline.tools["tokenizer_2"]
    around = len(tokenizer(template["template"].format(""))["input_ids"]) - template["crop_start"]
    room = max(0, limit - around)
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    if looks and tokenizer.convert_tokens_to_ids(PICTURE) in tokens:
        raise InputError(
            f"{PICTURE} in the {subject}",
            expected="words only",
            fix="Remove it: the template has a place for the picture.",
        )
    if len(tokens) > room:
        lost = tokenizer.decode(tokens[room:])[:40].strip()
        raise InputError(
            f"the {subject} has {len(tokens)} tokens",
            expected=f"at most {room} tokens, {limit} with what the template adds",
            fix=f"Shorten it (everything from {lost!r} on would be lost), or raise max_tokens.",
        )
    short = clip(text, add_special_tokens=True, truncation=False, verbose=False)["input_ids"]
    if len(short) > CLIP_TOKENS:
        lost = clip.decode(short[CLIP_TOKENS - 1 : -1])[:40].strip()
        progress.notify(
            f"CLIP reads {CLIP_TOKENS} tokens of the {subject}, not what begins with {lost!r}; Llama reads it"
        )
