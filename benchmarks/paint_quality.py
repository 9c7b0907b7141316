"""Texturing, family by family: what the demo models paint on five meshes, and what the published ones take on a card.

`paint_quality`: each demo that is listed paints the same five meshes, in two colours that meet at half their height,
after a picture of their front; the texture is compared with the one that the picture was taken of. `paint_cards`:
forecasts at published sizes, from counted work and the rates of a card; none of these was run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from anygpu.compat.device.facts import GIBIBYTE, DeviceFacts
from anygpu.compat.device.precision import FP32, Precision
from anygpu.compat.device.rates import published_rates
from anygpu.compat.memory.offloader import HostWeights, OffloadOptions
from anygpu.compat.memory.parts import Silent
from anygpu.paint import choices
from anygpu.paint.adapter_loading import AdapterRequest, load_adapter
from anygpu.paint.baking.bake import BakeSettings, texels_of
from anygpu.paint.demo import PAIRS, halves
from anygpu.paint.forecast import paint_needs, planned_run
from anygpu.paint.geometry.cameras import views_for
from anygpu.paint.geometry.mesh import Mesh, Surface, welded
from anygpu.paint.geometry.turntable import looked_up
from anygpu.paint.geometry.views import rasterised
from anygpu.paint.loading import PaintPipeline, PaintRequest, load_paint, network_bytes
from anygpu.paint.networks import mv_adapter, vae
from anygpu.paint.networks.encoders import CLASSES
from anygpu.paint.networks.layers import Dtypes
from anygpu.paint.networks.published import networks_for, shape_for
from anygpu.paint.networks.unet import STABLE_DIFFUSION_2, UNetShape
from anygpu.paint.sampling.painting import PaintSettings
from anygpu.paint.texturing import OneStep, textured
from anygpu.pipelines.forecast.times import time_forecast
from paint.baking.test_projection import CASES as MESHES
from paint.baking.test_projection import shape
from paint.counting import STABLE_DIFFUSION_VAE
from runner import Case, Row, write_table

from paint import mv_stored

SIZE, PICTURE, TEXTURE = choices.DEMO_SIZE, 256, 512
CARDS = ("RTX 2060", "RTX 3060", "RTX 4070", "RTX 4090", "RX 7900 XTX", "Arc B580")
FAMILIES = {  # name -> family, variant, base of an adapter, pixels of a view
    "Hunyuan3D v2-0": ("paint", "v2-0", "", 512),
    "Hunyuan3D turbo": ("paint", "turbo", "", 512),
    "Hunyuan3D PBR v2-1": ("paint_pbr", "v2-1", "", 512),
    "MV-Adapter ig2mv, SDXL": ("mv_adapter", "ig2mv", "sdxl", 768),
    "MV-Adapter tg2mv, SDXL": ("mv_adapter", "tg2mv", "sdxl", 768),
    "MV-Adapter ig2mv, SD2.1": ("mv_adapter", "ig2mv", "sd21", 512),
}
TEXTS = {  # width, layers, width of the feed-forward, pooled width
    "sdxl": {"text_encoder": (768, 12, 3072, 768), "text_encoder_2": (1280, 32, 5120, 1280)},
    "sd21": {"text_encoder": (1024, 23, 4096, 1024)},
}
HEAD = ["Demo", "Mesh", "Colour error", "with the other's picture", "Seams", "Painted"]
CARD_HEAD = ["Model", "Views", "Steps", "Peak, one part at a time", *CARDS]


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


def published(family: str, variant: str, base: str, facts: DeviceFacts) -> PaintPipeline:
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
            pipeline = published(family, variant, base, facts)
            pipeline = replace(
                pipeline, attention="native_efficient" if rates.generation == "turing" else "native_flash"
            )
            run = planned_run(pipeline, size)
            peak = max(need.total for need in paint_needs(pipeline, run, "model")) / GIBIBYTE
            row |= {"steps": run.steps, "peak_gib": round(peak, 1)}
            row[card] = round(sum(stage.seconds for stage in time_forecast(pipeline, run, "none").stages))
        yield row


def quality_page(rows: list[Row]) -> None:
    """Write the table of the demos."""
    cells = (
        [row[key] for key in ("demo", "mesh", "colour_error", "other_picture", "seams")] + [f"{row['painted']:.0%}"]
        for row in rows
    )
    write_table("paint.md", "paint quality", HEAD, cells)


def cards_page(rows: list[Row]) -> None:
    """Write the table of the cards."""
    cells = (
        [row["model"], row["views"], row["steps"], f"{row['peak_gib']} GiB", *(f"{row[card]} s" for card in CARDS)]
        for row in rows
    )
    write_table("paint.md", "paint cards", CARD_HEAD, cells)


CASES = [
    Case("paint_quality", quality_rows, {"steps": 0}, "paint_quality", replaces=True, page=quality_page),
    Case("paint_cards", card_rows, table="paint_cards", replaces=True, about=dict, page=cards_page),
]
