"""Every kernel compiled for every kind of GPU, without a GPU: spills, registers, shared memory, widths of loads.

The launches of the pack run unchanged on meta tensors of full-size models; instead of launching, Triton compiles for
the target that was asked for. Spills and registers are what ptxas reports, or the notes in AMD's assembly. Widths of
loads and stores are read from the disassembly of bf16 (sm_70 is not disassembled: the bundled tool refuses it), the
PTX of other dtypes, and AMD's assembly. A row fails where registers spill, where the widest load is below the
target's demand, or where shared memory is above 64 KB. Other dtypes than bf16 are built for one case of each kernel,
unless --every asks for every case.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from runner import Row, machine
from runner import no_triton as no_triton

NVIDIA = ("sm_70", "sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
AMD = ("gfx908", "gfx90a", "gfx942", "gfx950", "gfx1030", "gfx1100", "gfx1151", "gfx1201")
CDNA = ("gfx908", "gfx90a", "gfx942", "gfx950")
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
SHARED_LIMIT = 64 * 1024
LTX, VIDEO, MOCHI = (2, 6144, 2048), (1, 32640, 3072), (2, 22260, 3072)  # tokens of a full clip


def cases(dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    """Launches at the sizes of full models, by name."""
    from anygpu.kernels._triton import activation, group_norm, residual, rope
    from anygpu.kernels.terms import LAYER, RMS, Gate, GroupNorm, Modulation, Norm, Pair, Tables

    def empty(*shape: int, of: torch.dtype = dtype, last: bool = False) -> torch.Tensor:
        layout = torch.channels_last_3d if last else torch.contiguous_format
        return torch.empty(shape, dtype=of, device="meta", memory_format=layout)

    def rows(shape: tuple[int, ...], count: int, of: torch.dtype = dtype) -> tuple[torch.Tensor, ...]:
        return empty(shape[0], 1, count, shape[2], of=of).unbind(2)

    def both(shape: tuple[int, ...], tanh: bool, kind: str, wide: torch.dtype = dtype) -> Callable[[], Any]:
        gate, scale, shift, *_ = rows(shape, 6, wide)
        terms = (Gate(gate, tanh, 1e-6 if tanh else None), Norm(kind, 1e-6), Modulation(scale, None if tanh else shift))
        return partial(residual.residual_norm, empty(*shape, of=wide), empty(*shape), *terms, dtype)

    def table(tokens: int, *shape: int) -> Tables:
        return Tables(*(empty(tokens, *shape, of=torch.float32) for _ in range(2)))

    def pair(*shape: int) -> Pair:
        return Pair(*(empty(*shape),) * 2, *(empty(shape[-1]),) * 2)

    def clip(last: bool, per_channel: bool) -> Callable[[], Any]:
        x, layout = empty(1, 256, 17, 240, 416, last=last), ("contiguous", "channels_last")[last]
        if per_channel:
            return partial(group_norm.rms_silu_pad, x, Norm(RMS, 1e-8), Modulation(), [0, 0, 0, 0, 2, 0], True, layout)
        how = GroupNorm(32, 1e-6, empty(256), empty(256), last)
        return partial(group_norm.group_norm_silu_pad, x, how, [1, 1, 1, 1, 2, 0], True, layout)

    x, wide, layered = empty(*LTX), empty(2, 6144, 8192), Modulation(*rows(VIDEO, 6)[:2])
    text, full = pair(1, 256, 24, 128), empty(*MOCHI, of=torch.float32)
    powers = Gate(rows(MOCHI, 1, torch.float32)[0], True, 1e-6, factor=empty(2, 22260, 1, of=torch.float32))
    return {
        "normalized rms": partial(residual.normalized, x, Norm(RMS, 1e-6), Modulation(*rows(LTX, 2)), None),
        "normalized layer": partial(residual.normalized, empty(*VIDEO), Norm(LAYER, 1e-6), layered, None),
        "gated_residual": partial(residual.gated_residual, x, empty(*LTX), Gate(rows(LTX, 1)[0])),
        "residual_norm ltx": both(LTX, False, RMS),
        "residual_norm mochi": both(MOCHI, True, RMS),
        "gated_residual factor": partial(residual.gated_residual, full, full, powers),
        "residual_norm fp32": both(VIDEO, False, LAYER, torch.float32),
        "qk_norm_rope across": partial(rope.qk_norm_rope, pair(*LTX), table(6144, 1024), 1e-5, None, None),
        "qk_norm_rope per head": partial(
            rope.qk_norm_rope, pair(1, 32640, 24, 128), table(32640, 1, 64), 1e-6, text, None
        ),
        "swiglu": partial(activation.swiglu, wide, None),
        "swiglu scaled": partial(activation.swiglu, empty(2, 22260, 16384), 2.0**15),
        "group_norm contiguous": clip(False, False),
        "group_norm channels last": clip(True, False),
        "rms_silu_pad contiguous": clip(False, True),
        "rms_silu_pad channels last": clip(True, True),
    }


class Target:
    """What Triton asks of a driver, answered for a GPU that is not there."""

    def __init__(self, name: str) -> None:
        from triton.backends.compiler import GPUTarget

        if name.startswith("sm_"):
            self.target = GPUTarget("cuda", int(name[3:]), 32)
        else:
            self.target = GPUTarget("hip", name, 64 if name in CDNA else 32)
        self.name = name

    def get_current_device(self) -> str:
        return self.name

    def get_current_stream(self, _device: object) -> int:
        return 0

    def get_current_target(self) -> object:
        return self.target


FIRST = "bf16"  # the dtype in which every case is built and disassembled
ONE_OF_EACH = ("normalized rms", "gated_residual", "residual_norm ltx", "qk_norm_rope per head", "swiglu")
ONE_OF_EACH += ("group_norm contiguous",)  # three kernels: partial sums, their total, the padded result


def built(name: str, dtypes: list[str], chosen: list[str], every: bool = False) -> list[Row]:
    """The rows of one target."""
    import triton
    from triton.runtime.jit import JITFunction

    rows: list[Row] = []
    label, seen = ["", ""], dict[int, Any]()

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        started, said = time.perf_counter(), io.StringIO()
        with contextlib.redirect_stdout(said):
            compiled = original(kernel, *args, grid=grid, warmup=True, **options)
        spent = time.perf_counter() - started
        if id(compiled) not in seen:  # a second case may launch the very same kernel
            seen[id(compiled)] = compiled
            rows.append(measured(compiled, said.getvalue(), (*label, kernel.fn.__name__, name), spent))
        return compiled

    original, JITFunction.run = JITFunction.run, compile_only  # type: ignore[method-assign]
    driver = triton.runtime.driver
    former, driver._active = driver._active, Target(name)  # asking for the former one would look for a GPU
    knobs = triton.knobs
    with tempfile.TemporaryDirectory() as folder, knobs.cache.scope(), knobs.nvidia.scope(), knobs.compilation.scope():
        knobs.cache.dir = folder
        knobs.nvidia.dump_ptxas_log = True
        knobs.compilation.disable_line_info = True
        for dtype in dtypes:
            for case, launch in cases(DTYPES[dtype]).items():
                if case in chosen and (every or dtype == FIRST or case in ONE_OF_EACH):
                    label[:] = case, dtype
                    launch()
    JITFunction.run, driver._active = original, former  # type: ignore[method-assign]
    return rows


def measured(compiled: Any, log: str, label: tuple[str, str, str, str], seconds: float) -> Row:
    """A row of what the compiled kernel of ``label`` (case, dtype, kernel, target) became."""
    case, dtype, kernel, target = label
    if target.startswith("sm_"):
        found = _nvidia(compiled, log, dtype == FIRST and target != "sm_70")
    else:
        found = _amd(compiled.asm["amdgcn"])
    loads, stores, registers, spills, disassembled = found
    shared = int(compiled.metadata.shared)
    faults = []
    if spills:
        faults.append(f"{spills} spills")
    if shared > SHARED_LIMIT:
        faults.append(f"{shared} bytes of shared memory")
    demand = demanded_bits(kernel, target)
    if max(loads, default=0) < demand:
        faults.append(f"loads of {max(loads, default=0)} bits, {demand} demanded")
    return {
        "case": case, "kernel": kernel, "dtype": dtype, "target": target, "seconds": round(seconds, 3),
        "registers": registers, "spills": spills, "shared_bytes": shared, "load_bits": max(loads, default=0),
        "store_bits": max(stores, default=0), "loads": _counts(loads), "stores": _counts(stores),
        "disassembled": disassembled, "verdict": "; ".join(faults) or "ok",
    }  # fmt: skip


def demanded_bits(kernel: str, target: str) -> int:
    """The widest load that a kernel must have: the sums of statistics read a few numbers only."""
    if kernel == "total_kernel" or target == "sm_70":
        return 0
    return 64 if target in CDNA else 128


def _counts(widths: Counter[int]) -> str:
    return " ".join(f"{bits}:{count}" for bits, count in sorted(widths.items(), reverse=True))


def _nvidia(compiled: Any, log: str, disassemble: bool) -> tuple[Counter[int], Counter[int], int, int, bool]:
    registers = max(int(number) for number in re.findall(r"Used (\d+) registers", log))
    spills = sum(int(number) for number in re.findall(r"(\d+) bytes spill", log))
    if not disassemble:
        ptx = compiled.asm["ptx"]
        return _ptx_widths(ptx, "ld.global"), _ptx_widths(ptx, "st.global"), registers, spills, False
    text = _disassembly(compiled.asm["cubin"])
    loads = Counter(_sass_bits(match) for match in re.findall(r"\bLDG\.E((?:\.\w+)*)", text))
    stores = Counter(_sass_bits(match) for match in re.findall(r"\bSTG\.E((?:\.\w+)*)", text))
    return loads, stores, registers, spills + len(re.findall(r"\b(?:LDL|STL)\b", text)), True


def _disassembly(cubin: bytes) -> str:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, "-c", "-ndf", file.name], capture_output=True, text=True, check=True).stdout


def _sass_bits(suffixes: str) -> int:
    for name, bits in (("128", 128), ("64", 64), ("U16", 16), ("S16", 16), ("U8", 8), ("S8", 8)):
        if name in suffixes.split("."):
            return bits
    return 32


def _ptx_widths(ptx: str, instruction: str) -> Counter[int]:
    found: Counter[int] = Counter()
    for vector, bits in re.findall(rf"{re.escape(instruction)}(?:\.\w+(?:::\w+)?)*?(?:\.v(\d))?\.[bfus](\d+)", ptx):
        found[int(vector or 1) * int(bits)] += 1
    return found


def _amd(text: str) -> tuple[Counter[int], Counter[int], int, int, bool]:
    def widths(verb: str) -> Counter[int]:
        pattern = rf"\b(?:global|buffer|flat)_{verb}_(dwordx4|dwordx3|dwordx2|dword|b128|b96|b64|b32|\w+)"
        bits = {"dwordx4": 128, "b128": 128, "dwordx3": 96, "b96": 96, "dwordx2": 64, "b64": 64, "dword": 32, "b32": 32}
        return Counter(bits.get(name, 16) for name in re.findall(pattern, text))

    def noted(key: str) -> int:
        return sum(int(number) for number in re.findall(rf"\.{key}:\s+(\d+)", text))

    spills = noted("vgpr_spill_count") + noted("sgpr_spill_count")
    return widths("load"), widths("store"), noted("vgpr_count"), spills, True


def rows(
    targets: tuple[str, ...], dtypes: tuple[str, ...], only: tuple[str, ...], every: bool, workers: int
) -> Iterator[Row]:
    """A row per kernel, dtype and target.

    Args:
        only: names of :func:`cases`; empty for all. every: every case in every dtype.
    """
    import triton

    os.environ.pop("TRITON_INTERPRET", None)
    known = [*cases(torch.bfloat16)]
    if unknown := {*only} - {*known} | {*targets} - {*NVIDIA, *AMD}:
        raise SystemExit(f"no case or target {sorted(unknown)}; expected some of {[*known, *NVIDIA, *AMD]}")
    about = {"triton": triton.__version__, "torch": torch.__version__, "gpu": "none (cross-compiled)"}
    chosen = list(only or known)
    with ProcessPoolExecutor(min(workers, os.cpu_count() or 1, len(targets)), mp_context=get_context("spawn")) as pool:
        parts = [pool.submit(built, target, list(dtypes), chosen, every) for target in targets]
        yield from (row | about | {"date": machine()["date"]} for part in parts for row in part.result())


def fails(row: Row) -> bool:
    """Tell whether a kernel spills, loads too narrowly or shares too much memory."""
    return bool(row["verdict"] != "ok")
