"""The precision table, row by row."""

from dataclasses import replace

import pytest
import torch
from anygpu.compat.device.facts import facts_for
from anygpu.compat.device.precision import BF16, CHOICES, FP16, FP32, PAINT, PLAIN, PRECISION, Precision, precision_for
from anygpu.compat.device.probe_store import OK, UNKNOWN, UNUSABLE, WRONG, ProbeResult, ProbeStore
from anygpu.compat.errors import UnsupportedError
from anygpu.pipelines.registry import FAMILIES
from simulated import profiles

CPU = facts_for("cpu")
ARCHES = sorted(PRECISION)
HALF_VAES = ("hunyuan_video", "framepack", "hunyuan_video_15")  # diffusers#11112; Tencent's own pipeline of 1.5


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_auto_decides_for_every_family_and_arch_with_a_reason(family, arch):
    chosen = precision_for(family.rewrites.precision, replace(CPU, arch_class=arch))
    assert chosen.why and str(chosen)


def test_no_row_puts_a_t5_into_fp16():
    assert all(row.text is not torch.float16 for row in PRECISION.values())
    for family in FAMILIES.values():
        if any("T5" in cls for part in family.files.parts.values() for cls in part):
            assert not family.rewrites.precision.half_text
            assert all(row.text is not torch.float16 for row in family.rewrites.precision.rows.values())


def test_paint_runs_in_fp16_as_published_and_in_fp32_where_fp16_convolutions_fail():
    facts = replace(CPU, arch_class="cuda-sm80+")
    chosen = precision_for(PAINT, facts, "auto", GOOD)
    assert {chosen.transformer, chosen.compute, chosen.residual, chosen.text, chosen.vae} == {FP16}
    assert "published" in chosen.why
    failing = told(conv2d__fp16=WRONG)
    chosen = precision_for(PAINT, facts, "auto", failing)
    assert (chosen.transformer, chosen.compute, chosen.vae) == (FP32, FP32, FP32)
    assert "convolutions" in chosen.why
    with pytest.raises(UnsupportedError, match="fp16"):
        precision_for(PAINT, facts, "fp16", failing)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_before_sm80_auto_is_fp16_safe_and_never_computes_in_bf16(family):
    chosen = precision_for(family.rewrites.precision, profiles.facts_of("turing"))
    assert chosen.safe
    assert chosen.choice == "fp16-safe"
    parts = (chosen.transformer, chosen.compute, chosen.residual, chosen.text, chosen.vae, chosen.conv, chosen.latents)
    assert torch.bfloat16 not in parts
    assert {chosen.vae, chosen.conv} == ({FP16} if family.id in HALF_VAES else {FP32})
    assert (chosen.compute, chosen.residual, chosen.latents) == (FP16, FP32, FP32)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_a_vae_that_its_publisher_runs_in_fp16_does_where_bf16_cannot_and_fp16_convolutions_are_right(family):
    model, half = family.rewrites.precision, {FP16} if family.id in HALF_VAES else {FP32}
    for name, arch in (("RX 6800", "gfx1030"), ("RX 5700 XT", "gfx1010"), ("RX 7900 XTX", "gfx1100")):
        card = replace(profiles.facts_of("gfx1201"), name=f"AMD Radeon {name}", arch=arch)
        assert {precision_for(model, card).vae, precision_for(model, card).conv} == half, name
        chosen = precision_for(model, card, "auto", told(matmul__bf16=WRONG, groupnorm__bf16=WRONG, conv2d__fp16=WRONG))
        assert {chosen.vae, chosen.conv} == {FP32}, name
    volta = replace(profiles.facts_of("turing"), name="Tesla V100-SXM2-16GB", arch="sm70")
    assert {precision_for(model, volta).vae} == half
    assert {precision_for(model, profiles.facts_of("gtx16xx")).vae} == {FP32}


def test_an_explicit_choice_is_kept():
    assert precision_for(PLAIN, CPU, "bf16").transformer is torch.bfloat16
    assert precision_for(PLAIN, CPU, "fp16").text is torch.float32


def test_an_unknown_choice_names_the_known():
    with pytest.raises(UnsupportedError, match=", ".join(CHOICES)):
        precision_for(PLAIN, CPU, "int3")


def test_an_unknown_device_is_one_line():
    with pytest.raises(UnsupportedError, match="does not answer"):
        facts_for("cuda:7")
    with pytest.raises(UnsupportedError, match="does not answer"):
        facts_for("toaster")


# ---- what the device answers outranks the table and the known bugs ------------------------------

GOOD = {name: ProbeResult(OK) for name in ProbeStore(CPU).probes}


def told(**changes):
    """Answers of a device that is right in everything but what is named, with `__` for a dot."""
    return {**GOOD, **{name.replace("__", "."): ProbeResult(status, "as told") for name, status in changes.items()}}


@pytest.mark.parametrize("broken", ["cast__bf16_to_fp32", "cast__fp32_to_bf16", "matmul__bf16", "attention__bf16"])
@pytest.mark.parametrize("status", [WRONG, UNUSABLE])
def test_a_device_with_broken_bf16_gets_fp16_safe_and_is_told_why(broken, status):
    facts = profiles.facts_of("gfx1201")
    assert precision_for(PLAIN, facts).transformer is BF16
    chosen = precision_for(PLAIN, facts, "auto", told(**{broken: status}))
    assert chosen.safe
    assert broken.replace("__", ".") in chosen.why
    assert chosen.text is FP32
    assert precision_for(FAMILIES["framepack"].rewrites.precision, facts, "auto", told(**{broken: status})).text is FP16


def test_a_device_with_neither_bf16_nor_fp16_gets_fp32():
    chosen = precision_for(PLAIN, profiles.facts_of("gfx1201"), "auto", told(matmul__bf16=WRONG, matmul__fp16=UNUSABLE))
    assert (chosen.transformer, chosen.compute, chosen.text) == (FP32, FP32, FP32)
    assert "matmul.bf16" in chosen.why
    assert "matmul.fp16" in chosen.why


@pytest.mark.parametrize("broken", ["groupnorm__bf16", "conv2d__bf16"])
def test_only_the_vae_leaves_bf16_where_only_it_fails(broken):
    chosen = precision_for(PLAIN, profiles.facts_of("gfx1201"), "auto", told(**{broken: WRONG}))
    assert (chosen.transformer, chosen.vae, chosen.conv) == (BF16, FP32, FP32)


def test_a_vae_stays_in_bf16_without_conv3d_since_conv2d_replaces_it():
    chosen = precision_for(PLAIN, profiles.facts_of("gfx1201"), "auto", told(conv3d__bf16=UNUSABLE))
    assert (chosen.vae, chosen.conv) == (BF16, BF16)


def test_an_answer_outranks_a_known_bug():
    facts = replace(profiles.facts_of("gfx1201"), arch="gfx1100")
    assert precision_for(PLAIN, facts).safe
    assert precision_for(PLAIN, facts, "auto", GOOD).transformer is BF16
    assert precision_for(PLAIN, facts, "auto", {name: ProbeResult(UNKNOWN) for name in GOOD}).safe, (
        "no answer outranks nothing"
    )


def test_right_answers_do_not_make_emulated_bf16_fast():
    assert precision_for(PLAIN, profiles.facts_of("turing"), "auto", GOOD).safe


def test_fp16_that_gives_nan_is_trusted_with_nothing_in_auto_and_works_where_it_is_right():
    facts = profiles.facts_of("gtx16xx")
    assert precision_for(PLAIN, facts).transformer is FP32
    assert precision_for(PLAIN, facts, "auto", told(conv2d__fp16=WRONG)).transformer is FP32
    assert precision_for(PLAIN, facts, "auto", GOOD).safe


def test_what_speaks_against_fp16_is_named_where_bf16_is_refused_too():
    for wrong in ("conv2d", "matmul"):
        answers = told(**{"matmul__bf16": WRONG, f"{wrong}__fp16": WRONG})
        decided = precision_for(PLAIN, profiles.facts_of("gfx1201"), "auto", answers)
        assert decided.transformer is FP32
        assert f"and fp16 does not work either ({wrong}.fp16 is wrong: as told)" in decided.why
    decided = precision_for(PAINT, profiles.facts_of("gfx1201"), "auto", told(matmul__fp16=WRONG))
    assert decided.transformer is FP32 and decided.why.count("fp16 does not work") <= 1, "the same, said once"


@pytest.mark.parametrize("choice", ["bf16", "fp16", "fp16-safe"])
def test_an_explicit_choice_that_the_device_cannot_do_raises_with_the_reason(choice):
    name = choice.removesuffix("-safe")
    answers = told(**{f"matmul__{name}": WRONG})
    with pytest.raises(
        UnsupportedError, match=rf"precision '{choice}' cannot run on .*matmul.{name} is wrong: as told"
    ) as raised:
        precision_for(PLAIN, profiles.facts_of("gfx1201"), choice, answers)
    assert choice not in raised.value.expected.split(", ")
    assert "fp32" in raised.value.expected


def test_fp16_safe_on_a_cpu_is_a_contradiction():
    with pytest.raises(UnsupportedError, match="precision 'fp16-safe' on a CPU"):
        precision_for(PLAIN, CPU, "fp16-safe")
    with pytest.raises(UnsupportedError, match="; expected one of auto, as loaded\\. Choose auto"):
        precision_for(PLAIN, CPU, "fp16-safe", offered=("auto", "fp16-safe", "as loaded"))


def test_an_explicit_choice_is_kept_where_it_is_only_slow_and_that_is_said():
    chosen = precision_for(PLAIN, profiles.facts_of("turing"), "bf16")
    assert (chosen.transformer, chosen.vae) == (BF16, BF16)
    assert chosen.conv is FP32, "no engine: those layers run in fp32, which loses nothing"
    assert "slow here" in chosen.why


@pytest.mark.parametrize("choice", CHOICES[1:])
@pytest.mark.parametrize("name", profiles.PROFILES)
def test_every_choice_on_every_machine_is_kept_or_refused_in_one_line(name, choice):
    try:
        chosen = precision_for(PLAIN, profiles.facts_of(name), choice)
    except UnsupportedError as refused:
        assert "\n" not in str(refused)
    else:
        assert chosen.choice == choice


@pytest.mark.parametrize("failing", ["matmul", "conv2d", "groupnorm", "cast"])
@pytest.mark.parametrize("model", [PLAIN, PAINT], ids=["plain", "paint"])
def test_what_an_error_offers_is_what_is_accepted(model, failing):
    facts, accepted, offered = profiles.facts_of("gfx1201"), {"auto"}, []
    for choice in CHOICES[1:]:
        try:
            precision_for(model, facts, choice, told(**{f"{failing}__fp16": WRONG, f"{failing}__bf16": WRONG}))
            accepted.add(choice)
        except UnsupportedError as refused:
            offered.append(set(refused.expected.removeprefix("one of ").split(", ")))
    assert all(each == accepted for each in offered) and (offered or failing != "matmul")


def test_the_parts_follow_the_transformer_and_the_vae_unless_they_are_said():
    plain = Precision(BF16, FP32, FP16, "")
    assert (plain.compute, plain.residual, plain.conv, plain.safe) == (BF16, BF16, FP16, False)
    assert not Precision(FP32, FP32, FP32, "").safe


def test_a_choice_is_told_from_a_decision():
    assert precision_for(PLAIN, CPU).automatic
    assert not precision_for(PLAIN, CPU, "fp32").automatic
