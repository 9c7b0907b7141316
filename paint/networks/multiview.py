"""The paint UNet of v2-0 and turbo: a main stream over all views, and a stream over the reference pictures.

The reference stream runs once, and layers of the same name in the main stream attend at every step to what its layers
read. Its inputs never change, so this equals running it again, as upstream does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from .layers import Dtypes, Layer, MultiHeadAttention
from .unet import UNet, UNetShape

VIEW_LABELS, REFERENCE_LABELS = 44, 5
LABEL_WIDTH, TEXT_TOKENS, TEXT_WIDTH = 1280, 77, 1024  # literals upstream, not configuration
LATENT_CHANNELS, MAIN_CHANNELS = 4, 12  # noisy latents, normals, positions


@dataclass(frozen=True, slots=True)
class StreamInputs:
    """Inputs shared by the layers of the main stream in one forward."""

    views: int
    reference: Mapping[str, Tensor]  # kept tokens by layer name, (1 or active rows, N, D)
    scales: tuple[float, ...]  # of each guidance row: 1 with the reference, 0 without it and, in v2-0, the text
    reference_scale: float = 1.0  # weight of the attention to the reference in the rows that have it
    multiview_scale: float = 1.0  # weight of the attention between views
    materials: int = 1  # 1, or 2 for albedo and metallic-roughness
    dino: Tensor | None = None  # (B, N, D), PBR only
    rotary: Mapping[int, tuple[Tensor, Tensor]] | None = None  # cosines and sines by number of tokens, PBR only

    def reference_of(self, name: str, row: int) -> Tensor:
        """The kept tokens (1, N, D) of layer ``name`` for guidance row ``row``, whose scale must not be 0.

        A layer holds one set for all rows, one for each row, or one for each row whose scale is not 0."""
        kept, active = self.reference[name], [index for index, scale in enumerate(self.scales) if scale]
        at = row if kept.shape[0] == len(self.scales) else active.index(row)
        return kept if kept.shape[0] == 1 else kept[at : at + 1]


class Recording(nn.Module):
    """A layer of the reference stream, which keeps what it read."""

    def __init__(self, name: str, layer: Layer, _width: int, _heads: int) -> None:
        super().__init__()
        self.name, self.transformer = name, layer

    def forward(self, h: Tensor, text: Tensor, kept: dict[str, Tensor]) -> Tensor:
        """The stock layer's result; ``kept`` gets the normalised input, (B * R, N, D), by the layer's name."""
        inner = self.transformer
        seen = inner.normed(h)
        kept[self.name] = seen
        h = h + inner.attn1(seen)
        h = h + inner.attn2(inner.asked(h), text)
        return h + inner.fed(h)


class ReferenceStream(nn.Module):
    """The UNet over the reference pictures, with its learned text, whose shape may have a batch axis."""

    def __init__(self, shape: UNetShape, text_shape: tuple[int, ...], dtypes: Dtypes | None) -> None:
        super().__init__()
        self.body = UNet(shape, Recording, dtypes)
        self.learned_text_clip_ref = nn.Parameter(torch.zeros(text_shape), requires_grad=False)

    def forward(self, latents: Tensor) -> dict[str, Tensor]:
        """Kept tokens (B, R * N, D) by layer name, from reference latents (B, R, 4, H, W)."""
        rows, pictures = latents.shape[:2]
        text = self.learned_text_clip_ref.reshape(1, TEXT_TOKENS, TEXT_WIDTH).expand(rows * pictures, -1, -1)
        kept: dict[str, Tensor] = {}
        start = torch.zeros(1, dtype=torch.float32, device=latents.device)
        self.body.features(latents.flatten(0, 1), start, text, kept)
        return {name: seen.unflatten(0, (rows, pictures)).flatten(1, 2) for name, seen in kept.items()}


class MultiviewLayer(nn.Module):
    def __init__(self, name: str, layer: Layer, width: int, heads: int) -> None:
        super().__init__()
        self.name, self.transformer = name, layer
        self.attn_multiview = MultiHeadAttention(width, heads)
        self.attn_refview = MultiHeadAttention(width, heads)

    def forward(self, h: Tensor, text: Tensor, run: StreamInputs) -> Tensor:
        """Tokens (B * V, N, D) from the same and text (B, M, D'). A row of scale 0 skips the reference attention."""
        inner = self.transformer
        seen = inner.normed(h)
        h = grouped(h + inner.attn1(seen), run.views)
        together = grouped(seen, run.views)
        for row, scale in enumerate(run.scales):
            if scale:
                added = self.attn_refview(together[row : row + 1], run.reference_of(self.name, row))
                h[row : row + 1] += run.reference_scale * added
        if run.views > 1:
            h = h + run.multiview_scale * self.attn_multiview(together)
        # The views of a row share its text, so together they need its keys and values once.
        h = h + inner.attn2(inner.asked(h), text)
        h = h.unflatten(1, (run.views, -1)).flatten(0, 1)
        return h + inner.fed(h)


class MainStream(nn.Module):
    """The UNet over all views at once; ``shape`` gets twelve input channels."""

    materials = 1

    def __init__(self, shape: UNetShape, dtypes: Dtypes | None) -> None:
        super().__init__()
        self.body = UNet(replace(shape, in_channels=MAIN_CHANNELS), MultiviewLayer, dtypes)
        # Not by the constructor, whose random numbers take seconds to import on the meta device.
        self.class_embedding = nn.Embedding.from_pretrained(torch.empty(REFERENCE_LABELS + VIEW_LABELS, LABEL_WIDTH))
        self.learned_text_clip_gen = nn.Parameter(torch.zeros(1, TEXT_TOKENS, TEXT_WIDTH), requires_grad=False)

    def forward(self, sample: Tensor, timestep: Tensor, maps: Tensor, cameras: Tensor, run: StreamInputs) -> Tensor:
        """Predicted velocity, (B * V, 4, H, W), from noisy latents ``sample`` (B, V, 4, H, W).

        ``maps`` are latents of normals and positions, (B or 1, V, 8, H, W); ``cameras`` are integer ids (V,)."""
        rows = sample.shape[0]
        counts = torch.tensor(run.scales, device=sample.device).ne(0)[:, None, None]
        text = self.learned_text_clip_gen * counts  # zeros for a row whose reference counts 0
        labels = self.class_embedding((cameras + REFERENCE_LABELS).expand(rows, -1).flatten())
        x = torch.cat((sample, maps.expand(rows, -1, -1, -1, -1)), dim=2).flatten(0, 1)
        return self.body(x, timestep, text, run, labels)


def grouped(tokens: Tensor, views: int) -> Tensor:
    """(B, V * N, D) from (B * V, N, D)."""
    return tokens.unflatten(0, (-1, views)).flatten(1, 2)
