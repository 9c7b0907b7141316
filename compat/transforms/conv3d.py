"""The 3-D convolutions of a loaded part, swapped for exact replacements, and back. Only the class of a module changes,
to a subclass with another forward: its parameters, state-dict keys and all references to it stay valid."""

from __future__ import annotations

import functools
import logging
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..device.execution import HOST, hooked_device, placed, to_host
from ..errors import UnsupportedError
from ..memory.hooks import misplaced, weights_on
from .conv3d_choice import Chooser, Conv3dChoice, Conv3dLayer, tolerance
from .conv3d_methods import Conv3dMethod, Geometry, convolve, padded

logger = logging.getLogger(__name__)
ADDED = ("conv3d_choice", "conv3d_reported")  # attributes that a swapped layer has besides its own
AUTOENCODERS = "diffusers.models.autoencoders.autoencoder_kl_"
FRAMEPACK = "diffusers.models.transformers.transformer_hunyuan_video_framepack"


@dataclass
class Swapped:
    """The layers of one part that were swapped, by name, and why others were left; :meth:`restore` goes back."""

    choices: dict[str, Conv3dChoice] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    _swapped: list[tuple[nn.Module, type[nn.Module]]] = field(default_factory=list, repr=False)

    def __str__(self) -> str:
        counts = Counter((choice.form.value, choice.why) for choice in self.choices.values())
        lines = [f"{count} as {form} ({why})" for (form, why), count in counts.items()]
        lines += [f"{len(self.left)} left as they are"] if self.left else []
        return f"3-D convolutions: {'; '.join(lines) or 'none'}"

    def restore(self) -> None:
        """Give every object its class back; calling it again does nothing. The offloader must be off."""
        for module, _ in self._swapped:
            _check_free(module, type(module).__name__)
        for module, original in reversed(self._swapped):
            _set_class(module, original)
            for name in ADDED:
                module.__dict__.pop(name, None)
        self._swapped.clear()


@dataclass(frozen=True)
class SwapUnit:
    """Modules that are swapped and compared as one: a lone convolution, or a known wrapper with those inside it."""

    name: str
    owner: nn.Module
    layers: Mapping[str, nn.Conv3d]
    inputs: tuple[nn.Conv3d, ...]  # the convolution that reads each input of ``owner``


def swap_conv3d(root: nn.Module, choose: Chooser) -> Swapped:
    """Swap the 3-D convolutions of ``root`` as ``choose`` says; one that differs from its original is left, and logged.
    Call it when the weights are loaded and before an offloader or ``torch.compile`` takes the part; else, and for a
    part that is swapped already, it raises UnsupportedError."""
    _check_ready(root)
    done = Swapped()
    for unit in _units(root, done.left):
        chosen = {name: choose(layer_of(name, layer)) for name, layer in unit.layers.items()}
        todo = {name: choice for name, choice in chosen.items() if choice is not None}
        done.left |= dict.fromkeys(chosen.keys() - todo.keys(), "not chosen")
        if not todo:
            continue
        plans: dict[nn.Module, Conv3dChoice] = {unit.layers[name]: choice for name, choice in todo.items()}
        if fault := _fault(unit, plans):
            logger.warning("3-D convolution %r stays as it is: %s", unit.name or type(unit.owner).__name__, fault)
            done.left |= dict.fromkeys(todo, fault)
            continue
        done.choices |= todo
        for module in dict.fromkeys((*plans, unit.owner)):
            if module in plans:
                module.conv3d_choice = plans[module]  # type: ignore[assignment]
            done._swapped.append((module, type(module)))
            kind: Any = type(module)
            _set_class(module, swapped_class(kind))
    return done


def layer_of(name: str, layer: nn.Conv3d, dtype: torch.dtype | None = None) -> Conv3dLayer:
    """``layer`` and its name as plain values; ``dtype`` is the one that it computes in, None for its weight's."""
    channels = {"in_channels": layer.in_channels, "out_channels": layer.out_channels}
    kernel: Any = layer.kernel_size
    return Conv3dLayer(name, kernel=kernel, geometry=geometry_of(layer), dtype=dtype or layer.weight.dtype, **channels)


def _check_ready(root: nn.Module) -> None:
    """Raise UnsupportedError where a module of ``root`` is hooked by an offloader, swapped already, or on meta."""
    for name, module in root.named_modules():
        label = f"{type(root).__name__} {name}".rstrip()
        _check_free(module, label)
        if isinstance(module, SwappedModule):
            found = f"{label} is swapped already"
            raise UnsupportedError(found, expected="a part as it was loaded", fix="Call restore() on that swap first.")
        if isinstance(module, nn.Conv3d) and module.weight.device.type == "meta":
            found = f"{label} has its weights on meta"
            raise UnsupportedError(found, expected="a loaded part", fix="Load the weights before the swap.")


def _check_free(module: nn.Module, label: str) -> None:
    """Raise UnsupportedError where an offloader has wrapped the forward of ``module``: it would call the old one."""
    if hasattr(module, "_hf_hook") or "group_offloading" in getattr(_registry(module), "hooks", ()):
        found, expected = f"{label} has the hooks of an offloader on it", "a part that no offloader holds"
        fix = "Take the offloader off, swap or restore, and put it back."
        raise UnsupportedError(found, expected=expected, fix=fix)


def _units(root: nn.Module, left: dict[str, str]) -> Iterator[SwapUnit]:
    """The convolutions of ``root`` and their known wrappers; adds those that cannot be swapped to ``left``, and why."""
    taken: set[nn.Module] = set()
    for name, module in root.named_modules():
        rewrite = swap_of(module)
        if module in taken or (rewrite is None and not isinstance(module, nn.Conv3d)):
            continue
        if reason := _obstacle(module):
            left[name] = reason
        elif rewrite is SwappedConv3d:
            yield SwapUnit(name, module, {name: module}, (module,))  # type: ignore[dict-item, arg-type]
        else:
            inside = {key: each for key, each in module.named_modules(prefix=name) if isinstance(each, nn.Conv3d)}
            taken.update(inside.values())
            obstacles = {key: reason for key, layer in inside.items() if (reason := _obstacle(layer))}
            left |= obstacles
            # An adapter wraps the convolution that it adapts.
            outer = [getattr(child, "base_layer", child) for child in module.children()]
            layers = {key: layer for key, layer in inside.items() if key not in obstacles}
            yield SwapUnit(name, module, layers, tuple(layer for layer in outer if isinstance(layer, nn.Conv3d)))


def _obstacle(module: nn.Module) -> str:
    """The reason why ``module`` cannot be swapped; empty where it can."""
    if swap_of(module) is None:
        return f"of class {type(module).__qualname__}, which may do its own padding"
    if isinstance(module, nn.Conv3d) and type(module.weight.data) is not Tensor:
        return f"quantised, as {type(module.weight.data).__name__}"
    if "forward" in module.__dict__ and not list(_saved_forwards(module)):
        return "its forward has been replaced"
    return ""


def _set_class(module: nn.Module, cls: type[nn.Module]) -> None:
    """Give ``module`` another class, and that one's forward to accelerate and diffusers where they saved the old."""
    for save in list(_saved_forwards(module)):
        save(types.MethodType(cls.forward, module))
    module.__class__ = cls


def _saved_forwards(module: nn.Module) -> Iterator[Callable[[Any], None]]:
    """Setters for the places that hold the forward of the class of ``module``: accelerate's and diffusers'."""

    def is_own(forward: Any) -> bool:
        function = getattr(forward, "__func__", None)
        return getattr(forward, "__self__", None) is module and function is type(module).forward

    if is_own(module.__dict__.get("forward")):
        yield functools.partial(module.__dict__.__setitem__, "forward")
    for reference in getattr(_registry(module), "_fn_refs", ()):
        for name in ("forward", "original_forward"):
            if is_own(getattr(reference, name)):
                yield functools.partial(setattr, reference, name)


def _registry(module: nn.Module) -> Any:
    return module.__dict__.get("_diffusers_hook")


def _fault(unit: SwapUnit, plans: Mapping[nn.Module, Conv3dChoice]) -> str:
    """The difference of the swapped unit on a small random input, in words; empty if it is the same function.
    The original computes in fp32 on the CPU, the swapped one where the weights are, on a CPU in fp32 too: oneDNN's
    16-bit kernels for AMX are wrong at some strides (pytorch#169688), and in the end another device will compute."""
    first = next(iter(unit.layers.values())).weight
    half_on_host = first.device == HOST and first.dtype.itemsize == 2
    dtype = torch.float32 if half_on_host or first.dtype.itemsize == 1 else first.dtype
    generator, inputs = torch.Generator().manual_seed(0), []
    for layer in unit.inputs:
        rows = zip(layer.kernel_size, layer.dilation, layer.stride, strict=True)
        size = [(taps - 1) * gap + 1 + step for taps, gap, step in rows]  # two positions of the kernel, or more
        inputs.append(torch.randn(1, layer.in_channels, *size, generator=generator).to(dtype))
    with torch.inference_mode(False), torch.no_grad():
        wide = torch.promote_types(dtype, torch.float32)
        original = _clone_on(unit.owner, {}, HOST, wide)
        expected = [each.to(dtype) for each in _tensors(original(*(x.to(wide) for x in inputs)))]
        try:
            results = _tensors(_clone_on(unit.owner, plans, first.device, dtype)(*placed(inputs, first.device)))
        except (RuntimeError, ValueError) as error:
            return f"its replacement failed: {str(error).splitlines()[0]}"
        terms = max(layer.weight[0].numel() for layer in unit.layers.values())
        faults = (_mismatch(each, result, terms) for each, result in zip(expected, results, strict=True))
        return next(filter(None, faults), "")


def _mismatch(expected: Tensor, result: Tensor, terms: int) -> str:
    """The difference of ``result``, sums of so many ``terms``, beyond rounding, in words; empty for none."""
    if expected.shape != result.shape or expected.dtype != result.dtype:
        return f"its replacement gave {tuple(result.shape)} {result.dtype} for {tuple(expected.shape)} {expected.dtype}"
    largest = expected.double().abs().max().clamp_min(torch.finfo(torch.float32).tiny)
    error = float((to_host(result).double() - expected.double()).abs().max() / largest)
    bound = tolerance(expected.dtype, terms, result.device)
    return "" if error <= bound else f"its replacement differs by {error:.1e} of the largest value, {bound:.1e} allowed"


def _clone_on(
    module: nn.Module, plans: Mapping[nn.Module, Conv3dChoice], device: torch.device, dtype: torch.dtype
) -> Any:
    """A copy of ``module`` on ``device`` in ``dtype``, with ``plans`` swapped and no hooks; shares equal tensors."""
    cls: Any = type(module)
    wrapper = swap_of(module) not in (None, SwappedConv3d)
    clone: Any = cls.__new__(swapped_class(cls) if module in plans or (plans and wrapper) else cls)
    nn.Module.__init__(clone)
    own = {*clone.__dict__, "forward", "_diffusers_hook"}
    clone.__dict__.update({name: value for name, value in module.__dict__.items() if name not in own})
    for name, value in module._parameters.items():
        copied = None if value is None else nn.Parameter(placed(value.detach(), device, dtype), requires_grad=False)
        clone.register_parameter(name, copied)
    for name, buffer in module.named_buffers(recurse=False):
        clone.register_buffer(name, placed(buffer, device))
    for name, child in module.named_children():
        clone.add_module(name, _clone_on(child, plans, device, dtype))
    if module in plans:
        clone.conv3d_choice = plans[module]
    return clone


def _tensors(result: Any) -> list[Tensor]:
    values: Iterable[Any] = [result] if isinstance(result, Tensor) else result
    return [value for value in values if isinstance(value, Tensor)]


class SwappedModule(nn.Module):
    """The base of all swapped classes, by which a swapped module is known."""


class SwappedConv3d(SwappedModule):
    """``nn.Conv3d``, and upstream's CogVideoXSafeConv3d, which cuts its input in time, as every form does by itself."""

    conv3d_choice: Conv3dChoice
    weight: Tensor
    bias: Tensor | None

    def forward(self, input: Tensor) -> Tensor:
        """The convolution by ``conv3d_choice``, of (B, C, T, H, W) or (C, T, H, W); its weights may be streamed."""
        choice, x = self.conv3d_choice, _aligned(input, self)
        x = x if input.dim() == 5 else x.unsqueeze(0)
        edges, mode = own_edges(self)
        if edges is not None:
            x = padded(x, edges, mode, choice.form is Conv3dMethod.FRAMES)
        if self.weight.device == x.device and not hasattr(self, "weights_on"):
            out = convolve(choice.form, x, self.weight, self.bias, geometry_of(self), choice.chunk_bytes)
        else:
            with weights_on(self, like=x) as (weight, bias):
                out = convolve(choice.form, x, weight, bias, geometry_of(self), choice.chunk_bytes)
        return out if input.dim() == 5 else out.squeeze(0)


class SwappedCausal(SwappedModule):
    """The causal convolutions of HunyuanVideo, 1.5 and LTX-Video, which pad before the convolution inside does."""

    conv: nn.Module

    def forward(self, hidden_states: Tensor) -> Tensor:
        mode = getattr(self, "pad_mode", "replicate")
        return self.conv(padded(hidden_states, causal_edges(self), mode, _reads_frames_first(self.conv)))


class SwappedCogVideoXCausal(SwappedModule):
    """The causal convolution of Mochi; upstream's own code pads with zeros, and keeps a cache of frames then."""

    conv: nn.Module
    time_causal_padding: tuple[int, ...]
    pad_mode: str

    def fake_context_parallel_forward(self, inputs: Tensor, conv_cache: Tensor | None = None) -> Tensor:
        if self.pad_mode == "replicate":
            return padded(inputs, self.time_causal_padding, self.pad_mode, _reads_frames_first(self.conv))
        return super().fake_context_parallel_forward(inputs, conv_cache)  # type: ignore[misc]


class SwappedHistoryPatchEmbed(SwappedModule):
    """FramePack's three embeddings of clean latents; the coarser two repeat edges up to a whole patch."""

    proj: nn.Module
    proj_2x: nn.Module
    proj_4x: nn.Module

    def forward(
        self, latents_clean: Tensor | None = None, latents_clean_2x: Tensor | None = None,
        latents_clean_4x: Tensor | None = None,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        given, patches = (latents_clean, latents_clean_2x, latents_clean_4x), ((1, 1, 1), (2, 4, 4), (4, 8, 8))
        rows = zip(given, patches, (self.proj, self.proj_2x, self.proj_4x), strict=True)
        seen = (None if x is None else proj(_to_multiple(x, patch)) for x, patch, proj in rows)
        return tuple(None if x is None else x.flatten(2).transpose(1, 2) for x in seen)


# Exact classes only: a subclass may pad elsewhere. HunyuanVideoPatchEmbed, HunyuanVideo15PatchEmbed and the original
# FramePack's HunyuanVideoPatchEmbedForCleanLatents do nothing but call their nn.Conv3d, which is swapped where it is.
SWAPS: dict[str, type[SwappedModule]] = {
    "torch.nn.modules.conv.Conv3d": SwappedConv3d,
    f"{AUTOENCODERS}cogvideox.CogVideoXSafeConv3d": SwappedConv3d,
    f"{AUTOENCODERS}cogvideox.CogVideoXCausalConv3d": SwappedCogVideoXCausal,
    f"{AUTOENCODERS}hunyuan_video.HunyuanVideoCausalConv3d": SwappedCausal,
    f"{AUTOENCODERS}hunyuanvideo15.HunyuanVideo15CausalConv3d": SwappedCausal,
    f"{AUTOENCODERS}ltx.LTXVideoCausalConv3d": SwappedCausal,
    f"{FRAMEPACK}.HunyuanVideoHistoryPatchEmbed": SwappedHistoryPatchEmbed,
}


def swap_of(module: nn.Module) -> type[SwappedModule] | None:
    """The class that takes over a module of exactly this class, or None."""
    return SWAPS.get(f"{type(module).__module__}.{type(module).__qualname__}")


@functools.cache
def swapped_class(original: Any) -> type[nn.Module]:
    """A subclass of ``original`` with the forward of its rewrite, under the same name, by which offload plans go."""
    rewrite = SWAPS[f"{original.__module__}.{original.__qualname__}"]
    return type(original.__name__, (rewrite, original), {"__doc__": rewrite.__doc__, "__module__": original.__module__})


def geometry_of(layer: Any) -> Geometry:
    """The geometry of an ``nn.Conv3d``; its padding if that is equally many zeros on both sides, else none."""
    plain = layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    return Geometry(layer.stride, layer.padding if plain else (0, 0, 0), layer.dilation, layer.groups)


def own_edges(layer: Any) -> tuple[tuple[int, ...] | None, str]:
    """The padding of ``layer`` that :func:`geometry_of` leaves out: edges and mode of ``F.pad``, or (None, "")."""
    if layer.padding_mode == "zeros" and not isinstance(layer.padding, str):
        return None, ""
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    return tuple(layer._reversed_padding_repeated_twice), mode


def causal_edges(conv: Any) -> tuple[int, int, int, int, int, int]:
    """The edges, as in ``F.pad``, that a causal ``conv`` adds before it calls the convolution inside it.
    LTX-Video repeats frames in front, or on both sides; its rows and columns are left to the layer."""
    if hasattr(conv, "time_causal_padding"):
        return tuple(conv.time_causal_padding)  # type: ignore[return-value]
    taps = conv.kernel_size[0]
    before, after = (taps - 1, 0) if conv.is_causal else ((taps - 1) // 2,) * 2
    return 0, 0, 0, 0, before, after


def _aligned(x: Tensor, layer: SwappedConv3d) -> Tensor:
    """``x`` on the device where ``layer`` executes, by its hooks or its weight; a move is logged once for the layer.
    Raises UnsupportedError where no hook names a device and the weight is on host or meta."""
    if x.device == layer.weight.device:
        return x
    device = hooked_device(layer) or layer.weight.device
    if x.device == device or hasattr(layer, "weights_on"):
        return x
    if device.type in (HOST.type, torch.device("meta").type):
        raise misplaced(layer, x)
    if not layer.__dict__.get("conv3d_reported"):
        logger.warning("%s AnyGPU moves it to %s.", misplaced(layer, x), device)
        layer.__dict__["conv3d_reported"] = True
    return placed(x, device)


def _reads_frames_first(layer: nn.Module) -> bool:
    """True where ``layer`` convolves frame by frame, and so reads (B, T, C, H, W) in memory without a copy."""
    choice = getattr(layer, "conv3d_choice", None)
    return choice is not None and choice.form is Conv3dMethod.FRAMES


def history_tables(
    tables: tuple[Tensor, Tensor], height: int, width: int, patch: tuple[int, int, int]
) -> tuple[Tensor, Tensor]:
    """FramePack's rotary tables (T * H * W, D) of one history, one row per ``patch``, by concatenation and means.
    The original (``_pad_rotary_emb``) pads and pools in 5-D, which some devices lack and others get wrong."""

    def per_patch(table: Tensor) -> Tensor:
        whole = _to_multiple(table.unflatten(0, (-1, height, width)).permute(3, 0, 1, 2)[None], patch)[0]
        cells = whole.unflatten(3, (-1, patch[2])).unflatten(2, (-1, patch[1])).unflatten(1, (-1, patch[0]))
        return cells.permute(1, 3, 5, 0, 2, 4, 6).mean((4, 5, 6)).flatten(0, 2)

    cosines, sines = tables
    return per_patch(cosines), per_patch(sines)


def _to_multiple(x: Tensor, patch: tuple[int, int, int]) -> Tensor:
    """``x`` (B, C, T, H, W) with its ends repeated up to whole patches."""
    time, height, width = (-extent % step for extent, step in zip(x.shape[2:], patch, strict=True))
    return padded(x, (0, width, 0, height, 0, time), "replicate")
