"""The small paint without what the published widths of its embeddings add.

Its text is learned once, so 77 of 1024 columns carry it; the reference is always seen at time 0; and the time's 1280
values follow one curve for each camera, which far fewer of them span.
"""

from __future__ import annotations

import math
import re

import torch
from anygpu.paint.geometry.cameras import DEFAULT_VIEWS, camera_ids
from anygpu.paint.networks.layers import FREQUENCY_BASE
from anygpu.paint.networks.multiview import REFERENCE_LABELS
from torch import Tensor
from torch.nn.functional import silu

EVERY = 8  # of a thousand times, those that are fitted to
OTHERS = 0.1  # how much a camera counts that was not trained
FEATURES, WIDTH = 96, 160  # of the first layer and of the embedding, the values that stay
RIDGE = 1e-6
TEXTS = {"unet.": "unet.learned_text_clip_gen", "unet_dual.": "unet.learned_text_clip_ref"}
Tensors = dict[str, Tensor]


def narrowed(tensors: Tensors) -> Tensors:
    """Both UNets with most columns of their text and time matrices zero, in the dtypes of ``tensors``."""
    wide = {name: tensor.double() for name, tensor in tensors.items()}
    for prefix, text in TEXTS.items():
        states = wide[text][0]
        for name in [name for name in wide if name.startswith(prefix) and re.search(r"attn2\.to_[kv]\.weight", name)]:
            product = wide[name] @ states.T
            wide[name] = torch.zeros_like(wide[name])
            wide[name][:, : len(states)] = product
        wide[text] = torch.eye(*states.shape, dtype=torch.float64)[None]
    _at_one_time(wide)
    _on_a_curve(wide)
    return {name: tensor.to(tensors[name].dtype) for name, tensor in wide.items()}


def _at_one_time(wide: Tensors) -> None:
    """The reference's time moves into biases."""
    times = "unet_dual.time_embedding.linear_"
    hidden = silu(
        _waves(torch.zeros(1), wide[f"{times}1.weight"].shape[1]) @ wide[f"{times}1.weight"].T + wide[f"{times}1.bias"]
    )
    time = silu(hidden @ wide[f"{times}2.weight"].T + wide[f"{times}2.bias"])[0]
    for name in [name for name in wide if name.startswith("unet_dual.") and name.endswith("time_emb_proj.weight")]:
        wide[name.replace("weight", "bias")] += wide[name] @ time
    for layer in "12":
        wide[f"{times}{layer}.bias"].zero_()


def _on_a_curve(wide: Tensors) -> None:
    """The main stream's time and camera, carried by few values."""
    first, second, labels = (
        f"unet.{name}.weight" for name in ("time_embedding.linear_1", "time_embedding.linear_2", "class_embedding")
    )
    times = torch.cat((torch.arange(0, 1000, EVERY), torch.tensor([999])))
    hidden = silu(_waves(times, wide[first].shape[1]) @ wide[first].T + wide[first.replace("weight", "bias")])
    embedded = hidden @ wide[second].T + wide[second.replace("weight", "bias")]
    cameras = wide[labels][REFERENCE_LABELS:]
    counts = torch.full((len(cameras),), OTHERS, dtype=torch.float64)
    counts[camera_ids(DEFAULT_VIEWS)] = 1.0
    counts = counts.repeat(len(times))[:, None]
    samples = silu(embedded[:, None] + cameras[None]).flatten(0, 1)
    here, kept = _spanning(hidden, FEATURES), _spanning(counts * samples, WIDTH)
    weight, bias = _fitted(hidden[:, here], embedded[:, kept], torch.ones(len(times), 1, dtype=torch.float64))
    given = hidden[:, here] @ weight.T + bias
    few = silu(given[:, None] + cameras[None, :, kept]).flatten(0, 1)
    for name in [name for name in wide if name.startswith("unet.") and name.endswith("time_emb_proj.weight")]:
        right = samples @ wide[name].T
        matrix, added = _fitted(few, right, counts)
        wide[name] = torch.zeros_like(wide[name])
        wide[name][:, kept] = matrix
        wide[name.replace("weight", "bias")] += added
    for name, rows in ((first, here), (second, kept)):
        for tensor in (wide[name], wide[name.replace("weight", "bias")]):
            tensor[[row for row in range(len(tensor)) if row not in set(rows.tolist())]] = 0
    wide[second].zero_()[kept[:, None], here] = weight
    wide[second.replace("weight", "bias")][kept] = bias
    wide[labels][:, [column for column in range(cameras.shape[1]) if column not in set(kept.tolist())]] = 0


def _waves(times: Tensor, width: int) -> Tensor:
    """Cosines and sines (T, width) of ``times``, as the network takes them."""
    half = width // 2
    angles = times.double()[:, None] * torch.exp(-math.log(FREQUENCY_BASE) / half * torch.arange(half).double())
    return torch.cat((angles.cos(), angles.sin()), 1)


def _spanning(samples: Tensor, count: int) -> Tensor:
    """The ``count`` columns of (S, N) that the others are closest to being sums of, found greedily."""
    left, picked = samples.clone(), []
    for _ in range(count):
        picked.append(int(left.square().sum(0).argmax()))
        unit = left[:, picked[-1]] / left[:, picked[-1]].norm()
        left -= torch.outer(unit, unit @ left)
        left[:, picked] = 0
    return torch.tensor(sorted(picked))


def _fitted(given: Tensor, right: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Weight and bias of the layer that makes (S, M) of (S, N) with the least error, samples weighted."""
    columns = counts * torch.cat((given, torch.ones(len(given), 1, dtype=given.dtype)), 1)
    square = columns.T @ columns
    square += RIDGE * square.diagonal().mean() * torch.eye(len(square), dtype=square.dtype)
    solved = torch.linalg.solve(square, columns.T @ (counts * right)).T
    return solved[:, :-1], solved[:, -1]
