"""Failures inside core's own models, fitted to a device and watched by the doctor: what `tests/runs` injects."""

import contextlib
import functools
import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import comfy.model_management as management
import torch
from anygpu.compat.doctor import KEEP, Doctor
from anygpu.compat.repairs import RepairStore
from anygpu.host.core import doctor as core_doctor
from anygpu.host.core import model as core_model
from anygpu.host.core import vae as core_vae
from runs.faults import injected, outcome
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
        runs, announced = make(name, machine)
        _answers[profile] = machine.probes.known()
        return dict(injected(runs, rng, count, management.unload_all_models, announced=announced))


class Finished(core_vae.NodeProgress):
    """The progress of a fitted VAE, whose last status is kept."""

    last = ""

    def finish(self, status: str, *more: str) -> None:
        """Keep the status."""
        Finished.last = status
        super().finish(status, *more)


def samples(name: str, machine: Any) -> tuple[dict[str, Any], Callable[[], torch.Tensor | None]]:
    """A step of the fitted model, whose weights arrive anew, and the same beside the doctor."""
    device = machine.facts.device
    fitted, _ = core_model.fit_model(core_tiny.made(name, device=device), keep_latents="never", machine=machine)

    def run(watched: bool) -> torch.Tensor:
        management.unload_all_models()
        doctor = Doctor("model", RepairStore(None), KEEP, lambda _: None)
        return core_tiny.output(core_doctor.watched_model(fitted, doctor, None) if watched else fitted, name)

    return {"fit": lambda: run(False), "fit and doctor": lambda: run(True)}, lambda: None


def decodes(name: str, machine: Any) -> tuple[dict[str, Any], Callable[[], torch.Tensor | None]]:
    """A decode of the fitted VAE, and one that begins with the method that the last one has announced."""
    fitted, _ = core_vae.fit_vae(core_tiny_vaes.made(name, device=machine.facts.device), machine=machine)
    latents = core_tiny_vaes.latents_of(name)

    def run() -> torch.Tensor:
        Finished.last = ""
        management.unload_all_models()
        with mock.patch.object(core_vae, "NodeProgress", Finished):
            pixels: torch.Tensor = fitted.decode(latents)
        return pixels

    @functools.cache
    def sound(words: str) -> torch.Tensor | None:
        method = next((each for each in fitted._methods("decode", latents) if core_vae._in_words(each) == words), None)
        if method is None:
            return None
        with mock.patch.object(fitted, "method", method):
            return run()

    return {"fit": run}, lambda: sound(Finished.last.removeprefix("decode: ")) if Finished.last else None


def in_tiles(name: str) -> list[str]:
    """Outcomes of decodes that go on in tiles, announced and not."""
    whole, ends = core_vae._whole, list[str]()
    with machine_named("turing") as machine, torch.no_grad():
        runs, announced = decodes(name, machine)
        wanted = runs["fit"]()
        for silent in (False, True):
            left = iter(range(2))

            def short(vae: Any, left: Any = left) -> Any:
                if next(left, None) is not None:
                    raise torch.OutOfMemoryError("out of memory")
                return whole(vae)

            with mock.patch.object(core_vae, "_whole", short), contextlib.ExitStack() as stack:
                if silent:
                    stack.enter_context(mock.patch.object(Finished, "finish"))
                ends.append(outcome(runs["fit"], wanted, "shortage", shortage(1, 0), announced=announced))
    return ends


def proven_or_not(name: str) -> list[str]:
    """Outcomes of decodes without the proof on the CPU, after which weights stay on the device; sound runs have it."""
    proofs = iter((0.0, 0.0))  # seconds that one took: after none, the next decode is proven too
    with (
        machine_named("turing") as machine,
        mock.patch.object(type(machine.probes), "recall", lambda *_: next(proofs, float("inf"))),
    ):
        runs, announced = decodes(name, machine)
        return list(injected(runs, random.Random(0), 4, management.unload_all_models, announced=announced))


def hooks(name: str) -> dict[str, int]:
    """Outcomes of runs after ones beside the doctor in which memory ran out as a hook had just been registered."""
    with machine_named("") as machine, torch.no_grad():
        (runs, _), ends = samples(name, machine), dict[str, int]()
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
