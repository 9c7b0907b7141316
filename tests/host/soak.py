"""Mixed work in a real ComfyUI for hours: families, LoRAs, core's sampler, Fit, paint, cancels; does anything grow?

Run: python tests/host/soak.py [--hours 1] [--seed 0]     (make soak HOURS=)
Memory, threads and open files of the process are written down after each round, with everything unloaded. Ends with 1
where one of them grows after the first quarter, or where a prompt fails that was not cancelled.
"""

import argparse
import csv
import itertools
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

if __name__ == "__main__":
    sys.path[:1] = [str(Path(__file__).resolve().parents[1])]  # the folder of the package `host`, as pytest has it

import re

from host import lora_files, paint_models
from host.client import Client, Prompt
from host.inside.asking import Inside
from host.prompts import core_sampled, filmed, painted, pictured, replay, shrunk, shrunk_core
from host.server import ROOT, Server, environment, find_host, served, tiny_home
from host.test_core_fit_server import ALONE, TOGETHER, graph_of
from host.test_paint import shrunk as small_paint

RESULTS = ROOT / "benchmarks" / "results" / "soak.csv"
ROUND = 8  # prompts between two measurements
ENDINGS = ("success", "interrupted", "error")
CANCELS = 0.25  # of the prompts
GROWTH = {"rss_mb": 64.0, "threads": 2.0, "files": 8.0}  # of the median of the last quarter beside the second


def measured(pid: int) -> dict[str, float]:
    """Resident memory, threads and open files of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = {name: int(re.findall(rf"{name}:\s+(\d+)", status)[0]) for name in ("VmRSS", "Threads")}
    files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return {"rss_mb": found["VmRSS"] / 1024, "threads": found["Threads"], "files": files}


def kinds(files: dict[str, str]) -> dict[str, Callable[[], Prompt]]:
    """Name to maker of each prompt that is drawn."""
    made: dict[str, Callable[[], Prompt]] = {
        fitted: lambda fitted=fitted: pictured(graph_of(files, fitted)[0].prompt)  # type: ignore[misc]
        for fitted in (ALONE, TOGETHER)
    }
    made |= {path.stem: lambda path=path: shrunk(replay(path)) for path in filmed()}  # type: ignore[misc]
    made |= {path.stem: lambda path=path: small_paint(replay(path)) for path in painted()}  # type: ignore[misc]
    made |= {path.stem: lambda path=path: shrunk_core(replay(path)) for path in core_sampled()}  # type: ignore[misc]
    return made


def grown(rows: list[dict[str, float]]) -> list[str]:
    """What grew from the second quarter of the rounds to the last."""
    quarter = len(rows) // 4
    if not quarter:
        return ["fewer than four rounds"]
    found = []
    for name, most in GROWTH.items():
        parts = rows[quarter : 2 * quarter], rows[-quarter:]
        before, after = (statistics.median(row[name] for row in part) for part in parts)
        if after - before > most:
            found.append(f"{name}: {before:.0f} to {after:.0f}")
    return found


def soak(
    server: Server, files: dict[str, str], seconds: float, rng: random.Random
) -> tuple[list[dict[str, float]], Counter[str]]:
    """The measurements after each round, and how prompts ended."""
    client, ends, rows, started = Client(server.url), Counter[str](), list[dict[str, float]](), time.monotonic()
    made = kinds(files)
    drawn = itertools.chain(made, iter(lambda: rng.choice(list(made)), None))  # each once, then at random
    while time.monotonic() - started < seconds:
        for name in itertools.islice(drawn, ROUND):
            prompt = made[name]()
            lora_files.install(server, prompt)
            for node in prompt.values():
                node["inputs"].update({"seed": rng.randrange(10**4)} if "seed" in node["inputs"] else {})
            at, cancels = time.monotonic() + rng.uniform(0, 4), rng.random() < CANCELS
            run = client.run(prompt, lambda *_: cancels and time.monotonic() > at, timeout=600)  # noqa: B023
            ends[run.ending] += 1
            if run.ending == "execution_error":
                ends[f"{name}: {run.message}"[:300]] += 1
                print(f"{name}: {run.message}", flush=True)
        client.free()
        rows.append({"seconds": round(time.monotonic() - started), **measured(server.pid)})
        print(f"{sum(ends.values())} prompts, {rows[-1]}", flush=True)
    return rows, ends


def main() -> int:
    """Soak for ``--hours``; 1 where something grew or failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="anygpu-soak-") as folder:
        base, inside = Path(folder), Inside(find_host(), tiny_home(), environment())
        files = inside.play("core_files", "write", models=str(base / "models"))
        inside.close()
        with served(base, tiny_home(), stand_ins=True) as server:
            paint_models.install(server)
            server.every_model()
            rows, ends = soak(server, files, 3600 * arguments.hours, random.Random(arguments.seed))
    found = [*grown(rows), *(text for text in ends if ": " in text)]
    new, (good, cut, failed) = not RESULTS.exists(), (ends[f"execution_{how}"] for how in ENDINGS)
    row = [time.strftime("%Y-%m-%d"), arguments.seed, rows[-1]["seconds"], good + cut + failed, cut, failed]
    row += [f"{rows[0][name]:.0f} to {rows[-1][name]:.0f}" for name in GROWTH]
    with RESULTS.open("a", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        head = ["date", "seed", "seconds", "prompts", "cancelled", "failed", *GROWTH, "grown"]
        table.writerows([*([head] if new else []), [*row, "; ".join(grown(rows))]])
    print(f"{dict(ends)}; {'; '.join(found) or 'nothing grew'}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
