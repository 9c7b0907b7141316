"""A checkpoint of Stable Diffusion XL or 2.1 under a paint family: one file, a folder as diffusers saves it, or weights
that the host program has loaded.

Configurations of a single file are read off its shapes; diffusers' own converters give its tensors diffusers' names."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ...compat.checkpoints.headers import TensorEntry, reading
from ...compat.checkpoints.weights import read_json
from ...compat.errors import CheckpointError
from ...compat.packages import imported
from ..choices import DEMOS, is_demo
from .weights import Weights, weights_in

INDEX, OF_DEMOS = "model_index.json", "_anygpu_parts_of"  # part to the demo model that ships it, and its name there
HEAD_WIDTH, TIME_WIDTH, SIZES = 64, 256, 6  # of an attention; of each of SDXL's six numbers of sizes
UNET, VAE = "model.diffusion_model.", "first_stage_model."
UNCLIP = (1536, 2048)  # widths of the picture that unCLIP's UNet is told of; the refiner's sizes and text have 2560
V_PREDICTED, EDM = "v_pred", "edm_"  # a tensor that marks a file of velocities; how those of EDM begin
LAYER = re.compile(r"\.(?:resblocks|layers)\.(\d+)\.")  # of a text encoder
TEXT = {  # part -> what its tensors may begin with; last as ComfyUI has them loaded
    "sdxl": {
        "text_encoder": ("conditioner.embedders.0.transformer.", "clip_l.transformer."),
        "text_encoder_2": ("conditioner.embedders.1.model.", "clip_g.transformer."),
    },
    "sd21": {"text_encoder": ("cond_stage_model.model.", "conditioner.embedders.0.model.", "clip_h.transformer.")},
}
SCALES = {"sdxl": 0.13025, "sd21": 0.18215}  # of the latents
VELOCITY_SPREAD = (  # comfy/supported_models.py, SD20: a model of velocities has more than 0.09 of it
    "model.diffusion_model.output_blocks.11.1.transformer_blocks.0.norm1.bias",
    0.09,
)
EPSILON, VELOCITY = "epsilon", "v_prediction"
WANTED = "a complete checkpoint of Stable Diffusion XL or 2.1"
Shapes = Mapping[str, tuple[int, ...]]
Convert = Callable[[dict[str, Tensor]], dict[str, Tensor]]


@dataclass(frozen=True, slots=True)
class BasePart:
    stored: Weights
    config: Mapping[str, Any]
    names: Mapping[str, str]  # in the file to in the module; a tensor that convert changes keeps that of the file
    convert: Convert  # from tensors of the file to those of the module
    shapes: Shapes  # of the module's tensors


@dataclass(frozen=True, slots=True)
class Base:
    kind: str  # sdxl or sd21
    prediction: str  # of its UNet, epsilon or v_prediction
    parts: Mapping[str, BasePart]  # unet, vae, text_encoder, of SDXL text_encoder_2


def base_in(place: Path | Weights, vae: Path | None = None) -> Base:
    """The checkpoint at ``place``, with the VAE of another folder if given; values stay unread, but for one tensor by
    which a file of SD2.1 tells its prediction.

    Raises CheckpointError for missing parts or another kind of model or file. ``place`` is a folder, a .safetensors
    file, or weights that the host program holds: named as in a file, but their text encoders as in transformers."""
    given = {} if vae is None else {"vae": _part_in_folder(vae, "VAE")}
    if isinstance(place, Weights):
        return _base_of_tensors(place, given)
    if place.is_dir():
        return _base_in_folder(place, given)
    if place.suffix != ".safetensors":
        raise CheckpointError(f"{place.name!r} is no .safetensors", expected=WANTED, fix="Use its .safetensors file.")
    return _base_of_tensors(weights_in(place, "checkpoint"), given)


def _base_in_folder(path: Path, given: Mapping[str, BasePart]) -> Base:
    """The base in a diffusers folder, but for ``given`` parts; predicts epsilon where no scheduler says otherwise."""
    unet = _part_in_folder(part_folder(path, "unet"), "UNet")
    file = path / "scheduler" / "scheduler_config.json"
    scheduler = read_json(file, "the configuration of the scheduler") if file.is_file() else {}
    edm = "EDM" in str(scheduler.get("_class_name")) or scheduler.get("prediction_type") == "edm"
    kind = _kind(unet.shapes, path, edm)
    prediction = str(scheduler.get("prediction_type", EPSILON))
    if prediction not in (EPSILON, VELOCITY):
        found = f"{path.name!r} predicts {prediction!r}"
        raise CheckpointError(found, expected=f"{EPSILON} or {VELOCITY}", fix="Choose a checkpoint of these.")
    parts = {part: given.get(part) or _part_in_folder(part_folder(path, part), part) for part in ("vae", *TEXT[kind])}
    return Base(kind, prediction, {"unet": unet, **parts})


def part_folder(folder: Path, part: str) -> Path:
    """The folder of a checkpoint's part; a demo model that ships with the pack may name a part of another demo."""
    index = folder / INDEX
    shared = read_json(index, "a diffusers pipeline").get(OF_DEMOS, {}) if is_demo(folder) and index.is_file() else {}
    return next(filter(Path.is_dir, (home / str(shared.get(part)) for home in DEMOS)), folder / part)


def _part_in_folder(folder: Path, part: str) -> BasePart:
    config = read_json(folder / "config.json", f"the configuration of the {part}")
    stored = weights_in(folder, part, "safetensors")
    return BasePart(stored, config, {name: name for name in stored.shapes}, dict, shapes=stored.shapes)


def _base_of_tensors(stored: Weights, given: Mapping[str, BasePart]) -> Base:
    """The base in a single file, whose parts have prefixes; ``given`` parts take the place of the file's own. Raises
    CheckpointError for another kind of model, a missing part, or a VAE of other than 4 latent channels."""
    converters: Any = imported("diffusers.loaders.single_file_utils")
    added = f"{UNET}label_emb.0.0.weight" in stored.shapes
    rules = {"layers_per_block": 2, "addition_embed_type": "text_time" if added else None}
    unet = _part(stored, UNET, partial(converters.convert_ldm_unet_checkpoint, config=rules), unet_config)
    kind = _kind(unet.shapes, stored.path, any(name.startswith(EDM) for name in stored.shapes))
    levels = len({name.split(".")[3] for name in stored.shapes if name.startswith(f"{VAE}encoder.down.")})
    blocks = dict.fromkeys(("down_block_types", "up_block_types"), [""] * levels)  # counted, not read
    convert = partial(converters.convert_ldm_vae_checkpoint, config=blocks)
    parts = {"unet": unet, "vae": given.get("vae") or _part(stored, VAE, convert, partial(vae_config, kind=kind))}
    parts |= {part: _text_part(stored, converters, kind, part) for part in TEXT[kind]}
    latents = _inputs(parts["vae"].shapes, "decoder.conv_in") if parts["vae"].shapes else 4
    wrong = [f"a vae of {latents} latent channels"] if latents != 4 and not given else []
    wrong += [f"no {part} of {kind}" for part, found in parts.items() if not found.shapes]
    if wrong:
        fix = "Choose a file that has it, or a diffusers folder."
        raise CheckpointError(f"{wrong[0]} in {stored.path.name!r}", expected=WANTED, fix=fix)
    return Base(kind, _prediction(stored, kind), parts)


def _text_part(stored: Weights, converters: Any, kind: str, part: str) -> BasePart:
    """A text encoder of a single file, below the first of its prefixes in :data:`TEXT` that the file has: the last is
    ComfyUI's, others that end in ``transformer.`` are transformers', the rest OpenCLIP's. SD2.1's last layer is cut."""
    prefixes = TEXT[kind][part]
    present = (prefix for prefix in prefixes if any(name.startswith(prefix) for name in stored.shapes))
    prefix, convert = next(present, prefixes[0]), converters.convert_ldm_clip_checkpoint
    if prefix == prefixes[-1]:
        convert = partial(_loaded_clip, prefix, part == "text_encoder_2")
    elif not prefix.endswith("transformer."):
        convert = partial(_open_clip, converters.convert_open_clip_checkpoint, prefix)
    if kind == "sd21":
        convert = partial(_without_last, convert)
    activation = "quick_gelu" if (kind, part) == ("sdxl", "text_encoder") else "gelu"
    return _part(stored, prefix, convert, partial(text_config, activation=activation))


def joined_files(model: Path, clip: Path, vae: Path) -> Weights:
    """One checkpoint: the UNet of ``model``, the VAE of ``vae``, all but UNet and VAE of ``clip``; the rest of each is
    left out. A file of a VAE alone may have no prefix."""
    entries: dict[str, TensorEntry] = {}
    unet, decoder = (UNET, V_PREDICTED, EDM), (VAE,)
    for path, prefixes, prefixed in ((model, unet, True), (clip, (*unet, *decoder), False), (vae, decoder, True)):
        with reading(path):
            found = weights_in(path, "checkpoint").entries or {}
        if prefixes == decoder and not any(name.startswith(VAE) for name in found):
            found = {VAE + name: entry for name, entry in found.items()}
        entries |= {name: entry for name, entry in found.items() if name.startswith(prefixes) is prefixed}
    shapes = {name: entry.shape for name, entry in entries.items()}
    return Weights(model, shapes, entries, sum(entry.total_bytes for entry in entries.values()))


def _part(stored: Weights, prefix: str, convert: Convert, config: Callable[[Shapes], Mapping[str, Any]]) -> BasePart:
    """The part whose tensors begin with ``prefix``, converted on meta for their names and shapes; empty without any.

    Raises CheckpointError for a part that the converter, or ``config``, finds incomplete."""
    inside = {name: shape for name, shape in stored.shapes.items() if name.startswith(prefix)}
    tensors = {name: torch.empty(shape, device="meta") for name, shape in inside.items()}
    try:
        made = convert(tensors) if tensors else {}
        shapes = {name: tuple(tensor.shape) for name, tensor in made.items()}
        described = config(shapes) if made else {}
    except (KeyError, AttributeError, IndexError, ValueError, TypeError) as error:  # of diffusers' converters
        found = f"{stored.path.name!r} lacks tensors of {prefix}* ({type(error).__name__}: {error})"
        raise CheckpointError(found, expected=WANTED, fix="Download it again.") from error
    by_tensor = {id(tensor): name for name, tensor in made.items()}  # one that is only renamed stays the same object
    names = {name: by_tensor.get(id(tensor), name) for name, tensor in tensors.items()}
    weights = replace(stored, shapes=inside, total_bytes=stored.bytes_of(inside))
    return BasePart(weights, described, names, convert, shapes=shapes)


def _without_last(convert: Convert, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A converted text encoder without its last layer: SD2 was trained without it, and its folders lack it."""
    found = {name: int(layer[1]) for name in tensors if (layer := LAYER.search(name))}
    last = max(found.values(), default=0)
    return convert({name: each for name, each in tensors.items() if found.get(name) != last})


def _loaded_clip(prefix: str, projects: bool, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a text encoder as ComfyUI has it, which always has a projection and a scale beside it."""
    named = {name.removeprefix(prefix): each for name, each in tensors.items()}
    return {name: each for name, each in named.items() if projects or not name.startswith("text_projection.")}


def _open_clip(convert: Any, prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of OpenCLIP's text encoder under transformers' names; ``convert`` is diffusers' converter."""
    embedding = f"{prefix}positional_embedding"
    width = tensors[embedding].shape[1] if embedding in tensors else 0
    model = SimpleNamespace(config=SimpleNamespace(hidden_size=width))  # all that is read of it
    return convert(model, tensors, prefix=prefix)  # type: ignore[no-any-return]


def _inputs(shapes: Shapes, layer: str) -> int:
    """The inputs of a layer by the second axis of its weight; 0 where it has none."""
    return next(iter(shapes.get(f"{layer}.weight", ())[1:]), 0)


def _kind(shapes: Shapes, path: Path, edm: bool) -> str:
    """``sdxl`` or ``sd21`` by a UNet's shapes in diffusers' names; CheckpointError names others, ``edm`` among them."""
    channels, levels = _inputs(shapes, "conv_in"), len(_widths(shapes))
    projection = shapes.get("mid_block.attentions.0.proj_in.weight", ())
    added, classes = (_inputs(shapes, f"{name}_embedding.linear_1") for name in ("add", "class"))
    others = {  # the first that is true counts
        "no Stable Diffusion checkpoint": not levels or not projection,
        "an inpainting checkpoint": channels == 9,
        f"a checkpoint whose UNet takes {channels} channels": channels != 4,
        "an EDM checkpoint": edm,
        "Stable Diffusion 1.5": len(projection) == 4,
        "an unCLIP checkpoint of Stable Diffusion 2.1": levels == 4 and bool({added, classes} & {*UNCLIP}),
        "the refiner of Stable Diffusion XL": added > 0 and levels == 4,
        "another UNet than that of Stable Diffusion XL or 2.1": levels != (3 if added else 4),
    }
    wrong = next((name for name, is_one in others.items() if is_one), "")
    if wrong:
        fix = "Choose one of these, for which the adapter was made."
        raise CheckpointError(f"{path.name!r} is {wrong}", expected=WANTED, fix=fix)
    return "sdxl" if added else "sd21"


def _prediction(stored: Weights, kind: str) -> str:
    """The prediction of a single file: velocity if marked so or, of SD2.1, by the spread of a tensor, as in ComfyUI."""
    name, limit = VELOCITY_SPREAD
    if V_PREDICTED in stored.shapes:
        return VELOCITY
    if kind == "sdxl" or name not in stored.shapes:
        return EPSILON
    spread = stored.read([name], lambda _name: torch.float32, lambda _size: None)[name].std(unbiased=False)
    return VELOCITY if float(spread) > limit else EPSILON


def _widths(shapes: Shapes, pattern: str = "down_blocks.{}.resnets.0.conv1.weight") -> list[int]:  # of each level
    return [next(iter(shapes[level]), 0) for level in takewhile(shapes.__contains__, map(pattern.format, count()))]


def unet_config(shapes: Shapes) -> dict[str, Any]:
    """The ``config.json`` of a UNet with linear projections, from its shapes in diffusers' names."""
    widths, depths = _widths(shapes), []
    for level in range(len(widths)):
        blocks = f"down_blocks.{level}.attentions.0.transformer_blocks."
        depths.append(len({name[len(blocks) :].split(".")[0] for name in shapes if name.startswith(blocks)}))
    config = {
        "in_channels": _inputs(shapes, "conv_in"),
        "out_channels": shapes.get("conv_out.weight", (0,))[0],
        "block_out_channels": widths,
        "layers_per_block": 2,
        "down_block_types": ["CrossAttnDownBlock2D" if depth else "DownBlock2D" for depth in depths],
        "up_block_types": ["CrossAttnUpBlock2D" if depth else "UpBlock2D" for depth in reversed(depths)],
        "transformer_layers_per_block": [depth or 1 for depth in depths],
        "attention_head_dim": [width // HEAD_WIDTH for width in widths],
        "cross_attention_dim": _inputs(shapes, "mid_block.attentions.0.transformer_blocks.0.attn2.to_k"),
        "norm_num_groups": 32,
        "use_linear_projection": True,
    }
    if added := _inputs(shapes, "add_embedding.linear_1"):
        config |= {"addition_embed_type": "text_time", "addition_time_embed_dim": TIME_WIDTH}
        config["projection_class_embeddings_input_dim"] = added
    return config


def vae_config(shapes: Shapes, kind: str) -> dict[str, Any]:
    """The ``config.json`` of a VAE, from its shapes; SDXL's counts as the published one, which overflows in fp16."""
    widths = _widths(shapes, "encoder.down_blocks.{}.resnets.0.conv1.weight")
    return {
        "in_channels": 3,
        "out_channels": 3,
        "latent_channels": 4,
        "layers_per_block": 2,
        "block_out_channels": widths,
        "down_block_types": ["DownEncoderBlock2D"] * len(widths),
        "up_block_types": ["UpDecoderBlock2D"] * len(widths),
        "norm_num_groups": 32,
        "scaling_factor": SCALES[kind],
        "force_upcast": kind == "sdxl",
    }


def text_config(shapes: Shapes, activation: str) -> dict[str, Any]:
    """The ``config.json`` of a CLIP text encoder, from its shapes."""
    shapes = {name.removeprefix("text_model."): shape for name, shape in shapes.items()}
    rows, width = shapes["embeddings.token_embedding.weight"]
    return {
        "vocab_size": rows,
        "hidden_size": width,
        "max_position_embeddings": shapes["embeddings.position_embedding.weight"][0],
        "num_hidden_layers": len({name.split(".")[2] for name in shapes if name.startswith("encoder.layers.")}),
        "intermediate_size": shapes["encoder.layers.0.mlp.fc1.weight"][0],
        "num_attention_heads": width // HEAD_WIDTH,
        "projection_dim": shapes.get("text_projection.weight", (width,))[0],
        "hidden_act": activation,
        "eos_token_id": 2,  # as published: the pooled text is at the highest token, which the end is
    }
