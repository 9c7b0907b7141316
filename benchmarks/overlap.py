"""Modelled time of offload `group` at published sizes: ``python benchmarks/overlap.py [--families ltx ...]``.

The published transformers, text encoders and decoders run under our own hooks on the simulated accelerator, whose clock
has the rates of `compat/device/rates.py`: without values, so neither weights nor a GPU are needed. No figure is
measured. Rows go to ``results/overlap.csv``, and the table of `docs/performance.md` is written anew.

A block is run once by its operations; its like, on the same shapes, spend the time of these. Devices without bf16 units
compute in fp16, at the cost of plain fp16. Attention counts its arithmetic and reads and writes its tensors once, as
flash kernels do. All weights are taken to be in locked host memory.

`over_bound` sets the time against the slower of copying and computing, as if nothing had to come before it is used;
`over_attainable` against what these groups could take at best in this order and memory (:func:`attainable`).
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MethodType
from typing import Any
from unittest import mock

import torch
from table import RESULTS, append
from torch import Tensor, nn
from torch.utils._pytree import tree_map

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from anygpu.compat.device.rates import RATES, Rates  # noqa: E402
from anygpu.compat.memory import standalone  # noqa: E402
from anygpu.compat.memory.hooks import GroupHooks, WeightGroup, hooks_on, remove_hooks  # noqa: E402
from anygpu.compat.memory.offloader import PINNED, HostWeights, OffloadOptions  # noqa: E402
from anygpu.compat.memory.parts import Parts  # noqa: E402
from anygpu.compat.memory.standalone import StandaloneOffloader  # noqa: E402
from anygpu.pipelines.registry import FAMILIES  # noqa: E402
from simulated import accelerator  # noqa: E402
from simulated.clock import Clock, Times, clocked  # noqa: E402

TABLE, PAGE = "overlap", ROOT / "docs" / "performance.md"
FORWARDS = {"sampling": 3, "text": 1, "decoding": 1}
PARTS = {"sampling": "transformer", "text": "text_encoder", "decoding": "vae"}
KEYS = ("family", "stage", "size", "profile")
TABLE_ON_PAGE = re.compile(r"(<!-- overlap -->).*?(<!-- /overlap -->)", re.DOTALL)
DTYPE = torch.bfloat16
ALLOWED = 1.05  # times the slower of copying and computing
WINDOW = 64  # uses of a group that can still be waiting, or in use, when another comes
Some = Callable[..., Tensor]


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


def _config(family: str, part: str, index: int = 0) -> dict[str, Any]:
    import json

    return dict(json.loads((FAMILIES[family].folder / f"{part}.json").read_text(encoding="utf-8"))[index]["config"])


def _diffusers(family: str, part: str, index: int = 0) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import diffusers

        config = _config(family, part, index)
        module: nn.Module = getattr(diffusers, config["_class_name"]).from_config(config)
        return module

    return make


def _t5() -> nn.Module:
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(
        T5Config(
            d_model=4096, d_kv=64, d_ff=10240, num_layers=24, num_heads=64, feed_forward_proj="gated-gelu",
            vocab_size=32128, use_cache=False,
        )
    )  # fmt: skip


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaModel

    return LlamaModel(
        LlamaConfig(
            hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
            num_key_value_heads=8, vocab_size=128320, use_cache=False,
        )
    )  # fmt: skip


def _words(tokens: int) -> Callable[[Any, Some], Any]:
    return lambda part, some: part(input_ids=torch.zeros(1, tokens, dtype=torch.long, device=some(1).device))


def _ltx(frames: int, rows: int, columns: int) -> Callable[[Any, Some], Any]:
    return lambda part, some: part(
        hidden_states=some(2, frames * rows * columns, 128), encoder_hidden_states=some(2, 128, 4096),
        timestep=some(2), encoder_attention_mask=None, num_frames=frames, height=rows, width=columns,
        rope_interpolation_scale=(8 / 25, 32, 32), return_dict=False,
    )  # fmt: skip


def _hunyuan(some: Some) -> dict[str, Any]:
    device = some(1).device
    return {
        "timestep": torch.full((1,), 500, device=device),
        "encoder_hidden_states": some(1, 256, 4096),
        "encoder_attention_mask": torch.ones(1, 256, dtype=torch.long, device=device),
        "pooled_projections": some(1, 768),
        "guidance": some(1),
        "return_dict": False,
    }


def _framepack(part: Any, some: Some) -> Any:
    rows, columns, device = 76, 80, some(1).device

    def places(count: int) -> Tensor:
        return torch.arange(count, device=device)

    return part(
        hidden_states=some(1, 16, 9, rows, columns), image_embeds=some(1, 729, 1152), indices_latents=places(9),
        latents_clean=some(1, 16, 2, rows, columns), indices_latents_clean=places(2),
        latents_history_2x=some(1, 16, 2, rows, columns), indices_latents_history_2x=places(2),
        latents_history_4x=some(1, 16, 16, rows, columns), indices_latents_history_4x=places(16), **_hunyuan(some),
    )  # fmt: skip


def _hunyuan_15(part: Any, some: Some) -> Any:
    device = some(1).device
    return part(
        hidden_states=some(1, 65, 31, 30, 53), timestep=torch.full((1,), 500, device=device),
        encoder_hidden_states=some(1, 120, 3584), encoder_attention_mask=torch.ones(1, 120, device=device),
        encoder_hidden_states_2=some(1, 8, 1472), encoder_attention_mask_2=torch.ones(1, 8, device=device),
        image_embeds=torch.zeros(1, 729, 1152, dtype=DTYPE, device=device), return_dict=False,
    )  # fmt: skip


def _mochi(part: Any, some: Some) -> Any:
    mask = torch.ones(2, 256, dtype=torch.bool, device=some(1).device)
    return part(
        hidden_states=some(2, 12, 15, 60, 106), encoder_hidden_states=some(2, 256, 4096), timestep=some(2),
        encoder_attention_mask=mask, return_dict=False,
    )  # fmt: skip


def stages() -> Iterator[Stage]:
    """What is clocked: every family at the size of its shipped workflow."""
    ltx, hunyuan, newer, framepack, mochi = (
        "704x480, 97 frames", "848x480, 73 frames", "848x480, 121 frames", "640x608, one section", "848x480, 85 frames",
    )  # fmt: skip
    yield Stage("ltx", "text", "T5-XXL, 128 tokens", _t5, _words(128))
    yield Stage("ltx", "sampling", f"2B, {ltx}", _diffusers("ltx", "transformer"), _ltx(13, 15, 22))
    yield Stage("ltx", "sampling", f"13B, {ltx}", _diffusers("ltx", "transformer", 1), _ltx(13, 15, 22))
    yield Stage(
        "ltx", "decoding", ltx, _diffusers("ltx", "vae"), lambda vae, some: vae.decode(some(1, 128, 13, 15, 22))
    )
    yield Stage("hunyuan_video", "text", "Llama 8B, 351 tokens", _llama, _words(351))
    yield Stage(
        "hunyuan_video", "sampling", hunyuan, _diffusers("hunyuan_video", "transformer"),
        lambda part, some: part(hidden_states=some(1, 16, 19, 60, 106), **_hunyuan(some)),
    )  # fmt: skip
    yield Stage(
        "hunyuan_video", "decoding", hunyuan, _diffusers("hunyuan_video", "vae"),
        lambda vae, some: vae.decode(some(1, 16, 19, 60, 106)),
    )  # fmt: skip
    yield Stage("hunyuan_video_15", "sampling", newer, _diffusers("hunyuan_video_15", "transformer"), _hunyuan_15)
    yield Stage(
        "hunyuan_video_15", "decoding", newer, _diffusers("hunyuan_video_15", "vae"),
        lambda vae, some: vae.decode(some(1, 32, 31, 30, 53)),
    )  # fmt: skip
    yield Stage("framepack", "sampling", framepack, _diffusers("framepack", "transformer"), _framepack)
    yield Stage(
        "framepack", "decoding", framepack, _diffusers("hunyuan_video", "vae"),
        lambda vae, some: vae.decode(some(1, 16, 9, 76, 80)),
    )  # fmt: skip
    yield Stage("mochi", "sampling", mochi, _diffusers("mochi", "transformer"), _mochi)
    yield Stage(
        "mochi", "decoding", mochi, _diffusers("mochi", "vae"), lambda vae, some: vae.decode(some(1, 12, 15, 60, 106))
    )


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
            block.forward = MethodType(
                _remembered(
                    type(block).forward if "forward" not in vars(block) else vars(block)["forward"].__func__, known
                ),
                block,
            )


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


class NotedHooks(GroupHooks):
    """Hooks that note, for each use of a group, its bytes and the seconds that were computed until then."""

    uses: list[tuple[int, float]]

    def bring(self, group: WeightGroup) -> None:
        """Make the tensors of ``group`` their copies on the device."""
        self.__dict__.setdefault("uses", []).append((group.total_bytes, Modelled.current.computing))
        super().bring(group)


def attainable(uses: list[tuple[int, float]], computed: float, rates: Rates, room_bytes: int) -> float:
    """Seconds that groups take at best, used in this order, each there before it computes.

    A copy begins as soon as the link is free, and what computes, what waits for it and what comes fit into
    ``room_bytes``. Where host and device share one memory there is one queue: copies and computation add up.

    Args:
        uses: bytes of each group, and seconds computed before it. computed: all seconds.
    """
    if rates.unified:
        return computed + sum(rates.copy_seconds(size) for size, _ in uses)
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
                link = moment + rates.copy_seconds(size)
                break
        after = uses[index + 1][1] if index + 1 < len(uses) else computed
        begins.append(max(link, ends[-1] if ends else until))
        ends.append(begins[-1] + after - until)
    return ends[-1] if ends else computed


@contextmanager
def held(stage: Stage, module: nn.Module, device: torch.device, unified: bool) -> Iterator[NotedHooks]:
    """The part under our own offload ``group``; shared host weights stay unlocked."""
    part = PARTS[stage.name]
    options = OffloadOptions(host_weights=HostWeights({} if unified else {part: PINNED}, shared=unified))
    offloader = StandaloneOffloader(Parts({part: lambda _: module}), device, "group", options)
    try:
        with mock.patch.object(standalone, "GroupHooks", NotedHooks), offloader.hold(part):
            yield hooks_on(module)
    finally:
        remove_hooks(module)


def modelled(stage: Stage, module: nn.Module, rates: Rates) -> tuple[Times, int, float]:
    """Seconds of the stage at ``rates``, the bytes that it moved, and the seconds that it could take at best."""
    with (
        accelerator.fresh() as device,
        torch.no_grad(),
        launched(device),
        clocked(rates, values=False, kind=Modelled) as clock,
    ):

        def some(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=DTYPE, device=device)

        with held(stage, module, device, rates.unified) as hooks:
            before = clock.times()
            for _ in range(FORWARDS[stage.name]):
                stage.call(module, some)
            times = clock.times() - before
            best = attainable(hooks.uses, times.computing, rates, 2 * hooks.largest_bytes)
            return times, hooks.memory_stats.moved_bytes, best


def rows_of(stage: Stage, profiles: list[str]) -> Iterator[dict[str, Any]]:
    """A row per profile; times are of one forward."""
    module = on_host(stage)
    modelled(stage, module, RATES[profiles[0]])  # the first run of a process also tries what is tried once
    for profile in profiles:
        rates = RATES[profile]
        rates = replace(rates, bf16=max(rates.fp16, rates.bf16))  # fp16 where bf16 has no units
        times, moved, best = modelled(stage, module, rates)
        count = FORWARDS[stage.name]
        yield {
            "family": stage.family,
            "stage": stage.name,
            "size": stage.size,
            "profile": profile,
            "copy_seconds": round(times.copying / count, 4),
            "compute_seconds": round(times.computing / count, 4),
            "waited_seconds": round((times.copying + times.computing) / count, 4),
            "overlapped_seconds": round(times.elapsed / count, 4),
            "over_bound": round(times.elapsed / times.bound, 3),
            "over_attainable": round(times.elapsed / best, 3),
            "stalled_seconds": round(times.waited_for_copies / count, 4),
            "moved_gb": round(moved / count / 1e9, 2),
        }


def known_rows() -> list[dict[str, str]]:
    """The last row of each stage and profile."""
    path = RESULTS / f"{TABLE}.csv"
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return list({tuple(row[name] for name in KEYS): row for row in rows}.values())


def table() -> str:
    """The rows as a Markdown table: a stage per line, a device per column."""
    rows, names = known_rows(), list(RATES)
    stages_known = list(dict.fromkeys((row["family"], row["stage"], row["size"]) for row in rows))
    lines = [f"| Stage | {' | '.join(names)} |", "| --- |" + " --- |" * len(names)]
    for stage in stages_known:
        cells = []
        for name in names:
            row = next((r for r in rows if (r["family"], r["stage"], r["size"], r["profile"]) == (*stage, name)), None)
            told = "" if row is None else f"{_seconds(row['waited_seconds'])} → {_seconds(row['overlapped_seconds'])}"
            cells.append(told and f"{told} ({_over(row)})")  # type: ignore[arg-type]
        lines.append(f"| {stage[0]} {stage[1]}, {stage[2]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _over(row: dict[str, str]) -> str:
    bound, attainable = float(row["over_bound"]), float(row["over_attainable"])
    return f"{bound:.2f}" if bound <= ALLOWED else f"{bound:.2f}; {attainable:.2f} of the attainable"


def _seconds(text: str) -> str:
    value = float(text)
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def main() -> None:
    """Clock the stages, append the rows and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", nargs="*", default=list(FAMILIES))
    parser.add_argument("--profiles", nargs="*", default=list(RATES))
    parser.add_argument("--missing", action="store_true", help="only what has no row yet")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    there = {tuple(row[name] for name in KEYS) for row in known_rows()} if arguments.missing else set()
    for stage in stages():
        wanted = [p for p in arguments.profiles if (stage.family, stage.name, stage.size, p) not in there]
        if stage.family in arguments.families and wanted:
            append(TABLE, rows_of(stage, wanted))
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(TABLE_ON_PAGE.sub(lambda mark: f"{mark[1]}\n{table()}\n{mark[2]}", page), encoding="utf-8")


if __name__ == "__main__":
    main()
