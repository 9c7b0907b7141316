"""A rank that hangs, then one that dies, while another waits for it: run by ``ranks.py``."""

import os
import time
from datetime import timedelta
from pathlib import Path

from anygpu.compat.ranks import RankLost, Ranks
from torch import distributed

PATIENCE_SECONDS = 2.0


def left_alone(rank: int, size: int, folder: Path) -> list[str]:
    """What the rank 0 is told when the rank 1 computes for ever, and when it has died."""
    impatient = distributed.new_group(list(range(size)), timeout=timedelta(seconds=PATIENCE_SECONDS))
    both = [Ranks(impatient, rank, size), Ranks(None, rank, size)]
    assert [each.any(rank == 1) for each in both] == [True, True]
    if rank == 1:
        while not (folder / "hung").exists():
            time.sleep(0.1)
        os._exit(1)
    said = []
    for each in both:
        try:
            each.shared("step")
            each.any(False)
        except RankLost as error:
            said.append(str(error))
        (folder / "hung").touch()
    return said
