"""Checkpoints that the tests of paint/ share: written once."""

from pathlib import Path

import pytest
from anygpu.paint.loading import PaintPipeline, PaintRequest, load_paint

from paint import stored


@pytest.fixture(scope="session")
def paint_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """paint v2-0 with the fixtures' weights."""
    return stored.checkpoint("paint", tmp_path_factory.mktemp("paint"))


@pytest.fixture(scope="session")
def pbr_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """paint PBR v2-1 with the fixtures' weights."""
    return stored.checkpoint("paint_pbr", tmp_path_factory.mktemp("pbr"))


@pytest.fixture(scope="session")
def delight_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """delight v2-0 with the fixtures' weights."""
    return stored.checkpoint("delight", tmp_path_factory.mktemp("delight"))


@pytest.fixture(scope="module")
def paint(paint_folder: Path) -> PaintPipeline:
    return load_paint(PaintRequest(paint_folder, device="cpu"))


@pytest.fixture(scope="module")
def pbr(pbr_folder: Path) -> PaintPipeline:
    return load_paint(PaintRequest(pbr_folder, device="cpu"))
