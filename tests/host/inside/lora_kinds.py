"""Scenes that hold what a LoRA file multiplies a weight with against core's own classes."""

from pathlib import Path

import torch
from anygpu.pipelines.files.lora_keys import matched
from anygpu.pipelines.registry import FAMILIES
from comfy.lora import calculate_weight, load_lora
from comfy.weight_adapter.boft import BOFTAdapter
from comfy.weight_adapter.glora import GLoRAAdapter
from comfy.weight_adapter.oft import OFTAdapter
from torch import Tensor

LAYER, ROWS, COLUMNS, RANK = "transformer_blocks.0.attn.to_q", 16, 12, 3


def files() -> dict[str, dict[str, Tensor]]:
    """The tensors of one layer by kind of file."""
    torch.manual_seed(0)
    a1, a2, b1, b2 = (
        torch.randn(*size) * 0.3 for size in ((COLUMNS, RANK), (RANK, COLUMNS), (ROWS, RANK), (RANK, COLUMNS))
    )
    newer = {"a1.weight": a1, "a2.weight": a2, "b1.weight": b1, "b2.weight": b2}
    older = {"a1.weight": a2, "a2.weight": a1, "b1.weight": b2, "b2.weight": b1}
    return {
        "OFT": {"oft_blocks": torch.randn(4, 4, 4)},
        "OFT with a limit": {"oft_blocks": torch.randn(4, 4, 4), "alpha": torch.tensor(0.5)},
        # Core 0.33 leaves a BOFT without alpha out, with an error in its log.
        "BOFT": {
            "oft_blocks": torch.randn(3, 4, 4, 4),
            "rescale": torch.rand(ROWS, 1) + 0.5,
            "alpha": torch.tensor(0.0),
        },
        "GLoRA": {**newer, "alpha": torch.tensor(6.0)},
        "GLoRA of older files": {**older, "alpha": torch.tensor(6.0)},
    }


def against_core() -> dict[str, float]:
    """The largest difference of a changed weight from core's, by kind, at strength 1."""
    weight, found = torch.randn(ROWS, COLUMNS), {}
    for kind, group in files().items():
        tensors = {f"{LAYER}.{name}": tensor for name, tensor in group.items()}
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        (pair,) = matched(Path("a"), shapes, {LAYER: (ROWS, COLUMNS)}, FAMILIES["hunyuan_video"]).pairs.values()
        scale = float(group["alpha"]) / pair.rank if pair.rank and "alpha" in group else 1.0
        ours = weight + scale * pair.product(tensors, weight, pair.delta(tensors))
        alpha = float(group["alpha"]) if "alpha" in group else None
        adapters = (cls.load(LAYER, tensors, alpha, None) for cls in (OFTAdapter, BOFTAdapter, GLoRAAdapter))
        (adapter,) = (each for each in adapters if each is not None)
        core = adapter.calculate_weight(weight.clone(), LAYER, 1.0, 1.0, None, lambda change: change)
        found[kind] = float((ours - core).abs().max())
        assert float((core - weight).abs().max()) > 0.1, f"core changed nothing for {kind}"
    return found


def norms_against_core() -> dict[str, float]:
    """The largest difference of a norm's weight and bias from core's, by the names of the tensors, at strength 0.5."""
    norm, found = "transformer_blocks.0.norm", {}
    for ends in (("w_norm", "b_norm"), ("diff", "diff_b")):
        tensors = {f"{norm}.{end}": torch.randn(ROWS) for end in ends}
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        (pair,) = matched(Path("a"), shapes, {norm: (ROWS,)}, FAMILIES["hunyuan_video"]).pairs.values()
        delta, own = pair.delta(tensors), {"weight": torch.randn(ROWS), "bias": torch.randn(ROWS)}
        added = {"weight": pair.product(tensors, own["weight"], delta), "bias": delta.bias}
        patches = load_lora(tensors, {norm: f"{norm}.weight"})
        for part, end in zip(own, ends, strict=True):
            patch = [(0.5, patches[f"{norm}.{part}"], 1.0, None, None)]
            core = calculate_weight(patch, own[part].clone(), part)
            found[end] = float((core - own[part] - 0.5 * added[part]).abs().max())
    return found
