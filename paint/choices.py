"""Choices for painting: names and numbers that nodes show from the start, without the code behind them."""

from __future__ import annotations

import functools
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ..compat.decision import AUTO

KINDS = ("paint", "paint_pbr", "delight")
IG2MV, TG2MV = "ig2mv", "tg2mv"  # variants of MV-Adapter: after a picture, after words alone
VARIANTS = (AUTO, "v2-0", "turbo")
ADAPTER_VARIANTS = (AUTO, IG2MV, TG2MV)
PROMPT, NEGATIVE = "high quality", "watermark, ugly, deformed, noisy, blurry, low contrast"  # as published
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
    (0, 0, 1.0), (90, 0, 0.1), (180, 0, 0.5), (270, 0, 0.1), (0, 90, 0.05), (180, -90, 0.05),
)  # fmt: skip
PLACES = {"front": 0.0, "back": 180.0, "left": 270.0, "right": 90.0}  # azimuths that look at +Z, -Z, -X, +X
CACHE_LIMIT = 64  # graphs of one kind of block: a UNet has about 20 residual blocks of different sizes
MODELS = Path(__file__).resolve().parent / "models"  # that ship with the pack
DEMOS = (MODELS, MODELS.parents[1] / "pipelines" / "demo" / "models")  # of models that may share parts
DEMO_ADAPTER = MODELS / "mv_adapter"
DEMO_SIZE = 128  # pixels of a demo model's view
PBR = "hunyuan3d-paintpbr-v2-1"
STANDS_IN_FOR = ("hunyuan3d-paint-v2-0", "hunyuan3d-paint-v2-0-turbo", PBR, "hunyuan3d-delight-v2-0")
GAMMA = 2.2  # of a texture against linear factors and colours of vertices, as core has it
GREY, WHITE = 127 / 255, 1.0  # grounds of reference pictures
PAGES = {
    "paint": "tencent/Hunyuan3D-2, hunyuan3d-paint-v2-0 or hunyuan3d-paint-v2-0-turbo",
    "paint_pbr": f"tencent/Hunyuan3D-2.1, {PBR}",
    "delight": "tencent/Hunyuan3D-2, hunyuan3d-delight-v2-0",
}


@dataclass(frozen=True, slots=True)
class PublishedSampler:
    """The sampler that the publisher of a variant runs; the guidance of 1 is none."""

    scheduler: str
    steps: int
    guidance: float
    background: float  # of the reference picture
    spacing: str = "trailing"
    style: int = 0  # pixels of the reference picture before it gets the size of a view, for DINO to see; 0 without DINO


PUBLISHED = {
    "v2-0": PublishedSampler("euler_ancestral", 30, 2.0, GREY),
    "turbo": PublishedSampler("lcm", 10, 1.0, GREY),
    "v2-1": PublishedSampler("unipc", 15, 3.0, WHITE, style=512),
    IG2MV: PublishedSampler("euler", 50, 3.0, 0.5, spacing="leading"),
    TG2MV: PublishedSampler("euler", 50, 7.0, 0.5, spacing="leading"),
}
DEMO_SAMPLER = replace(PUBLISHED[IG2MV], steps=20, guidance=1.0)  # of the small MV-Adapter
DELIGHT_STEPS = 50
SHIFT = 8.0  # of the noise table of MV-Adapter: six views of one object keep more of it through the same noise
TAUGHT_SIZES = {"sdxl": 768, "sd21": 512}  # pixels of a view, by the base


@functools.cache
def demo_paint_models() -> dict[str, Path]:
    """The demo models that ship with the pack, choice to folder, such as ``demo: Hunyuan3D paint (7 MB)``; or empty."""
    named = {}
    with suppress(OSError):  # nodes list their choices even where a demo cannot be read
        for folder in sorted(filter(is_paint_folder, MODELS.iterdir())):
            size = sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
            named[f"demo: Hunyuan3D {folder.name.partition('_')[2]} ({round(size / 1e6)} MB)"] = folder
    return named


@functools.cache
def demo_adapter() -> tuple[dict[str, Path], dict[str, Path]]:
    """The demo's base for MV-Adapter, and its adapter, each choice to path; both empty where no demo ships."""
    files = list(DEMO_ADAPTER.rglob("*.safetensors"))
    size = sum(file.stat().st_size for file in files)
    own = {f"demo: {IG2MV}": file for file in files if IG2MV in file.name}
    return {f"demo: MV-Adapter ({round(size / 1e6)} MB)": DEMO_ADAPTER} if own else {}, own


def sampler_of(variant: str, demo: bool) -> PublishedSampler:
    """The sampler that the publisher of a variant runs, or that a model which ships with the pack was made for."""
    return DEMO_SAMPLER if demo and variant == IG2MV else PUBLISHED[variant]


def is_demo(source: Path) -> bool:
    """True if a pipeline was read from a model that ships with the pack, by whichever name or path."""
    return MODELS in source.resolve().parents


def is_paint_folder(folder: Path) -> bool:
    """True if a folder looks like a paint or delight checkpoint, by its names alone."""
    return (folder / "unet").is_dir() and (folder / "vae").is_dir() and "hunyuan3d" in folder.name.lower()
