"""The rows of quirks.py: data only, one known upstream bug each, with the thread that shows it.

``seen`` is when the row was last checked against its thread, not when the bug was found.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

GIBIBYTE = 1024**3
ANY = ("*",)


@dataclass(frozen=True, slots=True)
class Quirk:
    """One upstream bug.

    Args:
        backends, arches, names: patterns of the device; names of devices without regard to case.
        but_not: patterns of arches that the row leaves out. system: such as ``Windows``; empty for all.
        versions: package to [first bad, first good); an empty bound is open.
        optional: packages without which the row does not stand.
        wrong: operations that fail or lie, until a probe says otherwise. costly: those that cost a multiple.
        effect: fields of :class:`~.quirks.Care`.
        done: what the pack does about it. remedy: what the user can do about it; empty where nothing helps yet.
    """

    name: str
    backends: tuple[str, ...]
    symptom: str
    source: str
    done: str
    arches: tuple[str, ...] = ANY
    but_not: tuple[str, ...] = ()
    names: tuple[str, ...] = ANY
    system: str = ""
    versions: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    optional: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()
    costly: tuple[str, ...] = ()
    effect: Mapping[str, Any] = field(default_factory=dict)
    remedy: str = ""
    seen: str = "2026-09"


def _all(dtype: str) -> tuple[str, ...]:
    """Everything that computing in ``dtype`` needs, casts left out: they are asked one by one."""
    return tuple(f"{name}.{dtype}" for name in ("matmul", "attention", "groupnorm", *CONVOLUTIONS))


CONVOLUTIONS = ("conv3d", "conv3d_channels_last", "conv2d")
OLD_NVIDIA = ("sm5?", "sm6?", "sm7?")
RDNA3_AND_4 = ("gfx11*", "gfx12*")
RDNA = ("gfx10*", "gfx11*", "gfx12*")


def _convolutions(*dtypes: str) -> tuple[str, ...]:
    return tuple(f"{name}.{dtype}" for name in CONVOLUTIONS for dtype in dtypes)


NVIDIA = (
    Quirk(
        "bf16_emulated",
        ("cuda",),
        "GPUs before sm80 have no bf16 units and torch emulates them, slower than fp32",
        "pytorch#148322, HunyuanVideoWrapper#160",
        "auto computes in fp16-safe",
        OLD_NVIDIA,
        costly=("matmul.bf16", "attention.bf16", "groupnorm.bf16"),
    ),
    Quirk(
        "bf16_convolution_missing",
        ("cuda",),
        "cuDNN has no bf16 convolution below sm80 (unable to find an engine)",
        "diffusers#14129",
        "convolutions of bf16 layers run in fp32",
        OLD_NVIDIA,
        wrong=_convolutions("bf16"),
    ),
    Quirk(
        "gtx16_fp16_nan",
        ("cuda",),
        "fp16 convolutions give NaN on GTX 16xx",
        "pytorch#58123, ComfyUI#884",
        "auto computes in fp32",
        ("sm75",),
        names=("*gtx 16*", "*mx450*", "* t400*", "* t600*", "* t1000*"),
        wrong=_convolutions("fp16"),
    ),
    Quirk(
        "volta_fp16_conv3d",
        ("cuda",),
        "fp16 Conv3d gives wrong values for kernels (3,1,1) on V100",
        "pytorch#40275, pytorch#24082",
        "Conv3d runs in fp32",
        ("sm70",),
        wrong=("conv3d.fp16", "conv3d_channels_last.fp16"),
    ),
    Quirk(
        "zluda_bf16_convolution",
        ("cuda",),
        "ZLUDA has no bf16 convolution",
        "ComfyUI#12003, ComfyUI-Zluda#404",
        "convolutions run in fp32",
        names=("*zluda*",),
        wrong=_convolutions("bf16"),
    ),
    Quirk(
        "conv3d_without_cudnn",
        ("cuda",),
        "torch 2.9.0 unfolds half-precision Conv3d in memory, up to 17 times as much",
        "pytorch#166643, pytorch#177406, ComfyUI#10373",
        "Conv3d runs as 2-D convolutions",
        versions={"torch": ("2.9.0", "2.9.1")},
        costly=("conv3d.bf16", "conv3d.fp16"),
        remedy="Update torch to 2.11 or newer.",
    ),
    Quirk(
        "conv3d_without_old_cudnn",
        ("cuda",),
        "torch 2.9 and 2.10 unfold half-precision Conv3d with cuDNN before 9.15",
        "pytorch#166643, pytorch#166790",
        "Conv3d runs as 2-D convolutions",
        versions={"torch": ("2.9.1", "2.11"), "cudnn": ("", "9.15")},
        optional=("cudnn",),
        costly=("conv3d.bf16", "conv3d.fp16"),
        remedy="Update torch to 2.11 or newer, or cuDNN to 9.15.",
    ),
    Quirk(
        "cudnn_large_convolution",
        ("cuda",),
        "cuDNN 9.10.2 gives wrong results on large convolutions",
        "pytorch#163539",
        "one convolution is given at most 2 GiB",
        versions={"cudnn": ("9.10.2", "9.15")},
        optional=("cudnn",),
        effect={"conv_bytes": 2 * GIBIBYTE},
        remedy="Update torch: its wheels bring a newer cuDNN.",
    ),
    Quirk(
        "triton_without_turing",
        ("cuda",),
        "Triton 3.3 and newer build nothing below sm80",
        "triton-windows#28, SageAttention#102",
        "no Triton kernels",
        OLD_NVIDIA,
        versions={"triton": ("3.3", "")},
        optional=("triton",),
        wrong=("triton",),
        remedy="Triton 3.2 still builds for this GPU.",
    ),
    Quirk(
        "sm80_attention",
        ("cuda",),
        "SageAttention 2 and FlashAttention 2 need sm80",
        "SageAttention#63, FramePack#384",
        "auto takes torch's own attention",
        OLD_NVIDIA,
        wrong=("sage", "flash"),
    ),
)

AMD = (
    Quirk(
        "gfx115x_bf16_partial",
        ("rocm",),
        "bf16 convolutions are not reliable on RDNA 3.5, the rest is",
        "TheRock#5845, ROCm#5191",
        "the VAE computes in fp32",
        ("gfx1150", "gfx1151"),
        versions={"rocm": ("7.1", "")},
        wrong=_convolutions("bf16"),
    ),
    Quirk(
        "gfx115x_bf16_old",
        ("rocm",),
        "bf16 is not reliable on RDNA 3.5 before ROCm 7.1",
        "TheRock#2591",
        "auto computes in fp16-safe",
        ("gfx1150", "gfx1151"),
        versions={"rocm": ("", "7.1")},
        optional=("rocm",),
        wrong=_all("bf16"),
        remedy="Install a torch for ROCm 7.1 or newer.",
    ),
    Quirk(
        "gfx11_bf16_off",
        ("rocm",),
        "bf16 falls to slow or failing kernels on RDNA 3",
        "ROCm#5191, pytorch#194447",
        "auto computes in fp16-safe",
        ("gfx11*",),
        ("gfx1150", "gfx1151"),
        wrong=_all("bf16"),
    ),
    Quirk(
        "no_bf16_units",
        ("rocm",),
        "RDNA 2, Vega and older have no bf16 units",
        "ComfyUI model_management",
        "auto computes in fp16-safe",
        ("gfx10*", "gfx900", "gfx906"),
        costly=_all("bf16"),
    ),
    Quirk(
        "miopen_search",
        ("rocm",),
        "MIOpen searches 10 to 40 minutes for each new convolution shape",
        "ComfyUI#10302, TheRock#2591, musubi-tuner#592",
        "MIOpen is off around the VAE, restored after it",
        RDNA,
        versions={"rocm": ("", "7.14")},
        effect={"vae_cudnn": False},
        remedy="A torch for ROCm 7.14 or newer searches no longer.",
    ),
    Quirk(
        "miopen_timing",
        ("rocm",),
        "MIOpen 3.6 fails with miopenStatusUnknownError",
        "rocm-libraries#4070, MIOpen#3964",
        "the operator is tried once more without MIOpen",
        ("gfx1151",),
        versions={"rocm": ("10.0", "")},
        effect={"retry_without_cudnn": True},
    ),
    Quirk(
        "conv3d_abort",
        ("rocm",),
        "a large Conv3d ends the process or gives NaN on RDNA 3.5",
        "TheRock#5845, ComfyUI#9871",
        "tiles of at most 256 pixels",
        ("gfx115?",),
        effect={"tile_pixels": 256},
    ),
    Quirk(
        "conv3d_never_ends",
        ("rocm",),
        "HunyuanVideo's decode never finishes with tiles above 128 on RDNA 3",
        "ComfyUI#7189, ComfyUI#9547",
        "tiles of at most 128 pixels",
        ("gfx110?",),
        effect={"tile_pixels": 128},
    ),
    Quirk(
        "benchmark_on_radeon",
        ("rocm",),
        "cudnn.benchmark searches for 23 minutes and then crashes",
        "unslothai/unsloth#11636",
        "exhaustive tuning stays off",
        RDNA,
        effect={"benchmark": False},
    ),
    Quirk(
        "mapped_pages_stall",
        ("rocm",),
        "each copy from a mapped file stalls 0.5 to 2 s with the amdgpu driver of kernel 7.0",
        "ROCm#5952, ComfyUI#15001, safetensors#821",
        "weights are read into ordinary memory",
        RDNA3_AND_4,
        system="Linux",
        effect={"mapped_reads": False},
    ),
    Quirk(
        "rdna4_rasterizer",
        ("rocm",),
        "textures come out corrupted on RDNA 4",
        "ROCm#5981, ROCm#6184",
        "the rasterizer is compared with the CPU's before use",
        ("gfx12*",),
        versions={"rocm": ("6.4", "7.3")},
        wrong=("rasterizer",),
    ),
)

OTHERS = (
    Quirk(
        "mps_time_pad",
        ("mps",),
        "F.pad on the time axis corrupts frames of 65536 pixels and more",
        "pytorch#194922",
        "time is padded by concatenation",
        wrong=("pad3d.fp32", "pad3d.bf16", "pad3d.fp16"),
    ),
    Quirk(
        "mps_conv3d_contiguous",
        ("mps",),
        "Conv3d is wrong in contiguous layout for most channel counts, and slow in any",
        "pytorch#197114, pytorch#192213",
        "Conv3d runs as 2-D convolutions",
        wrong=("conv3d.fp32", "conv3d.bf16", "conv3d.fp16"),
        costly=tuple(f"conv3d_channels_last.{d}" for d in ("fp32", "bf16", "fp16")),
    ),
    Quirk(
        "mps_float64",
        ("mps",),
        "float64 does not exist on MPS",
        "diffusers#9047, ComfyUI#15512",
        "tables are built on the CPU",
        wrong=("float64",),
    ),
    Quirk(
        "mps_float8",
        ("mps",),
        "float8 does not exist on MPS",
        "pytorch#148420, ComfyUI#6859",
        "float8 weights are converted on the CPU while they are read",
        wrong=("float8",),
    ),
    Quirk(
        "mps_bf16_before_macos14",
        ("mps",),
        "MPS has no bf16 before macOS 14",
        "ComfyUI model_management",
        "auto computes in fp16-safe",
        versions={"macos": ("", "14")},
        optional=("macos",),
        wrong=_all("bf16"),
        remedy="Update to macOS 14 or newer.",
    ),
    Quirk(
        "xpu_float64",
        ("xpu",),
        "Arc GPUs have no float64",
        "torch-xpu-ops#1742, diffusers#11315",
        "tables are built on the CPU",
        wrong=("float64",),
    ),
    Quirk(
        "xpu_allocation",
        ("xpu",),
        "one buffer of more than 4 GB fails although memory is free",
        "ComfyUI#8767, ComfyUI#556",
        "no single buffer above 4 GB",
        effect={"allocation_bytes": 4 * GIBIBYTE},
    ),
    Quirk(
        "xpu_sliced_weight",
        ("xpu",),
        "Conv3d with a sliced weight ends the process",
        "ComfyUI#14513",
        "weights are made contiguous",
        effect={"contiguous_weights": True},
    ),
    Quirk(
        "directml_bf16",
        ("directml",),
        "DirectML has no bf16",
        "ComfyUI model_management",
        "auto computes in fp16-safe",
        wrong=_all("bf16"),
    ),
    Quirk(
        "cpu_fp16_conv3d",
        ("cpu",),
        "fp16 Conv3d takes 5 times as long as fp32 on a CPU",
        "measured, oneDNN of torch 2.13",
        "nothing is decoded in fp16 on a CPU",
        costly=("conv3d.fp16", "conv3d_channels_last.fp16"),
    ),
    Quirk(
        "masked_attention_nan",
        ANY,
        "attention with a padding mask gives NaN, so a black video, before torch 2.5.1",
        "HunyuanVideoWrapper#60, diffusers#10314",
        "padding is cropped, so that no mask is needed",
        versions={"torch": ("", "2.5.1")},
        effect={"masks": False},
        remedy="Update torch to 2.8 or newer.",
    ),
    Quirk(
        "replication_pad_bf16",
        ("cuda", "rocm"),
        "replication_pad3d is missing in bf16 before torch 2.2",
        "HunyuanVideoWrapper#180, pytorch#117961",
        "time is padded by concatenation",
        versions={"torch": ("", "2.2")},
        wrong=("pad3d.bf16",),
        remedy="Update torch to 2.8 or newer.",
    ),
    Quirk(
        "offload_streams",
        ("cuda", "rocm", "xpu"),
        "group offload with streams has given other pictures",
        "diffusers#11981, diffusers#11094",
        "streams stay off",
        effect={"streams": False},
    ),
)

QUIRKS: tuple[Quirk, ...] = (*NVIDIA, *AMD, *OTHERS)
