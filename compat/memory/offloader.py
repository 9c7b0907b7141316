"""Placement of the parts of a pipeline, on the device that computes or in host memory, and their moves.

:class:`Offloader` is what everybody asks; ours is in ``standalone.py``, and a host may hand in its own. Offload is the
last step of the one order of operations: load, storage dtype and quantisation, LoRA, Conv3d and precision, kernels,
attention and cache, compile of repeated blocks, offload.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from ..decision import AUTO
from ..device.execution import HOST
from .host_weights import HostWeights
from .parts import Adapters, role_of
from .statistics import MemoryStats

HOSTED = "comfyui"  # the memory manager of the host around us: its offloader is handed in
MODES = ("none", "model", "group", "sequential")  # of our own offloader, the fastest first
CHOICES = (AUTO, *MODES, HOSTED)
DEVICE_CHOICES = (AUTO, "cpu", "gpu:0", "gpu:1", "gpu:2", "gpu:3")  # the same list on every machine

COSTS: dict[str, str] = {
    "none": "every part stays on the device once it has been used; fastest, needs room for transformer and VAE "
    "together",
    "model": "one part at a time; needs room for the largest part, and copies it once per stage",
    "group": "one block at a time, and the next one while it computes; needs little room, but copies the whole "
    "transformer at every step",
    "sequential": "one layer at a time; needs the least room, by far the slowest",
    HOSTED: "ComfyUI loads, streams and evicts the weights like those of its own models; this is auto inside ComfyUI",
}


@dataclass(frozen=True, slots=True)
class OffloadOptions:
    """The user's settings for an offloader besides its mode.

    Args:
        devices: parts that compute on a device of their own; ``text_encoder`` stands for all text encoders.
        keep_free_bytes: of the device, left to others.
        state: folder in which costs are kept.
        host_weights: how the weights of each part are kept in host memory.
    """

    devices: Mapping[str, torch.device] = field(default_factory=dict)
    keep_free_bytes: int = 0
    state: Path | None = None
    host_weights: HostWeights = field(default_factory=HostWeights)

    def place(self, part: str, own: torch.device) -> torch.device:
        """Device that computes ``part`` in a pipeline on the device ``own``."""
        return self.devices.get(role_of(part), own)


class Offloader(Protocol):
    """Decides where the parts of one pipeline are, and moves them."""

    @property
    def mode(self) -> str:
        """The offload mode in force: one of :data:`CHOICES`, but for ``auto``."""

    @property
    def automatic(self) -> bool:
        """True if the mode was decided for the user, so that :meth:`switch` may decide it again for a stage."""

    @property
    def options(self) -> OffloadOptions:
        """User's settings besides the mode."""

    @property
    def device(self) -> torch.device:
        """Device that computes the parts."""

    @property
    def evicts(self) -> bool:
        """True if other models leave the device when this pipeline needs the memory."""

    @property
    def memory_stats(self) -> MemoryStats:
        """Moves so far, and the cost of each stage."""

    @property
    def adapters(self) -> Adapters | None:
        """The adapters of this pipeline; None for none."""

    @property
    def patcher(self) -> Any:
        """The host's own handle of the transformer; None where no host manages memory."""

    def get_models(self) -> list[Any]:
        """The host's own handles of all parts that were used."""

    def device_of(self, part: str) -> torch.device:
        """Device that computes ``part``."""

    def hold(self, part: str, activation_bytes: int = 0, progress: Any = None) -> AbstractContextManager[nn.Module]:
        """The part with this pipeline's adapters, able to run on its device inside the block.

        Args:
            part: its name.
            activation_bytes: what its forward needs beside the weights.
            progress: informed of what moves, and asked for a cancel.
        """

    def release(self, part: str) -> None:
        """Take the part off its device; where that is the host, free its memory."""

    def switch(self, mode: str) -> None:
        """Use ``mode`` from the next use of each part on; what is on the device leaves it.

        Raises:
            InputError: a mode that cannot be switched to, or a part is in use.
        """

    def reduce_memory(self, part: str, *beside: str) -> str:
        """Make room for ``part``, which is in use or about to be.

        Args:
            part: what ran out of memory.
            beside: other parts of the same stage, which would come back at once.

        Returns:
            What was done, in words; empty where nothing is left to do.
        """

    def with_adapters(self, adapters: Adapters | None) -> Offloader:
        """The same offloader for a pipeline with these adapters: parts, mode and statistics are shared."""


def reason_against(choice: str, device: torch.device) -> str:
    """The reason why a mode cannot run on ``device``; empty if possible, or where a host's manager stands in."""
    return "on a CPU" if device.type == HOST.type and choice not in (AUTO, "none", HOSTED) else ""


def placement(offloader: Offloader) -> str:
    """Mode and devices in words, such as ``model on cuda:0, vae on cpu``."""
    parts = {part: offloader.device_of(part) for part in offloader.options.devices}
    apart = "".join(f", {part} on {device}" for part, device in parts.items() if device != offloader.device)
    return f"{offloader.mode} on {offloader.device}{apart}"
