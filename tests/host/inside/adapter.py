"""Scenes about MV-Adapter on what core has loaded: which networks are refused, and what a LoRA changes."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import comfy.model_management as management
import comfy.model_patcher
import comfy.supported_models as supported
import torch
from anygpu.compat.errors import PackError
from anygpu.host.casting import patched
from anygpu.host.core.checkpoint import checkpoint_of
from anygpu.host.core.weights import patched_weight
from anygpu.host.memory_manager import PartPatcher
from anygpu.paint.networks.stable_diffusion import base_in
from comfy.quant_ops import QuantizedTensor
from torch import nn

from host.inside.core_tiny import HOST, fill, made
from host.inside.dynamic import dynamic_vram
from host.stand_ins import UNET, UNETS

TO_Q = "input_blocks.4.1.transformer_blocks.0.attn1.to_q"


class OtherTensor(torch.Tensor):
    """A weight as ComfyUI-GGUF has it: bytes in a class of its own, which is not copied."""

    def detach(self, *_: Any) -> Any:
        return self


class OtherLinear(nn.Linear):
    """A layer of another pack, which alone knows how its weight is meant."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight * 2, self.bias)


def model(base: str = "sdxl", table: Any = supported.SDXL, file: Any = (), weights: Any = None, **config: Any) -> Any:
    """A MODEL of core's with a tiny network; ``file`` names what else its file has, ``weights`` are assigned."""
    row = table(UNET | UNETS[base] | config)
    row.unet_config |= UNET | UNETS[base] | config
    row.set_inference_dtype(torch.float16, torch.float32)
    network = row.get_model(dict.fromkeys(file, torch.zeros(1)))
    if weights is None:
        fill(network.diffusion_model)
    else:
        network.diffusion_model.load_state_dict(weights, assign=True)
    return comfy.model_patcher.CoreModelPatcher(network, management.get_torch_device(), HOST)


def held(*encoders: str) -> Any:
    """A CLIP or VAE with these parts."""
    network = nn.ModuleDict({name: nn.Linear(2, 2) for name in encoders})
    return SimpleNamespace(patcher=comfy.model_patcher.ModelPatcher(network, HOST, HOST))


def quantised(given: Any) -> Any:
    """The MODEL with one packed weight."""
    layer = given.model.diffusion_model.get_submodule(TO_Q)
    layer.weight = nn.Parameter(QuantizedTensor.from_float(layer.weight.data, "TensorCoreFP8E4M3Layout"), False)
    return given


def in_bytes(given: Any) -> Any:
    """The MODEL with one weight in bytes."""
    layer = given.model.diffusion_model.get_submodule(TO_Q)
    layer.weight = nn.Parameter(torch.zeros(64, 64, dtype=torch.uint8).as_subclass(OtherTensor), False)
    return given


def foreign(given: Any) -> Any:
    """The MODEL with one layer of another pack."""
    blocks = given.model.diffusion_model.get_submodule(TO_Q.rpartition(".")[0])
    blocks.to_q = OtherLinear(64, 64)
    return given


def flowing(given: Any) -> Any:
    """The MODEL as a node makes it that has core take its output for a flow."""
    given.add_object_patch("model_sampling", made("Flux").model.model_sampling)
    return given


def refusals() -> dict[str, str]:
    """What is said of each."""
    clip, vae, plain = held("clip_l", "clip_g"), held("decoder"), model()
    vae.patcher.model["decoder"] = nn.ModuleDict({"conv_in": nn.Conv2d(4, 8, 3)})
    other = held("decoder")
    other.patcher.model["decoder"] = nn.ModuleDict({"conv_in": nn.Conv2d(16, 8, 3)})
    ours = PartPatcher.__new__(PartPatcher)
    cases = {
        "none": (None, clip, None),
        "Flux": (made("Flux"), clip, vae),
        "flow": (flowing(model()), clip, vae),
        "inpainting": (model(in_channels=9), clip, vae),
        "SD1.5": (model("sd21", supported.SD15, use_linear_in_transformer=False), clip, vae),
        "EDM": (model(file=("edm_mean", "edm_std")), clip, vae),
        "refiner": (model("sd21", num_classes="sequential", adm_in_channels=2560), clip, vae),
        "unCLIP": (model("sd21", num_classes="sequential", adm_in_channels=2048), clip, vae),
        "packed": (quantised(model()), clip, vae),
        "GGUF": (in_bytes(model()), clip, vae),
        "foreign": (foreign(model()), clip, vae),
        "ours": (ours, clip, vae),
        "CLIP of SD1.5": (plain, held("clip_l"), vae),
        "CLIP of Flux": (plain, held("clip_l", "t5xxl"), vae),
        "CLIP of SD2.1": (plain, held("clip_h"), vae),
        "VAE of Flux": (plain, clip, other),
    }
    return {name: _said(*given) for name, given in cases.items()}


def _said(*given: Any) -> str:
    try:
        base_in(checkpoint_of(*given))
    except PackError as error:
        return str(error)
    return "nothing"


def predictions() -> list[bool]:
    """Whether a file's marks are there: noise, velocities by the file and by a node's patch."""
    by_node = model()
    by_node.add_object_patch("model_sampling", model(file=("v_pred",)).model.model_sampling)
    given = (model(), model(file=("v_pred",)), by_node)
    return ["v_pred" in checkpoint_of(each, held("clip_l", "clip_g"), held("decoder")).shapes for each in given]


def patches(dynamic: bool) -> dict[str, Any]:
    """Weights while core has the model on the device with another clone's LoRA in them, or beside ``dynamic`` VRAM."""
    weights = model().model.diffusion_model.state_dict()
    with dynamic_vram() if dynamic else nullcontext():
        return _patches(model(weights=weights))


def _patches(plain: Any) -> dict[str, Any]:
    name = f"diffusion_model.{TO_Q}.weight"
    own = plain.model.get_parameter(name).detach().clone()
    clones = [patched(plain, {name: ("diff", (torch.full_like(own, value),))}, 1.0) for value in (0.5, 2.0)]
    management.load_models_gpu([clones[0]], force_full_load=True)
    there = plain.model.get_parameter(name)
    found = [patched_weight(each, name) for each in (plain, *clones)]
    return {
        "dynamic": plain.is_dynamic(),
        "names": len(checkpoint_of(plain, held("clip_l", "clip_g"), held("decoder")).shapes),
        "patched": bool((there.cpu() - own).abs().max() > 0.4),
        "right": [bool(torch.equal(each, own + value)) for each, value in zip(found, (0, 0.5, 2.0), strict=True)],
        "host": [each.device.type for each in found],
    }
