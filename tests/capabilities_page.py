"""Write the list of what each node may touch into ``docs/reliability.md``: ``python tests/capabilities_page.py``."""

import importlib.util
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- capabilities -->", "<!-- end -->"
PLACES = {
    "models": "ComfyUI's model folders, those of `extra_model_paths.yaml` included, and the demo models of the pack",
    "input": "ComfyUI's input folder",
    "output": "ComfyUI's output folder",
    "temp": "ComfyUI's temporary folder, for previews",
    "state": "`anygpu` in ComfyUI's user folder: test results, hashes, repairs, kept latents; every node may read it",
    "jobs": "`farm` in the output folder, and the folders `anygpu_farm` of `extra_model_paths.yaml`",
    "hub": "huggingface.co, or the mirror that huggingface_hub is set to; only if `download` is chosen",
    "farm": "`auto` and the addresses in `farm_addresses.txt` of the state folder",
}
TABLE = re.compile(rf"{re.escape(BEGIN)}\n.*?{re.escape(END)}", re.DOTALL)


def listed() -> Any:
    """The module with the list, which needs no ComfyUI."""
    spec = importlib.util.spec_from_file_location("capabilities", ROOT / "nodes" / "capabilities.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def page() -> str:
    """The document with the tables as the code has them."""
    module = listed()
    rows: dict[Any, list[str]] = {}
    for node, row in module.CAPABILITIES.items():
        rows.setdefault(row, []).append(node.removeprefix("AnyGPU"))
    lines = ["| Nodes | read | write | connect to |", "| --- | --- | --- | --- |"]
    for row, nodes in rows.items():
        lines.append(f"| {', '.join(nodes)} | {' | '.join(', '.join(places) or 'nothing' for places in row)} |")
    lines += ["", "| Place | is |", "| --- | --- |"]
    lines += [f"| {name} | {meaning} |" for name, meaning in PLACES.items()]
    return TABLE.sub(lambda _: "\n".join([BEGIN, *lines, END]), PAGE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
