"""Parts that are published apart: Mochi's VAE in two files, text encoders as GGUF, Llava's halves."""

import json
from pathlib import Path

import layouts
import pytest
import tiny
import torch
from anygpu.compat.checkpoints import packed
from anygpu.compat.errors import CheckpointError
from anygpu.pipelines import stages
from anygpu.pipelines.base import PromptRequest, SampleSettings, Silent
from anygpu.pipelines.files import formats
from anygpu.pipelines.files.formats import kinds
from anygpu.pipelines.files.single_file import Files
from anygpu.pipelines.load.folder import load
from anygpu.pipelines.pipeline import Pipeline
from anygpu.pipelines.requests import LoadRequest
from anygpu.pipelines.settings import of_checkpoint
from safetensors.torch import load_file
from torch import Tensor

FULL = pytest.mark.full
PICTURE = torch.rand(1, 64, 64, 3, generator=torch.Generator().manual_seed(0))


def composed(files: dict[str, Path], base: Path, offered: tuple[Path, ...] = (), progress=None) -> Pipeline:
    request = Files(files, {path: kinds(path) for path in offered})
    return load(LoadRequest(files["transformer"], base=base, device="cpu", files=request), progress)


def embeds(pipeline: Pipeline, image: Tensor | None = None) -> dict[str, Tensor]:
    with torch.no_grad():
        return stages.encode_prompt(pipeline, PromptRequest("a red fox", image=image), Silent()).embeds


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def halves(vae: Path, prefixed: bool) -> dict[str, Path]:
    """Mochi's VAE in two files, with or without the word that tells them apart before each name."""
    found = {}
    for coder in ("decoder", "encoder"):
        start = f"{coder}."
        tensors = {name: tensor for name, tensor in load_file(vae).items() if name.startswith(start)}
        config = json.loads(vae.with_suffix(".json").read_text())
        path = vae.parent / "halves" / f"{coder}.safetensors"
        found[coder] = layouts.write(
            path, {name if prefixed else name.removeprefix(start): tensor for name, tensor in tensors.items()}, config
        )
    return found


def test_a_base_folder_lends_no_schedule_and_guidance_where_the_file_s_model_has_its_own(
    tiny_folder, tmp_path, monkeypatch
):
    """Such as a cfg-distilled GGUF beside the folder of HunyuanVideo 1.5 that is not: cfg is 1, not the folder's."""
    model, own = "hunyuan_video_15", {"scheduler": {"shift": 9.0}, "guider": {"guidance_scale": 1.0}}
    files = layouts.whole_set(model, tiny_folder, tmp_path)
    beside, shown = files["transformer"].with_suffix(".json"), formats.published
    row = {"name": "720p t2v distilled", "config": json.loads(beside.read_text()), "tools": own}
    beside.unlink()
    monkeypatch.setattr(formats, "published", lambda kind: [row] if kind.endswith("transformer") else shown(kind))
    folder = tiny.build(model, tiny_folder)
    pipeline = composed({"transformer": files["transformer"]}, folder)
    assert pipeline.tools["scheduler"]["shift"] == 9 and of_checkpoint(pipeline).sizes.defaults.cfg == 1
    assert load(LoadRequest(folder, device="cpu")).tools["guider"]["guidance_scale"] == 6, "the folder's own"


def test_a_base_folder_whose_index_names_more_than_it_holds_lends_what_it_holds(tiny_folder, tmp_path):
    """As after a download of index and tokenizers alone: the rest are files that were found, and shipped settings."""
    model = "hunyuan_video_15"
    files, base = layouts.whole_set(model, tiny_folder, tmp_path), layouts.tools_only(model, tiny_folder, tmp_path)
    (base / "model_index.json").write_text((tiny.build(model, tiny_folder) / "model_index.json").read_text())
    (base / "scheduler").unlink()
    pipeline = composed({"transformer": files["transformer"]}, base, tuple(files.values()))
    assert pipeline.parts.readers.keys() == files.keys() and pipeline.tools["scheduler"]["shift"] == 5
    assert embeds(pipeline).keys() == {"prompt_embeds", "prompt_embeds_2"}


@pytest.mark.parametrize("model", ["ltx", "ltx_condition"])
def test_a_file_of_ltx_video_without_metadata_runs_the_schedule_of_the_folder_that_lends_the_vae(
    tiny_folder, tmp_path, model
):
    """Such as a GGUF beside the folder of 0.9.5, which has another schedule than 0.9.0's."""
    folder, files = tiny.build(model, tiny_folder), layouts.whole_set(model, tiny_folder, tmp_path)
    single, whole = composed({"transformer": files["transformer"]}, folder), load(LoadRequest(folder, device="cpu"))
    settings, made = SampleSettings(64, 64, 9, steps=3, cfg=1.0, stg=0.0), []
    for pipeline in (single, whole):
        prompt = stages.encode_prompt(pipeline, PromptRequest("a red fox"), Silent())
        made.append(stages.sample(pipeline, prompt, None, settings, Silent()).samples)
    assert torch.equal(*made)


@pytest.mark.parametrize(
    "way", ["decoder", *(pytest.param(way, marks=FULL) for way in ("encoder", "auto", "prefixed"))]
)
def test_mochi_s_vae_in_two_files_is_that_of_its_folder(tiny_folder, tmp_path, recorded, way):
    files, base = layouts.whole_set("mochi", tiny_folder, tmp_path), layouts.tools_only("mochi", tiny_folder, tmp_path)
    coders, progress = halves(files.pop("vae"), way == "prefixed"), recorded()
    assert [kinds(path) for path in coders.values()] == [("mochi/vae_decoder",), ("mochi/vae_encoder",)]
    if way == "auto":
        pipeline = composed(files, base, tuple(coders.values()), progress)
        assert "vae from decoder.safetensors (auto)" in progress.said
    else:
        pipeline = composed({**files, "vae": coders["encoder" if way == "encoder" else "decoder"]}, base, (), progress)
    assert any("of the VAE from" in line for line in progress.said)
    whole = load(LoadRequest(tiny.build("mochi", tiny_folder), device="cpu"))
    assert same(pipeline.parts["vae"].state_dict(), whole.parts["vae"].state_dict())


@FULL
def test_half_a_vae_is_named(tiny_folder, tmp_path):
    files = layouts.whole_set("mochi", tiny_folder, tmp_path)
    base, coders = layouts.tools_only("mochi", tiny_folder, tmp_path), halves(files["vae"], False)
    coders["encoder"].unlink()
    with pytest.raises(
        CheckpointError, match=r"'decoder.safetensors' is the decoder of Mochi 1's VAE .* the encoder too"
    ):
        composed({**files, "vae": coders["decoder"]}, base)


def text_encoder(model: str, tiny_folder: Path) -> tuple[dict[str, Tensor], dict[str, object], str]:
    """Tensors and configuration of a tiny text encoder, and its layout in GGUF's names."""
    folder = tiny.build(model, tiny_folder) / "text_encoder"
    if model == "mochi":
        return layouts.tensors_of(folder), layouts.config_in(folder), "a T5 encoder in GGUF's names"
    from transformers import LlamaConfig, LlamaModel

    # as many heads as Llama 3 8B has, by which the order of rows is known
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 4}
    config = {**layouts.config_in(folder), **heads}
    torch.manual_seed(0)
    module = LlamaModel(LlamaConfig.from_dict(config))
    return module.state_dict(), config, "Llama 3 in GGUF's names"


@FULL
@pytest.mark.parametrize("stays", [False, True])
@pytest.mark.parametrize("model", ["mochi", "hunyuan_video"])
def test_a_text_encoder_as_gguf_gives_the_embeddings_of_its_values(tiny_folder, tmp_path, model, stays):
    """The same values as safetensors give the same embeddings, bit for bit; blocks of 8 bits stay so in memory."""
    files, base = layouts.whole_set(model, tiny_folder, tmp_path), layouts.tools_only(model, tiny_folder, tmp_path)
    tensors, config, name = text_encoder(model, tiny_folder)
    release = layouts.layout(name)
    path = tmp_path / "encoder.gguf"
    packs = lambda name, tensor: stays and ("blk." in name or "token_embd" in name) and layouts.wide(name, tensor)  # noqa: E731
    worth = layouts.gguf_file(path, layouts.released(tensors, release), "Q8_0", packs)
    layouts.write(tmp_path / "worth.safetensors", worth, config)
    path.with_suffix(".json").write_text(json.dumps(config))
    assert kinds(path) == (release.kind,)
    found, plain = (composed({**files, "text_encoder": file}, base) for file in (path, tmp_path / "worth.safetensors"))
    assert layouts.is_packed(found.parts["text_encoder"]) is stays
    tables = [type(owner) for owner in found.parts["text_encoder"].modules() if isinstance(owner, torch.nn.Embedding)]
    assert (packed.StoredEmbedding in tables) is stays
    assert not layouts.is_packed(plain.parts["text_encoder"])
    assert same(embeds(found), embeds(plain))
    if not stays:  # and they are those of the model itself, whatever the file calls its rows
        whole = dict(found.parts["text_encoder"].state_dict())
        assert all(torch.equal(whole[key], tensor) for key, tensor in tensors.items() if key in whole)
        assert len(whole.keys() & tensors.keys()) > 10


@pytest.mark.parametrize("given", [True, pytest.param(False, marks=FULL)])
def test_llava_in_two_files_is_that_of_its_folder(tiny_folder, tmp_path, recorded, given):
    """What the picture shows reaches the prompt: the embeddings with a picture are the folder's, bit for bit."""
    folder = tiny.build("hunyuan_video_i2v", tiny_folder)
    whole = load(LoadRequest(folder, device="cpu"))
    tensors, config = layouts.tensors_of(folder / "text_encoder"), layouts.config_in(folder / "text_encoder")
    text = {
        name.removeprefix("language_model."): t for name, t in tensors.items() if name.startswith("language_model.")
    }
    vision = {
        name.replace("vision_tower.vision_model.", "vision_tower.").replace("vision_tower.", "vision_model."): tensor
        for name, tensor in tensors.items()
        if not name.startswith("language_model.")
    }
    files = {
        "transformer": layouts.write(
            tmp_path / "hunyuan_i2v.safetensors",
            layouts.released(
                layouts.tensors_of(folder / "transformer"),
                layouts.layout("HunyuanVideo as released or as ComfyUI saves it"),
            ),
            layouts.config_in(folder / "transformer"),
        ),
        "text_encoder": layouts.write(tmp_path / "llava_llama3.safetensors", text, config["text_config"]),
    }
    picture = layouts.write(tmp_path / "llava_llama3_vision.safetensors", vision, config)
    assert kinds(files["text_encoder"]) == ("llama",) and kinds(picture) == ("llava_vision",)
    progress = recorded()
    single = composed({**files, **({"image_encoder": picture} if given else {})}, folder, (picture,), progress)
    assert ("image_encoder from llava_llama3_vision.safetensors (auto)" in progress.said) is not given
    assert single.model.task == whole.model.task == "image"
    theirs = whole.parts["text_encoder"].state_dict()
    inner = {name.removeprefix("model."): tensor for name, tensor in theirs.items() if name != "lm_head.weight"}
    assert same(single.parts["text_encoder"].state_dict(), inner)
    assert same(embeds(single, PICTURE), embeds(whole, PICTURE))
    assert not same(embeds(single, PICTURE), embeds(single, 1 - PICTURE))
