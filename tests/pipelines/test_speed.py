"""Speed as a user meets it: what is said, what a step cache skips and what is refused."""

from dataclasses import replace
from typing import Any

import pytest
import tiny
import torch
from anygpu.compat.decision import Decision
from anygpu.compat.errors import InputError, UnsupportedError
from anygpu.compat.transforms import step_cache
from anygpu.compat.transforms.attention import Attention
from anygpu.compat.transforms.compile import CompileSettings
from anygpu.compat.transforms.fused import CHOICES as KERNELS
from anygpu.compat.transforms.step_cache import FIRST_BLOCK, PYRAMID, TAYLOR, StepCacheSettings, settings_for
from anygpu.pipelines import speed as speed_choices
from anygpu.pipelines import stages
from anygpu.pipelines.base import FramePackSettings, ImageRequest, PromptRequest, SampleSettings
from anygpu.pipelines.families.ltx import pipeline as ltx
from anygpu.pipelines.load.folder import load
from anygpu.pipelines.load.lora import with_lora
from anygpu.pipelines.requests import LoadRequest
from anygpu.pipelines.settings import with_step_cache
from anygpu.pipelines.speed import Speed, SpeedRequest, form_for
from safetensors.torch import save_file
from simulated import test_families as common
from simulated.test_families import CASES, PICTURE

CHECKPOINTS = ("ltx", "hunyuan_video", "hunyuan_video image", "hunyuan_video_15", "framepack", "mochi")
FRAMES = {"ltx": 9, "mochi": 7}
STEPS = 8
PLAIN = SpeedRequest()


def loaded_for(name: str, folder: Any, speed: SpeedRequest = PLAIN) -> Any:
    return common.loaded_for(CASES[name], folder, "cpu", speed=speed)


def sampled(pipeline: Any, progress: Any, cfg: float = 1.0, **more: Any) -> torch.Tensor:
    pictured = pipeline.model.task == "image"
    looks = "image" in pipeline.spec.recipes.effective
    with torch.no_grad():
        image = stages.encode_image(pipeline, ImageRequest(PICTURE, 64, 64), "stretch", progress) if pictured else None
        request = PromptRequest("a red fox", "blurry", image=PICTURE if pictured and looks else None)
        prompt = stages.encode_prompt(pipeline, request, progress)
        settings = SampleSettings(64, 64, FRAMES.get(pipeline.family, 5), steps=STEPS, seed=3, cfg=cfg, **more)
        if pipeline.family == "framepack":
            framepack = FramePackSettings(13 / 30, window=2)
            return stages.sample_framepack(pipeline, prompt, image, settings, framepack, progress).samples
        return stages.sample(pipeline, prompt, image, settings, progress).samples


ACTING = [
    pytest.param(name, kind, marks=[] if kind == FIRST_BLOCK and name == "ltx" else [pytest.mark.full])
    for name in CHECKPOINTS
    for kind in (FIRST_BLOCK, TAYLOR, PYRAMID)
]


@pytest.mark.full
@pytest.mark.parametrize(("name", "kind"), ACTING)
def test_each_offered_kind_skips_and_is_gone_afterwards(tiny_folder, recorded, name, kind):
    pipeline = loaded_for(name, tiny_folder)
    plain = sampled(pipeline, recorded())
    before = {n: vars(m).get("forward") for n, m in pipeline.parts["transformer"].named_modules()}
    quick = with_step_cache(pipeline, "custom", StepCacheSettings(kind, 0.4, 3))
    found = []
    for _ in range(2):
        progress = recorded()
        found.append(sampled(quick, progress))
        said = [line for line in progress.said if line.startswith("step cache ")]
        assert len(said) == 1 and " 0% of" not in said[0] and "% of" in said[0], said
    assert torch.equal(found[0], found[1]), "something was kept from the run before"
    assert not torch.equal(found[0], plain)
    assert torch.equal(sampled(pipeline, recorded()), plain), "the pipeline it was made from changed"
    assert {n: vars(m).get("forward") for n, m in pipeline.parts["transformer"].named_modules()} == before


def test_the_number_that_is_said_is_what_ran(tiny_folder, recorded):
    pipeline, ran = loaded_for("ltx", tiny_folder), []
    blocks = list(pipeline.parts["transformer"].transformer_blocks)
    for block in blocks:  # the attention of a block runs when, and only when, the block does
        block.attn1.register_forward_hook(lambda *_: ran.append(1))
    progress = recorded()
    sampled(with_step_cache(pipeline, "custom", StepCacheSettings(FIRST_BLOCK, 0.4)), progress)
    line = next(line for line in progress.said if line.startswith("step cache "))
    whole = STEPS * len(blocks)
    assert len(ran) < whole and f"({whole - len(ran)} of {whole})" in line


def test_the_first_run_with_a_lora_skips_what_the_second_does(tiny_folder, recorded, tmp_path):
    pipeline = loaded_for("ltx", tiny_folder, SpeedRequest("reference"))
    width = pipeline.parts["transformer"].transformer_blocks[0].attn1.to_q.in_features
    names = (f"transformer.transformer_blocks.0.attn1.to_q.lora_{end}.weight" for end in "AB")
    tensors = dict(zip(names, (torch.full((2, width), 0.1), torch.full((width, 2), 0.1)), strict=True))
    save_file(tensors, tmp_path / "lora.safetensors")
    adapted = with_lora(pipeline, tmp_path / "lora.safetensors", 1.0, "", "separate", recorded())
    quick, said = with_step_cache(adapted, "custom", StepCacheSettings(FIRST_BLOCK, 0.4)), []
    for _ in range(2):
        sampled(quick, progress := recorded())
        said.append([line for line in progress.said if line.startswith("step cache ")])
    assert said[0] == said[1] and "100% of block" not in said[0][0]


@pytest.mark.full
def test_beside_guidance_without_attention_each_branch_skips(tiny_folder, recorded, monkeypatch):
    """LTX-Video's own guidance, in a whole run: one more forward in each step, of another batch."""
    within = ltx._within

    def in_block(step):  # the tiny one has no 19th
        return replace(step, blocks=(1,) if step.blocks else ())

    def own(recipe, count):
        return within(replace(recipe, guidance=tuple(map(in_block, recipe.guidance))), count)

    monkeypatch.setattr(ltx, "_within", own)
    pipeline = loaded_for("ltx", tiny_folder)
    plain, whole = sampled(pipeline, recorded(), cfg=2.0), STEPS * 2 * 2
    progress = recorded()
    quick = with_step_cache(pipeline, "custom", StepCacheSettings(FIRST_BLOCK, 0.4))
    found = sampled(quick, progress, cfg=2.0)
    line = next(line for line in progress.said if line.startswith("step cache "))
    assert torch.isfinite(found).all() and not torch.equal(found, plain)
    assert f" of {2 * STEPS} passes" in line and f" of {whole})" in line and " 0% of" not in line, line
    with pytest.raises(UnsupportedError, match="'pyramid' with stg 1"):
        sampled(with_step_cache(pipeline, "custom", StepCacheSettings(PYRAMID)), recorded(), cfg=2.0)


@pytest.mark.full
def test_outside_of_its_share_of_the_steps_it_changes_nothing(tiny_folder, recorded):
    pipeline = loaded_for("ltx", tiny_folder)
    plain = sampled(pipeline, recorded())
    for kind in (FIRST_BLOCK, TAYLOR, PYRAMID):
        late = with_step_cache(pipeline, "custom", StepCacheSettings(kind, 0.4, 2, start=0.99))
        assert torch.equal(sampled(late, recorded()), plain), kind


@pytest.mark.full
def test_kept_on_the_host_it_gives_the_same(tiny_folder, recorded):
    pipeline = loaded_for("hunyuan_video", tiny_folder)
    for kind in (FIRST_BLOCK, PYRAMID):
        asked = StepCacheSettings(kind, 0.4, 2)
        there = sampled(with_step_cache(pipeline, "custom", asked), recorded())
        host = StepCacheSettings(kind, 0.4, 2, device="cpu")
        assert torch.equal(sampled(with_step_cache(pipeline, "custom", host), recorded()), there)


@pytest.mark.parametrize("name", ["ltx", pytest.param("mochi", marks=pytest.mark.full)])
def test_guidance_that_ends_on_the_way_starts_with_nothing_kept(tiny_folder, recorded, name):
    quick = with_step_cache(loaded_for(name, tiny_folder), "custom", StepCacheSettings(FIRST_BLOCK, 0.4))
    assert torch.isfinite(sampled(quick, recorded(), cfg=2.0, cfg_end=0.5)).all()


@pytest.mark.full
def test_a_cancel_takes_the_cache_off(tiny_folder, recorded):
    pipeline = loaded_for("ltx", tiny_folder)
    plain = sampled(pipeline, recorded())
    quick = with_step_cache(pipeline, "fast", StepCacheSettings())
    with pytest.raises(recorded.Cancelled):
        sampled(quick, recorded(cancel_at=lambda done, stage: stage == "sampling" and done == 2))
    assert torch.equal(sampled(pipeline, recorded()), plain)


def test_pairs_that_share_state_are_refused(tiny_folder, recorded):
    pipeline = loaded_for("hunyuan_video", tiny_folder)
    shared = with_step_cache(pipeline, "custom", StepCacheSettings(PYRAMID))
    with pytest.raises(UnsupportedError, match="step cache 'pyramid' with cfg 2: it stores one result for both"):
        sampled(shared, recorded(), cfg=2.0)
    compiled = loaded_for("ltx", tiny_folder, SpeedRequest(compile=CompileSettings(backend="eager")))
    with pytest.raises(UnsupportedError, match="step cache 'taylor' with compile"):
        sampled(with_step_cache(compiled, "custom", StepCacheSettings(TAYLOR)), recorded())


def test_first_block_works_with_compiled_blocks(tiny_folder, recorded):
    torch._dynamo.reset()
    asked = StepCacheSettings(FIRST_BLOCK, 0.4)
    plain = sampled(with_step_cache(loaded_for("ltx", tiny_folder), "custom", asked), recorded())
    compiled = loaded_for("ltx", tiny_folder, SpeedRequest(compile=CompileSettings(backend="eager")))
    assert torch.equal(sampled(with_step_cache(compiled, "custom", asked), recorded()), plain)
    assert compiled.plan.speed.compiled["transformer"].graphs == 1


@pytest.mark.parametrize(
    ("preset", "asked", "error", "said"),
    [
        ("slow", StepCacheSettings(), InputError, "preset 'slow'"),
        ("fast", StepCacheSettings("mag"), UnsupportedError, "step cache kind 'mag'; expected one of auto"),
        ("custom", StepCacheSettings(threshold=2.0), InputError, "threshold 2.0; expected 1e-06 to 1"),
        ("custom", StepCacheSettings(interval=1), InputError, "interval 1"),
        ("fast", StepCacheSettings(start=0.5, end=0.5), InputError, "start 0.5 at or after end 0.5.* Lower start"),
        ("fast", StepCacheSettings(start=0.0, end=0.0), InputError, "start 0 at or after end 0.* Raise end"),
        (
            "fast",
            StepCacheSettings(end=float("nan")),
            InputError,
            "end nan; expected 0 to 1. The nearest valid value is 0",
        ),
        ("fast", StepCacheSettings(device="disk"), InputError, "cache device 'disk'"),
    ],
)
def test_what_is_refused(preset, asked, error, said):
    with pytest.raises(error, match=said):
        settings_for(preset, asked)


def test_off_and_presets():
    def chosen(preset):
        asked = StepCacheSettings(threshold=0.01)
        return settings_for(preset, asked)

    assert chosen("off") is None
    assert chosen("fast").threshold == step_cache.PRESETS["fast"][0]
    assert chosen("custom").threshold == 0.01


def test_the_line_says_what_runs(tiny_folder, recorded, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    asked = SpeedRequest("reference", CompileSettings(backend="eager"))
    pipeline, progress = loaded_for("ltx", tiny_folder, asked), recorded()
    assert {"kernels reference: chosen", "compile on: chosen"} <= set(map(str, pipeline.plan.decisions))
    sampled(pipeline, progress)
    lines = [line for line in progress.said if "fusion points" in line]
    assert len(lines) == 1 and lines[0].startswith(
        "LTX-Video: 12 of 12 fusion points (reference), attention flash, compile on:"
    )
    plain = loaded_for("ltx", tiny_folder)
    verdicts = {decision.subject: decision.verdict for decision in plain.plan.decisions}
    assert verdicts["kernels"] == verdicts["compile"] == "off"


def test_explicit_kernels_that_cannot_run_are_an_error(tiny_folder):
    with pytest.raises(UnsupportedError, match="kernels 'triton' on cpu"):
        loaded_for("ltx", tiny_folder, SpeedRequest("triton"))


def test_compile_with_auto_does_without_a_host_that_it_cannot_have(tiny_folder):
    asked: list[str] = []

    def hosted(*_: Any) -> Any:
        asked.append("host")
        raise AssertionError("the host's offloader was taken")

    compiled = SpeedRequest(compile=CompileSettings(backend="eager"))
    path = tiny.build("ltx", tiny_folder)
    pipeline = load(LoadRequest(path, device="cpu", speed=compiled), hosted=hosted)
    assert any("offload auto does without comfyui" in decision.why for decision in pipeline.plan.decisions)
    with pytest.raises(AssertionError, match="was taken"):
        load(LoadRequest(path, device="cpu"), hosted=hosted)


def test_choices_of_kernels():
    cpu = torch.device("cpu")
    assert KERNELS == ("auto", "off", "triton", "reference")
    assert form_for("auto", cpu, torch.float32)[0] == "" and "cpu" in form_for("auto", cpu, torch.float32)[1].why
    assert form_for("off", cpu, torch.float32) == ("", Decision("kernels", "off", "", "chosen"))
    assert form_for("reference", cpu, torch.float32)[0] == "reference"
    with pytest.raises(UnsupportedError, match="kernels 'triton' on cpu"):
        form_for("triton", cpu, torch.float32)
    with pytest.raises(InputError, match="expected one of auto, off, triton, reference"):
        form_for("fast", cpu, torch.float32)
    with pytest.raises(UnsupportedError, match="float64 is not one of"):
        form_for("triton", torch.device("cuda"), torch.float64)


def test_layers_of_several_transformers_are_counted_together(monkeypatch, recorded):
    """Of which the last to be read may have none."""
    counts = {"transformer": 3, "transformer_2": 0}
    monkeypatch.setattr(speed_choices, "multiply_as_stored", lambda module, _: (counts[module], None))
    speed = Speed(SpeedRequest(), {}, Decision("kernels", "off"), Attention(), formats=("int8",))
    progress = recorded()
    for part in ("transformer", "transformer", "transformer_2"):  # the first is read twice
        speed._multiply(part, part)
    speed.notify("Duet", progress.notify)
    assert len(progress.said) == 1 and "3 layers multiplied as stored" in progress.said[0]
