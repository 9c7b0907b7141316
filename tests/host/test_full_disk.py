"""A disk that is full when the video is written: one line that names the kept latents, and no cut file."""

from pathlib import Path

import pytest

from host.inside.asking import Inside

pytestmark = pytest.mark.host


def test_a_video_that_cannot_be_written_names_its_latents_and_leaves_no_file(inside: Inside, tmp_path: Path) -> None:
    found = inside.play("disk", "saved_video", folder=str(tmp_path), most=36_864)
    assert found["left"] == ["given.mp4", "old.mp4"], "a file that was there is not ours to delete"
    assert len(found["said"]) == 2 and all("AnyGPU Recover Latents" in line for line in found["said"])
    assert str(tmp_path / "new.mp4") in found["said"][0]
