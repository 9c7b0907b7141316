"""The guard inside a run: wrong results of each kind of operation are named, replaced, kept; right ones cost little."""

import contextlib
import gc
import logging
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from anygpu.compat.device import probes
from anygpu.compat.device.execution import placed
from anygpu.compat.device.facts import facts_for
from anygpu.compat.device.probe_store import IN_RUNS, ProbeStore
from anygpu.compat.device.quirks import DevicePolicy
from anygpu.compat.errors import UnsupportedError
from anygpu.compat.report import report_on
from anygpu.compat.transforms import guard as guard_module
from anygpu.compat.transforms.guard import CHECKS, SHARE, Guard, _some, around, forward_inside, guard_step
from anygpu.kernels import activation, group_norm, library, norm, product, residual, rope, self_tests
from anygpu.kernels.self_tests import CaseShapes
from anygpu.kernels.terms import LAYER, SCALED, Gate, Modulation, Norm
from anygpu.pipelines.load import folder
from anygpu.pipelines.load.folder import load
from anygpu.pipelines.report import precisions
from anygpu.pipelines.requests import LoadRequest
from runs.faults import Interrupted
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from simulated import accelerator
from simulated.test_families import SMALL, rendered

WIDTH = 256


class Network(nn.Module):
    """One of each operation, large enough that 64 rows are few."""

    def __init__(self, of: Callable[[nn.Module, Tensor], Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.of, self.layers = of, nn.ModuleDict(layers)

    def forward(self, x: Tensor) -> Tensor:
        big = functional.linear(x.reshape(-1, WIDTH), x.reshape(-1, WIDTH)[:512])  # work, of which a share is spent
        return self.of(self.layers, x) + 0 * big.sum()


def attention(_: nn.ModuleDict, x: Tensor, **how: Any) -> Tensor:
    q = x.unflatten(-1, (4, -1)).transpose(1, 2)
    return functional.scaled_dot_product_attention(q, q, q, **how)


KINDS: dict[str, tuple[str, Callable[[], nn.Module]]] = {  # operation as the guard names it -> operator that is spoiled
    "addmm": ("aten::addmm", lambda: Network(lambda m, x: m["a"](x), a=nn.Linear(WIDTH, 96))),
    "baddbmm": ("aten::baddbmm", lambda: Network(
        lambda _, x: torch.baddbmm(x.new_full((1, 1, 1), math.nan), x, x.mT, beta=0))),
    "bmm": ("aten::bmm", lambda: Network(lambda m, x: x @ x.mT)),
    "convolution": ("aten::convolution*", lambda: Network(
        lambda m, x: m["a"](x.reshape(1, 16, 8, 32, -1)), a=nn.Conv3d(16, 24, 3, padding=1, stride=(1, 2, 1)))),
    "attention": ("aten::*flash_attention_for_cpu", lambda: Network(attention)),
    "attention, causal": ("aten::*flash_attention_for_cpu", lambda: Network(partial(attention, is_causal=True))),
    "attention, masked": ("aten::*flash_attention_for_cpu", lambda: Network(
        lambda _, x: attention(_, x, attn_mask=x[0, :, :1].T.expand(x.shape[1], -1)))),
    "convolution, valid": ("aten::convolution*", lambda: Network(
        lambda m, x: m["a"](x.reshape(1, 16, 64, -1)), a=nn.Conv2d(16, 24, 3, padding="valid"))),
    "native_layer_norm": ("aten::native_layer_norm", lambda: Network(lambda m, x: m["a"](x), a=nn.LayerNorm(WIDTH))),
    "native_group_norm": ("aten::native_group_norm", lambda: Network(
        lambda m, x: m["a"](x.reshape(len(x), 16, -1)), a=nn.GroupNorm(4, 16))),
    "_to_copy": ("aten::copy_", lambda: Network(lambda m, x: x.half().float())),
    "cat": ("aten::cat", lambda: Network(lambda m, x: torch.cat([x, x + 1], 1))),
}  # fmt: skip


PATHS_OF = {"attention": "chunks of queries"}


def store_of(device: torch.device, folder: Path) -> ProbeStore:
    return ProbeStore(facts_for(device), folder)


def zeroed(rows: int = 0) -> Callable[[str, list, list], None]:
    """Results that lose all rows after so many, as an overflowing index does."""

    def after(op: str, arguments: list, results: list) -> None:
        if op == "aten::copy_" and (arguments[0].dtype is not torch.float16 or arguments[1].dtype is torch.float16):
            return
        (results[0].view(-1)[rows:] if results[0].is_contiguous() else results[0]).zero_()

    return after


def run(guard: Guard, network: nn.Module, x: Tensor) -> Tensor:
    for _ in range(3):  # what has no budget in the first forward is checked in a later one
        with torch.no_grad(), guard.looking(x.shape):
            result = network(x)
    return result


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_result_is_named_replaced_and_kept(
    acc, tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    operator, make = KINDS[kind]
    torch.manual_seed(0)
    network, x = make().eval(), torch.randn(2, 1024, WIDTH)
    with torch.no_grad():
        exact = network(x)
    there, store = network.to(acc), store_of(acc, tmp_path)
    assert not store.misses()
    with accelerator.hook(operator, after=zeroed(64)), caplog.at_level(logging.WARNING):
        found = run(Guard(store), there, x.to(acc)).cpu()
        (named,) = store.misses()
        operation = kind.partition(",")[0]
        assert operation in named and store.misses()[named] == PATHS_OF.get(operation, "the host")
        assert "is wrong on this device" in caplog.text
        torch.testing.assert_close(found, exact, rtol=1e-3, atol=1e-3)
        caplog.clear()
        again = run(Guard(store_of(acc, tmp_path)), there, x.to(acc)).cpu()
    torch.testing.assert_close(again, exact, rtol=1e-3, atol=1e-3)
    assert not caplog.text, "the next process knows"


def of_width(width: int) -> Network:
    def of(_: nn.ModuleDict, x: Tensor) -> Tensor:
        q = x.reshape(-1)[: 4 * 600 * width].reshape(1, 4, 600, width)
        return functional.scaled_dot_product_attention(q, q, q)

    return Network(of)


def of_convolution(**how: int) -> Network:
    torch.manual_seed(0)
    return Network(lambda m, x: m["a"](x.reshape(2, 32, 64, -1)), a=nn.Conv2d(32, 32, 3, **how))


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "make", "usual", "other"),
    [
        ("attention", of_width, {"width": 64}, {"width": 96}),
        ("convolution", of_convolution, {"padding": 1}, {"padding": 1, "stride": 2}),
        ("convolution", of_convolution, {"padding": 1}, {"padding": 2, "dilation": 2}),
        ("convolution", of_convolution, {"padding": 1}, {"padding": 2}),
    ],
)
def test_what_another_kernel_computes_is_looked_at_too(
    acc, tmp_path: Path, kind: str, make: Callable[..., Network], usual: Any, other: Any
) -> None:
    guard, x = Guard(store_of(acc, tmp_path)), torch.randn(2, 1024, WIDTH)
    run(guard, make(**usual).eval().to(acc), x.to(acc))
    network = make(**other).eval()
    exact = network(x).detach()
    guard.done.clear()
    with accelerator.hook(KINDS[kind][0], after=zeroed(64)):
        found = run(guard, network.to(acc), x.to(acc)).cpu()
    assert len(guard.store.misses()) == 1
    torch.testing.assert_close(found, exact, rtol=1e-3, atol=1e-3)


def test_a_part_that_is_widened_in_place_is_looked_at_again(acc, tmp_path: Path) -> None:
    """As a VAE is that gave values that are not finite."""
    network, guard = KINDS["addmm"][1]().eval().to(acc), Guard(store_of(acc, tmp_path))
    network.of, x = lambda m, x: m["a"](x.to(m["a"].weight.dtype)), torch.randn(2, 1024, WIDTH, device=acc)
    forward = forward_inside(network, partial(around, guard, None))
    with torch.no_grad():
        network.layers.to(torch.bfloat16)
        for _ in range(3):
            forward(x)
        assert guard.done and not guard.store.misses()
        network.layers.to(torch.float32)
        with accelerator.hook("aten::addmm", after=zeroed(64)):
            for _ in range(3):
                forward(x)
    (named,) = guard.store.misses()
    assert named.startswith("addmm float32")


def test_a_part_at_the_address_of_one_that_was_dropped_is_new() -> None:
    keys = set()

    class Recorder:
        def looking(self, key: Any) -> contextlib.AbstractContextManager[None]:
            keys.add(key)
            return contextlib.nullcontext()

    for _ in range(2):
        for part in [nn.Identity() for _ in range(99)]:
            forward_inside(part, partial(around, Recorder(), None))(torch.ones(2))
        del part
        gc.collect()
    assert len(keys) == 2 * 99


def through_fp16(copied: Tensor) -> None:
    copied.copy_(copied.half().float())


@pytest.mark.parametrize("damage", [through_fp16, lambda copied: copied.view(-1)[-2:].zero_()])
def test_a_copy_in_the_dtype_that_it_had_is_compared_bit_for_bit(acc, tmp_path: Path, damage: Any) -> None:
    guard, x = Guard(store_of(acc, tmp_path)), torch.randn(2, 1024, WIDTH)

    def after(op: str, arguments: list, results: list) -> None:
        if results[0].is_contiguous() and not arguments[1].is_contiguous() and results[0].numel() == x.numel():
            damage(results[0])

    network = Network(lambda _, x: x.mT.clone(memory_format=torch.contiguous_format))
    with accelerator.hook("aten::copy_", after=after):
        found = run(guard, network, x.to(acc)).cpu()
    assert [*guard.store.misses().values()] == ["the host"]
    assert torch.equal(found, x.mT)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_copies_of_packed_weights_are_judged_by_their_parts(acc, tmp_path: Path, dtype: torch.dtype) -> None:
    """In another dtype a packed weight has other values, of the same bytes."""
    packed = pytest.importorskip("comfy_kitchen.tensor").QuantizedTensor
    weight = packed.from_float(torch.randn(96, 1280).to(dtype), "TensorWiseINT8Layout", per_channel=True)
    network = Network(lambda _, x: weight.to(x.device, x.dtype).dequantize())
    x, guard = torch.randn(2, 1024, WIDTH, device=acc), Guard(store_of(acc, tmp_path / "sound"))
    run(guard, network, x)
    assert not guard.store.misses() and any(key.startswith("_to_copy int8") for key in guard.known)

    def after(op: str, arguments: list, results: list) -> None:
        if results[0].dtype is torch.int8:
            results[0].view(-1)[64:].zero_()

    spoiled = Guard(store_of(acc, tmp_path / "spoiled"))
    with accelerator.hook("aten::copy_", after=after), pytest.raises(UnsupportedError, match="_to_copy int8"):
        run(spoiled, network, x)


class Labelled(Tensor):
    """As ComfyUI-GGUF's, which need more than torch gives to those that it makes."""

    def __new__(cls, *args: Any, label: str) -> "Labelled":
        return super().__new__(cls, *args)

    def __init__(self, *args: Any, label: str) -> None:
        super().__init__()


def test_values_of_another_pack_s_tensors_are_plain_under_the_guard_too(acc, tmp_path: Path) -> None:
    bias = Labelled(torch.ones(WIDTH), label="fp32")
    network, x = Network(lambda _, x: x + Tensor(bias).to(x.device)), torch.randn(2, 1024, WIDTH, device=acc)
    assert type(run(Guard(store_of(acc, tmp_path)), network, x)) is Tensor


@pytest.mark.parametrize("how", [{"attn_mask": (torch.arange(512) < 150).expand(512, -1)}, {"scale": 0.5}])
def test_what_stands_in_for_attention_obeys_the_mask_and_scale_of_each_call(acc, tmp_path: Path, how: Any) -> None:
    x, guard = torch.randn(2, 512, WIDTH), Guard(store_of(acc, tmp_path))
    with accelerator.hook(KINDS["attention"][0], after=zeroed(64)):
        run(guard, Network(attention), x.to(acc))
        with guard, torch.no_grad():
            found = attention(nn.ModuleDict(), x.to(acc), **placed(how, acc))
    torch.testing.assert_close(found.cpu(), attention(nn.ModuleDict(), x, **how), rtol=1e-3, atol=1e-3)


@pytest.mark.full
def test_a_healthy_device_has_no_miss_and_later_forwards_are_not_looked_at(acc, tmp_path: Path) -> None:
    store = store_of(acc, tmp_path)
    for name, (_, make) in KINDS.items():
        halves = (torch.float16, torch.bfloat16) if name in ("addmm", "attention", "native_layer_norm") else ()
        for dtype in (torch.float32, *halves):
            torch.manual_seed(1)
            network, guard, x = make().eval().to(acc, dtype), Guard(store), torch.randn(1, 512, WIDTH).to(acc, dtype)
            run(guard, network, x)
            assert guard.done == {x.shape}, name
            before = guard.work
            run(guard, network, x)
            assert guard.work == before, "no mode, no counting"
    assert not store.misses() and {key.partition(" ")[0] for key in guard.known} <= {*CHECKS}


def of_ours(dtype: torch.dtype) -> list[tuple[Any, tuple[Any, ...], Any]]:
    """Calls of our operations with arguments of each kind, and more tokens than are looked at."""
    shapes, calls = CaseShapes(tokens=200, width=48, head=16, gated=48, clip=(2, 12, 3, 4, 90), groups=4, text=6), []
    x, rows = torch.randn(2, 200, 48).to(dtype), torch.randn(4, 2, 2, 48).to(dtype)
    gate, modulation = Gate(rows[0], split=90), Modulation(rows[1], rows[2], split=70)

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            if function.namespace == library.NAMESPACE:
                calls.append((function, args, result))
            return result

    with Seen(), pytest.MonkeyPatch.context() as patched:
        for module in (activation, group_norm, norm, product, residual, rope):
            patched.setattr(module, "launches", lambda *_: True)
        asked = [self_tests._calls(torch.device("cpu"), dtype, shapes)]
        if dtype is torch.float16:
            wide = self_tests._calls(torch.device("cpu"), torch.float32, shapes, dtype, SCALED)
            asked.append({name: wide[name] for name in self_tests.BLOCK_OPERATIONS})
        for call, _ in (run for runs in asked for run in runs.values()):
            call(form=library.AUTO)
        residual.residual_norm(x, x.flip(1), gate, Norm(LAYER, 1e-6), modulation)
        product.linear_gelu(x, torch.randn(90, 48).to(dtype), torch.randn(90).to(dtype))
    return calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_each_result_of_our_operations_is_checked(dtype: torch.dtype) -> None:
    """A scaled product is right with the next power of two beside it, and with no other."""
    names = set()
    for function, args, result in of_ours(dtype):
        name, results = function.overloadpacket.__name__, result if isinstance(result, tuple) else (result,)
        names.add(name)
        given = dict(zip([each.name for each in function._schema.arguments], args, strict=True))
        given |= {"function": function, "args": args}

        def misses(*factors: float, given: Any = given, results: Any = results, name: str = name) -> int:
            damaged = [each * factor for each, factor in zip(results, factors, strict=False)]
            check, a, b = CHECKS.get(name, guard_module._own), *guard_module.BOUNDS[dtype]
            found, exact, size, _ = check(given, damaged[0] if name in CHECKS else tuple(damaged))
            return int((~((found - exact).abs() <= a * exact.abs() + b * size)).sum())

        scaled = name == "swiglu" and results[1].numel()
        right = [(1.0, 1.0), (0.5, 2.0)] if scaled else [(1.0, 1.0)]
        wrong = [(4.0, 0.25), (0.25, 4.0)] if scaled else [(1.5, 1.0)]
        wrong += [(1.0, 2.0)] if results[-1].numel() and len(results) == 2 else []
        assert [misses(*factors) for factors in right] == [0] * len(right), name
        assert min(misses(*factors) for factors in wrong) > 1, name
    assert names == {*self_tests.OPERATIONS, "linear_gelu"}


@pytest.mark.parametrize(("factors", "right"), [((2.0, 1.0), False), ((1.0, 2.0), False), ((1.0, 1.0), True)])
def test_a_wrong_power_of_a_scaled_product_is_replaced_with_its_product(
    acc, tmp_path: Path, factors: tuple[float, float], right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard_module, "FAULTS", faults := dict[Any, str]())
    operation, store = getattr(torch.ops, library.NAMESPACE).swiglu.default, store_of(acc, tmp_path)

    def launched(x: Tensor, room: float | None) -> tuple[Tensor, ...]:
        damage = (1.0, 1.0) if faults or room is None else factors
        return tuple((each * by).to(acc) for each, by in zip(operation(x.cpu(), room), damage, strict=True))

    def of(_: nn.ModuleDict, x: Tensor) -> Tensor:
        operation(30 * x.half(), None)  # which is another class
        y, powers = operation(30 * x.half(), 128.0)
        return y.float() * powers

    x, network = torch.randn(2, 1024, WIDTH), Network(of)
    device = torch.library.Library(library.NAMESPACE, "IMPL")
    device.impl("swiglu", launched, "PrivateUse1")
    try:
        found = run(Guard(store), network, x.to(acc)).cpu()
    finally:
        device._destroy()
    assert [*store.misses().values()] == ([] if right else ["its reference"])
    torch.testing.assert_close(found, network(x), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_group_norm_that_keeps_its_mean_as_its_input_is_right(
    acc, tmp_path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch's kernel for CUDA does (an H100, 2026-11-28); at 40 deviations from zero that is 0.1 of a deviation."""

    def rounding(op: str, arguments: list, results: list) -> None:
        y = arguments[0].double().reshape(2 * 4, -1)
        mean, scale = y.mean(-1, keepdim=True), (y.var(-1, unbiased=False, keepdim=True) + 1e-5).rsqrt()
        kept = [each.to(dtype).double() for each in (mean, scale)]
        results[0].copy_(((y - kept[0]) * kept[1]).reshape(results[0].shape).to(dtype))

    torch.manual_seed(0)
    network = Network(lambda m, x: m["a"](x.reshape(len(x), 16, -1)), a=nn.GroupNorm(4, 16)).eval().to(acc, dtype)
    guard, x = Guard(store_of(acc, tmp_path)), (40.07 + torch.randn(2, 1024, WIDTH)).to(acc, dtype)
    with accelerator.hook("aten::native_group_norm", after=rounding):
        run(guard, network, x)
    assert any(key.startswith("native_group_norm") for key in guard.known) and not guard.store.misses()
    monkeypatch.setattr(guard_module, "WHOLE", 1024)  # a larger group is not copied to the host
    assert guard_module._norm({"input": x.reshape(2, 16, -1), "group": 4, "function": "group_norm"}, x) is None
    given = {"input": x[0].cpu() / 2**15, "normalized_shape": (WIDTH,), "function": "_fused_rms_norm", "eps": None}
    found, exact, *_ = guard_module._norm(given, functional.rms_norm(given["input"], (WIDTH,)))
    torch.testing.assert_close(found, exact, rtol=1e-2, atol=0)  # an eps that torch chooses is that of fp32


def test_it_spends_at_most_a_hundredth_of_the_work(acc, tmp_path: Path) -> None:
    """A check costs more than what is left of the share only once: the next one waits until there is more."""
    guard, largest = Guard(store_of(acc, tmp_path)), 0
    network = KINDS["addmm"][1]().eval().to(acc)
    for rows in (512, 1024, 2048, 4096):
        before = guard.spent
        run(guard, network, torch.randn(2, rows, WIDTH, device=acc))
        largest = max(largest, guard.spent - before)
    assert guard.spent - largest <= SHARE * guard.work and guard.spent > 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_check_copies_no_operand_as_a_whole(acc, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard_module, "SHARE", 1e9)
    network, peaks = KINDS[kind][1]().eval().to(acc), []
    x = torch.randn(2, 1024, WIDTH, device=acc)
    for guard in (None, Guard(store_of(acc, tmp_path))):
        accelerator.reset_peak()
        before = accelerator.memory().allocated_bytes
        with torch.no_grad(), contextlib.nullcontext() if guard is None else guard.looking(0):
            network.of(network.layers, x)
        peaks.append(accelerator.memory().peak_bytes - before)
    assert peaks[1] - peaks[0] < x.nbytes / 4, peaks


def test_dtypes_without_a_bound_are_left_alone(acc, tmp_path: Path) -> None:
    network, guard = KINDS["addmm"][1]().eval().to(acc, torch.float64), Guard(store_of(acc, tmp_path))
    run(guard, network, torch.randn(2, 1024, WIDTH, device=acc, dtype=torch.float64))
    assert not guard.known


def test_a_check_without_room_waits_and_changes_nothing(acc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network, x = KINDS["addmm"][1]().eval().to(acc), torch.randn(2, 1024, WIDTH, device=acc)
    guard = Guard(store_of(acc, tmp_path))
    with monkeypatch.context() as short:

        def refuse(given: Any, result: Tensor) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

        short.setitem(CHECKS, "addmm", refuse)
        run(guard, network, x)
    assert not [key for key in guard.known if key.startswith("addmm")] and not guard.done
    run(guard, network, x)
    assert [key for key in guard.known if key.startswith("addmm")] and guard.done


@pytest.mark.parametrize("error", [Interrupted, torch.OutOfMemoryError])
def test_a_forward_that_is_cut_short_leaves_no_mode_and_is_looked_at_again(
    acc, tmp_path: Path, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard_module, "policy_for", lambda facts: DevicePolicy(product_rows=2**20))
    ends, store = [error], store_of(acc, tmp_path)

    def of(layers: nn.ModuleDict, x: Tensor) -> Tensor:
        if ends:
            raise ends.pop()
        return layers["a"](x)

    network, x = Network(of, a=nn.Linear(WIDTH, 96)).eval().to(acc), torch.randn(2, 1024, WIDTH, device=acc)
    back = guard_step(store, store.facts).apply("transformer", network)
    with torch.no_grad():
        with pytest.raises(error):
            network(x)
        assert not torch._C._len_torch_dispatch_stack() and not torch._C._len_torch_function_stack()
        assert store_of(acc, tmp_path).recall(IN_RUNS), "what was checked before is kept"
        for _ in range(3):
            network(x)
        assert back is not None and any(key.startswith("addmm") for key in store.recall(IN_RUNS))
        network.__class__ = type("Cast", (Network,), {"forward": lambda *_: "cast"})
        assert network(x) == "cast", "a host changes the class of layers when it takes a part"
    back()
    assert "forward" not in vars(network) and not network._forward_hooks


def test_inference_mode_hides_nothing(acc, tmp_path: Path) -> None:
    operator, make = KINDS["addmm"]
    network, store, x = make().eval().to(acc), store_of(acc, tmp_path), torch.randn(2, 1024, WIDTH, device=acc)
    another = Guard(store)
    with accelerator.hook(operator, after=zeroed(64)), torch.inference_mode():
        run(Guard(store), network, x)
    run(another, KINDS["cat"][1](), x)  # of the same card, which knew nothing of it
    assert [key.partition(" ")[0] for key in store.misses()] == ["linear"]  # which torch takes apart later here


@pytest.mark.parametrize("kept", [["edited"], {"addmm float32 2^(8)": "a path of another version"}])
def test_what_another_version_or_an_editor_wrote_is_checked_anew(acc, tmp_path: Path, kept: Any) -> None:
    store = store_of(acc, tmp_path)
    store.keep(IN_RUNS, kept)
    guard = Guard(store)
    assert not guard.known
    run(guard, KINDS["addmm"][1]().eval().to(acc), torch.randn(2, 1024, WIDTH, device=acc))
    assert not store.misses() and set(store.recall(IN_RUNS).values()) == {""}


def test_what_is_wrong_once_is_said_and_not_kept(acc, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    operator, make = KINDS["addmm"]
    calls: list[str] = []

    def once(op: str, arguments: list, results: list) -> None:
        calls.append(op)
        if len(calls) == 1:
            results[0].zero_()

    store, network, x = store_of(acc, tmp_path), make().eval().to(acc), torch.randn(2, 1024, WIDTH, device=acc)
    guard = Guard(store)
    guard.work = 2**40  # so that the first call is looked at
    with accelerator.hook(operator, after=once), caplog.at_level(logging.WARNING), torch.no_grad():
        with guard.looking(0):
            found = network(x)
        torch.testing.assert_close(found, network(x))
    assert not store.misses() and "this device is unstable" in caplog.text


def test_where_nothing_is_right_the_run_stops(acc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    operator, make = KINDS["addmm"]
    monkeypatch.delitem(guard_module.PATHS, "the host")
    guard, network, x = Guard(store_of(acc, tmp_path)), make().eval().to(acc), torch.randn(2, 1024, WIDTH, device=acc)
    for _ in range(2):  # a second run does not take it for right
        with accelerator.hook(operator, after=zeroed(64)), pytest.raises(UnsupportedError, match="however it is"):
            run(guard, network, x)


def test_rows_of_a_sample_stand_on_both_sides_of_each_power_of_two() -> None:
    rows = set(_some(600_000).tolist())
    assert len(rows) <= 64 and {0, 599_999, 2**19 - 1, 2**19, 2**15, 2**15 - 1} <= rows
    assert _some(3).tolist() == [0, 1, 2] and _some(1).tolist() == [0]


@pytest.mark.full
@pytest.mark.parametrize("family", ["ltx", "hunyuan_video"])
def test_a_run_is_guarded_and_a_wrong_product_does_not_reach_the_video(
    acc, tiny_folder: Path, tmp_path: Path, on_host: Any, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiny models do little work: the share is all of it here."""
    monkeypatch.setattr(guard_module, "SHARE", 1e9)
    monkeypatch.setattr(guard_module, "SECONDS", 60.0)
    monkeypatch.setattr(probes, "PRODUCTS", probes.PRODUCTS[:1])
    store = store_of(acc, tmp_path / "kept")
    monkeypatch.setattr(folder, "probe_results_of", lambda *_: store)
    with accelerator.hook("aten::addmm", after=lambda op, arguments, results: results[0][1:].zero_()):
        model = tiny.build(SMALL[family].checkpoints[0], tiny_folder)
        pipeline = load(LoadRequest(model, precision="fp32", device=acc, state=tmp_path / "kept"))
        latents, frames = rendered(pipeline, SMALL[family])
    for found, expected in zip((latents, frames), on_host(family), strict=True):
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-3, atol=1e-3)
    named = {key.partition(" ")[0] for key in store.misses()}
    assert named == {"addmm"}
    text = report_on(pipeline.facts, store, precisions(), None, "", store.misses()).text()
    assert "Wrong in runs here" in text and "addmm float32" in text
