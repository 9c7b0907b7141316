"""What is too old or absent is one line that says how to mend it."""

from importlib.metadata import PackageNotFoundError

import pytest
from anygpu.compat.requirements import FILE, TORCH, missing_packages, package_problem

INSTALLED = {"transformers": "4.57.1", "diffusers": "0.42.1", "torch": "2.9.0+cu128"}


def version_of(name: str) -> str:
    if name not in INSTALLED:
        raise PackageNotFoundError(name)
    return INSTALLED[name]


def test_an_old_and_an_absent_package_are_named_with_the_command():
    line = missing_packages(["diffusers>=0.41", "transformers>=5.0", "", "gguf>=0.10", TORCH], version_of)
    assert line.startswith("transformers 4.57.1, no gguf in ComfyUI's Python; expected transformers>=5.0, gguf>=0.10.")
    assert ' Run `python -m pip install "transformers>=5.0" "gguf>=0.10"` with' in line and "Update" not in line


def test_torch_is_not_replaced_by_another_build():
    line = missing_packages(["gguf>=0.10", TORCH], {"gguf": "0.9", "torch": "2.7.1+rocm6"}.__getitem__)
    assert "torch>=2.8. Update torch as pytorch.org says" in line and '`python -m pip install "gguf>=0.10"`' in line
    assert "pip install" not in missing_packages([TORCH], lambda _: "2.7.1")


@pytest.mark.parametrize("wanted, version", [("transformers>=5.0", "5.1.0.dev0"), (TORCH, "2.8.0a0+5228986c39.nv25")])
def test_a_development_version_is_new_enough(wanted, version):
    assert missing_packages([wanted], lambda _: version) == ""


def test_all_is_well_here_and_the_shipped_file_is_read():
    assert FILE.is_file() and package_problem() == ""
