"""The actor that ComfyUI reaches through Ray: it takes jobs and pictures in, and gives states and results out. All that
passes is text, numbers and the bytes of files, and only keys name a file. ComfyUI's Python has Ray but no package
``anygpu``: the class is sent by value, imports ours where it runs, and raises errors of Python's own types."""

from __future__ import annotations

import sys
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..compat.errors import InputError, PackError, first_line
from ..compat.ray_clusters import GATEWAY, NAMESPACE

if TYPE_CHECKING:
    from .driver import Driver

ANSWER_SECONDS = 2.0  # to wait for a worker's state; after that the folder's is taken, which is seconds old
CALLS = 64  # at a time: each ComfyUI that waits for a preview takes one


class Gateway:
    """An actor on the driver's machine, which reads and writes the folder, and asks the workers by their names."""

    def __init__(self, root: str) -> None:
        from ..pipelines.records.job_folder import JobFolder

        self.folder = JobFolder(Path(root))

    def ready(self) -> bool:
        """True where this cluster asks for a token."""
        from ..compat.ray_clusters import token_mode

        return token_mode()

    def put_input(self, content: bytes, suffix: str) -> str:
        """Keep a picture or mesh; returns the name by which jobs find it. ValueError for its suffix or size."""
        from ..pipelines.records.job_folder import INPUTS, MOST_INPUT_BYTES

        if suffix not in INPUTS or len(content) > MOST_INPUT_BYTES:
            raise ValueError(f"an input of {len(content)} bytes that ends in {suffix!r}")
        return self.folder.add_content(bytes(content), suffix)

    def submit(self, name: str, lines: list[str]) -> list[str]:
        """Take jobs in as the file ``name``, failed ones again; returns their keys. ValueError for a line that is no
        job, such as one of another version, for a name that no file can have, and where the folder fails."""
        from ..compat.errors import PackError
        from .render import task_of

        try:
            lines = [str(line).replace("\n", " ") for line in lines]  # between values: in a file it would end the job
            keys = [task_of(line).key for line in lines]
            self.folder.ask_again(key for key in keys if not self.folder.is_done(key))
            listed = sha256("".join(keys).encode()).hexdigest()[:16]  # another list of this name must not replace it
            self.folder.write_jobs(f"{self.folder.jobs_file(name).stem[:40]}-{listed}", lines)
        except (PackError, OSError) as error:
            raise ValueError(str(error)) from None
        return keys

    def standing(self, keys: list[str]) -> dict[str, Any]:
        """Jobs of ``keys`` that are done, or failed and why; workers that Ray knows, as they or the folder say."""
        import ray

        from ..pipelines.records.job_folder import KEY

        done = [key for key in keys if KEY.fullmatch(key) and self.folder.is_done(key)]
        failed = {key: text for key in keys if KEY.fullmatch(key) and (text := self.folder.failure(key))}
        calls: dict[Any, dict[str, Any]] = {}
        for worker in self.folder.workers():
            with suppress(ValueError, AttributeError):  # a worker of an earlier driver, or no worker at all
                calls[ray.get_actor(worker["worker"], namespace=NAMESPACE).state.remote()] = worker
        ready, _ = ray.wait(list(calls), num_returns=len(calls), timeout=ANSWER_SECONDS) if calls else ([], [])
        for call in ready:
            with suppress(ray.exceptions.RayError):
                worker, now = calls[call], ray.get(call)
                worker.update(now, job=now["key"])  # newer than in the folder
                if worker.get("state") in ("idle", "rendering"):
                    worker["state"] = "rendering" if now["key"] else "idle"
        return {"done": done, "failed": failed, "workers": list(calls.values())}

    def preview(self, worker: str) -> Any:
        """Pixels (H, W, 3), uint8, of what a worker makes, as numpy; None if there are none."""
        import ray

        try:
            return ray.get(ray.get_actor(worker, namespace=NAMESPACE).preview.remote())
        except (ValueError, ray.exceptions.RayError):
            return None

    def cancel(self, keys: list[str]) -> None:
        self.folder.cancel(keys)

    def result(self, key: str) -> tuple[str, bytes] | None:
        """Suffix and bytes of a finished file; None while there is none."""
        from ..pipelines.records.job_folder import KEY

        path = self.folder.result(key) if KEY.fullmatch(key) else None
        return None if path is None else (path.suffix, path.read_bytes())


def open_gateway(driver: Driver) -> Any:
    """The gateway of a driver's folder, on its machine, while the driver lives; InputError where another has one."""
    from ray import cloudpickle
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    ray = driver.ray
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor = ray.remote(Gateway).options(
        name=GATEWAY, namespace=NAMESPACE, num_cpus=0, max_concurrency=CALLS, max_restarts=-1, scheduling_strategy=here
    )
    try:
        gateway = actor.remote(str(driver.folder.root))
        ray.get(gateway.ready.remote())
    except (ValueError, ray.exceptions.RayError, PackError) as error:
        found = f"a second driver that watches ({first_line(error)})"
        fix = "Stop the other, or use `anygpu-farm run` here."
        raise InputError(found, expected="one `anygpu-farm watch` per cluster", fix=fix) from error
    return gateway
