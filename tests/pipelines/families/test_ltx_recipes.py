"""LTX-Video's published recipes: our loop gives what Lightricks' own gives, as `published/ltx_reference.py` records."""

from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy
import pytest
import tiny
import torch
from anygpu.compat.device.execution import HOST
from anygpu.compat.errors import CheckpointError, InputError
from anygpu.compat.memory import parts
from anygpu.compat.transforms.step_cache import StepCacheSettings
from anygpu.pipelines import stages
from anygpu.pipelines.base import ImageRequest, Latents, Prompt, PromptRequest, SampleSettings, Silent
from anygpu.pipelines.families.ltx import pipeline as ltx
from anygpu.pipelines.families.ltx.pipeline import _without_attention
from anygpu.pipelines.families.ltx.spec import SPEC
from anygpu.pipelines.family import GuidanceStep, Recipe
from anygpu.pipelines.forecast.counts import batches_of
from anygpu.pipelines.forecast.seconds import planned_run
from anygpu.pipelines.latents.convert import from_core, to_core
from anygpu.pipelines.load.folder import load
from anygpu.pipelines.pictures import prepared
from anygpu.pipelines.pipeline import Pipeline
from anygpu.pipelines.requests import LoadRequest
from anygpu.pipelines.sampling import loop
from anygpu.pipelines.settings import SECOND_PASS, guidance_steps, of_checkpoint, recipe_of, with_step_cache
from anygpu.pipelines.sizes import Size
from published import ltx_runs
from safetensors.torch import load_file, save_file

FIXTURE = Path(__file__).parents[2] / "fixtures" / "published" / "ltx_recipes.safetensors"
# Two implementations of the same transformer: the same sums in another order, carried through up to ten steps.
CLOSE = {"rtol": 0, "atol": 2e-4}
SETTINGS = SampleSettings(width=ltx_runs.SIDE, height=ltx_runs.SIDE, frames=ltx_runs.FRAMES, seed=ltx_runs.SEED)


@pytest.fixture(scope="module")
def published() -> dict[str, torch.Tensor]:
    return load_file(FIXTURE)


@pytest.fixture(scope="module")
def models(tiny_folder: Path) -> dict[str, Pipeline]:
    """By the schedule that their folders say."""
    names = {"shifted": "ltx", "linear-quadratic": "ltx_condition"}
    return {kind: load(LoadRequest(tiny.build(name, tiny_folder), device="cpu")) for kind, name in names.items()}


def prompt() -> Prompt:
    rows = ltx_runs.text()
    return Prompt("ltx", {k: v[1:] for k, v in rows.items()}, {k: v[:1] for k, v in rows.items()})


def start(pipeline: Pipeline, **extra: Any) -> Latents:
    size = {"frames": ltx_runs.FRAMES, "height": ltx_runs.SIDE, "width": ltx_runs.SIDE, "fps": ltx_runs.FPS}
    return Latents(ltx_runs.start(), "ltx", "text", **size, seed=0, extra=extra)


@pytest.mark.parametrize("name", ltx_runs.CASES)
def test_each_recipe_is_sampled_as_its_publisher_samples_it(
    models: dict[str, Pipeline], published: dict[str, torch.Tensor], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The schedule, the lists by noise level, STG, the projection, new noise, the start of a second pass."""
    case = ltx_runs.CASES[name]
    second = "second" in name
    steps = case.steps or len(case.timesteps or ())
    recipe = Recipe("test", "", steps, case.guidance, case.timesteps, case.skip_first, case.skip_last)
    recipe = replace(recipe, star=case.star, stochastic=case.stochastic)
    recipe = replace(SPEC.published.recipes["dev"], second=recipe) if second else recipe
    monkeypatch.setattr(ltx, "recipe_for", lambda _: recipe)
    # 0.9.0's folder, whose transformer is the fixture's; its schedule is the case's.
    pipeline = models["shifted"]
    if case.schedule != "shifted":
        pipeline = replace(pipeline, tools=models["linear-quadratic"].tools)
    latents = start(pipeline, **{SECOND_PASS: True}) if second else None
    found = stages.sample(pipeline, prompt(), None, replace(SETTINGS, latents=latents), Silent())
    torch.testing.assert_close(found.samples, published[name], **CLOSE)


def test_upscaled_latents_get_the_spread_and_the_tones_that_are_published(published: dict[str, torch.Tensor]) -> None:
    from diffusers import LTXLatentUpsamplePipeline as Upstream

    low, high = ltx_runs.start(), ltx_runs.upscaled()
    adain: Any = Upstream.adain_filter_latent
    torch.testing.assert_close(adain(None, high.clone(), low, 1.0), published["adain"], rtol=0, atol=1e-5)
    torch.testing.assert_close(Upstream.tone_map_latents(None, high, 0.6), published["tone_map"], rtol=0, atol=1e-6)


def test_a_published_size_has_the_recipe_of_its_size(models: dict[str, Pipeline]) -> None:
    """28 blocks are 2B, 48 are 13B; steps of which a transformer lacks the blocks are without STG."""
    pipeline = models["linear-quadratic"]

    def of(variant: str, blocks: int, source: str = "ltxv.safetensors") -> Recipe:
        configs = {**pipeline.configs, "transformer": {**pipeline.configs["transformer"], "num_layers": blocks}}
        model = replace(pipeline.model, configs=configs, variant=variant, names=(Path(source).stem,))
        return ltx.recipe_for(replace(pipeline, model=model))

    assert of("dev", 28) == SPEC.published.recipes["dev"] and of("dev", 48).guidance[3].blocks == (28,)
    assert of("distilled", 48).second.tone_map == 0.6 and of("distilled", 28).second.tone_map == 0.0
    older = of("distilled", 48, "ltxv-13b-0.9.7-distilled.safetensors")
    assert (
        "upscaler-0.9.7." in older.second.nodes
        and older.second.tone_map == 0.0
        and older.timesteps == of("distilled", 48).timesteps
    )
    older = of("dev", 48, "ltxv-13b-0.9.7-dev.safetensors")
    assert "upscaler-0.9.7." in older.second.nodes and older.guidance == of("dev", 48).guidance
    for name in ("LTX_13B_Dev_V_0_9_7_GGUF_Q8_0.gguf", "LTXV.13B.097.Dev.fp8.safetensors", "v0-9-7.safetensors"):
        assert of("dev", 48, name) == older
    for name in ("ltxv-2b-0.9.6-dev-04-25.safetensors", "ltxv_2b_0_9_6_dev.safetensors", "ltxv096-dev.gguf"):
        assert of("dev", 28, name).size == (1216, 704, 30.0)
    assert of("dev", 48).guidance[1].stg == 0.0
    assert of("dev", 2).guidance == (GuidanceStep(cfg=3.0),)


def distilled(pipeline: Pipeline) -> Pipeline:
    return replace(pipeline, model=replace(pipeline.model, variant="distilled"))


def test_a_pass_shows_a_picture_in_the_shape_of_the_finished_video(models: dict[str, Pipeline]) -> None:
    """Of the published size, and of the one that is given; a recipe of one pass knows none."""
    pipeline, frames = distilled(models["linear-quadratic"]), torch.rand(1, 121, 187, 3)

    def shown(pipeline: Pipeline, width: int, *shape: int, cut: slice = slice(None), fit: str = "crop") -> torch.Tensor:
        asked = ImageRequest(frames[:, :, cut], width, {448: 288, 800: 448}[width], final_size=shape)
        return prepared(pipeline, asked, fit, Silent()).frames

    assert torch.equal(shown(pipeline, 800), shown(pipeline, 800, 1216, 704))
    assert torch.equal(shown(pipeline, 448, 704, 480), shown(pipeline, 448, cut=slice(5, 182), fit="stretch"))
    assert torch.equal(shown(models["linear-quadratic"], 448, 704, 480), shown(pipeline, 448))


def test_auto_follows_the_recipe_and_says_so(models: dict[str, Pipeline], recorded: Any) -> None:
    pipeline = models["linear-quadratic"]
    (said,) = [decision for decision in pipeline.plan.decisions if decision.subject == "recipe"]
    assert said.verdict.startswith("2B dev: 40 steps; cfg 3") and "ltxv-2b" in said.why and said.source == "auto"
    for variant, steps, size in (("dev", 40, (704, 512)), ("distilled", 7, (1216, 704)), ("distilled_0.9.6", 8, None)):
        found = of_checkpoint(replace(pipeline, model=replace(pipeline.model, variant=variant))).sizes.defaults
        assert found.steps == steps and (size is None or (found.width, found.height) == size)
        progress = recorded()
        run = replace(SETTINGS, frames=9, steps=0)
        stages.sample(replace(pipeline, model=replace(pipeline.model, variant=variant)), prompt(), None, run, progress)
        assert progress.steps[-1][:2] == (steps, steps)
        passes = [line for line in progress.said if "published passes" in line]
        assert len(passes) == (variant == "distilled")
        assert all(
            "upscaler-0.9.8.safetensors, then AnyGPU Sample (template anygpu_ltx_two_" in line for line in passes
        )


@pytest.mark.parametrize("changes", [{"cfg": 3.0, "stg": 1.0}, {"stg": 1.0}, {"cfg": 3.0, "stg": 0.0, "cfg_end": 0.5}])
def test_each_call_of_the_transformer_is_counted(
    models: dict[str, Pipeline], monkeypatch: pytest.MonkeyPatch, changes: Any, recorded: Any
) -> None:
    rows = GuidanceStep(0.9, 1.0, 0.0), GuidanceStep(0.0, 2.0, 1.0, blocks=(1,))
    monkeypatch.setattr(ltx, "recipe_for", lambda _: Recipe("", "", 4, rows))
    pipeline, ran, sizes = models["shifted"], list[int](), list[SampleSettings]()
    monkeypatch.setattr(ltx, "LtxGuidance", lambda *a, real=ltx.LtxGuidance: sizes.append(a[0]) or real(*a))
    hook = pipeline.parts["transformer"].register_forward_pre_hook(
        lambda _module, _given, named: ran.append(len(named["hidden_states"])), with_kwargs=True
    )
    progress = recorded()
    progress.time_left = {}
    stages.sample(pipeline, prompt(), None, replace(SETTINGS, frames=9, steps=4, **changes), progress)
    hook.remove()
    forwards = progress.time_left["sampling"].forwards
    assert len(forwards) == 4 and sum(forwards) == sum(ran)
    assert [*chain(*batches_of(pipeline, sizes[0]))] == ran and len(ran) > 4 - ("cfg_end" in changes)
    asked = replace(SETTINGS, frames=9, steps=4, **changes)
    run = planned_run(pipeline, Size(asked.width, asked.height, asked.frames), asked)
    assert [*chain(*batches_of(pipeline, run.settings))] == ran


def test_without_blocks_to_leave_out_no_forward_is_asked_for(models: dict[str, Pipeline], recorded: Any) -> None:
    """A model with fewer blocks than the recipe's has none of them."""
    progress = recorded()
    stages.sample(models["shifted"], prompt(), None, replace(SETTINGS, frames=9, steps=2, stg=2.0), progress)
    assert "stg has no effect: no recipe names blocks that this model could leave out" in progress.said
    (row,) = guidance_steps(Recipe("", "", 2, (GuidanceStep(0.0, 3.0, 1.0, 0.7),)), replace(SETTINGS, stg=2.0), 3.0)
    assert (row.cfg, row.stg, row.rescale) == (3.0, 0.0, 0.0)


def test_what_the_user_sets_wins_over_the_recipe(models: dict[str, Pipeline], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[GuidanceStep, ...]] = []
    real = ltx.LtxGuidance
    monkeypatch.setattr(ltx, "LtxGuidance", lambda *a: seen.append(a[0].guidance_steps) or real(*a))
    monkeypatch.setattr(
        ltx, "recipe_for", lambda _: Recipe("", "", 2, (GuidanceStep(0.5, 3.0, 1.0, 0.7, (1,)), GuidanceStep(0.0, 2.0)))
    )
    pipeline = models["shifted"]
    for changed in ({}, {"cfg": 5.0}, {"stg": 0.0}, {"stg": 2.0, "guidance_rescale": 0.3}):
        stages.sample(pipeline, prompt(), None, replace(SETTINGS, frames=9, steps=2, **changed), Silent())
    own, cfg, plain, both = seen
    assert own == (GuidanceStep(0.5, 3.0, 1.0, 0.7, (1,)), GuidanceStep(0.0, 2.0, blocks=(1,)))
    assert [step.cfg for step in cfg] == [5.0, 5.0] and cfg[0].stg == 1.0
    assert [(step.stg, step.rescale) for step in plain] == [(0.0, 0.0)] * 2
    assert [(step.stg, step.rescale, step.blocks) for step in both] == [(2.0, 0.3, (1,))] * 2


def upscaled(pipeline: Pipeline, low: Any, folder: Path, **how: bool) -> tuple[Any, torch.Tensor]:
    """Latents enlarged by the stage from a file of an upscaler, and by the network itself."""
    from diffusers import LTXPipeline
    from diffusers.pipelines.ltx.modeling_latent_upsampler import LTXLatentUpsamplerModel

    torch.manual_seed(5)
    network = LTXLatentUpsamplerModel(mid_channels=32, num_blocks_per_stage=1, **how).eval()
    save_file(network.state_dict(), folder / "upscaler.safetensors")
    found = stages.upscale(pipeline, low, folder / "upscaler.safetensors", Silent())
    vae = pipeline.parts.read("vae", Silent())
    with torch.no_grad():
        high = network(LTXPipeline._denormalize_latents(low.samples, vae.latents_mean, vae.latents_std))
    return found, LTXPipeline._normalize_latents(high, vae.latents_mean, vae.latents_std)


def test_upscaled_latents_are_the_networks_and_run_the_second_pass(models: dict[str, Pipeline], tmp_path: Path) -> None:
    from diffusers import LTXLatentUpsamplePipeline as Upstream

    pipeline, low = distilled(models["linear-quadratic"]), start(models["shifted"], final_width=64, final_height=64)
    found, high = upscaled(pipeline, low, tmp_path)
    adain: Any = Upstream.adain_filter_latent
    torch.testing.assert_close(found.samples, adain(None, high, low.samples, 1.0), rtol=0, atol=1e-5)
    assert (found.width, found.height) == (2 * low.width, 2 * low.height) and found.extra == {SECOND_PASS: True}
    assert "latent_upsampler" not in pipeline.parts.readers and "latent_upsampler" not in pipeline.parts
    again = stages.sample(pipeline, prompt(), None, SampleSettings(0, 0, 0, seed=3, latents=found), Silent())
    assert again.samples.shape == found.samples.shape and not torch.equal(again.samples, found.samples)


def test_a_temporal_upscaler_doubles_the_frames_of_the_same_seconds(
    models: dict[str, Pipeline], tmp_path: Path
) -> None:
    pipeline, low = models["linear-quadratic"], start(models["shifted"], final_width=64, final_height=64)
    found, expected = upscaled(pipeline, low, tmp_path, spatial_upsample=False, temporal_upsample=True)
    torch.testing.assert_close(found.samples, expected, rtol=0, atol=1e-5)
    assert found.extra == low.extra
    assert (found.frames, found.fps) == (2 * low.frames - 1, 2 * low.fps) and SECOND_PASS not in found.extra
    assert stages.decode(pipeline, found, Silent()).shape[0] == found.frames
    asked = SampleSettings(0, 0, 0, steps=2, seed=3, denoise=0.3, latents=found)
    again = stages.sample(pipeline, prompt(), None, asked, Silent())
    assert (again.frames, again.fps) == (found.frames, found.fps), "drawn again it would last twice as long"
    assert stages.sample(pipeline, prompt(), None, replace(asked, fps=8.0), Silent()).fps == 8.0
    assert stages.sample(pipeline, prompt(), None, replace(asked, latents=replace(low, fps=24.0)), Silent()).fps == 24.0


@pytest.mark.parametrize(("both", "words"), [(True, "enlarges in a way"), (False, "holds no latent upscaler")])
def test_another_upscaler_is_named(models: dict[str, Pipeline], tmp_path: Path, both: bool, words: str) -> None:
    from diffusers.pipelines.ltx.modeling_latent_upsampler import LTXLatentUpsamplerModel

    kind = {"spatial_upsample": True, "temporal_upsample": True} if both else {"in_channels": 16}
    file = tmp_path / "x.safetensors"
    save_file(LTXLatentUpsamplerModel(mid_channels=32, num_blocks_per_stage=1, **kind).state_dict(), file)
    with pytest.raises(CheckpointError, match=words):
        stages.upscale(models["shifted"], start(models["shifted"]), file, Silent())


def test_a_second_pass_is_only_of_upscaled_latents_that_are_denoised_whole(models: dict[str, Pipeline]) -> None:
    pipeline = distilled(models["shifted"])
    upscaled, own = start(pipeline, **{SECOND_PASS: True}), start(pipeline)
    assert recipe_of(pipeline, replace(SETTINGS, latents=upscaled)).steps == 3
    assert recipe_of(pipeline, replace(SETTINGS, latents=upscaled, denoise=0.5)).steps == 7
    assert recipe_of(pipeline, replace(SETTINGS, latents=own)).steps == 7


@pytest.mark.parametrize(
    ("changes", "begun", "whole"),
    [({"denoise": 0.9}, 3, 33), ({"denoise": 0.5}, 30, 60), ({}, 17, 30)],
)
def test_a_share_of_13bs_schedule_begins_where_it_is_asked(
    models: dict[str, Pipeline], changes: Any, begun: int, whole: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A share of it ends at 0, as core's denoise does; a second pass of one step would have none to run."""
    from diffusers.pipelines.ltx.pipeline_ltx_condition import linear_quadratic_schedule

    monkeypatch.setattr(ltx, "recipe_for", lambda _: SPEC.published.recipes["dev 13B"])
    pipeline = models["linear-quadratic"]
    settings = replace(SETTINGS, steps=30, latents=start(pipeline, **{SECOND_PASS: True}), **changes)
    found = ltx._schedule(pipeline.tools["scheduler"], settings, True, recipe_of(pipeline, settings), HOST)
    expected = (*linear_quadratic_schedule(whole)[begun:].tolist(), 0.0)
    assert len(found) == whole - begun and found.levels == pytest.approx(expected, abs=1e-6)
    with pytest.raises(InputError, match="steps 1; expected at least 2"):
        stages.sample(pipeline, prompt(), None, replace(settings, steps=1, denoise=1.0), Silent())


@pytest.mark.parametrize("variant", ["distilled", "distilled_0.9.6"])
def test_a_share_of_a_distilled_schedule_goes_down_to_nothing(
    models: dict[str, Pipeline], variant: str, monkeypatch: pytest.MonkeyPatch, recorded: Any
) -> None:
    """By trained steps, as diffusers' denoise_strength; once the last trained level was the least to begin at."""
    monkeypatch.setattr(ltx, "recipe_for", lambda _: SPEC.published.recipes[variant])
    monkeypatch.setattr(parts, "_told", set())
    pipeline, steps = models["linear-quadratic"], SPEC.published.recipes[variant].steps
    whole, watched = (*SPEC.published.recipes[variant].timesteps, 0.0), recorded()
    for denoise in (0.95, 0.5, 0.25, 0.125):
        asked = replace(SETTINGS, steps=0, latents=start(pipeline), denoise=denoise)
        recipe, settings = recipe_of(pipeline, asked), replace(asked, steps=steps)
        levels = ltx._schedule(pipeline.tools["scheduler"], settings, True, recipe, HOST).levels
        count = int(steps / denoise)
        expected = numpy.interp(numpy.linspace(0, steps, count + 1), range(steps + 1), whole)[-steps - 1 :]
        assert levels == pytest.approx(expected, abs=1e-6)
    near, far = (
        stages.sample(pipeline, prompt(), None, replace(asked, denoise=denoise), watched).samples
        for denoise in (0.02, 1.0)
    )
    clean = start(pipeline).samples
    assert (near - clean).norm() < 0.4 * (far - clean).norm()
    assert sum("earlier versions began above" in line for line in watched.said) == 1


def test_a_step_cache_acts_in_a_share_of_the_steps_that_run(
    models: dict[str, Pipeline], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = list[int]()
    monkeypatch.setattr(loop, "cached", lambda *given, real=loop.cached: counts.append(given[2]) or real(*given))
    monkeypatch.setattr(ltx, "recipe_for", lambda _: SPEC.published.recipes["dev 13B"])
    pipeline = with_step_cache(models["linear-quadratic"], "quality", StepCacheSettings())
    second = start(pipeline, **{SECOND_PASS: True})
    for given in ({"steps": 30}, {"steps": 30, "latents": second}, {"sigmas": (1.0, 0.5, 0.0)}):
        stages.sample(pipeline, prompt(), None, replace(SETTINGS, frames=9, stg=0.0, **given), Silent())
    assert counts == [27, 13, 2]


def test_a_second_pass_ends_at_the_size_that_is_asked(models: dict[str, Pipeline], recorded: Any) -> None:
    """As Lightricks' own ends: bilinear, whatever twice the first pass's size is; that size itself asks for nothing."""
    pipeline, watched = distilled(models["shifted"]), recorded()
    upscaled, side = start(pipeline, **{SECOND_PASS: True}), ltx_runs.SIDE
    own, asked, first, usual = (
        stages.sample(pipeline, prompt(), None, replace(SETTINGS, latents=upscaled, **size), watched)
        for size in (
            {},
            {"width": 48, "height": 40},
            {"width": side // 2, "height": side // 2},
            {"width": 0, "height": 0},
        )
    )
    assert "decoded frames are resized to 48x40" in watched.said
    assert not any("published passes" in line for line in watched.said)
    for _ in range(2):
        other = replace(SETTINGS, latents=replace(upscaled, fps=24.0), steps=1)
        assert stages.sample(pipeline, prompt(), None, other, watched).fps == 24.0
    assert watched.said.count("24 fps, as its latents have; earlier versions took 25") == 1
    assert all(torch.equal(one.samples, own.samples) for one in (asked, first, usual))
    whole, final = (stages.decode(pipeline, one, Silent()) for one in (own, asked))
    wanted = torch.nn.functional.interpolate(whole.permute(0, 3, 1, 2), size=(40, 48), mode="bilinear")
    torch.testing.assert_close(final, wanted.permute(0, 2, 3, 1), rtol=0, atol=1e-6)
    assert whole.shape[1:3] == stages.decode(pipeline, first, Silent()).shape[1:3] == (side, side)
    kept = from_core(pipeline, to_core(asked), watched.notify)
    assert stages.decode(pipeline, kept, Silent()).shape == final.shape


def test_attention_comes_back(models: dict[str, Pipeline]) -> None:
    transformer = models["shifted"].parts.read("transformer", Silent())
    before = [vars(block.attn1).get("forward") for block in transformer.transformer_blocks]
    with pytest.raises(ZeroDivisionError), _without_attention(transformer, (0, 1)):
        assert all("forward" in vars(block.attn1) for block in transformer.transformer_blocks)
        1 / 0  # noqa: B018
    assert [vars(block.attn1).get("forward") for block in transformer.transformer_blocks] == before


def test_a_picture_that_no_text_encoder_sees_is_in_no_receipt(models: dict[str, Pipeline]) -> None:
    request = PromptRequest("a fox", image=torch.zeros(1, 64, 64, 3))
    assert "looks_at" not in stages.encode_prompt(models["shifted"], request, Silent()).extra


def test_a_shortage_of_an_upscaler_is_not_the_transformers(
    models: dict[str, Pipeline], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which leaves the device for it then, and keeps its mode."""
    made, asked = stages.make_room_and_retry, list[Any]()
    monkeypatch.setattr(
        stages, "make_room_and_retry", lambda *given, **more: asked.append(given[2]) or made(*given, **more)
    )
    upscaled(distilled(models["linear-quadratic"]), start(models["shifted"]), tmp_path)
    assert asked == [("vae",)]
