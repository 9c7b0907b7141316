"""Caches of Musubi Tuner: names, keys and metadata as that project writes them, read, and written back the same.

The layouts below were written down from kohya-ss/musubi-tuner at 30c658c, ``dataset/cache_io.py``.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from anygpu.compat.checkpoints.latents import metadata_of
from anygpu.compat.errors import CheckpointError, InputError, UnsupportedError
from anygpu.pipelines.base import SECTION_ORDERS, ImageCondition, Latents, Prompt
from anygpu.pipelines.latents import musubi, prompt_files
from anygpu.pipelines.latents import store as latent_store
from anygpu.pipelines.latents.convert import to_core
from safetensors.torch import load_file, save_file

SCALE = 0.476986
VERSION = {"format_version": "1.0.1"}
SIZE = {"width": "96", "height": "64", "frame_count": "9"}
BF16 = torch.bfloat16


def said_of(path: Path, **choices: Any) -> tuple[dict[str, Any], list[str]]:
    lines: list[str] = []
    return latent_store.load_latent(path, lines.append, **choices), lines


def latent_caches() -> dict[str, tuple[str, dict[str, torch.Tensor], dict[str, str]]]:
    """By architecture: file name, tensors, metadata."""
    section = {
        "latents_2x8x12_bfloat16": torch.randn(16, 2, 8, 12).to(BF16),
        "latents_clean_2x8x12_bfloat16": torch.randn(16, 2, 8, 12).to(BF16),
        "latents_clean_2x_2x8x12_bfloat16": torch.randn(16, 2, 8, 12).to(BF16),
        "latents_clean_4x_2x8x12_bfloat16": torch.randn(16, 16, 8, 12).to(BF16),
        "image_embeddings_bfloat16": torch.randn(729, 12).to(BF16),
        "latent_indices_int64": torch.arange(2),
        "clean_latent_indices_int64": torch.arange(2),
        "clean_latent_2x_indices_int64": torch.arange(2),
        "clean_latent_4x_indices_int64": torch.arange(16),
    }
    image = {
        "latents_3x4x6_float32": torch.randn(32, 3, 4, 6),
        "latents_image_3x4x6_float32": torch.randn(33, 3, 4, 6),
        "siglip_float16": torch.randn(729, 12).half(),
    }
    return {
        "hv": ("clip_00000-009_0096x0064_hv.safetensors", {"latents_3x8x12_float16": torch.randn(16, 3, 8, 12).half()},
               {"architecture": "hunyuan_video", **SIZE, **VERSION}),
        "hv15": ("clip_00000-009_0096x0064_hv15.safetensors", image,
                 {"architecture": "hunyuan_video_1_5", **SIZE, **VERSION}),
        "fp": ("clip_00000-009-0001_0096x0064_fp.safetensors", section,
               {"architecture": "framepack", **SIZE, **VERSION}),
    }  # fmt: skip


def text_caches() -> dict[str, tuple[str, dict[str, torch.Tensor]]]:
    """By architecture: full name, tensors."""
    padded = torch.cat([torch.ones(5, dtype=torch.long), torch.zeros(251, dtype=torch.long)])
    hv = {
        "llm_float16": torch.randn(256, 16).half(),
        "llm_mask": padded,
        "clipL_float16": torch.randn(8).half(),
        "clipL_mask": torch.ones(77, dtype=torch.long),
    }
    fp = {
        "llama_vec_bfloat16": torch.randn(512, 16).to(BF16),
        "llama_attention_mask": torch.arange(512) < 7,
        "clip_l_pooler_bfloat16": torch.randn(8).to(BF16),
    }
    hv15 = {"varlen_vl_embed_bfloat16": torch.randn(6, 16).to(BF16), "varlen_byt5_embed_float32": torch.randn(3, 12)}
    return {"hv": ("hunyuan_video", hv), "hv15": ("hunyuan_video_1_5", hv15), "fp": ("framepack", fp)}


FAMILIES = {"hv": "hunyuan_video", "hv15": "hunyuan_video_15", "fp": "framepack"}


@pytest.mark.parametrize("short", FAMILIES)
def test_latents_are_read_in_cores_space_and_written_back_bit_for_bit(tmp_path: Path, short: str) -> None:
    name, tensors, metadata = latent_caches()[short]
    save_file(tensors, tmp_path / name, metadata)
    assert latent_store.kind_of(tmp_path / name) == "latent"
    latent, lines = said_of(tmp_path / name)
    key = next(key for key in tensors if musubi.LATENTS.fullmatch(key))
    stored = tensors[key].float().unsqueeze(0)
    assert latent["samples"].dtype is torch.float32
    assert torch.equal(latent["samples"], stored / SCALE if short == "fp" else stored)
    record = latent["anygpu"]
    assert (record["family"], record["width"], record["height"]) == (FAMILIES[short], 96, 64)
    assert record["frames"] == (stored.shape[2] - 1) * 4 + 1
    assert "Musubi Tuner" in lines[0]
    stem = name.partition("_0096x0064")[0]
    path = musubi.save_latent_cache(tmp_path / "again", stem, latent)
    assert path.name == name
    found = load_file(path)
    assert found.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert found[key].dtype is tensor.dtype and torch.equal(found[key], tensor), key
    assert metadata_of(path) == metadata


def test_the_files_own_dtype_can_be_kept(tmp_path: Path) -> None:
    name, tensors, metadata = latent_caches()["hv"]
    save_file(tensors, tmp_path / name, metadata)
    assert said_of(tmp_path / name, dtype="as in file")[0]["samples"].dtype is torch.float16


@pytest.mark.parametrize("short", FAMILIES)
def test_text_is_read_without_padding_and_written_back_bit_for_bit(tmp_path: Path, short: str) -> None:
    full, tensors = text_caches()[short]
    path = tmp_path / f"clip_{short}_te.safetensors"
    metadata = {"architecture": full, "caption1": "ein Fuchs", **VERSION}
    save_file(tensors, path, metadata)
    assert latent_store.kind_of(path) == "prompt"
    prompt = prompt_files.load_prompt(path, lambda _text: None)
    assert prompt.family == FAMILIES[short] and prompt.negative is None and prompt.extra["text"] == "ein Fuchs"
    first = prompt.embeds["prompt_embeds"]
    length = {"hv": 5, "hv15": 6, "fp": 7}[short]
    source = next(iter(tensors.values()))
    assert first.dtype is torch.float32 and torch.equal(first, source[:length].float().unsqueeze(0))
    if short != "hv15":
        assert torch.equal(prompt.embeds["prompt_attention_mask"], torch.ones(1, length, dtype=torch.long))
        assert prompt.embeds["pooled_prompt_embeds"].shape == (1, 8)
    again = musubi.save_text_cache(tmp_path / "again", "clip", prompt)
    assert again.name == path.name
    found = load_file(again)
    assert found.keys() == tensors.keys()
    assert all(found[key].dtype is t.dtype and torch.equal(found[key], t) for key, t in tensors.items())
    assert metadata_of(again) == metadata


@pytest.mark.parametrize("short", FAMILIES)
def test_our_own_prompts_are_padded_as_its_caches_are(tmp_path: Path, short: str) -> None:
    embeds = {"prompt_embeds": torch.randn(1, 5, 16), "prompt_attention_mask": torch.ones(1, 5, dtype=torch.long)}
    embeds |= {"pooled_prompt_embeds": torch.randn(1, 8), "prompt_embeds_2": torch.randn(1, 3, 12)}
    prompt = Prompt(FAMILIES[short], embeds, extra={"text": "a cat"})
    path = musubi.save_text_cache(tmp_path, "clip", prompt, dtype="bfloat16")
    found = load_file(path)
    expected = {
        "hv": {"llm_bfloat16": (256, 16), "llm_mask": (256,), "clipL_bfloat16": (8,)},
        "hv15": {"varlen_vl_embed_bfloat16": (5, 16), "varlen_byt5_embed_bfloat16": (3, 12)},
        "fp": {"llama_vec_bfloat16": (512, 16), "llama_attention_mask": (512,), "clip_l_pooler_bfloat16": (8,)},
    }[short]
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == expected
    assert metadata_of(path)["caption1"] == "a cat"
    again = prompt_files.load_prompt(path, lambda _text: None)
    assert torch.equal(again.embeds["prompt_embeds"], embeds["prompt_embeds"].to(BF16).float())


def test_our_own_latents_get_the_name_that_its_reader_wants(tmp_path: Path) -> None:
    latents = Latents(torch.randn(1, 16, 3, 8, 12), "hunyuan_video", "text", 9, 64, 96, 24.0, 7)
    path = musubi.save_latent_cache(tmp_path, "clip", to_core(latents))
    assert path.name == "clip_00000-009_0096x0064_hv.safetensors"
    assert torch.equal(load_file(path)["latents_3x8x12_float32"], latents.samples[0])
    assert metadata_of(path) == {"architecture": "hunyuan_video", **SIZE, **VERSION}
    narrow = musubi.save_latent_cache(tmp_path, "clip_00000-009", to_core(latents), "bfloat16")
    assert narrow.name == path.name
    assert torch.equal(load_file(narrow)["latents_3x8x12_bfloat16"], latents.samples[0].to(BF16))


def test_what_a_node_of_core_resized_gets_the_sizes_of_its_tensor(tmp_path: Path) -> None:
    """Such nodes leave the record as it was; the trainer sorts items into buckets by the file's name."""
    changed = {"samples": torch.randn(1, 16, 2, 16, 24)}
    sizes = {"width": "192", "height": "128", "frame_count": "5"}
    latents = Latents(torch.randn(1, 16, 3, 8, 12), "hunyuan_video", "text", 9, 64, 96, 24.0, 7)
    path = musubi.save_latent_cache(tmp_path, "clip", to_core(latents))
    for latent in (to_core(latents), said_of(path)[0]):
        again = musubi.save_latent_cache(tmp_path, "clip", {**latent, **changed})
        assert again.name == "clip_00000-005_0192x0128_hv.safetensors"
        assert metadata_of(again) == {"architecture": "hunyuan_video", **sizes, **VERSION}
    name, tensors, metadata = latent_caches()["fp"]
    save_file(tensors, tmp_path / name, metadata)
    with pytest.raises(UnsupportedError, match="resized latents of a cache with further tensors"):
        musubi.save_latent_cache(tmp_path, "clip", {**said_of(tmp_path / name)[0], **changed})
    _, latent, image = film_of()
    paths = musubi.save_item(tmp_path, "film", {**latent, **changed}, None, "", "as loaded", musubi.Cut(image, 1))
    assert paths[0].name == "film_00000-005-0000_0192x0128_fp.safetensors"


# FramePack's sections: latent frames 0 to 10, window 2. What stands after a section in the film is what would have been
# sampled before it; windows between it and the start are never counted beyond 3 for the first and 2 for later ones.
GAPS = {4: 3, 3: 2, 2: 2, 1: 1, 0: 0}
NAMES = {f"clip_00000-041-{place:04}_0096x0064_fp.safetensors" for place in GAPS}


def film_of(frames: int = 11) -> tuple[torch.Tensor, dict[str, Any], ImageCondition]:
    """Latents in which frame t is t + 1, as a LATENT too, and the encoded first frame."""
    samples = torch.arange(1.0, frames + 1).view(1, 1, -1, 1, 1).expand(1, 16, -1, 8, 12).contiguous()
    latents = Latents(samples, "framepack", "image", (frames - 1) * 4 + 1, 64, 96, 30.0, 7)
    image = ImageCondition("framepack", {"vision": torch.randn(1, 729, 12)}, 96, 64)
    return samples[0] * SCALE, to_core(latents), image


def frames_at(film: torch.Tensor, places: list[int]) -> torch.Tensor:
    """The latent frames at these places; zeros where there is none."""
    found = [film[:, t] if 0 <= t < film.shape[1] else torch.zeros_like(film[:, 0]) for t in places]
    return torch.stack(found, dim=1)


@pytest.mark.parametrize("order", SECTION_ORDERS)
def test_framepack_sections_hold_what_its_trainer_caches(tmp_path: Path, order: str) -> None:
    film, latent, image = film_of()
    lines: list[str] = []
    cut = musubi.Cut(image, 2, order)
    paths = musubi.save_item(tmp_path, "clip", latent, None, "", "as loaded", cut, lines.append)
    assert {path.name for path in paths} == NAMES and lines == ["5 sections of 2 latent frames"]
    for path in paths:
        place, found = int(path.name[15:19]), load_file(path)
        first = 1 + 2 * place
        if order == "vanilla":
            indices = {"latent": [20, 21], "clean_latent": [0, 19], "clean_latent_2x": [17, 18]}
            quarters, seen = (
                list(range(1, 17)),
                [first - 1, *range(first - 3, first - 1), *range(first - 19, first - 3)],
            )
        else:
            near = 1 + 2 * GAPS[place] + 2
            indices = {
                "latent": [near - 2, near - 1],
                "clean_latent": [0, near],
                "clean_latent_2x": [near + 1, near + 2],
            }
            quarters, seen = list(range(near + 3, near + 19)), list(range(first + 2, first + 21))
        indices["clean_latent_4x"] = quarters
        expected = {
            "latents_2x8x12_float32": frames_at(film, [first, first + 1]),
            "latents_clean_2x8x12_float32": frames_at(film, [0, seen[0]]),
            "latents_clean_2x_2x8x12_float32": frames_at(film, seen[1:3]),
            "latents_clean_4x_2x8x12_float32": frames_at(film, seen[3:]),
            "image_embeddings_float32": image.tensors["vision"][0],
            **{f"{name}_indices_int64": torch.tensor(values) for name, values in indices.items()},
        }
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert found[name].dtype is tensor.dtype and torch.equal(found[name], tensor), (place, name)
        assert metadata_of(path) == {"architecture": "framepack", **SIZE, **VERSION, "frame_count": "41"}


def test_a_sections_cache_is_read_and_written_back_under_its_name(tmp_path: Path) -> None:
    _, latent, image = film_of(6)
    lines: list[str] = []
    text = Prompt("framepack", {"prompt_embeds": torch.randn(1, 5, 16), "pooled_prompt_embeds": torch.randn(1, 8)})
    name, cut = "clip_00024-021", musubi.Cut(image, 2)
    *paths, caption = musubi.save_item(tmp_path, name, latent, text, "a cat", "bfloat16", cut, lines.append)
    assert lines == ["2 sections of 2 latent frames; the video's last 4 frames are left out"]
    assert caption.name == "clip_fp_te.safetensors", "its reader looks for the item, whatever the frames"
    path = next(path for path in paths if "-0001_" in path.name)
    again = musubi.save_latent_cache(tmp_path / "again", path.name.partition("_0096x")[0], said_of(path)[0])
    assert again.name == path.name == "clip_00024-021-0001_0096x0064_fp.safetensors"
    ours, theirs = load_file(path), load_file(again)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_what_cannot_be_cut_into_sections_is_said(tmp_path: Path) -> None:
    _, latent, image = film_of(3)
    ltx = to_core(Latents(torch.zeros(1, 128, 2, 4, 4), "ltx", "text", 9, 128, 128, 24.0, 0))

    def save(latent: Any, window: int = 9, order: str = "vanilla", prompt: Any = None) -> None:
        cut = musubi.Cut(image, window, order)
        musubi.save_item(tmp_path, "clip", latent, prompt, "", "as loaded", cut)

    with pytest.raises(InputError, match="3 latent frames for a section of 9"):
        save(latent)
    with pytest.raises(InputError, match="window 0"):
        save(latent, 0)
    with pytest.raises(InputError, match="order 'auto'"):
        save(latent, 2, "auto")
    with pytest.raises(UnsupportedError, match="FramePack's sections of latents of 'ltx'"):
        save(ltx)
    with pytest.raises(UnsupportedError, match="FramePack's sections of latents of a Musubi Tuner cache"):
        save({**latent, "musubi": {"dtype": "float32"}}, 2)
    with pytest.raises(InputError, match="a prompt of 'hunyuan_video' beside latents for 'framepack'"):
        save(latent, 2, prompt=Prompt("hunyuan_video", {"prompt_embeds": torch.zeros(1, 2, 3)}))
    image = ImageCondition("framepack", {"end": torch.randn(1, 729, 12)}, 96, 64)  # encoded as frame -1
    with pytest.raises(UnsupportedError, match="and a start image of FramePack"):
        save(latent, 2)
    assert not list(tmp_path.iterdir())


# What cannot be done ----------------------------------------------------------------------------------------------


def test_other_architectures_and_families_are_refused(tmp_path: Path) -> None:
    tensors = {"latents_3x8x12_float16": torch.zeros(16, 3, 8, 12).half()}
    save_file(tensors, tmp_path / "a.safetensors", {"architecture": "wan", **VERSION})
    assert latent_store.kind_of(tmp_path / "a.safetensors") == ""
    with pytest.raises(UnsupportedError, match="a Musubi Tuner cache of 'wan'"):
        said_of(tmp_path / "a.safetensors")
    latents = Latents(torch.zeros(1, 128, 2, 4, 4), "ltx", "text", 9, 128, 128, 24.0, 0)
    with pytest.raises(UnsupportedError, match="latents of 'ltx' for a Musubi Tuner cache"):
        musubi.save_latent_cache(tmp_path, "clip", to_core(latents))
    with pytest.raises(UnsupportedError, match="a prompt of 'mochi' for a Musubi Tuner cache"):
        musubi.save_text_cache(tmp_path, "clip", Prompt("mochi", {"prompt_embeds": torch.zeros(1, 2, 3)}))
    framepack = Latents(torch.zeros(1, 16, 2, 4, 4), "framepack", "image", 5, 32, 32, 30.0, 0)
    with pytest.raises(UnsupportedError, match="FramePack latents without image embeddings"):
        musubi.save_latent_cache(tmp_path, "clip", to_core(framepack))


def test_damaged_caches_are_one_line(tmp_path: Path) -> None:
    save_file({"latents_9x9x9_float16": torch.zeros(16, 3, 8, 12).half()}, tmp_path / "a.safetensors",
              {"architecture": "hunyuan_video"})  # fmt: skip
    with pytest.raises(CheckpointError, match=r"'latents_9x9x9_float16' of .* is float16 \(16, 3, 8, 12\)"):
        said_of(tmp_path / "a.safetensors")
    metadata = {"architecture": "hunyuan_video", "caption1": "x"}
    save_file({"llm_float16": torch.zeros(256, 16).half()}, tmp_path / "b_hv_te.safetensors", metadata)
    with pytest.raises(CheckpointError, match="no 'clipL' in"):
        prompt_files.load_prompt(tmp_path / "b_hv_te.safetensors", lambda _text: None)


@pytest.mark.parametrize("name", ["", "..", "a/b", "../a", "a\\b", " "])
def test_only_a_file_name_is_a_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="name "):
        musubi.save_text_cache(tmp_path, name, Prompt("framepack", {}))


def test_nothing_to_save(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="neither latent nor prompt"):
        musubi.save_item(tmp_path, "clip", None, None, "", "as loaded")
    with pytest.raises(UnsupportedError, match="latents of 'an unknown family' for a Musubi Tuner cache"):
        latent = {"samples": torch.zeros(1, 16, 2, 4, 4)}
        musubi.save_item(tmp_path, "clip", latent, Prompt("framepack", {}), "", "bf16")
    with pytest.raises(UnsupportedError, match="a prompt without 'pooled_prompt_embeds'"):
        musubi.save_text_cache(tmp_path, "clip", Prompt("framepack", {"prompt_embeds": torch.zeros(1, 2, 3)}))
