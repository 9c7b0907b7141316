"""The nodes that sample and decode latents, and the one that skips work between steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any

from ..compat.device.execution import to_host
from ..compat.transforms import step_cache
from ..compat.transforms.step_cache import StepCacheSettings
from ..host import folders, preview, saved
from ..host.api import io
from ..host.progress import NodeProgress
from ..pipelines import stages
from ..pipelines.base import SECTION_ORDERS, FramePackSettings, Latents, SampleSettings
from ..pipelines.decisions import in_short
from ..pipelines.demo.stand_in import own_inputs, own_latents
from ..pipelines.latents import batch, recovery
from ..pipelines.latents import convert as latent_format
from ..pipelines.latents.steps import SavedSteps
from ..pipelines.records.receipts import decoded_receipt
from ..pipelines.registry import FAMILIES
from ..pipelines.settings import with_step_cache
from ..pipelines.vae.plan import METHODS, DecodeRequest
from .inputs import Image, Pipeline, Prompt, batch_input, core_inputs, sampling_inputs, schema, size_inputs


class Sample(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="AnyGPUSample",
            search_aliases=[
                "ksampler", "video sampler", "text to video", "image to video", "t2v", "i2v", "v2v", "length", "num_frames",
                *(f"{spec.id.replace('_', ' ')} sampler" for spec in FAMILIES.values() if not spec.recipes.sections),
            ],
            inputs=[
                Pipeline.Input("pipeline"),
                io.MultiType.Input("prompt", types=[Prompt, io.Conditioning]),
                *size_inputs(),
                io.Int.Input("frames", default=0, min=0, max=4097),
                *sampling_inputs(),
                io.Float.Input("fps", default=0.0, min=0.0, max=240.0, step=0.01, advanced=True),
                Image.Input("image", optional=True),
                io.Latent.Input("latent", optional=True),
                io.Float.Input("denoise", default=1.0, min=0.0, max=1.0, step=0.01, optional=True, advanced=True),
                *core_inputs(),
                io.Float.Input("guidance_rescale", default=0.0, min=0.0, max=1.0, step=0.01, optional=True, advanced=True),
                io.Float.Input("stg", default=-1.0, min=-1.0, max=20.0, step=0.1, optional=True, advanced=True),
                batch_input(),
            ],
            outputs=[io.Latent.Output(display_name="latent")],
        )

    @classmethod
    def execute(
        cls, pipeline: Any, prompt: Any, image: Any = None, latent: Any = None, negative: Any = None, sigmas: Any = None,
        batch_size: int = 1, **settings: Any,
    ) -> io.NodeOutput:
        """Sample ``batch_size`` videos from each of ``latent``, or from noise; each is signed with its settings and kept on disk."""
        progress = NodeProgress(cls.hidden.unique_id, pipeline.family)
        encoded = stages.prompt_from_core(pipeline, prompt, negative) if isinstance(prompt, list) else prompt
        videos = [None] if latent is None else batch.videos_of(latent)
        starts = [own_latents(pipeline, latent_format.start_of(pipeline, video, progress.notify), progress.drawn) for video in videos]
        settings = own_inputs(pipeline, settings, progress.drawn)
        chosen = SampleSettings(**settings, sigmas=None if sigmas is None else tuple(to_host(sigmas).tolist()))

        def sample(index: int, seed: int, part: Any) -> Latents:  # one video; ``part`` is its share of the progress
            asked = replace(chosen, seed=seed, **starts[index % len(starts)])  # a batch takes the given latents in turn
            steps = SavedSteps(folders.unfinished_folder(), progress.notify)
            latents = stages.sample(pipeline, encoded, image, asked, part, steps)
            latents = saved.signed(latents, pipeline=pipeline, prompt=encoded, image=image, settings=asked)
            recovery.save(folders.saved_folder(), latents, progress.notify)
            return latents

        return finished(progress, pipeline, batch.sampled(batch_size, chosen.seed, progress, sample, len(starts)))


class SampleFramePack(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="AnyGPUSampleFramePack",
            inputs=[
                Pipeline.Input("pipeline"),
                io.MultiType.Input("prompt", types=[Prompt, io.Conditioning]),
                Image.Input("image"),
                io.Float.Input("clip_seconds", default=5.0, min=0.0, max=120.0, step=0.1),
                io.Float.Input("fps", default=30.0, min=1.0, max=240.0, step=0.01, advanced=True),
                *sampling_inputs(),
                io.Int.Input("window", default=9, min=2, max=33, optional=True, advanced=True),
                io.Combo.Input("order", options=["auto", *SECTION_ORDERS], default="auto", optional=True, advanced=True),
                io.Float.Input("end_strength", default=1.0, min=0.0, max=1.0, step=0.01, optional=True, advanced=True),
                io.Boolean.Input("single_frame", default=False, optional=True, advanced=True),
                *core_inputs(),
                batch_input(),
                io.Int.Input("blend_sections", default=0, min=0, max=10, optional=True, advanced=True),
            ],
            outputs=[io.Latent.Output(display_name="latent")],
        )

    @classmethod
    def execute(
        cls, pipeline: Any, prompt: Any, image: Any, clip_seconds: float, fps: float = 30.0, window: int = 9, order: str = "auto",
        end_strength: float = 1.0, single_frame: bool = False, negative: Any = None, sigmas: Any = None, batch_size: int = 1,
        blend_sections: int = 0, **settings: Any,
    ) -> io.NodeOutput:
        """Sample ``batch_size`` videos section by section, as large as ``image``; sections are signed and kept on disk as they end."""
        progress = NodeProgress(cls.hidden.unique_id, pipeline.family)
        encoded = stages.prompt_from_core(pipeline, prompt, negative) if isinstance(prompt, list) else prompt
        settings = own_inputs(pipeline, {**settings, "clip_seconds": clip_seconds, "fps": fps, "window": window}, progress.drawn)
        framepack = FramePackSettings(
            clip_seconds=settings.pop("clip_seconds"), window=settings.pop("window"), order=order,
            end_strength=end_strength, single_frame=single_frame, blend_sections=blend_sections,
        )
        levels = None if sigmas is None else tuple(to_host(sigmas).tolist())
        chosen = SampleSettings(image.width, image.height, 0, **settings, sigmas=levels)

        def sample(_index: int, seed: int, part: Any) -> Latents:  # one video; ``part`` is its share of the progress
            asked = replace(chosen, seed=seed)
            made = dict(pipeline=pipeline, prompt=encoded, image=image, settings=asked, framepack=framepack)
            sign = partial(saved.signed, **made)
            keeper = recovery.SavedSections(folders.saved_folder(), progress.notify, describe=sign)
            steps = SavedSteps(folders.unfinished_folder(), progress.notify)
            return sign(stages.sample_framepack(pipeline, encoded, image, asked, framepack, part, keeper, steps))

        return finished(progress, pipeline, batch.sampled(batch_size, chosen.seed, progress, sample))


def finished(progress: NodeProgress, pipeline: Any, videos: Sequence[Latents]) -> io.NodeOutput:
    """The LATENT of all sampled videos, after showing size, seeds and decisions under the node."""
    one = videos[0]
    status = f"{one.width}x{one.height}, {one.frames} frames at {one.fps:g} fps"
    progress.finish(status, batch.seeds_of(videos), in_short(pipeline))
    return io.NodeOutput(batch.joined(videos))


class StepCache(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="AnyGPUStepCache",
            inputs=[
                Pipeline.Input("pipeline"),
                io.Combo.Input(
                    "preset", options=list(step_cache.PRESET_CHOICES), default="balanced",
                    tooltip="off: every step is computed in full. "
                    + " ".join(f"{name}: threshold {t:g}, interval {n}." for name, (t, n) in step_cache.PRESETS.items())
                    + " custom: the two numbers below.",
                ),
                io.Combo.Input(
                    "kind", options=list(step_cache.KINDS), default="auto",
                    tooltip=" ".join(f"{kind}: {meaning}." for kind, meaning in step_cache.KINDS.items())
                    + " A kind that guidance or compile would break is an error when you run it.",
                ),
                io.Float.Input("threshold", default=0.1, min=0.0, max=1.0, step=0.01),
                io.Int.Input("interval", default=3, min=2, max=10),
                io.Float.Input("start_percent", default=0.0, min=0.0, max=1.0, step=0.01, advanced=True),
                io.Float.Input("end_percent", default=1.0, min=0.0, max=1.0, step=0.01, advanced=True),
                io.Combo.Input("cache_device", options=list(step_cache.DEVICES), default="device", advanced=True),
            ],
            outputs=[Pipeline.Output(display_name="pipeline")],
        )

    @classmethod
    def execute(
        cls, pipeline: Any, preset: str, start_percent: float = 0.0, end_percent: float = 1.0,
        cache_device: str = step_cache.DEVICES[0], **settings: Any,
    ) -> io.NodeOutput:
        progress = NodeProgress(cls.hidden.unique_id)
        chosen = StepCacheSettings(**settings, start=start_percent, end=end_percent, device=cache_device)
        caching = with_step_cache(pipeline, preset, chosen)
        progress.finish(f"step cache {caching.plan.step_cache or 'off'}")
        return io.NodeOutput(caching)


class Decode(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="AnyGPUDecode",
            inputs=[
                Pipeline.Input("pipeline"),
                io.Latent.Input("latent"),
                io.Float.Input("fps", default=0.0, min=0.0, max=240.0, step=0.01, optional=True, advanced=True),
                io.Combo.Input("method", options=list(METHODS), default="auto", optional=True, advanced=True),
                io.Int.Input("tile_size", default=0, min=0, max=4096, step=8, optional=True, advanced=True),
                io.Int.Input("tile_overlap", default=-1, min=-1, max=2048, step=1, optional=True, advanced=True),
                io.Int.Input("frames_per_chunk", default=0, min=0, max=256, optional=True, advanced=True),
                io.Float.Input("decode_timestep", default=-1.0, min=-1.0, max=1.0, step=0.005, optional=True, advanced=True),
                io.Float.Input("decode_noise_scale", default=-1.0, min=-1.0, max=1.0, step=0.005, optional=True, advanced=True),
            ],
            outputs=[io.Image.Output(display_name="images", is_output_list=True), io.Video.Output(display_name="video", is_output_list=True)],
        )

    @classmethod
    def execute(
        cls, pipeline: Any, latent: Any, fps: float = 0.0, method: str = "auto", tile_size: int = 0,
        tile_overlap: int = -1, frames_per_chunk: int = 0, decode_timestep: float = -1.0, decode_noise_scale: float = -1.0,
    ) -> io.NodeOutput:
        progress = NodeProgress(cls.hidden.unique_id, pipeline.family)
        form = DecodeRequest(method, tile_size, tile_overlap, frames_per_chunk)
        tiny_decoders = folders.roots(folders.TINY_DECODER_KEYS)
        latents_of_videos, clips, videos = batch.videos_of(latent), [], []
        for each, part in zip(latents_of_videos, batch.parts_of(progress, len(latents_of_videos)), strict=True):
            latents = latent_format.from_core(pipeline, each, progress.notify)
            latents = stages.with_decode_noise(pipeline, latents, decode_timestep, decode_noise_scale, progress)
            frames = stages.decode(pipeline, latents, part, form=form, tiny_decoders=tiny_decoders)
            rate = Fraction(fps or latents.fps).limit_denominator(1001)
            clips.append(frames)
            videos.append(saved.video(frames, rate, decoded_receipt(latents, form)))
        size = f"{frames.shape[2]}x{frames.shape[1]}, {frames.shape[0]} frames at {float(rate):g} fps"
        progress.finish(size, f"{len(clips)} videos" if len(clips) > 1 else "", in_short(pipeline, "vae"))
        return io.NodeOutput(clips, videos, ui=preview.clips(clips, float(rate), cls))
