"""Noise levels and the solvers that walk down them: Euler ancestral, Euler, LCM and UniPC, for velocity predictions.

All arithmetic is fp32 on the CPU, where the few latents cost nothing: one seed gives one picture on every device."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ...compat.errors import InputError, require_choice
from ...compat.packages import attribute
from ..choices import SCHEDULERS, SPACINGS

TRAIN_STEPS = 1000
BETAS = (0.00085, 0.012)
LAST_SHARE = 2.0**-24  # alpha-bar of step 999 in a zero-SNR table: zero would be a sigma of infinity
OFFSET = 1  # steps_offset of the published configurations
KARRAS = (0.0292, 14.6146, 7.0)  # the usual range of Stable Diffusion; a ramp from 4096 would waste its steps
LCM_GRID = 30  # timesteps the distillation used
DATA_SIGMA, TIME_SCALE = 0.5, 10.0
Noise = Callable[[], Tensor]


@dataclass(frozen=True, slots=True)
class NoiseSchedule:
    """Timesteps for the network, noise levels before each step and after the last, and the whole table."""

    timesteps: tuple[float, ...]
    sigmas: tuple[float, ...]
    table: Tensor  # sigma of each training step, (1000,), float64
    start: float  # by how much fresh noise is multiplied

    def __len__(self) -> int:
        return len(self.timesteps)

    def tail(self, count: int) -> NoiseSchedule:  # its last ``count`` steps
        first = len(self) - count
        if not first:
            return self
        return NoiseSchedule(self.timesteps[first:], self.sigmas[first:], self.table, self.sigmas[first])


def sigma_table(zero_snr: bool, shift: float = 1.0) -> Tensor:
    """The noise level sqrt((1 - a) / a) of each training step, (1000,), float64. ``shift`` multiplies the squared level
    of the last step, and those before it by less."""
    first, last = (beta**0.5 for beta in BETAS)
    shares = torch.cumprod(1.0 - torch.linspace(first, last, TRAIN_STEPS, dtype=torch.float32) ** 2, dim=0)
    if zero_snr:  # in fp32, as upstream: the last levels are differences of nearly equal numbers
        roots = shares.sqrt()
        shares = ((roots - roots[-1]) * (roots[0] / (roots[0] - roots[-1]))) ** 2
        shares[-1] = LAST_SHARE
    ramp = torch.arange(TRAIN_STEPS, dtype=torch.float64) / (TRAIN_STEPS - 1)
    return ((1 - shares) / shares).sqrt().double() * shift ** (ramp / 2)


def velocity_of(noise: Tensor, unit: Tensor, sigma: float) -> Tensor:
    """The velocity that predicted ``noise`` means, from latents of ``unit`` variance at level ``sigma``."""
    return noise * math.sqrt(sigma**2 + 1) - unit * sigma


def schedule_for(spacing: str, steps: int, zero_snr: bool, shift: float = 1.0) -> NoiseSchedule:
    """The schedule of ``steps`` steps; raises InputError for an unknown spacing, or steps out of range."""
    import numpy

    if not 1 <= steps <= TRAIN_STEPS:
        found, expected = f"steps {steps} for painting", f"1 to {TRAIN_STEPS}"
        raise InputError(found, expected=expected, fix="The published samplers take 10 to 50.")
    require_choice("sigma schedule", spacing, SPACINGS)
    table = sigma_table(zero_snr, shift)
    if spacing == "karras":
        low, high, rho = KARRAS
        ramp = torch.linspace(0, 1, steps, dtype=torch.float64)
        levels = (high ** (1 / rho) + ramp * (low ** (1 / rho) - high ** (1 / rho))) ** rho
        return schedule_of([*levels.tolist(), 0.0], zero_snr, shift)
    if spacing == "trailing":
        times = [round(TRAIN_STEPS - index * TRAIN_STEPS / steps) - 1 for index in range(steps)]
    elif spacing == "leading":
        stride, offset = TRAIN_STEPS // steps, OFFSET if steps < TRAIN_STEPS else 0  # time 1000 is no row
        times = [index * stride + offset for index in reversed(range(steps))]
    else:  # linspace
        times = torch.linspace(TRAIN_STEPS - 1, 0, steps, dtype=torch.float64).tolist()
    sigmas = numpy.interp(times, range(TRAIN_STEPS), table).tolist()
    start = math.sqrt(sigmas[0] ** 2 + 1) if spacing == "leading" else sigmas[0]  # diffusers' init_noise_sigma
    return NoiseSchedule(tuple(map(float, times)), (*sigmas, 0.0), table, start)


def schedule_of(sigmas: Sequence[float], zero_snr: bool, shift: float = 1.0) -> NoiseSchedule:
    """The schedule through ``sigmas``, at the timesteps of these levels; raises InputError where they do not fall."""
    import numpy

    if len(sigmas) < 2 or sigmas[-1] < 0 or any(not a > b for a, b in pairwise((math.inf, *sigmas))):
        found = f"{len(sigmas)} sigmas for painting that do not fall"
        fix = "Use a scheduler node for Stable Diffusion, such as Basic Scheduler."
        raise InputError(found, expected="at least two noise levels falling towards 0", fix=fix)
    table = sigma_table(zero_snr, shift)
    logs = [math.log(max(sigma, 1e-9)) for sigma in sigmas[:-1]]
    times = numpy.interp(logs, table.log(), range(TRAIN_STEPS)).tolist()
    return NoiseSchedule(tuple(times), tuple(map(float, sigmas)), table, float(sigmas[0]))


def lcm_schedule(steps: int, zero_snr: bool, shift: float = 1.0) -> NoiseSchedule:
    """The schedule of the distillation, 989, 890, ... 98 for 10 steps; raises InputError for more than its grid has."""
    if not 1 <= steps <= LCM_GRID:
        found = f"steps {steps} for the lcm sampler"
        raise InputError(found, expected=f"1 to {LCM_GRID}", fix="Turbo was made for 10, which is what 0 means.")
    grid = [TRAIN_STEPS // LCM_GRID * index - 1 for index in range(LCM_GRID, 0, -1)]
    times = [grid[index * LCM_GRID // steps] for index in range(steps)]
    table = sigma_table(zero_snr, shift)
    return NoiseSchedule(tuple(map(float, times)), (*(float(table[time]) for time in times), 0.0), table, 1.0)


class EulerAncestral:
    """Euler steps of data plus sigma times noise; with ``eta`` 0 plain ones, which draw no fresh noise.

    In fp32, as diffusers: below a sigma of 4096 little is left of ``down``, and of its digits."""

    def __init__(self, schedule: NoiseSchedule, eta: float = 1.0) -> None:
        self.schedule, self.eta = schedule, eta
        self.sigmas = torch.tensor(schedule.sigmas, dtype=torch.float32)

    def begin(self, noise: Tensor, clean: Tensor | None = None) -> Tensor:
        """Latents to start from: pure noise, or ``clean`` with noise of the first level."""
        return noise * self.schedule.start if clean is None else clean + noise * self.schedule.sigmas[0]

    def model_input(self, x: Tensor, index: int) -> Tensor:  # as the network takes it
        return x / (self.sigmas[index] ** 2 + 1) ** 0.5

    def clean(self, velocity: Tensor, index: int, x: Tensor) -> Tensor:
        """The clean latents that the prediction implies."""
        sigma = self.sigmas[index]
        return velocity * (-sigma / (sigma**2 + 1) ** 0.5) + x / (sigma**2 + 1)

    def step(self, velocity: Tensor, index: int, x: Tensor, noise: Noise) -> Tensor:
        """The latents after step ``index``; ``noise`` draws the ancestral part, none with ``eta`` 0."""
        sigma, target = self.sigmas[index : index + 2]  # noise levels before and after the step
        up = self.eta * (target**2 * (sigma**2 - target**2) / sigma**2).clamp(min=0) ** 0.5
        down = (target**2 - up**2).clamp(min=0) ** 0.5  # below 0 by rounding, where a step takes nearly all noise away
        x = x + (x - self.clean(velocity, index, x)) / sigma * (down - sigma)
        return x + up * noise() if self.eta else x


class UnitVariance:
    """Base of the solvers whose latents keep unit variance."""

    def __init__(self, schedule: NoiseSchedule) -> None:
        self.schedule = schedule

    def begin(self, noise: Tensor, clean: Tensor | None = None) -> Tensor:
        data, share = self.shares(0)
        return noise if clean is None else data * clean + share * noise

    def model_input(self, x: Tensor, _index: int) -> Tensor:
        return x

    def shares(self, index: int) -> tuple[float, float]:
        """Shares of the data and of the noise in the latents before step ``index``."""
        sigma = self.schedule.sigmas[index]
        scale = 1 / math.sqrt(sigma**2 + 1)
        return scale, sigma * scale

    def clean(self, velocity: Tensor, index: int, x: Tensor) -> Tensor:
        data, share = self.shares(index)
        return data * x - share * velocity


class LatentConsistency(UnitVariance):
    """Jump to the clean latents, add noise of the next level."""

    def step(self, velocity: Tensor, index: int, x: Tensor, noise: Noise) -> Tensor:
        """The latents after step ``index``: clean after the last one, else with ``noise`` of the next level."""
        time = self.schedule.timesteps[index] * TIME_SCALE
        skip = DATA_SIGMA**2 / (time**2 + DATA_SIGMA**2)
        out = time / math.sqrt(time**2 + DATA_SIGMA**2)  # c_skip and c_out of consistency models
        clean = out * self.clean(velocity, index, x) + skip * x
        if index == len(self.schedule) - 1:
            return clean
        data, share = self.shares(index + 1)
        return data * clean + share * noise()


class UniPC(UnitVariance):
    """diffusers' UniPC, order 2, bh2, predicting x0."""

    def __init__(self, schedule: NoiseSchedule) -> None:
        super().__init__(schedule)
        cls: Any = attribute("diffusers", "UniPCMultistepScheduler")
        self.solver = cls(
            num_train_timesteps=TRAIN_STEPS,
            beta_start=BETAS[0],
            beta_end=BETAS[1],
            beta_schedule="scaled_linear",
            prediction_type="v_prediction",
            solver_order=2,
            solver_type="bh2",
            predict_x0=True,
        )
        self.solver.set_timesteps(len(schedule))
        self.solver.sigmas = torch.tensor(schedule.sigmas, dtype=torch.float32)
        # Whole and distinct: the solver finds its place by the timestep.
        self.solver.timesteps = torch.arange(len(schedule), 0, -1)
        self.solver.set_begin_index(0)

    def step(self, velocity: Tensor, index: int, x: Tensor, _noise: Noise) -> Tensor:
        return self.solver.step(velocity, self.solver.timesteps[index], x, return_dict=False)[0]


def solver_for(name: str, schedule: NoiseSchedule) -> Any:
    """The solver ``name`` on a schedule; raises InputError for an unknown name."""
    made: dict[str, Callable[[], Any]] = {
        "euler_ancestral": lambda: EulerAncestral(schedule),
        "euler": lambda: EulerAncestral(schedule, 0.0),
        "lcm": lambda: LatentConsistency(schedule),
        "unipc": lambda: UniPC(schedule),
    }
    require_choice("scheduler", name, SCHEDULERS, where=" for painting")
    return made[name]()
