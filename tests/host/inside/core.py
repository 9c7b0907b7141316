"""Scenes about core's nodes: its samplers drive our transformers, its nodes our VAEs."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import comfy.hooks
import comfy.lora
import comfy.model_base
import comfy.model_management as management
import comfy.sample
import comfy.samplers
import torch
from anygpu.compat.checkpoints.packed import StoredLinear
from anygpu.compat.device.execution import generator_for
from anygpu.host import core_models, recovery
from anygpu.pipelines import stages
from anygpu.pipelines.base import FramePackSettings, SampleSettings, Silent
from anygpu.pipelines.latents import convert as latent_format
from anygpu.pipelines.load import lora
from anygpu.pipelines.text.qwen import Chat
from safetensors.torch import save_file

from host.inside.device import CASES, bytes_on_device, encoded, loaded_for
from host.inside.memory import factors
from host.inside.sight import state

SIGMAS = (0.95, 0.8, 0.4, 0.0)  # noise is scaled to a first level below 1
CFG, SEED = 2.0, 3
SHAPES = {"ltx": (1, 128, 4, 2, 2), "hunyuan_video_15": (1, 32, 4, 4, 4), "mochi": (1, 12, 4, 8, 8)}  # latents
USUAL_SHAPE = (1, 16, 4, 8, 8)


def ours(pipeline: Any, prompt: Any, image: Any, frames: int) -> torch.Tensor:
    """Latents of our own sampler at :data:`SIGMAS`, (1, C, T, H, W) in core's space."""
    settings = SampleSettings(
        64, 64, frames, seed=SEED, cfg=CFG, sigmas=SIGMAS, guidance=6.0, fps=25.0, scheduler="euler"
    )
    if pipeline.family == "framepack":
        framepack = FramePackSettings(frames / 25.0, window=2)
        return stages.sample_framepack(pipeline, prompt, image, settings, framepack, Silent()).samples
    return stages.sample(pipeline, prompt, image, settings, Silent()).samples


def cores(model: Any, positive: Any, negative: Any, noise: torch.Tensor, **chosen: Any) -> torch.Tensor:
    """Latents of core's Euler sampler at the same levels."""
    sampler = comfy.samplers.sampler_object(chosen.pop("sampler", "euler"))
    sigmas, start = chosen.pop("sigmas", torch.tensor(SIGMAS)), chosen.pop("start", torch.zeros_like(noise))
    cfg = chosen.pop("cfg", CFG)
    return comfy.sample.sample_custom(
        model, noise, cfg, sampler, sigmas, positive, negative, start, disable_pbar=True, seed=SEED, **chosen
    )


def prepared(name: str, **chosen: Any) -> tuple[Any, Any, Any, Any, Any, torch.Tensor]:
    """Pipeline, MODEL, prompt, picture, and the conditionings and noise for core's sampler."""
    pipeline = loaded_for(name, **chosen)
    model, _ = core_models.beside(pipeline)
    prompt, image = encoded(pipeline, name)
    positive, negative = latent_format.conditionings(prompt)
    generator = generator_for(SEED)
    if pipeline.family == "framepack":  # ours draws the start picture first; here it has no spread
        moments = image.tensors["start"].clone()
        moments[:, moments.shape[1] // 2 :] = -30.0
        image = replace(image, tensors={**image.tensors, "start": moments})
        torch.randn(1, moments.shape[1] // 2, *moments.shape[2:], generator=generator)
    if image is not None:
        positive, negative = (core_models.pictured(cond, image) for cond in (positive, negative))
    return pipeline, model, prompt, image, (positive, negative), generator


def sampled_alike(name: str) -> dict[str, Any]:
    """Largest difference between our sampler and core's on one MODEL, and how large the latents are."""
    pipeline, model, prompt, image, conditionings, generator = prepared(name)
    expected = ours(pipeline, prompt, image, CASES[name][1])
    noise = torch.randn(_noise_shape(pipeline, expected), generator=generator)
    found = cores(model, *conditionings, noise)
    if pipeline.family == "framepack":
        expected = expected[:, :, 1:]  # the start picture stands before what was sampled
    latent, item = recovery.load("newest"), recovery.listing()[0]
    return {
        "kept": bool(torch.equal(latent["samples"], found)) and set(latent) == {"samples"},
        "listed": [item.family, item.seed, item.width, item.height, item.frames],
        "thumbnail": len(recovery.thumbnail(item.id) or b""),
        "different": float((found - expected).abs().max()),
        "scale": float(expected.abs().max()),
        "loaded": [type(item.model.model).__name__ for item in management.current_loaded_models],
        "device": bytes_on_device(),
        "size": model.model_size(),
        "others": sum(item.model.model_size() for item in management.current_loaded_models) - model.model_size(),
    }


def adapted_alike(name: str, weights: str, folder: str) -> dict[str, Any]:
    """Our LoRAs in core's sampler and in ours, at full offloader and at none, and what the MODEL is without them."""
    pipeline, model, prompt, image, conditionings, generator = prepared(name, weights=weights)
    file = Path(folder, f"{name}.safetensors")
    save_file(factors(pipeline), file)
    adapted = lora.with_lora(pipeline, file, 0.5, "double", "separate", Silent())
    adapted = lora.with_lora(adapted, file, 0.25, "double 0, rest", "merged", Silent())
    patched = core_models.adapted(adapted)
    found: dict[str, Any] = {"read": "transformer" in pipeline.parts}
    expected = ours(alone(adapted), prompt, image, CASES[name][1])
    noise = torch.randn(_noise_shape(pipeline, expected), generator=generator)
    if pipeline.family == "framepack":
        expected = expected[:, :, 1:]  # the start picture stands before what was sampled
    found["scale"] = float(expected.abs().max())
    plain = cores(model, *conditionings, noise)
    full = cores(patched, *conditionings, noise)
    with state(vram_state=management.VRAMState.NO_VRAM):
        management.unload_all_models()
        found["streamed"] = bool(torch.equal(cores(patched, *conditionings, noise), full))
    found |= {key: float((a - b).abs().max()) for key, a, b in (("acts", full, plain), ("ours", full, expected))}
    names = set(model.model_state_dict())
    separate = lora.with_lora(pipeline, file, 1.0, "", "separate", Silent())
    ours(separate, prompt, image, CASES[name][1])  # leaves its layers on the transformer, which let everything pass
    found["named"] = set(model.model_state_dict()) == names
    found["beside"] = bool(torch.equal(cores(patched, *conditionings, noise), full))
    found["undone"] = bool(torch.equal(cores(model, *conditionings, noise), plain))
    return found


def hooked(name: str, weights: str) -> dict[str, Any]:
    """A LoRA in hooks of core's on our conditionings, beside the same on our MODEL: at full offloader and at none."""
    _, model, _, _, conditionings, _, noise = with_noise(name, weights)
    file = {f"diffusion_model.{key}": value for key, value in factors(model.model.pipeline).items()}
    patched, hooks = model.clone(), comfy.hooks.create_hook_lora(dict(file), 1.0, 0.0)
    patched.add_patches(comfy.lora.load_lora(dict(file), comfy.lora.model_lora_keys_unet(model.model, {})))
    plain, expected = cores(model, *conditionings, noise), cores(patched, *conditionings, noise)
    both = [comfy.hooks.set_hooks_for_conditioning(each, hooks) for each in conditionings]
    one, found = cores(model, both[0], conditionings[1], noise), {}
    for vram in (management.VRAMState.NORMAL_VRAM, management.VRAMState.NO_VRAM):
        with state(vram_state=vram):
            management.unload_all_models()
            found[vram.name] = bool(torch.equal(cores(model, *both, noise), expected))
    return {
        "equal": found,
        "acts": min(float((each - plain).abs().max()) for each in (expected, one)),
        "half": float((one - expected).abs().max()),
        "undone": bool(torch.equal(cores(model, *conditionings, noise), plain)),
    }


def merged(name: str, weights: str, folder: str) -> dict[str, Any]:
    """Our MODEL merged by core's node with one of other weights: at full offloader and at none; then beside a LoRA."""
    from comfy_extras.nodes_model_merging import ModelMergeSimple

    pipeline, model, prompt, image, conditionings, _, noise = with_noise(name, weights)
    other = prepared(name, weights=weights)
    for layer in filter(lambda each: isinstance(each, StoredLinear), other[0].parts.read("transformer").modules()):
        layer.stored.data.neg_()
    plain = cores(model, *conditionings, noise)
    (both,) = ModelMergeSimple().merge(model, other[1], 0.25)
    full = cores(both, *conditionings, noise)
    with state(vram_state=management.VRAMState.NO_VRAM):
        management.unload_all_models()
        streamed = cores(both, *conditionings, noise)
    save_file(factors(pipeline), file := Path(folder, "lora.safetensors"))
    ours(lora.with_lora(pipeline, file, 1.0, "", "separate", Silent()), prompt, image, CASES[name][1])
    (same,) = ModelMergeSimple().merge(model, model, 0.25)
    beside = float((cores(same, *conditionings, noise) - plain).abs().max())
    return {"acts": float((full - plain).abs().max()), "streamed": bool(torch.equal(streamed, full)), "beside": beside}


def with_noise(name: str, weights: str) -> tuple[Any, ...]:
    """:func:`prepared`, and noise."""
    given = prepared(name, weights=weights)
    return (*given, torch.randn(SHAPES.get(name, USUAL_SHAPE), generator=given[-1]))


def alone(adapted: Any) -> Any:
    """The pipeline with all its LoRAs beside the weights, which packed ones take too."""
    chosen = tuple(replace(one, mode="separate") for one in lora.on(adapted))
    adapters = lora.LoRAs(chosen, adapted.precision.transformer, adapted.spec.transformers)
    return replace(adapted, plan=replace(adapted.plan, offloader=adapted.offloader.with_adapters(adapters)))


def _noise_shape(pipeline: Any, samples: torch.Tensor) -> tuple[int, ...]:
    shape = list(samples.shape)
    if pipeline.family == "framepack":
        shape[2] = 2
    return tuple(shape)


def decoded_alike(name: str) -> dict[str, Any]:
    """Our VAE in core's nodes: their frames and latents beside those of our own stages."""
    import nodes

    pipeline = loaded_for(name)
    _, vae = core_models.beside(pipeline)
    prompt, image = encoded(pipeline, name)
    samples = ours(pipeline, prompt, image, CASES[name][1])
    frames = stages.decode(pipeline, latent_format.from_core(pipeline, {"samples": samples}, print), Silent())
    (found,) = nodes.VAEDecode().decode(vae, {"samples": samples})
    (tiled,) = nodes.VAEDecodeTiled().decode(vae, {"samples": samples}, 64, 16, 8, 4)
    (latents,) = nodes.VAEEncode().encode(vae, frames)
    (again,) = nodes.VAEEncodeTiled().encode(vae, frames, 64, 16)
    larger = torch.nn.functional.pad(frames, (0, 1, 1, 1, 1, 1))  # off the VAE's grid, with alpha
    (cropped,) = nodes.VAEEncode().encode(vae, larger)
    return {
        "equal": bool(torch.equal(found, frames)),
        "tiled": list(tiled.shape) == list(frames.shape),
        "latents": list(latents["samples"].shape),
        "samples": list(samples.shape),
        "encoded": all(torch.equal(latents["samples"], each["samples"]) for each in (again, cropped)),
        "sizes": [vae.spacial_compression_decode(), vae.temporal_compression_decode(), vae.latent_channels],
        "listed": [type(item.model.model).__name__ for item in management.current_loaded_models],
    }


def resized(name: str) -> list[int]:
    """Shape that core's sampler gives at another size than our encoded picture's."""
    _, model, _, _, conditionings, generator = prepared(name)
    channels = SHAPES.get(name.split()[0], USUAL_SHAPE)[1]
    out = cores(model, *conditionings, torch.randn(1, channels, 2, 6, 8, generator=generator))
    return list(out.shape) if out.isfinite().all() else []


def chats() -> list[str]:
    """The chat around a prompt for HunyuanVideo 1.5, ours and core's, but for white space in the instruction."""
    from comfy.text_encoders.hunyuan_video import HunyuanVideo15Tokenizer

    own, core = Chat(None, "", -1).template, HunyuanVideo15Tokenizer().llama_template
    return [re.sub(r"(?<=[.:])\s+", " ", text) for text in (own, core)]


def concat_alike() -> list[bool]:
    """Equal channels beside noise of two sizes: our class's and core's, of core's picture 4x4 with its mask."""
    (_, model, _, _, _, generator), kind = prepared("hunyuan_video_15 image"), comfy.model_base.HunyuanVideo15
    picture, mask = torch.randn(1, 32, 3, 4, 4, generator=generator), torch.ones(1, 1, 3, 4, 4)
    mask[:, :, :1] = 0.0
    of_core = SimpleNamespace(img_in=SimpleNamespace(proj=torch.nn.Conv3d(65, 1, 1)))
    core = SimpleNamespace(diffusion_model=of_core, latent_format=model.model.latent_format,
                           process_latent_in=model.model.process_latent_in)  # fmt: skip
    equal = []
    for size in ((4, 4), (6, 8)):
        given = {"noise": torch.zeros(1, 32, 3, *size), "device": torch.device("cpu"), "concat_mask": mask}
        found, expected = (
            concat(owner, concat_latent_image=picture.clone(), **given)
            for concat, owner in ((type(model.model).concat_cond, model.model), (kind.concat_cond, core))
        )
        equal.append(bool(torch.equal(found, expected)))
    return equal


def guided(name: str) -> dict[str, Any]:
    """Skip Layer Guidance, context windows, other samplers and schedulers, and previews, on our MODEL."""
    import latent_preview
    from comfy_extras.nodes_context_windows import ContextWindowsManualNode
    from comfy_extras.nodes_slg import SkipLayerGuidanceDiT

    _, model, _, _, conditionings, generator = prepared(name)
    noise = torch.randn(SHAPES.get(name, USUAL_SHAPE), generator=generator)
    plain = cores(model, *conditionings, noise)
    (skipping,) = SkipLayerGuidanceDiT.execute(model, 3.0, 0.0, 1.0, "0", "0").result
    (nothing,) = SkipLayerGuidanceDiT.execute(model, 3.0, 0.0, 1.0, "77", "77").result
    (windows,) = ContextWindowsManualNode.execute(model, 2, 1, "standard_static", 1, False, "pyramid", 2, False).result
    pictures: list[Any] = []
    with preview_method(latent_preview.LatentPreviewMethod.Latent2RGB):
        callback = latent_preview.prepare_callback(model, len(SIGMAS) - 1, {})
        cores(model, *conditionings, noise, callback=lambda *given: pictures.append(callback(*given)))
        previewer = latent_preview.get_previewer(torch.device("cpu"), model.model.latent_format)
        picture = previewer.decode_latent_to_preview(model.model.process_latent_in(plain))
    mask = torch.ones(1, 1, 4, *noise.shape[3:])
    mask[:, :, :1] = 0
    start = torch.randn(noise.shape, generator=generator)
    kept = cores(model, *conditionings, noise, noise_mask=mask, start=start)
    sampling = model.get_model_object("model_sampling")
    schedules = {kind: comfy.samplers.calculate_sigmas(sampling, kind, 4) for kind in comfy.samplers.SCHEDULER_NAMES}
    return {
        "skips": float((cores(skipping, *conditionings, noise) - plain).abs().max()),
        "nothing": float((cores(nothing, *conditionings, noise) - plain).abs().max()),
        "windows": float((cores(windows, *conditionings, noise) - plain).abs().max()),
        "finite": bool(torch.isfinite(cores(windows, *conditionings, noise)).all()),
        "others": float((cores(model, *conditionings, noise, sampler="dpmpp_2m") - plain).abs().max()),
        "previews": len(pictures),
        "picture": list(picture.size) if picture is not None else None,
        "kept": float((kept - start)[:, :, :1].abs().max()),
        "redrawn": float((kept - start)[:, :, 1:].abs().max()),
        "schedules": {kind: [round(float(step), 4) for step in steps] for kind, steps in schedules.items()},
        "listed": [type(item.model.model).__name__ for item in management.current_loaded_models],
    }


@contextmanager
def preview_method(method: Any) -> Iterator[None]:
    """ComfyUI's preview flag."""
    from comfy.cli_args import args

    before, args.preview_method = args.preview_method, method
    try:
        yield
    finally:
        args.preview_method = before
