"""Modelled time of offload `group` at published sizes.

The published transformers, text encoders and decoders run under our own offloader on the simulated accelerator, whose
clock has the rates of `compat/device/rates.py`: without values, so neither weights nor a GPU are needed. No figure is
measured.

A block is run once by its operations; its like, on the same shapes, spend the time of these. Devices without bf16 units
compute in fp16, at the cost of plain fp16. Attention counts its arithmetic and reads and writes its tensors once, as
flash kernels do. All weights are taken to be in locked host memory.

`over_bound` sets the time against the slower of copying and computing, as if nothing had to come before it is used;
`over_attainable` against what these groups could take at best in this order and memory (:func:`attainable`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any
from unittest import mock

import torch
from anygpu.compat.device.rates import PCIE_4, RATES, Rates
from anygpu.compat.errors import json_file
from anygpu.compat.memory import standalone
from anygpu.compat.memory.hooks import GroupHooks, WeightGroup, hooks_on
from anygpu.compat.memory.offloader import PINNED, HostWeights, OffloadOptions
from anygpu.compat.memory.parts import Parts
from anygpu.compat.memory.standalone import StandaloneOffloader
from anygpu.pipelines.files.evidence import CONFIGS
from anygpu.pipelines.registry import FAMILIES
from anygpu.pipelines.sizes import Size, latent_shape
from runner import Row, data, default, known_rows, write_table
from simulated import accelerator
from simulated.clock import Clock, Times, clocked
from times import configured, opened, transformer_call
from torch import Tensor, nn
from torch.utils._pytree import tree_map

TABLE = "overlap"
PROFILES = default("overlap", "profiles")
FORWARDS = {"sampling": 3, "text": 1, "decoding": 1}
PARTS = {"sampling": "transformer", "text": "text_encoder", "decoding": "vae"}
KEYS = ("family", "stage", "size", "profile")
DTYPE = torch.bfloat16
CARD, LINKS, ROOMS = "RTX 4090", {"4 x16": 1.0, "4 x8 or 3 x16": 0.5, "3 x8": 0.25}, (0, 9, 20)  # room: GB for weights
ALLOWED = 1.05  # times the slower of copying and computing
WINDOW = 64  # uses of a group that can still be waiting, or in use, when another comes
Some = Callable[..., Tensor]


HUNYUAN = "hunyuan_video"
SIZES = {family: Size(**given) for family, given in data("workflow_sizes").items()}  # framepack's of a section
TRANSFORMERS = {"ltx": ("2B, ", "13B, ")}  # where a family has more than one configuration of them
TEXTS = {"ltx": ("T5-XXL", "T5EncoderModel", "t5", 128), HUNYUAN: ("Llama 8B", "LlamaModel", "llama", 351)}
VISION = {"vision": (1, 729, 1152)}
MORE = {"framepack": VISION, "hunyuan_video_15": {"glyph_embeds": (1, 8, 1472), **VISION}}  # states of a call


@dataclass(frozen=True)
class Stage:
    """One part of a family at a published size.

    Args:
        make: the part on a meta device. call: one use of it, from the part and a maker of tensors on the device.
        size: in words.
    """

    family: str
    name: str
    size: str
    make: Callable[[], nn.Module]
    call: Callable[[Any, Some], Any]


def stages(families: Iterable[str]) -> Iterator[Stage]:
    """Text, sampling and decoding of each family; the text of an encoder that several have only once."""
    for family in families:
        size = SIZES[family]
        words = f"{size.width}x{size.height}, " + (
            "one section" if FAMILIES[family].recipes.sections else f"{size.frames} frames"
        )
        if family in TEXTS:
            name, cls, config, tokens = TEXTS[family]
            make = partial(built, "transformers", CONFIGS / f"{config}.json", 0, cls)
            yield Stage(family, "text", f"{name}, {tokens} tokens", make, partial(encoded, tokens))
        folder = FAMILIES[family].folder
        for index, label in enumerate(TRANSFORMERS.get(family, ("",))):
            make = partial(built, "diffusers", folder / "transformer.json", index)
            yield Stage(family, "sampling", label + words, make, partial(sampled, family))
        vae = folder if (folder / "vae.json").is_file() else FAMILIES[HUNYUAN].folder
        make = partial(built, "diffusers", vae / "vae.json", 0)
        yield Stage(family, "decoding", words, make, partial(decoded, family))


def built(package: str, file: Path, index: int, cls: str = "") -> nn.Module:
    """The module of a published configuration, of the class that it names or of ``cls``."""
    config, library = json_file(file)[index]["config"], importlib.import_module(package)
    if cls:
        config = library.AutoConfig.for_model(**{**config, "use_cache": False})
        return getattr(library, cls)(config)
    module: nn.Module = getattr(library, config["_class_name"]).from_config(config)
    return module


def encoded(tokens: int, part: Any, some: Some) -> Any:
    """A text through its encoder."""
    return part(input_ids=torch.zeros(1, tokens, dtype=torch.long, device=some(1).device))


def sampled(family: str, part: Any, some: Some) -> Any:
    """The family's own call of its transformer, with both rows of guidance where it makes one call of them."""
    pipeline = configured(opened(family), DTYPE, transformer=dict(part.config))
    rows = 2 if pipeline.spec.recipes.batched_cfg else 1
    return transformer_call(pipeline, part, SIZES[family], rows, some, **MORE.get(family, {}))


def decoded(family: str, part: Any, some: Some) -> Any:
    """The decode of what is sampled."""
    return part.decode(some(1, part.config.latent_channels, *latent_shape(opened(family), SIZES[family])))


def on_host(stage: Stage) -> nn.Module:
    """The part in host memory that nobody has touched, so that it takes none; with our fused forwards."""
    from anygpu.compat.transforms.fused import fuse
    from anygpu.compat.transforms.fused_vae import fuse_vae
    from anygpu.compat.transforms.order import replace_attention

    with torch.device("meta"):
        module = stage.make().to(DTYPE)
    module = module.to_empty(device="cpu").eval().requires_grad_(False)
    if stage.name == "sampling":
        fuse(module)
        replace_attention(module, attend)
    elif stage.name == "decoding":
        fuse_vae(module)
        replace_attention(module, attend)
    if stage.name != "decoding":
        remember_blocks(module)
    return module


@contextmanager
def launched(device: torch.device) -> Iterator[None]:
    """Our operations instead of their references: each is one operation of the clock."""
    from anygpu.kernels import library

    kept = library.LAUNCHED_ON, library.HAS_TRITON
    library.LAUNCHED_ON, library.HAS_TRITON = device.type, True
    try:
        yield
    finally:
        library.LAUNCHED_ON, library.HAS_TRITON = kept


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *_more: Any, **_named: Any) -> Tensor:
    """Attention's result without its values, at the price of its arithmetic."""
    batch, heads, tokens, width = query.shape
    result = query.new_empty(batch, tokens, heads, value.shape[-1]).transpose(1, 2)
    flops = 2 * batch * heads * tokens * key.shape[2] * (width + value.shape[-1])
    Modelled.current.spend_work(flops, sum(t.nbytes for t in (query, key, value, result)), query.dtype)
    return result


class Modelled(Clock):
    """A clock that notes the work of a block once, and spends it again for its like."""

    current: Modelled

    def __init__(self, rates: Rates, values: bool, index: int) -> None:
        super().__init__(rates, values, index)
        self.notes: list[tuple[float, int, torch.dtype]] | None = None
        Modelled.current = self

    def spend_work(self, flops: float, count: int, dtype: torch.dtype) -> None:
        """One operation."""
        if self.notes is not None:
            self.notes.append((flops, count, dtype))
        super().spend_work(flops, count, dtype)


Known = dict[Any, tuple[list[tuple[float, int, torch.dtype]], Any]]


def remember_blocks(module: nn.Module) -> None:
    """Have each block of ``module`` run by its operations only where no other of its kind did on the same shapes."""
    known: Known = {}
    for owner in module.modules():
        for block in owner if isinstance(owner, nn.ModuleList) else ():
            own = vars(block).get("forward")
            block.forward = MethodType(_remembered(type(block).forward if own is None else own.__func__, known), block)


def _remembered(forward: Callable[..., Any], known: Known) -> Callable[..., Any]:
    def shape(value: Any) -> Any:
        return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else value

    def call(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        clock = Modelled.current
        key = (type(block), tuple(tuple(p.shape) for p in block.parameters()), repr(tree_map(shape, (args, kwargs))))
        if key not in known:
            outer, clock.notes = clock.notes, []
            result = forward(block, *args, **kwargs)
            known[key] = clock.notes, tree_map(lambda v: v.to("meta") if isinstance(v, Tensor) else v, result)
            clock.notes = outer if outer is None else outer + clock.notes
            return result
        work, outline = known[key]
        for each in work:
            clock.spend_work(*each)
        return tree_map(lambda v: torch.empty_like(v, device=clock.device) if isinstance(v, Tensor) else v, outline)

    return call


@contextmanager
def noted_uses() -> Iterator[list[tuple[int, float]]]:
    """Bytes of each group that comes to the device, and the seconds computed until then."""
    uses: list[tuple[int, float]] = []
    onload = GroupHooks.onload

    def noted(hooks: GroupHooks, group: WeightGroup) -> None:
        uses.append((group.total_bytes, Modelled.current.computing))
        onload(hooks, group)

    with mock.patch.object(GroupHooks, "onload", noted):
        yield uses


def attainable(uses: list[tuple[int, float]], computed: float, rates: Rates, room_bytes: int) -> float:
    """Seconds that groups take at best, used in this order, each there before it computes.

    A copy begins as soon as the link is free, and what computes, what waits for it and what comes fit into
    ``room_bytes``. Where host and device share one memory there is one queue: copies and computation add up.

    Args:
        uses: bytes of each group, and seconds computed before it. computed: all seconds.
    """
    if rates.unified:
        return computed + sum(size / rates.link + rates.launch for size, _ in uses)
    begins: list[float] = []
    ends: list[float] = []
    link = 0.0
    for index, (size, until) in enumerate(uses):
        moments = [link, *(t for t in (*begins[-WINDOW:], *ends[-WINDOW:]) if t > link)]
        for moment in sorted(moments):
            recent = range(max(0, index - WINDOW), index)
            waiting = sum(uses[other][0] for other in recent if begins[other] > moment)
            computing = max((uses[o][0] for o in recent if begins[o] <= moment < ends[o]), default=0)
            if not waiting or waiting + computing + size <= room_bytes:
                link = moment + size / rates.link + rates.launch
                break
        after = uses[index + 1][1] if index + 1 < len(uses) else computed
        begins.append(max(link, ends[-1] if ends else until))
        ends.append(begins[-1] + after - until)
    return ends[-1] if ends else computed


def modelled(stage: Stage, module: nn.Module, rates: Rates, room: int = 0) -> tuple[Times, int, float]:
    """Seconds of the stage at ``rates``, the bytes that it moved, and the seconds that it could take at best.

    Args:
        room: bytes beside a forward, where what fits stays on the device and has come before the clock starts; 0 for
            nothing that stays.
    """
    part = PARTS[stage.name]
    host_weights = HostWeights({} if rates.unified else {part: PINNED}, shared=rates.unified)
    with (
        accelerator.fresh() as device,
        torch.no_grad(),
        launched(device),
        clocked(rates, values=False, kind=Modelled) as clock,
        noted_uses() as uses,
        mock.patch.object(standalone, "keeps", lambda *_: bool(room)),
    ):

        def some(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=DTYPE, device=device)

        parts = Parts({part: lambda _: module})
        left = max(0, standalone.free_bytes(device) - room) if room else 0
        offloader = StandaloneOffloader(parts, device, "group", OffloadOptions({}, left, None, host_weights))
        with offloader.hold(part):  # hooks are made here, and host weights locked
            if room:
                stage.call(module, some)
            uses.clear()
            before, moved = clock.times(), offloader.memory_stats.moved_bytes
            for _ in range(FORWARDS[stage.name]):
                stage.call(module, some)
            times, moved = clock.times() - before, offloader.memory_stats.moved_bytes - moved
            best = attainable(uses, times.computing, rates, 2 * hooks_on(module).largest_bytes)
        offloader.detach(part)
        return times, moved, best


def rows(families: tuple[str, ...], profiles: tuple[str, ...], missing: bool) -> Iterator[Row]:
    """A row per stage and profile; times are of one forward.

    Args:
        missing: only what has no row yet.
    """
    there = {tuple(row[name] for name in KEYS) for row in known_rows(TABLE)} if missing else set()
    for stage in stages(families):
        wanted = [p for p in profiles if (stage.family, stage.name, stage.size, p) not in there]
        if not wanted:
            continue
        module, count = on_host(stage), FORWARDS[stage.name]
        modelled(stage, module, RATES[wanted[0]])  # the first run of a process also tries what is tried once
        for profile in wanted:
            rates = RATES[profile]
            rates = replace(rates, bf16=max(rates.fp16, rates.bf16))  # fp16 where bf16 has no units
            times, moved, best = modelled(stage, module, rates)
            yield {
                "family": stage.family, "stage": stage.name, "size": stage.size, "profile": profile,
                "copy_seconds": round(times.copying / count, 4), "compute_seconds": round(times.computing / count, 4),
                "waited_seconds": round((times.copying + times.computing) / count, 4),
                "overlapped_seconds": round(times.elapsed / count, 4),
                "over_bound": round(times.elapsed / times.bound, 3),
                "over_attainable": round(times.elapsed / best, 3),
                "stalled_seconds": round(times.waited_for_copies / count, 4),
                "moved_gb": round(moved / count / 1e9, 2),
            }  # fmt: skip


def link_rows(families: tuple[str, ...]) -> Iterator[Row]:
    """A row per transformer, link and memory beside a forward, of a later forward at the rates of one card."""
    for stage in (stage for stage in stages(families) if stage.name == "sampling"):
        module, count = on_host(stage), FORWARDS[stage.name]
        for link, share in LINKS.items():
            rates = replace(RATES[CARD], link=share * PCIE_4)
            for room in ROOMS:
                times, moved, _ = modelled(stage, module, rates, room * 10**9)
                yield {
                    "family": stage.family, "size": stage.size, "profile": CARD, "link": link, "room_gb": room,
                    "compute_seconds": round(times.computing / count, 4),
                    "overlapped_seconds": round(times.elapsed / count, 4), "moved_gb": round(moved / count / 1e9, 2),
                }  # fmt: skip


def link_page(rows: list[Row]) -> None:
    """Write the table of links: a transformer per line, a link and a room per column."""
    known: dict[str, dict[str, str]] = {}
    for row in rows:
        cell = f"{_seconds(str(row['overlapped_seconds']))} ({row['moved_gb']:.0f} GB)"
        known.setdefault(f"{row['family']} {row['size']}", {})[f"{row['link']}, {row['room_gb']} GB"] = cell
    heads = [f"{link}, {room} GB" for link in LINKS for room in ROOMS]
    cells = [[name, *(told.get(head, "") for head in heads)] for name, told in known.items()]
    write_table("performance.md", "links", ["Transformer", *heads], cells)


def page(_rows: list[Row]) -> None:
    """Write the table of the last rows: a stage per line, a device per column."""
    known: dict[str, dict[str, str]] = {}
    for row in known_rows(TABLE):
        seconds = " → ".join(_seconds(row[f"{name}_seconds"]) for name in ("waited", "overlapped"))
        stage = f"{row['family']} {row['stage']}, {row['size']}"
        known.setdefault(stage, {})[row["profile"]] = f"{seconds} ({_over(row)})"
    cells = [[stage, *(told.get(name, "") for name in PROFILES)] for stage, told in known.items()]
    write_table("performance.md", "overlap", ["Stage", *PROFILES], cells, end="/overlap")


def _over(row: dict[str, str]) -> str:
    bound, best = float(row["over_bound"]), float(row["over_attainable"])
    return f"{bound:.2f}" if bound <= ALLOWED else f"{bound:.2f}; {best:.2f} of the attainable"


def _seconds(text: str) -> str:
    value = float(text)
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
