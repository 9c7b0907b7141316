"""The doctor on the simulated accelerator: every family, in every offload mode, in fp16 that overflows."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from anygpu.compat.doctor import KEEP, Doctor
from anygpu.compat.output_check import NotFinite
from anygpu.compat.repairs import REPLACED, Repair, RepairStore
from anygpu.pipelines.pipeline import Pipeline
from torch import nn

from simulated.test_families import CASES, MODES, loaded_for, rendered

NEAR = 0.02  # relative L2: weights and inputs of 16 bits through a layer that enlarges everything


def loud(pipeline: Pipeline) -> Pipeline:
    """``pipeline`` with a first block whose last layer gives values far beyond fp16; its weights stay within."""
    stock = pipeline.parts.readers["transformer"]

    def read(progress: Any) -> Any:
        module = stock(progress)
        layers = [layer for layer in module.transformer_blocks[0].modules() if isinstance(layer, nn.Linear)]
        weight = next(layer.weight for layer in layers[::-1] if layer.weight.abs().max() > 0)
        with torch.no_grad():
            weight.copy_(weight.float() * (5e4 / float(weight.float().abs().max())))
        return module

    pipeline.parts.readers["transformer"] = read
    return pipeline


def rewritten(module: nn.Module) -> list[str]:
    """Modules whose own forward is not that of their class."""
    return [name for name, part in module.named_modules() if "forward" in vars(part)]


@pytest.mark.full
@pytest.mark.parametrize(("name", "offload"), [(name, MODES[index % len(MODES)]) for index, name in enumerate(CASES)])
def test_an_overflow_is_named_and_what_helps_is_kept(acc, tiny_folder, tmp_path: Path, name: str, offload: str) -> None:
    case = CASES[name]
    expected = rendered(loud(loaded_for(case, tiny_folder, "acc:0", offload)), case)[0]
    pipeline = loud(loaded_for(case, tiny_folder, "acc:0", offload, "fp16"))
    with pytest.raises(NotFinite, match=r"step 1 of 2: .* first from block 1 of \d+, .*transformer_blocks\.0\..*fp16"):
        rendered(pipeline, case)
    transformer = pipeline.parts.read("transformer")
    before = rewritten(transformer)
    for run in range(2):
        said = list[str]()
        doctor = Doctor("model", RepairStore(tmp_path), KEEP, said.append)
        latents = rendered(replace(pipeline, run=replace(pipeline.run, doctor=doctor)), case)[0]
        assert (latents - expected).norm() <= NEAR * expected.norm()
        assert doctor.repairs
        if run == 0:
            assert "kept for the next runs" in said[-1], said
        else:
            assert said == ["no fault in 2 steps"], "what helps was sought again in the second run"
    assert rewritten(transformer) == before


@pytest.mark.parametrize("offload", MODES)
def test_a_damaged_table_of_the_whole_transformer_stands_for_zeros_in_every_mode(
    acc, tiny_folder, tmp_path: Path, offload: str
) -> None:
    """Its layers are brought to the device inside its forward, in which their weights have to be their own."""
    case, said = CASES["ltx"], list[str]()
    pipeline = loaded_for(case, tiny_folder, "acc:0", offload)
    stock = pipeline.parts.readers["transformer"]

    def read(progress: Any) -> Any:
        module = stock(progress)
        with torch.no_grad():
            module.scale_shift_table[0, 0] = float("nan")
        return module

    pipeline.parts.readers["transformer"] = read
    doctor = Doctor("model", RepairStore(tmp_path), KEEP, said.append)
    latents = rendered(replace(pipeline, run=replace(pipeline.run, doctor=doctor)), case)[0]
    assert doctor.repairs == (Repair("transformer", REPLACED),) and latents.isfinite().all(), said
