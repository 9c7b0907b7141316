"""The picture and the clip that the templates load, drawn where a ComfyUI has none, as with --base-directory."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from host import videos
from host.client import Client
from host.prompts import WORKFLOWS, replay, shrunk
from host.server import CLIP, PICTURE, Server

pytestmark = pytest.mark.host


@pytest.fixture
def inputs(server: Server, tmp_path: Path) -> Iterator[Path]:
    """The server's input folder without the two files, which come back afterwards."""
    folder = server.base / "input"
    for name in (PICTURE, CLIP):
        shutil.move(folder / name, tmp_path / name)
    yield folder
    for name in (PICTURE, CLIP):
        shutil.move(tmp_path / name, folder / name)


def test_they_are_drawn_where_they_are_not_there_and_no_file_is_replaced(
    server: Server, client: Client, inputs: Path
) -> None:
    server.every_model()
    (inputs / PICTURE).write_bytes(b"mine")
    assert client.post("/anygpu/examples", {}) == {"added": [CLIP]}
    assert (inputs / PICTURE).read_bytes() == b"mine"
    (inputs / PICTURE).unlink()
    assert client.post("/anygpu/examples", {}) == {"added": [PICTURE]}
    assert client.post("/anygpu/examples", {}) == {"added": []}
    assert Image.open(inputs / PICTURE).size == (512, 512) and videos.facts(inputs / CLIP).frames == 49
    for name in ("anygpu_ltx_image_to_video", "anygpu_ltx_video_to_video"):
        run = client.run(shrunk(replay(WORKFLOWS / f"{name}.json")))
        assert not run.error, run.message
