"""A ComfyUI pack for tests: writes down each file, socket and process that Python touches, with the node that runs."""

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import folder_paths
from comfy_execution.utils import get_executing_context

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
CHANGES = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "shutil.rmtree")
CONNECTS = ("socket.connect", "socket.getaddrinfo", "socket.bind", "socket.sendto", "urllib.Request")
STARTS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "pty.spawn")
_log = os.open(Path(folder_paths.base_path) / "touched.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
_inside = threading.local()


def _event(kind: str, given: tuple[Any, ...]) -> tuple[str, list[Any]] | None:
    if kind == "open":
        path, mode, flags = given
        writes = bool(set(mode or "") & set("wax+")) or (isinstance(flags, int) and bool(flags & WRITES))
        return ("write" if writes else "read", [path]) if isinstance(path, (str, bytes, os.PathLike)) else None
    if kind in CHANGES:
        return "write", [path for path in given if isinstance(path, (str, bytes, os.PathLike))]
    if kind in CONNECTS:
        return "connect", [str(given[-1] if kind == "socket.connect" else given[0])]
    return ("start", [str(given)[:500]]) if kind in STARTS else None


def _watch(kind: str, given: tuple[Any, ...]) -> None:
    if getattr(_inside, "busy", False):
        return
    _inside.busy = True
    try:
        event = _event(kind, given)
        if event is not None:
            context = get_executing_context()
            node = [context.prompt_id, context.node_id] if context else [threading.current_thread().name, ""]
            way, things = event
            if way in ("read", "write"):
                things = [os.path.realpath(os.fsdecode(item)) for item in things]
            os.write(_log, (json.dumps([*node, way, things]) + "\n").encode())
    except Exception as error:
        os.write(_log, (json.dumps(["", "", "failed", [repr(error)]]) + "\n").encode())
    finally:
        _inside.busy = False


sys.addaudithook(_watch)
NODE_CLASS_MAPPINGS: dict[str, Any] = {}
