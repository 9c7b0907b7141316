"""A program in a process of its own that need not import torch and diffusers again: a fork of the tests."""

import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent


def run(
    program: str, *arguments: Any, folder: Path, variables: Mapping[str, str] = {}, anew: Collection[str] = ()
) -> subprocess.CompletedProcess[str]:
    """What ``python -c program`` gives, where no module of ours or of the tests has been imported.

    Args:
        program: its text.
        arguments: its ``sys.argv`` from 1 on.
        folder: the working directory.
        variables: of the environment, beyond those of the tests; ``PYTHONPATH`` is one folder.
        anew: other packages that are not imported yet.
    """
    words = [sys.executable, "-c", program, *map(str, arguments)]
    if sys.platform != "linux":  # Apple's libraries end a fork that uses them, Windows has none
        return subprocess.run(words, cwd=folder, env=os.environ | variables, capture_output=True, text=True)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        given = (words[2:], folder, variables, anew, out.fileno(), err.fileno())
        process = multiprocessing.get_context("fork").Process(target=_execute, args=given)
        process.start()
        process.join()
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
    return subprocess.CompletedProcess(words, process.exitcode or 0, *texts)


def _execute(
    words: list[str], folder: Path, variables: Mapping[str, str], anew: Collection[str], out: int, err: int
) -> None:
    """Execute the program ``words[0]`` here, in a fork that has forgotten what ``run`` says."""
    os.dup2(out, 1)
    os.dup2(err, 2)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    for name, module in list(sys.modules.items()):
        file, package = Path(getattr(module, "__file__", None) or "/"), name.partition(".")[0]
        python = file.suffix == ".py"  # a compiled module cannot begin twice in one process
        if package == "anygpu" or (package in anew and python) or file.is_relative_to(TESTS):
            del sys.modules[name]
    os.chdir(folder)
    os.environ.update(variables)
    own = {TESTS, TESTS.parent / "benchmarks"}  # pytest's, which the program asks for itself
    sys.path[:] = [path for path in [variables.get("PYTHONPATH"), *sys.path] if path and Path(path) not in own]
    sys.argv = ["-c", *words[1:]]
    exec(compile(words[0], "<program>", "exec"), {"__name__": "__main__"})
