"""Scenes of threads in core's tracker: what users saw, made small."""

import types
from typing import Any
from unittest import mock

import comfy.model_management as management
import comfy.model_sampling
import comfy.ops
import comfy.supported_models as supported
import torch
from anygpu.compat import doctor as doctors
from anygpu.compat.repairs import RepairStore
from anygpu.host.core import doctor as core_doctor
from anygpu.host.core import model as core_model
from anygpu.host.core import vae as core_vae
from anygpu.host.core import weights
from torch.nn import functional

from host.inside import core_tiny_vaes
from host.inside.core_fit import machine_named, turing
from host.inside.core_fit_vaes import fitted as fitted_vae
from host.inside.core_fit_vaes import latents_of, noted
from host.inside.core_tiny import CASES, error, made, output


def large(name: str, peak: float) -> float | None:
    """The error of a fitted model with one value of the residual at ``peak``; None where core has no such model."""
    if not hasattr(supported, CASES[name].table):
        return None
    model = made(name)

    def add(_layer: Any, _given: Any, found: torch.Tensor) -> torch.Tensor:
        return torch.cat([found.flatten()[:1] + peak, found.flatten()[1:]]).view(found.shape)

    model.model.diffusion_model.get_submodule(CASES[name].loud).register_forward_hook(add)
    expected = output(model, name)
    fit, _ = core_model.fit_model(model, keep_latents="never", machine=turing())
    return error(output(fit, name), expected)


def second_decode(fault: str) -> dict[str, Any]:
    """A VAE whose first decode is right and whose later ones are not, until its weights are loaded again or cast.

    By the clock a decode takes 100 seconds, and a window of it on the CPU one.
    """
    vae, latents = core_tiny_vaes.made("SD", torch.float16), latents_of("SD")
    network, own = vae.first_stage_model, vae.first_stage_model.decode
    expected = fitted_vae(vae, precision="fp32").decode(latents)
    calls: list[int] = []
    noise, clock = torch.Generator().manual_seed(3), [0.0]

    def failing(z: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(1)
        found = own(z, *args, **kwargs)
        wide = getattr(network, "manual_cast_dtype", None) is torch.float32
        clock[0] += 1.0 if wide else 100.0
        if len(calls) == 1 or wide:
            return found
        if fault == "black":
            return found * 0.0 - 1.0
        return found.roll(1, 1) if fault == "false colour" else torch.randn(found.shape, generator=noise).to(found)

    stated = mock.patch.object(core_vae, "time", types.SimpleNamespace(monotonic=lambda: clock[0]))
    with noted() as said, mock.patch.object(network, "decode", failing), stated:
        fit = fitted_vae(vae)
        first, second = fit.decode(latents), fit.decode(latents)
    return {"first": error(first, expected), "second": error(second, expected), "said": list(said)}


def views(name: str) -> dict[str, Any]:
    """The errors where torch's attention gives wrong values for views: with answers from before, and with new ones."""
    own = functional.scaled_dot_product_attention

    def wrong(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        sound = all(each.is_contiguous() for each in (query, key, value))
        return own(query, key, value, *args, **kwargs) * (1.0 if sound else 2.0)

    model = made(name)
    expected = output(model, name)
    trusting, _ = core_model.fit_model(model, keep_latents="never", machine=turing())
    with (
        mock.patch.object(functional, "scaled_dot_product_attention", wrong),
        mock.patch.object(comfy.ops, "scaled_dot_product_attention", wrong),
    ):
        fit, decisions = core_model.fit_model(model, keep_latents="never", machine=turing())
        return {
            "trusted": error(output(trusting, name), expected), "error": error(output(fit, name), expected),
            "said": [str(decision) for decision in decisions],
        }  # fmt: skip


def without_fp8(name: str) -> dict[str, Any]:
    """A model with fp8 weights on a device that cannot cast them: fitted, against core's on the CPU."""
    source = made(name, torch.float8_e4m3fn)
    expected = output(source, name)
    with machine_named("mps-like") as machine:
        model = made(name, torch.float8_e4m3fn, device=machine.facts.device)
        fit, _ = core_model.fit_model(model, keep_latents="never", machine=machine)
        try:
            return {"error": error(output(fit, name), expected), "refused": ""}
        except RuntimeError as failure:
            return {"error": float("inf"), "refused": str(failure)}
        finally:
            management.unload_all_models()


def once(name: str) -> dict[str, Any]:
    """A layer gives NaN once, beside the doctor."""
    model, said, calls = made(name, torch.float32, None), list[str](), list[int]()
    expected = output(model, name)

    def failing(_layer: Any, _given: Any, found: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return found * float("nan") if len(calls) == 1 else found

    model.model.diffusion_model.get_submodule(CASES[name].loud).register_forward_hook(failing)
    store = RepairStore(None)
    watched = core_doctor.watched_model(model, doctors.Doctor("model", store, doctors.KEEP, said.append), None)
    return {"error": error(output(watched, name), expected), "said": said}


def leaked_schedule(name: str) -> dict[str, Any]:
    """A schedule of sampling that another run left on the network, beside Fit Model and the doctor."""
    model, said = made(name), list[str]()
    fit, _ = core_model.fit_model(model, keep_latents="never", machine=turing())
    store = RepairStore(None)
    watched = core_doctor.watched_model(fit, doctors.Doctor("model", store, doctors.KEEP, said.append), None)
    expected = output(watched, name)
    before = list(said)
    model.model.model_sampling.sigmas.mul_(0.5)
    model.model.model_sampling.multiplier = 1.0
    return {"error": error(output(watched, name), expected), "said": said[len(before) :]}


def another_schedule(name: str) -> dict[str, Any]:
    """A schedule of sampling with fewer tensors than the model's own, from another node, beside the doctor."""
    model, said = made(name), list[str]()
    kinds = (comfy.model_sampling.ModelSamplingDiscreteFlow, comfy.model_sampling.CONST)
    model.add_object_patch("model_sampling", type("Flow", kinds, {})(model.model.model_config))
    store = RepairStore(None)
    watched = core_doctor.watched_model(model, doctors.Doctor("model", store, doctors.KEEP, said.append), None)
    with mock.patch.object(weights, "SHARE", 1):  # all tensors at each call
        output(watched, name)
        return {"finite": bool(output(watched, name).isfinite().all()), "said": said}
