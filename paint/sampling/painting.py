"""Views of a mesh painted by the multiview UNet: pictures and maps in, pictures out."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...compat.device.execution import checked_layers, generator_for, to_host
from ...compat.device.facts import empty_cache
from ...compat.device.failures import DEVICE_ERRORS, is_shortage
from ...compat.errors import InputError, require_range, sentence
from ...compat.memory.offloader import Offloader
from ...compat.memory.parts import ProgressStage, Silent, tell_once
from ...compat.memory.statistics import stage_cost
from ...compat.output_check import require_finite
from ...pipelines.forecast.times import expected
from .. import forecast
from ..choices import DEMO_SIZE, NEGATIVE, PUBLISHED, WHITE, sampler_of
from ..forecast import DECODED, ENCODED, PaintRun, materials_of, vae_bytes
from ..geometry.cameras import CameraTable, camera_ids, camera_notes, views_for
from ..loading import PaintPipeline
from ..networks import vae
from ..networks.encoders import dino_states
from ..networks.multiview import StreamInputs
from ..networks.pbr import rotary_by_tokens
from ..networks.stable_diffusion import EPSILON
from ..pictures import checked_pictures, over, resized, squared
from .solvers import NoiseSchedule, UniPC, lcm_schedule, schedule_for, schedule_of, solver_for, velocity_of

SIZES, MOST_STEPS = (64, 2048), 1000
PREVIEW = {  # latents as colours, roughly, by the name of core's class for them; the last row is added
    "SD15": (
        (0.3512, 0.2297, 0.3227), (0.3250, 0.4974, 0.2350), (-0.2829, 0.1762, 0.2721), (-0.2120, -0.2616, -0.7177),
        (0.0, 0.0, 0.0),
    ),
    "SDXL": (
        (0.3651, 0.4232, 0.4341), (-0.2533, -0.0042, 0.1068), (0.1076, 0.1111, -0.0362), (-0.3165, -0.2492, -0.2188),
        (0.1084, -0.0175, -0.0011),
    ),
}  # fmt: skip
LATENT_KEY = "anygpu"


@dataclass(frozen=True, slots=True)
class PaintInputs:
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
    sigmas: tuple[float, ...] | None = None  # noise levels in place of steps, spacing and denoise
    latents: Tensor | None = None  # of an earlier pass, (V or 2 V for PBR, 4, h, w), not scaled, as core's LATENT
    denoise: float = 1.0  # share of the noise that is put on them, 0..1; 1 starts afresh
    reference_scale: float = 1.0  # weight of the attention, as the next
    multiview_scale: float = 1.0

    @property
    def continues(self) -> bool:  # it starts from ``latents``, not from noise alone
        return self.latents is not None and (self.denoise < 1 or self.sigmas is not None)


@dataclass(frozen=True, slots=True)
class Painted:
    """Painted views, (V, H, W, 3), fp32, 0..1, on the CPU."""

    views: Tensor  # colours; albedo for the PBR model
    metallic_roughness: Tensor | None  # red metallic, green roughness; None for others
    latents: Tensor  # for a second pass, not scaled, as PaintSettings takes them


def with_room(offloader: Offloader, part: str, step: Callable[[], torch.Tensor], progress: Any) -> torch.Tensor:
    """The result of ``step``, which calls ``part``; again with less of it on the device where memory ran out.

    Raises another error, or one of memory when nothing is left to give up."""
    while True:
        try:
            return step()
        except DEVICE_ERRORS as error:
            if not is_shortage(error):
                raise
            failed = error.with_traceback(None)  # whose frames hold the tensors of the failed try
        done = offloader.reduce_memory(part)
        if not done:
            raise failed
        gc.collect()
        empty_cache(offloader.device)
        progress.notify(f"painting ran out of memory: continuing {done}, after the last finished step")


@contextmanager
def explained(what: str, device: object, fix: str) -> Iterator[None]:
    """Context that raises a shortage of memory, in any back end's words, as an OutOfMemoryError with advice.

    ``what`` names the work, such as ``painting views of 512 pixels``; ``fix`` is one sentence on what to lower."""
    try:
        yield
    except Exception as error:
        if not is_shortage(error):
            raise
        found, expected = f"out of memory while {what} on {device}", "more free memory on this device"
        # ComfyUI unloads all models where it sees this class, so that the next try has more room.
        raise torch.OutOfMemoryError(f"{sentence(found, expected, fix)}\n{' '.join(str(error).split())}") from error


@contextmanager
def stage(
    pipeline: PaintPipeline, name: str, part: str, activation_bytes: int, run: PaintRun, progress: Any
) -> Iterator[Any]:
    """The module ``part`` on the device for the stage ``name``: measured, forecast, and cancelled between layers.

    ``activation_bytes``: at the peak of a forward."""
    cost = stage_cost(pipeline, name, progress, **expected(pipeline, name, run))
    hold = pipeline.offloader.hold(part, int(forecast.MARGIN * activation_bytes), progress)
    with cost, hold as module, checked_layers(module, progress.check):
        yield module


def paint_views(pipeline: PaintPipeline, inputs: PaintInputs, settings: PaintSettings, progress: Any = None) -> Painted:
    """The views, painted.

    Raises InputError for pictures, maps, cameras, latents or settings that do not fit together, or a NaN result."""
    progress = progress or Silent()
    settings = completed(pipeline, settings, progress)
    what = f"painting views of {settings.size} pixels"
    with torch.no_grad(), explained(what, pipeline.facts.name, "Lower view_size or the number of views."):
        references, normals, positions, ids = _checked(pipeline, inputs, settings, progress)
        solver = solver_for(settings.scheduler, plan_of(settings))
        run = run_of(settings, solver, len(ids), len(references))
        conditions = _conditions(pipeline, inputs, (references, normals, positions, ids), settings, run, progress)
        given = references, normals, positions, ids, inputs.dino
        latents = sampled(pipeline, conditions, settings, solver, run=run, progress=progress, source=given)
        return decoded(pipeline, latents, run, settings.seed, progress)


def run_of(settings: PaintSettings, solver: Any, views: int, references: int) -> PaintRun:
    """The run that completed settings describe."""
    rows = 2 if settings.guidance != 1 else 1
    return PaintRun(len(solver.schedule), rows, settings.size, views=views, references=references)


def completed(pipeline: PaintPipeline, settings: PaintSettings, progress: Any) -> PaintSettings:
    """``settings`` with the published values in place of ``auto`` and 0. A demo gets its own size; ``sigmas`` and
    ``denoise`` that have no effect are reset; the user is told. Raises InputError for a value out of range."""
    if pipeline.variant not in PUBLISHED or pipeline.family == "delight":
        found = f"a {pipeline.family} pipeline for painting views"
        fix = "Load a Hunyuan3D paint folder or MV-Adapter; the delight model has its own node."
        raise InputError(found, expected="a pipeline that paints", fix=fix)
    own = sampler_of(pipeline.variant, pipeline.is_demo)
    if own != PUBLISHED[pipeline.variant]:
        progress.notify(f"the demo model was made for {own.steps} steps and guidance {own.guidance:g}")
    if pipeline.family != "mv_adapter" and not pipeline.is_demo:
        tell_once(progress, "maps and picture are prepared as Tencent does: views of a seed differed slightly before")
    if pipeline.is_demo:
        size = DEMO_SIZE if settings.latents is None else 8 * settings.latents.shape[-1]
        if size != settings.size:
            progress.notify(f"the demo model paints at its own size: view_size {settings.size} -> {size}")
        settings = replace(settings, size=size)
    if settings.size % 64 or not SIZES[0] <= settings.size <= SIZES[1]:
        nearest = min(max(round(settings.size / 64) * 64, SIZES[0]), SIZES[1])
        found, fix = f"view size {settings.size} for painting", f"The nearest valid value is {nearest}."
        raise InputError(found, expected=f"a multiple of 64 from {SIZES[0]} to {SIZES[1]} pixels", fix=fix)
    require_range("steps", settings.steps, 0, MOST_STEPS, "steps")
    if not 0 < settings.denoise <= 1:
        found = f"denoise {settings.denoise} for painting"
        fix = "0 would return the input unchanged. Use 0.3 to 0.6 for a second pass."
        raise InputError(found, expected="more than 0, at most 1", fix=fix)
    ancestral = pipeline.configs.get("adapter", {}).get("base") == "sd21"  # whose step is the recommended DDPM's
    usual = "euler_ancestral" if ancestral else own.scheduler
    scheduler = usual if settings.scheduler == "auto" else settings.scheduler
    spacing = own.spacing if settings.spacing == "auto" else settings.spacing
    if scheduler == "lcm" and (settings.spacing not in ("auto", own.spacing) or settings.sigmas is not None):
        progress.notify("the lcm sampler uses its own timesteps: sigma schedule and sigmas have no effect")
        settings = replace(settings, sigmas=None)
    if settings.denoise < 1 and (settings.latents is None or settings.sigmas is not None):
        progress.notify("denoise has no effect without latents, or with sigmas")
        settings = replace(settings, denoise=1.0)
    steps, guidance = settings.steps or own.steps, settings.guidance or own.guidance
    return replace(settings, scheduler=scheduler, spacing=spacing, steps=steps, guidance=guidance)


def plan_of(settings: PaintSettings, zero_snr: bool = True, shift: float = 1.0) -> NoiseSchedule:
    """The schedule of completed settings. With ``denoise`` below 1 it is the end of a longer one or, for lcm, of its
    own; raises InputError where that share of the noise is too small for the number of steps."""
    if settings.sigmas is not None:
        return schedule_of(settings.sigmas, zero_snr, shift)
    if settings.scheduler == "lcm":
        return lcm_schedule(settings.steps, zero_snr, shift).tail(max(1, round(settings.steps * settings.denoise)))
    require_range("denoise", settings.denoise, settings.steps / MOST_STEPS, 1, f"with {settings.steps} steps")
    steps = max(settings.steps, int(settings.steps / settings.denoise))
    return schedule_for(settings.spacing, steps, zero_snr, shift).tail(settings.steps)


def noises(shape: Sequence[int], generator: torch.Generator) -> Callable[[], Tensor]:
    """A function that draws noise of ``shape``, fp32, on the CPU."""
    return partial(torch.randn, tuple(shape), generator=generator, dtype=torch.float32)


def sampled(
    pipeline: PaintPipeline, conditions: tuple[Tensor, Tensor, StreamInputs], settings: PaintSettings, solver: Any,
    run: PaintRun, progress: Any, source: Any,
) -> Tensor:  # fmt: skip
    """Clean latents (V or 2 V, 4, h, w), scaled, fp32, on the CPU. ``source`` is what ``conditions`` were made of, by
    which saved steps of this painting are found again."""
    maps, cameras_or_dino, shared = conditions
    generator = generator_for(settings.seed)
    draw = noises((shared.materials * run.views, 4, *maps.shape[-2:]), generator)

    def step(unet: Any, noisy: Tensor, time: Tensor) -> Tensor:
        sample = noisy if shared.materials == 1 else noisy.unflatten(0, (shared.materials, run.views))
        velocity = unet(sample.expand(run.rows, *sample.shape), time, maps, cameras_or_dino, shared)
        return guided(velocity, run.rows, settings.guidance)

    start, decided = begun(pipeline, solver, draw(), settings), (generator, settings.seed, settings, source)
    return denoised(pipeline, run, solver, start, draw=draw, step=step, progress=progress, decided=decided)


def guided(predicted: Tensor, rows: int, *scales: float) -> Tensor:
    """The guided prediction, fp32, on the CPU, from those of all rows, (R * V, 4, h, w): the first, moved by a scale
    times the difference of each further row from the one before it."""
    # Of three rows of painting upstream the middle one cancels; of two equal ones (guidance 1) one is enough.
    apart = to_host(predicted).float().unflatten(0, (rows, -1))
    result = apart[0]
    for index, scale in enumerate(scales[: rows - 1]):
        result = result + scale * (apart[index + 1] - apart[index])
    return result


def begun(pipeline: PaintPipeline, solver: Any, noise: Tensor, settings: PaintSettings) -> Tensor:
    """Latents to start from: noise, or those of an earlier pass with some."""
    start = to_host(settings.latents).float() * pipeline.latent_scale if settings.continues else None
    return solver.begin(noise, start)  # type: ignore[no-any-return]


def denoised(
    pipeline: PaintPipeline, run: PaintRun, solver: Any, x: Tensor, draw: Callable[[], Tensor],
    step: Callable[[Any, Tensor, Tensor], Tensor], progress: Any, decided: Sequence[Any] = (),
) -> Tensor:  # fmt: skip
    """Clean latents from noisy ``x``, scaled, fp32, on the CPU; raises NotFinite for NaN. Saved steps are resumed.

    ``draw`` returns fresh noise like ``x``; ``step`` the guided prediction, fp32, on the CPU, from the UNet and, on its
    device, latents and time (1,). By ``decided``, the generator of ``draw``, the seed, and all else that decides the
    latents, a host keeps the steps."""
    device, count, delight = pipeline.offloader.device, len(solver.schedule), pipeline.family == "delight"
    epsilon = pipeline.configs.get("adapter", {}).get("prediction_type") == EPSILON
    name = forecast.STEPPING[delight]
    steps = progress.saved_steps(pipeline, *decided) if decided and hasattr(progress, "saved_steps") else None
    inner = solver.solver if isinstance(solver, UniPC) else solver
    x, done = (x, 0) if steps is None else steps.restored(x, inner, count)
    need, left = forecast.step_bytes(pipeline, run), replace(run, steps=count - done)
    saved = nullcontext() if steps is None else steps.saved_when_interrupted(count)
    with stage(pipeline, name, "unet", need, left, progress) as unet, saved:
        for index, time in enumerate(solver.schedule.timesteps[done:], done):
            noisy = solver.model_input(x, index)
            given = (noisy.to(device), torch.tensor([time], dtype=torch.float32, device=device))
            velocity = with_room(pipeline.offloader, "unet", partial(step, unet, *given), progress)
            if epsilon:
                velocity = velocity_of(velocity, noisy, solver.schedule.sigmas[index])
            clean = solver.clean(velocity, index, x)
            x = solver.step(velocity, index, x, draw)
            if steps is not None:
                steps.save(index + 1, x, inner, count)
            now = ProgressStage(name, resumable=steps is not None and steps.resumable())
            progress.step(index + 1, count, now, partial(preview_of, clean, pipeline.latent_format))
            progress.check()
    require_finite(x, "delit latents" if delight else "painted latents")
    return x


def preview_of(latents: Tensor, latent_format: str) -> Tensor:
    """Rough pictures (V, h, w, 3) in 0..1 of scaled latents."""
    *colours, added = torch.tensor(PREVIEW[latent_format])
    return ((torch.einsum("bchw,cr->bhwr", latents, torch.stack(colours)) + added) * 0.5 + 0.5).clamp(0, 1)


def _checked(
    pipeline: PaintPipeline, inputs: PaintInputs, settings: PaintSettings, progress: Any
) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """References, normals and positions as (B, size, size, 3), and the camera ids; raises InputError for a misfit."""
    own = PUBLISHED[pipeline.variant]
    views_for(pipeline.family, inputs.cameras)
    ids = camera_ids(inputs.cameras, pipeline.family)
    for line in camera_notes(inputs.cameras, pipeline.family):
        progress.notify(line)
    size, pictures = settings.size, checked_pictures(inputs.references, "reference picture")
    smaller = (size, own.style) if own.style else (size,)
    references = torch.stack([_reference(one, own.background, smaller) for one in pictures])
    require_latents(settings, len(ids) * materials_of(pipeline))
    normals, positions = (  # rounded as upstream's fp16 does before its VAE, whatever the dtype here
        (torch.cat([resized(over(one, WHITE)[None], size, size) for one in maps]).half() - 0.5).float() + 0.5
        for maps in checked_maps(inputs, len(ids)).values()
    )
    return references, normals, positions, ids


def _reference(picture: Tensor, background: float, sizes: tuple[int, ...]) -> Tensor:
    """A picture (H, W, 3 or 4) as an RGB square: resized to the last of ``sizes`` with its alpha, put on background,
    and resized to the first, as upstream. One that is not square is put on background before anything else."""
    height, width = picture.shape[:2]
    square = picture if height == width else squared(over(picture, background), background)
    return resized(over(resized(square[None], sizes[-1], sizes[-1])[0], background)[None], sizes[0], sizes[0])[0]


def checked_maps(inputs: PaintInputs, count: int) -> dict[str, list[Tensor]]:
    """Maps (H, W, 3 or 4) by kind, normal first; raises InputError unless there are ``count`` of each."""
    maps = {}
    for name, given in (("normal", inputs.normals), ("position", inputs.positions)):
        maps[name] = checked_pictures(given, f"{name} maps")
        if len(maps[name]) != count:
            found = f"{len(maps[name])} {name} maps for {count} cameras"
            fix = "Connect the maps and the cameras of the same Render Views node."
            raise InputError(found, expected="one map per camera", fix=fix)
    return maps


def require_latents(settings: PaintSettings, count: int) -> None:
    """Raise InputError for latents of an earlier pass that are not ``count`` of the view size."""
    wanted = (count, 4, settings.size // vae.REDUCTION, settings.size // vae.REDUCTION)
    if settings.latents is not None and tuple(settings.latents.shape) != wanted:
        found = f"latents of shape {tuple(settings.latents.shape)} for painting"
        fix = "Upscale the latents of the first pass to the view size with Upscale Latent, and keep the cameras."
        raise InputError(found, expected=f"{wanted}", fix=fix)


def _conditions(
    pipeline: PaintPipeline,
    inputs: PaintInputs,
    given: tuple[Tensor, Tensor, Tensor, list[int]],
    settings: PaintSettings,
    run: PaintRun,
    progress: Any,
) -> tuple[Tensor, Tensor, StreamInputs]:
    """Conditions of all steps, on the device: map latents (1, V, 8, h, w); camera ids (V,), or for PBR DINO states of
    each guidance row; and the inputs that the layers share."""
    references, normals, positions, ids = given
    device, size, generator = pipeline.offloader.device, settings.size, generator_for(settings.seed)
    need = vae_bytes(ENCODED, size, pipeline.precision.vae)
    with stage(pipeline, "encoding", "vae", need, run, progress) as module:
        encodings = []
        for index, pictures in enumerate((references, normals, positions)):  # the order in which upstream draws
            encodings.append(vae.encoded(module, pictures, generator, device) * vae.SCALE)
            progress.step(index + 1, 3, ProgressStage("encoding"))
    cameras_or_dino, rotary = torch.tensor(ids, device=device), None
    if PUBLISHED[pipeline.variant].style:
        dino = _dino(pipeline, inputs, references[0], progress, run).to(device)
        # zeros in the row without guidance, which still pass the projection and its norm
        cameras_or_dino = torch.cat((*[torch.zeros_like(dino)] * (run.rows - 1), dino))
        pairs = zip(pipeline.shape.widths, pipeline.shape.heads, strict=True)
        widths = {level: width // heads for level, (width, heads) in enumerate(pairs)}
        tables = rotary_by_tokens(positions.permute(0, 3, 1, 2), size // vae.REDUCTION, widths)
        rotary = {tokens: (cos.to(device), sin.to(device)) for tokens, (cos, sin) in tables.items()}
    with stage(pipeline, "reference", "reference", forecast.looking_bytes(pipeline, run), run, progress) as stream:
        reference = stream(encodings[0][None].to(device))
    rows, scales = (0.0, 1.0)[-run.rows :], (settings.reference_scale, settings.multiview_scale)
    shared = StreamInputs(run.views, reference, rows, *scales, materials=materials_of(pipeline), rotary=rotary)
    return torch.cat((encodings[1], encodings[2]), dim=1)[None].to(device), cameras_or_dino, shared


def _dino(pipeline: PaintPipeline, inputs: PaintInputs, reference: Tensor, progress: Any, run: PaintRun) -> Tensor:
    """DINOv2's states (1, N, 1536): those of the inputs, or of ``reference`` by the pipeline's encoder.

    Raises InputError for states of another encoder, or without either."""
    if inputs.dino is not None:
        states = to_host(inputs.dino).float()
        if states.ndim != 3 or states.shape[-1] != 1536:
            found = f"a CLIP_VISION_OUTPUT of shape {tuple(states.shape)} for painting"
            fix = "Load DINOv2-giant in Load CLIP Vision."
            raise InputError(found, expected="(1, N, 1536), of DINOv2-giant", fix=fix)
        return states[:1]
    if "image_encoder" not in pipeline.parts.readers:
        found = "no DINOv2 for the PBR model"
        fix = "Choose facebook/dinov2-giant on the load node, connect CLIP Vision Encode, or add --image-encoder."
        raise InputError(found, expected="the folder of DINOv2-giant, or its CLIP_VISION_OUTPUT", fix=fix)
    return dino_states(pipeline, reference, progress, expected(pipeline, "image", run))


def decoded(pipeline: PaintPipeline, latents: Tensor, run: PaintRun, seed: int, progress: Any) -> Painted:
    """The pictures of scaled ``latents``, those past the views metal and roughness; a host gets these latents first."""
    plain, need = latents / pipeline.latent_scale, vae_bytes(DECODED, run.size, pipeline.precision.vae)
    if (tell := getattr(progress, "sampled", None)) is not None:  # so that a failure to decode does not lose them
        tell(plain, pipeline.family, seed, pipeline.latent_format)
    with stage(pipeline, "decoding", "vae", need, run, progress) as module:
        pictures = vae.decoded(module, plain, pipeline.offloader.device, progress)
    for part, blocks in pipeline.compiled.items():
        progress.notify(f"{part}: {blocks}")
    return Painted(pictures[: run.views], pictures[run.views :] if len(pictures) > run.views else None, plain)


def to_latent(pipeline: PaintPipeline, painted: Painted) -> dict[str, Any]:
    """Core's LATENT of painted views, with our key of plain values, which core nodes ignore."""
    record = {"family": pipeline.family, "variant": pipeline.variant, "views": len(painted.views)}
    return {"samples": painted.latents, LATENT_KEY: record}


def latents_of(pipeline: PaintPipeline, latent: Mapping[str, Any] | None) -> Tensor | None:
    """The samples of core's LATENT, if any; raises InputError for another family's, another shape, or a noise mask."""
    if latent is None:
        return None
    samples, made_by = latent.get("samples"), (latent.get(LATENT_KEY) or {}).get("family", pipeline.family)
    if not isinstance(samples, Tensor) or samples.ndim != 4 or made_by != pipeline.family:
        found = f"a LATENT of {made_by} with {getattr(samples, 'ndim', 'no')} dimensions for painting"
        fix = "Connect the latent of an AnyGPU Paint Views node of the same model."
        raise InputError(found, expected=f"views of {pipeline.family}, (V, 4, h, w)", fix=fix)
    if latent.get("noise_mask") is not None:
        fix = "Connect the latent without Set Latent Noise Mask."
        raise InputError("a LATENT with a noise mask for painting", expected="one without", fix=fix)
    return samples
