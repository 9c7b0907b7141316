"""The nodes beside a run: what this machine can do, what a run will need, and a published model fetched."""

from __future__ import annotations

from typing import Any

from ..compat.device.facts import facts_for
from ..compat.memory.offloader import MODES
from ..host import folders, memory_manager
from ..host.api import io, ui
from ..host.progress import NodeProgress
from ..pipelines import report as reports
from ..pipelines.demo.stand_in import own_inputs
from ..pipelines.files import catalogue
from ..pipelines.files import download as downloads
from ..pipelines.forecast import page as memory_plan
from ..pipelines.forecast.memory import Forecast
from ..pipelines.forecast.times import room_now, times_of
from .inputs import Paint, Pipeline, schema, size_inputs


class Uncached(io.ComfyNode):
    """A node that runs each time: what it looks at is not an input."""

    fingerprint_inputs = classmethod(lambda cls, **_: float("nan"))


class HardwareReport(Uncached):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="AnyGPUHardwareReport",
            is_dev_only=True,
            inputs=[
                io.Boolean.Input("check", default=False),
                io.Boolean.Input("ask_again", default=False, optional=True, advanced=True),
            ],
            outputs=[io.String.Output(display_name="text"), io.Image.Output(display_name="table")],
            is_output_node=True,
            not_idempotent=True,
        )

    @classmethod
    def execute(cls, check: bool, ask_again: bool = False) -> io.NodeOutput:
        progress = NodeProgress(cls.hidden.unique_id)
        device, state = memory_manager.compute_device(), folders.state_folder()
        report = reports.hardware_report(device, state, ask_again)
        report = reports.checked(report, device, state, progress) if check else report
        progress.finish(report.summary())
        table = reports.drawn(report)
        return io.NodeOutput(report.text(), table, ui=ui.PreviewImage(table, cls=cls))


def paint_plan(pipeline: Any, pixels: int, views: int, guided: bool) -> tuple[str, Any]:
    """Text and picture (IMAGE) of a paint pipeline's forecast. 0 ``pixels`` or ``views``: as trained; not ``guided``: its own guidance."""
    from ..paint import forecast

    run, room = forecast.planned_run(pipeline, pixels, views, guided=int(guided) or None), room_now(pipeline)
    needs = (Forecast(mode, forecast.paint_needs(pipeline, run, mode, room)) for mode in MODES)
    title = f"{reports.title_of(pipeline)} {pipeline.variant}, {run.views} view{'s' * (run.views > 1)} of {run.size} pixels"
    return memory_plan.shown(pipeline, title, ", with guidance" * (run.rows > 1), tuple(needs), times_of(pipeline, run, MODES, room))


class MemoryPlan(Uncached):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="AnyGPUMemoryPlan",
            is_dev_only=True,
            inputs=[
                io.MultiType.Input("pipeline", types=[Pipeline, Paint]),
                *size_inputs(),
                io.Int.Input("frames", default=0, min=0, max=4097),
                io.Boolean.Input("guided", default=False, optional=True),
            ],
            outputs=[io.String.Output(display_name="text"), io.Image.Output(display_name="bars")],
            is_output_node=True,
            not_idempotent=True,
        )

    @classmethod
    def execute(cls, pipeline: Any, width: int, height: int, frames: int, guided: bool = False) -> io.NodeOutput:
        from ..paint.loading import PaintPipeline

        progress = NodeProgress(cls.hidden.unique_id, pipeline.family)
        if isinstance(pipeline, PaintPipeline):
            text, bars = paint_plan(pipeline, width, frames, guided)  # ``frames`` counts its views
        else:
            sizes = own_inputs(pipeline, {"width": width, "height": height, "frames": frames}, progress.drawn)
            text, bars = memory_plan.memory_plan(pipeline, memory_plan.planned_size(pipeline, **sizes, guided=guided))
        progress.finish(text)
        return io.NodeOutput(text, bars, ui=ui.PreviewImage(bars, cls=cls))


class DownloadModel(Uncached):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="AnyGPUDownloadModel",
            is_output_node=True,
            inputs=[
                io.Combo.Input("model", options=list(catalogue.every_offer())),
                io.Combo.Input("download", options=list(downloads.CHOICES), default="no"),
            ],
            outputs=[io.String.Output(display_name="folder", tooltip="Where the model is. Press R to see it in AnyGPU Load Pipeline.")],
        )

    @classmethod
    def execute(cls, model: str, download: str) -> io.NodeOutput:
        progress, roots, card = NodeProgress(cls.hidden.unique_id), folders.model_roots(), memory_manager.compute_device()
        total = 0 if card.type == "cpu" else facts_for(card).total_bytes
        lines = downloads.fetched(model, download, roots, progress, card_bytes=total)
        for line in lines[1:]:
            progress.notify(line)
        progress.finish(lines[0])
        return io.NodeOutput(str(catalogue.folder_of(catalogue.offer_of(model).downloads[0], roots)))
