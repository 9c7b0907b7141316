"""The registry's archive alone, attached to a real ComfyUI: the nodes that were written down, and a clip per family."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import archive
import pytest
import schemas
import torch
from anygpu.pipelines.demo.scenes import scene_of

from host import paint_models
from host.client import Client
from host.prompts import WORKFLOWS, pictured, replay, shrunk
from host.server import Server, served
from host.videos import pictures

pytestmark = pytest.mark.host
TEMPLATES = (
    "anygpu_ltx_text_to_video", "anygpu_hunyuan_video_text_to_video", "anygpu_hunyuan_video_15_text_to_video",
    "anygpu_framepack_image_to_video", "anygpu_mochi_text_to_video",
)  # fmt: skip


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Iterator[Server]:
    """A server of this file alone, without models, that loads the unpacked archive."""
    pack = archive.unpacked(tmp_path_factory.mktemp("archive"))
    with served(tmp_path_factory.mktemp("alone"), tiny_folder, pack=pack) as running:
        yield running


def widget(known: list[Any]) -> dict[str, Any]:
    """An input as ``/object_info`` has it, in the words of the snapshot."""
    given = known[1] if len(known) > 1 else {}
    return {name: given[name] for name in ("default", "min", "max", "step", "advanced") if given.get(name) is not None}


def test_comfyui_has_the_nodes_that_were_written_down(alone: Server) -> None:
    known = Client(alone.url).get("/object_info")
    written = json.loads(schemas.SNAPSHOT.read_text(encoding="utf-8"))
    assert {name for name in known if name.startswith("AnyGPU")} == set(written)
    for node_id, schema in written.items():
        there = known[node_id]["input"]
        for kind, is_optional in (("required", False), ("optional", True)):
            inputs = [item for item in schema["inputs"] if item.get("optional", False) == is_optional]
            assert list(there.get(kind, {})) == [item["name"] for item in inputs], node_id
            for item in inputs:
                found = widget(there[kind][item["name"]])
                assert found == {name: item[name] for name in found if name in item}, (node_id, item["name"])
                assert not {"default", "min", "max"} & (item.keys() - found.keys()), (node_id, item["name"])
        assert known[node_id]["output"] == [output[0] for output in schema["outputs"]], node_id


@pytest.mark.parametrize("file", TEMPLATES)
def test_a_template_of_each_family_draws(alone: Server, file: str) -> None:
    run = Client(alone.url).finished(pictured(replay(WORKFLOWS / f"{file}.json")))
    assert scene_of(torch.from_numpy(pictures(alone, run)) / 255).caption == "a red circle moves left on blue"


def test_a_mesh_is_painted(alone: Server) -> None:
    paint_models.only_the_demo(alone)
    Client(alone.url).finished(shrunk(replay(WORKFLOWS / "anygpu_paint_turbo.json")))
