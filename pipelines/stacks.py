"""Stacks of each family's blocks, and its decoder, at published widths with random weights: memory and time beside what
the forecasts say, on cards as small as wanted. Without diffusers the blocks are plain ones of the same widths."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..compat import measures
from ..compat.device import facts as memory
from ..compat.device.execution import HOST
from ..compat.device.facts import GIBIBYTE, DeviceFacts, facts_for, host_free_bytes, locks_host_memory, value_or
from ..compat.device.failures import is_shortage
from ..compat.device.probe_store import OK, ProbeStore
from ..compat.device.quirks import convolution_switches
from ..compat.device.timed_choice import seconds_of
from ..compat.device.work import META, Work, counting_on_meta, pace_of
from ..compat.errors import MissingPackageError, json_file
from ..compat.measures import device_parts
from ..compat.memory.offloader import MODES, PINNED, HostWeights, OffloadOptions, choose_host_weights
from ..compat.memory.parts import PartBytes, Parts, part_bytes
from ..compat.memory.standalone import StandaloneOffloader
from ..compat.memory.transfer import transfer_for
from ..compat.probe_results import probe_results_of
from ..compat.proof import Figure, Part, Proof, figures_of, proof_of, run_parts
from .family import FamilySpec
from .pipeline import DEMOS, Pipeline
from .records.receipts import versions
from .registry import FAMILIES
from .sizes import MARGIN, TRANSFORMER, VAE, Size, latent_shape

NOISE, DEVIATION = 2**22, 0.02  # of the weights: how many before they repeat, and their scale
REPEATED = re.compile(r"blocks\.\d+")


@dataclass(frozen=True, slots=True)
class StackSizes:
    """Blocks of each kind, pixels and frames of the video, cards in GiB, of these where decoders run, which take
    seconds each; blocks as published, or tiny."""

    blocks: int = 8
    width: int = 704
    height: int = 480
    frames: int = 49
    cards: tuple[float, ...] = (6, 8, 12, 16, 24)
    decoding: tuple[float, ...] = (8, 24)
    published: bool = True


TINY = StackSizes(blocks=2, width=64, height=64, frames=9, published=False)  # a second on a CPU


@dataclass(frozen=True, slots=True)
class Stack:
    """A transformer cut short, in host memory."""

    module: nn.Module
    forward: Callable[[nn.Module, torch.device], Any]  # runs it where it is given, on inputs made there
    work: Work
    dtype: torch.dtype
    activations: int | None = None  # bytes of a forward by the forecast; None for plain blocks


def prove(device: Any, state: Path, output: Path, notify: Callable[[str], None], tiny: bool = False) -> Proof:
    """Measure ``device`` part by part into the file ``output``; ``tiny`` shows only that every part runs, in a file of
    its own. Raises InputError for another device's file, UnsupportedError where torch cannot reach the device."""
    output = output.with_stem(f"{output.stem}-tiny") if tiny else output
    facts = facts_for(device)
    store = probe_results_of(facts, state)
    parts = [*device_parts(facts, store, measures.TINY if tiny else measures.DeviceSizes())]
    parts += stack_parts(facts, store, TINY if tiny else StackSizes())
    notify(f"{facts}: {len(parts)} parts, about ten minutes; nothing is sent; after a stop the same command goes on")
    release = partial(memory.empty_cache, facts.device)
    done = run_parts(parts, proof_of(facts, versions()), output, notify, release=release)
    faults = sum(bool(figure.fault) for part in done.parts for figure in part.figures)
    notify(f"{output} and its picture: {len(done.parts)} of {len(parts)} parts, {faults} figures with a fault")
    return done


def stack_parts(facts: DeviceFacts, store: ProbeStore, sizes: StackSizes) -> Iterator[Part]:  # measures, by family
    for family in FAMILIES.values():
        yield Part(f"memory {family.id}", partial(stack_figures, family, facts, store, sizes))
    for family in FAMILIES.values():
        if (family.folder / f"{VAE}.json").exists():  # else it is another family's
            yield Part(f"decode {family.id}", partial(decode_figures, family, facts, store, sizes))


def stack_figures(family: FamilySpec, facts: DeviceFacts, store: ProbeStore, sizes: StackSizes) -> Iterator[Figure]:
    """Peak of a forward on each card beside the forecast, then seconds with weights on the device, and streamed.
    Without diffusers the blocks are plain ones; on the CPU only the seconds are measured."""
    try:
        stack, kind = family_stack(family, facts, store, sizes), ""
    except (ImportError, MissingPackageError):
        stack, kind = plain_stack(family, store, sizes), "plain blocks, "
    weights = part_bytes({name: each.nbytes for name, each in stack.module.state_dict().items()})
    accelerated = facts.device.type != HOST.type
    for card in sizes.cards if accelerated else ():
        if card * GIBIBYTE <= facts.total_bytes:
            name = f"{kind}peak on {card:g} GiB"
            yield from figures_of(Part(name, partial(_peak_figure, name, int(card * GIBIBYTE), stack, weights, facts)))
    pace = pace_of(facts, store, stack.dtype)
    computing = None if pace is None else pace.seconds(stack.work)
    yield Figure(f"{kind}forward", "s", _run(stack, facts.device, "none")[1], computing)
    if accelerated:
        from .forecast.times import link_of

        pins = locks_host_memory(facts.device)
        for host_weights in _host_weights(weights.total, facts):
            pinned = bool(host_weights.kinds)
            link = link_of(facts, [], pace, pinned, pins)
            modelled = max(computing, weights.total / link) if link and computing is not None else None
            name = f"{kind}forward, streamed{' from pinned memory' if pinned else ''}"
            room = _activation_bytes(stack) + weights.passing * 9 // 8  # an eighth more, for streams and events
            yield from figures_of(Part(name, partial(_stream_time, name, stack, facts, room, host_weights, modelled)))


def _host_weights(total: int, facts: DeviceFacts) -> Iterator[HostWeights]:
    """Ways in which a run may keep ``total`` bytes of weights on the host: as they are, and pinned where that fits."""
    yield HostWeights()
    chosen = choose_host_weights(
        {TRANSFORMER: total}, {TRANSFORMER: 0}, host_free_bytes(), locks_host_memory(facts.device), facts.unified
    )
    if chosen.of(PINNED):
        yield chosen


def _stream_time(
    name: str, stack: Stack, facts: DeviceFacts, room: int, host_weights: HostWeights, modelled: float | None
) -> Iterator[Figure]:
    """Seconds of a forward in ``room`` bytes, with blocks streamed from the host, beside the ``modelled`` seconds."""
    yield Figure(name, "s", _run(stack, facts.device, "group", room, host_weights)[1], modelled)


def _peak_figure(name: str, room: int, stack: Stack, weights: PartBytes, facts: DeviceFacts) -> Iterator[Figure]:
    """The peak on a card of ``room`` bytes in the first mode that fits; ``group`` fills the card: no forecast then."""
    forward = stack.activations or 0
    needs = {mode: weights.resident(mode, TRANSFORMER, forward) + forward for mode in MODES}
    mode = next((mode for mode in ("none", "group") if needs[mode] + weights.block <= room), "sequential")
    with small_card(facts, room):
        peak, _ = _run(stack, facts.device, mode, room)
    modelled = None if stack.activations is None or mode == "group" else needs[mode] / GIBIBYTE
    yield Figure(f"{name}, offload {mode}", "GiB", None if peak is None else peak / GIBIBYTE, modelled)


def family_stack(family: FamilySpec, facts: DeviceFacts, store: ProbeStore, sizes: StackSizes) -> Stack:
    """The family's own transformer with few blocks, prepared as a run would; raises ImportError without packages."""
    from .forecast import counts
    from .sizes import sampling_bytes

    pipeline, module = _published_part(family, facts, store, sizes, TRANSFORMER)
    size = Size(sizes.width, sizes.height, sizes.frames)
    dtype = pipeline.precision.compute or pipeline.precision.transformer
    work, empty = counts.transformer_work(pipeline, size), counts.empty_call(pipeline, size, 1)
    tensors = {name: each for name in empty.__slots__ if isinstance(each := getattr(empty, name), Tensor)}

    def forward(module: nn.Module, device: torch.device) -> Any:
        ones = {name: torch.ones(each.shape, dtype=each.dtype, device=device) for name, each in tensors.items()}
        return family.code.call_transformer(pipeline, module, replace(empty, **ones))  # type: ignore[arg-type]

    return Stack(module, forward, work, dtype, activations=sampling_bytes(pipeline, size))


def _published_part(
    family: FamilySpec, facts: DeviceFacts, store: ProbeStore, sizes: StackSizes, part: str
) -> tuple[Pipeline, nn.Module]:
    """The demo pipeline and its ``part`` as published, prepared, with random weights; a transformer has few blocks."""
    from .forecast import counts
    from .load.folder import load
    from .requests import LoadRequest

    pipeline = load(LoadRequest(DEMOS / family.id, search=(DEMOS,), device=facts, state=store.folder))
    config = published_config(family, part) if sizes.published else dict(pipeline.configs[part])
    if part == TRANSFORMER:
        config |= {key: min(sizes.blocks, int(config[key])) for key in counts.BLOCKS if config.get(key)}
    model = replace(pipeline.model, configs={**pipeline.configs, part: config}, weights={})
    precision = pipeline.precision
    dtype = precision.vae if part == VAE else precision.compute or precision.transformer
    module = _filled(counts.built(pipeline, part, config, dtype))
    assert pipeline.parts.prepare is not None
    pipeline.parts.prepare(part, module)
    return replace(pipeline, model=model), module


def decode_figures(family: FamilySpec, facts: DeviceFacts, store: ProbeStore, sizes: StackSizes) -> Iterator[Figure]:
    """Peak of a decode on each card beside its forecast, in the method that a run would begin with, then its seconds
    on the whole device; none without packages."""
    try:
        pipeline, vae = _published_part(family, facts, store, sizes, VAE)
    except (ImportError, MissingPackageError):
        return  # no plain layers would stand for a decoder
    weights = part_bytes({name: each.nbytes for name, each in vae.state_dict().items()})
    pipeline = replace(pipeline, model=replace(pipeline.model, weights={VAE: weights}))
    decode = partial(_decode_figure, pipeline, vae, Size(sizes.width, sizes.height, sizes.frames))
    accelerated = facts.device.type != HOST.type
    for card in sizes.decoding if accelerated else ():
        if card * GIBIBYTE <= facts.total_bytes:
            yield from figures_of(Part(f"peak on {card:g} GiB", partial(decode, int(card * GIBIBYTE), card)))
    free = memory.free_bytes(facts.device)
    yield from figures_of(Part("decode", partial(decode, facts.total_bytes if free is None else free)))


def _decode_figure(pipeline: Pipeline, vae: Any, size: Size, room: int, card: float = 0.0) -> Iterator[Figure]:
    """The peak of a decode in ``room`` bytes and its forecast for ``card`` GiB; with 0 its seconds once warm."""
    from .forecast.counts import decoding_work
    from .vae.fallback import tiled
    from .vae.plan import DecodeRequest, ladder_for
    from .vae.tiled import ResumableDecode

    facts, weights, cells = pipeline.facts, pipeline.weights[VAE].total, latent_shape(pipeline, size)
    plan = ladder_for(pipeline, cells, DecodeRequest(), room - weights)
    method, needed = plan.method, weights + plan.needed_bytes(plan.method)
    transfer = transfer_for(facts.device, method.dtype)
    latents = torch.randn(1, int(vae.config["latent_channels"]), *cells, generator=torch.Generator().manual_seed(0))
    time = torch.tensor([0.05]).to(facts.device, method.dtype) if vae.config.get("timestep_conditioning") else None
    offloader = StandaloneOffloader(Parts({VAE: lambda _: vae}), facts.device, "none")

    def decoded() -> None:
        ResumableDecode(latents=latents, ratios=plan.ratios).frames(vae, transfer, method, time)

    def timed() -> float:
        with offloader.hold(VAE), tiled(vae, method.tile), convolution_switches(plan.policy, method.library):
            return [seconds_of(decoded, facts.device) for _ in range(1 if card else 2)][-1]

    with small_card(facts, room):
        peak, seconds = _peak_of(timed, offloader, VAE)
    if card:
        yield Figure(f"peak on {card:g} GiB, {method}", "GiB", peak and peak / GIBIBYTE, needed / GIBIBYTE)
        return
    pace = pace_of(facts, pipeline.device.probes, method.dtype)
    modelled = None if pace is None else pace.seconds(decoding_work(pipeline, size, method))
    yield Figure(f"decode, {method}", "s", seconds, modelled)


def plain_stack(family: FamilySpec, store: ProbeStore, sizes: StackSizes) -> Stack:
    """torch's own blocks of the family's width and number of tokens, in bf16 where the device has it."""
    config, (spatial, temporal) = published_config(family), family.sizes.ratios
    heads, side = int(config.get("num_attention_heads", 24)), int(config.get("patch_size") or 1) * spatial
    width = heads * (int(config.get("attention_head_dim", 128)) if sizes.published else 2)
    dtype = torch.bfloat16 if store["matmul.bf16"].status == OK else torch.float32
    tokens = ((sizes.frames - 1) // temporal + 1) * (sizes.height // side) * (sizes.width // side)
    with META:
        block = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        module = nn.TransformerEncoder(block, sizes.blocks, enable_nested_tensor=False).to(dtype)

    def forward(module: nn.Module, device: torch.device) -> Any:
        return module.train()(torch.ones(1, tokens, width, dtype=dtype, device=device))  # eval has kernels of its own

    with counting_on_meta() as work:
        forward(module, META)
    return Stack(_filled(module), forward, work, dtype)


def published_config(family: FamilySpec, part: str = TRANSFORMER) -> dict[str, Any]:  # of the first variant
    content = json_file(family.folder / f"{part}.json")
    first: Mapping[str, Any] = content[0] if isinstance(content, list) else content
    return dict(first.get("config", first))


def _filled(module: nn.Module) -> nn.Module:
    """``module`` in host memory with random weights; blocks that are alike share the memory of the first."""
    noise = DEVIATION * torch.randn(NOISE, generator=torch.Generator().manual_seed(0))
    known = dict[str, Tensor]()
    module = module.to_empty(device=HOST)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        key = f"{REPEATED.sub('blocks', name)} {tuple(tensor.shape)}"
        if key not in known:
            for piece in tensor.data.view(-1).split(NOISE):
                piece.copy_(noise[: piece.numel()])
            known[key] = tensor.data
        tensor.data = known[key]
    return module.eval().requires_grad_(False)


def _activation_bytes(stack: Stack) -> int:  # with the margin of the forecast; 0 where it has none
    return int(MARGIN * (stack.activations or 0))


def _run(
    stack: Stack, device: torch.device, mode: str, room: int | None = None, host_weights: HostWeights | None = None
) -> tuple[int | None, float]:
    """Peak bytes of two forwards in ``room`` bytes, less those in use before, and the seconds of the second forward. As
    in a run, fewer blocks stay on the device where memory runs out."""
    free = memory.free_bytes(device)
    keep_free = 0 if room is None or free is None else max(0, free - room)
    parts = Parts({TRANSFORMER: lambda _: stack.module})
    options = OffloadOptions(keep_free_bytes=keep_free, host_weights=host_weights or HostWeights())
    offloader = StandaloneOffloader(parts, device, mode, options)

    def timed() -> float:
        seconds = list[float]()
        with offloader.hold(TRANSFORMER, _activation_bytes(stack)) as module:
            while len(seconds) < 2:  # the first one warms up
                try:
                    seconds.append(seconds_of(lambda: stack.forward(module, device), device))
                except RuntimeError as error:
                    if not is_shortage(error) or not offloader.reduce_memory(TRANSFORMER):
                        raise
        return seconds[-1]

    return _peak_of(timed, offloader, TRANSFORMER)


def _peak_of(timed: Callable[[], float], offloader: StandaloneOffloader, part: str) -> tuple[int | None, float]:
    """Peak bytes of ``timed``, less those in use before, and its seconds; then ``part`` is moved to host memory."""
    device = offloader.device
    memory.reset_peak(device)
    before = memory.peak_bytes(device)
    try:
        with torch.no_grad():
            seconds = timed()
        peak = memory.peak_bytes(device)
    finally:
        offloader.detach(part)
        memory.empty_cache(device)
    return None if peak is None or before is None else peak - before, seconds


@contextmanager
def small_card(facts: DeviceFacts, room: int) -> Iterator[None]:
    """Let torch allocate at most ``room`` bytes of the device inside the block; no limit where its backend has none."""
    backend: Any = getattr(torch, facts.device.type, None)
    where = () if facts.device.type == "mps" else (facts.device,)

    def limit(share: float) -> None:
        backend.set_per_process_memory_fraction(share, *where)

    value_or(lambda: limit(min(1.0, room / facts.total_bytes)), None)
    try:
        yield
    finally:
        value_or(lambda: limit(1.0), None)
