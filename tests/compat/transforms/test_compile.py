"""Compiled blocks: one graph for every prompt, seed and strength; a broken compiler costs one line; nothing leaks."""

import gc
import logging
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from anygpu.compat.device.execution import checked_layers
from anygpu.compat.errors import InputError, UnsupportedError
from anygpu.compat.memory.offloader import CHOICES
from anygpu.compat.transforms import compile as compiling
from anygpu.compat.transforms.compile import Compilation, CompileSettings, Strengths, require_offload
from anygpu.compat.transforms.fp16 import apply_fp16_safe
from anygpu.compat.transforms.fused import REFERENCE, fuse
from anygpu.compat.transforms.order import replace_attention
from compat.transforms.test_attention_processors import WHOLE, inputs_of, made
from torch import nn
from torch.nn import functional

WIDTH = 32
EAGER = CompileSettings(backend="eager")  # Dynamo's graph as it is: what is counted here is graphs


@pytest.fixture(autouse=True)
def forgotten():
    """Each test begins and ends with no graph of any other."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def model(name: str = "ltx") -> nn.Module:
    found = made(name)
    replace_attention(found, functional.scaled_dot_product_attention)
    return found


def call(module: nn.Module, text: int, size: int = 3, rows: tuple[int, ...] = (1,), seed: int = 0) -> torch.Tensor:
    """LTX-Video's output for a text of ``text`` tokens, of which each row has so many fewer, and ``size`` frames."""
    generator = torch.Generator().manual_seed(seed)
    count = len(rows)
    mask = torch.arange(text)[None] < torch.tensor([text - (1 - row) * (text // 2) for row in rows])[:, None]
    with torch.no_grad():
        return module(
            hidden_states=torch.randn(count, size * 4, 128, generator=generator),
            encoder_hidden_states=torch.randn(count, text, WIDTH, generator=generator),
            timestep=torch.full((count,), 500.0),
            encoder_attention_mask=mask,
            num_frames=size,
            height=2,
            width=2,
            return_dict=False,
        )[0]


@pytest.mark.parametrize(
    ("kernels", "rows"),
    [
        pytest.param(True, (0, 1), id="kernels, guided"),
        pytest.param(True, (1,), id="kernels", marks=pytest.mark.full),
        pytest.param(False, (0, 1), id="guided", marks=pytest.mark.full),
        pytest.param(False, (1,), id="plain", marks=pytest.mark.full),
    ],
)
def test_ten_prompts_make_one_graph_and_a_new_size_one_more(kernels, rows):
    plain, module = model(), model()
    if kernels:
        for one in (plain, module):
            fuse(one, "reference")
            replace_attention(one, functional.scaled_dot_product_attention)
    compilation = Compilation(EAGER)
    compilation.attach(module)
    for seed, text in enumerate((9, 4, 30, 7, 64, 12, 5, 21, 16, 33)):
        given = rows if seed % 3 or len(rows) == 1 else rows[::-1]
        torch.testing.assert_close(
            call(module, text, 3, given, seed), call(plain, text, 3, given, seed), rtol=0, atol=0
        )
    assert compilation.graphs == 1 and not torch._dynamo.utils.counters["graph_break"]
    for size in (4, 5, 2, 7):
        torch.testing.assert_close(call(module, 9, size, rows), call(plain, 9, size, rows), rtol=0, atol=0)
    assert compilation.graphs == 2
    assert not compilation.failure and str(compilation).startswith("compile on: 2 blocks in 2 graphs")


def test_other_strengths_of_a_lora_are_the_same_graph():
    from peft import LoraConfig, inject_adapter_in_model

    module = model()
    with torch.random.fork_rng(devices=[]):
        config = LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False)
        inject_adapter_in_model(config, module.transformer_blocks)
    layers = [m for m in module.modules() if hasattr(m, "lora_A")]
    expected = []
    strengths = (1.0, 0.5, 0.0, -2.0)
    for strength in strengths:
        for layer in layers:
            layer.set_scale("default", strength)
        expected.append(call(module, 9))
    compilation = Compilation(EAGER)
    restore = compilation.attach(module)
    for strength, plain in zip(strengths, expected, strict=True):
        for layer in layers:
            layer.set_scale("default", strength)
        assert torch.equal(call(module, 9), plain)
    assert compilation.graphs == 1 and not torch.equal(expected[0], expected[1])
    assert restore is not None
    restore()
    assert all(type(layer.scaling) is dict and layer.scaling == {"default": -2.0 * 8 / 2} for layer in layers)


def test_a_refusal_leaves_the_part_as_it_was():
    module = model()
    layer, last = module.transformer_blocks[0], module.transformer_blocks[-1]
    layer.scaling, layer.lora_A, last._hf_hook = {"default": 1.0}, None, object()
    with pytest.raises(UnsupportedError, match="already moves"):
        Compilation(EAGER).attach(module)
    assert type(layer.scaling) is dict and "forward" not in vars(layer) and layer is not last


def test_strengths_are_the_numbers_they_stand_for():
    found = Strengths({"a": 0.1})
    x = torch.full((3,), 3.0, dtype=torch.bfloat16)
    assert torch.equal(x * found["a"], x * 0.1) and (x * found["a"]).dtype is torch.bfloat16


@pytest.mark.full
def test_prepared_again_it_keeps_its_graphs():
    module, compilation = model(), Compilation(EAGER)
    for _ in range(2):
        restore = compilation.attach(module)
        call(module, 9)
        assert restore is not None
        restore()
    assert compilation.graphs == 1
    assert all("forward" not in vars(block) for block in module.transformer_blocks)
    call(module, 5)
    assert compilation.graphs == 1, "restored blocks still run compiled"


def broken(_graph: Any, _inputs: Any) -> Any:
    raise RuntimeError("no C++ compiler was found\nlong traceback")


def test_a_broken_compiler_gives_eager_and_one_line(caplog):
    plain, module = model(), model()
    compilation = Compilation(CompileSettings(backend=broken))
    compilation.attach(module)
    with caplog.at_level(logging.WARNING, compiling.__name__):
        assert torch.equal(call(module, 9), call(plain, 9))
        assert torch.equal(call(module, 5), call(plain, 5))
    assert len(caplog.records) == 1
    assert str(compilation) == "compile off: RuntimeError: no C++ compiler was found"


@pytest.mark.full
def test_an_unknown_compiler_gives_eager_and_one_line():
    module = model()
    compilation = Compilation(CompileSettings(backend="no such backend"))
    compilation.attach(module)
    call(module, 9)
    assert "no such backend" in compilation.failure


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no"), RuntimeError("out of memory"), KeyboardInterrupt()])
def test_what_is_no_fault_of_the_compiler_is_raised(error):
    def compiler(_graph: Any, _inputs: Any) -> Any:
        raise error

    module = model()
    compilation = Compilation(CompileSettings(backend=compiler))
    compilation.attach(module)
    with pytest.raises(type(error)):
        call(module, 9)
    assert not compilation.failure


@pytest.mark.full
def test_more_sizes_than_the_cache_holds_run_without():
    plain, module = model(), model()
    compilation = Compilation(CompileSettings(backend="eager", dynamic="none", cache_size=1))
    compilation.attach(module)
    assert torch.equal(call(module, 9), call(plain, 9)) and compilation.graphs == 1
    assert torch.equal(call(module, 5), call(plain, 5))
    assert "compile_cache_size" in compilation.failure


@pytest.mark.full
def test_nothing_global_changes_and_nothing_outlives_the_pipeline():
    from torch._dynamo import config

    before = config.get_config_copy() if hasattr(config, "get_config_copy") else {}
    module, compilation = model(), Compilation(EAGER)
    compilation.attach(module)
    call(module, 9)
    stock = type(module.transformer_blocks[0]).forward
    copies = [weakref.ref(function.plain) for function in compilation._made.values()]
    assert copies and all(copy().__code__ is not stock.__code__ for copy in copies)
    other = model()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    call(other, 5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs, "another pipeline runs compiled"
    block = weakref.ref(module.transformer_blocks[0])
    del module, compilation
    gc.collect()
    assert block() is None and all(copy() is None for copy in copies)
    assert not before or config.get_config_copy() == before


@pytest.mark.full
def test_a_cancel_is_obeyed_around_a_compiled_block_and_makes_no_graph():
    module, compilation = model(), Compilation(EAGER)
    compilation.attach(module)
    for _ in range(2):  # each run brings a progress of its own
        calls: list[int] = []
        with checked_layers(module, partial(calls.append, 1)):
            call(module, 9)
        assert len(calls) >= len(module.transformer_blocks)
    assert compilation.graphs == 1


@pytest.mark.full
@pytest.mark.parametrize(("name", "fused"), [("hunyuan_video", False), ("hunyuan_video", True), ("mochi", True)])
def test_safe_fp16_compiles(name, fused):
    plain, module, given = made(name), made(name), inputs_of(name, WHOLE)
    for one in (plain, module):
        apply_fp16_safe(one, name)
        assert not fused or not fuse(one, REFERENCE).left
        replace_attention(one, functional.scaled_dot_product_attention)
    compilation = Compilation(EAGER)
    compilation.attach(module)
    with torch.no_grad():
        found, expected = module(**given)[0], plain(**given)[0]
    assert compilation.graphs == 2 and not compilation.failure
    atol = 0 if name == "hunyuan_video" else 2e-3  # Mochi's gated products are in fp32 there
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


def test_each_offload_mode_works_or_is_refused_with_a_reason():
    assert set(CHOICES) - {"auto"} == set(compiling.WITH_OFFLOAD)
    for mode in ("none", "model", "group"):
        require_offload(mode)
    for mode in ("sequential", "comfyui"):
        with pytest.raises(UnsupportedError, match=f"compile with offload '{mode}': it .*no block is one graph"):
            require_offload(mode)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"mode": "fastest"}, "compile_mode 'fastest'"),
        ({"dynamic": "some"}, "compile_dynamic 'some'"),
        ({"cache_size": 0}, "compile_cache_size 0"),
    ],
)
def test_settings_out_of_range(given, said):
    with pytest.raises(InputError, match=said):
        CompileSettings(**given)


@pytest.mark.full
@pytest.mark.parametrize("name", ["hunyuan_video", "hunyuan_video_15", "mochi", "ltx"])
def test_a_vae_compiles(name):
    vae = made(name, "vae")
    latents = torch.randn(1, vae.config.latent_channels, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = vae.decode(latents, return_dict=False)[0]
        compilation = Compilation(CompileSettings(backend="eager", dynamic="all", cache_size=64, vae=True))
        assert compilation.attach(vae) is not None
        found = vae.decode(latents, return_dict=False)[0]
    assert torch.equal(found, expected)
    assert compilation.graphs and not compilation.failure
