"""The work of each stage of a run, counted before anything is read: the model's own code on tensors without data,
built with two blocks of each kind. What was counted for a size is kept."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import chain
from operator import eq
from typing import Any

import torch
from torch import nn

from ...compat.checkpoints.unpacking import unpacked
from ...compat.device.probe_store import OK
from ...compat.device.rates import ATTENTION, COPY, OTHER, PRODUCT
from ...compat.device.work import META, Work, counted_once, counting_on_meta, empty, text_of
from ...compat.memory.parts import PackedForm
from ...compat.memory.transfer import Transfer
from ...compat.transforms import fused
from ...compat.transforms.attention import SPARSE
from ...compat.transforms.fp16 import apply_fp16_safe
from ...compat.transforms.fused_vae import fuse_vae
from ...compat.transforms.products import format_of, formats_on
from ...compat.transforms.sparse_attention import shares
from ..base import Call, Forwards, FramePackSettings, PromptRequest, SampleSettings
from ..pipeline import Pipeline
from ..sampling.schedules import Guidance
from ..sizes import TRANSFORMER, VAE, Size, latent_shape
from ..vae.chunked import CausalCache, TilePosition, remembering
from ..vae.layerwise import Region, Stream, parted, streamed
from ..vae.plan import DecodeMethod
from ..vae.tiled import decode_as_published, decoder_call, pieces_of, pixel_elements

BLOCKS = {"num_layers": "transformer_blocks", "num_single_layers": "single_transformer_blocks"}
ALIKE = 2  # blocks of a kind that are built: the last may differ from the others
IMAGE_ENCODER = "image_encoder"
FP32_OUTPUT = "output.fp16_to_fp32"  # the probe of products with fp16 operands
Cells = tuple[int, int, int]  # latent frames, rows, columns


def sampling_work(pipeline: Pipeline, size: Size, settings: SampleSettings) -> Work:
    """The work of all steps of all sections of a sampling with completed ``settings``."""
    total, sections = Work(), sections_of(pipeline, size)
    for rows, count in Counter(chain.from_iterable(batches_of(pipeline, settings))).items():
        total.update(transformer_work(pipeline, replace(size, sections=1), rows).times(count))
        total.update(transformer_work(pipeline, replace(size, sections=sections), rows).times(count * (sections - 1)))
    return total


def batches_of(pipeline: Pipeline, settings: SampleSettings) -> list[tuple[int, ...]]:
    """For each step of a section the batch size of each call of the transformer: by the family, else by guidance."""
    if (own := pipeline.spec.code.batches) is not None:
        return [*own(pipeline, settings)]
    guidance, pair = Guidance(settings, settings.steps), (2,) if pipeline.spec.recipes.batched_cfg else (1, 1)
    return [pair if guidance.acts(index) else (1,) for index in range(settings.steps)]


def sections_of(pipeline: Pipeline, size: Size) -> int:  # FramePack's, of as many frames; 1 for other families
    if size.sections or not pipeline.spec.recipes.sections:
        return size.sections or 1
    return int(pipeline.spec.code.sections_for(FramePackSettings(0.0, size.window), size.frames))


def transformer_work(pipeline: Pipeline, size: Size, rows: int = 1) -> Work:
    """The work of one call of the transformer with a batch of ``rows``, and of making its packed weights dense."""
    config = dict(pipeline.configs[TRANSFORMER])
    depth = {key: int(config[key]) for key in BLOCKS if config.get(key)}
    short = {**config, **{key: min(ALIKE, count) for key, count in depth.items()}}
    call, form = empty_call(pipeline, size, rows), pipeline.plan.speed.forms.get(TRANSFORMER, "")
    epilogue = pipeline.plan.speed.epilogue
    precision, sparse = pipeline.precision, pipeline.plan.speed.attention.choice == SPARSE
    dtype = precision.compute or precision.transformer
    wide = precision.safe and pipeline.device.probes is not None and pipeline.device.probes[FP32_OUTPUT].status == OK
    clip = size.clip and call.sections
    key = (TRANSFORMER, pipeline.family, pipeline.variant, text_of(config), call.latents.shape, call.embeds.shape, clip)

    def count() -> Work:
        module = built(pipeline, TRANSFORMER, short, dtype)
        if precision.safe:
            with counting_on_meta():  # which answers what the rewrite asks of weights without data
                apply_fp16_safe(module, pipeline.family, wide)
        if form:
            fused.fuse(module, form, epilogue)
        tokens = call.embeds.shape[1] + (0 if call.vision is None else call.vision.shape[1])
        with counting_on_meta(tokens) as work, _each_block(module, work) as blocks:
            pipeline.spec.code.call_transformer(pipeline, module, call)
        for name, first in blocks.items():
            work.update(first.times(max(0, depth[name] - ALIKE)))
        return _sparse(work, latent_shape(pipeline, size)) if sparse else work

    given = None if call.vision is None else call.vision.shape
    work = counted_once((*key, given, str(dtype), precision.safe, wide, form, epilogue, sparse), count)
    return Work(work + unpacking_work(pipeline, TRANSFORMER))


def unpacking_work(pipeline: Pipeline, part: str) -> Work:
    """The work of making a part's packed weights dense in a forward; none for formats that are multiplied as stored."""
    total, asked = Work(), pipeline.plan.speed.request.stored_products and part == TRANSFORMER
    multiplied = stored_products(pipeline) if asked else ()

    def count(form: PackedForm) -> Work:
        codec, (shape, dtype), outlined, group, (_, dense) = form
        stored, sides = empty(*shape, dtype=dtype), {name: empty(*each[0], dtype=each[1]) for name, each in outlined}
        for _ in range(2):  # the first makes tables of codes, which stay
            with counting_on_meta() as work:
                unpacked(codec, stored, sides, group, dense) if codec else stored.to(dense)
        return work

    for form, times in pipeline.weights[part].forms if part in pipeline.weights else ():
        if format_of(form[0], form[1][1]) not in multiplied:
            total.update(counted_once(form, partial(count, form)).times(times))
    return total


def stored_products(pipeline: Pipeline) -> tuple[str, ...]:
    """The formats of the transformer's packed weights that this device multiplies as they are stored."""
    forms = pipeline.weights[TRANSFORMER].forms if TRANSFORMER in pipeline.weights else ()
    found = {format_of(codec, dtype) for (codec, (_shape, dtype), *_rest), _count in forms}
    return tuple(name for name in formats_on(pipeline.facts) if name in found) if found else ()


def _sparse(work: Work, grid: Cells) -> Work:
    """``work`` with its largest attention calls, those over all of the video's ``grid``, replaced by sparse ones."""
    share, copies, _ = shares(grid)
    joint = max(flops for kind, flops, _ in work if kind == ATTENTION)
    found = Work()
    for (kind, flops, moved), times in work.items():
        shorter = kind == ATTENTION and flops == joint
        found[kind, int(flops * share) if shorter else flops, moved] += times
        if shorter:  # keys and values are half of what it moved, and are read and written again
            found[OTHER, 0, int(moved * copies)] += times
    return found


def decoding_work(pipeline: Pipeline, size: Size, method: DecodeMethod | None = None) -> Work:
    """The work of a decode by ``method``, by default of the whole video; equal tiles and sections are counted once."""
    config, method = pipeline.configs[VAE], method or DecodeMethod(pipeline.precision.vae)
    form = "" if method.on_host else pipeline.plan.speed.forms.get(VAE, "")
    key = (VAE, pipeline.family, text_of(config), str(method.dtype), form)
    total = Work()

    @cache
    def vae() -> Any:
        module = built(pipeline, VAE, config, method.dtype)
        if form:
            fuse_vae(module, form)
        return module

    def latents(cells: Cells) -> torch.Tensor:
        return empty(1, int(config.get("latent_channels", 16)), *cells, dtype=method.dtype)

    def piece_work(cells: Cells) -> Work:
        """The work of one tile, or the whole: its first chunk of frames, a further one times their number, the rest."""
        time = empty(1, dtype=method.dtype) if config.get("timestep_conditioning") else None
        network, (length, rows, columns) = vae(), cells  # made before anything is counted
        most, temporal = min(method.frames or length, length), pipeline.spec.sizes.stride
        with counting_on_meta() as work:
            copies = _Copies(META, method.dtype, work=work)
            past = CausalCache(copies) if most < length else None

            def chunk(count: int) -> None:  # adds the decode of ``count`` latent frames, after the causal ``past``
                part = latents((count, rows, columns))
                with nullcontext() if past is None else remembering(network, past):
                    if method.stream:
                        elements = pixel_elements(network.config, count * temporal)
                        streamed(_Walk(copies, method.stream, elements, past=past, work=work), network, part, time)
                    else:
                        copies.to_host(decoder_call(network, copies.to_device(part), time))
                if past is not None:
                    past.commit(count)

            chunk(most)
            for count, times in ((most, length // most - 1), (length % most, 1)):
                if count and times:
                    with _repeated(work, times):  # as if HunyuanVideo 1.5's attention did not grow: 1% at 720p
                        chunk(count)
        return work

    def cut(cells: Cells) -> Any:
        return pieces_of(vae(), latents(cells), method, pipeline.spec.sizes.ratio)

    for cells, times in Counter(_cuts(pipeline, size)).items():
        for piece, count in counted_once((*key, cells, method), partial(cut, cells)).items():
            work = counted_once((*key, method.stream, method.frames, piece), partial(piece_work, piece))
            total.update(work.times(count * times))
    return total


@contextmanager
def _repeated(work: Work, times: int) -> Iterator[None]:
    """Count the work inside the block ``times`` times into ``work``."""
    before = Work(work)
    yield
    work.update(Work(work - before).times(times - 1))


@dataclass(frozen=True, slots=True)
class _Copies(Transfer):
    """Copies between a host and a device that are both the meta device; their bytes are added to ``work``."""

    work: Work = field(default_factory=Work)

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.to_host(tensor.to(self.dtype))

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        self.work[COPY, 0, tensor.nbytes] += 1
        return tensor


@dataclass(slots=True)
class _Walk(Stream):
    """A walk over planes without data, in which tiles of one shape are computed once."""

    work: Work = field(default_factory=Work)
    times: dict[Region, int] = field(default_factory=dict)

    def each(self, starts: range) -> Iterator[int]:  # the first stands for all but the last, which may be smaller
        if len(starts) > 1:
            with _repeated(self.work, len(starts) - 1):
                yield starts[0]
        yield starts[-1]

    def parted(self, region: Region, side: int) -> list[Region]:  # one of each kind; ``times`` has how many there are
        alike = defaultdict[Any, list[Region]](list)
        for part in parted(region, side):  # tiles of one height and width, at the same borders of the region
            alike[part[1] - part[0], part[3] - part[2], tuple(map(eq, part, region))].append(part)
        self.times = {parts[0]: len(parts) for parts in alike.values()}
        return list(self.times)

    def _piece(self, run: Callable[..., torch.Tensor], planes: list[torch.Tensor], place: TilePosition) -> Any:
        with _repeated(self.work, self.times.get((*place.rows, *place.columns), 1)):
            return Stream._piece(self, run, planes, place)


def image_work(pipeline: Pipeline, size: Size) -> Work:
    """The work of encoding a picture or clip of ``size``: by the VAE, and by the image encoder where there is one."""
    config, dtype, clip = pipeline.configs[VAE], pipeline.precision.vae, pipeline.spec.memory.clip

    def by_vae(frames: int) -> Work:
        vae = built(pipeline, VAE, config, dtype)  # of which only the decoder can be fused
        with counting_on_meta() as work:
            vae.encode(empty(1, 3, frames, size.height, size.width, dtype=dtype))
        return work

    key = (VAE, "encode", pipeline.family, text_of(config), size.height, size.width, str(dtype))
    total, batches = Work(), {1: 1}  # from the frames of a batch to how many such batches there are
    if size.clip:
        batches = {clip.batch: clip.frames // clip.batch, clip.frames % clip.batch: 1}
    for frames in filter(None, batches):
        total.update(counted_once((*key, frames), partial(by_vae, frames)).times(batches[frames]))
    if IMAGE_ENCODER in pipeline.configs:
        seen = (IMAGE_ENCODER, text_of(pipeline.configs[IMAGE_ENCODER]), str(pipeline.precision.text))
        pictures = 2 if size.clip else 1  # of a clip, its first and last frame
        total.update(counted_once(seen, partial(_vision_work, pipeline)).times(pictures))
    return total


def _vision_work(pipeline: Pipeline) -> Work:  # of one picture
    import transformers

    kind: Any = getattr(transformers, pipeline.spec.files.parts[IMAGE_ENCODER][1])
    given = pipeline.configs[IMAGE_ENCODER]
    config = kind.config_class.from_dict(dict(given.get("vision_config", given)))
    with META:
        encoder = kind(config).to(pipeline.precision.text).eval()
    picture = empty(1, 3, config.image_size, config.image_size, dtype=pipeline.precision.text)
    with counting_on_meta() as work:
        encoder(pixel_values=picture)
    return work


def text_work(pipeline: Pipeline, request: PromptRequest | None = None) -> Work:
    """The work of encoding the texts of ``request``, by default a prompt and its negative of a usual length."""
    total = Work()
    for part, forwards in text_forwards(pipeline, request).items():
        config = pipeline.configs[part].get("text_config", pipeline.configs[part])
        most = int(config.get("max_position_embeddings") or sys.maxsize)  # CLIP takes 77
        for texts in forwards:
            lengths = [min(tokens, most) for tokens in texts]
            total.update(_encoder_work(config, lengths, pipeline.precision.text.itemsize))
            total.update(unpacking_work(pipeline, part))
    return total


def text_forwards(pipeline: Pipeline, request: PromptRequest | None = None) -> Forwards:
    """By text encoder that runs, the tokens of each text in each forward; by default of two texts of a usual length."""
    spec, code = pipeline.spec, pipeline.spec.code
    usual: Forwards = dict.fromkeys(spec.files.text_parts, ((spec.memory.reference_tokens,) * 2,))
    found: Forwards = code.text_forwards(pipeline, request) if code.text_forwards is not None else usual
    return {part: forwards for part, forwards in found.items() if forwards and part in pipeline.configs}


def _encoder_work(config: Mapping[str, Any], lengths: Sequence[int], itemsize: int) -> Work:
    """The work of one forward of a text encoder (T5, Llama, Qwen, CLIP) on texts of ``lengths`` tokens."""
    number = partial(_number, config)
    width, heads = number("d_model", "hidden_size"), number("num_heads", "num_attention_heads", default=1)
    head = number("d_kv", "head_dim", default=width // heads)
    inner, wide = heads * head, number("d_ff", "intermediate_size")
    keys = number("num_key_value_heads", default=heads) * head
    gated = "gated" in str(config.get("feed_forward_proj")) or config.get("hidden_act") == "silu"
    work, layers, tokens = Work(), number("num_layers", "num_hidden_layers"), sum(lengths)
    # queries; keys and values; attention's output; feed-forward, with a gate or not; its output
    products = (width, inner, 1), (width, keys, 2), (inner, width, 1), (width, wide, 1 + gated), (wide, width, 1)
    for columns, rows, times in products:
        moved = itemsize * (columns * rows + tokens * (columns + rows))
        work[PRODUCT, 2 * tokens * columns * rows, moved] += layers * times
    work[OTHER, 0, itemsize * tokens * width] += 10 * layers  # norms, residuals, activations
    work[ATTENTION, 4 * sum(length**2 for length in lengths) * inner, 4 * itemsize * tokens * inner] += layers
    return work


def _number(config: Mapping[str, Any], *names: str, default: int = 0) -> int:
    """The first of these settings that a configuration has and that is not 0."""
    return next((int(config[name]) for name in names if config.get(name)), default)


def _cuts(pipeline: Pipeline, size: Size) -> list[Cells]:
    """Latent frames, rows and columns of each decode: a video, or sections with a neighbour or the start frame."""
    frames, rows, columns = latent_shape(pipeline, size)
    if not pipeline.spec.recipes.sections:
        return [(frames, rows, columns)]
    return [(size.window + 1, rows, columns), *[(2 * size.window, rows, columns)] * (sections_of(pipeline, size) - 1)]


def empty_call(pipeline: Pipeline, size: Size, rows: int) -> Call:
    """The inputs of one forward of the transformer, without data: ``rows`` texts and videos of ``size``."""
    spec, config = pipeline.spec, pipeline.configs[TRANSFORMER]
    stream, width = partial(empty, rows, dtype=pipeline.precision.residual), partial(_number, config, default=1)
    frames, *plane = latent_shape(pipeline, size)
    channels = int(config.get("in_channels", 16))
    text = size.text or spec.memory.text_tokens or spec.memory.reference_tokens
    given = spec.memory.clip.frames // spec.sizes.stride if size.clip else 1  # latent frames that it starts from
    vision = None
    if spec.recipes.sections or pipeline.model.task == "image":
        vision = stream(_vision_tokens(pipeline), width("image_proj_dim", "image_embed_dim"))
    return Call(
        latents=stream(channels, size.window if spec.recipes.sections else frames, *plane),
        time=empty(rows),
        embeds=stream(text, width(spec.files.text_width, "caption_channels")),
        mask=empty(rows, text),
        pooled=stream(width("pooled_projection_dim")),
        guidance=empty(rows),
        vision=vision,
        picture=stream(channels, given, *plane),
        next_time=empty(rows),
        sections=2 if size.sections > 1 else 1,  # the first, and one for all that follow it
    )


def _vision_tokens(pipeline: Pipeline) -> int:  # of one picture; the family's number where no encoder tells
    config = pipeline.configs.get(IMAGE_ENCODER) or {}
    config = config.get("vision_config", config)
    if not config.get("image_size") or not config.get("patch_size"):
        return pipeline.spec.memory.history_tokens
    return (int(config["image_size"]) // int(config["patch_size"])) ** 2


def built(pipeline: Pipeline, part: str, config: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """The transformer or VAE of ``config`` without data, as the pipeline sets it up before it runs."""
    import diffusers

    names = pipeline.spec.files.parts[part][1:]
    named = config.get("_class_name")
    with META:
        module: Any = getattr(diffusers, named if named in names else names[0]).from_config(dict(config))
    if part == VAE:
        for name, value in pipeline.spec.rewrites.vae_settings.items():
            setattr(module, name, value)
        decode_as_published(module)
    return nn.Module.to(module, dtype).eval()  # diffusers' own warns of layers that it would keep in fp32


@contextmanager
def _each_block(module: nn.Module, work: Work) -> Iterator[dict[str, Work]]:
    """Yield a dict from a kind's key in :data:`BLOCKS` to the work of its first block, filled by one forward inside."""
    done: dict[str, Work] = {}

    def start(key: str, *_: Any) -> None:
        done[key] = Work(work)

    def end(key: str, *_: Any) -> None:
        done[key] = Work(work - done[key])

    with ExitStack() as stack:
        for key, name in BLOCKS.items():
            blocks = getattr(module, name, None)
            if isinstance(blocks, nn.ModuleList) and len(blocks) == ALIKE:  # of fewer, all were counted
                stack.enter_context(blocks[0].register_forward_pre_hook(partial(start, key)))
                stack.enter_context(blocks[0].register_forward_hook(partial(end, key)))
        yield done
