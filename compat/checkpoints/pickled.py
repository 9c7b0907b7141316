"""Files of tensors that torch pickled (.bin, .pth), read without running code."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import torch

from ..errors import TOKEN_BYTES, CheckpointError, PackError, afford
from .headers import plain_status


def pickled_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file that torch pickled, mapped; nothing in it is run. CheckpointError for anything else."""
    try:
        size = plain_status(path).st_size
        if zipfile.is_zipfile(path):  # a compressed pickle can be a thousand times its bytes, and its objects more
            with zipfile.ZipFile(path) as archive:
                pickles = [item for item in archive.infolist() if item.filename.endswith(".pkl")]
                afford(repr(str(path)), TOKEN_BYTES * sum(item.file_size for item in pickles), size)
                if any(item.compress_type != zipfile.ZIP_STORED for item in archive.infolist()):
                    raise ValueError("compressed, which torch does not write, and maps as if it were not")
                if any(b"bytearray" in archive.read(item) for item in pickles):
                    raise ValueError("it makes arrays of bytes")
        try:
            content: Any = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except RuntimeError as error:
            if "mmap" not in str(error):
                raise
            content = torch.load(path, map_location="cpu", weights_only=True)  # written before torch 1.6: no mapping
    except PackError:
        raise
    except Exception as error:  # the unpickler of torch raises nearly anything on damage
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        found = f"{str(path)!r} cannot be read as weights alone ({reason})"
        expected = f"a complete {path.suffix} that contains only tensors"
        fix = "Download this file again, or use the .safetensors one."
        raise CheckpointError(found, expected=expected, fix=fix) from error
    if not isinstance(content, dict) or not all(isinstance(value, torch.Tensor) for value in content.values()):
        found, expected = f"{str(path)!r} holds something beside tensors", f"a {path.suffix} that maps names to tensors"
        raise CheckpointError(found, expected=expected, fix="Use the file as published, not a training checkpoint.")
    return content
