"""It fits: every family at every share of its full offloader, forecasts, refusals, and out of memory at any moment."""

import gc
from unittest.mock import Mock

import pytest
import tiny
import torch
from anygpu.compat.device.facts import free_bytes
from anygpu.compat.errors import InputError, UnsupportedError
from anygpu.compat.memory.hooks import hooks_on
from anygpu.compat.memory.offloader import MODES
from anygpu.compat.memory.standalone import StandaloneOffloader
from anygpu.pipelines import stages
from anygpu.pipelines.base import Latents, PromptRequest, SampleSettings, Silent
from anygpu.pipelines.forecast.fit import fit_offload, plan_line
from anygpu.pipelines.forecast.memory import forecast
from anygpu.pipelines.load import reading
from anygpu.pipelines.load.folder import load
from anygpu.pipelines.requests import LoadRequest
from anygpu.pipelines.vae.plan import DecodeRequest

from simulated import accelerator, fitting
from simulated.fitting import FAMILIES, SHARES, forget, heavy, peak, run
from simulated.test_families import CASES, loaded_for, rendered

FULL = pytest.mark.full
EPS = torch.finfo(torch.float32).eps
ROUNDING = 1e-5  # fp32; the same sums in another order
WITHIN, TEXT_WITHIN = 0.1, 0.15  # of the peak
SAMPLE = {("ltx", 15)}


@pytest.fixture(scope="module")
def on_host(tiny_folder):
    """What the CPU gives."""
    found: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def of(family: str) -> tuple[torch.Tensor, torch.Tensor]:
        if family not in found:
            found[family] = run(heavy(family, tiny_folder, "cpu"))
        return found[family]

    return of


ULPS = 64  # of the largest value: two steps of sums in another order, over whole blocks; 31 were seen


def same(found, expected) -> None:
    for one, other in zip(found, expected, strict=True):
        largest = float(other.abs().max())
        torch.testing.assert_close(one, other, atol=max(ROUNDING, ULPS * EPS * largest), rtol=ROUNDING)


@pytest.mark.parametrize(
    ("family", "share"),
    [
        pytest.param(family, share, marks=[] if (family, share) in SAMPLE else [FULL])
        for family in FAMILIES
        for share in SHARES
    ],
)
def test_auto_finishes_within_a_share_of_the_full_offloader(acc, tiny_folder, on_host, recorded, family, share):
    pipeline, progress = heavy(family, tiny_folder, acc), recorded()
    limit = fitting.full_offloader(pipeline) * share // 100
    with accelerator.limit(limit):
        pipeline = heavy(family, tiny_folder, acc)
        found = run(pipeline, progress)
        assert accelerator.memory().refusals == 0, "the plan was wrong, and only the ladder saved the run"
    assert 0 < peak(pipeline) <= limit
    same(found, on_host(family))
    forget(pipeline)
    progress.previews.clear()
    assert accelerator.memory().allocated_bytes == 0


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "mode"),
    [
        pytest.param(family, mode, marks=[] if (family, mode) == ("ltx", "group") else [FULL])
        for family in FAMILIES
        for mode in MODES
    ],
)
def test_a_forecast_is_near_the_measured_peak(acc, tiny_folder, family, mode):
    pipeline = heavy(family, tiny_folder, acc, mode)
    said = forecast(pipeline, fitting.size_of(family), room=free_bytes(acc))
    run(pipeline)
    assert abs(said.peak - peak(pipeline)) <= WITHIN * peak(pipeline), (said.peak, peak(pipeline))
    text, spent = said.stages[-3], {cost.stage: cost.peak_bytes for cost in pipeline.offloader.memory_stats.stages}
    assert abs(text.total + text.ahead - spent["text"]) <= TEXT_WITHIN * spent["text"], (text, spent)


@pytest.mark.parametrize("family", [pytest.param(family, marks=FULL) for family in FAMILIES])
def test_auto_finishes_where_a_run_leaf_by_leaf_made_by_hand_does(acc, tiny_folder, on_host, family):
    """With as many bytes as accelerate's hooks alone needed: no refusal, and the same video."""
    by_hand = fitting.by_hand(family, tiny_folder, acc)
    run(by_hand)
    needed = peak(by_hand)
    with accelerator.limit(needed):
        pipeline = heavy(family, tiny_folder, acc)
        found = run(pipeline)
    assert 0 < peak(pipeline) <= needed
    same(found, on_host(family))


def test_each_stage_leaves_no_cache_to_the_next(acc, tiny_folder, monkeypatch):
    """What is free is asked of the driver, to which torch's cache is taken."""
    emptied = Mock()
    pipeline = heavy("ltx", tiny_folder, acc, "none")
    monkeypatch.setattr("anygpu.compat.memory.standalone.empty_cache", emptied)
    with pipeline.offloader.hold("vae"):
        assert not emptied.called
    emptied.assert_called_once_with(acc)


def test_what_a_host_lets_leave_is_room(acc, tiny_folder, recorded, monkeypatch):
    limit = 2 * fitting.full_offloader(heavy("ltx", tiny_folder, acc))
    with accelerator.limit(limit):
        pipeline = heavy("ltx", tiny_folder, acc)
        other = torch.ones(limit - 300_000, dtype=torch.uint8, device=acc)  # of another model
        with pytest.raises(UnsupportedError, match="free on acc:0 for sampling"):
            fit_offload(pipeline, "sampling", fitting.size_of("ltx"), recorded())
        monkeypatch.setattr(StandaloneOffloader, "evicts", True)
        fit_offload(pipeline, "sampling", fitting.size_of("ltx"), recorded())
        del other


def test_a_limit_below_one_layer_is_refused_before_anything_is_read(acc, tiny_folder):
    told = r"largest layer of the .*; expected .* more"
    with accelerator.limit(400_000), pytest.raises(UnsupportedError, match=told):
        heavy("ltx", tiny_folder, acc)
    pipeline = heavy("ltx", tiny_folder, acc)
    largest = max(part.layer for part in pipeline.weights.values())
    with accelerator.limit(largest - 1), pytest.raises(UnsupportedError, match="largest layer"):
        heavy("ltx", tiny_folder, acc)


def test_a_limit_below_the_forecast_is_refused_before_weights_are_read(acc, tiny_folder):
    pipeline = heavy("ltx", tiny_folder, acc)
    with accelerator.limit(2_000_000), pytest.raises(UnsupportedError, match=r"for text, which needs .* more\. Close"):
        run(pipeline)
    assert not pipeline.parts, "a part was read"


@FULL
@pytest.mark.parametrize("after", [1, 3])
def test_sampling_goes_on_from_the_last_step_when_memory_runs_out(acc, tiny_folder, on_host, recorded, after):
    pipeline, progress, forwards = heavy("ltx", tiny_folder, acc, "model"), recorded(), []
    transformer = pipeline.parts.read("transformer")
    transformer.register_forward_pre_hook(lambda *_: forwards.append(1))
    linears = []

    def refuse(name, arguments):
        if len(forwards) == 2 and len(linears) < after:  # in the second step
            linears.append(1)
            raise torch.OutOfMemoryError("no room")

    with accelerator.hook("aten::addmm*", before=refuse):
        found = run(pipeline, progress)
    said = [text for text in progress.said if "continuing" in text]
    assert said and "with offload group, after the last finished step" in said[0], progress.said
    assert [done for done, _, stage in progress.steps if stage == "sampling"] == [1, 2], "a step ran twice"
    same(found, on_host("ltx"))


@FULL
@pytest.mark.parametrize("part", ["vae", "text_encoder", "transformer"])
def test_out_of_memory_while_a_part_moves_loses_nothing(acc, tiny_folder, on_host, part):
    """The failed stage raises torch's own error; what is there goes on at once with room."""
    pipeline = heavy("ltx", tiny_folder, acc, "model")
    reading = pipeline.weights[part].total // 2
    with accelerator.limit(reading):
        try:
            with pipeline.offloader.hold(part):
                raise AssertionError("it fitted")
        except torch.OutOfMemoryError:
            pass
    gc.collect()  # frames of the error refer to each other, and to the tensor that was on its way; so does each retry
    assert accelerator.memory().allocated_bytes == 0
    same(run(pipeline), on_host("ltx"))


def test_modes_switch_both_ways_between_stages(acc, tiny_folder):
    case = CASES["ltx"]
    expected = rendered(loaded_for(case, tiny_folder, "cpu"), case)
    pipeline = loaded_for(case, tiny_folder, "acc:0", "none")
    for mode in ("group", "none", "sequential", "model", "group"):
        pipeline.offloader.switch(mode)
        same(rendered(pipeline, case), expected)
        assert repr(pipeline.offloader) == f"offload {mode} on acc:0" and mode in plan_line(pipeline)
    apart = loaded_for(case, tiny_folder, "cpu", "none", devices={"transformer": "acc:0"})
    same(rendered(apart, case), expected)
    apart.offloader.switch("group")
    assert apart.offloader.mode == "group"
    assert {each.device.type for each in apart.parts["transformer"].parameters()} == {"cpu"}
    same(rendered(apart, case), expected)
    with pipeline.offloader.hold("vae"), pytest.raises(InputError, match="offload 'group' while vae is in use"):
        pipeline.offloader.switch("group")


@FULL
def test_offload_may_change_between_sample_and_decode(acc, tiny_folder):
    case = CASES["mochi"]
    expected = rendered(loaded_for(case, tiny_folder, "cpu"), case)[1]
    pipeline = loaded_for(case, tiny_folder, "acc:0", "group")
    with torch.no_grad():
        prompt = stages.encode_prompt(pipeline, PromptRequest("a red fox", "blurry"), Silent())
        latents = stages.sample(pipeline, prompt, None, SampleSettings(64, 64, 7, steps=2, seed=3, cfg=2.0), Silent())
        for mode in ("none", "sequential"):
            pipeline.offloader.switch(mode)
            torch.testing.assert_close(
                stages.decode(pipeline, latents, Silent()), expected, atol=ROUNDING, rtol=ROUNDING
            )


@pytest.mark.full
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("group", "model"),
        *(pytest.param(*pair, marks=FULL) for pair in (("sequential", "group"), ("none", "sequential"))),
    ],
)
def test_two_pipelines_may_share_a_part(acc, tiny_folder, first, second):
    case = CASES["ltx"]
    expected = rendered(loaded_for(case, tiny_folder, "cpu"), case)
    one, other = (loaded_for(case, tiny_folder, "acc:0", mode) for mode in (first, second))
    shared = one.parts.read("transformer")
    other.parts["transformer"] = shared
    for pipeline in (one, other, one):
        same(rendered(pipeline, case), expected)
        hooks = hooks_on(shared)
        assert (None if hooks is None else hooks.by_block) == {"group": True, "sequential": False}.get(
            pipeline.offloader.mode
        )


def test_masters_stay_where_they_are_and_nothing_is_copied_back(acc, tiny_folder):
    """So a device that damages what it returns cannot spoil them."""
    pipeline = loaded_for(CASES["ltx"], tiny_folder, "acc:0", "group")
    module = pipeline.parts.read("transformer")
    values = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    returned = accelerator.traffic().to_host_bytes
    with torch.no_grad(), pipeline.offloader.hold("transformer"):
        before = {name: tensor.data_ptr() for name, tensor in module.state_dict().items()}
        for group in hooks_on(module).groups:
            group.onload(), group.offload()
    assert accelerator.traffic().to_host_bytes == returned
    for name, tensor in module.state_dict().items():
        assert tensor.data_ptr() == before[name] and torch.equal(tensor, values[name])


@pytest.mark.parametrize("mode", ["group", "sequential"])
def test_a_cancel_is_obeyed_while_units_move(acc, tiny_folder, mode):
    class Cancelled(BaseException):
        pass

    class Cancelling(Silent):
        armed = False

        def check(self):
            if self.armed:
                raise Cancelled

    pipeline, progress = loaded_for(CASES["ltx"], tiny_folder, "acc:0", mode), Cancelling()
    with pipeline.offloader.hold("transformer", 0, progress) as module:
        group = hooks_on(module).groups[-1]
        progress.armed = True
        with pytest.raises(Cancelled):
            group.onload()
        progress.armed = False
    assert accelerator.memory().allocated_bytes == 0


def test_parts_compute_where_they_are_put(acc, tiny_folder, monkeypatch):
    case = CASES["ltx"]
    expected = rendered(loaded_for(case, tiny_folder, "cpu"), case)
    path = tiny.build("ltx", tiny_folder)
    devices = {"text_encoder": "cpu", "vae": "cpu"}
    pipeline = load(LoadRequest(path, precision="fp32", offload="model", device="acc:0", devices=devices))
    same(rendered(pipeline, case), expected)
    assert peak(pipeline) < pipeline.weights["vae"].total, "the VAE was on the device"
    assert repr(pipeline.offloader) == "offload model on acc:0, text_encoder on cpu, vae on cpu"
    monkeypatch.setattr(reading, "fp32_output_works", asked := Mock(return_value=False))
    on_host = LoadRequest(path, precision="fp16-safe", device="acc:0", devices={"transformer": "cpu"})
    load(on_host).parts.read("transformer")
    asked.assert_called_once_with(torch.device("cpu"))
    gone = LoadRequest(path, precision="fp32", device="acc:0", devices={"vae": "acc:7"})
    with pytest.raises(UnsupportedError, match="device 'acc:7' does not answer"):
        load(gone)


@FULL
def test_what_is_kept_free_stays_free(acc, tiny_folder):
    pipeline = heavy("ltx", tiny_folder, acc)
    need = forecast(pipeline, fitting.size_of("ltx"), "none").peak
    with accelerator.limit(2 * need):
        pipeline = heavy("ltx", tiny_folder, acc, keep_free_gb=1.2 * need / 2**30)
        run(pipeline)
        assert pipeline.offloader.mode != "none" and peak(pipeline) <= 0.8 * need


def test_a_streamed_decode_counts_the_tiles_that_it_moves(acc, tiny_folder):
    """In the account is what the device's own counters saw, there and back."""
    pipeline = loaded_for(CASES["ltx"], tiny_folder, "acc:0", "model")
    samples = torch.randn(1, 128, 2, 2, 2, generator=torch.Generator().manual_seed(0))
    before = accelerator.traffic()
    with torch.no_grad():
        stages.decode(
            pipeline,
            Latents(samples, "ltx", "text", 9, 64, 64, 24.0, 0),
            Silent(),
            form=DecodeRequest("streaming", tile=16),
        )
    after, cost = accelerator.traffic(), pipeline.offloader.memory_stats.stages[-1]
    moved = after.to_device_bytes - before.to_device_bytes + after.to_host_bytes - before.to_host_bytes
    assert cost.stage == "decoding" and cost.moved_bytes > pipeline.weights["vae"].total + samples.nbytes
    assert abs(cost.moved_bytes - moved) <= 0.05 * moved, "norms' moments and single numbers are not counted"


def tensors_alive() -> int:
    """Tensors that anybody holds, on any device."""
    gc.collect()
    return sum(isinstance(found, torch.Tensor) for found in gc.get_objects())


@FULL
def test_fifty_runs_leave_memory_where_it_began(acc, tiny_folder):
    pipeline = loaded_for(CASES["ltx"], tiny_folder, "acc:0", "group")
    for _ in range(2):
        rendered(pipeline, CASES["ltx"])
    before, alive = accelerator.memory().allocated_bytes, tensors_alive()
    for _ in range(50):
        rendered(pipeline, CASES["ltx"])
    assert accelerator.memory().allocated_bytes == before == 0
    assert tensors_alive() == alive, "host memory grows from run to run"


@FULL
def test_five_pipelines_in_turn_share_what_is_there(acc, tiny_folder):
    """Outside ComfyUI nobody makes another pipeline leave: each takes the fastest mode for what the others left."""
    expected = {name: rendered(loaded_for(CASES[name], tiny_folder, "cpu"), CASES[name]) for name in FAMILIES}
    least, stays = {}, {}
    for name in FAMILIES:
        rendered(pipeline := loaded_for(CASES[name], tiny_folder, "acc:0", "sequential"), CASES[name])
        least[name] = peak(pipeline)
        stays[name] = sum(pipeline.weights[part].total for part in ("transformer", "vae"))  # with offload none
        forget(pipeline)
    most = max(least, key=lambda name: least[name])
    limit = int(1.1 * (least[most] + sum(stays.values()) - stays[most]))
    with accelerator.limit(limit):
        held = {name: loaded_for(CASES[name], tiny_folder, "acc:0") for name in FAMILIES}
        for _ in range(2):
            for name, pipeline in held.items():
                same(rendered(pipeline, CASES[name]), expected[name])
        modes = {pipeline.offloader.mode for pipeline in held.values()}
    assert len(modes) > 1 and held[most].offloader.mode != "none", modes
    for pipeline in held.values():
        forget(pipeline)
    assert accelerator.memory().allocated_bytes == 0
