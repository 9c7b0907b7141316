"""The compiled half of the simulated accelerator: built once per torch, compiler and source, then kept."""

import contextlib
import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

SOURCES = Path(__file__).parent / "csrc"
DEFAULT_CACHE = Path(__file__).parent / ".build"
FLAGS = ("-std=c++20", "-O1", "-fPIC", "-w")
BUILD_SECONDS = 600


class BuildError(RuntimeError):
    """There is a compiler, but it refused the sources: never a reason to skip a test."""


def compiler() -> str | None:
    """Path of the C++ compiler: $CXX when it is set, else the first of g++, clang++ and c++; None without one."""
    chosen = os.environ.get("CXX")
    return next(filter(None, map(shutil.which, [chosen] if chosen else ["g++", "clang++", "c++"])), None)


def reason() -> str:
    """Why the library cannot be built here, as a text for `pytest.skip`; empty when it can."""
    if os.name != "posix":
        return f"the simulated accelerator is built on Linux and macOS only, found os.name {os.name!r}"
    if compiler() is None:
        return "the simulated accelerator needs a C++ compiler: install g++ or clang++, or set CXX"
    if not (_torch_folder() / "include" / "torch" / "library.h").exists():
        return f"torch {torch.__version__} was installed without its C++ headers"
    header = _torch_folder() / "include" / "c10" / "core" / "CachingDeviceAllocator.h"
    if "DeviceAllocator : " not in header.read_text(encoding="utf-8"):
        return f"the simulated accelerator needs torch 2.9 or newer for counted memory, found {torch.__version__}"
    return ""


def built(cache: Path = DEFAULT_CACHE) -> Path:
    """Path of the shared library, which is compiled first (about 20 s) if `cache` has none for this torch and source.

    Processes that ask at the same time wait for the one that compiles; the finished file appears in one step.

    Raises:
        BuildError: with the compiler's output.
    """
    library = cache / _fingerprint() / "libacc.so"
    if library.exists():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    (cache / ".gitignore").write_text("*\n", encoding="utf-8")
    with _locked(library.with_name("lock")):
        if not library.exists():
            with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
                _compiled(Path(scratch)).replace(library)
    return library


def opened(library: Path) -> ctypes.CDLL:
    """The library in this process. Opening it registers the device's kernels with torch."""
    return ctypes.CDLL(str(library))


def _torch_folder() -> Path:
    return Path(torch.__file__).parent


def _fingerprint() -> str:
    digest = hashlib.sha256()
    version = subprocess.run([compiler(), "--version"], capture_output=True, check=True, timeout=60).stdout
    for part in (torch.__version__, str(torch.version.git_version), *FLAGS, str(_torch_folder())):
        digest.update(part.encode() + b"\0")
    digest.update(version)
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:16]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    import fcntl  # POSIX only; `reason` has said so before anyone gets here

    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _compiled(scratch: Path) -> Path:
    include = _torch_folder() / "include"
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    sources = sorted(SOURCES.glob("*.cpp"))
    objects = [scratch / f"{source.stem}.o" for source in sources]
    _run_together(
        [compiler(), *FLAGS, abi, "-isystem", str(include), "-c", str(source), "-o", str(target)]
        for source, target in zip(sources, objects, strict=True)
    )
    library = scratch / "libacc.so"
    torch_libraries = _torch_folder() / "lib"
    links = ("-shared", f"-L{torch_libraries}", f"-Wl,-rpath,{torch_libraries}", "-lc10", "-ltorch_cpu")
    _run_together([[compiler(), *map(str, objects), *links, "-o", str(library)]])
    return library


def _run_together(commands: Iterable[list[str]]) -> None:
    """Runs the commands, as many at a time as there are cores; the first failure stops the rest."""
    waiting, running = list(commands), []
    try:
        while waiting or running:
            while waiting and len(running) < (os.cpu_count() or 1):
                running.append(subprocess.Popen(waiting.pop(0), stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
            process = running.pop(0)
            output, _ = process.communicate(timeout=BUILD_SECONDS)
            if process.returncode != 0:
                raise BuildError(f"{' '.join(process.args)}\n{output.decode(errors='replace')}")
    finally:
        for process in running:
            process.kill()
            process.communicate()
