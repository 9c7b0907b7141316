"""Core's weights where a device damages them: bf16, and float8 where there is none, cast on the host into a network of
the fitted model's own; and checksums, by which pages freed too early and patches left on are found."""

from __future__ import annotations

import contextlib
import copy
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import comfy.model_management
import comfy.ops
import comfy.utils
import torch
from comfy.quant_ops import QuantizedTensor
from torch import Tensor, nn

from ...compat.decision import AUTO, Decision
from ...compat.device.execution import HOST, to_host
from ...compat.device.facts import value_or
from ..casting import cast_by_core
from ..diffusion_model import CoreModel
from ..memory_manager import EVERYTHING
from .layers import ByNetwork
from .machine import ModelDevice
from .ownership import left_class
from .packed import UNPACKED, as_bytes, holds_float8, in_bytes, packed_layers, with_float8_saved

BACKUPS = "_anygpu_backups"  # on a copy: backups of patched weights, shared by its patchers as in core
LIMIT = torch.finfo(torch.float16).max
Target = Callable[[nn.Module, Tensor], torch.dtype]  # (module, its bf16 weight) -> the dtype to cast it to
_copies = ByNetwork()  # network -> label of dtypes -> weak reference to its copy
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}  # by bytes of a value
MIX = 0x1E3779B97F4A7C15  # odd, by which rows count: two of them swapped give another sum
SHARE = 50  # steps in which all bytes are checked once
NEAR = 0.1  # how far a patched weight may be off, as a share of what its patches change
_known = ByNetwork()  # network -> its LoadedWeights


def damage_to_bf16(network: nn.Module, machine: ModelDevice) -> str:
    return _lack(network, machine, lambda each: is_plain(each) and each.dtype is torch.bfloat16, "cast.bf16_to_fp32")


def lack_of_float8(network: nn.Module, machine: ModelDevice) -> str:
    return _lack(network, machine, holds_float8, "float8")


def _lack(network: nn.Module, machine: ModelDevice, needs: Callable[[Tensor], bool], operation: str) -> str:
    """The reason why ``operation`` fails here, if a tensor of ``network`` ``needs`` it; else empty."""
    if not any(map(needs, (*network.parameters(), *network.buffers()))):
        return ""
    ability = machine.abilities.verdict(operation)
    return "" if ability.usable else ability.why


def float8_decision(lack: str, clone: Any) -> Iterator[Decision]:
    if lack and clone is not None:
        yield Decision("float8 weights", "held as bytes, or as fp16 where they have no scale", lack, AUTO)
    elif lack:
        yield Decision("weights", "float8", f"{lack}; use a file in bf16, fp16 or int8", alarming=True)


def weights_decision(damage: str, clone: Any) -> Iterator[Decision]:
    if damage and clone is not None:
        yield Decision("weights", "cast from bf16 on the host", f"this device changes bf16 ({damage})", AUTO)
    elif damage:
        why = f"this device changes them ({damage}); use a file in fp16, or weight_dtype fp8 on the loader"
        yield Decision("weights", "bf16", why, alarming=True)


def clone_cast_on_host(patcher: Any, target: Target, label: str, float8: bool = True) -> Any:
    """A clone of ``patcher`` whose network is a copy cast on the host, shared by clones of a ``label``; None where core
    pages weights itself or the original ones cannot be had. bf16 weights get the dtypes of ``target``; without
    ``float8``, float8 ones become fp16, exactly, or bytes if packed. Layers of other packs stay."""
    if patcher.is_dynamic():
        return None  # core pages such weights by itself
    copies: dict[str, weakref.ref[nn.Module]] = _copies.setdefault(patcher.model, {})
    network = copies[label]() if label in copies else None
    if network is None:
        source = on_host(patcher)
        if source is None:
            return None
        network = _cast(source, target, float8)
        network.__dict__[BACKUPS] = ({}, {}, {}, set())
        copies[label] = weakref.ref(network)
    clone = patcher.clone(model_override=(network, network.__dict__[BACKUPS]))
    clone.size = 0  # counted again
    return clone


def fp16_or_fp32(matrix: bool, weight: Tensor) -> torch.dtype:
    """fp16 for a matrix whose values it holds, as safe fp16 would cast it anyway; fp32, exactly, for all else."""
    return torch.float16 if matrix and float(weight.abs().amax()) <= LIMIT else torch.float32


def on_host(patcher: Any) -> nn.Module | None:
    """The network of ``patcher`` as loaded, from its file again if it has moved or is patched; None if that fails."""
    network: nn.Module = patcher.model
    patched = getattr(network, "current_weight_patches_uuid", None) is not None
    if not patched and all(tensor.device.type == "cpu" for tensor in network.parameters()):
        return network
    return from_file(patcher)


def from_file(patcher: Any) -> Any:
    """The network of ``patcher`` read anew from its file; None where core cannot, or the file is gone."""
    if patcher.cached_patcher_init is None:
        return None
    load, arguments, *place = patcher.cached_patcher_init
    again = value_or(lambda: load(*arguments), None)  # the file may be gone
    read = again[place[0]] if place and again is not None else again
    return None if read is None else read.model


def _cast(network: nn.Module, target: Target, float8: bool) -> nn.Module:
    """The copy of ``network`` for :func:`clone_cast_on_host`, on the host; core's configurations are shared with it."""
    plain = (value for value in vars(network).values() if not isinstance(value, (nn.Module, dict, list, tuple, set)))
    memo: dict[int, Any] = {id(value): value for value in plain}  # core's configurations, which are not copies' own
    for module in network.modules():
        ours = not left_class(module)  # another pack alone knows what its tensors mean
        for tensor in filter(is_plain, (*module._parameters.values(), *module._buffers.values())):
            values = tensor.detach()
            values = values.to(target(module, values)) if ours and values.dtype is torch.bfloat16 else values
            values = values.half() if ours and not float8 and holds_float8(values) else values
            memo[id(tensor)] = nn.Parameter(values, requires_grad=False) if isinstance(tensor, nn.Parameter) else values
    for weight in network.parameters() if not float8 else ():
        if isinstance(weight, QuantizedTensor) and holds_float8(weight):
            memo[id(weight)] = nn.Parameter(as_bytes(weight), requires_grad=False)
    made = copy.deepcopy(network, memo)
    for layer in filter(in_bytes, packed_layers(made)):
        setattr(layer, UNPACKED, True)
        made.state_dict_for_saving = functools.partial(with_float8_saved, weakref.ref(made))
    return made


def is_plain(tensor: Tensor | None) -> bool:
    return tensor is not None and type(tensor.data) is Tensor


def checksum(tensor: Tensor) -> Tensor:
    """A checksum of all bits of ``tensor``, packed or not, and of their order: one int64 on its device."""
    if hasattr(tensor, "__tensor_flatten__"):
        return torch.stack([checksum(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0]]).sum()
    values, size = tensor.detach().contiguous(), tensor.element_size()
    if values.ndim > 1 and values[0].numel() * size % 8 == 0:
        values = values.clone() if values.storage_offset() * size % 8 else values
        rows = values.flatten(1).view(torch.int64).sum(-1)
    else:
        rows = values.reshape(len(values) if values.ndim else 1, -1).view(INTEGERS[size]).sum(-1, dtype=torch.int64)
    return (rows * (torch.arange(1, len(rows) + 1, device=rows.device) * MIX)).sum()


@dataclass
class LoadedWeights:
    """The checksums of one network's tensors, by name. ``owners``, ids of their modules, tell a schedule that a node
    has swapped in; ``patched`` has checksums by version of the patches, once such values were seen to be right."""

    first: dict[str, int] = field(default_factory=dict)  # as loaded, without patches
    owners: dict[str, int] = field(default_factory=dict)
    patched: dict[tuple[Any, ...], int] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)  # of each tensor
    place: int = 0  # index of the tensor that was checked last
    budget: float = 0.0  # bytes to check before the next step
    healed: int = 0  # how often tensors had to be brought back

    @classmethod
    def of(cls, patcher: Any) -> LoadedWeights:
        """The checksums for the network of ``patcher``, also as core casts it; the first call reads every tensor."""
        known: LoadedWeights = _known.setdefault(patcher.model, cls())
        if not known.first:
            sums = dict[str, Tensor]()
            for name, module, tensor in tensors_of(patcher.model):
                known.owners[name], known.bytes[name] = id(module), tensor.nbytes
                loaded = _loaded(patcher, name)
                sums[name] = checksum(loaded)
                cast = getattr(module, f"{name.rpartition('.')[2]}_comfy_model_dtype", None)  # by core, while it loads
                if cast not in (None, loaded.dtype) and not hasattr(loaded, "__tensor_flatten__"):
                    sums[f"{name} as {cast}"] = checksum(loaded.to(cast))
            known.first = dict(zip(sums, _values([*sums.values()]), strict=True))
        return known

    def wrong(self, patcher: Any, every: bool, streamed: bool = False) -> list[str]:
        """Names of the tensors from :meth:`_next` that, on the device, are not as loaded or patched; none under hooks.
        Notes the checksums of patched tensors whose values are right."""
        if getattr(patcher, "current_hooks", None) is not None:
            return []
        names, version = list[tuple[str, tuple[Any, ...], str]](), patcher.patches_uuid
        sums, wrong = list[Tensor](), list[str]()
        self.patched = {key: value for key, value in self.patched.items() if key[1] == version}
        for name, module, tensor in self._next(patcher, every, streamed):
            if self.owners.get(name) != id(module):
                continue
            with _on_device(module, name, tensor, patcher) as value:
                if value is None:
                    continue
                plain = not hasattr(value, "__tensor_flatten__")
                key = (name, version, tensor.device.type)  # streamed ones core patches at each use
                # of a module whose children have parameters core patches none
                patched = name in patcher.patches and not any("." in each for each, _ in module.named_parameters())
                if plain and patched and key not in self.patched and not _as_patched(patcher, name, value):
                    wrong.append(name)
                names.append((name, key if patched else (), f"{name} as {value.dtype}"))
                sums.append(checksum(value))
        for (name, key, cast), value in zip(names, _values(sums), strict=True):
            loaded = self.first.get(cast, self.first[name])
            expected = self.patched.setdefault(key, value) if key and name not in wrong else loaded
            if value != expected and name not in wrong:
                wrong.append(name)
        return wrong

    def restore(self, patcher: Any, names: Sequence[str]) -> list[str]:
        """The names of tensors restored from host memory or their file; the others count as right from now on."""
        self.healed += bool(names)
        if patcher.is_dynamic() and names:
            patcher.partially_unload(None, EVERYTHING)
            patcher.partially_unload_ram(EVERYTHING)
        file, done = None, []
        for name in names:
            loaded = _loaded(patcher, name)
            if int(checksum(loaded)) != self.first[name]:
                file = file or from_file(patcher)
                loaded = loaded if file is None else comfy.utils.get_attr(file, name)
            if int(checksum(loaded)) == self.first[name]:
                if loaded is not comfy.utils.get_attr(patcher.model, name):  # what core noted on it stays
                    _put_back(patcher, name, loaded)
                done.append(name)
            else:
                self.first = {key: value for key, value in self.first.items() if not key.startswith(f"{name} as ")}
                self.first[name] = int(checksum(_loaded(patcher, name)))  # nothing else is known: said once
        return done

    def _next(self, patcher: Any, every: bool, streamed: bool) -> Iterator[tuple[str, nn.Module, Tensor]]:
        """The tensors to check now: those due in this step, or ``every`` one; ``streamed``: also off the device."""
        if every:
            device = patcher.load_device.type
            yield from (each for each in tensors_of(patcher.model) if streamed or each[2].device.type == device)
            return
        names = list(self.bytes)
        self.budget += sum(self.bytes.values()) / SHARE
        while self.budget > 0:
            self.place = (self.place + 1) % len(names)
            name = names[self.place]
            self.budget -= max(1, self.bytes[name])
            owner, _, own = name.rpartition(".")
            module = patcher.model.get_submodule(owner)
            tensor = getattr(module, own, None)  # another node's schedule may have fewer
            if isinstance(tensor, Tensor):
                yield name, module, tensor


def tensors_of(network: nn.Module) -> Iterator[tuple[str, nn.Module, Tensor]]:
    for path, module in network.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and tensor.numel() and not tensor.is_meta:
                yield f"{path}.{name}".strip("."), module, tensor


def _loaded(patcher: Any, name: str) -> Tensor:
    """A tensor as it was loaded: core's backup of it, else the model's own."""
    kept = patcher.backup.get(name)
    tensor = patcher.backup_buffers.get(name) if kept is None else kept.weight
    return comfy.utils.get_attr(patcher.model, name) if tensor is None else tensor  # type: ignore[no-any-return]


def patched_weight(patcher: Any, name: str) -> Tensor:
    """A weight on the host with the patches of ``patcher``, as core would save it, whatever the network has now."""
    loaded = _loaded(patcher, name)
    if name not in patcher.patches:
        return to_host(loaded)
    from comfy.float import stochastic_rounding

    seed = comfy.utils.string_to_seed(name)
    return stochastic_rounding(_patched(patcher, name, loaded, HOST)[1], loaded.dtype, seed=seed)


def _patched(patcher: Any, name: str, loaded: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """A weight in fp32 on ``device`` without its patches and with them."""
    import comfy.lora

    plain = (to_host(loaded) if device.type == HOST.type else loaded).to(device, torch.float32, copy=True)
    return plain, comfy.lora.calculate_weight(patcher.patches[name], plain.clone(), name)


def _as_patched(patcher: Any, name: str, value: Tensor) -> bool:
    """True if ``value`` is the weight with its patches, but for rounding."""
    loaded, expected = _patched(patcher, name, _loaded(patcher, name), value.device)
    before = comfy.lora.pad_tensor_to_shape(loaded, expected.shape)  # a LoRA may widen a layer
    apart, change = (value.float() - expected).norm(), (expected - before).norm()
    dtypes = (value.dtype, comfy.model_management.lora_compute_dtype(value.device))
    return bool(apart <= NEAR * change + max(torch.finfo(dtype).eps for dtype in dtypes) * expected.norm())


def _put_back(patcher: Any, name: str, loaded: Tensor) -> None:
    """Give the model's tensor ``name`` its ``loaded`` values; a backup by core gets them, too, and is patched anew."""
    path, _, own = name.rpartition(".")
    module = patcher.model.get_submodule(path)
    is_parameter = own in module._parameters
    tensors = module._parameters if is_parameter else module._buffers
    values = loaded.detach().to(tensors[own].device, copy=True)
    tensors[own] = nn.Parameter(values, requires_grad=False) if is_parameter else values
    if name in patcher.backup:
        unpatched = loaded.detach().to(patcher.offload_device, copy=True)
        patcher.backup[name] = patcher.backup[name]._replace(weight=unpatched)
        patcher.patch_weight_to_device(name, device_to=values.device)


def name_of(model: Any) -> str:
    """A name of a MODEL or a VAE's patcher that is the same in each run: its file, or its class, size, last values."""
    inner = model.model
    if isinstance(inner, CoreModel):
        return str(inner.pipeline.model.source)
    again = model.cached_patcher_init
    source = again[1][0] if again and again[1] else None
    if isinstance(source, str):
        return source
    # VAEs of one architecture, as Wan's and Qwen-Image's, differ in their values alone, which no patch changes.
    tensors = () if model.patches else inner.state_dict().values()
    plain = [each for each in tensors if type(each) is Tensor and not each.is_meta]  # other packs' may not be read
    last = to_host(plain[-1].flatten()[-4:]).tolist() if plain else []
    return f"{type(inner).__name__}, {model.model_size()} bytes, {last}"


def _values(sums: Sequence[Tensor]) -> list[int]:
    """Scalars as Python integers, by one copy to the host from each device."""
    values = [0] * len(sums)
    for device in {each.device for each in sums}:
        here = [index for index, each in enumerate(sums) if each.device == device]
        for index, value in zip(here, to_host(torch.stack([sums[index] for index in here])).tolist(), strict=True):
            values[index] = value
    return values


@contextlib.contextmanager
def _on_device(module: Any, name: str, tensor: Tensor, patcher: Any) -> Iterator[Tensor | None]:
    """For the block, ``tensor``, the ``name`` in ``module``, as its layer computes with it: itself if on the device,
    else as core casts and patches it. None if another function changes it, or none of core's casts reads it."""
    own = name.rpartition(".")[2]
    there, changed = tensor.device.type == patcher.load_device.type, bool(getattr(module, f"{own}_function", ()))
    cast = isinstance(module, comfy.ops.CastWeightBiasOp) and own in ("weight", "bias")
    if there or not cast or (changed and name not in patcher.patches):
        yield tensor if there and not changed else None
        return
    comfy.ops.run_every_op()
    both = (module.weight, module.bias)
    dtype, bias_dtype = (getattr(each, "_model_dtype", getattr(each, "dtype", None)) for each in both)
    if dtype.itemsize == 1 and getattr(module, "weight_function", ()):
        dtype = torch.float32  # torch cannot add a LoRA in fp8
    with cast_by_core(module, device=patcher.load_device, dtype=dtype, bias_dtype=bias_dtype) as (weight, bias):
        yield weight if own == "weight" else bias
