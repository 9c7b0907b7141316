"""What is recorded: every case by its id, and which of them must have equal results on any machine."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import layouts
import tiny
import torch
from anygpu.compat.transforms.step_cache import StepCacheSettings
from anygpu.paint.baking.bake import BakeSettings, bake
from anygpu.paint.geometry.cameras import DEFAULT_VIEWS
from anygpu.paint.geometry.mesh import Surface
from anygpu.paint.loading import PaintRequest, load_paint
from anygpu.paint.sampling.delight import DelightSettings
from anygpu.paint.sampling.painting import PaintSettings
from anygpu.paint.texturing import OneStep, textured
from anygpu.pipelines import stages
from anygpu.pipelines.base import (
    Call,
    FramePackSettings,
    ImageCondition,
    ImageRequest,
    Latents,
    Prompt,
    PromptRequest,
    SampleSettings,
    Silent,
)
from anygpu.pipelines.files.single_file import Files
from anygpu.pipelines.latents.convert import conditionings, from_core, to_core
from anygpu.pipelines.latents.prompt_files import load_prompt, save_prompt
from anygpu.pipelines.latents.store import load_latent, save_latent
from anygpu.pipelines.load.folder import load
from anygpu.pipelines.load.lora import with_lora
from anygpu.pipelines.pipeline import Pipeline
from anygpu.pipelines.requests import LoadRequest
from anygpu.pipelines.sampling.core_sampler import velocity
from anygpu.pipelines.settings import with_step_cache
from anygpu.pipelines.speed import SpeedRequest
from anygpu.pipelines.vae.plan import DecodeRequest
from paint.synthetic import photographs, torus
from safetensors.torch import save_file
from simulated import accelerator, profiles

from paint import stored

Results = dict[str, torch.Tensor]
SIZE = 64
MODES = ("none", "model", "group", "sequential")
PRECISIONS = ("bf16", "fp16")  # beside fp32; the CPU refuses fp16-safe, which the simulated accelerator runs
OFFLOADED = {"fp32": MODES, "bf16": MODES, "fp16": ("group",), "fp16-safe": MODES}  # fp16 is slow on the CPU's kernels
START, END = torch.rand(2, 1, SIZE, SIZE, 3, generator=torch.Generator().manual_seed(0))
CLIP = torch.rand(9, SIZE, SIZE, 3, generator=torch.Generator().manual_seed(1))
CUTOUT = torch.rand(48, 64, 4, generator=torch.Generator().manual_seed(2))
SETTINGS = SampleSettings(SIZE, SIZE, 5, steps=2, seed=3, cfg=2.0)


@dataclass(frozen=True)
class Places:
    """Where a case finds and leaves files.

    Args:
        tiny: folder of the tiny checkpoints. paint: folder of the paint checkpoints. scratch: one that is its own.
    """

    tiny: Path
    paint: Path
    scratch: Path


@dataclass(frozen=True)
class Task:
    """What a pipeline is asked for.

    Args:
        checkpoints: tiny ones, the model first, then those that lend it parts. frames: of the video.
        start: ``text``, ``image``, ``ends`` (first and last picture), ``clip`` (a condition), or ``video`` (noised).
        looks: whether the text encoder sees the picture too.
    """

    checkpoints: tuple[str, ...]
    frames: int = 5
    start: str = "text"
    looks: bool = False


@dataclass(frozen=True)
class Case:
    """One recorded run.

    Args:
        run: returns the tensors to record. like: the case whose results it must equal on every machine, where there is
            one. quick: whether ``make test`` runs it. simulated: whether it needs the simulated accelerator.
    """

    run: Callable[[Places], Results]
    like: str = ""
    quick: bool = False
    simulated: bool = False


PACK = ("framepack", "hunyuan_video", "siglip")
PACK_F1 = ("framepack_f1", "hunyuan_video", "siglip")
TASKS: dict[str, Task] = {
    "ltx text": Task(("ltx",), 9),
    "ltx image": Task(("ltx",), 9, "image"),
    "ltx ends": Task(("ltx",), 17, "ends"),
    "ltx video": Task(("ltx",), 9, "video"),
    "ltx_condition text": Task(("ltx_condition",), 9),
    "ltx_condition image": Task(("ltx_condition",), 9, "image"),
    "ltx_condition ends": Task(("ltx_condition",), 17, "ends"),
    "ltx_condition clip": Task(("ltx_condition",), 17, "clip"),
    "ltx_condition video": Task(("ltx_condition",), 9, "video"),
    "hunyuan_video text": Task(("hunyuan_video",)),
    "hunyuan_video video": Task(("hunyuan_video",), 5, "video"),
    "hunyuan_video_i2v image": Task(("hunyuan_video_i2v",), 5, "image", looks=True),
    "hunyuan_video_i2v_33ch image": Task(("hunyuan_video_i2v_33ch",), 5, "image", looks=True),
    "hunyuan_video_15 text": Task(("hunyuan_video_15",)),
    "hunyuan_video_15 video": Task(("hunyuan_video_15",), 5, "video"),
    "hunyuan_video_15_i2v image": Task(("hunyuan_video_15_i2v",), 5, "image"),
    "framepack image": Task(PACK, 9, "image"),
    "framepack ends": Task(PACK, 9, "ends"),
    "framepack_f1 image": Task(PACK_F1, 9, "image"),
    "mochi text": Task(("mochi",), 7),
    "mochi video": Task(("mochi",), 7, "video"),
}
"""Every tiny checkpoint with a pipeline, in every way that it can start."""
FAMILIES: dict[str, str] = {
    "ltx": "ltx image", "hunyuan_video": "hunyuan_video text", "hunyuan_video_15": "hunyuan_video_15_i2v image",
    "framepack": "framepack image", "mochi": "mochi text",
}  # fmt: skip
"""The task of each family that is run in every precision and offload mode."""


# ---- videos --------------------------------------------------------------------------------------


def opened(places: Places, task: Task, **choices: Any) -> Pipeline:
    """The pipeline of a task, in fp32 on the CPU unless ``choices`` say otherwise."""
    paths = [tiny.build(name, places.tiny) for name in task.checkpoints]
    return load(LoadRequest(*paths, **{"precision": "fp32", "device": "cpu", **choices}))


def prompted(pipeline: Pipeline, task: Task) -> Prompt:
    """Text and negative text, encoded."""
    request = PromptRequest("a red fox", "blurry", image=START if task.looks else None)
    return stages.encode_prompt(pipeline, request, Silent())


def pictured(pipeline: Pipeline, task: Task) -> ImageCondition | None:
    """The pictures that a task starts from, encoded; None for none."""
    if task.start in ("text", "video"):
        return None
    frames = CLIP if task.start == "clip" else START
    found = stages.encode_image(pipeline, ImageRequest(frames, SIZE, SIZE, prepare=False), "stretch", Silent())
    if task.start == "ends":
        last = ImageRequest(END, SIZE, SIZE, frame=-1, strength=0.9, previous=found, prepare=False)
        found = stages.encode_image(pipeline, last, "stretch", Silent())
    return found


def sampled(pipeline: Pipeline, task: Task, prompt: Prompt, image: ImageCondition | None, **changes: Any) -> Latents:
    """Latents of a task, with fields of the settings changed."""
    known = FramePackSettings.__dataclass_fields__
    of_sections = {name: changes.pop(name) for name in list(changes) if name in known}
    settings = replace(SETTINGS, frames=task.frames, **changes)
    if pipeline.family == "framepack":  # two sections, with the solver that they were recorded with
        settings = replace(settings, scheduler=changes.get("scheduler", "euler"))
        sections = replace(FramePackSettings(16 / 30, window=2), **of_sections)
        assert image is not None
        return stages.sample_framepack(pipeline, prompt, image, settings, sections, Silent())
    if task.start == "video":
        clip = stages.encode_video(pipeline, CLIP[: task.frames], SIZE, SIZE, "crop", 5, Silent())
        settings = replace(settings, latents=clip, denoise=0.6, steps=3)
    return stages.sample(pipeline, prompt, image, settings, Silent())


def whole(pipeline: Pipeline, task: Task, **changes: Any) -> Results:
    """Everything that a task makes on its way: text, pictures, latents, frames."""
    prompt, image = prompted(pipeline, task), pictured(pipeline, task)
    found = {f"text.{name}": value for name, value in prompt.embeds.items()}
    found |= {f"negative.{name}": value for name, value in (prompt.negative or {}).items()}
    found |= {f"image.{name}": value for name, value in (image.tensors if image is not None else {}).items()}
    latents = sampled(pipeline, task, prompt, image, **changes)
    frames = stages.decode(pipeline, latents, Silent())[: None if task.start == "ends" else task.frames]
    return {**found, "latents": latents.samples, "frames": frames}


def latents_only(pipeline: Pipeline, task: Task, **changes: Any) -> Results:
    """The latents of a task."""
    return {"latents": sampled(pipeline, task, prompted(pipeline, task), pictured(pipeline, task), **changes).samples}


def video_cases() -> Iterator[tuple[str, Case]]:
    """Every task, and one of each family in every precision."""
    for name, task in TASKS.items():
        quick = name in FAMILIES.values()
        yield name, Case(lambda places, task=task: whole(opened(places, task), task), quick=quick)
    for name in FAMILIES.values():
        for precision in PRECISIONS:
            yield (
                f"{name}, {precision}",
                Case(lambda p, task=TASKS[name], kind=precision: whole(opened(p, task, precision=kind), task)),
            )
    for name, change in (
        ("guidance of some steps", {"steps": 4, "cfg": 3.0, "cfg_start": 0.25, "cfg_end": 0.75}),
        ("no guidance", {"cfg": 1.0}),
        ("sigmas", {"sigmas": (1.0, 0.6, 0.3, 0.0)}),
    ):
        for family, chosen in FAMILIES.items():
            yield (
                f"{family}: {name}",
                Case(lambda p, task=TASKS[chosen], more=change: latents_only(opened(p, task), task, **more)),
            )
    for family, name, more in SINGLE_CHANGES:
        task = TASKS[FAMILIES[family]]
        yield (f"{family}: {name}", Case(lambda p, task=task, more=more: latents_only(opened(p, task), task, **more)))
    for name in ("ltx video", "ltx_condition video", "hunyuan_video video", "hunyuan_video_15 video", "mochi video"):
        yield f"{name}, masked", Case(lambda p, task=TASKS[name]: latents_only(opened(p, task), task, **masked(task)))
    yield "framepack: section prompts", Case(told_by_section)
    yield "hunyuan_video: template", Case(from_template)
    yield "hunyuan_video_15: prompt from a file", Case(stored_prompt)


SINGLE_CHANGES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("framepack", "unipc", {"scheduler": "unipc", "steps": 3}),
    ("framepack", "dpm++_2m", {"scheduler": "dpm++_2m", "steps": 3}),
    ("framepack", "order vanilla", {"order": "vanilla"}),
    ("framepack", "one frame", {"single_frame": True}),
    ("framepack", "guidance", {"guidance": 3.0}),
    ("hunyuan_video", "guidance", {"guidance": 3.0}),
    ("hunyuan_video", "shift", {"shift": 3.0}),
    ("hunyuan_video_15", "shift", {"shift": 3.0}),
    ("hunyuan_video_15", "rescaled guidance", {"guidance_rescale": 0.5}),
    ("ltx", "rescaled guidance", {"guidance_rescale": 0.5}),
    ("mochi", "shift", {"shift": 3.0}),
)
"""Settings that only some families know: family, name, fields of the settings."""


def masked(task: Task) -> dict[str, Any]:
    """Settings that sample the left half only."""
    side = {"ltx": 2, "ltx_condition": 2, "hunyuan_video_15": 4}.get(task.checkpoints[0], 8)
    mask = torch.zeros(1, 1, 1, side, side)
    mask[..., : side // 2] = 1.0
    return {"noise_mask": mask}


def told_by_section(places: Places) -> Results:
    """FramePack with a prompt for each section."""
    task = TASKS["framepack image"]
    pipeline = opened(places, task)
    prompt = stages.encode_prompt(pipeline, PromptRequest("a red fox", "blurry", sections=("a blue dog",)), Silent())
    return {"latents": sampled(pipeline, task, prompt, pictured(pipeline, task)).samples}


def from_template(places: Places) -> Results:
    """Text in a template of the user's own."""
    pipeline = opened(places, TASKS["hunyuan_video text"])
    request = PromptRequest("a red fox", "blurry", template="Describe it: {} In full.", max_tokens=32)
    return dict(stages.encode_prompt(pipeline, request, Silent()).embeds)


def stored_prompt(places: Places) -> Results:
    """Latents of a prompt that was saved and loaded."""
    task = TASKS["hunyuan_video_15 text"]
    pipeline = opened(places, task)
    path = save_prompt(places.scratch / "prompt.safetensors", prompted(pipeline, task))
    return {"latents": sampled(pipeline, task, load_prompt(path, print), None).samples}


@contextmanager
def simulated_device() -> Iterator[str]:
    """The name of the simulated accelerator, plugged in for a block."""
    with accelerator.fresh():
        yield f"{accelerator.NAME}:0"


def offloaded(places: Places, task: Task, offload: str, precision: str) -> Results:
    """A task on the simulated accelerator."""
    with simulated_device() as device:
        return whole(opened(places, task, offload=offload, device=device, precision=precision), task)


def offload_cases() -> Iterator[tuple[str, Case]]:
    """One task of each family in every precision and offload mode."""
    for name in FAMILIES.values():
        for precision, modes in OFFLOADED.items():
            for mode in modes:
                first = f"{name}, offload {modes[0]}, {precision}"
                yield (
                    f"{name}, offload {mode}, {precision}",
                    Case(
                        lambda p, task=TASKS[name], mode=mode, kind=precision: offloaded(p, task, mode, kind),
                        like="" if mode == modes[0] else first,
                        simulated=True,
                    ),
                )


def on_machine(places: Places, task: Task, machine: str, offload: str) -> Results:
    """A task on a simulated machine with the faults of a real one, and what is done about them."""
    state = places.scratch if machine == "no-conv3d" else None  # what it lacks, it is asked for
    with profiles.on(machine) as profile:
        pipeline = opened(places, task, precision="auto", offload=offload, device=profile.facts, state=state)
        return whole(pipeline, task)


def changed_offloaded(places: Places, task: Task, change: str) -> Results:
    """Something that changes a model, beside the moving of its parts."""
    with simulated_device() as device:
        if change == "lora":
            return adapted(places, task, "separate", device=device, offload="group")
        if change == "merged lora":
            return adapted(places, task, "merged", device=device, offload="group")
        if change == "step cache":
            return step_cached(places, task, "first_block", device=device, offload="group")
        return latents_only(opened(places, task, device=device, offload="group", weights=change), task)


def machine_cases() -> Iterator[tuple[str, Case]]:
    """Every family on every simulated machine, and changed models on the move."""
    for name in FAMILIES.values():
        task = TASKS[name]
        for machine in profiles.PROFILES:
            yield (
                f"{name}, machine {machine}",
                Case(lambda p, task=task, machine=machine: on_machine(p, task, machine, "group"), simulated=True),
            )
        for change in ("lora", "merged lora", "step cache", "fp8", "int8"):
            yield (
                f"{name}, {change}, offload group",
                Case(lambda p, task=task, change=change: changed_offloaded(p, task, change), simulated=True),
            )


# ---- decoding, encoding, storing -----------------------------------------------------------------

LATENT_SHAPES = {  # of a clip that has tiles, chunks and borders: frames, rows, columns; ratios are those of the VAE
    "ltx": (128, 2, 4, 5, 32, 8),
    "ltx_condition": (128, 2, 4, 5, 32, 8),
    "hunyuan_video": (16, 3, 12, 14, 8, 4),
    "hunyuan_video_15": (32, 3, 6, 7, 16, 4),
    "mochi": (12, 3, 12, 14, 8, 6),
}
FORMS: dict[str, DecodeRequest] = {
    "auto": DecodeRequest(),
    "full": DecodeRequest("full"),
    "tiled": DecodeRequest("tiled", tile=64, overlap=16),
    "streaming": DecodeRequest("streaming", tile=64),
    "cpu": DecodeRequest("cpu"),
}
CHUNKED = DecodeRequest("chunked", frames=2)
CAUSAL = ("mochi", "hunyuan_video_15")  # whose decoders work in chunks of time


def drawn_latents(checkpoint: str) -> Latents:
    """Random latents of the checkpoint's family, larger than a sampling here would be."""
    channels, frames, rows, columns, spatial, temporal = LATENT_SHAPES[checkpoint]
    samples = torch.randn(1, channels, frames, rows, columns, generator=torch.Generator().manual_seed(4))
    family = checkpoint.removesuffix("_condition")
    return Latents(samples, family, "text", (frames - 1) * temporal + 1, rows * spatial, columns * spatial, 24.0, 3)


def decoded(places: Places, checkpoint: str, form: DecodeRequest, **choices: Any) -> Results:
    """Frames of drawn latents."""
    pipeline = opened(places, Task((checkpoint,)), **choices)
    return {"frames": stages.decode(pipeline, drawn_latents(checkpoint), Silent(), form=form)}


def decoded_offloaded(places: Places, checkpoint: str, form: DecodeRequest, offload: str) -> Results:
    """Frames of drawn latents, from the simulated accelerator."""
    with simulated_device() as device:
        return decoded(places, checkpoint, form, device=device, offload=offload)


def decoded_with_noise(places: Places) -> Results:
    """Frames of a decoder that removes noise, at a time of the user's own."""
    pipeline = opened(places, Task(("ltx_condition",)))
    latents = stages.with_decode_noise(pipeline, drawn_latents("ltx_condition"), 0.1, 0.05, Silent())
    return {"frames": stages.decode(pipeline, latents, Silent())}


def encoded(places: Places, checkpoint: str) -> Results:
    """A clip as latents."""
    pipeline = opened(places, Task((checkpoint,)))
    count = 7 if checkpoint == "mochi" else 9
    return {"latents": stages.encode_video(pipeline, CLIP[:count], 0, 0, "crop", 5, Silent()).samples}


def stored_latents(places: Places) -> Results:
    """FramePack's latents, which carry most, saved, loaded and decoded."""
    task = TASKS["framepack image"]
    pipeline = opened(places, task)
    found = sampled(pipeline, task, prompted(pipeline, task), pictured(pipeline, task))
    path = save_latent(places.scratch / "latents.safetensors", to_core(found), print)
    again = from_core(pipeline, load_latent(path, print), print)
    return {"latents": again.samples, "frames": stages.decode(pipeline, again, Silent())[: task.frames]}


def part_cases() -> Iterator[tuple[str, Case]]:
    """Each VAE in every form of decoding, its encoder, and latents as files."""
    for checkpoint in LATENT_SHAPES:
        forms = {**FORMS, **({"chunked": CHUNKED} if checkpoint in CAUSAL else {})}
        for name, form in forms.items():
            like = f"{checkpoint}: decode full" if name in ("auto", "cpu") else ""
            yield (
                f"{checkpoint}: decode {name}",
                Case(lambda p, which=checkpoint, form=form: decoded(p, which, form), like=like),
            )
        yield (
            f"{checkpoint}: decode full, bf16",
            Case(lambda p, which=checkpoint: decoded(p, which, FORMS["full"], precision="bf16")),
        )
        for name in ("full", "tiled", "streaming"):
            form = FORMS[name]
            yield (
                f"{checkpoint}: decode {name}, offload model",
                Case(lambda p, which=checkpoint, form=form: decoded_offloaded(p, which, form, "model"), simulated=True),
            )
        yield f"{checkpoint}: encode", Case(lambda p, which=checkpoint: encoded(p, which))
    yield "ltx_condition: decode noise", Case(decoded_with_noise)
    yield "framepack: latents from a file", Case(stored_latents)


# ---- what changes a model ------------------------------------------------------------------------


def lora_file(checkpoint: Path, path: Path) -> Path:
    """Random factors for every attention of a transformer, saved under diffusers' names."""
    generator, found = torch.Generator().manual_seed(6), {}
    for name, weight in sorted(layouts.tensors_of(checkpoint).items()):
        if ".attn" in name and name.endswith(".weight") and weight.ndim == 2:
            layer = f"transformer.{name.removesuffix('.weight')}"
            found[f"{layer}.lora_A.weight"] = torch.randn(4, weight.shape[1], generator=generator) * 0.1
            found[f"{layer}.lora_B.weight"] = torch.randn(weight.shape[0], 4, generator=generator) * 0.1
            found[f"{layer}.alpha"] = torch.tensor(2.0)
    save_file(found, path)
    return path


def adapted(places: Places, task: Task, mode: str, **choices: Any) -> Results:
    """Latents of a task with a LoRA on its transformer."""
    pipeline = opened(places, task, **choices)
    folder = places.tiny / task.checkpoints[0]
    lone = folder / "transformer"
    path = lora_file(lone if lone.is_dir() else folder, places.scratch / "lora.safetensors")
    return latents_only(with_lora(pipeline, path, 0.7, "", mode, Silent()), task)


def step_cached(places: Places, task: Task, kind: str, **choices: Any) -> Results:
    """Latents of a task that skips part of its steps."""
    pipeline = opened(places, task, **choices)
    return latents_only(with_step_cache(pipeline, "custom", StepCacheSettings(kind, 0.4, 3)), task, steps=6, cfg=1.0)


def composed(places: Places, model: str, task: Task) -> Results:
    """A task on single files in the names of their release."""
    files = layouts.whole_set(model, places.tiny, places.scratch)
    base = layouts.tools_only(model, places.tiny, places.scratch)
    request = LoadRequest(files["transformer"], base=base, precision="fp32", device="cpu", files=Files(files))
    return whole(load(request), task)


PACKED = {  # family -> (task, name of its release's layout)
    "mochi": ("mochi text", "Mochi 1 as released"),
    "hunyuan_video": ("hunyuan_video text", "HunyuanVideo as released or as ComfyUI saves it"),
}


def packed(places: Places, family: str, way: str) -> Results:
    """Latents of a transformer out of a packed file."""
    name, release = PACKED[family]
    base = tiny.build(TASKS[name].checkpoints[0], places.tiny)
    tensors = layouts.released(layouts.tensors_of(base / "transformer"), layouts.layout(release))
    path = places.scratch / ("model.safetensors" if way == "fp8" else "model.gguf")
    config = layouts.write(places.scratch / "plain.safetensors", tensors, layouts.config_in(base / "transformer"))
    config.with_suffix(".json").rename(path.with_suffix(".json"))
    layouts.scaled_fp8(path, tensors, "old") if way == "fp8" else layouts.gguf_file(path, tensors, way)
    request = LoadRequest(path, base, precision="fp32", device="cpu", files=Files({"transformer": path}))
    return latents_only(load(request), TASKS[name])


def model_cases() -> Iterator[tuple[str, Case]]:
    """LoRAs, step caches, fused kernels in plain torch, single files, packed weights."""
    for family, name in FAMILIES.items():
        task = TASKS[name]
        for mode in ("separate", "merged"):
            yield f"{family}: lora {mode}", Case(lambda p, task=task, mode=mode: adapted(p, task, mode))
        for kind in ("first_block", "taylor", "pyramid"):
            yield f"{family}: step cache {kind}", Case(lambda p, task=task, kind=kind: step_cached(p, task, kind))
        for precision in ("fp32", "bf16"):
            fused = {"speed": SpeedRequest("reference"), "precision": precision}
            yield (
                f"{family}: kernels reference, {precision}",
                Case(lambda p, task=task, fused=fused: whole(opened(p, task, **fused), task)),
            )
        exact = {"attention": "native_math"}
        yield (
            f"{family}: attention native_math",
            Case(lambda p, task=task, exact=exact: latents_only(opened(p, task, **exact), task)),
        )
        for choice in ("fp8", "int8"):
            small = {"weights": choice, "text_weights": choice}
            yield (
                f"{family}: weights {choice}",
                Case(lambda p, task=task, small=small: latents_only(opened(p, task, **small), task)),
            )
    for model, name in (
        ("ltx", "ltx text"),
        ("mochi", "mochi text"),
        ("hunyuan_video", "hunyuan_video text"),
        ("hunyuan_video_15_i2v", "hunyuan_video_15_i2v image"),
    ):
        yield (f"{model}: single files", Case(lambda p, model=model, task=TASKS[name]: composed(p, model, task)))
    for family in PACKED:
        for way in ("fp8", "Q8_0", "Q4_0"):
            yield f"{family}: file in {way}", Case(lambda p, family=family, way=way: packed(p, family, way))


# ---- a sampler from elsewhere --------------------------------------------------------------------

DRIVEN = (
    "ltx text", "ltx_condition text", "hunyuan_video text", "hunyuan_video_i2v_33ch image",
    "hunyuan_video_15_i2v image", "framepack image", "framepack_f1 image", "mochi text",
)  # fmt: skip


def core_sampler(places: Places, task: Task, precision: str) -> Results:
    """The velocity that one call of a transformer gives, for two rows."""
    pipeline = opened(places, task, precision=precision)
    dtype = pipeline.precision.residual
    ((embeds, rest),), _ = conditionings(prompted(pipeline, task))
    image, config = pictured(pipeline, task), pipeline.configs["transformer"]
    generator = torch.Generator().manual_seed(8)
    side = SIZE // (32 if pipeline.family == "ltx" else 16 if pipeline.family == "hunyuan_video_15" else 8)
    latents = torch.randn(2, int(config["in_channels"]), 2, side, side, generator=generator)

    def rows(value: torch.Tensor | None) -> torch.Tensor | None:
        if value is None:
            return None
        value = value.to(dtype) if value.is_floating_point() else value
        return value.expand(2, *value.shape[1:])

    tensors = image.tensors if image is not None else {}
    start = tensors.get("start")
    call = Call(
        latents.to(dtype),
        torch.tensor([900.0, 300.0]),
        rows(embeds),
        rows(rest.get("attention_mask")),
        pooled=rows(rest.get("pooled_output")),
        glyph_embeds=rows(rest.get("conditioning_byt5small")),
        vision=rows(tensors.get("vision", tensors.get("image_embeds"))),
        picture=None if start is None else rows(start[:, : start.shape[1] // 2]),
    )
    with pipeline.offloader.hold("transformer") as transformer:
        return {"velocity": velocity(pipeline, transformer, call)}


def driven_cases() -> Iterator[tuple[str, Case]]:
    """One call of every transformer as a MODEL."""
    for name in DRIVEN:
        for precision in ("fp32", "bf16"):
            yield (
                f"{name}, one call, {precision}",
                Case(lambda p, task=TASKS[name], kind=precision: core_sampler(p, task, kind)),
            )


# ---- paint ---------------------------------------------------------------------------------------

PAINTS = {  # name -> (kind of checkpoint, variant)
    "paint v2-0": ("paint", "v2-0"),
    "paint turbo": ("paint", "turbo"),
    "paint PBR": ("paint_pbr", "auto"),
}
PAINTED = OneStep(
    PaintSettings(size=SIZE, steps=2, seed=3),
    BakeSettings(texture_size=64, view_size=128),
    max_views=7,
    delight=DelightSettings(size=SIZE, steps=2),
)


def opened_paint(places: Places, kind: str, **choices: Any) -> Any:
    """A paint pipeline with the fixtures' weights."""
    folder = places.paint / stored.FOLDERS[kind]
    if not (folder / "whole").exists():
        stored.checkpoint(kind, places.paint)
        (folder / "whole").touch()
    return load_paint(PaintRequest(folder, **{"precision": "fp32", "device": "cpu", **choices}))


@stored.any_text()
def painted(places: Places, name: str, **choices: Any) -> Results:
    """A picture evened out, views painted from it, and their texture on a torus."""
    kind, variant = PAINTS[name]
    pipeline = opened_paint(places, kind, variant=variant, **choices)
    delight = None if kind == "paint_pbr" else opened_paint(places, "delight", **choices)
    dino = torch.randn(1, 17, 1536, generator=torch.Generator().manual_seed(9)) if kind == "paint_pbr" else None
    texture, views, _ = textured(torus(12, 24), [CUTOUT], pipeline, delight, PAINTED, dino=dino)
    found = {
        "latents": views.latents, "views": views.views, "metallic_roughness": views.metallic_roughness,
        "colour": texture.colour, "metallic": texture.metallic, "roughness": texture.roughness,
        "painted": texture.painted,
    }  # fmt: skip
    return {key: value for key, value in found.items() if value is not None}


def rescheduled(places: Places, scheduler: str) -> Results:
    """Views painted with another scheduler, with guidance."""
    settings = replace(PAINTED, paint=replace(PAINTED.paint, scheduler=scheduler, guidance=1.5))
    _, views, _ = textured(torus(12, 24), [CUTOUT], opened_paint(places, "paint", variant="v2-0"), settings=settings)
    return {"latents": views.latents, "views": views.views}


def baked(form: str, exact: bool) -> Results:
    """A texture from photographs of a torus."""
    surface = Surface.of(torus(12, 24))
    pictures = photographs(surface, DEFAULT_VIEWS, 96, 128)
    found = bake(surface, DEFAULT_VIEWS, pictures, BakeSettings(96, 128, form, exact=exact))
    return {"texture": found.texture, "painted": found.painted, "weight": found.weight}


def offloaded_paint(places: Places, name: str, offload: str) -> Results:
    """Paint on the simulated accelerator."""
    with simulated_device() as device:
        return painted(places, name, offload=offload, device=device)


def paint_cases() -> Iterator[tuple[str, Case]]:
    """Every paint model, on the CPU and offloaded."""
    for name in PAINTS:
        yield name, Case(lambda p, name=name: painted(p, name))
    yield "paint v2-0, bf16", Case(lambda p: painted(p, "paint v2-0", precision="bf16"))
    for scheduler in ("euler", "lcm", "unipc"):
        yield f"paint: {scheduler}", Case(lambda p, kind=scheduler: rescheduled(p, kind))
    for form in ("gather", "scatter"):
        for exact in (False, True):
            yield (
                f"bake {form}{', exact' if exact else ''}",
                Case(lambda _, form=form, exact=exact: baked(form, exact)),
            )
    for mode in ("none", "model"):
        yield (
            f"paint v2-0, offload {mode}",
            Case(
                lambda p, mode=mode: offloaded_paint(p, "paint v2-0", mode),
                like="" if mode == "none" else "paint v2-0, offload none",
                simulated=True,
            ),
        )


def every_case() -> dict[str, Case]:
    """All cases by id, those on the simulated accelerator last: torch cannot forget a device."""
    made = [video_cases(), part_cases(), model_cases(), driven_cases(), paint_cases(), offload_cases()]
    made.append(machine_cases())
    found = [pair for cases in made for pair in cases]
    return dict(sorted(found, key=lambda pair: pair[1].simulated))


CASES = every_case()
