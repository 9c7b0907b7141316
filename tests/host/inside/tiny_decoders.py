"""Scenes that hold the network of drafts and previews against core's own TAEHV, on the same random weights."""

from pathlib import Path

import comfy.taesd.taehv
import latent_preview
import torch
from anygpu.host import preview
from anygpu.pipelines.family import TinyDecoder
from anygpu.pipelines.registry import FAMILIES
from anygpu.pipelines.vae import draft
from safetensors.torch import save_file

LIGHT = TinyDecoder("light", "core's, whose latents it is given scaled", slope=0.2)


def against_core() -> dict[str, float]:
    """The largest difference of the frames from core's, by latent channels, after the same clamp."""
    found = {}
    for channels, patch, row in ((16, 1, FAMILIES["hunyuan_video"].published.tiny_decoders[0]), (32, 2, LIGHT)):
        torch.manual_seed(0)
        core = comfy.taesd.taehv.TAEHV(channels).eval()
        with torch.no_grad():
            for name, weight in core.decoder.named_parameters():
                spread = 0.02 if name.endswith("bias") else 1.2 / weight[0].numel() ** 0.5
                torch.nn.init.normal_(weight, 0.0, spread)
            ours = draft.Network(channels, (1, 2, 2), patch, row)
            ours.load_state_dict(core.decoder.state_dict())
            latents = torch.randn(1, channels, 3, 4, 6)
            before: dict[torch.nn.Module, torch.Tensor] = {}
            frames = torch.cat([ours(latent, before) for latent in latents.unbind(2)])
            expected = core.decode(latents)[0].transpose(0, 1).cpu()
        assert expected.shape == frames.shape and float(expected.std()) > 0.01, float(expected.std())
        found[str(channels)] = float((frames - expected.clamp(0, 1)).abs().max())
    return found


def previews(folder: str) -> dict[str, str]:
    """The kind of previewer by family and preview method, with tiny decoders of two families in ``folder``."""
    latent_preview.folder_paths.folder_names_and_paths["vae_approx"] = ([folder], {".safetensors"})
    for family, channels, strides, patch in (("hunyuan_video", 16, (1, 2, 2), 1), ("mochi", 12, (1, 2, 3), 1)):
        row = FAMILIES[family].published.tiny_decoders[0]
        state = draft.Network(channels, strides, patch, row).state_dict()
        tensors = {f"decoder.{name}": tensor for name, tensor in state.items()}
        save_file(tensors, Path(folder) / f"{row.name}.safetensors")
    usual, found = latent_preview.args.preview_method, {}
    try:
        for method in latent_preview.LatentPreviewMethod:
            latent_preview.args.preview_method = method
            for family, channels in (("hunyuan_video", 16), ("mochi", 12)):
                previewer = preview.previewer_for(family)
                found[f"{family} {method.value}"] = type(previewer).__name__
                if isinstance(previewer, preview.TinyPreviewer):
                    _, picture, _ = previewer.decode_latent_to_preview_image("JPEG", torch.randn(1, channels, 3, 4, 6))
                    found[f"{family} size"] = "x".join(map(str, picture.size))
    finally:
        latent_preview.args.preview_method = usual
    return found
