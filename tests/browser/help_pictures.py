"""The pictures of the help pages in ``web/docs``: those of texturing are drawn here, the others are screenshots.

``python help_pictures.py`` draws; ``make pictures`` also takes the screenshots, in a real ComfyUI.
"""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from anygpu.paint.baking.bake import BakeSettings, bake
from anygpu.paint.baking.fill import filled
from anygpu.paint.geometry.cameras import DEFAULT_VIEWS
from anygpu.paint.geometry.mesh import Mesh, Surface
from anygpu.paint.geometry.turntable import turntable
from anygpu.paint.geometry.views import rendered_maps
from paint.synthetic import photographs
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))

from paint.shapes import box

HELP = Path(__file__).resolve().parents[2] / "web" / "docs"
PAPER, INK = "#1b1d21", "#e8e8e8"  # as in the memory plan
TILE, EDGE, LABEL, ACROSS, TEXELS = 176, 8, 22, 3, 512
WIDEST, QUALITY = 900, 82  # pixels; of WebP
NAMES = ("front", "right", "back", "left", "top", "bottom")
PARTS = (  # width, height, depth; then where its middle is: a dog, so that no two sides look alike
    ((0.42, 0.36, 0.80), (0.0, 0.0, 0.0)),
    ((0.34, 0.32, 0.34), (0.0, 0.26, 0.46)),
    ((0.18, 0.14, 0.18), (0.0, 0.20, 0.70)),
    ((0.12, 0.30, 0.12), (0.13, -0.32, 0.30)),
    ((0.12, 0.30, 0.12), (-0.13, -0.32, 0.30)),
    ((0.12, 0.30, 0.12), (0.13, -0.32, -0.30)),
    ((0.12, 0.30, 0.12), (-0.13, -0.32, -0.30)),
    ((0.08, 0.30, 0.08), (0.0, 0.26, -0.42)),
    ((0.08, 0.14, 0.06), (0.12, 0.48, 0.44)),
)


def dog() -> Mesh:
    """Nine boxes, each with a ninth of the texture."""
    vertices, faces, uvs, count = [], [], [], 0
    for number, (size, place) in enumerate(PARTS):
        part = box(*size)
        assert part.uvs is not None
        corner = torch.tensor((number % ACROSS, number // ACROSS), dtype=torch.float32)
        vertices.append(part.vertices + torch.tensor(place))
        faces.append(part.faces + count)
        uvs.append((part.uvs + corner) / ACROSS)
        count += len(part.vertices)
    return Mesh(torch.cat(vertices), torch.cat(faces), torch.cat(uvs))


def fur(places: Tensor) -> Tensor:
    """Colours (P, 3) of ``places`` (P, 3) in the frame: stripes from nose to tail, lighter below."""
    along, height = places[:, 2:], places[:, 1:2]
    stripe = 0.5 + 0.5 * (26.0 * along + 6.0 * places[:, :1]).sin()
    colour = places.new_tensor((0.85, 0.55, 0.25)) * (1 - stripe) + places.new_tensor((0.35, 0.20, 0.15)) * stripe
    return (colour + 0.45 * (-0.1 - height).clamp(0, 0.5)).clamp(0, 1)


def sheet(pictures: Iterable[Tensor], labels: Sequence[str] = (), across: int = ACROSS) -> Image.Image:
    """Pictures (H, W, 3) in rows of ``across``, with a line of text below each."""
    shown = [as_picture(picture).resize((TILE, TILE), Image.Resampling.LANCZOS) for picture in pictures]
    below = LABEL if labels else 0
    rows = -(-len(shown) // across)
    size = EDGE + across * (TILE + EDGE), EDGE + rows * (TILE + below + EDGE)
    drawn = Image.new("RGB", size, PAPER)
    pen, font = ImageDraw.Draw(drawn), ImageFont.load_default(14)
    for number, picture in enumerate(shown):
        left, top = EDGE + number % across * (TILE + EDGE), EDGE + number // across * (TILE + below + EDGE)
        drawn.paste(picture, (left, top))
        if labels:
            pen.text((left + TILE // 2, top + TILE + 3), labels[number], fill=INK, font=font, anchor="ma")
    return drawn


def as_picture(pixels: Tensor) -> Image.Image:
    """A picture of ``pixels`` (H, W, 3) in 0..1."""
    return Image.fromarray((pixels.clamp(0, 1) * 255).round().byte().numpy())


def drawings() -> dict[str, Image.Image]:
    """Path below ``web/docs`` without its ending, and the picture."""
    surface = Surface.of(dog())
    seen = photographs(surface, size=2 * TILE, view_size=1024, colouring=fur)
    baked = bake(surface, DEFAULT_VIEWS, seen, BakeSettings(texture_size=TEXELS, view_size=1024))
    texture = filled(baked, surface)
    turned = turntable(surface, texture, frames=6, size=2 * TILE, elevation=20.0)
    maps = rendered_maps(surface, size=512)
    placed = [
        f"{name}: {camera.azimuth:g}, {camera.elevation:g}" for name, camera in zip(NAMES, DEFAULT_VIEWS, strict=True)
    ]
    front, side = seen[0], seen[1]
    told = ("two of the six views", "", "texture", "the mesh with it")
    return {
        "AnyGPUPaintCameras/views": sheet(seen, placed),
        "AnyGPURenderViews/maps": sheet((*maps.normal[:4], *maps.position[:4]), across=4),
        "AnyGPUBakeTexture/baked": sheet((front, side, texture, turned[1]), told, across=4),
        "AnyGPURenderTurntable/turn": sheet(turned, across=6),
    }


def written(folder: Path = HELP) -> list[Path]:
    """The files: drawings, and every PNG that lies among the help pages, made smaller and turned into WebP."""
    made = []
    for name, picture in drawings().items():
        made.append(saved(picture, folder / f"{name}.webp"))
    for png in sorted(folder.rglob("*.png")):
        with Image.open(png) as shot:
            made.append(saved(shot.convert("RGB"), png.with_suffix(".webp")))
        png.unlink()
    return made


def saved(picture: Image.Image, path: Path) -> Path:
    """``path``, after writing the picture there, at most as wide as the help can show."""
    if picture.width > WIDEST:
        height = round(picture.height * WIDEST / picture.width)
        picture = picture.resize((WIDEST, height), Image.Resampling.LANCZOS)
    picture.save(path, quality=QUALITY, method=6)
    return path


if __name__ == "__main__":
    for path in written():
        print(path.relative_to(HELP), path.stat().st_size)
