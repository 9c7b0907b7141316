"""Every error is one line: found; expected; fix."""

from __future__ import annotations

from anygpu.compat.errors import CheckpointError, InputError, MissingPackageError, PackError, UnsupportedError, parts_of


def test_one_line_in_order():
    error = PackError("frames\n0", expected="1 to 9", fix="Use 1.")
    assert str(error) == "frames 0; expected 1 to 9. Use 1."


def test_whoever_has_only_the_text_gets_the_parts_back():
    """As ComfyUI hands an error on, with advice of its own behind it; whatever the words are."""
    error = PackError("a; expected b. c", expected="d. e; expected f", fix="g. h")
    parts = {"found": error.found, "expected": error.expected, "fix": error.fix}
    assert parts_of(str(error)) == parts_of(f"{error}\nTIPS: buy memory.") == parts
    assert parts_of(" something else\n") == {"found": "something else"}


def test_kinds_are_also_what_python_calls_them():
    for kind, builtin in (
        (InputError, ValueError),
        (CheckpointError, OSError),
        (UnsupportedError, RuntimeError),
        (MissingPackageError, ImportError),
    ):
        assert issubclass(kind, PackError) and issubclass(kind, builtin)
        assert str(kind("a", expected="b", fix="c")) == "a; expected b. c"
