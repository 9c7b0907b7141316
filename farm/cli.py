"""The command `anygpu-farm`: renders jobs of files and folders on the devices of this machine or of a Ray cluster."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any

from ..cli import STATE, run_command
from ..compat.device.facts import default_device, device_count, value_or
from ..compat.errors import InputError, first_line
from ..pipelines.records.job_folder import JOBS, JobFolder
from ..pipelines.records.job_lists import Batch, JobList, files_in, prompts_in, queue_jobs, seeds_in, write_list
from . import cluster

OF_VIDEOS = ("width", "height", "frames", "cfg", "seconds", "like")
OF_ADAPTER = ("prompts", "negative")  # of meshes, those with an adapter alone have words
OF_PAINT = ("adapter", "delight", "image_encoder")


def run(arguments: argparse.Namespace) -> int:
    """Render the jobs of a file or folder, failed ones again; returns 1 if a job failed or a file could not be read."""
    from .driver import lines_in

    given = Path(arguments.jobs)
    files = [given] if given.is_file() else JobFolder(given).job_files()
    if not files:
        found, expected = f"no jobs in {arguments.jobs!r}", f"a {JOBS} file, or a folder with some"
        raise InputError(found, expected=expected, fix="Write some with anygpu-farm queue, or with AnyGPU Queue Jobs.")
    unread: list[str] = []
    lines = share_of(list(lines_in(files, unread.append)), arguments.share)
    for text in unread:
        _say(text)
    driver = _driver(JobFolder(given.parent if given.is_file() else given), arguments)
    driver.add(lines, again=True)
    tally = driver.run()
    print(f"{tally.done} done, {tally.skipped} already done, {len(tally.failed)} failed, {tally.deaths} workers died")
    return 1 if tally.failed or unread else 0


def watch(arguments: argparse.Namespace) -> int:
    """Render the jobs that come into a folder, and those that ComfyUI hands to the gateway, until Ctrl+C."""
    from .gateway import open_gateway

    folder = JobFolder(Path(arguments.folder))
    try:
        folder.root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        found = f"{arguments.folder!r} ({first_line(error)})"
        fix = "Give the folder that AnyGPU Queue Jobs writes into."
        raise InputError(found, expected="a folder that can be written", fix=fix) from error
    driver = _driver(folder, arguments)
    driver.watching = True
    driver.report_lacking()
    gateway = open_gateway(driver)  # an actor lives as long as it is referenced
    driver.watch()
    return 0 if gateway else 1


def state(arguments: argparse.Namespace) -> int:
    for worker in JobFolder(Path(arguments.folder)).workers():
        print(json.dumps(worker))
    return 0


def cancel(arguments: argparse.Namespace) -> int:
    """Cancel the jobs whose keys begin as given; then raise InputError for the beginnings that no key has."""
    from .driver import lines_in
    from .render import task_of

    folder = JobFolder(Path(arguments.folder))
    tasks = (value_or(lambda line=line: task_of(line), None) for line in lines_in(folder.job_files(), _say))
    keys = [task.key for task in tasks if task is not None]  # a line that is not a job has none
    folder.cancel([key for key in dict.fromkeys(keys) if key.startswith(tuple(arguments.keys))])
    unknown = [start for start in arguments.keys if not any(key.startswith(start) for key in keys)]
    if unknown:
        found = f"no job in {arguments.folder!r} whose key begins with {', '.join(map(repr, unknown))}"
        fix = "`anygpu-farm state FOLDER` shows the keys of those that run."
        raise InputError(found, expected="the first digits of a key of its job files", fix=fix)
    return 0


def queue(arguments: argparse.Namespace) -> int:
    """Write the jobs into a folder; InputError for a flag that this kind of job would not use."""
    idle = (*OF_VIDEOS, *(() if arguments.adapter else OF_ADAPTER)) if arguments.meshes else OF_PAINT
    for flag in (f"--{name.replace('_', '-')}" for name in idle if getattr(arguments, name)):
        found = f"{flag} with{'' if arguments.meshes else 'out'} --meshes{' alone' if flag[2:] in OF_ADAPTER else ''}"
        raise InputError(found, expected="flags of one kind of job", fix=f"Leave {flag} out.")
    folder, prompts = JobFolder(Path(arguments.folder)), _text_in(arguments.prompts) if arguments.prompts else ""
    names = chain(["jobs"], map("jobs-{}".format, count(2)))  # a list that waits is not replaced unasked
    arguments.name = arguments.name or next(name for name in names if not folder.jobs_file(name).exists())
    jobs = (_queue_paintings if arguments.meshes else _queue_videos)(folder, prompts, arguments)
    print(f"{len(jobs.keys)} jobs in {jobs.folder.root / jobs.name}{JOBS}")
    return 0


def _text_in(path: str) -> str:
    """The text of a UTF-8 file without the mark that Notepad puts before it; InputError if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        found, fix = f"--prompts {path!r} ({first_line(error)})", "Check the path, and save the file as UTF-8."
        raise InputError(found, expected="a text file in UTF-8", fix=fix) from error


def _queue_paintings(folder: JobFolder, prompts: str, arguments: argparse.Namespace) -> JobList:
    from ..paint.jobs import adapter_fields, paint_jobs
    from ..paint.sampling.painting import PaintSettings
    from ..pipelines.records.places import Places

    if arguments.pictures is None and not arguments.adapter:
        raise InputError("no --pictures", expected="a folder with a picture for each mesh", fix="Add --pictures.")
    folder.jobs_file(arguments.name)  # refused before gigabytes are hashed
    seeds, painting = seeds_in(arguments.seeds), PaintSettings(steps=arguments.steps)
    content = partial(Places(state=Path(STATE).expanduser()).content, check=lambda: None)
    model, meshes = Path(arguments.model), Path(arguments.meshes)
    pictures = Path(arguments.pictures or meshes)  # an adapter's may lie beside the meshes, or be none
    files = {"delight": arguments.delight, "image_encoder": arguments.image_encoder}
    others: dict[str, Any] = {name: content(Path(path)) for name, path in files.items() if path}
    others |= {"precision": arguments.precision, "weights": arguments.weights}
    if arguments.adapter:
        adapter = Path(arguments.adapter)
        others |= adapter_fields(model, adapter, content(adapter), prompts, arguments.negative)
    jobs = paint_jobs(content(model), meshes, pictures, seeds, painting, folder.add_input, **others)
    return write_list(folder, arguments.name, jobs)


def _queue_videos(folder: JobFolder, prompts: str, arguments: argparse.Namespace) -> JobList:
    from ..pipelines.base import FramePackSettings
    from ..pipelines.records.job import load_inputs
    from ..pipelines.records.receipts import settings_of

    batch = Batch(
        prompts=prompts_in(prompts), seeds=seeds_in(arguments.seeds), negative=arguments.negative,
        pictures=[] if arguments.pictures is None else files_in(Path(arguments.pictures)),
        settings={name: getattr(arguments, name) for name in ("width", "height", "frames", "steps", "cfg")},
        load=load_inputs({"precision": arguments.precision, "weights": arguments.weights}),
        framepack=FramePackSettings(arguments.seconds) if arguments.seconds else None,
        like=None if arguments.like is None else settings_of(Path(arguments.like)),
    )  # fmt: skip
    return queue_jobs(folder, arguments.name, Path(arguments.model), batch, state=Path(STATE).expanduser())


def share_of(lines: list[str], share: str) -> list[str]:
    """The lines of one of several drivers: for ``2/8`` every eighth from the third on, all if ``share`` is empty."""
    if not share:
        return lines
    index, _, count = share.partition("/")
    if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise InputError(f"--share {share!r}", expected="I/N with I from 0 to N - 1", fix="For example --share 0/4.")
    return lines[int(index) :: int(count)]


def main(words: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code. An error that the user can act on is one line on stderr."""
    return run_command(_parser().parse_args(words), "anygpu-farm", "stopped; run the same command again to resume")


def _require_possible(arguments: argparse.Namespace) -> None:
    """Raise InputError for flags of workers and groups that are out of range or contradict each other."""
    if arguments.group < 1 or (arguments.branches and arguments.group % 2):
        found = f"--group {arguments.group}{' --branches' if arguments.branches else ''}"
        expected = f"1 or more devices{', an even number' if arguments.branches else ''}"
        raise InputError(found, expected=expected, fix="For example --group 2.")
    for name in ("local", "workers"):
        if getattr(arguments, name) < 0 or (name == "workers" and arguments.workers and not arguments.address):
            found, fix = f"--{name} {getattr(arguments, name)}", "Leave it out for one on each device."
            raise InputError(found, expected="a number of workers; --workers only with --address", fix=fix)
    if arguments.patience < 0:
        found, fix = f"--patience {arguments.patience:g}", "For example --patience 1200."
        raise InputError(found, expected="seconds, 0 for 600", fix=fix)


def _driver(folder: JobFolder, arguments: argparse.Namespace) -> Any:
    """A driver whose workers Ray is starting, here or in a cluster; InputError for flags that cannot be met here."""
    from .driver import Driver
    from .render import Renderer, reached_in, task_of

    _require_possible(arguments)
    models = tuple(Path(root).expanduser().resolve() for root in arguments.models)
    folder = JobFolder(folder.root.resolve())
    renderer = Renderer(folder.root, models, Path(arguments.state).expanduser().absolute(), arguments.device)
    if arguments.address:
        ray = cluster.connect(arguments.address)
        gpus = int(ray.cluster_resources().get("GPU", 0))
        count = arguments.workers or max(gpus, 1)
    else:
        gpus = 0 if arguments.device is not None or default_device().type == "cpu" else device_count()
        name = "local" if arguments.local >= arguments.group else "group"
        if 0 < gpus < (asked := getattr(arguments, name)):  # Ray would let the others wait for ever
            found = f"--{name} {asked} on a machine with {gpus} GPU{'s' * (gpus > 1)}"
            raise InputError(found, expected="at most one worker per GPU", fix=f"Leave out --{name}.")
        count = arguments.local or max(gpus, arguments.group)
        ray = cluster.start_here(max(count, arguments.group), gpus)
    on_gpus = arguments.device is None and bool(arguments.address or gpus)  # an empty cluster may grow some
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # from now on as Ctrl+C, in place of Ray's handler
    driver = Driver(ray=ray, folder=folder, task_of=task_of, reached=lambda task: reached_in(folder, task), say=_say)
    needs = {"num_cpus": 1, "num_gpus": 1} if on_gpus else {"num_cpus": 1}
    if arguments.group > 1:
        driver.asked = cluster.asked_by(needs, arguments.group)
        _start_groups(driver, arguments, renderer, needs, max(count // arguments.group, 1))
    else:
        driver.start_workers(count, renderer, needs)
    return driver


def _start_groups(
    driver: Any, arguments: argparse.Namespace, renderer: Any, needs: dict[str, float], count: int
) -> None:
    """Have Ray start ``count`` leaders of groups, each in a placement group of its own, packed on few machines."""
    from ray.util import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    from .group import PATIENCE_SECONDS, GroupRenderer, loopback_name

    loopback = "" if arguments.address else loopback_name()
    patience = arguments.patience or PATIENCE_SECONDS
    for _ in range(count):
        place = placement_group([cluster.asked_by(needs) for _ in range(arguments.group)], strategy="PACK")
        options = {"halves": arguments.branches, "loopback": loopback, "patience": patience}
        leader = GroupRenderer(renderer, arguments.group, needs, place, **options)
        driver.start_workers(1, leader, {"num_cpus": 0, "scheduling_strategy": PlacementGroupSchedulingStrategy(place)})


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="anygpu-farm", description=__doc__)
    commands = parser.add_subparsers(required=True)
    once = commands.add_parser("run", help="render the jobs of a file or a folder, then end")
    once.add_argument("jobs", help="a .jsonl file that AnyGPU Queue Jobs wrote, or the folder it is in")
    once.add_argument("--share", default="", metavar="I/N", help="only every Nth job from the Ith on, for job arrays")
    once.set_defaults(run=run)
    ever = commands.add_parser("watch", help="render whatever AnyGPU Queue Jobs puts into a folder, until Ctrl+C")
    ever.add_argument("folder")
    ever.set_defaults(run=watch)
    for command in (once, ever):
        where = command.add_mutually_exclusive_group()
        here = "N workers here, on GPUs at most one per GPU (default: one per GPU)"
        where.add_argument("--local", type=int, default=0, metavar="N", help=here)
        where.add_argument("--address", default="", help="a Ray cluster, such as 10.0.0.5:6379, or auto")
        command.add_argument("--workers", type=int, default=0, help="workers in a cluster (default: its GPUs)")
        command.add_argument("--group", type=int, default=1, metavar="N", help="render each video on N alike devices")
        halves = "half of each group for the prompt, half for the negative prompt"
        command.add_argument("--branches", action="store_true", help=halves)
        patience = "seconds that processes of a group wait for one of them, before it is replaced (default: 600)"
        command.add_argument("--patience", type=float, default=0.0, metavar="S", help=patience)
        command.add_argument("--models", action="append", default=[], help="folder with models; may be repeated")
        command.add_argument("--device", help="such as cpu; default: the accelerator that Ray gives to each worker")
        command.add_argument("--state", default=STATE, help=f"folder of this machine for test results ({STATE})")
    _queue_arguments(commands.add_parser("queue", help="write a job for each prompt, seed and picture into a folder"))
    shown = commands.add_parser("state", help="what the workers of a folder do")
    shown.add_argument("folder")
    shown.set_defaults(run=state)
    ended = commands.add_parser("cancel", help="end jobs, running or waiting")
    ended.add_argument("folder")
    ended.add_argument("keys", nargs="+", help="the first digits of their keys")
    ended.set_defaults(run=cancel)
    return parser


def _queue_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder")
    parser.add_argument("--name", help="of the job file, which it replaces; jobs, jobs-2 and so on if left out")
    parser.add_argument("--model", required=True, help="folder of a model; other machines find it by its content")
    parser.add_argument("--prompts", metavar="FILE", help="one prompt per line")
    parser.add_argument("--meshes", metavar="FOLDER", help="meshes to texture from --pictures of the same names")
    parser.add_argument("--delight", metavar="FOLDER", help="model that takes shading out of the pictures first")
    parser.add_argument("--adapter", metavar="FILE", help="MV-Adapter: paints --meshes with the checkpoint --model")
    parser.add_argument("--image-encoder", metavar="FOLDER", help="DINOv2-giant, for PBR models")
    parser.add_argument("--seeds", default="0", help="of each prompt or mesh, such as 0-9,42")
    parser.add_argument("--pictures", metavar="FOLDER", help="start pictures; with --meshes one of the name of each")
    parser.add_argument("--negative", default="")
    for name in ("width", "height", "frames", "steps"):
        parser.add_argument(f"--{name}", type=int, default=0, help="0: the model's own")
    parser.add_argument("--cfg", type=float, default=0.0, help="0: the model's own")
    parser.add_argument("--seconds", type=float, default=0.0, help="FramePack: length of each video")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--like", metavar="FILE", help="a video or latents whose other settings each job has")
    parser.set_defaults(run=queue)


if __name__ == "__main__":
    sys.exit(main())
