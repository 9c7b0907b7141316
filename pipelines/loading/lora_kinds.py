"""What a LoRA file may hold for one layer, as the two factors of what is added to its weight, exactly.

Every kind is a product of two matrices: a plain LoRA as it is, LoHa and LoKr by rewriting theirs, a full difference
with an identity. So all of them go the same way onto a layer, beside it or into it, packed or not.

Sources: LyCORIS (KohakuBlueleaf/LyCORIS, ``docs/Algo-Details.md``) and ComfyUI's ``comfy/weight_adapter`` for the
formulas and the ranks that alphas are divided by.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

DOWN, UP, ALPHA, DIFFERENCE, BIAS, MAGNITUDE, MIDDLE = "down", "up", "alpha", "diff", "bias", "magnitude", "middle"
HADA = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")
KRON = ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b")
ENDS: tuple[tuple[str, tuple[str, ...]], ...] = (  # role, and how the names of its tensors end
    (
        DOWN,
        (".lora_down.weight", ".lora_A.weight", ".lora.down.weight", ".lora_A.default.weight", ".lora_down", ".lora_A"),
    ),
    (UP, (".lora_up.weight", ".lora_B.weight", ".lora.up.weight", ".lora_B.default.weight", ".lora_up", ".lora_B")),
    (ALPHA, (".alpha",)),
    (DIFFERENCE, (".diff",)),
    (BIAS, (".diff_b",)),
    (MAGNITUDE, (".dora_scale", ".lora_magnitude_vector.weight", ".lora_magnitude_vector")),
    (MIDDLE, (".lora_mid.weight", ".hada_t1", ".hada_t2", ".lokr_t2")),  # of convolutions; no transformer has one
    *((role, (f".{role}",)) for role in (*HADA, *KRON)),
)
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Pair:
    """What a file has for one layer.

    Args:
        names: of the tensors in the file, by role.
        shape: of the layer's weight.
        rank: what alpha is divided by; 0 where none is.
        rows: first row and count that are this layer's; None for all.
        swapped: whether the halves of these rows change places.
    """

    names: Mapping[str, str]
    shape: tuple[int, ...]
    rank: int = 0
    rows: tuple[int, int] | None = None
    swapped: bool = False


class Share(NamedTuple):
    """What one layer gets: down (rank, in …), up (out, rank …), and what is added to its bias or decides its length."""

    down: Tensor
    up: Tensor
    bias: Tensor | None
    magnitude: Tensor | None


def role_of(name: str) -> tuple[str, str]:
    """The role of a tensor, and its name without it; an empty role where it has none."""
    for role, ends in ENDS:
        for end in ends:
            if name.endswith(end):
                return role, name.removesuffix(end)
    return "", name


def size_of(names: Mapping[str, str], tensors: Shapes) -> tuple[int, int, int] | None:
    """Rows, columns and rank of what a group of tensors adds; columns 0 where only a bias; None for no whole kind."""
    shapes = {role: tensors[name] for role, name in names.items()}
    flat = any(len(shapes[role]) < 2 for role in (DOWN, UP, *HADA, *KRON) if role in shapes)
    empty = any(not shape or not math.prod(shape) for role, shape in shapes.items() if role != ALPHA)
    if MIDDLE in shapes or flat or empty or math.prod(shapes.get(ALPHA, ())) != 1:
        return None
    if DOWN in shapes and UP in shapes:
        down, up = shapes[DOWN], shapes[UP]
        return (up[0], math.prod(down[1:]), down[0]) if up[1] == down[0] else None
    if all(role in shapes for role in HADA):
        return shapes[HADA[0]][0], shapes[HADA[1]][1], shapes[HADA[1]][0]
    first, second = (_side(shapes, KRON[start : start + 3]) for start in (0, 3))
    if first and second:
        return first[0] * second[0], first[1] * second[1], second[2] or first[2]
    if DIFFERENCE in shapes:
        return shapes[DIFFERENCE][0], math.prod(shapes[DIFFERENCE][1:]), 0
    return (shapes[BIAS][0], 0, 0) if BIAS in shapes else None


def share_of(pair: Pair, tensors: Mapping[str, Tensor]) -> Share:
    """What the layer of ``pair`` gets; factors of a plain LoRA as they are, all else in fp32."""
    own = {role: tensors[name] for role, name in pair.names.items() if role != ALPHA}
    if DOWN in own:
        down, up = _widened(own[DOWN], pair.shape), _cut(own[UP], pair)
    elif HADA[0] in own:
        a1, b1, a2, b2 = (own[role].float() for role in HADA)
        up = _cut((a1[:, :, None] * a2[:, None, :]).flatten(1), pair)
        down = (b1[:, None, :] * b2[None, :, :]).flatten(0, 1)
    elif KRON[5] in own:
        first, end = _whole(own, KRON[:3]), own[KRON[5]].float()
        up = _cut(torch.kron(first, own[KRON[4]].float()), pair)
        down = torch.kron(torch.eye(first.shape[1]), end)
    elif KRON[3] in own:
        down, up = _factors(_cut(torch.kron(_whole(own, KRON[:3]), own[KRON[3]].float()), pair))
    elif DIFFERENCE in own:
        down, up = _factors(_cut(own[DIFFERENCE].float().flatten(1), pair))
    else:
        down, up = torch.zeros(1, math.prod(pair.shape[1:])), torch.zeros(pair.shape[0], 1)
    bias, magnitude = own.get(BIAS), own.get(MAGNITUDE)
    if magnitude is not None:
        magnitude = magnitude.float()
        magnitude = magnitude[:, None] if magnitude.ndim == 1 else magnitude.flatten(1)
        magnitude = _cut(magnitude, pair) if magnitude.shape[0] > 1 else magnitude
    return Share(down, up, None if bias is None else _cut(bias, pair), magnitude)


def is_narrower(down: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether a factor takes the first input channels of a layer of ``shape``, such as the noise of a wider input."""
    return len(down) == len(shape) and down[2:] == shape[2:] and down[1] < shape[1]


def _widened(down: Tensor, shape: tuple[int, ...]) -> Tensor:
    """``down`` with zeros for the input channels that it does not know, which come last."""
    if not is_narrower(tuple(down.shape), shape):
        return down
    return torch.cat((down, down.new_zeros(down.shape[0], shape[1] - down.shape[1], *shape[2:])), dim=1)


def _factors(difference: Tensor) -> tuple[Tensor, Tensor]:
    """Down and up of a whole matrix: itself and an identity, the smaller one."""
    rows, columns = difference.shape
    return (difference, torch.eye(rows)) if rows <= columns else (torch.eye(columns), difference)


def _side(shapes: Shapes, roles: tuple[str, ...]) -> tuple[int, int, int] | None:
    """Rows, columns and rank of one side of a Kronecker product, 0 for a whole matrix; None where it is not there."""
    whole, a, b = roles
    if whole in shapes:
        return (*shapes[whole], 0) if len(shapes[whole]) == 2 else None  # type: ignore[return-value]
    return (shapes[a][0], shapes[b][1], shapes[b][0]) if a in shapes and b in shapes else None


def _whole(own: Mapping[str, Tensor], roles: tuple[str, ...]) -> Tensor:
    whole, a, b = roles
    return own[whole].float() if whole in own else own[a].float() @ own[b].float()


def _cut(tensor: Tensor, pair: Pair) -> Tensor:
    if pair.rows is not None:
        tensor = tensor[pair.rows[0] : pair.rows[0] + pair.rows[1]]
    return torch.cat(tuple(reversed(tensor.chunk(2)))) if pair.swapped else tensor
