"""Weights that come to the device for one block or one layer and leave it again, while they stay in host memory.
Nothing is copied back: a group's tensors point at their host weights again. While one group computes, the next ones
come (:mod:`.prefetch`), and what there is room for stays. Hooks survive what others wrap around ``forward``."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from ..device.execution import check_before, placed
from ..device.failures import DEVICE_ERRORS, is_shortage
from ..errors import UnsupportedError
from .offloader import pin, views_of
from .parts import ProgressStage, Silent
from .prefetch import CopyStream, GroupLayout, is_dense
from .statistics import MemoryStats, amount
from .transfer import copy_to_device, put_back, send_together, set_data, tensors_of, transfer_for

GROUP = "_anygpu_group"  # on each module whose own tensors come and go: their group
HOOKS = "_anygpu_group_hooks"  # on a part that has hooks on
REPORT_SECONDS = 1.0  # between two progress reports on bytes: a quicker step has a bar of its own


class WeightGroup:
    """Tensors of a block or a layer that come and go together; their data are the host weights."""

    def __init__(self, tensors: list[torch.Tensor], hooks: GroupHooks) -> None:
        self.host_weights = [(tensor, tensor.data) for tensor in tensors]
        self.hooks = hooks
        self.total_bytes = sum(data.nbytes for _, data in self.host_weights)
        self.depth = 0
        dense = [data for _, data in self.host_weights if is_dense(data)]
        whole = hooks.copies is not None and len(dense) == len(tensors)
        self.layout = GroupLayout(dense) if whole else None  # else its tensors travel one by one, and are waited for

    @property
    def execution_device(self) -> torch.device:
        """Device on which its layers compute; accelerate's hooks have it under this name."""
        return self.hooks.device

    def onload(self) -> None:
        """Bring the tensors to the device, until :meth:`offload` was called as often; a failure restores them."""
        if self.depth == 0:
            with _outside_modes():
                try:
                    self.hooks.onload(self)
                except BaseException:
                    self.restore()
                    raise
        self.depth += 1

    def offload(self, ahead: bool = True) -> None:
        """End a use; the last makes the tensors their host weights again and, if ``ahead``, starts copying the next."""
        self.depth = max(0, self.depth - 1)
        if self.depth == 0:
            with _outside_modes():
                self.hooks.leave(self, ahead)

    def restore(self) -> None:
        self.depth = 0
        with _outside_modes():
            put_back(self.host_weights)


class GroupHooks:
    """The hooks on one part that bring each group of its weights for the length of a forward, and the next ones ahead.
    ``by_block``: the members of its lists of blocks move whole, else each layer by itself. ``pinned``: host weights
    move into locked memory. ``copies`` goes beside the computation; with None every copy is waited for. ``progress``
    hears of ``part`` and is asked for a cancel before each tensor. ``ahead_bytes`` bounds the groups that come ahead,
    ``room_bytes`` (None: unknown) these and the one in use, besides those that stay: an embedding may be larger than
    the blocks after it."""

    def __init__(
        self, module: nn.Module, device: torch.device, by_block: bool, memory_stats: MemoryStats, *,
        part: str = "part", pinned: bool = False, copies: CopyStream | None = None, progress: Any = None,
    ) -> None:  # fmt: skip
        self.module, self.device, self.by_block, self.memory_stats = module, device, by_block, memory_stats
        self.part, self.progress, self.copies = part, progress or Silent(), copies
        self.groups: list[WeightGroup] = []
        self.ahead_bytes = 0
        self.room_bytes: int | None = None
        self._inner: list[WeightGroup] = []  # those inside lists of blocks
        self._ahead: dict[WeightGroup, tuple[torch.Tensor, torch.Event]] = {}
        self._stays: set[WeightGroup] = set()
        self._resident: dict[WeightGroup, list[torch.Tensor]] = {}  # those that stay and have come, with their copies
        self._next: dict[WeightGroup, WeightGroup] = {}
        self._last: WeightGroup | None = None
        self._missed = False  # whether the last group was not among those that came ahead
        self._views = views_of(module)
        self._exact: set[torch.dtype] = set()  # dtypes of which copies to the device were found exact
        self._came, self._reported = 0, time.monotonic()
        if pinned:
            pin(tensors_of(module))
        self._owners = list(self._form_groups())  # all that takes memory comes before the first hook
        self._next = dict(pairwise(self.groups))
        self.total_bytes = sum(group.total_bytes for group in self.groups)
        try:
            self._attach()
        except BaseException:
            _unhook(module)
            raise

    @property
    def largest_bytes(self) -> int:
        """Bytes of the largest group inside a list of blocks; of all where there is none."""
        return max((group.total_bytes for group in self._inner or self.groups), default=0)

    def onload(self, group: WeightGroup) -> None:
        """Make the tensors of ``group`` their copies on the device, which the computation waits for; note its turn. The
        first group of a run also starts copying the next ones; others do that as they leave."""
        last, self._last = self._last, group
        if last is not None:
            self._next[last] = group
        if group in self._resident:
            there, self._missed = self._resident[group], False
            self._tell(group.total_bytes)  # as if it came: all of the part counts in each forward
        else:
            there = self._fetch(group, first=last is None)
        if group in self._stays:
            self._resident[group] = there
        for (tensor, _), data in zip(group.host_weights, there, strict=True):
            set_data(tensor, data)
        if last is None and group.layout is not None and self.copies is not None:
            self._prefetch(self.copies)

    def _fetch(self, group: WeightGroup, first: bool) -> list[torch.Tensor]:
        """Copies of the group's tensors on the device, in their order: those that came ahead, else copied now.
        ``first``: no group was used since :meth:`offload`."""
        if group.layout is None or self.copies is None:
            sources = [data for _, data in group.host_weights]
            with self.memory_stats.moving(group.total_bytes):
                by_index = dict(send_together(sources, self.send))
            return [by_index[index] for index in range(len(by_index))]
        missed = group not in self._ahead
        if missed:  # two misses in a row: another order than last time, so what came ahead is dropped; one is not
            needed = sum(other.total_bytes for other in (group, *self._ahead) if other not in self._stays)
            if self._missed or (self.room_bytes is not None and needed > self.room_bytes):
                self._ahead.clear()
            self._ahead[group] = self._copy(group, group.layout, self.copies)
        self._missed = missed and not first  # nothing could come ahead of it
        memory, arrived = self._ahead.pop(group)
        with self.memory_stats.waiting(self.device):
            self.copies.wait_for(arrived)
        return [place.within(memory) for place in group.layout.places]

    def keep(self, count: int) -> None:
        """Let groups of ``count`` bytes at most stay on the device once they have come, until :meth:`offload`.
        They are spread evenly over the order of use, so that each copy of the others has as much computing to hide
        behind; a run of those that stay would leave the link idle, and the rest would wait for it."""
        self._stays, share, owed = set(), min(1.0, count / max(1, self.total_bytes)), 0.0
        for group in self.groups:
            owed += share * group.total_bytes
            if group.total_bytes <= owed:
                self._stays.add(group)
                owed -= group.total_bytes
        for group in sorted(self.groups, key=lambda group: -group.total_bytes):  # what is left takes smaller ones
            if group not in self._stays and group.total_bytes <= owed:
                self._stays.add(group)
                owed -= group.total_bytes
        self._resident = {group: there for group, there in self._resident.items() if group in self._stays}

    def leave(self, group: WeightGroup, ahead: bool) -> None:
        """Start copying the next groups, if ``ahead``, while the device still computes; then restore ``group``."""
        if group.layout is None or self.copies is None:
            group.restore()
            return
        try:
            if ahead:
                self._prefetch(self.copies)
        finally:
            group.restore()
            self.copies.leave()

    def _prefetch(self, copies: CopyStream) -> None:
        """Start copying the groups that come next, as many as there is room for; :meth:`give_up` if memory is short."""
        room = self.ahead_bytes
        if self.room_bytes is not None and self._last is not None:
            room = min(room, self.room_bytes - (0 if self._last in self._resident else self._last.total_bytes))
        room -= sum(group.total_bytes for group in self._ahead)
        group = self._next.get(self._last) if self._last is not None else None
        for _ in self.groups:
            if group is None or group is self._last:
                return
            there = group.depth or group in self._ahead or group in self._resident
            if not there and group.layout is not None:
                room -= group.total_bytes
                if room < 0:
                    return
                try:
                    self._ahead[group] = self._copy(group, group.layout, copies)
                except DEVICE_ERRORS as error:
                    if not is_shortage(error):
                        raise
                    self.give_up()  # what computes needs the room
                    return
            group = self._next.get(group)

    def _copy(self, group: WeightGroup, layout: GroupLayout, copies: CopyStream) -> tuple[torch.Tensor, torch.Event]:
        """Start copying a group; returns its memory on the device, and the event of its arrival."""
        for dtype in {weight.dtype for _, weight in group.host_weights}:
            self._require_exact(dtype)
        arriving = copies.bytes_on_device(layout, self.progress.check)
        self.memory_stats.add(group.total_bytes, 0.0)
        self._tell(group.total_bytes)
        return arriving

    def give_up(self) -> str:
        """Keep half as much on the device, or else copy nothing ahead; returns what was done, empty for nothing."""
        self._ahead.clear()
        if kept_bytes := sum(group.total_bytes for group in self._stays):
            self.keep(kept_bytes // 2)
            return "with fewer blocks kept on the device"
        done = "without copying ahead" if self.ahead_bytes else ""
        self.ahead_bytes = 0
        return done

    def _require_exact(self, dtype: torch.dtype) -> None:
        """Raise UnsupportedError for a dtype that copies damage; each dtype is tested once."""
        if dtype not in self._exact:
            transfer_for(self.device, dtype)
            self._exact.add(dtype)

    def send(self, host_weight: torch.Tensor) -> torch.Tensor:
        """A copy of a host weight on the device; a cancel is obeyed before it, and before each slice of a large one."""
        self._require_exact(host_weight.dtype)
        staged = self._views.staged and self._views.holds(host_weight)
        there = copy_to_device(host_weight, self.device, self.progress.check, staged)
        self._tell(host_weight.nbytes)
        return there

    def _tell(self, count: int) -> None:
        """Count ``count`` more bytes as arrived, and report them to the progress once in a while."""
        now = time.monotonic()
        if self._came + count > self.total_bytes:  # the next forward begins
            self._came, self._reported = 0, now
        self._came += count
        if now - self._reported >= REPORT_SECONDS:
            self._reported = now
            text = f"{self.part} {amount(self._came, self.total_bytes)}"
            self.progress.step(self._came, self.total_bytes, ProgressStage("moving", text, True))

    def offload(self) -> None:
        """Make every tensor its host weight, even after a run that was cut short; drop what came ahead or stayed."""
        self._ahead.clear()
        self._resident.clear()
        self._last, self._came = None, 0
        for group in self.groups:
            group.restore()

    def remove(self) -> None:
        self.offload()
        _unhook(self.module)

    def _form_groups(self) -> Iterator[tuple[nn.Module, list[nn.Module], list[WeightGroup]]]:
        """Fill ``groups``; yield each module whose forward brings groups, the modules of their tensors, and the groups.
        The last group has the modules' own tensors, those before it tensors shared with earlier modules."""
        group_of_tensor: dict[int, WeightGroup] = {}
        for owner, members, inside in _groups_in(self.module, self.by_block):
            tensors = {id(tensor): tensor for member in members for tensor in own_tensors_of(member)}
            own = [tensor for key, tensor in tensors.items() if key not in group_of_tensor]
            groups = list(dict.fromkeys(group_of_tensor[key] for key in tensors if key in group_of_tensor))
            if own:
                groups.append(WeightGroup(own, self))
                self.groups.append(groups[-1])
                self._inner += [groups[-1]] if inside else []
                group_of_tensor |= {id(tensor): groups[-1] for tensor in own}
            if groups:  # T5 shares its embedding between two modules: whichever runs brings the group that has it
                yield owner, members, groups

    def _attach(self) -> None:
        for owner, members, groups in self._owners:
            for group in groups:
                owner.register_forward_pre_hook(partial(_pre_forward, group), with_kwargs=True)
                owner.register_forward_hook(partial(_post_forward, group), always_call=True)
            for member in members:
                member.__dict__[GROUP] = groups[-1]  # the one of own tensors, if any, comes last
        self.module.__dict__[HOOKS] = self


@contextmanager
def _outside_modes() -> Iterator[None]:
    """Run the block, which moves weights, without inference mode, gradients, or modes that rewrite torch operations."""
    with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunction():
        yield


def _pre_forward(group: WeightGroup, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Onload the group, and the inputs made on the device of its host weights, such as T5's relative positions."""
    group.onload()
    device = group.execution_device
    if not any(isinstance(x, torch.Tensor) and x.device != device for x in (*args, *kwargs.values())):
        return None

    def here(value: Any) -> Any:
        return placed(value, device) if isinstance(value, torch.Tensor) else value

    return tuple(map(here, args)), {name: here(value) for name, value in kwargs.items()}


def _post_forward(group: WeightGroup, _module: nn.Module, _args: Any, output: Any) -> None:
    group.offload(ahead=output is not None)  # torch gives None after a failure, whose activations are still there


def is_hooked_by_others(layer: nn.Module) -> bool:
    """True if ``layer`` has forward hooks besides those of this pack, which onload its group or obey a cancel."""
    hooks = (*layer._forward_pre_hooks.values(), *layer._forward_hooks.values())
    return not all(_is_ours(hook) or getattr(hook, "func", None) is check_before for hook in hooks)


def _is_ours(hook: Any) -> bool:
    return getattr(hook, "func", None) in (_pre_forward, _post_forward)


def _unhook(module: nn.Module) -> None:
    """Take our hooks, found by their functions, and our attributes off ``module`` and its children; nothing moves."""
    for member in module.modules():
        for hooks in (member._forward_pre_hooks, member._forward_hooks):
            for key in [key for key, hook in hooks.items() if _is_ours(hook)]:
                del hooks[key]
                member._forward_pre_hooks_with_kwargs.pop(key, None)
                member._forward_hooks_always_called.pop(key, None)
        member.__dict__.pop(GROUP, None)
    module.__dict__.pop(HOOKS, None)


def hooks_on(module: nn.Module) -> GroupHooks | None:
    """The hooks of a part; None where it has none on."""
    return module.__dict__.get(HOOKS)


def remove_hooks(module: nn.Module) -> None:
    """Take off the hooks that another mode, pipeline or failure left on a part, whose weights return to the host."""
    every: Iterator[Any] = (hook for member in module.modules() for hook in member._forward_pre_hooks.values())
    for hooks in {hook.args[0].hooks for hook in every if _is_ours(hook)}:
        hooks.offload()
    _unhook(module)


def group_of(module: nn.Module) -> WeightGroup | None:
    """The group that has the own tensors of ``module``; None where no hook brings them."""
    return module.__dict__.get(GROUP)


@contextmanager
def own_tensors(module: nn.Module) -> Iterator[None]:
    """Onload the own parameters and buffers of ``module`` for the block, by our group's hooks or accelerate's."""
    hook, group = getattr(module, "_hf_hook", None), group_of(module)
    if group is not None:
        group.onload()
    elif hook is not None:
        hook.pre_forward(module)
    try:
        yield
    finally:
        if group is not None:
            group.offload()
        elif hook is not None:
            hook.post_forward(module, None)


@contextmanager
def weights_on(layer: nn.Module, like: torch.Tensor, bias_dtype: Any = None) -> Iterator[tuple[torch.Tensor, Any]]:
    """Weight and bias of ``layer`` on the device and in the dtype of ``like``, provided by the offloader for the block.
    A layer with a method ``weights_on(like)``, by which a host streams weights, is asked first; then its group, hooks
    of accelerate and diffusers, and its own tensors. ``bias_dtype``: of the bias, None for that of ``like``. Raises
    UnsupportedError where nothing brings the weight there."""
    provider = getattr(layer, "weights_on", None)
    if provider is not None:
        with provider(like) if bias_dtype is None else provider(like, bias_dtype) as pair:
            yield pair
        return
    if group_of(layer) is not None:
        with own_tensors(layer):
            yield _pair(layer, like, bias_dtype)
        return
    away, hook = _device_of(layer) != like.device, getattr(layer, "_hf_hook", None)
    theirs = getattr(getattr(layer, "_diffusers_hook", None), "hooks", {}).get("group_offloading")
    try:
        if away and hook is not None:
            hook.pre_forward(layer)
        elif away and theirs is not None:
            theirs.group.onload_()
        if _device_of(layer) != like.device:
            raise misplaced(layer, like)
        yield _pair(layer, like, bias_dtype)
    finally:
        if away and hook is not None:
            hook.post_forward(layer, None)
        elif away and theirs is not None:
            theirs.group.offload_()


def _device_of(layer: nn.Module) -> torch.device:
    """Device of the layer's tensors, found without making a packed weight dense."""
    return next(own_tensors_of(layer)).device


def _pair(layer: nn.Module, like: torch.Tensor, bias_dtype: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight and bias of ``layer`` where they are, in the dtypes that :func:`weights_on` names."""
    weight: Any = layer.weight
    bias: Any = getattr(layer, "bias", None)
    return weight.to(like.dtype), None if bias is None else bias.to(bias_dtype or like.dtype)


def misplaced(layer: nn.Module, x: torch.Tensor) -> UnsupportedError:
    """The error for an input that is not where the weight of ``layer`` is."""
    found = f"the input of {layer} is on {x.device} and its weight on {layer.weight.device}"
    fix = "Run the part while its offloader holds it, and move its inputs to the offloader's device."
    return UnsupportedError(found, expected="both on the device that computes", fix=fix)


def own_tensors_of(module: nn.Module) -> Iterator[torch.Tensor]:
    """The parameters and buffers of ``module`` that belong to none of its children."""
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)


def _groups_in(
    module: nn.Module, by_block: bool, inside: bool = False
) -> Iterator[tuple[nn.Module, list[nn.Module], bool]]:
    """Each module whose forward brings a group, the modules with its tensors, and True ``inside`` a list of blocks."""
    yield module, [module], inside
    for child in module.children():
        if by_block and isinstance(module, nn.ModuleList):
            yield child, list(child.modules()), True
        else:
            yield from _groups_in(child, by_block, inside or isinstance(module, nn.ModuleList))
