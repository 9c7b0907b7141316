"""Scenes on a disk that is full."""

import resource
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from anygpu.compat.errors import CheckpointError
from anygpu.host import saved
from comfy_api.latest import Types


def saved_video(folder: str, most: int) -> dict[str, Any]:
    """What is left and said where a file may have ``most`` bytes, with and without a file of that name before."""
    film = saved.video(torch.rand(9, 256, 256, 3), Fraction(24), {"family": "ltx"})
    new, old = Path(folder) / "new.mp4", Path(folder) / "old.mp4"
    old.write_bytes(b"mine")
    before, limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    said = []
    film.save_to(str(Path(folder) / "given.mp4"), Types.VideoContainer.AUTO, Types.VideoCodec.AUTO, {"prompt": {}})
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, limit))
    try:
        for path in (new, old):
            try:
                film.save_to(str(path))
            except CheckpointError as error:
                said.append(str(error))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, limit))
    return {"said": said, "left": sorted(path.name for path in Path(folder).iterdir())}
