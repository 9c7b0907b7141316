"""Hostile workflows and prompts on a real ComfyUI, while its files, sockets, processes and memory are watched."""

import itertools
import json
import os
import re
import socket
import sys
import sysconfig
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemas
from anygpu.compat.checkpoints.latents import metadata_of
from capabilities_page import listed
from test_free_text import CHECKED

from host import paint_models
from host.client import Client, Prompt, Refused, Run
from host.prompts import painted, replay, shrunk
from host.server import ROOT, Server, served

pytestmark = pytest.mark.host
SECRET, LIST = "secret.safetensors", listed()
TYPES = {  # what makes each kind of link, and which output of it
    "ANYGPU_PIPELINE": ("AnyGPULoadPipeline", 0),
    "ANYGPU_PIPELINE,ANYGPU_PAINT": ("AnyGPULoadPipeline", 0),
    "ANYGPU_PROMPT": ("AnyGPUEncodePrompt", 0),
    "ANYGPU_PROMPT,CONDITIONING": ("AnyGPUEncodePrompt", 0),
    "LATENT": ("AnyGPUSample", 0),
    "ANYGPU_JOBS": ("AnyGPUQueueJobs", 0),
    "MESH": ("AnyGPULoadMesh", 0),
}
USUAL: dict[str, dict[str, Any]] = {
    "AnyGPULoadPipeline": {"model": "LTX-Video"},
    "AnyGPUEncodePrompt": {"text": "a fox"},
    "AnyGPUSample": {"width": 64, "height": 64, "frames": 9, "steps": 2, "seed": 1},
    "AnyGPUQueueJobs": {"prompts": "a fox", "model": "LTX-Video"},
    "AnyGPUCollect": {"wait": False},
}
FILES = re.compile(r"demo: |no .* found$|newest$|output/farm$|none$|auto$")  # all that is offered where no file is
TARGETS = [  # every input that names a file, a folder, a model or a host
    (kind, each["name"])
    for kind, node in json.loads(schemas.SNAPSHOT.read_text(encoding="utf-8")).items()
    for each in node["inputs"]
    if (each["kind"] == "COMBO" and all(map(FILES.match, each["options"])))
    or (each["kind"] == "STRING" and each["name"] in CHECKED)
    or kind == "AnyGPUDownloadModel"
]
EACH = 4  # hostile values of an input
CANCEL_SECONDS = 20.0  # after which a prompt is cancelled
MOST_BYTES = 1_500_000_000  # that the process may grow, with all models it loads
SYSTEM = ("/proc/", "/sys/", "/dev/null", "/dev/urandom", "/usr/", "/lib", "/etc/ld.so", "/etc/mime.types", "/opt/")


class Watched:
    """The server, what it may touch, and what has touched it."""

    def __init__(self, server: Server, listener: socket.socket) -> None:
        self.server, self.client, self.listener = server, Client(server.url), listener
        self.heard: list[Any] = []
        threading.Thread(target=self._listen, daemon=True).start()
        found = self.client.get("/object_info")
        self.nodes: dict[str, Any] = {name: node for name, node in found.items() if name.startswith("AnyGPU")}
        self.serial = itertools.count()

    def _listen(self) -> None:
        while True:
            try:
                connection, peer = self.listener.accept()
            except OSError:
                return
            self.heard.append((peer, connection.recv(100)))

    def values(self) -> list[Any]:
        """Names of what no workflow may have, and names that are none."""
        port, secret = self.listener.getsockname()[1], self.server.base / "elsewhere" / SECRET
        return [
            str(secret), f"../elsewhere/{SECRET}", f"a/../../elsewhere/{SECRET}", "pipe.safetensors",
            "/etc/passwd", "../" * 12 + "etc/passwd", "/proc/self/environ", "/dev/zero",
            f"http://127.0.0.1:{port}/a", f"127.0.0.1:{port}", f"ray://127.0.0.1:{port}", f"file://{secret}",
            f"\\\\127.0.0.1@{port}\\share\\a", f"//127.0.0.1:{port}/a", "C:\\Windows\\win.ini", "~/.ssh/id_rsa",
            "a\0b", "x" * 5000, "\ud800", "%2e%2e/" + SECRET, f"$(cat {secret})", "; touch /tmp/anygpu-hostile", "",
            {"a": 1}, 7, None, ["AnyGPULoadMesh", 0],
        ]  # fmt: skip

    def prompt(self, kind: str, **inputs: Any) -> Prompt:
        """A prompt that ends in a node of ``kind``, whose ids begin with the kinds of their nodes."""
        made: Prompt = {}
        last = self._add(made, kind, inputs)
        if not self.nodes[kind]["output_node"]:
            made[f"PreviewAny:{next(self.serial)}"] = {"class_type": "PreviewAny", "inputs": {"source": [last, 0]}}
        return made

    def _add(self, made: Prompt, kind: str, given: dict[str, Any]) -> str:
        inputs: dict[str, Any] = {}
        for name, (wanted, *rest) in self.nodes[kind]["input"].get("required", {}).items():
            facts = rest[0] if rest else {}
            options = facts.get("options", wanted if isinstance(wanted, list) else [])
            if name in given:
                continue
            if isinstance(wanted, str) and wanted in TYPES:
                source, output = TYPES[wanted]
                inputs[name] = [self._add(made, source, USUAL.get(source, {})), output]
            else:
                inputs[name] = facts.get("default", options[0] if options else "")
        node = f"{kind}:{next(self.serial)}"
        made[node] = {"class_type": kind, "inputs": {**inputs, **USUAL.get(kind, {}), **given}}
        return node

    def run(self, prompt: Prompt) -> str:
        """The message of the prompt's end; empty for one that ran through."""
        timer = threading.Timer(CANCEL_SECONDS, self.client.interrupt)
        timer.start()
        try:
            run: Run = self.client.run(prompt)
        except Refused as refused:
            return f"refused: {refused}"
        finally:
            timer.cancel()
        assert run.seconds < CANCEL_SECONDS + 10, f"a cancel does not end {list(prompt)}"
        return run.message if run.ending == "execution_error" else ""

    def events(self) -> Iterator[tuple[str, str, str]]:
        """Kind of node or thread, what was done, and to what, of all that was touched since the start."""
        for line in (self.server.base / "touched.jsonl").read_text().splitlines():
            owner, node, way, things = json.loads(line)
            yield from ((node.partition(":")[0] if node else f"thread {owner}", way, thing) for thing in things)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Iterator[Watched]:
    """A watched ComfyUI with one model, a pipe among its inputs, and a listener on this machine."""
    base = tmp_path_factory.mktemp("untrusted").resolve()
    (base / "elsewhere").mkdir()
    (base / "elsewhere" / SECRET).write_bytes(b"secret")
    (base / "input").mkdir()
    os.mkfifo(base / "input" / "pipe.safetensors")
    with socket.create_server(("127.0.0.1", 0)) as listener, served(base, tiny_folder, watched=True) as running:
        running.model("LTX-Video")
        paint_models.install(running)
        yield Watched(running, listener)


def named(prompt: Prompt) -> Prompt:
    """A prompt whose ids begin with the kinds of their nodes."""
    names = {node: f"{facts['class_type']}:{node}" for node, facts in prompt.items()}
    made: Prompt = {}
    for node, facts in prompt.items():
        inputs = {name: [names[v[0]], v[1]] if isinstance(v, list) else v for name, v in facts["inputs"].items()}
        made[names[node]] = {**facts, "inputs": inputs}
    return made


def memory_of(pid: int) -> int:
    """The most memory that a process has had, in bytes."""
    return 1024 * int(re.findall(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())[0])


def api_prompts(watched: Watched) -> list[Prompt]:
    """Prompts as no browser sends them: numbers, types, lengths and graphs out of range."""
    encode, sample = "AnyGPUEncodePrompt", "AnyGPUSample"
    changed = [
        (encode, {"text": "a fox " * 1_700_000}), (encode, {"text": "☃" * 10**6, "negative": " " * 10**6}),
        (encode, {"section_prompts": "a\n" * 10**6}), (encode, {"template": "{}" + "x" * 10**6}),
        (encode, {"template": "{0.__class__}{}"}), (encode, {"max_tokens": 10**9}), (encode, {"text": "\ud800"}),
        (encode, {"text": "<img src=http://127.0.0.1/a>"}), (sample, {"width": 2**62, "height": 2**62}),
        (sample, {"frames": 10**12}), (sample, {"seed": 2**80}), (sample, {"steps": -1}), (sample, {"cfg": 1e308}),
        (sample, {"fps": "1/0"}), (sample, {"shift": float("nan")}), (sample, {"scheduler": "__import__('os')"}),
        (sample, {"pipeline": "LTX-Video"}), (sample, {"pipeline": ["none", 0]}), (sample, {"batch_size": 10**9}),
        ("AnyGPUQueueJobs", {"seeds": "0-99999999999"}), ("AnyGPUQueueJobs", {"prompts": "a\n" * 10**6}),
        ("AnyGPUQueueJobs", {"precision": "../../a", "weights": "os.system"}),
        ("AnyGPULoRA", {"blocks": "(a+)+$" * 1000}), ("AnyGPUDownloadModel", {"model": "a/b", "download": "download"}),
    ]  # fmt: skip
    lora, load = "AnyGPULoRA", "AnyGPULoadPipeline"
    loop = {f"{lora}:{n}": {"class_type": lora, "inputs": {"pipeline": [f"{lora}:{1 - n}", 0]}} for n in (0, 1)}
    many = {f"{load}:{n}": {"class_type": load, "inputs": {"model": n}} for n in range(5000)}
    return [*(watched.prompt(kind, **given) for kind, given in changed), loop, many, {"x": {"class_type": "AnyGPU"}}]


def test_no_prompt_touches_what_the_owner_has_not_listed(watched: Watched) -> None:
    assert watched.run(watched.prompt("AnyGPUDecode")) == "", "an honest prompt"
    for workflow in (path for path in painted() if "pbr" in path.stem or "turbo" in path.stem):
        assert watched.run(named(shrunk(replay(workflow)))) == "", f"the honest {workflow.stem}"
    before, values, count, ends = memory_of(watched.server.pid), itertools.cycle(watched.values()), 0, list[str]()
    for kind, name in TARGETS:
        for value in itertools.islice(values, EACH):
            ends.append(watched.run(watched.prompt(kind, **{name: value})))
            count += 1
    for prompt in api_prompts(watched):
        ends.append(watched.run(prompt))
        count += 1
    assert count >= 60 and sum(map(bool, ends)) > count // 2, "most are refused"
    assert all("\n" not in end.removeprefix("refused: ") for end in ends), [end for end in ends if "\n" in end]
    assert not any("does not know" in end for end in ends), [end for end in ends if "does not know" in end]
    assert watched.run(watched.prompt("AnyGPUDecode")) == "", "an honest prompt after all"
    assert not watched.heard and memory_of(watched.server.pid) - before < MOST_BYTES
    wrong = violations(watched)
    assert not wrong, "\n".join(wrong[:20])


def violations(watched: Watched) -> list[str]:
    """What a node has touched outside of its own row, or a thread outside of all rows."""
    base, real = watched.server.base, lambda path: str(Path(path).resolve()) + "/"
    tiny, code = real(watched.server.tiny_folder), [real(ROOT), real(watched.server.host.root), real(sys.base_prefix)]
    python = watched.server.host.python
    code += [real(python.parent.parent), real(python.resolve().parent.parent), real(sysconfig.get_path("stdlib"))]
    places = {
        LIST.MODELS: [real(base / "models"), tiny], LIST.INPUT: [real(base / "input")],
        LIST.OUTPUT: [real(base / "output")],
        LIST.TEMP: [real(base / "temp")],
        LIST.STATE: [real(base / "user" / "anygpu")], LIST.JOBS: [real(base / "output" / "farm")],
    }  # fmt: skip
    found, seen = list[str](), set[str]()
    for owner, way, thing in watched.events():
        row = LIST.CAPABILITIES.get(owner)
        if owner.startswith("AnyGPU"):
            seen.add(owner)
        if way == "start" or way == "failed" or thing == str(base / "elsewhere" / SECRET):
            found.append(f"{owner} {way} {thing}")
        if row is None or way not in ("read", "write", "connect"):
            continue
        allowed = places_of(row, way, places)
        known = way == "read" and thing.startswith((*SYSTEM, *code))
        if not known and not f"{thing}/".startswith(tuple(allowed)):
            found.append(f"{owner} {way} {thing}")
    assert len(seen) >= 20, seen
    return sorted(set(found))


def places_of(row: Any, way: str, places: dict[str, list[str]]) -> list[str]:
    """The folders that a node may read or write; none to connect to."""
    names = {"read": (LIST.STATE, *row.reads, *row.writes), "write": row.writes, "connect": ()}[way]
    return [folder for name in names for folder in places.get(name, ())]


def test_latents_of_a_hostile_prompt_name_no_path(watched: Watched) -> None:
    saved = sorted((watched.server.base / "user" / "anygpu" / "kept").glob("*.safetensors"))
    assert saved and not any(str(watched.server.base) in str(metadata_of(path)) for path in saved)
