"""Every decoder and encoder beside its publisher's own code: ``tests/fixtures/vae`` holds what that code returned."""

import copy
import json
import math
from pathlib import Path

import layouts
import pytest
import torch
from anygpu.compat.errors import CheckpointError
from anygpu.compat.transforms.conv3d import swap_conv3d
from anygpu.compat.transforms.conv3d_methods import Conv3dMethod
from anygpu.compat.transforms.fused_vae import fuse_vae
from anygpu.pipelines.base import Latents, Silent
from anygpu.pipelines.files.single_file import Files
from anygpu.pipelines.load.folder import load
from anygpu.pipelines.pipeline import Pipeline
from anygpu.pipelines.requests import LoadRequest
from anygpu.pipelines.vae.fallback import decoding, encoded_moments
from anygpu.pipelines.vae.plan import DecodeRequest
from convolutions import always
from published import compared
from safetensors.torch import load_file, save_file
from torch import Tensor

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures" / "vae"
NEAR = 2e-3  # of the norm: the publishers' results are kept in fp16
CLASSES = {
    "mochi": ("mochi", "AutoencoderKLMochi"),
    "hunyuan_video": ("hunyuan_video", "AutoencoderKLHunyuanVideo"),
    "hunyuan_video_15": ("hunyuan_video_15_i2v", "AutoencoderKLHunyuanVideo15"),
    "ltx_090": ("ltx", "AutoencoderKLLTXVideo"),
}
FULL, STREAMED, CHUNKED, TILED = (
    DecodeRequest("full"),
    DecodeRequest("streaming", tile=8),
    DecodeRequest("chunked", frames=1),
    DecodeRequest("tiled"),
)


@pytest.fixture(scope="module")
def opened(tiny_folder, tmp_path_factory):
    """A fixture's pipeline, its VAE read from a single file in the names of its release, and its tensors."""
    made: dict[tuple[str, str, str], tuple[Pipeline, dict[str, Tensor]]] = {}

    def of(name: str, padding: str = "", said_in: str = "") -> tuple[Pipeline, dict[str, Tensor]]:
        if (name, padding, said_in) not in made:
            model, cls = CLASSES[name]
            folder, tensors = tmp_path_factory.mktemp(name), load_file(FIXTURES / f"{name}.safetensors")
            about = json.loads((FIXTURES / f"{name}.json").read_text())
            weights = {
                key.removeprefix("weights."): tensor.float()
                for key, tensor in tensors.items()
                if key.startswith("weights.")
            }
            files = layouts.whole_set(model, tiny_folder, folder)
            mode = {"spatial_padding_mode": padding}
            config = {"_class_name": cls, **about["diffusers_config"], **(mode if said_in == "json" else {})}
            files["vae"] = layouts.write(folder / "published.safetensors", weights, config)
            if said_in == "metadata":
                save_file(weights, files["vae"], {"config": json.dumps({"vae": mode})})
            base = layouts.tools_only(model, tiny_folder, folder)
            request = LoadRequest(files["transformer"], base=base, device="cpu", precision="fp32", files=Files(files))
            made[name, padding, said_in] = load(request), tensors
        return made[name, padding, said_in]

    with torch.no_grad():
        yield of


def near(ours: Tensor, theirs: Tensor) -> bool:
    return float((ours - theirs.float()).norm()) <= NEAR * float(theirs.float().norm())


def frames_of(pipeline: Pipeline, samples: Tensor, form: DecodeRequest) -> Tensor:
    with decoding(pipeline, samples.shape, Silent(), form) as passes:
        return passes.decode(samples.float())


def each_frame_near(ours: Tensor, theirs: Tensor) -> None:
    """Frame by frame, so that what is wrong in the first few is not lost in the mean."""
    assert ours.shape == theirs.shape
    wrong = [index for index in range(ours.shape[2]) if not near(ours[:, :, index], theirs[:, :, index])]
    assert not wrong, f"frames {wrong} of {ours.shape[2]}"


@pytest.mark.parametrize("form", [FULL, STREAMED, CHUNKED, DecodeRequest("chunked", frames=2), TILED], ids=str)
@pytest.mark.parametrize(("source", "result"), [("latents", "decoded"), ("first", "decoded_first_latent")])
def test_mochi_drops_frames_where_genmo_does(opened, form, source, result):
    pipeline, tensors = opened("mochi")
    latents = tensors["in.latents"] if source == "latents" else tensors["in.latents"][:, :, :1]
    each_frame_near(frames_of(pipeline, latents, form), tensors[f"out.{result}"])


@pytest.mark.parametrize("form", [FULL, STREAMED, TILED], ids=str)
@pytest.mark.parametrize(("source", "result"), [("latents", "decoded"), ("long_latents", "long_decoded_tiled")])
def test_hunyuan_video_in_tencents_windows(opened, form, source, result):
    pipeline, tensors = opened("hunyuan_video")
    each_frame_near(frames_of(pipeline, tensors[f"in.{source}"], form), tensors[f"out.{result}"])


def test_tiles_are_cut_and_blended_where_tencent_does_both(opened):
    """Tiles of 4 latents over 4 x 7: where ours and Tencent's are alike, so is the video, but for half a pixel of ramp.

    Tencent decodes the last row and the last column once more, as tiles of their own; ours are two, of one size.
    """
    pipeline, _ = opened("hunyuan_video")
    tensors = load_file(FIXTURES / "hunyuan_video_tiles.safetensors")
    latents, theirs = tensors["in.latents"], tensors["out.decoded_tiled"].float()
    ours = frames_of(pipeline, latents, DecodeRequest("tiled", tile=32))
    ours_seen, theirs_seen = ((each / 2 + 0.5).clamp(0, 1) for each in (ours, theirs))
    apart = (ours_seen - theirs_seen).abs()
    assert (float(apart.max()), float(apart.mean())) == pytest.approx(compared.LAST_TILE, rel=0.02), (
        "the page says else"
    )
    left, right = (frames_of(pipeline, latents[..., first : first + 4], FULL) for first in (0, 3))
    theirs[..., 24:32] += (right[..., :8] - left[..., 24:]) / 16
    each_frame_near(ours[..., :24, :48], theirs[..., :24, :48])
    assert not near(left[..., 24:], right[..., :8]), "tiles that agree prove nothing"


def test_hunyuan_video_is_encoded_in_tencents_tiles(opened):
    pipeline, _ = opened("hunyuan_video")
    tensors = load_file(FIXTURES / "hunyuan_video_tiles.safetensors")
    frames = tensors["in.frames"].float()[0].movedim(0, -1) / 2 + 0.5
    moments = encoded_moments(pipeline, frames, Silent(), "encoding", tile=32)
    assert near(moments[:, : moments.shape[1] // 2], tensors["out.encoded_tiled"])


@pytest.mark.parametrize("form", [STREAMED, DecodeRequest("full", frames=4)], ids=str)
def test_windows_of_16_are_named(opened, monkeypatch, recorded, form):
    """They are taken where streaming has too little host memory for Tencent's, or where somebody asks for them."""
    monkeypatch.setattr("anygpu.pipelines.vae.plan.host_free_bytes", lambda: 0)
    pipeline, tensors = opened("hunyuan_video")
    latents, progress = tensors["in.latents"].float(), recorded()
    with decoding(pipeline, latents.shape, progress, form) as passes:
        short = passes.decode(latents)
    assert any("in windows of 4 latent frames" in line for line in progress.said)
    assert short.shape == tensors["out.decoded"].shape and not near(short, tensors["out.decoded"])


def test_hunyuan_video_is_decoded_in_tencents_tiles_where_the_whole_is_larger_than_one(opened):
    spec = opened("hunyuan_video")[0].spec
    assert spec.sizes.tile_for((17, 32, 32)) == 0 and spec.sizes.tile_for((33, 90, 160)) == 256


@pytest.mark.parametrize("form", [FULL, STREAMED, CHUNKED, TILED], ids=str)
def test_hunyuan_video_15_sees_no_later_frame(opened, form):
    pipeline, tensors = opened("hunyuan_video_15")
    each_frame_near(frames_of(pipeline, tensors["in.latents"], form), tensors["out.decoded"])


@pytest.mark.parametrize("form", [FULL, STREAMED, TILED], ids=str)
def test_ltx_pads_with_zeros(opened, form):
    pipeline, tensors = opened("ltx_090")
    samples = tensors["in.latents"].float()
    latents = Latents(samples, "ltx", "text", 9, 32, 32, 24.0, 0)
    ours = pipeline.spec.code.decode(pipeline, latents, Silent(), form).movedim(-1, 0)[None]
    each_frame_near(ours, ((tensors["out.decoded"].float() + 1) / 2).clamp(0, 1))


def waves(*shape: int, power: float = 1.0, pace: float) -> Tensor:
    return torch.sin(torch.arange(math.prod(shape), dtype=torch.float64) ** power * pace).reshape(shape).float()


@pytest.mark.parametrize(
    ("padding", "said_in"),
    [
        ("reflect", "json"),
        ("replicate", "metadata"),
        pytest.param("reflect", "metadata", marks=pytest.mark.full),
        pytest.param("replicate", "json", marks=pytest.mark.full),
    ],
)
def test_ltx_pads_as_its_file_says(opened, padding, said_in):
    """In each decode form and in encode, next to Lightricks' own code with that padding in its configuration."""
    pipeline, _ = opened("ltx_090", padding, said_in)
    theirs = load_file(FIXTURES / "ltx_090_padding.safetensors")
    vae, forms = pipeline.parts["vae"], [FULL, STREAMED, TILED] if said_in == "metadata" else [FULL]
    latents = Latents(1.5 * waves(1, 8, 2, 2, 2, pace=0.7), "ltx", "text", 9, 64, 64, 24.0, 0)
    for form in forms:
        ours = pipeline.spec.code.decode(pipeline, latents, Silent(), form).movedim(-1, 0)[None]
        each_frame_near(ours[..., ::3, ::3], ((theirs[f"out.decoded.{padding}"].float() + 1) / 2).clamp(0, 1))
    video = waves(3, 9, 64, 64, power=1.3, pace=0.01).movedim(0, -1) / 2 + 0.5
    moments = encoded_moments(pipeline, video, Silent(), "encoding").chunk(2, dim=1)[0]
    mean, std = (value.view(1, -1, 1, 1, 1) for value in (vae.latents_mean, vae.latents_std))
    assert near((moments - mean) / std, theirs[f"out.encoded_mean.{padding}"])


@pytest.mark.parametrize(
    "convolution",
    [
        pytest.param(form, marks=[] if form is Conv3dMethod.FRAMES else [pytest.mark.full])
        for form in Conv3dMethod
        if form is not Conv3dMethod.NATIVE
    ],
    ids=str,
)
def test_rewritten_layers_pad_as_the_file_says(opened, convolution):
    vae, z = copy.deepcopy(opened("ltx_090", "reflect", "metadata")[0].parts["vae"]), waves(1, 8, 2, 2, 2, pace=0.7)
    expected = vae.decoder(z)
    swapped, fused = swap_conv3d(vae, always(convolution)), fuse_vae(vae, "reference")
    assert swapped.choices and fused.points
    assert float((vae.decoder(z) - expected).norm()) <= 1e-5 * float(expected.norm())


def test_a_padding_that_tiles_cannot_equal_ends_the_load(opened):
    with pytest.raises(CheckpointError, match=r"spatial_padding_mode 'circular' .*zeros, reflect, replicate"):
        opened("ltx_090", "circular", "metadata")


@pytest.mark.parametrize(
    ("name", "video", "mean"),
    [
        ("mochi", "video", "encoded_mean"),
        ("hunyuan_video", "video", "encoded_mean"),
        ("hunyuan_video", "long_video", "long_encoded_mean_tiled"),
        ("hunyuan_video_15", "video", "encoded_mean"),
        ("ltx_090", "video", "encoded_mean"),
    ],
)
def test_encoders_return_their_publishers_means(opened, name, video, mean):
    pipeline, tensors = opened(name)
    pictures = (tensors[f"in.{video}"][0].float().movedim(0, -1) + 1) / 2
    ours = encoded_moments(pipeline, pictures, Silent(), "encoding").chunk(2, dim=1)[0]
    if name == "ltx_090":
        vae = pipeline.parts["vae"]
        ours = (ours - vae.latents_mean.view(1, -1, 1, 1, 1)) / vae.latents_std.view(1, -1, 1, 1, 1)
    assert ours.shape == tensors[f"out.{mean}"].shape
    assert near(ours, tensors[f"out.{mean}"])
