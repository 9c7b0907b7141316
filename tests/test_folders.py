"""The load node's list is made again when a model arrives, however deep it lies."""

from __future__ import annotations

import importlib
import json
import os
import sys
from types import SimpleNamespace

import pytest


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """``host/folders.py`` on a stand-in for ComfyUI's ``folder_paths``, whose models lie in ``tmp_path``."""
    paths = SimpleNamespace(
        folder_names_and_paths={"diffusers": ([str(tmp_path)], set())},
        get_folder_paths=lambda key: [str(tmp_path)],
        get_temp_directory=lambda: str(tmp_path / "temp"),
    )
    monkeypatch.setitem(sys.modules, "folder_paths", paths)
    monkeypatch.delitem(sys.modules, "anygpu.host.folders", raising=False)
    yield importlib.import_module("anygpu.host.folders")
    sys.modules.pop("anygpu.host.folders", None)


@pytest.mark.parametrize("name", ["model", "publisher/model", "disk/publisher/model"])
def test_a_download_that_was_listed_half_way_is_listed_when_it_is_whole(folders, tmp_path, name):
    folder = tmp_path / name
    (folder / "vae").mkdir(parents=True)
    for path in (tmp_path, *tmp_path.rglob("*")):
        os.utime(path, (1, 1))  # long ago, so that the clock's resolution plays no part
    assert folders.model_choices() == [folders.NO_MODEL]
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "MochiPipeline"}), encoding="utf-8")
    assert folders.model_choices() == [name]


def test_nothing_is_scanned_twice_while_nothing_changes(folders, tmp_path, monkeypatch):
    scans = []
    monkeypatch.setattr(folders, "find_models", lambda roots: scans.append(roots) or [])
    for _ in range(3):
        folders.model_choices()
    assert len(scans) == 1
