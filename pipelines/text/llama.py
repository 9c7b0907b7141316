"""The text encoding of the Llama families (HunyuanVideo, FramePack): Llama states, and one pooled CLIP vector."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...compat.device.execution import to_host
from ...compat.errors import InputError
from ..base import EMBEDS, ENCODING, MASK, POOLED, Forwards, Progress, PromptRequest
from ..pipeline import Pipeline
from ..sizes import PAIR, texts_at_once
from .t5 import bare_pipeline, by_text, held_encoder, in_batches, shortened, trimmed

CLIP_TOKENS = 77
PICTURE, HEADER_END = "<image>", "<|end_header_id|>"
PICTURE_TOKENS = 576  # what one <image> of a template becomes


@dataclass(frozen=True, slots=True)
class LlavaInput:
    """Input of an encoder that also sees (Llava)."""

    positive: Any  # PIL pictures beside the prompt and beside the negative prompt
    negative: Any
    processor: Any  # the pipeline's image processor
    interleave: int  # every so many of the 576 picture states are kept


def llama_embeds(
    pipeline: Pipeline, pipeline_class: Any, request: PromptRequest, progress: Progress, sight: LlavaInput | None = None
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], tuple[dict[str, torch.Tensor], ...]]:
    """Embeddings of the prompt, of its negative, and of each section's prompt, on the CPU, padding trimmed: each a dict
    of ``prompt_embeds`` (1, N, 4096), ``pooled_prompt_embeds`` (1, 768) and ``prompt_attention_mask`` (1, N). The
    diffusers class ``pipeline_class`` encodes them; ``sight`` has the pictures, if its encoder looks at one."""
    template = _template(pipeline, pipeline_class, request, sight)
    named = [("prompt", request.text), ("negative prompt", request.negative)]
    named += [(f"prompt of section {index + 2}", text) for index, text in enumerate(request.sections)]
    texts = [_fitting(pipeline, template, *each, request.max_tokens, progress) for each in named]
    tools, device = pipeline.tools, pipeline.offloader.device_of("text_encoder")
    where = {"dtype": pipeline.precision.text, "device": device}
    # The template is cropped off the left, so padding belongs on the right, whatever the tokenizer's files say.
    tools["tokenizer"].padding_side = "right"
    encoded: list[dict[str, torch.Tensor]] = []
    count = 1 if sight is not None else texts_at_once(pipeline, "text_encoder")
    with held_encoder(pipeline, "text_encoder", count, progress) as encoder:
        shown = {} if sight is None else {"image_processor": sight.processor}
        pipe = bare_pipeline(pipeline_class, text_encoder=encoder, tokenizer=tools["tokenizer"], **shown)
        for batch in in_batches(texts, count):
            looking = {}
            if sight is not None:
                picture = sight.negative if len(encoded) == 1 else sight.positive
                looking = {"image": picture, "image_embed_interleave": sight.interleave}
            found = pipe._get_llama_prompt_embeds(
                prompt=batch, prompt_template=template, max_sequence_length=request.max_tokens, **where, **looking
            )
            encoded += by_text(*found)
            progress.step(len(encoded), 2 * len(texts), ENCODING)
    pipeline.offloader.release("text_encoder")  # 16 GB that CLIP does not need beside it
    count = texts_at_once(pipeline, "text_encoder_2")
    with held_encoder(pipeline, "text_encoder_2", count, progress) as encoder:
        pipe = bare_pipeline(pipeline_class, text_encoder_2=encoder, tokenizer_2=tools["tokenizer_2"])
        pooled = torch.cat([to_host(pipe._get_clip_prompt_embeds(some, **where)) for some in in_batches(texts, count)])
        progress.step(2 * len(texts), 2 * len(texts), ENCODING)
    for embeds, vector in zip(encoded, pooled.split(1), strict=True):
        embeds[POOLED] = vector
    return encoded[0], encoded[1], tuple(encoded[2:])


def llama_forwards(pipeline: Pipeline, request: PromptRequest | None) -> Forwards:
    """Tokens of each text in each forward of both encoders, padded to one length; None is a prompt and a negative."""
    looks = "vision_config" in pipeline.configs.get("text_encoder", ())
    count, tokens = 2 + len(request.sections if request else ()), pipeline.spec.memory.reference_tokens
    llama = tuple((tokens,) * len(batch) for batch in in_batches([""] * count, 1 if looks else PAIR))
    return {"text_encoder": llama, "text_encoder_2": ((CLIP_TOKENS,) * count,)}


def llama_from_core(embeds: torch.Tensor, extra: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Core's CONDITIONING of a HunyuanVideo text encoder under the names of :func:`llama_embeds`, on the CPU.
    ``embeds`` is (1, N, 4096), the template cropped already; ``extra`` has ``pooled_output`` (1, 768), else InputError,
    and, where there is padding, ``attention_mask``, whose last N entries count."""
    pooled = extra.get("pooled_output")
    if pooled is None:
        found = "CONDITIONING without a pooled CLIP vector"
        fix = "Use DualCLIPLoader with type hunyuan_video, which loads both text encoders."
        raise InputError(found, expected="Llama states with the pooled output of CLIP-L", fix=fix)
    mask, count = extra.get("attention_mask"), embeds.shape[1]
    mask = torch.ones(1, count) if mask is None else to_host(mask).reshape(1, -1)[:, -count:]
    return trimmed({EMBEDS: to_host(embeds).float(), MASK: mask.long()}) | {POOLED: to_host(pooled).float()}


def _template(pipeline: Pipeline, upstream: Any, request: PromptRequest, sight: LlavaInput | None) -> Mapping[str, Any]:
    """The template dict that upstream takes: its own, or the user's with the number of leading tokens to crop. These
    are counted here, since upstream counts the padding too that it puts behind the template. Raises InputError for a
    template that upstream would read wrongly."""
    if not request.template:
        return inspect.signature(upstream.encode_prompt).parameters["prompt_template"].default
    head, _, tail = (text := request.template).partition("{}")
    if "{" in head + tail or "}" in head + tail:
        found = "a template with braces around something else than the prompt"
        raise InputError(found, expected="no braces except {}", fix="Remove the other braces.")
    tokens = pipeline.tools["tokenizer"](head.rstrip(" "))["input_ids"]  # a space belongs to the word behind it
    crop = len(tokens) if request.template_crop < 0 else request.template_crop
    least = 0 if sight is None else 1  # of an uncropped one, upstream takes out no picture
    if not least <= crop <= len(tokens):
        expected = f"{least} to {len(tokens)}, the tokens before the prompt"
        raise InputError(f"template_crop {crop}", expected=expected, fix="Choose -1 to count them automatically.")
    made: dict[str, Any] = {"template": text, "crop_start": crop}
    if sight is None:
        return made
    pictures, headers = head.count(PICTURE), text.count(HEADER_END)
    if pictures != 1 or tail.count(PICTURE) or headers != 3:
        # Upstream takes the states of the picture out, and cuts the header of the answer off by its third mark.
        raise InputError(
            f"a template with {pictures} {PICTURE} before the prompt and {headers} {HEADER_END} in all",
            expected=f"one {PICTURE} before the prompt, and three {HEADER_END}: of system, user and assistant",
            fix="Start from upstream's template: system with the picture, user with {}, an empty assistant.",
        )
    start = tokens.index(pipeline.tools["tokenizer"].convert_tokens_to_ids(PICTURE))
    return made | {"image_emb_start": start, "image_emb_end": start + PICTURE_TOKENS, "image_emb_len": PICTURE_TOKENS}


def _fitting(
    pipeline: Pipeline, template: Mapping[str, Any], subject: str, text: str, limit: int, progress: Progress
) -> str:
    """``text``, shortened so that it has ``limit`` tokens with its template; the user is told of that, and of what CLIP
    does not read. InputError for a picture's mark in ``text``; ``subject`` names the text in messages."""
    tokenizer, clip = pipeline.tools["tokenizer"], pipeline.tools["tokenizer_2"]
    if "image_emb_start" in template and PICTURE in text:
        fix = "Remove it: the template has a place for the picture."
        raise InputError(f"{PICTURE} in the {subject}", expected="words only", fix=fix)
    marks = len(tokenizer("")["input_ids"])  # of the beginning: counted with the template and with the text alone
    around = len(tokenizer(template["template"].format(""))["input_ids"]) - template["crop_start"]
    text = shortened(tokenizer, text, limit - around + marks, subject, progress)
    short = clip(text, add_special_tokens=True, truncation=False, verbose=False)["input_ids"]
    if len(short) > CLIP_TOKENS:
        lost = clip.decode(short[CLIP_TOKENS - 1 : -1])[:40].strip()
        progress.notify(
            f"CLIP reads {CLIP_TOKENS} tokens of the {subject}, not what begins with {lost!r}; Llama reads it"
        )
    return text
