"""The page of published files says what the loader and the memory plan say today."""

import pytest
from published import page


@pytest.mark.full
def test_the_page_is_what_its_command_writes() -> None:
    assert page.PAGE.read_text(encoding="utf-8") == page.page(), "run `python tests/published/page.py`"


def test_every_published_variant_gets_its_makers_recipe() -> None:
    """One line per file, none of them without a size, and the distilled ones with their own steps."""
    lines = {line.split("`")[1]: line for line in page.PAGE.read_text(encoding="utf-8").splitlines() if "| `" in line}
    assert len(lines) == len(page.FILES)
    expected = {
        "ltxv-2b-0.9.6-distilled-04-25": "8 steps; cfg 1; new noise",
        "ltxv-13b-0.9.8-distilled": "7 steps",
        "ltxv-13b-0.9.8-dev": "30 steps; from noise 1 cfg 1",
        "ltx-video-2b-v0.9.5": "40 steps; cfg 3, STG 1 without attention in block 19, rescale 0.7; decoded at 0.05",
        "480p_i2v_step_distilled": "12 steps",
        "720p_i2v": "1280x720",
    }
    for name, text in expected.items():
        assert text in next(line for file, line in lines.items() if file.endswith(f"/{name}")), name
