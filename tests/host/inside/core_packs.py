"""Layers of the packs that owners of old cards have: written from descriptions of their formats, not their code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import comfy.ops
import torch
from torch import Tensor, nn
from torch.nn import functional

Base = comfy.ops.manual_cast.Linear
CALLS: list[int] = []
BLOCK = 64
CODES = torch.linspace(-1, 1, 16).sign() * torch.linspace(-1, 1, 16).abs() ** 1.5  # a codebook of 16, like NF4's


def by_row(weight: Tensor, most: int = 127) -> tuple[Tensor, Tensor]:
    """Integers, and a scale for each row (rows, 1)."""
    scale = weight.float().abs().amax(-1, keepdim=True) / most
    return (weight.float() / scale).round().to(torch.int8), scale


def nibbles(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Two codes a byte, the low one first, and the largest value of each block of 64."""
    blocks = weight.float().reshape(-1, BLOCK)
    largest = blocks.abs().amax(1)
    codes = ((blocks / largest[:, None])[..., None] - CODES).abs().argmin(-1).flatten().to(torch.uint8)
    return codes[::2] | codes[1::2] << 4, largest


def from_nibbles(packed: Tensor, largest: Tensor, shape: Any) -> Tensor:
    codes = torch.stack([packed & 15, packed >> 4], 1).flatten().long()
    return (CODES[codes].reshape(-1, BLOCK) * largest[:, None]).reshape(shape)


def called(product: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    """A forward that counts its calls."""

    def forward(self: Any, x: Tensor) -> Tensor:
        CALLS.append(1)
        y = product(self, x)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    return forward


def int8(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """A product of integers: activations by row too."""
    values, sizes = by_row(x + 1e-12)
    return ((values.float() @ weight.float().T) * sizes * scale.flatten()).to(x.dtype)


class Int8TensorwiseOps:  # INT8-Fast
    class Linear(Base):
        """int8 with one scale, after a Hadamard rotation in groups; small layers stay in float."""

        forward = called(
            lambda self, x: (
                int8(self.turned(x), self.weight, self.weight_scale)
                if self._is_quantized
                else functional.linear(x, self.weight.to(x.dtype))
            )
        )

        def turned(self, x: Tensor) -> Tensor:
            pairs = x.unflatten(-1, (-1, 2))
            return torch.stack([pairs.sum(-1), pairs[..., 0] - pairs[..., 1]], -1).flatten(-2) * 0.5**0.5

        def packed(self, weight: Tensor) -> None:
            self._is_quantized = weight.shape[0] > 16
            packed, scale = by_row(self.turned(weight.float()))
            self.weight = nn.Parameter(packed if self._is_quantized else weight, requires_grad=False)
            self.register_buffer("weight_scale", scale)


class HybridBNB4bitOps:  # QuantOps
    class Linear(Base):
        """Four bits in attributes, and nothing in its weight; both of core's forwards are its own."""

        forward = called(lambda self, x: functional.linear(x, from_nibbles(*self.held).to(x.dtype)))
        forward_comfy_cast_weights = forward

        def packed(self, weight: Tensor) -> None:
            self.held, self.weight = (*nibbles(weight), weight.shape), nn.Parameter(torch.zeros(1), requires_grad=False)


class ForgeLoader4Bit(nn.Module):  # bitsandbytes NF4
    """No features, a parameter of bytes with a state beside it."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()
        self.bias = None

    forward = called(lambda self, x: functional.linear(x, from_nibbles(self.weight, *self.quant_state).to(x.dtype)))

    def packed(self, weight: Tensor) -> None:
        packed, largest = nibbles(weight)
        self.weight, self.quant_state = nn.Parameter(packed, requires_grad=False), (largest, weight.shape)


class Packed(nn.Module):
    """A layer that is nobody's Linear."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias, self.weight = in_features, out_features, None, None


class SVDQW4A4Linear(Packed):  # nunchaku
    """Four bits beside a part of low rank, with smoothed activations."""

    @called
    def forward(self, x: Tensor) -> Tensor:
        rest = from_nibbles(
            self.qweight.view(torch.uint8).flatten(), self.wscales, (self.out_features, self.in_features)
        )
        low = (x.float() @ self.proj_down) @ self.proj_up.T
        return (functional.linear(x.float() / self.smooth_factor, rest) + low).to(x.dtype)

    def packed(self, weight: Tensor) -> None:
        u, s, v = torch.linalg.svd(weight.float(), full_matrices=False)
        self.register_buffer("proj_up", u[:, :4] * s[:4])
        self.register_buffer("proj_down", v[:4].T.contiguous())
        self.register_buffer("smooth_factor", 0.5 + torch.rand(self.in_features))
        packed, largest = nibbles((weight.float() - self.proj_up @ self.proj_down.T) * self.smooth_factor)
        self.register_buffer("qweight", packed.view(torch.int8).reshape(self.out_features, -1))
        self.register_buffer("wscales", largest)


class AWQW4A16Linear(Packed):  # nunchaku
    """Eight codes to an int32, groups of 64."""

    @called
    def forward(self, x: Tensor) -> Tensor:
        packed = self.qweight.contiguous().view(torch.uint8).flatten()
        return functional.linear(
            x, from_nibbles(packed, self.wscales, (self.out_features, self.in_features)).to(x.dtype)
        )

    def packed(self, weight: Tensor) -> None:
        packed, largest = nibbles(weight)
        self.register_buffer("qweight", packed.view(torch.int32).reshape(self.out_features // 4, -1))
        self.register_buffer("wscales", largest)


class RamTorchLinear(nn.Linear):  # RamTorch
    """Weights that stay in host memory and come for the length of a call."""

    forward = called(lambda self, x: functional.linear(x, self.weight.to(x.device, x.dtype)))

    def packed(self, weight: Tensor) -> None:
        self.weight = nn.Parameter(weight.float(), requires_grad=False)


class BlockInt8Ops:  # block int8
    class Linear(Base):
        """int8 with a scale for each square of 32 by 32, behind core's forward."""

        @called
        def forward_comfy_cast_weights(self, x: Tensor) -> Tensor:
            rows, columns = self.weight.shape
            scale = self.scale.repeat_interleave(BLOCK // 2, 0)[:rows].repeat_interleave(BLOCK // 2, 1)[:, :columns]
            return functional.linear(x, (self.weight.float() * scale).to(x.dtype))

        def packed(self, weight: Tensor) -> None:
            squares = functional.max_pool2d(weight.float().abs()[None], BLOCK // 2, BLOCK // 2, ceil_mode=True)[0] / 127
            self.register_buffer("scale", squares)
            whole = squares.repeat_interleave(BLOCK // 2, 0)[: weight.shape[0]]
            values = weight.float() / whole.repeat_interleave(BLOCK // 2, 1)[:, : weight.shape[1]]
            self.weight = nn.Parameter(values.round().to(torch.int8), requires_grad=False)


class ImatrixOps:  # importance matrices
    class Linear(Base):
        """Core's values, while the squares of its inputs are summed."""

        def forward(self, x: Tensor) -> Tensor:
            CALLS.append(1)
            self.seen = getattr(self, "seen", 0) + x.float().square().sum().item()
            return super().forward(x)

        def packed(self, weight: Tensor) -> None:
            self.weight = nn.Parameter(weight.clone(), requires_grad=False)


class Fp4Ops:  # NVFP4
    class Linear(Base):
        """Two codes a byte where core has values, half as wide."""

        forward = called(
            lambda self, x: functional.linear(
                x, from_nibbles(self.weight.flatten(), self.scales, (self.out_features, self.in_features)).to(x.dtype)
            )
        )

        def packed(self, weight: Tensor) -> None:
            packed, largest = nibbles(weight)
            self.weight = nn.Parameter(packed.reshape(weight.shape[0], -1), requires_grad=False)
            self.register_buffer("scales", largest)


class Int4Weight(Tensor):
    """A weight of logical shape that keeps its type whatever it is cast to."""

    @staticmethod
    def __new__(cls, packed: Tensor, scale: Tensor) -> Int4Weight:
        return Tensor._make_wrapper_subclass(cls, packed.shape, dtype=torch.bfloat16, device=packed.device)

    def __init__(self, packed: Tensor, scale: Tensor) -> None:
        self.held, self.scale = packed, scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is torch.ops.aten._has_compatible_shallow_copy_type:
            return False
        return cls(args[0].held, args[0].scale)


class W4A8Ops:  # W4A8 loaders
    class Linear(Base):
        """Core's forward around a cast of its own."""

        @called
        def forward_comfy_cast_weights(self, x: Tensor) -> Tensor:
            return int8(x, self.weight.held, self.weight.scale)

        def packed(self, weight: Tensor) -> None:
            self.weight = nn.Parameter(Int4Weight(*by_row(weight, 7)), requires_grad=False)


PACKS: dict[str, type[Any]] = {
    "INT8-Fast": Int8TensorwiseOps.Linear, "QuantOps": HybridBNB4bitOps.Linear, "bitsandbytes NF4": ForgeLoader4Bit,
    "nunchaku SVDQ": SVDQW4A4Linear, "nunchaku AWQ": AWQW4A16Linear, "RamTorch": RamTorchLinear,
    "block int8": BlockInt8Ops.Linear, "imatrix": ImatrixOps.Linear, "NVFP4": Fp4Ops.Linear, "W4A8": W4A8Ops.Linear,
}  # fmt: skip


def of_pack(name: str, old: Any) -> nn.Module:
    """A layer of a pack with the values of a layer of core's; where its blocks do not fit it stays core's."""
    if old.weight.numel() % BLOCK or old.out_features % 4 or old.in_features % 2:
        return old
    new = PACKS[name](old.in_features, old.out_features, bias=old.bias is not None)
    new.packed(old.weight.detach())
    if old.bias is not None:
        new.bias = nn.Parameter(old.bias.detach().float(), requires_grad=False)
    return new
