"""HunyuanVideo 1.5's sparse attention beside its publisher's code, in a pipeline, and what it costs."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from anygpu.compat.errors import UnsupportedError
from anygpu.compat.transforms.attention import Attention
from anygpu.compat.transforms.attention_processors import JointProcessor
from anygpu.compat.transforms.compile import CompileSettings
from anygpu.compat.transforms.sparse_attention import SparseAttention
from anygpu.pipelines import stages
from anygpu.pipelines.base import PromptRequest, SampleSettings, Silent
from anygpu.pipelines.forecast.counts import transformer_work
from anygpu.pipelines.load.folder import load
from anygpu.pipelines.pipeline import Pipeline
from anygpu.pipelines.requests import LoadRequest
from anygpu.pipelines.sizes import Size, sampling_bytes
from anygpu.pipelines.speed import SpeedRequest
from published import loops
from safetensors.torch import load_file
from torch.nn import functional

GRIDS = [(loops.SPARSE_GRIDS[0], 2**16), (loops.SPARSE_GRIDS[1], 2**26)]
GRIDS += [pytest.param(grid, 2**20, marks=pytest.mark.full) for grid in loops.SPARSE_GRIDS[1:]]


@pytest.mark.parametrize(("grid", "budget"), GRIDS)
def test_it_equals_its_publishers(grid: tuple[int, int, int], budget: int) -> None:
    """Where one tile of one head is gathered at a time, and where many are; both heads, which lie innermost."""
    query, key, value = (each.transpose(1, 2).repeat(1, 1, 2, 1).transpose(1, 2) for each in loops.sparse_tokens(grid))
    expected, kept = load_file(loops.SPARSE)["x".join(map(str, grid))], slice(None, None, loops.SPARSE_STEP)
    found = SparseAttention(Attention(budget_bytes=budget), grid)(query, key, value)
    assert found.shape == query.shape
    assert float((found[0, :, kept] - expected).abs().max()) < 1e-6
    whole = functional.scaled_dot_product_attention(query[:, :, kept], key, value)[0]
    assert float((whole - expected).abs().max()) > 1e-3, "not what whole attention gives"


@pytest.mark.parametrize("grid", [(1, 32, 24), (12, 8, 8)])
def test_two_whole_tiles_see_all(grid: tuple[int, int, int]) -> None:
    """Also where heads lie innermost, as JointProcessor has them, and tiling moves and pads nothing."""
    query, key, value = (torch.randn(1, math.prod(grid) + 60, 4, 16).transpose(1, 2) for _ in range(3))
    whole = functional.scaled_dot_product_attention(query, key, value)
    torch.testing.assert_close(SparseAttention(Attention(), grid)(query, key, value), whole, rtol=0, atol=1e-5)


def loaded(folder: Path, attention: str, **request: Any) -> Pipeline:
    model = tiny.build("hunyuan_video_15", folder)
    return load(LoadRequest(model, device="cpu", precision="fp32", attention=attention, **request))


def test_a_pipeline_is_sparse_where_it_is_asked(tiny_folder: Path) -> None:
    """In the joint attention of every block; texts are refined as ever."""
    videos = {}
    for attention in ("auto", "sparse"):
        pipeline = loaded(tiny_folder, attention)
        prompt = stages.encode_prompt(pipeline, PromptRequest("a fox", ""), Silent())
        settings = SampleSettings(160, 128, 9, 1, seed=1, cfg=1.0)
        videos[attention] = stages.sample(pipeline, prompt, None, settings, Silent()).samples
    transformer: Any = pipeline.parts.read("transformer")
    made = [each.processor for each in transformer.modules() if hasattr(each, "processor")]
    joint = [each.attend for each in made if isinstance(each, JointProcessor)]
    sparse = [each.attend for each in made if isinstance(each.attend, SparseAttention)]
    assert joint == sparse and len(joint) == len(transformer.transformer_blocks) and len(made) > len(joint)
    assert joint[0].grid == (3, 8, 10)
    assert 1e-3 < float((videos["sparse"] - videos["auto"]).abs().max()) < 1.0


def test_who_cannot_take_it_says_so(tiny_folder: Path) -> None:
    words = "attention 'sparse'; expected it for HunyuanVideo 1.5 alone. Choose auto."
    with pytest.raises(UnsupportedError, match=re.escape(words)):
        load(LoadRequest(tiny.build("ltx", tiny_folder), device="cpu", attention="sparse"))
    with pytest.raises(UnsupportedError, match="attention 'sparse' with compile; expected one of the two"):
        loaded(tiny_folder, "sparse", speed=SpeedRequest(compile=CompileSettings()))


def test_forecasts_know_it(tiny_folder: Path) -> None:
    """A fifth of the products of attention are left at 720p, and its tokens are there in tiles too."""
    size, pipelines = Size(1280, 720, 121), [loaded(tiny_folder, attention) for attention in ("auto", "sparse")]
    works = [transformer_work(pipeline, size) for pipeline in pipelines]
    whole, sparse = (sum(of[row] * row[1] for row in of if row[0] == "attention") for of in works)
    assert 0.15 < sparse / whole < 0.25
    assert works[1].bytes > 1.05 * works[0].bytes, "what is gathered is moved"
    tokens = 31 * 45 * 80 * 4 * 32  # in fp32, of the tiny width
    assert sampling_bytes(pipelines[1], size) > sampling_bytes(pipelines[0], size) + 4 * tokens
