"""The pictures' VAE: stock Stable Diffusion, one picture at a time, noise from the CPU."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...compat.device.execution import placed, to_host
from ...compat.memory.parts import ProgressStage
from ...compat.packages import attribute
from ..pictures import shown, signed
from .layers import Attend, joined, split
from .weights import require_shapes

SCALE, REDUCTION = 0.18215, 8
OLD_NAMES = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}  # before diffusers 0.15
OLD = re.compile(rf"(?<=\.)({'|'.join(OLD_NAMES)})(?=\.(weight|bias)$)")


def autoencoder(config: Mapping[str, Any]) -> nn.Module:
    cls: Any = attribute("diffusers", "AutoencoderKL")
    return cls.from_config({key: value for key, value in config.items() if not key.startswith("_")})


def filled(config: Mapping[str, Any], tensors: Mapping[str, Tensor], path: str) -> nn.Module:
    """The module of a ``config.json`` with these tensors, which may have old names and shapes.

    Raises CheckpointError where they are not those of the configuration."""
    with torch.device("meta"):
        module = autoencoder(config)
    wanted = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    named = {OLD.sub(lambda old: OLD_NAMES[old[1]], name): tensor for name, tensor in tensors.items()}
    named = {  # old files hold the attention's projections as 1x1 convolutions
        name: tensor.flatten(1) if tensor.ndim == 4 and len(wanted.get(name, ())) == 2 else tensor
        for name, tensor in named.items()
    }
    read = {name: tuple(tensor.shape) for name, tensor in named.items()}
    fix = "Download config.json and weights of the VAE from the same place."
    require_shapes(read, wanted, f"of the VAE in {path!r}", fix, "as its config.json says")
    module.load_state_dict(named, assign=True)
    return module


class PictureAttention:
    """The VAE's one attention with a kernel of ours. Source: diffusers ``AttnProcessor2_0`` with ``group_norm``."""

    def __init__(self, attend: Attend) -> None:
        self.attend = attend

    def __call__(self, attn: Any, hidden_states: Tensor, temb: Any = None, **_: Any) -> Tensor:
        size = hidden_states.shape[-2:]
        tokens = attn.group_norm(hidden_states.flatten(2)).transpose(1, 2)
        heads = (split(layer(tokens), attn.heads) for layer in (attn.to_q, attn.to_k, attn.to_v))
        out = attn.to_out[0](joined(self.attend(*heads)))
        return (out.transpose(1, 2).unflatten(2, size) + hidden_states) / attn.rescale_output_factor


def set_vae_attention(vae: nn.Module, attend: Attend) -> None:
    for module in vae.modules():
        if hasattr(module, "processor") and hasattr(module, "to_q"):
            module.processor = PictureAttention(attend)  # type: ignore[assignment]


def encoded(vae: Any, pictures: Tensor, generator: torch.Generator | None, device: torch.device) -> Tensor:
    """Latents (B, 4, h, w), fp32, on the CPU, not scaled, of pictures (B, H, W, 3) in 0..1. ``generator`` draws the
    posterior's noise, for the whole batch at once, on the CPU; None takes the mean."""
    means, deviations = [], []
    for picture in signed(pictures).split(1):
        posterior = vae.encode(placed(picture, device, vae.dtype)).latent_dist
        means.append(to_host(posterior.mean).float())
        deviations.append(to_host(posterior.std).float())
    mean = torch.cat(means)
    if generator is None:
        return mean
    return mean + torch.cat(deviations) * torch.randn(mean.shape, generator=generator, dtype=torch.float32)


def decoded(vae: Any, latents: Tensor, device: torch.device, progress: Any) -> Tensor:
    """Pictures (B, H, W, 3) in 0..1, fp32, on the CPU, one at a time, of latents (B, 4, h, w) that are not scaled."""
    pictures = []
    for index, one in enumerate(latents.split(1)):
        pictures.append(shown(to_host(vae.decode(placed(one, device, vae.dtype), return_dict=False)[0]).float()))
        progress.step(index + 1, len(latents), ProgressStage("decoding"))
    return torch.cat(pictures)
