"""Injections into core's tiny models behind the doctor: what it names, what it repairs, and in how many runs."""

import logging
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import comfy.model_management as management
import comfy.samplers
import torch
from anygpu.compat import doctor as doctors
from anygpu.compat.output_check import NotFinite
from anygpu.compat.repairs import RepairStore
from anygpu.host.core import doctor as core
from anygpu.host.core.attention import OVERRIDE
from anygpu.host.core.ownership import is_linear
from comfy.weight_adapter import LoRAAdapter
from simulated import accelerator

from host.inside import core_tiny
from host.inside.core_fit import machine_named

MIB = 1 << 20
NEAR = 5e-2  # of what every repair holds
CLAMPING = ("Flux", "HunyuanVideo", "Lumina 2", "Z-Image", "Hunyuan3D 2")  # their residual in fp16
Break = Callable[[Any, random.Random], tuple[str, ...]]  # breaks a MODEL; any of these words names the fault


def _linears(model: Any) -> list[tuple[str, Any]]:
    """The Linears that a call uses, whose weights change its result."""
    used, undo = [], []
    for name, layer in model.model.diffusion_model.named_modules():
        if is_linear(layer):
            note = lambda *_, entry=(name, layer): used.append(entry)  # noqa: E731
            undo.append(layer.register_forward_hook(note))
    core_tiny.output(model, model.name)
    for handle in undo:
        handle.remove()
    return list(dict.fromkeys(used))


def _weights(change: Callable[[torch.Tensor, random.Random], None]) -> Break:
    """Break the weights of one layer."""

    def act(model: Any, chance: random.Random) -> tuple[str, ...]:
        name, layer = chance.choice(_linears(model))
        change(layer.weight.data, chance)
        return (f"{name}.weight", f"{name} (")

    return act


def _set(value: float) -> Callable[[torch.Tensor, random.Random], None]:
    def act(weight: torch.Tensor, chance: random.Random) -> None:
        weight.view(-1)[chance.randrange(weight.numel())] = value

    return act


def _swap(weight: torch.Tensor, chance: random.Random) -> None:
    one, other = chance.sample(range(len(weight)), 2)
    weight[[one, other]] = weight[[other, one]]


def _stale(weight: torch.Tensor, chance: random.Random) -> None:
    """As a LoRA that was not taken off leaves them."""
    generator = torch.Generator().manual_seed(chance.randrange(999))
    down = torch.randn(2, weight.shape[1], generator=generator) / weight.shape[1] ** 0.5
    weight += (torch.randn(len(weight), 2, generator=generator) @ down).to(weight.dtype)


def _loud(model: Any, chance: random.Random) -> tuple[str, ...]:
    """One layer's output five times beyond fp16, in a MODEL that computes in it; at times the layer after it fails."""
    layers = [name for name, _ in _linears(model)]
    case = core_tiny.CASES[model.name]
    place = chance.choice([case.loud, *layers])
    with mock.patch.object(core_tiny, "CASES", {model.name: replace(case, loud=place)}):
        core_tiny.louder(model, model.name, 3e5)
    return ("16-bit format", "no numbers")


def _attention(spoil: Callable[..., torch.Tensor]) -> Break:
    """Another node's attention, which is wrong in all calls or in one."""

    def act(model: Any, chance: random.Random) -> tuple[str, ...]:
        only, calls = chance.choice((None, 0, 1)), [0]

        def attention(func: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            calls[0] += 1
            wrong = only is None or (calls[0] - 1) % model.calls == only % model.calls
            return spoil(func, *args, **kwargs) if wrong else func(*args, **kwargs)

        model.model_options["transformer_options"][OVERRIDE] = attention
        return ("attention",)

    return act


def _rolled(func: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    return func(query, key.roll(1, -2), value, *args, **kwargs)


def _passing(model: Any, chance: random.Random) -> tuple[str, ...]:
    """NaN once, from one layer."""
    name, layer = chance.choice(_linears(model))

    def once(_layer: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
        handle.remove()
        return output * float("nan")

    handle = layer.register_forward_hook(once)
    return ("a passing fault", name)


NOT_FINITE: dict[str, Break] = {
    "NaN in a weight": _weights(_set(float("nan"))),
    "infinity in a weight": _weights(_set(float("inf"))),
    "overflow": _loud,
    "attention of NaN": _attention(lambda func, *args, **kwargs: func(*args, **kwargs) * float("nan")),
    "passing NaN": _passing,
}
FALSE = (
    _attention(lambda func, *args, **kwargs: func(*args, **kwargs) * 0.5),
    _attention(lambda func, *args, **kwargs: func(*args, **kwargs).flip(-2)),
    _attention(_rolled),
    _attention(lambda func, *args, **kwargs: torch.zeros_like(func(*args, **kwargs))),
)
FINITE: dict[str, Break] = {
    "zeros": _weights(lambda weight, _: weight.zero_()),  # type: ignore[arg-type, return-value]
    "saturation": _loud,
    "wrong scale": _weights(lambda weight, chance: weight.mul_(chance.choice((0.25, 0.5, 2.0, 16.0)))),  # type: ignore[arg-type, return-value]
    "swapped rows": _weights(_swap),
    "stale weights": _weights(_stale),
    "false attention": lambda model, chance: chance.choice(FALSE)(model, chance),
}


def _made(name: str, fault: str, file: bool) -> Any:
    narrow = fault in ("overflow", "saturation")
    model = core_tiny.made(name, torch.float16 if narrow else torch.float32, None)
    model.name = name
    if file:
        model.cached_patcher_init = (lambda: core_tiny.made(name, model.model_dtype(), None), ())
    return model


@contextmanager
def _counted(model: Any) -> Iterator[list[int]]:
    """Counts the runs of a network after the first, also those that are ended."""
    runs = [-1]

    def count(*_: Any) -> None:
        runs[0] += 1

    handle = model.model.diffusion_model.register_forward_pre_hook(count)
    try:
        yield runs
    finally:
        handle.remove()


def injected(name: str, fault: str, seed: int) -> dict[str, Any]:
    """One fault in core's tiny ``name``: whether it is named, the error of the kept repair, the diagnosis's runs."""
    chance, loud = random.Random(f"{name} {fault} {seed}"), fault in ("overflow", "saturation")
    act, file = {**NOT_FINITE, **FINITE}[fault], fault in FINITE or bool(seed % 2)
    model = _made(name, fault, file)
    possible = True
    with ExitStack() as stack:
        calls: list[int] = []
        plain = model.clone()
        plain.name = name
        plain.model_options["transformer_options"][OVERRIDE] = lambda func, *a, **k: calls.append(1) or func(*a, **k)
        expected, model.calls = core_tiny.output(plain, name), max(1, len(calls))
        early = loud or (fault in NOT_FINITE and not file)  # else behind the doctor, as what goes wrong on a device
        words = act(model, chance) if early or "attention" in fault else ()
        if loud:
            wide = model.clone()
            wide.set_model_compute_dtype(torch.float32)
            expected = core_tiny.output(wide, name)
            management.unload_all_models()
            damaged = any(not weight.isfinite().all() for weight in model.model.parameters())
            possible = not damaged and bool(expected.abs().amax() < 6e4)  # in fp16, which all else is about
        said: list[str] = []
        store = RepairStore(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        watched = core.watched_model(model, doctors.Doctor("model", store, doctors.KEEP, said.append), None)
        broken = core_tiny.output(model, name) if fault != "passing NaN" else expected * 0
        words = words or act(model, chance)
        if fault in FINITE and not loud and "attention" not in fault:
            broken = core_tiny.output(model, name)
        with _counted(model) as runs:
            try:
                found = core_tiny.output(watched, name)
            except NotFinite as error:
                said.append(str(error))
                found = expected * float("nan")
    management.unload_all_models()
    text = " ".join(said)
    return {
        "fault": fault,
        "named": any(word in text for word in words),
        "error": core_tiny.error(found, expected),
        "before": core_tiny.error(broken, expected),
        "runs": runs[0],
        "possible": possible,
        "said": said,
    }


def many(names: list[str], faults: list[str], count: int) -> dict[str, Any]:
    """``count`` injections over models and faults: how many of each were tried and right, and failures."""
    tried, right, wrong, most = Counter[str](), Counter[str](), [], 0
    pairs = ((name, fault, seed) for seed in range(99) for name in names for fault in faults)
    for name, fault, seed in pairs:
        if sum(tried.values()) == count:
            break
        if tried[fault] >= -(-count // len(faults)) or (fault == "saturation" and name not in CLAMPING):
            continue
        found = injected(name, fault, seed)
        if fault == "saturation" and not NEAR < found["before"] < float("inf"):
            continue  # not finite, or without effect
        if not found["possible"] or (fault == "overflow" and not found["before"] > NEAR):
            continue
        tried[fault] += 1
        good = found["named"] and found["error"] <= NEAR
        right[fault] += good
        most = max(most, found["runs"])
        if not good:
            wrong.append({"name": name, "seed": seed, **found})
    return {"tried": dict(tried), "right": dict(right), "wrong": wrong, "runs": most}


SPOILT: dict[str, Callable[[torch.Tensor], Any]] = {  # a tensor on the device
    "a flipped bit": lambda weight: weight.view(torch.int32).view(-1)[7].bitwise_xor_(1 << 20),
    "a page of zeros": lambda weight: weight.view(-1)[:1024].zero_(),
    "another layer's": lambda weight: weight.copy_(
        torch.randn(weight.shape, generator=torch.Generator().manual_seed(5))
    ),
    "a stale LoRA": lambda weight: _stale(weight, random.Random(1)),
}


def on_the_device(name: str, lora: bool, gone: bool = False) -> dict[str, Any]:
    """Weights that change after they were loaded to a device, with a LoRA and without: what is said, and the errors;
    ``gone``: their file is no longer there."""
    report, path = {}, core_tiny.CASES[name].loud

    def again() -> Any:
        if gone:
            raise FileNotFoundError(name)
        return core_tiny.made(name, torch.float32, None)

    with machine_named("turing") as machine:
        for how, spoil in SPOILT.items():
            model = core_tiny.made(name, torch.float32, None, machine.facts.device)
            model.cached_patcher_init = (again, ())
            shape = model.model.diffusion_model.get_submodule(path).weight.shape
            if lora:
                generator = torch.Generator().manual_seed(3)
                change = 0.05 * torch.randn(shape, generator=generator)
                model.add_patches({f"diffusion_model.{path}.weight": ("diff", (change,))})
            said: list[str] = []
            doctor = doctors.Doctor("model", RepairStore(None), doctors.OFFER, said.append)
            watched = core.watched_model(model, doctor, None)
            expected = core_tiny.output(watched, name)
            sound, weight = not said, model.model.diffusion_model.get_submodule(path).weight.data
            device, there = weight.device.type, weight.cpu()
            spoil(there)
            weight.copy_(there)
            wrong = core_tiny.output(model, name)
            results = [core_tiny.error(core_tiny.output(watched, name), expected) for _ in range(2)]
            management.unload_all_models()
            after = core_tiny.error(core_tiny.output(watched, name), expected)
            report[how] = {
                "sound": sound,
                "device": device,
                "wrong": core_tiny.error(wrong, expected),
                "errors": [*results, after],
                "said": said,
                "named": f"{path}.weight" in " ".join(said),
            }
            management.unload_all_models()
    return report


def streamed_with_a_lora(name: str, dtype: str) -> dict[str, Any]:
    """Runs of one model, sound, with a LoRA on all blocks, of which core streams another share each time: what is said
    of damage, and what core logs as errors."""
    errors, shares, said = list[str](), list[float](), list[str]()
    euler = comfy.samplers.sampler_object("euler"), tuple(1 - step / 40 for step in range(41))
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: errors.append(record.getMessage())  # type: ignore[method-assign]
    storage, device = getattr(torch, dtype), management.get_torch_device()
    model, other = (core_tiny.made(name, storage, torch.float32, device) for _ in range(2))
    generator, network = torch.Generator().manual_seed(3), model.model.diffusion_model
    for path, layer in network.named_modules():
        if "blocks" in path and is_linear(layer):
            rows, columns = layer.weight.shape
            up, down = (torch.randn(size, generator=generator) for size in ((rows, 2), (2, columns)))
            up *= 0.3 * float(layer.weight.float().norm()) / float((up @ down).norm())
            patch = LoRAAdapter(set(), (up, down, None, None, None, None))
            model.add_patches({f"diffusion_model.{path}.weight": patch})
    logging.getLogger().addHandler(handler)
    try:
        with mock.patch.object(management, "minimum_inference_memory", lambda: MIB):
            for share in (2.0, 0.9, 0.6, 0.9):
                doctor = doctors.Doctor("model", RepairStore(None), doctors.OFFER, said.append)
                watched = core.watched_model(model, doctor, None)
                with accelerator.limit(int(share * model.model_size()) + MIB):
                    core_tiny.output(other, name, *euler)
                    core_tiny.output(watched, name, *euler)
                    shares.append(model.loaded_size() / model.model_size())
    finally:
        logging.getLogger().removeHandler(handler)
    return {"shares": shares, "said": said, "errors": errors}


def between_steps(name: str) -> dict[str, Any]:
    """A weight that becomes zero on the device after the first step: what is under the node at the end."""
    ends: list[str] = []
    with machine_named("turing") as machine:
        model = core_tiny.made(name, torch.float32, None, machine.facts.device)
        model.cached_patcher_init = (lambda: core_tiny.made(name, torch.float32, None), ())
        doctor = doctors.Doctor("model", RepairStore(None), doctors.OFFER, lambda _: None)
        watched = core.watched_model(model, doctor, None)
        euler, sigmas = core_tiny.comfy.samplers.sampler_object("euler"), (0.9, 0.7, 0.4, 0.0)
        with mock.patch.object(core.NodeProgress, "finish", lambda _, text: ends.append(text)):
            expected = core_tiny.output(watched, name, euler, sigmas)
            calls: list[int] = []

            def spoil(network: Any, _given: Any) -> None:
                calls.append(1)
                if len(calls) == 2:
                    network.get_submodule(core_tiny.CASES[name].loud).weight.data.zero_()

            handle = model.model.diffusion_model.register_forward_pre_hook(spoil)
            wrong = core_tiny.output(watched, name, euler, sigmas)
            handle.remove()
            again = core_tiny.output(watched, name, euler, sigmas)
        management.unload_all_models()
    errors = [core_tiny.error(each, expected) for each in (wrong, again)]
    return {"ends": ends, "errors": errors}


def clean(names: list[str], count: int) -> dict[str, Any]:
    """Sound runs of three steps: what the doctor says, and those whose result it changes."""
    said, changed, runs = list[str](), list[str](), 0
    euler, sigmas = core_tiny.comfy.samplers.sampler_object("euler"), (0.9, 0.7, 0.4, 0.0)
    while runs < count:
        for name in names:
            dtype = (torch.float32, torch.float16)[runs // len(names) % 2]
            model = core_tiny.made(name, dtype, None if dtype is torch.float32 else torch.float32)
            if runs % 3 == 1:
                key = f"diffusion_model.{core_tiny.CASES[name].loud}.weight"
                weight = model.model.diffusion_model.get_submodule(core_tiny.CASES[name].loud).weight
                model.add_patches({key: ("diff", (0.01 * torch.randn(weight.shape),))})
            store = RepairStore(None)
            watched = core.watched_model(model, doctors.Doctor("model", store, doctors.OFFER, said.append), None)
            noise = core_tiny.noise_of(name)
            with mock.patch.object(core_tiny, "noise_of", lambda _, noise=noise: noise * (1 + 0.1 * runs)):  # noqa: B023
                results = [core_tiny.output(each, name, euler, sigmas) for each in (watched, model, watched)]
            if not torch.equal(results[0], results[1]) or not torch.equal(results[2], results[1]):
                changed.append(name)
            management.unload_all_models()
            runs += 1
    return {"said": said, "changed": changed, "runs": runs}
