"""The device on which a pipeline's inputs and generator must be.

Under offload a module's device is meaningless: accelerate leaves its weights on ``cpu`` or ``meta`` between calls,
and diffusers' group offload leaves them on ``cpu``. What counts is the device on which the next forward will run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from .facts import default_device, device_count, value_or

HOST = torch.device("cpu")
COMPILED = "_anygpu_compiled"  # on a module whose inside is one graph: hooks belong around it


class HasDevice(Protocol):
    """Anything that states the device it executes on, such as an offloader."""

    @property
    def device(self) -> torch.device: ...

    def device_of(self, part: str) -> torch.device: ...


def execution_device(offloader: HasDevice, part: str = "") -> torch.device:
    """The device on which the next forward of a pipeline, or of one ``part`` of it, runs."""
    return offloader.device_of(part) if part else offloader.device


@contextmanager
def current(device: torch.device) -> Iterator[None]:
    """Make ``device`` the current one of several: what names no device, such as a stream that waits, is of that one.

    ComfyUI does so around its own samplers, and has the *current* device wait for weights that it streams.
    """
    several = device.index is not None and device_count() > 1
    with ExitStack() as stack:
        if several and default_device().type == device.type:
            value_or(lambda: stack.enter_context(torch.accelerator.device_index(device.index)), None)
        yield


def generator_for(seed: int, state: bytes | None = None) -> torch.Generator:
    """A CPU generator, so that one seed draws the same noise whatever the device.

    Args:
        seed: 0 to 2**64 - 1.
        state: a generator state as bytes, to go on where an earlier stage stopped.
    """
    generator = torch.Generator(device="cpu").manual_seed(seed)
    if state is not None:
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8).clone())
    return generator


def state_of(generator: torch.Generator) -> bytes:
    """The state of ``generator``, as :func:`generator_for` takes it."""
    return bytes(generator.get_state().numpy().tobytes())


class Checked(TorchFunctionMode):
    """Calls ``called()`` before each torch operation of the block, so that a cancel is obeyed in long plain code.

    A microsecond or two each; not for networks, whose operations are many and whose compiled blocks are traced.
    """

    def __init__(self, called: Callable[[], Any]) -> None:
        super().__init__()
        self.called = called

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What the operation returns."""
        self.called()
        return function(*args, **(kwargs or {}))


@contextmanager
def checked_leaves(module: nn.Module, called: Any) -> Iterator[None]:
    """Call ``called()`` before each leaf module of ``module`` runs, so that a cancel is obeyed inside a long forward.

    A compiled block is one leaf: what a hook does inside of it would be part of its graph.
    Hooks, not patched forwards: they survive accelerate's and diffusers' own re-wrapping of ``forward``.
    """

    def before(_module: nn.Module, _inputs: Any) -> None:
        called()

    handles = [leaf.register_forward_pre_hook(before) for leaf in dict.fromkeys(_leaves(module))]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _leaves(module: nn.Module) -> Iterator[nn.Module]:
    children = list(module.children())
    if not children or hasattr(module, COMPILED):
        yield module
        return
    for child in children:
        yield from _leaves(child)


def hooked_device(module: nn.Module) -> torch.device | None:
    """Where the hooks on ``module`` or on a module in it, ours, accelerate's or diffusers', run it; None without any.

    Source: accelerate ``AlignDevicesHook``; diffusers ``GroupOffloadingHook``.
    """
    hook = getattr(module, "_hf_hook", None)
    group = module.__dict__.get("_anygpu_group")  # of compat.memory.hooks
    for candidate in (group, hook, *getattr(hook, "hooks", ())):
        device = getattr(candidate, "execution_device", None)
        if device is not None:
            return torch.device(device)
    registry: Any = getattr(module, "_diffusers_hook", None)
    for name in getattr(registry, "_hook_order", ()):
        if name == "group_offloading":
            return torch.device(registry.hooks[name].group.onload_device)
    return next((device for device in map(hooked_device, module.children()) if device is not None), None)
