"""Each published recipe: the tests that hold it against its publisher's code, and what differs. Rows of the page.

A row says "As published" where :data:`LOOPS` has its whole loop, and its test passes.
"""

from dataclasses import dataclass

WHOLE = "pipelines/test_whole_loops.py::test_an_untouched_graph_makes_the_publishers_frames"
# Whole loop: its largest difference of a pixel in 0..1, as measured, of which 1.5e-5 is the fixture's own rounding. The
# test holds each against `loops.BAR`, and this figure against what it measures.
LOOPS = {
    "hunyuan video": 1.6e-5,
    "hunyuan video i2v": 1.6e-5,
    "hunyuan video i2v dynamic": 1.6e-5,
    "hunyuan video i2v 33 channels": 1.6e-5,
    "hunyuan video 1.5 t2v": 1.6e-5,
    "hunyuan video 1.5 i2v": 1.6e-5,
    "hunyuan video 1.5 t2v 720p": 1.6e-5,
    "hunyuan video 1.5 i2v 720p": 1.6e-5,
    "hunyuan video 1.5 t2v cfg distilled": 1.6e-5,
    "hunyuan video 1.5 i2v cfg distilled": 1.6e-5,
    "hunyuan video 1.5 i2v step distilled": 1.6e-5,
    "hunyuan video 1.5 t2v cfg distilled to 720p": 1.6e-5,
    "hunyuan video 1.5 i2v step distilled to 720p": 1.6e-5,
    "hunyuan video 1.5 t2v cfg distilled to 1080p": 1.5e-5,
    "hunyuan video 1.5 i2v cfg distilled to 1080p": 1.5e-5,
    "fast hunyuan": 1.6e-5,
    "acc video": 1.6e-5,
    "framepack": 1.7e-5,
    "framepack f1": 1.8e-5,
    "ltx 0.9.0": 1.6e-5,
    "ltx 0.9.1": 1.6e-5,
    "ltx 0.9.5": 1.6e-5,
    "ltx 0.9.5 picture": 1.6e-5,
    "ltx 0.9.6 dev": 1.6e-5,
    "ltx 0.9.6 distilled": 1.6e-5,
    "ltx 2B 0.9.8 distilled": 1.6e-5,
    "ltx 2B 0.9.8 distilled picture": 1.6e-5,
    "ltx 13B 0.9.8 distilled": 1.6e-5,
    "ltx 13B 0.9.8 dev": 1.6e-5,
    "ltx 13B 0.9.7 distilled": 1.6e-5,
    "ltx 13B 0.9.7 dev": 1.6e-5,
    "mochi": 1.5e-5,
}
# The same of whole loops that run with one setting of ours, which their rows name: they are not "as published".
NEARLY = {"skyreels v1 t2v": 1.6e-5, "skyreels v1 i2v": 1.6e-5, "fast mochi": 1.5e-5}
# The same of Hunyuan3D paint, whose views are compared; of the texture the mean difference of a texel.
PAINT_LOOPS = {"paint v2-0": 1.6e-5, "paint turbo": 1.7e-5, "paint pbr": 7.3e-5, "paint delight": 1.6e-5}
PAINT_BAKED = {
    "paint v2-0 texture": 2.7e-2,
    "paint turbo texture": 2.9e-2,
    "paint v2-0 texture exact": 5.2e-4,
    "paint turbo texture exact": 5.5e-4,
    "paint pbr texture": 2.2e-2,
    "paint pbr texture exact": 9.1e-5,
}
SAMPLED = "pipelines/families/test_ltx_recipes.py::test_each_recipe_is_sampled_as_its_publisher_samples_it"
VAES = "pipelines/vae/test_published.py::"
MASKED = "pipelines/families/test_ltx.py::test_the_text_is_masked_for_every_version"
LAST_TILE = 0.71, 0.035  # of 1, the largest and the mean difference of a pixel in 7 x 4 latents in tiles of 4
BLENDED = "over 256 pixels the blend into the last tile of a row, up to {} of 1 and on average {} on random weights"
BLENDED = BLENDED.format(*LAST_TILE)
REWRITTEN = "prompts under 120 words are not rewritten"
NEGATIVE = "the script's negative prompt is to be typed"


@dataclass(frozen=True)
class Compared:
    """One row.

    Args:
        family: its id.
        recipes: how the names of its recipes begin; empty for all others of the family.
        tests: that hold it against its publisher's code, below ``tests/``.
        equal: what is equal there.
        differs: what is otherwise, or was compared with diffusers alone.
        loops: its whole loops, of :data:`LOOPS`.
    """

    family: str
    recipes: str
    tests: tuple[str, ...]
    equal: str
    differs: str
    loops: tuple[str, ...] = ()


ROWS = (
    Compared(
        "ltx",
        "2B dev|2B distilled 0.9.6",
        (WHOLE, SAMPLED, f"{VAES}test_ltx_pads_with_zeros", MASKED),
        "0.9.0, 0.9.1, 0.9.5 and both of 0.9.6 from text, 0.9.5 from a picture too, with `inference.py`: text under "
        "its mask, picture cut, blurred, H.264-coded and resized, steps, cfg, STG and rescale, new noise, decoder",
        f"{REWRITTEN}; until 0.9.5 704x512 at 25 fps are diffusers', where the script has 1216x704 at 30; {NEGATIVE}",
        ("ltx 0.9.0", "ltx 0.9.1", "ltx 0.9.5", "ltx 0.9.5 picture", "ltx 0.9.6 dev", "ltx 0.9.6 distilled"),
    ),
    Compared(
        "ltx",
        "",
        (WHOLE, SAMPLED, MASKED, f"{SAMPLED.split('::')[0]}::test_a_second_pass_ends_at_the_size_that_is_asked"),
        "0.9.8's 2B and 13B distilled, 13B dev, and both of 0.9.7 from text, 2B from a picture too, with "
        "`inference.py`, both passes: as row 1, lists of guidance, upscaler, AdaIN, tone map, resize",
        "one pass, as the run says, unless the graph has AnyGPU Upscale Latents and a second AnyGPU Sample, as "
        "template `anygpu_ltx_two_passes`; prompts as in row 1; that pass draws its noise by its node's seed; at other "
        "sizes pictures are cut to the pass's shape",
        tuple(name for name in LOOPS if name.startswith(("ltx 2B", "ltx 13B"))),
    ),
    Compared(
        "hunyuan_video",
        "SkyReels",
        (WHOLE, "pipelines/families/test_skyreels.py::test_its_recipe_is_its_publishers"),
        "steps, cfg, shift and size; from text, and from a picture, cut and then brought to size by Lanczos in 8 "
        "bits, each pixel to 1.6e-05 of 1 when its pipeline decodes in Tencent's windows of 64 frames, as we do",
        "its script decodes in windows of 16 frames: up to 0.85 of 1 and on average 0.08 otherwise on random weights; "
        f"where a size is asked, fit `nearest bucket` gives it the picture's shape; {NEGATIVE}",
    ),
    Compared(
        "hunyuan_video",
        "FastHunyuan",
        (WHOLE,),
        "text to video with FastVideo's `sample_t2v_hunyuan.py` as its `inference_hunyuan.sh` calls it: both encoders, "
        "6 steps, shift 17, embedded guidance 6, 125 frames, decoder in windows of 64, at one tile",
        f"{BLENDED}; `--vae-sp`, which spreads tiles over cards",
        ("fast hunyuan",),
    ),
    Compared(
        "hunyuan_video",
        "AccVideo",
        (WHOLE,),
        "text to video with `sample_t2v.py` as its README calls it: both encoders, 5 steps, shift 7, embedded guidance "
        "6, 93 frames, decoder in windows of 64, at one tile",
        BLENDED,
        ("acc video",),
    ),
    Compared(
        "hunyuan_video",
        "",
        (
            WHOLE,
            f"{VAES}test_hunyuan_video_in_tencents_windows",
            "pipelines/families/test_hunyuan_video.py::test_a_picture_gets_the_size_that_tencent_chooses",
        ),
        "text to video with `sample_video.py`, image to video (33 channels, token replace) with "
        "`sample_image2video.py`: bucket, bilinear in 8 bits, both encoders, 50 steps, decoder in windows of 64 "
        "frames, at one tile",
        f"{BLENDED}; with a picture `auto` runs as `--i2v-stability`; without that flag, variant `i2v_dynamic`",
        ("hunyuan video", "hunyuan video i2v", "hunyuan video i2v dynamic", "hunyuan video i2v 33 channels"),
    ),
    Compared(
        "hunyuan_video_15",
        "",
        (
            WHOLE,
            f"{VAES}test_hunyuan_video_15_sees_no_later_frame",
            "pipelines/families/test_hunyuan_video_15.py::test_an_image_gets_the_size_that_tencent_chooses",
            "pipelines/families/test_hunyuan_video_15.py::test_quotes_in_the_negative_prompt_reach_no_glyphs",
        ),
        "480p and 720p from text and a picture, cfg-distilled or not, and 480p from a picture step-distilled, with "
        "`generate.py`: bucket, Lanczos in 8 bits, SigLIP, both encoders, steps, cfg, mean flow, decoder; followed by "
        "its super-resolution to 720p and 1080p: upsampler, noise on the small video, steps",
        "one pass, unless the graph has AnyGPU Upscale Latents and its super-resolution, which draws by its node's "
        "seed, and the noise of the small video last, where the script's has no seed; over 256 pixels it decodes in "
        "tiles; attention `sparse` is held alone",
        tuple(name for name in LOOPS if name.startswith("hunyuan video 1.5")),
    ),
    Compared(
        "framepack",
        "",
        (
            WHOLE,
            "pipelines/families/test_framepack.py::test_the_solver_is_the_publishers",
            "pipelines/families/test_framepack.py::test_sections_are_the_publishers",
            "pipelines/test_stages.py::test_buckets_are_chosen_as_framepack_chooses_them",
        ),
        "both demos: bucket, Lanczos in 8 bits, encoders, sections, 25 steps, decoding with its blends",
        "the demo's TeaCache, which is on there, is off",
        ("framepack", "framepack f1"),
    ),
    Compared(
        "mochi",
        "FastMochi",
        (WHOLE, "pipelines/families/test_mochi.py::test_fast_mochi_takes_its_own_levels"),
        "FastMochi's noise levels, cfg and frames of `inference_mochi_hf.sh`; from text each pixel to 1.5e-05 of 1 "
        "when FastVideo decodes with Genmo's decoder, as we do",
        "it decodes with diffusers', which drops other frames: up to 0.20 of 1 and on average 0.0015 otherwise on "
        "random weights",
    ),
    Compared(
        "mochi",
        "",
        (WHOLE, f"{VAES}test_mochi_drops_frames_where_genmo_does"),
        "`demos/api_example.py` decoded whole: text, the empty negative as zeros, 64 steps, cfg 4.5, decoder",
        "85 frames are diffusers': the example makes 31, and decodes in tiles; the command 163 with cfg 6",
        ("mochi",),
    ),
)

PAINT_WHOLE = "paint/test_whole_loops.py::test_untouched_nodes_make_the_publishers_pictures"
PAINT_ROWS = (
    Compared(
        "paint",
        "v2-0",
        (PAINT_WHOLE,),
        "`Hunyuan3DPaintPipeline` with AnyGPU Texture Mesh and delight: picture, maps, cameras, 30 steps "
        "of Euler ancestral, guidance 2, decoder",
        f"the texture by {PAINT_BAKED['paint v2-0 texture']:.1e} of 1 on average, since baking gathers, mends the "
        "faults that `exact` keeps, and fills without OpenCV; meshes are unwrapped elsewhere. With `scatter`, `exact`, "
        f"`opencv` and views enlarged in 8 bits it is {PAINT_BAKED['paint v2-0 texture exact']:.1e}",
        ("paint v2-0",),
    ),
    Compared(
        "paint",
        "turbo",
        (PAINT_WHOLE,),
        "the same with 10 steps of LCM",
        f"the texture by {PAINT_BAKED['paint turbo texture']:.1e} on average for the same reasons; so baked by "
        f"{PAINT_BAKED['paint turbo texture exact']:.1e}",
        ("paint turbo",),
    ),
    Compared(
        "paint_pbr",
        "",
        (PAINT_WHOLE,),
        "`Hunyuan3DPaintPipeline` of 2.1 from a square picture, colours and metal with roughness: views, maps, "
        "DINOv2 in fp32, 15 steps of UniPC, guidance 3, decoder",
        "other pictures get a border, not squeezed; both textures, from views enlarged alike, by "
        f"{PAINT_BAKED['paint pbr texture']:.1e} on average for the same reasons, with `exact`, `opencv` and 8 bits by "
        f"{PAINT_BAKED['paint pbr texture exact']:.1e}; core gives RealESRGAN RGB, upstream BGR",
        ("paint pbr",),
    ),
    Compared(
        "delight",
        "",
        (PAINT_WHOLE,),
        "recentring and `Light_Shadow_Remover`: alpha, 50 steps, decoder, correction of colours, in its 8 bits",
        "",
        ("paint delight",),
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
    return "\n".join(f"- **{index + 1}**: {_line(row)}" for index, row in enumerate(ROWS))


def paint_text() -> str:
    """The rows of paint as a list, for the page."""
    rows = ((f"{row.family} {row.recipes}".strip(), row) for row in PAINT_ROWS)
    return "\n".join(f"- **{name}**: {_line(row)}" for name, row in rows)


def _line(row: Compared) -> str:
    where = f"`{'`, `'.join(sorted({test.split('::')[0] for test in row.tests}))}`"
    start = "equal"
    if row.loops:
        reach = "to the painted views" if row.family.startswith("paint") else "the whole loop"
        start = f"As published to {max((LOOPS | PAINT_LOOPS)[name] for name in row.loops):.1e} of 1, {reach}"
    return f"{start}: {row.equal} ({where})." + (f" Differs: {row.differs}." if row.differs else "")
