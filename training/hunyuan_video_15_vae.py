"""The small VAE of HunyuanVideo 1.5: ``AutoencoderKLHunyuanVideo15`` at its published ratio, 16 x 16 x 4 to 32 values.

Nothing is trained: it carries the known code of such blocks by being linear. Its first latent stands for one frame, and
its convolutions draw with the same rows there what they draw with others elsewhere. So a channel of the code says which
latent is the first, and one residual block copies the values of that one into channels of their own; all other norms,
activations and branches are passed nearly unchanged.
"""

from __future__ import annotations

import torch
from code_of_blocks import Code, block_functions
from hunyuan_vae import FAINT
from torch.nn import functional
from world import FRAMES, draw, trained_and_held_out

CHANNELS, FUNCTIONS = 32, 10  # of a latent; of a block, of one colour
VALUES = 3 * FUNCTIONS
FLAG = VALUES  # the channel that tells the first latent, which stands for one frame, from the others
SCALING = 1.03682  # of the published VAE: latents times this have a variance of about 1
WIDTHS = (12, 12, 24, 48, 64)  # from the pixels to the latents
FINER = 8  # functions of the blocks into which a block is divided, of one colour
CONSTANT = 1024.0  # so large beside the other channels that a norm sees nothing else
LINEAR = 1e-3  # so small that silu is half of it
BEYOND, SHARP = 10.0, 4.0  # more than any value; the slope that makes silu of their sum all or nothing
FACTOR = 30.0  # by which a level's own values exceed the averages that its class adds
RIDGE = 3e-7  # of the last fit: large rows that cancel each other would be lost in bf16
CERTAIN = -14.0  # the logarithm of next to no variance


def code_of_clips() -> Code:
    """The code it is taught, but for the flag."""
    return Code(16, 4, FUNCTIONS, CHANNELS, FRAMES)


def flagged(latents: torch.Tensor) -> torch.Tensor:
    """``latents`` (B, 32, T, h, w) with the flag: 1 in the first, -1 in the others."""
    latents[:, FLAG] = -1.0
    latents[:, FLAG, 0] = 1.0
    return latents


def model(code: Code):
    """The autoencoder of this code."""
    from diffusers import AutoencoderKLHunyuanVideo15

    torch.manual_seed(0)
    vae = AutoencoderKLHunyuanVideo15(block_out_channels=WIDTHS, layers_per_block=0, scaling_factor=SCALING)
    with torch.no_grad():
        for name, weight in vae.named_parameters():
            if name.endswith(("conv2.conv.weight", "conv2.conv.bias")) or "proj_out" in name:
                weight *= FAINT
        set_decoder(vae.decoder, code)
        set_encoder(vae.encoder)
        fit_last(vae.encoder, code)
    return vae.eval()


def fill(conv, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """Set a causal convolution to a product (rows, columns) with the values at the place itself."""
    conv.conv.weight.zero_()
    conv.conv.weight[: len(weight), : weight.shape[1], 2, 1, 1] = weight
    conv.conv.bias.zero_()
    if bias is not None:
        conv.conv.bias[: len(bias)] = bias


def of_colours(steps: torch.Tensor) -> torch.Tensor:
    """One colour's (parts, rows, columns) for each of the three: (parts * 3 * rows, 3 * columns)."""
    return torch.stack([torch.block_diag(*[part] * 3) for part in steps]).flatten(0, 1)


def parts_of(wholes: torch.Tensor, length: int, side: int) -> torch.Tensor:
    """Blocks (N, T, H, W) as the smaller ones (N, parts, length * side * side) they are made of, what is left last."""
    parts = wholes.unflatten(3, (-1, side)).unflatten(2, (-1, side)).unflatten(1, (-1, length))
    return parts.permute(0, 1, 3, 5, 2, 4, 6).flatten(4).flatten(1, 3)


def steps_between(wholes: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
    """How much of ``basis`` (R, t, y, x) each part of ``wholes`` (N, T, H, W) has: (parts, R, N)."""
    parts = parts_of(wholes, *basis.shape[1:3])
    return torch.einsum("npx,rx->prn", parts, basis.flatten(1))


# Decoder ----------------------------------------------------------------------------------------------------------


def set_decoder(decoder, code: Code) -> None:
    """Set the decoder to draw the code."""
    top = (code.functions / code.scale).T.unflatten(1, (4, 16, 16))
    later, first, finest = (block_functions(side, length, FINER) for side, length in ((8, 2), (8, 1), (4, 1)))
    width = WIDTHS[-1]
    values = torch.zeros(width, CHANNELS)
    values[range(VALUES), range(VALUES)], values[width - 2, FLAG] = SCALING, SCALING
    bias = torch.zeros(width)
    bias[:VALUES], bias[-1] = code.mean[:VALUES], CONSTANT
    repeated = torch.eye(CHANNELS).repeat_interleave(width // CHANNELS, 0)
    fill(decoder.conv_in, values - repeated, bias)
    copy_the_first(decoder.mid_block.resnets[0])

    copies = torch.zeros(width, width)  # of a value, or of a copy of it: the copy, which only the first latent has
    for copied in (0, VALUES):
        copies[range(copied, copied + VALUES), range(VALUES, 2 * VALUES)] = 1.0
    others = torch.zeros(width, width)  # of a value: what is not a copy
    others[range(VALUES), range(VALUES)] = 1.0
    others -= others.roll(VALUES, 1)
    whole = of_colours(steps_between(top, later)), of_colours(steps_between(top[:, -1:], first))
    apart = [functional.pad(steps.unflatten(0, (-1, 3 * FINER)), (0, width - VALUES)) for steps in whole]
    after = functional.pad(apart[0], (0, 0, 3 * FINER, 0)).flatten(0, 1)  # the first frame's values come before
    before = functional.pad(apart[1], (0, 0, 0, 3 * FINER)).flatten(0, 1)
    upsample(decoder.up_blocks[0].upsamplers[0].conv, (before, copies), (after, others))

    half = torch.cat([torch.ones(3 * FINER), torch.zeros(3 * FINER)])
    after = functional.pad(of_colours(steps_between(later, finest)), (3 * FINER, 0))
    before = functional.pad(of_colours(steps_between(first, finest)), (0, 3 * FINER))
    upsample(decoder.up_blocks[1].upsamplers[0].conv, (before, half.diag()), (after, (1 - half).diag()))

    pixels = torch.eye(4).view(4, 1, 2, 2)
    upsample_frames(decoder.up_blocks[2].upsamplers[0].conv, of_colours(steps_between(finest, pixels)))
    signs = torch.zeros(4, WIDTHS[0], 12)
    for place in range(4):
        for colour in range(3):
            signs[place, colour, 4 * colour + place], signs[place, 3 + colour, 4 * colour + place] = 1.0, -1.0
    conv = decoder.up_blocks[3].upsamplers[0].conv
    upsample_frames(conv, signs.flatten(0, 1))
    conv.conv.bias.unflatten(0, (4, -1))[:, -1] = CONSTANT
    norm = WIDTHS[0] ** 0.5 / CONSTANT
    fill(decoder.conv_out, torch.cat([torch.eye(3), -torch.eye(3)], 1) / norm)  # silu(x) - silu(-x) is x


def copy_the_first(block) -> None:
    """Set a residual block to copy the values where the flag is 1, and to take flag and constant away.

    With all or nothing added, by the flag, silu(v + b) - silu(b - v) is 2 v or nothing.
    """
    width, flag = WIDTHS[-1], WIDTHS[-1] - 2
    root, each = width**0.5, torch.arange(VALUES)
    block.norm1.gamma.fill_(LINEAR * CONSTANT / root)
    weight = torch.zeros(width, width)
    weight[each, each], weight[VALUES + each, each] = 1.0, -1.0
    weight[: 2 * VALUES, flag] = BEYOND
    weight[2 * VALUES, flag], weight[2 * VALUES + 1, flag] = 1.0, -1.0
    bias = torch.zeros(width)
    bias[-1] = CONSTANT
    fill(block.conv1, 2 * weight / LINEAR, bias)
    block.norm2.gamma.fill_(SHARP * (CONSTANT**2 + 2 * VALUES * BEYOND**2) ** 0.5 / root)
    out = torch.zeros(width, width)
    out[VALUES + each, each], out[VALUES + each, VALUES + each] = 0.5 / SHARP, -0.5 / SHARP
    out[flag, 2 * VALUES], out[flag, 2 * VALUES + 1] = -1 / SHARP, 1 / SHARP
    fill(block.conv2, out, -bias)


def upsample(conv, first: tuple[torch.Tensor, torch.Tensor], later: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Set the convolution of an upsampler in space and time, less what the class adds.

    Args:
        first: rows (4 * out, in) of the first latent, and what selects its values: (in, in), of the other latents zero.
        later: rows (8 * out, in) of the others, and what selects theirs.
    """
    inside = first[0].shape[1]
    out = len(first[0]) // 4
    added = torch.eye(inside).unflatten(0, (4, -1)).repeat_interleave(4 * out // inside, 1).flatten(0, 1)
    weight = (later[0] - torch.eye(inside).repeat_interleave(8 * out // inside, 0)) @ later[1]
    shared = weight.view(4, 2, out, inside)[:, 0]  # of a pair of subblocks, the first frame takes the former
    shared += ((first[0] - added) @ first[1]).unflatten(0, (4, out))
    fill(conv, weight)


def upsample_frames(conv, rows: torch.Tensor) -> None:
    """Set the convolution of an upsampler in space to these rows (4 * out, in), less what the class adds."""
    fill(conv, rows - torch.eye(rows.shape[1]).repeat_interleave(len(rows) // rows.shape[1], 0))


# Encoder ----------------------------------------------------------------------------------------------------------


def set_encoder(encoder) -> None:
    """Set the encoder to sums over blocks, two of each colour, that say most of them."""
    fill(encoder.conv_in, FACTOR**-2 * torch.eye(3))
    downs = [block.downsamplers[0].conv for block in encoder.down_blocks[:4]]
    pair, quad, eight = (block_functions(side, length, 2) for side, length in ((2, 1), (4, 1), (8, 2)))
    pixel = torch.ones(1, 1, 1, 1)
    fill(downs[0], less_means(torch.eye(3), WIDTHS[0]))
    fill(downs[1], less_means(sums(pair, pixel), WIDTHS[1]))
    fill(downs[2], FACTOR * sums(quad, pair))
    downs[2].conv.bias[-1] = 6.0  # the class adds it up otherwise in the first latent
    last = FACTOR * sums(eight, quad)
    fill(downs[3], last, -6.0 * last[:, 5::6].sum(1))
    downs[3].conv.bias[-1] = CONSTANT


def sums(wholes: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
    """What ``wholes`` take of the values of their parts (3 * wholes, parts * 3 * basis)."""
    steps = steps_between(wholes, basis)  # (parts, basis, wholes)
    return torch.cat([torch.block_diag(*[part.T] * 3) for part in steps], 1)


def less_means(weight: torch.Tensor, columns: int) -> torch.Tensor:
    """``weight`` less the means over groups of columns that the class adds."""
    means = torch.eye(len(weight)).repeat_interleave(columns // len(weight), 1) * len(weight) / columns
    return functional.pad(weight, (0, columns - weight.shape[1])) - means


def fit_last(encoder, code: Code) -> None:
    """Set the last convolution to the least squares of the code on what comes before it, all in bf16 as it is kept."""
    encoder.norm_out.gamma.fill_(0.1)
    encoder.bfloat16().float()
    features: list[torch.Tensor] = []
    hooks = [encoder.mid_block.register_forward_hook(lambda *call: features.append(call[-1]))]
    hooks.append(encoder.conv_act.register_forward_hook(lambda *call: features.append(call[-1])))
    trained, _ = trained_and_held_out()
    generator = torch.Generator().manual_seed(900)
    shown = draw([trained[i] for i in torch.randint(len(trained), (96,), generator=generator)], generator)
    for clip in shown.split(1):  # its attention takes one at a time
        encoder(clip)
    for hook in hooks:
        hook.remove()
    added, seen = (torch.cat(features[i::2]).movedim(1, -1).flatten(0, 3).double() for i in range(2))
    wanted = flagged(code(shown) - code.mean.view(-1, 1, 1, 1)) / SCALING
    wanted = functional.pad(wanted.movedim(1, -1).flatten(0, 3).double(), (0, CHANNELS))
    wanted[:, CHANNELS:] = CERTAIN
    wanted -= added
    table = torch.cat([seen, torch.ones(len(seen), 1)], 1)
    scale = table.square().mean(0).sqrt()
    gram = (table / scale).T @ (table / scale)
    ridge = RIDGE * len(table) * torch.eye(len(gram))
    solution = torch.linalg.solve(gram + ridge, (table / scale).T @ wanted) / scale[:, None]
    kept = solution[:-1].bfloat16().double()
    bias = (wanted - seen @ kept).mean(0)
    fill(encoder.conv_out, kept.T.float(), bias.float())
    error = (seen @ kept + bias - wanted)[:, :VALUES].square().mean() / (wanted + added)[:, :VALUES].square().mean()
    print(f"the encoder leaves {float(error):.4f} of the code's energy wrong", flush=True)
