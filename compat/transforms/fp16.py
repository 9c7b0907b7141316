"""Safe fp16: the speed of fp16 matrix products without their overflow, for GPUs whose bf16 is missing, slow or wrong.

Operands of the large products and of attention are fp16; the residual stream, statistics of norms, modulation, gates,
everything outside the blocks and the final projection are fp32. A product that feeds the residual comes out in fp32:
straight from the GEMM where the device can, else from one whose rows were divided by a power of two that is measured on
each call, on the device, so that no partial sum can leave fp16's range (Cauchy-Schwarz with the weights' row norms).
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..errors import UnsupportedError
from ..memory.hooks import weights_on

HALF, FULL = torch.float16, torch.float32
LIMIT = 2.0**15  # half of what fp16 can hold: room for the rounding of operands and products
RESIDUAL_SCALE = 2.0**8  # what a residual is divided by where products come out in fp32: room up to 1.6e7
SETTINGS, SCALE = "_anygpu_fp16", "_anygpu_value_scale"
EXPONENT = 0x7F800000  # the exponent bits of an fp32 number
BLOCKS = ("transformer_blocks", "single_transformer_blocks")


class Kind(enum.Enum):
    """What becomes of a Linear in a block."""

    NARROW = "fp16 in and out"  # its input is normalised and its output bounded by that
    WIDE = "fp16 operands, fp32 out"  # feeds the residual
    RESIDUAL = "fp16 operands from the fp32 residual, fp32 out"  # nothing has normalised its input
    ROTATED = "fp16 in, fp32 out where the GEMM can, else fp16"  # goes on to fp32 arithmetic before it is narrowed
    VALUE = "fp16 operands, fp16 out divided by a power of two"  # attention's values from text that nothing normalised
    FULL = "fp32"  # modulation: few rows, so its weights are kept as fp16 and widened for the call


@dataclass(slots=True)
class Settings:
    """What a rewritten leaf knows.

    Args:
        fp32_output: whether a GEMM of fp16 operands can come out in fp32 here.
        reach: largest L2 norm of the weight's rows, at least 1. residual: whether it is fed from the residual.
        values: for an attention's output projection, the VALUE leaf whose power of two it multiplies back in.
    """

    fp32_output: bool
    reach: float
    residual: bool = False
    values: nn.Module | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """What was rewritten, by kind, and what was left as fp32, by reason."""

    family: str
    rewritten: Mapping[str, int]
    left: Mapping[str, int]
    fp32_output: bool

    def __str__(self) -> str:
        done = ", ".join(f"{count} {name}" for name, count in self.rewritten.items()) or "nothing"
        left = "".join(f"; {count} left in fp32: {why}" for why, count in self.left.items())
        how = "fp32-output products" if self.fp32_output else "products scaled by powers of two"
        return f"safe fp16 for {self.family} with {how}: {done}{left}"


@dataclass(slots=True)
class Applied:
    """A rewrite that can be taken back."""

    report: Report
    undo: list[Callable[[], None]] = field(default_factory=list)

    def restore(self) -> None:
        """Put back forwards, processors and weights, the newest change first.

        Without ``keep_weights`` weights come back in their former dtype with the bits that fp16 had room for.
        """
        while self.undo:
            self.undo.pop()()


def apply_fp16_safe(
    transformer: nn.Module, family: str, facts: Mapping[str, Any] | None = None, keep_weights: bool = False
) -> Applied:
    """Make ``transformer`` compute in safe fp16, in place; it takes and returns fp32.

    Every block of an exactly known class is rewritten on its own instance; any other is left alone, in fp32, and
    counted. To be applied on the host, before an offloader holds the transformer.

    Args:
        facts: what was probed; ``fp32_output`` says whether a GEMM of fp16 operands can come out in fp32.
        keep_weights: keep the weights as they were, so that :meth:`Applied.restore` gives back the same tensors.

    Raises:
        UnsupportedError: an offloader's hooks are on, or the rewrite is applied already.
    """
    from .fp16_blocks import rewrite_for, turns_for

    _require_bare(transformer)
    fp32_output = bool((facts or {}).get("fp32_output", False))
    applied, done, left = Applied(Report(family, {}, {}, fp32_output)), Counter[str](), Counter[str]()
    halves: set[int] = set()
    for block in _blocks(transformer):
        rewrite = rewrite_for(block)
        reason = f"{full_name(block)} is not a class this knows" if rewrite is None else _unfit(block, rewrite.leaves)
        if rewrite is None or reason:
            left[reason] += 1
            continue
        halves.update(_attach_leaves(block, rewrite.leaves, fp32_output, applied, done))
        rewrite.attach(block, applied)
        done["blocks"] += 1
    for tensor in (*transformer.parameters(), *transformer.buffers()):
        if tensor.is_floating_point():
            _cast(tensor, HALF if id(tensor) in halves else FULL, keep_weights, applied)
    if done["blocks"] and turns_for(getattr(transformer, "rope", None)):
        attach_rope(transformer.get_submodule("rope"), applied)
    applied.report = Report(family, dict(done), dict(left), fp32_output)
    return applied


def stored_dtype(name: str, shape: tuple[int, ...]) -> torch.dtype:
    """The dtype in which the tensor ``name`` of a checkpoint is best read: fp16 for matrices of blocks, else fp32."""
    return HALF if len(shape) == 2 and name.startswith(BLOCKS) and name.endswith(".weight") else FULL


def fp32_output_works(device: torch.device) -> bool:
    """Whether a GEMM of fp16 operands comes out in fp32 on ``device``: one small product, read back."""
    try:
        x = torch.full((16, 16), 300.0, dtype=HALF, device=device)
        found = torch.addmm(torch.ones(16, device=device), x, x.t(), alpha=2.0, out_dtype=FULL)
        return bool((found.cpu() == 2 * 16 * 300.0**2 + 1).all())
    except (RuntimeError, TypeError):  # NotImplementedError is a RuntimeError; an older torch knows no out_dtype
        return False


def patch_forward(module: nn.Module, forward: Callable[..., Any], applied: Applied) -> None:
    """Give ``module``, and no other of its class, another forward."""
    module.forward = MethodType(forward, module)  # type: ignore[method-assign]
    applied.undo.append(partial(delattr, module, "forward"))


def narrowed(x: Tensor, scale: Tensor | None = None) -> Tensor:
    """``x``, divided by ``scale``, as fp16, in one pass."""
    if scale is None:
        return x.to(HALF)
    return torch.mul(x, scale.reciprocal(), out=torch.empty_like(x, dtype=HALF))


def scales(x: Tensor, reach: float) -> Tensor:
    """The power of two, at least 1, that keeps a row of ``x`` and its products within fp16, per row: (..., 1), fp32."""
    needed = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=FULL) * (2.0 * reach / LIMIT)
    # The exponent bits alone are the next lower power of two: exact on every device, which exp2(log2()) is not.
    return (needed.view(torch.int32) & EXPONENT).view(FULL).clamp_(min=1.0)


def wide_linear(leaf: Any, x: Tensor) -> Tensor:
    """The product of ``leaf`` in fp32 from fp16 operands; ``x`` (..., features) is fp32 of any size, or fp16."""
    settings: Settings = getattr(leaf, SETTINGS)
    held = None if settings.values is None else settings.values.__dict__.pop(SCALE, None)
    if settings.fp32_output and x.dtype is HALF:
        with weights_on(leaf, like=x) as (weight, bias):
            return _fp32_product(x, weight, bias, held)
    if settings.fp32_output and settings.residual:
        return _divided_linear(leaf, x)
    scale = scales(x, 1.0 if settings.fp32_output else settings.reach)
    x, total = narrowed(x, scale), scale if held is None else scale * held
    with weights_on(leaf, like=x) as (weight, bias):
        if settings.fp32_output:
            return _fp32_product(x, weight, bias, total)
        y = functional.linear(x, weight)
        return y * total if bias is None else torch.addcmul(bias.float(), y, total)


def _divided_linear(leaf: Any, x: Tensor) -> Tensor:
    """:func:`wide_linear` with one constant divisor, which the GEMM multiplies back in: ``x`` is read only once.

    What it costs a small value is below the rounding of fp16 in rows whose values are around 0.03 and more.
    """
    x = torch.mul(x, 1 / RESIDUAL_SCALE, out=torch.empty_like(x, dtype=HALF))
    with weights_on(leaf, like=x) as (weight, bias):
        return _fp32_product(x, weight, bias, RESIDUAL_SCALE)


def value_linear(leaf: Any, x: Tensor) -> Tensor:
    """Attention's values in fp16, all divided by one power of two, which is left for the output projection."""
    settings: Settings = getattr(leaf, SETTINGS)
    scale = scales(x, settings.reach).amax()
    leaf.__dict__[SCALE] = scale
    x = narrowed(x, scale)
    with weights_on(leaf, like=x) as (weight, bias):
        return functional.linear(x, weight, None if bias is None else narrowed(bias, scale))


def adapted_value(layer: Any, x: Tensor) -> Tensor:
    """:func:`value_linear` with the LoRAs that peft put around it, which are divided by the same power of two."""
    y: Tensor = layer.base_layer(x)
    if layer.disable_adapters:
        return y
    scale, wide = layer.base_layer.__dict__[SCALE], x.float()
    for name in (name for name in layer.active_adapters if name in layer.lora_A):
        y = y + narrowed(layer.lora_B[name](layer.lora_A[name](wide)) * layer.scaling[name], scale)
    return y


def full_linear(leaf: Any, x: Tensor) -> Tensor:
    """The product of ``leaf`` in fp32, from weights that are kept in fp16. Peak extra memory: the weight in fp32."""
    x = x.float()
    with weights_on(leaf, like=x) as (weight, bias):
        return functional.linear(x, weight, bias)


def rms_norm(norm: Any, x: Tensor, narrow: bool = False) -> Tensor:
    """``x`` divided by its root mean square, times the weight, all in fp32; as fp16 where ``narrow``."""
    x = x.float()
    if norm.weight is None:
        y = functional.rms_norm(x, x.shape[-1:], None, norm.eps)
    else:
        with weights_on(norm, like=x) as (weight, _):
            y = functional.rms_norm(x, x.shape[-1:], weight, norm.eps)
    return y.to(HALF) if narrow else y


def narrow_rms_norm(norm: Any, x: Tensor, narrow: bool = True) -> Tensor:
    """:func:`rms_norm` for queries and keys, which go on as fp16 unless the caller rotates them first."""
    return rms_norm(norm, x, narrow)


class Turns(tuple):
    """Cosine and sine tables as diffusers makes them, and the complex numbers they are, made once per forward."""

    def pairs(self) -> Tensor:
        """cos + i sin for each pair of features, (..., features / 2), complex64."""
        if "made" not in self.__dict__:
            self.made = torch.complex(*(table.float()[..., ::2].contiguous() for table in self))
        return self.made


def attach_rope(rope: nn.Module, applied: Applied) -> None:
    """Make ``rope`` return its (cos, sin) as :class:`Turns`."""
    stock = type(rope).forward

    def forward(
        rope: Any,
        hidden_states: Tensor,
        num_frames: int | None = None,
        height: int | None = None,
        width: int | None = None,
        rope_interpolation_scale: Any = None,
        video_coords: Tensor | None = None,
    ) -> Turns:
        # Without coordinates of its own every row of the batch has the same tables: one row is read instead of all.
        given = hidden_states[:1] if video_coords is None else hidden_states
        return Turns(stock(rope, given, num_frames, height, width, rope_interpolation_scale, video_coords))

    patch_forward(rope, forward, applied)


FORWARDS = {
    Kind.WIDE: wide_linear,
    Kind.RESIDUAL: wide_linear,
    Kind.ROTATED: wide_linear,
    Kind.VALUE: value_linear,
    Kind.FULL: full_linear,
}


def _fp32_product(x: Tensor, weight: Tensor, bias: Tensor | None, total: Tensor | float | None) -> Tensor:
    rows, columns, shape = x.flatten(0, -2), weight.t(), x.shape[:-1]
    if bias is None:
        y = torch.mm(rows, columns, out_dtype=FULL).unflatten(0, shape)
        return y if total is None else y.mul_(total)
    if isinstance(total, Tensor):
        y = torch.mm(rows, columns, out_dtype=FULL).unflatten(0, shape)
        return torch.addcmul(bias.float(), y, total)
    alpha = 1.0 if total is None else total
    return torch.addmm(bias.float(), rows, columns, alpha=alpha, out_dtype=FULL).unflatten(0, shape)


def _attach_leaves(
    block: nn.Module, leaves: Mapping[str, Kind], fp32_output: bool, applied: Applied, done: Counter[str]
) -> Iterator[int]:
    """Rewrite the leaves of ``block``; the ids of the parameters that are to be fp16."""
    made: dict[str, nn.Module] = {}
    for path, kind in leaves.items():
        around: Any = _at(block, path)
        if around is None:
            continue
        leaf = _bare(around)
        if kind is Kind.VALUE and leaf is not around:
            patch_forward(around, adapted_value, applied)
        made[path] = leaf
        done[kind.value] += 1
        yield id(leaf.weight)
        if leaf.bias is not None and kind is not Kind.FULL:
            yield id(leaf.bias)
        if kind is Kind.NARROW or (kind is Kind.ROTATED and not fp32_output):
            continue
        reach = 1.0
        if kind is Kind.VALUE or (kind is not Kind.FULL and not fp32_output):
            reach = max(1.0, float(torch.linalg.vector_norm(leaf.weight, dim=1, dtype=FULL).max()))
        values = made.get(path.replace("to_out.0", "to_v")) if path.endswith("to_out.0") else None
        values = values if values is not None and hasattr(values, SETTINGS) else None
        setattr(leaf, SETTINGS, Settings(fp32_output, reach, kind is Kind.RESIDUAL, values))
        applied.undo.append(partial(delattr, leaf, SETTINGS))
        patch_forward(leaf, FORWARDS[kind], applied)


def _cast(tensor: Tensor, dtype: torch.dtype, keep: bool, applied: Applied) -> None:
    if tensor.dtype is dtype:
        return
    former, kept = tensor.dtype, tensor.data if keep else None

    def back() -> None:
        tensor.data = tensor.data.to(former) if kept is None else kept

    with torch.inference_mode(False), torch.no_grad():
        tensor.data = tensor.data.to(dtype)
    applied.undo.append(back)


def _unfit(block: nn.Module, leaves: Mapping[str, Kind]) -> str:
    """Why ``block`` cannot be rewritten; empty when it can."""
    for path in leaves:
        leaf: Any = _bare(_at(block, path))
        if leaf is None:
            continue
        if type(leaf) is not nn.Linear:
            return f"{path} is a {type(leaf).__name__}"
        if leaf.weight.dtype is HALF:
            continue
        low, high = torch.aminmax(leaf.weight.data)
        if not max(-float(low), float(high)) <= torch.finfo(HALF).max:
            return f"weights of {path} do not fit into fp16"
    return ""


def _at(block: nn.Module, path: str) -> nn.Module | None:
    """The submodule at ``path``; None where this configuration of the block has none."""
    found: Any = block
    for name in path.split("."):
        found = found[int(name)] if name.isdigit() else getattr(found, name, None)
        if found is None:
            return None
    return found  # type: ignore[no-any-return]


def _bare(module: Any) -> Any:
    """The layer itself, inside what an adapter put around it."""
    return getattr(module, "base_layer", module)


def _blocks(transformer: nn.Module) -> Iterator[nn.Module]:
    for name in BLOCKS:
        yield from getattr(transformer, name, ())


def full_name(thing: Any) -> str:
    """Module and class of ``thing``."""
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def _require_bare(transformer: nn.Module) -> None:
    for module in transformer.modules():
        # a registry without hooks stays behind wherever diffusers' cache context was entered once
        if hasattr(module, "_hf_hook") or getattr(getattr(module, "_diffusers_hook", None), "hooks", None):
            raise UnsupportedError(
                f"safe fp16 for a {type(transformer).__name__} that a residency already moves",
                expected="a transformer without offload hooks",
                fix="Take the residency off, apply, and put it back.",
            )
        if hasattr(module, SETTINGS):
            raise UnsupportedError(
                f"safe fp16 for a {type(transformer).__name__} that has it already",
                expected="one rewrite at a time",
                fix="Call restore() on the first.",
            )
