"""What the fuzzer calls, and what replays its corpus: every reader on a file of any bytes."""

from pathlib import Path

import torch
from anygpu.compat.checkpoints import gguf_file, headers
from anygpu.compat.checkpoints import quantised as scaled
from anygpu.compat.checkpoints.latents import metadata_of, read_record, record_in
from anygpu.compat.checkpoints.weights import read_tensors
from anygpu.compat.errors import PackError
from anygpu.pipelines.files.formats import contents


def read_all(data: bytes, folder: Path) -> None:
    """Every reader on a file of these bytes: each returns, or raises one of our errors of one line."""
    path = folder / ("file.gguf" if data[:4] == gguf_file.MAGIC else "file.safetensors")
    path.write_bytes(data)
    try:
        if path.suffix == ".gguf":
            entries = gguf_file.gguf_header(path)[0]
        else:
            entries, notes = headers.entries_and_notes(path)
            entries = scaled.with_scales(entries, notes, path)
            record_in(metadata_of(path), path)
            read_record(path, "latents")
        contents(path)
        for dtype in (None, torch.bfloat16):
            read_tensors(entries, dtype, lambda _bytes: None)
    except PackError as error:
        assert "\n" not in str(error), "an error of more than one line"
