"""Injections into the runs of one pipeline, in any process that has the simulated accelerator."""

from __future__ import annotations

import errno
import gc
import random
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from anygpu.compat.device.failures import is_shortage
from anygpu.compat.errors import PackError, parts_of
from hostile.words import LOST, MESSAGES
from simulated import accelerator
from simulated.shortages import shortage
from torch import nn

ROUNDING = 1e-5  # kernels see other alignments; the same sums in another order
SHORTAGES = [
    lambda kind=kind, text=text: kind(text) for kind in (RuntimeError, torch.OutOfMemoryError) for text in MESSAGES
]
SHORTAGES += [lambda: MemoryError(), lambda: OSError(errno.ENOMEM, "Cannot allocate memory")]
LOSSES = [lambda text=text: RuntimeError(text) for text in LOST]
GONE = "has stopped answering"
ANEW, WHOLE, RARE = "load and run", "and decode", 0.1  # runs that take many times as long as others, and their share
WRONG = ("belong together", "a bug of AnyGPU")  # causes that none of these is


class Interrupted(BaseException):
    """As ComfyUI's."""


ERRORS = {"shortage": SHORTAGES, "lost": LOSSES, "interrupt": [Interrupted, KeyboardInterrupt]}
Run = Callable[[], Any]  # a tensor, or several by name


def outcome(
    run: Run,
    wanted: torch.Tensor,
    kind: str,
    fault: Any,
    passes: str | None = None,
    announced: Callable[[], torch.Tensor | None] = lambda: None,
) -> str:
    """``survived``, ``explained`` or ``unmet``, or what went wrong, of one run with a fault in it.

    Args:
        passes: the text of an error that another program may raise as it is.
        announced: what a sound run gives by the method that the run has said it changed to; None where it said none.
    """
    try:
        with fault as met:
            found = run()
        found = together(found)
    except BaseException as raised:
        text, parts = str(raised), parts_of(str(raised)).keys()
        told = {
            "shortage": isinstance(raised, PackError)
            or (is_shortage(raised) and {"found", "expected", "fix"} <= parts),
            "lost": GONE in text,
            "interrupt": isinstance(raised, (Interrupted, KeyboardInterrupt)),
        }
        if not isinstance(raised, (Exception, Interrupted, KeyboardInterrupt)):
            raise
        wrong = WRONG if kind == "lost" else (*WRONG, GONE)
        named = (told[kind] or text == passes) and not any(word in text for word in wrong)
        return "explained" if named else f"raised {type(raised).__name__}: {text[:400]!r}"
    if met.count < met.at:
        return "unmet"
    if kind == "interrupt":
        return "swallowed"
    if (other := announced()) is not None:
        wanted = other
    near = found.shape == wanted.shape and bool((found - wanted).abs().max() <= ROUNDING)
    return "survived" if near else "wrong"


def together(found: Any) -> torch.Tensor:
    """All values of a tensor, or of several by name."""
    return found if isinstance(found, torch.Tensor) else torch.cat([one.flatten().float() for one in found.values()])


def staying(parts: Mapping[str, nn.Module]) -> Counter[str]:
    """The bytes on the device of each of ``parts``, and of all else under ``""``."""
    stores = {
        name: {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for tensor in (*part.parameters(), *part.buffers())
            if tensor.device.type == accelerator.NAME
        }
        for name, part in parts.items()
    }
    every = {pointer: size for each in stores.values() for pointer, size in each.items()}
    others = accelerator.memory().allocated_bytes - sum(every.values())
    return Counter({"": others, **{name: sum(each.values()) for name, each in stores.items()}})


def injected(
    runs: dict[str, Run],
    rng: random.Random,
    count: int,
    unload: Callable[[], None] | None = None,
    parts: Callable[[], Mapping[str, nn.Module]] = dict,
    drop: Callable[[], None] = lambda: None,
    announced: Callable[[], torch.Tensor | None] = lambda: None,
) -> Counter[str]:
    """How ``count`` injections into ``runs`` of one pipeline ended.

    Args:
        unload: of another program, whose errors pass as they are: takes off the device what may stay there or not.
        parts: each of which may stay on the device where it does so after a sound run.
        drop: before a run that reads all anew.
        announced: as :func:`outcome` takes it.
    """
    device, ends, known = accelerator.NAME, Counter[str](), {}
    most = Counter[str]()  # bytes that are on the device after a sound run

    def left() -> Counter[str]:
        if unload:
            unload()
        return staying(parts()) - most

    def started(name: str) -> Run:
        if name == ANEW:
            drop()
        return runs[name]

    for name in runs:
        started(name)()  # the first run may bring what later ones find there
        run = started(name)
        with shortage(0, device=device) as own, shortage(0) as every:
            wanted = run()
        known[name] = together(wanted), every.count, own.count
        gc.collect()
        most += left()
    gc.freeze()  # what was loaded is not walked after each run
    for _ in range(count):
        name = rng.choices(list(runs), [RARE if name.endswith((ANEW, WHOLE)) else 1.0 for name in runs])[0]
        kind = rng.choices(list(ERRORS), (6, 2, 2))[0]
        wanted, steps, own_steps = known[name]
        at = rng.randint(1, max(1, own_steps if kind == "lost" else steps))
        error = rng.choice(ERRORS[kind])
        times = float("inf") if kind == "lost" else rng.choice((1, 1, 2, 3))
        more = {"device": device} if kind == "lost" else {"behind": rng.random() < 0.3}
        fault = shortage(at, times, errors=[error], **more)
        ended = outcome(started(name), wanted, kind, fault, str(error()) if unload else None, announced)
        try:
            if not torch.equal(together(started(name)()), wanted):
                ended += ", the next run differs"
        except Exception as raised:
            ended += f", the next run raised {type(raised).__name__}: {str(raised)[:200]!r}"
        if left():
            gc.collect()
        if left():  # of what was loaded, which may be garbage now
            gc.unfreeze()
            gc.collect()
            gc.freeze()
        for part, size in left().items():
            ended += f", {size} bytes {part and f'of {part} '}stay"
        ends[f"{kind}: {ended}"] += 1
        if ended not in ("survived", "explained", "unmet"):
            print(f"  {name}, {error()!r} at {at} of {steps}, {times} times: {ended}", flush=True)
    gc.unfreeze()
    return ends
