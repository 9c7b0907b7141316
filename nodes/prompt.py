"""The nodes that encode prompts, pictures and clips."""

from __future__ import annotations

from typing import Any

from ..host import core_models
from ..host.api import io
from ..host.progress import NodeProgress
from ..pipelines import stages
from ..pipelines.base import ImageRequest, PromptRequest
from ..pipelines.demo.stand_in import own_inputs
from ..pipelines.family import FITS
from ..pipelines.latents import convert as latent_format
from .inputs import SEED_LIMIT, Image, Pipeline, Prompt, schema, size_inputs


class EncodePrompt(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="AnyGPUEncodePrompt",
            inputs=[
                Pipeline.Input("pipeline"),
                io.String.Input("text", multiline=True, dynamic_prompts=True),
                io.String.Input("negative", multiline=True, dynamic_prompts=True, default=""),
                io.String.Input("section_prompts", multiline=True, default="", optional=True, advanced=True),
                io.Image.Input("image", optional=True),
                io.Int.Input("max_tokens", default=0, min=0, max=1024, optional=True, advanced=True),
                io.String.Input("template", multiline=True, default="", optional=True, advanced=True),
                io.Int.Input("template_crop", default=-1, min=-1, max=1024, optional=True, advanced=True),
            ],
            outputs=[
                Prompt.Output(display_name="prompt"),
                io.Conditioning.Output(display_name="positive", tooltip="The prompt for core's samplers."),
                io.Conditioning.Output(display_name="negative", tooltip="The negative prompt for core's samplers."),
            ],
        )

    @classmethod
    def execute(cls, pipeline: Any, section_prompts: str = "", **inputs: Any) -> io.NodeOutput:
        progress = NodeProgress(cls.hidden.unique_id)
        sections = tuple(line.strip() for line in section_prompts.splitlines() if line.strip())
        inputs = own_inputs(pipeline, {**inputs, "sections": sections}, progress.drawn)
        prompt = stages.encode_prompt(pipeline, PromptRequest(**inputs), progress)
        progress.finish(prompt.described(pipeline.spec.title))
        return io.NodeOutput(prompt, *latent_format.conditionings(prompt))


class ImageConditioning(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="AnyGPUImageConditioning",
            is_dev_only=True,
            inputs=[io.Conditioning.Input("positive"), io.Conditioning.Input("negative"), Image.Input("image")],
            outputs=[io.Conditioning.Output(display_name="positive"), io.Conditioning.Output(display_name="negative")],
            hidden=[],
        )

    @classmethod
    def execute(cls, positive: Any, negative: Any, image: Any) -> io.NodeOutput:
        return io.NodeOutput(core_models.pictured(positive, image), core_models.pictured(negative, image))


class EncodeImage(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="AnyGPUEncodeImage",
            inputs=[
                Pipeline.Input("pipeline"),
                io.Image.Input("image"),
                *size_inputs(),
                io.Combo.Input("fit", options=list(FITS), default=FITS[0]),
                io.Int.Input("frame", default=0, min=-1, max=4096, optional=True),
                io.Float.Input("strength", default=1.0, min=0.0, max=1.0, step=0.01, optional=True),
                Image.Input("previous", optional=True),
                io.ClipVisionOutput.Input("clip_vision_output", optional=True),
                io.Boolean.Input("control", default=False, optional=True, advanced=True),
                io.Boolean.Input("prepare", default=True, optional=True, advanced=True),
                io.Latent.Input("latent", optional=True),
            ],
            outputs=[Image.Output(display_name="image"), io.Int.Output(display_name="width"), io.Int.Output(display_name="height")],
        )

    @classmethod
    def execute(cls, pipeline: Any, image: Any, fit: str, clip_vision_output: Any = None, latent: Any = None, **settings: Any) -> io.NodeOutput:
        progress = NodeProgress(cls.hidden.unique_id)
        latents = None if latent is None else latent_format.from_core(pipeline, latent, progress.notify)
        vision = None if clip_vision_output is None else clip_vision_output.last_hidden_state
        settings = own_inputs(pipeline, {**settings, "image": image, "fit": fit}, progress.drawn)
        image, fit = settings.pop("image"), settings.pop("fit")
        asked = settings["width"], settings["height"]
        final_size = asked if latent is not None and all(asked) else ()  # then frames have the size of the latents
        request = ImageRequest(image, vision=vision, final_size=final_size, **settings)
        condition = stages.encode_image(pipeline, request, fit, progress, latents)
        progress.finish(f"{condition.width}x{condition.height}")
        return io.NodeOutput(condition, condition.width, condition.height)


class EncodeVideo(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="AnyGPUEncodeVideo",
            inputs=[
                Pipeline.Input("pipeline"),
                io.Image.Input("images"),
                *size_inputs(),
                io.Combo.Input("fit", options=list(FITS), default="crop"),
                io.Int.Input("seed", default=0, min=0, max=SEED_LIMIT),
            ],
            outputs=[io.Latent.Output(display_name="latent")],
        )

    @classmethod
    def execute(cls, pipeline: Any, images: Any, width: int, height: int, fit: str, seed: int) -> io.NodeOutput:
        progress = NodeProgress(cls.hidden.unique_id, pipeline.family)
        chosen = {"images": images, "width": width, "height": height, "fit": fit}
        chosen = own_inputs(pipeline, chosen, progress.drawn)
        images = chosen.pop("images")
        latents = stages.encode_video(pipeline, images, **chosen, seed=seed, progress=progress)
        progress.finish(f"{latents.width}x{latents.height}, {latents.frames} frames")
        return io.NodeOutput(latent_format.to_core(latents))
