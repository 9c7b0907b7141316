"""The fixtures that this folder's tests share."""

import pytest
import torch


@pytest.fixture(scope="session")
def on_host(tiny_folder):
    """Latents and frames of the CPU in fp32 for each small case of test_families.py."""
    from simulated.test_families import SMALL, loaded_for, rendered

    known: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def of(name: str) -> tuple[torch.Tensor, torch.Tensor]:
        if name not in known:
            known[name] = rendered(loaded_for(SMALL[name], tiny_folder, "cpu"), SMALL[name])
        return known[name]

    return of
