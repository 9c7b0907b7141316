"""Many jobs of one model: every prompt with every seed and every picture."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...compat.errors import InputError
from ..base import HALF, FramePackSettings, PromptRequest, SampleSettings
from .job import Job, Picture, Value, VideoJob
from .job_folder import MOST_JOBS, JobFolder
from .places import Check, Places

SEEDS = re.compile(r"(\d{1,20})(?:-(\d{1,20}))?")
MOST_SEED = 2**64 - 1
PICTURES = (".png", ".jpg", ".jpeg", ".webp")


@dataclass(frozen=True, slots=True)
class JobList:
    """Jobs that were written into a folder, in the order in which they were asked for."""

    folder: JobFolder  # where
    name: str  # of their file there
    lines: tuple[str, ...]  # the jobs
    keys: tuple[str, ...]  # of each

    def __repr__(self) -> str:
        return f"<{len(self.keys)} jobs {self.name!r} in {str(self.folder.root)!r}>"


@dataclass(frozen=True, slots=True)
class Batch:
    """The inputs that many jobs share, and those that differ."""

    prompts: Sequence[str]  # one or more
    seeds: Sequence[int]  # of each prompt
    pictures: Sequence[Path] = ()  # files to start from, each a job's; none for text alone
    negative: str = ""
    settings: Mapping[str, int | float | str] = field(default_factory=dict)  # whose seed is replaced
    load: Mapping[str, Value] = field(default_factory=dict)  # inputs of loading, as in :attr:`VideoJob.load`
    framepack: FramePackSettings | None = None  # for its family alone
    like: VideoJob | None = None  # has the settings that are not among these, or are 0 or empty


def prompts_in(text: str) -> list[str]:
    """The prompts of a text, one to a line, without empty lines and those that begin with #; InputError for none."""
    lines = [line.strip() for line in text.splitlines()]
    prompts = [line for line in lines if line and not line.startswith("#")]
    if not prompts:
        raise InputError("no prompts", expected="one prompt per line", fix="Write at least one.")
    return prompts


def seeds_in(text: str) -> list[int]:
    """The seeds in a text such as ``0-9, 42``, each once; InputError for anything else, or more than MOST_JOBS."""
    seeds: dict[int, None] = {}
    for part in re.findall(r"[^\s,]+", text):
        match = SEEDS.fullmatch(part)
        if match is None:
            raise _no_seeds(part)
        low, high = int(match[1]), int(match[2] or match[1])
        if not low <= high <= MOST_SEED or len(seeds) + high - low >= MOST_JOBS:
            raise _no_seeds(part)
        seeds |= dict.fromkeys(range(low, high + 1))
    if not seeds:
        raise _no_seeds(text)
    return list(seeds)


def queue_jobs(
    folder: JobFolder, name: str, model: Path, batch: Batch, title: str = "", state: Path | None = None,
    check: Check = lambda: None,
) -> JobList:  # fmt: skip
    """Write the jobs of ``batch`` into ``folder`` as its file ``name``, with copies of their pictures, by
    :func:`write_list`. Every byte of the folder ``model`` is hashed once, and the hash kept in ``state``; ``title`` is
    that folder's path relative to a folder of models, by which other machines find it."""
    folder.jobs_file(name)  # refused before gigabytes are hashed
    require_few(len(batch.prompts) * len(batch.seeds) * max(1, len(batch.pictures)))
    places = Places(state=state)
    content = places.content(model, title, check)
    pictures = [[Picture(replace(places.picture(path), name=folder.add_input(path)))] for path in batch.pictures]
    pattern, clip = batch.like or VideoJob(content, PromptRequest(""), SampleSettings(0, 0, 0)), batch.framepack
    given: dict[str, Any] = {name: value for name, value in batch.settings.items() if value}
    every = (
        replace(
            pattern,
            model=content,
            prompt=replace(pattern.prompt, text=prompt, negative=batch.negative or pattern.prompt.negative),
            settings=replace(pattern.settings, **given, seed=seed),
            load={**pattern.load, **batch.load},
            pictures=tuple(start),
            framepack=replace(pattern.framepack or clip, clip_seconds=clip.clip_seconds) if clip else pattern.framepack,
        )
        for start in pictures or [[]]
        for prompt in batch.prompts
        for seed in batch.seeds
    )
    return write_list(folder, name, every, check)


def require_few(count: int) -> None:
    """Raise InputError for more jobs than a file holds."""
    if count > MOST_JOBS:
        raise InputError(f"{count} jobs", expected=f"{MOST_JOBS} at most", fix="Write them in several files.")


def write_list(folder: JobFolder, name: str, jobs: Iterable[Job], check: Check = lambda: None) -> JobList:
    """Write ``jobs`` into ``folder`` as its file ``name``; those that failed or were cancelled are asked for again.
    ``check`` may raise to cancel. InputError for text that UTF-8 cannot encode."""
    lines, keys = list[str](), list[str]()
    for job in jobs:
        check()
        line = json.dumps(job.record(), ensure_ascii=False, separators=(",", ":"))
        if HALF.search(line):
            raise InputError("half a character in a prompt", expected="whole ones", fix="Type the prompt again.")
        lines.append(line)
        keys.append(job.key)

    def is_open(key: str) -> bool:
        check()
        return not folder.is_done(key)

    folder.ask_again(filter(is_open, keys))
    folder.write_jobs(name, lines)
    return JobList(folder, name, tuple(lines), tuple(keys))


def files_in(folder: Path, kind: str = "pictures", suffixes: Sequence[str] = PICTURES) -> list[Path]:
    """The files in a folder that end in ``suffixes``, by name, without hidden ones. InputError where there is none;
    ``kind`` is the word for them in its message."""
    paths = sorted(path for path in folder.glob("[!.]*.*") if path.suffix.lower() in suffixes and path.is_file())
    if not paths:
        expected, fix = f"files that end in {', '.join(suffixes)}", "Put some there, or choose another folder."
        raise InputError(f"no {kind} in {str(folder)!r}", expected=expected, fix=fix)
    return paths


def _no_seeds(text: str) -> InputError:
    fix = f"Write the smaller number of a range first, and at most {MOST_JOBS:,} seeds."
    return InputError(f"the seeds {text[:60]!r}", expected="numbers and ranges, such as 0-9, 42", fix=fix)
