"""The doctor beside core's samplers and VAE nodes, for any MODEL and VAE."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from comfy.patcher_extension import WrappersMP
from comfy_execution.graph_utils import ExecutionBlocker
from comfy_execution.progress import get_progress_state
from torch import Tensor, nn
from torch.nn import functional

from ...compat import doctor as doctors
from ...compat.device.execution import add_hook, to_host
from ...compat.device.failures import UNFIT
from ...compat.memory.parts import Undo
from ...compat.output_check import ZEROS, fault_in_weight, is_flat
from ...compat.repairs import ATTENTION, FP32, LIMIT, Repair, repaired, tensors_in
from ...compat.transforms.fp16_layers import SETTINGS
from ..diffusion_model import CoreModel
from ..progress import NodeProgress
from .attention import BUILDS_SCORES, AttentionOnRequest, Heads, _name, _named, compute_next, rewinding, with_override
from .layers import ByNetwork
from .model import KEY as FITTED
from .ownership import is_linear, is_replaced
from .vae_window import agree, fault_in_pictures
from .weights import LoadedWeights

ROWS, COLUMNS = 4, 64  # rows of a product or queries, and its outputs, that are computed again in fp32
NEAR, ROUGH = 0.1, 0.25  # relative error of kernels in 16 bits, and of those of other packs, such as int8 attention
JUMP = 30.0  # times the largest value that a block had before
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
PATCHES = [f"{own}{kind}_function" for own in ("weight", "bias") for kind in ("", "_lowvram")]  # core's, of a layer
_blocks = ByNetwork()  # network -> names of its repeated blocks
_largest = ByNetwork()  # network -> block -> its largest value in samplings that were right
KEY, NODE = "anygpu_doctor", "AnyGPUDoctor"
NETWORK, VAE = "diffusion_model", "vae"
COMPILED = "torch.compile"  # core's key of the wrapper that swaps in compiled modules
BRANCHES = {(0,): "positive prompt", (1,): "negative prompt"}


class Spot(NamedTuple):
    """One statistic of a call: a block's largest value, or a relative error; from ``bound`` on it shows ``fault``."""

    layer: str
    value: Tensor
    fault: str = ""
    bound: float = math.inf
    dtype: torch.dtype = torch.float32


class StepWatch:
    """Statistics of the last call of ``networks``; ``loud``: a block's values became 0, or far larger than before."""

    def __init__(self, networks: nn.ModuleDict, compiled: bool = False) -> None:
        self.compiled = compiled  # then hooks on its modules are not called
        self.networks, self.loud, self.finding = networks, False, None
        network = next(iter(networks.values()))
        self.largest: dict[str, float] = _largest.setdefault(network, {})
        if network not in _blocks:
            names = (name for name, _ in networks.named_modules() if name)
            _blocks[network] = [name for name in names if name == doctors.block_of(networks, name)]
        self.blocks: list[str] = [] if compiled else _blocks[network]
        self.spots: list[Spot] = []
        self.now: dict[str, float] = {}
        self.stack: list[str] = []

    @contextmanager
    def on(self, closely: bool) -> Iterator[Callable[..., Any]]:
        """For the block, watch one call, ``closely`` with spot checks of products (not if compiled) and attention;
        yields what makes the call's attention override from the present one."""
        self.spots, self.stack = [], []
        with Undo() as undo:
            network = next(iter(self.networks.values()))
            undo.append(add_hook(network, lambda *_: self.spots.clear(), before=True).remove)  # of a pass thrown away
            for name in self.blocks:
                undo.append(add_hook(self.networks.get_submodule(name), functools.partial(self._block, name)).remove)
            for name, module in self.networks.named_modules() if closely and not self.compiled else ():
                if is_linear(module):
                    undo.append(add_hook(module, functools.partial(self._product, name)).remove)
                elif name and next(module.children(), None) is not None:
                    undo.append(add_hook(module, lambda *_, name=name: self.stack.append(name), before=True).remove)
                    undo.append(add_hook(module, self._leave).remove)
            yield self._noted_attention if closely else AttentionOnRequest

    def fault(self, output: Any) -> str:
        """The fault of the call that returned ``output``; empty for none. Sets ``finding`` and ``loud``."""
        whole = torch.cat([tensor.detach().flatten().float() for tensor in tensors_in(output)])
        scalars = (*torch.aminmax(whole), *(spot.value for spot in self.spots))  # read by one copy to the host
        low, high, *values = to_host(torch.stack([value.float().to(whole.device) for value in scalars])).tolist()
        wrong = doctors.lifeless_range(low, high, whole.numel())
        self.finding, self.now = None, {}
        for spot, value in zip(self.spots, values, strict=True):
            if spot.fault in ("", doctors.STUCK):
                self.now[spot.layer] = max(value, self.now.get(spot.layer, 0.0))
            if spot.fault and value >= spot.bound and not wrong:
                wrong = doctors.INFINITE if math.isinf(value) else spot.fault
                self.finding = None if spot.fault == doctors.STUCK else self._finding_of(spot, wrong)
        sizes = [(value, self.largest.get(name)) for name, value in self.now.items()]  # None: not seen before
        self.loud = any((value == 0 and before != 0) or (before and value > JUMP * before) for value, before in sizes)
        return wrong

    def keep(self) -> None:
        """Count the values of a call that was right among the largest known."""
        self.largest.update({name: max(value, self.largest.get(name, 0.0)) for name, value in self.now.items()})

    def _leave(self, *_: Any) -> None:  # not ``stack.pop`` itself: what a hook returns becomes the module's output
        self.stack.pop()

    def _finding_of(self, spot: Spot, fault: str) -> doctors.Finding:
        block = doctors.block_of(self.networks, spot.layer)
        blocks = doctors.blocks_beside(self.networks, block)
        kind = type(self.networks.get_submodule(spot.layer)).__name__
        dtype = doctors.DTYPES.get(spot.dtype, str(spot.dtype))
        between = spot.fault == doctors.WEIGHED
        return doctors.Finding(spot.layer, kind, dtype=dtype, fault=fault, block=block, blocks=blocks, between=between)

    def _block(self, name: str, _module: nn.Module, _args: Any, output: Any) -> None:
        for tensor in () if torch.compiler.is_compiling() else tensors_in(output):
            fault = doctors.STUCK if tensor.dtype is torch.float16 else ""
            self.spots.append(Spot(name, torch.linalg.vector_norm(tensor.detach(), math.inf), fault, LIMIT))

    def _product(self, name: str, layer: Any, args: Any, output: Any) -> None:
        """Hook of a bare Linear: notes a sample's error against fp32, and an fp16 input's size, where a clamp shows."""
        weight, x = getattr(layer, "weight", None), args[0] if args else None
        replaced = is_replaced(layer, "forward") and SETTINGS not in vars(layer)  # by a LoRA in bypass mode, not by Fit
        bare = not (replaced or any(getattr(layer, function, ()) for function in PATCHES))
        plain = all(isinstance(each, Tensor) and each.dtype in FLOATS and each.numel() for each in (weight, x, output))
        if torch.compiler.is_compiling() or not (bare and plain) or type(weight.data) is not Tensor or x.ndim < 2:
            return
        if x.dtype is torch.float16:
            self.spots.append(Spot(name, torch.linalg.vector_norm(x.detach(), math.inf), doctors.STUCK, LIMIT))
        inputs, outputs = (each.detach()[(0,) * (each.ndim - 2)] for each in (x, output))  # of the first sample
        every_row, every_column = max(1, len(inputs) // ROWS), max(1, len(weight) // COLUMNS)
        rows, matrix = inputs[::every_row].float(), weight.detach()[::every_column].to(x.device).float()
        bias = None if layer.bias is None else layer.bias.detach()[::every_column].to(x.device).float()
        expected = functional.linear(rows, matrix, bias)
        size = max(torch.finfo(x.dtype).eps, torch.finfo(weight.dtype).eps) * rows.norm() * matrix.norm()
        self._note(name, outputs[::every_row, ::every_column], expected, size, doctors.PRODUCT, NEAR, output.dtype)

    def _noted_attention(self, before: Callable[..., Tensor] | None) -> Callable[..., Tensor]:
        """Core's attention, or a repair's, with a spot check of each call; ``before``: another node's override."""
        compute = AttentionOnRequest(before)

        def attention(func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
            result = compute(func, *args, **kwargs)
            if not isinstance(func, functools.partial) and not torch.compiler.is_compiling():
                bound = NEAR if before is None and _name(func) in BUILDS_SCORES else ROUGH
                with suppress(*UNFIT):  # operands that only this kernel knows
                    self._attention(Heads.of(*args[:3], _named(func, args, kwargs)), result, bound)
            return result

        return attention

    def _attention(self, call: Heads, result: Tensor, bound: float) -> None:
        """Compare some queries of one head, another at each call, with the same in fp32."""
        head, every = len(self.spots) % call.query.shape[1], max(1, call.query.shape[2] // ROWS)
        query, key, value = (each.detach()[0, head] for each in (call.query, call.key, call.value))
        scores = query[::every].float() @ key.float().mT * (call.gain / query.shape[-1] ** 0.5)
        if call.mask is not None:
            mask = call.mask.expand(*call.query.shape[:3], key.shape[0])[0, head, ::every]
            scores = scores.masked_fill(~mask, -math.inf) if mask.dtype is torch.bool else scores + mask.float()
        heads = result if call.split else result.unflatten(-1, (call.query.shape[1], -1)).transpose(1, 2)
        seen, expected = heads.detach()[0, head, ::every], scores.softmax(-1) @ value.float()
        size = torch.finfo(query.dtype).eps * value.float().norm()
        name = self.stack[-1] if self.stack else next(iter(self.networks))
        self._note(name, seen, expected, size, doctors.WEIGHED, bound, query.dtype)

    def _note(
        self, name: str, seen: Tensor, expected: Tensor, size: Tensor, fault: str, bound: float, dtype: Any
    ) -> None:
        """Add the relative L2 error of ``seen``, infinite for an overflow, 0 if NaN; ``size``: the usual rounding."""
        error = (seen.float() - expected).norm() / (expected.norm() + ROWS * size)
        overflows = expected.isfinite().all() & ~seen.isfinite().all()  # a later layer may hide it
        error = torch.where(overflows, math.inf, error.nan_to_num(0.0))
        self.spots.append(Spot(name, error, fault, bound=bound, dtype=dtype))


def teller(node_id: str | None) -> Callable[[str], None]:
    """A function that shows a line on the Doctor node ``node_id``; it only logs where the graph has no such node."""

    def tell(text: str) -> None:
        progress = NodeProgress(_visible(node_id))
        progress.notify(text)
        progress.show()

    return tell


def _visible(node_id: str | None) -> str | None:
    prompt = get_progress_state().dynprompt
    return node_id if prompt.has_node(node_id) and prompt.get_node(node_id)["class_type"] == NODE else None


def missing(name: str, node: str = "AnyGPU Doctor") -> ExecutionBlocker:
    return ExecutionBlocker(f"AnyGPU: connect {name} to {node} to use its {name} output.")


def _begin(model: Any, tell: Callable[[str], None]) -> None:
    """Note what the weights of core's ``model`` are, and tell of those that are all zeros."""
    LoadedWeights.of(model)
    for name, weight in model.model.diffusion_model.named_parameters():
        if type(weight.data) is torch.Tensor and not weight.is_meta and fault_in_weight(name, weight.data) == ZEROS:
            tell(f"{name} holds nothing but zeros: the file is damaged, unless the model was made so")


def watched_model(model: Any, doctor: doctors.Doctor, node_id: str | None) -> Any:
    """A clone of ``model`` whose calls are checked, with faults shown on the node ``node_id``: at the first call of a
    sampling each product, attention and weight, at later ones the outputs and a fiftieth of the weights."""
    if not isinstance(model.model, CoreModel):
        _begin(model, doctor.tell)
    begun: list[int] = []  # ids of the networks, one to a device, that this sampling has called

    def call(executor: Any, *args: Any, **kwargs: Any) -> Any:
        network = executor.class_obj.diffusion_model
        networks = nn.ModuleDict({NETWORK: getattr(network, "_orig_mod", network)})
        patcher, first = executor.class_obj.current_patcher or model, id(network) not in begun
        compiled = network is not networks[NETWORK] or patcher.get_wrappers(WrappersMP.APPLY_MODEL, COMPILED)
        watch, begun[:] = StepWatch(networks, bool(compiled)), [*begun, id(network)]
        rewind = rewinding(args, kwargs)

        def compute(closely: bool = True) -> Any:  # under the repairs, some of which replace attention
            rewind()
            if closely:
                compute_next(args, kwargs)
                getattr(networks[NETWORK], "clear_kv_cache", int)()  # HiDream O1's keys and values of the prompt
            with watch.on(closely) as override:
                if not (closely or any(repair.way == ATTENTION for repair in doctor.repairs)):
                    return executor(*args, **kwargs)
                given, named = with_override(override, args, kwargs)
                return executor(*given, **named)

        if first:
            healed(patcher, doctor, every=True)
        with doctor.repaired(networks):
            output = compute(first)
            wrong = watch.fault(output)
            doubt = bool(wrong) or watch.loud
            spent = healed(patcher, doctor, every=doubt, streamed=True, late=not first) or (doubt and not wrong)
            if spent:
                output = compute()
                wrong = watch.fault(output)
            if not wrong:
                watch.keep()
                return output
            options = kwargs.get("transformer_options") or (args[5] if len(args) > 5 else {})
            fitted = doctors.ON_FIT if FITTED in patcher.attachments else doctors.WITH_FIT
            doctor.instead = doctors.ON_LOAD if isinstance(model.model, CoreModel) else fitted
            local, where = doctors.stuck if wrong == doctors.STUCK else doctors.lifeless, where_of(options)
            return doctor.checked(output, networks, compute, where, watch.fault, local, lambda: watch.finding, spent)

    def sampled(executor: Any, *args: Any, **kwargs: Any) -> Any:
        doctor.told = [] if begun else doctor.told  # an earlier sampling that was cancelled has not shown its lines
        begun.clear()
        result = executor(*args, **kwargs)
        healed(executor.class_obj.model_patcher, doctor, every=True, late=True)
        noise, sigmas = args[0], args[3] if len(args) > 3 else kwargs["sigmas"]
        ended = isinstance(result, torch.Tensor) and float(sigmas[-1]) == 0.0
        message = ended and doctors.unshrunk(noise, executor.class_obj.model_patcher.model.process_latent_in(result))
        doctor.conclude(message or "", f"no fault in {len(sigmas) - 1} steps", NodeProgress(_visible(node_id)).finish)
        return result

    watched = model.clone()
    for kind, wrapper in ((WrappersMP.APPLY_MODEL, call), (WrappersMP.OUTER_SAMPLE, sampled)):
        watched.wrappers[kind] = {KEY: [], **watched.wrappers.get(kind, {})} | {KEY: [wrapper]}  # outside of a fit
    return watched


def where_of(options: dict[str, Any]) -> str:
    """The step and the prompt of a call, such as ``step 3 of 20, negative prompt``, as far as its options have them."""
    levels, level = options.get("sample_sigmas"), options.get("sigmas")
    step = "a step"
    if levels is not None and level is not None and len(levels) > 1:
        above, steps = int((to_host(levels) > float(level.max()) * (1 + 1e-4)).sum()), len(levels) - 1
        step = f"step {min(above + 1, steps)} of {steps}"  # core's SamplerARVideo also calls it at level 0
    branch = BRANCHES.get(tuple(sorted(set(options.get("cond_or_uncond", ())))), "")
    return f"{step}, {branch}" if branch else step


def healed(patcher: Any, doctor: doctors.Doctor, every: bool, streamed: bool = False, late: bool = False) -> bool:
    """True if weights had changed on the device, which is reported, and loaded again if possible. ``every`` checks all
    weights, not a share; ``streamed`` also those in host memory; ``late`` warns of earlier steps."""
    if isinstance(patcher.model, CoreModel):
        return False
    weights = LoadedWeights.of(patcher)
    if not (names := weights.wrong(patcher, every, streamed)):
        return False
    done, more = weights.restore(patcher, names), "…" * (len(names) > doctors.SHOWN)
    shown = ", ".join(name.removeprefix(f"{NETWORK}.") for name in names[: doctors.SHOWN]) + more
    remedy = "loaded again" if len(done) == len(names) else "its file cannot be read from here: load the model again"
    earlier = "; run again, earlier steps may be wrong" * late
    twice = "; if it happens again, start ComfyUI with --disable-dynamic-vram" * (weights.healed > 1)
    doctor.tell(f"the copy of {shown} on the card is not what was loaded; {remedy}{earlier}{twice}")
    return True


def watched_vae(vae: Any, doctor: doctors.Doctor) -> Any:
    watched = copy.copy(vae)
    watched.__class__ = _watched_class(type(vae))
    watched.__dict__["doctor"] = doctor
    return watched


class WatchedVAE:
    def decode(self, samples_in: Any, *args: Any, **kwargs: Any) -> Any:
        return self._checked(samples_in, functools.partial(super().decode, samples_in, *args, **kwargs))  # type: ignore[misc]

    def decode_tiled(self, samples: Any, *args: Any, **kwargs: Any) -> Any:
        return self._checked(samples, functools.partial(super().decode_tiled, samples, *args, **kwargs))  # type: ignore[misc]

    def watched_outside(self, fit: Callable[[Any], tuple[Any, Any]]) -> tuple[Any, Any]:
        """The results of ``fit`` on the VAE without its Doctor, which then looks at what the fitted VAE gives."""
        bare: Any = copy.copy(self)
        bare.__class__ = type(self).__bases__[1]
        fitted, decisions = fit(bare)
        return watched_vae(fitted, self.__dict__["doctor"]), decisions

    def _checked(self, samples: Any, run: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The frames that ``run`` decodes from ``samples``, in this order: after reloading weights that changed on the
        device; if wrong, after reloading streamed ones too; if finite and only unlikely, as they are where fp32 gives
        the same; else as the doctor repairs them, or NotFinite."""
        doctor: doctors.Doctor = self.__dict__["doctor"]
        networks = nn.ModuleDict({VAE: self.first_stage_model})  # type: ignore[attr-defined]
        doctor.instead = "put AnyGPU Fit VAE before the decode"
        plain = not isinstance(samples, torch.Tensor) or is_flat(samples)  # flat latents may be one colour

        def fault(frames: torch.Tensor) -> str:
            return doctors.not_finite(frames) if plain else fault_in_pictures(self, frames, samples)

        patcher = self.patcher  # type: ignore[attr-defined]
        spoilt, spent = healed(patcher, doctor, every=True), 0  # decodes beyond the first
        with doctor.repaired(networks):
            frames = run()
            wrong = fault(frames)
            if wrong and healed(patcher, doctor, every=True, streamed=True):
                spoilt, spent, frames = True, 1, run()
                wrong = fault(frames)
            if wrong and not spoilt and not doctors.not_finite(frames):  # such latents may really give such frames
                spent = 1
                with repaired(networks, (Repair(VAE, FP32),)):
                    if agree(frames, run(), self.vae_dtype):  # type: ignore[attr-defined]
                        return frames
            return doctor.checked(frames, networks, run, "decode", fault, local=doctors.one_colour, spent=spent)


@functools.cache
def _watched_class(kind: type[Any]) -> type[Any]:
    return kind if issubclass(kind, WatchedVAE) else type(kind.__name__, (WatchedVAE, kind), {"__module__": __name__})
