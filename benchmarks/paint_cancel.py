"""How long a cancel waits at most in each stage of texturing that is not a network: 500,000 faces, texture of 2048.

    python benchmarks/paint_cancel.py            # appends rows to benchmarks/results/paint_cancel.csv

A cancel is obeyed before the next torch operation, so it waits for the longest one: seconds of one CPU thread, which
does not count what other programs take. Reading a file is waited for by the clock, ten times a second.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from anygpu.compat.device.execution import Checked
from anygpu.compat.memory.parts import Silent
from anygpu.paint import texturing
from anygpu.paint.demo import torus
from anygpu.paint.geometry.cameras import DEFAULT_VIEWS
from anygpu.paint.geometry.cleaning import cleaned
from anygpu.paint.geometry.mesh import Mesh, Surface, load_mesh
from anygpu.paint.geometry.turntable import turntable
from table import append, machine

SUFFIXES = ("glb", "obj", "ply", "stl")


class Waiting(Silent):
    """Keeps the longest time between two times it was asked."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock, self.longest, self.asked = clock, 0.0, 0
        self.last = clock()

    def check(self) -> None:
        """Remember the wait."""
        now = self.clock()
        self.longest, self.last, self.asked = max(self.longest, now - self.last), now, self.asked + 1


def stages(mesh: Mesh, texture_size: int) -> Iterator[tuple[str, Callable[[Waiting], Any]]]:
    """Name and act of each stage."""
    pictures = torch.rand(len(DEFAULT_VIEWS), 512, 512, 3)

    def baked(form: str) -> Callable[[Waiting], Any]:
        settings = texturing.BakeSettings(texture_size, form=form)
        return lambda progress: texturing.texture_of(mesh, DEFAULT_VIEWS, pictures, None, settings, progress)

    def checked(act: Callable[[], Any]) -> Callable[[Waiting], Any]:
        def run(progress: Waiting) -> Any:
            with Checked(progress.check):
                return act()

        return run

    yield "clean", checked(lambda: cleaned(mesh))
    yield "render six views", lambda progress: texturing.maps_of(mesh, None, "paint", "auto", 2048, progress)
    yield "choose views", lambda progress: texturing.greedy_cameras(mesh, 8, progress)
    yield "bake by gathering, and fill", baked("gather")
    yield "bake by scattering, and fill", baked("scatter")
    yield "turntable, 3 frames", checked(lambda: turntable(Surface.of(mesh), torch.rand(2048, 2048, 3), 3, 512))


def reading(mesh: Mesh, folder: Path) -> Iterator[tuple[str, Callable[[Waiting], Any]]]:
    """The same for each kind of file."""
    import trimesh

    for suffix in SUFFIXES:
        path = folder / f"mesh.{suffix}"
        trimesh.Trimesh(mesh.vertices.numpy(), mesh.faces.numpy(), process=False).export(path)
        yield f"read a {suffix}", lambda progress, path=path: load_mesh(path, progress.check)


def measured(stage: str, act: Callable[[Waiting], Any], faces: int, clock: Callable[[], float]) -> dict[str, Any]:
    """One row."""
    progress, started = Waiting(clock), clock()
    with torch.no_grad():
        act(progress)
    figures = {
        "longest_wait_s": round(progress.longest, 2),
        "asked": progress.asked,
        "stage_s": round(clock() - started, 1),
    }
    return {**machine(), "stage": stage, "faces": faces, **figures}


def main() -> int:
    """Append every row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faces", type=int, default=500_000)
    parser.add_argument("--texture-size", type=int, default=2048)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = max(4, int((arguments.faces / 4) ** 0.5))
    mesh = torus(rows, 2 * rows)
    for stage, act in stages(mesh, arguments.texture_size):
        append("paint_cancel", [measured(stage, act, len(mesh.faces), time.thread_time)])
    with tempfile.TemporaryDirectory() as folder:
        for stage, act in reading(mesh, Path(folder)):
            append("paint_cancel", [measured(stage, act, len(mesh.faces), time.perf_counter)])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
