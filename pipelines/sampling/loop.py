"""The denoising loop that all families share: noise in, latents out, previews, cancel, masks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from ...compat.device.execution import HOST, checked_layers, state_of, to_host
from ...compat.device.failures import DEVICE_ERRORS, is_shortage
from ...compat.doctor import EXPLAIN, Doctor, lifeless, unshrunk
from ...compat.errors import UnsupportedError
from ...compat.memory.parts import adapters_on
from ...compat.output_check import NotFinite, require_finite
from ...compat.repairs import RepairStore
from ...compat.transforms.fp16 import fp16_sums
from ...compat.transforms.step_cache import cached, require_usable
from ..base import Latents, Progress, ProgressStage, SampleSettings
from ..family import FamilySpec
from ..pipeline import Pipeline, make_room_and_retry
from ..settings import STEP_CACHE, recipe_of
from ..sizes import TRANSFORMER, beside_transformer
from .resume import Steps
from .schedules import Predict, Schedule

Again = Callable[[BaseException], bool]  # from an error: True to try again
SAMPLING = ProgressStage("sampling")
RESUMABLE = replace(SAMPLING, resumable=True)
TRIES = 16  # of a stage or a step; each has more room than the one before
TO_FP32 = "fp16-safe gave values that are not finite: reading the transformer again and continuing in fp32"


@dataclass(frozen=True, slots=True)
class NoiseMask:
    """Regions to sample, and the contents of the rest of the video."""

    clean: torch.Tensor  # shaped as the latents that are sampled
    noise: torch.Tensor
    mask: torch.Tensor  # 1 where to sample, 0 where the clean latents stay

    def over(self, latents: torch.Tensor, level: float) -> torch.Tensor:
        """``latents`` with the part that stays at noise ``level``."""
        return self.mask * latents + (1.0 - self.mask) * ((1.0 - level) * self.clean + level * self.noise)


def noise_mask_for(settings: SampleSettings, clean: torch.Tensor | None, noise: torch.Tensor) -> NoiseMask | None:
    """The mask of ``settings``, at each latent's centre pixel; None without a mask or without ``clean`` latents."""
    if settings.noise_mask is None or clean is None:
        return None
    mask = settings.noise_mask.float()
    mask = mask.reshape(1, 1, -1, *mask.shape[-2:])
    mask = functional.interpolate(mask, size=(mask.shape[2], *clean.shape[3:]), mode="nearest-exact")
    mask = functional.interpolate(mask, size=clean.shape[2:], mode="nearest").to(clean)
    return NoiseMask(clean, noise, mask)


def noise_for(shape: tuple[int, ...], generator: torch.Generator, device: torch.device) -> torch.Tensor:
    """Gaussian noise, fp32, drawn on the CPU whatever the device, so that a seed means one video."""
    return torch.randn(shape, generator=generator, dtype=torch.float32).to(device)


def latent_shape(spec: FamilySpec, channels: int, size: SampleSettings) -> tuple[int, int, int, int, int]:
    """(1, C, T, H, W): the latents of one video of ``size``."""
    ratio, stride = spec.sizes.ratios
    return 1, channels, (size.frames - 1) // stride + 1, size.height // ratio, size.width // ratio


def start_from(clean: torch.Tensor | None, noise: torch.Tensor, schedule: Schedule) -> torch.Tensor:
    """The latents that sampling starts from: ``clean`` under the first noise level; without it zeros, as core has."""
    level = schedule.levels[0]
    return level * noise if clean is None else level * noise + (1.0 - level) * clean


def sampled_latents(
    pipeline: Pipeline, samples: torch.Tensor, settings: SampleSettings, generator: torch.Generator, **extra: Any
) -> Latents:
    """``samples`` (1, C, T, H, W) in core's space, on the CPU, with what ``settings`` asked for and ``extra``."""
    asked = {name: getattr(settings, name) for name in ("frames", "height", "width", "fps", "seed")}
    known = {"generator_state": state_of(generator), **extra}
    return Latents(samples, pipeline.family, pipeline.model.task, **asked, extra=known)


@dataclass(frozen=True, slots=True)
class Watch:
    """The doctor beside one sampling: checks steps, explains the first that is wrong, goes on with what was saved."""

    networks: nn.ModuleDict  # the transformers by their parts' names
    # The pipeline's own checks every step; None checks the first and the last one, where an overflow shows.
    doctor: Doctor | None
    tell: Callable[[str], None]

    def over(self, predict: Predict, count: int) -> Predict:
        """``predict`` with the doctor's repairs and checks in each of ``count`` steps; without a doctor, with checks of
        the first and the last. Raises NotFinite, with the layer, where an output holds NaN or infinity."""

        def checked(latents: torch.Tensor, time: torch.Tensor, index: int) -> torch.Tensor:
            run, step = partial(predict, latents, time, index), f"step {index + 1} of {count}"
            if self.doctor is not None:
                with self.doctor.repaired(self.networks):
                    return self.doctor.checked(run(), self.networks, run, step, lifeless)
            output = run()
            if 0 < index < count - 1 or bool(output.isfinite().all()):
                return output
            return Doctor("", RepairStore(None), EXPLAIN, self.tell).checked(output, self.networks, run, step)

        return checked


class Safeguards(NamedTuple):
    """Reactions of one run of the loop to errors, non-finite values, and interruption; each may be None."""

    again: Again | None = None  # called with an error in a step; True to try it again, from where it began
    watch: Watch | None = None  # over the transformer that is called
    steps: Steps | None = None  # saves them, and knows of those done before


def safeguards_of(pipeline: Pipeline, progress: Progress, generator: torch.Generator, section: int = 0) -> Safeguards:
    """The safeguards of one run of the loop that holds the transformers of ``pipeline``. The state of ``generator`` is
    saved with the steps; ``section`` is that of the video, for a family that samples it in several."""
    steps = None if pipeline.run.resuming is None else Steps(pipeline.run.resuming, generator, section)
    return Safeguards(make_room_and_retry(pipeline, progress), _watch_of(pipeline, progress), steps)


def _watch_of(pipeline: Pipeline, progress: Progress) -> Watch | None:
    """The watch over a sampling, which tells the user what earlier runs found wrong on this device. None on several
    devices, each of which would stop its search at another layer while the others wait there; None also where no doctor
    was asked for and precision ``auto`` can fall back."""
    doctor = pipeline.run.doctor
    if pipeline.run.group is not None or (doctor is None and pipeline.parts.fallbacks):
        return None
    for missed, path in ({} if (probes := pipeline.device.probes) is None else probes.misses()).items():
        progress.notify(f"wrong in earlier runs on this device: {missed}; {path} instead")
    networks = {part: pipeline.parts[part] for part in pipeline.spec.transformers if part in pipeline.parts}
    return Watch(nn.ModuleDict(networks), doctor, progress.notify)


@contextmanager
def held_transformer(
    pipeline: Pipeline, settings: SampleSettings, progress: Progress, span: int = 9, **more: Any
) -> Iterator[Any]:
    """The transformer on its device, with room for a forward; a cancel is obeyed in each of its layers. ``span`` is the
    ``window`` of :func:`beside_transformer`, in latent frames, which takes ``more``, too."""
    hold = pipeline.offloader.hold(TRANSFORMER, beside_transformer(pipeline, settings, span, **more), progress)
    with hold as transformer, checked_layers(transformer, progress.check):
        yield transformer


def denoise(
    latents: torch.Tensor, schedule: Schedule, predict: Predict, *, progress: Progress,
    noise_mask: NoiseMask | None = None, preview: Callable[[torch.Tensor], torch.Tensor] | None = None,
    step: Callable[[torch.Tensor, int, torch.Tensor], torch.Tensor] | None = None, safeguards: Safeguards,
) -> torch.Tensor:  # fmt: skip
    """Latents at the last noise level, from ``latents`` at the first, fp32, on the device. ``predict`` gives the
    transformer's guided output for (latents, timestep, index); ``preview`` shapes latents as (1, C, T, H, W) where the
    family samples in another shape; ``step`` replaces the schedule's own step, and must put back what it remembers
    where it fails. Raises NotFinite where an output that is watched holds NaN or infinity; without a watch, where the
    first or the last latents do."""
    again, watch, steps = safeguards
    if watch is not None and watch.doctor is not None:
        watch.doctor.told.clear()  # of the decode before
    advance, count, start = step or schedule.step, len(schedule), latents
    watched = predict if watch is None else watch.over(predict, count)
    latents, done = (latents, 0) if steps is None else steps.restored(latents, schedule.solver, count)
    with nullcontext() if steps is None else steps.saved_when_interrupted(count):
        for index, time in enumerate(schedule.timesteps):
            if index < done:
                continue
            progress.check()
            before = latents
            for attempt in retries(again, schedule.put_back()):
                with attempt:
                    output = watched(before, time, index).float()
                    latents = advance(output, index, before)
                    if noise_mask is not None:
                        latents = noise_mask.over(latents, schedule.levels[index + 1])
                    if watch is None and index in (0, count - 1):
                        # A transformer that overflows does so at once: hours are not spent on a black video.
                        require_finite(latents, "sampled latents" if index else "latents after the first step")
            if steps is not None:
                steps.save(index + 1, latents, schedule.solver, count)
            stage = SAMPLING if steps is None or not steps.resumable() else RESUMABLE
            progress.step(index + 1, count, stage, partial(_estimate, schedule.clean, output, index, before, preview))
    if watch is not None and watch.doctor is not None:
        stuck = unshrunk(start, latents) if schedule.levels[0] > 0.5 else ""  # below, what begins is a picture too
        watch.doctor.conclude(stuck, f"no fault in {count} steps")
    return latents


@dataclass(slots=True)
class RetryScope(AbstractContextManager["RetryScope"]):
    """One run of a block that may be run again: the ``with`` around it takes in errors of the kinds ``catches``."""

    catches: tuple[type[Exception], ...]
    error: Exception | None = None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, self.catches):
            return False
        self.error = error.with_traceback(None)  # whose frames hold the tensors of the failed try
        return True


def retries(
    again: Again | None,
    restore: Callable[[], None] = lambda: None,
    catches: tuple[type[Exception], ...] = (RuntimeError, MemoryError),
) -> Iterator[RetryScope]:
    """Tries of a block until one succeeds, for ``for attempt in retries(again):`` around ``with attempt:``. After each
    error that ``catches`` names, ``restore`` puts things back as they were before the try, then ``again`` is called
    with it; False raises the error, as does the last of TRIES. Without ``again`` every error is raised at once."""
    for _ in range(TRIES):
        attempt = RetryScope(() if again is None else catches)
        yield attempt
        if attempt.error is None:
            return
        restore()
        if again is None or not again(attempt.error):
            break
    assert attempt.error is not None
    raise attempt.error


@contextmanager
def sampling_speed(pipeline: Pipeline, settings: SampleSettings, progress: Progress) -> Iterator[None]:
    """Around a sampling: the pipeline's step cache and fp16 sums; says after it what ran and what was skipped. Raises
    UnsupportedError for a step cache on several devices."""
    cache, speed = pipeline.plan.step_cache, pipeline.plan.speed
    with ExitStack() as stack:
        if speed.request.fp16_sums:
            stack.enter_context(fp16_sums())
        counts: dict[str, Any] = {}
        recipe = recipe_of(pipeline, settings)
        skipped = 0 if recipe is None else sum(recipe.skips(settings.steps))
        if cache is not None and pipeline.run.group is not None:
            found = f"step cache {cache.kind!r} on {pipeline.run.group.world.size} devices"
            expected = "no step cache, since each device would decide by its own tokens what to skip"
            raise UnsupportedError(found, expected=expected, fix="Set the step cache to off for these jobs.")
        for part in () if cache is None else pipeline.spec.transformers:
            mover = pipeline.offloader
            with adapters_on(pipeline.parts, part, mover.adapters, mover.detach, progress) as transformer:
                pass  # LoRAs go in before the cache: later they redo the steps behind them and drop its forwards
            stg = max((each.stg for each in settings.guidance_steps), default=0.0)
            require_usable(cache, transformer, settings.cfg, pipeline.spec.recipes.batched_cfg, stg)
            counts[part] = stack.enter_context(cached(transformer, cache, settings.steps - skipped))
        yield
    for part, count in counts.items():
        progress.notify(f"{STEP_CACHE} {cache}{'' if part == TRANSFORMER else f', {part}'}: {count}")
    speed.notify(pipeline.spec.title, progress.notify)


def fall_back_to_fp32(pipeline: Pipeline, progress: Progress, error: BaseException) -> bool:
    """Switch to fp32 and abandon saved steps if ``error`` is NotFinite and ``auto`` chose the precision; True if so."""
    fallbacks = pipeline.parts.fallbacks
    if not fallbacks or not isinstance(error, NotFinite):
        return False
    if pipeline.run.resuming is not None:
        pipeline.run.resuming.abandon()
    for part in tuple(fallbacks):
        pipeline.offloader.release(part)
        pipeline.parts.drop(part)
        fallbacks.pop(part)()
    progress.notify(TO_FP32)
    return True


def _estimate(
    clean: Callable[[torch.Tensor, int, torch.Tensor], torch.Tensor],
    output: torch.Tensor,
    index: int,
    latents: torch.Tensor,
    shaped: Callable[[torch.Tensor], torch.Tensor] | None,
) -> torch.Tensor:
    """The clean estimate for a preview, through ``shaped`` if given; the noisy ``latents`` where the output has another
    shape. Made on the host where the device has no room for it."""
    try:
        video = clean(output, index, latents) if output.shape == latents.shape else latents
        return shaped(video) if shaped is not None else video
    except DEVICE_ERRORS as error:
        if not is_shortage(error) or latents.device.type == HOST.type:
            raise
    return _estimate(clean, to_host(output), index, to_host(latents), shaped)  # with the failed try's tensors gone
