"""Damaged files are named before a weight is read, and reads are exact and cancellable."""

import json
import os
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from anygpu.compat.checkpoints import headers
from anygpu.compat.checkpoints import weights as checkpoints
from anygpu.compat.checkpoints.gguf_file import gguf_header
from anygpu.compat.checkpoints.headers import SPARSE, entries_and_notes
from anygpu.compat.checkpoints.packed import rounded
from anygpu.compat.checkpoints.quantised import with_scales
from anygpu.compat.checkpoints.weights import described, read_tensors
from anygpu.compat.errors import CheckpointError, UnsupportedError
from safetensors.torch import save_file


def ignore(_: int) -> None:
    """No progress."""


@pytest.fixture
def file(tmp_path):
    tensors = {
        "weight": torch.randn(33, 7), "scalar": torch.tensor(3.0), "index": torch.arange(5),
        "empty": torch.zeros(0, 4), "half": torch.randn(9).bfloat16(),
    }  # fmt: skip
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors", tensors


def test_reads_every_tensor_bit_for_bit(file, monkeypatch):
    path, tensors = file
    monkeypatch.setattr(checkpoints, "SLICE_BYTES", 64)  # many slices
    read = []
    found = checkpoints.read_tensors(described([path]), None, read.append)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype, name
    assert sum(read) == sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize("mapped", [False, True])
def test_casts_floating_tensors_only(file, monkeypatch, mapped):
    monkeypatch.setattr(checkpoints, "SLICE_BYTES", 64)
    monkeypatch.setattr(checkpoints, "is_view", lambda entry: entry.total_bytes > 64)
    read = []
    found = checkpoints.read_tensors(described([file[0]]), torch.float64, read.append, mapped=mapped)
    assert max(read) <= 64 and torch.equal(found["weight"], file[1]["weight"].double())
    assert found["weight"].dtype is torch.float64
    assert found["index"].dtype is torch.int64


def test_a_cancel_acts_between_slices(file, monkeypatch):
    monkeypatch.setattr(checkpoints, "SLICE_BYTES", 64)
    calls = []

    def cancel(size: int) -> None:
        calls.append(size)
        if len(calls) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checkpoints.read_tensors(described([file[0]]), None, cancel)
    assert len(calls) == 3


@pytest.mark.parametrize("keep", [0, 4, 60, -1])
def test_a_truncated_file_is_named(file, keep):
    path, _ = file
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*cut short"):
        headers.entries_and_notes(path)


@pytest.mark.parametrize(
    "content",
    [
        struct.pack("<Q", 1 << 60) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 5) + b"nojso",
        struct.pack("<Q", 16) + b'{"a":{"dtype":1}',
    ],
)
def test_a_false_header_is_named(tmp_path, content):
    (tmp_path / "m.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"m\.safetensors"):
        headers.entries_and_notes(tmp_path / "m.safetensors")


def test_a_missing_shard_is_named(tmp_path):
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"a": torch.zeros(1)}, tmp_path / "model-00001-of-00002.safetensors")
    with pytest.raises(CheckpointError, match="model-00002-of-00002"):
        checkpoints.weight_files(tmp_path, "transformer")


def test_a_shard_outside_its_folder_is_refused(tmp_path):
    (tmp_path / "part").mkdir()
    save_file({"a": torch.zeros(1)}, tmp_path / "other.safetensors")
    (tmp_path / "part" / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "../other.safetensors"}})
    )
    with pytest.raises(CheckpointError, match=r"\.\./other"):
        checkpoints.weight_files(tmp_path / "part", "transformer")


def test_what_a_mac_leaves_beside_a_file_is_none(tmp_path):
    for name in ("model.fp16.safetensors", "._model.fp16.safetensors", "._model.safetensors.index.json"):
        (tmp_path / name).write_bytes(b"\0\5\x16\7")
    assert checkpoints.weight_files(tmp_path, "transformer") == [tmp_path / "model.fp16.safetensors"]


def test_a_pickle_is_refused(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="can run code and are refused"):
        checkpoints.weight_files(tmp_path, "text_encoder")


@pytest.mark.parametrize("make", [False, True])
def test_a_missing_or_empty_folder_is_named(tmp_path, make):
    folder = tmp_path / "vae"
    if make:
        folder.mkdir()
    with pytest.raises(CheckpointError, match="vae"):
        checkpoints.weight_files(folder, "vae")


def test_plain_weights_come_before_variants(tmp_path):
    for name in ("model.fp16.safetensors", "model.safetensors"):
        save_file({"a": torch.zeros(1)}, tmp_path / name)
    assert [file.name for file in checkpoints.weight_files(tmp_path, "vae")] == ["model.safetensors"]


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = checkpoints.write_tensors(tmp_path / "kept.safetensors", {"a": torch.ones(2)}, {"note": "old"})
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)  # Python 3.10's does not look at os.replace
    with pytest.raises(OSError, match="No space left"):
        checkpoints.write_tensors(path, {"a": torch.zeros(2)}, {})
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["kept.safetensors"]


@pytest.mark.parametrize("content", ["{", "[]", None])
def test_broken_json_is_named(tmp_path, content):
    if content is not None:
        (tmp_path / "model_index.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"model_index\.json"):
        checkpoints.read_json(tmp_path / "model_index.json", "a diffusers pipeline")


def bad(tmp_path, header: object, data: bytes = b"", name: str = "bad.safetensors"):
    """A file with a header of its own."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = tmp_path / name
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(*offsets: int, shape: tuple[int, ...] = (1,), dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    ("header", "data", "word"),
    [
        ({"a": entry(0, 4), "b": entry(0, 4)}, 4, "overlaps another"),
        ({"a": entry(0, 4), "b": entry(2, 6)}, 6, "overlaps another"),
        ({"a": entry(0, 4), "b": entry(8, 12)}, 12, "leaves a hole"),
        ({"a": entry(4, 8)}, 8, "leaves a hole"),
        ({"a": entry(0, 4)}, 8, "8 bytes of tensors where its header declares 4"),
        (b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "a": 1}', 4, "the name 'a' twice"),
        ({"a": entry(-4, 0)}, 0, "without offsets"),
        ({"a": entry(0, 4.0)}, 4, "without offsets"),
        ({"a": entry(0, True, shape=(1,), dtype="U8")}, 1, "without offsets"),
        ({"a": entry(0, 0, shape=(0, 2**62, 2**62))}, 0, "without offsets"),
        ({"a": entry(0, 4, dtype="I3")}, 4, "stored as I3"),
        ({"a": entry(0, 4, shape=(2,))}, 4, r"F32 \(2,\) in 4 bytes"),
        (b"[" * 100_000, 0, "not JSON"),
        (b"\xff\xfe", 0, "not JSON"),
        ([], 0, "not an object"),
        ({"a": 3}, 0, "without offsets"),
    ],
)
def test_a_header_that_cannot_be_is_refused(tmp_path, header, data, word):
    path = bad(tmp_path, header, bytes(data))
    with pytest.raises(UnsupportedError if "stored" in word else CheckpointError, match=word):
        headers.entries_and_notes(path)


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "only 0 bytes"),
        (b"1234", "only 4 bytes"),
        (struct.pack("<Q", 2**60) + b"{}", "no safetensors header in its 10 bytes"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "a Git LFS pointer"),
        (b"<!DOCTYPE html><html></html>", "a web page"),
        (b"<!doctype html><html></html>", "a web page"),
        (b"PK\x03\x04" + bytes(40), "a pickle of torch.save"),
        (b"GGUF" + bytes(40), "a GGUF file"),
    ],
)
def test_another_file_under_this_name_is_told(tmp_path, content, word):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=word):
        headers.entries_and_notes(tmp_path / "model.safetensors")
    if content.startswith((b"version", b"<", b"PK")):
        with pytest.raises(CheckpointError, match=word):
            gguf_header((tmp_path / "model.safetensors").rename(tmp_path / "model.gguf"))


def test_a_folder_a_loop_and_nothing_are_one_line(tmp_path):
    (tmp_path / "loop.safetensors").symlink_to(tmp_path / "loop.safetensors")
    (tmp_path / "folder.safetensors").mkdir()
    for name in ("loop", "folder", "absent"):
        with pytest.raises(CheckpointError) as caught:
            headers.entries_and_notes(tmp_path / f"{name}.safetensors")
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("change", ["longer", "replaced", "gone"])
def test_a_file_that_changes_between_header_and_weights_is_refused(file, change, mapped):
    path, _ = file
    entries = described([path])
    if change == "longer":
        path.write_bytes(path.read_bytes() + b"0")
    elif change == "replaced":
        stamp = path.stat().st_mtime_ns + 1_000_000
        os.utime(path, ns=(stamp, stamp))
    else:
        path.unlink()
    with pytest.raises(CheckpointError, match=r"changed since its header was read|no file"):
        checkpoints.read_tensors(entries, None, ignore, mapped)


def test_two_shards_with_one_name_are_refused(tmp_path):
    for name in ("one", "two"):
        save_file({"a": torch.zeros(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(CheckpointError, match=r"tensor 'a', which one\.safetensors has too"):
        described([tmp_path / "one.safetensors", tmp_path / "two.safetensors"])


def test_large_tensors_are_views_that_do_not_write_to_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "VIEW_BYTES", 64)
    tensors = {"large": torch.randn(64, 8), "small": torch.randn(3), "half": torch.randn(64).bfloat16()}
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    before = path.read_bytes()
    entries, read = described([path]), []
    found = checkpoints.read_tensors(entries, None, read.append, mapped=True)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert sum(read) == sum(tensor.nbytes for tensor in tensors.values())
    assert found["large"].untyped_storage().nbytes() != found["small"].untyped_storage().nbytes() == 12
    if (
        not checkpoints.READ_ONLY
    ):  # on Windows such a write ends the process: test_host_weights.py shows that none is made
        found["large"].fill_(0)
    assert path.read_bytes() == before
    cast = checkpoints.read_tensors(entries, torch.float32, ignore, mapped=True)
    assert torch.equal(cast["half"], tensors["half"].float())


def test_every_bf16_pattern_becomes_fp32_exactly(tmp_path):
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    save_file({"weight": patterns.view(torch.bfloat16)}, tmp_path / "model.safetensors")
    entries = described([tmp_path / "model.safetensors"])
    found = checkpoints.read_tensors(entries, torch.float32, ignore)["weight"]
    expected = (patterns.to(torch.int32) << 16).view(torch.float32)
    same = (found == expected) | (found.isnan() & expected.isnan())
    assert bool(same.all())


def test_zeros_that_a_small_file_leaves_out_are_counted_before_they_take_memory(tmp_path: Path) -> None:
    stored = {"a.mask": torch.zeros(10**7, dtype=torch.uint8), "a": torch.zeros(0)}
    path = checkpoints.write_tensors(tmp_path / "a.safetensors", stored, {SPARSE: '{"a": [80000000]}'})
    with pytest.raises(CheckpointError, match="sparse tensors of 320 MB in 10 MB"):
        described([path])


def test_halves_of_a_sparse_tensor_change_places_with_their_scales(tmp_path: Path) -> None:
    stored = {"a.weight": torch.tensor([1, 2, 3, 4], dtype=torch.int8)}
    stored["a.weight.mask"] = torch.tensor([0b1010101], dtype=torch.uint8)
    stored["a.weight_scale"] = torch.tensor([[1.0], [2.0], [4.0], [8.0]])
    path = checkpoints.write_tensors(tmp_path / "a.safetensors", stored, {SPARSE: '{"a.weight": [4, 2]}'})
    entries = {name: replace(entry, swapped=True) for name, entry in described([path]).items()}
    found = checkpoints.read_tensors(entries, torch.float32, ignore)["a.weight"]
    assert found.tolist() == [[12.0, 0.0], [32.0, 0.0], [1.0, 0.0], [4.0, 0.0]]


def test_a_sparse_tensor_in_another_packed_format_is_refused(tmp_path: Path) -> None:
    stored = {"a.weight": torch.ones(8, dtype=torch.uint8), "a.weight.mask": torch.full((64,), 1, dtype=torch.uint8)}
    stored["a.weight.mask"][8:] = 0
    stored["a.weight_scale"] = torch.ones(512).to(torch.float8_e4m3fn)
    stored["a.weight_scale_2"] = torch.ones(1)
    path = checkpoints.write_tensors(tmp_path / "a.safetensors", stored, {SPARSE: '{"a.weight": [16, 32]}'})
    with pytest.raises((CheckpointError, UnsupportedError)):
        checkpoints.read_tensors(described([path]), torch.float32, ignore)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.bfloat16])
def test_a_sparse_tensor_is_read_as_the_dense_one_that_it_was(tmp_path: Path, dtype: torch.dtype) -> None:
    right = torch.zeros(5, 3, 2)
    right.view(-1)[[0, 7, 8, 29]] = torch.tensor([1.0, -2.0, 3.0, 4.0])
    bits = torch.zeros(32, dtype=torch.uint8)
    bits[:30] = (right != 0).flatten()
    mask = (bits.view(4, 8) << torch.arange(8, dtype=torch.uint8)).sum(1).to(torch.uint8)
    stored = {"a.weight": right[right != 0].to(dtype), "a.weight.mask": mask}
    if dtype.itemsize == 1:
        stored["a.weight_scale"] = torch.tensor([[1.0], [2.0], [1.0], [1.0], [0.5]])
        right = right * stored["a.weight_scale"][:, :, None]
    path = checkpoints.write_tensors(tmp_path / "a.safetensors", stored, {SPARSE: '{"a.weight": [5, 3, 2]}'})
    assert torch.equal(checkpoints.read_tensors(described([path]), torch.float32, ignore)["a.weight"], right)
    for shape, wrong in (
        ("[5, 3, 3]", mask),
        ("[5, 3, 2]", mask | 1 << 3),
        ("[]", mask),
        ("[-1]", mask),
        ("[1e400]", mask),
    ):
        stored["a.weight.mask"] = wrong
        checkpoints.write_tensors(path, stored, {SPARSE: f'{{"a.weight": {shape}}}'})
        with pytest.raises(CheckpointError, match=r"sparse tensor 'a\.weight'|mask of 8 values where 4"):
            checkpoints.read_tensors(described([path]), torch.float32, ignore)


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_formats_that_a_file_names_without_its_prefix_are_known_as_in_core(tmp_path: Path, prefix: str) -> None:
    dense = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    made, path, layer = rounded(dense, "int8_convrot"), tmp_path / "m.safetensors", f"{prefix}blocks.0.q"
    about = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": made["group"]}
    tensors = {f"{layer}.weight": made["stored"], f"{layer}.weight_scale": made["sides"]["scale"]}
    save_file(tensors, path, {"_quantization_metadata": json.dumps({"layers": {"blocks.0.q": about}})})
    entries = with_scales(*entries_and_notes(path), path)
    found = read_tensors(entries, torch.float32, lambda _: None)[f"{layer}.weight"]
    assert float((found - dense).norm() / dense.norm()) < 0.01
