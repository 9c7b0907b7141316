"""Trained weights as the demo models ship them: int8 or fp8 with a scale per row, zeros left out.

``python training/packing.py write`` packs the bf16 weights of the commit that had them; ``check`` compares the result
with the files here.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from anygpu.compat.checkpoints.headers import MASK, SPARSE
from anygpu.paint.choices import MODELS as PAINT
from anygpu.pipelines.demo import MODELS
from paint_narrowing import narrowed
from safetensors.torch import load, save
from torch import Tensor

ROOT, DENSE = Path(__file__).resolve().parents[1], "3d157f53"  # the last commit with weights in bf16
SMALL = 1024  # elements up to which a tensor stays as it is
CLIPS = [step / 40 for step in range(22, 41)]  # shares of a row's largest value that the grid may end at
GRIDS = (7, 15, 31, 63, 127)  # the largest integer in a row
NEVER, FP8 = "(?!)", 0.0
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Recipe:
    """How the weights of one part are packed.

    Args:
        noise: the most that rounding may add to a matrix, as a share of its typical value. The coarsest grid that adds
            less makes the smallest zip; a matrix that no grid suits stays as it is. 0 for fp8.
        fine: names of matrices that get the finest grid, whatever rounding adds.
        exact: names of tensors whose values stay, as those of a VAE that carries a known code.
        unused: names of matrices that nothing reads, or that were trained to add nothing. One small element stays,
            since a matrix of zeros is refused.
    """

    noise: float = 0.03
    fine: str = NEVER
    exact: str = NEVER
    unused: str = NEVER


DUAL = r"unet_dual\.(time_embedding|.*time_emb_proj|.*conv_norm_out|conv_out)"  # the reference is seen at time 0 only
RECIPES: dict[str, Recipe] = {
    "hunyuan3d_paint/unet": Recipe(0.06, fine="time_emb|class_emb", unused=DUAL),
    "hunyuan3d_paint/vae": Recipe(exact=""),
    "ltx/text_encoder": Recipe(),
    "ltx/transformer": Recipe(),
    "ltx/vae": Recipe(0.05, fine=r"encoder\."),
    "mochi/text_encoder": Recipe(),
    "mochi/transformer": Recipe(),
    "mochi/vae": Recipe(exact="", unused=r"\.resnets\."),
    "hunyuan_video/text_encoder": Recipe(unused=r"layers\.[12]\."),
    "hunyuan_video/text_encoder_2": Recipe(),
    "hunyuan_video/transformer": Recipe(0.015),
    "hunyuan_video/vae": Recipe(exact="", unused=r"\.(resnets|attentions)\."),
    "hunyuan_video_15/text_encoder": Recipe(unused=r"layers\.[12]\."),
    "hunyuan_video_15/text_encoder_2": Recipe(noise=FP8),
    "hunyuan_video_15/transformer": Recipe(
        noise=FP8, exact=r"context_embedder_2\.", unused=r"blocks\.2\.(ff_context|attn\.(to_add_out|add_q_proj))"
    ),
    "hunyuan_video_15/vae": Recipe(
        exact="", unused=r"(?<!decoder\.mid_block)\.resnets\.|mid_block\.resnets\.1|attentions"
    ),
    "framepack/transformer": Recipe(fine=r"proj_[24]x"),
    "framepack/image_encoder": Recipe(unused=r"head\."),
}


def packed(tensors: Mapping[str, Tensor], recipe: Recipe) -> bytes:
    """The file of a part."""
    stored: Tensors = {}
    sparse: dict[str, list[int]] = {}
    for name, tensor in tensors.items():
        matrix = tensor.ndim > 1 and tensor.numel() > SMALL
        if matrix and re.search(recipe.unused, name):
            small = float(tensor.float().abs().mean())
            tensor = torch.zeros_like(tensor)
            tensor.view(-1)[0] = small
        if matrix and name.endswith(".weight") and not re.search(recipe.exact, name):
            layer = name.removesuffix(".weight")
            found = rounded(tensor.float(), recipe.noise, forced=bool(re.search(recipe.fine, name)))
            if found is not None:
                tensor, stored[f"{layer}.weight_scale"] = found
                note = json.dumps({"format": "int8_tensorwise" if recipe.noise else "float8_e4m3fn"}).encode()
                stored[f"{layer}.comfy_quant"] = torch.tensor(list(note), dtype=torch.uint8)
        size, there = tensor.element_size(), (tensor.float() != 0).flatten()
        if matrix and int((~there).sum()) * size > len(there) / 6:  # more than the mask takes
            sparse[name] = list(tensor.shape)
            stored[name + MASK] = bitmap(there)
            raw = tensor.contiguous().view(torch.uint8).view(-1, size)
            tensor = raw[there].contiguous().view(tensor.dtype).flatten()
        stored[name] = tensor.contiguous()
    notes = {"format": "pt", SPARSE: json.dumps(sparse)} if sparse else {"format": "pt"}
    return save(stored, notes)


def rounded(values: Tensor, noise: float, forced: bool = False) -> tuple[Tensor, Tensor] | None:
    """``values`` in one byte each, and the scale of each row (rows, 1); None where no grid adds less than ``noise``.

    Args:
        forced: takes the finest grid, whatever it adds.
    """
    rows = values.flatten(1)
    peak = rows.abs().amax(1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    if not noise:
        return (rows / (peak / 448.0)).to(torch.float8_e4m3fn).view(values.shape), peak / 448.0
    typical = float(rows[rows != 0].abs().median()) / 0.6745  # the deviation, if it were a normal distribution
    for most in GRIDS[-1:] if forced else GRIDS:
        scale = _best_scale(rows, peak, most)
        integers = (rows / scale).round().clamp(-most, most)
        if forced or float((integers * scale - rows).square().mean().sqrt()) <= noise * typical:
            return integers.to(torch.int8).view(values.shape), scale
    return None


def _best_scale(rows: Tensor, peak: Tensor, most: int) -> Tensor:
    """The scale of each row that leaves the least error; the largest values may be cut off for it."""
    best, scale = torch.full_like(peak, torch.inf), peak
    for share in CLIPS:
        tried = peak * share / most
        error = ((rows / tried).round().clamp(-most, most) * tried - rows).square().sum(1, keepdim=True)
        scale = torch.where(error < best, tried, scale)
        best = torch.minimum(error, best)
    return scale


def bitmap(there: Tensor) -> Tensor:
    """A bit for each value, the first of a byte lowest."""
    padded = torch.nn.functional.pad(there.to(torch.uint8), (0, -len(there) % 8)).view(-1, 8)
    return (padded << torch.arange(8, dtype=torch.uint8)).sum(1).to(torch.uint8)


def place(part: str) -> Path:
    """The file of a part, such as ``ltx/vae``."""
    model, name = part.split("/")
    stem = "model" if "encoder" in name else "diffusion_pytorch_model"
    root = PAINT if (PAINT / model).is_dir() else MODELS
    return root / part / f"{stem}.safetensors"


def dense(part: str) -> Tensors:
    """The weights of a part as they were trained, in bf16."""
    file = place(part).relative_to(ROOT).as_posix()
    content = subprocess.run(["git", "show", f"{DENSE}:{file}"], cwd=ROOT, capture_output=True, check=True).stdout
    return load(content)


def prepared(part: str, tensors: Tensors) -> Tensors:
    """``tensors``; paint's without what the architecture makes wide and the training did not."""
    return narrowed(tensors) if part == "hunyuan3d_paint/unet" else tensors


if __name__ == "__main__":
    torch.set_num_threads(1)
    wrong = []
    for part in sys.argv[2:] or RECIPES:
        content = packed(prepared(part, dense(part)), RECIPES[part])
        if sys.argv[1] == "write":
            place(part).write_bytes(content)
        elif place(part).read_bytes() != content:
            wrong.append(part)
    print(f"other than packed from {DENSE}: {', '.join(wrong) or 'none'}")
    sys.exit(bool(wrong))
