"""Drafts: a tiny published decoder in the place of the VAE, for a look before the final decode, in a tenth of its work.

Source: madebyollin/taehv 1f14a568, taem1 40a4cd84 (MIT); ModelTC/LightX2V 29c8504c ``tae.py``. Shapes say which it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn

from ...compat.checkpoints.pickled import pickled_tensors
from ...compat.checkpoints.weights import tensor_file
from ...compat.device.execution import placed, to_host
from ...compat.device.facts import value_or
from ...compat.device.quirks import convolution_switches, policy_for
from ...compat.errors import CheckpointError, UnsupportedError
from ...compat.memory.transfer import transfer_for
from ...compat.output_check import require_finite
from ..base import Latents, Progress, ProgressStage
from ..family import FamilySpec, TinyDecoder
from ..keys import listed
from ..pipeline import Pipeline, held_once

PART = "tiny_decoder"
WIDTHS = (256, 128, 64, 64)  # channels of the stages, each twice as wide and high as the one before
GROWTHS = (7, 13, 19)  # places of the layers that make several frames of one
COPIES = 6  # of its widest activation alive at once
ENDINGS = (".safetensors", ".pth")


class Recurrent(nn.Module):
    """A residual block that sees its input and that of the frame before."""

    def __init__(self, width: int, slope: float) -> None:
        super().__init__()
        self.act = nn.LeakyReLU(slope)
        self.conv = nn.Sequential(_conv(2 * width, width), self.act, _conv(width, width), self.act, _conv(width, width))

    def forward(self, frames: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """Frames (F, C, H, W) in order; ``before`` (1, C, H, W) comes ahead of the first."""
        return self.act(self.conv(torch.cat((frames, torch.cat((before, frames[:-1]))), dim=1)) + frames)


class Growth(nn.Module):
    """``stride`` frames of each: (F, C, H, W) to (F * stride, C, H, W)."""

    def __init__(self, width: int, stride: int) -> None:
        super().__init__()
        self.stride, self.conv = stride, nn.Conv2d(width, width * stride, 1, bias=False)

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        return self.conv(frames).unflatten(1, (self.stride, -1)).flatten(0, 1)


class Network(nn.Sequential):
    """The decoder, its layers numbered as in the files."""

    def __init__(self, channels: int, strides: Sequence[int], patch: int, row: TinyDecoder) -> None:
        stages: list[nn.Module] = []
        for (width, after), stride in zip(pairwise(WIDTHS), strides, strict=True):
            stages += [Recurrent(width, row.slope) for _ in range(3)]
            stages += [nn.Upsample(scale_factor=2), Growth(width, stride), _conv(width, after, bias=False)]
        first, act = _conv(channels, WIDTHS[0]), nn.LeakyReLU(row.slope)
        last = _conv(WIDTHS[-1], 3 * patch**2)
        super().__init__(nn.Identity(), first, act, *stages, act, last, nn.PixelShuffle(patch))
        self.row, self.stride = row, math.prod(strides)

    def forward(  # type: ignore[override]
        self, latent: torch.Tensor, before: dict[nn.Module, torch.Tensor]
    ) -> torch.Tensor:
        """Frames (F, 3, H, W) in 0..1 of a latent frame (1, C, h, w), as the transformer has it. ``before`` has the
        last input of each recurrent block, and is updated; it is empty where a video begins, whose first latent frame
        makes one frame, where each later one makes ``stride``."""
        first = not before
        frames = torch.tanh(latent / self.row.divisor / 3) * 3  # bent into -3..3
        for layer in self:
            if isinstance(layer, Recurrent):
                earlier = torch.zeros_like(frames[:1]) if first else before[layer]
                before[layer] = frames[-1:].clone()
                frames = layer(frames, earlier)
            else:
                frames = layer(frames)
        frames = frames[self.stride - 1 if first else 0 :]
        return ((frames + 1) / 2 if self.row.symmetric else frames).clamp(0, 1)


def _conv(channels: int, width: int, bias: bool = True) -> nn.Conv2d:
    return nn.Conv2d(channels, width, 3, padding=1, bias=bias)


def tiny_decoder(spec: FamilySpec, folders: Sequence[Path]) -> tuple[Path, Network]:
    """The first file in ``folders``, or in ``vae_approx`` below, with the family's tiny decoder; and its network.
    Raises UnsupportedError for a family that has none, CheckpointError where no file fits."""
    rows = spec.published.tiny_decoders
    if not rows:
        found = f"a draft of {spec.title}, for which no tiny decoder is published"
        raise UnsupportedError(found, expected="another decode method", fix="Choose method auto.")
    places = [place for folder in folders for place in (folder, folder / "vae_approx")]
    listings = (value_or(lambda place=place: sorted(place.iterdir()), []) for place in places)  # a share may be gone
    files = [file for listing in listings for file in listing if file.suffix in ENDINGS]
    refused = []
    for row in rows:
        for file in (file for file in files if file.name.lower().startswith(row.name)):
            if (network := _network(file, row, spec)) is not None:
                return file, network
            refused.append(file.name)
    raise CheckpointError(
        f"no tiny decoder for {spec.title} in {', '.join(map(str, folders)) or 'no folder'}"
        + (f"; {listed(sorted(set(refused)))} holds another network" if refused else ""),
        expected=" or ".join(f"{row.name}{ENDINGS[0]} ({row.source})" for row in rows),
        fix="Download it into a folder that is searched (ComfyUI: models/vae_approx), or choose method auto.",
    )


def _network(file: Path, row: TinyDecoder, spec: FamilySpec) -> Network | None:
    """The network of a file, on the CPU in its dtype; None where the file's tensors do not fit the family's VAE."""
    tensors = {name.removeprefix("decoder."): tensor for name, tensor in _tensors(file).items() if "decoder." in name}
    names = ("1.weight", "22.weight", *(f"{place}.conv.weight" for place in GROWTHS))  # their shapes tell the form
    known = all(name in tensors and tensors[name].ndim == 4 for name in names)
    if not known or not all(tensor.is_floating_point() for tensor in tensors.values()):
        return None
    first, last, *growths = (tensors[name] for name in names)
    strides = [len(growth) // width for growth, width in zip(growths, WIDTHS[:-1], strict=True)]
    patch = math.isqrt(len(last) // 3)
    if (2 ** len(GROWTHS) * patch, math.prod(strides)) != spec.sizes.ratios:
        return None
    with torch.device("meta"):
        network = Network(first.shape[1], strides, patch, row)
    if {name: t.shape for name, t in tensors.items()} != {name: t.shape for name, t in network.state_dict().items()}:
        return None
    with torch.inference_mode(False), torch.no_grad():  # copies: tensors read in inference mode cannot go on a layer
        network.load_state_dict({name: tensor.clone() for name, tensor in tensors.items()}, assign=True)
    return network.eval().requires_grad_(False)


def _tensors(file: Path) -> dict[str, torch.Tensor]:  # of safetensors, or of a pickle, read without running it
    if file.suffix != ENDINGS[0]:
        return pickled_tensors(file)
    with tensor_file(file) as opened:
        return opened.read(set(opened.entries), lambda _: None)


def draft(pipeline: Pipeline, latents: Latents, folders: Sequence[Path], progress: Progress) -> torch.Tensor:
    """Frames (F, H, W, 3) in 0..1 by the tiny decoder of ``folders``, not the VAE; UnsupportedError for a demo."""
    samples, dtype = latents.samples, pipeline.precision.conv or pipeline.precision.vae
    if pipeline.is_demo:
        found, fix = "a draft of a demo model, whose VAE is its own", "Choose method auto, which takes a second."
        raise UnsupportedError(found, expected="latents of a published model", fix=fix)
    require_finite(samples, "latents")
    file, network = tiny_decoder(pipeline.spec, folders)
    progress.notify(f"a draft by {file.name}: any other method makes the final video of the same latents")
    transfer = transfer_for(pipeline.offloader.device_of(PART), dtype)
    pixels = math.prod(samples.shape[3:]) * 4 ** len(GROWTHS)  # each stage doubles rows and columns
    needed = COPIES * pixels * WIDTHS[-1] * network.stride * dtype.itemsize
    stage, total, frames = ProgressStage("decoding", "a draft"), samples.shape[2], list[torch.Tensor]()
    before: dict[nn.Module, torch.Tensor] = {}
    switches = convolution_switches(policy_for(pipeline.facts))
    with switches, held_once(pipeline, PART, lambda _: network.to(dtype), needed, progress) as held:
        mean, std, scale = statistics_of(pipeline)
        for latent in ((samples - mean) * scale / std).unbind(2):
            frames.append(transfer.to_host_fp32(held(transfer.to_device(latent), before)).permute(0, 2, 3, 1))
            progress.step(len(frames), total, stage)
    video = torch.cat(frames)
    require_finite(video, "draft")
    return video[int(latents.extra.get("drop_frames", 0)) :]


def preview(network: Network, estimate: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """The first frame (H, W, 3) in 0..1 of ``estimate`` (1, C, T, H, W), as the transformer has it; on the CPU."""
    frames = network.to(device, dtype)(placed(estimate[:1, :, 0], device, dtype), {})
    return to_host(frames[0].permute(1, 2, 0).contiguous()).float()


def statistics_of(pipeline: Pipeline) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Mean and deviation (1, C or 1, 1, 1, 1) of the VAE's latents, and the factor that scales the transformer's."""
    config = pipeline.configs["vae"]
    mean, std = (torch.tensor(config.get(f"latents_{name}") or [own]) for name, own in (("mean", 0.0), ("std", 1.0)))
    return mean.view(1, -1, 1, 1, 1), std.view(1, -1, 1, 1, 1), float(config.get("scaling_factor") or 1.0)
