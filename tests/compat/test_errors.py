"""Every error is one line: found; expected; fix."""

from __future__ import annotations

from anygpu.compat.errors import CheckpointError, InputError, MissingPackageError, PackError, UnsupportedError


def test_one_line_in_order():
    error = PackError("frames\n0", expected="1 to 9", fix="Use 1.")
    assert str(error) == "frames 0; expected 1 to 9. Use 1."


def test_kinds_are_also_what_python_calls_them():
    for kind, builtin in (
        (InputError, ValueError),
        (CheckpointError, OSError),
        (UnsupportedError, RuntimeError),
        (MissingPackageError, ImportError),
    ):
        assert issubclass(kind, PackError) and issubclass(kind, builtin)
        assert str(kind("a", expected="b", fix="c")) == "a; expected b. c"
