"""A mesh is textured by a worker as in one process, and comes back as a GLB."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from anygpu.compat.errors import InputError
from anygpu.farm.render import Renderer, task_of
from anygpu.farm.worker import DONE, Worker
from anygpu.paint.baking import synthetic
from anygpu.paint.geometry.mesh import load_mesh, write_glb
from anygpu.paint.jobs import model_item, paint_jobs
from anygpu.paint.sampling.painting import PaintSettings
from anygpu.pipelines.job_folder import JobFolder
from anygpu.pipelines.job_lists import write_list
from PIL import Image

from paint import stored


@pytest.fixture
def meshes(tmp_path: Path) -> Path:
    """A folder with a torus and its picture."""
    folder = tmp_path / "meshes"
    folder.mkdir()
    write_glb(folder / "torus.glb", synthetic.torus(8, 16), torch.zeros(4, 4, 3))
    Image.new("RGB", (64, 64), "red").save(folder / "torus.png")
    return folder


def test_a_mesh_without_a_picture_is_named(meshes: Path, tmp_path: Path) -> None:
    (meshes / "torus.png").unlink()
    item = model_item(tmp_path)
    with pytest.raises(InputError, match=r"no picture for the mesh 'torus.glb'"):
        paint_jobs(item, meshes, meshes, [1], PaintSettings(), JobFolder(tmp_path / "farm").add_input)
    with pytest.raises(InputError, match="no meshes in"):
        paint_jobs(item, tmp_path, meshes, [1], PaintSettings(), JobFolder(tmp_path / "farm").add_input)


@pytest.mark.farm
def test_a_worker_textures_a_mesh_and_a_second_one_makes_the_same(meshes: Path, tmp_path: Path) -> None:
    model = stored.checkpoint("paint", tmp_path / "models")
    digests = []
    for name in ("one", "two"):
        folder = JobFolder(tmp_path / name)
        settings = PaintSettings(size=64, steps=1)
        made = paint_jobs(model_item(model), meshes, meshes, [3], settings, folder.add_input, texture_size=64)
        jobs = write_list(folder, "toruses", made)
        assert str(tmp_path) not in jobs.lines[0], "no path of this machine"
        task = task_of(jobs.lines[0])
        outcome = Worker(Renderer(folder.root, (tmp_path / "models",), tmp_path / "state", "cpu")).run(task)
        assert outcome.status == DONE, outcome.text
        result = folder.result(jobs.keys[0])
        assert result is not None and result.suffix == ".glb"
        mesh, _ = load_mesh(result)
        assert len(mesh.faces) == len(synthetic.torus(8, 16).faces)
        record = json.loads((folder.results / f"{task.key}.json").read_text(encoding="utf-8"))
        digests.append((task.key, record["pixels_sha256"]))
    assert digests[0] == digests[1]
