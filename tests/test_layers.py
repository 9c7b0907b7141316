"""Each file imports only what its room may import, and the lower rooms live without ComfyUI, diffusers and Triton."""

import ast
import re
import symtable
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path

import forked
import pytest

ROOT = Path(__file__).resolve().parent.parent
COMFY = {
    "comfy", "comfy_api", "comfy_extras", "comfy_execution", "folder_paths", "server", "nodes", "latent_preview",
    "execution",
}  # fmt: skip
HEAVY = {"diffusers", "transformers", "accelerate", "av", "gguf", "torchao", "peft", "trimesh"}
OURS = {"compat", "kernels", "pipelines", "paint", "host", "nodes", "farm", "cli"}
MAY_IMPORT: dict[str, set[str]] = {  # room -> rooms of ours; the longest prefix wins
    "kernels": {"kernels"},
    "compat": {"compat"},
    "compat/transforms": {"compat", "kernels"},
    "pipelines": {"compat", "pipelines"},
    "paint": {"compat", "paint", "pipelines/forecast", "pipelines/records"},
    "host": {"compat", "pipelines", "paint", "host"},
    "nodes": {"compat", "pipelines", "paint", "host", "nodes"},
    "farm": {"compat", "pipelines", "paint", "farm"},
    "farm/cli.py": {"cli", "compat", "pipelines", "paint", "farm"},
    "cli.py": {"compat", "pipelines", "paint"},
    "__init__.py": {"nodes"},
}
LENT = {"pipelines/forecast/times.py"}  # to paint: they know no family
SKIPPED = {"tests", "benchmarks", "training", "build", "demo", "node_modules", "setup.py"}
SOURCES = sorted(
    path.relative_to(ROOT).as_posix()
    for top in ROOT.iterdir()
    if top.name not in SKIPPED and not top.name.startswith(".")
    for path in (top.rglob("*.py") if top.is_dir() else [top])
    if path.suffix == ".py"
)
SHIPPED = [source for source in SOURCES if not source.startswith("farm/")]  # .comfyignore leaves the farm out
BANNED_CALLS = {"eval", "exec", "compile", "__import__"}
BANNED_MODULES = {"subprocess", "requests", "urllib", "socket", "http", "pickle"}


def over(sources: list[str]) -> Callable[[Callable[[str], None]], Callable[[], None]]:
    """One test that checks each of ``sources``: as many tests would take longer to start than to run."""

    def turned(check: Callable[[str], None]) -> Callable[[], None]:
        def every() -> None:
            for source in sources:
                check(source)

        every.__name__, every.__doc__ = check.__name__, check.__doc__
        return every

    return turned


@cache
def tree_of(source: str) -> ast.Module:
    return ast.parse((ROOT / source).read_text(encoding="utf-8"))


@cache
def nodes_of(source: str) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree_of(source)))


@cache
def imported(source: str) -> list[tuple[str, bool]]:
    """(absolute dotted name, whether it is imported at module scope) of each import; ours start with ``anygpu.``."""
    package, top = ["anygpu", *Path(source).parent.parts], {id(node) for node in tree_of(source).body}
    found = []
    for node in nodes_of(source):
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) in top) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = (
                ".".join([*package[: len(package) - node.level + 1], *filter(None, [node.module])])
                if node.level
                else node.module
            )
            found += [(f"{base}.{alias.name}", id(node) in top) for alias in node.names]
    return found


def rooms_of(source: str) -> set[str]:
    rooms = {name.split(".")[1] for name, _ in imported(source) if name.startswith("anygpu.")} & OURS
    if source.startswith("paint/") and "pipelines" in rooms:
        named = {"/".join(name.split(".")[1:3]) for name, _ in imported(source) if name.startswith("anygpu.pipelines")}
        rooms = rooms - {"pipelines"} | named
    return rooms


@over(SOURCES)
def test_file_imports_only_its_layer(source: str) -> None:
    rule = max((prefix for prefix in MAY_IMPORT if source.startswith(prefix)), key=len)
    assert rooms_of(source) <= MAY_IMPORT[rule], f"{source} breaks the rule for {rule}"


def files_imported_by(source: str) -> set[str]:
    """Our files that ``source`` imports, wherever in it: inside functions and for types alone too."""
    files = set()
    for name in (name for name, _ in imported(source) if name.startswith("anygpu.")):
        _, *parts = name.split(".")
        paths = ("/".join(path) + end for path in (parts, parts[:-1]) for end in (".py", "/__init__.py"))
        files.add(next((path for path in paths if path in SOURCES), source))
    return files - {source}


def test_paint_imports_of_pipelines_only_what_knows_no_family() -> None:
    for source in (source for source in SOURCES if source.startswith("paint/")):
        found = {file for file in files_imported_by(source) if file.startswith("pipelines/forecast/")}
        assert found <= LENT | {"pipelines/forecast/__init__.py"}, f"{source} imports {found - LENT}"
    assert not {room for source in LENT for room in rooms_of(source)} - {"compat"}


def circles(graph: Mapping[str, set[str]]) -> list[set[str]]:
    """The largest sets of files that reach one another by imports."""
    reached = {source: set(after) for source, after in graph.items()}
    for middle in reached:
        for after in reached.values():
            if middle in after:
                after |= reached[middle]
    alike = {source: frozenset(f for f in after if source in reached[f]) for source, after in reached.items()}
    return [set(circle) for circle in dict.fromkeys(alike.values()) if circle]


def test_a_circle_is_found_and_only_the_files_on_it() -> None:
    graph = {"a": {"b"}, "b": {"c", "e"}, "c": {"a"}, "d": {"a"}, "e": {"f"}, "f": set(), "g": {"h"}, "h": {"g"}}
    assert circles(graph) == [{"a", "b", "c"}, {"g", "h"}]


def test_an_import_inside_a_function_counts() -> None:
    assert "compat/device/timed_choice.py" in files_imported_by("compat/transforms/attention.py")
    assert "kernels/_triton/launches.py" in files_imported_by("kernels/library.py"), "inside a function"


def test_no_two_files_import_each_other() -> None:
    found = circles({source: files_imported_by(source) for source in SOURCES})
    assert not found, f"import circles: {[sorted(circle) for circle in found]}"


def children(folder: str) -> dict[str, set[str]]:
    """The imports between the folders and files that stand directly in ``folder``; ``__init__.py`` is no layer."""
    graph: dict[str, set[str]] = {}

    def child(source: str) -> str:
        name = source.removeprefix(folder + "/").split("/")[0] if source.startswith(folder + "/") else ""
        return "" if name == "__init__.py" else name

    for source in SOURCES:
        if child(source):
            files = (file for file in files_imported_by(source) if not file.endswith("/__init__.py"))
            ahead = {child(file) for file in files} - {"", child(source)}
            graph.setdefault(child(source), set()).update(ahead)
    return graph


FOLDERS = sorted({parent.as_posix() for source in SOURCES for parent in Path(source).parents} - {"."})


@pytest.mark.parametrize("folder", FOLDERS)
def test_folders_are_layers(folder: str) -> None:
    """Reading one folder never needs one that needs it."""
    found = circles(children(folder))
    assert not found, f"circles in {folder}: {[sorted(circle) for circle in found]}"


LONGEST = 30  # files that import one another in a row


def test_no_chain_of_imports_is_longer() -> None:
    graph = {source: files_imported_by(source) for source in SOURCES}

    @cache
    def chain(source: str) -> tuple[str, ...]:
        return (source, *max((chain(file) for file in graph[source]), key=len, default=()))

    longest = max(map(chain, SOURCES), key=len)
    assert len(longest) <= LONGEST, f"{len(longest)} files: {' -> '.join(longest)}"


@over(SOURCES)
def test_only_host_imports_comfyui(source: str) -> None:
    foreign = {name.split(".")[0] for name, _ in imported(source)} & COMFY
    assert not foreign or source.startswith("host/"), f"{source} imports {foreign}"


@over(SOURCES)
def test_heavy_packages_are_imported_inside_functions(source: str) -> None:
    heavy = {name for name, at_top in imported(source) if at_top and name.split(".")[0] in HEAVY}
    assert not heavy, f"{source} imports {heavy} at module scope"


@over(SHIPPED)
def test_nothing_the_registry_scan_flags(source: str) -> None:
    for node in nodes_of(source):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in BANNED_CALLS, f"{source}:{node.lineno} calls {node.func.id}"
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
            assert node.attr not in {"environ", "getenv", "system", "popen"}, (
                f"{source}:{node.lineno} uses os.{node.attr}"
            )
    modules = {name.split(".")[0] for name, _ in imported(source)}
    assert not modules & BANNED_MODULES, f"{source} imports {modules & BANNED_MODULES}"


@over(SOURCES)
def test_only_device_asks_a_vendor(source: str) -> None:
    if source == "compat/device/facts.py":
        return
    for node in nodes_of(source):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
            assert node.attr not in {"cuda", "mps", "xpu", "hip"}, f"{source}:{node.lineno} uses torch.{node.attr}"


@over([source for source in SOURCES if source not in ("cli.py", "farm/cli.py")])
def test_no_print_no_environment(source: str) -> None:
    calls = [n.func.id for n in nodes_of(source) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
    assert "print" not in calls, f"{source} prints"


@over(SOURCES)
def test_files_and_functions_are_short(source: str) -> None:
    text = (ROOT / source).read_text(encoding="utf-8")
    assert text.count("\n") <= 500, f"{source} is too long"
    for node in nodes_of(source):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name != "define_schema":
            length = (node.end_lineno or 0) - node.lineno + 1
            assert length <= 60, f"{source}:{node.lineno} {node.name} has {length} lines"


@over(SOURCES)
def test_nobody_asks_an_offloader_what_it_has(source: str) -> None:
    for node in nodes_of(source):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr"):
            assert not ast.unparse(node.args[0]).endswith("offloader"), f"{source}:{node.lineno}"


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
MADE_HERE = "made on the host"
READ_PLAINLY = {  # (file, function) -> why its copies need no door
    ("compat/device/execution.py", "to_host"): "the door",
    ("compat/device/probes.py", "copy_to_host"): "asks how this device copies",
    ("compat/device/probes.py", "shifted_bits"): "fp32",
    ("compat/device/probes.py", "fp32_output_probe"): "fp32",
    ("compat/device/probes.py", "double"): "fp64",
    ("compat/device/probes.py", "eight_bits"): "fp32",
    ("compat/device/facts.py", "device_fault"): "fp32",
    ("pipelines/demo/scenes.py", "_motion"): MADE_HERE,
    ("pipelines/families/ltx/pipeline.py", "_fixed"): MADE_HERE,
    ("pipelines/sampling/schedules.py", "schedule_for"): MADE_HERE,
    ("pipelines/sampling/schedules.py", "_set"): MADE_HERE,
    ("paint/baking/fill.py", "_sweep_in_order"): MADE_HERE,
    ("paint/sampling/solvers.py", "schedule_for"): MADE_HERE,
}


def is_host(node: ast.expr) -> bool:
    """Whether an argument names host memory: "cpu", HOST, or torch.device("cpu")."""
    named = getattr(node, "id", getattr(node, "attr", ""))
    made = isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "device" and any(map(is_host, node.args))
    return named == "HOST" or made or (isinstance(node, ast.Constant) and str(node.value).startswith("cpu"))


def plain_copies(tree: ast.AST) -> list[tuple[str, int, str]]:
    """(function, line, call) of each copy to the host that does not begin or end at ``to_host``."""
    found = []

    def search(node: ast.AST, owner: str) -> None:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name, arguments = node.func.attr, [*node.args, *(word.value for word in node.keywords)]
            home = name == "cpu" or (name in ("to", "as_tensor", "type", "copy_") and any(map(is_host, arguments)))
            names = {n.id for n in ast.walk(node.func) if isinstance(n, ast.Name)}
            if home or (name in ("item", "tolist") and not names & {"to_host", "numpy"}):
                found.append((owner, node.lineno, name))
        for child in ast.iter_child_nodes(node):
            search(child, getattr(child, "name", "") if isinstance(child, FUNCTIONS) else owner)

    search(tree, "")
    return found


def test_values_come_home_through_one_door() -> None:
    """Some drivers zero floats of 16 bits on the way. ``.numpy()`` refuses a device's tensor by itself; ``float(x)`` is
    found by the device that zeroes copies, in tests/simulated/test_copies.py."""
    used: set[tuple[str, str]] = set()
    for source in SOURCES:
        for function, line, call in plain_copies(tree_of(source)):
            used.add((source, function))
            allowed = (source, function) in READ_PLAINLY
            assert allowed, f"{source}:{line} .{call}() in {function}: use to_host of compat/device/execution.py"
    assert used == set(READ_PLAINLY), f"rows that nothing needs: {set(READ_PLAINLY) - used}"


def test_each_spelling_of_a_plain_copy_is_found() -> None:
    plain = ("x.cpu()", "x.to('cpu')", "x.to(HOST)", "x.to(torch.device('cpu'), dtype)", "x.float().to(device=HOST)")
    plain += ("x.item()", "x.detach().tolist()", "torch.as_tensor(x, device='cpu')", "x.to(device='cpu:0')")
    for text in plain:
        assert plain_copies(ast.parse(f"def f(x):\n    return {text}")) and plain_copies(ast.parse(text)), text
    for text in ("to_host(x).tolist()", "x.to(device)", "x.to(torch.float32)", "x.to(y)", "x.numpy()"):
        assert not plain_copies(ast.parse(f"def f(x):\n    return {text}")), text


@cache
def class_names() -> set[str]:
    return {node.name for source in SOURCES for node in nodes_of(source) if isinstance(node, ast.ClassDef)}


@over(SOURCES)
def test_more_than_four_arguments_of_a_constructor_have_names(source: str) -> None:
    for node in nodes_of(source):
        if isinstance(node, ast.Call) and len(node.args) > 4:
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            assert name not in class_names(), f"{source}:{node.lineno} {name} has {len(node.args)} arguments by place"


def crowded(function: ast.FunctionDef | ast.ClassDef) -> str:
    """The first line under ``Args:`` that describes a second argument; empty where each has a line of its own."""
    _, _, described = (ast.get_docstring(function) or "").partition("Args:\n")
    if not described:
        return ""
    given = {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
    fields = [node.target for node in function.body if isinstance(node, ast.AnnAssign)]
    names = given | {node.id for node in fields if isinstance(node, ast.Name)}
    for line in described.split("\n\n")[0].splitlines():
        second = re.search(r"[.;)] (\w+(?:, \w+)*): ", line)
        if second is not None and names.issuperset(second[1].split(", ")):
            return line.strip()
    return ""


@over(SOURCES)
def test_each_argument_is_described_on_a_line_of_its_own(source: str) -> None:
    for node in nodes_of(source):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            assert not crowded(node), f"{source}:{node.lineno} {crowded(node)!r}"


def test_a_second_argument_on_a_line_is_found() -> None:
    text = 'def f(a, b):\n    """One.\n\n    Args:\n        a: first. b: second.\n    """'
    function = ast.parse(text).body[0]
    assert isinstance(function, ast.FunctionDef) and crowded(function) == "a: first. b: second."
    apart = ast.parse(text.replace(". b:", ".\n        b:")).body[0]
    assert isinstance(apart, ast.FunctionDef) and not crowded(apart)


RETIRED = re.compile(r"\b(residency|soundness|masters|lend|lends|lender|lenders|borrow|worn|outlook|driven|Steering)\b")


@over(SOURCES)
def test_words_that_only_we_knew_stay_away(source: str) -> None:
    word = RETIRED.search((ROOT / source).read_text(encoding="utf-8"))
    assert word is None, f"{source} says {word[0]!r}; CONTRIBUTING.md has the word of the field"


CLAUSE = re.compile(r"\s*(What|Whether|How|Where|When|Why|Which|Who|Whose|That|Those|It|Its|Is|As)\b")
DESCRIBED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@over(SOURCES)
def test_docstrings_begin_with_a_noun_or_a_verb(source: str) -> None:
    for node in nodes_of(source):
        text = ast.get_docstring(node) if isinstance(node, DESCRIBED) else None
        assert not CLAUSE.match(text or ""), f"{source}: {text!r}"


def test_a_class_name_means_one_thing() -> None:
    places: dict[str, list[str]] = {}
    for source in SOURCES:
        for node in tree_of(source).body:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(source)
    assert not {name: files for name, files in places.items() if len(files) > 1}


def test_lower_rooms_live_alone() -> None:
    """compat imports with ComfyUI, diffusers, transformers, accelerate and Triton blocked."""
    blocked = sorted(COMFY | HEAVY | {"triton"})
    rooms = [room for room in ("compat", "kernels") if (ROOT / room).is_dir()]
    modules = [
        f"anygpu.{path.relative_to(ROOT).with_suffix('').as_posix().replace('/', '.').removesuffix('.__init__')}"
        for room in rooms
        for path in sorted((ROOT / room).rglob("*.py"))
        if "_triton" not in path.parts
    ]
    program = f"""
import sys, importlib, importlib.abc
class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in {blocked!r}:
            raise ImportError('blocked ' + name)
sys.meta_path.insert(0, Blocked())
for name in {modules!r}:
    importlib.import_module(name)
print(len({modules!r}))
"""
    done = forked.run(program, folder=Path("/"), anew=blocked)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 5


def test_the_farm_is_left_out_of_the_archive_and_nothing_shipped_needs_it() -> None:
    assert "farm/" in (ROOT / ".comfyignore").read_text(encoding="utf-8").splitlines()
    assert not [source for source in SHIPPED if "farm" in rooms_of(source)]
    tops = {source: {name.split(".")[0] for name, at_top in imported(source) if at_top} for source in SOURCES}
    assert not [source for source, names in tops.items() if "ray" in names], "ray is imported inside functions"


def test_root_is_not_importable() -> None:
    """The root on sys.path would hide ComfyUI's nodes and PyPI's kernels."""
    assert ROOT not in {Path(entry or ".").resolve() for entry in sys.path}


def _names_of(path: Path) -> set[str]:
    """The names that a module has, by its source: nothing is imported, since some need ComfyUI."""
    if not path.is_file():
        return set()
    symbols = symtable.symtable(path.read_text(encoding="utf-8"), str(path), "exec").get_symbols()
    return {name.get_name() for name in symbols if name.is_assigned() or name.is_imported()}


FROM = re.compile(r"^[ \t]*from ([.\w]+) import (\([^)]*\)|.+)$", re.MULTILINE)


def imports_of(text: str) -> Iterator[tuple[str, str]]:
    """(module as it is written, name) of each ``from`` import. Read as text, which finds those in
    strings that other processes run too; parsing every test takes four seconds."""
    for found in FROM.finditer(text):
        for entry in re.sub(r"#.*", "", found[2]).strip("() \n").split(","):
            if entry.strip():
                yield found[1], entry.split()[0]


def test_imported_names_exist() -> None:
    """Names of ours that any file imports, inside functions too, where nothing fails before they run."""
    folders = ("compat", "pipelines", "paint", "kernels", "host", "nodes", "farm", "benchmarks", "tests", "training")
    names, seen = cache(_names_of), 0
    for path in (*ROOT.glob("*.py"), *(path for folder in folders for path in (ROOT / folder).rglob("*.py"))):
        package = ["anygpu", *path.relative_to(ROOT).parts[:-1]]
        for module, name in imports_of(path.read_text(encoding="utf-8")):
            level = len(module) - len(module.lstrip("."))
            above = package[: len(package) + 1 - level] if level else []
            anygpu, *parts = [*above, *filter(None, module[level:].split("."))]
            if anygpu != "anygpu":
                continue
            seen, owner = seen + 1, ROOT.joinpath(*parts)
            known = names(owner / "__init__.py") | names(owner.with_suffix(".py"))
            exists = name in known or (owner / name).is_dir() or (owner / f"{name}.py").is_file()
            assert exists, f"{path.relative_to(ROOT)} imports {name} of {'.'.join(parts)}"
    assert seen > 5000


@pytest.mark.full
def test_imports_read_as_text_have_those_of_the_parser() -> None:
    for path in (*ROOT.glob("compat/**/*.py"), *ROOT.glob("pipelines/**/*.py"), *ROOT.glob("tests/simulated/*.py")):
        text = path.read_text(encoding="utf-8")
        parsed = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
        wanted = {("." * node.level + (node.module or ""), alias.name) for node in parsed for alias in node.names}
        assert wanted <= set(imports_of(text)), path
