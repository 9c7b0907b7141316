"""The one import of ComfyUI's node API: a move there is one edit here."""

from comfy_api.latest import ComfyExtension, InputImpl, Types, io, ui

__all__ = ["ComfyExtension", "InputImpl", "Types", "io", "ui"]
