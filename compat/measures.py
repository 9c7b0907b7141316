"""The measurements of a device that need no model: parts of its proof. Each result is compared with one of the host."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .decision import AUTO
from .device.execution import to_host
from .device.facts import DeviceFacts
from .device.precision import NAMES
from .device.probe_store import OK, ProbeStore
from .device.probes import home
from .device.timed_choice import milliseconds
from .device.work import measured_pace, pace_of
from .proof import Figure, Part, figures_of
from .report import LAYERS, OPTIONAL
from .transforms.attention import attention_for, kernel_times
from .transforms.conv3d_choice import Conv3dLayer, form_error, form_times, sample_size
from .transforms.conv3d_methods import Conv3dMethod, Geometry, covers
from .transforms.fp16_layers import SETTINGS, LayerSettings, fp32_linear, reach_of
from .transforms.fused import REFERENCE, self_tests, timed_calls

HALF, FP32 = torch.float16, torch.float32
PACE = {"product": ("TFLOP/s", 1e12), "convolution": ("TFLOP/s", 1e12), "attention": ("TFLOP/s", 1e12),
        "memory": ("GB/s", 1e9), "launch": ("us", 1e-6)}  # fmt: skip
SHARE = "of the largest"
WIDTHS, REPEATS = (64, 128), 5  # of heads, as video transformers have them; of each timing
SAMPLED = 64  # rows of a result that the host computes in fp64
NEAR = 4.0  # eps between a kernel and its reference: both round, and sum in another order
OUTLIER = 3e5  # of a residual: more than fp16 holds, as published models have
EIGHT = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}  # and the largest value
MOST_EPS = {2: 8, 4: 64}  # of a dtype of so many bytes, that a right result may be off by


@dataclass(frozen=True, slots=True)
class DeviceSizes:
    """Sizes of a transformer's products and a VAE's convolutions; ``full`` times operations at a transformer's size."""

    tokens: int = 4096
    width: int = 4096
    channels: int = 128
    full: bool = True
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, HALF, FP32)


TINY = DeviceSizes(tokens=128, width=64, channels=8, full=False, dtypes=(FP32,))  # a second on a CPU


def device_parts(facts: DeviceFacts, store: ProbeStore, sizes: DeviceSizes) -> Iterator[Part]:
    """The parts of a proof that need no model: probes; kernels, rates, attention and Conv3d for each dtype; products in
    safe fp16, as AnyGPU Fit Model computes them, and of 8 bits."""
    yield Part("probes", partial(probes, store))
    for dtype in sizes.dtypes:
        for name, measure in (("kernels", kernels), ("rates", rates), ("attention", attention), ("Conv3d", conv3d)):
            yield Part(f"{name} {NAMES[dtype]}", partial(measure, facts, dtype, sizes))
    yield Part("Fit", partial(fit_errors, facts, sizes))
    yield Part("8-bit products", partial(eight_bits, facts, sizes))


def probes(store: ProbeStore) -> Iterator[Figure]:
    """Milliseconds of each probe; a failed one is a fault unless AnyGPU can do without (:data:`OPTIONAL`)."""
    for name, answer in store.ask_all().items():
        right = answer.status == OK or name in OPTIONAL
        yield Figure(name, "ms", answer.milliseconds, fault="" if right else str(answer))


def kernels(facts: DeviceFacts, dtype: torch.dtype, sizes: DeviceSizes) -> Iterator[Figure]:
    """Each operation's error against fp64 as a share of its bound; then kernel against reference, in eps and in ms."""
    for test in self_tests(facts.device, dtypes=(dtype,)):
        how, fault = "kernel" if test.launched else "reference", "" if test.right else test.fault or "wrong"
        yield Figure(f"{test.name}, {how}, to fp64", "of the bound", test.error / test.bound, fault=fault)
    for name, forms in timed_calls(facts.device, dtype, sizes.full):
        yield from figures_of(Part(name, partial(_kernel, facts, dtype, name, forms)))


def _kernel(
    facts: DeviceFacts, dtype: torch.dtype, name: str, forms: Mapping[str, Callable[[], Any]]
) -> Iterator[Figure]:
    """The difference of one operation's kernel and reference, in eps of the largest value; milliseconds of both."""
    results = (forms[form]() for form in (AUTO, REFERENCE))
    kernel, plain = (each[0] if isinstance(each, tuple) else each for each in results)
    difference = float((kernel.float() - plain.float()).abs().max() / plain.abs().max()) / torch.finfo(dtype).eps
    yield Figure(f"{name}, auto to reference", "eps", difference, fault="" if difference <= NEAR else "wrong")
    for form, ms in milliseconds(forms, facts.device, REPEATS).items():
        yield Figure(f"{name}, {form}", "ms", ms)


def rates(facts: DeviceFacts, dtype: torch.dtype, _: DeviceSizes) -> Iterator[Figure]:
    """Measured rates of :data:`PACE`, such as of products, next to those by the data sheet, None if that is unknown."""
    pace, paper = measured_pace(facts.device, dtype), pace_of(facts, None, dtype)
    for kind, (unit, scale) in PACE.items():
        yield Figure(kind, unit, getattr(pace, kind) / scale, None if paper is None else getattr(paper, kind) / scale)


def attention(facts: DeviceFacts, dtype: torch.dtype, sizes: DeviceSizes) -> Iterator[Figure]:
    """For each width of heads the error of ``auto``, with steep scores, and the milliseconds of each kernel here."""
    for width in WIDTHS:
        yield from figures_of(Part(f"heads of {width}", partial(_heads, facts, dtype, sizes, width)))


def _heads(facts: DeviceFacts, dtype: torch.dtype, sizes: DeviceSizes, width: int) -> Iterator[Figure]:
    """:func:`attention` for heads of ``width``."""
    q, k, v = (_noise(seed, 1, 2, sizes.tokens, width).to(dtype) for seed in range(3))
    q[..., :2] *= 16  # steep scores
    some = torch.linspace(0, sizes.tokens - 1, SAMPLED).long()
    exact = torch.softmax(q[:, :, some].double() @ k.double().mT / math.sqrt(width), -1) @ v.double()
    here = [tensor.to(facts.device) for tensor in (q, k, v)]
    chosen = attention_for(AUTO, facts, dtype, width)
    run = partial(chosen, here[0], here[1], here[2])
    yield _error(f"{chosen.label}, heads of {width}", home(run())[:, :, some], exact, dtype)
    times = kernel_times(facts, dtype, width) if sizes.full else {}
    for kernel, ms in (times or milliseconds({chosen.label: run}, facts.device, REPEATS)).items():
        yield Figure(f"{kernel}, heads of {width}", "ms", ms)


def conv3d(facts: DeviceFacts, dtype: torch.dtype, sizes: DeviceSizes) -> Iterator[Figure]:
    """Each implementation of each kind of Conv3d: its error against fp64 and its milliseconds."""
    count = sizes.channels
    for kind, (kernel, stride) in LAYERS.items():
        layer = Conv3dLayer(kind, count, count, kernel=kernel, geometry=Geometry(stride), dtype=dtype)
        forms = tuple(form for form in Conv3dMethod if covers(form, kernel, layer.geometry))
        frames, rows, columns = (min(side, sizes.tokens // 16) for side in sample_size(layer))
        times = form_times(layer, facts.device, (frames, rows, columns), forms, REPEATS)
        for form in forms:
            error = form_error(form, layer, facts.device)
            fault = "fails or is wrong" if error is None else ""
            yield Figure(f"{kind}, {form.value}, to fp64", SHARE, error, fault=fault)
            yield Figure(f"{kind}, {form.value}", "ms", times.get(form.value))


def fit_errors(facts: DeviceFacts, sizes: DeviceSizes) -> Iterator[Figure]:
    """The error of a product whose operand has outliers beyond fp16, against fp64: in each dtype, fp16 as safe fp16."""
    layer, x = nn.Linear(sizes.width, SAMPLED).requires_grad_(False), _noise(0, SAMPLED, sizes.width)
    layer.weight.copy_(_noise(1, SAMPLED, sizes.width).half() / 64)
    x[:, ::97] *= OUTLIER  # in every 97th column
    exact = functional.linear(x.double(), layer.weight.double(), layer.bias.double())
    reach = float(reach_of(layer.weight))

    def product(name: str, dtype: torch.dtype) -> Iterator[Figure]:
        here = copy.deepcopy(layer).to(facts.device, dtype)
        setattr(here, SETTINGS, LayerSettings(fp32_output=False, reach=reach))
        there = x.to(facts.device)
        yield _error(name, home(fp32_linear(here, there) if dtype is HALF else here(there.to(dtype))), exact, dtype)

    for dtype in dict.fromkeys((*sizes.dtypes, HALF)):
        name = "safe fp16" if dtype is HALF else NAMES[dtype]
        yield from figures_of(Part(name, partial(product, name, dtype)))


def eight_bits(facts: DeviceFacts, sizes: DeviceSizes) -> Iterator[Figure]:
    """Products of int8 and fp8 operands, compared with these operands' own product, and their rates."""
    rows, width, one = sizes.tokens, sizes.width, torch.ones((), device=facts.device)
    some = torch.linspace(0, rows - 1, SAMPLED).long()

    def product(name: str, dtype: torch.dtype) -> Iterator[Figure]:
        noise = (_noise(seed, count, width) for seed, count in enumerate((rows, width)))
        a, b = ((each * EIGHT[dtype] / 4).clamp(-EIGHT[dtype], EIGHT[dtype]).round().to(dtype) for each in noise)
        x, weight = a.to(facts.device), b.to(facts.device).t()
        scaled = partial(torch._scaled_mm, scale_a=one, scale_b=one, out_dtype=FP32)
        run = partial(torch._int_mm if dtype is torch.int8 else scaled, x, weight)
        yield _error(f"{name}, to its own operands", to_host(run())[some], a[some].double() @ b.double().t(), HALF)
        ms = milliseconds({name: run}, facts.device, REPEATS)[name]
        yield Figure(name, "TOP/s", 2 * rows * width**2 / max(ms, 1e-6) / 1e9)

    for dtype in EIGHT:
        name = str(dtype).removeprefix("torch.")
        yield from figures_of(Part(name, partial(product, name, dtype)))


def _error(what: str, result: Tensor, exact: Tensor, dtype: torch.dtype) -> Figure:
    """The largest difference as a share of the largest value; a fault above :data:`MOST_EPS` eps of ``dtype``."""
    share = float((result.double() - exact).abs().max() / exact.abs().max())
    fault = "" if share <= MOST_EPS[dtype.itemsize] * torch.finfo(dtype).eps else "wrong"
    return Figure(what, SHARE, share, fault=fault if math.isfinite(share) else "not finite")


def _noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
