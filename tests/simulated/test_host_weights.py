"""Weights in host memory: locked, ordinary or left in their files by what the host has, and copies that use it."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from anygpu.compat.checkpoints import weights as checkpoints
from anygpu.compat.checkpoints.headers import TensorEntry, entries_and_notes
from anygpu.compat.checkpoints.weights import read_tensors
from anygpu.compat.device import facts as device
from anygpu.compat.device.facts import facts_for
from anygpu.compat.errors import UnsupportedError
from anygpu.compat.memory import hooks, transfer
from anygpu.compat.memory import offloader as host_weights
from anygpu.compat.memory.hooks import hooks_on
from anygpu.compat.memory.offloader import DISK, PINNED, PLAIN, choose_host_weights, views_of
from anygpu.compat.memory.statistics import MemoryStats
from anygpu.pipelines.files.part import PartFiles
from anygpu.pipelines.forecast.fit import plan_line
from anygpu.pipelines.load.reading import fit_host_memory

from simulated import accelerator
from simulated.fitting import forget, heavy, run

ROUNDING = 1e-5  # fp32; the same sums in another order
BYTES = {"vae": 10, "text_encoder": 30, "transformer": 60}


@pytest.mark.parametrize(
    ("free", "pins", "unified", "kinds", "told"),
    [
        (120, True, False, (PLAIN, PLAIN, PINNED), "transformer pinned while it comes by block or layer"),
        (119, True, False, (PLAIN, PLAIN, PLAIN), "50% of it may be pinned at most"),
        (500, False, False, (PLAIN, PLAIN, PLAIN), "this device cannot use pinned host memory"),
        (500, True, True, (PLAIN, PLAIN, PLAIN), "host and device share one memory"),
        (99, True, False, (PLAIN, PLAIN, DISK), "transformer disk-backed"),
        (30, True, False, (PLAIN, DISK, DISK), "text_encoder, transformer disk-backed"),
    ],
)
def test_the_choice_follows_what_the_host_has(free, pins, unified, kinds, told):
    found = choose_host_weights(BYTES, BYTES | {"vae": 0}, free, pins, unified)
    assert tuple(found.kinds.values()) == kinds and told in str(found.decision)


def limited(monkeypatch, tmp_path, free: int) -> None:
    """This process may take ``free`` bytes more, as its control group says."""
    most, used = tmp_path / "memory.max", tmp_path / "memory.current"
    most.write_text(str(free)), used.write_text("0")
    monkeypatch.setattr(device, "CGROUPS", (("", str(tmp_path), most.name, used.name),))


def sources(seen: list[tuple[bool, int]]):
    """A hook that notes of each copy to the device whether it comes from locked memory, and its bytes."""

    def before(_name, arguments):
        tensors = [value for value in arguments if isinstance(value, torch.Tensor)]
        source = next((value for value in tensors if value.device.type == "cpu"), None)
        if source is not None and len(tensors) == 2:
            seen.append((source.is_pinned(), source.nbytes))

    return accelerator.hook("aten::*copy*", before=before)


def test_a_transformer_by_block_is_copied_from_locked_memory(acc, tiny_folder):
    pipeline, seen = heavy("ltx", tiny_folder, acc, "group"), []
    assert "transformer pinned while it comes by block or layer" in plan_line(pipeline)
    before = {name: tensor.clone() for name, tensor in pipeline.parts.read("transformer").state_dict().items()}
    memory_stats = pipeline.offloader.memory_stats
    with (
        sources(seen),
        pipeline.offloader.hold("transformer") as transformer,
        memory_stats.stage("s", "p", "m", acc) as cost,
    ):
        for group in hooks_on(transformer).groups:
            group.onload(), group.offload()
    size = hooks_on(transformer).total_bytes
    assert sum(count for locked, count in seen if locked) == sum(count for _, count in seen) == size
    assert cost.moved_bytes == size and 0 < cost.moving_seconds < cost.seconds, "told by the device's clock"
    assert all(torch.equal(tensor, before[name]) for name, tensor in transformer.state_dict().items())


def test_nothing_is_locked_where_the_host_is_small(acc, tiny_folder, monkeypatch, tmp_path):
    total = sum(part.total for part in heavy("ltx", tiny_folder, acc).weights.values())
    limited(monkeypatch, tmp_path, int(1.1 * total))
    pipeline, seen = heavy("ltx", tiny_folder, acc, "group"), []
    assert "may be pinned at most" in plan_line(pipeline)
    with sources(seen), pipeline.offloader.hold("transformer") as transformer:
        assert not any(tensor.is_pinned() for tensor in transformer.parameters())
        for group in hooks_on(transformer).groups:
            group.onload(), group.offload()
    largest = max(group.total_bytes for group in hooks_on(transformer).groups)
    assert seen and all(locked and count <= largest + 2**16 for locked, count in seen), "by way of two buffers"


def test_a_system_that_locks_no_more_is_no_failure(monkeypatch, caplog):
    def refused(*_args, **_named):
        raise RuntimeError("cudaErrorMemoryAllocation")

    tensor = torch.ones(4)
    monkeypatch.setattr(torch, "empty", refused)
    assert host_weights.pin([tensor]) == 0 and torch.equal(tensor, torch.ones(4))
    assert "stay unpinned: cudaErrorMemoryAllocation" in caplog.text


def test_all_that_stays_unpinned_is_counted(monkeypatch, caplog):
    """A system that locks the first of three slabs and no more."""
    tensors, empty, slabs = [torch.ones(500_000) for _ in range(3)], torch.empty, []

    def first_only(*shape, **named):
        slabs.append(shape)
        if len(slabs) > 1:
            raise RuntimeError("no more")
        return empty(*shape, dtype=named["dtype"])

    monkeypatch.setattr(host_weights, "SLAB_BYTES", 2**21)
    monkeypatch.setattr(torch, "empty", first_only)
    assert host_weights.pin(tensors) == 2_000_000
    assert "3.8 MB of weights stay unpinned" in caplog.text


def test_little_more_is_locked_than_the_weights():
    """Of blocks of LTX-Video 13B, in bf16; torch rounds up to a power of two."""
    block = [(4096, 4096), (4096,)] * 8 + [(16384, 4096), (16384,), (4096, 16384), (4096,)]
    tensors = [torch.empty(shape, dtype=torch.bfloat16, device="meta") for _ in range(48) for shape in block]
    slabs = [sum(map(host_weights.padded, group)) for group in host_weights._slabs(tensors)]
    assert sum(2 ** (size - 1).bit_length() for size in slabs) <= 1.15 * sum(tensor.nbytes for tensor in tensors)


def written_pages(name: str) -> int:
    """Bytes of this process's mappings of files called ``name`` that are no longer the file's own pages."""
    found, inside = 0, False
    with Path("/proc/self/smaps").open() as file:
        for line in file:
            head = line.split()
            if "-" in head[0]:
                inside = line.rstrip().endswith(name)
            elif inside and head[0] == "Anonymous:":
                found += int(head[1]) * 1024
    return found


def in_files(monkeypatch, tmp_path) -> None:
    """Weights stay in their files, small ones too: a host without room."""
    monkeypatch.setattr(checkpoints, "VIEW_BYTES", 4096)
    limited(monkeypatch, tmp_path, 4_000_000)


def test_moves_leave_views_of_a_file_what_they_are(acc, tiny_folder, monkeypatch, tmp_path):
    in_files(monkeypatch, tmp_path)
    pipeline = heavy("ltx", tiny_folder, acc, "none")
    module = pipeline.parts.read("transformer")
    before = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in module.state_dict().items()}
    views = views_of(module)
    returned = accelerator.traffic().to_host_bytes
    with pipeline.offloader.hold("transformer"):
        assert all(tensor.device == acc for tensor in module.parameters())
    pipeline.offloader.release("transformer")
    held = sum(tensor.nbytes for tensor in module.parameters() if views.holds(tensor))
    others = sum(tensor.nbytes for tensor in module.parameters() if not views.holds(tensor))
    assert views.staged and held >= 0.9 * pipeline.weights["transformer"].total
    assert accelerator.traffic().to_host_bytes - returned <= others + 2**18, "and the 128 KB that ask how bits travel"
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name][1])
        assert not views.holds(tensor) or tensor.data_ptr() == before[name][0]


@pytest.mark.full
@pytest.mark.parametrize("mode", ["group", "none", "model", "sequential"])
def test_weights_that_the_host_cannot_hold_stay_in_their_files(acc, tiny_folder, monkeypatch, tmp_path, mode):
    """They are never copied into memory that only swap could take, and the video is the same."""
    expected = run(heavy("ltx", tiny_folder, "cpu"))
    in_files(monkeypatch, tmp_path)
    pipeline = heavy("ltx", tiny_folder, acc, mode)
    assert set(pipeline.offloader.options.host_weights.of(DISK)) == {"transformer", "text_encoder"}
    assert "disk-backed: 3.8 MB of host memory free" in plan_line(pipeline)
    for _ in range(2):
        for one, other in zip(run(pipeline), expected, strict=True):
            torch.testing.assert_close(one, other, atol=ROUNDING, rtol=ROUNDING)
    for part in ("transformer", "text_encoder"):
        pipeline.offloader.release(part)
        module = pipeline.parts.read(part)
        views = views_of(module)
        held = sum(tensor.nbytes for tensor in module.parameters() if views.holds(tensor))
        assert views.staged and held >= 0.9 * pipeline.weights[part].total, part
    assert written_pages(".safetensors") == 0
    forget(pipeline)
    assert accelerator.memory().allocated_bytes == 0


def test_a_part_that_must_be_cast_cannot_stay_in_its_file(tmp_path):
    entry = TensorEntry(tmp_path / "a", "BF16", (2**20, 2), 0, 2**22)
    whole = PartFiles("transformer", "diffusers", "", tmp_path, {}, {"w": entry}, torch.float32)
    here = replace(facts_for("cpu"), backend="other")
    with pytest.raises(UnsupportedError, match=r"1\.0 MB of host memory for the transformer.*expected 7\.0 MB more"):
        fit_host_memory({"transformer": whole}, here, 10**6, 0)
    files, found = fit_host_memory({"transformer": replace(whole, dtype=torch.bfloat16)}, here, 10**6, 0)
    assert found.of(DISK) == ("transformer",) and files["transformer"].mapped and files["transformer"].staged


GIB = 1024**3


@pytest.mark.parametrize(
    ("memory", "page_file", "weights", "kept"),
    [  # GiB of a common Windows machine that are free, and of a model
        (12, 4, {"vae": 1, "text_encoder": 9, "transformer": 24}, (PLAIN, PLAIN, DISK)),
        (24, 0, {"vae": 1, "text_encoder": 9, "transformer": 24}, (PLAIN, PLAIN, DISK)),
        (6, 0, {"vae": 1, "text_encoder": 9, "transformer": 24}, (PLAIN, DISK, DISK)),
        (48, 0, {"vae": 1, "text_encoder": 9, "transformer": 24}, (PLAIN, PLAIN, PLAIN)),
    ],
)
def test_windows_leaves_in_their_files_what_does_not_fit(tmp_path, memory, page_file, weights, kept):
    """It promises no memory for views that nobody can write to, so that neither memory nor page file must hold them."""
    files = {}
    for name, size in weights.items():
        entry = TensorEntry(tmp_path / name, "BF16", (size * GIB // 2,), 0, size * GIB)
        files[name] = PartFiles(name, "diffusers", "", tmp_path, {}, {"w": entry}, torch.bfloat16)
    files["vae"] = replace(files["vae"], dtype=torch.float32)  # cast while it is read
    files, decided = fit_host_memory(files, facts_for("cpu"), memory * GIB, page_file * GIB)
    assert tuple(decided.kinds.values()) == kept
    assert [part.mapped for part in files.values()] == [kind == DISK for kind in kept]


def test_a_view_that_nobody_may_write_to_holds_what_the_file_has(tmp_path, monkeypatch, recwarn):
    monkeypatch.setattr(checkpoints, "READ_ONLY", True)
    monkeypatch.setattr(checkpoints, "VIEW_BYTES", 16)
    values = torch.arange(64, dtype=torch.float32)
    path = checkpoints.write_tensors(tmp_path / "a.safetensors", {"w": values}, {})
    for dtype in (None, torch.float16):
        tensor = read_tensors(entries_and_notes(path)[0], dtype, lambda _bytes: None, mapped=True)["w"]
        assert torch.equal(tensor.float(), values)
    assert not recwarn.list, "torch warns of memory that it cannot write to"
    read = read_tensors(entries_and_notes(path)[0], None, lambda _bytes: None, mapped=True)["w"]
    place = read.untyped_storage().pages[0]
    with pytest.raises(TypeError, match="readonly"):
        place[0] = 1
    checkpoints.release_pages(tensor)


READ_ONLY = """
import sys
sys.path.insert(0, {tests!r})
import torch
from pathlib import Path
from anygpu.compat.checkpoints import weights
import tiny
from anygpu.pipelines.load.folder import LoadRequest, load
from simulated import accelerator
from simulated.test_families import CASES, rendered
weights.READ_ONLY = True
weights.VIEW_BYTES = 64
torch.set_num_threads(1)
devices = ["cpu", "acc:0"] if not accelerator.reason() else ["cpu"]
if len(devices) > 1:
    accelerator.load()
for device in devices:
    paths = [tiny.build(name, Path({folder!r})) for name in CASES[{name!r}].checkpoints]
    for precision in ("fp32", "bf16"):
        chosen = LoadRequest(*paths, precision=precision, device=device)
        rendered(load(chosen), CASES[{name!r}])
print("nobody wrote")
"""


@pytest.mark.full
@pytest.mark.parametrize("name", ["ltx image", "hunyuan_video image", "hunyuan_video_15 image", "framepack", "mochi"])
def test_nobody_writes_to_weights_in_read_only_pages(tiny_folder, name):
    """It would end the process, so another one runs it."""
    program = READ_ONLY.format(tests=str(Path(__file__).resolve().parents[1]), folder=str(tiny_folder), name=name)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "nobody wrote", f"ended with {done.returncode}: {done.stderr[-600:]}"


def test_a_file_larger_than_all_memory_can_be_mapped(tmp_path):
    """Linux promises no memory for it unless it is told that nothing will be written."""
    path = tmp_path / "large.safetensors"
    with path.open("wb") as file:
        file.truncate(2**42)
    entry = TensorEntry(path, "BF16", (2**40,), 0, 2**41)
    found = read_tensors({"w": entry}, None, lambda _bytes: None, mapped=True)["w"]
    assert found.shape == (2**40,) and float(found[2**39]) == 0.0


@pytest.mark.parametrize("staged", [False, True])
def test_a_large_tensor_arrives_in_slices_between_which_a_cancel_is_obeyed(acc, monkeypatch, staged):
    monkeypatch.setattr(transfer, "SLICE_BYTES", 64)
    source, asked = torch.randint(-9, 9, (9, 5)).float(), []
    found = transfer.copy_to_device(source, acc, lambda: asked.append(1), staged)
    assert torch.equal(found.cpu(), source) and len(asked) == 3
    assert torch.equal(transfer.copy_to_device(source.t(), acc).cpu(), source.t())

    def cancelled():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        transfer.copy_to_device(source, acc, cancelled, staged)


@pytest.mark.full
@pytest.mark.parametrize("mode", ["group", "sequential"])
def test_bytes_are_told_while_units_move(acc, tiny_folder, recorded, monkeypatch, mode):
    """Of each forward anew, at most once in a while."""
    monkeypatch.setattr(hooks, "REPORT_SECONDS", 0.0)
    pipeline, progress = heavy("ltx", tiny_folder, acc, mode), recorded()
    with pipeline.offloader.hold("transformer", 0, progress) as transformer:
        for _ in range(2):
            for group in hooks_on(transformer).groups:
                group.onload(), group.offload()
    total = hooks_on(transformer).total_bytes
    told = [step for step in progress.steps if step[2].startswith("moving transformer ")]
    done = [step[0] for step in told]
    first, second = [place for place, count in enumerate(done) if count == total]
    assert done[: first + 1] == sorted(done[: first + 1]) and done[first + 1] < total
    assert second == 2 * first + 1 and max(done[second + 1 :], default=0) < total, "what came ahead for a third forward"
    assert told[first][2].endswith(f"{total / 2**20:.1f} of {total / 2**20:.1f} MB")


def test_a_device_without_an_index_is_that_of_its_tensors(acc):
    """Else all that is there counts as away, and moves at each use."""
    assert facts_for(acc.type).device == acc and facts_for("cpu").device.index is None


class CancelsAt:
    """Cancels at the report with this number."""

    def __init__(self, count: int) -> None:
        self.left = count

    def step(self, *_told) -> None:
        self.left -= 1

    def check(self) -> None:
        if not self.left:
            raise KeyboardInterrupt


def test_a_move_that_fails_leaves_the_masters_that_were_there(acc, monkeypatch):
    """Else units that lock copies of them would keep both; and a part on the device finds them when it goes home."""
    monkeypatch.setattr(transfer, "SMALL_BYTES", 0)
    part = torch.nn.Sequential(*(torch.nn.Linear(3, 3, bias=False) for _ in range(3)))
    masters_of = [weight.data for weight in part.parameters()]
    with accelerator.refusal(2), pytest.raises(torch.OutOfMemoryError):
        transfer.move(part, acc, "part", keep=True)
    assert not part.__dict__[transfer.KEPT] and not transfer.on_device(part, acc)
    transfer.move(part, acc, "part", keep=True)
    with pytest.raises(KeyboardInterrupt):
        transfer.move(part, torch.device("cpu"), "part", CancelsAt(2))
    assert all(weight.device == acc for weight in part.parameters())
    transfer.move(part, torch.device("cpu"), "part")
    assert [weight.data_ptr() for weight in part.parameters()] == [host_weight.data_ptr() for host_weight in masters_of]


def test_copies_are_timed_where_they_go_and_forgotten_when_they_are_over(acc):
    memory_stats, second = MemoryStats(), torch.device(acc.type, 1)
    for _ in range(9):
        with memory_stats.waiting(second):
            pass
    assert len(memory_stats.behind) == 1 and memory_stats.moving_seconds > 0 and not memory_stats.moved_bytes
    assert {event.device for pair in memory_stats.behind for event in pair} == {second}
    with memory_stats.stage("sampling", "p", "group", acc) as cost:
        pass
    assert cost.moving_seconds == 0, "of the stage before, which was cancelled"


def test_a_driver_that_tells_no_time_costs_no_stage(acc):
    waited: list[bool] = []

    class Untimed:
        def elapsed_time(self, _last):
            raise RuntimeError("both events must be completed")

        def synchronize(self) -> None:
            waited.append(True)

    memory_stats = MemoryStats()
    with memory_stats.stage("sampling", "p", "group", acc) as cost:
        memory_stats.behind.append((Untimed(), Untimed()))
    assert waited and not memory_stats.behind and cost.moving_seconds == 0 and memory_stats.stages == [cost]
