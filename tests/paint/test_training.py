"""The small paint models: their code of pictures, and their folders, which the pack loads and paints with."""

import shutil
from pathlib import Path

import pytest
import torch
from anygpu.compat.memory.parts import Silent
from anygpu.paint.adapter_loading import AdapterRequest, load_adapter
from anygpu.paint.choices import DEMOS
from anygpu.paint.geometry.cameras import ADAPTER_VIEWS, DEFAULT_VIEWS
from anygpu.paint.loading import PaintRequest, load_paint
from anygpu.paint.networks import vae
from anygpu.paint.sampling.adapter_painting import paint_six_views
from anygpu.paint.sampling.painting import PaintInputs, PaintSettings, paint_views

TRAINING = Path(__file__).resolve().parents[2] / "training"


@pytest.fixture
def small():
    """``training/hunyuan3d_paint.py``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(TRAINING))
        import hunyuan3d_paint

        yield hunyuan3d_paint


@pytest.fixture
def adapter():
    """``training/mv_adapter.py``, and its modules as if they were trained."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(TRAINING))
        import mv_adapter

        parts = mv_adapter.models()
        torch.nn.init.normal_(parts["unet"].conv_out.weight, std=0.01)  # zero before it is trained
        yield mv_adapter, parts


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


@pytest.mark.full
def test_the_gradients_of_objects_are_those_of_their_mean(adapter):
    """Two threads find them; the text's attention has none, and the first layer of the maps sees one block."""
    module, parts = adapter
    meshes = [module.shown(seed) for seed in range(module.OBJECTS)]
    loss_of, weights = module.loss_with(parts, meshes), dict(parts["unet"].named_parameters())
    losses, name = [], "up_blocks.3.attentions.0.transformer_blocks.0.attn1.processor.to_v_ref.weight"
    for scale in (0.0, 1e-2):
        for weight in parts["unet"].parameters():
            weight.grad = None
        loss = loss_of(1, None)
        loss.backward()
        gradient = weights[name].grad.clone()
        if not scale:
            direction = gradient / gradient.norm()
        losses.append((float(loss.detach()), float((gradient * direction).sum())))
        with torch.no_grad():
            weights[name] += 1e-2 * direction
    (first, slope), (second, after) = losses
    assert second - first == pytest.approx(1e-2 * (slope + after) / 2, rel=0.02) and slope > 0
    assert all(weight.grad is None for key, weight in weights.items() if ".attn2." in key)
    around = parts["adapter"].adapter.conv_in.weight.grad.clone()
    assert around[:, :, 1, 1].abs().max() > 0
    around[:, :, 1, 1] = 0
    assert not around.any()


@pytest.mark.full
def test_mv_adapter_is_written_as_a_folder_that_paints_after_a_picture_and_not_after_words(adapter, tmp_path):
    module, parts = adapter
    module.write(parts, tmp_path)
    for part, place in module.SHARED.items():
        shutil.copytree(next(found for home in DEMOS if (found := home / place).is_dir()), tmp_path / part)
    pipeline = load_adapter(AdapterRequest(tmp_path, tmp_path / module.FILE, device="cpu"))
    blocks = torch.rand(6, 16, 16, 3, generator=torch.Generator().manual_seed(0))
    pictures = blocks.repeat_interleave(8, 1).repeat_interleave(8, 2)

    def views(picture: torch.Tensor, prompt: str = "") -> torch.Tensor:
        inputs = PaintInputs([picture], pictures, pictures, ADAPTER_VIEWS, prompt=prompt)
        return paint_six_views(pipeline, inputs, PaintSettings(size=128, steps=1)).views

    made = views(pictures[0])
    assert made.shape == (6, 128, 128, 3) and bool(made.isfinite().all())
    assert torch.equal(views(pictures[0], "a red cat"), made) and not torch.equal(views(pictures[1]), made)
