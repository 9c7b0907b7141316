"""Scenes about memory: our pipelines under ComfyUI's manager."""

import gc
import weakref
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import comfy.memory_management
import comfy.model_management as management
import comfy.model_patcher
import comfy.ops
import tiny
import torch
from anygpu.compat.checkpoints.packed import StoredLinear, pack, packable
from anygpu.compat.device.failures import is_shortage
from anygpu.compat.device.rates import RATES
from anygpu.compat.memory.offloader import DISK, PLAIN, HostWeights
from anygpu.host import core_models, memory_manager
from anygpu.host.casting import CastLayer
from anygpu.pipelines import stages
from anygpu.pipelines.base import FramePackSettings, SampleSettings, Silent
from anygpu.pipelines.load import lora as lora_nodes
from anygpu.pipelines.load.folder import load
from anygpu.pipelines.requests import LoadRequest
from anygpu.pipelines.speed import SpeedRequest
from comfy.cli_args import args
from safetensors.torch import save_file
from simulated import accelerator, shortages
from simulated.clock import clocked
from torch import nn

from host.inside.device import CASES, bytes_on_device, distance, encoded, loaded_for, rendered, sampled
from host.inside.sight import RESERVE, state


def full_and_none(name: str) -> dict[str, Any]:
    """A case with room for everything, and under ``--novram``: differences from the CPU, peaks, what stays."""
    pipeline, before = loaded_for(name), bytes_on_device()
    found: dict[str, Any] = {"offload": repr(pipeline.offloader), "full": distance(rendered(pipeline, name), name)}
    found["full_peak"] = accelerator.memory().peak_bytes
    management.unload_all_models()
    found["left"], found["classes"] = bytes_on_device() - before, native(pipeline)
    accelerator.reset_peak()
    with state(vram_state=management.VRAMState.NO_VRAM):
        found["none"] = distance(rendered(pipeline, name), name)
        found["none_peak"] = accelerator.memory().peak_bytes
    return found


def zeroed(name: str) -> dict[str, Any]:
    """A case in bf16 on a device that zeroes bf16 on its way to the host, with room for everything and for nothing."""
    with torch.no_grad():
        pipeline = loaded_for(name, precision="bf16")
        expected, equal = rendered(pipeline, name), []
        with accelerator.zeroed_copies(torch.bfloat16) as count:
            for vram in (management.vram_state, management.VRAMState.NO_VRAM):
                management.unload_all_models()
                with state(vram_state=vram):
                    equal.append(
                        all(map(torch.equal, rendered(pipeline, name, device=pipeline.offloader.device), expected))
                    )
            return {"equal": equal, "zeroed": count(), "offload": pipeline.offloader.mode}


def native(pipeline: Any) -> int:
    """How many layers of the parts in memory have another class than they were read with."""
    return sum(isinstance(leaf, CastLayer) for part in pipeline.parts.values() for leaf in part.modules())


DEPTH = {"num_layers": 24, "num_single_layers": 12}  # weights far above activations


def deep(name: str, **chosen: Any) -> Any:
    """The pipeline of a case whose transformer has many more blocks, with random weights that a seed fixes."""
    from anygpu.compat.packages import attribute

    pipeline = loaded_for(name, **chosen)
    core_models.beside(pipeline)
    config = dict(pipeline.configs["transformer"])
    deeper = 2 if pipeline.family == "framepack" else 1  # its history is many tokens
    depth = {key: value * deeper for key, value in DEPTH.items() if key in config}
    kind: Any = attribute("diffusers", pipeline.spec.files.transformer_classes[0])

    def read(progress: Any) -> nn.Module:
        with torch.inference_mode(False), torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            module: nn.Module = kind.from_config({**config, **depth}).eval().requires_grad_(False)
            for table in (t for n, t in module.named_parameters() if n.endswith("scale_shift_table")):
                table.normal_(std=0.2)
            return module

    pipeline.parts.readers["transformer"] = read
    return pipeline


def shares(name: str, shares: list[float], weights: str = "auto") -> dict[str, Any]:
    """Sampling under hard limits: shares of the weights, and what is on the device beside them at full offloader.

    Where one layer is more than 5 % of the weights (HunyuanVideo 1.5 has one of a fixed width) it comes on top.
    """
    pipeline = deep(name, weights=weights)
    encoded_once = encoded(pipeline, name)
    expected = sampled_from(pipeline, name, encoded_once)
    management.unload_all_models()
    accelerator.reset_peak()
    sampled_from(pipeline, name, encoded_once)
    peak, size = accelerator.memory().peak_bytes, pipeline.offloader.patcher.model_size()
    largest = max(t.nbytes for t in pipeline.parts["transformer"].parameters())
    found: dict[str, Any] = {
        "weights": size / peak,
        "largest": largest / size if largest > size / 20 else 0.0,
        "runs": [],
    }
    for share in shares:
        management.unload_all_models()
        accelerator.reset_peak()
        accelerator.reset_traffic()
        with accelerator.limit(int(share * size) + peak - size + (largest if largest > size / 20 else 0)):
            latents = sampled_from(pipeline, name, encoded_once)
            resident = pipeline.offloader.patcher.loaded_size()
        found["runs"].append(
            {
                "share": share,
                "equal": bool(torch.equal(latents, expected)),
                "different": float((latents - expected).abs().max()),
                "peak": accelerator.memory().peak_bytes / peak,
                "resident": resident / size,
                "refusals": accelerator.memory().refusals,
                "to_device": accelerator.traffic().to_device_bytes / size,
                "to_host": accelerator.traffic().to_host_bytes / size,
            }
        )
    return found


def sampled_from(pipeline: Any, name: str, given: tuple[Any, Any]) -> torch.Tensor:
    """Latents of a case whose prompt and picture are encoded already."""
    settings = SampleSettings(64, 64, CASES[name][1], steps=2, seed=3, cfg=2.0)
    if pipeline.family == "framepack":
        framepack = FramePackSettings(CASES[name][1] / 30, window=2)
        return stages.sample_framepack(pipeline, *given, settings, framepack, Silent()).samples
    return stages.sample(pipeline, *given, settings, Silent()).samples


def async_offload(name: str, count: int) -> dict[str, Any]:
    """Sampling with everything streamed on core's ``count`` streams, which it makes of CUDA and XPU devices only."""
    pipeline = loaded_for(name, speed=SpeedRequest(kernels="reference"))
    given = encoded(pipeline, name)
    expected, device = sampled_from(pipeline, name, given), pipeline.offloader.device
    management.unload_all_models()
    streams = [torch.acc.Stream(device) for _ in range(count)]  # type: ignore[attr-defined]
    copied = {True: 0, False: 0}

    def note(_name: str, arguments: list[Any]) -> None:
        target, source = arguments[:2]
        if source.device.type == "cpu" and target.device == device:
            copied[torch.accelerator.current_stream(device) in streams] += target.nbytes

    filled: list[Any] = []
    buffer_of, views_of = management.get_cast_buffer, comfy.memory_management.interpret_gathered_like

    def noted(stream: Any, *given: Any) -> Any:
        filled[:] = [stream]
        return buffer_of(stream, *given)

    def views(tensors: Any, buffer: Any) -> Any:
        with filled[0]:  # the clock takes a view for a use, and core makes its views before the stream's block
            return views_of(tensors, buffer)

    core = {"NUM_STREAMS": count, "STREAMS": {device: streams}, "current_stream": torch.accelerator.current_stream}
    with (
        state(vram_state=management.VRAMState.NO_VRAM),
        patch.multiple(management, stream_counters={}, STREAM_CAST_BUFFERS={}, get_cast_buffer=noted, **core),
        patch.object(comfy.memory_management, "interpret_gathered_like", views),
        clocked(RATES["RTX 4090"]),
        accelerator.hook("aten::copy_", before=note),
    ):
        latents = sampled_from(pipeline, name, given)
    size = pipeline.offloader.patcher.model_size()
    return {
        "equal": bool(torch.equal(latents, expected)),
        "beside": copied[True] / size,
        "waited": copied[False] / size,
    }


def evictions(names: list[str], weights: str = "auto") -> dict[str, Any]:
    """Several pipelines in turn where only one fits, twice round, each then given up: results, what is left."""
    pipeline = {name: deep(name, weights=weights) for name in names}
    given = {name: encoded(pipeline[name], name) for name in names}
    expected, sizes = {}, []
    for name in names:
        management.unload_all_models()
        expected[name] = sampled_from(pipeline[name], name, given[name])
        sizes.append(pipeline[name].offloader.patcher.model_size())
    management.unload_all_models()
    before = bytes_on_device()
    equal, together = [], []
    with accelerator.limit(int(1.6 * max(sizes)) + RESERVE):
        for name in names * 2:
            equal.append(bool(torch.equal(sampled_from(pipeline[name], name, given[name]), expected[name])))
            together.append(sum(pipe.offloader.patcher.loaded_size() for pipe in pipeline.values()))
    alive = [weakref.ref(part) for pipe in pipeline.values() for part in pipe.parts.values()]
    on_device = bytes_on_device()
    pipeline.clear()
    freed = bytes_on_device() - before  # before anything is collected
    gc.collect()
    return {
        "equal": equal, "together": max(together), "limit": int(1.6 * max(sizes)) + RESERVE, "on_device": on_device,
        "freed": freed, "alive": sum(ref() is not None for ref in alive),
        "listed": len(management.current_loaded_models),
    }  # fmt: skip


def cancelled() -> dict[str, Any]:
    """Cancels inside a step, while weights move, and in core's sampler: what is left, and the next run."""
    name = "hunyuan_video"
    pipeline = deep(name)
    given = encoded(pipeline, name)
    expected = sampled_from(pipeline, name, given)
    management.unload_all_models()
    found: dict[str, Any] = {"empty": bytes_on_device()}
    for when, pattern, after in (("inside a step", "aten::addmm", 60), ("moving", "aten::copy_", 30)):
        count = 0

        def press(_operator: str, _arguments: list[Any], after: int = after) -> None:
            nonlocal count
            count += 1
            if count == after:
                management.interrupt_current_processing(True)

        management.unload_all_models()
        with accelerator.hook(pattern, before=press):
            try:
                sampled_from(pipeline, name, given)
                found[when] = "not obeyed"
            except management.InterruptProcessingException:
                found[when] = count - after
        found[f"{when}, left"] = pipeline.offloader.patcher.loaded_size() / pipeline.offloader.patcher.model_size()
        found[f"{when}, next"] = bool(torch.equal(sampled_from(pipeline, name, given), expected))
    return found


def out_of_memory() -> dict[str, Any]:
    """ComfyUI's own answer to running out of memory, and its Free buttons, then a run."""
    name = "ltx"
    pipeline = deep(name)
    given = encoded(pipeline, name)
    expected = sampled_from(pipeline, name, given)
    resident = pipeline.offloader.patcher.loaded_size()
    accelerator.reset_traffic()
    management.unload_all_models()  # what the executor does after an OutOfMemoryError, and /free
    left, classes, copied = bytes_on_device(), native(pipeline), accelerator.traffic().to_host_bytes
    again = sampled_from(pipeline, name, given)
    home = {part: next(pipeline.parts[part].parameters()).device.type for part in pipeline.parts}
    pipeline.offloader.release("transformer")
    return {
        "resident": resident, "left": left, "classes": classes, "copied": copied,
        "equal": bool(torch.equal(again, expected)), "on": home["transformer"],
        "released": next(pipeline.parts["transformer"].parameters()).device.type,
    }  # fmt: skip


def beside_core(name: str) -> dict[str, Any]:
    """A model of core's and ours in turn, where only one fits: each makes the other leave, results stay."""
    pipeline = deep(name)
    given = encoded(pipeline, name)
    expected = sampled_from(pipeline, name, given)
    size = pipeline.offloader.patcher.model_size()
    width = int((size / 16) ** 0.5)
    core = nn.ModuleList(comfy.ops.manual_cast.Linear(width, width) for _ in range(4)).float()
    core.requires_grad_(False)
    theirs = comfy.model_patcher.ModelPatcher(core, management.get_torch_device(), torch.device("cpu"))
    equal, seen = [], []
    management.unload_all_models()
    with accelerator.limit(int(1.5 * size) + RESERVE):
        for _ in range(2):
            management.load_models_gpu([theirs])
            seen.append((theirs.loaded_size() / theirs.model_size(), pipeline.offloader.patcher.loaded_size() / size))
            equal.append(bool(torch.equal(sampled_from(pipeline, name, given), expected)))
            seen.append((theirs.loaded_size() / theirs.model_size(), pipeline.offloader.patcher.loaded_size() / size))
    return {"equal": equal, "seen": seen}


def lora(name: str, weights: str = "auto") -> dict[str, Any]:
    """Patches as core's LoRA nodes add them to our MODEL: at full and no offloader, and gone afterwards."""
    pipeline = deep(name, weights=weights)
    model = pipeline.offloader.patcher
    given = encoded(pipeline, name)
    plain = sampled_from(pipeline, name, given)
    keys = [key for key in model.model_state_dict() if key.endswith("to_q.weight")]
    generator = torch.Generator().manual_seed(5)
    changes = {key: (torch.randn(model.model_state_dict()[key].shape, generator=generator) * 0.1,) for key in keys}
    patched = model.clone()
    added = len(patched.add_patches(changes, 1.0))
    pipeline.offloader.patchers["transformer"] = patched
    full = sampled_from(pipeline, name, given)
    with state(vram_state=management.VRAMState.NO_VRAM):
        management.unload_all_models()
        streamed = sampled_from(pipeline, name, given)
    pipeline.offloader.patchers["transformer"] = model
    return {
        "keys": len(keys),
        "first": keys[0],
        "added": added,
        "changes": float((full - plain).abs().max()),
        "streamed": float((streamed - full).abs().max()),
        "undone": bool(torch.equal(sampled_from(pipeline, name, given), plain)),
    }


CODEC = "Q8_0"


def packed(name: str, weights: str, folder: str, precision: str = "fp32") -> dict[str, Any]:
    """Packed weights, encoders' too, with our own LoRA beside them: at full offloader, at none, and without the host's:
    on the CPU, or in a precision that a CPU refuses under our own offloader."""
    ours = {"device": "cpu"} if precision == "fp32" else {"offload": "group"}
    kept = {} if weights == CODEC else {"weights": weights, "text_weights": weights}
    found: dict[str, Any] = {}
    runs: dict[str, list[torch.Tensor]] = {}
    file = Path(folder, f"{name}.safetensors")
    for place, chosen in (("ours", ours), ("full", {})):
        pipeline = loaded_for(name, precision=precision, **chosen, **kept)
        if weights == CODEC:
            in_blocks(pipeline.parts["transformer"])
        if not file.exists():
            save_file(factors(pipeline), file)
        adapted = lora_nodes.with_lora(pipeline, file, 0.8, "", "separate", Silent())
        runs[place] = [sampled(pipe, name).samples for pipe in (pipeline, adapted, pipeline)]
    layers = [leaf for part in pipeline.parts.values() for leaf in part.modules() if isinstance(leaf, StoredLinear)]
    management.unload_all_models()
    found |= {"layers": len(layers), "classes": native(pipeline)}
    with state(vram_state=management.VRAMState.NO_VRAM):
        runs["none"] = [sampled(pipe, name).samples for pipe in (pipeline, adapted, pipeline)]
        found["away"] = all(leaf.stored.device.type == "cpu" for leaf in layers)
    for place in ("full", "none"):
        pairs = zip(runs[place], runs["ours"], strict=True)
        found[place] = [float((ours - theirs).abs().max()) for ours, theirs in pairs]
    found["lora"] = float((runs["ours"][1] - runs["ours"][0]).abs().max())
    return found


def narrow(name: str, folder: str) -> dict[str, Any]:
    """A bf16 checkpoint that computes in fp32, its weights left to auto: at full offloader, at none, on the CPU."""
    model = tiny.build(name, Path(folder), dtype=torch.bfloat16)
    dense = load(LoadRequest(model, precision="fp32", device="cpu"))
    request = LoadRequest(model, precision="fp32", device=memory_manager.compute_device())
    pipeline = load(request, None, memory_manager.make_room, memory_manager.offloader_on)
    expected, found = sampled(dense, name).samples, {"full": sampled(pipeline, name).samples}
    management.unload_all_models()
    with state(vram_state=management.VRAMState.NO_VRAM):
        found["none"] = sampled(pipeline, name).samples
    layers = [leaf for part in pipeline.parts.values() for leaf in part.modules() if isinstance(leaf, StoredLinear)]
    return {
        "dtypes": sorted({str(leaf.stored.dtype) for leaf in layers}),
        "packed": sum(isinstance(leaf, StoredLinear) for leaf in dense.parts["transformer"].modules()),
        **{place: float((samples - expected).abs().max()) for place, samples in found.items()},
    }


def in_blocks(module: nn.Module) -> None:
    """Turn the layers that may be packed into such as a GGUF file has."""
    import gguf

    kind = gguf.GGMLQuantizationType[CODEC]
    with torch.inference_mode(False):
        for layer in packable(module).values():
            if layer.in_features % gguf.GGML_QUANT_SIZES[kind][0] == 0:
                rows = torch.from_numpy(gguf.quants.quantize(layer.weight.numpy(), kind))
                pack(layer, rows, layer.weight.dtype, CODEC)


def factors(pipeline: Any) -> dict[str, torch.Tensor]:
    """A LoRA over every layer of a transformer."""
    generator, tensors = torch.Generator().manual_seed(5), {}
    for name, (rows, *inside) in tiny.matrices_of(pipeline).items():
        tensors[f"{name}.lora_A.weight"] = torch.randn(4, *inside, generator=generator) * 0.1
        tensors[f"{name}.lora_B.weight"] = torch.randn(rows, 4, *[1] * (len(inside) - 1), generator=generator) * 0.1
    return tensors


def many(name: str, runs: int) -> dict[str, Any]:
    """One pipeline, run after run: bytes on the device after the first and the last, and ComfyUI's list."""
    pipeline = loaded_for(name)
    rendered(pipeline, name)
    first, objects = bytes_on_device(), len(gc.get_objects()) if gc.collect() >= 0 else 0
    for _ in range(runs):
        rendered(pipeline, name)
    last = bytes_on_device()
    gc.collect()
    grown = len(gc.get_objects()) - objects
    management.unload_all_models()
    return {"first": first, "last": last, "grown": grown / runs, "listed": len(management.current_loaded_models)}


def handle(name: str) -> dict[str, Any]:
    """What ComfyUI's caches see of a pipeline."""
    pipeline = loaded_for(name)
    read = list(pipeline.parts)
    seen = comfy.model_patcher.is_model_patcher_output(pipeline)
    model, vae = core_models.beside(pipeline)
    lazily = list(pipeline.parts)
    rendered(pipeline, name)
    return {
        "read": read,
        "lazily": lazily,
        "seen": seen,
        "dynamic": pipeline.is_dynamic(),
        "models": sorted(type(patcher.model).__name__ for patcher in pipeline.get_models()),
        "one": model is pipeline.offloader.patcher and vae.patcher in pipeline.get_models(),
        "text": repr(pipeline),
    }


class Said(Silent):
    """Remembers what was said."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def notify(self, text: str) -> None:
        self.lines.append(text)


def shortage() -> dict[str, Any]:
    """Memory runs out twice inside a step, beside another model on the device."""
    name, steps = "hunyuan_video", 3
    pipeline = deep(name)
    prompt, image = encoded(pipeline, name)
    settings = SampleSettings(64, 64, CASES[name][1], steps=steps, seed=3)
    expected = stages.sample(pipeline, prompt, image, settings, Silent()).samples
    other = loaded_for("ltx")
    with other.offloader.hold("transformer"):
        pass
    calls, failing = 0, {2: "first", 3: "second"}
    transformer = pipeline.parts["transformer"]

    def counted(_module: nn.Module, _inputs: Any) -> None:
        nonlocal calls
        calls += 1
        if failing.pop(calls, ""):
            raise torch.OutOfMemoryError("acc out of memory. Tried to allocate 1.00 GiB.")

    hook = transformer.register_forward_pre_hook(counted)
    progress = Said()
    try:
        found = stages.sample(pipeline, prompt, image, settings, progress).samples
    finally:
        hook.remove()
    patcher = pipeline.offloader.patcher
    return {
        "equal": bool(torch.equal(found, expected)),
        "calls": calls,
        "steps": steps,
        "said": [line for line in progress.lines if "ran out of memory" in line],
        "resident": patcher.loaded_size() / patcher.model_size(),
        "moved": pipeline.offloader.memory_stats.moved_bytes,
    }


def locked() -> dict[str, list[int]]:
    """How many weights ComfyUI was to lock in host memory while a transformer streams and leaves; a clone too."""
    offloader: Any = memory_manager.comfy_offloader(loaded_for("ltx"))
    found: dict[str, list[int]] = {}
    count = 0

    def lock(_tensor: torch.Tensor) -> bool:
        nonlocal count
        count += 1
        return False

    for kind in (PLAIN, DISK):
        offloader.patchers.clear()
        offloader.options = replace(offloader.options, host_weights=HostWeights({"transformer": kind}))
        found[kind] = []
        for patcher in (offloader.patcher, offloader.patcher.clone()):
            for room in (1.0, 1e12):
                count = 0
                with state(pin_memory=lock), torch.inference_mode(False), torch.no_grad():
                    patcher.partially_load(patcher.load_device, room)
                    if room > 1.0:
                        patcher.partially_unload(patcher.offload_device, room)
                found[kind].append(count)
                memory_manager.unload(patcher)
    return found


def dense_asked() -> dict[str, Any]:
    """How often packed layers are made dense while a part comes and leaves, and where their weight is said to be."""
    pipeline = loaded_for("ltx", weights="fp8")
    patcher = pipeline.offloader.patcher
    layers = [leaf for leaf in patcher.model.fill().modules() if isinstance(leaf, StoredLinear)]
    counts, dense = [0], StoredLinear.dense

    def counted(self: StoredLinear, dtype: torch.dtype) -> torch.Tensor:
        counts[0] += 1
        return dense(self, dtype)

    StoredLinear.dense = counted
    try:
        with torch.inference_mode(False), torch.no_grad():
            patcher.partially_load(patcher.load_device, 1e12)
            freed = patcher.partially_unload(patcher.offload_device, 1.0)
            found = {"layers": len(layers), "freed": freed, "dense": counts[0]}
            resident: Any = next(leaf for leaf in layers if leaf.stored.device.type != "cpu")
            for name in ("acc", "acc:0", "acc:7", "cpu"):
                resident.runs_on = torch.device(name)
                found[name] = str(resident.weight.device)
    finally:
        StoredLinear.dense = dense
    memory_manager.unload(patcher)
    return found


def short_beside() -> list[str]:
    """How room is made, three times, in a stage that uses two parts, with one more model on the device at first."""
    pipeline, parts, said = loaded_for("ltx"), ("vae", "transformer"), []
    with pipeline.offloader.hold("text_encoder"):
        pass
    for _ in range(3):
        with pipeline.offloader.hold(parts[0]), pipeline.offloader.hold(parts[1]):
            said.append(pipeline.offloader.reduce_memory(*parts))
    management.unload_all_models()
    return said


def one_dead() -> list[Any]:
    """Bytes that ComfyUI could take, without and with a patcher that nobody holds any more; how room is made then."""
    pipeline, device = loaded_for("ltx"), memory_manager.compute_device()
    with pipeline.offloader.hold("transformer"):
        found = [memory_manager.evictable_bytes(device)]
    network = nn.Linear(2, 2)  # which somebody holds: a leak, as core calls it
    gone = comfy.model_patcher.ModelPatcher(network, management.get_torch_device(), torch.device("cpu"))
    item = management.LoadedModel(gone)
    item.real_model = weakref.ref(network)
    management.current_loaded_models.append(item)
    del gone
    try:
        found += [memory_manager.evictable_bytes(device), pipeline.offloader.patcher.loaded_size()]
        return [*found, pipeline.offloader.reduce_memory("transformer")]
    finally:
        management.current_loaded_models.remove(item)


def refused_once() -> dict[str, Any]:
    """Memory runs out once while a part moves, then another model comes: shares on the device as stages go by."""
    ours, other = loaded_for("ltx"), loaded_for("mochi")
    management.unload_all_models()
    patchers, seen, left = [pipe.offloader.patcher for pipe in (ours, other)], [], 1

    def full(_operator: str, _arguments: list[Any]) -> None:
        nonlocal left
        if left:
            left -= 1
            raise torch.OutOfMemoryError("acc out of memory. Tried to allocate 2.00 MiB.")

    def held(pipe: Any) -> None:
        with pipe.offloader.hold("transformer"):
            seen.append([patcher.loaded_size() / patcher.model_size() for patcher in patchers])

    with accelerator.hook("aten::copy_", before=full):
        held(ours)
    for pipe in (other, ours):
        held(pipe)
    return {"seen": seen, "sprung": not left}


def flagged(flag: str, weights: str = "auto") -> dict[str, Any]:
    """Sampling as ``--lowvram``, ``--reserve-vram`` or ``--disable-smart-memory`` would have it."""
    name = "ltx"
    pipeline = deep(name, weights=weights)
    given = encoded(pipeline, name)
    expected = sampled_from(pipeline, name, given)
    size, reserve = pipeline.offloader.patcher.model_size(), 0
    management.unload_all_models()
    changes: dict[str, Any] = {"vram_state": management.VRAMState.LOW_VRAM}
    if flag == "reserve":
        reserve = size // 2
        changes = {"extra_reserved_memory": lambda: reserve, "minimum_inference_memory": lambda: RESERVE + reserve}
    elif flag == "disable-smart-memory":
        changes = {"DISABLE_SMART_MEMORY": True}
    with state(**changes), accelerator.limit(int(1.3 * size) + RESERVE):
        found = sampled_from(pipeline, name, given)
        free = torch.acc.mem_get_info()[0]
    return {"equal": bool(torch.equal(found, expected)), "free": free, "reserve": reserve}


def apart() -> dict[str, Any]:
    """Text encoders on the CPU, the rest on the device."""
    name = "ltx"
    pipeline = loaded_for(name, devices={"text_encoder": "cpu"})
    before = accelerator.traffic().to_device_bytes
    prompt, image = encoded(pipeline, name)
    text = accelerator.traffic().to_device_bytes - before
    settings = SampleSettings(64, 64, CASES[name][1], steps=2, seed=3)
    latents = stages.sample(pipeline, prompt, image, settings, Silent()).samples
    devices = [pipeline.offloader.device_of(part).type for part in ("text_encoder", "transformer")]
    return {"devices": devices, "text_bytes": text, "finite": bool(torch.isfinite(latents).all())}


def short_anywhere(streamed: bool, places: int) -> dict[str, Any]:
    """Memory that runs out at places all over holding the transformer, by ComfyUI's manager: what is told otherwise
    than as a shortage, and how many of the runs after them differ from the first.

    Args:
        streamed: whether nothing stays on the device.
    """
    vram = management.VRAMState.NO_VRAM if streamed else management.vram_state
    with state(vram_state=vram):
        pipeline = loaded_for("ltx")
        transformer = pipeline.parts.read("transformer")
        weight = next(leaf for leaf in transformer.modules() if type(leaf) is nn.Linear)
        x = torch.ones(2, weight.in_features, device=pipeline.offloader.device)

        def held() -> torch.Tensor:
            with torch.no_grad(), pipeline.offloader.hold("transformer"):
                here = weight(x).cpu()
                pipeline.offloader.reduce_memory("transformer")
                return torch.stack([here, weight(x).cpu()])

        wanted = held()
        management.unload_all_models()
        with shortages.shortage(0) as whole:
            held()
        found: dict[str, Any] = {"steps": whole.count, "told": [], "different": 0}
        for at in range(1, whole.count, max(1, whole.count // places)):
            management.unload_all_models()
            with shortages.shortage(at):
                try:
                    held()
                except Exception as error:
                    found["told"] += [] if is_shortage(error) else [f"step {at}: {error!r}"]
            found["different"] += not torch.equal(held(), wanted)
    return found


def high_vram(name: str, gpu_only: bool) -> dict[str, Any]:
    """A case under ``--highvram`` or ``--gpu-only``: the result, what stays, what leaves when it is asked to."""
    flags = {"vram_state": management.VRAMState.HIGH_VRAM}
    with state(**flags), patch.object(args, "gpu_only", gpu_only):
        pipeline, before = loaded_for(name), bytes_on_device()
        found: dict[str, Any] = {
            "different": distance(rendered(pipeline, name, device=pipeline.offloader.device), name)
        }
        found["stays"] = bytes_on_device() - before
        patcher = pipeline.offloader.patcher
        with pipeline.offloader.hold("transformer"):
            found["loaded"] = patcher.loaded_size() / patcher.model_size()
            pipeline.offloader.reduce_memory("transformer")  # the other models
            on_device = bytes_on_device()
            found["done"] = pipeline.offloader.reduce_memory("transformer")
            found["freed"] = (on_device - bytes_on_device()) / patcher.model_size()
        management.unload_all_models()
        room = bytes_on_device() + patcher.model_size() + RESERVE
        with accelerator.limit(room), pipeline.offloader.hold("transformer"):
            found["again"] = patcher.loaded_size() / patcher.model_size()
        for part in pipeline.parts:
            pipeline.offloader.release(part)
        found["left"] = bytes_on_device() - before
    return found


def waiting(guarded: bool) -> list[list[int]]:
    """Who waits for whom as streamed weights come to a transformer on the second card: (waiting device, other device).

    Args:
        guarded: whether a part's device is made the current one, as ComfyUI does around its own samplers.
    """

    def stream(device: torch.device) -> None:  # as ComfyUI's for CUDA, whose current stream is the current device's
        torch.acc.current_stream().wait_stream(torch.acc.Stream(device))

    pipeline = loaded_for("ltx", devices={"transformer": "acc:1"})
    changes = {"vram_state": management.VRAMState.NO_VRAM, "get_offload_stream": stream}
    current = memory_manager.current if guarded else lambda _device: nullcontext()
    with state(**changes), patch.object(memory_manager, "current", current):
        accelerator.take_waits()
        sampled(pipeline, "ltx")
        return sorted({tuple(pair) for pair in accelerator.take_waits()})


def shared_memory(name: str) -> dict[str, Any]:
    """A case where host and device have one memory: what is kept twice, the results, and the weights afterwards."""
    pipeline = loaded_for(name)
    offloader: Any = pipeline.offloader
    kept = {key: tensor.clone() for key, tensor in pipeline.parts.read("transformer").state_dict().items()}
    found: dict[str, Any] = {}
    for shared in (False, True):
        management.unload_all_models()
        offloader.patchers.clear()
        offloader.options = replace(offloader.options, host_weights=HostWeights(shared=shared))
        with offloader.hold("transformer") as module:
            tensors = [*module.parameters(), *module.buffers()]
            twice = sum(tensor.nbytes for tensor in tensors if "anygpu_home" in tensor.__dict__)
            found[f"twice, shared {shared}"] = twice / offloader.patcher.model_size()
        found[f"different, shared {shared}"] = distance(rendered(pipeline, name), name)
        with state(vram_state=management.VRAMState.NO_VRAM):
            management.unload_all_models()
            found[f"streamed, shared {shared}"] = distance(rendered(pipeline, name), name)
        management.unload_all_models()
        state_now = pipeline.parts.read("transformer").state_dict()
        found[f"same, shared {shared}"] = all(torch.equal(state_now[key], value) for key, value in kept.items())
    found["classes"] = native(pipeline)
    return found
