"""Attention on the simulated accelerator: memory stays under the budget, and each pipeline runs what it was given."""

import math
from typing import Any

import pytest
import tiny
import torch
from anygpu.compat.transforms import attention
from anygpu.compat.transforms.attention import Attention
from anygpu.compat.transforms.attention_chunks import chunk_size, chunked, fp32_attention, score_bytes
from anygpu.compat.transforms.attention_kernels import EXPLICIT
from anygpu.compat.transforms.sparse_attention import SparseAttention, shares
from anygpu.pipelines import stages
from anygpu.pipelines.base import Prompt, PromptRequest, SampleSettings, Silent
from anygpu.pipelines.forecast.memory import forecast
from anygpu.pipelines.load.folder import load
from anygpu.pipelines.requests import LoadRequest
from anygpu.pipelines.sizes import MARGIN, SPARSE_COPIES, Size
from torch.nn.attention import SDPBackend, sdpa_kernel

from simulated import accelerator, fitting
from simulated.test_families import CASES, MODES, ROUNDING, SMALL, loaded_for, rendered

SHAPES = {  # (B, H, N, M, D): video tokens, video to text, Mochi's VAE over time
    "joint": (1, 4, 1500, 1500, 32),
    "cross": (2, 2, 3000, 77, 64),
    "over time": (600, 2, 28, 28, 16),
    "one head": (1, 1, 700, 2100, 128),
}
SUMS = 10 * ROUNDING  # fp32 sums in another order in every attention, through all blocks, steps and the VAE
BUDGETS = (1_000_000, 4_000_000, 64_000_000)


def peak_of(device: torch.device, budget: int, shape: tuple[int, ...], dtype: torch.dtype, **named: Any) -> int:
    """Most bytes on the device beside operands and result."""
    batch, heads, queries, keys, width = shape
    q, k, v = (torch.randn(batch, heads, n, width, dtype=dtype).to(device) for n in (queries, keys, keys))
    before = accelerator.memory().allocated_bytes
    accelerator.reset_peak()
    found = chunked(q, k, v, budget_bytes=budget, **named)
    return accelerator.memory().peak_bytes - before - found.nbytes


@pytest.mark.full
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", SHAPES)
def test_peak_is_under_the_budget(acc: torch.device, name: str, budget: int) -> None:
    shape = SHAPES[name]
    for dtype in (torch.float32, torch.bfloat16):
        assert 0 < peak_of(acc, budget, shape, dtype) <= max(budget, budget // 8 + least(shape, dtype)), dtype


@pytest.mark.parametrize("kind", ["causal", "mask", "floating"])
def test_peak_is_under_the_budget_with_a_mask(acc: torch.device, kind: str) -> None:
    shape, budget = (1, 2, 900, 900, 32), 4_000_000
    mask = {"mask": torch.ones(1, 1, 900, 900, dtype=torch.bool), "floating": torch.zeros(1, 1, 900, 900)}.get(kind)
    named = {"causal": True} if mask is None else {"mask": mask.to(acc)}
    assert 0 < peak_of(acc, budget, shape, torch.float32, **named) <= budget


@pytest.mark.full
def test_sparse_attention_gives_the_cpus_and_has_the_memory_of_its_forecast(acc: torch.device) -> None:
    grid, budget = (7, 24, 32), 8_000_000
    tokens = [torch.randn(1, 2, math.prod(grid) + 60, 32, generator=torch.Generator().manual_seed(n)) for n in range(3)]
    expected = SparseAttention(Attention(budget_bytes=budget), grid)(tokens[0].clone(), *tokens[1:])
    there = [each.to(acc) for each in tokens]
    before = accelerator.memory().allocated_bytes
    accelerator.reset_peak()
    found = SparseAttention(Attention(budget_bytes=budget), grid)(*there)
    beside = accelerator.memory().peak_bytes - before - found.nbytes
    assert beside <= MARGIN * (SPARSE_COPIES * shares(grid)[2] * found.nbytes + budget)
    torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=1e-5)


def least(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """What one row of scores and the keys and values of one head take, which no budget can go under."""
    _, _, _, keys, width = shape
    return 4 * keys * (2 * width + 1) + 16 * (width + 1) + 4096


@pytest.fixture(scope="module")
def prompt(tiny_folder: Any) -> Prompt:
    """A prompt of the tiny LTX-Video, which the heavy one takes too."""
    return stages.encode_prompt(loaded_for(CASES["ltx"], tiny_folder, "cpu"), PromptRequest("a red fox"), Silent())


@pytest.mark.parametrize("budget", [200_000, 20_000_000])
def test_a_forecast_knows_the_scores_of_attention_in_chunks(
    acc: torch.device, tiny_folder: Any, prompt: Prompt, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which are more than the feed-forward's states, or less: those of attention alone come beside them."""
    monkeypatch.setattr(attention, "LEAST_BUDGET", budget)
    monkeypatch.setattr(attention, "MOST_BUDGET", budget)
    asked, size = SampleSettings(160, 128, 33, steps=2, seed=3, cfg=1.0), Size(160, 128, 33)
    with sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        pipeline = fitting.heavy("ltx", tiny_folder, acc, "model")
        stages.sample(pipeline, prompt, None, asked, Silent())
    peak = pipeline.offloader.memory_stats.stages[-1].peak_bytes
    need = next(need for need in forecast(pipeline, size, "model").stages if need.name == "sampling")
    assert need.activations == pytest.approx(peak - pipeline.weights["transformer"].total, rel=0.1)
    fitting.forget(pipeline)


def test_torchs_math_would_not_be(acc: torch.device) -> None:
    """The fallback that this replaces, on the same shape; and auto, where no kernel is fused."""
    q, k, v = (torch.randn(1, 4, 1500, 32).to(acc) for _ in range(3))
    attend, peaks = Attention("auto", BUDGETS[0]), []
    with sdpa_kernel(SDPBackend.MATH):
        for call in (torch.nn.functional.scaled_dot_product_attention, attend):
            before = accelerator.memory().allocated_bytes
            accelerator.reset_peak()
            call(q, k, v)
            peaks.append(accelerator.memory().peak_bytes - before)
    assert peaks[0] >= score_bytes(q, k) > 30 * BUDGETS[0]
    assert peaks[1] <= BUDGETS[0] + q.nbytes


def test_widening_stays_under_the_budget_too(acc: torch.device) -> None:
    q, k, v = (torch.randn(1, 8, 512, 32, dtype=torch.bfloat16).to(acc) for _ in range(3))
    before = accelerator.memory().allocated_bytes
    accelerator.reset_peak()
    found = fp32_attention(q, k, v, 600_000)
    assert 0 < accelerator.memory().peak_bytes - before - found.nbytes <= 600_000
    assert chunk_size(q, k, v, None, False, 600_000)[2] < 512


@pytest.mark.parametrize("name", ["hunyuan_video_15", "hunyuan_video", "framepack", "mochi", "ltx"])
def test_math_in_chunks_gives_the_same_video(
    acc: torch.device, tiny_folder: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device without any fused kernel, with a budget so small that every joint attention is cut."""
    case, cuts = CASES[name], []

    def counted(query: torch.Tensor, key: torch.Tensor, *rest: Any) -> torch.Tensor:
        cuts.append(score_bytes(query, key))
        return chunked(query, key, *rest)

    expected = rendered(loaded_for(case, tiny_folder, "cpu"), case)
    monkeypatch.setattr(attention, "chunked", counted)
    budget = 2_000 if name == "ltx" else 20_000  # LTX-Video has 8 tokens here
    monkeypatch.setattr(attention, "LEAST_BUDGET", budget)
    monkeypatch.setattr(attention, "MOST_BUDGET", budget)
    with sdpa_kernel(SDPBackend.MATH):
        pipeline = loaded_for(case, tiny_folder, "acc:0")
        found = rendered(pipeline, case)
    assert len(cuts) >= 4, "each joint attention: two blocks, two steps"
    assert "exact, in chunks of queries" in pipeline.plan.decisions[2].verdict
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=SUMS, rtol=SUMS)


def seen_by(choice: str, monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.dtype, int]]:
    """The dtype and head width of each call of a kernel from now on."""
    kernel, seen = EXPLICIT[choice], list[tuple[torch.dtype, int]]()

    def run(query: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        seen.append((query.dtype, query.shape[-1]))
        return kernel(query, *rest)

    monkeypatch.setitem(EXPLICIT, choice, run)
    return seen


@pytest.mark.full
@pytest.mark.parametrize("offload", MODES)
def test_mochi_obeys_in_every_offload_mode_each_pipeline_its_own(
    acc: torch.device, tiny_folder: Any, offload: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two pipelines from one folder take turns; the second's choice is not the first's."""
    ran = seen_by("native_flash", monkeypatch)
    folder = tiny.build("mochi", tiny_folder)
    pipeline = {
        choice: load(LoadRequest(folder, precision="fp32", offload=offload, device="acc:0", attention=choice))
        for choice in ("native_flash", "native_math")
    }
    ran.clear()  # of the trial while loading
    flash, _ = rendered(pipeline["native_flash"], SMALL["mochi"])
    chosen = len(ran)
    exact, _ = rendered(pipeline["native_math"], SMALL["mochi"])
    assert chosen == 2 * 2 * 2, "2 steps: two blocks, for two rows of the batch; the pool's heads have another width"
    assert len(ran) == chosen
    again, _ = rendered(pipeline["native_flash"], SMALL["mochi"])
    assert len(ran) == 2 * chosen
    torch.testing.assert_close(exact, flash, atol=SUMS, rtol=SUMS)
    assert torch.equal(again, flash)
    said = str(pipeline["native_flash"].plan.decisions[2])
    assert said == "attention native_flash: chosen: torch's own FlashAttention"


@pytest.mark.parametrize(("name", "precision"), [("mochi", "fp32"), ("hunyuan_video", "fp16-safe")])
def test_a_chosen_kernel_gets_only_what_it_was_tried_with(
    acc: torch.device, tiny_folder: Any, name: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mochi's pool has wider heads than its blocks, and under fp16-safe a token refiner stays in fp32."""
    seen = seen_by("native_flash", monkeypatch)
    pipeline = loaded_for(SMALL[name], tiny_folder, acc, precision=precision, attention="native_flash")
    rendered(pipeline, SMALL[name])
    assert len(seen) > 4 and len({*seen}) == 1, seen
