"""Scenes about cards that nobody here owns: the kernels that comfy-kitchen's own registry gives them, and our path."""

import contextlib
import importlib
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import comfy_kitchen.backends.cuda as kitchen_cuda
import torch
from anygpu.compat.device import packed_paths
from anygpu.compat.device.facts import facts_for
from anygpu.compat.device.packed_paths import FORMATS
from torch._subclasses.fake_tensor import FakeTensorMode

from host.inside.core_tiny import MissingError

try:
    import comfy_kitchen.backends.hip as kitchen_hip
except ImportError as error:
    raise MissingError("kernels for Radeons") from error

kitchen = importlib.import_module("comfy_kitchen.registry")  # the package hides it behind an object of that name


@dataclass(frozen=True)
class Card:
    """A card: its facts, the CUDA that torch is built for, and the other Radeons that are visible."""

    backend: str
    arch: str
    name: str = "a card"
    cuda: str = ""
    beside: tuple[str, ...] = ()


CARDS = {
    "Apple": Card("mps", ""), "RDNA 1": Card("rocm", "gfx1010"), "RDNA 2": Card("rocm", "gfx1030"),
    "RDNA 3": Card("rocm", "gfx1100"), "RDNA 4": Card("rocm", "gfx1201"),
    "RDNA 4 beside an iGPU": Card("rocm", "gfx1201", beside=("gfx1036",)), "CDNA 3": Card("rocm", "gfx942"),
    "Arc": Card("xpu", "xe2"), "P40": Card("cuda", "sm61", cuda="12.6"), "V100": Card("cuda", "sm70", cuda="12.6"),
    "GTX 1660": Card("cuda", "sm75", "NVIDIA GeForce GTX 1660 SUPER", cuda="13.0"),
    "RTX 2060": Card("cuda", "sm75", cuda="13.0"), "RTX 2060, CUDA 12.8": Card("cuda", "sm75", cuda="12.8"),
    "RTX 3060": Card("cuda", "sm86", cuda="13.0"), "RTX 3060, CUDA 12.8": Card("cuda", "sm86", cuda="12.8"),
    "RTX 4090": Card("cuda", "sm89", cuda="13.0"), "RTX 5090": Card("cuda", "sm120", cuda="13.0"),
    "CPU": Card("cpu", ""),
}  # fmt: skip


def registered(card: Card) -> Any:
    """Kitchen's registry as it would be on ``card``: its own constraints, its own rules on architectures."""
    registry, true = kitchen.BackendRegistry(), kitchen.registry
    names = true._capabilities["eager"]
    registry.register("eager", true._backends["eager"], {name: true.get_constraints("eager", name) for name in names})
    if card.backend == "cuda":
        digits = card.arch.removeprefix("sm")
        registry.__dict__["_compute_capability"] = int(digits[:-1]), int(digits[-1])
        with mock.patch.object(kitchen_cuda, "_CUBLASLT_AVAILABLE", True):
            registry.register("cuda", kitchen_cuda, kitchen_cuda._build_constraints())
        if card.cuda < "13":  # as core does
            registry.disable("cuda")
    elif card.backend == "rocm":
        registry.__dict__["_compute_capability"] = (11, 0)
        visible = (card.arch, *card.beside)
        reason = kitchen_hip._unsupported_arch_reason(visible)
        if reason:
            registry.mark_unavailable("hip", reason)
        else:
            registry.register("hip", kitchen_hip, kitchen_hip._build_constraints(kitchen_hip._has_wmma(visible)))
            registry.set_priority(["hip", "cuda", "triton", "eager"])
    return registry


def paths(name: str) -> dict[str, Any]:
    """By format: kitchen's backend and our path; and what the report says of int8."""
    card = CARDS[name]
    kind = {"rocm": "cuda", "mps": "cpu"}.get(card.backend, card.backend)  # a fake tensor has no Apple device
    named = {"backend": card.backend, "arch": card.arch, "name": card.name, "device": torch.device(kind)}
    facts = replace(facts_for("cpu"), **named)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(kitchen, "registry", registered(card)))
        stack.enter_context(mock.patch.object(torch.version, "cuda", card.cuda or None))
        stack.enter_context(mock.patch.object(torch.version, "hip", "7.2" if card.backend == "rocm" else None))
        stack.enter_context(FakeTensorMode())
        taken = {each: packed_paths.path_for(facts, each, {}) for each in FORMATS}
        said = [str(line) for line in packed_paths.kitchen_decisions(facts, {})]
        asked = [
            each for each in FORMATS if (row := packed_paths.row_for(facts, each, taken[each].kernels)) and row.ask
        ]
    return {"paths": {each: [path.kernels, path.path] for each, path in taken.items()}, "said": said, "asked": asked}
