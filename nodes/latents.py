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


def prefix_input(default: str) -> Any:
    return io.String.Input(
        "filename_prefix", default=default,
        tooltip="Folder and file name in ComfyUI's output folder. A number is added, so nothing is overwritten.",
    )


def file_input(kind: str) -> Any:
    return io.Combo.Input(
        "file", options=saved.choices(kind),
        tooltip="A file in ComfyUI's input or output folder. Press R after adding one.",
    )


def not_finite_input() -> Any:
    return io.Combo.Input(
        "not_finite", options=list(NOT_FINITE), default="refuse", optional=True, advanced=True,
        tooltip="What to do about NaN and infinity. refuse: stop with an error that says how many there are. clamp: "
                "NaN becomes 0, infinity the largest finite value, and the node says how many.",
    )


class Listed(io.ComfyNode):
    kind = ""

    validate_inputs = classmethod(lambda cls, file: True)  # a name that is gone is explained by the run
    fingerprint_inputs = classmethod(lambda cls, file, **_: saved.stamp(cls.kind, file))


class SaveLatent(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return files_schema(
            node_id="AnyGPUSaveLatent",
            display_name="AnyGPU Save Latent",
            is_dev_only=True,
            description="Saves video latents as safetensors, bit for bit, with everything decoding needs: family, "
                        "size, frames, fps, seed, prompt, generator state, sections. Drop the file onto ComfyUI to "
                        "open its workflow.",
            search_aliases=["export latent", "save latents", "safetensors"],
            inputs=[
                io.Latent.Input("latent", tooltip="Video latents, from AnyGPU Sample or from core nodes."),
                prefix_input("latents/AnyGPU"),
                not_finite_input(),
            ],
            outputs=[io.Latent.Output(display_name="latent")],
            hidden=[io.Hidden.unique_id, io.Hidden.prompt, io.Hidden.extra_pnginfo],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, latent: Any, filename_prefix: str, not_finite: str = "refuse") -> io.NodeOutput:
        progress, origin = NodeProgress(cls.hidden.unique_id), saved.origin(cls.hidden.prompt, cls.hidden.extra_pnginfo)
        paths = [
            latent_store.save_latent(saved.new_path(filename_prefix), video, progress.notify, not_finite, origin)
            for video in batch.videos_of(latent)
        ]
        progress.finish("\n".join(map(saved.shown, paths)))
        return io.NodeOutput(latent, ui={"latents": list(map(saved.ui_record, paths))})


class LoadLatent(Listed):
    kind = "latent"

    @classmethod
    def define_schema(cls) -> io.Schema:
        return files_schema(
            node_id="AnyGPULoadLatent",
            display_name="AnyGPU Load Latent",
            is_dev_only=True,
            description="Reads latents written by AnyGPU Save Latent, core's Save Latent or Musubi Tuner, and "
                        "recognises which from the file.",
            search_aliases=["import latent", "load latents", "musubi"],
            inputs=[
                file_input("latent"),
                io.Combo.Input(
                    "dtype", options=list(latent_store.DTYPES), default="float32", optional=True, advanced=True,
                    tooltip="float32: what AnyGPU's and core's nodes compute with. as in file: not converted.",
                ),
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
            display_name="AnyGPU Recover Latents",
            description="The latents of every sampling are saved automatically after its last step, so a failed "
                        "decode, a cancel or a crash costs nothing. This node lists them, newest first, and loads one.",
            search_aliases=["recover", "restore latents", "crash", "lost video"],
            inputs=[
                io.Combo.Input(
                    "kept", options=recovery.choices(), default=recovery.NEWEST,
                    tooltip="newest, or a particular sampling, listed by date, family and seed. Press R to refresh "
                            "the list. Once they exceed 4 GB in total, the oldest are deleted.",
                ),
                Pipeline.Input(
                    "pipeline", optional=True,
                    tooltip="With it, newest is the newest sampling of its model family; without it, the newest of all.",
                ),
            ],
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
            display_name="AnyGPU Save Prompt",
            is_dev_only=True,
            description="Saves an encoded prompt, so that a machine that is too small for the text encoder can "
                        "sample it.",
            search_aliases=["save embeddings", "save conditioning", "text encoder"],
            inputs=[
                Prompt.Input("prompt", tooltip="From AnyGPU Encode Prompt."),
                prefix_input("prompts/AnyGPU"),
            ],
            outputs=[Prompt.Output(display_name="prompt")],
            hidden=[io.Hidden.unique_id, io.Hidden.prompt, io.Hidden.extra_pnginfo],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, prompt: Any, filename_prefix: str) -> io.NodeOutput:
        progress, origin = NodeProgress(cls.hidden.unique_id), saved.origin(cls.hidden.prompt, cls.hidden.extra_pnginfo)
        path = prompt_files.save_prompt(saved.new_path(filename_prefix), prompt, origin)
        progress.finish(saved.shown(path))
        return io.NodeOutput(prompt)


class LoadPrompt(Listed):
    kind = "prompt"

    @classmethod
    def define_schema(cls) -> io.Schema:
        return files_schema(
            node_id="AnyGPULoadPrompt",
            display_name="AnyGPU Load Prompt",
            is_dev_only=True,
            description="Reads a prompt written by AnyGPU Save Prompt or Musubi Tuner. You need no text encoder, not "
                        "even its files.",
            search_aliases=["load embeddings", "load conditioning", "musubi", "text encoder"],
            inputs=[
                file_input("prompt"),
            ],
            outputs=[Prompt.Output(display_name="prompt")],
        )

    @classmethod
    def execute(cls, file: str) -> io.NodeOutput:
        progress = NodeProgress(cls.hidden.unique_id)
        prompt = prompt_files.load_prompt(saved.file_named("prompt", file), progress.notify)
        progress.finish(f"{prompt!r}"[1:-1])
        return io.NodeOutput(prompt)


class SaveMusubiCache(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return files_schema(
            node_id="AnyGPUSaveMusubiCache",
            display_name="AnyGPU Save Musubi Cache",
            is_dev_only=True,
            description="Writes the latents and the prompt of one training item as Musubi Tuner caches, for "
                        "HunyuanVideo, HunyuanVideo 1.5 and FramePack. AnyGPU Load Latent and AnyGPU Load Prompt "
                        "read them.",
            search_aliases=["musubi", "training cache", "cache latents"],
            inputs=[
                io.String.Input(
                    "name", default="musubi/clip_01",
                    tooltip="Folder in ComfyUI's output folder, and name of the item. An existing cache of this name "
                            "is replaced.",
                ),
                io.Latent.Input("latent", optional=True, tooltip="The item's latents."),
                Prompt.Input("prompt", optional=True, tooltip="The item's encoded caption. Its negative prompt is not saved."),
                io.String.Input("caption", default="", optional=True, tooltip="The caption. Leave it empty to use the prompt's own text."),
                io.Combo.Input(
                    "dtype", options=list(musubi.DTYPES), default="as loaded", optional=True, advanced=True,
                    tooltip="as loaded: the dtype of a loaded cache, otherwise float32. Musubi Tuner itself writes "
                            "the dtype of its VAE.",
                ),
                Image.Input(
                    "image", optional=True,
                    tooltip="FramePack: the first frame, from AnyGPU Encode Image. The latents of FramePack or "
                            "HunyuanVideo are then cut into sections, with one cache each.",
                ),
                io.Int.Input(
                    "window", default=9, min=1, max=33, optional=True, advanced=True,
                    tooltip="FramePack: latent frames per section. The models were trained with 9.",
                ),
                io.Combo.Input(
                    "order", options=list(SECTION_ORDERS), default=SECTION_ORDERS[0], optional=True, advanced=True,
                    tooltip="FramePack: what a section sees. inverted_anti_drifting: the frames after it, for "
                            "FramePack I2V. vanilla: the frames before it, for F1.",
                ),
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
        folder, item = saved.target_folder(name)
        cut = None if image is None else musubi.Cut(image, window, order)
        paths = musubi.save_item(folder, item, latent, prompt, caption, dtype, cut, progress.notify)
        progress.finish("\n".join(map(saved.shown, paths)))
        return io.NodeOutput()


class UpscaleLatents(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="AnyGPUUpscaleLatents",
            display_name="AnyGPU Upscale Latents",
            is_dev_only=True,
            description="Doubles width and height of LTX-Video latents with its latent upscaler, and AnyGPU Sample then "
                        "refines them in the model's published second pass; or doubles the frame rate. Brings "
                        "HunyuanVideo 1.5 latents to the size of its super-resolution.",
            search_aliases=["latent upscaler", "second pass", "multi scale", "ltxv spatial upscaler", "super resolution"],
            inputs=[
                Pipeline.Input(
                    "pipeline",
                    tooltip="The LTX-Video pipeline that made the latents, or HunyuanVideo 1.5's super-resolution.",
                ),
                io.Latent.Input(
                    "latent",
                    tooltip="From AnyGPU Sample: LTX-Video at two thirds of the final width and height, HunyuanVideo "
                            "1.5 at 480p or 720p.",
                ),
                io.Combo.Input(
                    "upscaler", options=list(folders.upscalers()) or [folders.NO_UPSCALER],
                    tooltip="A file in ComfyUI/models/latent_upscale_models, such as "
                            "ltxv-spatial-upscaler-0.9.8.safetensors, ltxv-temporal-upscaler-0.9.8.safetensors for "
                            "twice the frames, or hunyuanvideo15_latent_upsampler_1080p.safetensors. Press R after "
                            "adding one.",
                ),
            ],
            outputs=[io.Latent.Output(display_name="latent")],
        )

    validate_inputs = classmethod(lambda cls, upscaler: True)  # a name that is gone is explained by the run

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
        return io.NodeOutput(batch.joined(upscaled))


class Replay(Listed):
    kind = saved.SIGNED

    @classmethod
    def define_schema(cls) -> io.Schema:
        return files_schema(
            node_id="AnyGPUReplay",
            display_name="AnyGPU Replay",
            is_dev_only=True,
            description="Renders the video in a file again, from the receipt that AnyGPU writes into videos and latents, or "
                        "paints the texture of a GLB from AnyGPU Texture Mesh: same model, prompts, pictures and settings. Says "
                        "whether latents or texture are the same bit for bit, and if not, what differs between the machines.",
            search_aliases=["reproduce", "receipt", "same video again", "metadata", "repeat"],
            inputs=[
                io.Combo.Input(
                    "file", options=saved.choices(saved.SIGNED),
                    tooltip="A video, latents or a textured GLB that AnyGPU made, in ComfyUI's input or output folder. Press R after adding one.",
                ),
            ],
            outputs=[
                io.Latent.Output(display_name="latent"),
                io.Video.Output(display_name="video"),
                io.String.Output(display_name="report"),
                io.File3DGLB.Output(display_name="model_3d"),
            ],
        )

    @classmethod
    def execute(cls, file: str) -> io.NodeOutput:
        progress, path = NodeProgress(cls.hidden.unique_id), saved.file_named(cls.kind, file)
        if path.suffix == saved.GLB:
            return cls.painted(path, PaintProgress(cls.hidden.unique_id))
        made = replay(path, machine_of(path.parent), progress)
        latents, frames = made.rendered.latents, made.rendered.frames
        rate = Fraction(latents.fps).limit_denominator(1001)
        progress.finish(made.text())
        video = saved.video(frames, rate, made.rendered.receipt)
        shown = preview.clips([frames], float(rate), cls)
        return io.NodeOutput(latent_format.to_core(latents), video, made.text(), ExecutionBlocker(None), ui=shown)

    @classmethod
    def painted(cls, path: Path, progress: PaintProgress) -> io.NodeOutput:
        from ..paint.jobs import replay as paint_again

        made = paint_again(path, machine_of(path.parent), progress)
        progress.finish(made.text())
        nothing = ExecutionBlocker(None)
        return io.NodeOutput(nothing, nothing, made.text(), saved.SignedMesh(made.rendered.glb))
