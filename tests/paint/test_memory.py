"""What painting takes at full size, counted on the meta device: each tensor that is alive, weights apart."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from anygpu.paint import vae
from anygpu.paint.networks import shape_for
from anygpu.paint.pbr import MATERIALS
from anygpu.paint.sampling import activation_bytes

from paint.counting import GIBIBYTE, HALF, SAFE, stages

CASES = [
    pytest.param("paint", 512, 6, HALF, 3.0, id="v2-0"),
    pytest.param("paint", 512, 6, SAFE, 3.0, id="v2-0 fp16-safe"),
    pytest.param("paint", 1024, 6, HALF, 4.0, id="v2-0 second pass"),
    pytest.param("paint_pbr", 512, 6, HALF, 4.0, id="PBR"),
    pytest.param("paint_pbr", 768, 12, HALF, 6.5, id="PBR, 12 views of 768"),
]


@pytest.mark.full
@pytest.mark.parametrize(("kind", "pixels", "views", "dtypes", "limit"), CASES)
def test_every_stage_at_full_size_fits_with_its_weights(kind, pixels, views, dtypes, limit):
    """One part at a time, as offload ``model`` has it: on 8 GB v2-0 fits, and 3 GB of it are enough."""
    counted = stages(kind, pixels, views, dtypes)
    for stage, (peak, weights) in counted.items():
        assert (peak + weights) / GIBIBYTE <= limit, stage
    precision = SimpleNamespace(residual=dtypes.residual, transformer=dtypes.compute)
    loaded = SimpleNamespace(precision=precision, shape=shape_for(kind))
    materials, side = MATERIALS if kind == "paint_pbr" else 1, pixels // 8
    estimated = {
        "a step": activation_bytes(loaded, 2 * views * materials, (side, side)),
        "decode a view": vae.activation_bytes(pixels, pixels, dtypes.compute),
        "encode a picture": vae.activation_bytes(pixels, pixels, dtypes.compute),
    }
    for stage, bytes_ in estimated.items():
        peak = counted[stage][0]
        assert peak <= bytes_, f"{stage}: {peak / GIBIBYTE:.2f} GiB, estimated {bytes_ / GIBIBYTE:.2f}"
    assert estimated["a step"] <= 2.2 * counted["a step"][0]
