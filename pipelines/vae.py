"""The one way through a VAE, for every family: checked, and where that is allowed done again another way."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ..compat.attempts import KERNEL, MEMORY, Allowed, Attempt, following, kind_of
from ..compat.attention_vae import frames_attended
from ..compat.device import empty_cache, first_line
from ..compat.errors import InputError, UnsupportedError
from ..compat.execution import HOST, checked_leaves, execution_device
from ..compat.quirks import care_for
from ..compat.soundness import (
    BROKEN,
    CAST,
    COLOUR,
    Judge,
    UnsoundError,
    checked_parts,
    fault_in_frames,
    fault_in_latents,
    is_flat,
)
from ..compat.transfer import Transfer, casts_wrongly, transfer_for
from ..compat.vae_care import (
    METHODS,
    TILES,
    convolution_switches,
    largest_buffer_bytes,
    limit_of,
    straightened,
    tiled,
    tiles_below,
)
from .contract import Loaded, Progress
from .denoising import require_finite
from .pictures import signed

FULL, TILED = METHODS[1:]
LEAVES_PER_REPORT = 8
Run = Callable[[Any, Transfer], torch.Tensor]


class Passes:
    """The VAE of a pipeline for the length of one stage; what one pass had to learn holds for the next.

    Each pass runs as the first attempt says. Where its result cannot be right or the device fails, the following
    attempt is made, and said: the transformer off the device, fp32, tiles, the CPU. Precision and device change only
    where the user left the precision to ``auto``; tiles only where ``method`` is not ``full``.

    Args:
        coder: ``decoder`` or ``encoder``. size: pixel frames, rows and columns of the largest pass.
        method: one of :data:`METHODS`. tile: pixels per tile that the family advises; 0 for whole.
    """

    def __init__(
        self,
        loaded: Loaded,
        coder: str,
        size: tuple[int, int, int],
        progress: Progress,
        method: str = "auto",
        tile: int = 0,
    ) -> None:
        self.loaded, self.coder, self.progress, self.method = loaded, coder, progress, method
        self.care, self.device = care_for(loaded.facts), execution_device(loaded.residency)
        self.automatic = loaded.precision.automatic
        self.cell = ratios_of(loaded)[0]
        tiles = () if method == FULL else tiles_below(max(size[1:]), self.cell)
        start = 0 if method == FULL else self._first_tile(size, tile)
        on_host = self.device.type == HOST.type
        self.attempt = Attempt(loaded.precision.vae, start)
        self.allowed = Allowed(self.automatic, self.automatic and not on_host, tiles, start)
        self._open: ExitStack | None = None
        self._vae: Any = None
        self._transfer = Transfer(HOST, torch.float32)
        self._alone = False
        if method == FULL and 0 < self.care.tile_pixels < max(size[1:]):
            limit = self.care.tile_pixels
            progress.say(f"full was chosen: pictures above {limit} pixels may end the process on this GPU")

    def __enter__(self) -> Passes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def decode(self, samples: torch.Tensor, progress: Progress | None = None, run: Run | None = None) -> torch.Tensor:
        """Video (1, 3, F, H, W) in -1..1, fp32, on the CPU.

        Args:
            samples: in the VAE's own space, on the CPU. progress: of this pass.
            run: decodes in another way than ``vae.decode(samples)``; returns (1, 3, F, H, W) on the device.
        """
        require_finite(samples, "latents")
        plain = is_flat(samples)  # flat latents may well decode to one colour

        def judge(video: torch.Tensor) -> str:
            fault = fault_in_frames(video, self.cell)
            return "" if plain and fault == COLOUR else fault

        def usual(vae: Any, transfer: Transfer) -> torch.Tensor:
            video: torch.Tensor = vae.decode(transfer.sent(samples), return_dict=False)[0]
            return video

        return self._through(run or usual, judge, "decoding", progress or self.progress)

    def encode(self, frames: torch.Tensor, stage: str, run: Run | None = None) -> torch.Tensor:
        """What the VAE says of ``frames`` (F, H, W, 3) in 0..1: mean and log variance, (1, 2C, T, H, W), fp32, CPU.

        Args:
            run: encodes in another way than ``vae.encode``; returns the moments on the device.
        """

        def usual(vae: Any, transfer: Transfer) -> torch.Tensor:
            moments: torch.Tensor = vae.encode(transfer.sent(signed(frames))).latent_dist.parameters
            return moments

        def judge(moments: torch.Tensor) -> str:
            return fault_in_latents(moments) or fault_in_latents(moments.chunk(2, dim=1)[0])

        return self._through(run or usual, judge, stage, self.progress)

    def _through(self, run: Run, judge: Judge, stage: str, progress: Progress) -> torch.Tensor:
        while True:
            try:
                return self._once(run, judge, stage, progress)
            except (RuntimeError, TypeError, UnsoundError) as error:
                kind, text = kind_of(error), first_line(error)
                self._close()
                others = self._others() if kind == MEMORY and not self._alone else []
                after = following(self.attempt, kind, text, self.allowed) if kind else None
                if after is None and not others:
                    told = self._told(error, kind, text, stage)
                    if told is None:
                        raise
                    raise told from error
            # Outside the block above, whose error holds every tensor of the failed attempt.
            gc.collect()
            self._alone = self._alone or bool(others)
            for name in others:
                self.loaded.residency.release(name)
            empty_cache(self.device)
            what = {MEMORY: "ran out of memory", KERNEL: f"failed ({text})"}.get(kind, f"gave {text}")
            again = f"without {', '.join(others)} on the device" if others else str(after)
            progress.say(f"{stage} {self.attempt} {what}: again {again}")
            if after is not None and not others:
                self.attempt = after

    def _once(self, run: Run, judge: Judge, stage: str, progress: Progress) -> torch.Tensor:
        if self._open is None:
            self._enter()
        last = self.attempt.dtype is torch.float32 and (self.attempt.on_host or self.device.type == HOST.type)

        def judged(part: torch.Tensor) -> str:
            fault = judge(part)
            # What the most exact way says is what the model says; a part may be flat where nothing may be changed.
            return fault if fault == BROKEN or (self.automatic and not last) else ""

        coder: nn.Module = getattr(self._vae, self.coder)
        with checked_parts(coder, judged), watched(coder, progress, stage):
            result = self._transfer.fetched(run(self._vae, self._transfer))
        fault = judge(result)
        if fault == COLOUR and last:
            progress.say(f"{stage} gave {fault}, in fp32 on the CPU too: the latents may hold nothing")
        elif fault:
            raise UnsoundError(fault)
        return result

    def _enter(self) -> None:
        """Bring the VAE where the attempt wants it, with everything around it set; undone by :meth:`_close`."""
        attempt, loaded = self.attempt, self.loaded
        with ExitStack() as stack:
            stack.enter_context(convolution_switches(self.care, attempt.library))
            if attempt.on_host:
                self._transfer, self._vae = Transfer(HOST, attempt.dtype), _own_copy(loaded, self.progress)
            else:
                self._transfer = transfer_for(self.device, attempt.dtype)
                if self.care.contiguous_weights:
                    straightened(loaded.parts.read("vae", self.progress))
                if casts_wrongly(self.device, attempt.dtype):
                    # Norms inside the VAE cast too: the picture would be finite, colourful and wrong.
                    raise UnsoundError(CAST)
                exact = transfer_for(self.device, loaded.precision.vae)
                hold = (
                    loaded.residency.hold("vae", 0, self.progress)
                    if attempt.dtype is loaded.precision.vae
                    else _in_fp32(loaded, exact, self.progress)
                )
                self._vae = stack.enter_context(hold)
            stack.enter_context(tiled(self._vae, attempt.tile))
            self._open = stack.pop_all()

    def _close(self) -> None:
        stack, self._open, self._vae = self._open, None, None
        if stack is not None:
            stack.close()

    def _first_tile(self, size: tuple[int, int, int], advised: int) -> int:
        """The tile to begin with, in pixels: what the method, the family and the device want; 0 for whole."""
        frames, rows, columns = size
        largest = max(rows, columns)
        if self.method == TILED and not advised:
            advised = TILES[0]
        if self.care.tile_pixels and largest > self.care.tile_pixels:
            advised = min(advised or self.care.tile_pixels, self.care.tile_pixels)
        limit, itemsize = limit_of(self.care), self.loaded.precision.vae.itemsize
        for tile in (advised or 0, *TILES):
            side_rows, side_columns = (min(rows, tile), min(columns, tile)) if tile else (rows, columns)
            needed = largest_buffer_bytes(self.loaded.configs["vae"], frames, side_rows, side_columns, itemsize)
            if not limit or needed <= limit:
                return tile
        return TILES[-1]

    def _others(self) -> list[str]:
        """The other parts of the pipeline that are on the device."""
        parts = self.loaded.parts
        return [
            name
            for name, part in parts.items()
            if name != "vae"
            and self.device.type != HOST.type
            and any(tensor.device == self.device for tensor in part.parameters())
        ]

    def _told(self, error: BaseException, kind: str, text: str, stage: str) -> BaseException | None:
        """What the user is told when nothing is left to try, in torch's own class where memory was the cause.

        None where the error says it best: it is no matter of the device.
        """
        if kind == MEMORY:
            other = "decode again with method auto" if self.method == FULL else "make a smaller or shorter video"
            advice = f"What went in is kept: choose offload model or group on the load node, or {other}."
            told = f"{text}; found no room for {stage} {self.attempt}; expected more free memory. {advice}"
            return type(error)(told)
        if not kind or (kind == KERNEL and self.device.type == HOST.type):
            return None
        found = f"the VAE failed ({text})" if kind == KERNEL else f"the VAE gave {text}"
        fix = "Sample again in fp32, or download the VAE again" if self.automatic else "Choose precision auto or fp32"
        return UnsupportedError(
            f"{found} while {stage} {self.attempt}",
            expected="finite values that differ",
            fix=f"{fix}, on the load node; what went in is kept.",
        )


@contextmanager
def watched(module: nn.Module, progress: Progress, stage: str) -> Iterator[None]:
    """Report each eighth leaf module that runs, and obey a cancel before any of them."""
    total = sum(1 for leaf in module.modules() if next(leaf.children(), None) is None)
    count = 0

    def called() -> None:
        nonlocal count
        progress.check()
        count += 1
        if count % LEAVES_PER_REPORT == 0:
            progress.step(min(count, total), total, stage)

    with checked_leaves(module, called):
        yield
    progress.step(total, total, stage)


@contextmanager
def decoding(
    loaded: Loaded, shape: torch.Size | tuple[int, ...], progress: Progress, method: str = "auto", tile: int = 0
) -> Iterator[Passes]:
    """Passes through the decoder for latents of ``shape`` (1, C, T, H, W).

    Raises:
        InputError: an unknown method.
    """
    if method not in METHODS:
        raise InputError(f"decode method {method!r}", expected=f"one of {', '.join(METHODS)}", fix="Choose auto.")
    spatial, temporal = ratios_of(loaded)
    size = shape[2] * temporal, shape[3] * spatial, shape[4] * spatial  # decoders cut frames off at the very end
    with Passes(loaded, "decoder", size, progress, method, tile) as passes:
        yield passes


def ratios_of(loaded: Loaded) -> tuple[int, int]:
    """Pixels per latent row and column, and pixel frames per latent frame."""
    from .families import family_named  # which imports every family, and those import this file

    spatial, temporal = family_named(loaded.family).ratios(loaded)
    return int(spatial), int(temporal)


@contextmanager
def encoding(loaded: Loaded, frames: torch.Tensor, progress: Progress, tile: int = 0) -> Iterator[Passes]:
    """Passes through the encoder for pictures like ``frames`` (F, H, W, 3)."""
    count, rows, columns = frames.shape[:3]
    with Passes(loaded, "encoder", (count, rows, columns), progress, tile=tile) as passes:
        yield passes


@contextmanager
def _in_fp32(loaded: Loaded, transfer: Transfer, progress: Progress) -> Iterator[nn.Module]:
    """The VAE held in fp32, its weights widened on the host; afterwards it has its own again, off the device."""
    loaded.residency.release("vae")
    module = loaded.parts.read("vae", progress)
    masters = {name: tensor.data for name, tensor in _named(module)}
    try:
        with torch.inference_mode(False), torch.no_grad():
            for name, tensor in _named(module):
                tensor.data = transfer.fetched(masters[name])
        with loaded.residency.hold("vae", 0, progress) as vae:
            yield vae
    finally:
        loaded.residency.release("vae")
        with torch.inference_mode(False), torch.no_grad():
            for name, tensor in _named(module):  # by name: accelerate puts other objects in their place
                tensor.data = masters[name]


def _named(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def _own_copy(loaded: Loaded, progress: Progress) -> nn.Module:
    """A VAE of its own from disk, in fp32 on the CPU: no hook of a residency would let the first one stay there.

    It is not rewritten for the device; only its attention is, since the stock mask of 720p is 20 GB in fp32.
    """
    module = loaded.parts.readers["vae"](progress).float()
    frames_attended(module, _attend)
    return module


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None, causal: bool = False
) -> torch.Tensor:
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal)
