"""Attention: exact in chunks under a budget, a fused kernel where there is one, clear errors, no mask for padding."""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event, current_thread, main_thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from anygpu.compat.device import timed_choice
from anygpu.compat.device.facts import DeviceFacts
from anygpu.compat.device.probe_store import ProbeResult, ProbeStore
from anygpu.compat.errors import InputError, MissingPackageError, UnsupportedError
from anygpu.compat.transforms import attention as subject
from anygpu.compat.transforms import attention_chunks
from anygpu.compat.transforms import attention_kernels as kernels
from anygpu.compat.transforms.attention import CHOICES, MEANINGS, Attention, attention_for, avoided_by
from anygpu.compat.transforms.attention_chunks import chunk_size, chunked
from anygpu.compat.transforms.attention_kernels import EXPLICIT
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = {  # (B, H, N, M, D)
    "self": (1, 2, 64, 64, 16),
    "odd": (2, 3, 37, 53, 8),
    "one query": (1, 2, 1, 19, 16),
    "one key": (2, 1, 5, 1, 4),
    "wide head": (1, 1, 33, 33, 512),
}
MASKS = ("none", "causal", "padding", "rows", "hidden row", "floating")
BUDGETS = (1, 9_000, 40_000, 10**9)  # one query at a time, some, a head or more, everything at once


def operands(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> list[torch.Tensor]:
    batch, heads, queries, keys, width = shape
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, heads, n, width, generator=generator).to(dtype) for n in (queries, keys, keys)]


def mask_of(kind: str, shape: tuple[int, ...]) -> torch.Tensor | None:
    batch, heads, queries, keys, _ = shape
    generator = torch.Generator().manual_seed(1)
    if kind in ("none", "causal"):
        return None
    if kind == "padding":
        return (torch.arange(keys) < max(1, keys - 5)).expand(batch, 1, 1, keys)
    if kind == "floating":
        return torch.randn(1, heads, queries, keys, generator=generator)
    found = torch.rand(batch, 1, queries, keys, generator=generator) < 0.7
    found[..., 0] = True
    if kind == "hidden row":
        found[:, :, queries // 2] = False
    return found


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool) -> torch.Tensor:
    """In float64; a query that sees no key gets zeros, as torch's math gives it."""
    scores = q.double() @ k.double().mT * q.shape[-1] ** -0.5
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.double()
    return torch.softmax(scores, -1).nan_to_num(0.0) @ v.double()


def bound(dtype: torch.dtype, value: torch.Tensor) -> float:
    """One rounding of the result, and fp32 sums whose exponents are off by a few eps of the largest score: under 16."""
    eps = torch.finfo(dtype).eps / 2 + 32 * torch.finfo(torch.float32).eps
    return eps * float(value.abs().max())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("name", SHAPES)
def test_chunks_equal_torchs_math(name: str, kind: str, dtype: torch.dtype) -> None:
    shape = SHAPES[name]
    q, k, v = operands(shape, dtype)
    mask, causal = mask_of(kind, shape), kind == "causal"
    given = mask.to(dtype) if mask is not None and mask.is_floating_point() else mask
    with sdpa_kernel(SDPBackend.MATH):
        math = functional.scaled_dot_product_attention(q, k, v, given, is_causal=causal)
    reference, limit = exact(q, k, v, given, causal), bound(dtype, v)
    for budget in BUDGETS:
        found = chunked(q, k, v, given, causal, budget)
        assert found.dtype is dtype
        assert (found - reference).abs().max() <= limit, budget
        assert (found.double() - math.double()).abs().max() <= 2 * limit, budget


def test_equal_scores_give_the_mean_bit_for_bit() -> None:
    """Weights are 1 and sums of small integers are exact, whatever the chunks are."""
    value = torch.randint(-8, 9, (2, 3, 64, 5)).float()
    query = torch.zeros(2, 3, 17, 4)
    for budget in BUDGETS:
        found = chunked(query, torch.randn(2, 3, 64, 4), value, budget_bytes=budget)
        assert torch.equal(found, value.mean(2, keepdim=True).expand_as(found))


def test_strided_operands_are_as_good(seed: int = 3) -> None:
    """(B, N, H, D) transposed, as the processors pass them."""
    q, k, v = (tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in operands(SHAPES["odd"], seed=seed))
    for budget in BUDGETS:
        whole = chunked(*(tensor.contiguous() for tensor in (q, k, v)), budget_bytes=budget)
        assert torch.allclose(chunked(q, k, v, budget_bytes=budget), whole, rtol=0, atol=bound(torch.float32, v))


@pytest.mark.parametrize("count", [1, 7, 8, 9, 63, 64, 65])
def test_every_query_is_in_one_chunk_and_chunks_are_even(count: int) -> None:
    q, k, v = operands((1, 2, count, 64, 16))
    for budget in range(1_000, 200_000, 7_001):
        rows, heads, queries = chunk_size(q, k, v, None, False, budget)
        assert 1 <= queries <= count and 1 <= heads <= 2 and rows == 1
        assert -(-count // queries) * queries - count < -(-count // queries), "the last chunk is much smaller"


def test_a_chunk_has_the_queries_whose_scores_and_copies_fit() -> None:
    q, k, v = (torch.zeros(1, 1, count, 8) for count in (100, 10, 10))
    each, head = 4 * (10 + 2 * 8 + 2 * 8 + 2), 4 * 10 * (8 + 8)  # bytes
    assert [chunk_size(q, k, v, None, False, head + 20 * each - less)[2] for less in (0, 1)] == [20, 17]
    assert chunk_size(*(torch.zeros(1, 1, n, 64) for n in (100, 1000, 1000)), None, False, 512_000)[2] == 12
    q, k, v, whole = *(x.expand(1, 4, -1, -1) for x in (q, k, v)), head + 100 * each
    assert [chunk_size(q, k, v, None, False, 2 * whole - less) for less in (0, 1)] == [(1, 2, 100), (1, 1, 100)]


# ---- which kernel runs ---------------------------------------------------------------------------


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which way each call went: ``sdpa`` of a dtype, or ``chunked``."""
    went: list[str] = []
    sdpa, chunks = functional.scaled_dot_product_attention, subject.chunked

    def watched(*arguments: Any, **named: Any) -> torch.Tensor:
        went.append(f"sdpa {str(arguments[0].dtype).removeprefix('torch.')}")
        return sdpa(*arguments, **named)

    def by_chunks(*arguments: Any) -> torch.Tensor:
        went.append("chunked")
        return chunks(*arguments)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", watched)
    monkeypatch.setattr(subject, "chunked", by_chunks)
    return went


def test_auto_takes_the_fused_kernel_and_else_chunks(ways: list[str]) -> None:
    q, k, v = operands((1, 2, 64, 64, 16))
    attend = Attention("auto", budget_bytes=3 * 2 * 64 * 64 * 4 - 1)
    fused = attend(q, k, v)
    with sdpa_kernel(SDPBackend.MATH):  # a device without any fused kernel
        apart = attend(q, k, v)
        roomy = Attention("auto", budget_bytes=3 * 2 * 64 * 64 * 4)(q, k, v)
    assert ways == ["sdpa float32", "chunked", "sdpa float32"]
    assert (fused - apart).abs().max() <= 2 * bound(torch.float32, v)
    assert (roomy - apart).abs().max() <= 2 * bound(torch.float32, v)


def test_native_math_never_builds_a_matrix_above_the_budget(ways: list[str]) -> None:
    q, k, v = operands((1, 2, 64, 64, 16))
    for budget in (10_000, 10**9):  # with room for all scores torch would take its fused kernel
        Attention("native_math", budget)(q, k, v)
    assert ways == ["chunked"] * 2


def test_a_dtype_without_a_kernel_uses_that_of_fp32(ways: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """bf16 before sm80: torch's kernels there take fp32, which holds each bf16 value."""
    monkeypatch.setattr(subject, "fused_kernel", lambda query, *_: "flash" if query.dtype is torch.float32 else "")
    assert str(attention_for("auto", facts(), torch.bfloat16, 64).decision) == (
        "attention exact, by torch's fused fp32 kernel, else in chunks of at most 268 MB: auto: "
        "this device has no fused kernel for bfloat16"
    )
    q, k, v = operands((2, 3, 40, 24, 16), torch.bfloat16)
    for budget in (1, 10**9):
        found = Attention("auto", budget)(q, k, v)
        assert found.dtype is torch.bfloat16
        assert (found - exact(q, k, v, None, False)).abs().max() <= bound(torch.bfloat16, v)
    assert ways == ["sdpa float32"] * 4, "a head at a time, then all"


def test_a_kernel_that_a_probe_found_wrong_is_not_used(ways: list[str]) -> None:
    answers = {
        "attention.fp32": ProbeResult("wrong", "head width 64: off by 3"),
        "attention.bf16": ProbeResult("ok"),
        "attention.fp16": ProbeResult("ok"),
        "masked_attention.fp16": ProbeResult("wrong", "a row that the mask hides altogether becomes NaN"),
    }
    avoided = avoided_by(answers, DTYPES)
    assert list(avoided) == [torch.float32]
    q, k, v = operands(SHAPES["self"])
    Attention("auto", 10**9, avoided=avoided)(q, k, v)
    Attention("auto", 10**9, avoided=avoided)(q.bfloat16(), k.bfloat16(), v.bfloat16())
    assert ways == ["chunked", "sdpa bfloat16"]
    assert avoided_by(None, DTYPES) == {}
    assert "off by 3" in attention_for("auto", facts(), torch.float32, 64, avoided).decision.why


def test_a_kernel_of_fp32_that_a_probe_found_wrong_stands_in_for_no_other_dtype(
    ways: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither for bf16, which has no kernel here, nor after precision auto has gone on in fp32."""
    monkeypatch.setattr(subject, "fused_kernel", lambda query, *_: "flash" if query.dtype is torch.float32 else "")
    answers = {"attention.fp32": ProbeResult("wrong", "head width 64: off by 3")}
    attend = attention_for("auto", facts(), torch.bfloat16, 16, avoided_by(answers, (torch.bfloat16,)))
    q, k, v = operands((2, 3, 40, 24, 16), torch.bfloat16)
    attend(q, k, v)
    attend(q.float(), k.float(), v.float())
    assert ways == ["chunked"] * 2 and "in chunks of queries" in attend.decision.verdict


def test_nothing_process_wide_changes() -> None:
    """Torch's allowed kernels and diffusers' default backend are what they were; two attentions keep to themselves."""
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry as Registry

    def state() -> tuple[Any, ...]:
        flags = torch.backends.cuda
        torchs = flags.flash_sdp_enabled(), flags.mem_efficient_sdp_enabled(), flags.math_sdp_enabled()
        return *torchs, flags.cudnn_sdp_enabled(), Registry.get_active_backend()

    before, (q, k, v) = state(), operands(SHAPES["self"])
    first, second = (attention_for(choice, facts(), torch.float32, 16) for choice in ("native_flash", "native_math"))
    assert torch.allclose(first(q, k, v), second(q, k, v), atol=2 * bound(torch.float32, v), rtol=0)
    assert state() == before
    with pytest.raises(RuntimeError):
        EXPLICIT["native_cudnn"](q, k, v)
    assert state() == before, "after a failure too"


def test_two_threads_put_back_what_kernels_were_allowed_before_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs sample from a thread each: the second begins within the first's call, and ends after it."""
    attend, (q, k, v), began, ended = (
        functional.scaled_dot_product_attention,
        operands(SHAPES["self"]),
        Event(),
        Event(),
    )

    def within(*given: Any) -> torch.Tensor:
        if current_thread() is main_thread():
            second.submit(EXPLICIT["native_flash"], q, k, v)
            began.wait(0.3)
        else:
            began.set()
            ended.wait(1)
        return attend(*given)

    monkeypatch.setattr(kernels.functional, "scaled_dot_product_attention", within)
    with ThreadPoolExecutor(1) as second:
        EXPLICIT["native_flash"](q, k, v)
        ended.set()
    assert torch.backends.cuda.math_sdp_enabled() and torch.backends.cuda.mem_efficient_sdp_enabled()


def test_a_call_waits_for_a_thread_that_allows_one_kernel_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Core's MultiGPU CFG Split computes in a thread for each card."""
    attend, (q, k, v), began = functional.scaled_dot_product_attention, operands(SHAPES["self"]), Event()
    narrow = v[..., :8]  # for which torch has no fused kernel
    plain = attention_for("auto", facts("cpu"), torch.float32, 16)
    expected = plain(q, k, narrow)

    def within(*given: Any, **named: Any) -> torch.Tensor:
        if current_thread() is not main_thread():
            began.set()
            Event().wait(0.1)
        return attend(*given, **named)

    monkeypatch.setattr(kernels.functional, "scaled_dot_product_attention", within)
    with ThreadPoolExecutor(1) as second:
        second.submit(EXPLICIT["native_flash"], q, k, v)
        began.wait(1)
        assert torch.equal(plain(q, k, narrow), expected)


def test_lossy_kernels_are_timed_again_where_one_more_is_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    versions = {"comfy-kitchen": "0.2"}
    monkeypatch.setattr(subject, "version_of", lambda package: versions.get(package, ""))
    monkeypatch.setattr(timed_choice, "CLOCKED", ("cpu",))
    times = {"kitchen_int8": 1.0, "sage": 9.0}
    monkeypatch.setattr(subject, "kernel_times", lambda *_: times if "sageattention" in versions else {})
    on, sage = facts("cuda", "sm_89"), Attention("sage")

    def chosen() -> str:
        return subject.by_time(sage, on, ProbeStore(on, tmp_path), torch.float16, 128).fastest

    assert chosen() == ""
    versions["sageattention"] = "2.2.0"
    assert chosen() == "kitchen_int8"


# ---- what a machine cannot do --------------------------------------------------------------------


def facts(backend: str = "cpu", arch: str = "", total_bytes: int = 8 * 1024**3) -> DeviceFacts:
    name = {"cuda": f"NVIDIA {arch}", "rocm": f"Radeon {arch}"}.get(backend, backend)
    kind = {"cpu": "cpu", "mps": "mps", "rocm": "rocm"}.get(backend, "cuda-sm80+")
    return DeviceFacts(torch.device("cpu"), backend, arch, kind, name, total_bytes, torch.__version__)


def package(monkeypatch: pytest.MonkeyPatch, choice: str, attend: Any, versions: dict[str, str]) -> None:
    """A package of that choice on this machine, with ``attend`` as its function."""
    module, function = {
        "sage": ("sageattention", "sageattn"),
        "flash": ("flash_attn", "flash_attn_func"),
        "xformers": ("xformers.ops", "memory_efficient_attention"),
    }[choice]
    monkeypatch.setitem(sys.modules, module.partition(".")[0], SimpleNamespace())
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(**{function: attend}))
    monkeypatch.setattr(kernels, "version_of", lambda name: versions.get(name, ""))


REFUSED = {  # choice, facts, dtype, head width, installed -> what the line says
    "unknown": ("fast", facts(), torch.float32, 128, {}, "attention 'fast'; expected one of auto"),
    "cudnn on a CPU": (
        "native_cudnn", facts(), torch.float32, 128, {}, "on cpu (cpu); expected an NVIDIA GPU of sm80 and newer",
    ),
    "flash on Turing": (
        "flash", facts("cuda", "sm75"), torch.float16, 128, {"flash-attn": "2.8"},
        "on NVIDIA sm75 (sm75); expected an NVIDIA GPU of sm80",
    ),
    "sage on Turing with a new Triton": (
        "sage", facts("cuda", "sm75"), torch.float16, 128, {"sageattention": "1.0.6", "triton": "3.5.1"},
        "with Triton 3.5.1; expected Triton below 3.3",
    ),
    "sage on Turing without Triton": (
        "sage", facts("cuda", "sm75"), torch.float16, 128, {"sageattention": "1.0.6"}, "with Triton missing",
    ),
    "sage on Pascal": (
        "sage", facts("cuda", "sm61"), torch.float16, 128, {"sageattention": "1"},
        "expected an NVIDIA GPU of sm80 and newer or an NVIDIA GPU of sm75 with Triton below 3.3",
    ),
    "sage on Apple": ("sage", facts("mps"), torch.float16, 128, {"sageattention": "1"}, "'sage' on mps (mps)"),
    "no package": ("xformers", facts("cuda", "sm86"), torch.float16, 128, {}, "without the package 'xformers'"),
    "sage in fp32": (
        "sage", facts("cuda", "sm90"), torch.float32, 128, {"sageattention": "2"}, "in float32 with heads of 128",
    ),
    "sage with odd heads": (
        "sage", facts("cuda", "sm90"), torch.float16, 80, {"sageattention": "2"},
        "heads of 80; expected float16 or bfloat16",
    ),
    "a package that breaks": (
        "flash", facts("cuda", "sm90"), torch.float16, 128, {"flash-attn": "2"},
        "fails on NVIDIA sm90 (no kernel image)",
    ),
    "a package that is wrong": (
        "xformers", facts("cuda", "sm90"), torch.float16, 128, {"xformers": "1"}, "is wrong by",
    ),
}  # fmt: skip


def broken(*_: Any, **__: Any) -> torch.Tensor:
    raise RuntimeError("no kernel image\nis available")


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_run_is_one_line(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    choice, machine, dtype, width, versions, text = REFUSED[case]
    if versions:
        wrong = {"a package that breaks": broken}.get(case, lambda q, k, v, **_: torch.zeros_like(q))
        package(monkeypatch, choice, wrong, versions)
    with pytest.raises((InputError, UnsupportedError, MissingPackageError)) as raised:
        attention_for(choice, machine, dtype, width)
    assert text in str(raised.value)
    assert "\n" not in str(raised.value) and "hoose" in str(raised.value)


def test_a_trial_without_room_says_nothing_of_the_kernel_and_a_quiet_one_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    choice, machine, dtype, width, versions, _ = REFUSED["a package that breaks"]
    package(monkeypatch, choice, full, versions)
    monkeypatch.setattr(kernels, "_trial_error", full)
    with pytest.raises(torch.OutOfMemoryError):
        attention_for(choice, machine, dtype, width)
    assert attention_for(choice, machine, dtype, width, quiet=True).choice == choice


def test_native_without_a_fused_kernel_is_refused_and_auto_falls_back() -> None:
    with sdpa_kernel(SDPBackend.MATH):
        with pytest.raises(UnsupportedError, match="attention 'native' in bfloat16 on Radeon gfx1010"):
            attention_for("native", facts("rocm", "gfx1010"), torch.bfloat16, 128)
        found = attention_for("auto", facts("rocm", "gfx1010"), torch.bfloat16, 128)
    assert str(found.decision) == (
        "attention exact, in chunks of queries of at most 537 MB: auto: this device has no fused kernel for bfloat16"
    )
    assert found.label == "in chunks"


def test_the_sentence_says_what_runs() -> None:
    automatic = attention_for("auto", facts(), torch.float32, 128)
    assert str(automatic.decision) == (
        "attention torch's fused kernel (flash): auto: exact in chunks of 268 MB otherwise"
    )
    chosen = attention_for("native_flash", facts(), torch.float32, 128)
    assert str(chosen.decision) == "attention native_flash: chosen: torch's own FlashAttention"
    assert (automatic.label, chosen.label) == ("flash", "native_flash")
    assert list(MEANINGS) == list(CHOICES)


def test_budget_follows_the_devices_memory() -> None:
    gibibyte = 1024**3
    sizes = {0: gibibyte // 4, gibibyte // 2: gibibyte // 16, 8 * gibibyte: gibibyte // 2, 141 * gibibyte: gibibyte}
    for total, budget in sizes.items():
        assert subject.budget_for(facts("cuda", "sm75", total)) == budget


@pytest.mark.parametrize(
    ("choice", "versions", "machine"),
    [
        ("sage", {"sageattention": "1.0.6", "triton": "3.2.0"}, facts("cuda", "sm75")),
        ("sage", {"sageattention": "2.2.0"}, facts("cuda", "sm120")),
        ("flash", {"flash-attn": "2.8"}, facts("cuda", "sm90")),
        ("xformers", {"xformers": "0.0.32"}, facts("rocm", "gfx1100")),
    ],
)
def test_a_package_runs_every_call(
    choice: str, versions: dict[str, str], machine: DeviceFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **named: Any) -> torch.Tensor:
        calls.append(tuple(q.shape))
        heads_first = named.get("tensor_layout") == "HND"
        given = (q, k, v) if heads_first else (tensor.transpose(1, 2) for tensor in (q, k, v))
        found = functional.scaled_dot_product_attention(*given)
        return found if heads_first else found.transpose(1, 2)

    package(monkeypatch, choice, attend, versions)
    found = attention_for(choice, machine, torch.float16, 128)
    q, k, v = operands((1, 2, 20, 12, 128), torch.float16)
    result = found(q, k, v)
    assert len(calls) == 2, "the trial and the call"
    assert (result - exact(q, k, v, None, False)).abs().max() <= 2 * bound(torch.float16, v)
    assert str(found.decision).startswith(f"attention {choice}: chosen: the package ")


@pytest.mark.parametrize("summed", [1, 7, 16])
def test_products_with_the_values_are_summed_in_parts(monkeypatch: pytest.MonkeyPatch, summed: int) -> None:
    """M1 and M2 add memory beyond the operands where one product sums too many keys (pytorch#195163)."""
    shape, inner = SHAPES["odd"], list[int]()
    q, k, v = operands(shape)
    expected, product = chunked(q, k, v), torch.matmul

    def counted(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        inner.append(a.shape[-1])
        return product(a, b)

    monkeypatch.setattr(attention_chunks, "SUMMED_KEYS", summed)
    monkeypatch.setattr(torch, "matmul", counted)
    found = chunked(q, k, v)
    assert max(inner) == max(summed, shape[-1]) and torch.allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_wide_heads_alone_leave_a_kernel_that_is_wrong_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    probes = {
        "attention.fp32": ProbeResult("ok"), "wide_attention.fp32": ProbeResult("wrong", "head width 384: off by 3")
    }  # fmt: skip
    attend = Attention(avoided=avoided_by(probes, (torch.float32,), wide=(torch.float32,)))
    monkeypatch.setattr(subject.functional, "scaled_dot_product_attention", lambda *_, **__: pytest.fail("called"))
    q, k, v = operands(SHAPES["wide head"])
    assert torch.allclose(attend(q, k, v).double(), exact(q, k, v, None, False), rtol=1e-5, atol=1e-5)
    assert attend.avoids(torch.float32, 512) and not attend.avoids(torch.float32, 256)
    assert not attend.avoids(torch.float16, 512), "another dtype"


@pytest.mark.parametrize("causal", [False, True])
def test_a_batch_is_split_where_torch_s_kernels_end(monkeypatch, causal):
    """65,535 on NVIDIA, which the places of a video's frame are more than: core splits it, too."""
    operands_of, called, own = operands((70_000, 1, 3, 3, 8)), [], functional.scaled_dot_product_attention

    def limited(query, *rest, **named):
        called.append(query.shape[0])
        return own(query, *rest, **named)

    expected = own(*operands_of, is_causal=causal)
    monkeypatch.setattr(functional, "scaled_dot_product_attention", limited)
    assert torch.equal(Attention(kernel="flash")(*operands_of, None, causal), expected)
    assert sum(called) == 70_000 and max(called) <= 65_535


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_exact_attention_stays_exact_under_another_node_s_autocast(dtype: torch.dtype) -> None:
    x = torch.randn(1, 2, 100, 64, generator=torch.Generator().manual_seed(0))
    expected = torch.nn.functional.scaled_dot_product_attention(x.double(), x.double(), x.double())
    with torch.autocast("cpu", dtype):
        found = chunked(x, x, x)
    assert float((found - expected).norm() / expected.norm()) < 1e-5
