"""Files are whole and on the disk, or as they were; whoever is asked to write for hours is checked first."""

import ast
import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from anygpu.compat import durable
from anygpu.compat.checkpoints.latents import written
from anygpu.compat.durable import replacing, require_writable, write_file
from anygpu.compat.errors import CheckpointError, InputError
from test_layers import SOURCES, nodes_of

WRITING = {"write_text", "write_bytes", "export_to_video", "save_file"}
OF_THE_DEMO = ("pipelines/demo/drawing.py", "paint/demo.py")  # whose folder only `anygpu demo` makes


def test_content_reaches_the_disk_before_the_name_and_the_name_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, order = tmp_path / "new" / "a.txt", []
    rename, sync = Path.replace, os.fsync

    def fsync(descriptor: int) -> None:
        order.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "content")
        sync(descriptor)

    def replace(self: Path, target: Path) -> Path:
        order.append("name")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", replace)
    with replacing(path) as temporary:
        temporary.write_text("new", encoding="utf-8")
    synced = ["folder"] if hasattr(os, "O_DIRECTORY") else []  # Windows cannot open one
    assert order == ["content", "name", *synced] and path.read_text(encoding="utf-8") == "new"
    assert path.stat().st_mode & 0o044, "others may read it, as any file"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old", encoding="utf-8")
    with pytest.raises(type(error)), replacing(path) as temporary:
        temporary.write_text("ne", encoding="utf-8")
        raise error
    assert path.read_text(encoding="utf-8") == "old" and list(tmp_path.iterdir()) == [path]


def test_a_disk_that_is_full_in_the_end_is_one_line(tmp_path: Path, quota: Callable[[], None]) -> None:
    path = tmp_path / "a.json"
    write_file(path, "old")
    quota()
    for write in (lambda: write_file(path, "new"), lambda: written(path, {"a": torch.ones(1)}, {})):
        with pytest.raises(CheckpointError, match=r"a\.json' cannot be written \(.*quota .*; expected a .*folder"):
            write()
    with pytest.raises(CheckpointError) as caught:
        write_file(path, "new")
    assert caught.value.errno == errno.EDQUOT, "by which a farm tells its machine from its job"
    assert path.read_text(encoding="utf-8") == "old" and list(tmp_path.iterdir()) == [path]


def test_an_output_that_cannot_be_written_is_told_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_writable(tmp_path / "new" / "a.mp4", 1, "--output")
    assert not list((tmp_path / "new").iterdir())
    (tmp_path / "file").touch()
    for path, words in (
        (tmp_path, "the folder"),
        (tmp_path / "file" / "a.mp4", "cannot be written"),
        (Path("a\0"), "cannot"),
    ):
        with pytest.raises(InputError, match=words) as caught:
            require_writable(path, 1, "--output")
        assert "--output" in caught.value.found and caught.value.expected and caught.value.fix
    monkeypatch.setattr(durable.shutil, "disk_usage", lambda _: SimpleNamespace(free=99_000_000))
    with pytest.raises(InputError, match="99 MB free for --output") as caught:
        require_writable(tmp_path / "a.mp4", 100_000_000, "--output")
    assert caught.value.expected == "100 MB or more"


def test_every_file_is_written_so() -> None:
    """Whatever writes a file of ours writes the one that ``replacing`` gives it."""
    beside = set()
    for source in SOURCES:
        if source.startswith(OF_THE_DEMO):
            continue
        nodes = nodes_of(source)
        given = {
            item.optional_vars.id
            for node in nodes
            if isinstance(node, ast.With)
            for item in node.items
            if isinstance(item.optional_vars, ast.Name) and "replacing(" in ast.unparse(item.context_expr)
        }
        for node in nodes:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in WRITING:
                names = {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
                if not names & given:
                    beside.add(f"{source}:{node.lineno}")
    assert not beside
