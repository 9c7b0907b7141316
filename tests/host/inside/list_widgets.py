"""Scenes about widgets whose values are lists, which core unwraps in the prompt that it queues."""

import asyncio
import importlib
import json
from typing import Any

import execution
from anygpu.host.meshes import history
from anygpu.host.server.paused import _as_queued

import nodes
from host.inside.core_tiny import MissingError

BOX = {"x": 0.1, "y": 0.1, "width": 0.2, "height": 0.2, "metadata": {}}


def paused(boxes: int) -> dict[str, Any]:
    """What core says of such a prompt when it is queued, after a pause, and unwrapped; whether the running one is known
    again; and the nodes in the history of a painting behind it."""
    try:
        node = importlib.import_module("comfy_extras.nodes_bounding_boxes").CreateBoundingBoxes
    except (ImportError, AttributeError) as error:
        raise MissingError from error
    nodes.NODE_CLASS_MAPPINGS["CreateBoundingBoxes"] = node
    inputs = {"width": 1024, "height": 1024, "editor_state": {"__value__": [BOX] * boxes}}
    prompt = {"1": {"class_type": "CreateBoundingBoxes", "inputs": inputs}}

    def taken(given: dict[str, Any]) -> bool:
        return bool(asyncio.run(execution.validate_prompt("p", given, None))[0])

    first, running = taken(prompt), json.loads(json.dumps(prompt))  # core changes it in place
    resumed = _as_queued(running)
    painting = {**running, "2": {"class_type": "AnyGPUPaintViews", "inputs": {"image": ["1", 0]}}}
    known = resumed == _as_queued(running)
    return {
        "queued": first, "known": known, "nodes": sorted(json.loads(history(painting, "2"))),
        "resumed": taken(json.loads(json.dumps(resumed))), "unwrapped": taken(running),
    }  # fmt: skip
