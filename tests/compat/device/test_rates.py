"""Published rates: which row a device has, and what an operation and a copy take at them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from anygpu.compat.device.facts import DeviceFacts
from anygpu.compat.device.rates import GENERATIONS, PCIE_4, RATES, published_rates, rates_of, work_of
from torch.utils._python_dispatch import TorchDispatchMode

GB = 2**30
NAMES = {  # as drivers write them, with gigabytes -> the row; empty: rightly none
    "NVIDIA GeForce GTX 1060 6GB": (6, "GTX 1060"),
    "NVIDIA GeForce GTX 1080 Ti": (11, "GTX 1080 Ti"),
    "NVIDIA GeForce GTX 1660 SUPER": (6, "GTX 1660 Super"),
    "NVIDIA GeForce RTX 2060": (6, "RTX 2060"),
    "NVIDIA GeForce RTX 2060 SUPER": (8, "RTX 2060 Super"),
    "NVIDIA GeForce RTX 2080 Ti": (11, "RTX 2080 Ti"),
    "NVIDIA GeForce RTX 3050": (8, "RTX 3050"),
    "NVIDIA GeForce RTX 3060": (12, "RTX 3060"),
    "NVIDIA GeForce RTX 3060 Laptop GPU": (6, "RTX 3060 Laptop"),
    "NVIDIA GeForce RTX 3060 Ti": (8, "RTX 3060 Ti"),
    "NVIDIA GeForce RTX 3070": (8, "RTX 3070"),
    "NVIDIA GeForce RTX 3080": (10, "RTX 3080"),
    "NVIDIA GeForce RTX 3080 Laptop GPU": (16, "RTX 3080 Laptop"),
    "NVIDIA GeForce RTX 3090": (24, "RTX 3090"),
    "NVIDIA GeForce RTX 3090 Ti": (24, "RTX 3090 Ti"),
    "NVIDIA GeForce RTX 4050 Laptop GPU": (6, "RTX 4050 Laptop"),
    "NVIDIA GeForce RTX 4060": (8, "RTX 4060"),
    "NVIDIA GeForce RTX 4060 Laptop GPU": (8, "RTX 4060 Laptop"),
    "NVIDIA GeForce RTX 4060 Ti": (16, "RTX 4060 Ti"),
    "NVIDIA GeForce RTX 4070": (12, "RTX 4070"),
    "NVIDIA GeForce RTX 4070 Laptop GPU": (8, "RTX 4070 Laptop"),
    "NVIDIA GeForce RTX 4070 SUPER": (12, "RTX 4070 Super"),
    "NVIDIA GeForce RTX 4070 Ti SUPER": (16, "RTX 4070 Ti Super"),
    "NVIDIA GeForce RTX 4080": (16, "RTX 4080"),
    "NVIDIA GeForce RTX 4080 Laptop GPU": (12, "RTX 4080 Laptop"),
    "NVIDIA GeForce RTX 4090": (24, "RTX 4090"),
    "NVIDIA GeForce RTX 4090 Laptop GPU": (16, "RTX 4090 Laptop"),
    "NVIDIA GeForce RTX 5060 Ti": (16, "RTX 5060 Ti"),
    "NVIDIA GeForce RTX 5070": (12, "RTX 5070"),
    "NVIDIA GeForce RTX 5070 Ti": (16, "RTX 5070 Ti"),
    "NVIDIA GeForce RTX 5080": (16, "RTX 5080"),
    "NVIDIA GeForce RTX 5090": (32, "RTX 5090"),
    "NVIDIA GeForce RTX 5090 Laptop GPU": (24, "RTX 5090 Laptop"),
    "Tesla T4": (15, "T4"),
    "Tesla P40": (24, "P40"),
    "Tesla P100-PCIE-16GB": (16, "P100 PCIe"),
    "Tesla V100-SXM2-32GB": (32, "V100 SXM2"),
    "NVIDIA A10": (24, "A10"),
    "NVIDIA RTX A6000": (48, "RTX A6000"),
    "NVIDIA A100-SXM4-40GB": (40, "A100 SXM4 40GB"),
    "NVIDIA A100-SXM4-80GB": (80, "A100 SXM4"),
    "NVIDIA A100 80GB PCIe": (80, "A100 PCIe"),
    "NVIDIA L4": (23, "L4"),
    "NVIDIA L40S": (45, "L40S"),
    "NVIDIA H100 80GB HBM3": (80, "H100"),
    "NVIDIA H100 PCIe": (80, "H100 PCIe"),
    "NVIDIA H200": (140, "H200"),
    "NVIDIA B200": (179, "B200"),
    "AMD Radeon RX 5700 XT": (8, "RX 5700 XT"),
    "AMD Radeon RX 6600": (8, "RX 6600"),
    "AMD Radeon RX 6700 XT": (12, "RX 6700 XT"),
    "AMD Radeon RX 6800 XT": (16, "RX 6800 XT"),
    "AMD Radeon RX 7600": (8, "RX 7600"),
    "AMD Radeon RX 7900 XT": (20, "RX 7900 XT"),
    "Radeon RX 7900 XTX": (24, "RX 7900 XTX"),
    "AMD Radeon RX 9070 XT": (16, "RX 9070 XT"),
    "AMD Instinct MI300X": (191, "MI300X"),
    "Intel(R) Arc(TM) A770 Graphics": (15.6, "Arc A770"),
    "Intel(R) Arc(TM) B580 Graphics": (11.6, "Arc B580"),
    "Apple M2": (16, "M2"),
}
STRANGERS = (  # of the same words, but other models
    ("NVIDIA GeForce RTX 4090 D", 24),
    ("NVIDIA GeForce RTX 3070 Ti Laptop GPU", 8),
    ("NVIDIA GeForce RTX 2080 with Max-Q Design", 8),
    ("NVIDIA GeForce GTX 1060 3GB", 3),
    ("NVIDIA GeForce RTX 3080", 12),
    ("NVIDIA GeForce RTX 3050", 6),
    ("NVIDIA H100 NVL", 94),
    ("AMD Radeon(TM) Graphics", 16),
    ("Intel(R) Arc(TM) Graphics", 16),
    ("Apple M2 Max", 32),
    ("NVIDIA GeForce", 8),
    ("", 0),
)


def test_names_as_drivers_write_them_have_the_row_of_their_model():
    assert len(NAMES) == 60
    for name, (size, row) in NAMES.items():
        rates = published_rates(name, int(size * GB))
        assert rates is not None and rates.name == row, name
    for name, size in STRANGERS:
        assert published_rates(name, int(size * GB)) is None, name


def test_one_name_with_two_memories_is_two_models():
    rates = {size: published_rates("NVIDIA GeForce RTX 2060", size * GB) for size in (6, 12)}
    assert rates[12].fp16 == 28.7e12 > rates[6].fp16 == 25.8e12
    assert published_rates("NVIDIA GeForce RTX 2060").name == "RTX 2060", "no memory is known: the first"


def test_every_card_has_a_generation_with_a_source_and_no_rate_is_missing():
    page = (Path(__file__).parents[3] / "docs" / "memory.md").read_text(encoding="utf-8")
    assert len(RATES) >= 60 and f"(`compat/device/cards.csv`, {len(RATES)}, and" in page
    for rates in RATES.values():
        assert min(rates.fp16, rates.bf16, rates.fp32, rates.memory, rates.link) > 1e9
        assert rates.memory > rates.link and rates.unified == (not rates.memory_gb)
    assert {rates.generation for rates in RATES.values()} == set(GENERATIONS)
    for own in GENERATIONS.values():
        assert own.source and 0.5 < own.product <= 1.2 and all(0.1 < share <= 1.2 for share in own.attention.values())


@pytest.mark.parametrize(("name", "product", "fp32", "attention"), [
    ("L20", 114.1e12, 59.8e12, None),  # zzc0721/torch-performance-test-data#107; fp32 as on the data sheet
    ("H20", 142.3e12, 44e12, 83.7e12),  # the same, #77; Dao-AILab/flash-attention#1310
])  # fmt: skip
def test_cards_whose_tensor_cores_were_cut_have_shares_of_their_own(name, product, fp32, attention):
    rates = RATES[name]
    own = GENERATIONS[rates.generation]
    assert rates.bf16 * own.product == pytest.approx(product, rel=0.01) and rates.fp32 == pytest.approx(fp32, rel=0.01)
    assert attention is None or rates.bf16 * rates.attention("native_flash") == pytest.approx(attention, rel=0.01)


def test_rates_are_in_flops_and_bytes_per_second():
    rates = RATES["RTX 4090"]
    assert rates.flops(torch.bfloat16) == pytest.approx(165.2e12) and rates.memory == pytest.approx(1008e9)
    assert rates.link == PCIE_4 == pytest.approx(31.508e9, rel=1e-4)
    assert RATES["RTX 4060"].link == PCIE_4 / 2, "eight lanes"
    assert RATES["M2"].link == RATES["M2"].memory / 2, "a copy reads and writes it"


def card(name: str, arch: str = "", clocks: tuple[int, ...] = (), **more: Any) -> DeviceFacts:
    return DeviceFacts(torch.device("cuda"), "cuda", arch, "cuda-sm80+", name, 24 * GB, "2.13", clocks=clocks, **more)


def test_a_card_without_a_row_has_the_rates_of_its_units_and_clocks():
    assert rates_of(card("NVIDIA GeForce RTX 4090", "sm89", (1, 1, 1, 1))) == RATES["RTX 4090"], "the row comes first"
    rates = rates_of(card("NVIDIA GeForce RTX 4090 D", "sm89", (114, 2_520_000, 10_501_000, 384), link=2e9))
    assert rates.fp16 == pytest.approx(147.1e12, rel=0.01) and rates.memory == pytest.approx(1008e9, rel=0.01)
    assert rates.generation == "ada" and rates.link == 2e9
    assert rates_of(card("NVIDIA RTX 5000 Ada Generation", "sm89", (100, 2_550_000, 9_001_000, 256))) is None
    assert rates_of(card("NVIDIA GeForce RTX 4090 D", "sm89")) is None
    bare = rates_of(card("NVIDIA GeForce GTX 1660", "sm75", (22, 1_785_000, 4_001_000, 192)))
    assert (bare.generation, bare.fp32) == ("gtx16", pytest.approx(5.03e12, rel=0.01)), "it has no tensor cores"


def test_shares_of_attention_are_those_of_its_kernel():
    assert RATES["H100"].attention("native_cudnn") > RATES["H100"].attention("native_flash") == 0.35
    assert RATES["T4"].attention("native_efficient") == RATES["T4"].attention("memory-efficient") == 0.3
    assert RATES["RX 6800"].attention("in chunks") == RATES["RX 6800"].attention("native_math") < 0.2


def test_work_is_counted_on_meta_tensors():
    seen = {}

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            seen[function.__name__.partition(".")[0]] = work_of(function, args, kwargs, result)
            return result

    with Counting():
        x = torch.empty(3, 5, device="meta")
        torch.addmm(torch.empty(7, device="meta"), x, torch.empty(5, 7, device="meta"))
        (x.t() + torch.empty(1, 1, device="meta").expand(5, 3)).zero_()
    assert seen["empty"] == seen["t"] == seen["expand"] == (0.0, 0)
    assert seen["addmm"] == (2 * 3 * 5 * 7, 4 * (7 + 15 + 35 + 21))
    assert seen["add"] == (0.0, 4 * (15 + 1 + 15)) and seen["zero_"] == (0.0, 4 * 15)
