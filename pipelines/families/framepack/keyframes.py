"""The start and the end image of a FramePack video: what the VAE and SigLIP say of them, and what a seed draws."""

from __future__ import annotations

import torch

from ....compat.device.execution import checked_layers, inputs_placed, picture_of, to_host
from ....compat.errors import InputError
from ...base import FramePackSettings, ImageCondition, ImageRequest, Progress, ProgressStage
from ...pictures import checked_vision
from ...pipeline import Pipeline
from ...vae.fallback import encoded_moments

START, END, VISION = "start", "end", "vision"
PLACES = {0: START, -1: END}


def encode_image(pipeline: Pipeline, request: ImageRequest, progress: Progress) -> ImageCondition:
    """A start image (``frame`` 0), or an end image (``frame`` -1); ``previous`` holds the other one.

    ``start`` and ``end`` are mean and log variance (1, 32, 1, H / 8, W / 8): latents are drawn when the video is
    sampled, by its seed, as upstream does. ``vision`` are the SigLIP states of the start image (1, 729, 1152); upstream
    also computes those of the end image, but does not use them.

    Raises:
        InputError: another frame, more than one picture, or a place that is taken.
    """
    place = PLACES.get(request.frame)
    if place is None:
        raise InputError(
            f"an image at frame {request.frame} of FramePack",
            expected="frame 0 (start image) or -1 (end image)",
            fix="Set frame to 0, or to -1 with the start image's condition as previous.",
        )
    if request.frames.shape[0] != 1:
        raise InputError(
            f"{request.frames.shape[0]} frames as the {place} image",
            expected="one image",
            fix="Pick one frame, for example with Image From Batch.",
        )
    known = {} if request.previous is None else dict(request.previous.tensors)
    if place in known:
        raise InputError(
            f"a second {place} image", expected="one start and one end image", fix="Set frame of the end image to -1."
        )
    if place == START and request.strength != 1.0:
        progress.notify("strength has no effect on the start image of FramePack")
    if place == END and request.vision is not None:
        progress.notify("vision has no effect on the end image of FramePack")
    known[place] = encoded_moments(pipeline, request.frames, progress, ProgressStage("encoding", "image"))
    if place == START:
        known[VISION] = _vision(pipeline, request, progress)
    anchors = () if request.previous is None else request.previous.anchors
    anchors = (*anchors, (place, request.frame, request.strength))
    return ImageCondition("framepack", known, request.width, request.height, anchors=anchors)


def end_strength(image: ImageCondition | None, framepack: FramePackSettings, progress: Progress) -> float:
    """Weight of the end image; 0 without one. A start image there must be."""
    if image is None or START not in image.tensors:
        raise InputError(
            "no start image for FramePack",
            expected="an image condition with an image at frame 0",
            fix="Connect AnyGPU Encode Image with the start image.",
        )
    if END not in image.tensors:
        if framepack.end_strength != 1.0:
            progress.notify("end_strength has no effect without an end image")
        return 0.0
    return framepack.end_strength * next(strength for name, _, strength in image.anchors if name == END)


def drawn(pipeline: Pipeline, image: ImageCondition, place: str, generator: torch.Generator) -> torch.Tensor:
    """Latents (1, 16, 1, H / 8, W / 8) of the ``start`` or ``end`` image in the transformer's space, on the CPU."""
    from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

    latents: torch.Tensor = DiagonalGaussianDistribution(image.tensors[place]).sample(generator)
    return latents * float(pipeline.configs["vae"]["scaling_factor"])


def _vision(pipeline: Pipeline, request: ImageRequest, progress: Progress) -> torch.Tensor:
    """States of the image encoder (1, N, D), or those that were given in their place."""
    config = pipeline.configs["image_encoder"]
    config = config.get("vision_config", config)
    side = int(config.get("image_size", 384)) // int(config.get("patch_size", 14))
    if request.vision is not None:
        width = int(pipeline.configs["transformer"].get("image_proj_dim", 1152))
        return checked_vision(request.vision, side * side, width)
    # In 8 bits, as the publisher's application: floats, which diffusers gives the processor, are cut off to other ones.
    given = pipeline.tools["feature_extractor"](images=picture_of(request.frames[0]), return_tensors="pt")
    hold, device = pipeline.offloader.hold("image_encoder", 0, progress), pipeline.offloader.device_of("image_encoder")
    with hold as encoder, checked_layers(encoder, progress.check), inputs_placed(encoder, device):
        states = encoder(given["pixel_values"].to(encoder.dtype)).last_hidden_state
        progress.step(1, 1, ProgressStage("encoding", "image for SigLIP"))
    return to_host(states).float()
