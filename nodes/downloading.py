"""The node that fetches a published model."""

from __future__ import annotations

import time
from typing import Any

from ..host import folders
from ..host.api import io
from ..host.progress import NodeProgress
from ..pipelines.loading import download
from .sockets import CATEGORY


class DownloadModel(io.ComfyNode):
    """Fetch a published model."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """The node's inputs and outputs."""
        return io.Schema(
            node_id="AnyGPUDownloadModel",
            display_name="AnyGPU Download Model",
            category=CATEGORY,
            description="Says which files of a published model are in models/diffusers, and fetches them where download is "
            "chosen: one fixed commit of its Hugging Face repository, checked by hashes, resumed where it was cut short.",
            search_aliases=["huggingface", "hugging face", "download", "hf", "get model", "snapshot"],
            is_output_node=True,
            inputs=[
                io.Combo.Input(
                    "model", options=download.model_choices(),
                    tooltip="Each is one or more repositories at a fixed commit; the text under the node names their pages. "
                    "Their licences stand there: who downloads accepts them.",
                ),
                io.Combo.Input(
                    "download", options=list(download.CHOICES), default="no",
                    tooltip="no: looks what is there; asks nobody and writes nothing. download: fetches what lacks from "
                    "huggingface.co, 30 to 60 GB of disk, and compares every hash.",
                ),
            ],
            outputs=[
                io.String.Output(
                    display_name="folder", tooltip="Where the model is; press R to see it in AnyGPU Load Pipeline."
                ),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def fingerprint_inputs(cls, **_: Any) -> Any:
        """Another value at each run: files may come and go."""
        return time.time()

    @classmethod
    def execute(cls, model: str, download: str) -> io.NodeOutput:
        """The folder of the model."""
        progress, roots = NodeProgress(cls.hidden.unique_id), folders.model_roots()
        lines = download.fetched(model, download, roots, progress)
        for line in lines[1:]:
            progress.notify(line)
        progress.finish(lines[0])
        return io.NodeOutput(str(download.folder_of(download.offer_of(model).downloads[0], roots)))
