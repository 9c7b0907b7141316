"""The launches of :mod:`..group_norm`: partial statistics, their sum, and the pass that writes the padded result.
A tile is pixels by channels; by its strides, one kernel serves tensors whose pixels, or channels, are adjacent."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..terms import GroupNorm, Modulation, Norm, empty_padded
from .rounding import INTERPRETED, rounded, upcast
from .rows import warps_for

STRIP = 16384 if INTERPRETED else 2048  # elements that one load of the statistics takes
STRIPS = 16  # loads of one program: few partial sums, yet thousands of programs for a clip
TILE = 16384 if INTERPRETED else 4096  # elements of the tile that is written
MOST_PARTS = 4096  # partial sums of one group that are added up at once


@triton.jit
def partial_kernel(
    x, parts, pixels, frames, groups, runs, count, x_b, x_c, x_t, x_p,
    WIDTH: tl.constexpr, PER_FRAME: tl.constexpr, CHANNELS: tl.constexpr, STRIP: tl.constexpr, STRIPS: tl.constexpr,
):  # fmt: skip
    """Count, mean and sum of squared deviations of STRIP * STRIPS pixels of CHANNELS of the WIDTH channels of a group.
    ``runs`` programs share the pixels, ``count`` programs a group; merged strip by strip as Chan et al. 1979 do."""
    group, part = (tl.program_id(0) // count).to(tl.int64), (tl.program_id(0) % count).to(tl.int64)
    own = (part // runs) * CHANNELS + tl.arange(0, CHANNELS)
    outer = group // groups
    if PER_FRAME:
        x += (outer // frames) * x_b + (outer % frames) * x_t
    else:
        x += outer * x_b
    pixel = (part % runs) * (STRIP * STRIPS) + tl.arange(0, STRIP)
    number, mean, spread = 0.0, 0.0, 0.0
    for _strip in range(STRIPS):
        inside = (pixel < pixels)[:, None] & (own < WIDTH)[None, :]
        at = (pixel * x_p)[:, None] + (((group % groups) * WIDTH + own) * x_c)[None, :]
        values = upcast(tl.load(x + at, mask=inside, other=0.0))
        here = tl.sum(inside.to(tl.float32))
        middle = tl.sum(values) / tl.maximum(here, 1.0)
        off = tl.where(inside, values - middle, 0.0)
        share = here / tl.maximum(number + here, 1.0)
        step = middle - mean
        spread += tl.sum(off * off) + step * step * number * share
        mean += step * share
        number += here
        pixel += STRIP
    at = parts + (group * count + part) * 3
    tl.store(at, number)
    tl.store(at + 1, mean)
    tl.store(at + 2, spread)


@triton.jit
def total_kernel(
    parts, weight, bias, means, gains, shifts, count, channels, groups, group_width, eps,
    COUNT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Mean, gain (weight / deviation) and shift by channel of a group, from ``count`` partials (Chan et al. 1979)."""
    group = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, COUNT)
    at, inside = parts + (group * count + part) * 3, part < count
    number = tl.load(at, mask=inside, other=0.0)
    mean = tl.load(at + 1, mask=inside, other=0.0)
    total = tl.sum(number)
    middle = tl.sum(number * mean) / total
    off = tl.where(inside, mean - middle, 0.0)
    variance = (tl.sum(tl.load(at + 2, mask=inside, other=0.0)) + tl.sum(number * off * off)) / total
    own = tl.arange(0, WIDTH)
    within = own < group_width
    channel = (group % groups) * group_width + own
    gain = tl.zeros((WIDTH,), tl.float32) + tl.rsqrt(variance + eps)
    shift = tl.zeros((WIDTH,), tl.float32)
    if weight is not None:
        gain = gain * upcast(tl.load(weight + channel, mask=within, other=0.0))
    if bias is not None:
        shift = upcast(tl.load(bias + channel, mask=within, other=0.0))
    row = (group // groups) * channels + channel
    tl.store(means + row, tl.zeros((WIDTH,), tl.float32) + middle, mask=within)
    tl.store(gains + row, gain, mask=within)
    tl.store(shifts + row, shift, mask=within)


@triton.jit
def finished(x, mean, gain, shift, inside, channels, eps, RMS: tl.constexpr, SILU: tl.constexpr):
    """A tile (pixels, channels) read at ``x``, fp32: normed by RMS, else ``mean``; then gain, shift and any SiLU."""
    y = upcast(tl.load(x, mask=inside, other=0.0))
    if RMS:
        y = y * tl.rsqrt(tl.sum(y * y, axis=1) / channels + eps)[:, None] * gain + shift
    else:
        y = (y - mean) * gain + shift
    if SILU:
        y = y / (1.0 + tl.exp(-y))
    return y


@triton.jit
def padded_kernel(
    x, out, mean, gain, shift, column_blocks, channel_blocks, frames, height, width, out_frames, out_height,
    channels, eps, front, top, x_b, x_c, x_t, x_h, x_w, out_b, out_c, out_t, out_h, out_w, table_b, table_t, shift_b,
    RMS: tl.constexpr, SILU: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    COLUMNS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """One tile of one image row of the result, and the border beside it: copies of the nearest pixel. ``table_b`` and
    ``table_t`` are the strides of ``mean`` and ``gain`` by sample and frame, ``shift_b`` is that of ``shift``."""
    block = tl.program_id(0) % (column_blocks * channel_blocks)
    row = (tl.program_id(0) // (column_blocks * channel_blocks)).to(tl.int64)
    out_y, out_frame = row % out_height, (row // out_height) % out_frames
    sample = row // (out_height * out_frames)
    y = tl.minimum(tl.maximum(out_y - top, 0), height - 1)
    frame = tl.minimum(tl.maximum(out_frame - front, 0), frames - 1)
    channel = (block % channel_blocks) * CHANNELS + tl.arange(0, CHANNELS)
    within = channel < channels
    means, gains, shifts = 0.0, 1.0, 0.0
    if mean is not None:
        means = tl.load(mean + sample * table_b + frame * table_t + channel, mask=within, other=0.0)[None, :]
    if gain is not None:
        gains = upcast(tl.load(gain + sample * table_b + frame * table_t + channel, mask=within, other=0.0))[None, :]
    if shift is not None:
        shifts = upcast(tl.load(shift + sample * shift_b + frame * table_t + channel, mask=within, other=0.0))[None, :]
    x += sample * x_b + frame * x_t + y * x_h
    out += sample * out_b + out_frame * out_t + out_y * out_h
    column = (block // channel_blocks) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (column < width)[:, None] & within[None, :]
    x_channel, out_channel = (channel.to(tl.int64) * x_c)[None, :], (channel.to(tl.int64) * out_c)[None, :]
    source = x + ((column * x_w)[:, None] + x_channel)
    target = out + (((column + LEFT) * out_w)[:, None] + out_channel)
    pixels = finished(source, means, gains, shifts, inside, channels, eps, RMS, SILU)
    tl.store(target, rounded(pixels, out.dtype.element_ty), mask=inside)
    if LEFT > 0:  # noqa: SIM102 - known when it is compiled, so that nothing is compiled for it
        if block // channel_blocks == 0:
            beside = finished(x + x_channel, means, gains, shifts, within[None, :], channels, eps, RMS, SILU)
            for step in tl.static_range(LEFT):
                tl.store(out + out_channel + step * out_w, rounded(beside, out.dtype.element_ty), mask=within[None, :])
    if RIGHT > 0:  # noqa: SIM102
        if block // channel_blocks == column_blocks - 1:
            last = x + (width - 1) * x_w + x_channel
            beside = finished(last, means, gains, shifts, within[None, :], channels, eps, RMS, SILU)
            for step in tl.static_range(RIGHT):
                end = (width + LEFT + step) * out_w
                tl.store(out + out_channel + end, rounded(beside, out.dtype.element_ty), mask=within[None, :])


def group_norm_silu_pad(x: Tensor, norm: GroupNorm, pad: list[int], silu: bool, layout: str) -> Tensor:
    """The operation ``group_norm_silu_pad`` on a device, or interpreted."""
    out = empty_padded(x, pad, layout)
    if not out.numel():
        return out
    x = _evenly_strided(x)
    outer = x.shape[0] * (x.shape[2] if norm.per_frame else 1)
    parts = _partial_sums(x, norm.groups, norm.per_frame)
    means, gains, shifts = torch.empty((3, outer, x.shape[1]), dtype=torch.float32, device=x.device).unbind(0)
    width = x.shape[1] // norm.groups
    total_kernel[(outer * norm.groups,)](
        parts, norm.weight, norm.bias, means, gains, shifts, parts.shape[1], x.shape[1], norm.groups, width, norm.eps,
        COUNT=triton.next_power_of_2(parts.shape[1]), WIDTH=triton.next_power_of_2(width),
    )  # fmt: skip
    steps = (x.shape[1] * (x.shape[2] if norm.per_frame else 1), x.shape[1] if norm.per_frame else 0)
    _write(x, out, (means, gains, shifts), (*steps, steps[0]), norm.eps, rms=False, pad=pad, silu=silu)
    return out


def rms_silu_pad(x: Tensor, norm: Norm, modulation: Modulation, pad: list[int], silu: bool, layout: str) -> Tensor:
    """The operation ``rms_silu_pad`` on a device, or interpreted."""
    out = empty_padded(x, pad, layout)
    if not out.numel():
        return out
    weight, scale, shift = norm.weight, modulation.scale, modulation.shift
    gain = weight
    if scale is not None:
        gain = 1 + scale.float() if weight is None else (1 + scale.float()) * weight.float()
    gain_b = 0 if gain is None or gain.ndim == 1 or gain.shape[0] == 1 else x.shape[1]
    gain, shift = (None if table is None else table.contiguous() for table in (gain, shift))
    shift_b = 0 if shift is None or shift.shape[0] == 1 else x.shape[1]
    _write(x, out, (None, gain, shift), (gain_b, 0, shift_b), norm.eps, rms=True, pad=pad, silu=silu)
    return out


def _evenly_strided(x: Tensor) -> Tensor:
    """``x``, copied unless one stride leads from each pixel to the next, over rows and frames, as in both layouts."""
    height, width = x.shape[3:]
    step = x.stride(4)
    return x if x.stride(3) == width * step and x.stride(2) == height * width * step else x.contiguous()


def _partial_sums(x: Tensor, groups: int, per_frame: bool) -> Tensor:
    """Partial statistics, fp32 (groups of all samples or frames, parts, 3): count, mean, sum of squared deviations."""
    batch, channels, frames, height, width = x.shape
    pixels, outer = height * width * (1 if per_frame else frames), batch * (frames if per_frame else 1)
    group_width = channels // groups
    block = 1 if x.stride(4) == 1 else triton.next_power_of_2(group_width)
    strip = max(min(STRIP // block, triton.next_power_of_2(pixels)), 1)
    # Each program takes so many strips that the partial sums of a group fit one program of the next kernel.
    strips = max(STRIPS, triton.cdiv(triton.cdiv(group_width, block) * triton.cdiv(pixels, strip), MOST_PARTS))
    strips = triton.next_power_of_2(min(strips, triton.cdiv(pixels, strip)))
    runs = triton.cdiv(pixels, strip * strips)
    count = triton.cdiv(group_width, block) * runs
    parts = torch.empty((outer * groups, count, 3), dtype=torch.float32, device=x.device)
    partial_kernel[(outer * groups * count,)](
        x, parts, pixels, frames, groups, runs, count, x.stride(0), x.stride(1), x.stride(2), x.stride(4),
        WIDTH=group_width, PER_FRAME=per_frame, CHANNELS=block, STRIP=strip, STRIPS=strips,
        num_warps=warps_for(x, strip * block),
    )  # fmt: skip
    return parts


def _write(
    x: Tensor, out: Tensor, tables: tuple[Tensor | None, Tensor | None, Tensor | None],
    table_steps: tuple[int, int, int], eps: float, rms: bool, pad: list[int], silu: bool,
) -> None:  # fmt: skip
    """Write the normed, activated and padded ``x`` to ``out``, by ``tables``, the mean, gain and shift of each channel,
    with ``table_steps``: the strides of mean and gain by sample and by frame, and of shift by sample."""
    left, right, top, _, front, _ = pad
    batch, channels, frames, height, width = x.shape
    most = triton.next_power_of_2(channels)
    if rms:  # a program sees all channels of its pixels
        block = most
        columns = min(triton.next_power_of_2(width), max(TILE // block, 16))
    elif x.stride(1) == 1 or out.stride(1) == 1:  # channels are adjacent: 64 of 16 bits are a cache line
        block = min(most, 64)
        columns = min(triton.next_power_of_2(width), TILE // block)
    else:  # pixels are adjacent
        columns = min(triton.next_power_of_2(width), 512)
        block = min(most, max(TILE // columns, 1))
    column_blocks, channel_blocks = triton.cdiv(width, columns), triton.cdiv(channels, block)
    rows = batch * out.shape[2] * out.shape[3]
    padded_kernel[(rows * column_blocks * channel_blocks,)](
        x, out, *tables, column_blocks, channel_blocks, frames, height, width, out.shape[2], out.shape[3],
        channels, eps, front, top, *x.stride(), *out.stride(), *table_steps,
        RMS=rms, SILU=silu, LEFT=left, RIGHT=right, COLUMNS=columns, CHANNELS=block,
        num_warps=warps_for(x, columns * block),
    )  # fmt: skip
