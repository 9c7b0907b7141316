"""The process is killed at a random moment while it saves latents: none that was reported is lost, none is damaged.

Run: python tests/runs/kills.py [--count 60] [--seed 0]
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch
from anygpu.pipelines.base import Latents
from anygpu.pipelines.latents import recovery
from anygpu.pipelines.sampling.resume import SectionState

SHAPE = (1, 16, 9, 32, 32)


def latents(seed: int) -> Latents:
    """Latents whose every value follows from the seed."""
    samples = torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))
    return Latents(samples, "framepack", "image", 33, 256, 256, 30.0, seed, extra={"section_lengths": [1], "window": 9})


def write(folder: Path) -> None:
    """Save for ever, whole samplings and sections in turn, and report each one that is kept."""
    for seed in range(10**9):
        made = latents(seed)
        if seed % 3:
            name = recovery.save(folder, made, print)
        else:
            sections = recovery.SavedSections(folder, lambda _: None)
            for index in range(2):
                sections.save(f"key {seed}", index, 3, made, SectionState(made.samples, (1,), b"state"))
            name = sections.names[f"key {seed}"]
        print(f"kept {seed} {name}", flush=True)


def killed(folder: Path, seconds: float) -> list[str]:
    """What a writer had reported when it was killed, ``seconds`` after its first report; a fork, to be quick."""
    end, begin = os.pipe()
    writer = os.fork()
    if not writer:
        os.dup2(begin, sys.stdout.fileno())
        try:
            write(folder)
        finally:
            os._exit(1)
    os.close(begin)
    with os.fdopen(end, encoding="utf-8") as reports:
        lines = [reports.readline()]
        time.sleep(seconds)
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
        return lines + reports.readlines()


def main() -> int:
    """Kill ``--count`` writers; 1 where a reported sampling is gone, damaged or not what was sampled."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rng, reported, lost, damaged, left = random.Random(arguments.seed), 0, 0, 0, 0
    for _ in range(arguments.count):
        with tempfile.TemporaryDirectory() as text:
            folder = Path(text)
            lines = killed(folder, rng.random() * 0.3)
            kept = [line.split() for line in lines if line.startswith("kept ") and line.endswith("\n")]
            listed = {item.id for item in recovery.listing(folder)}
            for _, seed, name in kept:
                reported += 1
                if name not in listed:
                    lost += 1
                    continue
                latent = recovery.load(folder, name, lambda _: None)
                damaged += not torch.equal(latent["samples"], latents(int(seed)).samples)
            files = list(folder.glob("*.safetensors"))
            damaged += sum(file.stem not in listed for file in files)
            left += len(list(folder.glob(".*.part")))
    print(f"{arguments.count} kills, {reported} samplings reported: {lost} lost, {damaged} damaged; {left} parts left")
    return 1 if lost or damaged else 0


if __name__ == "__main__":
    sys.exit(main())
