"""Every launch under the name of its operation."""

from .activation import swiglu as swiglu
from .group_norm import group_norm_silu_pad as group_norm_silu_pad
from .group_norm import rms_silu_pad as rms_silu_pad
from .residual import gated_residual as gated_residual
from .residual import normalized as normalized
from .residual import residual_norm as residual_norm
from .rope import qk_norm_rope as qk_norm_rope
