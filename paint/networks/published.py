"""Networks of a published paint checkpoint, and the place of each of its tensors: one to one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...compat.errors import CheckpointError
from ..choices import KINDS, PAGES
from .layers import Dtypes
from .multiview import LATENT_CHANNELS, TEXT_TOKENS, TEXT_WIDTH, MainStream, ReferenceStream
from .pbr import PbrStream
from .unet import UNet, UNetShape
from .weights import require_shapes

DELIGHT_CHANNELS = 8  # noisy latents and those of the picture
SIGNS = {  # a tensor by which a kind is told from those after it
    "paint": "unet.class_embedding.weight",
    "paint_pbr": "unet.learned_text_clip_albedo",
    "delight": "conv_in.weight",
}
REFERENCE_TEXT = "unet.learned_text_clip_ref"
ADAPTER = re.compile(r"(^|\.)to_[kv]_ip\.weight$|(^|\.)image_proj_model\.(proj|norm)\.(weight|bias)$")
LAYER = re.compile(r"^unet\..*\.attn_refview\.to_q\.weight$")


def kind_of(shapes: Mapping[str, tuple[int, ...]], path: Path) -> str:
    """The kind of checkpoint that holds tensors of these shapes by name; raises CheckpointError for an unknown one."""
    for kind, sign in SIGNS.items():
        if sign in shapes and (kind != "delight" or shapes[sign][1:2] == (DELIGHT_CHANNELS,)):  # others' have 4 or 9
            return kind
    found = f"{str(path)!r} holds no UNet of Hunyuan3D paint or delight"
    raise CheckpointError(found, expected=", ".join(KINDS), fix=f"Download one ({'; '.join(PAGES.values())}).")


def shape_for(kind: str, config: Mapping[str, Any]) -> UNetShape:
    """The sizes of a kind's UNet of this ``config.json``; of the reference's where there are two."""
    return UNetShape.of({**config, "in_channels": DELIGHT_CHANNELS if kind == "delight" else LATENT_CHANNELS})


def networks_for(kind: str, config: Mapping[str, Any], dtypes: Dtypes | None = None) -> dict[str, nn.Module]:
    """The networks of a kind by part name, without values; make them under ``torch.device("meta")``."""
    shape, text = shape_for(kind, config), (TEXT_TOKENS, TEXT_WIDTH)
    if kind == "delight":
        return {"unet": UNet(shape, None, dtypes)}
    if kind == "paint_pbr":
        return {"unet": PbrStream(shape, dtypes), "reference": ReferenceStream(shape, text, dtypes)}
    return {"unet": MainStream(shape, dtypes), "reference": ReferenceStream(shape, (1, *text), dtypes)}


def published(kind: str, part: str, key: str) -> str:
    """The published name of the tensor that the module of ``part``, unet or reference, calls ``key``."""
    if kind == "delight":
        return key
    if part == "reference":
        return REFERENCE_TEXT if not key.startswith("body.") else f"unet_dual.{key.removeprefix('body.')}"
    return f"unet.{key.removeprefix('body.')}"


def without_adapter(kind: str, shapes: Mapping[str, tuple[int, ...]]) -> tuple[dict[str, tuple[int, ...]], int]:
    """``shapes`` without the unused image prompt in turbo's .safetensors, and how many tensors were left out.

    Only ``paint`` has it: key and value of each layer, and four of a projection. Another number of tensors stays, to
    be reported."""
    extra = [name for name in shapes if ADAPTER.search(name)] if kind == "paint" else []
    if len(extra) != 2 * sum(bool(LAYER.search(name)) for name in shapes) + 4:
        return dict(shapes), 0
    return {name: shape for name, shape in shapes.items() if name not in set(extra)}, len(extra)


def require_fitting(
    kind: str, shapes: Mapping[str, tuple[int, ...]], networks: Mapping[str, nn.Module], path: str
) -> None:
    """Raise CheckpointError unless ``shapes``, by published names, are exactly those of the networks' tensors."""
    wanted = {
        published(kind, part, key): tuple(tensor.shape)
        for part, module in networks.items()
        for key, tensor in module.state_dict().items()
    }
    fix = "Download config.json and weights from the same place."
    require_shapes(shapes, wanted, f"of the UNet in {path!r}", fix, f"as a {kind} UNet of its config.json has it")


def stored_dtype(key: str, dtypes: Dtypes) -> torch.dtype:
    """The dtype in which a tensor is kept: norms as the residual stream, everything else as operands."""
    owner = key.rpartition(".")[0].rpartition(".")[2]
    return (dtypes.residual if "norm" in owner else dtypes.compute) or torch.float32
