"""Packed weights under every mover of the simulated accelerator: the CPU's result twice in a row, in fewer bytes."""

from __future__ import annotations

import layouts
import pytest
import torch
from anygpu.compat.quantized import StoredLinear, is_packed
from anygpu.pipelines import tiny
from anygpu.pipelines.composing import Files
from anygpu.pipelines.loading import LoadRequest, load

from simulated import accelerator, profiles
from simulated.test_families import CASES, MODES, ROUNDING, rendered

QUICK = {("mochi", "int8", "group")}
FAMILIES = ("ltx", "hunyuan_video", "hunyuan_video_15", "framepack", "mochi")
CELLS = [
    pytest.param(family, choice, offload, marks=[] if (family, choice, offload) in QUICK else [pytest.mark.full])
    for family in FAMILIES
    for choice in ("fp8", "int8", "bf16")
    for offload in MODES
]


def loaded(family, folder, device, choice, offload="auto"):
    paths = [tiny.build(name, folder) for name in CASES[family].checkpoints]
    base, encoder = paths[1:] if len(paths) == 3 else (None, None)
    kept = {"weights": choice, "text_weights": choice}
    return load(LoadRequest(paths[0], base, encoder, precision="fp32", offload=offload, device=device, **kept))


@pytest.fixture(scope="module")
def on_host(tiny_folder):
    """Latents of the CPU with the same packed weights."""
    found: dict[tuple[str, str], torch.Tensor] = {}

    def of(family: str, choice: str) -> torch.Tensor:
        if (family, choice) not in found:
            found[family, choice] = rendered(loaded(family, tiny_folder, "cpu", choice), CASES[family])[0]
        return found[family, choice]

    return of


@pytest.mark.parametrize(("family", "choice", "offload"), CELLS)
def test_every_mover_takes_packed_weights(acc, tiny_folder, on_host, family, choice, offload):
    pipeline = loaded(family, tiny_folder, acc, choice, offload)
    first, second = (rendered(pipeline, CASES[family])[0] for _ in range(2))
    assert torch.equal(first, second)
    assert torch.allclose(first, on_host(family, choice), rtol=ROUNDING, atol=ROUNDING)


def test_packed_weights_take_less_of_the_device(acc, tiny_folder):
    used = {}
    for choice in ("auto", "int8"):
        pipeline = loaded("mochi", tiny_folder, acc, choice, "none")
        before = accelerator.memory().allocated_bytes
        with pipeline.residency.hold("transformer"):
            used[choice] = accelerator.memory().allocated_bytes - before
        pipeline.residency.release("transformer")
    linear = sum(layer.stored.numel() for layer in pipeline.parts["transformer"].modules() if hasattr(layer, "stored"))
    saved = used["auto"] - used["int8"]
    assert 2.5 * linear < saved <= 3 * linear  # three of four bytes, less a scale per row


def test_bf16_is_widened_by_its_bits_where_the_cast_gives_zeros(tiny_folder, tmp_path):
    """A Radeon that casts bf16 to zeros: 2 bytes per weight go there, and the latents are those of the CPU."""
    if reason := accelerator.reason():
        pytest.skip(reason)
    model = tiny.build("mochi", tmp_path, dtype=torch.bfloat16)
    request = {"precision": "fp32", "weights": "as in file"}
    expected = rendered(load(LoadRequest(model, device="cpu", **request)), CASES["mochi"])[0]
    with profiles.on("gfx1151") as profile:
        pipeline = load(LoadRequest(model, device=profile.facts, offload="model", **request))
        layers = [layer for layer in pipeline.parts["transformer"].modules() if isinstance(layer, StoredLinear)]
        found = rendered(pipeline, CASES["mochi"])[0]
    assert layers and all(layer.by_bits and layer.stored.dtype is torch.bfloat16 for layer in layers)
    assert torch.allclose(found, expected, rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.full
def test_fp8_becomes_dense_on_the_host_where_the_device_has_none(tiny_folder, tmp_path):
    """Apple's GPUs have no float8: the file's values with their scale, in the dtype that computes."""
    if reason := accelerator.reason():
        pytest.skip(reason)
    folder = tiny.build("mochi", tiny_folder)
    tensors = layouts.tensors_of(folder / "transformer")
    scaled = {name: tensor for name, tensor in tensors.items() if tensor.ndim == 2 and name.endswith("weight")}
    stored = {**tensors, **{name: (tensor * 8).to(torch.float8_e4m3fn) for name, tensor in scaled.items()}}
    stored |= {name.removesuffix("weight") + "weight_scale": torch.tensor(0.125) for name in scaled}
    file = layouts.write(tmp_path / "mochi.safetensors", stored, layouts.config_in(folder / "transformer"))
    request = {"base": folder, "precision": "fp32", "files": Files({"transformer": file})}
    expected = rendered(load(LoadRequest(file, device="cpu", **request)), CASES["mochi"])[0]
    with profiles.on("mps-like") as profile:
        pipeline = load(LoadRequest(file, device=profile.facts, offload="model", **request))
        found = rendered(pipeline, CASES["mochi"])[0]
        assert not is_packed(pipeline.parts["transformer"])
    assert torch.allclose(found, expected, rtol=10 * ROUNDING, atol=10 * ROUNDING)
