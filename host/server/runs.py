"""The last run of each node as plain values: status, messages, and the seconds of each stage."""

from __future__ import annotations

import threading
import time
from typing import Any

from comfy_execution.utils import get_executing_context
from server import PromptServer

_lock = threading.Lock()
_last: dict[str, Any] = {"prompt": "", "client": None, "began": 0.0, "nodes": {}}


class NodeRun:
    """One node of one run; time is attributed to the stage whose step ended it."""

    def __init__(self, node_id: str | None) -> None:
        self.started = self._moment = time.monotonic()
        self.entry: dict[str, Any] = {"stages": {}, "said": [], "status": "", "seconds": 0.0, "done": False}
        self._stage = ""
        if node_id is not None:
            context = get_executing_context()
            _enter(node_id, "" if context is None else context.prompt_id, self.entry)

    def step(self, stage: str) -> None:
        self._stage = stage
        self._count(stage)

    def at(self, where: str, left: str = "") -> None:
        """Progress of the node, such as ``sampling 3/20``, and ``, 4.1 s each, about 70 s left`` of it."""
        self.entry.update(status=where, left=left)

    def finish(self, status: str) -> None:
        self._count(self._stage or "working")
        self.entry.update(status=status, done=True)

    def snapshot(self) -> dict[str, Any]:
        """The record so far, for a message that leaves this thread."""
        return {**self.entry, "stages": dict(self.entry["stages"])}

    def _count(self, stage: str) -> None:
        now = time.monotonic()
        self.entry["stages"][stage] = self.entry["stages"].get(stage, 0.0) + now - self._moment
        self.entry["seconds"] = now - self.started
        self._moment = now


def was_queued_by(client: str) -> bool:
    """True if the last run is of a prompt of this client."""
    with _lock:
        return bool(_last["client"] == client)


def last_run() -> dict[str, Any]:
    """The last run: ``prompt``, and ``nodes``, from node id to status, seconds and stages."""
    with _lock:
        nodes = {node: {**entry, "stages": dict(entry["stages"])} for node, entry in _last["nodes"].items()}
        return {"prompt": _last["prompt"], "nodes": nodes}


def stop(node_id: str | None, how: str) -> dict[str, Any] | None:
    """The record of a node whose run has ended before its end, closed; None where it has none that is open."""
    with _lock:
        entry = _last["nodes"].get(node_id)
        if entry is None or entry["done"]:
            return None
        entry.update(status=f"{how} at {entry['status']}" if entry["status"] else how, done=True)
        return {**entry, "stages": dict(entry["stages"])}


def began() -> float:
    """The time at which the last run began, in seconds since 1970; 0 before the first."""
    with _lock:
        return float(_last["began"])


def _enter(node_id: str, prompt: str, entry: dict[str, Any]) -> None:
    """Begin a new record when another prompt runs."""
    with _lock:
        if _last["prompt"] != prompt:
            client = getattr(getattr(PromptServer, "instance", None), "client_id", None)
            _last.update(prompt=prompt, client=client, began=time.time(), nodes={})
        _last["nodes"][node_id] = entry
