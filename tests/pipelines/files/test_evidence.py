"""Which variant a published file is: what it says of itself, then the names around it, each named in the decision."""

import json
from dataclasses import replace
from pathlib import Path

import published
import pytest
import torch
from anygpu.compat.checkpoints.headers import header_of
from anygpu.pipelines.families.ltx import pipeline as ltx
from anygpu.pipelines.files.evidence import Evidence, cautions_of, evidence_of, names_around
from anygpu.pipelines.files.formats import config_of, contents
from anygpu.pipelines.files.part import PartFiles
from anygpu.pipelines.registry import FAMILIES

CACHE = "x/hub/models--tencent--HunyuanVideo-1.5/"
STEPS = [1.0, 0.9937, 0.9875, 0.9812, 0.975, 0.9094, 0.725, 0.4219]


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("models/diffusers/LTX-Video-0.9.5", ("LTX-Video-0.9.5",)),
        ("models/diffusers/LTX-Video-0.9.8-13B-distilled/transformer", ("LTX-Video-0.9.8-13B-distilled",)),
        (CACHE + "snapshots/1f0a/transformer/720p_i2v", ("720p_i2v", "HunyuanVideo-1.5")),
        ("HunyuanVideo-1.5/transformer/720p_i2v/diffusion_pytorch_model.safetensors", ("720p_i2v", "HunyuanVideo-1.5")),
        ("models/diffusion_models/ltxv-13b-0.9.8-distilled-fp8.safetensors", ("ltxv-13b-0.9.8-distilled-fp8",)),
        ("/home/distilled/models/unet/dev/model.gguf", ("dev",)),
    ],
)  # fmt: skip
def test_names_that_every_model_has_say_nothing(path: str, names: tuple[str, ...]) -> None:
    assert names_around(Path(path)) == names


@pytest.mark.parametrize(
    ("folder", "model", "name", "why"),
    [
        ("480p_i2v_step_distilled", "hunyuan_video_15 meanflow", "480p i2v, few steps", ""),
        ("720p_i2v", "hunyuan_video_15", "720p i2v", "the name '720p_i2v' says so"),
        ("480p_t2v_distilled", "hunyuan_video_15", "480p t2v distilled", "the name '480p_t2v_distilled' says so"),
        ("480p_t2v", "hunyuan_video_15", "480p t2v", "assumed: no name around it says otherwise"),
    ],
)
def test_tencents_own_folders_say_which_model_they_hold(
    tmp_path: Path, folder: str, model: str, name: str, why: str
) -> None:
    """A file under the name that every file there has, in the folder that says what it is."""
    file = tmp_path / "models" / "HunyuanVideo-1.5" / "transformer" / folder / "diffusion_pytorch_model.safetensors"
    (content,) = contents(published.sparse(file, published.shapes(model)))
    found = config_of(content)
    assert (found.name, found.why) == (name, why)


@pytest.mark.parametrize(
    ("name", "config", "variant", "why"),
    [
        ("my favourite", {"allowed_inference_steps": STEPS}, "distilled", "its file says that it was trained for 8"),
        ("ltxv-2b-0.9.6-distilled-04-25", {"scheduler": {}}, "distilled_0.9.6", "'ltxv-2b-0.9.6-distilled-04-25' says"),
        ("ltxv-13b-0.9.7-distilled-fp8", {"scheduler": {}}, "distilled", "the name"),
        ("ltxv-13b-0.9.8-dev", {"scheduler": {"sampler": "x"}}, "dev", "its file names no noise levels"),
        ("ltxv-13b-0.9.8-dev", None, "dev", "does not say 'distilled'"),
    ],
)
def test_the_metadata_comes_before_the_names(tmp_path: Path, name: str, config: object, variant: str, why: str) -> None:
    notes = None if config is None else {"config": config}
    file = published.sparse(tmp_path / "models" / f"{name}.safetensors", {"x": (1,)}, metadata=notes)
    found, said = ltx.guess_variant(evidence_of(file, {}))
    assert found == variant and why in said


@pytest.mark.parametrize(
    ("sampler", "pipeline"), [("LinearQuadratic", "LTXConditionPipeline"), ("Uniform", "LTXPipeline")]
)
def test_a_files_own_scheduler_says_its_pipeline(sampler: str, pipeline: str) -> None:
    notes = {"config": json.dumps({"scheduler": {"sampler": sampler}})}
    found = ltx.settings_in(Evidence(notes))
    assert found["index"]["_class_name"] == {"Uniform": "LTXPipeline"}.get(sampler, "LTXConditionPipeline")
    assert found["scheduler"].get("use_dynamic_shifting", True) == (sampler == "Uniform")


@pytest.mark.parametrize("text", ["", "[]", "{", '{"scheduler": 3}', '"x"', "[" * 5000])
def test_metadata_of_another_kind_says_nothing(text: str) -> None:
    found = Evidence({"config": text})
    assert found.note("config", "scheduler", "sampler") is None and ltx.settings_in(found) == {}


@pytest.mark.parametrize(
    ("name", "dtype", "scaled", "said"),
    [
        ("ltxv-13b-0.9.7-dev-fp8", "F8_E4M3", False, True),
        ("ltxv-13b-0.9.7-dev-fp8", "F8_E4M3", True, False),
        ("ltxv-13b-0.9.7-dev-fp8", "BF16", False, False),
        ("ltxv-13b-0.9.7-distilled-fp8", "F8_E4M3", False, False),
        ("ltxv-13b-0.9.8-dev-fp8", "F8_E4M3", False, False),
        ("ltxv-13b-0.9.7-dev_fp8_e4m3fn", "F8_E4M3", False, False),
    ],
)
def test_the_one_file_whose_first_upload_was_turned_comes_with_a_caution(
    tmp_path: Path, name: str, dtype: str, scaled: bool, said: bool
) -> None:
    """Since 14 May 2025 Lightricks' fp8 is plain, and its Q8 kernels turn the weights themselves."""
    tensors: dict[str, tuple[int, ...]] = {"transformer_blocks.0.attn1.to_q.weight": (4, 4)}
    file = published.sparse(tmp_path / "models" / f"{name}.safetensors", tensors, dtype)
    entries = header_of(file)
    if scaled:
        entries = {key: replace(entry, scale=entry) for key, entry in entries.items()}
    part = PartFiles("transformer", "diffusers", "X", file, {}, entries, torch.float32)
    told = cautions_of(FAMILIES["ltx"], file, part)
    assert [decision.alarming for decision in told] == [True] * said
