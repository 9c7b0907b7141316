"""Installed packages against the oldest versions that work: ``requirements.txt``, and torch, which that never names."""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Callable, Iterable
from pathlib import Path

TORCH = "torch>=2.8"
FILE = Path(__file__).resolve().parents[1] / "requirements.txt"


def missing_packages(requirements: Iterable[str], version_of: Callable[[str], str]) -> str:
    """One line on ``requirements`` that are absent or too old by ``version_of``, and how to mend it; empty for none."""
    from packaging.requirements import Requirement
    from packaging.version import Version

    found, wanted = [], []
    for line in filter(None, map(str.strip, requirements)):
        requirement = Requirement(line)
        try:
            version = version_of(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            found.append(f"no {requirement.name}")
        else:
            if requirement.specifier.contains(Version(version).base_version):
                continue
            found.append(f"{requirement.name} {version}")
        wanted.append(str(requirement))
    if not found:
        return ""
    torch = "Update torch as pytorch.org says for your GPU. " if TORCH in wanted else ""  # PyPI's may not know it
    pip = " ".join(f'"{requirement}"' for requirement in wanted if requirement != TORCH)
    pip = f"Run `python -m pip install {pip}` with that Python. " if pip else ""
    return f"{', '.join(found)} in ComfyUI's Python; expected {', '.join(wanted)}. {torch}{pip}Restart ComfyUI."


@functools.cache
def package_problem() -> str:
    """The line about the packages of this process; empty where all is well or cannot be told."""
    try:
        return missing_packages((TORCH, *FILE.read_text(encoding="utf-8").splitlines()), importlib.metadata.version)
    except Exception:  # a damaged environment: the nodes say what they lack when they run
        return ""
