"""Checkpoints that the tests of paint/ share: written once."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from anygpu.paint.loading import PaintPipeline, PaintRequest, load_paint

from paint import stored


@pytest.fixture(scope="module", autouse=True)
def no_values_on_meta() -> Iterator[None]:
    """Draw no initial values for weights on the meta device, which have none: torch does it in Python there."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("uniform_", "kaiming_uniform_", "normal_"):
            draw = getattr(torch.nn.init, name)
            patch.setattr(torch.nn.init, name, lambda x, *a, _draw=draw, **k: x if x.is_meta else _draw(x, *a, **k))
        yield


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
