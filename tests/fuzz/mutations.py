"""Values, bytes, tensors and whole files that are nearly right, from a random generator."""

import json
import math
import random
import re
from pathlib import Path
from typing import Any

import torch
from anygpu.compat.checkpoints.headers import STORED
from anygpu.compat.checkpoints.weights import write_tensors
from safetensors import safe_open

Random = random.Random
ORDERS: tuple[Any, ...] = ("big", "little")
DTYPES = tuple(dict.fromkeys(STORED.values()))
ODD = (None, True, 0, -1, 1, 3, 10**6, 10**15, 2**70, 0.5, -0.5, 1e308, math.nan, math.inf, "", "x", "4", "\0", [], [0])
ODD += ([1, 2, 3], ["x"], {}, {"a": 1}, [[1]], "../../etc", "a\nb", "é" * 300)


def mutated(value: Any, rng: Random) -> Any:
    """``value`` with one thing in it replaced, taken away or put in."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        if rng.random() < 0.15:
            return {name: item for name, item in value.items() if name != key}
        return {**value, key: mutated(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.6:
        place = rng.randrange(len(value))
        return [*value[:place], mutated(value[place], rng), *value[place + 1 :]]
    if type(value) in (int, float) and rng.random() < 0.5:
        return rng.choice((value * 2, -value, value + 1, value / 2, str(value), [value]))
    return rng.choice(ODD)


def damaged(content: bytes, rng: Random) -> bytes:
    """``content`` with bytes changed, cut off, repeated or put in."""
    data = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(max(len(data), 1))
        way = rng.randrange(4)
        if way == 0 and data:
            data[at] = rng.randrange(256)
        elif way == 1:
            del data[at : at + rng.randint(1, 64)]
        elif way == 2:
            data[at:at] = data[at : at + rng.randint(1, 64)]
        else:
            data[at:at] = rng.randbytes(rng.randint(1, 8))
    return bytes(data)


def shape(rng: Random, most: int = 5) -> list[int]:
    """Sides of a small tensor, some of them 0."""
    return [rng.choice((0, 1, 1, 2, 3, 4, 8)) for _ in range(rng.randint(0, most))]


def tensor(rng: Random, sides: list[int] | None = None) -> torch.Tensor:
    """Values of any stored dtype."""
    made = torch.randn(shape(rng) if sides is None else sides).mul(rng.choice((1, 1e30, math.nan, 0)))
    return made.nan_to_num().to(rng.choice(DTYPES)) if rng.random() < 0.9 else made


def rewritten(path: Path, rng: Random) -> None:
    """Change the JSON header of a safetensors file, sometimes, and keep its length right."""
    if rng.random() < 0.6:
        return
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.dumps(mutated(json.loads(data[8 : 8 + length]), rng)).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])


def varied(seed: Path, target: Path, rng: Random) -> Path:
    """A whole safetensors file with at most three things in it changed: tensors, notes, the header."""
    with safe_open(seed, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        notes: dict[str, str] = file.metadata() or {}
    for _ in range(rng.randrange(4)):
        name, way = rng.choice(list(tensors)), rng.randrange(6)
        if way == 0:
            tensors[name] = tensor(rng)
        elif way == 1:
            tensors[name] = tensors[name].to(rng.choice(DTYPES))
        elif way == 2:
            tensors[name] = tensors[name].flatten()[: rng.randrange(4)].clone()
        elif way == 3 and len(tensors) > 1:
            tensors[rng.choice((f"{name}.1", "x", "more.audio"))] = tensors.pop(name)
        elif notes:
            key = rng.choice(list(notes))
            notes[key] = noted(notes[key], rng)
    write_tensors(target, tensors, notes)
    rewritten(target, rng)
    return target


def noted(text: str, rng: Random) -> str:
    """A note with something in it changed, in its JSON where it is JSON."""
    if rng.random() < 0.05:
        return "[" * 100_000  # deeper than a reader of JSON goes
    try:
        return json.dumps(mutated(json.loads(text), rng))
    except (ValueError, RecursionError):
        return str(rng.choice((*ODD, text * 2, text[:-1])))


def claimed(content: bytes, rng: Random) -> bytes:
    """A container whose lengths and counts claim something else: 32 bits after a box or chunk name, or before it."""
    data = bytearray(content)
    names = [match.start() for match in re.finditer(rb"[a-zA-Z]{3}[a-zA-Z0-9 ]", content)]
    for at in rng.sample(names, min(len(names), rng.randint(1, 3))):
        place = max(0, at + rng.choice((-4, 4, 8, 12, 16)))
        data[place : place + 4] = rng.choice((0, 1, 7, 2**16, 2**24, 2**31, 2**32 - 1)).to_bytes(4, rng.choice(ORDERS))
    return bytes(data)
