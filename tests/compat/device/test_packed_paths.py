"""The path of packed layers: rows first, then the device's answers, and no question that ends a process twice."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from anygpu.compat.device import packed_paths
from anygpu.compat.device.packed_paths import CORE, DEQUANTISE, INT8, INTEGERS, packed_probes, packed_product, path_for
from anygpu.compat.device.probe_store import ENDED, OK, PACKED, UNUSABLE, WRONG, ProbeResult, ProbeStore
from anygpu.compat.report import report_on
from simulated import profiles

META = torch.device("meta")
ASKED = packed_paths.kitchen_backend  # of the registry itself
SEVENTH = {"backend": "cuda", "arch": "sm70", "name": "V100", "device": META}
RDNA2 = {"backend": "rocm", "arch": "gfx1030", "name": "RX 6600", "device": META}
UNLISTED = {"backend": "npu", "arch": "", "name": "another", "device": META}
AMPERE = {"backend": "cuda", "arch": "sm86", "name": "RTX 3060", "device": META}


def facts(named: dict[str, Any]) -> Any:
    return replace(profiles.facts_of("gfx1151"), **named)


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_paths, "kitchen_backend", lambda *_: ("eager", "torch is built for CUDA 12.8"))


@pytest.mark.parametrize(
    ("named", "status", "path"),
    [
        (SEVENTH, None, DEQUANTISE), (SEVENTH, OK, CORE), (SEVENTH, WRONG, DEQUANTISE),
        (UNLISTED, None, DEQUANTISE), (UNLISTED, OK, CORE), (AMPERE, None, CORE), (AMPERE, UNUSABLE, DEQUANTISE),
        (RDNA2, None, DEQUANTISE), (RDNA2, OK, DEQUANTISE),
    ],
)  # fmt: skip
def test_rows_speak_first_and_answers_overrule_those_that_may_be_asked(named: Any, status: str, path: str) -> None:
    answers = {} if status is None else {PACKED + INT8: ProbeResult(status, "takes 2 ms, dequantised 1 ms")}
    taken = path_for(facts(named), INT8, answers)
    assert taken.path == path and str(taken.decision(24)).startswith("24 int8_tensorwise layers ")
    asked = status is not None and named is not RDNA2
    assert ("tested on this device" in taken.why) is asked and (asked or bool(taken.why))
    assert path_for(facts(named), INT8, answers, CORE).decision(1).source == "chosen"


def test_nothing_is_asked_by_itself_and_what_may_end_the_process_never(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_paths, "product_fault", lambda *_: pytest.fail("it was asked"))
    here = facts(RDNA2)
    store = ProbeStore(here, more=packed_probes(here), asked={})
    path_for(here, INT8, store.known())
    assert not store.known() and not packed_probes(replace(here, device=torch.device("cpu")))
    for each in INTEGERS:
        with pytest.raises(RuntimeError, match="not asked"):
            packed_product(here, each, META)


def test_a_question_that_ended_the_process_is_not_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, name = facts(UNLISTED), PACKED + INT8

    def ends(*_: Any) -> str:
        raise SystemExit

    store = ProbeStore(here, tmp_path, more={name: ends}, asked={})
    with pytest.raises(SystemExit):
        store[name]
    kept = json.loads(store.path.read_text(encoding="utf-8"))
    assert kept["asking"][0] == name, "not on the disk before it was asked"
    kept["asking"][2] -= 60  # as of a process that is no more
    store.path.write_text(json.dumps(kept), encoding="utf-8")
    for _ in range(2):  # as the button of the AnyGPU tab does
        again = ProbeStore(here, tmp_path, more={name: lambda _: pytest.fail("it was asked again")}, asked={})
        again.probes = {name: again.probes[name]}
        assert again.ask_all(again=True)[name].detail == ENDED
    assert path_for(here, INT8, again.known()).path == DEQUANTISE


def test_answers_are_kept_apart_by_the_version_of_comfy_kitchen_and_shown_with_it() -> None:
    versions = [{**facts(AMPERE).versions, "comfy-kitchen": number} for number in ("0.2.31", "0.2.35")]
    machines = [replace(facts(AMPERE), versions=each) for each in versions]
    assert len({ProbeStore(each, asked={}).key for each in machines}) == 2
    sections = dict(report_on(machines[0], {}, {}).sections)
    line = str(sections["Packed files, with the Fit nodes"][0])
    assert line.startswith("int8_tensorwise core's own by torch's product: torch is built for CUDA 12.8; RTX 30")


@pytest.mark.parametrize(
    "failure", [ImportError("none"), KeyError("cuda"), ValueError("x"), RuntimeError("dead"), OSError()]
)
def test_a_kernel_library_that_fails_is_no_backend(monkeypatch: pytest.MonkeyPatch, failure: Exception) -> None:
    registry = pytest.importorskip("comfy_kitchen.registry").registry

    def refuse(*_given: object, **_named: object) -> None:
        raise failure

    monkeypatch.setattr(type(registry), "get_capable_backend", refuse)
    assert ASKED("int8_tensorwise", torch.device("cpu"))[0] == ""


@pytest.mark.parametrize(("few", "right"), [((0.9, 0.4), True), ((12.0, 4.0), False), ((12.0,), True)])
def test_a_product_of_few_rows_settles_nothing_that_launches_explain(few, right, monkeypatch) -> None:
    """An H100 took 0.9 ms for 17 rows, dequantised 0.4; only from 5 ms on does that tell of many rows.
    Where dequantising does not run, core's product is taken."""
    monkeypatch.setattr(packed_paths, "WIDTH", 256)
    monkeypatch.setattr(packed_paths, "ROWS", (17, 128))
    times = iter([few, (1.0, 2.0)])
    monkeypatch.setattr(packed_paths, "milliseconds", lambda ways, *_: dict(zip(ways, next(times), strict=False)))
    if right:
        assert packed_paths.product_fault(INT8, False, torch.device("cpu")) == ""
    else:
        with pytest.raises(packed_paths.SlowerProductError, match="17 rows"):
            packed_paths.product_fault(INT8, False, torch.device("cpu"))
