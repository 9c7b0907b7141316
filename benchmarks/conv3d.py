"""The implementations of a 3-D convolution against ``F.conv3d`` on contiguous tensors, causal padding included.

Time: medians of runs in turn; on a CPU the time that its cores worked. Memory: the need of a fresh process above the
operands, the result included. The target, on a CPU: the one-frame form at 0.9 of the speed of conv3d at no more memory.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from anygpu.compat.device.facts import facts_for
from anygpu.compat.transforms.conv3d_forms import Conv3dForm, Geometry, convolve, covers, padded
from runner import Case, Row, device_name, in_fresh_process, in_turn, machine, processor, spent

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BAR_SPEED, BAR_MEMORY = 0.9, 1.0


@dataclass(frozen=True)
class Layer:
    """One real layer: channels in and out, kernel, input (T, H, W), dtype; for patches the stride is the kernel."""

    name: str
    channels: tuple[int, int]
    kernel: tuple[int, int, int]
    size: tuple[int, int, int]
    dtype: str
    patches: bool = False

    @property
    def geometry(self) -> Geometry:
        return Geometry(self.kernel if self.patches else (1, 1, 1))

    @property
    def edges(self) -> tuple[int, ...]:
        """What a causal convolution pads, as in ``F.pad``."""
        time_, height, width = self.kernel
        return (0,) * 6 if self.patches else (width // 2, width // 2, height // 2, height // 2, time_ - 1, 0)


LAYERS = [
    Layer("VAE, deep", (512, 512), (3, 3, 3), (3, 32, 32), "fp32"),
    Layer("VAE, middle", (256, 256), (3, 3, 3), (5, 64, 64), "fp32"),
    Layer("VAE, outer", (128, 128), (3, 3, 3), (5, 128, 128), "fp32"),
    Layer("VAE, middle", (256, 256), (3, 3, 3), (5, 64, 64), "bf16"),
    Layer("VAE, outer", (128, 128), (3, 3, 3), (5, 128, 128), "bf16"),
    Layer("VAE, small", (64, 64), (3, 3, 3), (3, 32, 32), "fp16"),
    Layer("patch embedding", (16, 3072), (1, 2, 2), (5, 60, 104), "fp32", True),
    Layer("patch embedding", (16, 3072), (1, 2, 2), (5, 60, 104), "bf16", True),
    Layer("shortcut", (512, 256), (1, 1, 1), (5, 64, 64), "fp32"),
    Layer("shortcut", (512, 256), (1, 1, 1), (5, 64, 64), "bf16"),
]


def runs(layer: Layer, device: torch.device, of: str | None = None) -> dict[str, Callable[[], torch.Tensor]]:
    """Functions by name: ``conv3d`` is upstream's padding and convolution; the others are the forms."""
    generator = torch.Generator().manual_seed(0)
    inner, outer = layer.channels
    x = torch.randn(1, inner, *layer.size, generator=generator)
    weight = torch.randn(outer, inner, *layer.kernel, generator=generator)
    bias = torch.randn(outer, generator=generator)
    x, weight, bias = (t.to(device, DTYPES[layer.dtype]) for t in (x, weight / weight[0].numel() ** 0.5, bias))

    def upstream() -> torch.Tensor:
        return F.conv3d(
            F.pad(x, layer.edges, mode="replicate") if any(layer.edges) else x, weight, bias, *layer.geometry
        )

    def form(which: Conv3dForm) -> Callable[[], torch.Tensor]:
        first = which is Conv3dForm.FRAMES
        layout = x.contiguous(memory_format=torch.channels_last_3d) if which is Conv3dForm.CHANNELS_LAST else x
        edges = layer.edges
        return lambda: convolve(
            which, padded(layout, edges, "replicate", first) if any(edges) else layout, weight, bias, layer.geometry
        )

    names = [
        "conv3d",
        *(f.value for f in Conv3dForm if f is not Conv3dForm.NATIVE and covers(f, layer.kernel, layer.geometry)),
    ]
    return {name: upstream if name == "conv3d" else form(Conv3dForm(name)) for name in names if of in (None, name)}


def peak_bytes(index: int, name: str, device: torch.device) -> int:
    """Bytes that one run needs above its operands; on the CPU it has to be the first large one of this process."""
    torch.set_num_threads(1)
    layer = LAYERS[index]
    small = Layer("", (8, 8), layer.kernel, tuple(3 * k for k in layer.kernel), layer.dtype, layer.patches)
    with torch.inference_mode():
        runs(small, device, name)[name]()  # libraries load their kernels
        run = runs(layer, device, name)[name]
        if device.type == "cpu":
            before = resident("VmRSS")
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the high-water mark starts anew
            run()
            return resident("VmHWM") - before
        torch.accelerator.reset_peak_memory_stats(device)
        before = torch.accelerator.memory_allocated(device)
        run()
        return torch.accelerator.max_memory_allocated(device) - before


def resident(field: str) -> int:
    """Bytes of this process that are, or have been, in memory."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def rows(device: str, repeats: int, layers: tuple[str, ...]) -> Iterator[Row]:
    """A row per layer and form, the first that of conv3d."""
    place = torch.device(device)
    facts = facts_for(place)

    def measure(call: Callable[[], object]) -> float:
        if place.type == "cpu":
            return processor(call)
        torch.accelerator.synchronize(place)
        return spent(lambda: (call(), torch.accelerator.synchronize(place)))

    for index, layer in enumerate(LAYERS):
        if layers and layer.name not in layers:
            continue
        with torch.inference_mode():
            times = {name: statistics.median(t) for name, t in in_turn(runs(layer, place), repeats, measure).items()}
        # freed memory goes back at once, so that it is not counted twice
        peaks = {n: in_fresh_process(peak_bytes, index, n, place, MALLOC_MMAP_THRESHOLD_="65536") for n in times}
        kernel, size = ("x".join(map(str, triple)) for triple in (layer.kernel, layer.size))
        for name, seconds in times.items():
            yield {
                "date": machine()["date"],
                "device": device_name() if place.type == "cpu" else facts.name,
                "driver": facts.driver,
                "torch": torch.__version__,
                "layer": layer.name,
                "shape": f"{layer.channels[0]}>{layer.channels[1]} {kernel} on {size}",
                "dtype": layer.dtype,
                "form": name,
                "ms": round(1e3 * seconds, 2),
                "speed": round(times["conv3d"] / seconds, 3),
                "extra_mib": round(peaks[name] / 2**20, 1),
                "memory": round(peaks[name] / peaks["conv3d"], 3),
            }


def misses(row: Row) -> bool:
    """Whether the one-frame form of a VAE's layer misses its target on a CPU."""
    if row["form"] != Conv3dForm.FRAMES.value or not row["layer"].startswith("VAE") or "CPU" not in row["device"]:
        return False
    return bool(row["speed"] < BAR_SPEED or row["memory"] > BAR_MEMORY)


CASES = [
    Case("conv3d", rows, {"device": "cpu", "repeats": 10, "layers": ()}, "conv3d", about=dict, fails=misses),
]
