"""Texturing: time and memory of its stages, and how long a cancel waits.

The stages without a network run at full size on the simulated accelerator, which counts every byte of its device and
computes with the CPU's own kernels: the seconds are a CPU's, of one thread. `paint_stages` counts the network stages at
full-size shapes on the meta device. `paint_memory` runs them at their published sizes with weights of zeros, in bf16 in
the place of fp16, which a CPU lacks: views of 128 pixels take a minute, of 512 an hour.

A cancel is obeyed before the next torch operation, so it waits for the longest one: seconds of one CPU thread. Reading
a file is waited for by the clock, ten times a second.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from anygpu.compat.device.execution import Checked
from anygpu.compat.device.facts import GIBIBYTE, facts_for
from anygpu.compat.device.precision import PAINT, precision_for
from anygpu.compat.memory.parts import Parts, Silent
from anygpu.compat.memory.standalone import offloader_for
from anygpu.compat.transforms.attention import attention_for
from anygpu.paint import texturing
from anygpu.paint.baking.bake import BakeSettings, bake
from anygpu.paint.baking.fill import filled
from anygpu.paint.demo import torus
from anygpu.paint.forecast import paint_needs, planned_run
from anygpu.paint.geometry.cameras import DEFAULT_VIEWS
from anygpu.paint.geometry.cleaning import cleaned
from anygpu.paint.geometry.mesh import Mesh, Surface, load_mesh
from anygpu.paint.geometry.turntable import turntable
from anygpu.paint.loading import PaintPipeline, paint_bytes
from anygpu.paint.networks import vae
from anygpu.paint.networks.layers import Dtypes
from anygpu.paint.networks.published import networks_for, shape_for
from anygpu.paint.networks.unet import STABLE_DIFFUSION_2, set_attention
from anygpu.paint.sampling.painting import PaintInputs, PaintSettings, paint_views
from paint.counting import HALF, STABLE_DIFFUSION_VAE, stages
from runner import Case, Row
from simulated import accelerator
from torch import nn

MIB = 1024**2
NETWORKS = (("paint", 512, 6), ("paint", 1024, 6), ("paint_pbr", 512, 6), ("paint_pbr", 768, 8))


def mesh_of(faces: int) -> Mesh:
    """A torus of about ``faces`` triangles."""
    rows = max(4, math.isqrt(faces // 4))
    return torus(rows, 2 * rows)


def stage_rows(faces: int, view_size: int, texture_size: int) -> Iterator[Row]:
    """A row per stage without a network, measured, and per stage with one, counted in fp16 with two guidance rows."""

    def row(stage: str, what: str, peak: int, weights: int = 0, seconds: float | str = "") -> Row:
        figures = {"peak_mib": round(peak / MIB), "weights_mib": round(weights / MIB), "seconds": seconds}
        return {"stage": stage, "what": what, **figures}

    mesh, rows = mesh_of(faces), []
    what = f"{len(mesh.faces)} faces, views of {view_size}, texture of {texture_size}"
    with accelerator.fresh() as device, torch.no_grad():

        def timed(stage: str, act: Callable[[], Any]) -> Any:
            accelerator.reset_peak()
            before, started = accelerator.memory().allocated_bytes, time.process_time()
            result = act()
            seconds = round(time.process_time() - started, 2)
            rows.append(row(stage, what, accelerator.memory().peak_bytes - before, 0, seconds))
            return result

        surface = timed("check the mesh", lambda: Surface.of(mesh, device))
        render = partial(texturing.maps_of, mesh, None, "paint", "auto", view_size, device=device)
        maps = timed("render six views", lambda: render()[0])
        pictures = maps.position[:, ::4, ::4]
        settings = BakeSettings(texture_size=texture_size, view_size=view_size)
        baked = timed("bake six views", lambda: bake(surface, DEFAULT_VIEWS, pictures, settings))
        texture = timed("fill", lambda: filled(baked, surface))
        timed("turntable, 12 frames of 512", lambda: turntable(surface, texture, 12, 512))
    yield from rows
    for kind, pixels, views in NETWORKS:
        for stage, (peak, weights) in stages(kind, pixels, views, HALF).items():
            yield row(stage, f"{kind}, {views} views of {pixels}, fp16", peak, weights)


class Waiting(Silent):
    """A progress that keeps the longest time between two times that it was asked for a cancel."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock, self.longest, self.asked, self.last = clock, 0.0, 0, clock()

    def check(self) -> None:
        """Remember the wait."""
        now = self.clock()
        self.longest, self.last, self.asked = max(self.longest, now - self.last), now, self.asked + 1


def checked(act: Callable[[], Any]) -> Callable[[Waiting], Any]:
    """``act`` with a question for a cancel before each torch operation."""

    def run(progress: Waiting) -> Any:
        with Checked(progress.check):
            return act()

    return run


def cancel_rows(faces: int, texture_size: int) -> Iterator[Row]:
    """A row per stage that is not a network, and per kind of mesh file."""
    import trimesh

    mesh, pictures = mesh_of(faces), torch.rand(len(DEFAULT_VIEWS), 512, 512, 3)

    def baked(form: str) -> Callable[[Waiting], Any]:
        settings = texturing.BakeSettings(texture_size, form=form)
        return lambda progress: texturing.texture_of(mesh, DEFAULT_VIEWS, pictures, None, settings, progress)

    def row(stage: str, act: Callable[[Waiting], Any], clock: Callable[[], float] = time.thread_time) -> Row:
        progress, started = Waiting(clock), clock()
        with torch.no_grad():
            act(progress)
        waited = {"longest_wait_s": round(progress.longest, 2), "asked": progress.asked}
        return {"stage": stage, "faces": len(mesh.faces), **waited, "stage_s": round(clock() - started, 1)}

    yield row("clean", checked(lambda: cleaned(mesh)))
    yield row("render six views", lambda progress: texturing.maps_of(mesh, None, "paint", "auto", 2048, progress))
    yield row("choose views", lambda progress: texturing.greedy_cameras(mesh, 8, progress))
    yield row("bake by gathering, and fill", baked("gather"))
    yield row("bake by scattering, and fill", baked("scatter"))
    yield row("turntable, 3 frames", checked(lambda: turntable(Surface.of(mesh), torch.rand(2048, 2048, 3), 3, 512)))
    with tempfile.TemporaryDirectory() as folder:
        for suffix in ("glb", "obj", "ply", "stl"):
            path = Path(folder) / f"mesh.{suffix}"
            trimesh.Trimesh(mesh.vertices.numpy(), mesh.faces.numpy(), process=False).export(path)
            yield row(f"read a {suffix}", lambda p, path=path: load_mesh(path, p.check), time.perf_counter)


def published(device: torch.device) -> PaintPipeline:
    """paint v2-0 at its published size, all weights 0, offloaded from ``device`` part by part."""
    facts = facts_for(device)
    precision = precision_for(PAINT, facts, "bf16")
    attention = attention_for("auto", facts, torch.bfloat16, 64, frozenset())
    dtypes = Dtypes(precision.compute, precision.residual)
    with torch.device("meta"):
        made = {**networks_for("paint", STABLE_DIFFUSION_2, dtypes), "vae": vae.autoencoder(STABLE_DIFFUSION_VAE)}

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
        family="paint", variant="v2-0", parts=parts, facts=facts, precision=precision, offloader=offloader,
        shape=shape_for("paint", STABLE_DIFFUSION_2), configs={}, source=Path("zeros"), weights=weights,
    )  # fmt: skip


def memory_rows(pixels: int, limit: float) -> Iterator[Row]:
    """A row per stage of v2-0: its peak beside the forecast, on a device of ``limit`` GiB."""
    maps = torch.rand(len(DEFAULT_VIEWS), 64, 64, 3)
    inputs = PaintInputs(torch.rand(1, 64, 64, 3), maps, maps, DEFAULT_VIEWS)
    with accelerator.fresh() as device, accelerator.limit(int(limit * GIBIBYTE)), torch.no_grad():
        pipeline = published(device)
        paint_views(pipeline, inputs, PaintSettings(size=pixels, steps=1))
        needs = {need.name: need for need in paint_needs(pipeline, planned_run(pipeline, pixels, len(DEFAULT_VIEWS)))}
        for cost in pipeline.offloader.memory_stats.stages:
            need = needs[cost.stage]
            yield {
                "stage": cost.stage,
                "what": f"v2-0, {len(DEFAULT_VIEWS)} views of {pixels}, bf16, offload model",
                "limit_gib": limit,
                "peak_mib": round(cost.peak_bytes / MIB),
                "forecast_mib": round(need.total / MIB),
                "weights_mib": round(need.weights / MIB),
            }


CASES = [
    Case("paint_stages", stage_rows, {"faces": 40_000, "view_size": 2048, "texture_size": 2048}, "paint_stages",
         lacks=accelerator.reason),
    Case("paint_cancel", cancel_rows, {"faces": 500_000, "texture_size": 2048}, "paint_cancel"),
    Case("paint_memory", memory_rows, {"pixels": 128, "limit": 8.0}, "paint_memory", lacks=accelerator.reason,
         threads=0),
]  # fmt: skip
