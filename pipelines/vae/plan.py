"""The forms in which a VAE can run, in one order: a pass begins with the first that fits, a retry goes on from there.

Exact forms come first: whole, in chunks of latent frames where the decoder is causal, layer by layer. Then tiles, which
are blended, and the CPU. Where tiles are a choice, advised by the family or all that the device bears, the slow way
layer by layer comes after them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any

import torch

from ...compat.device.execution import HOST, execution_device
from ...compat.device.facts import facts_for, free_bytes, host_free_bytes
from ...compat.device.failures import KERNEL, MEMORY
from ...compat.device.precision import DTYPES
from ...compat.device.quirks import DevicePolicy, policy_for
from ...compat.errors import InputError
from ..base import Pipeline
from ..memory.estimates import SPARE, Size, attempt_bytes, bytes_on, latent_shape, plane_bytes

METHODS = AUTO, FULL, TILED, CHUNKED, STREAMING, ON_CPU = ("auto", "full", "tiled", "chunked", "streaming", "cpu")
CHUNKS = (8, 4, 2, 1)  # latent frames
STRIDE = 0.75  # of a tile or a window: a quarter of it is blended into the next one
SHORT_WINDOW = 4  # latent frames, diffusers' own for HunyuanVideo
TILES = (256, 128, 64)  # pixels; upstream's own default first
LEAST_CELLS = 2  # latents across a tile
SIDES = (256, 128, 64, 32, 16, 8)  # pixels of the last layer's tile


@dataclass(frozen=True, slots=True)
class Form:
    """What the user asks of a decode.

    Args:
        method: one of :data:`METHODS`.
        tile: pixels of a tile, 0 for the method's own.
        overlap: pixels of it that blend into the next, -1 for a quarter.
        frames: latent frames per chunk, 0 for the method's own.
    """

    method: str = "auto"
    tile: int = 0
    overlap: int = -1
    frames: int = 0


def checked_form(form: Form, cell: int) -> Form:
    """``form``, whose values are in range for latents of ``cell`` pixels.

    Raises:
        InputError: an unknown method, or a tile, overlap or count of frames out of range.
    """
    if form.method not in METHODS:
        raise InputError(f"decode method {form.method!r}", expected=f"one of {', '.join(METHODS)}", fix="Choose auto.")
    if form.frames < 0 or form.tile < 0:
        raise InputError(
            f"tile {form.tile}, frames_per_chunk {form.frames}", expected="0 or more", fix="Choose 0 for auto."
        )
    least = LEAST_CELLS * cell
    if 0 < form.tile < least and form.method != "streaming":
        raise InputError(
            f"tile {form.tile} pixels", expected=f"0, or at least {least} pixels", fix=f"The nearest value is {least}."
        )
    most = (form.tile or TILES[0]) // 2
    if not -1 <= form.overlap <= most:
        raise InputError(
            f"overlap {form.overlap} pixels",
            expected=f"-1 for a quarter of the tile, or 0 to {most} pixels",
            fix=f"The nearest value is {min(max(form.overlap, 0), most)}.",
        )
    return form


@dataclass(frozen=True, slots=True)
class Attempt:
    """One way to run a VAE.

    Args:
        dtype: of its weights and activations.
        tile: pixels, 0 for whole.
        on_host: on the CPU instead of the device.
        library: whether torch's convolution library (cuDNN, MIOpen) may be used.
        frames: latent frames per call of a causal decoder, 0 for all; exact.
        overlap: pixels of a tile that blend into the next one; -1 for a quarter.
        stream: pixels of the tiles in which each layer runs by itself, with the rest of its activations in host
            memory; exact; 0 for all layers at once.
        window: latent frames of one window of a decoder that works in windows; 0 for its publisher's.
    """

    dtype: torch.dtype
    tile: int = 0
    on_host: bool = False
    library: bool = True
    frames: int = 0
    overlap: int = -1
    stream: int = 0
    window: int = 0

    def __str__(self) -> str:
        forms = [f"in tiles of {self.tile} pixels"] * (self.tile > 0)
        forms += [f"in chunks of {self.frames} latent frame{'s' * (self.frames > 1)}"] * (self.frames > 0)
        forms += [f"layer by layer over {self.stream} pixels"] * (self.stream > 0)
        forms += [f"in windows of {self.window} latent frame{'s' * (self.window > 1)}"] * (self.window > 0)
        shape = ", ".join(forms) or "whole"
        name = next((name for name, dtype in DTYPES.items() if dtype is self.dtype), str(self.dtype))
        where = " on the CPU (slow)" if self.on_host else "" if self.library else " without MIOpen"
        return f"{shape} in {name}{where}"

    @property
    def form(self) -> tuple[int, int, int, bool]:
        """What tells it from the other attempts of a list: the rest may change on the way."""
        return self.tile, self.frames, self.stream, self.on_host


def decode_forms(
    base: Attempt,
    counts: Sequence[int] = (0,),
    streams: Sequence[int] = (),
    tiles: Sequence[int] = (),
    *,
    start: int = 0,
    whole_first: bool = True,
    host: bool = False,
) -> list[Attempt]:
    """The one order of forms.

    Args:
        base: dtype, library and overlap of all; its ``frames`` are those of the forms ``streams``.
        counts: latent frames per call, 0 for all, falling; empty to begin layer by layer.
        streams: pixels of a layer's tile, falling.
        tiles: sizes in pixels, falling.
        start: the tile that is a choice, in pixels; 0 where there is none.
        whole_first: whether the whole may be tried before ``start``.
        host: whether the CPU may be used instead of the device; there in tiles of ``start``.
    """
    exact = [replace(base, frames=count) for count in counts]
    fewest = counts[-1] if counts else base.frames
    streamed = [replace(base, frames=fewest, stream=side) for side in streams]
    smaller = [replace(base, frames=fewest, tile=tile) for tile in tiles if not start or tile < start]
    on_host = [Attempt(torch.float32, start, on_host=True)] * host
    if not start:
        return [*exact, *streamed, *smaller, *on_host]
    chosen = [replace(each, tile=start) for each in exact]
    return [*(exact if whole_first else ()), *chosen, *smaller, *streamed, *on_host]


def next_attempt(
    attempt: Attempt, kind: str, text: str, forms: Sequence[Attempt], automatic: bool = True
) -> Attempt | None:
    """What to try after ``attempt`` failed; None when nothing allowed is left.

    Memory is a matter of the form; a kernel or wrong values of the library, then of the dtype, and only then of tiles.

    Args:
        kind: of the failure, ``MEMORY``, ``KERNEL`` or ``VALUES``.
        text: of its error.
        forms: of :func:`decode_forms`; ``attempt`` has one of them.
        automatic: whether the dtype may change.
    """
    if attempt.on_host:
        return None
    if kind == KERNEL and attempt.library and "miopen" in text.lower():
        return replace(attempt, library=False)
    if kind != MEMORY and automatic and attempt.dtype is not torch.float32:
        return replace(attempt, dtype=torch.float32)
    for form in forms[[each.form for each in forms].index(attempt.form) + 1 :]:
        if form.on_host:
            return form
        tiled = form.tile and not attempt.stream and (not attempt.tile or form.tile < attempt.tile)
        if kind == MEMORY or tiled:
            return replace(form, dtype=attempt.dtype, library=attempt.library)
    return None


class Plan:
    """The forms of one pass through a VAE, and the attempt under way.

    Args:
        coder: ``decoder`` or ``encoder``.
        size: pixel frames, rows and columns of the largest pass.
        form: what the user asks of a decode.
        advised: pixels per tile that the family advises; 0 for whole.
        room: bytes beside the weights that a forecast has; None for a run, which looks at the device and makes room.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        coder: str,
        size: tuple[int, int, int],
        form: Form,
        advised: int,
        room: int | None = None,
    ) -> None:
        self.pipeline, self.size, self.form, self.method = pipeline, size, form, form.method
        self.learned = f"{pipeline.family} {coder} fails with MIOpen"  # of an earlier run on this device
        self.policy, self.device = policy_for(pipeline.facts), execution_device(pipeline.offloader, part="vae")
        self.automatic, self.ratios = pipeline.precision.automatic, pipeline.spec.ratios
        self.area, self.decodes = Size(size[2], size[1], size[0]), coder == "decoder"
        self.causal = self.decodes and pipeline.spec.causal_decoder
        limited = bool(form.tile or limit_of(self.policy) or self.policy.tile_pixels)
        start = self._start(form.tile or advised) if self.method in (AUTO, TILED) else 0
        self.forms = self._forms(start, whole_first=self.method == AUTO and not limited)
        self.attempt = next((each for each in self.forms if each.tile == start), self.forms[0])
        on_host = self.device.type == HOST.type
        if self.method == AUTO and self.decodes and not (start and (limited or on_host)):
            self.attempt = self._fitting() if room is None else self.fitting(room)

    def follow(self, kind: str, text: str) -> Attempt | None:
        """What to try after the attempt under way failed; None when nothing allowed is left.

        After memory ran out, a form that is forecast to need as much is left out.
        """
        forms, failed = self.forms, self.attempt
        if kind == MEMORY and (needed := self.needed_bytes(failed)):
            kept = (each.on_host or each.form == failed.form or self.needed_bytes(each) < needed for each in forms)
            forms = list(compress(forms, kept))
        return next_attempt(failed, kind, text, forms, self.automatic)

    def smaller_stream(self, side: int) -> int:
        """Pixels of the next tiles below ``side`` in which layers run by themselves; 0 where none is left."""
        return next((each.stream for each in self.forms if 0 < each.stream < side), 0)

    def needed_bytes(self, attempt: Attempt) -> int:
        """Bytes beside the weights that an attempt is forecast to take; 0 if unknown."""
        if not self.decodes or not self.pipeline.weights:
            return 0
        planes = plane_bytes(self.pipeline, self.area) if attempt.stream and self.device.type == HOST.type else 0
        frames = attempt.window or attempt.frames
        return planes + attempt_bytes(self.pipeline, self.area, frames, attempt.tile, attempt.stream)

    def others(self) -> list[str]:
        """The other parts of the pipeline that are on the device."""
        parts = self.pipeline.parts
        return [
            name
            for name, part in parts.items()
            if name != "vae"
            and self.device.type != HOST.type
            and any(tensor.device == self.device for tensor in part.parameters())
        ]

    def _forms(self, start: int, whole_first: bool) -> list[Attempt]:
        """What the method allows, in the one order."""
        form, method, on_host = self.form, self.method, self.device.type == HOST.type
        if method == ON_CPU and not on_host:
            return [Attempt(torch.float32, on_host=True)]
        probes = self.pipeline.probes
        library = probes is None or not probes.recall(self.learned)
        base = Attempt(self.pipeline.precision.vae, library=library, overlap=form.overlap, window=self._window())
        counts: tuple[int, ...] = (0, *self._chunks())
        streams: tuple[int, ...] = ()
        tiles: tuple[int, ...] = ()
        if method in (AUTO, TILED, ON_CPU):
            tiles = tiles_below(max(self.size[1:]), self.ratios[0])
        if method == CHUNKED:
            counts = self._chunks() or (1,)
        noisy = any(self.pipeline.configs["vae"].get("decoder_inject_noise") or ())  # such a decoder cannot be streamed
        if self.decodes and (method == STREAMING or (method in (AUTO, CHUNKED) and not noisy)):
            streams = SIDES
        if method == STREAMING:
            counts, base = (), replace(base, frames=self._streamed_frames())
            streams = (form.tile, *(side for side in SIDES if side < form.tile)) if form.tile else SIDES
        host = self.automatic and not on_host
        return decode_forms(base, counts, streams, tiles, start=start, whole_first=whole_first, host=host)

    def _chunks(self) -> tuple[int, ...]:
        """Latent frames per call that the method allows, falling; empty for all at once."""
        if not self.causal or self.method not in (AUTO, TILED, CHUNKED):
            return ()
        if self.form.frames:
            return (self.form.frames, *(count for count in CHUNKS if count < self.form.frames))
        latent_frames = (self.size[0] - 1) // self.ratios[1] + 1
        return tuple(count for count in CHUNKS if count < latent_frames)

    def _streamed_frames(self) -> int:
        """Latent frames per chunk of a streamed decode: as many as were asked; else all, or one on a small host."""
        if not self.causal or not self.pipeline.weights:
            return 0
        return self.form.frames or int(plane_bytes(self.pipeline, self.area) > host_free_bytes())

    def _window(self) -> int:
        """Latent frames per window: as many as were asked; else its publisher's, or few on a host that is small."""
        if not self.decodes or not self.pipeline.spec.memory.decode_window:
            return 0
        small = self.method == STREAMING and plane_bytes(self.pipeline, self.area) > host_free_bytes()
        return self.form.frames or SHORT_WINDOW * small

    def _start(self, advised: int) -> int:
        """The tile to begin with, in pixels: what the method, the family and the device want; 0 for whole."""
        frames, rows, columns = self.size
        largest = max(rows, columns)
        if self.method == TILED and not advised:
            advised = TILES[0]
        if self.policy.tile_pixels and largest > self.policy.tile_pixels:
            advised = min(advised or self.policy.tile_pixels, self.policy.tile_pixels)
        limit, itemsize = limit_of(self.policy), self.pipeline.precision.vae.itemsize
        for tile in (advised or 0, *TILES):
            side_rows, side_columns = (min(rows, tile), min(columns, tile)) if tile else (rows, columns)
            needed = largest_buffer_bytes(self.pipeline.configs["vae"], frames, side_rows, side_columns, itemsize)
            if not limit or needed <= limit:
                return tile
        return TILES[-1]

    def _fitting(self) -> Attempt:
        """The first form that fits into what is free now, once other parts have left the device; else the smallest.

        A forecast that is wrong is mended by the retry.
        """
        pipeline, free = self.pipeline, room_on(self.pipeline, self.device)
        if free is None or not pipeline.weights:
            return self.attempt
        offloader = pipeline.offloader
        weights = pipeline.weights["vae"].resident(offloader.mode, "vae") + offloader.options.keep_free_bytes
        weights -= bytes_on(self.device, pipeline.parts.get("vae"))
        if SPARE * (weights + self.needed_bytes(self.forms[0])) <= free:
            return self.forms[0]
        for name in self.others():
            offloader.release(name)
        return self.fitting((room_on(pipeline, self.device) or free) - weights)

    def fitting(self, room: int) -> Attempt:
        """The first form that is forecast to need at most ``room`` bytes beside the weights; else the smallest."""
        streams = plane_bytes(self.pipeline, self.area) <= host_free_bytes()
        forms = [each for each in self.forms if not each.on_host and (streams or not each.stream)]
        fitting = (each for each in forms if SPARE * self.needed_bytes(each) <= room)
        return next(fitting, min(forms, key=self.needed_bytes))


def planned_decode(pipeline: Pipeline, size: Size, room: int) -> tuple[Attempt, int]:
    """The form in which a decode of ``size`` begins with ``room`` bytes beside the weights, and the bytes it needs."""
    spec, cells = pipeline.spec, latent_shape(pipeline, size)
    plan = Plan(
        pipeline=pipeline,
        coder="decoder",
        size=decoder_size(pipeline, cells),
        form=Form(),
        advised=spec.tile_for(cells),
        room=room,
    )
    return plan.attempt, plan.needed_bytes(plan.attempt)


def decoder_size(pipeline: Pipeline, cells: tuple[int, int, int]) -> tuple[int, int, int]:
    """Pixel frames, rows and columns that a decoder makes of ``cells``."""
    spatial, temporal = pipeline.spec.ratios
    return (cells[0] - 1) * temporal + 1, cells[1] * spatial, cells[2] * spatial


def room_on(pipeline: Pipeline, device: torch.device) -> int | None:
    """Bytes that a part may take on ``device``: what is free, or all of it where a host lets its other models leave."""
    if not pipeline.offloader.evicts:
        return free_bytes(device)
    facts = pipeline.facts if device == pipeline.offloader.device else facts_for(device)
    return facts.total_bytes or None


def largest_buffer_bytes(config: Mapping[str, Any], frames: int, height: int, width: int, itemsize: int) -> int:
    """About the largest single activation of a VAE, in bytes: twice its narrowest width at full size, padded.

    Twice, because the last upsampling comes before the channels are halved.

    Args:
        config: of the VAE.
        frames, height, width: of what goes through in one piece, in pixels.
    """
    widths = config.get("decoder_block_out_channels") or config.get("block_out_channels") or (128,)
    pixels = (frames + 2) * (height + 2) * (width + 2)
    return 2 * min(widths) * pixels // int(config.get("patch_size") or 1) ** 2 * itemsize


def limit_of(policy: DevicePolicy) -> int:
    """The largest buffer in bytes that a VAE may make or convolve; 0 for no limit."""
    return min((limit for limit in (policy.allocation_bytes, policy.conv_bytes) if limit), default=0)


def tiles_below(largest: int, ratio: int = 1) -> tuple[int, ...]:
    """The tile sizes in pixels that are smaller than ``largest`` and hold at least two latents."""
    return tuple(tile for tile in TILES if tile < largest and tile >= 2 * ratio)
