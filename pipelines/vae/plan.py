"""How a pass through a VAE begins: the attempt that fits what is free, and what may follow it."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from ...compat.device.execution import HOST
from ...compat.device.facts import free_bytes, host_free_bytes
from ...compat.device.quirks import DevicePolicy
from ...compat.device.vae_policy import METHODS, TILES, Form, largest_buffer_bytes, limit_of, tiles_below
from ..base import Pipeline
from ..memory.estimates import Size, attempt_bytes, plane_bytes
from .fallback import Allowed, Attempt
from .layerwise import SIDES

AUTO, FULL, TILED, CHUNKED, STREAMING, ON_CPU = METHODS
CHUNKS = (8, 4, 2, 1)  # latent frames
PLANES = 4  # activations that a streamed decode has in host memory at once


class Beginning:
    """What a pass knows before it begins; :class:`.vae.Passes` is the rest of it.

    ``coder`` is ``decoder`` or ``encoder``; ``size`` pixel frames, rows and columns; ``ratios`` pixels per latent cell
    and pixel frames per latent frame; ``automatic`` whether precision and device may change.
    """

    pipeline: Pipeline
    coder: str
    size: tuple[int, int, int]
    ratios: tuple[int, int]
    form: Form
    method: str
    policy: DevicePolicy
    device: torch.device
    cell: int
    automatic: bool
    attempt: Attempt

    def _first(self, size: tuple[int, int, int], tile: int) -> tuple[Attempt, Allowed]:
        """The attempt to begin with, and what may follow it."""
        form, method, on_host = self.form, self.method, self.device.type == HOST.type
        decodes = self.coder == "decoder"
        tiles = () if method in (FULL, CHUNKED, STREAMING) else tiles_below(max(size[1:]), self.cell)
        if form.tile and tiles:
            tiles = tuple(side for side in (form.tile, *tiles) if side <= form.tile)
        start = self._first_tile(size, form.tile or tile) if method in (AUTO, TILED) else 0
        causal = decodes and self.pipeline.spec.causal_decoder and method in (AUTO, TILED, CHUNKED)
        latent_frames = (size[0] - 1) // self.ratios[1] + 1
        chunks: tuple[int, ...] = tuple(count for count in CHUNKS if count < latent_frames) if causal else ()
        if form.frames and causal:
            chunks = tuple(count for count in (form.frames, *CHUNKS) if count <= form.frames)
        noisy = any(self.pipeline.configs["vae"].get("decoder_inject_noise") or ())  # such a decoder cannot be streamed
        streamable = decodes and (method == STREAMING or (method in (AUTO, CHUNKED) and not noisy))
        streams: tuple[int, ...] = SIDES if streamable else ()
        if form.tile and method == STREAMING:
            streams = (form.tile, *(side for side in SIDES if side < form.tile))
        first = Attempt(self.pipeline.precision.vae, start, overlap=form.overlap)
        if method == ON_CPU and not on_host:
            first = Attempt(torch.float32, on_host=True)
        elif method == CHUNKED:
            first = replace(first, frames=form.frames or next(iter(chunks), 1))
        elif method == STREAMING:
            first = replace(first, stream=streams[0], frames=self._streamed_frames(size))
        first = replace(first, library=first.on_host or not self._fails_with_library())
        allowed = Allowed(self.automatic, self.automatic and not on_host, tiles, start, chunks, streams)
        if method == AUTO and decodes and not on_host:
            first = self._planned(first, allowed, size)
        return first, allowed

    def _fails_with_library(self) -> bool:
        """Whether an earlier run on this device learned that this coder needs torch's convolution library off."""
        probes = self.pipeline.probes
        return probes is not None and bool(probes.recall(self._learned()))

    def _learned(self) -> str:
        return f"{self.pipeline.family} {self.coder} fails with MIOpen"

    def _planned(self, first: Attempt, allowed: Allowed, size: tuple[int, int, int]) -> Attempt:
        """The attempt that fits into what is free now: whole, else the exact forms, else tiles.

        Other parts leave the device first. A forecast that is wrong is mended by the ladder.
        """
        pipeline, free = self.pipeline, room_on(self.pipeline, self.device)
        if free is None or not pipeline.weights or (first.tile and (self.form.tile or limit_of(self.policy))):
            return first
        if first.tile and self.policy.tile_pixels:
            return first
        mode, keep_free = pipeline.offloader.mode, pipeline.offloader.options.keep_free_bytes
        weights = pipeline.weights["vae"].resident(mode, "vae") - bytes_on(pipeline.parts.get("vae"), self.device)
        area = Size(size[2], size[1], size[0])

        def fits(attempt: Attempt) -> bool:
            needed = attempt_bytes(pipeline, area, attempt.frames, attempt.tile, attempt.stream)
            return weights + needed + keep_free <= free

        if fits(replace(first, tile=0)):
            return replace(first, tile=0)
        for name in self._others():
            pipeline.offloader.release(name)
        free = room_on(pipeline, self.device) or free
        whole = replace(first, tile=0)  # a family may advise tiles, which are not exact
        exact = [whole, *(replace(whole, frames=count) for count in allowed.chunks)]
        if plane_bytes(pipeline, area) * PLANES <= host_free_bytes():
            fewest = allowed.chunks[-1] if allowed.chunks else 0
            exact += [replace(whole, frames=fewest, stream=side) for side in allowed.streams]
        if first.tile:  # advised: rather than layer by layer, which is slow
            exact = [each for each in exact if not each.stream]
        tiles = [replace(first, tile=tile) for tile in (*([first.tile] if first.tile else ()), *allowed.tiles)]
        return next((attempt for attempt in (*exact, *tiles) if fits(attempt)), (*exact, *tiles)[-1])

    def _streamed_frames(self, size: tuple[int, int, int]) -> int:
        """Latent frames per chunk of a streamed decode: as many as were asked; else all, or one on a small host."""
        if not self.pipeline.spec.causal_decoder or not self.pipeline.weights:
            return 0
        planes = plane_bytes(self.pipeline, Size(size[2], size[1], size[0])) * PLANES
        return self.form.frames or int(planes > host_free_bytes())

    def _first_tile(self, size: tuple[int, int, int], advised: int) -> int:
        """The tile to begin with, in pixels: what the method, the family and the device want; 0 for whole."""
        frames, rows, columns = size
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

    def _others(self) -> list[str]:
        """The other parts of the pipeline that are on the device."""
        parts = self.pipeline.parts
        return [
            name
            for name, part in parts.items()
            if name != "vae"
            and self.device.type != HOST.type
            and any(tensor.device == self.device for tensor in part.parameters())
        ]

    def _needed(self) -> int:
        """Bytes beside the weights that the attempt is forecast to take; 0 where nobody knows."""
        if self.coder != "decoder" or not self.pipeline.weights:
            return 0
        frames, rows, columns = self.size
        at = self.attempt
        return attempt_bytes(self.pipeline, Size(columns, rows, frames), at.frames, at.tile, at.stream)


def room_on(pipeline: Pipeline, device: torch.device) -> int | None:
    """Bytes that a part may take on ``device``: what is free, or all of it where a host lets its other models leave."""
    return (pipeline.facts.total_bytes or None) if pipeline.offloader.evicts else free_bytes(device)


def bytes_on(module: nn.Module | None, device: torch.device) -> int:
    """Bytes of ``module`` on ``device``."""
    tensors = () if module is None else (*module.parameters(), *module.buffers())
    return sum(tensor.nbytes for tensor in tensors if tensor.device == device)
