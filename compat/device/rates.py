"""Peak rates of devices by data sheet, and the work of one operation.

Peak rates from vendors' data sheets, not measurements: real programs stay below them, and a time derived from them is
called modelled. Two things read this table: the clock of the simulated accelerator, and forecasts of time for devices
that were never timed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

TERA, GIGA = 1e12, 1e9
PCIE_3, PCIE_4, PCIE_5 = 15.754 * GIGA, 31.508 * GIGA, 63.015 * GIGA  # x16, one direction, after 128b/130b coding
LAUNCH_SECONDS = 5e-6  # of a kernel or a copy; no data sheet has it, eager torch needs about as much on every device
FREE = (
    "empty",
    "new_empty",
    "_has_compatible_shallow_copy_type",
    "_unsafe_view",
    "_reshape_alias",
    "lift_fresh",
    "detach",
    "record_stream",
    "resize_",
    "set_",
)
WRITE_ONLY = ("zeros", "ones", "fill_", "zero_", "full", "arange", "scalar_tensor")


@dataclass(frozen=True, slots=True)
class Rates:
    """Peak rates of one device, per second.

    Args:
        name: as the driver says it, or the part of it that tells the device.
        fp16, bf16, fp32: FLOPs per second of matrix products in fp16 and bf16 with fp32 sums, and in fp32; without
            structured sparsity.
        memory: bytes per second of the device's own memory.
        link: bytes per second of the link to the host, which carries both directions at once.
        source: what confirms which figure, and what nothing did.
        launch: seconds before a kernel or a copy begins.
        unified: whether host and device share one memory, so that a copy reads and writes it.
    """

    name: str
    fp16: float
    bf16: float
    fp32: float
    memory: float
    link: float
    source: str
    launch: float = LAUNCH_SECONDS
    unified: bool = False

    def flops(self, dtype: torch.dtype) -> float:
        """FLOPs per second of products of ``dtype``."""
        return {torch.float16: self.fp16, torch.bfloat16: self.bf16}.get(dtype, self.fp32)


# Looked up on 2026-11-22 in stored copies of public pages. The makers' own pages were not among them, so each source
# names what it confirms, and what nothing did.
RATES: Mapping[str, Rates] = {
    rates.name: rates
    for rates in (
        Rates(
            name="RTX 2060", fp16=25.8 * TERA, bf16=6.45 * TERA, fp32=6.45 * TERA, memory=336 * GIGA, link=PCIE_3,
            source="1920 cores, 240 tensor cores, 1.68 GHz, 6.45 TFLOPS, 336 GB/s: cputronic.com/en/gpu/nvidia-geforce-"
            "rtx-2060; 52 tensor TFLOPS, NVIDIA's figure with fp16 sums: galport.com; half of it with fp32 sums on "
            "GeForce: not confirmed; no bf16 units",
        ),
        Rates(
            name="RTX 3060", fp16=25.5 * TERA, bf16=25.5 * TERA, fp32=12.74 * TERA, memory=360 * GIGA, link=PCIE_4,
            source="3584 cores, 1.777 GHz, 360 GB/s: pcpartdb.com/gpus/view/nvidia-geforce-rtx-3060-12-gb-ga104; 101 "
            "tensor TFLOPS with sparsity and fp16 sums, NVIDIA's figure: techtaks.com/geforce-rtx-3060-nvidia-finally-"
            "details-the-specifications; a quarter of it is dense with fp32 sums, as for the RTX 3060 Ti in gist "
            "getianao/33fb5306ba896193c7ae59ec64794283",
        ),
        Rates(
            name="RTX 4090", fp16=165.2 * TERA, bf16=165.2 * TERA, fp32=82.6 * TERA, memory=1008 * GIGA, link=PCIE_4,
            source="dense fp16 and bf16 with fp32 sums, fp32, memory: waredb.com/processor/nvidia-geforce-rtx-4090",
        ),
        Rates(
            name="RX 6700 XT", fp16=26.43 * TERA, bf16=13.21 * TERA, fp32=13.21 * TERA, memory=384 * GIGA, link=PCIE_4,
            source="2560 lanes, 2.581 GHz, 384 GB/s: io-tech.fi/uutinen/amd-julkaisi-uuden-radeon-rx-6700-xt-"
            "naytonohjaimen-rdna2-navi-22; fp16 at twice the rate of fp32, as of the RX 6950 XT: bloglaralemi.com/2022/"
            "11/14/amd-radeon-rx-7900-collection-deep-dive; no bf16 units",
        ),
        Rates(
            name="RX 7900 XTX", fp16=122.8 * TERA, bf16=122.8 * TERA, fp32=61.4 * TERA, memory=960 * GIGA, link=PCIE_4,
            source="123 TFLOPS in fp16, 61.4 in fp32, 960 GB/s: bloglaralemi.com/2022/11/14/amd-radeon-rx-7900-"
            "collection-deep-dive; WMMA in bf16 at the rate of fp16: not confirmed",
        ),
        Rates(
            name="Arc A770", fp16=131.0 * TERA, bf16=131.0 * TERA, fp32=17.2 * TERA, memory=560 * GIGA, link=PCIE_4,
            source="512 XMX units, 2.1 GHz, 560 GB/s, Intel's figures: svethardware.cz/intel-zverejnil-oficialni-"
            "specifikace-grafickych-karet-arc/58344; 4096 lanes: fpsbench.com; 262 TOPS in int8, half of it in fp16 "
            "and bf16: not confirmed",
        ),
        Rates(
            name="M2", fp16=3.6 * TERA, bf16=3.6 * TERA, fp32=3.6 * TERA, memory=100 * GIGA, link=50.0 * GIGA,
            source="10 GPU cores, 100 GB/s unified memory, which a copy reads and writes: macrumors.com/2022/06/06/"
            "apple-announces-m2-chip-with-support-for-up-to-24gb-memory; 3.6 TFLOPS: not confirmed",
            unified=True,
        ),
        Rates(
            name="H100", fp16=989.4 * TERA, bf16=989.4 * TERA, fp32=66.9 * TERA, memory=3350 * GIGA, link=PCIE_5,
            source="SXM5, dense fp16 and bf16, fp32: glennklockwood.com/garden/processors/h100; 3350 GB/s, PCIe 5.0, "
            "and the same with sparsity from NVIDIA's table: archive-lib.hpctech.co.jp/gpuproduct/nvidia-h100.html",
        ),
    )
}  # fmt: skip


def published_rates(device_name: str) -> Rates | None:
    """The row of a device by the name that its driver says; None for one that the table lacks.

    A row is for exactly its model: ``RTX 4090`` is not ``RTX 4090 Laptop GPU`` or ``M2`` a part of ``M2 Max``.
    """
    words = device_name.replace("(R)", "").replace("(TM)", "").split()
    ends = ("GPU", "PCIe", "SXM5", "80GB", "HBM3", "12GB", "6GB", "Graphics")
    while words and words[-1] in ends:
        words.pop()
    if words and words[-1] == "Laptop":
        return None
    return next((rates for name, rates in RATES.items() if words[-len(name.split()) :] == name.split()), None)


def work_of(function: Any, args: Any, kwargs: Any, result: Any) -> tuple[float, int]:
    """FLOPs and bytes of one dispatched operation: each input once, however far it is broadcast, and each output.

    Args:
        function: an overload of an operator, as a dispatch mode is given it.
        args, kwargs: its arguments.
        result: what it returned; on any device, meta too.
    """
    name = function.__name__.partition(".")[0]
    if function.is_view or name.startswith(FREE):
        return 0.0, 0
    count: Callable[..., Any] | None = flop_registry.get(function.overloadpacket)
    sizes = [arg for arg in args if not isinstance(arg, torch.dtype)]  # the dtype of a result is no size of a product
    flops = 0.0 if count is None else float(count(*sizes, **(kwargs or {}), out_val=result))
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
