"""The published code's rendering and baking of one torus, from tests/fixtures/paint/render."""

from functools import cache
from pathlib import Path

import numpy as np
import torch
from anygpu.paint.geometry.mesh import Mesh, Surface
from PIL import Image

TORUS = Path(__file__).resolve().parent.parent / "fixtures" / "paint" / "render" / "torus"
SIZE = 256  # of the pictures and of the texture


@cache
def surface() -> Surface:
    """The torus; its file counts v upwards."""
    stored = np.load(TORUS / "mesh.npz")
    uvs = torch.tensor(stored["uvs"])
    uvs = torch.stack((uvs[:, 0], 1 - uvs[:, 1]), dim=1)
    return Surface.of(Mesh(torch.tensor(stored["vertices"]), torch.tensor(stored["faces"]), uvs))


@cache
def arrays(name: str) -> dict[str, torch.Tensor]:
    stored = np.load(TORUS / f"{name}.npz")
    return {
        key: torch.tensor(stored[key].astype(np.float32) if stored[key].dtype == np.float16 else stored[key])
        for key in stored.files
    }


@cache
def picture(name: str) -> torch.Tensor:
    """(H, W, 3) in 0..1."""
    return torch.tensor(np.array(Image.open(TORUS / f"{name}.png"))[..., :3]).float() / 255


def pictures(name: str) -> torch.Tensor:
    return torch.stack([picture(f"{name}_{index}") for index in range(6)])
