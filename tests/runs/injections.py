"""A failure at the n-th operator, allocation, pin, event, hook or move, over families, modes, paint, Fit and Doctor.

A shortage in every wording of every back end, a device that is lost from there on, or an interrupt. The run goes on or
names the cause, nothing more stays on the device, and the next run is the same bit for bit.

Run: python tests/runs/injections.py [--count 10000] [--seed 0] [--only NAME]     (make inject COUNT=)
It goes on where it was interrupted, as long as the code is the same.
"""

import argparse
import csv
import itertools
import logging
import random
import re
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from anygpu.compat.doctor import KEEP, Doctor
from anygpu.compat.repairs import RepairStore
from anygpu.paint.loading import PaintRequest, load_paint
from anygpu.paint.sampling.painting import PaintSettings, paint_views
from anygpu.pipelines import stages
from anygpu.pipelines.base import DecodeRequest, FramePackSettings, ImageRequest, PromptRequest, SampleSettings, Silent

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from simulated import accelerator, test_doctor, test_fp16
from simulated.test_families import CASES, MODES, PICTURE, loaded_for, rendered, sampled

from runs.faults import ANEW, WHOLE, Run, injected, together
from runs.subjects import painting_inputs

ROOT = Path(__file__).resolve().parents[2]
QUICK = ("ltx", "mochi")  # pipelines that are drawn three times as often
BLOCK = 50  # injections into one pipeline


def video(name: str, offload: str, folder: Path) -> tuple[dict[str, Run], Any, Any]:
    """The stages of a tiny pipeline, and a run whose parts are read anew; its parts, and what drops them."""
    case, silent = CASES[name], Silent()
    pipeline = loaded_for(case, folder, "acc:0", offload)
    image = None
    if case.pictured:
        image = stages.encode_image(pipeline, ImageRequest(PICTURE, 64, 64), "stretch", silent)
    looks = case.pictured and "image" in pipeline.spec.recipes.effective
    request = PromptRequest("a red fox", "blurry", image=PICTURE if looks else None)
    prompt = stages.encode_prompt(pipeline, request, silent)
    settings = SampleSettings(64, 64, case.frames, steps=2, seed=3, cfg=2.0)

    def sampled() -> Any:
        if pipeline.family == "framepack":
            film = FramePackSettings(case.frames / 30, window=2)
            return stages.sample_framepack(pipeline, prompt, image, settings, film, silent)
        return stages.sample(pipeline, prompt, image, settings, silent)

    def drop() -> None:
        for part in list(pipeline.parts.readers):
            pipeline.offloader.release(part)
            pipeline.parts.drop(part)

    latents = sampled()
    return (
        {
            "encode": lambda: stages.encode_prompt(pipeline, request, silent).embeds,
            "sample": lambda: sampled().samples,
            "decode": lambda: stages.decode(pipeline, latents, silent),
            ANEW: lambda: rendered(pipeline, case)[1],
        },
        lambda: pipeline.parts,
        drop,
    )


class Told(Silent):
    """Progress that keeps what is said."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def notify(self, text: str) -> None:
        self.said.append(text)


def doctored(name: str, offload: str, folder: Path) -> tuple[dict[str, Run], Any, Any, Any]:
    """A pipeline that overflows in fp16, whose doctor seeks what helps in each run; its parts, nothing to drop, and the
    result by the decode that the last run has announced: in fp16 its sums differ."""
    pipeline = test_doctor.loud(test_fp16.loaded_for(CASES[name], folder, "acc:0", offload, "fp16"))
    told = Told()

    def watched() -> Any:
        told.said.clear()
        doctor = Doctor("model", RepairStore(None), KEEP, lambda _: None)
        return replace(pipeline, run=replace(pipeline.run, doctor=doctor))

    def whole(form: DecodeRequest | None = None) -> dict[str, torch.Tensor]:
        own = watched()
        latents = sampled(own, CASES[name])
        return {"l": latents.samples, "f": stages.decode(own, latents, told, form=form or DecodeRequest())}

    def announced() -> torch.Tensor | None:
        pixels = re.search(r"again layer by layer over (\d+) pixels", " ".join(told.said))
        return together(whole(DecodeRequest("streaming", int(pixels[1])))) if pixels else None

    runs: dict[str, Run] = {"doctor": lambda: sampled(watched(), CASES[name]).samples, f"doctor {WHOLE}": whole}
    return runs, lambda: pipeline.parts, lambda: None, announced


def painted(offload: str, folder: Path) -> tuple[dict[str, Run], Any]:
    """Views painted by the tiny paint model."""
    from paint import stored

    home = folder / "paint" / stored.FOLDERS["paint"]
    if not home.exists():
        stored.checkpoint("paint", home.parent)
    pipeline = load_paint(PaintRequest(home, precision="fp32", offload=offload, device=torch.device("acc:0")))
    inputs, settings = painting_inputs(), PaintSettings(size=64, steps=2, seed=3)
    return {"paint": lambda: paint_views(pipeline, inputs, settings, Silent()).views}, lambda: pipeline.parts


def makers(folder: Path) -> dict[str, Callable[[], tuple[Any, ...]]]:
    """Maker of the runs of each pipeline, of its parts and of what drops them, by name."""
    made: dict[str, Any] = {
        f"{name}, {mode}": lambda name=name, mode=mode: video(name, mode, folder) for name in CASES for mode in MODES
    }
    made |= {f"paint, {mode}": lambda mode=mode: painted(mode, folder) for mode in MODES}
    pairs = [
        (name, MODES[index % len(MODES)]) for index, name in enumerate(("ltx", "mochi", "hunyuan_video", "framepack"))
    ]
    made |= {
        f"doctor {name}, {mode}": lambda name=name, mode=mode: doctored(name, mode, folder) for name, mode in pairs
    }
    return made


class Fits:
    """Core's own models with Fit and Doctor, inside a ComfyUI that starts once it is needed."""

    NAMES = tuple(f"fit {number}" for number in range(8))

    def __init__(self, folder: Path) -> None:
        self.folder, self.inside = folder, None

    def block(self, seed: str) -> Counter[str]:
        """How a block of injections into one of core's models ended; nothing without a ComfyUI."""
        from host.inside.asking import Inside

        from host.server import NoHost, environment, find_host

        try:
            self.inside = self.inside or Inside(find_host(), self.folder, environment())
        except NoHost as reason:
            print(f"  {reason}")
            return Counter()
        return Counter(self.inside.play("injected", "block", seed=seed, count=BLOCK))


def code() -> str:
    """The commit that runs, with a mark where files were changed since."""
    return subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()


def blocks(names: list[str], count: int) -> Iterator[tuple[int, str]]:
    """Number and pipeline of each block of injections."""
    yield from itertools.islice(enumerate(itertools.cycle(names)), -(-count // BLOCK))


def main() -> int:
    """Inject ``--count`` failures; 1 where one was neither survived nor explained, or a later run differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="pipelines whose names begin so")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    folder = ROOT / ".build" / "tiny-host"
    folder.mkdir(parents=True, exist_ok=True)
    log = ROOT / ".build" / f"injections-{code()}-{arguments.seed}{arguments.only and '-' + arguments.only}.csv"
    done = list(csv.reader(log.read_text().splitlines())) if log.exists() else []
    made, fits = makers(folder), Fits(folder)
    names = [name for name in (*made, *fits.NAMES) if name.startswith(arguments.only)]
    names += 2 * [name for name in names if name.startswith(QUICK)]
    for number, name in itertools.islice(blocks(names, arguments.count), len({row[0] for row in done}), None):
        seed = f"{arguments.seed}/{number}"
        if name in made:
            with accelerator.fresh(), torch.no_grad():
                runs, parts, *drop = made[name]()
                ends = injected(runs, random.Random(seed), BLOCK, False, parts, *drop)
        else:
            ends = fits.block(seed)
        rows = [[str(number), name, end, str(times)] for end, times in sorted(ends.items())] or [
            [str(number), name, "", "0"]
        ]
        with log.open("a", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows(rows)
        done += rows
        print(f"{number}: {name}: {dict(ends)}", flush=True)
    total = Counter[str]()
    for _, _, end, times in done:
        total[end] += int(times)
    print(f"{sum(total.values())} injections into {len({row[1] for row in done})} pipelines, {code()}: {dict(total)}")
    return 1 if any(end.partition(": ")[2] not in ("survived", "explained", "unmet") for end in total) else 0


if __name__ == "__main__":
    sys.exit(main())
