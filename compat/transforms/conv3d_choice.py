"""The choice of how a layer computes its 3-D convolution: what works on the device, is known to be fast, was timed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from ..device.execution import placed, to_host
from ..device.facts import CLOCKED, DeviceFacts, peak_bytes, reset_peak
from ..device.failures import DEVICE_ERRORS
from ..device.precision import NAMES
from ..device.probe_store import ProbeStore
from ..device.quirks import convolution_switches, policy_for, works
from ..device.timed_choice import fastest, milliseconds, stored_times
from .conv3d_methods import MATMUL_BYTES, OWN, Conv3dMethod, Geometry, Triple, convolve, covers

TF32_EPS = 2.0**-10  # tensor cores may take fp32 operands with ten bits of mantissa
WORTH = 0.8  # of the time of what would be taken without a clock: a smaller gain may be the noise of one morning
SAMPLE_FLOPS = 10e9  # of a timed convolution: milliseconds where a launch takes tens of microseconds
SAMPLE_FRAMES, SAMPLE_SIDES = 5, (32, 256)
WORKSPACE = 4  # inputs that a form may hold beside input and result; unfolding, without MIOpen, takes 27


@dataclass(frozen=True, slots=True)
class Conv3dLayer:
    """One convolution as plain values: (time, rows, columns) each."""

    name: str
    in_channels: int
    out_channels: int
    kernel: Triple
    geometry: Geometry
    dtype: torch.dtype

    @property
    def kind(self) -> str:
        """``pointwise``, ``patches`` (kernel = stride) or ``general``."""
        if covers(Conv3dMethod.POINTWISE, self.kernel, self.geometry):
            return "pointwise"
        return "patches" if covers(Conv3dMethod.PATCHES, self.kernel, self.geometry) else "general"

    @property
    def key(self) -> str:
        """The key of stored timings, the same for all layers of one shape."""
        kernel, stride = ("x".join(map(str, triple)) for triple in (self.kernel, self.geometry.stride))
        groups = f" groups {self.geometry.groups}" if self.geometry.groups > 1 else ""
        dtype = NAMES.get(self.dtype, str(self.dtype))
        return f"{self.in_channels}>{self.out_channels} kernel {kernel} stride {stride}{groups} {dtype}"


@dataclass(frozen=True, slots=True)
class Conv3dChoice:
    """An implementation and the reason for it; ``chunk_bytes`` bounds what it copies at a time, 0 for its own bound."""

    form: Conv3dMethod
    why: str
    chunk_bytes: int = 0


Chooser = Callable[[Conv3dLayer], "Conv3dChoice | None"]
Timings = Callable[[Conv3dLayer, "tuple[Conv3dMethod, ...]"], Mapping[str, float]]

_SEEDVR = "2-D convolutions decode 1.66 times as fast on a 7900 XTX (SeedVR2 #634)"
PREFERRED: dict[tuple[str, str], tuple[Conv3dMethod, str]] = {  # (backend, kind of layer) where conv3d itself works too
    ("cuda", "patches"): (Conv3dMethod.PATCHES, "cuDNN takes 3.7 s for one patch embedding in bf16 (sglang-omni #539)"),
    ("rocm", "patches"): (Conv3dMethod.PATCHES, "MIOpen has no tuned 3-D path (rocm-libraries #1329)"),
    ("rocm", "pointwise"): (Conv3dMethod.POINTWISE, "MIOpen has no tuned 3-D path (rocm-libraries #1329)"),
    ("rocm", "general"): (Conv3dMethod.FRAMES, _SEEDVR),
    ("mps", "patches"): (Conv3dMethod.PATCHES, "conv3d runs at 7 % of the speed of conv2d (pytorch #192213)"),
    ("mps", "pointwise"): (Conv3dMethod.POINTWISE, "conv3d runs at 7 % of the speed of conv2d (pytorch #192213)"),
    ("mps", "general"): (Conv3dMethod.FRAMES, "conv3d runs at 7 % of the speed of conv2d (pytorch #192213)"),
    ("xla", "pointwise"): (Conv3dMethod.POINTWISE, "torch_xla refuses their empty edges of time (benchmark xla)"),
}
# Of a conv3d that does not run, the best first.
INSTEAD = tuple(map(Conv3dMethod, ("pointwise", "patches", "frames", "channels_last", "fp32", "matmul")))
# In fp16 a CPU takes up to 90 times as long as in fp32, for matmuls too (benchmarks/results/conv3d.csv).
INSTEAD_ON_CPU = (Conv3dMethod.FP32, *INSTEAD)


def choose_by(facts: Mapping[str, Any], timings: Timings | None = None) -> Chooser:
    """A chooser for a device with these facts; it returns None for a layer that is best left as it is.
    ``facts`` are as ``quirks.abilities`` gives them; what is absent is taken to work, a missing
    ``conv3d_channels_last`` is as ``conv3d``, and abilities may be plain bools. ``timings`` has milliseconds by
    implementation: the fastest wins if it gains enough over what the facts alone would choose."""

    backend = str(facts.get("backend", ""))
    order = INSTEAD_ON_CPU if backend == "cpu" else INSTEAD

    def choice(layer: Conv3dLayer) -> Conv3dChoice | None:
        """The preferred method, else the device's own, else the first that runs; then the fastest by ``timings``."""
        usable = [form for form in Conv3dMethod if runs(form, layer, facts)]
        form, why = PREFERRED.get((backend, layer.kind), (Conv3dMethod.NATIVE, ""))
        if form not in usable:
            form, why = Conv3dMethod.NATIVE, ""
        if form not in usable:
            form = next(form for form in order if form in usable)
            missing = "5-D padding" if works(facts, "conv3d", layer.dtype) else "conv3d"
            why = f"{missing} in {NAMES.get(layer.dtype, layer.dtype)} does not work properly on this device"
        known = {form.value for form in usable}
        measured = {} if timings is None else timings(layer, tuple(usable))
        timed = {name: ms for name, ms in measured.items() if name in known}
        if timed:
            best = fastest(timed, form.value, WORTH) if form.value in timed else min(timed, key=timed.__getitem__)
            form, ranked = Conv3dMethod(best), sorted(timed.items(), key=lambda item: item[1])
            why = f"timed here: {', '.join(f'{name} {ms:.2f} ms' for name, ms in ranked)}"
        if form is Conv3dMethod.NATIVE:  # left as it is, but where its operands have to be guarded
            why = "weights must be contiguous on this device" if facts.get("contiguous_weights") else ""
            why = "large inputs to a single conv3d fail on this device" if facts.get("conv_bytes") else why
        return Conv3dChoice(form, why, int(facts.get("conv_bytes", 0)) if form in OWN else 0) if why else None

    return choice


def stored_timings(facts: DeviceFacts, store: ProbeStore) -> Timings | None:
    """A function that times a layer's methods, once for each shape, near a decode's size; None for no accelerator."""
    if facts.device.type not in CLOCKED:
        return None
    policy = policy_for(facts)

    def timings(layer: Conv3dLayer, forms: tuple[Conv3dMethod, ...]) -> Mapping[str, float]:
        if len(forms) < 2:
            return {}
        size = sample_size(layer)

        def measure() -> Mapping[str, float]:
            with convolution_switches(policy):
                return form_times(layer, facts.device, size, forms)

        return stored_times(f"conv3d {'x'.join(map(str, size))} {layer.key}", measure, facts, store)

    return timings


def runs(form: Conv3dMethod, layer: Conv3dLayer, facts: Mapping[str, Any]) -> bool:
    """True where ``layer`` can be computed in ``form`` on the device of ``facts``."""
    if not covers(form, layer.kernel, layer.geometry):
        return False
    if form is Conv3dMethod.NATIVE:
        return works(facts, "conv3d", layer.dtype) and works(facts, "pad3d", layer.dtype)
    if form is Conv3dMethod.CHANNELS_LAST:
        return works(facts, "conv3d_channels_last" if "conv3d_channels_last" in facts else "conv3d", layer.dtype)
    if form is Conv3dMethod.FP32:
        cast = facts.get("cast", {}).get(f"{NAMES.get(layer.dtype, '')}_to_fp32", True)
        return cast and works(facts, "conv3d", torch.float32)
    return form is not Conv3dMethod.FRAMES or works(facts, "conv2d", layer.dtype)


def sample_size(layer: Conv3dLayer) -> Triple:
    """(T, H, W) of an input on which the arithmetic of ``layer`` outweighs a launch, as it does in a real decode."""
    taps = layer.in_channels // layer.geometry.groups * layer.kernel[0] * layer.kernel[1] * layer.kernel[2]
    side = (SAMPLE_FLOPS / (2 * layer.out_channels * taps * SAMPLE_FRAMES)) ** 0.5
    low, high = SAMPLE_SIDES
    pixels = int(min(max(side, low), high)) // 8 * 8
    return max(SAMPLE_FRAMES, layer.kernel[0]), pixels, pixels


def form_times(
    layer: Conv3dLayer, device: torch.device, size: Triple, forms: tuple[Conv3dMethod, ...] = tuple(Conv3dMethod),
    repeats: int = 5,
) -> dict[str, float]:  # fmt: skip
    """Milliseconds by form at ``size`` (T, H, W), for the forms that run, are right, and need little extra memory."""
    x = torch.full((1, layer.in_channels, *size), 0.5, dtype=layer.dtype).to(device)
    weight, bias = (tensor.to(device, layer.dtype) for tensor in _sample(layer, (1, 1, 1))[1:])
    extra_bytes: dict[str, int] = {}  # by form, besides operands and result

    def run(form: Conv3dMethod) -> torch.Tensor:
        """The result; the first call, which is not timed, also notes the form's extra bytes."""
        if form.value in extra_bytes:
            return convolve(form, x, weight, bias, layer.geometry)
        reset_peak(device)
        before = peak_bytes(device)
        result = convolve(form, x, weight, bias, layer.geometry)
        after = peak_bytes(device)
        extra_bytes[form.value] = 0 if before is None or after is None else after - before - result.nbytes
        return result

    fitting = (form for form in forms if covers(form, layer.kernel, layer.geometry))
    right = {form.value: partial(run, form) for form in fitting if form_error(form, layer, device) is not None}
    most = WORKSPACE * x.nbytes + 2 * weight.nbytes + MATMUL_BYTES
    return {name: ms for name, ms in milliseconds(right, device, repeats).items() if extra_bytes[name] <= most}


def form_error(form: Conv3dMethod, layer: Conv3dLayer, device: torch.device) -> float | None:
    """The largest error of ``form`` on ``device`` as a share of the largest value, or None if it fails or is wrong."""
    x, weight, bias = _sample(layer, tuple(2 * k + s for k, s in zip(layer.kernel, layer.geometry.stride, strict=True)))
    x, weight, bias = (tensor.to(layer.dtype) for tensor in (x, weight, bias))
    stride, padding, dilation, groups = layer.geometry
    expected = F.conv3d(x.double(), weight.double(), bias.double(), stride, padding, dilation, groups)
    try:
        here = convolve(form, placed(x, device), placed(weight, device), placed(bias, device), layer.geometry)
        result = to_host(here).double()
    except DEVICE_ERRORS:
        return None
    error = float((result - expected).abs().max() / expected.abs().max())
    return error if error <= tolerance(layer.dtype, weight[0].numel(), device) else None  # a NaN is not


def tolerance(dtype: torch.dtype, terms: int, device: torch.device) -> float:
    """The difference that two right results may have, as a share of the largest value.
    One rounding to ``dtype`` each, TF32 on an accelerator, and fp32 sums of ``terms`` in any order: a random walk."""
    coarse = TF32_EPS if device.type != "cpu" and dtype is torch.float32 else 0.0
    walk = 4 * torch.finfo(torch.float32).eps * terms**0.5
    return 2 * torch.finfo(dtype).eps + 4 * coarse + walk


def _sample(layer: Conv3dLayer, size: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random input (1, C, *size), weight and bias of ``layer``, fp32, always the same; results are near 1."""
    generator = torch.Generator().manual_seed(0)
    fan = layer.in_channels // layer.geometry.groups
    x = torch.randn(1, layer.in_channels, *size, generator=generator)
    weight = torch.randn(layer.out_channels, fan, *layer.kernel, generator=generator)
    return x, weight / weight[0].numel() ** 0.5, torch.randn(layer.out_channels, generator=generator)
