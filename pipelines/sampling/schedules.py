"""Noise levels, the solver that walks down them, and the steps that guidance acts at: the same for every family."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ...compat.errors import InputError
from ...compat.ranks import Group
from ..base import SampleSettings

Predict = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]  # from latents, timestep and index
PLAIN: dict[str, Any] = {  # a schedule that is used exactly as given
    "shift": 1.0,
    "use_dynamic_shifting": False,
    "shift_terminal": None,
    "use_karras_sigmas": False,
    "use_exponential_sigmas": False,
    "use_beta_sigmas": False,
}
TRAIN_TIMESTEPS = 1000
UNIPC_BH1 = "unipc_bh1"
ORDER = 3  # of FlowUniPC
FIRST_LEVEL_MARGIN = 1e-6  # multistep solvers take log(1 - level): upstream moves a first level of 1 by as much


@dataclass(frozen=True, slots=True)
class Levels:
    """Input of a family's scheduler: either sigmas or timesteps, and the dynamic shift."""

    sigmas: Sequence[float] | None = None
    timesteps: Sequence[float] | None = None
    mu: float | None = None


def even_levels(steps: int, mu: float | None = None) -> Levels:
    """``steps`` levels evenly spaced from 1 down to 1 / ``steps``, before the scheduler shifts them."""
    import numpy

    return Levels(sigmas=numpy.linspace(1.0, 0.0, steps + 1)[:-1].tolist(), mu=mu)


def read_between(trained: Sequence[float], steps: int) -> list[float]:
    """The levels at which ``steps`` steps begin, read at even distances from the ``trained`` ones of a distilled model.
    A final 0 in ``trained`` is where the last step ends: no step begins there."""
    import numpy

    places = numpy.linspace(0, len(trained) - 1, steps + (trained[-1] == 0))[:steps]
    return numpy.interp(places, range(len(trained)), trained).tolist()


@dataclass(frozen=True, slots=True)
class Schedule:
    """Timesteps for the transformer, noise levels, and one step of the solver."""

    solver: Any  # a diffusers scheduler whose timesteps and sigmas are set
    timesteps: torch.Tensor  # what the transformer is given, (steps,), fp32, on the device
    levels: tuple[float, ...]  # share of noise before each step and after the last, falling; ``steps + 1`` long
    sign: int  # 1 where the transformer predicts noise minus data, -1 where it predicts data minus noise (Mochi)
    native: bool  # the solver takes the transformer's output and timesteps as they are

    def __len__(self) -> int:
        return len(self.timesteps)

    def step(self, output: torch.Tensor, index: int, latents: torch.Tensor) -> torch.Tensor:
        """Latents one noise level lower; fp32."""
        velocity = output if self.native else self.sign * output
        time = self.timesteps[index] if self.native else self.solver.timesteps[index]
        return self.solver.step(velocity, time, latents, return_dict=False)[0].float()

    def put_back(self) -> Callable[[], None]:
        """Return a function that resets the solver to its present state, for a step that is tried again."""
        standing = copied(vars(self.solver))

        def back() -> None:
            vars(self.solver).clear()
            vars(self.solver).update(copied(standing))

        return back

    def clean(self, output: torch.Tensor, index: int, latents: torch.Tensor) -> torch.Tensor:
        """The clean latents that the prediction implies, for a preview."""
        return latents - self.levels[index] * self.sign * output


def copied(solver_fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a solver, with lists of their own: it changes them in place."""
    return {name: list(value) if isinstance(value, list) else value for name, value in solver_fields.items()}


def schedule_for(
    config: Mapping[str, Any], settings: SampleSettings, steps: int, levels_for: Any, device: torch.device
) -> Schedule:
    """The schedule for one sampling of ``steps`` steps: the sigmas of ``settings``, else the family's levels. A
    ``denoise`` below 1 keeps the last ``steps`` of about ``steps`` / ``denoise`` levels. ``config`` is that of the
    model folder's scheduler; ``levels_for`` gives :class:`Levels` for a number of steps. Raises InputError for sigmas
    that do not fall from at most 1 to 0, too few steps, or too large a video."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    if settings.sigmas is not None:
        sigmas = _require_falling(settings.sigmas)
        euler = FlowMatchEulerDiscreteScheduler.from_config(config, **PLAIN)
        euler.set_timesteps(sigmas=list(sigmas[:-1]), device=device)
    else:
        overrides = {"use_dynamic_shifting": False, "shift": settings.shift} if settings.shift else {}
        euler = FlowMatchEulerDiscreteScheduler.from_config(config, **overrides)
        whole = max(steps, math.floor(steps / settings.denoise)) if settings.denoise > 0 else steps
        chosen = levels_for(whole)
        # One step leaves a stretched schedule no span to stretch, and a second pass that skips it no level at all.
        if whole == 1 and (euler.config.shift_terminal or not (chosen.sigmas or chosen.timesteps)):
            expected, fix = "at least 2 steps for this model's schedule", "Set steps to 2 or more."
            raise InputError("steps 1", expected=expected, fix=fix)
        try:
            _set(euler, chosen, device)
        except OverflowError as error:  # the exponential of a shift that grows with the number of tokens
            size = f"{settings.width}x{settings.height}, {settings.frames} frames"
            fix = "Lower width, height or frames, or set shift on the sample node."
            raise InputError(size, expected="a video small enough for this model's noise schedule", fix=fix) from error
        euler.timesteps, euler.sigmas = euler.timesteps[-steps:], euler.sigmas[-steps - 1 :]
    euler.set_begin_index(0)
    inverted = bool(euler.config.invert_sigmas)
    levels = tuple((1.0 - euler.sigmas if inverted else euler.sigmas).tolist())
    native = settings.scheduler in ("auto", "euler")
    solver = euler if native else _solver(settings.scheduler, levels, device)
    sign = -1 if inverted else 1
    return Schedule(solver=solver, timesteps=euler.timesteps, levels=levels, sign=sign, native=native)


def _set(scheduler: Any, levels: Levels, device: torch.device) -> None:
    """Set the timesteps and sigmas of a diffusers scheduler to ``levels``."""
    mu = levels.mu if scheduler.config.use_dynamic_shifting else None
    if levels.timesteps is not None:
        # Timesteps alone make upstream warn; with the sigmas it would derive from them itself it does not.
        sigmas = torch.tensor(levels.timesteps, dtype=torch.float32) / scheduler.config.num_train_timesteps
        scheduler.set_timesteps(timesteps=list(levels.timesteps), sigmas=sigmas.tolist(), device=device, mu=mu)
    else:
        scheduler.set_timesteps(sigmas=list(levels.sigmas or ()), device=device, mu=mu)


def _solver(name: str, levels: tuple[float, ...], device: torch.device) -> Any:
    """The multistep solver ``name`` on these noise levels, which takes noise minus data as the prediction."""
    from diffusers import DPMSolverMultistepScheduler, UniPCMultistepScheduler

    solvers: dict[str, Any] = {"unipc": UniPCMultistepScheduler, "dpm++_2m": DPMSolverMultistepScheduler}
    if name == UNIPC_BH1:
        return FlowUniPC(levels, device)
    solver = solvers[name](
        num_train_timesteps=TRAIN_TIMESTEPS, prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=1.0
    )
    solver.set_timesteps(len(levels) - 1, device=device)
    sigmas = torch.tensor(levels, dtype=torch.float32)
    sigmas[0] = sigmas[0].clamp(max=1.0 - FIRST_LEVEL_MARGIN)
    solver.sigmas = sigmas
    solver.timesteps = (sigmas[:-1] * TRAIN_TIMESTEPS).to(device)
    solver.set_begin_index(0)
    return solver


class FlowUniPC:
    """UniPC of third order, as FramePack was published, with the interface and the fields of a diffusers scheduler.

    Diffusers' ``UniPCMultistepScheduler`` (our ``unipc``) takes the logarithm of (1 - level) / level and bh2. This one
    takes that of 1 / level and bh1, needs no margin below 1, and ends at the clean latents that its last call implies.

    Source: lllyasviel/FramePack 97fe5db, ``diffusers_helper/k_diffusion/uni_pc_fm.py``; Zhao et al., UniPC (2023)."""

    def __init__(self, levels: tuple[float, ...], device: torch.device) -> None:
        self.levels = levels  # share of noise before each step and after the last, falling
        self.timesteps = torch.tensor(levels[:-1], device=device) * TRAIN_TIMESTEPS
        self.index = 0
        self.clean: list[torch.Tensor] = []  # the newest estimates, oldest first
        self.corrected: torch.Tensor | None = None  # the latents of the step before

    def step(
        self, velocity: torch.Tensor, time: torch.Tensor, latents: torch.Tensor, return_dict: bool = False
    ) -> tuple[torch.Tensor]:
        """The latents one level lower, fp32; ``velocity`` is noise minus data at ``latents``; the rest is unused."""
        clean = latents.float() - self.levels[self.index] * velocity.float()
        corrected = latents.float()
        if self.corrected is not None:
            corrected = self._moved(self.corrected, self.index - 1, clean)
        self.clean, self.corrected, self.index = [*self.clean, clean][-ORDER:], corrected, self.index + 1
        return (clean if self.levels[self.index] <= 0 else self._moved(corrected, self.index - 1),)

    def _moved(self, latents: torch.Tensor, index: int, reached: torch.Tensor | None = None) -> torch.Tensor:
        """``latents`` from level ``index`` to the next one; corrected where its clean estimate ``reached`` is known."""
        level, lower = self.levels[index : index + 2]
        order = max(1, min(index + 1, ORDER, len(self.levels) - 2))
        width = math.log(lower / level)
        now, older = self.clean[-1], self.clean[-order:-1][::-1]
        ratios = [math.log(self.levels[index - back] / level) / width for back in range(1, order)]
        changes = [(each - now) / ratio for each, ratio in zip(older, ratios, strict=True)]
        if reached is not None:
            ratios.append(1.0)
            changes.append(reached - now)
        moved = lower / level * latents - math.expm1(width) * now
        for weight, change in zip(_weights(ratios, width), changes, strict=True):
            moved = moved - width * weight * change
        return moved


def _weights(ratios: list[float], width: float) -> list[float]:
    """UniPC's weights of the changes at ``ratios`` of a step of log-level ``width``, by its equations; 0.5 for one."""
    import numpy

    if len(ratios) == 1:
        return [0.5]
    phi, sums = math.expm1(width) / width - 1.0, []
    for power in range(1, len(ratios) + 1):
        sums.append(math.factorial(power) * phi / width)
        phi = phi / width - 1.0 / math.factorial(power + 1)
    rows = [[ratio**power for ratio in ratios] for power in range(len(ratios))]
    return list(map(float, numpy.linalg.solve(rows, sums))) if ratios else []


def _require_falling(sigmas: Sequence[float]) -> Sequence[float]:
    """``sigmas``; InputError unless they fall from at most 1 to 0: above 0 noisy latents would pass for clean."""
    falling = all(a > b for a, b in itertools.pairwise(sigmas))
    if len(sigmas) < 2 or not falling or sigmas[0] > 1.0 + 1e-6 or not 0.0 <= sigmas[-1] <= 1e-6:
        shown = ", ".join(f"{sigma:.3g}" for sigma in sigmas[:4])
        raise InputError(
            f"sigmas [{shown}{', ...' if len(sigmas) > 4 else ''}]",
            expected="at least two falling noise levels, starting at 1 or below and ending at 0",
            fix="Use all levels of a scheduler node for flow models, such as Basic Scheduler on a flow model.",
        )
    return sigmas


def classifier_free_guidance(cond: torch.Tensor, uncond: torch.Tensor, scale: float) -> torch.Tensor:
    """The prediction without the prompt, moved ``scale`` times as far towards the one with it. Source: Ho and Salimans,
    Classifier-Free Diffusion Guidance (2022), in diffusers' order of operations."""
    return uncond + scale * (cond - uncond)


@dataclass(frozen=True, slots=True)
class Guidance:
    """Guidance of ``steps`` steps by ``cfg``, ``cfg_start``, ``cfg_end`` and ``guidance_rescale`` of ``settings``."""

    settings: SampleSettings
    steps: int

    def acts(self, index: int) -> bool:
        """True if step ``index`` needs a prediction without the prompt besides the one with it."""
        settings = self.settings
        return settings.cfg > 1.0 and settings.cfg_start <= index / self.steps < settings.cfg_end

    def over(self, group: Group | None, branch: Callable[..., torch.Tensor], names: Sequence[str]) -> Predict:
        """A function from (latents, timestep, index) to the guided prediction. ``branch`` calls the transformer, from a
        name, latents, timestep and index; ``names`` has the one with the prompt, then the one without it. The halves of
        ``group`` may compute one each."""

        def predict(latents: torch.Tensor, time: torch.Tensor, index: int) -> torch.Tensor:
            prompted, plain = (partial(branch, name, latents, time, index) for name in names)
            if not self.acts(index):
                return prompted()
            return self.guide(*((prompted(), plain()) if group is None else group.both(prompted, plain)))

        return predict

    def guide(self, cond: torch.Tensor, uncond: torch.Tensor) -> torch.Tensor:
        """The guided prediction, its spread moved to that of ``cond`` by the share ``guidance_rescale``. Source: Lin et
        al., Common Diffusion Noise Schedules and Sample Steps are Flawed (2024), section 3.4."""
        guided = classifier_free_guidance(cond, uncond, self.settings.cfg)
        if self.settings.guidance_rescale <= 0:
            return guided
        from diffusers.guiders.guider_utils import rescale_noise_cfg

        return rescale_noise_cfg(guided, cond, guidance_rescale=self.settings.guidance_rescale)

    def guide_batch(self, output: torch.Tensor) -> torch.Tensor:
        """The guided prediction of a batch of two, without the prompt and with it; a batch of one as it is."""
        if output.shape[0] == 1:
            return output
        uncond, cond = output.chunk(2)
        return self.guide(cond, uncond)
