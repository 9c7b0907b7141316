"""The tensors of a LoRA file for one layer, as the two factors of what is added to its weight, exactly: LoHa, LoKr and
full differences are rewritten so. OFT, BOFT and GLoRA multiply the weight itself; these and additions to norms go into
it. Sources: LyCORIS (KohakuBlueleaf/LyCORIS, ``docs/Algo-Details.md``) and ComfyUI's ``comfy/weight_adapter`` for the
formulas and the ranks that alphas are divided by."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

DOWN, UP, ALPHA, DIFFERENCE, BIAS, MAGNITUDE, MIDDLE = "down", "up", "alpha", "diff", "bias", "magnitude", "middle"
PEFT_BIAS = "lora_bias"  # of peft's adapters, which scale it as they do their product
BIASES = frozenset((BIAS, PEFT_BIAS))
HADA = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")
BLOCKS, RESCALE = "oft_blocks", "rescale"
GLORA = ("a1.weight", "a2.weight", "b1.weight", "b2.weight")
MULTIPLIERS = frozenset((BLOCKS, *GLORA))  # of the weight itself
KRON = ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b")
ENDS: tuple[tuple[str, str], ...] = (  # role, and how the names of its tensors end
    (DOWN, ".lora_down.weight .lora_A.weight .lora.down.weight .lora_A.default.weight .lora_down .lora_A"),
    (UP, ".lora_up.weight .lora_B.weight .lora.up.weight .lora_B.default.weight .lora_up .lora_B"),
    (ALPHA, ".alpha"),
    (DIFFERENCE, ".diff .w_norm"),  # the second is LyCORIS' for norms
    (BIAS, ".diff_b .b_norm"),
    (PEFT_BIAS, ".lora_B.bias .lora_B.default.bias .lora_up.bias"),
    (MAGNITUDE, ".dora_scale {0} {0}.weight {0}.default.weight".format(".lora_magnitude_vector")),
    (MIDDLE, ".lora_mid.weight .hada_t1 .hada_t2 .lokr_t2"),  # of convolutions; no transformer has one
    *((role, f".{role}") for role in (*HADA, *KRON, *GLORA, BLOCKS, RESCALE)),
)
PEFT_MAGNITUDE = ".lora_magnitude_vector"  # in the names of magnitudes of the sum; ``dora_scale`` is of the weight
Shapes = Mapping[str, tuple[int, ...]]
Size = tuple[int, int, int]  # rows, columns and rank; 0 columns for a bias or rotation, rank 0 where no alpha counts


class Delta(NamedTuple):
    """Additions to one layer: down (rank, in …), up (out, rank …), a bias, and the row lengths of a DoRA."""

    down: Tensor
    up: Tensor
    bias: Tensor | None
    magnitude: Tensor | None


@dataclass(frozen=True, slots=True)
class LoRAPair:
    """The tensors of a file for one layer."""

    names: Mapping[str, str]  # of the tensors in the file, by role
    shape: tuple[int, ...]  # of the layer's weight
    rank: int = 0  # divisor of alpha; 0 for none
    rows: tuple[int, int] | None = None  # first row and count that are this layer's; None for all
    swapped: bool = False  # whether the halves of these rows change places

    def cut(self, tensor: Tensor) -> Tensor:
        """The rows of ``tensor`` that belong to this layer, their halves exchanged where they are ``swapped``."""
        if self.rows is not None:
            tensor = tensor[self.rows[0] : self.rows[0] + self.rows[1]]
        return torch.cat(tuple(reversed(tensor.chunk(2)))) if self.swapped else tensor

    @property
    def of_norm(self) -> bool:
        """True for a norm's layer, which takes additions in its weight alone and is never packed."""
        return len(self.shape) == 1

    @property
    def has_bias(self) -> bool:
        """True if it adds to the layer's bias."""
        return not BIASES.isdisjoint(self.names)

    @property
    def of_weight(self) -> bool:
        """True if it goes into the layer's weight: its effect depends on that weight, or the layer is a norm."""
        return self.of_norm or MAGNITUDE in self.names or not MULTIPLIERS.isdisjoint(self.names)

    def product(self, tensors: Mapping[str, Tensor], weight: Tensor, delta: Delta) -> Tensor:
        """The change of the layer's ``weight``, of its shape and in fp32, without the factor alpha / rank."""
        own, kind = self._own(tensors)
        if kind.product is not None:
            return self.cut(kind.product(own, self.cut(weight.float().flatten(1)))).view_as(weight)
        return (delta.up.float().flatten(1) @ delta.down.float().flatten(1)).view_as(weight)

    def _own(self, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Kind]:  # by role, and the kind they are
        own = {role: tensors[name] for role, name in self.names.items()}
        shapes = {role: tuple(tensor.shape) for role, tensor in own.items()}
        return own, next((kind for kind in KINDS if kind.size(shapes) is not None), KINDS[-1])

    def delta(self, tensors: Mapping[str, Tensor], scale: float = 1.0) -> Delta:
        """The additions to this layer: a LoRA's factors as stored, others in fp32; ``scale`` multiplies a peft bias."""
        own, kind = self._own(tensors)
        biases = [self.cut(own[role]).float() * (scale if role == PEFT_BIAS else 1.0) for role in BIASES & own.keys()]
        magnitude = self._magnitude(own[MAGNITUDE]) if MAGNITUDE in own else None
        return Delta(*kind.delta(own, self), torch.stack(biases).sum(0) if biases else None, magnitude)

    def _magnitude(self, stored: Tensor) -> Tensor:
        """DoRA's norms, one to each output or one to each input, fp32: (out, 1) or (1, in)."""
        of_rows = stored.ndim == 1 or PEFT_MAGNITUDE in self.names[MAGNITUDE]  # peft's of a convolution lie flat
        norms = stored.float().reshape(-1, 1) if of_rows else stored.float().flatten(1)
        return self.cut(norms) if norms.shape[0] > 1 else norms


class Kind(NamedTuple):  # its functions take a layer's shapes or tensors by their roles
    size: Callable[[Shapes], Size | None]  # by the shapes of the roles; None for another kind
    delta: Callable[[Mapping[str, Tensor], LoRAPair], tuple[Tensor, Tensor]]  # down and up of the pair's layer
    product: Callable[[Mapping[str, Tensor], Tensor], Tensor] | None = None  # difference of a weight


def _low_rank_size(shapes: Shapes) -> Size | None:  # of B (out, rank) @ A (rank, in)
    if DOWN not in shapes or UP not in shapes or shapes[UP][1] != shapes[DOWN][0]:
        return None
    return shapes[UP][0], math.prod(shapes[DOWN][1:]), shapes[DOWN][0]


def _low_rank(own: Mapping[str, Tensor], pair: LoRAPair) -> tuple[Tensor, Tensor]:  # down and up
    down = own[DOWN]
    if is_narrower(tuple(down.shape), pair.shape):  # zeros for the input channels it does not know, which come last
        down = torch.cat((down, down.new_zeros(len(down), pair.shape[1] - down.shape[1], *pair.shape[2:])), dim=1)
    return down, pair.cut(own[UP])


def _loha_size(shapes: Shapes) -> Size | None:
    a1, b1, a2, b2 = (shapes.get(role, (0, 0)) for role in HADA)
    fit = a1[0] and (a1[0], a1[1], b1[1], a2[1]) == (a2[0], b1[0], b2[1], b2[0])
    return (a1[0], b1[1], b1[0]) if fit else None


def _loha(own: Mapping[str, Tensor], pair: LoRAPair) -> tuple[Tensor, Tensor]:
    """Factors of (a1 @ b1) * (a2 @ b2): up has all products of a column of a1 and one of a2, down of rows of b1, b2."""
    a1, b1, a2, b2 = (own[role].float() for role in HADA)
    up = pair.cut((a1[:, :, None] * a2[:, None, :]).flatten(1))
    return (b1[:, None, :] * b2[None, :, :]).flatten(0, 1), up


def _side(shapes: Shapes, roles: tuple[str, ...]) -> Size | None:
    """Rows, columns and rank of one side of a Kronecker product, whose ``roles`` are a whole matrix (rank 0) or two
    factors; None where neither is there or the factors do not fit."""
    whole, a, b = roles
    if whole in shapes:
        return shapes[whole][0], math.prod(shapes[whole][1:]), 0
    fit = a in shapes and b in shapes and shapes[a][1] == shapes[b][0]
    return (shapes[a][0], shapes[b][1], shapes[b][0]) if fit else None


def _lokr_size(shapes: Shapes) -> Size | None:
    first, second = (_side(shapes, KRON[start : start + 3]) for start in (0, 3))
    return (first[0] * second[0], first[1] * second[1], second[2] or first[2]) if first and second else None


def _lokr(own: Mapping[str, Tensor], pair: LoRAPair) -> tuple[Tensor, Tensor]:
    """Factors of kron(w1, w2): with w2 = a2 @ b2 kron(w1, a2) and kron(1, b2), else the product and an identity."""
    w1, a1, b1, w2, a2, b2 = KRON
    first = own[w1].float() if w1 in own else own[a1].float() @ own[b1].float()
    if w2 in own:
        return _factors(pair.cut(torch.kron(first, own[w2].float().flatten(1))))
    return torch.kron(torch.eye(first.shape[1]), own[b2].float()), pair.cut(torch.kron(first, own[a2].float()))


def _rotation_size(shapes: Shapes) -> Size | None:
    """(K * N, 0, 0) for OFT's blocks (K, N, N) or BOFT's (S, K, N, N), whose stages turn rows that lie ever further
    apart; None for blocks of no such shape, stages that the rows cannot fill, or a rescale of no value for each row."""
    blocks = shapes.get(BLOCKS, ())
    if len(blocks) not in (3, 4) or blocks[-1] != blocks[-2]:
        return None
    rows, stages = blocks[-3] * blocks[-1], blocks[0] if len(blocks) == 4 else 0
    unfit = stages and (blocks[-1] % 2 or stages > 32 or rows % (2 ** (stages - 1) * blocks[-1]))
    return None if unfit or math.prod(shapes.get(RESCALE, (rows,))) != rows else (rows, 0, 0)


def _rotation(own: Mapping[str, Tensor], weight: Tensor) -> Tensor:
    """R W - W, fp32, for orthogonal blocks (1 + Q) / (1 - Q), Q skew and of norm alpha at most, if that is positive. R
    has their transposes on its diagonal (OFT) or is the product of the stages (BOFT); a rescale multiplies its rows."""
    blocks = own[BLOCKS].float()
    skew, one = blocks - blocks.mT, torch.eye(blocks.shape[-1])
    limit = float(own[ALPHA].float()) if ALPHA in own else 0.0
    length = float(skew.norm()) + 1e-8  # as LyCORIS has it
    if 0.0 < limit < length:
        skew = skew * (limit / length)
    turns = (one + skew) @ torch.linalg.inv(one - skew)
    turned, size = weight, blocks.shape[-1]
    if blocks.ndim == 3:
        turned = (turns.mT @ weight.unflatten(0, (-1, size))).flatten(0, 1)
    for stage, turn in enumerate(turns if blocks.ndim == 4 else ()):
        apart = 2**stage * (size // 2)  # rows between the halves of a block
        rows = turned.unflatten(0, (-1, 2, apart)).transpose(1, 2).flatten(0, 2)
        rows = (turn @ rows.unflatten(0, (-1, size))).flatten(0, 1)
        turned = rows.unflatten(0, (-1, apart, 2)).transpose(1, 2).flatten(0, 2)
    return (turned * own[RESCALE].float().reshape(-1, 1) if RESCALE in own else turned) - weight


def _glora_size(shapes: Shapes) -> Size | None:
    """The size of GLoRA, which adds W a1 a2 + b1 b2 (older files: W a2 a1 + b2 b1); None where factors do not fit."""
    if not all(len(shapes.get(role, ())) == 2 for role in GLORA):
        return None
    a1, a2, b1, b2 = _in_order([(shapes[role], shapes[role]) for role in GLORA])
    return (b1[0], b2[1], a2[0]) if a1[1] == a2[0] == b1[1] == b2[0] else None


def _glora(own: Mapping[str, Tensor], weight: Tensor) -> Tensor:
    a1, a2, b1, b2 = _in_order([(tuple(own[role].shape), own[role].float()) for role in GLORA])
    return weight @ a1 @ a2 + b1 @ b2


def _in_order(factors: Sequence[tuple[tuple[int, ...], Any]]) -> list[Any]:
    """The four factors of GLoRA as newer files have them: in older ones those of a pair change places."""
    older = factors[0][0][0] < factors[0][0][1]  # a1 is tall in newer files
    return [value for _, value in ([factors[at] for at in (1, 0, 3, 2)] if older else factors)]


def _nothing(own: Mapping[str, Tensor], pair: LoRAPair) -> tuple[Tensor, Tensor]:  # factors of a zero product
    return torch.zeros(1, math.prod(pair.shape[1:])), torch.zeros(pair.shape[0], 1)


def _factors(difference: Tensor) -> tuple[Tensor, Tensor]:  # down and up: itself and an identity, the smaller one
    rows, columns = difference.shape
    return (difference, torch.eye(rows)) if rows <= columns else (torch.eye(columns), difference)


KINDS = (
    Kind(_low_rank_size, _low_rank),
    Kind(_loha_size, _loha),
    Kind(_lokr_size, _lokr),
    Kind(
        lambda shapes: (shapes[DIFFERENCE][0], math.prod(shapes[DIFFERENCE][1:]), 0) if DIFFERENCE in shapes else None,
        lambda own, pair: _factors(pair.cut(own[DIFFERENCE].float().reshape(own[DIFFERENCE].shape[0], -1))),
    ),
    Kind(_rotation_size, _nothing, _rotation),
    Kind(_glora_size, _nothing, _glora),
    Kind(lambda shapes: (shapes[BIAS][0], 0, 0) if BIAS in shapes else None, _nothing),  # a bias alone
)


def role_of(name: str) -> tuple[str, str]:
    """The role of a tensor, and its name without it; an empty role where it has none."""
    for role, ends in ENDS:
        for end in ends.split():
            if name.endswith(end):
                return role, name.removesuffix(end)
    return "", name


def size_of(names: Mapping[str, str], tensors: Shapes) -> Size | None:
    """Rows, columns and rank of what a layer's tensors add. None for no known kind, an empty tensor, a factor of one
    axis or without its other, a convolution's middle factor, several alphas, or a bias of another length."""
    shapes = {role: tensors[name] for role, name in names.items()}
    flat = any(len(shapes[role]) < 2 for role in (DOWN, UP, *HADA, *KRON) if role in shapes)
    empty = any(not shape or not math.prod(shape) for role, shape in shapes.items() if role != ALPHA)
    unmatched = not flat and not shapes.keys().isdisjoint((DOWN, UP)) and _low_rank_size(shapes) is None
    if MIDDLE in shapes or flat or empty or unmatched or math.prod(shapes.get(ALPHA, ())) != 1:
        return None
    size = next((size for kind in KINDS if (size := kind.size(shapes)) is not None), None)
    return size if size and all(shapes[role] == size[:1] for role in BIASES & shapes.keys()) else None


def is_narrower(down: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """True if a down factor takes the first input channels of a layer of ``shape``, such as an I2V one's noise."""
    return len(down) == len(shape) and down[2:] == shape[2:] and down[1] < shape[1]
