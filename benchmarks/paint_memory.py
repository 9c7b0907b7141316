"""Peak of each stage of paint v2-0 at full width, run on the simulated accelerator, beside what is forecast.

    python benchmarks/paint_memory.py                  # views of 128 pixels: a minute
    python benchmarks/paint_memory.py --pixels 512     # as published: an hour on two CPU cores
    python benchmarks/paint_memory.py --limit 8        # the device has that many GB; it fails if that is not enough

The networks have their published sizes, weights of nothing but zeros, and bf16 in the place of fp16, which a CPU lacks:
as many bytes. The whole of `paint_views` runs under offload `model`, with one step; every byte of the device is
counted. Attention has no fused kernel there, so a step takes the chunks of the exact one on top.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
from table import append, machine
from torch import nn

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

from anygpu.compat.device.facts import GIBIBYTE, facts_for
from anygpu.compat.device.precision import PAINT, precision_for
from anygpu.compat.memory.parts import Parts
from anygpu.compat.memory.standalone import offloader_for
from anygpu.compat.transforms.attention import attention_for
from anygpu.paint.estimates import paint_bytes, paint_needs
from anygpu.paint.geometry.cameras import DEFAULT_VIEWS
from anygpu.paint.loading import PaintPipeline
from anygpu.paint.networks import vae
from anygpu.paint.networks.layers import Dtypes
from anygpu.paint.networks.published import networks_for, shape_for
from anygpu.paint.networks.unet import set_attention
from anygpu.paint.sampling.painting import PaintInputs, PaintSettings, paint_views
from paint.counting import STABLE_DIFFUSION_VAE
from simulated import accelerator

MIB = 1024**2
KIND = "paint"


def whole(device: torch.device) -> PaintPipeline:
    """paint v2-0 at its published size, all weights 0, offloaded from ``device`` part by part."""
    facts = facts_for(device)
    precision = precision_for(PAINT, facts, "bf16")
    attention = attention_for("auto", facts, torch.bfloat16, 64, frozenset())
    dtypes = Dtypes(precision.compute, precision.residual)
    with torch.device("meta"):
        made = {**networks_for(KIND, None, dtypes), "vae": vae.autoencoder(STABLE_DIFFUSION_VAE)}

    def read(name: str) -> nn.Module:
        module = made[name].to(torch.bfloat16).to_empty(device="cpu")
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.data = torch.zeros_like(tensor)
        (vae.set_vae_attention if name == "vae" else set_attention)(module, attention)
        return module.eval().requires_grad_(False)

    weights = {
        name: paint_bytes({key: 2 * tensor.numel() for key, tensor in module.state_dict().items()})
        for name, module in made.items()
    }
    parts = Parts({name: lambda _progress, name=name: read(name) for name in made})
    offloader, _ = offloader_for("model", parts, device, {name: size.total for name, size in weights.items()})
    return PaintPipeline(
        family=KIND,
        variant="v2-0",
        parts=parts,
        facts=facts,
        precision=precision,
        offloader=offloader,
        shape=shape_for(KIND),
        configs={},
        source=Path("zeros"),
        weights=weights,
    )


def rows(pixels: int, limit: float) -> list[dict[str, Any]]:
    """One row a stage."""
    maps = torch.rand(len(DEFAULT_VIEWS), 64, 64, 3)
    inputs = PaintInputs(torch.rand(1, 64, 64, 3), maps, maps, DEFAULT_VIEWS)
    found = []
    with accelerator.fresh() as device, accelerator.limit(int(limit * GIBIBYTE)), torch.no_grad():
        pipeline = whole(device)
        started = time.process_time()
        paint_views(pipeline, inputs, PaintSettings(size=pixels, steps=1))
        print(f"{time.process_time() - started:.0f} s of CPU time")
        needs = {need.name: need for need in paint_needs(pipeline, pixels, len(DEFAULT_VIEWS))}
        for cost in pipeline.offloader.memory_stats.stages:
            need = needs[cost.stage]
            figures = {
                "stage": cost.stage,
                "what": f"v2-0, {len(DEFAULT_VIEWS)} views of {pixels}, bf16, offload model",
                "limit_gib": limit,
                "peak_mib": round(cost.peak_bytes / MIB),
                "forecast_mib": round(need.total / MIB),
                "weights_mib": round(need.weights / MIB),
            }
            found.append({**machine(), **figures})
    return found


def main() -> int:
    """Append every row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pixels", type=int, default=128)
    parser.add_argument("--limit", type=float, default=8.0)
    arguments = parser.parse_args()
    if reason := accelerator.reason():
        print(f"skipped: {reason}")
        return 1
    append("paint_memory", rows(arguments.pixels, arguments.limit))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
