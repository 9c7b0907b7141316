"""Which dtype each part of a pipeline gets on a device, with the reason, and the one string-to-dtype map."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from .device import DeviceFacts
from .errors import UnsupportedError

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16

DTYPES: dict[str, torch.dtype] = {"fp32": FP32, "bf16": BF16, "fp16": FP16}
CHOICES = ("auto", "fp32", "bf16", "fp16")


@dataclass(frozen=True, slots=True)
class Precision:
    """Dtypes of the parts of one pipeline and the sentence that justifies them."""

    transformer: torch.dtype
    text: torch.dtype
    vae: torch.dtype
    why: str

    def __str__(self) -> str:
        names = {dtype: name for name, dtype in DTYPES.items()}
        return (
            f"transformer {names[self.transformer]}, text {names[self.text]}, VAE {names[self.vae]}: {self.why}"
        )


PRECISION: dict[tuple[str, str], Precision] = {  # (family, arch class); an exact row wins over "*"
    ("*", "cpu"): Precision(FP32, FP32, FP32, "a CPU computes fp32 fastest and exactly"),
    ("*", "cuda-sm80+"): Precision(BF16, BF16, BF16, "this GPU has bf16 tensor cores and the models were trained in it"),
    ("*", "cuda-old"): Precision(
        FP32, FP32, FP32, "GPUs before sm80 have no bf16 units and plain fp16 overflows to black; fp32 is right"
    ),
    ("*", "rocm"): Precision(BF16, BF16, FP32, "bf16 weights, with the VAE in fp32, where Radeon convolutions are safe"),
    ("*", "xpu"): Precision(BF16, BF16, BF16, "Intel GPUs have bf16 units"),
    ("*", "mps"): Precision(BF16, FP32, FP32, "bf16 halves the largest part; text and VAE are safe in fp32"),
    ("*", "other"): Precision(FP32, FP32, FP32, "nothing is known about this device, so the exact choice"),
    ("mochi", "cuda-sm80+"): Precision(BF16, BF16, FP32, "upstream's reference decodes Mochi in fp32"),
}

_EXPLICIT_WHY = {
    "fp32": "chosen: exact, twice the memory of bf16",
    "bf16": "chosen: half the memory of fp32 with its range",
    "fp16": "chosen: half the memory; T5-like text encoders stay fp32, since fp16 overflows in them",
}


def precision_for(family: str, facts: DeviceFacts, choice: str = "auto") -> Precision:
    """The dtypes for ``family`` on the device of ``facts``.

    Args:
        family: a family id.
        facts: the device.
        choice: ``auto``, ``fp32``, ``bf16`` or ``fp16``; an explicit choice is never changed silently.

    Raises:
        UnsupportedError: unknown choice, or no row for the device.
    """
    if choice == "auto":
        for key in ((family, facts.arch_class), ("*", facts.arch_class)):
            if key in PRECISION:
                return PRECISION[key]
        raise UnsupportedError(
            f"no precision policy for {family!r} on {facts.arch_class!r}",
            expected=f"one of {', '.join(sorted({arch for _, arch in PRECISION}))}",
            fix="Choose a precision by hand, or add a row to PRECISION in compat/precision.py.",
        )
    if choice not in DTYPES:
        raise UnsupportedError(
            f"precision {choice!r}", expected=f"one of {', '.join(CHOICES)}", fix="Choose one of these on the load node."
        )
    dtype = DTYPES[choice]
    chosen = Precision(dtype, dtype, dtype, _EXPLICIT_WHY[choice])
    return replace(chosen, text=FP32) if dtype is FP16 else chosen
