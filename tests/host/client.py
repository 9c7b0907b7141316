"""A client of ComfyUI's server: posts a prompt, follows it over the websocket, and returns what happened."""

import json
import struct
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import unescape
from typing import Any

import websocket

PREVIEW, TEXT, PREVIEW_WITH_METADATA = 1, 3, 4
ENDINGS = ("execution_success", "execution_error", "execution_interrupted")

Prompt = dict[str, dict[str, Any]]
NOTHING: Prompt = {"1": {"class_type": "PreviewAny", "inputs": {"source": "nothing"}}}


@dataclass
class Run:
    """What happened to one prompt.

    ``executed`` are node ids in the order they ran, ``cached`` those that did not have to. ``texts`` are
    (node id, text) as shown under the nodes; ``progress`` (node id, done, total); ``previews`` counts pictures.
    ``error`` is the message of ``execution_error``. ``seconds`` run from posting to the end.
    """

    ending: str = ""
    executed: list[str] = field(default_factory=list)
    cached: set[str] = field(default_factory=set)
    outputs: dict[str, dict[str, Any]] = field(default_factory=dict)
    texts: list[tuple[str, str]] = field(default_factory=list)
    progress: list[tuple[str, float, float]] = field(default_factory=list)
    previews: int = 0
    error: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def message(self) -> str:
        """The message of the error that ended it; empty when none did."""
        return str(self.error.get("exception_message", "")).strip()

    def texts_of(self, node: str) -> list[str]:
        """The texts under one node, in order, as they are shown: without Markdown's line ends and HTML's escapes."""
        return [unescape(text).replace("  \n", "\n") for owner, text in self.texts if owner == node]

    def files(self) -> list[dict[str, Any]]:
        """The saved files of every output node; previews, which lie in the temporary folder, are none."""
        shown = [item for each in self.outputs.values() for item in each.get("images", []) if "filename" in item]
        return [item for item in shown if item.get("type") == "output"]


class Refused(Exception):
    """The server did not accept a prompt; ``answer`` is its whole answer."""

    def __init__(self, answer: dict[str, Any]) -> None:
        super().__init__(json.dumps(answer)[:2000])
        self.answer = answer


class Client:
    """A connection to one server. ``url`` has no slash at the end."""

    def __init__(self, url: str) -> None:
        self.url, self.id = url, uuid.uuid4().hex

    def get(self, path: str) -> Any:
        """The JSON under ``path``."""
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            return json.loads(answer.read())

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """The JSON answer to ``body``; None where the answer is empty.

        Raises:
            Refused: the server answers 400.
        """
        data = json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            raise Refused(json.loads(error.read())) from error
        return json.loads(text) if text else None

    def interrupt(self) -> None:
        """What the Cancel button does."""
        self.post("/interrupt", {})

    def free(self) -> None:
        """Forget every cached result, so that the next run is a fresh one."""
        self.post("/free", {"unload_models": True, "free_memory": True})
        for _ in range(2):  # the worker frees before or after the next prompt, so that the second finds it done
            self.run(NOTHING)

    def run(self, prompt: Prompt, cancel_when: Callable[[str, Run], bool] | None = None, timeout: float = 120) -> Run:
        """What happens to ``prompt``.

        Args:
            cancel_when: asked after each event with the node that runs and what is known so far; once it says
                true the prompt is interrupted.

        Raises:
            Refused: validation failed. TimeoutError: it did not end in ``timeout`` seconds.
        """
        run, started, cancelled, current = Run(), time.monotonic(), False, ""
        with self._socket(timeout) as events:
            known = self.post("/prompt", {"prompt": prompt, "client_id": self.id})["prompt_id"]
            for kind, data in events:
                if time.monotonic() - started > timeout:
                    self.interrupt()
                    raise TimeoutError(f"no end after {timeout} s; last node {current}; {run.texts[-1:]}")
                if kind == "text":
                    run.texts.append(data)
                elif kind == "preview":
                    run.previews += 1
                elif data.get("prompt_id") == known:
                    current = _record(run, kind, data) or current
                if kind in ENDINGS and data["prompt_id"] == known:
                    break
                if cancel_when is not None and not cancelled and cancel_when(current, run):
                    cancelled = True
                    self.interrupt()
        run.seconds = time.monotonic() - started
        return run

    def finished(self, prompt: Prompt, timeout: float = 120) -> Run:
        """As :meth:`run`, of a prompt that ends well."""
        run = self.run(prompt, timeout=timeout)
        assert run.ending == "execution_success", run.message
        return run

    @contextmanager
    def _socket(self, timeout: float) -> Iterator[Iterator[tuple[str, Any]]]:
        """The events of this client, as (kind, data), once the server has taken the connection."""
        address = self.url.replace("http", "ws", 1) + f"/ws?clientId={self.id}"
        connection = websocket.create_connection(address, timeout=timeout)
        try:
            connection.recv()  # the server's greeting: from here on no event is lost
            yield _events(connection)
        finally:
            connection.close()


def _events(connection: websocket.WebSocket) -> Iterator[tuple[str, Any]]:
    while True:
        message = connection.recv()
        if isinstance(message, str):
            event = json.loads(message)
            yield event["type"], event["data"]
            continue
        kind = struct.unpack(">I", message[:4])[0]
        if kind == TEXT:
            length = struct.unpack(">I", message[4:8])[0]
            yield "text", (message[8 : 8 + length].decode(), message[8 + length :].decode())
        elif kind in (PREVIEW, PREVIEW_WITH_METADATA):
            yield "preview", None


def _record(run: Run, kind: str, data: dict[str, Any]) -> str | None:
    """Enter one event into ``run``; the node that now runs, where the event says so."""
    if kind == "execution_cached":
        run.cached |= set(data["nodes"])
    elif kind == "executing" and data.get("node"):
        run.executed.append(data["node"])
        return str(data["node"])
    elif kind == "executed" and data.get("output"):
        run.outputs[data["node"]] = data["output"]
    elif kind == "progress":
        run.progress.append((data["node"], data["value"], data["max"]))
    elif kind in ENDINGS:
        run.ending, run.error = kind, data if kind == "execution_error" else {}
    return None
