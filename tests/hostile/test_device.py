"""Devices, drivers, psutil and Triton that raise, lie or end the process: the answer is "unknown", no exception."""

import ast
import csv
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from anygpu.compat.device import facts, probe_store
from anygpu.compat.device.facts import facts_for
from anygpu.compat.device.probe_store import ENDED, UNUSABLE, ProbeStore
from anygpu.compat.device.quirks import active, policy_for
from anygpu.compat.transforms import fused
from anygpu.compat.transforms.fused import FusionPoints
from anygpu.kernels import library
from simulated import profiles

ROOT = Path(__file__).resolve().parents[2]


class ForeignError(Exception):
    """As Triton's, psutil's and some drivers' errors: a plain Exception."""


try:  # Triton's own, which share no base class but Exception
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    TRITON_ERRORS: tuple[Exception, ...] = (
        OutOfResources(101376, 65536, "shared memory"),
        PTXASError("ptxas exited with 1"),
        CompilationError("x = y", ast.parse("y").body[0], "no such name"),
    )
except ImportError:
    TRITON_ERRORS = ()
RAISED = (
    RuntimeError("The device doesn't support querying the available free memory"),  # pytorch#159728, Intel
    OSError(1450, "Insufficient system resources"),  # psutil#2105, Windows without performance counters
    NotImplementedError(),
    AssertionError("Torch not compiled with CUDA enabled"),
    AttributeError("no such attribute"),
    subprocess.CalledProcessError(1, ["gcc"]),
    ForeignError("found nothing to tell"),
    *TRITON_ERRORS,
)
XPU = torch.device("xpu", 0)


def raising(error: BaseException) -> Callable[..., Any]:
    def ask(*_: Any, **__: Any) -> Any:
        raise error

    return ask


@pytest.fixture(params=RAISED, ids=lambda error: type(error).__name__)
def error(request: pytest.FixtureRequest) -> BaseException:
    return request.param  # type: ignore[no-any-return]


def test_psutil_that_raises_refuses_nothing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    for name in ("virtual_memory", "swap_memory"):
        monkeypatch.setattr(psutil, name, raising(error))
    monkeypatch.setattr(facts, "CGROUPS", ())
    assert facts.swap_free_bytes() == 0
    assert facts.host_free_bytes() == facts.PLENTY
    assert facts.free_bytes(torch.device("cpu")) is None
    assert facts_for("cpu").total_bytes == 0


def intel(**told: Any) -> SimpleNamespace:
    """``torch.xpu`` with 16 GB, 4 of them reserved."""
    return SimpleNamespace(
        get_device_properties=lambda _: SimpleNamespace(total_memory=16 << 30, name="Arc(TM) Graphics"),
        memory_reserved=lambda _: 4 << 30,
        **told,
    )


def test_a_memory_query_that_raises_is_worked_out_from_what_torch_reserved(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    monkeypatch.setattr(torch, "xpu", intel(mem_get_info=raising(error)))
    assert facts.free_bytes(XPU) == 12 << 30


@pytest.mark.parametrize("lie", [(0, 0), (-1, 16 << 30), (32 << 30, 16 << 30), (None, 16 << 30), "much"])
def test_a_memory_query_that_lies_is_not_believed(monkeypatch: pytest.MonkeyPatch, lie: Any) -> None:
    monkeypatch.setattr(torch, "xpu", intel(mem_get_info=lambda _: lie))
    assert facts.free_bytes(XPU) == 12 << 30


def test_a_device_that_tells_nothing_has_unknown_memory(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    monkeypatch.setattr(torch, "xpu", SimpleNamespace(mem_get_info=raising(error)))
    assert facts.free_bytes(XPU) is None


@pytest.mark.parametrize("lie", [-1, 129, 1 << 20, "two", None])
def test_a_number_of_devices_that_cannot_be_is_one(monkeypatch: pytest.MonkeyPatch, lie: Any) -> None:
    """A list of 2^62 devices takes the memory of the machine before anything fails."""
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: lie)
    monkeypatch.setattr(facts, "default_device", lambda: XPU)
    assert facts.accelerators(XPU) == (XPU,)


def test_statistics_that_raise_are_unknown(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    names = ("max_memory_allocated", "reset_peak_memory_stats", "empty_cache")
    monkeypatch.setattr(torch, "xpu", SimpleNamespace(**dict.fromkeys(names, raising(error))))
    assert facts.peak_bytes(XPU) is None
    facts.reset_peak(XPU)
    facts.empty_cache(XPU)


def test_an_accelerator_api_that_raises_leaves_the_cpu(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", raising(error))
    assert facts.default_device() == torch.device("cpu")
    assert not facts.locks_host_memory(XPU)
    facts.empty_host_cache()


TF32 = """
import torch
torch.backends.{setter} = "tf32"
from anygpu.compat.device.facts import flags
print(flags()["tf32"])
"""


@pytest.mark.parametrize(
    "setter", ["fp32_precision", pytest.param("cuda.matmul.fp32_precision", marks=pytest.mark.full)]
)
def test_flags_survive_the_new_switches_of_torch(setter: str) -> None:
    """torch 2.9 and newer: the legacy question raises once another pack has used the new switch."""
    if not hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        pytest.skip("needs torch 2.9 or newer")
    program = TF32.format(setter=setter)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_probe_that_ended_the_process_is_not_asked_again(tmp_path: Any, device: str) -> None:
    machine, asked = replace(profiles.facts_of("gfx1151"), device=torch.device(device)), []

    def ends(device: torch.device) -> str:
        asked.append(device)
        raise SystemExit  # as far as the store can tell, the end of the process

    store = ProbeStore(machine, tmp_path, more={"ends": ends}, asked={})
    with pytest.raises(SystemExit):
        store["ends"]
    kept = json.loads(store.path.read_text(encoding="utf-8"))
    assert kept["asking"][0] == "ends"
    kept["asking"][2] -= 60  # a container gave the next start the same process number: whoever asked has gone
    store.path.write_text(json.dumps(kept), encoding="utf-8")
    again = ProbeStore(machine, tmp_path, more={"ends": ends}, asked={})
    assert (again["ends"].status, again["ends"].detail) == (UNUSABLE, ENDED)
    assert len(asked) == 1
    assert store.path.stat().st_mode & 0o044, "others may read it, as any file"


def test_a_timing_that_hung_until_the_process_was_ended_is_not_tried_again(tmp_path: Any) -> None:
    machine = replace(profiles.facts_of("gfx1151"), device=torch.device("meta"))

    def hangs() -> None:
        raise SystemExit  # somebody ends the process, in which nothing can end the call

    store = ProbeStore(machine, tmp_path, asked={})
    with pytest.raises(SystemExit):
        store.remember("timing", hangs)
    kept = json.loads(store.path.read_text(encoding="utf-8"))
    kept["asking"][2] -= 60
    store.path.write_text(json.dumps(kept), encoding="utf-8")
    again = ProbeStore(machine, tmp_path, asked={})
    assert again.remember("timing", lambda: pytest.fail("it was tried again")) is None
    assert again.remember("other", lambda: {"a": 1.0}) == {"a": 1.0}
    again.probes.clear()
    again.ask_all(again=True)  # as the button of the AnyGPU tab does
    assert ProbeStore(machine, tmp_path, asked={}).remember("timing", lambda: 2.0) == 2.0


def test_a_timing_that_raises_is_tried_again(tmp_path: Any) -> None:
    machine = replace(profiles.facts_of("gfx1151"), device=torch.device("meta"))
    store = ProbeStore(machine, tmp_path, asked={})
    with pytest.raises(ZeroDivisionError):
        store.remember("timing", lambda: 1 / 0)
    kept = json.loads(store.path.read_text(encoding="utf-8"))
    assert "asking" not in kept and store.remember("timing", lambda: 2.0) == 2.0


def test_who_asks_now_has_not_ended(tmp_path: Any, caplog: Any) -> None:
    machine = replace(profiles.facts_of("gfx1151"), device=torch.device("meta"))
    seen = []

    def fine(_: torch.device) -> str:
        seen.append(ProbeStore(machine, tmp_path, more=asked, asked={}, quiet=True)["one"].status)
        return ""

    asked = {"one": fine, "two": fine}
    store = ProbeStore(machine, tmp_path, more=asked, asked={})
    assert [store[name].status for name in asked] == ["ok", "ok"]
    assert seen == ["unknown", "ok"], "another store of this process took what was being asked for what ended it"
    assert ENDED not in caplog.text


def test_who_asks_on_another_machine_has_not_ended_until_minutes_have_passed(tmp_path: Any, monkeypatch: Any) -> None:
    """Machines that share a home, or containers a volume, do not see each other's processes."""
    machine = replace(profiles.facts_of("gfx1151"), device=torch.device("meta"))

    def asks(_: torch.device) -> str:
        raise SystemExit  # after which the file is as while it is asked

    with monkeypatch.context() as there:
        there.setattr(os, "getpid", lambda: 2**22 + 1)  # which no process here has
        there.setattr(probe_store, "_started", lambda _: 5.0)
        there.setattr(platform, "node", lambda: "another machine")
        store = ProbeStore(machine, tmp_path, more={"one": asks}, asked={})
        with pytest.raises(SystemExit):
            store["one"]
    assert ProbeStore(machine, tmp_path, more={"one": asks}, asked={}).known() == {}
    os.utime(store.path, (time.time() - 3600,) * 2)
    assert ProbeStore(machine, tmp_path, more={"one": asks}, asked={}).known()["one"].detail == ENDED


@pytest.mark.parametrize("entry", [{"status": 1}, {"status": "fine"}, {"status": "ok", "detail": []}, {}, 3])
def test_kept_answers_of_another_type_are_asked_anew(tmp_path: Any, entry: Any) -> None:
    machine = profiles.facts_of("gfx1151")
    store = ProbeStore(machine, tmp_path, more={"fine": lambda _: ""}, asked={})
    store.path.write_text(json.dumps({"answers": {"fine": entry}, "remembered": {}}), encoding="utf-8")
    again = ProbeStore(machine, tmp_path, more={"fine": lambda _: ""}, asked={})
    assert again["fine"].status == "ok"


def test_a_triton_that_cannot_be_imported_is_no_triton(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    class Broken:
        @staticmethod
        def find_spec(name: str, *_: Any) -> None:
            if name.endswith("._triton.rounding"):
                raise error

    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace())
    monkeypatch.delitem(sys.modules, "anygpu.kernels._triton.rounding", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Broken, *sys.meta_path])
    library._interpreted.cache_clear()
    assert not library.interpreting()
    assert "not on 'cpu'" in library.reason_against(torch.device("cpu"), torch.float32)


@pytest.fixture(autouse=True)
def no_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    faults: dict[tuple[str, torch.device, torch.dtype], str] = {}
    for module in (library, fused):
        monkeypatch.setattr(module, "FAULTS", faults)


def test_a_kernel_that_cannot_be_built_leaves_its_reference(error: BaseException, caplog: Any) -> None:
    calls = []

    def load() -> Callable[..., Any]:
        calls.append(1)
        raise error

    launch = library._Launch("broken", load, lambda x: x + 1)
    x = torch.zeros(2)
    assert torch.equal(launch(x), x + 1) and torch.equal(launch(x), x + 1)
    assert str(FusionPoints("auto")).endswith(
        f"the kernel broken failed on cpu in fp32, its reference runs: {next(iter(library.FAULTS.values()))}"
    )
    assert len(calls) == 1 and caplog.text.count("its reference runs from now on") == 1
    assert torch.equal(launch(x.half()), x.half() + 1) and len(calls) == 2, "a fault is one of its dtype and its card"
    with library.failures_raise(), pytest.raises(type(error)):
        launch(x)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasLtCreate(&handle)`"),
        RuntimeError("CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasLtMatmul(...)`"),
    ],
    ids=str,
)
def test_shortage_in_a_kernel_is_no_fault_of_the_kernel(error: BaseException) -> None:
    launch = library._Launch("large", lambda: raising(error), lambda x: x)
    with pytest.raises(type(error)):
        launch(torch.zeros(1))
    assert not library.FAULTS


def test_self_tests_of_two_threads_at_once_leave_other_launches_their_references() -> None:
    """The tab's button asks the probes in a thread of its own, also while a prompt runs, whose load asks them too."""
    launch = library._Launch("broken", lambda: raising(RuntimeError("ptxas failed")), lambda x: x + 1)
    x = torch.zeros(2)
    with ThreadPoolExecutor(1) as pool:
        first, second = library.failures_raise(), library.failures_raise()
        first.__enter__()
        pool.submit(second.__enter__).result()
        first.__exit__(None, None, None)
        assert torch.equal(launch(x), x + 1), "the test of the other thread is none of this one"
        with pytest.raises(RuntimeError, match="ptxas"):
            pool.submit(launch, x).result()
        pool.submit(second.__exit__, None, None, None).result()
    assert torch.equal(launch(x), x + 1), "both are over"


class Nvml:
    """NVIDIA's library, as ctypes calls it."""

    def __init__(self, status: int = 0) -> None:
        self.status, self.open = status, 0

    def nvmlInit_v2(self) -> int:
        self.open += self.status == 0
        return self.status

    def nvmlSystemGetDriverVersion(self, text: Any, length: int) -> int:
        text.value = b"581.29"[: length - 1]
        return 0

    def nvmlShutdown(self) -> int:
        self.open -= 1
        return 0


@pytest.mark.parametrize(
    ("backend", "release", "nvml", "driver"),
    [
        ("cuda", "10", Nvml(), "581.29"),  # Windows
        ("cuda", "5.15.167-microsoft-standard-WSL2", Nvml(), "581.29"),
        ("cuda", "6.14.0", Nvml(status=9), "runtime 12090"),  # NVML_ERROR_DRIVER_NOT_LOADED
        ("cuda", "6.14.0", OSError("no such library"), "runtime 12090"),
        ("rocm", "6.14.0-37-generic", OSError(), "Linux 6.14"),
        ("xpu", "6.17.2-arch1", OSError(), "Linux 6.17"),
        ("rocm", "5.15.167-microsoft-standard-WSL2", OSError(), "runtime 12090"),
    ],
)
def test_a_driver_is_told_apart_without_sys(
    monkeypatch: pytest.MonkeyPatch, backend: str, release: str, nvml: Any, driver: str
) -> None:
    """Probe results are kept by it: one that never changes would outlive the driver that it was measured on."""
    monkeypatch.setattr(facts, "KERNEL_FILES", {})
    monkeypatch.setattr(facts.platform, "release", lambda: release)
    monkeypatch.setattr(facts.sys, "platform", "linux")
    monkeypatch.setattr(facts.ctypes, "CDLL", raising(nvml) if isinstance(nvml, OSError) else lambda _name: nvml)
    monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: 12090, raising=False)
    assert facts._driver(backend) == driver
    assert not getattr(nvml, "open", 0), "NVML stays open"


# comfy/model_management.py of ComfyUI 0.33, should_use_fp16: cards whose fp16 convolutions give NaN.
NO_FP16 = ("1660", "1650", "1630", "T500", "T550", "T600", "MX550", "MX450", "CMP 30HX", "T2000", "T1000", "T1200")


@pytest.mark.parametrize("card", [f"NVIDIA {name}" for name in (*NO_FP16, "GeForce GTX 1660 SUPER", "T400 4GB")])
def test_cards_that_comfyui_keeps_from_fp16_compute_in_fp32_here_too(card: str) -> None:
    machine = replace(profiles.facts_of("gtx16xx"), name=card)
    assert any(row.name == "gtx16_fp16_nan" for row in active(machine))
    assert not any(row.name == "gtx16_fp16_nan" for row in active(profiles.facts_of("turing")))


def test_no_row_denies_what_our_own_builds_show() -> None:
    """benchmarks/results/kernels_build.csv: Triton 3.7 builds every kernel of ours for sm70 and sm75."""
    with (ROOT / "benchmarks" / "results" / "kernels_build.csv").open(encoding="utf-8", newline="") as file:
        built = {row["target"] for row in csv.DictReader(file) if row["verdict"] == "ok" and row["triton"] >= "3.3"}
    assert {"sm_70", "sm_75"} <= built
    for arch in ("sm70", "sm75"):
        machine = replace(profiles.facts_of("turing"), arch=arch, versions={"triton": "3.7.1"})
        assert "triton" not in policy_for(machine).wrong


# The torch that the newest package of a back end requires, as its own metadata says.
PINNED_TORCH = {"DirectML": (2, 4)}  # torch-directml 0.2.5: torch==2.4.1


def test_no_back_end_is_claimed_whose_torch_is_below_our_own_floor() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    floor = re.search(r"oldest versions that work: .*?torch (\d+)\.(\d+)", text)
    assert floor is not None
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for name, newest in PINNED_TORCH.items():
        assert newest >= tuple(map(int, floor.groups())) or name not in readme, name
