"""Delight against the published pipeline, and the pictures around its network."""

from dataclasses import replace

import numpy
import pytest
import torch
from anygpu.compat.errors import CheckpointError, InputError
from anygpu.compat.memory.parts import Silent
from anygpu.paint.forecast import PaintRun
from anygpu.paint.loading import PaintRequest, load_paint
from anygpu.paint.networks import vae
from anygpu.paint.networks.encoders import dino_pixels, encoded_prompt
from anygpu.paint.pictures import recentred, resized
from anygpu.paint.sampling import delight as delighting
from anygpu.paint.sampling.delight import DelightSettings, corrected, delight_image, network_picture, sampled
from paint.stored import FIXTURES, any_text, checkpoint, values
from PIL import Image

PIXEL, LATENT_TOLERANCE = 1 / 255, 1e-4


def picture(name: str) -> torch.Tensor:
    return torch.from_numpy(numpy.array(Image.open(FIXTURES / "delight_v2_0" / f"{name}.png"))).float() / 255


@pytest.fixture(scope="module")
def delight(delight_folder):
    return load_paint(PaintRequest(delight_folder, device="cpu"))


def test_what_the_network_is_given():
    given = resized(picture("wrap_rgba_input")[None], 512, 512)[0]
    assert torch.equal(network_picture(given), picture("wrap_rgba_to_network"))


def test_what_becomes_of_its_result():
    given = resized(picture("wrap_rgba_input")[None], 512, 512)[0]
    found = corrected(picture("wrap_rgba_from_network"), given)
    assert torch.equal(found, picture("wrap_rgba_output"))


def test_the_published_pipeline(delight, monkeypatch):
    given, wanted = values("delight", "pipeline_default_nocfg.in"), values("delight", "pipeline_default_nocfg.out")
    start = (float(given["sigmas"][0]) ** 2 + 1) ** 0.5  # the fixture's latents have the first level already
    noises = iter([given["init_latents"] / start, *(given[f"step_noise.{step}"] for step in range(3))])
    monkeypatch.setattr(delighting, "noises", lambda *_: lambda: next(noises))
    with torch.no_grad():
        settings, text = DelightSettings(size=64, steps=3), given["prompt_embeds"]
        found = sampled(delight, given["image_latents"], text, settings, PaintRun(3, 1, 64, views=1), Silent())
        assert (found - wanted["latents.2"]).abs().max() <= LATENT_TOLERANCE
        with delight.offloader.hold("vae") as module:
            shown = vae.decoded(module, found / vae.SCALE, torch.device("cpu"), Silent())
            again = vae.encoded(module, picture("pipeline_input")[None], None, torch.device("cpu"))
    image = wanted["image"].permute(0, 2, 3, 1)
    image = image if image.min() >= 0 else (image / 2 + 0.5).clamp(0, 1)
    assert (shown - image).abs().max() <= PIXEL
    assert (again - given["image_latents"]).abs().max() <= LATENT_TOLERANCE


def test_a_recentred_object_fills_its_square_as_published():
    found, wanted = recentred(picture("wrap_rgba_input")), picture("recenter_output")
    assert torch.equal(found[..., 3], wanted[..., 3])
    assert torch.equal(found[wanted[..., 3] > 0], wanted[wanted[..., 3] > 0])


def test_guidance_by_prompt_and_picture_is_the_published_one(delight, monkeypatch):
    """Three rows: with the prompt, with the negative prompt, without the picture."""
    given, wanted = values("delight", "pipeline_cfg.in"), values("delight", "pipeline_cfg.out")
    start = (float(given["sigmas"][0]) ** 2 + 1) ** 0.5
    noises = iter([given["init_latents"] / start, *(given[f"step_noise.{step}"] for step in range(3))])
    monkeypatch.setattr(delighting, "noises", lambda *_: lambda: next(noises))
    scales = (float(given[name]) for name in ("image_guidance_scale", "guidance_scale"))
    settings = DelightSettings(64, 3, **dict(zip(("image_guidance", "text_guidance"), scales, strict=True)))
    texts = torch.cat([given[f"{name}prompt_embeds"] for name in ("negative_", "negative_", "")])
    with torch.no_grad():
        run = PaintRun(3, 3, 64, views=1)
        found = sampled(delight, given["image_latents"][:1], texts, settings, run, Silent())
    assert (found - wanted["latents.2"]).abs().max() <= LATENT_TOLERANCE


@any_text()
def test_guidance_by_the_picture_is_off_until_it_is_chosen(delight, recorded):
    calls, settings, watched = [], DelightSettings(size=64, steps=2), recorded()
    handle = delight.parts.read("unet").register_forward_hook(lambda _m, given, _o: calls.append(given[0].shape[0]))
    plain = delight_image(delight, picture("wrap_rgba_input"), replace(settings, text_guidance=5.0), watched)
    assert plain.shape == (64, 64, 3) and "text_guidance has no effect without negative_prompt" in watched.said
    guided = delight_image(delight, picture("wrap_rgba_input"), replace(settings, image_guidance=1.5))
    handle.remove()
    assert calls == [1, 1, 2, 2]
    assert not torch.equal(plain, guided)


def test_an_empty_prompt_needs_its_encoder(delight, tmp_path, recorded):
    with pytest.raises(CheckpointError, match="no text_encoder for"):
        delight_image(delight, picture("wrap_rgba_input"), DelightSettings(64, 1))  # and no forecast is said to fail
    from transformers import CLIPTextConfig, CLIPTextModel

    folder = checkpoint("delight", tmp_path)
    config = CLIPTextConfig(
        vocab_size=49408, hidden_size=64, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        projection_dim=8,
    )  # fmt: skip
    model = CLIPTextModel(config).eval()
    model.save_pretrained(folder / "text_encoder")
    pipeline = load_paint(PaintRequest(folder / "unet", device="cpu"))
    tokens = torch.tensor([[49406, 49407] + [0] * 75])
    with torch.no_grad():
        assert torch.allclose(encoded_prompt(pipeline, "", Silent()), model(tokens).last_hidden_state, atol=1e-6)
    found = delight_image(pipeline, picture("wrap_rgba_input"), DelightSettings(size=64, steps=1), recorded())
    assert found.shape == (64, 64, 3)
    with pytest.raises(CheckpointError, match=r"no tokenizer in .*v2-0.{1,2}tokenizer'.* leave negative_prompt empty"):
        encoded_prompt(pipeline, "shadows", Silent())


def test_dino_looks_at_the_middle():
    found = dino_pixels(torch.rand(300, 400, 3, generator=torch.Generator().manual_seed(0)))
    assert found.shape == (1, 3, 224, 224)
    flat = dino_pixels(torch.full((64, 64, 3), 124 / 255))  # in 8 bits, as Pillow resizes
    assert (flat[:, 0] - (124 / 255 - 0.485) / 0.229).abs().max() <= 1e-5


def test_unusable_input_is_said(delight, paint_folder):
    with pytest.raises(InputError, match="size 100 for delighting"):
        delight_image(delight, torch.zeros(8, 8, 3), DelightSettings(size=100))
    with pytest.raises(InputError, match="picture to delight of shape"):
        delight_image(delight, torch.zeros(8, 8), DelightSettings())
    with pytest.raises(InputError, match="pipeline for delighting"):
        delight_image(load_paint(PaintRequest(paint_folder, device="cpu")), torch.zeros(8, 8, 3), DelightSettings())
