"""Materials of mesh files: their maps and factors, by glTF's names."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

TEXTURE_PIXELS, PER_PIXEL = 64 * 1024**2, 64  # bytes that packing takes of each: measured with trimesh 5.2
MAPS = ("baseColor", "metallicRoughness", "emissive", "normal", "occlusion")
FACTORS = ("baseColorFactor", "metallicFactor", "roughnessFactor", "emissiveFactor")
TEXTURES = ("image", *(f"{name}Texture" for name in MAPS))


def with_small_textures(scene: Any, spare: int) -> bool:
    """True once the textures of ``scene`` are small blank pictures, which they become where they are very large.

    Where several materials become one, trimesh decodes them all to pack them, and each node has its own copy: a file of
    100 kB can take gigabytes.

    Args:
        spare: bytes that they may take.
    """
    from PIL import Image

    named = [
        (shape, geometry.visual.material, name, picture)
        for shape, geometry in scene.geometry.items()
        for name in TEXTURES
        if hasattr(picture := getattr(getattr(geometry.visual, "material", None), name, None), "size")
    ]
    nodes = scene.graph.geometry_nodes if named else {}
    pixels = sum(len(nodes.get(shape, ())) * picture.size[0] * picture.size[1] for shape, _, _, picture in named)
    share = (min(TEXTURE_PIXELS, max(spare, 0) / PER_PIXEL) / max(pixels, 1)) ** 0.5
    blank: dict[int, Any] = {}  # of another colour each: trimesh takes equal materials for one
    for _, material, name, picture in named if share < 1 else ():
        size = tuple(max(1, round(side * share)) for side in picture.size)
        blank.setdefault(id(picture), Image.new("RGB", size, len(blank) % 2**24))
        setattr(material, name, blank[id(picture)])
    return bool(blank)


def material_of(scene: Any, mesh: Any) -> tuple[dict[str, Tensor], dict[str, Any], list[str]]:
    """Maps and factors of the one material that ``mesh`` has from those of ``scene``, and a line about what is lost.

    A damaged picture is left out: the shape is what matters.
    """
    given = [getattr(geometry.visual, "material", None) for geometry in scene.geometry.values()]
    material = getattr(getattr(mesh, "visual", None), "material", None)
    factors = {}
    for name in FACTORS:
        value = getattr(material, name, None)
        if value is not None:  # trimesh has the base colour's in eight bits
            scale = 255 if name == "baseColorFactor" else 1
            factors[name] = [float(each) / scale for each in value] if hasattr(value, "__len__") else float(value)
    material = material.to_pbr() if hasattr(material, "to_pbr") else material
    maps, lost = {}, []
    for name in MAPS:
        picture = getattr(material, f"{name}Texture", None)
        try:
            if picture is not None:
                values = torch.frombuffer(bytearray(picture.convert("RGB").tobytes()), dtype=torch.uint8)
                maps[name] = values.view(picture.height, picture.width, 3).float() / 255
            elif any(getattr(each, f"{name}Texture", None) is not None for each in given):
                lost.append(name)
        except Exception:  # each picture's reader raises its own kinds
            lost.append(name)
    left = "textures that are damaged, or that several materials cannot share, are left out"
    return maps, factors, [f"{left}: {', '.join(lost)}"] if lost else []
