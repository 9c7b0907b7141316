"""Devices whose 3-D convolution is missing, wrong or fatal: what fails as shipped, and runs under every offloader."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from anygpu.compat.device.precision import DTYPES
from anygpu.compat.device.probe_store import ProbeStore
from anygpu.compat.device.quirks import abilities
from anygpu.compat.errors import UnsupportedError
from anygpu.compat.memory.hooks import own_tensors, weights_on
from anygpu.compat.memory.offloader import MODES
from anygpu.compat.memory.standalone import StandaloneOffloader
from anygpu.compat.transforms.conv3d import swap_conv3d
from anygpu.compat.transforms.conv3d_choice import Conv3dLayer, choose_by, form_error, form_times
from anygpu.compat.transforms.conv3d_methods import Conv3dMethod, Geometry
from anygpu.compat.transforms.order import convolution_step
from anygpu.pipelines.pipeline import Parts
from compat.transforms.test_conv3d import randomised
from convolutions import always
from torch import nn

from simulated import accelerator, profiles

CONVOLUTIONS = "aten::convolution*"
LEGACY = {"backend": "cuda", "conv3d": {"bf16": False}, "conv2d": {"bf16": False}}


def is_volume(arguments: list) -> bool:
    return isinstance(arguments[0], torch.Tensor) and arguments[0].dim() == 5


def no_bf16(op: str, arguments: list) -> None:
    """A GPU before sm80, as torch names what it lacks."""
    if arguments[0].dtype is torch.bfloat16:
        raise RuntimeError("\"slow_conv3d_forward\" not implemented for 'BFloat16'")


def no_volumes(op: str, arguments: list) -> None:
    """A device that convolves and pads pictures only."""
    if is_volume(arguments):
        raise NotImplementedError(f"{op}: failed to legalize operation on a volume")


@contextmanager
def without_volumes() -> Iterator[None]:
    with accelerator.hook(CONVOLUTIONS, before=no_volumes), accelerator.hook("aten::*pad*", before=no_volumes):
        yield


def resident(mode: str, module: nn.Module, device: torch.device, name: str = "vae") -> Any:
    return StandaloneOffloader(Parts({name: lambda _progress: module}), device, mode)


def sample(*size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(0))


def close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype = torch.float32) -> bool:
    """Within a hundred roundings of the largest value."""
    return float((found.cpu().double() - expected.double()).abs().max() / expected.double().abs().max()) < (
        100 * torch.finfo(dtype).eps
    )


# The founding failures ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_legacy_conv3d_in_framepack(mode: str, acc: torch.device) -> None:
    """The patch embeddings of FramePack in bf16, on a GPU whose convolutions know no bf16."""
    framepack = pytest.importorskip("diffusers.models.transformers.transformer_hunyuan_video_framepack")
    with torch.random.fork_rng(devices=[]):
        embeds = nn.ModuleDict(
            {
                "x_embedder": framepack.HunyuanVideoPatchEmbed((1, 2, 2), 16, 24),
                "clean_x_embedder": framepack.HunyuanVideoHistoryPatchEmbed(16, 24),
            }
        ).requires_grad_(False)
    inputs = [sample(1, 16, frames, 6, 10).bfloat16() for frames in (3, 2, 3, 13)]
    exact = copy.deepcopy(embeds)
    expected = [exact["x_embedder"](inputs[0].float()), *exact["clean_x_embedder"](*(x.float() for x in inputs[1:]))]
    embeds.bfloat16()

    def run(model: nn.Module) -> list[torch.Tensor]:
        first, *history = (x.to(acc) for x in inputs)
        return [model["x_embedder"](first), *model["clean_x_embedder"](*history)]

    with accelerator.hook(CONVOLUTIONS, before=no_bf16), torch.inference_mode():
        unswapped = resident(mode, copy.deepcopy(embeds), acc)
        with pytest.raises(RuntimeError, match="slow_conv3d_forward"), unswapped.hold("vae") as held:
            run(held)
        swap_conv3d(embeds, choose_by(LEGACY))
        offloader = resident(mode, embeds, acc)
        for _ in range(2):
            with offloader.hold("vae") as held:
                found = run(held)
            assert all(close(one, other, torch.bfloat16) for one, other in zip(found, expected, strict=True))


def test_legacy_conv3d_in_a_vae(acc: torch.device) -> None:
    """Where no other form can take a layer, its operands go up to fp32 and the result comes back in bf16."""
    model = nn.Sequential(nn.Conv3d(8, 8, 3), nn.GroupNorm(2, 8), nn.Conv3d(8, 4, 3)).requires_grad_(False)
    x, expected = sample(1, 8, 6, 7, 7), model(sample(1, 8, 6, 7, 7))
    model.bfloat16()
    swapped = swap_conv3d(model, choose_by(LEGACY))
    assert {choice.form for choice in swapped.choices.values()} == {Conv3dMethod.FP32}
    model.to(acc)
    with accelerator.hook(CONVOLUTIONS, before=no_bf16) as hook:
        found = model(x.to(acc, torch.bfloat16))
    assert hook.hits == 2 and found.dtype is torch.bfloat16 and close(found, expected, torch.bfloat16)


DECODERS = {"mochi_vae": (1, 12, 2, 4, 4), "hunyuan_vae": (1, 16, 2, 4, 4), "ltx_vae": (1, 128, 2, 2, 2)}


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("mode", MODES)
def test_no_conv3d_for_decoders(name: str, mode: str, acc: torch.device) -> None:
    vae, latents = randomised(name), sample(*DECODERS[name])
    expected = vae.decode(latents, return_dict=False)[0]
    with without_volumes(), torch.inference_mode():
        unswapped = resident(mode, copy.deepcopy(vae), acc)
        with pytest.raises(NotImplementedError, match="volume"), unswapped.hold("vae") as held:
            held.decode(latents.to(acc))
        swapped = swap_conv3d(vae, choose_by({"conv3d": False}))
        offloader = resident(mode, vae, acc)
        for _ in range(2):
            with offloader.hold("vae") as held, own_tensors(held):
                found = held.decode(latents.to(acc), return_dict=False)[0]
            assert close(found, expected)
        if mode in ("model", "sequential"):
            assert all(weight.device.type in ("cpu", "meta") for weight in vae.parameters())
    if mode == "sequential":
        offloader.release("vae")
        swapped.restore()
        assert torch.equal(vae.decode(latents, return_dict=False)[0], expected)


@pytest.mark.parametrize("mode", MODES)
def test_no_conv3d_for_the_whole_framepack_transformer(mode: str, acc: torch.device) -> None:
    """Offload by block leaves the patch embeddings outside of the blocks."""
    transformer, frames = randomised("framepack_transformer"), {"clean": 2, "history_2x": 2, "history_4x": 5}
    inputs = {
        "hidden_states": sample(1, 16, 2, 4, 6),
        "timestep": torch.tensor([500]),
        "encoder_hidden_states": sample(1, 5, 32),
        "encoder_attention_mask": torch.ones(1, 5, dtype=torch.long),
        "pooled_projections": sample(1, 32),
        "image_embeds": sample(1, 7, 32),
        "indices_latents": torch.arange(9, 11),
        "guidance": torch.tensor([6000.0]),
        **{f"latents_{name}": sample(1, 16, count, 4, 6) for name, count in frames.items()},
        **{f"indices_latents_{name}": torch.arange(count) for name, count in frames.items()},
    }
    with torch.inference_mode():
        expected = transformer(**inputs, return_dict=False)[0]
        there = {name: value.to(acc) for name, value in inputs.items()}
        unable = dict.fromkeys(DTYPES, False)
        undo = convolution_step({"conv3d": unable, "pad3d": unable}).apply("transformer", transformer)
        offloader = resident(mode, transformer, acc, "transformer")
        with (
            accelerator.hook(CONVOLUTIONS, before=no_volumes) as hook,
            accelerator.hook("aten::*pad3d", before=no_volumes) as pads,
            accelerator.hook("aten::avg_pool3d", before=no_volumes) as pools,
        ):
            for _ in range(2):
                with offloader.hold("transformer") as held:
                    assert close(held(**there, return_dict=False)[0], expected)
        assert (hook.hits, pads.hits, pools.hits) == (0, 0, 0)
        offloader.release("transformer")
        if mode in ("none", "model"):
            undo()
            assert "_pad_rotary_emb" not in vars(transformer)
            assert torch.equal(transformer(**inputs, return_dict=False)[0], expected)


# Faults that give wrong results ------------------------------------------------------------------------------------


def spoiled(matches: Callable[[list], bool]) -> Callable[[str, list, list], None]:
    def after(op: str, arguments: list, results: list) -> None:
        if matches(arguments):
            results[0].fill_(float("nan"))

    return after


@pytest.mark.parametrize(
    ("facts", "matches"),
    [
        # GTX 16xx: every fp16 convolution gives NaN
        ({"conv3d": {"fp16": False}, "conv2d": {"fp16": False}}, lambda a: a[0].dtype is torch.float16),
        # Apple: 3-D convolutions of contiguous input are wrong
        ({"backend": "mps", "conv3d": False}, lambda a: is_volume(a) and a[0].is_contiguous()),
        ({"conv3d": False, "conv3d_channels_last": True, "conv2d": False}, lambda a: a[0].is_contiguous()),
        # no convolution is right
        ({"conv3d": False, "conv2d": False}, lambda a: True),
    ],
)
def test_wrong_convolutions_are_gone_around(facts: dict, matches: Callable[[list], bool], acc: torch.device) -> None:
    model = nn.Sequential(nn.Conv3d(8, 8, 3), nn.SiLU(), nn.Conv3d(8, 4, 3)).requires_grad_(False)
    x, expected = sample(1, 8, 6, 7, 7), model(sample(1, 8, 6, 7, 7))
    model.half()
    on_device = copy.deepcopy(model).to(acc)
    with accelerator.hook(CONVOLUTIONS, after=spoiled(matches)):
        assert on_device(x.to(acc, torch.float16)).isnan().any()
        swap_conv3d(model, choose_by(facts))
        assert close(model.to(acc)(x.to(acc, torch.float16)), expected, torch.float16)


def test_weights_arrive_contiguous(acc: torch.device) -> None:
    """Intel: a convolution with a weight that is not contiguous ends the process."""

    def crash(op: str, arguments: list) -> None:
        if not (arguments[0].is_contiguous() and arguments[1].is_contiguous()):
            raise RuntimeError("segmentation fault")

    model = nn.Conv3d(4, 4, (1, 3, 3), bias=False).requires_grad_(False)
    model.weight.data = torch.randn(4, 4, 3, 3, 1).permute(0, 1, 4, 3, 2)
    x = sample(1, 4, 1, 6, 6)
    expected = model(x)
    on_device = copy.deepcopy(model).to(acc)
    with accelerator.hook(CONVOLUTIONS, before=crash):
        with pytest.raises(RuntimeError, match="segmentation"):
            on_device(x.to(acc))
        for form in (Conv3dMethod.NATIVE, Conv3dMethod.FRAMES):
            swapped = swap_conv3d(model, always(form))
            assert close(model.to(acc)(x.to(acc)), expected)
            swapped.restore()
            model.cpu()


def test_a_swap_on_the_device_is_compared_there(acc: torch.device) -> None:
    """The original runs on the CPU, so a device that cannot run it can still be checked."""
    model = nn.Conv3d(4, 4, 3).requires_grad_(False).to(acc)
    with accelerator.hook(CONVOLUTIONS, before=no_volumes):
        assert list(swap_conv3d(model, always(Conv3dMethod.FRAMES)).choices) == [""]
    model = nn.Conv3d(4, 4, 3).requires_grad_(False).to(acc)
    with accelerator.hook(CONVOLUTIONS, after=spoiled(lambda arguments: True)):
        assert "differs by nan" in swap_conv3d(model, always(Conv3dMethod.FRAMES)).left[""]
    assert type(model) is nn.Conv3d


@pytest.mark.parametrize(
    ("machine", "dtype", "form"),
    [
        ("turing", torch.bfloat16, Conv3dMethod.FP32),
        ("gtx16xx", torch.float16, Conv3dMethod.FP32),
        ("no-conv3d", torch.float32, Conv3dMethod.FRAMES),
        ("gfx1201", torch.bfloat16, Conv3dMethod.FRAMES),
        ("mps-like", torch.float32, Conv3dMethod.FRAMES),
    ],
)
def test_probes_lead_to_a_form_that_works(machine: str, dtype: torch.dtype, form: Conv3dMethod) -> None:
    """What the device answered, and nothing else, decides."""
    if reason := accelerator.reason():
        pytest.skip(reason)
    vae, latents = randomised("hunyuan_vae"), sample(1, 16, 2, 4, 4)
    expected = vae.decode(latents, return_dict=False)[0]
    vae.to(dtype)
    with profiles.on(machine) as profile, torch.inference_mode():
        facts = abilities(profile.facts, ProbeStore(profile.facts))
        swapped = swap_conv3d(vae, choose_by(facts))
        assert {choice.form for choice in swapped.choices.values()} >= {form}
        found = vae.to(profile.device).decode(latents.to(profile.device, dtype), return_dict=False)[0]
    error = (found.cpu().double() - expected.double()).abs().max() / expected.double().abs().max()
    assert error < {torch.bfloat16: 0.1, torch.float16: 0.02}.get(dtype, 1e-4)


def test_forms_are_timed_on_the_device(acc: torch.device) -> None:
    layer = Conv3dLayer("conv", 8, 8, (3, 3, 3), Geometry(), torch.float32)
    with accelerator.hook(CONVOLUTIONS, before=no_volumes):
        times = form_times(layer, acc, (3, 8, 8), repeats=1)
        assert form_error(Conv3dMethod.NATIVE, layer, acc) is None
    assert set(times) == {"frames", "matmul"}
    chosen = choose_by({}, lambda *_: times)(layer)
    assert chosen is not None and chosen.form.value == min(times, key=times.__getitem__), (
        "the facts' choice did not run"
    )


# Inputs that are elsewhere -----------------------------------------------------------------------------------------


def test_an_input_on_the_host_is_moved_and_reported(acc: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    """What reads as a missing bf16 kernel is an input that stayed behind."""
    model, x = nn.Conv3d(4, 4, 3).requires_grad_(False), sample(1, 4, 4, 6, 6)
    expected = model(x)
    swap_conv3d(model, always(Conv3dMethod.FRAMES))
    model.to(acc)
    for _ in range(2):
        assert close(model(x), expected)
    assert caplog.text.count("is on cpu and its weight on acc:0") == 1


@pytest.mark.parametrize("away", ["cpu", "meta"])
def test_an_input_never_goes_to_a_master_copy(away: str, acc: torch.device) -> None:
    model = nn.Conv3d(4, 4, 3).requires_grad_(False)
    swap_conv3d(model, always(Conv3dMethod.FRAMES))
    model.to(away)
    with pytest.raises(UnsupportedError, match=f"is on acc:0 and its weight on {away}.*offloader"):
        model(sample(1, 4, 4, 6, 6).to(acc))


# Borrowing ---------------------------------------------------------------------------------------------------------


def doubled(leaf: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A rewritten forward that needs the weight itself."""
    with weights_on(leaf, like=x) as (weight, bias):
        assert weight.device == x.device and bias.device == x.device and weight.dtype is x.dtype
        return torch.nn.functional.linear(x, 2 * weight, bias)


@pytest.mark.parametrize("mode", MODES)
def test_borrow_from_every_offloader(mode: str, acc: torch.device) -> None:
    model, x = nn.Sequential(nn.Linear(6, 6)).requires_grad_(False), sample(2, 6)
    expected, plain = doubled(model[0], x), model(x)
    offloader = resident(mode, model, acc)
    for _ in range(2):
        with offloader.hold("vae") as held:
            before = held[0].weight.device
            assert close(doubled(held[0], x.to(acc)), expected)
            assert held[0].weight.device == before
            assert close(held(x.to(acc)), plain)


def test_borrow_casts_and_returns_what_it_took(acc: torch.device) -> None:
    model = nn.Linear(6, 6).requires_grad_(False).to(torch.float8_e4m3fn)
    with weights_on(model, like=torch.ones(1, dtype=torch.bfloat16)) as (weight, bias):
        assert weight.dtype is bias.dtype is torch.bfloat16
    with weights_on(nn.Linear(6, 6, bias=False), like=torch.ones(1)) as (_, bias):
        assert bias is None
    leaf = nn.Sequential(nn.Linear(6, 6)).requires_grad_(False)
    with resident("sequential", leaf, acc).hold("vae") as held:
        before = held[0].weight.device
        assert before != acc
        with pytest.raises(KeyError), weights_on(held[0], like=torch.ones(1, device=acc)):
            raise KeyError
        assert held[0].weight.device == before
    with pytest.raises(UnsupportedError, match="its weight on cpu"):
        doubled(nn.Linear(6, 6), torch.ones(1, 6, device=acc))


def test_a_host_may_lend_the_weights_itself(acc: torch.device) -> None:
    """A leaf with ``weights_on`` streams: its own tensors may be anywhere, and are not what counts where they are
    at hand.
    """
    model, x = nn.Conv3d(4, 4, 3).requires_grad_(False), sample(1, 4, 4, 6, 6)
    expected = model(x)
    swap_conv3d(model, choose_by({"conv3d": False}))
    provided: list[torch.device] = []

    @contextmanager
    def weights_on(like: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        provided.append(like.device)
        yield model.weight.to(like), model.bias.to(like)

    model.weights_on = weights_on
    assert close(model(x.to(acc)), expected) and provided == [acc]
    assert close(model(x), expected) and provided == [acc, x.device]
