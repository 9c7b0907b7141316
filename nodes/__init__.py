"""The nodes: each reads its inputs, calls one function, and wraps the result."""

from __future__ import annotations

import logging

from ..host.api import ComfyExtension, io
from .decoding import Decode
from .encoding import EncodeImage, EncodePrompt, EncodeVideo
from .hardware import HardwareReport
from .loading import LoadPipeline
from .sampling import Sample, SampleFramePack

log = logging.getLogger(__name__)

NODES = (LoadPipeline, EncodePrompt, EncodeImage, EncodeVideo, Sample, SampleFramePack, Decode, HardwareReport)


class AnyGPUExtension(ComfyExtension):
    """The pack, as ComfyUI sees it."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        """Every node whose schema can be made; one that cannot is left out and logged with its traceback."""
        usable: list[type[io.ComfyNode]] = []
        for node in NODES:
            try:
                node.GET_SCHEMA()
                usable.append(node)
            except Exception:  # one broken node must not hide the others
                log.exception("AnyGPU: node %s is left out", node.__name__)
        return usable
