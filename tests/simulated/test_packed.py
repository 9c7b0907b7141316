"""Packed weights under every mover of the simulated accelerator: the CPU's result twice in a row, in fewer bytes."""

from dataclasses import replace

import layouts
import pytest
import quantised
import tiny
import torch
from anygpu.compat.checkpoints.packed import StoredLinear
from anygpu.compat.errors import UnsupportedError
from anygpu.pipelines.files.single_file import Files
from anygpu.pipelines.load.folder import load
from anygpu.pipelines.requests import LoadRequest
from anygpu.pipelines.sizes import default_size, sampling_bytes

from simulated import accelerator, profiles
from simulated.test_families import MODES, ROUNDING, SMALL, loaded_for, rendered

QUICK = {("mochi", "int8", "group")}
QUICK_NARROW = ("mochi", torch.bfloat16, "model")
FAMILIES = ("ltx", "hunyuan_video", "hunyuan_video_15", "framepack", "mochi")
CELLS = [
    pytest.param(family, choice, offload, marks=[] if (family, choice, offload) in QUICK else [pytest.mark.full])
    for family in FAMILIES
    for choice in ("fp8", "int8", "bf16", "int8_convrot", "w4a8")
    for offload in MODES
]


def pipeline(family, folder, device, choice, offload="auto"):
    return loaded_for(SMALL[family], folder, device, offload, weights=choice, text_weights=choice)


@pytest.fixture(scope="module")
def on_host(tiny_folder):
    """Latents of the CPU with the same packed weights."""
    found: dict[tuple[str, str], torch.Tensor] = {}

    def of(family: str, choice: str) -> torch.Tensor:
        if (family, choice) not in found:
            found[family, choice] = rendered(pipeline(family, tiny_folder, "cpu", choice), SMALL[family])[0]
        return found[family, choice]

    return of


@pytest.mark.full
@pytest.mark.parametrize(("family", "choice", "offload"), CELLS)
def test_every_mover_takes_packed_weights(acc, tiny_folder, on_host, family, choice, offload):
    pipe = pipeline(family, tiny_folder, acc, choice, offload)
    first, second = (rendered(pipe, SMALL[family])[0] for _ in range(2))
    assert torch.equal(first, second)
    assert torch.allclose(first, on_host(family, choice), rtol=ROUNDING, atol=ROUNDING)


def test_packed_weights_take_less_of_the_device(acc, tiny_folder):
    used = {}
    for choice in ("auto", "int8"):
        pipe = pipeline("mochi", tiny_folder, acc, choice, "none")
        before = accelerator.memory().allocated_bytes
        with pipe.offloader.hold("transformer"):
            used[choice] = accelerator.memory().allocated_bytes - before
        pipe.offloader.release("transformer")
    linear = sum(layer.stored.numel() for layer in pipe.parts["transformer"].modules() if hasattr(layer, "stored"))
    saved = used["auto"] - used["int8"]
    assert 2.5 * linear < saved <= 3 * linear  # three of four bytes, less a scale per row


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.full)])
@pytest.mark.parametrize("choice", ["fp8", "w4a8", pytest.param("int8", marks=pytest.mark.full)])
def test_what_making_a_weight_dense_takes_is_in_the_estimate(acc, tiny_folder, choice, precision):
    model = tiny.build("mochi", tiny_folder)
    request = LoadRequest(model, precision=precision, offload="none", device=acc, weights=choice)
    pipe, plain = load(request), load(replace(request, weights="auto"))
    with pipe.offloader.hold("transformer") as transformer:
        layers = [layer for layer in transformer.modules() if isinstance(layer, StoredLinear)]
        peaks = []
        for layer in layers:
            before = accelerator.memory().allocated_bytes
            accelerator.reset_peak()
            layer.dense(pipe.precision.transformer)
            peaks.append(accelerator.memory().peak_bytes - before)
    taken = [sampling_bytes(one, default_size(one.spec)) for one in (pipe, plain)]
    counted = taken[0] - taken[1]
    assert counted >= max(peaks) > 0 and (counted == max(peaks) or choice == "w4a8")


HALVES = (torch.bfloat16, torch.float16)
NARROW = [
    pytest.param(family, dtype, offload, marks=[] if (family, dtype, offload) == QUICK_NARROW else [pytest.mark.full])
    for family in FAMILIES
    for dtype in HALVES
    for offload in MODES
]


@pytest.mark.parametrize(("family", "dtype", "offload"), NARROW)
def test_auto_sends_the_16_bits_of_a_file_and_widens_them_on_the_device(tmp_path, family, dtype, offload):
    """Under every mover, on a Radeon that casts bf16 to zeros: the weights are the CPU's bit for bit, the latents too
    but for the order of sums, and half as many bytes are held and sent.
    """
    if reason := accelerator.reason():
        pytest.skip(reason)
    paths = [tiny.build(name, tmp_path, dtype=dtype) for name in SMALL[family].checkpoints]
    dense = load(LoadRequest(*paths, precision="fp32", device="cpu"))
    expected = rendered(dense, SMALL[family])[0]
    with profiles.on("gfx1151") as profile:
        pipe = load(LoadRequest(*paths, precision="fp32", offload=offload, device=profile.facts))
        found = [rendered(pipe, SMALL[family])[0] for _ in range(2)]
        sent = pipe.offloader.memory_stats.moved_bytes
    assert torch.equal(*found)
    assert torch.allclose(found[0], expected, rtol=ROUNDING, atol=ROUNDING)
    assert sent > 0
    for part in ("transformer", *(name for name in pipe.parts if name.startswith("text_encoder"))):
        layers = {n: m for n, m in pipe.parts[part].named_modules() if isinstance(m, StoredLinear)}
        assert layers and all(m.by_bits and m.stored.dtype is dtype for m in layers.values()), part
        wide = dict(dense.parts[part].named_modules())
        assert all(torch.equal(m.weight.cpu(), wide[n].weight) for n, m in layers.items()), part
        saved = tensor_bytes(dense.parts[part]) - tensor_bytes(pipe.parts[part])
        assert saved == 2 * sum(m.stored.numel() for m in layers.values()) > 0, part


def test_a_part_elsewhere_is_stored_for_the_device_that_it_runs_on(tmp_path):
    if reason := accelerator.reason():
        pytest.skip(reason)
    there = {"devices": {"text_encoder": "cpu"}, "text_weights": "as in file"}
    with profiles.on("gfx1151") as profile:  # which casts bf16 to zeros
        folder = tiny.build("ltx", tmp_path, dtype=torch.bfloat16)
        pipe = load(LoadRequest(folder, precision="fp32", device=profile.facts, **there))
        parts = (pipe.parts.read(part) for part in ("transformer", "text_encoder"))
        by_bits = [{m.by_bits for m in part.modules() if isinstance(m, StoredLinear)} for part in parts]
    assert by_bits == [{True}, {False}]


def tensor_bytes(module):
    return sum(t.nbytes for t in (*module.parameters(), *module.buffers()))


def test_fp16_is_widened_on_the_host_where_the_device_casts_it_wrongly(acc, tmp_path):
    """There is no integer route for fp16: ``auto`` makes its values fp32 on the host, ``as in file`` raises."""
    model = tiny.build("mochi", tmp_path, dtype=torch.float16)

    def spoil(op, arguments, results):
        target, source = (value for value in arguments[:2] if isinstance(value, torch.Tensor))
        if source.device == target.device == acc and (source.dtype, target.dtype) == (torch.float16, torch.float32):
            target.fill_(0.0)

    assert layouts.is_packed(load(LoadRequest(model, precision="fp32", device=acc)).parts["transformer"])
    with accelerator.hook("aten::copy_", None, spoil), accelerator.hook("aten::_copy_from", None, spoil):
        pipe = load(LoadRequest(model, precision="fp32", device=acc))
        assert not any(layouts.is_packed(pipe.parts[part]) for part in ("transformer", "text_encoder"))
        with pytest.raises(UnsupportedError, match="weights 'as in file' of a file in fp16"):
            load(LoadRequest(model, precision="fp32", device=acc, weights="as in file"))


@pytest.mark.full
def test_fp8_becomes_dense_on_the_host_where_the_device_has_none(tiny_folder, tmp_path):
    """Apple's GPUs have no float8: the file's values with their scale, in the dtype that computes."""
    if reason := accelerator.reason():
        pytest.skip(reason)
    folder = tiny.build("mochi", tiny_folder)
    tensors = layouts.tensors_of(folder / "transformer")
    scaled = {name: tensor for name, tensor in tensors.items() if tensor.ndim == 2 and name.endswith("weight")}
    stored = {**tensors, **{name: (tensor * 8).to(torch.float8_e4m3fn) for name, tensor in scaled.items()}}
    stored |= {name.removesuffix("weight") + "weight_scale": torch.tensor(0.125) for name in scaled}
    file = layouts.write(tmp_path / "mochi.safetensors", stored, layouts.config_in(folder / "transformer"))
    request = {"base": folder, "precision": "fp32", "files": Files({"transformer": file})}
    expected = rendered(load(LoadRequest(file, device="cpu", **request)), SMALL["mochi"])[0]
    with profiles.on("mps-like") as profile:
        pipe = load(LoadRequest(file, device=profile.facts, offload="model", **request))
        found = rendered(pipe, SMALL["mochi"])[0]
        assert not layouts.is_packed(pipe.parts["transformer"])
    assert torch.allclose(found, expected, rtol=10 * ROUNDING, atol=10 * ROUNDING)


QUICK_CELLS = {("turing", "int8 convrot")}


@pytest.mark.full
@pytest.mark.parametrize(
    ("machine", "way"),
    [
        pytest.param(machine, way, marks=[] if (machine, way) in QUICK_CELLS else [pytest.mark.full])
        for machine in profiles.PROFILES
        for way in quantised.ALL
    ],
)
def test_every_format_runs_packed_on_every_machine(tiny_folder, tmp_path, machine, way):
    """Our own loader; tests/host/test_core_packed.py has Fit Model. Apple has no float8: that alone is dense there."""
    if reason := accelerator.reason():
        pytest.skip(reason)
    folder = tiny.build("mochi", tiny_folder)
    tensors = layouts.tensors_of(folder / "transformer")
    quantised.file_as(tmp_path / "mochi.safetensors", tensors, way)
    layouts.write(tmp_path / "config.safetensors", {}, layouts.config_in(folder / "transformer"))
    (tmp_path / "config.json").rename(tmp_path / "mochi.json")
    file = tmp_path / "mochi.safetensors"
    request = {"base": folder, "precision": "fp32", "files": Files({"transformer": file})}
    expected = rendered(load(LoadRequest(file, device="cpu", **request)), SMALL["mochi"])[0]
    with profiles.on(machine) as profile:
        pipe = load(LoadRequest(file, device=profile.facts, offload="model", state=tmp_path / "state", **request))
        found = rendered(pipe, SMALL["mochi"])[0]
        packs = layouts.is_packed(pipe.parts["transformer"])
    assert packs == (machine != "mps-like" or way.split()[0] not in ("fp8", "mxfp8"))
    assert torch.allclose(found, expected, rtol=10 * ROUNDING, atol=10 * ROUNDING)


@pytest.mark.parametrize("given", [{"weights": "fp8"}, {"text_weights": "fp8"}], ids=str)
def test_float8_is_refused_before_a_run_where_the_device_has_none(tiny_folder, given):
    if reason := accelerator.reason():
        pytest.skip(reason)
    with profiles.on("mps-like") as profile, pytest.raises(UnsupportedError, match=r"no float8.*weights int8"):
        load(LoadRequest(tiny.build("mochi", tiny_folder), device=profile.facts, precision="fp32", **given))
