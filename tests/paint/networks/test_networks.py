"""The networks against results of the published code, on its random weights in fp32."""

import gzip
import json
from pathlib import Path

import pytest
import torch
from anygpu.compat.errors import CheckpointError
from anygpu.paint.networks.layers import Dtypes, FeedForward, MultiHeadAttention
from anygpu.paint.networks.multiview import StreamInputs
from anygpu.paint.networks.pbr import DinoProjection, rotary_tables, voxel_indices
from anygpu.paint.networks.published import (
    KINDS,
    kind_of,
    networks_for,
    published,
    require_fitting,
    stored_dtype,
    without_adapter,
)
from anygpu.paint.networks.unet import STABLE_DIFFUSION_2, set_attention
from paint.stored import FIXTURES, config, values, weights

KEYS = {"paint": ("paint_v2_0", 1535), "paint_pbr": ("paintpbr_v2_1", 1747), "delight": ("delight_v2_0_unet", 686)}
TOLERANCE, KEPT_TOLERANCE = 1e-4, 1e-5  # of the fixtures' README
CHUNK_BYTES = 65536  # cuts the larger attentions of the fixture into about a dozen parts


def keys(kind: str) -> dict[str, tuple[int, ...]]:
    stored = (FIXTURES / "keys" / f"{KEYS[kind][0]}.json.gz").read_bytes()
    shapes = json.loads(gzip.decompress(stored))
    return {name: tuple(shape) for name, shape in shapes.items()}


def filled(kind: str, dtypes: Dtypes | None = None) -> dict[str, torch.nn.Module]:
    with torch.device("meta"):
        made = networks_for(kind, config(kind), dtypes)
    stored = weights(kind)
    for part, module in made.items():
        named = {key: stored[published(kind, part, key)] for key in module.state_dict()}
        if dtypes is not None:
            named = {key: tensor.to(stored_dtype(key, dtypes)) for key, tensor in named.items()}
        module.load_state_dict(named, assign=True)
    return made


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def paint():
    return filled("paint")


@pytest.fixture(scope="module")
def pbr():
    return filled("paint_pbr")


@pytest.mark.parametrize("kind", KINDS)
def test_full_size_networks_have_the_published_tensors_and_no_other(kind):
    wanted = keys(kind)
    with torch.device("meta"):
        made = networks_for(kind, STABLE_DIFFUSION_2)
    require_fitting(kind, wanted, made, "file")
    assert len(wanted) == KEYS[kind][1]
    assert kind_of(wanted, Path("unet")) == kind
    assert sum(len(module.state_dict()) for module in made.values()) == len(wanted)


def test_a_unet_of_plain_latents_is_none_that_delights():
    with pytest.raises(CheckpointError, match="'unet' holds no UNet of Hunyuan3D paint or delight"):
        kind_of({**keys("delight"), "conv_in.weight": (320, 4, 3, 3)}, Path("unet"))


def test_a_tensor_too_many_too_few_or_of_another_shape_is_refused():
    wanted = keys("delight")
    with torch.device("meta"):
        made = networks_for("delight", STABLE_DIFFUSION_2)
    cases = {
        "'extra' of the UNet in 'file' is .1,.; expected no such tensor": {**wanted, "extra": (1,)},
        "'conv_out.bias' of the UNet in 'file' is missing": {
            name: shape for name, shape in wanted.items() if name != "conv_out.bias"
        },
        "'conv_out.bias' of the UNet in 'file' is .5,.; expected .4,., as a delight UNet": {
            **wanted,
            "conv_out.bias": (5,),
        },
    }
    for text, shapes in cases.items():
        with pytest.raises(CheckpointError, match=text):
            require_fitting("delight", shapes, made, "file")


def test_only_the_whole_unused_image_prompt_is_left_out():
    wanted = keys("paint")
    layers = [name.removesuffix("to_q.weight") for name in wanted if name.endswith("transformer.attn2.to_q.weight")]
    main = [name for name in layers if name.startswith("unet.")]
    extra = [f"{name}processor.to_{part}_ip.weight" for name in main for part in "kv"]
    extra += [f"unet.image_proj_model.{name}" for name in ("proj.weight", "proj.bias", "norm.weight", "norm.bias")]
    assert len(extra) == 36
    assert without_adapter("paint", {**wanted, **dict.fromkeys(extra, (1,))}) == (wanted, 36)
    assert without_adapter("paint", {**wanted, extra[0]: (1,)})[1] == 0


def test_reference_tokens(paint):
    given = values("paint", "unet_dual_features")
    kept = paint["reference"](given.pop("ref_latents"))
    assert {f"feat.{name}" for name in kept} == set(given)
    for name, tokens in kept.items():
        assert (tokens - given[f"feat.{name}"]).abs().max() <= KEPT_TOLERANCE


def paint_out(paint, given, rows=slice(None), **changes):
    reference = paint["reference"](given["ref_latents"][1:])
    maps = torch.cat((given["normal_imgs"], given["position_imgs"]), dim=2)[:1]
    run = StreamInputs(6, reference, tuple(given["ref_scale"][rows].tolist()))
    return paint["unet"](
        given["sample"][rows], given["timestep"][None], maps, given["camera_info_gen"][0], changes.get("run", run)
    )


def test_paint_in_two_guidance_rows(paint):
    given, wanted = values("paint", "unet_cfg.in"), values("paint", "unet_cfg.out")["out"]
    assert (paint_out(paint, given) - wanted).abs().max() <= TOLERANCE
    assert (paint_out(paint, given, slice(1, 2)) - wanted[6:]).abs().max() <= TOLERANCE, "a row alone is the same"


def test_a_row_without_reference_never_attends_to_it(paint):
    given, calls = values("paint", "unet_cfg.in"), []
    layers = [module for name, module in paint["unet"].named_modules() if name.endswith("attn_refview")]
    handles = [layer.register_forward_hook(lambda _m, args, _o: calls.append(args[0].shape[0])) for layer in layers]
    paint_out(paint, given)
    for handle in handles:
        handle.remove()
    assert calls == [1] * len(layers), "one of the two rows, in each layer"


def test_several_references_lengthen_the_token_list(paint):
    latents = torch.randn(1, 3, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    kept, one = paint["reference"](latents), paint["reference"](latents[:, 1:2])
    for name, tokens in kept.items():
        count = one[name].shape[1]
        assert tokens.shape[1] == 3 * count
        assert (tokens[:, count : 2 * count] - one[name]).abs().max() <= KEPT_TOLERANCE
    run = StreamInputs(6, kept, (0.0, 1.0))
    assert torch.isfinite(paint_out(paint, values("paint", "unet_cfg.in"), run=run)).all()


class Given(torch.nn.Module):
    """In place of the projection of DINO, whose weights no fixture holds."""

    def forward(self, tokens, dtypes):
        return dtypes.narrow(tokens)


def pbr_out(pbr, monkeypatch, change=None):
    given = values("paint_pbr", "unet_cfg3.in")
    monkeypatch.setitem(pbr["unet"]._modules, "image_proj_model_dino", Given())
    voxels = voxel_indices(given["position_maps"][0], 8)
    tables = {tokens: rotary_tables(found, 16) for tokens, found in voxels.items()}
    reference = pbr["reference"](given["ref_latents"][1:])
    maps = torch.cat((given["embeds_normal"], given["embeds_position"]), dim=2)[:1]
    run = StreamInputs(6, reference, (0.0, 1.0), materials=2, rotary=tables)
    return pbr["unet"](given["sample"], given["timestep"][None], maps, given["dino_tokens"], run)


def test_pbr_in_two_of_upstreams_three_rows(pbr, monkeypatch):
    wanted = values("paint_pbr", "unet_cfg3.out")["out"]
    assert (pbr_out(pbr, monkeypatch) - wanted).abs().max() <= TOLERANCE


def test_dino_projection_makes_four_tokens_of_one():
    projection = DinoProjection()
    states = torch.randn(2, 3, 1536, generator=torch.Generator().manual_seed(0))
    found = projection(states, Dtypes())
    flat = projection.proj(states)
    assert found.shape == (2, 12, 1024)
    assert torch.allclose(found[1, 5], projection.norm(flat[1, 1, 1024:2048]), atol=1e-6)


def test_voxels_and_rotary_tables():
    given = values("paint_pbr", "position_encoding")
    maps = values("paint_pbr", "unet_cfg3.in")["position_maps"][0]
    found = voxel_indices(maps, 8)
    assert set(found) == {384, 96, 24, 6}
    for tokens, voxels in found.items():
        assert torch.equal(voxels, given[f"voxel.{tokens}"].long()), f"{tokens} tokens"
    for tokens in (96, 24):
        cosines, sines = rotary_tables(found[tokens], 16)
        assert torch.equal(cosines, given[f"rope_cos.{tokens}.16"])
        assert torch.equal(sines, given[f"rope_sin.{tokens}.16"])


def test_background_counts_from_the_second_level_on():
    maps = torch.ones(1, 3, 64, 64)
    maps[:, :, :16, :16] = 0.5
    found = voxel_indices(maps, 8)
    assert found[64][0, 0].tolist() == [32, 32, 32]  # 0.5 of 63, half to even
    assert found[4][0, 0].tolist() == [round(0.5 * 256 / 1024 * 15)] * 3, "a mean over background too"


def test_attention_in_chunks_is_the_same(paint):
    from anygpu.compat.transforms.attention import Attention as Kernel
    from anygpu.compat.transforms.attention_chunks import chunked

    given, used = values("paint", "unet_cfg.in"), []

    def attend(query, key, value):
        used.append(query.shape)
        return chunked(query, key, value, budget_bytes=CHUNK_BYTES)

    for module in paint.values():
        set_attention(module, attend)
    found = paint_out(paint, given, slice(1, 2))
    for module in paint.values():
        set_attention(module, Kernel())
    assert used
    assert (found - values("paint", "unet_cfg.out")["out"][6:]).abs().max() <= TOLERANCE
    assert all(isinstance(m.attend, Kernel) for m in paint["unet"].modules() if isinstance(m, MultiHeadAttention))


SAFE, BF16 = Dtypes(torch.float16, torch.float32), Dtypes(torch.bfloat16, torch.bfloat16)


NARROW = [("paint", SAFE, 4e-3), ("paint", BF16, 0.15), ("paint_pbr", SAFE, 4e-3)]


@pytest.mark.full
@pytest.mark.parametrize(("kind", "dtypes", "limit"), NARROW)
def test_narrow_operands_give_what_fp32_gives_to_their_precision(kind, dtypes, limit, monkeypatch):
    made = filled(kind, dtypes)
    if kind == "paint":
        found, wanted = paint_out(made, values(kind, "unet_cfg.in")), values(kind, "unet_cfg.out")["out"]
    else:
        found, wanted = pbr_out(made, monkeypatch), values(kind, "unet_cfg3.out")["out"]
    assert found.dtype is dtypes.compute
    error = (found.float() - wanted).square().mean().sqrt() / wanted.square().mean().sqrt()
    assert error <= limit, f"{error:.2e}"


def test_a_feed_forward_in_pieces_is_the_whole(monkeypatch):
    layer, x = FeedForward(8), torch.randn(5, 4, 8)
    with torch.no_grad():
        whole = layer(x)
        monkeypatch.setattr("anygpu.paint.networks.layers.FED_TOKENS", 8)
        torch.testing.assert_close(layer(x), whole)
