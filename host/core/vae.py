"""AnyGPU Fit VAE: a copy of core's VAE, patched per call; what is wrong or does not fit is computed another way."""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import comfy.model_management
import comfy.model_patcher
import torch
from comfy_execution.utils import get_executing_context
from torch import Tensor, nn
from torch.nn import functional

from ...compat import output_check
from ...compat.decision import AUTO, CHOSEN, Decision
from ...compat.device.failures import DEVICE_ERRORS, MEMORY, VALUES, failure_kind
from ...compat.device.precision import FP32, NAMES
from ...compat.device.quirks import convolution_switches, policy_for
from ...compat.errors import InputError, UnsupportedError, first_line
from ...compat.memory.parts import Undo
from ...compat.output_check import BROKEN, InvalidOutputError, is_flat
from ...compat.transforms.attention import Attention
from ...compat.transforms.guard import around
from ...pipelines.vae.plan import DecodeMethod, decode_methods, next_method, tiles_below
from .. import recovery
from ..core_models import CoreVAE
from ..memory_manager import EVERYTHING
from ..progress import NodeProgress
from .layers import HOOK, conv_forwards
from .machine import AS_LOADED, ModelDevice, machine_of
from .ownership import is_foreign, left_decisions
from .packed import PackedFit, packed_fit
from .vae_window import CONTEXT, NEAR, ProofWindow, agree, apart, latents_of
from .weights import LoadedWeights, clone_cast_on_host, damage_to_bf16, name_of, on_host, weights_decision

VAE_PRECISIONS = (AUTO, "fp32", AS_LOADED)  # grows at the end
FRAMES = {256: 64, 128: 16, 64: 8}  # pixels of a tile's side -> frames in it
BEFORE = "The sampling went wrong, not the VAE: put AnyGPU Fit Model before the sampler and sample again."
HOST = torch.device("cpu")
TILED = ("decode_tiled_", "decode_tiled_3d", "_decode_tiled_owned")  # core's fallbacks when memory runs out
CHEAP = 30  # bytes of weights to check per byte of frames; a decode itself moves some thousand
SHARE = 0.03  # of the time of decodes, at most, that goes into proofs of later ones
UNLIKE = "other pixels than the CPU makes of the same latents"


class FittedVAE:
    """Additions of a fitted VAE to core's class."""

    machine: ModelDevice
    method: DecodeMethod  # with which the next call begins: the last that gave right values
    masks: bool  # whether to restore causal masks
    keeps: bool  # whether to save latents before a decode
    plain: Any  # core's class
    packed: PackedFit
    unproven: float  # seconds of decodes since a window of one was last proven
    loaded: Any  # the patcher of the weights as they were loaded, where a fit has cast them; else None
    changes: list[Any]  # that other packs had made to its layers, as the last call began

    def decode(self, samples_in: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self._first_valid("decode", samples_in, args, kwargs)

    def decode_tiled(self, samples: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self._first_valid("decode_tiled", samples, args, kwargs)

    def encode(self, pixel_samples: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self._first_valid("encode", pixel_samples, args, kwargs)

    def encode_tiled(self, pixel_samples: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self._first_valid("encode_tiled", pixel_samples, args, kwargs)

    def _first_valid(self, name: str, given: Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
        """The result of core's ``name`` by the first method that neither fails nor gives wrong values; failures are
        shown. Later calls begin with it, unless it is the CPU. UnsupportedError if values are wrong by every method."""
        action, decodes, methods = name.replace("_", " "), name.startswith("decode"), self._methods(name, given)
        progress = functools.cache(lambda: NodeProgress(getattr(get_executing_context(), "node_id", None)))
        method, learned, freed = self._first_method(name, methods), self.method, False
        remedies: Iterator[tuple[str, DecodeMethod]] | None = None
        self.changes = _changes(self.first_stage_model)  # type: ignore[attr-defined]
        if decodes:
            output_check.require_finite(given, "latents to decode", BEFORE)
        if decodes and self.keeps and given.ndim == 5:
            recovery.save_for_decode(given)
        while True:
            try:
                result = self._run(method, name, given, args, kwargs, progress)
                break
            except (*DEVICE_ERRORS, InvalidOutputError) as error:
                kind, cause = failure_kind(error), first_line(error)
                if kind == VALUES:
                    remedies = remedies or self._remedies(method, methods, given if decodes else None)
                    remark, following = next(remedies, ("", None))
                elif kind == MEMORY and not freed and not method.on_host:
                    remark, following, freed = ", all other models freed", method, True
                    comfy.model_management.free_memory(EVERYTHING, self.device)  # type: ignore[attr-defined]
                else:
                    remark, following = "", next_method(method, kind, cause, methods)
                if following is None and kind == VALUES:
                    fix = "Download the VAE again, or choose the one that belongs to this model."
                    found = f"{action}: {cause}, also in fp32 on the CPU"
                    raise UnsupportedError(found, expected="an intact VAE file", fix=fix) from error
                if following is None:
                    raise
            progress().notify(f"{action} {_in_words(method)}: {cause}; now {_in_words(following)}{remark}")
            learned = learned if kind == MEMORY or following == method else following
            method = following
            comfy.model_management.soft_empty_cache()
        if progress.cache_info().currsize:  # something was said
            progress().finish(f"{action}: {_in_words(method)}")
        if not method.on_host:
            self.method = learned  # else each call would fail first; the CPU is too slow to begin with
        return result

    def _remedies(
        self, method: DecodeMethod, methods: Sequence[DecodeMethod], latents: Tensor | None
    ) -> Iterator[tuple[str, DecodeMethod]]:
        """(remark, method) of each try after wrong values; last the CPU, unless its window of ``latents`` is wrong."""
        yield " once more", method
        patcher = self.patcher  # type: ignore[attr-defined]
        spoilt = LoadedWeights.of(patcher).wrong(patcher, every=True, streamed=True)
        if restored := LoadedWeights.of(patcher).restore(patcher, spoilt):
            yield f", {restored[0]} loaded again: its copy on the card was not what was loaded", method
        smaller = next((each for each in methods if each.tile and (not method.tile or each.tile < method.tile)), None)
        for dtype in dict.fromkeys((method.dtype, FP32)):
            if dtype is not method.dtype:
                yield "", replace(method, dtype=dtype)
            if smaller is not None:
                yield "", replace(method, dtype=dtype, tile=smaller.tile)
        estimate = ""
        if latents is not None and _are_pictures(self, latents):
            window, begun = ProofWindow.of(self, latents), time.monotonic()
            if self._window_on_host(window) is None:
                return
            seconds = (time.monotonic() - begun) * latents.numel() / window.latents.numel()
            estimate = f", about {max(1, round(seconds / 60))} min"
        yield estimate, methods[-1]

    def _methods(self, name: str, given: Tensor) -> list[DecodeMethod]:
        """The methods that one call may try, in order, as for our own VAEs; no tiles for sound."""
        sides: tuple[int, ...] = ()
        if self.latent_dim > 1 and _are_pictures(self, given):  # type: ignore[attr-defined]
            decodes = name.startswith("decode")
            cell = self.spacial_compression_decode() if decodes else 1  # type: ignore[attr-defined]
            sides = tiles_below(max(given.shape[-2:] if decodes else given.shape[-3:-1]) * cell, cell)
        return decode_methods(replace(self.method, tile=0), tiles=sides, host=True)

    def _first_method(self, name: str, methods: Sequence[DecodeMethod]) -> DecodeMethod:
        """The method that worked last, else the first; if the device's policy caps tiles, of those within the cap."""
        cap = 0 if name.endswith("tiled") else policy_for(self.machine.facts).tile_pixels  # core's tiles
        offered = [method for method in methods if 0 < method.tile <= cap] or methods
        return next((method for method in offered if method.key == self.method.key), offered[0])

    def _run(
        self, method: DecodeMethod, name: str, given: Tensor, args: Sequence[Any], kwargs: dict[str, Any], progress: Any
    ) -> Tensor:
        """The result of core's ``name`` by one method; InvalidOutputError if a check or :meth:`_prove` objects."""
        doubts: list[str] = []
        vae = self._variant(method, given, doubts)
        if name == "decode" and not method.tile:
            _whole(vae)
        with ExitStack() as stack:
            stack.enter_context(convolution_switches(policy_for(self.machine.facts), method.library))
            stack.enter_context(self.packed.attach(self.first_stage_model))  # type: ignore[attr-defined]
            stack.enter_context(_patches_on(self._patches(method, vae.first_stage_model)))
            if method.on_host:
                stack.callback(_leave_host, vae.patcher)
            else:
                stack.enter_context(around(self.machine.guard, self.machine.calls, (self, name, given.shape, method)))
            begun = time.monotonic()
            if method.tile:
                result = _in_tiles(vae, name.removesuffix("_tiled"), given, method.tile)
            else:
                result = getattr(vae, name)(given, *args, **kwargs)
            if name.startswith("decode") and _are_pictures(self, given) and not method.on_host:
                self.unproven += time.monotonic() - begun
                self._prove(method, given, result, doubts, progress)
        if name.startswith("encode"):
            fault = output_check.fault_in_latents(result) if isinstance(result, Tensor) else ""
            plain = fault not in ("", BROKEN) and is_flat(given.movedim(-1, 1))  # one colour may encode to one value
            if fault and not plain:
                raise InvalidOutputError(fault)
        return result

    def _prove(self, method: DecodeMethod, given: Tensor, frames: Tensor, doubts: Sequence[str], progress: Any) -> None:
        """Check weights and, in doubt or as :data:`SHARE` allows, a window by the CPU; InvalidOutputError if wrong."""
        patcher = self.patcher  # type: ignore[attr-defined]
        weights = LoadedWeights.of(patcher)
        every = bool(doubts) or sum(weights.bytes.values()) <= CHEAP * frames.nbytes
        if spoilt := weights.restore(patcher, weights.wrong(patcher, every)):
            raise InvalidOutputError(f"the copy of {spoilt[0]} on the card is not what was loaded; loaded again")
        proof, store = f"vae {name_of(patcher)}, {patcher.model_size()}", self.machine.probes
        same = method.dtype is FP32 and torch.device(self.device).type == HOST.type  # type: ignore[attr-defined]
        if not doubts and (same or SHARE * self.unproven < (store.recall(proof) or 0.0)):
            return
        begun = time.monotonic()
        window = ProofWindow.of(self, given, frames if doubts else None)
        expected, seen = self._window_on_host(window), window.frames_of(frames)
        if expected is None and not doubts:
            return
        if expected is not None and expected.shape != seen.shape:  # frames per latent vary
            return
        right = expected is not None and agree(seen, expected, method.dtype)
        if not doubts and not right:  # norms over a window alone differ: decode it alone here, too
            vae = _whole(self._variant(method, window.latents, []))
            near = apart(window.inner(vae.decode(window.cut())), expected) <= NEAR
            right = near and apart(seen, expected, least=0.5) <= CONTEXT  # of a dark picture the norms differ more
        if not right:
            raise InvalidOutputError(doubts[0] if doubts else UNLIKE)
        self.unproven = 0.0
        store.remember(proof, lambda: max(SHARE, time.monotonic() - begun))
        if doubts:
            progress().notify(f"really {doubts[0]}: the CPU in fp32 agrees")

    def _window_on_host(self, window: ProofWindow) -> Tensor | None:
        """The frames that the CPU makes of a window in fp32, without context; None if it finds them wrong, too."""
        method = DecodeMethod(FP32, on_host=True)
        vae = _whole(self._variant(method, window.latents, []))
        try:
            with _patches_on(self._patches(method, vae.first_stage_model)):
                return window.inner(vae.decode(window.cut()))
        except InvalidOutputError:
            return None
        finally:
            _leave_host(vae.patcher)

    def _variant(self, method: DecodeMethod, given: Tensor, doubts: list[str]) -> Any:
        """A copy of the VAE, of core's class, on ``method``'s device, in its dtype; its check adds to ``doubts``."""
        vae: Any = copy.copy(self)
        vae.__class__, vae.process_output = self.plain, _output_check(vae, given, doubts)
        if method.on_host:
            again = on_host(self.loaded or vae.patcher)
            if again is not None and _changes(again) == self.changes:
                vae.first_stage_model = again
            vae.patcher, vae.device = comfy.model_patcher.ModelPatcher(vae.first_stage_model, HOST, HOST), HOST
        elif method.dtype is FP32:
            vae.patcher = vae.patcher.clone()
        if method.dtype is FP32 and vae.vae_dtype is not FP32:
            vae.patcher.set_model_compute_dtype(FP32)
            vae.vae_dtype = FP32
        return vae

    def _patches(self, method: DecodeMethod, network: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
        """(module, attribute, value) to set while ``network`` runs: convolution forms off the host, lost masks."""
        if not method.on_host:
            for _, forward in conv_forwards(network, self.machine.convolutions, method.dtype):
                yield forward.layer, HOOK, forward
        if self.masks:
            yield from lost_masks(network, self.machine.kernels(method.dtype).attention)


def _changes(network: nn.Module) -> list[Any]:
    """The methods and paddings set on its layers, as packs for seamless textures do: no file has these."""
    own = (layer.__dict__ for layer in network.modules())
    return [(each.keys() & {"forward", HOOK}, each.get("padding_mode")) for each in own]


@functools.cache
def _fitted_class(plain: Any) -> type[FittedVAE]:
    return type(f"Fitted{plain.__name__}", (FittedVAE, plain), {"__module__": __name__})


def fit_vae(
    vae: Any, precision: str = AUTO, causal_masks: bool = True, keep_latents: str = AUTO,
    machine: ModelDevice | None = None,
) -> tuple[Any, Sequence[Decision]]:  # fmt: skip
    """A copy of ``vae`` whose results are checked on this device, and the decisions; InputError without weights. A
    pipeline's VAE is returned as it is; a fitted one is fitted anew, and a watched one keeps its Doctor."""
    if hasattr(vae, "watched_outside"):
        return vae.watched_outside(lambda bare: fit_vae(bare, precision, causal_masks, keep_latents, machine))
    if isinstance(vae, CoreVAE):
        return vae, (Decision("vae", "as it is", "a pipeline of AnyGPU checks its own decodes"),)
    if getattr(vae, "first_stage_model", None) is None or not hasattr(vae, "patcher"):
        found = f"a {type(vae).__name__} without weights"
        raise InputError(found, expected="a VAE", fix="Connect a VAE from a loader.")
    machine = machine or machine_of(vae.device)
    earlier = isinstance(vae, FittedVAE)
    plain, loaded = (vae.plain, vae.loaded or vae.patcher) if earlier else (type(vae), vae.patcher)
    wide, decided = _precision(machine, vae.vae_dtype, precision)
    fitted = copy.copy(vae)
    damage = damage_to_bf16(loaded.model, machine)
    sound = clone_cast_on_host(loaded, lambda *_: FP32, NAMES[FP32]) if damage and wide else None
    fitted.patcher, fitted.loaded = sound or loaded.clone(), loaded if sound else None
    fitted.first_stage_model = fitted.patcher.model
    LoadedWeights.of(fitted.patcher)
    masks = list(lost_masks(fitted.first_stage_model, machine.kernels(FP32).attention)) if causal_masks else []
    dtype = FP32 if wide else vae.vae_dtype
    forms = list(conv_forwards(fitted.first_stage_model, machine.convolutions, dtype))
    fitted.__class__ = _fitted_class(plain)
    fitted.machine, fitted.plain, fitted.method, fitted.unproven = machine, plain, DecodeMethod(dtype), 0.0
    fitted.masks, fitted.keeps = bool(masks), keep_latents != "never" and getattr(vae, "latent_dim", 2) == 3
    fitted.packed = packed_fit(fitted.first_stage_model, machine.facts, machine.probes.known())
    back = (Decision("an earlier fit", "taken back"),) if earlier else ()
    decisions = (*back, decided, *fitted.packed.decisions, *weights_decision(damage, sound))
    return fitted, (*decisions, *_more_decisions(forms, masks, fitted))


def _precision(machine: ModelDevice, dtype: torch.dtype, choice: str) -> tuple[bool, Decision]:
    """True to compute in fp32 instead of ``dtype``, and the decision."""
    here = NAMES.get(dtype, str(dtype))
    if choice == "fp32":
        return True, Decision("precision", "fp32", f"core would compute in {here}" * (dtype is not FP32), CHOSEN)
    if choice == AS_LOADED or dtype not in NAMES:
        return False, Decision("precision", f"{here} as loaded", "", CHOSEN if choice == AS_LOADED else AUTO)
    ability = machine.abilities.vae(here)
    if dtype is not FP32 and (not ability.usable or ability.costly):
        return True, Decision("precision", "fp32", f"core would compute in {here}; {ability.why}", AUTO)
    return False, Decision("precision", f"{here} as loaded", f"this device computes {here} well", AUTO)


def _more_decisions(forms: Sequence[Any], masks: Sequence[Any], fitted: Any) -> Iterator[Decision]:
    yield from left_decisions(fitted.first_stage_model) if forms else ()
    if forms:
        kinds = sorted({forward.choice.form.value for _, forward in forms})
        yield Decision("Conv3d", f"{len(forms)} layers as {', '.join(kinds)}", "exact forms that this device has", AUTO)
    if masks:
        lost = "core's copy of the published VAE lost them"
        yield Decision("causal masks", f"put back in {len(masks)} attentions", lost)
    ways = "once more, reloaded, tiles, fp32, then the CPU"
    yield Decision("decode", "checked", f"wrong values or out of memory: {ways}; said there")
    if fitted.keeps:
        yield Decision("latents", "kept", "before each decode, for AnyGPU Recover Latents")


def _in_words(method: DecodeMethod) -> str:
    words = "fp32" * (method.dtype is FP32), f"in tiles of {method.tile} pixels" * (method.tile > 0)
    more = "on the CPU" * method.on_host, "without MIOpen" * (not method.library)
    return ", ".join(filter(None, (*words, *more))) or "as it is"


def _output_check(vae: Any, given: Tensor, doubts: list[str]) -> Callable[[Tensor], Tensor]:
    """Core's process_output after a check: InvalidOutputError if pixels are broken; milder faults go to ``doubts``."""
    finish, flat, done = vae.process_output, given.ndim < 4 or is_flat(given), [0]  # flat latents may be one colour

    def process(pixels: Tensor) -> Tensor:
        some = latents_of(vae, given)[done[0] : done[0] + len(pixels)]  # core decodes as many at once as fit
        done[0] += len(pixels)
        if pixels.ndim in (4, 5) and not flat and len(some) == len(pixels):
            frames = pixels if pixels.ndim == 5 else pixels.unsqueeze(2)
            fault = output_check.fault_in_frames(frames, max(1, frames.shape[-1] // some.shape[-1]), some)
        else:
            fault = "" if bool(pixels.isfinite().all()) else BROKEN
        if fault == BROKEN:
            raise InvalidOutputError(fault)
        doubts.extend([fault] if fault else [])
        return finish(pixels)

    return process


def _are_pictures(vae: Any, given: Tensor) -> bool:
    """True for latents or pixels of pictures and videos, False for sound, which may have as many axes."""
    return given.ndim > 3 and vae.output_channels > 2


def _whole(vae: Any) -> Any:
    """``vae`` with core's fallback to tiles raising instead, since that would run a network that is not loaded."""
    vae.__dict__.update(dict.fromkeys(TILED, _out_of_memory))
    return vae


def _out_of_memory(*_: Any, **__: Any) -> Tensor:
    raise torch.OutOfMemoryError("out of memory")


def _leave_host(patcher: Any) -> None:
    """Detach a ``patcher`` on the host, so that core loads its network anew, even if this fails halfway."""
    every = comfy.model_management.current_loaded_models
    every[:] = [each for each in every if each.model is not patcher]  # else core warns of a leak at each load
    try:
        patcher.detach()
    finally:
        patcher.model.model_loaded_weight_memory = 0  # counted as loaded, it would stay where it is


def _in_tiles(vae: Any, name: str, given: Tensor, tile: int) -> Tensor:
    """Core's tiled decode or encode, by ``name``, in tiles of ``tile`` pixels that overlap by a quarter."""
    decodes = name == "decode"
    if decodes and vae.latent_dim == 2 and given.ndim == 5:
        given = given[:, :, 0]
    cell = vae.spacial_compression_decode() if decodes else 1
    time = (vae.temporal_compression_decode() or 1) if decodes and vae.latent_dim == 3 else 1
    side, frames = max(2, tile // cell), max(2, FRAMES[tile] // time)
    chosen = {"tile_x": side, "tile_y": side, "overlap": side // 4}
    if vae.latent_dim == 3:
        chosen |= {"tile_t": frames, "overlap_t": max(1, frames // 4)}
    return getattr(vae, f"{name}_tiled")(given, **chosen)


@contextmanager
def _patches_on(patches: Iterator[tuple[nn.Module, str, Any]]) -> Iterator[None]:
    with Undo() as undo:
        for patch in list(patches):
            undo.set(*patch)
        yield


def lost_masks(network: nn.Module, attention: Attention) -> Iterator[tuple[nn.Module, str, Any]]:
    """(module, attribute, its new value) for each attention whose causal mask core lost.
    It is recognised by its projections in a network of 3-D convolutions: bare 1x1x1 convolutions (a module around
    one, as in Cosmos, attends within a frame), or one Linear for queries, keys and values with normalised heads.

    Source:
        Tencent-Hunyuan/HunyuanVideo and -1.5: prepare_causal_attention_mask in the middle block.
        genmoai/mochi, src/genmo/mochi_preview/vae/models.py: is_causal=True."""
    if not any(isinstance(module, nn.Conv3d) for module in network.modules()):
        return
    for module in network.modules():
        if is_foreign(type(module).forward):
            continue  # another pack's attention, which may have masks of its own
        if _is_over_frames(module):
            yield module, "forward", functools.partial(_causal_in_time, module, attention)
        elif hasattr(module, "optimized_attention") and isinstance(getattr(module, "q", None), nn.Conv3d):
            yield module, "optimized_attention", functools.partial(_causal_frames, attention)


def _causal_frames(attention: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention over the voxels of a video (B, C, T, H, W), each of which sees its own frame and those before it;
    frame by frame, which needs no mask and no matrix over all voxels."""
    shape, plane, parts = query.shape, query.shape[3] * query.shape[4], list[Tensor]()
    query, key, value = (each.flatten(2).transpose(1, 2)[:, None] for each in (query, key, value))
    for end in range(plane, shape[2] * plane + 1, plane):
        seen = (each[:, :, :end].contiguous() for each in (key, value))
        parts.append(attention(query[:, :, end - plane : end].contiguous(), *seen))
    return torch.cat(parts, dim=2)[:, 0].transpose(1, 2).reshape(shape)


def _causal_in_time(layer: Any, attention: Attention, x: Tensor) -> Tensor:
    """The forward of core's ``layer``, attention between frames at each place of ``x`` (B, C, T, H, W), made causal."""
    batch, _, frames, height, width = x.shape
    if frames == 1:
        return type(layer).forward(layer, x)
    both = layer.qkv(x.permute(0, 3, 4, 2, 1).flatten(0, 2)).unflatten(-1, (3, layer.num_heads, layer.head_dim))
    query, key, value = (each.transpose(1, 2) for each in both.unbind(2))
    if layer.qk_norm:
        query, key = functional.normalize(query, dim=-1), functional.normalize(key, dim=-1)
    seen = attention(query.contiguous(), key.contiguous(), value.contiguous(), causal=True)
    return layer.out(seen.transpose(1, 2).flatten(2)).unflatten(0, (batch, height, width)).permute(0, 4, 3, 1, 2)


def _is_over_frames(module: Any) -> bool:
    """True for the attention over frames of core's Mochi VAE, known by its parts."""
    parts = dict(module.named_children())
    if parts.keys() != {"qkv", "out"} or not all(isinstance(part, nn.Linear) for part in parts.values()):
        return False
    has_heads = {"num_heads", "head_dim", "qk_norm"} <= vars(module).keys()
    return has_heads and parts["qkv"].out_features == 3 * module.num_heads * module.head_dim
