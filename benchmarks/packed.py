"""Packed files of ComfyUI's: which card runs which format by which path, and the questions that a GPU has not answered.

``packed_cards`` writes the tables of docs/packed-files.md from the rows of ``compat/device/packed_rows.py``.
``packed_gpu`` asks the GPU for each product in a process of its own: some drivers end the process, or hang.
"""

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import groupby
from multiprocessing import get_context

import torch
from anygpu.compat.device.facts import facts_for
from anygpu.compat.device.packed_paths import product_fault
from anygpu.compat.device.packed_rows import AWQ, CORE, FORMATS, FP4, FP8, INT8, INTEGERS, PACKED_ROWS, W4A4, W4A8
from runner import Case, Row, no_gpu, write_table

NAMES = {INT8: "int8", W4A8: "W4A8", W4A4: "W4A4", FP8[0]: "fp8", FP4[0]: "nvfp4", FP4[1]: "mxfp8", AWQ: "AWQ"}
FILES = (  # names of published files, the models that have them, and the format
    ("`*int8_convrot*`", "MiniMax H3, LTX-2.5, Wan Animate 2", INT8),
    ("`*fp8_scaled*`, `*fp8mixed*`", "Wan 2.1 and 2.2, Flux 2, the encoder of Qwen-Image", FP8[0]),
    ("`*nvfp4*`", "the encoder of MiniMax H3", FP4[0]),
)
MINUTES = 5


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
    files = [[file, models, NAMES[each], _cards(each)] for file, models, each in FILES]
    write_table("packed-files.md", "files", ("file", "of", "format", "multiplied as it is on"), files)


def _cards(layer_format: str) -> str:
    cards = (row.card for row in PACKED_ROWS if layer_format in row.formats and row.path == CORE)
    return ", ".join(card for card, _ in groupby(cards))


def gpu_rows() -> Iterator[Row]:
    """A row per format: right and quicker than dequantising, or not, or the way in which its process ended."""
    for layer_format in INTEGERS:
        pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
        try:
            fault = pool.submit(asked, layer_format).result(60 * MINUTES) or "right and quicker"
        except Exception as error:  # a dead process, one that hangs, or what it raised
            fault = f"{type(error).__name__}: {error}"
        for process in pool._processes.values():
            process.kill()
        pool.shutdown(wait=False, cancel_futures=True)
        yield {"device": str(facts_for("cuda")), "format": layer_format, "answer": fault}


def asked(layer_format: str) -> str:
    """The fault of a product, with the kernels that core would let comfy-kitchen use."""
    from comfy_kitchen.registry import registry

    registry.disable("triton")
    if torch.version.cuda is not None and int(torch.version.cuda.split(".")[0]) < 13:
        registry.disable("cuda")
    with torch.no_grad():
        return product_fault(layer_format, True, torch.device("cuda"))


CASES = [
    Case("packed_cards", card_rows, about=dict, page=write_page),
    Case("packed_gpu", gpu_rows, table="packed_gpu", lacks=no_gpu, threads=0),
]
