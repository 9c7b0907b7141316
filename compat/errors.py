"""Errors that a user can act on: what was found, what was expected, what to do next, in one line.

``__module__`` is set because ComfyUI shows it before the message, and loads this file under the name of its folder.
"""

from __future__ import annotations


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
        super().__init__(f"{self.found}; expected {self.expected}. {self.fix}")


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
