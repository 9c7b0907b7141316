"""The tiny checkpoints: published layout, same files for the same seed, and videos that depend on every input."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from anygpu.compat.errors import CheckpointError

MODEL = ("config.json", "diffusion_pytorch_model.safetensors")
ENCODER = ("config.json", "model.safetensors")
JSON = ("special_tokens_map.json", "tokenizer.json", "tokenizer_config.json")
PAIRS = (*JSON, "merges.txt", "vocab.json")
PICTURES = ("preprocessor_config.json",)


def sharded(kind: str, shards: int) -> tuple[str, ...]:
    parts = (f"{kind}-{number:05}-of-{shards:05}.safetensors" for number in range(1, shards + 1))
    return ("config.json", f"{kind}.safetensors.index.json", *parts)


LTX = {"tokenizer": JSON, "text_encoder": ENCODER, "transformer": MODEL, "vae": MODEL}
HUNYUAN = {**LTX, "tokenizer_2": PAIRS, "text_encoder_2": ENCODER}
HUNYUAN_I2V = {**HUNYUAN, "text_encoder": (*ENCODER, "generation_config.json"), "image_processor": PICTURES}
HUNYUAN_15 = {
    **HUNYUAN,
    "tokenizer": PAIRS,
    "tokenizer_2": ("added_tokens.json", "tokenizer_config.json"),
    "guider": ("guider_config.json",),
}
SIGLIP = {"image_encoder": ENCODER, "feature_extractor": PICTURES}
LAYOUT: dict[str, dict[str, tuple[str, ...]]] = {
    "ltx": LTX,
    "ltx_condition": LTX,
    "hunyuan_video": {**HUNYUAN, "transformer": sharded("diffusion_pytorch_model", 3)},
    "hunyuan_video_i2v": HUNYUAN_I2V,
    "hunyuan_video_i2v_33ch": HUNYUAN_I2V,
    "hunyuan_video_15": HUNYUAN_15,
    "hunyuan_video_15_i2v": {**HUNYUAN_15, **SIGLIP},
    "framepack": {".": MODEL},
    "framepack_f1": {".": MODEL},
    "siglip": SIGLIP,
    "mochi": {**LTX, "text_encoder": sharded("model", 2)},
}


@dataclass(frozen=True)
class Case:
    """One run of a bare pipeline: what it is given, and the (F, H, W) it must return."""

    name: str
    shape: tuple[int, int, int]
    frames: int
    pipeline: str = ""
    pictured: bool = False
    settings: dict[str, Any] = field(default_factory=dict)


SIZE = {"height": 64, "width": 96}
CFG = {**SIZE, "true_cfg_scale": 3.0}
PACK = {**CFG, "latent_window_size": 3, "num_inference_steps": 1}
CASES = {
    "ltx": Case("ltx", (9, 64, 96), 9, settings=SIZE),
    "ltx from an image": Case("ltx", (9, 64, 96), 9, "LTXImageToVideoPipeline", True, SIZE),
    "ltx_condition": Case(
        "ltx_condition", (9, 64, 96), 9, "", True, {**SIZE, "decode_timestep": 0.05, "decode_noise_scale": 0.025}
    ),
    "hunyuan_video": Case("hunyuan_video", (5, 64, 96), 5, settings=CFG),
    "hunyuan_video_i2v": Case("hunyuan_video_i2v", (5, 64, 96), 5, pictured=True, settings=CFG),
    "hunyuan_video_i2v_33ch": Case("hunyuan_video_i2v_33ch", (1, 64, 96), 5, pictured=True, settings=CFG),
    "hunyuan_video_15": Case("hunyuan_video_15", (5, 64, 96), 5, settings={**SIZE, "num_inference_steps": 1}),
    "hunyuan_video_15_i2v": Case(  # takes its size from the picture
        "hunyuan_video_15_i2v", (5, 96, 128), 5, pictured=True, settings={"num_inference_steps": 1}
    ),
    "framepack": Case("framepack", (13, 64, 96), 9, pictured=True, settings=PACK),
    "framepack_f1": Case("framepack_f1", (13, 64, 96), 9, pictured=True, settings={**PACK, "sampling_type": "vanilla"}),
    "mochi": Case("mochi", (7, 64, 96), 7, settings=SIZE),
}


def picture(seed: int) -> Any:
    """A smooth random picture, 128 x 96 px."""
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((128, 96), Image.Resampling.BICUBIC)


def renderer(case: Case, pipe: Any) -> Callable[..., np.ndarray]:
    """A function from changed inputs to the video, (F, H, W, 3) in 0..1."""

    def render(
        prompt: str = "A cat walks on the grass", negative: str = "worst quality", seed: int = 0, image: int = 0
    ) -> np.ndarray:
        call = {"prompt": prompt, "negative_prompt": negative, "num_frames": case.frames, "num_inference_steps": 2}
        call |= {"generator": torch.Generator().manual_seed(seed), "output_type": "np", **case.settings}
        return np.asarray(pipe(**call, **({"image": picture(image)} if case.pictured else {})).frames)[0]

    return render


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


SISTERS = ("framepack_f1", "hunyuan_video_i2v_33ch", "hunyuan_video_15_i2v")  # as slow as the layouts they resemble


@pytest.mark.parametrize("label", [pytest.param(c, marks=[pytest.mark.full] * (c in SISTERS)) for c in CASES])
def test_the_video_depends_on_every_input(label, tiny_folder):
    case = CASES[label]
    render = renderer(case, tiny.one_shot(case.name, tiny_folder, pipeline=case.pipeline))
    video = render()
    assert video.shape == (*case.shape, 3)
    assert np.isfinite(video).all()
    assert video.std() > 0.05
    assert ((video <= 0) | (video >= 1)).mean() < 0.2
    changes: dict[str, Any] = {"prompt": "A red robot in the rain", "negative": "blurry night", "seed": 1}
    for name, value in (changes | ({"image": 1} if case.pictured else {})).items():
        assert np.abs(render(**{name: value}) - video).max() > 0.02, f"{name} changes nothing that one could see"


def test_nothing_else_changes_the_video(tiny_folder):
    first, second = (renderer(CASES["ltx"], tiny.one_shot("ltx", tiny_folder))() for _ in range(2))
    assert np.array_equal(first, second)


def test_the_table_is_tested_whole():
    assert set(LAYOUT) == set(tiny.TINY)
    assert {case.name for case in CASES.values()} | {"siglip"} == set(tiny.TINY)


@pytest.mark.parametrize("name", tiny.TINY)
def test_layout_is_the_published_one_and_files_are_always_the_same(name, tmp_path):
    before = torch.random.get_rng_state()
    first = files_of(tiny.build(name, tmp_path / "first"))
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(7)
    assert files_of(tiny.build(name, tmp_path / "second")) == first
    torch.random.set_rng_state(before)
    expected = {f"{part}/{file}".removeprefix("./") for part, files in LAYOUT[name].items() for file in files}
    if tiny.TINY[name].indexed:
        expected |= {"model_index.json", "scheduler/scheduler_config.json"}
    assert set(first) == expected | {tiny.MARKER}
    assert not {path.name for path in (tmp_path / "first").iterdir()} - {name}, "scratch folders are left"


def test_another_seed_gives_other_weights(tmp_path):
    first, other = (files_of(tiny.build("ltx", tmp_path / str(seed), seed=seed)) for seed in (0, 1))
    weights = [path for path in first if path.endswith(".safetensors")]
    assert len(weights) == 3
    assert all(first[path] != other[path] for path in weights)


def test_a_second_build_touches_nothing(tmp_path):
    path = tiny.build("siglip", tmp_path)
    stamps = {file: file.stat().st_mtime_ns for file in path.rglob("*")}
    assert tiny.build("siglip", tmp_path) == path
    assert {file: file.stat().st_mtime_ns for file in path.rglob("*")} == stamps


def test_two_processes_may_build_the_same(tmp_path, monkeypatch):
    rival = tiny.build("siglip", tmp_path / "rival")
    replace = Path.replace

    def too_late(made: Path, target: Path) -> Path:
        shutil.copytree(rival, target)
        return replace(made, target)

    monkeypatch.setattr(Path, "replace", too_late)
    assert files_of(tiny.build("siglip", tmp_path)) == files_of(rival)


def test_an_older_recipe_is_built_again(tmp_path, monkeypatch):
    with monkeypatch.context() as older:
        older.setattr(tiny, "RECIPE_VERSION", 0)
        path = tiny.build("siglip", tmp_path)
    (path / "leftover").touch()
    assert not (tiny.build("siglip", tmp_path) / "leftover").exists()


def test_what_is_not_ours_is_left_alone(tmp_path):
    (tmp_path / "ltx").mkdir()
    with pytest.raises(CheckpointError, match="something else"):
        tiny.build("ltx", tmp_path)
    tiny.build("siglip", tmp_path)
    with pytest.raises(CheckpointError, match="'seed': 1"):
        tiny.build("siglip", tmp_path, seed=1)


def test_the_dtype_is_that_of_the_files(tmp_path):
    from safetensors.torch import load_file

    path = tiny.build("framepack", tmp_path, dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in load_file(path / MODEL[1]).values()} == {torch.bfloat16}


def test_the_crop_of_hunyuan_video_leaves_exactly_the_prompt(tiny_folder):
    from diffusers.pipelines.hunyuan_video import pipeline_hunyuan_video as text
    from diffusers.pipelines.hunyuan_video import pipeline_hunyuan_video_image2video as image
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(tiny.build("hunyuan_video", tiny_folder) / "tokenizer")
    prompt = "A cat walks, 猫 🙂 zebra"
    endings = {text: "<|eot_id|>", image: "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"}
    for module, ending in endings.items():
        template = module.DEFAULT_PROMPT_TEMPLATE
        ids = tokenizer(template["template"].format(prompt)).input_ids
        assert tokenizer.decode(ids[template["crop_start"] :]) == prompt + ending
    assert tokenizer.convert_ids_to_tokens(ids[image.DEFAULT_PROMPT_TEMPLATE["image_emb_start"]]) == "<image>"


def test_the_crop_of_hunyuan_video_15_leaves_exactly_the_prompt(tiny_folder):
    from diffusers.pipelines.hunyuan_video1_5.pipeline_hunyuan_video1_5 import format_text_input

    pipe = tiny.one_shot("hunyuan_video_15", tiny_folder)
    prompt = "A cat walks, 猫 🙂 zebra"
    chat = format_text_input([prompt], pipe.system_message)
    ids = pipe.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"][0]
    kept = pipe.tokenizer.decode(ids[pipe.prompt_template_encode_start_idx :])
    assert kept == f"{prompt}<|im_end|>\n<|im_start|>assistant\n"


def test_glyphs_reach_the_video(tiny_folder):
    pipe = tiny.one_shot("hunyuan_video_15", tiny_folder)
    assert pipe.encode_prompt('a sign "hi"', torch.device("cpu"))[3].sum() > 0
    render = renderer(CASES["hunyuan_video_15"], pipe)
    assert np.abs(render(prompt='a sign "hi"') - render(prompt="a sign “ho”")).max() > 0.02


def test_published_ratios_and_switches(tiny_folder):
    def config(name: str, part: str) -> dict[str, Any]:
        file = {"scheduler": "scheduler_config.json"}.get(part.split("/")[-1], "config.json")
        return json.loads((tiny.build(name, tiny_folder) / part / file).read_text(encoding="utf-8"))

    assert config("hunyuan_video", "transformer")["guidance_embeds"] is True
    assert config("hunyuan_video_i2v", "transformer")["image_condition_type"] == "token_replace"
    assert config("hunyuan_video_i2v_33ch", "transformer")["in_channels"] == 2 * 16 + 1
    assert config("hunyuan_video_15", "transformer")["in_channels"] == 2 * 32 + 1
    assert config("framepack", ".")["_class_name"] == "HunyuanVideoFramepackTransformer3DModel"
    assert [config(name, "vae")["timestep_conditioning"] for name in ("ltx", "ltx_condition")] == [False, True]
    assert config("ltx", "scheduler")["use_dynamic_shifting"] is True
    assert config("mochi", "scheduler")["invert_sigmas"] is True
    assert config("hunyuan_video", "scheduler")["shift"] == 7.0
