"""How fast weights are read, and at what peak of host memory: ours beside the safetensors library's own, from one run.

Run: python benchmarks/loading.py [--gigabytes 2] [--runs 5] [--folder /tmp]; rows go to benchmarks/results/loading.csv.

Each timed load ends by reading each byte of its result once. Cold means that the file was dropped from the page cache.
Times are medians of runs in turn, ours and theirs first by turns; the ratio is the median of those of the turns, since
a disk that slows down does so for both. Each peak is that of a process of its own. The device whose memory is counted
apart is the simulated accelerator of the tests.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import mmap
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
from anygpu.compat.checkpoints.headers import declared
from anygpu.compat.checkpoints.weights import VIEW_BYTES, read_tensors
from anygpu.compat.device.execution import bf16_bits_to_fp32
from anygpu.compat.memory.offloader import Views, mark_views
from anygpu.compat.memory.transfer import move
from safetensors import safe_open
from safetensors.torch import load_file, save_file

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "loading.csv"
COLUMNS = ["case", "cache", "ours", "theirs", "unit", "ratio", "bar", "met", "gigabytes", "cpu", "torch", "date"]
MEBIBYTE = 2**20
Case = Callable[[Path], dict[str, torch.Tensor]]


def ignore(_bytes: int) -> None:
    """No progress."""


def ours_same(path: Path) -> dict[str, torch.Tensor]:
    return read_tensors(declared([path]), None, ignore, mapped=True)


def ours_memory(path: Path) -> dict[str, torch.Tensor]:
    return read_tensors(declared([path]), None, ignore)


def ours_fp32(path: Path) -> dict[str, torch.Tensor]:
    return read_tensors(declared([path]), torch.float32, ignore, mapped=True)


def theirs_fp32(path: Path) -> dict[str, torch.Tensor]:
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118 - not a dict


def theirs_fp32_whole(path: Path) -> dict[str, torch.Tensor]:
    pipeline = load_file(path)
    return {name: tensor.float() for name, tensor in pipeline.items()}


def on_device(path: Path) -> dict[str, torch.Tensor]:
    """Bits sent at 2 bytes per parameter as offload ``none`` sends them, widened on the simulated accelerator."""
    sys.path.insert(0, str(HERE.parent / "tests"))
    from simulated import accelerator

    module = torch.nn.Module()
    found = read_tensors(declared([path]), None, ignore, mapped=True)
    for name in list(found):
        module.register_buffer(name, found.pop(name))
    views = frozenset(tensor.data_ptr() for tensor in module.buffers() if tensor.nbytes >= VIEW_BYTES)
    mark_views(module, Views(views))
    move(module, accelerator.load(), "file")
    return {name: bf16_bits_to_fp32(tensor) for name, tensor in module.named_buffers()}


CASES: dict[str, Case] = {
    "ours_same": ours_same,
    "ours_memory": ours_memory,
    "ours_fp32": ours_fp32,
    "theirs_same": lambda path: load_file(path),
    "theirs_fp32": theirs_fp32,
    "theirs_fp32_whole": theirs_fp32_whole,
    "on_device": on_device,
}


def touched(tensors: dict[str, torch.Tensor]) -> int:
    """Reads every byte once."""
    return sum(int(tensor.view(torch.int64).sum()) for tensor in tensors.values())


def seconds(case: Case, path: Path, cold: bool) -> float:
    if cold:
        drop(path)
    started = time.perf_counter()
    touched(case(path))
    return time.perf_counter() - started


def drop(path: Path) -> None:
    """Take a file out of the page cache, and see that it is out: pages that somebody maps stay."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as pages:
            count = -(-len(pages) // mmap.PAGESIZE)
            found, first = (ctypes.c_ubyte * count)(), ctypes.c_char.from_buffer(pages)
            failed = ctypes.CDLL(None).mincore(ctypes.byref(first), ctypes.c_size_t(len(pages)), found)
            del first
    left = sum(page & 1 for page in found)
    assert not failed and left <= count // 100, f"{left} of {count} pages of {path} are still in the page cache"


def peak_bytes(case: str, path: Path) -> int:
    """The highest resident memory of a process that runs one case, over that of its start, without a device's."""
    command = [sys.executable, __file__, "--peak-of", case, "--file", path]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(ended.stdout.split()[-1])


def resident_bytes() -> int:
    """Memory of this process that is in RAM now, mapped files included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure_peak(case: str, path: Path) -> None:
    """Print the highest resident memory while a case runs, sampled every 2 ms; that of a device is taken off."""
    accelerator = None
    if case == "on_device":
        sys.path.insert(0, str(HERE.parent / "tests"))
        from simulated import accelerator

        accelerator.load()
    highest = before = resident_bytes()
    running = threading.Event()

    def held() -> int:
        return 0 if accelerator is None else accelerator.memory().allocated_bytes

    def watch() -> None:
        nonlocal highest
        while not running.wait(0.002):
            earlier, resident = held(), resident_bytes()
            if held() == earlier:  # else the two numbers are of different moments
                highest = max(highest, resident - earlier)

    watcher = threading.Thread(target=watch)
    watcher.start()
    kept = CASES[case](path)
    if accelerator is None:
        touched(kept)
    running.set()
    watcher.join()
    print(highest - before)


def synthetic(folder: Path, gigabytes: float) -> Path:
    """A file of finite bf16 weights, in tensors of 64 MB and a hundred small ones."""
    path = folder / f"anygpu-loading-{gigabytes:g}.safetensors"
    if not path.is_file():
        generator = torch.Generator().manual_seed(0)
        count = int(gigabytes * 1e9 / (64 * MEBIBYTE))
        tensors = {
            f"large_{index:03}": torch.randint(-30000, 16000, (4096, 8192), dtype=torch.int16, generator=generator)
            for index in range(count)
        }
        tensors |= {f"small_{index:03}": torch.arange(256, dtype=torch.int16) for index in range(100)}
        save_file({name: tensor.view(torch.bfloat16) for name, tensor in tensors.items()}, path)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path("/tmp"))
    parser.add_argument("--peak-of", default="")
    parser.add_argument("--file", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.peak_of:
        measure_peak(options.peak_of, options.file)
        return
    path = synthetic(options.folder, options.gigabytes)
    size = path.stat().st_size
    about = (f"{size / 1e9:.2f}", platform.processor() or platform.machine(), torch.__version__, date.today())

    def keep(*row: object) -> None:
        print(*row, sep=", ", flush=True)
        with RESULTS.open("a", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            if file.tell() == 0:
                writer.writerow(COLUMNS)
            writer.writerow((*row, *about))

    def speed(name: str, ours: str, theirs: str, cold: bool, bar: float) -> None:
        times: dict[str, list[float]] = {ours: [], theirs: []}
        for turn in range(options.runs):
            for case in list(times)[:: 1 if turn % 2 else -1]:  # who goes first changes: a disk tires
                times[case].append(seconds(CASES[case], path, cold))
        a, b = (statistics.median(times[case]) for case in (ours, theirs))
        ratio = statistics.median(y / x for x, y in zip(times[ours], times[theirs], strict=True))
        keep(name, "cold" if cold else "warm", f"{a:.2f}", f"{b:.2f}", "s", f"{ratio:.2f}", bar, ratio >= bar)

    def memory(name: str, ours: str, limit: float, theirs: str = "", share: float = 0.0) -> None:
        mine = peak_bytes(ours, path)
        other = peak_bytes(theirs, path) if theirs else 0
        limit = other * share if theirs else limit
        of = f"{other / MEBIBYTE:.0f}" if theirs else ""
        ratio = f"{mine / limit:.2f}"
        keep(name, "", f"{mine / MEBIBYTE:.0f}", of, "MiB", ratio, f"{limit / MEBIBYTE:.0f}", mine <= limit)

    memory("peak of bf16 to fp32: result + 128 MiB", "ours_fp32", 2 * size + 128 * MEBIBYTE)
    memory("peak of bf16 to fp32: 30 % under load_file and float", "ours_fp32", 0, "theirs_fp32_whole", 0.7)
    memory("host peak of fp32 on a device: file + 64 MiB", "on_device", size + 64 * MEBIBYTE)
    for cold in (False, True):
        speed("same dtype, views of the file", "ours_same", "theirs_same", cold, 0.9)
        speed("same dtype, memory of its own", "ours_memory", "theirs_same", cold, 0.0)
        speed("bf16 to fp32 on the CPU", "ours_fp32", "theirs_fp32", cold, 0.9)


if __name__ == "__main__":
    main()
