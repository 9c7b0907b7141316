"""Scenes about core's attention functions under a fit: whichever is configured, finite operands give right values."""

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import SimpleNamespace
from typing import Any
from unittest import mock

import comfy.ldm.modules.attention as core_attention
import comfy.model_management as management
import torch
from anygpu.compat.device.facts import facts_for
from anygpu.compat.device.probe_store import ProbeStore
from anygpu.compat.device.quirks import DevicePolicy
from anygpu.compat.transforms import attention as attention_choice
from anygpu.compat.transforms.attention import Attention
from anygpu.compat.transforms.guard import Guard, around, forward_inside
from anygpu.compat.transforms.plain_calls import PlainCalls
from anygpu.host.core import attention as override
from anygpu.host.core import clip as core_clip
from anygpu.host.core import machine as core_machine
from anygpu.host.core import model as core_model
from anygpu.host.core.attention import AttentionOverride, Preference
from anygpu.host.core.layers import Counts
from anygpu.host.core.ownership import is_linear
from attention_cases import crafted, exact, sums_of_64_keys_in_fp16
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from host.inside import core_fit_vaes, core_tiny_vaes
from host.inside.core_fit import turing
from host.inside.core_tiny import error, made, output
from host.inside.sight import state

FUNCTIONS = {
    "basic": core_attention.attention_basic,
    "split": core_attention.attention_split,
    "sub_quad": core_attention.attention_sub_quad,
    "sub_quad in chunks": core_attention.attention_sub_quad,
    "pytorch": core_attention.attention_pytorch,
    "math": core_attention.attention_pytorch,
}


def by_function(function: str) -> dict[str, Any]:
    """The error of each crafted call through one of core's functions with our override, in both of core's layouts."""
    counts, errors = Counts(), {}
    with ExitStack() as stack:
        if function == "sub_quad in chunks":
            stack.enter_context(state(get_free_memory=lambda _dev=None, both=False: (1, 1) if both else 1))
        if function == "math":
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            for module in (override, attention_choice):
                stack.enter_context(mock.patch.object(module, "fused_kernel", lambda *_: ""))
            torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
            stack.callback(torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp, False)
        ours = AttentionOverride(Attention(), True, counts=counts)
        for name, *given in crafted():
            errors[name] = max(error_of(FUNCTIONS[function], ours, *given, apart) for apart in (False, True))
    fp16 = sum(count for way, count in counts.ways.items() if way.endswith("in fp16"))
    reached = counts.ways.total() == 2 * len(errors)
    return {"errors": errors, "fp16": fp16 if function != "math" else reached * 4, "reached": reached}


def error_of(
    function: Callable[..., Tensor], ours: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, apart: bool
) -> float:
    """Against fp64, called as networks call it."""
    expected = exact(query, key, value, mask)
    options = {"transformer_options": {override.OVERRIDE: ours}}
    if apart:
        found = function(query, key, value, 2, mask, skip_reshape=True, skip_output_reshape=True, **options)
    else:
        together = (each.transpose(1, 2).flatten(2) for each in (query, key, value))
        found = function(*together, 2, mask=mask, **options).unflatten(-1, (2, -1)).transpose(1, 2)
    return error(found.double(), expected)


def by_another(function: str) -> dict[str, Any]:
    """The same through a kernel of a package, or another node's, which asks core's function for calls with a mask."""
    seen, errors = set(), {}

    def sage(q: Tensor, k: Tensor, v: Tensor, heads: int, mask: Any = None, **kwargs: Any) -> Tensor:
        seen.update(str(each.dtype) for each in (q, k, v))
        calls.append(1)
        split = [
            each if kwargs.get("skip_reshape") else each.unflatten(-1, (heads, -1)).transpose(1, 2)
            for each in (q, k, v)
        ]
        kernel = exact if function == "flash" else sums_of_64_keys_in_fp16
        found = kernel(*split, mask).to(q.dtype)
        return found if kwargs.get("skip_output_reshape") else found.transpose(1, 2).flatten(2)

    def node(func: Any, q: Tensor, k: Tensor, v: Tensor, heads: int, mask: Any = None, **kwargs: Any) -> Tensor:
        own = func if mask is not None or len(calls) % 2 else sage
        calls.append(1)
        seen.update(str(each.dtype) for each in (q, k, v))
        return own(q, k, v, heads, mask=mask, **kwargs)

    calls: list[int] = []
    sage.__name__ = "attention_sage"
    ours = AttentionOverride(Attention(), True, node if function == "another node's" else None)
    called = core_attention.attention_sub_quad if ours.before else core_attention.wrap_attn(sage)
    for name, *given in crafted():
        errors[name] = max(error_of(called, ours, *given, apart) for apart in (False, True))
    return {"errors": errors, "calls": len(calls), "dtypes": sorted(seen)}


def loud(name: str, factor: float) -> dict[str, Any]:
    """A network whose queries, keys and values are many times larger, against core's fp32."""
    model, lines = made(name), list[str]()
    with torch.no_grad():
        for path, leaf in model.model.diffusion_model.named_modules():
            if is_linear(leaf) and path.rpartition(".")[2] in ("to_q", "to_k", "to_v", "qkv"):
                rows = leaf.out_features // 3 if path.endswith("qkv") else leaf.out_features
                leaf.weight[-rows:] *= min(factor, 6e4 / float(leaf.weight.abs().max()))
    expected = output(model, name)
    fitted, _ = core_model.fit_model(model, keep_latents="never", machine=turing(), tell=lines.append)
    return {"error": error(output(fitted, name), expected), "told": lines}


def chosen_by_flag() -> dict[str, Any]:
    """What becomes of attention where the user chose core's function on the command line."""
    lines: list[str] = []
    with mock.patch.object(core_machine.options, "use_split_cross_attention", True):
        fitted, decisions = core_model.fit_model(made("Wan 2.1"), machine=turing(), tell=lines.append)
        output(fitted, "Wan 2.1")
    management.unload_all_models()
    return {"said": str(decisions[1]), "told": lines[0]}


def guarded() -> dict[str, Any]:
    """The forwards that a fit hands to the guard of a device, and those of one that has none."""
    seen: list[Any] = []
    calls: list[int] = []

    class Recorder:
        @contextmanager
        def looking(self, key: Any) -> Iterator[None]:
            seen.append([*key[1]] if len(key) > 1 else key)
            yield

    machine = turing()
    on_cpu, machine.__dict__["guard"] = machine.guard, Recorder()
    machine.__dict__["calls"] = mode = mock.MagicMock()
    mode.__enter__.side_effect = lambda: calls.append(len(seen))
    fitted, _ = core_model.fit_model(made("Wan 2.1"), keep_latents="never", machine=machine)
    output(fitted, "Wan 2.1")
    models = len(seen)
    vae, latents = core_tiny_vaes.made("Wan 2.1"), core_tiny_vaes.latents_of("Wan 2.1")
    with core_fit_vaes.noted():
        core_fit_vaes.fitted(vae, machine=machine).decode(latents)
    vaes = len(seen) - models
    clip, ids = core_fit_vaes.text_encoder("T5")
    encode = {"encode_token_weights": lambda network, ids: network(ids, torch.ones_like(ids), dtype=torch.float32)}
    clip.cond_stage_model.__class__ = type("Encoders", (type(clip.cond_stage_model),), encode)
    text, _ = core_clip.fit_clip(clip, "fp16-safe", machine=machine)
    management.load_models_gpu([text.patcher])
    for _ in range(2):
        text.cond_stage_model.encode_token_weights(ids)
    clips = len(seen) - models - vaes
    return {"seen": seen[:models], "on_cpu": on_cpu is None, "vaes": vaes, "clips": clips, "calls": calls}


def cancelled() -> list[int]:
    """Modes that are left on the thread where core's own cancel ends a forward under a guard and a device's calls."""

    class Cut(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise management.InterruptProcessingException

    network, store = Cut(), ProbeStore(facts_for("cpu"), asked={})
    inside = functools.partial(around, Guard(store), PlainCalls(DevicePolicy(product_rows=2**20)))
    network.forward = forward_inside(network, inside)
    with suppress(management.InterruptProcessingException):
        network(torch.ones(1))
    return [torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()]


def preferred() -> dict[str, Any]:
    """Which kernel computes in layers that ask for one, as newer core's do, and in one that does not."""
    counts, calls = Counts(), list[str]()

    def kernel(q: Tensor, k: Tensor, v: Tensor, heads: int, **_: Any) -> Tensor:
        calls.append(str(q.dtype))
        return exact(q, k, v, None).to(q.dtype)

    class Layer(torch.nn.Module):
        def __init__(self, function: Any) -> None:
            super().__init__()
            self.comfy_attention = SimpleNamespace(function=function)

        def forward(self, query: Tensor, options: Any) -> Tensor:
            query = query.float()
            return core_attention.attention_sub_quad(
                query, query, query, 2, skip_reshape=True, skip_output_reshape=True, transformer_options=options,
                preferred_attention=self.comfy_attention,
            )  # fmt: skip

    network = torch.nn.ModuleList([Layer(kernel), Layer(None), Layer(core_attention.wrap_attn(kernel))])
    preference, query = Preference(), torch.randn(1, 2, 8, 16)
    ours = AttentionOverride(Attention(), True, counts=counts, preference=preference)
    with preference.followed(network):
        found = [layer(query, {override.OVERRIDE: ours}) for layer in network]
    after = network[0](query, {override.OVERRIDE: ours})
    expected = exact(query, query, query, None)
    errors = [error(each.double(), expected) for each in (*found, after)]
    return {"calls": calls, "error": max(errors), "ways": dict(counts.ways)}


def in_containers(by_node: bool) -> dict[str, Any] | None:
    """How comfy-kitchen's int8 attention, in emulation, gets operands that lie in containers, by flag or by node.
    None where core has none."""
    if not hasattr(core_attention, "attention_comfy_kitchen_int8"):
        return None
    given, alive = list[str](), list[int]()

    def prequantize(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Any:
        given.extend(str(each.dtype) for each in (q, k, v))
        alive.append(sum(each.tensor is not None for each in containers))
        return q, k, v

    kitchen = SimpleNamespace(
        prequantize_int8_attention=prequantize,
        int8_attention_from_prequantized=lambda packed: exact(*packed, None).float(),
        int8_attention=lambda q, k, v, **_: exact(*prequantize(q, k, v), None).float(),
    )
    counts, before = Counts(), None
    int8, used = core_attention.attention_comfy_kitchen_int8, core_attention.attention_sub_quad
    if by_node:
        model = made("Wan 2.1")
        model.set_model_optimized_attention(int8)
        before = model.model_options["transformer_options"][override.OVERRIDE]
    else:
        used = int8
    ours = AttentionOverride(Attention(), True, before, counts)
    operands = [1e5 * torch.randn(1, 2, 8, 16) for _ in range(3)]
    options = {"transformer_options": {override.OVERRIDE: ours}, "skip_reshape": True, "skip_output_reshape": True}
    with (
        mock.patch.object(core_attention, "comfy_kitchen", kitchen),
        mock.patch.object(core_attention, "optimized_attention", used),
    ):
        containers = [core_attention.AttentionTensorContainer(each.clone()) for each in operands]
        packed = used(*containers, 2, **options)
        containers = []
        plain = used(*operands, 2, **options)
    expected = exact(*operands, None)
    errors = [error(each.double(), expected) for each in (packed, plain)]
    return {"dtypes": sorted(set(given)), "alive": alive, "error": max(errors), "ways": dict(counts.ways)}


def narrow_operands(function: str, dtype: str) -> dict[str, float]:
    """Errors of 16-bit operands as loaded: large values under sums in fp16, large scores under core's functions."""
    ours, own = AttentionOverride(Attention(), False), getattr(torch, dtype)
    query, key, value = (torch.randn(1, 2, 128, 64, generator=torch.Generator().manual_seed(n)) for n in range(3))
    if function == "sage":

        def attention_sage(q: Tensor, k: Tensor, v: Tensor, heads: int, **_: Any) -> Tensor:
            return sums_of_64_keys_in_fp16(q, k, v.half(), None).to(q.dtype)

        called, operands = core_attention.wrap_attn(attention_sage), [query * 0, key, value.abs() * 3000]
    else:
        called, operands = FUNCTIONS[function], [query * 120, query * 120, value]
    operands = [each.to(own) for each in operands]
    expected, found = exact(*operands, None), {}
    with ExitStack() as stack:
        for module in (override, attention_choice):
            stack.enter_context(mock.patch.object(module, "fused_kernel", lambda *_: ""))
        for which, options in (("core", {}), ("ours", {override.OVERRIDE: ours})):
            result = called(*operands, 2, skip_reshape=True, skip_output_reshape=True, transformer_options=options)
            found[which] = error(result.double(), expected)
    return found


def on_a_radeon(core_takes: str) -> dict[str, Any]:
    """What becomes of attention in bf16 on a Radeon with a kernel of torch's, by the function that core takes there."""
    machine, lines = turing(backend="rocm", arch="gfx1102", arch_class="rocm", name="RX 7600"), list[str]()
    functions = {**FUNCTIONS, "sage": core_attention.wrap_attn(lambda *_, **__: None)}
    functions["sage"].__name__ = "attention_sage"
    with mock.patch.object(core_attention, "optimized_attention", functions[core_takes]):
        model = made("Wan 2.1", torch.bfloat16, None)
        fitted, decisions = core_model.fit_model(model, keep_latents="never", machine=machine, tell=lines.append)
        if core_takes != "sage":
            output(fitted, "Wan 2.1")
    return {"same": fitted is model, "said": [str(decision) for decision in decisions[:2]], "told": lines}
