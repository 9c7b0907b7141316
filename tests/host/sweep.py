"""Every widget of every node driven to its ends and beyond through /prompt: ``python tests/host/sweep.py [NODE ...]``.

Prints each message once, with what drew it out, and ends with 1 where one is raw: not "found; expected; fix", or with
the name of a class, a module or a path of the code in it. A value beyond a widget's limits reaches a node over a link,
as from core's Primitive nodes, which nobody checks.
"""

import json
import math
import re
import resource
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:1] = [str(Path(__file__).resolve().parents[1])]  # the folder of the package `host`, as pytest has it

import websocket

from host import lora_files, paint_models
from host.client import Client, Refused
from host.prompts import Graph
from host.server import Server, find_host, tiny_home

OURS = "AnyGPU"
HUNG, DEAF_SECONDS = "hung", 120
SPARE_BYTES = 6 * 2**30
SECONDS = 12.0  # after which a run that does as it is told, only long, is cancelled
SMALL = {
    "width": 64, "height": 64, "frames": 9, "steps": 2, "view_size": 64, "size": 64, "texture_size": 64,
    "fit": "crop",
}  # fmt: skip
SMALL |= {"clip_seconds": 0.3, "window": 2, "texts": "a cat", "text": "a cat", "max_tokens": 512, "resolution": 64}
SOURCES = {  # type of a socket -> a node that gives it, and which of its outputs
    "ANYGPU_PIPELINE": ("AnyGPULoadPipeline", 0),
    "MODEL": ("AnyGPULoadPipeline", 1),
    "VAE": ("AnyGPULoadPipeline", 2),
    "CLIP": ("StandInClip", 0),
    "ANYGPU_PROMPT": ("AnyGPUEncodePrompt", 0),
    "ANYGPU_PROMPT,CONDITIONING": ("AnyGPUEncodePrompt", 0),
    "CONDITIONING": ("AnyGPUEncodePrompt", 1),
    "ANYGPU_IMAGE": ("AnyGPUEncodeImage", 0),
    "LATENT": ("AnyGPUSample", 0),
    "IMAGE": ("LoadImage", 0),
    "MESH": ("AnyGPULoadMesh", 0),
    "ANYGPU_PAINT": ("AnyGPULoadPaintPipeline", 0),
    "ANYGPU_PIPELINE,ANYGPU_PAINT": ("AnyGPULoadPipeline", 0),
}
MAPS = ("AnyGPURenderViews",)
NAMED = {  # inputs that need another source than their type's
    "normals": (*MAPS, 0),
    "positions": (*MAPS, 1),
    "cameras": (*MAPS, 2),
    ("AnyGPUBakeTexture", "images"): (*MAPS, 0),
}
MODELS = {"AnyGPUSampleFramePack": "FramePackI2V_HY", "AnyGPUImageConditioning": "FramePackI2V_HY"}
FAMILIES = ("LTX-Video", "HunyuanVideo", "HunyuanVideo-1.5-Diffusers-480p_t2v", "mochi-1-preview")
MORE_MODELS = {"AnyGPUSample": FAMILIES[1:], "AnyGPUDecode": FAMILIES[1:], "AnyGPUEncodePrompt": FAMILIES[1:]}
PAINTS = {"AnyGPUDelightImage": "hunyuan3d-delight-v2-0"}
LINKED = {"INT": "PrimitiveInt", "FLOAT": "PrimitiveFloat", "STRING": "PrimitiveString"}
RAW = re.compile(
    r"Traceback|\b[A-Z]\w+(Error|Exception)\b|\b(torch|comfy|anygpu|diffusers|transformers|numpy)\.\w+|NoneType|"
    r"0x[0-9a-f]{5}|object at|unexpected keyword|\.py\b|<class"
)
SHAPE = re.compile(r"[^\n]+; expected [^\n]+\. [^\n]+\.")
TYPES = re.compile(r"anygpu\.\w+|torch\.OutOfMemoryError")


@dataclass(frozen=True)
class Case:
    """One value of one widget, and what came of it."""

    node: str
    widget: str
    value: Any
    model: str
    ending: str = ""
    message: str = ""
    kind: str = ""

    @property
    def fault(self) -> str:
        """What is wrong with the message; empty where nothing is, or where there is none."""
        if self.ending != "execution_error":
            return self.message if self.ending == HUNG else ""
        if not TYPES.fullmatch(self.kind):
            return f"its type is {self.kind}"
        # Behind a shortage of memory stand the back end's own words, and ComfyUI's tips.
        message = self.message.split("\n")[0] if self.kind.startswith("torch") else self.message
        if not SHAPE.fullmatch(message):
            return "it is not one line of found; expected; fix"
        raw = RAW.search(message)
        return f"it is raw: {raw[0]}" if raw else ""

    def __str__(self) -> str:
        return f"{self.node}.{self.widget} = {str(self.value)[:40]!r} ({self.model})"


def values_of(kind: Any, options: dict[str, Any]) -> Iterator[tuple[Any, bool]]:
    """The values to try, and whether each goes over a link."""
    if isinstance(kind, list) or kind == "COMBO":
        yield from (
            (choice, False) for choice in (*(kind if isinstance(kind, list) else options["options"]), "nothing")
        )
    elif kind in ("INT", "FLOAT"):
        low, high = options["min"], options["max"]
        yield from ((value, False) for value in (low, high))
        if high < 2**62:
            yield from ((value, True) for value in (low - 1, high + 1, 10**15, -(10**15)))
        if kind == "FLOAT":
            yield from ((value, False) for value in (math.nan, math.inf))
    elif kind == "BOOLEAN":
        yield from ((value, False) for value in (False, True))
    elif kind == "STRING":
        texts = (
            "", "word " * 5000, "../../outside", "C:\\x\\y", "a\0b\r\n{}", "{} {}", "\U0001f600 é 汉",
            "double 0-9999, rest",
        )  # fmt: skip
        yield from ((text, False) for text in texts)


class Sweep:
    """Runs cases on a server."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.restart()
        self.info: dict[str, Any] = self.client.get("/object_info")
        self.target = ""  # the node whose widgets are tried

    def cases(self, only: list[str]) -> Iterator[Case]:
        """What came of each value of each widget of the nodes ``only``, or of all of ours."""
        for node in sorted(name for name in self.info if name.startswith(OURS) and (not only or name in only)):
            for model in (MODELS.get(node, FAMILIES[0]), *MORE_MODELS.get(node, ())):
                for widget, (kind, options) in self.inputs(node):
                    for value, linked in values_of(kind, options):
                        yield self.tried(Case(node, widget, value, model), linked, kind)

    def inputs(self, node: str, optional: bool = True) -> list[tuple[str, tuple[Any, dict[str, Any]]]]:
        """Name to type and options of a node's inputs."""
        groups = ("required", "optional") if optional else ("required",)
        given = [pair for group in groups for pair in self.info[node]["input"].get(group, {}).items()]
        return [(name, (row[0], row[1] if len(row) > 1 else {})) for name, row in given]

    def tried(self, case: Case, linked: bool, kind: Any) -> Case:
        """The case with its outcome."""
        graph, made, self.target = Graph(), dict[str, str](), case.node
        node = self.add(graph, made, case.node, case.model)
        value = graph.link(graph.add(LINKED[kind], value=case.value)) if linked else case.value
        graph.prompt[node]["inputs"][case.widget] = value
        if not self.info[case.node]["output_node"]:
            graph.add("PreviewAny", source=graph.link(node))
        late = threading.Timer(SECONDS, self.client.interrupt)
        late.start()
        try:
            run = self.client.run(graph.prompt, timeout=DEAF_SECONDS)
        except (TimeoutError, websocket.WebSocketTimeoutException):
            self.restart()
            return Case(*self.key(case), HUNG, f"it does not end {DEAF_SECONDS} s after a cancel")
        except Refused as refusal:
            errors = [each for node in refusal.answer.get("node_errors", {}).values() for each in node["errors"]]
            return Case(*self.key(case), "refused", "; ".join(f"{e['message']}: {e['details']}" for e in errors))
        finally:
            late.cancel()
        return Case(*self.key(case), run.ending, run.message, str(run.error.get("exception_type", "")))

    def restart(self) -> None:
        """The server anew, with as much memory as no other program on this machine misses."""
        self.server.stop()
        self.server.start()
        self.client = Client(self.server.url)
        used = int(Path(f"/proc/{self.server.pid}/statm").read_text().split()[0]) * resource.getpagesize()
        resource.prlimit(self.server.pid, resource.RLIMIT_AS, (used + SPARE_BYTES, used + SPARE_BYTES))

    @staticmethod
    def key(case: Case) -> tuple[str, str, Any, str]:
        """What a case is about."""
        return case.node, case.widget, case.value, case.model

    def add(self, graph: Graph, made: dict[str, str], kind: str, model: str) -> str:
        """The id of a node of a kind with everything it needs, once per graph."""
        if kind in made:
            return made[kind]
        inputs: dict[str, Any] = {}
        for name, (form, options) in self.inputs(kind, optional=False):
            source = NAMED.get((kind, name)) or NAMED.get(name) or SOURCES.get(str(form))
            if source is not None:
                inputs[name] = graph.link(self.add(graph, made, source[0], model), source[1])
            elif isinstance(form, list) or form == "COMBO":
                inputs[name] = options.get("default", (form if isinstance(form, list) else options["options"])[0])
            else:
                inputs[name] = options.get("default", "")
            inputs[name] = SMALL.get(name, inputs[name])
        if kind == "LoadImage":
            inputs["image"] = "example.png"
        if kind == "AnyGPULoadPipeline":
            inputs["model"] = model
        if kind == "AnyGPULoadPaintPipeline":
            inputs["model"] = PAINTS.get(self.target, "hunyuan3d-paint-v2-0")
        made[kind] = graph.add(kind)
        graph.prompt[made[kind]]["inputs"] = inputs  # one of which may be called kind
        return made[kind]


def main(only: list[str]) -> int:
    """The status: 1 where a message is raw."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # or the server would outlive this
    with tempfile.TemporaryDirectory(prefix="anygpu-sweep-") as folder:
        server = Server(find_host(), Path(folder), tiny_home(), stand_ins=True)
        try:
            faults = swept(server, only)
        finally:
            server.stop()
    return 1 if faults else 0


def swept(server: Server, only: list[str]) -> list[str]:
    """What is wrong, a line per message; every message is printed once. The server runs when this ends."""
    (server.base / "models" / "diffusers").mkdir(parents=True, exist_ok=True)
    server.every_model()
    paint_models.install(server)
    lora_files.write(server, "style.safetensors")
    seen: dict[tuple[str, str], str] = {}
    counts: dict[str, int] = {}
    faults = []
    for case in Sweep(server).cases(only):
        counts[case.ending] = counts.get(case.ending, 0) + 1
        text = re.sub(r"\d+", "#", case.message)
        if case.message and (case.node, text) not in seen:
            seen[case.node, text] = str(case)
            print(f"{case.fault or 'ok'} | {case.ending} | {case}\n    {case.message}", flush=True)
            if case.fault:
                faults.append(f"{case}: {case.message} ({case.fault})")
    print(json.dumps(counts))
    return faults


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
