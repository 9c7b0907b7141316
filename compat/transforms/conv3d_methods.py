"""Exact replacements of a 3-D convolution, arguments and result alike, where a device's is missing, wrong or slow.
x: (B, C, T, H, W), weight: (O, C / groups, kT, kH, kW); a result is rounded once. None pads time with ``F.pad``, which
corrupts 5-D tensors on some devices, or replicates edges with the 3-D kernel, which some devices lack."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..device.facts import MEBIBYTE

Triple = tuple[int, int, int]
CHUNK_BYTES = 64 * MEBIBYTE
MATMUL_BYTES = 16 * MEBIBYTE  # columns that stay in a cache: 1.3 to 1.7 times the speed of 64 to 256 MiB on a CPU
NATIVE_BYTES = 2048 * MEBIBYTE  # the bound of upstream's CogVideoXSafeConv3d, "suitable for CuDNN"
HALVES = (torch.bfloat16, torch.float16)


class Conv3dMethod(Enum):
    """Implementations of a 3-D convolution; the value is the name in reports and stored timings."""

    NATIVE = "native"
    FP32 = "fp32"
    CHANNELS_LAST = "channels_last"
    PATCHES = "patches"
    POINTWISE = "pointwise"
    FRAMES = "frames"
    MATMUL = "matmul"


class Geometry(NamedTuple):
    """Steps of a kernel over its input: (time, rows, columns) each; ``padding`` is of zeros, on both sides."""

    stride: Triple = (1, 1, 1)
    padding: Triple = (0, 0, 0)
    dilation: Triple = (1, 1, 1)
    groups: int = 1


def covers(form: Conv3dMethod, kernel: Triple, geometry: Geometry) -> bool:
    """True where ``form`` can compute a layer with this kernel."""
    if form is Conv3dMethod.POINTWISE:
        return kernel == (1, 1, 1) and geometry.groups == 1
    if form is Conv3dMethod.PATCHES:
        dense = all(k == 1 or d == 1 for k, d in zip(kernel, geometry.dilation, strict=True))
        return kernel == geometry.stride and dense and geometry.groups == 1
    return True


def conv3d_native(x: Tensor, weight: Tensor, bias: Tensor | None, g: Geometry, chunk: int = NATIVE_BYTES) -> Tensor:
    """``F.conv3d`` on contiguous operands, in pieces of time where its input is larger than ``chunk`` bytes."""
    return _in_time(x.contiguous(), weight.contiguous(), bias, g, chunk)


def conv3d_in_fp32(x: Tensor, weight: Tensor, bias: Tensor | None, g: Geometry, chunk: int = NATIVE_BYTES) -> Tensor:
    """``F.conv3d`` in fp32, whatever the dtype of the operands; copies ``weight`` and ``chunk`` bytes of ``x``."""
    with exact(x.device):
        return _in_time(x, weight.float().contiguous(), None if bias is None else bias.float(), g, chunk)


def conv3d_channels_last(x: Tensor, weight: Tensor, bias: Tensor | None, g: Geometry, chunk: int) -> Tensor:
    """``F.conv3d`` with the channels of a voxel side by side in memory, in the result too."""
    layout = torch.channels_last_3d
    return _in_time(x.contiguous(memory_format=layout), weight.contiguous(memory_format=layout), bias, g, chunk)


def conv3d_by_patches(x: Tensor, weight: Tensor, bias: Tensor | None, g: Geometry, chunk: int = CHUNK_BYTES) -> Tensor:
    """A kernel as large as its stride: every patch is one row of a matmul; the result has channels-last strides."""
    t, h, w = weight.shape[2:]
    x = _with_zeros(x, g.padding)
    frames, rows, columns = x.shape[2] // t, x.shape[3] // h, x.shape[4] // w
    x = x[:, :, : frames * t, : rows * h, : columns * w]
    patches = x.unflatten(4, (columns, w)).unflatten(3, (rows, h)).unflatten(2, (frames, t))
    patches = patches.permute(0, 2, 4, 6, 1, 3, 5, 7).flatten(4).flatten(0, 3)  # (B T H W) (C t h w)
    # Two contiguous dimensions: for others torch may round the product before it adds the bias.
    out = F.linear(patches.contiguous(), weight.flatten(1), bias)
    return out.view(-1, frames, rows, columns, out.shape[1]).permute(0, 4, 1, 2, 3)


def conv3d_by_points(x: Tensor, weight: Tensor, bias: Tensor | None, g: Geometry, chunk: int = CHUNK_BYTES) -> Tensor:
    """A kernel of one voxel: a matrix product over the channels, without a copy of a contiguous ``x``."""
    x = _with_zeros(x, g.padding)
    if g.stride != (1, 1, 1):
        x = x[:, :, :: g.stride[0], :: g.stride[1], :: g.stride[2]]
    points, matrix = x.flatten(2), weight.flatten(1).expand(x.shape[0], -1, -1)
    out = torch.bmm(matrix, points) if bias is None else torch.baddbmm(bias[None, :, None], matrix, points)
    return out.unflatten(2, x.shape[2:])


def conv3d_by_frames(x: Tensor, weight: Tensor, bias: Tensor | None, g: Geometry, chunk: int = CHUNK_BYTES) -> Tensor:
    """One 2-D convolution per output frame, over the channels of all input frames under the kernel.
    Frames and channels become one dimension. By frame, then channel, the input needs no copy where it is laid out so
    (see :func:`padded`), and the kernel is copied; by channel, then frame, the kernel stays and the windows are
    copied. The smaller is copied. A kernel of one frame takes ``chunk`` bytes of frames per call."""
    taps = weight.shape[2]
    chunk = 0 if taps > 1 else chunk
    kernel_is_larger = g.groups == 1 and x[:, :, :1].nbytes * taps < weight.nbytes
    by_channel = taps == 1 or g.groups > 1 or kernel_is_larger  # groups divide the outer dimension
    kernel = (weight if by_channel else weight.transpose(1, 2)).flatten(1, 2).contiguous()
    # A library packs a kernel again in each call; a large one in two halves needs less memory, and is a percent slower.
    kernels = kernel.chunk(2) if kernel_is_larger and not chunk else (kernel,)
    biases = (None,) * len(kernels) if bias is None else bias.split([len(each) for each in kernels])
    steps = g.stride[1:], g.padding[1:], g.dilation[1:], g.groups

    def plane(window: Tensor) -> Tensor:
        """The result (B, O, H', W') of windows (B, C * taps, H, W)."""
        parts = [F.conv2d(window, each, offset, *steps) for each, offset in zip(kernels, biases, strict=True)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    if not by_channel:
        x = padded(x, (0, 0, 0, 0, g.padding[0], g.padding[0]), frames_first=True)
        g = g._replace(padding=(0, *g.padding[1:]))
    return _over_windows(x, taps, g, chunk, by_channel, plane)


def conv3d_by_matmul(x: Tensor, weight: Tensor, bias: Tensor | None, g: Geometry, chunk: int = MATMUL_BYTES) -> Tensor:
    """Matrix products alone, in fp32: the voxels under the kernel are copied to columns, ``chunk`` bytes at a time."""
    _, height, width = g.padding
    x = padded(x, (width, width, height, height, 0, 0))
    wide = torch.float32 if x.dtype in HALVES else x.dtype
    kernel, offset = weight.to(wide).flatten(1, 2), None if bias is None else bias.to(wide)[:, None, None]
    matrix = kernel.flatten(1).unflatten(0, (g.groups, -1))

    def plane(window: Tensor) -> Tensor:
        """The result (B, O, H', W') of windows (B, C * taps, H, W), ``count`` of its rows at a time."""
        rows, columns = _output_size(window.shape[2:], kernel.shape[2:], g.stride[1:], g.dilation[1:])
        row_bytes = window[:, :, 0, 0].numel() * kernel[0, 0].numel() * columns * wide.itemsize
        count = max(1, chunk // row_bytes)
        pieces = []
        for first in range(0, rows, count):
            many = min(count, rows - first)
            under = _columns(window, kernel.shape[2:], g, first, (many, columns), wide)
            piece = torch.matmul(matrix, under.flatten(1, 2).unflatten(1, (g.groups, -1)).flatten(3))
            piece = piece.flatten(1, 2).unflatten(2, (many, columns))
            pieces.append((piece if offset is None else piece + offset).to(x.dtype))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)

    with exact(x.device):
        return _over_windows(x, weight.shape[2], g, 0, True, plane)


def padded(x: Tensor, padding: tuple[int, ...], mode: str = "constant", frames_first: bool = False) -> Tensor:
    """``F.pad(x, padding, mode)`` of (B, C, T, H, W) with time by concatenation, rows and columns by the 2-D kernel.
    ``padding`` is (left, right, top, bottom, before, after). ``frames_first`` lays the result out as (B, T, C, H, W),
    which :func:`conv3d_by_frames` reads without a copy; otherwise the layout of ``x`` is kept."""
    *plane, before, after = padding
    if before or after or frames_first:
        pieces = [edge for edge in (_edge(x, before, mode, False), x, _edge(x, after, mode, True)) if edge is not None]
        if frames_first:
            pieces = [piece.transpose(1, 2) for piece in pieces]
            x = (torch.cat(pieces, dim=1) if len(pieces) > 1 else pieces[0].contiguous()).transpose(1, 2)
        else:  # torch.cat keeps a layout that all pieces share
            last = not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last_3d)
            layout = torch.channels_last_3d if last else torch.contiguous_format
            x = torch.cat([piece.contiguous(memory_format=layout) for piece in pieces], dim=2)
    if not any(plane):
        return x
    if not frames_first and x.is_contiguous():
        return F.pad(x.flatten(1, 2), plane, mode).unflatten(1, x.shape[1:3])
    frames = x.transpose(1, 2)
    return F.pad(frames.flatten(0, 1), plane, mode).unflatten(0, frames.shape[:2]).transpose(1, 2)


def _edge(x: Tensor, count: int, mode: str, last: bool) -> Tensor | None:
    """The ``count`` frames by which ``mode`` pads ``x`` in front, or with ``last`` at its end; None for none."""
    frames = x.shape[2]
    if not count:
        return None
    if mode == "constant":
        return x.new_zeros(*x.shape[:2], count, *x.shape[3:])
    if mode == "replicate":
        return (x[:, :, frames - 1 :] if last else x[:, :, :1]).expand(-1, -1, count, -1, -1)
    if mode == "circular":
        return x[:, :, :count] if last else x[:, :, frames - count :]
    return (x[:, :, frames - 1 - count : frames - 1] if last else x[:, :, 1 : count + 1]).flip(2)


def exact(device: torch.device) -> AbstractContextManager[Any]:
    """A block without autocast, which would cast fp32 operands back to 16 bits."""
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext()


def _with_zeros(x: Tensor, padding: Triple) -> Tensor:
    time, height, width = padding
    return padded(x, (width, width, height, height, time, time)) if any(padding) else x


def _in_time(x: Tensor, weight: Tensor, bias: Tensor | None, g: Geometry, chunk: int) -> Tensor:
    """``F.conv3d`` in the dtype of ``weight``, in pieces of time of ``chunk`` bytes; returns the dtype of ``x``."""
    frame_bytes = x[:, :, :1].numel() * weight.element_size()
    if frame_bytes * x.shape[2] <= chunk:
        return F.conv3d(_alike(x, weight), weight, bias, *g).to(x.dtype)
    x, g = padded(x, (0, 0, 0, 0, g.padding[0], g.padding[0])), g._replace(padding=(0, *g.padding[1:]))
    (total,) = _output_size(x.shape[2:3], weight.shape[2:3], g.stride[:1], g.dilation[:1])
    step, reach = g.stride[0], (weight.shape[2] - 1) * g.dilation[0] + 1
    count = max(1, (chunk // frame_bytes - reach) // step + 1)
    pieces = []
    for first in range(0, total, count):
        last = min(first + count, total) - 1
        piece = _alike(x[:, :, first * step : last * step + reach], weight)
        pieces.append(F.conv3d(piece, weight, bias, *g).to(x.dtype))
    return torch.cat(pieces, dim=2)


def _alike(x: Tensor, weight: Tensor) -> Tensor:
    """``x`` in the dtype and memory layout of ``weight``."""
    layout = torch.contiguous_format if weight.is_contiguous() else torch.channels_last_3d
    return x.to(weight.dtype).contiguous(memory_format=layout)


def _over_windows(
    x: Tensor, taps: int, g: Geometry, chunk: int, by_channel: bool, plane: Callable[[Tensor], Tensor]
) -> Tensor:
    """``plane`` of the frames under each position of the kernel in time, joined in time.
    Windows are copies of ``chunk`` bytes, one position at least; with several ``taps``, ``chunk`` is 0: just one."""
    if g.padding[0]:
        x = padded(x, (0, 0, 0, 0, g.padding[0], g.padding[0]))
    frames = x.transpose(1, 2)
    (total,) = _output_size(frames.shape[1:2], (taps,), g.stride[:1], g.dilation[:1])
    count = min(max(1, chunk // (frames[:, :1].nbytes * taps)), total)

    def piece(first: int) -> Tensor:  # a function, so that no window outlives its turn
        many = min(count, total - first)
        window = _window(frames, first, many, taps, g, by_channel)
        return plane(window.flatten(0, 1)).unflatten(0, (-1, many)).transpose(1, 2)

    if count == total:
        return piece(0).contiguous()
    if torch.compiler.is_compiling():
        return torch.cat([piece(first) for first in range(0, total, count)], dim=2)
    begun = piece(0)  # the result is filled as the frames come, so that no second copy of it exists
    out = begun.new_empty(*begun.shape[:2], total, *begun.shape[3:])
    out[:, :, :count] = begun
    for first in range(count, total, count):
        out[:, :, first : first + count] = piece(first)
    return out


def _window(frames: Tensor, first: int, many: int, taps: int, g: Geometry, by_channel: bool) -> Tensor:
    """The input of ``many`` output frames from ``first``: (B, many, C * taps, H, W) ``by_channel``, else taps * C."""
    step, gap = g.stride[0], g.dilation[0]
    if taps > 1:  # ``many`` is 1
        seen = frames[:, None, first * step : first * step + (taps - 1) * gap + 1 : gap]
    else:
        seen = frames[:, first * step : (first + many - 1) * step + 1 : step, None]
    return (seen.transpose(2, 3) if by_channel else seen).flatten(2, 3)


def _columns(
    window: Tensor, kernel: tuple[int, ...], g: Geometry, first: int, size: tuple[int, int], dtype: torch.dtype
) -> Tensor:
    """The voxels under the kernel for ``size`` rows, from ``first``, and columns of results: (B, C, kH * kW, *size)."""
    (_, down, across), (_, below, beside), (rows, columns) = g.stride, g.dilation, size  # the first is time's
    top = first * down
    strip = window[:, :, top : top + (rows - 1) * down + (kernel[0] - 1) * below + 1].to(dtype)
    taps = itertools.product(range(kernel[0]), range(kernel[1]))
    voxels = [strip[:, :, i * below :: down, j * beside :: across][:, :, :rows, :columns] for i, j in taps]
    return torch.stack(voxels, dim=2)


def _output_size(
    size: tuple[int, ...], kernel: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...]
) -> tuple[int, ...]:
    """The size of a convolution's result along each axis, from an input padded already."""
    rows = zip(size, kernel, stride, dilation, strict=True)
    return tuple((extent - (taps - 1) * gap - 1) // step + 1 for extent, taps, step, gap in rows)


FORMS: dict[Conv3dMethod, Callable[[Tensor, Tensor, Tensor | None, Geometry, int], Tensor]] = {
    Conv3dMethod.NATIVE: conv3d_native, Conv3dMethod.FP32: conv3d_in_fp32, Conv3dMethod.PATCHES: conv3d_by_patches,
    Conv3dMethod.CHANNELS_LAST: conv3d_channels_last, Conv3dMethod.POINTWISE: conv3d_by_points,
    Conv3dMethod.FRAMES: conv3d_by_frames, Conv3dMethod.MATMUL: conv3d_by_matmul,
}  # fmt: skip
OWN = (Conv3dMethod.NATIVE, Conv3dMethod.FP32, Conv3dMethod.CHANNELS_LAST)  # those that call the device's own conv3d
BUDGETS = {**dict.fromkeys(OWN, NATIVE_BYTES), Conv3dMethod.MATMUL: MATMUL_BYTES}  # the others: CHUNK_BYTES


def convolve(
    form: Conv3dMethod, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry, chunk: int = 0
) -> Tensor:
    """The convolution by ``form``; ``chunk`` bytes bound what it copies, 0 for the implementation's own bound."""
    return FORMS[form](x, weight, bias, geometry, chunk or BUDGETS.get(form, CHUNK_BYTES))
