"""Paused runs: a prompt ends after a step that is saved, and is kept with its workflow to be queued again."""

from __future__ import annotations

import base64
import io
import logging
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from comfy_execution.graph_utils import is_link
from server import PromptServer

from ...compat.durable import write_json
from ...compat.errors import CheckpointError, InputError, json_file
from ..folders import state_folder

log = logging.getLogger(__name__)
MOST = 4  # no more than what latents/steps.py keeps of unfinished samplings
PIXELS = 160  # of a picture's longer side
_wanted: set[str] = set()  # ids of prompts that are to pause


def request() -> dict[str, str]:
    """Ask the running prompt to pause after its next saved step; the message to show, or InputError if none runs."""
    items = running()
    if not items:
        raise InputError("no run to pause", expected="a run in progress", fix="Press Run.")
    _wanted.clear()
    _wanted.update(item[1] for item in items)
    note = "Samplings that have ended are made again on Resume."
    return {"text": f"Pausing after the next step that is saved; core's samplers and step caches save none. {note}"}


def save(item: Any, where: str, picture: Any) -> bool:
    """Write the queue's ``item`` of :func:`wanted_run` to disk, delete the oldest beyond :data:`MOST` and ask ComfyUI
    to unload all models; False if the disk fails. ``where``: such as ``sampling 3/20``. The caller ends the prompt."""
    _, prompt_id, prompt, extra, outputs, *_ = item
    _wanted.clear()
    workflow = (extra.get("extra_pnginfo") or {}).get("workflow")
    record = {"where": where, "time": time.time(), "prompt": prompt, "workflow": workflow, "outputs": outputs}
    record["picture"] = _data_url(picture)
    try:
        _folder().mkdir(parents=True, exist_ok=True)
        write_json(_folder() / f"{prompt_id}.json", record)
    except OSError as error:
        log.warning("AnyGPU: the run goes on, since it cannot be saved as paused: %s", error)
        return False
    with suppress(OSError):  # an older one that stays is only listed longer
        for path in sorted(_files().values(), key=lambda path: path.stat().st_mtime, reverse=True)[MOST:]:
            path.unlink(missing_ok=True)
    for flag in ("unload_models", "free_memory"):
        PromptServer.instance.prompt_queue.set_flag(flag, True)
    log.info("AnyGPU: paused after %s; the AnyGPU tab resumes it", where)
    return True


def listing() -> list[dict[str, Any]]:
    """The readable paused runs, newest first: ``id``, ``where``, ``time`` in Unix seconds, ``picture`` as data URL."""
    found = []
    for identity in _files():
        with suppress(InputError):
            record = resumable(identity)
            found.append({"id": identity, **{name: record.get(name) for name in ("where", "time", "picture")}})
    return sorted(found, key=lambda item: item["time"], reverse=True)


def resumable(identity: str) -> dict[str, Any]:
    """The record of a paused run, its ``prompt`` as it was queued; InputError for no such id, or a damaged file."""
    try:
        record = json_file(_files()[identity])
        if isinstance(record["time"], float):
            return {**record, "prompt": _as_queued(record["prompt"])}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, CheckpointError):
        pass
    raise InputError(f"no paused run {identity!r}", expected="an id from the list", fix="Press Refresh.")


def forget(identity: str) -> None:
    path = _files().get(identity)
    if path is not None:
        path.unlink(missing_ok=True)


def forget_resumed() -> None:
    """Delete the files of paused runs whose prompt is running again."""
    prompts = [_as_queued(prompt) for _, _, prompt, *_ in running()]
    for identity in _files():
        with suppress(InputError, OSError):
            if resumable(identity)["prompt"] in prompts:
                forget(identity)


def _as_queued(prompt: dict[str, Any]) -> dict[str, Any]:
    """``prompt`` without core's ``is_changed``, which goes stale and may be NaN, and with the lists of widgets wrapped
    again: core unwraps them, and would take them for links."""
    return {
        node: {key: _wrapped(item) if key == "inputs" else item for key, item in entry.items() if key != "is_changed"}
        for node, entry in prompt.items()
    }


def _wrapped(inputs: dict[str, Any]) -> dict[str, Any]:
    lists = {name: each for name, each in inputs.items() if isinstance(each, list) and not is_link(each)}
    return {**inputs, **{name: {"__value__": each} for name, each in lists.items()}}


def _files() -> dict[str, Path]:
    return {path.stem: path for path in _folder().glob("*.json")}


def wanted_run() -> Any:
    """The queue's item of the running prompt if a pause was requested for it, else None."""
    return next((item for item in running() if item[1] in _wanted), None) if _wanted else None


def running() -> list[Any]:
    """The items that ComfyUI's queue executes now; empty without a server."""
    queue = getattr(getattr(PromptServer, "instance", None), "prompt_queue", None)
    return [] if queue is None else queue.get_current_queue_volatile()[0]


def _folder() -> Path:
    return state_folder() / "paused"


def _data_url(picture: Any) -> str:
    """A preview (format, PIL image, size) as a small JPEG in a data URL; empty for any other value."""
    with suppress(Exception):  # a previewer of another pack gives what it likes
        target, small = io.BytesIO(), picture[1].convert("RGB")
        small.thumbnail((PIXELS, PIXELS))
        small.save(target, "JPEG", quality=80)
        return f"data:image/jpeg;base64,{base64.b64encode(target.getvalue()).decode()}"
    return ""
