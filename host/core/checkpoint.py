"""Core's MODEL, CLIP and VAE as the one checkpoint that they would be saved as, for networks of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import comfy.model_sampling as sampling
import torch

from ...compat.checkpoints.headers import STORED
from ...compat.errors import InputError
from ...paint.networks.stable_diffusion import EDM, UNET, V_PREDICTED, VAE
from ...paint.networks.weights import Weights, weights_in
from ..diffusion_model import NETWORK
from ..memory_manager import PartPatcher
from .ownership import left_class
from .weights import is_plain, name_of, patched_weight, tensors_of

CLIPS = ({"clip_l", "clip_g"}, {"clip_h"})  # of SDXL and of SD2.1


def checkpoint_of(core_model: Any, core_clip: Any, core_vae: Any) -> Weights | None:
    """The weights that core has loaded, with its LoRAs, as in a checkpoint file and read on demand; None where nothing
    is connected. InputError where one of the three is missing, AnyGPU's own, of another model, or packed."""
    given = {"core_model": core_model, "core_clip": core_clip, "core_vae": core_vae}
    missing = [name for name, each in given.items() if each is None]
    if len(missing) == len(given):
        return None
    if missing:
        raise _unusable(f"no {' and no '.join(missing)}")
    places, shapes, total = dict[str, tuple[Any, str]](), dict[str, tuple[int, ...]](), 0
    for name, prefix, own in (("core_model", UNET, NETWORK), ("core_clip", "", ""), ("core_vae", VAE, "")):
        patcher = getattr(given[name], "patcher", given[name])
        _require_plain(name, patcher)
        for each, _, tensor in tensors_of(patcher.model):
            if each.startswith(own):
                key = prefix + each.removeprefix(own)
                places[key], shapes[key], total = (patcher, each), tuple(tensor.shape), total + tensor.nbytes
    encoders = {name.partition(".")[0] for name, (patcher, _) in places.items() if patcher is core_clip.patcher}
    if encoders not in CLIPS:
        raise _unusable(f"core_clip with {', '.join(sorted(encoders))}")
    shapes |= _prediction_mark(core_model)
    file = _file_of([getattr(each, "patcher", each) for each in given.values()])
    path, held = Path(name_of(core_model)), lambda name: patched_weight(*places[name])
    return Weights(path, shapes, None, total, held=held, file=file)


def _file_of(patchers: list[Any]) -> Path | None:
    """The file that holds just the values of these patchers; None for several files, patches or other dtypes."""
    files = {name_of(each) for each in patchers}
    file = Path(files.pop())
    patched = any(each.patches or "model_sampling" in each.object_patches for each in patchers)
    if files or patched or file.suffix != ".safetensors" or not file.is_file():
        return None
    stored = {STORED[entry.dtype] for entry in (weights_in(file, "checkpoint").entries or {}).values()}
    held = {tensor.dtype for each in patchers for tensor in each.model.parameters()} - {torch.float32}
    return file if not held or stored - {torch.int64} == held else None


def _require_plain(name: str, patcher: Any) -> None:
    """InputError for AnyGPU's own network, packed weights and other packs' layers."""
    if isinstance(patcher, PartPatcher):
        raise _unusable(f"AnyGPU's own network as {name}")
    packed = (type(tensor.data).__name__ for tensor in patcher.model.parameters() if not is_plain(tensor))
    wrong = next(packed, "") or next(filter(None, map(left_class, patcher.model.modules())), "")
    if wrong:
        raise _unusable(f"{name} with packed weights or another pack's ({wrong})", "Load a file in fp16, bf16 or fp32.")


def _prediction_mark(model: Any) -> dict[str, tuple[int, ...]]:
    """The empty tensor that marks EDM or velocities in a file, name -> shape; none for noise, InputError for others."""
    predicts = model.get_model_object("model_sampling")
    if isinstance(predicts, sampling.X0) or not isinstance(predicts, sampling.EPS):
        raise _unusable(f"core's {type(model.model).__name__}, which predicts neither noise nor velocities")
    if isinstance(predicts, (sampling.EDM, sampling.ModelSamplingContinuousEDM)):  # EDM is a V_PREDICTION too
        return {EDM: ()}
    return {V_PREDICTED: ()} if isinstance(predicts, sampling.V_PREDICTION) else {}


def _unusable(found: str, fix: str = "Connect all three of Load Checkpoint, or none.") -> InputError:
    return InputError(found, expected="core's MODEL, CLIP and VAE of Stable Diffusion XL or 2.1", fix=fix)
