"""Runs a VAE for every family: checks the output and, if allowed, tries again another way."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...compat import output_check
from ...compat.device.execution import HOST, checked_layers, checked_parts, generator_for, to_host
from ...compat.device.facts import device_fault, empty_cache
from ...compat.device.failures import DEVICE_ERRORS, KERNEL, MEMORY, failure_kind
from ...compat.device.quirks import convolution_switches
from ...compat.doctor import examine, not_finite, one_colour
from ...compat.errors import UnsupportedError, first_line, sentence
from ...compat.memory.parts import Undo
from ...compat.memory.transfer import Transfer, casts_wrongly, transfer_for
from ...compat.output_check import BROKEN, CAST, COLOUR, InvalidOutputError, Validator, require_finite
from ...compat.transforms.order import replace_attention
from ..base import Latents, Progress, ProgressStage, SubProgress
from ..pictures import signed
from ..pipeline import Pipeline
from ..sizes import SPARE
from .plan import FULL, ON_CPU, STRIDE, DecodeRequest, Ladder, ladder_for
from .tiled import HeldDecoder, RegionTask, ResumableDecode, decoded_together

DECODING = ProgressStage("decoding")
LAYERS_PER_REPORT = 8
LAYOUTS = {4: (torch.channels_last,), 5: (torch.channels_last_3d,)}
TILING = tuple(f"tile_{a}_{b}" for a in ("sample_min", "sample_stride", "latent_min") for b in ("height", "width"))
Pass = Callable[[Any, Transfer], Tensor]
Prepare = Callable[[Any, Transfer], tuple[Tensor, Tensor | None]]


class VaeRunner:
    """The VAE of a pipeline for the length of one stage; a later pass begins with the method that worked in the last.
    Where a result cannot be right or the device fails, the next method of the plan is tried, and the user told.
    Precision and device change only where the user left the precision to ``auto``; tiles only where the method is not
    ``full``. Parts of a decode that are done when memory runs out are kept, and the next method does the rest."""

    def __init__(self, plan: Ladder, progress: Progress) -> None:
        self.plan, self.pipeline, self.progress = plan, plan.pipeline, progress
        self.device, self.policy = plan.device, plan.policy
        self.coder = "decoder" if plan.decodes else "encoder"
        self._open: ExitStack | None = None
        self._vae: Any = None
        self._transfer = Transfer(HOST, torch.float32)
        self._alone = False  # whether all other parts were taken off the device
        limit = self.policy.tile_pixels
        if plan.form.method == FULL and 0 < limit < max(plan.size[1:]):
            progress.notify(f"method full: on this GPU pictures with a side above {limit} pixels may crash the process")

    def __enter__(self) -> VaeRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def decode(
        self,
        samples: Tensor,
        progress: Progress | None = None,
        prepare: Prepare | None = None,
        noise: bytes | None = None,
    ) -> Tensor:
        """Video (1, 3, F, H, W) in -1..1, fp32, on the CPU, of latents on the CPU in the VAE's own space. ``prepare``,
        called with the VAE and its transfer, returns the latents to decode instead of ``samples``, on the CPU, and the
        timestep, on the device or None; ``noise`` is the generator's state for layers that draw noise."""
        require_finite(samples, "latents")
        plan, watch = self.plan, progress or self.progress
        flat = output_check.is_flat(samples)  # flat latents may well decode to one colour

        def validate(video: Tensor) -> str:
            fault = output_check.fault_in_frames(video, plan.ratios[0])
            return "" if flat and fault == COLOUR else fault

        group = self.pipeline.run.group
        work = ResumableDecode(
            latents=samples,
            ratios=plan.ratios,
            guard=partial(self._region_watched, watch),
            validate=self._validated(validate),
            smaller=partial(self._smaller_tile, watch),
            check=watch.check,
            together=None if group is None else partial(decoded_together, group),
            noise=noise,
        )

        def run(vae: Any, transfer: Transfer) -> Tensor:
            work.latents, time = prepare(vae, transfer) if prepare is not None else (samples, None)
            return work.frames(vae, transfer, plan.method, time)

        video = self._with_retries(run, validate, str(DECODING), watch, work)
        seams = f"; tiles differ by at most {work.apart * 127.5:.1f} of 255 where they overlap" if work.apart else ""
        if not plan.method.whole or plan.form.method == ON_CPU:
            watch.notify(f"decoded {plan.method}{seams}")
        return video

    def _region_watched(self, watch: Progress, index: int, count: int) -> AbstractContextManager[None]:
        """Report the decoder's layers as part ``index`` of ``count``; streamed, a layer runs once for each tile, which
        over a decoder's four resolutions is about a third of the tiles of the last."""
        side = self.plan.method.stream or max(self.plan.size[1:])
        tiles = max(1, math.prod(-(-edge // side) for edge in self.plan.size[1:]) // 3)
        return watched(self._vae.decoder, SubProgress(watch, index, count, "part"), DECODING, tiles)

    def _smaller_tile(self, watch: Progress, side: int) -> int:
        """Make the plan's method stream the next tile smaller than ``side``; returns its side, 0 where none is left."""
        after = next((each.stream for each in self.plan.methods if 0 < each.stream < side), 0)
        if after:
            watch.notify(f"decoding {self.plan.method} ran out of memory: continuing over {after} pixels")
            self.plan.method = replace(self.plan.method, stream=after)
        return after

    def region(self, task: RegionTask) -> Tensor:
        """Frames of the region ``task``, which a group's leader hands out, by its method alone, without others."""
        if self._open is None or self.plan.method != task.method:
            self._close()
            self.plan.method = task.method
            self._enter()
        work = ResumableDecode(task.latents, self.plan.ratios, check=self.progress.check, noise=task.noise)
        time = None if task.time is None else self._transfer.to_device(task.time)
        return work.region(task, HeldDecoder(self._vae, self._transfer, task.method, time))

    def encode(self, run: Pass, stage: ProgressStage) -> Tensor:
        """Mean and log variance (1, 2C, T, H, W), fp32, on the CPU, as ``run`` makes them on the device."""

        def validate(moments: Tensor) -> str:
            return output_check.fault_in_latents(moments) or output_check.fault_in_latents(moments.chunk(2, dim=1)[0])

        def watching(vae: Any, transfer: Transfer) -> Tensor:
            with watched(vae.encoder, self.progress, stage):
                return run(vae, transfer)

        return self._with_retries(watching, validate, str(stage), self.progress)

    def _with_retries(
        self, run: Pass, validate: Validator, stage: str, progress: Progress, work: ResumableDecode | None = None
    ) -> Tensor:
        """The result of the first method that succeeds, each change told to the user; a shortage first takes the other
        parts off the device, once. When none is left, :meth:`_final_error` is raised, or the last error. ``work``
        begins anew unless memory ran out and the next method can go on from it."""
        plan = self.plan
        while True:
            try:
                return self._single_pass(run, validate, stage, progress)
            except (*DEVICE_ERRORS, InvalidOutputError) as error:
                kind, text = failure_kind(error), first_line(error)
                self._close()
                others = plan.others() if kind == MEMORY and not self._alone else []
                after = plan.method if others else plan.follow(kind, text)
                if after is None:
                    final_error = self._final_error(error, kind, text, stage, self._first_fault(run, text, work))
                    if final_error is None:
                        raise
                    raise final_error from error
            # Outside the block above, whose error holds every tensor of the failed method.
            gc.collect()
            self._alone = self._alone or bool(others)
            for name in others:
                self.pipeline.offloader.release(name)
            empty_cache(self.device)
            if work is not None and (kind != MEMORY or (after.on_host and plan.causal)):
                work.begin()  # what was computed wrongly is not kept, nor what the layers of another copy remember
            what = {MEMORY: "ran out of memory", KERNEL: f"failed ({text})"}.get(kind, f"gave {text}")
            again = f"without {', '.join(others)} on the device" if others else str(after)
            progress.notify(f"{stage} {plan.method} {what}: again {again}")
            plan.method = after

    def _single_pass(self, run: Pass, validate: Validator, stage: str, progress: Progress) -> Tensor:
        """The result of ``run`` by the method under way; raises InvalidOutputError for one that cannot be right. One
        colour in fp32 on the CPU is believed, and the user told. Success without MIOpen is saved for later runs."""
        if self._open is None:
            self._enter()
        with checked_parts(getattr(self._vae, self.coder), self._validated(validate)):
            result = self._transfer.to_host_fp32(run(self._vae, self._transfer))
        fault = validate(result)
        if fault == COLOUR and self._most_exact():
            progress.notify(f"{stage} gave {fault}, in fp32 on the CPU too: the latents may be empty")
        elif fault:
            raise InvalidOutputError(fault)
        if not self.plan.method.library and self.pipeline.device.probes is not None:
            self.pipeline.device.probes.remember(self.plan.learned, lambda: True)
        return result

    def _validated(self, validate: Validator) -> Validator:
        """``validate`` for a part of the output: broken values always count, other faults only while a more exact
        method may still be tried, since a part may be flat in a good video."""

        def validated(part: Tensor) -> str:
            fault = validate(part)
            return fault if fault == BROKEN or (self.plan.automatic and not self._most_exact()) else ""

        return validated

    def _most_exact(self) -> bool:
        method = self.plan.method
        return method.dtype is torch.float32 and (method.on_host or self.device.type == HOST.type)

    def _enter(self) -> None:
        """Bring the VAE where the method wants it, with everything around it set; undone by :meth:`_close`. Raises
        InvalidOutputError on a device that casts this dtype wrongly."""
        method, pipeline = self.plan.method, self.pipeline
        with ExitStack() as stack:
            stack.enter_context(convolution_switches(self.policy, method.library))
            if method.on_host:
                self._transfer, self._vae = Transfer(HOST, method.dtype), _own_copy(pipeline, self.progress)
            else:
                transfer = transfer_for(self.device, method.dtype)
                self._transfer = replace(transfer, memory_stats=pipeline.offloader.memory_stats)
                if self.policy.contiguous_weights:
                    make_contiguous(pipeline.parts.read("vae", self.progress))
                if casts_wrongly(self.device, method.dtype):
                    # Norms inside the VAE cast too: the picture would be finite, colourful and wrong.
                    raise InvalidOutputError(CAST)
                needed = int(SPARE * self.plan.needed_bytes(method))
                if method.dtype is pipeline.precision.vae:
                    hold = pipeline.offloader.hold("vae", needed, self.progress)
                else:
                    wider = method.dtype.itemsize // pipeline.precision.vae.itemsize
                    hold = _in_fp32(pipeline, needed * wider, self.progress)
                self._vae = stack.enter_context(hold)
            stack.enter_context(tiled(self._vae, method.tile))
            self._open = stack.pop_all()

    def _close(self) -> None:
        stack, self._open, self._vae = self._open, None, None
        if stack is not None:
            stack.close()

    def _first_fault(self, run: Pass, text: str, work: ResumableDecode | None) -> str:
        """The layer in which the last method first goes wrong, for a sentence; empty where none can be told."""
        if text not in (BROKEN, COLOUR):
            return ""
        if work is not None:
            work.begin()
        try:
            self._enter()
            networks = nn.ModuleDict({"vae": self._vae})
            fault = not_finite if text == BROKEN else one_colour
            finding = examine(networks, lambda: run(self._vae, self._transfer), fault)
        except (*DEVICE_ERRORS, InvalidOutputError):  # the error is told without a layer
            return ""
        finally:
            self._close()
        return f", {finding}" if finding is not None else ""

    def _final_error(self, error: BaseException, kind: str, text: str, stage: str, layer: str) -> BaseException | None:
        """The error when nothing is left to try after ``error``, whose first line is ``text``: torch's own class where
        memory ran out. None where ``error`` itself says it best. ``layer`` ends its sentence."""
        plan, on_host = self.plan, self.device.type == HOST.type
        if kind == MEMORY:
            advice = "decode again with method auto" if plan.form.method == FULL else "make a smaller or shorter video"
            if not (on_host or plan.method.on_host) and self.pipeline.offloader.mode in ("none", "model"):
                advice = f"choose offload group on the load node, or {advice}"
            found = f"{text}; no room for {stage} {plan.method}"
            return torch.OutOfMemoryError(sentence(found, "more free memory", f"The input is kept: {advice}."))
        if not kind or (kind == KERNEL and (on_host or device_fault(self.device))):
            return None
        if kind == KERNEL:
            what, expected, fix = f"failed ({text})", "a VAE that runs here", "Update torch or the driver"
        else:
            what, expected = f"gave {text}", "finite values that are not all the same"
            fix = "Sample again in fp32, or download the VAE again"
        if not plan.automatic and plan.method.dtype is not torch.float32:
            fix = "Choose precision auto or fp32 on the load node"
        found = f"the VAE {what} while {stage} {plan.method}{layer}"
        return UnsupportedError(found, expected=expected, fix=f"{fix}; the input is kept.")


@contextmanager
def watched(module: nn.Module, progress: Progress, stage: ProgressStage, times: int = 1) -> Iterator[None]:
    """Report every eighth layer that runs, of layers that run about ``times`` each; a cancel is obeyed before any."""
    total = times * sum(1 for layer in module.modules() if next(layer.children(), None) is None)
    count = 0

    def called() -> None:
        nonlocal count
        progress.check()
        count += 1
        if count % LAYERS_PER_REPORT == 0:
            progress.step(min(count, total), total, stage)

    with checked_layers(module, called):
        yield
    progress.step(total, total, stage)


def decoding(
    pipeline: Pipeline, shape: torch.Size | tuple[int, ...], progress: Progress, form: DecodeRequest | None = None
) -> VaeRunner:
    """Decoding of a ``shape`` (1, C, T, H, W); ``auto`` begins as the family advises. Raises as :func:`ladder_for`."""
    return VaeRunner(ladder_for(pipeline, (shape[2], shape[3], shape[4]), form or DecodeRequest()), progress)


def decode(pipeline: Pipeline, latents: Latents, progress: Progress, form: DecodeRequest | None = None) -> Tensor:
    """Frames (F, H, W, 3) in 0..1 of latents that are in the VAE's own space; ``form`` None is ``auto``."""
    with decoding(pipeline, latents.samples.shape, progress, form) as passes:
        return unsigned(passes.decode(latents.samples))


def encoded_moments(
    pipeline: Pipeline, frames: Tensor, progress: Progress, stage: ProgressStage, tile: int = 0, run: Pass | None = None
) -> Tensor:
    """Mean and log variance (1, 2C, T, H, W), fp32, on the CPU, of ``frames`` (F, H, W, 3) in 0..1. ``stage`` is for a
    sentence, such as ``encoding video``; ``tile`` is the family's advice in pixels, 0 for whole; ``run`` replaces
    ``vae.encode`` and returns the moments on the device."""
    count, rows, columns = frames.shape[:3]
    plan = Ladder(pipeline=pipeline, coder="encoder", size=(count, rows, columns), form=DecodeRequest(), advised=tile)

    def usual(vae: Any, transfer: Transfer) -> Tensor:
        return vae.encode(transfer.to_device(signed(frames))).latent_dist.parameters

    with VaeRunner(plan, progress) as passes:
        return passes.encode(run or usual, stage)


def encoded(
    pipeline: Pipeline, frames: Tensor, seed: int, progress: Progress, mode: bool = False, tile: int = 0
) -> Tensor:
    """Latents (1, C, T, H, W) in the VAE's own space, fp32, on the CPU: a draw by ``seed``, with ``mode`` the mean."""
    from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

    moments = encoded_moments(pipeline, frames, progress, ProgressStage("encoding", "video"), tile)
    distribution = DiagonalGaussianDistribution(moments)
    return distribution.mode() if mode else distribution.sample(generator_for(seed))


def unsigned(video: Tensor) -> Tensor:
    """A VAE's output (1, 3, F, H, W) in -1..1 as frames (F, H, W, 3) in 0..1, fp32, on the CPU."""
    return to_host((video[0].float() / 2 + 0.5).clamp(0, 1).permute(1, 2, 3, 0).contiguous())


@contextmanager
def tiled(vae: Any, tile: int) -> Iterator[None]:
    """``vae`` working in tiles of ``tile`` pixels, or whole for 0; its own settings come back afterwards."""
    ratio = int(getattr(vae, "spatial_compression_ratio", 0) or vae.config.get("spatial_compression_ratio", 8))
    # A stride that is not a whole number of latents would tear the tiles apart.
    stride = max(ratio, int(tile * STRIDE) // ratio * ratio)
    sizes = {"stride": stride, "latent": tile // ratio, "sample": tile}
    with Undo() as undo:
        undo.set(vae, "use_tiling", tile > 0)
        for name in (name for name in TILING if tile and hasattr(vae, name)):
            undo.set(vae, name, next(sizes[kind] for kind in sizes if kind in name))
        yield


def make_contiguous(module: nn.Module) -> int:
    """Lay out the weights of ``module`` in torch's plain layouts and return how many changed; values stay."""
    count = 0
    with torch.inference_mode(False), torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            layouts = (torch.contiguous_format, *LAYOUTS.get(tensor.ndim, ()))
            if tensor.device.type != "meta" and not any(tensor.is_contiguous(memory_format=each) for each in layouts):
                tensor.data, count = tensor.data.contiguous(), count + 1
    return count


@contextmanager
def _in_fp32(pipeline: Pipeline, needed: int, progress: Progress) -> Iterator[nn.Module]:
    """The VAE held in fp32, its weights widened on the host; afterwards it has the old ones again, off the device."""
    transfer = transfer_for(pipeline.offloader.device_of("vae"), pipeline.precision.vae)
    pipeline.offloader.release("vae")
    module = pipeline.parts.read("vae", progress)
    host_weights = {name: tensor.data for name, tensor in _named(module)}
    try:
        with torch.inference_mode(False), torch.no_grad():
            for name, tensor in _named(module):
                tensor.data = transfer.to_host_fp32(host_weights[name])
        with pipeline.offloader.hold("vae", needed, progress) as vae:
            yield vae
    finally:
        pipeline.offloader.release("vae")
        with torch.inference_mode(False), torch.no_grad():
            for name, tensor in _named(module):  # by name: accelerate puts other objects in their place
                tensor.data = host_weights[name]


def _named(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def _own_copy(pipeline: Pipeline, progress: Progress) -> nn.Module:
    """A second VAE, read from disk, in fp32 on the CPU: the first one's offload hooks would move it to the device. Of
    the rewrites it gets that of attention alone, whose stock mask of 720p is 20 GB in fp32."""
    module = pipeline.parts.readers["vae"](progress).float()
    replace_attention(module, _attend)
    return module


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal)
