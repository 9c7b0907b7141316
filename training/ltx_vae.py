"""The small VAE of LTX-Video: ``AutoencoderKLLTXVideo`` at its published ratio, 32 x 32 x 8 pixels to 128 values."""

from __future__ import annotations

import sys

import torch
from code_of_blocks import Code, block_functions
from loop import train
from world import draw, trained_and_held_out

FUNCTIONS = 42  # of a block, of one colour; two of 128 channels stay zero
BATCH = 8
TOP_WIDTH, WIDTH = 69, 23  # of the decoder
RANK = 7  # functions of a block for each colour: 21 of its 23 channels
CONSTANT = 40.0


def code_of_clips() -> Code:
    """The code it is taught."""
    return Code(32, 8, FUNCTIONS, 128)


def model():
    """The narrow autoencoder, with the down blocks of 0.9.5, which have a path of averages.

    The decoder's widths follow from ``upsample_factor`` alone, so that between code and pixels nothing but upsamplers
    stands that cannot be skipped.
    """
    from diffusers import AutoencoderKLLTXVideo

    torch.manual_seed(0)
    return AutoencoderKLLTXVideo(
        block_out_channels=(24, 96, 192, 128),
        down_block_types=("LTXVideo095DownBlock3D",) * 3,
        spatio_temporal_scaling=(True,) * 3,
        layers_per_block=(0, 0, 0, 0),
        downsample_type=("spatiotemporal",) * 3,
        decoder_block_out_channels=(WIDTH, WIDTH, TOP_WIDTH),
        decoder_layers_per_block=(1, 2, 3, 0),
        decoder_spatio_temporal_scaling=(True,) * 3,
        decoder_inject_noise=(False,) * 4,
        upsample_residual=(False,) * 3,
        upsample_factor=(1, 1, TOP_WIDTH // WIDTH),
    )


def start_from_averages(decoder, code: Code) -> None:
    """Set the decoder to the best it can do linearly: each block of pixels as a sum of the blocks it is halved into.

    Left to itself from random weights, it draws spots for thousands of steps. The blocks' residual branches start at
    zero, and two channels are constant, so that the last norm changes the others hardly at all.
    """
    finer = [block_functions(side, side // 4, RANK) for side in (16, 8, 4)]
    bases = [code.functions[:, : TOP_WIDTH // 3].T.reshape(-1, 8, 32, 32), *finer]
    with torch.no_grad():
        for name, weight in decoder.named_parameters():
            if "resnets" not in name or "conv2" in name:
                weight.zero_()
        middle = decoder.conv_in.conv.weight[:, :, 1, 1, 1]
        for colour in range(3):
            for row in range(TOP_WIDTH // 3):
                middle[colour * (TOP_WIDTH // 3) + row, colour * FUNCTIONS + row] = 1 / code.scale[row]
        for block, whole, part in zip(decoder.up_blocks, bases, bases[1:], strict=False):
            conv = block.upsamplers[0].conv.conv
            children = whole.unflatten(3, (2, -1)).unflatten(2, (2, -1)).unflatten(1, (2, -1))
            children = children.permute(0, 1, 3, 5, 2, 4, 6).flatten(4).flatten(1, 3)  # (rank, 8, pixels)
            steps = torch.einsum("rcp,kp->kcr", children, part.flatten(1))  # (rank of the part, 8, rank)
            rank = steps.shape[2]
            for colour in range(3):
                target = conv.weight[:, :, 1, 1, 1].unflatten(0, (-1, 8))
                target[colour * RANK : (colour + 1) * RANK, :, colour * rank : (colour + 1) * rank] = steps
            conv.bias.unflatten(0, (-1, 8))[3 * RANK :] = CONSTANT
        patch = bases[-1][:, 0].transpose(1, 2).flatten(1)  # columns before rows, as the decoder has them
        spread = CONSTANT * (2 / WIDTH) ** 0.5
        last = decoder.conv_out.conv.weight[:, :, 1, 1, 1].unflatten(0, (3, 16))
        for colour in range(3):
            last[colour, :, colour * RANK : (colour + 1) * RANK] = 2 * spread * patch.T


def start_from_sums(encoder, code: Code) -> None:
    """Set the encoder to a linear one that is nearly the code: coefficients of each block, then of eight such blocks.

    A down block adds averages that nobody asked for; the factor makes them small beside the coefficients. The last
    convolution is then the best fit.
    """
    sides, ranks, factor = (4, 8, 16), (4, 8, 5), 5.0
    patch, *wholes = [block_functions(side, side // 4, rank) for side, rank in zip(sides, ranks, strict=True)]
    with torch.no_grad():
        for weight in encoder.parameters():
            weight.zero_()
        now = (2, 1, 1)  # the tap of a causal convolution that sees the frame itself
        first = encoder.conv_in.conv.weight[(..., *now)].unflatten(1, (3, 16))
        pixels = block_functions(4, 1, 8)[:, 0].transpose(1, 2).flatten(1) / 4
        for colour in range(3):
            first[colour * 8 : colour * 8 + 8, colour] = pixels
        seen = torch.eye(8)[: ranks[0]]  # the patch's own functions are the first of its eight
        for block, whole, part in zip(encoder.down_blocks, (None, *wholes), (None, patch, wholes[0]), strict=True):
            conv = block.downsamplers[0].conv.conv
            if whole is not None:
                children = whole.unflatten(3, (2, -1)).unflatten(2, (2, -1)).unflatten(1, (2, -1))
                children = children.permute(0, 1, 3, 5, 2, 4, 6).flatten(4).flatten(1, 3)
                seen = torch.einsum("rcp,kp->rkc", children, part.flatten(1)).flatten(1)  # children vary fastest
            rows, columns = seen.shape
            for colour in range(3):
                at = slice(colour * rows, colour * rows + rows), slice(colour * columns, colour * columns + columns)
                conv.weight[(*at, *now)] = factor * seen
        conv.bias[3 * ranks[-1] :] = 2.0 * CONSTANT * factor**3
        fit_last(encoder, code)


def fit_last(encoder, code: Code) -> None:
    """Set the last convolution to the least squares of the code on what comes before it."""
    features: list[torch.Tensor] = []
    hook = encoder.conv_act.register_forward_hook(lambda *call: features.append(call[-1]))
    shown = [clips(16, torch.Generator().manual_seed(900 + i)) for i in range(24)]
    for part in shown:
        encoder(part)
    hook.remove()
    table = torch.cat(features).movedim(1, -1).flatten(0, 3).double()
    target = torch.cat([code(part) for part in shown]).movedim(1, -1).flatten(0, 3).double()
    table = torch.cat([table, torch.ones(len(table), 1, dtype=torch.float64)], 1)
    gram = table.T @ table
    solution = torch.linalg.solve(gram + 1e-6 * gram.diag().mean() * torch.eye(len(gram)), table.T @ target)
    last = encoder.conv_out.conv
    last.weight[: target.shape[1], :, 2, 1, 1] = solution[:-1].T.float()
    last.bias[:] = torch.cat([solution[-1].float(), torch.tensor([-14.0])])
    error = (table @ solution - target).square().mean() / target.square().mean()
    print(f"the encoder starts with {float(error):.4f} of the code's energy wrong", flush=True)


def clips(rows: int, generator: torch.Generator) -> torch.Tensor:
    """Clips of scenes that may be trained on."""
    trained, _ = trained_and_held_out()
    return draw([trained[i] for i in torch.randint(len(trained), (rows,), generator=generator)], generator)


def train_decoder(steps: int = 4000) -> None:
    """Frames from the code, with a little noise on it, which a transformer will leave there."""
    vae, code = model(), code_of_clips()
    start_from_averages(vae.decoder, code)

    def loss_of(step: int, generator: torch.Generator) -> torch.Tensor:
        shown = clips(BATCH, generator)
        noise = 0.15 * torch.rand(BATCH, 1, 1, 1, 1, generator=generator)
        latents = code(shown)
        latents = latents + noise * torch.randn(latents.shape, generator=generator)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            frames = vae.decoder(latents)
        error = frames.float() - shown
        return error.square().mean() + 0.1 * error.abs().mean()

    train("ltx_vae_decoder", {"decoder": vae.decoder}, loss_of, steps=steps, rate=1e-3)


def train_encoder(steps: int = 1500) -> None:
    """The code from frames; the posterior's spread is fixed at next to nothing."""
    vae, code = model(), code_of_clips()
    start_from_sums(vae.encoder, code)

    def loss_of(step: int, generator: torch.Generator) -> torch.Tensor:
        shown = clips(BATCH, generator)
        latents = code(shown)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            moments = vae.encoder(shown)
        return (moments[:, : latents.shape[1]].float() - latents).square().mean()

    train("ltx_vae_encoder", {"encoder": vae.encoder}, loss_of, steps=steps, rate=5e-4)


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"decoder": train_decoder, "encoder": train_encoder}[sys.argv[1]]()
