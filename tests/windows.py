"""Windows' rules for files where they differ for us, on another system: `pytest --windows-rules`.

* A file that this process has open or mapped can neither be replaced, renamed nor deleted.
* Names may not contain ``< > : " | ? *`` or control characters, end with a dot or a space, or be those of devices.
* Names that differ in case alone are one name.
* There are no symbolic links (without a privilege), no ``/proc`` and no ``/sys``, and no POSIX calls of :mod:`os`.
* Text that our own code opens without naming an encoding would be cp1252: that is an error here.
* The console is cp1252.
* Mapped files are read-only.
"""

import builtins
import io
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

FORBIDDEN = re.compile(r'[<>:"|?*\x00-\x1f]|[. ]$')
DEVICES = re.compile(r"(?:con|prn|aux|nul|com\d|lpt\d)(?:\..*)?", re.IGNORECASE)
POSIX = ("posix_fadvise", "O_DIRECTORY", "mkfifo", "sched_getaffinity")
ABSENT = ("/proc", "/sys")
NO_LINKS = "needs symbolic links, which Windows gives to administrators alone"
TESTS = str(Path(__file__).parent)
PACK = str(Path(__file__).parent.parent)


def apply(patch: pytest.MonkeyPatch) -> None:
    """Put the rules into force until ``patch`` is undone."""
    real = {name: getattr(os, name) for name in ("replace", "rename", "unlink", "remove", "mkdir", "open", "stat")}

    def moving(name: str) -> Any:
        def move(source: Any, target: Any, **named: Any) -> None:
            _require_free(source)
            _require_free(target)
            real[name](source, _same_name(_checked(target)), **named)

        return move

    def unlink(path: Any, **named: Any) -> None:
        if "triton" not in Path(_caller()).parts:  # whose build for Linux removes what it has open; Windows has another
            _require_free(path)
        real["unlink"](path, **named)

    def symlink(*_: Any, **__: Any) -> None:
        if sys._getframe(2).f_code.co_filename.startswith(TESTS):
            pytest.skip(NO_LINKS)
        raise OSError(1314, "A required privilege is not held by the client")

    for name in ("replace", "rename"):
        patch.setattr(os, name, moving(name))
    for name in ("unlink", "remove"):
        patch.setattr(os, name, unlink)
    patch.setattr(os, "symlink", symlink)
    patch.setattr(os, "mkdir", lambda path, *a, **k: real["mkdir"](_same_name(_checked(path)), *a, **k))
    patch.setattr(os, "open", lambda path, flags, *a, **k: real["open"](_created(path, flags), flags, *a, **k))
    for name in POSIX:
        patch.delattr(os, name, raising=False)
    opened = _opening(io.open)
    patch.setattr(io, "open", opened)
    patch.setattr(builtins, "open", opened)
    patch.setattr("anygpu.compat.checkpoints.weights.READ_ONLY", True)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="cp1252", errors="strict")


def _opening(real: Any) -> Any:
    def open_(file: Any, mode: str = "r", *rest: Any, **named: Any) -> Any:
        if not isinstance(file, (str, os.PathLike)):
            return real(file, mode, *rest, **named)
        caller = _caller()
        if caller.startswith(PACK) and not caller.startswith(TESTS) and "site-packages" not in caller:
            if str(file).startswith(ABSENT):
                raise FileNotFoundError(2, "The system cannot find the path specified", str(file))
            encoding = named.get("encoding") or (rest[1] if len(rest) > 1 else None)
            assert "b" in mode or encoding not in (None, "locale"), f"{file} is opened as cp1252 in {caller}"
        return real(_same_name(_checked(file)) if set(mode) & set("wax+") else file, mode, *rest, **named)

    return open_


def _caller() -> str:
    """The file of whoever opens, behind pathlib and this one."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.endswith(("pathlib.py", "windows.py")):
        frame = frame.f_back
    return frame.f_code.co_filename


def _created(path: Any, flags: int) -> Any:
    return _same_name(_checked(path)) if flags & os.O_CREAT and isinstance(path, (str, os.PathLike)) else path


def _checked(path: Any) -> Any:
    name = os.path.basename(os.fspath(path))
    if isinstance(name, str) and (FORBIDDEN.search(name) or DEVICES.fullmatch(name)):
        raise OSError(22, "The filename, directory name, or volume label syntax is incorrect", str(path))
    return path


def _same_name(path: Any) -> Any:
    """The path by the name that is there in another case."""
    folder, name = os.path.split(os.fspath(path))
    try:
        there = os.listdir(folder or ".")
    except OSError:
        return path
    other = next((entry for entry in there if entry != name and entry.casefold() == name.casefold()), None)
    return path if other is None else os.path.join(folder, other)


def _require_free(path: Any) -> None:
    """Raise where this process has the file open or mapped."""
    real = os.path.realpath(os.fspath(path))
    names = set()
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            names.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        except OSError:
            continue
    descriptor = os.open("/proc/self/maps", os.O_RDONLY)
    try:
        text = b"".join(iter(lambda: os.read(descriptor, 1 << 20), b"")).decode()
    finally:
        os.close(descriptor)
    names |= {line.split(None, 5)[5] for line in text.splitlines() if len(line.split(None, 5)) == 6}
    if real in names:
        raise PermissionError(
            13, "The process cannot access the file because it is being used by another process", real
        )
