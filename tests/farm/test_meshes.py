"""A mesh is textured by a worker as in one process, and comes back as a GLB."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from anygpu.compat.errors import InputError
from anygpu.farm import cli
from anygpu.farm.driver import lines_in
from anygpu.farm.render import Renderer, job_of, reached_in, task_of
from anygpu.farm.worker import DONE, RenderCancelled, Worker
from anygpu.paint.baking.bake import BakeSettings
from anygpu.paint.geometry.mesh import load_mesh, write_glb
from anygpu.paint.jobs import PaintJob, Pictures, paint_jobs, read_receipt, replay
from anygpu.paint.jobs import _read_pictures as read_pictures
from anygpu.paint.sampling.delight import DelightSettings
from anygpu.paint.sampling.painting import PaintSettings
from anygpu.pipelines.base import Silent
from anygpu.pipelines.records.job import Content
from anygpu.pipelines.records.job_folder import JobFolder
from anygpu.pipelines.records.job_lists import write_list
from anygpu.pipelines.records.places import Machine, Places
from PIL import Image

from paint import mv_stored, stored, synthetic


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
    item = Places().content(tmp_path)
    with pytest.raises(InputError, match=r"no picture for the mesh 'torus.glb'"):
        paint_jobs(item, meshes, meshes, [1], PaintSettings(), JobFolder(tmp_path / "farm").add_input)
    with pytest.raises(InputError, match="no meshes in"):
        paint_jobs(item, tmp_path, meshes, [1], PaintSettings(), JobFolder(tmp_path / "farm").add_input)


def test_a_job_names_the_models_beside_its_own(meshes: Path, tmp_path: Path) -> None:
    words = ["queue", str(tmp_path / "farm"), "--meshes", str(meshes), "--pictures", str(meshes), "--steps", "7"]
    for name in ("model", "delight", "image-encoder"):
        (tmp_path / name).mkdir()
        words += [f"--{name}", str(tmp_path / name)]
    assert cli.main(words) == 0
    job = job_of(*lines_in(JobFolder(tmp_path / "farm").job_files(), print))
    assert [job.model.name, job.delight.name, job.image_encoder.name] == ["model", "delight", "image-encoder"]
    assert job.paint.steps == 7


def test_a_caption_beside_the_picture_is_not_taken_for_it(meshes: Path, tmp_path: Path) -> None:
    (meshes / "torus.txt").write_text("a ring", encoding="utf-8")
    (job,) = paint_jobs(
        Places().content(tmp_path), meshes, meshes, [1], PaintSettings(), JobFolder(tmp_path / "farm").add_input
    )
    assert job.picture.name.endswith(".png")


def test_the_transparency_of_a_picture_cuts_it_out_for_each_model(meshes: Path, tmp_path: Path) -> None:
    item, folder = Places().content(tmp_path), JobFolder(tmp_path / "farm")
    for mode, channels in (("RGBA", 4), ("RGB", 3)):
        Image.new(mode, (64, 64), (255, 0, 0, 128)[:channels]).save(meshes / "torus.png")
        (job,) = paint_jobs(item, meshes, meshes, [1], PaintSettings(), folder.add_input)
        places = Places((folder.root,), (folder.root,))
        (shown,) = read_pictures(Pictures(job.inputs[1:], job.mask), places, Silent())
        assert shown.shape == (64, 64, channels)


def test_a_job_keeps_its_key_where_no_other_model_is_named() -> None:
    item = Content("torus.glb", "0" * 64)
    alone = PaintJob(item, item, item)
    assert alone.key == "2476b18ff9ef40c4184273dd2d1309bf7ad09a56b726293d855f4ac3267ec354"
    assert alone.model_key == "31867005765dbae94157840c5f3214301a99be46f9b225bba33832e556e5472d"
    others = [replace(alone, delight=item), replace(alone, image_encoder=item)]
    assert len({job.key for job in [alone, *others]}) == len({job.model_key for job in [alone, *others]}) == 3
    assert [job_of(json.dumps(job.record())) for job in others] == others
    renamed = replace(others[0], delight=Content("elsewhere", item.content))
    assert (renamed.key, renamed.model_key) == (others[0].key, others[0].model_key), "by content, not by name"
    slower = replace(others[0], delighting=DelightSettings(steps=7))
    assert slower.key != others[0].key and job_of(json.dumps(slower.record())) == slower


@pytest.mark.farm
def test_a_worker_paints_with_mv_adapter_after_pictures_or_words(meshes: Path, tmp_path: Path) -> None:
    models, folder = tmp_path / "models", JobFolder(tmp_path / "farm")
    base = mv_stored.folder("sd21", models, "mine")
    files = {kind: mv_stored.adapter_file(kind, "sd21", models) for kind in ("ig2mv", "tg2mv")}
    Image.new("RGBA", (64, 64), (255, 0, 0, 128)).save(meshes / "torus.png")
    (tmp_path / "words.txt").write_text("a red cat\na blue dog", encoding="utf-8")
    queue = ["queue", str(folder.root), "--meshes", str(meshes), "--steps", "1", "--model", str(base)]
    assert cli.main([*queue, "--name", "none", "--adapter", str(files["tg2mv"])]) == 2, "without words"
    words = ["--prompts", str(tmp_path / "words.txt")]
    for kind, more in (("ig2mv", []), ("tg2mv", words)):
        assert cli.main([*queue, "--name", kind, "--adapter", str(files[kind]), *more]) == 0
    lines = list(lines_in(folder.job_files(), print))
    jobs = [replace(job_of(line), paint=PaintSettings(64, 1)) for line in lines]
    assert {job_of(line).paint.size for line in lines} == {512}
    asked = [(job.variant, job.picture is None, job.mask, job.prompt) for job in jobs]
    assert asked == [
        ("ig2mv", False, "alpha", ""),
        *(("tg2mv", True, "", each) for each in ("a red cat", "a blue dog")),
    ]
    renderer, made = Renderer(folder.root, (models,), tmp_path / "state", "cpu"), []
    for job in (replace(job, texture=BakeSettings(64, 256)) for job in jobs):
        done = renderer.render(json.dumps(job.record()), Silent())
        path = folder.results / done["file"]
        assert read_receipt(path)["job"]["adapter"]["name"] == job.adapter.name
        made.append(done["pixels_sha256"])
    assert len(set(made)) == 3
    machine = Machine(Places((models,), (folder.root,), state=tmp_path / "state"), tmp_path / "state", "cpu")
    assert replay(path, machine, Silent()).same


@pytest.mark.farm
def test_a_worker_takes_shading_out_first_and_paints_pbr_with_its_encoder(meshes: Path, tmp_path: Path) -> None:
    from transformers import CLIPTextConfig, CLIPTextModel, Dinov2Config, Dinov2Model

    models, folder = tmp_path / "models", JobFolder(tmp_path / "farm")
    delight = stored.checkpoint("delight", models)
    text = CLIPTextConfig(
        vocab_size=49408, hidden_size=64, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    CLIPTextModel(text).save_pretrained(delight / "text_encoder")
    dino = Dinov2Config(hidden_size=1536, num_hidden_layers=1, num_attention_heads=24, mlp_ratio=1, image_size=224)
    Dinov2Model(dino).save_pretrained(models / "dino")
    paint = stored.checkpoint("paint", models)
    queue = ["queue", str(folder.root), "--meshes", str(meshes), "--pictures", str(meshes), "--steps", "1"]
    assert cli.main([*queue, "--model", str(paint), "--name", "lit", "--delight", str(delight)]) == 0
    pbr = stored.checkpoint("paint_pbr", models)
    assert cli.main([*queue, "--model", str(pbr), "--name", "pbr", "--image-encoder", str(models / "dino")]) == 0
    renderer = Renderer(folder.root, (models,), tmp_path / "state", "cpu")
    stages = {}
    for line in lines_in(folder.job_files(), print):
        told = Told()
        renderer.render(small(line), told)
        stages[job_of(line).model.name] = told.stages & {"delighting", "painting"}
    assert stages == {paint.name: {"delighting", "painting"}, pbr.name: {"painting"}}
    without = json.loads(small(line))
    del without["image_encoder"]
    with pytest.raises(InputError, match=r"no DINOv2 for the PBR model; .* add --image-encoder"):
        renderer.render(json.dumps(without), Silent())


class Told(Silent):
    """A progress that keeps the names of the stages."""

    def __init__(self) -> None:
        self.stages: set[str] = set()

    def step(self, done: int, total: int, stage: Any, preview: Any = None) -> None:
        self.stages.add(str(stage))


def small(line: str) -> str:
    """The job of a line at a size that a test can wait for."""
    job = job_of(line)
    paint, texture = replace(job.paint, size=64), replace(job.texture, texture_size=64, view_size=128)
    return json.dumps(replace(job, paint=paint, texture=texture, delighting=DelightSettings(size=64, steps=1)).record())


@pytest.mark.farm
def test_a_worker_textures_a_mesh_and_a_second_one_makes_the_same(meshes: Path, tmp_path: Path) -> None:
    model = stored.checkpoint("paint", tmp_path / "models")
    digests = []
    for name in ("one", "two"):
        folder = JobFolder(tmp_path / name)
        settings = PaintSettings(size=64, steps=1)
        made = paint_jobs(Places().content(model), meshes, meshes, [3], settings, folder.add_input, texture_size=64)
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


class Ends(Told):
    """A progress that ends the render after ``at`` steps of painting, and keeps those that it is told."""

    def __init__(self, at: int = 0) -> None:
        super().__init__()
        self.at, self.painted = at, list[int]()

    def step(self, done: int, total: int, stage: Any, preview: Any = None) -> None:
        if str(stage) == "painting":
            self.painted.append(done)
            if done == self.at:
                raise RenderCancelled


@pytest.mark.farm
def test_another_worker_goes_on_after_the_last_step_of_a_painting(meshes: Path, tmp_path: Path) -> None:
    model, folder = stored.checkpoint("paint", tmp_path / "models"), JobFolder(tmp_path / "farm")
    settings = PaintSettings(size=64, steps=3)
    made = paint_jobs(Places().content(model), meshes, meshes, [3], settings, folder.add_input, texture_size=64)
    line = small(write_list(folder, "toruses", made).lines[0])
    alone, first, second = (Renderer(folder.root, (tmp_path / "models",), tmp_path / n, "cpu") for n in "abc")
    begun, rest = Ends(2), Ends()
    with pytest.raises(RenderCancelled):
        first.render(line, begun)
    assert reached_in(folder, task_of(line)) > 0
    found = second.render(line, rest)
    folder.finish(task_of(line).key, found)
    assert (begun.painted, rest.painted, reached_in(folder, task_of(line))) == ([1, 2], [3], 0)
    assert found["pixels_sha256"] == alone.render(line, Silent())["pixels_sha256"]
