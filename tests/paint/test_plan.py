"""The Memory Plan of a paint pipeline: the same words and bars as of a video's, its stages named as in its account."""

from anygpu.compat.device.work import Pace
from anygpu.compat.memory.offloader import MODES
from anygpu.paint.forecast import paint_needs, planned_run
from anygpu.paint.loading import PaintRequest, load_paint
from anygpu.pipelines.forecast.memory import Forecast
from anygpu.pipelines.forecast.page import shown
from anygpu.pipelines.forecast.times import times_of


def test_each_mode_has_its_stages_and_bars(paint_folder, monkeypatch):
    pipeline = load_paint(PaintRequest(paint_folder, precision="fp32", device="cpu"))
    run = planned_run(pipeline, 64, 2, 3)
    found = tuple(Forecast(mode, paint_needs(pipeline, run, mode)) for mode in MODES)
    monkeypatch.setattr("anygpu.pipelines.forecast.times.pace_of", lambda *_: Pace(1e9, 1e9, 1e9, 1e9, 0.0))
    text, bars = shown(pipeline, "Hunyuan3D paint", ", 2 views", found, times_of(pipeline, run, MODES))
    lines = text.splitlines()
    (told,) = (line for line in lines if line.startswith("none: about "))
    assert all(f"{stage.name} " in told for stage in found[0].stages), "a CPU has one mode"
    assert lines[0].startswith("Hunyuan3D paint, 2 views: cpu has ")
    for each in found:
        line = next(line for line in lines if line.startswith(f"{each.mode}: peak "))
        assert all(f"{stage.name} " in line for stage in each.stages)
    assert {"encoding", "painting", "decoding"} <= {stage.name for stage in found[0].stages}
    least = [max(stage.total for stage in each.stages) for each in found]
    assert least[0] > least[1] >= least[2]
    assert any(line.startswith("plan: read") for line in lines)
    assert bars.shape[0] == 1 and bars.shape[2:] == (1200, 3) and float(bars.std()) > 0.05
