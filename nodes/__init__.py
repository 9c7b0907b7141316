"""The nodes: each reads its inputs, calls one function, and wraps the result."""

from __future__ import annotations

import logging

from ..compat.requirements import package_problem
from ..host.api import ComfyExtension, io
from ..host.progress import with_an_end
from ..host.server.routes import add_routes
from .core_models import FitAll, FitCLIP, FitModel, FitVAE, WatchDoctor
from .farm import Collect, Farm, QueueJobs
from .latents import (
    LoadLatent,
    LoadPrompt,
    RecoverLatents,
    Replay,
    SaveLatent,
    SaveMusubiCache,
    SavePrompt,
    UpscaleLatents,
)
from .loaders import ApplyLoRA, ComposePipeline, LoadPipeline
from .mesh import BakeTexture, CleanMesh, LoadMesh, PaintCameras, ProjectPicture, RenderTurntable, RenderViews
from .paint import DelightImage, LoadMVAdapter, LoadPaintPipeline, PaintViews, TextureMesh
from .prompt import EncodeImage, EncodePrompt, EncodeVideo, ImageConditioning
from .sampling import Decode, Sample, SampleFramePack, StepCache
from .tools import DownloadModel, HardwareReport, MemoryPlan

log = logging.getLogger(__name__)

NODES = (
    LoadPipeline, EncodePrompt, EncodeImage, EncodeVideo, Sample, SampleFramePack, Decode, HardwareReport,
    LoadMesh, CleanMesh, PaintCameras, RenderViews, LoadPaintPipeline, DelightImage, PaintViews, BakeTexture,
    RenderTurntable, TextureMesh, ProjectPicture, ImageConditioning,
    SaveLatent, LoadLatent, RecoverLatents, SavePrompt, LoadPrompt, SaveMusubiCache, ApplyLoRA,
    StepCache, ComposePipeline, MemoryPlan, DownloadModel, UpscaleLatents, FitAll, FitModel, FitVAE, FitCLIP,
    WatchDoctor, QueueJobs, Collect, Farm, Replay, LoadMVAdapter,
)


class AnyGPUExtension(ComfyExtension):
    """The pack, as ComfyUI sees it."""

    async def on_load(self) -> None:
        """Add the routes of the side bar, without which every node works too, and log packages that are too old."""
        add_routes()
        if problem := package_problem():
            log.warning("AnyGPU: %s", problem)

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        """Every node whose schema can be made; one that cannot is left out and logged with its traceback."""
        usable: list[type[io.ComfyNode]] = []
        for node in NODES:
            try:
                kinds = {each.id: each.get_io_type() for each in node.GET_SCHEMA().inputs}
                usable.append(with_an_end(node, kinds))  # ends its record and text also where a run fails
            except Exception:  # one broken node must not hide the others
                log.exception("AnyGPU: node %s is left out", node.__name__)
        return usable
