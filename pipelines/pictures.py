"""Pictures fitted to a family's size: frames (F, H, W, 3) in 0..1 on the CPU, in 8 bits where its publisher rounds."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch.nn import functional

from ..compat.device.execution import picture_of, to_host
from ..compat.errors import InputError, require_choice
from ..compat.memory.parts import tell_once
from .base import ImageRequest, Progress
from .family import FITS, FamilySpec, Sizes
from .movie import through_h264
from .pipeline import Pipeline
from .settings import LARGEST_SIDE, SIDES, of_checkpoint, own_defaults, recipe_of, snap

FIRST_PASS = 0.6666666  # of the final sides. Source: Lightricks/LTX-Video 5260738 configs, ``downscale_factor``


def checked_frames(frames: torch.Tensor, subject: str) -> torch.Tensor:
    """``frames`` as fp32 on the CPU; raises InputError for no frames, alpha, or another shape than (F, H, W, 3)."""
    shape = tuple(frames.shape)
    if frames.ndim != 4 or 0 in shape:
        found, fix = f"{subject} of shape {shape}", "Connect an IMAGE with one frame or more."
        raise InputError(found, expected="frames (F, H, W, 3) with at least one frame", fix=fix)
    if shape[-1] == 4:
        found = f"{subject} has an alpha channel"
        fix = "Remove the alpha channel first, for example with Split Image with Alpha."
        raise InputError(found, expected="3 channels", fix=fix)
    if shape[-1] != 3:
        raise InputError(f"{subject} has {shape[-1]} channels", expected="3 channels", fix="Connect an RGB image.")
    return to_host(frames).float()


def checked_vision(vision: torch.Tensor, tokens: int, width: int) -> torch.Tensor:
    """SigLIP states (1, tokens, width) made elsewhere, fp32, on the CPU; raises InputError for another shape."""
    if tuple(vision.shape) != (1, tokens, width):
        found = f"a CLIP_VISION_OUTPUT of shape {tuple(vision.shape)}"
        fix = "Use CLIP Vision Encode with sigclip_vision_patch14_384, of one picture, without crop."
        raise InputError(found, expected=f"the shape {(1, tokens, width)}", fix=fix)
    return to_host(vision).float()


def fitted_size(family: FamilySpec, frames: torch.Tensor, width: int, height: int, fit: str) -> tuple[int, int]:
    """Width and height in pixels that the pictures are fitted to. With ``nearest bucket`` the aspect ratio is the
    picture's: ``width`` and ``height`` only give the area; without them one of the family's buckets is taken."""
    require_choice("fit", fit, FITS)
    size = snap(family, width, height, 1)
    if fit != "nearest bucket":
        return size.width, size.height
    ratio = frames.shape[2] / frames.shape[1]
    if family.sizes.buckets and not (width and height):
        rows, columns = frames.shape[1:3]
        tall, wide = min(reversed(family.sizes.buckets), key=lambda bucket: abs(rows * bucket[1] - columns * bucket[0]))
        return wide, tall
    area = size.width * size.height
    wide = snap(family, _clamped(math.sqrt(area * ratio)), size.height, 1).width
    tall = snap(family, size.width, _clamped(math.sqrt(area / ratio)), 1).height
    return wide, tall


def picture_size(pipeline: Pipeline, frames: torch.Tensor, width: int, height: int, fit: str) -> tuple[int, int]:
    """Width and height in pixels that pictures are encoded at: by :func:`fitted_size`, or, for ``nearest bucket`` with
    no size given, here or as the model's own default, by the family's ``nearest_size`` if it has one."""
    module, own = pipeline.spec.code, own_defaults(pipeline).keys() & SIDES
    if fit == "nearest bucket" and not (width and height) and module.nearest_size is not None and not own:
        wide, tall = module.nearest_size(pipeline, frames.shape[2], frames.shape[1])
        return int(wide), int(tall)
    return fitted_size(of_checkpoint(pipeline), frames, width, height, fit)


def video_size(pipeline: Pipeline, frames: torch.Tensor, width: int, height: int, fit: str) -> tuple[int, int, int]:
    """Width and height in pixels, and the count of frames, that a video (F, H, W, 3) is encoded at."""
    stride = pipeline.spec.sizes.stride
    wide, tall = fitted_size(pipeline.spec, frames, width or frames.shape[2], height or frames.shape[1], fit)
    return wide, tall, (frames.shape[0] - 1) // stride * stride + 1


def fitted(frames: torch.Tensor, width: int, height: int, fit: str, sizes: Sizes | None = None) -> torch.Tensor:
    """``frames`` at width x height: (F, height, width, 3), fp32, 0..1. ``stretch`` ignores the shape, ``pad`` adds
    black bars, ``crop`` and ``nearest bucket`` cut off the rest; the last in 8 bits, by the PIL filter of ``sizes``
    where a publisher has one."""
    rows, columns = frames.shape[1:3]
    if (rows, columns) == (height, width):
        return frames
    if sizes is not None and sizes.picture_filter and fit == FITS[0]:
        return torch.stack([_in_bytes(frame, width, height, sizes) for frame in frames])
    if fit == "stretch":
        return _resized(frames, width, height)
    scale = (min if fit == "pad" else max)(width / columns, height / rows)
    inner_width, inner_height = max(1, round(columns * scale)), max(1, round(rows * scale))
    scaled = _resized(frames, inner_width, inner_height)
    left, top = int((width - inner_width) / 2), int((height - inner_height) / 2)  # below 0 where it is cut off
    return functional.pad(scaled, (0, 0, left, width - inner_width - left, top, height - inner_height - top))


def prepared(
    pipeline: Pipeline, request: ImageRequest, fit: str, progress: Progress, own_shape: bool = True
) -> ImageRequest:
    """``request`` with its pictures at its size, prepared as the publisher does if ``prepare`` is set; the user is told
    what changed. A control clip is only fitted, at the size that its IC-LoRA was trained for: the video's over
    ``control_factor`` (InputError if uneven). ``own_shape`` is False where the size is a video's; an image encoder
    still sees the picture's. Source: Lightricks/ComfyUI-LTXVideo a77fb1d ``iclora.py``, ``easy_samplers.py``."""
    frames, how = request.frames, fit
    controls = request.control and "control" in pipeline.spec.recipes.effective
    factor = pipeline.model.control_factor if controls else 1
    multiple = factor * pipeline.spec.sizes.multiple
    misfits = [side for side in (request.width, request.height) if side % multiple]
    if factor > 1 and misfits:
        found = f"a control clip at 1/{factor} of {misfits[0]} pixels"
        expected = f"sides of the video that are multiples of {multiple}"
        raise InputError(found, expected=expected, fix="Set width and height so.")
    width, height = request.width // factor, request.height // factor
    if controls or not request.prepare:
        pictures, seen = fitted(frames, width, height, fit), None
        if request.prepare:
            tell_once(progress, "a control clip stays sharp, as published; earlier versions blurred and compressed it")
    else:
        family, ratio = of_checkpoint(pipeline), _final_ratio(pipeline, request.final_size, width, height)
        pictures, seen = as_published(family, frames, width, height, fit, progress, ratio), None
        if ratio and family.sizes.picture_crf and fit not in ("pad", "stretch"):
            tell_once(progress, "the picture is cut to the finished video's shape; earlier versions took the pass's")
        if not own_shape and fit == FITS[0]:
            seen = as_published(family, frames, *picture_size(pipeline, frames, 0, 0, fit), fit, progress)
        if family.sizes.picture_crf:
            how += ", blurred and compressed as its publisher does; without prepare it is not"
        elif family.sizes.picture_filter and fit == FITS[0]:
            how += f", {family.sizes.picture_filter.lower()} as its publisher; without prepare it resizes as before"
    if how != fit or tuple(frames.shape[1:3]) != (height, width):
        progress.notify(f"image {frames.shape[2]}x{frames.shape[1]} -> {width}x{height} ({how})")
    return replace(request, frames=pictures, seen=seen)


def _final_ratio(pipeline: Pipeline, final_size: tuple[int, ...], width: int, height: int) -> float:
    """Aspect ratio of a two-pass video: of ``final_size``, else as published if width x height is a pass's; else 0."""
    recipe, own, multiple = recipe_of(pipeline), of_checkpoint(pipeline).sizes.defaults, pipeline.spec.sizes.multiple
    if recipe is None or recipe.second is None:
        return 0.0
    wide, tall = final_size or (own.width, own.height)
    first = [int(side * FIRST_PASS) // multiple * multiple for side in (wide, tall)]
    return wide / tall if final_size or [width, height] in (first, [2 * side for side in first]) else 0.0


def as_published(
    family: FamilySpec, frames: torch.Tensor, width: int, height: int, fit: str, progress: Progress, ratio: float = 0.0
) -> torch.Tensor:
    """:func:`fitted` as the publisher does it. Frames that go through H.264 there are cut to aspect ``ratio`` (0: the
    size's), blurred, coded one by one, then resized; without an encoder, which the user is told, cut and resized.
    Source: Lightricks/LTX-Video 5260738 ltx_video/inference.py:60, pipelines/pipeline_ltx_video.py:740."""
    crf, (rows, columns) = family.sizes.picture_crf, frames.shape[1:3]
    if not crf or min(rows, columns) < 2:
        return fitted(frames, width, height, fit, family.sizes)
    if fit not in ("pad", "stretch"):
        ratio = ratio or width / height
        wide, tall = (int(rows * ratio), rows) if columns / rows > ratio else (columns, int(columns / ratio))
        wide, tall = max(2, wide), max(2, tall)
        left, top = (columns - wide) // 2, (rows - tall) // 2
        frames = frames[:, top : top + tall, left : left + wide]
    coded = [each for each in (_through_h264(frame, crf, progress.check) for frame in frames) if each is not None]
    if len(coded) == len(frames):
        frames = torch.stack(coded)
    else:
        progress.notify("the picture is not compressed as its publisher does: PyAV could not code it with x264")
    return fitted(frames, width, height, fit) if fit == "pad" else resized(frames, width, height)


def _through_h264(frame: torch.Tensor, crf: int, check: Callable[[], None]) -> torch.Tensor | None:
    """A frame (H, W, 3) in 0..1 after a 3 x 3 Gaussian blur and H.264, cut to even sides; None without an encoder."""
    check()
    gaussian = torch.tensor([-1.0, 0.0, 1.0]).square().mul(-0.5).exp()  # of deviation 1
    gaussian = gaussian / gaussian.sum()
    picture = functional.pad(frame.permute(2, 0, 1)[:, None], (1, 1, 1, 1), mode="reflect")
    blurred = functional.conv2d(picture, torch.outer(gaussian, gaussian)[None, None])[:, 0].permute(1, 2, 0)
    coded = through_h264((blurred * 255).to(torch.uint8), crf)
    return None if coded is None else coded.float() / 255


def signed(frames: torch.Tensor) -> torch.Tensor:
    """Frames (F, H, W, 3) in 0..1 as a VAE's input: (1, 3, F, H, W) in -1..1."""
    return (frames.permute(3, 0, 1, 2)[None] * 2.0 - 1.0).contiguous()


def _resized(frames: torch.Tensor, width: int, height: int) -> torch.Tensor:
    """Frames (F, H, W, 3) at another size: bicubic, antialiased, clamped to 0..1."""
    picture = frames.permute(0, 3, 1, 2)
    scaled = functional.interpolate(picture, size=(height, width), mode="bicubic", antialias=True, align_corners=False)
    return scaled.clamp(0, 1).permute(0, 2, 3, 1).contiguous()


def _in_bytes(frame: torch.Tensor, width: int, height: int, sizes: Sizes) -> torch.Tensor:
    """One frame (H, W, 3) in 0..1, resized and cut by PIL in 8 bits, in the order and with the filter of ``sizes``.
    Source: lllyasviel/FramePack 97fe5db diffusers_helper/utils.py:42; torchvision's Resize and CenterCrop;
    SkyworkAI/SkyReels-V1 cb0ceaa skyreelsinfer/pipelines/pipeline_skyreels_video.py:17."""
    import numpy
    from PIL import Image

    picture, filtered = picture_of(frame), Image.Resampling[sizes.picture_filter]
    if sizes.picture_cut:
        narrow = picture.height / picture.width > height / width
        wide = picture.width if narrow else int(picture.height * width / height)
        tall = int(picture.width * height / width) if narrow else picture.height
        left, top = (picture.width - wide) / 2, (picture.height - tall) / 2
        picture = picture.crop((left, top, left + wide, top + tall)).resize((width, height), filtered)
        return torch.from_numpy(numpy.array(picture)).float() / 255
    scale = max(width / picture.width, height / picture.height)
    sides = picture.width * scale, picture.height * scale
    wide, tall = (int(side + 1e-6) if sizes.picture_floor else round(side) for side in sides)  # 1e-6: 63.999... is 64
    left, top, right, low = (wide - width) / 2, (tall - height) / 2, (wide + width) / 2, (tall + height) / 2
    cut = picture.resize((wide, tall), filtered).crop((left, top, right, low))
    return torch.from_numpy(numpy.array(cut)).float() / 255


def _clamped(side: float) -> int:
    """``side`` in pixels within what :func:`snap` accepts, for pictures that are very wide or tall."""
    return min(max(round(side), 64), LARGEST_SIDE)


def resized(frames: torch.Tensor, width: int, height: int) -> torch.Tensor:
    """Frames (F, H, W, 3) at the final size of a second pass: bilinear, one frame at a time to save memory."""
    made = frames.new_empty(frames.shape[0], height, width, frames.shape[3])
    for index, frame in enumerate(frames):
        picture = frame.permute(2, 0, 1)[None]
        made[index] = functional.interpolate(picture, size=(height, width), mode="bilinear")[0].permute(1, 2, 0)
    return made
