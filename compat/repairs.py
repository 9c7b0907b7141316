"""Repairs of single layers whose results are not finite, applied to a module for a while, and saved for each model: a
layer's name and a way. The module stays as it is; its forward runs under a mode that changes its operations' inputs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from .durable import saved_json, write_json
from .memory.parts import Undo
from .transforms.attention_chunks import chunked
from .transforms.fp16_layers import reach_of, row_scales

log = logging.getLogger(__name__)

FP32, REPLACED, SCALED, ATTENTION = "fp32", "zeros", "scaled", "attention"
NARROW = (torch.float16, torch.bfloat16)
AS_IS = ("__get__", "__set__", "__setitem__", "data_ptr", "is_floating_point", "view")  # of bits, computing nothing
TO_NARROW = (torch.Tensor.half, torch.Tensor.bfloat16)
MEANINGS = {
    FP32: "computed in fp32",
    REPLACED: "with zeros for the weights that are not finite",
    SCALED: "in safe fp16: an fp32 stream around products scaled by powers of two",
    ATTENTION: "with another attention, exact and in fp32",
}
LIMIT = torch.finfo(torch.float16).max
FILE = "doctor.json"
PLAIN = (torch.Tensor, nn.Parameter)  # whose values are what they hold; subclasses may hold packed bytes


@dataclass(frozen=True, slots=True)
class Repair:
    """One layer, by its dotted name after its network's, computed in another ``way``, of :data:`MEANINGS`."""

    layer: str
    way: str

    def __str__(self) -> str:
        return f"{self.layer} {MEANINGS[self.way]}"


class Widened(TorchFunctionMode):
    """Operations on fp16 and bf16 tensors in fp32, casts to these dtypes included; in-place ones keep their target."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name in AS_IS or kwargs.get("out") is not None:
            return func(*args, **kwargs)
        if func in TO_NARROW:
            return args[0].float()
        if name.endswith("_") and not name.endswith("__"):
            return func(args[0], *widened(args[1:]), **mapped(kwargs, widened))
        return func(*widened(args), **mapped(kwargs, widened))


class Scaled(Widened):
    """:class:`Widened` with Linears of fp16 operands, whose rows are divided so that no sum leaves fp16's range."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        scaled = _scaled_linear(*args, **(kwargs or {})) if func is functional.linear else None
        return super().__torch_function__(func, types, args, kwargs) if scaled is None else scaled


def _scaled_linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor | None:
    """A Linear's fp32 result from a product in fp16; None for packed operands, and weights beyond fp16's range."""
    if type(input) not in PLAIN or type(weight) not in PLAIN or float(weight.detach().abs().amax()) > LIMIT:
        return None
    scale = row_scales(input.float(), reach_of(weight.detach()))
    product = functional.linear((input.float() / scale).half(), weight.half()).float() * scale
    return product if bias is None else product + bias.float()


_asked = threading.local()  # two GPUs may sample at once, each from a thread of its own


def other_attention_asked() -> bool:
    """True within :class:`OtherAttention`, in this thread: the layer that runs may not use the usual kernel."""
    return bool(getattr(_asked, "depth", 0))


class OtherAttention(TorchFunctionMode):
    """Torch's attention computed in exact chunks, in fp32, by matrix products alone."""

    def __enter__(self) -> Any:
        _asked.depth = getattr(_asked, "depth", 0) + 1
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        _asked.depth -= 1
        super().__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        return _exact_attention(*args, **(kwargs or {}))


def _exact_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    """``functional.scaled_dot_product_attention``, computed in fp32 by :func:`chunked`; dropout is left out."""
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    gain = 1.0 if scale is None else scale * query.shape[-1] ** 0.5  # beyond the 1 / sqrt(D) of `chunked`
    lead = query.shape[:-2]
    if attn_mask is not None:
        attn_mask = _in_four_axes(attn_mask.expand(*lead, *attn_mask.shape[-2:]))
    query, key, value = (_in_four_axes(each) for each in (query, key, value))
    result = chunked(query.float() * gain, key, value, attn_mask, is_causal)
    return result.reshape(*lead, *result.shape[-2:]).to(value.dtype)


def _in_four_axes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[(None,) * (4 - tensor.ndim)] if tensor.ndim < 4 else tensor.flatten(0, -4)


def widened(value: Any) -> Any:
    """``value`` with fp32 for 16-bit floats, tensors and dtypes alike, in tuples and lists; dicts may be caches."""
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype in NARROW and type(value) in PLAIN else value
    if isinstance(value, torch.dtype):
        return torch.float32 if value in NARROW else value
    return value if isinstance(value, dict) else mapped(value, widened)


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """A tuple, list or dict with ``change`` applied to each item; any other value as it is."""
    if type(value) in (tuple, list):
        return type(value)(change(item) for item in value)
    return {key: change(item) for key, item in value.items()} if type(value) is dict else value


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The floating tensors that are not empty in a module's inputs or outputs, nested as they may be."""
    if isinstance(value, torch.Tensor):
        if value.is_floating_point() and value.numel():
            yield value
    elif isinstance(value, (tuple, list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)


@contextmanager
def repaired(networks: nn.ModuleDict, repairs: Iterable[Repair]) -> Iterator[None]:
    """Apply ``repairs`` to the layers of ``networks`` within the block; a layer that is not there is logged."""
    with Undo() as undo:
        for repair in repairs:
            try:
                module = networks.get_submodule(repair.layer)
            except AttributeError:
                log.warning("no layer %s to repair", repair.layer)
                continue
            for each in ("forward", "decode", "decode_tiled"):  # of a whole VAE core calls the last two alone
                if hasattr(module, each):
                    undo.set(module, each, _WAYS[repair.way](module, getattr(module, each)))
        yield


def _widened_under(
    mode: type[TorchFunctionMode], _module: nn.Module, forward: Callable[..., Any]
) -> Callable[..., Any]:
    """``forward`` under ``mode``, from inputs in fp32; its result is cast back to the 16-bit dtype they had, if any."""

    def run(*args: Any, **kwargs: Any) -> Any:
        given = next((t.dtype for t in tensors_in((args, kwargs)) if t.dtype in NARROW), None)
        with mode():
            out = forward(*widened(args), **mapped(kwargs, widened))
        return out if given is None else _narrowed(out, given)

    return run


def _narrowed(value: Any, dtype: torch.dtype) -> Any:
    """``value`` with its fp32 tensors cast to ``dtype``, in tuples, lists and dicts too."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.dtype == torch.float32 else value
    return mapped(value, lambda item: _narrowed(item, dtype))


def _with_zeros(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """``forward`` with zeros for NaN and infinities in the module's own floating parameters, unless they are packed."""

    def clean(*args: Any, **kwargs: Any) -> Any:
        own = dict(module._parameters)  # not those of layers inside: offloaders onload these during the forward
        try:
            for name, weight in own.items():
                if weight is not None and type(weight) in PLAIN and weight.is_floating_point() and not weight.is_meta:
                    module._parameters[name] = nn.Parameter(_finite(weight), requires_grad=False)
            return forward(*args, **kwargs)
        finally:
            module._parameters.update(own)

    return clean


def _finite(weight: torch.Tensor) -> torch.Tensor:
    values = weight.detach() if weight.element_size() > 1 else weight.detach().float()
    return torch.nan_to_num(values, 0.0, 0.0, 0.0).to(weight.dtype)


def _run_under(mode: type[TorchFunctionMode], _module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with mode():
            return forward(*args, **kwargs)

    return run


_WAYS: dict[str, Callable[[nn.Module, Callable[..., Any]], Callable[..., Any]]] = {
    FP32: partial(_widened_under, Widened), SCALED: partial(_widened_under, Scaled), REPLACED: _with_zeros,
    ATTENTION: partial(_run_under, OtherAttention),
}  # fmt: skip


class RepairStore:
    """The repairs that helped each model, in a file in the state ``folder``; with None nothing is saved."""

    def __init__(self, folder: Path | None) -> None:
        self.path = None if folder is None else folder / FILE

    def load(self, model: str) -> tuple[Repair, ...]:
        """The saved repairs of ``model``; rows that are damaged, or of an unknown way, are left out."""
        rows = self._all().get(model)
        kept = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
        repairs = (Repair(str(row.get("layer", "")), str(row.get("way"))) for row in kept)
        return tuple(repair for repair in repairs if repair.layer and repair.way in MEANINGS)

    def add(self, model: str, repair: Repair) -> None:
        self._write({**self._all(), model: [asdict(one) for one in dict.fromkeys((*self.load(model), repair))]})

    def forget(self, model: str) -> bool:
        """Delete the repairs of ``model``; False where it had none."""
        known = self._all()
        if model not in known:
            return False
        del known[model]
        self._write(known)
        return True

    def _all(self) -> dict[str, Any]:
        known = {} if self.path is None else saved_json(self.path)
        return known if isinstance(known, dict) else {}

    def _write(self, known: dict[str, Any]) -> None:
        if self.path is None:
            return
        try:
            write_json(self.path, known, indent=1)
        except OSError as error:
            log.warning("repairs could not be saved: %s", error)
