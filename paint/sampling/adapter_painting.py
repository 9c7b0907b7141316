"""Six views painted by MV-Adapter, after a picture (ig2mv) or after words alone (tg2mv)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...compat.device.execution import generator_for, placed, to_host
from ...compat.device.failures import DEVICE_ERRORS, is_shortage
from ...compat.errors import InputError
from ...compat.memory.parts import ProgressStage, Silent
from ..choices import IG2MV, PROMPT, PUBLISHED, SHIFT, TAUGHT_SIZES, TG2MV
from ..forecast import ENCODED, PaintRun, looking_bytes, map_encoder_bytes, vae_bytes
from ..geometry.cameras import views_for
from ..loading import PaintPipeline
from ..networks import vae
from ..networks.encoders import TOKENS, prompt_tokens
from ..networks.mv_adapter import VIEWS, AdapterInputs, forward, looked_at
from ..pictures import checked_pictures, filling, over, resized, squared
from . import painting
from .painting import Painted, PaintInputs, PaintSettings, explained, stage
from .solvers import solver_for

STAGES = {"text_encoder": "text", "text_encoder_2": "text_2"}


@dataclass(frozen=True, slots=True)
class Text:
    """Encoded prompts of the guidance rows: ``states`` (R, 77, D); ``added`` is SDXL's pooled text and its sizes."""

    states: Tensor
    added: Mapping[str, Tensor]


def paint_six_views(
    pipeline: PaintPipeline, inputs: PaintInputs, settings: PaintSettings, progress: Any = None
) -> Painted:
    """The six views, painted. Raises InputError for pictures, maps, cameras, words, latents or settings that do not fit
    together, or a result with NaN; CheckpointError where there is no tokenizer."""
    progress = progress or Silent()
    base = str(pipeline.configs["adapter"]["base"])
    settings = painting.completed(pipeline, settings, progress)
    if settings.size != TAUGHT_SIZES[base] and not pipeline.is_demo:
        progress.notify(f"this model was made for views of {TAUGHT_SIZES[base]} pixels, not {settings.size}")
    prompt = inputs.prompt.strip() or (PROMPT if pipeline.variant == IG2MV else "")
    if not prompt:
        found = f"no prompt for {TG2MV}, which paints after words alone"
        fix = "Write one into prompt, or load the adapter ig2mv, which takes a picture."
        raise InputError(found, expected="a description of the object", fix=fix)
    doing = f"painting {VIEWS} views of {settings.size} pixels"
    with torch.no_grad(), explained(doing, pipeline.facts.name, "Lower view_size."):
        references = _references(pipeline, inputs, settings, progress)
        maps = _maps(inputs, settings, progress)
        solver = solver_for(settings.scheduler, painting.plan_of(settings, zero_snr=False, shift=SHIFT))
        run = painting.run_of(settings, solver, VIEWS, len(references))
        prompts = [prompt] if run.rows == 1 else [inputs.negative, prompt]  # one row is no guidance
        text = encoded_prompts(pipeline, prompts, run, progress)
        latents = _sample(pipeline, (references, maps, text), settings, solver, run, progress)
        return painting.decoded(pipeline, latents, run, settings.seed, progress)


def _references(pipeline: PaintPipeline, inputs: PaintInputs, settings: PaintSettings, progress: Any) -> Tensor:
    """The reference pictures (R, S, S, 3) on grey, those with transparency cropped to the object; none for tg2mv."""
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
    """Positions and normals, (6, 6, S, S), resized by nearest pixel, so that no surface mixes with the ground.

    Raises InputError for cameras, maps or latents that are not of the six views."""
    views_for("mv_adapter", inputs.cameras)
    painting.require_latents(settings, VIEWS)
    size, both = settings.size, {}
    for name, pictures in painting.checked_maps(inputs, VIEWS).items():
        maps = torch.stack(pictures)[..., :3].permute(0, 3, 1, 2)
        if maps.shape[-1] != size:
            progress.notify(f"{name} maps of {maps.shape[-1]} pixels are resized: Render Views at {size} is exact")
        both[name] = functional.interpolate(maps, (size, size), mode="nearest-exact")
    return torch.cat((both["position"], both["normal"]), dim=1)


def encoded_prompts(pipeline: PaintPipeline, prompts: list[str], run: PaintRun, progress: Any) -> Text:
    """The states of prompts, fp32, on the CPU, one row each; an empty prompt of SDXL is zeros, as upstream."""
    sdxl, device = "text_encoder_2" in pipeline.parts.readers, pipeline.offloader.device
    states, pooled = [], torch.empty(0)
    for part in (part for part in STAGES if part in pipeline.parts.readers):
        repeats_end = sdxl and part == "text_encoder"
        notify = progress.notify if part == "text_encoder" else str  # once: both read the same
        tokens = torch.stack([_tokens(pipeline.tokenizers[part], prompt, repeats_end, notify) for prompt in prompts])
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


def _tokens(folder: Path, prompt: str, repeats_end: bool, notify: Callable[[str], object]) -> Tensor:
    """The 77 token ids of a prompt, padded by its end token or by 0, as the encoder was trained."""
    words = prompt_tokens(
        folder,
        prompt,
        expected="the tokenizer of CLIP, which ComfyUI has and a diffusers folder too",
        fix="Choose a diffusers folder as the checkpoint, or put its folder tokenizer beside the file.",
        notify=notify,
    )
    return torch.tensor([*words, *[words[-1] if repeats_end else 0] * (TOKENS - len(words))])


def _sample(
    pipeline: PaintPipeline,
    given: tuple[Tensor, Tensor, Text],
    settings: PaintSettings,
    solver: Any,
    run: PaintRun,
    progress: Any,
) -> Tensor:
    """Clean latents (6, 4, h, w), scaled, fp32, on the CPU."""
    references, maps, text = given
    device, dtype = pipeline.offloader.device, pipeline.precision.residual or pipeline.precision.transformer
    side, generator = run.size // vae.REDUCTION, generator_for(settings.seed)
    draw = painting.noises((VIEWS, 4, side, side), generator)
    noise = draw()  # before the reference's, as upstream
    on_device = partial(placed, device=device, dtype=dtype)
    words = Text(on_device(text.states), {name: on_device(value) for name, value in text.added.items()})
    reference: dict[str, Tensor] = {}
    if len(references):
        need = vae_bytes(ENCODED, run.size, pipeline.precision.vae)
        with stage(pipeline, "encoding", "vae", need, run, progress) as module:
            pictures = vae.encoded(module, references, generator, device) * pipeline.latent_scale
            progress.step(1, 1, ProgressStage("encoding"))
        last = {name: value[-1:] for name, value in words.added.items()}  # of the prompt alone
        with stage(pipeline, "reference", "unet", looking_bytes(pipeline, run), run, progress) as unet:
            reference = looked_at(unet, on_device(pictures), words.states[-1:], last)
    with stage(pipeline, "maps", "adapter", map_encoder_bytes(pipeline, run.size), run, progress) as module:
        states = [state.to(dtype) for state in module(placed(maps, device, module.dtype))]
    shown = (False, True)[-run.rows :]  # the row of the negative prompt is without the reference
    layers = AdapterInputs(reference, shown, settings.reference_scale, settings.multiview_scale)
    rows = Rows(words, layers, states, progress)

    def step(unet: Any, noisy: Tensor, time: Tensor) -> Tensor:
        return painting.guided(rows(unet, noisy, time), run.rows, settings.guidance)

    start = painting.begun(pipeline, solver, noise, settings)
    decided = generator, settings.seed, settings, given
    return painting.denoised(pipeline, run, solver, start, draw=draw, step=step, progress=progress, decided=decided)


class Rows:
    """A step of all guidance rows: together, or one after the other once memory has run out."""

    def __init__(self, text: Text, layers: AdapterInputs, states: list[Tensor], progress: Any) -> None:
        self.text, self.layers, self.states, self.progress = text, layers, states, progress
        self.apart = False

    def __call__(self, unet: Any, x: Tensor, time: Tensor) -> Tensor:  # (R * 6, 4, h, w) from (6, 4, h, w)
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
        layers = replace(self.layers, rows=self.layers.rows[chosen])
        return forward(unet, x, time, self.text.states[chosen], added=added, run=layers, states=self.states)
