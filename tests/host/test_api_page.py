"""The script of docs/api.md, run as a reader would run it."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from host import videos
from host.client import Client
from host.prompts import ROOT, WORKFLOWS, replay, shrunk
from host.server import Server

pytestmark = pytest.mark.host


def script(folder: Path) -> Path:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), re.DOTALL)
    (folder / "render.py").write_text(code, encoding="utf-8")
    return folder / "render.py"


def test_prompts_go_in_and_videos_come_out(server: Server, client: Client, tmp_path: Path) -> None:
    server.every_model()
    graph = shrunk(replay(WORKFLOWS / "anygpu_ltx_text_to_video.json"), frames=9)
    (tmp_path / "graph.json").write_text(json.dumps(graph), encoding="utf-8")
    (tmp_path / "prompts.txt").write_text("a fox runs\n\na boat at night\n", encoding="utf-8")
    command = [sys.executable, script(tmp_path), server.url, "graph.json", "prompts.txt"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    made = sorted(tmp_path.glob("*.mp4"))
    assert [path.name[:4] for path in made] == ["000_", "001_"] and all(path.name in done.stdout for path in made)
    assert all(videos.facts(path).frames == 9 for path in made)
    assert re.search(r"a fox runs: \d+ of \d+", done.stdout), "the steps are shown"


def test_a_refusal_is_shown(server: Server, client: Client, tmp_path: Path) -> None:
    graph = shrunk(replay(WORKFLOWS / "anygpu_ltx_text_to_video.json"))
    next(node for node in graph.values() if node["class_type"] == "AnyGPUSample")["inputs"]["steps"] = -1
    (tmp_path / "graph.json").write_text(json.dumps(graph), encoding="utf-8")
    (tmp_path / "prompts.txt").write_text("a fox", encoding="utf-8")
    command = [sys.executable, script(tmp_path), server.url, "graph.json", "prompts.txt"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and "refused" in done.stderr and "steps" in done.stderr
