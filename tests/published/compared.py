"""Each published recipe: the tests that hold it against its publisher's code, and what differs. Rows of the page."""

from dataclasses import dataclass

SAMPLED = "pipelines/families/test_ltx_recipes.py::test_each_recipe_is_sampled_as_its_publisher_samples_it"
VAES = "pipelines/vae/test_published.py::"
MASKED = "pipelines/families/test_ltx.py::test_the_text_is_masked_for_every_version"
PICTURES = (
    "prompts under 120 words are not rewritten; pictures are encoded as they are, not blurred and H.264-coded first; "
    "decoders since 0.9.1 are held against diffusers' alone"
)


@dataclass(frozen=True)
class Compared:
    """One row.

    Args:
        family: its id.
        recipes: how the names of its recipes begin; empty for all others of the family.
        tests: that hold it against its publisher's code, below ``tests/``.
        equal: what is equal there.
        differs: what is otherwise, or was compared with diffusers alone; empty where the whole loop passes.
    """

    family: str
    recipes: str
    tests: tuple[str, ...]
    equal: str
    differs: str


ROWS = (
    Compared(
        "ltx",
        "2B dev|2B distilled 0.9.6",
        (SAMPLED, f"{VAES}test_ltx_pads_with_zeros", MASKED),
        "schedule, guidance, STG and solver to 2e-4, noise on pictures, text under its mask, decoder of 0.9.0",
        PICTURES,
    ),
    Compared(
        "ltx",
        "",
        (SAMPLED, MASKED, f"{SAMPLED.split('::')[0]}::test_a_second_pass_ends_at_the_size_that_is_asked"),
        "as 2B dev, each of the two passes, upscaler, tone map",
        f"one pass, unless the graph has AnyGPU Upscale Latents and a second AnyGPU Sample; {PICTURES}",
    ),
    Compared(
        "hunyuan_video",
        "SkyReels",
        ("pipelines/families/test_skyreels.py::test_its_recipe_is_its_publishers",),
        "steps, cfg, shift and size",
        "the loop is held against diffusers' alone",
    ),
    Compared(
        "hunyuan_video",
        "",
        (f"{VAES}test_hunyuan_video_in_tencents_windows",),
        "decoder, in windows of 64 frames",
        "the loop is held against diffusers' alone",
    ),
    Compared(
        "hunyuan_video_15",
        "",
        (f"{VAES}test_hunyuan_video_15_sees_no_later_frame",),
        "decoder",
        "the loop is held against diffusers' alone; quotes in the negative prompt reach ByT5, at Tencent never; its "
        "super-resolution, which is on there, is not run",
    ),
    Compared(
        "framepack",
        "",
        (
            "pipelines/families/test_framepack.py::test_the_solver_is_the_publishers",
            "pipelines/families/test_framepack.py::test_sections_are_the_publishers",
        ),
        "solver to 1e-5, counts of sections",
        "what one step is given is held against diffusers' alone",
    ),
    Compared(
        "mochi",
        "FastMochi",
        ("pipelines/families/test_mochi.py::test_fast_mochi_takes_its_own_levels",),
        "noise levels, cfg and frames of its card",
        "the loop is held against diffusers' alone",
    ),
    Compared(
        "mochi",
        "",
        (f"{VAES}test_mochi_drops_frames_where_genmo_does",),
        "decoder",
        "the loop is held against diffusers' alone; 85 frames are diffusers': Genmo's example makes 31, its command "
        "163 with cfg 6",
    ),
)


def compared(family: str, recipe: str) -> int:
    """The index of the row of a recipe by its name."""
    fits = (
        index
        for index, row in enumerate(ROWS)
        if row.family == family and any(recipe.startswith(name) for name in row.recipes.split("|"))
    )
    return next(fits)


def text() -> str:
    """The rows as a list, for the page."""
    return "\n".join(
        f"- **{index + 1}**: equal: {row.equal} (`{'`, `'.join(sorted({test.split('::')[0] for test in row.tests}))}`)."
        + (f" Differs: {row.differs}." if row.differs else " As published.")
        for index, row in enumerate(ROWS)
    )
