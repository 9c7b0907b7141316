"""Jobs leave ComfyUI by a folder, a worker elsewhere renders them, and their videos come back."""

import shutil
import socket
from pathlib import Path

import pytest
from anygpu.compat.checkpoints.identity import content_of
from anygpu.farm.render import Renderer, job_of, task_of
from anygpu.farm.worker import DONE, Worker
from anygpu.pipelines.demo import demo_loras, demo_models
from anygpu.pipelines.records.job import Content, job_in
from anygpu.pipelines.records.job_folder import JobFolder, lines_of
from anygpu.pipelines.records.receipts import read_receipt
from anygpu.pipelines.vae.plan import DecodeRequest
from PIL import Image

from host import paint_models
from host.client import Client
from host.prompts import SAVE, Graph, text_to_video
from host.server import Server

pytestmark = pytest.mark.host


def test_jobs_leave_by_a_folder_and_their_videos_come_back(server: Server, client: Client, tmp_path: Path) -> None:
    graph = Graph()
    asked = {"prompts": "a red circle moves left on blue\n# no\na white square stays still on blue", "seeds": "3, 5"}
    model = {"folder": "output/farm", "name": "shapes", "model": next(iter(demo_models()))}
    jobs = graph.add("AnyGPUQueueJobs", **model, **asked, width=0, height=0, frames=0, steps=2)
    run = client.finished(graph.prompt)
    assert run.texts_of(jobs)[-1].startswith("4 jobs in shapes.jsonl, 4 not done yet")
    folder = JobFolder(server.base / "output" / "farm")
    worker = Worker(Renderer(folder.root, (), tmp_path, "cpu"))
    tasks = [task_of(line) for line in lines_of(folder.root / "shapes.jsonl")]
    assert [worker.run(task).status for task in tasks[:3]] == [DONE] * 3
    folder.fail(tasks[3].key, "no 'fox' in /models")

    back = graph.add("AnyGPUCollect", folder="output/farm", name="shapes", wait=True, jobs=graph.link(jobs))
    graph.add(SAVE, video=graph.link(back), filename_prefix="back", format="auto", codec="auto")
    graph.add("SaveImage", images=graph.link(back, 1), filename_prefix="first")
    graph.prompt[jobs]["inputs"]["folder"] = "output/farm"
    run = client.finished(graph.prompt)
    names = [record["filename"] for record in run.files()]
    assert [sum(name.endswith(end) for name in names) for end in (".mp4", ".png")] == [3, 3]
    shown = run.texts_of(back)[-1]
    assert shown.startswith("3 of 4 done") and f"{tasks[3].key[:12]}: no 'fox' in /models" in shown


def test_jobs_like_a_video_have_all_that_its_graph_said(server: Server, client: Client, tmp_path: Path) -> None:
    """LoRA, step cache, solver, shift, guidance, decode: the worker's video is that of the graph, its receipt too."""
    model, text = next(name for name in demo_models() if "LTX" in name), "a red circle moves left on blue"
    said = {"scheduler": "unipc", "shift": 2.0, "guidance": 3.0, "cfg_end": 0.7, "seed": 5}
    graph = text_to_video(model, text, "grey", width=0, height=0, frames=0, **said)
    load, _, sample, decode, _ = graph.prompt
    graph.prompt[load]["inputs"] |= {"precision": "fp32"}
    lora = graph.add("AnyGPULoRA", pipeline=graph.link(load), lora=next(iter(demo_loras())), strength=0.5)
    cache = graph.add("AnyGPUStepCache", pipeline=graph.link(lora), start_percent=0.25, end_percent=1.0)
    asked = {"preset": "custom", "kind": "first_block", "threshold": 0.9, "interval": 3, "cache_device": "cpu"}
    graph.prompt[cache]["inputs"] |= asked
    graph.prompt[sample]["inputs"]["pipeline"] = graph.link(cache)
    graph.prompt[decode]["inputs"] |= {"method": "tiled", "tile_size": 64, "tile_overlap": 16}
    run = client.finished(graph.prompt)
    (made,) = [path for path in (server.base / "output").rglob("*.mp4") if path.name == run.files()[0]["filename"]]

    queue = Graph()
    asked = {"model": model, "prompts": text, "seeds": "5", "width": 0, "height": 0, "frames": 0}
    liked = f"{made.relative_to(server.base / 'output').as_posix()} [output]"
    queue.add("AnyGPUQueueJobs", folder="output/farm", name="liked", **asked, like=liked)
    run = client.finished(queue.prompt)
    folder = JobFolder(server.base / "output" / "farm")
    (line,) = lines_of(folder.root / "liked.jsonl")
    ended = Worker(Renderer(folder.root, (), tmp_path, "cpu")).run(task_of(line))
    assert ended.status == DONE, ended
    wanted, found = read_receipt(made), read_receipt(folder.result(job_of(line).key))
    job = job_in(found["job"])
    assert found["job"] == wanted["job"] and found["latents"] == wanted["latents"]
    assert said == {name: getattr(job.settings, name) for name in said}
    assert (job.loras[0].strength, job.load["precision"]) == (0.5, "fp32")
    assert job.step_cache.settings.threshold == 0.9 and job.decode == DecodeRequest("tiled", 64, 16)


def known(content: Content | None) -> tuple[str, str] | None:
    """Name and sampled hash; the whole file's is made in the background, and may be there or not."""
    return None if content is None else (content.name, content.content)


def test_meshes_leave_with_every_model_that_textures_them(server: Server, client: Client) -> None:
    paint_models.install(server)
    meshes = server.base / "input" / "toruses"
    meshes.mkdir()
    shutil.copyfile(server.base / "input" / paint_models.MESH, meshes / "torus.glb")
    Image.new("RGB", (64, 64), "red").save(meshes / "torus.png")
    base, adapter = paint_models.BASE, paint_models.ADAPTER
    names = (*paint_models.NAMES, paint_models.DINO, base, adapter)
    models = {name: paint_models.built(server.tiny_folder) / name for name in names}
    plain, pbr, delight = "hunyuan3d-paint-v2-0", "hunyuan3d-paintpbr-v2-1", "hunyuan3d-delight-v2-0"
    wanted = {"lit": (plain, {"delight": delight}), "pbr": (pbr, {"image_encoder": paint_models.DINO})}
    wanted["mv"] = (base, {"adapter": adapter})
    for name, (model, others) in wanted.items():
        graph = Graph()
        asked = {"folder": "output/farm", "name": name, "model": next(iter(demo_models())), "prompts": "", "seeds": "0"}
        asked |= {"meshes": "toruses", "paint_model": model, "precision": "fp32", "weights": "bin", **others}
        graph.add("AnyGPUQueueJobs", **asked, width=0, height=0, frames=0, steps=1)
        client.finished(graph.prompt)
        (line,) = lines_of(server.base / "output" / "farm" / f"{name}.jsonl")
        job = job_of(line)
        assert known(job.model) == (model, content_of(models[model]))
        assert (job.precision, job.weights) == ("fp32", "bin")
        variant, size = ("ig2mv", 768) if name == "mv" else ("auto", 512)
        assert (job.variant, job.paint.size, job.mask) == (variant, size, "alpha")
        for other in ("delight", "image_encoder", "adapter"):
            given = others.get(other)
            assert known(getattr(job, other)) == ((given, content_of(models[given])) if given else None)


def test_without_ray_the_farm_node_says_what_to_do(client: Client) -> None:
    graph = Graph()
    model = {"folder": "output/farm", "name": "one", "model": next(iter(demo_models()))}
    jobs = graph.add("AnyGPUQueueJobs", **model, prompts="a fox", seeds="0", width=0, height=0, frames=0)
    there = graph.add("AnyGPUFarm", jobs=graph.link(jobs), address="auto")
    graph.add(SAVE, video=graph.link(there), filename_prefix="back", format="auto", codec="auto")
    message = client.run(graph.prompt).message
    assert message.startswith(("no ray for AnyGPU Farm", "Ray without a token in this ComfyUI")), message


@pytest.mark.parametrize("owner", ["no file", "another address"])
def test_a_workflow_reaches_no_address_that_the_owner_has_not_listed(
    server: Server, client: Client, owner: str, tmp_path: Path
) -> None:
    listed = server.base / "user" / "anygpu" / "farm_addresses.txt"
    listed.parent.mkdir(parents=True, exist_ok=True)
    listed.unlink(missing_ok=True)
    if owner != "no file":
        listed.write_text("# mine\n10.0.0.5:6379\n", encoding="utf-8")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.5)
        port = listener.getsockname()[1]
        model = {"folder": "output/farm", "name": "hostile", "model": next(iter(demo_models()))}
        for address in (f"127.0.0.1:{port}", f"ray://127.0.0.1:{port}", f"localhost:{port}", "# mine", "", "AUTO"):
            graph = Graph()
            jobs = graph.add("AnyGPUQueueJobs", **model, prompts="a fox", seeds="0", width=0, height=0, frames=0)
            there = graph.add("AnyGPUFarm", jobs=graph.link(jobs), address=address)
            graph.add(SAVE, video=graph.link(there), filename_prefix="back", format="auto", codec="auto")
            message = client.run(graph.prompt).message
            assert message.startswith(f"no address of a farm {address!r} listed here; expected one of auto"), message
            assert str(listed) in message and "\n" not in message, "where the owner adds it"
        with pytest.raises(TimeoutError):
            listener.accept()
