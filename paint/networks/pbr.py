"""The paint UNet of v2-1: two materials, albedo and metallic-roughness, positions as rotary angles, DINO tokens.

Rows are ordered (b, material, view), albedo first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from .layers import Dtypes, Layer, MultiHeadAttention, joined, split
from .multiview import MAIN_CHANNELS, TEXT_TOKENS, TEXT_WIDTH, StreamInputs
from .unet import UNet, UNetShape

MATERIALS = 2
DINO_WIDTH, DINO_TOKENS = 1536, 4  # literals upstream
THETA = 10000.0
LEVELS = 4
VOXELS_PER_CELL = 8  # at the first level, for each row of latents
LEAST_SHARE = 16  # a cell needs this part of its pixels on the object


class _SecondMaterial(nn.ModuleDict):
    """Projections ``names`` and the output of the second material."""

    def __init__(self, width: int, names: str) -> None:
        super().__init__({f"to_{name}_mr": nn.Linear(width, width, bias=False) for name in names})
        self["to_out_mr"] = nn.ModuleList([nn.Linear(width, width)])


class SelfAttention(MultiHeadAttention):
    """Each view of each material alone; the materials have projections of their own."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.processor = _SecondMaterial(width, "qkv")

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """(B, M, V, N, D) from the same."""
        other = self.processor
        layers = (
            (self.to_q, self.to_k, self.to_v, self.to_out[0]),
            (other["to_q_mr"], other["to_k_mr"], other["to_v_mr"], other["to_out_mr"][0]),
        )
        results = []
        for material, (to_q, to_k, to_v, to_out) in enumerate(layers):
            tokens = x[:, material].flatten(0, 1)
            result = self.attend(*(split(layer(tokens), self.heads) for layer in (to_q, to_k, to_v)))
            results.append(to_out(joined(result)).unflatten(0, x[:, material].shape[:2]))
        return torch.stack(results, dim=1)


class ReferenceAttention(MultiHeadAttention):
    """Albedo's queries look at the reference once; each material takes values and output of its own.

    Upstream concatenates the values of both materials before the heads are split, so a head holds values of one
    material alone, and splits each head's result in two; the weights were trained with it. Here one half is attended to
    after the other, since fused kernels want values as wide as keys; each result is the same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.processor = _SecondMaterial(width, "v")

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:  # type: ignore[override]
        """(B, M, N, D) from albedo's queries ``x`` (B, N, D) and the kept tokens ``seen`` (B, M', D)."""
        query, key = split(self.to_q(x), self.heads), split(self.to_k(seen), self.heads)
        values = torch.cat((self.to_v(seen), self.processor["to_v_mr"](seen)), dim=-1)
        halves = values.unflatten(2, (self.heads, MATERIALS, -1)).transpose(1, 2).unbind(dim=3)
        outputs = (self.to_out[0], self.processor["to_out_mr"][0])
        results = [out(joined(self.attend(query, key, half))) for out, half in zip(outputs, halves, strict=True)]
        return torch.stack(results, dim=1)


class PbrLayer(nn.Module):
    def __init__(self, name: str, layer: Layer, width: int, heads: int) -> None:
        super().__init__()
        self.name, self.transformer = name, layer
        layer.attn1 = SelfAttention(width, heads)
        self.attn_multiview = MultiHeadAttention(width, heads)
        self.attn_refview = ReferenceAttention(width, heads)
        self.attn_dino = MultiHeadAttention(width, heads, TEXT_WIDTH)

    def forward(self, h: Tensor, text: Tensor, run: StreamInputs) -> Tensor:
        """Tokens (B * M * V, N, D) from the same and text (B * M, T, D'). A row of scale 0 skips the reference."""
        inner, rows = self.transformer, len(run.scales)
        seen = inner.normed(h).unflatten(0, (rows, run.materials, run.views))
        h = h.unflatten(0, (rows, run.materials, run.views)) + inner.attn1(seen)
        h, together = h.flatten(2, 3), seen.flatten(2, 3)  # (B, M, V * N, D)
        for row, scale in enumerate(run.scales):
            if scale:
                added = self.attn_refview(together[row : row + 1, 0], run.reference_of(self.name, row))
                h[row : row + 1] += run.reference_scale * added
        h, together = h.flatten(0, 1), together.flatten(0, 1)
        if run.views > 1:
            rotary = (run.rotary or {}).get(together.shape[1])
            h = h + run.multiview_scale * self.attn_multiview(together, rotary=rotary)
        asked = inner.asked(h)
        h = h + inner.attn2(asked, text)
        # The materials of a row share its picture, so together they need its keys and values once.
        added = self.attn_dino(asked.unflatten(0, (rows, -1)).flatten(1, 2), run.dino)
        h = h + added.unflatten(1, (run.materials, -1)).flatten(0, 1)
        h = h.unflatten(1, (run.views, -1)).flatten(0, 1)
        return h + inner.fed(h)


class DinoProjection(nn.Module):
    """Each token of DINO as four tokens of the text's width."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(DINO_WIDTH, DINO_TOKENS * TEXT_WIDTH)
        self.norm = nn.LayerNorm(TEXT_WIDTH)

    def forward(self, states: Tensor, dtypes: Dtypes) -> Tensor:
        tokens = self.proj(dtypes.narrow(states)).unflatten(2, (DINO_TOKENS, TEXT_WIDTH)).flatten(1, 2)
        return dtypes.narrow(self.norm(dtypes.wide(tokens)))


class PbrStream(nn.Module):
    """The UNet over all views of both materials at once."""

    materials = MATERIALS
    learned_text_clip_albedo: nn.Parameter
    learned_text_clip_mr: nn.Parameter

    def __init__(self, shape: UNetShape, dtypes: Dtypes | None) -> None:
        super().__init__()
        self.body = UNet(replace(shape, in_channels=MAIN_CHANNELS), PbrLayer, dtypes)
        self.image_proj_model_dino = DinoProjection()
        for name in ("albedo", "mr"):
            text = nn.Parameter(torch.zeros(TEXT_TOKENS, TEXT_WIDTH), requires_grad=False)
            setattr(self, f"learned_text_clip_{name}", text)

    def forward(self, sample: Tensor, timestep: Tensor, maps: Tensor, dino: Tensor, run: StreamInputs) -> Tensor:
        """Predicted velocity, (B * M * V, 4, H, W), from noisy latents ``sample`` (B, M, V, 4, H, W).

        ``maps`` are latents of normals and positions, (B or 1, V, 8, H, W); ``dino`` is DINO's last hidden states,
        (B, N, 1536), with zeros for a row without it."""
        rows = sample.shape[0]
        text = torch.stack((self.learned_text_clip_albedo, self.learned_text_clip_mr)).expand(rows, -1, -1, -1)
        run = replace(run, dino=self.image_proj_model_dino(dino, self.body.dtypes))
        maps = maps.unsqueeze(1).expand(rows, MATERIALS, -1, -1, -1, -1)
        return self.body(torch.cat((sample, maps), dim=3).flatten(0, 2), timestep, text.flatten(0, 1), run)


def voxel_indices(position_maps: Tensor, rows: int) -> dict[int, Tensor]:
    """Voxel of each token, (1, N, 3), int64, by the number N of tokens of all views together, finest UNet level first.

    A token with too few pixels on the object is at position 0, and levels end where their height does not divide the
    map's. Upstream edits the map in place, so from the second level on background counts as an object at position 0.
    The weights were trained with it. ``position_maps`` are (V, 3, H, W) in 0..1, background exactly 1; ``rows`` is the
    height of the latents."""
    maps = position_maps.to(torch.float16)
    on_object = (maps != 1).all(dim=1, keepdim=True)
    maps = torch.where(on_object, maps, torch.zeros_like(maps))
    voxels_by_tokens = {}
    for level in range(LEVELS):
        height = rows >> level
        if height < 1 or maps.shape[-2] % height:
            break
        side = maps.shape[-2] // height
        pixels, count = cells(maps, side), cells(on_object, side).sum(-1)
        # Sums in fp32, since a device's fp16 sums differ; then sum, mean and index in fp16, as upstream rounds them.
        mean = pixels.float().sum(-1).to(torch.float16) / count.clamp(min=1)
        mean = torch.where(count < side**2 // LEAST_SHARE, torch.zeros_like(mean), mean).clamp(0, 1)
        tokens = (mean * (VOXELS_PER_CELL * height - 1)).round().permute(0, 2, 3, 1).reshape(1, -1, 3).long()
        voxels_by_tokens[tokens.shape[1]] = tokens
        on_object = torch.ones_like(on_object)
    return voxels_by_tokens


def cells(maps: Tensor, side: int) -> Tensor:  # (V, C, H / side, W / side, side * side): the pixels of each cell
    return maps.unfold(2, side, side).unfold(3, side, side).flatten(-2)


def rotary_tables(voxels: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines (1, N, D), fp32, each value twice, for voxels (1, N, 3) and head width D, divisible by 16. x
    and y get three eighths of the features each, z a quarter."""
    angles = []
    for axis, share in enumerate((3, 3, 2)):
        size = width * share // 8
        frequencies = THETA ** -(torch.arange(0, size, 2, dtype=torch.float32, device=voxels.device) / size)
        angles.append(voxels[..., axis, None].float() * frequencies)
    joined = torch.cat(angles, dim=-1).repeat_interleave(2, dim=-1)
    return joined.cos(), joined.sin()


def rotary_by_tokens(position_maps: Tensor, rows: int, widths: Mapping[int, int]) -> dict[int, tuple[Tensor, Tensor]]:
    """The :func:`rotary_tables` of :func:`voxel_indices`, by tokens; ``widths``: level to head width."""
    levels = enumerate(voxel_indices(position_maps, rows).items())
    return {tokens: rotary_tables(voxels, widths[level]) for level, (tokens, voxels) in levels if level in widths}
