"""Bits arrive as they left: every pattern, in both directions, by integers where the plain copy lies."""

import pytest
import torch
from anygpu.compat.device.execution import BITS, HALVES, bf16_bits_to_fp32
from anygpu.compat.errors import UnsupportedError
from anygpu.compat.memory import transfer
from anygpu.compat.memory.transfer import Transfer, put_back, transfer_for
from simulated import accelerator

PATTERNS = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(BITS)


def numbers(dtype: torch.dtype) -> torch.Tensor:
    """Every value of ``dtype`` that is a number, infinities included."""
    values = PATTERNS.view(dtype)
    return values[~values.isnan()]


def corrupted(dtype: torch.dtype):
    """A copy to the host that zeroes tensors of ``dtype``."""

    def after(name, arguments, results):
        target, source = arguments[:2]
        if target.dtype is dtype and source.device.type == accelerator.NAME and target.device.type == "cpu":
            target.zero_()

    return [accelerator.hook(name, after=after) for name in ("aten::copy_", "aten::_copy_from")]


def equal_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return found.dtype is expected.dtype and torch.equal(found.view(BITS), expected.view(BITS))


@pytest.mark.parametrize("dtype", HALVES)
def test_every_number_survives_the_way_there_and_back(acc, dtype):
    values, way = numbers(dtype), Transfer(acc, dtype)
    there = way.to_device(values)
    assert there.device == acc and there.dtype is dtype
    assert equal_bits(way.to_host(there), values)
    assert torch.equal(way.to_host_fp32(there), values.float())
    strided = values[:4096].view(64, 64).t()
    assert equal_bits(way.to_host(way.to_device(strided)), strided)


def test_bits_travel_as_integers_where_the_copy_to_the_host_is_corrupt(acc):
    values = numbers(torch.bfloat16)
    first, second = corrupted(torch.bfloat16)
    with first, second:
        there = values.to(acc)
        assert not equal_bits(there.cpu(), values), "the fault is not there"
        way = transfer_for(acc, torch.bfloat16)
        assert equal_bits(way.to_host(there), values)
        assert torch.equal(way.to_host_fp32(there), values.float())


def test_a_device_that_damages_integers_too_is_refused(acc):
    first, second = corrupted(torch.bfloat16)
    third, fourth = corrupted(BITS)
    with first, second, third, fourth, pytest.raises(UnsupportedError, match="returns other bits of bfloat16"):
        transfer_for(acc, torch.bfloat16)


def test_no_cast_is_made_on_the_device(acc):
    casts = []

    def seen(name, arguments):
        target, source = arguments[:2]
        if target.dtype is not source.dtype:
            casts.append((source.device.type, source.dtype, target.device.type, target.dtype))

    way = Transfer(acc, torch.bfloat16)
    with accelerator.hook("aten::copy_", before=seen), accelerator.hook("aten::_copy_from", before=seen):
        way.to_host_fp32(way.to_device(torch.randn(64)))
        assert not casts, casts
        torch.randn(64).to(acc, torch.bfloat16).float().cpu()
        assert casts, "the plain way is what the hook must see"


def test_widened_is_exact_without_a_cast(acc):
    values = PATTERNS.view(torch.bfloat16)
    found = bf16_bits_to_fp32(values.to(acc)).cpu()
    expected = PATTERNS.to(torch.int32) << 16
    assert torch.equal(found.view(torch.int32), expected)
    assert torch.equal(found[~values.isnan()], values.float()[~values.isnan()])


def test_integers_are_sent_as_they_are(acc):
    counts, way = torch.arange(5), Transfer(acc, torch.bfloat16)
    assert torch.equal(way.to_host_fp32(way.to_device(counts)), counts)


def test_weights_go_back_although_one_is_interrupted(monkeypatch):
    weights = [torch.zeros(1), torch.zeros(1), torch.zeros(1)]
    interrupts, plain = [KeyboardInterrupt("first"), KeyboardInterrupt("second")], transfer.set_data

    def interrupted(tensor, data):
        if interrupts:
            raise interrupts.pop(0)
        plain(tensor, data)

    monkeypatch.setattr(transfer, "set_data", interrupted)
    with pytest.raises(KeyboardInterrupt, match="first"):
        put_back([(weight, torch.ones(1)) for weight in weights])
    assert [weight.item() for weight in weights] == [1, 1, 1]
