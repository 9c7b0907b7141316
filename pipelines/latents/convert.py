"""Our latents as the plain dictionary that ComfyUI's core calls LATENT, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional

from ...compat.device.execution import to_host
from ...compat.errors import InputError
from ...compat.records import plain
from ..base import EMBEDS, EMBEDS_2, FINAL, LATENT_VERSION, MASK, POOLED, RESOLVED, Latents, Prompt, SampleSettings
from ..pipeline import Pipeline

KEY = "anygpu"
MORE = "more"  # under our key: further tensors
CELLS = "cells"  # under our key: latent frames, rows and columns; core's nodes that change them carry our key along
PLAIN = ("family", "task", "frames", "height", "width", "fps", "seed", "space", "version")


def to_core(latents: Latents) -> dict[str, Any]:
    """A LATENT: ``samples`` in core's VAE space and our key ``anygpu`` with plain values, which core nodes ignore."""
    extra = {key: value.hex() if isinstance(value, bytes) else value for key, value in latents.extra.items()}
    if isinstance(extra.get(RESOLVED), SampleSettings):  # latents without a receipt
        extra[RESOLVED] = plain(extra[RESOLVED], ("latents", "noise_mask"))
    record: dict[str, Any] = {name: getattr(latents, name) for name in PLAIN}
    record |= {"extra": extra, CELLS: list(latents.samples.shape[-3:])}
    if latents.more:
        record[MORE] = dict(latents.more)
    return {"samples": latents.samples, KEY: record}


def from_core(pipeline: Pipeline, latent: Mapping[str, Any], notify: Callable[[str], None]) -> Latents:
    """The latents in a LATENT, fp32 on the CPU. The user is told of one that no AnyGPU node made, taken as text to
    video with seed 0, and of a size that another node changed, which replaces the recorded one. Raises InputError for
    no tensor of five dimensions, a batch, or a version that is newer than this pack."""
    samples, record = to_host(samples_of(latent)).float(), latent.get(KEY)
    if not isinstance(record, Mapping):
        notify("these latents come from another node: taken as text to video with seed 0")
        (count, rows, columns), sizes = samples.shape[2:], pipeline.spec.sizes
        size: dict[str, Any] = {"height": rows * sizes.ratio, "width": columns * sizes.ratio}
        frames, fps = (count - 1) * sizes.stride + 1, sizes.defaults.fps
        return Latents(samples, pipeline.family, "text", frames=frames, **size, fps=fps, seed=0)
    version, known = record.get("version", 0), f"version {LATENT_VERSION} or older"
    if int(version) > LATENT_VERSION:
        raise InputError(f"latents of version {version}", expected=known, fix="Update AnyGPU.")
    extra = dict(record.get("extra", {}))
    if isinstance(extra.get("generator_state"), str):
        extra["generator_state"] = bytes.fromhex(extra["generator_state"])
    values, cells, made = {name: record[name] for name in PLAIN}, list(samples.shape[-3:]), record.get(CELLS)
    if made and made != cells:
        spatial, temporal = pipeline.spec.sizes.ratios
        values["frames"] = max(1, values["frames"] + (cells[0] - made[0]) * temporal)
        if made[1:] != cells[1:]:
            values |= {"height": cells[1] * spatial, "width": cells[2] * spatial}
            extra = {name: value for name, value in extra.items() if name not in FINAL}
        notify("another node changed these latents to {width}x{height}, {frames} frames".format_map(values))
    return Latents(samples, **values, extra=extra, more=dict(record.get(MORE, {})))


def samples_of(latent: Mapping[str, Any]) -> torch.Tensor:
    """The tensor of a LATENT, left on its device; raises InputError unless it is one video: (1, C, T, H, W)."""
    samples = latent.get("samples")
    if not isinstance(samples, torch.Tensor) or getattr(samples, "is_nested", False) or samples.ndim != 5:
        shape = tuple(samples.shape) if isinstance(samples, torch.Tensor) and samples.ndim else type(samples).__name__
        found = f"a LATENT of {shape}"
        fix = "Connect the latents of a video model. Image latents cannot be decoded here."
        raise InputError(found, expected="video latents (1, C, T, H, W)", fix=fix)
    if samples.shape[0] != 1:
        found, fix = f"a LATENT batch of {samples.shape[0]}", "Pick one with Latent From Batch."
        raise InputError(found, expected="one video", fix=fix)
    return samples


def start_of(pipeline: Pipeline, latent: Mapping[str, Any] | None, notify: Callable[[str], None]) -> dict[str, Any]:
    """The sampling settings that a LATENT carries: ``latents``, and ``noise_mask`` (1, 1, T or 1, H, W) with 1 where to
    draw, or None; no settings without a LATENT. Raises as :func:`from_core`."""
    if latent is None:
        return {}
    mask = latent.get("noise_mask")
    if mask is not None:
        mask = to_host(mask).float().reshape(1, 1, -1, mask.shape[-2], mask.shape[-1])
    return {"latents": from_core(pipeline, latent, notify), "noise_mask": mask}


def conditionings(prompt: Prompt) -> tuple[list[Any], list[Any]]:
    """Positive and negative of a prompt as core's CONDITIONING, which the family's ``prompt_from_core`` reads back.
    Without a negative prompt the negative has zeros for text, as core's Conditioning Zero Out. The shorter text is
    padded, masked, to the length of the other, as core's own tokenizers do: only then does core give both to the
    transformer in one call, where guidance by attention can compare them."""
    if prompt.negative is not None:
        length = max(text[EMBEDS].shape[1] for text in (prompt.embeds, prompt.negative))
        return _conditioning(_padded(prompt.embeds, length)), _conditioning(_padded(prompt.negative, length))
    zeros = {name: torch.zeros_like(value) if name != MASK else value for name, value in prompt.embeds.items()}
    return _conditioning(prompt.embeds), _conditioning(zeros)


def _padded(text: Mapping[str, torch.Tensor], length: int) -> Mapping[str, torch.Tensor]:
    """``text`` with ``length`` tokens; as it is where no mask would tell which of them count."""
    missing = length - text[EMBEDS].shape[1]
    if not missing or MASK not in text:
        return text
    states, mask = functional.pad(text[EMBEDS], (0, 0, 0, missing)), functional.pad(text[MASK], (0, missing))
    return {**text, EMBEDS: states, MASK: mask}


def _conditioning(embeds: Mapping[str, torch.Tensor]) -> list[Any]:
    names = {MASK: "attention_mask", POOLED: "pooled_output", EMBEDS_2: "conditioning_byt5small"}
    extra = {names[name]: value for name, value in embeds.items() if name in names and value.shape[1]}
    return [[embeds[EMBEDS], extra]]
