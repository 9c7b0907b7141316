"""Weights packed by comfy-kitchen as published files have them, and what each is worth by its own dequantisation."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from anygpu.compat.checkpoints.unpacking import largest_group
from safetensors.torch import save_file
from torch import Tensor

ck: Any = pytest.importorskip("comfy_kitchen.tensor")
INT8, ROTATED = {"format": "int8_tensorwise"}, {"per_channel": True, "convrot": True}
WAYS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # layout, arguments, what the file says
    "int8": ("TensorWiseINT8Layout", {}, INT8),
    "int8 rows": ("TensorWiseINT8Layout", {"per_channel": True}, INT8),
    "int8 convrot": ("TensorWiseINT8Layout", ROTATED, {**INT8, "params": {"convrot": True}}),
    "w4a4": ("TensorCoreConvRotW4A4Layout", {}, {"format": "convrot_w4a4"}),
    "w4a8": ("AsymW4A8Int8Layout", {}, {"format": "asym_w4a8_int8"}),
    "w4a8 corrected": ("AsymW4A8Int8Layout", {"symmetric": False}, {"format": "asym_w4a8_int8"}),
    "nvfp4": ("TensorCoreNVFP4Layout", {}, {"format": "nvfp4"}),
    "mxfp8": ("TensorCoreMXFP8Layout", {}, {"format": "mxfp8"}),
    "fp8": ("TensorCoreFP8Layout", {}, {"format": "float8_e4m3fn"}),
    "awq": ("TensorCoreAWQW4A16Layout", {}, {"format": "awq_w4a16"}),
    "quanto": ("TensorWiseINT8Layout", {"per_channel": True}, {}),
}
SMOOTHED = (" smoothed", "fp8", "nvfp4")  # with a scale of ModelOpt's for each column
ALL = (*WAYS, *(way + SMOOTHED[0] for way in SMOOTHED[1:]))


def packed_as(way: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """What a file has of ``weight`` by what follows the layer's name, and the values in fp32."""
    way, smooth = way.removesuffix(SMOOTHED[0]), way.endswith(SMOOTHED[0])
    layout, arguments, about = WAYS[way]
    cls, group = getattr(ck, layout), largest_group(weight.shape[1])
    if way == "awq":
        make = torch.Generator().manual_seed(0)
        stored = torch.randint(-128, 128, (weight.shape[0], weight.shape[1] // 2), generator=make).to(torch.int8)
        scale, zeros = (torch.rand(weight.shape[1] // 32, weight.shape[0], generator=make) / 99 for _ in range(2))
        params = cls.Params(scale=scale.bfloat16(), zeros=zeros.bfloat16(), group_size=32, orig_dtype=torch.float32,
                            orig_shape=tuple(weight.shape))  # fmt: skip
        found = {"": stored, "_scale": params.scale, "_zeros": params.zeros}
    else:
        if "convrot" in way or "w4a" in way:
            arguments, about = {**arguments, "convrot_groupsize": group}, {**about, "convrot_groupsize": group}
        stored, params = cls.quantize(weight, **arguments)
        found = cls.state_dict_tensors(stored, params)
    worth = cls.dequantize(stored, params).float()
    if way == "quanto":
        return {".weight._data": found[""], ".weight._scale": found["_scale"], ".output_scale": torch.ones(())}, worth
    tensors = {f".weight{end}": tensor.contiguous() for end, tensor in found.items()}
    if smooth:
        scale = torch.linspace(0.5, 2.0, weight.shape[1])
        tensors[".pre_quant_scale"], worth = scale, worth * scale
    return {**tensors, ".comfy_quant": torch.tensor(list(json.dumps(about).encode()), dtype=torch.uint8)}, worth


def file_as(path: Path, tensors: Mapping[str, Tensor], way: str) -> dict[str, Tensor]:
    """A file of ``tensors`` with its matrices packed; returns what they are worth."""
    stored, worth = {}, dict(tensors)
    for name, tensor in tensors.items():
        wide = tensor.ndim == 2 and not tensor.shape[0] % 32 and not tensor.shape[1] % (64 if way == "w4a4" else 32)
        if wide and name.endswith(".weight"):
            found, worth[name] = packed_as(way, tensor.float())
            stored |= {name.removesuffix(".weight") + end: one for end, one in found.items()}
        else:
            stored[name] = tensor
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, path)
    return worth
