"""Every result is, bit for bit, the recorded one; on other arithmetic, what must be equal there is equal."""

from pathlib import Path

import pytest
from simulated import accelerator

from golden.cases import CASES, Places
from golden.record import Digests, differences, environment, measured, recorded

LAYOUT = 2  # words of a digest that hold on every machine: dtype and shape


@pytest.fixture(scope="module")
def places(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Places:
    """Folders that all cases share."""
    return Places(tiny_folder, tmp_path_factory.mktemp("paint"), tmp_path_factory.mktemp("scratch"))


@pytest.fixture(scope="module")
def comparable() -> bool:
    """Whether the manifest was recorded with the arithmetic of this machine."""
    return recorded()["environment"] == environment()


def layout_of(digests: Digests) -> dict[str, list[str]]:
    """Dtype and shape of each result."""
    return {key: digest.split()[:LAYOUT] for key, digest in digests.items()}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if case.quick else [pytest.mark.full]) for name, case in CASES.items()]
)
def test_result_is_the_recorded_one(places: Places, comparable: bool, name: str) -> None:
    """Where the arithmetic is another, a second run or the case it is like stands in for the record."""
    if CASES[name].simulated and (reason := accelerator.reason()):
        pytest.skip(reason)
    found, wanted = measured(name, places), recorded()["results"][name]
    if comparable:
        assert not differences(name, found, wanted)
        return
    assert layout_of(found) == layout_of(wanted)
    again = measured(CASES[name].like or name, places)
    assert not differences(name, found, {key: again[key] for key in found})


def test_the_manifest_has_every_case_and_nothing_else() -> None:
    assert list(recorded()["results"]) == list(CASES)


def test_results_that_must_be_equal_were_recorded_equal() -> None:
    results = recorded()["results"]
    pairs = {name: case.like for name, case in CASES.items() if case.like}
    assert {name.split()[0].split("_")[0] for name in pairs} >= {"ltx", "hunyuan", "framepack", "mochi", "paint"}
    assert all(results[name] and results[like] for name, like in pairs.items())
    for name, like in pairs.items():
        assert not differences(name, results[name], {key: results[like][key] for key in results[name]})


def test_a_changed_bit_is_a_difference() -> None:
    results = recorded()["results"]
    name, found = next(iter(results.items()))
    key, digest = next(iter(found.items()))
    assert differences(name, found, found) == []
    assert len(differences(name, {**found, key: digest[:-1] + "x"}, found)) == 1
    assert len(differences(name, {}, found)) == len(found)
