"""Scenes about core's own models fitted to devices that nobody here owns."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import comfy.model_management as management
import torch
from anygpu.compat.device.facts import facts_for
from anygpu.compat.device.probe_store import ProbeStore
from anygpu.host.core import model as core_model
from anygpu.host.core.machine import Machine
from comfy.patcher_extension import WrappersMP
from simulated import profiles

from host.inside.core_tiny import HOST, error, louder, made, output

PEAK = 3e5  # of the residual: five times what fp16 can hold
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp8": torch.float8_e4m3fn}


def turing(device: torch.device = HOST, **changed: Any) -> Machine:
    """A machine without fast bf16 whose arithmetic is that of ``device``."""
    named = {"backend": "cuda", "arch": "sm75", "arch_class": "cuda-old", "name": "RTX 2060"}
    facts = replace(facts_for(HOST), **{**named, "device": device, **changed})
    return Machine(facts, ProbeStore(facts))


@contextmanager
def machine_named(name: str) -> Iterator[Machine]:
    """One of the simulated machines; the plain CPU for an empty name."""
    if not name:
        yield turing()
        return
    with profiles.on(name) as profile:
        yield Machine(profile.facts, ProbeStore(profile.facts))


def traces(network: torch.nn.Module) -> int:
    """How many attributes of ours are on the modules of a network."""
    ours = ("forward", "weights_on", "_anygpu_fp16", "_conv_forward")
    return sum(name in module.__dict__ for module in network.modules() for name in ours)


def near_fp32(name: str, weights: str = "fp16", profile: str = "") -> dict[str, Any]:
    """Errors against core's fp32 of plain fp16 and of the fitted model, and what is left behind."""
    with machine_named(profile) as machine:
        model = made(name, DTYPES[weights], device=machine.facts.device)
        louder(model, name, PEAK)
        expected = output(model, name)
        plain = model.clone()
        plain.set_model_compute_dtype(torch.float16)
        broken = output(plain, name)
        fitted, decisions = core_model.fit_model(model, keep_latents="never", machine=machine)
        seen = output(fitted, name)
        again = output(model, name)
        management.unload_all_models()
        return {
            "plain": error(broken, expected),
            "safe": error(seen, expected),
            "restored": torch.equal(again, expected),
            "traces": traces(model.model.diffusion_model),
            "said": [str(decision) for decision in decisions],
        }


def unchanged(name: str, profile: str) -> dict[str, Any]:
    """What a machine that needs nothing does."""
    with machine_named(profile) as machine:
        model = made(name, torch.bfloat16, None, device=machine.facts.device)
        fitted, decisions = core_model.fit_model(model, machine=machine)
        kept, _ = core_model.fit_model(model, keep_latents="always", machine=machine)
        return {
            "same": fitted is model,
            "kept": kept is not model and not kept.get_all_wrappers(WrappersMP.APPLY_MODEL),
            "said": [str(decision) for decision in decisions],
        }
