"""Packed files of ComfyUI's: which card runs which format by which path.

``packed_cards`` writes the tables of docs/packed-files.md from ``compat/device/packed_rows.csv``; each product
on a GPU is a probe of `anygpu prove`.
"""

from collections.abc import Iterator
from dataclasses import replace

from anygpu.compat.device.facts import facts_for
from anygpu.compat.device.packed_paths import (
    AWQ,
    CORE,
    FORMATS,
    FP4,
    FP8,
    INT8,
    INTEGERS,
    PACKED_ROWS,
    W4A4,
    W4A8,
    row_for,
)
from runner import Case, Row, write_table

NAMES = {INT8: "int8", W4A8: "W4A8", W4A4: "W4A4", FP8[0]: "fp8", FP4[0]: "nvfp4", FP4[1]: "mxfp8", AWQ: "AWQ"}
FILES = (  # names in core's templates, the models that have them, and the format
    ("`minimax_h3_*_pruned_int8_convrot`", "MiniMax H3", INT8),
    ("`qwen3vl_32b_minimax_h3_nvfp4_awq`", "the encoder of MiniMax H3", FP4[0]),
    ("`ltx-2.5-22b-*-int8-convrot`, `gemma4*-int8-convrot`", "LTX-2.5 and its encoders", INT8),
    ("`ltx-2.3-22b-*-fp8`, `ltx-2-19b-*-fp8`", "LTX-2.3, LTX-2", FP8[0]),
    ("`gemma_3_12B_it_fp4_mixed`", "the encoder of LTX-2", FP4[0]),
    ("`wan_animate_2*_int8_convrot`, `wan2.1_14B_SCAIL_2_int8_convrot`", "Wan Animate 2, SCAIL 2", INT8),
    ("`wan2.*_fp8_scaled`, `umt5_xxl_fp8_e4m3fn_scaled`", "Wan 2.1, 2.2 and their encoder", FP8[0]),
    ("`qwen_image_*_int8_convrot`", "Qwen-Image", INT8),
    ("`qwen_image_*_fp8mixed`, `qwen_2.5_vl_7b_fp8_scaled`", "Qwen-Image and its encoder", FP8[0]),
    ("`flux2_dev_fp8mixed`, `flux-2-klein-*-fp8`", "FLUX.2", FP8[0]),
    ("`hidream_o1_image_mxfp8`", "HiDream O1", FP4[1]),
    (
        "`ltxv-*-fp8`, `*fp8_scaled`, `llava_llama3_fp8_scaled`",
        "LTX-Video, Mochi, HunyuanVideo in core's graphs",
        FP8[0],
    ),
)
CARDS = (  # as people name them, and how the rows know them, with comfy-kitchen's kernels that they can have
    ("Mac", "mps", "", "eager"), ("RX 6600", "rocm", "gfx1032", "eager"), ("RX 7800", "rocm", "gfx1101", "hip"),
    ("V100", "cuda", "sm70", "eager"), ("RTX 2060", "cuda", "sm75", "cuda"), ("RTX 3060", "cuda", "sm86", "cuda"),
    ("RTX 4070", "cuda", "sm89", "cuda"), ("RTX 5070", "cuda", "sm120", "cuda"),
)  # fmt: skip


def card_rows() -> Iterator[Row]:
    """A row per row of the table."""
    for row in PACKED_ROWS:
        formats = ", ".join(NAMES[each] for each in FORMATS if each in row.formats and each in NAMES)
        kernels = "" if row.kernels == ("*",) else " or ".join(filter(None, row.kernels))
        path = CORE if row.path == CORE else "dequantised"
        asked = "yes" if row.ask and set(row.formats) & set(INTEGERS) else ""
        yield {"card": row.card, "formats": formats, "kernels": kernels, "path": path, "why": row.why,
               "source": row.source, "tested": asked}  # fmt: skip


def write_page(rows: list[Row]) -> None:
    """Write the tables of the page."""
    head = ("card", "formats", "with comfy-kitchen's", "multiplied", "because", "a test overrules it")
    cells = [[*list(row.values())[:4], f"{row['why']} ({row['source']})", row["tested"]] for row in rows]
    write_table("packed-files.md", "cards", head, cells)
    files = [[file, models, NAMES[each], *(_path(each, *card) for card in CARDS)] for file, models, each in FILES]
    write_table("packed-files.md", "files", ("file", "of", "format", *(name for name, *_ in CARDS)), files)


def _path(layer_format: str, name: str, backend: str, arch: str, kernels: str) -> str:
    facts = replace(facts_for("cpu"), backend=backend, arch=arch, name=name)
    row = row_for(facts, layer_format, kernels)
    return "packed" if row is not None and row.path == CORE else "dequantised"


CASES = [Case("packed_cards", card_rows, about=dict, page=write_page)]
