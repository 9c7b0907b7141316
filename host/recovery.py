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
_saved_lately: deque[tuple[Any, ...]] = deque(maxlen=32)  # marks of latents that were kept


def listing() -> list[SavedLatents]:
    return recovery.listing(saved_folder())


def load(name: str, notify: Callable[[str], None] = log.info, family: str = "") -> dict[str, Any]:
    """The kept LATENT of an id, or for ``newest`` the newest of ``family`` or of all; CheckpointError for none."""
    latent = recovery.load(saved_folder(), name, notify, family)
    more = latent.pop(NESTED, None)
    if more:
        latent["samples"] = comfy.nested_tensor.NestedTensor([latent["samples"], *more])
    return latent


def save_core_samples(patcher: Any, family: str = "", fps: float = 0.0) -> None:
    """Have every sampling with ``patcher`` or a clone of it saved, after a cancel or a failure its last estimate."""

    def sampled(executor: Any, *args: Any, **kwargs: Any) -> Any:
        guider, last = executor.class_obj, list[Any]()  # the estimate of the last step, and which step it was
        call = inspect.signature(executor.original).bind(*args, **kwargs)
        call.apply_defaults()
        given, callback = call.arguments, call.arguments.get("callback")

        def noted(step: int, estimate: torch.Tensor, x: torch.Tensor, total: int) -> Any:
            samples = guider.inner_model.process_latent_out(estimate.to(torch.float32))
            last[:] = to_host(samples), f"step {step + 1} of {total}"
            return None if callback is None else callback(step, estimate, x, total)

        given["callback"] = noted
        try:
            output = executor(*call.args, **call.kwargs)
        except BaseException:
            if last:
                _keep(guider, last[0], given, family, fps, last[1])
            raise
        _keep(guider, output, given, family, fps, "")
        return output

    patcher.remove_wrappers_with_key(WrappersMP.OUTER_SAMPLE, WRAPPER)
    patcher.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, WRAPPER, sampled)


def save_for_decode(samples: torch.Tensor) -> None:
    try:
        mark, made = _mark(samples), Sampled([samples], "decode")
        if mark not in _saved_lately and recovery.save_plain_recovery(saved_folder(), made, log.warning):
            _saved_lately.append(mark)
    except Exception as error:  # a disk, or latents of another kind: it must not cost the decode
        log.warning("AnyGPU: latents could not be saved: %s", error)


def _mark(samples: torch.Tensor) -> tuple[Any, ...]:
    return *samples.shape, zlib.crc32(to_host(samples).float().contiguous().numpy().tobytes())


def _keep(
    guider: Any, output: torch.Tensor, given: Mapping[str, Any], family: str, fps: float, unfinished: str
) -> None:
    try:
        model, shapes = guider.model_patcher.model, given.get("latent_shapes")
        latents = comfy.utils.unpack_latents(output, shapes) if shapes and len(shapes) > 1 else [output]
        rough, shape = model.latent_format, latents[0].shape
        frames = height = width = 0
        if len(shape) in (4, 5):
            height, width = (side * rough.spacial_downscale_ratio for side in shape[-2:])
            frames = (shape[2] - 1) * rough.temporal_downscale_ratio + 1 if len(shape) == 5 else 1
        name, seed, kind = family or type(model).__name__, int(given.get("seed") or 0), type(rough).__name__
        more = {"fps": fps, "latent_format": kind, "unfinished": unfinished}
        made = Sampled(latents, name, seed, frames=frames, height=height, width=width, **more)
        if recovery.save_plain_recovery(saved_folder(), made, log.warning):
            _saved_lately.append(_mark(latents[0]))
    except Exception as error:  # of whatever another pack has put here: it must not cost the sampling
        log.warning("AnyGPU: latents could not be saved: %s", error)


def choices() -> list[str]:
    return [NEWEST, *(item.id for item in listing())]


def stamp(name: str) -> tuple[str, int]:
    path = recovery.path_of(saved_folder(), name)
    return path.stem, path.stat().st_mtime_ns


def thumbnail(name: str) -> bytes | None:
    """A small JPEG of the middle frame by the family's rough colours, None without; CheckpointError for no such id."""
    item = next((item for item in listing() if item.id == name), None)
    samples = recovery.load(saved_folder(), name, log.info)["samples"]
    kind = getattr(comfy.latent_formats, item.latent_format if item else "", None)
    plain = comfy.latent_formats.LatentFormat
    known = kind if isinstance(kind, type) and issubclass(kind, plain) else plain
    rough = latent_format_of(item.family if item else None) or known()
    previewer = rough_previewer(rough)
    if previewer is None or samples.ndim not in (4, 5) or previewer.latent_rgb_factors.shape[1] != samples.shape[1]:
        return None
    samples = rough.process_in(samples)
    middle = samples if samples.ndim == 4 else samples[:, :, samples.shape[2] // 2]
    picture, target = previewer.decode_latent_to_preview(middle), io.BytesIO()
    scale = THUMBNAIL_PIXELS / max(picture.size)
    picture.resize([max(1, round(side * scale)) for side in picture.size]).save(target, "JPEG", quality=85)
    return target.getvalue()
