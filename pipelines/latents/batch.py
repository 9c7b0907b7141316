"""Several videos in one LATENT: sampled one after the other from seeds that count up, and taken apart again. A batch
takes the memory of one video: a transformer that fits with one would seldom fit with two."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...compat.errors import require_range
from ..base import Latents, Progress, SubProgress
from .convert import KEY, to_core

BATCH = "batch"  # under our key: the record of each video, where there are several
ROWS = "batch_index"  # of core's Latent From Batch: the numbers of the videos that it left
MASK = "noise_mask"
SEEDS = 2**64
MOST_VIDEOS = 64


def parts_of(progress: Progress, count: int) -> list[Progress]:
    """The progress of each of ``count`` videos; of one, ``progress`` itself, whose forecast counts single steps."""
    return [progress] if count == 1 else [SubProgress(progress, index, count, "video") for index in range(count)]


def sampled(
    batch_size: int, seed: int, progress: Progress, sample: Callable[[int, int, Progress], Latents], starts: int = 1
) -> list[Latents]:
    """``batch_size`` videos for each of ``starts`` start latents, by calls of ``sample`` with the index, the seed
    (which counts up from ``seed``) and the progress of each. Raises InputError for a batch size out of range."""
    require_range("batch_size", batch_size, 1, MOST_VIDEOS, "videos")
    count = batch_size * starts
    return [sample(index, (seed + index) % SEEDS, part) for index, part in enumerate(parts_of(progress, count))]


def joined(videos: Sequence[Latents]) -> dict[str, Any]:
    """A LATENT of videos of one size; its record is the first one's, with those of all if there are several."""
    rows = [to_core(video) for video in videos]
    if len(rows) == 1:
        return rows[0]
    own = {**rows[0][KEY], BATCH: [row[KEY] for row in rows]}
    return {**rows[0], "samples": torch.cat([row["samples"] for row in rows]), KEY: own}


def videos_of(latent: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A LATENT for each video of ``latent``, with that video's own record and mask; one of pictures, nested, or empty
    comes unchanged. Core's nodes keep our key as it is. Latent From Batch adds :data:`ROWS`, the numbers of its videos;
    Repeat Latent Batch goes on counting from there, so that a copy is known by its values alone."""
    samples, own = latent.get("samples"), latent.get(KEY)
    if not isinstance(samples, torch.Tensor) or samples.is_nested or samples.ndim != 5 or not len(samples):
        return [dict(latent)]
    rows = latent.get(ROWS, range(len(samples)))
    records = own.get(BATCH, [own]) if isinstance(own, Mapping) else [None]
    mask = latent.get(MASK)
    videos = []
    for index, one in enumerate(samples[: len(rows)]):
        video = {name: value for name, value in latent.items() if name not in (ROWS, KEY)}
        video["samples"] = samples[index : index + 1]
        if isinstance(mask, torch.Tensor) and len(mask) == len(samples):
            video[MASK] = mask[index : index + 1]
        same = next(each for each in range(index + 1) if each == index or one.equal(samples[each]))
        record = records[rows[same] % len(records)]  # of a copy, that of the first
        videos.append(video if record is None else {**video, KEY: record})
    return videos


def seeds_of(videos: Sequence[Latents]) -> str:
    """The number of videos and their seeds, for a status line; empty for one."""
    return f"{len(videos)} videos, seeds {videos[0].seed} to {videos[-1].seed}" if len(videos) > 1 else ""
