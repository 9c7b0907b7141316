"""MV-Adapter: attention between six views and to a reference picture on diffusers' UNet of Stable Diffusion XL or 2.1.

The adapter adds two attentions to each self-attention; tensors have their published names, such as
``...attn1.processor.to_q_mv.weight``. Source: huanngzh/MV-Adapter, Apache-2.0."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...compat.errors import CheckpointError
from ...compat.packages import attribute
from ...compat.transforms.attention import Attention as Kernel
from ...compat.transforms.compile import uncompiled
from ..choices import IG2MV, TG2MV
from .layers import Attend, Dtypes, joined, split
from .multiview import grouped
from .weights import require_shapes

VIEWS = 6  # front, right, back, left, top, bottom: the attention between them relies on this order
IN_ROWS, IN_COLUMNS = (0, 1, 2, 3), (0, 2, 4, 5)
MAP_CHANNELS = 6  # position, normal
UNSHUFFLE = {"sdxl": 16, "sd21": 8}
ENCODERS = {"sdxl": "full_adapter_xl", "sd21": "full_adapter"}
NARROW = ("to_q", "to_k", "to_v", "proj")  # their results are operands again, not part of the residual stream
ADAPTER, PROCESSOR = "adapter.", ".processor."
PAGE = "huanngzh/mv-adapter: mvadapter_ig2mv_sdxl.safetensors, or the one for tg2mv or sd21"


@dataclass(frozen=True, slots=True)
class AdapterInputs:
    """Inputs shared by the layers in one forward."""

    reference: Mapping[str, Tensor] = field(default_factory=dict)  # tokens by layer, (1, R * N, D); none for tg2mv
    rows: tuple[bool, ...] = (True,)  # True for a guidance row that sees the reference; others get its bias alone
    reference_scale: float = 1.0
    multiview_scale: float = 1.0
    recorded: dict[str, Tensor] | None = None  # gets the kept tokens; nothing is added then. None while painting


class TextAttention:
    """Diffusers' stock attention with a kernel of ours; it ignores ``run``, which is for :class:`ViewAttention`."""

    def __init__(self) -> None:
        self.attend: Attend = Kernel()

    def __call__(
        self, attn: Any, hidden_states: Tensor, encoder_hidden_states: Any = None, run: Any = None, **_: Any
    ) -> Tensor:
        seen = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        tokens = (attn.to_q(hidden_states), attn.to_k(seen), attn.to_v(seen))
        return attn.to_out[0](joined(self.attend(*(split(x, attn.heads) for x in tokens))))


class ViewAttention(nn.Module):
    """A self-attention with the adapter's attentions between views and, if ``reference``, to the reference picture.

    ``kept``, the reference's tokens of layer ``name``, is set for a forward: a look-up by name would make torch.compile
    build a graph for each layer."""

    kept: Tensor | None = None  # (1, R * N, D)

    def __init__(self, name: str, width: int, reference: bool) -> None:
        super().__init__()
        self.name, self.stock = name, TextAttention()
        for kind in ("mv", "ref") if reference else ("mv",):
            for part in "qkv":
                setattr(self, f"to_{part}_{kind}", nn.Linear(width, width, bias=False))
            setattr(self, f"to_out_{kind}", nn.ModuleList([nn.Linear(width, width)]))
        self.sees_reference = reference

    def __call__(self, attn: Any, hidden_states: Tensor, run: AdapterInputs = AdapterInputs(), **_: Any) -> Tensor:
        """The sum of the attentions, (B * V, N, D), of normalised tokens of that shape. Diffusers reads this signature.

        With ``run.recorded`` the tokens are put there, and the stock attention alone is computed."""
        added = self.stock(attn, hidden_states)
        if run.recorded is not None:
            run.recorded[self.name] = hidden_states
            return added
        added = added + run.multiview_scale * self._between_views(hidden_states, attn.heads)
        if self.sees_reference:
            added = added + run.reference_scale * self._to_reference(hidden_states, attn.heads, run)
        return added

    def _between_views(self, seen: Tensor, heads: int) -> Tensor:
        """Each pixel attends to its row in the four views around, and to its column in front, back, top and bottom.

        For columns the front is mirrored: its right is the left of the other three. Front and back average both."""
        side = math.isqrt(seen.shape[1])  # views are square
        maps = [  # (B, V, H, W, heads, D)
            layer(seen).unflatten(1, (side, side)).unflatten(0, (-1, VIEWS)).unflatten(-1, (heads, -1))
            for layer in (self.to_q_mv, self.to_k_mv, self.to_v_mv)
        ]
        rows = self._lines([x[:, IN_ROWS].permute(0, 2, 4, 1, 3, 5) for x in maps])  # (B, H, heads, views, W, D)
        rows = rows.permute(0, 3, 1, 4, 2, 5)
        columns = self._lines([mirrored(x[:, IN_COLUMNS]).permute(0, 3, 4, 1, 2, 5) for x in maps])
        columns = mirrored(columns.permute(0, 3, 4, 1, 2, 5))
        both = ((rows[:, 0] + columns[:, 0]) / 2, rows[:, 1], (rows[:, 2] + columns[:, 1]) / 2, rows[:, 3])
        views = torch.stack((*both, columns[:, 2], columns[:, 3]), dim=1)
        return self.to_out_mv[0](views.flatten(0, 1).flatten(1, 2).flatten(2))

    def _lines(self, maps: Sequence[Tensor]) -> Tensor:
        """Attention within each line: maps and result are (B, lines, heads, views, line length, D)."""
        lines = (x.flatten(3, 4).flatten(0, 1) for x in maps)
        return self.stock.attend(*lines).unflatten(0, maps[0].shape[:2]).unflatten(3, maps[0].shape[3:5])

    def _to_reference(self, seen: Tensor, heads: int, run: AdapterInputs) -> Tensor:
        """(B * V, N, D) from ``seen``: a guidance row's views query the same keys, so together they need them once."""
        key, value = (split(layer(self.kept), heads) for layer in (self.to_k_ref, self.to_v_ref))
        added = []
        for tokens, shown in zip(grouped(seen, VIEWS).split(1), run.rows, strict=True):  # each (1, V * N, D)
            attended = tokens.new_zeros(1, 1, tokens.shape[2])  # without the picture the output's bias alone is added
            if shown:
                attended = joined(self.stock.attend(split(self.to_q_ref(tokens), heads), key, value))
            added.append(self.to_out_ref[0](attended).expand(1, tokens.shape[1], -1))
        return torch.cat(added).unflatten(1, (VIEWS, -1)).flatten(0, 1)


def mirrored(views: Tensor) -> Tensor:
    """``views`` (B, V, H, W, ...) with the first of them flipped left to right."""
    return torch.cat((views[:, :1].flip(3), views[:, 1:]), dim=1)


def unet_for(config: Mapping[str, Any], variant: str) -> nn.Module:
    """The base UNet of a ``config.json`` with a :class:`ViewAttention` at each self-attention, which sees a reference
    if the variant is ig2mv, and our kernel at the others; make it under ``torch.device("meta")``."""
    cls: Any = attribute("diffusers", "UNet2DConditionModel")
    unet = cls.from_config({key: value for key, value in config.items() if not key.startswith("_")})
    for name, module in unet.named_modules():
        if hasattr(module, "to_q"):
            to_itself = name.endswith(".attn1")
            width = module.to_q.in_features
            module.set_processor(ViewAttention(name, width, variant == IG2MV) if to_itself else TextAttention())
    return unet  # type: ignore[no-any-return]


def encoder_for(base: str, widths: Sequence[int]) -> nn.Module:
    """The encoder of position and normal maps for a UNet of ``widths``; SDXL repeats the last for its middle block."""
    cls: Any = attribute("diffusers", "T2IAdapter")
    return cls(  # type: ignore[no-any-return]
        in_channels=MAP_CHANNELS,
        channels=[*widths, widths[-1]] if base == "sdxl" else list(widths),
        num_res_blocks=2,
        downscale_factor=UNSHUFFLE[base],
        adapter_type=ENCODERS[base],
    )


def variant_of(shapes: Mapping[str, tuple[int, ...]], base: str, name: str, declared: str) -> str:
    """``ig2mv`` or ``tg2mv``, of an adapter file with tensors of these shapes, for a checkpoint of ``base``.

    Raises CheckpointError for a foreign file, one for another base, one whose layers are not those of ``declared``, or
    one that may be for camera rays instead of a mesh: both have the same tensors, so the file's ``name`` must have the
    variant in it, or the user has ``declared`` that of a renamed file."""
    first = shapes.get("adapter.conv_in.weight", ())
    if len(first) < 2 or not any(f"{PROCESSOR}to_q_mv" in tensor for tensor in shapes):
        raise CheckpointError(f"{name!r} holds no MV-Adapter", expected="its published file", fix=f"Download {PAGE}.")
    made_for = {MAP_CHANNELS * factor**2: kind for kind, factor in UNSHUFFLE.items()}.get(first[1], "another base")
    if made_for != base:
        found = f"{name!r} is made for {made_for}, and the checkpoint is {base}"
        fix = f"Choose a checkpoint of {made_for}, or the adapter for {base}."
        raise CheckpointError(found, expected="adapter and checkpoint of one base", fix=fix)
    variant = IG2MV if any(f"{PROCESSOR}to_q_ref" in tensor for tensor in shapes) else TG2MV
    if declared and declared != variant:
        found = f"{name!r} declared as {declared} has the layers of {variant}"
        raise CheckpointError(found, expected=variant, fix="Choose auto.")
    rays = variant.replace("g2", "2")
    if variant not in name.lower() and (not declared or rays in name.lower()):
        found = f"{name!r} may be {rays}, which is made for camera rays and has the same tensors"
        fix = f"Use {variant}; a renamed file of it needs variant {variant}, and no {rays} in its name."
        raise CheckpointError(found, expected=f"{variant} in the name, as published", fix=fix)
    return variant


def require_tensors(shapes: Mapping[str, tuple[int, ...]], unet: nn.Module, encoder: nn.Module, name: str) -> None:
    """Raise CheckpointError unless an adapter file has exactly the tensors of its layers and of its map encoder."""
    named = {**unet.state_dict(), **encoder.state_dict()}
    wanted = {key: tuple(tensor.shape) for key, tensor in named.items() if PROCESSOR in key or key.startswith(ADAPTER)}
    fix = f"The file is not complete, or the checkpoint has other layers. Download {PAGE}."
    require_shapes(shapes, wanted, f"in {name!r}", fix, f"as each of {len(wanted)} tensors")


def set_kernel(unet: nn.Module, attend: Attend) -> None:
    for processor in unet.attn_processors.values():  # type: ignore[operator]
        getattr(processor, "stock", processor).attend = attend


def set_dtypes(module: nn.Module, dtypes: Dtypes) -> None:
    """Hook each Linear and Conv2d to take ``dtypes.compute`` and, but for :data:`NARROW`, return ``dtypes.residual``.

    Norms get no hook: they compute in the residual stream's dtype. The weights are in these dtypes already. Nothing
    changes where both are one."""
    if dtypes.compute is dtypes.residual:
        return

    def operands(_leaf: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (dtypes.narrow(given[0]), *given[1:])

    def stream(_leaf: nn.Module, _given: Any, result: Tensor) -> Tensor:
        return dtypes.wide(result)

    for name, leaf in module.named_modules():
        if isinstance(leaf, (nn.Linear, nn.Conv2d)):
            leaf.register_forward_pre_hook(operands)
            if name.rpartition(".")[2].removesuffix("_mv").removesuffix("_ref") not in NARROW:
                leaf.register_forward_hook(stream)


def looked_at(unet: Any, latents: Tensor, text: Tensor, added: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tokens to keep, (1, R * N, D) by layer, of clean reference latents (R, 4, H, W), seen at timestep 0.

    ``text`` is the prompt's, (1, M, D); ``added`` is SDXL's pooled text and sizes, one row, and empty for SD2.1."""
    recorded: dict[str, Tensor] = {}
    start = torch.zeros(1, dtype=torch.float32, device=latents.device)
    with uncompiled(unet):  # one forward: its graphs would cost more
        forward(unet, latents, start, text, added, AdapterInputs(recorded=recorded))
    return {name: tokens.flatten(0, 1)[None] for name, tokens in recorded.items()}


def forward(
    unet: Any, x: Tensor, time: Tensor, text: Tensor, added: Mapping[str, Tensor], run: AdapterInputs,
    states: Sequence[Tensor] = (),
) -> Tensor:  # fmt: skip
    """The prediction (B * V, 4, H, W) from noisy latents ``x`` of the same shape at the timestep ``time`` (1,).

    ``text`` (B, M, D) and SDXL's pooled text and sizes in ``added`` have one row for all views of a guidance row;
    ``states`` of the map encoder, (V, C, h, w) each, are the same for every guidance row."""
    rows = text.shape[0]
    per_row = x.shape[0] // rows
    given: dict[str, Any] = {"cross_attention_kwargs": {"run": run}, "return_dict": False}
    if added:
        given["added_cond_kwargs"] = {name: value.repeat_interleave(per_row, dim=0) for name, value in added.items()}
    if states:  # the UNet takes them off the list
        given["down_intrablock_additional_residuals"] = [state.repeat(rows, 1, 1, 1) for state in states]
    layers = [layer for layer in unet.modules() if isinstance(layer, ViewAttention)]
    try:
        for layer in layers:
            layer.kept = run.reference.get(layer.name)
        return unet(x, time, text.repeat_interleave(per_row, dim=0), **given)[0]  # type: ignore[no-any-return]
    finally:
        for layer in layers:
            layer.kept = None
