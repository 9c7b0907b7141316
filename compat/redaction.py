"""Text without what says whose machine it is: paths, names of user and computer, addresses, keys, serial numbers."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .device.facts import value_or

PATTERNS = tuple(
    (re.compile(pattern, re.IGNORECASE), mark)
    for pattern, mark in (
        (r"(?<=')(?:~?/|\\\\)[^'\n]*(?=')|(?<=\")(?:~?/|\\\\)[^\"\n]*(?=\")", "<path>"),  # in quotes, with spaces
        (r"(?:file|https?|ftp|ssh|s3)://[^\s'\"<>]+", "<address>"),
        (r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+", "<mail>"),
        (r"\\\\[^\s\\]+\\[^\s'\",;]*", "<path>"),
        (r"\b[a-z]:[\\/][^'\",;|<>\n]*", "<path>"),
        (r"(?<![\w.)\]])~?/(?:[^\s/'\",;:|<>]+/)*[^\s/'\",;:|<>]+/?", "<path>"),
        (r"\b(?:[0-9a-f]{2}[:-]){5}[0-9a-f]{2}\b", "<hardware address>"),
        (r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b", "<id>"),
        (r"\b(?:hf|sk|ghp|gho|pat|key)[-_][a-z0-9_-]{12,}", "<key>"),
        (r"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?![\d.])", "<address>"),
        (r"\b(?:[0-9a-f]{1,4}:){4,7}[0-9a-f]{1,4}\b", "<address>"),
    )
)
SHORTEST, WITHIN = 3, 5  # letters of a name that is looked for in texts, and of one that is within other words too
PLAIN = frozenset(("root", "user", "admin", "home", "localhost", "cpu", "cuda", "gpu", "torch", "linux", "windows"))


def own_names() -> tuple[str, ...]:
    """The names of this user and this computer, as far as they identify them."""
    home, computer = value_or(lambda: str(Path.home().name), ""), value_or(lambda: str(platform.node()), "")
    names = (home, computer, computer.partition(".")[0])
    return tuple(dict.fromkeys(name for name in names if len(name) >= SHORTEST and name.lower() not in PLAIN))


def redact(value: Any, names: Iterable[str]) -> Any:
    """``value``, of JSON's types, with marks for paths, addresses, keys and ``names`` in its texts; its fields stay."""
    if isinstance(value, dict):
        sought = {key: () if str(key).isidentifier() else names for key in value}  # the name of a field is nobody's
        return {str(redact(key, sought[key])): redact(item, names) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact(item, names) for item in value]
    if not isinstance(value, str):
        return value
    for pattern, mark in PATTERNS:
        value = pattern.sub(mark, value)
    for name in sorted(names, key=len, reverse=True):
        edges = ("(?<![^\\W_])", "(?![^\\W_])") if len(name) < WITHIN else ("", "")
        value = re.sub(re.escape(name).join(edges), "<name>", value, flags=re.IGNORECASE)
    return value
