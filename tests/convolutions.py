"""Choosers of 3-D convolutions that tests force on a part."""

from anygpu.compat.transforms.conv3d_choice import Chooser, Conv3dChoice
from anygpu.compat.transforms.conv3d_methods import Conv3dMethod, covers


def always(form: Conv3dMethod) -> Chooser:
    """A chooser that gives ``form`` to every layer it covers and leaves the others alone."""
    return lambda layer: Conv3dChoice(form, "chosen") if covers(form, layer.kernel, layer.geometry) else None
