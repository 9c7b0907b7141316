"""Who holds the parts of a pipeline on the device that computes, and when they leave it again.

The one order of operations, of which residency is the last step: load, storage dtype and quantisation, LoRA, Conv3d
and precision rewrites, kernel rewrites, attention and cache configuration, compile of repeated blocks, residency.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from .device import GIBIBYTE, empty_cache
from .errors import InputError, UnsupportedError
from .execution import HOST
from .transfer import transfer_for

CHOICES = ("auto", "none", "model", "group", "sequential")
GIGABYTE, MEGABYTE = 1e9, 1e6

COSTS: dict[str, str] = {
    "none": "every part stays on the device after its first use: fastest, needs room for transformer and VAE together",
    "model": "one part at a time is on the device: needs room for the largest part, costs a copy of it per stage",
    "group": "one block at a time is on the device: needs little room, copies the whole transformer every step",
    "sequential": "one layer at a time is on the device: needs the least room and is by far the slowest",
}


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
    """

    mode = "none"

    def __init__(self, parts: ReadsParts, device: torch.device, make_room: Callable[[int], None] | None = None) -> None:
        self.parts, self.device, self.make_room = parts, device, make_room

    def __repr__(self) -> str:
        return f"offload {self.mode} on {self.device}"

    @contextmanager
    def hold(self, part: str, activation_bytes: int = 0, progress: Any = None) -> Iterator[nn.Module]:
        """The part on ``device`` for the block, and afterwards until :meth:`release`."""
        module = self.parts.read(part, progress)
        self._ask_for_room(module, activation_bytes)
        move(module, self.device, part, progress)
        yield module

    def release(self, part: str) -> None:
        """Back to host memory; where the device is the host, out of memory altogether."""
        if part not in self.parts:
            return
        if self.device.type == HOST.type:
            self.parts.drop(part)
            return
        move(self.parts.read(part), HOST, part, None)
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
        self._ask_for_room(module, activation_bytes)
        masters = [(tensor, tensor.data) for tensor in _tensors(module)]
        try:
            move(module, self.device, part, progress)
            yield module
        finally:
            with torch.inference_mode(False), torch.no_grad():
                for tensor, master in masters:
                    tensor.data = master
            empty_cache(self.device)

    def release(self, part: str) -> None:
        """Nothing: the part left the device when its block ended."""


class Grouped(PerStage):
    """Offload ``group``: diffusers' group offloading, by block for transformers and by leaf for the rest.

    An image encoder is held whole instead: its attention pooling reads packed weights that the leaf hooks do not see.
    Streams stay off: upstream has returned different pictures with them (huggingface/diffusers#11981).
    """

    mode = "group"

    @contextmanager
    def hold(self, part: str, activation_bytes: int = 0, progress: Any = None) -> Iterator[nn.Module]:
        """The part with its hooks on; its weights come and go by themselves."""
        if part == "image_encoder":
            with PerStage.hold(self, part, activation_bytes, progress) as module:
                yield module
            return
        module = self.parts.read(part, progress)
        if self.make_room is not None:
            self.make_room(activation_bytes)
        if not getattr(module, "_anygpu_grouped", False):
            self._hook(part, module)
            module._anygpu_grouped = True  # type: ignore[assignment]
        yield module

    def _hook(self, part: str, module: nn.Module) -> None:
        from diffusers.hooks import apply_group_offloading

        by_block = part == "transformer"
        with torch.inference_mode(False):
            apply_group_offloading(
                module,
                onload_device=self.device,
                offload_device=HOST,
                offload_type="block_level" if by_block else "leaf_level",
                num_blocks_per_group=1 if by_block else None,
            )


class Sequential(Whole):
    """Offload ``sequential``: accelerate's hooks bring each layer in for its own forward only."""

    mode = "sequential"

    @contextmanager
    def hold(self, part: str, activation_bytes: int = 0, progress: Any = None) -> Iterator[nn.Module]:
        """The part with its hooks on; its weights come and go by themselves."""
        if part == "image_encoder":
            with PerStage(self.parts, self.device, self.make_room).hold(part, activation_bytes, progress) as module:
                yield module
            return
        module = self.parts.read(part, progress)
        if self.make_room is not None:
            self.make_room(activation_bytes)
        if not hasattr(module, "_hf_hook"):
            from accelerate import cpu_offload

            with torch.inference_mode(False):
                cpu_offload(module, execution_device=self.device, offload_buffers=True)
        try:
            yield module
        finally:
            # A VAE's decode runs the hook that brings its own buffers in, but never the one that sends them back;
            # a cancel leaves a layer in the same state.
            for owner in module.modules():
                hook = getattr(owner, "_hf_hook", None)
                if hook is not None and any(t.device == self.device for t in _direct(owner)):
                    hook.post_forward(owner, None)

    def release(self, part: str) -> None:
        """Take the hooks off: accelerate keeps buffers that are in no state dict on the device until then."""
        if part not in self.parts:
            return
        from accelerate.hooks import remove_hook_from_module

        module = self.parts.read(part)
        with torch.inference_mode(False):
            remove_hook_from_module(module, recurse=True)
        move(module, HOST, part, None)
        empty_cache(self.device)


MODES: dict[str, type[Whole]] = {"none": Whole, "model": PerStage, "group": Grouped, "sequential": Sequential}


def residency_for(
    choice: str,
    parts: ReadsParts,
    device: torch.device,
    part_bytes: Mapping[str, int],
    free: int | None = None,
    make_room: Callable[[int], None] | None = None,
) -> tuple[Whole, str]:
    """The residency for an offload choice, and the reason in one sentence.

    Args:
        choice: one of :data:`CHOICES`.
        part_bytes: bytes of each part in the dtype it will have on the device.
        free: bytes free on the device; None when the backend does not tell.

    Raises:
        InputError: unknown choice. UnsupportedError: offload asked for where the host is the device.
    """
    if choice not in CHOICES:
        raise InputError(f"offload {choice!r}", expected=f"one of {', '.join(CHOICES)}", fix="Choose one of these.")
    on_host = device.type == HOST.type
    if on_host and choice not in ("auto", "none"):
        raise UnsupportedError(
            f"offload {choice!r} on a CPU",
            expected="auto or none",
            fix="Choose auto: there is no second memory to offload to.",
        )
    mode, reason = (choice, f"chosen: {COSTS[choice]}") if choice != "auto" else _automatic(on_host, part_bytes, free)
    return MODES[mode](parts, device, make_room), reason


@contextmanager
def own_tensors(module: nn.Module) -> Iterator[None]:
    """``module`` with its own parameters and buffers readable; ``sequential`` takes them away between forwards.

    Source: diffusers ``apply_forward_hook`` does the first half of it around a VAE's ``encode`` and ``decode``.
    """
    hook = getattr(module, "_hf_hook", None)
    if hook is None:
        yield
        return
    hook.pre_forward(module)
    try:
        yield
    finally:
        hook.post_forward(module, None)


@contextmanager
def borrow(leaf: nn.Module, like: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
    """Weight and bias of ``leaf`` on the device and in the dtype of ``like``, from whoever holds them.

    A leaf with a method ``lend(like)``, a context manager over the same pair, is asked first: that is how a host
    streams weights. Then come accelerate's and diffusers' hooks on the leaf itself, then its own tensors.

    Raises:
        UnsupportedError: nobody brings the weight to the device of ``like``.
    """
    lend = getattr(leaf, "lend", None)
    if lend is not None:
        with lend(like) as lent:
            yield lent
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


def move(module: nn.Module, device: torch.device, label: str, progress: Any = None) -> None:
    """Move ``module`` to ``device``, submodule by submodule, reporting bytes and obeying a cancel.

    A cancel or a failure on the way puts everything back, so that no module is left half moved.
    """
    away = [tensor for tensor in _tensors(module) if tensor.device != device]
    if not away:
        return
    origins = [(tensor, tensor.data) for tensor in away]
    total, done = sum(tensor.numel() * tensor.element_size() for tensor in away), 0
    kinds = {(tensor.device, tensor.dtype) for tensor in away} if device.type == HOST.type else set()
    ways = {kind: transfer_for(*kind) for kind in kinds}  # weights that come back damaged would go out again so
    try:
        with torch.inference_mode(False), torch.no_grad():
            for tensor in away:
                size = tensor.numel() * tensor.element_size()
                way = ways.get((tensor.device, tensor.dtype))
                tensor.data = tensor.data.to(device) if way is None else way.copied(tensor.data)
                done += size
                if progress is not None:
                    progress.step(done, total, f"moving {label} {amount(done, total)}")
                    progress.check()
    except BaseException:
        with torch.inference_mode(False), torch.no_grad():
            for tensor, data in origins:
                tensor.data = data
        raise


def amount(done: int, total: int) -> str:
    """Bytes in words, such as ``11.2 of 23.9 GB``."""
    unit, name = (GIGABYTE, "GB") if total >= GIGABYTE else (MEGABYTE, "MB")
    return f"{done / unit:.1f} of {total / unit:.1f} {name}"


def _tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    """Each parameter and buffer once, those in no state dict (rotary tables) too."""
    yield from module.parameters()
    yield from module.buffers()


def _direct(module: nn.Module) -> Iterator[torch.Tensor]:
    """The parameters and buffers of ``module`` that belong to none of its children."""
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)


def _automatic(on_host: bool, part_bytes: Mapping[str, int], free: int | None) -> tuple[str, str]:
    if on_host:
        return "none", "auto: the device is the host, so there is nothing to offload to"
    if free is None:
        return "model", "auto: this device does not tell its free memory, so one part at a time"
    large = [size for name, size in part_bytes.items() if not name.startswith("text_encoder")]
    spare, text = 0.75 * free, max((s for n, s in part_bytes.items() if n.startswith("text_encoder")), default=0)
    have = f"{free / GIBIBYTE:.1f} GB free"
    if max(sum(large), text) < spare:
        return "none", f"auto: {sum(large) / GIBIBYTE:.1f} GB of weights fit into {have}"
    largest = max([*large, text], default=0)
    if largest < spare:
        return "model", f"auto: the largest part, {largest / GIBIBYTE:.1f} GB, fits into {have}"
    return "group", f"auto: the largest part, {largest / GIBIBYTE:.1f} GB, does not fit into {have}"
