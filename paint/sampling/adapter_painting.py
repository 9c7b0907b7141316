"""Six views painted by MV-Adapter, after a picture (ig2mv) or after words alone (tg2mv)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...compat.device.execution import generator_for, placed, to_host
from ...compat.device.failures import DEVICE_ERRORS, is_shortage
from ...compat.errors import CheckpointError, InputError
from ...compat.memory.parts import ProgressStage, Silent
from ...compat.packages import attribute, beginning
from ..choices import IG2MV, PROMPT, PUBLISHED, SHIFT, TAUGHT_SIZES, TG2MV
from ..forecast import ENCODED, PaintRun, looking_bytes, map_encoder_bytes, step_bytes, vae_bytes
from ..geometry.cameras import views_for
from ..loading import PaintPipeline
from ..networks import vae
from ..networks.mv_adapter import VIEWS, AdapterInputs, forward, looked_at
from ..networks.stable_diffusion import EPSILON
from ..pictures import checked_pictures, filling, over, resized, squared
from ..shortage import explained
from .painting import (
    Denoising,
    Painted,
    PaintInputs,
    PaintSettings,
    begun,
    completed,
    decoded,
    denoised,
    plan_of,
    stage,
    tell_sampled,
)
from .solvers import solver_for

TOKENS = 77
STAGES = {"text_encoder": "text", "text_encoder_2": "text_2"}


@dataclass(frozen=True, slots=True)
class Text:
    """Encoded prompts of the guidance rows: ``states`` (R, 77, D); ``added`` is SDXL's pooled text and its sizes."""

    states: Tensor
    added: Mapping[str, Tensor]

    def last(self) -> Text:
        """The row of the prompt alone."""
        return Text(self.states[-1:], {name: value[-1:] for name, value in self.added.items()})


def paint_six_views(
    pipeline: PaintPipeline, inputs: PaintInputs, settings: PaintSettings, progress: Any = None
) -> Painted:
    """The six views, painted.

    Raises:
        InputError: pictures, maps, cameras, words, latents or settings that do not fit together, or a result with NaN.
        CheckpointError: no tokenizer.
    """
    progress = progress or Silent()
    base = str(pipeline.configs["adapter"]["base"])
    if settings.scheduler == "auto" and base == "sd21":
        settings = replace(settings, scheduler="euler_ancestral")  # the step of the recommended DDPM
    settings = completed(pipeline, settings, progress)
    if settings.size != TAUGHT_SIZES[base]:
        progress.notify(f"this model was made for views of {TAUGHT_SIZES[base]} pixels, not {settings.size}")
    prompt = _prompt(pipeline, inputs)
    references, maps = _references(pipeline, inputs, settings, progress), _maps(inputs, settings, progress)
    rows = 2 if settings.guidance != 1 else 1
    run = PaintRun(len(_plan(settings)), rows, settings.size, views=VIEWS, references=len(references))
    what = f"painting {VIEWS} views of {settings.size} pixels"
    with torch.no_grad(), explained(what, pipeline.facts.name, "Lower view_size."):
        prompts = [prompt] if run.rows == 1 else [inputs.negative, prompt]
        text = encoded_prompts(pipeline, prompts, run, progress)
        latents = _sampled(pipeline, (references, maps, text), settings, run, progress)
        tell_sampled(pipeline, latents, settings.seed, progress)
        return decoded(pipeline, latents, VIEWS, settings, progress)


def _plan(settings: PaintSettings) -> Any:
    return plan_of(settings, zero_snr=False, shift=SHIFT)


def _prompt(pipeline: PaintPipeline, inputs: PaintInputs) -> str:
    if inputs.prompt.strip() or pipeline.variant == IG2MV:
        return inputs.prompt.strip() or PROMPT
    raise InputError(
        f"no prompt for {TG2MV}, which paints after words alone",
        expected="a description of the object",
        fix="Write one into prompt, or load the adapter ig2mv, which takes a picture.",
    )


def _references(pipeline: PaintPipeline, inputs: PaintInputs, settings: PaintSettings, progress: Any) -> Tensor:
    """The reference pictures (R, S, S, 3); none for tg2mv."""
    size, none = settings.size, isinstance(inputs.references, list | tuple) and not inputs.references
    if pipeline.variant == TG2MV:
        if not none:
            progress.notify(f"{TG2MV} paints after words alone: the picture has no effect")
        return torch.empty(0, size, size, 3)
    grey, prepared = PUBLISHED[pipeline.variant].background, []
    for picture in checked_pictures(inputs.references, "reference picture"):
        if picture.shape[-1] == 4 and bool((picture[..., 3] < 1).any()):
            prepared.append(filling(picture, size, grey))
            continue
        progress.notify("a reference picture without transparency is used whole: cut the object out, or connect a mask")
        prepared.append(resized(squared(over(picture, grey), grey)[None], size, size)[0])
    if len(prepared) > 1:
        progress.notify(f"{len(prepared)} reference pictures: the model was taught with one")
    return torch.stack(prepared)


def _maps(inputs: PaintInputs, settings: PaintSettings, progress: Any) -> Tensor:
    """Positions and normals, (6, 6, S, S); pixels are chosen, never mixed, so that no surface mixes with the ground."""
    views_for("mv_adapter", inputs.cameras)
    size, both = settings.size, []
    for name, given in (("position", inputs.positions), ("normal", inputs.normals)):
        pictures = checked_pictures(given, f"{name} maps")
        if len(pictures) != VIEWS:
            raise InputError(
                f"{len(pictures)} {name} maps for {VIEWS} cameras",
                expected="one map per camera",
                fix="Connect the maps and the cameras of the same Render Views node.",
            )
        maps = torch.stack(pictures)[..., :3].permute(0, 3, 1, 2)
        if maps.shape[-1] != size:
            progress.notify(f"{name} maps of {maps.shape[-1]} pixels are made smaller: Render Views at {size} is exact")
        both.append(functional.interpolate(maps, (size, size), mode="nearest-exact"))
    side = size // vae.REDUCTION
    if settings.latents is not None and tuple(settings.latents.shape) != (VIEWS, 4, side, side):
        raise InputError(
            f"latents of shape {tuple(settings.latents.shape)} for painting",
            expected=f"{(VIEWS, 4, side, side)}",
            fix="Upscale the latents of the first pass to the view size with Upscale Latent.",
        )
    return torch.cat(both, dim=1)


def encoded_prompts(pipeline: PaintPipeline, prompts: list[str], run: PaintRun, progress: Any) -> Text:
    """The states of prompts, fp32, on the CPU, one row each; cut at 77 tokens.

    Of SDXL an empty prompt is zeros, as upstream has it.
    """
    sdxl, device = "text_encoder_2" in pipeline.parts.readers, pipeline.offloader.device
    states, pooled = [], torch.empty(0)
    for part in (part for part in STAGES if part in pipeline.parts.readers):
        ends = sdxl and part == "text_encoder"
        tokens = torch.stack([_tokens(pipeline.tokenizers[part], prompt, ends) for prompt in prompts])
        with stage(pipeline, STAGES[part], part, 0, run, progress) as module:
            found = module(placed(tokens, device), output_hidden_states=sdxl)
            states.append(to_host(found.hidden_states[-2] if sdxl else found.last_hidden_state).float())
            if part == "text_encoder_2":
                pooled = to_host(found.text_embeds).float()
        pipeline.offloader.release(part)
    text = torch.cat(states, dim=-1)
    if not sdxl:
        return Text(text, {})
    empty = torch.tensor([not prompt for prompt in prompts])
    text[empty], pooled[empty] = 0, 0
    sizes = torch.tensor([run.size, run.size, 0, 0, run.size, run.size], dtype=torch.float32)
    return Text(text, {"text_embeds": pooled, "time_ids": sizes.expand(len(prompts), -1)})


def _tokens(folder: Path, prompt: str, ends: bool) -> Tensor:
    """The 77 tokens of a prompt: its end is repeated, or token 0 follows, as the encoder was taught."""
    cls: Any = attribute("transformers", "CLIPTokenizer")
    try:
        tokenizer = cls.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a tokenizer's reader has errors of its own for a damaged file
        raise CheckpointError(
            f"no tokenizer in {str(folder)!r}",
            expected="the tokenizer of CLIP, which ComfyUI has and a diffusers folder too",
            fix="Choose a diffusers folder as the checkpoint, or put its folder tokenizer beside the file.",
        ) from error
    words = tokenizer(beginning(tokenizer, prompt, TOKENS), truncation=True, max_length=TOKENS)["input_ids"]
    return torch.tensor([*words, *[words[-1] if ends else 0] * (TOKENS - len(words))])


def _sampled(
    pipeline: PaintPipeline, given: tuple[Tensor, Tensor, Text], settings: PaintSettings, run: PaintRun, progress: Any
) -> Tensor:
    """Clean latents (6, 4, h, w), scaled, fp32, on the CPU."""
    references, maps, text = given
    device, dtype = pipeline.offloader.device, pipeline.precision.residual or pipeline.precision.transformer
    side, solver = run.size // vae.REDUCTION, solver_for(settings.scheduler, _plan(settings))
    generator = generator_for(settings.seed)
    noises = iter([torch.randn(VIEWS, 4, side, side, generator=generator)])  # before the reference's, as upstream

    def draw() -> Tensor:
        first = next(noises, None)
        return torch.randn(VIEWS, 4, side, side, generator=generator) if first is None else first

    on_device = partial(placed, device=device, dtype=dtype)
    words = Text(on_device(text.states), {name: on_device(value) for name, value in text.added.items()})
    reference: dict[str, Tensor] = {}
    if len(references):
        need = vae_bytes(ENCODED, run.size, pipeline.precision.vae)
        with stage(pipeline, "encoding", "vae", need, run, progress) as module:
            pictures = vae.encoded(module, references, generator, device) * pipeline.latent_scale
            progress.step(1, 1, ProgressStage("encoding"))
        need, last = looking_bytes(pipeline, len(references), (side, side)), words.last()
        with stage(pipeline, "reference", "unet", need, run, progress) as unet:
            reference = looked_at(unet, on_device(pictures), last.states, last.added)
    with stage(pipeline, "maps", "adapter", map_encoder_bytes(pipeline, run.size), run, progress) as module:
        states = [state.to(dtype) for state in module(placed(maps, device, module.dtype))]
    shown = (False, True)[-run.rows :]
    layers = AdapterInputs(reference, shown, settings.reference_scale, settings.multiview_scale)
    denoising = Denoising(
        solver,
        draw,
        rows=run.rows,
        guidance=settings.guidance,
        need=step_bytes(pipeline, VIEWS * run.rows, (side, side), run.references),
        run=run,
        epsilon=pipeline.configs["adapter"]["prediction_type"] == EPSILON,
    )
    step = Rows(words, layers, states, progress)
    return denoised(pipeline, denoising, begun(pipeline, solver, draw, settings), step, progress)


class Rows:
    """A step of all guidance rows: together, or one after the other once memory has run out."""

    def __init__(self, text: Text, layers: AdapterInputs, states: list[Tensor], progress: Any) -> None:
        self.text, self.layers, self.states, self.progress = text, layers, states, progress
        self.apart = False

    def __call__(self, unet: Any, x: Tensor, time: Tensor) -> Tensor:
        """The predictions (R * 6, 4, h, w) for noisy latents (6, 4, h, w)."""
        x, count = x.to(self.text.states.dtype), len(self.layers.rows)
        if not self.apart:
            try:
                return self._rows(unet, x.repeat(count, 1, 1, 1), time, slice(None))
            except DEVICE_ERRORS as error:
                if count == 1 or not is_shortage(error):
                    raise
            self.apart = True
            self.progress.notify("painting ran out of memory: one guidance row at a time from here on")
        return torch.cat([self._rows(unet, x, time, slice(row, row + 1)) for row in range(count)])

    def _rows(self, unet: Any, x: Tensor, time: Tensor, chosen: slice) -> Tensor:
        added = {name: value[chosen] for name, value in self.text.added.items()}
        given = self.layers
        layers = AdapterInputs(given.reference, given.rows[chosen], given.reference_scale, given.multiview_scale)
        return forward(unet, x, time, self.text.states[chosen], added, layers, self.states)
