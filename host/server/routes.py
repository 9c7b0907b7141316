"""The HTTP routes of the AnyGPU tab, read-only except six: two ask the device and keep its answers, one recovers a
saved latent, two pause the run and forget a paused one, one draws what templates load. No text becomes a path."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from aiohttp import web
from server import PromptServer

from ...compat.checkpoints.headers import reading
from ...compat.errors import InputError, PackError, json_within, parts_of
from .. import recovery
from . import panel, paused

PREFIX = "/anygpu"
PACK = Path(__file__).parents[2].name  # under which ComfyUI serves web/
HELP = f"/extensions/{PACK}/docs/{{node:AnyGPU[A-Za-z0-9]{{1,60}}}}.md"  # the last place where its frontend looks
MOST_BYTES, MOST_NODES = 4 * 1024 * 1024, 5000
IDENTITY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
FRESH = {"Cache-Control": "no-store"}
Handler = Callable[[web.Request], Awaitable[Any]]


def add_routes(table: web.RouteTableDef | None = None) -> bool:
    """Add the routes to ``table``, by default ComfyUI's own; False without a server, or if they are there already."""
    server = getattr(PromptServer, "instance", None)
    table = table if table is not None else getattr(server, "routes", None)
    if table is None or any(getattr(route, "path", "").startswith(f"{PREFIX}/") for route in table):
        return False
    for method, path, handler in ROUTES:
        table.route(method, PREFIX + path)(_with_json_errors(handler))
    table.route("GET", HELP)(english)
    return True


async def english(request: web.Request) -> web.Response:
    """Redirect to a node's English help page, for interface languages without a translation of it."""
    return web.Response(status=302, headers={"Location": f"{request.match_info['node']}/en.md"})


async def graph(request: web.Request) -> Any:
    from . import forecast  # with all that loads and paints: at the first request, not at ComfyUI's start

    return await asyncio.to_thread(forecast.graph, checked_prompt(await body_of(request)))


def asking(act: Callable[[], Any]) -> Handler:
    """A handler that answers with ``act()``, which uses the device; 409 during a run, which it would slow down."""

    async def handler(request: web.Request) -> Any:
        await body_of(request)
        if paused.running():
            text = _refusal("a run is in progress", "an idle device", "Wait until it has finished, or cancel it.")
            raise web.HTTPConflict(text=text)
        return await asyncio.to_thread(act)

    return handler


async def error_parts(request: web.Request) -> Any:
    return parts_of(str((await body_of(request)).get("message", "")))


async def latents(request: web.Request) -> Any:
    return {"latents": [_as_json(item) for item in await asyncio.to_thread(recovery.listing)]}


async def picture(request: web.Request) -> Any:
    picture_bytes = await asyncio.to_thread(recovery.thumbnail, checked_id(request.match_info))
    if picture_bytes is None:
        raise web.HTTPNotFound(text=_refusal("no picture", "an id from the list", "Refresh the list."))
    return web.Response(body=picture_bytes, content_type="image/jpeg")


async def recover(request: web.Request) -> Any:
    """The node and widget value that load a saved latent, once reading all of it has shown that it is intact."""
    identity = checked_id(await body_of(request))
    await asyncio.to_thread(recovery.load, identity)
    text = "The latents are fine. A node that loads them was added: connect it to AnyGPU Decode."
    return {"node": "AnyGPURecoverLatents", "widget": "kept", "value": identity, "text": text}


async def pause(request: web.Request) -> Any:
    await body_of(request)
    return paused.request()


async def paused_runs(request: web.Request) -> Any:
    return {"paused": await asyncio.to_thread(paused.listing)}


async def forget(request: web.Request) -> Any:
    await asyncio.to_thread(paused.forget, checked_id(await body_of(request)))
    return {"paused": await asyncio.to_thread(paused.listing)}


async def examples(request: web.Request) -> Any:
    """Draw the picture and the clip that the templates load, unless ComfyUI's input folder has files of these names."""
    from .. import examples  # draws with torch: not at ComfyUI's start

    await body_of(request)
    return {"added": await asyncio.to_thread(examples.add)}


ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("GET", "/machine", lambda request: asyncio.to_thread(panel.machine)),
    ("GET", "/memory", lambda request: asyncio.to_thread(panel.memory_now)),
    ("GET", "/run", lambda request: asyncio.to_thread(panel.last_run, request.query.get("client_id"))),
    ("POST", "/graph", graph),
    ("GET", "/latents", latents),
    ("GET", "/latents/{id}/picture", picture),
    ("POST", "/probes", asking(lambda: panel.machine(again=True))),
    ("POST", "/share", asking(lambda: panel.shared_machine())),
    ("POST", "/latents/recover", recover),
    ("POST", "/error", error_parts),
    ("POST", "/pause", pause),
    ("GET", "/paused", paused_runs),
    ("GET", "/paused/{id}", lambda request: asyncio.to_thread(paused.resumable, checked_id(request.match_info))),
    ("POST", "/forget", forget),
    ("POST", "/examples", examples),
)


async def body_of(request: web.Request) -> dict[str, Any]:
    """The JSON object in the body; InputError for other content, web.HTTPException for another type or MOST_BYTES."""
    if request.content_type != "application/json":
        text = _refusal(f"content type {request.content_type!r}", "application/json", "Send JSON.")
        raise web.HTTPUnsupportedMediaType(text=text)
    received = bytearray()
    async for chunk in request.content.iter_chunked(65536):
        received += chunk
        if len(received) > MOST_BYTES:
            text = _refusal("a body that is too long", f"{MOST_BYTES} bytes", "Send less.")
            raise web.HTTPRequestEntityTooLarge(MOST_BYTES, len(received), text=text)
    try:
        body = json_within(bytes(received), "a body")
    except ValueError as error:
        raise InputError("a body that is not JSON", expected="a JSON object", fix="Send JSON.") from error
    if not isinstance(body, dict):
        raise InputError(f"JSON of type {type(body).__name__}", expected="a JSON object", fix="Send an object.")
    return body


def checked_prompt(body: Mapping[str, Any]) -> dict[str, Any]:
    """The prompt in a body, node id -> ``class_type`` and ``inputs``; InputError for another form or too many nodes."""
    prompt = body.get("prompt")
    expected, fix = "node ids with class_type and inputs", "Send what graphToPrompt() returns as output."
    if not isinstance(prompt, dict):
        raise InputError("no prompt", expected=expected, fix=fix)
    if len(prompt) > MOST_NODES:
        raise InputError(f"a prompt of {len(prompt)} nodes", expected=f"at most {MOST_NODES}", fix="Send fewer nodes.")
    for node in prompt.values():
        fields = node if isinstance(node, dict) else {}
        if not isinstance(fields.get("class_type"), str) or not isinstance(fields.get("inputs"), dict):
            raise InputError("a node without class_type or inputs", expected=expected, fix=fix)
    return prompt


def checked_id(body: Mapping[str, Any]) -> str:
    """The id of a saved latent or paused run, which is looked up and never part of a path; InputError if malformed."""
    identity = body.get("id")
    if not isinstance(identity, str) or not IDENTITY.fullmatch(identity):
        raise InputError("an id of another form", expected="an id from the list", fix="Choose one from the list.")
    return identity


def _with_json_errors(handler: Handler) -> Callable[[web.Request], Awaitable[web.Response]]:
    """``handler`` with its result sent as JSON, our errors and the disk's as 400 with found, expected, fix."""

    async def answer(request: web.Request) -> web.Response:
        try:
            with reading(Path(request.path)):
                result = await handler(request)
            return result if isinstance(result, web.Response) else web.json_response(result, headers=FRESH)
        except PackError as error:
            return web.json_response({"error": panel.error_message(error)}, status=400)
        except web.HTTPException as refusal:
            return web.Response(status=refusal.status, text=refusal.text, content_type="application/json")

    return answer


def _refusal(found: str, expected: str, fix: str) -> str:
    return json.dumps({"error": {"found": found, "expected": expected, "fix": fix}})


def _as_json(item: recovery.SavedLatents) -> dict[str, str]:
    text = f"{item.total_bytes / 1e6:.1f} MB" + (f", {item.fps:g} fps" if item.fps else "")  # 0 where it is unknown
    return {
        "id": item.id,
        "title": item.name,
        "text": f"{text}; {item.unfinished}" if item.unfinished else text,
        "family": item.family,
        "prompt": item.prompt[:400],  # characters
        "picture": f"{PREFIX}/latents/{item.id}/picture",
    }
