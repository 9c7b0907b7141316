"""Every class that core runs, under Fit Model on an old device: reached from outside, loud, and with loud rows."""

import functools
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import attention_cases
import comfy.ldm.modules.attention as core_attention
import comfy.model_base as model_base
import comfy.model_patcher
import comfy.supported_models as supported
import comfyui_version
import torch
from anygpu.host.core import model as core_model
from anygpu.host.core.ownership import is_linear
from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from host.inside import core_classes  # noqa: F401, which adds its cases
from host.inside.core_fit import PEAK, traces, turing
from host.inside.core_tiny import CASES, HOST, LARGEST, error, louder, made, output

HALF, FULL = torch.float16, torch.float32
MASSIVE = 1e6  # one value of the residual
FACTORS = (16.0, 100.0, 1_000.0, 10_000.0)
LEVELS = (0.9, 0.87125, 0.64237, 0.33141, 0.05037)  # of noise; a thousand times the first is the same in fp16
FUNCTIONS = ("attention_basic", "attention_split", "attention_sub_quad", "attention_pytorch")
PRODUCTS = ("mm", "addmm", "bmm", "matmul", "linear", "convolution", "conv1d", "conv2d", "conv3d")
UNCOUNTED = (nn.Conv1d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d)
STEADY = "trained"
NEEDED = {"in_channels": 4, "hidden_size": 64}  # which some rows of core's read


def holds_matrix(module: nn.Module) -> bool:
    """True if a module multiplies by a matrix of its own, whoever wrote it."""
    matrices = (each for each in module.parameters(recurse=False) if each.ndim > 1)
    known = isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)) or hasattr(module, "weight")
    leaf = next(module.children(), None) is None and not isinstance(module, nn.Embedding)
    return known and leaf and next(matrices, None) is not None


class Calls:
    """Calls of core's attention.

    Args:
        chosen: one of :data:`FUNCTIONS`, which then is core's; empty leaves core's choice.
    """

    def __init__(self, chosen: str = "") -> None:
        self.chosen, self.running = chosen, 0
        self.now: list[int] = []
        self.all = self.reachable = self.before = 0

    def counted(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Tensor:
            if not self.now:
                self.all += self.running
                self.before += not self.running
                options = kwargs.get("transformer_options") or {}
                self.reachable += self.running and "optimized_attention_override" in options
            self.now.append(1)
            try:
                return function(*args, **kwargs)
            finally:
                self.now.pop()

        return called

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count inside the block, whichever module of core's calls."""
        code, undo = core_attention.attention_basic.__code__, []
        for module in [module for name, module in sys.modules.items() if name.startswith("comfy.")]:
            for name, value in list(vars(module).items()):
                if getattr(value, "__code__", None) is code:
                    chosen = getattr(core_attention, self.chosen) if self.chosen and "optimized" in name else value
                    undo.append((module, name, value, self.counted(chosen)))
        for module, name, _, counted in undo:
            setattr(module, name, counted)
        try:
            yield
        finally:
            for module, name, value, _ in undo:
                setattr(module, name, value)


class Below(TorchDispatchMode):
    """The layers of a network as the operations below see them.

    Args:
        network: the network. calls: of core's attention.
    """

    def __init__(self, network: nn.Module, calls: Calls) -> None:
        super().__init__()
        self.calls, self.runs, self.direct = calls, 0, 0
        self.inside: list[tuple[nn.Module, bool]] = []
        self.before: set[nn.Module] = set()
        self.called: set[nn.Module] = set()
        self.safe: set[nn.Module] = set()
        self.fp32: set[nn.Module] = set()
        layers = [module for module in network.modules() if holds_matrix(module)]
        self.hooks = [network.register_forward_pre_hook(self._start), network.register_forward_hook(self._end)]
        self.hooks += [layer.register_forward_pre_hook(self._enter) for layer in layers]
        self.hooks += [layer.register_forward_hook(lambda *_: self.inside.pop() and None) for layer in layers]

    def _start(self, *_: Any) -> None:
        self.calls.running = 1
        self.runs += 1

    def _end(self, *_: Any) -> None:
        self.calls.running = 0

    def _enter(self, layer: nn.Module, given: tuple[Any, ...]) -> None:
        self.inside.append((layer, getattr(given[0], "dtype", None) is FULL))
        (self.called if self.calls.running else self.before).add(layer)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        dtypes = {each.dtype for each in args if isinstance(each, Tensor)}
        if name in PRODUCTS and self.inside and self.inside[-1][1]:
            if dtypes == {HALF}:
                self.safe.add(self.inside[-1][0])
            elif dtypes == {FULL} and self.calls.running:
                self.fp32.add(self.inside[-1][0])
        self.direct += "scaled_dot_product" in name and not self.calls.now
        return func(*args, **(kwargs or {}))

    def __exit__(self, *given: Any) -> None:
        for hook in self.hooks:
            hook.remove()
        super().__exit__(*given)


def _quiet(_model: Any, _name: str) -> None:
    """Leave the network as it was trained."""


def _loud(model: Any, name: str) -> None:
    """A residual beyond what fp16 can hold."""
    louder(model, name, PEAK)


def _massive(model: Any, name: str) -> None:
    """One value of the residual beyond it, at one position only."""

    def add(_layer: Any, _given: Any, found: Tensor) -> Tensor:
        found = found.clone()
        found.view(-1)[0] += MASSIVE
        return found

    model.model.diffusion_model.get_submodule(CASES[name].loud).register_forward_hook(add)


def _rows(factor: float, model: Any, _name: str) -> None:
    """One row of every third Linear many times larger."""
    for index, layer in enumerate([*filter(is_linear, model.model.diffusion_model.modules())][::3]):
        row = layer.weight[index % layer.out_features]
        with torch.no_grad():
            row *= min(factor, LARGEST / max(float(row.abs().amax()), 1e-9))


SCENES: dict[str, Callable[[Any, str], None]] = {
    "trained": _quiet,
    "loud": _loud,
    "massive": _massive,
    **{f"rows x{factor:g}": functools.partial(_rows, factor) for factor in FACTORS},
}


def run(model: Any, name: str, level: float = LEVELS[0]) -> Tensor:
    """The output of a model at a noise level, which no earlier call has prepared."""
    getattr(model.model.diffusion_model, "clear_kv_cache", lambda: None)()
    signal = 0.0 if level == LEVELS[0] else 1 - level
    return output(model, name, sigmas=(level, 0.0), signal=signal).double()


def fitted(model: Any, tell: Callable[[str], None]) -> tuple[Any, list[str]]:
    """A model under Fit Model with safe fp16, also where auto leaves it as loaded; and what auto decides."""
    found, decisions = core_model.fit_model(model, keep_latents="never", machine=turing(), tell=tell)
    if not decisions[0].verdict.startswith("fp16-safe"):
        found, _ = core_model.fit_model(model, "fp16-safe", keep_latents="never", machine=turing(), tell=tell)
    return found, [str(each) for each in decisions]


def reached(name: str) -> dict[str, Any] | None:
    """The layers and attention calls of a class that are in safe fp16, counted from below, and what is said of them.

    None where this ComfyUI has no such row.
    """
    if not hasattr(supported, CASES[name].table):
        return None
    model, lines, calls = made(name), list[str](), Calls()
    network = model.model.diffusion_model
    _, decided = fitted(model, lines.append)
    fit, _ = core_model.fit_model(model, "fp16-safe", keep_latents="never", machine=turing(), tell=lines.append)
    with calls.counting(), Below(network, calls) as seen:
        run(fit, name)
    kinds = Counter(kind_of(layer) for layer in seen.called)
    fp32 = sum(kind_of(layer) in ("core", "Conv1d") for layer in seen.fp32 - seen.safe)
    return {
        "class": type(network).__name__, "table": CASES[name].table, "safe": len(seen.safe), "called": len(seen.called),
        "fp32": fp32,
        "kinds": kinds, "before": [len(seen.before), calls.before], "direct": seen.direct // seen.runs,
        "attention": [calls.reachable // seen.runs, calls.all // seen.runs], "told": lines, "decided": decided,
        "traces": traces(network),
    }  # fmt: skip


def kind_of(layer: nn.Module) -> str:
    """``core`` for layers of comfy.ops and torch, ``own`` for those of the network's file; 1-D and 3-D ones by name."""
    if type(layer).forward.__module__.startswith("comfy.ldm"):
        return "own"
    return type(layer).__name__ if isinstance(layer, UNCOUNTED) else "core"


def drawn(
    name: str, scenes: list[str], seed: int = 0, width: int = 32, late: bool = False, **config: int
) -> dict[str, Any] | None:
    """:func:`errors` of a class with other weights, numbers in its configuration, and text of another width."""
    case = CASES[name]
    with mock.patch.dict(CASES, {name: replace(case, config={**case.config, **config}, width=width, seed=seed)}):
        return errors(name, scenes, late=late)


def errors(name: str, scenes: list[str], function: str = "", late: bool = False) -> dict[str, Any] | None:
    """The error against core's fp32 in each scene: of plain fp16 with a loud layer, and of Fit Model. Of a case with
    several files, and of several levels, that of the worst.

    Args:
        scenes: of :data:`SCENES`. function: which of core's attention functions runs; empty for its choice.
        late: not at the first of :data:`LEVELS` alone, but for loud rows.
    """
    case = CASES[name]
    if not hasattr(supported, case.table):
        return None
    if len(case.files) > 1:
        every = []
        for file in case.files:
            with mock.patch.dict(CASES, {name: replace(case, files=[file])}):
                every.append(errors(name, scenes, function, late) or {})
        return {scene: max((each[scene] for each in every), key=lambda each: each["fit"]) for scene in scenes}
    found, calls = {}, Calls(function)
    for scene in scenes:
        with calls.counting():
            model, half = made(name), 0.0
            SCENES[scene](model, name)
            among = LEVELS if late and not scene.startswith("rows") else LEVELS[:1]
            expected = {level: run(model, name, level) for level in among}
            if scene == "loud":
                plain = model.clone()
                plain.set_model_compute_dtype(HALF)
                half = error(run(plain, name), expected[LEVELS[0]])
            fit, _ = fitted(model, lambda _line: None)
            fault = max(error(run(fit, name, level), each) for level, each in expected.items())
            finite = all(bool(each.isfinite().all()) for each in expected.values())
            found[scene] = {"fit": fault, "half": half, "finite": finite}
    return found


KERNELS = {  # the name of core's function around a package's kernel, and the kernel
    "sage": ("attention_sage", attention_cases.sage),
    "int8": ("attention_comfy_kitchen_int8", attention_cases.all_in_int8),
}


def emulated(name: str, kernel: str, scenes: list[str]) -> dict[str, Any] | None:
    """The error against core's fp32 of a kernel in emulation: core's on the model as trained, Fit Model's by scene."""
    called, compute = KERNELS[kernel]
    if not (hasattr(supported, CASES[name].table) and hasattr(core_attention, called)):
        return None
    calls = Calls(called)

    def run_kernel(q: Tensor, k: Tensor, v: Tensor, tensor_layout: str = "HND", **chosen: Any) -> Tensor:
        mask, scale = chosen.get("attn_mask"), chosen.get("sm_scale") or chosen.get("scale")
        q, k, v = (each.transpose(1, 2) if tensor_layout == "NHD" else each for each in (q, k, v))
        found = compute(q if scale is None else q * scale * q.shape[-1] ** 0.5, k, v, mask).to(q.dtype)
        return found.transpose(1, 2) if tensor_layout == "NHD" else found

    def made_with(scene: str) -> tuple[Any, Tensor]:
        model = made(name)
        SCENES[scene](model, name)
        return model, run(model, name)

    kitchen = types.SimpleNamespace(int8_attention=run_kernel)
    found, models = {}, {scene: made_with(scene) for scene in dict.fromkeys((STEADY, *scenes))}
    with (
        mock.patch.object(core_attention, "sageattn", run_kernel, create=True),
        mock.patch.object(core_attention, "SAGE_ATTENTION_SUPPORTS_MASK", True, create=True),
        mock.patch.object(core_attention, "comfy_kitchen", kitchen),
        calls.counting(),
    ):
        own = error(run(models[STEADY][0], name), models[STEADY][1])
        for scene in scenes:
            model, expected = models[scene]
            lines: list[str] = []
            fit, _ = fitted(model, lines.append)
            fault = error(run(fit, name), expected) if expected.isfinite().all() else 0.0
            found[scene] = {"error": fault, "told": lines[0]}
    return {"own": own, "scenes": found}


def levels(name: str, rows: str) -> dict[str, Any] | None:
    """The largest error of one fit over :data:`LEVELS` with loud rows, and what it said."""
    if not hasattr(supported, CASES[name].table):
        return None
    model, told = made(name), list[str]()
    SCENES[rows](model, name)
    expected = [run(model, name, level) for level in LEVELS]
    fit, _ = fitted(model, told.append)
    found = [error(run(fit, name, level), each) for level, each in zip(LEVELS, expected, strict=True)]
    finite = all(bool(each.isfinite().all()) for each in expected)
    return {"error": max(found), "finite": finite, "told": told}


class Found(Exception):
    """The network class of a row."""


def networks() -> dict[str, Any]:
    """The network class of each row of core's list, by core's own code; the doubles; and the version of core."""

    def caught(
        _: Any, model_config: Any, model_type: Any = None, device: Any = None, unet_model: Any = UNetModel
    ) -> None:
        raise Found(unet_model.__name__)

    classes = {}
    with mock.patch.object(model_base.BaseModel, "__init__", caught):
        for row in supported.models:
            config = next((case.config for case in CASES.values() if case.table == row.__name__), NEEDED)
            try:
                row({**config, **row.unet_config}).get_model(
                    dict.fromkeys(("cc_projection.weight", "cc_projection.bias")), ""
                )
            except Found as found:
                classes[row.__name__] = str(found)
    return {
        "classes": classes, "doubles": {name: classes.get(case.table) for name, case in CASES.items()},
        "version": comfyui_version.__version__,
    }  # fmt: skip


def unsampled(row: str) -> dict[str, Any] | None:
    """What Fit Model says of a network that core's nodes call without the sampler."""
    if not hasattr(supported, row):
        return None
    config = getattr(supported, row)(dict(getattr(supported, row).unet_config))
    config.set_inference_dtype(HALF, FULL)
    model = comfy.model_patcher.CoreModelPatcher(config.get_model({}, "", device=torch.device("meta")), HOST, HOST)
    fit, decisions = core_model.fit_model(model, machine=turing())
    return {"same": fit is model, "decided": [str(each) for each in decisions]}
