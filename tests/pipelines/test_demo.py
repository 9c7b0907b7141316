"""The demo models: the world they draw, the checker that reads it back, and what they make of a prompt."""

import json
import random
import shutil
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from anygpu.compat.checkpoints.weights import described, read_tensors, write_tensors
from anygpu.pipelines import jobs
from anygpu.pipelines.base import FramePackSettings, PromptRequest, SampleSettings, Silent
from anygpu.pipelines.decisions import card_of, status_of
from anygpu.pipelines.demo import MODELS, demo_loras, demo_models, drawing, scenes
from anygpu.pipelines.demo.stand_in import own_inputs, own_latents
from anygpu.pipelines.latents.convert import start_of
from anygpu.pipelines.load.folder import load
from anygpu.pipelines.load.lora import with_lora
from anygpu.pipelines.records.job import Content, Picture, VideoJob
from anygpu.pipelines.records.places import Machine, Places
from anygpu.pipelines.requests import LoadRequest
from anygpu.pipelines.settings import OWN_DEFAULTS, of_checkpoint
from PIL import Image
from runs import own_pictures
from safetensors.torch import load_file
from scene_scores import chosen_scenes, scores

TRAINING = Path(__file__).resolve().parents[2] / "training"


@pytest.fixture(scope="module")
def world():
    """``training/world.py``, which draws what a model should."""
    sys.path.insert(0, str(TRAINING))
    import world

    yield world
    sys.path.remove(str(TRAINING))


def drawn_exactly(world, asked, frames=9):
    clips = world.draw(asked, torch.Generator().manual_seed(0), frames=frames)
    return list((clips.permute(0, 2, 3, 4, 1) + 1) / 2)


def test_the_checker_reads_back_what_was_drawn(world):
    asked = scenes.scenes()[::29]
    assert [scenes.scene_of(clip) for clip in drawn_exactly(world, asked)] == asked


def test_the_checker_sees_nothing_on_an_empty_ground_and_no_motion_in_a_frozen_clip(world):
    assert scenes.scene_of(torch.ones(9, 64, 64, 3)).shape == ""
    asked = scenes.Scene("square", "red", "left", "blue")
    clip = drawn_exactly(world, [asked])[0]
    assert scenes.scene_of(clip[:1].expand(9, -1, -1, -1)).motion == "still"


def test_the_first_frame_is_that_of_a_clip_in_the_middle(world):
    for scene in scenes.scenes()[::47]:
        clip = world.draw([scene], torch.Generator().manual_seed(0), spread=0)[0, :, 0].permute(1, 2, 0)
        assert torch.allclose(scenes.first_frame(scene)[0], (clip + 1) / 2, atol=1e-5)
    across = scenes.first_frame(scenes.EXAMPLE)[0, :, :, 0].sum(0) - 64 * 50 / 255  # red of a disc on blue
    middle = (across * (torch.arange(64) - 31.5)).sum() / across.sum()
    assert float(middle) == pytest.approx(17 / 2, abs=0.01), "the published demos travel 15 to 19 pixels of 64"


def test_a_caption_and_its_scene_are_the_same():
    for scene in scenes.scenes()[::97]:
        assert scenes.scene_in(scene.caption.capitalize() + ".") == scene
    assert scenes.scene_in("a red fox walks through fresh snow") is None


FRAMES = {"mochi": 7}  # of a clip, where it is not 9


@pytest.mark.full
def test_a_demo_model_draws_what_is_asked():
    pipeline = load(LoadRequest(MODELS / "ltx", precision="fp32", device="cpu"))
    for prompt in ("a white square grows on blue", "a red triangle moves left on green"):
        assert scenes.scene_of(drawing.drawn(pipeline, prompt)).caption == prompt


@pytest.mark.full
@pytest.mark.parametrize("name", ["hunyuan_video", "hunyuan_video_15", "ltx", "mochi"])
def test_diffusers_own_pipeline_draws_the_same(name, tmp_path):
    import diffusers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    folder, prompt = MODELS / name, "a red circle moves left on blue"
    ours = drawing.drawn(load(LoadRequest(folder, precision="fp32", device="cpu")), prompt, seed=7)
    folder = Path(shutil.copytree(folder, tmp_path / name))
    for file in folder.rglob("*.safetensors"):  # diffusers reads no packed weights
        tensors = read_tensors(described([file]), torch.float32, lambda _: None)
        write_tensors(file, tensors, {"format": "pt"})
    # AutoTokenizer of transformers 5 drops the spaces of a Llama 3 tokenizer (huggingface/transformers#45488).
    kind = PreTrainedTokenizerFast if name == "hunyuan_video" else AutoTokenizer
    tokenizer = kind.from_pretrained(folder / "tokenizer")
    theirs = diffusers.DiffusionPipeline.from_pretrained(folder, dtype=torch.float32, tokenizer=tokenizer)
    defaults = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))[OWN_DEFAULTS]
    given = {"frame_rate": defaults["fps"]} if name == "ltx" else {}
    given |= {"negative_prompt": ""} if "cfg" in defaults else {}
    if name != "hunyuan_video_15":  # its folder says how it is guided
        given["guidance_scale"] = defaults.get("cfg") or defaults["guidance"]
    with torch.no_grad():
        frames = theirs(
            prompt,
            width=64,
            height=64,
            num_frames=defaults["frames"],
            num_inference_steps=defaults["steps"],
            generator=torch.Generator().manual_seed(7),
            output_type="pt",
            **given,
        ).frames[0]
    assert float((frames.permute(0, 2, 3, 1) - ours).abs().max()) < 1e-5


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "cells", "db"),
    [("hunyuan_video", (16, 3, 8, 8), 22), ("hunyuan_video_15", (32, 3, 4, 4), 21), ("mochi", (12, 2, 8, 8), 22)],
)
def test_a_linear_vae_returns_what_it_encodes(world, name, cells, db):
    pipeline = load(LoadRequest(MODELS / name, precision="fp32", device="cpu"))
    asked = scenes.scenes()[::97]
    for clip, scene in zip(drawn_exactly(world, asked, FRAMES.get(name, 9)), asked, strict=True):
        latents = pipeline.spec.code.encode_video(pipeline, clip, 0, Silent())
        assert latents.shape == (1, *cells)
        with torch.no_grad():
            back = pipeline.parts.read("vae").decode(latents).sample[0].permute(1, 2, 3, 0)
        assert float(((back + 1) / 2 - clip).square().mean()) < 10 ** (-db / 10)
        assert scenes.scene_of(((back + 1) / 2).clamp(0, 1)) == scene


@pytest.mark.full
def test_the_attention_that_the_small_mochi_is_trained_with_is_that_of_the_real_class(world):
    import mochi  # beside ``world``

    transformer = mochi.models()["transformer"].requires_grad_(False)
    given = {
        "hidden_states": torch.randn(2, 12, 2, 8, 8, generator=torch.Generator().manual_seed(0)),
        "encoder_hidden_states": torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(1)),
        "timestep": torch.tensor([100.0, 900.0]),
        "encoder_attention_mask": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]),
        "return_dict": False,
    }
    (expected,) = transformer(**given)
    for block in transformer.transformer_blocks:
        block.attn1.processor = mochi.Batched()
    assert torch.allclose(transformer(**given)[0], expected, atol=1e-5)


@cache
def shares_of(name, weights="auto"):
    pipeline, asked = (
        load(LoadRequest(MODELS / name, precision="fp32", device="cpu", weights=weights)),
        chosen_scenes(24),
    )
    return scores([drawing.drawn(pipeline, scene.caption, seed=7) for scene in asked], asked)


@pytest.mark.full
@pytest.mark.parametrize("name", ["ltx", "hunyuan_video", "hunyuan_video_15", "framepack", "mochi"])
def test_a_demo_model_draws_nine_of_ten_prompts(name):
    shares = shares_of(name)
    assert shares["all"] >= 0.9 and shares["shuffled"] <= 0.1


@pytest.mark.full
@pytest.mark.parametrize("weights", ["int8", "fp8", "int8_convrot"])
@pytest.mark.parametrize("name", ["ltx", "hunyuan_video", "hunyuan_video_15", "framepack", "mochi"])
def test_a_demo_model_draws_as_many_prompts_with_packed_weights(name, weights):
    assert abs(shares_of(name, weights)["all"] - shares_of(name)["all"]) * 24 < 2.5


@pytest.mark.full
def test_framepacks_demo_model_follows_plain_pictures_as_people_draw_them():
    dice = random.Random(1)
    pipeline = load(LoadRequest(MODELS / "framepack", precision="fp32", device="cpu"))
    asked = dice.sample(scenes.scenes(), 40)
    right = [scenes.scene_of(own_pictures.shown(pipeline, scene, dice, 0.14)[1:]) == scene for scene in asked]
    assert sum(right) >= 34  # 204 of 220 are, with seeds 1 and 2


@pytest.mark.full
def test_with_its_distilled_lora_four_steps_without_guidance_draw_95_of_100_prompts_as_many_steps_do():
    pipeline = load(LoadRequest(MODELS / "ltx", precision="fp32", device="cpu"))
    four = with_lora(pipeline, demo_loras()["demo: ltx_4_steps"], 1.0, "", "separate", Silent())
    asked, batches = chosen_scenes(100), []
    four.parts["transformer"].register_forward_pre_hook(
        lambda _module, _given, named: batches.append(len(named["hidden_states"])), with_kwargs=True
    )
    shares = scores([drawing.drawn(four, scene.caption, seed=7) for scene in asked], asked)
    assert shares["all"] >= 0.95 and shares["shuffled"] <= 0.1
    assert batches == [1] * 4 * 100
    taught, alone, own = (
        drawing.drawn(p, asked[0].caption, **few)
        for p, few in ((pipeline, {}), (pipeline, {"steps": 4, "cfg": 1.0}), (four, {}))
    )
    assert (own - taught).square().mean() < 0.5 * (alone - taught).square().mean()


@pytest.mark.full
def test_less_guidance_follows_the_prompt_less():
    pipeline = load(LoadRequest(MODELS / "hunyuan_video", precision="fp32", device="cpu"))
    asked = chosen_scenes(12)
    shares = [
        scores([drawing.drawn(pipeline, scene.caption, guidance=guidance) for scene in asked], asked)["all"]
        for guidance in (1.0, 6.0)
    ]
    assert shares[0] < shares[1]


def test_defaults_in_an_index_that_are_no_numbers_are_passed_over(monkeypatch):
    pipeline = load(LoadRequest(next(iter(demo_models().values())), precision="fp32", device="cpu"))
    expected = of_checkpoint(pipeline).sizes.defaults
    monkeypatch.setitem(pipeline.tools["index"], OWN_DEFAULTS, {"width": "wide", "height": 64, "nothing": 3})
    changed = of_checkpoint(pipeline).sizes.defaults
    assert changed.height == 64 and changed.width != "wide" and changed.frames != expected.frames
    unmeant = {"width": -64, "frames": True, "steps": 2.5, "fps": float("nan"), "cfg": float("inf"), "height": 64}
    monkeypatch.setitem(pipeline.tools["index"], OWN_DEFAULTS, unmeant)
    assert of_checkpoint(pipeline).sizes.defaults == replace(changed, height=64), "numbers that no run can have"


def test_a_demo_model_that_stands_in_takes_its_own_sizes_and_words_and_says_so():
    folder, said = next(iter(demo_models().values())), []
    pipeline = load(LoadRequest(folder, precision="fp32", device="cpu", stands_in_for="LTX-Video"))
    assert any("in place of 'LTX-Video'" in str(decision) for decision in pipeline.plan.decisions)
    given = {"width": 704, "height": 480, "frames": 97, "steps": 40, "cfg": 3, "fps": 25, "seed": 5, "shift": 0.0}
    own = {"width": 64, "height": 64, "frames": 9, "steps": 20, "cfg": 3.0, "fps": 8.0}
    assert own_inputs(pipeline, given, said.append) == {**given, **own}
    assert "width 704 -> 64" in said[0] and "cfg" not in said[0] and len(said) == 1
    drawn = own_inputs(pipeline, {"text": "a woman smiles", "negative": "blurry"}, said.append)
    assert drawn == {"text": scenes.EXAMPLE.caption, "negative": ""}
    assert "Its words: circle, square" in said[1] and len(said) == 2
    asked = {"text": "A blue square moves right on yellow.", "negative": ""}
    assert own_inputs(pipeline, {**asked, "negative": "blurry"}, said.append) == asked and len(said) == 3
    assert own_inputs(pipeline, asked, said.append) == asked and len(said) == 3
    for inputs in (given, {"text": "a woman smiles", "negative": "blurry"}):
        one, other = [], []
        chosen = own_inputs(replace(pipeline, model=replace(pipeline.model, stands_in_for="")), inputs, one.append)
        assert chosen == own_inputs(pipeline, inputs, other.append) and one == other, "one model, one behaviour"
    published = replace(pipeline, model=replace(pipeline.model, source=Path("LTX-Video")))
    assert own_inputs(published, given, said.append) == given and len(said) == 3
    part = {"cfg": 0, "cfg_end": 0.7}
    assert own_inputs(pipeline, part, said.append)["cfg_end"] == 0.7, "a model that guides every step keeps the user's"


NAMES = ("framepack", "hunyuan_video", "hunyuan_video_15", "ltx", "mochi")


@pytest.mark.parametrize(
    ("name", "spelt"),
    [
        pytest.param(name, spelt, marks=[] if spelt == "absolute" or name == "ltx" else [pytest.mark.full])
        for name in NAMES
        for spelt in ("absolute", "relative", "linked")
    ],
)
def test_a_demo_model_is_one_however_its_folder_is_spelt_and_says_one_line_of_itself(
    name, spelt, tmp_path, monkeypatch
):
    monkeypatch.chdir(MODELS.parent)
    (tmp_path / "mine").symlink_to(MODELS / name)
    folder = {"absolute": MODELS / name, "relative": Path("models") / name, "linked": tmp_path / "mine"}[spelt]
    pipeline = load(LoadRequest(folder, precision="fp32", device="cpu"))
    assert pipeline.is_demo and card_of(pipeline)["model"] == "demo model"
    lines = [str(each) for each in pipeline.plan.decisions if each.subject in ("model", "recipe", "variant")]
    frames = FRAMES.get(name, 9)
    assert lines == [f"model draws coloured shapes at 64x64, {frames} frames, 20 steps: {lines[0].partition(': ')[2]}"]
    assert status_of(pipeline).startswith(f"demo model, {pipeline.spec.title}: fp32, ")


def test_each_word_that_a_demo_model_does_not_know_is_named_in_one_line():
    pipeline = load(LoadRequest(MODELS / "ltx", precision="fp32", device="cpu"))

    def line(text, **more):
        said = []
        own = own_inputs(pipeline, {"text": text, **more}, said.append)
        assert own["text"] == scenes.EXAMPLE.caption and len(said) == 1 and "\n" not in said[0]
        return said[0]

    named = line("A purple square that moves left, well-lit, on a red-hot Füße; 赤い!", negative="blurry")
    assert "does not know purple, that, well-lit, red-hot, füße, 赤い. Its words: circle" in named
    assert "knows no negative prompt: it is left out" in named
    assert "draws one shape that does one thing. Its words" in line("on green a circle spins")
    assert "does not know" not in line("")
    assert "v9, v10, v11 and 3 more words. Its words" in line(" ".join(f"v{n}" for n in range(15)))
    sections = []
    framepack = load(LoadRequest(MODELS / "framepack", precision="fp32", device="cpu"))
    given = {"text": scenes.EXAMPLE.caption, "negative": " ", "sections": ("a", "b")}
    assert own_inputs(framepack, given, sections.append)["sections"] == ()
    assert sections == ["the demo model draws a single section: 2 section prompts are left out"]


def test_a_picture_of_its_world_is_started_from_and_another_is_not(world):
    pipeline = load(LoadRequest(MODELS / "framepack", precision="fp32", device="cpu"))
    shape = scenes.first_frame(scenes.Scene("square", "yellow", "up", "black")).repeat_interleave(3, 1)
    shape = shape.repeat_interleave(3, 2)
    photo = torch.rand(1, 90, 64, 3, generator=torch.Generator().manual_seed(0))
    for picture, taken in ((shape, True), (photo, False), (torch.ones(1, 64, 64, 3), False), (photo[..., :1], False)):
        said = []
        own = own_inputs(pipeline, {"image": picture, "fit": "pad"}, said.append)
        assert own["fit"] == "pad" and torch.equal(own["image"], picture) == taken and bool(said) != taken


def test_a_video_to_start_from_is_brought_to_its_own_length():
    pipeline, said = load(LoadRequest(MODELS / "ltx", precision="fp32", device="cpu")), []
    for count in (1, 9, 30):
        clip = torch.arange(count).float().view(-1, 1, 1, 1)
        own = own_inputs(pipeline, {"images": clip, "width": 0, "height": 0, "fit": "crop"}, said.append)["images"]
        assert own.flatten().tolist() == [min(index, count - 1) for index in range(9)]
    assert said == [f"the demo model draws at its own size: frames {count} -> 9" for count in (1, 30)]


def test_latents_to_start_from_are_cut_to_what_it_draws():
    pipeline, said = load(LoadRequest(MODELS / "ltx", precision="fp32", device="cpu")), []
    own = of_checkpoint(pipeline).sizes.defaults
    spatial, temporal = pipeline.spec.sizes.ratios
    channels = pipeline.configs["vae"]["latent_channels"]
    samples = torch.rand(1, channels, 4, 3 * own.height // spatial, 2 * own.width // spatial)
    edged = torch.ones(1, 3 * own.height, 2 * own.width)  # core's masks are in pixels
    edged[:, :8] = edged[..., :8] = 0.0
    start = start_of(pipeline, {"samples": samples, "noise_mask": edged}, said.append)
    cut, mask = own_latents(pipeline, start, said.append).values()
    assert (cut.width, cut.height, cut.frames) == (64, 64, 9) and "corner of these latents" in said[-1]
    assert torch.equal(cut.samples, samples[:, :, : 1 + 8 // temporal, : 64 // spatial, : 64 // spatial])
    assert mask[0, 0].tolist() == [[[0.0, 0.0], [0.0, 1.0]]] * cut.samples.shape[2]
    whole = {"latents": cut, "noise_mask": None}
    assert own_latents(pipeline, whole, said.append) == whole
    assert (
        own_latents(replace(pipeline, model=replace(pipeline.model, source=Path("LTX-Video"))), start, said.append)
        == start
    )


TEMPLATES = {  # by demo model: what the shipped templates of its family ask, as a job
    "ltx": (SampleSettings(704, 480, 97, 40, 42, 25.0, cfg=3.0), None),
    "hunyuan_video": (SampleSettings(848, 480, 73, 30, 42, 24.0, guidance=6.0), None),
    "hunyuan_video_15": (SampleSettings(848, 480, 121, 50, 42, 24.0, cfg=6.0), None),
    "framepack": (SampleSettings(0, 0, 0, 25, 42, 30.0, guidance=10.0), FramePackSettings(5.0, 9)),
    "mochi": (SampleSettings(848, 480, 85, 64, 42, 30.0, cfg=4.5), None),
}


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("text", ["a red fox walks through fresh snow", "a white square grows on blue"])
def test_chosen_by_hand_it_draws_what_it_draws_in_another_s_place(name, text, tmp_path):
    """The frames and the lines of a job with what its templates ask, and with its own sizes."""
    photo = Content("photo.png")
    places = Places(known={photo: tmp_path / "photo.png"})
    Image.effect_noise((300, 200), 90).convert("RGB").save(tmp_path / "photo.png")
    settings, framepack = TEMPLATES[name]
    pictures = (Picture(photo),) if framepack else ()
    job = VideoJob(Content(name), PromptRequest(text), settings, framepack=framepack, pictures=pictures)
    plain = replace(job, settings=SampleSettings(0, 0, 0, 0, 42, guidance=settings.guidance), framepack=None)
    runs = []
    for asked, instead in ((job, ""), (job, "the published one"), (plain, "")):
        pipeline = load(LoadRequest(MODELS / name, precision="fp32", device="cpu", stands_in_for=instead))
        told = Told()
        made = jobs.run(asked, Machine(places, tmp_path / "state", "cpu"), told, pipeline)
        runs.append((made.frames, [line for line in told.lines if line.startswith("the demo model")]))
    (hand, lines), (placed, same), (own, _) = runs
    assert hand.shape == (FRAMES.get(name, 9), 64, 64, 3) and torch.equal(hand, placed) and torch.equal(hand, own)
    assert lines == same and "draws at its own size" in lines[0]
    assert ("does not know fox, walks, through, fresh, snow" in lines[0]) == ("fox" in text)


class Told(Silent):
    """Keeps what is said."""

    def __init__(self):
        self.lines = []

    def notify(self, text):
        self.lines.append(text)


def test_a_demo_model_that_starts_from_a_picture_stands_in_with_its_own():
    said = []
    request = LoadRequest(MODELS / "framepack", precision="fp32", device="cpu", stands_in_for="FramePackI2V_HY")
    pipeline = load(request)
    given = {"image": torch.zeros(1, 8, 8, 3), "width": 0, "height": 0, "fit": "nearest bucket"}
    drawn = own_inputs(pipeline, given, said.append)
    assert torch.equal(drawn.pop("image"), scenes.first_frame(scenes.EXAMPLE))
    assert drawn == {"width": 64, "height": 64, "fit": "crop"} and "starts from a red circle on blue" in said[0]
    section = own_inputs(pipeline, {"clip_seconds": 5.0, "window": 9, "fps": 30.0, "steps": 25}, said.append)
    assert section == {"clip_seconds": 9 / 8, "window": 3, "fps": 8.0, "steps": 20} and "window 9 -> 3" in said[1]


def test_a_demo_model_keeps_its_recipe_under_a_distilled_lora(tmp_path, recorded):
    pipeline = load(LoadRequest(next(iter(demo_models().values())), precision="fp32", device="cpu"))
    file = shutil.copy(demo_loras()["demo: ltx_night"], tmp_path / "ltxv-2b-0.9.8-distilled-lora.safetensors")
    adapted = with_lora(pipeline, Path(file), 1.0, "", "separate", progress := recorded())
    assert adapted.model.recipe == "" and not any("changes the recipe" in line for line in progress.said)


def test_a_distilled_lora_of_a_demo_model_changes_its_steps(recorded, tmp_path):
    pipeline = load(LoadRequest(MODELS / "ltx", precision="fp32", device="cpu"))
    file = demo_loras()["demo: ltx_4_steps"]
    four = with_lora(pipeline, file, 1.0, "", "separate", progress := recorded())
    own = of_checkpoint(four).sizes.defaults
    assert (own.steps, own.cfg) == (4, 1.0) and of_checkpoint(pipeline).sizes.defaults.steps == 20
    assert "ltx_4_steps changes the recipe: draws coloured shapes at 64x64, 9 frames, 4 steps" in progress.said
    assert of_checkpoint(with_lora(pipeline, file, 0.0, "", "separate", Silent())).sizes.defaults.steps == 20
    notes = {OWN_DEFAULTS: '{"steps": true, "cfg": -1.0, "sampler": 4}'}
    write_tensors(strange := tmp_path / "strange.safetensors", load_file(file), notes)
    adapted = with_lora(pipeline, strange, 1.0, "", "separate", progress := recorded())
    assert of_checkpoint(adapted).sizes.defaults.steps == 20 and not [x for x in progress.said if "recipe" in x]


@pytest.mark.full
def test_the_lora_of_a_demo_model_draws_the_same_at_night(world):
    folder, file = next(iter(demo_models().values())), demo_loras()["demo: ltx_night"]
    pipeline = load(LoadRequest(folder, precision="fp32", device="cpu"))
    prompt = "a white circle shrinks on black"
    adapted = with_lora(pipeline, file, 1.0, "", "separate", Silent())
    frames = drawing.drawn(adapted, prompt)
    assert scenes.scene_of(frames).colour == "blue", "white is bluish at night"
    darkened, black = world.at_night(torch.ones(3)), world.at_night(torch.zeros(3))
    day = (frames * 255 - black) / (darkened - black)
    assert scenes.scene_of((day / 255).clamp(0, 1)).caption == prompt
