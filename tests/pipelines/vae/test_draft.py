"""Drafts by tiny decoders: their network against its formula, their work against the VAE's, and who has none."""

import copy
import json
import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import diffusers
import pytest
import tiny
import torch
from anygpu.compat.device.quirks import DevicePolicy
from anygpu.compat.errors import CheckpointError, UnsupportedError
from anygpu.pipelines import stages
from anygpu.pipelines.base import Latents, Silent
from anygpu.pipelines.load.folder import load
from anygpu.pipelines.pipeline import DEMOS
from anygpu.pipelines.registry import FAMILIES
from anygpu.pipelines.requests import LoadRequest
from anygpu.pipelines.vae import draft
from anygpu.pipelines.vae.plan import DRAFT
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

ROWS = {id: family for id, family in FAMILIES.items() if family.published.tiny_decoders}
CHANNELS = {"hunyuan_video": 16, "framepack": 16, "hunyuan_video_15": 32, "mochi": 12}
FIRST = [id if id == "mochi" else pytest.param(id, marks=pytest.mark.full) for id in ROWS]  # of one path for all
STRIDES = {4: (1, 2, 2), 6: (1, 2, 3)}  # of the stages, by pixel frames per latent frame: taehv and taem1


@cache
def network_of(id: str, row: int) -> draft.Network:
    """The network of a family with weights that keep its values near 0..1, which nobody may change."""
    torch.manual_seed(0)
    sizes = FAMILIES[id].sizes
    network = draft.Network(
        CHANNELS[id], STRIDES[sizes.stride], sizes.ratio // 8, FAMILIES[id].published.tiny_decoders[row]
    )
    for name, weight in network.named_parameters():
        torch.nn.init.normal_(weight, 0.0, 0.02 if name.endswith("bias") else 0.7 / math.sqrt(weight[0].numel()))
    return network.eval().requires_grad_(False)


def file_of(id: str, folder: Path, name: str = "", row: int = 0) -> Path:
    """Such a network as its publisher's file has it, with an encoder that a draft does not read."""
    named = name or f"{FAMILIES[id].published.tiny_decoders[row].name}.safetensors"
    tensors = {f"decoder.{key}": tensor for key, tensor in network_of(id, row).state_dict().items()}
    tensors = {key: tensor.half() for key, tensor in tensors.items()} | {"encoder.0.weight": torch.zeros(64, 3, 3, 3)}
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(tensors, folder / named) if named.endswith(".pth") else save_file(tensors, folder / named)
    return folder / named


def frames_of(network: draft.Network, latents: Tensor) -> Tensor:
    """Frames (F, 3, H, W) of latents (1, C, T, h, w), a latent frame at a time."""
    before: dict[Any, Tensor] = {}
    return torch.cat([network(latent, before) for latent in latents.unbind(2)])


def by_formula(weights: dict[str, Tensor], latents: Tensor, patch: int, slope: float, trimmed: int) -> Tensor:
    """Frames (F, 3, H, W) of latents (1, C, T, h, w), all at once in double, from the numbers of a file's layers."""
    weights = {name: tensor.double() for name, tensor in weights.items()}

    def conv(values: Tensor, name: str) -> Tensor:
        side = weights[f"{name}.weight"].shape[-1] // 2
        return functional.conv2d(values, weights[f"{name}.weight"], weights.get(f"{name}.bias"), padding=side)

    def act(values: Tensor) -> Tensor:
        return torch.where(values > 0, values, values * slope)

    frames = latents[0].double().transpose(0, 1)
    frames = act(conv(3 * torch.tanh(frames / 3), "1"))
    for stage in range(3):
        first = 3 + 6 * stage
        for block in range(first, first + 3):
            past = torch.cat((torch.zeros_like(frames[:1]), frames))[:-1]
            inner = torch.cat((frames, past), 1)
            inner = conv(act(conv(act(conv(inner, f"{block}.conv.0")), f"{block}.conv.2")), f"{block}.conv.4")
            frames = act(inner + frames)
        frames = frames.repeat_interleave(2, -1).repeat_interleave(2, -2)
        count, width = frames.shape[:2]
        grown = conv(frames, f"{first + 4}.conv")
        frames = grown.reshape(-1, width, *grown.shape[2:])
        assert frames.shape[0] % count == 0
        frames = conv(frames, f"{first + 5}")
    frames = conv(act(frames), "22")
    return functional.pixel_shuffle(frames, patch)[trimmed:]


@pytest.mark.full
@pytest.mark.parametrize("id", ROWS)
def test_a_latent_frame_at_a_time_is_all_of_them_at_once(id: str) -> None:
    sizes = FAMILIES[id].sizes
    for row, made in enumerate(FAMILIES[id].published.tiny_decoders):
        network, latents = network_of(id, row), torch.randn(1, CHANNELS[id], 3, 2, 3)
        weights = network.state_dict()
        frames = frames_of(network, latents)
        patch = sizes.ratio // 8
        expected = by_formula(weights, latents / made.divisor, patch, made.slope, sizes.stride - 1)
        expected = (expected / 2 + 0.5 if made.symmetric else expected).clamp(0, 1)
        assert frames.shape == (2 * sizes.stride + 1, 3, 2 * sizes.ratio, 3 * sizes.ratio)
        torch.testing.assert_close(frames.double(), expected, atol=1e-5, rtol=0)
        assert float(((frames > 0) & (frames < 1)).float().mean()) > 0.2, "nearly all of it is clamped"


@pytest.mark.full
@pytest.mark.parametrize("id", [id for id in ROWS if id != "framepack"])  # whose VAE and decoder are HunyuanVideo's
def test_a_draft_is_at_most_a_tenth_of_the_work(id: str) -> None:
    """Counted products of the VAE as published and of the tiny decoder, for 3 latent frames of 64 x 64 pixels."""
    owner = FAMILIES[id]
    config = json.loads((owner.folder / "vae.json").read_text(encoding="utf-8"))
    config = config[0] if isinstance(config, list) else config
    config = config.get("config", config)
    side, channels = 64 // owner.sizes.ratio, CHANNELS[id]

    def counted(run: Any) -> int:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            run()
        return counter.get_total_flops()

    network = copy.deepcopy(network_of(id, 0)).to("meta")
    with torch.device("meta"):
        vae = getattr(diffusers, owner.files.parts["vae"][1]).from_config(config).eval()
        latents = torch.empty(1, channels, 3, side, side)
        whole = counted(lambda: vae.decode(latents))
        drafted = counted(lambda: frames_of(network, latents))
    assert 0 < drafted <= whole / 10


@pytest.fixture(params=FIRST)
def sampled(request: pytest.FixtureRequest, tiny_folder: Path) -> tuple[Any, Latents]:
    return sampled_of(request.param, tiny_folder)


def sampled_of(id: str, tiny_folder: Path) -> tuple[Any, Latents]:
    """A tiny pipeline of a family that has a tiny decoder, and latents of it."""
    paths = [tiny.build(name, tiny_folder) for name in (id, *tiny.TINY[id].beside)]  # model, base and image encoder
    pipeline = load(LoadRequest(*paths, device="cpu", precision="fp32"))
    sizes = FAMILIES[id].sizes
    latents = Latents(
        samples=torch.randn(1, CHANNELS[id], 2, 2, 2),
        family=id,
        task="text",
        frames=sizes.stride,  # fewer than decoded
        height=2 * sizes.ratio,
        width=2 * sizes.ratio,
        fps=24.0,
        seed=0,
    )
    return pipeline, latents


def test_a_draft_heeds_what_ails_the_convolutions_of_a_device(
    sampled: Any, tmp_path: Path, recorded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline, latents = sampled
    file_of(latents.family, tmp_path / "vae_approx")
    dtypes = replace(pipeline.precision, vae=torch.bfloat16, conv=torch.float32)
    pipeline = replace(pipeline, device=replace(pipeline.device, precision=dtypes))
    seen, inner = set[Any](), draft.Network.forward

    def forward(network: Any, latent: torch.Tensor, before: Any) -> torch.Tensor:
        seen.add((latent.dtype, torch.backends.cudnn.enabled))
        return inner(network, latent, before)

    monkeypatch.setattr(draft.Network, "forward", forward)
    monkeypatch.setattr(draft, "policy_for", lambda _: DevicePolicy(vae_cudnn=False))
    stages.decode(pipeline, latents, recorded(), DRAFT, tiny_decoders=[tmp_path])
    assert seen == {(torch.float32, False)}


@pytest.mark.full
@pytest.mark.parametrize(
    "id", [id if id in ("mochi", "hunyuan_video_15") else pytest.param(id, marks=pytest.mark.full) for id in ROWS]
)
def test_the_draft_of_kept_latents_reads_no_vae(id: str, tiny_folder: Path, tmp_path: Path, recorded: Any) -> None:
    pipeline, latents = sampled_of(id, tiny_folder)
    config, progress = pipeline.configs["vae"], recorded()
    file = file_of(id, tmp_path / "vae_approx")
    latents = replace(latents, extra={"drop_frames": 1})
    frames = stages.decode(pipeline, latents, progress, DRAFT, tiny_decoders=[tmp_path])
    scale = float(config.get("scaling_factor", 1.0))
    mean, std = (
        torch.tensor(config.get(key) or [usual]) for key, usual in (("latents_mean", 0.0), ("latents_std", 1.0))
    )
    modelled = (latents.samples - mean.view(1, -1, 1, 1, 1)) * scale / std.view(1, -1, 1, 1, 1)
    network = copy.deepcopy(network_of(id, 0))
    network.load_state_dict({key: tensor.half().float() for key, tensor in network.state_dict().items()})
    expected = frames_of(network, modelled)[1:].permute(0, 2, 3, 1)
    assert torch.equal(frames, expected[: latents.frames]) and frames.shape[0] == latents.frames
    assert any(file.name in line for line in progress.said)
    assert "vae" not in dict(pipeline.parts.items()) and draft.PART not in pipeline.parts.readers


def test_a_pickle_is_read_as_weights_alone(sampled: Any, tmp_path: Path) -> None:
    pipeline, latents = sampled
    named = pipeline.spec.published.tiny_decoders[0].name
    file_of(pipeline.family, tmp_path / "pickled", f"{named}.pth")
    file_of(pipeline.family, tmp_path / "safe")
    one, other = (
        stages.decode(pipeline, latents, Silent(), DRAFT, tiny_decoders=[tmp_path / name])
        for name in ("pickled", "safe")
    )
    assert torch.equal(one, other)


def test_without_a_file_that_fits_its_name_and_source_are_said(sampled: Any, tmp_path: Path) -> None:
    pipeline, latents = sampled
    row = pipeline.spec.published.tiny_decoders[0]
    with pytest.raises(CheckpointError, match=row.source):
        stages.decode(pipeline, latents, Silent(), DRAFT, tiny_decoders=[tmp_path, tmp_path / "gone"])
    other = "mochi" if pipeline.family != "mochi" else "hunyuan_video"
    file_of(other, tmp_path, f"{row.name}_other.safetensors")
    with pytest.raises(CheckpointError, match=f"{row.name}_other.safetensors' holds another network"):
        stages.decode(pipeline, latents, Silent(), DRAFT, tiny_decoders=[tmp_path])
    whole = load_file(file_of(pipeline.family, tmp_path, f"{row.name}_other.safetensors"))
    wrong = {name: torch.tensor(1.0) for name in ("decoder.22.weight", "decoder.7.conv.weight")}
    for changes in (*({name: scalar} for name, scalar in wrong.items()), {n: t.int() for n, t in whole.items()}):
        save_file({**whole, **changes}, tmp_path / f"{row.name}_other.safetensors")
        with pytest.raises(CheckpointError, match="holds another network"):
            draft.tiny_decoder(pipeline.spec, [tmp_path])


def test_the_file_of_a_newer_model_is_passed_over(tmp_path: Path) -> None:
    """Its name begins alike: ComfyUI's list puts taehv.safetensors before taehv1_5.safetensors, not on every system."""
    file_of("hunyuan_video_15", tmp_path, "taehv-1_5.safetensors")
    own = file_of("hunyuan_video", tmp_path)
    assert draft.tiny_decoder(FAMILIES["hunyuan_video"], [tmp_path])[0] == own


def test_a_family_without_one_says_so_in_one_line(tiny_folder: Path) -> None:
    pipeline = load(LoadRequest(tiny.build("ltx", tiny_folder), device="cpu", precision="fp32"))
    latents = Latents(torch.zeros(1, 128, 1, 2, 2), "ltx", "text", 1, 64, 64, 24.0, 0)
    with pytest.raises(
        UnsupportedError, match="a draft of LTX-Video, for which no tiny decoder is published"
    ) as raised:
        stages.decode(pipeline, latents, Silent(), DRAFT)
    assert "\n" not in str(raised.value)


def test_broken_values_of_a_draft_are_an_error(sampled: Any, tmp_path: Path) -> None:
    pipeline, latents = sampled
    file = file_of(pipeline.family, tmp_path)
    tensors = {key: tensor.half() for key, tensor in network_of(pipeline.family, 0).state_dict().items()}
    tensors["22.bias"] = torch.full_like(tensors["22.bias"], math.nan)
    save_file({f"decoder.{key}": tensor for key, tensor in tensors.items()}, file)
    with pytest.raises(Exception, match="values of the draft are NaN"):
        stages.decode(pipeline, latents, Silent(), DRAFT, tiny_decoders=[tmp_path])


def test_the_draft_of_a_demo_model_is_refused(sampled: Any, tmp_path: Path) -> None:
    """Its VAE was trained anew, so that published tiny decoders would draw noise of its latents."""
    pipeline, latents = sampled
    file_of(pipeline.family, tmp_path)
    demo = replace(pipeline, model=replace(pipeline.model, source=DEMOS / "hunyuan_video"))
    assert demo.is_demo
    with pytest.raises(UnsupportedError, match="a draft of a demo model"):
        stages.decode(demo, latents, Silent(), DRAFT, tiny_decoders=[tmp_path])
