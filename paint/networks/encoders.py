"""The small encoders: DINOv2 for the reference picture of the PBR model, CLIP for the prompts of delight."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...compat.checkpoints.weights import read_json
from ...compat.device.execution import checked_layers, placed, to_host
from ...compat.device.failures import is_shortage
from ...compat.errors import CheckpointError, PackError, first_line
from ...compat.memory.statistics import stage_cost
from ...compat.packages import attribute, beginning, empty_encoder, fill, names_in
from ..pictures import resized
from .weights import Weights

CLASSES = {
    "image_encoder": "Dinov2Model",
    "text_encoder": "CLIPTextModel",
    "text_encoder_2": "CLIPTextModelWithProjection",
}
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet
RESIZED, CROPPED = 256, 224
FIRST_TOKEN, LAST_TOKEN, TOKENS = 49406, 49407, 77  # of CLIP's vocabulary: an empty prompt holds no other
PADDING = {"!": 0, "<|endoftext|>": LAST_TOKEN}  # Stable Diffusion 2's tokenizer takes the first


def encoder(
    part: str, config: Mapping[str, Any], stored: Weights, dtype: torch.dtype, advance: Callable[[int], None],
    convert: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] = dict,
) -> nn.Module:  # fmt: skip
    """An encoder of transformers, ``part`` of :data:`CLASSES`; ``convert`` gives its tensors the names of that library.
    Raises CheckpointError where the weights are not those of the configuration."""
    cls: Any = attribute("transformers", CLASSES[part])
    try:
        module = empty_encoder(cls, cls.config_class.from_dict(dict(config)), dtype)
        tensors = convert(stored.read(stored.shapes, lambda _name: dtype, advance))
        missing = fill(module, {there: tensors[name] for name, there in names_in(module, tensors).items()}, dtype)
        reason = f"missing {missing[0]!r}" if missing else ""
    except (RuntimeError, ValueError) as error:
        if isinstance(error, PackError) or is_shortage(error):
            raise
        reason = first_line(error)
    if reason:
        found = f"the weights of the {part} in {str(stored.path)!r} do not fit its configuration ({reason})"
        fix = "Download this model again, configuration and weights from the same place, or choose another one."
        raise CheckpointError(found, expected=f"the shapes of {CLASSES[part]}", fix=fix)
    return module.eval()


def dino_states(pipeline: Any, picture: Tensor, progress: Any, times: Mapping[str, Any]) -> Tensor:
    """Last hidden states (1, 257, 1536) of a reference picture (H, W, 3) in 0..1; fp32, on the CPU."""
    return _states(pipeline, "image_encoder", "image", dino_pixels(picture), progress, times)


def _states(pipeline: Any, part: str, stage: str, given: Tensor, progress: Any, times: Mapping[str, Any]) -> Tensor:
    """Last hidden states of ``part`` for the input ``given``, fp32 on the CPU; its cost counts as ``stage``'s."""
    device, hold = pipeline.offloader.device, pipeline.offloader.hold(part, 0, progress)
    with stage_cost(pipeline, stage, progress, **times), hold as module, checked_layers(module, progress.check):
        states = to_host(module(placed(given, device, module.dtype)).last_hidden_state).float()
    pipeline.offloader.release(part)
    return states


def dino_pixels(picture: Tensor) -> Tensor:
    """(1, 3, 224, 224) from (H, W, 3): shorter side 256, by Pillow, the middle, ImageNet's mean and deviation."""
    height, width = picture.shape[:2]
    scale = RESIZED / min(height, width)
    size = (round(height * scale), round(width * scale))
    pixels = resized(picture[None].float(), *size).permute(0, 3, 1, 2)
    top, left = (size[0] - CROPPED) // 2, (size[1] - CROPPED) // 2
    pixels = pixels[..., top : top + CROPPED, left : left + CROPPED]
    mean, deviation = (torch.tensor(values)[None, :, None, None] for values in (MEAN, DEVIATION))
    return (pixels - mean) / deviation


def encoded_prompt(pipeline: Any, prompt: str, progress: Any, times: Callable[[], Mapping[str, Any]] = dict) -> Tensor:
    """The states of a prompt: (1, 77, D), fp32, on the CPU; an empty one needs no tokenizer. Raises CheckpointError
    before ``times`` is called where the encoder or a tokenizer that is needed is missing."""
    if "text_encoder" not in pipeline.parts.readers:
        found, fix = f"no text_encoder for {str(pipeline.source)!r}", "Download the complete delight folder."
        raise CheckpointError(found, expected="the folder text_encoder of the delight checkpoint", fix=fix)
    folder = pipeline.tokenizers["text_encoder"]
    file = folder / "special_tokens_map.json"
    padding = read_json(file, "the tokenizer's special tokens").get("pad_token") if file.is_file() else None
    padding = padding.get("content") if isinstance(padding, dict) else padding
    tokens = torch.full((1, TOKENS), PADDING.get(padding, PADDING["!"]))
    words = [FIRST_TOKEN, LAST_TOKEN]
    if prompt:
        expected = "the folder tokenizer of the delight checkpoint, for a negative prompt"
        fix = "Download the complete delight folder, or leave negative_prompt empty."
        words = prompt_tokens(folder, prompt, expected=expected, fix=fix, notify=progress.notify)
    tokens[0, : len(words)] = torch.tensor(words)
    return _states(pipeline, "text_encoder", "text", tokens, progress, times())


def prompt_tokens(folder: Path, prompt: str, expected: str, fix: str, notify: Callable[[str], object]) -> list[int]:
    """The token ids of ``prompt``, at most 77, from CLIP's tokenizer in ``folder``; ``notify`` gets a line on words
    that are cut. Raises CheckpointError, with ``expected`` and ``fix``, where the tokenizer cannot be read."""
    cls: Any = attribute("transformers", "CLIPTokenizer")
    try:
        tokenizer = cls.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a tokenizer's reader has errors of its own for a damaged file
        raise CheckpointError(f"no tokenizer in {str(folder)!r}", expected=expected, fix=fix) from error
    text, words = beginning(tokenizer, prompt, TOKENS), prompt.split()
    starts = [" ".join(words[:most]) for most in range(len(text.split()) + 1)]
    kept = bisect_right(starts, TOKENS, key=lambda start: len(tokenizer(start, verbose=False)["input_ids"])) - 1
    if kept < len(words):
        left = f"the last {len(words) - kept} of {len(words)} words, from {words[kept][:40]!r} on"
        notify(f"CLIP reads {TOKENS} tokens: {left}, are cut")
    return tokenizer(text, truncation=True, max_length=TOKENS)["input_ids"]  # type: ignore[no-any-return]
