"""Texturing: time and memory of its stages, how long a cancel waits, and family by family what comes of it.

The stages without a network run at full size on the simulated accelerator, which counts every byte of its device and
computes with the CPU's own kernels: the seconds are a CPU's, of one thread. `paint_stages` counts the network stages at
full-size shapes on the meta device. `paint_memory` runs them at their published sizes with weights of zeros, in bf16 in
the place of fp16, which a CPU lacks: views of 128 pixels take a minute, of 512 an hour.

A cancel is obeyed before the next torch operation, so it waits for the longest one: seconds of one CPU thread. Reading
a file is waited for by the clock, ten times a second.

`paint_quality`: each demo that is listed paints the same five meshes, in two colours that meet at half their height,
after a picture of their front; the texture is compared with the one that the picture was taken of. `paint_cards`:
forecasts at published sizes, from counted work and the rates of a card; none of these was run.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from anygpu.compat.device.execution import Checked
from anygpu.compat.device.facts import GIBIBYTE, DeviceFacts, facts_for
from anygpu.compat.device.precision import FP32, PAINT, Precision, precision_for
from anygpu.compat.device.rates import published_rates
from anygpu.compat.memory.offloader import HostWeights, OffloadOptions
from anygpu.compat.memory.parts import Parts, Silent
from anygpu.compat.memory.standalone import offloader_for
from anygpu.compat.transforms.attention import attention_for
from anygpu.paint import choices, texturing
from anygpu.paint.adapter_loading import AdapterRequest, load_adapter
from anygpu.paint.baking.bake import BakeSettings, bake, texels_of
from anygpu.paint.baking.fill import filled
from anygpu.paint.demo import PAIRS, halves, torus
from anygpu.paint.forecast import paint_needs, planned_run
from anygpu.paint.geometry.cameras import DEFAULT_VIEWS, views_for
from anygpu.paint.geometry.cleaning import cleaned
from anygpu.paint.geometry.mesh import Mesh, Surface, load_mesh, welded
from anygpu.paint.geometry.turntable import looked_up, turntable
from anygpu.paint.geometry.views import rasterised
from anygpu.paint.loading import PaintPipeline, PaintRequest, load_paint, network_bytes, paint_bytes
from anygpu.paint.networks import mv_adapter, vae
from anygpu.paint.networks.encoders import CLASSES
from anygpu.paint.networks.layers import Dtypes
from anygpu.paint.networks.published import networks_for, shape_for
from anygpu.paint.networks.unet import STABLE_DIFFUSION_2, UNetShape, set_attention
from anygpu.paint.sampling.painting import PaintInputs, PaintSettings, paint_views
from anygpu.paint.texturing import OneStep, textured
from anygpu.pipelines.forecast.times import time_forecast
from paint.baking.test_projection import CASES as MESHES
from paint.baking.test_projection import shape
from paint.counting import HALF, STABLE_DIFFUSION_VAE, stages
from runner import Row, data
from simulated import accelerator
from torch import nn

from paint import mv_stored

MIB = 1024**2
NETWORKS = (("paint", 512, 6), ("paint", 1024, 6), ("paint_pbr", 512, 6), ("paint_pbr", 768, 8))
SIZE, PICTURE, TEXTURE = choices.DEMO_SIZE, 256, 512
CARDS = ("RTX 2060", "RTX 3060", "RTX 4070", "RTX 4090", "RX 7900 XTX", "Arc B580")
FAMILIES = data("paint_models")  # name -> family, variant, base of an adapter, pixels of a view
TEXTS = data("paint_texts")  # width, layers, width of the feed-forward, pooled width


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
                "stage": cost.stage, "what": f"v2-0, {len(DEFAULT_VIEWS)} views of {pixels}, bf16, offload model",
                "limit_gib": limit, "peak_mib": round(cost.peak_bytes / MIB), "forecast_mib": round(need.total / MIB),
                "weights_mib": round(need.weights / MIB),
            }  # fmt: skip


def demos() -> Iterator[tuple[str, PaintPipeline]]:
    """Every demo that the nodes list."""
    for name, folder in choices.demo_paint_models().items():
        yield name, load_paint(PaintRequest(folder, precision="fp32", device="cpu"))
    bases, adapters = choices.demo_adapter()
    for name, base in bases.items():
        for adapter in adapters.values():
            yield name, load_adapter(AdapterRequest(base, adapter, precision="fp32", device="cpu"))


def seen(mesh: Mesh, pipeline: PaintPipeline, pair: Any) -> torch.Tensor:
    """(S, S, 4): the front of a mesh in two colours, cut out."""
    table = views_for(pipeline.family, None)
    surface, camera = Surface.of(mesh, frame=table.frame), next(iter(table))
    view = rasterised(surface, camera, PICTURE, table.ortho_scale, table.frame.pixel_centres)
    colours = halves(pair)(view.shown.interpolated(surface.vertices, surface.faces))
    return view.image(torch.cat((colours, torch.ones_like(colours[:, :1])), dim=1))


def quality_rows(steps: int) -> Iterator[Row]:
    """A row per demo and mesh."""
    for name, pipeline in demos():
        for kind in MESHES:
            mesh, errors, seams, share = shape(kind), [], 0.0, 0.0
            table = views_for(pipeline.family, None)
            surface, uvs = Surface.of(mesh, frame=table.frame).with_uvs()
            texels = texels_of(surface, TEXTURE)
            truth = [halves(pair)(texels.place) for pair in PAIRS]
            for index, pair in enumerate(PAIRS):
                settings = OneStep(
                    PaintSettings(SIZE, steps, seed=1), BakeSettings(TEXTURE, 1024), prompt="high quality"
                )
                made, _, _ = textured(mesh, [seen(mesh, pipeline, pair)], pipeline, None, settings, Silent())
                found = made.colour.view(-1, 3)[texels.shown.pixel]
                errors.append([float((found - other).abs().mean()) for other in (truth[index], truth[1 - index])])
                seams, share = seams + seam(made.colour, surface, uvs) / len(PAIRS), share + made.share / len(PAIRS)
            own, other = torch.tensor(errors).mean(0).tolist()
            figures = {"colour_error": round(own, 3), "other_picture": round(other, 3), "seams": round(seams, 3)}
            yield {"demo": name, "mesh": kind, **figures, "painted": round(share, 3)}


def seam(texture: torch.Tensor, surface: Surface, uvs: torch.Tensor) -> float:
    """Mean difference of colour between the places in the texture that one vertex has."""
    groups = welded(surface.vertices.double())
    colours = looked_up(texture, uvs)
    count = groups.bincount().clamp(min=1)[:, None]
    mean = torch.zeros(len(count), 3).index_add_(0, groups, colours) / count
    split = (count[groups, 0] > 1).nonzero()[:, 0]
    return float((colours - mean[groups])[split].abs().mean()) * 2 if len(split) else 0.0


def on_card(family: str, variant: str, base: str, facts: DeviceFacts) -> PaintPipeline:
    """A published model on a card, without weights: its configurations and the bytes of its parts in fp16."""
    half = torch.float16
    precision = Precision(half, half, FP32 if base == "sdxl" else half, "as published")
    dtypes, config = Dtypes(half, half), mv_stored.full_size(base) if base else STABLE_DIFFUSION_2
    configs: dict[str, Any] = {"unet": config, "vae": STABLE_DIFFUSION_VAE}
    with torch.device("meta"):
        made = networks_for(family, config, dtypes) if not base else {
            "unet": mv_adapter.unet_for(config, variant),
            "adapter": mv_adapter.encoder_for(base, config["block_out_channels"]),
        }  # fmt: skip
        decoder = vae.autoencoder(STABLE_DIFFUSION_VAE).to(precision.vae)
    weights = {part: network_bytes(module, dtypes) for part, module in made.items()}
    weights["vae"] = network_bytes(decoder, Dtypes(precision.vae, precision.vae))
    if base:
        configs["adapter"] = {"base": base, "prediction_type": "epsilon"}
    for part, (width, layers, inner, pooled) in TEXTS.get(base, {}).items():
        sizes = {
            "hidden_size": width,
            "num_hidden_layers": layers,
            "intermediate_size": inner,
            "projection_dim": pooled,
        }
        configs[part] = {**sizes, "num_attention_heads": width // 64, "vocab_size": 49408}
        import transformers

        kind = getattr(transformers, CLASSES[part])
        with torch.device("meta"):
            weights[part] = network_bytes(kind(kind.config_class(**configs[part])), dtypes)
    options = OffloadOptions(host_weights=HostWeights(shared=True))  # no copies ahead
    offloader: Any = SimpleNamespace(mode="model", device=facts.device, options=options, keeps=lambda part: False)
    shape_of = UNetShape.of(config) if base else shape_for(family, config)
    return PaintPipeline(
        family, variant, parts=None, facts=facts, precision=precision, offloader=offloader, shape=shape_of,
        configs=configs, source=Path("published"), weights=weights, attention="native_flash",
    )  # fmt: skip


def card_rows() -> Iterator[Row]:
    """A row per published model: the forecast peak, and seconds on each card, compute alone."""
    for name, (family, variant, base, size) in FAMILIES.items():
        row: Row = {"model": name, "views": f"6 of {size}"}
        for card in CARDS:
            rates = published_rates(card)
            assert rates is not None, card
            facts = DeviceFacts(torch.device("cuda"), "cuda", "", "cuda-sm80+", rates.name, 0, "", link=rates.link)
            pipeline = on_card(family, variant, base, facts)
            pipeline = replace(
                pipeline, attention="native_efficient" if rates.generation == "turing" else "native_flash"
            )
            run = planned_run(pipeline, size)
            peak = max(need.total for need in paint_needs(pipeline, run, "model")) / GIBIBYTE
            row |= {"steps": run.steps, "peak_gib": round(peak, 1)}
            row[card] = round(sum(stage.seconds for stage in time_forecast(pipeline, run, "none").stages))
        yield row
