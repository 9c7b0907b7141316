"""FramePack's demo model with pictures of one's own: plain shapes that an image editor draws, at their sizes, places,
edges and colours. Of ``--count`` clips, how many show what the prompt asks for, and how far the first frame is from the
picture. ``python tests/runs/own_pictures.py --count 100 --seed 1``"""

from __future__ import annotations

import argparse
import math
import random
from pathlib import Path

import torch
from anygpu.pipelines import stages
from anygpu.pipelines.base import FramePackSettings, ImageRequest, PromptRequest, SampleSettings, Silent
from anygpu.pipelines.demo import MODELS
from anygpu.pipelines.demo.drawing import save_sheet
from anygpu.pipelines.demo.scenes import Scene, scene_of, scenes
from anygpu.pipelines.demo.stand_in import FIT, one_section
from anygpu.pipelines.load.folder import load
from anygpu.pipelines.pipeline import Pipeline
from anygpu.pipelines.requests import LoadRequest
from PIL import Image, ImageDraw
from torch.nn import functional

# As people name them: the web's colours and what palettes of editors hold.
COLOURS = {
    "red": ["#ff0000", "#e53935", "#cc0000"],
    "green": ["#008000", "#00a000", "#2e9e4f"],
    "blue": ["#0000ff", "#1e50e0", "#3060d0"],
    "yellow": ["#ffff00", "#ffd700", "#f5d033"],
    "white": ["#ffffff", "#f4f4f4"],
    "black": ["#000000", "#202020"],
}
SIDES = (256, 400, 512, 640)
INNER = {"circle": 1.0, "square": 1.0, "triangle": 0.68}  # of the inner circle, so that areas are alike


def drawn(scene: Scene, dice: random.Random, room: float) -> Image.Image:
    """A picture for a clip of this scene, whose shape has ``room`` of a side more on that to which it moves."""
    side = dice.choice(SIDES)
    ground, colour = (dice.choice(COLOURS[name]) for name in (scene.ground, scene.colour))
    radius = (
        dice.uniform(0.15, 0.24) * side * {"grow": 0.62, "shrink": 1.25}.get(scene.motion, 1.0) * INNER[scene.shape]
    )
    start = {"left": (room, 0), "right": (-room, 0), "up": (0, room), "down": (0, -room)}.get(scene.motion, (0, 0))
    x, y = (side * (0.5 + along + dice.uniform(-0.05, 0.05)) for along in start)
    picture = Image.new("RGB", (side, side), ground)
    pen = ImageDraw.Draw(picture)
    if scene.shape == "circle":
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour)
    elif scene.shape == "square":
        pen.rectangle((x - radius, y - radius, x + radius, y + radius), fill=colour)
    else:
        wide = math.sqrt(3) * radius
        pen.polygon([(x, y - 2 * radius), (x - wide, y + radius), (x + wide, y + radius)], fill=colour)
    return picture


def shown(pipeline: Pipeline, scene: Scene, dice: random.Random, room: float) -> torch.Tensor:
    """The picture (1, 64, 64, 3) as the model gets it and the 9 frames of its clip, in 0..1."""
    file = drawn(scene, dice, room)
    picture = torch.frombuffer(bytearray(file.tobytes()), dtype=torch.uint8).view(1, *file.size, 3) / 255
    with torch.no_grad():
        prompt = stages.encode_prompt(pipeline, PromptRequest(scene.caption), Silent())
        image = stages.encode_image(pipeline, ImageRequest(picture, 64, 64), FIT, Silent())
        settings, framepack = (
            SampleSettings(0, 0, 0, seed=dice.randrange(2**31)),
            FramePackSettings(*one_section(pipeline)),
        )
        latents = stages.sample_framepack(pipeline, prompt, image, settings, framepack, Silent())
        clip = stages.decode(pipeline, latents, Silent())
    return torch.cat([functional.interpolate(picture.movedim(-1, 1), (64, 64), mode="area").movedim(1, -1), clip])


def main() -> None:
    """Print each miss, and the score."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--room", type=float, default=0.14, help="0: each shape is about the middle")
    parser.add_argument("--model", type=Path, default=MODELS / "framepack")
    parser.add_argument("--sheet", type=Path, help="a picture of the first twenty")
    given = parser.parse_args()
    dice = random.Random(given.seed)
    pipeline = load(LoadRequest(given.model, precision="fp32", device="cpu"))
    clips, said, right, off = [], [], 0, 0.0
    for scene in dice.sample(scenes(), given.count):
        clips.append(shown(pipeline, scene, dice, given.room))
        seen = scene_of(clips[-1][1:])
        right += seen == scene
        off += float((clips[-1][1] - clips[-1][0]).abs().mean()) / given.count
        said.append(f"{scene.caption}{'' if seen == scene else f'; MISS {seen.caption if seen.motion else seen}'}")
        print(said[-1], flush=True)
    if given.sheet:
        save_sheet(clips[:20], said[:20], given.sheet)
    print(f"{right} of {given.count} show what was asked; first frames are off by {off:.3f} of 1 on average")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
