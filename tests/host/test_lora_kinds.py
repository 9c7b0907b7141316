"""What a LoRA file multiplies a weight with, against core's own classes."""

import pytest

from host.inside.asking import Inside

pytestmark = pytest.mark.host


def test_rotations_and_glora_change_a_weight_as_core_does(inside: Inside) -> None:
    found = inside.play("lora_kinds", "against_core")
    assert len(found) == 5 and max(found.values()) <= 1e-5, found


def test_differences_of_norms_are_cores(inside: Inside) -> None:
    found = inside.play("lora_kinds", "norms_against_core")
    assert set(found) == {"w_norm", "b_norm", "diff", "diff_b"} and max(found.values()) <= 1e-6, found
