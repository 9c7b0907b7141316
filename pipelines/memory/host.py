"""What weights take of host memory: locked, ordinary, or left in their files where they do not fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ...compat.checkpoints.weights import VIEWS_TAKE_MEMORY
from ...compat.decision import Decision
from ...compat.device.execution import HOST
from ...compat.device.facts import DeviceFacts, locks_host_memory
from ...compat.errors import UnsupportedError
from ...compat.memory.host_weights import DISK, HostWeights, choose_host_weights
from ...compat.memory.offloader import HOSTED, Offloader
from ...compat.memory.statistics import amount_of
from ..loading.part import PartFiles


def backed(
    files: Mapping[str, PartFiles], facts: DeviceFacts, free: int, swap: int
) -> tuple[dict[str, PartFiles], HostWeights]:
    """``files`` read the way that host memory wants it, and how the host weights of each part are kept.

    Parts that do not fit together stay views of their files, the one that saves most first. Where views are avoided on
    this kind of device, they go there by way of ordinary memory, a slice at a time. Where the system promises memory
    for views too, there are none: all is held, as far as its page file goes.

    Args:
        free: bytes of host memory that this process may take. swap: bytes beside them that are slow.

    Raises:
        UnsupportedError: a part that must be cast, unpacked or packed, so that it cannot stay in its file, and does not
            fit; said before anything is read.
    """
    if VIEWS_TAKE_MEMORY:
        files = {name: replace(part, mapped=False) for name, part in files.items()}
    sizes = {name: part.total_bytes for name, part in files.items()}
    views = {name: 0 if VIEWS_TAKE_MEMORY else part.view_bytes for name, part in files.items()}
    found = choose_host_weights(sizes, views, free, locks_host_memory(facts.device), facts.unified)
    left = found.of(DISK)
    for name, part in files.items():
        held = sizes[name] - (views[name] if part.mapped or name in left else 0)
        if held > free + swap:
            raise UnsupportedError(
                f"{amount_of(free + swap)} of host memory for the {name}, which takes {amount_of(held)} of it",
                expected=f"{amount_of(held - free - swap)} more",
                fix="Close other programs, or enlarge the page file."
                if VIEWS_TAKE_MEMORY
                else "Close other programs, add swap, or use a safetensors file in the precision that is computed in, "
                "which may stay on disk.",
            )
    kept = {name: replace(files[name], mapped=True, staged=not files[name].mapped) for name in left}
    return {**files, **kept}, found


def decisions(offloader: Offloader) -> tuple[Decision, ...]:
    """How the host weights are kept.

    Nothing where the host computes, or where its memory manager keeps them, unless some stay in their files.
    """
    kept = offloader.options.host_weights
    ours = offloader.device.type != HOST.type and offloader.mode != HOSTED
    return (kept.decision,) if kept.kinds and (ours or kept.of(DISK)) else ()
