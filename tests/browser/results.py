"""What the cards of workflows and the README show of a run: clips that the demo model draws, and a mesh that turns.

Nothing is picked: prompts and seeds are fixed, and what comes out is shown. ``python tests/browser/results.py`` writes
the README's moving picture; ``cards.py`` takes the frames.
"""

import functools
from pathlib import Path
from typing import Any

import torch
from anygpu.paint.baking.bake import BakeSettings, bake
from anygpu.paint.baking.fill import filled
from anygpu.paint.choices import demo_paint_models
from anygpu.paint.demo import PAIRS, halves, painted_ring, ring
from anygpu.paint.geometry.cameras import DEFAULT_VIEWS
from anygpu.paint.geometry.mesh import Surface
from anygpu.paint.geometry.turntable import turntable
from anygpu.paint.geometry.views import rasterised
from anygpu.paint.loading import PaintRequest, load_paint
from anygpu.paint.texturing import with_detail
from anygpu.pipelines import stages
from anygpu.pipelines.base import ImageRequest, PromptRequest, SampleSettings, Silent
from anygpu.pipelines.demo import MODELS
from anygpu.pipelines.demo.drawing import drawn
from anygpu.pipelines.demo.scenes import EXAMPLE, first_frame, scene_in
from anygpu.pipelines.load.folder import load
from anygpu.pipelines.pipeline import Pipeline
from anygpu.pipelines.requests import LoadRequest
from paint.synthetic import photographs, torus
from PIL import Image, ImageDraw, ImageFont

MOVING = Path(__file__).resolve().parents[2] / "docs" / "images" / "demo.webp"
SIZE, SHOWN, SEED = 64, 4, 3
PROMPTS = (  # of the moving picture, row by row
    "a red circle moves left on blue",
    "a blue square moves right on yellow",
    "a green circle grows on white",
    "a white triangle moves up on green",
    "a yellow square moves down on black",
    "a black circle shrinks on white",
    "a white square stays still on red",
    "a red triangle spins on black",
)
COLUMNS, ZOOM, LABEL, GAP = 4, 3, 22, 6
Strip = list[Image.Image]


@functools.cache
def demo(family: str = "ltx") -> Pipeline:
    """The demo model of a family that ships with the pack, in fp32."""
    return load(LoadRequest(MODELS / family, precision="fp32", device="cpu"))


def clip(text: str, **inputs: Any) -> torch.Tensor:
    """The frames (F, H, W, 3) of a prompt with a picture or latents to start from."""
    settings = SampleSettings(
        SIZE, SIZE, 9, seed=SEED, denoise=inputs.get("denoise", 1.0), latents=inputs.get("latents")
    )
    with torch.no_grad():
        prompt = stages.encode_prompt(demo(), PromptRequest(text), Silent())
        return stages.decode(demo(), stages.sample(demo(), prompt, inputs.get("image"), settings, Silent()), Silent())


def pictures(frames: torch.Tensor) -> Strip:
    """Frames (F, H, W, 3) in 0..1 as pictures."""
    return [Image.fromarray((frame.clamp(0, 1) * 255).round().to(torch.uint8).numpy()) for frame in frames]


def evenly(frames: torch.Tensor, count: int = SHOWN) -> Strip:
    """Some of the frames, from the first to the last."""
    return pictures(frames[torch.linspace(0, len(frames) - 1, count).round().long()])


def from_text(text: str, family: str = "ltx") -> tuple[Strip, Strip]:
    """What goes in beside the text, nothing, and what comes out."""
    return [], evenly(drawn(demo(family), text, SEED))


def from_first_frame(text: str) -> tuple[Strip, Strip]:
    """The picture of a shape that FramePack starts from, and the clip."""
    return pictures(first_frame(scene_in(text) or EXAMPLE)), evenly(drawn(demo("framepack"), text, SEED))


def from_picture(text: str, start: str) -> tuple[Strip, Strip]:
    """The first frame of another clip, and the clip that begins with it."""
    first = drawn(demo(), start, SEED)[:1]
    with torch.no_grad():
        image = stages.encode_image(demo(), ImageRequest(first, SIZE, SIZE), "crop", Silent())
    return pictures(first), evenly(clip(text, image=image))


def from_video(text: str, start: str) -> tuple[Strip, Strip]:
    """The middle of a clip, and what that clip is redrawn to."""
    frames = drawn(demo(), start, SEED)
    with torch.no_grad():
        latents = stages.encode_video(demo(), frames, SIZE, SIZE, "crop", 0, Silent())
    return pictures(frames[4:5]), evenly(clip(text, latents=latents, denoise=0.8))


@functools.cache
def after_picture() -> tuple[Strip, Strip]:
    """The picture of a ring, and the ring that the demo model painted after it, turning."""
    (model,) = demo_paint_models().values()
    ring = painted_ring(load_paint(PaintRequest(model, device="cpu")), PAIRS[0], frames=12)
    return pictures(ring.picture[None]), pictures(ring.frames[:SHOWN])


@functools.cache
def projected() -> tuple[Strip, Strip]:
    """The picture of a striped ring, and the ring as the demo model painted it, with that picture on it, turning."""
    (model,) = demo_paint_models().values()
    surface, pair = Surface.of(ring()), PAIRS[0]

    def striped(places: torch.Tensor) -> torch.Tensor:
        dark = torch.atan2(places[:, 1:2], places[:, :1]).mul(24).sin() < 0
        return halves(pair)(places) * torch.where(dark, 0.5, 1.0)

    view = rasterised(surface, next(iter(DEFAULT_VIEWS)), 512, DEFAULT_VIEWS.ortho_scale)
    colours = view.image(striped(view.shown.interpolated(surface.vertices, surface.faces)), 1.0)
    picture = torch.cat((colours, (view.ids >= 0).float()[..., None]), -1)
    texture = painted_ring(load_paint(PaintRequest(model, device="cpu")), pair).texture
    found = with_detail(ring(), texture, {"front": [picture]})
    return pictures(colours[None]), pictures(turntable(surface, found.texture, 12, 200, elevation=25.0)[:SHOWN])


@functools.cache
def painted() -> tuple[Strip, Strip]:
    """A torus before and after it was painted from synthetic pictures, which no paint model made, turning."""
    surface = Surface.of(torus())
    baked = bake(surface, DEFAULT_VIEWS, photographs(surface, DEFAULT_VIEWS, 256, 1024), BakeSettings(512, 1024))
    return [], pictures(turntable(surface, filled(baked, surface), 12, 200, elevation=25.0)[:SHOWN])


RESULTS = {  # workflow -> what goes in and comes out
    "anygpu_ltx_text_to_video": functools.partial(from_text, PROMPTS[0]),
    "anygpu_ltx_core_ksampler": functools.partial(from_text, PROMPTS[1]),
    "anygpu_ltx_recover_latents": functools.partial(from_text, PROMPTS[2]),
    "anygpu_ltx_image_to_video": functools.partial(
        from_picture, "a red square moves right on yellow", "a red square moves right on yellow"
    ),
    "anygpu_hunyuan_video_text_to_video": functools.partial(from_text, PROMPTS[0], "hunyuan_video"),
    "anygpu_hunyuan_video_core_ksampler": functools.partial(from_text, PROMPTS[1], "hunyuan_video"),
    "anygpu_hunyuan_video_15_text_to_video": functools.partial(from_text, PROMPTS[0], "hunyuan_video_15"),
    "anygpu_hunyuan_video_15_core_ksampler": functools.partial(from_text, PROMPTS[1], "hunyuan_video_15"),
    "anygpu_mochi_text_to_video": functools.partial(from_text, PROMPTS[0], "mochi"),
    "anygpu_mochi_core_ksampler": functools.partial(from_text, PROMPTS[1], "mochi"),
    "anygpu_framepack_image_to_video": functools.partial(from_first_frame, PROMPTS[1]),
    "anygpu_framepack_core_ksampler": functools.partial(from_first_frame, PROMPTS[0]),
    "anygpu_ltx_video_to_video": functools.partial(from_video, PROMPTS[1], "a red square moves right on yellow"),
    **dict.fromkeys(
        ("anygpu_paint_v2_0", "anygpu_paint_turbo", "anygpu_paint_second_pass", "anygpu_paint_from_one_picture"),
        after_picture,
    ),
    **dict.fromkeys(("anygpu_paint_pbr", "anygpu_paint_pbr_enlarged"), painted),
    "anygpu_project_picture": projected,
}


def moving() -> None:
    """Write the README's moving picture: a clip below its prompt each, in rows, on a ground that suits both themes."""
    clips = [pictures(drawn(demo(), text, SEED)) for text in PROMPTS]
    side, font = SIZE * ZOOM, ImageFont.load_default(10)
    rows = -(-len(clips) // COLUMNS)
    frames = []
    for step in range(len(clips[0])):
        sheet = Image.new("RGB", (COLUMNS * (side + GAP) - GAP, rows * (side + LABEL + GAP) - GAP), (30, 34, 40))
        pen = ImageDraw.Draw(sheet)
        for index, (text, strip) in enumerate(zip(PROMPTS, clips, strict=True)):
            left, top = index % COLUMNS * (side + GAP), index // COLUMNS * (side + LABEL + GAP)
            pen.text((left + 2, top + 6), text, fill=(225, 228, 232), font=font)
            sheet.paste(strip[step].resize((side, side), Image.Resampling.BICUBIC), (left, top + LABEL))
        frames.append(sheet)
    frames[0].save(MOVING, save_all=True, append_images=frames[1:], duration=125, loop=0, quality=70, method=6)


if __name__ == "__main__":
    moving()
