"""Swapping the 3-D convolutions of a loaded part for exact replacements, and back.

    swapped = swap_conv3d(vae, choose={"conv3d": {"bf16": False}})   # or a Form, or a function of a Layer
    ...                                                              # attach the offloader, encode, decode, detach it
    swapped.restore()

The objects stay what and where they are: only their class changes, to a subclass with another forward. Parameters,
state-dict keys and every reference to them hold, so whatever moves, streams, casts or adapts the layer goes on to.
"""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..device.execution import HOST, placed, to_host
from ..errors import UnsupportedError
from .conv3d_choice import Chooser, Conv3dChoice, Conv3dLayer, always, choose_by, tolerance
from .conv3d_forms import Conv3dForm
from .conv3d_layers import SwappedConv3d, SwappedModule, geometry_of, swap_of, swapped_class

logger = logging.getLogger(__name__)
ADDED = ("conv3d_choice", "conv3d_told")  # attributes that a swapped layer has besides its own


@dataclass
class Swapped:
    """What was swapped in one part, and the way back.

    ``choices`` is the form of each swapped layer by its name; ``left`` is why a layer stayed what it was.
    """

    choices: dict[str, Conv3dChoice] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    _swapped: list[tuple[nn.Module, type[nn.Module]]] = field(default_factory=list, repr=False)

    def __str__(self) -> str:
        counts: dict[tuple[str, str], int] = {}
        for choice in self.choices.values():
            row = (choice.form.value, choice.why)
            counts[row] = counts.get(row, 0) + 1
        lines = [f"{count} as {form} ({why})" for (form, why), count in counts.items()]
        lines += [f"{len(self.left)} left as they are"] if self.left else []
        return f"3-D convolutions: {'; '.join(lines) or 'none'}"

    def restore(self) -> None:
        """Every object as it was before; calling it again does nothing. The offloader must be off."""
        for module, _ in self._swapped:
            _check_free(module, type(module).__name__)
        for module, original in reversed(self._swapped):
            _set_class(module, original)
            for name in ADDED:
                module.__dict__.pop(name, None)
        self._swapped.clear()


@dataclass(frozen=True)
class SwapUnit:
    """What is swapped and compared as one: a lone convolution, or a known wrapper with those inside it."""

    name: str
    owner: nn.Module
    leaves: Mapping[str, nn.Conv3d]
    inputs: tuple[nn.Conv3d, ...]
    """The convolutions that the inputs of ``owner`` go into, one by one."""


def swap_conv3d(
    root: nn.Module,
    choose: Conv3dForm | Mapping[str, Any] | Chooser,
    report: Callable[[str], None] | None = None,
) -> Swapped:
    """Swap the 3-D convolutions of ``root`` for the forms that ``choose`` names; each is compared with its original.

    Call it when the weights are loaded and before an offloader or ``torch.compile`` takes the part.

    Args:
        root: a VAE, a transformer, or one layer.
        choose: one form for all layers it covers; facts about the device, as :func:`choose_by` takes them; or a
            function from :class:`Conv3dLayer` to a :class:`Conv3dChoice`, or None to leave the layer alone.
        report: given one line about the whole, and one for each layer that failed its comparison.

    Raises:
        UnsupportedError: the part is swapped already, has no weights yet, or has an offloader's hooks on.
    """
    choose = choose_by(choose) if isinstance(choose, Mapping) else choose
    chooser = always(choose) if isinstance(choose, Conv3dForm) else choose
    _check_ready(root)
    done = Swapped()
    for unit in _units(root, done.left):
        chosen = {name: chooser(layer_of(name, leaf)) for name, leaf in unit.leaves.items()}
        todo = {name: choice for name, choice in chosen.items() if choice is not None}
        done.left |= dict.fromkeys(chosen.keys() - todo.keys(), "not chosen")
        if not todo:
            continue
        plans: dict[nn.Module, Conv3dChoice] = {unit.leaves[name]: choice for name, choice in todo.items()}
        fault = _fault(unit, plans)
        if fault:
            line = f"3-D convolution {unit.name or type(unit.owner).__name__!r} stays as it is: {fault}"
            logger.warning(line)
            if report is not None:
                report(line)
            done.left |= dict.fromkeys(todo, fault)
            continue
        done.choices |= todo
        for module in dict.fromkeys((*plans, unit.owner)):
            if module in plans:
                module.conv3d_choice = plans[module]  # type: ignore[assignment]
            done._swapped.append((module, type(module)))
            _set_class(module, swapped_class(type(module)))
    if report is not None:
        report(str(done))
    return done


def layer_of(name: str, leaf: nn.Conv3d, dtype: torch.dtype | None = None) -> Conv3dLayer:
    """``leaf`` as plain values, by its name.

    Args:
        dtype: in which it is computed; None for that of its weight.
    """
    kernel: Any = leaf.kernel_size
    return Conv3dLayer(
        name=name,
        in_channels=leaf.in_channels,
        out_channels=leaf.out_channels,
        kernel=kernel,
        geometry=geometry_of(leaf),
        dtype=dtype or leaf.weight.dtype,
    )


# Which modules -----------------------------------------------------------------------------------------------------


def _check_ready(root: nn.Module) -> None:
    """Refuse a part to which a swap would come too late or too early."""
    for name, module in root.named_modules():
        label = f"{type(root).__name__} {name}".rstrip()
        _check_free(module, label)
        if isinstance(module, SwappedModule):
            raise UnsupportedError(
                f"{label} is swapped already",
                expected="a part as it was loaded",
                fix="Call restore() on that swap first.",
            )
        if isinstance(module, nn.Conv3d) and module.weight.device.type == "meta":
            raise UnsupportedError(
                f"{label} has its weights on meta", expected="a loaded part", fix="Load the weights before the swap."
            )


def _check_free(module: nn.Module, label: str) -> None:
    """Refuse a module whose forward an offloader has wrapped: it would go on calling the one it wrapped."""
    if hasattr(module, "_hf_hook") or "group_offloading" in getattr(_registry(module), "hooks", ()):
        raise UnsupportedError(
            f"{label} has the hooks of an offloader on it",
            expected="a part that no offloader holds",
            fix="Take the offloader off, swap or restore, and put it back.",
        )


def _units(root: nn.Module, left: dict[str, str]) -> Iterator[SwapUnit]:
    """The units in ``root``; ``left`` is given the layers that cannot be swapped."""
    taken: set[nn.Module] = set()
    for name, module in root.named_modules():
        rewrite = swap_of(module)
        if module in taken or (rewrite is None and not isinstance(module, nn.Conv3d)):
            continue
        reason = _obstacle(module)
        if reason:
            left[name] = reason
        elif rewrite is SwappedConv3d:
            yield SwapUnit(name, module, {name: module}, (module,))  # type: ignore[dict-item, arg-type]
        else:
            inside = {n: m for n, m in module.named_modules(prefix=name) if isinstance(m, nn.Conv3d)}
            taken.update(inside.values())
            obstacles = {key: reason for key, leaf in inside.items() if (reason := _obstacle(leaf))}
            left |= obstacles
            # An adapter wraps the convolution that it adapts.
            outer = [getattr(child, "base_layer", child) for child in module.children()]
            leaves = {key: leaf for key, leaf in inside.items() if key not in obstacles}
            yield SwapUnit(name, module, leaves, tuple(leaf for leaf in outer if isinstance(leaf, nn.Conv3d)))


def _obstacle(module: nn.Module) -> str:
    """Why this module cannot be swapped; empty if it can."""
    if swap_of(module) is None:
        return f"of class {type(module).__qualname__}, which may do its own padding"
    if isinstance(module, nn.Conv3d) and type(module.weight.data) is not Tensor:
        return f"quantised, as {type(module.weight.data).__name__}"
    if "forward" in module.__dict__ and not list(_kept_forwards(module)):
        return "its forward has been replaced"
    return ""


# Changing the class ------------------------------------------------------------------------------------------------


def _set_class(module: nn.Module, cls: type[nn.Module]) -> None:
    """Give ``module`` another class, also where something keeps the forward of the one it had."""
    for keep in list(_kept_forwards(module)):
        keep(types.MethodType(cls.forward, module))
    module.__class__ = cls


def _kept_forwards(module: nn.Module) -> Iterator[Callable[[Any], None]]:
    """Setters for the places that hold the forward of the class of ``module``.

    accelerate leaves it on the module when its hooks go; diffusers' hooks, such as those that store weights in fp8,
    keep it for themselves.
    """

    def is_own(forward: Any) -> bool:
        function = getattr(forward, "__func__", None)
        return getattr(forward, "__self__", None) is module and function is type(module).forward

    if is_own(module.__dict__.get("forward")):
        yield functools.partial(module.__dict__.__setitem__, "forward")
    for reference in getattr(_registry(module), "_fn_refs", ()):
        for name in ("forward", "original_forward"):
            if is_own(getattr(reference, name)):
                yield functools.partial(setattr, reference, name)


def _registry(module: nn.Module) -> Any:
    return module.__dict__.get("_diffusers_hook")


# Comparing ---------------------------------------------------------------------------------------------------------


def _fault(unit: SwapUnit, plans: Mapping[nn.Module, Conv3dChoice]) -> str:
    """Why the swapped unit is not the same function on a small random input; empty if it is.

    Twins compute: the original on the CPU, which has every convolution, the swapped one where the weights are.
    """
    first = next(iter(unit.leaves.values())).weight
    dtype = torch.float32 if first.dtype.itemsize == 1 else first.dtype
    generator, inputs = torch.Generator().manual_seed(0), []
    for leaf in unit.inputs:
        rows = zip(leaf.kernel_size, leaf.dilation, leaf.stride, strict=True)
        size = [(taps - 1) * gap + 1 + step for taps, gap, step in rows]
        inputs.append(torch.randn(1, leaf.in_channels, *size, generator=generator).to(dtype))
    with torch.inference_mode(False), torch.no_grad():
        expected = _tensors(_clone_on(unit.owner, {}, HOST, dtype)(*inputs))
        try:
            results = _tensors(_clone_on(unit.owner, plans, first.device, dtype)(*placed(inputs, first.device)))
        except (RuntimeError, ValueError) as error:
            return f"its replacement failed: {str(error).splitlines()[0]}"
        terms = max(leaf.weight[0].numel() for leaf in unit.leaves.values())
        return next((fault for pair in zip(expected, results, strict=True) if (fault := _mismatch(*pair, terms))), "")


def _mismatch(expected: Tensor, result: Tensor, terms: int) -> str:
    if expected.shape != result.shape or expected.dtype != result.dtype:
        return f"its replacement gave {tuple(result.shape)} {result.dtype} for {tuple(expected.shape)} {expected.dtype}"
    largest = expected.double().abs().max().clamp_min(torch.finfo(torch.float32).tiny)
    error = float((to_host(result).double() - expected.double()).abs().max() / largest)
    bound = tolerance(expected.dtype, terms, result.device)
    return "" if error <= bound else f"its replacement differs by {error:.1e} of the largest value, {bound:.1e} allowed"


def _clone_on(
    module: nn.Module, plans: Mapping[nn.Module, Conv3dChoice], device: torch.device, dtype: torch.dtype
) -> Any:
    """``module`` without its hooks, swapped if there are ``plans``; tensors are shared where nothing has to change."""
    cls, wrapper = type(module), swap_of(module) not in (None, SwappedConv3d)
    clone: Any = cls.__new__(swapped_class(cls) if module in plans or (plans and wrapper) else cls)
    nn.Module.__init__(clone)
    own = {*clone.__dict__, "forward", "_diffusers_hook"}
    clone.__dict__.update({name: value for name, value in module.__dict__.items() if name not in own})
    for name, value in module._parameters.items():
        copied = None if value is None else nn.Parameter(placed(value.detach(), device, dtype), requires_grad=False)
        clone.register_parameter(name, copied)
    for name, buffer in module.named_buffers(recurse=False):
        clone.register_buffer(name, placed(buffer, device))
    for name, child in module.named_children():
        clone.add_module(name, _clone_on(child, plans, device, dtype))
    if module in plans:
        clone.conv3d_choice = plans[module]
    return clone


def _tensors(result: Any) -> list[Tensor]:
    values: Iterable[Any] = [result] if isinstance(result, Tensor) else result
    return [value for value in values if isinstance(value, Tensor)]
