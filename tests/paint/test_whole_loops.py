"""Whole loops of paint, from a picture and a mesh to views and texture: untouched nodes beside the publisher's code.

``published/paint_reference.py`` ran that code; here the stages run with every input at its default, but for sizes.
"""

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from anygpu.compat.memory.parts import Silent
from anygpu.paint.baking.bake import BakeSettings
from anygpu.paint.geometry.cameras import CameraTable
from anygpu.paint.geometry.mesh import Mesh
from anygpu.paint.loading import PaintRequest, load_paint
from anygpu.paint.sampling.delight import DelightSettings, delight_images
from anygpu.paint.sampling.painting import PaintSettings
from anygpu.paint.texturing import OneStep, Texture, texture_of, textured
from PIL import Image
from published import compared, loops, paint_loops
from safetensors.torch import load_file


def mesh() -> Mesh:
    vertices, faces, uvs = map(torch.tensor, paint_loops.mesh())
    return Mesh(vertices, faces, torch.stack((uvs[:, 0], 1 - uvs[:, 1]), dim=1))


def delight(folder: Path) -> dict[str, torch.Tensor]:
    """What AnyGPU Delight makes."""
    pipeline = load_paint(PaintRequest(paint_loops.delight(folder), device="cpu", precision="fp32"))
    return {"": delight_images(pipeline, [paint_loops.picture()], DelightSettings(), recenter=True, progress=Silent())}


def paint(variant: str) -> Callable[[Path], dict[str, torch.Tensor]]:
    """What AnyGPU Texture Mesh makes."""

    def run(folder: Path) -> dict[str, torch.Tensor]:
        made = paint_loops.checkpoint("paint", folder)
        pipeline = load_paint(PaintRequest(made, variant=variant, device="cpu", precision="fp32"))
        evener = load_paint(PaintRequest(paint_loops.delight(folder), device="cpu", precision="fp32"))
        sizes = BakeSettings(paint_loops.TEXTURE, paint_loops.RENDERED)
        settings = OneStep(PaintSettings(size=paint_loops.VIEW), sizes)
        texture, painted, cameras = textured(mesh(), [paint_loops.picture()], pipeline, evener, settings)
        views = [Image.fromarray((view * 255).round().byte().numpy()) for view in painted.views]
        large = [np.array(view.resize((paint_loops.RENDERED,) * 2)) for view in views]
        exact = exactly(replace(sizes, form="scatter"), cameras, torch.from_numpy(np.stack(large)) / 255)
        return {"": painted.views, " texture": both(texture), " texture exact": exact}

    return run


def pbr(folder: Path) -> dict[str, torch.Tensor]:
    """What AnyGPU Texture Mesh makes with the PBR model, and what AnyGPU Bake Texture of its views enlarged."""
    encoder = paint_loops.dino(folder)
    made = paint_loops.checkpoint("paint_pbr", folder)
    pipeline = load_paint(PaintRequest(made, image_encoder=encoder, device="cpu", precision="fp32"))
    settings = OneStep(PaintSettings(size=paint_loops.VIEW), BakeSettings(paint_loops.TEXTURE, paint_loops.RENDERED))
    _, painted, cameras = textured(mesh(), [paint_loops.square()], pipeline, settings=settings)
    views = (painted.views, painted.metallic_roughness)
    ours = texture_of(mesh(), cameras, *map(paint_loops.enlarged, views), settings.texture)
    exact = exactly(settings.texture, cameras, *(in_8_bits(paint_loops.enlarged(in_8_bits(each))) for each in views))
    return {"": torch.cat(views), " texture": both(ours), " texture exact": exact}


def in_8_bits(pictures: torch.Tensor) -> torch.Tensor:
    return (pictures * 255).round() / 255


def exactly(settings: BakeSettings, cameras: CameraTable, *views: torch.Tensor) -> torch.Tensor:
    """The textures of ``views`` in 8 bits, as upstream bakes; NaN where it fills by OpenCV, and that is not here."""
    here = find_spec("cv2") is not None
    given = views if len(views) == 2 else (*views, None)
    texture = texture_of(mesh(), cameras, *given, replace(settings, exact=True, fill="opencv" if here else "auto"))
    found = (both(texture) * 255).floor() / 255
    if not here:
        found[:, ~texture.painted] = torch.nan
    return found


def both(texture: Texture) -> torch.Tensor:
    """(2, T, T, 3): colours, then metal and roughness; not their blue, which upstream paints and leaves out."""
    if texture.metallic is None:
        return texture.colour[None]
    metal = torch.stack((texture.metallic, texture.roughness, torch.full_like(texture.metallic, torch.nan)), dim=-1)
    return torch.stack((texture.colour, metal))


OURS: dict[str, Callable[[Path], dict[str, torch.Tensor]]] = {
    "paint v2-0": paint("v2-0"),
    "paint turbo": paint("turbo"),
    "paint pbr": pbr,
    "paint delight": delight,
}


@pytest.mark.full
@pytest.mark.parametrize("name", OURS)
def test_untouched_nodes_make_the_publishers_pictures(tmp_path: Path, name: str) -> None:
    made = OURS[name](tmp_path)
    error = loops.error(made.pop(""), load_file(loops.fixture(name)))
    assert error <= loops.BAR
    assert error <= 2 * compared.PAINT_LOOPS[name], "the page says less"
    for end, pictures in made.items():  # baked in another way, on purpose, unless it is exact
        kept = load_file(loops.fixture(name + end.removesuffix(" exact")))
        ours = pictures.flatten()[:: int(kept["step"])].double()
        mean = float((ours - kept["pixels"] / loops.LEVELS).abs().nanmean())
        print(f"{name}{end}: {mean:.1e}")
        assert mean <= 1.1 * compared.PAINT_BAKED[name + end], "the page says less"


def test_each_loop_of_the_page_is_run() -> None:
    assert OURS.keys() == compared.PAINT_LOOPS.keys()
