"""3-D convolutions without 3-D convolutions: exact, as accurate, bounded, reversible, and right in every real VAE."""

import copy
import dataclasses
import functools
import math
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from anygpu.compat.device.facts import DeviceFacts, facts_for
from anygpu.compat.device.probe_store import ProbeStore
from anygpu.compat.errors import UnsupportedError
from anygpu.compat.transforms import conv3d_choice, conv3d_methods
from anygpu.compat.transforms.conv3d import history_tables, swap_conv3d
from anygpu.compat.transforms.conv3d_choice import (
    Conv3dChoice,
    Conv3dLayer,
    choose_by,
    form_error,
    form_times,
    runs,
    sample_size,
    stored_timings,
)
from anygpu.compat.transforms.conv3d_methods import FORMS, Conv3dMethod, Geometry, convolve, covers, padded
from convolutions import always
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

CPU = torch.device("cpu")
CONFIGURATIONS = 300
FORBIDDEN = {"conv3d": False}


class NoVolumes(TorchDispatchMode):
    """A device without 3-D convolution and 3-D padding: the operators raise, and ``seen`` counts all others."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        of_volumes = any(isinstance(value, torch.Tensor) and value.dim() == 5 for value in args[:1])
        if "pad3d" in name or (of_volumes and ("conv" in name or name in ("aten::pad", "aten::constant_pad_nd"))):
            raise NotImplementedError(f"{name} is not implemented for volumes on this device")
        self.seen.append(name)
        return func(*args, **(kwargs or {}))


def integers(*size: int) -> torch.Tensor:
    """Small integers: every sum of products is exact in fp32, so equality can be demanded."""
    return torch.randint(-4, 5, size).float()


@functools.cache
def configurations() -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, Geometry]]:
    """Random inputs, weights, biases, geometries; every third kernel is a point, every fifth as large as its stride."""
    dice = random.Random(3)
    rows = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        for index in range(CONFIGURATIONS):
            point, patch = index % 3 == 0, index % 5 == 0
            groups = 1 if patch or point else dice.choice((1, 1, 2, 3))
            fan, out = dice.randint(1, 4), groups * dice.randint(1, 9)  # kernels smaller and larger than a window
            kernel = (1, 1, 1) if point else tuple(dice.randint(1, 3) for _ in range(3))
            stride = kernel if patch else tuple(dice.randint(1, 3) for _ in range(3))
            padding = tuple(dice.randint(0, 2) for _ in range(3))
            dilation = tuple(dice.randint(1, 1 if patch else 2) for _ in range(3))
            x = integers(dice.randint(1, 2), groups * fan, *(dice.randint(5, 8) for _ in range(3)))
            bias = integers(out) if dice.random() < 0.7 else None
            rows.append((x, integers(out, fan, *kernel), bias, Geometry(stride, padding, dilation, groups)))
    return rows


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


# The forms ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", Conv3dMethod)
def test_equals_conv3d_bit_for_bit(form: Conv3dMethod) -> None:
    """Also when every chunk is as small as it can be."""
    tried = 0
    for x, weight, bias, geometry in configurations():
        if covers(form, tuple(weight.shape[2:]), geometry):
            expected = F.conv3d(x, weight, bias, *geometry)
            for chunk in (0, 1):
                assert torch.equal(convolve(form, x, weight, bias, geometry, chunk), expected), geometry
            tried += 1
    assert tried >= {Conv3dMethod.POINTWISE: 100, Conv3dMethod.PATCHES: 60}.get(form, CONFIGURATIONS)


@pytest.mark.parametrize(
    "form", [form for form in Conv3dMethod if form not in (Conv3dMethod.PATCHES, Conv3dMethod.POINTWISE)]
)
def test_needs_no_other_layout(form: Conv3dMethod) -> None:
    """Channels-last, frames-first and sliced inputs and weights."""
    x, weight, bias = integers(2, 6, 5, 6, 7), integers(4, 6, 3, 3, 3), integers(4)
    wide = integers(4, 8, 3, 3, 3)
    wide[:, 1:7] = weight
    expected = F.conv3d(x, weight, bias)
    layouts = [x.contiguous(memory_format=torch.channels_last_3d), padded(x, (0,) * 6, frames_first=True)]
    layouts.append(F.pad(x, (0, 2, 0, 0, 1, 0))[:, :, 1:, :, :7])
    for other in layouts:
        assert not other.is_contiguous()
        assert torch.equal(convolve(form, other, wide[:, 1:7], bias, Geometry()), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("channels", "kernel", "patched"), [(128, 3, False), (96, 1, False), (48, 4, True)])
def test_as_accurate_as_conv3d(channels: int, kernel: int, patched: bool, dtype: torch.dtype) -> None:
    """The error against fp64 is within a tenth of that of ``F.conv3d`` in the same dtype (and layout).

    Or of ``F.conv2d`` over as many terms, where that is larger: on CPUs without AVX-512 it sums them one after the
    other. Sixteen voxels at least: so does the matrix product for fewer columns.
    """
    generator = torch.Generator().manual_seed(0)
    size = (min(kernel, 3), kernel, kernel)
    geometry = Geometry(size if patched else (1, 1, 1))
    x = torch.randn(1, channels, 4, 16, 16, generator=generator).to(dtype)
    weight = torch.randn(32, channels, *size, generator=generator)
    weight = (weight / weight[0].numel() ** 0.5).to(dtype)
    bias = torch.randn(32, generator=generator).to(dtype)
    exact = F.conv3d(x.double(), weight.double(), bias.double(), *geometry)
    stride = geometry.stride[0]
    frames = x[0].unfold(1, size[0], stride).permute(1, 4, 0, 2, 3).flatten(1, 2)
    flat = F.conv2d(frames, weight.transpose(1, 2).flatten(1, 2), bias, geometry.stride[1:])
    flat_error = relative_error(flat.transpose(0, 1)[None], exact)
    for form in filter(lambda form: covers(form, size, geometry), Conv3dMethod):
        layout = torch.channels_last_3d if form is Conv3dMethod.CHANNELS_LAST else torch.contiguous_format
        upstream = F.conv3d(*(t.contiguous(memory_format=layout) for t in (x, weight)), bias, *geometry)
        found = convolve(form, x, weight, bias, geometry)
        assert relative_error(found, exact) <= 1.1 * max(relative_error(upstream, exact), flat_error), form


def test_one_frame_per_call_copies_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    windows: list[torch.Tensor] = []
    original = F.conv2d
    monkeypatch.setattr(conv3d_methods.F, "conv2d", lambda x, *rest: (windows.append(x), original(x, *rest))[1])
    x = padded(torch.rand(1, 8, 5, 9, 9), (1, 1, 1, 1, 2, 0), "replicate", frames_first=True)
    convolve(Conv3dMethod.FRAMES, x, torch.rand(4, 8, 3, 3, 3), None, Geometry())
    storage = x.untyped_storage().data_ptr()
    assert [window.untyped_storage().data_ptr() for window in windows] == [storage] * 5
    windows.clear()
    convolve(Conv3dMethod.FRAMES, x, torch.rand(4, 8, 1, 3, 3), None, Geometry(), 3 * 8 * 11 * 11 * 4)
    assert [len(window) for window in windows] == [3, 3, 1], "a kernel of one frame takes several at once"


@pytest.mark.parametrize("form", [Conv3dMethod.NATIVE, Conv3dMethod.FP32, Conv3dMethod.CHANNELS_LAST])
def test_native_forms_stay_below_their_bound(form: Conv3dMethod, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    original = F.conv3d
    monkeypatch.setattr(conv3d_methods.F, "conv3d", lambda x, *rest: (sizes.append(x.nbytes), original(x, *rest))[1])
    x, bound = torch.rand(1, 4, 12, 6, 6), 4 * 6 * 6 * 4 * 5  # five frames in fp32
    convolve(form, x.bfloat16(), torch.rand(4, 4, 3, 3, 3).bfloat16(), None, Geometry(padding=(1, 1, 1)), bound)
    assert len(sizes) >= 2 and max(sizes) <= bound


def test_columns_stay_below_their_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    original = conv3d_methods._columns
    monkeypatch.setattr(
        conv3d_methods, "_columns", lambda *rest: (made := original(*rest), sizes.append(made.nbytes))[0]
    )
    bound = 8 * 27 * 10 * 4 * 3  # three rows of ten
    convolve(Conv3dMethod.MATMUL, torch.rand(1, 8, 4, 12, 12), torch.rand(4, 8, 3, 3, 3), None, Geometry(), bound)
    assert len(sizes) == 2 * 4 and max(sizes) == bound


def test_fp32_holds_under_autocast() -> None:
    """Autocast would turn the operands of the fp32 forms back into bf16."""
    x, weight = torch.randn(1, 32, 4, 6, 6), torch.randn(8, 32, 3, 3, 3)
    for form in (Conv3dMethod.FP32, Conv3dMethod.MATMUL):
        plain = convolve(form, x, weight, None, Geometry())
        with torch.autocast("cpu", torch.bfloat16):
            assert not torch.equal(F.conv3d(x, weight).float(), plain)
            assert torch.equal(convolve(form, x, weight, None, Geometry()), plain)


@pytest.mark.parametrize("frames_first", [False, True])
@pytest.mark.parametrize("mode", ["constant", "replicate", "reflect", "circular"])
def test_padding_equals_upstream_without_3d_operators(mode: str, frames_first: bool) -> None:
    for layout in (torch.contiguous_format, torch.channels_last_3d):
        x = integers(2, 3, 4, 5, 6).contiguous(memory_format=layout)
        for padding in ((1, 2, 2, 0, 3, 0), (0, 0, 0, 0, 2, 1), (1, 1, 1, 1, 0, 0), (0,) * 6):
            expected = F.pad(x, padding, mode=mode)
            with NoVolumes():
                found = padded(x, padding, mode, frames_first)
            assert torch.equal(found, expected)
            if frames_first:
                assert found.transpose(1, 2).is_contiguous()
            elif mode != "circular":  # torch pads a plane so into fresh contiguous memory
                assert found.is_contiguous(memory_format=layout)


# Which form --------------------------------------------------------------------------------------------------------

GENERAL, PATCHES, POINTWISE = ((3, 3, 3), (1, 1, 1)), ((1, 2, 2), (1, 2, 2)), ((1, 1, 1), (1, 1, 1))


def layer(shape: tuple, dtype: torch.dtype = torch.bfloat16, groups: int = 1) -> Conv3dLayer:
    return Conv3dLayer("conv", 8, 8, shape[0], Geometry(stride=shape[1], groups=groups), dtype)


@pytest.mark.parametrize(
    ("facts", "shape", "form"),
    [
        ({}, GENERAL, None),
        ({"backend": "cpu"}, PATCHES, None),
        ({"backend": "cuda"}, PATCHES, Conv3dMethod.PATCHES),
        ({"backend": "cuda"}, GENERAL, None),
        # before sm80: no bf16 convolution of any kind
        ({"backend": "cuda", "conv3d": {"bf16": False}, "conv2d": {"bf16": False}}, GENERAL, Conv3dMethod.FP32),
        ({"backend": "cuda", "conv3d": {"bf16": False}, "conv2d": {"bf16": False}}, PATCHES, Conv3dMethod.PATCHES),
        ({"conv3d": {"bf16": False}}, GENERAL, Conv3dMethod.FRAMES),
        (FORBIDDEN, GENERAL, Conv3dMethod.FRAMES),
        (FORBIDDEN, POINTWISE, Conv3dMethod.POINTWISE),
        ({"backend": "xla"}, POINTWISE, Conv3dMethod.POINTWISE),
        ({"backend": "xla"}, GENERAL, None),
        ({"conv3d": False, "conv2d": False}, GENERAL, Conv3dMethod.MATMUL),
        ({"conv3d": False, "conv2d": False, "conv3d_channels_last": True}, GENERAL, Conv3dMethod.CHANNELS_LAST),
        ({"pad3d": False}, GENERAL, Conv3dMethod.FRAMES),
        ({"backend": "rocm"}, GENERAL, Conv3dMethod.FRAMES),
        ({"backend": "rocm", "conv2d": False}, GENERAL, None),
        ({"backend": "mps", "conv3d": False, "conv3d_channels_last": True}, GENERAL, Conv3dMethod.FRAMES),
        ({"backend": "cpu", "conv3d": {"bf16": False}}, POINTWISE, Conv3dMethod.FP32),
        ({"backend": "cpu", "conv3d": False}, POINTWISE, Conv3dMethod.POINTWISE),
        # no convolution in bf16, and its cast to fp32 lies: nothing but products is left
        (
            {"conv3d": {"bf16": False}, "conv2d": {"bf16": False}, "cast": {"bf16_to_fp32": False}},
            GENERAL,
            Conv3dMethod.MATMUL,
        ),
        ({"contiguous_weights": True}, GENERAL, Conv3dMethod.NATIVE),
        ({"conv_bytes": 1 << 30}, GENERAL, Conv3dMethod.NATIVE),
    ],
)
def test_choice_by_facts(facts: dict, shape: tuple, form: Conv3dMethod | None) -> None:
    choice = choose_by(facts)(layer(shape))
    assert (choice.form if choice else None) is form
    assert choice is None or len(choice.why) > 10
    assert choice is None or choice.chunk_bytes == facts.get("conv_bytes", 0)


def test_timings_decide_among_what_runs() -> None:
    wide = layer(GENERAL)
    measured = {wide.key: {"native": 3.0, "channels_last": 1.0, "frames": 2.0, "fp32": 0.5}}

    def timings(asked: Conv3dLayer, forms: tuple[Conv3dMethod, ...]) -> dict[str, float]:
        return measured.get(asked.key, {})

    chosen = choose_by({"backend": "rocm"}, timings)(wide)
    assert chosen is not None and chosen.form is Conv3dMethod.FP32 and "fp32 0.50 ms" in chosen.why
    facts = {"conv3d": {"fp32": False, "bf16": True}}
    assert choose_by(facts, timings)(wide).form is Conv3dMethod.CHANNELS_LAST
    assert choose_by({"conv3d": False}, timings)(wide).form is Conv3dMethod.FRAMES
    assert choose_by({}, lambda *_: {"native": 1.0, "frames": 2.0})(wide) is None
    assert choose_by({}, timings)(layer(GENERAL, torch.float16)) is None


def test_timings_are_taken_on_a_real_accelerator_only_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu: DeviceFacts = facts_for("cpu")
    gpu = dataclasses.replace(cpu, device=torch.device("cuda", 0), backend="cuda", arch="sm90")
    asked = []

    def measured(
        layer: Conv3dLayer, device: torch.device, size: Any, forms: tuple[Conv3dMethod, ...]
    ) -> dict[str, float]:
        asked.append((device, forms))
        return {"native": 1.0}

    monkeypatch.setattr(conv3d_choice, "form_times", measured)
    for _ in range(2):
        timings = stored_timings(gpu, ProbeStore(gpu, tmp_path))
        assert timings(layer(GENERAL), (Conv3dMethod.NATIVE, Conv3dMethod.FRAMES)) == {"native": 1.0}
    assert asked == [(gpu.device, (Conv3dMethod.NATIVE, Conv3dMethod.FRAMES))]
    assert timings(layer(GENERAL, torch.float16), (Conv3dMethod.NATIVE,)) == {}, "one form needs no race"
    assert stored_timings(cpu, ProbeStore(cpu, tmp_path)) is None
    assert len(asked) == 1


def test_a_gain_too_small_to_trust_changes_nothing() -> None:
    near, far = {"native": 1.0, "frames": 0.85}, {"native": 1.0, "frames": 0.7}
    assert choose_by({}, lambda *_: near)(layer(GENERAL)) is None
    assert choose_by({}, lambda *_: far)(layer(GENERAL)).form is Conv3dMethod.FRAMES
    on_radeon = choose_by({"backend": "rocm"}, lambda *_: {"native": 0.9, "frames": 1.0})(layer(GENERAL))
    assert on_radeon.form is Conv3dMethod.FRAMES and "timed here" in on_radeon.why
    assert choose_by({"backend": "rocm"}, lambda *_: {"native": 0.7, "frames": 1.0})(layer(GENERAL)) is None
    without = choose_by({"backend": "rocm"}, lambda *_: {"matmul": 2.0, "fp32": 1.0})(layer(GENERAL))
    assert without.form is Conv3dMethod.FP32, "what the facts would take failed or takes too much"


LAUNCH, NOISE = 0.03, 0.06  # milliseconds of a call beside its arithmetic, and how far two calls lie apart
SPEED = {"native": 20e9, "frames": 16e9, "matmul": 4e9, "fp32": 2e9}  # products per millisecond of a made-up card


@pytest.mark.parametrize("channels", [(64, 64), (128, 128), (256, 128), (512, 512), (1024, 1024)])
@pytest.mark.parametrize("kernel", [(3, 3, 3), (1, 3, 3), (3, 1, 1)])
def test_noise_does_not_choose_at_the_size_that_is_timed(channels: tuple[int, int], kernel: tuple) -> None:
    """The clock of a card: launch, noise, arithmetic. At 5x32x32, which was timed once, noise decided."""
    conv = Conv3dLayer("conv", *channels, kernel, Geometry(padding=(0, 0, 0)), torch.bfloat16)
    products = channels[0] * channels[1] * kernel[0] * kernel[1] * kernel[2]
    noise = random.Random(0)

    def clock(size: tuple[int, int, int]) -> dict[str, float]:
        work = 2 * products * size[0] * size[1] * size[2]
        return {name: LAUNCH + noise.uniform(0, NOISE) + work / speed for name, speed in SPEED.items()}

    size = sample_size(conv)
    assert {choose_by({}, lambda *_: clock(size))(conv) for _ in range(200)} == {None}
    real = {name: 2 * products * 13 * 128 * 192 / speed for name, speed in SPEED.items()}
    assert choose_by({}, lambda *_: real)(conv) is None, "and so does a real decode"


def test_a_form_that_unfolds_its_input_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """MIOpen off: native Conv3d takes 27 inputs beside, wins the stopwatch and does not fit into a real decode."""
    beside = {"native": 27, "frames": 1}
    conv, held = Conv3dLayer("conv", 128, 128, (3, 3, 3), Geometry(), torch.bfloat16), [0]
    x_bytes = 2 * 128 * math.prod(sample_size(conv))

    def run(form: Conv3dMethod, *_: Any) -> torch.Tensor:
        held[0] = beside[form.value] * x_bytes
        return torch.zeros(0)

    monkeypatch.setattr(conv3d_choice, "convolve", run)
    monkeypatch.setattr(conv3d_choice, "form_error", lambda *_: 0.0)
    monkeypatch.setattr(conv3d_choice, "reset_peak", lambda _: held.__setitem__(0, 0))
    monkeypatch.setattr(
        conv3d_choice, "milliseconds", lambda ways, *_: {name: len(way()) + 1.0 for name, way in ways.items()}
    )
    forms = (Conv3dMethod.NATIVE, Conv3dMethod.FRAMES)
    monkeypatch.setattr(conv3d_choice, "peak_bytes", lambda _: held[0])
    assert set(form_times(conv, CPU, sample_size(conv), forms)) == {"frames"}
    monkeypatch.setattr(conv3d_choice, "peak_bytes", lambda _: None)
    assert set(form_times(conv, CPU, sample_size(conv), forms)) == {"native", "frames"}, "a device that does not tell"


def test_the_library_is_off_while_timing_where_it_is_off_around_the_vae(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise MIOpen searches for 10 to 40 minutes, and what is timed is not what runs."""
    radeon = dataclasses.replace(
        facts_for("cpu"), device=torch.device("cuda", 0), backend="rocm", arch="gfx1201", versions={"rocm": "7.2"}
    )
    seen = []

    def measured(*_: Any) -> dict[str, float]:
        seen.append((torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark))
        return {"native": 1.0}

    monkeypatch.setattr(conv3d_choice, "form_times", measured)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    stored_timings(radeon, ProbeStore(radeon, tmp_path))(layer(GENERAL), (Conv3dMethod.NATIVE, Conv3dMethod.FRAMES))
    assert seen == [(False, False)] and torch.backends.cudnn.enabled


def test_a_form_far_behind_is_not_timed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []

    def slow(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        runs.append(1)
        time.sleep(0.2 if len(runs) > 2 else 0)
        return FORMS[Conv3dMethod.NATIVE](x, *rest)

    monkeypatch.setitem(FORMS, Conv3dMethod.FRAMES, slow)
    times = form_times(
        layer(GENERAL, torch.float32), CPU, (4, 8, 8), (Conv3dMethod.NATIVE, Conv3dMethod.FRAMES), repeats=3
    )
    assert len(runs) == 3, "compared, warmed up, timed once"
    assert times["frames"] > 100


@pytest.mark.parametrize("size", [(5, 6, 4), (2, 3, 7), (4, 4, 4)])
@pytest.mark.parametrize("patch", [(2, 2, 2), (4, 4, 4)])
def test_framepack_s_history_tables_without_padding_or_pooling_in_5d(
    size: tuple[int, int, int], patch: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    framepack = pytest.importorskip("diffusers.models.transformers.transformer_hunyuan_video_framepack")
    time_, height, width = size
    rows = time_ * height * width
    tables = (torch.randint(-8, 9, (rows, 6)).float(), torch.randint(-8, 9, (rows, 6)).float())
    original = framepack.HunyuanVideoFramepackTransformer3DModel._pad_rotary_emb
    expected = original(None, tables, height, width, patch)
    monkeypatch.setattr(torch.nn.functional, "avg_pool3d", None)
    found = history_tables(tables, height, width, patch)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))


def test_timings_are_measured_and_only_for_right_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMS, Conv3dMethod.FRAMES, lambda x, *rest: FORMS[Conv3dMethod.NATIVE](x, *rest) * 1.1)
    times = form_times(layer(GENERAL, torch.float32), CPU, (4, 8, 8), repeats=1)
    assert set(times) == {"native", "fp32", "channels_last", "matmul"}
    assert all(isinstance(ms, float) and ms > 0 for ms in times.values())
    assert form_error(Conv3dMethod.FRAMES, layer(GENERAL), CPU) is None
    assert 0 < form_error(Conv3dMethod.MATMUL, layer(GENERAL), CPU) < 0.02


def test_every_form_that_covers_a_layer_runs_somewhere() -> None:
    grouped = layer(GENERAL, groups=2)
    assert {form for form in Conv3dMethod if runs(form, grouped, {})} == set(Conv3dMethod) - {
        Conv3dMethod.PATCHES,
        Conv3dMethod.POINTWISE,
    }
    assert not runs(Conv3dMethod.PATCHES, layer(PATCHES, groups=2), {})
    assert not runs(Conv3dMethod.POINTWISE, layer(POINTWISE, groups=2), {})


# The swap ----------------------------------------------------------------------------------------------------------


def small(**settings: Any) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(nn.Conv3d(4, 6, 3, **settings), nn.SiLU(), nn.Conv3d(6, 4, 1)).requires_grad_(False)


def test_swap_keeps_every_object_and_goes_back() -> None:
    model, x = small(padding=1), torch.randn(2, 4, 5, 6, 7)
    before = [(name, module, type(module), dict(module.__dict__)) for name, module in model.named_modules()]
    keys, expected = list(model.state_dict()), model(x)
    swapped = swap_conv3d(model, choose_by(FORBIDDEN))
    assert [module for _, module in model.named_modules()] == [module for _, module, _, _ in before]
    assert list(model.state_dict()) == keys and all(isinstance(model[index], nn.Conv3d) for index in (0, 2))
    assert {name: choice.form for name, choice in swapped.choices.items()} == {
        "0": Conv3dMethod.FRAMES,
        "2": Conv3dMethod.POINTWISE,
    }
    with NoVolumes() as device:
        assert torch.allclose(model(x), expected, atol=1e-5)
    assert "aten::convolution" in device.seen and "aten::baddbmm" in device.seen
    assert "1 as frames (conv3d in fp32 does not work properly" in str(swapped)
    swapped.restore()
    swapped.restore()
    for name, module, cls, attributes in before:
        assert type(module) is cls and module.__dict__ == attributes, name
    assert torch.equal(model(x), expected)
    with pytest.raises(NotImplementedError, match="volumes"), NoVolumes():
        model(x)


@pytest.mark.parametrize("mode", ["zeros", "replicate", "reflect", "circular"])
@pytest.mark.parametrize("padding", [1, "same", "valid"])
def test_paddings_of_the_layer_itself(mode: str, padding: Any) -> None:
    for kernel in (3, (2, 3, 4)):
        model = nn.Conv3d(4, 6, kernel, padding=padding, padding_mode=mode).requires_grad_(False)
        x = torch.randn(4, 5, 6, 7)  # without a batch
        expected = model(x)
        for form in (Conv3dMethod.FRAMES, Conv3dMethod.MATMUL, Conv3dMethod.CHANNELS_LAST):
            swapped = swap_conv3d(model, always(form))
            assert len(swapped.choices) == 1
            assert torch.allclose(model(x), expected, atol=1e-5)
            swapped.restore()


def test_only_exact_classes() -> None:
    class PadsElsewhere(nn.Conv3d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(F.pad(x, (0, 0, 0, 0, 2, 0)))

    model = nn.Sequential(PadsElsewhere(4, 4, 3), nn.Conv3d(4, 4, 3), nn.Conv3d(4, 4, 3))
    model[2].forward = lambda x: x
    swapped = swap_conv3d(model, always(Conv3dMethod.FRAMES))
    assert list(swapped.choices) == ["1"]
    assert "PadsElsewhere" in swapped.left["0"] and "replaced" in swapped.left["2"]
    assert type(model[0]) is PadsElsewhere
    assert str(swapped).endswith("2 left as they are")
    assert swap_conv3d(nn.Sequential(nn.Linear(2, 2)), always(Conv3dMethod.FRAMES)).choices == {}


def test_form_by_form_and_layers_it_does_not_cover() -> None:
    model = small()
    swapped = swap_conv3d(model, always(Conv3dMethod.POINTWISE))
    assert list(swapped.choices) == ["2"] and swapped.left == {"0": "not chosen"}
    swapped.restore()
    swapped = swap_conv3d(
        model, lambda each: Conv3dChoice(Conv3dMethod.MATMUL, "by hand", 1) if each.kernel == (3, 3, 3) else None
    )
    assert swapped.choices == {"0": Conv3dChoice(Conv3dMethod.MATMUL, "by hand", 1)}


def test_a_wrong_replacement_is_not_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    model = small()
    monkeypatch.setitem(FORMS, Conv3dMethod.FRAMES, lambda x, *rest: FORMS[Conv3dMethod.NATIVE](x, *rest) + 0.01)
    swapped = swap_conv3d(model, choose_by(FORBIDDEN))
    assert list(swapped.choices) == ["2"] and type(model[0]) is nn.Conv3d
    assert "differs by" in swapped.left["0"] and "differs by" in caplog.text

    def fails(*_: Any) -> torch.Tensor:
        raise RuntimeError("no engine\nat all")

    swapped.restore()
    monkeypatch.setitem(FORMS, Conv3dMethod.FRAMES, fails)
    assert swap_conv3d(model, choose_by(FORBIDDEN)).left == {"0": "its replacement failed: no engine"}


@pytest.mark.parametrize("form", [Conv3dMethod.PATCHES, Conv3dMethod.CHANNELS_LAST])
def test_a_processor_whose_16_bit_convolutions_are_wrong_does_not_judge(form, monkeypatch: pytest.MonkeyPatch) -> None:
    """As oneDNN's for AMX are in bf16: an Intel Xeon was off by 1.3 times the largest value (pytorch#169688)."""
    right = F.conv3d
    monkeypatch.setattr(F, "conv3d", lambda x, *rest, **more: right(x, *rest, **more) * (-1) ** (x.dtype.itemsize == 2))
    model = nn.Sequential(nn.Conv3d(16, 32, (2, 4, 4), stride=(2, 4, 4))).to(torch.bfloat16)
    assert float(model(torch.ones(1, 16, 2, 8, 8, dtype=torch.bfloat16)).sum()) != float(
        right(torch.ones(1, 16, 2, 8, 8), model[0].weight.float(), model[0].bias.float(), stride=(2, 4, 4)).sum()
    )
    assert list(swap_conv3d(model, always(form)).choices) == ["0"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_comparison_allows_the_rounding_of_each_dtype(dtype: torch.dtype) -> None:
    for form in Conv3dMethod:
        model = nn.Conv3d(96, 32, 1 if form in (Conv3dMethod.POINTWISE, Conv3dMethod.PATCHES) else 3).to(dtype)
        assert not swap_conv3d(model, always(form)).left, form


def test_refuses_what_comes_too_late_or_too_early() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = small()
    swapped = swap_conv3d(model, always(Conv3dMethod.FRAMES))
    with pytest.raises(UnsupportedError, match="Sequential 0 is swapped already"):
        swap_conv3d(model, always(Conv3dMethod.MATMUL))
    accelerate.cpu_offload(model, execution_device="cpu")
    with pytest.raises(UnsupportedError, match="hooks of an offloader"):
        swapped.restore()
    accelerate.hooks.remove_hook_from_module(model, recurse=True)
    swapped.restore()
    assert type(model[0]) is nn.Conv3d and model[0].forward.__func__ is nn.Conv3d.forward
    with pytest.raises(UnsupportedError, match="on meta"):
        swap_conv3d(small().to("meta"), always(Conv3dMethod.FRAMES))


def test_swap_after_hooks_have_gone() -> None:
    """accelerate leaves the old forward on the module, where it would hide that of the new class."""
    accelerate = pytest.importorskip("accelerate")
    model, x = small(), torch.randn(1, 4, 4, 5, 5)
    expected = model(x)
    accelerate.cpu_offload(model, execution_device="cpu")
    accelerate.hooks.remove_hook_from_module(model, recurse=True)
    assert "forward" in model[0].__dict__
    swap_conv3d(model, choose_by(FORBIDDEN))
    with NoVolumes():
        assert torch.allclose(model(x), expected, atol=1e-5)


def stored_in_fp8(model: nn.Module) -> nn.Module:
    """diffusers' hook casts weights around the forward that it keeps; that one has to be the new one."""
    casting = pytest.importorskip("diffusers.hooks.layerwise_casting")
    casting.apply_layerwise_casting(model, torch.float8_e4m3fn, torch.float32)
    return model


def adapted(model: nn.Module) -> nn.Module:
    peft = pytest.importorskip("peft")
    return peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["0"], init_lora_weights=False), model)


@pytest.mark.parametrize(("around", "layers", "dtype"), [(stored_in_fp8, 2, torch.float8_e4m3fn), (adapted, 4, None)])
def test_weights_stored_in_fp8_and_adapters_go_on(around: Any, layers: int, dtype: torch.dtype | None) -> None:
    model, x = around(small()), torch.randn(1, 4, 4, 5, 5)
    expected = model(x)
    swapped = swap_conv3d(model, choose_by(FORBIDDEN))
    assert len(swapped.choices) == layers
    with NoVolumes():
        assert torch.allclose(model(x), expected, atol=1e-5)
    assert dtype is None or model[0].weight.dtype is dtype
    swapped.restore()
    assert torch.equal(model(x), expected)


def test_a_copy_of_a_swapped_part_is_swapped_too() -> None:
    model, x = small(), torch.randn(1, 4, 4, 5, 5)
    swap_conv3d(model, choose_by(FORBIDDEN))
    twin = copy.deepcopy(model)
    with NoVolumes():
        assert torch.equal(twin(x), model(x))


# Real models -------------------------------------------------------------------------------------------------------

VAES = {
    "mochi_vae": ((1, 12, 2, 4, 4), (1, 3, 7, 32, 32)),
    "hunyuan_vae": ((1, 16, 2, 4, 4), (1, 3, 5, 32, 32)),
    "hunyuan15_vae": ((1, 32, 2, 2, 2), (1, 3, 5, 32, 32)),
    "ltx_vae": ((1, 128, 2, 2, 2), (1, 3, 9, 64, 64)),
}


def randomised(name: str) -> Any:
    pytest.importorskip("diffusers")
    from tiny import parts, weights

    with torch.random.fork_rng(devices=[]):
        part = getattr(parts, name)()
    weights.randomise(part, 0)
    return part.eval().requires_grad_(False)


@pytest.fixture
def quiet() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("name", VAES)
def test_vae_without_conv3d(name: str, quiet: None) -> None:
    vae, (latents, pixels) = randomised(name), (torch.randn(size) for size in VAES[name])
    expected = vae.encode(pixels).latent_dist.mode(), vae.decode(latents, return_dict=False)[0]
    for once in (lambda: vae.encode(pixels), lambda: vae.decode(latents)):
        with pytest.raises(NotImplementedError, match="volumes"), NoVolumes():
            once()
    for choose in (FORBIDDEN, {"conv3d": False, "conv2d": False}):
        swapped = swap_conv3d(vae, choose_by(choose))
        assert not swapped.left
        with NoVolumes():
            found = vae.encode(pixels).latent_dist.mode(), vae.decode(latents, return_dict=False)[0]
        for one, other in zip(found, expected, strict=True):
            assert torch.allclose(one, other, atol=1e-4 * float(other.abs().max()))
        swapped.restore()
    assert torch.equal(vae.decode(latents, return_dict=False)[0], expected[1])


def test_conv_cache_of_mochi_stays_right(quiet: None) -> None:
    """In the mode with zeros for edges time goes through in pieces, each with the last frames of the one before."""
    cogvideox = pytest.importorskip("diffusers.models.autoencoders.autoencoder_kl_cogvideox")
    conv, x = cogvideox.CogVideoXCausalConv3d(4, 4, 3, pad_mode="constant"), torch.randn(1, 4, 6, 5, 5)
    whole, _ = conv(x)
    swap_conv3d(conv, choose_by(FORBIDDEN))
    cache, pieces = None, []
    for piece in x.split(2, dim=2):
        with NoVolumes():
            out, cache = conv(piece, conv_cache=cache)
        assert torch.equal(cache, x[:, :, : piece.shape[2] * (len(pieces) + 1)][:, :, -2:])
        pieces.append(out)
    assert torch.allclose(torch.cat(pieces, dim=2), whole, atol=1e-5)


@pytest.mark.parametrize("causal", [True, False])
def test_both_ends_of_time_in_ltx(causal: bool, quiet: None) -> None:
    ltx = pytest.importorskip("diffusers.models.autoencoders.autoencoder_kl_ltx")
    for kernel, stride in ((3, 1), (3, 2), (1, 1)):
        conv, x = ltx.LTXVideoCausalConv3d(4, 4, kernel, stride, is_causal=causal), torch.randn(1, 4, 5, 6, 6)
        expected = conv(x)
        swap_conv3d(conv, always(Conv3dMethod.FRAMES))
        with NoVolumes():
            assert torch.allclose(conv(x), expected, atol=1e-5)


def test_framepack_patch_embeds(quiet: None) -> None:
    """Also where the history is not a multiple of the patch, which upstream pads in three dimensions."""
    framepack = pytest.importorskip("diffusers.models.transformers.transformer_hunyuan_video_framepack")
    embeds = nn.ModuleDict(
        {
            "x": framepack.HunyuanVideoPatchEmbed((1, 2, 2), 16, 24),
            "clean": framepack.HunyuanVideoHistoryPatchEmbed(16, 24),
        }
    )
    x, history = torch.randn(1, 16, 3, 6, 10), [torch.randn(1, 16, size, 6, 10) for size in (2, 3, 13)]
    expected = [embeds["x"](x), *embeds["clean"](*history)]
    with pytest.raises(NotImplementedError, match="aten::pad"), NoVolumes():
        embeds["clean"](None, None, history[2])
    swapped = swap_conv3d(embeds, choose_by(FORBIDDEN))
    assert {name: choice.form for name, choice in swapped.choices.items()} == dict.fromkeys(
        ("x.proj", "clean.proj", "clean.proj_2x", "clean.proj_4x"), Conv3dMethod.PATCHES
    )
    with NoVolumes():
        found = [embeds["x"](x), *embeds["clean"](*history)]
        assert embeds["clean"](None, None, history[2])[:2] == (None, None)
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_framepack_as_first_published() -> None:
    """Its clean-latents embed has no forward; its model calls the three convolutions, padded, one by one."""

    class HunyuanVideoPatchEmbedForCleanLatents(nn.Module):
        def __init__(self, inner_dim: int) -> None:
            super().__init__()
            self.proj = nn.Conv3d(16, inner_dim, kernel_size=(1, 2, 2), stride=(1, 2, 2))
            self.proj_2x = nn.Conv3d(16, inner_dim, kernel_size=(2, 4, 4), stride=(2, 4, 4))
            self.proj_4x = nn.Conv3d(16, inner_dim, kernel_size=(4, 8, 8), stride=(4, 8, 8))

    embed, x = HunyuanVideoPatchEmbedForCleanLatents(8).requires_grad_(False), torch.randn(1, 16, 4, 8, 8)
    expected = [conv(x) for conv in embed.children()]
    assert len(swap_conv3d(embed, choose_by(FORBIDDEN)).choices) == 3
    with NoVolumes():
        assert all(torch.allclose(conv(x), e, atol=1e-5) for conv, e in zip(embed.children(), expected, strict=True))


# no-conv3d-compiled ------------------------------------------------------------------------------------------------


def no_volumes_backend(seen: list[str]) -> Any:
    """A backend of ``torch.compile`` for a device without 3-D convolution and 3-D padding."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    def lowered(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        for node in graph.graph.nodes:
            if node.op == "call_function":
                name = str(node.target)
                first = node.all_input_nodes[0].meta.get("val") if node.all_input_nodes else None
                of_volumes = isinstance(first, torch.Tensor) and first.dim() == 5
                if "pad3d" in name or (of_volumes and ("convolution" in name or "constant_pad_nd" in name)):
                    raise RuntimeError(f"failed to legalize operation {name}")
                seen.append(name)
        return make_boxed_func(graph.forward)

    return aot_autograd(fw_compiler=lowered)


@pytest.mark.skipif(not hasattr(torch.backends.cudnn, "conv"), reason="needs torch 2.9 or newer")
@pytest.mark.parametrize(
    ("model", "size"),
    [(lambda: nn.Conv3d(12, 768, 1), (3, 32, 32)), (lambda: randomised("mochi_vae").decoder, (2, 4, 4))],
    ids=["layer", "decoder"],
)
def test_no_conv3d_compiled(quiet: None, model: Callable[[], nn.Module], size: tuple[int, ...]) -> None:
    module, x = model(), torch.randn(1, 12, *size)
    expected = module(x)
    seen: list[str] = []
    try:
        with pytest.raises(Exception, match="failed to legalize operation"):
            torch.compile(module, backend=no_volumes_backend(seen), fullgraph=True)(x)
        torch._dynamo.reset()
        swap_conv3d(module, choose_by(FORBIDDEN))
        seen.clear()
        compiled = torch.compile(module, backend=no_volumes_backend(seen), fullgraph=True)(x)
    finally:
        torch._dynamo.reset()
    for one, other in zip(_tensors(compiled), _tensors(expected), strict=True):
        assert torch.allclose(one, other, atol=1e-4)
    assert any("baddbmm" in name for name in seen)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else [item for item in value if isinstance(item, torch.Tensor)]
