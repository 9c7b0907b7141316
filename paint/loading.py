"""Builds a pipeline from a published paint folder or a single file. Weights are read when a stage first needs them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..compat.checkpoints.headers import reading
from ..compat.checkpoints.weights import read_json
from ..compat.decision import AUTO, Decision
from ..compat.device.execution import HOST
from ..compat.device.facts import GIBIBYTE, DeviceFacts, facts_for, free_bytes
from ..compat.device.precision import FP32, PAINT, Precision, copies_decision, precision_for
from ..compat.device.probe_store import ProbeStore
from ..compat.errors import CheckpointError, require_choice
from ..compat.memory.offloader import HostWeights, Offloader, OffloadOptions
from ..compat.memory.parts import KnownToHost, PartBytes, Parts, Reader, Silent, part_bytes
from ..compat.memory.standalone import offloader_for
from ..compat.memory.statistics import reading_of
from ..compat.probe_results import probe_results_of
from ..compat.transforms.attention import Attention, attention_for, avoided_by
from ..compat.transforms.compile import Compilation, CompileSettings, require_offload
from ..compat.transforms.order import Order, Preparation, Step, Undo
from .choices import DEMO_SIZE, VARIANTS, is_demo
from .networks import published as networks
from .networks import vae
from .networks.encoders import encoder
from .networks.layers import Dtypes, Residual, Transformer
from .networks.unet import STABLE_DIFFUSION_2, UNetShape, set_attention
from .networks.weights import Weights, weights_in

BLOCK = re.compile(r"^(.*?\.\d+)\.")
COMPILED = ("unet", "reference", "vae")
STOCK_BLOCKS = ("ResnetBlock2D", "BasicTransformerBlock")  # of diffusers


class Blocks(Compilation):
    """The compiled blocks of one part of a paint pipeline: one graph for each kind and size of block."""

    def blocks_in(self, module: nn.Module) -> Iterator[nn.Module]:
        """Residual blocks and transformers, none inside another."""
        for child in module.children():
            if isinstance(child, (Residual, Transformer)) or type(child).__name__ in STOCK_BLOCKS:
                yield child
            else:
                yield from self.blocks_in(child)


def settings_for(limit: int, backend: str = "inductor") -> CompileSettings:
    """The compiler's settings: sizes do not change in a painting; raises InputError for a limit out of range."""
    return CompileSettings(dynamic="none", cache_size=limit, vae=True, backend=backend)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeSettings:
    """Settings of computing, the same for requests of either kind."""

    precision: str = AUTO
    offload: str = AUTO
    attention: str = AUTO
    device: Any = None  # None for the default device, or its facts
    state: Path | None = None  # folder of probe results; None asks the device nothing and relies on the tables
    compiled: CompileSettings | None = None  # for the blocks of the UNets and the VAE; None compiles nothing
    quiet: bool = False  # goes by what is kept in state, so that the device is not asked
    stands_in_for: str = ""  # the published model in whose place this demo model runs; empty otherwise


@dataclass(frozen=True, slots=True)
class PaintRequest(ComputeSettings):
    model: Path  # the published folder, its unet folder, or the UNet's file
    variant: str = AUTO  # of paint; auto goes by the word "turbo" in the path, since both have the same tensors
    weights: str = AUTO  # auto, bin or safetensors, where a folder has both
    vae: Path | None = None  # folder that provides it; None looks beside the UNet
    image_encoder: Path | None = None  # folder of DINOv2-giant, for paint_pbr alone


@dataclass(frozen=True, slots=True)
class PaintPipeline(KnownToHost):
    family: str  # paint, paint_pbr, delight or mv_adapter
    variant: str  # v2-0, turbo, v2-1; ig2mv, tg2mv
    parts: Parts  # unet, reference (not for delight), vae; text_encoder or image_encoder where found
    facts: DeviceFacts
    precision: Precision
    offloader: Offloader
    shape: UNetShape
    configs: Mapping[str, Mapping[str, Any]]
    source: Path
    compiled: Mapping[str, Blocks] = field(default_factory=dict)
    decisions: tuple[Decision, ...] = ()
    weights: Mapping[str, PartBytes] = field(default_factory=dict)  # bytes of each part on the device
    probes: ProbeStore | None = None  # what the device answered; None where nothing is kept
    stands_in_for: str = ""  # as PaintRequest has it
    attention: str = ""  # what runs, in a word or two
    tokenizers: Mapping[str, Path] = field(default_factory=dict)  # folders, by text encoder
    request: Any = None  # from which it was loaded, of either kind

    @property
    def plan(self) -> PaintPipeline:
        """The pipeline itself: its decisions stand where those of a video pipeline's plan do."""
        return self

    @property
    def latent_scale(self) -> float:  # by which latents are multiplied for the UNet
        own = self.configs["vae"] if self.family == "mv_adapter" else {}  # old configurations leave it out
        return float(own.get("scaling_factor", vae.SCALE))

    @property
    def latent_format(self) -> str:  # the name of core's class
        return "SDXL" if self.configs.get("adapter", {}).get("base") == "sdxl" else "SD15"

    @property
    def is_demo(self) -> bool:
        return is_demo(self.source)

    @property
    def patcher(self) -> Any:
        """The host's own handle of a part in use, where it manages the memory; else None."""
        return next(iter(self.get_models()), None)

    def __repr__(self) -> str:
        return f"<{self.family} {self.variant} {self.source.name!r}: {self.precision}; {self.offloader}>"


def chosen_attention(
    choice: str, facts: DeviceFacts, probes: ProbeStore | None, precision: Precision, shape: UNetShape
) -> Attention:
    """A UNet's attention for this ``shape``, with its VAE's budget and avoided kernels; raises as attention_for."""
    operands = precision.compute or precision.transformer
    avoided = avoided_by(probes, (operands, precision.vae), wide=(precision.vae, FP32))
    quiet = probes is not None and probes.quiet
    return attention_for(choice, facts, operands, shape.widths[0] // shape.heads[0], avoided, quiet=quiet)


def load_paint(
    request: PaintRequest,
    progress: Any = None,
    make_room: Callable[[int, torch.device], None] | None = None,
    hosted: Callable[..., Offloader] | None = None,
) -> PaintPipeline:
    """The pipeline of ``request.model``; only names and shapes are read now.
    Raises CheckpointError where files are missing, damaged, or of another model; InputError or UnsupportedError for a
    choice that this model or machine cannot do. ``make_room`` and ``hosted`` are of a host that manages memory itself,
    as :func:`offloader_for` takes them."""
    with reading(request.model):
        place = _unet_place(request.model)
        stored = weights_in(place, "UNet", request.weights)
        kind, config = networks.kind_of(stored.shapes, stored.path), _config(place)
    shapes, dropped = networks.without_adapter(kind, stored.shapes)
    with torch.device("meta"):
        made = networks.networks_for(kind, config)
    networks.require_fitting(kind, shapes, made, str(stored.path))
    (progress or Silent()).check()
    facts = facts_for(request.device)
    probes = None if request.state is None else probe_results_of(facts, request.state, request.quiet)
    precision = precision_for(PAINT, facts, request.precision, probes)
    shape = networks.shape_for(kind, config)
    attention = chosen_attention(request.attention, facts, probes, precision, shape)
    dtypes = Dtypes(precision.compute, precision.residual)
    readers = {
        part: _unet_reader(kind, part, [*module.state_dict()], config, stored, dtypes=dtypes, kernel=attention)
        for part, module in made.items()
    }
    configs, weights = {"unet": config}, {part: network_bytes(module, dtypes) for part, module in made.items()}
    readers["vae"], configs["vae"], weights["vae"] = _vae_reader(request, place, precision, attention)
    for name, (reader, config, size) in _encoders(request, kind, place, precision).items():
        readers[name], configs[name], weights[name] = reader, config, size
    parts, compiled = parts_of(readers, request.compiled)
    offloader, offload = paint_offloader(request, parts, facts, weights, make_room=make_room, hosted=hosted)
    remarks = (*copies_decision(precision, facts, probes), *_remarks(request, kind, place, stored, dropped))
    return PaintPipeline(
        family=kind, variant=_variant(request, kind, stored), shape=shape, request=request, source=request.model,
        parts=parts, configs=configs, weights=weights, facts=facts, probes=probes, precision=precision,
        offloader=offloader, compiled=compiled, attention=attention.label, stands_in_for=request.stands_in_for,
        decisions=(precision.decision, offload, attention.decision, *remarks),
        tokenizers={"text_encoder": _beside(place, "tokenizer", "") or place.with_name("tokenizer")},
    )  # fmt: skip


def parts_of(readers: Mapping[str, Reader], settings: CompileSettings | None) -> tuple[Parts, dict[str, Blocks]]:
    """The parts, and the compiled blocks by part, none without ``settings``; graphs outlive reading a part again."""
    compiled = {} if settings is None else {part: Blocks(settings) for part in COMPILED if part in readers}

    def apply(part: str, module: nn.Module) -> Undo | None:
        return compiled[part].attach(module) if part in compiled else None

    return Parts(readers, Preparation((Step(Order.COMPILE, "compiled blocks", apply),) if compiled else ())), compiled


def paint_offloader(
    request: ComputeSettings, parts: Parts, facts: DeviceFacts, weights: Mapping[str, PartBytes],
    make_room: Callable[[int, torch.device], None] | None, hosted: Callable[..., Offloader] | None,
) -> tuple[Offloader, Decision]:  # fmt: skip
    """The offloader of a request, and the decision for it. With compiled blocks ``auto`` keeps all parts on the device;
    else, where it would do so on a GPU by our own offloader, parts leave after their stage: each runs once or twice in
    a painting, so that leaving costs a copy or two, and its room is the next one's."""
    free, sizes = free_bytes(facts.device), {part: size.total for part, size in weights.items()}
    options = OffloadOptions(state=request.state, host_weights=HostWeights(shared=facts.unified))
    given: dict[str, Any] = {"free": free, "make_room": make_room, "hosted": hosted, "options": options}
    if request.compiled is not None:
        require_offload(request.offload)
    if request.offload == AUTO and request.compiled is not None:
        offloader, decision = offloader_for("none", parts, facts.device, sizes, **given)
        total = sum(sizes.values())
        tight = free is not None and total > free
        more = f"; {total / GIBIBYTE:.1f} GB do not fit: choose offload model, or switch off compile" if tight else ""
        why = "compiled blocks stay where they were compiled" + more
        return offloader, replace(decision, why=why, source=AUTO)
    offloader, decision = offloader_for(request.offload, parts, facts.device, sizes, **given)
    if offloader.mode == "none" and request.offload == AUTO and facts.device.type != HOST.type:
        offloader, decision = offloader_for("model", parts, facts.device, sizes, **given)
        why = "each part runs once or twice, so leaving after its stage costs a copy or two"
        decision = replace(decision, why=why, source=AUTO)
    return offloader, decision


def _unet_place(model: Path) -> Path:  # the folder of the UNet, or its file, in what the user chose
    if model.is_file():
        return model
    if (model / "unet").is_dir():
        return model / "unet"
    if model.is_dir() and any([*model.glob("*.bin"), *model.glob("*.safetensors")]):
        return model
    found = f"no paint model in {str(model)!r}"
    fix = "Download one of the complete Hunyuan3D paint folders listed in docs/models.md."
    raise CheckpointError(found, expected="a folder with the subfolders unet and vae, or a UNet's file", fix=fix)


def paint_bytes(entries: Mapping[str, int]) -> PartBytes:
    """The bytes of a part from those of its tensors by name; what is outside the blocks moves as blocks of its own."""
    size = part_bytes(entries, BLOCK)
    return PartBytes(size.total, max(size.block, size.outer), size.layer)


def _variant(request: PaintRequest, kind: str, stored: Weights) -> str:  # of paint: as asked, else by its path
    require_choice("paint variant", request.variant, VARIANTS, "Choose auto.")
    if kind != "paint":
        return {"paint_pbr": "v2-1", "delight": "v2-0"}[kind]
    if request.variant != AUTO:
        return request.variant
    return "turbo" if "turbo" in str(Path(*stored.path.parts[-3:])).lower() else "v2-0"


def _config(place: Path) -> Mapping[str, Any]:
    """The UNet's config.json in the folder of ``place``; Stable Diffusion 2's without one, or if it is no UNet's."""
    file = (place if place.is_dir() else place.parent) / "config.json"
    config = read_json(file, "the configuration of the UNet") if file.is_file() else {}
    return config if "block_out_channels" in config else STABLE_DIFFUSION_2  # the file describes another model


def _remarks(request: PaintRequest, kind: str, place: Path, stored: Weights, dropped: int) -> list[Decision]:
    """Decisions about the model's variant and weights that a user should know of; ``dropped`` tensors were skipped."""
    remarks = demo_remarks(request)
    if kind == "paint" and request.variant == AUTO and not is_demo(request.model):
        why = "turbo only where its path has that word"
        remarks.append(Decision("variant", _variant(request, kind, stored), why, AUTO, guessed=True))
    if place.is_dir() and any(place.glob("*.bin")) and any(place.glob("*.safetensors")):
        why = "the folder has .bin and .safetensors, which may differ"
        remarks.append(Decision("weights", f"{stored.path.name} was read", why))
    if dropped:
        remarks.append(Decision("weights", f"{dropped} tensors of an unused image prompt were skipped"))
    return remarks


def demo_remarks(request: Any) -> list[Decision]:
    """The remark on a model that ships with the pack, for a request of any kind; none on others."""
    if not is_demo(request.model):
        return []
    why = "ships with the pack: docs/models.md has where to get published models"
    if request.stands_in_for:
        why = f"in place of {request.stands_in_for!r}, which is not installed: docs/models.md has where to get it"
    return [Decision("model", f"paints simple bodies at {DEMO_SIZE}x{DEMO_SIZE}", why, AUTO)]


def network_bytes(module: nn.Module, dtypes: Dtypes) -> PartBytes:
    named = module.state_dict().items()
    return paint_bytes({key: t.numel() * networks.stored_dtype(key, dtypes).itemsize for key, t in named})


def reader_of(part: str, total_bytes: int, build: Callable[[Callable[[int], None]], nn.Module]) -> Reader:
    """Reader of a part in eval mode without gradients; ``build`` reports the bytes it reads to its argument."""

    def read(progress: Any) -> nn.Module:
        advance = reading_of(part, total_bytes, progress)
        with torch.inference_mode(False), torch.no_grad():
            return build(advance).eval().requires_grad_(False)

    return read


def _unet_reader(
    kind: str, part: str, keys: list[str], config: Mapping[str, Any], stored: Weights, dtypes: Dtypes, kernel: Attention
) -> Reader:  # of the network ``part`` of a kind; ``keys``: its tensors, by the names of its module
    names = {networks.published(kind, part, key): key for key in keys}

    def build(advance: Callable[[int], None]) -> nn.Module:
        with torch.device("meta"):
            module = networks.networks_for(kind, config, dtypes)[part]
        tensors = stored.read(names, lambda name: networks.stored_dtype(name, dtypes), advance)
        module.load_state_dict({names[name]: tensor for name, tensor in tensors.items()}, assign=True)
        set_attention(module, kernel)
        return module

    return reader_of(part, stored.bytes_of(names), build)


def _beside(place: Path, name: str, file: str = "config.json") -> Path | None:  # of the UNet's checkpoint
    folder = place if place.is_dir() else place.parent
    return next((each for each in (folder / name, folder.parent / name) if (each / file).exists()), None)


def _vae_reader(
    request: PaintRequest, place: Path, precision: Precision, attention: Attention
) -> tuple[Reader, Mapping[str, Any], PartBytes]:  # with its configuration and bytes; CheckpointError without a folder
    folder = request.vae or _beside(place, "vae")
    if folder is None or not (folder / "config.json").is_file():
        found = f"no vae with a config.json for {str(request.model)!r}"
        fix = "Download the folder vae beside the folder unet, or choose a folder that has it as vae."
        raise CheckpointError(found, expected="the folder vae of the paint checkpoint", fix=fix)
    config = read_json(folder / "config.json", "the configuration of the VAE")
    stored = weights_in(folder, "VAE", "safetensors" if any(folder.glob("*.safetensors")) else AUTO)
    return vae_reader(stored, config, precision, attention), config, paint_bytes(stored.bytes_as(precision.vae))


def vae_reader(
    stored: Weights, config: Mapping[str, Any], precision: Precision, attention: Attention, convert: Any = dict
) -> Reader:
    """Reader of a VAE; ``convert`` gives tensors diffusers' names. CheckpointError for other than 4 latent channels."""
    if config.get("latent_channels", 4) != 4:
        found = f"a vae of {config['latent_channels']} latent channels in {str(stored.path)!r}"
        raise CheckpointError(found, expected="4, as Stable Diffusion has", fix="Choose auto as vae.")
    exact = Attention("auto", attention.budget_bytes, avoided=attention.avoided)  # whatever the UNet's choice

    def build(advance: Callable[[int], None]) -> nn.Module:
        tensors = convert(stored.read(stored.shapes, lambda _name: precision.vae, advance))
        module = vae.filled(config, tensors, str(stored.path))
        vae.set_vae_attention(module, exact)
        return module

    return reader_of("vae", stored.total_bytes, build)


def _encoders(
    request: PaintRequest, kind: str, place: Path, precision: Precision
) -> dict[str, tuple[Reader, Mapping[str, Any], PartBytes]]:
    """Reader, configuration and bytes of the one encoder that this ``kind`` uses, by name; empty where it uses none or
    has none. Raises CheckpointError for an image encoder that is not as wide as DINOv2-giant."""
    name = {"paint_pbr": "image_encoder", "delight": "text_encoder"}.get(kind)
    if name is None:
        return {}
    folder = request.image_encoder if name == "image_encoder" else _beside(place, name)
    if folder is None:
        return {}
    config = read_json(folder / "config.json", f"the configuration of the {name}")
    if name == "image_encoder" and config.get("hidden_size") != 1536:
        found = f"an image encoder of width {config.get('hidden_size')} in {str(folder)!r}"
        raise CheckpointError(found, expected="1536, of DINOv2-giant", fix="Choose the folder of DINOv2-giant.")
    stored = weights_in(folder, name, "safetensors" if any(folder.glob("*.safetensors")) else AUTO)
    size = paint_bytes(stored.bytes_as(precision.text))
    build = partial(encoder, name, config, stored, precision.text)
    return {name: (reader_of(name, stored.total_bytes, build), config, size)}
