"""Builds the pipeline of MV-Adapter from its file and the user's checkpoint of Stable Diffusion XL or 2.1."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..compat.checkpoints.headers import entries_and_notes, reading
from ..compat.checkpoints.weights import read_tensors
from ..compat.decision import AUTO, CHOSEN, Decision
from ..compat.device.facts import facts_for
from ..compat.device.failures import is_shortage
from ..compat.device.precision import FP16, FP32, PAINT, Precision, copies_decision, precision_for
from ..compat.errors import CheckpointError, PackError, first_line, require_choice
from ..compat.memory.offloader import Offloader
from ..compat.memory.parts import PartBytes, Reader, Silent
from ..compat.packages import attribute, imported
from ..compat.probe_results import probe_results_of
from ..compat.transforms.attention import Attention
from . import loading
from .choices import ADAPTER_VARIANTS, IG2MV, TG2MV, is_demo
from .loading import ComputeSettings, PaintPipeline, paint_bytes, reader_of
from .networks import mv_adapter as networks
from .networks.encoders import encoder
from .networks.layers import Dtypes
from .networks.published import stored_dtype
from .networks.stable_diffusion import VELOCITY, Base, BasePart, base_in, part_folder
from .networks.unet import UNetShape
from .networks.weights import Advance, Weights, require_shapes, weights_in

LORA_LOADERS = {"sdxl": "StableDiffusionXLLoraLoaderMixin", "sd21": "StableDiffusionLoraLoaderMixin"}
TOKENIZERS = {"text_encoder": "tokenizer", "text_encoder_2": "tokenizer_2"}


@dataclass(frozen=True, slots=True)
class AdapterRequest(ComputeSettings):
    model: Path | Weights  # the checkpoint: a .safetensors file, a folder as diffusers saves it, or the host's weights
    adapter: Path  # the published file of MV-Adapter
    variant: str = AUTO  # ig2mv or tg2mv, where the file's name does not say it
    tokenizer: Path | None = None  # folder of CLIP's tokenizer, for a checkpoint that is one file
    vae: Path | None = None  # folder of another VAE; None for the checkpoint's own
    lora: Path | None = None  # file of a LoRA of the base; None for none
    lora_strength: float = 1.0  # by how much it counts; 1 as it was made

    @property
    def source(self) -> Path:
        return self.model.path if isinstance(self.model, Weights) else self.model


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """A checked request: the checkpoint, the adapter's stored tensors, and their variant, ig2mv or tg2mv."""

    request: AdapterRequest
    base: Base
    stored: Weights
    variant: str


def load_adapter(
    request: AdapterRequest,
    progress: Any = None,
    make_room: Callable[[int, torch.device], None] | None = None,
    hosted: Callable[..., Offloader] | None = None,
) -> PaintPipeline:
    """The pipeline of a checkpoint with an adapter; arguments, what is read now and what is raised as for
    ``load_paint``. A VAE whose configuration says ``force_upcast`` stays in fp32 where fp16 was chosen for it."""
    files, made = _checked(request)
    configs = {part: found.config for part, found in files.base.parts.items()}
    configs["adapter"] = {"prediction_type": files.base.prediction, "base": files.base.kind}
    (progress or Silent()).check()
    facts, shape = facts_for(request.device), UNetShape.of(configs["unet"])
    probes = None if request.state is None else probe_results_of(facts, request.state, request.quiet)
    precision = precision_for(PAINT, facts, request.precision, probes)
    if precision.vae is FP16 and configs["vae"].get("force_upcast"):  # diffusers' mark of a VAE that overflows in fp16
        why = "VAE in fp32, since fp16 overflows in SDXL's own: choose a folder with its fp16 fix as vae"
        precision = replace(precision, vae=FP32, conv=FP32, why=f"{precision.why}; {why}")
    attention = loading.chosen_attention(request.attention, facts, probes, precision, shape)
    readers, weights = _readers(files, made, precision, attention)
    parts, compiled = loading.parts_of(readers, request.compiled)
    offloader, offload = loading.paint_offloader(request, parts, facts, weights, make_room=make_room, hosted=hosted)
    remarks = (*copies_decision(precision, facts, probes), *_remarks(files))
    # a missing tokenizer raises only when a prompt is encoded
    own = {part: part_folder(request.source, name) for part, name in TOKENIZERS.items() if part in files.base.parts}
    given = request.tokenizer or request.source.parent / "tokenizer"
    return PaintPipeline(
        family="mv_adapter", variant=files.variant, shape=shape, request=request, source=request.source,
        parts=parts, configs=configs, weights=weights, facts=facts, probes=probes, precision=precision,
        offloader=offloader, compiled=compiled, attention=attention.label, stands_in_for=request.stands_in_for,
        decisions=(precision.decision, offload, attention.decision, *remarks),
        tokenizers={part: folder if folder.is_dir() else given for part, folder in own.items()},
    )  # fmt: skip


def _checked(request: AdapterRequest) -> tuple[AdapterFiles, dict[str, nn.Module]]:
    """The files of a request, and its ``unet`` and ``adapter``, the encoder of maps, on meta. Raises CheckpointError
    for a tensor that is missing or of another shape, and for the demo's adapter with another checkpoint."""
    require_choice("adapter variant", request.variant, ADAPTER_VARIANTS, "Choose auto.")
    with reading(request.adapter):
        stored = weights_in(request.adapter, "adapter")
    with reading(request.source):
        base = base_in(request.model, request.vae)
    if is_demo(request.adapter) and not is_demo(request.source):
        found = f"{request.adapter.name!r} of the demo for {request.source.name!r}, a checkpoint of {base.kind}"
        expected = f"mvadapter_{IG2MV}_{base.kind}.safetensors, or {TG2MV}, in models/diffusion_models"
        fix = "Download it there from huanngzh/mv-adapter, press R and choose it."
        raise CheckpointError(found, expected=expected, fix=fix)
    declared = "" if request.variant == AUTO else request.variant
    variant = networks.variant_of(stored.shapes, base.kind, request.adapter.name, declared)
    config = base.parts["unet"].config
    with torch.device("meta"):
        made = {
            "unet": networks.unet_for(config, variant),
            "adapter": networks.encoder_for(base.kind, config["block_out_channels"]),
        }
    networks.require_tensors(stored.shapes, made["unet"], made["adapter"], request.adapter.name)
    stock = {key: tuple(each.shape) for key, each in made["unet"].state_dict().items() if networks.PROCESSOR not in key}
    name, fix = base.parts["unet"].stored.path.name, "Choose a complete checkpoint of Stable Diffusion XL or 2.1."
    require_shapes(base.parts["unet"].shapes, stock, f"of the UNet in {name!r}", fix)
    return AdapterFiles(request, base, stored, variant), made


def _readers(
    files: AdapterFiles, made: Mapping[str, nn.Module], precision: Precision, attention: Attention
) -> tuple[dict[str, Reader], dict[str, PartBytes]]:
    """Per part, the reader that loads its module from disk, and the bytes of its weights."""
    dtypes, parts, vae = Dtypes(precision.compute, precision.residual), files.base.parts, files.base.parts["vae"]
    readers = {
        "unet": _unet_reader(files, dtypes, attention),
        "adapter": _map_reader(made["adapter"], files.stored, dtypes),
        "vae": loading.vae_reader(vae.stored, vae.config, precision, attention, vae.convert),
    }
    weights = {part: loading.network_bytes(module, dtypes) for part, module in made.items()}
    weights["vae"] = _bytes_as(vae, precision.vae)
    for part in (part for part in TOKENIZERS if part in parts):
        readers[part] = _encoder_reader(files, part, precision)
        weights[part] = _bytes_as(parts[part], precision.text)
    return readers, weights


def _remarks(files: AdapterFiles) -> list[Decision]:  # about the base, the adapter and the LoRA, for the user
    request = files.request
    if isinstance(request.model, Weights):
        why = f"connected, as core holds {request.source.name!r}; model and vae of this node are not read"
        remarks = [Decision("base", "core's MODEL, CLIP and VAE", why, CHOSEN)]
    else:
        remarks = loading.demo_remarks(request)
    if files.base.prediction == VELOCITY and not is_demo(request.source):  # the demo's learned velocities
        why = "the adapter was taught on noise; its velocities are converted"
        remarks.append(Decision("base", "predicts velocities", why, AUTO))
    if "partial" in request.adapter.name.lower():
        text = "it was taught on pictures of which a part is hidden; for whole ones choose mvadapter_ig2mv_sdxl"
        remarks.append(Decision("caution", text, source="huanngzh/MV-Adapter README", alarming=True))
    if request.lora is not None:
        remarks.append(Decision("LoRA", f"{request.lora.name} at {request.lora_strength:g}", "merged", CHOSEN))
    return remarks


def _bytes_as(part: BasePart, dtype: torch.dtype) -> PartBytes:
    return paint_bytes({name: torch.Size(shape).numel() * dtype.itemsize for name, shape in part.shapes.items()})


def _unet_reader(files: AdapterFiles, dtypes: Dtypes, attention: Attention) -> Reader:  # base and adapter, LoRA merged
    part, adapter = files.base.parts["unet"], files.stored
    own = [name for name in adapter.shapes if networks.PROCESSOR in name]  # the rest is of the encoder of maps

    def build(advance: Advance) -> nn.Module:
        read = part.stored.read(part.stored.shapes, lambda name: stored_dtype(part.names[name], dtypes), advance)
        tensors = part.convert(read) | adapter.read(own, lambda name: stored_dtype(name, dtypes), advance)
        with torch.device("meta"):
            module = networks.unet_for(part.config, files.variant)
        module.load_state_dict(tensors, assign=True)
        module = _with_lora(files, "unet", module)
        networks.set_kernel(module, attention)
        networks.set_dtypes(module, dtypes)
        return module

    return reader_of("unet", part.stored.total_bytes + adapter.bytes_of(own), build)


def _map_reader(made: nn.Module, adapter: Weights, dtypes: Dtypes) -> Reader:  # of MV-Adapter's encoder of maps
    names = list(made.state_dict())

    def build(advance: Advance) -> nn.Module:
        module: Any = type(made).from_config(made.config)  # type: ignore[attr-defined]
        module.load_state_dict(adapter.read(names, lambda name: stored_dtype(name, dtypes), advance), assign=True)
        networks.set_dtypes(module, dtypes)
        return module  # type: ignore[no-any-return]

    return reader_of("adapter", adapter.bytes_of(names), build)


def _encoder_reader(files: AdapterFiles, name: str, precision: Precision) -> Reader:  # a text encoder, LoRA merged
    part, dtype = files.base.parts[name], precision.text

    def build(advance: Advance) -> nn.Module:
        return _with_lora(files, name, encoder(name, part.config, part.stored, dtype, advance, part.convert))

    return reader_of(name, part.stored.total_bytes, build)


def _with_lora(files: AdapterFiles, part: str, module: Any) -> nn.Module:
    """``module`` with the request's LoRA merged into its weights; unchanged without one, at strength 0, or where the
    file has no layer for this ``part``. Raises CheckpointError for a file in which diffusers finds no layer of this
    base, MissingPackageError without peft."""
    path, strength = files.request.lora, files.request.lora_strength
    if path is None or strength == 0:
        return module  # type: ignore[no-any-return]
    imported("peft")
    _attach_lora(files, path, part, module)
    layer_type: Any = attribute("peft.tuners.tuners_utils", "BaseTunerLayer")
    for layer in [each for each in module.modules() if isinstance(each, layer_type)]:
        layer.scale_layer(strength)
        layer.merge()
    imported("diffusers.utils.peft_utils").recurse_remove_peft_layers(module)
    return module  # type: ignore[no-any-return]


def _attach_lora(files: AdapterFiles, path: Path, part: str, module: Any) -> None:
    """Put peft's layers of the LoRA file at ``path`` into ``module``, if the file has any for this ``part``."""
    base = files.base.kind
    mixin: Any = attribute("diffusers.loaders", LORA_LOADERS[base])
    tensors = read_tensors(entries_and_notes(path)[0], None, lambda _size: None)
    config = attribute("diffusers.configuration_utils", "FrozenDict")(files.base.parts["unet"].config)
    try:
        state, alphas = mixin.lora_state_dict(tensors, unet_config=config)[:2]
        if not any(name.startswith(("unet.", "text_encoder")) for name in state):
            raise ValueError("no layer of a UNet or text encoder")
        if not any(name.startswith(f"{part}.") for name in state):
            return
        if part == "unet":
            mixin.load_lora_into_unet(state, alphas, module, adapter_name="lora")
        else:
            mixin.load_lora_into_text_encoder(state, alphas, module, prefix=part, adapter_name="lora")
    except (ValueError, KeyError, RuntimeError, TypeError, IndexError) as error:  # of diffusers' converters
        if isinstance(error, PackError) or is_shortage(error):
            raise
        found = f"{path.name!r} is no LoRA for the {part} of {base} ({first_line(error)})"
        fix = "Choose one made for this base, or none."
        raise CheckpointError(found, expected=f"a LoRA made for {base}", fix=fix) from error
