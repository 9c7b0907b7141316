"""Scenes about core's packed layers in a fitted model, and about layers that unpack their own bytes."""

import contextlib
import dataclasses
import functools
import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import comfy.lora
import comfy.model_management as management
import comfy.model_patcher
import comfy.ops
import comfy.quant_ops as quant_ops
import comfy.text_encoders.llama as llama
import comfy.utils
import comfy_kitchen.backends.eager as eager
import comfy_kitchen.tensor.fp8 as fp8
import torch
from anygpu.compat import output_check
from anygpu.compat.device import packed_paths, timed_choice
from anygpu.compat.device.packed_paths import INT8, INTEGERS
from anygpu.compat.device.probe_store import ProbeStore
from anygpu.host.core import clip as core_clip
from anygpu.host.core import model as core_model
from anygpu.host.core import packed as core_packed
from anygpu.host.core import vae as core_vae
from anygpu.host.core.machine import ModelDevice
from anygpu.host.core.ownership import is_linear
from torch import Tensor, nn
from torch.nn import functional

from host.inside import core_fit_vaes, core_tiny_vaes
from host.inside.core_fit import PEAK, machine_named, traces, turing
from host.inside.core_tiny import (
    CASES,
    GROUP,
    HOST,
    MissingError,
    error,
    fill,
    layout_of,
    louder,
    made,
    output,
    pack,
    row_of,
)

FULL = torch.float32
DTYPES = {"fp32": FULL, "bf16": torch.bfloat16, "fp16": torch.float16}
BLACKWELL = {"arch": "sm120", "arch_class": "cuda-sm80+", "name": "RTX 5090"}
VOLTA = {"arch": "sm70", "name": "V100"}
ROTATED = {"per_channel": True, "convrot": True, "convrot_groupsize": GROUP}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {  # that are not simply named as their format
    "int8 rowwise": ("int8_tensorwise", {"per_channel": True}), "int8 convrot": ("int8_tensorwise", ROTATED),
}  # fmt: skip
PRODUCTS = ("int8_linear", "w4a8_int8_linear", "convrot_w4a4_linear", "scaled_mm_nvfp4", "scaled_mm_mxfp8")


def pack_layers(network: nn.Module, plain: nn.Module, kind: str) -> None:
    """Pack the Linears of ``network`` as core's loader does, and give ``plain`` the same values.

    A Linear whose rows are shorter than a group of the format stays as it is, as in published files.
    """
    file, (layer_format, options) = plain.float().state_dict(), KINDS.get(kind, (kind, {}))
    for path, leaf in network.named_modules():
        if is_linear(leaf) and leaf.in_features % GROUP == 0 == leaf.out_features % GROUP:
            plain.get_submodule(path).weight.copy_(pack(file, path, layer_format, **options))
    network.load_state_dict(file)
    for path, value in network.named_parameters():  # all else is rounded to the dtype that the file was loaded for
        if not isinstance(value, quant_ops.QuantizedTensor):
            plain.get_parameter(path).copy_(value)


def empty(name: str, loaded: str) -> Any:
    """A model of core's whose layers take packed weights, for a file that is to be loaded for a dtype."""
    config = row_of(name)(dict(CASES[name].config))
    config.set_inference_dtype(torch.float16, DTYPES[loaded])
    config.quant_config = {"mixed_ops": True}
    return config.get_model({}, "").eval()


def packed_twin(name: str, kind: str, loaded: str = "fp32", device: torch.device = HOST) -> tuple[Any, Any]:
    """A MODEL whose Linears are packed as core's loader packs them, and one with the same values in fp32."""
    model, plain = empty(name, loaded), made(name)
    pack_layers(model.diffusion_model, plain.model.diffusion_model, kind)
    return comfy.model_patcher.CoreModelPatcher(model, device, HOST), plain


@contextmanager
def products_counted(instead: Callable[..., Tensor] | None = None) -> Iterator[Counter[str]]:
    """Counts every product of packed weights, by kitchen's function and torch's own; ``instead`` replaces torch's."""
    calls, theirs = Counter[str](), instead or torch._int_mm

    def counted(name: str, function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        calls[name] += 1
        return function(*args, **kwargs)

    owners = [(eager, name, getattr(eager, name)) for name in PRODUCTS if hasattr(eager, name)]
    owners += [(torch, "_int_mm", theirs), (fp8, "_fp8_scaled_mm", fp8._fp8_scaled_mm)]
    with contextlib.ExitStack() as stack:
        for owner, name, function in owners:
            stack.enter_context(mock.patch.object(owner, name, functools.partial(counted, name, function)))
        yield calls


def left_behind(network: nn.Module, unpacked: bool = False) -> int:
    """How much of ours is on a network: attributes, layouts, core's switch where it was not ``unpacked``."""
    layers = list(core_packed.packed_layers(network))
    layouts = sum(layer.weight._layout_cls.startswith("anygpu") for layer in layers)
    return (
        traces(network) + layouts + sum(getattr(layer, "_full_precision_mm", unpacked) != unpacked for layer in layers)
    )


def nvfp4_product(
    a: Tensor, b: Tensor, tensor_scale_a: Tensor, tensor_scale_b: Tensor, block_scale_a: Tensor, block_scale_b: Tensor,
    bias: Tensor | None = None, out_dtype: torch.dtype = FULL, alpha: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """a (M, K) times b (N, K) transposed, as tensor cores give it: products of the values, sums in fp32."""
    left = eager.dequantize_nvfp4(a, tensor_scale_a, block_scale_a, FULL)
    right = eager.dequantize_nvfp4(b, tensor_scale_b, block_scale_b, FULL)
    return functional.linear(left, right, None if bias is None else bias.float()).to(out_dtype)


def mxfp8_product(
    a: Tensor, b: Tensor, block_scale_a: Tensor, block_scale_b: Tensor, bias: Tensor | None = None,
    out_dtype: torch.dtype = FULL,
) -> Tensor:  # fmt: skip
    """The same for MXFP8."""
    left, right = eager.dequantize_mxfp8(a, block_scale_a, FULL), eager.dequantize_mxfp8(b, block_scale_b, FULL)
    return functional.linear(left, right, None if bias is None else bias.float()).to(out_dtype)


@contextmanager
def block_scaled_products() -> Iterator[None]:
    """The two products that only Blackwell has; all around them is as on the card: packing, layouts, dispatch."""
    with (
        mock.patch.object(eager, "scaled_mm_nvfp4", nvfp4_product),
        mock.patch.object(eager, "scaled_mm_mxfp8", mxfp8_product),
    ):
        yield


def packed(
    name: str, kind: str, native: bool = True, loaded: str = "fp32", precision: str = "auto", **chosen: Any
) -> dict[str, Any]:
    """The error against the same values unpacked, the products of packed weights, and what was decided."""
    model, plain = packed_twin(name, kind, loaded)
    network = model.model.diffusion_model
    layers = list(core_packed.packed_layers(network))
    for layer in layers:
        layer._full_precision_mm = not native  # what core's loader decides by the card
    with block_scaled_products(), products_counted() as calls:
        expected = output(plain, name)
        own, alone = error(output(model, name), expected), calls.total()
        calls.clear()
        fitted, decisions = core_model.fit_model(model, precision, keep_latents="never", machine=turing(), **chosen)
        found, here = output(fitted, name), calls.total()
        newer, _ = core_model.fit_model(model, keep_latents="never", machine=turing(**BLACKWELL))
    return {
        "same": newer is model,
        "core": own,
        "error": error(found, expected),
        "alone": alone,
        "products": here,
        "layers": len(layers),
        "traces": left_behind(network, unpacked=not native),
        "said": [str(decision) for decision in decisions],
    }


def on_profile(name: str, kind: str, profile: str, lora: bool = False) -> dict[str, Any]:
    """The same on a simulated machine with its faults and refusals, fitted as ``auto`` decides.

    Args:
        lora: whether a loud layer is patched; the error then has that of packing it anew.
    """
    with machine_named(profile) as machine, products_counted() as calls:
        model, plain = packed_twin(name, kind, "fp16", machine.facts.device)
        network, path = model.model.diffusion_model, CASES[name].loud
        for layer in core_packed.packed_layers(network):
            layer._full_precision_mm = layer.quant_format not in INTEGERS  # as core's loader decides there
        before, expected = left_behind(network), output(plain, name)
        if lora:
            change = 0.5 * torch.randn(network.get_submodule(path).weight.shape)
            for each in (model, plain):
                each.add_patches({f"diffusion_model.{path}.weight": ("diff", (change,))})
        changed = output(plain, name)
        fitted, decisions = core_model.fit_model(model, keep_latents="never", machine=machine)
        found = output(fitted, name)
        packed = [layer.weight for layer in core_packed.packed_layers(fitted.model.diffusion_model)]
        management.unload_all_models()
    return {
        "error": error(found, changed), "products": calls.total(), "said": [str(decision) for decision in decisions],
        "traces": left_behind(network) - before, "changed": error(changed, expected), "packed": len(packed),
    }  # fmt: skip


class PackedLinear(torch.nn.Linear):
    """As the layers of packs that read GGUF files: their bytes are unpacked by a method of their own."""

    casts = 0

    def cast_bias_weight(self, x: Any = None, dtype: Any = None, device: Any = None, bias_dtype: Any = None) -> Any:
        """Weight and bias; counts how often."""
        type(self).casts += 1
        return self.unpacked.to(device, dtype), None if self.bias is None else self.bias.to(device, bias_dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As that pack computes."""
        weight, bias = self.cast_bias_weight(None, x.dtype, x.device, x.dtype)
        return torch.nn.functional.linear(x, weight, bias)


PackedLinear.__name__ = "Linear"


def unpacked_by_the_layer(name: str) -> dict[str, Any]:
    """The error with layers that unpack their own weights, whose stored bytes mean nothing to core."""
    model = made(name)
    louder(model, name, PEAK)
    expected = output(model, name)
    for leaf in list(filter(is_linear, model.model.diffusion_model.modules())):
        leaf.unpacked = leaf.weight.detach().clone()
        leaf.weight.fill_(float("nan"))
        leaf.__class__ = PackedLinear
    fitted, _ = core_model.fit_model(model, keep_latents="never", machine=turing())
    return {"error": error(output(fitted, name), expected), "casts": PackedLinear.casts}


def interrupted(name: str, kind: str) -> dict[str, Any]:
    """What a cancelled sampling and one that fails leave behind, and the feed-forward function of core's."""
    model, _ = packed_twin(name, kind, "fp16")
    fitted, _ = core_model.fit_model(model, "as loaded", keep_latents="never", machine=turing(**VOLTA))
    raised, past = [], getattr(comfy.ops, "linear_input_act", None)
    for error_class in (management.InterruptProcessingException, ValueError):
        with mock.patch.object(quant_ops.ck, "int8_linear"), mock.patch.object(comfy.ops, "run_every_op") as stop:
            stop.side_effect = [*[None] * 9, error_class()]
            try:
                output(fitted, name)
            except error_class:
                raised.append(stop.call_count)
    return {
        "raised": raised,
        "traces": left_behind(model.model.diffusion_model),
        "past": getattr(comfy.ops, "linear_input_act", None) is past,
    }


def merged_encoder(loaded: str) -> Any:
    """A tiny encoder of core's whose feed-forward goes past the layer, packed, with a tied head; its twin; and ids."""
    config = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
              "num_key_value_heads": 1, "vocab_size": 128}  # fmt: skip
    clips = []
    for kind in ("packed", "plain"):
        quantised = comfy.ops.mixed_precision_ops({}, DTYPES[loaded], full_precision_mm=True)
        operations = quantised if kind == "packed" else comfy.ops.manual_cast
        with torch.random.fork_rng():
            torch.manual_seed(0)
            network = Merged(config, DTYPES[loaded] if kind == "packed" else FULL, operations)
            if kind == "plain":
                fill(network)
        clips.append(network.eval())
    packed_network, plain = clips
    file = plain.state_dict()
    for path, leaf in packed_network.named_modules():
        if is_linear(leaf) or path.endswith("embed_tokens"):
            plain.get_submodule(path).weight.copy_(pack(file, path, INT8, **ROTATED))
    keys = packed_network.load_state_dict(file, strict=False)
    if keys.unexpected_keys:
        raise MissingError("packed embeddings")
    assert not keys.missing_keys
    for path, value in packed_network.named_parameters():
        if not isinstance(value, quant_ops.QuantizedTensor):
            plain.get_parameter(path).copy_(value)
    return core_fit_vaes.clip_of(packed_network), plain, torch.arange(24)[None] % 99


class Merged(llama.BaseLlama, llama.BaseGenerate, nn.Module):
    """Core's Llama with merged feed-forwards, as in MiniMax' text encoder."""

    def __init__(self, config: dict[str, Any], dtype: torch.dtype, operations: Any) -> None:
        super().__init__()
        self.num_layers = config["num_hidden_layers"]
        fields = dataclasses.fields(llama.Qwen3_06BConfig)
        settings = llama.Qwen3_06BConfig(**{field.name: config[field.name] for field in fields if field.name in config})
        settings.merged_mlp = True
        self.model = llama.Llama2_(settings, device="cpu", dtype=dtype, ops=operations)
        self.dtype = dtype


def encoder(loaded: str, precision: str = "auto") -> dict[str, Any]:
    """Error and products of an encoder with merged feed-forwards, and of its tied head."""
    clip, plain, ids = merged_encoder(loaded)
    stream = DTYPES[loaded]

    def run(network: Any, dtype: torch.dtype) -> Tensor:
        hidden = network(ids, attention_mask=torch.ones_like(ids), dtype=dtype)[0]
        return torch.cat([hidden.float().flatten(), network.logits(hidden).float().flatten()])

    with torch.inference_mode(), products_counted() as calls:
        expected = run(plain, FULL)
        management.load_models_gpu([clip.patcher])
        own, alone = error(run(clip.cond_stage_model, stream), expected), calls.total()
        calls.clear()
        fitted, decisions = core_clip.fit_clip(clip, precision, machine=turing(**VOLTA))
        management.load_models_gpu([fitted.patcher])
        run(fitted.cond_stage_model, stream)
        found, here = run(fitted.cond_stage_model, FULL), calls.total()
        management.load_models_gpu([clip.patcher])
        newer, _ = core_clip.fit_clip(clip, machine=turing(**BLACKWELL))
    return {
        "error": error(found, expected), "core": own, "products": here, "alone": alone, "same": newer is clip,
        "traces": left_behind(clip.cond_stage_model, unpacked=True), "said": [str(decision) for decision in decisions],
    }  # fmt: skip


def vae(product: str) -> dict[str, Any]:
    """MiniMax H3's packed decoder where torch's product raises: by its row, and where the row said it works."""
    here, plain = core_tiny_vaes.made("MiniMax H3"), core_tiny_vaes.made("MiniMax H3")
    network = here.first_stage_model
    operations = comfy.ops.mixed_precision_ops({}, torch.float16)
    for path, leaf in list(network.named_modules()):
        if is_linear(leaf) and leaf.in_features % GROUP == 0 == leaf.out_features % GROUP:
            parent, _, last = path.rpartition(".")
            layer = operations.Linear(leaf.in_features, leaf.out_features, leaf.bias is not None, device="cpu")
            setattr(network.get_submodule(parent), last, layer)
    pack_layers(network, plain.first_stage_model, "int8 convrot")
    machine = turing(**(BLACKWELL if product == "trusted" else VOLTA))

    def raising(*_: Any) -> Tensor:
        raise NotImplementedError("aten::_int_mm is not implemented for this device")

    latents = core_tiny_vaes.latents_of("MiniMax H3")
    calm = mock.patch.object(output_check, "_saturated", lambda *_: "")  # its random frames end at the range's ends
    with calm, core_fit_vaes.noted() as said, products_counted(raising) as calls, mock.patch.dict(core_packed.FAILED):
        expected = plain.decode(latents)
        fitted, decisions = core_vae.fit_vae(here, machine=machine)
        found = fitted.decode(latents)
    return {
        "error": error(found.flatten(), expected.flatten()), "products": calls["_int_mm"], "told": said,
        "traces": left_behind(network), "said": [str(decision) for decision in decisions],
    }  # fmt: skip


STAND_INS: dict[str, tuple[float, Callable[[Tensor], str]]] = {  # seconds of its product, and how it fails by its rows
    "raises": (1.0, lambda _: "raises"), "wrong": (1.0, lambda _: "wrong"), "half as fast": (2.0, lambda _: ""),
    "twice as fast": (0.5, lambda _: ""), "raises for 97 to 127 rows": (0.5, lambda x: "raises" * (96 < len(x) < 128)),
    "ends the process": (1.0, lambda _: "ends"),
}  # fmt: skip


def chosen(stand_in: str, names: list[str]) -> dict[str, Any]:
    """The choice on a device whose int8 product is a stand-in, on a stated clock; core's templates run to the end.

    A process that ends is started again, and asked again by the button.
    """
    seconds, fault = STAND_INS[stand_in]
    clock, true, ends = [0.0], torch._int_mm, [0]

    def product(a: Tensor, b: Tensor) -> Tensor:
        clock[0] += seconds
        if fault(a) == "ends":
            ends[0] += 1
            raise SystemExit(0xC0000005)
        if fault(a) == "raises":
            raise NotImplementedError("aten::_int_mm is not implemented for this device")
        result = true(a, b)
        if fault(a) == "wrong":
            result[0, 0] = -result[0, 0] + 9999
        return result

    def dequantised(weight: Any, values: Any = quant_ops.QuantizedTensor.dequantize) -> Tensor:
        clock[0] += 1.0
        return values(weight)

    device = turing(**VOLTA).facts
    question = {f"packed.{INT8}": functools.partial(packed_paths.packed_product, device, INT8)}
    results = {}
    with (
        mock.patch.object(torch, "_int_mm", product),
        mock.patch.object(timed_choice.time, "perf_counter", lambda: clock[0]),
        mock.patch.object(quant_ops.QuantizedTensor, "dequantize", dequantised),
        mock.patch.multiple(packed_paths, WIDTH=256, ROWS=(1, 17, 97, 112, 127, 300), SAMPLE=300),
        tempfile.TemporaryDirectory() as folder,
    ):
        store = ProbeStore(device, Path(folder), more=question, asked={})
        unasked = packed_paths.path_for(device, INT8, store.known()).path
        for _ in range(2):
            try:
                with mock.patch.object(store, "probes", question):
                    store.ask_all(again=True)
            except SystemExit:
                kept = json.loads(store.path.read_text(encoding="utf-8"))
                kept["asking"][2] -= 60  # as of a process that is no more
                store.path.write_text(json.dumps(kept), encoding="utf-8")
                store = ProbeStore(device, Path(folder), more=question, asked={})
        for name in names:
            try:
                model, plain = packed_twin(name, "int8 convrot", "fp16")
            except MissingError:
                continue
            fitted, decisions = core_model.fit_model(
                model, "as loaded", keep_latents="never", machine=ModelDevice(device, store)
            )
            line = next(str(each) for each in decisions if INT8 in each.subject)
            results[name] = (error(output(fitted, name), output(plain, name)), fitted is model, line)
    return {"unasked": unasked, "results": results, "ends": ends[0]}


def failed_at_work(name: str, kind: str, precision: str) -> dict[str, Any]:
    """A device on which the chosen product works at first and fails later: what is computed, and what is said."""
    model, plain = packed_twin(name, kind, "fp16")
    said: list[str] = []

    def raising(*_: Any) -> Tensor:
        raise RuntimeError("HIPBLAS_STATUS_INVALID_VALUE")

    with mock.patch.dict(core_packed.FAILED):
        core, _ = core_model.fit_model(model, precision, "bounded", "never", "core's own", turing(), said.append)
        with products_counted() as working:
            output(core, name)
        with products_counted(raising) as calls:
            found, again = output(core, name), output(core, name)
        expected = output(plain, name)
    lines = [line for line in said if "dequantised from here on" in line]
    return {
        "error": error(found, expected), "again": error(again, expected), "worked": working["_int_mm"],
        "tries": calls["_int_mm"], "lines": lines, "traces": left_behind(model.model.diffusion_model),
    }  # fmt: skip


def saved_without_float8(kind: str) -> dict[str, Any]:
    """What core's ModelSave writes of a fitted model on a device without float8: the error of the file, read again by
    core, beside that of the file of the model before; whether weights have the same dtypes in both (of scales core
    reads the bytes); and how many of its tensors came to the host while a LoRA's keys were looked up."""
    from comfy_extras.nodes_model_merging import ModelSave

    def saved(model: Any) -> dict[str, torch.Tensor]:
        node = ModelSave()
        node.output_dir = tempfile.mkdtemp()
        node.save(model, "model")
        (path,) = Path(node.output_dir).iterdir()
        return comfy.utils.load_torch_file(str(path))

    def read(file: dict[str, torch.Tensor]) -> torch.Tensor:
        network = empty(name, "fp16")
        weights = {key.removeprefix("model.diffusion_model."): value for key, value in file.items()}
        network.diffusion_model.load_state_dict(weights, strict=False)
        return output(comfy.model_patcher.CoreModelPatcher(network, HOST, HOST), name)

    name = "Wan 2.1"
    here, plain = packed_twin(name, kind, "fp16")
    expected, own = output(plain, name), saved(here)
    with machine_named("mps-like") as machine:
        model, _ = packed_twin(name, kind, "fp16", machine.facts.device)
        fitted, _ = core_model.fit_model(model, keep_latents="never", machine=machine)
        output(fitted, name)
        with mock.patch.object(core_packed, "to_host", wraps=core_packed.to_host) as moved:
            comfy.lora.model_lora_keys_unet(fitted.model, {})
        found = saved(fitted)
        management.unload_all_models()
    dtypes = [{key: value.dtype for key, value in file.items() if key.endswith(".weight")} for file in (own, found)]
    errors = {"core": error(read(own), expected), "error": error(read(found), expected)}
    return errors | {"same": dtypes[0] == dtypes[1], "moved": moved.call_count}


def rounded(layer_format: str) -> dict[float, float]:
    """The relative error of values dequantised for fp16, by the largest weight, against kitchen's own in fp32."""
    errors = {}
    for largest in (0.1, 0.01, 0.001, 1e-4):
        dense = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
        dense *= largest / float(dense.abs().amax())
        if layer_format == "awq_w4a16":
            layout = "TensorCoreAWQW4A16Layout"
            params = quant_ops.get_layout_class(layout).Params(
                scale=torch.full((4, 256), largest / 8),
                zeros=torch.zeros(4, 256),
                orig_dtype=FULL,
                orig_shape=(256, 256),
            )
            weight = quant_ops.QuantizedTensor(dense[:, :128].mul(99 / largest).to(torch.int8), layout, params)
        else:
            layout = layout_of(layer_format)
            scale = {"scale": "recalculate"} if layer_format.startswith("float8") else {}
            weight = quant_ops.QuantizedTensor.from_float(dense, layout, **scale)
        wide = weight.dequantize()
        weight._layout_cls = core_packed._layout(layout, core_packed.DEQUANTISE)
        errors[largest] = error(weight.to(torch.float16).dequantize().float(), wide)
    return errors


def experts() -> dict[str, Any]:
    """Products and error of a packed bank of experts on a device where core would multiply it packed."""
    bank = comfy.ops.mixed_precision_ops({}, FULL).MoEExperts(3, 64, 64, bias=True)
    dense = torch.randn(3, 64, 64, generator=torch.Generator().manual_seed(0)) / 8
    layout = quant_ops.TensorWiseINT8Layout
    each = [layout.quantize(expert, per_channel=True) for expert in dense]
    params = dataclasses.replace(
        each[0][1], scale=torch.stack([params.scale for _, params in each]), orig_shape=(3, 64, 64)
    )
    weight = quant_ops.QuantizedTensor(torch.stack([packed for packed, _ in each]), "TensorWiseINT8Layout", params)
    bank.weight, bank.quant_format, bank.layout_type = nn.Parameter(weight, requires_grad=False), INT8, layout.__name__
    torch.nn.init.zeros_(bank.bias)
    x, network = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)), nn.Sequential(bank)
    fit = core_packed.packed_fit(network, turing(**VOLTA).facts, {})
    expected = functional.linear(x, layout.dequantize(*each[1]))
    with mock.patch.object(layout, "supports_fast_matmul", lambda: True), products_counted() as calls:
        bank.expert_linear(x, 1)
        alone = calls.total()
        calls.clear()
        with fit.attach(network), bank.bank_resident(x):
            found = bank.expert_linear(x, 1)
    result = {"alone": alone, "products": calls.total(), "error": error(found, expected), "left": left_behind(network)}
    del bank.quant_format  # as a layer of another pack may be
    return {**result, "unnamed": [*map(str, core_packed.packed_fit(network, turing(**VOLTA).facts, {}).decisions)]}
