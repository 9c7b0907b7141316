"""Our own offloader, and the choice between it and the one that a host hands in."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..decision import AUTO, CHOSEN, Decision
from ..device.execution import HOST, current
from ..device.facts import GIBIBYTE, device_fault, empty_cache, free_bytes, gone, indexed
from ..device.failures import is_shortage
from ..errors import InputError, UnsupportedError, require_choice
from .hooks import GroupHooks, hooks_on, remove_hooks
from .offloader import CHOICES, COSTS, HOSTED, MODES, PINNED, Offloader, OffloadOptions, placement, reason_against
from .parts import BY_BLOCK, WHOLE, Adapters, PartBytes, Parts, Silent, adapters_on, denoises, role_of
from .prefetch import copy_stream
from .statistics import MemoryStats
from .transfer import move, on_device, tensors_of

STEP_DOWN = {"none": "group", "model": "group", "group": "sequential"}  # mode to the one that needs less memory
LARGEST_SHARE = 0.75  # of free memory for weights under ``auto``; activations have the rest


def ahead_bytes(
    offloader: Offloader, weights: PartBytes, part: str, mode: str, activations: int = 0, stays: int = 0
) -> int:
    """Bytes of a part's weights on its device beside those in use (:meth:`PartBytes.resident`): the next block's, where
    copies have a stream of their own, and the ``stays`` that remain there. ``activations``: bytes of one forward."""
    streams = not offloader.options.host_weights.shared and copy_stream(offloader.device_of(part)) is not None
    ahead = weights.ahead(mode, part, activations) if streams else 0
    return min(ahead + stays, weights.total - weights.resident(mode, part, activations)) if stays else ahead


def keeps(offloader: Offloader, part: str, mode: str) -> bool:
    """True if as many blocks of ``part`` as fit stay on the device: a denoiser's under ``group``, with own memory."""
    return mode == "group" and denoises(part) and not offloader.options.host_weights.shared


def resident_bytes(total: int, passing: int, room: int | None, activations: int) -> int:
    """Bytes of a part's ``total`` that stay: ``room`` (None: unknown, so 0) less a forward and ``passing`` groups."""
    return 0 if room is None else max(0, min(total, room - activations - passing))


@dataclass(slots=True)
class _State:
    """State shared by the offloaders of pipelines with the same parts."""

    mode: str
    in_use: list[str] = field(default_factory=list)


class StandaloneOffloader:
    """Our own offload, in a mode that may change between stages, and step down where a stage finds no room.
    ``none`` moves a part in at its first use, where it stays until it is released; ``model`` has it on the device for
    one use. ``group`` brings one block of a transformer, of which as many as fit stay, or of a text encoder at a time,
    or one layer of a VAE, ``sequential`` one layer of anything. All but ``none`` keep the weights in host memory and
    copy nothing back. ``make_room`` is given the bytes about to be needed and where: a host can free other models."""

    patcher = None

    def __init__(
        self, parts: Parts, device: torch.device, mode: str, options: OffloadOptions | None = None, *,
        make_room: Callable[[int, torch.device], None] | None = None, automatic: bool = False,
    ) -> None:  # fmt: skip
        self.parts, self.device, self.options = parts, indexed(device), options or OffloadOptions()
        self.make_room, self.automatic = make_room, automatic  # the latter: the user left the mode to us
        self.memory_stats = MemoryStats(self.options.state)
        self.adapters: Adapters | None = None
        self._state = _State(mode)
        self._devices = {part: indexed(place) for part, place in self.options.devices.items()}

    def __repr__(self) -> str:
        return f"offload {placement(self)}"

    @property
    def mode(self) -> str:
        return self._state.mode

    @property
    def evicts(self) -> bool:
        return self.make_room is not None

    def get_models(self) -> list[Any]:
        return []

    def device_of(self, part: str) -> torch.device:
        return self._devices.get(role_of(part), self.device)

    def with_adapters(self, adapters: Adapters | None) -> StandaloneOffloader:
        other = copy.copy(self)
        other.adapters = adapters
        return other

    @contextmanager
    def hold(self, part: str, activation_bytes: int = 0, progress: Any = None) -> Iterator[nn.Module]:
        """The part, able to run on its device inside the block; UnsupportedError if the device does not answer."""
        mode, in_use = self.mode, self._state.in_use
        in_use.append(part)
        try:
            with (
                current(self.device_of(part)),
                adapters_on(self.parts, part, self.adapters, self.detach, progress) as module,
                self._onload(part, module, activation_bytes, progress),
            ):
                yield module
        except RuntimeError as error:
            self._require_answer(part, error)
            raise
        finally:
            in_use.remove(part)
            if self.mode != mode and part in self.parts:  # it stepped down, and got hooks, while it was in use
                remove_hooks(self.parts.read(part))

    def release(self, part: str) -> None:
        """Take the part off its device to host memory; where it computes on the host, drop it."""
        if part in self.parts and self.device_of(part).type == HOST.type:
            self.parts.drop(part)
        elif self.mode != "model":  # in which a part has left already, or is in use
            self.detach(part)

    def detach(self, part: str) -> None:
        """Take the hooks off the part and bring its weights to host memory, where it stays: it is about to change."""
        if part in self.parts:
            module = self.parts.read(part)
            remove_hooks(module)
            self._move(part, module, HOST)
            empty_cache(self.device_of(part))

    def switch(self, mode: str) -> None:
        """Set the mode between two stages: hooks go, and parts leave the pipeline's device; nothing on a CPU."""
        in_use = self._state.in_use
        if mode not in MODES or in_use:
            found = f"offload {mode!r} while {in_use[0]} is in use" if in_use else f"offload {mode!r}"
            expected = f"one of {', '.join(MODES)}, between two stages"
            raise InputError(found, expected=expected, fix="Choose it on the load node.")
        if mode == self.mode or all(self.device_of(part).type == HOST.type for part in self.parts.readers):
            return
        for part, module in self.parts.items():
            remove_hooks(module)
            if self.device.type == HOST.type or on_device(module, self.device):  # others stay on cards of their own
                self.detach(part)
        self._state.mode = mode

    def reduce_memory(self, part: str, *beside: str) -> str:
        """Take the first step that makes room in a stage with these parts, and return it in words, empty for none:
        others leave; of one in use less stays, then nothing comes ahead; they come by block, then by layer."""
        used = (part, *beside)
        part = next((name for name in used if name in self._state.in_use), part)
        device = self.device_of(part)
        if device.type == HOST.type:
            return ""
        staying = (*used, *self._state.in_use)
        others = [name for name, module in self.parts.items() if name not in staying and on_device(module, device)]
        for name in others:
            self.detach(name)
        if others:
            return f"without {', '.join(others)} on the device"
        module = self.parts.read(part) if part in self._state.in_use else None
        hooks = None if module is None else hooks_on(module)
        if hooks is not None and (done := hooks.give_up()):
            empty_cache(device)
            return done
        mode = STEP_DOWN.get(self.mode, "")
        if not mode or (mode == "sequential" and not any(name.startswith(BY_BLOCK) for name in used)):
            return ""  # a VAE comes by layer in ``group``, too
        if module is None:
            self.switch(mode)
            return f"with offload {mode}"
        progress, was = None if hooks is None else hooks.progress, self.mode
        remove_hooks(module)
        self._move(part, module, HOST)
        self._state.mode = mode
        try:
            self._hook(part, module, progress)
        except BaseException:
            self._state.mode = was  # the part stays on the host without hooks, from where any mode takes it
            raise
        empty_cache(device)
        return f"with offload {mode}"

    def _onload(
        self, part: str, module: nn.Module, activation_bytes: int, progress: Any
    ) -> AbstractContextManager[None]:
        """A context in which ``module`` can run on the part's device, by the mode in force."""
        if self.device_of(part).type == HOST.type:
            self._ask_for_room(activation_bytes, HOST)
            return nullcontext()
        onload = self._streamed if self.mode in ("group", "sequential") and part != WHOLE else self._whole
        return onload(part, module, activation_bytes, progress)

    @contextmanager
    def _streamed(self, part: str, module: nn.Module, activation_bytes: int, progress: Any) -> Iterator[None]:
        """Have hooks bring the part by block or layer within the ``with``; later it is on the host, hooks still on."""
        device = self.device_of(part)
        staying = sum(tensor.nbytes for tensor in tensors_of(module)) if keeps(self, part, self.mode) else 0
        self._ask_for_room(staying + activation_bytes, device)
        hooks = hooks_on(module)
        if hooks is None or hooks.device != device or hooks.by_block != self._by_block(part):
            remove_hooks(module)
            self._move(part, module, HOST, progress)
            hooks = self._hook(part, module, progress)
        hooks.progress = progress or Silent()
        self._share_room(hooks, part, activation_bytes)
        try:
            yield
        finally:
            hooks.offload()
            if hooks.copies is not None:
                empty_cache(device)  # what torch keeps for the stream of copies is of no use to anything else

    @contextmanager
    def _whole(self, part: str, module: nn.Module, activation_bytes: int, progress: Any) -> Iterator[None]:
        """Move the whole part to its device for the block; under mode ``none`` it stays there."""
        device, stays = self.device_of(part), self.mode == "none"
        remove_hooks(module)
        if not stays:
            self._move(part, module, HOST, progress)  # where another mode left it on the device
        away = sum(tensor.nbytes for tensor in tensors_of(module) if tensor.device != device)
        self._ask_for_room(away + activation_bytes, device)
        try:
            self._move(part, module, device, progress, keep=not stays)
            yield
        finally:
            if not stays:
                self._move(part, module, HOST)
            empty_cache(device)  # or the next stage finds less room than there is

    def _move(
        self, part: str, module: nn.Module, device: torch.device, progress: Any = None, keep: bool = False
    ) -> None:
        """Move the whole part; ``keep``: its host weights stay, but only where the device has memory of its own."""
        shared = self.options.host_weights.shared and self.device.type != HOST.type
        move(module, device, part, progress, self.memory_stats, keep=keep and not shared, shared=shared)

    def _hook(self, part: str, module: nn.Module, progress: Any) -> GroupHooks:
        """Put hooks on the part, as the mode in force has them, and return them."""
        device, weights = self.device_of(part), self.options.host_weights
        return GroupHooks(
            module, device, self._by_block(part), self.memory_stats, part=part, pinned=part in weights.of(PINNED),
            copies=None if weights.shared else copy_stream(device), progress=progress,
        )  # fmt: skip

    def _share_room(self, hooks: GroupHooks, part: str, activation_bytes: int) -> None:
        """Divide the free memory beside a forward among what stays (0 if unknown), one group in use and one ahead."""
        free, largest = free_bytes(hooks.device), hooks.largest_bytes
        room = None if free is None else free - self.options.keep_free_bytes
        passing = max([2 * largest, *(group.total_bytes for group in hooks.groups)])  # there may be no groups
        total = hooks.total_bytes if keeps(self, part, self.mode) else 0
        stays = resident_bytes(total, passing, room, activation_bytes)
        hooks.keep(stays)
        hooks.room_bytes = None if room is None else room - activation_bytes - stays
        left = largest if hooks.room_bytes is None else hooks.room_bytes - largest
        hooks.ahead_bytes = 0 if hooks.copies is None else max(0, min(largest, left))

    def _by_block(self, part: str) -> bool:
        return self.mode == "group" and part.startswith(BY_BLOCK)

    def _ask_for_room(self, needed_bytes: int, device: torch.device) -> None:
        if self.make_room is not None:
            self.make_room(needed_bytes, device)

    def _require_answer(self, part: str, error: RuntimeError) -> None:
        """Raise UnsupportedError from ``error`` if the part's device has stopped answering."""
        device = self.device_of(part)
        silent = "" if device.type == HOST.type or is_shortage(error) else device_fault(device)
        if silent:
            raise gone(device, silent) from error


def offloader_for(
    choice: str, parts: Parts, device: torch.device, part_bytes: Mapping[str, int], *,
    free: int | None = None, make_room: Callable[[int, torch.device], None] | None = None,
    hosted: Callable[[Parts, torch.device, OffloadOptions], Offloader] | None = None,
    options: OffloadOptions | None = None,
) -> tuple[Offloader, Decision]:  # fmt: skip
    """The offloader for an offload choice, and the decision for it.
    ``part_bytes`` are those in the dtype on the device; ``free`` are its free bytes, None if unknown; ``make_room`` is
    as for :class:`StandaloneOffloader`; ``hosted`` makes ComfyUI's offloader, which ``auto`` then chooses. Raises
    InputError for an unknown choice, UnsupportedError for offload on a CPU, or for ComfyUI's without ``hosted``."""
    options = options or OffloadOptions()
    require_choice("offload", choice, CHOICES)
    if hosted is not None and choice in (AUTO, HOSTED):
        return _with_decision(hosted(parts, device, options), choice, COSTS[HOSTED])
    if choice == HOSTED:
        others = ", ".join(mode for mode in CHOICES if mode != HOSTED)
        raise UnsupportedError(f"offload {choice!r} outside ComfyUI", expected=f"one of {others}", fix="Choose auto.")
    if refusal := reason_against(choice, device):
        found, expected = f"offload {choice!r} {refusal}", "auto or none"
        raise UnsupportedError(found, expected=expected, fix="Choose auto. A CPU has no second memory to offload to.")
    free = None if free is None else max(0, free - options.keep_free_bytes)
    here = {part: size for part, size in part_bytes.items() if options.place(part, device) == device}
    mode, why = (choice, COSTS[choice]) if choice != AUTO else _automatic(device, here, free)
    own = StandaloneOffloader(parts, device, mode, options, make_room=make_room, automatic=choice == AUTO)
    return _with_decision(own, choice, why)


def _with_decision(offloader: Offloader, choice: str, why: str) -> tuple[Offloader, Decision]:
    return offloader, Decision("offload", placement(offloader), why, AUTO if choice == AUTO else CHOSEN)


def _automatic(device: torch.device, part_bytes: Mapping[str, int], free: int | None) -> tuple[str, str]:
    """The fastest mode whose weights leave a quarter of ``free`` bytes, else ``group``, and why; ``model`` if None. In
    ``none`` all parts stay but text encoders, which come one at a time."""
    if device.type == HOST.type:
        return "none", "the device is the host, so there is nothing to offload to"
    if free is None:
        return "model", "this device does not tell its free memory, so one part at a time"
    staying = [size for part, size in part_bytes.items() if not part.startswith("text_encoder")]
    text = max((size for part, size in part_bytes.items() if part.startswith("text_encoder")), default=0)
    most, have = LARGEST_SHARE * free, f"{free / GIBIBYTE:.1f} GB free"
    if max(sum(staying), text) < most:
        return "none", f"{sum(staying) / GIBIBYTE:.1f} GB of weights leave a quarter of {have}"
    largest = max([*staying, text], default=0)
    if largest < most:
        return "model", f"the largest part, {largest / GIBIBYTE:.1f} GB, leaves a quarter of {have}"
    return "group", f"the largest part, {largest / GIBIBYTE:.1f} GB, does not leave a quarter of {have}"
