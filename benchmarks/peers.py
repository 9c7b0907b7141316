"""Our path beside bare diffusers at published widths: each family's step and decode, side by side in one process.

One block of each kind with random weights, tiny text encoders, CPU, one thread. Both paths are called in turn; seconds
are processor time of the quickest call. Steps are measured with a short text, whose padding we leave out, and with one
that has no padding.
"""

from __future__ import annotations

import gc
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import tiny
import torch
from anygpu.pipelines import stages
from anygpu.pipelines.base import FramePackSettings, ImageRequest, Latents, PromptRequest, SampleSettings, Silent
from anygpu.pipelines.load.folder import LoadRequest, load
from anygpu.pipelines.registry import FAMILIES
from runner import SCRATCH, Case, Row, in_turn, processor

TEXTS = {"short": "a red fox walks through fresh snow", "full": "fox " * 1200}  # the latter fills every token
SEED, STEPS = 7, 2
TEXT = ("caption_channels", "text_embed_dim", "text_embed_2_dim", "pooled_projection_dim", "image_proj_dim")
NARROW = (*TEXT, "image_embed_dim")  # as wide as the tiny encoders
DEPTH = ("num_layers", "num_single_layers")
PICTURE = torch.rand(1, 3, 128, 192, generator=torch.Generator().manual_seed(0))


@dataclass(frozen=True)
class Peer:
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


PEERS = {
    "ltx": Peer(9, (256, 192), 1.0, {"guidance_scale": 1.0, "width": 512, "height": 320}, width=512, height=320),
    "hunyuan_video": Peer(5, (96, 64), 1.0, {"guidance_scale": 6.0}),
    "hunyuan_video_15": Peer(5, (96, 96), 6.0, {}, decoder="bf16"),  # 5 GB in fp32
    "framepack": Peer(5, None, 1.0, {"guidance_scale": 10.0, "latent_window_size": 2}),
    "mochi": Peer(7, (96, 64), 1.0, {"guidance_scale": 1.0}),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def widened(part: str, family: str, home: Path, dtype: torch.dtype) -> None:
    """Put ``part`` at its published widths, with one block of each kind and random weights, into its tiny folder."""
    content = json.loads((FAMILIES[family].folder / f"{part}.json").read_text(encoding="utf-8"))
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
    for name in (family, *tiny.TINY[family].beside):
        shutil.copytree(tiny.build(name, SCRATCH), scratch / name)
    widened(part, family, scratch / family, dtype)
    return scratch


def ours(family: str, folder: Path, precision: str) -> Any:
    """Our pipeline."""
    beside = {"base": folder / "hunyuan_video", "image_encoder": folder / "siglip"} if family == "framepack" else {}
    return load(LoadRequest(folder / family, **beside, precision=precision, device="cpu"))


def bare(family: str, folder: Path, dtype: torch.dtype) -> Any:
    """The bare diffusers pipeline, which encodes a text once."""
    pipe, known = tiny.one_shot(family, folder, dtype=dtype), {}
    encode = pipe.encode_prompt

    def once(*values: Any, **named: Any) -> Any:
        key = repr((values, named))
        if key not in known:
            known[key] = encode(*values, **named)
        return known[key]

    pipe.encode_prompt = once
    return pipe


def sampling(family: str, case: Peer, folder: Path, text: str) -> dict[str, Callable[[], Any]]:
    """Both ways to sample."""
    pipeline, pipe = ours(family, folder, "fp32"), bare(family, folder, torch.float32)
    prompt = stages.encode_prompt(pipeline, PromptRequest(text), Silent())
    settings = SampleSettings(case.width, case.height, case.frames, STEPS, SEED, cfg=case.cfg)
    size = {"width": case.width, "height": case.height}
    given = {**size, "num_frames": case.frames, "num_inference_steps": STEPS, "prompt": text, **case.given}
    if family == "framepack":
        given["image"] = PICTURE
        picture = ImageRequest(PICTURE.permute(0, 2, 3, 1), case.width, case.height, prepare=False)
        image = stages.encode_image(pipeline, picture, "stretch", Silent())
        asked = FramePackSettings(case.frames / 30, 2)

    def by_us() -> Any:
        if family == "framepack":
            return stages.sample_framepack(pipeline, prompt, image, settings, asked, Silent())
        return stages.sample(pipeline, prompt, None, settings, Silent())

    def by_diffusers() -> Any:
        return pipe(**given, generator=torch.Generator().manual_seed(SEED), output_type="latent")

    return {"ours": by_us, "bare": by_diffusers}


def decoding(family: str, case: Peer, folder: Path) -> dict[str, Callable[[], Any]]:
    """Both ways to decode."""
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


def row(family: str, stage: str, part: str, precision: str, make: Callable[..., Any], repeats: int) -> Row:
    """One row.

    Args:
        make: from family, case and folder to both ways.
    """
    case = PEERS[family]
    with tempfile.TemporaryDirectory(dir=SCRATCH) as scratch:
        ways = make(family, case, checkpoints(family, part, Path(scratch), DTYPES[precision]))
        taken = in_turn(ways, repeats, processor)
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


def rows(families: tuple[str, ...], stages: tuple[str, ...], repeats: int) -> Iterator[Row]:
    """A row per family, stage and text."""
    for family in families:
        if "sampling" in stages:
            for name, text in TEXTS.items():
                make = partial(sampling, text=text)
                yield row(family, "sampling", "transformer", "fp32", make, repeats) | {"text": name}
        if "decoding" in stages and PEERS[family].decode is not None:
            yield row(family, "decoding", "vae", PEERS[family].decoder, decoding, repeats) | {"text": ""}


CASES = [Case("peers", rows, {"families": tuple(PEERS), "stages": ("sampling", "decoding"), "repeats": 2}, "peers")]
