"""What publishers say a model needs, beside what the plan says: none of their cards is told that it cannot run.

Shapes are those of the published files; nothing of their size is read. The card is a table row: this machine has none.
"""

from dataclasses import replace

import published
import pytest
import torch
from anygpu.compat.errors import UnsupportedError
from anygpu.pipelines.base import DecodeRequest
from anygpu.pipelines.forecast.memory import forecast, forecasts
from anygpu.pipelines.sizes import Size, method_bytes
from anygpu.pipelines.vae.plan import planned_decode

FULL = pytest.mark.full
# Model, size of the run, GB of the smallest card it is published for, and by whom.
PUBLISHED = [
    pytest.param("ltx 2B", Size(720, 480, 121, True), 8, marks=FULL, id="Lightricks/LTX-Video README, LTX-VideoQ8"),
    pytest.param("ltx 13B", Size(1216, 704, 121, True), 12, marks=FULL, id="localmodel.run, offload floor of 13B"),
    pytest.param("hunyuan_video", Size(960, 544, 129), 45, marks=FULL, id="Tencent-Hunyuan/HunyuanVideo README, 544p"),
    pytest.param("hunyuan_video", Size(1280, 720, 129), 60, marks=FULL, id="the same, 720p"),
    pytest.param("hunyuan_video", Size(1280, 720, 129), 24, marks=FULL, id="ComfyUI-HunyuanVideoWrapper#209"),
    pytest.param("hunyuan_video_15", Size(848, 480, 121, True), 14, marks=FULL, id="HunyuanVideo-1.5 README"),
    pytest.param("hunyuan_video_15", Size(1280, 720, 121, True), 14, marks=FULL, id="the same, 720p"),
    pytest.param("framepack", Size(640, 608, 1801), 6, id="lllyasviel/FramePack README, one minute"),
    pytest.param("mochi", Size(848, 480, 163, True), 20, marks=FULL, id="genmoai/mochi README, in ComfyUI"),
    pytest.param("mochi", Size(848, 480, 85, True), 12, marks=FULL, id="ComfyUI-MochiWrapper#21"),
]


@pytest.mark.parametrize(("model", "size", "gigabytes"), PUBLISHED)
def test_the_plan_of_a_published_minimum_fits(model, size, gigabytes, tmp_path):
    with published.large_host():
        pipeline = published.on_card(published.composed(model, tmp_path, texts=False))
        room = published.room_of(gigabytes)
        needs = forecasts(pipeline, size, room)
    best = next((each for each in needs if each.fits(room)), None)
    assert best is not None, {each.mode: [(s.name, s.total, s.form) for s in each.stages] for each in needs}
    assert all(stage.total <= room for stage in best.stages)


@pytest.mark.full
def test_a_decode_that_fits_whole_is_forecast_whole(tmp_path):
    """Less room is another form, never another number for the same one; whole is whole where only other parts leave."""
    size, rooms = Size(848, 480, 121), (None, 10**12, 14 * 10**9, 5 * 10**9)
    with published.large_host():
        pipeline = published.on_card(published.composed("hunyuan_video_15", tmp_path, texts=False))
        stages = {room: forecasts(pipeline, size, room)[2].stages[-1] for room in rooms}
        beside = forecast(pipeline, size, "none").stages[-1]
        alone = forecast(pipeline, size, "none", beside.total - 10**9).stages[-1]
        tiled = replace(pipeline, run=replace(pipeline.run, decode=DecodeRequest(tile=256)))
        assert forecast(tiled, size, "none").stages[-1].kept > 10**9, "nothing leaves before it"
        ahead = published.on_card(published.composed("ltx 2B", tmp_path, texts=False))
        ahead = replace(ahead, run=replace(ahead.run, decode=DecodeRequest("chunked")))
        with pytest.raises(UnsupportedError, match="decode method 'chunked' for LTX"):
            forecast(ahead, size, "none")
    assert beside.kept > 10**9 and alone == replace(beside, kept=0) and not alone.form
    assert stages[None] == stages[10**12] and not stages[None].form
    assert stages[14 * 10**9].form.startswith("in chunks of") and stages[14 * 10**9].total <= 14 * 10**9
    assert stages[5 * 10**9].total <= 5 * 10**9 and stages[5 * 10**9].form != stages[14 * 10**9].form
    assert replace(stages[None], form="x") != stages[None]


@pytest.mark.full
def test_a_vae_in_fp16_takes_half_the_memory_and_twice_the_tile(tmp_path):
    """HunyuanVideo, whose VAE is published so, on an RTX 2060 of 12 GB."""
    card = replace(published.CARD, arch="sm75", arch_class="cuda-old", name="NVIDIA GeForce RTX 2060")
    with published.large_host():
        own = published.on_card(published.composed("hunyuan_video", tmp_path, texts=False, device=card))
        precisions = [replace(own.precision, vae=dtype) for dtype in (torch.float16, torch.float32)]
        both = [replace(own, device=replace(own.device, precision=precision)) for precision in precisions]
        size, room = Size(848, 480, 73), published.room_of(12) - own.weights["vae"].total
        (half, _), (whole, _) = (planned_decode(each, size, room, None) for each in both)
    assert own.precision.vae is torch.float16
    assert half.tile == 2 * whole.tile > 0
    assert [2 * method_bytes(both[0], size, 0, tile, 0) for tile in (0, 256)] == pytest.approx(
        [method_bytes(both[1], size, 0, tile, 0) for tile in (0, 256)]
    )
