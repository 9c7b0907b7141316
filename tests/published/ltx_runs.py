"""The runs that `ltx_reference.py` records of Lightricks' loop, and the test repeats: recipes on tiny weights."""

from dataclasses import dataclass

import torch
from anygpu.pipelines.family import GuidanceStep

SIDE, FRAMES, FPS, SEED, TOKENS, WIDTH = 64, 25, 25.0, 11, 9, 32
GRID = (4, 2, 2)


@dataclass(frozen=True)
class Case:
    """One pass: what a recipe says of it, for a transformer of two blocks."""

    steps: int
    guidance: tuple[GuidanceStep, ...]
    schedule: str = "linear-quadratic"
    timesteps: tuple[float, ...] | None = None
    skip_first: int = 0
    skip_last: int = 0
    star: bool = False
    stochastic: bool = False


NONE = (GuidanceStep(),)
# The levels and factors of the published recipes; blocks and numbers of steps are those of a tiny model.
LISTS = (
    GuidanceStep(1.0),
    GuidanceStep(0.996, blocks=(0, 1)),
    GuidanceStep(0.9933, cfg=6.0, stg=4.0, rescale=0.5, blocks=(1,)),
    GuidanceStep(0.985, cfg=8.0, stg=4.0, rescale=0.5, blocks=(0,)),
    GuidanceStep(0.9767, cfg=6.0, stg=4.0, blocks=(0,)),
    GuidanceStep(0.9008, stg=2.0, blocks=(0,)),
    GuidanceStep(0.618, stg=1.0, blocks=(0,)),
)
CASES = {
    "2B dev": Case(6, (GuidanceStep(0.0, 3.0, 1.0, 0.7, (1,)),)),
    "2B dev of 0.9.0": Case(5, (GuidanceStep(0.0, 3.0, 1.0, 0.7, (1,)),), "shifted"),
    "13B dev": Case(12, LISTS, skip_last=2, star=True),
    "13B dev, second pass": Case(8, (GuidanceStep(0.0, 1.0, 1.0, 0.0, (1,)),), skip_first=5, star=True),
    "distilled": Case(0, NONE, timesteps=(1.0, 0.9937, 0.9875, 0.9812, 0.975, 0.9094, 0.725)),
    "distilled, second pass": Case(0, NONE, timesteps=(0.9094, 0.725, 0.4219)),
    "distilled 0.9.6": Case(8, NONE, stochastic=True),
}


def text() -> dict[str, torch.Tensor]:
    """Embeddings (2, N, D) and masks (2, N): the negative prompt, then the prompt."""
    embeds = torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    return {"prompt_embeds": embeds, "prompt_attention_mask": torch.ones(2, TOKENS)}


def start() -> torch.Tensor:
    """Latents (1, 128, T, H, W) that a second pass starts from."""
    return torch.randn(1, 128, *GRID, generator=torch.Generator().manual_seed(2))


def upscaled() -> torch.Tensor:
    """Latents of twice the size, with another spread."""
    drawn = torch.randn(1, 128, GRID[0], 2 * GRID[1], 2 * GRID[2], generator=torch.Generator().manual_seed(3))
    return 3.0 * drawn + 0.5
