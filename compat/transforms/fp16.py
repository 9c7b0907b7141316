"""Safe fp16: the speed of fp16 matrix products without their overflow, for GPUs whose bf16 is missing, slow or wrong.
Operands of the large products and of attention are fp16, all else fp32. A product that feeds the residual comes out in
fp32: from the GEMM where the device can, else from one whose rows were divided by a power of two, measured on each
call, so that no partial sum can leave fp16's range (Cauchy-Schwarz with the weights' row norms)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...kernels.activation import scaled_swiglu
from ...kernels.terms import NO_MODULATION, SCALED, Gate, Norm
from ..checkpoints.packed import Stored, StoredLinear
from ..device.execution import held, to_host
from ..device.facts import DeviceFacts
from ..errors import UnsupportedError
from ..memory.hooks import is_hooked_by_others
from ..memory.parts import BLOCK_LISTS, Undo, full_name, submodule_at, transformer_blocks
from . import fp16_layers
from .blocks import FORWARDS, OPS, TRANSFORMERS, BlockOps, is_ours, is_plain_linear
from .fp16_layers import FULL, HALF, PLAIN, SETTINGS, LayerKind, LayerSettings, RotaryTables

SUMS_SWITCH = "allow_fp16_accumulation"  # of torch.backends.cuda.matmul, for the whole process
SUMS_BACKENDS: Mapping[str, str] = {"cuda": "cuBLAS adds fp16 products in fp16 if allowed to (torch 2.7)"}


@dataclass(frozen=True, slots=True)
class SafeOps(BlockOps):
    """The norms and sums of a block on fp16 operands, around products that come out in fp32."""

    operand_dtype: torch.dtype | None = HALF

    def added_read(self, x: Tensor, branch: Tensor, gate: Gate, layer: Any) -> tuple[Tensor, Tensor]:
        """The sum, and the sum as ``layer`` reads it: in fp16, divided by RESIDUAL_SCALE, if operations are fused."""
        settings = getattr(_bare(layer), SETTINGS, PLAIN)
        settings.divided = bool(self.form) and settings.residual and _bare(layer) is layer  # LoRAs need it undivided
        if settings.divided:
            return self.added_normalized(x, branch, gate, Norm(SCALED, 1 / fp16_layers.RESIDUAL_SCALE), NO_MODULATION)
        return BlockOps.added_read(self, x, branch, gate, layer)

    def attended(self, attention: Any, x: Tensor, **named: Any) -> tuple[Tensor, Tensor | None]:
        """The branch, and the power of two that divided its values, which the block's sum multiplies in. None for none,
        and where a replaced forward, as of a step cache, may repeat its result: the output projection multiplies it."""
        output = _bare(attention.to_out[0])
        settings = getattr(output, SETTINGS, PLAIN)
        settings.leaves = settings.values is not None and "forward" not in attention.__dict__
        output.__dict__.pop(fp16_layers.SCALE, None)  # of a call that was cut short
        result = attention(x, **named)
        settings.leaves, scale = False, output.__dict__.pop(fp16_layers.SCALE, None)
        return result, None if scale is None else scale.view(1, 1, 1)

    def fed(self, feed: Any, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The branch, and the powers of two (B, N, 1) by which its hidden rows were divided; None if they were not."""
        gated, output = feed.net[0], _bare(feed.net[-1])
        settings = getattr(output, SETTINGS, PLAIN)
        reach = 1.0 if settings.fp32_output else settings.reach
        # Below this norm a row's products stay in fp16's range. In a graph reach is a tensor, which no kernel takes.
        room = fp16_layers.LIMIT / reach if isinstance(reach, float) else 0.0
        replaced = "forward" in feed.__dict__ or is_hooked_by_others(feed)
        divisible = output.bias is None and is_ours(gated, fp16_layers.fp32_swiglu)  # a bias would not be divided
        if not (self.form and room and divisible) or replaced:
            return feed(x), None
        hidden, factor = scaled_swiglu(gated.proj(x), room, self.form)
        return feed.net[-1](hidden), factor

    def is_plain(self, layer: Any) -> bool:
        return is_plain_linear(layer, fp16_layers.fp32_linear)

    def summed(self, x: Tensor, weight: Tensor, bias: Tensor, other: Tensor, columns: Tensor) -> Tensor:
        return fp16_layers.fp32_product(other, columns, fp16_layers.fp32_product(x, weight, bias))


SAFE_OPS = SafeOps()


@dataclass(slots=True)
class AppliedFp16:
    """A transformer in safe fp16: the number of rewritten layers by kind, and of blocks left in fp32 by reason."""

    family: str
    fp32_output: bool
    rewritten: Counter[str] = field(default_factory=Counter)
    left: Counter[str] = field(default_factory=Counter)
    undo: Undo = field(default_factory=Undo)

    def __str__(self) -> str:
        done = ", ".join(f"{count} {name}" for name, count in self.rewritten.items()) or "nothing"
        left = "".join(f"; {count} left in fp32: {why}" for why, count in self.left.items())
        how = "fp32-output products" if self.fp32_output else "products scaled by powers of two"
        return f"safe fp16 for {self.family} with {how}: {done}{left}"

    def restore(self) -> None:
        """Put back forwards, processors and dtypes; weights keep what fp16 had room for."""
        self.undo.restore()


def apply_fp16_safe(transformer: nn.Module, family: str, fp32_output: bool = False) -> AppliedFp16:
    """Make ``transformer`` compute in safe fp16, in place, on the host and without offload; it takes and returns fp32.
    Every block of an exactly known class is rewritten on its own instance; any other stays in fp32 and is counted.
    ``fp32_output``: GEMMs of fp16 operands can return fp32. Raises UnsupportedError under offload hooks or twice."""
    _require_bare(transformer)
    applied = AppliedFp16(family, fp32_output)
    halves: set[int] = set()
    for block in transformer_blocks(transformer):
        layers = LAYERS_OF.get(full_name(block).removeprefix(TRANSFORMERS))
        reason = f"{full_name(block)} is not a known class" if layers is None else _unfit(block, layers)
        if layers is None or reason:
            applied.left[reason] += 1
            continue
        halves.update(_attach_layers(block, layers, applied))
        _attach_block(block, layers, applied)
        applied.rewritten["blocks"] += 1
    packed = [layer for layer in transformer.modules() if isinstance(layer, Stored)]
    for layer in packed:
        applied.undo.set(layer, "dense_dtype", HALF if id(layer) in halves else FULL)
    kept = {id(tensor) for layer in packed for tensor in (layer.stored, *layer.sides.values())}
    for tensor in (*transformer.parameters(), *transformer.buffers()):
        dtype = HALF if id(tensor) in halves else FULL
        if tensor.is_floating_point() and tensor.dtype is not dtype and id(tensor) not in kept:
            applied.undo.append(partial(_cast, tensor, tensor.dtype))
            _cast(tensor, dtype)
    rope: Any = getattr(transformer, "rope", None)
    if applied.rewritten and full_name(rope) == f"{TRANSFORMERS}transformer_ltx.LTXVideoRotaryPosEmbed":
        applied.undo.patch(rope, _rope_forward)
    return applied


def stored_dtype(name: str, shape: tuple[int, ...]) -> torch.dtype:
    """The dtype in which safe fp16 reads a checkpoint's tensor ``name``: fp16 for matrices of blocks, else fp32."""
    return HALF if len(shape) == 2 and name.startswith(BLOCK_LISTS) and name.endswith(".weight") else FULL


def fp32_output_works(device: torch.device) -> bool:
    """True where a GEMM of fp16 operands comes out in fp32 on ``device``: one small product, read back."""
    try:
        x = torch.full((16, 16), 300.0, dtype=HALF, device=device)
        product = torch.addmm(torch.ones(16, device=device), x, x.t(), alpha=2.0, out_dtype=FULL)
        return bool((to_host(product) == 2 * 16 * 300.0**2 + 1).all())
    except (RuntimeError, TypeError):  # NotImplementedError is a RuntimeError; an older torch knows no out_dtype
        return False


def require_fp16_sums(facts: DeviceFacts, dtype: torch.dtype) -> None:
    """Raise UnsupportedError where fp16 accumulation, fast on GeForce and lossy, would do nothing in ``dtype``."""
    reason = ""
    if facts.backend not in SUMS_BACKENDS:
        reason = f"{facts.backend} does not support it"
    elif not hasattr(torch.backends.cuda.matmul, SUMS_SWITCH):  # one that this torch lacks raises when it is read
        reason = f"torch {torch.__version__} has no switch for it"
    elif dtype is not torch.float16:
        reason = f"the transformer's products are in {str(dtype).removeprefix('torch.')}"
    if reason:
        found = f"fp16_accumulation on {facts.device}: {reason}"
        expected = "an NVIDIA GPU, torch 2.7 or newer, and precision fp16 or fp16-safe"
        fix = "Switch off fp16_accumulation, or choose precision fp16-safe on the load node."
        raise UnsupportedError(found, expected=expected, fix=fix)


def fp16_sums() -> AbstractContextManager[None]:
    """The block in which torch's products of fp16 operands are summed in fp16."""
    return held(torch.backends.cuda.matmul, SUMS_SWITCH, True)


def _rope_forward(rope: Any, hidden_states: Tensor, *args: Any, **named: Any) -> RotaryTables:
    """Upstream's (cos, sin) as :class:`RotaryTables`; of one sample where all are alike, without ``video_coords``."""
    shared = (args[4] if len(args) > 4 else named.get("video_coords")) is None  # upstream's sixth argument
    return RotaryTables(type(rope).forward(rope, hidden_states[:1] if shared else hidden_states, *args, **named))


def _attach_block(block: nn.Module, layers: Mapping[str, LayerKind], applied: AppliedFp16) -> None:
    """Give ``block``, its norms of queries and keys, its gated products and its processors new forwards."""
    applied.undo.set(block, OPS, SAFE_OPS)
    applied.undo.patch(block, FORWARDS[full_name(block).removeprefix(TRANSFORMERS)])
    for path, module in block.named_modules():
        if path.rpartition(".")[2] in QK_NORMS:
            applied.undo.patch(module, fp16_layers.rms_norm)
        elif type(module).__name__ == "SwiGLU":
            applied.undo.patch(module, fp16_layers.fp32_swiglu)
    for path in {path.rpartition(".")[0] for path, kind in layers.items() if kind is LayerKind.ROTATED}:
        attention: Any = block.get_submodule(path)
        if full_name(attention.processor) == LTX_PROCESSOR:
            applied.undo.set(attention, "processor", fp16_layers.Fp32RotaryProcessor())


def _attach_layers(block: nn.Module, layers: Mapping[str, LayerKind], applied: AppliedFp16) -> Iterator[int]:
    """Rewrite the forwards of the ``layers`` of ``block``, an attention's values before its output, which multiplies
    their power of two back; yields the ids of parameters, and of packed layers, that the caller has to cast to fp16."""
    scaled: dict[str, nn.Module] = {}  # rewritten layers by path
    for path, kind in layers.items():
        around: Any = submodule_at(block, path)
        if around is None:
            continue
        layer = _bare(around)
        if kind is LayerKind.VALUE and layer is not around:
            applied.undo.patch(around, fp16_layers.adapted_value)
        applied.rewritten[kind.value] += 1
        yield id(layer if isinstance(layer, Stored) else layer.weight)
        if layer.bias is not None and kind is not LayerKind.FULL:
            yield id(layer.bias)
        if kind is LayerKind.NARROW or (kind is LayerKind.ROTATED and not applied.fp32_output):
            continue
        reach: float | None = 1.0  # of the weight's rows; None to measure packed ones when they compute
        if kind is LayerKind.VALUE or (kind is not LayerKind.FULL and not applied.fp32_output):
            reach = None if isinstance(layer, Stored) else max(1.0, float(fp16_layers.reach_of(layer.weight)))
        values = scaled.get(path.replace("to_out.0", "to_v"))  # of an attention's output projection: its values' layer
        if values is not None and layer is not around:
            applied.undo.patch(around, fp16_layers.adapted_out)
        residual = applied.fp32_output and kind is LayerKind.RESIDUAL
        applied.undo.set(layer, SETTINGS, LayerSettings(applied.fp32_output, reach, residual, values))
        applied.undo.patch(layer, fp16_layers.FORWARD_OF[kind])
        scaled[path] = layer


def _cast(tensor: Tensor, dtype: torch.dtype) -> None:
    """Change the dtype of ``tensor`` in place."""
    with torch.inference_mode(False), torch.no_grad():
        tensor.data = tensor.data.to(dtype)


def _unfit(block: nn.Module, layers: Mapping[str, LayerKind]) -> str:
    """The reason why ``block`` cannot be in safe fp16: a layer's class, or weights beyond fp16; empty for none."""
    for path in layers:
        layer: Any = _bare(submodule_at(block, path))
        if layer is None:
            continue
        if type(layer) not in (nn.Linear, StoredLinear):
            return f"{path} is a {type(layer).__name__}"
        packed = isinstance(layer, StoredLinear)
        weight = layer.stored if packed else layer.weight
        if weight.dtype is HALF or (packed and layer.codec):  # packed values are only known when the layer computes
            continue
        low, high = torch.aminmax(weight.data)
        if not max(-float(low), float(high)) <= torch.finfo(HALF).max:
            return f"weights of {path} do not fit into fp16"
    return ""


def _bare(module: Any) -> Any:
    """The layer itself, inside what an adapter put around it."""
    return getattr(module, "base_layer", module)


def _require_bare(transformer: nn.Module) -> None:
    """Raise UnsupportedError where a module is hooked by an offloader, or is in safe fp16 already."""
    for module in transformer.modules():
        # a registry without hooks stays behind wherever diffusers' cache context was entered once
        if hasattr(module, "_hf_hook") or getattr(getattr(module, "_diffusers_hook", None), "hooks", None):
            found = f"safe fp16 for a {type(transformer).__name__} that an offloader already moves"
            expected = "a transformer without offload hooks"
            raise UnsupportedError(found, expected=expected, fix="Take the offloader off, apply, and put it back.")
        if hasattr(module, SETTINGS):
            found = f"safe fp16 for a {type(transformer).__name__} that has it already"
            raise UnsupportedError(found, expected="one rewrite at a time", fix="Call restore() on the first.")


def _paths(names: str, kind: LayerKind, prefix: str = "") -> dict[str, LayerKind]:
    """``kind`` by path, for each of the ``names``, which blanks separate."""
    return {prefix + name: kind for name in names.split()}


_QKV, _TEXT_QKV = "to_q to_k to_v", "add_q_proj add_k_proj add_v_proj"
_FEED = _paths("ff.net.0.proj", LayerKind.NARROW) | _paths("ff.net.2", LayerKind.WIDE)
_FEEDS = _FEED | _paths("ff_context.net.0.proj", LayerKind.NARROW) | _paths("ff_context.net.2", LayerKind.WIDE)
_MODULATIONS = _paths("norm1.linear norm1_context.linear", LayerKind.FULL)


def _both_streams(attention: str) -> dict[str, LayerKind]:
    """The layers of a block with a video and a text stream, whose joint attention has this path."""
    read = _paths(f"{_QKV} {_TEXT_QKV}", LayerKind.NARROW, attention)
    return read | _paths("to_out.0 to_add_out", LayerKind.WIDE, attention) | _FEEDS | _MODULATIONS


_JOINT = _both_streams("attn.")
_SINGLE = _paths(_QKV, LayerKind.NARROW, "attn.") | _paths("proj_mlp", LayerKind.NARROW)
_SINGLE |= _paths("proj_out", LayerKind.WIDE) | _paths("norm.linear", LayerKind.FULL)
_LAST_TEXT = _paths("norm1_context.linear_1", LayerKind.FULL)
_OWN = _paths("to_q to_k", LayerKind.ROTATED, "attn1.") | _paths("to_v", LayerKind.NARROW, "attn1.")
_OWN |= _paths("to_out.0", LayerKind.WIDE, "attn1.")
_CROSS = _paths("to_q", LayerKind.RESIDUAL, "attn2.") | _paths("to_k", LayerKind.WIDE, "attn2.")
_CROSS |= _paths("to_v", LayerKind.VALUE, "attn2.") | _paths("to_out.0", LayerKind.WIDE, "attn2.")
QK_NORMS = ("norm_q", "norm_k", "norm_added_q", "norm_added_k")
LTX_PROCESSOR = f"{TRANSFORMERS}transformer_ltx.LTXVideoAttnProcessor"  # whose place :class:`Fp32RotaryProcessor` takes
LAYERS_OF: Mapping[str, Mapping[str, LayerKind]] = {  # upstream's class to what becomes of its Linears, by path
    "transformer_ltx.LTXVideoTransformerBlock": _OWN | _CROSS | _FEED,
    "transformer_hunyuan_video.HunyuanVideoTransformerBlock": _JOINT,
    "transformer_hunyuan_video.HunyuanVideoSingleTransformerBlock": _SINGLE,
    "transformer_hunyuan_video.HunyuanVideoTokenReplaceTransformerBlock": _JOINT,
    "transformer_hunyuan_video.HunyuanVideoTokenReplaceSingleTransformerBlock": _SINGLE,
    "transformer_hunyuan_video15.HunyuanVideo15TransformerBlock": _JOINT,
    "transformer_mochi.MochiTransformerBlock": _both_streams("attn1.") | _LAST_TEXT,
}
