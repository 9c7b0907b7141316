"""Inputs of the load nodes to their requests, with ComfyUI's folders and device: the nodes' way and the side bar's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import folder_paths

from ..compat.decision import AUTO
from ..compat.errors import PackError
from ..paint import choices as paint_models
from ..paint.choices import CACHE_LIMIT
from ..pipelines.base import Silent
from ..pipelines.files.models import part_folders
from ..pipelines.files.single_file import Files
from ..pipelines.requests import LOAD_INPUTS, LoadRequest, load_request
from . import folders, memory_manager, model_files

if TYPE_CHECKING:  # painting is read when it is used, not at ComfyUI's start
    from ..paint.adapter_loading import AdapterRequest
    from ..paint.loading import PaintRequest
    from ..paint.networks.weights import Weights
    from ..pipelines.records.places import Machine

TASKS = (AUTO, "text", "image")
FILES = {"transformer": folders.NO_FILE}
FILES |= dict.fromkeys(("vae", "text_encoder", "text_encoder_2", "image_encoder"), AUTO)
SHARED = {name: row.default for name, row in LOAD_INPUTS.items()}  # inputs of load nodes with their defaults
FOLDER_INPUTS = {"model": folders.NO_MODEL, "base": AUTO, "image_encoder": AUTO, **SHARED}
FILE_INPUTS = {**FILES, "base": AUTO, "task": AUTO, **SHARED}
PAINT_CHOICES = ("variant", "weights", "precision", "offload", "attention")
PAINT_INPUTS = {"model": folders.NO_PAINT_MODEL, **dict.fromkeys(("vae", "image_encoder", *PAINT_CHOICES), AUTO)}
PAINT_INPUTS |= {"compile": False, "dynamo_cache_size_limit": CACHE_LIMIT}
ADAPTER_CHOICES = ("variant", "precision", "offload", "attention")
ADAPTER_INPUTS = {"model": folders.NO_MODEL, "adapter": folders.NO_ADAPTER, "lora": folders.NONE, "lora_strength": 1.0}
ADAPTER_INPUTS |= {**dict.fromkeys(("vae", *ADAPTER_CHOICES), AUTO), "compile": False}
CORE_INPUTS = ("core_model", "core_clip", "core_vae")
Inputs = Mapping[str, Any]


def folder_request(inputs: Inputs, trace: Path | None = None, **machine: Any) -> LoadRequest:
    """The request of AnyGPU Load Pipeline from the values of :data:`FOLDER_INPUTS`; ``trace`` is a file for a profile,
    ``machine`` has arguments of the request in place of ComfyUI's device and our state folder."""
    given = {**FOLDER_INPUTS, **inputs}
    instead = folders.stand_in_for(given["model"])
    return load_request(
        given,
        trace,
        model=folders.model_folder(instead or given["model"]),
        stands_in_for=given["model"] if instead else "",
        base=folders.provider_folder(given["base"]),
        image_encoder=folders.provider_folder(given["image_encoder"]),
        search=tuple(folders.roots((*folders.MODEL_KEYS, *folders.ENCODER_KEYS))),
        cards=memory_manager.cards(),
        **_device_and_state(machine),
    )


def used_folders(model: str | None, base: str | None, image_encoder: str | None) -> list[Path]:
    """The folders that AnyGPU Load Pipeline reads for these names; empty where one is missing: the run explains it."""
    if None in (model, base, image_encoder):  # ComfyUI gives None for a linked input
        return []
    try:
        request = folder_request({"model": model, "base": base, "image_encoder": image_encoder})
        given = {"base": request.base, "image_encoder": request.image_encoder}
        return [request.model, *part_folders(request.model, given, request.search, Silent())[1].values()]
    except PackError:
        return []


def files_request(inputs: Inputs, trace: Path | None = None, **machine: Any) -> LoadRequest:
    """The request of AnyGPU Compose Pipeline from values of :data:`FILE_INPUTS`; else as :func:`folder_request`."""
    given = {**FILE_INPUTS, **inputs}
    files = model_files.chosen_files(given["task"], **{name: given[name] for name in FILES})
    base = folders.provider_folder(given["base"])
    model = files.parts["transformer"]
    cards = memory_manager.cards()
    return load_request(given, trace, model=model, files=files, base=base, cards=cards, **_device_and_state(machine))


def paint_request(inputs: Inputs, **machine: Any) -> PaintRequest:
    """The request of AnyGPU Load Paint Pipeline by :data:`PAINT_INPUTS`; a demo model takes no other vae or encoder."""
    from ..paint.loading import PaintRequest, settings_for

    given = {**PAINT_INPUTS, **inputs}
    instead = folders.paint_stand_in(given["model"])
    others = {} if instead else {name: folders.paint_provider_folder(given[name]) for name in ("vae", "image_encoder")}
    return PaintRequest(
        folders.paint_path(instead or given["model"]),
        stands_in_for=given["model"] if instead else "",
        compiled=settings_for(given["dynamo_cache_size_limit"]) if given["compile"] else None,
        **others,
        **{name: given[name] for name in PAINT_CHOICES},
        **_device_and_state(machine),
    )


def adapter_request(inputs: Inputs, loaded: Weights | None = None, **machine: Any) -> AdapterRequest:
    """The request of AnyGPU Load MV-Adapter; weights that core has ``loaded`` replace its model and vae inputs."""
    from ..paint.adapter_loading import AdapterRequest
    from ..paint.loading import settings_for

    given = {**ADAPTER_INPUTS, **inputs}
    instead = folders.adapter_stand_in(given["adapter"]) if loaded is None else None
    model, adapter = instead or (given["model"], given["adapter"])
    return AdapterRequest(
        folders.base_path(model) if loaded is None else loaded,
        folders.adapter_path(adapter),
        stands_in_for=given["adapter"] if instead else "",
        tokenizer=model_files.tokenizers().get("clip_l"),
        vae=None if loaded is not None else folders.paint_provider_folder(given["vae"]),
        lora=None if given["lora"] == folders.NONE else folders.lora_file(given["lora"]),
        lora_strength=given["lora_strength"],
        compiled=settings_for(CACHE_LIMIT) if given["compile"] else None,
        **{name: given[name] for name in ADAPTER_CHOICES},
        **_device_and_state(machine),
    )


def machine_of(folder: Path) -> Machine:
    """This machine for replays: models of ComfyUI's folders; pictures of its inputs, its outputs and ``folder``."""
    from ..pipelines.demo import MODELS
    from ..pipelines.records.places import Machine, Places
    from .meshes import enlarged

    keys = (*folders.BASE_KEYS, *folders.ADAPTER_KEYS, *folders.PAINT_PROVIDER_KEYS, *folders.LORA_KEYS)
    keys = (*folders.MODEL_KEYS, *folders.ENCODER_KEYS, *keys, *folders.UPSCALER_KEYS)
    models = (*folders.roots((*keys, *sum(model_files.KEYS.values(), ()))), paint_models.MODELS, MODELS)
    state = folders.state_folder()
    inputs, outputs = Path(folder_paths.get_input_directory()), Path(folder_paths.get_output_directory())
    pictures = (folder, inputs, inputs / "pasted", inputs / "clipspace", outputs)  # where the frontend keeps pictures
    return Machine(
        places=Places(models, tuple(dict.fromkeys(pictures)), state=state),
        state=state,
        device=memory_manager.compute_device(),
        cards=memory_manager.cards(),
        host={"make_room": memory_manager.make_room, "hosted": memory_manager.offloader_on},
        single=Files({}, model_files.offered(), AUTO, model_files.tokenizers()),
        enlarged=enlarged,
    )


def _device_and_state(machine: Inputs) -> dict[str, Any]:
    return {"device": memory_manager.compute_device(), "state": folders.state_folder(), **machine}
