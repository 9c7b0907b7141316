"""Six views by MV-Adapter, from the mesh to its texture, on tiny random checkpoints."""

import math
from dataclasses import replace

import pytest
import torch
from anygpu.compat.device.execution import HOST
from anygpu.compat.errors import CheckpointError, InputError
from anygpu.compat.memory.parts import Silent
from anygpu.paint import forecast, texturing
from anygpu.paint.adapter_loading import AdapterRequest, load_adapter
from anygpu.paint.choices import SHIFT
from anygpu.paint.forecast import MARGIN, paint_needs, planned_run, stage_work
from anygpu.paint.pictures import filling
from anygpu.paint.sampling import adapter_painting, painting
from anygpu.paint.sampling.adapter_painting import Rows, encoded_prompts, paint_six_views
from anygpu.paint.sampling.painting import PaintInputs, PaintSettings
from anygpu.paint.sampling.solvers import schedule_for, sigma_table, solver_for, velocity_of
from paint.shapes import box
from simulated import accelerator

from paint import mv_stored

PICTURE = torch.rand(48, 64, 4, generator=torch.Generator().manual_seed(0))
SETTINGS = texturing.OneStep(
    PaintSettings(size=64, steps=2, seed=3), texturing.BakeSettings(texture_size=64, view_size=128), prompt="a red cat"
)


class Noting(Silent):
    def __init__(self):
        self.notes = []

    def notify(self, text):
        self.notes.append(text)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("mv")
    bases = {base: mv_stored.folder(base, root) for base in mv_stored.WIDTHS}
    return {key: (bases[key[1]], mv_stored.adapter_file(*key, root)) for key in mv_stored.FILES}


@pytest.fixture(scope="module")
def wanted(models):
    """The texture of each model on the CPU in fp32."""
    found = {}

    def run(key):
        if key not in found:
            found[key] = textured(load_adapter(AdapterRequest(*models[key], device="cpu")), key[0])
        return found[key]

    return run


def textured(pipeline, variant, progress=None):
    return texturing.textured(box(), [PICTURE] if variant == "ig2mv" else [], pipeline, None, SETTINGS, progress)


@pytest.mark.full
@pytest.mark.parametrize(
    "key",
    [
        pytest.param(key, marks=[pytest.mark.full] * (key == ("tg2mv", "sdxl")), id="-".join(key))
        for key in mv_stored.FILES
    ],
)
def test_from_a_mesh_to_its_texture(wanted, key):
    texture, painted, cameras = wanted(key)
    assert painted.views.shape == (6, 64, 64, 3) and painted.latents.shape == (6, 4, 8, 8)
    assert painted.views.std() > 0.05 and painted.metallic_roughness is None
    assert len({float(view.mean()) for view in painted.views}) == 6, "each view has maps of its own"
    assert texture.share > 0.95 and texture.colour.shape == (64, 64, 3)
    assert [(camera.azimuth, camera.elevation) for camera in cameras][4:] == [(180, 90), (180, -90)]


@pytest.mark.full
@pytest.mark.parametrize(
    ("key", "offload"),
    [
        (("ig2mv", "sd21"), "sequential"),
        pytest.param(("ig2mv", "sdxl"), "sequential", marks=pytest.mark.full),
        pytest.param(("ig2mv", "sdxl"), "model", marks=pytest.mark.full),
        (("ig2mv", "sd21"), "model"),
        (("tg2mv", "sd21"), "group"),
        pytest.param(("ig2mv", "sd21"), "none", marks=pytest.mark.full),
    ],
    ids=str,
)
def test_each_offload_mode_gives_what_the_cpu_gives(acc, models, wanted, key, offload):
    request = AdapterRequest(*models[key], precision="fp32", offload=offload, device=acc)
    pipeline = load_adapter(request)
    for _ in range(2 if offload == "sequential" else 1):
        texture, painted, _ = textured(pipeline, key[0])
        assert painted.views.device == HOST
        assert (painted.views - wanted(key)[1].views).abs().max() <= 1e-3
    needs = paint_needs(pipeline, planned_run(pipeline, 64))
    costs = pipeline.offloader.memory_stats.stages[: len(needs)]
    assert [cost.stage for cost in costs] == [need.name for need in needs]
    if offload == "model":
        for cost, need in zip(costs, needs, strict=True):
            assert need.weights <= cost.peak_bytes, cost.stage
            assert cost.peak_bytes <= MARGIN * need.total + 2**20, cost.stage
        del texture, painted, pipeline
        assert accelerator.memory().allocated_bytes == 0


@pytest.mark.parametrize(
    "precision", [*(pytest.param(dtype, marks=pytest.mark.full) for dtype in ("bf16", "fp16")), "fp16-safe"]
)
def test_half_precision_is_near(acc, models, wanted, precision):
    key = ("ig2mv", "sdxl")
    pipeline = load_adapter(AdapterRequest(*models[key], precision=precision, device=acc))
    views = textured(pipeline, key[0])[1].views
    assert (views - wanted(key)[1].views).abs().mean() < 0.02
    assert pipeline.parts.read("unet").conv_in.weight.dtype is pipeline.precision.compute


def inputs(variant="ig2mv", **changes):
    maps, table, _ = texturing.maps_of(box(), None, "mv_adapter", size=64)
    given = {"prompt": "a red cat", "cameras": table, **changes}
    return PaintInputs([PICTURE] if variant == "ig2mv" else [], maps.normal, maps.position, **given)


def painted(pipeline, progress=None, given=None, **changes):
    settings = PaintSettings(**{"size": 64, "steps": 1, "seed": 3, **changes})
    return paint_six_views(pipeline, given or inputs(pipeline.variant), settings, progress)


def test_words_seed_guidance_scales_and_a_second_pass_are_seen(models):
    pipeline = load_adapter(AdapterRequest(*models["ig2mv", "sd21"], device="cpu"))
    first = painted(pipeline)
    assert torch.equal(painted(pipeline).views, first.views)
    others = [
        painted(pipeline, given=inputs(prompt="a blue dog")),
        painted(pipeline, given=inputs(negative="a boat")),
        painted(pipeline, given=PaintInputs([1 - PICTURE], *(getattr(inputs(), name) for name in
                                             ("normals", "positions", "cameras")), prompt="a red cat")),
        painted(pipeline, seed=4),
        painted(pipeline, guidance=1.0),
        painted(pipeline, reference_scale=0.5),
        painted(pipeline, multiview_scale=0.5),
        painted(pipeline, latents=first.latents, denoise=0.3, steps=2),
    ]  # fmt: skip
    for number, other in enumerate(others):
        assert (other.views - first.views).abs().max() > 1e-3, number


def test_maps_of_another_size_are_said_to_be_resized_be_they_smaller_or_larger(recorded):
    for size in (64, 192):
        progress = recorded()
        adapter_painting._maps(inputs(), PaintSettings(size), progress)
        lines = [
            f"{name} maps of 64 pixels are resized: Render Views at {size} is exact" for name in ("normal", "position")
        ]
        assert progress.said == (lines if size > 64 else [])


@pytest.mark.full
def test_noise_is_drawn_for_all_views_and_then_for_the_reference(models, monkeypatch):
    pipeline, seen = load_adapter(AdapterRequest(*models["ig2mv", "sd21"], device="cpu")), []

    class Stopped(Exception):
        pass

    def begun(_pipeline, _solver, noise, _settings):
        seen.append(noise)
        raise Stopped

    monkeypatch.setattr(painting, "begun", begun)
    with pytest.raises(Stopped):
        painted(pipeline, seed=9)
    assert torch.equal(seen[0], torch.randn(6, 4, 8, 8, generator=torch.Generator().manual_seed(9)))


def test_a_checkpoint_of_velocities_is_converted(models):
    pipeline = load_adapter(AdapterRequest(*models["tg2mv", "sd21"], device="cpu"))
    first = painted(pipeline, steps=2).views
    pipeline.configs["adapter"]["prediction_type"] = "v_prediction"
    assert (painted(pipeline, steps=2).views - first).abs().max() > 1e-2


def test_guidance_rows_run_apart_once_memory_has_run_out(models):
    pipeline, progress = load_adapter(AdapterRequest(*models["ig2mv", "sd21"], device="cpu")), Noting()
    wanted = painted(pipeline).views
    unet, sizes = pipeline.parts.read("unet"), []

    def short(module, args, kwargs):
        sizes.append(len(args[0]))
        if len(args[0]) == 12:
            raise torch.OutOfMemoryError("out of memory")

    hook = unet.register_forward_pre_hook(short, with_kwargs=True)
    try:
        found = painted(pipeline, progress, steps=1).views
    finally:
        hook.remove()
    assert sizes == [1, 12, 6, 6] and any("one guidance row at a time" in note for note in progress.notes)
    assert (found - wanted).abs().max() < 1e-4


def test_another_error_is_not_taken_for_lack_of_memory():
    class Broken(torch.nn.Module):
        def forward(self, *_, **__):
            raise RuntimeError("shapes differ")

    text = adapter_painting.Text(torch.zeros(2, 7, 4), {})
    rows = Rows(text, adapter_painting.AdapterInputs({}, (False, True)), [], Silent())
    with pytest.raises(RuntimeError, match="shapes differ"):
        rows(Broken(), torch.zeros(6, 4, 8, 8), torch.zeros(1))
    assert not rows.apart


@pytest.mark.parametrize(
    ("variant", "changes", "message"),
    [
        ("tg2mv", {"prompt": " "}, "no prompt for tg2mv"),
        ("ig2mv", {"cameras": texturing.views_for(None, None)}, "cameras of another family for mv_adapter"),
        ("ig2mv", {"positions": torch.rand(5, 64, 64, 3)}, "5 position maps for 6 cameras"),
    ],
)
def test_what_does_not_fit_together_is_refused(models, variant, changes, message):
    pipeline = load_adapter(AdapterRequest(*models[variant, "sd21"], device="cpu"))
    given = inputs(variant)
    given = PaintInputs(**{name: changes.get(name, getattr(given, name)) for name in given.__slots__})
    with pytest.raises(InputError, match=message) as caught:
        painted(pipeline, given=given)
    assert len(str(caught.value).splitlines()) == 1
    with pytest.raises(InputError, match="latents of shape"):
        painted(pipeline, latents=torch.zeros(5, 4, 8, 8))


def test_what_was_not_taught_is_said(models):
    pipeline, progress = load_adapter(AdapterRequest(*models["ig2mv", "sd21"], device="cpu")), Noting()
    given = inputs()
    given = PaintInputs([PICTURE[..., :3], PICTURE], given.normals, given.positions, given.cameras)
    painted(pipeline, progress, given)
    said = " ".join(progress.notes)
    assert "made for views of 512 pixels, not 64" in said and "used whole" in said
    assert "2 reference pictures: the model was taught with one" in said
    words = load_adapter(AdapterRequest(*models["tg2mv", "sd21"], device="cpu"))
    painted(words, progress, inputs("ig2mv"))
    assert "the picture has no effect" in progress.notes[-1]


def test_prompts_are_encoded_as_the_published_pipeline_does(models):
    """SDXL: the state before the last of both encoders, zeros for an empty prompt; SD2.1: after its last norm."""
    from transformers import CLIPTokenizer

    pipeline = load_adapter(AdapterRequest(*models["ig2mv", "sdxl"], device="cpu"))
    text = encoded_prompts(pipeline, ["", "a red cat"], planned_run(pipeline, 64), Silent())
    assert text.states.shape == (2, 77, 128) and not text.states[0].any() and not text.added["text_embeds"][0].any()
    assert text.added["time_ids"].tolist() == [[64.0, 64.0, 0.0, 0.0, 64.0, 64.0]] * 2
    tokenizer = CLIPTokenizer.from_pretrained(models["ig2mv", "sdxl"][0] / "tokenizer")
    words = tokenizer("a red cat")["input_ids"]
    made = mv_stored.parts("sdxl")
    states = []
    with torch.no_grad():
        for part, padding in (("text_encoder", words[-1]), ("text_encoder_2", 0)):
            ids = torch.tensor([[*words, *[padding] * (77 - len(words))]])
            found = made[part](ids, output_hidden_states=True)
            states.append(found.hidden_states[-2])
    assert torch.allclose(text.states[1:], torch.cat(states, -1), atol=1e-5)
    assert torch.allclose(text.added["text_embeds"][1:], found.text_embeds, atol=1e-5)
    older = load_adapter(AdapterRequest(*models["ig2mv", "sd21"], device="cpu"))
    text = encoded_prompts(older, ["a red cat"], planned_run(older, 64), Silent())
    with torch.no_grad():
        ids = torch.tensor([[*words, *[0] * (77 - len(words))]])
        found = mv_stored.parts("sd21")["text_encoder"](ids).last_hidden_state
    assert torch.allclose(text.states, found, atol=1e-5) and not text.added


def test_words_beyond_the_last_token_are_counted(models):
    pipeline = load_adapter(AdapterRequest(*models["ig2mv", "sdxl"], device="cpu"))
    run, progress = planned_run(pipeline, 64), Noting()
    encoded_prompts(pipeline, ["cat " * 75, "a  red\ncat"], run, progress)
    assert not progress.notes
    encoded_prompts(pipeline, ["", " ".join(["cat"] * 74 + ["a-b", "dog", "fox"])], run, progress)
    assert progress.notes == ["CLIP reads 77 tokens: the last 3 of 77 words, from 'a-b' on, are cut"]


@pytest.mark.full
def test_a_missing_tokenizer_is_said_in_one_line(models, tmp_path):
    path = mv_stored.single_file("sd21", tmp_path / "base.safetensors")
    pipeline = load_adapter(AdapterRequest(path, models["tg2mv", "sd21"][1], device="cpu"))
    with pytest.raises(CheckpointError, match="no tokenizer in"):
        painted(pipeline)
    folder = mv_stored.tokenizer(tmp_path / "clip") or tmp_path / "clip"
    request = AdapterRequest(path, models["tg2mv", "sd21"][1], device="cpu", tokenizer=folder)
    assert painted(load_adapter(request)).views.shape == (6, 64, 64, 3)


def test_the_noise_is_the_usual_one_times_a_ramp():
    table = sigma_table(zero_snr=False, shift=SHIFT)
    usual = sigma_table(zero_snr=False)
    wanted = usual * torch.tensor([SHIFT ** (time / 1998) for time in range(1000)], dtype=torch.float64)
    assert ((table - wanted) / wanted).abs().max() < 1e-12
    for time, level in ((0, 0.029168), (500, 2.72302), (999, 41.3365)):  # of the published table
        assert float(table[time]) == pytest.approx(level, rel=1e-4)
    assert torch.equal(usual, sigma_table(zero_snr=False, shift=1.0))
    schedule = schedule_for("leading", 50, zero_snr=False, shift=SHIFT)
    assert schedule.timesteps[:2] == (981.0, 961.0) and schedule.timesteps[-1] == 1.0
    for index, level in ((0, 36.4214), (1, 31.7442), (2, 27.7592), (48, 0.14459), (49, 0.04136), (50, 0.0)):
        assert schedule.sigmas[index] == pytest.approx(level, rel=1e-3), index
    assert schedule.start == pytest.approx(36.4351, rel=1e-4)


def test_fifty_euler_steps_equal_those_of_diffusers_on_the_same_table():
    from diffusers import EulerDiscreteScheduler

    theirs = EulerDiscreteScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", timestep_spacing="leading", steps_offset=1
    )
    theirs.set_timesteps(50)
    schedule = schedule_for("leading", 50, zero_snr=False, shift=SHIFT)
    assert theirs.timesteps.tolist() == list(schedule.timesteps)
    theirs.sigmas = torch.tensor(schedule.sigmas, dtype=torch.float32)
    theirs.set_begin_index(0)
    solver, generator = solver_for("euler", schedule), torch.Generator().manual_seed(0)
    noise = torch.randn(6, 4, 8, 8, generator=generator)
    ours = solver.begin(noise)
    x = noise * math.sqrt(schedule.sigmas[0] ** 2 + 1)
    for index, time in enumerate(theirs.timesteps):
        prediction = 0.9 * noise + 0.3 * torch.randn(6, 4, 8, 8, generator=generator)
        unit = solver.model_input(ours, index)
        assert torch.allclose(unit, theirs.scale_model_input(x, time), atol=1e-5)
        velocity = velocity_of(prediction, unit, schedule.sigmas[index])
        ours = solver.step(velocity, index, ours, None)
        x = theirs.step(prediction, time, x).prev_sample
    assert (ours - x).abs().max() <= 1e-5 * x.abs().max()


def test_fifty_ancestral_steps_equal_those_of_ddpm_on_the_same_table():
    """What the publisher recommends for SD2.1; its variance is the smaller one, and latents are never clipped."""
    from diffusers import DDPMScheduler

    shares = 1 / (1 + sigma_table(zero_snr=False, shift=SHIFT) ** 2)
    betas = 1 - shares / torch.cat((torch.ones(1, dtype=torch.float64), shares[:-1]))
    theirs = DDPMScheduler(
        trained_betas=betas.tolist(), variance_type="fixed_small", clip_sample=False, timestep_spacing="leading",
        steps_offset=1,
    )  # fmt: skip
    theirs.set_timesteps(50)
    schedule = schedule_for("leading", 50, zero_snr=False, shift=SHIFT)
    assert theirs.timesteps.tolist() == list(schedule.timesteps)
    solver, generators = solver_for("euler_ancestral", schedule), [torch.Generator().manual_seed(1) for _ in range(2)]
    noise = torch.randn(6, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    ours, unit = solver.begin(noise), noise
    for index, time in enumerate(theirs.timesteps):
        given = solver.model_input(ours, index)
        assert torch.allclose(given, unit, atol=1e-4), index
        prediction = 0.9 * given + 0.3 * noise.roll(index)
        velocity = velocity_of(prediction, given, schedule.sigmas[index])
        ours = solver.step(velocity, index, ours, lambda: torch.randn(noise.shape, generator=generators[0]))
        unit = theirs.step(prediction, time, unit, generator=generators[1]).prev_sample
    assert (ours - unit).abs().max() <= 1e-4 * unit.abs().max()


@pytest.mark.parametrize(("height", "width", "box_of"), [(61, 47, (11, 50, 8, 30)), (40, 90, (5, 33, 3, 88))])
def test_the_reference_fills_nine_tenths_of_a_grey_square(height, width, box_of):
    from PIL import Image

    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    colours = torch.stack(((rows * 3) % 256, (columns * 5) % 256, (rows + columns) % 256, rows * 0), dim=-1)
    top, bottom, left, right = box_of
    colours[top:bottom, left:right, 3] = 255
    colours[top + 2, left:right, 3] = 130
    eight = colours.to(torch.uint8)
    size, (y0, x0) = 96, (top - 1, left - 1)
    crop = eight[y0:bottom, x0:right]
    high, wide = crop.shape[:2]
    if high > wide:
        high, wide = int(size * 0.9), int(wide * (size * 0.9) / high)
    else:
        high, wide = int(high * (size * 0.9) / wide), int(size * 0.9)
    scaled = torch.tensor(list(Image.fromarray(crop.numpy()).resize((wide, high)).getdata()), dtype=torch.float32)
    square = torch.zeros(size, size, 4)
    y, x = (size - high) // 2, (size - wide) // 2
    square[y : y + high, x : x + wide] = scaled.view(high, wide, 4) / 255
    wanted = square[..., :3] * square[..., 3:] + (1 - square[..., 3:]) * 0.5
    wanted = (wanted * 255).clamp(0, 255).to(torch.uint8).float() / 255
    found = filling(eight.float() / 255, size, 0.5)
    assert (found - wanted).abs().max() <= 1.01 / 255 and (found - wanted).abs().mean() < 1e-4
    assert found[0, 0].tolist() == pytest.approx([127 / 255] * 3)


def test_work_is_counted_once_for_every_stage(models, monkeypatch):
    pipeline = load_adapter(AdapterRequest(*models["ig2mv", "sd21"], device="cpu"))
    run = planned_run(pipeline, 64, steps=10)
    needs = paint_needs(pipeline, run)
    assert [need.name for need in needs] == ["text", "encoding", "reference", "maps", "painting", "decoding"]
    work = {need.name: stage_work(pipeline, need.name, run).flops for need in needs}
    assert all(work.values()) and work["painting"] > 10 * 6 * work["reference"]
    monkeypatch.setattr(forecast, "_adapter_work", lambda *_: pytest.fail("counted again for more steps"))
    assert stage_work(pipeline, "painting", replace(run, steps=20)).flops == 2 * work["painting"]
    assert run.planned(pipeline, "painting", None).calls == 10 and run.planned(pipeline, "reference", None).calls == 1
