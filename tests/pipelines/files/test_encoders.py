"""Models of transformers: what upstream's own loading gives, in any thread, with nothing changed that others see."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from anygpu.compat.packages import empty_encoder, fill, names_in
from anygpu.pipelines.base import Silent
from anygpu.pipelines.files.part import part_files
from anygpu.pipelines.load.reading import reader_of
from safetensors.torch import load_file
from simulated.test_families import CASES, loaded_for
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from transformers.utils import logging

CHECKPOINTS = ("ltx", "hunyuan_video", "hunyuan_video_i2v", "hunyuan_video_15", "hunyuan_video_15_i2v")
PATCHED = (nn.init, nn.modules.linear, nn.modules.conv, nn.modules.activation, nn.modules.normalization)
T5 = "T5EncoderModel"


def encoders(tiny_folder: Path) -> Iterator[tuple[str, Path]]:
    """Each class of transformers in the families' checkpoints, and its folder."""
    seen = set()
    for name in CHECKPOINTS:
        for file in sorted(tiny.build(name, tiny_folder).rglob("config.json")):
            cls = next(iter(json.loads(file.read_text()).get("architectures") or ()), "")
            if cls and cls not in seen:
                seen.add(cls)
                yield cls, file.parent


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers under each name that they have."""
    named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    return dict(named)


def require_equal(module: nn.Module, wanted: dict[str, torch.Tensor]) -> None:
    """The same tensors bit for bit, as many of them shared."""
    found = tensors_of(module)
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        assert tensor.dtype == wanted[name].dtype and torch.equal(tensor, wanted[name]), name
    assert len(set(map(id, found.values()))) == len(set(map(id, wanted.values()))), "tied"


def process_wide() -> dict[str, Any]:
    """What upstream's own loading changes for the whole process."""
    functions = {f"{m.__name__}.{k}": v for m in PATCHED for k, v in vars(m).items() if k.endswith("_")}
    base = transformers.PreTrainedModel
    return functions | {
        "linspace": torch.linspace,
        "dtype": torch.get_default_dtype(),
        "tie": base.__dict__["tie_weights"],
        "init": base.__dict__["init_weights"],
        "bars": logging.is_progress_bar_enabled(),
    }


def read(cls: str, folder: Path, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    return reader_of(part_files("text_encoder", "transformers", cls, folder, dtype))(Silent())


@pytest.fixture(scope="module")
def t5(tiny_folder: Path) -> Path:
    return next(folder for cls, folder in encoders(tiny_folder) if cls == T5)


@pytest.mark.parametrize(
    "dtype",
    [*(pytest.param(dtype, marks=pytest.mark.full) for dtype in (torch.float32, torch.float16)), torch.bfloat16],
)
def test_each_class_is_what_upstream_loads(tiny_folder: Path, dtype: torch.dtype) -> None:
    classes = []
    for name, folder in encoders(tiny_folder):
        cls = getattr(transformers, name)
        config = cls.config_class.from_pretrained(str(folder))
        tensors = {key: value for file in folder.glob("*.safetensors") for key, value in load_file(file).items()}
        tensors = {key: value.to(dtype) if value.is_floating_point() else value for key, value in tensors.items()}
        upstream = cls.from_pretrained(None, config=config, state_dict=dict(tensors), dtype=dtype)
        module = empty_encoder(cls, config, dtype)
        assert all(tensor.is_meta for tensor in module.parameters())
        names = names_in(module, tensors)
        assert fill(module, {names[key]: tensors[key] for key in names}, dtype) == []
        wanted = tensors_of(upstream)
        if dtype is torch.bfloat16:  # beside which transformers 5.0 still keeps these in fp32
            wanted = {key: value.to(dtype) if ".wo." in key else value for key, value in wanted.items()}
        require_equal(module, wanted)
        told = {"_name_or_path": None}
        assert module.config.to_dict() | told == upstream.config.to_dict() | told
        classes.append(name)
    assert len(classes) >= 6 and {T5, "LlavaForConditionalGeneration", "CLIPTextModel"} <= {*classes}


def test_nothing_that_other_threads_see_changes_while_a_model_is_built(tiny_folder: Path) -> None:
    before, seen = process_wide(), []
    handle = register_module_module_registration_hook(lambda *_: seen.append(process_wide() == before))
    try:
        for cls, folder in encoders(tiny_folder):
            read(cls, folder)
    finally:
        handle.remove()
    assert len(seen) > 100 and all(seen)
    assert process_wide() == before


def test_two_loads_that_overlap_leave_the_next_one_as_it_was(t5: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that begins first ends first, which leaves upstream's empty ``tie_weights`` in the class for good."""
    wanted, before, original = tensors_of(read(T5, t5)), process_wide(), transformers.T5EncoderModel.__init__
    turn, both, ended, order = threading.Lock(), threading.Event(), threading.Event(), []

    def waiting(self: Any, *args: Any, **kwargs: Any) -> None:
        with turn:
            order.append(threading.get_ident())
        if len(order) == 1:
            assert both.wait(60)
        else:
            both.set()
            assert ended.wait(60)
        original(self, *args, **kwargs)

    def loaded(_: int) -> nn.Module:
        module = read(T5, t5)
        ended.set()
        return module

    monkeypatch.setattr(transformers.T5EncoderModel, "__init__", waiting)
    with ThreadPoolExecutor(2) as threads:
        for module in threads.map(loaded, range(2)):
            require_equal(module, wanted)
    monkeypatch.undo()
    require_equal(read(T5, t5), wanted)
    assert process_wide() == before


@pytest.mark.full
def test_what_another_pack_left_broken_changes_no_load(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty ``tie_weights``, functions that initialise nothing, another default dtype: every part of a pipeline."""
    case = CASES["hunyuan_video_15 image"]
    wanted = {name: tensors_of(part) for name, part in every_part(loaded_for(case, tiny_folder, "cpu")).items()}
    monkeypatch.setattr(transformers.PreTrainedModel, "tie_weights", lambda *_, **__: None)
    for module in PATCHED:
        for name in [name for name in vars(module) if name.endswith("_") and not name.startswith("_")]:
            monkeypatch.setattr(module, name, lambda tensor, *_, **__: tensor)
    torch.set_default_dtype(torch.bfloat16)
    try:
        parts = every_part(loaded_for(case, tiny_folder, "cpu"))
    finally:
        torch.set_default_dtype(torch.float32)
    for name, part in parts.items():
        require_equal(part, wanted[name])


def every_part(pipeline: Any) -> dict[str, nn.Module]:
    """The parts of a pipeline, read."""
    return {name: pipeline.parts.read(name) for name in pipeline.parts.readers}


def test_a_tower_saved_by_itself_has_its_place_under_either_name():
    """transformers before 5.6 keeps the name of a tower in a model that is one tower alone; a file may have either."""
    from transformers import CLIPConfig, CLIPModel, CLIPTextModel

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = CLIPConfig(
        text_config={**sizes, "vocab_size": 8}, vision_config={**sizes, "image_size": 8, "patch_size": 8}
    )
    older, weight = CLIPModel(config), "embeddings.token_embedding.weight"
    assert names_in(older, [weight]) == {weight: f"text_model.{weight}"}
    alone = CLIPTextModel(config.text_config)
    there = weight if weight in alone.state_dict() else f"text_model.{weight}"
    assert [*names_in(alone, [weight, f"text_model.{weight}"]).values()] == [there, there]
