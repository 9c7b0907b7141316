"""Tensors between unreadable pages, NaN around them, and a child process that may die of touching those."""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import os
import pickle
import resource
import signal
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .memory import MemoryFault

ALIGNED = 16  # bytes, as torch's allocator and Triton's specialisation have it
SECONDS = 120  # of processor time: a damaged loop need not end
_c = ctypes.CDLL(None, use_errno=True)


class Pages:
    """``size`` bytes of 0xFF, NaN in every float format, right below an unreadable page and some way above another."""

    def __init__(self, size: int) -> None:
        length = (-(-size // mmap.PAGESIZE) + 2) * mmap.PAGESIZE
        self._memory = mmap.mmap(-1, length)  # shared with children
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        last = length - mmap.PAGESIZE
        self.start = last - -(-size // ALIGNED) * ALIGNED
        self.address = base + self.start
        self.readable = torch.frombuffer(self._memory, dtype=torch.uint8)[mmap.PAGESIZE : last]
        self.bytes = self.readable[self.start - mmap.PAGESIZE :][:size]
        self.readable.fill_(0xFF)
        for page in (base, base + last):
            if _c.mprotect(ctypes.c_void_p(page), mmap.PAGESIZE, 0):
                raise OSError(ctypes.get_errno(), "mprotect")


class Guarded:
    """A copy of a tensor's elements in pages of their own."""

    def __init__(self, tensor: Tensor) -> None:
        shape = [1 if step == 0 else size for size, step in zip(tensor.shape, tensor.stride(), strict=True)]
        self.tensor = tensor.as_strided(shape, tensor.stride())
        last = sum((size - 1) * step for size, step in zip(shape, tensor.stride(), strict=True))
        self.pages = Pages((last + 1) * tensor.itemsize)
        self.copy = self.pages.bytes.view(tensor.dtype).as_strided(shape, tensor.stride())
        self.copy.copy_(self.tensor)
        self.before = self.pages.bytes.clone()

    def bring_back(self) -> bytes:
        """The bytes that the kernel left; the tensor takes them over.

        Raises:
            MemoryFault: it wrote between the elements or beside them.
        """
        left = self.pages.bytes.clone()
        if not torch.equal(left, self.before):
            self.tensor.copy_(self.copy)
        self.copy.view((torch.int16, torch.int32)[self.copy.itemsize > 2]).fill_(-1)
        if not bool((self.pages.readable == 0xFF).all()):
            raise MemoryFault("a kernel wrote beside the elements of a tensor")
        return left.numpy().tobytes()


def in_child(work: Callable[[], Any]) -> Any:
    """What ``work`` returns in a fork of this process; what it raises is raised here.

    Raises:
        MemoryFault: it touched an unreadable page.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        faulthandler.disable()
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        try:
            result = (True, work())
        except BaseException as error:
            result = (False, error)
        with os.fdopen(writing, "wb") as file:
            file.write(pickle.dumps(result))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        said = file.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        died = signal.Signals(os.WTERMSIG(status))
        raise MemoryFault("outside of every tensor") if died == signal.SIGSEGV else RuntimeError(f"died of {died.name}")
    fine, result = pickle.loads(said)
    if not fine:
        raise result
    return result
