"""Errors that a user can act on: what was found, what was expected, what to do next, in one line.

``__module__`` is set because ComfyUI shows it before the message, and loads this file under the name of its folder.
"""

from __future__ import annotations

from collections import deque

MOST_CHARACTERS = 700  # of what was found, which may quote a text of any length
_recent: deque[tuple[str, dict[str, str]]] = deque(maxlen=64)  # texts of errors made lately, with their parts


def remember(text: str, found: str, expected: str, fix: str) -> str:
    """``text``, an error's, whose parts :func:`parts_of` then gives to whoever has only the text."""
    _recent.append((text, {"found": found, "expected": expected, "fix": fix}))
    return text


def parts_of(message: str) -> dict[str, str]:
    """The parts of the error that ``message`` begins with; all of it as ``found`` where the error is none of ours.

    ComfyUI hands a failure on as text, with a line of advice behind some.
    """
    newest_first = (parts for text, parts in reversed(_recent) if message.startswith(text))
    return next(newest_first, {"found": message.strip()})


def _shortened(line: str) -> str:
    """Shorten ``line`` to its beginning and end if it is very long."""
    half = MOST_CHARACTERS // 2
    return line if len(line) <= MOST_CHARACTERS else f"{line[:half]} … {line[-half:]}"


class PackError(Exception):
    """A failure with its remedy.

    Args:
        found: what is there, with the value, file or input quoted.
        expected: what would have been right, with units.
        fix: one sentence that says what to do.
    """

    __module__ = "anygpu"

    def __init__(self, found: str, *, expected: str, fix: str) -> None:
        self.found, self.expected, self.fix = (" ".join(text.split()) for text in (found, expected, fix))
        self.found = _shortened(self.found)
        text = f"{self.found}; expected {self.expected}. {self.fix}"
        super().__init__(remember(text, self.found, self.expected, self.fix))


class InputError(PackError, ValueError):
    """A value that the user entered cannot be used."""

    __module__ = "anygpu"


class CheckpointError(PackError, OSError):
    """A model file or folder is missing, damaged or of another kind."""

    __module__ = "anygpu"


class UnsupportedError(PackError, RuntimeError):
    """This machine, version or family cannot do what was asked, whatever the input."""

    __module__ = "anygpu"


class MissingPackageError(PackError, ImportError):
    """A Python package that this feature needs is absent or broken."""

    __module__ = "anygpu"


def first_line(error: BaseException) -> str:
    """An error in one line of at most 160 characters, the class where it says nothing."""
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return line if len(line) <= 160 else f"{line[:157]}..."
