"""Packages of others, imported where they are used, with one line when one is broken; and transformers' models, built
without ``from_pretrained``: it replaces torch's default dtype and more for the whole process, and two that overlap
leave some so for good (huggingface/transformers#44940)."""

from __future__ import annotations

import copy
import importlib
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import nn

from .errors import MissingPackageError, first_line

MOST_CHARACTERS = 2**17  # of a prompt: no encoder reads more, but of white space
CHARACTERS = 16  # assumed for a token at first
MARGIN = 32  # tokens next to a cut that may differ from those of the whole text
INSTALL = "Install it into the Python that runs ComfyUI or anygpu: python -m pip install -U {name}"
_importing = threading.RLock()  # diffusers and its parts replace their modules at import: others would get the old ones


def imported(name: str) -> ModuleType:
    """The module ``name``; MissingPackageError where it is absent, or breaks while it is imported."""
    try:
        with _importing:  # a forecast may import while a node does
            return importlib.import_module(name)
    except Exception as error:  # a broken compiled part raises nearly anything while a package is imported
        raise unusable(name, error) from error


def attribute(module: str, name: str) -> type:
    """The class ``name`` of package ``module``, which may import more on access; MissingPackageError if unusable."""
    try:
        with _importing:
            return getattr(imported(module), name)
    except MissingPackageError:
        raise
    except AttributeError as error:
        found = f"the installed {module} has no {name}"
        raise MissingPackageError(found, expected=f"a {module} that has it", fix=INSTALL.format(name=module)) from error
    except Exception as error:  # lazy modules import their dependencies here
        raise unusable(module, error) from error


def unusable(name: str, error: Exception) -> MissingPackageError:
    """The error for a package that cannot be imported; torchvision is named where that is missing or broken."""
    text, causes = first_line(error), (error, error.__cause__, error.__context__)
    if "torchvision" in repr(causes):
        state, fix = "broken", "Reinstall torchvision with the same index as torch, or uninstall it."
        if any(isinstance(each, ModuleNotFoundError) and each.name == "torchvision" for each in causes):
            state, fix = "missing", "Install torchvision with the same index as torch."
        found = f"package {name!r} cannot be imported because torchvision is {state} ({text})"
        return MissingPackageError(found, expected="a torchvision that matches the installed torch", fix=fix)
    found = f"package {name!r} cannot be imported ({text})"
    return MissingPackageError(found, expected=f"a working {name}", fix=INSTALL.format(name=name))


def empty_encoder(cls: Any, config: Any, dtype: torch.dtype) -> nn.Module:
    """A ``cls`` of transformers, parameters on ``meta`` and buffers on the host; all configs in it name ``dtype``."""
    config = copy.deepcopy(config)
    _set_dtype(config, None)  # a model inside it with a dtype of its own would change torch's default
    with torch.device("meta"):
        module: nn.Module = cls(config)
    with torch.no_grad():
        _fill_buffers(module, module)
    for member in module.modules():
        if hasattr(member, "_init_weights"):
            _set_dtype(member.config, dtype)
    return module


def _set_dtype(config: Any, dtype: torch.dtype | None) -> None:
    """Set ``dtype`` in a config and those inside it."""
    config.dtype = dtype
    for name in getattr(config, "sub_configs", ()):
        if getattr(config, name, None) is not None:
            _set_dtype(getattr(config, name), dtype)


def _fill_buffers(model: Any, module: nn.Module) -> None:
    """Give ``module`` and its children host buffers, filled by ``_init_weights`` of ``model``, the nearest around."""
    if next(module.buffers(), None) is None:  # what stays on meta needs no values
        return
    for child in module.children():
        _fill_buffers(child if hasattr(child, "_init_weights") else model, child)
    for name, buffer in module._buffers.items():
        module._buffers[name] = None if buffer is None else torch.empty_like(buffer, device="cpu")
    model._init_weights(module)


def names_in(module: Any, names: Iterable[str]) -> dict[str, str]:
    """Each of a file's ``names`` that has a place in the model, mapped to its name there: older files differ."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    rules: list[Any] = get_model_conversion_mapping(module)
    wanted = module.state_dict()
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if not isinstance(rule, WeightRenaming)]
    prefix = module.base_model_prefix
    renamed = {name: rename_source_key(name, renamings, converters, prefix, wanted)[0] for name in names}
    towers = ("", "text_model.", "vision_model.")  # transformers before 5.6 has them where a model is one tower alone
    return {name: tower + new for name, new in renamed.items() for tower in towers if tower + new in wanted}


def fill(module: Any, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> list[str]:
    """Make ``tensors``, by the model's names, its parameters, in fp32 where its class asks for it in ``dtype``; returns
    missing names. Of a tied pair one may be missing; two that differ stay apart. RuntimeError for other shapes."""
    wide = _kept_in_fp32(module, dtype)
    widened = {name for name, tensor in tensors.items() if tensor.is_floating_point() and wide and wide.search(name)}
    values = {name: tensor.float() if name in widened else tensor for name, tensor in tensors.items()}
    missing = set(module.load_state_dict(values, strict=False, assign=True).missing_keys)
    for one, other in module.all_tied_weights_keys.items():
        if {one, other} <= missing:
            continue
        source, target = (one, other) if other in missing else (other, one)
        parameter, owner = module.get_parameter(source), target.rpartition(".")
        if target in missing or torch.equal(parameter, module.get_parameter(target)):
            setattr(module.get_submodule(owner[0]), owner[2], parameter)
            missing.discard(target)
    return sorted(missing)


def _kept_in_fp32(module: Any, dtype: torch.dtype) -> re.Pattern[str] | None:
    """A pattern of the names that the model's class keeps in fp32 when the rest is ``dtype``; None for none.
    Source: ``PreTrainedModel._get_dtype_plan``."""
    words = {*(getattr(module, "_keep_in_fp32_modules_strict", None) or ())} if dtype.itemsize == 2 else set()
    if dtype is torch.float16:
        words |= {*(getattr(module, "_keep_in_fp32_modules", None) or ())}
    return re.compile("|".join(rf"(^|\.){word}($|\.)" for word in sorted(words))) if words else None


def beginning(tokenizer: Any, text: str, room: int, check: Callable[[], None] = lambda: None) -> str:
    """The beginning of ``text`` that holds its first ``room`` tokens, and a little more: at most 131,072 characters.
    ``check`` is called between attempts and may raise to cancel."""
    count = CHARACTERS * (room + MARGIN)
    while count < min(len(text), MOST_CHARACTERS):
        check()
        if len(tokenizer(text[:count], add_special_tokens=False, verbose=False)["input_ids"]) > room + MARGIN:
            break
        count *= 2
    return text[: min(count, MOST_CHARACTERS)]
