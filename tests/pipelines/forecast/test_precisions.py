"""A time for every precision that any card may get, of every family and of painting; a count that fails is said."""

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
import torch
from anygpu.compat.device import precision as precisions
from anygpu.compat.device.precision import PRECISION, Precision
from anygpu.compat.device.probe_store import OK, UNUSABLE, ProbeResult
from anygpu.compat.device.rates import ATTENTION, CONVOLUTION, PRODUCT
from anygpu.compat.device.work import Pace, Work, counting
from anygpu.compat.transforms.fp16 import apply_fp16_safe
from anygpu.pipelines.forecast import counts
from anygpu.pipelines.forecast import seconds as forecast
from anygpu.pipelines.forecast.times import time_forecast
from anygpu.pipelines.sizes import Size
from simulated import test_families as families
from simulated.test_families import CASES

SAFE = precisions._EXPLICIT[precisions.SAFE]
PACE = Pace(1e9, 1e9, 1e9, 1e9, 0.0)
HALF, BF16 = torch.float16, torch.bfloat16
QUICK = ("ltx",)
loaded_for = cache(families.loaded_for)  # nothing here changes a pipeline
FAMILIES = [
    pytest.param(name, marks=[] if name in QUICK else [pytest.mark.full]) for name in CASES if name != "ltx image"
]
UNPICTURED = [cell for cell in FAMILIES if not str(cell.values[0]).endswith("image")]  # whose masks are data


def rows_of(pipeline) -> dict[str, Precision]:
    """Every row that a card may give this model, and each choice; those of the same dtypes once."""
    rows = (*PRECISION.values(), *pipeline.spec.rewrites.precision.rows.values(), *precisions._EXPLICIT.values())
    return {f"{row}, {row.residual}": row for row in rows}


def computing(work: Work) -> Counter:
    """Products, attentions and convolutions with their FLOPs, whatever bytes they move."""
    found: Counter = Counter()
    for (kind, flops, _), times in work.items():
        if kind in (PRODUCT, ATTENTION, CONVOLUTION):
            found[kind, flops] += times
    return found


@pytest.mark.full
@pytest.mark.parametrize("name", FAMILIES)
def test_every_precision_has_a_time(tiny_folder, monkeypatch, name):
    monkeypatch.setattr("anygpu.pipelines.forecast.times.pace_of", lambda *_: PACE)
    pipeline = loaded_for(CASES[name], tiny_folder, "cpu")
    run = forecast.planned_run(pipeline, Size(64, 64, CASES[name].frames))
    for title, row in rows_of(pipeline).items():
        time = time_forecast(replace(pipeline, device=replace(pipeline.device, precision=row)), run)
        assert time is not None and time.seconds > 0, title


@pytest.mark.parametrize("name", FAMILIES)
def test_safe_fp16_computes_what_bf16_does_in_both_forms_of_its_products(tiny_folder, name):
    """But for fp32 products of fp16 parts, which are three where the sums come out in fp32."""
    pipeline, size = loaded_for(CASES[name], tiny_folder, "cpu"), Size(64, 64, CASES[name].frames)
    bf16 = counts.transformer_work(
        replace(pipeline, device=replace(pipeline.device, precision=Precision(BF16, BF16, BF16, ""))), size
    )
    for status in (UNUSABLE, OK):
        probes = {counts.FP32_OUTPUT: ProbeResult(status, "")}
        safe = counts.transformer_work(
            replace(pipeline, device=replace(pipeline.device, precision=SAFE, probes=probes)), size
        )
        more, less = computing(safe) - computing(bf16), computing(bf16) - computing(safe)
        assert Counter({(kind, flops / 3): times for (kind, flops), times in more.items()}) == less
        assert (status == OK or not more) and safe.bytes > bf16.bytes


@pytest.mark.parametrize("name", UNPICTURED)
def test_safe_fp16_moves_what_its_rewrite_moves(tiny_folder, name):
    """Counted without data beside a run of the rewritten transformer, which a CPU has without fp32-output products."""
    pipeline = loaded_for(CASES[name], tiny_folder, "cpu")
    pipeline = replace(pipeline, device=replace(pipeline.device, precision=SAFE))
    size = Size(64, 64, CASES[name].frames, text=6)
    call = counts.empty_call(pipeline, size, 1)
    given = {key: getattr(call, key) for key in call.__slots__ if isinstance(getattr(call, key), torch.Tensor)}
    ones = replace(call, **{key: torch.ones(value.shape, dtype=value.dtype) for key, value in given.items()})
    module = counts.built(pipeline, "transformer", pipeline.configs["transformer"], HALF).to_empty(device="cpu")
    apply_fp16_safe(module.requires_grad_(False), pipeline.family)
    with counting() as ran:
        pipeline.spec.code.call_transformer(pipeline, module, ones)
    counted = counts.transformer_work(pipeline, size)
    assert counted.flops == ran.flops and counted.bytes == pytest.approx(ran.bytes, rel=0.02)
