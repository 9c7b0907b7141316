"""The code that a small VAE is taught: functions of space and time for each of red, green and blue.

A latent of LTX-Video stands for 32 x 32 pixels of 8 frames, one of Mochi for 8 x 8 of 6; of the first one for a single
frame, which their causal encoders repeat. The functions are the constant and the principal components of shapes in such
blocks. Because the code is known beforehand, encoder, decoder and transformer are each made on their own.
"""

from __future__ import annotations

import functools

import torch
from anygpu.pipelines.demo.scenes import scenes
from world import FRAMES, draw

WHITENING = 0.5  # 0 keeps the components' own sizes, 1 makes all alike; between, fine ones are neither lost nor loud


class Code:
    """Clips to latents, linearly; the same on every call with the same world.

    Args:
        side: pixels of a block down and across. length: its frames. functions: values of a block, of one colour.
        channels: of a latent; those that three colours leave are zero. frames: of the clips.
    """

    def __init__(self, side: int, length: int, functions: int, channels: int, frames: int = FRAMES) -> None:
        self.side, self.length, self.channels = side, length, channels
        generator = torch.Generator().manual_seed(1)
        self.functions = block_functions(side, length, functions, frames).flatten(1).T
        self.scale = torch.ones(functions)
        every = scenes()
        sample = [every[i] for i in torch.randint(len(every), (1024,), generator=generator)]
        plain = self(draw(sample, generator, frames=frames))[:, : 3 * functions].unflatten(1, (3, functions))
        spread = plain.std((0, 1, 3, 4, 5))
        self.scale = spread**-WHITENING
        coded = self(draw(sample, generator, frames=frames))
        self.scale = self.scale / coded[:, : 3 * functions].std((0, 2, 3, 4)).square().mean().sqrt()
        self.mean = self(draw(sample, generator, frames=frames)).mean((0, 2, 3, 4))

    def __call__(self, clips: torch.Tensor) -> torch.Tensor:
        """Latents (B, channels, T, H / side, W / side) of clips (B, 3, F, H, W)."""
        values = self.channel(clips.flatten(0, 1)).unflatten(0, (len(clips), 3)).flatten(1, 2)
        empty = values.new_zeros(len(values), self.channels - values.shape[1], *values.shape[2:])
        return torch.cat([values, empty], 1)

    def channel(self, frames: torch.Tensor) -> torch.Tensor:
        """The code (B, functions, T, H / side, W / side) of one of the three colours, frames (B, F, H, W)."""
        _, count, height, width = frames.shape
        grid = (count - 1) // self.length + 1, height // self.side, width // self.side
        values = _blocks(frames, self.side, self.length) @ self.functions * self.scale
        return values.transpose(1, 2).unflatten(2, grid)


def block_functions(side: int, length: int, rank: int, frames: int = FRAMES) -> torch.Tensor:
    """Orthonormal functions (rank, length, side, side): the constant, then the components of shapes in such blocks."""
    masks, state = _masks(frames)
    generator = torch.Generator()
    generator.set_state(state)
    pixels = length * side**2
    blocks = _blocks(masks, side, length).reshape(-1, pixels)
    blocks = blocks[blocks.amax(1) - blocks.amin(1) > 0]
    blocks = blocks[torch.randperm(len(blocks), generator=generator)[:6000]]
    blocks = blocks - blocks.mean(1, keepdim=True)
    torch.manual_seed(1)  # of the random projection in svd_lowrank
    components = torch.svd_lowrank(blocks, q=min(rank + 22, pixels), niter=4)[2][:, : rank - 1]
    return torch.cat([torch.full((pixels, 1), pixels**-0.5), components], 1).T.unflatten(1, (length, side, side))


@functools.cache
def _masks(frames: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Shapes (N, F, H, W), and the state of the generator that placed them."""
    generator = torch.Generator().manual_seed(1)
    chosen = [scene for scene in scenes() if (scene.colour, scene.ground) == ("white", "black")]
    masks = torch.cat([draw(chosen, generator, frames=frames)[:, 0] for _ in range(48)])
    return masks, generator.get_state()


def _blocks(frames: torch.Tensor, side: int, length: int) -> torch.Tensor:
    """Blocks (B, N, length * side * side) of one channel's frames (B, F, H, W), the first frame repeated."""
    padded = torch.cat([frames[:, :1].expand(-1, length - 1, -1, -1), frames], 1)
    parts = padded.unflatten(3, (-1, side)).unflatten(2, (-1, side)).unflatten(1, (-1, length))
    return parts.permute(0, 1, 3, 5, 2, 4, 6).flatten(4).flatten(1, 3)
