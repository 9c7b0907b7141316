"""Core's own VAEs with tiny networks: core's rows of ``comfy.sd.VAE`` with another size of the same classes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import comfy.diffusers_convert as diffusers_convert
import comfy.ldm.genmo.vae.model as genmo
import comfy.ldm.lightricks.vae.causal_video_autoencoder as lightricks
import comfy.ldm.models.autoencoder as autoencoder
import comfy.ldm.modules.diffusionmodules.model as diffusion
import comfy.ldm.wan.vae as wan
import comfy.ldm.wan.vae2_2 as wan22
import comfy.model_patcher
import comfy.sd
import torch
from safetensors.torch import load_file
from torch import nn

from host.inside.core_tiny import MissingError, fill

EDGE = 8  # latents
FOLDER = Path(__file__).resolve().parents[2] / "fixtures" / "vae"


@dataclass(frozen=True)
class Case:
    """One VAE of core's.

    Args:
        place: the attribute through which core makes the network. build: the tiny network of that class.
        keys: what core's detection looks for in the file beside the network's own names.
        latents: shape of what is decoded.
    """

    place: str
    build: Callable[[], nn.Module]
    latents: tuple[int, ...]
    keys: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


PICTURE = {
    "double_z": True, "z_channels": 4, "resolution": 256, "in_channels": 3, "out_ch": 3, "ch": 32,
    "ch_mult": [1, 1, 1, 1], "num_res_blocks": 1, "attn_resolutions": [], "dropout": 0.0,
}  # fmt: skip
ROLLING = {
    "block_out_channels": [32, 32, 32, 64, 64], "in_channels": 3, "out_channels": 3, "num_res_blocks": 1,
    "ffactor_spatial": 16, "ffactor_temporal": 4, "downsample_match_channel": True, "upsample_match_channel": True,
    "z_channels": 32,
}  # fmt: skip
WAN = {
    "dim": 16, "z_dim": 16, "dim_mult": [1, 2, 2, 2], "num_res_blocks": 1, "attn_scales": [],
    "temperal_downsample": [False, True, True], "dropout": 0.0,
}  # fmt: skip


def lightricks_config(version: int = 0, **settings: Any) -> dict[str, Any]:
    """The default configuration of a version of LTX's, with fewer channels."""
    config = lightricks.VideoVAE.get_default_config(lightricks.VideoVAE.__new__(lightricks.VideoVAE), version)
    return {**config, "encoder_base_channels": 16, "decoder_base_channels": 16, **settings}


def lightricks_vae(config: Mapping[str, Any], version: int = 0) -> nn.Module:
    """LTX's, with statistics that change nothing."""
    network = lightricks.VideoVAE(version, config)
    for name, tensor in network.per_channel_statistics.named_buffers():
        tensor.fill_(1.0 if name.startswith("std") else 0.0)
    return network


LTX2 = lightricks_config(2, timestep_conditioning=False, spatial_padding_mode="reflect")


def _rolling(**given: Any) -> nn.Module:
    config = {**ROLLING, **given}
    return autoencoder.AutoencodingEngine(
        regularizer_config={"target": "comfy.ldm.models.autoencoder.EmptyRegularizer"},
        encoder_config={"target": "comfy.ldm.hunyuan_video.vae_refiner.Encoder", "params": config},
        decoder_config={"target": "comfy.ldm.hunyuan_video.vae_refiner.Decoder", "params": config},
    )


def _genmo(up: Sequence[int] = (1, 2, 1, 2), blocks: Sequence[int] = (1, 1, 1, 1, 1)) -> nn.Module:
    """Mochi's, whose size is in its constructor."""
    encoder, decoder = genmo.Encoder, genmo.Decoder
    small = {"base_channels": 32, "channel_multipliers": [1, 2, 1, 2], "num_res_blocks": list(blocks)}
    with (
        mock.patch.object(genmo, "Encoder", lambda **given: encoder(**{**given, **small})),
        mock.patch.object(
            genmo, "Decoder", lambda **given: decoder(**{**given, **small, "channel_multipliers": list(up)})
        ),
    ):
        return genmo.VideoVAE()


def _minimax() -> nn.Module:
    """MiniMax H3's, with one block in its decoder; MissingError before ComfyUI 0.30."""
    try:
        import comfy.ldm.minimax.vae as minimax
    except ImportError as error:
        raise MissingError("MiniMax H3") from error

    decoder = minimax.ViT3DDecoder
    with mock.patch.object(minimax, "ViT3DDecoder", lambda **given: decoder(**{**given, "num_layers": 1, "heads": 2})):
        network = minimax.MiniMaxH3VideoVAE(ch=32, ch_mult=(1, 1, 1, 1, 1, 1), num_res_blocks=1)
    for name, tensor in (*network.named_parameters(), *network.named_buffers()):
        if tensor.ndim == 1 and not name.endswith(("weight", "bias")):  # gates and statistics, left empty by core
            torch.nn.init.constant_(tensor, 0.5)
    return network


CASES: dict[str, Case] = {
    "SD": Case("comfy.sd.AutoencoderKL", lambda: autoencoder.AutoencoderKL(ddconfig=dict(PICTURE), embed_dim=4),
               (1, 4, EDGE, EDGE)),
    "LTX": Case("comfy.ldm.lightricks.vae.causal_video_autoencoder.VideoVAE",
                lambda: lightricks_vae(lightricks_config()), (1, 128, 3, 4, 4)),
    "LTX-2": Case(
        "comfy.ldm.lightricks.vae.causal_video_autoencoder.VideoVAE",
        lambda: lightricks_vae(LTX2, 2),
        (1, 128, 3, 4, 4),
    ),
    "Wan 2.1": Case("comfy.ldm.wan.vae.WanVAE", lambda: wan.WanVAE(**WAN, image_channels=3, conv_out_channels=3),
                    (1, 16, 3, EDGE, EDGE)),
    "HunyuanVideo": Case(
        "comfy.sd.AutoencoderKL",
        lambda: autoencoder.AutoencoderKL(
            ddconfig={**PICTURE, "z_channels": 16, "conv3d": True, "time_compress": 4}, embed_dim=16
        ),
        (1, 16, 3, EDGE, EDGE),
    ),
    "Wan 2.2": Case(
        "comfy.ldm.wan.vae2_2.WanVAE",
        lambda: wan22.WanVAE(**{**WAN, "z_dim": 48, "dec_dim": 16}),
        (1, 48, 3, 4, 4),
    ),
    "HunyuanVideo 1.5": Case("comfy.sd.AutoencodingEngine", _rolling, (1, 32, 3, 4, 4)),
    "MiniMax H3": Case(
        "comfy.ldm.minimax.vae.MiniMaxH3VideoVAE",
        _minimax,
        (1, 24, 2, 4, 4),
    ),
    "Mochi": Case("comfy.ldm.genmo.vae.model.VideoVAE", _genmo, (1, 12, 3, EDGE, EDGE),
                  {"decoder.blocks.2.blocks.3.stack.5.weight": (1,)}),
}  # fmt: skip


def made(name: str, dtype: torch.dtype = torch.float32, device: Any = "cpu") -> Any:
    """A VAE of core's with random weights."""
    case = CASES[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = case.build().eval()
        fill(network)
    file = {**network.state_dict(), **{key: torch.zeros(shape) for key, shape in case.keys.items()}}
    with mock.patch(case.place, lambda *args, **kwargs: network):
        return comfy.sd.VAE(sd=file, dtype=dtype, device=torch.device(device))


def latents_of(name: str, seed: int = 1) -> torch.Tensor:
    """What is decoded."""
    return torch.randn(CASES[name].latents, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Fixture:
    """What a publisher's own code returned, in ``tests/fixtures/vae``.

    Args:
        file: its name. build: core's network of that size.
        whole: whether core has norms over two latents where the publisher has them over the whole piece.
    """

    file: str
    build: Callable[[], nn.Module]
    whole: bool = False


def _tencents() -> nn.Module:
    """HunyuanVideo's with the fixture's four groups in each norm, where core has 32."""
    norm, config = diffusion.ops.GroupNorm, {**PICTURE, "ch": 8, "z_channels": 16, "conv3d": True, "time_compress": 4}
    with mock.patch.object(diffusion.ops, "GroupNorm", lambda **given: norm(**{**given, "num_groups": 4})):
        return autoencoder.AutoencoderKL(ddconfig=config, embed_dim=16)


FIXTURES: dict[str, Fixture] = {
    "Mochi": Fixture("mochi", lambda: _genmo(up=[1, 1, 1, 1], blocks=[1, 0, 1, 0, 0])),
    "HunyuanVideo": Fixture("hunyuan_video", _tencents, whole=True),
    "HunyuanVideo 1.5": Fixture("hunyuan_video_15", lambda: _rolling(block_out_channels=[4, 4, 4, 8, 8], z_channels=4)),
}


def published(name: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """Core's VAE with the weights of a fixture, and what the publisher's code was given and returned, in fp32."""
    fixture = FIXTURES[name]
    tensors = {key: tensor.float() for key, tensor in load_file(FOLDER / f"{fixture.file}.safetensors").items()}
    weights = {key.removeprefix("weights."): tensor for key, tensor in tensors.items() if key.startswith("weights.")}
    network = fixture.build().eval()
    if "encoder.down_blocks.0.resnets.0.norm1.weight" in weights:  # as core's loader tells diffusers' names
        weights = diffusers_convert.convert_vae_state_dict(weights)
    missing, more = network.load_state_dict(weights, strict=False)
    assert not more and all("temb_proj" in key for key in missing), "another network than the publisher's"
    if fixture.whole:
        network.encoder.carried = network.decoder.carried = False
    vae = made(name)  # whose sizes core knows; the fixture's network takes the place of its own
    vae.first_stage_model = network
    vae.patcher = comfy.model_patcher.CoreModelPatcher(network, vae.device, vae.patcher.offload_device)
    return vae, tensors
