"""The forms of a 3-D convolution against ``F.conv3d`` on contiguous tensors, causal padding included.

    python benchmarks/conv3d.py                  # appends to benchmarks/results/conv3d.csv
    python benchmarks/conv3d.py --device cuda    # on an accelerator

Time: medians of ten runs, all forms interleaved, their order turned round every time; on a CPU the time that its cores
worked. Memory: what a fresh process needs above its operands, the result included. The bar, on a CPU: the one-frame
form at 0.9 of the speed of conv3d at no more memory.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from anygpu.compat.device.facts import facts_for
from anygpu.compat.transforms.conv3d_methods import Conv3dMethod, Geometry, convolve, covers, padded

RESULTS = Path(__file__).parent / "results" / "conv3d.csv"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
RETURNING = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}  # freed memory goes back at once: it is not counted twice
BAR_SPEED, BAR_MEMORY = 0.9, 1.0


@dataclass(frozen=True)
class Case:
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


CASES = [
    Case("VAE, deep", (512, 512), (3, 3, 3), (3, 32, 32), "fp32"),
    Case("VAE, middle", (256, 256), (3, 3, 3), (5, 64, 64), "fp32"),
    Case("VAE, outer", (128, 128), (3, 3, 3), (5, 128, 128), "fp32"),
    Case("VAE, middle", (256, 256), (3, 3, 3), (5, 64, 64), "bf16"),
    Case("VAE, outer", (128, 128), (3, 3, 3), (5, 128, 128), "bf16"),
    Case("VAE, small", (64, 64), (3, 3, 3), (3, 32, 32), "fp16"),
    Case("patch embedding", (16, 3072), (1, 2, 2), (5, 60, 104), "fp32", True),
    Case("patch embedding", (16, 3072), (1, 2, 2), (5, 60, 104), "bf16", True),
    Case("shortcut", (512, 256), (1, 1, 1), (5, 64, 64), "fp32"),
    Case("shortcut", (512, 256), (1, 1, 1), (5, 64, 64), "bf16"),
]


def runs(case: Case, device: torch.device, of: str | None = None) -> dict[str, Callable[[], torch.Tensor]]:
    """Functions by name: ``conv3d`` is upstream's padding and convolution; the others are the forms."""
    generator = torch.Generator().manual_seed(0)
    inner, outer = case.channels
    x = torch.randn(1, inner, *case.size, generator=generator)
    weight = torch.randn(outer, inner, *case.kernel, generator=generator)
    bias = torch.randn(outer, generator=generator)
    x, weight, bias = (t.to(device, DTYPES[case.dtype]) for t in (x, weight / weight[0].numel() ** 0.5, bias))

    def upstream() -> torch.Tensor:
        return F.conv3d(F.pad(x, case.edges, mode="replicate") if any(case.edges) else x, weight, bias, *case.geometry)

    def form(which: Conv3dMethod) -> Callable[[], torch.Tensor]:
        first = which is Conv3dMethod.FRAMES
        layout = x.contiguous(memory_format=torch.channels_last_3d) if which is Conv3dMethod.CHANNELS_LAST else x
        edges = case.edges
        return lambda: convolve(
            which, padded(layout, edges, "replicate", first) if any(edges) else layout, weight, bias, case.geometry
        )

    names = [
        "conv3d",
        *(f.value for f in Conv3dMethod if f is not Conv3dMethod.NATIVE and covers(f, case.kernel, case.geometry)),
    ]
    return {name: upstream if name == "conv3d" else form(Conv3dMethod(name)) for name in names if of in (None, name)}


def seconds(case: Case, device: torch.device, repeats: int) -> dict[str, float]:
    """Median seconds of each."""
    functions, clock = runs(case, device), time.process_time if device.type == "cpu" else time.perf_counter
    spent: dict[str, list[float]] = {name: [] for name in functions}
    for repeat in range(repeats + 1):
        for name in sorted(functions, reverse=repeat % 2 == 1):
            wait(device)
            started = clock()
            functions[name]()
            wait(device)
            if repeat:
                spent[name].append(clock() - started)
    return {name: statistics.median(values) for name, values in spent.items()}


def peak_bytes(case: Case, name: str, device: torch.device) -> int:
    """Bytes that one run needs above its operands; on the CPU it has to be the first large one of this process."""
    small = Case("", (8, 8), case.kernel, tuple(3 * k for k in case.kernel), case.dtype, case.patches)
    runs(small, device, name)[name]()  # libraries load their kernels
    run = runs(case, device, name)[name]
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


def wait(device: torch.device) -> None:
    """Until the device has done what it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def rows(case: Case, device: torch.device, repeats: int) -> list[dict[str, object]]:
    """One row per form, the first that of conv3d."""
    times = seconds(case, device, repeats)
    index = str(CASES.index(case))
    command = [sys.executable, __file__, "--device", str(device), "--case", index, "--peak"]
    peaks = {name: int(subprocess.check_output([*command, name], text=True, env=RETURNING)) for name in times}
    facts, threads = facts_for(device), f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    kernel, size = ("x".join(map(str, triple)) for triple in (case.kernel, case.size))
    return [
        {
            "date": datetime.date.today().isoformat(),
            "device": (f"CPU {platform.machine()}" if device.type == "cpu" else facts.name) + threads,
            "driver": getattr(facts, "driver", ""),
            "torch": torch.__version__,
            "layer": case.name,
            "shape": f"{case.channels[0]}>{case.channels[1]} {kernel} on {size}",
            "dtype": case.dtype,
            "form": name,
            "ms": round(1e3 * spent, 2),
            "speed": round(times["conv3d"] / spent, 3),
            "extra_mib": round(peaks[name] / 2**20, 1),
            "memory": round(peaks[name] / peaks["conv3d"], 3),
        }
        for name, spent in times.items()
    ]


def main() -> None:
    """Measure, print and append; exit code 1 where the one-frame form misses its bar on a CPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--case", type=int, help="index of one case")
    parser.add_argument("--peak", help="print the bytes of one form and stop")
    parser.add_argument("--dry", action="store_true", help="write no file")
    arguments = parser.parse_args()
    if arguments.device.type == "cpu":
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    cases = CASES if arguments.case is None else [CASES[arguments.case]]
    with torch.inference_mode():
        if arguments.peak:
            print(peak_bytes(cases[0], arguments.peak, arguments.device))
            return
        missed = False
        for case in cases:
            found = rows(case, arguments.device, arguments.repeats)
            for row in found:
                print(" | ".join(str(value) for key, value in row.items() if key not in ("date", "device", "driver")))
                one_frame = row["form"] == Conv3dMethod.FRAMES.value and case.name.startswith("VAE")
                missed |= one_frame and not (row["speed"] >= BAR_SPEED and row["memory"] <= BAR_MEMORY)
            if not arguments.dry:
                append(found)
    if missed and arguments.device.type == "cpu":
        sys.exit("the one-frame form misses its bar")


def append(found: list[dict[str, object]]) -> None:
    """Add rows to the file, with a header where it is new."""
    new = not RESULTS.exists()
    with RESULTS.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, found[0])
        if new:
            writer.writeheader()
        writer.writerows(found)


if __name__ == "__main__":
    main()
