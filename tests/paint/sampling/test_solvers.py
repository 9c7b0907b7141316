"""The solvers against diffusers' schedulers on the published configurations, and the noise they draw."""

import json

import pytest
import torch
from anygpu.compat.errors import InputError
from anygpu.paint.sampling import solvers
from paint.stored import FIXTURES, values

START = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))
PUBLISHED = {
    key: value
    for key, value in json.loads(
        (FIXTURES / "paintpbr_v2_1" / "scheduler_config.json").read_text(encoding="utf-8")
    ).items()
    if key not in ("_class_name", "skip_prk_steps")
}
ROUNDING = 1e-5  # the same sums in another order


def network(x: torch.Tensor, time: float) -> torch.Tensor:
    return torch.sin(1.3 * x + time / 1000) * 0.7


def ours(name, schedule, seed=1):
    generator, solver = torch.Generator().manual_seed(seed), solvers.solver_for(name, schedule)
    x = solver.begin(START)
    for index, time in enumerate(schedule.timesteps):
        velocity = network(solver.model_input(x, index), time)
        x = solver.step(velocity, index, x, lambda: torch.randn(START.shape, generator=generator))
    return x


def upstream(scheduler, **steps):
    scheduler.set_timesteps(**steps)
    generator, x = torch.Generator().manual_seed(1), START * scheduler.init_noise_sigma
    named = {"generator": generator} if "generator" in scheduler.step.__code__.co_varnames else {}
    for time in scheduler.timesteps:
        velocity = network(scheduler.scale_model_input(x, time), float(time))
        x = scheduler.step(velocity, time, x, return_dict=False, **named)[0]
    return x, scheduler


def test_euler_ancestral_is_upstreams():
    from diffusers import EulerAncestralDiscreteScheduler

    schedule = solvers.schedule_for("trailing", 30, zero_snr=True)
    wanted, scheduler = upstream(
        EulerAncestralDiscreteScheduler.from_config(PUBLISHED, timestep_spacing="trailing"), num_inference_steps=30
    )
    assert list(schedule.timesteps) == scheduler.timesteps.tolist()
    assert schedule.start == pytest.approx(4096, rel=1e-6)
    assert (ours("euler_ancestral", schedule) - wanted).abs().max() <= ROUNDING


def test_turbo_takes_its_ten_fixed_steps():
    from diffusers import LCMScheduler

    schedule = solvers.lcm_schedule(10, zero_snr=True)
    assert schedule.timesteps == (989, 890, 791, 692, 593, 494, 395, 296, 197, 98)
    wanted, _ = upstream(LCMScheduler.from_config(PUBLISHED), num_inference_steps=10, original_inference_steps=30)
    assert (ours("lcm", schedule) - wanted).abs().max() <= ROUNDING


@pytest.mark.parametrize("steps", [4, 15])
def test_unipc_is_upstreams(steps):
    from diffusers import UniPCMultistepScheduler

    wanted, scheduler = upstream(
        UniPCMultistepScheduler.from_config(PUBLISHED, timestep_spacing="trailing"), num_inference_steps=steps
    )
    schedule = solvers.schedule_for("trailing", steps, zero_snr=True)
    assert list(schedule.timesteps) == scheduler.timesteps.tolist()
    assert (ours("unipc", schedule) - wanted).abs().max() <= ROUNDING


@pytest.mark.parametrize(
    ("kind", "name", "spacing", "zero_snr"),
    [("paint", "pipeline_euler", "trailing", True), ("delight", "pipeline_default_nocfg", "leading", False)],
)
def test_levels_of_the_fixtures(kind, name, spacing, zero_snr):
    given = values(kind, f"{name}.in")
    schedule = solvers.schedule_for(spacing, len(given["timesteps"]), zero_snr)
    assert list(schedule.timesteps) == given["timesteps"].tolist()
    assert torch.allclose(torch.tensor(schedule.sigmas), given["sigmas"], rtol=1e-6)


def test_karras_and_own_sigmas_fall_to_zero_at_the_times_of_their_levels():
    schedule = solvers.schedule_for("karras", 5, zero_snr=True)
    assert schedule.sigmas[0] == pytest.approx(14.6146)
    assert schedule.sigmas[-1] == 0
    exact = solvers.schedule_of([float(schedule.table[700]), float(schedule.table[200]), 0.0], zero_snr=True)
    assert exact.timesteps == pytest.approx((700, 200))
    assert solvers.schedule_for("leading", 1000, False).timesteps == tuple(reversed(range(1000))), "each once"


def test_plain_euler_draws_nothing_and_finds_what_the_prediction_implies():
    solver = solvers.EulerAncestral(solvers.schedule_for("trailing", 4, zero_snr=True), eta=0.0)
    clean, noise = torch.full((1, 4, 2, 2), 0.5), torch.ones(1, 4, 2, 2)
    x = solver.begin(noise, clean)
    for index, sigma in enumerate(solver.schedule.sigmas[:-1]):
        scale = (sigma**2 + 1) ** 0.5
        velocity = noise / scale - clean * sigma / scale
        assert solver.clean(velocity, index, x) == pytest.approx(clean, abs=2e-3)
        x = solver.step(velocity, index, x, None)
    assert torch.allclose(x, clean, atol=1e-3)


@pytest.mark.parametrize("name", [name for name in solvers.SCHEDULERS if name != "auto"])
def test_denoise_starts_from_the_given_latents_at_the_level_of_the_rest(name):
    schedule = (solvers.lcm_schedule(10, True) if name == "lcm" else solvers.schedule_for("trailing", 10, True)).tail(3)
    solver, clean = solvers.solver_for(name, schedule), torch.full((1, 4, 2, 2), 0.5)
    x, sigma = solver.begin(torch.ones_like(clean), clean), schedule.sigmas[0]
    assert len(schedule) == 3
    assert torch.allclose(solver.model_input(x, 0), (clean + sigma) / (sigma**2 + 1) ** 0.5)


@pytest.mark.parametrize(
    "call",
    [
        lambda: solvers.schedule_for("trailing", 0, True),
        lambda: solvers.schedule_for("nowhere", 4, True),
        lambda: solvers.lcm_schedule(31, True),
        lambda: solvers.schedule_of([1.0, 2.0, 0.0], True),
        *(lambda high=high: solvers.schedule_of([high, 2.0, 0.0], True) for high in (float("inf"), float("nan"))),
        lambda: solvers.solver_for("dpm", solvers.schedule_for("trailing", 4, True)),
    ],
)
def test_unusable_choices_are_refused(call):
    with pytest.raises(InputError):
        call()


def test_a_step_over_most_of_the_noise_is_finite():
    """What is left of the squares in fp32 can be below 0 there."""
    solver = solvers.EulerAncestral(solvers.schedule_for("trailing", 4, zero_snr=True))
    solver.sigmas = torch.tensor([2254.19482421875, 0.45608028769493103])
    assert solver.step(torch.ones(4), 0, torch.ones(4), lambda: torch.ones(4)).isfinite().all()
