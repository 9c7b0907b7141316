"""The pack's operations, compiled for a GPU that is not there and executed by the interpreter."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from . import amd
from .amd import AMD
from .guarded import Guarded, in_child
from .interpreter import Launch
from .memory import GlobalMemory
from .program import contracted, parsed

NVIDIA = ("sm_70", "sm_75", "sm_80", "sm_86", "sm_89", "sm_90")
TARGETS = (*NVIDIA, *AMD)
CACHE = amd.CACHE / "triton"  # under names that hold source, target, options and Triton's version


@dataclass
class Execution:
    """How kernels are executed, and what came of it: instructions run, PTX or assembly, a digest of all memory after.

    Args:
        contract: fuse products and sums as ptxas may. seed: of a random order of warps; None runs them in step or turn.
        mutate: changes PTX or assembly before it runs. run: False compiles alone.
    """

    contract: bool = False
    seed: int | None = None
    mutate: Callable[[str], str] = str
    run: bool = True
    instructions: int = 0
    kernels: list[str] = field(default_factory=list)
    results: list[bytes] = field(default_factory=list)


@contextmanager
def compiled_for(target: str) -> Iterator[None]:
    """The block in which operations on CPU tensors are compiled for ``target``; :func:`executed` runs them."""
    import kernels_build
    import triton
    from anygpu.kernels import library

    driver, knobs = triton.runtime.driver, triton.knobs
    with (
        knobs.cache.scope(),
        knobs.compilation.scope(),
        patch.object(driver, "_active", kernels_build.Target(target)),
        patch.object(library, "interpreting", lambda: True),
    ):
        knobs.cache.dir = str(CACHE)
        knobs.compilation.disable_line_info = True
        yield


@contextmanager
def executed(how: Execution) -> Iterator[Execution]:
    """The block in which a launch compiles its kernel and interprets the machine code on the tensors it was given."""
    from triton.runtime.jit import JITFunction

    original = JITFunction.run

    def run(kernel: Any, *args: Any, grid: tuple[int, ...], warmup: bool, **options: Any) -> Any:
        compiled = original(kernel, *args, grid=grid, warmup=True, **options)
        if not how.run:
            how.kernels.append(compiled.asm["ptx" if "ptx" in compiled.asm else "amdgcn"])
            return compiled
        values = dict(zip(kernel.arg_names, args, strict=False)) | options
        kinds = compiled.src.signature
        _execute(compiled, [values[name] for name, kind in kinds.items() if kind != "constexpr"], grid, how)
        return compiled

    filled = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # fills results with NaN before
    try:
        with patch.object(JITFunction, "run", run):
            yield how
    finally:
        torch.use_deterministic_algorithms(filled)


def _emulate(compiled: Any, arguments: list[Any], grid: tuple[int, ...], how: Execution) -> None:
    """An AMD kernel, in a child process: memory is the process's own there."""
    written, target = compiled.asm["amdgcn"], compiled.metadata.target
    text = how.mutate(written)
    code = compiled.asm["hsaco"] if text == written else amd.assembled(text, target)
    image = amd.image(code, AMD[target.arch])
    tensors = [Guarded(value) for value in arguments if isinstance(value, Tensor)]
    addresses = iter(tensors)
    values = [next(addresses).pages.address if isinstance(value, Tensor) else value for value in arguments]
    kinds = [kind for kind in compiled.src.signature.values() if kind != "constexpr"]
    order = None if how.seed is None else np.random.default_rng(how.seed)
    threads = compiled.metadata.num_warps * target.warp_size
    launch = amd.Launch(image, amd.packed(written, kinds, values), threads, compiled.metadata.shared, order)
    how.instructions += in_child(lambda: launch.run(grid[0]))
    how.kernels.append(text)
    how.results.append(hashlib.sha256(b"".join(tensor.bring_back() for tensor in tensors)).digest())


def _execute(compiled: Any, arguments: list[Any], grid: tuple[int, ...], how: Execution) -> None:
    if "ptx" not in compiled.asm:
        return _emulate(compiled, arguments, grid, how)
    text = how.mutate(compiled.asm["ptx"])
    program = contracted(parsed(text)) if how.contract else parsed(text)
    memory = GlobalMemory([_region(value) for value in arguments if isinstance(value, Tensor)])
    parameters = [value.data_ptr() if isinstance(value, Tensor) else value for value in arguments]
    order = None if how.seed is None else np.random.default_rng(how.seed)
    launch = Launch(program, parameters, grid[0], compiled.metadata.shared, memory, order)
    launch.run()
    how.instructions += launch.steps
    how.kernels.append(text)
    how.results.append(hashlib.sha256(b"".join(data.tobytes() for _, data in memory.regions)).digest())


def _region(tensor: Tensor) -> tuple[int, np.ndarray]:
    """First address and bytes from the first to the last element of a tensor, which share its memory."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.storage_offset() * tensor.itemsize
    raw = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    return tensor.data_ptr(), raw.numpy()[start : start + (last + 1) * tensor.itemsize]
