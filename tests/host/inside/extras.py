"""Scenes about every node of core's that takes a MODEL and gives one, on ours."""

import asyncio
import functools
import importlib
import inspect
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import comfy.model_management as management
import comfy.samplers
import torch
from anygpu.compat.errors import InputError, UnsupportedError
from anygpu.host import core_models, diffusion_model, memory_manager
from anygpu.host.server import forecast
from anygpu.pipelines import stages
from anygpu.pipelines.base import ImageRequest, Silent
from comfy_extras.nodes_lt import LTXVAddGuide
from simulated import accelerator

from host.inside import core_fit, core_tiny
from host.inside.core import SHAPES, USUAL_SHAPE, cores, prepared
from host.inside.device import PICTURE, SIDE, loaded_for
from host.inside.sight import state


def counted_levels(module: str, kind: str, inputs: dict[str, Any]) -> tuple[int, int]:
    """Steps by the noise levels that a node of core's makes, and as the tab counts them from its inputs, 0 unknown."""
    made = getattr(importlib.import_module(f"comfy_extras.{module}"), kind).execute(**inputs).result[0]
    prompt = {
        "1": {"class_type": kind, "inputs": inputs},
        "2": {"class_type": "AnyGPUSample", "inputs": {"sigmas": ["1", 0]}},
    }
    return len(made) - 1, forecast._linked_sigmas(prompt, "2")[0].get("steps", 0)


OTHERS = {  # inputs that only another model's own files can fill
    *("MODEL_PATCH", "LORA_MODEL", "LATENT_OPERATION", "COMFY_DYNAMICCOMBO_V3", "VAE", "CLIP", "IMAGE", "CONDITIONING")
}
CHOSEN: dict[str, dict[str, Any]] = {  # where a node's defaults change nothing on any model
    "CFGOverride": {"cfg": 4.0},
    "ChromaRadianceOptions": {"nerf_tile_size": 8},
    "ContextWindowsManual": {"context_length": 2, "context_overlap": 1, "freenoise": False, "dim": 2},
    "EasyCache": {"reuse_threshold": 3.0, "start_percent": 0.0, "end_percent": 1.0},
    "HiDreamO1PatchSeamSmoothing": {"start_percent": 0.0, "end_percent": 1.0},
    "ModelNoiseScale": {"noise_scale": 3.0},
    "FreSca": {"scale_low": 2.0},
    "LTXVContextWindows": {"context_length": 9, "context_overlap": 1, "freenoise": False},
    "LTXVSpatioTemporalGuidance": {"blocks": "0"},
    "LazyCache": {"reuse_threshold": 3.0, "start_percent": 0.0, "end_percent": 1.0},
    "ScaleROPE": {"scale_x": 2.0, "shift_t": 3.0},
    "SkipLayerGuidanceDiT": {"double_layers": "0", "single_layers": "0", "start_percent": 0.0, "end_percent": 1.0},
    "SkipLayerGuidanceDiTSimple": {
        "double_layers": "0",
        "single_layers": "0",
        "start_percent": 0.0,
        "end_percent": 1.0,
    },
    "SkipLayerGuidanceSD3": {"layers": "0", "start_percent": 0.0, "end_percent": 1.0},
    "UNetSelfAttentionMultiply": {"q": 3.0, "v": 2.0},
    "UNetCrossAttentionMultiply": {"q": 3.0, "v": 2.0},
    "UNetTemporalAttentionMultiply": {"self_structural": 2.0, "cross_structural": 2.0},
    "WanContextWindowsManual": {"context_length": 5, "context_overlap": 1, "freenoise": False},
}


@functools.cache
def model_nodes() -> dict[str, Any]:
    """Core's node classes by id that take a MODEL and give one, and that nothing but numbers need be given beside."""
    import nodes

    asyncio.run(nodes.init_builtin_extra_nodes())
    usable = {}
    for name, kind in sorted(nodes.NODE_CLASS_MAPPINGS.items()):
        required = [spec[0] for spec in kind.INPUT_TYPES().get("required", {}).values()]
        plain = not OTHERS & {one for one in required if isinstance(one, str)}
        if "MODEL" in required and "MODEL" in (kind.RETURN_TYPES or ()) and plain:
            usable[name] = kind
    return usable


def applied(name: str, model: Any, other: Any) -> Any:
    """The MODEL that a node makes of ``model``; a node that joins two is given ``other`` too."""
    kind = model_nodes()[name]
    models, arguments = [model, other], {}
    for key, spec in kind.INPUT_TYPES()["required"].items():
        options = spec[1] if len(spec) > 1 else {}
        choices = options.get("options") or spec[0]
        arguments[key] = (
            models.pop(0) if spec[0] == "MODEL" else options.get("default", choices[0] if len(choices) else None)
        )
    halves = {key: 0.5 for key, value in arguments.items() if name.startswith("ModelMerge") and value == 1.0}
    arguments |= halves | CHOSEN.get(name, {})
    out = kind.execute(**arguments) if hasattr(kind, "execute") else getattr(kind(), kind.FUNCTION)(**arguments)
    return (out.result if hasattr(out, "result") else out)[list(kind.RETURN_TYPES).index("MODEL")]


def heard(run: Callable[[], Any]) -> tuple[Any, list[str]]:
    """What ``run`` returns, and what is logged of things without effect."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("anygpu")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        return run(), [line for line in lines if "no effect" in line]
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def survey(name: str, left_out: list[str], merges: list[str]) -> dict[str, Any]:
    """By node: how much it changes what core samples with our MODEL, and what is said, or the error it raises.

    The levels are those of each MODEL's own schedule, and the first frame is masked: some nodes act on these alone.
    """
    _, model, _, _, conditionings, generator = prepared(name)
    noise = torch.randn(SHAPES.get(name, USUAL_SHAPE), generator=generator)
    start, mask = torch.randn(noise.shape, generator=generator), torch.ones(1, 1, 4, *noise.shape[3:])
    mask[:, :, :2] = 0.5

    def run(patched: Any) -> torch.Tensor:
        sigmas = comfy.samplers.calculate_sigmas(patched.get_model_object("model_sampling"), "simple", 3)
        return cores(patched, *conditionings, noise, noise_mask=mask, start=start, sigmas=sigmas)

    plain, doubled = run(model), applied("ModelMergeAdd", model, model)
    report: dict[str, Any] = {"unchanged": {"change": float((run(model.clone()) - plain).abs().max()), "said": []}}
    for node in sorted(set(model_nodes()) - set(left_out)):
        if node.startswith("ModelMerge") and node not in merges:
            continue
        try:
            changed = applied(node, model, doubled)
            calls = counted(changed)
            out, said = heard(functools.partial(run, changed))
            change = float((out - plain).nan_to_num(1e9).abs().max())
            report[node] = {"change": change, "said": said, "attention": len(calls)}
        except Exception as error:
            report[node] = {"error": f"{type(error).__name__}: {error}"}
    return report


def skipped(name: str) -> dict[str, bool]:
    """Our MODEL behind core's EasyCache."""
    _, model, _, _, conditionings, generator = prepared(name)
    noise = torch.randn(SHAPES.get(name, USUAL_SHAPE), generator=generator)
    return core_tiny.skipping(
        model, lambda each: cores(each, *conditionings, noise, sigmas=torch.tensor(core_fit.EULER[1]))
    )


def unread_pictures(name: str) -> list[str]:
    """Words about a picture, and an end image, in the CONDITIONING of core's sampler."""
    pipeline, model, _, _, (positive, negative), generator = prepared(name)
    image = stages.encode_image(pipeline, ImageRequest(PICTURE, SIDE, SIDE), "stretch", Silent())
    if "start" in image.tensors:
        image = replace(image, tensors={**image.tensors, "end": image.tensors["start"]})
    noise = torch.randn(SHAPES.get(name, USUAL_SHAPE), generator=generator)
    return heard(lambda: cores(model, core_models.pictured(positive, image), negative, noise))[1]


def guided_by_core() -> str:
    """The error where core's LTXVAddGuide has put a picture behind the video."""
    _, model, _, _, conditionings, generator = prepared("ltx")
    noise = torch.randn(SHAPES["ltx"], generator=generator)
    guided = [LTXVAddGuide.add_keyframe_index(cond, 0, noise[:, :, -1:], (8, 32, 32)) for cond in conditionings]
    try:
        return f"drew {tuple(cores(model, *guided, noise).shape)}"
    except UnsupportedError as error:
        return str(error)


def picture_of_another() -> str:
    """The error where a picture that was encoded for one family stands in the prompt of another one's MODEL."""
    _, model, _, image, (positive, negative), generator = prepared("framepack")
    positive = core_models.pictured(positive, replace(image, family="ltx"))
    noise = torch.randn(SHAPES.get("framepack", USUAL_SHAPE), generator=generator)
    try:
        return f"drew {tuple(cores(model, positive, negative, noise).shape)}"
    except InputError as error:
        return str(error)


def scaled() -> float:
    """The error of our attention under an override that gives core's attention a scale of its own, beside torch's."""
    q, k, v = torch.randn(3, 1, 2, 5, 4, generator=torch.Generator().manual_seed(0))
    sdpa = torch.nn.functional.scaled_dot_product_attention
    attend = diffusion_model._overridden(lambda own, *given, **named: own(*given, **{**named, "scale": 0.1}), {})
    return float((attend(sdpa, q, k, v) - sdpa(q, k, v, scale=0.1)).abs().max())


def counted(model: Any) -> list[int]:
    """Filled with one entry for each call of the attention that a node put in the place of ours."""
    options, calls = model.model_options["transformer_options"], list[int]()
    override = options.get("optimized_attention_override")
    if override is not None:

        def counting(*given: Any, **named: Any) -> Any:
            calls.append(1)
            return override(*given, **named)

        options["optimized_attention_override"] = counting
    return calls


def on_two_devices(name: str) -> dict[str, Any]:
    """Core's nodes that split a MODEL over two devices, and that put it or the VAE on the second; beside one device."""
    from comfy_extras import nodes_multigpu

    def reload(devices: Any) -> Any:
        return loaded_for(name, devices=devices)

    pipeline, _, _, _, conditionings, generator = prepared(name)
    model, vae = core_models.beside(pipeline, reload)
    noise = torch.randn(SHAPES.get(name, USUAL_SHAPE), generator=generator)
    plain = cores(model, *conditionings, noise)
    frames = vae.decode(plain)
    devices = [torch.device(accelerator.NAME, index) for index in range(2)]
    report = {}
    with state(get_all_torch_devices=lambda exclude_current=False: devices):
        nodes = {
            "split": nodes_multigpu.MultiGPUCFGSplitNode.execute(model, 2),
            "second": nodes_multigpu.SelectModelDeviceNode.execute(model, "gpu:1"),
        }
        for node, out in nodes.items():
            management.unload_all_models()
            for index in range(2):
                accelerator.reset_traffic(index)
            sampled = cores(out.result[0], *conditionings, noise)
            report[node] = {
                "change": float((sampled - plain).abs().max() / plain.abs().max()),
                "sent": [accelerator.traffic(index).to_device_bytes for index in range(2)],
            }
        (moved,) = nodes_multigpu.SelectVAEDeviceNode.execute(vae, "gpu:1").result
        (back,) = nodes_multigpu.SelectVAEDeviceNode.execute(moved, "default").result
        report["vae"] = {"equal": bool(torch.equal(moved.decode(plain), frames))}
        report["vae"] |= {"devices": [str(one.device) for one in (vae, moved, back)]}
    return report


def upscaled() -> dict[str, Any]:
    """LTX-Video's latents through core's latent upscaler, whose node asks our VAE for the statistics of its latents."""
    import comfy.model_patcher
    import comfy.ops
    from comfy.ldm.lightricks.latent_upsampler import LatentUpsampler
    from comfy_extras.nodes_lt_upsampler import LTXVLatentUpsampler

    _, vae = core_models.beside(loaded_for("ltx"))
    taken = "operations" in inspect.signature(LatentUpsampler).parameters  # since 0.29, with a patcher
    given = {"operations": comfy.ops.disable_weight_init} if taken else {}
    network = LatentUpsampler(**given, mid_channels=32, num_blocks_per_stage=1)
    with torch.no_grad():
        for weight in network.parameters():
            weight.normal_(0.0, 0.02)
    management.archive_model_dtypes(network)
    device = memory_manager.compute_device()
    upscaler = comfy.model_patcher.ModelPatcher(network, device, torch.device("cpu")) if taken else network
    latents = torch.randn(1, 128, 2, 2, 2)
    (found,) = LTXVLatentUpsampler.execute({"samples": latents}, upscaler, vae).result
    statistics = vae.first_stage_model.per_channel_statistics
    raw = statistics.un_normalize(latents)
    return {
        "shape": list(found["samples"].shape),
        "finite": bool(found["samples"].isfinite().all()),
        "moved": float((raw - latents).abs().max()),
        "back": float((statistics.normalize(raw) - latents).abs().max()),
    }
