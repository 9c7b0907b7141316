"""The nodes that hand jobs to other machines and bring back what they made."""

from __future__ import annotations

import importlib.util
from functools import partial
from typing import Any

from ..host import farm, folders, saved
from ..host.api import io
from ..host.progress import NodeProgress, PaintProgress
from ..pipelines.base import FramePackSettings
from ..pipelines.records.job import load_inputs
from ..pipelines.records.job_lists import Batch, files_in, prompts_in, queue_jobs, seeds_in
from ..pipelines.records.receipts import settings_of
from .inputs import CATEGORY, schema, size_inputs
from .tools import Uncached

farm_schema = partial(schema, category=f"{CATEGORY}/farm")
NO_RAY = importlib.util.find_spec("ray") is None  # then the menu needs none of these nodes
Jobs = io.Custom("ANYGPU_JOBS")


def results(jobs: Any, collected: Any, progress: NodeProgress) -> io.NodeOutput:
    """Videos, images and report of ``collected``, the report also shown; InputError if jobs failed and none is done."""
    farm.require_some(jobs, collected)
    report = farm.report_of(jobs, collected, jobs.folder.workers())
    progress.lines.clear()  # the states of workers while it waited
    progress.finish(report)
    return io.NodeOutput(farm.videos_of(collected), farm.images_of(collected), report)


def result_outputs() -> list[Any]:  # of both nodes that return results
    return [
        io.Video.Output(display_name="videos", is_output_list=True),
        io.Image.Output(display_name="images", is_output_list=True),
        io.String.Output(display_name="report"),
    ]


class QueueJobs(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return farm_schema(
            node_id="AnyGPUQueueJobs",
            is_dev_only=NO_RAY,
            inputs=[
                io.Combo.Input("folder", options=farm.folder_choices()),
                io.String.Input("name", default="jobs"),
                io.Combo.Input("model", options=folders.model_choices()),
                io.String.Input("prompts", multiline=True, default=""),
                io.String.Input("seeds", default="0"),
                *size_inputs(),
                io.Int.Input("frames", default=0, min=0, max=4096),
                io.String.Input("negative", default="", optional=True, advanced=True),
                io.Combo.Input("pictures", options=farm.picture_folders(), default=farm.NONE, optional=True, advanced=True),
                io.Int.Input("steps", default=0, min=0, max=1000, optional=True, advanced=True),
                io.Float.Input("cfg", default=0.0, min=0.0, max=30.0, step=0.1, optional=True, advanced=True),
                io.Float.Input("clip_seconds", default=0.0, min=0.0, max=120.0, step=0.1, optional=True, advanced=True),
                io.String.Input("precision", default="auto", optional=True, advanced=True),
                io.String.Input("weights", default="auto", optional=True, advanced=True),
                io.Combo.Input("meshes", options=farm.picture_folders(farm.MESH_FILES), default=farm.NONE, optional=True, advanced=True),
                io.Combo.Input("paint_model", options=[*folders.paint_models(), *folders.base_models()] or [folders.NO_PAINT_MODEL], optional=True, advanced=True),
                io.Combo.Input("delight", options=[farm.NONE, *folders.paint_models()], default=farm.NONE, optional=True, advanced=True),
                io.Combo.Input("image_encoder", options=[folders.AUTO, *folders.paint_providers()], default="auto", optional=True, advanced=True),
                io.Combo.Input("like", options=[farm.NONE, *saved.choices(saved.SIGNED)], default=farm.NONE, optional=True, advanced=True),
                io.Combo.Input("adapter", options=[farm.NONE, *folders.adapters()], default=farm.NONE, optional=True, advanced=True),
            ],
            outputs=[Jobs.Output(display_name="jobs"), io.Int.Output(display_name="count")],
            is_output_node=True,
        )

    validate_inputs = classmethod(  # a name that is gone is explained by the run
        lambda cls, folder, model, pictures="", meshes="", paint_model="", delight="", image_encoder="", like="", adapter="": True
    )

    @classmethod
    def fingerprint_inputs(cls, like: str = "", pictures: str = "", meshes: str = farm.NONE, **names: Any) -> Any:
        """A value that changes with the receipt, pictures and meshes that jobs are made of, and with the files of their models."""
        painting = folders.base_models, folders.paint_models, folders.paint_providers, folders.adapters
        tables = (folders.models,) if meshes == farm.NONE else painting
        paths = {name: path for table in tables for name, path in table().items()}
        return saved.stamp(saved.SIGNED, like), farm.folder_stamp(pictures, meshes), folders.stamp(*map(paths.get, names.values()))

    @classmethod
    def execute(
        cls, folder: str, name: str, model: str, prompts: str, seeds: str, width: int = 0, height: int = 0, frames: int = 0,
        negative: str = "", pictures: str = farm.NONE, steps: int = 0, cfg: float = 0.0, clip_seconds: float = 0.0,
        precision: str = "auto", weights: str = "auto", meshes: str = farm.NONE, paint_model: str = "",
        delight: str = farm.NONE, image_encoder: str = "auto", like: str = farm.NONE, adapter: str = farm.NONE,
    ) -> io.NodeOutput:
        """Write the job file: paintings of ``meshes`` if a folder of them is chosen, else videos; the jobs, and their number."""
        progress, target = NodeProgress(cls.hidden.unique_id), farm.job_folder(folder)
        if meshes != farm.NONE:
            models = farm.PaintModels(paint_model, delight, image_encoder, adapter, prompts=prompts, negative=negative)
            return cls.queued(progress, farm.queue_meshes(
                target, name.strip(), models, meshes, pictures, seeds_in(seeds), steps, progress.check,
                precision=precision, weights=weights,
            ))
        path = folders.model_folder(model)
        batch = Batch(
            prompts=prompts_in(prompts), seeds=seeds_in(seeds), negative=negative,
            pictures=[] if pictures == farm.NONE else files_in(farm.input_folder(pictures)),
            settings={"width": width, "height": height, "frames": frames, "steps": steps, "cfg": cfg},
            load=load_inputs({"precision": precision, "weights": weights}),
            framepack=FramePackSettings(clip_seconds) if clip_seconds else None,
            like=None if like == farm.NONE else settings_of(saved.file_named(saved.SIGNED, like)),
        )
        title = "" if ":" in model else model  # "demo: ..." is no folder's name
        return cls.queued(progress, queue_jobs(target, name.strip(), path, batch, title, folders.state_folder(), progress.check))

    @classmethod
    def queued(cls, progress: NodeProgress, jobs: Any) -> io.NodeOutput:
        progress.finish(f"{len(jobs.keys)} jobs in {jobs.name}.jsonl, {farm.collect(jobs, False, progress).waiting} not done yet")
        return io.NodeOutput(jobs, len(jobs.keys))


class Collect(Uncached):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return farm_schema(
            node_id="AnyGPUCollect",
            is_dev_only=True,
            inputs=[
                io.Combo.Input("folder", options=farm.folder_choices()),
                io.String.Input("name", default=""),
                io.Boolean.Input("wait", default=True),
                Jobs.Input("jobs", optional=True),
            ],
            outputs=result_outputs(),
        )

    validate_inputs = classmethod(lambda cls, folder: True)  # a name that is gone is explained by the run

    @classmethod
    def execute(cls, folder: str, name: str, wait: bool, jobs: Any = None) -> io.NodeOutput:
        progress = NodeProgress(cls.hidden.unique_id)
        jobs = jobs or farm.jobs_named(farm.job_folder(folder), name.strip(), progress.check)
        return results(jobs, farm.collect(jobs, wait, progress), progress)


class Farm(Uncached):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return farm_schema(
            node_id="AnyGPUFarm",
            is_dev_only=NO_RAY,
            inputs=[Jobs.Input("jobs"), io.String.Input("address", default="auto")],
            outputs=result_outputs(),
        )

    @classmethod
    def execute(cls, jobs: Any, address: str) -> io.NodeOutput:
        progress = PaintProgress(cls.hidden.unique_id)  # whose previews are pictures
        return results(jobs, farm.render_at(address.strip(), jobs, progress), progress)
