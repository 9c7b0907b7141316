"""Time and peak memory of each stage of texturing.

    python benchmarks/paint_stages.py            # appends rows to benchmarks/results/paint_stages.csv

The stages without a network run at full size on the simulated accelerator, which counts every byte of its device and
computes with the CPU's own kernels: the seconds are a CPU's, of one thread. The network stages are counted at full-size
shapes on the meta device, one part at a time as offload ``model`` has it; they compute nothing and take no seconds.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from table import append, machine

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

from anygpu.paint import texturing
from anygpu.paint.baking.bake import BakeSettings, bake
from anygpu.paint.baking.fill import filled
from anygpu.paint.demo import torus
from anygpu.paint.geometry.cameras import DEFAULT_VIEWS
from anygpu.paint.geometry.mesh import Surface
from anygpu.paint.geometry.turntable import turntable
from paint.counting import HALF, stages
from simulated import accelerator

MIB = 1024**2
NETWORKS = (("paint", 512, 6), ("paint", 1024, 6), ("paint_pbr", 512, 6), ("paint_pbr", 768, 8))


def row(stage: str, what: str, peak: int, weights: int = 0, seconds: float | str = "") -> dict[str, Any]:
    """One line of the table."""
    figures = {"peak_mib": round(peak / MIB), "weights_mib": round(weights / MIB), "seconds": seconds}
    return {**machine(), "stage": stage, "what": what, **figures}


def measured(faces: int, view_size: int, texture_size: int) -> list[dict[str, Any]]:
    """The stages without a network, each once."""
    rows, columns = max(4, int((faces / 4) ** 0.5)), 2 * max(4, int((faces / 4) ** 0.5))
    mesh, made = torus(rows, columns), []
    what = f"{len(mesh.faces)} faces, views of {view_size}, texture of {texture_size}"
    with accelerator.fresh() as device, torch.no_grad():

        def timed(stage: str, act: Callable[[], Any]) -> Any:
            accelerator.reset_peak()
            before, started = accelerator.memory().allocated_bytes, time.process_time()
            found = act()
            seconds = round(time.process_time() - started, 2)
            made.append(row(stage, what, accelerator.memory().peak_bytes - before, 0, seconds))
            return found

        surface = timed("check the mesh", lambda: Surface.of(mesh, device))
        maps = timed(
            "render six views", lambda: texturing.maps_of(mesh, None, "paint", "auto", view_size, device=device)[0]
        )
        pictures = maps.position[:, ::4, ::4]
        settings = BakeSettings(texture_size=texture_size, view_size=view_size)
        baked = timed("bake six views", lambda: bake(surface, DEFAULT_VIEWS, pictures, settings))
        texture = timed("fill", lambda: filled(baked, surface))
        timed("turntable, 12 frames of 512", lambda: turntable(surface, texture, 12, 512))
    return made


def counted() -> list[dict[str, Any]]:
    """The network stages, fp16, guidance in two rows."""
    return [
        row(stage, f"{kind}, {views} views of {pixels}, fp16", peak, weights)
        for kind, pixels, views in NETWORKS
        for stage, (peak, weights) in stages(kind, pixels, views, HALF).items()
    ]


def main() -> int:
    """Append every row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faces", type=int, default=40_000)
    parser.add_argument("--view-size", type=int, default=2048)
    parser.add_argument("--texture-size", type=int, default=2048)
    arguments = parser.parse_args()
    if reason := accelerator.reason():
        print(f"skipped: {reason}")
        return 1
    torch.set_num_threads(1)
    append("paint_stages", [*measured(arguments.faces, arguments.view_size, arguments.texture_size), *counted()])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
