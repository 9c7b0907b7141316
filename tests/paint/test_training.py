"""The small paint model: its code of pictures, and its folder, which the pack loads and paints with."""

import sys
from pathlib import Path

import pytest
import torch
from anygpu.compat.memory.parts import Silent
from anygpu.paint.geometry.cameras import DEFAULT_VIEWS
from anygpu.paint.loading import PaintRequest, load_paint
from anygpu.paint.networks import vae
from anygpu.paint.sampling.painting import PaintInputs, PaintSettings, paint_views

TRAINING = Path(__file__).resolve().parents[2] / "training"


@pytest.fixture(scope="module")
def small():
    """``training/hunyuan3d_paint.py``."""
    sys.path.insert(0, str(TRAINING))
    import hunyuan3d_paint

    yield hunyuan3d_paint
    sys.path.remove(str(TRAINING))


@pytest.mark.full
def test_it_is_written_as_a_folder_that_encodes_means_of_blocks_and_paints(small, tmp_path):
    parts = small.models()
    torch.nn.init.normal_(parts["unet"].body.conv_out.weight, std=0.01)  # zero before it is trained
    small.write(parts, tmp_path)
    pipeline = load_paint(PaintRequest(tmp_path, device="cpu"))
    blocks = torch.rand(6, 16, 16, 3, generator=torch.Generator().manual_seed(0))
    pictures = blocks.repeat_interleave(8, 1).repeat_interleave(8, 2)
    with torch.no_grad(), pipeline.offloader.hold("vae") as module:
        latents = vae.encoded(module, pictures, None, torch.device("cpu"))
        back = vae.decoded(module, latents, torch.device("cpu"), Silent())
    code = latents[:, :3].movedim(1, -1) * vae.SCALE / 2 + 0.5
    assert torch.allclose(code, blocks, atol=5e-3) and torch.allclose(back, pictures, atol=5e-3), "its weights are bf16"
    inputs = PaintInputs([pictures[0]], pictures, pictures, DEFAULT_VIEWS)
    views = [paint_views(pipeline, inputs, PaintSettings(size=128, steps=1, seed=seed)).views for seed in (0, 1)]
    assert views[0].shape == (6, 128, 128, 3) and bool(views[0].isfinite().all()) and not views[0].equal(views[1])
