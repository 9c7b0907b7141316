"""The latents of every sampling, core's samplers included, in ComfyUI's user directory: their list, and a picture."""

from __future__ import annotations

import inspect
import io
import logging
import zlib
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import comfy.latent_formats
import comfy.nested_tensor
import comfy.utils
import torch
from comfy.patcher_extension import WrappersMP

from ..compat.device.execution import to_host
from ..pipelines.latents import recovery
from ..pipelines.latents.recovery import Sampled, SavedLatents
from ..pipelines.latents.store import NESTED
from .families import latent_format_of
from .folders import saved_folder
from .preview import rough_previewer

log = logging.getLogger(__name__)
NEWEST = "newest"
THUMBNAIL_PIXELS = 160
WRAPPER = "anygpu_recovery"
_saved_lately: deque[tuple[Any, ...]] = deque(maxlen=32)  # shapes and checksums, by :func:`_mark`


def listing() -> list[SavedLatents]:
    return recovery.listing(saved_folder())


def load(name: str, notify: Callable[[str], None] = log.info, family: str = "") -> dict[str, Any]:
    """The saved LATENT ``name``, or for ``newest`` the last of ``family``, if any; CheckpointError without one."""
    latent = recovery.load(saved_folder(), name, notify, family)
    more = latent.pop(NESTED, None)
    if more:
        latent["samples"] = comfy.nested_tensor.NestedTensor([latent["samples"], *more])
    return latent


def save_core_samples(patcher: Any, family: str = "", fps: float = 0.0) -> None:
    """Save latents of every later sampling by ``patcher`` or a clone; after a cancel or failure the last estimate."""

    def sampled(executor: Any, *args: Any, **kwargs: Any) -> Any:
        guider, last = executor.class_obj, list[Any]()  # estimate of the last step, and ``step 3 of 20``
        call = inspect.signature(executor.original).bind(*args, **kwargs)
        call.apply_defaults()
        given, callback = call.arguments, call.arguments.get("callback")

        def note_step(step: int, estimate: torch.Tensor, x: torch.Tensor, total: int) -> Any:
            samples = guider.inner_model.process_latent_out(estimate.to(torch.float32))
            last[:] = to_host(samples), f"step {step + 1} of {total}"
            return None if callback is None else callback(step, estimate, x, total)

        given["callback"] = note_step
        try:
            output = executor(*call.args, **call.kwargs)
        except BaseException:
            if last:
                _save_samples(guider, last[0], given, family, fps, unfinished=last[1])
            raise
        _save_samples(guider, output, given, family, fps)
        return output

    patcher.remove_wrappers_with_key(WrappersMP.OUTER_SAMPLE, WRAPPER)
    patcher.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, WRAPPER, sampled)


def save_for_decode(samples: torch.Tensor) -> None:
    """Save latents before a decode, unless their sampling was saved lately; failures are logged."""
    try:
        mark, made = _mark(samples), Sampled([samples], "decode")
        if mark not in _saved_lately and recovery.save_plain_recovery(saved_folder(), made, log.warning):
            _saved_lately.append(mark)
    except Exception as error:  # of the disk, or other latents: it must not end the decode
        log.warning("AnyGPU: latents could not be saved: %s", error)


def _mark(samples: torch.Tensor) -> tuple[Any, ...]:
    return *samples.shape, zlib.crc32(to_host(samples).float().contiguous().numpy().tobytes())


def _save_samples(
    guider: Any, output: torch.Tensor, given: Mapping[str, Any], family: str, fps: float, unfinished: str = ""
) -> None:
    """Save the latents ``output`` of core's sampling; ``given`` are its arguments by name. Failures are logged."""
    try:
        model, shapes = guider.model_patcher.model, given.get("latent_shapes")
        latents = comfy.utils.unpack_latents(output, shapes) if shapes and len(shapes) > 1 else [output]
        latent_format, shape = model.latent_format, latents[0].shape
        frames = height = width = 0
        if len(shape) in (4, 5):
            height, width = (side * latent_format.spacial_downscale_ratio for side in shape[-2:])
            frames = (shape[2] - 1) * latent_format.temporal_downscale_ratio + 1 if len(shape) == 5 else 1
        name, seed, kind = family or type(model).__name__, int(given.get("seed") or 0), type(latent_format).__name__
        more = {"fps": fps, "latent_format": kind, "unfinished": unfinished}
        made = Sampled(latents, name, seed, frames=frames, height=height, width=width, **more)
        if recovery.save_plain_recovery(saved_folder(), made, log.warning):
            _saved_lately.append(_mark(latents[0]))
    except Exception as error:  # from another pack's model or guider, say: must not end the sampling
        log.warning("AnyGPU: latents could not be saved: %s", error)


def choices() -> list[str]:
    return [NEWEST, *(item.id for item in listing())]


def stamp(name: str) -> tuple[str, int]:
    path = recovery.path_of(saved_folder(), name)
    return path.stem, path.stat().st_mtime_ns


def thumbnail(name: str) -> bytes | None:
    """A small JPEG of the middle frame by core's latent2rgb, None if no factors fit; CheckpointError for no such id."""
    item = next((item for item in listing() if item.id == name), None)
    samples = recovery.load(saved_folder(), name, log.info)["samples"]
    kind = getattr(comfy.latent_formats, item.latent_format if item else "", None)
    plain = comfy.latent_formats.LatentFormat
    named = kind if isinstance(kind, type) and issubclass(kind, plain) else plain
    latent_format = latent_format_of(item.family if item else None) or named()
    previewer = rough_previewer(latent_format)
    if previewer is None or samples.ndim not in (4, 5) or previewer.latent_rgb_factors.shape[1] != samples.shape[1]:
        return None
    samples = latent_format.process_in(samples)
    middle = samples if samples.ndim == 4 else samples[:, :, samples.shape[2] // 2]
    picture, target = previewer.decode_latent_to_preview(middle), io.BytesIO()
    scale = THUMBNAIL_PIXELS / max(picture.size)
    picture.resize([max(1, round(side * scale)) for side in picture.size]).save(target, "JPEG", quality=85)
    return target.getvalue()
