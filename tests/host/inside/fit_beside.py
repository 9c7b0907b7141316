"""Scenes about a fit beside our Doctor, core's caches, clones and dark pictures."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import comfy.controlnet
import comfy.ldm.modules.attention as attention
import comfy.ldm.wan.ar_model as ar_model
import comfy.ldm.wan.model as wan
import comfy.model_management as management
import comfy.samplers
import comfy.sd
import torch
from anygpu.compat.doctor import OFFER, Doctor
from anygpu.compat.repairs import RepairStore
from anygpu.host.core import clip as core_clip
from anygpu.host.core import doctor as core_doctor
from anygpu.host.core import model as core_model
from anygpu.host.core.ownership import is_linear
from anygpu.nodes.core_models import status_of
from comfy.weight_adapter import LoRAAdapter
from comfy.weight_adapter.bypass import BypassInjectionManager

from host.inside import core_classes, core_fit_vaes, core_tiny_vaes
from host.inside.core_fit import EULER, traces, turing
from host.inside.core_tiny import HOST, conditioning, error, made, noise_of, output

assert core_classes  # which adds cases to those of core_tiny


class Control(comfy.controlnet.ControlBase):
    """One that begins late and adds large values."""

    def get_control(self, x: Any, level: torch.Tensor, *_: Any) -> Any:
        if float(level.amax()) > 0.7:
            return None
        value = 3e4 * torch.randn(1, 16, 64, generator=torch.Generator().manual_seed(3))
        return {"input": [value], "output": [value]}

    def copy(self) -> Any:
        return self


def doctored(model: Any, told: list[str]) -> Any:
    """``model`` behind AnyGPU Doctor, which offers its repairs."""
    doctor = Doctor("model", RepairStore(Path(tempfile.mkdtemp())), OFFER, told.append)
    watch = core_doctor.watched_vae if hasattr(model, "decode") else core_doctor.watched_model
    return watch(model, doctor) if hasattr(model, "decode") else watch(model, doctor, None)


def fit(model: Any, precision: str = "auto", told: list[str] | None = None) -> Any:
    """``model`` fitted to a 2080 Ti; its lines go to ``told``."""
    tell = [].append if told is None else told.append
    return core_model.fit_model(model, precision, keep_latents="never", machine=turing(), tell=tell)[0]


def controlled(model: Any) -> torch.Tensor:
    """Three steps of Flux with :class:`Control`."""
    guider = comfy.samplers.CFGGuider(model)
    ((text, others),) = conditioning("Flux")
    guider.set_conds([[text, {**others, "control": Control()}]], conditioning("Flux", 8))
    noise, levels = noise_of("Flux"), torch.tensor([0.9, 0.6, 0.3, 0.0])
    euler = comfy.samplers.sampler_object("euler")
    return guider.sample(noise, noise * 0, euler, levels, disable_pbar=True, seed=5).float().flatten()


def with_a_doctor(order: str) -> dict[str, Any]:
    """Error of a step that leaves what was measured, with the Doctor on either side of the fit, and what both said."""
    model, fits, told = made("Flux"), list[str](), list[str]()
    expected = controlled(model)
    before = order == "before"
    watched = fit(doctored(model, told), told=fits) if before else doctored(fit(model, told=fits), told)
    found = controlled(watched)
    return {"error": error(found, expected), "doctor": told, "again": any("computed again" in line for line in fits)}


def self_forced(model: Any) -> torch.Tensor:
    """Two blocks of two steps by core's SamplerARVideo, which keeps keys and values of blocks in the weights' dtype."""
    guider = comfy.samplers.CFGGuider(model)
    guider.set_conds(conditioning("CausVid"), conditioning("CausVid", 8))
    guider.set_cfg(1.0)
    noise = noise_of("CausVid")
    sampler = comfy.samplers.ksampler("ar_video", {"num_frame_per_block": 1})
    with (
        mock.patch.object(attention, "optimized_attention", attention.attention_pytorch),
        mock.patch.object(ar_model, "optimized_attention", attention.attention_pytorch),
        mock.patch.object(wan, "optimized_attention", attention.attention_pytorch),
    ):
        return guider.sample(noise, noise * 0, sampler, torch.tensor([0.9, 0.5, 0.0]), disable_pbar=True, seed=3)


def self_forcing() -> dict[str, float]:
    """Errors of core's SamplerARVideo, plain and fitted."""
    whole, half = made("CausVid", torch.float32, None), made("CausVid", torch.float16, None)
    half.model.load_state_dict(whole.model.state_dict())
    expected, fitted = self_forced(whole), fit(half)
    first = error(self_forced(fitted), expected)
    return {"plain": error(self_forced(half), expected), "fitted": first, "again": error(self_forced(fitted), expected)}


def self_forcing_once_more() -> dict[str, Any]:
    """Error of core's SamplerARVideo where the Doctor has a call computed again, and what it said."""
    model, told, calls = made("CausVid", torch.float32, None), list[str](), [0]
    expected = self_forced(model)
    head = model.model.diffusion_model.head
    own = head.forward

    def spoilt(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls[0] += 1
        return own(*args, **kwargs) * (float("nan") if calls[0] == 3 else 1.0)

    with mock.patch.object(head, "forward", spoilt):
        return {"error": error(self_forced(doctored(model, told)), expected), "said": told}


def after_a_bypass_lora(precision: str) -> dict[str, Any]:
    """What the fit's first call says before core's bypass LoRA was used and after, and the same of text encoders."""
    name, model = "Wan 2.1", made("Wan 2.1")
    weights = {}
    for path, leaf in model.model.diffusion_model.named_modules():
        if is_linear(leaf) and leaf.in_features == leaf.out_features:
            weights[f"diffusion_model.{path}.lora_up.weight"] = 0.1 * torch.ones(leaf.out_features, 4)
            weights[f"diffusion_model.{path}.lora_down.weight"] = 0.1 * torch.ones(4, leaf.in_features)
    before, after = list[str](), list[str]()
    with mock.patch.object(management, "get_torch_device", lambda: HOST):
        for told in (before, after):
            output(fit(model, precision, told), name, *EULER)
            output(comfy.sd.load_bypass_lora_for_models(model, None, weights, 1.0, 0.0)[0], name, *EULER)
            output(model, name, *EULER)  # for which core ejects it
    return {"before": before, "after": after}


def text_after_a_bypass_lora() -> dict[str, Any]:
    """Errors of a text encoder, unfitted and fitted, after core's bypass LoRA on the fitted one."""

    def bypassed(clip: Any) -> Any:
        clip, manager = clip.clone(), BypassInjectionManager()
        for path, leaf in clip.patcher.model.named_modules():
            if is_linear(leaf) and leaf.in_features == leaf.out_features:
                sides = 0.1 * torch.ones(leaf.out_features, 4), 0.1 * torch.ones(4, leaf.in_features)
                adapter = LoRAAdapter(set(), (*sides, 4.0, None, None, None))
                manager.add_adapter(f"{path}.weight", adapter, strength=1.0)
        clip.patcher.set_injections("bypass_lora", manager.create_injections(clip.patcher.model))
        return clip

    with mock.patch.object(management, "get_torch_device", lambda: HOST):
        clip, ids = core_fit_vaes.text_encoder("T5")
        expected = core_fit_vaes.encoded(clip, ids)
        fitted = core_clip.fit_clip(clip, "fp16-safe", machine=turing())[0]
        core_fit_vaes.encoded(bypassed(fitted), ids)
        return {
            "unfitted": error(core_fit_vaes.encoded(clip, ids), expected),
            "fitted": error(core_fit_vaes.encoded(fitted, ids), expected),
        }


def prompt_caches() -> dict[str, bool]:
    """HiDream O1, which keeps a prompt's keys and values: finite before, in and after a fit of spoilt ones."""
    model = made("HiDream O1", torch.float16, None)
    network, finite = model.model.diffusion_model, {}
    output(model, "HiDream O1", *EULER)
    for entry in network._kv_cache_entries:
        entry["kv"] = [(key.fill_(float("nan")), value) for key, value in entry["kv"]]
    fitted = fit(model, "fp16-safe")
    for name, each in (("spoilt", model), ("fitted", fitted), ("after", model)):
        finite[name] = bool(output(each, "HiDream O1", *EULER).isfinite().all())
    return finite


def vae_behind_a_doctor(fault: str) -> dict[str, Any]:
    """Error of a decode that Fit VAE rescues, with the Doctor on the VAE before it."""
    vae, told = core_tiny_vaes.made("SD", torch.float16), list[str]()
    latents = core_tiny_vaes.latents_of("SD")
    expected = core_fit_vaes.fitted(vae, precision="fp32").decode(latents)
    network = vae.first_stage_model
    own, spoil = network.decode, core_fit_vaes.SPOILT[fault]

    def decode(z: Any, *args: Any, output_buffer: Any = None, **named: Any) -> Any:
        pixels = own(z, *args, **named)
        pixels = spoil(pixels.clone()) if z.dtype is torch.float16 else pixels
        return pixels if output_buffer is None else output_buffer.copy_(pixels)

    with core_fit_vaes.noted() as said, mock.patch.object(network, "decode", decode):
        found = core_fit_vaes.fitted(doctored(vae, told)).decode(latents)
    return {"error": error(found, expected), "said": said[-1:], "told": told}


@contextmanager
def darkened(network: Any, scale: float, less: float) -> Iterator[None]:
    """For the block, ``network`` decodes pictures of less contrast and light."""
    own = network.decode

    def decode(z: Any, *args: Any, output_buffer: Any = None, **named: Any) -> Any:
        pixels = own(z, *args, **named) * scale - less
        return pixels if output_buffer is None else output_buffer.copy_(pixels)

    with mock.patch.object(network, "decode", decode):
        yield


def dark_picture() -> dict[str, Any]:
    """What Fit VAE says of a nearly black picture that is larger than a window, on a device that is right."""
    coarse = torch.randn(4, 1, 5, 5, generator=torch.Generator().manual_seed(2))
    latents = torch.nn.functional.interpolate(coarse, size=(28, 28), mode="bicubic").view(1, 4, 28, 28)
    vae = core_tiny_vaes.made("SD", torch.float16)
    with darkened(vae.first_stage_model, 0.1, 0.95), core_fit_vaes.noted() as said:
        frames = core_fit_vaes.fitted(vae, precision="as loaded").decode(latents)
    return {"mean": float(frames.mean()), "said": said}


def cancelled_lines() -> dict[str, Any]:
    """What the Doctor shows at the end of a sampling after one that said something and was cancelled."""
    told, shown = list[str](), list[str]()
    watched, calls = doctored(made("Wan 2.1", torch.float32, None), told), [0]

    def wrong(*_: Any, **__: Any) -> list[str]:
        calls[0] += 1
        return ["diffusion_model.blocks.1.ffn.2.weight"] * (calls[0] == 2)

    class Progress(mock.MagicMock):
        def finish(self, text: str) -> None:
            shown.append(text)

    def cancel(*_: Any) -> None:
        if told:
            raise management.InterruptProcessingException()

    handle = watched.model.diffusion_model.blocks[1].register_forward_hook(cancel)
    weights = core_doctor.LoadedWeights
    with (
        mock.patch.object(weights, "wrong", wrong), mock.patch.object(core_doctor, "NodeProgress", Progress),
        mock.patch.object(weights, "restore", lambda _self, _patcher, names: list(names)),
    ):  # fmt: skip
        try:
            output(watched, "Wan 2.1", *EULER)
        except management.InterruptProcessingException:
            handle.remove()
        output(watched, "Wan 2.1", *EULER)
    return {"told": told, "shown": shown}


def cloned_encoder() -> dict[str, Any]:
    """Hooks of a fit on the plain encoder's network after a clone of the fitted one was changed."""
    clip, ids = core_fit_vaes.text_encoder(next(iter(core_fit_vaes.ENCODERS)))
    expected = core_fit_vaes.encoded(clip, ids)
    fitted, _ = core_clip.fit_clip(clip, "fp16-safe", machine=turing())
    core_fit_vaes.encoded(fitted, ids)
    clone = fitted.clone()
    core_fit_vaes.encoded(clip, ids)
    path, layer = next(item for item in clip.patcher.model.named_modules() if isinstance(item[1], torch.nn.Linear))
    clone.add_patches({f"{path}.weight": ("diff", (torch.ones_like(layer.weight),))}, 1.0)
    left = traces(clip.patcher.model)
    return {"left": left, "same": torch.equal(core_fit_vaes.encoded(clip, ids), expected)}


def statuses() -> dict[str, str]:
    """The node's status of a MODEL that is fitted, only keeps its latents, is taken back, and needs nothing."""
    with mock.patch.object(attention, "optimized_attention", attention.attention_pytorch):
        model = made("Wan 2.1", torch.float16, None)
        given = {"fitted": (model, ()), "kept": (model, ("as loaded", "as loaded", "always"))}
        given["back"] = fit(model), ("as loaded", "as loaded", "never")
        given["nothing"] = model, ("as loaded", "as loaded", "never")
        results = {}
        for name, (before, chosen) in given.items():
            results[name] = status_of(before, core_model.fit_model(before, *chosen, machine=turing())[0])
        return results
