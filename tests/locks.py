"""Makes docs/locks: every package at a version of its own, for cards whose kernels newer builds of torch lack.

``python tests/locks.py`` resolves requirements.txt by pip, and asks PyTorch's index for the last torch with kernels of
each generation; what does not answer is marked as unresolved. torch stays out of requirements.txt: a lock is for those
who build a Python of their own.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import torch
from anygpu.compat.device.facts import DeviceFacts
from anygpu.compat.device.wheels import LAST_CUDA_12, install, wheel_index

ROOT = Path(__file__).resolve().parents[1]
LOCKS = ROOT / "docs" / "locks"
GENERATIONS = {"maxwell": ("sm52", "GTX 900"), "pascal": ("sm61", "GTX 10, P40"), "volta": ("sm70", "V100, Titan V")}
TORCH = ("torch", "torchvision")
OURS = re.compile(r"torch|triton|nvidia-|cuda-|numpy", re.IGNORECASE)  # what comes with torch, and a user's own
PYTHON = "3.12"
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
UNRESOLVED = "{name}  # unresolved: the index did not answer where this file was made\n"


def index_of(arch: str) -> str:
    return wheel_index(DeviceFacts(torch.device("cuda:0"), "cuda", arch, "other", "A card", 0, ""))[0]


def resolved() -> list[str]:
    """Lines of the packages that requirements.txt asks for, and of those that these need."""
    words = ["install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-", "--only-binary=:all:"]
    words += ["--python-version", PYTHON, "--target", "nowhere", "-r", str(ROOT / "requirements.txt")]
    told = subprocess.run([*PIP, *words], capture_output=True, text=True, check=True).stdout
    found = {each["metadata"]["name"]: each["metadata"]["version"] for each in json.loads(told)["install"]}
    return sorted(f"{name}=={version}\n" for name, version in found.items() if not OURS.match(name))


def newest(name: str, index: str) -> str:
    """The line of a package in an index, of torch the last for these cards; marked where the index does not answer."""
    others = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    alone = others | {"PIP_CONFIG_FILE": os.devnull, "PIP_RETRIES": "0"}
    asked = subprocess.run(
        [*PIP, "index", "versions", name, "--index-url", index], capture_output=True, text=True, env=alone
    )
    found = re.search(r"Available versions: (.+)", asked.stdout)
    below = [int(part) for part in LAST_CUDA_12.split(".")]
    for version in found[1].split(", ") if found else ():
        if name != "torch" or [int(part) for part in version.split("+")[0].split(".")[:2]] < below:
            return f"{name}=={version}\n"
    return UNRESOLVED.format(name=f"torch<{LAST_CUDA_12}" if name == "torch" else name)


def lock(generation: str, lines: list[str], day: str) -> str:
    arch, cards = GENERATIONS[generation]
    index = index_of(arch)
    head = [f"# {generation.capitalize()} ({cards}): Python {PYTHON}, {day}, made by tests/locks.py\n"]
    head += [f"# {install(index)}\n", f"--extra-index-url {index}\n"]
    return "".join([*head, *(newest(each, index) for each in TORCH), *lines])


if __name__ == "__main__":
    LOCKS.mkdir(exist_ok=True)
    lines, day = resolved(), datetime.date.today().isoformat()
    for generation in GENERATIONS:
        (LOCKS / f"{generation}.txt").write_text(lock(generation, lines, day), encoding="utf-8")
