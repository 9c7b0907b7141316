"""Choice of the torch build that a device needs, and a check of the installed one."""

from __future__ import annotations

import re
from fnmatch import fnmatch

from ..errors import UnsupportedError
from .facts import DeviceFacts, gone

PYTORCH = "https://download.pytorch.org/whl/"
AMD = "https://rocm.nightlies.amd.com/v2/"
GENERIC = {
    "gfx9": "gfx90[02469c]",
    "gfx9-4": "gfx9[45]?",
    "gfx11": "gfx11[05]?",
    "gfx12": "gfx120?",
}  # as LLVM has them
LAST_CUDA_12 = "2.15"  # exclusive: the first torch without builds for CUDA 12 (pytorch#190385, ComfyUI#16438)

WHEELS: tuple[tuple[str, str, str, str], ...] = (  # backend, arch pattern, index, why; the first that fits
    ("cuda", "sm[56]?", f"{PYTORCH}cu126", "later builds lack kernels for Maxwell and Pascal (ComfyUI#9650, #10468)"),
    ("cuda", "sm7[02]", f"{PYTORCH}cu126", "builds for CUDA 13 have no kernels for Volta (ComfyUI#16438)"),
    ("cuda", "*", f"{PYTORCH}cu130", "what ComfyUI recommends for Turing and newer"),
    ("rocm", "gfx110?", f"{AMD}gfx110X-all/", "AMD's build for RDNA 3"),
    ("rocm", "gfx1151", f"{AMD}gfx1151/", "AMD's build for RDNA 3.5"),
    ("rocm", "gfx120?", f"{AMD}gfx120X-all/", "AMD's build for RDNA 4"),
    ("rocm", "*", f"{PYTORCH}rocm7.2", "the stable ROCm build"),
    ("xpu", "*", f"{PYTORCH}xpu", "the build for Intel GPUs"),
)


def wheel_index(facts: DeviceFacts) -> tuple[str, str]:
    """The index to install torch from for the device of ``facts``, and why; both empty where there is none to name."""
    return next((row[2:] for row in WHEELS if row[0] == facts.backend and fnmatch(facts.arch, row[1])), ("", ""))


def install(index: str) -> str:
    """The command that installs torch from ``index``, no newer than the last that it has."""
    torch = f'"torch<{LAST_CUDA_12}"' if "/cu12" in index else "torch"
    return f"python -m pip install -U {torch} torchvision --index-url {index}"


def has_kernels(facts: DeviceFacts) -> bool:
    """True if this torch was compiled for the device, or does not tell what it was compiled for."""
    if not facts.compiled or not facts.arch or facts.backend not in ("cuda", "rocm"):
        return True
    if facts.backend == "rocm":  # gfx10-3-generic, for one, covers gfx1030 to gfx1036
        names = [name.removesuffix("-generic") for name in facts.compiled]
        return facts.arch in names or any(fnmatch(facts.arch, GENERIC.get(n, n.replace("-", "") + "?")) for n in names)
    return any(_runs_on(name, facts.arch) for name in facts.compiled)


def unusable_device(facts: DeviceFacts, fault: str) -> UnsupportedError:
    """The error for a device with ``fault``: which build of torch it needs, or that it has gone."""
    if not has_kernels(facts):
        index, why = wheel_index(facts)
        return UnsupportedError(
            f"torch {facts.torch_version} has no kernels for {facts.name} ({facts.arch}): it was compiled for "
            f"{', '.join(facts.compiled)}",
            expected=f"a build of torch for {facts.arch}",
            fix=f"Install it into this Python: {install(index)} ({why}).",
        )
    return gone(facts.device, fault, facts.name)


def _runs_on(name: str, arch: str) -> bool:
    """True if a CUDA build entry covers ``arch``: same major and no newer minor, PTX no newer, or equal for ``a``."""
    build = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", name)
    here = re.fullmatch(r"sm(\d+)(\d)", arch)
    if build is None or here is None:
        return False
    kind, major, minor, suffix = build[1], int(build[2]), int(build[3]), build[4]
    own = int(here[1]), int(here[2])
    if suffix == "a":
        return (major, minor) == own
    return (major, minor) <= own and (kind == "compute" or major == own[0])
