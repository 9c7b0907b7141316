"""A checkpoint is the same model in every layout it is published in, found by its header alone."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import layouts
import published
import pytest
import tiny
import torch
import transformers
from anygpu.compat.errors import CheckpointError
from anygpu.pipelines.files import formats
from anygpu.pipelines.files.formats import StoredModel, config_of, contents, kinds
from anygpu.pipelines.files.formats import layouts as known_layouts
from anygpu.pipelines.files.single_file import Files
from anygpu.pipelines.keys import SAME
from anygpu.pipelines.load.folder import load
from anygpu.pipelines.registry import FAMILIES
from anygpu.pipelines.requests import LoadRequest
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

# Layout, tiny checkpoint, part, which way of writing a name, prefix.
ORIGINAL = "as released or as ComfyUI saves it"
CASES = [
    (f"HunyuanVideo {ORIGINAL}", "hunyuan_video", "transformer", 0, ""),
    (f"HunyuanVideo {ORIGINAL}", "hunyuan_video", "transformer", 1, "model.model."),
    (f"HunyuanVideo {ORIGINAL}", "hunyuan_video_i2v_33ch", "transformer", 2, "model.diffusion_model."),
    ("HunyuanVideo in diffusers' names", "hunyuan_video_i2v", "transformer", 0, "diffusion_model."),
    (f"HunyuanVideo 1.5 {ORIGINAL}", "hunyuan_video_15", "transformer", 0, ""),
    (f"HunyuanVideo 1.5 {ORIGINAL}", "hunyuan_video_15_i2v", "transformer", 1, "model.diffusion_model."),
    ("HunyuanVideo 1.5 in diffusers' names", "hunyuan_video_15", "transformer", 0, ""),
    ("FramePack", "framepack", ".", 0, ""),
    ("Mochi 1 as released", "mochi", "transformer", 0, ""),
    ("Mochi 1 as released", "mochi", "transformer", 0, "model.diffusion_model."),
    ("Mochi 1 in diffusers' names", "mochi", "transformer", 0, ""),
    ("LTX-Video as released", "ltx", "transformer", 0, "model.diffusion_model."),
    ("LTX-Video in diffusers' names", "ltx", "transformer", 0, ""),
    ("the VAE of LTX-Video 0.9.0 as released", "ltx", "vae", 0, "vae."),
    ("the VAE of LTX-Video 0.9.5 and later as released", "ltx_condition", "vae", 0, "vae."),
    ("the VAE of LTX-Video in diffusers' names", "ltx", "vae", 0, ""),
    ("the VAE of HunyuanVideo in Stable Diffusion's names", "hunyuan_video", "vae", 0, ""),
    ("the VAE of HunyuanVideo", "hunyuan_video", "vae", 0, "vae."),
    ("the VAE of HunyuanVideo 1.5 as released", "hunyuan_video_15", "vae", 0, ""),
    ("the VAE of HunyuanVideo 1.5 in diffusers' names", "hunyuan_video_15", "vae", 0, ""),
    ("the VAE of Mochi 1 as released", "mochi", "vae", 0, ""),
    ("the VAE of Mochi 1 in diffusers' names", "mochi", "vae", 0, "first_stage_model."),
]


def only(path: Path) -> StoredModel:
    (found,) = contents(path)
    return found


@pytest.mark.parametrize(("name", "model", "part", "way", "prefix"), CASES)
def test_each_layout_is_recognised_and_gives_the_same_tensors(tiny_folder, tmp_path, name, model, part, way, prefix):
    from anygpu.compat.checkpoints.weights import read_tensors

    folder = tiny.build(model, tiny_folder) / part
    tensors = layouts.tensors_of(folder)
    file = layouts.write(
        tmp_path / "model.safetensors",
        layouts.released(tensors, layouts.layout(name), way),
        layouts.config_in(folder),
        prefix,
    )
    found = only(file)
    assert (found.layout, found.prefix) == (name, prefix)
    assert config_of(found).config == layouts.config_in(folder)
    read = read_tensors(found.entries, None, lambda _: None)
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[key], tensor) for key, tensor in tensors.items())


PUBLISHED = sorted(
    (path, index)
    for family in FAMILIES.values()
    for path in (family.folder / "transformer.json", family.folder / "vae.json")
    if path.is_file()
    for index in range(len(json.loads(path.read_text())))
)


@pytest.mark.full
@pytest.mark.parametrize(("path", "index"), PUBLISHED, ids=lambda value: getattr(value, "stem", value))
def test_each_published_size_is_told_by_its_shapes_in_every_layout(path, index):
    """Shapes of the real size, without memory; where two share them, the file's name decides."""
    import diffusers
    from accelerate import init_empty_weights
    from anygpu.compat.checkpoints.headers import TensorEntry
    from anygpu.pipelines.keys import renamed

    rows = json.loads(path.read_text())
    row, kind = rows[index], f"{path.parent.name}/{path.stem}"
    with init_empty_weights():
        module = getattr(diffusers, row["config"]["_class_name"]).from_config(row["config"])
    shapes = {name: tensor for name, tensor in module.state_dict().items()}
    for release in (layout for layout in known_layouts() if layout.kind == kind):
        if "0.9." in release.name and row["name"].split()[0] not in release.name:
            continue
        stem = row["name"] if "named" in row else "model"
        entries = {
            name: TensorEntry(Path(f"{stem}.safetensors"), "BF16", tuple(t.shape), 0, 2 * t.numel())
            for name, t in layouts.released(shapes, release).items()
        }
        assert release.fits(entries)
        assert next(layout for layout in known_layouts() if layout.fits(entries)) is release
        content = StoredModel(kind, release.name, "", renamed(entries, release, Path("x")), Path(f"{stem}.safetensors"))
        assert config_of(content).name == row["name"]


@pytest.mark.full
def test_released_names_are_those_that_upstream_converts():
    """diffusers' own converters, on the shapes of the real models, know every name that our tables write."""
    import diffusers
    from accelerate import init_empty_weights
    from diffusers.loaders import single_file_utils as upstream

    vaes = {row["name"]: row["config"] for row in json.loads((FAMILIES["ltx"].folder / "vae.json").read_text())}
    for name, release, converter, config in (
        ("HunyuanVideoTransformer3DModel", f"HunyuanVideo {ORIGINAL}", "hunyuan_video_transformer_to_diffusers", {}),
        ("MochiTransformer3DModel", "Mochi 1 as released", "mochi_transformer_checkpoint_to_diffusers", {}),
        ("LTXVideoTransformer3DModel", "LTX-Video as released", "ltx_transformer_checkpoint_to_diffusers", {}),
        *(
            ("AutoencoderKLLTXVideo", f"the VAE of LTX-Video {v} as released", "ltx_vae_checkpoint_to_diffusers", c)
            for v, c in vaes.items()
        ),
    ):
        with init_empty_weights():
            shapes = getattr(diffusers, name).from_config(config).state_dict()
        written = layouts.released(shapes, layouts.layout(release))
        if "vae" in converter:
            written = {f"vae.{key}": tensor for key, tensor in written.items()}
        converted = getattr(upstream, f"convert_{converter}")(dict(written))
        assert {key: t.shape for key, t in converted.items()} == {key: t.shape for key, t in shapes.items()}, release


@pytest.mark.full
@pytest.mark.parametrize("model", ["ltx", "mochi", "hunyuan_video", "hunyuan_video_15_i2v"])
def test_a_composed_pipeline_has_the_weights_of_its_folder(tiny_folder, tmp_path, model, recorded):
    files, base = layouts.whole_set(model, tiny_folder, tmp_path), layouts.tools_only(model, tiny_folder, tmp_path)
    whole = load(LoadRequest(tiny.build(model, tiny_folder), device="cpu"))
    single = load(LoadRequest(files["transformer"], base=base, device="cpu", files=Files(files)))
    assert (single.family, single.model.task, single.tools.readers.keys()) == (
        whole.family,
        whole.model.task,
        whole.tools.readers.keys(),
    )
    for part in whole.parts.readers:
        ours, theirs = single.parts[part].state_dict(), whole.parts[part].state_dict()
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs), part


def test_auto_finds_the_parts_that_fit_and_says_so(tiny_folder, tmp_path, recorded):
    files, progress = layouts.whole_set("hunyuan_video", tiny_folder, tmp_path / "hv"), recorded()
    other = layouts.whole_set("ltx", tiny_folder, tmp_path / "ltx")
    offered = {path: kinds(path) for path in [*files.values(), *other.values()]}
    base = layouts.tools_only("hunyuan_video", tiny_folder, tmp_path)
    request = Files({"transformer": files["transformer"]}, offered)
    pipeline = load(LoadRequest(files["transformer"], base=base, device="cpu", files=request), progress)
    assert set(pipeline.parts.readers) == {"transformer", "vae", "text_encoder", "text_encoder_2"}
    assert {line for line in progress.said if "(auto)" in line} == {
        f"{part} from {files[part].name} (auto)" for part in ("vae", "text_encoder", "text_encoder_2")
    }
    others = Files(request.parts, {path: held for path, held in offered.items() if path != files["text_encoder"]})
    alone = load(LoadRequest(files["transformer"], base=base, device="cpu", files=others))
    assert set(alone.parts.readers) == {"transformer", "vae"}, (
        "CLIP-L, which many models have, is no text encoder alone"
    )


def test_auto_takes_a_file_of_its_own_before_what_lies_in_a_checkpoint(tiny_folder, tmp_path, recorded):
    """Here the checkpoint of LTX-Video 0.9.0 with its VAE, whose latents are not those of later transformers."""
    files = layouts.whole_set("ltx", tiny_folder, tmp_path / "diffusion_models")
    vae = Path(shutil.copy(files["vae"], tmp_path / "vae.safetensors"))
    shutil.copy(files["vae"].with_suffix(".json"), vae.with_suffix(".json"))
    inner = {f"vae.{name}": tensor for name, tensor in load_file(vae).items()}
    whole = tmp_path / "checkpoints" / "ltx-video-2b-v0.9.safetensors"
    layouts.write(whole, {**load_file(files["transformer"]), **inner}, json.loads(vae.with_suffix(".json").read_text()))
    progress, offered = recorded(), {path: kinds(path) for path in (whole, vae)}
    assert "ltx/vae" in offered[whole] and whole < vae
    base = layouts.tools_only("ltx", tiny_folder, tmp_path)
    request = Files({"transformer": files["transformer"]}, offered)
    pipeline = load(LoadRequest(files["transformer"], base=base, device="cpu", files=request), progress)
    assert f"vae from {vae.name} (auto)" in progress.said and pipeline.parts["vae"] is not None


@pytest.mark.parametrize(("cls", "found"), [("T5EncoderModel", ["t5"]), ("UMT5EncoderModel", [])])
def test_transformers_own_encoders_are_told_apart(tmp_path, cls, found):
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 64}
    made = getattr(transformers, cls)(getattr(transformers, cls.replace("EncoderModel", "Config"))(**sizes))
    made.save_pretrained(tmp_path, safe_serialization=True)
    assert list(kinds(tmp_path / "model.safetensors")) == found


def test_auto_tells_llava_from_the_llama_that_it_was_made_from(tiny_folder, tmp_path, recorded):
    """HiDream's Llama 3.1 has the same shapes, 64 tokens less, and a name that comes first."""
    files = layouts.whole_set("hunyuan_video", tiny_folder, tmp_path / "diffusion_models")
    tensors, llava = load_file(files["text_encoder"]), tmp_path / "llava_llama3.safetensors"
    table = next(name for name in tensors if name.endswith("embed_tokens.weight"))
    llama = llava.with_name("llama_3.1_8b_instruct.safetensors")
    save_file(tensors, llava)
    save_file({**tensors, table: tensors[table][:-2].clone()}, llama)
    for path in (llama, llava):
        shutil.copy(files["text_encoder"].with_suffix(".json"), path.with_suffix(".json"))
    progress, offered = (
        recorded(),
        {path: kinds(path) for path in (llama, llava, files["text_encoder_2"], files["vae"])},
    )
    assert offered[llama] == offered[llava] and llama < llava
    base = layouts.tools_only("hunyuan_video", tiny_folder, tmp_path)
    request = Files({"transformer": files["transformer"]}, offered)
    load(LoadRequest(files["transformer"], base=base, device="cpu", files=request), progress)
    assert f"text_encoder from {llava.name} (auto)" in progress.said


def test_auto_takes_clip_rather_than_one_with_more_places_which_works_too(tiny_folder, tmp_path, recorded):
    """Long-CLIP has 248 places, and a name that comes first."""
    files = layouts.whole_set("hunyuan_video", tiny_folder, tmp_path / "diffusion_models")
    clip = files["text_encoder_2"]
    tensors, long = load_file(clip), clip.with_name("Long-ViT-L-14.safetensors")
    table = next(name for name in tensors if name.endswith("position_embedding.weight"))
    save_file({**tensors, table: torch.randn(248, tensors[table].shape[1])}, long)
    shutil.copy(clip.with_suffix(".json"), long.with_suffix(".json"))
    base = layouts.tools_only("hunyuan_video", tiny_folder, tmp_path)
    for offers, taken in (((clip, long), clip), ((long,), long)):
        progress, offered = recorded(), {path: kinds(path) for path in (files["text_encoder"], files["vae"], *offers)}
        request = Files({"transformer": files["transformer"]}, offered)
        pipeline = load(LoadRequest(files["transformer"], base=base, device="cpu", files=request), progress)
        assert f"text_encoder_2 from {taken.name} (auto)" in progress.said
        assert pipeline.parts["text_encoder_2"].config.max_position_embeddings == (248 if taken == long else 77)


@pytest.mark.parametrize(
    ("table", "bias"),
    [
        ("shared.weight", "encoder.block.{}.layer.0.SelfAttention.relative_attention_bias.weight"),
        ("encoder.embed_tokens.weight", "encoder.block.{}.layer.0.SelfAttention.relative_attention_bias.weight"),
        ("token_embd.weight", "enc.blk.{}.attn_rel_b.weight"),
    ],
)
def test_umt5_which_has_positions_in_every_layer_is_no_t5(tmp_path, table, bias):
    """Wan's text encoder has the shapes of T5-XXL, but other words: a prompt through it would be noise."""
    query = bias.format(0).replace("attn_rel_b", "attn_q").replace("relative_attention_bias", "q")
    t5 = {table: (32128, 4096), query: (4096, 4096), bias.format(0): (32, 64)}
    umt5 = {**t5, table: (256384, 4096), **{bias.format(number): (32, 64) for number in range(24)}}
    files = [published.sparse(tmp_path / f"{len(shapes)}.safetensors", shapes) for shapes in (t5, umt5)]
    assert [kinds(file) for file in files] == [("t5",), ()]


@pytest.mark.parametrize(
    ("missing", "words"), [("vae", r"no vae for Mochi 1; expected .* models/vae"), ("", "no tokenizer for Mochi 1")]
)
def test_what_is_missing_is_named_with_its_place(tiny_folder, tmp_path, missing, words):
    files = layouts.whole_set("mochi", tiny_folder, tmp_path)
    files.pop(missing, None)
    with pytest.raises(CheckpointError, match=words):
        load(LoadRequest(files["transformer"], device="cpu", files=Files(files)))


def test_a_file_in_the_wrong_input_is_named(tiny_folder, tmp_path):
    files = layouts.whole_set("mochi", tiny_folder, tmp_path)
    files["vae"], files["text_encoder"] = files["text_encoder"], files["vae"]
    with pytest.raises(CheckpointError, match=r"is not a valid (vae|text_encoder) for Mochi 1"):
        load(LoadRequest(files["transformer"], device="cpu", files=Files(files)))
    with pytest.raises(CheckpointError, match="holds a T5 encoder; expected a transformer"):
        load(LoadRequest(files["vae"], device="cpu", files=Files({"transformer": files["vae"]})))


@pytest.mark.parametrize("change", ["missing", "shape"])
def test_weights_that_fit_no_published_size_are_named(tiny_folder, tmp_path, change):
    files = layouts.whole_set("mochi", tiny_folder, tmp_path)
    tensors = layouts.tensors_of(tmp_path)
    tensors = load_file(files["transformer"])
    if change == "missing":
        tensors.pop("blocks.0.attn.qkv_x.weight")
    else:
        tensors["blocks.0.attn.proj_x.bias"] = torch.zeros(3)
    save_file(tensors, files["transformer"])
    word = {"missing": "no tensor", "shape": r"is \(3,\), not \(32,\)"}[change]
    with pytest.raises(CheckpointError, match=word):
        load(LoadRequest(files["transformer"], device="cpu", files=Files(files)))
    beside = Path(files["transformer"]).with_suffix(".json")
    shutil.copy(tiny.build("mochi", tiny_folder) / "transformer" / "config.json", beside)
    with pytest.raises(
        CheckpointError, match=f"does not fit '{beside.name}': .*; expected the shapes of '{beside.name}'"
    ):
        load(LoadRequest(files["transformer"], device="cpu", files=Files(files)))


def test_layouts_have_distinct_marks():
    """No layout hides another: each is the first to fit the names it is known by."""
    known = known_layouts()
    for layout in known:
        names = {mark.split("|")[0]: None for mark in layout.marks}
        assert next(other for other in known if other.fits(names)) is layout or layout.rows == SAME, layout.name


def test_shapes_of_a_large_model_are_told_without_memory():
    """A real tensor for a moment, in place of one on ``meta``, took 7 GB of addresses for HunyuanVideo 1.5."""
    row = json.loads((FAMILIES["hunyuan_video_15"].folder / "transformer.json").read_text())[0]
    with Recorded() as made:
        assert len(formats._shapes(json.dumps(row["config"]))) > 1000
    assert made.largest < 10**6


class Recorded(TorchDispatchMode):
    """The most bytes of a real tensor that was made."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not result.is_meta:
            self.largest = max(self.largest, result.untyped_storage().nbytes())
        return result


def test_many_beginnings_of_names_cost_no_look_at_all_tensors_each() -> None:
    class Entries(dict[str, None]):
        looks = 0

        def __iter__(self) -> Iterator[str]:
            self.looks += 1
            return super().__iter__()

    mark = "encoder.block.0.layer.0.SelfAttention.q.weight"
    many = Entries.fromkeys(f"copy_{index}.shared.weight" for index in range(500))
    many |= dict.fromkeys(f"copy_{index}.{mark}" for index in range(500))
    found = formats._recognised(many)
    assert [(prefix, layout.kind) for prefix, layout in found] == [("copy_0.", "t5")] and many.looks < 5
    assert not formats._recognised(dict.fromkeys("a." * 150 + name for name in (mark, "shared.weight"))), "too long"
