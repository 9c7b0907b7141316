"""Every error is one line: found; expected; fix."""

import pytest
from anygpu.compat import errors
from anygpu.compat.errors import CheckpointError, InputError, MissingPackageError, PackError, UnsupportedError, parts_of
from anygpu.compat.memory.parts import ProgressStage


def test_one_line_in_order():
    error = PackError("frames\n0", expected="1 to 9", fix="Use 1.")
    assert str(error) == "frames 0; expected 1 to 9. Use 1."


def test_the_nearest_valid_value_of_nan_is_a_number():
    with pytest.raises(InputError, match=r"The nearest valid value is 0\."):
        errors.require_range("denoise", float("nan"), 0.0, 1.0)


def test_whoever_has_only_the_text_gets_the_parts_back():
    """As ComfyUI hands an error on, with advice of its own behind it; whatever the words are."""
    error = PackError("a; expected b. c", expected="d. e; expected f", fix="g. h")
    parts = {"found": error.found, "expected": error.expected, "fix": error.fix}
    assert parts_of(str(error)) == parts_of(f"{error}\nTIPS: buy memory.") == parts
    assert parts_of(" something else\n") == {"found": "something else"}


def test_an_error_made_meanwhile_in_another_thread_disturbs_no_search():
    class Busy(str):
        def startswith(self, *rest):
            PackError("another", expected="b", fix="c")
            return super().startswith(*rest)

    for found in ("one", "two"):
        PackError(found, expected="b", fix="c")
    assert parts_of(Busy("nobody's"))["found"] == "nobody's"


def test_kinds_are_also_what_python_calls_them():
    for kind, builtin in (
        (InputError, ValueError),
        (CheckpointError, OSError),
        (UnsupportedError, RuntimeError),
        (MissingPackageError, ImportError),
    ):
        assert issubclass(kind, PackError) and issubclass(kind, builtin)
        assert str(kind("a", expected="b", fix="c")) == "a; expected b. c"


def test_a_stage_is_written_as_its_name_with_its_detail():
    assert str(ProgressStage("sampling")) == "sampling"
    assert str(ProgressStage("moving", "vae 1 of 3 GB", counted=True)) == "moving vae 1 of 3 GB"


def test_comfyui_shows_no_path_before_the_message_of_any_of_our_errors():
    """It names the class with its module, which is the folder that the pack lies in."""
    import anygpu.compat.output_check as output_check

    kinds = [PackError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    assert output_check.NotFinite in kinds
    assert {kind.__module__ for kind in kinds if kind.__module__.startswith("anygpu")} == {"anygpu"}
