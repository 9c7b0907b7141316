"""The parts of a pipeline: modules by name, each read from disk on first use; the adapters on them; their bytes.
Adapters, such as LoRAs, belong to a pipeline, and several pipelines share a part. Another structure is put on at its
place in the one order of operations, with offload and later rewrites off meanwhile. Strengths change in place."""

from __future__ import annotations

import re
import time
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any, Protocol, cast

import torch
from torch import nn

Reader = Callable[[Any], nn.Module]
Prepare = Callable[[str, nn.Module], Callable[[], Any]]
BLOCK = re.compile(r"^(.*?(?:blocks|layers|layer|block)\.\d+)\.")
DOUBLE_SPARES = 0.35  # share of a single block's activations that a double block does not have
BETWEEN_SPARES = 0.55  # share of the activations that is freed when a block ends, before the next one comes
BY_BLOCK = ("transformer", "unet", "text_encoder")  # under offload group; other parts come layer by layer
PACED = ("sampling", "painting")  # stages whose steps are the model's own
WHOLE = "image_encoder"  # in every mode: its attention pooling reads weights that hooks on its layers do not see


def role_of(part: str) -> str:
    """The part without the number that diffusers gives to further ones: ``transformer`` for ``transformer_2``."""
    return re.sub(r"_\d+$", "", part)


def denoises(part: str) -> bool:
    """True if a sampler calls this part at each step."""
    return role_of(part) in ("transformer", "unet")


@dataclass(frozen=True, slots=True)
class ProgressStage:
    """A stage of a long call; its text is, for example, ``moving vae 0.1 of 0.3 GB``."""

    name: str  # by which progress bars and times know it
    detail: str = ""
    counted: bool = False  # the detail says how far it is
    resumable: bool = False  # the same work, begun anew, goes on after this step

    def __str__(self) -> str:
        return f"{self.name} {self.detail}" if self.detail else self.name


class Silent:
    """A progress that reports nothing and is never cancelled."""

    def step(self, done: int, total: int, stage: ProgressStage, preview: Any = None) -> None:
        """Nothing."""

    def check(self) -> None:
        """Nothing."""

    def notify(self, text: str) -> None:
        """Nothing."""


_told: set[str] = set()


def tell_once(progress: Any, text: str) -> None:
    """Show the user ``text``, such as a note on a change of behaviour, unless this process has shown it before."""
    if text not in _told:
        _told.add(text)
        progress.notify(text)


class KnownToHost:
    """Attributes by which a host's caches recognise a pipeline; its offloader knows the host's models."""

    __slots__ = ()
    offloader: Any

    def get_models(self) -> list[Any]:
        """The host's own handles of all parts that were used."""
        return list(self.offloader.get_models())

    def is_dynamic(self) -> bool:
        """True if the host pages the weights by itself: never."""
        return False


class Undo(list[Callable[[], Any]]):
    """Undo stack of changes to modules, the newest last; in a ``with`` they hold for the block."""

    def __enter__(self) -> Undo:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of ``owner`` itself, not of its class, until :meth:`restore`."""
        own = vars(owner)
        self.append(partial(setattr, owner, name, own[name]) if name in own else partial(delattr, owner, name))
        setattr(owner, name, value)

    def patch(self, module: Any, forward: Callable[..., Any]) -> None:
        """Give ``module``, and no other of its class, another forward."""
        self.set(module, "forward", MethodType(forward, module))

    def restore(self) -> None:
        """Take everything back, the newest change first; calling it again does nothing."""
        while self:
            self.pop()()


class Parts(dict[str, nn.Module]):
    """The modules of a pipeline by name, each read from disk on first use, so that memory peaks at the largest.
    ``prepare`` (``transforms.order.Preparation``) rewrites a part just read and returns a function that undoes this. By
    part name, ``fallbacks`` have functions after which the part is read in a safer precision, where the user did not
    choose it, and ``active_adapters`` :class:`ActiveAdapters`."""

    def __init__(self, readers: Mapping[str, Reader], prepare: Prepare | None = None) -> None:
        super().__init__()
        self.readers, self.prepare = dict(readers), prepare
        self.undo: dict[str, Callable[[], Any]] = {}
        self.fallbacks: dict[str, Callable[[], None]] = {}
        self.active_adapters: dict[str, Any] = {}
        self.reading_seconds = 0.0

    def read(self, name: str, progress: Any = None) -> nn.Module:
        """The module of that name, read and prepared if this is its first use."""
        if name not in self:
            started = time.perf_counter()
            module = self.readers[name](progress or Silent())
            if self.prepare is not None:
                self.undo[name] = self.prepare(name, module)
            self[name] = module
            self.reading_seconds += time.perf_counter() - started
        return dict.__getitem__(self, name)

    def __missing__(self, name: str) -> nn.Module:
        return self.read(name)

    def drop(self, name: str) -> None:
        self.pop(name, None)
        self.undo.pop(name, None)
        self.active_adapters.pop(name, None)


class Adapters(Protocol):
    """The adapters that one pipeline puts on its parts."""

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the parts."""

    @property
    def key(self) -> Hashable:
        """Equal for adapters that :meth:`tune` can turn into one another."""

    @property
    def in_weights(self) -> bool:
        """True if they are merged into the weights, so that they cannot be switched off temporarily."""

    def step(self) -> Any:
        """The preparation step that applies them."""

    def tune(self, module: nn.Module, active: bool) -> None:
        """Set the strengths of the layers on the part, or switch them off."""


@dataclass(slots=True)
class ActiveAdapters:
    """Adapters on a part: ``owner`` is None once no pipeline needs them; ``plain`` prepares the part without them."""

    key: Hashable
    in_weights: bool
    owner: Callable[[], Any]
    plain: Any
    order: Any


@contextmanager
def adapters_on(
    parts: Parts, part: str, adapters: Adapters | None, detach: Callable[[str], None], progress: Any = None
) -> Iterator[nn.Module]:
    """The part for the block, with ``adapters`` in force if they are for it; then they are off, unless merged.
    Adapters with another key come off first, and where none are wanted, merged ones and those that no pipeline needs.
    ``detach`` brings the part to host memory, without hooks, so that it can be changed."""
    wanted = adapters if adapters is not None and part in adapters.parts else None
    module, active = parts.read(part, progress), parts.active_adapters.get(part)
    if wanted is not None:
        if active is None or active.key != wanted.key:
            _change(parts, part, wanted, detach)
        parts.active_adapters[part].owner = weakref.ref(wanted)
    elif active is not None and (active.in_weights or active.owner() is None):
        _change(parts, part, None, detach)
    try:
        if wanted is not None:
            wanted.tune(module, True)  # in the try: where it raises, half of the layers may be on
        yield module
    finally:
        if wanted is not None and part in parts:
            wanted.tune(module, False)


def _change(parts: Parts, part: str, wanted: Adapters | None, detach: Callable[[str], None]) -> None:
    """Undo the part's adapters and all later steps, then repeat these with ``wanted``; without any if that fails."""
    active: Any = parts.active_adapters.get(part)  # there are some where none are wanted
    module, undo = parts[part], cast(Any, parts.undo[part])
    plain: Any = parts.prepare if active is None else active.plain
    step: Any = None if wanted is None else wanted.step()
    preparation, order = (plain, active.order) if step is None else (plain.with_steps([step]), step.order)
    with torch.inference_mode(False), torch.no_grad():
        detach(part)
        undo.back_to(order)
        parts.active_adapters.pop(part, None)
        try:
            preparation.apply_from(part, module, undo, order)
        except BaseException:
            plain.apply_from(part, module, undo, order)  # the part goes on without them
            raise
    if wanted is not None:
        owner, merged = weakref.ref(wanted), wanted.in_weights
        parts.active_adapters[part] = ActiveAdapters(wanted.key, merged, owner, plain=plain, order=order)


Outline = tuple[tuple[int, ...], torch.dtype]  # shape and dtype of a tensor
# Codec, packed rows, what lies beside them, columns rotated together, and what each use makes of them.
PackedForm = tuple[str, Outline, tuple[tuple[str, Outline], ...], int, Outline]


@dataclass(frozen=True, slots=True)
class PartBytes:
    """Bytes of one part on the device."""

    total: int
    block: int  # the largest block
    layer: int  # the largest layer
    inner: int = 0  # the largest layer inside a block; 0 if they were not counted separately
    outer: int = 0  # the largest layer outside the blocks, such as an embedding
    single: int = 0  # the largest single-stream block, in which the activations are most
    dense: int = 0  # that making the largest packed weight dense takes
    forms: tuple[tuple[PackedForm, int], ...] = ()  # of packed weights, and how many weights have each

    @property
    def passing(self) -> int:
        """Bytes of the groups that come and go: a block in use and the next, or a layer that is larger."""
        return max(2 * self.block, self.outer)

    def resident(self, mode: str, part: str, activations: int = 0) -> int:
        """Bytes of the part on the device at the peak under ``mode``: all, or its largest block or layer, which
        counts less where fewer than ``activations``, the bytes of a forward at its peak, are needed beside it."""
        if mode in ("none", "model") or part == WHOLE:
            return self.total
        by_block = mode == "group" and part.startswith(BY_BLOCK)
        if not self.inner:
            return self.block if by_block else self.layer
        largest = self.block if by_block else self.inner
        if by_block and self.single:
            largest = max(self.single, self.block - int(DOUBLE_SPARES * activations))
        return max(largest, self.outer - activations // 2)  # outside the blocks, before or after most activations

    def ahead(self, mode: str, part: str, activations: int = 0) -> int:
        """Bytes of weights ahead, beyond :meth:`resident`, if there is room: about a block; 0 if nothing streams.
        They come as a block ends, when part of its activations, which may be the peak by themselves, is freed."""
        if mode not in ("group", "sequential") or part == WHOLE:
            return 0
        if mode == "sequential" or not part.startswith(BY_BLOCK):
            return self.inner or self.layer
        blocks = 2 * self.block  # one in use and the next
        if self.single:  # several single blocks come ahead in the room of a double one
            blocks = max(blocks, self.single * (1 + self.block // self.single))
        between = blocks - int(BETWEEN_SPARES * activations)
        first = self.outer + self.block - activations // 2 if self.inner else 0  # which comes beside the embedding
        return max(0, max(between, first) - self.resident(mode, part, activations))


def part_bytes(entries: Mapping[str, int], block: re.Pattern[str] = BLOCK) -> PartBytes:
    """The bytes of a part from ``entries``, bytes by tensor name; the first group of ``block`` is a block's name."""
    layers, blocks, outside = Counter[str](), Counter[str](), set[str]()
    for name, size in entries.items():
        layer = name.rpartition(".")[0]
        layers[layer] += size
        inside = block.match(name)
        if inside is None:
            outside.add(layer)
        else:
            blocks[inside[1]] += size
    largest = max(layers.values(), default=0)
    return PartBytes(
        total=sum(entries.values()),
        block=max(blocks.values(), default=largest),
        layer=largest,
        inner=max((size for layer, size in layers.items() if layer not in outside), default=0),
        outer=max((layers[layer] for layer in outside), default=0),
        single=max((size for name, size in blocks.items() if name.startswith("single_")), default=0),
    )


BLOCK_LISTS = ("transformer_blocks", "single_transformer_blocks")


def transformer_blocks(transformer: nn.Module) -> Iterator[nn.Module]:
    """The repeated blocks of a transformer, in the order in which they run."""
    for name in BLOCK_LISTS:
        yield from getattr(transformer, name, ())


def submodule_at(block: nn.Module, path: str) -> Any:
    """The module, or attribute, at a dotted ``path`` such as ``ff.net.0``; None if there is none."""
    module: Any = block
    for name in path.split("."):
        module = getattr(module, name, None)  # a list has its modules by number as attributes too
    return module


def full_name(thing: Any) -> str:
    """Module and name of the class of ``thing``, by which exact stock classes are known."""
    return f"{type(thing).__module__}.{type(thing).__qualname__}"
