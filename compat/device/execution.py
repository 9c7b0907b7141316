"""The device on which a pipeline's inputs and generator must be, and exact copies to it and back: under offload a
module's own device says nothing. Floats of 16 bits travel as integers, since some stacks damage them, one only in
copies above 10 MB; every value that leaves a device passes :func:`to_host`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from ..errors import InputError
from ..output_check import InvalidOutputError, Validator
from .facts import HELD, default_device, device_count, value_or
from .failures import is_shortage

HOST = torch.device("cpu")
BITS = torch.int16
HALVES = (torch.bfloat16, torch.float16)  # which travel as integers
COMPILED = "_anygpu_compiled"  # on a module whose inside is one graph: hooks belong around it
_holding = threading.Lock()


@contextmanager
def held(owner: Any, name: str, value: bool) -> Iterator[None]:
    """Hold torch's switch ``owner.name`` at ``value``; threads share it: the first block sets, the last restores."""
    key = id(owner), name
    with _holding:
        count, before = HELD.get(key, (0, False))
        if not count:
            before = bool(getattr(owner, name))
            setattr(owner, name, value)
        HELD[key] = count + 1, before
    try:
        yield
    finally:
        with _holding:
            count, before = HELD.pop(key)
            if count > 1:
                HELD[key] = count - 1, before
            else:
                with suppress(Exception):  # somebody has locked torch's flags meanwhile
                    setattr(owner, name, before)


@contextmanager
def current(device: torch.device) -> Iterator[None]:
    """For the block, make ``device`` torch's current one of several, on which streams and ComfyUI's weights wait."""
    several = device.index is not None and device_count() > 1
    with ExitStack() as stack:
        if several and default_device().type == device.type:
            value_or(lambda: stack.enter_context(torch.accelerator.device_index(device.index)), None)
        yield


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` in host memory, detached, in its own dtype, bit for bit."""
    tensor = tensor.detach()
    return tensor if tensor.device.type == HOST.type else carried(tensor, lambda bits: bits.to(HOST))


def picture_of(values: torch.Tensor) -> Any:
    """A PIL image of ``values`` (H, W, 3) in 0..1, from any device."""
    from PIL import Image

    return Image.fromarray((to_host(values).clamp(0, 1) * 255).round().to(torch.uint8).numpy())


def carried(tensor: torch.Tensor, copy: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """The result of ``copy``, which takes a tensor to another device and is given integers for 16-bit floats.
    Tensor subclasses, and what a backend cannot relabel or copy as integers, are copied as they are."""
    if tensor.dtype in HALVES and type(tensor) in (torch.Tensor, nn.Parameter):
        try:
            return copy(tensor.view(BITS)).view(tensor.dtype)
        except RuntimeError as error:
            if is_shortage(error):
                raise
    return copy(tensor)


def placed(value: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """``value`` with the tensors in it (dict, list, tuple) on ``device``; floats become ``dtype`` before they leave."""
    if isinstance(value, torch.Tensor):
        cast = value.to(dtype) if dtype is not None and value.is_floating_point() else value
        return cast if cast.device == device else carried(cast, lambda bits: bits.to(device))
    if isinstance(value, Mapping):
        return {key: placed(item, device, dtype) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(placed(item, device, dtype) for item in value)
    return value


def add_hook(module: nn.Module, hook: Callable[..., Any], before: bool = False, **options: bool) -> RemovableHandle:
    """Register a hook after ``module``'s forward, or ``before`` it; if registering raises, remove what it added."""
    hooks = module._forward_pre_hooks if before else module._forward_hooks
    known = set(hooks)
    try:
        return (module.register_forward_pre_hook if before else module.register_forward_hook)(hook, **options)
    except BaseException:
        for key in hooks.keys() - known:
            del hooks[key]
        raise


@contextmanager
def inputs_placed(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Bring the inputs of ``module`` to ``device`` in each call, for libraries that would copy them plainly."""

    def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return placed(args, device), placed(kwargs, device)

    with add_hook(module, before, before=True, with_kwargs=True):
        yield


def generator_for(seed: int, state: bytes | None = None) -> torch.Generator:
    """A CPU generator, so that ``seed`` draws the same noise everywhere, or goes on from ``state``."""
    if not -(2**63) <= seed < 2**64:
        raise InputError(f"seed {seed}", expected="0 to 2**64 - 1", fix="Choose a smaller one.")
    generator = torch.Generator(device="cpu").manual_seed(seed)
    if state is not None:
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8).clone())
    return generator


def state_of(generator: torch.Generator) -> bytes:
    """The state of ``generator``, as :func:`generator_for` takes it."""
    return bytes(generator.get_state().numpy().tobytes())


class Checked(TorchFunctionMode):
    """Calls ``called()`` before each torch operation of the block, so that a cancel is obeyed in long plain code.
    A microsecond or two each; not for networks, whose compiled blocks are traced."""

    def __init__(self, called: Callable[[], Any]) -> None:
        super().__init__()
        self.called = called

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.called()
        return function(*args, **(kwargs or {}))


class DrawnOnHost(TorchFunctionMode):
    """Draws ``torch.randn`` without a generator from a CPU generator in ``state``: the same noise on every device."""

    def __init__(self, state: bytes) -> None:
        super().__init__()
        self.generator = generator_for(0, state)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is not torch.randn or kwargs.get("generator") is not None:
            return function(*args, **kwargs)
        here = {**kwargs, "generator": self.generator, "device": "cpu", "dtype": None}
        return torch.randn(*args, **here).to(kwargs.get("device"), kwargs.get("dtype"))


@contextmanager
def checked_layers(module: nn.Module, called: Any) -> Iterator[None]:
    """Call ``called()`` before each layer of ``module`` runs, so that a cancel is obeyed inside a long forward.
    A compiled block is one layer. Hooks survive accelerate's and diffusers' re-wrapping of ``forward``."""
    with ExitStack() as stack:
        for layer in dict.fromkeys(_layers(module)):
            stack.enter_context(add_hook(layer, partial(check_before, called), before=True))
        yield


def check_before(called: Callable[[], Any], _module: nn.Module, _inputs: Any) -> None:
    """The hook of :func:`checked_layers`, which changes nothing about its layer."""
    called()


@contextmanager
def checked_parts(coder: nn.Module, validate: Validator) -> Iterator[None]:
    """Check each output of ``coder``, a VAE's encoder or decoder: a tile, a chunk of frames, or the whole.
    Raises InvalidOutputError in the block after the first part with a fault, so that no further part is computed."""

    def check(_module: nn.Module, _inputs: Any, output: Any) -> None:
        fault = validate(output[0] if isinstance(output, tuple) else output)
        if fault:
            raise InvalidOutputError(fault)

    with add_hook(coder, check):
        yield


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """The modules in ``module``, or itself, that have no children; a compiled one is not looked into."""
    children = list(module.children())
    if not children or hasattr(module, COMPILED):
        yield module
        return
    for child in children:
        yield from _layers(child)


def hooked_device(module: nn.Module) -> torch.device | None:
    """The execution device set by hooks (ours, accelerate's, diffusers') on ``module`` or inside it; None if none."""
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


def bf16_bits_to_fp32(tensor: torch.Tensor) -> torch.Tensor:
    """A bf16 tensor as fp32 where it is, by integers alone: exact on a device whose own cast is broken."""
    return tensor.view(BITS).to(torch.int32).bitwise_left_shift_(16).view(torch.float32)
