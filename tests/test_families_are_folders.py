"""A family is a folder: outside it no shipped file names its id, imports its code or branches on it.

Its row in ``host/families.py`` may name it.
"""

import ast
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

import pytest
from anygpu.pipelines.registry import FAMILIES, register
from heavy import GREATER
from simulated import fitting, test_families
from test_layers import SOURCES, imported, nodes_of
from tiny.recipes import TINY

MAY_NAME = ("pipelines/families/", "host/families.py")
PAINT = {"paint", "paint_pbr", "delight", "mv_adapter"}  # and KINDS, which has all three: kinds of another pipeline
OTHERS = [source for source in SOURCES if not source.startswith(MAY_NAME)]


def texts(nodes: Iterable[ast.AST]) -> Iterator[ast.Constant]:
    """Every string of ``nodes``."""
    return (node for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))


def faults(nodes: Collection[ast.AST], imports: list[str]) -> list[str]:
    """What of a file, all of whose nodes are given, knows a family."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docs = {id(node.body[0].value) for node in nodes
            if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)}  # fmt: skip
    found = (text for text in texts(nodes) if text.value in FAMILIES and id(text) not in docs)
    named = [f"line {text.lineno} names {text.value!r}" for text in found]
    named += [f"imports {name}" for name in imports if "pipelines.families." in name]
    for node in (node for node in nodes if isinstance(node, ast.Compare)):
        if not any(getattr(part, "attr", "") == "family" for part in ast.walk(node.left)):
            continue
        of_paint = PAINT & {text.value for text in texts(ast.walk(node))}
        of_paint = of_paint or ast.unparse(node.comparators[0]) == "KINDS"
        if ast.unparse(node.left).endswith("pipeline.family") and not of_paint:
            named.append(f"line {node.lineno} branches: {ast.unparse(node)}")
    return named


def test_no_file_outside_a_family_s_folder_knows_it() -> None:
    found = {source: faults(nodes_of(source), [name for name, _ in imported(source)]) for source in OTHERS}
    assert not {source: each for source, each in found.items() if each}


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('X = {"ltx": 1}', "names 'ltx'"),
        ('if pipeline.family == "mochi": pass', "names 'mochi'"),
        ("if self.pipeline.family in CAUSAL: pass", "branches: self.pipeline.family in CAUSAL"),
        ("from anygpu.pipelines.families.ltx import pipeline", "imports anygpu.pipelines.families.ltx"),
    ],
)
def test_what_knows_a_family_is_found(text: str, fault: str) -> None:
    nodes = tuple(ast.walk(ast.parse(text)))
    imports = [f"{node.module}.x" for node in nodes if isinstance(node, ast.ImportFrom)]
    assert any(fault in each for each in faults(nodes, imports))


def test_a_registered_family_has_every_file_of_its_folder() -> None:
    for family in FAMILIES.values():
        assert family.package.endswith(f".families.{family.id}")
        wanted = {"__init__.py", "spec.py", "pipeline.py", "tools.json", "transformer.json"}
        assert wanted <= {path.name for path in family.folder.iterdir()}


@pytest.mark.parametrize("field", ["pipelines", "transformer_classes"])
def test_two_families_may_not_share_a_class(field: str) -> None:
    first = next(iter(FAMILIES.values()))
    shared = {"pipelines": {}, "transformer_classes": (), field: getattr(first.files, field)}
    other = replace(first, id="other", files=replace(first.files, **shared))
    before = dict(FAMILIES)
    with pytest.raises(ValueError, match="both name"):
        register(other)
    assert before == FAMILIES


def test_every_family_is_in_the_tables_of_the_tests() -> None:
    """Without a row no test of all families meets it, which nothing else says: steps 4 and 7 of CONTRIBUTING.md."""
    tables = {
        "TINY in tests/tiny/recipes.py": TINY,
        "GREATER in tests/heavy.py": GREATER,
        "CASES in tests/simulated/test_families.py": test_families.CASES,
        "FAMILIES in tests/simulated/fitting.py": fitting.FAMILIES,
        "TOKENS in tests/simulated/fitting.py": fitting.TOKENS,
    }
    assert not {name: missing for name, rows in tables.items() if (missing := FAMILIES.keys() - set(rows))}
