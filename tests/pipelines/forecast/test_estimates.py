"""Forecasts come from file headers, plans from forecasts, and what cannot fit is said before anything is read."""

from dataclasses import replace

import pytest
import tiny
import torch
from anygpu.compat.device import facts as device
from anygpu.compat.errors import InputError, UnsupportedError
from anygpu.compat.memory import standalone
from anygpu.compat.memory.offloader import MODES, HostWeights, OffloadOptions
from anygpu.compat.memory.parts import PartBytes, Parts, Silent, part_bytes
from anygpu.compat.memory.standalone import StandaloneOffloader, ahead_bytes
from anygpu.compat.memory.statistics import MemoryStats, StageCost, saved_stages
from anygpu.pipelines import requests
from anygpu.pipelines import sizes as estimates
from anygpu.pipelines.forecast import fit as fitting
from anygpu.pipelines.forecast import page as memory_plan
from anygpu.pipelines.forecast.memory import forecast, forecasts
from anygpu.pipelines.load.folder import load
from anygpu.pipelines.requests import LoadRequest, part_devices
from anygpu.pipelines.sizes import Size

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def mochi(tiny_folder):
    return load(LoadRequest(tiny.build("mochi", tiny_folder), precision="fp32", device="cpu"))


def test_weights_are_counted_from_the_headers(mochi):
    for part in ("transformer", "text_encoder"):
        module = mochi.parts.readers[part](Silent())
        counted = sum(tensor.nbytes for tensor in module.parameters())
        assert abs(mochi.weights[part].total - counted) <= 0.02 * counted, part


def test_blocks_and_layers_are_told_apart():
    found = part_bytes({"embed.weight": 50, "blocks.0.a.weight": 10, "blocks.0.b.weight": 7, "blocks.1.a.weight": 12})
    assert (found.total, found.block, found.layer, found.inner, found.outer) == (79, 17, 50, 12, 50)
    single = part_bytes({"transformer_blocks.0.a.w": 30, "single_transformer_blocks.0.a.w": 9})
    assert (single.block, single.single) == (30, 9)


def test_the_next_block_comes_beside_what_is_left_of_a_forward():
    size = PartBytes(total=1000, block=80, layer=30, inner=30)
    for activations, most in ((0, 160), (100, 205), (400, 480)):  # two blocks and a part of a forward, or one and all
        own, ahead = size.resident("group", "text_encoder"), size.ahead("group", "text_encoder", activations)
        assert own + ahead + activations == most
    embedded = replace(size, outer=500)
    assert embedded.resident("group", "text_encoder") + embedded.ahead("group", "text_encoder") == 500 + 80


def test_nothing_comes_ahead_without_a_stream_for_copies(monkeypatch):
    size, ours = (
        PartBytes(total=1000, block=80, layer=30),
        StandaloneOffloader(Parts({}), torch.device("meta"), "group"),
    )
    assert ahead_bytes(ours, size, "transformer", "group") == 0
    monkeypatch.setattr(standalone, "copy_stream", lambda device: object())
    assert ahead_bytes(ours, size, "transformer", "group") == 80


def test_modes_need_less_in_their_order(mochi):
    found = forecasts(mochi, Size(848, 480, 85))
    peaks = [each.peak for each in found]
    assert [each.mode for each in found] == list(MODES) and peaks == sorted(peaks, reverse=True)


def test_a_larger_run_needs_more(mochi):
    small, large = (forecast(mochi, Size(width, 480, 85), "group") for width in (640, 848))
    guided = forecast(mochi, Size(640, 480, 85, guided=True), "group")
    assert small.peak < large.peak
    at = [next(stage for stage in each.stages if stage.name == "sampling").activations for each in (small, guided)]
    assert at[1] == pytest.approx(2 * at[0], rel=1e-3)


def test_parts_of_a_decode_need_less_than_the_whole(mochi):
    size = Size(848, 480, 85)
    whole, chunk, tile, stream = (
        estimates.method_bytes(mochi, size, *form) for form in ((0, 0, 0), (1, 0, 0), (0, 128, 0), (1, 0, 32))
    )
    assert whole > chunk > stream and whole > tile
    assert chunk == int(mochi.spec.memory.fit.chunked * estimates.decoding_bytes(mochi, size, 1))


def test_the_plan_names_the_fastest_mode_that_fits(mochi, monkeypatch):
    """And no mode, of which one is called none, where none does."""
    monkeypatch.setattr(memory_plan, "room_now", lambda _: 1000)
    text, _ = memory_plan.memory_plan(mochi, Size(64, 64, 7))
    assert "fastest that fits: nothing, lower the size\n" in text and "none: peak" in text
    found = forecasts(mochi, Size(64, 64, 7))
    none, model, group = (each.peak for each in found[:3])
    first = [next((each.mode for each in found if each.fits(room)), "") for room in (none * 1.1, group * 1.1, 1000)]
    assert first[0] == "none" and first[1] in ("model", "group") and not first[2] and model >= group


def test_the_plan_is_text_and_a_picture(mochi):
    size = memory_plan.planned_size(mochi, 0, 0, 20, False)
    assert size.frames == 25 and size.width == 848
    text, bars = memory_plan.memory_plan(mochi, size)
    assert all(f"{mode}: peak" in text for mode in MODES) and "plan: read ->" in text
    assert bars.shape[0] == 1 and bars.shape[2:] == (1200, 3) and float(bars.std()) > 0.05
    with pytest.raises(InputError, match="width -1"):
        memory_plan.planned_size(mochi, -1, 0, 0, False)


def test_a_layer_that_does_not_fit_is_said_with_the_number_missing():
    weights = {"vae": PartBytes(10**6, 10**5, 10**5), "transformer": PartBytes(10**9, 10**8, 50 * 2**20)}
    acc = torch.device("meta")
    with pytest.raises(
        UnsupportedError, match=r"10.0 MB left .* largest layer of the transformer, 50.0 MB; expected 40"
    ):
        fitting.require_room(weights, acc, 10 * 2**20, OffloadOptions())
    fitting.require_room(weights, acc, 60 * 2**20, OffloadOptions())
    with pytest.raises(UnsupportedError, match=r"expected 40\.0 MB more"):
        fitting.require_room(weights, acc, 60 * 2**20, OffloadOptions(keep_free_bytes=50 * 2**20))
    fitting.require_room(weights, acc, 10**6, OffloadOptions(devices={"transformer": CPU}))


def test_the_limit_of_a_control_group_counts(monkeypatch, tmp_path):
    limit, used = tmp_path / "memory.max", tmp_path / "memory.current"
    used.write_text("600\n"), (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 50\nactive_file 7\n")
    monkeypatch.setattr(device, "CGROUPS", (("", str(tmp_path), limit.name, used.name),))
    for text, expected in (("1000\n", 457), ("max\n", None)):
        limit.write_text(text)
        found = device.host_free_bytes()
        assert found == expected if expected is not None else found > 10**6
    rows = "inactive_file 1\nactive_file 2\ntotal_inactive_file 30\ntotal_active_file 40\n"  # of version 1
    limit.write_text("1000\n"), (tmp_path / "memory.stat").write_text(rows)
    assert device.host_free_bytes() == 470
    job, own = tmp_path / "slurm" / "job 1", tmp_path / "own"  # which limit what runs in them, less than the root does
    job.mkdir(parents=True), own.write_text("4:memory:/other\n0::/slurm/job 1\n")
    monkeypatch.setattr(device, "OWN_CGROUPS", str(own))
    for folder, most, expected in ((job, "800\n", 200), (job.parent, "700\n", 100), (job, "max\n", 100)):
        (folder / "memory.max").write_text(most), (folder / "memory.current").write_text("600\n")
        assert device.host_free_bytes() == expected


@pytest.mark.parametrize(
    ("devices", "keep", "told"),
    [({"scheduler": "cpu"}, 0.0, "a device for 'scheduler'"), ({}, -1.0, "keep_free_gb -1")],
)
def test_places_are_checked(devices, keep, told):
    with pytest.raises(InputError, match=told):
        fitting.offload_options(devices, keep, None, HostWeights())


def test_a_device_that_is_not_there_is_named(monkeypatch):
    assert part_devices("auto", "cpu", "auto") == {"text_encoder": "cpu"}
    monkeypatch.setattr(requests, "device_count", lambda: 2)
    with pytest.raises(UnsupportedError, match="device 'gpu:0' where torch sees 0"):
        part_devices(vae="gpu:0")  # on the CPU by choice, beside accelerators
    monkeypatch.setattr(requests, "default_device", lambda: torch.device("meta:0"))
    assert part_devices("gpu:1", "cpu", "gpu:0") == {"transformer": "meta:1", "text_encoder": "cpu", "vae": "meta:0"}
    with pytest.raises(UnsupportedError, match="device 'gpu:3' where torch sees"):
        part_devices(vae="gpu:3")


def test_costs_are_kept_and_read_back(tmp_path):
    memory_stats = MemoryStats(tmp_path)
    for name in ("text", "sampling"):
        with memory_stats.stage(name, "mochi", "group", CPU), memory_stats.moving(1000):
            pass
    found = saved_stages(tmp_path)
    assert [cost.stage for cost in found] == ["text", "sampling"] and found[0].moved_bytes == 1000
    assert saved_stages(tmp_path / "nowhere") == []
    cost = StageCost("sampling", "mochi", "group", "cpu", moved_bytes=2**30, moving_seconds=1.0, seconds=5.0)
    assert "moved 1.0 GB in 1.0 of 5.0 s, 1.25 times" in str(cost)
    (tmp_path / "memory.json").write_text("{")
    assert saved_stages(tmp_path) == []


def test_the_plan_of_a_pipeline_is_one_line(mochi):
    line = fitting.plan_line(mochi)
    assert line.startswith("read -> ") and line.endswith("offload none on cpu") and "\n" not in line
    assert replace(mochi).weights is mochi.weights
