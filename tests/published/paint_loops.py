"""What the whole loops of Hunyuan3D paint and our untouched nodes share: mesh, picture, sizes, tiny checkpoints.

`paint_reference.py` runs the publisher's loops, `tests/paint/test_whole_loops.py` ours.
"""

from pathlib import Path

import numpy as np
import torch
from paint.rendered import TORUS
from tiny.weights import randomise

from paint import stored

VIEW, RENDERED, TEXTURE = 64, 512, 256  # pixels of a view, of a rendered map, of a side of the texture
EMPTY = (49406, 49407)  # the tokens of an empty prompt; the rest is the padding of Stable Diffusion 2, 0


def mesh() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Vertices, faces and UVs, whose v goes upwards, of a torus."""
    torus = np.load(TORUS / "mesh.npz")
    return torus["vertices"], torus["faces"], torus["uvs"]


def picture() -> torch.Tensor:
    """A cut out picture (90, 120, 4) in 0..1 of 8 bits: an ellipse with soft edges, away from the middle."""
    from published import loops

    colours = loops.picture(120, 90)[0]
    rows, columns = torch.meshgrid(torch.arange(90.0), torch.arange(120.0), indexing="ij")
    far = (((rows - 40) / 31) ** 2 + ((columns - 66) / 44) ** 2).sqrt()
    alpha = ((1.1 - far) * 5).clamp(0, 1)
    return torch.cat((colours, (alpha * 255).round()[..., None] / 255), dim=-1)


def enlarged(views: torch.Tensor) -> torch.Tensor:
    """Views (V, H, W, 3) in 0..1 at the size of the maps, for RealESRGAN, and sharper."""
    size = {"size": (RENDERED, RENDERED), "mode": "bicubic", "align_corners": False}
    large = torch.nn.functional.interpolate(views.movedim(-1, 1), **size)
    blurred = torch.nn.functional.avg_pool2d(large, 5, 1, 2, count_include_pad=False)
    return (2 * large - blurred).clamp(0, 1).movedim(1, -1)


def checkpoint(kind: str, folder: Path) -> Path:
    """A tiny checkpoint as published, with the ``.bin`` that the publisher reads where there are two."""
    return stored.checkpoint(kind, folder, suffix=".safetensors" if kind == "delight" else ".bin")


def delight(folder: Path) -> Path:
    """The tiny checkpoint of delight, with a text encoder."""
    from transformers import CLIPTextConfig, CLIPTextModel

    made = checkpoint("delight", folder)
    config = CLIPTextConfig(
        vocab_size=49408, hidden_size=64, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        projection_dim=8,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        encoder = CLIPTextModel(config).eval()
    randomise(encoder, 5)
    encoder.save_pretrained(made / "text_encoder")
    return made


def dino(folder: Path) -> Path:
    """A tiny DINOv2 of the width of the giant one."""
    from transformers import Dinov2Config, Dinov2Model

    config = Dinov2Config(
        hidden_size=1536, num_hidden_layers=1, num_attention_heads=24, mlp_ratio=1, image_size=518, patch_size=14
    )
    with torch.random.fork_rng(devices=[]):
        encoder = Dinov2Model(config).eval()
    randomise(encoder, 6)
    encoder.save_pretrained(folder / "dinov2")
    return folder / "dinov2"


def square() -> torch.Tensor:
    """The picture (90, 90, 4) for PBR, which squeezes others."""
    return picture()[:, 22:112].contiguous()
