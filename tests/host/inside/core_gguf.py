"""Scenes about ComfyUI-GGUF, another pack, beside ours: its loader node reads a file, our node fits what it made."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import comfy.model_management as management
import folder_paths
import gguf
import torch
from anygpu.host.core import model as core_model
from anygpu.host.core.ownership import is_linear

from host.inside.core_fit import PEAK, lora_on, traces, turing
from host.inside.core_tiny import CASES, WAN, error, louder, made, output
from host.inside.sight import state

NAME, PACK = "Wan 2.1 as its file tells", "comfyui_gguf"
DETECTED = {"dim": 256, "num_heads": 2, "ffn_dim": 256, "freq_dim": 256, "text_dim": 4096, "text_len": 512}
CASES[NAME] = replace(CASES["Wan 2.1"], config={**WAN, **DETECTED}, width=DETECTED["text_dim"])


def loader(checkout: str) -> Any:
    """The node that loads a MODEL, of the pack in ``checkout``, imported as ComfyUI imports it."""
    if PACK not in sys.modules:
        place = Path(checkout, "__init__.py")
        spec = importlib.util.spec_from_file_location(PACK, place, submodule_search_locations=[checkout])
        assert spec is not None and spec.loader is not None
        sys.modules[PACK] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[PACK])
    return sys.modules[PACK].NODE_CLASS_MAPPINGS["UnetLoaderGGUF"]()


def write(path: Path, weights: dict[str, torch.Tensor], kind: str) -> None:
    """Weights as its own tool writes them: matrices packed, all else in fp32, five axes as two and their sizes."""
    writer, packed = gguf.GGUFWriter(str(path), "wan"), gguf.GGMLQuantizationType[kind]
    for name, tensor in weights.items():
        values = tensor.float()
        if values.ndim > 4:
            writer.add_array(f"comfy.gguf.orig_shape.{name}", list(values.shape))
            values = values.flatten(1)
        rows = values.contiguous().numpy()
        if values.ndim == 2 and tensor.ndim == 2 and name.endswith("weight"):
            writer.add_tensor(name, gguf.quantize(rows, packed), raw_dtype=packed)
        else:
            writer.add_tensor(name, rows)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def fitted(checkout: str, folder: str, kind: str) -> dict[str, Any]:
    """Errors against that pack's own fp32 of plain fp16 and of the fitted model, also with a LoRA of core's on it."""
    path, source = Path(folder, f"{kind}.gguf"), made(NAME)
    louder(source, NAME, PEAK)
    write(path, source.model.diffusion_model.state_dict(), kind)
    neither = {"should_use_fp16": lambda *_, **__: False, "should_use_bf16": lambda *_, **__: False}
    with mock.patch.object(folder_paths, "get_full_path", lambda *_: str(path)), state(**neither):
        (model,) = loader(checkout).load_unet(path.name)
    network, machine = model.model.diffusion_model, turing(management.get_torch_device())
    leaves = [leaf for leaf in network.modules() if is_linear(leaf)]
    expected, adapted = output(model, NAME), lora_on(model, NAME)
    plain = model.clone()
    plain.set_model_compute_dtype(torch.float16)
    broken = output(plain, NAME)
    safe, decisions = core_model.fit_model(model, keep_latents="never", machine=machine)
    found = output(safe, NAME)
    with_lora = output(adapted, NAME)
    both, _ = core_model.fit_model(adapted, keep_latents="never", machine=machine)
    found_with_lora = output(both, NAME)
    return {
        "theirs": sum(type(leaf).__module__.startswith(PACK) and leaf.is_ggml_quantized() for leaf in leaves),
        "patcher": type(safe).__name__,
        "plain": error(broken, expected),
        "safe": error(found, expected),
        "lora": error(found_with_lora, with_lora),
        "acts": error(with_lora, expected),
        "restored": torch.equal(output(model, NAME), expected),
        "traces": traces(network),
        "said": [str(decision) for decision in decisions],
    }
