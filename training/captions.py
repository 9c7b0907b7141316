"""What the demo models are told: whole captions, captions with parts left out, and none."""

from __future__ import annotations

import json
import random
import re

from anygpu.pipelines.demo.scenes import COLOURS, MOTIONS, SHAPES, Scene

ONGOING = {
    "left": "moving left",
    "right": "moving right",
    "up": "moving up",
    "down": "moving down",
    "still": "staying still",
    "grow": "growing",
    "shrink": "shrinking",
    "spin": "spinning",
}
OTHERS = "worst quality, inconsistent motion, blurry, jittery, distorted, low quality, static"
NO_CAPTION, PARTIAL, STRANGE = 0.1, 0.2, 0.1


def vocabulary() -> list[str]:
    """Every word of a caption, small and with a capital; all others are unknown to the models."""
    spoken = " ".join(
        (*COLOURS, *SHAPES, *MOTIONS.values(), *ONGOING.values(), "a an the on shape background video of")
    )
    words = sorted(set(spoken.split()))
    return [*words, *(word.capitalize() for word in words), ".", ","]


def caption(scene: Scene, draw: random.Random) -> str:
    """A caption of the scene, sometimes an incomplete one or none at all, so that a negative prompt has a meaning."""
    kind = draw.random()
    if kind < NO_CAPTION:
        return "" if draw.random() < 0.6 else OTHERS
    keep = [True] * 4
    if kind < NO_CAPTION + PARTIAL:
        keep = [draw.random() < 0.6 for _ in keep]
    form = draw.random()
    moves = MOTIONS[scene.motion] if form < 0.7 else ONGOING[scene.motion]
    ground = f"on {scene.ground}" if form < 0.85 else f"on a {scene.ground} background"
    subject = " ".join((*([scene.colour] if keep[0] else []), scene.shape if keep[1] else "shape"))
    text = " ".join(("a", subject, *([moves] if keep[2] else []), *([ground] if keep[3] else [])))
    if draw.random() < STRANGE:
        text += draw.choice((", high quality", ", in the style of a cartoon", " at night", ", best quality, 4k"))
    if draw.random() < 0.25:
        text = text[0].upper() + text[1:] + "."
    return text


def t5_tokenizer_files(max_length: int) -> dict[str, str]:
    """The folder of a T5 tokenizer, of which each known word is one piece."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    extra = [f"<extra_id_{number}>" for number in range(100)]
    names = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    pieces = [word if re.fullmatch(r"\W", word) else f"▁{word}" for word in vocabulary()]
    scores = [(name, 0.0) for name in names.values()] + [(piece, -4.0) for piece in pieces]
    tokenizer = Tokenizer(models.Unigram(scores + [(name, 0.0) for name in extra[::-1]], unk_id=2, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")]
    )
    tokenizer.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="always")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    tokenizer.add_special_tokens([*names.values(), *extra])
    settings = {
        **names,
        "tokenizer_class": "T5Tokenizer",
        "model_max_length": max_length,
        "extra_ids": len(extra),
        "additional_special_tokens": extra,
    }
    return {
        "tokenizer.json": tokenizer.to_str(),
        "tokenizer_config.json": json.dumps(settings, indent=2, sort_keys=True) + "\n",
        "special_tokens_map.json": json.dumps(names, indent=2, sort_keys=True) + "\n",
    }
