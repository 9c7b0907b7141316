"""Texturing under ComfyUI's memory manager, in its own process, on a device whose memory is counted and limited."""

import pytest

from host import paint_models
from host.inside.asking import Inside

pytestmark = pytest.mark.host
ROUNDING = 2e-3  # the first sigma is 4096: the last bit of a prediction shows


def test_streamed_weights_paint_what_the_cpu_paints(inside: Inside, tiny_folder) -> None:
    home = paint_models.built(tiny_folder)
    found = inside.play(
        "paint", "streamed", paint=str(home / "hunyuan3d-paint-v2-0"), delight=str(home / "hunyuan3d-delight-v2-0")
    )
    assert found["offload"] == "offload comfyui on acc:0"
    assert max(found["full"], found["tight"], found["none"]) <= ROUNDING, found
    assert (found["left"], found["classes"]) == (0, 0), "something stayed after Unload Models"
    assert found["none peak"] < found["tight peak"] <= 0.6 * found["full peak"], found
    assert found["refusals"] == 0
