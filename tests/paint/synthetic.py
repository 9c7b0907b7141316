"""Pictures of the demo's torus whose right texture is known: what tests measure errors against."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from anygpu.paint import demo
from anygpu.paint.baking.bake import Texels
from anygpu.paint.choices import DEMO_SIZE
from anygpu.paint.demo import ColourPair, halves
from anygpu.paint.demo import torus as torus
from anygpu.paint.geometry.cameras import DEFAULT_VIEWS, CameraTable
from anygpu.paint.geometry.mesh import Surface
from anygpu.paint.geometry.views import rasterised
from torch import Tensor

Colouring = Callable[[Tensor], Tensor]


def waves(places: Tensor) -> Tensor:
    """Colours (P, 3) in 0.05..0.95 of ``places`` (P, 3) in the frame: soft stripes of another direction per channel."""
    directions = places.new_tensor(((9.0, 4.0, 2.0), (-3.0, 8.0, 5.0), (4.0, -6.0, 8.0)))
    return 0.5 + 0.45 * (places @ directions.T + places.new_tensor((0.3, 1.1, 2.3))).sin()


def photographs(
    surface: Surface,
    table: CameraTable = DEFAULT_VIEWS,
    size: int = 512,
    view_size: int = 2048,
    colouring: Colouring = waves,
    background: float = 1.0,
) -> Tensor:
    """(V, size, size, 3): what each camera sees of the coloured surface, taken at ``view_size`` and made smaller."""
    pictures = []
    for camera in table:
        view = rasterised(surface, camera, view_size, table.ortho_scale)
        places = view.shown.interpolated(surface.vertices, surface.faces)
        picture = view.image(colouring(places), background)
        if size != view_size:
            smaller = F.interpolate(picture.movedim(-1, 0)[None], (size, size), mode="bilinear", antialias=True)
            picture = smaller[0].movedim(0, -1)
        pictures.append(picture)
    return torch.stack(pictures)


def in_two_colours(surface: Surface, pair: ColourPair, background: float = 1.0) -> Tensor:
    """What the six cameras see of a surface in one colour above and another below, (V, S, S, 3)."""
    return photographs(surface, DEFAULT_VIEWS, DEMO_SIZE, 2 * DEMO_SIZE, halves(pair), background)


def ideal_texture(texels: Texels, colouring: Colouring = waves) -> Tensor:
    """(T, T, 3): the colour that each covered texel should have; 0 elsewhere."""
    texture = torch.zeros((texels.size**2, 3), device=texels.place.device)
    texture[texels.shown.pixel] = colouring(texels.place)
    return texture.view(texels.size, texels.size, 3)


def errors(texture: Tensor, texels: Texels, chosen: Tensor, colouring: Colouring = waves) -> Tensor:
    """(P,): mean absolute error over the channels at each covered texel of ``chosen`` (T, T)."""
    return (texture - ideal_texture(texels, colouring)).abs().mean(-1)[chosen & texels.covered]


def views_in_two_colours(pipeline: Any, number: int, monkeypatch: Any, seen: Callable[..., Tensor]) -> None:
    """Assert that a demo paints the ring as ``seen`` in its own pair of colours, and not in another, in 6 steps."""
    for later in ("bake", "filled", "turntable"):  # the views alone are looked at
        monkeypatch.setattr(demo, later, lambda *_: None)
    inside = seen(((1.0,) * 3,) * 2, 0.0) > 0.99
    pairs = demo.PAIRS[number], demo.PAIRS[1 - number]
    views = demo.painted_ring(pipeline, pairs[0], frames=1, steps=6).views
    assert views.shape == (6, DEMO_SIZE, DEMO_SIZE, 3)
    own, others = ((views - seen(pair)).abs()[inside].mean() for pair in pairs)
    assert own < demo.CARRIED and others > demo.BY_CHANCE, (own, others)
