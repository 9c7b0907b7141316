"""The doctor names the layer in which a result first goes wrong, and what it tries helps where it says so."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from anygpu.compat import doctor
from anygpu.compat.device.execution import bf16_bits_to_fp32
from anygpu.compat.errors import parts_of
from anygpu.compat.output_check import ZEROS, NotFinite
from anygpu.compat.repairs import (
    ATTENTION,
    FP32,
    REPLACED,
    SCALED,
    Repair,
    RepairStore,
    Scaled,
    Widened,
    _finite,
    repaired,
    tensors_in,
)
from anygpu.pipelines.base import Call, SampleSettings, Silent
from anygpu.pipelines.load.folder import load
from anygpu.pipelines.requests import LoadRequest
from anygpu.pipelines.sampling.core_sampler import velocity
from anygpu.pipelines.sampling.loop import Safeguards, Watch, denoise
from anygpu.pipelines.sampling.schedules import Levels, schedule_for
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parents[2]
INPUTS: dict[str, dict[str, Any]] = {  # by family: latents, and what its text is
    "ltx": {"latents": (1, 128, 2, 2, 2), "text": 32, "pooled": 0},
    "hunyuan_video": {"latents": (1, 16, 2, 4, 4), "text": 0, "pooled": 0},
}


def called(name: str, folder: Path) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """The tiny transformer of a family and one call of it."""
    pipeline = load(LoadRequest(tiny.build(name, folder), device="cpu", precision="fp32"))
    config, transformer = pipeline.configs["transformer"], pipeline.parts.read("transformer")
    generator = torch.Generator().manual_seed(0)
    width, pooled = config[pipeline.spec.files.text_width], config.get("pooled_projection_dim", 1)
    call = Call(
        torch.randn(INPUTS[name]["latents"], generator=generator),
        torch.tensor([500.0]),
        torch.randn(1, 5, width, generator=generator),
        pooled=torch.randn(1, pooled, generator=generator),
    )
    return transformer, lambda: velocity(pipeline, transformer, call)


@pytest.mark.full
@pytest.mark.parametrize("name", INPUTS)
@torch.no_grad()
def test_nan_in_every_layer_is_found_in_that_layer(name: str, tiny_folder: Path) -> None:
    transformer, run = called(name, tiny_folder)
    networks = nn.ModuleDict({"transformer": transformer})
    assert doctor.examine(networks, run) is None
    unused = []
    for place, weight in list(transformer.named_parameters()):
        if weight.ndim == 0:
            continue
        layer, _, own = f"transformer.{place}".rpartition(".")
        before = weight.flatten()[0].clone()
        weight.view(-1)[0] = float("nan")
        finding = doctor.examine(networks, run)
        if finding is None:
            unused.append(place)
        else:
            assert (finding.layer, finding.weight) == (layer, own), (place, finding)
        weight.view(-1)[0] = before
    assert len(unused) <= 4, unused
    assert not doctor.not_finite(run())


class Block(nn.Module):
    """A Linear whose product is too large for fp16 where ``scale`` is, and is made small again."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        nn.init.constant_(self.up.weight, scale)
        nn.init.constant_(self.down.weight, 1.0 / (16 * scale))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x))


class Network(nn.Module):
    """Three blocks."""

    def __init__(self, scales: tuple[float, ...]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(scale) for scale in scales)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_an_overflow_is_named_with_its_way_and_repaired_by_the_smallest_change() -> None:
    network, x = Network((1.0, 30000.0, 1.0)).half(), torch.ones(1, 4).half()
    diagnosis, output = doctor.diagnose(nn.ModuleDict({"net": network}), lambda: network(x))
    finding = diagnosis.finding
    assert finding is not None and finding.layer == "net.blocks.1.up" and finding.fault == doctor.INFINITE
    assert finding.block == "net.blocks.1" and finding.blocks == 3 and finding.dtype == "fp16" and not finding.weight
    assert [name for name, _ in finding.way] == ["net.blocks.0"] and finding.largest == 2.0
    assert "block 2 of 3" in str(diagnosis)
    again = doctor.examine(nn.ModuleDict({"net": network}), lambda: [network(x * 0), network(x)])
    assert again is not None and dict(again.way)["net.blocks.0"] == 2.0
    assert len(again.way) == 3, "a block is named once, however often it runs"
    # One layer in safe fp16 still returns fp16; its block keeps the large values inside.
    assert diagnosis.repair == Repair("net.blocks.1", SCALED)
    exact = network.float()(x.float())
    assert output.dtype == torch.float16 and torch.allclose(output.float(), exact, rtol=2e-3)
    assert all("forward" not in vars(module) for module in network.modules())


class Fault(TorchFunctionMode):
    """A device with broken kernels: fp16 sums that overflow on the way, and an attention that gives NaN."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is functional.linear and args[0].dtype is torch.float16:
            sums = (args[0].float()[..., None, :] * args[1].float()).cumsum(-1)
            out = out.masked_fill(sums.abs().amax(-1) > 65504, float("inf"))
        return out * float("nan") if func is functional.scaled_dot_product_attention else out


class Cancelling(nn.Module):
    """A Linear whose large products cancel each other."""

    def __init__(self) -> None:
        super().__init__()
        self.product = nn.Linear(8, 4)
        with torch.no_grad():
            self.product.weight.copy_(torch.tensor([3e4, 3e4, 3e4, 1.0, 2.0, -3e4, -3e4, -3e4]).repeat(4, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x)


class Squares(nn.Module):
    """A norm whose squares leave fp16."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        squares = (300.0 * x).square()
        return squares / squares.mean(-1, keepdim=True)


class Attending(nn.Module):
    """Attention in two heads, masked, causal, or with fewer keys than queries, as its numbers say."""

    def __init__(self, **given: Any) -> None:
        super().__init__()
        self.qkv, self.given = nn.Linear(8, 24), given

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (each.unflatten(-1, (2, 4)).transpose(1, 2) for each in self.qkv(x).chunk(3, dim=-1))
        if self.given.get("enable_gqa"):
            key, value = key[:, :1], value[:, :1]
        return functional.scaled_dot_product_attention(query, key, value, **self.given).transpose(1, 2).flatten(2)


HALF = torch.float16
FAULTS = {  # by what is wrong: the layer, what it is computed in, and the repair that is to be found
    "sums": (Cancelling, HALF, Repair("net.1.product", SCALED)),
    "squares": (Squares, HALF, Repair("net.1", SCALED)),
    "attention fp16": (Attending, HALF, Repair("net.1", ATTENTION)),
    "attention fp32": (Attending, torch.float32, Repair("net.1", ATTENTION)),
    "attention causal": (lambda: Attending(is_causal=True, scale=0.3), HALF, Repair("net.1", ATTENTION)),
    "attention masked": (lambda: Attending(attn_mask=torch.ones(3, 3).tril().bool()), HALF, Repair("net.1", ATTENTION)),
    "attention grouped": (lambda: Attending(enable_gqa=True), HALF, Repair("net.1", ATTENTION)),
}


@pytest.mark.parametrize("fault", FAULTS)
@torch.no_grad()
def test_each_repair_is_found_for_its_fault_and_cures_it(fault: str) -> None:
    make, dtype, repair = FAULTS[fault]
    torch.manual_seed(0)
    network = nn.Sequential(nn.Identity(), make(), nn.Identity())
    x = 2 + 0.01 * torch.arange(24).view(1, 3, 8).to(dtype)
    expected = network.to(dtype).float()(x.float())
    network = network.to(dtype)
    with Fault():
        assert not torch.isfinite(network(x)).all(), "nothing is wrong: the test tests nothing"
        diagnosis, output = doctor.diagnose(nn.ModuleDict({"net": network}), lambda: network(x))
    assert diagnosis.repair == repair, diagnosis
    assert output.dtype is dtype and torch.allclose(output.float(), expected, rtol=2e-3, atol=2e-3)
    assert all("forward" not in vars(module) for module in network.modules())


@torch.no_grad()
@pytest.mark.parametrize("way", ["fp32", "scaled", "attention"])
def test_a_repaired_layer_keeps_what_the_network_writes_into_a_cache(way: str) -> None:
    """Such as the keys and values of earlier frames in core's autoregressive Wan."""

    class Caching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4).half()

        def forward(self, x: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
            (cache,) = options["caches"]
            cache["k"][cache["end"] : cache["end"] + len(x)] = y = self.layer(x)
            cache["end"] += len(x)
            return y + cache["k"].sum(0)

    networks, cache = nn.ModuleDict({"net": Caching()}), {"k": torch.zeros(8, 4).half(), "end": 0}
    with torch.no_grad(), repaired(networks, (Repair("net", way),)):
        for _ in range(2):
            networks["net"](torch.ones(2, 4).half(), options={"caches": [cache]})
    assert cache["end"] == 4 and bool(cache["k"][:4].any(1).all())


def test_a_product_is_scaled_however_its_operands_are_given() -> None:
    x, weight, bias = torch.ones(2, 8).half(), torch.full((4, 8), 3e4).half(), torch.ones(4).half()
    with Scaled():
        wanted = functional.linear(x, weight, bias)
        assert torch.equal(functional.linear(x, bias=bias, weight=weight), wanted) and wanted[0, 0] > 65504
        assert torch.equal(functional.linear(input=x, weight=weight, bias=bias), wanted)


@torch.no_grad()
def test_a_bias_that_hides_tokens_is_no_broken_input() -> None:
    network = nn.Module()
    network.layer, bias = nn.Linear(8, 8).half(), torch.zeros(3, 3, dtype=HALF).fill_diagonal_(-float("inf"))
    network.layer.weight.fill_(3e4)
    network.forward = lambda x, attention_mask: network.layer(x)
    x = torch.ones(1, 3, 8, dtype=HALF)
    finding = doctor.examine(nn.ModuleDict({"net": network}), lambda: network(x, attention_mask=bias))
    assert finding is not None and (finding.layer, finding.inputs) == ("net.layer", "")
    functional_only = nn.Module()
    functional_only.forward = lambda x, attention_mask: x * 3e4 * 3e4
    finding = doctor.examine(nn.ModuleDict({"net": functional_only}), lambda: functional_only(x, attention_mask=bias))
    assert finding is not None and (finding.layer, finding.inputs, finding.largest) == ("net", "", 1.0)


def test_the_largest_value_is_read_without_a_copy() -> None:
    class Made(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            output = function(*args, **(kwargs or {}))
            most.extend(each.numel() for each in tensors_in(output) if each.data_ptr() != value.data_ptr())
            return output

    value, most = torch.arange(-9.0, 7.0).half(), list[int]()
    with Made():
        assert doctor.largest([value, None]) == 9.0
    assert max(most) <= 2


def test_a_layer_that_is_right_to_give_zeros_is_blamed_for_nothing() -> None:
    network, x = Network((1.0, 1.0)), torch.linspace(0.1, 1, 8).view(2, 4)
    network.blocks[1].down.weight.data.zero_()
    assert (network(x) != 0).any(), "a residual goes around it"
    diagnosis, output = doctor.diagnose(nn.ModuleDict({"net": network}), lambda: network(x), doctor.lifeless)
    assert diagnosis.finding is None and torch.equal(output, network(x))


def test_a_damaged_weight_is_named_and_stands_for_zero() -> None:
    network, x = Network((1.0, 1.0)), torch.ones(1, 4)
    with torch.no_grad():
        network.blocks[1].down.weight[0, 0] = float("inf")
    diagnosis, output = doctor.diagnose(nn.ModuleDict({"net": network}), lambda: network(x))
    assert diagnosis.finding is not None and diagnosis.finding.weight == "weight"
    assert diagnosis.repair == Repair("net.blocks.1.down", REPLACED) and torch.isfinite(output).all()
    assert torch.isinf(network.blocks[1].down.weight[0, 0]), "the repair changed the model's own weight"
    assert "Download" in doctor.advice(diagnosis)
    with torch.no_grad():
        network.half().blocks[1].down.weight[0] = float("nan")
    broken, output = doctor.diagnose(nn.ModuleDict({"net": network}), lambda: network(x.half()))
    assert broken.finding is not None and broken.finding.bad > doctor.FEW
    assert (broken.tried, output) == ((), None), "no repair can help"
    assert "; 100% of its weight is NaN or infinity" in str(replace(diagnosis.finding, bad=1.0))
    elsewhere = replace(diagnosis, repair=None, finding=replace(diagnosis.finding, weight=""))
    assert doctor.advice(elsewhere, "put a node before").endswith("or put a node before."), "of core's models"


def test_its_advice_names_nodes_inputs_and_choices_that_exist() -> None:
    schemas = json.loads((ROOT / "tests/fixtures/schemas.json").read_text(encoding="utf-8"))
    inputs = {each["title"]: {one["name"]: one.get("options") for one in each["inputs"]} for each in schemas.values()}
    loads = [title for title, own in inputs.items() if title.startswith("AnyGPU Load") and own.get("precision")]
    beside = re.findall(r'instead = "(.+?)"', (ROOT / "host/core/doctor.py").read_text(encoding="utf-8"))
    assert inputs[schemas[doctor.BUTTON["node"]]["title"]][doctor.BUTTON["input"]].count(doctor.BUTTON["value"])
    assert len(beside) == 1 and loads
    faults, repairs = (doctor.NAN, doctor.INFINITE, doctor.STUCK, doctor.PRODUCT, ZEROS), (None, Repair("a", SCALED))
    for fault, dtype, weight, given, repair, tried, instead in itertools.product(
        faults,
        ("fp16", "fp32"),
        ("", "weight"),
        ("", "the text"),
        repairs,
        ((), repairs[1:]),
        (doctor.ON_LOAD, doctor.WITH_FIT, doctor.ON_FIT, *beside),
    ):
        finding = doctor.Finding("a", "Linear", dtype=dtype, fault=fault, weight=weight, inputs=given)
        advice = doctor.advice(doctor.Diagnosis(finding, repair, tried), instead)
        named = re.findall(r"AnyGPU [A-Z]\w+(?: [A-Z]\w+)*", advice)
        assert set(named) <= set(inputs), advice
        for name, choice, other in re.findall(r"(repair|precision) (?:to )?([\w-]+)(?: or (fp32))?", advice):
            nodes = loads if "load node" in advice and name == "precision" else [n for n in named if name in inputs[n]]
            assert nodes and all({choice, other or choice} <= {*inputs[node][name]} for node in nodes), advice


@pytest.mark.parametrize("spent", [0, 1])
def test_a_diagnosis_takes_five_runs_with_those_before_it(spent: int) -> None:
    network, runs = Network((1.0, 1.0)).half(), []
    network.blocks[1].up.register_forward_hook(lambda _layer, _given, output: output * float("nan"))
    network.register_forward_pre_hook(lambda *_: runs.append(1) and None)
    x = torch.ones(1, 4).half()
    diagnosis, _ = doctor.diagnose(nn.ModuleDict({"net": network}), lambda: network(x), spent=spent)
    assert diagnosis.repair is None and len(runs) == 5 - spent


@pytest.mark.parametrize(("kind", "module"), [(Exception, "triton.runtime.errors"), (AttributeError, "other_pack")])
def test_a_kernel_that_takes_no_fp32_leaves_the_finding(kind: type[Exception], module: str) -> None:
    network = Network((1.0, 1.0)).half()
    network.blocks[1].up.register_forward_hook(lambda _layer, _given, output: output * float("nan"))

    def refuse(_: nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        if given[0].dtype is torch.float32:
            raise type("OutOfResources", (kind,), {"__module__": module})

    network.blocks[0].down.register_forward_pre_hook(refuse)
    x = torch.ones(1, 4).half()
    diagnosis, _ = doctor.diagnose(nn.ModuleDict({"net": network}), lambda: network(x))
    assert diagnosis.finding.layer == "net.blocks.1.up" and diagnosis.repair is None


def test_what_is_wrong_before_the_network_is_said_to_be() -> None:
    network = Network((1.0,))
    diagnosis, output = doctor.diagnose(
        nn.ModuleDict({"net": network}), lambda: network(x=torch.full((1, 4), float("nan")))
    )
    assert diagnosis.finding is not None and diagnosis.finding.inputs == "the latents"
    assert output is None and diagnosis.repair is None


def test_a_function_between_layers_is_named_by_its_module() -> None:
    class Root(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sqrt(x - 2.0)

    network = nn.Sequential(nn.Identity(), Root())
    finding = doctor.examine(nn.ModuleDict({"net": network}), lambda: network(torch.ones(1, 2)))
    assert finding is not None and (finding.layer, finding.kind, finding.fault) == ("net.1", "Root", doctor.NAN)


def test_one_colour_is_found_where_it_begins() -> None:
    network = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3, bias=False))
    with torch.no_grad():
        network[0].weight.fill_(-1.0)
    x = torch.rand(2, 3)
    finding = doctor.examine(nn.ModuleDict({"net": network}), lambda: network(x), doctor.one_colour)
    assert finding is not None and finding.layer in ("net.0", "net.1")


def test_a_network_that_says_nothing_is_searched_for_the_layer_that_falls_silent() -> None:
    network, x = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)), torch.rand(2, 3)
    with torch.no_grad():
        network[0].weight.fill_(-1.0)
        network[0].bias.fill_(-1.0)
        network[2].bias.zero_()
    assert doctor.lifeless(network(x)) == ZEROS and not doctor.not_finite(network(x))
    diagnosis, _ = doctor.diagnose(nn.ModuleDict({"net": network}), lambda: network(x), doctor.lifeless)
    assert diagnosis.finding is not None and (diagnosis.finding.layer, diagnosis.finding.fault) == ("net.1", ZEROS)


def test_what_helped_is_kept_for_the_next_run_until_it_is_forgotten(tmp_path: Path) -> None:
    network, x = Network((1.0, 30000.0)).half(), torch.ones(1, 4).half()
    networks = nn.ModuleDict({"net": network, "other": nn.Identity()})
    store, said = RepairStore(tmp_path / "state"), list[str]()

    def watched(choice: str) -> torch.Tensor:
        watch = doctor.Doctor("model", store, choice, said.append)
        with watch.repaired(networks):
            return watch.checked(network(x), networks, lambda: network(x), "step 1 of 2")

    with pytest.raises(NotFinite, match=r"16-bit format; step 1 of 2: .*net\.blocks\.1\.up.*repair to keep") as offer:
        watched(doctor.OFFER)
    assert torch.isfinite(watched(doctor.KEEP)).all() and not said, "the offer of the run before was not kept"
    button = parts_of(str(offer.value))
    assert (button["node"], button["input"], button["value"]) == ("AnyGPUDoctor", "repair", doctor.KEEP)
    (tmp_path / "state" / "doctor.json").write_text("{damaged")
    assert torch.isfinite(watched(doctor.KEEP)).all() and len(said) == 1
    with pytest.raises(NotFinite):
        watched(doctor.FORGET)
    assert not RepairStore(tmp_path / "state").load("model")


def test_noise_that_did_not_shrink_is_told_from_a_picture() -> None:
    noise = torch.randn(1, 4, 2, 8, 8, generator=torch.Generator().manual_seed(0))
    picture = torch.linspace(-1, 1, noise.numel()).view_as(noise)
    assert "did not shrink" in doctor.unshrunk(noise, 0.9 * noise + 0.1 * picture)
    assert not doctor.unshrunk(noise, picture + 0.1 * noise) and not doctor.unshrunk(noise, picture[:, :2])


@pytest.mark.parametrize("levels, stuck", [((1.0, 0.5), True), ((0.1, 0.05), False)])
def test_a_last_refining_pass_may_end_near_where_it_began(levels: tuple[float, ...], stuck: bool) -> None:
    said: list[str] = []
    settings = SampleSettings(64, 64, 9, steps=2, scheduler="euler")
    made = lambda: schedule_for({}, settings, 2, lambda _: Levels(sigmas=list(levels)), torch.device("cpu"))  # noqa: E731
    watch = Watch(nn.ModuleDict(), doctor.Doctor("", RepairStore(None), doctor.OFFER, said.append), said.append)
    start = torch.linspace(-1, 1, 8).reshape(1, 1, 2, 2, 2)
    denoise(start, made(), lambda x, *_: x.flip(-1) / 99, progress=Silent(), safeguards=Safeguards(watch=watch))
    assert ("did not shrink" in said[-1]) == stuck and (stuck or said == ["no fault in 2 steps"])

    def repaired_once(x: torch.Tensor, time: torch.Tensor, index: int) -> torch.Tensor:
        if said[-1] == "decoded" and not index:
            watch.doctor.tell("a passing fault")
        return -x

    watch.doctor.tell("decoded")
    for ending in ("a passing fault", "no fault in 2 steps"):  # what was found is the last word, of this run
        denoise(start, made(), repaired_once, progress=Silent(), safeguards=Safeguards(watch=watch))
        assert said[-1] == ending or (stuck and "did not shrink" in said[-1])


class PackedWeight(torch.Tensor):
    """A weight of another pack's, whose bytes are no values: whatever reads them fails."""

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> PackedWeight:
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype)

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].values)
        raise IndexError(f"{func} of packed bytes")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            return func(args[0], args[1].values.to(args[0].dtype), *args[2:], **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs or {})


@torch.no_grad()
@pytest.mark.parametrize("way", ["scaled", "zeros", "fp32"])
def test_repairs_do_not_read_packed_bytes_of_another_pack(way: str) -> None:
    layer = nn.Linear(8, 8).half()
    layer.weight = nn.Parameter(PackedWeight(torch.randn(8, 8).half()), requires_grad=False)
    networks, x = nn.ModuleDict({"network": nn.Sequential(layer)}), torch.randn(2, 8).half()
    expected = layer(x)
    with repaired(networks, [Repair("network.0", way)]):
        assert torch.allclose(layer(x), expected, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn])
def test_a_weight_gets_zeros_where_it_is_nan_in_fp8_too(dtype: torch.dtype) -> None:
    found = _finite(torch.tensor([1.5, float("nan")]).to(dtype))
    assert found.dtype is dtype and found.float().tolist() == [1.5, 0.0]


def test_a_repair_of_a_whole_vae_is_around_what_core_calls_of_it():
    """ComfyUI calls no ``forward`` of a VAE."""
    seen = []

    class Vae(nn.Module):
        def decode(self, x):
            seen.append(x.dtype)
            return x

    networks = nn.ModuleDict({"vae": Vae()})
    with repaired(networks, [Repair("vae", FP32)]):
        assert networks["vae"].decode(torch.ones(1, dtype=torch.float16)).dtype is torch.float16
    networks["vae"].decode(torch.ones(1, dtype=torch.float16))
    assert seen == [torch.float32, torch.float16]


def test_a_repair_in_fp32_reads_packed_bytes_as_what_they_are():
    """GGUF's scales are bytes, viewed as fp16; on some devices bf16 is widened by its bits."""
    scales, wide = torch.tensor([0.5, -2.0, 3.0], dtype=torch.float16), torch.tensor([0.1, 7.0], dtype=torch.bfloat16)
    with Widened():
        found, by_bits = scales.view(torch.uint8).view(torch.float16) * 2, bf16_bits_to_fp32(wide)
    assert found.dtype is torch.float32 and torch.equal(found, scales.float() * 2)
    assert torch.equal(by_bits, wide.float())
