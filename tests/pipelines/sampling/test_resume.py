"""A sampling that was cut short goes on after its last step, bit for bit as if nothing had happened."""

import json
import multiprocessing
import os
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import resumed
import tiny
import torch
from anygpu.compat.checkpoints import identity
from anygpu.compat.output_check import NotFinite
from anygpu.farm.render import Renderer, reached_in, task_of
from anygpu.pipelines import stages
from anygpu.pipelines.base import RECEIPT, Latents, Prompt, PromptRequest, SampleSettings, Silent
from anygpu.pipelines.latents import recovery
from anygpu.pipelines.latents.steps import MOST, SavedSteps
from anygpu.pipelines.load.folder import load
from anygpu.pipelines.load.lora import with_lora
from anygpu.pipelines.pipeline import Resuming
from anygpu.pipelines.records.job import VideoJob
from anygpu.pipelines.records.job_folder import JobFolder
from anygpu.pipelines.records.places import Places
from anygpu.pipelines.requests import Files, LoadRequest
from anygpu.pipelines.sampling.loop import fall_back_to_fp32
from anygpu.pipelines.sampling.resume import StepState, resume_key
from resumed import SOLVERS, STEPS, Told, opened, sampled
from safetensors.torch import save_file

KEY = "ab" * 32
STATE = StepState(2, 0, torch.randn(1, 4, 2, 2, 2), {"_step_index": 2, "model_outputs": [None, torch.ones(2)]}, b"")


class Cut(BaseException):
    """What ends a sampling here; ComfyUI's cancel is a BaseException too."""


def cut_at(step: int) -> Told:
    def cut(count: int) -> None:
        if count == step:
            raise Cut

    return Told(cut)


@pytest.mark.full
@pytest.mark.parametrize(("family", "at"), [("ltx", 3), ("framepack", STEPS + 2)])
def test_a_sampling_goes_on_after_its_last_step(tiny_folder: Path, tmp_path: Path, family: str, at: int) -> None:
    changes = {"scheduler": "unipc", "cfg": 1.0}
    expected = sampled(opened(family, tiny_folder), None, Told(), **changes)
    with pytest.raises(Cut):
        sampled(opened(family, tiny_folder), tmp_path, cut_at(at), **changes)
    assert len(list((tmp_path / "steps").iterdir())) == 1, "each state takes the place of the one before"
    watched = Told()
    again = sampled(opened(family, tiny_folder), tmp_path, watched, **changes)
    assert torch.equal(again.samples, expected.samples)
    assert again.extra["generator_state"] == expected.extra["generator_state"]
    (said,) = [line for line in watched.said if "goes on after step" in line]
    assert said.startswith(f"sampling goes on after step {at % STEPS} of {STEPS}: an earlier run of the same request")
    assert not list((tmp_path / "steps").iterdir()), "a sampling that has ended leaves no state"


@pytest.mark.parametrize(
    "scheduler", ["unipc", *(pytest.param(s, marks=pytest.mark.full) for s in ("euler", "dpm++_2m"))]
)
def test_a_cancel_inside_a_short_sampling_keeps_the_last_step_and_says_how_to_go_on(
    tiny_folder: Path, tmp_path: Path, scheduler: str
) -> None:
    expected = sampled(opened("ltx", tiny_folder), None, Told(), scheduler=scheduler)
    cancelled, pipeline, calls = Told(), opened("ltx", tiny_folder), []

    def cut(*_: Any) -> None:
        calls.append(cancelled.count)
        if cancelled.count == 3:
            raise Cut

    with pipeline.parts["transformer"].register_forward_pre_hook(cut), pytest.raises(Cut):
        sampled(pipeline, tmp_path, cancelled, share=0.0, scheduler=scheduler)
    assert (
        cancelled.said[-1] == "step 3 of 4 is saved: to go on from there, run it again with seed 3 and the same inputs"
    )
    watched = Told()
    again = sampled(opened("ltx", tiny_folder), tmp_path, watched, share=0.0, scheduler=scheduler)
    assert torch.equal(again.samples, expected.samples) and watched.count == STEPS - 3
    assert not list((tmp_path / "steps").iterdir())


def test_a_cancel_as_the_last_step_is_told_keeps_the_one_before(tiny_folder: Path, tmp_path: Path) -> None:
    expected = sampled(opened("ltx", tiny_folder), None, Told())
    with pytest.raises(Cut):
        sampled(opened("ltx", tiny_folder), tmp_path, cut_at(STEPS), share=0.0)
    watched = Told()
    again = sampled(opened("ltx", tiny_folder), tmp_path, watched, share=0.0)
    assert torch.equal(again.samples, expected.samples) and watched.count == 1


def test_nothing_goes_on_from_steps_before_values_that_are_not_finite(tiny_folder: Path, tmp_path: Path) -> None:
    """What was wrong but finite before them may be on the disk, which other machines and settings share."""
    expected, broken, watched = sampled(opened("ltx", tiny_folder), None, Told()), opened("ltx", tiny_folder), Told()

    def spoil(_module: Any, _args: Any, output: Any) -> Any:
        return (output[0] * 0 + 5 if watched.count < STEPS - 1 else output[0] * float("nan"), *output[1:])

    with broken.parts["transformer"].register_forward_hook(spoil), pytest.raises(NotFinite):
        sampled(broken, tmp_path, watched)
    assert not list((tmp_path / "steps").iterdir())
    assert torch.equal(sampled(opened("ltx", tiny_folder), tmp_path, Told()).samples, expected.samples)


@pytest.mark.parametrize("falls_back", [False, True])
def test_nothing_goes_on_from_sections_before_values_that_are_not_finite(
    tiny_folder: Path, tmp_path: Path, falls_back: bool
) -> None:
    """Neither in another precision nor in a later run; what was finished can be recovered."""
    expected, pipeline, seen, wide = (
        sampled(opened("framepack", tiny_folder), None, Told()),
        opened("framepack", tiny_folder),
        [],
        [],
    )
    if falls_back:
        pipeline.parts.fallbacks = {"transformer": lambda: wide.append(True)}

    def spoil(module: Any, _args: Any, output: Any) -> Any:
        if wide or type(module).__name__ != "HunyuanVideoFramepackTransformer3DModel":
            return output
        seen.append(1)
        return (output[0] * 0 + 5 if len(seen) <= calls else output[0] * float("nan"), *output[1:])

    calls = 2 * STEPS  # those of the first section, with guidance
    with torch.nn.modules.module.register_module_forward_hook(spoil):
        try:
            found = sampled(pipeline, tmp_path, Told())
        except NotFinite:
            assert not falls_back
            found = None
    found = found or sampled(opened("framepack", tiny_folder), tmp_path, Told())
    assert torch.equal(found.samples, expected.samples)
    assert any(each.id.endswith(recovery.DOUBTED) for each in recovery.listing(tmp_path))


@pytest.mark.parametrize("error", [NotFinite("NaN", expected="numbers", fix="None."), OSError("the disk is full")])
def test_what_may_be_wrong_or_is_not_on_the_disk_is_not_said_to_be_saved(
    tiny_folder: Path, tmp_path: Path, error: Exception
) -> None:
    if isinstance(error, OSError):
        (tmp_path / "steps").write_text("a file in place of the folder")

    def cut(count: int) -> None:
        if count == 2:
            raise error

    watched = Told(cut)
    with pytest.raises(type(error)):
        sampled(opened("ltx", tiny_folder), tmp_path, watched, share=0.0)
    assert not any("is saved" in line for line in watched.said) and not list(tmp_path.glob("steps/*"))


@pytest.mark.full
def test_another_request_begins_anew(tiny_folder: Path, tmp_path: Path) -> None:
    pipeline = opened("ltx", tiny_folder)
    with pytest.raises(Cut):
        sampled(pipeline, tmp_path, cut_at(3))
    for changes in ({"seed": 4}, {"cfg": 3.0}, {"scheduler": "unipc"}):
        watched = Told()
        with pytest.raises(Cut):
            sampled(pipeline, tmp_path, replace_cut(watched), **changes)
        assert not any("goes on" in line for line in watched.said)
    kept = SavedSteps(tmp_path / "steps", pytest.fail)
    for index in range(MOST):
        kept.save(f"{index:064x}", STATE)
    assert len(list((tmp_path / "steps").iterdir())) == 32 == MOST
    prompts = [stages.encode_prompt(pipeline, PromptRequest(text, "blur"), Silent()) for text in ("a fox", "a hen")]
    more = replace(prompts[0], negative=prompts[1].embeds)
    assert len({resume_key(pipeline, prompt)() for prompt in (*prompts, more)}) == 3, "the text decides the latents"
    first, values = (
        Latents(torch.zeros(1, 1), "ltx", "text", 1, 8, 8, 24.0, 3),
        ({}, {RECEIPT: {"driver": 1}}, {"x": 1}),
    )
    passes = [SampleSettings(8, 8, 1, latents=replace(first, extra=extra)) for extra in values]
    keys = [resume_key(pipeline, prompts[0], None, each)() for each in passes]
    assert keys[0] == keys[1] != keys[2], "how the first pass was made does not"
    renamed = [replace(pipeline, model=replace(pipeline.model, recipe=name)) for name in ("", "distilled")]
    keys = [resume_key(each, prompts[0])() for each in renamed]
    assert keys[0] != keys[1], "of a file or a LoRA under a name that gives other noise levels away"
    speed = pipeline.plan.speed
    lossy = replace(speed, request=replace(speed.request, fp16_sums=True))
    keys = [
        resume_key(each, prompts[0])()
        for each in (pipeline, replace(pipeline, plan=replace(pipeline.plan, speed=lossy)))
    ]
    pipeline.parts.fallbacks["transformer"] = print  # as under safe fp16, until it is left
    assert len({*keys, resume_key(pipeline, prompts[0])()}) == 3, "none goes on in other arithmetic"


def test_a_lora_counts_by_its_bytes_whatever_its_name_and_time(tiny_folder: Path, tmp_path: Path) -> None:
    pipeline, prompt = opened("ltx", tiny_folder), Prompt("ltx", {"prompt_embeds": torch.zeros(1, 2, 4)})
    weight = pipeline.parts.read("transformer").transformer_blocks[0].attn1.to_q.weight
    layer, keys = "transformer.transformer_blocks.0.attn1.to_q.lora", [resume_key(pipeline, prompt)()]
    for name, value, strength in (("mine", 1, 1.0), ("copy", 1, 1.0), ("mine", 1, 0.5), ("mine", 2, 1.0)):
        path = tmp_path / f"{name}.safetensors"
        sides = {"A": torch.full((1, weight.shape[1]), float(value)), "B": torch.ones(weight.shape[0], 1)}
        save_file({f"{layer}_{side}.weight": factor for side, factor in sides.items()}, path)
        keys.append(resume_key(with_lora(pipeline, path, strength, "", "separate", Silent()), prompt)())
    assert keys[1] == keys[2] and len(set(keys)) == 4 and all(keys)


def replace_cut(watched: Told) -> Told:
    watched.then = cut_at(2).then
    return watched


def test_a_step_cache_keeps_no_steps_and_says_so(tiny_folder: Path, tmp_path: Path) -> None:
    from anygpu.compat.transforms.step_cache import StepCacheSettings
    from anygpu.pipelines.settings import with_step_cache

    watched = Told()
    pipeline = with_step_cache(opened("ltx", tiny_folder), "balanced", StepCacheSettings())
    sampled(pipeline, tmp_path, watched)
    assert not (tmp_path / "steps").exists()
    assert any("steps are not kept beside a step cache" in line for line in watched.said)


def test_a_state_comes_back_whole_and_a_damaged_one_not_at_all(tmp_path: Path) -> None:
    state = replace(STATE, generator_state=torch.Generator().manual_seed(5).get_state().numpy().tobytes())
    kept = SavedSteps(tmp_path, pytest.fail)
    kept.save(KEY, state)
    (path,) = tmp_path.iterdir()
    back = kept.found(KEY)
    assert back is not None and torch.equal(back.latents, state.latents)
    assert (back.done, back.section, back.generator_state) == (2, 0, state.generator_state)
    assert back.solver["_step_index"] == 2 and back.solver["model_outputs"][0] is None
    assert torch.equal(back.solver["model_outputs"][1], torch.ones(2))
    assert kept.found("cd" * 32) is None and recovery.listing(tmp_path.parent) == []
    whole = path.read_bytes()
    for size in (0, 7, 100, len(whole) - 1):
        path.write_bytes(whole[:size])
        assert kept.found(KEY) is None
    kept.save(KEY, replace(state, latents=torch.full((1, 1), torch.nan)))
    assert kept.found(KEY) is None
    kept.drop(KEY)
    assert not list(tmp_path.iterdir())


def test_the_state_just_saved_stays_whatever_the_clock_says(tmp_path: Path) -> None:
    kept = SavedSteps(tmp_path, pytest.fail)
    for index in range(MOST):
        kept.save(f"{index:064x}", STATE)
        os.utime(tmp_path / f"{index:064x}.safetensors", (2**32, 2**32))  # the clock was fast then
    assert kept.save(KEY, STATE) and (tmp_path / f"{KEY}.safetensors").is_file()
    assert len(list(tmp_path.iterdir())) == MOST


def test_what_it_costs_decides_how_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("anygpu.pipelines.latents.steps.time.perf_counter", lambda: clock[0])
    kept, written = SavedSteps(tmp_path, pytest.fail), []
    kept.found(KEY)
    for step in range(1, 401):
        clock[0] += 0.5
        if kept.due():
            monkeypatch.setattr(
                "anygpu.pipelines.latents.steps.write_record", lambda *_: clock.__setitem__(0, clock[0] + 0.03)
            )
            kept.save(KEY, STATE)
            written.append(step)
    assert written[0] == 25, "the first after twelve seconds: it is not known yet what it costs"
    assert len(written) > 40 and kept.spent <= 0.01 * clock[0]


def test_a_disk_that_refuses_costs_no_step(tmp_path: Path) -> None:
    (tmp_path / "steps").write_text("a file in place of the folder")
    said: list[str] = []
    kept = SavedSteps(tmp_path / "steps", said.append, share=float("inf"))
    kept.save(KEY, STATE)
    assert not kept.due() and len(said) == 1 and "unfinished steps cannot be kept" in said[0]


def test_a_failed_decode_on_a_farm_costs_one_step_at_the_next_try(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A third try has reached no further than the second, so that the farm does not go on with it for ever."""
    folder, content = JobFolder(tmp_path / "farm"), Places().content(tiny.build("ltx", tiny_folder))
    job = VideoJob(content, PromptRequest("a red fox"), SampleSettings(64, 64, 9, steps=4, seed=3))
    renderer, tried, reached = Renderer(folder.root, (tiny_folder,), tmp_path / "state", "cpu"), [], []

    def dies(*_given: Any, **_named: Any) -> Any:
        raise MemoryError("killed by the kernel")

    with monkeypatch.context() as patched:
        patched.setattr(stages, "decode", dies)
        for _ in range(3):
            tried.append(Told())
            with pytest.raises(MemoryError):
                renderer.render(json.dumps(job.record()), tried[-1])
            reached.append(reached_in(folder, task_of(json.dumps(job.record()))))
    record = renderer.render(json.dumps(job.record()), last := Told())
    assert [told.count for told in (*tried, last)] == [4, 1, 1, 1] and reached[0] == reached[1] == reached[2] > 0
    alone = Renderer(tmp_path / "alone", (tiny_folder,), tmp_path / "other", "cpu")
    assert record["pixels_sha256"] == alone.render(json.dumps(job.record()), Told())["pixels_sha256"]
    folder.finish(job.key, record)
    assert not list(folder.state.glob("*"))


def test_what_overflowed_is_forgotten(tiny_folder: Path, tmp_path: Path) -> None:
    """The fp32 run that follows must not go on from a step of the one that broke."""
    pipeline, store = opened("ltx", tiny_folder), SavedSteps(tmp_path, pytest.fail)
    store.save(KEY, STATE)
    pipeline.parts.fallbacks = {"transformer": lambda: None}
    watched = Told()
    changed = replace(pipeline, run=replace(pipeline.run, resuming=Resuming(store, lambda: KEY, watched)))
    assert fall_back_to_fp32(changed, watched, NotFinite("NaN", expected="numbers", fix="None."))
    assert changed.run.resuming.broken and not list(tmp_path.iterdir())


@pytest.mark.full
@pytest.mark.skipif(sys.platform == "win32", reason="kill -9 is of POSIX")
@pytest.mark.parametrize("scheduler", SOLVERS)
@pytest.mark.parametrize("family", list(resumed.MODELS))
def test_a_process_that_is_killed_at_any_step_loses_none(
    tiny_folder: Path, tmp_path: Path, family: str, scheduler: str
) -> None:
    changes: dict[str, Any] = {"scheduler": scheduler}
    pipeline = opened(family, tiny_folder)
    total = Told()
    expected = sampled(pipeline, None, total, **changes)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["resumed"])
    for at in range(1, total.count):
        kept = tmp_path / str(at)
        child = context.Process(target=resumed.die, args=(family, tiny_folder, kept, at, changes))
        child.start()
        child.join(300)
        assert child.exitcode == -signal.SIGKILL
        watched = Told()
        again = sampled(opened(family, tiny_folder), kept, watched, **changes)
        assert torch.equal(again.samples, expected.samples), f"after step {at}"
        assert again.extra == expected.extra
        last = bool(at % STEPS == 0)  # of a section, which is kept as a whole just after it
        assert watched.count == total.count - at + last, "no more than the step it was in is computed twice"


def test_a_part_of_a_sampling_is_no_measure_of_the_whole(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {"modelled_seconds": 35.0, "forecast_seconds": 40.0}
    monkeypatch.setattr(stages, "expected", lambda _pipeline, stage, _run: told if stage == "sampling" else {})
    pipeline = opened("ltx", tiny_folder)
    options = replace(pipeline.offloader.options, state=tmp_path / "state")
    pipeline.offloader.options = options
    with pytest.raises(Cut):
        sampled(pipeline, tmp_path, cut_at(3))
    sampled(pipeline, tmp_path, Told())
    resumed_row = pipeline.offloader.memory_stats.stages[-1]
    sampled(pipeline, tmp_path, Told())
    whole_row = pipeline.offloader.memory_stats.stages[-1]
    assert (resumed_row.modelled_seconds, whole_row.modelled_seconds) == (0.0, 35.0)


@pytest.mark.parametrize(
    ("file", "name"), [("base/scheduler/scheduler_config.json", "shift_terminal"), ("one.json", "norm_eps")]
)
def test_no_steps_go_on_with_another_scheduler_or_configuration(
    tiny_folder: Path, tmp_path: Path, file: str, name: str
) -> None:
    """A single file has neither: they come from the base and from the JSON file beside it."""
    base, one = shutil.copytree(tiny.build("ltx", tiny_folder), tmp_path / "base"), tmp_path / "one.safetensors"
    shutil.copy(next((base / "transformer").glob("*.safetensors")), one)
    shutil.copy(base / "transformer" / "config.json", one.with_suffix(".json"))

    def goes_on(told: Told) -> bool:
        files = Files({"transformer": one})
        with pytest.raises(Cut):
            sampled(load(LoadRequest(one, base, precision="fp32", device="cpu", files=files)), tmp_path, told)
        return any("goes on" in line for line in told.said)

    assert not goes_on(cut_at(3)) and goes_on(cut_at(1))
    config = json.loads((tmp_path / file).read_text(encoding="utf-8"))
    (tmp_path / file).write_text(json.dumps({**config, name: 2 * config[name]}), encoding="utf-8")
    assert not goes_on(cut_at(3))


def test_no_steps_go_on_across_a_changed_byte(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even where the ids by samples are the same; and none are kept before all bytes are known."""
    small = {"WHOLE_BYTES": 1000, "SAMPLES": 2, "SAMPLE_BYTES": 100, "RESTING_NS": 0}
    for name, value in {**small, "_wholes": {}, "_asked": set(), "_waiting": SimpleQueue()}.items():
        monkeypatch.setattr(identity, name, value)
    model = shutil.copytree(tiny.build("ltx", tiny_folder), tmp_path / "ltx")
    told = [cut_at(3), cut_at(3), cut_at(3), cut_at(1)]

    def run(number: int, *, known: bool = True) -> bool:
        pipeline = load(LoadRequest(model, precision="fp32", device="cpu"))
        assert not known or identity.whole_of(model, None, lambda: None)
        with pytest.raises(Cut):
            sampled(pipeline, tmp_path, told[number])
        return any("goes on" in line for line in told[number].said)

    def flip() -> None:
        (weights,) = (model / "vae").glob("*.safetensors")
        data = bytearray(weights.read_bytes())
        data[len(data) // 2] ^= 1
        weights.write_bytes(data)

    with monkeypatch.context() as never:
        never.setattr(identity, "_hash_in_background", lambda: None)
        assert not run(0, known=False)
        assert not list((tmp_path / "steps").glob("*")) and not any("is saved" in line for line in told[0].said)
    assert not run(1) and any("is saved" in line for line in told[1].said)
    before = identity.content_of(model)
    flip()
    assert identity.content_of(model) == before, "samples do not see it"
    assert not run(2), "the steps of another model"
    flip()
    assert run(3)
