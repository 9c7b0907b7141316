"""Eight threads load, run and cancel everything at once: each result is as alone, and nothing process-wide changes.

Every family, a LoRA, paint, and another pack that loads with upstream's own function, one at a time.

Run: python tests/runs/threads.py [--count 100] [--seed 0]     (of each thread)
"""

import random
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from anygpu.paint.loading import PaintRequest, load_paint
from anygpu.pipelines.base import Silent
from anygpu.pipelines.load import lora
from anygpu.pipelines.load.folder import load
from anygpu.pipelines.requests import LoadRequest
from safetensors.torch import save_file

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tiny
from pipelines.files.test_encoders import every_part, process_wide, require_equal, tensors_of
from simulated.test_families import CASES, loaded_for, rendered

from paint import stored
from runs.subjects import arguments_of

THREADS = 8
Made = dict[str, Any]  # name to module, or to a result


class Cancelled(BaseException):
    """As ComfyUI's interrupt."""


class Cancelling(Silent):
    """Cancels at the look number ``at``."""

    def __init__(self, at: int) -> None:
        self.at = at

    def check(self) -> None:
        self.at -= 1
        if self.at < 0:
            raise Cancelled


def jobs_in(folder: Path) -> dict[str, Callable[[random.Random], Made]]:
    """Name to what is done: loads by the name of the case alone, runs and cancels with a word more."""
    small = load(LoadRequest(tiny.build("ltx", folder), precision="fp32", device="cpu"))
    factors = {}
    for name, (rows, *inside) in tiny.matrices_of(small).items():
        factors[f"transformer.{name}.lora_A.weight"] = torch.ones(2, *inside) / 64
        factors[f"transformer.{name}.lora_B.weight"] = torch.ones(rows, 2, *[1] * (len(inside) - 1)) / 64
    save_file(factors, folder / "lora.safetensors")
    painted, alone = stored.checkpoint("paint", folder), threading.Lock()
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
    transformers.BertModel(transformers.BertConfig(**sizes)).save_pretrained(folder / "bert")

    def with_lora(_: random.Random) -> Made:
        pipeline = load(LoadRequest(tiny.build("ltx", folder), precision="fp32", device="cpu"))
        pipeline = lora.with_lora(pipeline, folder / "lora.safetensors", 0.5, "", "merged", Silent())
        with pipeline.offloader.hold("transformer") as module:
            return {"transformer": module}

    def paint(_: random.Random) -> Made:
        return every_part(load_paint(PaintRequest(painted, precision="fp32", device="cpu")))

    def another_pack(_: random.Random) -> Made:
        with alone:  # two of these break each other without any of ours
            return {"bert": transformers.BertModel.from_pretrained(folder / "bert")}

    def loads(name: str, _: random.Random) -> Made:
        return every_part(loaded_for(CASES[name], folder, "cpu"))

    def runs(name: str, _: random.Random) -> Made:
        return {"frames": rendered(loaded_for(CASES[name], folder, "cpu"), CASES[name])[1]}

    def cancels(name: str, rng: random.Random) -> Made:
        pipeline = loaded_for(CASES[name], folder, "cpu")
        with suppress(Cancelled):
            rendered(pipeline, CASES[name], Cancelling(rng.randrange(200)))
        return {"frames": rendered(pipeline, CASES[name])[1]}

    made: dict[str, Callable[[random.Random], Made]] = {"lora": with_lora, "paint": paint, "another pack": another_pack}
    for name in CASES:
        made |= {
            name: partial(loads, name),
            f"{name}, run": partial(runs, name),
            f"{name}, cancel": partial(cancels, name),
        }
    return made


def values_of(made: Made) -> dict[str, dict[str, torch.Tensor]]:
    """The tensors of each thing that was made."""
    return {key: {"": one} if isinstance(one, torch.Tensor) else tensors_of(one) for key, one in made.items()}


def main() -> int:
    """Have each thread do ``--count`` things; 1 where one failed or differs."""
    arguments = arguments_of(__doc__, 100)
    done, failures, said = Counter[str](), list[str](), threading.Lock()
    with tempfile.TemporaryDirectory() as text, torch.no_grad():
        jobs = jobs_in(Path(text))
        wanted = {name: values_of(job(random.Random(0))) for name, job in jobs.items()}
        before = process_wide()

        def worker(thread: int) -> None:
            rng = random.Random(f"{arguments.seed}/{thread}")
            for _ in range(arguments.count):
                name = rng.choice(list(jobs))
                try:
                    with torch.no_grad():
                        for key, one in jobs[name](rng).items():
                            if isinstance(one, torch.Tensor):
                                assert torch.equal(one, wanted[name][key][""]), key
                            else:
                                require_equal(one, wanted[name][key])
                except BaseException as error:
                    failures.append(f"{name}: {error!r}"[:300])
                with said:
                    done["cancels" if "cancel" in name else "runs" if "run" in name else "loads"] += 1
                    if not sum(done.values()) % 40:
                        print(f"{sum(done.values())} done, {len(failures)} failed", flush=True)

        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-4)
        try:
            with ThreadPoolExecutor(THREADS) as threads:
                list(threads.map(worker, range(THREADS)))
        finally:
            sys.setswitchinterval(interval)
        if process_wide() != before:
            failures.append("something process-wide has changed")
    print(f"{THREADS} threads: {dict(done)}, {len(failures)} failed: {failures[:5]}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
