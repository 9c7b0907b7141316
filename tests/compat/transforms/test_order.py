"""The plan of rewrites: house order, all or nothing, the same again for a part that is read again."""

from typing import Any

import pytest
import tiny
import torch
from anygpu.compat.errors import InputError, UnsupportedError
from anygpu.compat.transforms.attention_processors import JointProcessor
from anygpu.compat.transforms.order import Order, Preparation, Step
from anygpu.pipelines.load.folder import load
from anygpu.pipelines.pipeline import Parts
from anygpu.pipelines.requests import LoadRequest
from torch import nn


def named(name: str, order: Order, log: list[str], part: str = "") -> Step:
    def apply(found: str, module: nn.Module) -> Any:
        if part and found != part:
            return None
        log.append(f"{found} {name}")
        return lambda: log.append(f"undo {name}")

    return Step(order, name, apply)


def test_steps_run_in_house_order_and_are_taken_back_in_reverse() -> None:
    log: list[str] = []
    plan = Preparation((named("attention", Order.ATTENTION, log), named("lora", Order.LORA, log)))
    plan = plan.with_steps([named("conv3d", Order.CONV3D, log, "vae"), named("kernels", Order.KERNELS, log)])
    undo = plan("transformer", nn.Identity())
    assert log == ["transformer lora", "transformer kernels", "transformer attention"]
    undo()
    assert log[3:] == ["undo attention", "undo kernels", "undo lora"]
    undo()
    assert len(log) == 6, "once"
    assert list(Order) == sorted(Order)


def test_a_step_that_fails_leaves_nothing_behind() -> None:
    log: list[str] = []

    def fails(part: str, module: nn.Module) -> None:
        raise UnsupportedError("a step", expected="none", fix="None.")

    parts = Parts(
        {"vae": lambda _: nn.Identity()},
        Preparation((named("lora", Order.LORA, log), Step(Order.KERNELS, "fails", fails))),
    )
    with pytest.raises(UnsupportedError):
        parts.read("vae")
    assert log == ["vae lora", "undo lora"]
    assert "vae" not in parts


def test_a_part_that_is_read_again_is_prepared_again() -> None:
    log: list[str] = []
    parts = Parts({"vae": lambda _: nn.Identity()}, Preparation((named("conv3d", Order.CONV3D, log),)))
    first = parts["vae"]
    assert parts.read("vae") is first and log == ["vae conv3d"]
    parts.drop("vae")
    assert parts["vae"] is not first and log == ["vae conv3d"] * 2
    parts.undo.pop("vae")()
    assert log[2:] == ["undo conv3d"]


def test_load_prepares_transformer_and_vae(tiny_folder: Any) -> None:
    folder = tiny.build("mochi", tiny_folder)
    pipeline = load(LoadRequest(folder, precision="fp32", device="cpu", attention="native_math"))
    transformer = pipeline.parts["transformer"]
    assert all(isinstance(block.attn1.processor, JointProcessor) for block in transformer.transformer_blocks)
    assert transformer.transformer_blocks[0].attn1.processor.attend.choice == "native_math"
    vae = [
        type(module.processor).__name__ for module in pipeline.parts["vae"].modules() if hasattr(module, "processor")
    ]
    assert vae and set(vae) == {"MochiVaeProcessor"}
    _, _, attention, *_ = pipeline.plan.decisions
    assert (attention.verdict, attention.source) == ("native_math", "chosen") and "plain matrix" in attention.why
    pipeline.parts.undo.pop("transformer")()
    assert type(transformer.transformer_blocks[0].attn1.processor).__name__ == "MochiAttnProcessor2_0"


def test_a_choice_that_cannot_run_is_told_while_loading(tiny_folder: Any) -> None:
    folder = tiny.build("ltx", tiny_folder)
    with pytest.raises(UnsupportedError, match="attention 'sage' on"):
        load(LoadRequest(folder, device="cpu", attention="sage"))
    with pytest.raises(InputError, match="attention 'best'"):
        load(LoadRequest(folder, device="cpu", attention="best"))
    assert torch.backends.cuda.math_sdp_enabled()
