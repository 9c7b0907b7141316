"""Write the list of inputs of each help page from the node's schema: ``python tests/help_pages.py`` (make words).

An English item takes its words from the input's tooltip in ``nodes/``, a Chinese one from ``locales/zh``. The nodes
run on a small ComfyUI; what a machine answers (its folders, its limits) is left out.
"""

import json
import re
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from small_comfyui import comfyui

ROOT = Path(__file__).resolve().parent.parent
HELP = ROOT / "web" / "docs"
HEADINGS = {"en": "Inputs", "zh": "输入"}
WORDS = {  # between two parts of what stands in brackets; advanced, a link, a switch, a range, one of the first node's
    "en": ("; ", "advanced", "link", "off, on", "{} to {}", "As on {}."),
    "zh": ("；", "高级", "连接", "关、开", "{} 到 {}", "与“{}”相同。"),
}
LINKS = ("MODEL", "VAE", "CLIP", "LATENT", "MESH", "CONDITIONING", "SIGMAS", "CLIP_VISION_OUTPUT", "IMAGE", "MASK")
MOST_CHOICES = 12
FIRST, LONG = "AnyGPULoadPipeline", 12  # what this node says in more words than that is not said again


@cache
def schemas() -> dict[str, tuple[str, list[Any]]]:
    """Node id -> display name, and the inputs in their order; empty where a machine answers."""
    with tempfile.TemporaryDirectory() as base, comfyui(Path(base)) as module:
        panel, nodes = module("host.server.panel"), module("nodes").NODES
        panel.limit_tooltip, panel.first_run = lambda name: "", lambda: ""
        rooms = ("folders", "model_files", "saved", "recovery", "farm", "meshes")
        for room in (module(f"host.{name}") for name in rooms):
            for name in ("mesh_files", *(name for name in vars(room) if name.endswith("choices"))):
                setattr(room, name, lambda *_given: [])
        made = (node.GET_SCHEMA() for node in nodes)
        return {schema.node_id: (schema.display_name, schema.inputs) for schema in made}


@cache
def _translated() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "locales" / "zh" / "nodeDefs.json").read_text(encoding="utf-8"))
    return found


def _bracket(entry: Any, language: str) -> str:
    """The words in brackets behind a name: advanced or not, and the values that the input takes."""
    between, advanced, link, switch, span, _ = WORDS[language]
    given, taken = entry.given, ""
    choices = given.get("options")
    if entry.kind in ("INT", "FLOAT") and given.get("max") is not None:
        low, high = (f"{value:g}" if isinstance(value, float) else str(value) for value in (given["min"], given["max"]))
        taken = span.format(low, "2^64-1" if high == str(2**64 - 1) else high)
    elif entry.kind == "COMBO" and choices and 1 < len(choices) <= MOST_CHOICES:
        taken = ", ".join(f"`{choice}`" for choice in choices)
    elif entry.kind == "BOOLEAN":
        taken = switch
    elif entry.kind in LINKS:
        taken = entry.kind
    elif entry.kind.startswith("ANYGPU_") or "," in entry.kind:
        taken = link
    return between.join(part for part in (advanced if given.get("advanced") else "", taken) if part)


def _item(node_id: str, entry: Any, language: str) -> str:
    """One input as an item of the list; only English lines are broken."""
    bracket, tip = _bracket(entry, language), entry.given["tooltip"].replace("`", "").strip()
    first, others = schemas()[FIRST]
    again = node_id != FIRST and len(tip.split()) > LONG and tip in {other.given["tooltip"].strip() for other in others}
    if language == "en":
        said = WORDS[language][-1].format(first) if again else tip
        text = f"- `{entry.id}`{f' ({bracket})' if bracket else ''}: {said}"
        return textwrap.fill(text, 118, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    names = _translated()[node_id]["inputs"][entry.id]
    said = re.sub(r"\{'([{}@|])'\}", r"\1", names["tooltip"].replace("`", ""))
    said = WORDS[language][-1].format(_translated()[FIRST]["display_name"]) if again else said
    return f"- {names['name']} `{entry.id}`{f'（{bracket}）' if bracket else ''}：{said}"


def pages() -> Iterator[tuple[Path, str]]:
    """Each page with the text that it should have: the schema's list below its heading."""
    for node_id, (_, inputs) in sorted(schemas().items()):
        for language, title in HEADINGS.items():
            path = HELP / node_id / f"{language}.md"
            head, heading, rest = path.read_text(encoding="utf-8").partition(f"\n## {title}\n\n")
            assert heading, f"{path} has no list of inputs"
            made = "\n".join(_item(node_id, entry, language) for entry in inputs)
            yield path, f"{head}{heading}{made}\n{rest[rest.find(chr(10) * 2) + 1 :]}"


if __name__ == "__main__":
    for stale, text in pages():
        if text != stale.read_text(encoding="utf-8"):
            stale.write_text(text, encoding="utf-8", newline="\n")
            sys.stdout.write(f"{stale.relative_to(ROOT)}\n")
