"""Jobs leave ComfyUI by a folder, a worker elsewhere renders them, and their videos come back."""

from __future__ import annotations

from pathlib import Path

import pytest
from anygpu.farm.render import Renderer, task_of
from anygpu.farm.worker import DONE, Worker
from anygpu.pipelines.demo import demo_models
from anygpu.pipelines.job_folder import JobFolder, lines_of

from host.client import Client
from host.prompts import SAVE, Graph
from host.server import Server

pytestmark = pytest.mark.host


def test_jobs_leave_by_a_folder_and_their_videos_come_back(server: Server, client: Client, tmp_path: Path) -> None:
    graph = Graph()
    asked = {"prompts": "a red circle moves left on blue\n# no\na white square stays still on blue", "seeds": "3, 5"}
    model = {"folder": "output/farm", "name": "shapes", "model": next(iter(demo_models()))}
    jobs = graph.add("AnyGPUQueueJobs", **model, **asked, width=0, height=0, frames=0, steps=2)
    run = client.run(graph.prompt)
    assert run.ending == "execution_success", run.message
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
    run = client.run(graph.prompt)
    assert run.ending == "execution_success", run.message
    names = [record["filename"] for record in run.files()]
    assert [sum(name.endswith(end) for name in names) for end in (".mp4", ".png")] == [3, 3]
    shown = run.texts_of(back)[-1]
    assert shown.startswith("3 of 4 done") and f"{tasks[3].key[:12]}: no 'fox' in /models" in shown


def test_without_ray_the_farm_node_says_what_to_do(client: Client) -> None:
    graph = Graph()
    model = {"folder": "output/farm", "name": "one", "model": next(iter(demo_models()))}
    jobs = graph.add("AnyGPUQueueJobs", **model, prompts="a fox", seeds="0", width=0, height=0, frames=0)
    there = graph.add("AnyGPUFarm", jobs=graph.link(jobs), address="auto")
    graph.add(SAVE, video=graph.link(there), filename_prefix="back", format="auto", codec="auto")
    message = client.run(graph.prompt).message
    assert message.startswith(("no ray for AnyGPU Farm", "Ray without a token in this ComfyUI")), message
