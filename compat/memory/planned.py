"""An offloader whose mode can change while it is in use, and which steps down where a stage finds no room."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..device.execution import HOST
from ..device.facts import answers, default_device, empty_cache
from ..errors import InputError, UnsupportedError
from .hooks import units_on
from .host_weights import PINNED, HostWeights
from .offloader import MODES, ReadsParts, Whole, move, on_device
from .statistics import MemoryStats

PLACES = ("auto", "cpu", "gpu:0", "gpu:1", "gpu:2", "gpu:3")  # the same list on every machine
DOWN = {"none": "group", "model": "group", "group": "sequential"}  # what needs less, for a part that is in use


class Planned:
    """Who holds the parts of one pipeline: a mode of :mod:`.offload`, which may be another for the next stage.

    Args:
        devices: parts that compute elsewhere than on ``device``, by name; ``text_encoder`` stands for all of them.
        automatic: whether the mode was decided, so that it may be decided again for what a stage needs.
        keep_free: bytes of the device that are left to others. host: how the host weights of each part are kept.
    """

    def __init__(
        self,
        parts: ReadsParts,
        device: torch.device,
        mode: str,
        make_room: Callable[[int], None] | None = None,
        *,
        devices: Mapping[str, torch.device] | None = None,
        automatic: bool = False,
        keep_free: int = 0,
        memory_stats: MemoryStats | None = None,
        host: HostWeights | None = None,
    ) -> None:
        self.parts, self.device, self.mode, self.make_room = parts, device, mode, make_room
        self.devices, self.automatic, self.keep_free = dict(devices or {}), automatic, keep_free
        self.memory_stats, self.host = memory_stats or MemoryStats(), host or HostWeights()
        self._made: dict[tuple[str, torch.device], Whole] = {}
        self._held: list[str] = []

    @property
    def placed(self) -> str:
        """Mode and devices in words."""
        apart = "".join(f", {part} on {device}" for part, device in self.devices.items() if device != self.device)
        return f"{self.mode} on {self.device}{apart}"

    def __repr__(self) -> str:
        return f"offload {self.placed}"

    def device_of(self, part: str) -> torch.device:
        """Where ``part`` computes."""
        return self.devices.get("text_encoder" if part.startswith("text_encoder") else part, self.device)

    @contextmanager
    def hold(self, part: str, activation_bytes: int = 0, progress: Any = None) -> Iterator[nn.Module]:
        """The part, able to run on its device inside the block.

        Raises:
            UnsupportedError: the device does not answer any more.
        """
        self._held.append(part)
        mode = self.mode
        try:
            with self._holder(part).hold(part, activation_bytes, progress) as module:
                yield module
        except RuntimeError as error:
            gone = "" if self.device_of(part).type == HOST.type or _is_memory(error) else answers(self.device_of(part))
            if not gone:
                raise
            raise UnsupportedError(
                f"{self.device_of(part)} does not answer any more ({gone})",
                expected=f"the device of the {part}",
                fix="Restart ComfyUI, or load the pipeline again on another device.",
            ) from error
        finally:
            self._held.remove(part)
            units = units_on(self.parts.read(part)) if part in self.parts and self.mode != mode else None
            if (
                units is not None
            ):  # it stepped down while it was held, and its host weights came back with the block's end
                units.remove()

    def release(self, part: str) -> None:
        """Take the part off its device; where that is the host, free its memory."""
        self._holder(part).release(part)

    def take_off(self, part: str) -> None:
        """Take every hook off and the weights to host memory, where the part stays: it is about to change."""
        self._holder(part).take_off(part)

    def switch(self, mode: str) -> None:
        """Let ``mode`` hold the parts from their next use on; what is on the device leaves it.

        Raises:
            InputError: an unknown mode, or a part is in use.
        """
        if mode not in MODES or self._held:
            raise InputError(
                f"offload {mode!r} while {self._held[0]} is in use" if self._held else f"offload {mode!r}",
                expected=f"one of {', '.join(MODES)}, between two stages",
                fix="Choose it on the load node.",
            )
        if mode == self.mode or self.device.type == HOST.type:
            return
        for part in list(self.parts):  # type: ignore[call-overload]
            module = self.parts.read(part)
            if (units := units_on(module)) is not None:
                units.remove()
            if on_device(module, self.device):
                move(module, HOST, part, None, self.memory_stats)
        empty_cache(self.device)
        self.mode = mode

    def step_down(self, part: str, *beside: str) -> str:
        """Make room for ``part``, in use or about to be: other parts leave, then it comes by block, then by layer.

        Args:
            beside: other parts of the same stage, which would come back at once.

        Returns:
            What was done, in words; empty where nothing is left to do.
        """
        if self.device_of(part).type == HOST.type:
            return ""
        others = [
            name
            for name in self.parts  # type: ignore[attr-defined]
            if name not in (part, *beside, *self._held) and on_device(self.parts.read(name), self.device)
        ]
        for name in others:
            self.release(name)
        if others:
            return f"without {', '.join(others)} on the device"
        after = DOWN.get(self.mode, "")
        if not after:
            return ""
        if part not in self._held:
            self.switch(after)
            return f"with offload {after}"
        module = self.parts.read(part)
        units = units_on(module)
        progress = None if units is None else units.progress
        if units is not None:
            units.remove()
        move(module, HOST, part, None, self.memory_stats)
        self.mode = after
        self._holder(part).units_for(part, module, progress)  # type: ignore[attr-defined]
        empty_cache(self.device)
        return f"with offload {after}"

    def _holder(self, part: str) -> Whole:
        device = self.device_of(part)
        mode = "none" if device.type == HOST.type else self.mode
        if (mode, device) not in self._made:
            pinned = self.host.of(PINNED)
            self._made[mode, device] = MODES[mode](self.parts, device, self.make_room, self.memory_stats, pinned)
        return self._made[mode, device]


def places(transformer: str = "auto", text: str = "auto", vae: str = "auto") -> dict[str, str]:
    """Part to device, for the parts that are not left to ``auto``.

    Raises:
        UnsupportedError: an accelerator that this machine does not have.
    """
    asked = {"transformer": transformer, "text_encoder": text, "vae": vae}
    return {part: _device_named(name) for part, name in asked.items() if name not in ("auto", "")}


def _device_named(name: str) -> str:
    if not name.startswith("gpu:"):
        return name
    kind, index = default_device().type, int(name.removeprefix("gpu:"))
    count = 0 if kind == HOST.type else torch.accelerator.device_count()
    if index >= count:
        raise UnsupportedError(
            f"device {name!r} where torch sees {count} accelerator{'' if count == 1 else 's'}",
            expected="auto, cpu, or the number of one that is there",
            fix="Choose auto.",
        )
    return f"{kind}:{index}"


def _is_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower()
