"""Painting from folder to pictures: the published pipeline's result, and what users may change."""

from dataclasses import replace

import numpy
import pytest
import torch
from anygpu.compat.device.execution import generator_for
from anygpu.compat.errors import InputError
from anygpu.compat.memory.parts import Silent
from anygpu.paint.choices import GREY
from anygpu.paint.geometry.cameras import DEFAULT_VIEWS, camera_table
from anygpu.paint.loading import PaintRequest, load_paint
from anygpu.paint.networks import vae
from anygpu.paint.networks.encoders import dino_pixels, dino_states
from anygpu.paint.networks.multiview import StreamInputs
from anygpu.paint.pictures import over, recentred, resized, squared
from anygpu.paint.sampling import painting
from anygpu.paint.sampling.painting import PaintInputs, PaintSettings, completed, paint_views, plan_of, run_of, sampled
from anygpu.paint.sampling.solvers import solver_for
from paint.stored import FIXTURES, values
from PIL import Image

LATENT_TOLERANCE, PIXEL = 5e-3, 1 / 255  # of the fixtures' README: the first sigma is 4096
TINY = PaintSettings(size=64, steps=2)


def picture(name: str, kind: str = "paint_v2_0/images") -> torch.Tensor:
    return torch.from_numpy(numpy.array(Image.open(FIXTURES / kind / f"{name}.png"))).float() / 255


@pytest.fixture(scope="module")
def inputs():
    maps = [torch.stack([over(picture(f"{name}_{view}"), 1.0) for view in range(6)]) for name in ("normal", "position")]
    return PaintInputs([picture("ref")], *maps, DEFAULT_VIEWS)


@pytest.fixture(scope="module")
def turbo(paint_folder):
    return load_paint(PaintRequest(paint_folder, variant="turbo", device="cpu"))


def encoded(pipeline, inputs):
    given, generator = values("paint", "pipeline_euler.in"), generator_for(0)
    with torch.no_grad(), pipeline.offloader.hold("vae") as module:
        for name, pictures in (
            ("ref", over(inputs.references[0], GREY)[None]),
            ("normal", inputs.normals),
            ("position", inputs.positions),
        ):
            found = vae.encoded(module, pictures, generator, torch.device("cpu")) * vae.SCALE
            yield name, found, given[f"{name}_latents"][0]


def test_pictures_become_the_published_latents(paint, inputs):
    for name, found, wanted in encoded(paint, inputs):
        limit = 1e-5 if name == "ref" else 5e-4  # upstream rounds the maps to fp16 first
        assert (found - wanted).abs().max() <= limit, name


def test_two_steps_of_the_published_sampler_with_its_noise(paint, monkeypatch):
    given, wanted = values("paint", "pipeline_euler.in"), values("paint", "pipeline_euler.out")
    noises = iter([given["init_latents"] / 4096, given["step_noise.0"], given["step_noise.1"]])
    with torch.no_grad():
        with paint.offloader.hold("reference") as stream:
            reference = stream(given["ref_latents"])
        maps = torch.cat((given["normal_latents"], given["position_latents"]), dim=2)
        conditions = (maps, given["camera_info_gen"][0], StreamInputs(6, reference, (0.0, 1.0)))
        settings = completed(paint, PaintSettings(size=64, steps=2, guidance=2.0), Silent())
        monkeypatch.setattr(painting, "noises", lambda *_: lambda: next(noises))
        solver = solver_for(settings.scheduler, plan_of(settings))
        found = sampled(paint, conditions, settings, solver, run_of(settings, solver, 6, 1), Silent(), None)
        assert (found - wanted["latents.1"]).abs().max() <= LATENT_TOLERANCE
        with paint.offloader.hold("vae") as module:
            first = vae.decoded(module, found[:1] / vae.SCALE, torch.device("cpu"), Silent())[0]
    shown = (wanted["decoded_first_view"][0] / 2 + 0.5).clamp(0, 1).permute(1, 2, 0)
    assert (first - shown).abs().max() <= PIXEL


def test_a_reference_scale_of_0_leaves_out_the_picture_alone_not_the_learned_text(paint, inputs):
    none, hardly, other = (
        paint_views(paint, replace(inputs, references=[given]), replace(TINY, reference_scale=scale)).latents
        for given, scale in ((inputs.references[0], 0.0), (inputs.references[0], 1e-6), (torch.rand(64, 64, 3), 0.0))
    )
    assert torch.allclose(none, hardly, atol=1e-3), "as near as the scales are"
    assert torch.equal(none, other)


@pytest.mark.full
def test_the_whole_call(paint, inputs, recorded):
    progress, kept = recorded(), []
    line = "maps and picture are prepared as Tencent does: views of a seed differed slightly before"
    progress.sampled = lambda *given: kept.append((len(progress.steps), *given))
    painted = paint_views(paint, inputs, TINY, progress)
    assert progress.said.count(line) == 1
    ((steps, latents, *others),) = kept
    assert torch.equal(latents, painted.latents) and others == ["paint", TINY.seed, "SD15"]
    assert not any(stage.startswith("decoding") for _, _, stage in progress.steps[:steps]), "kept too late"
    assert painted.views.shape == (6, 64, 64, 3)
    assert painted.metallic_roughness is None
    assert painted.latents.shape == (6, 4, 8, 8)
    assert {stage.split(" ")[0] for _, _, stage in progress.steps} >= {"encoding", "painting", "decoding"}
    assert progress.previews[0].shape == (6, 8, 8, 3)
    again = paint_views(paint, inputs, TINY, progress)
    assert progress.said.count(line) == 1
    assert torch.equal(painted.views, again.views)
    assert not torch.equal(painted.views, paint_views(paint, inputs, replace(TINY, seed=1)).views)


@pytest.mark.full
def test_the_reference_stream_runs_once_and_views_decode_one_at_a_time(paint_folder, inputs):
    calls = {"reference": [], "vae": [], "unet": []}

    def prepared(part, module):
        watched = module.decoder if part == "vae" else module
        watched.register_forward_hook(lambda _m, given, _o: calls[part].append(given[0].shape[0]))
        return lambda: None

    watching = load_paint(PaintRequest(paint_folder, device="cpu"))
    watching.parts.prepare = prepared
    paint_views(watching, inputs, TINY)
    paint_views(watching, inputs, replace(TINY, guidance=1.0))
    assert len(calls["reference"]) == 2
    assert calls["unet"] == [2, 2, 1, 1], "without guidance one row, of two steps each"
    assert calls["vae"] == [1] * 12


def test_pbr_gives_two_pictures_of_each_view(pbr, inputs):
    states = torch.randn(1, 17, 1536, generator=torch.Generator().manual_seed(0))
    painted = paint_views(pbr, replace(inputs, dino=states), TINY)
    assert painted.views.shape == painted.metallic_roughness.shape == (6, 64, 64, 3)
    assert painted.latents.shape == (12, 4, 8, 8)
    assert not torch.equal(painted.views, painted.metallic_roughness)
    other = paint_views(pbr, replace(inputs, dino=states + 1), TINY)
    assert not torch.equal(other.views, painted.views), "DINO counts"
    with pytest.raises(InputError, match="no DINOv2"):
        paint_views(pbr, inputs, TINY)


def test_several_references_of_several_sizes(paint, inputs):
    pictures = [*inputs.references, torch.rand(1, 40, 90, 3, generator=torch.Generator().manual_seed(0))]
    painted = paint_views(paint, replace(inputs, references=pictures), TINY)
    assert not torch.equal(painted.views, paint_views(paint, inputs, TINY).views)


def test_a_second_larger_pass_starts_from_the_first(paint, inputs):
    first = paint_views(paint, inputs, TINY)
    larger = torch.nn.functional.interpolate(first.latents, scale_factor=2, mode="bilinear")
    second = paint_views(paint, inputs, replace(TINY, size=128, latents=larger, denoise=0.2))
    assert second.views.shape == (6, 128, 128, 3)
    near = (second.latents - larger).square().mean()
    fresh = paint_views(paint, inputs, replace(TINY, size=128))
    assert near < (fresh.latents - larger).square().mean()
    assert len(plan_of(completed(paint, PaintSettings(latents=larger, denoise=0.5, steps=10), Silent()))) == 10
    with pytest.raises(InputError, match=r"^denoise 0.005; expected 0.01 to 1 with 10 steps"):
        plan_of(completed(paint, PaintSettings(latents=larger, denoise=0.005, steps=10), Silent()))


@pytest.mark.parametrize("scheduler", ["auto", "unipc"])
def test_sigmas_say_how_much_of_latents_is_repainted(paint, recorded, scheduler):
    progress, latents = recorded(), torch.full((6, 4, 8, 8), 5.0)
    given = PaintSettings(64, scheduler=scheduler, sigmas=(1.5, 0.5, 0.0), latents=latents)
    plain, other = (completed(paint, each, progress) for each in (given, replace(given, denoise=0.4)))
    assert plain == other and progress.said.count("denoise has no effect without latents, or with sigmas") == 1
    solver, noise = solver_for(plain.scheduler, plan_of(plain)), torch.ones_like(latents)
    x = solver.model_input(painting.begun(paint, solver, noise, plain), 0)
    assert torch.allclose(x, (latents * paint.latent_scale + 1.5 * noise) / (1.5**2 + 1) ** 0.5)


def test_a_published_spacing_that_a_receipt_names_is_no_choice(turbo, recorded):
    progress = recorded()
    assert completed(turbo, completed(turbo, PaintSettings(64), progress), progress).spacing == "trailing"
    assert not any("lcm" in line for line in progress.said)


def test_published_settings_of_each_variant(paint, turbo, pbr):
    found = {pipeline.variant: completed(pipeline, PaintSettings(), Silent()) for pipeline in (paint, turbo, pbr)}
    assert {name: (s.scheduler, s.steps, s.guidance) for name, s in found.items()} == {
        "v2-0": ("euler_ancestral", 30, 2.0),
        "turbo": ("lcm", 10, 1.0),
        "v2-1": ("unipc", 15, 3.0),
    }
    assert plan_of(found["turbo"]).timesteps[0] == 989


@pytest.mark.full
@pytest.mark.parametrize("scheduler", ["euler", "lcm", "unipc"])
def test_another_scheduler(turbo, inputs, scheduler):
    assert torch.isfinite(paint_views(turbo, inputs, replace(TINY, scheduler=scheduler)).views).all()


WRONG = {
    "view size 100": (PaintSettings(size=100), {}),
    "denoise 0": (replace(TINY, denoise=0.0), {}),
    "scheduler 'x'": (replace(TINY, scheduler="x"), {}),
    "sigma schedule 'x'": (replace(TINY, spacing="x"), {}),
    "latents of shape": (replace(TINY, latents=torch.zeros(6, 4, 9, 9)), {}),
    "5 normal maps for 6 cameras": (TINY, {"normals": torch.ones(5, 64, 64, 3)}),
    "reference picture with NaN": (TINY, {"references": torch.full((1, 8, 8, 3), float("nan"))}),
    "reference picture of shape": (TINY, {"references": torch.zeros(8, 8)}),
    "no reference picture": (TINY, {"references": []}),
    "elevations": (TINY, {"cameras": camera_table([0] * 6, [45] * 6, [1])}),
}


@pytest.mark.parametrize("text", WRONG)
def test_what_does_not_fit_is_said_before_anything_runs(paint, inputs, text):
    settings, changes = WRONG[text]
    with pytest.raises(InputError, match=text):
        paint_views(paint, replace(inputs, **changes), settings)


def test_a_cancel_is_obeyed_while_painting(paint, inputs, recorded):
    progress = recorded(lambda done, stage: stage == "painting" and done == 1)
    with pytest.raises(recorded.Cancelled):
        paint_views(paint, inputs, TINY, progress)
    assert not any(stage == "decoding" for _, _, stage in progress.steps)


def test_a_recentred_object_stands_in_the_middle_with_a_border():
    given = torch.zeros(50, 80, 4)
    given[10:40, 60:75] = torch.tensor([1.0, 0.0, 0.0, 1.0])
    found = recentred(given)
    seen = (found[..., 3] > 0).nonzero()
    assert found.shape == (42, 42, 4)  # 1.4 times the longer side
    assert seen.min(0).values.tolist() == [6, 13]
    assert seen.max(0).values.tolist() == [35, 27]
    with pytest.raises(InputError, match="wholly transparent"):
        recentred(torch.zeros(4, 4, 4))


def test_squares_and_sizes():
    assert squared(torch.zeros(4, 8, 3), 1.0)[0].eq(1).all()
    same = torch.rand(1, 8, 8, 3)
    assert resized(same, 8, 8) is same
    clear = torch.tensor([1.0, 0.0, 0.0, 0.0]).expand(1, 8, 8, 4).clone()
    clear[:, :, 4:] = torch.tensor([0.0, 0.0, 1.0, 1.0])
    solid = resized(clear, 4, 4)[..., 3] > 0.5
    assert resized(clear, 4, 4)[solid][:, 0].max() == 0, "no colour leaks out of what is transparent"


@pytest.mark.full
def test_pbr_with_its_own_dino(pbr_folder, inputs, tmp_path):
    from transformers import Dinov2Config, Dinov2Model

    config = Dinov2Config(hidden_size=1536, num_hidden_layers=1, num_attention_heads=24, mlp_ratio=1, image_size=224)
    model = Dinov2Model(config).eval()
    model.save_pretrained(tmp_path / "dino")
    pipeline = load_paint(PaintRequest(pbr_folder, image_encoder=tmp_path / "dino", device="cpu"))
    found = dino_states(pipeline, inputs.references[0][..., :3], Silent(), {})
    with torch.no_grad():
        wanted = model(dino_pixels(inputs.references[0][..., :3])).last_hidden_state
    assert found.shape == (1, 1 + (224 // config.patch_size) ** 2, 1536)
    assert torch.allclose(found, wanted, atol=1e-4)
    assert paint_views(pipeline, inputs, TINY).views.shape == (6, 64, 64, 3)
