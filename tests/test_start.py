"""What ComfyUI's start imports of the pack: what nodes need for their schemas, and nothing that only a run needs."""

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
from host.launch import AFTER_IMPORT

CODE = re.compile(r"pipelines\.families\..*\.pipeline")
ROOT = Path(__file__).resolve().parent.parent
MOST = 208  # modules; 237 before painting was left out
COMFYUI = {"aiohttp", "comfy", "comfy_api", "comfy_execution", "folder_paths", "latent_preview", "server"}
LATER = (  # module, with all below it -> what is imported when a node runs or the tab is opened
    "cli",
    "compat.transforms.context_parallel",
    "farm",
    "host.server.forecast",
    "kernels._triton",
    "paint.baking",
    "paint.demo",
    "paint.geometry",
    "paint.loading",
    "paint.networks",
    "paint.sampling",
    "paint.texturing",
    "pipelines.demo.drawing",
    "pipelines.split",
)


def file_of(module: str) -> Path | None:
    """The file of a module of ours; None for a name inside of one."""
    path = ROOT.joinpath(*module.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


@cache
def statements(file: Path) -> list[ast.stmt]:
    """The statements of a file."""
    return ast.parse(file.read_text(encoding="utf-8")).body


def imported_at_once(module: str) -> Iterator[str]:
    """Modules of ours that a module imports when it is read itself, outside of functions."""
    file = file_of(module)
    if file is None:
        return
    package = module.split(".") if file.name == "__init__.py" else module.split(".")[:-1]
    for node in statements(file):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = [*package[: len(package) - node.level + 1], *(node.module or "").split(".")]
            name = ".".join(filter(None, base))
            yield name
            yield from (f"{name}.{alias.name}" for alias in node.names if file_of(f"{name}.{alias.name}"))


def packages_of(module: str) -> set[str]:
    """Packages of others that a module imports when it is read itself, beside Python's own."""
    names: set[str] = set()
    file = file_of(module)
    for node in statements(file) if file else ():
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names - sys.stdlib_module_names


@cache
def started(first: str = "nodes") -> set[str]:
    """All modules that importing ``first`` imports."""
    known: set[str] = set()
    left = [first]
    while left:
        module = left.pop()
        if module and module not in known and file_of(module):
            known.add(module)
            left += [*imported_at_once(module), module.rpartition(".")[0]]
    return known


def test_a_start_imports_nothing_that_only_a_run_needs():
    modules = started()
    later = sorted(module for module in modules if module.startswith(LATER) or CODE.match(module))
    assert not later, f"imported at ComfyUI's start: {later}"
    assert {"nodes.paint", "paint.choices", "host.server.routes", "pipelines.family"} <= modules, "the walk goes astray"
    assert len(modules) <= MOST, f"{len(modules)} modules"


def test_a_start_imports_no_package_that_comfyui_has_not_imported():
    packages = set().union(*map(packages_of, started()))
    assert packages == {*COMFYUI, "torch"}, "diffusers and transformers take seconds: import them late"


@pytest.mark.parametrize(
    ("version", "answers", "kept"), [("12.8", False, None), ("12.8", True, "12.8"), (None, False, None)]
)
def test_a_cuda_build_without_a_driver_starts_the_tests_comfyui_as_one_for_the_cpu(version, answers, kept):
    torch = SimpleNamespace(version=SimpleNamespace(cuda=version), cuda=SimpleNamespace(is_available=lambda: answers))
    AFTER_IMPORT["torch"](torch)
    assert torch.version.cuda == kept
