"""Swapping the 3-D convolutions of a loaded part for exact replacements, and back.

    swapped = swap_conv3d(vae, choose={"conv3d": {"bf16": False}})   # or a Form, or a function of a Layer
    ...                                                              # attach the residency, encode, decode, detach it
    swapped.restore()

The objects stay what and where they are: only their class changes, to a subclass with another forward. Parameters,
state-dict keys and every reference to them hold, so whatever moves, streams, casts or adapts the layer goes on to.
"""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .conv3d_choice import Choice, Chooser, Layer, always, choose_by, tolerance
from .conv3d_forms import Form, Geometry, convolved, padded
from .errors import UnsupportedError
from .execution import HOST, execution_device
from .offload import borrow, misplaced

logger = logging.getLogger(__name__)
AUTOENCODERS = "diffusers.models.autoencoders.autoencoder_kl_"
READ_FRAMES_FIRST = (Form.FRAMES, Form.FRAME_CHUNKS, Form.MATMUL)


class Rewrite(nn.Module):
    """The mark of a swapped class."""


class SwappedConv3d(Rewrite):
    """``nn.Conv3d`` and upstream's CogVideoXSafeConv3d, whose pieces of time every form bounds by itself."""

    conv3d_choice: Choice

    def forward(self, input: Tensor) -> Tensor:
        """As the original: (B, C, T, H, W) or (C, T, H, W)."""
        x, choice, geometry = _aligned(input, self), self.conv3d_choice, _geometry(self)
        x = x if input.dim() == 5 else x.unsqueeze(0)
        edges, mode = _own_edges(self)
        if edges is not None:
            x = padded(x, edges, mode, choice.form in READ_FRAMES_FIRST)
        if self.weight.device == x.device and not hasattr(self, "lend"):
            out = convolved(choice.form, x, self.weight, self.bias, geometry, choice.chunk_bytes)
        else:
            with borrow(self, like=x) as (weight, bias):
                out = convolved(choice.form, x, weight, bias, geometry, choice.chunk_bytes)
        return out if input.dim() == 5 else out.squeeze(0)


class SwappedHunyuanCausal(Rewrite):
    """The causal convolution of HunyuanVideo and 1.5: edges in all directions, in front of time only."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """As the original."""
        return self.conv(padded(hidden_states, self.time_causal_padding, self.pad_mode, _reads_frames_first(self.conv)))


class SwappedCogVideoXCausal(Rewrite):
    """The causal convolution of Mochi; with zeros for edges upstream concatenates time and keeps its cache itself."""

    def fake_context_parallel_forward(self, inputs: Tensor, conv_cache: Tensor | None = None) -> Tensor:
        """``inputs`` with the frames that the kernel sees before them."""
        if self.pad_mode == "replicate":
            return padded(inputs, self.time_causal_padding, self.pad_mode, _reads_frames_first(self.conv))
        return super().fake_context_parallel_forward(inputs, conv_cache)


class SwappedLTXCausal(Rewrite):
    """The convolution of LTX-Video: edges of time repeated in front, or on both sides; zeros by the leaf."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """As the original."""
        taps = self.kernel_size[0]
        before, after = (taps - 1, 0) if self.is_causal else ((taps - 1) // 2,) * 2
        edges = (0, 0, 0, 0, before, after)
        return self.conv(padded(hidden_states, edges, "replicate", _reads_frames_first(self.conv)))


class SwappedHistoryPatchEmbed(Rewrite):
    """FramePack's three embeddings of clean latents; the coarser two repeat edges up to a whole patch."""

    def forward(
        self,
        latents_clean: Tensor | None = None,
        latents_clean_2x: Tensor | None = None,
        latents_clean_4x: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """As the original: (B, N, D) each."""
        return (
            None if latents_clean is None else _tokens(self.proj(latents_clean)),
            None if latents_clean_2x is None else _tokens(self.proj_2x(_to_multiple(latents_clean_2x, (2, 4, 4)))),
            None if latents_clean_4x is None else _tokens(self.proj_4x(_to_multiple(latents_clean_4x, (4, 8, 8)))),
        )


# Exact classes only: a subclass may pad elsewhere. HunyuanVideoPatchEmbed, HunyuanVideo15PatchEmbed and the original
# FramePack's HunyuanVideoPatchEmbedForCleanLatents do nothing but call their nn.Conv3d, which is swapped where it is.
REWRITES: dict[str, type[Rewrite]] = {
    "torch.nn.modules.conv.Conv3d": SwappedConv3d,
    f"{AUTOENCODERS}cogvideox.CogVideoXSafeConv3d": SwappedConv3d,
    f"{AUTOENCODERS}cogvideox.CogVideoXCausalConv3d": SwappedCogVideoXCausal,
    f"{AUTOENCODERS}hunyuan_video.HunyuanVideoCausalConv3d": SwappedHunyuanCausal,
    f"{AUTOENCODERS}hunyuanvideo15.HunyuanVideo15CausalConv3d": SwappedHunyuanCausal,
    f"{AUTOENCODERS}ltx.LTXVideoCausalConv3d": SwappedLTXCausal,
    "diffusers.models.transformers.transformer_hunyuan_video_framepack.HunyuanVideoHistoryPatchEmbed": (
        SwappedHistoryPatchEmbed
    ),
}


@dataclass
class Swapped:
    """What was swapped in one part, and the way back.

    ``choices`` is the form of each swapped layer by its name; ``left`` is why a layer stayed what it was.
    """

    choices: dict[str, Choice] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    _turned: list[tuple[nn.Module, type[nn.Module]]] = field(default_factory=list, repr=False)

    def __str__(self) -> str:
        counts: dict[tuple[str, str], int] = {}
        for choice in self.choices.values():
            row = (choice.form.value, choice.why)
            counts[row] = counts.get(row, 0) + 1
        lines = [f"{count} as {form} ({why})" for (form, why), count in counts.items()]
        lines += [f"{len(self.left)} left as they are"] if self.left else []
        return f"3-D convolutions: {'; '.join(lines) or 'none'}"

    def restore(self) -> None:
        """Every object as it was before; calling it again does nothing. Residencies that hook must be off."""
        for module, original in reversed(self._turned):
            _turn(module, original)
            module.__dict__.pop("conv3d_choice", None)
        self._turned.clear()


def swap_conv3d(
    root: nn.Module,
    choose: Form | Mapping[str, Any] | Chooser,
    report: Callable[[str], None] | None = None,
) -> Swapped:
    """Swap the 3-D convolutions of ``root`` for the forms that ``choose`` names; each is compared with its original.

    Call it when the weights are loaded and before a residency or ``torch.compile`` takes the part.

    Args:
        root: a VAE, a transformer, or one layer.
        choose: one form for all layers it covers; facts about the device, as :func:`choose_by` takes them; or a
            function from :class:`Layer` to a :class:`Choice`, or None to leave the layer alone.
        report: told one line about the whole, and one for each layer that failed its comparison.

    Raises:
        UnsupportedError: the part is swapped already, has no weights yet, or has a residency's hooks on.
    """
    chooser = always(choose) if isinstance(choose, Form) else choose_by(choose) if isinstance(choose, Mapping) else choose
    _check_ready(root)
    done = Swapped()
    for name, owner, leaves in _units(root, done.left):
        chosen = {label: chooser(_layer(label, leaf)) for label, leaf in leaves.items()}
        todo = {label: choice for label, choice in chosen.items() if choice is not None}
        done.left |= {label: "not chosen" for label in chosen.keys() - todo.keys()}
        if not todo:
            continue
        plans = {leaves[label]: choice for label, choice in todo.items()}
        fault = _fault(owner, list(leaves.values()), plans)
        if fault:
            line = f"3-D convolution {name or type(owner).__name__!r} stays as it is: {fault}"
            logger.warning(line)
            if report is not None:
                report(line)
            done.left |= dict.fromkeys(todo, fault)
            continue
        done.choices |= todo
        for module in dict.fromkeys((*plans, owner)):
            if _rewrite_of(module) is not None:
                done._turned.append((module, type(module)))
                if module in plans:
                    module.conv3d_choice = plans[module]
                _turn(module, _rewritten(type(module)))
    if report is not None:
        report(str(done))
    return done


def _check_ready(root: nn.Module) -> None:
    """Refuse a part to which a swap would come too late or too early."""
    for name, module in root.named_modules():
        found = None
        if isinstance(module, Rewrite):
            found, fix = "is swapped already", "Call restore() on the earlier swap first."
        elif hasattr(module, "_hf_hook") or "group_offloading" in getattr(_registry(module), "hooks", ()):
            found, fix = "has the hooks of a residency on it", "Swap before the residency, or take it off first."
        elif isinstance(module, nn.Conv3d) and module.weight.device.type == "meta":
            found, fix = "has its weights on meta", "Load the weights first."
        if found is not None:
            label = f"{type(root).__name__} {name}".rstrip()
            raise UnsupportedError(f"{label} {found}", expected="a loaded part that no residency holds", fix=fix)


def _units(root: nn.Module, left: dict[str, str]) -> Iterator[tuple[str, nn.Module, dict[str, nn.Conv3d]]]:
    """(name, module, its 3-D convolutions by name) of what is swapped and compared as one: a wrapper, or a lone leaf.

    ``left`` is told of convolutions that cannot be swapped.
    """
    taken: set[nn.Module] = set()
    for name, module in root.named_modules():
        if module in taken:
            continue
        rewrite = _rewrite_of(module)
        reason = _obstacle(module, rewrite) if isinstance(module, nn.Conv3d) else ""
        if reason:
            left[name] = reason
        elif rewrite is SwappedConv3d:
            yield name, module, {name: module}
        elif rewrite is not None:
            inner = {f"{name}.{key}".lstrip("."): child for key, child in module.named_children()}
            obstacles = {key: _obstacle(child, _rewrite_of(child)) for key, child in inner.items()}
            if not any(obstacles.values()):
                taken.update(inner.values())
                yield name, module, inner


def _obstacle(module: nn.Module, rewrite: type[Rewrite] | None) -> str:
    """Why this layer cannot be swapped as an ``nn.Conv3d``; empty if it can."""
    if rewrite is not SwappedConv3d:
        return f"of class {type(module).__qualname__}, which may pad elsewhere"
    if type(module.weight.data) is not Tensor:
        return f"quantised, as {type(module.weight.data).__name__}"
    if not any(True for _ in _kept_forwards(module)) and "forward" in module.__dict__:
        return "its forward was replaced"
    return ""


def _fault(owner: nn.Module, leaves: list[nn.Conv3d], plans: Mapping[nn.Module, Choice]) -> str:
    """Why the swapped ``owner`` is not the same function on a small random input; empty if it is.

    Twins compute: the original on the CPU, which has every convolution, the swapped one where the weights are.
    """
    device = leaves[0].weight.device
    stored = leaves[0].weight.dtype
    dtype = torch.float32 if stored.itemsize == 1 else stored
    generator, inputs = torch.Generator().manual_seed(0), []
    for leaf in leaves:
        rows = zip(leaf.kernel_size, leaf.dilation, leaf.stride, strict=True)
        size = [(taps - 1) * gap + 1 + step for taps, gap, step in rows]
        inputs.append(torch.randn(1, leaf.in_channels, *size, generator=generator).to(dtype))
    with torch.inference_mode(False), torch.no_grad():
        original = _twin(owner, {}, HOST, dtype)
        swapped = _twin(owner, plans, device, dtype)
        expected = _flat(original(*inputs))
        try:
            found = _flat(swapped(*(x.to(device) for x in inputs)))
        except (RuntimeError, NotImplementedError, ValueError) as error:
            return f"its replacement failed: {str(error).splitlines()[0]}"
        terms = max(leaf.weight[0].numel() for leaf in leaves)
        return next(filter(None, map(functools.partial(_mismatch, terms=terms), expected, found)), "")


def _mismatch(expected: Tensor, found: Tensor, terms: int) -> str:
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return f"its replacement gave {tuple(found.shape)} {found.dtype} for {tuple(expected.shape)} {expected.dtype}"
    error = float((found.cpu().double() - expected.double()).abs().max() / expected.double().abs().max().clamp_min(1e-30))
    bound = tolerance(expected.dtype, terms, found.device)
    return "" if error <= bound else f"its replacement differs by {error:.1e} of the largest value, {bound:.1e} allowed"


def _twin(module: nn.Module, plans: Mapping[nn.Module, Choice], device: torch.device, dtype: torch.dtype) -> nn.Module:
    """``module`` without its hooks, swapped where ``plans`` says so; tensors are shared where nothing has to change."""
    cls = type(module)
    swaps = module in plans or (bool(plans) and _rewrite_of(module) not in (None, SwappedConv3d))
    twin = cls.__new__(_rewritten(cls) if swaps else cls)
    nn.Module.__init__(twin)
    left_out = {*twin.__dict__, "forward", "_old_forward", "_hf_hook", "_diffusers_hook"}
    twin.__dict__.update({key: value for key, value in module.__dict__.items() if key not in left_out})
    for key, value in module.named_parameters(recurse=False):
        twin.register_parameter(key, nn.Parameter(value.detach().to(device, dtype), requires_grad=False))
    for key, child in module.named_children():
        twin.add_module(key, _twin(child, plans, device, dtype))
    if module in plans:
        twin.conv3d_choice = plans[module]
    return twin


def _turn(module: nn.Module, cls: type[nn.Module]) -> None:
    """Give ``module`` another class, also where hooks keep the forward of the one it had."""
    for keep in list(_kept_forwards(module)):
        keep(types.MethodType(cls.forward, module))
    module.__class__ = cls


def _kept_forwards(module: nn.Module) -> Iterator[Callable[[Any], None]]:
    """Setters for the places that hold the forward of the class of ``module``: taken-off and diffusers' hooks."""

    def is_own(forward: Any) -> bool:
        of, function = getattr(forward, "__self__", None), getattr(forward, "__func__", None)
        return of is module and function is type(module).forward

    if is_own(module.__dict__.get("forward")):
        yield functools.partial(module.__dict__.__setitem__, "forward")
    for reference in getattr(_registry(module), "_fn_refs", ()):
        for key in ("forward", "original_forward"):
            if is_own(getattr(reference, key)):
                yield functools.partial(setattr, reference, key)


def _registry(module: nn.Module) -> Any:
    return module.__dict__.get("_diffusers_hook")


def _rewrite_of(module: nn.Module) -> type[Rewrite] | None:
    return REWRITES.get(f"{type(module).__module__}.{type(module).__qualname__}")


@functools.cache
def _rewritten(original: type[nn.Module]) -> type[nn.Module]:
    """``original`` with the forward of its rewrite, under its own name, which offload plans go by."""
    rewrite = REWRITES[f"{original.__module__}.{original.__qualname__}"]
    return type(original.__name__, (rewrite, original), {"__doc__": rewrite.__doc__, "__module__": original.__module__})


def _layer(name: str, leaf: nn.Conv3d) -> Layer:
    return Layer(name, leaf.in_channels, leaf.out_channels, leaf.kernel_size, _geometry(leaf), leaf.weight.dtype)


def _geometry(leaf: nn.Conv3d) -> Geometry:
    """How ``leaf`` walks; no padding where it needs :func:`_own_edges`."""
    plain = leaf.padding_mode == "zeros" and not isinstance(leaf.padding, str)
    return Geometry(leaf.stride, leaf.padding if plain else (0, 0, 0), leaf.dilation, leaf.groups)


def _own_edges(leaf: nn.Conv3d) -> tuple[tuple[int, ...] | None, str]:
    """What ``leaf`` pads with besides as many zeros on both sides: (edges as in ``F.pad``, mode)."""
    if leaf.padding_mode == "zeros" and not isinstance(leaf.padding, str):
        return None, ""
    mode = "constant" if leaf.padding_mode == "zeros" else leaf.padding_mode
    return tuple(leaf._reversed_padding_repeated_twice), mode


def _aligned(x: Tensor, leaf: nn.Conv3d) -> Tensor:
    """``x`` on the device where ``leaf`` executes.

    Raises:
        UnsupportedError: ``x`` is on an accelerator, and the weight is a master copy in host memory or on meta.
    """
    if x.device == leaf.weight.device:
        return x
    device = execution_device(modules=(leaf,), host=leaf.weight.device)
    if x.device == device or hasattr(leaf, "lend"):
        return x
    if device.type in (HOST.type, "meta"):
        raise misplaced(leaf, x)
    logger.warning("%s", misplaced(leaf, x))
    return x.to(device)


def _reads_frames_first(leaf: nn.Module) -> bool:
    choice = getattr(leaf, "conv3d_choice", None)
    return choice is not None and choice.form in READ_FRAMES_FIRST


def _to_multiple(x: Tensor, patch: tuple[int, int, int]) -> Tensor:
    time, height, width = (-extent % step for extent, step in zip(x.shape[2:], patch, strict=True))
    return padded(x, (0, width, 0, height, 0, time), "replicate")


def _tokens(x: Tensor) -> Tensor:
    return x.flatten(2).transpose(1, 2)


def _flat(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else [value for value in result if isinstance(value, Tensor)]
