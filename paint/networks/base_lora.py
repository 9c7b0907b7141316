"""A LoRA of Stable Diffusion, merged into the weights of its UNet and text encoders as they are read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from ...compat.checkpoints.headers import entries_and_notes
from ...compat.checkpoints.weights import read_tensors
from ...compat.errors import CheckpointError
from ...compat.packages import attribute, imported

NAME = "lora"
LOADERS = {"sdxl": "StableDiffusionXLLoraLoaderMixin", "sd21": "StableDiffusionLoraLoaderMixin"}


def merge(part: str, module: Any, path: Path, strength: float, base: str, config: Mapping[str, Any]) -> nn.Module:
    """``module`` with the layers of a LoRA file for it added to its weights; of another part there may be none.

    Args:
        part: ``unet``, ``text_encoder`` or ``text_encoder_2``, by which the file names its layers.
        config: of the UNet.

    Raises:
        CheckpointError: a file that diffusers knows no layers of this base in.
        MissingPackageError: no peft.
    """
    mixin: Any = attribute("diffusers.loaders", LOADERS[base])
    imported("peft")
    tensors = read_tensors(entries_and_notes(path)[0], None, lambda _size: None)
    unet = attribute("diffusers.configuration_utils", "FrozenDict")(config)
    try:
        state, alphas = mixin.lora_state_dict(tensors, unet_config=unet)[:2]
        if not any(name.startswith(("unet.", "text_encoder")) for name in state):
            raise ValueError("no layer of a UNet or text encoder")
        if not any(name.startswith(f"{part}.") for name in state):
            return module  # type: ignore[no-any-return]
        if part == "unet":
            mixin.load_lora_into_unet(state, alphas, module, adapter_name=NAME)
        else:
            mixin.load_lora_into_text_encoder(state, alphas, module, prefix=part, adapter_name=NAME)
    except (ValueError, KeyError, RuntimeError, TypeError, IndexError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"{path.name!r} is no LoRA for the {part} of {base} ({reason})",
            expected=f"a LoRA made for {base}",
            fix="Choose one made for this base, or none.",
        ) from error
    layers: Any = attribute("peft.tuners.tuners_utils", "BaseTunerLayer")
    for layer in [each for each in module.modules() if isinstance(each, layers)]:
        layer.scale_layer(strength)
        layer.merge()
    imported("diffusers.utils.peft_utils").recurse_remove_peft_layers(module)
    return module  # type: ignore[no-any-return]
