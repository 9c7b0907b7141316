"""Sampled latents are kept by themselves: newest first, within a limit, whatever the disk does."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from anygpu.compat.checkpoints.latents import write_record
from anygpu.compat.errors import CheckpointError
from anygpu.pipelines.base import Latents
from anygpu.pipelines.latents import recovery
from anygpu.pipelines.sampling.resume import SectionState

SAMPLES = torch.randn(1, 16, 3, 4, 6)
EXTRA = {"generator_state": torch.Generator().get_state().numpy().tobytes(), "section_lengths": [2]}
EXTRA |= {"window": 9, "prompt": "a cat"}
LATENTS = Latents(SAMPLES, "framepack", "image", 9, 32, 48, 24.0, 7, extra=EXTRA)


def no_word(text: str) -> None:
    raise AssertionError(text)


def aged(folder: Path, name: str, seconds: int) -> None:
    path = folder / f"{name}.safetensors"
    then = path.stat().st_mtime - seconds
    os.utime(path, (then, then))


def test_what_is_kept_is_listed_newest_first_and_loads(tmp_path: Path) -> None:
    first = recovery.save(tmp_path, LATENTS, no_word)
    aged(tmp_path, first, 60)
    second = recovery.save(tmp_path, replace(LATENTS, samples=SAMPLES + 1, seed=8), no_word)
    found = recovery.listing(tmp_path)
    assert [item.id for item in found] == [second, first]
    assert (found[0].family, found[0].seed, found[0].frames, found[0].prompt) == ("framepack", 8, 9, "a cat")
    assert "seed 8" in found[0].name and found[0].total_bytes > SAMPLES.nbytes and not found[0].unfinished
    assert torch.equal(recovery.load(tmp_path, "newest", no_word)["samples"], SAMPLES + 1)
    assert torch.equal(recovery.load(tmp_path, first, no_word)["samples"], SAMPLES)
    recovery.save(tmp_path, replace(LATENTS, family="mochi"), no_word)
    newest = recovery.load(tmp_path, "newest", no_word, LATENTS.family)
    assert torch.equal(newest["samples"], SAMPLES + 1), "the newest of the family that is loaded"
    with pytest.raises(CheckpointError, match=r"no saved latents of 'ltx'.*Load the mochi model"):
        recovery.load(tmp_path, "newest", no_word, "ltx")


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/b", "", "A" * 200, "nothing"])
def test_only_a_listed_id_can_be_loaded(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "kept"
    with pytest.raises(CheckpointError, match="no saved latents at all"):
        recovery.load(folder, name, no_word)
    recovery.save(folder, LATENTS, no_word)
    recovery.save(tmp_path, LATENTS, no_word)
    (tmp_path / next(tmp_path.glob("*.safetensors")).name).rename(tmp_path / "secret.safetensors")
    with pytest.raises(CheckpointError, match="no saved latents '"):
        recovery.load(folder, name, no_word)


def test_the_oldest_leave_when_the_limit_is_passed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = []
    for index in range(4):
        names.append(recovery.save(tmp_path, LATENTS, no_word))
        aged(tmp_path, names[-1], 100 - index)
    size = (tmp_path / f"{names[0]}.safetensors").stat().st_size
    monkeypatch.setattr(recovery, "LIMIT_BYTES", int(size * 2.5))
    last = recovery.save(tmp_path, LATENTS, no_word)
    assert [item.id for item in recovery.listing(tmp_path)] == [last, names[-1]]
    with monkeypatch.context() as another:  # process swept between look and use
        another.setattr(recovery, "by_date", lambda folder: [folder / "gone.safetensors"])
        another.setattr(Path, "exists", lambda _: True)
        said: list[str] = []
        assert recovery.save(tmp_path, LATENTS, said.append) and not said
    with monkeypatch.context() as another:
        another.setattr(recovery, "LIMIT_BYTES", 1 << 40)
        another.setattr(recovery, "MOST_FILES", 2)
        small = recovery.save(tmp_path, LATENTS, no_word)
        assert [item.id for item in recovery.listing(tmp_path)][0::2] == [small], "of small ones no more can be listed"
    monkeypatch.setattr(recovery, "LIMIT_BYTES", 1)
    alone = recovery.save(tmp_path, LATENTS, no_word)
    assert [item.id for item in recovery.listing(tmp_path)] == [alone], "the newest stays, however large"


def test_an_old_file_that_cannot_leave_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On Windows another process that reads it keeps it; what was just saved is saved all the same."""
    old, leave = recovery.save(tmp_path, LATENTS, no_word), Path.unlink

    def unlink(path: Path, missing_ok: bool = False) -> None:
        if path.stem == old:
            raise PermissionError("used by another process")
        leave(path, missing_ok)

    monkeypatch.setattr(recovery, "LIMIT_BYTES", 1)
    monkeypatch.setattr(Path, "unlink", unlink)
    assert recovery.save(tmp_path, LATENTS, no_word)


def test_a_full_disk_costs_no_sampling(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource", reason="needs POSIX limits")
    said: list[str] = []
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (512, before[1]))
    try:
        assert recovery.save(tmp_path, LATENTS, said.append) == ""
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "could not be kept" in said[0] and "cannot be written" in said[0]
    assert not list(tmp_path.iterdir())


def test_what_is_not_ours_or_damaged_is_not_listed(tmp_path: Path) -> None:
    name = recovery.save(tmp_path, LATENTS, no_word)
    (tmp_path / "damaged.safetensors").write_bytes(b"\x00" * 20)
    (tmp_path / "Other Name.safetensors").write_bytes((tmp_path / f"{name}.safetensors").read_bytes())
    assert [item.id for item in recovery.listing(tmp_path)] == [name]
    assert recovery.listing(tmp_path / "nothing") == []


def test_a_share_that_refuses_dates_costs_no_latents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = recovery.save(tmp_path, LATENTS, no_word)
    aged(tmp_path, first, -60)  # as if the clock had been set back since
    refused = PermissionError(1, "Operation not permitted")
    monkeypatch.setattr(os, "utime", lambda *_: (_ for _ in ()).throw(refused))
    second = recovery.save(tmp_path, LATENTS, no_word)
    assert {first, second} == {item.id for item in recovery.listing(tmp_path)} - {""}


def test_rests_of_a_writer_that_died_are_swept_up(tmp_path: Path) -> None:
    old, new = tmp_path / ".a.safetensors.1.part", tmp_path / ".b.safetensors.2.part"
    for rest in (old, new):
        rest.write_bytes(b"rest")
    os.utime(old, (1, 1))
    recovery.save(tmp_path, LATENTS, no_word)
    assert not old.exists() and new.exists(), "a young one may still be written"


# Sections ---------------------------------------------------------------------------------------------------------


def test_sections_share_one_file_and_are_found_until_the_last(tmp_path: Path) -> None:
    said: list[str] = []
    keeper = recovery.SavedSections(tmp_path, said.append)
    assert keeper.found("key") is None
    standing = SectionState(SAMPLES * 0.3, (2,), EXTRA["generator_state"])
    keeper.save("key", 0, 3, LATENTS, standing)
    (listed,) = recovery.listing(tmp_path)
    assert listed.unfinished == "section 1 of 3" and "section 1 of 3" in listed.name
    other = recovery.SavedSections(tmp_path, no_word)
    found = other.found("key")
    assert found is not None
    assert torch.equal(found.latents, standing.latents)
    assert (found.lengths, found.generator_state) == (standing.lengths, standing.generator_state)
    assert other.found("another") is None
    other.notify = said.append
    other.save("key", 1, 3, LATENTS, standing)
    other.save("key", 2, 3, LATENTS, standing)
    (listed,) = recovery.listing(tmp_path)
    assert not listed.unfinished
    assert recovery.SavedSections(tmp_path, no_word).found("key") is None, "a whole video is not gone on with"
    assert torch.equal(recovery.load(tmp_path, listed.id, no_word)["samples"], SAMPLES)


def test_sections_of_which_the_last_could_not_be_kept_are_not_called_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper, standing = recovery.SavedSections(tmp_path, lambda _text: None), SectionState(SAMPLES, (2,), b"")
    keeper.save("key", 0, 2, LATENTS, standing)
    assert list(keeper.names) == ["key"]
    monkeypatch.setattr(recovery, "_write", lambda *_: False)
    keeper.save("key", 1, 2, LATENTS, standing)
    assert not keeper.names, "so that the whole video is saved, or said not to be"


def test_a_damaged_section_is_started_over(tmp_path: Path) -> None:
    keeper = recovery.SavedSections(tmp_path, lambda _text: None)
    keeper.save("key", 0, 3, LATENTS, SectionState(SAMPLES, (2,), EXTRA["generator_state"]))
    (path,) = tmp_path.glob("*.safetensors")
    whole = path.read_bytes()
    path.write_bytes(whole[:-8])
    assert recovery.SavedSections(tmp_path, no_word).found("key") is None
    edited = replace(LATENTS, extra={**EXTRA, "generator_state": b"none"})
    keeper.save("key", 0, 3, edited, SectionState(SAMPLES, (2,), b"none"))
    assert recovery.SavedSections(tmp_path, no_word).found("key") is None, "a generator has another state"


def test_latents_of_another_sampler_come_back_as_core_has_them(tmp_path: Path) -> None:
    """Video and audio of a model that is not ours: a plain LATENT, listed under the model's class."""
    video, audio = torch.randn(2, 16, 3, 4, 6), torch.randn(2, 8, 5)
    sampled = recovery.Sampled([video, audio], "Flux 2/dev", 7, latent_format="LTXAV")
    name = recovery.save_plain_recovery(tmp_path, sampled, no_word)
    (item,) = recovery.listing(tmp_path)
    assert (item.id, item.family, item.seed, item.latent_format) == (name, "Flux 2/dev", 7, "LTXAV")
    assert recovery.ID.fullmatch(name) and item.name.endswith(", Flux 2/dev, seed 7")
    latent = recovery.load(tmp_path, "newest", no_word)
    assert torch.equal(latent["samples"], video) and torch.equal(latent["nested"][0], audio)
    assert set(latent) == {"samples", "nested"}, "another family's node would take our metadata for its own"


def test_the_newest_is_the_one_that_came_last_whatever_the_clock_says(tmp_path: Path) -> None:
    first = recovery.save(tmp_path, LATENTS, no_word)
    aged(tmp_path, first, -3600)  # the clock was an hour fast then
    second = recovery.save(tmp_path, replace(LATENTS, seed=8), no_word)
    assert [item.id for item in recovery.listing(tmp_path)] == [second, first]
    assert torch.equal(recovery.load(tmp_path, "newest", no_word)["samples"], SAMPLES)
    assert recovery.path_of(tmp_path, "newest").stem == second


@pytest.mark.parametrize("listed", [3, [], {"family": "x", "frames": 1e999}, {"family": "x"}, {"extra": 1}])
def test_an_edited_record_is_not_listed(tmp_path: Path, listed: object) -> None:
    write_record(tmp_path / "a.safetensors", {"latent_tensor": SAMPLES}, {"kind": "latent", "listed": listed})
    assert recovery.listing(tmp_path) == []
