"""Damaged and hostile files: one line with the right remedy, and nothing from a folder is ever executed."""

import ast
import gzip
import json
import os
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from anygpu.compat.checkpoints.gguf_file import gguf_header
from anygpu.compat.checkpoints.headers import entries_and_notes
from anygpu.compat.checkpoints.latents import read_record, write_record
from anygpu.compat.checkpoints.quantised import with_scales
from anygpu.compat.checkpoints.weights import read_json, read_tensors, weight_files, write_tensors
from anygpu.compat.errors import CheckpointError, PackError, json_file, json_within
from anygpu.compat.repairs import FP32, Repair, RepairStore
from anygpu.pipelines import movie, stages
from anygpu.pipelines.base import Prompt, PromptRequest, Silent
from anygpu.pipelines.files import catalogue, download
from anygpu.pipelines.files.evidence import Evidence
from anygpu.pipelines.latents import musubi
from anygpu.pipelines.latents.prompt_files import load_prompt
from anygpu.pipelines.latents.store import load_latent
from anygpu.pipelines.load.folder import load
from anygpu.pipelines.movie import read_frames, write_mp4
from anygpu.pipelines.registry import FAMILIES
from anygpu.pipelines.requests import LoadRequest
from test_layers import SHIPPED, nodes_of

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 123456789\n"
DAMAGED = {  # what is in a file called .safetensors, and what its error must not blame on permissions
    "pointer": POINTER,
    "web page": b"<!DOCTYPE html><html><body>404</body></html>",
    "pickle": b"\x80\x02}q\x00.",
    "zip": b"PK\x03\x04" + bytes(64),
    "empty": b"",
    "header cut off": (1000).to_bytes(8, "little") + b'{"a": {',
    "gguf": b"GGUF" + bytes(64),
    "gzip": gzip.compress(bytes(1000)),
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_called_damaged(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        entries_and_notes(path)
    assert "model.safetensors" in caught.value.found and caught.value.expected
    assert "permissions" not in caught.value.fix and "cannot be read" not in caught.value.found
    assert not isinstance(caught.value.__cause__, PackError), "its own error, wrapped again"


LONG_NAME = b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**30)


@pytest.mark.parametrize("content", [b"", b"GGUF", POINTER, LONG_NAME], ids=["empty", "cut off", "pointer", "name"])
def test_a_damaged_gguf_is_called_damaged(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    if content is LONG_NAME:
        os.truncate(path, 2**31)  # the name would fit into the file
    with pytest.raises(CheckpointError) as caught:
        gguf_header(path)
    assert "permissions" not in caught.value.fix and not isinstance(caught.value.__cause__, PackError)


def test_a_file_that_changed_since_its_header_says_so(tmp_path: Path) -> None:
    path = write_tensors(tmp_path / "model.safetensors", {"a": torch.zeros(4)}, {})
    entries = entries_and_notes(path)[0]
    write_tensors(path, {"a": torch.zeros(5)}, {})
    with pytest.raises(CheckpointError) as caught:
        read_tensors(entries, torch.float32, lambda _count: None)
    assert "changed since its header was read" in caught.value.found
    assert caught.value.fix == "Wait until it has been written, then load it again."
    assert path.stat().st_mode & 0o044, "others may read it, as any file"


def test_code_in_a_model_folder_is_not_run(tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for entry in tiny.build("ltx", tiny_folder).iterdir():
        if entry.name != "tokenizer":
            (folder / entry.name).symlink_to(entry)
    (folder / "tokenizer").mkdir()
    marker = tmp_path / "ran"
    for entry in (tiny.build("ltx", tiny_folder) / "tokenizer").iterdir():
        (folder / "tokenizer" / entry.name).write_bytes(entry.read_bytes())
    config = folder / "tokenizer" / "tokenizer_config.json"
    content = json.loads(config.read_text(encoding="utf-8"))
    content |= {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}}
    config.write_text(json.dumps(content), encoding="utf-8")
    (folder / "tokenizer" / "evil.py").write_text(
        f"from pathlib import Path\nPath({str(marker)!r}).touch()\nclass Evil: pass\n", encoding="utf-8"
    )
    monkeypatch.setattr("builtins.input", lambda *_: "yes")  # what transformers asks on a terminal
    pipeline = load(LoadRequest(folder, device="cpu"), Silent())
    try:
        stages.encode_prompt(pipeline, PromptRequest("a fox"), Silent())
    except CheckpointError as error:
        assert "tokenizer" in error.found
    assert not marker.exists()


def test_every_reader_of_a_folder_is_told_not_to_run_its_code() -> None:
    calls = [
        (source, node)
        for source in SHIPPED
        for node in nodes_of(source)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "from_pretrained"
        and "Embedding" not in ast.unparse(node.func)
        and not (isinstance(node.args[0], ast.Constant) and node.args[0].value is None)  # made from tensors in memory
    ]
    told = [ast.unparse(word) for _, node in calls for word in node.keywords if word.arg == "trust_remote_code"]
    assert len(calls) > 2 and told == ["trust_remote_code=False"] * len(calls), [source for source, _ in calls]


@pytest.mark.parametrize(
    "reader", [entries_and_notes, gguf_header, lambda path: read_json(path, "a file"), read_frames]
)
def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path: Path, reader: Any) -> None:
    if not hasattr(os, "mkfifo"):
        pytest.skip("needs named pipes")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError) as caught:
        reader(tmp_path / "pipe")
    assert "is a pipe or a device" in caught.value.found and caught.value.expected == "a file"


@pytest.mark.parametrize("name", ["list.m3u8", "list.ffconcat", "list.mp4"])
def test_a_playlist_opens_no_other_file(tmp_path: Path, name: str) -> None:
    """As --video: with a path, libav would read every file that the list names, whoever it belongs to."""
    secret = write_mp4(torch.zeros(2, 32, 32, 3), 8.0, tmp_path / "secret.ts")
    lists = {"m3u8": f"#EXTM3U\n#EXTINF:1,\n{secret}\n#EXT-X-ENDLIST\n"}
    lists |= {"ffconcat": f"ffconcat version 1.0\nfile {secret.name}\n", "mp4": lists["m3u8"]}
    (tmp_path / name).write_text(lists[name.rpartition(".")[2]], encoding="utf-8")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_frames(tmp_path / name)


@pytest.mark.parametrize("kind", ["mp4", "png"])
def test_a_length_beyond_the_file_takes_no_memory(tmp_path: Path, kind: str) -> None:
    """Python makes a buffer of what is asked for before it reads: 34 GB for a table of 2^32 entries."""
    most, path = 2**32 - 1, tmp_path / f"a.{kind}"
    boxes = {"mp4": (">I4sQ", 1, b"stts", 2**40 + most), "png": (">8sI4s", b"\x89PNG\r\n\x1a\n", most, b"IDAT")}
    path.write_bytes(struct.pack(*boxes[kind]))
    tracemalloc.start()
    try:
        with path.open("rb") as file:
            movie._require_samples(path) if kind == "mp4" else movie._without_texts(file.read())
        assert tracemalloc.get_traced_memory()[1] < 10**6
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("shape", "scale"),
    [((0, 4), (1,)), ((), (4,)), ((4, 0), (4,)), ((4, 4), (0,))],
    ids=["rows", "scalar", "columns", "none"],
)
def test_a_scale_of_a_weight_without_values_is_refused(tmp_path: Path, shape: Any, scale: Any) -> None:
    tensors = {"a.weight": torch.zeros(shape, dtype=torch.float8_e4m3fn), "a.scale_weight": torch.ones(scale)}
    path = write_tensors(tmp_path / "a.safetensors", tensors, {})
    with pytest.raises(CheckpointError, match=r"fits no weight 'a\.weight'"):
        with_scales(entries_and_notes(path)[0], {}, path)


RECORD = {"kind": "latent", "family": "ltx", "task": "text", "frames": 9, "height": 32, "width": 32, "fps": 8.0}
RECORD |= {"seed": 1, "space": "vae", "version": 1, "shape": [1, 4, 2, 1, 1]}
WRONG = {
    "fps": ["fast", None, float("nan"), -1, True, [8], 10**310],
    "extra": [
        {"generator_state": "no hex"},
        {"generator_state": "abc"},
        {"section_lengths": "x"},
        {"window": "9"},
        *({"section_lengths": [1, 2], "window": window} for window in (0, -1, float("nan"))),
        *({"section_lengths": lengths, "window": 1} for lengths in ([2, 1], [0])),
        {"section_lengths": [2]},
        *({"first_size": sides} for sides in (3, [8], [0, 8], [8, "8"])),
        *({"tone_map": share} for share in ("x", -1, 2)),
    ],
    "family": [3, None],
}


@pytest.mark.parametrize(
    ("changed", "dtype", "words"),
    [({name: value}, torch.float32, f"is wrong about {name}") for name, values in WRONG.items() for value in values]
    + [({}, dtype, "latents of ") for dtype in (torch.float8_e4m3fn, torch.int64, torch.bool)],  # as no sampler makes
)
def test_edited_latents_name_what_is_wrong(tmp_path: Path, changed: Any, dtype: torch.dtype, words: str) -> None:
    path = tmp_path / "a.safetensors"
    write_record(path, {"latent_tensor": torch.zeros(1, 4, 2, 1, 1).to(dtype)}, {**RECORD, **changed})
    with pytest.raises(CheckpointError, match=words):
        load_latent(path, lambda _: None)


def test_a_prompt_of_a_million_million_sections_is_refused_at_once(tmp_path: Path) -> None:
    record = {"kind": "prompt", "version": 1, "family": "ltx", "sections": 10**12}
    write_record(tmp_path / "a.safetensors", {"embeds.prompt_embeds": torch.ones(1, 4, 32)}, record)
    with pytest.raises(CheckpointError, match="has no usable number of sections"):
        load_prompt(tmp_path / "a.safetensors", lambda _: None)


DEEP = "[" * 100_000  # deeper than a reader of JSON goes


@pytest.mark.parametrize(
    "text", ["3", '{"m": 3}', '{"m": [1, "x", {"way": "fp32"}]}', '{"m": [{"layer": "a", "way": {}}]}', DEEP]
)
def test_repairs_that_somebody_edited_are_no_repairs(tmp_path: Path, text: str) -> None:
    store = RepairStore(tmp_path)
    assert store.path is not None
    store.path.write_text(text, encoding="utf-8")
    assert store.load("m") == ()
    store.add("m", Repair("a.b", FP32))
    assert store.load("m") == (Repair("a.b", FP32),)


@pytest.mark.parametrize("text", ["3", '{"fetched": [], "files": 1.5}', '{"fetched": [3], "files": {}}', DEEP])
def test_a_note_of_what_was_fetched_that_somebody_edited_counts_for_nothing(tmp_path: Path, text: str) -> None:
    model = next(iter(catalogue.offers().values())).downloads[0]
    (tmp_path / download.NOTE).parent.mkdir(parents=True)
    (tmp_path / download.NOTE).write_text(text, encoding="utf-8")
    (tmp_path / "a.json").write_text("{}", encoding="utf-8")
    assert not download.is_checked(tmp_path, model)
    download._note(tmp_path, model, {"a.json": 2})
    assert download.is_checked(tmp_path, model)


def test_a_shard_whose_name_no_file_can_have_is_missing(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "é" * 300}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(CheckpointError, match="of the transformer is missing"):
        weight_files(tmp_path, "transformer")


@pytest.mark.parametrize(("name", "shape"), [("llm_float32", (5,)), ("llm_mask", (4,)), ("clipL_float32", (1, 2, 8))])
def test_a_text_cache_of_other_shapes_is_named(tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    embeds = {"prompt_embeds": torch.randn(1, 5, 16), "pooled_prompt_embeds": torch.randn(1, 8)}
    path = musubi.save_text_cache(tmp_path, "clip", Prompt("hunyuan_video", embeds))
    tensors, metadata = read_record(path, "a prompt")
    assert name in tensors
    write_tensors(path, {**tensors, name: torch.ones(shape)}, metadata)
    with pytest.raises(CheckpointError, match=r"expected embeddings \(N, D\), and a mask of N tokens"):
        load_prompt(path, lambda _: None)


@pytest.mark.parametrize("steps", ["3", '{"a": 1}', DEEP])
def test_a_note_of_another_type_says_nothing_of_the_variant(steps: str) -> None:
    ltx = FAMILIES["ltx"].code
    note = Evidence({"config": f'{{"allowed_inference_steps": {steps}}}'})
    assert ltx.guess_variant(note) == ltx.guess_variant(Evidence())


def test_no_reader_of_json_is_ended_by_its_depth() -> None:
    """The one place where shipped files read JSON of others has a budget; two others read what this pack wrote."""
    own = {("pipelines/files/evidence.py", "published"), ("pipelines/files/formats.py", "_shapes")}
    places = set()
    for source in SHIPPED:
        functions = [node for node in nodes_of(source) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
        for function in functions if any(map(_reads_json, nodes_of(source))) else ():
            places |= {(source, function.name) for call in ast.walk(function) if _reads_json(call)}
    assert places == own | {("compat/errors.py", "json_within")}
    with pytest.raises(ValueError, match="nested too deeply"):
        json_within("[" * 100_000, "it")


def _reads_json(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    return node.func.attr in ("loads", "load") and ast.unparse(node.func.value) == "json"


def test_a_small_file_asks_for_little_memory(tmp_path):
    (tmp_path / "config.json").write_text('{"a": 1}', encoding="utf-8")
    tracemalloc.start()
    try:
        assert json_file(tmp_path / "config.json") == {"a": 1}
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("read", [lambda path: entries_and_notes(path), lambda path: read_json(path, "settings")])
def test_json_that_is_too_deep_is_refused_in_one_line(tmp_path: Path, read: Any) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(DEEP).to_bytes(8, "little") + DEEP.encode())
    with pytest.raises(CheckpointError):
        read(path)
