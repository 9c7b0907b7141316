"""Plain fp16 for blocks whose values left eight times of room in a step in safe fp16; a step beyond it is run again."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...compat.checkpoints.identity import content_of
from ...compat.device.execution import add_hook, to_host
from ...compat.durable import write_json
from ...compat.errors import CheckpointError, first_line, json_file
from ...compat.repairs import tensors_in
from ...compat.transforms.fp16_layers import FULL, HALF, SETTINGS
from .layers import FEW, FITS
from .ownership import is_convolution, is_linear

log = logging.getLogger(__name__)

ROOM = 8.0  # times the measured values that have to fit in fp16: later steps may have larger ones
MOST = float(torch.finfo(HALF).max)
NEVER = 1e30  # the share of a block that must stay in safe fp16; only masks hold values as large
FOLDER, VERSION = "fitted", 4  # of the files in which sizes are kept
CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # core calls what is in them
NETWORK = "the network"  # the name under which a network's own inputs are kept


@dataclass
class ValueSizes:
    share: float = 0.0  # of fp16's range that the largest value inside takes, times :data:`ROOM`; fits up to 1
    output: float = 0.0  # the largest value of the output, or of the next block's input
    least: float = math.inf  # the largest value of the smallest row of the output
    rows: float = 0.0  # the most rows that a Linear was given in fp32

    def take(self, kind: str, value: float) -> None:
        setattr(self, kind, (min if kind == "least" else max)(getattr(self, kind), value))


@dataclass(frozen=True, slots=True)
class MeasuredBlock:
    """A part of a network that core calls by itself, and the layers with products in it, by name."""

    name: str
    module: nn.Module
    layers: dict[str, nn.Module]


@dataclass
class Calibration:
    """The sizes of one network with one set of weights on one device, and the runs that measure and trust them."""

    path: Path | None  # the file of the sizes; None: not saved
    convolutions: bool  # whether 1-D and 2-D convolutions in fp16 are right here
    sizes: dict[str, ValueSizes] = field(default_factory=dict)  # by block, by layer, and of the network's inputs
    _blocks: list[MeasuredBlock] = field(default_factory=list)
    _running: str = NETWORK  # the block that was entered last
    _refused: set[str] = field(default_factory=set)  # blocks that must stay in safe fp16

    def __post_init__(self) -> None:
        if self.path is not None and self.path.is_file():
            try:
                kept = json_file(self.path)["sizes"]
                self.sizes = {name: ValueSizes(*map(float, sizes)) for name, sizes in kept.items()}
            except (OSError, ValueError, KeyError, TypeError, AttributeError, CheckpointError) as error:
                log.warning("AnyGPU: %s is damaged (%s): measured again", self.path, first_line(error))

    def fits(self, name: str) -> bool:
        return name in self.sizes and self.sizes[name].share <= 1.0

    def is_plain(self, network: nn.Module) -> bool:
        """True if at least one block or layer fits in plain fp16, and the network's own inputs do."""
        plain = self._plain_blocks(network)
        ours = (block.name in plain or any(self._fitting(block, plain)) for block in self._blocks_of(network))
        return self.fits(NETWORK) and any(ours)

    def refuse(self) -> None:
        """Keep the running block in safe fp16 from now on."""
        self._refused.add(self._running)

    @contextmanager
    def measured(self, network: nn.Module) -> Iterator[None]:
        """For the block, measure a step in safe fp16. Where the network's own values are finite its sizes are taken,
        and blocks that were refused or not finite are kept in safe fp16."""
        self._running = NETWORK  # else what comes before the first block would count as the last one's
        found: list[tuple[str, str, Tensor]] = []
        with ExitStack() as stack:

            def on(module: nn.Module, before: bool, hook: Any, *names: str) -> None:
                hook = functools.partial(hook, found, *names)
                stack.callback(add_hook(module, hook, before, with_kwargs=True).remove)

            on(network, False, _measure, NETWORK, NETWORK)
            for block in self._blocks_of(network):
                on(block.module, True, self._enter_block, block.name)
                for name, module in block.module.named_modules(prefix=block.name):
                    on(module, False, _measure, block.name, name if name in (block.name, *block.layers) else "")
                if not self.convolutions and any(map(is_convolution, block.layers.values())):
                    self._refused.add(block.name)
            yield
        numbers = _numbers([value for *_, value in found])
        sizes = [(name, kind, value) for (name, kind, _), value in zip(found, numbers, strict=True)]
        if all(math.isfinite(value) for name, _, value in sizes if name == NETWORK):
            for name, kind, value in sizes:
                self.sizes.setdefault(name, ValueSizes()).take(kind, value if math.isfinite(value) else NEVER)
            for name in self._refused:
                self.sizes.setdefault(name, ValueSizes()).share = NEVER
        self._refused.clear()

    @contextmanager
    def trusted(self, network: nn.Module) -> Iterator[Callable[[], bool]]:
        """For the block, compute in plain fp16 what fits; yields a function that returns afterwards whether all did."""
        values: list[tuple[str, str, Any]] = []
        plain = self._plain_blocks(network)
        repeated = any("." in name for name in plain)
        with ExitStack() as stack:
            for block in self._blocks_of(network):
                if block.name not in plain:
                    stack.callback(add_hook(block.module, _widen, before=True, with_kwargs=True).remove)
                    room = self.sizes.get(block.name, ValueSizes(output=NEVER)).output * ROOM <= MOST
                    if room and (repeated or not self._is_few(*block.layers)):
                        stack.callback(add_hook(block.module, lambda _, __, output: _cast(output, FULL, HALF)).remove)
                fitting = set(self._fitting(block, plain))
                for layer in block.layers.values():
                    layer.__dict__[FITS] = layer in fitting
                    stack.callback(layer.__dict__.pop, FITS, None)
            for block_name, name, module in self._watched(network):
                stack.callback(add_hook(module, functools.partial(_watch, values, block_name, name)).remove)
            yield functools.partial(self._held, values)

    def _blocks_of(self, network: nn.Module) -> list[MeasuredBlock]:
        if not self._blocks:
            self._blocks += blocks_of(network)
        return self._blocks

    def _watched(self, network: nn.Module) -> Iterator[tuple[str, str, nn.Module]]:
        """(block, name, module) of outputs to check: repeated blocks, or all if none repeats, and the network."""
        known = self._blocks_of(network)
        for block in [each for each in known if "." in each.name] or known:
            yield block.name, block.name, block.module
            for name, layer in block.layers.items():
                if self.fits(block.name) and is_linear(layer) and layer.in_features > layer.out_features:
                    yield block.name, name, layer  # shows overflow before core clamps it
        yield NETWORK, NETWORK, network

    def _fitting(self, block: MeasuredBlock, plain: set[str]) -> Iterator[nn.Module]:
        """Layers of ``block`` to compute in plain fp16: those that fit, of few rows only if ``plain`` has the block."""
        known = self.sizes.get(block.name, ValueSizes(NEVER)).share < NEVER
        names = (name for name in block.layers if block.name in plain or not self._is_few(name))
        return (block.layers[name] for name in names if known and self.fits(name))

    def _plain_blocks(self, network: nn.Module) -> set[str]:
        """Names of the blocks that fit; unless all do, without those of few rows, as the time's: fp32 is cheap."""
        called = [block for block in self._blocks_of(network) if block.name in self.sizes]
        plain = {block.name for block in called if self.fits(block.name)}
        few = {block.name for block in called if self._is_few(*block.layers)}
        return plain if len(plain) == len(called) else plain - few

    def _is_few(self, *names: str) -> bool:
        """True if none of these layers is given more than a few rows."""
        return all(self.sizes.get(name, ValueSizes()).rows <= FEW for name in names)

    def _enter_block(self, found: list[Any], name: str, _module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Note the running block; its inputs count as outputs of the block before: control nets add to them."""
        for largest in _largest((*args, *kwargs.values())) if self._running != NETWORK else ():
            found += [(self._running, "output", largest), (self._running, "share", largest * (ROOM / MOST))]
        self._running = name

    def _held(self, values: list[tuple[str, str, Any]]) -> bool:
        """True if all outputs stayed in the room measured for them; refuses the block of one that overflowed."""
        numbers = _numbers([each.float() for *_, pair in values for each in pair])
        for (block, name, _), low, high in zip(values, numbers[::2], numbers[1::2], strict=True):
            known = self.sizes.get(name, ValueSizes())
            vanished = low == 0.0 and known.least > 0.0  # as after an overflow
            if high <= known.output * ROOM and not vanished:
                continue
            if not math.isfinite(high) or low == 0.0:  # core's clamps may hide an overflow
                self._refused.add(block)
            return False
        return True

    def write(self) -> None:
        if self.path is None:
            return
        try:
            write_json(self.path, {"sizes": {name: astuple(each) for name, each in self.sizes.items()}})
        except OSError as error:
            log.warning("AnyGPU: %s cannot be written (%s): measured again next time", self.path, first_line(error))


class Level(Tensor):
    """An fp32 number per latent, such as a noise level, that stays so when core casts it to the stream's dtype, since
    networks take the sine of a thousand times it and would amplify its rounding."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty_like and kwargs.get("dtype") is HALF:  # core copies a number from the host into it
            kwargs["dtype"] = FULL
        result = super().__torch_function__(func, types, args, kwargs)
        if not isinstance(result, cls):
            return result
        if result.dtype is HALF and func in (Tensor.to, Tensor.type, Tensor.half) and type(args[0]) is cls:
            result = args[0].to(result.device)
        return result if result.ndim < 2 else result.as_subclass(Tensor)  # an embedding may be cast


def as_level(value: Any, latents: Tensor) -> Any:
    """``value``, as a :class:`Level` if it is an fp32 number for each of ``latents``."""
    numbers = type(value) is Tensor and value.dtype is FULL and value.shape == latents.shape[:1]
    return value.as_subclass(Level) if numbers else value


def kept_at(patcher: Any, folder: Path | None, machine: str) -> Path | None:
    """The file for sizes of a MODEL and its LoRAs on ``machine`` (key of GPU and driver); None if it has no file."""
    made = patcher.cached_patcher_init
    source = made[1][0] if made and made[1] else None
    if folder is None or not isinstance(source, str):
        return None
    import comfyui_version  # absent in tests without ComfyUI

    try:
        content = content_of(Path(source))
    except CheckpointError:
        return None
    patches = [(key, [*map(_facts_of, patcher.patches[key])]) for key in sorted(patcher.patches)]
    facts = [VERSION, content, str(patcher.model_dtype()), machine, comfyui_version.__version__, patches]
    return folder / FOLDER / f"{hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()[:32]}.json"


def _facts_of(patch: Any) -> list[Any]:
    """The strengths of one of core's patches, and some values of its tensors, to tell patches apart."""
    some = (each.flatten()[:: max(1, each.numel() // 8)] for each in tensors_in(getattr(patch[1], "weights", patch[1])))
    return [patch[0], patch[2], *(to_host(each).float().tolist() for each in some)]


def blocks_of(network: nn.Module) -> Iterator[MeasuredBlock]:
    """The children of ``network`` and of its containers that have layers with products."""
    containers = [("", network)]
    while containers:
        prefix, container = containers.pop()
        for child_name, child in container.named_children():
            name = f"{prefix}{child_name}"
            if isinstance(child, CONTAINERS):
                containers.append((f"{name}.", child))
                continue
            modules = child.named_modules(prefix=name)
            layers = {path: each for path, each in modules if is_linear(each) or is_convolution(each)}
            if layers:
                yield MeasuredBlock(name, child, layers)


def _numbers(values: list[Tensor]) -> list[float]:
    """Scalars on any devices as Python numbers, by one copy to the host."""
    return to_host(torch.stack([each.to(values[0].device) for each in values])).tolist()  # type: ignore[no-any-return]


def _floats(values: Any) -> Iterator[Tensor]:
    """The non-empty fp16 and fp32 tensors in nested arguments or results, but for scalars."""
    if isinstance(values, (list, tuple)):
        for value in values:
            yield from _floats(value)
    elif type(values) is Tensor and values.dtype in (HALF, FULL) and values.ndim and values.numel():
        yield values


def _largest(values: Any) -> Iterator[Tensor]:
    """The largest absolute value of each tensor in ``values``, masks' huge ones aside."""
    for value in _floats(values):
        unmasked = torch.where(value.abs() < NEVER, value, 0.0)  # masks hide with the largest number of their dtype
        yield torch.linalg.vector_norm(unmasked, math.inf, dtype=FULL)


def _cast(values: Any, before: torch.dtype, after: torch.dtype) -> Any:
    """Nested ``values`` with tensors of the dtype ``before`` in ``after``, but for those of one dimension."""
    if type(values) in (list, tuple):
        return type(values)(_cast(value, before, after) for value in values)
    rows = type(values) is Tensor and values.ndim > 1  # not noise levels: some networks embed them in fp16
    return values.to(after) if rows and values.dtype is before else values


def _widen(_module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    return _cast(args, HALF, FULL), {name: _cast(value, HALF, FULL) for name, value in kwargs.items()}


def _watch(values: list[Any], block: str, name: str, _module: nn.Module, _args: Any, output: Any) -> None:
    """Add the least and the largest row maximum of each output to ``values``."""
    for tensor in _floats(output):
        values.append((block, name, torch.linalg.vector_norm(tensor, math.inf, dim=-1).aminmax()))


def _measure(
    found: list[Any], block: str, own: str, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any
) -> None:
    """Add the sizes of a forward to ``found``: for ``block``, and for its layer ``own``, empty for other modules."""
    linear, operands = SETTINGS in module.__dict__ and is_linear(module), [*_floats(args)]
    shares = [largest * (ROOM / MOST) for largest in _largest((*args, *kwargs.values()))]
    if linear:
        reach = module.__dict__[SETTINGS].reach
        shares += [torch.linalg.vector_norm(x, dim=-1, dtype=FULL).amax() * (reach / MOST) for x in operands]
    for result in _floats(output):
        largest = torch.linalg.vector_norm(result, math.inf, dim=-1, dtype=FULL)  # of each row
        shares.append(largest.amax() * (ROOM / MOST))
        found += [(own, "output", largest.amax()), (own, "least", largest.amin())] if own else []
    found += [(name, "share", share) for name in {block, own or block} for share in shares]
    if own:
        counts = [x.shape[:-1].numel() if linear and x.dtype is FULL else NEVER for x in operands]
        found.append((own, "rows", torch.tensor(float(max(counts, default=NEVER)))))
