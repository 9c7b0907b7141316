"""Scenes about whole runs of heavy pipelines where room is short: from the text to the frames, core's nodes between."""

from typing import Any

import comfy.model_management as management
import comfy.sd
import comfy.taesd.taesd
import comfy.utils
import torch
from anygpu.compat.device.execution import generator_for
from anygpu.host import core_models
from anygpu.pipelines import stages
from anygpu.pipelines.base import SampleSettings
from anygpu.pipelines.forecast.memory import forecast
from anygpu.pipelines.latents import convert as latent_format
from anygpu.pipelines.sampling.loop import noise_mask_for
from anygpu.pipelines.sizes import Size
from simulated import accelerator

from host.inside.core import SEED, SHAPES, USUAL_SHAPE, cores
from host.inside.device import CASES, bytes_on_device, encoded, loaded_for, sampled
from host.inside.memory import Said
from host.inside.sight import state


def core_vae() -> Any:
    """A VAE of core's own, TAESD with random weights: 9.8 MB."""
    generator = torch.Generator().manual_seed(11)
    with torch.inference_mode(False):
        shapes = comfy.taesd.taesd.TAESD().state_dict()  # core's layers leave their weights unset
        weights = {name: torch.randn(like.shape, generator=generator) * 0.05 for name, like in shapes.items()}
        return comfy.sd.VAE(sd=weights, dtype=torch.float32)


def core_decoded(vae: Any) -> torch.Tensor:
    """What core's VAE Decode makes of latents that do not change."""
    import nodes

    latents = torch.randn(1, 4, 4, 4, generator=torch.Generator().manual_seed(5))
    found: torch.Tensor = nodes.VAEDecode().decode(vae, {"samples": latents})[0]
    return found


def full_offloader(pipeline: Any, name: str) -> int:
    """Bytes of a run with every part on the device: all weights and the largest activations."""
    weights = sum(part.total for part in pipeline.weights.values())
    needs = forecast(pipeline, Size(64, 64, CASES[name][1], True, 2), "none").stages
    return weights + max(need.activations + need.ahead for need in needs)  # both texts at once


def interleaved(pipeline: Any, name: str, vae: Any) -> tuple[list[torch.Tensor], list[str]]:
    """Latents, core's picture, frames, and what was said: text and sampling, then core's VAE, then our decode."""
    progress = Said()
    latents = sampled(pipeline, name, progress)
    picture = core_decoded(vae)
    frames = stages.decode(pipeline, latents, progress)
    return [latents.samples, picture, frames], progress.lines


def at_shares(name: str, shares: list[float]) -> dict[str, Any]:
    """Whole runs under hard limits, as shares of the full offloader: results, peaks, traffic, refused allocations."""
    pipeline, vae = loaded_for(name, heavy=True), core_vae()
    expected, _ = interleaved(pipeline, name, vae)
    full = full_offloader(pipeline, name)
    found: dict[str, Any] = {
        "weights": sum(part.total for part in pipeline.weights.values()) / full,
        "core": vae.patcher.model_size() / full,
        "runs": [],
    }
    for share in shares:
        management.unload_all_models()
        accelerator.reset_peak()
        accelerator.reset_traffic()
        refused = accelerator.memory().refusals
        with accelerator.limit(int(share * full)):
            results, said = interleaved(pipeline, name, vae)
        found["runs"].append(
            {
                "share": share,
                "different": [float((a - b).abs().max()) for a, b in zip(results, expected, strict=True)],
                "peak": accelerator.memory().peak_bytes / full,
                "refusals": accelerator.memory().refusals - refused,
                "to_device": accelerator.traffic().to_device_bytes / full,
                "to_host": accelerator.traffic().to_host_bytes / full,
                "said": said,
            }
        )
    management.unload_all_models()
    found["left"] = bytes_on_device()
    return found


def core_streamed(name: str) -> dict[str, Any]:
    """Core's sampler and VAE node on a heavy pipeline with all of it resident, with 40 % of that, and with nothing.

    Differences are shares of the largest value: where room is short core calls the model once per prompt.
    """
    import nodes

    pipeline = loaded_for(name, heavy=True)
    model, vae = core_models.beside(pipeline)
    prompt, image = encoded(pipeline, name)
    conditionings = latent_format.conditionings(prompt)
    if image is not None:
        conditionings = tuple(core_models.pictured(cond, image) for cond in conditionings)
    noise = torch.randn(SHAPES.get(name, USUAL_SHAPE), generator=generator_for(SEED))

    def run() -> list[torch.Tensor]:
        samples = cores(model, *conditionings, noise)
        return [samples, *nodes.VAEDecode().decode(vae, {"samples": samples})]

    expected = run()
    management.unload_all_models()
    refused, found = accelerator.memory().refusals, {}
    with accelerator.limit(int(0.4 * full_offloader(pipeline, name))):
        found["40 %"] = run()
        resident = model.loaded_size() / model.model_size()
    management.unload_all_models()
    with state(vram_state=management.VRAMState.NO_VRAM):
        found["none"] = run()
    return {
        "different": {
            share: max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(results, expected, strict=True))
            for share, results in found.items()
        },
        "resident": resident,
        "refusals": accelerator.memory().refusals - refused,
    }


MOMENTS: dict[str, tuple[str, str, int]] = {  # stage -> part, operator, which of those that run while it is in use
    "text moves": ("text_encoder", "aten::copy_", 20),
    "text": ("text_encoder", "aten::*mm", 5),
    "sampling moves": ("transformer", "aten::copy_", 40),
    "first step": ("transformer", "aten::*mm", 3),
    "last step": ("transformer", "aten::*mm", -3),
    "decoding moves": ("vae", "aten::copy_", 5),
    "decoding": ("vae", "aten::convolution*", 3),
}


def starved(name: str) -> dict[str, Any]:
    """Memory runs out once at each moment of a run, which goes on by itself: what was said, how results differ."""
    pipeline, vae = loaded_for(name, heavy=True), core_vae()
    expected, _ = interleaved(pipeline, name, vae)
    found: dict[str, Any] = {}
    for moment, (part, pattern, which) in MOMENTS.items():
        management.unload_all_models()
        if which < 0:
            which += 1 + _operators(pipeline, name, part, pattern)
            management.unload_all_models()
        trap = Trap(pipeline, part, which)
        with accelerator.hook(pattern, before=trap):
            results, said = interleaved(pipeline, name, vae)
        found[moment] = {
            "sprung": trap.sprung,
            "said": said,
            "different": max(float((a - b).abs().max()) for a, b in zip(results, expected, strict=True)),
        }
    return found


class Trap:
    """Raises as a full device does before the ``which``-th operator that it sees while ``part`` is in use."""

    def __init__(self, pipeline: Any, part: str, which: int) -> None:
        self.pipeline, self.part, self.which, self.seen, self.sprung = pipeline, part, which, 0, False

    def __call__(self, _operator: str, _arguments: list[Any]) -> None:
        patcher = self.pipeline.offloader.patchers.get(self.part)
        if patcher is None or (patcher.beside is None and not _newest(patcher)):
            return
        self.seen += 1
        if self.seen == self.which:
            self.sprung = True
            raise torch.OutOfMemoryError("acc out of memory. Tried to allocate 2.00 MiB.")


def _newest(patcher: Any) -> bool:
    """Whether it is the model that ComfyUI loaded last."""
    listed = management.current_loaded_models
    return bool(listed) and listed[0].model is patcher


def _operators(pipeline: Any, name: str, part: str, pattern: str) -> int:
    """How many operators a whole run has while ``part`` is in use."""
    trap = Trap(pipeline, part, -1)
    with accelerator.hook(pattern, before=trap):
        sampled(pipeline, name)
    return trap.seen


def masked_beside_core(cell: int) -> list[list[float]]:
    """The middles (x, y in cells) of what a mask of a disc has drawn: ours, and as core resizes it."""
    rows, columns = (torch.arange(size) + 0.5 for size in (480, 704))
    disc = (((columns - 330) ** 2 + (rows[:, None] - 250) ** 2) < 90**2).float()[None]
    clean = torch.zeros(1, 16, 1, 480 // cell, 704 // cell)
    made = noise_mask_for(SampleSettings(704, 480, 1, noise_mask=disc[None, None]), clean, clean).mask
    cores = comfy.utils.reshape_mask(disc, clean.shape)
    middles = []
    for mask in (made[0, 0, 0], cores[0, 0, 0]):
        sums = (mask.sum(way) for way in (0, 1))
        middles.append([float((each * torch.arange(len(each))).sum() / mask.sum()) for each in sums])
    return middles
