"""Scenes about the doctor: beside core's own models, and beside ours in core's samplers."""

import functools
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import comfy.model_management as management
import comfy.samplers
import comfy.sd
import torch
from anygpu.compat import doctor as doctors
from anygpu.compat.output_check import NotFinite
from anygpu.compat.repairs import FP32, Repair, RepairStore, repaired
from anygpu.host.core import doctor as core
from anygpu.host.core import model as core_model
from anygpu.host.core.attention import OVERRIDE
from anygpu.host.core.weights import name_of
from comfy.weight_adapter import LoRAAdapter
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from host.inside import core_tiny, core_tiny_vaes
from host.inside.core import SHAPES, USUAL_SHAPE, cores, prepared
from host.inside.core_fit import EULER, turing

PEAK = 3e5  # of the residual: five times what fp16 can hold


def _watched(model: Any, choice: str, folder: str | None = None) -> tuple[Any, list[str]]:
    said: list[str] = []
    store = RepairStore(None if folder is None else Path(folder))
    return core.watched_model(model, doctors.Doctor("model", store, choice, said.append), None), said


def nan_everywhere(name: str, largest: int = 0) -> dict[str, Any]:
    """A NaN in each weight of core's tiny ``name`` in turn: which were named right, which wrong, which are not used."""
    model = core_tiny.made(name, torch.float32, None)
    watched, _ = _watched(model, doctors.EXPLAIN)
    core_tiny.output(watched, name)
    right, wrong, unused = [], {}, []
    network = model.model.diffusion_model
    for place, weight in list(network.named_parameters()):
        before = weight.data.view(-1)[0].clone()
        weight.data.view(-1)[0] = float("nan")
        try:
            core_tiny.output(watched, name)
            unused.append(place)
        except NotFinite as error:
            layer, _, own = place.rpartition(".")
            named = f"diffusion_model.{layer} (" in str(error) if layer else "diffusion_model (" in str(error)
            if named and f"of its {own} is" in str(error):
                right.append(place)
            else:
                wrong[place] = str(error)
        weight.data.view(-1)[0] = before
    return {"right": len(right), "wrong": wrong, "unused": unused}


def overflowing(name: str) -> dict[str, Any]:
    """Core's tiny ``name`` in fp16 with a residual beyond it: what is offered, and what is kept in the runs after."""
    model = core_tiny.made(name, torch.float16)
    core_tiny.louder(model, name, PEAK)
    expected = core_tiny.output(model, name)
    plain = model.clone()
    plain.set_model_compute_dtype(torch.float16)
    report: dict[str, Any] = {"broken": not bool(core_tiny.output(plain, name).isfinite().all())}
    with tempfile.TemporaryDirectory() as folder:
        watched, _ = _watched(plain, doctors.OFFER, folder)
        try:
            core_tiny.output(watched, name)
        except NotFinite as error:
            report["offered"] = str(error)
        for run in ("kept", "again"):
            watched, said = _watched(plain, doctors.KEEP, folder)
            report[run] = {"error": core_tiny.error(core_tiny.output(watched, name), expected), "said": said}
    network = model.model.diffusion_model
    report["traces"] = sum("forward" in vars(module) or bool(module._forward_hooks) for module in network.modules())
    management.unload_all_models()
    return report


def run_again(name: str) -> list[int]:
    """Calls of core's tiny ``name`` after each try, with core's EasyCache; the third step is tried twice."""
    from comfy_extras.nodes_easycache import EasyCacheNode

    calls, counts, own = list[int](), list[int](), core.StepWatch.fault
    model = core_tiny.made(name, torch.float32, None)
    watched, _ = _watched(EasyCacheNode.execute(model, 1e-6, 0.0, 1.0, False).result[0], doctors.EXPLAIN)

    def fault(watch: Any, output: Any) -> str:
        wrong, watch.loud = own(watch, output), len(counts) == 2
        counts.append(len(calls))
        return wrong

    handle = next(model.model.diffusion_model.children()).register_forward_hook(lambda *_: calls.append(1))
    with mock.patch.object(core.StepWatch, "fault", fault), handle:
        core_tiny.output(watched, name, *EULER)
    return counts


def broken_attention(name: str) -> dict[str, Any]:
    """Core's tiny ``name`` behind a node whose attention gives NaN: what is offered, and what the next run gives."""
    model = core_tiny.made(name, torch.float32, None)
    expected = core_tiny.output(model, name)
    broken = model.clone()

    def attention(func: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return func(*args, **kwargs) * float("nan")

    broken.model_options["transformer_options"][OVERRIDE] = attention
    with tempfile.TemporaryDirectory() as folder:
        watched, _ = _watched(broken, doctors.OFFER, folder)
        try:
            core_tiny.output(watched, name)
            offered = ""
        except NotFinite as error:
            offered = str(error)
        again, _ = _watched(broken, doctors.KEEP, folder)
        seen = core_tiny.output(again, name)
        kept, said = _watched(broken, doctors.KEEP, folder)
        return {
            "offered": offered,
            "first": core_tiny.error(seen, expected),
            "error": core_tiny.error(core_tiny.output(kept, name), expected),
            "said": said,
        }


def beside_ours(name: str) -> dict[str, Any]:
    """The doctor on our MODEL in core's sampler: nothing changes, then a NaN is found."""
    pipeline, model, _, _, conditionings, generator = prepared(name)
    noise = torch.randn(SHAPES.get(name, USUAL_SHAPE), generator=generator)
    plain = cores(model, *conditionings, noise)
    watched, said = _watched(model, doctors.OFFER)
    same = bool(torch.equal(cores(watched, *conditionings, noise), plain))
    management.unload_all_models()
    transformer = pipeline.parts.read("transformer")
    place = [key for key in transformer.state_dict() if "blocks.1." in key and key.endswith("weight")][-1]
    transformer.get_parameter(place).data.view(-1)[0] = float("nan")
    try:
        cores(watched, *conditionings, noise)
    except NotFinite as error:
        return {"same": same, "said": said, "place": place, "error": str(error)}
    return {"same": same, "said": said, "place": place, "error": ""}


def vae_in_fp32(name: str) -> dict[str, float]:
    """Errors of core's tiny VAE ``name`` in fp16 against itself in fp32: alone, and under the repair of all of it."""
    vae, latents = core_tiny_vaes.made(name), core_tiny_vaes.latents_of(name).half().float()
    network, repair = nn.ModuleDict({"vae": vae.first_stage_model.half()}), Repair("vae", FP32)
    vae.vae_dtype = torch.float16
    alone = vae.decode(latents)
    with repaired(network, [repair]):
        found = vae.decode(latents)
    vae.first_stage_model.float()
    vae.vae_dtype = torch.float32
    right = vae.decode(latents)
    return {"alone": float((alone - right).abs().max()), "repaired": float((found - right).abs().max())}


def names_of_vaes(name: str) -> list[str]:
    """Names under which repairs of tiny VAE ``name`` are kept: twice of one, of another's values, and of none."""
    vaes = [core_tiny_vaes.made(name) for _ in range(3)]
    with torch.no_grad():
        for weight in vaes[2].first_stage_model.parameters():
            weight.mul_(2)
    names = [name_of(vae.patcher) for vae in vaes]
    vaes[2].first_stage_model.to("meta")  # nothing to read, as in layers that other packs fill later
    return [*names, name_of(vaes[2].patcher)]


def nan_in_a_vae(name: str) -> dict[str, Any]:
    """A NaN in each weight of the decoder of core's tiny VAE ``name`` in turn, as above; and one colour."""
    vae = core_tiny_vaes.made(name)
    latents = core_tiny_vaes.latents_of(name)
    watched = core.watched_vae(vae, doctors.Doctor("vae", RepairStore(None), doctors.EXPLAIN, print))
    same = bool(torch.equal(watched.decode(latents), vae.decode(latents)))
    network, right, wrong, unused = vae.first_stage_model, [], {}, []
    decoder = [(place, weight) for place, weight in network.named_parameters() if place.startswith("decoder")]
    for place, weight in decoder:
        before = weight.data.view(-1)[0].clone()
        weight.data.view(-1)[0] = float("nan")
        try:
            watched.decode(latents)
            unused.append(place)
        except NotFinite as error:
            layer, _, own = place.rpartition(".")
            if f" vae.{layer} (" in str(error) and f"of its {own} is NaN" in str(error):
                right.append(place)
            else:
                wrong[place] = str(error)
        weight.data.view(-1)[0] = before
    last = [module for module in network.decoder.modules() if getattr(module, "weight", None) is not None][-1]
    with torch.no_grad():
        last.weight.zero_()
        last.bias.zero_()
    colour = ""
    try:
        watched.decode(latents)
    except NotFinite as error:
        colour = str(error)
    return {"same": same, "right": len(right), "wrong": wrong, "unused": unused, "colour": colour}


def beside_fit(name: str) -> dict[str, Any]:
    """Doctor and Fit Model on one MODEL in both orders: the error of the fitted one, and a NaN that is found."""
    model = core_tiny.made(name, torch.float16)
    core_tiny.louder(model, name, PEAK)
    expected, machine, report = core_tiny.output(model, name), turing(), {}
    for order in ("fit first", "doctor first"):
        if order == "fit first":
            fitted, _ = core_model.fit_model(model, keep_latents="never", machine=machine)
            both, _ = _watched(fitted, doctors.OFFER)
        else:
            watched, _ = _watched(model, doctors.OFFER)
            both, _ = core_model.fit_model(watched, keep_latents="never", machine=machine)
        report[order] = {"error": core_tiny.error(core_tiny.output(both, name), expected)}
        weight = model.model.diffusion_model.get_submodule(core_tiny.CASES[name].loud).weight
        before = weight.data.view(-1)[0].clone()
        weight.data.view(-1)[0] = float("nan")
        try:
            core_tiny.output(both, name)
        except NotFinite as error:
            report[order]["said"] = str(error)
        weight.data.view(-1)[0] = before
    return report


def bypassed(name: str) -> dict[str, Any]:
    """A layer whose output a LoRA in core's bypass mode triples: the error of a watched run, and what was said."""
    model = core_tiny.made(name, torch.float32, None)
    layer = model.model.diffusion_model.get_submodule(core_tiny.CASES[name].loud)
    layer.forward = lambda x: 3 * type(layer).forward(layer, x)
    expected, (watched, said) = core_tiny.output(model, name), _watched(model, doctors.OFFER)
    return {"error": core_tiny.error(core_tiny.output(watched, name), expected), "said": said}


def of_nothing() -> int:
    """How many checks are made of products of no rows, in an empty batch and of no tokens."""
    layer = nn.Linear(4, 4)
    watch = core.StepWatch(nn.ModuleDict({"network": nn.Sequential(layer)}))
    for dtype, shape in ((torch.float32, (0, 3, 4)), (torch.float16, (1, 0, 4))):
        with watch.on(True):
            layer.to(dtype)(torch.zeros(shape, dtype=dtype))
    return len(watch.spots)


def compiled(name: str) -> dict[str, Any]:
    """A NaN in a model that core's node has compiled, and what the doctor says."""
    from comfy_api.torch_helpers import set_torch_compile_wrapper

    model = core_tiny.made(name, torch.float32, None)
    plain = core_tiny.output(model, name)
    quick = model.clone()
    set_torch_compile_wrapper(model=quick, backend="eager")
    watched, _ = _watched(quick, doctors.OFFER)
    report: dict[str, Any] = {"error": core_tiny.error(core_tiny.output(watched, name), plain)}
    weight = model.model.diffusion_model.get_submodule(core_tiny.CASES[name].loud).weight
    weight.data.view(-1)[0] = float("nan")
    try:
        core_tiny.output(watched, name)
    except NotFinite as error:
        report["said"] = str(error)
    return report


def cost(name: str) -> dict[str, float]:
    """Operations of torch that watching adds to each step of core's tiny ``name``, and the hooks that it leaves."""
    model = core_tiny.made(name, torch.float32, None)
    watched, _ = _watched(model, doctors.OFFER)
    euler, counts = comfy.samplers.sampler_object("euler"), []
    core_tiny.output(model, name)  # loads it
    for one in (watched, model):
        for sigmas in ((0.9, 0.8, 0.6, 0.3, 0.0), (0.9, 0.6, 0.0)):
            with Counter() as counter:
                core_tiny.output(one, name, euler, sigmas)
            counts.append(counter.count)
    modules = model.model.diffusion_model.modules()
    return {
        "step": (counts[2] - counts[3]) / 2,
        "added": (counts[0] - counts[1] - counts[2] + counts[3]) / 2,
        "hooks": sum(len(module._forward_hooks) + ("forward" in vars(module)) for module in modules),
    }


WIDE = "Wan 2.1 at the width of its smallest release, with two blocks"
core_tiny.CASES[WIDE] = replace(
    core_tiny.CASES["Wan 2.1"],
    config={**core_tiny.WAN, "dim": 1536, "num_heads": 12, "ffn_dim": 8960, "freq_dim": 256, "text_dim": 4096},
    shapes=((1, 16, 5, 32, 32),),
    width=4096,
)


def timed(steps: int) -> dict[str, Any]:
    """Seconds of this thread in a watched sampling, and those that watching took, its first close look included.

    A thread's own time, since other processes share the processor.
    """
    model = core_tiny.made(WIDE, torch.float32, None)
    watched, _ = _watched(model, doctors.OFFER)
    core_tiny.output(model, WIDE)  # loads it
    watching, depth = [0.0], [0]

    def clocked(function: Any) -> Any:
        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            depth[0], start = depth[0] + 1, time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                depth[0] -= 1
                watching[0] += (time.thread_time() - start) * (not depth[0])

        return called

    parts = ("__init__", "fault", "keep", "_block", "_product", "_attention")
    with ExitStack() as stack:
        for name in parts:
            own = getattr(core.StepWatch, name)
            stack.enter_context(mock.patch.object(core.StepWatch, name, clocked(own)))
        stack.enter_context(mock.patch.object(core, "healed", clocked(core.healed)))
        start = time.thread_time()
        sigmas = tuple(torch.linspace(0.95, 0.0, steps + 1).tolist())
        core_tiny.output(watched, WIDE, comfy.samplers.sampler_object("euler"), sigmas)
        whole = time.thread_time() - start
    return {"watching": watching[0], "whole": whole}


class Counter(TorchDispatchMode):
    """Counts the operations that reach the device."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def widened_by_a_lora() -> dict[str, Any]:
    """Flux under a LoRA that makes its first layer twice as wide, for a control picture beside the latents."""
    name, model, generator = "Flux", core_tiny.made("Flux", torch.float16), torch.Generator().manual_seed(1)
    rows, columns = model.model.diffusion_model.img_in.weight.shape
    up, down = (0.1 * torch.randn(size, generator=generator) for size in ((rows, 4), (4, 2 * columns)))
    widened = {"img_in.lora_A.weight": down, "img_in.lora_B.weight": up}
    widened["img_in.reshape_weight"] = torch.tensor([rows, 2 * columns])
    model.add_patches({"diffusion_model.img_in.weight": LoRAAdapter.load("img_in", widened, None, None, set())})
    picture, conditioning = torch.randn(core_tiny.CASES[name].shapes[0], generator=generator), core_tiny.conditioning

    def controlled(*given: Any) -> Any:
        made = conditioning(*given)
        made[0][1]["concat_latent_image"] = picture
        return made

    with mock.patch.object(core_tiny, "conditioning", controlled):
        expected = core_tiny.output(model, name)
        watched, said = _watched(model, doctors.OFFER)
        return {"same": bool(torch.equal(core_tiny.output(watched, name), expected)), "said": said}


def patched_beside_children(name: str, key: str) -> dict[str, Any]:
    """A LoRA and a merge that patch a tensor of a module with children, which core leaves as it is; twice each."""
    from comfy_extras.nodes_model_merging import ModelMergeSimple

    model, said, same = core_tiny.made(name), list[str](), list[bool]()
    with mock.patch.dict(core_tiny.CASES, {name: replace(core_tiny.CASES[name], seed=5)}):
        other = core_tiny.made(name)
    change = 0.1 * torch.ones_like(model.model.diffusion_model.get_parameter(key))
    lora = comfy.sd.load_lora_for_models(model, None, {f"diffusion_model.{key}.diff": change}, 1.0, 0.0)[0]
    for patched in (lora, ModelMergeSimple().merge(model, other, 0.3)[0]):
        assert f"diffusion_model.{key}" in patched.patches
        expected = core_tiny.output(patched, name, *EULER)
        watched, lines = _watched(patched, doctors.OFFER)
        same += [bool(torch.equal(core_tiny.output(watched, name, *EULER), expected)) for _ in range(2)]
        said += lines
    return {"same": same, "said": said}


def with_bad_text(name: str) -> str:
    """What the doctor says of a CONDITIONING that holds NaN."""
    model = core_tiny.made(name, torch.float32, None)
    watched, _ = _watched(model, doctors.OFFER)
    ((text, _),) = clean = core_tiny.conditioning(name)
    text[0, 0, 0] = float("nan")
    with mock.patch.object(core_tiny, "conditioning", lambda *_: clean):
        try:
            core_tiny.output(watched, name)
        except NotFinite as error:
            return str(error)
    return ""
