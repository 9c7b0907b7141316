"""Who holds the parts of a pipeline on the device that computes, and when they leave it again.

The one order of operations, of which offloader is the last step: load, storage dtype and quantisation, LoRA, Conv3d
and precision rewrites, kernel rewrites, attention and cache configuration, compile of repeated blocks, offloader.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from ..checkpoints.weights import let_go
from ..decision import AUTO, CHOSEN, Decision
from ..device.execution import HOST
from ..device.facts import GIBIBYTE, empty_cache, indexed
from ..errors import InputError, UnsupportedError
from .hooks import Units, unit_of, units_on
from .host_weights import HostWeights, views_of
from .parts import Silent
from .staging import sent_together
from .statistics import GIGABYTE as GIGABYTE
from .statistics import MemoryStats
from .statistics import amount as amount
from .transfer import arrived, transfer_for

HOSTED = "comfyui"  # the memory manager of the host around us: its offloader is handed in
KEPT = "_anygpu_kept"  # on a module: host weights that stay in host memory while their copies are on a device
CHOICES = (AUTO, "none", "model", "group", "sequential", HOSTED)

COSTS: dict[str, str] = {
    "none": "every part stays on the device after its first use: fastest, needs room for transformer and VAE together",
    "model": "one part at a time is on the device: needs room for the largest part, costs a copy of it per stage",
    "group": "one block at a time is on the device: needs little room, copies the whole transformer every step",
    "sequential": "one layer at a time is on the device: needs the least room and is by far the slowest",
    HOSTED: "ComfyUI moves, streams and evicts the weights as it does its own models'; what auto means inside ComfyUI",
}


@dataclass(frozen=True, slots=True)
class Terms:
    """What the user asks of an offloader beside its mode.

    Args:
        devices: parts that compute elsewhere, by name. keep_free: bytes of the device that are left to others.
        state: folder in which costs are kept. host: how the host weights of each part are kept.
    """

    devices: Mapping[str, torch.device] = field(default_factory=dict)
    keep_free: int = 0
    state: Path | None = None
    host: HostWeights = field(default_factory=HostWeights)


class ReadsParts(Protocol):
    """Parts that are read on first use and can be forgotten."""

    def read(self, name: str, progress: Any = None) -> nn.Module: ...
    def drop(self, name: str) -> None: ...
    def __contains__(self, name: object) -> bool: ...


class Whole:
    """Offload ``none``: a part is moved in when it is first held and stays until it is released.

    Args:
        parts: the modules by name, on the CPU when they are read.
        device: where they execute.
        make_room: told the bytes that are about to be needed on ``device``, so that a host can free others.
        pinned: parts whose host weights move into locked host memory where their weights come and go.
    """

    mode = "none"

    def __init__(
        self,
        parts: ReadsParts,
        device: torch.device,
        make_room: Callable[[int], None] | None = None,
        memory_stats: MemoryStats | None = None,
        pinned: tuple[str, ...] = (),
    ) -> None:
        self.parts, self.device, self.make_room = parts, device, make_room
        self.memory_stats, self.pinned = memory_stats or MemoryStats(), pinned

    def __repr__(self) -> str:
        return f"offload {self.mode} on {self.device}"

    @contextmanager
    def hold(self, part: str, activation_bytes: int = 0, progress: Any = None) -> Iterator[nn.Module]:
        """The part on ``device`` for the block, and afterwards until :meth:`release`."""
        module = self.parts.read(part, progress)
        _unhooked(module)
        self._ask_for_room(module, activation_bytes)
        move(module, self.device, part, progress, self.memory_stats)
        yield module

    def release(self, part: str) -> None:
        """Back to host memory; where the device is the host, out of memory altogether."""
        if part not in self.parts:
            return
        if self.device.type == HOST.type:
            self.parts.drop(part)
            return
        module = self.parts.read(part)
        _unhooked(module)
        move(module, HOST, part, None, self.memory_stats)
        empty_cache(self.device)

    def take_off(self, part: str) -> None:
        """Take every hook off and the weights to host memory, where the part stays: it is about to change."""
        if part in self.parts:
            module = self.parts.read(part)
            _unhooked(module)
            move(module, HOST, part, None, self.memory_stats)
            empty_cache(self.device)

    def _ask_for_room(self, module: nn.Module, activation_bytes: int) -> None:
        if self.make_room is not None:
            away = sum(t.numel() * t.element_size() for t in _tensors(module) if t.device != self.device)
            self.make_room(away + activation_bytes)


class PerStage(Whole):
    """Offload ``model``: a part is on the device only while it is held; its CPU copy is kept, never copied back."""

    mode = "model"

    @contextmanager
    def hold(self, part: str, activation_bytes: int = 0, progress: Any = None) -> Iterator[nn.Module]:
        """The part on ``device`` for the block only."""
        module = self.parts.read(part, progress)
        _unhooked(module)
        move(module, HOST, part, progress)  # where another mode left it on the device
        self._ask_for_room(module, activation_bytes)
        try:
            move(module, self.device, part, progress, self.memory_stats, keep=True)
            yield module
        finally:
            move(module, HOST, part)
            empty_cache(self.device)

    def release(self, part: str) -> None:
        """Nothing: the part left the device when its block ended."""


class Grouped(Whole):
    """Offload ``group``: one block of a transformer or text encoder, or one layer of a VAE, at a time.

    Own units instead of diffusers' group offloading, which copies each block back from the device: half the traffic,
    and host weights that no device can damage. An image encoder is held whole: its attention pooling reads packed
    weights that the hooks of its layers do not see.
    """

    mode = "group"
    whole = ("image_encoder",)

    @contextmanager
    def hold(self, part: str, activation_bytes: int = 0, progress: Any = None) -> Iterator[nn.Module]:
        """The part with its hooks on; its weights come and go by themselves."""
        if part in self.whole or self.device.type == HOST.type:
            with PerStage(self.parts, self.device, self.make_room, self.memory_stats).hold(
                part, activation_bytes, progress
            ) as module:
                yield module
            return
        module = self.parts.read(part, progress)
        if self.make_room is not None:
            self.make_room(activation_bytes)
        units = taken_over(module, self.device, self.by_block(part))
        if units is None:
            move(module, HOST, part, progress)
            units = self.units_for(part, module, progress)
        units.progress = progress or Silent()
        try:
            yield module
        finally:
            units.home()

    def units_for(self, part: str, module: nn.Module, progress: Any = None) -> Units:
        """New units on ``module``, which is on the host."""
        pinned = part in self.pinned
        return Units(
            module, self.device, self.by_block(part), self.memory_stats, part=part, pinned=pinned, progress=progress
        )

    def by_block(self, part: str) -> bool:
        """Whether the blocks of ``part`` move whole."""
        return part in ("transformer", "unet") or part.startswith("text_encoder")

    def release(self, part: str) -> None:
        """Take the hooks off."""
        if part not in self.parts:
            return
        units = units_on(self.parts.read(part))
        if units is not None:
            units.remove()
        empty_cache(self.device)


class Sequential(Grouped):
    """Offload ``sequential``: each layer comes for its own forward only."""

    mode = "sequential"

    def by_block(self, part: str) -> bool:
        """Never."""
        return False


def taken_over(module: nn.Module, device: torch.device, by_block: bool) -> Units | None:
    """The units that ``module`` has on, where they are of this kind; others, of another pipeline too, are taken off."""
    units = units_on(module)
    if units is None or (units.device == device and units.by_block == by_block):
        return units
    units.remove()
    return None


MODES: dict[str, type[Whole]] = {"none": Whole, "model": PerStage, "group": Grouped, "sequential": Sequential}


def offloader_for(
    choice: str,
    parts: ReadsParts,
    device: torch.device,
    part_bytes: Mapping[str, int],
    free: int | None = None,
    make_room: Callable[[int], None] | None = None,
    hosted: Callable[..., Any] | None = None,
    terms: Terms | None = None,
) -> tuple[Any, Decision]:
    """The offloader for an offload choice, and the decision for it.

    Args:
        choice: one of :data:`CHOICES`.
        part_bytes: bytes of each part in the dtype it will have on the device.
        free: bytes free on the device; None when the backend does not tell.
        hosted: makes the host's own offloader of (parts, device, terms), which ``auto`` then means.
        terms: what else the user asks.

    Raises:
        InputError: unknown choice. UnsupportedError: offload asked for where the host is the device, or the host's
            where there is none.
    """
    if choice not in CHOICES:
        raise InputError(f"offload {choice!r}", expected=f"one of {', '.join(CHOICES)}", fix="Choose one of these.")
    if hosted is not None and choice in (AUTO, HOSTED):
        return _decided(hosted(parts, device, terms), choice, COSTS[HOSTED])
    if choice == HOSTED:
        raise UnsupportedError(
            f"offload {choice!r} outside ComfyUI",
            expected=f"one of {', '.join(mode for mode in CHOICES if mode != HOSTED)}",
            fix="Choose auto.",
        )
    if refusal := lacking(choice, device):
        raise UnsupportedError(
            f"offload {choice!r} {refusal}",
            expected="auto or none",
            fix="Choose auto: there is no second memory to offload to.",
        )
    from .planned import Planned  # which builds on this module

    terms = terms or Terms()
    free = None if free is None else max(0, free - terms.keep_free)
    mode, why = (choice, COSTS[choice]) if choice != AUTO else _automatic(device, part_bytes, free)
    planned = Planned(
        parts,
        indexed(device),
        mode,
        make_room,
        devices={part: indexed(place) for part, place in terms.devices.items()},
        automatic=choice == AUTO,
        keep_free=terms.keep_free,
        memory_stats=MemoryStats(terms.state),
        host=terms.host,
    )
    return _decided(planned, choice, why)


def lacking(choice: str, device: torch.device) -> str:
    """Why an offload mode cannot be on ``device``; empty where it can, or where a host's own manager stands in."""
    return "on a CPU" if device.type == HOST.type and choice not in (AUTO, "none", HOSTED) else ""


def _decided(offloader: Any, choice: str, why: str) -> tuple[Any, Decision]:
    return offloader, Decision("offload", offloader.placed, why, AUTO if choice == AUTO else CHOSEN)


@contextmanager
def own_tensors(module: nn.Module) -> Iterator[None]:
    """``module`` with its own parameters and buffers readable; ``sequential`` takes them away between forwards.

    Source: diffusers ``apply_forward_hook`` does the first half of it around a VAE's ``encode`` and ``decode``.
    """
    hook, unit = getattr(module, "_hf_hook", None), unit_of(module)
    if unit is not None:
        unit.bring()
        try:
            yield
        finally:
            unit.leave()
        return
    if hook is None:
        yield
        return
    hook.pre_forward(module)
    try:
        yield
    finally:
        hook.post_forward(module, None)


@contextmanager
def weights_on(leaf: nn.Module, like: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
    """Weight and bias of ``leaf`` on the device and in the dtype of ``like``, from whoever holds them.

    A leaf with a method ``lend(like)``, a context manager over the same pair, is asked first: that is how a host
    streams weights. Then come the unit that the leaf belongs to, accelerate's and diffusers' hooks on the leaf itself,
    then its own tensors.

    Raises:
        UnsupportedError: nobody brings the weight to the device of ``like``.
    """
    weights_on = getattr(leaf, "weights_on", None)
    if weights_on is not None:
        with weights_on(like) as provided:
            yield provided
        return
    unit = unit_of(leaf)
    if unit is not None:
        unit.bring()
        try:
            brought: Any = leaf.weight
            offset: Any = getattr(leaf, "bias", None)
            yield brought.to(like.dtype), None if offset is None else offset.to(like.dtype)
        finally:
            unit.leave()
        return
    away, hook = leaf.weight.device != like.device, getattr(leaf, "_hf_hook", None)
    group = getattr(getattr(leaf, "_diffusers_hook", None), "hooks", {}).get("group_offloading")
    try:
        if away and hook is not None:
            hook.pre_forward(leaf)
        elif away and group is not None:
            group.group.onload_()
        if leaf.weight.device != like.device:
            raise misplaced(leaf, like)
        weight: Any = leaf.weight
        bias = getattr(leaf, "bias", None)
        yield weight.to(like.dtype), None if bias is None else bias.to(like.dtype)
    finally:
        if away and hook is not None:
            hook.post_forward(leaf, None)
        elif away and group is not None:
            group.group.offload_()


def misplaced(leaf: nn.Module, x: torch.Tensor) -> UnsupportedError:
    """The error for an input that is not where the weight of ``leaf`` is."""
    return UnsupportedError(
        f"the input of {leaf} is on {x.device} and its weight on {leaf.weight.device}",
        expected="both on the device that computes",
        fix="Run the part while its residency holds it, and move its inputs to the residency's device.",
    )


def move(
    module: nn.Module,
    device: torch.device,
    label: str,
    progress: Any = None,
    memory_stats: MemoryStats | None = None,
    keep: bool = False,
) -> None:
    """Move ``module`` to ``device``, tensor by tensor, reporting bytes and obeying a cancel, of a large one by slices.

    A cancel or a failure on the way puts everything back, so that no module is left half moved. Masters that were kept
    are not copied back: they take the place of their copies again.

    Args:
        keep: whether all host weights stay in host memory; those that are views of their file do in any case.
    """
    away = [tensor for tensor in _tensors(module) if tensor.device != device]
    if not away:
        return
    origins, kept = [(tensor, tensor.data) for tensor in away], dict(module.__dict__.get(KEPT, {}))
    total, done, copied = sum(tensor.numel() * tensor.element_size() for tensor in away), 0, 0
    check = None if progress is None else progress.check
    home = device.type == HOST.type
    way = _carried_home(module, away, check) if home else _carried_out(module, away, device, check, keep)
    started = time.perf_counter()
    try:
        with torch.inference_mode(False), torch.no_grad():
            for tensor, data, is_copy in way:
                size = tensor.numel() * tensor.element_size()
                done, copied = done + size, copied + size * is_copy
                tensor.data = data
                if progress is not None:
                    progress.step(done, total, f"moving {label} {amount(done, total)}")
                    progress.check()
    except BaseException:
        with torch.inference_mode(False), torch.no_grad():
            for tensor, data in origins:
                tensor.data = data
        module.__dict__[KEPT] = kept
        raise
    if memory_stats is not None:
        memory_stats.add(copied, time.perf_counter() - started)


def _carried_out(
    module: nn.Module,
    away: list[torch.Tensor],
    device: torch.device,
    check: Callable[[], None] | None,
    keep: bool,
) -> Iterator[tuple[torch.Tensor, torch.Tensor, bool]]:
    """Each tensor with its copy on ``device``."""
    views, kept = views_of(module), module.__dict__.setdefault(KEPT, {})

    def sent(source: torch.Tensor) -> torch.Tensor:
        return arrived(source, device, check, staged=views.staged and views.holds(source))

    for index, there in sent_together([tensor.data for tensor in away], sent):
        tensor = away[index]
        kept.pop(id(tensor), None)
        is_view = views.holds(tensor)
        if keep or is_view:
            kept[id(tensor)] = tensor, tensor.data
        if is_view and not keep:
            let_go(tensor.data)
        yield tensor, there, True


def _carried_home(
    module: nn.Module, away: list[torch.Tensor], check: Callable[[], None] | None
) -> Iterator[tuple[torch.Tensor, torch.Tensor, bool]]:
    """Each tensor with its data in host memory, the host weight that was kept or a copy, and whether it is a copy."""
    kept = module.__dict__.get(KEPT, {})
    kinds = {(tensor.device, tensor.dtype) for tensor in away if id(tensor) not in kept}
    ways = {kind: transfer_for(*kind) for kind in kinds}  # weights that come back damaged would go out again so
    for tensor in away:
        if check is not None:
            check()
        host_weight = kept.pop(id(tensor), None)
        if host_weight is not None:
            yield tensor, host_weight[1], False
        else:
            yield tensor, ways[tensor.device, tensor.dtype].copied(tensor.data), True


def _tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    """Each parameter and buffer once, those in no state dict (rotary tables) too."""
    yield from module.parameters()
    yield from module.buffers()


def on_device(module: nn.Module, device: torch.device) -> bool:
    """Whether any tensor of ``module`` is on ``device``."""
    return any(tensor.device == device for tensor in _tensors(module))


def _unhooked(module: nn.Module) -> None:
    """Take off the units that another mode or another pipeline left on ``module``."""
    units = units_on(module)
    if units is not None:
        units.remove()


def _automatic(device: torch.device, part_bytes: Mapping[str, int], free: int | None) -> tuple[str, str]:
    if device.type == HOST.type:
        return "none", "the device is the host, so there is nothing to offload to"
    if free is None:
        return "model", "this device does not tell its free memory, so one part at a time"
    large = [size for name, size in part_bytes.items() if not name.startswith("text_encoder")]
    spare, text = 0.75 * free, max((s for n, s in part_bytes.items() if n.startswith("text_encoder")), default=0)
    have = f"{free / GIBIBYTE:.1f} GB free"
    if max(sum(large), text) < spare:
        return "none", f"{sum(large) / GIBIBYTE:.1f} GB of weights fit into {have}"
    largest = max([*large, text], default=0)
    if largest < spare:
        return "model", f"the largest part, {largest / GIBIBYTE:.1f} GB, fits into {have}"
    return "group", f"the largest part, {largest / GIBIBYTE:.1f} GB, does not fit into {have}"
