"""Optional packages: imported where they are used, with one clear line when one is missing or broken."""

from __future__ import annotations

import importlib
from types import ModuleType

from .errors import MissingPackageError

INSTALL = "Install it into the Python that runs ComfyUI or anygpu: python -m pip install -U {name}"


def imported(name: str) -> ModuleType:
    """The module ``name``.

    Raises:
        MissingPackageError: it is absent, or it breaks while it is imported.
    """
    try:
        return importlib.import_module(name)
    except Exception as error:  # a broken compiled part raises nearly anything while a package is imported
        raise unusable(name, error) from error


def attribute(module: str, name: str) -> type:
    """The class ``name`` of package ``module``, which may import more packages on access.

    Raises:
        MissingPackageError: the package, its version, or one it needs is not usable.
    """
    try:
        return getattr(imported(module), name)
    except MissingPackageError:
        raise
    except AttributeError as error:
        raise MissingPackageError(
            f"the installed {module} has no {name}", expected=f"a {module} that has it", fix=INSTALL.format(name=module)
        ) from error
    except Exception as error:  # lazy modules import their dependencies here
        raise unusable(module, error) from error


def unusable(name: str, error: Exception) -> MissingPackageError:
    """The error for a package that broke while it was used: torchvision is named where it is the cause."""
    reason = str(error).strip().splitlines()
    text = reason[0] if reason else type(error).__name__
    if "torchvision" in f"{error!r} {error.__cause__!r} {error.__context__!r}":
        return MissingPackageError(
            f"package {name!r} cannot be imported because torchvision is broken ({text})",
            expected="a torchvision that matches the installed torch, or none",
            fix="Reinstall torchvision with the same index as torch, or uninstall it.",
        )
    return MissingPackageError(
        f"package {name!r} cannot be imported ({text})", expected=f"a working {name}", fix=INSTALL.format(name=name)
    )
