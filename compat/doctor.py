"""The layer that first gives values that cannot be right, and the repair that helps.
Watching is one read of a step's result. Only where that is wrong is the step run again, with a hook on every module
that compares what it is given with what it returns; then with up to four repairs in turn."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from .device.execution import add_hook, to_host
from .device.facts import value_or
from .device.failures import is_unfit
from .device.precision import NAMES
from .memory.parts import Undo
from .output_check import COLOUR, CONSTANT, ZEROS, NotFinite
from .repairs import ATTENTION, FP32, LIMIT, NARROW, REPLACED, SCALED, Repair, RepairStore, repaired, tensors_in

OFFER, KEEP, FORGET = "offer", "keep", "forget"
EXPLAIN = "explain"  # of a pipeline without a doctor: the layer is named, and nothing is tried
CHOICES = (OFFER, KEEP, FORGET)
NAN, INFINITE, STUCK = "NaN", "infinite values", "values at the end of fp16"
PRODUCT, WEIGHED = "a product unlike its weights", "attention unlike its operands"
TRIALS = 4  # of repairs, the comparison with the whole network in fp32 included
SHOWN = 3  # places on the way that are named
NEAR = 0.05  # relative L2 of a repaired result from that of the whole network in fp32: some roundings to 8 bits
FEW = 0.1  # of a weight's values that zeros may stand for; without more of them it is another layer
UNSHRUNK = 0.95  # a result that is this much the noise it began with was not sampled
AS_WRITTEN = "force_eager"  # torch's stance in which the layers of compiled modules can be seen
ON_LOAD = "choose precision fp16-safe or fp32 on the load node"
KEPT = "Set repair to keep on AnyGPU Doctor and run again"
WITH_FIT, ON_FIT = "put AnyGPU Fit Model before the sampler", "choose precision fp32 on AnyGPU Fit Model"
BUTTON = {"node": "AnyGPUDoctor", "input": "repair", "value": KEEP, "press": "Keep the repair and run again"}
Fault = Callable[[torch.Tensor], str]
DTYPES = {**NAMES, torch.float64: "fp64"}
INPUTS = dict.fromkeys(("x", "hidden_states"), "the latents")  # what models call what they are given
INPUTS |= dict.fromkeys(("context", "encoder_hidden_states"), "the text")
PARTS = (  # of a layer's dotted name, what they are in words; the first that fits
    (r"(^|[._])(attn2|cross_attn)\b", "cross-attention"),
    (r"(^|[._])(attn1|attn|self_attn|img_attn|txt_attn)\b", "self-attention"),
    (r"(^|[._])(ff|ffn|mlp|feed_forward|ff_context|img_mlp|txt_mlp)\b", "MLP"),
    (r"(adaln|modulation|scale_shift|(^|[._])mod\b)", "modulation"),
    (r"(^|[._])(resnets?|res_blocks)\b", "residual block"),
    (r"norm", "norm"),
)

PLAIN = {  # by fault: the first sentence, for people who know no layers
    **dict.fromkeys((INFINITE, STUCK), "one layer's numbers grow too large for this card's 16-bit format"),
    NAN: "one layer gives values that are no numbers",
    PRODUCT: "this device multiplies wrongly in one layer",
    WEIGHED: "this device's attention gives wrong values",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """The place where a result first went wrong."""

    layer: str  # dotted name, after its network's, of the innermost module whose inputs were right
    kind: str  # its class
    dtype: str  # of its result, or of its 16-bit weights if that is fp32
    fault: str
    largest: float = 0.0  # absolute value of its inputs
    weight: str = ""  # its first parameter with values that are not finite; empty for none
    bad: float = 0.0  # the share of that parameter's values that are not finite
    block: str = ""  # dotted name of the repeated block that it is in
    blocks: int = 0  # the number of blocks in the same list
    way: tuple[tuple[str, float], ...] = ()  # blocks before it, with their largest values
    inputs: str = ""  # those of the network that are wrong already, in words
    between: bool = False  # its layers were right: the fault lies between them, such as in attention

    @property
    def plain(self) -> str:
        """The first sentence of a report, for users who know no layers."""
        if self.inputs:
            return "The picture fails before this model: what it is given is broken already"
        if self.weight:
            return "The picture fails because the model's file, or its copy in memory, is damaged in one layer"
        overflowed = self.fault == NAN and self.dtype == "fp16" and not self.between  # of infinite values
        cause = PLAIN.get(INFINITE if overflowed else self.fault, "one layer says the same everywhere")
        return f"The picture fails because {cause}"

    def __str__(self) -> str:
        if self.inputs:
            return f"{self.fault} in what the network is given ({self.inputs}): the fault lies before it"
        broken = f"{100 * self.bad:.3g}% of its {self.weight} is {NAN} or infinity"
        cause = broken if self.weight else "its weights are finite"
        largest = sorted(self.way, key=lambda place: -place[1])[:SHOWN]
        before = ", ".join(f"{name} {value:.3g}" for name, value in largest)
        block = f"block {int(self.block.rpartition('.')[2]) + 1} of {self.blocks}" if self.block else ""
        in_block = self.layer.removeprefix(self.block)
        part = next((word for pattern, word in PARTS if re.search(pattern, in_block)), "")
        place = ", ".join(filter(None, (block, part, self.layer)))
        text = f"{self.fault} first from {place} ({self.kind}, {self.dtype}), given at most {self.largest:.3g}; {cause}"
        return f"{text}; largest on the way: {before}" if before else text


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A finding, None where a second run was right; the repair that helped, None for none; the repairs planned."""

    finding: Finding | None
    repair: Repair | None = None
    tried: tuple[Repair, ...] = ()

    def __str__(self) -> str:
        if self.finding is None:
            return "the same step run again was right: a passing fault of the device, such as unstable memory"
        if self.repair is not None:
            return f"{self.finding}; with {self.repair} the result is right"
        return f"{self.finding}; no repair of a layer helps" if self.tried else str(self.finding)


class _Found(Exception):
    """Raised by a hook to end the run of a search that has its finding."""


def not_finite(tensor: torch.Tensor) -> str:
    """The fault of a result of the network: NaN, or infinite values; empty for none."""
    return _range_fault(*_range(tensor))


def one_colour(tensor: torch.Tensor) -> str:
    """The fault of a picture: as :func:`not_finite`, or one value everywhere."""
    low, high = _range(tensor)
    return _range_fault(low, high) or (COLOUR if tensor.numel() > 1 and low == high else "")


def lifeless(tensor: torch.Tensor) -> str:
    """The fault of a network's output: as :func:`not_finite`, or one value everywhere, which denoises nothing."""
    return lifeless_range(*_range(tensor), tensor.numel())


def lifeless_range(low: float, high: float, count: int) -> str:
    """The fault of :func:`lifeless` for ``count`` values from ``low`` to ``high``."""
    return _range_fault(low, high) or ((CONSTANT if low else ZEROS) if count > 1 and low == high else "")


def stuck(tensor: torch.Tensor) -> str:
    """The fault of a module's result: as :func:`not_finite`, or values clamped to the ends of fp16's range."""
    low, high = _range(tensor)
    return _range_fault(low, high) or (STUCK if tensor.dtype is torch.float16 and max(-low, high) >= LIMIT else "")


def _broken(tensor: torch.Tensor) -> str:
    """The fault of an input: as :func:`not_finite`, but none for an attention bias, whose -inf masks keys."""
    low, high = _range(tensor)
    return "" if low == -math.inf and high <= 0 else _range_fault(low, high)


def _range(tensor: torch.Tensor) -> tuple[float, float]:
    """The least and the greatest value, NaN for both where any is: one pass over the tensor and one read from it."""
    wide = tensor.detach() if tensor.element_size() > 1 else tensor.detach().float()
    low, high = to_host(torch.stack(torch.aminmax(wide))).tolist()
    return low, high


def _range_fault(low: float, high: float) -> str:
    """The fault of :func:`not_finite` for values from ``low`` to ``high``."""
    if math.isnan(low) or math.isnan(high):
        return NAN
    return INFINITE if math.isinf(low) or math.isinf(high) else ""


def examine(networks: nn.ModuleDict, run: Callable[[], Any], fault: Fault = not_finite) -> Finding | None:
    """The first module of ``networks`` whose result has a ``fault`` when ``run`` calls them; None if all are right."""
    return _run_with_hooks(networks, run, fault)[0]


def _run_with_hooks(networks: nn.ModuleDict, run: Callable[[], Any], fault: Fault) -> tuple[Finding | None, Any]:
    """The finding of one ``run``, NaN and infinity before other faults, and its output, None if it was cut short."""
    search, output = _Search(networks, fault), None
    with search.hooked(), torch.compiler.set_stance(AS_WRITTEN):
        try:
            output = run()
        except _Found:
            pass
        except RuntimeError:  # torch's own checks of values that are not finite
            if search.finding is None:
                raise
    return search.finding or search.second, output


def diagnose(
    networks: nn.ModuleDict, run: Callable[[], torch.Tensor], fault: Fault = not_finite, repair: bool = True,
    local: Fault | None = None, found: Callable[[], Finding | None] = lambda: None, spent: int = 0,
) -> tuple[Diagnosis, torch.Tensor | None]:  # fmt: skip
    """The diagnosis of a ``run`` that went wrong, and its output once it is right; None where no repair helps.
    ``fault`` judges the output, ``local`` (None: ``fault``) what a module returns; ``found`` gives the finding where it
    is known already. The network runs at most five times: once, with hooks unless the finding is known, and for up to
    :data:`TRIALS` repairs, less the runs that the caller has ``spent``; for none without ``repair``."""
    finding = found()
    finding, output = _run_with_hooks(networks, run, local or fault) if finding is None else (finding, run())
    wrong = "" if output is None else fault(output)
    if output is not None and not wrong:  # a layer may rightly give zeros, as an untrained LoRA does
        return Diagnosis(None), output
    if finding is None:  # somewhere in the network, between layers that are right
        name, network = next(iter(networks.items()))
        dtype = next((DTYPES[each.dtype] for each in network.parameters() if each.dtype in DTYPES), "")
        finding = Finding(name, type(network).__name__, dtype=dtype, fault=wrong, between=True)
    tried, exact = tuple(repairs_for(finding)) if repair else (), None
    whole = tried[-1] if tried and tried[-1] == Repair(finding.layer.partition(".")[0], FP32) else None
    most = TRIALS - spent
    tried = tried[:most] if whole is None else (*tried[:-1][: most - 1], whole)  # the whole network in fp32 stays last
    for one in tried:
        output = exact if one == whole and exact is not None else _output_with(one, networks, run)
        if output is None or fault(output):
            continue
        if whole is not None and one != whole and one.way != REPLACED:  # finite is not right: networks may clip
            exact = _output_with(whole, networks, run) if exact is None else exact
            if exact is not None and not fault(exact) and distance(output, exact) > NEAR:
                continue
        return Diagnosis(finding, one, tried), output
    return Diagnosis(finding, None, tried), None


def _output_with(repair: Repair, networks: nn.ModuleDict, run: Callable[[], Any]) -> Any:
    """The output of ``run`` with ``repair``; None where no kernel takes the dtype that it asks for."""
    with repaired(networks, (repair,)), torch.compiler.set_stance(AS_WRITTEN):
        try:
            return run()
        except Exception as error:
            if not is_unfit(error):  # after a shortage, the stage makes room and diagnoses again
                raise
            return None


def distance(output: Any, exact: Any) -> float:
    """Relative L2 of the difference of a network's ``output`` from the ``exact`` one, over all tensors in them."""
    pairs = list(zip(tensors_in(output), tensors_in(exact), strict=True))
    error = sum(float((a.detach().float() - b.detach().float()).square().sum()) for a, b in pairs)
    return math.sqrt(error / max(sum(float(b.detach().float().square().sum()) for _, b in pairs), 1e-30))


def repairs_for(finding: Finding) -> Iterator[Repair]:
    """Repairs that may help, the likeliest first, in 16 bits the whole network in fp32 last; none for bad inputs."""
    if finding.inputs or finding.bad > FEW:  # no precision makes broken inputs or weights right
        return
    layer, root = finding.layer, finding.layer.partition(".")[0]
    if finding.weight:
        yield Repair(layer, REPLACED)
    if finding.between and not finding.weight:
        yield from (Repair(place, ATTENTION) for place in dict.fromkeys((layer, root)))
    places = (layer, finding.block or root, root)
    if finding.dtype in ("fp16", "bf16"):
        way = SCALED if finding.dtype == "fp16" else FP32
        yield from dict.fromkeys(Repair(place, way) for place in places[2 * finding.between :])  # between: root
        if way == SCALED:
            yield Repair(root, FP32)


class _Search:
    """Hooks on every module, which end a run at the first that returns NaN or infinity from finite inputs."""

    def __init__(self, networks: nn.ModuleDict, fault: Fault) -> None:
        self.networks, self.fault = networks, fault
        self.finding: Finding | None = None
        self.second: Finding | None = None  # the first other fault; values that are not finite count for more
        self.way: dict[str, float] = {}  # the largest value of each block, over all calls so far

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """A context in which the hooks are on."""
        with Undo() as undo:
            for name, module in self.networks.named_modules():
                undo.append(add_hook(module, self._after(name), with_kwargs=True).remove)
            yield

    def _after(self, name: str) -> Callable[..., None]:
        """The forward hook of module ``name``; raises _Found where it, or an input of its network, is not finite."""

        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            given, (fault, wrong) = (args, kwargs), _wrong(output, not_finite)
            if not fault:
                self._note_finite(name, module, given, output)
            elif not _wrong(given, _broken)[0]:
                self.finding = self._finding(name, module, fault, wrong, largest(given))
                raise _Found
            elif name in self.networks:  # the fault came in from outside
                inputs = [key for key, value in _named(module, args, kwargs).items() if _wrong(value, _broken)[0]]
                words = ", ".join(INPUTS.get(key, key) for key in inputs)
                self.finding = Finding(name, type(module).__name__, dtype="", fault=fault, inputs=words)
                raise _Found

        return after

    def _note_finite(self, name: str, module: nn.Module, given: Any, output: Any) -> None:
        """Note the largest value of a finite ``output`` if a block's, and the first other fault not in ``given``."""
        if self.fault is not not_finite and self.second is None:
            fault, wrong = _wrong(output, self.fault)
            if fault and not _wrong(given, self.fault)[0]:
                self.second = self._finding(name, module, fault, wrong, largest(given))
        if name and block_of(self.networks, name) == name:
            self.way[name] = max(largest(output), self.way.get(name, 0.0))

    def _finding(self, name: str, module: nn.Module, fault: str, wrong: Any, given: float) -> Finding:
        """The finding for a ``module`` that returned the tensor ``wrong`` with ``fault``, for inputs up to ``given``;
        it names the layer inside that has the first broken weight, if there is one."""
        shares = ((path, _bad_share(weight)) for path, weight in module.named_parameters())
        path, bad = next((share for share in shares if share[1]), ("", 0.0))
        owner, _, weight = path.rpartition(".")
        layer = ".".join(filter(None, (name, owner)))
        kind, block = type(self.networks.get_submodule(layer)).__name__, block_of(self.networks, layer)
        narrow = [each.dtype for each in module.parameters() if each.dtype in NARROW]
        dtype = narrow[0] if narrow and wrong.dtype is torch.float32 else wrong.dtype  # widened by 16-bit weights
        return Finding(
            layer, kind, DTYPES.get(dtype, str(dtype).removeprefix("torch.")), fault, largest=given, weight=weight,
            bad=bad, block=block, blocks=blocks_beside(self.networks, block), way=tuple(self.way.items()),
            between=not weight and next(module.children(), None) is not None,
        )  # fmt: skip


def block_of(networks: nn.ModuleDict, name: str) -> str:
    """The repeated block that the module ``name`` is in, or is; empty outside."""
    parent: nn.Module = networks
    for place in accumulate(name.split("."), "{}.{}".format) if name else ():
        if isinstance(parent, nn.ModuleList):
            return place
        parent = parent._modules.get(place.rpartition(".")[2]) or parent
    return ""


def blocks_beside(networks: nn.ModuleDict, block: str) -> int:
    """The number of blocks in the list of ``block``; 0 outside of one."""
    return len(list(networks.get_submodule(block.rpartition(".")[0]).children())) if block else 0


def _wrong(value: Any, fault: Fault) -> tuple[str, torch.Tensor | None]:
    """The first fault of the tensors in ``value``, and the tensor that has it; ("", None) for none."""
    faults = ((fault(tensor), tensor) for tensor in tensors_in(value))
    return next((each for each in faults if each[0]), ("", None))


def _named(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a forward by name; those that its signature does not name are ``input 1`` and so on."""
    names: list[str] = value_or(lambda: list(inspect.signature(module.forward).parameters), [])
    names += [f"input {index + 1}" for index in range(len(names), len(args))]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _bad_share(weight: torch.Tensor) -> float:
    """The share of a weight's values that are not finite; 0 also where they cannot be read: packed, or on meta."""
    if not weight.is_floating_point() or weight.is_meta or not weight.numel():
        return 0.0
    return value_or(lambda: float((~torch.isfinite(weight.detach().float())).float().mean()), 0.0)


def largest(value: Any) -> float:
    """The largest absolute value of a module's inputs or outputs, which are finite; a bias of -inf does not count."""
    return max((max(-low, high) for low, high in map(_range, tensors_in(value)) if math.isfinite(low)), default=0.0)


def unshrunk(noise: torch.Tensor, result: torch.Tensor) -> str:
    """A sentence if the ``result`` of a sampling is nearly its ``noise``, by their correlation; else empty."""
    if noise.shape != result.shape or not bool(torch.isfinite(result).all()):
        return ""
    pair = torch.stack([to_host(noise).float().flatten(), to_host(result).float().flatten()])
    likeness = float(torch.corrcoef(pair)[0, 1])
    if not likeness > UNSHRUNK:
        return ""
    return f"the noise did not shrink: the result is {likeness:.0%} the noise that sampling began with"


class Doctor:
    """Watches the networks of one model, and saves the repairs that helped it under the name ``model``.
    ``choice`` is one of :data:`CHOICES` or :data:`EXPLAIN`: ``offer`` raises with the repair that helps, ``keep`` goes
    on with it, in later runs too, and ``forget`` deletes those that were saved. ``tell`` shows a line to the user.
    The attributes ``instead`` and ``keep`` word the advice to choose another precision, and to choose ``keep``."""

    def __init__(self, model: str, store: RepairStore, choice: str, tell: Callable[[str], None]) -> None:
        self.model, self.store, self.choice, self._tell = model, store, choice, tell
        self.told: list[str] = []  # the messages of this sampling, which :meth:`conclude` repeats at its end
        self.instead, self.keep = ON_LOAD, KEPT
        self.forgot = choice == FORGET and store.forget(model)
        self.repairs = store.load(model) if choice == KEEP else ()

    def tell(self, text: str) -> None:
        self.told.append(text)
        self._tell(text)

    def conclude(self, message: str, sound: str, tell: Callable[[str], None] | None = None) -> None:
        """Tell ``message`` and the messages of the sampling that ends, then forget them; ``sound`` if none."""
        told, self.told = self.told, []
        (tell or self._tell)("\n".join(filter(None, (message, *told))) or sound)

    def repaired(self, networks: nn.ModuleDict) -> AbstractContextManager[None]:
        """A context in which the known repairs of ``networks`` are applied."""
        return repaired(networks, [one for one in self.repairs if one.layer.partition(".")[0] in networks])

    def checked(
        self, output: torch.Tensor, networks: nn.ModuleDict, run: Callable[[], torch.Tensor], where: str,
        fault: Fault = not_finite, local: Fault | None = None, found: Callable[[], Finding | None] = lambda: None,
        spent: int = 0,
    ) -> torch.Tensor:  # fmt: skip
        """``output`` if it is right or clamped without harm; else that of another ``run``, if right by itself or, with
        ``keep``, by a repair; a repair that helps is saved except with ``forget``. ``where``, such as ``step 3 of 20``,
        leads the message; the others are as for :func:`diagnose`. Raises NotFinite where no repair helps or is kept."""
        if not fault(output):
            return output
        diagnosis, again = diagnose(networks, run, fault, self.choice != EXPLAIN, local, found, spent)
        repair, finding = diagnosis.repair, diagnosis.finding
        if finding is not None and finding.fault == STUCK and again is not None and distance(output, again) <= NEAR:
            return output  # clamped, as some networks do, without harm
        if repair is not None and self.choice != FORGET:
            self.store.add(self.model, repair)
        text = f"{where}: {diagnosis}" if finding is None else f"{finding.plain}; {where}: {diagnosis}"
        if again is not None and repair is None:
            self.tell(text)
            return again
        if again is not None and repair is not None and self.choice == KEEP:
            self.repairs = tuple(dict.fromkeys((*self.repairs, repair)))
            self.tell(f"{text}; kept for the next runs of this model")
            return again
        offered = BUTTON if repair is not None and self.choice == OFFER else {}
        raise NotFinite(text, expected="right values", fix=advice(diagnosis, self.instead, self.keep), button=offered)


def advice(diagnosis: Diagnosis, instead: str = ON_LOAD, keep: str = KEPT) -> str:
    """The fix of an error with this ``diagnosis``, in one or two sentences."""
    finding, repair = diagnosis.finding, diagnosis.repair
    if finding is not None and finding.weight:
        damaged = f"Download the model's file again: {finding.layer}.{finding.weight} is damaged."
        return f"{damaged} Or {keep[0].lower()}{keep[1:]}." if repair else damaged
    if repair is not None:
        return f"{keep}, or {instead}." if finding is not None and finding.dtype == "fp16" else f"{keep}."
    if finding is not None and finding.inputs:
        return "Look at the node before: the text encoder, the picture or the latents that it is given."
    if finding is not None and not diagnosis.tried and finding.dtype in ("fp16", "bf16"):
        return f"Add AnyGPU Doctor with repair {KEEP}, or {instead}."
    return f"Load the model again, use a file in another precision, or {instead}."
