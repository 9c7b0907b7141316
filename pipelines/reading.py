"""One part of a pipeline from its folder: configuration, weights, strict about both."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..compat.checkpoints import STORED, TensorEntry, declared, read_json, read_tensors, weight_files
from ..compat.errors import CheckpointError
from ..compat.offload import amount
from ..compat.packages import attribute
from .contract import Progress

NAMED = 3  # how many tensor names an error quotes


@dataclass(frozen=True, slots=True)
class PartFiles:
    """Where a part is and what it is; headers were read, weights were not.

    Args:
        name: part name. library, cls: what builds it. folder: its folder. config: its ``config.json``.
        entries: its tensors. dtype: what floating tensors become. dtype_of: from name and shape of a floating tensor to
            what it becomes instead; one that does not fit stays as ``dtype``.
    """

    name: str
    library: str
    cls: str
    folder: Path
    config: Mapping[str, Any]
    entries: Mapping[str, TensorEntry]
    dtype: torch.dtype
    dtype_of: Callable[[str, tuple[int, ...]], torch.dtype] | None = None

    @property
    def total_bytes(self) -> int:
        """Bytes of the part once it is in memory."""
        return sum(
            math.prod(entry.shape) * self.becomes(name).itemsize
            if STORED[entry.dtype].is_floating_point
            else entry.total_bytes
            for name, entry in self.entries.items()
        )

    def becomes(self, name: str) -> torch.dtype:
        """The dtype of the floating tensor ``name`` in memory."""
        return self.dtype if self.dtype_of is None else self.dtype_of(name, tuple(self.entries[name].shape))


def part_files(name: str, library: str, cls: str, folder: Path, dtype: torch.dtype) -> PartFiles:
    """The part in ``folder``, with every header checked.

    Raises:
        CheckpointError: configuration or weights are missing or damaged.
    """
    config = read_json(folder / "config.json", f"the configuration of the {name}") if folder.is_dir() else {}
    entries = declared(weight_files(folder, name))
    if not entries:
        raise CheckpointError(
            f"no tensors in the weights of {str(folder)!r}", expected=f"the {name}", fix="Download this folder again."
        )
    return PartFiles(name, library, cls, folder, config, entries, dtype)


def reader_of(files: PartFiles) -> Callable[[Progress], nn.Module]:
    """A function that reads the part when it is called: on the CPU, in evaluation mode, outside inference mode."""

    def read(progress: Progress) -> nn.Module:
        with torch.inference_mode(False), torch.no_grad():
            tensors = _tensors(files, _advance(files, progress))
            build = _built_by_diffusers if files.library == "diffusers" else _built_by_transformers
            return build(files, tensors).eval().requires_grad_(False)

    return read


def _tensors(files: PartFiles, advance: Callable[[int], None]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for dtype in sorted({files.becomes(name) for name in files.entries}, key=str):
        mine = {name: entry for name, entry in files.entries.items() if files.becomes(name) is dtype}
        found |= read_tensors(mine, dtype, advance)
        if dtype is torch.float16 and dtype is not files.dtype:
            high = {name for name in mine if found[name].is_floating_point() and not found[name].isfinite().all()}
            found |= read_tensors({name: mine[name] for name in high}, files.dtype, lambda _: None)
    return found


def _advance(files: PartFiles, progress: Progress) -> Callable[[int], None]:
    total, done = sum(entry.total_bytes for entry in files.entries.values()), 0

    def advance(size: int) -> None:
        nonlocal done
        done += size
        progress.step(done, total, f"reading {files.name} {amount(done, total)}")
        progress.check()

    return advance


def _built_by_diffusers(files: PartFiles, tensors: dict[str, torch.Tensor]) -> nn.Module:
    from accelerate import init_empty_weights

    cls: Any = attribute("diffusers", files.cls)
    with init_empty_weights():
        module: nn.Module = cls.from_config(dict(files.config))
    try:
        result = module.load_state_dict(tensors, strict=False, assign=True)
    except RuntimeError as error:
        raise _misfit(files, error) from error
    _require_same(files, result.missing_keys, result.unexpected_keys)
    return module


def _built_by_transformers(files: PartFiles, tensors: dict[str, torch.Tensor]) -> nn.Module:
    cls: Any = attribute("transformers", files.cls)
    config = cls.config_class.from_pretrained(str(files.folder), local_files_only=True)
    try:
        with _without_bars():
            module, found = cls.from_pretrained(
                None, config=config, state_dict=tensors, dtype=files.dtype, output_loading_info=True
            )
    except (RuntimeError, ValueError) as error:
        raise _misfit(files, error) from error
    mismatched = [str(key[0] if isinstance(key, tuple) else key) for key in found.get("mismatched_keys", ())]
    _require_same(files, [*found["missing_keys"], *mismatched], [])
    return module


@contextmanager
def _without_bars() -> Iterator[None]:
    """Keep transformers from drawing its own bar over ours; its setting is restored."""
    from transformers.utils import logging

    drawn = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if drawn:
            logging.enable_progress_bar()


def _require_same(files: PartFiles, missing: list[str], unexpected: list[str]) -> None:
    if not missing and not unexpected:
        return
    absent = sorted(missing)
    found = f"missing tensors {_names(absent)}" if absent else f"unexpected tensors {_names(sorted(unexpected))}"
    raise CheckpointError(
        f"{found} in the {files.name} of {str(files.folder)!r}",
        expected=f"the tensors of {files.cls} as config.json describes it",
        fix="Download config.json and weights from the same place.",
    )


def _misfit(files: PartFiles, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"the weights of the {files.name} in {str(files.folder)!r} do not fit its config.json ({_first_line(error)})",
        expected=f"the shapes of {files.cls}",
        fix="Download config.json and weights from the same place.",
    )


def _names(names: list[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(map(repr, names[:NAMED])) + more


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[1] if len(lines) > 1 else lines[0]
