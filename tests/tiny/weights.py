"""Random weights under which a signal keeps its size, so that a tiny model's output depends on all of its inputs."""

import math
from collections.abc import Mapping

import torch
from torch import nn

# Where a weight is not a matrix, a bias or the scale of a norm: standard deviation by the last part of its name.
SPREAD: Mapping[str, float] = {"scale_shift_table": 0.2, "pos_frequencies": 0.05, "class_embedding": 1.0, "probe": 1.0}
NORM_SCALES = ("weight", "gamma")

# The statistics of LTX-Video's latents, spread over one unit from here.
LOWEST: Mapping[str, float] = {"latents_mean": -0.5, "latents_std": 0.5}

# Attention that picks: without it ten tokens of text drown in the average of hundreds of image tokens.
QUERY_KEY_NORMS = ("norm_q", "norm_k", "norm_added_q", "norm_added_k")
QUERY_KEY_SCALE = 2.0

# Where a matrix keeps the size of its input times this, by a part of its name.
GAIN: Mapping[str, float] = {
    "attn.add_v_proj": 4.0,  # each word moves the picture
    "decoder.conv_out": 0.6,  # pixels mostly inside -1..1
    "decoder.proj_out": 0.15,  # Mochi's decoder has no norm before its last layer
}

# These read sines and cosines, the fast ones first. A trained model is smooth in time and guidance; one that hears the
# fast ones is not, and bf16, which cannot tell a guidance of 6000 from 6010, would give another video than fp32.
TIME_EMBEDDERS = ("timestep_embedder", "guidance_embedder")


def randomise(module: nn.Module, seed: int) -> None:
    """Fill the weights so that a signal keeps its size from input to output, the same for the same ``seed``.

    The classes' own initial values start several modulations and projections at zero, so that text, time and image
    would not reach the output at all.

    Args:
        seed: 0 to 2**64 - 1; the global random state is neither read nor moved.
    """
    generator = torch.Generator().manual_seed(seed)
    tables = {id(child.weight) for child in module.modules() if isinstance(child, nn.Embedding)}
    with torch.no_grad():
        for name, weight in module.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if id(weight) in tables:
                weight.copy_(noise)
            elif weight.ndim:  # a lone number is a constant of the model
                weight.copy_(_weight(name, noise))
        for name, buffer in module.named_buffers():
            if name in LOWEST:
                buffer.copy_(LOWEST[name] + torch.rand(buffer.shape, generator=generator))


def _weight(name: str, noise: torch.Tensor) -> torch.Tensor:
    """The value of the parameter ``name``, made of standard normal ``noise`` of its shape."""
    *path, leaf = name.split(".")
    if leaf in SPREAD:
        return noise * SPREAD[leaf]
    if leaf.endswith("bias"):
        return noise * 0.1
    if leaf in NORM_SCALES and noise[0].numel() == 1:
        return (1 + noise * 0.1) * (QUERY_KEY_SCALE if path and path[-1] in QUERY_KEY_NORMS else 1.0)
    if path[-1:] == ["linear_1"] and path[-2] in TIME_EMBEDDERS:
        column, columns = torch.arange(noise.shape[1]), noise.shape[1]
        noise = noise.masked_fill(column % (columns // 2) < columns // 4, 0.0)
    gain = math.prod(factor for part, factor in GAIN.items() if part in name)
    return noise * gain / math.sqrt(noise[0].numel())
