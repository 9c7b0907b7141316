"""Damaged files are named before a weight is read, and reads are exact and cancellable."""

from __future__ import annotations

import json
import struct

import pytest
import torch
from anygpu.compat import checkpoints
from anygpu.compat.errors import CheckpointError
from safetensors.torch import save_file


def ignore(_: int) -> None:
    """No progress."""


@pytest.fixture
def file(tmp_path):
    tensors = {
        "weight": torch.randn(33, 7),
        "scalar": torch.tensor(3.0),
        "index": torch.arange(5),
        "empty": torch.zeros(0, 4),
        "half": torch.randn(9).bfloat16(),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors", tensors


def test_reads_every_tensor_bit_for_bit(file, monkeypatch):
    path, tensors = file
    monkeypatch.setattr(checkpoints, "SLICE_BYTES", 64)  # many slices
    read = []
    found = checkpoints.read_tensors(checkpoints.declared([path]), None, read.append)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype, name
    assert sum(read) == sum(tensor.nbytes for tensor in tensors.values())


def test_casts_floating_tensors_only(file):
    found = checkpoints.read_tensors(checkpoints.declared([file[0]]), torch.float64, ignore)
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
        checkpoints.read_tensors(checkpoints.declared([file[0]]), None, cancel)
    assert len(calls) == 3


@pytest.mark.parametrize("keep", [0, 4, 60, -1])
def test_a_truncated_file_is_named(file, keep):
    path, _ = file
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*cut short"):
        checkpoints.header_of(path)


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
        checkpoints.header_of(tmp_path / "m.safetensors")


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


def test_a_pickle_is_refused(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="can run code and is refused"):
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

    monkeypatch.setattr(checkpoints.os, "replace", full)
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
