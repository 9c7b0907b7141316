"""One decode as work that can be interrupted and resumed: windows of time, regions of a window, chunks of a region.

Finished parts are kept. If a part runs out of memory, the next method splits only the rest: a region into smaller
ones that overlap and blend, a chunk of latent frames into shorter ones, a decoder call into a stream of tiles."""

from __future__ import annotations

import math
import types
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...compat.device.execution import DrawnOnHost, to_host
from ...compat.device.failures import DEVICE_ERRORS
from ...compat.memory.parts import full_name
from ...compat.memory.transfer import Transfer
from ...compat.output_check import InvalidOutputError, Validator
from ...compat.ranks import Group
from .chunked import AUTOENCODERS, MOCHI, SPATIAL_PADDING, CausalCache, mochi_up_from_the_start, remembering
from .layerwise import Stream, streamed
from .plan import STRIDE, DecodeMethod, narrowest

WINDOWED = f"{AUTOENCODERS}hunyuan_video.AutoencoderKLHunyuanVideo"
OVERLAP = 0.25  # of a tile, blended into the next one, where nothing else is asked
MIDDLE = (0.25, 0.75)  # weights at which two tiles are compared: where both count


@dataclass(frozen=True, slots=True)
class RegionTask:
    """A region to decode."""

    latents: torch.Tensor  # (1, C, T, h, w) on the host
    method: DecodeMethod  # in which form
    time: torch.Tensor | None  # of a VAE that takes one, on the host
    noise: bytes | None = None  # as :class:`ResumableDecode` has it


@dataclass(frozen=True, slots=True)
class HeldDecoder:
    """The decoder of a VAE on its device, and the form to go on in."""

    vae: Any
    transfer: Transfer  # there and back
    method: DecodeMethod
    time: Tensor | None  # the timestep of a VAE that takes one, on the device


Decode = Callable[[RegionTask], torch.Tensor]
Together = Callable[[list[RegionTask], Decode], list[Tensor | None]]


@dataclass(slots=True)
class Region:
    """A part of the plane that is decoded by itself, in latent cells."""

    rows: tuple[int, int]
    columns: tuple[int, int]
    weights: tuple[Tensor, Tensor] | None = None  # of its rows and columns of pixels in the result; they add up to one
    frames: int = 0  # latent frames that are done
    past: CausalCache | None = None  # what a causal decoder remembers of them

    @property
    def shape(self) -> tuple[int, int]:
        """Latent rows and columns."""
        return self.rows[1] - self.rows[0], self.columns[1] - self.columns[0]

    @property
    def cells(self) -> int:
        """Latent cells of one frame."""
        return math.prod(self.shape)

    def of(self, latents: Tensor) -> Tensor:
        """The part of ``latents`` (1, C, T, h, w) that it covers."""
        return latents[..., slice(*self.rows), slice(*self.columns)]


@dataclass(slots=True)
class Window:
    """Latent frames that are decoded together; upstream's own for HunyuanVideo, else all."""

    latents: Tensor  # (1, C, T, h, w) on the host
    pending: list[Region]  # regions still to be decoded, the next one last
    video: Tensor | None = None  # (1, 3, F, H, W), fp32, on the host; filled as regions are done
    covered: Tensor | None = None  # weights so far, (H, W)


@dataclass(slots=True)
class ResumableDecode:
    """One decode of latents in the VAE's own space."""

    latents: Tensor  # (1, C, T, h, w) on the host
    ratios: tuple[int, int]  # pixels per cell, pixel frames per latent frame
    # Around each call of the decoder, given the part's index and count.
    guard: Callable[[int, int], AbstractContextManager[Any]] = lambda index, count: nullcontext()
    validate: Validator = lambda video: ""  # of streamed frames, which pass no decoder as a whole
    smaller: Callable[[int], int] = lambda side: 0  # as :class:`~.layerwise.Stream` takes it
    check: Callable[[], None] = lambda: None  # raises on a cancel
    noise: bytes | None = None  # a generator's state, of which each call's layers draw, where they draw noise
    # Decodes several regions at once, on other devices too; None where it failed. None to decode alone.
    together: Together | None = None
    windows: list[Window] = field(default_factory=list)
    stride: int = 0  # pixel frames from one window to the next
    apart: float = 0.0  # largest difference between two tiles where both count alike, of frames in -1..1
    done: int = 0

    def begin(self) -> None:
        """Forget what is done."""
        self.windows, self.apart, self.done = [], 0.0, 0

    def frames(self, vae: Any, transfer: Transfer, method: DecodeMethod, time: Tensor | None = None) -> Tensor:
        """Video (1, 3, F, H, W) in -1..1, fp32, on the host; what an earlier call finished is not done again."""
        decoder = HeldDecoder(vae, transfer, method, time)
        if not self.windows:
            self.stride, cuts = _windows(vae, self.latents, method.window)
            self.windows = [Window(part, [_whole(part)]) for part in cuts]
        if self.together is not None:
            self._decode_together(self.together, decoder)
        for window in self.windows:
            while window.pending:
                region = window.pending[-1]
                parts = _split(region, method, self.ratios[0])
                if len(parts) > 1:
                    window.pending[-1:] = parts
                    continue
                self._region(window, region, decoder)
                window.pending.pop()
        videos = [window.video for window in self.windows if window.video is not None]
        return videos[0] if len(videos) == 1 else _joined(videos, self.stride, self._frames(self.latents.shape[2]))

    def region(self, task: RegionTask, decoder: HeldDecoder) -> Tensor:
        """Frames (1, 3, F, H, W) of ``task`` alone, fp32, on the host; the windows of this object stay as they are."""
        alone = Window(task.latents, [])
        self._region(alone, _whole(task.latents), decoder)
        assert alone.video is not None
        return alone.video

    def _decode_together(self, together: Together, decoder: HeldDecoder) -> None:
        """Decode the regions of which nothing is done on all devices, if two or more; failed ones stay pending."""
        method, tasks, places = decoder.method, [], []
        time = None if decoder.time is None else to_host(decoder.time)
        for window in self.windows:
            window.pending = [part for region in window.pending for part in _split(region, method, self.ratios[0])]
            for region in reversed([region for region in window.pending if not region.frames]):
                tasks.append(RegionTask(region.of(window.latents).contiguous(), method, time, self.noise))
                places.append((window, region))
        if len(tasks) < 2:
            return
        decoded = together(tasks, lambda task: self.region(task, decoder))
        for (window, region), frames in zip(places, decoded, strict=True):
            if frames is not None and not self.validate(frames):
                self._put(window, region, frames)
                window.pending.remove(region)

    def _region(self, window: Window, region: Region, decoder: HeldDecoder) -> None:
        """Decode the rest of ``region``; a chunk is done once its frames are in the window."""
        latents = region.of(window.latents)
        total = latents.shape[2]
        while region.frames < total:
            many = min(decoder.method.frames or total, total - region.frames)
            part = latents[:, :, region.frames : region.frames + many]
            if many < total:
                region.past = region.past or CausalCache(decoder.transfer)
                region.past.transfer = decoder.transfer
            with self.guard(*self._part(many * region.cells)):
                try:
                    frames = self._decoded(decoder, part, region.past)
                except BaseException:
                    if region.past is not None:
                        region.past.abandon()
                    raise
            self._put(window, region, frames)
            if region.past is not None:
                region.past.commit(many)
            region.frames, self.done = region.frames + many, self.done + 1
        region.past = None

    def _decoded(self, decoder: HeldDecoder, latents: Tensor, past: CausalCache | None) -> Tensor:
        """Frames of one call, on the host in fp32; raises InvalidOutputError for streamed ones that cannot be right."""
        vae, transfer, side, config = decoder.vae, decoder.transfer, decoder.method.stream, decoder.vae.config
        with nullcontext() if past is None else remembering(vae, past):
            if not side:
                part = transfer.to_device(latents.contiguous())
                return transfer.to_host_fp32(decoder_call(vae, part, decoder.time, self.noise))
            elements = pixel_elements(config, latents.shape[2] * self.ratios[1])
            stream = Stream(transfer, side, elements, past=past, smaller=self.smaller, check=self.check)
            video = streamed(stream, vae, latents, decoder.time)
            if fault := self.validate(video):
                raise InvalidOutputError(fault)
            return video.float()

    def _put(self, window: Window, region: Region, frames: Tensor) -> None:
        """Write the next ``frames`` of ``region`` into the window; blend and compare tiles where they overlap."""
        spatial, temporal = self.ratios
        # In pixel frames: the first latent frame of a window is one of them, each later one ``temporal``.
        first = region.frames * temporal - (temporal - 1) if region.frames else 0
        total = self._frames(window.latents.shape[2])
        if window.video is None:
            height, width = (edge * spatial for edge in window.latents.shape[-2:])
            if frames.shape[2:] == (total, height, width) and region.weights is None:
                window.video = frames
                return
            window.video = torch.zeros(1, frames.shape[1], total, height, width)
            window.covered = torch.zeros(height, width)
        (top, bottom), (left, right) = ((a * spatial, b * spatial) for a, b in (region.rows, region.columns))
        target = window.video[:, :, first : first + frames.shape[2], top:bottom, left:right]
        if region.weights is None:
            target.copy_(frames)
            return
        rows, columns = region.weights
        weight = rows[:, None] * columns
        assert window.covered is not None
        covered = window.covered[top:bottom, left:right]
        middle = (covered > MIDDLE[0]) & (covered < MIDDLE[1])
        if bool(middle.any()):
            delta = target[..., middle] / covered[middle] - frames[..., middle]
            self.apart = max(self.apart, float(delta.abs().max()))
        target.add_(frames * weight)
        if first + frames.shape[2] >= total:
            covered.add_(weight)

    def _frames(self, latent_frames: int) -> int:
        return (latent_frames - 1) * self.ratios[1] + 1

    def _part(self, cells: int) -> tuple[int, int]:
        """Index of the part that the next call is, and about how many there are."""
        left = sum(region.cells * (w.latents.shape[2] - region.frames) for w in self.windows for region in w.pending)
        return self.done, self.done + max(1, -(-left // max(1, cells)))


def decoded_together(group: Group, tasks: list[RegionTask], decode: Decode) -> list[torch.Tensor | None]:
    """On the leader: frames (1, 3, F, H, W) of each task; None where its device failed. The others :func:`serve`."""
    frames: list[torch.Tensor | None] = []
    size = group.world.size
    for first in range(0, len(tasks), size):
        some = tasks[first : first + size]
        group.world.shared([*some, *[None] * (size - len(some))])
        frames += (group.world.collected(_decode_or_none(decode, some[0])) or [])[: len(some)]
    return frames


def serve(group: Group, decode: Decode) -> int:
    """On the other ranks: decode tasks that the leader hands out until it sends None; returns how many succeeded."""
    count = 0
    while (tasks := group.world.shared(None)) is not None:
        task = tasks[group.world.rank]
        frames = None if task is None else _decode_or_none(decode, task)
        count += frames is not None
        group.world.collected(frames)
    return count


def _decode_or_none(decode: Decode, task: RegionTask) -> torch.Tensor | None:
    """The frames; None where the device fails: the leader then decodes the region by itself, in smaller parts."""
    try:
        return decode(task)
    except (*DEVICE_ERRORS, InvalidOutputError):
        return None


def pixel_elements(config: Any, frames: int) -> int:
    """Elements of a decoder's last layer per pixel, over all of so many pixel ``frames``."""
    return max(1, narrowest(config) * frames // int(config.get("patch_size") or 1) ** 2)


def decoder_call(vae: Any, latents: Tensor, time: Tensor | None, noise: bytes | None = None) -> Tensor:
    """Decode latents on the device by the decoder of ``vae`` alone, without upstream's tiles and windows. Its layers
    draw noise from a generator of the state ``noise``; None for a decoder without."""
    if noise is not None:
        with DrawnOnHost(noise), torch.compiler.set_stance("force_eager"):
            return decoder_call(vae, latents, time)
    if getattr(vae, "post_quant_conv", None) is not None:
        latents = vae.post_quant_conv(latents)
    output = vae.decoder(latents) if time is None else vae.decoder(latents, time)
    return output[0] if isinstance(output, tuple) else output


def pieces_of(vae: Any, latents: Tensor, method: DecodeMethod, ratio: int) -> Counter[tuple[int, int, int]]:
    """Number of decoder calls by frames, rows and columns of their latents (1, C, T, h, w); chunks count as one call.
    ``ratio`` is pixels per latent row and column."""
    _, windows = _windows(vae, latents, method.window)
    regions = _split(_whole(latents), method, ratio)
    return Counter((window.shape[2], *region.shape) for window in windows for region in regions)


def windows_of(frames: int, most: int, stride: int) -> list[slice]:
    """Upstream's windows over ``frames`` latent frames, one every ``stride`` frames: ``most`` frames each, and the one
    before, which all but the first cut off their result. Up to ``most`` frames are one window. A last window of only
    the frame that is cut off is left out."""
    if frames <= most:
        return [slice(0, frames)]
    return [slice(start, start + most + 1) for start in range(0, frames, stride) if start == 0 or start + 1 < frames]


def weights_over(edges: list[tuple[int, int]], length: int) -> list[Tensor]:
    """The weights of overlapping parts, (first, end) in ``edges``, at each pixel of a line: ramps that sum to one."""
    ramps = torch.zeros(len(edges), length)
    for index, (first, end) in enumerate(edges):  # a ramp only where something overlaps
        before = max((e for _, e in edges[:index]), default=first)
        after = min((f for f, _ in edges[index + 1 :]), default=end)
        ramp_in, ramp_out = max(0, before - first), max(0, end - after)
        shape = torch.ones(end - first)
        if ramp_in:
            shape[:ramp_in] = torch.minimum(shape[:ramp_in], (torch.arange(ramp_in) + 0.5) / ramp_in)
        if ramp_out:
            down = ((torch.arange(ramp_out) + 0.5) / ramp_out).flip(0)
            shape[-ramp_out:] = torch.minimum(shape[-ramp_out:], down)
        ramps[index, first:end] = shape
    total = ramps.sum(0)
    return [ramps[index, first:end] / total[first:end] for index, (first, end) in enumerate(edges)]


def tiles_over(length: int, tile: int, overlap: int) -> list[tuple[int, int]]:
    """Parts of ``tile`` cells that cover ``length`` cells and overlap by at least ``overlap``."""
    if length <= tile:
        return [(0, length)]
    count = -(-(length - tile) // max(1, tile - overlap)) + 1
    return [(start, start + tile) for start in ((length - tile) * index // (count - 1) for index in range(count))]


def _whole(latents: Tensor) -> Region:
    return Region((0, latents.shape[-2]), (0, latents.shape[-1]))


def _windows(vae: Any, latents: Tensor, most: int) -> tuple[int, list[Tensor]]:
    """Pixel frames from one window to the next, and the windows of ``latents``, as :func:`windows_of` cuts them;
    ``most`` 0 takes the VAE's own size and stride. 0 and one window for a VAE that does not decode in windows."""
    if full_name(vae) != WINDOWED or not vae.use_framewise_decoding:
        return 0, [latents]
    ratio = vae.temporal_compression_ratio
    stride = max(1, int(most * STRIDE)) if most else vae.tile_sample_stride_num_frames // ratio
    cuts = windows_of(latents.shape[2], most or vae.tile_sample_min_num_frames // ratio, stride)
    return stride * ratio, [latents[:, :, cut] for cut in cuts]


def _joined(videos: list[Tensor], stride: int, total: int) -> Tensor:
    """The video of a framewise decode, joined as upstream does: each later window loses its first frame and fades in
    over the one before. ``stride`` is pixel frames from one window to the next, ``total`` those of the video."""
    most = videos[0].shape[2] - 1 - stride
    result, before = [videos[0][:, :, : stride + 1]], videos[0]
    for video in videos[1:]:
        video = video[:, :, 1:].clone()
        extent = min(before.shape[2], video.shape[2], most)
        fade = (torch.arange(extent) / max(1, extent))[:, None, None]
        if extent:
            video[:, :, :extent] = before[:, :, -extent:] * (1 - fade) + video[:, :, :extent] * fade
        result.append(video[:, :, :stride])
        before = video
    return torch.cat(result, dim=2)[:, :, :total]


def _split(region: Region, method: DecodeMethod, ratio: int) -> list[Region]:
    """``region`` in tiles as ``method`` wants them, the first one last; itself where it is small enough."""
    side = max(1, method.tile // ratio)
    height, width = region.shape
    if not method.tile or (height <= side and width <= side):
        return [region]
    asked = int(method.tile * OVERLAP) if method.overlap < 0 else method.overlap
    overlap = min(-(-asked // ratio), -(-side // 2))  # the overlap asked for may be of larger tiles
    lines = [tiles_over(extent, side, overlap) for extent in (height, width)]
    inherited = region.weights or (torch.ones(height * ratio), torch.ones(width * ratio))
    ramps = []
    for parts, extent, outer in zip(lines, (height, width), inherited, strict=True):
        edges = [(first * ratio, end * ratio) for first, end in parts]
        weights = zip(weights_over(edges, extent * ratio), edges, strict=True)
        ramps.append([weight * outer[first:end] for weight, (first, end) in weights])
    tiles = []
    for (top, bottom), high in zip(lines[0], ramps[0], strict=True):
        for (left, right), wide in zip(lines[1], ramps[1], strict=True):
            past = None if region.past is None else region.past.cropped((top, bottom), (left, right), height)
            rows = top + region.rows[0], bottom + region.rows[0]
            columns = left + region.columns[0], right + region.columns[0]
            tiles.append(Region(rows=rows, columns=columns, weights=(high, wide), frames=region.frames, past=past))
    return tiles[::-1]


def decode_as_published(vae: Any) -> None:
    """Make ``vae`` what its publisher runs where diffusers builds another one. Mochi's decoder drops frames after each
    upsampling, not at the end. LTX-Video's convolutions pad rows and columns as its file says, on both sides of a
    frame, so that tiles stay exact; diffusers knows zeros only."""
    if full_name(vae) == MOCHI:
        vae.drop_last_temporal_frames = False
        for block in vae.decoder.up_blocks:
            block.forward = types.MethodType(mochi_up_from_the_start, block)
    if SPATIAL_PADDING in vars(vae):
        for conv in (module for module in vae.modules() if isinstance(module, nn.Conv3d)):
            conv.padding_mode = vae.spatial_padding_mode
