"""A kill, a full disk or a damaged one at each call that changes a file, in whatever we write; Linux, with gcc.

The file is the old or the new one, an error is ours and one line, nothing half-written stays but after a kill, and the
same write succeeds afterwards.

Run: python tests/runs/disks.py [--only NAME]
"""

import argparse
import ctypes
import errno
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from anygpu.compat.checkpoints import identity
from anygpu.compat.checkpoints.identity import values_hash, whole_of
from anygpu.compat.device.facts import facts_for
from anygpu.compat.device.probe_store import ProbeStore
from anygpu.compat.errors import PackError
from anygpu.compat.memory.statistics import MemoryStats, StageCost, saved_stages
from anygpu.compat.repairs import FP32, Repair, RepairStore
from anygpu.pipelines.base import Latents, Prompt, PromptRequest, SampleSettings
from anygpu.pipelines.latents import recovery
from anygpu.pipelines.latents.prompt_files import load_prompt, save_prompt
from anygpu.pipelines.latents.steps import SavedSteps
from anygpu.pipelines.movie import read_frames, write_mp4
from anygpu.pipelines.records.job import Content, VideoJob, read_job, write_job
from anygpu.pipelines.records.job_folder import JobFolder
from anygpu.pipelines.sampling.resume import SectionState, StepState

SOURCE = Path(__file__).with_name("calls.c")
KILL, KILL_IN_WRITE, REFUSE = range(3)
FAULTS = [(KILL, 0, 1), (KILL_IN_WRITE, 0, 1)]
FAULTS += [(REFUSE, code, times) for code in (errno.ENOSPC, errno.EIO) for times in (1, 10**6)]
KEY = "a" * 32
FRAMES = torch.rand(4, 64, 64, 3, generator=torch.Generator().manual_seed(0))
Write = Callable[[Path, int], Any]  # into an empty folder, then, with another number, over it
Read = Callable[[Path], Any]


def unheard(_text: str) -> None:
    """What a user would be told."""


def noise(number: int) -> torch.Tensor:
    return torch.randn(1, 16, 3, 8, 8, generator=torch.Generator().manual_seed(number))


def latents(number: int) -> Latents:
    state = torch.Generator().manual_seed(number).get_state().numpy().tobytes()
    extra = {"section_lengths": [1], "window": 9, "generator_state": state.hex()}
    return Latents(noise(number), "framepack", "image", 9, 64, 64, 30.0, number, extra=extra)


def sections(folder: Path, number: int) -> None:
    state, saved = SectionState(noise(number), (1,), b""), recovery.SavedSections(folder, unheard)
    saved.found("key")
    saved.save("key", number, 3, latents(number), state)


def section(folder: Path) -> Any:
    found = recovery.SavedSections(folder, unheard).found("key")
    return found and values_hash(found.latents)


def step(folder: Path, number: int) -> None:
    SavedSteps(folder, unheard).save(KEY, StepState(number, 0, noise(number), {"a": [noise(number), None]}, state_of()))


def state_of() -> bytes:
    return bytes(torch.Generator().manual_seed(0).get_state().numpy().tobytes())


def step_in(folder: Path) -> Any:
    found = SavedSteps(folder, unheard).found(KEY)
    return found and (found.done, values_hash(found.latents, found.solver["a"][0]))


def hashes(folder: Path, number: int) -> None:
    identity.RESTING_NS = 0
    identity._wholes.clear()
    source = folder.with_name(f"file-{number}-{folder.name}")  # which no fault meets
    source.write_bytes(bytes([number]))
    whole_of(source, folder, lambda: None)


def probes(folder: Path) -> ProbeStore:
    return ProbeStore(facts_for("cpu"), folder, more={f"p{number}": lambda _: "" for number in range(2)})


def finished(folder: Path, number: int) -> None:
    jobs = JobFolder(folder)
    jobs.fail(KEY, "why") if not number else jobs.finish(KEY, {"seconds": 1})


def job(number: int) -> VideoJob:
    return VideoJob(Content("LTX", "ab"), PromptRequest("a fox" * 999 * number), SampleSettings(64, 64, 9, seed=number))


def prompt(number: int) -> Prompt:
    return Prompt("ltx", {"prompt_embeds": noise(number)[:, 0, 0]}, extra={"text": "x"})


WRITERS: dict[str, tuple[Write, Read]] = {
    "latents": (
        lambda folder, number: recovery.save(folder, latents(number), unheard),
        lambda folder: sorted(one.seed for one in recovery.listing(folder)),
    ),
    "sections": (sections, section),
    "steps": (step, step_in),
    "video": (
        lambda folder, number: write_mp4(FRAMES[number:], 8.0, folder / "a.mp4", {"anygpu": str(number)}),
        lambda folder: len(read_frames(folder / "a.mp4")[0]),
    ),
    "job": (
        lambda folder, number: write_job(folder / "a.json", job(number)),
        lambda folder: read_job(folder / "a.json").key,
    ),
    "jobs": (
        lambda folder, number: JobFolder(folder).write_jobs("a", [str(number)]),
        lambda folder: (folder / "a.jsonl").read_text(encoding="utf-8"),
    ),
    "finish": (finished, lambda folder: JobFolder(folder).is_done(KEY)),
    "probes": (lambda folder, number: probes(folder)[f"p{number}"], lambda folder: set(probes(folder).known())),
    "statistics": (
        lambda folder, number: MemoryStats(folder)._keep(StageCost("s", "p", "none", "cpu", seconds=float(number))),
        lambda folder: [one.seconds for one in saved_stages(folder)],
    ),
    "repairs": (
        lambda folder, number: RepairStore(folder).add("m", Repair(str(number + 1), FP32)),
        lambda folder: [one.layer for one in RepairStore(folder).load("m")],
    ),
    "hashes": (hashes, lambda folder: len(json.loads((folder / identity.WHOLES).read_text(encoding="utf-8")))),
    "prompt": (
        lambda folder, number: save_prompt(folder / "a.safetensors", prompt(number)),
        lambda folder: values_hash(load_prompt(folder / "a.safetensors", unheard).embeds["prompt_embeds"]),
    ),
}


def played(library: Any, write: Write, folder: Path, at: int, kind: int, code: int, times: int) -> tuple[str, int]:
    """How a write over an older one ended in a process of its own, and the calls that it took."""
    end, begin = os.pipe()
    child = os.fork()
    if not child:
        library.begin(str(folder).encode(), at, kind, code, times)
        ended = ""
        try:
            write(folder, 1)
        except PackError as error:
            ended = "" if "\n" not in str(error) else f"raised lines: {error}"
        except BaseException as error:
            ended = f"raised {type(error).__name__}: {error}"
        os.write(begin, json.dumps([ended, library.calls()]).encode())
        os._exit(0)
    os.close(begin)
    with os.fdopen(end, encoding="utf-8") as report:
        text = report.read()
    os.waitpid(child, 0)
    ended, count = json.loads(text) if text else ("", 0)
    return ended, count


def faults_of(library: Any, write: Write, read: Read, base: Path) -> tuple[int, list[str]]:
    """How many faults were tried in a writer, and what was wrong."""

    def fresh() -> Path:
        folder = Path(tempfile.mkdtemp(dir=base))
        write(folder, 0)
        return folder

    first = fresh()
    old = read(first)
    _, count = played(library, write, first, 10**9, REFUSE, 0, 1)
    new, tried, wrong = read(first), 0, []
    for kind, code, times in FAULTS:
        for at in range(1, count + 1):
            folder, where = fresh(), f"fault {kind}, {code}, {times} times at call {at} of {count}"
            ended, _ = played(library, write, folder, at, kind, code, times)
            tried += 1
            wrong += [f"{where}: {ended}"] if ended else []
            try:
                found = read(folder)
                wrong += [f"{where}: {found!r}"] if found not in (old, new) else []
                half = [path.name for path in folder.rglob(".*")]
                wrong += [f"{where}: {half} stay"] if half and kind == REFUSE else []
                write(folder, 1)
                if read(folder) != new and found != new:
                    wrong.append(f"{where}: {read(folder)!r} afterwards")
            except Exception as error:
                wrong.append(f"{where}: {type(error).__name__}: {error}")
            shutil.rmtree(folder)
    return tried, wrong


def main() -> int:
    """Try each fault in each writer; 1 where something was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=WRITERS)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    total, faults = Counter[str](), 0
    with tempfile.TemporaryDirectory() as text:
        built = os.environ.get("LD_PRELOAD", "")
        if not built:
            built = str(Path(text) / "calls.so")
            subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", built, str(SOURCE), "-ldl"], check=True)
            return subprocess.run([sys.executable, *sys.argv], env={**os.environ, "LD_PRELOAD": built}).returncode
        library = ctypes.CDLL(built)
        library.calls.restype = ctypes.c_long
        library.begin.argtypes = [ctypes.c_char_p, ctypes.c_long, ctypes.c_int, ctypes.c_int, ctypes.c_long]
        for name, (write, read) in WRITERS.items():
            if arguments.only in (None, name):
                tried, wrong = faults_of(library, write, read, Path(text))
                total[name], faults = tried, faults + len(wrong)
                print(f"{name}: {tried} faults, {len(wrong)} wrong", *wrong[:5], sep="\n  ", flush=True)
    print(f"{sum(total.values())} faults in {len(total)} writers: {faults} wrong")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
