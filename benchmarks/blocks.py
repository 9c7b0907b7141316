"""Blocks of full width: upstream's, with fused kernels, compiled, and both, side by side in one run.

    python benchmarks/blocks.py                    # appends rows to benchmarks/results/blocks.csv
    python benchmarks/blocks.py --tokens 6144      # more tokens, for a GPU

Random weights; forms in shuffled order, medians. On a GPU bf16, timed by events; on a CPU fp32 and the operations'
reference, since nothing is launched there. ``warm_up`` is the time of the first call, which compiles.
"""

from __future__ import annotations

import argparse
import copy
import random
import statistics
import sys
import time

import torch
from table import append, machine
from torch import nn
from torch.nn import functional

TEXT, ROUNDS = 128, 20


class Blocks(nn.Module):
    """As much of a transformer as rewrites and compile look at."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.transformer_blocks = nn.ModuleList([block])


def ltx(tokens: int):
    from diffusers.models.transformers.transformer_ltx import LTXVideoTransformerBlock

    angles = torch.randn(1, tokens, 1024).repeat_interleave(2, -1)
    inputs = {"temb": torch.randn(1, 1, 6 * 2048), "image_rotary_emb": (angles.cos(), angles.sin())}
    return LTXVideoTransformerBlock(2048, 32, 64, 2048), 2048, inputs


def hunyuan_video(tokens: int):
    from diffusers.models.transformers.transformer_hunyuan_video import HunyuanVideoTransformerBlock

    angles = torch.randn(tokens, 64).repeat_interleave(2, -1)
    inputs = {"temb": torch.randn(1, 3072), "freqs_cis": (angles.cos(), angles.sin())}
    return HunyuanVideoTransformerBlock(24, 128, mlp_ratio=4.0), 3072, inputs


def mochi(tokens: int):
    from diffusers.models.transformers.transformer_mochi import MochiTransformerBlock

    angles = torch.randn(tokens, 24, 64)
    inputs = {
        "temb": torch.randn(1, 3072),
        "image_rotary_emb": (angles.cos(), angles.sin()),
        "encoder_attention_mask": torch.ones(1, TEXT, dtype=torch.bool),
    }
    return MochiTransformerBlock(3072, 24, 128, 1536), 1536, inputs


BLOCKS = {"ltx": ltx, "hunyuan_video": hunyuan_video, "mochi": mochi}


def forms(block: nn.Module, device: torch.device):
    """The block in each form, on ``device``."""
    from anygpu.compat.transforms.compile import Compilation, CompileSettings
    from anygpu.compat.transforms.fused import fuse
    from anygpu.compat.transforms.order import replace_attention

    for name in ("neither", "kernels", "compile", "both"):
        model = Blocks(copy.deepcopy(block))
        if name in ("kernels", "both"):
            fuse(model, "auto" if device.type == "cuda" else "reference")
        replace_attention(model, functional.scaled_dot_product_attention)
        compilation = Compilation(CompileSettings()) if name in ("compile", "both") else None
        if compilation is not None:
            compilation.attach(model)
        yield name, model.transformer_blocks[0], compilation


def clock(device: torch.device, call) -> float:
    """Milliseconds of one call."""
    if device.type == "cuda":
        first, last = (torch.Event(device, enable_timing=True) for _ in range(2))
        first.record()
        call()
        last.record()
        torch.accelerator.synchronize(device)
        return first.elapsed_time(last)
    started = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - started)


def measured(family: str, tokens: int, device: torch.device, dtype: torch.dtype, rounds: int):
    """A row for each form of one block."""
    torch.manual_seed(0)
    block, text, more = BLOCKS[family](tokens)
    block = block.to(device, dtype).eval().requires_grad_(False)

    def there(value):
        if isinstance(value, tuple):
            return tuple(t.to(device) for t in value)
        return value.to(device, dtype) if value.is_floating_point() else value.to(device)

    width = 2048 if family == "ltx" else 3072
    inputs = {
        "hidden_states": torch.randn(1, tokens, width),
        "encoder_hidden_states": torch.randn(1, TEXT, text),
        **more,
    }
    inputs = {name: there(value) for name, value in inputs.items()}
    made, warm, spent = {}, {}, {}
    with torch.no_grad():
        for name, model, compilation in forms(block, device):
            made[name] = lambda model=model: model(**inputs)
            warm[name] = clock(device, made[name])
            spent[name] = []
            if compilation is not None and compilation.failure:
                print(f"{family} {name}: {compilation}")
                del made[name]
        for _ in range(rounds):
            for name in random.sample(list(made), len(made)):
                spent[name].append(clock(device, made[name]))
    middle = {name: statistics.median(times) for name, times in spent.items() if times}
    for name in made:
        yield machine() | {
            "gpu": "" if device.type == "cpu" else torch.cuda.get_device_name(device),
            "block": family,
            "tokens": tokens,
            "dtype": str(dtype).removeprefix("torch."),
            "form": name,
            "ms": round(middle[name], 3),
            "over_neither": round(middle["neither"] / middle[name], 3),
            "warm_up_s": round(warm[name] / 1e3, 2),
            "rounds": rounds,
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--block", choices=tuple(BLOCKS), action="append")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    for family in arguments.block or BLOCKS:
        tokens = arguments.tokens or (256 if device.type == "cpu" else 6144)
        append("blocks", measured(family, tokens, device, dtype, arguments.rounds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
