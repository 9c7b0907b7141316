"""Views of a mesh painted by the multiview UNet: pictures and maps in, pictures out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...compat.device.execution import checked_layers, generator_for, to_host
from ...compat.errors import InputError
from ...compat.guidance import classifier_free_guidance
from ...compat.memory.parts import ProgressStage, Silent
from ...compat.memory.statistics import stage_cost
from ...compat.output_check import require_finite
from ...pipelines.forecast.times import expected
from ..choices import DEMO_SIZE, NEGATIVE, PUBLISHED, is_demo
from ..forecast import DECODED, ENCODED, PaintRun, asked, looking_bytes, step_bytes, vae_bytes
from ..geometry.cameras import CameraTable, camera_ids, camera_notes, views_for
from ..loading import PaintPipeline
from ..networks import vae
from ..networks.encoders import dino_states
from ..networks.multiview import StreamInputs
from ..networks.pbr import MATERIALS, rotary_by_tokens
from ..pictures import WHITE, checked_pictures, over, resized, squared
from ..shortage import explained, with_room
from .solvers import NoiseSchedule, lcm_schedule, schedule_for, schedule_of, solver_for, velocity_of

SIZES = (64, 2048)
PREVIEW = {  # latents as colours, roughly, by the name of core's class for them; the last row is added
    "SD15": (
        (0.3512, 0.2297, 0.3227),
        (0.3250, 0.4974, 0.2350),
        (-0.2829, 0.1762, 0.2721),
        (-0.2120, -0.2616, -0.7177),
        (0.0, 0.0, 0.0),
    ),
    "SDXL": (
        (0.3651, 0.4232, 0.4341),
        (-0.2533, -0.0042, 0.1068),
        (0.1076, 0.1111, -0.0362),
        (-0.3165, -0.2492, -0.2188),
        (0.1084, -0.0175, -0.0011),
    ),
}
LATENT_KEY = "anygpu"


@dataclass(frozen=True, slots=True)
class PaintInputs:
    """Inputs of a painting."""

    references: Tensor | Sequence[Tensor]  # RGB or RGBA, (R, H, W, C) or several of any size, 0..1
    normals: Tensor  # maps of the views, (V, H, W, 3), 0..1, background exactly 1
    positions: Tensor
    cameras: CameraTable  # of the views, in the same order
    dino: Tensor | None = None  # last hidden states (1, N, 1536) of the first reference; None: the pipeline's DINOv2
    prompt: str = ""  # of MV-Adapter alone; an empty prompt means its own where it has a picture
    negative: str = NEGATIVE


@dataclass(frozen=True, slots=True)
class PaintSettings:
    """Settings of a painting. 0 for ``steps`` or ``guidance``, and ``auto``, mean the published sampler's own."""

    size: int = 512  # of a view, pixels, a multiple of 64
    steps: int = 0
    guidance: float = 0.0
    seed: int = 0  # 0 to 2**64 - 1
    scheduler: str = "auto"  # one of choices.SCHEDULERS
    spacing: str = "auto"
    sigmas: tuple[float, ...] | None = None  # noise levels in place of steps and spacing
    latents: Tensor | None = None  # of an earlier pass, (V or 2 V for PBR, 4, h, w), not scaled, as core's LATENT
    denoise: float = 1.0  # share of the noise that is put on them, 0..1; 1 starts afresh
    reference_scale: float = 1.0  # weight of the attention, as the next
    multiview_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Painted:
    """Painted views, (V, H, W, 3), fp32, 0..1, on the CPU."""

    views: Tensor  # colours; albedo for the PBR model
    metallic_roughness: Tensor | None  # red metallic, green roughness; None for others
    latents: Tensor  # for a second pass, not scaled, as PaintSettings takes them


@dataclass(frozen=True, slots=True)
class Conditions:
    """Conditions that stay the same through all steps, fp32 or narrower, on the device that computes."""

    maps: Tensor  # (1, V, 8, h, w)
    reference: Mapping[str, Tensor]
    cameras: Tensor  # ids (V,)
    rotary: Mapping[int, tuple[Tensor, Tensor]] | None = None  # PBR only
    dino: Tensor | None = None  # PBR only


@dataclass(frozen=True, slots=True)
class Denoising:
    """A way from noise to clean latents."""

    solver: Any
    draw: Callable[[], Tensor]  # fresh noise, (V, 4, h, w)
    rows: int  # of guidance in a step
    guidance: float  # 1 for one row
    need: int  # bytes of the activations of a step
    run: PaintRun  # what it is a part of
    epsilon: bool = False  # True where the network predicts noise, not velocities


@contextmanager
def stage(
    pipeline: PaintPipeline, name: str, part: str, activations: int, run: PaintRun, progress: Any
) -> Iterator[Any]:
    """The module ``part`` on the device for a stage, which is measured and forecast and can be cancelled in each layer.

    Args:
        activations: bytes at the peak of a forward.
    """
    cost = stage_cost(pipeline, name, progress, **expected(pipeline, name, run))
    hold = pipeline.offloader.hold(part, asked(activations), progress)
    with cost, hold as module, checked_layers(module, progress.check):
        yield module


def paint_views(
    pipeline: PaintPipeline, inputs: PaintInputs, settings: PaintSettings = PaintSettings(), progress: Any = None
) -> Painted:
    """The views, painted.

    Raises:
        InputError: pictures, maps, cameras, latents or settings that do not fit together, or a result with NaN.
    """
    progress = progress or Silent()
    settings = completed(pipeline, settings, progress)
    references, normals, positions, ids = _checked(pipeline, inputs, settings, progress)
    what = f"painting {len(ids)} views of {settings.size} pixels"
    with torch.no_grad(), explained(what, pipeline.facts.name, "Lower view_size or the number of views."):
        conditions = _conditions(pipeline, inputs, (references, normals, positions, ids), settings, progress)
        latents = sampled(pipeline, conditions, settings, progress)
        tell_sampled(pipeline, latents, settings.seed, progress)
        painted = decoded(pipeline, latents, len(ids), settings, progress)
    for part, blocks in pipeline.compiled.items():
        progress.notify(f"{part}: {blocks}")
    return painted


def completed(pipeline: PaintPipeline, settings: PaintSettings, progress: Any) -> PaintSettings:
    """``settings`` with the published values in place of ``auto`` and 0, checked."""
    if pipeline.variant not in PUBLISHED or pipeline.family == "delight":
        raise InputError(
            f"a {pipeline.family} pipeline for painting views",
            expected="a pipeline that paints",
            fix="Load a Hunyuan3D paint folder or MV-Adapter; the delight model has its own node.",
        )
    own = PUBLISHED[pipeline.variant]
    settings = _as_demo(pipeline, settings, progress)
    if settings.size % 64 or not SIZES[0] <= settings.size <= SIZES[1]:
        nearest = min(max(round(settings.size / 64) * 64, SIZES[0]), SIZES[1])
        raise InputError(
            f"view size {settings.size} for painting",
            expected=f"a multiple of 64 from {SIZES[0]} to {SIZES[1]} pixels",
            fix=f"The nearest valid value is {nearest}.",
        )
    if not 0 < settings.denoise <= 1:
        raise InputError(
            f"denoise {settings.denoise} for painting",
            expected="more than 0, at most 1",
            fix="0 would return the input unchanged. Use 0.3 to 0.6 for a second pass.",
        )
    if settings.latents is None and settings.denoise < 1:
        progress.notify("denoise has no effect without latents")
        settings = replace(settings, denoise=1.0)
    scheduler = own.scheduler if settings.scheduler == "auto" else settings.scheduler
    spacing = own.spacing if settings.spacing == "auto" else settings.spacing
    if scheduler == "lcm" and (settings.spacing != "auto" or settings.sigmas is not None):
        progress.notify("the lcm sampler uses its own timesteps: sigma schedule and sigmas have no effect")
        settings = replace(settings, sigmas=None)
    return replace(
        settings,
        scheduler=scheduler,
        spacing=spacing,
        steps=settings.steps or own.steps,
        guidance=settings.guidance or own.guidance,
    )


def _as_demo(pipeline: PaintPipeline, settings: PaintSettings, progress: Any) -> PaintSettings:
    """``settings`` at the size that the demo model was trained for, which is said; those of others as they are."""
    if not is_demo(pipeline.source):
        return settings
    size = DEMO_SIZE if settings.latents is None else 8 * settings.latents.shape[-1]
    if size != settings.size:
        progress.notify(f"the demo model paints at its own size: view_size {settings.size} -> {size}")
    return replace(settings, size=size)


def plan_of(settings: PaintSettings, zero_snr: bool = True, shift: float = 1.0) -> NoiseSchedule:
    """The schedule of completed settings; with ``denoise`` below 1 the end of a longer one."""
    if settings.sigmas is not None:
        return schedule_of(settings.sigmas, zero_snr, shift)
    if settings.scheduler == "lcm":
        whole = lcm_schedule(settings.steps, zero_snr, shift)
        return whole.tail(max(1, round(settings.steps * settings.denoise)))
    steps = max(settings.steps, int(settings.steps / settings.denoise))
    return schedule_for(settings.spacing, steps, zero_snr, shift).tail(settings.steps)


def sampled(
    pipeline: PaintPipeline,
    conditions: Conditions,
    settings: PaintSettings,
    progress: Any,
    noise: Callable[[], Tensor] | None = None,
) -> Tensor:
    """Clean latents (V or 2 V, 4, h, w), scaled, fp32, on the CPU.

    Args:
        noise: draws each noise in turn; from the seed when None.
    """
    views, materials = conditions.maps.shape[1], MATERIALS if pipeline.family == "paint_pbr" else 1
    shape = (materials * views, 4, *conditions.maps.shape[-2:])
    generator = generator_for(settings.seed)
    draw = noise or (lambda: torch.randn(shape, generator=generator, dtype=torch.float32))
    solver = solver_for(settings.scheduler, plan_of(settings))
    rows = (0.0, settings.reference_scale) if settings.guidance != 1 else (settings.reference_scale,)
    run = StreamInputs(
        views=views,
        reference=conditions.reference,
        scales=rows,
        multiview_scale=settings.multiview_scale,
        materials=materials,
        dino=None,
        rotary=conditions.rotary,
    )
    need = step_bytes(pipeline, views * materials * len(rows), (shape[-2], shape[-1]), references_in(conditions))
    planned = _run(settings, views, references_in(conditions))
    denoising = Denoising(solver, draw, rows=len(rows), guidance=settings.guidance, need=need, run=planned)

    def forward(unet: Any, noisy: Tensor, time: Tensor) -> Tensor:
        return predicted(unet, noisy, time, conditions, run)

    return denoised(pipeline, denoising, begun(pipeline, solver, draw, settings), forward, progress)


def begun(pipeline: PaintPipeline, solver: Any, draw: Callable[[], Tensor], settings: PaintSettings) -> Tensor:
    """Latents to start from: noise, or those of an earlier pass with some."""
    start = None
    if settings.latents is not None and settings.denoise < 1:
        start = to_host(settings.latents).float() * pipeline.latent_scale
    return solver.begin(draw(), start)  # type: ignore[no-any-return]


def denoised(
    pipeline: PaintPipeline,
    denoising: Denoising,
    x: Tensor,
    forward: Callable[[Any, Tensor, Tensor], Tensor],
    progress: Any,
) -> Tensor:
    """Clean latents from noisy ``x``, scaled, fp32, on the CPU.

    Args:
        forward: from the UNet, latents and time (1,) to the predictions of all rows, (R * V, 4, h, w).
    """
    solver, device, planned = denoising.solver, pipeline.offloader.device, denoising.run
    count, rows = len(solver.schedule), denoising.rows
    with stage(pipeline, "painting", "unet", denoising.need, planned, progress) as unet:
        for index, time in enumerate(solver.schedule.timesteps):
            step = torch.tensor([time], dtype=torch.float32, device=device)
            noisy = solver.model_input(x, index)
            forward_once = partial(forward, unet, noisy.to(device), step)
            velocity = to_host(with_room(pipeline.offloader, "unet", forward_once, progress)).float()
            velocity = velocity.unflatten(0, (rows, -1))
            # Of three rows upstream the middle one cancels; of two equal ones (guidance 1) one is enough.
            guided = velocity[0]
            if rows > 1:
                guided = classifier_free_guidance(velocity[1], velocity[0], denoising.guidance)
            if denoising.epsilon:
                guided = velocity_of(guided, noisy, solver.schedule.sigmas[index])
            clean = solver.clean(guided, index, x)
            x = solver.step(guided, index, x, denoising.draw)
            shown = partial(preview_of, clean, pipeline.latent_format)
            progress.step(index + 1, count, ProgressStage("painting"), shown)
            progress.check()
    require_finite(x, "painted latents")
    return x


def tell_sampled(pipeline: PaintPipeline, latents: Tensor, seed: int, progress: Any) -> None:
    """Give scaled latents to a progress that keeps them, so that a failure to decode does not lose them."""
    tell = getattr(progress, "sampled", None)
    if tell is not None:
        tell(latents / pipeline.latent_scale, pipeline.family, seed, pipeline.latent_format)


def predicted(unet: Any, x: Tensor, step: Tensor, conditions: Conditions, run: StreamInputs) -> Tensor:
    """The velocity of all guidance rows, (B * M * V, 4, h, w).

    Args:
        x: (M * V, 4, h, w), the same for every row.
    """
    rows = len(run.scales)
    if run.materials == 1:
        sample = x.expand(rows, *x.shape)
        return unet(sample, step, conditions.maps, conditions.cameras, run)
    sample = x.unflatten(0, (run.materials, run.views))
    dino = conditions.dino
    if dino is not None:  # zeros in the row without guidance, which still pass the projection and its norm
        dino = torch.cat((*[torch.zeros_like(dino)] * (rows - 1), dino))
    return unet(sample.expand(rows, *sample.shape), step, conditions.maps, dino, run)


def references_in(conditions: Conditions) -> int:
    """Number of reference pictures in the stored tokens."""
    most = max((kept.shape[1] for kept in conditions.reference.values()), default=0)
    return most // (conditions.maps.shape[-2] * conditions.maps.shape[-1])


def preview_of(latents: Tensor, latent_format: str = "SD15") -> Tensor:
    """Rough pictures (V, h, w, 3) in 0..1 of scaled latents."""
    *colours, added = torch.tensor(PREVIEW[latent_format])
    return ((torch.einsum("bchw,cr->bhwr", latents, torch.stack(colours)) + added) * 0.5 + 0.5).clamp(0, 1)


def _run(settings: PaintSettings, views: int, references: int) -> PaintRun:
    """Build the run that completed settings describe."""
    return PaintRun(
        steps=len(plan_of(settings)),
        rows=2 if settings.guidance != 1 else 1,
        size=settings.size,
        views=views,
        references=references,
    )


def _checked(
    pipeline: PaintPipeline, inputs: PaintInputs, settings: PaintSettings, progress: Any
) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """References, normals and positions as (B, size, size, 3), and the camera ids."""
    background = PUBLISHED[pipeline.variant].background
    views_for(pipeline.family, inputs.cameras)
    ids = camera_ids(inputs.cameras, pipeline.family)
    for line in camera_notes(inputs.cameras, pipeline.family):
        progress.notify(line)
    size, pictures = settings.size, checked_pictures(inputs.references, "reference picture")
    references = torch.cat([resized(squared(over(one, background), background)[None], size, size) for one in pictures])
    maps = []
    for name, given in (("normal", inputs.normals), ("position", inputs.positions)):
        given_maps = checked_pictures(given, f"{name} maps")
        if len(given_maps) != len(ids):
            raise InputError(
                f"{len(given_maps)} {name} maps for {len(ids)} cameras",
                expected="one map per camera",
                fix="Connect the maps and the cameras of the same Render Views node.",
            )
        maps.append(torch.cat([resized(over(one, WHITE)[None], size, size) for one in given_maps]))
    materials, side = MATERIALS if pipeline.family == "paint_pbr" else 1, size // vae.REDUCTION
    wanted = (len(ids) * materials, 4, side, side)
    if settings.latents is not None and tuple(settings.latents.shape) != wanted:
        raise InputError(
            f"latents of shape {tuple(settings.latents.shape)} for painting",
            expected=f"{wanted}",
            fix="Upscale the latents of the first pass to the view size with Upscale Latent, and keep the cameras.",
        )
    return references, maps[0], maps[1], ids


def _conditions(
    pipeline: PaintPipeline,
    inputs: PaintInputs,
    given: tuple[Tensor, Tensor, Tensor, list[int]],
    settings: PaintSettings,
    progress: Any,
) -> Conditions:
    """Everything the steps share, computed once."""
    references, normals, positions, ids = given
    device, size = pipeline.offloader.device, settings.size
    generator = generator_for(settings.seed)
    need, run = vae_bytes(ENCODED, size, pipeline.precision.vae), _run(settings, len(ids), len(references))
    with stage(pipeline, "encoding", "vae", need, run, progress) as module:
        encodings = []
        for index, pictures in enumerate((references, normals, positions)):  # the order in which upstream draws
            encodings.append(vae.encoded(module, pictures, generator, device) * vae.SCALE)
            progress.step(index + 1, 3, ProgressStage("encoding"))
    dino = rotary = None
    if pipeline.family == "paint_pbr":
        dino = _dino(pipeline, inputs, references[0], progress, run).to(device)
        pairs = zip(pipeline.shape.widths, pipeline.shape.heads, strict=True)
        widths = {level: width // heads for level, (width, heads) in enumerate(pairs)}
        tables = rotary_by_tokens(positions.permute(0, 3, 1, 2), size // vae.REDUCTION, widths)
        rotary = {tokens: (cos.to(device), sin.to(device)) for tokens, (cos, sin) in tables.items()}
    need = looking_bytes(pipeline, len(references), (encodings[0].shape[-2], encodings[0].shape[-1]))
    with stage(pipeline, "reference", "reference", need, run, progress) as stream:
        reference = stream(encodings[0][None].to(device))
    maps = torch.cat((encodings[1], encodings[2]), dim=1)[None].to(device)
    return Conditions(
        maps=maps, reference=reference, cameras=torch.tensor(ids, device=device), rotary=rotary, dino=dino
    )


def _dino(pipeline: PaintPipeline, inputs: PaintInputs, reference: Tensor, progress: Any, run: PaintRun) -> Tensor:
    if inputs.dino is not None:
        states = to_host(inputs.dino).float()
        if states.ndim != 3 or states.shape[-1] != 1536:
            raise InputError(
                f"a CLIP_VISION_OUTPUT of shape {tuple(states.shape)} for painting",
                expected="(1, N, 1536), of DINOv2-giant",
                fix="Load DINOv2-giant in Load CLIP Vision.",
            )
        return states[:1]
    if "image_encoder" not in pipeline.parts.readers:
        raise InputError(
            "no DINOv2 for the PBR model",
            expected="the folder of DINOv2-giant, or its CLIP_VISION_OUTPUT",
            fix="Choose facebook/dinov2-giant on the load node, connect CLIP Vision Encode, or add --image-encoder.",
        )
    return dino_states(pipeline, reference, progress, expected(pipeline, "image", run))


def decoded(pipeline: PaintPipeline, latents: Tensor, views: int, settings: PaintSettings, progress: Any) -> Painted:
    """The pictures of ``latents``; those behind the first ``views`` are metal and roughness."""
    device, plain = pipeline.offloader.device, latents / pipeline.latent_scale
    need = vae_bytes(DECODED, settings.size, pipeline.precision.vae)
    with stage(pipeline, "decoding", "vae", need, _run(settings, views, 1), progress) as module:
        pictures = vae.decoded(module, plain, device, progress)
    return Painted(pictures[:views], pictures[views:] if len(pictures) > views else None, plain)


def to_latent(pipeline: PaintPipeline, painted: Painted) -> dict[str, Any]:
    """Core's LATENT of painted views, with our key of plain values, which core nodes ignore."""
    record = {"family": pipeline.family, "variant": pipeline.variant, "views": len(painted.views)}
    return {"samples": painted.latents, LATENT_KEY: record}


def latents_of(pipeline: PaintPipeline, latent: Mapping[str, Any] | None) -> Tensor | None:
    """The samples of core's LATENT, for :class:`PaintSettings`; None for none.

    Raises:
        InputError: they are latents of something else.
    """
    if latent is None:
        return None
    samples, made_by = latent.get("samples"), (latent.get(LATENT_KEY) or {}).get("family", pipeline.family)
    if not isinstance(samples, Tensor) or samples.ndim != 4 or made_by != pipeline.family:
        raise InputError(
            f"a LATENT of {made_by} with {getattr(samples, 'ndim', 'no')} dimensions for painting",
            expected=f"views of {pipeline.family}, (V, 4, h, w)",
            fix="Connect the latent of an AnyGPU Paint Views node of the same model.",
        )
    return samples
