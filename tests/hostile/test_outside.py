"""The outside misbehaves in every way, question by question: a right clip or one clear line, never a raw exception."""

import ctypes
import errno
import functools
import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from anygpu.compat.device import facts
from anygpu.compat.device.facts import facts_for, flags
from anygpu.compat.device.probe_store import ProbeStore
from anygpu.compat.device.quirks import DevicePolicy, convolution_switches
from anygpu.compat.errors import PackError, parts_of
from anygpu.compat.memory import prefetch
from anygpu.compat.memory.statistics import MemoryStats
from anygpu.compat.report import report_on
from anygpu.pipelines.base import Silent
from anygpu.pipelines.files import catalogue, download
from anygpu.pipelines.files.models import find_models
from anygpu.pipelines.records.machines import this_machine
from anygpu.pipelines.records.receipts import versions
from anygpu.pipelines.report import hardware_report, precisions
from simulated import accelerator
from test_routes import Pack, graph_of, pack  # noqa: F401

from hostile.faults import ABSENT, LIES, TESTS, clip, misbehaving
from hostile.outside import (
    CLUSTER,
    CONSTANT,
    DEVICE,
    DOWNLOAD,
    FACTS,
    FARM,
    FILES,
    FLAGS,
    HOST,
    JOB,
    KITCHEN,
    NAMES,
    STREAMS,
    TABLE,
    questions,
)
from hostile.test_device import RAISED, TRITON_ERRORS

ROUNDING = 1e-5
RAISES = (*(error for error in RAISED if error not in TRITON_ERRORS), MemoryError())  # Triton's come from its launches
LOSSES = (
    PermissionError(errno.EACCES, "Permission denied"),
    FileNotFoundError(errno.ENOENT, "No such file or directory"),
    OSError(errno.ENOSPC, "No space left on device"),
    OSError(errno.EROFS, "Read-only file system"),
    OSError(errno.EIO, "Input/output error"),
    OSError(errno.ESTALE, "Stale file handle"),
    BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"),
)


def test_every_question_to_the_outside_is_in_the_table() -> None:
    asked = questions()
    assert not {name: sorted(files) for name, files in asked.items() if name not in TABLE}, "new: who attacks it?"
    assert not TABLE.keys() - asked.keys(), "nobody asks these any more"


def test_who_is_said_to_attack_a_question_names_it() -> None:
    known = {JOB, FACTS, STREAMS, FLAGS, FILES, CONSTANT, HOST, DOWNLOAD, FARM, CLUSTER, KITCHEN, NAMES}
    assert set(TABLE.values()) == known
    text = (TESTS / HOST).read_text(encoding="utf-8")
    missing = [name for name, by in TABLE.items() if by == HOST and name.rpartition(".")[2] not in text]
    assert not missing, f"{HOST} does not attack {missing}"


def test_a_question_is_found_however_it_is_put() -> None:
    import ast

    from hostile.outside import _questions

    text = """
import psutil, torch, sys
import comfy.model_management as mm
from huggingface_hub import snapshot_download
module = getattr(torch, device.type, None)
hub = imported("huggingface_hub.utils")
def ask(path):
    module.mem_get_info(device)
    psutil.Process(1).create_time()
    management = mm
    mm.unload_all_models()
    getattr(torch.accelerator, "empty_host_cache", None)
    hub.logging.disable()
    sys.modules.get("torch_xla.runtime").device_type()
    path.read_text()
    torch.ones(3)
"""
    assert set(_questions(ast.walk(ast.parse(text)))) >= {
        f"{DEVICE}.mem_get_info", "psutil.Process", "comfy.model_management.unload_all_models",
        "torch.accelerator.empty_host_cache", "huggingface_hub.utils.logging.disable", "Path.read_text",
        "huggingface_hub.snapshot_download", "torch_xla.runtime.device_type",
    }  # fmt: skip


# ---- how the outside is made to misbehave -------------------------------------------------------------------------


class Odd:
    """An object of the outside of which one attribute misbehaves."""

    def __init__(self, original: Any, name: str, behaviour: Any) -> None:
        self.__dict__.update(_original=original, _name=name, _behaviour=behaviour)

    def __getattr__(self, name: str) -> Any:
        if name != self._name:
            return getattr(self._original, name)
        if self._behaviour is ABSENT:
            raise AttributeError(name)
        if isinstance(self._behaviour, BaseException):
            raise self._behaviour
        return self._behaviour

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._original, name, value)


def place_of(name: str) -> tuple[Any, str]:
    """The object that has a question, and its name there."""
    owner, _, last = name.rpartition(".")
    if owner == DEVICE:
        return torch.acc, last
    if owner == "Path":
        return Path, last
    module = importlib.import_module(owner.partition(".")[0])
    for part in owner.split(".")[1:]:
        module = getattr(module, part) if hasattr(module, part) else importlib.import_module(owner)
    return module, last


def attack(monkeypatch: pytest.MonkeyPatch, name: str, behaviour: Any) -> list[int]:
    """Make one question misbehave; returns how often a shipped file asked it, counted from now on."""
    owner, last = place_of(name)
    count = [0]
    if behaviour is ABSENT and last in vars(owner):
        monkeypatch.delattr(owner, last)
    elif behaviour is ABSENT and hasattr(owner, last):  # a module that makes its names when they are asked for
        monkeypatch.setitem(sys.modules, owner.__name__, Odd(owner, last, ABSENT))
    elif hasattr(owner, last):
        monkeypatch.setattr(owner, last, misbehaving(getattr(owner, last), behaviour, count))
    return count


def in_words(value: Any) -> str:
    """A behaviour, for the name of a cell."""
    if value is ABSENT:
        return "absent"
    return (
        f"raises {type(value).__name__} {getattr(value, 'errno', '') or ''}"
        if isinstance(value, BaseException)
        else repr(value)
    )


# ---- one job ------------------------------------------------------------------------------------------------------


@dataclass
class Job:
    """All that a user does in one sitting, and what each part of it must come to."""

    folder: Path
    home: Path
    pack: Pack
    expected: tuple[torch.Tensor, torch.Tensor]

    def run(self, device: Any) -> list[str]:
        """What was refused, in one line each; everything else is as it should be."""
        lines: list[str] = []
        for part in (self._lists, self._clip, self._report, self._panel):
            try:
                part(device)
            except (PackError, torch.OutOfMemoryError) as error:
                told = parts_of(str(error))
                assert {"found", "expected", "fix"} <= told.keys() and "\n" not in str(error).strip(), repr(error)
                lines.append(str(error))
        return lines

    def _lists(self, device: Any) -> None:
        """What the nodes list when they are defined: one that raises is missing in ComfyUI."""
        folders = sys.modules["anygpu.host.folders"]
        for listed in ("model_choices", "providers", "paint_choices", "paint_providers"):
            assert all(type(name) is str for name in getattr(folders, listed)()), listed
        assert folders.paint_models() == {} and all(type(name) is str for name in folders.upscalers())

    def _clip(self, device: Any) -> None:
        for one, other in zip(clip(self.folder, device, self.home / "state"), self.expected, strict=True):
            torch.testing.assert_close(one, other, atol=ROUNDING, rtol=ROUNDING)

    def _report(self, device: Any) -> None:
        assert "Device" in str(hardware_report(device, self.home / "state"))
        versions.cache_clear()
        told = json.loads(this_machine(device, self.home / "state", precisions()).text())
        assert told["device"] and told["versions"]["anygpu"], told

    def _panel(self, device: Any) -> None:
        status, told, _ = self.pack.ask("GET", "/anygpu/machine")
        assert status == 200 and told["sections"], told
        status, told, _ = self.pack.ask("POST", "/anygpu/graph", json=graph_of())
        assert status == 200 and len(told["pipelines"]) == 1, told


@pytest.fixture(scope="module")
def expected(tiny_folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    return clip(tiny_folder, "cpu", None)


@pytest.fixture
def job(tiny_folder: Path, tmp_path: Path, pack: Pack, expected: Any, monkeypatch: Any) -> Iterator[Job]:  # noqa: F811
    """On the simulated device, which ComfyUI computes on too; small products are enough to ask it about."""
    for name, small in (("WIDTH", 256), ("ROWS", (1, 17, 97, 300))):
        monkeypatch.setattr(sys.modules["anygpu.compat.device.packed_paths"], name, small)
    if reason := accelerator.reason():
        pytest.skip(reason)
    (pack.home / "models" / "LTX-Video").symlink_to(tiny.build("ltx", tiny_folder), target_is_directory=True)
    sys.modules["anygpu.host.memory_manager"].compute_device = lambda: torch.device("acc", 0)  # type: ignore[attr-defined]
    with accelerator.fresh():
        yield Job(tiny_folder, tmp_path, pack, expected)


CELLS = [
    (name, behaviour)
    for name, by in TABLE.items()
    for behaviour in (ABSENT, *RAISES, *LIES)
    if by == JOB and not (behaviour is ABSENT and name.partition(".")[0] in sys.stdlib_module_names)
]


def cell(values: tuple[str, Any]) -> Any:
    """A cell of the table under a name that says it."""
    return pytest.param(*values, id=f"{values[0]} {in_words(values[1])}")


# Of these a device without an answer has no clip; what they say is one line.
NEEDED = {f"{DEVICE}.synchronize", "torch.accelerator.current_device_index"}


@pytest.mark.full
@pytest.mark.parametrize(("name", "behaviour"), map(cell, CELLS))
def test_a_job_beside_an_outside_that_misbehaves(
    job: Job, monkeypatch: pytest.MonkeyPatch, name: str, behaviour: Any
) -> None:
    with monkeypatch.context() as patched:
        attack(patched, name, behaviour)
        lines = job.run("acc:0")
    assert not lines or name in NEEDED, lines
    if behaviour is ABSENT or behaviour is RAISES[0]:
        assert not job.run("acc:0"), "and what it left behind is harmless"


ALONE = """
import importlib, importlib.metadata, platform, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
import diffusers, psutil, torch, transformers
from hostile.faults import clip, misbehaving
from test_layers import SOURCES

for name in ("triton", "comfy_kitchen", "trimesh"):
    sys.modules[name] = None
for owner, names in (
    (torch.accelerator, ("current_accelerator", "current_device_index", "device_count", "device_index")),
    (psutil, ("virtual_memory", "swap_memory", "Process")),
    (platform, ("release", "system", "machine", "mac_ver")),
    (importlib.metadata, ("version",)),
):
    for name in names:
        setattr(owner, name, misbehaving(getattr(owner, name), RuntimeError("nobody answers"), [0]))
for source in SOURCES:
    if source.startswith(("compat/", "kernels/", "pipelines/", "paint/", "cli.py")) and "_triton/" not in source:
        importlib.import_module("anygpu." + source.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
from anygpu.pipelines.report import hardware_report
latents, frames = clip(Path({folder!r}), None, Path({state!r}))
assert "Device" in str(hardware_report(None, Path({state!r})))
torch.save((latents, frames), {result!r})
"""


@pytest.mark.full
def test_import_load_clip_and_report_where_nobody_answers_at_all(
    tiny_folder: Path, tmp_path: Path, expected: tuple[torch.Tensor, torch.Tensor]
) -> None:
    program = ALONE.format(
        tests=str(TESTS), folder=str(tiny_folder), state=str(tmp_path / "state"), result=str(tmp_path / "clip.pt")
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    for one, other in zip(torch.load(tmp_path / "clip.pt"), expected, strict=True):
        torch.testing.assert_close(one, other, atol=ROUNDING, rtol=ROUNDING)


# ---- streams ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["torch.Event", "torch.Stream", "torch.accelerator.current_stream"])
def test_a_device_whose_streams_misbehave_copies_before_it_computes(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    if reason := accelerator.reason():
        pytest.skip(reason)
    with accelerator.fresh() as device:
        assert prefetch.copy_stream(device) is not None
        for behaviour in (ABSENT, *RAISES, *LIES):
            with monkeypatch.context() as patched:
                attack(patched, name, behaviour)
                assert prefetch.copy_stream(device) is None, behaviour
                with MemoryStats().waiting(device):  # which asks the device's clock
                    pass


# ---- torch's flags ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name, by in TABLE.items() if by == FLAGS])
def test_flags_are_plain_values_whatever_torch_answers(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    known = flags()
    for switch in ("enabled", "benchmark"):  # what a lie is taken for is put back as it was said
        monkeypatch.setattr(torch.backends.cudnn, switch, getattr(torch.backends.cudnn, switch))
    above, _, last = name.rpartition(".")
    holder, _, attribute = above.rpartition(".")
    for behaviour in (ABSENT, *RAISES, *LIES):
        with monkeypatch.context() as patched:
            owner, _ = place_of(name)
            if holder:
                patched.setattr(importlib.import_module(holder), attribute, Odd(owner, last, behaviour))
            else:
                attack(patched, name, behaviour)
            found = flags()
            assert found.keys() == known.keys() and {type(value) for value in found.values()} == {bool}, behaviour
            with convolution_switches(DevicePolicy(vae_cudnn=False, benchmark=False)):
                pass


def test_switches_that_another_pack_has_locked_stay_and_end_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """After torch.backends.disable_global_flags() every assignment raises."""
    held = torch.backends.disable_global_flags.__globals__
    monkeypatch.setitem(held, "__allow_nonbracketed_mutation_flag", False)
    with pytest.raises(RuntimeError, match="disable_global_flags"):
        torch.backends.cudnn.benchmark = True
    with convolution_switches(DevicePolicy(vae_cudnn=False, benchmark=False)):
        assert torch.backends.cudnn.enabled


# ---- machines -----------------------------------------------------------------------------------------------------

PROPERTIES = SimpleNamespace(name="a card", total_memory=8 << 30, major=8, minor=6, gcnArchName="gfx1100")


def machine_of(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """A machine of this kind, as far as the file of facts can tell."""
    monkeypatch.setattr(facts, "_parsed", lambda device: torch.device(device))
    monkeypatch.setattr(facts, "KERNEL_FILES", {})
    monkeypatch.setattr(ctypes, "CDLL", lambda name: (_ for _ in ()).throw(OSError(name)))
    for module in (torch.cuda, torch.xpu):
        monkeypatch.setattr(module, "get_device_properties", lambda device: PROPERTIES)
        monkeypatch.setattr(module, "get_arch_list", lambda: ["sm_86"])
    xla = SimpleNamespace(get_memory_info=lambda device: {"bytes_limit": 8 << 30})
    monkeypatch.setitem(sys.modules, "torch_xla", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "torch_xla.core", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "torch_xla.core.xla_model", xla)
    monkeypatch.setitem(sys.modules, "torch_xla.runtime", SimpleNamespace(device_type=lambda: "TT"))
    if kind == "rocm":
        monkeypatch.setattr(torch.version, "hip", "7.2.0")


KINDS = {"torch.cuda": ("cuda", "rocm"), "torch.xpu": ("xpu",), "torch_xla": ("xla",), "platform": ("mps",)}
MACHINES = [
    (name, kind)
    for name, by in TABLE.items()
    if by == FACTS
    for kind in next((kinds for start, kinds in KINDS.items() if name.startswith(start)), ("cuda", "rocm"))
]


@pytest.mark.parametrize(("name", "kind"), MACHINES)
def test_a_machine_whose_driver_misbehaves_is_described(monkeypatch: pytest.MonkeyPatch, name: str, kind: str) -> None:
    device = torch.device({"rocm": "cuda"}.get(kind, kind), 0)
    odd = [SimpleNamespace(**{**vars(PROPERTIES), field: lie}) for field in vars(PROPERTIES) for lie in LIES]
    lies = (*LIES, *odd) if name.endswith("get_device_properties") else LIES
    for behaviour in (ABSENT, *RAISES, *lies):
        with monkeypatch.context() as patched:
            machine_of(patched, kind)
            if name.startswith("torch_xla"):
                module, _, last = name.rpartition(".")
                patched.setitem(sys.modules, module, Odd(SimpleNamespace(), last, behaviour))
            elif name.startswith("torch.version"):
                value = "" if behaviour is ABSENT or isinstance(behaviour, BaseException) else behaviour
                patched.setattr(torch.version, name.rpartition(".")[2], value)
            else:
                attack(patched, name, behaviour)
            machine = facts_for(device)
            assert type(machine.name) is str and type(machine.total_bytes) is int and machine.total_bytes >= 0, (
                behaviour
            )
            here = replace(machine, device=torch.device("cpu"))  # which stands in for it
            told = report_on(here, ProbeStore(here, quiet=True), precisions(), None)
            assert str(told) and str(machine), behaviour
            assert {type(value) for value in machine.versions.values()} <= {str}


# ---- files --------------------------------------------------------------------------------------------------------

ELSEWHERE = {  # in nodes, whose executor shows what they raise, or in tiny checkpoints: not on the way of a job
    *("os.path.realpath", "os.walk", "os.utime", "shutil.rmtree", "shutil.disk_usage", "tempfile.TemporaryDirectory"),
    *("Path.is_symlink", "Path.expanduser", "Path.absolute", "Path.write_bytes", "Path.read_bytes"),
}
LOST = [(name, loss) for name, by in TABLE.items() if by == FILES and name not in ELSEWHERE for loss in LOSSES]


@pytest.mark.full
@pytest.mark.parametrize(("name", "loss"), map(cell, LOST))
def test_a_job_beside_a_disk_that_fails(job: Job, monkeypatch: pytest.MonkeyPatch, name: str, loss: Exception) -> None:
    """The clip, or one line: what cannot be read is named, and what cannot be kept is done without."""
    with monkeypatch.context() as patched:
        attack(patched, name, loss)
        job.run("acc:0")
    assert not job.run("acc:0")


def test_a_folder_that_cannot_be_read_hides_no_model(tmp_path: Path, tiny_folder: Path, monkeypatch: Any) -> None:
    """``lost+found`` of a disk of its own, or a share that is gone: the load node lists the others."""
    (tmp_path / "LTX-Video").symlink_to(tiny.build("ltx", tiny_folder), target_is_directory=True)
    locked = tmp_path / "lost+found"
    locked.mkdir()
    for name in ("iterdir", "is_dir"):
        original = getattr(Path, name)

        def refused(path: Path, original: Any = original) -> Any:
            if path == locked:
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return original(path)

        with monkeypatch.context() as patched:
            patched.setattr(Path, name, refused)
            assert find_models([tmp_path]) == [tmp_path / "LTX-Video"]


# ---- a download ---------------------------------------------------------------------------------------------------


class Api:
    """A Hub that has one file."""

    def __init__(self, endpoint: Any = None) -> None:
        pass

    def list_repo_tree(self, *_: Any, **__: Any) -> list[Any]:
        return [SimpleNamespace(path="model_index.json", size=2)]

    def verify_repo_checksums(self, *_: Any, **__: Any) -> Any:
        return SimpleNamespace(mismatches=[], missing_paths=[], extra_paths=[], checked_count=1)


def http_get(url: str, file: Any, **_: Any) -> None:
    file.write(b"{}")


HUB = [
    (name, failure)
    for name, by in TABLE.items()
    if by == DOWNLOAD and not name.startswith("huggingface_hub.errors") and not name.endswith("__version__")
    for failure in (ABSENT, *RAISES, *LOSSES, TimeoutError(), ConnectionError("refused"))
]


@pytest.mark.parametrize(("name", "failure"), map(cell, HUB))
def test_a_download_that_fails_says_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, failure: Any
) -> None:
    import huggingface_hub
    import huggingface_hub.file_download as transfers

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(transfers, "http_get", http_get)
    ask = functools.partial(download.fetched, next(iter(catalogue.offers())), "download", [tmp_path], Silent())
    with monkeypatch.context() as patched:
        if name == "shutil.move":  # asked where the folder is on another disk than its part files
            attack(patched, "os.replace", OSError(errno.EXDEV, "Invalid cross-device link"))
        attack(patched, name, failure)
        with pytest.raises(PackError) as caught:
            ask()
    assert "\n" not in str(caught.value) and caught.value.found and caught.value.fix
