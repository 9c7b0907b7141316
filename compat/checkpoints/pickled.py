"""Files of tensors that torch pickled (.bin, .pth), read without running code."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path
from pickletools import genops
from typing import Any

import torch

from ..errors import TOKEN_BYTES, CheckpointError, PackError, afford
from .headers import plain_status

ZIP = b"PK\3\4"  # before torch 1.6 a file was five pickles, then bytes, and cannot be mapped
CALLED = re.compile(  # of what torch lets a pickle call, only this makes no more than the file holds
    r"collections OrderedDict|torch\._utils _rebuild_(tensor(_v[23])?|parameter)"
    r"|torch(\.storage)? (?!Typed)\w+Storage|torch (bool|b?float|u?int|complex)\w*"
)


def pickled_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file that torch pickled, mapped from a ZIP; nothing in it is run. CheckpointError for others."""
    try:
        size = plain_status(path).st_size
        with path.open("rb") as file:
            pickles, begins = list[Any]([file] * 5), file.read(len(ZIP))
            if begins == ZIP:
                archive = zipfile.ZipFile(file)
                if any(item.compress_type != zipfile.ZIP_STORED for item in archive.infolist()):
                    raise ValueError("compressed, which torch does not write, and maps as if it were not")
                pickles = [archive.open(item) for item in archive.infolist() if item.filename.lower().endswith(".pkl")]
            file.seek(0)
            for code, called, position in (each for pickle in pickles for each in genops(pickle)):
                if code.name == "GLOBAL" and not CALLED.fullmatch(str(called)):
                    raise ValueError(f"it calls {called}")
                afford(repr(str(path)), TOKEN_BYTES * (position or 0), size)  # objects take many times the bytes read
        content: Any = torch.load(path, map_location="cpu", mmap=begins == ZIP, weights_only=True)
    except PackError:
        raise
    except Exception as error:  # the unpickler of torch raises nearly anything on damage
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        found = f"{str(path)!r} cannot be read as weights alone ({reason})"
        expected = f"a complete {path.suffix} that contains only tensors"
        fix = "Download this file again, or use the .safetensors one."
        raise CheckpointError(found, expected=expected, fix=fix) from error
    if not isinstance(content, dict) or not all(map(_is_whole, content.values())):
        found, expected = f"{str(path)!r} holds something beside tensors", f"a {path.suffix} that maps names to tensors"
        raise CheckpointError(found, expected=expected, fix="Use the file as published, not a training checkpoint.")
    return content


def _is_whole(value: Any) -> bool:
    """True for a tensor whose storage, in host memory, has all of its elements."""
    plain = isinstance(value, torch.Tensor) and value.layout == torch.strided and value.device.type == "cpu"
    return plain and value.numel() * value.element_size() <= value.untyped_storage().nbytes()
