"""What the lossy choices beside the step cache do to a video, emulated on a CPU: PSNR and SSIM against off.

    python benchmarks/lossy.py            # appends rows to benchmarks/results/lossy.csv

int8 attention (``attention: sage``): keys without their mean over tokens, queries and keys in int8 with one scale for
each 128 and 64 tokens, softmax in fp32, probabilities and values in fp16, as SageAttention's paper has it. fp16
accumulation: operands in fp16, sums rounded to fp16 after each 16 products, as a tensor core hands them on; off is the
same with fp32 sums. Stored products (``stored_products``, only they with ``--stored``): torch's own 8-bit products,
which it has on CPUs too, at 128 x 128 pixels; off is the same weights unpacked. A GPU's own kernels differ in the order
of sums. Tiny models with random weights, same seed: the figures compare the choices; they do not say how good a video
looks. ``--model FOLDER`` measures a model of yours.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import MethodType

import torch
from steps import CHECKPOINTS, FRAMES, STEPS, clip, psnr, ssim
from table import append, machine
from torch import Tensor, nn
from torch.nn import functional

QUERIES, KEYS, PRODUCTS = 128, 64, 16
HOW = "emulated on CPU"


def in_int8(x: Tensor, tokens: int) -> Tensor:
    """``x`` (B, H, N, D) rounded to int8 with one scale per ``tokens``, as fp32."""
    blocks = x.float().split(tokens, dim=2)
    scales = [block.abs().amax(dim=(2, 3), keepdim=True).clamp(min=1e-12) / 127 for block in blocks]
    return torch.cat([(block / scale).round() * scale for block, scale in zip(blocks, scales, strict=True)], dim=2)


def int8_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attention (B, H, N, D) as SageAttention computes it; a mask is left to exact attention, as in our kernels."""
    if mask is not None:
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    key = key - key.mean(dim=2, keepdim=True)
    scores = in_int8(query, QUERIES) @ in_int8(key, KEYS).transpose(2, 3) * query.shape[-1] ** -0.5
    found = scores.softmax(dim=-1).half().float() @ value.half().float()
    return found.to(query.dtype)


def linear(sums_in_fp16: bool) -> Callable[[nn.Linear, Tensor], Tensor]:
    """A Linear's forward on fp16 operands."""

    def forward(leaf: nn.Linear, x: Tensor) -> Tensor:
        narrow, weight = x.half().float(), leaf.weight.half().float()
        if not sums_in_fp16:
            found = narrow @ weight.t()
        else:
            found = torch.zeros(*x.shape[:-1], weight.shape[0])
            for part, other in zip(narrow.split(PRODUCTS, -1), weight.split(PRODUCTS, -1), strict=True):
                found = (found + part @ other.t()).half().float()
        found = found if leaf.bias is None else found + leaf.bias.half().float()
        return found.half().to(x.dtype)

    return forward


@contextmanager
def products(transformer: nn.Module, sums_in_fp16: bool) -> Iterator[None]:
    """Every Linear of the blocks of ``transformer`` on fp16 operands."""
    blocks = [
        block
        for name in ("transformer_blocks", "single_transformer_blocks")
        for block in getattr(transformer, name, ())
    ]
    leaves = [leaf for block in blocks for leaf in block.modules() if type(leaf) is nn.Linear]
    try:
        for leaf in leaves:
            leaf.forward = MethodType(linear(sums_in_fp16), leaf)
        yield
    finally:
        for leaf in leaves:
            del leaf.forward


def stored_rows(name: str, opened, size: tuple[int, int, int]):
    """A row for each format of stored products; ``opened`` loads the pipeline with weights in a format."""
    from anygpu.compat.transforms.products import NEEDS, multiply_as_stored

    for choice in ("int8", "fp8"):
        pipeline = opened(choice)
        plain = clip(pipeline, *size)[0]
        count, back = multiply_as_stored(pipeline.parts.read("transformer"), tuple(NEEDS))
        quick = clip(pipeline, *size)[0]
        back()
        if not count or torch.equal(quick, plain):
            raise RuntimeError(f"{name}: stored products of {choice} changed nothing")
        yield machine() | {
            "model": name, "choice": f"stored products {choice}", "how": "torch's product on CPU", "steps": STEPS,
            "psnr_db": round(psnr(quick, plain), 2), "ssim": round(ssim(quick, plain), 4),
        }  # fmt: skip


def rows(name: str, pipeline, size: tuple[int, int, int]):
    """A row for each lossy choice of one pipeline."""
    from anygpu.compat.transforms.order import replace_attention

    transformer = pipeline.parts.read("transformer")
    plain = clip(pipeline, *size)[0]
    back = replace_attention(transformer, int8_attention)
    quick = clip(pipeline, *size)[0]
    back()
    with products(transformer, False):
        wide = clip(pipeline, *size)[0]
    with products(transformer, True):
        narrow = clip(pipeline, *size)[0]
    for choice, found, expected in (("int8 attention", quick, plain), ("fp16 accumulation", narrow, wide)):
        if torch.equal(found, expected):
            raise RuntimeError(f"{name}: {choice} changed nothing")
        yield machine() | {
            "model": name, "choice": choice, "how": HOW, "steps": STEPS, "psnr_db": round(psnr(found, expected), 2),
            "ssim": round(ssim(found, expected), 4),
        }  # fmt: skip


def main() -> int:
    import tiny
    from anygpu.pipelines.load.folder import load
    from anygpu.pipelines.requests import LoadRequest

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a diffusers folder")
    parser.add_argument("--families", nargs="+", default=list(CHECKPOINTS), choices=list(CHECKPOINTS))
    parser.add_argument("--stored", action="store_true", help="only the stored products")
    parser.add_argument("--dry", action="store_true", help="print the rows, append none")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    keep = (lambda _, found: [print(row) for row in found]) if asked.dry else append
    if asked.model:
        pipeline = load(LoadRequest(asked.model, precision="fp32", device="cpu"))
        keep("lossy", rows(asked.model.name, pipeline, (0, 0, 0)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        for family in asked.families:
            paths = [tiny.build(checkpoint, Path(folder)) for checkpoint in CHECKPOINTS[family]]
            base, encoder = paths[1:] if len(paths) == 3 else (None, None)
            pipeline = load(LoadRequest(paths[0], base, encoder, precision="fp32", device="cpu"))
            size = (64, 64, FRAMES.get(family, 5))
            if not asked.stored:
                keep("lossy", rows(f"tiny {family}", pipeline, size))

            def opened(choice: str, paths=paths, base=base, encoder=encoder):
                request = LoadRequest(paths[0], base, encoder, precision="fp32", device="cpu", weights=choice)
                return load(request)

            keep("lossy", stored_rows(f"tiny {family}", opened, (128, 128, size[2])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
