"""Each known bug, on a machine that has it and on one that no longer has it."""

import re
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import tiny
import torch
from anygpu.compat import report
from anygpu.compat.device import quirks
from anygpu.compat.device.facts import facts_for
from anygpu.compat.device.precision import DTYPES, PLAIN, precision_for
from anygpu.compat.device.probe_store import OK, UNUSABLE, WRONG, ProbeResult
from anygpu.compat.transforms.attention import Attention
from anygpu.compat.transforms.conv3d import swap_conv3d
from anygpu.compat.transforms.conv3d_choice import choose_by
from anygpu.kernels import library
from anygpu.pipelines import stages
from anygpu.pipelines.base import PromptRequest, SampleSettings, Silent
from anygpu.pipelines.load.folder import load
from anygpu.pipelines.requests import LoadRequest
from anygpu.pipelines.speed import SpeedRequest, speed_for
from simulated import accelerator, profiles
from simulated.test_families import CASES, sampled
from torch import nn

GIBIBYTE = 1024**3
BARE = replace(facts_for("cpu"), versions={})


def machine(**changes):
    return replace(BARE, **changes)


def nvidia(arch="sm80", name="a card", **versions):
    old = arch < "sm80" and arch != "sm120"
    return machine(
        backend="cuda", arch=arch, arch_class="cuda-old" if old else "cuda-sm80+", name=name,
        versions={"torch": "2.12.0", "cudnn": "9.19.0", "triton": "3.2.0", **versions},
    )  # fmt: skip


def radeon(arch, **versions):
    return machine(
        backend="rocm", arch=arch, arch_class="rocm", name="Radeon",
        versions={"torch": "2.12.0", "rocm": "7.14", "system": "Linux", **versions},
    )  # fmt: skip


def other(backend, **versions):
    return machine(backend=backend, arch_class=backend, name=backend, versions={"torch": "2.12.0", **versions})


@dataclass(frozen=True)
class BugCase:
    """A machine with the bug, one without, and what is then decided: a device policy, or the precision of a family."""

    here: Any
    elsewhere: Any
    effect: Any


def unusable(operation):
    return lambda facts: not quirks.abilities_of(facts).verdict(operation).usable


def cared(name, value):
    return lambda facts: getattr(quirks.policy_for(facts), name) == value


def warned(setting):
    """The report names an allocator's setting where it is set, and only there."""

    def seen(facts):
        with mock.patch.object(report, "allocator_settings", lambda: f"{setting}:True"):
            return any(setting in line for line in report.changes_for(facts, {}))

    return seen


def replaced(name):
    """The layers that choose a kernel are told not to use this one."""
    return lambda facts: not quirks.abilities(facts)[name.partition(".")[0]][name.partition(".")[2]]


def safe(facts):
    return precision_for(PLAIN, facts).safe


def vae_in_fp32_only(facts):
    chosen = precision_for(PLAIN, facts)
    return str(chosen).startswith("transformer bf16, text bf16, VAE fp32")


BUG_CASES = {
    "bf16_emulated": BugCase(nvidia("sm75"), nvidia("sm80"), safe),
    "bf16_convolution_missing": BugCase(
        nvidia("sm75"), nvidia("sm86"), lambda facts: str(precision_for(PLAIN, facts, "bf16").conv) == "torch.float32"
    ),
    "gtx16_fp16_nan": BugCase(
        nvidia("sm75", "NVIDIA GeForce GTX 1660 Ti"),
        nvidia("sm75", "NVIDIA GeForce RTX 2060"),
        lambda facts: precision_for(PLAIN, facts).choice == "fp32",
    ),
    "volta_fp16_conv3d": BugCase(nvidia("sm70"), nvidia("sm75"), replaced("conv3d.fp16")),
    "zluda_bf16_convolution": BugCase(
        nvidia("sm86", "Radeon RX 7900 [ZLUDA]"), nvidia("sm86"), replaced("conv2d.bf16")
    ),
    "conv3d_without_cudnn": BugCase(nvidia(torch="2.9.0+cu128"), nvidia(torch="2.9.1"), replaced("conv3d.bf16")),
    "conv3d_without_old_cudnn": BugCase(
        nvidia(torch="2.10.0", cudnn="9.10.2"), nvidia(torch="2.10.0", cudnn="9.15.0"), replaced("conv3d.fp16")
    ),
    "cudnn_large_convolution": BugCase(nvidia(cudnn="9.10.2"), nvidia(cudnn="9.15"), cared("conv_bytes", 2 * GIBIBYTE)),
    "gfx115x_bf16_partial": BugCase(radeon("gfx1151", rocm="7.2"), radeon("gfx1201"), vae_in_fp32_only),
    "gfx115x_bf16_old": BugCase(radeon("gfx1150", rocm="7.0.2"), radeon("gfx1150", rocm="7.1.0"), safe),
    "gfx11_bf16_off": BugCase(radeon("gfx1100", rocm="7.2"), radeon("gfx1151", rocm="7.2"), safe),
    "no_bf16_units": BugCase(radeon("gfx1030"), radeon("gfx942"), safe),
    "miopen_search": BugCase(radeon("gfx1201", rocm="7.2"), radeon("gfx1201", rocm="7.14"), cared("vae_cudnn", False)),
    "conv3d_abort": BugCase(radeon("gfx1151"), radeon("gfx1201"), cared("tile_pixels", 256)),
    "conv3d_never_ends": BugCase(radeon("gfx1100"), radeon("gfx1201"), cared("tile_pixels", 128)),
    "benchmark_on_radeon": BugCase(radeon("gfx1030"), radeon("gfx942"), cared("benchmark", False)),
    "mps_time_pad": BugCase(other("mps"), other("xpu"), replaced("pad3d.fp32")),
    "mps_conv3d_contiguous": BugCase(other("mps", macos="26.2"), other("mps", macos="26.3"), unusable("conv3d.fp32")),
    "mps_conv3d_slow": BugCase(other("mps", macos="26.3"), other("xpu"), replaced("conv3d.fp32")),
    "mps_bf16_before_macos14": BugCase(other("mps", macos="13.6"), other("mps", macos="14.0"), safe),
    "mps_large_array": BugCase(other("mps"), nvidia(), cared("allocation_bytes", 4 * GIBIBYTE)),
    "xpu_allocation": BugCase(other("xpu"), nvidia(), cared("allocation_bytes", 4 * GIBIBYTE)),
    "battlemage_products": BugCase(
        replace(other("xpu"), name="Intel(R) Arc(TM) B580 Graphics"),
        replace(other("xpu"), name="Intel(R) Arc(TM) Pro B60 Graphics"),
        lambda facts: precision_for(PLAIN, facts).choice == "fp32",
    ),
    "xpu_sliced_weight": BugCase(other("xpu"), nvidia(), cared("contiguous_weights", True)),
    "gfx12_fp32_rows": BugCase(radeon("gfx1201"), radeon("gfx1100"), cared("product_rows", 2**19)),
    "gfx12_expandable_segments": BugCase(radeon("gfx1201"), radeon("gfx1100"), warned("expandable_segments")),
    "gfx115x_host_pointers": BugCase(radeon("gfx1151"), radeon("gfx1100"), cared("pins", False)),
    "mps_linear_with_bias": BugCase(other("mps"), nvidia(), cared("plain_operands", True)),
    "mps_transposed_left_operand": BugCase(other("mps"), nvidia(), cared("plain_operands", True)),
    "mps_conv2d_layout": BugCase(other("mps"), nvidia(), cared("plain_operands", True)),
    "mps_rms_norm_rows": BugCase(other("mps"), nvidia(), cared("norm_rows", 2**20)),
    "cpu_fp16_conv3d": BugCase(other("cpu"), other("xpu"), replaced("conv3d.fp16")),
}


def test_caps_weights_and_casts_reach_the_layers_that_choose_kernels():
    capped, sliced, broken = (
        quirks.abilities(facts) for facts in (nvidia(cudnn="9.10.2"), other("xpu"), radeon("gfx1150", rocm="7.0.2"))
    )
    assert capped["conv_bytes"] == 2 * GIBIBYTE and not sliced["conv_bytes"]
    assert sliced["contiguous_weights"] and not capped["contiguous_weights"]
    assert capped["cast"] == {"bf16_to_fp32": True, "fp16_to_fp32": True}
    probes = {"cast.bf16_to_fp32": ProbeResult(WRONG, "zeros")}
    assert quirks.abilities(nvidia(), probes)["cast"]["bf16_to_fp32"] is False
    assert broken["conv_bytes"] == 0


# ---- every row acts ------------------------------------------------------------------------------

ACTING = {  # each switch or cap, and the test that sees it act on the simulated device
    "tile_pixels": "simulated/test_vae_policy.py::test_large_pictures_go_through_a_radeon_in_tiles",
    "allocation_bytes": "simulated/test_vae_policy.py::test_one_buffer_stays_below_the_cap_of_an_intel_gpu",
    "conv_bytes": "compat/device/test_quirks.py::test_no_convolution_gets_more_than_the_cap",
    "vae_cudnn": "simulated/test_vae_policy.py::test_radeon_switches_are_set_for_the_vae_alone",
    "benchmark": "simulated/test_vae_policy.py::test_radeon_switches_are_set_for_the_vae_alone",
    "contiguous_weights": "compat/device/test_quirks.py::test_a_sliced_weight_is_made_contiguous",
    "product_rows": "compat/transforms/test_plain_calls.py::test_rows_are_multiplied_few_at_a_time",
    "norm_rows": "compat/transforms/test_plain_calls.py::test_a_norm_of_many_rows_is_not_torchs_own",
    "plain_operands": "compat/transforms/test_plain_calls.py::test_operands_that_a_device_reads_wrongly_are_made_plain",
    "pins": "compat/transforms/test_plain_calls.py::test_no_memory_is_locked_where_kernels_read_it_wrongly",
    "expandable_segments": "compat/device/test_quirks.py::test_the_effect_is_seen_on_the_machine_and_not_elsewhere",
}
OPERATORS = {  # operation -> operators of torch that it arrives as
    "matmul": ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"),
    "attention": ("aten::*scaled_dot_product*",),
    "groupnorm": ("aten::native_group_norm",),
    "conv2d": ("aten::convolution*",),
    "conv3d": ("aten::convolution*",),
    "conv3d_channels_last": ("aten::convolution*",),
    "pad3d": ("aten::*pad*",),
}


@pytest.fixture
def acc():
    if reason := accelerator.reason():
        pytest.skip(reason)
    with accelerator.fresh() as device, torch.no_grad():
        yield device


def met_on(device, facts, folder):
    """The operations, in the alphabet of the probes, that a pipeline left to `auto` runs on a machine."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    met = set()

    def note(op, arguments):
        x = arguments[0]
        if not isinstance(x, torch.Tensor) or x.dtype not in names:
            return
        kinds = [kind for kind, patterns in OPERATORS.items() if any(fnmatch(op, pattern) for pattern in patterns)]
        volume = x.ndim == 5
        last = volume and x.is_contiguous(memory_format=torch.channels_last_3d) and not x.is_contiguous()
        shape = "conv3d_channels_last" if last else "conv3d" if volume else "conv2d"
        for kind in kinds:
            if (kind == shape) if kind.startswith("conv") else (volume or kind != "pad3d"):
                met.add(f"{kind}.{names[x.dtype]}")

    with ExitStack() as hooks:
        for pattern in sorted({pattern for patterns in OPERATORS.values() for pattern in patterns}):
            hooks.enter_context(accelerator.hook(pattern, before=note))
        folder = tiny.build("hunyuan_video", folder)
        pipeline = load(LoadRequest(folder, device=replace(facts, device=device), offload="none"))
        prompt = stages.encode_prompt(pipeline, PromptRequest("a fox"), Silent())
        latents = stages.sample(pipeline, prompt, None, SampleSettings(32, 32, 5, steps=1), Silent())
        stages.decode(pipeline, latents, Silent())
    return met


@pytest.mark.full
def test_a_good_machine_meets_what_the_rows_name(acc, tiny_folder):
    met = met_on(acc, nvidia(), tiny_folder)
    assert {f"{name}.bf16" for name in ("matmul", "attention", "groupnorm", "conv3d", "pad3d")} <= met


@pytest.mark.parametrize("row", quirks.QUIRKS, ids=lambda r: r.name)
def test_auto_runs_nothing_that_the_rows_of_a_machine_name(acc, tiny_folder, row):
    if not row.wrong and not row.costly:
        assert row.effect and set(row.effect) <= set(ACTING)
        return
    facts = BUG_CASES[row.name].here
    bad = {operation for each in quirks.active(facts) for operation in (*each.wrong, *each.costly)}
    assert not met_on(acc, facts, tiny_folder) & bad


@pytest.mark.parametrize("name", [pytest.param("framepack", marks=pytest.mark.full), "mochi"])
def test_patch_embeddings_leave_a_dtype_whose_convolutions_are_wrong(acc, tiny_folder, name):
    """Those of image encoders and of Mochi's transformer, which stay in bf16 themselves."""
    case, met = CASES[name], set()
    facts = replace(BUG_CASES["gfx115x_bf16_partial"].here, device=acc)
    with accelerator.hook("aten::convolution*", before=lambda _, given: met.add((given[0].ndim, given[0].dtype))):
        pipeline = load(LoadRequest(*(tiny.build(each, tiny_folder) for each in case.checkpoints), device=facts))
        stages.decode(pipeline, sampled(pipeline, case), Silent())
    assert pipeline.precision.transformer is pipeline.precision.text is torch.bfloat16
    assert (4, torch.float32) in met and torch.bfloat16 not in {dtype for _, dtype in met}


def test_every_effect_has_a_test_that_sees_it_act():
    effects = {field.name for field in fields(quirks.DevicePolicy)} - {"rows", "wrong", "costly"}
    assert effects == set(ACTING) == {name for row in quirks.QUIRKS for name in row.effect}
    for place in ACTING.values():
        path, _, name = place.partition("::")
        assert f"def {name}(" in (Path(__file__).parents[2] / path).read_text(encoding="utf-8"), place
    operations = {operation for row in quirks.QUIRKS for operation in (*row.wrong, *row.costly)}
    assert {operation.partition(".")[0] for operation in operations} == set(OPERATORS)


def test_no_convolution_gets_more_than_the_cap(acc):
    """cuDNN 9.10.2: each call of a capped Conv3d stays below what the row allows, and the result is the same."""
    layer = nn.Conv3d(4, 4, 3, padding=1).requires_grad_(False)
    x, sizes = torch.randn(1, 4, 9, 16, 16, generator=torch.Generator().manual_seed(0)), []
    expected, cap = layer(x), x.nbytes // 2
    policy = replace(quirks.policy_for(nvidia(cudnn="9.10.2")), conv_bytes=cap)
    swap_conv3d(layer, choose_by(quirks.abilities(nvidia(cudnn="9.10.2"), None, policy)))
    with accelerator.hook("aten::convolution*", before=lambda _, given: sizes.append(given[0].nbytes)):
        found = layer.to(acc)(x.to(acc)).cpu()
    assert len(sizes) > 1 and max(sizes) <= cap
    assert torch.allclose(found, expected, atol=1e-5)


def test_a_sliced_weight_is_made_contiguous(acc):
    """Intel: a convolution with a sliced weight ends the process."""
    layer = nn.Conv3d(4, 4, (1, 3, 3), bias=False).requires_grad_(False)
    layer.weight.data = torch.randn(4, 4, 3, 3, 1).permute(0, 1, 4, 3, 2)
    seen = []
    swap_conv3d(layer, choose_by(quirks.abilities(other("xpu"))))
    with accelerator.hook("aten::convolution*", before=lambda _, given: seen.append(given[1].is_contiguous())):
        layer.to(acc)(torch.ones(1, 4, 1, 6, 6, device=acc))
    assert seen == [True]


@pytest.mark.parametrize(
    ("probes", "verdict"),
    [
        (None, "triton"),
        ({"triton": ProbeResult(OK)}, "triton"),
        ({"triton": ProbeResult(UNUSABLE, "ptxas exited with 1")}, "off"),
    ],
)
def test_the_test_of_a_kernel_decides_on_an_old_card_with_a_new_triton(monkeypatch, probes, verdict):
    """As on a card: only a device of that type is launched on."""
    monkeypatch.setattr(library, "HAS_TRITON", True)
    facts = replace(nvidia("sm75", triton="3.7.1"), device=torch.device("cuda"))
    precision = precision_for(PLAIN, facts)
    speed = speed_for(SpeedRequest(), facts, {}, precision, probes, Attention())
    assert speed.kernels.verdict == verdict
    assert ("ptxas" in speed.kernels.why) == (verdict == "off")


@pytest.mark.parametrize(
    ("answer", "epilogue"), [(ProbeResult(OK), True), (ProbeResult(WRONG, "erf"), False), (None, False)]
)
def test_products_end_in_gelu_only_where_a_probe_saw_it(monkeypatch, answer, epilogue):
    monkeypatch.setattr(library, "HAS_TRITON", True)
    facts = replace(nvidia("sm89", triton="3.7.1"), device=torch.device("cuda"))
    precision = precision_for(PLAIN, facts)
    probes = {"triton": ProbeResult(OK), "gelu_in_product.fp16": ProbeResult(OK)}
    probes |= {} if answer is None else {"gelu_in_product.bf16": answer}
    assert speed_for(SpeedRequest(), facts, {}, precision, probes, Attention()).epilogue is epilogue
    off = SpeedRequest(kernels="off")
    assert not speed_for(off, facts, {}, precision, probes, Attention()).epilogue


def test_every_row_has_a_machine_to_stand_on():
    assert set(BUG_CASES) == {row.name for row in quirks.QUIRKS}
    assert len({row.name for row in quirks.QUIRKS}) == len(quirks.QUIRKS)


@pytest.mark.parametrize("name", BUG_CASES)
def test_the_effect_is_seen_on_the_machine_and_not_elsewhere(name):
    stand = BUG_CASES[name]
    assert name in {row.name for row in quirks.active(stand.here)}
    assert name not in {row.name for row in quirks.active(stand.elsewhere)}
    assert stand.effect(stand.here)
    assert not stand.effect(stand.elsewhere)


@pytest.mark.parametrize("row", quirks.QUIRKS, ids=lambda row: row.name)
def test_each_row_is_dated_sourced_and_does_something(row):
    assert re.fullmatch(r"20\d\d-\d\d", row.seen)
    assert re.search(r"#\d+|ComfyUI|measured", row.source)
    assert row.symptom
    assert row.done
    assert row.wrong or row.costly or row.effect
    assert set(row.effect) <= {field.name for field in fields(quirks.DevicePolicy)}
    assert set(row.optional) <= set(row.versions)


@pytest.mark.parametrize(
    "name", ["gfx115x_bf16_partial", "gfx115x_bf16_old", "gfx11_bf16_off", "mps_bf16_before_macos14", "gtx16_fp16_nan"]
)
def test_an_answer_of_the_device_outranks_the_row(name):
    facts = BUG_CASES[name].here
    good = {operation: ProbeResult(OK) for row in quirks.active(facts) for operation in row.wrong}
    good |= {
        f"cast.{pair}": ProbeResult(OK) for pair in ("bf16_to_fp32", "fp32_to_bf16", "fp16_to_fp32", "fp32_to_fp16")
    }
    good |= {
        f"{kind}.{dtype}": ProbeResult(OK)
        for kind in ("conv2d", "groupnorm", "matmul")
        for dtype in ("bf16", "fp16", "fp32")
    }
    assert precision_for(PLAIN, facts) != precision_for(PLAIN, facts, "auto", good)
    row = next(row for row in quirks.active(facts) if row.name == name)
    assert row in quirks.fixed(quirks.policy_for(facts), good)
    broken = {**good, row.wrong[0]: ProbeResult(WRONG)}
    assert row not in quirks.fixed(quirks.policy_for(facts), broken)


def test_what_is_costly_is_not_mended_by_a_right_answer():
    policy = quirks.policy_for(nvidia("sm75"))
    found = quirks.Abilities(policy, {"matmul.bf16": ProbeResult(OK)}).verdict("matmul.bf16")
    assert (found.usable, found.costly) == (True, True)
    assert "emulate" in found.why


@pytest.mark.parametrize(
    ("version", "span", "inside"),
    [
        ("2.9", ("2.9.0", "2.11"), True), ("2.10.1+cu128", ("2.9", "2.11"), True), ("2.11.0", ("2.9", "2.11"), False),
        ("2.8.9", ("2.9", ""), False), ("2.9.0a0+git1", ("2.9", ""), True), ("", ("2.9", "2.11"), True),
        ("7.14", ("", "7.2"), False),
    ],
)  # fmt: skip
def test_versions_compare_as_numbers(version, span, inside):
    assert quirks.within(version, *span) is inside


@pytest.mark.parametrize(("arch", "version", "start"), [
    ("gfx1151", "7.2", "transformer bf16, text bf16, VAE fp32"),
    ("gfx1150", "7.1", "transformer bf16, text bf16, VAE fp32"),
    ("gfx1151", "6.4", "transformer fp16-safe"), ("gfx1100", "7.2", "transformer fp16-safe"),
    ("gfx1103", "7.2", "transformer fp16-safe"), ("gfx1200", "7.2", "transformer bf16, text bf16, VAE bf16"),
    ("gfx1201", "7.2", "transformer bf16, text bf16, VAE bf16"),
    ("gfx942", "7.2", "transformer bf16, text bf16, VAE bf16"), ("gfx803", "7.2", "transformer fp16-safe"),
    ("gfx90a", "7.2", "transformer bf16, text bf16, VAE bf16"), ("gfx90c", "7.2", "transformer fp16-safe"),
])  # fmt: skip
def test_radeons_by_architecture(arch, version, start):
    assert str(precision_for(PLAIN, radeon(arch, rocm=version))).startswith(start)


def test_of_two_decodes_in_two_threads_the_last_puts_the_switches_back(monkeypatch):
    cudnn = torch.backends.cudnn
    monkeypatch.setattr(cudnn, "enabled", True)
    monkeypatch.setattr(cudnn, "benchmark", True)
    first, second = (quirks.convolution_switches(quirks.DevicePolicy(vae_cudnn=False, benchmark=False)) for _ in "ab")
    first.__enter__(), second.__enter__()
    first.__exit__(None, None, None)
    assert (cudnn.enabled, cudnn.benchmark) == (False, False), "the second still decodes"
    second.__exit__(None, None, None)
    assert (cudnn.enabled, cudnn.benchmark) == (True, True)


@pytest.mark.parametrize("name", profiles.PROFILES)
def test_the_simulated_machines_have_their_rows(name):
    rows = {row.name for row in quirks.active(profiles.facts_of(name))}
    expected = {
        "turing": "bf16_convolution_missing", "gtx16xx": "gtx16_fp16_nan", "gfx1151": "gfx115x_bf16_partial",
        "gfx1201": "benchmark_on_radeon", "mps-like": "mps_time_pad", "xpu-like": "xpu_allocation",
    }  # fmt: skip
    assert rows >= {expected[name]} if name in expected else not rows
