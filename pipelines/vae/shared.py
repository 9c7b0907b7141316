"""Regions of one decode on all devices of a group: the leader hands them out, and puts together what comes back.

A region is a tile, or all of a window of time; the chunks that a causal decoder makes of one stay on one device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ...compat.device.failures import DEVICE_ERRORS
from ...compat.output_check import InvalidOutputError
from ...compat.ranks import Group
from .plan import Attempt


@dataclass(frozen=True, slots=True)
class RegionTask:
    """A region to decode.

    Args:
        latents: (1, C, T, h, w) on the host.
        attempt: in which form.
        time: of a VAE that takes one, on the host.
    """

    latents: torch.Tensor
    attempt: Attempt
    time: torch.Tensor | None


Decode = Callable[[RegionTask], torch.Tensor]


def decoded_together(group: Group, tasks: list[RegionTask], decode: Decode) -> list[torch.Tensor | None]:
    """On the leader: frames (1, 3, F, H, W) of each task; None where its device failed. The others :func:`serve`."""
    frames: list[torch.Tensor | None] = []
    size = group.world.size
    for first in range(0, len(tasks), size):
        some = tasks[first : first + size]
        group.world.shared([*some, *[None] * (size - len(some))])
        own = _tried(decode, some[0])
        frames += (group.world.collected(own) or [])[: len(some)]
    return frames


def serve(group: Group, decode: Decode) -> int:
    """On the others: decode what the leader hands out, until :func:`dismiss`; how many regions that were."""
    count = 0
    while (tasks := group.world.shared(None)) is not None:
        own = tasks[group.world.rank]
        frames = None if own is None else _tried(decode, own)
        count += frames is not None
        group.world.collected(frames)
    return count


def dismiss(group: Group) -> None:
    """On the leader: nothing more will be handed out."""
    group.world.shared(None)


def _tried(decode: Decode, task: RegionTask) -> torch.Tensor | None:
    """The frames; None where the device fails: the leader then goes on with that region by itself, in smaller parts."""
    try:
        return decode(task)
    except (*DEVICE_ERRORS, InvalidOutputError):
        return None
