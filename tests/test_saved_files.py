"""The lists of the load nodes, and the names of the save nodes: nothing outside ComfyUI's folders can be meant."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from anygpu.compat.checkpoints.latents import write_record
from anygpu.compat.errors import CheckpointError, InputError
from anygpu.pipelines.base import RECEIPT, Latents, Prompt
from anygpu.pipelines.latents.convert import KEY, to_core
from anygpu.pipelines.latents.prompt_files import load_prompt, save_prompt
from anygpu.pipelines.latents.store import load_latent, save_latent
from small_comfyui import comfyui

RECORDS = {"latent": {"kind": "latent"}, "prompt": {"kind": "prompt"}}


@pytest.fixture
def saved(tmp_path: Path) -> Iterator[Any]:
    """``host/saved.py`` on a ComfyUI whose folders are below ``tmp_path``."""
    with comfyui(tmp_path) as module:
        yield module("host.saved")


def put(path: Path, kind: str) -> Path:
    return write_record(path, {"x": torch.zeros(2)}, RECORDS[kind])


def test_files_are_listed_by_what_they_are_and_found_by_name_only(saved: Any, tmp_path: Path) -> None:
    assert saved.choices("latent") == ["no latent file found"]
    mine = put(tmp_path / "output" / "latents" / "a_00001_.safetensors", "latent")
    put(tmp_path / "output" / "prompts" / "a_00001_.safetensors", "prompt")
    other = put(tmp_path / "input" / "b.safetensors", "latent")
    (tmp_path / "input" / "weights.safetensors").write_bytes(b"not a file of ours")
    secret = put(tmp_path / "secret.safetensors", "latent")
    assert set(saved.choices("latent")) == {"b.safetensors", "latents/a_00001_.safetensors [output]"}
    assert saved.choices("prompt") == ["prompts/a_00001_.safetensors [output]"]
    assert saved.file_named("latent", "b.safetensors") == other
    assert saved.file_named("latent", "latents/a_00001_.safetensors [output]") == mine
    for name in ("../secret.safetensors", str(secret), "../secret.safetensors [output]", "no latent file found", ""):
        with pytest.raises(CheckpointError):
            saved.file_named("latent", name)
    assert saved.stamp("latent", "b.safetensors") != saved.stamp("latent", "gone") == ("gone", 0, 0)


def test_a_loop_of_links_ends(saved: Any, tmp_path: Path) -> None:
    put(tmp_path / "output" / "deep" / "wan2.2" / "a.safetensors", "latent")  # a suffix, by its name
    put(tmp_path / "output" / ".hidden" / "a.safetensors", "latent")
    deep = put(saved.new_path("a/b/c/d/e/x"), "prompt")  # wherever a save node writes, a load node finds it
    assert saved.choices("prompt") == [f"{deep.relative_to(tmp_path / 'output').as_posix()} [output]"]
    (tmp_path / "output" / "deep" / "up").symlink_to(tmp_path / "output", target_is_directory=True)
    (tmp_path / "output" / "self").symlink_to(tmp_path / "output" / "self")
    assert saved.choices("latent") == ["deep/wan2.2/a.safetensors [output]"]


def test_nothing_is_overwritten(saved: Any, tmp_path: Path) -> None:
    first = saved.new_path("latents/test")
    assert first == tmp_path / "output" / "latents" / "test_00001_.safetensors"
    put(first, "latent")
    put(first.with_name("test_00007_.safetensors"), "latent")
    put(first.with_name("testing_00009_.safetensors"), "latent")
    assert saved.new_path("latents/test").name == "test_00008_.safetensors"
    assert saved.ui_record(first) == {"filename": first.name, "subfolder": "latents", "type": "output"}
    assert saved.shown(first) == "output/latents/test_00001_.safetensors"


@pytest.mark.parametrize("prefix", ["../a", "/etc/a", "a/../../b", "", "folder/", "a\0b", "."])
def test_a_prefix_stays_in_the_output_folder(saved: Any, prefix: str) -> None:
    with pytest.raises(InputError, match="filename_prefix"):
        saved.new_path(prefix)


def test_a_refused_name_is_called_as_its_input(saved: Any) -> None:
    with pytest.raises(InputError, match=r"^name '\.\./a'"):
        saved.target_folder("../a", "name")


def test_a_prefix_through_links_is_refused_where_they_lead_out_or_nowhere(saved: Any, tmp_path: Path) -> None:
    (tmp_path / "output").mkdir(exist_ok=True)
    (tmp_path / "output" / "out").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "output" / "loop").symlink_to(tmp_path / "output" / "loop", target_is_directory=True)
    for prefix in ("out/x", "loop/x"):
        with pytest.raises(InputError, match=f"filename_prefix '{prefix}'"):
            saved.new_path(prefix)


def test_an_output_folder_that_is_a_link(saved: Any, tmp_path: Path) -> None:
    (tmp_path / "output").rename(tmp_path / "elsewhere")
    (tmp_path / "output").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    path = put(saved.new_path("a"), "latent")
    assert saved.ui_record(path)["subfolder"] == ""
    (tmp_path / "elsewhere" / "out").symlink_to(tmp_path, target_is_directory=True)
    with pytest.raises(InputError, match="filename_prefix"):
        saved.new_path("out/a")


def test_the_workflow_is_in_the_metadata_unless_comfyui_was_told_otherwise(saved: Any) -> None:
    origin = saved.origin({"1": {}}, {"workflow": {"nodes": []}})
    assert dict(origin.metadata) == {"prompt": '{"1": {}}', "workflow": '{"nodes": []}'}
    saved.args.disable_metadata = True
    assert not saved.origin({"1": {}}, {}).metadata


@pytest.mark.parametrize("shared", [True, False])
def test_a_file_says_what_was_prompted_unless_comfyui_was_told_otherwise(saved: Any, shared: bool) -> None:
    """Latents that were loaded bring a receipt that an earlier ComfyUI signed."""
    saved.args.disable_metadata = shared
    origin, texts = (
        saved.origin({"1": {"text": "a fox"}}, {}),
        {"prompt": "a fox", "negative": "fox", RECEIPT: {"p": "fox"}},
    )
    latents = Latents(torch.zeros(1, 16, 1, 2, 2), "ltx", "text", 9, 64, 64, 25.0, 1, extra={**texts, "other": "kept"})
    prompt = Prompt("ltx", {"embeds": torch.zeros(1, 2, 4)}, extra={"text": "a fox", "negative_text": "fox"})
    files = [save_latent(saved.new_path("l"), to_core(latents), print, origin=origin)]
    files += [save_prompt(saved.new_path("p"), prompt, origin)]
    assert [b"fox" in path.read_bytes() for path in files] == [not shared] * 2 and b"kept" in files[0].read_bytes()
    assert load_prompt(files[1], print).extra.get("text", "") == ("" if shared else "a fox")
    assert set(load_latent(files[0], print)[KEY]["extra"]) == {"other"} | (set() if shared else set(texts))


def test_a_name_that_no_file_system_takes_is_refused_in_one_line(saved: Any) -> None:
    with pytest.raises(InputError, match=r"a name of 300 bytes; expected at most 200 bytes\. Shorten it\."):
        saved.target_folder("latents/" + "x" * 300)
    assert saved.target_folder("latents/" + "x" * 200)[1] == "x" * 200


def test_a_prefix_has_the_dates_of_core_s_save_nodes(saved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    strftime, moment = time.strftime, (2026, 3, 4, 5, 6, 7, 2, 63, 0)
    monkeypatch.setattr(time, "strftime", lambda form: strftime(form, moment))
    folder, name = saved.target_folder("%year%-%month%-%day%/%hour%%minute%%second%_a%b")
    assert (folder.name, name) == ("2026-03-04", "050607_a%b")
