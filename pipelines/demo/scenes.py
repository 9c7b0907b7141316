"""The world that the demo models were trained on: one shape on a plain ground, as words and as read back from frames.

:func:`scene_of` needs no network: the clip's border is the ground, other pixels the shape, whose moments tell the rest.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product

import torch

from ...compat.device.execution import to_host

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (222, 45, 45),
    "green": (40, 165, 75),
    "blue": (50, 90, 220),
    "yellow": (242, 208, 50),
    "white": (245, 245, 245),
    "black": (18, 18, 18),
}
SHAPES = ("circle", "square", "triangle")
MOTIONS: dict[str, str] = {
    "left": "moves left",
    "right": "moves right",
    "up": "moves up",
    "down": "moves down",
    "still": "stays still",
    "grow": "grows",
    "shrink": "shrinks",
    "spin": "spins",
}
RADIUS = {"circle": 14.2, "square": 12.2, "triangle": 9.5}  # of the inner circle, in pixels of 64
TRAVEL = (15.0, 19.0)  # such pixels from the first frame to the last
GROWTH = (0.6, 1.25)  # of the radius
FEWEST_PIXELS = 30  # below it there is no shape
MOVED_PIXELS, GROWN, TURNED = 6.0, 1.6, math.radians(20)  # between the first frames and the last
OFF_COLOUR, EDGES = 0.35, 0.1  # how far a pixel is from both colours; the share of these, where the colours mix
CORNERS = 0.15  # the least harmonic of a shape with corners: 0.34 for a triangle, 0.33 for a square, 0.0 for a circle


@dataclass(frozen=True, slots=True)
class Scene:
    """Contents of a clip, each an empty word where nothing can be named."""

    shape: str
    colour: str
    motion: str
    ground: str

    @property
    def caption(self) -> str:
        return f"a {self.colour} {self.shape} {MOTIONS[self.motion]} on {self.ground}"


EXAMPLE = Scene("circle", "red", "left", "blue")


def scenes() -> list[Scene]:
    """Every scene; a circle that spins looks like one that does not."""
    return [
        Scene(shape, colour, motion, ground)
        for shape, motion, colour, ground in product(SHAPES, MOTIONS, COLOURS, COLOURS)
        if ground != colour and (shape, motion) != ("circle", "spin")
    ]


def first_frame(scene: Scene) -> torch.Tensor:
    """The picture (1, 64, 64, 3) in 0..1 that a clip of this scene begins with; its motion is about the centre."""
    palette = {name: torch.tensor(rgb) / 255 for name, rgb in COLOURS.items()}
    half = sum(TRAVEL) / 4  # of the mean travel
    starts = {"left": (half, 0), "right": (-half, 0), "up": (0, half), "down": (0, -half)}
    across, down = starts.get(scene.motion, (0, 0))
    low, high = GROWTH
    radius = RADIUS[scene.shape] * {"grow": low, "shrink": high}.get(scene.motion, 1.0)
    steps = torch.arange(64) + 0.5 - 32
    distance = MEASURES[scene.shape](*torch.broadcast_tensors(steps[None, :] - across, steps[:, None] - down))
    mask = (radius - distance + 0.5).clamp(0, 1)[..., None]
    return (palette[scene.ground] + (palette[scene.colour] - palette[scene.ground]) * mask)[None]


# The radius of the inner circle of the shape whose edge goes through (u, v); v points down.
MEASURES: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "circle": torch.hypot,
    "square": lambda u, v: torch.maximum(u.abs(), v.abs()),
    "triangle": lambda u, v: torch.maximum(v, math.sqrt(3) / 2 * u.abs() - 0.5 * v),
}


def scene_in(prompt: str) -> Scene | None:
    """The scene that a prompt asks for; None if it is not in the words of :attr:`Scene.caption`."""
    motions = {phrase: name for name, phrase in MOTIONS.items()}
    pattern = rf"an? ({'|'.join(COLOURS)}) ({'|'.join(SHAPES)}) ({'|'.join(motions)}) on ({'|'.join(COLOURS)})"
    match = re.fullmatch(pattern, " ".join(prompt.lower().split()).rstrip("."))
    return Scene(match[2], match[1], motions[match[3]], match[4]) if match else None


def unknown_words(prompt: str) -> list[str]:
    """The words of a prompt that no caption has, each once, in their order."""
    known = {"a", "an", "on", *COLOURS, *SHAPES, *" ".join(MOTIONS.values()).split()}
    words = re.findall(r"\w+(?:[-'\u2019]\w+)*", prompt.lower())
    return [word for word in dict.fromkeys(words) if word not in known]


def scene_in_picture(picture: torch.Tensor) -> Scene | None:
    """The still scene in the first of pictures (F, H, W, 3), 0..1; None if it is no shape of one colour on another."""
    if picture.ndim != 4 or picture.shape[-1] != 3 or 0 in picture.shape:
        return None
    small = torch.nn.functional.interpolate(to_host(picture[:1].detach()).float().movedim(-1, 1), (64, 64), mode="area")
    frame = small.movedim(1, -1)
    scene = scene_of(frame)
    if not scene.shape:
        return None
    pure = torch.tensor([COLOURS[scene.ground], COLOURS[scene.colour]]) / 255
    off = torch.cdist(frame.reshape(-1, 3), pure).amin(1)
    return scene if float((off > OFF_COLOUR).float().mean()) < EDGES else None


def scene_of(frames: torch.Tensor) -> Scene:
    """The contents of a clip (F, H, W, 3) in 0..1, at any size; no shape or motion if one frame shows too little."""
    names = list(COLOURS)
    palette = torch.tensor(list(COLOURS.values())) / 255
    nearest = torch.cdist(frames.float().reshape(-1, 3), palette).argmin(-1).view(frames.shape[:3])
    sides = nearest[:, 0], nearest[:, -1], nearest[..., 0], nearest[..., -1]
    ground = int(torch.cat([side.flatten() for side in sides]).bincount(minlength=len(names)).argmax())
    counts = nearest.flatten().bincount(minlength=len(names))
    counts[ground] = 0
    colour = int(counts.argmax())
    axis = palette[colour] - palette[ground]
    mask = ((frames.float() - palette[ground]) @ axis / axis.square().sum()).clamp(0, 1)
    mask = torch.where(mask > 0.3, mask, 0.0)  # faint traces far from the shape would weigh on its moments
    mask = torch.nn.functional.interpolate(mask[:, None], (64, 64), mode="area")[:, 0]
    areas = mask.sum((1, 2))
    if float(areas.min()) < FEWEST_PIXELS:
        return Scene("", names[colour] if int(counts[colour]) else "", "", names[ground])
    shape, centres, angles = _moments(mask, areas)
    return Scene(shape, names[colour], _motion(centres, areas, angles), names[ground])


def _moments(mask: torch.Tensor, areas: torch.Tensor) -> tuple[str, torch.Tensor, torch.Tensor]:
    """The shape, its centre (F, 2) as x and y in 64ths of the frame, and its turn since the first (F,) in radians."""
    steps = torch.arange(mask.shape[1], dtype=torch.float32)
    x, y = (mask.sum(1) @ steps / areas), (mask.sum(2) @ steps / areas)
    places = torch.complex(steps[None, None, :] - x[:, None, None], y[:, None, None] - steps[None, :, None])
    folds = {}
    for name, fold in (("triangle", 3), ("square", 4)):
        folds[name] = (mask * places**fold).sum((1, 2)) / (mask * places.abs() ** fold).sum((1, 2)), fold
    strengths = {name: float(moment.abs().median()) for name, (moment, _) in folds.items()}
    shape = max(strengths, key=strengths.__getitem__)
    moment, fold = folds[shape]
    if strengths[shape] < CORNERS:
        return "circle", torch.stack([x, y], -1), torch.zeros_like(x)
    steps_turned = (moment[1:] * moment[:-1].conj()).angle() / fold
    return shape, torch.stack([x, y], -1), torch.cat([torch.zeros(1), steps_turned.cumsum(0)])


def _motion(centres: torch.Tensor, areas: torch.Tensor, angles: torch.Tensor) -> str:
    """The key in :data:`MOTIONS` of the change between first and last two frames: travel, else growth, else turn."""
    x, y = (centres[-2:].mean(0) - centres[:2].mean(0)).tolist()
    if max(abs(x), abs(y)) > MOVED_PIXELS:
        return ("right" if x > 0 else "left") if abs(x) > abs(y) else ("down" if y > 0 else "up")
    grown = float(areas[-2:].mean() / areas[:2].mean())
    if not 1 / GROWN < grown < GROWN:
        return "grow" if grown > 1 else "shrink"
    return "spin" if abs(float(angles[-2:].mean() - angles[:2].mean())) > TURNED else "still"
