"""The nodes that fit core's own MODEL, VAE and CLIP to the device, and the one that finds out why a video is black."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from ..compat import doctor as doctors
from ..compat.decision import AUTO
from ..compat.device.packed_paths import PACKED_PATHS
from ..compat.errors import InputError
from ..compat.repairs import RepairStore
from ..host import folders, recipes
from ..host.api import io
from ..host.core import clip as core_clip
from ..host.core import doctor as core
from ..host.core import model as core_model
from ..host.core import vae as core_vae
from ..host.core.machine import ATTENTIONS, PRECISIONS
from ..host.core.weights import name_of
from ..host.progress import NodeProgress
from .inputs import CATEGORY, Pipeline, schema

log = logging.getLogger(__name__)

fit_schema = partial(schema, category=f"{CATEGORY}/fit")
PRECISION = (
    "auto: fp16-safe where this GPU has no fast bf16, otherwise as core loaded it. fp16-safe: scaled fp16 products around "
    "an fp32 stream; the first step says in how many layers. fp32: exact and slow. as loaded: core's choice."
)


def output_of(cls: Any, before: Any, fitted: Any, decisions: Any) -> io.NodeOutput:
    """The output ``fitted``, after showing status and decisions under the node; ``before``: the MODEL, VAE or CLIP as given."""
    progress = NodeProgress(cls.hidden.unique_id)
    for decision in decisions:
        progress.notify(str(decision))
    progress.finish(status_of(before, fitted))
    return io.NodeOutput(fitted)


def status_of(before: Any, fitted: Any) -> str:
    """The status of a fit: a copied MODEL counts as fitted only if its calls are wrapped, a VAE or CLIP if it is another object."""
    from ..host.core.model import KEY

    wrapped = any(KEY in each for each in getattr(fitted, "wrappers", {"": [KEY]}).values())
    return "fitted to this device" if fitted is not before and wrapped else "nothing to change on this device"


def later_text(cls: Any) -> tuple[list[str], Callable[[str], None]]:
    """An empty list, which the caller fills with this node's lines, and a function for later nodes: it shows them and one more."""
    node_id, messages = cls.hidden.unique_id, list[str]()

    def tell(line: str) -> None:  # shows the caller's messages, then ``line``
        progress = NodeProgress(node_id)
        progress.lines += messages
        progress.notify(line)
        progress.show()

    return messages, tell


class FitAll(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return fit_schema(
            node_id="AnyGPUFit",
            inputs=[
                io.Model.Input("model", optional=True),
                io.Vae.Input("vae", optional=True),
                io.Clip.Input("clip", optional=True),
                io.Combo.Input("precision", options=list(PRECISIONS), default=AUTO, tooltip=f"Of the MODEL; VAE and CLIP are fitted as with auto. {PRECISION}"),
            ],
            outputs=[io.Model.Output(display_name="model"), io.Vae.Output(display_name="vae"), io.Clip.Output(display_name="clip")],
            hidden=[io.Hidden.unique_id, io.Hidden.prompt],
        )

    @classmethod
    def execute(cls, model: Any = None, vae: Any = None, clip: Any = None, precision: str = AUTO) -> io.NodeOutput:
        """Fit each part that is connected; an ExecutionBlocker stands for the others. A line per part is shown under the node,
        with one on samplers whose settings do not suit the model; later nodes add what they find out to their part's."""
        if model is None and precision != AUTO:
            expected, fix = "a MODEL, which alone it is for", f"Connect a MODEL, or choose {AUTO}."
            raise InputError(f"precision {precision} without a MODEL", expected=expected, fix=fix)
        node_id, lines, later = cls.hidden.unique_id, dict[str, list[str]](), dict[str, str]()

        def tell(name: str, text: str) -> None:  # called while a later node runs
            log.info("AnyGPU: %s: %s", name, text)
            later[name] = text
            progress = NodeProgress(node_id)
            progress.lines += ("; ".join((*each, *filter(None, [later.get(part)]))) for part, each in lines.items())
            progress.show()

        def fitted(name: str, part: Any, fit: Callable[[Any], Any]) -> Any:  # the output of one part
            if part is None:
                return core.missing(name, "AnyGPU Fit")
            result, decisions = fit(part)
            for decision in decisions:
                log.info("AnyGPU: %s: %s", name, decision)
            lines[name] = [f"{name}: {status_of(part, result)}", *(decision.brief for decision in decisions)]
            return result

        outputs = (
            fitted("model", model, lambda part: core_model.fit_model(part, precision, tell=partial(tell, "model"))),
            fitted("vae", vae, core_vae.fit_vae),
            fitted("clip", clip, lambda part: core_clip.fit_clip(part, tell=partial(tell, "clip"))),
        )
        lines |= {node: [str(error)] for node, error in recipes.advice(cls.hidden.prompt, node_id).items()}
        NodeProgress(node_id).finish("\n".join(map("; ".join, lines.values())))
        return io.NodeOutput(*outputs)


class FitModel(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return fit_schema(
            node_id="AnyGPUFitModel",
            inputs=[
                io.Model.Input("model"),
                io.Combo.Input("precision", options=list(PRECISIONS), default=AUTO, tooltip=PRECISION),
                io.Combo.Input("attention", options=list(ATTENTIONS), default=AUTO),
                io.Combo.Input("keep_latents", options=list(core_model.KEEP), default=AUTO, optional=True, advanced=True),
                io.Combo.Input("packed_layers", options=list(PACKED_PATHS), default=AUTO, optional=True, advanced=True),
            ],
            outputs=[io.Model.Output(display_name="model")],
            hidden=[io.Hidden.unique_id, io.Hidden.prompt],
        )

    @classmethod
    def execute(cls, model: Any, precision: str, attention: str, keep_latents: str = AUTO, packed_layers: str = AUTO) -> io.NodeOutput:
        messages, tell = later_text(cls)
        fitted, decisions = core_model.fit_model(model, precision, attention, keep_latents, packed_layers, tell=tell)
        decisions = (*decisions, *recipes.advice(cls.hidden.prompt, cls.hidden.unique_id).values())
        messages += map(str, decisions)
        return output_of(cls, model, fitted, decisions)


class FitVAE(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return fit_schema(
            node_id="AnyGPUFitVAE",
            inputs=[
                io.Vae.Input("vae"),
                io.Combo.Input("precision", options=list(core_vae.VAE_PRECISIONS), default=AUTO),
                io.Boolean.Input("causal_masks", default=True, optional=True, advanced=True),
                io.Combo.Input("keep_latents", options=list(core_model.KEEP), default=AUTO, optional=True, advanced=True),
            ],
            outputs=[io.Vae.Output(display_name="vae")],
        )

    @classmethod
    def execute(cls, vae: Any, precision: str, causal_masks: bool = True, keep_latents: str = AUTO) -> io.NodeOutput:
        return output_of(cls, vae, *core_vae.fit_vae(vae, precision, causal_masks, keep_latents))


class FitCLIP(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return fit_schema(
            node_id="AnyGPUFitCLIP",
            is_dev_only=True,  # AnyGPU Fit takes a CLIP alone too
            inputs=[
                io.Clip.Input("clip"),
                io.Combo.Input("precision", options=list(core_clip.CLIP_PRECISIONS), default=AUTO),
                io.Combo.Input("attention", options=list(ATTENTIONS), default=AUTO),
            ],
            outputs=[io.Clip.Output(display_name="clip")],
        )

    @classmethod
    def execute(cls, clip: Any, precision: str, attention: str) -> io.NodeOutput:
        messages, tell = later_text(cls)
        fitted, decisions = core_clip.fit_clip(clip, precision, attention, tell=tell)
        messages += map(str, decisions)
        return output_of(cls, clip, fitted, decisions)


class WatchDoctor(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="AnyGPUDoctor",
            inputs=[
                Pipeline.Input("pipeline", optional=True),
                io.Model.Input("model", optional=True),
                io.Vae.Input("vae", optional=True),
                io.Combo.Input("repair", options=list(doctors.CHOICES), default=doctors.OFFER),
            ],
            outputs=[Pipeline.Output(display_name="pipeline"), io.Model.Output(display_name="MODEL"), io.Vae.Output(display_name="VAE")],
        )

    @classmethod
    def execute(cls, pipeline: Any = None, model: Any = None, vae: Any = None, repair: str = doctors.OFFER) -> io.NodeOutput:
        """Hand each connected part on with a doctor that watches its runs; an ExecutionBlocker stands for the others."""
        if pipeline is None and model is None and vae is None:
            fix = "Connect an output of a load node."
            raise InputError("nothing connected to AnyGPU Doctor", expected="a pipeline, a MODEL or a VAE", fix=fix)
        node_id, store = cls.hidden.unique_id, RepairStore(folders.state_folder())
        lines: list[str] = []

        def doctor(name: str) -> doctors.Doctor:  # of one part; ``lines`` get its saved repairs
            made = doctors.Doctor(name, store, repair, core.teller(node_id))
            lines.extend(f"saved repair: {each}" for each in made.repairs)
            if made.forgot:
                lines.append("saved repairs are deleted")
            return made

        if pipeline is not None:
            pipeline = replace(pipeline, run=replace(pipeline.run, doctor=doctor(str(pipeline.model.source))))
        if model is not None:
            model = core.watched_model(model, doctor(name_of(model)), node_id)
        if vae is not None:
            vae = core.watched_vae(vae, doctor(name_of(vae.patcher)))
        NodeProgress(node_id).finish("\n".join(dict.fromkeys(("watching", *lines))))
        outputs = {"pipeline": pipeline, "model": model, "vae": vae}
        return io.NodeOutput(*(core.missing(name) if part is None else part for name, part in outputs.items()))
