"""An IC-LoRA's control clip stands where core's own node puts it."""

import pytest

from host.inside.asking import Inside

pytestmark = pytest.mark.host


def test_a_control_clip_stands_where_core_puts_it(inside: Inside) -> None:
    found = inside.play("ltx_controls", "against_core")
    assert len(found) == 4 and max(found.values()) <= 1e-4, found
