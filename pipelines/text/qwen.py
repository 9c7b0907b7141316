"""The text encoding of HunyuanVideo 1.5: Qwen 2.5 VL states, and ByT5 states of the words to be shown in the video."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...compat.checkpoints.packed import without_unpacking
from ...compat.device.execution import to_host
from ...compat.errors import InputError
from ...compat.memory.parts import tell_once
from ...compat.packages import beginning
from ..base import EMBEDS, EMBEDS_2, ENCODING, Forwards, Progress, PromptRequest, Silent
from ..pipeline import Pipeline
from ..sizes import texts_at_once
from .t5 import by_text, held_encoder, in_batches, shortened

QUOTED_TOKENS = 256
SUBJECTS = ("prompt", "negative prompt")
# Qwen's chat as text: the template in a tokenizer's files is a program, which may never end
PUBLISHED = "<|im_start|>system\n{}<|im_end|>\n<|im_start|>user\n{{}}<|im_end|>\n<|im_start|>assistant\n"


def qwen_embeds(pipeline: Pipeline, request: PromptRequest, progress: Progress) -> tuple[dict[str, torch.Tensor], ...]:
    """Embeddings of prompt and negative, on the CPU: ``prompt_embeds`` (1, N, 3584), ``prompt_embeds_2`` (1, M, 1472).
    N and M count valid tokens only; M is 0 for a prompt that quotes nothing, and for the negative."""
    chat = Chat(pipeline.tools["tokenizer"], request.template, request.template_crop)
    pair = zip((request.text, request.negative), SUBJECTS, strict=True)
    texts = [chat.fitting(text, request.max_tokens, name, progress) for text, name in pair]
    longest, quote = max(map(chat.length, texts)), _quoted(pipeline, texts, progress)
    total = len(texts) + (quote is not None)
    from diffusers import HunyuanVideo15Pipeline

    device = pipeline.offloader.device_of("text_encoder")
    count, states = texts_at_once(pipeline, "text_encoder"), list[torch.Tensor]()
    with held_encoder(pipeline, "text_encoder", count, progress) as encoder:
        for batch in in_batches(texts, count):
            found = HunyuanVideo15Pipeline._get_mllm_prompt_embeds(
                encoder, chat, batch, device, tokenizer_max_length=longest - chat.crop, crop_start=chat.crop
            )
            states += [text[EMBEDS] for text in by_text(*found)]
            progress.step(len(states), total, ENCODING)
    pipeline.offloader.release("text_encoder")  # 15 GB that ByT5 does not need beside it
    glyphs = _glyph_embeds(pipeline, texts[0], quote, progress, total)
    return tuple({EMBEDS: state, EMBEDS_2: glyph} for state, glyph in zip(states, glyphs, strict=True))


def qwen_forwards(pipeline: Pipeline, request: PromptRequest | None) -> Forwards:
    """Tokens of each text in each forward: of the longest chat for Qwen; ByT5 runs for quotations alone. None is a
    prompt and a negative of ``reference_tokens`` without quotations."""
    if request is None:
        return {"text_encoder": ((pipeline.spec.memory.reference_tokens,) * 2,)}
    chat, silent = Chat(pipeline.tools["tokenizer"], request.template, request.template_crop), Silent()
    pair = zip((request.text, request.negative), SUBJECTS, strict=True)
    limit = request.max_tokens or pipeline.spec.sizes.defaults.max_tokens
    texts = [chat.fitting(text, limit, name, silent) for text, name in pair]
    quote, tokenizer = _quoted(pipeline, texts, silent), pipeline.tools["tokenizer_2"]
    glyphs = () if quote is None else ((len(tokenizer(quote)["input_ids"]),),)
    return {"text_encoder": ((max(map(chat.length, texts)),) * len(texts),), "text_encoder_2": glyphs}


def qwen_from_core(embeds: torch.Tensor, extra: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Core's CONDITIONING of a HunyuanVideo 1.5 text encoder under the names of :func:`qwen_embeds`, on the CPU.
    ``embeds`` is (1, N, 3584), the template cropped already; ``extra`` has ``attention_mask`` where there is padding,
    and ``conditioning_byt5small`` (1, M, 1472) where the text quotes."""
    mask, quoted = extra.get("attention_mask"), extra.get("conditioning_byt5small")
    states = embeds if mask is None else embeds[:, mask.reshape(1, -1)[0, -embeds.shape[1] :].bool()]
    ours = {EMBEDS: to_host(states).float()}
    return ours if quoted is None else ours | {EMBEDS_2: to_host(quoted).float()}


class Chat:
    """A tokenizer that wraps each text in a chat: the published one, or the user's template, with one ``{}``. It stands
    in for the tokenizer in upstream's encoding, whose template is not an argument. ``crop`` is how many leading tokens
    of the user's template are cut off, -1 for all before the prompt; the published has its own."""

    def __init__(self, tokenizer: Any, template: str, crop: int) -> None:
        from diffusers import HunyuanVideo15Pipeline

        own = inspect.signature(HunyuanVideo15Pipeline._get_mllm_prompt_embeds).parameters
        self.tokenizer, self.system = tokenizer, str(own["system_message"].default)
        self.template = template or PUBLISHED.format(self.system)
        if not template:
            self.crop = int(own["crop_start"].default)
        elif crop >= 0:
            self.crop = crop
        else:  # a space before the prompt belongs to the token of its first word
            self.crop = len(tokenizer(template.partition("{}")[0].rstrip(" "))["input_ids"])

    def apply_chat_template(self, chats: Sequence[Sequence[Mapping[str, str]]], **arguments: Any) -> Any:
        """Tokens of the template around the last message of each chat; ``arguments`` are the tokenizer's own."""
        # The template is cropped off the left, so padding belongs on the right, whatever the tokenizer's files say.
        self.tokenizer.padding_side = "right"
        for name in ("add_generation_prompt", "tokenize", "return_dict"):
            arguments.pop(name, None)
        return self.tokenizer([self.template.replace("{}", chat[-1]["content"]) for chat in chats], **arguments)

    def length(self, text: str) -> int:
        """Tokens of the whole chat around ``text``; raises InputError where the crop leaves none."""
        from diffusers.pipelines.hunyuan_video1_5.pipeline_hunyuan_video1_5 import format_text_input

        chats: Any = format_text_input([text], self.system)
        length = len(self.apply_chat_template(chats)["input_ids"][0])
        if length <= self.crop:
            found = f"template_crop {self.crop} of {length} tokens"
            fix = "Choose -1 to count the tokens before the prompt."
            raise InputError(found, expected=f"0 to {length - 1} tokens, or -1", fix=fix)
        return length

    def fitting(self, text: str, limit: int, subject: str, progress: Progress) -> str:
        """``text``, cut to ``limit`` tokens after the chat's crop; ``subject`` names it. Raises as :meth:`length`."""
        start = beginning(self.tokenizer, text, limit, progress.check)
        over = self.length(start) - self.crop - limit
        if over <= 0 and start == text:
            return text
        return shortened(self.tokenizer, text, len(self.tokenizer(start)["input_ids"]) - over, subject, progress)


def _quoted(pipeline: Pipeline, texts: Sequence[str], progress: Progress) -> str | None:
    """The words between quotation marks in the prompt, as upstream phrases them for ByT5; None where it quotes nothing.
    Quotations in the negative prompt are left out, as Tencent's own code does."""
    from diffusers.pipelines.hunyuan_video1_5.pipeline_hunyuan_video1_5 import extract_glyph_texts

    phrased: Any = extract_glyph_texts
    quote, other = map(phrased, texts)
    if other is not None:
        tell_once(progress, "quotation marks in the negative prompt no longer reach ByT5, as at its publisher")
    if quote is None:
        return None
    subject = f"text between quotation marks in the {SUBJECTS[0]}"
    return shortened(pipeline.tools["tokenizer_2"], quote, QUOTED_TOKENS, subject, progress)


def _glyph_embeds(
    pipeline: Pipeline, text: str, quote: str | None, progress: Progress, total: int
) -> list[torch.Tensor]:
    """ByT5 states (1, M, 1472) of the quotations of the prompt ``text``, and of none for the negative one; the encoder
    is not even read where nothing is quoted."""
    from diffusers import HunyuanVideo15Pipeline

    width = int(pipeline.configs["text_encoder_2"]["d_model"])
    glyphs = [torch.zeros(1, 0, width, dtype=pipeline.precision.text) for _ in SUBJECTS]
    if quote is None:
        return glyphs
    tokenizer, device = pipeline.tools["tokenizer_2"], pipeline.offloader.device_of("text_encoder")
    length = len(tokenizer(quote)["input_ids"])
    with held_encoder(pipeline, "text_encoder_2", 1, progress) as encoder, without_unpacking(encoder):
        states, mask = HunyuanVideo15Pipeline._get_byt5_prompt_embeds(
            tokenizer, encoder, [text], device, tokenizer_max_length=length
        )
        glyphs[0] = to_host(states[:, mask[0].bool()])
        progress.step(total, total, ENCODING)
    return glyphs
