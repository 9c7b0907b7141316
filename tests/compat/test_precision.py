"""The precision table, row by row."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from anygpu.compat.device import facts_for
from anygpu.compat.errors import UnsupportedError
from anygpu.compat.precision import CHOICES, PRECISION, precision_for
from anygpu.pipelines.families import FAMILIES

CPU = facts_for("cpu")
ARCHES = sorted({arch for _, arch in PRECISION})


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_auto_decides_for_every_family_and_arch_with_a_reason(family, arch):
    chosen = precision_for(family, replace(CPU, arch_class=arch))
    assert chosen.why and str(chosen)


@pytest.mark.parametrize("row", PRECISION.values(), ids=map(str, PRECISION))
def test_no_row_puts_text_into_fp16(row):
    assert row.text is not torch.float16


def test_before_sm80_auto_never_computes_in_bf16():
    chosen = precision_for("framepack", replace(CPU, arch_class="cuda-old"))
    assert torch.bfloat16 not in (chosen.transformer, chosen.text, chosen.vae)


def test_an_explicit_choice_is_kept():
    assert precision_for("ltx", CPU, "bf16").transformer is torch.bfloat16
    assert precision_for("ltx", CPU, "fp16").text is torch.float32


def test_an_unknown_choice_names_the_known():
    with pytest.raises(UnsupportedError, match=", ".join(CHOICES)):
        precision_for("ltx", CPU, "int3")


def test_an_unknown_device_is_one_line():
    with pytest.raises(UnsupportedError, match="does not answer"):
        facts_for("cuda:7")
    with pytest.raises(UnsupportedError, match="does not answer"):
        facts_for("toaster")
