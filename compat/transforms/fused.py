"""Fused kernels in transformer blocks: the fusion points that are replaced, and those left alone with the reason.
A block is rewritten per instance, and only if its class, forward arguments, norms and attention are exactly what the
rewrite expects. Weights are not copied."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ...kernels.library import AUTO, FAULTS, REFERENCE, TRITON, failures_raise, launches
from ...kernels.library import reason_against as reason_against
from ...kernels.product import linear_gelu, linear_gelu_reference
from ...kernels.self_tests import BLOCK_OPERATIONS, VAE_OPERATIONS
from ...kernels.self_tests import self_tests as self_tests
from ...kernels.self_tests import timed_calls as timed_calls
from ..device.execution import HOST, placed, to_host
from ..device.failures import DEVICE_ERRORS, is_passing
from ..device.precision import NAMES
from ..device.probe_store import ProbeStore
from ..memory.parts import Undo, full_name, submodule_at, transformer_blocks
from .blocks import FORWARDS, OPS, TRANSFORMERS, BlockOps
from .fp16 import SAFE_OPS
from .fp16_layers import PLAIN, SETTINGS, Fp32RotaryProcessor
from .fused_attention import FORM, FusedCross, FusedJoint, gated_feed, gelu_feed, half_rope

OFF = "off"
MEANINGS: dict[str, str] = {
    AUTO: "fused kernels if this device can launch them, otherwise off",
    OFF: "diffusers' own operations",
    TRITON: "fused kernels, or an error that says why they cannot run",
    REFERENCE: "the fused operations in plain torch, for comparison; not faster",
}
CHOICES = tuple(MEANINGS)
UPSTREAM = "diffusers.models."
TORCH_NORMS = "torch.nn.modules.normalization."
RMS_NORMS = (*(f"{UPSTREAM}normalization.{name}" for name in ("RMSNorm", "MochiRMSNorm")), f"{TORCH_NORMS}RMSNorm")
LAYER_NORM = f"{TORCH_NORMS}LayerNorm"
TEXT = ("norm_added_q", "norm_added_k")
FEEDS = ("ff", "ff_context")
MODULATED, QK_ROTARY, SUMMED = "norm and modulation", "norms and rotation of queries and keys", "gated sum"
SUM_NORM, GATED = "sum, norm and modulation", "SwiGLU"


@dataclass(frozen=True, slots=True)
class BlockFusion:
    """The rewrite of the blocks of one class; their new forward is in ``blocks.FORWARDS``."""

    points: Mapping[str, int]  # number of fusion points in a block, by kind
    attention: Mapping[str, str]  # stock processor of each attention, by the attention's path
    processor: type  # ours, which replaces it
    layers: tuple[str, ...] = ()  # paths of layer norms without weight that the forward reads
    means: tuple[str, ...] = ()  # paths of RMS norms that it reads
    gated: tuple[str, ...] = ()  # paths of feed-forwards, whose SwiGLU is replaced


@dataclass(slots=True)
class FusionPoints:
    """The fusion points replaced in one transformer, by kind, and the blocks that were left, by reason."""

    form: str  # one of ``kernels.library.FORMS``
    points: Counter[str] = field(default_factory=Counter)
    left: Counter[str] = field(default_factory=Counter)
    left_points: int = 0  # fusion points in the blocks that were left
    epilogue: bool = False  # matmuls can apply GELU
    gelus: int = 0  # GELUs that moved into the matmul before them
    undo: Undo = field(default_factory=Undo)

    def __str__(self) -> str:
        done = self.points.total()
        why = "".join(f"; {count} blocks left: {reason}" for reason, count in self.left.items())
        for (name, device, dtype), fault in FAULTS.items():
            why += f"; the kernel {name} failed on {device} in {NAMES[dtype]}, its reference runs: {fault}"
        form = TRITON if self.form == AUTO else self.form  # auto is taken where Triton launches
        gelus = f", {self.gelus} GELUs in products" if self.gelus else ""
        return f"{done} of {done + self.left_points} fusion points ({form}){gelus}{why}"

    def patch(self, module: Any, forward: Callable[..., Any]) -> None:
        """Replace the forward of ``module`` until :meth:`restore`, and note the form on ``module`` for it to read."""
        self.undo.set(module, FORM, self.form)
        self.undo.patch(module, forward)

    def leave(self, reason: str, points: int) -> None:
        """Count a block that stays as it is, with the fusion points that it would have had."""
        self.left[reason] += 1
        self.left_points += points

    def restore(self) -> None:
        self.undo.restore()


def published_fusion_points(published: Iterable[tuple[str, int, bool]]) -> dict[str, int]:
    """Fusion points by kind in ``published`` blocks: rows of class, count, and True for Mochi's last block."""
    total: Counter[str] = Counter()
    for name, count, keeps_text in published:
        for kind, points in (LAST_MOCHI if keeps_text else FUSIONS[name].points).items():
            total[kind] += count * points
    return dict(total)


def triton_fault(device: torch.device) -> str:
    """The fault of Triton's results on ``device``, empty where a kernel is right; raises where it can run none."""
    if device.type == HOST.type:  # said before Triton is imported, which takes half a second
        raise RuntimeError("Triton launches on NVIDIA and AMD GPUs, not on a CPU")
    from ...kernels._triton import rounding  # noqa: F401 - where Triton is missing or broken, its import says so best

    wrong = [test for test in self_tests(device, TRITON, ("qk_norm_rope",)) if not test.right]
    if wrong and wrong[0].cause:
        raise wrong[0].cause
    return "; ".join(map(str, wrong))


def leave_wrong(device: torch.device, dtype: torch.dtype, store: ProbeStore, of_vae: bool) -> None:
    """Have this process run the reference of each operation whose kernel is wrong on ``device`` in ``dtype``.
    The self-tests run once, and ``store`` saves their result; after a shortage or a full disk the next load retries."""

    def measure() -> dict[str, str]:
        operations = VAE_OPERATIONS if of_vae else BLOCK_OPERATIONS
        wrong = [test for test in self_tests(device, TRITON, operations, (dtype,)) if not test.right]
        if passing := [test.cause for test in wrong if test.cause and is_passing(test.cause)]:
            raise passing[0]
        return {test.name: str(test) for test in wrong}

    try:
        faults = store.remember(f"wrong kernels{' of VAEs' if of_vae else ''} in {NAMES[dtype]}", measure)
    except DEVICE_ERRORS:  # of a shortage or a full disk: `measure` raises no other
        return
    here = torch.empty(0, device=device).device  # with its index
    for operands in {dtype, torch.float32} if dtype == torch.float16 else {dtype}:  # fp16 may have an fp32 residual
        for name, fault in faults.items() if isinstance(faults, Mapping) else ():
            FAULTS.setdefault((name, here, operands), str(fault))


def gelu_fault(dtype: torch.dtype, device: torch.device) -> str:
    """The fault of products that end in GELU, empty if as near to fp64 as two operations; raises if none can run.
    Sums are exact for these operands, and so small that GELU with erf, which some libraries have, is off by more."""
    if not launches(torch.empty(0, dtype=dtype, device=device)):
        raise RuntimeError(reason_against(device, dtype))
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randint(-4, 5, (rows, 64), generator=generator).div(8).to(dtype) for rows in (96, 80))
    bias = torch.linspace(-256, -128, 80).round().div(64).to(dtype)
    with failures_raise():
        result = to_host(linear_gelu(*placed([x, weight, bias], device)))
    truth = linear_gelu_reference(x.double(), weight.double(), bias.double())
    both = (result, linear_gelu_reference(x, weight, bias))
    error, separate = (float((each.double() - truth).norm() / truth.norm()) for each in both)
    if error <= 2 * separate + 16 * torch.finfo(torch.float32).eps:
        return ""
    return f"GELU with tanh is off by {error:.1e}, and by {separate:.1e} after the product"


def fuse(transformer: nn.Module, form: str = AUTO, epilogue: bool = False) -> FusionPoints:
    """Rewrite every known block of ``transformer``, which is on the host without offload, and return what was done.
    ``epilogue``: products may end in GELU, because :func:`gelu_fault` found them right."""
    fused, whole = FusionPoints(form, epilogue=epilogue), True  # whole: all blocks take halved rotary tables
    for block in transformer_blocks(transformer):
        fusion = FUSIONS.get(full_name(block))
        if fusion is None:
            fused.leave(f"{full_name(block)} is not a known class", 0)
            whole = False
        elif vars(block).get(OPS) is SAFE_OPS:  # safe fp16 has rewritten it
            whole = _attach_safe(block, fusion, fused) and whole
            _attach_gelu(block, fused)
        elif reason := other_forward(block, _forward_of(block)) or next(filter(None, _differences(block, fusion)), ""):
            fused.leave(reason, sum(points_of(block, fusion).values()))
            whole = False
        else:
            fused.undo.set(block, OPS, BlockOps(fused.form, epilogue=fused.epilogue))
            fused.gelus += fused.epilogue and hasattr(block, "act_mlp")
            _attach_gelu(block, fused)
            fused.undo.patch(block, _forward_of(block))
            _attach_parts(block, fusion, fused)
    rope: Any = getattr(transformer, "rope", None)
    if whole and fused.points and full_name(rope) in HALVED and "forward" not in vars(rope):
        fused.patch(rope, half_rope)
    return fused


def points_of(block: nn.Module, fusion: BlockFusion) -> Mapping[str, int]:
    """The number of fusion points in ``block``, by kind; Mochi's last block has fewer than the others."""
    return LAST_MOCHI if getattr(block, "context_pre_only", False) else fusion.points


def _forward_of(block: nn.Module) -> Callable[..., Any]:
    """Our forward for the class of ``block``."""
    return FORWARDS[full_name(block).removeprefix(TRANSFORMERS)]


def _attach_parts(block: nn.Module, fusion: BlockFusion, fused: FusionPoints, narrow: bool = False) -> None:
    """Fuse the attentions of ``block``, and its gated feed-forwards unless safe fp16 has done that (``narrow``)."""
    for path in fusion.attention:
        fused.undo.set(block.get_submodule(path), "processor", fusion.processor(fused.form, narrow))
    for path in () if narrow else fusion.gated:
        feed: Any = getattr(block, path, None)
        if feed is not None:
            fused.patch(feed.net[0], gated_feed)
    fused.points.update(points_of(block, fusion))


def _attach_gelu(block: Any, fused: FusionPoints) -> None:
    """Move the GELUs of feed-forwards into the products before them, where ``fused.epilogue`` allows that."""
    for path in FEEDS if fused.epilogue else ():
        gated: Any = submodule_at(block, f"{path}.net.0")
        if full_name(gated) == f"{UPSTREAM}activations.GELU" and gated.approximate == "tanh":
            fused.patch(gated, gelu_feed)
            fused.gelus += 1


def _attach_safe(block: Any, fusion: BlockFusion, fused: FusionPoints) -> bool:
    """Fuse a block that safe fp16 has rewritten, around its fp32 residual; False, and no change, where its attention is
    unknown: a foreign processor may rotate the text in the same stream too."""
    if reason := next(filter(None, _other_attention(block, fusion, full_name(Fp32RotaryProcessor()))), ""):
        fused.leave(reason, sum(points_of(block, fusion).values()))
        return False
    epilogue = fused.epilogue and getattr(getattr(block, "proj_out", None), SETTINGS, PLAIN).fp32_output
    fused.undo.set(block, OPS, replace(SAFE_OPS, form=fused.form, epilogue=epilogue))
    fused.gelus += epilogue
    _attach_parts(block, fusion, fused, narrow=True)
    return True


def other_forward(module: Any, ours: Callable[..., Any]) -> str:
    """The reason why the forward of ``module`` is not upstream's with the arguments of ``ours``; empty when it is.
    Classes that share ``ours`` may take its last two arguments as ``args`` and ``kwargs``, unread."""
    if "forward" in vars(module):
        return "its forward has already been replaced"
    own, known = (tuple(inspect.signature(each).parameters)[1:] for each in (type(module).forward, ours))
    return "" if own in (known, (*known[:-2], "args", "kwargs")) else f"its forward takes ({', '.join(own)})"


def _other_attention(block: Any, fusion: BlockFusion, *known: str) -> Iterator[str]:
    """For each attention, how it differs from the stock one, or ""; processors of the ``known`` names pass, too."""
    for path, stock in fusion.attention.items():
        attention = block.get_submodule(path)
        if full_name(attention.processor) not in (TRANSFORMERS + stock, UPSTREAM + stock, *known):
            yield f"{path} has a {type(attention.processor).__name__}"
        reason = _unfit_attention(attention)
        yield f"{path}: {reason}" if reason else ""


def _differences(block: Any, fusion: BlockFusion) -> Iterator[str]:
    """The differences of ``block`` from what ``fusion`` expects, a phrase each; "" for what is as expected."""
    yield from _other_attention(block, fusion)
    for path in fusion.layers:
        norm = submodule_at(block, path)
        if full_name(norm) != LAYER_NORM or norm.weight is not None:
            weighted = "with" if getattr(norm, "weight", None) is not None else "without"
            yield f"{path} is a {type(norm).__name__} {weighted} weight"
    for path in fusion.means:
        norm = submodule_at(block, path)
        yield "" if norm is None or is_rms_norm(norm) else f"{path} is a {type(norm).__name__}"
    for gate in (getattr(block, path).net[0] for path in fusion.gated if getattr(block, path, None) is not None):
        if full_name(gate) != f"{UPSTREAM}activations.SwiGLU" or type(gate.activation) is not nn.SiLU:
            yield f"its feed-forward has a {type(gate).__name__}"
    activation = getattr(block, "act_mlp", None)
    if activation is not None and not (type(activation) is nn.GELU and activation.approximate == "tanh"):
        yield f"act_mlp is a {activation}"


def is_rms_norm(norm: Any) -> bool:
    """True for an RMS norm of a known class, without bias."""
    return full_name(norm) in RMS_NORMS and getattr(norm, "bias", None) is None


def _unfit_attention(attention: Any) -> str:
    """The reason why the norms of ``attention`` cannot be fused with its rotary embedding; empty where they can."""
    names = ("norm_q", "norm_k", *(TEXT if getattr(attention, "add_q_proj", None) is not None else ()))
    norms: list[Any] = [getattr(attention, name, None) for name in names]
    for name, norm in zip(names, norms, strict=True):
        if not is_rms_norm(norm):
            return f"{name} is a {type(norm).__name__}"
    if len({norm.eps for norm in norms}) != 1:
        return "its norms differ in eps"
    width = norms[0].weight.shape[0] if norms[0].weight is not None else 0
    return f"rotary embedding turns pairs, and {names[0]} is {width} wide" if width % 2 else ""


_LTX, _VIDEO, _VIDEO15 = "transformer_ltx.", "transformer_hunyuan_video.", "transformer_hunyuan_video15."
LAST_MOCHI = {MODULATED: 2, QK_ROTARY: 1, SUM_NORM: 1, SUMMED: 1, GATED: 1}
_JOINT = BlockFusion(
    points={MODULATED: 2, QK_ROTARY: 1, SUM_NORM: 2, SUMMED: 2}, processor=FusedJoint,
    attention={"attn": f"{_VIDEO}HunyuanVideoAttnProcessor2_0"},
    layers=("norm1.norm", "norm1_context.norm", "norm2", "norm2_context"),
)  # fmt: skip
_JOINT15 = replace(_JOINT, attention={"attn": f"{_VIDEO15}HunyuanVideo15AttnProcessor2_0"})
_SINGLE = replace(_JOINT, points={MODULATED: 1, QK_ROTARY: 1, SUMMED: 1}, layers=("norm.norm",))
FUSIONS: dict[str, BlockFusion] = {
    f"{TRANSFORMERS}{_LTX}LTXVideoTransformerBlock": BlockFusion(
        points={MODULATED: 1, QK_ROTARY: 2, SUMMED: 2, SUM_NORM: 1}, processor=FusedCross, means=("norm1", "norm2"),
        attention=dict.fromkeys(("attn1", "attn2"), f"{_LTX}LTXVideoAttnProcessor"),
    ),
    f"{TRANSFORMERS}{_VIDEO}HunyuanVideoTransformerBlock": _JOINT,
    f"{TRANSFORMERS}{_VIDEO}HunyuanVideoSingleTransformerBlock": _SINGLE,
    f"{TRANSFORMERS}{_VIDEO}HunyuanVideoTokenReplaceTransformerBlock": _JOINT,
    f"{TRANSFORMERS}{_VIDEO}HunyuanVideoTokenReplaceSingleTransformerBlock": _SINGLE,
    f"{TRANSFORMERS}{_VIDEO15}HunyuanVideo15TransformerBlock": _JOINT15,
    f"{TRANSFORMERS}transformer_mochi.MochiTransformerBlock": BlockFusion(
        points={MODULATED: 2, QK_ROTARY: 1, SUM_NORM: 2, SUMMED: 2, GATED: 2}, processor=FusedJoint,
        attention={"attn1": "attention_processor.MochiAttnProcessor2_0"},
        means=("norm1.norm", "norm2.norm", "norm3.norm", "norm4.norm"), gated=FEEDS,
    ),
}  # fmt: skip
HALVED = (  # rotary tables in which each value appears twice, and which go from here to the blocks as they are
    f"{TRANSFORMERS}{_LTX}LTXVideoRotaryPosEmbed",
    f"{TRANSFORMERS}{_VIDEO}HunyuanVideoRotaryPosEmbed",
    f"{TRANSFORMERS}{_VIDEO15}HunyuanVideo15RotaryPosEmbed",
)
