"""The small VAE of Mochi: ``AutoencoderKLMochi`` at its published ratio, 8 x 8 x 6 pixels to 12 values.

Nothing is trained: between its norms Mochi's autoencoder is made of products with the values of a block, which carry
any linear code of such blocks exactly. Norms, activations and branches are passed unchanged.
"""

from __future__ import annotations

import torch
from code_of_blocks import Code
from hunyuan_vae import CONSTANT, fill, hush

FRAMES = 7  # of a clip: one, and those of a latent
CHANNELS = 12
FACTORS = (3, 2, 1)  # frames into which a block is divided, from the latent to the pixels
TOP_WIDTH, GROUP = 128, 4  # of the encoder's last norm, which has 32 groups
CERTAIN = -14.0  # the logarithm of next to no variance


def code_of_clips() -> Code:
    """The code of its autoencoder."""
    return Code(8, 6, CHANNELS // 3, CHANNELS, FRAMES)


def model(code: Code):
    """The autoencoder of this code."""
    from diffusers import AutoencoderKLMochi

    torch.manual_seed(0)
    vae = AutoencoderKLMochi(
        encoder_block_out_channels=(3, 12, 96, TOP_WIDTH),
        decoder_block_out_channels=(6, 12, 96, 32),
        layers_per_block=(0, 0, 0, 0, 1),
        add_attention_block=(False,) * 5,
        latents_mean=code.mean.tolist(),
        latents_std=[1.0] * CHANNELS,
    )
    with torch.no_grad():
        hush(vae)
        set_encoder(vae.encoder, code.functions * code.scale)
        set_decoder(vae.decoder, code.functions / code.scale)
    return vae.eval()


def levels(functions: torch.Tensor) -> list[torch.Tensor]:
    """What each level does with one colour, from the latent to the pixels: (smaller block, t, y, x, larger block).

    Args:
        functions: (pixels of a block, values of its code).
    """
    found, length, side = [], 6, 8
    for factor in FACTORS:
        parts = functions.T.unflatten(1, (factor, length // factor, 2, side // 2, 2, side // 2))
        found.append(parts.permute(2, 4, 6, 1, 3, 5, 0).flatten(0, 2))
        length, side = length // factor, side // 2
        functions = torch.eye(length * side**2)  # below the first level, a block's values are its pixels
    return found


def set_decoder(decoder, functions: torch.Tensor) -> None:
    """Set the decoder to draw these functions."""
    decoder.conv_in.weight.zero_()
    decoder.conv_in.weight[range(CHANNELS), range(CHANNELS)] = 1.0
    decoder.conv_in.bias.zero_()
    for block, level in zip(decoder.up_blocks, levels(functions), strict=True):
        rows = torch.block_diag(*[level.flatten(0, 3)] * 3)
        block.proj.weight.zero_()
        block.proj.bias.zero_()
        block.proj.weight[: len(rows), : rows.shape[1]] = rows
    last = decoder.up_blocks[-1].proj.weight
    half = len(last) // 2
    last[half:] = -last[:half]  # silu(x) - silu(-x) is x
    decoder.proj_out.weight.copy_(torch.cat([torch.eye(3), -torch.eye(3)], 1))
    decoder.proj_out.bias.zero_()


def set_encoder(encoder, functions: torch.Tensor) -> None:
    """Set the encoder to find how much of each of these functions a block has."""
    encoder.proj_in.weight.zero_()
    encoder.proj_in.bias.zero_()
    encoder.proj_in.weight[range(3), range(3)] = 1.0
    for block, level in zip(encoder.down_blocks, reversed(levels(functions)), strict=True):
        fill(block.conv_in.conv, level.movedim(-1, 0))
    conv = encoder.down_blocks[-1].conv_in.conv
    found, constant = conv.weight[:CHANNELS].clone(), CONSTANT
    groups = conv.weight.zero_().unflatten(0, (-1, GROUP))  # of each value, itself, its negative and two constants
    groups[:CHANNELS, 0], groups[:CHANNELS, 1] = found, -found
    conv.bias.unflatten(0, (-1, GROUP))[:CHANNELS, 2:] = torch.tensor([constant, -constant])
    encoder.norm_out.norm_layer.weight.fill_(1.0)
    encoder.norm_out.norm_layer.bias.zero_()
    root = torch.tensor(2.0).sqrt()  # what the norm makes of the constant
    out = encoder.proj_out.weight.zero_().unflatten(1, (-1, GROUP))
    each = torch.arange(CHANNELS)
    out[each, each, 0], out[each, each, 1] = constant / root, -constant / root
    out[CHANNELS + each, each, 2] = CERTAIN / torch.nn.functional.silu(root)
