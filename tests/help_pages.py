"""Write the list of inputs of each help page from the node's schema: ``python tests/help_pages.py`` (make help).

An English item takes its words from the input's tooltip in ``nodes/``, a Chinese one from ``locales/zh``. The schemas
are read as source, without ComfyUI; what a machine answers (its folders, its limits) is left out.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
HELP = ROOT / "web" / "docs"
HEADINGS = {"en": "Inputs", "zh": "输入"}
WIDTH = 118
FIRST, LONG = "AnyGPULoadPipeline", 12  # what this node says in more words than that is not said again
LINKS = {
    "Model",
    "Vae",
    "Clip",
    "Latent",
    "Mesh",
    "Conditioning",
    "Sigmas",
    "ClipVisionOutput",
    "Video",
    "Image",
    "Mask",
}
MOST_CHOICES = 12
SHORT = {"en": "{} to {}", "zh": "{} 到 {}"}
WORDS = {
    "en": {"advanced": "advanced", "link": "link", "switch": "off, on", "; ": "; "},
    "zh": {"advanced": "高级", "link": "连接", "switch": "关、开", "; ": "；"},
}


@dataclass(frozen=True)
class Input:
    """One input as the schema declares it: the kind of its widget or link, and the arguments that are known here."""

    name: str
    kind: str
    given: dict[str, Any]


class _Elsewhere(Exception):
    """The value is known only to a running ComfyUI or to one machine."""


class _Reader:
    """The values of expressions in one file of ``nodes/``, by its own imports, constants and local variables."""

    def __init__(self, tree: ast.Module) -> None:
        self.values: dict[str, Callable[[], Any]] = {}
        for item in tree.body:
            if isinstance(item, ast.ImportFrom):
                for alias in item.names:
                    self.values[alias.asname or alias.name] = lambda i=item, a=alias: _imported(i, a.name)
            elif isinstance(item, ast.Assign) and isinstance(item.targets[0], ast.Name):
                self.values[item.targets[0].id] = lambda i=item: self.value(i.value, {})

    def value(self, node: ast.expr, local: dict[str, Any]) -> Any:
        """The value of an expression; of a sum whose second half asks this machine, that of the first."""
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            left = self.value(node.left, local)
            try:
                return left + self.value(node.right, local)
            except _Elsewhere:
                return left
        names = {item.id for item in ast.walk(node) if isinstance(item, ast.Name)}
        known = {name: self.values[name]() for name in names if name in self.values and name not in local}
        return eval(compile(ast.Expression(node), "<schema>", "eval"), {**known, **local})  # noqa: S307 - our own source


def _imported(item: ast.ImportFrom, name: str) -> Any:
    """A name that a file of ``nodes/`` imports from the rooms below the host, or from its own."""
    if item.level == 1:
        return _reader(ROOT / "nodes" / f"{item.module}.py").values[name]()
    module = f"anygpu.{item.module}" if item.level else item.module or ""
    if module.startswith("anygpu.host"):
        raise _Elsewhere(name)
    found = importlib.import_module(module)
    return getattr(found, name) if name in vars(found) else importlib.import_module(f"{module}.{name}")


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def _reader(path: Path) -> _Reader:
    return _Reader(_tree(path))


@cache
def _functions() -> dict[str, tuple[Path, ast.FunctionDef]]:
    files = sorted((ROOT / "nodes").glob("*.py"))
    return {item.name: (file, item) for file in files for item in _tree(file).body if isinstance(item, ast.FunctionDef)}


def _known(reader: _Reader, node: ast.expr, local: dict[str, Any]) -> Any:
    try:
        return reader.value(node, local)
    except (_Elsewhere, NameError):
        return None


def _calls(node: ast.AST) -> Iterator[ast.Call]:
    """The calls in an expression from left to right, none inside another one's arguments."""
    if isinstance(node, ast.Call):
        yield node
        return
    for child in ast.iter_child_nodes(node):
        yield from _calls(child)


def _inputs(path: Path, node: ast.AST, local: dict[str, Any]) -> Iterator[Input]:
    for call in _calls(node):
        if isinstance(call.func, ast.Attribute) and call.func.attr == "Input":
            kind = call.func.value.attr if isinstance(call.func.value, ast.Attribute) else "Custom"
            given = {item.arg: _known(_reader(path), item.value, local) for item in call.keywords if item.arg}
            yield Input(_reader(path).value(call.args[0], local), kind, given)
        elif isinstance(call.func, ast.Name) and call.func.id in _functions():
            yield from _called(path, call, local)


def _called(path: Path, call: ast.Call, local: dict[str, Any]) -> Iterator[Input]:
    """The inputs that a function of ``nodes/`` returns for a call of it."""
    assert isinstance(call.func, ast.Name)
    home, function = _functions()[call.func.id]
    names = [argument.arg for argument in function.args.args]
    inner = dict(zip(names[len(names) - len(function.args.defaults) :], function.args.defaults, strict=True))
    inner = {name: _known(_reader(home), value, {}) for name, value in inner.items()}
    given = [*zip(names, call.args, strict=False), *((item.arg, item.value) for item in call.keywords if item.arg)]
    inner.update({name: _known(_reader(path), value, local) for name, value in given})
    for item in function.body:
        if isinstance(item, ast.Assign) and isinstance(item.targets[0], ast.Name):
            inner[item.targets[0].id] = _known(_reader(home), item.value, inner)
        elif isinstance(item, ast.Return) and item.value is not None:
            yield from _inputs(home, item.value, inner)


@cache
def schemas() -> dict[str, tuple[str, list[Input]]]:
    """Node id -> display name, and the inputs in their order."""
    found = {}
    for path in sorted((ROOT / "nodes").glob("*.py")):
        for method in (item for item in ast.walk(_tree(path)) if isinstance(item, ast.FunctionDef)):
            for call in (item for item in ast.walk(method) if isinstance(item, ast.Call)):
                given = {item.arg: item.value for item in call.keywords}
                if "node_id" not in given:
                    continue
                local: dict[str, Any] = {}
                for item in method.body:
                    if isinstance(item, ast.Assign) and isinstance(item.targets[0], ast.Name):
                        local[item.targets[0].id] = _known(_reader(path), item.value, local)
                node_id, title = (ast.literal_eval(given[name]) for name in ("node_id", "display_name"))
                found[node_id] = title, list(_inputs(path, given["inputs"], local))
    return found


def _range(given: dict[str, Any], language: str) -> str:
    low, high = (f"{value:g}" if isinstance(value, float) else str(value) for value in (given["min"], given["max"]))
    return SHORT[language].format(low, "2^64-1" if high == str(2**64 - 1) else high)


def _kind(entry: Input, language: str) -> str:
    """The words in brackets: advanced or not, and the values that the input takes."""
    words, given = WORDS[language], entry.given
    choices = given.get("options")
    taken = ""
    if entry.kind in ("Int", "Float") and given.get("max") is not None:
        taken = _range(given, language)
    elif entry.kind == "Combo" and choices and len(choices) <= MOST_CHOICES:
        taken = ", ".join(f"`{choice}`" for choice in choices)
    elif entry.kind == "Boolean":
        taken = words["switch"]
    elif entry.kind in LINKS:
        taken = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", entry.kind).upper()
    elif entry.kind in ("Custom", "MultiType", "Autogrow"):
        taken = words["link"]
    return words["; "].join(part for part in (words["advanced"] if given.get("advanced") else "", taken) if part)


@cache
def _translated(language: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "locales" / language / "nodeDefs.json").read_text(encoding="utf-8"))
    return found


@cache
def _tips(node_id: str) -> set[str]:
    return {entry.given["tooltip"].replace("`", "").strip() for entry in schemas()[node_id][1]}


def item(node_id: str, entry: Input, language: str) -> str:
    """One input as an item of the list, without line breaks."""
    kind = _kind(entry, language)
    tip = entry.given["tooltip"].replace("`", "").strip()
    elsewhere = node_id != FIRST and len(tip.split()) > LONG and tip in _tips(FIRST)
    if language == "en":
        said = f"As on {schemas()[FIRST][0]}." if elsewhere else tip
        return f"- `{entry.name}`{f' ({kind})' if kind else ''}: {said}"
    names = _translated(language)[node_id]["inputs"][entry.name]
    if elsewhere:
        said = f"与“{_translated(language)[FIRST]['display_name']}”相同。"
    else:
        said = re.sub(r"\{'([{}@|])'\}", r"\1", names["tooltip"].replace("`", ""))
    return f"- {names['name']} `{entry.name}`{f'（{kind}）' if kind else ''}：{said}"


def list_of(node_id: str, language: str) -> str:
    """The list of a node's inputs in a language; English lines are broken."""
    found = [item(node_id, entry, language) for entry in schemas()[node_id][1]]
    if language == "en":
        found = [
            textwrap.fill(line, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
            for line in found
        ]
    return "\n".join(found)


def with_list(node_id: str, language: str, text: str) -> str:
    """A page with the list that the schema gives below its heading."""
    head, heading, rest = text.partition(f"\n## {HEADINGS[language]}\n\n")
    assert heading, f"{node_id} {language}: no list of inputs"
    return f"{head}{heading}{list_of(node_id, language)}\n{rest[rest.find(chr(10) * 2) + 1 :]}"


def pages() -> Iterator[tuple[Path, str]]:
    """Each page with the text that it should have."""
    for node_id in sorted(schemas()):
        for language in HEADINGS:
            path = HELP / node_id / f"{language}.md"
            yield path, with_list(node_id, language, path.read_text(encoding="utf-8"))


def main() -> None:
    """Write the pages that are not current."""
    for path, text in pages():
        if text != path.read_text(encoding="utf-8"):
            path.write_text(text, encoding="utf-8", newline="\n")
            sys.stdout.write(f"{path.relative_to(ROOT)}\n")


if __name__ == "__main__":
    main()
