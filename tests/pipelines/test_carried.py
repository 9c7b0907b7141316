"""Each input that decides a result is in the receipt or job of it, or excused here with the reason."""

import json
import typing
from dataclasses import fields
from typing import Any

import pytest
from anygpu.compat.records import WITHOUT
from anygpu.paint.jobs import PaintJob
from anygpu.pipelines.records.job import PLACES, VideoJob
from anygpu.pipelines.requests import LOAD_INPUTS
from schemas import SNAPSHOT
from test_web import translated

NODES = json.loads(SNAPSHOT.read_text(encoding="utf-8"))
INPUTS = {name: {item["name"] for item in node["inputs"]} for name, node in NODES.items()}
LOADED = {"model", "base", "image_encoder", "task"} | (LOAD_INPUTS.keys() - set(PLACES))
CARRIED: dict[str, tuple[Any, ...]] = {  # node -> names, or the kind of job and its fields that hold inputs of the node
    "AnyGPULoadPipeline": (LOADED,),
    "AnyGPUComposePipeline": (LOADED | {"transformer", "vae", "text_encoder", "text_encoder_2"},),  # VideoJob.files
    "AnyGPULoRA": (VideoJob, "loras"),
    "AnyGPUStepCache": ({"preset"}, VideoJob, "step_cache.settings"),
    "AnyGPUEncodePrompt": (VideoJob, "prompt"),
    "AnyGPUEncodeImage": ({"fit"}, VideoJob, "pictures"),
    "AnyGPUEncodeVideo": (),
    "AnyGPUSample": (VideoJob, "settings"),
    "AnyGPUSampleFramePack": (VideoJob, "settings", "framepack"),
    "AnyGPUDecode": ({"decode_timestep", "decode_noise_scale"}, VideoJob, "decode"),
    "AnyGPULoadPaintPipeline": ({"model", "precision", "image_encoder", "variant", "weights", "vae"},),
    "AnyGPULoadMVAdapter": ({"model", "precision", "adapter", "lora", "lora_strength", "variant", "vae"},),
    "AnyGPUDelightImage": (PaintJob, "delighting"),
    "AnyGPUPaintViews": (PaintJob, "paint"),
    "AnyGPUTextureMesh": ({"mesh", "delight", "max_views", "negative_prompt"}, PaintJob, "paint", "texture"),
}
RENAMED = {"section_prompts": "sections", "tile_size": "tile", "tile_overlap": "overlap", "frames_per_chunk": "frames"}
RENAMED |= {"start_percent": "start", "end_percent": "end", "cache_device": "device", "lora": "file"}
RENAMED |= {"view_size": "size", "sigma_schedule": "spacing"}
SOCKETS = ("pipeline", "prompt", "negative", "image", "images", "latent", "previous", "clip_vision_output", "mask")
EXCUSED = {  # input of any node -> why a replay does not need it
    **dict.fromkeys((*SOCKETS, "normals", "positions", "cameras"), "another node's, carried there or named as missing"),
    **dict.fromkeys(PLACES, "says where and how fast, not what"),
    "profile": "writes a trace alone",
    "batch_size": "each video has a receipt of its own, with its seed",
    "dynamo_cache_size_limit": "says how fast, not what",
}
MISSING = "its latents are named as missing"
OWN_EXCUSES: dict[str, dict[str, str]] = {
    "AnyGPUEncodeImage": {"width": "as of the sampling", "height": "as of the sampling"},
    "AnyGPUEncodeVideo": dict.fromkeys(("width", "height", "fit", "seed"), MISSING),
    "AnyGPUDecode": {"fps": "the rate of the file, not a pixel of it"},
    "AnyGPULoadMVAdapter": dict.fromkeys(("core_model", "core_clip", "core_vae"), "named as missing"),
    "AnyGPUPaintViews": {"negative_prompt": "carried from AnyGPU Texture Mesh"},
    "AnyGPUDelightImage": {"recenter": "of the picture: a job has it as it is"},
}


def names(job: type, path: str) -> set[str]:
    """The fields that a record has of what the field ``path`` of a job holds."""
    first, _, rest = path.partition(".")
    hint, without = typing.get_type_hints(job)[first], {item.name: item for item in fields(job)}[first].metadata
    inner = next((kind for kind in typing.get_args(hint) if kind not in (type(None), ...)), hint)
    return names(inner, rest) if rest else {item.name for item in fields(inner)} - set(without.get(WITHOUT, ()))


@pytest.mark.parametrize("node_id", CARRIED)
def test_each_input_is_carried_or_excused(node_id: str) -> None:
    known, job = EXCUSED.keys() | OWN_EXCUSES.get(node_id, {}).keys(), VideoJob
    for entry in CARRIED[node_id]:
        job = entry if isinstance(entry, type) else job
        known |= entry if isinstance(entry, set) else names(job, entry) if isinstance(entry, str) else set()
    left = {name for name in INPUTS[node_id] if RENAMED.get(name, name) not in known and name not in known}
    assert not left, f"give {left} a field in the job, or say in OWN_EXCUSES why a replay does not need it"


def test_every_input_is_seen_and_no_excuse_is_left() -> None:
    assert {name: set(node["inputs"]) for name, node in translated("zh").items() if node.get("inputs")} == INPUTS
    for node_id, excused in OWN_EXCUSES.items():
        assert excused.keys() <= INPUTS[node_id], node_id
