"""Scenes in which ComfyUI's own memory functions fail or lie to this pack, and to nobody else."""

import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import comfy.model_management as management
from anygpu.compat import ray_clusters
from anygpu.compat.errors import InputError
from anygpu.host.farm import render_at
from anygpu.pipelines.base import PromptRequest, SampleSettings, Silent
from anygpu.pipelines.records.job import Content, VideoJob
from anygpu.pipelines.records.job_folder import JobFolder
from anygpu.pipelines.records.job_lists import write_list
from hostile.faults import LIES, misbehaving

from host.inside.device import bytes_on_device, distance, loaded_for, rendered
from host.inside.sight import state

BEHAVIOURS: dict[str, Any] = {
    "runtime": RuntimeError("The device doesn't support querying the available free memory"),
    "os": OSError(1450, "Insufficient system resources"),
    "attribute": AttributeError("no such attribute"),
    "process": subprocess.CalledProcessError(1, ["gcc"]),
    **{repr(lie): lie for lie in LIES},
}


def asked(name: str, question: str, behaviours: list[str]) -> dict[str, Any]:
    """A clip beside each behaviour of one question: its difference from the CPU's."""
    found = {}
    for behaviour in behaviours:
        management.unload_all_models()
        original = getattr(management, question)
        with state(**{question: misbehaving(original, BEHAVIOURS[behaviour], [0])}):
            found[behaviour] = distance(rendered(loaded_for(name), name), name)
    return found


def ordered(name: str, order: str) -> dict[str, Any]:
    """What becomes of a failure of something that ComfyUI was told to do: it is raised, and the next run is right."""
    pipeline, before = loaded_for(name), bytes_on_device()
    failure = RuntimeError("acc error: an illegal memory access was encountered")
    with state(**{order: misbehaving(getattr(management, order), failure, [0])}):
        try:
            rendered(pipeline, name, Silent())
            raised = ""
        except RuntimeError as error:
            raised = str(error)
    management.unload_all_models()
    left = bytes_on_device() - before
    return {"raised": raised, "left": left, "next": distance(rendered(pipeline, name), name)}


def dying_farm(folder: str) -> dict[str, str]:
    """What a node says of a farm that ends at each thing it is asked, in turn, by the question."""

    class RayError(Exception):
        pass

    said = {}
    for last in ("ready", "submit", "standing", "result"):

        def get(name: str, last: str = last) -> None:
            if name == last:
                raise RayError("The actor is dead because its owner has died.")

        closed = [0]
        try:
            farm_of(folder, get, lambda *_: True, lambda: None, closed, RayError)
        except InputError as error:
            said[last] = f"{error}" if len(closed) == 2 else "its socket stays open"
    return said


def slow_farm(folder: str) -> list[str]:
    """What a farm has done, in order, where a node is cancelled while a head takes five seconds to take jobs in."""
    done, asked = list[str](), list[str]()

    def wait(name: str, timeout: float) -> bool:
        asked.append(name)
        taken = name != "submit" or timeout >= 5
        done.extend([name] * taken)
        return taken

    def check() -> None:
        if "submit" in asked:
            raise InterruptedError

    with suppress(InterruptedError):
        farm_of(folder, lambda name: name == "cancel" and done.append(name), wait, check)
    return done


def farm_of(folder: str, get: Any, wait: Any, check: Any, closed: Any = None, error: type = LookupError) -> None:
    """A node's run of one job at a farm that does at each question, by its name, what ``get`` and ``wait`` do."""

    def answer(name: Any, **_: Any) -> Any:
        if isinstance(name, list):
            return [*map(answer, name)]
        get(name)
        return {"ready": True, "standing": {"done": [job.key], "failed": {}, "workers": []}}.get(name)

    methods = ("ready", "submit", "standing", "result", "cancel")
    gateway = SimpleNamespace(**{name: SimpleNamespace(remote=lambda *_, n=name: n) for name in methods})
    ray, token = ModuleType("ray"), ModuleType("ray._private.authentication.authentication_utils")
    vars(ray).update(
        is_initialized=lambda: False,
        init=lambda **_: None,
        shutdown=lambda: (closed or []).append(1),
        get_actor=lambda *_, **__: gateway,
        get=answer,
        wait=lambda calls, timeout: (calls, []) if wait(calls[0], timeout) else ([], calls),
        exceptions=SimpleNamespace(RayError=error, RayTaskError=()),
    )
    token.is_token_auth_enabled = lambda: True
    job = VideoJob(Content("LTX"), PromptRequest("a fox"), SampleSettings(64, 64, 9, 2))
    jobs = write_list(JobFolder(Path(folder)), "one", [job])
    modules = {"ray": ray, "ray._private": ModuleType("p"), "ray._private.authentication": ModuleType("a")}
    with (
        mock.patch.dict(sys.modules, {**modules, token.__name__: token}),
        mock.patch.object(ray_clusters, "refusal", lambda *_: ""),
    ):
        render_at("auto", jobs, SimpleNamespace(check=check, lines=[], step=lambda *_: None))
