"""The demo: a clip per family from tiny random models, each checked against the bare diffusers pipeline, and a mesh.

The weights are random, so the clips show noise, but noise that went through tokenizer, text encoder, transformer, VAE
and file. A clip that ignored its prompt or its picture would fail.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from .compat.device.execution import picture_of
from .compat.device.facts import facts_for
from .paint import demo
from .paint.choices import demo_paint_models
from .pipelines import stages, tiny
from .pipelines.base import FramePackSettings, ImageRequest, Latents, Pipeline, PromptRequest, SampleSettings, Silent
from .pipelines.demo import demo_models, drawing
from .pipelines.loading.folder import LoadRequest, load
from .pipelines.movie import read_frames, write_mp4
from .pipelines.settings import snap
from .pipelines.vae.chunked import decode_as_published

EQUAL = 1e-5  # frames in 0..1: where padding is trimmed, sums are taken in another order
CHANGED = 1e-3
PROMPT, NEGATIVE, SEED = "a red fox walks through fresh snow", "blurry, low quality", 7
WIDTH, HEIGHT = 128, 96
SHEET_COLUMNS = 6
# Of a trained model: the least share that must be right, and the most that may be so when the prompts are swapped.
PROMPTS, RIGHT, BY_CHANCE = 24, 0.9, 0.1


@dataclass(frozen=True)
class Clip:
    """One family's clip.

    Args:
        checkpoints: tiny checkpoints it needs, the model first.
        frames, fps, steps: of the clip.
        cfg, guidance: as on the sample node.
        pictured: whether it starts from an image.
        reference: further arguments of the bare pipeline's call.
    """

    checkpoints: tuple[str, ...]
    frames: int
    fps: float
    steps: int
    cfg: float
    reference: Mapping[str, Any] = field(default_factory=dict)
    guidance: float = 0.0
    pictured: bool = False
    window: int = 0


@dataclass(frozen=True)
class Inputs:
    """What one rendering is made from."""

    prompt: str = PROMPT
    negative: str = NEGATIVE
    seed: int = SEED
    picture: torch.Tensor | None = field(default=None, compare=False)


CLIPS: dict[str, Clip] = {
    "ltx": Clip(
        ("ltx",),
        frames=17,
        fps=24.0,
        steps=4,
        cfg=3.0,
        reference={"guidance_scale": 3.0, "frame_rate": 24.0, "max_sequence_length": 128},
    ),
    "hunyuan_video": Clip(
        ("hunyuan_video",),
        frames=13,
        fps=24.0,
        steps=4,
        cfg=2.0,
        reference={"guidance_scale": 6.0, "true_cfg_scale": 2.0},
        guidance=6.0,
    ),
    "hunyuan_video_15": Clip(("hunyuan_video_15",), frames=9, fps=24.0, steps=3, cfg=6.0),
    "framepack": Clip(
        ("framepack", "hunyuan_video", "siglip"),
        frames=25,
        fps=30.0,
        steps=3,
        cfg=2.0,
        reference={
            "guidance_scale": 9.0,
            "true_cfg_scale": 2.0,
            "latent_window_size": 4,
            "sampling_type": "inverted_anti_drifting",
        },
        guidance=9.0,
        pictured=True,
        window=4,
    ),
    "mochi": Clip(("mochi",), frames=13, fps=30.0, steps=4, cfg=4.5, reference={"guidance_scale": 4.5}),
}


def run(folder: Path, notify: Callable[[str], None]) -> int:
    """Fill ``folder`` with a clip per family, a contact sheet and a report; 0 when every check held.

    Args:
        notify: takes each line for the user.
    """
    started = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    facts = facts_for("cpu")
    lines = [f"# What AnyGPU decided on this machine\n\nDevice: {facts_for()}\n\nThe demo itself runs on {facts}.\n"]
    strips: list[torch.Tensor] = []
    held: list[bool] = []

    def tell(said: str, began: float, checks: Mapping[str, tuple[bool, str]]) -> None:
        held.extend(passed for passed, _ in checks.values())
        notify(f"{said}, {_verdict(checks)}, {time.monotonic() - began:.1f} s")

    for family, clip in CLIPS.items():
        began = time.monotonic()
        pipeline, frames, checks = _shown(family, clip, folder)
        strips.append(frames)
        tell(f"{family}: {folder / f'{family}.mp4'}, {len(checks)} checks", began, checks)
        lines.append(_section(family, tuple(map(str, pipeline.decisions)), checks))
    began, checks = time.monotonic(), demo.show(folder)
    tell(f"paint: {folder / 'torus.glb'}, torus_turntable.png, {len(checks)} checks", began, checks)
    lines.append(_section("paint", ("A torus baked from six synthetic pictures; needs no model.",), checks))
    for choice, model in demo_models().items():
        began, checks = time.monotonic(), _drawn(choice, model, folder, lines)
        tell(f"{choice}: {folder / f'{model.name}_drawn.png'}", began, checks)
    for choice, model in demo_paint_models().items():
        began, checks = time.monotonic(), demo.paint(model, folder)
        tell(f"{choice}: {folder / f'{model.name}_painted.png'}", began, checks)
        lines.append(_section(choice, ("A ring in two colours, painted after its picture.",), checks))
    failed = held.count(False)
    sheet = _contact_sheet(strips, folder / "contact_sheet.png")
    (folder / "report.md").write_text("\n".join(lines), encoding="utf-8")
    notify(f"pictures of every clip: {sheet}; what was decided: {folder / 'report.md'}")
    notify(f"{time.monotonic() - started:.0f} s, {failed} checks failed")
    return 1 if failed else 0


def _shown(family: str, clip: Clip, folder: Path) -> tuple[Pipeline, torch.Tensor, dict[str, tuple[bool, str]]]:
    """The pipeline, the clip's frames, and each check's result with its figure."""
    models = folder / "models"
    paths = [tiny.build(name, models) for name in clip.checkpoints]
    base, encoder = (paths[1], paths[2]) if clip.pictured else (None, None)
    pipeline = load(LoadRequest(paths[0], base, encoder, precision="fp32", device="cpu"))
    inputs = Inputs(picture=_picture(0) if clip.pictured else None)
    frames, latents = _rendered(pipeline, clip, inputs)
    path = write_mp4(frames, latents.fps, folder / f"{family}.mp4")
    return (
        pipeline,
        frames,
        {
            "equals the bare diffusers pipeline": _near(frames, _bare(clip, models, inputs)[: frames.shape[0]]),
            **_changes(pipeline, clip, inputs, frames),
            "file has the asked size, frames and rate": _as_asked(pipeline, clip, path),
        },
    )


def _drawn(choice: str, model: Path, folder: Path, lines: list[str]) -> dict[str, tuple[bool, str]]:
    """What a trained model draws when it is asked, as a sheet and a clip; whether the checker sees what was asked."""
    pipeline = load(LoadRequest(model, precision="fp32", device="cpu"))
    asked = drawing.chosen_scenes(PROMPTS)
    clips = [drawing.drawn(pipeline, scene.caption, seed=SEED) for scene in asked]
    some = clips[: drawing.SHEET_ROWS]
    drawing.save_sheet(some, [scene.caption for scene in asked[: len(some)]], folder / f"{model.name}_drawn.png")
    write_mp4(
        drawing.side_by_side(some), stages.of_checkpoint(pipeline).defaults.fps, folder / f"{model.name}_drawn.mp4"
    )
    scores = drawing.scores(clips, asked)
    checks = {
        "shows what was asked for": (scores["all"] >= RIGHT, f"{scores['all']:.0%} of {PROMPTS} prompts"),
        "does not without asking": (scores["shuffled"] <= BY_CHANCE, f"{scores['shuffled']:.0%} of other prompts"),
    }
    lines.append(_section(choice, (drawing.as_table({"right, of all clips": scores}),), checks))
    return checks


def _rendered(pipeline: Pipeline, clip: Clip, inputs: Inputs) -> tuple[torch.Tensor, Latents]:
    """Frames and latents through the functions that the nodes call."""
    progress = Silent()
    with torch.no_grad():
        image = None
        if inputs.picture is not None:
            image = stages.encode_image(pipeline, ImageRequest(inputs.picture, WIDTH, HEIGHT), "crop", progress)
        prompt = stages.encode_prompt(pipeline, PromptRequest(inputs.prompt, inputs.negative), progress)
        settings = SampleSettings(
            width=WIDTH,
            height=HEIGHT,
            seed=inputs.seed,
            **{name: getattr(clip, name) for name in ("frames", "steps", "fps", "guidance", "cfg")},
        )
        if image is not None:
            framepack = FramePackSettings(clip.frames / clip.fps, clip.window)
            latents = stages.sample_framepack(pipeline, prompt, image, settings, framepack, progress)
        else:
            latents = stages.sample(pipeline, prompt, None, settings, progress)
        return stages.decode(pipeline, latents, progress), latents


def _bare(clip: Clip, models: Path, inputs: Inputs) -> torch.Tensor:
    """Frames (F, H, W, 3) of the diffusers pipeline itself, with its publisher's decoder where diffusers' differs."""
    pipeline = tiny.one_shot(clip.checkpoints[0], models)
    decode_as_published(pipeline.vae)
    pipeline.set_progress_bar_config(disable=True)
    arguments = dict(clip.reference)
    if inputs.picture is not None:
        arguments["image"] = picture_of(inputs.picture[0])
    with torch.no_grad():
        video = pipeline(
            prompt=inputs.prompt,
            negative_prompt=inputs.negative,
            height=HEIGHT,
            width=WIDTH,
            num_frames=clip.frames,
            num_inference_steps=clip.steps,
            generator=torch.Generator().manual_seed(inputs.seed),
            output_type="np",
            **arguments,
        ).frames[0]
    return torch.from_numpy(video)


def _changes(pipeline: Pipeline, clip: Clip, inputs: Inputs, frames: torch.Tensor) -> dict[str, tuple[bool, str]]:
    """Whether another prompt, negative, seed and picture each give another clip."""
    others = {
        "prompt": replace(inputs, prompt="a blue whale dives under ice"),
        "negative": replace(inputs, negative="a fox"),
        "seed": replace(inputs, seed=SEED + 1),
    }
    if inputs.picture is not None:
        others["image"] = replace(inputs, picture=_picture(1))
    changes = {}
    for name, other in others.items():
        difference = float((_rendered(pipeline, clip, other)[0] - frames).abs().max())
        changes[f"changes with the {name}"] = (difference > CHANGED, f"largest change {difference:.3f}")
    return changes


def _near(frames: torch.Tensor, reference: torch.Tensor) -> tuple[bool, str]:
    if frames.shape != reference.shape:
        return False, f"shape {tuple(frames.shape)} against {tuple(reference.shape)}"
    difference = float((frames - reference).abs().max())
    return difference <= EQUAL, f"largest difference {difference:.1e}, allowed {EQUAL:.0e}"


def _as_asked(pipeline: Pipeline, clip: Clip, path: Path) -> tuple[bool, str]:
    size = snap(pipeline.spec, WIDTH, HEIGHT, clip.frames)
    frames, rate = read_frames(path)
    count, height, width = frames.shape[:3]
    held = (count, height, width, rate) == (size.frames, size.height, size.width, clip.fps)
    return held, f"{width}x{height}, {count} frames at {rate:g} fps"


def _picture(which: int) -> torch.Tensor:
    """A picture (1, H, W, 3) with exact 8-bit values, so that both ways read the same one."""
    rows, columns = torch.meshgrid(torch.linspace(0, 1, HEIGHT), torch.linspace(0, 1, WIDTH), indexing="ij")
    channels = (rows, columns, 1 - rows) if which == 0 else (1 - columns, (rows * 8).sin().abs(), columns)
    return (torch.stack(channels, dim=-1)[None] * 255).round() / 255


def _contact_sheet(clips: list[torch.Tensor], path: Path) -> Path:
    """One row per clip, evenly spaced frames from left to right."""
    rows = []
    for frames in clips:
        chosen = torch.linspace(0, frames.shape[0] - 1, SHEET_COLUMNS).round().long()
        rows.append(torch.cat(list(frames[chosen]), dim=1))
    picture_of(torch.cat(rows)).save(path)
    return path


def _verdict(checks: Mapping[str, tuple[bool, str]]) -> str:
    """Whether all checks passed, else which failed."""
    wrong = [name for name, (held, _) in checks.items() if not held]
    return f"FAILED: {', '.join(wrong)}" if wrong else "all checks passed"


def _section(family: str, said: Sequence[str], checks: Mapping[str, tuple[bool, str]]) -> str:
    rows = "\n".join(f"| {name} | {'yes' if held else 'NO'} | {figure} |" for name, (held, figure) in checks.items())
    notes = "\n".join(f"- {note}" for note in said)
    return f"## {family}\n\n{notes}\n\n| check | held | figure |\n| --- | --- | --- |\n{rows}\n"
