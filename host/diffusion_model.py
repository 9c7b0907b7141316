"""A pipeline's transformer in the place of core's own network, and core's model class around it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import comfy.ldm.lightricks.symmetric_patchifier
import torch
from comfy.patcher_extension import WrapperExecutor, WrappersMP, get_all_wrappers
from torch import nn

from ..compat.errors import UnsupportedError
from ..pipelines.base import Call, ImageCondition, SampleSettings
from ..pipelines.pipeline import Pipeline
from ..pipelines.sampling.core_sampler import TIME, BlockPatches, attentions_of, blocks_of, velocity
from ..pipelines.settings import require_family
from ..pipelines.sizes import beside_transformer
from .memory_manager import PartHolder

log = logging.getLogger(__name__)
PICTURE = "anygpu_image"  # key of our image condition in a CONDITIONING
TRANSFORMER = "transformer"
OVERRIDE, VALUES = "optimized_attention_override", "stg_self_attn_blocks"
OUTPUTS = {"attn1_output_patch": "attn1", "attn2_output_patch": "attn2"}
INPUTS = {"attn1": "attn1_patch", "attn2": "attn2_patch"}  # by place; a node that sets both undoes one in the other
READ = {  # keys of a call's options that core's sampler sets for its own use, or that are read here
    *("cond_or_uncond", "uuids", "sigmas", "sample_sigmas", "wrappers", "callbacks", "patches", "patches_replace"),
    *("multigpu_thread_device", "prefetch_dynamic_vbars", "context_window", "easycache", OVERRIDE, VALUES),
}
NETWORK = "diffusion_model."
KINDS = {"double_block": "double", "single_block": "single"}


class DiffusionModel(nn.Module):
    """The transformer as a network of core's; ``time_scale`` turns core's timestep into a noise level times 1000."""

    def __init__(self, pipeline: Pipeline, time_scale: float) -> None:
        super().__init__()
        self.pipeline, self.dtype, self.time_scale = pipeline, pipeline.precision.residual, time_scale
        config = pipeline.configs[TRANSFORMER]
        self.in_channels, self.out_channels = config.get("in_channels"), config.get("out_channels")
        self.notify: Callable[[str], None] = log.info  # shows a line on the node that samples
        self.demo = ""  # how a demo model departs from what was asked of this sampling
        self.patchifier = comfy.ldm.lightricks.symmetric_patchifier.SymmetricPatchifier(1)

    def forward(
        self,
        x: torch.Tensor,
        timestep: torch.Tensor,
        context: torch.Tensor | None = None,
        transformer_options: dict[str, Any] | None = None,
        **conds: Any,
    ) -> torch.Tensor:
        """The velocity for ``x`` (B, C, T, H, W) at core's ``timestep``, in wrappers; notifies inputs of no effect."""
        options = transformer_options or {}
        for text in unread(options, conds, self.pipeline.spec.title, self.__dict__["held"]):
            self.notify(text)
        wrappers = get_all_wrappers(WrappersMP.DIFFUSION_MODEL, options)
        executor = WrapperExecutor.new_class_executor(self._velocity, self, wrappers)
        return executor.execute(x.clone(), timestep, context, options, **conds)  # EasyCache changes x

    def _velocity(
        self,
        x: torch.Tensor,
        timestep: torch.Tensor,
        context: torch.Tensor | None,
        transformer_options: dict[str, Any],
        **conds: Any,
    ) -> torch.Tensor:
        """The pipeline's velocity for core's arguments; UnsupportedError where a LoRA is merged into the weights."""
        active_adapters = self.pipeline.parts.active_adapters.get(TRANSFORMER)
        if active_adapters is not None and active_adapters.in_weights:
            found = "a MODEL whose weights hold the merged LoRA of an AnyGPU pipeline"
            fix = "Use core's LoRA nodes on the MODEL, or set mode of AnyGPU LoRA to separate."
            raise UnsupportedError(found, expected="weights without it", fix=fix)
        time = timestep * self.time_scale
        call = Call(
            x,
            time.squeeze(-1) if time.ndim == 3 else time,
            context,
            conds.get("attention_mask"),
            pooled=conds.get("y"),
            guidance=conds.get("guidance"),
            glyph_embeds=conds.get("txt_byt5"),
            vision=conds.get("clip_fea"),
            picture=conds.get(PICTURE),
            next_time=_next_time(transformer_options, time),
            fps=float(conds.get("frame_rate", 25.0)),
            branch="_".join("uncond" if side else "cond" for side in transformer_options.get("cond_or_uncond", [0])),
        )
        return velocity(self.pipeline, self.__dict__["held"], call, block_patches(transformer_options))


class CoreModel(PartHolder):
    pipeline: Pipeline
    diffusion_model: DiffusionModel
    time_scale = 1.0  # core's schedules of some families count noise levels from 0 to 1
    scaled = False  # whether core's scale of latents is taken from the VAE's configuration

    def set_pipeline(self, pipeline: Pipeline) -> None:
        """Put the transformer in place of core's network, and the checkpoint's scale of latents in place of core's."""
        pipeline = replace(pipeline, plan=replace(pipeline.plan, offloader=None))  # it has this model's patcher
        self.pipeline, self.parts, self.part = pipeline, pipeline.parts, TRANSFORMER
        self.diffusion_model = DiffusionModel(pipeline, self.time_scale)
        if self.scaled and pipeline.configs["vae"].get("scaling_factor") is not None:
            self.latent_format.scale_factor = float(pipeline.configs["vae"]["scaling_factor"])

    def place(self) -> nn.Module:
        return self.diffusion_model

    def extra_conds(self, **given: Any) -> dict[str, Any]:
        """Core's conds that have a value, and those of a picture of this family by :func:`.core_models.pictured`."""
        given.setdefault("pooled_output", None)
        conds: dict[str, Any] = super().extra_conds(**given)  # type: ignore[misc]
        if (picture := given.get(PICTURE)) is not None:
            require_family(picture.family, self.pipeline.spec, "an image condition")
            conds.update(self._picture_conds(picture, given["noise"]))
        return {name: cond for name, cond in conds.items() if getattr(cond, "cond", cond) is not None}

    def memory_required(self, input_shape: Any, cond_shapes: Any = None) -> float:
        spatial, temporal = self.pipeline.spec.sizes.ratios
        rows, _, frames, height, width = input_shape  # of latents
        size = SampleSettings(width * spatial, height * spatial, (frames - 1) * temporal + 1)
        return float(rows * beside_transformer(self.pipeline, size, window=frames))

    def _picture_conds(self, image: ImageCondition, noise: torch.Tensor) -> dict[str, Any]:
        """Core's conds of a start picture for latents like ``noise``; here, for families without, none but a notice."""
        self.diffusion_model.notify("no effect of AnyGPU Image Conditioning on this model: use AnyGPU Sample")
        return {}


def _next_time(options: dict[str, Any], time: torch.Tensor) -> torch.Tensor | None:
    """(B,): the schedule's next lower noise level times 1000, 0 at its end; None where it is unknown."""
    levels = options.get("sample_sigmas")
    if levels is None or time.ndim != 1:
        return None
    below = levels[levels * TIME < float(time.max()) - 1e-3]  # less than any step, more than rounding
    return torch.full_like(time, float(below.max()) * TIME if len(below) else 0.0)


def block_patches(options: Mapping[str, Any]) -> BlockPatches | None:
    """The replaced blocks, attention patches, override and STG blocks that nodes put on a call; None without any."""
    dit = options.get("patches_replace", {}).get("dit", {})
    double, single = ({key[1]: patch for key, patch in dit.items() if key[0] == kind} for kind in KINDS)
    outputs = _outputs(options)
    override, values = options.get(OVERRIDE), frozenset(options.get(VALUES) or ())
    if not (double or single or outputs or override or values):
        return None
    attend = None if override is None else _overridden(override, options)
    return BlockPatches(double, single, attend=attend, outputs=outputs, values=values, options=options)


def unread(options: Mapping[str, Any], conds: Mapping[str, Any], title: str, transformer: Any) -> Iterator[str]:
    """A line for each option, patch and cond of a call without effect on this transformer, of the family ``title``."""
    wrapped = {key for kind in options.get("wrappers", {}).values() for key in kind}
    for name in sorted(str(key) for key in options.keys() - READ - wrapped):
        yield f"no effect on {title}: the option {name}, which its transformer does not read"
    blocks = list(blocks_of(transformer))
    yield from _unread_in_attention(options, title, {place for *_, block in blocks for place in attentions_of(block)})
    counts = Counter(kind for kind, _, _ in blocks)
    for place, patches in options.get("patches_replace", {}).items():
        for key in patches:
            if place != "dit" or key[1] >= counts[KINDS.get(key[0], "")]:
                block = " ".join(str(part) for part in key)
                yield f"no effect on {title}: a replaced {place} in block {block}, which its transformer does not have"
    for index in sorted(options.get(VALUES) or ()):
        if index >= counts["double"]:
            yield f"no effect on {title}: guidance by block {index}; it has blocks 0 to {counts['double'] - 1}"
    if conds.get("control") is not None:
        yield f"no effect on {title}: a ControlNet, for which its transformer has no place"


def _unread_in_attention(options: Mapping[str, Any], title: str, places: set[str]) -> Iterator[str]:
    """The lines of :func:`unread` on attention patches; ``places``: which of attn1 and attn2 the transformer has."""
    applied, one_prompt = _outputs(options), len(set(options.get("cond_or_uncond", ()))) < 2
    for name in sorted(name for name, patches in options.get("patches", {}).items() if patches):
        place = OUTPUTS.get(name, "")
        if place not in places:
            yield f"no effect on {title}: a node's {name}, a place that its transformer does not have"
        elif place not in applied:
            yield f"no effect on {title}: a node's {name}, whose {INPUTS[place]} has none here"
        elif one_prompt:
            why = "what compares the negative prompt with the positive one there, such as NAG, has no effect"
            yield f"a node's {name} sees one prompt at a time on {title}: {why}"


def unread_patches(patches: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted(patches):
        if name == "manual_cast_dtype":
            yield "no effect of Model Compute Dtype: choose precision on the AnyGPU load node"
        elif name.startswith(NETWORK):
            yield f"no effect of a node's patch of {name}: this model's network is not core's"


def _outputs(options: Mapping[str, Any]) -> dict[str, Any]:
    """attn1 or attn2 -> its output patches; none beside an input patch: that is not applied, and they would undo it."""
    patches = options.get("patches", {})
    named = ((place, patches.get(name)) for name, place in OUTPUTS.items() if not patches.get(INPUTS[place]))
    return {place: own for place, own in named if own}


def _overridden(override: Any, options: Mapping[str, Any]) -> Any:
    """Attention for our blocks by core's ``override``, which gets ours in core's form; an error for other shapes."""

    def attend(
        ours: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        def as_core(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, mask: torch.Tensor | None = None,
            attn_precision: Any = None, **form: Any,
        ) -> torch.Tensor:  # fmt: skip
            """``ours`` by core's arguments: (B, N, H * D), or (B, H, N, D) where ``form`` has skip_reshape."""
            if not form.get("skip_reshape"):
                q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))
            if form.get("scale"):  # ours divides by the root of the head's width
                q = q * (form["scale"] * q.shape[-1] ** 0.5)
            mask = mask.unsqueeze(1) if mask is not None and mask.ndim == 3 else mask  # (B, N, M), one for all heads
            out: torch.Tensor = ours(q, k, v, mask)
            return out if form.get("skip_output_reshape") else out.transpose(1, 2).flatten(2)

        given = {"mask": mask, "skip_reshape": True, "skip_output_reshape": True, "transformer_options": options}
        out: torch.Tensor = override(as_core, query, key, value, query.shape[1], **given)
        shape = (*query.shape[:-1], value.shape[-1])
        if out.shape != shape:
            found, expected = f"attention of shape {tuple(out.shape)} from a node on the MODEL", str(shape)
            fix = "Remove the node that replaces attention, or choose attention on the AnyGPU load node."
            raise UnsupportedError(found, expected=expected, fix=fix)
        return out

    return attend
