"""Memory-bound bytes of one transformer block and of one decode, eager against fused, counted on meta tensors.

Counted is each operation that torch dispatches, but for attention and matrix products, with or without GELU at their
end, which are bound by arithmetic: every input once, however far it is broadcast, and every output. Views cost nothing.
It is a count, not a time; the CSV says so. Attention's result is taken as (B, N, H, D), as flash kernels write it, in
both columns. A group norm reads its input twice. The unit u is one pass over the block's hidden state, or over the
frames of a decode. All is of full size. ``--detail`` prints the bytes by operation.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from runner import Row, data, machine, write_table
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

BOUND_BY_ARITHMETIC = ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten.convolution", "anygpu_3.linear_gelu")
READ_TWICE = ("group_norm_silu_pad", "native_group_norm")  # its statistics are a pass of their own
DTYPE = torch.bfloat16
SAFE = {"LTX": 2.2, "HunyuanVideo double": 5.5, "HunyuanVideo single": 6.0, "Mochi": 5.3}  # under safe fp16


class Attention(TorchFunctionMode):
    """Gives attention's result without computing it, and what reads data on a meta device."""

    def __torch_function__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.nn.functional.scaled_dot_product_attention:
            query, value = args[0] if args else kwargs["query"], args[2] if args else kwargs["value"]
            batch, heads, tokens, _ = query.shape
            with _disable_current_modes():  # what is made here is not counted
                return query.new_empty(batch, tokens, heads, value.shape[-1]).transpose(1, 2)
        if function in (torch.nonzero, Tensor.nonzero):
            return torch.empty((args[0].numel(), 1), dtype=torch.int64, device=args[0].device)
        if function is torch.nn.functional.rms_norm:  # one kernel on a GPU; taken apart on meta
            with _disable_current_modes():
                found = torch.empty_like(args[0])
            Bytes.current.note("rms_norm", [args[0], kwargs.get("weight"), found])
            return found
        return function(*args, **(kwargs or {}))


class Bytes(TorchDispatchMode):
    """Bytes by operation of what runs inside."""

    current: Bytes

    def __init__(self) -> None:
        super().__init__()
        self.of: Counter[str] = Counter()
        Bytes.current = self

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        name = str(function).rpartition(".")[0]
        if name.startswith("aten.addmm") and found is args[0]:  # the earlier product is written and read once more
            self.note(name, [found, found])
        if not function.is_view and not name.startswith(BOUND_BY_ARITHMETIC) and name not in FREE:
            inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            results = [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]
            if name.startswith(WRITE_ONLY):
                inputs = []
            elif name == "aten.copy_" or "out" in (kwargs or {}):  # the target is an argument too, but is not read
                inputs = [tensor for tensor in inputs if not any(tensor is result for result in results)]
            again = inputs[:1] if name.rpartition(".")[2] in READ_TWICE else []
            self.note(name, [*inputs, *again, *results])
        return found

    def note(self, name: str, tensors: list[Any]) -> None:
        """Count ``tensors`` once each."""
        self.of[name] += sum(_stored(tensor) for tensor in tensors if isinstance(tensor, Tensor))

    @property
    def total(self) -> int:
        return self.of.total()


FREE = ("aten._unsafe_view", "aten._reshape_alias", "aten.empty", "aten.empty_like", "aten.new_empty")
WRITE_ONLY = ("aten.zeros", "aten.new_zeros", "aten.ones", "aten.new_ones", "aten.fill_", "aten.zero_")  # and _like


def _stored(tensor: Tensor) -> int:
    """Bytes that are read or written for it: an expanded dimension is stored once."""
    sizes = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride != 0]
    return int(torch.Size(sizes).numel()) * tensor.element_size()


@dataclass(frozen=True)
class Block:
    """A block, what it is called with, and how far below eager it must be.

    Args:
        kind: the module of diffusers' transformers. given: to its class. hidden: shape of the hidden state, whose size
            in bytes is u. states, masks, tables: shapes of what it is called with. halved: whether the fused path makes
            tables half as wide. absent: arguments that are none.
        padding: tokens of two prompts, which a fused block's processor must know.
        rope: class, width and arguments of the model's rotary embedding; none where ``tables`` has what it makes.
    """

    name: str
    kind: str
    cls: str
    given: Sequence[float]
    hidden: Sequence[int]
    demanded: float
    states: Mapping[str, Sequence[int]]
    masks: Mapping[str, Sequence[int]] = field(default_factory=dict)
    tables: Mapping[str, Sequence[int]] = field(default_factory=dict)
    halved: bool = False
    absent: Sequence[str] = ()
    padding: Sequence[int] = ()
    rope: tuple[str, int, Sequence[Any]] | None = None

    def make(self, cls: str, *given: Any) -> Any:
        """A module of diffusers'."""
        module = importlib.import_module(f"diffusers.models.transformers.transformer_{self.kind}")
        return getattr(module, cls)(*given)

    def arguments(self, fused: bool) -> dict[str, Any]:
        """What the block is called with, but for what ``rope`` makes."""
        made: dict[str, Any] = {name: _empty(*shape) for name, shape in self.states.items()}
        made |= {name: torch.empty(shape, dtype=torch.bool, device="meta") for name, shape in self.masks.items()}
        for name, shape in self.tables.items():
            made[name] = tuple(_table(*shape, fused=fused and self.halved) for _ in range(2))
        return made | dict.fromkeys(self.absent)


def blocks() -> list[Block]:
    """One block of each kind at the size of a full clip: LTX-Video 121 frames, HunyuanVideo 61, Mochi 84."""
    return [Block(name, **given) for name, given in data("blocks").items()]


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


@dataclass(frozen=True)
class Decode:
    """One call of a published decoder: the class of its VAE, and the latents (B, C, T, H, W)."""

    name: str
    vae: str
    latents: tuple[int, ...]
    demanded: float


DECODES = [Decode(*given) for given in data("decodes")]


def decoded(case: Decode, fused: bool) -> tuple[Bytes, Tensor]:
    """The bytes of one decode, without upstream's mask of all tokens, and its frames."""
    import diffusers
    from anygpu.compat.transforms.fused_vae import fuse_vae
    from anygpu.compat.transforms.order import replace_attention
    from anygpu.pipelines.vae.tiled import decoder_call

    with torch.device("meta"):
        vae = nn.Module.to(getattr(diffusers, case.vae)().eval(), DTYPE)  # its own method warns
    replace_attention(vae, lambda query, key, value, mask=None, causal=False: _attended(query, key, value))
    if fused and fuse_vae(vae).left:
        raise RuntimeError(f"{case.name}: not rewritten")
    with torch.no_grad(), Attention(), Bytes() as count:
        frames = decoder_call(vae, _empty(*case.latents), None)
    return count, frames


def _attended(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(query, key, value)


def _empty(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=DTYPE, device="meta")


def _table(*shape: int, fused: bool = False) -> Tensor:
    """A rotary table; the fused path has made it half as wide, once for all blocks."""
    width = shape[-1] // 2 if fused else shape[-1]
    return torch.empty((*shape[:-1], width), dtype=torch.float32, device="meta")


def counted(case: Block, fused: bool, safe: bool = False) -> Bytes:
    """The bytes of one call of the block, in bf16, or under safe fp16 with an fp32 residual."""
    from anygpu.compat.transforms.fp16 import apply_fp16_safe
    from anygpu.compat.transforms.fused import fuse

    model = nn.Module()
    with torch.device("meta"):
        block = case.make(case.cls, *case.given).to(torch.float16 if safe else DTYPE).eval().requires_grad_(False)
        model.transformer_blocks = nn.ModuleList([block])
        if case.rope is not None:
            model.rope = case.make(*case.rope[:2])
    given = case.arguments(fused)
    if safe:
        block.to_empty(device="cpu")  # it looks at the weights of some leaves, whatever they are
        apply_fp16_safe(model, case.name, fp32_output=True)
        block.to("meta")
        given = {name: _widened(value) for name, value in given.items()}
    if fused:
        found = fuse(model, epilogue=True)
        if found.left and not safe:
            raise RuntimeError(f"{case.name}: not rewritten: {dict(found.left)}")
        if case.padding:
            block.attn1.processor.padding.joint = tuple(case.padding)
    if case.rope is not None:  # once per step, for all blocks; rewritten or not
        given["image_rotary_emb"] = model.rope(_empty(*case.hidden), *case.rope[2], None)
    with torch.no_grad(), Attention(), Bytes():
        left = block(**given)  # what the block before leaves
    if isinstance(left, tuple):
        given |= dict(zip(("hidden_states", "encoder_hidden_states"), left, strict=True))
    with torch.no_grad(), Attention(), Bytes() as count:
        block(**given)
    return count


def counts() -> Iterator[tuple[Any, tuple[int, ...], Bytes, Bytes]]:
    """Case, shape of a unit, and the bytes in eager and fused."""
    for case in blocks():
        yield case, case.hidden, counted(case, False), counted(case, True)
        other = replace(case, name=f"{case.name}, fp16-safe", demanded=SAFE[case.name])
        yield other, case.hidden, counted(case, False, True), counted(case, True, True)
    for decode in DECODES:
        eager, frames = decoded(decode, False)
        yield decode, tuple(frames.shape), eager, decoded(decode, True)[0]


def rows(detail: bool) -> Iterator[Row]:
    """A row per block and decode."""
    for case, hidden, eager, fused in counts():
        unit = torch.Size(hidden).numel() * DTYPE.itemsize
        for count in (eager, fused) if detail else ():
            print("   ", ", ".join(f"{name} {value / unit:.1f}" for name, value in count.of.most_common(14)))
        yield {
            "block": case.name, "hidden": "x".join(map(str, hidden)),
            "dtype": "fp16" if "safe" in case.name else "bf16", "eager_bytes": eager.total,
            "fused_bytes": fused.total, "eager_u": f"{eager.total / unit:.2f}",
            "fused_u": f"{fused.total / unit:.2f}", "ratio": f"{eager.total / fused.total:.3f}",
            "demanded": case.demanded, "gpu": "counted on meta tensors, not timed", "torch": torch.__version__,
            "date": machine()["date"],
        }  # fmt: skip


def fails(row: Row) -> bool:
    """Tell whether a block or decode is less below eager than it must be."""
    return float(row["ratio"]) < float(row["demanded"])


def page(done: list[Row]) -> None:
    """Write both tables."""
    for mark, head in (("kernels_bytes", "Block"), ("kernels_bytes, decoders", "Decode")):
        cells = (
            [row["block"], f"{float(row['eager_u']):.1f} u", f"{float(row['fused_u']):.1f} u",
             f"{float(row['ratio']):.2f}×", f"{row['demanded']}×"]
            for row in done if ("decode" in row["block"]) == (head == "Decode")
        )  # fmt: skip
        write_table("performance.md", mark, (head, "Eager", "Fused", "Reduction", "Required"), cells)
