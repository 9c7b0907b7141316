"""Runs correct the forecast of runs that do the same work at the same rate, and at first of what changes its speed."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from anygpu.compat.device import precision as precisions
from anygpu.compat.device.work import Pace
from anygpu.compat.memory.statistics import FILE, saved_stages
from anygpu.compat.transforms.attention import Attention
from anygpu.compat.transforms.compile import CompileSettings
from anygpu.compat.transforms.step_cache import StepCacheSettings
from anygpu.pipelines.base import SampleSettings, Silent
from anygpu.pipelines.family import GuidanceStep
from anygpu.pipelines.forecast import seconds as forecast
from anygpu.pipelines.forecast import times
from anygpu.pipelines.forecast.seconds import DECODING, SAMPLING, Run
from anygpu.pipelines.load.folder import load
from anygpu.pipelines.pipeline import Checkpoint, Device, Pipeline, PipelinePlan, RunOptions
from anygpu.pipelines.requests import LoadRequest
from anygpu.pipelines.sizes import Size
from anygpu.pipelines.speed import Speed, SpeedRequest
from anygpu.pipelines.stages import DECODING as DECODE
from anygpu.pipelines.stages import SAMPLING as SAMPLE
from anygpu.pipelines.stages import running
from anygpu.pipelines.vae.plan import DecodeRequest
from tiny import build

PACE = Pace(1e9, 1e9, 1e9, 1e9, 0.0)
ASKED = Size(64, 64, 9)
GROUPS = ("model", "device", "plan", "run")  # of a pipeline, whose fields are the choices
SPEED = {  # each field of SpeedRequest with another value
    "kernels": "torch",
    "compile": CompileSettings(),
    "profile": SimpleNamespace(stage=lambda name: nullcontext()),  # one that traces nothing
    "fp16_sums": True,
    "stored_products": True,
}
COMPILED = {"mode": "max-autotune-no-cudagraphs", "dynamic": "none", "cache_size": 2, "vae": True, "backend": "eager"}
CACHED = {"kind": "taylor", "threshold": 0.5, "interval": 7, "start": 0.2, "end": 0.9, "device": "cpu"}


def sped(pipeline: Pipeline, attention: Attention | None = None, **asked: Any) -> Pipeline:
    """The pipeline with other speed choices, whether or not this machine can have them."""
    own = pipeline.plan.speed
    speed = Speed(replace(own.request, **asked), own.forms, own.kernels, attention or own.attention)
    return replace(pipeline, plan=replace(pipeline.plan, speed=speed))


def with_lora(pipeline: Pipeline) -> Pipeline:
    offloader = pipeline.offloader.with_adapters(SimpleNamespace(key=("a file", 1.0)))
    return replace(pipeline, plan=replace(pipeline.plan, offloader=offloader))


def after_a_fallback(pipeline: Pipeline) -> Pipeline:
    parts = type(pipeline.parts)(pipeline.parts.readers)
    parts.fallbacks = {"transformer": lambda: None}
    return replace(pipeline, parts=parts)


CHOICES: dict[str, Callable[[Pipeline], Pipeline]] = {
    **{name: lambda p, name=name: sped(p, **{name: SPEED[name]}) for name in SPEED},
    "attention": lambda p: sped(p, Attention("sage")),
    "fastest attention": lambda p: sped(p, Attention(fastest="native_cudnn")),
    "step cache": lambda p: replace(p, plan=replace(p.plan, step_cache=StepCacheSettings("first_block"))),
    "precision": lambda p: replace(p, device=replace(p.device, precision=precisions._EXPLICIT["bf16"])),
    "stored weights": lambda p: replace(p, model=replace(p.model, storage={"transformer": "fp8"})),
    "lora": with_lora,
    "cards": lambda p: replace(p, run=RunOptions(group=SimpleNamespace(world=SimpleNamespace(size=2), fewest=2))),
    "doctor": lambda p: replace(p, run=RunOptions(doctor=object())),
    "demo": lambda p: replace(p, model=replace(p.model, stands_in_for="LTX-Video 2B")),
    "fallback": after_a_fallback,
    "torch": lambda p: replace(p, device=replace(p.device, facts=replace(p.facts, torch_version="1.0"))),
}


@pytest.fixture(scope="module")
def loaded(tiny_folder, tmp_path_factory) -> Pipeline:
    state = tmp_path_factory.mktemp("state")
    return load(LoadRequest(build("ltx", tiny_folder), precision="fp32", device="cpu", state=state))


@pytest.fixture
def plain(loaded, monkeypatch) -> Pipeline:
    """Without a run."""
    monkeypatch.setattr("anygpu.pipelines.forecast.times.pace_of", lambda *_: PACE)
    (loaded.offloader.options.state / FILE).unlink(missing_ok=True)
    return loaded


def kept(pipeline: Pipeline, run: Run, times: float, stage: Any = SAMPLE) -> None:
    """One run in the records of the pipeline, ``times`` as long as its model says."""
    file = pipeline.offloader.options.state / FILE
    with running(stage, pipeline, Silent(), run=lambda: run):
        pass
    rows = json.loads(file.read_text(encoding="utf-8"))
    rows[-1].update(seconds=times * rows[-1]["modelled_seconds"], reading_seconds=0.0, first=False)
    file.write_text(json.dumps(rows), encoding="utf-8")


def told(pipeline: Pipeline, run: Run, stage: str = SAMPLING) -> float:
    return times.stage_time(pipeline, stage, run).seconds


@pytest.mark.parametrize("name", CHOICES)
def test_a_choice_changes_no_plain_forecast_and_plain_runs_only_first_that_of_a_speed(plain, name):
    """In both orders; each goes on to learn of its own runs."""
    changed, run = CHOICES[name](plain), forecast.planned_run(plain, ASKED)
    alone = told(changed, run)
    kept(plain, run, 1.2)
    lent = 1.2 if name in (*SPEED, "attention", "fastest attention", "step cache") else 1.0
    assert told(changed, run) == pytest.approx(lent * alone, rel=0.01)
    before = told(plain, run)
    kept(changed, run, 0.4)
    assert told(plain, run) == pytest.approx(before, rel=0.01), "it corrected a plain forecast"
    assert told(changed, run) == pytest.approx(alone * 0.4), "it does not learn of its own runs"
    kept(plain, run, 1.2)
    assert told(changed, run) == pytest.approx(alone * 0.4) and told(plain, run) == pytest.approx(before, rel=0.01)


def test_a_first_run_with_a_change_is_told_by_the_runs_of_the_nearest_key_in_a_wide_range(plain):
    """So that the tab has after a click what it promised before."""
    run, sage = forecast.planned_run(plain, ASKED), CHOICES["attention"](plain)
    kept(CHOICES["step cache"](plain), run, 3.0)
    kept(plain, run, 1.3)
    kept(CHOICES["step cache"](sage), run, 2.0)
    found = times.stage_time(sage, SAMPLING, run)
    assert found.seconds == pytest.approx(1.3 * found.modelled)
    assert found.high == pytest.approx(times.PROBED_OFF * found.seconds)


def test_what_only_sampling_skips_changes_no_other_stage(plain):
    cached, run = CHOICES["step cache"](plain), forecast.planned_run(plain, ASKED)
    kept(cached, run, 1.3, DECODE)
    assert told(plain, run, DECODING) == pytest.approx(told(cached, run, DECODING))
    assert told(plain, run, DECODING) == pytest.approx(1.3 * times.stage_time(plain, DECODING, run).modelled)


def test_decodes_by_another_method_speak_by_the_model_which_knows_it(plain):
    """One on the processor speaks for others there alone."""
    run, larger = forecast.planned_run(plain, ASKED), forecast.planned_run(plain, Size(256, 256, 9))
    tiled = replace(larger, form=DecodeRequest("tiled", tile=128))
    whole, parts = (times.stage_time(plain, DECODING, each).modelled for each in (larger, tiled))
    assert whole < parts < 3 * whole, "what tiles share is computed again"
    kept(plain, replace(run, form=DecodeRequest("full")), 2.0, DECODE)
    assert told(plain, run, DECODING) == pytest.approx(2 * times.stage_time(plain, DECODING, run).modelled)
    kept(plain, run, 1.5, DECODE)
    assert told(plain, run, DECODING) == pytest.approx(1.5 * times.stage_time(plain, DECODING, run).modelled)
    facts = replace(plain.facts, device=torch.device("cuda"), name="A card")
    offloader = SimpleNamespace(options=plain.offloader.options, adapters=None, device_of=lambda _: facts.device)
    offloader.device = facts.device
    card = replace(plain, device=replace(plain.device, facts=facts), plan=replace(plain.plan, offloader=offloader))
    stage = replace(run, form=DecodeRequest("cpu")).planned(card, DECODING, None)
    assert stage.facts.device.type == "cpu" and stage.facts.name != "A card"


def test_a_guidance_that_is_not_counted_is_of_its_own(plain):
    run = forecast.planned_run(plain, ASKED)
    skipping = replace(
        run, settings=replace(run.settings, guidance_steps=(GuidanceStep(cfg=3.0, stg=1.0, blocks=(1,)),))
    )
    before = told(plain, run)
    kept(plain, skipping, 1.4)
    assert told(plain, run) == before


def test_rows_of_an_earlier_release_are_read_and_say_nothing_of_time(plain):
    run = forecast.planned_run(plain, ASKED)
    before = told(plain, run)
    kept(plain, run, 0.1)
    file = plain.offloader.options.state / FILE
    rows = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps([{key: row[key] for key in row if key != "work"} for row in rows]), encoding="utf-8")
    assert [row.work for row in saved_stages(file.parent)] == [""]
    assert told(plain, run) == before


def test_a_card_learns_nothing_of_another_in_its_slot(plain):
    """Nor of rows of an earlier release, which name none."""
    run, own = forecast.planned_run(plain, ASKED), plain.facts
    before = told(plain, run)
    kept(plain, run, 1.9)
    assert told(plain, run) == pytest.approx(1.9 * before)
    for other in (replace(own, name="Another"), replace(own, total_bytes=own.total_bytes + 8 * 2**30)):
        assert told(replace(plain, device=replace(plain.device, facts=other)), run) == before
    file = plain.offloader.options.state / FILE
    rows = [{**row, "card": ""} for row in json.loads(file.read_text(encoding="utf-8"))]
    file.write_text(json.dumps(rows), encoding="utf-8")
    assert saved_stages(file.parent) and told(plain, run) == before


def names(cls: type) -> set[str]:
    groups = (Checkpoint, Device, PipelinePlan, RunOptions) if cls is Pipeline else ()
    return {field.name for each in (cls, *groups) for field in fields(each)} - ({*GROUPS} if groups else set())


@pytest.mark.parametrize(
    ("asked", "others"), [(SpeedRequest(), SPEED), (CompileSettings(), COMPILED), (StepCacheSettings(), CACHED)]
)
def test_every_field_of_a_speed_choice_is_in_the_key(plain, asked, others):
    """A new field needs a value in the tables above, and changes the key by itself."""
    assert set(others) == names(type(asked))
    run = forecast.planned_run(plain, ASKED)

    def key(choice: Any) -> str:
        if isinstance(choice, StepCacheSettings):
            return forecast.work_key(replace(plain, plan=replace(plain.plan, step_cache=choice)), SAMPLING, run)
        if isinstance(choice, CompileSettings):
            return forecast.work_key(sped(plain, compile=choice), SAMPLING, run)
        return forecast.work_key(sped(plain, **{name: getattr(choice, name) for name in others}), SAMPLING, run)

    keys = [key(asked), *(key(replace(asked, **{name: other})) for name, other in others.items())]
    assert len(set(keys)) == len(keys)


IN_KEY = {  # field -> the choice above that shows it
    Pipeline: {
        **dict.fromkeys(("precision", "speed"), "precision"), "step_cache": "step cache", "storage": "stored weights",
        "doctor": "doctor", "group": "cards", "stands_in_for": "demo", "offloader": "lora", "parts": "fallback",
        "facts": "torch",
    },
    LoadRequest: {
        "precision": "precision", "attention": "attention", "weights": "stored weights",
        "text_weights": "stored weights", "speed": "compile", "stands_in_for": "demo",
    },
    SampleSettings: {"guidance_steps": "guidance"},
}  # fmt: skip
NOT_IN_KEY = {  # field -> why it changes no time, or where its time is known
    Pipeline: {
        "spec": "a row has the family", "variant": "a row has it", "task": "counted", "tools": "take no time",
        "configs": "counted", "source": "a name", "decisions": "words", "weights": "counted", "probes": "the rates",
        "recipe": "its steps and guidance are counted", "resuming": "such a run is not kept as a measure",
        "request": "below", "control_factor": "counted", "names": "what they gave away is the recipe",
        "decode": "in the key of a decode alone",
    },
    LoadRequest: {
        **dict.fromkeys(("model", "base", "image_encoder", "files"), "counted from their configurations"),
        "variant": "a row has it", "earlier": "its variant and recipe",
        "offload": "a row has the mode", "search": "finds files", "state": "a folder",
        **dict.fromkeys(("device", "devices", "cards"), "a row has the device of its stage"),
        "keep_free_gb": "the room is counted with", "quiet": "asks nothing",
    },
    SampleSettings: {
        **dict.fromkeys(("width", "height", "frames", "steps", "cfg", "cfg_start", "cfg_end"), "counted"),
        **dict.fromkeys(("seed", "fps", "guidance", "shift"), "other values, the same work"),
        "stg": "in guidance_steps",
        **dict.fromkeys(("scheduler", "guidance_rescale", "noise_mask", "latents"), "sums over latents, no forward"),
        "sigmas": "the steps are counted", "denoise": "as many steps as asked",
    },
}  # fmt: skip


@pytest.mark.parametrize("cls", IN_KEY)
def test_a_new_field_is_in_the_key_or_is_said_to_change_no_time(cls):
    assert set(IN_KEY[cls]) | set(NOT_IN_KEY[cls]) == names(cls) and not set(IN_KEY[cls]) & set(NOT_IN_KEY[cls])
    assert set(IN_KEY[cls].values()) <= {*CHOICES, "guidance"}
