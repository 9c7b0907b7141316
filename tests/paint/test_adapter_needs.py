"""What MV-Adapter needs at full size, counted on the meta device, and forecast by formulas that must agree with it."""

from types import SimpleNamespace

import pytest
import torch
from anygpu.paint.forecast import PaintRun, looking_bytes, map_encoder_bytes, step_bytes
from anygpu.paint.networks import mv_adapter
from anygpu.paint.networks.published import stored_dtype
from anygpu.paint.networks.unet import UNetShape

from paint import mv_stored
from paint.counting import HALF, SAFE, Alive, fused

CASES = [
    pytest.param("sdxl", 768, 2, 1, HALF, id="SDXL", marks=pytest.mark.full),
    pytest.param("sdxl", 768, 1, 1, HALF, id="SDXL, one row at a time", marks=pytest.mark.full),
    pytest.param("sdxl", 768, 2, 0, HALF, id="SDXL tg2mv", marks=pytest.mark.full),
    pytest.param("sdxl", 1024, 2, 3, HALF, id="SDXL, three references at 1024", marks=pytest.mark.full),
    pytest.param("sdxl", 768, 2, 1, SAFE, id="SDXL fp16-safe", marks=pytest.mark.full),
    pytest.param("sd21", 512, 2, 1, HALF, id="SD2.1"),
    pytest.param("sd21", 768, 2, 1, SAFE, id="SD2.1 fp16-safe at 768", marks=pytest.mark.full),
]


def counted(base, pixels, rows, references, dtypes):
    """Bytes at the peak of each stage beside the weights, and of what it keeps for the next."""
    config, side, stream = mv_stored.full_size(base), pixels // 8, dtypes.residual
    with torch.device("meta"), torch.no_grad():
        unet = mv_adapter.unet_for(config, "ig2mv" if references else "tg2mv")
        encoder = mv_adapter.encoder_for(base, config["block_out_channels"])
        for module in (unet, encoder):
            for name, parameter in module.named_parameters():
                parameter.data = parameter.data.to(stored_dtype(name, dtypes))
            mv_adapter.set_dtypes(module, dtypes)
        mv_adapter.set_kernel(unet, fused)

        def words(count):
            pooled = torch.empty(count, 1280, dtype=stream)
            added = {"text_embeds": pooled, "time_ids": torch.empty(count, 6)} if base == "sdxl" else {}
            return torch.empty(count, 77, config["cross_attention_dim"], dtype=stream), added

        found, kept = {}, {}
        weights = list(unet.parameters())
        if references:
            with Alive(weights) as alive:
                kept = mv_adapter.looked_at(unet, torch.empty(references, 4, side, side, dtype=stream), *words(1))
            found["reference"] = alive.peak
        maps = torch.empty(6, 6, pixels, pixels, dtype=dtypes.compute)
        with Alive(list(encoder.parameters())) as alive:
            states = [state.to(stream) for state in encoder(maps)]
        found["maps"] = alive.peak
        run = mv_adapter.AdapterInputs(kept, (False, True)[-rows:])
        sample = torch.empty(6 * rows, 4, side, side, dtype=stream)
        known = [*weights, *kept.values(), *states]
        with Alive(known) as alive:
            mv_adapter.forward(unet, sample, torch.empty(1), *words(rows), run, states)
        found["painting"] = alive.peak + sum(tensor.nbytes for tensor in (*kept.values(), *states))
    return found, sum(tensor.nbytes for tensor in kept.values())


@pytest.mark.full
@pytest.mark.parametrize(("base", "pixels", "rows", "references", "dtypes"), CASES)
def test_every_stage_at_full_size_is_forecast(base, pixels, rows, references, dtypes):
    found, kept = counted(base, pixels, rows, references, dtypes)
    precision = SimpleNamespace(compute=dtypes.compute, residual=dtypes.residual, transformer=dtypes.compute)
    configs = {"adapter": {"base": base}}
    shape = UNetShape.of(mv_stored.full_size(base))
    pipeline = SimpleNamespace(family="mv_adapter", precision=precision, configs=configs, shape=shape)
    run = PaintRun(1, rows, pixels, views=6, references=references)
    forecast = {"maps": map_encoder_bytes(pipeline, pixels), "painting": step_bytes(pipeline, run)}
    if references:
        forecast["reference"] = looking_bytes(pipeline, run)
    assert forecast.keys() == found.keys()
    for stage, peak in found.items():
        assert abs(forecast[stage] / peak - 1) < 0.15, f"{stage} forecast {forecast[stage]}, is {peak}"
    if (base, pixels, references, dtypes) == ("sdxl", 768, 1, HALF):
        assert round(kept / 2**20) == 112, "one row of the self-attentions' inputs is all that is kept"
