"""The lock files of cards that newer builds of torch leave."""

import re

import locks
import pytest
from anygpu.compat.device.wheels import LAST_CUDA_12
from packaging.requirements import Requirement


def lines_of(generation: str) -> list[str]:
    return (locks.LOCKS / f"{generation}.txt").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("generation", locks.GENERATIONS)
def test_a_lock_keeps_every_floor_and_names_the_index_of_its_cards(generation: str) -> None:
    lines = lines_of(generation)
    assert f"--extra-index-url {locks.index_of(locks.GENERATIONS[generation][0])}" in lines
    pins = dict(line.split("==") for line in lines if re.match(r"[\w.-]+==", line))
    for line in (locks.ROOT / "requirements.txt").read_text(encoding="utf-8").split():
        wanted = Requirement(line)
        pin = next(
            pins[name] for name in pins if name.replace("_", "-").lower() == wanted.name.replace("_", "-").lower()
        )
        assert wanted.specifier.contains(pin), line
    (torch,) = (Requirement(line.partition("#")[0]) for line in lines if re.match(r"torch\b", line))
    assert not torch.specifier.contains(f"{LAST_CUDA_12}.0") and torch.specifier.contains("2.14.1")


def test_an_index_that_does_not_answer_is_unresolved_and_a_newer_torch_is_passed_over(monkeypatch) -> None:
    class Told:
        stdout = f"torch (2.16.0)\nAvailable versions: 2.16.0, {LAST_CUDA_12}.0, 2.14.1+cu126, 2.13.0\n"

    monkeypatch.setattr(locks.subprocess, "run", lambda *_, **__: Told)
    assert locks.newest("torch", "an index") == "torch==2.14.1+cu126\n"
    Told.stdout = ""
    assert "unresolved" in locks.newest("torch", "an index")
