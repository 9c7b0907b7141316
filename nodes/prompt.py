"""The nodes that encode prompts, pictures and clips."""

from __future__ import annotations

from typing import Any

from ..host import core_outputs
from ..host.api import io
from ..host.progress import NodeProgress
from ..pipelines import stages
from ..pipelines.base import ImageRequest, PromptRequest
from ..pipelines.family import FITS
from ..pipelines.latents import convert as latent_format
from .inputs import CATEGORY, DEFAULT, SEED_LIMIT, Image, Pipeline, Prompt, size_inputs


class EncodePrompt(io.ComfyNode):
    """Encode prompt and negative prompt."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="AnyGPUEncodePrompt",
            display_name="AnyGPU Encode Prompt",
            category=CATEGORY,
            description="Turns prompt and negative prompt into embeddings; afterwards no text encoder stays on the device.",
            search_aliases=["clip text encode", "text encode", "negative prompt", "t5", "llama"],
            inputs=[
                Pipeline.Input("pipeline", tooltip="From AnyGPU Load Pipeline."),
                io.String.Input("text", multiline=True, dynamic_prompts=True, tooltip="What the video shows. Required."),
                io.String.Input(
                    "negative", multiline=True, dynamic_prompts=True, default="",
                    tooltip="What the video should not show. Acts only where cfg is above 1.",
                ),
                io.String.Input(
                    "section_prompts", multiline=True, default="", optional=True, advanced=True,
                    tooltip="FramePack: one prompt per line for the sections after the first, in playing order. "
                    "Sections without a line keep the prompt above.",
                ),
                io.Image.Input(
                    "image", optional=True,
                    tooltip="HunyuanVideo image-to-video: its text encoder also looks at the picture.",
                ),
                io.Int.Input(
                    "max_tokens", default=0, min=0, max=1024, optional=True, advanced=True,
                    tooltip="Longest prompt in tokens; a longer one is refused with what would be lost. " + DEFAULT,
                ),
                io.String.Input(
                    "template", multiline=True, default="", optional=True, advanced=True,
                    tooltip="HunyuanVideo, HunyuanVideo 1.5, FramePack: the text around the prompt, with {} where it "
                    "goes. Empty takes the model's own.",
                ),
                io.Int.Input(
                    "template_crop", default=-1, min=-1, max=1024, optional=True, advanced=True,
                    tooltip="Leading template tokens to cut off. -1 counts them.",
                ),
            ],
            outputs=[
                Prompt.Output(display_name="prompt"),
                io.Conditioning.Output(display_name="positive", tooltip="The prompt for core's samplers."),
                io.Conditioning.Output(display_name="negative", tooltip="The negative prompt for core's samplers."),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(cls, pipeline: Any, section_prompts: str = "", **texts: Any) -> io.NodeOutput:
        """The prompt."""
        progress = NodeProgress(cls.hidden.unique_id)
        sections = tuple(line.strip() for line in section_prompts.splitlines() if line.strip())
        prompt = stages.encode_prompt(pipeline, PromptRequest(**texts, sections=sections), progress)
        progress.finish(repr(prompt).strip("<>"))
        return io.NodeOutput(prompt, *latent_format.conditionings(prompt))


class ImageConditioning(io.ComfyNode):
    """Put an encoded image into core's conditioning."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="AnyGPUImageConditioning",
            display_name="AnyGPU Image Conditioning",
            category=CATEGORY,
            description="Gives core's samplers the picture of AnyGPU Encode Image, for image to video with the MODEL of "
            "AnyGPU Load Pipeline: HunyuanVideo (33 channels), HunyuanVideo 1.5, FramePack.",
            search_aliases=["image to video conditioning", "start image conditioning"],
            inputs=[
                io.Conditioning.Input("positive", tooltip="From AnyGPU Encode Prompt, or CLIP Text Encode."),
                io.Conditioning.Input("negative", tooltip="From AnyGPU Encode Prompt, or CLIP Text Encode."),
                Image.Input("image", tooltip="From AnyGPU Encode Image, of the same model."),
            ],
            outputs=[
                io.Conditioning.Output(display_name="positive"),
                io.Conditioning.Output(display_name="negative"),
            ],
        )

    @classmethod
    def execute(cls, positive: Any, negative: Any, image: Any) -> io.NodeOutput:
        """Both conditionings with the picture in them."""
        return io.NodeOutput(core_outputs.pictured(positive, image), core_outputs.pictured(negative, image))


class EncodeImage(io.ComfyNode):
    """Encode a start, end or in-between image."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="AnyGPUEncodeImage",
            display_name="AnyGPU Encode Image",
            category=CATEGORY,
            description="Fits a picture or clip to a size the model can make and encodes it. Chain several through "
            "`previous`: first and last frame, or a clip to extend (LTX-Video), start and end image (FramePack).",
            search_aliases=["image to video", "first frame", "last frame", "start image", "end image", "i2v"],
            inputs=[
                Pipeline.Input("pipeline", tooltip="From AnyGPU Load Pipeline."),
                io.Image.Input("image", tooltip="RGB picture; several frames make a clip (LTX-Video)."),
                *size_inputs(),
                io.Combo.Input(
                    "fit", options=list(FITS), default=FITS[0],
                    tooltip="nearest bucket: keep the picture's shape, at the nearest size the model was made for. "
                    "crop: cut to width and height. pad: black bars. stretch: distort.",
                ),
                io.Int.Input(
                    "frame", default=0, min=-1, max=4096, optional=True,
                    tooltip="Frame at which the picture stands; -1 is the last. FramePack takes 0 and -1, HunyuanVideo 0.",
                ),
                io.Float.Input(
                    "strength", default=1.0, min=0.0, max=1.0, step=0.01, optional=True,
                    tooltip="How strictly the video follows the picture (LTX-Video; end image of FramePack).",
                ),
                Image.Input("previous", optional=True, tooltip="Another encoded image that this one joins; its size is used."),
                io.ClipVisionOutput.Input(
                    "clip_vision_output", optional=True,
                    tooltip="SigLIP states from core's CLIP Vision Encode in place of the model's own image encoder "
                    "(FramePack, HunyuanVideo 1.5).",
                ),
            ],
            outputs=[
                Image.Output(display_name="image"),
                io.Int.Output(display_name="width"),
                io.Int.Output(display_name="height"),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(
        cls, pipeline: Any, image: Any, fit: str, clip_vision_output: Any = None, **settings: Any,
    ) -> io.NodeOutput:
        """The condition and the size it was fitted to."""
        progress = NodeProgress(cls.hidden.unique_id)
        vision = None if clip_vision_output is None else clip_vision_output.last_hidden_state
        condition = stages.encode_image(pipeline, ImageRequest(image, vision=vision, **settings), fit, progress)
        progress.finish(f"{condition.width}x{condition.height}")
        return io.NodeOutput(condition, condition.width, condition.height)


class EncodeVideo(io.ComfyNode):
    """Encode a video to start a sampling from."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="AnyGPUEncodeVideo",
            display_name="AnyGPU Encode Video",
            category=CATEGORY,
            description="Encodes frames to latents, for video to video: connect the latent to AnyGPU Sample and set "
            "denoise below 1.",
            search_aliases=["vae encode", "video to video", "v2v"],
            inputs=[
                Pipeline.Input("pipeline", tooltip="From AnyGPU Load Pipeline."),
                io.Image.Input("images", tooltip="RGB frames."),
                *size_inputs(),
                io.Combo.Input(
                    "fit", options=list(FITS), default="crop",
                    tooltip="How frames of another shape are fitted. Width and height 0 keep the frames' own size.",
                ),
                io.Int.Input("seed", default=0, min=0, max=SEED_LIMIT, tooltip="For VAEs that draw their latents."),
            ],
            outputs=[io.Latent.Output(display_name="latent")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(cls, pipeline: Any, images: Any, width: int, height: int, fit: str, seed: int) -> io.NodeOutput:
        """The latents."""
        progress = NodeProgress(cls.hidden.unique_id, pipeline.family)
        latents = stages.encode_video(pipeline, images, width, height, fit, seed, progress)
        progress.finish(f"{latents.width}x{latents.height}, {latents.frames} frames")
        return io.NodeOutput(latent_format.to_core(latents))
