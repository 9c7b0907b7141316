"""Statistics of one call of core's network, kept on the device and read once: maxima of blocks, and spot checks.

A spot check computes a few values of a product or an attention call again, in fp32 by other kernels.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...compat.device.execution import to_host
from ...compat.doctor import DTYPES, INFINITE, PRODUCT, STUCK, WEIGHED, Finding, block_of, blocks_beside, lifeless_range
from ...compat.memory.parts import Undo
from ...compat.repairs import LIMIT, UNFIT, tensors_in
from .attention import BUILDS_SCORES, AttentionOnRequest, Heads, _named
from .layers import ByNetwork
from .ownership import is_linear

ROWS, COLUMNS = 4, 64  # of a product or of queries, and of outputs, that are computed again
NEAR, ROUGH = 0.1, 0.25  # relative error of kernels in 16 bits, and of those of other packs, such as int8 attention
JUMP = 30.0  # times the largest value that a block had before
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class Spot(NamedTuple):
    """One value that is read: a block's maximum, or a spot check's relative error; at ``bound`` it is a ``fault``."""

    layer: str
    value: Tensor
    fault: str = ""
    bound: float = math.inf
    dtype: torch.dtype = torch.float32


class StepWatch:
    """The statistics of the newest call of ``networks``.

    ``loud``: a block says nothing, or far more than in earlier samplings. ``finding``: what a spot check names.
    """

    def __init__(self, networks: nn.ModuleDict, compiled: bool = False) -> None:
        self.compiled = compiled  # its modules have no hooks then
        self.networks, self.loud, self.finding = networks, False, None
        network = next(iter(networks.values()))
        self.largest: dict[str, float] = _largest.setdefault(network, {})
        if network not in _blocks:
            _blocks[network] = [
                name for name, _ in networks.named_modules() if name and name == block_of(networks, name)
            ]
        self.blocks: list[str] = [] if compiled else _blocks[network]
        self.spots: list[Spot] = []
        self.now: dict[str, float] = {}
        self.stack: list[str] = []

    @contextmanager
    def on(self, closely: bool) -> Iterator[Callable[..., Any]]:
        """Watch one call, ``closely`` with spot checks; gives the attention that is to be core's override in it."""
        self.spots, self.stack = [], []
        with Undo() as undo:
            for name in self.blocks:
                block = self.networks.get_submodule(name)
                undo.append(block.register_forward_hook(functools.partial(self._block, name)).remove)
            for name, module in self.networks.named_modules() if closely and not self.compiled else ():
                if is_linear(module):
                    undo.append(module.register_forward_hook(functools.partial(self._product, name)).remove)
                elif name and next(module.children(), None) is not None:
                    undo.append(module.register_forward_pre_hook(lambda *_, name=name: self.stack.append(name)).remove)
                    undo.append(module.register_forward_hook(lambda *_: self.stack.pop() and None).remove)
            yield self._noted_attention if closely else AttentionOnRequest

    def fault(self, output: Any) -> str:
        """The fault of the call that returned ``output``; empty for none. Reads all statistics at once."""
        whole = torch.cat([tensor.detach().flatten().float() for tensor in tensors_in(output)])
        row = (*torch.aminmax(whole), *(spot.value for spot in self.spots))
        low, high, *values = to_host(torch.stack([value.float().to(whole.device) for value in row])).tolist()
        wrong = lifeless_range(low, high, whole.numel())
        self.finding, self.now = None, {}
        for spot, value in zip(self.spots, values, strict=True):
            if spot.fault in ("", STUCK):
                self.now[spot.layer] = max(value, self.now.get(spot.layer, 0.0))
            if spot.fault and value >= spot.bound and not wrong:
                wrong = INFINITE if math.isinf(value) else spot.fault
                self.finding = None if spot.fault == STUCK else self._found(spot, wrong)
        known = {name: self.largest.get(name) for name in self.now}
        self.loud = any(
            (value == 0 and known[name] != 0) or (known[name] is not None and value > JUMP * known[name] > 0)
            for name, value in self.now.items()
        )
        return wrong

    def keep(self) -> None:
        """Remember the maxima of a call that was right."""
        self.largest.update({name: max(value, self.largest.get(name, 0.0)) for name, value in self.now.items()})

    def _found(self, spot: Spot, fault: str) -> Finding:
        block = block_of(self.networks, spot.layer)
        blocks = blocks_beside(self.networks, block)
        kind, dtype = type(self.networks.get_submodule(spot.layer)).__name__, DTYPES.get(spot.dtype, str(spot.dtype))
        between = spot.fault == WEIGHED
        return Finding(spot.layer, kind, dtype=dtype, fault=fault, block=block, blocks=blocks, between=between)

    def _block(self, name: str, _module: nn.Module, _args: Any, output: Any) -> None:
        for tensor in () if torch.compiler.is_compiling() else tensors_in(output):
            fault = STUCK if tensor.dtype is torch.float16 else ""
            self.spots.append(Spot(name, torch.linalg.vector_norm(tensor.detach(), math.inf), fault, LIMIT))

    def _product(self, name: str, layer: Any, args: Any, output: Any) -> None:
        """Note the error of a Linear in a few values, and the largest that it is given."""
        weight, x = getattr(layer, "weight", None), args[0] if args else None
        bare = not getattr(layer, "weight_function", ()) and getattr(layer, "weight_lowvram_function", None) is None
        plain = all(isinstance(each, Tensor) and each.dtype in FLOATS for each in (weight, x, output))
        if torch.compiler.is_compiling() or not (bare and plain) or type(weight.data) is not Tensor or x.ndim < 2:
            return
        if x.dtype is torch.float16:
            self.spots.append(Spot(name, torch.linalg.vector_norm(x.detach(), math.inf), STUCK, LIMIT))
        first, last = (each.detach()[(0,) * (each.ndim - 2)] for each in (x, output))
        rows, columns = max(1, len(first) // ROWS), max(1, len(weight) // COLUMNS)
        given, some = first[::rows].float(), weight.detach()[::columns].to(x.device).float()
        bias = None if layer.bias is None else layer.bias.detach()[::columns].to(x.device).float()
        expected = functional.linear(given, some, bias)
        size = max(torch.finfo(x.dtype).eps, torch.finfo(weight.dtype).eps) * given.norm() * some.norm()
        self._note(name, last[::rows, ::columns], expected, size, PRODUCT, NEAR, output.dtype)

    def _noted_attention(self, before: Callable[..., Tensor] | None) -> Callable[..., Tensor]:
        """Core's attention, or the one that a repair asks for, each call of which is noted."""
        compute = AttentionOnRequest(before)

        def attention(func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
            result = compute(func, *args, **kwargs)
            if not isinstance(func, functools.partial) and not torch.compiler.is_compiling():
                bound = NEAR if before is None and func.__name__ in BUILDS_SCORES else ROUGH
                with suppress(*UNFIT):  # operands that only this kernel knows
                    self._attention(Heads.of(*args[:3], _named(func, args, kwargs)), result, bound)
            return result

        return attention

    def _attention(self, call: Heads, result: Tensor, bound: float) -> None:
        """Note the error of an attention call in a few queries of one head."""
        head, every = len(self.spots) % call.query.shape[1], max(1, call.query.shape[2] // ROWS)
        query, key, value = (each.detach()[0, head] for each in (call.query, call.key, call.value))
        scores = query[::every].float() @ key.float().mT * (call.gain / query.shape[-1] ** 0.5)
        if call.mask is not None:
            mask = call.mask.expand(*call.query.shape[:3], key.shape[0])[0, head, ::every]
            scores = scores.masked_fill(~mask, -math.inf) if mask.dtype is torch.bool else scores + mask.float()
        heads = result if call.split else result.unflatten(-1, (call.query.shape[1], -1)).transpose(1, 2)
        size = torch.finfo(query.dtype).eps * value.float().norm()
        name = self.stack[-1] if self.stack else next(iter(self.networks))
        self._note(
            name,
            heads.detach()[0, head, ::every],
            scores.softmax(-1) @ value.float(),
            size,
            WEIGHED,
            bound,
            query.dtype,
        )

    def _note(
        self, name: str, seen: Tensor, expected: Tensor, size: Tensor, fault: str, bound: float, dtype: Any
    ) -> None:
        error = (seen.float() - expected).norm() / (expected.norm() + ROWS * size)
        overflows = expected.isfinite().all() & ~seen.isfinite().all()  # which a later layer may hide
        error = torch.where(overflows, math.inf, error.nan_to_num(0.0))
        self.spots.append(Spot(name, error, fault, bound=bound, dtype=dtype))


_blocks = ByNetwork()  # names of the repeated blocks
_largest = ByNetwork()  # by name of a block, over the samplings that were right
