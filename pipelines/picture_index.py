"""The contents of picture files, by what the file system says of them: a search decodes each file once."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

from ..compat.checkpoints.identity import DIGITS
from ..compat.durable import replacing
from ..compat.errors import CheckpointError, PackError
from .movie import Allowance, content_in

FILE = "pictures.json"
MOST_FILES = 4096  # the newest
MOST_BYTES = 2**20  # of the index
log = logging.getLogger(__name__)


class PictureIndex:
    """Contents by (device, inode, size, mtime_ns, ctime_ns).

    Args:
        state: folder of the index; None keeps none. One that is damaged or cannot be written is passed over.
    """

    def __init__(self, state: Path | None) -> None:
        self.path = None if state is None else state / FILE
        self.changed = False
        self.contents = {} if self.path is None else _saved(self.path)

    def content(self, path: Path, check: Callable[[], None], allowance: Allowance) -> str:
        """The content of a picture or video file; empty for what cannot be decoded in ``allowance``."""
        try:
            status = path.stat()
            path.open("rb").close()
        except OSError:
            return ""
        facts = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        key = " ".join(map(str, facts))
        if key not in self.contents:
            most = min(allowance.left, Allowance().left)
            own, found = Allowance(most), ""
            try:
                found = content_in(path, check, own)
            except CheckpointError as error:
                log.debug("no picture: %s", error)
            allowance.left -= most - own.left
            if allowance.left < 0:
                return ""
            self.contents[key], self.changed = found, True
        return self.contents[key]

    def save(self) -> None:
        """Write down what was decoded since."""
        if self.path is None or not self.changed:
            return
        newest = dict(list(self.contents.items())[-MOST_FILES:])
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(self.path) as temporary:
                temporary.write_text(json.dumps(newest), encoding="utf-8")
            self.changed = False
        except (OSError, PackError) as error:
            log.debug("the index of pictures is not written: %s", error)


def _saved(path: Path) -> dict[str, str]:
    """The index at ``path`` without what cannot be one."""
    try:
        with path.open("rb") as file:
            record = json.loads(file.read(MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(record, dict):
        return {}
    return {key: text for key, text in record.items() if isinstance(text, str) and len(text) in (0, DIGITS)}
