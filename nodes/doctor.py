"""The node that finds out why a video is black."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..compat import doctor as doctors
from ..compat.errors import InputError
from ..compat.repairs import RepairStore
from ..host import folders
from ..host.api import io
from ..host.core import doctor as core
from ..host.core.weights import name_of
from ..host.progress import NodeProgress
from .inputs import Pipeline, schema


class WatchDoctor(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="AnyGPUDoctor",
            display_name="AnyGPU Doctor",
            description="Watches sampling and decoding of any model, core's too. If a result is NaN, infinite, one "
                        "colour or still noise, it names the step, block and layer, tries repairs on that step, and "
                        "can keep what helps. Without a fault it costs one check per step.",
            search_aliases=["black video", "black image", "nan", "inf", "debug", "noise", "overflow", "repair", "fp16"],
            inputs=[
                Pipeline.Input("pipeline", optional=True, tooltip="From a load node of AnyGPU, for AnyGPU Sample."),
                io.Model.Input("model", optional=True, tooltip="From any loader, for core's samplers."),
                io.Vae.Input("vae", optional=True, tooltip="From any loader, for core's VAE Decode."),
                io.Combo.Input(
                    "repair", options=list(doctors.CHOICES), default=doctors.OFFER,
                    tooltip="offer: a fault stops the run and names the layer and the repair. keep: goes on with the "
                            "repair, and uses it in later runs of this model too. forget: drops the repair saved for "
                            "this model.",
                ),
            ],
            outputs=[
                Pipeline.Output(display_name="pipeline"),
                io.Model.Output(display_name="MODEL"),
                io.Vae.Output(display_name="VAE"),
            ],
        )

    @classmethod
    def execute(
        cls, pipeline: Any = None, model: Any = None, vae: Any = None, repair: str = doctors.OFFER
    ) -> io.NodeOutput:
        if pipeline is None and model is None and vae is None:
            raise InputError(
                "nothing connected to AnyGPU Doctor",
                expected="a pipeline, a MODEL or a VAE",
                fix="Connect an output of a load node.",
            )
        node_id, store = cls.hidden.unique_id, RepairStore(folders.state_folder())
        lines: list[str] = []

        def doctor(name: str) -> doctors.Doctor:
            made = doctors.Doctor(name, store, repair, core.teller(node_id))
            lines.extend(f"saved repair: {one}" for one in made.repairs)
            lines.extend(["saved repairs are deleted"] if made.forgot else [])
            return made

        outputs = (
            core.missing("pipeline") if pipeline is None else replace(pipeline, run=replace(pipeline.run, doctor=doctor(str(pipeline.model.source)))),
            core.missing("model") if model is None else core.watched_model(model, doctor(name_of(model)), node_id),
            core.missing("vae") if vae is None else core.watched_vae(vae, doctor(name_of(vae.patcher))),
        )
        NodeProgress(node_id).finish("\n".join(dict.fromkeys(("watching", *lines))))
        return io.NodeOutput(*outputs)
