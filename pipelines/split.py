"""One pipeline on several devices: the processes of a group load it alike and render each video together."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from ..compat.errors import UnsupportedError, first_line
from ..compat.ranks import Group
from ..compat.transforms.attention import Attention
from ..compat.transforms.context_parallel import split_step
from ..compat.transforms.order import replace_attention
from .base import Call
from .pipeline import Pipeline
from .sampling.core_sampler import TIME, velocity

TRANSFORMER = "transformer"
MOST = 1e-4  # of the largest value, that the twin may differ by: rounding gives 1e-6, a wrong split 0.01 and more
PATCHES = (5, 5, 7)  # frames, rows and columns of the twin's video, whose product few numbers of ranks divide
TEXT, VALID, WIDTH = 7, 4, 32  # tokens of the twin's texts, of the shorter one, and their width
SMALL: Mapping[str, Any] = {  # values of a transformer's configuration that make it small, where its class has them
    "attention_head_dim": 16,
    "rope_axes_dim": (4, 6, 6),
    "num_layers": 2,
    "num_single_layers": 2,
    "num_refiner_layers": 1,
    **dict.fromkeys(("caption_channels", "text_embed_dim", "text_embed_2_dim", "pooled_projection_dim"), WIDTH),
    **dict.fromkeys(("image_embed_dim", "image_proj_dim"), WIDTH),
}


def on_group(pipeline: Pipeline, group: Group) -> Pipeline:
    """``pipeline``, whose transformers have not been read yet, for this process of ``group``; every process calls it.
    Raises UnsupportedError for a family that was never split, compiled blocks, or a split that is not exact."""
    parts = pipeline.parts
    if pipeline.plan.speed.compiled:
        found, fix = f"compile on {group.world.size} devices", "Leave compile off for these jobs."
        expected = "compile off, since exchanges between devices would be part of the graphs"
        raise UnsupportedError(found, expected=expected, fix=fix)
    prepare: Any = parts.prepare
    parts.prepare = prepare.with_steps([split_step(group, pipeline.spec.rewrites.split, pipeline.spec.title)])
    require_exact(pipeline, group)
    return replace(pipeline, run=replace(pipeline.run, group=group))


def require_exact(pipeline: Pipeline, group: Group) -> None:
    """Raise UnsupportedError where a tiny transformer of the model's class gives other results split than whole. It
    takes a second and finds blocks that a new version of diffusers changed, before hours go into a wrong video."""
    device = pipeline.offloader.device_of(TRANSFORMER)
    twin = _twin(pipeline, group.world.size).to(device)
    model = replace(pipeline.model, configs={**pipeline.configs, TRANSFORMER: twin.config})
    twin_pipeline = replace(pipeline, model=model)
    call = _call(pipeline, dict(twin.config), device)

    def difference() -> float:
        return float((velocity(twin_pipeline, twin, call) - whole).abs().max())

    with torch.no_grad():
        replace_attention(twin, Attention())
        whole = velocity(twin_pipeline, twin, call)
        split_step(group, pipeline.spec.rewrites.split, pipeline.spec.title).apply(TRANSFORMER, twin)
        try:
            differences = [difference()]
            if group.half is not None:
                with group.apart():
                    differences.append(difference())
        except (RuntimeError, ValueError, LookupError) as error:
            raise _refusal(pipeline, f"fails ({first_line(error)})", group) from error
    largest = float(whole.abs().max())
    wrong = not max(differences) <= MOST * largest
    if group.world.any(wrong):
        raise _refusal(pipeline, f"differs from the whole by {max(differences):.2g} of {largest:.2g}", group)


def _twin(pipeline: Pipeline, size: int) -> Any:
    """A small transformer of the pipeline's configuration, whose number of heads ``size`` ranks do not divide. Its
    weights are random, as diffusers starts some projections at zero: text and time would not reach the output."""
    import diffusers

    cls = getattr(diffusers, pipeline.spec.files.parts[TRANSFORMER][1])
    heads = {"num_attention_heads": size + 1, "cross_attention_dim": (size + 1) * SMALL["attention_head_dim"]}
    config = {**pipeline.configs[TRANSFORMER], **SMALL, **heads}
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        twin = cls.from_config({key: config[key] for key in inspect.signature(cls).parameters if key in config})
        for name, weight in twin.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.ndim > 1:
                weight.copy_(noise / math.sqrt(noise[0].numel()))
            else:
                weight.copy_(0.1 * noise + (0 if name.endswith("bias") else 1))  # 1: scales of norms
    return twin.eval()


def _call(pipeline: Pipeline, config: dict[str, Any], device: torch.device) -> Call:
    """A call with random inputs: two videos, texts of two lengths, and a time for each token if the family has that."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    patch = int(config.get("patch_size") or 1)
    frames, rows, columns = PATCHES[0], PATCHES[1] * patch, PATCHES[2] * patch
    channels, mask = int(config["in_channels"]), torch.ones(2, TEXT, device=device)
    mask[0, VALID:] = 0
    plan = pipeline.spec.rewrites.split
    time = torch.tensor([0.7 * TIME, 0.4 * TIME], device=device)
    if plan is not None and plan.rows:
        time = time[:, None] * torch.linspace(0.5, 1.0, PATCHES[0] * PATCHES[1] * PATCHES[2], device=device)
    return Call(
        latents=random(2, channels, frames, rows, columns),
        time=time,
        embeds=random(2, TEXT, WIDTH),
        mask=mask,
        pooled=random(2, WIDTH),
        guidance=torch.full((2,), 6.0, device=device),
        vision=random(2, TEXT, WIDTH),
        picture=random(2, channels, 1, rows, columns),
    )


def _refusal(pipeline: Pipeline, why: str, group: Group) -> UnsupportedError:
    found = f"a tiny {pipeline.spec.title} split over {group.world.size} devices {why}"
    fix = "Leave out --group for this model, and report this with the version of diffusers."
    return UnsupportedError(found, expected=f"at most {MOST:g} of its largest value", fix=fix)
