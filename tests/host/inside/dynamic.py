"""Scenes about ComfyUI's dynamic VRAM: switched on as its start does, on a device that it cannot page weights on.

Its own patcher and its own host buffers run; only the reserved addresses (``ModelVBAR``), which ask the CUDA driver,
are replaced by :class:`Pages`, which hand out none: core's model has small layers, which it brings whole.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import comfy.memory_management
import comfy.model_management as management
import comfy.model_patcher
import comfy.ops
import comfy_aimdo.control
import comfy_aimdo.model_vbar
import torch
from anygpu.host import core_models
from anygpu.host.core import model as core_model
from anygpu.host.core.weights import LoadedWeights
from anygpu.host.memory_manager import PartPatcher
from anygpu.pipelines.latents import convert as latent_format
from simulated import accelerator
from torch import nn

from host.inside import core_tiny
from host.inside.core import cores
from host.inside.core_fit import PEAK, traces, turing
from host.inside.device import encoded, loaded_for
from host.inside.memory import sampled_from
from host.inside.sight import RESERVE

WIDTH = 60  # its square is below 16 KiB in fp32: what core brings whole


class Pages:
    """Addresses for weights that come on demand: none are asked for here."""

    def __init__(self, size: int, device: int) -> None:
        self.size = size

    def alloc(self, size: int) -> tuple[Any, int, int]:
        return self, 0, size

    def prioritize(self) -> None: ...

    def loaded_size(self) -> int:
        return 0

    def free_memory(self, wanted: int) -> int:
        return 0


@contextmanager
def dynamic_vram() -> Iterator[None]:
    """What ``main.py`` sets where its devices can page."""
    patchers, vbars = comfy.model_patcher, comfy_aimdo.model_vbar
    before = patchers.CoreModelPatcher, vbars.ModelVBAR, vbars.vbars_analyze
    nowhere = {"vbar_fault": lambda _: None, "vbar_signature_compare": lambda *_: False, "vbar_unpin": lambda _: None}
    patchers.CoreModelPatcher, vbars.ModelVBAR = patchers.ModelPatcherDynamic, Pages
    vbars.vbars_analyze = lambda *device: 0
    comfy.memory_management.aimdo_enabled = True
    try:
        with mock.patch.multiple(vbars, **nowhere):  # a larger layer has no address to stay at: it comes for each use
            yield
    finally:
        patchers.CoreModelPatcher, vbars.ModelVBAR, vbars.vbars_analyze = before
        comfy.memory_management.aimdo_enabled = False


class Chain(nn.Module):
    """A model of core's, as large as asked, in layers that are small enough to come whole."""

    def __init__(self, size: int) -> None:
        super().__init__()
        count = -(-size // (4 * WIDTH**2))
        self.layers = nn.ModuleList(comfy.ops.manual_cast.Linear(WIDTH, WIDTH, bias=False) for _ in range(count))
        for layer in self.layers:  # which have no weights of their own here until some are read
            layer.load_state_dict({"weight": torch.zeros(WIDTH, WIDTH)}, assign=True)


def fitted(name: str) -> dict[str, Any]:
    """A fitted MODEL that core pages by itself, against core's fp32 on the CPU."""
    here = core_tiny.made(name)
    core_tiny.louder(here, name, PEAK)
    expected = core_tiny.output(here, name)
    device = management.get_torch_device()
    with dynamic_vram():
        model = core_tiny.made(name, device=device)
        model.model.load_state_dict(here.model.state_dict())
        safe, decisions = core_model.fit_model(model, keep_latents="never", machine=turing(device))
        found = core_tiny.output(safe, name)
        management.unload_all_models()
        return {
            "dynamic": safe.is_dynamic(),
            "error": core_tiny.error(found, expected),
            "traces": traces(model.model.diffusion_model),
            "said": [str(decision) for decision in decisions],
        }


def cast_while_loading(name: str) -> dict[str, Any]:
    """What the Doctor takes for damage in a MODEL whose file has another dtype than its class was made in."""
    device, state = management.get_torch_device(), core_tiny.made(name).model.diffusion_model.state_dict()
    with dynamic_vram():
        model = core_tiny.made(name, device=device)
        network = model.model.diffusion_model
        management.archive_model_dtypes(network)
        wide = {key: each.float() + 1e-5 if each.is_floating_point() else each for key, each in state.items()}
        network.load_state_dict(wide, assign=True)
        known = LoadedWeights.of(model)
        core_tiny.output(model, name)
        wrong = known.wrong(model, every=True, streamed=True)
        there = [weight for weight in network.parameters() if weight.device == device]
        with torch.no_grad():
            there[0].view(-1)[0] += 1
        damaged = known.wrong(model, every=True, streamed=True)
        management.unload_all_models()
        casts = sum(" as " in key for key in known.first)
        return {"dynamic": model.is_dynamic(), "wrong": wrong, "casts": casts, "damaged": len(damaged)}


def packed(name: str, kind: str) -> dict[str, Any]:
    """A fitted MODEL with packed layers that core pages by itself, against core's own, and its packed products."""
    from host.inside import core_packed

    device = management.get_torch_device()
    twin, _ = core_packed.packed_twin(name, kind, "fp16")
    with dynamic_vram(), core_packed.products_counted() as calls:
        loaded = core_packed.empty(name, "fp16")
        loaded.diffusion_model.load_state_dict(twin.model.diffusion_model.state_dict(), assign=True)
        model = comfy.model_patcher.CoreModelPatcher(loaded, device, core_tiny.HOST)
        own, alone = core_tiny.output(model, name), calls.total()
        calls.clear()
        safe, _ = core_model.fit_model(model, keep_latents="never", machine=turing(device))
        found = core_tiny.output(safe, name)
        management.unload_all_models()
    layers = core_packed.core_packed.packed_layers(loaded.diffusion_model)
    layouts = {layer.weight._layout_cls for layer in layers}
    return {"dynamic": safe.is_dynamic(), "near": core_tiny.error(found, own), "alone": alone,
            "products": calls.total(), "layouts": sorted(layouts)}  # fmt: skip


def beside_core(name: str) -> dict[str, Any]:
    """Ours and a dynamic model of core's in turn where only one fits, our sampler and core's; who is what."""
    plain = loaded_for(name, heavy=True)
    usual, _ = core_models.beside(plain)
    given = encoded(plain, name)
    expected = sampled_from(plain, name, given)
    management.unload_all_models()
    found: dict[str, Any] = {"pages": comfy_aimdo.control.init_devices([0])}
    with dynamic_vram():
        pipeline = loaded_for(name, heavy=True)
        model, vae = core_models.beside(pipeline)
        found["equal"] = [bool(torch.equal(sampled_from(pipeline, name, given), expected))]
        size = model.model_size()
        theirs = comfy.model_patcher.CoreModelPatcher(Chain(size), management.get_torch_device(), torch.device("cpu"))
        ours = [*pipeline.get_models(), vae.patcher, model, model.clone()]
        found["theirs"] = [type(theirs).__name__, theirs.is_dynamic()]
        found["ours"] = sorted({type(patcher).__name__ for patcher in ours})
        found["dynamic"] = any(item.is_dynamic() for item in (pipeline, *ours))
        found["base"] = issubclass(PartPatcher, comfy.model_patcher.ModelPatcherDynamic)
        seen = []
        with accelerator.limit(int(1.5 * size) + RESERVE):
            for _ in range(2):
                management.load_models_gpu([theirs])
                seen.append([theirs.loaded_size() / size, model.loaded_size() / size])
                found["equal"].append(bool(torch.equal(sampled_from(pipeline, name, given), expected)))
                seen.append([theirs.loaded_size() / size, model.loaded_size() / size])
            positive, negative = latent_format.conditionings(given[0])
            noise = torch.randn(expected.shape, generator=torch.Generator().manual_seed(4))
            short = cores(model, positive, negative, noise)
        management.unload_all_models()
        found |= {"seen": seen, "freed": [theirs.loaded_size(), model.loaded_size()]}
    found["sampler"] = float((cores(usual, positive, negative, noise) - short).abs().max())
    return found
