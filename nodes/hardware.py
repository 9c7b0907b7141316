"""The nodes that tell what this machine can do."""

from __future__ import annotations

from typing import Any

from ..host import folders, memory_manager
from ..host.api import io, ui
from ..host.progress import NodeProgress
from ..pipelines import report
from .sockets import CATEGORY


class HardwareReport(io.ComfyNode):
    """Say what this machine can do and what is decided on it."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """The node's inputs and outputs."""
        return io.Schema(
            node_id="AnyGPUHardwareReport",
            display_name="AnyGPU Hardware Report",
            category=CATEGORY,
            description="Says which device was found, what it answered to short tests, which precision and kernels each "
            "model gets on it and why, and what to change where something does not work.",
            search_aliases=["diagnose", "gpu info", "benchmark", "debug", "bug report", "hardware"],
            inputs=[
                io.Boolean.Input(
                    "check", default=False,
                    tooltip="Also try conversions, loading, Conv3d and attention on the device: a few seconds.",
                ),
                io.Boolean.Input(
                    "ask_again", default=False, optional=True, advanced=True,
                    tooltip="Forget what the device answered before and ask anew.",
                ),
            ],
            outputs=[io.String.Output(display_name="text"), io.Image.Output(display_name="table")],
            hidden=[io.Hidden.unique_id],
            is_output_node=True,
            not_idempotent=True,
        )

    @classmethod
    def fingerprint_inputs(cls, **_: Any) -> float:
        """Never the same: a driver or a flag may have changed."""
        return float("nan")

    @classmethod
    def execute(cls, check: bool, ask_again: bool = False) -> io.NodeOutput:
        """The report as text and as a table."""
        progress = NodeProgress(cls.hidden.unique_id)
        device, state = memory_manager.compute_device(), folders.state_folder()
        report = report.hardware_report(device, state, ask_again)
        report = report.checked(report, device, state, progress) if check else report
        progress.finish(report.summary())
        table = report.drawn(report)
        return io.NodeOutput(report.text(), table, ui=ui.PreviewImage(table, cls=cls))
