"""Damaged and hostile files: one line with the right remedy, and nothing from a folder is ever executed."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch
from anygpu.compat.checkpoints.gguf_file import gguf_header
from anygpu.compat.checkpoints.headers import header_of
from anygpu.compat.checkpoints.weights import read_tensors, write_tensors
from anygpu.compat.errors import CheckpointError, PackError
from anygpu.pipelines import stages, tiny
from anygpu.pipelines.base import PromptRequest, Silent
from anygpu.pipelines.loading.folder import LoadRequest, load

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 123456789\n"
DAMAGED = {  # what is in a file called .safetensors, and what its error must not blame on permissions
    "pointer": POINTER,
    "web page": b"<!DOCTYPE html><html><body>404</body></html>",
    "pickle": b"\x80\x02}q\x00.",
    "zip": b"PK\x03\x04" + bytes(64),
    "empty": b"",
    "header cut off": (1000).to_bytes(8, "little") + b'{"a": {',
    "gguf": b"GGUF" + bytes(64),
    "gzip": gzip.compress(bytes(1000)),
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_called_damaged(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        header_of(path)
    assert "model.safetensors" in caught.value.found and caught.value.expected
    assert "permissions" not in caught.value.fix and "cannot be read" not in caught.value.found
    assert not isinstance(caught.value.__cause__, PackError), "its own error, wrapped again"


@pytest.mark.parametrize("content", [b"", b"GGUF", POINTER], ids=["empty", "cut off", "pointer"])
def test_a_damaged_gguf_is_called_damaged(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        gguf_header(path)
    assert "permissions" not in caught.value.fix and not isinstance(caught.value.__cause__, PackError)


def test_a_file_that_changed_since_its_header_says_so(tmp_path: Path) -> None:
    path = write_tensors(tmp_path / "model.safetensors", {"a": torch.zeros(4)}, {})
    entries = header_of(path)
    write_tensors(path, {"a": torch.zeros(5)}, {})
    with pytest.raises(CheckpointError) as caught:
        read_tensors(entries, torch.float32, lambda _count: None)
    assert "changed since its header was read" in caught.value.found
    assert caught.value.fix == "Wait until it has been written, then load it again."
    assert path.stat().st_mode & 0o044, "others may read it, as any file"


def test_code_in_a_model_folder_is_not_run(tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for entry in tiny.build("ltx", tiny_folder).iterdir():
        if entry.name != "tokenizer":
            (folder / entry.name).symlink_to(entry)
    (folder / "tokenizer").mkdir()
    marker = tmp_path / "ran"
    for entry in (tiny.build("ltx", tiny_folder) / "tokenizer").iterdir():
        (folder / "tokenizer" / entry.name).write_bytes(entry.read_bytes())
    config = folder / "tokenizer" / "tokenizer_config.json"
    content = json.loads(config.read_text(encoding="utf-8"))
    content |= {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}}
    config.write_text(json.dumps(content), encoding="utf-8")
    (folder / "tokenizer" / "evil.py").write_text(
        f"from pathlib import Path\nPath({str(marker)!r}).touch()\nclass Evil: pass\n", encoding="utf-8"
    )
    monkeypatch.setattr("builtins.input", lambda *_: "yes")  # what transformers asks on a terminal
    pipeline = load(LoadRequest(folder, device="cpu"), Silent())
    try:
        stages.encode_prompt(pipeline, PromptRequest("a fox"), Silent())
    except CheckpointError as error:
        assert "tokenizer" in error.found
    assert not marker.exists()
