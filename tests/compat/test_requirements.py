"""What is too old or absent is one line that says how to mend it."""

from importlib.metadata import PackageNotFoundError

from anygpu.compat.requirements import FILE, TORCH, missing_packages, package_problem

INSTALLED = {"transformers": "4.57.1", "diffusers": "0.42.1", "torch": "2.9.0+cu128"}


def version_of(name: str) -> str:
    if name not in INSTALLED:
        raise PackageNotFoundError(name)
    return INSTALLED[name]


def test_an_old_and_an_absent_package_are_named_with_the_command():
    line = missing_packages(["diffusers>=0.41", "transformers>=5.0", "", "gguf>=0.10", TORCH], version_of)
    assert line.startswith("transformers 4.57.1, no gguf in ComfyUI's Python; expected transformers>=5.0, gguf>=0.10.")
    assert '`python -m pip install "transformers>=5.0" "gguf>=0.10"`' in line


def test_a_development_version_is_new_enough():
    assert missing_packages(["transformers>=5.0"], lambda _: "5.1.0.dev0") == ""


def test_all_is_well_here_and_the_shipped_file_is_read():
    assert FILE.is_file() and package_problem() == ""
