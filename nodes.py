"""The nodes: each reads its inputs, calls one function, and wraps the result."""

from __future__ import annotations

import logging
from fractions import Fraction
from typing import Any

from .compat import attention, offload, precision
from .compat.vae_care import METHODS
from .host import folders, kept, memory
from .host.api import ComfyExtension, InputImpl, Types, io, ui
from .host.progress import NodeProgress
from .pipelines import exchange, hardware, stages
from .pipelines.contract import FramePackSettings, ImageRequest, PromptRequest, SampleSettings
from .pipelines.family import FITS, SCHEDULERS
from .pipelines.loading import LoadRequest, load, variant_choices

log = logging.getLogger(__name__)

Pipeline = io.Custom("ANYGPU_PIPELINE")
Prompt = io.Custom("ANYGPU_PROMPT")
Image = io.Custom("ANYGPU_IMAGE")

CATEGORY = "video/AnyGPU"
DEFAULT = "0 takes the model's own default."
SEED_LIMIT = 2**64 - 1


def _size(width: int = 0, height: int = 0) -> list[Any]:
    tip = "Pixels; rounded to the nearest size the model can make, which is said under the node. "
    return [
        io.Int.Input("width", default=width, min=0, max=4096, step=16, tooltip=tip + DEFAULT),
        io.Int.Input("height", default=height, min=0, max=4096, step=16, tooltip=tip + DEFAULT),
    ]


def _sampling() -> list[Any]:
    """The inputs that both sample nodes share, in the order of both."""
    return [
        io.Int.Input("steps", default=0, min=0, max=1000, tooltip="Denoising steps. " + DEFAULT),
        io.Float.Input(
            "cfg", default=0.0, min=0.0, max=30.0, step=0.1,
            tooltip="True classifier-free guidance with the negative prompt: a second forward per step, so twice the "
            "time, above 1. HunyuanVideo and FramePack are made for 1. " + DEFAULT,
        ),
        io.Float.Input(
            "guidance", default=0.0, min=0.0, max=30.0, step=0.1,
            tooltip="Distilled guidance, an input of HunyuanVideo and FramePack that costs nothing. " + DEFAULT,
        ),
        io.Int.Input(
            "seed", default=0, min=0, max=SEED_LIMIT, control_after_generate=True,
            tooltip="The same seed gives the same noise on every device.",
        ),
        io.Combo.Input(
            "scheduler", options=list(SCHEDULERS), default="auto",
            tooltip="The solver. auto is the one the model was published with (Euler).",
        ),
        io.Float.Input(
            "shift", default=0.0, min=0.0, max=100.0, step=0.1, advanced=True,
            tooltip="Timestep shift: more spends more steps on layout, less on detail. " + DEFAULT,
        ),
        io.Float.Input(
            "cfg_start", default=0.0, min=0.0, max=1.0, step=0.01, advanced=True,
            tooltip="Share of the steps after which true guidance (cfg) begins.",
        ),
        io.Float.Input(
            "cfg_end", default=1.0, min=0.0, max=1.0, step=0.01, advanced=True,
            tooltip="Share of the steps after which true guidance (cfg) ends; the rest runs twice as fast.",
        ),
    ]


class LoadPipeline(io.ComfyNode):
    """Load a model folder."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """The node's inputs and outputs."""
        lenders = folders.lender_choices()
        return io.Schema(
            node_id="AnyGPULoadPipeline",
            display_name="AnyGPU Load Pipeline",
            category=CATEGORY,
            description="Loads an LTX-Video, HunyuanVideo, HunyuanVideo 1.5, FramePack or Mochi model folder and decides "
            "precision and offload for this machine. Weights are read when a stage first needs them.",
            search_aliases=["diffusers loader", "load video model", "ltx", "hunyuan video", "framepack", "mochi"],
            inputs=[
                io.Combo.Input(
                    "model", options=folders.model_choices(),
                    tooltip="A diffusers folder, or a FramePack transformer folder, in models/diffusers.",
                ),
                io.Combo.Input(
                    "precision", options=list(precision.CHOICES), default="auto",
                    tooltip="auto: what this device runs best. fp32: exact, twice the memory of bf16. bf16: needs a GPU "
                    "with bf16 units (NVIDIA RTX 30 and newer). fp16: half the memory, can overflow to black video. "
                    "fp16-safe: fp16 operands around an fp32 residual, for GPUs without bf16; not on a CPU.",
                ),
                io.Combo.Input(
                    "offload", options=list(offload.CHOICES), default="auto",
                    tooltip="auto: the fastest that fits. "
                    + " ".join(f"{mode}: {cost}." for mode, cost in offload.COSTS.items())
                    + " On a CPU only auto and none work.",
                ),
                io.Combo.Input(
                    "variant", options=variant_choices(), default="auto", advanced=True,
                    tooltip="What files cannot tell. auto assumes it from the folder's name and says so under the node.",
                ),
                io.Combo.Input(
                    "base", options=lenders, default="auto", advanced=True,
                    tooltip="FramePack: the HunyuanVideo folder that lends text encoders and VAE. auto searches.",
                ),
                io.Combo.Input(
                    "image_encoder", options=lenders, default="auto", advanced=True,
                    tooltip="FramePack, HunyuanVideo 1.5: the folder with image_encoder and feature_extractor. "
                    "auto searches.",
                ),
                io.Combo.Input(
                    "attention", options=list(attention.CHOICES), default="auto", optional=True, advanced=True,
                    tooltip="Which kernel the transformer's attention runs, in this pipeline alone. "
                    + " ".join(f"{choice}: {meaning}." for choice, meaning in attention.MEANINGS.items())
                    + " What this machine cannot do is one line when you run it.",
                ),
            ],
            outputs=[Pipeline.Output(display_name="pipeline")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def fingerprint_inputs(cls, model: str, **_: Any) -> Any:
        """Changes when the model's files change."""
        folder = folders.models().get(model)
        return folder and sorted((str(f), f.stat().st_mtime, f.stat().st_size) for f in folder.rglob("*.*"))

    @classmethod
    def execute(
        cls, model: str, precision: str, offload: str, variant: str = "auto", base: str = "auto",
        image_encoder: str = "auto", attention: str = "auto",
    ) -> io.NodeOutput:
        """The pipeline."""
        progress = NodeProgress(cls.hidden.unique_id)
        request = LoadRequest(
            folders.model_folder(model), folders.lender_folder(base), folders.lender_folder(image_encoder), variant,
            precision, offload, memory.compute_device(), (*folders.model_roots(), *folders.encoder_roots()),
            attention=attention, state=folders.state_folder(),
        )
        pipeline = load(request, progress, memory.make_room)
        progress.finish("\n".join((f"{pipeline.family}, {pipeline.facts}", *pipeline.notes)))
        return io.NodeOutput(pipeline)


class EncodePrompt(io.ComfyNode):
    """Encode prompt and negative prompt."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """The node's inputs and outputs."""
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
            outputs=[Prompt.Output(display_name="prompt")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(
        cls, pipeline: Any, text: str, negative: str, section_prompts: str = "", image: Any = None, max_tokens: int = 0,
        template: str = "", template_crop: int = -1,
    ) -> io.NodeOutput:
        """The prompt."""
        progress = NodeProgress(cls.hidden.unique_id)
        sections = tuple(line.strip() for line in section_prompts.splitlines() if line.strip())
        request = PromptRequest(text, negative, max_tokens, template, template_crop, sections, image)
        prompt = stages.encode_prompt(pipeline, request, progress)
        progress.finish(repr(prompt).strip("<>"))
        return io.NodeOutput(prompt)


class EncodeImage(io.ComfyNode):
    """Encode a start, end or in-between image."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """The node's inputs and outputs."""
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
                *_size(),
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
        cls, pipeline: Any, image: Any, width: int, height: int, fit: str, frame: int = 0, strength: float = 1.0,
        previous: Any = None, clip_vision_output: Any = None,
    ) -> io.NodeOutput:
        """The condition and the size it was fitted to."""
        progress = NodeProgress(cls.hidden.unique_id)
        vision = None if clip_vision_output is None else clip_vision_output.last_hidden_state
        request = ImageRequest(image, width, height, frame, strength, vision, previous)
        condition = stages.encode_image(pipeline, request, fit, progress)
        progress.finish(f"{condition.width}x{condition.height}")
        return io.NodeOutput(condition, condition.width, condition.height)


class EncodeVideo(io.ComfyNode):
    """Encode a video to start a sampling from."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """The node's inputs and outputs."""
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
                *_size(),
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
        return io.NodeOutput(exchange.to_core(latents))


class Sample(io.ComfyNode):
    """Sample a video."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """The node's inputs and outputs."""
        return io.Schema(
            node_id="AnyGPUSample",
            display_name="AnyGPU Sample",
            category=CATEGORY,
            description="Denoises a video: text, image or video to video, by what is connected. Inputs that have no "
            "effect on the loaded model are named under the node.",
            search_aliases=["ksampler", "video sampler", "text to video", "t2v", "i2v", "v2v"],
            inputs=[
                Pipeline.Input("pipeline", tooltip="From AnyGPU Load Pipeline."),
                io.MultiType.Input(
                    "prompt", types=[Prompt, io.Conditioning],
                    tooltip="From AnyGPU Encode Prompt, or core CONDITIONING from CLIP Text Encode.",
                ),
                *_size(),
                io.Int.Input(
                    "frames", default=0, min=0, max=4097,
                    tooltip="Video frames; rounded up to the next count the model can make. " + DEFAULT,
                ),
                *_sampling(),
                io.Float.Input("fps", default=0.0, min=0.0, max=240.0, step=0.01, tooltip="Frames per second. " + DEFAULT),
                Image.Input("image", optional=True, tooltip="From AnyGPU Encode Image: makes it image to video."),
                io.Latent.Input("latent", optional=True, tooltip="Video to video: the latents to start from. A noise mask on them is kept."),
                io.Float.Input(
                    "denoise", default=1.0, min=0.0, max=1.0, step=0.01, optional=True,
                    tooltip="With a latent: share of it that is redrawn. 1 ignores its content.",
                ),
                io.Conditioning.Input("negative", optional=True, tooltip="Negative CONDITIONING, when prompt is core CONDITIONING."),
                io.Sigmas.Input("sigmas", optional=True, tooltip="Noise levels from 1 to 0 that replace steps and shift."),
                io.Float.Input(
                    "guidance_rescale", default=0.0, min=0.0, max=1.0, step=0.01, optional=True, advanced=True,
                    tooltip="LTX-Video, HunyuanVideo 1.5: pulls back the contrast that a high cfg adds.",
                ),
            ],
            outputs=[io.Latent.Output(display_name="latent")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(
        cls, pipeline: Any, prompt: Any, image: Any = None, latent: Any = None, negative: Any = None, sigmas: Any = None,
        **settings: Any,
    ) -> io.NodeOutput:
        """The sampled latents."""
        progress = NodeProgress(cls.hidden.unique_id, pipeline.family)
        encoded = stages.prompt_from_core(pipeline, prompt, negative) if isinstance(prompt, list) else prompt
        start = exchange.start_of(pipeline, latent, progress.say)
        chosen = SampleSettings(**settings, **start, sigmas=None if sigmas is None else tuple(sigmas.tolist()))
        latents = stages.sample(pipeline, encoded, image, chosen, progress)
        progress.finish(f"{latents.width}x{latents.height}, {latents.frames} frames at {latents.fps:g} fps")
        return io.NodeOutput(exchange.to_core(latents))


class SampleFramePack(io.ComfyNode):
    """Sample a FramePack video."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """The node's inputs and outputs."""
        return io.Schema(
            node_id="AnyGPUSampleFramePack",
            display_name="AnyGPU Sample FramePack",
            category=CATEGORY,
            description="Denoises a FramePack video section by section. Each finished section is previewed and kept in "
            "ComfyUI's temporary folder, so a cancel or a crash costs one section, not the video.",
            search_aliases=["framepack", "framepack f1", "long video", "image to video"],
            inputs=[
                Pipeline.Input("pipeline", tooltip="From AnyGPU Load Pipeline, with a FramePack model."),
                io.MultiType.Input(
                    "prompt", types=[Prompt, io.Conditioning],
                    tooltip="From AnyGPU Encode Prompt, or core CONDITIONING from CLIP Text Encode.",
                ),
                Image.Input("image", tooltip="From AnyGPU Encode Image: the start image, and the end image joined to it."),
                io.Float.Input("clip_seconds", default=5.0, min=0.0, max=120.0, step=0.1, tooltip="Length of the video in seconds."),
                io.Float.Input("fps", default=30.0, min=1.0, max=240.0, step=0.01, tooltip="Frames per second; FramePack is made for 30."),
                *_sampling(),
                io.Int.Input(
                    "window", default=9, min=2, max=33, optional=True, advanced=True,
                    tooltip="Latent frames per section; FramePack is made for 9, which is 33 frames of video.",
                ),
                io.Combo.Input(
                    "order", options=["auto", "inverted_anti_drifting", "vanilla"], default="auto", optional=True,
                    advanced=True,
                    tooltip="auto follows the variant. inverted_anti_drifting samples from the end (FramePack), vanilla "
                    "from the start (F1).",
                ),
                io.Float.Input(
                    "end_strength", default=1.0, min=0.0, max=1.0, step=0.01, optional=True,
                    tooltip="How much an end image counts.",
                ),
                io.Boolean.Input(
                    "single_frame", default=False, optional=True, advanced=True,
                    tooltip="Sample one picture instead of a video.",
                ),
                io.Conditioning.Input("negative", optional=True, tooltip="Negative CONDITIONING, when prompt is core CONDITIONING."),
                io.Sigmas.Input("sigmas", optional=True, tooltip="Noise levels from 1 to 0 that replace steps and shift."),
            ],
            outputs=[io.Latent.Output(display_name="latent")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(
        cls, pipeline: Any, prompt: Any, image: Any, clip_seconds: float, window: int = 9, order: str = "auto",
        end_strength: float = 1.0, single_frame: bool = False, negative: Any = None, sigmas: Any = None, **settings: Any,
    ) -> io.NodeOutput:
        """The sampled latents."""
        progress = NodeProgress(cls.hidden.unique_id, pipeline.family)
        encoded = stages.prompt_from_core(pipeline, prompt, negative) if isinstance(prompt, list) else prompt
        framepack = FramePackSettings(clip_seconds, window, order, end_strength, single_frame)
        levels = None if sigmas is None else tuple(sigmas.tolist())
        chosen = SampleSettings(image.width, image.height, 0, **settings, sigmas=levels)
        keeper = kept.section_keeper(progress.say)
        latents = stages.sample_framepack(pipeline, encoded, image, chosen, framepack, progress, keeper)
        progress.finish(f"{latents.width}x{latents.height}, {latents.frames} frames at {latents.fps:g} fps")
        return io.NodeOutput(exchange.to_core(latents))


class Decode(io.ComfyNode):
    """Decode latents to frames and video."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """The node's inputs and outputs."""
        return io.Schema(
            node_id="AnyGPUDecode",
            display_name="AnyGPU Decode",
            category=CATEGORY,
            description="Decodes video latents to frames, and to a VIDEO that core's Save Video takes.",
            search_aliases=["vae decode", "latent to video"],
            inputs=[
                Pipeline.Input("pipeline", tooltip="The pipeline that made the latents."),
                io.Latent.Input("latent", tooltip="From AnyGPU Sample, or video latents of the same model from core nodes."),
                io.Float.Input(
                    "fps", default=0.0, min=0.0, max=240.0, step=0.01, optional=True, advanced=True,
                    tooltip="Frames per second of the VIDEO. 0 takes what sampling used.",
                ),
                io.Combo.Input(
                    "method", options=list(METHODS), default="auto", optional=True, advanced=True,
                    tooltip="auto: whole, in tiles where that does not fit or goes wrong. full: never in tiles, which is "
                    "exact. tiled: in tiles of 256 pixels, which needs far less memory and can show faint seams.",
                ),
            ],
            outputs=[io.Image.Output(display_name="images"), io.Video.Output(display_name="video")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(cls, pipeline: Any, latent: Any, fps: float = 0.0, method: str = "auto") -> io.NodeOutput:
        """Frames, and the video."""
        progress = NodeProgress(cls.hidden.unique_id, pipeline.family)
        latents = exchange.from_core(pipeline, latent, progress.say)
        frames = stages.decode(pipeline, latents, progress, method)
        rate = Fraction(fps or latents.fps).limit_denominator(1001)
        progress.finish(f"{frames.shape[2]}x{frames.shape[1]}, {frames.shape[0]} frames at {float(rate):g} fps")
        video = InputImpl.VideoFromComponents(Types.VideoComponents(images=frames, frame_rate=rate))
        return io.NodeOutput(frames, video)


class HardwareReport(io.ComfyNode):
    """Say what this machine can do and what is decided on it."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """The node's inputs and outputs."""
        return io.Schema(
            node_id="AnyGPUHardwareReport",
            display_name="AnyGPU Hardware Report",
            category=CATEGORY,
            description="Says which device was found, what it answered to short tests, which precision and kernels each "
            "model gets on it and why, and what to change where something does not work.",
            search_aliases=["diagnose", "gpu info", "benchmark", "debug", "bug report", "hardware"],
            inputs=[
                io.Boolean.Input(
                    "check", default=False,
                    tooltip="Also try conversions, loading, Conv3d and attention on the device: a few seconds.",
                ),
                io.Boolean.Input(
                    "ask_again", default=False, optional=True, advanced=True,
                    tooltip="Forget what the device answered before and ask anew.",
                ),
            ],
            outputs=[io.String.Output(display_name="text"), io.Image.Output(display_name="table")],
            hidden=[io.Hidden.unique_id],
            is_output_node=True,
            not_idempotent=True,
        )

    @classmethod
    def fingerprint_inputs(cls, **_: Any) -> float:
        """Never the same: a driver or a flag may have changed."""
        return float("nan")

    @classmethod
    def execute(cls, check: bool, ask_again: bool = False) -> io.NodeOutput:
        """The report as text and as a table."""
        progress = NodeProgress(cls.hidden.unique_id)
        device, state = memory.compute_device(), folders.state_folder()
        report = hardware.hardware_report(device, state, ask_again)
        report = hardware.checked(report, device, state, progress) if check else report
        progress.finish(report.summary())
        table = hardware.drawn(report)
        return io.NodeOutput(report.text(), table, ui=ui.PreviewImage(table, cls=cls))


NODES = (LoadPipeline, EncodePrompt, EncodeImage, EncodeVideo, Sample, SampleFramePack, Decode, HardwareReport)


class AnyGPUExtension(ComfyExtension):
    """The pack, as ComfyUI sees it."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        """Every node whose schema can be made; one that cannot is left out and logged with its traceback."""
        usable: list[type[io.ComfyNode]] = []
        for node in NODES:
            try:
                node.GET_SCHEMA()
                usable.append(node)
            except Exception:  # one broken node must not hide the others
                log.exception("AnyGPU: node %s is left out", node.__name__)
        return usable
