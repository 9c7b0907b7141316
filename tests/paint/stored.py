"""Checkpoints with the fixtures' weights, on disk as published and in memory."""

import json
import lzma
import shutil
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load, load_file, save_file

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures" / "paint"
NAMES = {"paint": "paint_v2_0", "paint_pbr": "paintpbr_v2_1", "delight": "delight_v2_0"}
FOLDERS = {"paint": "hunyuan3d-paint-v2-0", "paint_pbr": "hunyuan3d-paintpbr-v2-1", "delight": "hunyuan3d-delight-v2-0"}
GRID = 64


def any_text(tokens: int = 7) -> Any:
    """Delighting with states of its own for the empty prompt: the fixtures have no text encoder."""
    states = torch.ones(1, tokens, 64)
    return mock.patch("anygpu.paint.sampling.delight.encoded_prompt", lambda *_: states)


def config(kind: str) -> dict[str, Any]:
    return json.loads((FIXTURES / NAMES[kind] / "unet_config.json").read_text(encoding="utf-8"))


def values(kind: str, name: str) -> dict[str, torch.Tensor]:
    file = FIXTURES / NAMES[kind] / f"{name}.safetensors"
    return load_file(file) if file.exists() else load(lzma.decompress(Path(f"{file}.xz").read_bytes()))


def weights(kind: str, part: str = "unet") -> dict[str, torch.Tensor]:
    """fp32 tensors by published name, not to be changed in place; the DINO projection, which none holds, is random."""
    return dict(_weights(kind, part))


@cache
def _weights(kind: str, part: str) -> dict[str, torch.Tensor]:
    folder = FIXTURES / NAMES["paint" if part == "vae" else kind]  # one VAE for all
    found: dict[str, torch.Tensor] = {}
    for file in sorted([*folder.glob(f"{part}.xz"), *folder.glob(f"{part}_?.xz")]):
        found |= {name: tensor.float() / GRID for name, tensor in load(lzma.decompress(file.read_bytes())).items()}
    if (kind, part) == ("paint_pbr", "unet"):
        generator = torch.Generator().manual_seed(0)
        prefix = "unet.image_proj_model_dino"
        found[f"{prefix}.proj.weight"] = torch.randn(4096, 1536, generator=generator).div_(40).half().float()
        found[f"{prefix}.proj.bias"] = torch.zeros(4096)
        found[f"{prefix}.norm.weight"], found[f"{prefix}.norm.bias"] = torch.ones(1024), torch.zeros(1024)
    return found


def checkpoint(kind: str, root: Path, name: str | None = None, suffix: str = ".safetensors") -> Path:
    """A folder as published."""
    folder = root / (name or FOLDERS[kind])
    for part in ("unet", "vae"):
        source = FIXTURES / NAMES["paint" if (kind, part) == ("paint_pbr", "vae") else kind]
        (folder / part).mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / f"{part}_config.json", folder / part / "config.json")
    save_file(weights(kind, "vae"), folder / "vae" / "diffusion_pytorch_model.safetensors")
    store(weights(kind), folder / "unet" / f"diffusion_pytorch_model{suffix}")
    return folder


def store(tensors: dict[str, torch.Tensor], path: Path) -> None:
    tensors = {name: tensor.half() for name, tensor in tensors.items()}
    path.unlink(missing_ok=True)  # it may be a link to another checkpoint's file
    if path.suffix == ".bin":
        torch.save(tensors, path)
    else:
        save_file(tensors, path)
