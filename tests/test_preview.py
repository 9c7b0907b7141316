"""Previews of results: a sheet loses no picture, a clip keeps its speed and is small."""

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from anygpu.compat.errors import CheckpointError
from small_comfyui import comfyui


@pytest.fixture
def preview(tmp_path: Path) -> Iterator[Any]:
    """``host/preview.py`` on a ComfyUI whose node API returns what it is given."""
    with comfyui(tmp_path) as module:
        yield module("host.preview")


@pytest.mark.parametrize("count", [1, 2, 5, 6, 9])
def test_a_sheet_holds_every_picture_once_row_by_row(preview, count):
    pictures = torch.arange(1, count + 1).float().reshape(count, 1, 1, 1).expand(count, 2, 3, 3)
    (sheet,) = preview.sheet_of(pictures)
    tiles = sheet.reshape(sheet.shape[0] // 2, 2, sheet.shape[1] // 3, 3, 3)[:, 0, :, 0, 0].flatten()
    assert torch.equal(tiles[:count], torch.arange(1, count + 1).float())
    assert not tiles[count:].any() and len(tiles) - count < sheet.shape[1] // 3
    assert abs(sheet.shape[0] // 2 - sheet.shape[1] // 3) <= 1, "as near to a square as it goes"


@pytest.mark.parametrize(("frames", "shown"), [(17, 17), (48, 48), (49, 25), (129, 43)])
def test_a_clip_is_short_small_and_plays_as_fast(preview, frames, shown):
    (given, animated) = preview.clips([torch.zeros(frames, 48, 704, 3)], 24.0, None)
    small, _, folder, _, fps = given[:5]
    assert small.shape == (shown, 22, 320, 3) and folder == "temp" and animated
    assert abs(shown / fps - frames / 24.0) < 2 / fps, "as long as the clip itself"


def test_one_frame_is_a_still_and_a_small_clip_keeps_its_size(preview):
    assert preview.clips([torch.zeros(1, 64, 96, 3)], 24.0, None).shape == (1, 64, 96, 3)
    (given, _) = preview.clips([torch.zeros(3, 64, 96, 3)], 24.0, None)
    assert given[0].shape == (3, 64, 96, 3)


def test_an_example_is_drawn_whole_or_not_at_all_and_replaces_nothing(preview, tmp_path, monkeypatch):
    examples, path = import_module("anygpu.host.examples"), tmp_path / "example.png"
    monkeypatch.setattr(examples.folder_paths, "get_input_directory", lambda: str(tmp_path), raising=False)
    monkeypatch.setattr(examples, "_clip", lambda: b"clip")
    monkeypatch.setattr(examples, "_picture", lambda: bytes(100))
    resource = pytest.importorskip("resource", reason="a file that cannot grow stands for a full disk")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    with pytest.raises(CheckpointError, match="large"):
        examples.add()
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not path.exists()
    monkeypatch.setattr(examples, "_picture", lambda: bytes(path.write_bytes(b"mine")))  # one comes while it is drawn
    assert examples.add() == ["example.mp4"] and path.read_bytes() == b"mine"
