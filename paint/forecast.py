"""Forecasts of painting and delighting: the memory that each stage needs on the device, and its work, which takes time.

Weights are counted from names and shapes. Activations follow formulas fitted to counts of every living tensor of the
full-size networks (`tests/paint/counting.py`), within 15 %; what a vendor's library takes for itself comes on top. The
work of a stage is counted on tensors without data: of one picture for the VAE, of one step for the UNet."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..compat.device.work import META, Work, counted_once, counting_on_meta, empty, text_of
from ..compat.memory.parts import role_of
from ..compat.memory.standalone import ahead_bytes, keeps, resident_bytes
from ..compat.memory.statistics import StageNeed
from ..compat.packages import attribute
from ..compat.transforms.attention import Attention, budget_for
from ..pipelines.forecast.times import PlannedStage, key_of
from .choices import DELIGHT_STEPS, DEMO_SIZE, TAUGHT_SIZES, TG2MV, sampler_of
from .loading import PaintPipeline
from .networks import mv_adapter, vae
from .networks.encoders import CLASSES, CROPPED, TOKENS
from .networks.layers import FED_TOKENS, Dtypes
from .networks.multiview import LATENT_CHANNELS, StreamInputs
from .networks.mv_adapter import VIEWS
from .networks.pbr import MATERIALS
from .networks.published import DELIGHT_CHANNELS, networks_for, stored_dtype
from .networks.stable_diffusion import SIZES
from .networks.unet import set_attention

MARGIN = 1.15  # factor by which a forecast may be too low
ENCODED, DECODED = 644, 768  # features per pixel that the VAE has alive at its peak
TAUGHT_SIZE, TAUGHT_VIEWS = 512, 6
STEPPING = {False: "painting", True: "delighting"}
STATES, STATE_WIDTH = 257, 1536  # of DINOv2-giant
PARTS = {  # others: the UNet or the VAE
    "text": "text_encoder", "text_2": "text_encoder_2", "image": "image_encoder", "maps": "adapter",
    "reference": "reference",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Copies:
    """Number of first-level feature maps alive at once: in the residual stream's dtype, and as operands."""

    residual: float
    operands: float


ATTENDING = Copies(12.3, 1.3)  # while the views look at one another
FEEDING = {"paint": Copies(7.0, 3.1), "paint_pbr": Copies(9.1, 3.1), "delight": Copies(7.0, 3.1)}
FED = Copies(0, 19.6)  # of the tokens that the feed-forward takes at once
LOOKING = Copies(7.0, 24.9)  # the reference stream, with what it keeps
ADAPTER_COPIES = {  # by the base of MV-Adapter: of a step, of the states of its maps, and of the reference
    "sdxl": {
        "step": Copies(12.6, 3.5), "states": Copies(1.25, 0), "maps": Copies(3.25, -1.0),
        "kept": Copies(20.0, 0), "looking": Copies(32.4, 3.5),
    },
    "sd21": {
        "step": Copies(10.3, 16.0), "states": Copies(1.8, 0), "maps": Copies(6.0, -2.0),
        "kept": Copies(8.8, 0), "looking": Copies(18.9, 16.0),
    },
}  # fmt: skip
ATTENDED, KEPT = Copies(0, 16.7), Copies(0, 8.4)  # of the reference's own map while it is attended to, and all the time


@dataclass(frozen=True, slots=True)
class PaintRun:
    """Settings of a painting or a delighting; zeros stand for the values that the model was trained with."""

    steps: int  # of the sampler
    rows: int  # of guidance in a step, beside one another
    size: int = TAUGHT_SIZE  # of a view or the picture, pixels
    views: int = TAUGHT_VIEWS  # cameras
    references: int = 1  # pictures of the object; 0 where words alone describe it

    def places(self, pipeline: PaintPipeline, mode: str) -> dict[str, torch.device]:
        """The run's stages under an offload mode, each name with the device on which it runs."""
        return dict.fromkeys((need.name for need in paint_needs(pipeline, self, mode)), pipeline.offloader.device)

    def planned(self, pipeline: PaintPipeline, name: str, room: int | None) -> PlannedStage:
        """The stage ``name``, to forecast its time; only the weights that stay depend on the ``room``."""
        part, precision = part_of(pipeline, name), pipeline.precision
        dtypes = {"unet": precision.compute or precision.transformer, "vae": precision.vae}
        dtypes |= dict.fromkeys(CLASSES, precision.text)
        needs = {need.name: need for need in paint_needs(pipeline, self, "group", room)}  # no other mode has some stay
        return PlannedStage(
            name=name,
            facts=pipeline.facts,
            probes=pipeline.probes,
            dtype=dtypes.get(part, precision.transformer),
            work=partial(stage_work, pipeline, name, self),
            weights=pipeline.weights[part].total,
            key=work_key(pipeline),
            calls=self.steps if name in STEPPING.values() else 1,
            stays=needs[name].stays,
        )


def planned_run(pipeline: Any, size: int = 0, views: int = 0, steps: int = 0, guided: int | None = None) -> PaintRun:
    """The run of these settings: 0 is the value the model was trained with. ``guided`` counts the rows that guidance
    adds to a step; None: one if the publisher's scale is not 1, none for delight. Delight always has one view."""
    delight = pipeline.family == "delight"
    own = None if delight else sampler_of(pipeline.variant, pipeline.is_demo)
    guided = int(own is not None and own.guidance != 1) if guided is None else guided
    usual = DELIGHT_STEPS if own is None else own.steps
    taught = TAUGHT_SIZES[pipeline.configs["adapter"]["base"]] if pipeline.family == "mv_adapter" else TAUGHT_SIZE
    references = 0 if pipeline.variant == TG2MV else 1
    views = 1 if delight else views or TAUGHT_VIEWS
    size = size or (DEMO_SIZE if pipeline.is_demo else taught)
    return PaintRun(steps or usual, 1 + guided, size, views=views, references=references)


def part_of(pipeline: Any, stage: str) -> str:
    """The part that runs in a stage: MV-Adapter has no second UNet for the reference."""
    part = PARTS.get(stage, "unet" if stage in STEPPING.values() else "vae")
    return "unet" if part == "reference" and pipeline.family == "mv_adapter" else part


def materials_of(pipeline: Any) -> int:  # pictures that the UNet makes of each view
    return MATERIALS if pipeline.family == "paint_pbr" else 1


def paint_needs(pipeline: Any, run: PaintRun, mode: str = "", room: int | None = None) -> tuple[StageNeed, ...]:
    """Memory that each stage of a paint or delight pipeline needs, in the order they run; stages whose part the
    pipeline lacks are left out. ``mode`` is of our own offloader, by default the pipeline's; ``room`` the bytes of the
    device that the run may take, None where unknown."""
    mode = mode or str(pipeline.offloader.mode)
    dtype, looking = pipeline.precision.vae, looking_bytes(pipeline, run)
    active = [  # one picture, or 77 tokens, take less than a layer
        ("text", "text_encoder", 0),
        ("text_2", "text_encoder_2", 0),
        *([("encoding", "vae", vae_bytes(ENCODED, run.size, dtype))] if run.references else []),
        ("image", "image_encoder", 0),
        *([("reference", part_of(pipeline, "reference"), looking)] if run.references else []),
        *([("maps", "adapter", map_encoder_bytes(pipeline, run.size))] if pipeline.family == "mv_adapter" else []),
        (STEPPING[pipeline.family == "delight"], "unet", step_bytes(pipeline, run)),
        ("decoding", "vae", vae_bytes(DECODED, run.size, dtype)),
    ]
    needs, stays = [], dict[str, int]()
    for name, part, activations in active:
        if part not in pipeline.weights:
            continue
        kept = sum(size for other, size in stays.items() if other != part)
        size = pipeline.weights[part]
        own, stay = size.resident(mode, part), 0
        if keeps(pipeline.offloader, part, mode):
            stay = resident_bytes(size.total, size.passing, room, int(MARGIN * activations))
        ahead = ahead_bytes(pipeline.offloader, size, part, mode, stays=stay)
        needs.append(StageNeed(name, kept, own, activations, ahead=ahead, stays=stay))
        if mode == "none" and not role_of(part).endswith("_encoder"):  # these leave after their one use
            stays[part] = pipeline.weights[part].total
    return tuple(needs)


def step_bytes(pipeline: Any, run: PaintRun) -> int:
    """Activations at the peak of one forward of the UNet."""
    pictures, area = run.rows * run.views * materials_of(pipeline), (run.size // vae.REDUCTION) ** 2
    references, maps = 0 if pipeline.family == "delight" else run.references, partial(map_bytes, pipeline, run.size)
    if pipeline.family == "mv_adapter":
        copies = _adapter_copies(pipeline)
        return maps(pictures, copies["step"]) + maps(VIEWS, copies["states"]) + maps(references, copies["kept"])
    fed = min(pictures * area, max(FED_TOKENS, area)) / area
    attending = maps(pictures, ATTENDING) + maps(references, ATTENDED)
    attending += score_bytes(pipeline, run.size, pictures // run.views, run.views)
    return max(attending, maps(pictures, FEEDING[pipeline.family]) + maps(fed, FED) + maps(references, KEPT))


def looking_bytes(pipeline: Any, run: PaintRun) -> int:
    """Activations at the peak of the reference stream, what it keeps among them."""
    if pipeline.family == "mv_adapter":
        return map_bytes(pipeline, run.size, run.references, _adapter_copies(pipeline)["looking"])
    return map_bytes(pipeline, run.size, run.references, LOOKING) + score_bytes(pipeline, run.size, 1, 1)


def score_bytes(pipeline: Any, size: int, rows: int, views: int) -> int:
    """Bytes that attention in chunks takes for its scores, where each of ``rows`` attends over all its ``views``."""
    tokens = views * (size // vae.REDUCTION) ** 2
    heads, dtype = pipeline.shape.heads[0], pipeline.precision.compute or pipeline.precision.transformer
    queries = torch.empty(rows, heads, tokens, pipeline.shape.widths[0] // heads, dtype=dtype, device=META)
    return Attention(pipeline.attention, budget_for(pipeline.facts)).extra_bytes(queries)


def map_encoder_bytes(pipeline: Any, size: int) -> int:
    """Activations at the peak of MV-Adapter's encoder of maps of ``size`` pixels."""
    return map_bytes(pipeline, size, VIEWS, _adapter_copies(pipeline)["maps"])


def _adapter_copies(pipeline: Any) -> dict[str, Copies]:
    return ADAPTER_COPIES[pipeline.configs["adapter"]["base"]]


def map_bytes(pipeline: Any, size: int, pictures: float, copies: Copies) -> int:
    """Bytes of ``copies`` of the first level's feature maps of ``pictures`` of ``size`` pixels."""
    features = pictures * (size // vae.REDUCTION) ** 2 * pipeline.shape.widths[0]
    operands = pipeline.precision.compute or pipeline.precision.transformer
    residual = pipeline.precision.residual or operands
    return int(features * (copies.residual * residual.itemsize + copies.operands * operands.itemsize))


def vae_bytes(features: int, side: int, dtype: torch.dtype) -> int:
    """Activations at the peak of one square picture: ``features`` is :data:`ENCODED` or :data:`DECODED`."""
    return side**2 * features * dtype.itemsize


def work_key(pipeline: PaintPipeline) -> str:
    """The key of all that changes the work of a stage or its rate, as that of a video pipeline."""
    return key_of(
        precision=str(pipeline.precision),
        demo=pipeline.stands_in_for,
        torch=pipeline.facts.torch_version,
        attention=pipeline.attention,
        compiled={part: blocks.settings for part, blocks in pipeline.compiled.items()},
    )


def stage_work(pipeline: PaintPipeline, stage: str, run: PaintRun) -> Work:
    """The work of a stage in a whole run: one picture, step or prompt, counted once and kept, times how many it has."""
    if stage in PARTS and PARTS[stage] in CLASSES:
        key = (stage, text_of(pipeline.configs[PARTS[stage]]), str(pipeline.precision.text))
        return counted_once(key, partial(_encoder_work, pipeline, PARTS[stage]))
    if stage == "encoding":
        pictures = run.references + (0 if pipeline.family in ("delight", "mv_adapter") else 2 * run.views)
        return _vae_work(pipeline, run.size, "encode").times(pictures)  # Hunyuan3D encodes two maps of each view
    if stage == "decoding":
        return _vae_work(pipeline, run.size, "decode").times(run.views * materials_of(pipeline))
    if pipeline.family == "mv_adapter":
        key = (pipeline.variant, text_of(pipeline.configs["unet"]), str(pipeline.precision), run.size, run.references)
        work = counted_once((*key, run.rows), partial(_adapter_work, pipeline, run))[stage]
        return work.times(run.steps) if stage in STEPPING.values() else work
    key = (pipeline.family, text_of(pipeline.configs["unet"]), str(pipeline.precision), run.size, run.references)
    reference, step = counted_once((*key, run.views, run.rows), partial(_unet_work, pipeline, run))
    return reference if stage == "reference" else step.times(run.steps)


def _vae_work(pipeline: PaintPipeline, size: int, direction: str) -> Work:  # encode or decode, of one picture
    config, dtype = pipeline.configs["vae"], pipeline.precision.vae
    side = size // vae.REDUCTION

    def count() -> Work:  # without data, on meta
        with META:
            module = nn.Module.to(vae.autoencoder(config), dtype)  # diffusers' own warns of layers it would keep
        vae.set_vae_attention(module, functional.scaled_dot_product_attention)
        with counting_on_meta() as work:
            if direction == "encode":
                posterior = module.encode(empty(1, 3, size, size, dtype=dtype)).latent_dist
                posterior.mean, posterior.std  # noqa: B018 - made when they are asked for
            else:
                module.decode(empty(1, LATENT_CHANNELS, side, side, dtype=dtype))
        return work

    return counted_once(("paint", direction, text_of(config), size, str(dtype)), count)


def _unet_work(pipeline: PaintPipeline, run: PaintRun) -> tuple[Work, Work]:
    """The work of looking at the reference, none for delight, and of one step with all its rows and views."""
    family, side = pipeline.family, run.size // vae.REDUCTION
    dtypes = Dtypes(pipeline.precision.compute, pipeline.precision.residual)
    with META:
        made = networks_for(family, pipeline.configs["unet"], dtypes)
    for network in made.values():
        for name, weight in network.named_parameters():
            weight.data = weight.data.to(stored_dtype(name, dtypes))
        set_attention(network, functional.scaled_dot_product_attention)
    looked, step = Work(), empty(1)
    if family == "delight":
        text = empty(run.rows, TOKENS, pipeline.shape.text_width)
        given: tuple[Any, ...] = (empty(run.rows, DELIGHT_CHANNELS, side, side), step, text)
    else:
        with counting_on_meta() as looked:
            kept = made["reference"](empty(1, run.references, LATENT_CHANNELS, side, side))
        materials = materials_of(pipeline)
        shared = StreamInputs(run.views, kept, (0.0, 1.0)[-run.rows :], materials=materials)
        sample, maps = (run.views, LATENT_CHANNELS, side, side), empty(1, run.views, 2 * LATENT_CHANNELS, side, side)
        if family == "paint_pbr":
            given = (empty(run.rows, materials, *sample), step, maps, empty(run.rows, STATES, STATE_WIDTH), shared)
        else:
            cameras = torch.zeros(run.views, dtype=torch.long, device=META)
            given = (empty(run.rows, *sample), step, maps, cameras, shared)
    with counting_on_meta() as work:
        made["unet"](*given)
    return looked, work


def _adapter_work(pipeline: PaintPipeline, run: PaintRun) -> dict[str, Work]:
    """The work of MV-Adapter by stage: encoding the maps, looking at the reference (none without one), and one step."""
    side, widths, base = run.size // vae.REDUCTION, pipeline.shape.widths, pipeline.configs["adapter"]["base"]
    with META:
        encoder = mv_adapter.encoder_for(base, widths)
        unet = mv_adapter.unet_for(pipeline.configs["unet"], pipeline.variant)
    dtypes = Dtypes(pipeline.precision.compute, pipeline.precision.residual)
    for network in (encoder, unet):
        for name, weight in network.named_parameters():
            weight.data = weight.data.to(stored_dtype(name, dtypes))
        mv_adapter.set_dtypes(network, dtypes)
    mv_adapter.set_kernel(unet, functional.scaled_dot_product_attention)
    make = partial(empty, dtype=dtypes.residual)
    pooled = pipeline.configs.get("text_encoder_2", {}).get("projection_dim")

    def words(rows: int) -> tuple[Tensor, dict[str, Tensor]]:
        added = {"text_embeds": make(rows, pooled), "time_ids": make(rows, SIZES)} if pooled else {}
        return make(rows, TOKENS, pipeline.shape.text_width), added

    with counting_on_meta() as encoding:
        states = encoder(empty(VIEWS, mv_adapter.MAP_CHANNELS, run.size, run.size, dtype=dtypes.compute))
    looked, reference = Work(), dict[str, Tensor]()
    if run.references:
        with counting_on_meta() as looked:
            reference = mv_adapter.looked_at(unet, make(run.references, LATENT_CHANNELS, side, side), *words(1))
    inputs = mv_adapter.AdapterInputs(reference, (False, True)[-run.rows :])
    given = (make(VIEWS * run.rows, LATENT_CHANNELS, side, side), empty(1), *words(run.rows), inputs)
    with counting_on_meta() as step:
        mv_adapter.forward(unet, *given, [state.to(dtypes.residual) for state in states])
    return {"maps": encoding, "reference": looked, "painting": step}


def _encoder_work(pipeline: PaintPipeline, part: str) -> Work:  # of one picture or prompt
    dtype = pipeline.precision.text
    cls: Any = attribute("transformers", CLASSES[part])
    with META:
        module = cls(cls.config_class.from_dict(dict(pipeline.configs[part]))).eval().to(dtype)
    if part == "image_encoder":
        given = empty(1, 3, CROPPED, CROPPED, dtype=dtype)
    else:
        given = torch.zeros(1, TOKENS, dtype=torch.long, device=META)
    with counting_on_meta() as work:
        module(given)
    return work
