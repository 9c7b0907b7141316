"""Every text that a workflow may type freely is one for people, or is checked before anything is opened by it."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import capabilities_page
import pytest

NODES = Path(__file__).resolve().parent.parent / "nodes"
FOR_PEOPLE = {  # words and numbers that a model or a reader is given
    *("text", "negative", "negative_prompt", "section_prompts", "template", "caption", "prompts", "prompt"),
    *("seeds", "azimuths", "elevations", "weights", "precision", "blocks"),
}
CHECKED = {  # names: what keeps them where they belong
    "filename_prefix": "folder_paths.get_save_image_path",
    "name": "a file of the output folder, or of a listed folder of jobs",
    "address": "a line of the machine's owner",
}


def free_texts() -> Iterator[tuple[str, str]]:
    """File and id of each text input that is not a list of choices."""
    for path in sorted(NODES.glob("*.py")):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("String.Input"):
                yield path.name, ast.literal_eval(call.args[0])


@pytest.mark.parametrize(("file", "name"), sorted(set(free_texts())))
def test_a_text_input_is_declared(file: str, name: str) -> None:
    assert name in FOR_PEOPLE or name in CHECKED, (
        f"{name!r} of nodes/{file} may name a file or a host: say what checks it"
    )


def test_the_inputs_were_found() -> None:
    assert {name for _, name in free_texts()} == FOR_PEOPLE | set(CHECKED)


def test_every_node_says_what_it_may_touch_and_the_page_shows_it() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in NODES.glob("*.py"))
    assert set(capabilities_page.listed().CAPABILITIES) == set(re.findall(r'node_id="(\w+)"', text))
    assert capabilities_page.page() == capabilities_page.PAGE.read_text(encoding="utf-8"), "run `make words`"
