"""The nodes that save, load and upscale latents and prompts, and the one that makes the video of a file again."""

from __future__ import annotations

from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

from ..compat.checkpoints.latents import NOT_FINITE
from ..host import folders, preview, recovery, saved
from ..host.api import ExecutionBlocker, io
from ..host.progress import NodeProgress, PaintProgress
from ..host.requests import machine_of
from ..pipelines import stages
from ..pipelines.base import SECTION_ORDERS
from ..pipelines.jobs import replay
from ..pipelines.latents import batch, musubi, prompt_files
from ..pipelines.latents import convert as latent_format
from ..pipelines.latents import store as latent_store
from ..pipelines.records.receipts import with_upscaler
from .inputs import CATEGORY, Image, Pipeline, Prompt, schema

files_schema = partial(schema, category=f"{CATEGORY}/files")


def not_finite_input() -> Any:
    return io.Combo.Input("not_finite", options=list(NOT_FINITE), default="refuse", optional=True, advanced=True)


class Listed(io.ComfyNode):
    kind = ""

    validate_inputs = classmethod(lambda cls, file: True)  # a name that is gone is explained by the run
    fingerprint_inputs = classmethod(lambda cls, file, **_: saved.stamp(cls.kind, file))


class SaveLatent(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return files_schema(
            node_id="AnyGPUSaveLatent",
            is_dev_only=True,
            inputs=[io.Latent.Input("latent"), io.String.Input("filename_prefix", default="latents/AnyGPU"), not_finite_input()],
            outputs=[io.Latent.Output(display_name="latent")],
            hidden=[io.Hidden.unique_id, io.Hidden.prompt, io.Hidden.extra_pnginfo],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, latent: Any, filename_prefix: str, not_finite: str = "refuse") -> io.NodeOutput:
        progress, origin = NodeProgress(cls.hidden.unique_id), saved.origin(cls.hidden.prompt, cls.hidden.extra_pnginfo)
        save, videos = latent_store.save_latent, batch.videos_of(latent)
        paths = [save(saved.new_path(filename_prefix), video, progress.notify, not_finite, origin) for video in videos]
        progress.finish("\n".join(map(saved.shown, paths)))
        return io.NodeOutput(latent, ui={"latents": list(map(saved.ui_record, paths))})


class LoadLatent(Listed):
    kind = "latent"

    @classmethod
    def define_schema(cls) -> io.Schema:
        return files_schema(
            node_id="AnyGPULoadLatent",
            is_dev_only=True,
            inputs=[
                io.Combo.Input("file", options=saved.choices("latent")),
                io.Combo.Input("dtype", options=list(latent_store.DTYPES), default="float32", optional=True, advanced=True),
                not_finite_input(),
            ],
            outputs=[io.Latent.Output(display_name="latent")],
        )

    @classmethod
    def execute(cls, file: str, dtype: str = "float32", not_finite: str = "refuse") -> io.NodeOutput:
        progress = NodeProgress(cls.hidden.unique_id)
        latent = latent_store.load_latent(saved.file_named("latent", file), progress.notify, not_finite, dtype)
        progress.finish(latent_store.described(latent))
        return io.NodeOutput(latent)


class RecoverLatents(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return files_schema(
            node_id="AnyGPURecoverLatents",
            inputs=[io.Combo.Input("kept", options=recovery.choices(), default=recovery.NEWEST), Pipeline.Input("pipeline", optional=True)],
            outputs=[io.Latent.Output(display_name="latent")],
        )

    validate_inputs = classmethod(lambda cls, kept: True)  # a name that is gone is explained by the run
    fingerprint_inputs = classmethod(lambda cls, kept, **_: recovery.stamp(kept))

    @classmethod
    def execute(cls, kept: str, pipeline: Any = None) -> io.NodeOutput:
        progress = NodeProgress(cls.hidden.unique_id)
        latent = recovery.load(kept, progress.notify, "" if pipeline is None else pipeline.family)
        progress.finish(latent_store.described(latent))
        return io.NodeOutput(latent)


class SavePrompt(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return files_schema(
            node_id="AnyGPUSavePrompt",
            is_dev_only=True,
            inputs=[Prompt.Input("prompt"), io.String.Input("filename_prefix", default="prompts/AnyGPU")],
            outputs=[Prompt.Output(display_name="prompt")],
            hidden=[io.Hidden.unique_id, io.Hidden.prompt, io.Hidden.extra_pnginfo],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, prompt: Any, filename_prefix: str) -> io.NodeOutput:
        progress, origin = NodeProgress(cls.hidden.unique_id), saved.origin(cls.hidden.prompt, cls.hidden.extra_pnginfo)
        progress.finish(saved.shown(prompt_files.save_prompt(saved.new_path(filename_prefix), prompt, origin)))
        return io.NodeOutput(prompt)


class LoadPrompt(Listed):
    kind = "prompt"

    @classmethod
    def define_schema(cls) -> io.Schema:
        return files_schema(
            node_id="AnyGPULoadPrompt",
            is_dev_only=True,
            inputs=[io.Combo.Input("file", options=saved.choices("prompt"))],
            outputs=[Prompt.Output(display_name="prompt")],
        )

    @classmethod
    def execute(cls, file: str) -> io.NodeOutput:
        progress = NodeProgress(cls.hidden.unique_id)
        prompt = prompt_files.load_prompt(saved.file_named("prompt", file), progress.notify)
        progress.finish(f"{prompt!r}"[1:-1])  # without the brackets of its repr
        return io.NodeOutput(prompt)


class SaveMusubiCache(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return files_schema(
            node_id="AnyGPUSaveMusubiCache",
            is_dev_only=True,
            inputs=[
                io.String.Input("name", default="musubi/clip_01"),
                io.Latent.Input("latent", optional=True),
                Prompt.Input("prompt", optional=True),
                io.String.Input("caption", default="", optional=True),
                io.Combo.Input("dtype", options=list(musubi.DTYPES), default="as loaded", optional=True, advanced=True),
                Image.Input("image", optional=True),
                io.Int.Input("window", default=9, min=1, max=33, optional=True, advanced=True),
                io.Combo.Input("order", options=list(SECTION_ORDERS), default=SECTION_ORDERS[0], optional=True, advanced=True),
            ],
            outputs=[],
            is_output_node=True,
        )

    @classmethod
    def execute(
        cls, name: str, latent: Any = None, prompt: Any = None, caption: str = "", dtype: str = "as loaded", image: Any = None,
        window: int = 9, order: str = SECTION_ORDERS[0],
    ) -> io.NodeOutput:
        progress = NodeProgress(cls.hidden.unique_id)
        folder, item = saved.target_folder(name, "name")
        cut = None if image is None else musubi.Cut(image, window, order)
        paths = musubi.save_item(folder, item, latent, prompt, caption, dtype, cut, progress.notify)
        progress.finish("\n".join(map(saved.shown, paths)))
        return io.NodeOutput()


class UpscaleLatents(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="AnyGPUUpscaleLatents",
            is_dev_only=True,
            inputs=[
                Pipeline.Input("pipeline"),
                io.Latent.Input("latent"),
                io.Combo.Input("upscaler", options=list(folders.upscalers()) or [folders.NO_UPSCALER]),
            ],
            outputs=[io.Latent.Output(display_name="latent")],
        )

    validate_inputs = classmethod(lambda cls, upscaler: True)  # a name that is gone is explained by the run
    fingerprint_inputs = classmethod(lambda cls, upscaler, **_: folders.stamp(folders.upscalers().get(upscaler)))

    @classmethod
    def execute(cls, pipeline: Any, latent: Any, upscaler: str) -> io.NodeOutput:
        progress = NodeProgress(cls.hidden.unique_id, pipeline.family)
        file, videos = folders.upscaler_file(upscaler), batch.videos_of(latent)
        upscaled = []
        for video, part in zip(videos, batch.parts_of(progress, len(videos)), strict=True):
            before = latent_format.from_core(pipeline, video, progress.notify)
            after = stages.upscale(pipeline, before, file, part)
            upscaled.append(with_upscaler(before, after, file, pipeline.model.request.state))
        one = upscaled[0]
        progress.finish(f"{one.width}x{one.height}, {one.frames} frames", batch.seeds_of(upscaled))
        mask = {batch.MASK: latent[batch.MASK]} if batch.MASK in latent else {}  # samplers resize it
        return io.NodeOutput(batch.joined(upscaled) | mask)


class Replay(Listed):
    kind = saved.SIGNED

    @classmethod
    def define_schema(cls) -> io.Schema:
        return files_schema(
            node_id="AnyGPUReplay",
            is_dev_only=True,
            inputs=[io.Combo.Input("file", options=saved.choices(saved.SIGNED))],
            outputs=[
                io.Latent.Output(display_name="latent"),
                io.Video.Output(display_name="video"),
                io.String.Output(display_name="report"),
                io.File3DGLB.Output(display_name="model_3d"),
            ],
        )

    @classmethod
    def execute(cls, file: str) -> io.NodeOutput:
        """Make the video, or from a GLB the texture, of a file again; an ExecutionBlocker stands for the other kind's outputs."""
        progress, path = NodeProgress(cls.hidden.unique_id), saved.file_named(cls.kind, file)
        if path.suffix.lower() == saved.GLB:
            return cls.painted(path, PaintProgress(cls.hidden.unique_id))
        made = replay(path, machine_of(path.parent), progress)
        latents, frames = made.rendered.latents, made.rendered.frames
        rate = Fraction(latents.fps).limit_denominator(1001)
        progress.finish(made.text())
        video = saved.video(frames, rate, made.rendered.receipt)
        shown = preview.clips([frames], float(rate), cls)
        return io.NodeOutput(latent_format.to_core(latents), video, made.text(), ExecutionBlocker(None), ui=shown)

    @classmethod
    def painted(cls, path: Path, progress: PaintProgress) -> io.NodeOutput:  # of a GLB: no latent, no video
        from ..paint.jobs import replay as paint_again

        made = paint_again(path, machine_of(path.parent), progress)
        progress.finish(made.text())
        nothing = ExecutionBlocker(None)
        return io.NodeOutput(nothing, nothing, made.text(), saved.SignedMesh(made.rendered.glb))
