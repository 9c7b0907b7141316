"""The rows of quirks.py: one known upstream bug each, with the thread that shows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

GIBIBYTE = 1024**3
ANY = ("*",)


@dataclass(frozen=True, slots=True)
class Quirk:
    """One upstream bug."""

    name: str
    backends: tuple[str, ...]  # patterns, as arches and names; names without regard to case
    symptom: str
    source: str  # the threads that show it
    done: str  # what the pack does about it
    arches: tuple[str, ...] = ANY
    but_not: tuple[str, ...] = ()  # arches that the row leaves out
    names: tuple[str, ...] = ANY
    versions: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # package to [first bad, first good)
    optional: tuple[str, ...] = ()  # packages without which the row does not stand
    wrong: tuple[str, ...] = ()  # operations that fail or lie, until a probe says otherwise
    costly: tuple[str, ...] = ()  # operations that cost a multiple
    effect: Mapping[str, Any] = field(default_factory=dict)  # fields of DevicePolicy
    remedy: str = ""  # what the user can do about it
    seen: str = "2026-09"  # when it was last checked against its thread


def _all(dtype: str) -> tuple[str, ...]:
    return tuple(f"{name}.{dtype}" for name in ("matmul", "attention", "groupnorm", *CONVOLUTIONS))


nvidia, radeon = partial(Quirk, backends=("cuda",)), partial(Quirk, backends=("rocm",))

CONVOLUTIONS = ("conv3d", "conv3d_channels_last", "conv2d")
OLD_NVIDIA = ("sm5?", "sm6?", "sm7?")
GTX16 = (  # TU116 and TU117, which have no tensor cores; ComfyUI has no T400
    ("1660", "1650", "1630", "t500", "t550", "t600", "mx550", "mx450", "cmp 30hx", "t2000", "t1000", "t1200", "t400")
)
RDNA = ("gfx10*", "gfx11*", "gfx12*")


def _convolutions(*dtypes: str) -> tuple[str, ...]:
    return tuple(f"{name}.{dtype}" for name in CONVOLUTIONS for dtype in dtypes)


NVIDIA = (
    nvidia(
        "bf16_emulated", symptom="GPUs before sm80 have no bf16 units; torch emulates bf16, slower than fp32",
        source="pytorch#148322, HunyuanVideoWrapper#160", done="auto computes in fp16-safe", arches=OLD_NVIDIA,
        costly=("matmul.bf16", "attention.bf16", "groupnorm.bf16"),
    ),
    nvidia(
        "bf16_convolution_missing", symptom="cuDNN has no bf16 convolution below sm80 (unable to find an engine)",
        source="diffusers#14129", done="convolutions of bf16 layers run in fp32", arches=OLD_NVIDIA,
        wrong=_convolutions("bf16"),
    ),
    nvidia(
        "gtx16_fp16_nan", symptom="fp16 convolutions give NaN on GTX 16xx",
        source="pytorch#58123, ComfyUI#884; the names are those of ComfyUI's should_use_fp16, and T400",
        done="auto computes in fp32", arches=("sm75",), names=tuple(f"*{name}*" for name in GTX16),
        wrong=_convolutions("fp16"),
    ),
    nvidia(
        "volta_fp16_conv3d", symptom="fp16 Conv3d gives wrong values for kernels (3,1,1) on V100",
        source="pytorch#40275, pytorch#24082", done="Conv3d runs in fp32", arches=("sm70",),
        wrong=("conv3d.fp16", "conv3d_channels_last.fp16"),
    ),
    nvidia(
        "zluda_bf16_convolution", symptom="ZLUDA has no bf16 convolution", source="ComfyUI#12003, ComfyUI-Zluda#404",
        done="convolutions run in fp32", names=("*zluda*",), wrong=_convolutions("bf16"),
    ),
    nvidia(
        "conv3d_without_cudnn", symptom="torch 2.9.0 unfolds half-precision Conv3d in memory, up to 17 times as much",
        source="pytorch#166643, pytorch#177406, ComfyUI#10373", done="Conv3d runs as 2-D convolutions",
        versions={"torch": ("2.9.0", "2.9.1")}, costly=("conv3d.bf16", "conv3d.fp16"),
        remedy="Update torch to 2.11 or newer.",
    ),
    nvidia(
        "conv3d_without_old_cudnn", symptom="torch 2.9 and 2.10 unfold half-precision Conv3d with cuDNN before 9.15",
        source="pytorch#166643, pytorch#166790", done="Conv3d runs as 2-D convolutions",
        versions={"torch": ("2.9.1", "2.11"), "cudnn": ("", "9.15")}, optional=("cudnn",),
        costly=("conv3d.bf16", "conv3d.fp16"), remedy="Update torch to 2.11 or newer, or cuDNN to 9.15.",
    ),
    nvidia(
        "cudnn_large_convolution", symptom="cuDNN 9.10.2 gives wrong results on large convolutions",
        source="pytorch#163539", done="no convolution gets more than 2 GiB at once",
        versions={"cudnn": ("9.10.2", "9.15")}, optional=("cudnn",), effect={"conv_bytes": 2 * GIBIBYTE},
        remedy="Update torch: its wheels bring a newer cuDNN.",
    ),
)  # fmt: skip

AMD = (
    radeon(
        "gfx115x_bf16_partial", symptom="on RDNA 3.5 bf16 is reliable except for convolutions",
        source="TheRock#5845, ROCm#5191", done="the VAE computes in fp32", arches=("gfx1150", "gfx1151"),
        versions={"rocm": ("7.1", "")}, wrong=_convolutions("bf16"),
    ),
    radeon(
        "gfx115x_bf16_old", symptom="bf16 is not reliable on RDNA 3.5 before ROCm 7.1", source="TheRock#2591",
        done="auto computes in fp16-safe", arches=("gfx1150", "gfx1151"), versions={"rocm": ("", "7.1")},
        optional=("rocm",), wrong=_all("bf16"), remedy="Install a torch for ROCm 7.1 or newer.",
    ),
    radeon(
        "gfx11_bf16_off", symptom="on RDNA 3 bf16 uses slow or failing kernels", source="ROCm#5191, pytorch#194447",
        done="auto computes in fp16-safe", arches=("gfx11*",), but_not=("gfx1150", "gfx1151"), wrong=_all("bf16"),
    ),
    radeon(
        "no_bf16_units", symptom="RDNA 2, Vega and older have no bf16 units", source="ComfyUI model_management",
        done="auto computes in fp16-safe", arches=("gfx10*", "gfx900", "gfx906"), costly=_all("bf16"),
    ),
    radeon(
        "miopen_search", symptom="MIOpen tunes each new convolution shape for 10 to 40 minutes",
        source="ComfyUI#10302, TheRock#2591, musubi-tuner#592", done="MIOpen is off around the VAE, restored after it",
        arches=RDNA, versions={"rocm": ("", "7.14")}, effect={"vae_cudnn": False},
        remedy="torch for ROCm 7.14 or newer no longer does this.",
    ),
    radeon(
        "conv3d_abort", symptom="a large Conv3d crashes the process or gives NaN on RDNA 3.5",
        source="TheRock#5845, ComfyUI#9871", done="tiles of at most 256 pixels", arches=("gfx115?",),
        effect={"tile_pixels": 256},
    ),
    radeon(
        "conv3d_never_ends", symptom="HunyuanVideo's decode never finishes with tiles above 128 on RDNA 3",
        source="ComfyUI#7189, ComfyUI#9547", done="tiles of at most 128 pixels", arches=("gfx110?",),
        effect={"tile_pixels": 128},
    ),
    radeon(
        "benchmark_on_radeon", symptom="cudnn.benchmark tunes for 23 minutes and then crashes",
        source="unslothai/unsloth#11636", done="exhaustive tuning stays off", arches=RDNA, effect={"benchmark": False},
    ),
    radeon(
        "gfx12_fp32_rows", symptom="fp32 products are wrong above 2^19 rows",
        source="ROCm/rocm-libraries#8645, ROCm/legacy-rocm-build#6595; cause in ROCm/rocm-libraries#9184",
        done="linear layers multiply at most 2^19 rows at a time", arches=("gfx12*",), effect={"product_rows": 2**19},
    ),
    radeon(
        "gfx12_expandable_segments", symptom="torch's expandable_segments gives NaN in bf16 under a busy allocator",
        source="pytorch#195202, pytorch#187343", done="where it is set, the report says to leave it out",
        arches=("gfx12*",), effect={"expandable_segments": False},
    ),
    radeon(
        "gfx115x_host_pointers", symptom="kernels read host memory wrongly on RDNA 3.5",
        source="ggml-org/llama.cpp#28211", done="no host memory is locked for the device",
        arches=("gfx1150", "gfx1151"), effect={"pins": False},
    ),
)  # fmt: skip

OTHERS = (
    Quirk(
        "mps_time_pad", backends=("mps",), symptom="F.pad on the time axis corrupts frames of 65536 pixels and more",
        source="pytorch#194922", done="time is padded by concatenation",
        wrong=("pad3d.fp32", "pad3d.bf16", "pad3d.fp16"),
    ),
    Quirk(
        "mps_conv3d_contiguous", backends=("mps",),
        symptom="Conv3d is wrong in contiguous layout for most channel counts before macOS 26.3",
        source="pytorch#197114", done="Conv3d runs as 2-D convolutions", versions={"macos": ("", "26.3")},
        wrong=("conv3d.fp32", "conv3d.bf16", "conv3d.fp16"), remedy="Update to macOS 26.3 or newer.",
    ),
    Quirk(
        "mps_conv3d_slow", backends=("mps",), symptom="Conv3d is slow", source="pytorch#192213",
        done="Conv3d runs as 2-D convolutions",
        costly=tuple(f"{name}.{dtype}" for name in CONVOLUTIONS[:2] for dtype in ("fp32", "bf16", "fp16")),
    ),
    Quirk(
        "mps_bf16_before_macos14", backends=("mps",), symptom="MPS has no bf16 before macOS 14",
        source="ComfyUI model_management", done="auto computes in fp16-safe", versions={"macos": ("", "14")},
        optional=("macos",), wrong=_all("bf16"), remedy="Update to macOS 14 or newer.",
    ),
    Quirk(
        "mps_large_array", backends=("mps",),
        symptom="an array above 4 GB ends the process on older macOS; above 2^31 elements torch refuses it",
        source="pytorch#84039, pytorch#143859, pytorch#146769", done="no single buffer above 4 GB",
        effect={"allocation_bytes": 4 * GIBIBYTE},
    ),
    Quirk(
        "mps_linear_with_bias", backends=("mps",),
        symptom="F.linear with a bias and more than two axes writes over rows",
        source="pytorch#189495, pytorch#188438, pytorch#192934", done="linear layers get two axes",
        versions={"torch": ("2.12", "2.15")}, effect={"plain_operands": True},
    ),
    Quirk(
        "mps_transposed_left_operand", backends=("mps",),
        symptom="an fp32 product with a transposed left operand is off by 10 to 30 % in some states of the allocator",
        source="pytorch#193487", done="left operands of products are made contiguous", versions={"torch": ("2.7", "")},
        effect={"plain_operands": True},
    ),
    Quirk(
        "mps_conv2d_layout", backends=("mps",),
        symptom="conv2d reads a weight that is not contiguous as if it were, and a channel slice wrongly",
        source="pytorch#192212, pytorch#180984", done="weight and input of 2-D convolutions are made contiguous",
        versions={"macos": ("15", "")}, effect={"plain_operands": True},
    ),
    Quirk(
        "mps_rms_norm_rows", backends=("mps",), symptom="F.rms_norm is black above 2^21 rows; one source",
        source="pawel-mazurkiewicz/ComfyUI-AppleSilicon-FP8#15",
        done="RMS norms of more than 2^20 rows run as plain operations in fp32", effect={"norm_rows": 2**20},
    ),
    Quirk(
        "xpu_allocation", backends=("xpu",), symptom="a single buffer above 4 GB fails even if memory is free",
        source="ComfyUI#8767, ComfyUI#556", done="no single buffer above 4 GB",
        effect={"allocation_bytes": 4 * GIBIBYTE},
    ),
    Quirk(
        "battlemage_products", backends=("xpu",),
        symptom="fp16 products are NaN or zero from some size on, and bf16 ones NaN or huge, on Arc B580 and Pro B70",
        source="intel/compute-runtime#1000, intel/compute-runtime#1001, intel/torch-xpu-ops#5220",
        done="what a probe at a transformer's size finds wrong computes in fp32", names=("*b580*", "*b70*"),
        wrong=(*_all("fp16"), *_all("bf16")),
    ),
    Quirk(
        "xpu_sliced_weight", backends=("xpu",), symptom="Conv3d with a sliced weight crashes the process",
        source="ComfyUI#14513", done="weights are made contiguous", effect={"contiguous_weights": True},
    ),
    Quirk(
        "cpu_fp16_conv3d", backends=("cpu",), symptom="on a CPU fp16 Conv3d takes 5 times as long as fp32",
        source="measured, oneDNN of torch 2.13", done="nothing is decoded in fp16 on a CPU",
        costly=("conv3d.fp16", "conv3d_channels_last.fp16"),
    ),
)  # fmt: skip

QUIRKS: tuple[Quirk, ...] = (*NVIDIA, *AMD, *OTHERS)
