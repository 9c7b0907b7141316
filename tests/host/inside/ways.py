"""Scenes about other ways to share a device, inside ComfyUI: what each needs and moves for one LTX-Video run, twice.

Ours under ComfyUI's manager; whole modules moved by hand after everything else was unloaded, as other packs do; and
diffusers' own offload.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import comfy.model_management as management
import comfyui_version
import torch
from simulated import accelerator
from simulated.peers import WAYS, offloaded

from host.inside.device import SIDE, heavy_folder, loaded_for, rendered
from host.inside.whole import full_offloader

NAME, FRAMES = "ltx", 9
BY_HAND = "by hand"
CALL = {"width": SIDE, "height": SIDE, "num_frames": FRAMES, "num_inference_steps": 2, "guidance_scale": 2.0}
TOKENS = {"max_sequence_length": 256}
Run = Callable[[], torch.Tensor]


def compared(shares: list[float]) -> dict[str, Any]:
    """A row per way: bytes at the peak, to the device in the first and the second run, back, and kept afterwards."""
    pipeline = loaded_for(NAME, heavy=True)
    full, expected = full_offloader(pipeline, NAME), rendered(pipeline, NAME)[1]
    del pipeline
    rows = [*(_ours(share, full, expected) for share in shares), *(_bare(way, expected) for way in (BY_HAND, *WAYS))]
    return {"full": full, "torch": torch.__version__, "comfyui": comfyui_version.__version__, "rows": rows}


def _ours(share: float, full: int, expected: torch.Tensor) -> dict[str, Any]:
    pipeline = loaded_for(NAME, heavy=True)
    with accelerator.limit(int(share * full)):
        return _row(f"AnyGPU, comfyui, {share:.0%}", lambda: rendered(pipeline, NAME)[1], expected)


def _bare(way: str, expected: torch.Tensor) -> dict[str, Any]:
    from diffusers import LTXConditionPipeline, LTXPipeline

    device = management.get_torch_device()

    class Masked(LTXPipeline):
        """Diffusers', with the text under its mask, as the publisher has it."""

        _get_t5_prompt_embeds = LTXConditionPipeline._get_t5_prompt_embeds

    class Pipeline(Masked):
        """Told where it runs, as packs do that move parts by hand."""

        _execution_device = property(lambda self: device)

    kind = Pipeline if way == BY_HAND else Masked
    with torch.inference_mode(False):
        pipe = kind.from_pretrained(heavy_folder(NAME), local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    started: list[str] = []
    if way == BY_HAND:
        return _row("unload all, move whole parts", lambda: _by_hand(pipe, device), expected)
    texts = {"prompt": "a red fox", "negative_prompt": "blurry"}

    def run() -> torch.Tensor:
        if way not in started:
            offloaded(pipe, way, device)
            started.append(way)
        video = pipe(**texts, **CALL, **TOKENS, generator=_seeded(), output_type="pt").frames
        return video[0].movedim(1, -1)

    return _row(f"bare diffusers, {way}", run, expected)


def _by_hand(pipe: Any, device: torch.device) -> torch.Tensor:
    """One run in which each part is moved to the device before its stage and back after it."""

    @contextmanager
    def whole(part: str) -> Iterator[Any]:
        management.unload_all_models()
        yield getattr(pipe, part).to(device)
        getattr(pipe, part).to("cpu")
        management.soft_empty_cache()

    with whole("text_encoder"):
        embeds, mask, negative, negative_mask = pipe.encode_prompt("a red fox", "blurry", True, device=device, **TOKENS)
    texts = {
        "prompt_embeds": embeds,
        "prompt_attention_mask": mask,
        "negative_prompt_embeds": negative,
        "negative_prompt_attention_mask": negative_mask,
    }
    with whole("transformer"):
        packed = pipe(**texts, **CALL, generator=_seeded(), output_type="latent").frames
    with whole("vae") as vae:
        cells, frames = SIDE // pipe.vae_spatial_compression_ratio, (FRAMES - 1) // pipe.vae_temporal_compression_ratio
        latents = pipe._unpack_latents(packed, frames + 1, cells, cells)
        latents = pipe._denormalize_latents(latents, vae.latents_mean, vae.latents_std, vae.config.scaling_factor)
        video = pipe.video_processor.postprocess_video(vae.decode(latents, None, return_dict=False)[0], "pt")
    return video[0].movedim(1, -1)


def _row(way: str, run: Run, expected: torch.Tensor) -> dict[str, Any]:
    """What ``run`` costs, twice, with the largest difference to ``expected``."""
    gc.collect()
    before = accelerator.memory()
    accelerator.reset_peak()
    moved, different = [], []
    for _ in range(2):
        accelerator.reset_traffic()
        different.append(float((run().cpu() - expected).abs().max()))
        moved.append(accelerator.traffic())
    after = accelerator.memory()
    return {
        "way": way,
        "different": max(different),
        "peak_bytes": after.peak_bytes - before.allocated_bytes,
        "first_to_device_bytes": moved[0].to_device_bytes,
        "again_to_device_bytes": moved[1].to_device_bytes,
        "to_host_bytes": sum(traffic.to_host_bytes for traffic in moved),
        "kept_bytes": after.allocated_bytes - before.allocated_bytes,
        "known_bytes": sum(item.model.loaded_size() for item in management.current_loaded_models),
        "refusals": after.refusals - before.refusals,
    }


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)
