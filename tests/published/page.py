"""Writes `docs/published-models.md`: every published file, what it is taken for, its recipe, and the verdict by card.

    python tests/published/page.py            writes the page
    python tests/published/page.py --check    exits with 1 where the page is not what would be written

The files are headers without weights: names and shapes of `shapes.json`, at the dtypes that are published. Memory is
what the loaded parts take; verdicts are the memory plan's, for cards that are not here: modelled, not measured.
"""

import argparse
import logging
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))  # for runs as a command

from anygpu.pipelines.files.formats import config_of, contents  # noqa: E402
from anygpu.pipelines.forecast.memory import forecasts  # noqa: E402
from anygpu.pipelines.pipeline import Pipeline  # noqa: E402
from anygpu.pipelines.settings import of_checkpoint, recipe_of  # noqa: E402
from anygpu.pipelines.sizes import Size  # noqa: E402

import published  # noqa: E402
from published import compared  # noqa: E402

PAGE = ROOT / "docs" / "published-models.md"
CARDS = (8, 12, 16, 24)
STEPS = [1.0, 0.9937, 0.9875, 0.9812, 0.975, 0.9094, 0.725, 0.4219]
LATER, EARLIER = {"sampler": "LinearQuadratic"}, {"sampler": "Uniform"}
SCALED = ("F8_E4M3", "BF16")
UNMODULATED = (*SCALED, "norm")  # Kijai's converter keeps what is named so: of FramePack, the modulations


@dataclass(frozen=True)
class File:
    """One published transformer: where, under which name, of which shapes and dtype, with which metadata.

    ``dtype`` is safetensors' name of one, two of them (see ``published.sparse``), or of a GGUF file its codec.
    """

    path: str
    shapes: str
    model: str
    dtype: Any = "BF16"
    notes: Any = None


def ltx(name: str, size: str, notes: Any, dtype: Any = "BF16") -> File:
    """A release of Lightricks, whose file says its scheduler, and where it is distilled its noise levels."""
    version = " 0.9.1" if "0.9.1" in name else " 0.9.5" if notes["scheduler"] is LATER and size == "2B" else ""
    path = f"Lightricks/LTX-Video/{name}.safetensors"
    return File(path, f"ltx {size}", f"ltx {size}{version}", dtype, {"config": notes})


TRAINED = {"scheduler": LATER, "allowed_inference_steps": STEPS}
REPACKAGED = "Comfy-Org/HunyuanVideo_repackaged"
CITY96 = "city96/HunyuanVideo-I2V-gguf"
SKYREELS = "Kijai/SkyReels-V1-Hunyuan_comfy"
TENCENT15 = "tencent/HunyuanVideo-1.5/transformer"
FILES = (
    ltx("ltx-video-2b-v0.9", "2B", {"scheduler": EARLIER}),
    ltx("ltx-video-2b-v0.9.1", "2B", {"scheduler": EARLIER}),
    ltx("ltx-video-2b-v0.9.5", "2B", {"scheduler": LATER}),
    ltx("ltxv-2b-0.9.6-dev-04-25", "2B", {"scheduler": LATER}),
    ltx("ltxv-2b-0.9.6-distilled-04-25", "2B", {"scheduler": LATER}),
    File("city96/LTX-Video-gguf/ltx-video-2b-v0.9-Q4_K_M.gguf", "ltx 2B", "ltx 2B", "Q4_K"),
    ltx("ltxv-2b-0.9.8-distilled", "2B", TRAINED),
    ltx("ltxv-2b-0.9.8-distilled-fp8", "2B", TRAINED, SCALED),
    ltx("ltxv-13b-0.9.7-dev", "13B", {"scheduler": LATER}),
    ltx("ltxv-13b-0.9.7-distilled", "13B", TRAINED),
    ltx("ltxv-13b-0.9.8-dev", "13B", {"scheduler": LATER}),
    ltx("ltxv-13b-0.9.8-dev-fp8", "13B", {"scheduler": LATER}, SCALED),
    ltx("ltxv-13b-0.9.8-distilled", "13B", TRAINED),
    ltx("ltxv-13b-0.9.8-distilled-fp8", "13B", TRAINED, SCALED),
    *(
        File(f"QuantStack/LTXV-13B-0.9.8-dev-GGUF/LTXV-13B-0.9.8-dev-{bits}.gguf", "ltx 13B", "ltx 13B", codec)
        for bits, codec in (("Q8_0", "Q8_0"), ("Q4_K_M", "Q4_K"), ("Q3_K_M", "Q3_K"))
    ),
    File(f"{REPACKAGED}/hunyuan_video_t2v_720p_bf16.safetensors", "hunyuan_video", "hunyuan_video"),
    File("Kijai/HunyuanVideo_comfy/hunyuan_video_720_fp8_e4m3fn.safetensors", "hunyuan_video", "hunyuan_video", SCALED),
    *(
        File(f"Kijai/HunyuanVideo_comfy/{name}_fp8_e4m3fn.safetensors", "hunyuan_video", "hunyuan_video", SCALED)
        for name in ("hunyuan_video_FastVideo_720", "accvideo-t2v-5-steps")
    ),
    *(
        File(f"calcuis/hunyuan-gguf/hunyuan-video-t2v-720p-{bits}.gguf", "hunyuan_video", "hunyuan_video", codec)
        for bits, codec in (
            ("q8_0", "Q8_0"), ("q6_k", "Q6_K"), ("q5_k_m", "Q5_K"), ("q4_k_m", "Q4_K"), ("q3_k_m", "Q3_K")
        )
    ),
    *(
        File(f"{REPACKAGED}/{name}.safetensors", shapes, "hunyuan_video i2v")
        for name, shapes in (
            ("hunyuan_video_image_to_video_720p_bf16", "hunyuan_video i2v 33"),
            ("hunyuan_video_v2_replace_image_to_video_720p_bf16", "hunyuan_video"),
        )
    ),
    File(f"{CITY96}/hunyuan-video-i2v-720p-Q4_K_M.gguf", "hunyuan_video", "hunyuan_video i2v", "Q4_K"),
    *(
        File(f"{SKYREELS}/{name}", "skyreels i2v", "skyreels i2v", dtype)
        for name, dtype in (
            ("skyreels_hunyuan_i2v_bf16.safetensors", "BF16"),
            ("skyreels_hunyuan_i2v_fp8_e4m3fn.safetensors", SCALED),
            ("skyreels-hunyuan-I2V-Q4_K_S.gguf", "Q4_K"),
        )
    ),
    File(f"{SKYREELS}/skyreels_hunyuan_t2v_bf16.safetensors", "hunyuan_video", "hunyuan_video"),
    *(
        File(f"{TENCENT15}/{name}/diffusion_pytorch_model.safetensors", "hunyuan_video_15", "hunyuan_video_15", "F32")
        for name in ("480p_t2v", "480p_i2v", "720p_t2v", "720p_i2v", "480p_t2v_distilled", "720p_i2v_distilled")
    ),
    File(
        f"{TENCENT15}/480p_i2v_step_distilled/diffusion_pytorch_model.safetensors",
        "hunyuan_video_15 meanflow",
        "hunyuan_video_15",
        "F32",
    ),
    File(
        f"{TENCENT15}/720p_sr_distilled/diffusion_pytorch_model.safetensors",
        "hunyuan_video_15 sr",
        "hunyuan_video_15",
        "F32",
    ),
    File(
        "Comfy-Org/HunyuanVideo_1.5_repackaged/hunyuanvideo1.5_1080p_sr_distilled_fp16.safetensors",
        "hunyuan_video_15 sr",
        "hunyuan_video_15",
        "F16",
    ),
    File(
        "Comfy-Org/HunyuanVideo_1.5_repackaged/hunyuanvideo1.5_720p_t2v_fp16.safetensors",
        "hunyuan_video_15",
        "hunyuan_video_15",
        "F16",
    ),
    *(
        File(f"jayn7/HunyuanVideo-1.5_{task.upper()}_{size}-GGUF/{name}.gguf", *["hunyuan_video_15"] * 2, codec)
        for task, size, name, codec in (
            ("t2v", "480p", "hunyuanvideo1.5_480p_t2v_cfg_distilled-Q5_K_S", "Q5_K"),
            ("i2v", "480p", "hunyuanvideo1.5_480p_i2v_cfg_distilled-Q4_K_S", "Q4_K"),
            ("t2v", "720p", "hunyuanvideo1.5_720p_t2v-Q4_K_M", "Q4_K"),
        )
    ),
    *(
        File(f"Kijai/HunyuanVideo_comfy/{name}.safetensors", "framepack", "framepack", dtype)
        for name, dtype in (
            ("FramePackI2V_HY_bf16", "BF16"),
            ("FramePackI2V_HY_fp8_e4m3fn", UNMODULATED),
            ("FramePack_F1_I2V_HY_20250503_bf16", "BF16"),
            ("FramePack_F1_I2V_HY_20250503_fp8_e4m3fn", UNMODULATED),
        )
    ),
    File("Comfy-Org/mochi_preview_repackaged/mochi_preview_bf16.safetensors", "mochi", "mochi"),
    File("Comfy-Org/mochi_preview_repackaged/mochi_preview_fp8_scaled.safetensors", "mochi", "mochi", SCALED),
    File("calcuis/mochi/mochi-q3_k_m.gguf", "mochi", "mochi", "Q3_K"),
)  # fmt: skip
HEAD = """# Published models

What AnyGPU takes each published transformer file for, how it runs it by default, and the verdict of the memory plan at
that size on NVIDIA cards with 64 GB of host memory: the fastest [offload mode](memory.md) that fits, and how the run
begins to decode. **Modelled, not measured**, and without weights: from published names and shapes, which the classes
that read these files elsewhere confirm (`tests/published/record.py`). A desktop and CUDA are taken to keep a sixteenth
of a card. Assumed are the noise levels in Lightricks' metadata, one format for every matrix of a GGUF (`_M` files keep
some in more bits), and the names of QuantStack's files.

Written by `python tests/published/page.py`.

<!-- published -->
"""

FOOT = """## Compared

Steps, guidance, sizes and noise levels are the publisher's, but for what a row names. By the numbers of the column:
what tests hold against the publisher's own code on tiny weights, and what differs or was compared with diffusers alone.
"As published" stands only where a test runs the whole loop from an untouched graph, on the CPU in fp32, and finds every
pixel within 1e-4 of what the publisher's code made (`tests/published/loop_reference.py`).

"""

PAINT = """
Hunyuan3D paint, on one torus with UVs that both sides are given (`tests/published/paint_reference.py`):

"""


def row(file: File, folder: Path) -> str:
    """One line of the table."""
    place = folder / "models" / file.path
    if place.suffix == ".gguf":
        published.sparse_gguf(place, published.shapes(file.shapes), file.dtype)
    else:
        published.sparse(place, published.shapes(file.shapes), file.dtype, file.notes)
    pipeline = published.composed(file.model, folder, transformer=place)
    subjects = {decision.subject: decision for decision in pipeline.plan.decisions}
    known = subjects.get("variant") or subjects.get("model")
    title = (
        f"{pipeline.spec.title} {known.verdict}: {known.why}" if known else f"{pipeline.spec.title}{told_apart(place)}"
    )
    recipe = recipe_of(pipeline)
    loaded = pipeline.weights["transformer"].total / 2**30
    size = size_of(pipeline)
    told = f"{recipe.name}: {size.width}x{size.height}, {size.frames} frames; {recipe}"
    verdicts = [verdict(published.on_card(pipeline), size, card) for card in CARDS]
    place.unlink()
    name = file.path.removesuffix("/diffusion_pytorch_model.safetensors").removesuffix(".safetensors")
    held = compared.compared(pipeline.family, recipe.name) + 1
    return f"| `{name}` | {title} | {told} | {held} | {loaded:.1f} | {' | '.join(verdicts)} |"


def told_apart(place: Path) -> str:
    """What the shapes alone say of a file that needs no guess, after a blank; empty for the only one of its family."""
    name = next(config_of(content).name for content in contents(place) if content.kind.endswith("/transformer"))
    return "" if name == "published" else f" {name}"


def size_of(pipeline: Pipeline) -> Size:
    """The size that a run has where nothing is chosen."""
    defaults = of_checkpoint(pipeline).sizes.defaults
    return Size(defaults.width, defaults.height, defaults.frames, defaults.cfg > 1.0)


def verdict(pipeline: Pipeline, size: Size, card: float) -> str:
    """The fastest mode that fits on a card, and how it decodes."""
    room = published.room_of(card)
    best = next((each for each in forecasts(pipeline, size, room) if each.fits(room)), None)
    return "too much" if best is None else f"{best.mode}, {best.stages[-1].form.rpartition(' in ')[0] or 'whole'}"


def page() -> str:
    """The page as text."""
    cards = [f"{card} GB" for card in CARDS]
    titles = f"| File | Taken for | Default recipe | Compared | GiB loaded | {' | '.join(cards)} |"
    lines = [HEAD.rstrip("\n"), titles, "|" + " --- |" * 9]
    with tempfile.TemporaryDirectory() as folder, published.large_host():
        lines += [row(file, Path(folder)) for file in FILES]
    return (
        "\n".join(lines) + "\n<!-- end -->\n\n" + FOOT + compared.text() + "\n" + PAINT + compared.paint_text() + "\n"
    )


def main() -> int:
    """Write the page, or compare it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    logging.disable()
    text = page()
    if parser.parse_args().check:
        return int(text != PAGE.read_text(encoding="utf-8"))
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
