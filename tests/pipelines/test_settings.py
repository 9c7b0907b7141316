"""Sizes are rounded by one function, and what is out of range is refused with the nearest valid value."""

import pytest
from anygpu.compat.errors import InputError
from anygpu.pipelines.registry import FAMILIES
from anygpu.pipelines.settings import snap

EVERY = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)


@EVERY
@pytest.mark.parametrize("off", [0, 1])
def test_frames_go_up_and_sides_to_the_nearest_and_what_is_on_the_grid_stays(family, off):
    multiple, frames = family.sizes.multiple, 2 * family.sizes.stride + 1
    asked = family.sizes.stride + 2 if off else frames
    size = snap(family, 8 * multiple + off, 4 * multiple - off, asked)
    assert (size.width, size.height, size.frames) == (8 * multiple, 4 * multiple, frames)
    assert f"frames {asked} -> {frames}" in size.said if off else size.said == ""


@EVERY
def test_defaults_one_frame_and_the_most_are_on_the_grid(family):
    assert snap(family, 0, 0, 0).said == "" and snap(family, 0, 0, 1).frames == 1
    most = snap(family, 0, 0, 4097).frames
    assert 4097 - family.sizes.stride < most <= 4097 and snap(family, 0, 0, most).frames == most


@EVERY
@pytest.mark.parametrize(
    ("width", "height", "frames", "nearest"), [(5000, 512, 9, "4096"), (512, 512, 9000, "4097"), (-8, 512, 9, "32")]
)
def test_out_of_range_names_the_nearest(family, width, height, frames, nearest):
    with pytest.raises(InputError, match=f"nearest valid value is {nearest}"):
        snap(family, width, height, frames)


@EVERY
def test_a_side_that_is_too_small_becomes_the_smallest_and_not_the_default(family):
    size = snap(family, 7, 1, 9)
    assert size.width == size.height == max(32, family.sizes.multiple) and "width 7 -> 32" in size.said
    assert f"pixels, {size.width} or more" in size.said
