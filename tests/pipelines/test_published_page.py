"""The page of published files says what the loader and the memory plan say today."""

import re
from pathlib import Path

import pytest
from anygpu.compat.checkpoints.headers import entries_and_notes
from anygpu.pipelines.registry import FAMILIES
from published import compared, loops, page

TESTS = Path(__file__).parents[1]


@pytest.mark.full
def test_the_page_is_what_its_command_writes() -> None:
    assert page.PAGE.read_text(encoding="utf-8") == page.page(), "run `python tests/published/page.py`"


def test_each_fixture_of_a_publishers_code_names_source_commit_licence_and_command() -> None:
    files = [
        *(TESTS / "fixtures" / "published").glob("*.safetensors"),
        *(TESTS / "fixtures" / "vae").glob("*.safetensors"),
    ]
    assert len(files) > 40
    for file in files:
        notes = entries_and_notes(file)[1]
        said = r"github\.com/[\w.-]+/[\w.-]+ at [0-9a-f]{7}, .*(Apache-2\.0|Community License).*; results of its code"
        assert re.match(said, notes.get("source", "")) and notes.get("command"), file.name


def test_every_published_variant_gets_its_makers_recipe() -> None:
    """One line per file, none of them without a size, and the distilled ones with their own steps."""
    lines = {line.split("`")[1]: line for line in page.PAGE.read_text(encoding="utf-8").splitlines() if "| `" in line}
    assert len(lines) == len(page.FILES)
    expected = {
        "ltxv-2b-0.9.6-distilled-04-25": "8 steps; cfg 1; new noise",
        "ltxv-13b-0.9.8-distilled": "7 steps",
        "ltxv-13b-0.9.8-dev": "30 steps without the last 3; from noise 1 cfg 1",
        "ltx-video-2b-v0.9.5": "40 steps; cfg 3, STG 1 without attention in block 19, rescale 0.7; decoded at 0.05",
        "480p_i2v_step_distilled": "12 steps",
        "720p_i2v": "1280x720",
    }
    for name, text in expected.items():
        assert text in next(line for file, line in lines.items() if file.endswith(f"/{name}")), name


def test_each_comparison_names_tests_that_exist_and_no_other_row_says_as_published() -> None:
    rows = compared.ROWS + compared.PAINT_ROWS
    for row in rows:
        for test in row.tests:
            file, _, name = test.partition("::")
            assert f"def {name}(" in (TESTS / file).read_text(encoding="utf-8"), test
    for family in FAMILIES.values():
        assert set(family.published.recipe_names.values()) <= set(family.published.recipes), family.id
        for recipe in family.published.recipes.values():
            row = compared.ROWS[compared.compared(family.id, recipe.name)]
            assert "as published" not in recipe.name or row.loops
    text = page.PAGE.read_text(encoding="utf-8")
    assert compared.text() in text and text.count("As published to") == sum(bool(row.loops) for row in rows)
    assert compared.paint_text() in text
    named = [name for row in rows for name in row.loops]
    assert sorted(named) == sorted(compared.LOOPS | compared.PAINT_LOOPS) and all(
        loops.fixture(name).is_file() for name in named
    )
