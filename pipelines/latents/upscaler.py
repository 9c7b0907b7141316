"""A latent upscaler of any family: read from its file, run once on the device, and gone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from ...compat.checkpoints.headers import TensorEntry
from ...compat.checkpoints.weights import read_tensors
from ...compat.device.quirks import convolution_switches, policy_for
from ...compat.errors import CheckpointError
from ...compat.memory.transfer import transfer_for
from ..base import Progress, ProgressStage
from ..files.part import construction, empty_weights
from ..keys import listed
from ..pipeline import Pipeline, held_once

Build = Callable[[], nn.Module]
Entries = Mapping[str, TensorEntry]
PART, STAGE = "latent_upsampler", ProgressStage("upscaling", "latents")
COPIES = 4  # of its widest activation alive at once: a convolution's input, output and work, and the residual


def upscaled(
    pipeline: Pipeline, low: Tensor, build: Build, entries: Entries, widest: int, dtype: torch.dtype, progress: Progress
) -> Tensor:
    """``low`` (1, C, T, H, W) through the network that ``build`` makes and ``entries`` fill, fp32, on the CPU; its
    largest activation has ``widest`` values for each latent cell. CheckpointError where the file lacks a tensor."""
    transfer = transfer_for(pipeline.offloader.device_of(PART), dtype)
    needed = COPIES * widest * low.shape[2:].numel() * dtype.itemsize
    switches = convolution_switches(policy_for(pipeline.facts))
    with switches, held_once(pipeline, PART, partial(_read, build, entries, dtype), needed, progress) as network:
        progress.step(0, 1, STAGE)
        high = transfer.to_host_fp32(network(transfer.to_device(low)))
    progress.step(1, 1, STAGE)
    return high


def _read(build: Build, entries: Entries, dtype: torch.dtype, progress: Progress) -> nn.Module:
    """The network of ``build`` with its tensors from ``entries``; raises CheckpointError where one is missing."""
    with torch.inference_mode(False), torch.no_grad():
        file = next(iter(entries.values())).file
        with construction("latent upscaler", file, len(entries), progress.check), empty_weights():
            network = build()
        if missing := sorted(network.state_dict().keys() - entries.keys()):
            found = f"no tensors {listed(missing)} in a latent upscaler"
            raise CheckpointError(found, expected="a complete file", fix="Download this file again.")
        wanted = {name: entries[name] for name in network.state_dict()}
        network.load_state_dict(read_tensors(wanted, dtype, lambda _: progress.check()), assign=True)
        return network.eval().requires_grad_(False)
