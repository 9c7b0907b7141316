"""How bytes get to a device: small tensors together, mapped files where the device takes them well."""

import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from anygpu.compat.checkpoints.weights import described, read_tensors, release_pages
from anygpu.compat.device import timed_choice
from anygpu.compat.device.facts import facts_for
from anygpu.compat.device.probe_store import UNKNOWN, ProbeStore
from anygpu.compat.memory import transfer
from anygpu.compat.memory.offloader import ALIGNED_BYTES
from anygpu.compat.memory.transfer import (
    MAPPED,
    REPEATS,
    SAMPLE_BYTES,
    SMALL_BYTES,
    STAGING_BYTES,
    copy_times,
    maps_files,
    move,
    send_together,
)
from safetensors.torch import save_file
from simulated import accelerator, profiles


def mixed(count: int = 400) -> list[torch.Tensor]:
    """Tensors of many sizes, dtypes and layouts, the empty one and one of no axes among them."""
    kinds = (torch.float32, torch.bfloat16, torch.int64, torch.uint8)
    found = [torch.arange(1 + 37 * n % 3001).to(kinds[n % 4]) for n in range(count)]
    strided = torch.arange(96.0).view(1, 2, 3, 4, 4).contiguous(memory_format=torch.channels_last_3d)
    return [*found, torch.zeros(0), torch.tensor(3.5), strided, torch.ones(SMALL_BYTES // 4 + 1), torch.eye(9)[::2]]


def test_small_tensors_travel_together_and_arrive_as_they_were():
    tensors, sizes = mixed(), []

    def send(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.nbytes)
        return tensor.clone()

    found = dict(send_together(tensors, send))
    assert sorted(found) == list(range(len(tensors)))
    for index, tensor in enumerate(tensors):
        assert found[index].dtype is tensor.dtype and torch.equal(found[index], tensor), index
        assert found[index].stride() == tensor.stride() or not tensor.is_contiguous()
        assert found[index].storage_offset() * tensor.itemsize % ALIGNED_BYTES == 0
    assert len(sizes) == 4 + 4, "one transfer per dtype, and one each for what is large, empty or strided"


def test_a_staging_buffer_has_a_bound():
    sizes = []
    tensors = [torch.full((SMALL_BYTES // 4,), float(n)) for n in range(40)]
    found = dict(send_together(tensors, lambda tensor: sizes.append(tensor.nbytes) or tensor.clone()))
    assert all(torch.equal(found[n], tensors[n]) for n in range(40))
    assert sizes == [STAGING_BYTES, STAGING_BYTES, 40 * SMALL_BYTES - 2 * STAGING_BYTES]


@pytest.fixture
def clocked(monkeypatch: pytest.MonkeyPatch):
    """Makes the CPU a device with a clock that shows these milliseconds; returns the list of folders it timed in."""

    def made(**times: float) -> list[Path]:
        asked: list[Path] = []

        def measured(folder: Path, device: torch.device) -> dict[str, float]:
            asked.append(folder)
            return times

        monkeypatch.setattr(timed_choice, "CLOCKED", ("cpu",))
        monkeypatch.setattr(transfer, "copy_times", measured)
        return asked

    return made


@pytest.mark.parametrize(
    ("mapped", "own", "expected"), [(5.0, 9.0, True), (10.0, 9.0, True), (12.0, 9.0, False), (900.0, 9.0, False)]
)
def test_a_device_with_a_clock_is_asked_once(tmp_path: Path, clocked, mapped: float, own: float, expected: bool):
    """The answer of the device outranks the table, either way, and is kept; another kernel is asked anew."""
    asked = clocked(mapped=mapped, own=own)
    for backend in ("cuda", "rocm"):
        facts = replace(facts_for("cpu"), backend=backend, name=backend, versions={"kernel": "7.0.1"})
        found = {maps_files(facts, ProbeStore(facts, tmp_path)) for _ in range(2)}
        assert found == {expected}
    assert asked == [tmp_path, tmp_path]
    stored = ProbeStore(facts, tmp_path).recall("copies of mapped pages, system 7.0.1")
    assert stored == {"mapped": mapped, "own": own}, "what users have kept is read by this name"
    other = replace(facts, versions={"kernel": "7.0.2"})
    maps_files(other, ProbeStore(other, tmp_path))
    assert len(asked) == 3


def test_a_quiet_store_is_only_read(tmp_path: Path, clocked):
    """Nothing is timed and nothing written; the table decides until a timing is kept, which then counts."""
    facts = replace(facts_for("cpu"), backend="cuda", name="card", versions={"kernel": "7.0.1"})
    asked = clocked(mapped=9.0, own=1.0)
    quiet = partial(ProbeStore, facts, tmp_path, quiet=True)
    assert maps_files(facts, quiet()) and not asked and list(tmp_path.iterdir()) == []
    assert quiet()["matmul.fp32"].status == UNKNOWN and list(tmp_path.iterdir()) == []
    assert not maps_files(facts, ProbeStore(facts, tmp_path))
    assert not maps_files(facts, quiet()) and len(asked) == 1


def test_without_a_clock_the_table_and_the_known_bugs_decide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    facts = facts_for("cpu")
    assert maps_files(facts, None) and maps_files(facts, ProbeStore(facts, tmp_path))
    radeon = replace(facts, backend="rocm", arch="gfx1201", versions={"system": "Linux"})
    assert not maps_files(radeon, None) and set(MAPPED) == {"cpu", "cuda"}

    def broken(folder: Path, device: torch.device) -> dict[str, float]:
        raise OSError("read-only")

    monkeypatch.setattr(timed_choice, "CLOCKED", ("cpu",))
    monkeypatch.setattr(transfer, "copy_times", broken)
    store = ProbeStore(facts, tmp_path)
    assert maps_files(replace(facts, backend="cuda"), store)
    assert store.recall("copies of mapped pages, system ") is None, "a failure is not kept"


def test_a_way_that_fails_is_left_out_and_one_far_behind_is_timed_once():
    runs: list[str] = []

    def way(name: str, seconds: float = 0.0) -> None:
        runs.append(name)
        time.sleep(seconds)
        if name == "broken":
            raise RuntimeError(name)

    ways = {"quick": partial(way, "quick"), "broken": partial(way, "broken"), "slow": partial(way, "slow", 0.05)}
    times = timed_choice.milliseconds(ways, torch.device("cpu"), 3)
    assert set(times) == {"quick", "slow"} and times["slow"] >= 50 > times["quick"]
    assert runs == ["quick"] * 4 + ["broken"] + ["slow"] * 2, "the first run of each is not counted"


def test_the_clock_sees_a_driver_that_stalls(tmp_path: Path):
    """The simulated Radeon, whose copies from mapped pages wait as long as ROCm's were seen to."""
    if reason := accelerator.reason():
        pytest.skip(reason)
    with accelerator.fresh() as device:
        stalled = []

        def stall(op: str, arguments: list) -> None:
            sources = [t for t in arguments if isinstance(t, torch.Tensor) and t.device.type == "cpu"]
            if any(t.nbytes == SAMPLE_BYTES and profiles.file_behind(t) for t in sources):
                stalled.append(op)
                time.sleep(0.05)

        with accelerator.hook("aten::copy_", stall), accelerator.hook("aten::_copy_from", stall):
            found = copy_times(tmp_path, device)
    assert 2 <= len(stalled) <= REPEATS + 1 and found["mapped"] >= 50 and found["own"] > 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("count", [1, 100])
def test_a_module_of_small_tensors_goes_in_one_transfer(count: int):
    if reason := accelerator.reason():
        pytest.skip(reason)
    with accelerator.fresh() as device:
        module = torch.nn.Sequential(*(torch.nn.LayerNorm(8) for _ in range(count)))
        expected = [torch.randn_like(tensor) for tensor in module.parameters()]
        for tensor, value in zip(module.parameters(), expected, strict=True):
            tensor.data = value
        accelerator.reset_traffic()
        move(module, device, "norms")
        assert accelerator.traffic().to_device_copies == 1
        assert all(torch.equal(t.cpu(), value) for t, value in zip(module.parameters(), expected, strict=True))


def test_a_view_that_is_let_go_reads_the_same_bytes_and_holds_no_memory(tmp_path: Path):
    save_file({"large": torch.arange(2**23, dtype=torch.int32)}, tmp_path / "a.safetensors")
    tensor = read_tensors(described([tmp_path / "a.safetensors"]), None, lambda _: None, mapped=True)["large"]
    parameter = torch.nn.Parameter(tensor.view(2048, 4096), requires_grad=False)
    del tensor

    def resident() -> int:
        lines = Path("/proc/self/smaps").read_text(encoding="utf-8").split("\n")
        first = next(i for i, line in enumerate(lines) if line.endswith("a.safetensors"))
        return int(next(line for line in lines[first:] if line.startswith("Rss:")).split()[1])

    total, before = int(parameter.sum()), resident()
    release_pages(parameter)
    assert before > 30_000 > 100 > resident()
    assert int(parameter.sum()) == total == (2**23 - 1) * 2**22
    release_pages(torch.ones(4))  # which is nobody's view
