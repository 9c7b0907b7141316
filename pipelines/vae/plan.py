"""The methods by which a VAE runs, ours or core's, in one order: the first that fits begins, a retry goes on from it.

Exact ones come first: whole, chunks, layer by layer; then tiles, which are blended, and the CPU. Where tiles are a
choice, advised or all that the device bears, layer by layer comes after them: it is slow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...compat.device.execution import HOST
from ...compat.device.facts import facts_for, free_bytes, host_free_bytes, indexed
from ...compat.device.failures import KERNEL, MEMORY
from ...compat.device.precision import DTYPES
from ...compat.device.quirks import DevicePolicy, policy_for
from ...compat.errors import InputError, UnsupportedError, require_choice
from ..base import DecodeRequest
from ..pipeline import Pipeline
from ..sizes import SPARE, Size, bytes_on, latent_shape, method_bytes, plane_bytes

METHODS = ("auto", "full", "tiled", "chunked", "streaming", "cpu", "draft")  # grows at the end
AUTO, FULL, TILED, CHUNKED, STREAMING, ON_CPU, DRAFT = METHODS
CHUNKS = (8, 4, 2, 1)  # latent frames
STRIDE = 0.75  # of a tile or a window: a quarter of it is blended into the next one
SHORT_WINDOW = 4  # latent frames, diffusers' own for HunyuanVideo
TILES = (256, 128, 64)  # pixels; upstream's own default first
LEAST_CELLS = 2  # latents across a tile
SIDES = (256, 128, 64, 32, 16, 8)  # pixels of the last layer's tile


def checked_request(form: DecodeRequest, cell: int) -> DecodeRequest:
    """``form`` itself; raises InputError for values out of range for latents of ``cell`` pixels."""
    require_choice("decode method", form.method, METHODS, "Choose auto.")
    for name, value in (("tile_size", form.tile), ("frames_per_chunk", form.frames)):
        if value < 0:
            raise InputError(f"{name} {value}", expected="0 or more", fix="Choose 0 for auto.")
    least = LEAST_CELLS * cell
    if 0 < form.tile < least and form.method != "streaming":
        expected, fix = f"0, or at least {least} pixels", f"The nearest value is {least}."
        raise InputError(f"tile {form.tile} pixels", expected=expected, fix=fix)
    most = (form.tile or TILES[0]) // 2
    if not -1 <= form.overlap <= most:
        nearest, expected = min(max(form.overlap, -1), most), f"-1 for a quarter of the tile, or 0 to {most} pixels"
        raise InputError(f"overlap {form.overlap} pixels", expected=expected, fix=f"The nearest value is {nearest}.")
    return form


@dataclass(frozen=True, slots=True)
class DecodeMethod:
    """One method to run a VAE, ours or core's."""

    dtype: torch.dtype  # of its weights and activations
    tile: int = 0  # pixels, 0 for whole
    on_host: bool = False  # on the CPU instead of the device
    library: bool = True  # whether torch's convolution library (cuDNN, MIOpen) may be used
    frames: int = 0  # latent frames per call of a causal decoder, 0 for all; exact
    overlap: int = -1  # pixels of a tile that blend into the next one; -1 for a quarter
    stream: int = 0  # pixels of the tiles in which each layer runs by itself; exact; 0 for all layers at once
    window: int = 0  # latent frames of one window of a decoder that works in windows; 0 for its publisher's

    def __str__(self) -> str:
        shapes = (
            (self.tile, f"in tiles of {self.tile} pixels"),
            (self.frames, f"in chunks of {self.frames} latent frame{'s' * (self.frames > 1)}"),
            (self.stream, f"layer by layer over {self.stream} pixels"),
            (self.window, f"in windows of {self.window} latent frame{'s' * (self.window > 1)}"),
        )
        shape = ", ".join(words for size, words in shapes if size) or "whole"
        name = next((name for name, dtype in DTYPES.items() if dtype is self.dtype), str(self.dtype))
        where = " on the CPU (slow)" if self.on_host else "" if self.library else " without MIOpen"
        return f"{shape} in {name}{where}"

    @property
    def whole(self) -> bool:
        """True where all goes through the VAE at once."""
        return not (self.tile or self.frames or self.stream or self.window)

    @property
    def key(self) -> tuple[int, int, int, bool]:
        """The fields that tell a method from the others of a list."""
        return self.tile, self.frames, self.stream, self.on_host


def decode_methods(
    base: DecodeMethod, counts: Sequence[int] = (0,), streams: Sequence[int] = (), tiles: Sequence[int] = (), *,
    start: int = 0, whole_first: bool = True, host: bool = False,
) -> list[DecodeMethod]:  # fmt: skip
    """The methods in their one order, with dtype, library and overlap of ``base``: by ``counts`` of latent frames per
    call (falling, 0 for all), then the last count layer by layer over tiles of ``streams`` pixels, then in tiles of
    ``tiles`` pixels (both falling), last on the CPU if ``host``. Empty ``counts`` begin layer by layer in chunks of
    ``base.frames``. A ``start`` above 0 is a tile to begin with: every count runs in it, before that whole if
    ``whole_first``; smaller tiles then come before layer by layer, and the CPU uses it too."""
    exact = [replace(base, frames=count) for count in counts]
    fewest = counts[-1] if counts else base.frames
    streamed = [replace(base, frames=fewest, stream=side) for side in streams]
    smaller = [replace(base, frames=fewest, tile=tile) for tile in tiles if not start or tile < start]
    cpu = replace(base, dtype=torch.float32, tile=start, frames=fewest, library=True, on_host=True)
    on_host = [cpu] if host else []
    if not start:
        return [*exact, *streamed, *smaller, *on_host]
    chosen = [replace(each, tile=start) for each in exact]
    return [*(exact if whole_first else ()), *chosen, *smaller, *streamed, *on_host]


def next_method(
    method: DecodeMethod, kind: str, text: str, methods: Sequence[DecodeMethod], automatic: bool = True
) -> DecodeMethod | None:
    """The method to try after ``method``, one of ``methods``, failed; None without a ``kind`` of failure, after the
    CPU, or where none is left. After a shortage of memory it is the next of the list; after another failure the same
    without MIOpen if the error's ``text`` names it, then fp32 if ``automatic``, then smaller tiles, then the CPU."""
    if method.on_host or not kind:
        return None
    if kind == KERNEL and method.library and "miopen" in text.lower():
        return replace(method, library=False)
    if kind != MEMORY and automatic and method.dtype is not torch.float32:
        return replace(method, dtype=torch.float32)
    for later in methods[[each.key for each in methods].index(method.key) + 1 :]:
        if later.on_host:
            return later
        tiled = later.tile and not method.stream and (not method.tile or later.tile < method.tile)
        if kind == MEMORY or tiled:
            return replace(later, dtype=method.dtype, library=method.library)
    return None


class Ladder:
    """The methods of one pass through a VAE, and the method under way. ``coder`` is ``decoder`` or ``encoder``;
    ``size`` is pixel frames, rows and columns of what is decoded or encoded, which the VAE may take in windows;
    ``form`` is the user's request; ``advised`` are the pixels per tile that the family advises, 0 for whole; ``room``
    are the bytes beside the weights that a forecast has, None for a run, which looks at the device and makes room."""

    def __init__(
        self, pipeline: Pipeline, coder: str, size: tuple[int, int, int], form: DecodeRequest, advised: int,
        room: int | None = None,
    ) -> None:  # fmt: skip
        self.pipeline, self.size, self.form = pipeline, size, form
        self.learned = f"{pipeline.family} {coder} fails with MIOpen"  # of an earlier run on this device
        self.policy, self.device = policy_for(pipeline.facts), indexed(pipeline.offloader.device_of("vae"))
        self.automatic, self.ratios = pipeline.precision.automatic, pipeline.spec.sizes.ratios
        self.area, self.decodes = Size(size[2], size[1], size[0]), coder == "decoder"
        self.causal = self.decodes and pipeline.spec.rewrites.causal_decoder
        limited = bool(form.tile or limit_of(self.policy) or self.policy.tile_pixels)
        start = self._first_tile(form.tile or advised) if form.method in (AUTO, TILED) else 0
        self.methods = self._methods(start, whole_first=form.method == AUTO and not limited)
        self.method = next((each for each in self.methods if each.tile == start), self.methods[0])
        settled = start and (limited or self.device.type == HOST.type)  # on these tiles, whatever room there is
        if form.method == AUTO and self.decodes and not settled:
            self.method = self._fitting() if room is None else self.fitting(room)

    def follow(self, kind: str, text: str) -> DecodeMethod | None:
        """The method to try after the one under way failed, by :func:`next_method`; after a shortage only the CPU, and
        those that are forecast to need less, if that is known."""
        methods, failed = self.methods, self.method
        needed = self.needed_bytes(failed) if kind == MEMORY else 0
        if needed:
            methods = [m for m in methods if m.on_host or m.key == failed.key or self.needed_bytes(m) < needed]
        return next_method(failed, kind, text, methods, self.automatic)

    def needed_bytes(self, method: DecodeMethod) -> int:
        """Bytes beside the weights that a method is forecast to take; 0 if unknown, as for an encoder. Where the VAE
        runs on the CPU, the planes of a streamed decode count too."""
        if not self.decodes or not self.pipeline.weights:
            return 0
        planes = self._host_bytes(method) if self.device.type == HOST.type else 0
        frames = method.window or method.frames
        return planes + method_bytes(self.pipeline, self.area, frames, method.tile, method.stream)

    def _host_bytes(self, method: DecodeMethod) -> int:  # of the planes of a streamed decode
        return plane_bytes(self.pipeline, self.area, method.window or method.frames) if method.stream else 0

    def others(self) -> list[str]:
        """The other parts of the pipeline that are on the device."""
        if self.device.type == HOST.type:
            return []
        others = ((name, part) for name, part in self.pipeline.parts.items() if name != "vae")
        return [name for name, part in others if any(each.device == self.device for each in part.parameters())]

    def _methods(self, start: int, whole_first: bool) -> list[DecodeMethod]:
        """The methods that the request allows on this device, ``start`` and ``whole_first`` as :func:`decode_methods`
        takes them. On a GPU ``cpu`` is that alone. ``streaming`` is layer by layer; ``auto`` and ``tiled`` leave out
        chunks that need too large a buffer, but for the smallest. With precision ``auto`` the CPU comes last."""
        form, chosen, on_host = self.form, self.form.method, self.device.type == HOST.type
        if chosen == ON_CPU and not on_host:
            frames = (form.frames or 1) if self.causal else 0
            return [DecodeMethod(torch.float32, on_host=True, frames=frames, window=self._window())]
        probes = self.pipeline.device.probes
        library = probes is None or not probes.recall(self.learned)
        base = DecodeMethod(self.pipeline.precision.vae, library=library, overlap=form.overlap, window=self._window())
        counts = self._chunks() if form.frames and self._chunks() else (0, *self._chunks())
        if chosen in (AUTO, TILED):
            counts = tuple(count for count in counts if self._buffers_fit(count, start)) or counts[-1:]
        elif chosen == CHUNKED:
            counts = self._chunks() or (1,)
        noisy = any(self.pipeline.configs["vae"].get("decoder_inject_noise") or ())  # such a decoder cannot be streamed
        streams: tuple[int, ...] = SIDES if self.decodes and chosen in (AUTO, CHUNKED) and not noisy else ()
        if chosen == STREAMING:
            causal = self.causal and self.pipeline.weights
            by_frame = causal and plane_bytes(self.pipeline, self.area) > host_free_bytes()  # too large all at once
            frames = form.frames or (1 if by_frame else 0)
            counts, base = (), replace(base, frames=frames if causal else 0)
            streams = (form.tile, *(side for side in SIDES if side < form.tile)) if form.tile else SIDES
        tiles = tiles_below(max(self.size[1:]), self.ratios[0]) if chosen in (AUTO, TILED, ON_CPU) else ()
        host = self.automatic and not on_host
        return decode_methods(base, counts, streams, tiles, start=start, whole_first=whole_first, host=host)

    def _chunks(self) -> tuple[int, ...]:
        """Latent frames per call of a causal decoder, falling; empty where it is not to run in chunks."""
        if not self.causal or self.form.method not in (AUTO, TILED, CHUNKED, ON_CPU):
            return ()
        if self.form.frames:
            return (self.form.frames, *(count for count in CHUNKS if count < self.form.frames))
        return tuple(count for count in CHUNKS if count < (self.size[0] - 1) // self.ratios[1] + 1)

    def _window(self) -> int:
        """Latent frames of a window: as chosen, a short one where a streamed decode's planes are too large, else 0."""
        if not self.decodes or not self.pipeline.spec.memory.decode_window:
            return 0
        small = self.form.method == STREAMING and plane_bytes(self.pipeline, self.area) > host_free_bytes()
        return self.form.frames or (SHORT_WINDOW if small else 0)

    def _first_tile(self, wanted: int) -> int:
        """The tile to begin with, in pixels, 0 for whole: as ``wanted``, or smaller where the device bears less."""
        if self.form.method == TILED and not wanted:
            wanted = TILES[0]
        if 0 < self.policy.tile_pixels < max(self.size[1:]):
            wanted = min(wanted or self.policy.tile_pixels, self.policy.tile_pixels)
        fewest = (0, *self._chunks())[-1]
        return next((tile for tile in (wanted, *TILES) if self._buffers_fit(fewest, tile)), TILES[-1])

    def _buffers_fit(self, count: int, tile: int) -> bool:
        """True if ``count`` latent frames (0: all) in tiles of ``tile`` pixels (0: whole) need no too large buffer."""
        limit, frames, terms = limit_of(self.policy), self.size[0], self.pipeline.spec.memory
        frames = min(frames, count * self.ratios[1] or frames, terms.decode_window or frames)
        high, wide = (min(side, tile or side) for side in self.size[1:])
        config, itemsize = self.pipeline.configs["vae"], self.pipeline.precision.vae.itemsize
        return not limit or largest_buffer_bytes(config, frames, high, wide, itemsize) <= limit

    def _fitting(self) -> DecodeMethod:
        """The first method that fits, where need be after the other parts are released; else the smallest. The one
        under way where free memory or weights are unknown."""
        pipeline, free = self.pipeline, room_on(self.pipeline, self.device)
        if free is None or not pipeline.weights:
            return self.method
        offloader = pipeline.offloader
        weights = pipeline.weights["vae"].resident(offloader.mode, "vae") + offloader.options.keep_free_bytes
        if not offloader.evicts:  # else ``free`` is all of the device, with the VAE that is there already
            weights -= bytes_on(self.device, pipeline.parts.get("vae"))
        if SPARE * (weights + self.needed_bytes(self.methods[0])) <= free:
            return self.methods[0]
        for name in self.others():
            offloader.release(name)
        return self.fitting((room_on(pipeline, self.device) or free) - weights)

    def fitting(self, room: int) -> DecodeMethod:
        """The first method on the device that is forecast to need at most ``room`` bytes beside the weights and has
        host memory for its planes; else the smallest."""
        free = host_free_bytes()
        methods = [each for each in self.methods if not each.on_host and self._host_bytes(each) <= free]
        fitting = (each for each in methods if SPARE * self.needed_bytes(each) <= room)
        return next(fitting, min(methods, key=self.needed_bytes))


def planned_decode(pipeline: Pipeline, size: Size, room: int, form: DecodeRequest | None) -> tuple[DecodeMethod, int]:
    """The method with which a decode of ``size`` begins in ``room`` bytes beside the weights, and its bytes."""
    plan = ladder_for(pipeline, latent_shape(pipeline, size), form_to_forecast(form), room)
    return plan.method, plan.needed_bytes(plan.method)


def form_to_forecast(form: DecodeRequest | None) -> DecodeRequest:
    """``form``, or auto where none is set; auto for a draft too, which needs less, so that the forecast is enough."""
    return DecodeRequest() if form is None or form.method == DRAFT else form


def ladder_for(pipeline: Pipeline, cells: tuple[int, int, int], form: DecodeRequest, room: int | None = None) -> Ladder:
    """The methods for latents of ``cells`` (frames, rows, columns); ``auto`` begins where the family advises, ``room``
    is as :class:`Ladder` takes it. Raises InputError for an unknown method, or a tile, overlap or count of frames out
    of range, and UnsupportedError for a method that this family's decoder cannot do."""
    if form.method == CHUNKED and not pipeline.spec.rewrites.causal_decoder:
        found = f"decode method {CHUNKED!r} for {pipeline.spec.title}, whose decoder looks ahead"
        expected = f"one of {', '.join(method for method in METHODS if method != CHUNKED)}"
        fix = "Choose auto, which begins with the first exact method that fits."
        raise UnsupportedError(found, expected=expected, fix=fix)
    sizes, (frames, rows, columns) = pipeline.spec.sizes, cells
    form, advised = checked_request(form, sizes.ratio), sizes.tile_for(cells)
    size = (frames - 1) * sizes.stride + 1, rows * sizes.ratio, columns * sizes.ratio
    return Ladder(pipeline=pipeline, coder="decoder", size=size, form=form, advised=advised, room=room)


def room_on(pipeline: Pipeline, device: torch.device) -> int | None:
    """Bytes on ``device`` for a part: those free, or all of the device's if the host evicts models; None if unknown."""
    if not pipeline.offloader.evicts:
        return free_bytes(device)
    return (pipeline.facts if device == indexed(pipeline.offloader.device) else facts_for(device)).total_bytes or None


def largest_buffer_bytes(config: Mapping[str, Any], frames: int, height: int, width: int, itemsize: int) -> int:
    """Bytes of about the largest activation of a VAE on one piece: its padded pixels in twice the narrowest width,
    because the last upsampling comes before the channels are halved."""
    pixels = (frames + 2) * (height + 2) * (width + 2)
    return 2 * narrowest(config) * pixels // int(config.get("patch_size") or 1) ** 2 * itemsize


def narrowest(config: Mapping[str, Any]) -> int:
    """The fewest channels of a decoder's blocks: those at full size."""
    return min(config.get("decoder_block_out_channels") or config.get("block_out_channels") or (128,))


def limit_of(policy: DevicePolicy) -> int:
    """The largest buffer in bytes that a VAE may make or convolve; 0 for no limit."""
    return min((limit for limit in (policy.allocation_bytes, policy.conv_bytes) if limit), default=0)


def tiles_below(largest: int, ratio: int = 1) -> tuple[int, ...]:
    """The tile sizes in pixels that are smaller than ``largest`` and hold at least two latents."""
    return tuple(tile for tile in TILES if tile < largest and tile >= 2 * ratio)
