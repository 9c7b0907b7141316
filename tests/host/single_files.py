"""Tiny single files under the names that the templates from files have, each in the folder that they give it."""

import json
from pathlib import Path
from typing import Any

import layouts

from .prompts import WORKFLOWS, Prompt
from .server import Server

COMPOSE = "AnyGPUComposePipeline"
MODELS = {  # template: the tiny checkpoint, and the model that has its tokenizers
    "anygpu_ltx_text_to_video_from_files": ("ltx", "LTX-Video"),
    "anygpu_ltx_two_passes": ("ltx_condition", "LTX-Video-0.9.5"),
    "anygpu_hunyuan_video_text_to_video_from_files": ("hunyuan_video", "HunyuanVideo"),
    "anygpu_hunyuan_video_15_text_to_video_from_files": ("hunyuan_video_15", "HunyuanVideo-1.5-Diffusers-480p_t2v"),
    "anygpu_framepack_image_to_video_from_files": ("framepack", "HunyuanVideo"),
    "anygpu_mochi_text_to_video_from_files": ("mochi", "mochi-1-preview"),
}


def install(server: Server, prompt: Prompt, workflow: str) -> None:
    """Write the files of a template, and have the tokenizers of the tiny models read: ComfyUI's know more words."""
    if workflow not in MODELS:
        return
    model, base = MODELS[workflow]
    (loader,) = (node for node in prompt.values() if node["class_type"] == COMPOSE)
    loader["inputs"]["base"] = server.model(base)
    made = layouts.whole_set(model, server.tiny_folder, server.base / "single" / model)
    if model.startswith("ltx"):  # whose published file has the VAE in it
        _place(made["vae"], server.base / "models" / "vae" / "ltx_vae.safetensors")
    for part, (name, directory) in named(WORKFLOWS / f"{workflow}.json").items():
        _place(made[part], server.base / "models" / directory / name)


def named(workflow: Path) -> dict[str, tuple[str, str]]:
    """Input of AnyGPU Compose Pipeline -> the name of its file and the folder that it goes into."""
    nodes: list[dict[str, Any]] = json.loads(workflow.read_text(encoding="utf-8"))["nodes"]
    (loader,) = (node for node in nodes if node["type"] == COMPOSE)
    folders = {model["name"]: model["directory"] for model in loader["properties"]["models"]}
    values = loader["widgets_values_named"]
    return {part: (name, folders[name]) for part, name in values.items() if name in folders}


def _place(made: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    for suffix in (".safetensors", ".json"):  # the second says its sizes, which are not published ones
        target.with_suffix(suffix).write_bytes(made.with_suffix(suffix).read_bytes())
