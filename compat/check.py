"""Tries on this device what is known to fail on some: conversions, loading, Conv3d, attention."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from .checkpoints.weights import described, read_tensors, write_tensors
from .device.facts import DeviceFacts, device_fault
from .device.failures import DEVICE_ERRORS
from .device.precision import DTYPES, ModelPrecision
from .device.probe_store import OK, UNKNOWN, ProbeStore
from .device.probes import bits_of, home
from .device.quirks import abilities, fixed, policy_for
from .errors import PackError, first_line
from .report import LAYERS, dtypes_in_use
from .transforms.attention import attention_for, avoided_by
from .transforms.attention_chunks import chunked
from .transforms.conv3d_choice import Conv3dLayer, choose_by, form_error
from .transforms.conv3d_methods import Conv3dMethod, Geometry, covers

PASSED, AVOIDED, FAILED, NEWS = "ok", "avoided", "FAILED", "news"
ATTENTION_BOUND = {"fp32": 1e-3, "bf16": 5e-2, "fp16": 1e-2}
CHUNK_BYTES = 64 * 300 * 4  # a few queries at a time
MISMATCH = (*DEVICE_ERRORS, PackError)


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    status: str  # ``avoided``: it fails, and nothing decided here uses it; ``news``: a known bug that is gone
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.status:<8} {self.name}" + (f": {self.detail}" if self.detail else "")


def check(facts: DeviceFacts, store: ProbeStore, families: Mapping[str, ModelPrecision]) -> Iterator[Check]:
    """Ask the device's probes again; yield a :class:`Check` for each conversion, load, Conv3d, attention and known bug
    that is gone; a silent device has only one. ``families``: dtypes by model; those that ``auto`` avoids never fail."""
    silent = device_fault(facts.device)
    yield Check("the device answers", FAILED if silent else PASSED, silent)
    if silent:
        return
    store.ask_all(again=True)
    used = dtypes_in_use(facts, store, families)
    yield from _conversions(store, used)
    yield from _loader(facts, used)
    yield from _forms(facts, store, used)
    yield from _attention(facts, store, used)
    for row in fixed(policy_for(facts), store):
        yield Check(f"known bug {row.name}", NEWS, f"no longer on this device and driver ({row.symptom})")


def exit_code(checks: list[Check]) -> int:
    """0 when nothing that is used fails, else 1."""
    return int(any(one.status == FAILED for one in checks))


def _conversions(store: ProbeStore, used: set[str]) -> Iterator[Check]:
    """A check for each probe of casts, moves and copies; FAILED: a wrong cast or move whose dtypes are all ``used``."""
    for name in (name for name in store if name.partition(".")[0] in ("cast", "move", "copy", "bits")):
        answer, dtypes = store[name], set(name.partition(".")[2].split("_to_"))
        bad = FAILED if dtypes <= used and not name.startswith(("bits", "copy")) else AVOIDED  # copied as integers
        status = {OK: PASSED, UNKNOWN: AVOIDED}.get(answer.status, bad)  # unknown: no room for the test
        yield Check(f"conversion {name}", status, answer.detail)


def _loader(facts: DeviceFacts, used: set[str]) -> Iterator[Check]:
    """Checks of a bf16 file read in each dtype, moved to the device and back; FAILED only in a dtype of ``used``."""
    weights = torch.randn(64, 33, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    with tempfile.TemporaryDirectory() as folder:
        path = write_tensors(Path(folder) / "weights.safetensors", {"weight": weights}, {})
        for name, dtype in DTYPES.items():
            detail = ""
            try:
                read = read_tensors(described([path]), dtype, lambda count: None)["weight"]
                back = bits_of(read.to(facts.device)).view(dtype)  # the copy to the host is a check of its own
                if not torch.equal(back, weights.to(dtype)):
                    detail = f"{int((back != weights.to(dtype)).sum())} of {weights.numel()} weights change"
            except MISMATCH as error:
                detail = first_line(error)
            bad = FAILED if name in used else AVOIDED
            yield Check(f"loader bf16 file as {name}", bad if detail else PASSED, detail)


def _forms(facts: DeviceFacts, store: ProbeStore, used: set[str]) -> Iterator[Check]:
    """A check for each dtype and kind of Conv3d: that the method which would be taken is right on this device."""
    chooser = choose_by(abilities(facts, store))
    for name, dtype in DTYPES.items():
        for kind, (kernel, stride) in LAYERS.items():
            layer = Conv3dLayer(kind, 32, 32, kernel=kernel, geometry=Geometry(stride), dtype=dtype)
            forms = [form for form in Conv3dMethod if covers(form, kernel, layer.geometry)]
            right = [form for form in forms if form_error(form, layer, facts.device) is not None]  # None: wrong
            choice = chooser(layer)
            taken = Conv3dMethod.NATIVE if choice is None else choice.form
            wrong = [form.value for form in forms if form not in right]
            detail = f"{taken.value} if none is timed" + (f"; not right here: {', '.join(wrong)}" if wrong else "")
            bad = FAILED if name in used else AVOIDED
            yield Check(f"Conv3d, {kind}, {name}", PASSED if taken in right else bad, detail)


def _attention(facts: DeviceFacts, store: ProbeStore, used: set[str]) -> Iterator[Check]:
    """Two checks for each dtype, of the kernel of ``auto`` and of attention in chunks, against fp64 on the host."""
    for name, dtype in DTYPES.items():
        q, k, v = (torch.randn(1, 2, 300, 64, generator=torch.Generator().manual_seed(n)).to(dtype) for n in range(3))
        expected = torch.softmax(q.double() @ k.double().mT / math.sqrt(64), -1) @ v.double()
        bad = FAILED if name in used else AVOIDED
        ways: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
            "auto": lambda *qkv, of=dtype: attention_for("auto", facts, of, 64, avoided_by(store, (of,)))(*qkv),
            "in chunks": partial(chunked, budget_bytes=CHUNK_BYTES),
        }  # fmt: skip
        for label, run in ways.items():
            try:
                result = home(run(q.to(facts.device), k.to(facts.device), v.to(facts.device)))
                error = float((result - expected).abs().max())
                right, detail = error <= ATTENTION_BOUND[name], f"off by {error:.2g}"
            except MISMATCH as failure:
                right, detail = False, first_line(failure)
            yield Check(f"attention {label}, {name}", PASSED if right else bad, detail)
