"""The device itself: placement, mismatches, memory, copies, random numbers, autocast, streams, hooks."""

import gc
import io
import threading

import pytest
import torch
import torch.nn.functional as F

from simulated import accelerator

MIB = 1 << 20
TWO_DEVICES = "Expected all tensors to be on the same device, but found at least two devices"


# ---- what torch says about it --------------------------------------------------------------------


def test_torch_names_the_accelerator_while_it_is_plugged_in(acc):
    assert torch.accelerator.current_accelerator(check_available=True) == torch.device("acc")
    assert torch.accelerator.is_available()
    assert torch.accelerator.device_count() == torch.acc.device_count() == 2
    assert torch.acc.get_device_properties(1).name == "Simulated accelerator 1"


def test_unplugged_torch_finds_no_device():
    if reason := accelerator.reason():
        pytest.skip(reason)
    with accelerator.fresh():
        pass
    assert torch.accelerator.current_accelerator(check_available=True) is None
    assert torch.accelerator.device_count() == 0


def test_loading_again_changes_nothing(acc):
    before = torch.acc
    assert accelerator.load() == accelerator.load() == acc
    assert torch.acc is before


def test_current_device(acc):
    with torch.acc.device(1):
        assert torch.acc.current_device() == 1
        assert torch.ones(1, device="acc").device == torch.device("acc:1")
    torch.acc.set_device("acc:1")
    assert torch.empty(2, device="acc").device.index == 1
    torch.acc.set_device(0)
    with torch.device("acc:1"):
        assert torch.nn.Linear(2, 2).weight.device.index == 1
    with pytest.raises(RuntimeError, match="invalid device ordinal acc:2"):
        torch.empty(1, device="acc:2")


# ---- tensors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.bool, torch.float8_e4m3fn],
    ids=str,
)
def test_copies_there_and_back_keep_every_bit(acc, dtype):
    original = torch.arange(24).reshape(2, 3, 4).to(dtype)
    there = original.to(acc)
    assert there.device == acc and there.dtype == dtype
    across = there.transpose(0, 2).to("acc:1")
    assert across.stride() == there.transpose(0, 2).stride()
    assert torch.equal(across.transpose(0, 2).cpu().view(torch.uint8), original.view(torch.uint8))
    assert torch.equal(there.to(torch.float32).cpu(), original.float())


def test_views_share_memory(acc):
    base = torch.zeros(4, 6, device=acc)
    for view in (base.view(24), base[1], base.as_strided((2,), (3,), 1), base.unfold(0, 2, 1), base.detach(), base.mT):
        assert view.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
        view.add_(1)
    assert base.sum().item() == 24 + 6 + 2 + 36 + 24 + 24
    base[1:3, ::2] = torch.full((2, 3), 7.0)
    assert base[1, 0].item() == 7


def test_resize_and_set(acc):
    tensor = torch.arange(3.0, device=acc)
    tensor.resize_(2, 4)
    assert tensor.shape == (2, 4) and tensor.flatten()[:3].tolist() == [0, 1, 2]
    assert torch.nonzero(tensor > 0, out=torch.empty(0, dtype=torch.int64, device=acc)).shape[1] == 2
    other = torch.empty(0, device=acc).set_(tensor)
    assert other.data_ptr() == tensor.data_ptr() and other.shape == (2, 4)
    tensor.untyped_storage().resize_(0)
    assert accelerator.memory().allocated_bytes == 0


def test_prints_reads_and_refuses_numpy(acc):
    tensor = torch.tensor([1.5, 2.5], device=acc)
    assert repr(tensor) == "tensor([1.5000, 2.5000], device='acc:0')"
    assert tensor[1].item() == 2.5 and tensor.tolist() == [1.5, 2.5] and bool(tensor.any())
    with pytest.raises(TypeError, match="can't convert acc:0 device type tensor to numpy"):
        tensor.numpy()


def test_saves_and_loads(acc):
    stream = io.BytesIO()
    torch.save(torch.arange(3, device=acc), stream)
    for location, device in ((None, "acc:0"), ("cpu", "cpu"), ("acc:1", "acc:1")):
        stream.seek(0)
        assert torch.load(stream, map_location=location).device == torch.device(device)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=lambda mode: mode.__name__)
def test_gradient_free_modes(acc, mode):
    outside = torch.ones(4, device=acc)
    with mode():
        inside = torch.ones(4, device=acc) + outside
        inside[1:] *= 3
        outside.view(2, 2).add_(1)
        assert inside.is_inference() == (mode is torch.inference_mode)
        assert inside.view(2, 2).is_inference() == inside.is_inference()
    assert inside.tolist() == [2, 6, 6, 6] and outside.tolist() == [2, 2, 2, 2]
    assert not outside.is_inference()


def test_gradients(acc):
    layer, image = torch.nn.Conv2d(2, 3, 3), torch.randn(1, 2, 5, 5)
    layer(image).square().sum().backward()
    expected = layer.weight.grad.clone()
    layer.zero_grad()
    layer.to(acc)(image.to(acc)).square().sum().backward()
    assert torch.equal(layer.weight.grad.cpu(), expected)


def test_parameter_data_moves_between_devices(acc):
    layer = torch.nn.Linear(3, 3)
    held, parameter = layer.weight.data, layer.weight
    for device in (acc, torch.device("acc:1"), torch.device("cpu")):
        parameter.data = held.to(device)
        assert layer.weight is parameter and parameter.device == device
        assert torch.equal(parameter.cpu(), held)


# ---- refusals ------------------------------------------------------------------------------------

MISMATCHES = {
    "add": lambda a, b: a + b,
    "add_": lambda a, b: a.add_(b),
    "out": lambda a, b: torch.add(a, a, out=b),
    "matmul": lambda a, b: a @ b,
    "linear": lambda a, b: F.linear(a, b, b[0]),
    "conv3d": lambda a, b: F.conv3d(a.view(1, 1, 1, 3, 3), b.view(1, 1, 1, 3, 3)),
    "layer_norm": lambda a, b: F.layer_norm(a, (3,), b[0]),
    "cat": lambda a, b: torch.cat([a, b]),
    "stack_scalars": lambda a, b: torch.stack([a[0, 0], b[0, 0]]),
    "where": lambda a, b: torch.where(a > 0, b, b),
    "equal": torch.equal,
    "masked_fill": lambda a, b: a.masked_fill(b > 0, 0.0),
    "embedding": lambda a, b: F.embedding(torch.tensor([0, 1], device=a.device), b),
    "index_put": lambda a, b: a.__setitem__(torch.tensor([0, 1]), b[:2]),
    "group": lambda a, b: torch._foreach_add([a], [b]),
}


@pytest.mark.parametrize("other", ["cpu", "acc:1"])
@pytest.mark.parametrize("name", MISMATCHES)
def test_tensors_of_two_devices_are_refused(acc, name, other):
    mine, theirs = torch.ones(3, 3, device=acc), torch.ones(3, 3, device=other)
    for pair in ((mine, theirs), (theirs, mine)):
        with pytest.raises(RuntimeError, match=f"{TWO_DEVICES}, (acc:0 and {other}|{other} and acc:0)!"):
            MISMATCHES[name](*pair)


def test_cpu_scalars_mix_when_they_are_read(acc):
    tensor, scalar = torch.ones(3, device=acc), torch.tensor(2.0)
    for result in (tensor * scalar, scalar * tensor, torch.where(tensor > 0, scalar, tensor), tensor.clamp(min=scalar)):
        assert result.device == acc and result.tolist() == [2, 2, 2]
    with pytest.raises(RuntimeError, match=TWO_DEVICES):
        scalar.add_(tensor.sum())
    with pytest.raises(RuntimeError, match=TWO_DEVICES):
        torch.ones(3) * tensor.sum()


def test_cpu_indices_may_index_device_tensors_only(acc):
    tensor, index = torch.arange(6.0, device=acc), torch.tensor([4, 1])
    assert tensor[index].tolist() == tensor[index.to(acc)].tolist() == [4, 1]
    assert tensor[torch.arange(6) > 4].tolist() == [5]
    with pytest.raises(RuntimeError, match="indices should be either on cpu or on the same device as the indexed"):
        torch.arange(6)[index.to(acc)]


def test_operators_of_other_libraries_need_a_kernel_for_the_device(acc):
    library = torch.library.Library("simulated_test", "DEF")
    library.define("host_only(Tensor x) -> Tensor")
    library.define("anywhere(Tensor x) -> Tensor")
    library.impl("host_only", lambda x: x + 1, "CPU")
    library.impl("anywhere", lambda x: x + 1, "CompositeExplicitAutograd")
    assert torch.ops.simulated_test.anywhere(torch.ones(1, device=acc)).item() == 2
    with pytest.raises(NotImplementedError, match=r"simulated_test::host_only.* from the 'acc' backend"):
        torch.ops.simulated_test.host_only(torch.ones(1, device=acc))


# ---- memory and copies ---------------------------------------------------------------------------


def test_bytes_are_counted_per_device_and_return_to_zero(acc):
    first, second = torch.empty(MIB, dtype=torch.uint8, device="acc:0"), torch.ones(MIB // 4, device="acc:1")
    assert [accelerator.memory(index).allocated_bytes for index in (0, 1)] == [MIB, MIB]
    view, total = first[10:].view(2, -1), second + second  # a view costs nothing, a result its size
    assert [accelerator.memory(index).allocated_bytes for index in (0, 1)] == [MIB, 2 * MIB]
    assert torch.acc.memory_allocated(1) == torch.accelerator.memory_allocated(1) == 2 * MIB
    del first, second, total
    assert [accelerator.memory(index).allocated_bytes for index in (0, 1)] == [MIB, 0]
    del view
    assert accelerator.memory(0).allocated_bytes == 0
    assert [accelerator.memory(index).peak_bytes for index in (0, 1)] == [MIB, 2 * MIB]
    assert torch.acc.max_memory_allocated(1) == torch.accelerator.max_memory_allocated(1) == 2 * MIB
    torch.acc.reset_peak_memory_stats(1)
    accelerator.reset_peak(0)
    assert [accelerator.memory(index).peak_bytes for index in (0, 1)] == [0, 0]


def test_storage_that_grows_in_an_operator_is_charged(acc):
    out = torch.empty(0, device=acc)
    torch.cat([torch.ones(100, device=acc)] * 2, out=out)
    assert accelerator.memory().allocated_bytes == 800


def test_limit_raises_out_of_memory_and_loses_nothing(acc):
    with accelerator.limit(2 * MIB):
        held = torch.ones(MIB // 4, device=acc)
        assert torch.acc.mem_get_info() == torch.accelerator.get_memory_info() == (MIB, 2 * MIB)
        for refused in (lambda: torch.empty(MIB, device=acc), lambda: held.double(), lambda: torch.ones(MIB).to(acc)):
            with pytest.raises(torch.OutOfMemoryError, match=r"acc out of memory. Tried to allocate .* MiB. acc:0"):
                refused()
        torch.ones(MIB, device="acc:1")  # the other device has its own memory
        assert torch.equal((held + 1).cpu(), torch.full((MIB // 4,), 2.0))
    assert accelerator.memory().allocated_bytes == MIB and accelerator.memory().refusals == 3
    torch.empty(4 * MIB, device=acc)


def test_memory_returns_to_zero_after_a_model(acc):
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64)).to(acc)
    assert accelerator.memory().allocated_bytes == 4 * (64 * 64 + 3 * 64)
    with torch.inference_mode():
        model(torch.randn(8, 64, device=acc))
    model.to("cpu")
    gc.collect()
    assert accelerator.memory().allocated_bytes == 0


def test_copies_are_counted(acc):
    tensor = torch.ones(100).to(acc)
    tensor.to("acc:1")
    tensor.half().cpu()
    tensor[0].item()
    torch.empty(50).copy_(tensor[:50])
    there = accelerator.traffic()
    assert (there.to_device_bytes, there.to_device_copies) == (400, 1)
    assert (there.to_host_bytes, there.to_host_copies) == (200 + 4 + 200, 3)
    assert (accelerator.traffic(1).peer_bytes, accelerator.traffic(1).peer_copies) == (400, 1)
    accelerator.reset_traffic()
    assert accelerator.traffic() == accelerator.Traffic(0, 0, 0, 0, 0, 0)


def test_pinned_memory_is_host_memory(acc):
    pinned = torch.arange(8.0).pin_memory()
    assert pinned.is_pinned() and pinned[3:].is_pinned() and not torch.ones(8).is_pinned()
    assert accelerator.memory().allocated_bytes == 0
    assert torch.equal(pinned.to(acc, non_blocking=True).cpu(), torch.arange(8.0))


def test_threads_count_together(acc):
    def work():
        for _ in range(100):
            torch.ones(64, device="acc:1") @ torch.ones(64, device="acc:1")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert accelerator.memory(1).allocated_bytes == 0 and accelerator.memory(1).peak_bytes >= 512


# ---- random numbers, autocast, streams -----------------------------------------------------------


def test_generators_have_their_own_state(acc):
    generator = torch.Generator(device=acc).manual_seed(7)
    assert generator.device == acc and generator.initial_seed() == 7
    state, first = generator.get_state(), torch.randn(16, device=acc, generator=generator)
    second = torch.randn(16, device=acc, generator=generator)
    assert not torch.equal(first, second)
    assert not torch.equal(first.cpu(), torch.randn(16, generator=torch.Generator().manual_seed(7)))
    generator.set_state(state)
    assert torch.equal(torch.randn(16, device=acc, generator=generator), first)
    with pytest.raises(RuntimeError, match="Expected a 'acc' device type for generator but found 'cpu'"):
        torch.randn(2, device=acc, generator=torch.Generator())
    with pytest.raises(RuntimeError, match="Expected a 'cpu' device type for generator but found 'acc'"):
        torch.randn(2, generator=generator)


def test_default_generators_follow_the_seed(acc):
    torch.manual_seed(3)
    state, first = torch.acc.get_rng_state(), torch.rand(8, device=acc)
    with torch.random.fork_rng(devices=[0], device_type="acc"):
        torch.rand(8, device=acc)
    second = torch.rand(8, device=acc)
    torch.acc.set_rng_state(state)
    assert torch.equal(torch.rand(8, device=acc), first) and torch.equal(torch.rand(8, device=acc), second)
    torch.acc.manual_seed_all(3)
    assert torch.equal(torch.rand(8, device=acc), first)
    assert sorted(torch.randperm(5, device=acc).tolist()) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_autocast_follows_cuda(acc, dtype):
    half, single = torch.ones(2, 3, device=acc, dtype=torch.bfloat16), torch.ones(3, 3, device=acc)
    with torch.autocast(device_type="acc", dtype=dtype):
        assert (half @ single).dtype == F.linear(single, single).dtype == dtype
        assert torch.einsum("nd,df->nf", half, single).dtype == dtype
        assert torch.softmax(half, -1).dtype == F.layer_norm(half, (3,)).dtype == torch.float32
        assert torch.addcmul(half[0], half[0], single[0]).dtype == torch.float32
        assert (half + 1).dtype == torch.bfloat16
        with torch.autocast("acc", enabled=False):
            assert (half @ half.mT).dtype == torch.bfloat16
    assert (single @ single).dtype == torch.float32


def test_streams_and_events(acc):
    stream, event = torch.acc.Stream(), torch.acc.Event(enable_timing=True)
    assert torch.acc.current_stream() == torch.acc.default_stream() != stream
    with torch.acc.stream(stream):
        assert torch.acc.current_stream() == stream
        tensor = torch.ones(3, device=acc)
        tensor.record_stream(stream)
        event.record()
    after = torch.acc.Event(enable_timing=True)
    after.record()
    stream.wait_stream(torch.acc.current_stream())
    stream.wait_event(event)
    torch.acc.current_stream().synchronize()
    torch.acc.synchronize()
    assert event.query() and event.elapsed_time(after) >= 0
    assert torch.acc.current_stream() == torch.acc.default_stream()


# ---- hooks ---------------------------------------------------------------------------------------


def test_hook_makes_an_operator_fail(acc):
    def refuse_volumes(name, arguments):
        if arguments[0].dim() == 5:
            raise NotImplementedError(f"{name}: no 3-D kernels on this device")

    volume, kernel = torch.ones(1, 1, 3, 3, 3, device=acc), torch.ones(1, 1, 3, 3, 3, device=acc)
    with accelerator.hook("aten::convolution*", before=refuse_volumes) as hook:
        with pytest.raises(NotImplementedError, match="aten::convolution: no 3-D kernels"):
            F.conv3d(volume, kernel)
        assert F.conv2d(volume[0], kernel[0]).item() == 27
        assert hook.hits == 2
    assert F.conv3d(volume, kernel).item() == 27


def test_hook_changes_a_result(acc):
    def lose_the_cast(name, arguments, results):
        target, source = arguments[:2]
        if (source.dtype, target.dtype) == (torch.bfloat16, torch.float32):
            results[0].zero_()

    half = torch.ones(3, device=acc, dtype=torch.bfloat16)
    with accelerator.hook("aten::copy_", after=lose_the_cast):
        assert half.float().cpu().tolist() == [0, 0, 0]
        assert half.half().cpu().tolist() == [1, 1, 1]
    assert half.float().cpu().tolist() == [1, 1, 1]


def test_hook_may_use_the_operator_it_watches(acc):
    seen = []
    with accelerator.hook("aten::add*", before=lambda name, arguments: seen.append((name, arguments[0] + 1))) as hook:
        assert (torch.ones(2, device=acc) + 5).tolist() == [6, 6]
    assert hook.hits == len(seen) == 1 and seen[0][0] == "aten::add" and seen[0][1].tolist() == [2, 2]


def test_hook_counts_and_must_name_an_operator(acc):
    query = torch.randn(1, 2, 8, 16, device=acc)
    with accelerator.hook("aten::_scaled_dot_product_flash_attention_for_cpu") as hook:
        F.scaled_dot_product_attention(query, query, query)
        assert hook.hits == 1  # the CPU's own fused kernel, not a decomposition
    with pytest.raises(ValueError, match="found no operator named 'aten::no_such'"), accelerator.hook("aten::no_such"):
        pass


def test_fresh_removes_what_a_test_left_behind(acc):
    attached = accelerator.hook("aten::add", before=lambda name, arguments: pytest.fail("still attached"))
    attached.__enter__()
    accelerator.set_limit(8)
    with accelerator.fresh():
        assert (torch.ones(64, device=acc) + 1).sum().item() == 128


def test_one_request_is_refused_where_it_is_wanted(acc):
    before = accelerator.memory().refusals
    with accelerator.refusal(2):
        first = torch.empty(4, device=acc)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(4, device=acc)
        assert torch.empty(4, device=acc).device == first.device
    assert accelerator.memory().refusals == before + 1
    with accelerator.refusal(1):
        pass
    torch.empty(4, device=acc)
