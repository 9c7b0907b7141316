"""Scenes about core's own models fitted to devices that nobody here owns."""

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import comfy.cli_args as cli_args
import comfy.context_windows as context_windows
import comfy.controlnet
import comfy.ldm.modules.attention as core_attention
import comfy.model_management as management
import comfy.model_patcher
import comfy.samplers
import comfy.weight_adapter
import torch
from anygpu.compat.device.facts import facts_for
from anygpu.compat.device.probe_store import ProbeStore
from anygpu.compat.errors import UnsupportedError
from anygpu.compat.transforms import attention, attention_chunks
from anygpu.compat.transforms.attention import Attention
from anygpu.host import recovery
from anygpu.host.core import attention as core_attention_override
from anygpu.host.core import model as core_model
from anygpu.host.core.attention import OVERRIDE
from anygpu.host.core.machine import PRECISIONS, Fit, ModelDevice
from anygpu.host.core.ownership import is_linear
from comfy.patcher_extension import WrappersMP
from simulated import profiles

from host.inside.core_tiny import HOST, conditioning, error, louder, made, noise_of, output, skipping
from host.inside.sight import RESERVE, state

PEAK = 3e5  # of the residual: five times what fp16 can hold
EULER = comfy.samplers.sampler_object("euler"), (0.9, 0.7, 0.5, 0.3, 0.0)  # as :func:`output` takes them
HOLDS = (True, True, False, True)
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp8": torch.float8_e4m3fn}


def turing(device: torch.device = HOST, **changed: Any) -> ModelDevice:
    """A machine without fast bf16 whose arithmetic is that of ``device``."""
    named = {"backend": "cuda", "arch": "sm75", "arch_class": "cuda-old", "name": "RTX 2060"}
    facts = replace(facts_for(HOST), **{**named, "device": device, **changed})
    return ModelDevice(facts, ProbeStore(facts))


@contextmanager
def machine_named(name: str) -> Iterator[ModelDevice]:
    """One of the simulated machines; the plain CPU for an empty name."""
    if not name:
        yield turing()
        return
    with profiles.on(name, without=("_no_float64",)) as profile:  # core asks for the device's type, which is another
        yield ModelDevice(profile.facts, ProbeStore(profile.facts))


def traces(network: torch.nn.Module) -> int:
    """How many attributes of ours are on the modules of a network."""
    ours = ("forward", "weights_on", "_anygpu_fp16", "_conv_forward")
    return sum(name in module.__dict__ for module in network.modules() for name in ours)


def near_fp32(name: str, weights: str = "fp16", profile: str = "", precision: str = "auto") -> dict[str, Any]:
    """Errors against core's fp32 of plain fp16 and of the fitted model, and what is left behind."""
    with machine_named(profile) as machine:
        model = made(name, DTYPES[weights], device=machine.facts.device)
        louder(model, name, PEAK)
        expected = output(model, name)
        plain = model.clone()
        plain.set_model_compute_dtype(torch.float16)
        broken = output(plain, name)
        fitted, decisions = core_model.fit_model(model, precision, keep_latents="never", machine=machine)
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


def told(name: str) -> dict[str, Any]:
    """What is said of a network after its first calls, and of how many layers."""
    model, lines = made(name), list[str]()
    expected = output(model, name)
    fitted, decisions = core_model.fit_model(model, keep_latents="never", machine=turing(), tell=lines.append)
    found = output(fitted, name)
    output(fitted, name)
    called = set()
    hooks = [
        leaf.register_forward_hook(lambda module, *_: called.add(module))
        for leaf in model.model.diffusion_model.modules()
        if getattr(leaf, "weight", None) is not None and leaf.weight.ndim > 1
    ]
    output(model, name)
    for hook in hooks:
        hook.remove()
    return {
        "equal": torch.equal(found, expected),
        "told": lines,
        "decided": [str(decision) for decision in decisions],
        "layers": len(called),
        "traces": traces(model.model.diffusion_model),
    }


@mock.patch.object(core_attention, "optimized_attention", core_attention.attention_pytorch)
def refitted(name: str) -> dict[str, Any]:
    """Every ordered pair of choices against the second alone, where core takes torch's attention."""
    model, machine = made(name, compute=None), turing()
    louder(model, name, 1.0)
    core = output(model, name)

    def fit(given: Any, choice: tuple[str, str]) -> Any:
        return core_model.fit_model(given, *choice, machine=machine)[0]

    choices = [(precision, attention) for precision in PRECISIONS for attention in ("auto", "bounded")]
    alone = {choice: output(fit(model, choice), name) for choice in choices}
    pairs = {
        f"{first} then {second}": torch.equal(output(fit(fit(model, first), second), name), alone[second])
        for first in choices
        for second in choices
    }
    other = model.clone()
    other.set_model_compute_dtype(torch.bfloat16)
    again = fit(fit(other, ("fp32", "auto")), ("as loaded", "auto"))
    return {
        "pairs": pairs,
        "different": len({tuple(each.tolist()) for each in alone.values()}),
        "loaded": torch.equal(alone["as loaded", "auto"], core),
        "as core": torch.equal(output(model, name), core),
        "others": torch.equal(output(again, name), output(other, name)),
    }


@mock.patch.object(core_attention, "optimized_attention", core_attention.attention_pytorch)
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


def bounded(name: str, budget: int = 12_000) -> dict[str, Any]:
    """Attention in chunks against core's own, as on a device without fused kernels, and the largest scores at once."""
    model, sizes = made(name, torch.float32, None), []
    expected = output(model, name)
    fitted = model.clone()
    fit = Fit(attention=Attention(budget_bytes=budget))
    fitted.add_wrapper_with_key(WrappersMP.APPLY_MODEL, core_model.KEY, core_model.FittedNetwork(fit, turing()))
    compute, calls = attention_chunks._chunk, attention.chunked

    def counted(query: torch.Tensor, keys: torch.Tensor, *rest: Any) -> torch.Tensor:
        sizes[-1].append(4 * query.shape[:-1].numel() * keys.shape[-1])
        return compute(query, keys, *rest)

    def called(*given: Any) -> torch.Tensor:
        sizes.append([])
        return calls(*given)

    with (
        mock.patch.object(attention_chunks, "_chunk", counted),
        mock.patch.object(attention, "chunked", called),
        mock.patch.object(core_attention_override, "fused_kernel", lambda *_: ""),
        mock.patch.object(attention, "fused_kernel", lambda *_: ""),
    ):
        found = output(fitted, name)
    whole = max(sum(each) for each in sizes)
    return {"error": error(found, expected), "largest": max(map(max, sizes)), "whole": whole, "budget": budget}


def bits_kept(name: str, profile: str, adapted: bool) -> dict[str, Any]:
    """Errors, against core's fp32 on the CPU, of bf16 weights on a machine that damages them: core's own, and fitted.

    Args:
        adapted: whether a LoRA of core's is on the model.
    """
    source = made(name, torch.bfloat16)
    louder(source, name, PEAK)
    file = source.model.diffusion_model.state_dict()

    def loaded(device: torch.device, weights: torch.dtype = torch.bfloat16) -> Any:
        model = made(name, weights, device=device)
        model.model.diffusion_model.load_state_dict(file)
        return lora_on(model, name) if adapted else model

    expected = output(loaded(HOST, torch.float32), name)
    with machine_named(profile) as machine:
        model = loaded(machine.facts.device)
        fitted, decisions = core_model.fit_model(model, keep_latents="never", machine=machine)
        again, _ = core_model.fit_model(model, keep_latents="never", machine=machine)
        found = output(fitted, name)
        management.unload_all_models()  # which brings weights back to the host
        back = output(again, name)
        management.unload_all_models()
        alone = error(output(loaded(machine.facts.device), name), expected)
        management.unload_all_models()
        _, left = core_model.fit_model(model, "as loaded", machine=machine)
    weights = model.model.diffusion_model.state_dict()
    return {
        "error": error(found, expected),
        "back": torch.equal(back, found),
        "alone": alone,
        "shared": again.model is fitted.model and fitted.model is not model.model,
        "before": all(torch.equal(weights[key], file[key]) for key in file),
        "bf16": sum(tensor.dtype is torch.bfloat16 for tensor in fitted.model.parameters()),
        "bytes": sum(map(_bytes, fitted.model.parameters())) / sum(map(_bytes, model.model.parameters())),
        "said": [str(decision) for decision in decisions],
        "left": [str(decision) for decision in left],
    }


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def lora_on(model: Any, name: str, seed: int = 0) -> Any:
    """A clone with a LoRA on the loud layer's neighbours, as core's LoRA nodes make it."""
    network, patches = model.model.diffusion_model, {}
    for path, leaf in network.named_modules():
        if is_linear(leaf) and leaf.in_features == leaf.out_features:
            generator = torch.Generator().manual_seed(seed + len(path))
            up = 0.3 * torch.randn(leaf.out_features, 4, generator=generator)
            down = torch.randn(4, leaf.in_features, generator=generator) / leaf.in_features**0.5
            weights = (up, down, 4.0, None, None, None)
            patches[f"diffusion_model.{path}.weight"] = comfy.weight_adapter.LoRAAdapter(set(), weights)
    clone = model.clone()
    clone.add_patches(patches, 1.0)
    return clone


def compiled(model: Any, backend: str = "eager") -> Any:
    """A clone behind core's torch.compile node; its default backend only traces and compiles nothing."""
    from comfy_extras.nodes_torch_compile import TorchCompileModel

    return TorchCompileModel.execute(model, backend).result[0]


def with_override(model: Any, calls: list[int]) -> Any:
    """A clone with another node's attention."""
    clone = model.clone()

    def other(func: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(1)
        return func(*args, **kwargs)

    clone.model_options["transformer_options"][OVERRIDE] = other
    return clone


def on_top(name: str, what: str) -> dict[str, Any]:
    """The error of a fitted model with something on top of it or below it, against core's fp32 with the same."""
    machine, calls = turing(), list[int]()
    model = made(name, DTYPES["fp8"] if what == "fp8" else torch.float16)
    if what != "fp8":
        louder(model, name, PEAK)
    below = {
        "lora": lora_on,
        "compile below": lambda model, _: compiled(model),
        "inductor below": lambda model, _: compiled(model, "inductor"),
        "context windows": lambda model, _: in_windows(model),
        "cfg nodes": lambda model, _: guided(model),
    }
    base = below[what](model, name) if what in below else model
    expected = output(base, name, cfg=2.0)
    fitted, _ = core_model.fit_model(base, keep_latents="never", machine=machine)
    if what in ("compile above", "inductor above"):
        fitted = compiled(fitted, "inductor" if what == "inductor above" else "eager")
    elif what == "attention above":
        fitted = with_override(fitted, calls)
    elif what == "lowvram":
        return streamed_with_lora(model, name)
    found = output(fitted, name, cfg=2.0)
    plain = output(model, name, cfg=2.0)
    return {
        "error": error(found, expected),
        "acts": error(expected, plain) if what in ("lora", "context windows", "cfg nodes") else 1.0,
        "calls": len(calls),
        "traces": traces(model.model.diffusion_model),
    }


def controlled(size: float, late: bool) -> dict[str, Any]:
    """The errors of two samplings by Flux under a control net of values of about ``size``, ``late``: from its second
    step on."""

    class Net(comfy.controlnet.ControlBase):
        def get_control(self, x: torch.Tensor, level: torch.Tensor, *_: Any) -> Any:
            if late and float(level.amax()) > 0.7:
                return None
            values = size * torch.randn(1, 16, 64, generator=torch.Generator().manual_seed(3))
            return {"input": [values], "output": [values]}

        def copy(self) -> Any:
            return self

    def run(model: Any) -> torch.Tensor:
        guider = comfy.samplers.CFGGuider(model)
        guider.set_conds([[text, {**others, "control": Net()}]], negative)
        noise, euler = noise_of("Flux"), comfy.samplers.sampler_object("euler")
        result = guider.sample(noise, noise * 0.0, euler, torch.tensor([0.9, 0.6, 0.3, 0.0]), disable_pbar=True, seed=5)
        return result.float().flatten()

    model, ((text, others),), negative = made("Flux"), conditioning("Flux"), conditioning("Flux", 8)
    expected = run(model)
    fitted, _ = core_model.fit_model(model, keep_latents="never", machine=turing())
    return {
        "errors": [error(run(fitted), expected) for _ in range(2)],
        "acts": error(output(model, "Flux", *EULER), expected),
    }


def skipped(name: str, precision: str) -> dict[str, bool]:
    """A fitted model behind core's EasyCache."""
    model = made(name, compute=None)
    fitted, _ = core_model.fit_model(model, precision, keep_latents="never", machine=turing())
    return skipping(fitted, lambda model: output(model, name, *EULER))


def run_again(name: str) -> dict[str, bool]:
    """A fitted model whose third step does not hold in plain fp16, behind an EasyCache that skips only equal steps."""
    from comfy_extras.nodes_easycache import EasyCacheNode

    def run(cached: bool, holds: tuple[bool, ...]) -> torch.Tensor:
        fitted, _ = core_model.fit_model(made(name), keep_latents="never", machine=turing(), tell=lines.append)
        fitted = EasyCacheNode.execute(fitted, 1e-6, 0.0, 1.0, False).result[0] if cached else fitted
        with mock.patch.object(core_model.Calibration, "_held", side_effect=holds):
            return output(fitted, name, *EULER)

    lines: list[str] = []
    plain, alone, behind = (run(*given) for given in ((False, (True,) * 4), (False, HOLDS), (True, HOLDS)))
    equal = torch.equal(alone, behind) and lines.count(core_model.LOUDER) == 2
    return {"equal": equal, "acts": not torch.equal(alone, plain)}


def guided(model: Any) -> Any:
    """A clone behind CFG-Zero-star, which acts after both predictions, and RescaleCFG, which replaces their sum."""
    from comfy_extras.nodes_cfg import CFGZeroStar
    from comfy_extras.nodes_model_advanced import RescaleCFG

    (rescaled,) = RescaleCFG().patch(model, 0.7)
    return CFGZeroStar.execute(rescaled).result[0]


def in_windows(model: Any) -> Any:
    """A clone behind core's context windows: two latent frames at a time."""
    clone = model.clone()
    handler = context_windows.IndexListContextHandler(
        context_schedule=context_windows.get_matching_context_schedule("standard_static"),
        fuse_method=context_windows.get_matching_fuse_method("pyramid"),
        context_length=2,
        context_overlap=1,
        dim=2,
    )
    clone.model_options["context_handler"] = handler
    context_windows.create_prepare_sampling_wrapper(clone)
    return clone


def streamed_with_lora(model: Any, name: str) -> dict[str, Any]:
    """As :func:`on_top`, on a device that holds a part of the weights: core fetches and patches the rest as used."""
    expected, plain = output(lora_on(model, name), name), output(model, name)
    there = made(name, device=management.get_torch_device())
    there.model.load_state_dict(model.model.state_dict())
    machine = turing(management.get_torch_device())
    fitted, _ = core_model.fit_model(lora_on(there, name), keep_latents="never", machine=machine)
    room = fitted.model_size() // 2 + RESERVE

    def free(_device: Any = None, torch_free_too: bool = False) -> Any:
        return (room, 0) if torch_free_too else room

    with state(get_free_memory=free):
        found = output(fitted, name)
        partly = bool(fitted.model.model_lowvram)
    return {
        "error": error(found, expected),
        "acts": error(expected, plain) if partly else 0.0,
        "calls": 0,
        "traces": traces(there.model.diffusion_model),
    }


def under_fast(features: list[str]) -> list[str]:
    """What is said of parts of ComfyUI's --fast."""
    chosen = {cli_args.PerformanceFeature(feature) for feature in features}
    with mock.patch.object(cli_args.args, "fast", chosen):
        _, decisions = core_model.fit_model(made("Wan 2.1"), machine=turing())
    return [str(decision) for decision in decisions if decision.subject.startswith("--fast")]


def as_before(name: str) -> dict[str, Any]:
    """What a clone, a merge, the state dict, the garbage collector and training find of a fitted model."""
    model = made(name)
    fitted, _ = core_model.fit_model(model, machine=turing())
    again, _ = core_model.fit_model(fitted, machine=turing())
    expected = output(fitted, name)
    clone = fitted.clone()
    merged = fitted.clone()
    for key, value in made(name).get_key_patches("diffusion_model.").items():
        merged.add_patches({key: value}, 0.5, 0.5)
    found = {
        "clone": torch.equal(output(clone, name), expected),
        "twice": torch.equal(output(again, name), expected),
        "one wrapper": len(again.get_all_wrappers(WrappersMP.APPLY_MODEL)) == 1,
        "merged": error(output(merged, name), expected),
        "keys": list(fitted.model_state_dict()) == list(model.model_state_dict()),
    }
    management.unload_all_models()
    after = output(fitted, name)
    gone = weakref.ref(model.model.diffusion_model)
    del model, fitted, again, clone, merged
    management.unload_all_models()
    management.cleanup_models_gc()
    gc.collect()
    return {**found, "reloaded": torch.equal(after, expected), "gone": gone() is None}


def kept_samplings(name: str, folder: str, stop_at: int = 0) -> list[dict[str, Any]]:
    """What is kept of a sampling by core's Euler that may be cut short, and what the recover node gives back."""
    with mock.patch.object(recovery, "saved_folder", lambda: Path(folder)):
        model, _ = core_model.fit_model(made(name), machine=turing())
        guider = comfy.samplers.CFGGuider(model)
        guider.set_conds(conditioning(name), conditioning(name, 8))
        guider.set_cfg(1.0)
        noise, sampled = noise_of(name), None

        def callback(step: int, *_: Any) -> None:
            if stop_at and step + 1 == stop_at:
                raise management.InterruptProcessingException

        try:
            sampler, sigmas = comfy.samplers.sampler_object("euler"), torch.tensor([0.9, 0.6, 0.3, 0.0])
            sampled = guider.sample(noise, noise * 0.0, sampler, sigmas, callback=callback, disable_pbar=True, seed=5)
        except management.InterruptProcessingException:
            pass
        latent = recovery.load("newest")["samples"]
        kept = recovery.listing()
        pairs = [] if sampled is None else list(zip(_tensors(latent), _tensors(sampled), strict=True))
        return [
            {
                "equal": all(torch.equal(a, b.float()) for a, b in pairs),
                "count": len(_tensors(latent)),
                "shapes": [list(tensor.shape) for tensor in _tensors(latent)],
                "family": item.family,
                "unfinished": item.unfinished,
                "seed": item.seed,
            }
            for item in kept
        ]


def _tensors(latent: Any) -> list[torch.Tensor]:
    return latent.unbind() if getattr(latent, "is_nested", False) else [latent]


def of_convolutions() -> dict[str, Any]:
    """What is made of a U-Net by itself, and of a network without layers of core's when safe fp16 is asked for."""
    model = made("SDXL", compute=None)
    fitted, decisions = core_model.fit_model(model, machine=turing())
    network = torch.nn.Sequential(torch.nn.Conv2d(4, 4, 3))
    network.dtype = torch.float16
    model.model.diffusion_model = network
    try:
        core_model.fit_model(model, "fp16-safe", machine=turing())
        refusal = ""
    except UnsupportedError as failure:
        refusal = str(failure)
    return {
        "same": fitted.model is model.model and not fitted.get_all_wrappers(WrappersMP.APPLY_MODEL),
        "said": [str(decision) for decision in decisions],
        "refusal": refusal,
    }


def everywhere(name: str, profile: str) -> dict[str, Any]:
    """A fitted model on a simulated machine against core's fp32 on the CPU, and what core alone does there.

    Its residual leaves fp16's range.
    """
    source = made(name)
    louder(source, name, PEAK)
    expected = output(source, name)
    with machine_named(profile) as machine:
        model = made(name, device=machine.facts.device)
        model.model.diffusion_model.load_state_dict(source.model.diffusion_model.state_dict())
        fitted, decisions = core_model.fit_model(model, keep_latents="never", machine=machine)
        found = output(fitted, name)
        try:
            alone = error(output(model, name), expected)
        except RuntimeError:
            alone = float("inf")
        management.unload_all_models()
        said = [str(decision) for decision in decisions]
        return {"error": error(found, expected), "alone": alone, "same": fitted is model, "said": said}


def plain_calls_alone(profile: str) -> dict[str, Any]:
    """A model as loaded, in fp32, on a machine whose driver gets calls of torch wrong: layers that took the mode."""
    with machine_named(profile) as machine:
        model = made("Wan 2.2", device=machine.facts.device)
        choices = {"precision": "as loaded", "attention": "as loaded", "keep_latents": "never"}
        fitted, decisions = core_model.fit_model(model, **choices, machine=machine)
        seen, linear = [], machine.calls and machine.calls.forms[torch.nn.functional.linear]
        if linear:
            machine.calls.forms[torch.nn.functional.linear] = lambda *args: seen.append(1) or linear(*args)
        output(fitted, "Wan 2.2")
        management.unload_all_models()
        care = [str(decision) for decision in decisions if decision.subject == "care"]
        return {"seen": len(seen), "same": fitted is model, "care": care}
