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
from .inputs import DEFAULT, SEED_LIMIT, Image, Pipeline, Prompt, schema, size_inputs


class EncodePrompt(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="AnyGPUEncodePrompt",
            display_name="AnyGPU Encode Prompt",
            description="Turns prompt and negative prompt into embeddings, then takes the text encoders off the device.",
            search_aliases=["clip text encode", "text encode", "negative prompt", "t5", "llama"],
            inputs=[
                Pipeline.Input("pipeline", tooltip="From AnyGPU Load Pipeline."),
                io.String.Input("text", multiline=True, dynamic_prompts=True, tooltip="What the video shows. A text that is too long for the model is shortened, and the node says so."),
                io.String.Input(
                    "negative", multiline=True, dynamic_prompts=True, default="",
                    tooltip="What the video should not show. Has an effect only if cfg is above 1.",
                ),
                io.String.Input(
                    "section_prompts", multiline=True, default="", optional=True, advanced=True,
                    tooltip="FramePack: one prompt per line for the sections after the first, in playback order. "
                            "Sections without a line use the prompt above. By time, here or in text: [3s: words] or [0s-2s: words].",
                ),
                io.Image.Input(
                    "image", optional=True,
                    tooltip="HunyuanVideo image to video: the text encoder looks at the picture too.",
                ),
                io.Int.Input(
                    "max_tokens", default=0, min=0, max=1024, optional=True, advanced=True,
                    tooltip="Maximum prompt length in tokens. A longer prompt is shortened, and the node shows what is "
                            "left out. " + DEFAULT,
                ),
                io.String.Input(
                    "template", multiline=True, default="", optional=True, advanced=True,
                    tooltip="HunyuanVideo, HunyuanVideo 1.5, FramePack: the text around the prompt, with {} in place "
                            "of the prompt. Leave it empty for the model's own template.",
                ),
                io.Int.Input(
                    "template_crop", default=-1, min=-1, max=1024, optional=True, advanced=True,
                    tooltip="How many leading tokens of the template to cut off. -1 counts them for you.",
                ),
            ],
            outputs=[
                Prompt.Output(display_name="prompt"),
                io.Conditioning.Output(display_name="positive", tooltip="The prompt for core's samplers."),
                io.Conditioning.Output(display_name="negative", tooltip="The negative prompt for core's samplers."),
            ],
        )

    @classmethod
    def execute(cls, pipeline: Any, section_prompts: str = "", **texts: Any) -> io.NodeOutput:
        progress = NodeProgress(cls.hidden.unique_id)
        sections = tuple(line.strip() for line in section_prompts.splitlines() if line.strip())
        texts = own_inputs(pipeline, {**texts, "sections": sections}, progress.notify)
        prompt = stages.encode_prompt(pipeline, PromptRequest(**texts), progress)
        progress.finish(prompt.described(pipeline.spec.title))
        return io.NodeOutput(prompt, *latent_format.conditionings(prompt))


class ImageConditioning(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="AnyGPUImageConditioning",
            display_name="AnyGPU Image Conditioning",
            is_dev_only=True,
            description="Adds the picture of AnyGPU Encode Image to core's CONDITIONING, for image to video with the "
                        "MODEL of AnyGPU Load Pipeline: HunyuanVideo (33 channels), HunyuanVideo 1.5, FramePack.",
            search_aliases=["image to video conditioning", "start image conditioning"],
            inputs=[
                io.Conditioning.Input("positive", tooltip="From AnyGPU Encode Prompt, or CLIP Text Encode."),
                io.Conditioning.Input("negative", tooltip="From AnyGPU Encode Prompt, or CLIP Text Encode."),
                Image.Input("image", tooltip="From AnyGPU Encode Image, with the same model."),
            ],
            outputs=[
                io.Conditioning.Output(display_name="positive"),
                io.Conditioning.Output(display_name="negative"),
            ],
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
            display_name="AnyGPU Encode Image",
            description="Fits a picture or clip to a size the model can make, and encodes it. Chain several through "
                        "`previous`: first and last frame, a clip to extend (LTX-Video), start and end image "
                        "(FramePack).",
            search_aliases=["image to video", "first frame", "last frame", "start image", "end image", "i2v"],
            inputs=[
                Pipeline.Input("pipeline", tooltip="From AnyGPU Load Pipeline."),
                io.Image.Input("image", tooltip="An RGB picture. Several frames make a clip (LTX-Video; FramePack goes on with it)."),
                *size_inputs(),
                io.Combo.Input(
                    "fit", options=list(FITS), default=FITS[0],
                    tooltip="nearest bucket: keeps the aspect ratio, at the nearest size the model was made for. crop: "
                            "fills width and height and cuts off the rest. pad: adds black bars. stretch: distorts.",
                ),
                io.Int.Input(
                    "frame", default=0, min=-1, max=4096, optional=True,
                    tooltip="Where in the video the picture goes; -1 is the last frame. FramePack takes 0 and -1, "
                            "HunyuanVideo 0.",
                ),
                io.Float.Input(
                    "strength", default=1.0, min=0.0, max=1.0, step=0.01, optional=True,
                    tooltip="How closely the video follows the picture (LTX-Video; on FramePack, the end image).",
                ),
                Image.Input("previous", optional=True, tooltip="The encoded image to join this one to. Its size is used."),
                io.ClipVisionOutput.Input(
                    "clip_vision_output", optional=True,
                    tooltip="SigLIP output from core's CLIP Vision Encode. Replaces the model's own image encoder "
                            "(FramePack, HunyuanVideo 1.5).",
                ),
                io.Boolean.Input(
                    "control", default=False, optional=True, advanced=True,
                    tooltip="LTX-Video with an IC-LoRA: the clip controls the video (pose, depth, edges) instead of "
                            "being part of it. strength is how strictly.",
                ),
                io.Boolean.Input(
                    "prepare", default=True, optional=True, advanced=True,
                    tooltip="Prepares the picture as the model's publisher does. LTX-Video: a little blur and H.264, as "
                            "of a frame of a video, without which clips tend to stand still. FramePack and "
                            "HunyuanVideo: their own filter in 8 bits. Off: only brings it to size.",
                ),
                io.Latent.Input(
                    "latent", optional=True,
                    tooltip="Latents of the video that the picture belongs to, such as those of AnyGPU Upscale "
                            "Latents. Their size is used.",
                ),
            ],
            outputs=[
                Image.Output(display_name="image"),
                io.Int.Output(display_name="width"),
                io.Int.Output(display_name="height"),
            ],
        )

    @classmethod
    def execute(
        cls, pipeline: Any, image: Any, fit: str, clip_vision_output: Any = None, latent: Any = None, **settings: Any,
    ) -> io.NodeOutput:
        progress = NodeProgress(cls.hidden.unique_id)
        size = None if latent is None else latent_format.from_core(pipeline, latent, progress.notify)
        vision = None if clip_vision_output is None else clip_vision_output.last_hidden_state
        settings = own_inputs(pipeline, {**settings, "image": image, "fit": fit}, progress.notify)
        image, fit = settings.pop("image"), settings.pop("fit")
        condition = stages.encode_image(pipeline, ImageRequest(image, vision=vision, **settings), fit, progress, size)
        progress.finish(f"{condition.width}x{condition.height}")
        return io.NodeOutput(condition, condition.width, condition.height)


class EncodeVideo(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="AnyGPUEncodeVideo",
            display_name="AnyGPU Encode Video",
            description="Encodes frames to latents for video to video: connect the latent to AnyGPU Sample and set "
                        "denoise below 1.",
            search_aliases=["vae encode", "video to video", "v2v"],
            inputs=[
                Pipeline.Input("pipeline", tooltip="From AnyGPU Load Pipeline."),
                io.Image.Input("images", tooltip="RGB frames."),
                *size_inputs(),
                io.Combo.Input(
                    "fit", options=list(FITS), default="crop",
                    tooltip="How frames of another aspect ratio are fitted. Width and height 0 keep the frames' own "
                            "size.",
                ),
                io.Int.Input("seed", default=0, min=0, max=SEED_LIMIT, tooltip="For VAEs that sample their latents."),
            ],
            outputs=[io.Latent.Output(display_name="latent")],
        )

    @classmethod
    def execute(cls, pipeline: Any, images: Any, width: int, height: int, fit: str, seed: int) -> io.NodeOutput:
        progress = NodeProgress(cls.hidden.unique_id, pipeline.family)
        chosen = {"images": images, "width": width, "height": height, "fit": fit}
        chosen = own_inputs(pipeline, chosen, progress.notify)
        images = chosen.pop("images")
        latents = stages.encode_video(pipeline, images, **chosen, seed=seed, progress=progress)
        progress.finish(f"{latents.width}x{latents.height}, {latents.frames} frames")
        return io.NodeOutput(latent_format.to_core(latents))
