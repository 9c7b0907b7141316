"""Scenes about core's own VAEs and text encoders fitted to devices that nobody here owns."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import comfy.clip_model
import comfy.ldm.cosmos.vae as cosmos
import comfy.model_management as management
import comfy.model_patcher
import comfy.ops
import comfy.sd
import comfy.taesd.taesd as taesd
import comfy.text_encoders.llama as llama
import comfy.text_encoders.t5 as t5
import torch
from anygpu.compat.errors import PackError
from anygpu.compat.transforms import attention, attention_chunks
from anygpu.compat.transforms.attention import Attention
from anygpu.host import recovery
from anygpu.host.core import attention as core_attention
from anygpu.host.core import clip as core_clip
from anygpu.host.core import vae as core_vae
from anygpu.host.core.vae import lost_masks
from anygpu.pipelines.vae.plan import DecodeMethod
from simulated import accelerator
from simulated.shortages import shortage
from torch.utils._python_dispatch import TorchDispatchMode

from host.inside import core_tiny_vaes
from host.inside.core_fit import machine_named, turing
from host.inside.core_tiny import HOST, MissingError, error, fill
from host.inside.core_tiny_vaes import CASES, latents_of, made, published
from host.inside.sight import state

SAID: list[str] = []


class Noted:
    """A progress that keeps what it was told."""

    def __init__(self, *_: Any) -> None: ...

    def notify(self, text: str) -> None:
        """Keep a line."""
        SAID.append(text)

    finish = notify


@contextmanager
def noted() -> Iterator[list[str]]:
    """What fitted VAEs say inside the block; nothing is written to a disk."""
    SAID.clear()
    with mock.patch.object(core_vae, "NodeProgress", Noted), mock.patch.object(recovery, "save_for_decode"):
        yield SAID


def pixels_of(name: str, vae: Any) -> torch.Tensor:
    """What is encoded: pictures (F, H, W, 3) of the case's own size."""
    frames = vae.decode(latents_of(name))
    return frames if frames.ndim == 4 else frames[0]


def fitted(vae: Any, **chosen: Any) -> Any:
    """The fitted VAE of a machine that has everything but fast bf16."""
    return core_vae.fit_vae(vae, machine=chosen.pop("machine", turing()), **chosen)[0]


def without_conv3d(name: str) -> dict[str, Any]:
    """Decode and encode on a device that has no 3-D convolution, against core's on the CPU."""
    here = made(name)
    latents, pixels = latents_of(name), pixels_of(name, here)
    expected, coded = fitted(here).decode(latents), fitted(here).encode(pixels)
    with machine_named("no-conv3d") as machine, noted() as said:
        there = made(name, device=machine.facts.device)
        core_fault = ""
        try:
            there.decode(latents)
        except RuntimeError as failure:
            core_fault = str(failure)
        vae = fitted(there, machine=machine)
        found, code = vae.decode(latents), vae.encode(pixels)
        result = {"decode": error(found.cpu(), expected), "encode": error(code.cpu(), coded)}
        management.unload_all_models()
        return {**result, "core_fault": core_fault, "said": list(said)}


def bits_kept(name: str, profile: str) -> dict[str, Any]:
    """Decode of bf16 weights on a machine that damages them, by core and fitted, against fp32 on the CPU."""
    here, latents = made(name, torch.bfloat16), latents_of(name)
    expected = fitted(here, precision="fp32").decode(latents)
    with machine_named(profile) as machine, noted() as said:
        device = machine.facts.device
        alone = error(made(name, torch.bfloat16, device=device).decode(latents).cpu(), expected)
        management.unload_all_models()
        vae = made(name, torch.bfloat16, device=device)
        fit, decisions = core_vae.fit_vae(vae, machine=machine)
        found = fit.decode(latents)
        management.unload_all_models()
        again = fit.decode(latents)
        management.unload_all_models()
        fit.method = DecodeMethod(torch.float32, on_host=True)  # with the weights as they were loaded
        return {
            "alone": alone,
            "error": error(found.cpu(), expected),
            "on_host": error(fit.decode(latents), expected),
            "back": torch.equal(again, found),
            "bf16": sum(tensor.dtype is torch.bfloat16 for tensor in fit.first_stage_model.parameters()),
            "before": all(tensor.dtype is torch.bfloat16 for tensor in vae.first_stage_model.parameters()),
            "said": [*map(str, decisions), *said],
        }


def audio_decoded() -> dict[str, Any]:
    """A decode to sound (B, 2, L) of latents with four axes, as ACE-Step's."""
    vae, lengths = made("SD", torch.float16), []
    vae.output_channels, vae.extra_1d_channel, vae.upscale_ratio, vae.process_output = 2, 16, 4096, torch.Tensor.clone

    def decode(z: torch.Tensor) -> torch.Tensor:
        lengths.append(z.shape[-1])
        return torch.ones(len(z), 2, z.shape[-1] * 4096)

    with noted() as said, mock.patch.object(vae.first_stage_model, "decode", decode):
        found = fitted(vae).decode(torch.randn(1, vae.latent_channels, 16, 40))
    return {"shape": list(found.shape), "lengths": lengths, "said": list(said)}


def rescued(name: str, fault: str, edge: int = 8) -> dict[str, Any]:
    """A decode in which the first way fails, against the sound one, and what was said."""
    vae, seen = made(name, torch.float32 if fault[:6] in ("memory", "never") else torch.float16), list[str]()
    shape = (*latents_of(name).shape[:-2], edge, edge)
    latents = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    expected = fitted(vae, precision="fp32").decode(latents)
    network, own = vae.first_stage_model, vae.first_stage_model.decode

    def failing(z: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        narrow = getattr(network, "manual_cast_dtype", None) is not torch.float32
        if fault == "values" and narrow:
            return own(z, *args, **kwargs) * float("nan")
        if fault == "colour" and narrow:
            return own(z, *args, **kwargs) * 0.0
        if fault.startswith("memory") and z.shape[-1] >= edge:
            seen.append("short")
            raise torch.OutOfMemoryError("out of memory")
        if fault == "memory and once" and seen == ["short"] * 3:  # whole, again, and in larger tiles
            seen.append("wrong")
            return own(z, *args, **kwargs) * float("nan")
        if fault == "engine" and narrow:
            raise RuntimeError("GET was unable to find an engine to execute this computation")
        return own(z, *args, **kwargs)

    with noted() as said, mock.patch.object(network, "decode", failing):
        fit = fitted(vae)
        found = fit.decode(latents)
        lines = list(said)
        again = fit.decode(latents)
    return {
        "error": error(found, expected),
        "again": torch.equal(again, found),
        "said": lines,
        "later": said[len(lines) :],
        "dtype": str(vae.vae_dtype),
        "patches": sum("_conv_forward" in module.__dict__ for module in network.modules()),
    }


def _dead(pixels: torch.Tensor, part: float) -> torch.Tensor:
    """Pixels whose right ``part`` of the lower half says nothing."""
    rows, columns = pixels.shape[-2] // 2, int(pixels.shape[-1] * (1 - part))
    pixels[..., rows:, columns:] = pixels[..., :1, :1]
    return pixels


def _late(pixels: torch.Tensor) -> torch.Tensor:
    """Pixels all frames of which but the first are black."""
    later = pixels[:, :, 1:] if pixels.ndim == 5 else pixels
    later.fill_(-1.0)
    return pixels


SPOILT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {  # finite, and wrong
    "dead frames": _late,
    "dead half": lambda pixels: _dead(pixels, 1.0),
    "dead sixteenth": lambda pixels: _dead(pixels, 0.125),
    "saturated": lambda pixels: pixels * 1e6,
    "two values": lambda pixels: pixels.sign(),
    "inverted": lambda pixels: -pixels,
    "false colour": lambda pixels: pixels.roll(1, 1),
    "noise": lambda pixels: torch.randn(pixels.shape, generator=torch.Generator().manual_seed(0)).to(pixels),
}


def spoilt(name: str, times: int = 99) -> dict[str, Any]:
    """Decodes of ``name`` in fp16 that are finite and wrong the first ``times``, by fault: error and words."""
    vae, latents, report = made(name, torch.float16), latents_of(name), {}
    expected = fitted(vae, precision="fp32").decode(latents)
    network, own = vae.first_stage_model, vae.first_stage_model.decode
    for fault, spoil in SPOILT.items():
        left = [times]

        def decode(
            z: torch.Tensor,
            *args: Any,
            spoil: Any = spoil,
            left: list[int] = left,
            output_buffer: Any = None,
            **named: Any,
        ) -> Any:
            pixels = own(z, *args, **named)
            if z.dtype is torch.float16 and left[0]:
                left[0] -= 1
                pixels = spoil(pixels.clone())
            return pixels if output_buffer is None else output_buffer.copy_(pixels)

        with noted() as said, mock.patch.object(network, "decode", decode):
            found = fitted(vae).decode(latents)
            report[fault] = {"error": error(found, expected), "said": list(said)}
    return report


def on_a_bad_device(name: str) -> dict[str, Any]:
    """A decode on a device that inverts what it makes, in every dtype."""
    latents = latents_of(name)
    expected = fitted(made(name), precision="fp32").decode(latents)
    with machine_named("turing") as machine, noted() as said:
        vae = made(name, device=machine.facts.device)
        own = vae.first_stage_model.decode

        def decode(z: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
            return own(z, *args, **named) * (1.0 if z.device.type == "cpu" else -1.0)

        with mock.patch.object(vae.first_stage_model, "decode", decode):
            found = fitted(vae, machine=machine).decode(latents)
        management.unload_all_models()
        return {"error": error(found.cpu(), expected), "said": list(said)}


def sound(name: str) -> dict[str, dict[str, Any]]:
    """Words of decodes in fp16 and bf16 by what they show, and errors of core's and of fitted frames against fp32."""
    report = {}
    for dtype in (torch.float16, torch.bfloat16):
        vae = made(name, dtype)
        plain, latents = fitted(vae, precision="as loaded"), latents_of(name)
        shape = vae.decode(latents).shape[-4:]
        white = torch.ones(shape)
        title, fade = white * 0.0, white * torch.linspace(0, 1, shape[0]).view(-1, 1, 1, 1)
        title[:, shape[1] // 3 : shape[1] // 2, shape[2] // 4 : -shape[2] // 4] = 1.0
        dark, flat, half = latents.clone(), latents.new_zeros(latents.shape), latents.clone()
        dark[:, :, -1] = 0.0
        half[..., half.shape[-1] // 2 :] = 0.3
        given = {"noise": latents, "dark frame": dark, "flat": flat, "half flat": half}
        with noted() as said:
            pictures = {"black": white * 0.0, "title": title, "fade": fade, "grey": white * 0.5}
            given |= {key: vae.encode(picture) for key, picture in pictures.items()}
            for key, each in given.items():
                said.clear()
                found, words = plain.decode(each), list(said)
                report[f"{key}, {dtype}"] = {"said": words}
                if words:
                    exact = [fitted(vae, precision="fp32", causal_masks=masks).decode(each) for masks in (False, True)]
                    errors = {"core": error(vae.decode(each), exact[0]), "fitted": error(found, exact[1])}
                    report[f"{key}, {dtype}"] |= errors
    return report


def seldom() -> dict[str, list[str]]:
    """Words of sound decodes by a tiny VAE of FLUX.2 with other cells than core says, and of five latent frames by one
    that is not causal; and of a wall in pixel space."""
    network, latents = taesd.TAESD(latent_channels=128), torch.randn(1, 128, 5, 5)
    fill(network)
    network.vae_scale.fill_(1.0), network.vae_shift.fill_(0.0), network.taesd_decoder[-1].weight.mul_(0.02)
    network.taesd_decoder[-1].bias.fill_(0.5)
    file = {key: value.clone() for key, value in network.state_dict().items()}
    chosen = {"dtype": torch.float16, "device": HOST}
    tiny = comfy.sd.VAE(sd=file, metadata={"tae_latent_channels": 128}, **chosen)
    pixels = comfy.sd.VAE(sd={"pixel_space_vae": torch.tensor(1.0)}, **chosen)
    with noted() as said:
        fitted(tiny).decode(latents)
        tiny_said = [*said]
        said.clear()
        fitted(made("LTX", torch.float16)).decode(torch.randn(1, 128, 5, 4, 4))
        fitted(pixels).encode(torch.full((1, 32, 32, 3), 0.25))
        return {"tiny": tiny_said, "others": [*said]}


def one_colour(name: str) -> dict[str, Any]:
    """A decode that really is one colour, on every device."""
    vae, latents = made(name, torch.float16), latents_of(name)
    own = vae.first_stage_model.decode
    with (
        noted() as said,
        mock.patch.object(vae.first_stage_model, "decode", lambda z, *a, **n: own(z, *a, **n) * 0.0 + 0.5),
    ):
        found = fitted(vae).decode(latents)
    return {"values": found.unique().tolist(), "said": list(said)}


class Bytes(TorchDispatchMode):
    """Counts the bytes that operations read and write."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if not func.is_view:
            tensors = [each for each in (*args, found) if isinstance(each, torch.Tensor)]
            self.count += sum(each.numel() * each.element_size() for each in tensors)
        return found


def looked_at(name: str) -> dict[str, int]:
    """Bytes of a decode by a VAE of published width, plain and looked at."""
    wide = {
        "SD": {"ch": 128, "ch_mult": [1, 2, 4, 4], "num_res_blocks": 2},
        "Wan 2.1": {"dim": 96, "dim_mult": [1, 2, 4, 4]},
    }
    with mock.patch.dict(core_tiny_vaes.PICTURE if name == "SD" else core_tiny_vaes.WAN, wide[name]):
        vae = made(name)
    latents = latents_of(name)[..., :4, :4] if name == "Wan 2.1" else latents_of(name)
    counts = {}
    with noted():
        for key, each in {"plain": vae, "fitted": fitted(vae)}.items():
            each.decode(latents)  # loads it
            with Bytes() as counter:
                each.decode(latents)
            counts[key] = counter.count
    return counts


def refused(name: str, fault: str) -> str:
    """What a decode of latents that are not finite says, or of a VAE that is broken."""
    vae, latents = made(name), latents_of(name)
    if fault == "latents":
        latents[0, 0] = float("nan")
    else:
        next(module for module in vae.first_stage_model.decoder.modules() if hasattr(module, "weight")).weight.fill_(
            float("nan")
        )
    try:
        with noted():
            fitted(vae).decode(latents)
    except PackError as failure:
        return str(failure)
    return ""


def kept_before(name: str) -> dict[str, Any]:
    """What is kept of the latents of a decode that fails."""
    vae, latents, kept = made(name), latents_of(name), list[torch.Tensor]()
    broken = mock.patch.object(vae.first_stage_model, "decode", side_effect=ZeroDivisionError)
    with noted(), broken, mock.patch.object(recovery, "save_for_decode", lambda given: kept.append(given.clone())):
        try:
            fitted(vae).decode(latents)
        except ZeroDivisionError:
            return {"kept": len(kept), "equal": torch.equal(kept[0], latents)}
    return {"kept": 0, "equal": False}


def saved_after_a_refusal() -> int:
    """How often the disk, which refuses the first time, is asked to keep the latents of three decodes."""
    latents = torch.randn(1, 4, 1, 2, 2)
    with mock.patch.object(recovery.recovery, "save_plain_recovery", side_effect=["", "id"]) as save:
        for _ in range(3):
            recovery.save_for_decode(latents)
    return save.call_count


def as_published(name: str) -> dict[str, Any]:
    """By side: how far core's VAE is from its publisher's code, and how far with the masks put back."""
    vae, tensors = published(name)
    (fit, decisions), latents = core_vae.fit_vae(vae, machine=turing()), tensors["in.latents"]
    frames = ((tensors["out.decoded"][0].movedim(0, -1) + 1) / 2).clamp(0, 1)
    pictures = (tensors["in.video"][0].movedim(0, -1) + 1) / 2
    with noted():
        return {
            "decode": [error(each.decode(latents)[0], frames) for each in (vae, fit)],
            "encode": [error(each.encode(pictures), tensors["out.encoded_mean"]) for each in (vae, fit)],
            "said": any(decision.subject == "causal masks" for decision in decisions),
            "off": torch.equal(fitted(vae, causal_masks=False).decode(latents), vae.decode(latents)),
        }


COSMOS = {
    "z_channels": 16, "latent_channels": 16, "z_factor": 1, "resolution": 64, "in_channels": 3, "out_channels": 3,
    "channels": 4, "channels_mult": [2, 4, 4], "num_res_blocks": 1, "attn_resolutions": [8], "dropout": 0.0,
    "patch_size": 4, "num_groups": 1, "temporal_compression": 8, "spacial_compression": 8,
}  # fmt: skip


def masked() -> dict[str, int]:
    """In how many attentions of each VAE the masks are put back; of those that have none, 0."""
    try:
        networks = {name: made(name).first_stage_model for name in CASES}
        networks["Cosmos"] = cosmos.CausalContinuousVideoTokenizer(**COSMOS)  # whose attention is within a frame
    except ModuleNotFoundError as missing:
        raise MissingError(str(missing)) from missing
    return {name: len(list(lost_masks(network, Attention()))) for name, network in networks.items()}


T5_CONFIG = {
    "d_ff": 64, "d_kv": 16, "d_model": 32, "dense_act_fn": "gelu_pytorch_tanh", "is_gated_act": True,
    "num_heads": 2, "num_layers": 2, "vocab_size": 99, "model_type": "t5", "layer_norm_epsilon": 1e-6,
}  # fmt: skip
NARROW = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1,
}  # fmt: skip
ENCODERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "T5": (t5.T5, T5_CONFIG),
    "Llama": (llama.Llama2, NARROW),
    "Qwen 2.5 VL": (llama.Qwen25_7BVLI, NARROW),
    "Gemma 2": (llama.Gemma2_2B, NARROW),
    "Gemma 3": (llama.Gemma3_12B, NARROW),
}


def text_encoder(name: str, tokens: int = 24) -> Any:
    """One of core's text encoders, tiny and without its eyes, in core's CLIP; and token ids for it."""
    cls, config = ENCODERS[name]
    with (
        torch.random.fork_rng(),
        mock.patch.object(llama.qwen_vl, "Qwen2VLVisionTransformer", lambda **_: torch.nn.Identity()),
        mock.patch.object(comfy.clip_model, "CLIPVision", lambda *_: torch.nn.Identity()),
    ):
        torch.manual_seed(0)
        network = cls(dict(config), torch.float16, "cpu", comfy.ops.manual_cast)
        fill(network)
    for norm in network.modules():
        if isinstance(norm, llama.RMSNorm) and norm.add:  # to which one is added
            norm.weight.data -= 1.0
    return clip_of(network), torch.arange(tokens)[None] % 99


def clip_of(network: torch.nn.Module) -> Any:
    """Core's CLIP around an encoder."""
    clip = comfy.sd.CLIP(no_init=True)
    clip.cond_stage_model, clip.tokenizer = network.eval(), None
    clip.patcher = comfy.model_patcher.CoreModelPatcher(network, HOST, HOST)
    clip.patcher.set_model_compute_dtype(torch.float32)
    clip.patcher.is_clip = True
    clip.layer_idx = clip.apply_hooks_to_conds = None
    clip.tokenizer_options, clip.use_clip_schedule = {}, False
    return clip


def encoded(clip: Any, ids: torch.Tensor) -> torch.Tensor:
    """What the encoder gives, loaded as core's encode nodes load it."""
    if hasattr(clip, "patcher"):
        management.load_models_gpu([clip.patcher])
    mask = torch.ones_like(ids)
    mask[:, -3:] = 0
    return clip.cond_stage_model(ids, attention_mask=mask, dtype=torch.float32)[0]


def text_fitted(name: str) -> dict[str, Any]:
    """Core's fp32, safe fp16, bounded attention, and what is left behind."""
    clip, ids = text_encoder(name)
    expected = encoded(clip, ids)
    same, _ = core_clip.fit_clip(clip, machine=turing())
    safe, _ = core_clip.fit_clip(clip, "fp16-safe", machine=turing())
    near = encoded(safe, ids)
    worn = sum("weights_on" in module.__dict__ for module in clip.cond_stage_model.modules())
    again = encoded(clip, ids)
    bounded, _ = core_clip.fit_clip(clip, attention="bounded", machine=turing())
    calls: list[int] = []
    compute = attention_chunks.chunked

    def counted(*given: Any) -> torch.Tensor:
        calls.append(1)
        return compute(*given)

    with (
        mock.patch.object(core_attention, "fused_kernel", lambda *_: ""),
        mock.patch.object(attention, "fused_kernel", lambda *_: ""),
        mock.patch.object(attention, "chunked", counted),
        mock.patch.object(attention, "budget_for", lambda _facts: 1000),
    ):
        bounded, _ = core_clip.fit_clip(clip, attention="bounded", machine=turing())
        chunks = encoded(bounded, ids)
    last = encoded(clip, ids)
    next(clip.cond_stage_model.parameters()).fill_(float("inf"))
    _, said = core_clip.fit_clip(clip, machine=turing())
    return {
        "same": same is clip,
        "safe": error(near, expected),
        "changed": not torch.equal(near, expected),
        "worn": worn,
        "restored": torch.equal(again, expected) and torch.equal(last, expected),
        "left": sum("weights_on" in module.__dict__ for module in clip.cond_stage_model.modules()),
        "bounded": error(chunks, expected),
        "chunks": len(calls),
        "said": [str(decision) for decision in said],
    }


def on_second_device(name: str) -> dict[str, Any]:
    """A CLIP fitted before and after core's Select CLIP Device, beside one fitted on the first of two devices."""
    from comfy_extras import nodes_multigpu

    devices = [torch.device(accelerator.NAME, index) for index in range(2)]

    def loaded() -> Any:
        clip, _ = text_encoder(name)
        clip.patcher = comfy.model_patcher.CoreModelPatcher(clip.cond_stage_model, devices[0], HOST)
        clip.patcher.set_model_compute_dtype(torch.float32)
        clip.patcher.is_clip = True
        clip.patcher.cached_patcher_init = (lambda: loaded().patcher, ())
        return clip

    def fitted_clip(clip: Any) -> Any:
        return core_clip.fit_clip(clip, "fp16-safe", machine=turing())[0]

    def selected(clip: Any) -> Any:
        return nodes_multigpu.SelectCLIPDeviceNode.execute(clip, "gpu:1").result[0]

    _, ids = text_encoder(name)
    with state(get_all_torch_devices=lambda exclude_current=False: devices):
        plain = on_its_device(loaded(), ids)
        first = on_its_device(fitted_clip(loaded()), ids)
        report: dict[str, Any] = {"changed": not torch.equal(first, plain), "devices": []}
        for order, clip in (("before", selected(fitted_clip(loaded()))), ("after", fitted_clip(selected(loaded())))):
            management.unload_all_models()
            report[order] = bool(torch.equal(on_its_device(clip, ids), first))
            report["devices"].append(str(clip.patcher.load_device))
    return report


def changed_in_place(way: str) -> dict[str, Any]:
    """A VAE that a pack for seamless textures changes in place, before it is fitted and after, beside core's decode."""

    def loaded() -> Any:
        vae = made("SD", torch.float32, machine.facts.device)
        vae.patcher.cached_patcher_init = (lambda: made("SD", torch.float32, machine.facts.device).patcher, ())
        return vae

    def round_the_edges(layer: torch.nn.Conv2d, values: Any, weight: Any, bias: Any, *_: Any) -> torch.Tensor:
        padded = torch.nn.functional.pad(values, layer._reversed_padding_repeated_twice, mode="circular")
        return torch.nn.functional.conv2d(padded, weight, bias, layer.stride, 0, layer.dilation, layer.groups)

    def seamless(vae: Any) -> Any:
        vae = copy.deepcopy(vae)
        for layer in (each for each in vae.first_stage_model.modules() if isinstance(each, torch.nn.Conv2d)):
            if way == "padding_mode":
                layer.padding_mode = "circular"
            else:
                layer._conv_forward = round_the_edges.__get__(layer)
        return vae

    def fit(vae: Any) -> Any:
        return core_vae.fit_vae(vae, machine=machine, keep_latents="never")[0]

    with machine_named("turing") as machine, noted() as lines:
        latents = torch.randn(1, 4, 24, 24, generator=torch.Generator().manual_seed(1))
        expected = seamless(loaded()).decode(latents)
        found = {"plain": error(loaded().decode(latents), expected)}
        found |= {"before": error(fit(seamless(loaded())).decode(latents), expected)}
        found |= {"after": error(seamless(fit(loaded())).decode(latents), expected)}
        return {"errors": found, "said": list(lines)}


def on_its_device(clip: Any, ids: torch.Tensor) -> torch.Tensor:
    """As :func:`encoded`, with the ids on the device that core's CLIP names as that of its execution."""
    management.load_models_gpu([clip.patcher])
    device = clip.patcher.load_device
    ids = ids.to(device)
    return clip.cond_stage_model(ids, attention_mask=torch.ones_like(ids), dtype=torch.float32)[0].cpu()


def clips_refitted() -> dict[str, Any]:
    """Every ordered pair of choices for a text encoder against the second alone."""
    clip, ids = text_encoder("T5")
    core, machine = encoded(clip, ids), turing()

    def fit(given: Any, choice: tuple[str, str]) -> Any:
        return core_clip.fit_clip(given, *choice, machine=machine)[0]

    choices = [
        (precision, attention) for precision in ("fp16-safe", "as loaded") for attention in ("as loaded", "bounded")
    ]
    alone = {choice: encoded(fit(clip, choice), ids) for choice in choices}
    pairs = {}
    for first in choices:
        for second in choices:
            earlier = fit(clip, first)
            encoded(earlier, ids)  # loaded, with what it puts on its layers
            pairs[f"{first} then {second}"] = torch.equal(encoded(fit(earlier, second), ids), alone[second])
    return {
        "pairs": pairs,
        "acts": not torch.equal(alone[choices[0]], core),
        "core": torch.equal(alone["as loaded", "as loaded"], core) and torch.equal(encoded(clip, ids), core),
    }


def vaes_refitted() -> dict[str, Any]:
    """The same for a VAE in fp16, and for one in bf16 on a machine that damages that."""
    vae, latents, pairs = made("SD", torch.float16), latents_of("SD"), {}
    choices = ("fp32", "as loaded")
    alone = {choice: fitted(vae, precision=choice).decode(latents) for choice in choices}
    for first in choices:
        for second in choices:
            again = fitted(fitted(vae, precision=first), precision=second)
            pairs[f"{first} then {second}"] = torch.equal(again.decode(latents), alone[second])
    with machine_named("gfx1151") as machine:
        narrow = made("Wan 2.1", torch.bfloat16, device=machine.facts.device)
        cast = fitted(narrow, precision="fp32", machine=machine)
        back = fitted(cast, precision="as loaded", machine=machine)
        pairs["cast weights taken back"] = (
            cast.first_stage_model is not narrow.first_stage_model is back.first_stage_model is back.patcher.model
        )
    return {"pairs": pairs, "acts": not torch.equal(alone["fp32"], alone["as loaded"])}


def short_on_the_host(name: str) -> dict[str, Any]:
    """Outcomes of decodes during whose proof on the CPU memory runs out, and of the decodes after them."""
    with machine_named("turing") as machine, noted():
        vae = fitted(made(name, device=machine.facts.device), machine=machine)
        latents, ends, proven = latents_of(name), dict[str, int](), float("inf")

        def decoded(unproven: float = 0.0) -> torch.Tensor:
            management.unload_all_models()
            vae.unproven = unproven
            pixels: torch.Tensor = vae.decode(latents)
            return pixels

        wanted = decoded(proven)
        with shortage(0) as plain:
            decoded()
        with shortage(0) as every:
            decoded(proven)
        for at in range(plain.count, every.count, (every.count - plain.count) // 5):
            for times in (1, 3):
                try:
                    with shortage(at, times, errors=[torch.OutOfMemoryError]):
                        end = "" if torch.equal(decoded(proven), wanted) else "other pixels"
                except torch.OutOfMemoryError:
                    end = ""
                except Exception as error:
                    end = str(error)
                later = "" if torch.equal(decoded(proven), wanted) else ", then others"
                ends[end + later] = ends.get(end + later, 0) + 1
        return {"ends": ends, "listed": len(management.current_loaded_models)}
