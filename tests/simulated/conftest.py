"""The fixtures that this folder's tests share."""

import pytest
import torch


@pytest.fixture(scope="session")
def on_host(tiny_folder):
    """Latents and frames of the CPU in fp32 for each case of test_families.py."""
    from simulated.test_families import CASES, loaded_for, rendered

    known: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def of(name: str) -> tuple[torch.Tensor, torch.Tensor]:
        if name not in known:
            known[name] = rendered(loaded_for(CASES[name], tiny_folder, "cpu"), CASES[name])
        return known[name]

    return of
