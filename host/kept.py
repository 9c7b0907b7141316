"""Latents kept on disk while a long sampling goes on, so that a crash or a cancel does not cost what is finished."""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Callable

from ..compat.checkpoints import write_tensors
from ..pipelines.contract import Latents
from ..pipelines.exchange import KEY, to_core
from .folders import kept_folder

log = logging.getLogger(__name__)


def section_keeper(say: Callable[[str], None]) -> Callable[[int, int, Latents], None]:
    """A function for FramePack's finished sections: each replaces the file of the one before, in one run's folder."""
    folder = kept_folder() / f"framepack-{uuid.uuid4().hex[:8]}"
    shown = folder.relative_to(kept_folder().parent.parent).as_posix()

    def keep(index: int, count: int, latents: Latents) -> None:
        path = folder / f"section_{index + 1:02}_of_{count:02}.safetensors"
        try:
            written = write_tensors(path, {"samples": latents.samples}, {KEY: json.dumps(to_core(latents)[KEY])})
        except OSError as error:
            log.warning("AnyGPU: section %d could not be kept in %s: %s", index + 1, folder, error)
            return
        for older in folder.glob("section_*.safetensors"):
            if older != written:
                older.unlink(missing_ok=True)
        log.info("AnyGPU: section %d of %d kept: %s", index + 1, count, written)
        say(f"finished sections are kept in {shown}")  # one text for all: under the node it stands once

    return keep
