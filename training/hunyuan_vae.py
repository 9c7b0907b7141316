"""The small VAE of HunyuanVideo and FramePack: ``AutoencoderKLHunyuanVideo`` at its published ratio, 8 x 8 x 4 pixels.

Trained from random weights it is slow, and the world is simple: five values for each of red, green and blue say enough
of a block. So this autoencoder is linear, in each colour the same, and separable: along an axis every layer's filters
carry two components. Such a one is trained on lines of pixels in a minute, and the real class's convolutions are the
products of the three axes' filters. Its norms, activations and branches are passed unchanged.
"""

from __future__ import annotations

import torch
from loop import saved, train
from torch import nn
from torch.nn import functional
from world import shapes, trained_and_held_out

RANK = 2  # components along an axis
CODE = 5  # values of a block, of one colour
WIDTH, CHANNELS = 32, 16
CONSTANT = 100.0  # in two channels, so large beside the others that a norm sees nothing else
WHITENING = 0.5  # 0 keeps the components' own sizes, 1 makes all alike; between, fine ones are neither lost nor loud
FAINT = 1e-3  # not zero, which loading takes for a damaged file
SCALING = 0.476986  # of the published VAE: latents times this have a variance of about 1
ENCODER, DECODER = ("in", "down_0", "down_1", "down_2"), ("in", "up_0", "up_1", "up_2", "out")


class Axis(nn.Module):
    """The linear autoencoder of lines along one axis.

    Args:
        factors: of the three levels, in encoder and decoder in the same order, as in the real class.
        causal: along time.
    """

    def __init__(self, factors: tuple[int, int, int], causal: bool) -> None:
        super().__init__()
        self.factors, self.causal = factors, causal
        generator = torch.Generator().manual_seed(0)

        def filters(rows: int, columns: int) -> nn.Parameter:
            return nn.Parameter(0.4 * torch.randn(rows, columns, 3, generator=generator))

        self.encoder = nn.ParameterDict({name: filters(RANK, 1 if name == "in" else RANK) for name in ENCODER})
        self.decoder = nn.ParameterDict({name: filters(RANK, RANK) for name in DECODER[:3]})
        self.decoder["up_2"], self.decoder["out"] = filters(1, RANK), filters(1, 1)

    def conv(self, weight: torch.Tensor, values: torch.Tensor, stride: int = 1) -> torch.Tensor:
        padded = functional.pad(values, (2, 0) if self.causal else (1, 1), mode="replicate")
        return functional.conv1d(padded, weight, stride=stride)

    def encode(self, lines: torch.Tensor) -> torch.Tensor:
        """The code (N, 2, L / 8, or L / 4) of lines (N, 1, L)."""
        values = self.conv(self.encoder["in"], lines)
        for name, stride in zip(ENCODER[1:], self.factors, strict=True):
            values = self.conv(self.encoder[name], values, stride)
        return values

    def decode(self, code: torch.Tensor) -> torch.Tensor:
        """Lines (N, 1, L)."""
        values = self.conv(self.decoder["in"], code)
        for name, factor in zip(DECODER[1:4], self.factors, strict=True):
            first, later = values.split((1, values.shape[2] - 1), 2) if self.causal else (values[..., :0], values)
            values = self.conv(self.decoder[name], torch.cat([first, later.repeat_interleave(factor, 2)], 2))
        return self.conv(self.decoder["out"], values)

    def matrices(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What encodes (2 x positions, length) and what decodes (length, 2 x positions) lines of this length."""
        with torch.no_grad():
            code = self.encode(torch.eye(length)[:, None])
            decoded = self.decode(torch.eye(code[0].numel()).unflatten(1, code.shape[1:]))
        return code.flatten(1).T, decoded[:, 0].T


def lines(axis: int, generator: torch.Generator, rows: int = 3000) -> torch.Tensor:
    """Lines (rows, 1, L) through the edges of shapes in a world of two random greys.

    Args:
        axis: 1 for time, 3 for across; what is across is as well up and down.
    """
    trained, _ = trained_and_held_out()
    shown = [trained[i] for i in torch.randint(len(trained), (160,), generator=generator)]
    through = shapes(shown, generator).movedim(axis, -1).flatten(0, -2)
    through = through[through.amax(1) - through.amin(1) > 0.02]
    through = through[torch.randperm(len(through), generator=generator)[:rows]]
    ground, shape = (2 * torch.rand(2, len(through), 1, generator=generator) - 1).unbind()
    return (ground + (shape - ground) * through)[:, None]


def train_axis(name: str, steps: int = 1500) -> None:
    """Train the filters along ``space`` or ``time``."""
    axis = AXES[name]()
    shown = lines({"space": 3, "time": 1}[name], torch.Generator().manual_seed(0))

    def loss_of(step: int, generator: torch.Generator) -> torch.Tensor:
        batch = shown[torch.randint(len(shown), (512,), generator=generator)]
        return (axis.decode(axis.encode(batch)) - batch).square().mean()

    train(f"hunyuan_vae_{name}", {"axis": axis}, loss_of, steps=steps, rate=1e-2)


AXES = {"space": lambda: Axis((2, 2, 2), causal=False), "time": lambda: Axis((1, 2, 2), causal=True)}


class Code:
    """One colour's frames to five values a block and back, linearly: what the axes' eight products say most with."""

    def __init__(self) -> None:
        self.axes = {name: make() for name, make in AXES.items()}
        for name, axis in self.axes.items():
            axis.load_state_dict(saved(f"hunyuan_vae_{name}")["axis"])
        generator = torch.Generator().manual_seed(1)
        trained, _ = trained_and_held_out()
        shown = [trained[i] for i in torch.randint(len(trained), (300,), generator=generator)]
        ground, shape = 2 * torch.rand(2, len(shown), 1, 1, 1, generator=generator) - 1
        frames = ground + (shape - ground) * shapes(shown, generator)
        values = self._products(frames).movedim(1, -1).flatten(0, 3)
        lower = torch.linalg.cholesky(self._energies())
        axes = torch.linalg.svd(values @ lower, full_matrices=False)[2][:CODE].T
        spread = (values @ lower @ axes).std(0)
        size = spread**WHITENING
        size *= SCALING * (spread / size).square().mean().sqrt()
        self.into, self.back = lower @ axes / size, (axes * size).T @ torch.linalg.inv(lower)  # (8, 5), (5, 8)

    def __call__(self, frames: torch.Tensor) -> torch.Tensor:
        """The code (B, 5, T, H / 8, W / 8) of one colour's frames (B, F, H, W)."""
        return torch.einsum("bpthw,pc->bcthw", self._products(frames), self.into)

    def decode(self, code: torch.Tensor) -> torch.Tensor:
        """Frames (B, F, H, W)."""
        count, height, width = code.shape[2:]
        time, down, across = (
            self.axes[name].matrices(length)[1].unflatten(1, (RANK, -1))
            for name, length in (("time", 4 * count - 3), ("space", 8 * height), ("space", 8 * width))
        )
        values = torch.einsum("bcthw,cp->bpthw", code, self.back).unflatten(1, (RANK, RANK, RANK))
        return torch.einsum("bijkthw,fit,yjh,xkw->bfyx", values, time, down, across)

    def _products(self, frames: torch.Tensor) -> torch.Tensor:
        """(B, 8, T, H / 8, W / 8): components along time, down and across, of which the last varies fastest."""
        time, down, across = (
            self.axes[name].matrices(length)[0].unflatten(0, (RANK, -1))
            for name, length in zip(("time", "space", "space"), frames.shape[1:], strict=True)
        )
        return torch.einsum("bfyx,itf,jhy,kwx->bijkthw", frames, time, down, across).flatten(1, 3)

    def product(self, half: str, name: str) -> torch.Tensor:
        """A layer's convolution of one colour (rows, columns, 3, 3, 3) from its filters along the axes."""
        time, space = (getattr(self.axes[axis], half)[name].detach() for axis in ("time", "space"))
        whole = torch.einsum("adt,bey,cfx->abcdeftyx", time, space, space)
        return whole.flatten(3, 5).flatten(0, 2)

    def _energies(self) -> torch.Tensor:
        """Inner products (8, 8) of what the eight values of one block are decoded to."""
        grams = []
        for name, length in (("time", 17), ("space", 56), ("space", 56)):
            whole = self.axes[name].matrices(length)[1].unflatten(1, (RANK, -1))
            middle = whole[..., whole.shape[-1] // 2]
            grams.append(middle.T @ middle)
        return torch.kron(torch.kron(grams[0], grams[1]), grams[2])


def model(code: Code):
    """The autoencoder of three colours, in which nothing but the code's convolutions has an effect."""
    from diffusers import AutoencoderKLHunyuanVideo

    torch.manual_seed(0)
    vae = AutoencoderKLHunyuanVideo(block_out_channels=(WIDTH,) * 4, layers_per_block=0, norm_num_groups=1)
    with torch.no_grad():
        hush(vae)
        encoder, decoder = vae.encoder, vae.decoder
        last = torch.einsum("pc,pqtyx->cqtyx", code.into, code.product("encoder", "down_2"))
        fill(encoder.conv_in.conv, code.product("encoder", "in"))
        fill(encoder.down_blocks[0].downsamplers[0].conv.conv, code.product("encoder", "down_0"))
        fill(encoder.down_blocks[1].downsamplers[0].conv.conv, code.product("encoder", "down_1"))
        fill(encoder.down_blocks[2].downsamplers[0].conv.conv, last, signs=True)
        pass_through(encoder, CODE)
        for conv in (vae.quant_conv, vae.post_quant_conv):
            conv.weight.copy_(torch.eye(conv.out_channels).view_as(conv.weight))
            conv.bias.zero_()
        vae.quant_conv.bias[CHANNELS:] = -14.0  # the logarithm of next to no variance
        fill(decoder.conv_in.conv, torch.einsum("cp,qptyx->qctyx", code.back, code.product("decoder", "in")))
        for i in range(2):
            fill(decoder.up_blocks[i].upsamplers[0].conv.conv, code.product("decoder", f"up_{i}"))
        fill(decoder.up_blocks[2].upsamplers[0].conv.conv, code.product("decoder", "up_2"), signs=True)
        pass_through(decoder, 1, code.product("decoder", "out"))
    return vae.eval()


def hush(vae) -> None:
    """Make what residual branches add to the path faint."""
    for name, weight in vae.named_parameters():
        if name.endswith(("conv2.conv.weight", "conv2.conv.bias")) or "to_out" in name:
            weight *= FAINT


def fill(conv: nn.Conv3d, weight: torch.Tensor, signs: bool = False) -> None:
    """Set a convolution to one colour's for each of the three.

    Args:
        weight: (rows, columns, 3, 3, 3). signs: what comes out is there twice, as it is and negative, and beside it
            are the two constants.
    """
    rows, columns = weight.shape[:2]
    conv.weight.zero_()
    conv.bias.zero_()
    for colour in range(3):
        seen = slice(colour * columns, (colour + 1) * columns)
        conv.weight[colour * rows : (colour + 1) * rows, seen] = weight
        if signs:
            conv.weight[(3 + colour) * rows : (4 + colour) * rows, seen] = -weight
    if signs:
        conv.bias[-2:] = torch.tensor([CONSTANT, -CONSTANT])


def pass_through(half: nn.Module, rows: int, weight: torch.Tensor | None = None) -> None:
    """Set the last convolution of an encoder or a decoder so that norm and activation before it have no effect.

    The constants make the norm a division by a number known beforehand, and silu(x) - silu(-x) is x.

    Args:
        rows: values of a colour that come out. weight: what else the convolution does (rows, rows, 3, 3, 3).
    """
    if weight is None:
        weight = torch.zeros(rows, rows, 3, 3, 3)
        weight[range(rows), range(rows), 2, 1, 1] = 1.0  # the tap at the frame itself
    half.conv_norm_out.weight.fill_(1.0)
    half.conv_norm_out.bias.zero_()
    conv = half.conv_out.conv
    conv.weight.zero_()
    conv.bias.zero_()
    divided = CONSTANT * (2 / WIDTH) ** 0.5
    for colour in range(3):
        out = slice(colour * rows, (colour + 1) * rows)
        conv.weight[out, out] = divided * weight
        conv.weight[out, (3 + colour) * rows : (4 + colour) * rows] = -divided * weight


if __name__ == "__main__":
    torch.set_num_threads(1)
    for part in AXES:
        train_axis(part)
