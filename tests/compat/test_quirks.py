"""Each known bug, on a machine that has it and on one that no longer has it."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
from anygpu.compat.device.facts import facts_for
from anygpu.compat.device.probe_store import OK, WRONG, ProbeResult
from anygpu.compat.device.quirks import QUIRKS, DevicePolicy, abilities, active, fixed, policy_for, verdict, within
from anygpu.compat.precision import PLAIN, precision_for
from simulated import profiles

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
class Stand:
    """A machine with the bug, one without, and what is then decided: of Care, or of the precision of a family."""

    here: Any
    elsewhere: Any
    effect: Any


def unusable(operation):
    return lambda facts: not verdict(operation, policy_for(facts)).usable


def cared(name, value):
    return lambda facts: getattr(policy_for(facts), name) == value


def replaced(name):
    """The layers that choose a kernel are told not to use this one."""
    return lambda facts: not abilities(facts)[name.partition(".")[0]][name.partition(".")[2]]


def safe(facts):
    return precision_for(PLAIN, facts).safe


def vae_in_fp32_only(facts):
    chosen = precision_for(PLAIN, facts)
    return str(chosen).startswith("transformer bf16, text bf16, VAE fp32")


STANDS = {
    "bf16_emulated": Stand(nvidia("sm75"), nvidia("sm80"), safe),
    "bf16_convolution_missing": Stand(
        nvidia("sm75"), nvidia("sm86"), lambda facts: str(precision_for(PLAIN, facts, "bf16").conv) == "torch.float32"
    ),
    "gtx16_fp16_nan": Stand(
        nvidia("sm75", "NVIDIA GeForce GTX 1660 Ti"),
        nvidia("sm75", "NVIDIA GeForce RTX 2060"),
        lambda facts: precision_for(PLAIN, facts).choice == "fp32",
    ),
    "volta_fp16_conv3d": Stand(nvidia("sm70"), nvidia("sm75"), replaced("conv3d.fp16")),
    "zluda_bf16_convolution": Stand(nvidia("sm86", "Radeon RX 7900 [ZLUDA]"), nvidia("sm86"), replaced("conv2d.bf16")),
    "conv3d_without_cudnn": Stand(nvidia(torch="2.9.0+cu128"), nvidia(torch="2.9.1"), replaced("conv3d.bf16")),
    "conv3d_without_old_cudnn": Stand(
        nvidia(torch="2.10.0", cudnn="9.10.2"), nvidia(torch="2.10.0", cudnn="9.15.0"), replaced("conv3d.fp16")
    ),
    "cudnn_large_convolution": Stand(nvidia(cudnn="9.10.2"), nvidia(cudnn="9.15"), cared("conv_bytes", 2 * GIBIBYTE)),
    "triton_without_turing": Stand(nvidia("sm75", triton="3.3.1"), nvidia("sm75", triton="3.2.0"), unusable("triton")),
    "sm80_attention": Stand(nvidia("sm75"), nvidia("sm80"), unusable("sage")),
    "gfx115x_bf16_partial": Stand(radeon("gfx1151", rocm="7.2"), radeon("gfx1201"), vae_in_fp32_only),
    "gfx115x_bf16_old": Stand(radeon("gfx1150", rocm="7.0.2"), radeon("gfx1150", rocm="7.1.0"), safe),
    "gfx11_bf16_off": Stand(radeon("gfx1100", rocm="7.2"), radeon("gfx1151", rocm="7.2"), safe),
    "no_bf16_units": Stand(radeon("gfx1030"), radeon("gfx942"), safe),
    "miopen_search": Stand(radeon("gfx1201", rocm="7.2"), radeon("gfx1201", rocm="7.14"), cared("vae_cudnn", False)),
    "miopen_timing": Stand(
        radeon("gfx1151", rocm="10.0"), radeon("gfx1151", rocm="7.2"), cared("retry_without_cudnn", True)
    ),
    "conv3d_abort": Stand(radeon("gfx1151"), radeon("gfx1201"), cared("tile_pixels", 256)),
    "conv3d_never_ends": Stand(radeon("gfx1100"), radeon("gfx1201"), cared("tile_pixels", 128)),
    "benchmark_on_radeon": Stand(radeon("gfx1030"), radeon("gfx942"), cared("benchmark", False)),
    "mapped_pages_stall": Stand(radeon("gfx1201"), radeon("gfx1201", system="Windows"), cared("mapped_reads", False)),
    "rdna4_rasterizer": Stand(radeon("gfx1201", rocm="7.2"), radeon("gfx1100", rocm="7.2"), unusable("rasterizer")),
    "mps_time_pad": Stand(other("mps"), other("xpu"), replaced("pad3d.fp32")),
    "mps_conv3d_contiguous": Stand(other("mps"), other("xpu"), replaced("conv3d.fp32")),
    "mps_float64": Stand(other("mps"), nvidia(), unusable("float64")),
    "mps_float8": Stand(other("mps"), other("xpu"), unusable("float8")),
    "mps_bf16_before_macos14": Stand(other("mps", macos="13.6"), other("mps", macos="14.0"), safe),
    "xpu_float64": Stand(other("xpu"), nvidia(), unusable("float64")),
    "xpu_allocation": Stand(other("xpu"), nvidia(), cared("allocation_bytes", 4 * GIBIBYTE)),
    "xpu_sliced_weight": Stand(other("xpu"), nvidia(), cared("contiguous_weights", True)),
    "directml_bf16": Stand(other("directml"), other("xpu"), unusable("matmul.bf16")),
    "cpu_fp16_conv3d": Stand(other("cpu"), other("xpu"), replaced("conv3d.fp16")),
    "masked_attention_nan": Stand(nvidia(torch="2.5.0"), nvidia(torch="2.5.1"), cared("masks", False)),
    "replication_pad_bf16": Stand(nvidia(torch="2.1.2"), nvidia(torch="2.2.0"), replaced("pad3d.bf16")),
    "offload_streams": Stand(nvidia(), other("mps"), cared("streams", False)),
}


def test_caps_weights_and_casts_reach_the_layers_that_choose_kernels():
    capped, sliced, broken = (
        abilities(facts) for facts in (nvidia(cudnn="9.10.2"), other("xpu"), radeon("gfx1150", rocm="7.0.2"))
    )
    assert capped["conv_bytes"] == 2 * GIBIBYTE and not sliced["conv_bytes"]
    assert sliced["contiguous_weights"] and not capped["contiguous_weights"]
    assert capped["cast"] == {"bf16_to_fp32": True, "fp16_to_fp32": True}
    probes = {"cast.bf16_to_fp32": ProbeResult(WRONG, "zeros")}
    assert abilities(nvidia(), probes)["cast"]["bf16_to_fp32"] is False
    assert broken["conv_bytes"] == 0


def test_every_row_has_a_machine_to_stand_on():
    assert set(STANDS) == {row.name for row in QUIRKS}
    assert len({row.name for row in QUIRKS}) == len(QUIRKS)


@pytest.mark.parametrize("name", STANDS)
def test_the_effect_is_seen_on_the_machine_and_not_elsewhere(name):
    stand = STANDS[name]
    assert name in {row.name for row in active(stand.here)}
    assert name not in {row.name for row in active(stand.elsewhere)}
    assert stand.effect(stand.here)
    assert not stand.effect(stand.elsewhere)


@pytest.mark.parametrize("row", QUIRKS, ids=lambda row: row.name)
def test_each_row_is_dated_sourced_and_does_something(row):
    assert re.fullmatch(r"20\d\d-\d\d", row.seen)
    assert re.search(r"#\d+|ComfyUI|measured", row.source)
    assert row.symptom
    assert row.done
    assert row.wrong or row.costly or row.effect
    assert set(row.effect) <= {field.name for field in fields(DevicePolicy)}
    assert set(row.optional) <= set(row.versions)


@pytest.mark.parametrize(
    "name", ["gfx115x_bf16_partial", "gfx115x_bf16_old", "gfx11_bf16_off", "mps_bf16_before_macos14", "gtx16_fp16_nan"]
)
def test_an_answer_of_the_device_outranks_the_row(name):
    facts = STANDS[name].here
    good = {operation: ProbeResult(OK) for row in active(facts) for operation in row.wrong}
    good |= {
        f"cast.{pair}": ProbeResult(OK) for pair in ("bf16_to_fp32", "fp32_to_bf16", "fp16_to_fp32", "fp32_to_fp16")
    }
    good |= {
        f"{kind}.{dtype}": ProbeResult(OK)
        for kind in ("conv2d", "groupnorm", "matmul")
        for dtype in ("bf16", "fp16", "fp32")
    }
    assert precision_for(PLAIN, facts) != precision_for(PLAIN, facts, "auto", good)
    row = next(row for row in active(facts) if row.name == name)
    assert row in fixed(policy_for(facts), good)
    broken = {**good, row.wrong[0]: ProbeResult(WRONG)}
    assert row not in fixed(policy_for(facts), broken)


def test_what_is_costly_is_not_mended_by_a_right_answer():
    policy = policy_for(nvidia("sm75"))
    found = verdict("matmul.bf16", policy, {"matmul.bf16": ProbeResult(OK)})
    assert (found.usable, found.costly) == (True, True)
    assert "emulate" in found.why


def test_versions_that_are_handed_in_replace_the_machine_s():
    facts = nvidia(torch="2.9.0")
    assert "conv3d_without_cudnn" in {row.name for row in active(facts)}
    assert "conv3d_without_cudnn" not in {row.name for row in active(facts, {"torch": "2.11"})}


@pytest.mark.parametrize(
    ("version", "span", "inside"),
    [
        ("2.9", ("2.9.0", "2.11"), True), ("2.10.1+cu128", ("2.9", "2.11"), True), ("2.11.0", ("2.9", "2.11"), False),
        ("2.8.9", ("2.9", ""), False), ("2.9.0a0+git1", ("2.9", ""), True), ("", ("2.9", "2.11"), True),
        ("7.14", ("", "7.2"), False),
    ],
)  # fmt: skip
def test_versions_compare_as_numbers(version, span, inside):
    assert within(version, *span) is inside


@pytest.mark.parametrize(("arch", "version", "start"), [
    ("gfx1151", "7.2", "transformer bf16, text bf16, VAE fp32"),
    ("gfx1150", "7.1", "transformer bf16, text bf16, VAE fp32"),
    ("gfx1151", "6.4", "transformer fp16-safe"), ("gfx1100", "7.2", "transformer fp16-safe"),
    ("gfx1103", "7.2", "transformer fp16-safe"), ("gfx1200", "7.2", "transformer bf16, text bf16, VAE bf16"),
    ("gfx1201", "7.2", "transformer bf16, text bf16, VAE bf16"),
    ("gfx942", "7.2", "transformer bf16, text bf16, VAE bf16"),
])  # fmt: skip
def test_radeons_by_architecture(arch, version, start):
    assert str(precision_for(PLAIN, radeon(arch, rocm=version))).startswith(start)


@pytest.mark.parametrize("name", profiles.PROFILES)
def test_the_simulated_machines_have_their_rows(name):
    rows = {row.name for row in active(profiles.facts_of(name))}
    expected = {
        "turing": "bf16_convolution_missing", "gtx16xx": "gtx16_fp16_nan", "gfx1151": "gfx115x_bf16_partial",
        "gfx1201": "benchmark_on_radeon", "mps-like": "mps_time_pad", "xpu-like": "xpu_allocation",
    }  # fmt: skip
    assert rows >= {expected[name]} if name in expected else not rows
