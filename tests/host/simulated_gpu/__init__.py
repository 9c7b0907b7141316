"""A ComfyUI pack for tests: ComfyUI computes on the simulated accelerator, which counts memory and has a limit.

``GET /simulated/memory`` tells the bytes of the device; ``POST /simulated/limit`` with ``{"bytes": N}`` gives it N more
than it holds now, or with null as many as anyone wants. `Server(gpu=True)` attaches it.

What the device's probes answered is kept for every size of it: they take a minute and a half.
"""

import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from aiohttp import web
from server import PromptServer

TESTS = str(Path(__file__).resolve().parents[2])

sys.path.append(TESTS)
try:
    from simulated import accelerator

    from host.inside.sight import seen_by_comfyui
finally:
    sys.path.remove(TESTS)  # its folders have the names of packages that others look for

_seen = seen_by_comfyui(accelerator.load())
_seen.__enter__()  # for as long as this ComfyUI lives
NODE_CLASS_MAPPINGS: dict[str, Any] = {}


def keep_answers() -> None:
    """The store of probes files its answers under the device without its size; once for each store."""
    for name, module in list(sys.modules.items()):
        if name.endswith("compat.device.probe_store") and not hasattr(module, "sized_key_of"):
            module.sized_key_of = key_of = module.key_of
            module.key_of = lambda facts, asked, key_of=key_of: key_of(replace(facts, total_bytes=0), asked)


@PromptServer.instance.routes.get("/simulated/memory")
async def memory(request: web.Request) -> web.Response:
    """Bytes allocated, at the peak and in all."""
    return web.json_response(asdict(accelerator.memory()))


@PromptServer.instance.routes.post("/simulated/limit")
async def limit(request: web.Request) -> web.Response:
    """The memory after setting another limit on every device: `auto` would compute on a larger one beside it."""
    keep_answers()
    more = (await request.json())["bytes"]
    for index in range(accelerator.device_count()):
        accelerator.set_limit(None if more is None else accelerator.memory(index).allocated_bytes + more, index)
    return web.json_response(asdict(accelerator.memory()))
