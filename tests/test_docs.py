"""The pages say what the code does: every node and input is explained, every error and workflow can be found."""

import ast
import csv
import json
import re
from functools import cache
from pathlib import Path

import pytest
from anygpu.compat.device.rates import RATES
from anygpu.pipelines.registry import FAMILIES
from anygpu.pipelines.vae.plan import METHODS
from help_pages import pages
from schemas import SNAPSHOT
from test_layers import SOURCES, nodes_of
from words import MOST, counted

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "web" / "docs").rglob("*.md")]
FIRST_ROWS = 102  # of field.csv, of which a third of the sources was sealed before any forecast was looked at
ERRORS = {"InputError", "CheckpointError", "UnsupportedError", "MissingPackageError"}
EFFECTIVE = {  # input of a node -> the setting in Family.effective that it is, where the names differ
    "latent": "latents",
    "denoise": "latents",
    "section_prompts": "sections",
    "template_crop": "template",
    "clip_vision_output": "vision",
}


def page(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


WRITTEN = json.loads(SNAPSHOT.read_text(encoding="utf-8"))
NODES = {name: (node["title"], [item["name"] for item in node["inputs"]]) for name, node in WRITTEN.items()}


def below(text: str, heading: str) -> str:
    """What stands below a heading, down to the next one."""
    return re.split(r"^## ", text.split(f"\n## {heading}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]


def table_rows(text: str, heading: str) -> list[list[str]]:
    """The cells of the table below a heading, without its head."""
    rows = [line.strip().strip("|").split("|") for line in below(text, heading).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def items(text: str, heading: str) -> list[str]:
    """The items of the list below a heading, each on one line."""
    found = re.findall(r"^- (.+(?:\n  .+)*)", below(text, heading), flags=re.MULTILINE)
    return [" ".join(item.split()) for item in found]


def test_the_nodes_are_found():
    assert len(NODES) >= 7
    assert {"width", "steps", "seed", "latent"} <= set(NODES["AnyGPUSample"][1]), "shared inputs are followed"


def test_the_lists_of_inputs_are_those_of_the_schemas():
    assert not [path for path, text in pages() if text != path.read_text(encoding="utf-8")], "run `make words`"


def test_the_documents_can_be_read_in_an_afternoon():
    assert sum(count for _, count in counted()) <= MOST


@pytest.mark.parametrize("path", sorted((ROOT / "web" / "docs").rglob("*.md")), ids=lambda path: path.parent.name)
def test_help_has_lists_where_a_table_would_be_cut_off(path):
    """The Info pane is 280 pixels wide at first: a table shows its first column there."""
    assert not re.search(r"^\s*\|", path.read_text(encoding="utf-8"), flags=re.MULTILINE)


def test_there_is_no_help_for_a_node_that_does_not_exist():
    assert {path.name for path in (ROOT / "web" / "docs").iterdir() if path.is_dir()} == set(NODES)


def tells_families_apart(node_id: str) -> bool:
    """Whether help says which families use an input; a page that is missing fails another test, not the collection."""
    help_page = ROOT / "web" / "docs" / node_id / "en.md"
    return help_page.is_file() and "## Who uses what" in help_page.read_text(encoding="utf-8")


@pytest.mark.parametrize("node_id", [name for name in NODES if tells_families_apart(name)])
def test_help_says_which_family_uses_an_input(node_id):
    for item in items(page(f"web/docs/{node_id}/en.md"), "Who uses what"):
        name, _, answer = item.replace("`", "").partition(": ")
        assert name in NODES[node_id][1]
        users = []
        for family in FAMILIES.values():
            if node_id == "AnyGPUEncodeImage" and name in ("image", "latent"):
                expected = family.code.encode_image is not None
            elif (node_id, name) == ("AnyGPUEncodeVideo", "images"):
                expected = family.code.encode_video is not None
            elif name in ("variant", "image_encoder"):
                expected = bool(family.recipes.variants) if name == "variant" else "image_encoder" in family.files.parts
            else:
                expected = EFFECTIVE.get(name, name) in family.recipes.effective
            users += [family.title] if expected else []
        assert answer == ("all" if len(users) == len(FAMILIES) else ", ".join(users) or "none"), name


def test_models_page_has_the_values_of_every_family():
    rows = {row[0]: row[1:] for row in table_rows(page("docs/models.md"), "What they make")}
    for family in FAMILIES.values():
        own = family.sizes.defaults
        expected = [
            f"{own.width}x{own.height}", f"{own.frames}", f"{own.fps:g}", f"{own.steps}", f"{family.sizes.multiple}",
            f"{family.sizes.stride}n+1",
        ]  # fmt: skip
        assert rows[family.title] == expected, family.title


@pytest.mark.parametrize("link", sorted({link for family in FAMILIES.values() for link in family.published.pages}))
def test_models_page_names_every_download(link):
    assert f"({link})" in page("docs/models.md")


def names_called(nodes: list[ast.Assign | ast.Call]) -> set[str]:
    return {getattr(node.func, "id", "") for node in nodes if isinstance(node, ast.Call)}


@cache
def error_texts() -> list[tuple[str, str]]:
    """Where each error is made, and what it found, with ``…`` for what differs."""
    texts = []
    for source in (source for source in SOURCES if source.startswith(("compat/", "host/", "paint/", "pipelines/"))):
        named: dict[str, ast.expr] = {}  # values by the names that they were given last
        nodes = [node for node in nodes_of(source) if isinstance(node, (ast.Assign, ast.Call))]
        for node in sorted(nodes, key=lambda each: each.lineno) if ERRORS & names_called(nodes) else ():
            if isinstance(node, ast.Assign):
                target, value = node.targets[0], node.value
                several = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
                pairs = zip(target.elts, value.elts, strict=True) if several else [(target, value)]
                named |= {ast.unparse(name): each for name, each in pairs}
            elif (
                isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ERRORS and node.args
            ):
                found = named.get(ast.unparse(node.args[0]), node.args[0])
                found = found.body if isinstance(found, ast.IfExp) else found
                parts = found.values if isinstance(found, ast.JoinedStr) else [found]
                text = "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in parts)
                texts.append((f"{source}:{node.lineno}", text))
    return texts


def test_every_error_can_be_found_on_the_troubleshooting_page():
    """By the longest run of words in it that is always the same."""
    shown = page("docs/troubleshooting.md")
    longest = {place: max(text.split("…"), key=len).strip(" '[](){}") for place, text in error_texts()}
    assert not {place: text for place, text in longest.items() if text not in shown}


def test_the_ways_to_decode_are_all_named():
    rows = {"docs/nodes.md": "| VAE | ", "docs/troubleshooting.md": "| `decode method …` |"}
    for path, start in rows.items():
        (row,) = (line for line in page(path).splitlines() if line.startswith(start))
        assert [f"`{method}`" in row for method in METHODS[1:]] == [True] * len(METHODS[1:]), path


def test_the_page_of_nodes_names_every_node_and_workflow():
    text = page("docs/nodes.md")
    missing = [name for name, (display, _) in NODES.items() if name not in text or display not in text]
    missing += [path.stem for path in (ROOT / "workflows").glob("*.json") if f"`{path.stem}`" not in text]
    assert not missing


@pytest.mark.parametrize("source", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(source):
    text = source.read_text(encoding="utf-8")
    help_folder = ROOT / "web" / "docs"
    for picture, target in re.findall(r"(!?)\[[^\]]*\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        # ComfyUI takes a picture in the help of a node from the folder of all the help, not from the page's own
        home = help_folder if picture and help_folder in source.parents else source.parent
        linked = (home / path) if path else source
        assert linked.exists(), f"{target} in {source.name}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", linked.read_text(encoding="utf-8"), flags=re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in slugs, f"{target} in {source.name}"


def test_pre_commit_runs_the_ruff_that_the_tests_pin():
    pinned = re.search(r"^ruff==(.+)$", page("requirements-test.txt"), flags=re.MULTILINE)
    used = re.search(r"ruff-pre-commit\s+rev: v(\S+)", page(".pre-commit-config.yaml"))
    assert pinned is not None
    assert used is not None
    assert pinned[1] == used[1]


def test_contributing_names_only_files_that_exist():
    """Every path in backticks, without placeholders and what is built; a recipe moves with the files it names."""
    named = re.findall(r"`([\w./-]+/[\w./-]*)`", page("CONTRIBUTING.md"))
    ours = [path for path in named if (ROOT / path.split("/")[0]).is_dir() and not path.startswith(".build/")]
    assert len(ours) > 40 and [path for path in ours if not (ROOT / path).exists()] == []


def test_contributing_names_only_tables_that_exist():
    """Every constant in backticks; a recipe moves with the tables it names."""
    rooms = ("compat", "host", "kernels", "pipelines", "tests", "web")
    files = [
        file for room in rooms for file in (ROOT / room, *(ROOT / room).rglob("*")) if file.suffix in {".py", ".mjs"}
    ]
    sources = "\n".join(file.read_text(encoding="utf-8") for file in files)
    named = set(re.findall(r"`([A-Z][A-Z_]{3,})`", page("CONTRIBUTING.md")))
    ours = sorted(name for name in named if not name.startswith("COMFYUI_"))  # those are variables of the environment
    assert len(ours) > 20
    assert [name for name in ours if not re.search(rf"^(?:const )?(?:[A-Z_]+, )*{name}\b", sources, re.M)] == []


def test_tests_that_the_page_on_reliability_names_exist():
    for place in re.findall(r"`([\w/]+\.py(?:::\w+)?)`", page("docs/reliability.md")):
        path, _, name = place.partition("::")
        text = (ROOT / "tests" / path.removeprefix("tests/")).read_text(encoding="utf-8")
        assert f"def {name}(" in text if name else text, place


def test_published_times_say_their_source_and_what_was_assumed():
    with (ROOT / "benchmarks" / "field.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    judged = [row for row in rows if row["class"] != "excluded"]
    assert len(judged) >= 60 and {row["family"] for row in rows} <= set(FAMILIES)
    splits = {(row["source"], row["split"]) for row in rows}
    assert len(splits) == len({source for source, _ in splits}), "a source is fitted to or sealed, never both"
    first = {(row["source"], row["split"]) for row in rows if int(row["id"]) <= FIRST_ROWS}
    sealed = sum(split == "sealed" for _, split in first)
    assert 0.3 < sealed / len(first) < 0.37
    assert {row["split"] for row in rows if int(row["id"]) > FIRST_ROWS} == {"sealed"}, (
        "what came later is never fitted to"
    )
    for row in rows:
        assert row["source"] and row["class"] in ("1", "2", "3", "excluded") and (row["seconds"] or row["step_seconds"])
        assert row["note"] or row["class"] != "excluded", f"{row['id']} is left out without a reason"
        assert row["class"] != "2" or (row["assumed"] and ";" not in row["assumed"]), f"{row['id']} assumes one field"
        assert row["class"] != "1" or not row["assumed"], f"{row['id']} assumes nothing"


def test_streaming_takes_what_is_attainable_on_every_device():
    with (ROOT / "benchmarks" / "results" / "overlap.csv").open(newline="", encoding="utf-8") as file:
        rows = {(row["family"], row["stage"], row["size"], row["profile"]): row for row in csv.DictReader(file)}
    stages = {key[:3] for key in rows}
    profiles = {key[3] for key in rows}
    assert profiles <= set(RATES) and len(profiles) >= 8
    assert {family for family, *_ in stages} == set(FAMILIES) and len(rows) == len(stages) * len(profiles)
    over = [row for row in rows.values() if float(row["over_bound"]) > 1.05]
    assert all(float(row["over_attainable"]) <= 1.05 for row in over)
    assert all(f"({float(row['over_bound']):.2f}; " in page("docs/performance.md") for row in over)
