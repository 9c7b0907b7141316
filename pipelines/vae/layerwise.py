"""A decoder layer by layer over tiles, exactly: what it computes is the whole, in a fraction of the device's memory.

An activation lives in host memory as a plane. A layer reads a tile of it with as many cells around it as its kernel
sees, computes on the device, and writes the tile's core into the next plane. At the edge of the picture there is
nothing around, so the layer's own padding does what it always does. Norms over the whole plane get their mean and
variance from sums gathered while the plane was written. So there are no seams and nothing is blended.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from ...compat.device.facts import empty_cache, first_line
from ...compat.memory.hooks import weights_on
from ...compat.memory.transfer import Transfer
from .chunked import Past, Place
from .fallback import MEMORY, kind_of

SIDES = (256, 128, 64, 32, 16, 8)  # pixels of the last layer's tile
Region = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class Moments:
    """Mean and variance of each group of channels: (T or 1, G) each, fp64, on the host."""

    mean: Tensor
    variance: Tensor


@dataclass(frozen=True, slots=True)
class Sheet:
    """One activation (1, C, T, H, W) in host memory, and what a group norm needs to know of it."""

    plane: Tensor
    moments: Moments | None = None


class Stream:
    """The walk of one decoder over planes.

    Args:
        way: to the device and back. tile: pixels of the last layer, one of :data:`SIDES`.
        pixel_elements: elements that the last layer holds per pixel of a frame, of all frames; tiles of other layers
            are chosen to hold as many elements.
        past: what a causal decoder remembers; None where the piece is all of time.
        smaller: from a tile that found no room, and the error's first line, to a smaller tile; 0 to give up.
        check: called before each tile; raises on a cancel. groups: of the decoder's group norms.
        per_frame: whether a norm is of each frame for itself.
    """

    def __init__(
        self,
        way: Transfer,
        tile: int,
        pixel_elements: int,
        *,
        past: Past | None = None,
        smaller: Callable[[int, str], int] = lambda tile, text: 0,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.way, self.tile, self.pixel_elements = way, tile, pixel_elements
        self.past, self.smaller, self.check = past, smaller, check
        self.groups, self.per_frame = 0, False

    def walk(self, run: Callable[..., Tensor], *sources: Sheet, halo: int = 0, grow: int = 1) -> Sheet:
        """What ``run`` makes of the planes of ``sources``, tile by tile.

        Args:
            run: from tiles (1, C, T, h, w) on the device to (1, C', T', h * grow, w * grow) there.
            halo: cells around a tile that ``run`` must see for its core to be right.
        """
        planes = [sheet.plane for sheet in sources]
        height, width = planes[0].shape[-2:]
        pending: list[Region] = [(0, height, 0, width)]
        found: Tensor | None = None
        sums = Sums()
        while pending:
            region, failed = pending.pop(), ""
            side = self._side(planes[0], grow)
            if max(region[1] - region[0], region[3] - region[2]) > side:
                pending += reversed(parted(region, side))
                continue
            self.check()
            place = place_of(region, halo, height, width)
            try:
                piece = self._one(run, planes, place)
                part = self._summed(piece)
                here = self.way.copied(piece)
                del piece
            except RuntimeError as error:
                if kind_of(error) != MEMORY:
                    raise
                after = self.smaller(self.tile, first_line(error))
                if not after:
                    raise
                failed, self.tile = "out of memory", after
            if failed:  # outside the block, whose error holds the tensors of the failed tile
                gc.collect()
                empty_cache(self.way.device)
                pending.append(region)
                continue
            if part is not None:
                sums.add(*part)
            if found is None:
                found = torch.empty((*here.shape[:3], height * grow, width * grow), dtype=here.dtype)
            top, bottom, left, right = (edge * grow for edge in region)
            found[..., top:bottom, left:right] = here
        assert found is not None, "a plane without cells"
        return Sheet(found, sums.moments())

    def normed(self, norm: nn.Module, tile: Tensor, moments: Moments | None) -> Tensor:
        """``tile`` through the group norm ``norm`` with the moments of its whole plane, rounded to its dtype once."""
        if moments is None:
            raise ValueError("a group norm over a plane whose moments were not gathered")
        per_group = tile.shape[1] // moments.mean.shape[1]
        scale = torch.rsqrt(moments.variance + norm.eps)  # type: ignore[operator]

        def spread(values: Tensor) -> Tensor:
            columns = values.float().to(tile.device).repeat_interleave(per_group, dim=1)
            return columns.transpose(0, 1)[None, :, :, None, None]

        with weights_on(norm, like=tile) as (weight, bias):
            column = (1, -1, 1, 1, 1)
            factor = spread(scale) * weight.float().view(column)
            offset = (0.0 if bias is None else bias.float().view(column)) - spread(
                moments.mean * scale
            ) * weight.float().view(column)
            return torch.addcmul(offset, tile.float(), factor).to(tile.dtype)

    def _one(self, run: Callable[..., Tensor], planes: list[Tensor], place: Place) -> Tensor:
        if self.past is not None:
            self.past.place = place
        tiles = [self.way.sent(place.read(plane).contiguous()) for plane in planes]
        found = place.core(run(*tiles))
        return found.contiguous()

    def _summed(self, piece: Tensor) -> tuple[int, Tensor, Tensor] | None:
        """Count, mean and squared distance of the groups of a piece: (T or 1, G), on the host in fp64."""
        if not self.groups or piece.shape[1] % self.groups:
            return None
        rows = piece[0].unflatten(0, (self.groups, -1)).permute(2, 0, 1, 3, 4)  # T, G, C / G, h, w
        rows = rows.flatten(2) if self.per_frame else rows.transpose(0, 1).flatten(1).unsqueeze(0)
        count = rows.shape[-1]
        mean, variance = [], []
        for frame in rows.unbind(0):  # one frame widened at a time
            wide = frame.float()
            centre = wide.mean(-1)
            mean.append(centre)
            variance.append((wide - centre[:, None]).square_().sum(-1))
        return count, torch.stack(mean).cpu().double(), torch.stack(variance).cpu().double()

    def _side(self, plane: Tensor, grow: int) -> int:
        """Cells per side of a tile of ``plane`` that holds as many elements as the last layer's does."""
        per_cell = plane.shape[1] * plane.shape[2] * grow * grow
        return max(1, math.isqrt(max(1, self.pixel_elements * self.tile**2 // per_cell)))


class Sums:
    """Mean and variance of what comes piece by piece, merged as Chan, Golub and LeVeque do (1983), in fp64."""

    def __init__(self) -> None:
        self.count, self.mean, self.squares = 0, torch.zeros(()), torch.zeros(())

    def add(self, count: int, mean: Tensor, squares: Tensor) -> None:
        """Take in a piece of ``count`` values per group."""
        total = self.count + count
        apart = mean - self.mean
        self.squares = self.squares + squares + apart**2 * (self.count * count / total)
        self.mean = self.mean + apart * (count / total)
        self.count = total

    def moments(self) -> Moments | None:
        """Of all pieces; None where none came."""
        return Moments(self.mean, self.squares / self.count) if self.count else None


def place_of(region: Region, halo: int, height: int, width: int) -> Place:
    """``region`` of a plane with ``halo`` cells around it, as far as there are any."""
    top, bottom, left, right = region
    around = min(halo, top), min(halo, height - bottom), min(halo, left), min(halo, width - right)
    return Place((top, bottom), (left, right), around, height, width)


def parted(region: Region, side: int) -> list[Region]:
    """``region`` in even parts of at most ``side`` cells in each direction."""
    top, bottom, left, right = region
    return [(a, b, c, d) for a, b in _even(top, bottom, side) for c, d in _even(left, right, side)]


def _even(first: int, end: int, side: int) -> Iterator[tuple[int, int]]:
    count = -(-(end - first) // side)
    edges = [first + (end - first) * index // count for index in range(count + 1)]
    yield from pairwise(edges)


def attended(stream: Stream, query: Tensor, planes: Tensor, frames_before: int, heads: int) -> Tensor:
    """Frame-causal attention of a tile's queries over keys and values in host memory, a block of them at a time.

    Args:
        query: (1, C, T, h, w) on the device. planes: keys and values, (1, 2C, frames_before + T, H, W), on the host.

    Returns:
        (1, C, T, h, w) in the dtype of ``query``. Scores are fp32; beside operands live one block and its scores.
    """
    frames, cells = query.shape[2], query.shape[3] * query.shape[4]
    split = query[0].unflatten(0, (heads, -1)).permute(2, 0, 3, 4, 1).flatten(2, 3)  # T, heads, n, D
    split = split.float() * split.shape[-1] ** -0.5
    found = torch.zeros_like(split)
    weight = split.new_zeros(*split.shape[:3], 1)
    top = torch.full_like(weight, -math.inf)
    block = max(1, stream.pixel_elements * stream.tile**2 // (4 * max(1, frames * heads * cells)))
    for frame in range(planes.shape[2]):
        first = max(0, frame - frames_before)  # the earliest of our frames that sees this one
        seen = planes[0, :, frame].flatten(1)
        for start in range(0, seen.shape[1], block):
            stream.check()
            key, value = stream.way.sent(seen[:, start : start + block].contiguous()).float().chunk(2)
            key, value = key.unflatten(0, (heads, -1)), value.unflatten(0, (heads, -1)).transpose(1, 2)
            scores = torch.matmul(split[first:], key)
            peak = torch.maximum(top[first:], scores.amax(-1, keepdim=True))
            fade = torch.exp(top[first:] - peak)
            scores = scores.sub_(peak).exp_()
            found[first:] = found[first:] * fade + torch.matmul(scores, value)
            weight[first:] = weight[first:] * fade + scores.sum(-1, keepdim=True)
            top[first:] = peak
    found = (found / weight).unflatten(2, query.shape[3:]).permute(1, 4, 0, 2, 3).flatten(0, 1)
    return found.unsqueeze(0).to(query.dtype)
