"""Our path beside bare diffusers at published widths: each family's step and decode, side by side in one process.

    OMP_NUM_THREADS=1 python benchmarks/peers.py                # appends to benchmarks/results/peers.csv
    OMP_NUM_THREADS=1 python benchmarks/peers.py --families ltx --stages decoding

One block of each kind with random weights, tiny text encoders, CPU, one thread. Both paths are called in turn; seconds
are CPU time of the process, of the quickest call, so that other programs disturb them little. Steps are measured with
a short text, whose padding we leave out, and with one that has no padding.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from table import append, machine

TEXTS = {"short": "a red fox walks through fresh snow", "full": "fox " * 1200}  # the latter fills every token
SEED, STEPS = 7, 2
ROOT = Path(__file__).resolve().parent.parent
FAMILIES = ROOT / "pipelines" / "families"
TEXT = ("caption_channels", "text_embed_dim", "text_embed_2_dim", "pooled_projection_dim", "image_proj_dim")
NARROW = (*TEXT, "image_embed_dim")  # as wide as the tiny encoders
DEPTH = ("num_layers", "num_single_layers")
PICTURE = torch.rand(1, 3, 128, 192, generator=torch.Generator().manual_seed(0))
clock = time.process_time


@dataclass(frozen=True)
class Case:
    """What is measured of a family.

    Args:
        frames: of a video. decode: width and height of the decoded one; none where the VAE is another family's.
        cfg: guidance of both paths. given: further arguments of the bare pipeline.
        decoder: the dtype of the decode.
    """

    frames: int
    decode: tuple[int, int] | None
    cfg: float
    given: dict[str, Any]
    decoder: str = "fp32"
    width: int = 192
    height: int = 128


CASES = {
    "ltx": Case(9, (256, 192), 1.0, {"guidance_scale": 1.0, "width": 512, "height": 320}, width=512, height=320),
    "hunyuan_video": Case(5, (96, 64), 1.0, {"guidance_scale": 6.0}),
    "hunyuan_video_15": Case(5, (96, 96), 6.0, {}, decoder="bf16"),  # 5 GB in fp32
    "framepack": Case(5, None, 1.0, {"guidance_scale": 10.0, "latent_window_size": 2}),
    "mochi": Case(7, (96, 64), 1.0, {"guidance_scale": 1.0}),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def widened(part: str, family: str, home: Path, dtype: torch.dtype) -> None:
    """Put ``part`` at its published widths, with one block of each kind and random weights, into its tiny folder."""
    import diffusers

    content = json.loads((FAMILIES / family / f"{part}.json").read_text(encoding="utf-8"))
    first = content[0] if isinstance(content, list) else content
    folder = home if (home / "config.json").is_file() else home / part
    small = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = {**small, **first.get("config", first), "_class_name": small["_class_name"]}
    if part == "transformer":
        config |= {key: small[key] for key in NARROW if key in small} | {key: 1 for key in DEPTH if key in small}
    with torch.device("meta"):
        module = getattr(diffusers, small["_class_name"]).from_config(config)
    module = torch.nn.Module.to(module, dtype).to_empty(device="cpu")
    torch.manual_seed(0)
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data.uniform_(-0.03, 0.03)
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    module.save_pretrained(folder)


def checkpoints(family: str, part: str, scratch: Path, dtype: torch.dtype) -> Path:
    """A folder of tiny checkpoints, where ``part`` of ``family`` has its published widths."""
    import tiny

    for name in (family, *tiny.TINY[family].beside):
        shutil.copytree(tiny.build(name, ROOT / ".build" / "time"), scratch / name)
    widened(part, family, scratch / family, dtype)
    return scratch


def ours(family: str, folder: Path, precision: str) -> Any:
    """Our pipeline."""
    from anygpu.pipelines.load.folder import load
    from anygpu.pipelines.requests import LoadRequest

    beside = {"base": folder / "hunyuan_video", "image_encoder": folder / "siglip"} if family == "framepack" else {}
    return load(LoadRequest(folder / family, **beside, precision=precision, device="cpu"))


def bare(family: str, folder: Path, dtype: torch.dtype) -> Any:
    """The bare diffusers pipeline, which encodes a text once."""
    import tiny

    pipe, known = tiny.one_shot(family, folder, dtype=dtype), {}
    encode = pipe.encode_prompt

    def once(*values: Any, **named: Any) -> Any:
        key = repr((values, named))
        if key not in known:
            known[key] = encode(*values, **named)
        return known[key]

    pipe.encode_prompt = once
    return pipe


def sampling(family: str, case: Case, folder: Path, text: str) -> dict[str, Callable[[], Any]]:
    """Both ways to sample."""
    from anygpu.pipelines import stages
    from anygpu.pipelines.base import FramePackSettings, ImageRequest, PromptRequest, SampleSettings, Silent

    pipeline, pipe = ours(family, folder, "fp32"), bare(family, folder, torch.float32)
    prompt = stages.encode_prompt(pipeline, PromptRequest(text), Silent())
    settings = SampleSettings(case.width, case.height, case.frames, STEPS, SEED, cfg=case.cfg)
    size = {"width": case.width, "height": case.height}
    given = {**size, "num_frames": case.frames, "num_inference_steps": STEPS, "prompt": text, **case.given}
    if family == "framepack":
        given["image"] = PICTURE
        picture = ImageRequest(PICTURE.permute(0, 2, 3, 1), case.width, case.height)
        image = stages.encode_image(pipeline, picture, "stretch", Silent())
        asked = FramePackSettings(case.frames / 30, 2)

    def by_us() -> Any:
        if family == "framepack":
            return stages.sample_framepack(pipeline, prompt, image, settings, asked, Silent())
        return stages.sample(pipeline, prompt, None, settings, Silent())

    def by_diffusers() -> Any:
        return pipe(**given, generator=torch.Generator().manual_seed(SEED), output_type="latent")

    return {"ours": by_us, "bare": by_diffusers}


def decoding(family: str, case: Case, folder: Path) -> dict[str, Callable[[], Any]]:
    """Both ways to decode."""
    from anygpu.pipelines import stages
    from anygpu.pipelines.base import Latents, Silent

    dtype = DTYPES[case.decoder]
    pipeline, pipe = ours(family, folder, case.decoder), bare(family, folder, dtype)
    width, height = case.decode
    spatial, temporal = pipeline.spec.sizes.ratios
    count = (case.frames - 1) // temporal + 1
    shape = (1, int(pipe.vae.config.get("latent_channels", 16)), count, height // spatial, width // spatial)
    samples = torch.randn(shape, generator=torch.Generator().manual_seed(SEED))
    latents = Latents(samples, family, "text", case.frames, width, height, 24.0, SEED)
    time = {"temb": torch.zeros(1, dtype=dtype)} if pipe.vae.config.get("timestep_conditioning") else {}

    def by_us() -> Any:
        return stages.decode(pipeline, latents, Silent())

    def by_diffusers() -> Any:
        with torch.no_grad():
            frames = pipe.vae.decode(samples.to(dtype), **time, return_dict=False)[0]
            return pipe.video_processor.postprocess_video(frames, output_type="pt")

    return {"ours": by_us, "bare": by_diffusers}


def in_turn(ways: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """CPU seconds of each call of each way, after a first one of each."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats + 1):
        for name in sorted(ways, reverse=repeat % 2 == 1):
            started = clock()
            ways[name]()
            if repeat:
                taken[name].append(clock() - started)
    return taken


def rows(family: str, stages: list[str], repeats: int) -> Iterator[dict[str, Any]]:
    """The rows of one family."""
    case = CASES[family]
    if "sampling" in stages:
        for name, text in TEXTS.items():
            make = partial(sampling, text=text)
            yield row(family, "sampling", "transformer", "fp32", make, repeats) | {"text": name}
    if "decoding" in stages and case.decode is not None:
        yield row(family, "decoding", "vae", case.decoder, decoding, repeats) | {"text": ""}


def row(family: str, stage: str, part: str, precision: str, make: Callable[..., Any], repeats: int) -> dict[str, Any]:
    """One row.

    Args:
        make: from family, case and folder to both ways.
    """
    import diffusers

    case = CASES[family]
    with tempfile.TemporaryDirectory(dir=ROOT / ".build") as scratch:
        ways = make(family, case, checkpoints(family, part, Path(scratch), DTYPES[precision]))
        taken = in_turn(ways, repeats)
        del ways
        gc.collect()
    width, height = case.decode if stage == "decoding" else (case.width, case.height)
    calls = STEPS if stage == "sampling" else 1
    least = {name: min(seconds) / calls for name, seconds in taken.items()}
    return {
        "diffusers": diffusers.__version__,
        "family": family,
        "stage": stage,
        "size": f"{width}x{height}x{case.frames}",
        "precision": precision,
        "bare_s": round(least["bare"], 3),
        "ours_s": round(least["ours"], 3),
        "ratio": round(least["ours"] / least["bare"], 3),
        "spread": round(max(taken["bare"]) / min(taken["bare"]), 3),
    }


def main() -> None:
    """Measure, print and append the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", nargs="*", default=list(CASES))
    parser.add_argument("--stages", nargs="*", default=["sampling", "decoding"])
    parser.add_argument("--repeats", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    (ROOT / ".build" / "time").mkdir(parents=True, exist_ok=True)
    for family in arguments.families:
        append("peers", ({**machine(), **row} for row in rows(family, arguments.stages, arguments.repeats)))


if __name__ == "__main__":
    main()
