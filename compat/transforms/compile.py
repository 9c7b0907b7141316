"""The repeated blocks of a transformer or VAE through `torch.compile`: one graph each, for every prompt and strength.
Each block's own forward is compiled, beneath whatever hooks come later. The compiled function has a code object of its
own, so that its graphs leave with their pipeline; torch keeps nothing of ours in its global settings."""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn

from ..device.execution import COMPILED
from ..device.failures import is_shortage
from ..errors import UnsupportedError, first_line, require_choice, require_range
from ..memory.parts import Undo, transformer_blocks
from .fp16_layers import SETTINGS

log = logging.getLogger(__name__)

MODES: dict[str, str] = {
    "default": "compiles quickly",
    "max-autotune-no-cudagraphs": "times several ways to compute each product; takes minutes to compile, sometimes "
    "faster",
}
DYNAMIC: dict[str, str] = {
    "text": "one graph for any prompt length, and a second one for any size",
    "all": "one graph for any prompt length and size from the start, which can be slower",
    "none": "one graph for each prompt length and size",
}
COMPILED_AS = {"text": None, "all": True, "none": False}  # torch's word for it
LIMITED = "recompile_limit" in inspect.signature(torch.compile).parameters  # of one function alone, since torch 2.12
CACHE_SIZE, MOST_CACHED = 8, 256
WITH_OFFLOAD: dict[str, str] = {  # offload to why compile is refused with it; empty where each block is one graph
    "none": "",
    "model": "",
    "group": "",
    "sequential": "it moves weights between the layers of a block, so no block is one graph",
    "comfyui": "it streams weights between the layers of a block, so no block is one graph",
}
VAE_BLOCKS = (
    "HunyuanVideoResnetBlockCausal3D", "HunyuanVideo15ResnetBlock", "MochiResnetBlock3D", "LTXVideoResnetBlock3d",
)  # fmt: skip
STATES = 3  # dimensions of token states (B, N, D)
TEXT = {"encoder_hidden_states": 1, "encoder_attention_mask": -1, "attention_mask": -1}  # argument to its text length


@dataclass(frozen=True, slots=True)
class CompileSettings:
    """The user's settings of the compiler."""

    mode: str = "default"  # a key of MODES
    dynamic: str = "text"  # a key of DYNAMIC
    cache_size: int = CACHE_SIZE  # graphs per kind of block; one more size than that runs without
    vae: bool = False  # the VAE's blocks too
    backend: Any = "inductor"  # torch's name of a compiler, or a callable

    def __post_init__(self) -> None:
        require_choice("compile_mode", self.mode, MODES)
        require_choice("compile_dynamic", self.dynamic, DYNAMIC)
        require_range("compile_cache_size", self.cache_size, 1, MOST_CACHED, "graphs")


def require_offload(mode: str) -> None:
    """Raise UnsupportedError for an offload mode in which no block is one graph."""
    if reason := WITH_OFFLOAD.get(mode, ""):
        works = ", ".join(name for name, why in WITH_OFFLOAD.items() if not why)
        found, expected = f"compile with offload {mode!r}: {reason}", f"offload {works}"
        fix = "Choose one of these offload modes on the load node, or switch off compile."
        raise UnsupportedError(found, expected=expected, fix=fix)


class Compilation:
    """The compiled blocks of one part; their graphs live on when the part is prepared or read again.
    A compiler that fails is switched off for the part: its blocks run uncompiled, and ``failure`` says why."""

    def __init__(self, settings: CompileSettings) -> None:
        self.settings, self.failure = settings, ""
        self.blocks, self.graphs, self.compile_seconds = 0, 0, 0.0
        self.sizes: set[int] = set()  # numbers of video tokens that blocks were called with
        self._made: dict[CodeType, _Function] = {}  # by the code of a kind of block's forward

    def __str__(self) -> str:
        if self.failure:
            return f"compile off: {self.failure}"
        if not self.graphs:
            return "compile on: blocks are compiled on their first call"
        graphs = "1 graph" if self.graphs == 1 else f"{self.graphs} graphs"
        return f"compile on: {self.blocks} blocks in {graphs}, {self.compile_seconds:.0f} s to make them"

    def attach(self, module: nn.Module) -> Callable[[], None] | None:
        """Have the blocks of ``module`` compiled on their first call; returns an undo, None where it has no blocks.
        Raises UnsupportedError, changing nothing, where a block has an offloader's hooks or no method as forward."""
        blocks = list(self.blocks_in(module))
        if not blocks:
            return None
        undo = Undo()
        try:
            _open_graphs(module, undo)
            for block in blocks:
                self._compile(block, undo)
        except BaseException:
            undo.restore()
            raise
        self.blocks = len(blocks)
        return undo.restore

    def blocks_in(self, module: nn.Module) -> Iterator[nn.Module]:
        """The modules that become one graph each: repeated blocks of a transformer or a VAE; subclasses have others."""
        vae = (one for one in module.modules() if type(one).__name__ in VAE_BLOCKS)
        yield from list(transformer_blocks(module)) or vae

    def _compile(self, block: Any, undo: Undo) -> None:
        """Give ``block`` a forward that runs compiled, or as before where compiling is off or has failed."""
        stock = getattr(block.forward, "__func__", None)
        if stock is None or hasattr(block, "_hf_hook"):
            found = f"compile for a {type(block).__name__} that an offloader already moves"
            expected = "a block without offload hooks"
            raise UnsupportedError(found, expected=expected, fix="Take the offloader off, compile, and put it back.")
        function = self._made.setdefault(stock.__code__, _Function(stock, self.settings))

        def forward(block: Any, *args: Any, **named: Any) -> Any:
            if self.failure or not getattr(block, COMPILED):
                return stock(block, *args, **named)
            args, named = function.ready(args, named, self.sizes)
            try:
                return self._timed(function, block, args, named)
            except function.failures() as error:
                self.failure = failure_line(error)
                log.warning("%s; the blocks run uncompiled", self)
                return stock(block, *args, **named)

        undo.patch(block, forward)
        undo.set(block, COMPILED, True)

    def _timed(self, function: _Function, block: Any, args: Any, named: Any) -> Any:
        """The block's result; counts the graphs that the call made, and the seconds that took."""
        from torch._dynamo.utils import counters

        started, before = time.monotonic(), counters["stats"]["unique_graphs"]
        result = function(block, *args, **named)
        made = counters["stats"]["unique_graphs"] - before
        if made:
            self.graphs += made
            self.compile_seconds += time.monotonic() - started
        return result


class _Function:
    """One kind of block's forward, compiled: a copy of the function with a code object, and so graphs, of its own."""

    def __init__(self, stock: Any, settings: CompileSettings) -> None:
        self.settings = settings
        rest = stock.__globals__, stock.__name__, stock.__defaults__, stock.__closure__
        copied = FunctionType(stock.__code__.replace(), *rest)
        copied.__kwdefaults__ = stock.__kwdefaults__
        self.plain, self.names = copied, list(inspect.signature(stock).parameters)[1:]  # names: of its arguments
        self.compiled: Any = None

    def __call__(self, block: Any, *args: Any, **named: Any) -> Any:
        """The result for ``block``; the first call, and any whose sizes no graph has, makes a graph."""
        if self.compiled is None:
            self.compiled = torch.compile(self.plain, fullgraph=True, **self._options())
        from torch._dynamo import config

        with nullcontext() if LIMITED else config.patch(recompile_limit=self.settings.cache_size):
            return self.compiled(block, *args, **named)

    def _options(self) -> dict[str, Any]:
        asked = self.settings
        options: dict[str, Any] = {"backend": asked.backend, "dynamic": COMPILED_AS[asked.dynamic]}
        options |= {"recompile_limit": asked.cache_size} if LIMITED else {}
        return options | ({"mode": asked.mode} if asked.backend == "inductor" else {})

    def ready(self, args: tuple[Any, ...], named: dict[str, Any], sizes: set[int]) -> tuple[Any, dict[str, Any]]:
        """The arguments with plain strides and, unless ``dynamic`` is none, marks on dimensions that vary: the text's
        length, and the video's once ``sizes``, to which its number of tokens is added, has a second one."""
        args = tuple(_plain_strides(value) for value in args)
        named = {name: _plain_strides(value) for name, value in named.items()}
        if self.settings.dynamic == "none":
            return args, named
        from torch._dynamo import maybe_mark_dynamic

        given = {**dict(zip(self.names, args, strict=False)), **named}
        states = given.get("hidden_states")
        tokens = states.shape[1] if isinstance(states, torch.Tensor) and states.ndim == STATES else 0
        sizes.add(tokens)
        for name, value in given.items():
            if name in TEXT and isinstance(value, torch.Tensor):
                maybe_mark_dynamic(value, TEXT[name] % value.ndim)
            elif tokens > 1 and len(sizes) > 1:  # a second size: whatever is as long as the video varies with it
                _mark_tokens(value, tokens)
        return args, named

    def failures(self) -> tuple[type[BaseException], ...]:
        """The exceptions by which torch's compiler fails."""
        from torch._dynamo import exc

        newer = ("FailOnRecompileLimitHit", "RecompileLimitExceeded")  # which derive from no exception of dynamo's
        return (exc.TorchDynamoException, *(getattr(exc, name) for name in newer if hasattr(exc, name)))


@contextmanager
def uncompiled(module: nn.Module) -> Iterator[None]:
    """Run the blocks of ``module`` uncompiled within the ``with``: for layers that get a forward for one pass only."""
    with Undo() as undo:
        for block in (block for block in module.modules() if getattr(block, COMPILED, False)):
            undo.set(block, COMPILED, False)
        yield


def failure_line(error: BaseException) -> str:
    """The compiler's failure in one line; raises its cause if that is not the compiler's: no memory, or a cancel."""
    inner = getattr(error, "inner_exception", None) or error.__cause__ or error
    if inner is not error and (is_shortage(inner) or not isinstance(inner, Exception)):
        raise inner from error
    many = "more sizes than compile_cache_size allows; raise it, or choose compile_dynamic all"
    return f"{type(inner).__name__}: {many if 'RecompileLimit' in type(error).__name__ else first_line(inner)}"


def _plain_strides(value: Any) -> Any:
    """``value`` with contiguous strides, to which a graph is bound; of those that need a copy, token states get one.
    A batch of one cut out of a longer sequence has that one's strides; a patch embedding's states are transposed."""
    if not isinstance(value, torch.Tensor):
        return value
    if not value.is_contiguous():
        return value.contiguous() if value.ndim == STATES else value
    plain = torch.empty(value.shape, device="meta").stride()
    if value.stride() != plain:
        value = value.as_strided(value.shape, plain)
    return value.data if value._is_view() else value  # a graph is bound to the shape of what a view was taken of


def _mark_tokens(value: Any, tokens: int) -> None:
    """Mark dimension 0 or 1 as dynamic where ``tokens`` long, in a tensor or each of those in a tuple, list or dict."""
    from torch._dynamo import maybe_mark_dynamic

    if isinstance(value, torch.Tensor) and tokens in value.shape[:2]:
        maybe_mark_dynamic(value, value.shape.index(tokens))
    elif isinstance(value, (Mapping, tuple, list)):
        for item in value.values() if isinstance(value, Mapping) else value:
            _mark_tokens(item, tokens)


class Strengths(dict[str, Any]):
    """Strengths of a layer's LoRAs as tensors, so that another strength needs no other graph.
    A 0-d fp64 tensor multiplies another tensor exactly as the Python number does."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__()
        for name, value in values.items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        held = value if isinstance(value, torch.Tensor) else torch.tensor(float(value), dtype=torch.float64)
        super().__setitem__(name, held)


def _open_graphs(module: nn.Module, undo: Undo) -> None:
    """Turn values that differ between blocks or runs into tensors, for one graph: LoRA strengths, norms, padding."""

    def back(layer: Any, former: dict[str, Any]) -> None:  # with the strengths that were set meanwhile
        former.clear()
        former.update({name: float(value) for name, value in layer.scaling.items()})
        layer.scaling = former

    layer: Any
    for layer in module.modules():
        former = getattr(layer, "scaling", None)
        if type(former) is dict and hasattr(layer, "lora_A"):
            layer.scaling = Strengths(former)
            undo.append(partial(back, layer, former))
        known = getattr(layer, SETTINGS, None)
        if known is not None and isinstance(known.reach, float):
            undo.set(known, "reach", torch.tensor(known.reach, dtype=torch.float64))
        padding = getattr(getattr(layer, "processor", None), "padding", None)
        if padding is not None and not padding.traced:
            undo.set(padding, "traced", True)
