"""What safe fp16 should gain, from floating-point operations and bytes counted on the real blocks at real sizes.

    python benchmarks/fp16_model.py            # rewrites benchmarks/results/fp16_model.csv

Nothing is measured here: every row is derived. Each family's blocks are built on meta tensors at their published sizes
and run once per way; every product and attention is counted in operations, every other operator in bytes read and
written. Time is operations over a rate plus bytes over a bandwidth, so the model is pessimistic where a GPU overlaps
them, and the same for all ways.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

RESULTS = Path(__file__).parent / "results" / "fp16_model.csv"
TERA, GIGA = 1e12, 1e9


@dataclass(frozen=True)
class Rates:
    """TFLOP/s of products and attention by dtype, and GB/s, that a well-fed kernel reaches."""

    name: str
    product: dict[str, float]
    attention: dict[str, dict[int, float]]  # by head width
    bandwidth: float
    source: str


TURING = (
    "peaks of NVIDIA's Turing whitepaper: 13.45 TFLOP/s fp32, 53.8 fp16 with fp32 sums, 616 GB/s; 80 % of them for "
    "fp16 products, 85 % for memory; fp16 attention 22/25 TFLOP/s, below the 27-30 of SageAttention #197; "
)
FAST = {"fp16": {64: 22.0, 128: 25.0}}
DEVICES = [
    Rates(
        "sm75, RTX 2080 Ti",
        {"fp32": 11.4, "fp16": 43.0},
        FAST | {"fp32": {64: 6.0, 128: 6.0}},
        616 * 0.85,
        TURING + "fp32 products at 85 % and fp32 attention at 45 % of peak, solved from the fp32 steps of the kernel "
        "notes (LTX 6.9 s, HunyuanVideo 174 s, Mochi 147 s)",
    ),
    Rates(
        "sm75, RTX 2080 Ti, fp32 attention as fast as products",
        {"fp32": 9.4, "fp16": 43.0},
        FAST | {"fp32": {64: 9.4, 128: 9.4}},
        616 * 0.85,
        TURING + "to see what the fp32 rates decide: products and attention alike at 70 % of peak",
    ),
    Rates(
        "sm90, H200",
        {"bf16": 750.0, "fp16": 750.0},
        {d: {64: 450.0, 128: 600.0} for d in ("bf16", "fp16")},
        4800 * 0.88,
        "kernel notes' rates for torch's own kernels: 750 and 450/600 TFLOP/s, 88 % of 4.8 TB/s",
    ),
]


@dataclass(frozen=True)
class Case:
    """One run: blocks as (count, class, constructor arguments, name of the rotation argument), tokens, widths."""

    family: str
    size: str
    module: str
    blocks: tuple[tuple[int, str, dict[str, Any], str], ...]
    batch: int
    tokens: int
    text: int
    width: int
    head: int
    text_width: int = 0


HUNYUAN = {"num_attention_heads": 24, "attention_head_dim": 128, "mlp_ratio": 4.0}
LTX = {"dim": 2048, "num_attention_heads": 32, "attention_head_dim": 64, "cross_attention_dim": 2048}
BOTH = (
    (20, "HunyuanVideoTransformerBlock", HUNYUAN, "freqs_cis"),
    (40, "HunyuanVideoSingleTransformerBlock", HUNYUAN, "image_rotary_emb"),
)
MOCHI = {"dim": 3072, "num_attention_heads": 24, "attention_head_dim": 128, "pooled_projection_dim": 1536}
CASES = [
    Case(
        "ltx",
        "768x512, 121 frames, cfg",
        "ltx",
        ((28, "LTXVideoTransformerBlock", LTX, "image_rotary_emb"),),
        2,
        6144,
        128,
        2048,
        64,
    ),
    Case("hunyuan_video", "960x544, 61 frames", "hunyuan_video", BOTH, 1, 32640, 256, 3072, 128),
    Case(
        "hunyuan_video_15",
        "848x480, 121 frames",
        "hunyuan_video15",
        ((54, "HunyuanVideo15TransformerBlock", HUNYUAN | {"num_attention_heads": 16}, "freqs_cis"),),
        1,
        49290,
        300,
        2048,
        128,
    ),
    Case("framepack", "640x640, window 9", "hunyuan_video", BOTH, 1, 18400, 985, 3072, 128),
    Case(
        "mochi",
        "848x480, 84 frames, cfg",
        "mochi",
        ((48, "MochiTransformerBlock", MOCHI, "image_rotary_emb"),),
        2,
        22260,
        256,
        3072,
        128,
        text_width=1536,
    ),
]


@dataclass
class Counted:
    """Operations of products and attention, bytes of everything else, of one step."""

    product: float = 0.0
    attention: float = 0.0
    moved_bytes: float = 0.0
    by_operator: dict[str, float] = field(default_factory=dict)

    def move(self, name: str, *tensors: Any) -> None:
        """Count each tensor once; what is broadcast is read once."""
        amount = float(sum(held_bytes(tensor) for tensor in {id(t): t for t in tensors}.values()))
        self.moved_bytes += amount
        self.by_operator[name] = self.by_operator.get(name, 0.0) + amount

    def seconds(self, rates: Rates, dtype: str, head: int) -> float:
        """Time of what was counted."""
        products = self.product / rates.product[dtype] + self.attention / rates.attention[dtype][head]
        return products / TERA + self.moved_bytes / GIGA / rates.bandwidth


def held_bytes(tensor: Any) -> int:
    """Bytes of a tensor, without what stride 0 repeats."""
    if not isinstance(tensor, torch.Tensor):
        return 0
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return math.prod(sizes) * tensor.element_size()


class Operators(TorchDispatchMode):
    """Counts what reaches a device: products in operations, all else in bytes; views and fills of nothing are free."""

    def __init__(self, counted: Counted) -> None:
        super().__init__()
        self.counted = counted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm", "bmm", "baddbmm"):
            left, right = [a for a in args if isinstance(a, torch.Tensor)][-2:]
            self.counted.product += 2.0 * left.numel() * right.shape[-1]
        elif not func.is_view and name not in FREE:
            flat = [*args, *(kwargs or {}).values(), *(found if isinstance(found, tuple) else (found,))]
            self.counted.move(name, *(t for a in flat for t in (a if isinstance(a, (list, tuple)) else (a,))))
            if name.endswith("_"):  # read and written
                self.counted.move(name, found)
        return found


FREE = {"empty", "empty_like", "empty_strided", "new_empty", "detach", "alias", "lift_fresh", "_unsafe_view", "view"}


class Functions(TorchFunctionMode):
    """Counts as one pass what is one kernel on a GPU but several operators on meta tensors."""

    def __init__(self, counted: Counted, operators: Operators) -> None:
        super().__init__()
        self.counted, self.operators = counted, operators

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            return self.attended(*args)
        if func in (functional.rms_norm, torch.rms_norm):
            found = args[0].detach().as_strided(args[0].shape, args[0].stride())
            self.counted.move("rms_norm", args[0], found)
            return found
        return func(*args, **kwargs)

    def attended(self, query: Any, key: Any, value: Any, *_: Any) -> Any:
        """Two products over all pairs of tokens; the result lies as fused kernels lay it, (B, N, H, D)."""
        self.counted.attention += 4.0 * query.numel() * key.shape[-2]
        batch, heads, tokens, width = query.shape
        return query.new_empty(batch, tokens, heads, width).transpose(1, 2)


def model_of(case: Case, cls: str, arguments: dict[str, Any]) -> nn.Module:
    """As much of a transformer as the rewrites look at, on meta tensors."""
    import importlib

    module = importlib.import_module(f"diffusers.models.transformers.transformer_{case.module}")
    made = nn.Module()
    with torch.device("meta"):
        made.transformer_blocks = nn.ModuleList([getattr(module, cls)(**arguments)])
        if case.family == "ltx":
            made.rope = module.LTXVideoRotaryPosEmbed(case.width)
    return made.eval().requires_grad_(False)


def inputs_of(case: Case, cls: str, rotation: str, dtype: torch.dtype, rope: Callable[[], Any]) -> dict[str, Any]:
    """What a block is given in a step, on meta tensors."""

    def empty(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=of, device="meta")

    given = {
        "hidden_states": empty(case.batch, case.tokens, case.width),
        "encoder_hidden_states": empty(case.batch, case.text, case.text_width or case.width),
        "temb": empty(case.batch, 1, 6 * case.width) if case.family == "ltx" else empty(case.batch, case.width),
    }
    if case.family == "ltx":
        return given | {rotation: rope()}
    if case.family == "mochi":
        table = (case.tokens, case.width // case.head, case.head // 2)
        given["encoder_attention_mask"] = None
    else:
        table = (case.tokens, case.head)
    return given | {rotation: tuple(empty(*table, of=torch.float32) for _ in range(2))}


def counted(case: Case, way: str) -> Counted:
    """One step of ``case`` in ``way``: fp32, bf16, ``safe`` (products that come out in fp32) or ``scaled``."""
    from anygpu.compat.transforms.fp16 import apply_fp16_safe
    from anygpu.compat.transforms.fp16_layers import RotaryTables
    from anygpu.compat.transforms.order import replace_attention

    total, dtype = Counted(), torch.bfloat16 if way == "bf16" else torch.float32
    for count, cls, arguments, rotation in case.blocks:
        model = model_of(case, cls, arguments).to(torch.float16 if way in ("safe", "scaled") else dtype)
        if way in ("safe", "scaled"):
            measured = torch.linalg.vector_norm  # weights without values have no norm
            torch.linalg.vector_norm = lambda *_, **__: torch.ones(1)
            try:
                report = apply_fp16_safe(model, case.family, {"fp32_output": way == "safe"})
            finally:
                torch.linalg.vector_norm = measured
            assert report.rewritten["blocks"] == 1, str(report)
        replace_attention(model, functional.scaled_dot_product_attention)
        rows = case.batch if way in ("fp32", "bf16") else 1  # as the rewritten rope gives them
        tables = tuple(torch.empty(rows, case.tokens, case.width, device="meta") for _ in range(2))

        def rope(tables: Any = tables, safe: bool = way in ("safe", "scaled")) -> Any:
            turns = RotaryTables(tables)
            if safe:
                turns.pairs()  # made once for all blocks
            return turns if safe else tables

        block, part = model.transformer_blocks[0], Counted()
        given = inputs_of(case, cls, rotation, dtype, rope)
        operators = Operators(part)
        with torch.no_grad(), Functions(part, operators), operators:
            block(**given)
        total.product += count * part.product
        total.attention += count * part.attention
        total.moved_bytes += count * part.moved_bytes
        for name, amount in part.by_operator.items():
            total.by_operator[name] = total.by_operator.get(name, 0.0) + count * amount
    return total


def rows() -> list[dict[str, Any]]:
    """One row per family, device and way."""
    import diffusers

    found: list[dict[str, Any]] = []
    for case in CASES:
        steps = {way: counted(case, way) for way in ("fp32", "bf16", "safe", "scaled")}
        for rates in DEVICES:
            base = "fp32" if "fp32" in rates.product else "bf16"
            before = steps[base].seconds(rates, base, case.head)
            for way, label in (("safe", "fp32-output products"), ("scaled", "scaled products")):
                step = steps[way]
                after = step.seconds(rates, "fp16", case.head)
                found.append(
                    {
                        "kind": "derived",
                        "date": datetime.date.today().isoformat(),
                        "torch": torch.__version__,
                        "diffusers": diffusers.__version__,
                        "family": case.family,
                        "size": case.size,
                        "device": rates.name,
                        "way": f"fp16-safe, {label}",
                        "against": base,
                        "product_tflop": round(step.product / TERA, 1),
                        "attention_tflop": round(step.attention / TERA, 1),
                        "moved_gb": round(step.moved_bytes / GIGA, 1),
                        "moved_gb_against": round(steps[base].moved_bytes / GIGA, 1),
                        "seconds": round(after, 4),
                        "seconds_against": round(before, 4),
                        "speedup": round(before / after, 3),
                        "rates": rates.source,
                    }
                )
    return found


def main() -> None:
    """Count, print, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operators", action="store_true", help="also print the bytes of each operator")
    arguments = parser.parse_args()
    table = rows()
    shown = ("family", "device", "way", "moved_gb", "moved_gb_against", "seconds", "speedup")
    for row in table:
        print({name: row[name] for name in shown})
    if arguments.operators:
        for case in CASES:
            for way in ("fp32", "safe"):
                moved = sorted(counted(case, way).by_operator.items(), key=lambda item: -item[1])[:12]
                print(case.family, way, {name: round(amount / GIGA, 1) for name, amount in moved})
    with RESULTS.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, table[0])
        writer.writeheader()
        writer.writerows(table)


if __name__ == "__main__":
    main()
