"""ComfyUI starts with the pack as it starts without it, and knows every node, input and workflow of it."""

import json
import re
import subprocess
import urllib.request
from pathlib import Path

import pytest

from host.client import Client
from host.prompts import apps, shipped
from host.server import Server

CORE_TEMPLATES = """
import importlib.metadata, json
packages = [each for each in importlib.metadata.distributions() if "workflow" in each.name and "templates" in each.name]
lists = [path.locate() for each in packages for path in each.files or () if path.match("templates/index*.json")]
found = [json.loads(path.read_text(encoding="utf-8")) for path in lists if "schema" not in path.name]
categories = [category for each in found if isinstance(each, list) for category in each]
print(json.dumps([row["name"] for category in categories for row in category["templates"]]))
"""
pytestmark = pytest.mark.host

NODES = set(json.loads((Path(__file__).parents[1] / "fixtures" / "schemas.json").read_text(encoding="utf-8")))
TROUBLE = re.compile(r"Exception|Error|WARNING|Traceback|FAILED|warn", re.IGNORECASE)


def troubles(log: str) -> set[str]:
    """Lines of a start log that tell of trouble, without what differs from start to start."""
    started = log.split("To see the GUI go to")[0]
    return {re.sub(r"\d+", "0", line.strip()) for line in started.splitlines() if TROUBLE.search(line)}


def test_the_start_log_has_no_trouble_that_comfyui_alone_has_not(server: Server, tmp_path: Path) -> None:
    alone = Server(server.host, tmp_path, server.tiny_folder, attach=False)
    try:
        known = troubles(alone.start().log)
    finally:
        alone.stop()
    assert troubles(server.log) <= known
    assert re.search(r"[\d.]+ seconds: \S+anygpu", server.log)


def test_quick_start_for_ci_ends_well(server: Server, tmp_path: Path) -> None:
    """The check that ComfyUI's own CI makes: exit code 0, and a log without an exception."""
    quick = Server(server.host, tmp_path, server.tiny_folder, arguments=("--quick-test-for-ci",))
    with pytest.raises(RuntimeError, match="did not start") as ended:
        quick.start()  # it ends by itself instead of serving
    assert quick.ended_with == 0
    assert "IMPORT FAILED" not in str(ended.value)


@pytest.mark.parametrize("node", sorted(NODES))
def test_every_input_has_a_tooltip(client: Client, node: str) -> None:
    facts = client.get(f"/object_info/{node}")[node]
    inputs = {name: spec for kind in ("required", "optional") for name, spec in facts["input"].get(kind, {}).items()}
    assert inputs and facts["description"]
    assert [name for name, spec in inputs.items() if not (len(spec) > 1 and spec[1].get("tooltip"))] == []


def test_object_info_has_every_node_and_no_other(client: Client) -> None:
    assert {name for name in client.get("/object_info") if name.startswith("AnyGPU")} == NODES


def test_every_workflow_is_in_the_template_browser(server: Server, client: Client) -> None:
    listed = client.get("/api/workflow_templates")["anygpu"]
    assert set(listed) == {path.stem for path in (*shipped(), *apps())}
    for path in (*shipped(), *apps()):
        with urllib.request.urlopen(f"{server.url}/api/workflow_templates/anygpu/{path.name}", timeout=10) as answer:
            assert json.loads(answer.read()) == json.loads(path.read_text(encoding="utf-8"))


def test_no_name_of_ours_is_one_of_core_s(server: Server, client: Client) -> None:
    """Case aside, as files are on Windows. Its template search ends at the first name that is there twice."""
    core = subprocess.run([server.host.python, "-c", CORE_TEMPLATES], capture_output=True, text=True, timeout=60)
    names = {name.casefold() for name in json.loads(core.stdout)}
    assert len(names) > 100 and names.isdisjoint(path.stem.casefold() for path in (*shipped(), *apps()))
    blueprints = [entry["name"].casefold() for entry in client.get("/global_subgraphs").values()]
    assert len(blueprints) > 10 and len(set(blueprints)) == len(blueprints)
    assert not [name for name in client.get("/object_info") if name in NODES and not name.startswith("AnyGPU")]


def test_the_launcher_says_what_it_needs(server: Server, tmp_path: Path) -> None:
    launcher = Path(__file__).with_name("launch.py")
    ended = subprocess.run([server.host.python, launcher, tmp_path], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1 and f"no main.py in {tmp_path}" in ended.stderr
