"""Start a ComfyUI checkout under its own interpreter: ``python launch.py COMFYUI [ComfyUI arguments ...]``.

torchvision and torchaudio are often installed as CUDA builds whose compiled parts do not load beside a CPU build of
torch; ComfyUI then dies at import although neither part is needed. A CUDA build of torch on a machine without a GPU
has core ask a driver that is not there. All three are met inside this process, at the moment they are imported, and
nothing of the installation is changed. Standard library only: it runs in the host's interpreter.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

_kept: list[Any] = []  # operator definitions live as long as the library object that made them


def declare_operators(extension: ModuleType) -> None:
    """Declare torchvision's operators that its own import describes, when its compiled part has not loaded.

    Args:
        extension: ``torchvision.extension``, just imported.
    """
    if extension._has_ops():
        return
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _kept.append(library)


def tolerate_libraries(loading: ModuleType) -> None:
    """Make torchaudio treat a compiled part that cannot load like one that is not there, which it allows.

    Args:
        loading: ``torchaudio._extension.utils``, just imported.
    """
    strict: Callable[[str], bool] = loading._load_lib

    def load_lib(name: str) -> bool:
        try:
            return strict(name)
        except OSError:
            return False

    loading._load_lib = load_lib


def hide_cuda_without_driver(torch: ModuleType) -> None:
    """Make a CUDA build of torch count as one for the CPU where no device answers: core would ask its driver.

    Args:
        torch: just imported.
    """
    if torch.version.cuda and not torch.cuda.is_available():
        torch.version.cuda = None


AFTER_IMPORT: dict[str, Callable[[ModuleType], None]] = {
    "torch": hide_cuda_without_driver,
    "torchvision.extension": declare_operators,
    "torchaudio._extension.utils": tolerate_libraries,
}


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function on a module of :data:`AFTER_IMPORT` as soon as its own code has run."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The ordinary specification, with a loader that ends by calling the function."""
        if name not in AFTER_IMPORT:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            AFTER_IMPORT[name](module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def main() -> None:
    """Run ``main.py`` of the checkout as if it had been started by hand in its folder."""
    root = Path(sys.argv[1]).expanduser().resolve() if len(sys.argv) > 1 else None
    if root is None or not (root / "main.py").is_file():
        sys.exit(f"no main.py in {root}; expected a ComfyUI checkout; usage: launch.py COMFYUI [arguments ...]")
    sys.meta_path.insert(0, AfterImport())
    os.chdir(root)
    sys.path[0] = str(root)  # this file's own folder must not answer ComfyUI's imports
    sys.argv = ["main.py", *sys.argv[2:]]
    runpy.run_path("main.py", run_name="__main__")


if __name__ == "__main__":
    main()
