"""What can be chosen for painting: names and numbers that nodes show from the start, without the code behind them."""

from __future__ import annotations

from pathlib import Path

from ..compat.decision import AUTO

KINDS = ("paint", "paint_pbr", "delight")
VARIANTS = (AUTO, "v2-0", "turbo")
STORED_AS = (AUTO, "bin", "safetensors")
SCHEDULERS = (AUTO, "euler_ancestral", "euler", "lcm", "unipc")
SPACINGS = (AUTO, "trailing", "leading", "linspace", "karras")
NORMALS = (AUTO, "smooth", "flat")
BAKES = ("gather", "scatter")
FILLS = (AUTO, "pull_push", "opencv")
MESH_FILES = (".glb", ".gltf", ".obj", ".ply", ".stl")
FLOATERS = 0.005  # of all faces, as the published cleaning of generated meshes
ORTHO_SCALE = 1.2  # width of the picture in units of the frame
VIEWS = (  # azimuth and elevation in degrees, and how much a view counts, as published
    (0, 0, 1.0),
    (90, 0, 0.1),
    (180, 0, 0.5),
    (270, 0, 0.1),
    (0, 90, 0.05),
    (180, -90, 0.05),
)
CACHE_LIMIT = 64  # graphs of one kind of block: a UNet has about 20 residual blocks of different sizes
PAGES = {
    "paint": "tencent/Hunyuan3D-2, hunyuan3d-paint-v2-0 or hunyuan3d-paint-v2-0-turbo",
    "paint_pbr": "tencent/Hunyuan3D-2.1, hunyuan3d-paintpbr-v2-1",
    "delight": "tencent/Hunyuan3D-2, hunyuan3d-delight-v2-0",
}


def is_paint_folder(folder: Path) -> bool:
    """Whether a folder looks like a paint or delight checkpoint, by its names alone."""
    return (folder / "unet").is_dir() and (folder / "vae").is_dir() and "hunyuan3d" in folder.name.lower()
