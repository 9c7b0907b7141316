"""Failures inside core's own models, fitted to a device and watched by the doctor: what `tests/runs` injects."""

import contextlib
import random
from typing import Any

import comfy.model_management as management
import torch
from anygpu.compat.doctor import KEEP, Doctor
from anygpu.compat.repairs import RepairStore
from anygpu.host.core import doctor as core_doctor
from anygpu.host.core import model as core_model
from anygpu.host.core import vae as core_vae
from runs.faults import injected
from simulated.shortages import shortage

from host.inside import core_tiny, core_tiny_vaes
from host.inside.core_fit import machine_named

MACHINES = ("turing", "gfx1151", "mps-like", "xpu-like")
_answers: dict[str, dict[str, Any]] = {}  # of each machine, before anything was injected: some take seconds


def block(seed: str, count: int) -> dict[str, int]:
    """How ``count`` injections into one of core's models in tiny ended, on one of the machines."""
    rng = random.Random(seed)
    cases, make = rng.choice(((core_tiny.CASES, samples), (core_tiny_vaes.CASES, decodes)))
    name = rng.choice(list(cases))
    profile = rng.choice(MACHINES)
    with machine_named(profile) as machine:
        machine.probes._answers.update(_answers.get(profile, {}))
        runs = make(name, machine)
        _answers[profile] = machine.probes.known()
        return dict(injected(runs, rng, count, guest=True))


def samples(name: str, machine: Any) -> dict[str, Any]:
    """A step of the fitted model, whose weights arrive anew, and the same beside the doctor."""
    device = machine.facts.device
    fitted, _ = core_model.fit_model(core_tiny.made(name, device=device), keep_latents="never", machine=machine)

    def run(watched: bool) -> torch.Tensor:
        management.unload_all_models()
        doctor = Doctor("model", RepairStore(None), KEEP, lambda _: None)
        return core_tiny.output(core_doctor.watched_model(fitted, doctor, None) if watched else fitted, name)

    return {"fit": lambda: run(False), "fit and doctor": lambda: run(True)}


def decodes(name: str, machine: Any) -> dict[str, Any]:
    """A decode of the fitted VAE."""
    fitted, _ = core_vae.fit_vae(core_tiny_vaes.made(name, device=machine.facts.device), machine=machine)
    latents = core_tiny_vaes.latents_of(name)

    def run() -> torch.Tensor:
        management.unload_all_models()
        pixels: torch.Tensor = fitted.decode(latents)
        return pixels

    return {"fit": run}


def hooks(name: str) -> dict[str, int]:
    """Outcomes of runs after ones beside the doctor in which memory ran out as a hook had just been registered."""
    with machine_named("") as machine, torch.no_grad():
        runs, ends = samples(name, machine), dict[str, int]()
        wanted = runs["fit"]()
        with shortage(0, operators=False) as every:
            runs["fit and doctor"]()
        for at in range(1, every.count, every.count // 8):
            with contextlib.suppress(MemoryError), shortage(at, behind=True, operators=False, errors=[MemoryError]):
                runs["fit and doctor"]()
            try:
                end = "" if torch.equal(runs["fit"](), wanted) else "other values"
            except Exception as error:
                end = repr(error)
            ends[end] = ends.get(end, 0) + 1
    return ends
