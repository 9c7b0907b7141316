"""Packed files of ComfyUI's: which card runs which format by which path.

``packed_cards`` writes the tables of docs/packed-files.md from ``compat/device/packed_rows.csv``; each product
on a GPU is a probe of `anygpu prove`.
"""

from collections.abc import Iterator
from dataclasses import replace

from anygpu.compat.device import packed_paths as paths
from anygpu.compat.device.facts import facts_for
from runner import Row, data, known_rows, write_table

NAMES = dict(zip((paths.INT8, paths.W4A8, paths.W4A4, *paths.FP8[:1], *paths.FP4[:2], paths.AWQ),
                 ("int8", "W4A8", "W4A4", "fp8", "nvfp4", "mxfp8", "AWQ"), strict=True))  # fmt: skip
FILES = "../packed_files"  # beside the results: names in core's templates, the models that have them, the format
CARDS = data("packed_cards")  # as people name them, and how the rows know them, with the kernels they can have


def card_rows() -> Iterator[Row]:
    """A row per row of the table."""
    for row in paths.PACKED_ROWS:
        formats = ", ".join(NAMES[each] for each in paths.FORMATS if each in row.formats and each in NAMES)
        kernels = "" if row.kernels == ("*",) else " or ".join(filter(None, row.kernels))
        path = paths.CORE if row.path == paths.CORE else "dequantised"
        asked = "yes" if row.ask and set(row.formats) & set(paths.INTEGERS) else ""
        yield {"card": row.card, "formats": formats, "kernels": kernels, "path": path, "why": row.why,
               "source": row.source, "tested": asked}  # fmt: skip


def write_page(rows: list[Row]) -> None:
    """Write the tables of the page."""
    head = ("card", "formats", "with comfy-kitchen's", "multiplied", "because", "a test overrules it")
    cells = [[*list(row.values())[:4], f"{row['why']} ({row['source']})", row["tested"]] for row in rows]
    write_table("packed-files.md", "cards", head, cells)
    formats = {name: layer_format for layer_format, name in NAMES.items()}
    files = [[*row.values(), *(_path(formats[row["format"]], *card) for card in CARDS)] for row in known_rows(FILES)]
    write_table("packed-files.md", "files", ("file", "of", "format", *(name for name, *_ in CARDS)), files)


def _path(layer_format: str, name: str, backend: str, arch: str, kernels: str) -> str:
    facts = replace(facts_for("cpu"), backend=backend, arch=arch, name=name)
    row = paths.row_for(facts, layer_format, kernels)
    return "packed" if row is not None and row.path == paths.CORE else "dequantised"
