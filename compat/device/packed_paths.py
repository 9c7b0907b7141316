"""The path by which a device computes the layers of a packed file: core's own product, or dequantised. Core's ends the
process on some devices, raises on others and is slow on more: ``packed_rows.csv`` decides, or where it allows, a saved
test result. Choosing a path runs no test: :func:`packed_probes` wait for ``make gpu`` and the tab's button."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from ..decision import AUTO, CHOSEN, Decision
from ..errors import csv_file, first_line
from .execution import to_host
from .facts import KITCHEN, DeviceFacts
from .probe_store import OK, PACKED, UNKNOWN, ProbeResult
from .timed_choice import milliseconds

CORE, DEQUANTISE = "core's own", "dequantise"
INT8, W4A8, W4A4 = "int8_tensorwise", "asym_w4a8_int8", "convrot_w4a4"
INTEGERS = (INT8, W4A8, W4A4)  # core multiplies these packed on every device, without asking it
FP8, FP4 = ("float8_e4m3fn", "float8_e5m2"), ("nvfp4", "mxfp8")
AWQ = "awq_w4a16"
FORMATS = (*INTEGERS, *FP8, *FP4, AWQ)  # as core names them
Answers = Mapping[str, ProbeResult]
PACKED_PATHS = (AUTO, CORE, DEQUANTISE)  # grows at the end
FUNCTIONS = {  # of comfy-kitchen, by format; fp8 is torch's own
    INT8: "int8_linear", W4A8: "w4a8_int8_linear", W4A4: "convrot_w4a4_linear", AWQ: "gemv_awq_w4a16",
    "nvfp4": "scaled_mm_nvfp4", "mxfp8": "scaled_mm_mxfp8",
}  # fmt: skip
LAYOUTS = {INT8: "TensorWiseINT8Layout", W4A8: "AsymW4A8Int8Layout", W4A4: "TensorCoreConvRotW4A4Layout"}
ERRORS = {INT8: 0.1, W4A8: 0.1, W4A4: 1.5}  # largest, of the rms: 8 deviations of the rounding of the activations
WIDTH = 2048  # inputs and outputs of the layer that is tested
ROWS = (1, 17, 97, 112, 127, 4096)  # GTX 16 fails between 96 and 128 (ComfyUI#16431)
SAMPLE = 32  # rows of a product that are compared
SLOW = 2.0  # times as long as dequantising: a product of few rows that takes longer is refused, if also longer than
LAUNCHED = 5.0  # milliseconds, so not for launches alone; an H100 took 0.9 for 17 rows, of which the host took most
WORTH = 0.8  # largest share of the time of dequantising that the product of most rows may take, as in other choices


@dataclass(frozen=True, slots=True)
class PackedRow:
    """The path of layers of some formats on one kind of card, by the first row that fits; else they dequantise."""

    card: str
    backends: tuple[str, ...]  # patterns, as the next ones; names without regard to case
    formats: tuple[str, ...]
    path: str  # ``CORE``, which goes through comfy-kitchen, or ``DEQUANTISE``
    why: str
    source: str
    arches: tuple[str, ...]
    names: tuple[str, ...]
    kernels: tuple[str, ...]  # comfy-kitchen's backends with which it holds; ``eager`` is torch's own
    ask: bool  # a test may overrule the row; False where the test may end the process


GROUPS: Mapping[str, tuple[str, ...]] = {"integers": INTEGERS, "fp8": FP8, "fp4": FP4}


def _row(row: Mapping[str, str]) -> PackedRow:
    """A row of ``packed_rows.csv``, with groups of formats resolved; its ``ask`` is empty or "no"."""
    formats = tuple(each for name in row["formats"].split(";") for each in GROUPS.get(name, (name,)))
    several = {name: tuple(row[name].split(";")) for name in ("backends", "arches", "names", "kernels")}
    given: dict[str, Any] = {**row, **several, "formats": formats, "ask": not row["ask"]}
    return PackedRow(**given)


PACKED_ROWS = tuple(map(_row, csv_file(Path(__file__).with_name("packed_rows.csv"))))


class SlowerProductError(RuntimeError):
    """A product that is right and not worth taking."""


@dataclass(frozen=True, slots=True)
class PackedPath:
    """The path of the layers of one format."""

    layer_format: str
    path: str  # ``CORE`` or ``DEQUANTISE``
    kernels: str  # comfy-kitchen's backend for their product; ``eager`` is torch's own
    why: str
    source: str = AUTO

    def decision(self, count: int) -> Decision:
        by = {"": "", "eager": " by torch's product"}.get(self.kernels, f" by comfy-kitchen's {self.kernels} kernels")
        verdict = f"{CORE}{by}" if self.path == CORE else "dequantised"
        return Decision(f"{count} {self.layer_format} layers", verdict, self.why, self.source)


def path_for(facts: DeviceFacts, layer_format: str, answers: Answers, choice: str = AUTO) -> PackedPath:
    """The path of layers in ``layer_format``. ``choice`` auto goes by the saved answer, unless the first row that fits
    forbids its test; else by that row; else it dequantises."""
    kernels, _ = kitchen_backend(layer_format, facts.device)
    taken = partial(PackedPath, layer_format=layer_format, kernels=kernels)
    if choice != AUTO:
        return taken(path=choice, why="", source=CHOSEN)
    row = row_for(facts, layer_format, kernels)
    answer = answers.get(PACKED + layer_format)
    if answer is not None and answer.status != UNKNOWN and (row is None or row.ask):
        path = CORE if answer.status == OK else DEQUANTISE
        return taken(path=path, why=f"tested on this device: {answer.detail or 'right and quicker'}")
    if row is None:
        return taken(path=DEQUANTISE, why="nobody has tested its product on such a device")
    return taken(path=row.path, why=f"{row.card}: {row.why} ({row.source})")


def row_for(facts: DeviceFacts, layer_format: str, kernels: str) -> PackedRow | None:
    """The first row that fits the device, the format and comfy-kitchen's backend ``kernels``; None if none does."""
    return next((row for row in PACKED_ROWS if layer_format in row.formats and _fits(row, facts, kernels)), None)


def _fits(row: PackedRow, facts: DeviceFacts, kernels: str) -> bool:
    values = (facts.backend, facts.arch, facts.name.lower(), kernels)
    patterns = (row.backends, row.arches, row.names, row.kernels)
    return all(any(fnmatch(value, each) for each in own) for value, own in zip(values, patterns, strict=True))


def kitchen_backend(layer_format: str, device: torch.device) -> tuple[str, str]:
    """The backend that comfy-kitchen's registry chooses for the product of a format, and the reason for no faster one.
    The reason is empty unless the backend is ``eager``. Both are empty for a format without such a product; where
    comfy-kitchen fails, the backend is empty and the failure is the reason."""
    function = FUNCTIONS.get(layer_format)
    if function is None:
        return "", ""
    try:
        from comfy_kitchen.registry import registry

        given = {"x": torch.empty(1, WIDTH, dtype=torch.bfloat16, device=device)}
        chosen = registry.get_capable_backend(function, given)
        return chosen, "; ".join(_refusals(registry, function, given)) if chosen == "eager" else ""
    except Exception as error:  # absent, broken, or of a version that answers otherwise
        return "", first_line(error)


def _refusals(registry: Any, function: str, given: dict[str, Any]) -> Iterator[str]:
    """One reason for each GPU backend that torch is built for: why comfy-kitchen does not use it for ``function``."""
    built = {"hip": torch.version.hip, "cuda": torch.version.cuda}
    for name in filter(built.get, built):
        state = registry.list_backends().get(name, {})
        if state.get("disabled") and state.get("available") and name == "cuda":
            yield f"{name}: torch is built for CUDA {torch.version.cuda}, comfy-kitchen's kernels need 13"
        elif not state.get("available"):
            yield f"{name}: {state.get('unavailable_reason') or 'not in this build'}"
        elif function not in state.get("capabilities", ()):
            hidden = " that fits every visible Radeon (HIP_VISIBLE_DEVICES hides an integrated one)"
            yield f"{name}: no {function}{hidden if name == 'hip' else ''}"
        else:
            yield f"{name}: {registry.validate_backend_for_call(name, function, given).failure_reason}"


def kitchen_decisions(facts: DeviceFacts, answers: Answers) -> Iterator[Decision]:
    """Decisions for a report: each format's path with Fit nodes, why none is faster; empty without comfy-kitchen."""
    for layer_format in FUNCTIONS if KITCHEN in facts.versions else ():
        taken, (_, why) = path_for(facts, layer_format, answers), kitchen_backend(layer_format, facts.device)
        yield replace(taken.decision(0), subject=layer_format, why="; ".join(filter(None, (why, taken.why))), source="")


def packed_probes(facts: DeviceFacts) -> dict[str, Callable[[torch.device], str]]:
    """The probes of packed products by name, for the probe store; none for a CPU."""
    asked = () if facts.device.type == "cpu" else INTEGERS
    return {PACKED + each: partial(packed_product, facts, each) for each in asked}


def packed_product(facts: DeviceFacts, layer_format: str, device: torch.device) -> str:
    """Probe: core's product of a packed layer must agree with dequantised weights on the host, and be quicker.
    Returns the fault, empty for none. RuntimeError if the row forbids the test, or it cannot run or is too slow."""
    kernels, why = kitchen_backend(layer_format, device)
    row = row_for(facts, layer_format, kernels)
    if not kernels:
        raise RuntimeError(why)
    if row is not None and not row.ask:
        raise RuntimeError(f"not asked: {row.why} ({row.source})")
    rotations = (False, True) if layer_format == INT8 else (True,)
    return next(filter(None, (product_fault(layer_format, convrot, device) for convrot in rotations)), "")


def product_fault(layer_format: str, convrot: bool, device: torch.device) -> str:
    """The fault of one kind of layer, ``convrot``: with rotated columns; empty if right and quick. Checks no row of
    :data:`PACKED_ROWS`, so it may end the process. SlowerProductError for a product that is right but too slow."""
    from comfy_kitchen.tensor import QuantizedTensor

    noise = torch.Generator().manual_seed(0)
    options = {"per_channel": True, "convrot": convrot} if layer_format == INT8 else {}
    dense = torch.randn(WIDTH, WIDTH, generator=noise) * WIDTH**-0.5
    packed = QuantizedTensor.from_float(dense, LAYOUTS[layer_format], **options)
    weight, values = packed.to(device=device, dtype=torch.float16), packed.dequantize()
    for count in ROWS:
        host = torch.randn(count, WIDTH, generator=noise).half()
        x = host.to(device)
        result = to_host(functional.linear(x, weight)).float()
        for part in (slice(0, SAMPLE), slice(-SAMPLE, None)):
            expected = functional.linear(host[part].float(), values)
            error = float((result[part] - expected).abs().max() / expected.square().mean().sqrt())
            if not error <= ERRORS[layer_format]:
                return f"{count} rows: off by {error:.3g} of the results' rms"
        largest = count == ROWS[-1]
        products: dict[str, Callable[[], Any]] = {CORE: partial(functional.linear, x, weight)}
        products[DEQUANTISE] = partial(lambda x: functional.linear(x, weight.dequantize()), x)
        times = milliseconds(products, device, 3 if largest else 1)
        if CORE not in times:
            raise RuntimeError(f"{count} rows: core's product fails when it is repeated")
        dequantised = times.get(DEQUANTISE, math.inf)  # which may not run here at all
        if times[CORE] > (WORTH * dequantised if largest else max(LAUNCHED, SLOW * dequantised)):
            raise SlowerProductError(f"{count} rows: takes {times[CORE]} ms, dequantised {dequantised} ms")
    return ""
