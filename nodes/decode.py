"""The nodes that decode latents."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from ..host import folders, preview, saved
from ..host.api import io
from ..host.progress import NodeProgress
from ..pipelines import stages
from ..pipelines.decisions import in_short
from ..pipelines.latents import batch
from ..pipelines.latents import convert as latent_format
from ..pipelines.records.receipts import decoded_receipt
from ..pipelines.vae.plan import METHODS, DecodeRequest
from .inputs import Pipeline, schema


class Decode(io.ComfyNode):
    """Decode latents to frames and video."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="AnyGPUDecode",
            display_name="AnyGPU Decode",
            description="Decodes video latents to frames, and to a VIDEO that core's Save Video takes.",
            search_aliases=["vae decode", "latent to video"],
            inputs=[
                Pipeline.Input("pipeline", tooltip="The pipeline that made the latents."),
                io.Latent.Input("latent", tooltip="From AnyGPU Sample, or video latents of the same model from core nodes."),
                io.Float.Input(
                    "fps", default=0.0, min=0.0, max=240.0, step=0.01, optional=True, advanced=True,
                    tooltip="Frames per second of the VIDEO. 0 takes the rate that sampling used.",
                ),
                io.Combo.Input(
                    "method", options=list(METHODS), default="auto", optional=True, advanced=True,
                    tooltip="auto: the whole video if it fits, otherwise chunks of frames, layer by layer, tiles, "
                            "and finally the CPU. full: always the whole video at once. tiled: tiles of 256 pixels; "
                            "needs far less memory, can show faint seams. chunked: a few frames at a time, exact; "
                            "only Mochi and HunyuanVideo 1.5. streaming: layer by layer over tiles, exact and "
                            "without seams, in a fraction of the memory; slow. cpu: on the CPU in fp32, very slow. draft: by a "
                            "tiny decoder in ComfyUI/models/vae_approx, in a tenth of the work or less; rough. "
                            "LTX-Video has none.",
                ),
                io.Int.Input(
                    "tile_size", default=0, min=0, max=4096, step=8, optional=True, advanced=True,
                    tooltip="Size of a tile in pixels, for tiled and streaming, and the largest that auto uses. 0: "
                            "256.",
                ),
                io.Int.Input(
                    "tile_overlap", default=-1, min=-1, max=2048, step=1, optional=True, advanced=True,
                    tooltip="How many pixels of a tile blend into the next. More hides seams and costs time. -1: a "
                            "quarter of the tile.",
                ),
                io.Int.Input(
                    "frames_per_chunk", default=0, min=0, max=256, optional=True, advanced=True,
                    tooltip="Latent frames decoded at a time: in chunks with Mochi and HunyuanVideo 1.5, in windows "
                            "with HunyuanVideo and FramePack, where fewer take less memory. 0: chosen for you.",
                ),
                io.Float.Input(
                    "decode_timestep", default=-1.0, min=-1.0, max=1.0, step=0.005, optional=True, advanced=True,
                    tooltip="LTX-Video 0.9.1 and newer: how much noise its VAE assumes in the latents. -1: the "
                            "model's own value.",
                ),
                io.Float.Input(
                    "decode_noise_scale", default=-1.0, min=-1.0, max=1.0, step=0.005, optional=True, advanced=True,
                    tooltip="LTX-Video 0.9.1 and newer: share of noise added to the latents before its VAE removes "
                            "it. -1: the model's own value.",
                ),
            ],
            outputs=[
                io.Image.Output(display_name="images", is_output_list=True),
                io.Video.Output(display_name="video", is_output_list=True),
            ],
        )

    @classmethod
    def execute(
        cls, pipeline: Any, latent: Any, fps: float = 0.0, method: str = "auto", tile_size: int = 0,
        tile_overlap: int = -1, frames_per_chunk: int = 0, decode_timestep: float = -1.0, decode_noise_scale: float = -1.0,
    ) -> io.NodeOutput:
        """Frames and the video, for each video of the latents."""
        progress = NodeProgress(cls.hidden.unique_id, pipeline.family)
        form = DecodeRequest(method, tile_size, tile_overlap, frames_per_chunk)

        videos, clips, receipts = batch.videos_of(latent), [], []
        approx = folders.roots(folders.TINY_DECODER_KEYS)
        for video, part in zip(videos, batch.parts_of(progress, len(videos)), strict=True):
            latents = latent_format.from_core(pipeline, video, progress.notify)
            latents = stages.with_decode_noise(pipeline, latents, decode_timestep, decode_noise_scale, progress)
            clips.append(stages.decode(pipeline, latents, part, form=form, tiny_decoders=approx))
            receipts.append(decoded_receipt(latents, form))
            rate = Fraction(fps or latents.fps).limit_denominator(1001)
        frames = clips[0]
        size = f"{frames.shape[2]}x{frames.shape[1]}, {frames.shape[0]} frames at {float(rate):g} fps"
        progress.finish(size, f"{len(clips)} videos" if len(clips) > 1 else "", in_short(pipeline, "vae"))
        films = [saved.video(images, rate, receipt) for images, receipt in zip(clips, receipts, strict=True)]
        return io.NodeOutput(clips, films, ui=preview.clips(clips, float(rate), cls))
