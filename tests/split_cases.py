"""What each rank of ``test_split.py`` does: renders tiny models whole and split, and compares."""

import hashlib
import json
import shutil
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from anygpu.compat.errors import UnsupportedError
from anygpu.compat.ranks import Group, Ranks
from anygpu.compat.transforms.context_parallel import SplitAttention, TokenSplit
from anygpu.compat.transforms.fp16 import apply_fp16_safe
from anygpu.compat.transforms.order import Order, Step
from anygpu.pipelines import stages
from anygpu.pipelines.base import FramePackSettings, ImageRequest, Latents, PromptRequest, SampleSettings, Silent
from anygpu.pipelines.jobs import decoded
from anygpu.pipelines.load.folder import load
from anygpu.pipelines.load.lora import with_lora
from anygpu.pipelines.pipeline import Pipeline
from anygpu.pipelines.requests import LoadRequest
from anygpu.pipelines.speed import SpeedRequest
from anygpu.pipelines.split import on_group, require_exact
from anygpu.pipelines.vae.plan import DecodeRequest
from safetensors.torch import save_file
from simulated import accelerator
from tiny.weights import randomise

Compared = tuple[float | None, float | None, str]

SAFE_FP16 = "fp16-safe"  # which no CPU is offered
LORA = "lora.safetensors"
HEADS = 6  # 3 and 2 ranks share them evenly, 4 do not
PICTURE = torch.rand(1, 80, 80, 3, generator=torch.Generator().manual_seed(0))
MODELS: dict[str, tuple[str, ...]] = {  # model: its tiny checkpoints, its own first
    "ltx": ("ltx",),
    "ltx_condition": ("ltx_condition",),
    "hunyuan_video": ("hunyuan_video",),
    "hunyuan_video_i2v": ("hunyuan_video_i2v",),
    "hunyuan_video_i2v_33ch": ("hunyuan_video_i2v_33ch",),
    "hunyuan_video_15": ("hunyuan_video_15",),
    "hunyuan_video_15_i2v": ("hunyuan_video_15_i2v",),
    "framepack": ("framepack", "hunyuan_video", "siglip"),
    "mochi": ("mochi",),
}


@dataclass(frozen=True)
class Case:
    """One video.

    Args:
        load: of the load request. settings: of the sampling; none of them gives an odd number of tokens.
        lora: how one is put on; empty for none.
    """

    model: str
    load: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    picture: bool = False
    lora: str = ""


PLAIN = {model: Case(model, picture="i2v" in model or model in ("framepack", "ltx_condition")) for model in MODELS}
BF16, SAFE = {"precision": "bf16"}, {"precision": SAFE_FP16}
FUSED = {"speed": SpeedRequest(kernels="reference")}
CASES: dict[str, Case] = {
    **PLAIN,
    **{f"{model}, cfg 1": Case(model, settings={"cfg": 1.0}) for model in ("ltx", "hunyuan_video", "mochi")},
    **{f"{model}, bf16": Case(model, BF16) for model in ("ltx", "hunyuan_video", "hunyuan_video_15", "mochi")},
    **{f"{model}, {SAFE_FP16}": Case(model, SAFE) for model in ("ltx", "hunyuan_video", "hunyuan_video_15", "mochi")},
    # Ranks without any of the tokens that stand for the picture.
    f"hunyuan_video_i2v, {SAFE_FP16}": Case("hunyuan_video_i2v", SAFE, picture=True),
    "framepack, bf16": Case("framepack", BF16, picture=True),
    **{f"{model}, fused": Case(model, FUSED) for model in ("ltx", "hunyuan_video", "hunyuan_video_15", "mochi")},
    "framepack, fused": Case("framepack", FUSED, picture=True),
    **{f"{model}, int8": Case(model, {"weights": "int8"}) for model in ("ltx", "hunyuan_video")},
    **{f"{model}, native_math": Case(model, {"attention": "native_math"}) for model in ("ltx", "hunyuan_video")},
    **{
        f"{model}, LoRA {mode}": Case(model, lora=mode) for model in ("ltx", "mochi") for mode in ("separate", "merged")
    },
    # On the simulated accelerator, whose tensors gloo takes by way of the CPU.
    "ltx, offload model": Case("ltx", {"offload": "model"}),
    "hunyuan_video, offload group": Case("hunyuan_video", {"offload": "group"}),
    "mochi, offload sequential": Case("mochi", {"offload": "sequential"}),
}


def model_folder(name: str, built: Path) -> Path:
    """The tiny checkpoint ``name`` with :data:`HEADS` attention heads."""
    source, target = tiny.build(name, built), built / f"heads{HEADS}-{name}"
    part = target if (source / "config.json").is_file() else target / "transformer"
    if name == "siglip":
        return source
    if (target / LORA).is_file():
        return target
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    for file in part.glob("*.safetensors*"):
        file.unlink()
    recipe = tiny.TINY[name].parts
    small: Any = (recipe["."] if "." in recipe else recipe["transformer"]).make()
    with torch.random.fork_rng(devices=[]):
        config = {**small.config, "num_attention_heads": HEADS}
        if "cross_attention_dim" in config:
            config["cross_attention_dim"] = HEADS * config["attention_head_dim"]
        grown = type(small).from_config(config)
    randomise(grown, zlib.crc32(name.encode()))
    grown.save_pretrained(part)
    _write_lora(target, grown)  # last: it tells that the others are there
    return target


def opened(case: Case, built: Path) -> Pipeline:
    """The pipeline of a case, on this process alone."""
    paths = [model_folder(name, built) for name in MODELS[case.model]]
    device = "cpu" if "offload" not in case.load else str(accelerator.load())
    asked = {"precision": "fp32", "device": device, **case.load}
    safe = asked["precision"] == SAFE_FP16
    pipeline = load(LoadRequest(*paths, **(asked | {"precision": "fp32"} if safe else asked)))
    if safe:
        prepare: Any = pipeline.parts.prepare
        pipeline.parts.prepare = prepare.with_steps([Step(Order.PRECISION, SAFE_FP16, _narrowed)])
    if not case.lora:
        return pipeline
    return with_lora(pipeline, paths[0] / LORA, 0.7, "", case.lora, Silent())


def _narrowed(part: str, module: Any) -> Any:
    return apply_fp16_safe(module, "").restore if part == "transformer" else None


def _write_lora(folder: Path, transformer: Any) -> None:
    """Random factors for every attention."""
    generator, factors = torch.Generator().manual_seed(6), {}
    for name, weight in transformer.state_dict().items():
        if ".attn" in name and name.endswith(".weight") and weight.ndim == 2:
            layer = f"transformer.{name.removesuffix('.weight')}"
            factors[f"{layer}.lora_A.weight"] = torch.randn(4, weight.shape[1], generator=generator) * 0.1
            factors[f"{layer}.lora_B.weight"] = torch.randn(weight.shape[0], 4, generator=generator) * 0.1
    save_file(factors, folder / LORA)


def sampled(pipeline: Pipeline, case: Case, progress: Any = None, steps: Any = None) -> Latents:
    """The latents of a case: two steps, an odd number of tokens, texts of unlike length."""
    progress, spec = progress or Silent(), pipeline.spec
    side = 96 if spec.sizes.multiple == 32 else 80
    image = None
    if case.picture:
        image = stages.encode_image(pipeline, ImageRequest(PICTURE, side, side), "stretch", Silent())
    asked = PromptRequest(
        "a red fox in the snow", "blurry", image=PICTURE if "image" in spec.recipes.effective else None
    )
    prompt = stages.encode_prompt(pipeline, asked, Silent())
    settings = SampleSettings(
        side, side, 2 * spec.sizes.stride + 1, **{"steps": 2, "seed": 3, "cfg": 2.0, **case.settings}
    )
    if spec.recipes.sections:
        framepack = FramePackSettings(0.6, window=2)
        return stages.sample_framepack(pipeline, prompt, image, settings, framepack, progress, None, steps)
    return stages.sample(pipeline, prompt, image, settings, progress, steps)


def group_of(rank: int, size: int, halves: bool = False) -> Group:
    """All processes, and the half of this one."""
    if not halves:
        return Group(Ranks(None, rank, size))
    from torch import distributed

    middle, own = size // 2, int(rank >= size // 2)
    groups = [distributed.new_group(ranks) for ranks in (list(range(middle)), list(range(middle, size)))]
    return Group(Ranks(None, rank, size), Ranks(groups[own], rank - own * middle, middle))


def everything(rank: int, size: int, folder: Path) -> dict[str, Any]:
    """What each function of the file ``plan`` returns for its cases: one start of processes serves them all."""
    plan, built = json.loads((folder / "plan").read_text()), Path((folder / "built").read_text())
    functions = {"every_case": every_case, "every_branch": every_branch, "decodes": decodes, "twins": twins}
    return {name: functions[name](rank, size, built, cases) for name, cases in plan.items()}


def compared(names: list[str], group: Group, built: Path) -> dict[str, Compared]:
    """Of each case the largest difference of split and whole, the largest value, and a hash of this rank's latents.

    Each whole is computed by one rank alone, in turn; the others have None for its difference and value.
    """
    splits = {name: sampled(on_group(opened(CASES[name], built), group), CASES[name]).samples for name in names}
    told: dict[str, Compared] = {}
    for number, (name, split) in enumerate(splits.items()):
        difference = largest = None
        if number % group.world.size == group.world.rank:
            whole = sampled(opened(CASES[name], built), CASES[name]).samples
            difference, largest = float((split - whole).abs().max()), float(whole.abs().max())
        told[name] = difference, largest, hashlib.sha256(split.contiguous().numpy().tobytes()).hexdigest()
    return told


def every_branch(rank: int, size: int, built: Path, names: list[str]) -> dict[str, Compared]:
    """Each case compared, where half of the ranks compute the one branch of guidance and half the other."""
    return compared(names, group_of(rank, size, halves=True), built)


def every_case(rank: int, size: int, built: Path, names: list[str]) -> dict[str, Compared]:
    """Each case compared."""
    return compared(names, group_of(rank, size), built)


def _shifted(right: Any) -> Any:
    """Each rank's tokens but the first, and one of the next rank's."""

    def begin(split: TokenSplit, count: int) -> None:
        right(split, count)
        last = split.run.stop == count
        split.run = slice(split.run.start + (not last), split.run.stop + (not last))

    return begin


def _first_tables(_right: Any) -> Any:
    return lambda self, tables: tuple(table.narrow(self.plan.dim, 0, self.length) for table in tables)


def _key_too_few(_right: Any) -> Any:
    def attend(self: SplitAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> Any:
        heads, whole = query.shape[1], [self._tokens_for_heads(tensor) for tensor in (query, key, value)]
        return self._heads_for_tokens(self.attend(whole[0], whole[1][:, :, :-1], whole[2][:, :, :-1]), heads)

    return attend


DECODES = {  # model: form of the decode, and latent frames; each gives several regions
    "hunyuan_video": (DecodeRequest("tiled", tile=64), 3),
    "hunyuan_video, windows": (DecodeRequest("full"), 20),
    "ltx": (DecodeRequest("tiled", tile=128), 2),
    "mochi": (DecodeRequest("tiled", tile=64, frames=1), 3),
    "hunyuan_video_15": (DecodeRequest("tiled", tile=64), 2),
}


def decodes(rank: int, size: int, built: Path, names: list[str]) -> dict[str, tuple[bool, int, int]]:
    """Of each of :data:`DECODES`: whether the leader's frames are those of one process, and how many calls of the
    decoder this rank and one process alone made."""
    told = {}
    for name in names:
        form, count = DECODES[name]
        model = name.partition(",")[0]
        alone, together = opened(Case(model), built), on_group(opened(Case(model), built), group_of(rank, size))
        channels, ratio = int(alone.configs["vae"]["latent_channels"]), alone.spec.sizes.ratio
        cells = 4 if count > 9 else 320 // ratio if ratio == 32 else 128 // ratio
        samples = torch.randn(1, channels, count, cells, cells, generator=torch.Generator().manual_seed(1))
        frames = (count - 1) * alone.spec.sizes.stride + 1
        latents = Latents(samples, alone.family, "text", frames, cells * ratio, cells * ratio, 24.0, 0)
        counts = [_calls_of(pipeline) for pipeline in (together, alone)]
        split, equal = decoded(together, latents, Silent(), form), True
        if rank == 0:
            equal = torch.equal(stages.decode(alone, latents, Silent(), form=form), split)
        told[name] = equal, len(counts[0]), len(counts[1])
    return told


def _calls_of(pipeline: Pipeline) -> list[int]:
    """Grows with each call of the decoder."""
    calls: list[int] = []
    pipeline.parts.read("vae").get_submodule("decoder").register_forward_pre_hook(lambda *_: calls.append(0))
    return calls


FAULTS: dict[str, tuple[Any, str, Any]] = {  # by name: whose method, and what it becomes
    "no exchange": (SplitAttention, "__call__", lambda _: lambda self, *given: self.attend(*given)),
    "no gather": (TokenSplit, "_join", lambda _: lambda self, block, given, output: output),
    "the leader's rotary tables": (TokenSplit, "tables", _first_tables),
    "off by one": (TokenSplit, "begin", _shifted),
    "text before video": (SplitAttention, "_tokens_for_heads", lambda right: lambda *given: right(*given).roll(1, 2)),
    "a key too few": (SplitAttention, "__call__", _key_too_few),
    "time of the first tokens": (TokenSplit, "rows", lambda _: lambda self, rows: rows[:, : self.length]),
    "leading tokens of all": (TokenSplit, "leading", lambda _: lambda self, number: number),
}


def twins(rank: int, size: int, built: Path, names: list[str]) -> dict[str, str]:
    """What :func:`require_exact` says of each model with a fault in its split; empty where it lets it pass."""
    said = {}
    for line in names:
        model, fault = line.split(": ")
        pipeline = opened(Case(model), built)
        with pytest.MonkeyPatch.context() as patch:
            if fault in FAULTS:
                owner, name, made = FAULTS[fault]
                patch.setattr(owner, name, made(getattr(owner, name)))
            try:
                require_exact(pipeline, group_of(rank, size))
                said[line] = ""
            except UnsupportedError as error:
                said[line] = str(error)
    return said
