"""A draft on the simulated accelerator in every offload mode: the CPU's frames, and nothing left on the device."""

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from anygpu.pipelines import stages
from anygpu.pipelines.base import Latents, Silent
from anygpu.pipelines.load.folder import load
from anygpu.pipelines.registry import FAMILIES
from anygpu.pipelines.requests import LoadRequest
from anygpu.pipelines.vae.draft import Network
from anygpu.pipelines.vae.plan import DRAFT
from safetensors.torch import save_file

from simulated import accelerator
from simulated.test_families import MODES, ROUNDING


@pytest.mark.full
@pytest.mark.parametrize("mode", MODES)
def test_a_draft_is_the_cpus(acc: Any, tiny_folder: Path, tmp_path: Path, mode: str) -> None:
    torch.manual_seed(0)
    network = Network(12, (1, 2, 3), 1, FAMILIES["mochi"].published.tiny_decoders[0])
    save_file(
        {f"decoder.{name}": tensor for name, tensor in network.state_dict().items()}, tmp_path / "taem1.safetensors"
    )
    latents = Latents(torch.randn(1, 12, 3, 4, 6), "mochi", "text", 13, 32, 48, 30.0, 0)

    def drafted(device: str) -> torch.Tensor:
        folder = tiny.build("mochi", tiny_folder)
        pipeline = load(
            LoadRequest(folder, device=device, precision="fp32", offload=mode if device != "cpu" else "auto")
        )
        return stages.decode(pipeline, latents, Silent(), DRAFT, tiny_decoders=[tmp_path])

    before, expected = accelerator.memory().allocated_bytes, drafted("cpu")
    found = drafted("acc:0")
    torch.testing.assert_close(found, expected, atol=ROUNDING, rtol=ROUNDING)
    assert found.shape == (13, 32, 48, 3) and found.device.type == "cpu"
    assert accelerator.memory().peak_bytes > 0 and accelerator.memory().allocated_bytes == before
