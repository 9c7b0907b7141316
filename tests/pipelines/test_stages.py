"""What the stages refuse, say and hand over, whatever the family."""

import re
import sys
import threading
import time
from dataclasses import replace

import diffusers
import pytest
import tiny
import torch
from anygpu.compat.errors import InputError, UnsupportedError
from anygpu.compat.packages import attribute
from anygpu.compat.records import plain
from anygpu.pipelines import movie, pictures, stages
from anygpu.pipelines.base import RESOLVED, ImageRequest, Latents, PromptRequest, SampleSettings, Silent
from anygpu.pipelines.latents import convert as latent_format
from anygpu.pipelines.latents.store import load_latent, save_latent
from anygpu.pipelines.load.folder import load, load_placed
from anygpu.pipelines.pictures import fitted, fitted_size
from anygpu.pipelines.registry import FAMILIES
from anygpu.pipelines.requests import LoadRequest
from anygpu.pipelines.sampling.loop import noise_mask_for
from anygpu.pipelines.text.t5 import shortened

ASKED = SampleSettings(64, 48, 7, steps=2, seed=7)
FRAMES = torch.rand(7, 48, 64, 3, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def mochi(tiny_folder):
    return load(LoadRequest(tiny.build("mochi", tiny_folder), precision="fp32", device="cpu"))


@pytest.fixture(scope="module")
def ltx(tiny_folder):
    return load(LoadRequest(tiny.build("ltx", tiny_folder), precision="fp32", device="cpu"))


@pytest.fixture(scope="module")
def prompt(mochi):
    return stages.encode_prompt(mochi, PromptRequest("a red fox"), Silent())


SLOW = """
import sys, time, types
class Lazy(types.ModuleType):
    def __getattr__(self, name):
        from diffusers_part import Pipeline
        return Pipeline
time.sleep(0.3)
sys.modules[__name__] = Lazy(__name__)
"""
PART = SLOW.replace("from diffusers_part import Pipeline", "Pipeline = object")


@pytest.mark.parametrize("model", ["ltx", None], ids=["video", "a class that painting takes"])
def test_a_node_and_a_forecast_may_be_the_first_to_load_at_once(tiny_folder, tmp_path, monkeypatch, model) -> None:
    """diffusers and its parts replace their modules at import: a thread that comes then would get the old one."""
    (tmp_path / "diffusers.py").write_text(SLOW, encoding="utf-8")
    (tmp_path / "diffusers_part.py").write_text(PART, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, diffusers.__name__)  # which comes back afterwards
    folder = None if model is None else tiny.build(model, tiny_folder)
    failed, loaded = [], threading.Barrier(3, timeout=60)

    def run(index: int) -> None:
        try:
            if folder is None:
                attribute("diffusers", "AutoencoderKL")
            else:
                load_placed(LoadRequest(folder, device="cpu"))
            loaded.wait()
            time.sleep(0.1 * index)
            from diffusers import LTXPipeline  # noqa: F401
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(3)]
    for act in ("start", "join"):
        for thread in threads:
            getattr(thread, act)()
    assert sys.modules.pop("diffusers_part").Pipeline is object
    assert not failed


def sample(mochi, prompt, progress=None, **changes) -> Latents:
    with torch.no_grad():
        return stages.sample(mochi, prompt, None, replace(ASKED, **changes), progress or Silent())


@pytest.mark.parametrize("part", ["transformer", "vae"])
@pytest.mark.parametrize(
    ("error", "blamed"),
    [
        (TypeError("odd"), "a bug of AnyGPU"),
        (RuntimeError("vector<T> too long"), "a bug of AnyGPU"),
        (KeyError("layer"), "its JSON files"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), "its JSON files"),
    ],
)
def test_an_unforeseen_error_blames_the_files_only_where_they_may_be_wrong(mochi, prompt, part, error, blamed):
    def fail(*_):
        raise error

    latents = sample(mochi, prompt)
    module = mochi.parts[part]
    hook = getattr(module, "decoder", module).register_forward_pre_hook(fail)
    try:
        with pytest.raises(UnsupportedError, match=rf"ing with 'mochi', {part} on cpu: ") as raised:
            stages.decode(mochi, latents, Silent()) if part == "vae" else sample(mochi, prompt)
    finally:
        hook.remove()
    found = [text for text in ("a bug of AnyGPU", "its JSON files") if text in str(raised.value)]
    assert found == [blamed]


@pytest.mark.parametrize("text", ["", "  \n"])
def test_an_empty_prompt_is_encoded(mochi, text, recorded):
    progress = recorded()
    made = stages.encode_prompt(mochi, PromptRequest(text, "fox"), progress)
    assert made.embeds["prompt_embeds"].shape[1] >= 1 and not progress.said


def test_an_over_long_prompt_is_shortened_and_said(mochi, recorded):
    progress = recorded()
    long = stages.encode_prompt(mochi, PromptRequest("fox " * 400, "fox " * 300), progress)
    assert long.embeds["prompt_embeds"].shape[1] == long.negative["prompt_embeds"].shape[1] == 256
    short, negative = progress.said
    assert re.fullmatch(r"the prompt is shortened from \d+ to 256 tokens: what begins with '.+' is left out", short)
    assert negative.startswith("the negative prompt is shortened")


def test_words_without_a_token_are_not_quoted_as_nothing(recorded):
    class Unknowing:
        def __call__(self, text, **_):
            return {"input_ids": [0] * len(text.split())}

        def decode(self, *_, **__):
            return ""

    progress = recorded()
    shortened(Unknowing(), "word " * 9, 4, "prompt", progress)
    assert progress.said == ["the prompt is shortened from 9 to 4 tokens: the rest is left out"]


def test_a_shortened_prompt_is_its_beginning(mochi):
    """What is left is encoded as a prompt that was written so."""
    text = "a red fox jumps over"
    beginning = shortened(mochi.tools["tokenizer"], text, 6, "prompt", Silent())
    assert text.startswith(beginning) and 0 < len(beginning) < len(text)
    long, short = (
        stages.encode_prompt(mochi, PromptRequest(given, max_tokens=6), Silent()) for given in (text, beginning)
    )
    assert torch.equal(long.embeds["prompt_embeds"], short.embeds["prompt_embeds"])


def test_a_limit_without_room_for_a_word(mochi):
    with pytest.raises(InputError, match="max_tokens leaves 1 tokens for the prompt; expected room for a word"):
        stages.encode_prompt(mochi, PromptRequest("fox", max_tokens=1), Silent())


@pytest.mark.parametrize("request_", [PromptRequest("a", max_tokens=5000), PromptRequest("a", template="none")])
def test_prompt_settings_out_of_range(mochi, request_):
    with pytest.raises(InputError, match="expected"):
        stages.encode_prompt(mochi, request_, Silent())


def test_inputs_without_effect_are_named(mochi, prompt, recorded):
    progress = recorded()
    sample(mochi, prompt, progress, guidance=3.0, guidance_rescale=0.5, denoise=0.5)
    stages.encode_prompt(mochi, PromptRequest("a", template="x {}", sections=("b",), image=FRAMES), progress)
    for name in ("guidance", "guidance_rescale", "template", "sections", "image"):
        assert f"{name} has no effect on Mochi 1" in progress.said
    assert "denoise has no effect without latents" in progress.said


def test_a_start_of_which_nothing_is_kept_is_named(mochi, prompt, recorded):
    generator = torch.Generator().manual_seed(0)
    start = Latents(torch.randn(1, 12, 2, 8, 8, generator=generator), mochi.family, "text", 7, 64, 64, 30.0, 0)
    empty, mask = replace(start, samples=torch.zeros(1, 12, 2, 8, 8)), torch.ones(1, 1, 1, 8, 8)
    for given, told in (({}, 1), ({"denoise": 0.5}, 0), ({"noise_mask": mask}, 0), ({"latents": empty}, 0)):
        progress = recorded()
        sample(mochi, prompt, progress, **{"latents": start, **given})
        assert sum("denoise 1 keeps nothing of the latents" in line for line in progress.said) == told


@pytest.mark.parametrize("cell", [8, 32])
def test_what_a_mask_draws_lies_where_it_was_drawn(cell):
    """As core's own resizing of it has it: comfy.utils.reshape_mask interpolates, between the pixels at a centre."""
    rows, columns = (torch.arange(size) + 0.5 for size in (480, 704))
    disc = (((columns - 330) ** 2 + (rows[:, None] - 250) ** 2) < 90**2).float()
    clean, disc = torch.zeros(1, 16, 1, 480 // cell, 704 // cell), disc.view(1, 1, 1, 480, 704)
    made = noise_mask_for(SampleSettings(704, 480, 1, noise_mask=disc), clean, clean).mask[0, 0, 0]
    cores = torch.nn.functional.interpolate(disc, size=clean.shape[2:], mode="trilinear")[0, 0, 0]
    for way in (0, 1):
        at = [(mask.sum(way) * torch.arange(mask.shape[1 - way])).sum() / mask.sum() for mask in (made, cores)]
        assert abs(float(at[0] - at[1])) < 0.15, "of a cell"


def test_latents_of_another_vae_are_refused_before_sampling(mochi, prompt):
    latents = Latents(torch.zeros(1, 16, 2, 8, 8), mochi.family, "text", 7, 64, 64, 30.0, 0)
    with pytest.raises(
        InputError, match=r"latents of shape \(1, 16, 2, 8, 8\); expected \(1, 12, T, H, W\) for Mochi 1"
    ):
        sample(mochi, prompt, Silent(), latents=latents)


def test_what_other_inputs_overrule_is_named(mochi, prompt, recorded):
    progress = recorded()
    has_negative = stages.encode_prompt(mochi, PromptRequest("a", "blurry", template_crop=3), progress)
    sample(mochi, has_negative, progress, cfg=1.0, sigmas=(1.0, 0.5, 0.0), steps=9)
    assert "template_crop has no effect without a template" in progress.said
    assert "the negative prompt has no effect at cfg 1: it needs cfg above 1" in progress.said
    assert "steps and shift have no effect beside sigmas" in progress.said


def test_width_and_height_0_take_the_size_of_the_image(ltx):
    prompt = stages.encode_prompt(ltx, PromptRequest("a red fox"), Silent())
    image = stages.encode_image(ltx, ImageRequest(FRAMES[:1], 96, 64), "stretch", Silent())
    with torch.no_grad():
        latents = stages.sample(ltx, prompt, image, SampleSettings(0, 0, 9, steps=2), Silent())
    assert (latents.width, latents.height) == (96, 64)


@pytest.mark.parametrize(
    ("size", "steps", "pattern"),
    [((64, 64, 9), 1, "steps 1; expected at least 2"), ((4096, 4096, 4097), 2, "4096x4096")],
)
def test_a_schedule_that_cannot_be_is_refused_in_words(ltx, size, steps, pattern):
    prompt = stages.encode_prompt(ltx, PromptRequest("fox"), Silent())
    with pytest.raises(InputError, match=pattern):
        stages.sample(ltx, prompt, None, SampleSettings(*size, steps=steps), Silent())


def test_nothing_is_said_when_nothing_was_changed(mochi, prompt, recorded):
    progress = recorded()
    sample(mochi, prompt, progress)
    assert progress.said == []


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({"steps": 1}, "steps 1; expected 2 to 1000 steps for Mochi 1. The nearest valid value is 2"),
        ({"steps": 1001}, "nearest valid value is 1000"),
        ({"width": 9000}, "nearest valid value is 4096"),
        ({"frames": 9000}, "nearest valid value is 4097"),
        ({"cfg_start": 1.5}, "cfg_start 1.5"),
        ({"cfg_start": 0.8, "cfg_end": 0.2}, "Swap them"),
        ({"fps": 1000.0}, "fps 1000"),
        ({"fps": float("nan")}, "fps nan"),
        ({"cfg": float("inf")}, "cfg inf"),
        ({"guidance": float("nan")}, "guidance nan"),
        ({"cfg": -3.0}, "cfg -3.0; expected a number from 0"),
        ({"stg": float("nan")}, "stg nan"),
        ({"scheduler": "ddim"}, "scheduler 'ddim'"),
        ({"seed": 2**64}, "seed 18446744073709551616; expected 0 to"),
        ({"sigmas": ()}, "falling noise levels"),
        ({"sigmas": (0.1, 0.5, 0.0)}, "falling noise levels"),
        ({"sigmas": (14.6, 3.0, 0.0)}, "falling noise levels"),
        ({"sigmas": (1.0, 0.5, 0.2)}, "ending at 0"),
    ],
)
def test_settings_out_of_range(mochi, prompt, changes, pattern):
    with pytest.raises(InputError, match=pattern):
        sample(mochi, prompt, **changes)


def test_things_of_another_family_are_refused(mochi, ltx, prompt):
    with pytest.raises(InputError, match="a prompt made for 'mochi'"):
        stages.sample(ltx, prompt, None, ASKED, Silent())
    latents = sample(mochi, prompt)
    with pytest.raises(InputError, match="these latents made for 'mochi'"):
        stages.decode(ltx, latents, Silent())
    with pytest.raises(InputError, match="expected \\(1, 12, T, H, W\\)"):
        stages.decode(mochi, replace(latents, samples=torch.zeros(1, 16, 2, 6, 8)), Silent())
    with pytest.raises(UnsupportedError, match="an image for Mochi 1"):
        stages.encode_image(mochi, ImageRequest(FRAMES, 64, 48), "crop", Silent())
    with pytest.raises(UnsupportedError, match="Sample FramePack"):
        stages.sample_framepack(mochi, prompt, None, ASKED, None, Silent())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_broken_latents_are_refused_before_the_vae_is_read(mochi, prompt, value):
    latents = sample(mochi, prompt)
    mochi.parts.drop("vae")
    latents.samples[0, 0, 0, 0, 0] = value
    with pytest.raises(InputError, match=r"1 of \d+ values of the latents are NaN or infinite"):
        stages.decode(mochi, latents, Silent())
    assert "vae" not in mochi.parts


@pytest.mark.parametrize(
    ("frames", "pattern"),
    [
        (torch.zeros(1, 48, 64, 4), "alpha channel"),
        (torch.zeros(0, 48, 64, 3), "at least one frame"),
        (torch.zeros(48, 64, 3), "expected frames"),
        (torch.zeros(1, 48, 64, 1), "1 channels"),
    ],
)
def test_pictures_of_a_wrong_kind(mochi, frames, pattern):
    with pytest.raises(InputError, match=pattern):
        stages.encode_video(mochi, frames, 0, 0, "crop", 0, Silent())


def test_an_image_of_another_size_than_the_video(ltx):
    prompt = stages.encode_prompt(ltx, PromptRequest("a red fox"), Silent())
    image = stages.encode_image(ltx, ImageRequest(FRAMES[:1], 64, 64), "stretch", Silent())
    with pytest.raises(InputError, match="64x64 for a video of 96x64"):
        stages.sample(ltx, prompt, image, replace(ASKED, width=96, height=64), Silent())
    wide = Latents(torch.zeros(1, 128, 2, 2, 3), "ltx", "text", 9, 64, 96, 25.0, 0)
    with pytest.raises(InputError, match=r"64x64 for a video of 96x64; .*Connect the latent to Encode Image"):
        stages.sample(ltx, prompt, image, replace(ASKED, width=0, height=0, denoise=0.5, latents=wide), Silent())


def test_a_cut_video_is_said(mochi, recorded):
    progress = recorded()
    latents = stages.encode_video(mochi, FRAMES[:6], 0, 0, "crop", 0, progress)
    assert latents.frames == 1 and "frames 6 -> 1" in progress.said[0]


def test_an_encoded_clip_has_the_rate_of_the_checkpoint(mochi, monkeypatch):
    monkeypatch.setattr("anygpu.pipelines.settings.own_defaults", lambda pipeline: {"fps": 16.0})
    assert stages.encode_video(mochi, FRAMES[:1], 0, 0, "crop", 0, Silent()).fps == 16.0


class TestLatent:
    """Our latents as core's LATENT."""

    def test_round_trip(self, mochi, prompt):
        latents = sample(mochi, prompt)
        core = latent_format.to_core(latents)
        assert torch.equal(core["samples"], latents.samples)
        found = latent_format.from_core(mochi, core, pytest.fail)
        extra = {**latents.extra, RESOLVED: plain(latents.extra[RESOLVED], ("latents", "noise_mask"))}
        assert replace(found, samples=None) == replace(latents, samples=None, extra=extra)

    def test_our_key_holds_plain_values_only(self, mochi, prompt):
        import json

        json.dumps(latent_format.to_core(sample(mochi, prompt))[latent_format.KEY])

    def test_latents_of_core_decode_as_text_to_video_and_it_is_said(self, mochi, prompt, recorded):
        latents, progress = sample(mochi, prompt), recorded()
        found = latent_format.from_core(mochi, {"samples": latents.samples}, progress.notify)
        assert (found.width, found.height, found.frames, found.seed) == (64, 48, 7, 0)
        assert "seed 0" in progress.said[0]
        with torch.no_grad():
            assert torch.equal(stages.decode(mochi, found, Silent()), stages.decode(mochi, latents, Silent()))

    @pytest.mark.parametrize(
        ("change", "size"),
        [
            (lambda it: torch.cat((it, it), 2), (64, 48, 19)),
            (lambda it: it[:, :, :1], (64, 48, 1)),
            (lambda it: it[:, :, :1].repeat_interleave(2, 3).repeat_interleave(2, 4), (128, 96, 1)),
        ],
    )
    def test_latents_that_core_changed_have_their_new_size(self, mochi, prompt, recorded, tmp_path, change, size):
        core, progress = latent_format.to_core(sample(mochi, prompt)), recorded()
        core[latent_format.KEY]["extra"] |= {"final_width": 64, "final_height": 48}
        changed = {**core, "samples": change(core["samples"])}
        saved = load_latent(save_latent(tmp_path / "a.safetensors", changed, pytest.fail), pytest.fail)
        for each in (changed, saved):
            found = latent_format.from_core(mochi, each, progress.notify)
            assert (found.width, found.height, found.frames) == size
            assert ("final_width" in found.extra) == (size[0] == 64)
        assert progress.said == [f"another node changed these latents to {size[0]}x{size[1]}, {size[2]} frames"] * 2
        with torch.no_grad():
            assert stages.decode(mochi, found, Silent()).shape == (size[2], size[1], size[0], 3)

    def test_a_second_pass_refuses_latents_off_the_grid(self, mochi, prompt):
        start = sample(mochi, prompt)
        start = replace(start, samples=start.samples[..., :-1], width=56)
        with pytest.raises(InputError, match=r"56x48.*multiples of 16"):
            sample(mochi, prompt, latents=start, denoise=0.5)

    @pytest.mark.parametrize("samples", [torch.zeros(1, 4, 8, 8), torch.zeros(2, 12, 1, 8, 8), None])
    def test_other_latents_are_refused(self, mochi, samples):
        with pytest.raises(InputError, match="LATENT"):
            latent_format.from_core(mochi, {"samples": samples}, pytest.fail)

    def test_a_newer_version_is_refused(self, mochi, prompt):
        core = latent_format.to_core(sample(mochi, prompt))
        core[latent_format.KEY]["version"] = 99
        with pytest.raises(InputError, match="Update AnyGPU"):
            latent_format.from_core(mochi, core, pytest.fail)


class TestFit:
    """Pictures fitted to a size."""

    def test_a_picture_of_the_right_size_is_untouched(self):
        assert fitted(FRAMES, 64, 48, "crop") is FRAMES

    @pytest.mark.parametrize("fit", ["nearest bucket", "crop", "pad", "stretch"])
    def test_size_and_range(self, fit):
        found = fitted(FRAMES, 80, 32, fit)
        assert found.shape == (7, 32, 80, 3) and found.min() >= 0 and found.max() <= 1

    def test_pad_adds_black_and_crop_does_not(self):
        white = torch.ones(1, 32, 32, 3)
        assert fitted(white, 64, 32, "pad")[0, :, 0].sum() == 0
        assert fitted(white, 64, 32, "crop").min() > 1 - 1e-6

    def test_the_nearest_bucket_keeps_the_shape_of_the_picture(self, ltx):
        family = FAMILIES["ltx"]
        wide, tall = fitted_size(family, torch.zeros(1, 500, 1000, 3), 0, 0, "nearest bucket")
        assert wide > 1.7 * tall and wide % family.sizes.multiple == tall % family.sizes.multiple == 0

    def test_published_buckets_are_used_where_there_are_any(self):
        family = FAMILIES["framepack"]
        wide, tall = fitted_size(family, torch.zeros(1, 832, 480, 3), 0, 0, "nearest bucket")
        assert (tall, wide) in family.sizes.buckets and tall > wide

    @pytest.mark.parametrize(
        ("picture", "bucket"),
        [((1001, 1001), (640, 608)), ((1686, 799), (864, 448)), ((534, 976), (448, 864)), ((300, 900), (416, 960))],
    )
    def test_buckets_are_chosen_as_framepack_chooses_them(self, picture, bucket):
        """By ``find_nearest_bucket``, 97fe5db diffusers_helper/bucket_tools.py:21, of height and width."""
        family = FAMILIES["framepack"]
        wide, tall = fitted_size(family, torch.zeros(1, *picture, 3), 0, 0, "nearest bucket")
        assert (tall, wide) == bucket

    def test_the_publishers_filter_is_only_for_the_nearest_bucket(self):
        """A picture of 8 bits, resized by PIL; what was chosen is resized as before."""
        asked, sizes = (FRAMES[:1], 96, 32), FAMILIES["framepack"].sizes
        found = fitted(*asked, "nearest bucket", sizes)
        assert found.shape == (1, 32, 96, 3) and torch.equal((found * 255).round() / 255, found)
        assert not torch.equal(found, fitted(*asked, "nearest bucket"))
        assert torch.equal(fitted(*asked, "crop", sizes), fitted(*asked, "crop"))


def test_a_picture_is_prepared_as_ltx_video_s_publisher_does_where_there_is_an_encoder(ltx, recorded, monkeypatch):
    """`test_whole_loops.py` has the values; here the steps: cut at its own size, even sides, then resized."""
    frames, size, said = torch.rand(2, 41, 91, 3, generator=torch.Generator().manual_seed(1)), (64, 32), recorded()
    sides = []
    real = pictures.through_h264
    monkeypatch.setattr(
        pictures, "through_h264", lambda frame, crf: sides.append((*frame.shape, crf)) or real(frame, crf)
    )
    made = pictures.as_published(ltx.spec, frames, *size, "crop", said)
    assert sides == [(41, 82, 3, 29)] * 2 and made.shape == (2, 32, 64, 3) and not said.said
    assert pictures.as_published(ltx.spec, frames, *size, "pad", said)[:, :1].count_nonzero() == 0, "bars stay black"
    monkeypatch.setattr(movie, "X264", "no such encoder")
    bare = pictures.as_published(ltx.spec, frames, *size, "crop", said)
    assert said.said == ["the picture is not compressed as its publisher does: PyAV could not code it with x264"]
    assert not torch.equal(bare, made)


@pytest.mark.parametrize(("prepare", "line"), [(True, "without prepare it is not"), (False, "")])
def test_what_is_done_to_a_picture_is_said_and_can_be_left(ltx, recorded, prepare, line):
    said = recorded()
    image = stages.encode_image(ltx, ImageRequest(FRAMES[:1], 64, 64, prepare=prepare), "crop", said)
    assert [text for text in said.said if "compressed" in text] == [text for text in said.said if line and line in text]
    assert image.sources[0].prepare is prepare
