"""Scenes in which torch itself counts what a fit did: products by the weights in them, attention, and bytes."""

import functools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import comfy.model_management as management
import comfy.ops
import torch
from anygpu.compat.device.probe_store import ProbeStore
from anygpu.compat.transforms import fp16_layers
from anygpu.host.core import clip as core_clip
from anygpu.host.core import model as core_model
from anygpu.host.core.attention import OVERRIDE
from anygpu.host.core.calibration import FOLDER
from anygpu.host.core.clip import ENCODE
from anygpu.host.core.layers import Counts, SafeLayers, left_of
from anygpu.host.core.ownership import is_linear, unfit_for_safe
from comfy.ldm.modules.attention import attention_pytorch
from comfy.patcher_extension import PatcherInjection
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from host.inside import core_tiny
from host.inside.core_fit import PEAK, lora_on, turing
from host.inside.core_fit_vaes import text_encoder
from host.inside.core_tiny import CASES, error, fill, louder, made, output

aten = torch.ops.aten
PRODUCTS = {
    aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.linear, aten.convolution, aten.conv1d, aten.conv2d, aten.conv3d,
    aten._scaled_dot_product_flash_attention_for_cpu, aten.scaled_dot_product_attention,
}  # fmt: skip
FREE = {aten.new_empty, aten.empty_like, aten._fused_sdp_choice}  # touch no values
WIDE = {  # one tenth of the published widths, at which norms and weights weigh as little as there
    "Wan 2.1": ({"dim": 512, "num_heads": 4, "ffn_dim": 2048, "text_dim": 64}, (16, 3, 24, 24), 64),
    "LTXV": ({"num_attention_heads": 8, "attention_head_dim": 64, "cross_attention_dim": 512}, (128, 3, 14, 14), 32),
    "MiniMax H3": (
        {"hidden_size": 512, "num_attention_heads": 4, "attention_head_dim": 128, "ffn_hidden_size": 1024},
        (24, 3, 24, 24), 32,
    ),
}  # fmt: skip


class Watch(TorchDispatchMode):
    """Counts products by the weight in them and the dtype of it, attention, and bytes outside products."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.names = {weight.untyped_storage().data_ptr(): name for name, weight in network.named_parameters()}
        self.copies: list[Tensor] = []  # alive, so that no other tensor takes their place
        self.products: dict[str, set[str]] = {}
        self.calls, self.bytes, self.kernels, self.runs = Counter[str](), 0, 0, 0

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation."""
        result = func(*args, **(kwargs or {}))
        tensors = [each for each in (*args, *(kwargs or {}).values()) if isinstance(each, Tensor)]
        names = [self.names.get(each.untyped_storage().data_ptr()) for each in tensors]
        if func.overloadpacket in PRODUCTS:
            self.calls[f"{func.overloadpacket.__name__} {tensors[0].dtype}"] += 1
            for tensor, name in zip(tensors, names, strict=True):
                if name and tensor.ndim > 1:
                    self.products.setdefault(name, set()).add(str(tensor.dtype))
            return result
        results = [
            each for each in (result if isinstance(result, (tuple, list)) else (result,)) if isinstance(each, Tensor)
        ]
        copied = {aten._to_copy: 0, aten.to: 0, aten.copy_: 1}.get(func.overloadpacket)  # the operand that is copied
        if copied is not None and names[copied]:
            self.names[result.untyped_storage().data_ptr()] = names[copied]
            self.copies.append(result)
        known = {each.untyped_storage().data_ptr() for each in tensors}
        writes = func._schema.is_mutable or any(each.untyped_storage().data_ptr() not in known for each in results)
        if writes and func.overloadpacket not in FREE:
            self.kernels += 1
            self.bytes += sum(each.numel() * each.element_size() for each in (*tensors, *results))
        return result


@contextmanager
def watched(model: Any) -> Iterator[Watch]:
    """Every call of the network inside the block, without what core computes before and after it."""
    inner, watch = model.model._apply_model, Watch(model.model.diffusion_model)

    def call(*args: Any, **kwargs: Any) -> Any:
        with watch:
            watch.runs += 1
            return inner(*args, **kwargs)

    with mock.patch.object(model.model, "_apply_model", call):
        yield watch


def counted(name: str, precision: str = "auto", peak: float = 0.0, behind: str = "") -> dict[str, Any]:
    """What is said of the first step, and what torch counts in the next."""
    model, lines = made(name), list[str]()
    if peak:
        louder(model, name, peak)
    fitted, _ = core_model.fit_model(model, precision, keep_latents="never", machine=turing(), tell=lines.append)
    if behind:
        fitted.set_model_compute_dtype(getattr(torch, behind))
    output(fitted, name)
    first = [*lines]
    with watched(fitted) as watch:
        output(fitted, name)
    weight = model.model.diffusion_model.get_parameter
    fp16 = sum("torch.float16" in dtypes and weight(path).ndim < 5 for path, dtypes in watch.products.items())
    attention = sum(count for call, count in watch.calls.items() if "attention" in call)
    layers = {"layers": len(watch.products), "fp16": fp16}
    return {"told": lines, "first": first, **layers, "attention": attention, "runs": watch.runs}


def cached(name: str) -> dict[str, Any]:
    """Errors against core's fp32 and what is said of one fit of a network that core would compute in fp16, by itself
    and with other nodes behind it."""
    loud, model, lines = made(name), made(name, compute=None), list[str]()
    louder(loud, name, PEAK)
    model.model.diffusion_model.load_state_dict(loud.model.diffusion_model.state_dict())
    expected = output(loud, name)
    fitted, _ = core_model.fit_model(model, "fp16-safe", keep_latents="never", machine=turing(), tell=lines.append)
    narrow, bypassed, layer = (
        fitted.clone(),
        fitted.clone(),
        model.model.diffusion_model.get_submodule(CASES[name].loud),
    )
    narrow.set_model_compute_dtype(torch.float16)
    forward = {"forward": functools.partial(type(layer).forward, layer)}
    injection = PatcherInjection(lambda _: vars(layer).update(forward), lambda _: vars(layer).pop("forward"))
    bypassed.set_injections("bypass_lora", [injection])
    errors, told = {}, {}
    graphs = {"fp16 behind": narrow, "alone": fitted, "bypass behind": bypassed, "bypass again": bypassed}
    for graph, each in {**graphs, "alone again": fitted}.items():
        lines.clear()
        errors[graph], told[graph] = error(output(each, name), expected), [*lines]
    return {"errors": errors, "told": told}


def of_a_clip(rows: float = 1.0) -> dict[str, Any]:
    """The same of a text encoder: its first prompt; one row of every third Linear is ``rows`` times larger."""
    clip, ids = text_encoder("T5")
    for index, layer in enumerate([*filter(is_linear, clip.cond_stage_model.modules())][::3]):
        with torch.no_grad():
            layer.weight[index] *= rows
    lines, network = list[str](), clip.cond_stage_model
    kind = type(network)

    def encode(encoder: Any, given: Tensor) -> Any:
        return kind.forward(encoder, given, attention_mask=torch.ones_like(given), dtype=torch.float32)

    network.__class__ = type("Encoders", (kind,), {ENCODE: encode})
    expected = encode(network, ids)[0]
    fitted, _ = core_clip.fit_clip(clip, "fp16-safe", machine=turing(), tell=lines.append)
    kept = []
    for given in (functools.partial(encode, network), None):  # another pack's; then ours, taken back before a prompt
        vars(network).update({} if given is None else {ENCODE: given})
        fitted.patcher.inject_model(), fitted.patcher.eject_model()
        kept.append(vars(network).pop(ENCODE, None) is given)
    management.load_models_gpu([fitted.patcher])
    own = vars(network)[ENCODE]
    around = vars(network)[ENCODE] = lambda given: own(given)  # another pack's around ours
    wrong = error(fitted.cond_stage_model.encode_token_weights(ids)[0], expected)
    kept.append(vars(network).get(ENCODE) is around)
    with Watch(network) as watch:
        fitted.cond_stage_model.encode_token_weights(ids)
    fp16 = sum("torch.float16" in dtypes for dtypes in watch.products.values())
    return {"told": lines, "layers": len(watch.products), "fp16": fp16, "kept": kept, "error": wrong}


@contextmanager
def wide(name: str) -> Iterator[None]:
    """The case at a greater width."""
    config, shape, width = WIDE[name]
    case = CASES[name]
    shapes = ((1, *shape), *case.shapes[1:])
    with mock.patch.dict(
        core_tiny.CASES, {name: replace(case, config={**case.config, **config}, shapes=shapes, width=width)}
    ):
        yield


def bytes_outside_products(name: str, peak: float = 0.0) -> dict[str, Any]:
    """Bytes and kernels of one step as fitted, against plain fp16 with the same attention."""
    with wide(name):
        model, lines = made(name), list[str]()
        if peak:
            louder(model, name, peak)
        plain = model.clone()
        plain.set_model_compute_dtype(torch.float16)
        options = plain.model_options["transformer_options"]
        options[OVERRIDE] = lambda _func, *args, **kwargs: attention_pytorch(*args, **kwargs)
        found = {}
        fitted, _ = core_model.fit_model(model, keep_latents="never", machine=turing(), tell=lines.append)
        safe, _ = core_model.fit_model(model, "fp16-safe", keep_latents="never", machine=turing())
        for which, each in (("plain", plain), ("auto", fitted), ("safe", safe)):
            output(each, name)
            with watched(each) as watch:
                output(each, name)
            found[which] = watch
        kept = {f"{which} {what}": getattr(found[which], what) / getattr(found["plain"], what)
                for which in ("auto", "safe") for what in ("bytes", "kernels")}  # fmt: skip
        return {"told": lines, **kept}


def remembered(name: str, folder: str) -> dict[str, Any]:
    """Runs of a network whose sizes are kept beside its file: measured, trusted, and wrong for louder weights."""
    file = Path(folder) / "file.safetensors"
    file.write_bytes(b"its header")
    machine = turing()
    machine = replace(machine, probes=ProbeStore(machine.facts, Path(folder)))

    def run(model: Any) -> tuple[float, int]:
        expected = output(model, name)
        model.cached_patcher_init = (None, (str(file),))
        fitted, _ = core_model.fit_model(model, keep_latents="never", machine=machine, tell=lines.append)
        with watched(fitted) as watch:
            found = output(fitted, name)
        return error(found, expected), watch.runs

    def files() -> list[str]:
        return sorted(path.name for path in (Path(folder) / FOLDER).glob("*"))

    lines: list[str] = []
    loud = made(name)
    louder(loud, name, PEAK)
    found: dict[str, Any] = {"first": run(made(name)), "again": run(made(name)), "files": len(files())}
    found |= {"loud": run(loud), "corrected": run(loud), "lora": run(lora_on(made(name), name))}
    found |= {"other": run(lora_on(made(name), name, 99)), "same": run(lora_on(made(name), name)), "more": len(files())}
    for path in (Path(folder) / FOLDER).glob("*"):
        path.write_text('{"sizes": [}')
    return {**found, "damaged": run(made(name)), "told": lines}


def loud_convolutions() -> dict[str, Any]:
    """Core's 1-D and 2-D convolutions of loud input, with and without groups, against their own fp32; and a Linear with
    a few rows, with and without a GEMM that widens."""
    operations, errors = comfy.ops.manual_cast, {}

    def compare(name: str, layer: nn.Module, x: Tensor, fp32_output: bool = False) -> None:
        fill(layer)
        layers, counts, network = SafeLayers(fp32_output, True), Counts(), nn.ModuleList([layer])
        expected = layer(x)
        layers.measure(network, x, None, x.dtype)
        with counts.counting(left_of(network, set(layers.free))), layers.patches_on(counts):
            found = layer(x)
        errors[name] = error(found, expected), str(counts)

    for kind, shape in ((operations.Conv1d, (2, 24, 40)), (operations.Conv2d, (2, 24, 9, 9))):
        for kernel, groups in ((1, 1), (3, 1), (3, 4), (3, 12)):
            layer = kind(24, 12, kernel, padding=kernel // 2, groups=groups, dtype=torch.float16)
            name = f"{kind.__name__} {kernel} {groups}{' few' if groups == 12 else ''}"
            compare(name, layer, 3e5 * torch.randn(shape))
    with mock.patch.object(fp16_layers, "fp32_product", lambda x, weight: x.float() @ weight.float().t()):
        for widens in (False, True):
            layer = operations.Linear(64, 24, dtype=torch.float16)
            compare(f"Linear {widens} few", layer, 3e5 * torch.randn(2, 2, 64), widens)
    network = nn.ModuleList([operations.Conv1d(64, 64, 3), operations.Linear(64, 64), operations.Conv2d(4, 4, 1)])
    cut = SafeLayers(False, True)
    cancel = management.InterruptProcessingException
    with mock.patch.object(comfy.ops, "run_every_op", side_effect=cancel), suppress(cancel):
        cut.measure(network, torch.ones(1), "weights", torch.float32)
    cut.measure(network, torch.ones(1), "weights", torch.float32)
    told = {"unfit": unfit_for_safe(network), "unet": unfit_for_safe(network[2:]), "after a cancel": len(cut.patches)}
    return {"errors": errors, **told}
