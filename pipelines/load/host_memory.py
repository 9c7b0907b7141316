"""The bytes of the parts of a model, and how host memory holds them: read into it, or as views of their files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from ...compat.device.facts import DeviceFacts, locks_host_memory
from ...compat.errors import UnsupportedError
from ...compat.memory.host_weights import DISK, HostWeights, choose_host_weights
from ...compat.memory.parts import PartBytes, part_bytes
from ...compat.memory.statistics import amount_of
from ..files.part import PartFiles


def sizes_of(files: Iterable[PartFiles]) -> dict[str, PartBytes]:
    """Part name to the bytes of the part, from what was read of its headers."""
    sizes = {}
    for part in files:
        size = part_bytes({name: part.bytes_of(name, entry) for name, entry in part.entries.items()})
        sizes[part.name] = replace(size, dense=part.dense_bytes)
    return sizes


def fit_host_memory(
    files: Mapping[str, PartFiles], facts: DeviceFacts, free: int, swap: int
) -> tuple[dict[str, PartFiles], HostWeights]:
    """``files`` read the way that host memory wants it, and how the host weights of each part are kept.

    Parts that do not fit together stay views of their files, the one that saves most first. Where views are avoided on
    this kind of device, they go there by way of ordinary memory, a slice at a time.

    Args:
        files: of each part.
        facts: of the device that computes.
        free: bytes of host memory that this process may take.
        swap: bytes beside them that are slow.

    Raises:
        UnsupportedError: a part that must be cast, unpacked or packed, so that it cannot stay in its file, and does not
            fit; said before anything is read.
    """
    sizes = {name: part.total_bytes for name, part in files.items()}
    views = {name: part.view_bytes for name, part in files.items()}
    host_weights = choose_host_weights(sizes, views, free, locks_host_memory(facts.device), facts.unified)
    left = host_weights.of(DISK)
    for name, part in files.items():
        held = sizes[name] - (views[name] if part.mapped or name in left else 0)
        if held > free + swap:
            raise UnsupportedError(
                f"{amount_of(free + swap)} of host memory for the {name}, which takes {amount_of(held)} of it",
                expected=f"{amount_of(held - free - swap)} more",
                fix="Close other programs, add swap (on Windows: enlarge the page file), or use a safetensors file in "
                "the precision that computes: it can stay on disk.",
            )
    kept = {name: replace(files[name], mapped=True, staged=not files[name].mapped) for name in left}
    return {**files, **kept}, host_weights
