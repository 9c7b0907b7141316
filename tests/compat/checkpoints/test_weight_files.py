"""A part's weights are found under every name that diffusers and transformers publish them, variants included."""

import json

import pytest
import torch
from anygpu.compat.checkpoints.weights import weight_files
from anygpu.compat.errors import CheckpointError
from safetensors.torch import save_file


def shards(folder, index: str, names: list[str]) -> None:
    """An index and its shards, each with one tensor."""
    weights = {f"weight_{number}": name for number, name in enumerate(names)}
    (folder / index).write_text(json.dumps({"weight_map": weights}), encoding="utf-8")
    for key, name in weights.items():
        save_file({key: torch.zeros(1)}, folder / name)


VARIANT = "model.safetensors.index.bf16.json"  # how diffusers and transformers name it: genmo/mochi-1-preview has one
VARIANT_SHARDS = ["model.bf16-00001-of-00002.safetensors", "model.bf16-00002-of-00002.safetensors"]
PLAIN = "model.safetensors.index.json"
PLAIN_SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


@pytest.mark.parametrize("index", [VARIANT, "model.bf16.safetensors.index.json"])
def test_a_variant_alone_is_found(tmp_path, index):
    shards(tmp_path, index, VARIANT_SHARDS)
    assert [file.name for file in weight_files(tmp_path, "transformer")] == VARIANT_SHARDS


def test_plain_names_come_first(tmp_path):
    shards(tmp_path, VARIANT, VARIANT_SHARDS)
    shards(tmp_path, PLAIN, PLAIN_SHARDS)
    assert [file.name for file in weight_files(tmp_path, "transformer")] == PLAIN_SHARDS


def test_a_whole_variant_is_taken_where_the_plain_shards_were_not_downloaded(tmp_path):
    shards(tmp_path, VARIANT, VARIANT_SHARDS)
    shards(tmp_path, PLAIN, PLAIN_SHARDS)
    (tmp_path / PLAIN_SHARDS[1]).unlink()
    assert [file.name for file in weight_files(tmp_path, "transformer")] == VARIANT_SHARDS


def test_where_no_set_is_whole_the_plain_one_is_named(tmp_path):
    shards(tmp_path, VARIANT, VARIANT_SHARDS)
    shards(tmp_path, PLAIN, PLAIN_SHARDS)
    for name in (PLAIN_SHARDS[1], VARIANT_SHARDS[0]):
        (tmp_path / name).unlink()
    with pytest.raises(CheckpointError, match=PLAIN_SHARDS[1]):
        weight_files(tmp_path, "transformer")


def test_a_single_variant_is_taken_where_only_the_plain_index_was_downloaded(tmp_path):
    shards(tmp_path, PLAIN, PLAIN_SHARDS)
    for name in PLAIN_SHARDS:
        (tmp_path / name).unlink()
    save_file({"weight": torch.zeros(1)}, tmp_path / "model.fp16.safetensors")
    assert [file.name for file in weight_files(tmp_path, "transformer")] == ["model.fp16.safetensors"]
