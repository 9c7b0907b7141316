"""Latents and prompts as files: everything our nodes know comes back, and what does not belong is one line."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from anygpu.compat.checkpoints.latents import metadata_of, read_record, write_record
from anygpu.compat.errors import CheckpointError, InputError
from anygpu.pipelines import stages
from anygpu.pipelines.base import FramePackSettings, Latents, Prompt, PromptRequest, SampleSettings, Silent
from anygpu.pipelines.families.framepack.sections import by_span, plan_for, shown
from anygpu.pipelines.forecast.counts import text_forwards
from anygpu.pipelines.forecast.seconds import planned_run
from anygpu.pipelines.latents import convert as latent_format
from anygpu.pipelines.latents import prompt_files
from anygpu.pipelines.latents import store as latent_store
from anygpu.pipelines.latents.store import Origin, kind_of, load_latent, save_latent
from anygpu.pipelines.load.folder import load
from anygpu.pipelines.requests import LoadRequest

EXTRA = {"generator_state": bytes(range(256)), "section_lengths": [2, 4], "window": 2, "drop_frames": 4}
EXTRA |= {"prompt": "ein Fuchs 狐"}
LATENTS = Latents(torch.randn(1, 16, 3, 4, 6), "framepack", "image", 9, 32, 48, 29.97, 2**64 - 1, extra=EXTRA)
PROMPT = Prompt(
    "framepack",
    {"prompt_embeds": torch.randn(1, 5, 16).bfloat16(), "pooled_prompt_embeds": torch.randn(1, 8)},
    {"prompt_embeds": torch.randn(1, 1, 16), "pooled_prompt_embeds": torch.randn(1, 8)},
    ({"prompt_embeds": torch.randn(1, 3, 16), "pooled_prompt_embeds": torch.randn(1, 8)},),
    has_negative=True,
    extra={"text": "ein Fuchs", "negative_text": "blurry"},
)


def no_word(text: str) -> None:
    raise AssertionError(text)


def test_latents_come_back_whole(tmp_path: Path) -> None:
    latent = {**latent_format.to_core(LATENTS), "noise_mask": torch.rand(1, 1, 3, 4, 6), "type": "video"}
    origin = Origin({"workflow": '{"nodes":[]}', "prompt": "{}"}, {})
    path = save_latent(tmp_path / "a.safetensors", latent, no_word, origin=origin)
    found = load_latent(path, no_word)
    assert torch.equal(found["samples"], LATENTS.samples)
    assert torch.equal(found["noise_mask"], latent["noise_mask"])
    assert found["anygpu"] == latent_format.to_core(LATENTS)["anygpu"]
    again = latent_format.from_core(None, found, no_word)
    assert replace(again, samples=LATENTS.samples) == LATENTS
    metadata = metadata_of(path)
    assert (metadata["workflow"], metadata["prompt"]) == ('{"nodes":[]}', "{}")
    record = json.loads(metadata["anygpu"])
    assert {"family", "shape", "space", "dtype", "fps", "seed", "version", "saved"} <= set(record)
    assert record["extra"]["prompt"] == "ein Fuchs 狐"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_dtype_is_kept_and_widened_only_when_asked(tmp_path: Path, dtype: torch.dtype) -> None:
    latent = {**latent_format.to_core(LATENTS), "samples": LATENTS.samples.to(dtype)}
    path = save_latent(tmp_path / "a.safetensors", latent, no_word)
    assert load_latent(path, no_word, dtype="as in file")["samples"].dtype is dtype
    widened = load_latent(path, no_word)["samples"]
    assert widened.dtype is torch.float32
    assert torch.equal(widened, latent["samples"].float())
    with pytest.raises(InputError, match="dtype 'int8'"):
        load_latent(path, no_word, dtype="int8")


def test_latents_of_other_nodes_are_saved_too(tmp_path: Path) -> None:
    path = save_latent(tmp_path / "a.safetensors", {"samples": LATENTS.samples}, no_word)
    assert set(load_latent(path, no_word)) == {"samples"}


def test_files_of_core_nodes_are_read(tmp_path: Path) -> None:
    """The names that core's Save Latent writes, and its suffix."""
    from safetensors.torch import load_file, save_file

    tensors = {"latent_tensor": LATENTS.samples, "latent_format_version_0": torch.tensor([])}
    save_file(tensors, tmp_path / "a.latent", {"prompt": "{}"})
    assert kind_of(tmp_path / "a.latent") == "latent"
    assert torch.equal(load_latent(tmp_path / "a.latent", no_word)["samples"], LATENTS.samples)
    ours = load_file(save_latent(tmp_path / "b.safetensors", latent_format.to_core(LATENTS), no_word))
    assert {name: ours[name].shape for name in tensors} == {name: t.shape for name, t in tensors.items()}
    del tensors["latent_format_version_0"]  # as before May 2023, when it wrote scaled ones
    tensors |= {f"latent_tensor.{index}": torch.full((1,), index, dtype=torch.bfloat16) for index in range(1, 12)}
    save_file(tensors, tmp_path / "c.latent")
    old = load_latent(tmp_path / "c.latent", no_word)
    assert torch.equal(old["samples"], LATENTS.samples / 0.18215)
    assert [float(each) for each in old[latent_store.NESTED]] == list(range(1, 12))
    assert old[latent_store.NESTED][0].dtype is torch.float32


def test_nan_is_refused_or_clamped_and_counted(tmp_path: Path) -> None:
    broken = LATENTS.samples.clone()
    broken[0, 0, 0, 0, :2] = float("nan")
    latent, said = {**latent_format.to_core(LATENTS), "samples": broken}, []
    with pytest.raises(InputError, match="2 of 1152 values of the latents are NaN"):
        save_latent(tmp_path / "a.safetensors", latent, no_word)
    assert not (tmp_path / "a.safetensors").exists()
    save_latent(tmp_path / "a.safetensors", latent, said.append, "clamp")
    assert said[0].startswith("2 of 1152 values")
    assert torch.equal(load_latent(tmp_path / "a.safetensors", no_word)["samples"], broken.nan_to_num(0.0))
    write_record(tmp_path / "b.safetensors", {"latent_tensor": broken}, {})
    with pytest.raises(InputError, match="2 of 1152 values"):
        load_latent(tmp_path / "b.safetensors", no_word)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 99}, "latents of version 99"),
        ({"shape": [1, 2, 3]}, "is wrong about shape"),
        ({"frames": "nine"}, "is wrong about frames"),
        ({"extra": 3}, "is wrong about extra"),
        ({"extra": {"final_width": 10**9, "final_height": 64}}, "is wrong about extra"),
        ({"fps": None}, "is wrong about fps;"),
        ({"kind": "prompt"}, "'prompt' in"),
    ],
)
def test_an_edited_record_is_one_line(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = save_latent(tmp_path / "a.safetensors", latent_format.to_core(LATENTS), no_word)
    tensors, metadata = read_record(path, "latents")
    record = {key: value for key, value in {**json.loads(metadata["anygpu"]), **changes}.items() if value is not None}
    write_record(path, tensors, record)
    with pytest.raises((InputError, CheckpointError), match=message):
        load_latent(path, no_word)


def test_what_is_no_video_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="a LATENT of"):
        save_latent(tmp_path / "a.safetensors", {"samples": torch.zeros(1, 4, 8, 8)}, no_word)
    path = write_record(tmp_path / "a.safetensors", {"weight": torch.zeros(3)}, {})
    with pytest.raises(CheckpointError, match="'no latents' in"):
        load_latent(path, no_word)


def test_prompts_come_back_whole(tmp_path: Path) -> None:
    path = prompt_files.save_prompt(tmp_path / "a.safetensors", PROMPT, Origin({"workflow": "{}"}))
    assert kind_of(path) == latent_store.PROMPT
    found = prompt_files.load_prompt(path, no_word)
    assert (found.family, found.has_negative, found.extra) == (PROMPT.family, True, PROMPT.extra)
    groups = [(PROMPT.embeds, found.embeds), (PROMPT.negative, found.negative), (PROMPT.sections[0], found.sections[0])]
    for before, after in groups:
        assert set(before) == set(after)
        assert all(
            torch.equal(before[name], after[name]) and before[name].dtype is after[name].dtype for name in before
        )
    alone = prompt_files.save_prompt(tmp_path / "b.safetensors", replace(PROMPT, negative=None, sections=()))
    assert prompt_files.load_prompt(alone, no_word).negative is None


@pytest.mark.parametrize("text", ["a fox [2s: a dog]", "a fox;;;1:a dog"])
def test_prompts_by_time_or_number_come_back_whole(tmp_path: Path, text: str) -> None:
    _, spans = by_span(PromptRequest(text))
    sections = tuple({**span, "prompt_embeds": torch.full((1, 2, 3), float(n))} for n, span in enumerate(spans))
    prompt = Prompt("framepack", {"prompt_embeds": torch.zeros(1, 2, 3)}, None, sections)
    path = prompt_files.save_prompt(tmp_path / "a.safetensors", prompt)
    plan = plan_for("F1", FramePackSettings(4.0), 132, ended=False)
    found = prompt_files.load_prompt(path, no_word).sections
    texts = [shown(given, plan, 4.0, 30.0) for given in (sections, found)]
    values = [[float(each["prompt_embeds"].mean()) for each in given] for given in texts]
    assert values[0] == values[1] and set(values[0]) == {0.0, 1.0}


def test_what_is_no_prompt_is_one_line(tmp_path: Path) -> None:
    latents = save_latent(tmp_path / "a.safetensors", latent_format.to_core(LATENTS), no_word)
    with pytest.raises(CheckpointError, match="'latent' in"):
        prompt_files.load_prompt(latents, no_word)
    record = {"kind": "prompt", "family": "ltx", "version": 99}
    path = write_record(tmp_path / "b.safetensors", {"embeds.a": torch.zeros(1, 2, 3)}, record)
    with pytest.raises(InputError, match="a prompt of version 99"):
        prompt_files.load_prompt(path, no_word)
    path = write_record(tmp_path / "c.safetensors", {"embeds.a": torch.zeros(3)}, {**record, "version": 1})
    with pytest.raises(CheckpointError, match=r"has no usable embeds\.a"):
        prompt_files.load_prompt(path, no_word)
    edited = {**record, "version": 1, "sections": "2"}
    path = write_record(tmp_path / "c.safetensors", {"embeds.a": torch.zeros(1, 2, 3)}, edited)
    with pytest.raises(CheckpointError, match="has no usable number of sections"):
        prompt_files.load_prompt(path, no_word)
    path = write_record(
        tmp_path / "d.safetensors", {"embeds.a": torch.full((1, 2, 3), float("nan"))}, {**record, "version": 1}
    )
    with pytest.raises(
        InputError, match=r"6 of 6 values of the prompt \(a\) are NaN.* Encode the text again with [^,]*$"
    ):
        prompt_files.load_prompt(path, no_word)


def test_a_saved_prompt_samples_without_any_text_encoder(tiny_folder: Path, tmp_path: Path, recorded: Any) -> None:
    """The same latents, from a model folder that has neither text encoders nor tokenizers."""
    whole, settings = tiny.build("hunyuan_video", tiny_folder), SampleSettings(32, 32, 5, steps=2, seed=3)
    pipeline = load(LoadRequest(whole, device="cpu", precision="fp32"))
    prompt = stages.encode_prompt(pipeline, PromptRequest("a cat walks"), Silent())
    expected = stages.sample(pipeline, prompt, None, settings, Silent())
    path = prompt_files.save_prompt(tmp_path / "prompt.safetensors", prompt)
    model, said = tmp_path / "model", recorded()
    model.mkdir()
    for entry in whole.iterdir():
        if not entry.name.startswith(("text_encoder", "tokenizer")):
            (model / entry.name).symlink_to(entry)
    without = load(LoadRequest(model, device="cpu", precision="fp32"), said)
    assert any("without text encoder" in line for line in said.said)
    found = stages.sample(without, prompt_files.load_prompt(path, no_word), None, settings, Silent())
    assert torch.equal(found.samples, expected.samples)
    assert found.extra["prompt"] == "a cat walks"
    run = planned_run(without, stages.size_of(settings, prompt), settings)
    assert list(run.places(without, "none")) == ["sampling", "decoding"], "no text is forecast"
    with pytest.raises(CheckpointError, match=r"no text_encoder for .* connect AnyGPU Load Prompt"):
        stages.encode_prompt(without, PromptRequest("a cat walks"), Silent())


def test_a_lone_transformer_borrows_from_a_folder_without_text_encoders(tiny_folder: Path, tmp_path: Path) -> None:
    """FramePack's VAE comes from HunyuanVideo's folder, of which nothing else is needed then."""
    (tmp_path / "framepack").symlink_to(tiny.build("framepack", tiny_folder))
    (tmp_path / "siglip").symlink_to(tiny.build("siglip", tiny_folder))
    provider = tmp_path / "hunyuan"
    provider.mkdir()
    for entry in tiny.build("hunyuan_video", tiny_folder).iterdir():
        if not entry.name.startswith(("text_encoder", "tokenizer")):
            (provider / entry.name).symlink_to(entry)
    pipeline = load(LoadRequest(tmp_path / "framepack", device="cpu", precision="fp32"))
    assert pipeline.configs["vae"] and "text_encoder" not in pipeline.parts.readers
    assert text_forwards(pipeline, PromptRequest("a cat")) == {}
    with pytest.raises(CheckpointError, match="connect AnyGPU Load Prompt"):
        stages.encode_prompt(pipeline, PromptRequest("a cat"), Silent())
