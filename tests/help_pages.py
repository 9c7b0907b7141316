"""Write the list of inputs of each help page from the node's schema: ``python tests/help_pages.py`` (make words).

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
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
HELP = ROOT / "web" / "docs"
HEADINGS = {"en": "Inputs", "zh": "输入"}
WORDS = {  # between two parts of what stands in brackets; advanced, a link, a switch, a range, one of the first node's
    "en": ("; ", "advanced", "link", "off, on", "{} to {}", "As on {}."),
    "zh": ("；", "高级", "连接", "关、开", "{} 到 {}", "与“{}”相同。"),
}
LINKS = ("Model", "Vae", "Clip", "Latent", "Mesh", "Conditioning", "Sigmas", "ClipVisionOutput", "Image", "Mask")
MOST_CHOICES = 12
FIRST, LONG = "AnyGPULoadPipeline", 12  # what this node says in more words than that is not said again


class Input(NamedTuple):
    """An input as the schema declares it: the kind of its widget or link, and the arguments that are known here."""

    name: str
    kind: str
    given: dict[str, Any]


class _Elsewhere(Exception):
    """The value is known only to a running ComfyUI or to one machine."""


class _File:
    """One file of ``nodes/``: the values of its expressions, and the inputs in its schemas."""

    def __init__(self, name: str) -> None:
        self.tree = ast.parse((ROOT / "nodes" / name).read_text(encoding="utf-8"))
        self.functions = {item.name: item for item in self.tree.body if isinstance(item, ast.FunctionDef)}
        self.values: dict[str, Callable[[], Any]] = {}
        for item in self.tree.body:
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

    def known(self, node: ast.expr, local: dict[str, Any]) -> Any:
        """The value of an expression, or None where only a running ComfyUI has it."""
        try:
            return self.value(node, local)
        except (_Elsewhere, NameError):
            return None

    def assigned(self, body: list[ast.stmt], local: dict[str, Any]) -> dict[str, Any]:
        """``local`` with the variables that the statements of a function set."""
        for item in body:
            if isinstance(item, ast.Assign) and isinstance(item.targets[0], ast.Name):
                local[item.targets[0].id] = self.known(item.value, local)
        return local

    def inputs(self, node: ast.AST, local: dict[str, Any]) -> Iterator[Input]:
        """The inputs in an expression, those that functions of ``nodes/`` return included, from left to right."""
        if not isinstance(node, ast.Call):
            for child in ast.iter_child_nodes(node):
                yield from self.inputs(child, local)
        elif isinstance(node.func, ast.Attribute) and node.func.attr == "Input":
            kind = node.func.value.attr if isinstance(node.func.value, ast.Attribute) else "Custom"
            given = {item.arg: self.known(item.value, local) for item in node.keywords if item.arg}
            yield Input(self.value(node.args[0], local), kind, given)
        elif isinstance(node.func, ast.Name):
            home = next((file for file in _files().values() if node.func.id in file.functions), None)
            if home is not None:
                function = home.functions[node.func.id]
                names, defaults = [argument.arg for argument in function.args.args], function.args.defaults
                inner = {name: home.known(value, {}) for name, value in zip(names[::-1], defaults[::-1], strict=False)}
                given = [
                    *zip(names, node.args, strict=False),
                    *((word.arg or "", word.value) for word in node.keywords),
                ]
                inner |= {name: self.known(value, local) for name, value in given}
                for item in function.body:
                    if isinstance(item, ast.Return) and item.value is not None:
                        yield from home.inputs(item.value, home.assigned(function.body, inner))


@cache
def _files() -> dict[str, _File]:
    return {path.stem: _File(path.name) for path in sorted((ROOT / "nodes").glob("*.py"))}


def _imported(item: ast.ImportFrom, name: str) -> Any:
    """A name that a file of ``nodes/`` imports from the rooms below the host, or from its own."""
    if item.level == 1:
        return _files()[str(item.module)].values[name]()
    module = f"anygpu.{item.module}" if item.level else str(item.module)
    if module.startswith("anygpu.host"):
        raise _Elsewhere(name)
    found = importlib.import_module(module)
    return getattr(found, name) if name in vars(found) else importlib.import_module(f"{module}.{name}")


@cache
def schemas() -> dict[str, tuple[str, list[Input]]]:
    """Node id -> display name, and the inputs in their order."""
    found = {}
    for file in _files().values():
        for method in (item for item in ast.walk(file.tree) if getattr(item, "name", "") == "define_schema"):
            assert isinstance(method, ast.FunctionDef)
            call = next(item.value for item in method.body if isinstance(item, ast.Return))
            given = {word.arg: word.value for word in getattr(call, "keywords", ())}
            node_id, title = (ast.literal_eval(given[name]) for name in ("node_id", "display_name"))
            found[node_id] = title, list(file.inputs(given["inputs"], file.assigned(method.body, {})))
    return found


@cache
def _translated() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "locales" / "zh" / "nodeDefs.json").read_text(encoding="utf-8"))
    return found


def _bracket(entry: Input, language: str) -> str:
    """The words in brackets behind a name: advanced or not, and the values that the input takes."""
    between, advanced, link, switch, span, _ = WORDS[language]
    given, taken = entry.given, ""
    choices = given.get("options")
    if entry.kind in ("Int", "Float") and given.get("max") is not None:
        low, high = (f"{value:g}" if isinstance(value, float) else str(value) for value in (given["min"], given["max"]))
        taken = span.format(low, "2^64-1" if high == str(2**64 - 1) else high)
    elif entry.kind == "Combo" and choices and len(choices) <= MOST_CHOICES:
        taken = ", ".join(f"`{choice}`" for choice in choices)
    elif entry.kind == "Boolean":
        taken = switch
    elif entry.kind in LINKS:
        taken = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", entry.kind).upper()
    elif entry.kind in ("Custom", "MultiType"):
        taken = link
    return between.join(part for part in (advanced if given.get("advanced") else "", taken) if part)


def _item(node_id: str, entry: Input, language: str) -> str:
    """One input as an item of the list; only English lines are broken."""
    bracket, tip = _bracket(entry, language), entry.given["tooltip"].replace("`", "").strip()
    first, others = schemas()[FIRST]
    again = node_id != FIRST and len(tip.split()) > LONG and tip in {other.given["tooltip"].strip() for other in others}
    if language == "en":
        said = WORDS[language][-1].format(first) if again else tip
        text = f"- `{entry.name}`{f' ({bracket})' if bracket else ''}: {said}"
        return textwrap.fill(text, 118, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    names = _translated()[node_id]["inputs"][entry.name]
    said = re.sub(r"\{'([{}@|])'\}", r"\1", names["tooltip"].replace("`", ""))
    said = WORDS[language][-1].format(_translated()[FIRST]["display_name"]) if again else said
    return f"- {names['name']} `{entry.name}`{f'（{bracket}）' if bracket else ''}：{said}"


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
