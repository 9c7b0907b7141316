"""Peak rates of devices by data sheet, the share of them that programs reach, and the work of one operation.
``cards.csv`` has a row per card, ``generations.csv`` what those of a generation share: for forecasts of time on devices
that were never timed, and for the clock of the simulated accelerator."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ..errors import csv_file
from .facts import GIBIBYTE, DeviceFacts

HERE = Path(__file__).parent
TERA, GIGA = 1e12, 1e9
PRODUCT, CONVOLUTION, ATTENTION, OTHER, COPY = "product", "convolution", "attention", "other", "copy over the link"
LANE = {3: 0.9846 * GIGA, 4: 1.9693 * GIGA, 5: 3.9385 * GIGA}  # of PCIe, one direction, after 128b/130b coding
PCIE_3, PCIE_4 = 16 * LANE[3], 16 * LANE[4]
LAUNCH_SECONDS = 5e-6  # of a kernel or a copy; no data sheet has it, eager torch needs about as much on every device
FREE = (
    "empty", "new_empty", "_has_compatible_shallow_copy_type", "_unsafe_view", "_reshape_alias", "lift_fresh",
    "detach", "record_stream", "resize_", "set_",
)  # fmt: skip
WRITE_ONLY = ("zeros", "ones", "fill_", "zero_", "full", "arange", "scalar_tensor")
FLASH, EFFICIENT, CUDNN, MATH = "flash", "memory-efficient", "cuDNN", "in chunks"
KERNELS = {"native_efficient": EFFICIENT, "xformers": EFFICIENT, "native_cudnn": CUDNN, "native_math": MATH}
KERNELS |= {"sparse": EFFICIENT}  # whose calls have a mask
MEMORY, PINNED_LINK, PLAIN_LINK = 0.9, 0.8, 0.4  # shares reached: RTX 4090 0.91 (tinygrad/open-gpu-kernel-modules#6),
# A800 0.89 (mli/transformers-benchmarks#4); pinned copies 0.76 to 0.90 (ZaidQureshi/bam#54, the same tinygrad #29);
# copies from memory that is not pinned pass the host's memory twice: assumed half of that
LESS, MORE = 0.88, 1.05  # of the memory a card is sold with: what its driver may state, as error correction takes some
CONVOLVED_SHARE = 0.55  # of the rate of products: an H100 0.51 in bf16, 0.55 in fp16, 0.57 in TF32 (docs/machines.md)
EIGHT_BIT = 1.9  # speed-up of 8-bit attention on cards whose fp32 sums run at half the rate of fp16 sums; others have
# none: kohya-ss/musubi-tuner#217 (RTX A6000) and thu-ml/SageAttention#3 (A100) saw no gain


@dataclass(frozen=True, slots=True)
class Generation:
    """Shares that the cards of one generation have in common."""

    fp16: float  # rates of products as shares of a card's figure
    bf16: float
    fp32: float
    sums: float  # speed-up of fp16 products if they sum in fp16 too
    int8: float  # speed-up of products of 8-bit operands, as the next; 0 where there are none or none is known
    fp8: float
    product: float  # share of these rates that products of transformers reach, between published best sizes
    attention: Mapping[str, float]  # share that exact attention reaches, by kernel; a missing one is assumed
    source: str


def _generation(row: Mapping[str, str]) -> Generation:
    shares = {name: float(row[name]) for name in ("fp16", "bf16", "fp32", "sums", "int8", "fp8", "product")}
    kernels = {name: float(row[name]) for name in (FLASH, EFFICIENT, CUDNN) if row[name]}
    return Generation(**shares, attention=kernels, source=row["source"])


# Rates of dtypes: Wikipedia's tables as in voidful/gpu-info-api, the makers' data sheets, gpuopen.com. Products: the
# best size of a matmul in torch. Cards of which no attention was found take half of their products' share by FLASH, 0.4
# by EFFICIENT and 0.15 by MATH: assumed.
GENERATIONS: Mapping[str, Generation] = {row["name"]: _generation(row) for row in csv_file(HERE / "generations.csv")}
TF32 = ("ampere", "ampere_pro", "a100", "ada", "ada_pro", "l20", "blackwell", "blackwell_pro", "hopper", "h20")
LOSSY_ATTENTION = ("sage", "kitchen_int8")
GTX = "gtx16"  # cards of sm75 without tensor cores, by their names
UNITS = {"sm70": 1024, GTX: 128, "sm75": 512, "sm80": 2048, "sm86": 512, "sm89": 512, "sm90": 4096, "sm120": 512}
KINDS = {"sm70": "volta", GTX: GTX, "sm75": "turing", "sm80": "a100", "sm86": "ampere", "sm89": "ada", "sm90": "hopper"}
VENDOR = re.compile(r"nvidia|geforce|tesla|amd|radeon|instinct|intel|apple|graphics|gpu|hbm\d\w?|sxm5|\d+gb")


@dataclass(frozen=True, slots=True)
class Rates:
    """Peak rates of one device, per second."""

    name: str  # the part of the driver's name that tells the device
    fp16: float  # FLOPs of products with fp32 sums, without structured sparsity
    bf16: float
    fp32: float
    memory: float  # bytes of the device's own memory
    link: float  # bytes of the link to the host, in each direction at once
    launch: float = LAUNCH_SECONDS  # seconds before a kernel or a copy begins
    unified: bool = False  # host and device share one memory, so that a copy reads and writes it
    generation: str = ""  # a key of GENERATIONS
    memory_gb: tuple[int, ...] = ()  # the sizes in which the model is sold; none where it has the host's

    def flops(self, dtype: torch.dtype) -> float:
        return {torch.float16: self.fp16, torch.bfloat16: self.bf16}.get(dtype, self.fp32)

    def attention(self, kernel: str) -> float:
        """The share of its rate that exact attention reaches by ``kernel``, as ``Attention.label`` names it."""
        own, kind = GENERATIONS[self.generation], KERNELS.get(kernel, kernel)
        best = own.attention.get(FLASH, 0.5 * own.product)
        return own.attention.get(kind, {EFFICIENT: 0.4, MATH: 0.15}.get(kind, best))


def _row(name: str, generation: str, fp16: float, memory: float, link: float, sizes: tuple[int, ...] = ()) -> Rates:
    """The rates of a card: ``fp16`` FLOPs, ``memory`` and ``link`` bytes per second; a link of 0: memory is shared."""
    own = GENERATIONS[generation]
    return Rates(
        name=name, fp16=fp16 * own.fp16, bf16=fp16 * own.bf16, fp32=fp16 * own.fp32, memory=memory,
        link=link or memory / 2, unified=not link, generation=generation, memory_gb=sizes,
    )  # fmt: skip


def _read() -> dict[str, Rates]:
    """The rows of ``cards.csv``. Sources: those above; professional cards also citsjtu2020/LLM-Prof (hardware_spec.md)
    and astroC86/gpu-datasheet; laptops at full power, those of RTX 50 with the clock of the desktop cards' memory."""
    rows = {}
    for row in csv_file(HERE / "cards.csv"):
        generation, _, lanes = row["link"].partition("x")
        link = LANE[int(generation)] * int(lanes) if lanes else 0.0
        sizes = tuple(map(int, filter(None, row["memory_gb"].split("/"))))
        fp16, memory = float(row["fp16_tflops"]) * TERA, float(row["memory_gb_s"]) * GIGA
        rows[row["name"]] = _row(row["name"], row["generation"], fp16, memory, link, sizes)
    return rows


RATES: Mapping[str, Rates] = _read()


@cache
def _words(name: str) -> list[str]:
    """The words of a name that tell one model of card from another."""
    words = re.sub(r"\((R|TM)\)|[-/]", " ", name).lower().split()
    return [word for word in words if not VENDOR.fullmatch(word)]


def published_rates(device_name: str, total_bytes: int = 0) -> Rates | None:
    """The row of a device by its driver's name and ``total_bytes`` (0: unknown); None for one that the table lacks.
    A row is for exactly its model: ``RTX 4090`` is no ``RTX 4090 Laptop GPU``, and another memory is another model."""
    stated, words = re.search(r"(\d+)\s?GB", device_name, re.IGNORECASE), _words(device_name)
    size = int(stated[1]) if stated else total_bytes / GIBIBYTE
    for rates in (rates for rates in RATES.values() if words and _words(rates.name) == words):
        if not (size and rates.memory_gb) or any(LESS * gb <= size <= MORE * gb for gb in rates.memory_gb):
            return rates
    return None


def quicker_by(facts: DeviceFacts, sums: bool, stored: str, attention: str) -> dict[str, float]:
    """Speed-up by lossy choices per kind of operation, as in 1.9 times as fast; kinds without a speed-up are left out.
    ``sums``: fp16 products sum in fp16. ``stored``: storage of weights multiplied packed. ``attention``: its kernel."""
    rates = rates_of(facts)
    own = None if rates is None else GENERATIONS[rates.generation]
    if own is None:
        return {}
    eight = getattr(own, stored.replace("w4a8", "int8"), 0)  # products of 8 bits never sum in fp16
    factors = {PRODUCT: eight or (own.sums if sums else 1)}
    factors[ATTENTION] = EIGHT_BIT if attention in LOSSY_ATTENTION and own.sums > 1 else 1
    return {kind: factor for kind, factor in factors.items() if factor != 1}


def rates_of(facts: DeviceFacts) -> Rates | None:
    """Rates of a device by its row, else by the units and clocks that its driver states; None if unknown.
    NVIDIA's multiprocessors do :data:`UNITS` fp16 FLOPs per clock; the row comes first, as drivers overstate clocks."""
    rates = published_rates(facts.name, facts.total_bytes)
    if rates is not None or not facts.clocks or 0 in facts.clocks:
        return rates
    units, clock, memory_clock, bus = facts.clocks
    arch = GTX if facts.arch == "sm75" and re.search(r"\b(GTX|MX)", facts.name) else facts.arch
    generation = KINDS.get(arch, "blackwell")
    if arch not in UNITS or ("geforce" not in facts.name.lower() and UNITS[arch] == 512):
        return None  # a professional card of these does twice as much, which its name does not tell
    memory = 2e3 * memory_clock * bus / 8  # kHz, two transfers a clock, bits to bytes
    return _row(facts.name, generation, units * 1e3 * clock * UNITS[arch], memory, facts.link or PCIE_3)


def work_of(function: Any, args: Any, kwargs: Any, result: Any) -> tuple[float, int]:
    """FLOPs and bytes of one dispatched operation: of each input that it reads, once however far it is broadcast, and
    of each output; none for views and :data:`FREE` operations."""
    name = function.__name__.partition(".")[0]
    if function.is_view or name.startswith(FREE):
        return 0.0, 0
    flops_of: Callable[..., Any] | None = flop_registry.get(function.overloadpacket)
    sizes = [arg for arg in args if not isinstance(arg, torch.dtype)]  # the dtype of a result is no size of a product
    flops = 0.0 if flops_of is None else float(flops_of(*sizes, **(kwargs or {}), out_val=result))
    outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if name.removeprefix("new_").startswith(WRITE_ONLY):
        inputs = []
    elif name == "copy_" or "out" in (kwargs or {}):  # the target is an argument too, but is not read
        inputs = [tensor for tensor in inputs if not any(tensor is output for output in outputs)]
    return flops, sum(map(_stored_bytes, (*inputs, *outputs)))


def _stored_bytes(tensor: torch.Tensor) -> int:
    """Bytes that are read or written for a tensor: an expanded dimension is stored once."""
    sizes = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride != 0]
    return int(torch.Size(sizes).numel()) * tensor.element_size()
