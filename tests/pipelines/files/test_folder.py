"""What is wrong with a model folder is said in one line, before a weight is read."""

import gc
import json
import re
import shutil
import weakref
from pathlib import Path

import pytest
import tiny
import torch
from anygpu.compat import packages
from anygpu.compat.errors import CheckpointError, InputError, MissingPackageError, PackError
from anygpu.pipelines.files.evidence import variant_choices
from anygpu.pipelines.files.models import family_of_folder, find_models, part_folders
from anygpu.pipelines.load import folder as loading
from anygpu.pipelines.load.folder import load
from anygpu.pipelines.registry import FAMILIES
from anygpu.pipelines.requests import LoadRequest
from safetensors.torch import load_file, save_file


@pytest.fixture
def mochi(tiny_folder, tmp_path) -> Path:
    """A copy of a tiny model to damage."""
    return Path(shutil.copytree(tiny.build("mochi", tiny_folder), tmp_path / "mochi"))


def refused(folder: Path, pattern: str, **choices: object) -> PackError:
    """The one-line error that loading ``folder`` raises."""
    with pytest.raises(PackError, match=pattern) as caught:
        load(LoadRequest(folder, device="cpu", **choices))
    assert "\n" not in str(caught.value) and "; expected " in str(caught.value)
    return caught.value


def weights(folder: Path, part: str) -> Path:
    return sorted((folder / part).glob("*.safetensors"))[0]


def test_no_folder(tmp_path):
    refused(tmp_path / "absent", "no model folder")


def test_an_empty_folder(tmp_path):
    refused(tmp_path, "neither model_index.json nor config.json")


def test_an_unknown_family_names_the_known(mochi):
    (mochi / "model_index.json").write_text(json.dumps({"_class_name": "StableDiffusionPipeline"}))
    assert all(family.title in str(refused(mochi, "StableDiffusionPipeline")) for family in FAMILIES.values())


def test_broken_json(mochi):
    (mochi / "model_index.json").write_text("{")
    refused(mochi, r"model_index\.json.*cannot be read")


@pytest.mark.parametrize("part", ["transformer", "vae", "tokenizer", "scheduler"])
def test_a_missing_component(mochi, part, tiny_folder, recorded):
    shutil.rmtree(mochi / part)
    refused(mochi, part)
    assert part_folders(mochi, {"base": tiny_folder / "mochi"}, (), recorded())[1][part] == tiny_folder / "mochi" / part


def test_a_missing_shard(tiny_folder, tmp_path):
    sharded = next(
        index for name in tiny.TINY for index in tiny.build(name, tiny_folder).rglob("*.safetensors.index.json")
    )
    model = Path(shutil.copytree(sharded.parent.parent, tmp_path / "sharded"))
    sorted((model / sharded.parent.name).glob("*-of-*.safetensors"))[-1].unlink()
    refused(model, "shard .* is missing")


def test_a_truncated_file(mochi):
    file = weights(mochi, "vae")
    file.write_bytes(file.read_bytes()[:-16])
    refused(mochi, "cut short")


def test_only_a_pickle(mochi):
    weights(mochi, "vae").rename(mochi / "vae" / "diffusion_pytorch_model.bin")
    refused(mochi, "refused")


@pytest.mark.parametrize("part", ["transformer", "text_encoder"])
@pytest.mark.parametrize("change", ["missing", "a further block", "misshapen"])
def test_weights_that_do_not_fit_are_named(mochi, part, change):
    file = weights(mochi, part)
    tensors = load_file(file)
    name = max(tensors, key=lambda n: tensors[n].numel())
    if change == "missing":
        del tensors[name]
    elif change == "a further block":
        further = (re.sub(r"\.\d+\.", ".99.", known) for known in tensors if re.search(r"\.\d+\.", known))
        tensors[next(further, "one.too.many")] = torch.zeros(1)
    else:
        tensors[name] = torch.zeros(3, 5)
    save_file(tensors, file, {"format": "pt"})
    pipeline = load(LoadRequest(mochi, device="cpu"))
    if part == "text_encoder" and change == "a further block":
        assert pipeline.parts[part] is not None  # transformers keeps what other classes need in its files: allowed
        return
    with pytest.raises(CheckpointError, match=part):
        pipeline.parts[part]


@pytest.mark.parametrize("part", ["transformer", "vae"])
def test_a_tensor_too_many_is_left_out_and_said(mochi, part, recorded):
    theirs, file = load(LoadRequest(mochi, device="cpu")).parts[part].state_dict(), weights(mochi, part)
    save_file({**load_file(file), "one.too.many": torch.ones(1)}, file, {"format": "pt"})
    progress = recorded()
    ours = load(LoadRequest(mochi, device="cpu")).parts.read(part, progress).state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert any(line.startswith(f"{part}: ") and "'one.too.many'" in line for line in progress.said)


def test_a_part_of_another_class_is_refused(mochi):
    index = json.loads((mochi / "model_index.json").read_text())
    index["_class_name"] = "HunyuanVideoPipeline"
    (mochi / "model_index.json").write_text(json.dumps(index))
    refused(mochi, "no text_encoder_2 for")


def test_an_unknown_variant_names_the_known(mochi):
    refused(mochi, "variant 'framepack_f1' for Mochi 1", variant="framepack_f1")


def test_framepack_says_what_it_lacks(tiny_folder, tmp_path):
    model = Path(shutil.copytree(tiny.build("framepack", tiny_folder), tmp_path / "FramePackI2V_HY"))
    refused(model, "no base found for FramePack")


def test_framepack_finds_its_lenders_beside_it_and_says_so(tiny_folder, tmp_path, recorded):
    for name, folder in (("framepack_f1", "FramePack_F1"), ("hunyuan_video", "HunyuanVideo"), ("siglip", "redux")):
        (tmp_path / folder).symlink_to(tiny.build(name, tiny_folder), target_is_directory=True)
    progress = recorded()
    pipeline = load(LoadRequest(tmp_path / "FramePack_F1", device="cpu"), progress)
    assert pipeline.variant == "framepack_f1"
    said = "\n".join(progress.said)
    assert "HunyuanVideo (auto)" in said and "redux (auto)" in said


def test_a_base_that_the_user_named_is_asked_for_the_image_encoder_alone_too(tiny_folder, tmp_path, recorded):
    model, lender = tmp_path / "model", tiny.build("siglip", tiny_folder)
    shutil.copytree(tiny.build("hunyuan_video_15_i2v", tiny_folder), model)
    shutil.rmtree(model / "image_encoder")
    progress = recorded()
    _, folders = part_folders(model, {"base": lender}, [], progress)
    assert folders["image_encoder"] == lender / "image_encoder" and progress.said == [f"base from {lender.name}"]


@pytest.mark.parametrize("name", sorted(set(tiny.TINY) - {"siglip"}))
def test_each_layout_is_recognised(tiny_folder, name):
    family = family_of_folder(tiny.build(name, tiny_folder))
    assert family is not None and name.startswith(family.id)


def test_models_are_found_in_nested_folders_once(tiny_folder, tmp_path):
    (tmp_path / "vendor").mkdir()
    (tmp_path / "vendor" / "mochi").symlink_to(tiny.build("mochi", tiny_folder), target_is_directory=True)
    (tmp_path / "loop").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "itself.safetensors").symlink_to("itself.safetensors")
    (tmp_path / ".cache").mkdir()
    assert find_models([tmp_path, tmp_path]) == [tmp_path / "vendor" / "mochi"]


def test_nothing_is_read_until_a_stage_needs_it(mochi):
    assert list(load(LoadRequest(mochi, device="cpu")).parts) == []


def test_dtypes_are_explicit_whatever_the_file_says(tiny_folder, tmp_path):
    """diffusers reads a bf16 folder as fp32 and transformers as bf16, which meet in one matrix product."""
    model = tiny.build("mochi", tmp_path, dtype=torch.bfloat16)
    pipeline = load(LoadRequest(model, device="cpu", precision="fp32"))
    assert {p.dtype for part in ("transformer", "text_encoder", "vae") for p in pipeline.parts[part].parameters()} == {
        torch.float32
    }


@pytest.fixture(scope="module")
def published_t5(tmp_path_factory) -> Path:
    """A T5 tokenizer folder as the LTX-Video and Mochi pages have it: ``spiece.model``, no ``tokenizer.json``."""
    sentencepiece = pytest.importorskip("sentencepiece")
    made = tmp_path_factory.mktemp("t5")
    sentence = "a cat walks on the grass realistic highly detailed quick brown fox jumps over the lazy dog"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentence.split() * 20),
        model_prefix=str(made / "spiece"),
        vocab_size=60,
        hard_vocab_limit=False,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        minloglevel=2,
    )
    (made / "spiece.vocab").unlink()
    settings = {"tokenizer_class": "T5Tokenizer", "extra_ids": 100, "model_max_length": 128}
    (made / "tokenizer_config.json").write_text(json.dumps(settings))
    return made


def test_a_published_t5_tokenizer_loads(mochi, published_t5):
    shutil.rmtree(mochi / "tokenizer")
    shutil.copytree(published_t5, mochi / "tokenizer")
    tokenizer = load(LoadRequest(mochi, device="cpu")).tools["tokenizer"]
    assert (
        tokenizer.decode(tokenizer("a quick brown fox")["input_ids"], skip_special_tokens=True) == "a quick brown fox"
    )


def test_a_damaged_tokenizer_is_one_line(mochi, published_t5):
    shutil.rmtree(mochi / "tokenizer")
    shutil.copytree(published_t5, mochi / "tokenizer")
    (mochi / "tokenizer" / "spiece.model").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(PackError, match="tokenizer") as caught:
        load(LoadRequest(mochi, device="cpu")).tools["tokenizer"]
    assert "\n" not in str(caught.value)


def test_variants_are_one_list():
    assert variant_choices()[0] == "auto" and len(set(variant_choices())) == len(variant_choices())


def test_a_missing_package_names_itself_and_the_command(monkeypatch):
    with pytest.raises(MissingPackageError, match="python -m pip install -U no_such_package"):
        packages.imported("no_such_package")

    def broken(name: str) -> None:
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr(packages.importlib, "import_module", broken)
    with pytest.raises(MissingPackageError, match="Reinstall torchvision"):
        packages.imported("diffusers")
    absent = ModuleNotFoundError("No module named 'torchvision'", name="torchvision")
    said = str(packages.unusable("transformers", absent))
    assert "because torchvision is missing" in said and "uninstall" not in said


def test_a_package_that_a_tokenizer_lacks_is_named_and_transformers_is_not_blamed(mochi, monkeypatch):
    def lacks(*given, **named):
        raise ImportError("\nT5Tokenizer requires the SentencePiece library but it was not found.\n")

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lacks)
    with pytest.raises(MissingPackageError, match=r"tokenizer' .*\(T5Tokenizer requires the SentencePiece") as caught:
        load(LoadRequest(mochi, device="cpu")).tools["tokenizer"]
    assert "install -U transformers" not in str(caught.value)


def test_wrong_choices_are_one_line(mochi):
    refused(mochi, "precision 'int3'", precision="int3")
    with pytest.raises(InputError, match="offload 'half'"):
        load(LoadRequest(mochi, device="cpu", offload="half"))


def test_host_memory_that_a_former_pipeline_left_is_counted(monkeypatch):
    """Blocks that refer to themselves hold theirs until somebody looks; nobody does where there is enough."""
    given: list[bool] = []
    monkeypatch.setattr(loading, "empty_host_cache", lambda: given.append(True))
    gc.disable()
    left = torch.nn.Linear(1, 1)
    left.forward = left.forward
    seen = weakref.ref(left)

    def free() -> int:
        return 10 if seen() is not None else 110

    try:
        del left
        assert (loading._host_room(10, free), given) == (10, [])
        assert (loading._host_room(100, free), given) == (110, [True])
    finally:
        gc.enable()
