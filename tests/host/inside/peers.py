"""The same step, decode or file by us and by others, with the same weights; `benchmarks/peers.py` asks for it.

On the CPU: bare diffusers' pipelines, core's networks behind its sampler and VAE, ComfyUI-GGUF from a checkout in
COMFYUI_GGUF, and ours.
"""

import gc
import importlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import comfy.model_detection as detection
import comfy.sample
import comfy.samplers
import comfy.sd
import comfy.utils
import comfyui_version
import diffusers
import layouts
import safetensors
import torch
import torch.nn.functional as F
from anygpu.compat.checkpoints.weights import read_tensors
from anygpu.pipelines import base as runs
from anygpu.pipelines import stages
from anygpu.pipelines.files.formats import entries_in
from anygpu.pipelines.forecast import counts
from anygpu.pipelines.sizes import Size
from runner import SCRATCH, data, in_turn, processor
from safetensors.torch import load_file, save_file
from times import HOST, latents_for, opened, published
from tiny import TINY, build, one_shot
from torch import Tensor

from host.inside.worker import ANSWER

SEED, SIGMAS = 7, (1.0, 0.8, 0.0)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SAMPLING, DECODING, READING = "sampling", "decoding", "reading"
PEERS = data("peers")
SHORT, FULL = 8, 32  # tokens of text, which bare diffusers pads, or not
FEWER = 6  # pairs where it computes padding, far from 1
Way = Callable[[], Any]
Answer = dict[str, Any]


@dataclass(frozen=True)
class Asked:
    """One comparison.

    Args:
        folder: of the checkpoints, or a file to read. tokens: of the text, which bare diffusers pads to ``padded``.
        size: width, height and frames. given: further arguments of the bare pipeline. encoded: what it encodes.
        states: width of each tensor of text. unlike: ways that give something else.
    """

    family: str
    stage: str
    folder: str
    precision: str = "fp32"
    tokens: int = 0
    padded: int = 0
    size: tuple[int, int, int] = (0, 0, 0)
    given: Any = None
    states: Any = None
    encoded: tuple[str, ...] = ()
    unlike: tuple[str, ...] = ()

    @property
    def prompt(self) -> runs.Prompt:
        """Random states of a text."""
        lengths, random = {runs.POOLED: (), runs.EMBEDS_2: (0,)}, torch.Generator().manual_seed(SEED)
        embeds = {
            name: torch.randn(1, *lengths.get(name, (self.tokens,)), width, generator=random)
            for name, width in self.states.items()
        }
        mask = {} if runs.EMBEDS_2 in embeds else {runs.MASK: torch.ones(1, self.tokens, dtype=torch.bool)}
        return runs.Prompt(self.family, {**embeds, **mask})

    @property
    def latents(self) -> runs.Latents:
        return latents_for(published(opened(self.family)), Size(*self.size), SEED)

    @property
    def picture(self) -> Tensor:
        """What FramePack starts from."""
        return torch.rand(1, 3, self.size[1], self.size[0], generator=torch.Generator().manual_seed(SEED))


def by_us(asked: Asked) -> Way:
    """Our stage."""
    pipeline = opened(asked.family, Path(asked.folder), precision=asked.precision)
    if asked.stage == DECODING:
        return partial(stages.decode, pipeline, asked.latents, runs.Silent())
    width, height, frames = asked.size
    settings = runs.SampleSettings(
        width, height, frames, seed=SEED, cfg=1.0, sigmas=SIGMAS, guidance=6.0, fps=25.0, scheduler="euler"
    )
    prompt = asked.prompt
    if not pipeline.spec.recipes.sections:
        return lambda: stages.sample(pipeline, prompt, None, settings, runs.Silent()).samples
    picture = runs.ImageRequest(asked.picture.permute(0, 2, 3, 1), width, height, prepare=False)
    image = stages.encode_image(pipeline, picture, "stretch", runs.Silent())
    sections = runs.FramePackSettings(frames / 30, 2)
    return lambda: stages.sample_framepack(pipeline, prompt, image, settings, sections, runs.Silent()).samples


def by_diffusers(asked: Asked) -> Way:
    """The bare pipeline, whose text is encoded already, or its VAE."""
    dtype = DTYPES[asked.precision]
    pipe = one_shot(asked.family, Path(asked.folder), dtype=dtype)
    if asked.stage == DECODING:
        vae, samples = pipe.vae, asked.latents.samples.to(dtype)
        if hasattr(pipe, "_denormalize_latents"):
            samples = pipe._denormalize_latents(samples, vae.latents_mean, vae.latents_std, 1.0)

        def decoded() -> Tensor:
            video = vae.decode(samples, return_dict=False)[0]
            return pipe.video_processor.postprocess_video(video, output_type="pt")[0].permute(0, 2, 3, 1)

        return decoded
    if hasattr(pipe, "guider"):
        pipe.guider.guidance_scale = 1.0
    text = dict(asked.prompt.embeds)
    for name, mask, length in ((runs.EMBEDS, runs.MASK, asked.padded), (runs.EMBEDS_2, "prompt_attention_mask_2", 256)):
        if name in text:
            count = text[name].shape[1]
            text[name] = F.pad(text[name], (0, 0, 0, max(0, length - count)))
            text[mask] = (torch.arange(text[name].shape[1]) < count)[None]
    pipe.encode_prompt = lambda *_, **__: tuple(text.get(name) for name in asked.encoded)
    size = dict(zip(("width", "height", "num_frames"), asked.size, strict=True))
    picture = {"image": asked.picture} if "image_encoder" in pipe.components else {}
    given = {**size, **picture, "num_inference_steps": len(SIGMAS) - 1, "prompt": "a red fox", **asked.given}
    return lambda: pipe(**given, generator=torch.Generator().manual_seed(SEED), output_type="latent").frames


def by_core(asked: Asked) -> Way:
    """Core's own network and sampler, or its VAE, on the released file."""
    tensors = comfy.utils.load_torch_file(str(Path(asked.folder, "released.safetensors")))
    if asked.stage == DECODING:
        vae, samples = comfy.sd.VAE(sd=tensors, dtype=DTYPES[asked.precision]), asked.latents.samples
        for layer in vae.first_stage_model.modules():  # LTX-Video's reflects where its file does not say "zeros"
            if getattr(layer, "padding_mode", "") == "reflect":
                layer.padding_mode = "zeros"
        return lambda: vae.decode(samples)[0]
    detect = detection.detect_unet_config

    def counted(*values: Any, **named: Any) -> Any:  # of Mochi it names 48 blocks without counting
        found = detect(*values, **named)
        return found | {"depth": 1} if "depth" in found else found

    with mock.patch.object(detection, "detect_unet_config", counted):
        model = comfy.sd.load_diffusion_model_state_dict(tensors, {"dtype": torch.float32})
    prompt, sigmas, noise = asked.prompt, torch.tensor(SIGMAS), asked.latents.samples
    names = {runs.POOLED: "pooled_output"}
    if runs.POOLED not in prompt.embeds:  # core's encoder of HunyuanVideo gives no mask where nothing is padded
        names[runs.MASK] = "attention_mask"
    more = {"pooled_output": None} | {names[name]: value for name, value in prompt.embeds.items() if name in names}
    text, euler = [[prompt.embeds[runs.EMBEDS], more]], comfy.samplers.sampler_object("euler")
    return lambda: comfy.sample.sample_custom(
        model, noise, 1.0, euler, sigmas, text, text, torch.zeros_like(noise), disable_pbar=True, seed=SEED
    )


def by_gguf(path: str) -> dict[str, Tensor]:
    """What ComfyUI-GGUF reads."""
    from host.inside.core_gguf import PACK, loader

    loader(os.environ["COMFYUI_GGUF"])
    return importlib.import_module(f"{PACK}.loader").gguf_sd_loader(path)


READERS: dict[str, Callable[[str], dict[str, Tensor]]] = {
    "ours": lambda path: read_tensors(entries_in(Path(path)), None, lambda _: None, mapped=True),
    "safetensors": load_file,
    "core": comfy.utils.load_torch_file,
    "ComfyUI-GGUF": by_gguf,
}
WAYS = {"ours": by_us, "diffusers": by_diffusers, "core": by_core}
VERSIONS = {"diffusers": diffusers.__version__, "core": comfyui_version.__version__, "ComfyUI-GGUF": "",
            "safetensors": safetensors.__version__}  # fmt: skip


def way_of(name: str, asked: Asked) -> Way:
    """The call of one of :data:`WAYS`, or of :data:`READERS` with a copy of each tensor, as on the way to a device."""
    if asked.stage != READING:
        return WAYS[name](asked)
    read = partial(READERS[name], asked.folder)
    return lambda: {key: tensor.as_subclass(Tensor).clone() for key, tensor in read().items()}


def difference(found: Any, expected: Any) -> float:
    """Largest difference, of the span of what is expected; 1 where a shape or a byte of a file differs."""
    if isinstance(found, dict):
        flat = {key: tensor.flatten().view(torch.uint8) for key, tensor in expected.items()}
        mine = {key: tensor.flatten().view(torch.uint8) for key, tensor in found.items()}
        return 0.0 if mine.keys() == flat.keys() and all(torch.equal(mine[key], flat[key]) for key in flat) else 1.0
    if found.shape != expected.shape:
        return 1.0
    return float((found.float() - expected.float()).abs().max() / (expected.max() - expected.min()))


def compared(asked: Asked, ways: list[str], pairs: int) -> dict[str, Any]:
    """Processor seconds of each way, in turn, and how far each result is from ours.

    What bare diffusers gives by its own noise levels, tests/pipelines/families hold to ours.
    """
    steps = len(SIGMAS) - 1 if asked.stage == SAMPLING else 1
    with torch.no_grad():
        calls = {name: way_of(name, asked) for name in ways}
        results = {name: call() for name, call in calls.items()}
        apart = {name: difference(results[name], results["ours"]) for name in ways if name not in asked.unlike}
        results.clear()
        taken = in_turn(calls, pairs, processor, warm_up=0)
    seconds = {name: [each / steps for each in taken[name]] for name in ways}
    return {"apart": apart, "seconds": seconds, "versions": VERSIONS}


def peak(asked: Asked, way: str) -> int:
    """Resident bytes at the peak of a first call, weights and mapped files included, over those of imports."""

    def resident(key: str) -> int:
        return 1024 * int(re.search(rf"{key}:\s+(\d+)", Path("/proc/self/status").read_text())[1])

    with torch.no_grad():
        gc.collect()
        before = resident("VmRSS")
        way_of(way, asked)()
        return resident("VmHWM") - before


def forked(call: Callable[..., Any], *terms: Any) -> Any:
    """The result of a call in a process of its own, which has all imports."""
    with get_context("fork").Pool(1) as pool:
        return pool.apply(call, terms)


def answered(asked: dict[str, Any], ways: list[str], pairs: int) -> Answer:
    """Peaks and times of these ways."""
    known = Asked(**asked)
    peaks = {way: forked(peak, known, way) for way in ways}
    return {"asked": asked, "pairs": pairs, "peaks": peaks, **forked(compared, known, ways, pairs)}


def checkpoints(family: str, part: str, place: str, precision: str, blocks: int = 1) -> None:
    """Tiny checkpoints, but ``part`` of ``family`` at its published widths; that part once more as it is released."""
    scratch = Path(place)
    for name in (family, *TINY[family].beside):
        shutil.copytree(build(name, SCRATCH), scratch / name)
    home, tiny = scratch / family, opened(family)
    folder = home if (home / "config.json").is_file() else home / part
    narrow = {key: value for key, value in tiny.configs[part].items() if key == "image_proj_dim"}  # of a tiny encoder
    deep = {"num_layers": blocks} if blocks > 1 else {}
    config = {**tiny.configs[part], **published(tiny).configs[part], **narrow, **deep}
    module = counts.built(tiny, part, config, DTYPES[precision])
    module, random = module.to_empty(device=HOST), torch.Generator().manual_seed(0)
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data.uniform_(-0.03, 0.03, generator=random)
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    module.save_pretrained(folder)
    del module, tensor
    if family != "framepack":  # which core does not have
        release = layouts.layout(PEERS[family]["vae"] if part == "vae" else layouts.RELEASES[family])
        save_file(layouts.released(layouts.tensors_of(folder), release), scratch / "released.safetensors")


def answers(families: tuple[str, ...], stages: tuple[str, ...], pairs: int) -> Iterator[Answer]:
    """What is asked, peaks and times per family, stage and text; then per file."""
    for family in families:
        case = PEERS[family]
        states = {name: width for name, (_, width) in case["states"].items()}
        for stage, part in ((SAMPLING, "transformer"), (DECODING, "vae")):
            if stage not in stages or (part == "vae" and "decode" not in case):
                continue
            precision = case.get("decoder", "fp32") if part == "vae" else "fp32"
            with tempfile.TemporaryDirectory(dir=SCRATCH) as scratch:
                forked(checkpoints, family, part, scratch, precision)
                asked = {"family": family, "stage": stage, "folder": scratch, "precision": precision}
                if part == "vae":
                    decode = {"size": case["decode"], "unlike": case.get("unlike", ())}
                    yield answered({**asked, **decode}, ["ours", "diffusers", "core"], pairs)
                    continue
                asked |= {name: case[name] for name in ("size", "given", "encoded")}
                asked |= {"states": states, "unlike": ["diffusers"]}  # which has noise levels of its own
                yield answered({**asked, "tokens": FULL}, case["full"], pairs)
                padded = {"tokens": SHORT, "padded": case["states"]["prompt_embeds"][0]}
                yield answered({**asked, **padded}, ["ours", "diffusers"], min(pairs, FEWER))
    if READING in stages:
        yield from files_answered(pairs)


def files_answered(pairs: int) -> Iterator[Answer]:
    """One released transformer, in bf16 and packed in 8 bits."""
    with tempfile.TemporaryDirectory(dir=SCRATCH) as scratch:
        forked(checkpoints, "ltx", "transformer", scratch, "bf16", 6)
        safe, packed = (str(Path(scratch, f"released.{suffix}")) for suffix in ("safetensors", "gguf"))
        asked = {"family": "ltx", "stage": READING}
        yield answered({**asked, "folder": safe, "precision": "bf16"}, ["ours", "safetensors", "core"], pairs)
        if "COMFYUI_GGUF" in os.environ:
            forked(pack, safe, packed)
            yield answered({**asked, "folder": packed, "precision": "Q8_0"}, ["ours", "ComfyUI-GGUF"], pairs)


def pack(safe: str, packed: str) -> None:
    """Write the matrices of a file in 8 bits."""
    tensors = {name: tensor.float() for name, tensor in load_file(safe).items()}
    layouts.gguf_file(Path(packed), tensors, "Q8_0", arch="ltxv")


def tell(words: str) -> None:
    """Print the answers that are asked for, as they come."""
    for found in answers(**json.loads(words)):
        print(ANSWER + json.dumps(found), flush=True)
