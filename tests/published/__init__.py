"""Published checkpoints without their weights: files with the real header and a hole where the tensors would be."""

import json
import math
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import torch
from anygpu.compat.checkpoints.headers import STORED
from anygpu.compat.device.facts import DeviceFacts
from anygpu.compat.memory.standalone import StandaloneOffloader
from anygpu.compat.packages import attribute
from anygpu.pipelines.files.evidence import CONFIGS
from anygpu.pipelines.files.single_file import CLASSES, Files
from anygpu.pipelines.load import folder as loading
from anygpu.pipelines.pipeline import Pipeline
from anygpu.pipelines.registry import FAMILIES
from anygpu.pipelines.vae import plan as decode_plan

Shapes = dict[str, tuple[int, ...]]
PREFIXES = {"clip_l": "text_model.", "siglip": "vision_model."}  # which transformers 5 does without
HOST_BYTES = 64 * 2**30
CARD = DeviceFacts(torch.device("cpu"), "cuda", "sm89", "cuda-sm80+", "a card that is not there", 24 * 2**30, "2.9.0")
FP8_PLAIN = ("F8_E4M3", "BF16")  # matrices and the rest


@lru_cache(maxsize=1)
def _recorded() -> dict[str, Any]:
    return json.loads(Path(__file__).with_name("shapes.json").read_text(encoding="utf-8"))


def shapes(name: str) -> Shapes:
    """Names and shapes of a model in ``shapes.json``, which `record.py` writes."""
    found: Shapes = {}
    for key, groups in _recorded()[name].items():
        for shape, spans in groups:
            numbers = [number for first, last in spans for number in range(first, last + 1)]
            names = [key.replace("#", str(number), 1) for number in numbers] or [key]
            found |= dict.fromkeys(names, tuple(shape))
    return found


def shapes_of_config(config: Mapping[str, Any], library: str = "diffusers") -> Shapes:
    """Names and shapes of a model of diffusers or transformers, built without memory."""
    from accelerate import init_empty_weights

    cls: Any = attribute(library, str(config["_class_name"]))
    with init_empty_weights():
        module = cls.from_config(dict(config)) if library == "diffusers" else cls(cls.config_class(**config))
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}


@lru_cache
def encoder(kind: str, index: int = 0) -> Shapes:
    """Names and shapes of a text or picture encoder, as it is published in transformers' names."""
    config = json.loads((CONFIGS / f"{kind}.json").read_text())[index]["config"]
    if kind == "llava_vision":
        whole = shapes_of_config({**config, "_class_name": CLASSES["llava"]}, "transformers")
        seen = {name: shape for name, shape in whole.items() if not name.startswith("language_model.")}
        return {re.sub(r"^vision_tower\.(vision_model\.)?", "vision_model.", name): seen[name] for name in seen}
    found, prefix = shapes_of_config({**config, "_class_name": CLASSES[kind]}, "transformers"), PREFIXES.get(kind, "")
    return {name if name.startswith(prefix) else prefix + name: shape for name, shape in found.items()}


@lru_cache
def vae(family: str, index: int = 0) -> Shapes:
    """Names and shapes of a family's VAE, in diffusers' names."""
    return shapes_of_config(json.loads((FAMILIES[family].folder / "vae.json").read_text())[index]["config"])


def sparse(path: Path, tensors: Mapping[str, tuple[int, ...]], dtype: Any = "BF16", metadata: Any = None) -> Path:
    """A safetensors file of these shapes whose tensors take no room on the disk.

    Args:
        dtype: safetensors' name of a dtype for all; two of them for matrices of blocks, and the rest. A third is a
            part of names whose matrices are of the rest.
        metadata: of the file; values that are not text become JSON.
    """
    header: dict[str, Any] = {}
    if metadata:
        header["__metadata__"] = {k: v if isinstance(v, str) else json.dumps(v) for k, v in metadata.items()}
    end = 0
    for name, shape in tensors.items():
        kind = dtype if isinstance(dtype, str) else dtype[not _is_narrow(name, shape, *dtype[2:])]
        size = STORED[kind].itemsize * math.prod(shape)
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return path


def _is_narrow(name: str, shape: tuple[int, ...], but: str = "\0") -> bool:
    return len(shape) == 2 and "blocks." in name and but not in name


def sparse_gguf(path: Path, tensors: Mapping[str, tuple[int, ...]], codec: str, title: str = "") -> Path:
    """A GGUF file of these shapes whose tensors take no room on the disk, as the published converter writes them.

    Args:
        title: the ``general.name`` in it.
        codec: of matrices whose rows it can hold; the rest is in 16 bits, flat where GGUF has too few axes.
    """
    import gguf

    path.parent.mkdir(parents=True, exist_ok=True)
    writer, end = gguf.GGUFWriter(str(path), "published"), 0
    if title:
        writer.add_name(title)
    for name, shape in tensors.items():
        block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[codec]]
        packs = len(shape) == 2 and not shape[1] % block
        kind = gguf.GGMLQuantizationType[codec if packs else "BF16"]
        total = math.prod(shape) // block * size if packs else 2 * math.prod(shape)
        if len(shape) > 4:
            writer.add_array(f"comfy.gguf.orig_shape.{name}", list(shape))
            shape = (math.prod(shape[:-3]), *shape[-3:])
        writer.add_tensor_info(name, list(shape), numpy.dtype("float32"), total, raw_dtype=kind)
        end += -(-total // writer.data_alignment) * writer.data_alignment
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    begin = -(-path.stat().st_size // writer.data_alignment) * writer.data_alignment
    with path.open("ab") as file:
        file.truncate(begin + end)
    return path


def under(prefix: str, tensors: Mapping[str, tuple[int, ...]]) -> Shapes:
    """``tensors`` with ``prefix`` before each name."""
    return {prefix + name: shape for name, shape in tensors.items()}


# Family, and its encoders: part to kind and configuration.
MODELS: dict[str, tuple[str, dict[str, tuple[str, int]]]] = {
    "ltx 2B": ("ltx", {"text_encoder": ("t5", 0)}),
    "ltx 2B 0.9.1": ("ltx", {"text_encoder": ("t5", 0)}),
    "ltx 2B 0.9.5": ("ltx", {"text_encoder": ("t5", 0)}),
    "ltx 13B": ("ltx", {"text_encoder": ("t5", 0)}),
    "hunyuan_video": ("hunyuan_video", {"text_encoder": ("llama", 0), "text_encoder_2": ("clip_l", 0)}),
    "hunyuan_video i2v": (
        "hunyuan_video",
        {"text_encoder": ("llama", 0), "text_encoder_2": ("clip_l", 0), "image_encoder": ("llava_vision", 0)},
    ),
    "skyreels i2v": ("hunyuan_video", {"text_encoder": ("llama", 0), "text_encoder_2": ("clip_l", 0)}),
    "hunyuan_video_15": (
        "hunyuan_video_15",
        {"text_encoder": ("qwen2_5_vl", 0), "text_encoder_2": ("t5", 1), "image_encoder": ("siglip", 0)},
    ),
    "framepack": (
        "framepack",
        {"text_encoder": ("llama", 0), "text_encoder_2": ("clip_l", 0), "image_encoder": ("siglip", 0)},
    ),
    "mochi": ("mochi", {"text_encoder": ("t5", 0)}),
}
VAES = {
    "ltx 2B 0.9.1": ("ltx", 1),
    "ltx 2B 0.9.5": ("ltx", 2),
    "ltx 13B": ("ltx", 2),
    "framepack": ("hunyuan_video", 0),
}  # where they are not the family's first


@contextmanager
def large_host() -> Iterator[None]:
    """A machine with :data:`HOST_BYTES` of memory, whatever this one has."""
    with (
        mock.patch.object(loading, "_host_room", lambda _: HOST_BYTES),
        mock.patch.object(decode_plan, "host_free_bytes", lambda: HOST_BYTES),
    ):
        yield


def composed(
    model: str,
    folder: Path,
    texts: bool = True,
    transformer: Path | None = None,
    write: Callable[[Path, Shapes], Path] = sparse,
    tokenizers: Mapping[str, Path] | None = None,
    **request: Any,
) -> Pipeline:
    """The pipeline of a published model as single files that have no weights; see :func:`large_host`.

    Args:
        texts: whether with its text encoders. transformer: another file than the plain one of these shapes.
        write: makes a file of such shapes. tokenizers: by kind; by default of no words.
        request: further terms of the load request, such as a device that is there.
    """
    family, encoders = MODELS[model]
    transformer = transformer or write(folder / f"{model}.safetensors", shapes(model))
    own_vae = vae(*VAES.get(model, (family, 0)))
    parts = {"transformer": transformer, "vae": write(folder / f"{model} vae.safetensors", own_vae)}
    for part, (kind, index) in encoders.items():
        if texts or not part.startswith("text"):
            parts[part] = write(folder / f"{kind}_{index}.safetensors", encoder(kind, index))
    if tokenizers is None:
        tokenizers = dict.fromkeys(FAMILIES[family].files.tokenizers.values(), folder / "tokenizers")
        (folder / "tokenizers").mkdir(exist_ok=True)
        (folder / "tokenizers" / "tokenizer.json").write_text("{}")
    files = Files(parts, tokenizers=tokenizers)
    return loading.load(loading.LoadRequest(transformer, files=files, **{"device": CARD, **request}))


def on_card(pipeline: Pipeline) -> Pipeline:
    """``pipeline`` as on a card that is not there: nothing can run, everything can be forecast."""
    offloader = StandaloneOffloader(pipeline.parts, torch.device("meta"), "group")
    return replace(pipeline, plan=replace(pipeline.plan, offloader=offloader))


def room_of(gigabytes: float) -> int:
    """Bytes free on a card of so many GB that also draws a screen: CUDA, driver and desktop take about a sixteenth."""
    return int(gigabytes * 2**30 * 15 / 16)
