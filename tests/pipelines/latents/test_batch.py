"""A batch: each video is the one of its own seed, and is found again after core's nodes have cut or repeated it."""

import pytest
import torch
from anygpu.compat.errors import InputError
from anygpu.pipelines.base import Latents, Silent
from anygpu.pipelines.latents import batch
from anygpu.pipelines.latents.convert import KEY, from_core, to_core


def video(seed, progress=None):
    samples = torch.full((1, 4, 2, 3, 3), float(seed % 7))
    extra = {"generator_state": bytes([seed % 7])}
    return Latents(samples, "ltx", "text", 9, 96, 96, 24.0, seed, extra=extra)


def sampled(count=3, seed=2**64 - 1):
    return batch.sampled(count, seed, Silent(), lambda index, seed, part: video(seed))


def seeds(latent):
    return [from_core(None, one, print).seed for one in batch.videos_of(latent)]


def test_seeds_count_up_and_around():
    assert [made.seed for made in sampled()] == [2**64 - 1, 0, 1]
    assert batch.seeds_of(sampled()) == f"3 videos, seeds {2**64 - 1} to 1" and batch.seeds_of(sampled(1)) == ""


@pytest.mark.parametrize("size", [0, -1, 65])
def test_a_batch_of_none_or_too_many_is_refused(size):
    with pytest.raises(InputError, match=f"batch_size {size}; expected 1 to 64 videos"):
        sampled(size)


def test_one_video_is_the_latent_that_it_always_was():
    latent, expected = batch.joined([video(5)]), to_core(video(5))
    assert latent.keys() == expected.keys() and latent[KEY] == expected[KEY]


def test_each_video_of_a_batch_keeps_what_its_decode_needs():
    latent = batch.joined([video(1), video(2)])
    assert latent["samples"].shape == (2, 4, 2, 3, 3)
    for one, expected in zip(batch.videos_of(latent), (video(1), video(2)), strict=True):
        found = from_core(None, one, print)
        assert torch.equal(found.samples, expected.samples)
        assert (found.seed, dict(found.extra)) == (expected.seed, dict(expected.extra))


def test_a_batch_that_core_cut_or_repeated_is_known_by_its_rows():
    latent = batch.joined(sampled(4, 10))
    cut = {**latent, "samples": latent["samples"][2:3], "batch_index": [2]}  # as Get Latent From Batch
    assert seeds(cut) == [12]
    repeated = {**latent, "samples": latent["samples"].repeat(2, 1, 1, 1, 1)}  # as Repeat Latent Batch
    assert seeds(repeated) == [10, 11, 12, 13] * 2


@pytest.mark.parametrize("rows", [[1, 2], [2], [3]])
def test_a_cut_that_core_repeated_keeps_its_own_records(rows):
    """Repeat Latent Batch counts on from the cut's rows, as if other videos followed."""
    latent = batch.joined(sampled(4, 10))
    twice = {
        "samples": latent["samples"][rows].repeat(2, 1, 1, 1, 1),
        "batch_index": [*rows, *(1 + max(rows) + each for each in range(len(rows)))],
    }
    assert seeds({**latent, **twice}) == [10 + row for row in rows] * 2


def test_latents_of_other_nodes_are_taken_apart_with_their_masks():
    mask = torch.rand(2, 1, 2, 3, 3)
    first, second = batch.videos_of({"samples": torch.zeros(2, 4, 2, 3, 3), "noise_mask": mask})
    assert KEY not in first and torch.equal(second["noise_mask"], mask[1:])
    picture = {"samples": torch.zeros(2, 4, 3, 3)}
    assert batch.videos_of(picture) == [picture]
    with pytest.raises(InputError, match="a LATENT batch of 0; expected one video"):
        seeds({"samples": torch.zeros(0, 4, 2, 3, 3)})


def test_one_video_tells_its_own_progress():
    """A node's time left learns of the forwards in each step there."""
    progress = Silent()
    assert batch.parts_of(progress, 1) == [progress] and [part.index for part in batch.parts_of(progress, 2)] == [0, 1]
