"""A device that zeroes floats of 16 bits between host and device, however they are copied: nothing of ours notices."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from anygpu.compat.checkpoints.identity import bytes_of, picture_content
from anygpu.compat.checkpoints.latents import read_record, write_record
from anygpu.compat.checkpoints.weights import write_tensors
from anygpu.compat.device.execution import BITS, HALVES, placed, to_host
from anygpu.compat.device.precision import SAFE
from anygpu.compat.errors import UnsupportedError
from anygpu.compat.transforms.step_cache import FIRST_BLOCK, TAYLOR, StepCacheSettings
from anygpu.paint import texturing
from anygpu.paint.loading import PaintRequest, load_paint
from anygpu.paint.networks.encoders import dino_states, encoded_prompt
from anygpu.paint.pictures import checked_pictures, cut_out
from anygpu.paint.sampling.painting import paint_views
from anygpu.pipelines import stages
from anygpu.pipelines.base import EMBEDS, MASK, POOLED, Latents, Prompt, PromptRequest, SampleSettings, Silent
from anygpu.pipelines.latents import convert, musubi, recovery, store
from anygpu.pipelines.latents.prompt_files import load_prompt, save_prompt
from anygpu.pipelines.latents.steps import SavedSteps
from anygpu.pipelines.pictures import checked_frames, checked_vision
from anygpu.pipelines.pipeline import Pipeline
from anygpu.pipelines.records.receipts import latents_hash
from anygpu.pipelines.settings import with_step_cache
from anygpu.pipelines.text.llama import llama_from_core
from anygpu.pipelines.text.qwen import qwen_from_core
from anygpu.pipelines.text.t5 import t5_from_core
from paint.conftest import delight_folder, paint_folder, pbr_folder  # noqa: F401
from paint.shapes import box
from paint.stored import any_text, checkpoint
from paint.test_offloader import INPUTS
from paint.test_offloader import SETTINGS as PAINT

from simulated import accelerator, profiles
from simulated.test_drawn import Cut
from simulated.test_families import CASES, MODES, Case, loaded_for, rendered
from simulated.test_paint import PICTURE, SETTINGS

BF16, FP16 = HALVES
RADEON = "gfx1201"  # a machine without other faults on which `auto` takes 16 bits
FULL = pytest.mark.full


def facts(device: torch.device) -> Any:
    return profiles.facts_of(RADEON, device)


# ---- the device, and the one exact way ----------------------------------------------------------------------------

SPELT: dict[str, Callable[[torch.Tensor], Any]] = {
    "cpu": lambda x: x.cpu(),
    "to": lambda x: x.to("cpu"),
    "to with a dtype": lambda x: x.to("cpu", torch.float32),
    "to like another": lambda x: x.to(torch.zeros(1)),
    "non_blocking": lambda x: x.to("cpu", non_blocking=True),
    "copy_": lambda x: torch.ones(x.shape, dtype=x.dtype).copy_(x),
    "copy_ of a slice": lambda x: torch.ones(4).copy_(x[:4]),
    "copy_ into pinned memory": lambda x: torch.ones(x.shape, dtype=x.dtype).pin_memory().copy_(x, non_blocking=True),
    "setitem": lambda x: torch.stack([torch.ones(8).index_put((torch.arange(8),), x.cpu().float())]),
    "item": lambda x: x[0].item(),
    "float": lambda x: float(x[0]),
    "tolist": lambda x: x.tolist(),
    "as_tensor": lambda x: torch.as_tensor(x, device="cpu"),
    "type": lambda x: x.type(torch.FloatTensor),
}


@pytest.mark.parametrize("dtype", HALVES)
def test_a_copy_is_zeroed_however_it_is_spelt_and_integers_arrive(acc, dtype):
    here = torch.arange(1, 9).to(dtype)
    there = placed(here, acc)
    other = FP16 if dtype is BF16 else BF16
    with accelerator.zeroed_copies(dtype) as zeroed:
        for name, copy in SPELT.items():
            before = zeroed()
            assert not torch.as_tensor(copy(there)).any() and zeroed() > before, name
        assert there.to(acc, other).cpu().all() and there.float().cpu().all(), "another dtype travels"
        before = zeroed()
        for tensor in (there, there[::2], there.view(2, 4).t(), there[0], there[:0], there.requires_grad_()):
            assert torch.equal(to_host(tensor), to_host(tensor.to(other)).to(dtype)), "small integers are exact in both"
        assert zeroed() == before
    with accelerator.zeroed_copies(dtype, to_host=False, to_device=True) as zeroed:
        assert not here.to(acc).view(BITS).cpu().any() and zeroed() == 1
        assert torch.equal(to_host(placed({"x": [here]}, acc)["x"][0]), here) and zeroed() == 1


# ---- every family ------------------------------------------------------------------------------------------------


def opened(case: Case, folder: Path, device: torch.device, precision: str, offload: str, state: Any = None) -> Pipeline:
    return loaded_for(case, folder, facts(device), offload, precision, state=state)


SAMPLE = {("ltx", "auto", BF16, "group")}
CELLS = [
    pytest.param(*cell, marks=[] if cell in SAMPLE else [FULL])
    for name in CASES
    for precision, dtype in (("auto", BF16), ("bf16", BF16), ("fp16", FP16), (SAFE, FP16))
    for offload in MODES
    for cell in [(name, precision, dtype, offload)]
]


@pytest.mark.parametrize(("name", "precision", "dtype", "offload"), CELLS)
def test_a_family_gives_the_same_bits_and_copies_no_float_of_16_bits(acc, tiny_folder, name, precision, dtype, offload):
    case = CASES[name]
    healthy = rendered(opened(case, tiny_folder, acc, precision, offload), case)
    with accelerator.zeroed_copies(dtype, to_device=True) as zeroed:
        pipeline = opened(case, tiny_folder, acc, precision, offload)
        found = rendered(pipeline, case)
        assert zeroed() == 0
    assert dtype in (pipeline.precision.transformer, pipeline.precision.text, pipeline.precision.vae)
    assert all(map(torch.equal, found, healthy))


@FULL
@pytest.mark.parametrize("kind", (FIRST_BLOCK, TAYLOR))
@pytest.mark.parametrize("name", ("ltx", "hunyuan_video", "hunyuan_video_15", "framepack"))
def test_a_step_cache_skips_the_same_steps(acc, tiny_folder, recorded, name, kind):
    """Its comparison is diffusers' own, which reads one number of 16 bits per step."""
    case = CASES["framepack" if name == "framepack" else name]

    def run() -> tuple[torch.Tensor, list[str]]:
        pipeline, progress = opened(case, tiny_folder, acc, "bf16", "none"), recorded()
        quick = with_step_cache(pipeline, "custom", StepCacheSettings(kind, 0.4, 3, device="cpu"))
        return rendered(quick, case, progress, steps=8)[0], [s for s in progress.said if s.startswith("step cache ")]

    healthy, said = run()
    assert said and " 0% of" not in said[0], said
    with accelerator.zeroed_copies(BF16, to_device=True) as zeroed:
        found, again = run()
        assert zeroed() == 0
    assert torch.equal(found, healthy) and again == said


# ---- what arrives from other nodes on the device, and what is written --------------------------------------------


def video(samples: torch.Tensor) -> Latents:
    return Latents(samples, "ltx", "text", 9, 64, 64, 24.0, 0)


def saved(tensors: dict[str, torch.Tensor], folder: Path, write: Callable[..., Any]) -> Any:
    return read_record(write(folder / "x.safetensors", tensors, {}), "tensors")[0]


def text(embeds: torch.Tensor) -> Prompt:
    mask = torch.ones(1, embeds.shape[1], dtype=torch.long)
    return Prompt("hunyuan_video", {EMBEDS: embeds, MASK: mask, POOLED: embeds[:, 0]})


TAKEN: dict[str, tuple[tuple[int, ...], Callable[[torch.Tensor, Path], Any]]] = {
    "T5 states of core": ((1, 5, 8), lambda x, folder: t5_from_core(x, {})),
    "Llama states of core": ((1, 5, 8), lambda x, folder: llama_from_core(x, {"pooled_output": x[:, 0]})),
    "Qwen states of core": ((1, 5, 8), lambda x, folder: qwen_from_core(x, {"conditioning_byt5small": x})),
    "vision states": ((1, 4, 8), lambda x, folder: checked_vision(x, 4, 8)),
    "start pictures": ((2, 4, 4, 3), lambda x, folder: checked_frames(x, "image")),
    "reference pictures": ((2, 4, 4, 3), lambda x, folder: checked_pictures(x, "image")),
    "masks": ((2, 4, 4), lambda x, folder: cut_out(torch.ones(2, 4, 4, 3), x)),
    "a picture's hash": ((2, 4, 4, 3), lambda x, folder: picture_content(x)),
    "bytes": ((2, 4), lambda x, folder: bytes_of(x)),
    "a receipt's hash": ((1, 8, 2, 2, 2), lambda x, folder: latents_hash(video(x))),
    "tensors": ((2, 4), lambda x, folder: saved({"x": x}, folder, write_tensors)),
    "a record": ((2, 4), lambda x, folder: saved({"x": x}, folder, write_record)),
    "a saved prompt": (
        (1, 5, 8),
        lambda x, folder: load_prompt(save_prompt(folder / "p.safetensors", text(x)), print).embeds,
    ),
    "a text cache": (
        (1, 5, 8),
        lambda x, folder: read_record(musubi.save_text_cache(folder, "clip", text(x), dtype="bfloat16"), "text")[0],
    ),
    "a saved latent": (
        (1, 8, 2, 2, 2),
        lambda x, folder: store.load_latent(
            store.save_latent(folder / "l.safetensors", convert.to_core(video(x)), print), print
        )["samples"],
    ),
    "a recovered latent": (
        (1, 8, 2, 2, 2),
        lambda x, folder: recovery.load(folder, recovery.save(folder, video(x), print), print)["samples"],
    ),
}


def flat(value: Any) -> list[Any]:
    """Every tensor in ``value`` as its bits, and what is no tensor as it is."""
    if isinstance(value, torch.Tensor):
        return [value.dtype, tuple(value.shape), bytes_of(value)]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else None
    return [value] if items is None else [part for item in items for part in flat(item)]


@pytest.mark.parametrize("dtype", HALVES)
def test_what_others_leave_on_the_device_is_taken_and_written_exactly(acc, tmp_path, dtype):
    for number, (name, (shape, take)) in enumerate(TAKEN.items()):
        here = torch.rand(shape, generator=torch.Generator().manual_seed(number)).to(dtype)
        folders = [tmp_path / f"{number}{end}" for end in "ab"]
        for folder in folders:
            folder.mkdir()
        expected = flat(take(here, folders[0]))
        with accelerator.zeroed_copies(dtype, to_device=True) as zeroed:
            assert flat(take(placed(here, acc), folders[1])) == expected, name
            assert zeroed() == 0, name


@FULL
@pytest.mark.parametrize("after", (1, 2))
@pytest.mark.parametrize("name", ("ltx", "mochi", "hunyuan_video", "hunyuan_video_15"))
def test_a_run_goes_on_from_its_step_file_with_the_same_bits(acc, tiny_folder, tmp_path, name, after):
    case = CASES[name]

    def sampled(progress: Any, kept: Path | None) -> tuple[torch.Tensor, list[Any]]:
        pipeline = opened(case, tiny_folder, acc, "bf16", "model")
        prompt = stages.encode_prompt(pipeline, PromptRequest("a red fox", "blurry"), Silent())
        prompt = load_prompt(save_prompt(tmp_path / "prompt.safetensors", prompt), print)
        steps = None if kept is None else SavedSteps(kept, print, share=float("inf"))
        settings = SampleSettings(64, 64, case.frames, steps=3, seed=3, cfg=2.0)
        return stages.sample(pipeline, prompt, None, settings, progress, steps).samples, previews

    class Seen(Silent):
        def step(self, done: int, total: int, stage: Any, preview: Any = None) -> None:
            if preview is not None:
                previews.append(to_host(preview()))

    with torch.no_grad():
        previews: list[torch.Tensor] = []
        healthy, seen = sampled(Seen(), None)
        with accelerator.zeroed_copies(BF16, to_device=True) as zeroed:
            previews = []
            whole, again = sampled(Seen(), None)
            with pytest.raises(KeyboardInterrupt):
                sampled(Cut(after), tmp_path)
            assert list(tmp_path.glob("*")), "nothing was kept"
            assert torch.equal(sampled(Silent(), tmp_path)[0], healthy)
            assert zeroed() == 0
    assert torch.equal(whole, healthy)
    assert len(seen) == len(again) > 0 and all(map(torch.equal, again, seen))


# ---- paint ---------------------------------------------------------------------------------------------------------


def textured(folders: dict[str, Path], device: torch.device, offload: str) -> list[torch.Tensor]:
    """A texture and its views, painted after a delighted picture, and views of the other paint model."""
    given = {"device": facts(device), "offload": offload}
    paint, delight = (load_paint(PaintRequest(folders[kind], **given)) for kind in ("paint", "delight"))
    texture, views, _ = texturing.textured(box(), [PICTURE], paint, delight, SETTINGS)
    pbr = load_paint(PaintRequest(folders["paint_pbr"], **given))
    assert {one.precision.transformer for one in (paint, delight, pbr)} == {FP16}
    return [texture.colour, texture.painted, views.views, paint_views(pbr, INPUTS, PAINT).views]


@FULL
@pytest.mark.parametrize("offload", MODES)
@any_text()
def test_paint_and_delight_give_the_same_bits(acc, paint_folder, pbr_folder, delight_folder, offload):  # noqa: F811
    folders = {"paint": paint_folder, "paint_pbr": pbr_folder, "delight": delight_folder}
    healthy = textured(folders, acc, offload)
    with accelerator.zeroed_copies(FP16, to_device=True) as zeroed:
        assert all(map(torch.equal, textured(folders, acc, offload), healthy))
        assert zeroed() == 0


@FULL
def test_the_encoders_of_paint_give_the_same_bits(acc, tmp_path):
    from transformers import CLIPTextConfig, CLIPTextModel, Dinov2Config, Dinov2Model

    shape = {"num_hidden_layers": 1, "num_attention_heads": 2}
    dino = Dinov2Config(hidden_size=1536, mlp_ratio=1, image_size=224, **shape)
    Dinov2Model(dino).save_pretrained(tmp_path / "dino")
    delight, pbr = checkpoint("delight", tmp_path), checkpoint("paint_pbr", tmp_path)
    clip = CLIPTextConfig(vocab_size=49408, hidden_size=64, intermediate_size=32, projection_dim=8, **shape)
    CLIPTextModel(clip).save_pretrained(delight / "text_encoder")

    def encoded() -> list[torch.Tensor]:
        looking = load_paint(PaintRequest(pbr, image_encoder=tmp_path / "dino", device=facts(acc)))
        reading = load_paint(PaintRequest(delight, device=facts(acc)))
        assert {looking.precision.text, reading.precision.text} == {FP16}
        return [dino_states(looking, INPUTS.references[0], Silent(), {}), encoded_prompt(reading, "", Silent())]

    healthy = encoded()
    with accelerator.zeroed_copies(FP16, to_device=True) as zeroed:
        assert all(map(torch.equal, encoded(), healthy))
        assert zeroed() == 0
    assert all(states.any() for states in healthy)


# ---- what the user is told ------------------------------------------------------------------------------------------


def told(pipeline: Any) -> list[str]:
    return [str(decision) for decision in pipeline.plan.decisions if decision.subject == "copies"]


def test_load_says_that_values_travel_as_integers_where_plain_copies_fail(acc, tiny_folder, tmp_path):
    assert not told(opened(CASES["ltx"], tiny_folder, acc, "auto", "none", tmp_path / "healthy"))
    with accelerator.zeroed_copies(BF16):
        pipeline = opened(CASES["ltx"], tiny_folder, acc, "auto", "none", tmp_path / "faulty")
        assert pipeline.precision.transformer is BF16
        (line,) = told(pipeline)
        assert line.startswith("copies 16-bit values as integers: auto: copy.bf16 is wrong: 6")
        assert not told(opened(CASES["ltx"], tiny_folder, acc, "fp32", "none", tmp_path / "faulty"))


def test_where_integers_fail_too_bf16_is_refused_and_auto_takes_fp32(acc, tiny_folder, tmp_path):
    def lost(_name: str, arguments: list, _results: list) -> None:
        target, source = arguments[:2]
        if source.device.type == accelerator.NAME and target.device.type == "cpu" and target.dtype in (BITS, BF16):
            target.zero_()

    with accelerator.hook("aten::copy_", after=lost):
        with pytest.raises(UnsupportedError, match=r"precision 'bf16' cannot run .*; expected one of auto, fp32"):
            opened(CASES["ltx"], tiny_folder, acc, "bf16", "none", tmp_path)
        with pytest.raises(UnsupportedError, match="returns other bits of bfloat16 than it was given"):
            rendered(opened(CASES["ltx"], tiny_folder, acc, "bf16", "group"), CASES["ltx"])
        pipeline = opened(CASES["ltx"], tiny_folder, acc, "auto", "none", tmp_path)
        assert pipeline.precision.transformer is torch.float32
        frames = rendered(pipeline, CASES["ltx"])[1]
    assert torch.equal(frames, rendered(opened(CASES["ltx"], tiny_folder, acc, "fp32", "none"), CASES["ltx"])[1])
