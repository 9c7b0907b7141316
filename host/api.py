"""The only import of ComfyUI's node API, so that a change there is one edit here."""

from comfy_api.latest import ComfyExtension, InputImpl, Types, io, ui
from comfy_execution.graph_utils import ExecutionBlocker, GraphBuilder

__all__ = ["ComfyExtension", "ExecutionBlocker", "GraphBuilder", "InputImpl", "Types", "io", "ui"]
