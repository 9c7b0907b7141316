"""Contents of the side bar for this machine and the last run, as plain values; forecast.py describes a graph."""

from __future__ import annotations

import functools
import threading
import time
from dataclasses import asdict
from typing import Any

from comfy_execution.progress import get_progress_state
from comfy_execution.utils import get_executing_context
from server import PromptServer

from ...compat.device.facts import GIBIBYTE, DeviceFacts, facts_for, free_bytes, value_or
from ...compat.device.probe_store import UNKNOWN
from ...compat.errors import PackError
from ...compat.memory.statistics import saved_stages
from ...compat.probe_results import probe_results_of
from ...compat.report import probe_statuses, report_on
from ...compat.requirements import package_problem
from ...pipelines import decisions
from ...pipelines.demo import demo_models
from ...pipelines.files.catalogue import absent_offers, first_steps
from ...pipelines.files.models import family_of_folder
from ...pipelines.report import precisions
from .. import folders, memory_manager

_lock = threading.Lock()
_facts_of, _tooltip_of = functools.cache(facts_for), functools.cache(decisions.limit_tooltip)
_last: dict[str, Any] = {"prompt": "", "client": None, "began": 0.0, "nodes": {}}


def facts() -> DeviceFacts:
    """Facts about the device that ComfyUI computes on, gathered once per device."""
    return _facts_of(str(memory_manager.compute_device()))


def limit_tooltip(name: str) -> str:
    return _tooltip_of(facts(), name)


def first_run() -> str:
    """Advice for a user without a model: the first steps, and which demo workflows run at once; empty with a model."""
    if folders.models():
        return ""
    here, host = facts(), _facts_of("cpu").total_bytes
    size = f"{here.name}, {host / GIBIBYTE:.0f} GB of host memory"
    steps = first_steps(folders.model_roots(), size, host, 0 if here.backend == "cpu" else here.total_bytes)
    families = filter(None, map(family_of_folder, demo_models().values()))
    drawn = [each.title + (" (text to video)" if folders.draws_text_alone(each) else "") for each in families]
    at_once = f" Workflows of {', '.join(drawn)} run at once: a small demo model draws coloured shapes in its place."
    return f"No model yet.{at_once if drawn else ''}\n{steps}"


def offers() -> dict[str, dict[str, str]]:
    """Folder name of each missing published model -> ``title`` and ``text`` on its download; empty on failure."""
    return value_or(lambda: absent_offers(folders.models(), folders.model_roots()), {})


def memory_now() -> dict[str, Any]:
    """Free (None: unknown) and total bytes of the device and the host; ``shared`` where both are one memory."""
    here, host = facts(), _facts_of("cpu")
    return {
        "device": {"name": here.name, "free": free_bytes(here.device), "total": here.total_bytes},
        "host": {"name": host.name, "free": free_bytes(host.device), "total": host.total_bytes},
        "shared": here.unified or here.device.type == host.device.type,
    }


def machine(again: bool = False) -> dict[str, Any]:
    """The panel's data on this machine: device, memory, lights of the probes, report; ``again`` reruns all probes."""
    here = facts()
    store = probe_results_of(here, folders.state_folder())
    if again:
        store.ask_all(again=True)
    known = store.without_asking()
    report = report_on(here, known, precisions(), free_bytes(here.device), store.note, store.misses())
    sections = [{"heading": name, "lines": [line.as_json() for line in lines]} for name, lines in report.sections]
    return {
        "device": str(here),
        "memory": memory_now(),
        "lights": [asdict(status) for status in probe_statuses(here, known)],
        "asked": all(answer.status != UNKNOWN for answer in known.values()),
        "sections": sections,
        "limits": decisions.limits(here),
        "first_run": value_or(first_run, ""),
        "problem": package_problem(),
    }


def shared_machine() -> dict[str, str]:
    """The ``text`` and the name of the ``file`` that `anygpu report --share` writes, and the ``form`` to send it by."""
    from ...pipelines.records import machines

    here = machines.this_machine(memory_manager.compute_device(), folders.state_folder(), precisions())
    return {"text": here.text(), "file": machines.FILE, "form": machines.FORM}


def error_message(error: PackError) -> dict[str, str]:
    return {"found": error.found, "expected": error.expected, "fix": error.fix}


class NodeRun:
    """Record of one node in one run; the seconds between two steps count for the stage whose step ended them."""

    def __init__(self, node_id: str | None) -> None:
        self.started = self._moment = time.monotonic()
        self.entry: dict[str, Any] = {"stages": {}, "said": [], "demo": [], "status": "", "seconds": 0.0, "done": False}
        self._stage = ""
        if node_id is not None:
            context = get_executing_context()
            _enter(on_canvas(node_id), "" if context is None else context.prompt_id, self.entry)

    def step(self, stage: str) -> None:
        self._stage = stage
        self._count(stage)

    def at(self, where: str, left: str = "") -> None:
        """Record the progress, such as ``sampling 3/20``, and the time left, ``, 4.1 s each, about 70 s left``."""
        self.entry.update(status=where, left=left)

    def finish(self, status: str) -> None:
        self._count(self._stage or "working")
        self.entry.update(status=status, done=True)

    def _count(self, stage: str) -> None:
        """Add the seconds since the last call to those of ``stage``."""
        now = time.monotonic()
        spent = self.entry["stages"].get(stage, 0.0) + now - self._moment
        self.entry.update(stages={**self.entry["stages"], stage: spent}, seconds=now - self.started)  # others copy it
        self._moment = now


def last_run(client: str | None = None) -> dict[str, Any]:
    """The last run: id of its ``prompt``, a copy of the records of its ``nodes``, ``costs`` of stages, and what
    ``changed`` since the run before; all empty for a ``client`` (browser window) that did not queue it."""
    from ...pipelines.records import changes

    with _lock:
        last = {**_last, "nodes": {node: dict(entry) for node, entry in _last["nodes"].items()}}
    if client not in (None, last.pop("client")):
        return {"prompt": "", "nodes": {}, "costs": [], "changed": None}
    began, compared = last.pop("began"), changes.last_two(folders.saved_folder())
    costs = [asdict(cost) for cost in saved_stages(folders.state_folder()) if cost.ended > began]
    return {**last, "costs": costs, "changed": compared and {**asdict(compared), "headline": compared.headline}}


def on_canvas(node_id: str | None) -> str | None:
    """The id of the node on the canvas: for a node of an expanded subgraph, that of the node that expanded."""
    return get_progress_state().dynprompt.get_display_node_id(node_id)  # type: ignore[no-any-return]


def window() -> str | None:
    """The client id of the browser window that queued the running prompt; None without one."""
    return getattr(getattr(PromptServer, "instance", None), "client_id", None)


def stop(node_id: str | None, how: str) -> dict[str, Any] | None:
    """Mark the node's record as ended, ``how`` such as ``cancelled``; a copy of it, None where nothing was running."""
    with _lock:
        entry = _last["nodes"].get(on_canvas(node_id))
        if entry is None or entry["done"]:
            return None
        entry.update(status=f"{how} at {entry['status']}" if entry["status"] else how, done=True)
        return dict(entry)


def _enter(node_id: str | None, prompt: str, entry: dict[str, Any]) -> None:
    """Add the record of a node to the last run, which begins anew with another prompt id."""
    with _lock:
        if _last["prompt"] != prompt:
            _last.update(prompt=prompt, client=window(), began=time.time(), nodes={})
        _last["nodes"][node_id] = entry
