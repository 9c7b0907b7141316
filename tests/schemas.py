"""Write the schema of every node to ``fixtures/schemas.json``: ``python tests/schemas.py``, where a change is meant.

With a folder it prints those of the pack that lies there, loaded under a name of its own as ComfyUI would.
"""

import asyncio
import importlib.util
import json
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from small_comfyui import comfyui

SNAPSHOT = Path(__file__).with_name("fixtures") / "schemas.json"
UNSEEN = ("tooltip", "extra_dict", "is_dev_only")  # words, what is known of this machine, the menu
MEGABYTES = re.compile(r" \(\d+ MB\)$")


def snapshot(nodes: Any) -> dict[str, Any]:
    """Node id -> its schema as plain values, of the nodes that the extension in the module ``nodes`` offers."""
    listed = asyncio.run(nodes.AnyGPUExtension().get_node_list())
    assert len(listed) == len(nodes.NODES), "a node has no schema: its traceback stands above, and nothing is written"
    return {schema.node_id: _plain(schema) for schema in (node.GET_SCHEMA() for node in listed)}


def _plain(schema: Any) -> dict[str, Any]:
    flags = [name for name, value in vars(schema).items() if value is True and name not in UNSEEN]
    inputs = [_input(item) for item in schema.inputs]
    outputs = [[item.kind, *sorted({str(value) for value in _seen(item).values()})] for item in schema.outputs]
    named = {"title": schema.display_name, "category": schema.category, "hidden": schema.hidden}
    return {**named, "flags": flags, "outputs": outputs, "inputs": inputs}


def _input(item: Any) -> dict[str, Any]:
    given = _seen(item)
    if "options" in given:
        given["options"] = [MEGABYTES.sub("", str(option)) for option in given["options"]]
    return {"name": item.id, "kind": item.kind, **given}


def _seen(item: Any) -> dict[str, Any]:
    return {name: value for name, value in item.given.items() if name not in UNSEEN}


def text_of(schemas: dict[str, Any]) -> str:
    """The schemas as JSON, one line for each input."""
    nodes = []
    for node_id, node in schemas.items():
        inputs = ",\n".join(f"   {json.dumps(item, ensure_ascii=False)}" for item in node["inputs"])
        head = json.dumps({**node, "inputs": []}, ensure_ascii=False).removesuffix("[]}")
        nodes.append(f' "{node_id}": {head}[\n{inputs}]}}')
    return "{\n" + ",\n".join(nodes) + "\n}\n"


def loaded_from(folder: Path, name: str) -> None:
    """Import the pack in ``folder`` as the package ``name``; another copy of it is out of reach."""
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None
    sys.modules.update({name: importlib.util.module_from_spec(spec), "anygpu": None})  # type: ignore[dict-item]
    spec.loader.exec_module(sys.modules[name])


def main(write: Callable[[str], Any] = SNAPSHOT.write_text) -> None:
    """Write the snapshot; with a folder, print that of the pack there."""
    folder, name = Path(*sys.argv[1:]), "custom_nodes_anygpu" if sys.argv[1:] else "anygpu"
    if sys.argv[1:]:
        loaded_from(folder, name)
        write = sys.stdout.write
    with tempfile.TemporaryDirectory() as base, comfyui(Path(base), name) as module:
        write(text_of(snapshot(module("nodes"))))


if __name__ == "__main__":
    main()
