"""Readers of a pipeline's parts, strict about configuration and weights, and of its tools: tokenizers, processors."""

from __future__ import annotations

import math
from collections.abc import Callable, Container
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...compat.checkpoints.packed import Stored, is_table, pack, packable
from ...compat.checkpoints.weights import is_view, read_json, read_tensors
from ...compat.errors import CheckpointError
from ...compat.memory.host_weights import Views, mark_views
from ...compat.memory.statistics import amount
from ...compat.output_check import fault_in_weight
from ...compat.packages import attribute, empty_encoder, fill, names_in, unusable
from ..base import Progress, StageText
from ..family import FamilySpec
from ..files.part import PartFiles, construction, empty_weights, require_counts, require_plausible, stays, tool_configs
from ..keys import is_another_model, listed
from ..vae.chunked import decode_as_published


def reader_of(files: PartFiles) -> Callable[[Progress], nn.Module]:
    """A function that reads the part when it is called: on the CPU, in evaluation mode, outside inference mode."""

    def read(progress: Progress) -> nn.Module:
        with torch.inference_mode(False), torch.no_grad():
            build = _built_by_diffusers if files.library == "diffusers" else _built_by_transformers
            views: set[int] = set()
            module = build(files, progress, views).eval().requires_grad_(False)
            for name, value in files.settings.items():
                setattr(module, name, value)
            decode_as_published(module)
            mark_views(module, Views(frozenset(views), files.staged))
            return module

    return read


def _tensors(
    files: PartFiles, advance: Callable[[int], None], views: set[int], leave: Container[str] = ()
) -> dict[str, torch.Tensor]:
    """The tensors of a part, without those in ``leave``, each in the dtype that it becomes.

    Args:
        views: takes up the addresses of those that are views of their file.

    Raises:
        CheckpointError: a weight that cannot be right: nothing but zeros, or values that are not finite.
    """
    tensors: dict[str, torch.Tensor] = {}
    wanted = {name: entry for name, entry in files.entries.items() if name not in leave}
    for dtype in sorted({files.becomes(name) for name in wanted}, key=str):
        mine = {name: entry for name, entry in wanted.items() if files.becomes(name) is dtype}
        tensors |= read_tensors(mine, dtype, advance, files.mapped)
        if dtype is torch.float16 and dtype is not files.dtype:
            high = {name for name in mine if tensors[name].is_floating_point() and not tensors[name].isfinite().all()}
            tensors |= read_tensors({name: mine[name] for name in high}, files.dtype, lambda _: None)
    for name, tensor in tensors.items():
        if files.mapped and files.may_be_view(name, files.entries[name]):
            views.add(tensor.data_ptr())
        _require_sound(files, name, tensor)
    return tensors


def _require_sound(files: PartFiles, name: str, tensor: torch.Tensor) -> None:
    fault = fault_in_weight(name, tensor)
    if fault:
        raise CheckpointError(
            f"{fault} in the weight {name!r} of {str(files.entries[name].file)!r}",
            expected="weights as published",
            fix="Download this file again. A download that was not resumed properly can leave zeros.",
        )


def _advance(files: PartFiles, progress: Progress) -> Callable[[int], None]:
    total, done = sum(entry.total_bytes for entry in files.entries.values()), 0

    def advance(size: int) -> None:
        nonlocal done
        done += size
        progress.step(done, total, StageText("reading", f"{files.name} {amount(done, total)}", True))
        progress.check()

    return advance


def _built_by_diffusers(files: PartFiles, progress: Progress, views: set[int]) -> nn.Module:
    cls: Any = attribute("diffusers", files.cls)
    with construction(files.name, files.folder, len(files.entries), progress.check), empty_weights():
        module: nn.Module = cls.from_config(dict(files.config))
    files = _fitting(files, module, progress)
    advance = _advance(files, progress)
    layers = packable(module, exact=True) if files.keeps_packed or files.storage != "auto" else {}
    kept = {
        name: layers[layer]
        for name, entry in files.entries.items()
        if (layer := name.removesuffix(".weight")) in layers and stays(files, name, entry)
    }
    tensors = _tensors(files, advance, views, kept)
    for name, linear in kept.items():
        _keep_packed(files, name, linear, advance, views)
    module.load_state_dict(tensors, strict=False, assign=True)  # what is packed is there already
    return module


def _fitting(files: PartFiles, module: nn.Module, progress: Progress) -> PartFiles:
    """``files`` with the tensors of ``module``, which is empty; the few that it has no place for are left out and said.

    Raises:
        CheckpointError: the file has other tensors, or in other shapes; none of them was read.
    """
    wanted = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    unused = sorted(files.entries.keys() - wanted.keys())
    _require_same(
        files, list(wanted.keys() - files.entries.keys()), unused if unused and is_another_model(unused, wanted) else []
    )
    for name, shape in wanted.items():
        if tuple(files.entries[name].shape) != shape:
            raise _misfit(files, name, shape)
    if not unused:
        return files
    progress.notify(f"{files.name}: tensors that {files.cls} has no place for are left out: {listed(unused)}")
    return replace(files, entries={name: files.entries[name] for name in wanted})


def _keep_packed(
    files: PartFiles, name: str, layer: nn.Linear | nn.Embedding, advance: Callable[[int], None], views: set[int]
) -> None:
    """Give ``layer`` its weight as the file has it."""
    entry = files.entries[name]
    if tuple(entry.shape) != tuple(layer.weight.shape):
        raise _misfit(files, name, tuple(layer.weight.shape))
    stored = read_tensors({name: entry}, None, advance, files.mapped)[name]
    if files.mapped and is_view(entry):
        views.add(stored.data_ptr())
    factors = None
    if entry.scale is not None:
        scale = entry.scale  # of one number, or of rows in the order of the weight's
        if math.prod(scale.shape) > 1:
            scale = replace(scale, swapped=entry.swapped, heads=entry.heads)
        factors = read_tensors({name: scale}, torch.float32, lambda _bytes: None)[name].reshape(-1, 1)
        _require_sound(files, name, factors[:, 0])
    _require_sound(files, name, stored)
    pack(layer, stored, factors, files.dtype, entry.codec, files.by_bits)


def _built_by_transformers(files: PartFiles, progress: Progress, views: set[int]) -> nn.Module:
    """The module as transformers builds it, which knows the older names of its tensors."""
    cls: Any = attribute("transformers", files.cls)
    with construction(files.name, files.folder, len(files.entries), progress.check):
        if files.folder.is_dir():
            config = cls.config_class.from_pretrained(str(files.folder), local_files_only=True, trust_remote_code=False)
        else:
            config = cls.config_class.from_dict(dict(files.config))
        module: Any = empty_encoder(cls, config, files.dtype)
        names = names_in(module, files.entries)
    shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    for name, there in names.items():
        if tuple(files.entries[name].shape) != shapes[there]:
            raise _misfit(files, name, shapes[there])
    files = replace(files, entries={name: files.entries[name] for name in names})
    advance = _advance(files, progress)
    layers = {f"{name}.weight": layer for name, layer in module.named_modules()}
    kept = {
        name: layers[there]
        for name, there in names.items()
        if stays(files, name, files.entries[name])
        and (type(layers.get(there)) is nn.Linear or (type(layers.get(there)) is nn.Embedding and is_table(name)))
    }
    tensors = _tensors(files, advance, views, kept)
    missing = set(fill(module, {names[name]: tensor for name, tensor in tensors.items()}, files.dtype))
    for name, layer in kept.items():
        _keep_packed(files, name, layer, advance, views)
    for one, other in module.all_tied_weights_keys.items():  # two tables of one weight
        for target, source in ((one, other), (other, one)):
            if target in missing and isinstance(layers.get(source), Stored):
                if layers[target] is not layers[source]:  # newer transformers share the table itself
                    pack(layers[target], layers[source].stored, None, files.dtype, layers[source].codec)
                missing.discard(target)
    _require_same(files, list(missing - {names[name] for name in kept}), [])
    return module


def _require_same(files: PartFiles, missing: list[str], unexpected: list[str]) -> None:
    if missing or unexpected:
        wrong = f"{'missing' if missing else 'unexpected'} tensors {listed(sorted(missing or unexpected))}"
        raise CheckpointError(
            f"{wrong} in the {files.name} of {str(files.folder)!r}",
            expected=f"the tensors of {files.cls} as config.json describes it",
            fix="Download config.json and weights from the same place.",
        )


def _misfit(files: PartFiles, name: str, shape: tuple[int, ...]) -> CheckpointError:
    found = tuple(files.entries[name].shape)
    return CheckpointError(
        f"the weights of the {files.name} in {str(files.folder)!r} do not fit its config.json ({name} is {found})",
        expected=f"{shape}, as {files.cls} is described",
        fix="Download config.json and weights from the same place.",
    )


def tool_reader(family: FamilySpec, library: str, folder: Path) -> Callable[[], Any]:
    """Reads a configuration (``diffusers``) or a tokenizer or processor (``transformers``)."""

    def read() -> Any:
        if library == "diffusers":
            file = next((f for f in sorted(folder.glob("*_config.json"))), folder / "scheduler_config.json")
            config = read_json(file, f"the {folder.name}")
            require_plausible(folder.name, file, config, [tool_configs(family).get(folder.name, {})])
            return config
        for file in folder.glob("*config.json"):
            require_counts(file, read_json(file, f"the {folder.name}"))
        cls: Any = attribute("transformers", _processor_class(folder))
        try:
            return cls.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        except ImportError as error:
            raise unusable("transformers", error) from error
        except Exception as error:  # each tokenizer's reader has errors of its own for a damaged file
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise CheckpointError(
                f"{str(folder)!r} cannot be read ({reason})",
                expected=f"a {folder.name}",
                fix="Download this folder again.",
            ) from error

    return read


def _processor_class(folder: Path) -> str:
    """The transformers class that reads a tokenizer or an image processor.

    A Llama 3 tokenizer is a byte-level ``tokenizer.json`` under the name of a class that transformers 5.0 rebuilds as
    another kind and drops every space (huggingface/transformers#45488), so such a file is taken as it is.
    """
    if folder.name.endswith(("processor", "extractor")):
        return "AutoImageProcessor"
    config = folder / "tokenizer_config.json"
    named = read_json(config, "a tokenizer").get("tokenizer_class", "") if config.is_file() else ""
    whole = (folder / "tokenizer.json").is_file()
    return "PreTrainedTokenizerFast" if whole and str(named).startswith("Llama") else "AutoTokenizer"
