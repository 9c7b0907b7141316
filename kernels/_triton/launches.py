"""Every launch under the name of its operation."""

from .activation import geglu, gelu_tanh, swiglu
from .group_norm import group_norm_silu_pad, rms_silu_pad
from .norm import normalized
from .residual import gated_residual, residual_norm
from .rope import qk_norm_rope

__all__ = [
    "gated_residual",
    "geglu",
    "gelu_tanh",
    "group_norm_silu_pad",
    "normalized",
    "qk_norm_rope",
    "residual_norm",
    "rms_silu_pad",
    "swiglu",
]
