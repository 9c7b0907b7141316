"""Scenes about what users ask for and cannot have, or change midway, under ComfyUI's memory manager."""

from typing import Any

import comfy.model_management as management
import torch
from anygpu.compat.errors import PackError
from anygpu.pipelines import stages
from anygpu.pipelines.base import Silent
from simulated import accelerator

from host.inside.device import bytes_on_device, encoded, loaded_for, rendered, sampled
from host.inside.memory import native, sampled_from


def refused(limit: int = 0, **chosen: Any) -> str:
    """What loading says to a device of ``limit`` bytes, or to a choice; empty where it loads. Nothing may be read."""
    name = "ltx"
    with accelerator.limit(limit or 1 << 40):
        try:
            pipeline = loaded_for(name, heavy=True, **chosen)
        except PackError as error:
            return str(error)
        assert not list(pipeline.parts), "a part was read"
    return ""


def offload_changed() -> dict[str, Any]:
    """Latents sampled under one offload and decoded under another, both ways; what stays on the device."""
    name = "mochi"
    hosted, expected = loaded_for(name), rendered(loaded_for(name), name)[1]
    latents, different = sampled(hosted, name), {}
    for mode in ("none", "group", "sequential", "model"):
        other = loaded_for(name, offload=mode)
        different[mode] = float((stages.decode(other, latents, Silent()) - expected).abs().max())
        back = stages.decode(hosted, sampled(other, name), Silent())
        different[f"{mode}, back"] = float((back - expected).abs().max())
        for part in list(other.parts):
            other.offloader.release(part)
    management.unload_all_models()
    return {"different": different, "left": bytes_on_device()}


def shared_part() -> dict[str, Any]:
    """Two pipelines with one transformer between them, in turn, evicted between, one of them given up."""
    name = "ltx"
    one = loaded_for(name, heavy=True)
    given = encoded(one, name)
    expected = sampled_from(one, name, given)
    management.unload_all_models()
    other = loaded_for(name, heavy=True)
    transformer = other.parts["transformer"] = one.parts.read("transformer")
    size = sum(tensor.nbytes for tensor in transformer.parameters())
    equal, held = [], []

    def run(pipeline: Any) -> None:
        equal.append(bool(torch.equal(sampled_from(pipeline, name, given), expected)))
        held.append(bytes_on_device() / size)

    for pipeline in (one, other, one):
        run(pipeline)
    with accelerator.limit(int(0.6 * size)):
        for pipeline in (other, one, other):
            run(pipeline)
    management.unload_all_models()
    run(one)
    del pipeline, other
    run(one)
    management.unload_all_models()
    return {"equal": equal, "held": held, "left": bytes_on_device(), "classes": native(one)}
