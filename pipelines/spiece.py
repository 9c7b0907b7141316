"""A T5 tokenizer from the ``spiece.model`` of a published checkpoint.

transformers reads that file through protobuf, a package that ComfyUI does not bring and nothing else here needs. The
file is a flat message: the pieces with their scores, and the table by which text is normalised.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..compat.checkpoints import read_json
from ..compat.errors import CheckpointError

FILE = "spiece.model"
UNKNOWN_PIECE = 2  # T5's order: <pad>, </s>, <unk>
# Field numbers of sentencepiece_model.proto
PIECES, NORMALIZER, PIECE, SCORE, CHARSMAP = 1, 3, 1, 2, 2


def is_alone(folder: Path) -> bool:
    """Whether a tokenizer's folder has ``spiece.model`` and no ``tokenizer.json``, which would need no reading here."""
    return (folder / FILE).is_file() and not (folder / "tokenizer.json").is_file()


def t5_tokenizer(folder: Path) -> Any:
    """transformers' own T5 tokenizer with the pieces of ``folder / spiece.model``.

    Raises:
        CheckpointError: the file is damaged.

    Source: transformers ``T5Converter.convert_from_spm``; equal to it.
    """
    from tokenizers import normalizers
    from transformers import T5Tokenizer

    described = folder / "tokenizer_config.json"
    settings = read_json(described, "a tokenizer") if described.is_file() else {}
    extra = int(settings.get("extra_ids", 100))
    try:
        pieces, charsmap = read_pieces((folder / FILE).read_bytes())
    except (IndexError, ValueError, struct.error) as error:
        raise CheckpointError(
            f"{str(folder / FILE)!r} is damaged ({error})", expected="a SentencePiece model",
            fix="Download this file again.",
        ) from error
    vocabulary = [*pieces, *((f"<extra_id_{index}>", 0.0) for index in range(extra - 1, -1, -1))]
    longest = {key: settings[key] for key in ("model_max_length",) if key in settings}
    tokenizer = T5Tokenizer(vocab=vocabulary, extra_ids=extra, **longest)
    if charsmap:
        tokenizer.backend_tokenizer.normalizer = normalizers.Precompiled(charsmap)
    return tokenizer


def read_pieces(data: bytes) -> tuple[list[tuple[str, float]], bytes]:
    """The pieces with their scores, and the normalisation table (empty where there is none).

    Raises:
        ValueError, IndexError, struct.error: not such a file, or cut short.
    """
    pieces: list[tuple[str, float]] = []
    charsmap = b""
    for number, value in _fields(data):
        if number == PIECES:
            row = dict(_fields(_message(value)))
            (score,) = struct.unpack("<f", _message(row.get(SCORE, b"\0\0\0\0")))
            pieces.append((_message(row[PIECE]).decode("utf-8") if PIECE in row else "", score))
        elif number == NORMALIZER:
            charsmap = _message(dict(_fields(_message(value))).get(CHARSMAP, b""))
    if len(pieces) <= UNKNOWN_PIECE:
        raise ValueError(f"{len(pieces)} pieces")
    return pieces, charsmap


def _message(value: bytes | int) -> bytes:
    if isinstance(value, int):
        raise ValueError("a number where a message is expected")
    return value


def _fields(data: bytes) -> Iterator[tuple[int, bytes | int]]:
    """(number, value) of each field of a protobuf message."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if kind not in (1, 2, 5):
            raise ValueError(f"wire type {kind} at byte {at}")
        length, at = _varint(data, at) if kind == 2 else ({1: 8, 5: 4}[kind], at)
        if at + length > len(data):
            raise ValueError(f"it ends inside a field, at byte {len(data)}")
        yield key >> 3, data[at : at + length]
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
