"""Registration, fakes, the choice of form, and what a compiler sees."""

import gc
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from anygpu.kernels import activation, group_norm, library, norm, product, residual, rope
from anygpu.kernels.library import AUTO, REFERENCE, TRITON, KernelError
from anygpu.kernels.terms import LAYER, RMS, Gate, GroupNorm, Modulation, Norm, Pair, Tables
from torch import Tensor

ROOT = Path(library.__file__).resolve().parent.parent
OPERATIONS: dict[str, Any] = {
    "normalized": norm._NORMALIZED,
    "gated_residual": residual._GATED_RESIDUAL,
    "residual_norm": residual._RESIDUAL_NORM,
    "qk_norm_rope": rope._QK_NORM_ROPE,
    "swiglu": activation._SWIGLU,
    "linear_gelu": product._LINEAR_GELU,
    "group_norm_silu_pad": group_norm._GROUP_NORM_SILU_PAD,
    "rms_silu_pad": group_norm._RMS_SILU_PAD,
}


LAYOUTS = {"strided": "channels_last", "extra": "frames_first"}  # kind of arguments to that of the result


def some(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.randn(shape, dtype=dtype, device=device)


def samples(kind: str) -> dict[str, tuple[Any, ...]]:
    """Arguments of each operation: plain, strided, with an extra dimension, empty, without weights."""
    x = {
        "plain": lambda: some(2, 5, 8),
        "strided": lambda: some(2, 8, 5).transpose(1, 2),
        "extra": lambda: some(2, 3, 5, 8),
        "empty": lambda: some(2, 0, 8),
        "bare": lambda: some(2, 5, 8).bfloat16(),
    }[kind]()
    weight = None if kind == "bare" else some(8)
    modulated = kind in ("plain", "strided", "empty")
    scale, shift = some(2, 1, 2, 8).unbind(2) if modulated else (None, None)
    gate, factor = scale, some(*x.shape[:2], 1) if modulated else None
    table = some(5, 4) if kind in ("plain", "strided") else some(3, 1, 4) if kind == "extra" else None
    text = some(2, 2, 5, 8) if kind == "extra" else None
    clip = x.reshape(2, 8, 1, 1, -1) if kind != "strided" else some(2, 3, 4, 5, 8).movedim(-1, 1)
    if kind == "empty":
        clip = some(0, 8, 1, 2, 3)
    channel, rows = weight, (some(clip.shape[0], 8) if modulated else None)
    layout, narrow = LAYOUTS.get(kind, "contiguous"), torch.float16 if kind == "bare" else None
    return {
        "normalized": (x, weight, weight, scale, shift, 0, "layer", 1e-6, narrow),
        "gated_residual": (x, x, gate, True, 1e-6, 0, factor),
        "residual_norm": (x, x, gate, False, None, 0, factor, weight, None, scale, shift, 0, "rms", 1e-6, narrow),
        "qk_norm_rope": (x, x, weight, None, table, table, text, text, weight, None, 1e-6, narrow),
        "swiglu": (x, None if narrow is None else 2.0),
        "linear_gelu": (x, some(6, 8).to(x.dtype), some(6).to(x.dtype)),
        "group_norm_silu_pad": (clip, channel, channel, 2, 1e-6, False, [1, 1, 0, 0, 2, 0], True, layout),
        "rms_silu_pad": (clip, channel, rows, rows, 1e-6, [0, 0, 0, 0, 1, 1], True, layout),
    }


@pytest.mark.parametrize("kind", ["plain", "strided", "extra", "empty", "bare"])
@pytest.mark.parametrize("name", list(OPERATIONS))
def test_opcheck(name: str, kind: str) -> None:
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(OPERATIONS[name], samples(kind)[name], test_utils=checks)


def test_keys_of_another_dtype_than_queries_keep_it() -> None:
    arguments = (q := some(2, 5, 8), q.half(), some(8), *[None] * 7, 1e-6, None)
    torch.library.opcheck(rope._QK_NORM_ROPE, arguments, test_utils=("test_faketensor",))


@pytest.mark.full
@pytest.mark.parametrize("name", list(OPERATIONS))
def test_opcheck_with_changing_sizes(name: str) -> None:
    """The slow one of torch's four checks: traced with symbolic sizes, compared with eager."""
    torch.library.opcheck(OPERATIONS[name], samples("plain")[name], test_utils=("test_aot_dispatch_dynamic",))


@contextmanager
def twin() -> Iterator[Any]:
    """The package imported once more under another name, as ComfyUI imports it beside the installed one."""
    spec = importlib.util.spec_from_file_location("twin", ROOT / "kernels" / "__init__.py")
    assert spec is not None and spec.loader is not None
    sys.modules["twin"] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(sys.modules["twin"])
        yield lambda name: importlib.import_module(f"twin.{name}")
    finally:
        for name in [name for name in sys.modules if name == "twin" or name.startswith("twin.")]:
            del sys.modules[name]
        gc.collect()


def test_a_second_import_keeps_the_first_registration() -> None:
    x = some(1, 3, 8)
    with twin() as module:
        again = module("norm")
        assert again is not norm and again._NORMALIZED is norm._NORMALIZED
        assert torch.equal(again.normalized(x, again.Norm(RMS, 1e-6)), norm.normalized(x, Norm(RMS, 1e-6)))
        del again
    # The second package is gone; the operation, which the first one registered, is not.
    found = norm._NORMALIZED(x, None, None, None, None, 0, "rms", 1e-6, None)
    assert torch.equal(found, norm.normalized(x, Norm(RMS, 1e-6)))


def test_without_triton_the_references_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but an explicit choice notices that Triton is missing."""
    monkeypatch.setitem(sys.modules, "triton", None)
    with twin() as module:
        bare, x = module("library"), some(2, 8)
        assert not bare.HAS_TRITON and not bare.launches(x)
        assert torch.equal(module("activation").swiglu(x), activation.swiglu(x))
        assert bare.reason_against(torch.device("cuda"), x.dtype) == "Triton is not installed"
        with pytest.raises(bare.KernelError, match="Triton is not installed"):
            bare.launches(x, TRITON)


def test_an_explicit_choice_that_cannot_be_had_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    x = some(1, 3, 8)
    with pytest.raises(KernelError, match="not on 'cpu'"):
        norm.normalized(x, Norm(RMS, 1e-6), form=TRITON)
    with pytest.raises(KernelError, match="float64 is not one of"):
        activation.swiglu(x.double(), form=TRITON)
    with pytest.raises(KernelError, match="no form 'fast'"):
        activation.swiglu(x, form="fast")
    assert not library.launches(x, AUTO) and not library.launches(x, REFERENCE)
    monkeypatch.setattr(library, "HAS_TRITON", True), monkeypatch.setattr(library, "interpreting", lambda: True)
    assert [bool(library.reason_against(torch.device(each), x.dtype)) for each in ("cpu", "mps")] == [False, True]


def test_a_kernel_is_launched_on_the_device_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the current device; here the current one is 0 and the tensors are on 1."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    current = [0]

    @contextmanager
    def on(index: int) -> Any:
        former, current[0] = current[0], index
        yield
        current[0] = former

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # fake tensors ask a real card for its second
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: current[0])
    monkeypatch.setattr(torch.accelerator, "device_index", on)
    launch = library._Launch("where", lambda: lambda x: (x.device.index, current[0]), lambda x: None)
    with FakeTensorMode():
        assert launch(some(2, device="cuda:1")) == (1, 1)
        assert launch(some(2, device="cuda:0")) == (0, 0)
    assert current == [0]
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    assert all(has(f"{library.NAMESPACE}::{name}", key) for name in OPERATIONS for key in ("CUDA", "CPU", "Meta"))


# ---- what a compiler sees -----------------------------------------------------------------------------------


def block(x: Tensor, branch: Tensor, rows: Tensor, q: Tensor, cos: Tensor, sin: Tensor, clip: Tensor) -> tuple:
    """Each kind of operation once."""
    scale, shift, gate = rows.unbind(2)
    normed = norm.normalized(x, Norm(RMS, 1e-6), Modulation(scale, shift))
    new, again = residual.residual_norm(x, branch, Gate(gate), Norm(LAYER, 1e-6), Modulation(scale, shift))
    new = residual.gated_residual(new, normed, Gate(gate, True, 1e-6))
    rotated = rope.qk_norm_rope(Pair(q, q), Tables(cos, sin), 1e-6, Pair(q, q))
    fed = activation.swiglu(again)
    fed = product.linear_gelu(fed, fed.select(0, 0), fed.select(0, 0).select(1, 0))
    padded = group_norm.group_norm_silu_pad(clip, GroupNorm(2, 1e-6), (1, 1, 1, 1, 2, 0), layout="channels_last")
    return new, rotated, fed, padded, group_norm.rms_silu_pad(clip, Norm(RMS, 1e-6), pad=(0, 0, 0, 0, 1, 1))


def arguments(device: str, tokens: int = 6) -> tuple[Tensor, ...]:
    return (
        some(2, tokens, 8, device=device), some(2, tokens, 8, device=device), some(2, 1, 3, 8, device=device),
        some(2, tokens, 2, 8, device=device), some(tokens, 1, 4, device=device), some(tokens, 1, 4, device=device),
        some(1, 4, 2, 3, 3, device=device),
    )  # fmt: skip


def test_on_a_cpu_a_compiler_sees_plain_torch_in_one_graph() -> None:
    graphs: list[Any] = []

    def keep(module: Any, _inputs: Any) -> Any:
        graphs.append(module)
        return module.forward

    given = arguments("cpu")
    torch._dynamo.reset()
    found = torch.compile(block, fullgraph=True, backend=keep)(*given)
    assert len(graphs) == 1 and not [node for node in graphs[0].graph.nodes if library.NAMESPACE in str(node.target)]
    for got, expected in zip(
        torch.utils._pytree.tree_leaves(found), torch.utils._pytree.tree_leaves(block(*given)), strict=True
    ):
        assert torch.equal(got, expected)
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_on_a_gpu_every_operation_is_one_node_of_one_graph(backend: str) -> None:
    """CUDA tensors without a GPU: fake ones; both of torch's tracers take the operations without a break."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    if not library.HAS_TRITON:
        pytest.skip("lacks what this pack requires: triton")
    graphs: list[Any] = []

    def keep(module: Any, inputs: Any) -> Any:
        graphs.append(module)
        return torch._dynamo.lookup_backend(backend)(module, inputs)

    torch._dynamo.reset()
    with FakeTensorMode(allow_non_fake_inputs=True):
        given = arguments("cuda")
        found = torch.compile(block, fullgraph=True, backend=keep)(*given)
    named = {str(node.target).split(".")[1] for node in graphs[0].graph.nodes if library.NAMESPACE in str(node.target)}
    assert len(graphs) == 1 and named == set(OPERATIONS)
    assert all(leaf.device.type == "cuda" for leaf in torch.utils._pytree.tree_leaves(found))
    torch._dynamo.reset()


@pytest.mark.full
def test_inductor_compiles_the_references() -> None:
    given = arguments("cpu")
    torch._dynamo.reset()
    found = torch.compile(block, fullgraph=True)(*given)
    for got, expected in zip(
        torch.utils._pytree.tree_leaves(found), torch.utils._pytree.tree_leaves(block(*given)), strict=True
    ):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)  # its exp and rsqrt are vectorised
    torch._dynamo.reset()
