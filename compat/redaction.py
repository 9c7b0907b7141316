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
SHORTEST = 3  # of a name that is looked for in texts
PLAIN = frozenset(("root", "user", "admin", "home", "localhost", "cpu", "cuda", "gpu", "torch", "linux", "windows"))


def own_names() -> tuple[str, ...]:
    """The names of this user and this computer, as far as they identify them."""
    home, computer = value_or(lambda: str(Path.home().name), ""), value_or(lambda: str(platform.node()), "")
    names = (home, computer, computer.partition(".")[0])
    return tuple(dict.fromkeys(name for name in names if len(name) >= SHORTEST and name.lower() not in PLAIN))


def redact(value: Any, names: Iterable[str]) -> Any:
    """``value``, of JSON's kinds, in which every text is without paths, addresses, keys and ``names``."""
    if isinstance(value, dict):
        return {str(redact(key, names)): redact(item, names) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact(item, names) for item in value]
    if not isinstance(value, str):
        return value
    for pattern, mark in PATTERNS:
        value = pattern.sub(mark, value)
    for name in sorted(names, key=len, reverse=True):
        value = re.sub(re.escape(name), "<name>", value, flags=re.IGNORECASE)
    return value
