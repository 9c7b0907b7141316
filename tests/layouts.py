"""Tiny checkpoints written the way other releases write theirs: the key tables read backwards."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tiny
import torch
from anygpu.compat.checkpoints.packed import Stored
from anygpu.pipelines.files.formats import layouts
from anygpu.pipelines.keys import Layout, Row
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

FP8, SCALE = torch.float8_e4m3fn, 0.25
ORIGINAL = "as released or as ComfyUI saves it"
RELEASES = {  # family to the layout in which its transformer is published
    "ltx": "LTX-Video as released",
    "mochi": "Mochi 1 as released",
    "hunyuan_video": "HunyuanVideo as released or as ComfyUI saves it",
    "hunyuan_video_15": "HunyuanVideo 1.5 as released or as ComfyUI saves it",
    "framepack": "FramePack",
}


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """The tensors of a part's folder, shards joined."""
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def is_packed(module: nn.Module) -> bool:
    """True where any layer of ``module`` is packed."""
    return any(isinstance(owner, Stored) for owner in module.modules())


def layout(name: str) -> Layout:
    return next(layout for layout in layouts() if layout.name == name)


def released(tensors: Mapping[str, Tensor], release: Layout, way: int = 0) -> dict[str, Tensor]:
    """``tensors`` of a model under the names of a release; ``way`` chooses among those it has for one tensor."""
    rows = release.rows if isinstance(release.rows, tuple) else release.rows(_hint(tensors))
    pieces: dict[str, dict[int, tuple[Row, Tensor]]] = {}
    for name, tensor in tensors.items():
        source, index, row = _source(name, rows, way)
        pieces.setdefault(source, {})[index] = (row, tensor)
    found = {}
    for source, group in pieces.items():
        row = group[0][0]
        whole = torch.cat([group[index][1] for index in sorted(group)]) if len(group) > 1 else group[0][1]
        if row.swapped:
            whole = torch.cat(whole.chunk(2)[::-1])
        if row.heads:
            whole = whole.view(row.heads, 2, -1, *whole.shape[1:]).transpose(1, 2).reshape(whole.shape)
        if row.flat and whole.ndim == 2:
            whole = whole[..., None, None, None]
        for old, new in release.words:
            source = source.replace(new, old)
        found[source] = whole.contiguous()
    return found


def write(path: Path, tensors: Mapping[str, Tensor], config: Mapping[str, object], prefix: str = "") -> Path:
    """A single file, and beside it the configuration of its tiny model."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({prefix + name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    path.with_suffix(".json").write_text(json.dumps(config))
    return path


def wide(name: str, tensor: Tensor) -> bool:
    """Whether a release keeps a tensor in 8 bits or fewer: matrices whose rows fill blocks."""
    return tensor.ndim == 2 and name.endswith("weight") and tensor.shape[1] % 32 == 0


def scaled_fp8(path: Path, tensors: Mapping[str, Tensor], way: str) -> dict[str, Tensor]:
    """A scaled fp8 file of ``tensors``; returns what its weights are worth."""
    stored, worth = {}, dict(tensors)
    for name, tensor in tensors.items():
        if not wide(name, tensor):
            stored[name] = tensor
            continue
        rows = torch.full((tensor.shape[0], 1), SCALE) if way == "rows" else torch.tensor(SCALE)
        stored[name] = (tensor / SCALE).to(FP8)
        worth[name] = stored[name].float() * SCALE
        if way != "plain":
            stored[name.removesuffix("weight") + ("scale_weight" if way == "old" else "weight_scale")] = rows
        else:
            stored[name], worth[name] = tensor.to(FP8), tensor.to(FP8).float()
        if way == "old":
            stored[name.removesuffix("weight") + "scale_input"] = torch.tensor(1.0)
    if way == "old":
        stored["scaled_fp8"] = torch.zeros(2, dtype=FP8)
    if way == "rows":
        for name in [name for name in stored if name.endswith("weight_scale")]:
            mark = b'{"format": "float8_e4m3fn"}'
            stored[name.replace("weight_scale", "comfy_quant")] = torch.tensor(list(mark), dtype=torch.uint8)
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, path)
    return worth


def gguf_file(
    path: Path, tensors: Mapping[str, Tensor], codec: str, packed: Any = wide, arch: str = "tiny"
) -> dict[str, Tensor]:
    """A GGUF file of ``tensors``, those ``packed`` in blocks of ``codec``; returns what its weights are worth."""
    import gguf

    kind, worth = gguf.GGMLQuantizationType[codec], dict(tensors)
    writer = gguf.GGUFWriter(str(path), arch)
    for name, tensor in tensors.items():
        if packed(name, tensor):
            blocks = gguf.quants.quantize(tensor.numpy(), kind)
            writer.add_tensor(name, blocks, raw_dtype=kind)
            worth[name] = torch.from_numpy(gguf.quants.dequantize(blocks, kind))
        elif tensor.ndim > 4:
            writer.add_array(f"comfy.gguf.orig_shape.{name}", list(tensor.shape))
            writer.add_tensor(name, tensor.flatten(1).numpy())
        else:
            writer.add_tensor(name, tensor.numpy() if tensor.ndim else tensor.view(1).numpy())
    writer.add_array("tokenizer.tokens", ["a", "b"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return worth


def config_in(folder: Path) -> dict[str, object]:
    return json.loads((folder / "config.json").read_text())


def encoder(kind: str, folder: Path, path: Path) -> Path:
    """A tiny encoder as one file in the names of its publication."""
    tensors = tensors_of(folder)
    named = {
        "llama": lambda name: f"model.{name}",
        "qwen2_5_vl": lambda name: f"model.{name}",
        "clip_l": lambda name: f"text_model.{name}",
        "siglip": lambda name: f"vision_model.{name}",
        "t5": lambda name: name,
    }[kind]
    extra = {
        "llama": {"lm_head.weight": torch.zeros(2, 2)},
        "qwen2_5_vl": {"visual.blocks.0.attn.qkv.weight": torch.zeros(2, 2), "lm_head.weight": torch.zeros(2, 2)},
        "clip_l": {"logit_scale": torch.zeros(1), "text_model.embeddings.position_ids": torch.zeros(1, 77)},
        "siglip": {},
        "t5": {"encoder.embed_tokens.weight": torch.zeros(2, 2)},
    }[kind]
    return write(path, {named(name): t for name, t in tensors.items()} | extra, config_in(folder))


def whole_set(model: str, tiny_folder: Path, made: Path) -> dict[str, Path]:
    """Every part of a tiny checkpoint as a single file in the names of its release."""
    if model == "framepack":  # its transformer alone is its own, published in diffusers' names
        folder, files = tiny.build(model, tiny_folder), whole_set("hunyuan_video", tiny_folder, made)
        files["transformer"] = write(made / "transformer.safetensors", tensors_of(folder), config_in(folder))
        siglip = tiny.build("siglip", tiny_folder) / "image_encoder"
        return files | {"image_encoder": encoder("siglip", siglip, made / "image_encoder.safetensors")}
    folder = tiny.build(model, tiny_folder)
    kinds_of = {
        "hunyuan_video": {"text_encoder": "llama", "text_encoder_2": "clip_l"},
        "hunyuan_video_15": {"text_encoder": "qwen2_5_vl", "text_encoder_2": "t5"},
        "hunyuan_video_15_i2v": {"text_encoder": "qwen2_5_vl", "text_encoder_2": "t5", "image_encoder": "siglip"},
        "mochi": {"text_encoder": "t5"},
        "ltx": {"text_encoder": "t5"},
        "ltx_condition": {"text_encoder": "t5"},
    }[model]
    names = {
        "hunyuan_video": (f"HunyuanVideo {ORIGINAL}", "the VAE of HunyuanVideo in Stable Diffusion's names"),
        "hunyuan_video_15": (f"HunyuanVideo 1.5 {ORIGINAL}", "the VAE of HunyuanVideo 1.5 as released"),
        "hunyuan_video_15_i2v": (f"HunyuanVideo 1.5 {ORIGINAL}", "the VAE of HunyuanVideo 1.5 as released"),
        "mochi": ("Mochi 1 as released", "the VAE of Mochi 1 as released"),
        "ltx": ("LTX-Video as released", "the VAE of LTX-Video 0.9.0 as released"),
        "ltx_condition": ("LTX-Video as released", "the VAE of LTX-Video 0.9.5 and later as released"),
    }[model]
    files = {}
    for part, release in zip(("transformer", "vae"), names, strict=True):
        tensors = released(tensors_of(folder / part), layout(release))
        files[part] = write(made / f"{part}.safetensors", tensors, config_in(folder / part))
    for part, kind in kinds_of.items():
        files[part] = encoder(kind, folder / part, made / f"{part}.safetensors")
    return files


def tools_only(model: str, tiny_folder: Path, made: Path) -> Path:
    """A folder with the tokenizers, the scheduler and the processors of a tiny checkpoint, and no weights."""
    base = made / "tools"
    base.mkdir()
    for folder in tiny.build(model, tiny_folder).iterdir():
        if folder.is_dir() and not any(folder.glob("*.safetensors")):
            (base / folder.name).symlink_to(folder, target_is_directory=True)
    return base


def _source(name: str, rows: tuple[Row, ...], way: int) -> tuple[str, int, Row]:
    """The name in the file, the place among the tensors that share it, and the row: the one that says most of it."""
    found = []
    for row in rows:
        targets = row.targets.split()
        for index, target in enumerate([*targets, *([row.last] if row.last else [])]):
            if not name.startswith(re.split(r"[#*]", target)[0]):
                continue
            pattern = re.escape(target).replace(r"\#", r"(\d+)").replace(r"\*", "(.+)")
            match = re.fullmatch(pattern, name)
            if match is not None:
                found.append((len(target), index % len(targets), row, match.groups()))
    assert found, f"no row gives {name}"
    _, index, row, groups = max(found, key=lambda item: item[0])
    sources, parts = row.source.split("|"), iter(groups)
    return re.sub(r"[#*]", lambda _: next(parts), sources[min(way, len(sources) - 1)]), index, row


def _hint(tensors: Mapping[str, Tensor]) -> list[str]:
    """Names by which a release's rules count its blocks, from those of the model."""
    ups = {int(m[1]) for n in tensors if (m := re.match(r"decoder\.up_blocks\.(\d+)\.", n))}
    downs = sorted({int(m[1]) for n in tensors if (m := re.match(r"encoder\.down_blocks\.(\d+)\.", n))})
    inner = len({m[1] for n in tensors if (m := re.match(r"encoder\.block_in\.resnets\.(\d+)\.", n))})
    mochi = [f"encoder.layers.{inner + 1 + index}.layers.0.weight" for index in downs] if inner else []
    return [f"decoder.up.{index}.x" for index in ups] + mochi + ["x.16.x"]
