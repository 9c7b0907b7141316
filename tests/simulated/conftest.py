"""The fixtures that this folder's tests share."""

import pytest
import torch


@pytest.fixture(scope="module")
def on_host(tiny_folder):
    """What the CPU gives for each case of test_families.py."""
    from simulated.test_families import CASES, loaded_for, rendered

    known: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def of(name: str) -> tuple[torch.Tensor, torch.Tensor]:
        if name not in known:
            known[name] = rendered(loaded_for(CASES[name], tiny_folder, "cpu"), CASES[name])
        return known[name]

    return of
