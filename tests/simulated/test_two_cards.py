"""Transformer, text encoders and VAE on two cards and the CPU, in every combination: the same video as on the CPU."""

from itertools import product
from typing import Any

import pytest
import torch

from simulated.test_families import SMALL, loaded_for, rendered

PLACES = ("acc:0", "acc:1", "cpu")
COMBINATIONS = [places for places in product(PLACES, repeat=3) if places != ("acc:0",) * 3]
BOUND = 2e-5  # as in test_families: kernels of the CPU, sums in another order where parts stream


def videos(name: str, folder: Any, offload: str, **request: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return rendered(loaded_for(SMALL[name], folder, offload=offload, **request), SMALL[name])


@pytest.fixture(scope="module")
def on_cpu(tiny_folder):
    known: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def of(name: str) -> tuple[torch.Tensor, torch.Tensor]:
        if name not in known:
            known[name] = videos(name, tiny_folder, "auto", device="cpu")
        return known[name]

    return of


@pytest.mark.parametrize("places", COMBINATIONS, ids="-".join)
@pytest.mark.parametrize("name", SMALL)
def test_parts_on_different_devices_give_the_same_video(acc, tiny_folder, on_cpu, name, places):
    devices = dict(zip(("transformer", "text_encoder", "vae"), places, strict=True))
    for offload in ("none", "group"):
        for result, wanted in zip(
            videos(name, tiny_folder, offload, device="acc:0", devices=devices), on_cpu(name), strict=True
        ):
            torch.testing.assert_close(result, wanted, atol=BOUND, rtol=BOUND)
