"""Files are found by samples of their bytes, and equal by all of them."""

import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from anygpu.compat.checkpoints import identity
from anygpu.compat.checkpoints.identity import FileIndex, content_of, whole_of

SIZE = 300_000
CHANGES: dict[str, Callable[[bytearray, int], bytes]] = {
    "flipped": lambda data, at: bytes(data[:at] + bytes((data[at] ^ 1,)) + data[at + 1 :]),
    "swapped": lambda data, at: bytes(data[:at] + data[at + 99 : at + 198] + data[at : at + 99] + data[at + 198 :]),
    "hole": lambda data, at: bytes(data[:at] + bytes(99) + data[at + 99 :]),
    "cut": lambda data, at: bytes(data[: at + 1]),
    "longer": lambda data, at: bytes(data + b"\0"),
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Files of 300 kB count as large, and each test starts with empty indexes."""
    for name, value in {"WHOLE_BYTES": 1000, "SAMPLES": 4, "SAMPLE_BYTES": 1000, "BLOCK_BYTES": 7000}.items():
        monkeypatch.setattr(identity, name, value)
    for name, value in {"_wholes": {}, "_asked": set(), "_waiting": SimpleQueue()}.items():
        monkeypatch.setattr(identity, name, value)
    yield
    finish_background()


def finish_background() -> None:
    for thread in threading.enumerate():
        if thread.name == "anygpu-hashes":
            thread.join(20)


def written(path: Path, content: bytes, age: float = 60.0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    os.utime(path, (time.time() - age,) * 2)
    return path


def rested(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files count as unchanged for long: the time of the last change of their status cannot be set."""
    monkeypatch.setattr(identity, "RESTING_NS", 0)


@pytest.mark.parametrize("change", CHANGES)
def test_any_change_of_a_byte_changes_the_whole_hash(tmp_path: Path, change: str) -> None:
    rng = random.Random(change)
    data = bytearray(rng.randbytes(SIZE))
    whole, missed = whole_of(written(tmp_path / "a.gguf", data), None, lambda: None), 0
    sampled = content_of(tmp_path / "a.gguf")
    for _ in range(20):
        other = written(tmp_path / "b.gguf", CHANGES[change](data, rng.randrange(SIZE - 200)))
        assert whole_of(other, None, lambda: None) != whole
        missed += content_of(other) == sampled
    assert missed or change in ("cut", "longer"), "samples alone do not see it"


def test_the_same_bytes_elsewhere_and_later_are_the_same(tmp_path: Path) -> None:
    for name, age in (("a", 1000.0), ("b", 5.0)):
        written(tmp_path / name / "model_index.json", b'{"vae": []}', age)
        written(tmp_path / name / "vae" / "x.safetensors", b"1" * SIZE, age)
        written(tmp_path / name / "other" / "x.safetensors", name.encode() * SIZE)
    ids = {(content_of(folder), whole_of(folder, None, lambda: None)) for folder in tmp_path.iterdir()}
    assert len(ids) == 1
    ((content, whole),) = ids
    assert len(whole) == 64 and content == "e0141bcbbe6dbc6dd713712792424431", "frozen: jobs and receipts hold it"
    written(tmp_path / "b" / "vae" / "x.safetensors", b"1" * 150_001 + b"2" + b"1" * (SIZE - 150_002))
    assert content_of(tmp_path / "b") == content and whole_of(tmp_path / "b", None, lambda: None) != whole
    assert whole_of(tmp_path / "none", None) == ""
    (tmp_path / "links").mkdir()
    for name in ("model_index.json", "vae", "other"):
        (tmp_path / "links" / name).symlink_to(tmp_path / "a" / name)
    assert content_of(tmp_path / "links") == content, "a part that is a link counts as its copy"


def test_a_hash_is_made_once_in_the_background_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rested(monkeypatch)
    path, made = written(tmp_path / "a.gguf", b"1" * SIZE), list[Path]()
    merkle = identity._merkle
    monkeypatch.setattr(identity, "_merkle", lambda file, check: made.append(file) or merkle(file, check))
    assert whole_of(path, tmp_path) == ""
    finish_background()
    whole = whole_of(path, tmp_path)
    assert len(whole) == 64 and made == [path]
    identity._wholes.clear()
    assert whole_of(path, tmp_path) == whole and made == [path], "another process finds it in the state folder"
    shutil.move(path, tmp_path / "b.gguf")
    assert whole_of(tmp_path / "b.gguf", tmp_path, lambda: None) == whole
    (tmp_path / identity.WHOLES).write_text("[" * 99999)
    identity._wholes.clear()
    assert whole_of(tmp_path / "b.gguf", tmp_path, lambda: None) == whole, "a damaged index is passed over"


def test_a_change_that_keeps_size_and_time_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "a.gguf", b"1" * SIZE)
    before = whole_of(path, None, lambda: None), content_of(path)
    status = path.stat()
    path.write_bytes(b"2" * SIZE)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    after = whole_of(path, None, lambda: None), content_of(path)
    assert before[0] != after[0] and before[1] != after[1]
    index, texts = FileIndex(None), iter("abc")
    monkeypatch.setattr(identity, "facts_of", lambda _: "one tick")
    assert [index.of(path, lambda: next(texts)) for _ in range(2)] == ["a", "b"], "it may change again in this tick"
    rested(monkeypatch)
    assert [index.of(path, lambda: next(texts)) for _ in range(2)] == ["c", "c"]


def test_a_hash_added_during_a_write_is_saved_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rested(monkeypatch)
    index, write = FileIndex(tmp_path / "index.json"), identity.write_json

    def add(name: str) -> None:
        index.of(written(tmp_path / name, b"1"), lambda: name * identity.DIGITS)

    add("a")
    monkeypatch.setattr(identity, "write_json", lambda path, texts: (write(path, texts), add("b")))
    index.save()
    monkeypatch.setattr(identity, "write_json", write)
    index.save()
    assert len(FileIndex(index.path).texts) == 2


def test_processes_that_share_an_index_keep_what_the_others_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rested(monkeypatch)
    first, second = FileIndex(tmp_path / "index.json"), FileIndex(tmp_path / "index.json")
    for index, name in ((first, "a"), (second, "b"), (first, "c")):
        index.of(written(tmp_path / name, b"1"), lambda: name * identity.DIGITS)  # noqa: B023
        index.save()
    assert {text[0] for text in FileIndex(first.path).texts.values()} == {"a", "b", "c"}


def test_a_file_that_changes_while_it_is_read_is_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rested(monkeypatch)
    path, index = written(tmp_path / "a.gguf", b"1" * SIZE), FileIndex(None)

    def grow() -> str:
        path.write_bytes(b"2" * (SIZE + 1))
        return "old"

    assert index.of(path, grow) == "old" and not index.texts


def test_a_cancel_ends_a_hash_at_the_next_block(tmp_path: Path) -> None:
    asked: list[int] = []

    def check() -> Any:
        asked.append(1)
        if len(asked) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        whole_of(written(tmp_path / "a.gguf", b"1" * SIZE), None, check)
    assert len(asked) == 3
