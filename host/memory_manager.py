"""The parts of a pipeline inside ComfyUI's memory manager, each with one patcher that our sampler and core's share,
which ComfyUI loads, streams, evicts and counts as its own models; and the devices it reports."""

from __future__ import annotations

import copy
import functools
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import comfy.model_management
import comfy.model_patcher
import comfy.utils
import torch
from torch import nn

from ..compat.checkpoints.packed import without_unpacking
from ..compat.device.execution import HOST, current
from ..compat.device.facts import accelerators, default_device, free_bytes, value_or
from ..compat.device.failures import DEVICE_ERRORS, is_shortage
from ..compat.errors import InputError
from ..compat.memory.offloader import DISK, HOSTED, OffloadOptions, placement
from ..compat.memory.parts import Adapters, Parts, ProgressStage, adapters_on, role_of
from ..compat.memory.statistics import MemoryStats, amount
from . import casting

REGISTERS = ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set")
EVERYTHING = 1e30  # more bytes than any device has, as ComfyUI itself asks for them
HELD_BY = "anygpu_holder"  # attribute of a part: a weak reference to its holder
LEAST = 0.1  # bytes, to ask ComfyUI for no weights at all: it takes 0 for all of them


def compute_device() -> torch.device:
    """The device ComfyUI computes on; asked at each use, since other packs change it."""
    return value_or(lambda: torch.device(comfy.model_management.get_torch_device()), default_device())


def known_bytes(ask: Callable[[], Any], unknown: float) -> float:
    """The bytes that ``ask``, a call of ComfyUI's, returns; ``unknown`` if it fails or returns anything else."""
    reported = value_or(lambda: float(ask()), -1.0)
    return reported if reported >= 0 else unknown


def free_on(device: torch.device) -> float:
    """Bytes free on ``device`` as ComfyUI reports them, else as the device does; :data:`EVERYTHING` if unknown."""
    known = free_bytes(device)
    return known_bytes(lambda: comfy.model_management.get_free_memory(device), EVERYTHING if known is None else known)


def reserve() -> float:
    return known_bytes(lambda: comfy.model_management.minimum_inference_memory(), 0)


def make_room(needed_bytes: int, device: torch.device) -> None:
    """Let ComfyUI unload other models until ``needed_bytes`` and its own reserve are free on ``device``."""
    if device.type != "cpu":
        comfy.model_management.free_memory(needed_bytes + reserve(), device)


def cards() -> dict[torch.device, int | None]:
    """Each accelerator -> :func:`room_on` it, where there are several; else empty."""
    devices = accelerators(compute_device())
    return {device: room_on(device) for device in devices} if len(devices) > 1 else {}


def room_on(device: torch.device) -> int | None:
    """Bytes that a run may use on ``device``: free ones, and those ComfyUI can evict; None if unknown."""
    free = free_bytes(device)
    return free if free is None else free + evictable_bytes(device)


def evictable_bytes(device: torch.device) -> int:
    """Bytes of loaded models on ``device``, ours too, that ComfyUI can unload for a run; 0 on a CPU."""
    listed = list(comfy.model_management.current_loaded_models)  # a run may change it meanwhile
    held = [item.model for item in listed if item.device == device and device.type != HOST.type]
    return sum(int(known_bytes(model.loaded_size, 0)) for model in held if model is not None)


class PartHolder:
    """Mixed into an ``nn.Module`` that is a patcher's model: holds one part of a pipeline, read when first needed."""

    parts: Parts
    part: str

    def fill(self) -> nn.Module:
        """Read the part if need be, and hold it."""
        module = self.parts.read(self.part)
        if self.content is not module:
            self.put(module)
        return module

    @property
    def content(self) -> nn.Module | None:
        return self.place().__dict__.get("held")

    def put(self, module: nn.Module | None) -> None:
        """Hold ``module``, or nothing, its weights under its own names, as LoRA files have them. Once the holder is no
        longer used, they leave the device. Another holder of ``module`` loses it: two patchers would both move it."""
        if module is not None:
            _release_from(module.__dict__.get(HELD_BY, lambda: None)(), self, module)
            module.__dict__[HELD_BY] = weakref.ref(self)
        last: Any = self.__dict__.pop("on_deletion", None)
        if last is not None:
            last.detach()
        place, source = self.place(), nn.Module() if module is None else module
        place.__dict__.update(held=module, **{name: source.__dict__[name] for name in REGISTERS})
        if module is not None:
            self.__dict__["on_deletion"] = weakref.finalize(self, casting.send_home, module)
            self.__dict__["on_deletion"].atexit = False

    def place(self) -> nn.Module:
        """The module that shows the part's children, parameters and buffers as its own; core's network for a MODEL."""
        return self  # type: ignore[return-value]

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The part's state dict by the names of patches, which reads it; for callers such as a LoRA loader."""
        self.fill()
        return casting.named_for_patches(super().state_dict(*args, **kwargs), self)  # type: ignore[misc, arg-type]


class Holder(PartHolder, nn.Module):
    def __init__(self, parts: Parts, part: str) -> None:
        super().__init__()
        self.parts, self.part, self.device = parts, part, None


@functools.cache
def _holder(part: str) -> type[Holder]:
    return type(f"AnyGPU_{part}", (Holder,), {"__module__": __name__})


class PartPatcher(comfy.model_patcher.ModelPatcher):
    """A patcher of a :class:`PartHolder`; never a dynamic VRAM one, so that any other model's load can evict it."""

    watcher: Callable[[int], None] | None = None  # called with the bytes of each weight that has moved
    memory_stats: MemoryStats | None = None
    in_cloning = False
    beside: int | None = None  # bytes that the stage under way needs beside the weights
    ran_out = False  # whether memory ran out with the whole part on the device
    locks = True  # whether ComfyUI may pin streamed weights in host memory
    keeps = True  # whether host copies of moved weights stay: not where host and device share one memory

    def clone(self, *args: Any, **kwargs: Any) -> PartPatcher:
        self.in_cloning = True
        try:
            clone: PartPatcher = super().clone(*args, **kwargs)
        finally:
            self.in_cloning = False
        clone.memory_stats, clone.locks, clone.keeps = self.memory_stats, self.locks, self.keeps
        return clone

    def model_size(self) -> int:
        """Bytes of the part as it is stored, which reads it; 0 inside clone(), whose copy never uses the size."""
        if self.in_cloning:
            return 0
        module = self.model.fill()
        return casting.bytes_of((*module.parameters(), *module.buffers()))

    def pin_weight_to_device(self, key: str) -> None:
        """Pin as core does, but for a part mapped from its file: its pages must be able to leave host memory."""
        if self.locks:
            super().pin_weight_to_device(key)

    def _load_list(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Core's list of modules to load, but only our cast layers: :meth:`load` itself moves the fixed tensors."""
        with without_unpacking(self.model):  # core reads each weight, but no values
            listed = super()._load_list(*args, **kwargs)
        return [entry for entry in listed if any(isinstance(item, casting.CastLayer) for item in entry)]

    def load(
        self, device_to: torch.device | None = None, lowvram_model_memory: float = 0,
        force_patch_weights: bool = False, full_load: bool = False,
    ) -> None:  # fmt: skip
        """Load as core does, after moving the fixed tensors, whose bytes come off its budget and count as loaded."""
        module = self.model.fill()
        casting.install_cast_layers(module, device_to, self.memory_stats)
        fixed = casting.fixed_tensors(module)
        for tensor in fixed:
            casting.send(tensor, device_to, self.keeps)
        held = casting.bytes_of(fixed)
        with casting.patches_by_layer(self):
            super().load(device_to, max(lowvram_model_memory - held, LEAST), force_patch_weights, full_load)
        casting.attach_patches(self)
        if not full_load:
            self.model.model_loaded_weight_memory += held

    def patch_hooks(self, hooks: Any) -> None:
        """Patch as core does; packed weights are patched when they are made dense, since core would patch a copy."""
        with casting.patches_by_layer(self), without_unpacking(self.model):
            super().patch_hooks(hooks)
        casting.attach_patches(self, hooks)

    def patch_weight_to_device(self, key: str, device_to: torch.device | None = None, *args: Any, **kwargs: Any) -> Any:
        """Patch as core does and move the weight in place; obeys a cancel and reports the bytes moved."""
        comfy.model_management.throw_exception_if_processing_interrupted()
        result = super().patch_weight_to_device(key, device_to, *args, **kwargs)
        if device_to is not None and not kwargs.get("return_weight"):
            tensor = comfy.utils.get_attr(self.model, key)
            if tensor is not None:
                casting.send(tensor, device_to, self.keeps)
                if self.watcher is not None:
                    self.watcher(tensor.numel() * tensor.element_size())
        return result

    def partially_load(
        self, device_to: torch.device, extra_memory: float = 0, force_patch_weights: bool = False
    ) -> Any:
        """Load as core does with :attr:`beside` bytes kept free; an error or cancel leaves nothing half moved."""
        try:
            with torch.inference_mode(False), torch.no_grad():
                return super().partially_load(device_to, self._budget(device_to, extra_memory), force_patch_weights)
        except BaseException:
            self.detach()
            raise

    def _budget(self, device: torch.device, offered: float) -> float:
        """Bytes of weights that may move to ``device``, negative for bytes to unload: at most what ComfyUI ``offered``,
        and what leaves the stage its memory; off NVIDIA ComfyUI offers two fifths of the free memory regardless. An
        offer of everything, for shared memory or by the user's wish, stands until memory runs out."""
        if self.beside is None or (offered >= EVERYTHING and not self.ran_out):
            return offered
        more = known_bytes(lambda: comfy.model_management.extra_reserved_memory(), 0)
        room = free_on(device) - max(self.beside + more, reserve())
        return min(offered, room if self.loaded_size() else max(room, LEAST))

    def partially_unload(self, *args: Any, **kwargs: Any) -> Any:
        with torch.inference_mode(False), torch.no_grad(), casting.patches_by_layer(self):
            return super().partially_unload(*args, **kwargs)

    def unpatch_model(self, device_to: torch.device | None = None, unpatch_weights: bool = True) -> None:
        """Unpatch as core does; of a part that is read, tensors that no layer fetches go to ``device_to`` before."""
        with torch.inference_mode(False), torch.no_grad():
            if unpatch_weights and device_to is not None and self.model.content is not None:
                for tensor in casting.fixed_tensors(self.model.content):
                    casting.send(tensor, device_to)
            super().unpatch_model(device_to, unpatch_weights)

    def detach(self, unpatch_all: bool = True) -> Any:
        result = super().detach(unpatch_all)
        if unpatch_all and self.model.content is not None:
            casting.restore_layers(self.model.content)
        return result


class ComfyOffloader:
    """Offload ``comfyui``: ComfyUI decides how much of each part is on the device, and when it is unloaded."""

    mode = HOSTED
    automatic = False
    evicts = True

    def __init__(self, parts: Parts, device: torch.device | None = None, options: OffloadOptions | None = None) -> None:
        self.parts, self._chosen, self.options = parts, device, options or OffloadOptions()
        self.patchers: dict[str, PartPatcher] = {}
        self.memory_stats = MemoryStats(self.options.state)
        self.adapters: Adapters | None = None
        self._short: dict[str, int] = {}  # part -> bytes needed beyond its estimate, as shortages have shown
        self._refused: dict[str, int] = {}  # part -> more bytes, missing while it loaded; until a stage with it ends

    def __repr__(self) -> str:
        return f"offload {placement(self)}"

    def with_adapters(self, adapters: Adapters | None) -> ComfyOffloader:
        """The same offloader for a pipeline with these adapters: patchers, statistics and shortages are shared."""
        other = copy.copy(self)
        other.adapters = adapters
        return other

    @property
    def device(self) -> torch.device:
        """The device that computes the parts: the chosen one, else ComfyUI's, asked at each use."""
        return self._chosen or compute_device()

    def device_of(self, part: str) -> torch.device:
        return self.options.devices.get(role_of(part), self.device)

    @property
    def patcher(self) -> PartPatcher:
        """The transformer's patcher, by which ComfyUI's caches recognise a model."""
        return self.patcher_of("transformer")

    def get_models(self) -> list[PartPatcher]:
        return list(self.patchers.values())

    def patcher_of(self, part: str, holder: Any = None) -> PartPatcher:
        """The one patcher of a part, made anew for another device or core's ``holder``, and the old one unloaded."""
        known, device = self.patchers.get(part), self.device_of(part)
        if known is not None and known.load_device == device and holder in (None, known.model):
            return known
        if known is not None:
            unload(known)
        holder = holder or (known.model if known is not None else _holder(part)(self.parts, part))
        self.patchers[part] = PartPatcher(holder, device, HOST)  # core's would be the GPU under --highvram, --gpu-only
        self.patchers[part].memory_stats = self.memory_stats
        self.patchers[part].locks = self.options.host_weights.kinds.get(part) != DISK
        self.patchers[part].keeps = not self.options.host_weights.shared
        return self.patchers[part]

    @contextmanager
    def hold(self, part: str, activation_bytes: int = 0, progress: Any = None) -> Iterator[nn.Module]:
        """For the block, the part with its adapters on its device, ``activation_bytes`` kept free beside weights."""
        adapted = adapters_on(self.parts, part, self.adapters, self.detach, progress)
        with current(self.device_of(part)), adapted as module:
            self._onload(part, module, activation_bytes + self.options.keep_free_bytes, progress)
            yield module
            self._refused.pop(part, None)  # another program may have held them only then

    def _onload(self, part: str, module: nn.Module, needed: int, progress: Any) -> None:
        """Have ComfyUI load ``module`` with ``needed`` bytes kept free, streaming more of it while memory runs out."""
        patcher = self.patcher_of(part)
        if patcher.model.content is not module:  # read again, or never seen
            unload(patcher)
            patcher.model.put(module)
        if patcher.loaded_size() and casting.install_cast_layers(module, self.device_of(part), self.memory_stats):
            unload(patcher)  # a change gave it layers of its own
        patcher.watcher = _watcher(part, patcher.model_size() - patcher.loaded_size(), progress)
        started, before = time.perf_counter(), patcher.loaded_size()
        try:
            while not self._try_load(part, patcher, needed):
                streamed = self._stream_more(part, patcher, needed)
                if progress is not None:
                    message = f"memory ran out while the {part} was loading: continuing with {streamed} of it streamed"
                    progress.notify(message)
        finally:
            patcher.watcher = patcher.beside = None
            self.memory_stats.add(max(0, patcher.loaded_size() - before), time.perf_counter() - started)

    def _try_load(self, part: str, patcher: PartPatcher, needed: int) -> bool:
        """Load the part as far as there is room and return True; False if memory ran out but less may fit."""
        patcher.beside, patcher.ran_out = needed + self._missed(part), self._missed(part) > 0
        try:
            comfy.model_management.load_models_gpu([patcher], memory_required=patcher.beside)
        except DEVICE_ERRORS as error:
            if not is_shortage(error) or self._empty_device(part, patcher, needed) <= 0:
                raise
            return False
        return True

    def _empty_device(self, part: str, patcher: PartPatcher, needed: int) -> float:
        """Unload the part and all other models; the bytes of its weights that fit then, 0 or less for none."""
        unload(patcher)
        comfy.model_management.free_memory(EVERYTHING, patcher.load_device)
        return min(patcher.model_size(), free_on(patcher.load_device) - needed - self._missed(part))

    def _missed(self, part: str) -> int:
        """Bytes by which shortages have shown the estimate of a part to be too low."""
        return self._short.get(part, 0) + self._refused.get(part, 0)

    def _stream_more(self, part: str, patcher: PartPatcher, needed: int) -> str:
        """Reserve half of the room for weights, all of a small one, for unforeseen needs; says how much streams."""
        size, room = patcher.model_size(), self._empty_device(part, patcher, needed)
        free = free_on(patcher.load_device)
        left = room / 2 if room > size / 4 else 0
        self._refused[part] = int(free - needed - left) - self._short.get(part, 0)
        return amount(size - left, size)

    def detach(self, part: str) -> None:
        patcher = self.patchers.get(part)
        if patcher is not None:
            unload(patcher)
            patcher.model.put(None)

    def release(self, part: str) -> None:
        self.detach(part)
        if self.device_of(part).type == HOST.type:
            self.parts.drop(part)

    def switch(self, mode: str) -> None:
        """Raise InputError: ComfyUI decides at each use."""
        expected, fix = f"offload {self.mode} until it is loaded again", "Choose it on the load node."
        raise InputError(f"offload {mode!r} for a pipeline loaded with offload {self.mode}", expected=expected, fix=fix)

    def reduce_memory(self, part: str, *beside: str) -> str:
        """Make room during a stage with ``part`` and ``beside``: unload all other models, then half of the weights of
        the part with most on the device. Returns in words what was done, empty where nothing is left to do."""
        used = {name: self.patchers[name] for name in (part, *beside) if name in self.patchers}
        part = max(used, key=lambda n: (used[n].load_device.type != HOST.type, used[n].loaded_size()), default=part)
        patcher, management = self.patcher_of(part), comfy.model_management
        if patcher.load_device.type == HOST.type:
            return ""
        models = management.current_loaded_models
        ours = [item for item in models if item.model is not None and any(map(item.model.is_clone, used.values()))]
        if any(item.model is not None and item not in ours and item.device == patcher.load_device for item in models):
            management.free_memory(EVERYTHING, patcher.load_device, ours)
            return "with the other models off the device"
        before = patcher.loaded_size()
        patcher.partially_unload(patcher.offload_device, before // 2)
        freed = before - patcher.loaded_size()
        self._short[part] = self._short.get(part, 0) + freed
        size = patcher.model_size()
        return f"with {amount(size - before + freed, size)} of the {part} streamed" if freed else ""


def offloader_on(parts: Parts, device: torch.device, options: OffloadOptions | None = None) -> ComfyOffloader:
    return ComfyOffloader(parts, None if device == compute_device() else device, options)


def comfy_offloader(pipeline: Any) -> ComfyOffloader | None:
    return pipeline.offloader if isinstance(pipeline.offloader, ComfyOffloader) else None


def unload(patcher: PartPatcher) -> None:
    """Have ComfyUI unload the model of ``patcher``, its clones included, and restore its layers."""
    models = comfy.model_management.current_loaded_models
    others = [item for item in models if item.model is None or not item.model.is_clone(patcher)]
    if len(others) < len(models):
        comfy.model_management.free_memory(EVERYTHING, patcher.load_device, others)
    patcher.detach()


def _release_from(holder: Any, taker: Any, module: nn.Module) -> None:
    """Unload ``module`` and empty its ``holder``, unless that is ``taker`` itself or has another module by now."""
    if holder is None or holder is taker or holder.content is not module:
        return
    for item in list(comfy.model_management.current_loaded_models):
        if item.model is not None and item.model.model is holder:
            unload(item.model)
    holder.put(None)


def _watcher(part: str, total: int, progress: Any) -> Callable[[int], None] | None:
    """A function that reports the bytes of each weight moved; None without ``progress`` or anything to move."""
    if progress is None or total <= 0:
        return None
    done = 0

    def moved(size: int) -> None:
        nonlocal done
        done = min(done + size, total)
        progress.step(done, total, ProgressStage("moving", f"{part} {amount(done, total)}", True))

    return moved
