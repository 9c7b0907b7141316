"""Trained weights as the demo models ship them: int8 or fp8 with a scale per row, zeros left out.

The model runs first, so that rounding is least where its inputs are largest. Exports end with it; ``python
training/packing.py ltx/vae`` packs again what the last commit with weights in bf16 had.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from anygpu.compat.checkpoints.headers import MASK, SPARSE
from anygpu.paint.choices import MODELS as PAINT
from anygpu.pipelines.demo import MODELS, drawing
from anygpu.pipelines.load.folder import load as load_pipeline
from anygpu.pipelines.requests import LoadRequest
from paint_narrowing import narrowed
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from scene_scores import chosen_scenes

ROOT, DENSE = Path(__file__).resolve().parents[1], "3d157f53"  # the last commit with weights in bf16
SMALL = 1024  # elements up to which a tensor stays as it is
LAYERS = (nn.Linear, nn.Conv2d, nn.Conv3d)
DAMPED = 0.01  # of the mean square of a layer's inputs, added to each of them
RUNS = 3  # clips that are drawn to see the inputs
NEVER, FP8, FINE = "(?!)", 0.0, 0.03
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Recipe:
    """How the weights of one part are packed.

    Args:
        noise: what rounding adds to a row whose inputs are known, as a share of its typical value, before later
            columns make up for it; the more, the smaller the zip. 0 for fp8.
        fine: names of matrices that get :data:`FINE`, as those do whose inputs are not known.
        exact: names of tensors whose values stay, as those of a VAE that carries a known code.
        unused: names of matrices that nothing reads, or that were trained to add nothing. One small element stays,
            since a matrix of zeros is refused.
    """

    noise: float = 0.05
    fine: str = NEVER
    exact: str = NEVER
    unused: str = NEVER


DUAL = r"unet_dual\.(time_embedding|.*time_emb_proj|.*conv_norm_out|conv_out)"  # the reference is seen at time 0 only
RECIPES: dict[str, Recipe] = {
    "hunyuan3d_paint/unet": Recipe(0.12, fine="time_emb|class_emb", unused=DUAL),
    "hunyuan3d_paint/vae": Recipe(exact=""),
    "mv_adapter/unet": Recipe(unused=r"attn2\.to_(q|k|v|out)"),
    "mv_adapter/adapter": Recipe(),
    "ltx/text_encoder": Recipe(0.09),
    "ltx/transformer": Recipe(),
    "ltx/vae": Recipe(0.03),
    "mochi/text_encoder": Recipe(),
    "mochi/transformer": Recipe(),
    "mochi/vae": Recipe(exact="", unused=r"\.resnets\."),
    "hunyuan_video/text_encoder": Recipe(unused=r"layers\.[12]\."),
    "hunyuan_video/text_encoder_2": Recipe(),
    "hunyuan_video/transformer": Recipe(),
    "hunyuan_video/vae": Recipe(exact="", unused=r"\.(resnets|attentions)\."),
    "hunyuan_video_15/text_encoder": Recipe(unused=r"layers\.[12]\."),
    "hunyuan_video_15/text_encoder_2": Recipe(noise=FP8),
    "hunyuan_video_15/transformer": Recipe(
        exact=r"context_embedder_2\.", unused=r"blocks\.2\.(ff_context|attn\.(to_add_out|add_q_proj))"
    ),
    "hunyuan_video_15/vae": Recipe(
        exact="", unused=r"(?<!decoder\.mid_block)\.resnets\.|mid_block\.resnets\.1|attentions"
    ),
    "framepack/transformer": Recipe(fine=r"proj_[24]x"),
    "framepack/image_encoder": Recipe(unused=r"head\."),
}


def packed(tensors: Mapping[str, Tensor], recipe: Recipe, inputs: Mapping[str, Tensor]) -> bytes:
    """The file of a part.

    Args:
        inputs: of layers by name, as from :func:`watched`.
    """
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
            noise = FINE if layer not in inputs or re.search(recipe.fine, name) else recipe.noise
            noise = noise if recipe.noise else FP8
            tensor, stored[f"{layer}.weight_scale"] = rounded(tensor.float(), noise, inputs.get(layer))
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


def rounded(values: Tensor, noise: float, square: Tensor | None) -> tuple[Tensor, Tensor]:
    """``values`` in one byte each, and the scale of each row (rows, 1).

    Args:
        square: (columns, columns), the mean product of the layer's inputs; None where they are not known.
    """
    rows = values.flatten(1)
    peak = rows.abs().amax(1, keepdim=True).clamp(min=torch.finfo(torch.bfloat16).tiny)
    if not noise:
        return (rows / (peak / 448.0)).to(torch.float8_e4m3fn).view(values.shape), peak / 448.0
    typical = rows.square().mean(1, keepdim=True).sqrt()
    step = noise * 12**0.5 * typical.clamp(min=float(typical.square().mean().sqrt()) / 4)
    scale = torch.maximum(step, peak / 126).bfloat16().float()
    integers = _compensated(rows, scale, square) if square is not None else (rows / scale).round()
    return integers.clamp(-127, 127).to(torch.int8).view(values.shape), scale.bfloat16()


def _compensated(rows: Tensor, scale: Tensor, square: Tensor) -> Tensor:
    """Integers whose products with typical inputs are right: each column makes up for the rounding of those before."""
    order = square.diagonal().argsort(descending=True)
    left, square = rows[:, order].double(), square[order][:, order].double()
    square += DAMPED * square.diagonal().mean() * torch.eye(len(square))
    upper = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(square)), upper=True)
    integers, steps = torch.empty_like(left), scale[:, 0].double()
    for column in range(left.shape[1]):
        integers[:, column] = (left[:, column] / steps).round()
        error = (left[:, column] - integers[:, column] * steps) / upper[column, column]
        left[:, column:] -= torch.outer(error, upper[column, column:])
    return integers[:, order.argsort()].float()


@contextmanager
def watched(parts: Mapping[str, nn.Module]) -> Iterator[dict[str, Tensor]]:
    """The mean product of the inputs of each layer, by part and name, once the block has run the parts."""
    names = {
        module: f"{part}/{name}"
        for part, whole in parts.items()
        for name, module in whole.named_modules()
        if isinstance(module, LAYERS)
    }
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}

    def _watch(module: nn.Module, given: tuple[Any, ...]) -> None:
        if module in names:
            rows, name = _columns(module, given[0].detach().float()), names[module]
            sums[name] = sums.get(name, torch.zeros(())) + rows.T @ rows
            counts[name] = counts.get(name, 0) + len(rows)

    handle = register_module_forward_pre_hook(_watch)
    try:
        yield sums
    finally:
        handle.remove()
        for name, count in counts.items():
            sums[name] /= count


def _columns(module: nn.Module, given: Tensor) -> Tensor:
    """What a layer multiplies its matrix with (samples, columns)."""
    if isinstance(module, nn.Linear):
        return given.flatten(0, -2)
    if module.padding != "valid":
        given = nn.functional.pad(given, [pad for pad in reversed(module.padding) for _ in range(2)])
    for axis, (size, stride) in enumerate(zip(module.kernel_size, module.stride, strict=True)):
        given = given.unfold(2 + axis, size, stride)
    axes = len(module.kernel_size)
    given = given.movedim(1, 1 + axes)  # the samples' axes, then channels, then the kernel's
    columns = given.flatten(1 + axes).flatten(0, axes)
    return columns[torch.linspace(0, len(columns) - 1, min(len(columns), 4096)).long()]


def bitmap(there: Tensor) -> Tensor:
    """A bit for each value, the first of a byte lowest."""
    padded = torch.nn.functional.pad(there.to(torch.uint8), (0, -len(there) % 8)).view(-1, 8)
    return (padded << torch.arange(8, dtype=torch.uint8)).sum(1).to(torch.uint8)


def place(part: str) -> Path:
    """The file of a part, such as ``ltx/vae``."""
    model, name = part.split("/")
    stem = "model" if "encoder" in name else "diffusion_pytorch_model"
    root = PAINT if (PAINT / model).is_dir() else MODELS
    if name == "adapter":
        return next((root / model).glob("*.safetensors"))
    return root / part / f"{stem}.safetensors"


def dense(part: str) -> Tensors:
    """The weights of a part as they were trained, in bf16."""
    file = place(part).relative_to(ROOT).as_posix()
    content = subprocess.run(["git", "show", f"{DENSE}:{file}"], cwd=ROOT, capture_output=True, check=True).stdout
    return load(content)


def inputs_of(model: str) -> dict[str, Tensor]:
    """The mean products of the inputs of every layer of a model that is here, by part and name, from a few results."""
    if (PAINT / model).is_dir():
        return import_module(model).inputs()  # type: ignore[no-any-return]
    pipeline = load_pipeline(LoadRequest(MODELS / model, precision="fp32", device="cpu"))
    names = [part.partition("/")[2] for part in RECIPES if part.startswith(f"{model}/")]
    with watched({f"{model}/{name}": pipeline.parts.read(name) for name in names}) as sums:
        for number, scene in enumerate(chosen_scenes(RUNS, seed=RUNS)):
            drawing.drawn(pipeline, scene.caption, seed=100 + number)
    return sums


def write(model: str, *parts: str) -> None:
    """Pack the weights of a model that was just exported, or of those ``parts`` as they were in :data:`DENSE`."""
    sums = inputs_of(model)
    for part in parts or [part for part in RECIPES if part.startswith(f"{model}/")]:
        tensors = dense(part) if parts else load(place(part).read_bytes())
        wide = narrowed(tensors) if part == "hunyuan3d_paint/unet" else tensors
        seen = {name: square for name, square in sums.items() if name.startswith(f"{part}/") and square.any()}
        inputs = {name.removeprefix(f"{part}/"): square for name, square in seen.items()}
        place(part).write_bytes(packed(wide, RECIPES[part], inputs))


if __name__ == "__main__":
    torch.set_num_threads(1)
    for part in sys.argv[1:]:
        write(part.partition("/")[0], part)
