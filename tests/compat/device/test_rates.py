"""Published rates: which row a device has, and what an operation and a copy take at them."""

import pytest
import torch
from anygpu.compat.device.rates import LAUNCH_SECONDS, RATES, published_rates, work_of
from torch.utils._python_dispatch import TorchDispatchMode


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", ""),
        ("NVIDIA GeForce RTX 4090 D", ""),
        ("NVIDIA GeForce RTX 3060 Ti", ""),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("AMD Radeon RX 6700 XT", "RX 6700 XT"),
        ("Intel(R) Arc(TM) A770 Graphics", "Arc A770"),
        ("Apple M2", "M2"),
        ("Apple M2 Max", ""),
        ("", ""),
    ],
)
def test_a_row_is_for_exactly_its_model(name, row):
    rates = published_rates(name)
    assert (rates.name if rates else "") == row


def test_every_row_names_its_source_and_no_rate_is_missing():
    for rates in RATES.values():
        assert len(rates.source) > 40
        assert min(rates.fp16, rates.bf16, rates.fp32, rates.memory, rates.link) > 1e9
        assert rates.fp16 >= rates.fp32 >= 1e12 and rates.memory > rates.link


def test_rates_are_in_flops_and_bytes_per_second():
    rates = RATES["RTX 4090"]
    assert rates.flops(torch.bfloat16) == pytest.approx(165.2e12) and rates.memory == pytest.approx(1008e9)
    assert rates.copy_seconds(31.508e9) == pytest.approx(1 + LAUNCH_SECONDS)


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
