"""Errors that a user can act on: what was found, what was expected, what to do next, in one line."""

from __future__ import annotations


class PackError(Exception):
    """A failure with its remedy.

    Args:
        found: what is there, with the value, file or input quoted.
        expected: what would have been right, with units.
        fix: one sentence that says what to do.
    """

    def __init__(self, found: str, *, expected: str, fix: str) -> None:
        self.found, self.expected, self.fix = (" ".join(text.split()) for text in (found, expected, fix))
        super().__init__(f"{self.found}; expected {self.expected}. {self.fix}")


class InputError(PackError, ValueError):
    """A value that the user entered cannot be used."""


class CheckpointError(PackError, OSError):
    """A model file or folder is missing, damaged or of another kind."""


class UnsupportedError(PackError, RuntimeError):
    """This machine, version or family cannot do what was asked, whatever the input."""


class MissingPackageError(PackError, ImportError):
    """A Python package that this feature needs is absent or broken."""
