"""config.json against the file's tensors and the published configurations: one line at once, whatever it asks for."""

import json
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from anygpu.compat.errors import CheckpointError, UnsupportedError
from anygpu.pipelines import stages
from anygpu.pipelines.base import PromptRequest, Silent
from anygpu.pipelines.files.part import construction, empty_weights, require_plausible
from anygpu.pipelines.load import reading
from anygpu.pipelines.load.folder import load
from anygpu.pipelines.requests import LoadRequest


@pytest.fixture
def edited(tiny_folder: Path, tmp_path: Path):
    """Makes a copy of a tiny model with values of one JSON file replaced; weights are links."""

    def edit(file: str, **values: Any) -> Path:
        folder = tmp_path / "model"
        shutil.copytree(tiny.build("ltx", tiny_folder), folder)
        path = folder / file
        path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | values), encoding="utf-8")
        return folder

    return edit


def read(folder: Path, name: str) -> Any:
    return load(LoadRequest(folder, device="cpu"), Silent()).parts.read(name)


@pytest.mark.parametrize(
    ("file", "values"),
    [
        ("transformer/config.json", {"num_layers": "4"}),
        ("transformer/config.json", {"num_layers": 10**9}),
        ("transformer/config.json", {"attention_head_dim": -8}),
        ("transformer/config.json", {"norm_eps": float("nan")}),
        ("transformer/config.json", {"patch_size": True}),
        ("vae/config.json", {"block_out_channels": [8] * 10**4}),
        ("vae/config.json", {"scaling_factor": [1.0]}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_values_that_no_published_model_has_are_named_before_anything_is_read(edited, file, values) -> None:
    with pytest.raises(CheckpointError) as caught:
        load(LoadRequest(edited(file, **values), device="cpu"), Silent())
    assert caught.value.found.startswith(f"{next(iter(values))} ") and "config.json" in caught.value.found
    assert caught.value.expected.startswith("a value such as")


def test_what_published_models_differ_in_is_left_alone() -> None:
    rows = [{"a": None, "b": 1, "c": 0.1, "d": [1, 2], "e": None}, {"a": 8, "b": 2}]
    for config in (
        {"a": None},
        {"a": 4},
        {"b": 0},
        {"b": 3.0},
        {"c": None},
        {"c": 0},
        {"d": [3]},
        {"e": "x"},
        {"f": 1},
    ):
        require_plausible("vae", Path("config.json"), config, rows)


def test_more_layers_than_the_file_has_end_at_once(edited, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "read_tensors", lambda *_: pytest.fail("weights were read first"))
    folder = edited("transformer/config.json", num_layers=20_000)
    built = []
    monkeypatch.setattr(torch.nn.Linear, "__init__", counting(torch.nn.Linear.__init__, built))
    with pytest.raises(CheckpointError, match="describes more parameters than its weights have"):
        read(folder, "transformer")
    assert len(built) < 500


def counting(original: Any, calls: list[int]) -> Any:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        calls.append(1)
        original(self, *args, **kwargs)

    return init


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"num_layers": 1}, "unexpected tensors"),
        ({"caption_channels": 64}, "do not fit its config.json"),
        ({"qk_norm": "none of these"}, "cannot be built from its config.json"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_another_configuration_is_noticed_before_weights_are_read(edited, monkeypatch, values, words) -> None:
    monkeypatch.setattr(reading, "read_tensors", lambda *_: pytest.fail("weights were read first"))
    with pytest.raises(CheckpointError, match=words):
        read(edited("transformer/config.json", **values), "transformer")


def test_channels_that_no_memory_could_hold_are_the_configurations_fault(edited) -> None:
    folder = edited("vae/config.json", block_out_channels=[10**6, 10**6, 16, 16])
    with pytest.raises(CheckpointError, match=r"cannot be built from its config.json \(.*allocate"):
        read(folder, "vae")


def test_a_tokenizer_of_a_thousand_million_words_is_refused(edited) -> None:
    pipeline = load(LoadRequest(edited("tokenizer/tokenizer_config.json", extra_ids=10**9), device="cpu"), Silent())
    with pytest.raises(CheckpointError, match=r"extra_ids 1000000000 in .*tokenizer_config.json"):
        stages.encode_prompt(pipeline, PromptRequest("a fox"), Silent())


def test_a_scheduler_that_makes_no_sense_is_one_line(edited) -> None:
    with pytest.raises(CheckpointError, match="base_shift 'x' of the scheduler"):
        load(LoadRequest(edited("scheduler/scheduler_config.json", base_shift="x"), device="cpu")).tools["scheduler"]


def test_building_is_cancelled_in_the_thread_that_builds() -> None:
    class Cancelled(BaseException):
        pass

    def check() -> None:
        if time.monotonic() - started > 0.2:
            raise Cancelled

    def elsewhere() -> None:
        for _ in range(1000):
            torch.nn.Linear(1, 1)

    started, other = time.monotonic(), threading.Thread(target=elsewhere)
    with pytest.raises(Cancelled), construction("transformer", Path("model"), 10**9, check):
        other.start()
        other.join()  # which counts for nothing here
        while True:
            torch.nn.Linear(1, 1, device="meta")


def test_what_other_threads_build_meanwhile_has_its_weights() -> None:
    """A forecast that builds a model without weights must not take those of the model that is being loaded."""
    entered, left, seen = threading.Event(), threading.Event(), []

    def overlapping() -> None:
        with empty_weights():
            seen.append(torch.nn.Linear(1, 1).weight.is_meta)
            entered.set()
            left.wait(10)

    other = threading.Thread(target=overlapping)
    with empty_weights():
        other.start()
        entered.wait(10)
        seen.append(torch.nn.Linear(1, 1).weight.is_meta)
    seen.append(torch.nn.Linear(1, 1).weight.is_meta)  # while the other one is at it
    left.set()
    other.join()
    seen.append(torch.nn.Linear(1, 1).weight.is_meta)
    assert seen == [True, True, False, False]


def test_what_nobody_foresaw_is_one_line_with_its_cause(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = load(LoadRequest(tiny.build("ltx", tiny_folder), device="cpu"), Silent())
    monkeypatch.setattr(pipeline.spec.code, "encode_prompt", lambda *_: [][1])
    with pytest.raises(UnsupportedError, match="IndexError while encoding the prompt with 'ltx'") as caught:
        stages.encode_prompt(pipeline, PromptRequest("a fox"), Silent())
    assert isinstance(caught.value.__cause__, IndexError)
