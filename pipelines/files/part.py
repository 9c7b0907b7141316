"""The parts of a pipeline on disk: class, configuration, checked headers, and the bytes that they take in memory."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules

from ...compat.checkpoints.headers import STORED, TensorEntry
from ...compat.checkpoints.packed import PLAIN, ROUNDED, is_eligible, is_table, rounded, stays_packed, stays_plain
from ...compat.checkpoints.unpacking import FP32_COPIES, PACKINGS, SCALED, VALUES
from ...compat.checkpoints.weights import described, is_view, outlined_sides, read_json, weight_files
from ...compat.errors import CheckpointError, PackError
from ...compat.memory.parts import Outline, PackedForm
from ...compat.records import shown
from ..base import Progress
from ..family import FamilySpec


@dataclass(frozen=True, slots=True)
class PartFiles:
    """One part of a pipeline on disk; headers were read, weights were not."""

    name: str  # part name
    library: str
    cls: str  # of the library, which builds it
    folder: Path  # its folder, or its file
    config: Mapping[str, Any]  # its ``config.json``
    entries: Mapping[str, TensorEntry]  # its tensors
    dtype: torch.dtype  # what floating tensors become
    dtype_of: Callable[[str, tuple[int, ...]], torch.dtype] | None = None  # of name and shape: of single tensors
    storage: str = "auto"  # how its blocks' weights are kept in memory, of ``packed.CHOICES``
    keeps_packed: bool = False  # whether those that the file has packed stay as they are
    by_bits: bool = False  # whether the device's own cast of bf16 is broken
    mapped: bool = False  # whether large tensors that need no cast may be views of the file
    staged: bool = False  # whether such views go to a device by way of ordinary memory
    settings: Mapping[str, Any] = field(default_factory=dict)  # attributes that the module gets once it is built

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes_of(name, entry) for name, entry in self.entries.items())

    @property
    def view_bytes(self) -> int:
        """Bytes in the file of the tensors that may be views of it."""
        return sum(entry.total_bytes for name, entry in self.entries.items() if self.may_be_view(name, entry))

    def may_be_view(self, name: str, entry: TensorEntry) -> bool:
        """True if the tensor ``name`` is used exactly as the file stores it, so that it may be a view of the file."""
        uncast = not entry.is_floating or self.becomes(name) == STORED[entry.dtype]
        return is_view(entry) and ((uncast and self.storage in ("auto", "as in file")) or stays(self, name, entry))

    def bytes_of(self, name: str, entry: TensorEntry) -> int:  # in memory, packed where it is kept so
        if not entry.is_floating:
            return entry.total_bytes
        if (form := self.form_of(name, entry)) is None:
            return math.prod(entry.shape) * self.becomes(name).itemsize
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in (form[1], *dict(form[2]).values()))

    @property
    def forms(self) -> tuple[tuple[PackedForm, int], ...]:
        """The packed forms and how many weights have each; not of embedding tables: a use unpacks few of their rows."""
        forms = (self.form_of(name, entry) for name, entry in self.entries.items() if not is_table(name))
        return tuple(Counter(form for form in forms if form and (form[0] or form[1] != form[-1])).items())

    @property
    def dense_bytes(self) -> int:
        """Bytes at the peak of unpacking the largest packed weight, as each use does; 0 where none is packed."""
        return max((_dense_bytes(form) for form, _ in self.forms), default=0)

    def form_of(self, name: str, entry: TensorEntry) -> PackedForm | None:
        """The packed form in which a weight is kept in memory, or its plain dtype (codec "") where ``storage`` asks for
        one; None for all others: by default, and for a tensor that is empty, not floating or no block's weight."""
        own, choice, (rows, *columns) = STORED[entry.dtype], self.storage, entry.shape or (0,)
        if not entry.is_floating or 0 in entry.shape or (choice == "auto" and not self.keeps_packed):
            return None
        dense = self.becomes(name)
        if stays(self, name, entry):
            stored = torch.empty(rows, entry.total_bytes // rows // own.itemsize, dtype=own, device="meta")
            return _form(stored, entry.codec, outlined_sides(entry), entry.group, (entry.shape, dense))
        if not is_eligible(name, entry):
            return None
        if choice in ROUNDED:
            return _rounded(choice, rows, columns[0], dense)
        plain = own if choice == "as in file" and not entry.is_packed and own.itemsize >= 2 else dense
        return "", (entry.shape, PLAIN.get(choice, plain)), (), 0, (entry.shape, dense)

    def becomes(self, name: str) -> torch.dtype:  # the dtype in which the tensor ``name`` is computed with
        return self.dtype if self.dtype_of is None else self.dtype_of(name, tuple(self.entries[name].shape))


def _form(data: torch.Tensor, codec: str, sides: Mapping[str, torch.Tensor], group: int, dense: Outline) -> PackedForm:
    """The form of packed ``data`` and its ``sides``: shapes and dtypes in the place of tensors."""
    outlines = tuple((name, (tuple(side.shape), side.dtype)) for name, side in sides.items())
    return codec, (tuple(data.shape), data.dtype), outlines, group, dense


@lru_cache(maxsize=64)
def _rounded(choice: str, rows: int, columns: int, dense: torch.dtype) -> PackedForm:
    """The form of a (rows, columns) weight under a choice of ``packed.ROUNDED``, found by packing two random rows."""
    form = rounded(torch.randn(2, columns, generator=torch.Generator().manual_seed(0)), choice)

    def whole(tensor: Tensor) -> Tensor:
        return tensor[:1].expand(rows, *tensor.shape[1:]) if len(tensor) == 2 else tensor

    sides = {name: whole(side) for name, side in form["sides"].items()}
    return _form(whole(form["stored"]), form["codec"], sides, form["group"], ((rows, columns), dense))


def _dense_bytes(form: PackedForm) -> int:
    """An upper bound of the bytes at the peak of unpacking a weight: its dense result and the copies on the way."""
    codec, _, _, group, (shape, dense) = form
    count = math.prod(shape)
    if codec in PACKINGS:
        copies = 4 * min(count, VALUES) * (1 if codec == SCALED and not group else FP32_COPIES)
        return copies + (0 if dense is torch.float32 and count <= VALUES else count * dense.itemsize)
    return count * (dense.itemsize if dense is torch.float32 or not codec else 4 + dense.itemsize)


def part_files(name: str, library: str, cls: str, folder: Path, dtype: torch.dtype) -> PartFiles:
    """The part in ``folder``, with every header checked; raises CheckpointError for missing or damaged files."""
    config = read_json(folder / "config.json", f"the configuration of the {name}") if folder.is_dir() else {}
    entries = described(weight_files(folder, name))
    if not entries:
        found = f"no tensors in the weights of {str(folder)!r}"
        raise CheckpointError(found, expected=f"the {name}", fix="Download this folder again.")
    return PartFiles(name=name, library=library, cls=cls, folder=folder, config=config, entries=entries, dtype=dtype)


def stays(files: PartFiles, name: str, entry: TensorEntry) -> bool:
    """True if the tensor ``name`` stays in memory as the file stores it, packed or in a plain dtype of its own."""
    packed = files.keeps_packed and stays_packed(name, entry)
    return packed or stays_plain(name, entry, files.storage, files.becomes(name))


def absent_text(family: FamilySpec, has: Callable[[str], bool], progress: Progress) -> tuple[str, ...]:
    """The text encoders and tokenizers to leave out: none if ``has(part)`` is true for any text encoder; else all of
    them, and the user is told how to prompt without."""
    if any(map(has, family.files.text_parts)):
        return ()
    progress.notify("without text encoder: connect AnyGPU Load Prompt or core CONDITIONING")
    return (*family.files.text_parts, *(tool for tool in family.files.tools if tool.startswith("tokenizer")))


def tool_configs(family: FamilySpec) -> dict[str, dict[str, Any]]:
    """The scheduler, guider and index that a family's pipelines were published with; none without single files."""
    if not (family.folder / "tools.json").is_file():
        return {}
    return read_json(family.folder / "tools.json", "the pipelines' settings")


LARGEST = 1000  # times the largest published number, which no checkpoint comes near
MOST_TOKENS = 10_000_000
MOST_TENSORS = 20_000  # where no file says how many: ten times those of the largest published transformer
LONGEST = 256  # items of a list
SLACK = 64  # parameters beyond twice those of the file: tied ones and those that a class makes and drops
MODULES = 64  # per tensor: containers, activations, dropouts
CHECK_SECONDS = 0.05


def require_plausible(subject: str, path: Path, config: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    """Raise CheckpointError for a value of ``config`` whose type no published configuration (``rows``) has there, or of
    absurd size. Not checked: nulls, for which the class may have a default, and names with ``_`` first or in no row."""
    for name, value in config.items():
        known = [row[name] for row in rows if row.get(name) is not None]
        if known and value is not None and not name.startswith("_") and not any(_alike(value, one) for one in known):
            found = f"{name} {shown(value)} of the {subject} in {str(path)!r}"
            fix = "Download this file again, or undo what was changed in it."
            raise CheckpointError(found, expected=f"a value such as {shown(known[0])}", fix=fix)


def require_counts(path: Path, config: Mapping[str, Any]) -> None:
    """Raise CheckpointError for absurd numbers in a tokenizer's or processor's configuration, such as 10**9 tokens."""
    for name, value in config.items():
        if type(value) is int and abs(value) > MOST_TOKENS and "length" not in name:  # 10**30 stands for any length
            found = f"{name} {shown(value)} in {str(path)!r}"
            fix = "Download this file again, or undo what was changed in it."
            raise CheckpointError(found, expected=f"{MOST_TOKENS} at most", fix=fix)


class _Building(threading.local):
    count: Callable[[str], None] | None = None
    empty = False


_building = _Building()
_hooks: list[Any] = []  # of torch, once they are needed
_hooking = threading.Lock()


@contextmanager
def empty_weights() -> Iterator[None]:
    """Modules that this thread builds in the block have parameters without memory, on ``meta``; buffers are real.
    accelerate's ``init_empty_weights`` changes ``nn.Module`` for all threads, and two that overlap leave it changed."""
    _watch_registrations()
    before, _building.empty = _building.empty, True
    try:
        yield
    finally:
        _building.empty = before


@contextmanager
def construction(subject: str, folder: Path, tensors: int, check: Callable[[], None]) -> Iterator[None]:
    """Guard a block that builds a module from its config.json; ``check``, called meanwhile, may raise to cancel. Raises
    CheckpointError for far more parameters or modules than ``tensors`` need, and for errors of the build itself,
    a shortage of memory included; a PackError or ImportError goes through."""
    counts, checked = {"parameters": 0, "modules": 0}, time.monotonic()
    most = {"parameters": 2 * tensors + SLACK, "modules": MODULES * (tensors + SLACK)}

    def counted(kind: str) -> None:  # called for each parameter and module that is registered
        nonlocal checked
        if time.monotonic() - checked > CHECK_SECONDS:
            check()
            checked = time.monotonic()
        counts[kind] += 1
        if counts[kind] > most[kind]:
            found = f"config.json of the {subject} in {str(folder)!r} describes more {kind} than its weights have"
            fix = "Download config.json and weights from the same place."
            raise CheckpointError(found, expected=f"a configuration of {tensors} tensors", fix=fix)

    _watch_registrations()
    before, _building.count = _building.count, counted
    try:
        check()
        yield
    except (PackError, ImportError):
        raise
    except Exception as error:  # each class has its own ways to fail; weights take no memory yet, unless absurdly large
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        reason = lines[:2][-1]  # the second where the first is torch's heading
        found = f"the {subject} in {str(folder)!r} cannot be built from its config.json ({reason[:160]})"
        fix = "Download config.json and weights from the same place."
        raise CheckpointError(found, expected="a configuration as published", fix=fix) from error
    finally:
        _building.count = before


def _watch_registrations() -> None:
    """Hook torch's registrations of parameters and modules, once and for good: removal breaks other threads' builds."""
    with _hooking:
        if not _hooks:
            hook: Any = _parameter_of  # torch's annotation leaves out that a hook may return another parameter
            _hooks.append(modules.register_module_parameter_registration_hook(hook))
            _hooks.append(modules.register_module_module_registration_hook(_count_module))


def _parameter_of(_module: nn.Module, _name: str, parameter: nn.Parameter) -> nn.Parameter | None:
    """Count a registered parameter; in :func:`empty_weights` returns one on ``meta`` for its place, else None."""
    if _building.count is not None:
        _building.count("parameters")
    if not _building.empty or parameter.is_meta:
        return None
    return nn.Parameter(parameter.to("meta"), parameter.requires_grad)


def _count_module(_module: nn.Module, _name: str, _part: nn.Module | None) -> None:
    if _building.count is not None:
        _building.count("modules")


def _alike(value: Any, known: Any) -> bool:
    """True if ``value`` could stand where a published configuration has ``known``: of the same type, a number like it,
    or a list of at most LONGEST items, each like one of ``known``'s (any where that is empty)."""
    if isinstance(known, (list, tuple)):
        if not isinstance(value, (list, tuple)) or len(value) > LONGEST:
            return False
        return not known or all(any(_alike(item, one) for one in known) for item in value)
    if isinstance(known, (bool, str)):
        return type(value) is type(known)
    return _number_alike(value, known) if isinstance(known, (int, float)) else isinstance(value, type(known))


def _number_alike(value: Any, known: float) -> bool:  # finite, whole where ``known`` is, of no absurd size or sign
    if type(value) not in (int, float) or (isinstance(value, float) and not math.isfinite(value)):
        return False
    if isinstance(known, int) and isinstance(value, float) and not value.is_integer():
        return False
    return abs(value) <= LARGEST * max(abs(known), 1) and (value >= 0 or isinstance(known, float) or known < 0)
