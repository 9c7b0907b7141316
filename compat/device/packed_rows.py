"""The rows of packed_paths.py: how each card computes packed layers, and who has shown it. The first row that fits
decides; a card without one dequantises until somebody asks it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from .quirk_rows import ANY, GTX16

CORE, DEQUANTISE = "core's own", "dequantise"
INT8, W4A8, W4A4 = "int8_tensorwise", "asym_w4a8_int8", "convrot_w4a4"
INTEGERS = (INT8, W4A8, W4A4)  # core multiplies these packed on every device, without asking it
FP8, FP4 = ("float8_e4m3fn", "float8_e5m2"), ("nvfp4", "mxfp8")
AWQ = "awq_w4a16"
FORMATS = (*INTEGERS, *FP8, *FP4, AWQ)  # as core names them


@dataclass(frozen=True, slots=True)
class PackedRow:
    """The path of layers of some formats on one kind of card."""

    card: str
    backends: tuple[str, ...]  # patterns, as the next ones; names without regard to case
    formats: tuple[str, ...]
    path: str  # ``CORE``, which goes through comfy-kitchen, or ``DEQUANTISE``
    why: str
    source: str
    arches: tuple[str, ...] = ANY
    names: tuple[str, ...] = ANY
    kernels: tuple[str, ...] = ANY  # comfy-kitchen's backends with which it holds; ``eager`` is torch's own
    ask: bool = True  # a timing may overrule the row; False where the question may end the process


nvidia, radeon = partial(PackedRow, backends=("cuda",)), partial(PackedRow, backends=("rocm",))
TABLE = "comfy-kitchen 0.2.31"

PACKED_ROWS = (
    PackedRow(
        "any, without comfy-kitchen's kernels", backends=ANY, formats=(W4A4,), path=DEQUANTISE,
        why="torch has no 4-bit product: core would round the activations and multiply floats", source=TABLE,
        kernels=("eager", ""), ask=False,
    ),
    PackedRow(
        "any, without comfy-kitchen's kernels", backends=ANY, formats=(AWQ,), path=DEQUANTISE,
        why="only its weights are packed, and torch's own code unpacks them for each call too", source=TABLE,
        kernels=("eager", ""), ask=False,
    ),
    PackedRow(
        "any", backends=ANY, formats=(AWQ,), path=CORE, why="comfy-kitchen's kernel reads the packed weights",
        source=TABLE, ask=False,
    ),
    PackedRow(
        "CPU", backends=("cpu",), formats=INTEGERS, path=DEQUANTISE,
        why="torch's int8 product took 3 to 70 times as long", source="measured with torch 2.13", ask=False,
    ),
    PackedRow(
        "Apple", backends=("mps",), formats=INTEGERS, path=DEQUANTISE,
        why="torch before 2026-08-14 has no int8 product there", source="comfy-kitchen#92, ComfyUI#16458",
    ),
    radeon(
        "RDNA 1", formats=INTEGERS, path=DEQUANTISE, why="the int8 product is many times slower, then wrong",
        source="patientx-cfz/comfyui-rocm#111, comfy-kitchen#185", arches=("gfx101?",), ask=False,
    ),
    radeon(
        "RDNA 2", formats=INTEGERS, path=DEQUANTISE,
        why="no library has its int8 product: it raises on Linux, ends the process on Windows, and hangs with Triton",
        source="comfy-kitchen#92, comfy-kitchen#133, ComfyUI#14866", arches=("gfx103?",), ask=False,
    ),
    radeon(
        "RDNA 3 and 4", formats=INTEGERS, path=CORE, why="comfy-kitchen's HIP kernels are right here",
        source="comfy-kitchen#74", arches=("gfx11??", "gfx12??"), kernels=("hip",),
    ),
    radeon(
        "RDNA 3 without those kernels", formats=INTEGERS, path=DEQUANTISE,
        why="the int8 product is 3 times slower, and ends the process on some",
        source="comfy-kitchen#61, comfy-kitchen#64, ComfyUI#14777", arches=("gfx11??",), ask=False,
    ),
    radeon(
        "RDNA 4 without those kernels", formats=INTEGERS, path=DEQUANTISE,
        why="the int8 product is slow, and Triton's faults", source="comfy-kitchen#78", arches=("gfx12??",),
        ask=False,
    ),
    radeon(
        "CDNA, Vega", formats=INTEGERS, path=DEQUANTISE,
        why="comfy-kitchen has no kernels for it, and nobody has timed torch's product", source=TABLE,
        arches=("gfx90?", "gfx94?", "gfx95?"),
    ),
    radeon(
        "RDNA 4, CDNA 3", formats=FP8, path=CORE, why="it multiplies fp8, which core asks of torch",
        source="ComfyUI 0.33, supports_fp8_compute", arches=("gfx120?", "gfx94?", "gfx95?"),
    ),
    PackedRow(
        "Arc", backends=("xpu",), formats=INTEGERS, path=DEQUANTISE,
        why="torch has its int8 product since 2.9, which nobody has timed",
        source="pytorch#157769, intel-xpu-backend-for-triton#7633",
    ),
    nvidia(
        "Maxwell, P100", formats=INTEGERS, path=DEQUANTISE, why="it has no int8 product (dp4a)",
        source="CUDA's compute capabilities", arches=("sm5?", "sm60"), ask=False,
    ),
    nvidia(
        "Pascal", formats=INTEGERS, path=DEQUANTISE,
        why="it has dp4a and no tensor cores; nobody has timed torch's product",
        source="CUDA's compute capabilities", arches=("sm6?",),
    ),
    nvidia(
        "Volta", formats=INTEGERS, path=DEQUANTISE,
        why="its tensor cores have no int8; nobody has timed torch's product",
        source="CUDA's compute capabilities, ComfyUI#15262", arches=("sm7[02]",),
    ),
    nvidia(
        "GTX 16", formats=INTEGERS, path=DEQUANTISE, why="no int8 tensor cores; raises for 97 to 127 rows",
        source="ComfyUI#16431, comfy-kitchen#75", arches=("sm75",), names=tuple(f"*{name}*" for name in GTX16),
    ),
    nvidia(
        "RTX 20, T4", formats=(INT8, W4A4), path=CORE, why="comfy-kitchen has kernels for it", source=TABLE,
        arches=("sm75",), kernels=("cuda",),
    ),
    nvidia(
        "RTX 20, T4", formats=INTEGERS, path=DEQUANTISE,
        why="torch's int8 product raises, or is wrong, for some shapes", source="comfy-kitchen#55", arches=("sm75",),
    ),
    nvidia(
        "RTX 30, A100 and later", formats=INTEGERS, path=CORE, why="its tensor cores multiply int8",
        source="ComfyUI#14824", arches=("sm8?", "sm9?", "sm1??"),
    ),
    nvidia(
        "RTX 40, H100 and later", formats=FP8, path=CORE, why="its tensor cores multiply fp8",
        source="ComfyUI 0.33, supports_fp8_compute", arches=("sm89", "sm9?", "sm1??"),
    ),
    nvidia(
        "RTX 50, B200", formats=FP4, path=CORE, why="its tensor cores multiply blocks of fp4 and fp8",
        source="ComfyUI 0.33, supports_nvfp4_compute", arches=("sm1??",),
    ),
    PackedRow(
        "any other", backends=ANY, formats=(*FP8, *FP4), path=DEQUANTISE, why="core dequantises there too",
        source="ComfyUI 0.33, pick_operations", ask=False,
    ),
)  # fmt: skip
