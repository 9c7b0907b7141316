"""Every style of LoRA keys leads to the same layers, and a filter to the blocks it names."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from anygpu.compat.errors import CheckpointError, InputError
from anygpu.pipelines.files.lora_keys import chosen, matched
from anygpu.pipelines.registry import FAMILIES

D, RANK = 6, 2
FILE = Path("some_lora.safetensors")
HUNYUAN = {
    **{f"transformer_blocks.{i}.attn.{n}": (D, D) for i in range(3) for n in ("to_q", "to_k", "to_v", "to_out.0")},
    **{f"single_transformer_blocks.{i}.attn.{n}": (D, D) for i in range(2) for n in ("to_q", "to_k", "to_v")},
    **{f"single_transformer_blocks.{i}.proj_mlp": (4 * D, D) for i in range(2)},
    **{f"single_transformer_blocks.{i}.proj_out": (D, 5 * D) for i in range(2)},
    "x_embedder.proj": (D, 4, 1, 2, 2),
    "norm_out.linear": (2 * D, D),
}
MOCHI = {
    **{f"transformer_blocks.{i}.attn1.{n}": (D, D) for i in range(2) for n in ("to_q", "to_k", "to_v")},
    **{f"transformer_blocks.{i}.ff.net.0.proj": (4 * D, D) for i in range(2)},
    "transformer_blocks.0.norm1_context.linear": (4 * D, D),
    "transformer_blocks.1.norm1_context.linear_1": (D, D),
}


def pair(base: str, out: int, inside: int = D, style: str = "lora_A") -> dict[str, torch.Tensor]:
    """Factors of small integers under one style's names."""
    names = {"lora_A": ("lora_A.weight", "lora_B.weight"), "kohya": ("lora_down.weight", "lora_up.weight")}[style]
    generator = torch.Generator().manual_seed(out * 31 + inside)
    down = torch.randint(-3, 4, (RANK, inside), generator=generator).float()
    up = torch.randint(-3, 4, (out, RANK), generator=generator).float()
    return {f"{base}.{names[0]}": down, f"{base}.{names[1]}": up}


def products(tensors: dict[str, torch.Tensor], layers: dict, family: str) -> dict[str, torch.Tensor]:
    """What each layer gets."""
    match = matched(FILE, {name: tuple(t.shape) for name, t in tensors.items()}, layers, FAMILIES[family])
    assert not match.unmatched
    found = {}
    for name, entry in match.pairs.items():
        down, up, *_ = entry.delta(tensors)
        found[name] = up.flatten(1) @ down.flatten(1)
    return found


@pytest.mark.parametrize(
    "base",
    [
        "transformer_blocks.1.attn.to_out.0",
        "transformer.transformer_blocks.1.attn.to_out.0",
        "base_model.model.transformer_blocks.1.attn.to_out.0",
        "diffusion_model.double_blocks.1.img_attn_proj",
        "diffusion_model.double_blocks.1.img_attn.proj",
        "model.diffusion_model.double_blocks.1.img_attn_proj",
        "double_blocks.1.img_attn_proj",
        "transformer.double_blocks.1.img_attn_proj",
        "lora_unet_double_blocks_1_img_attn_proj",
        "lora_unet_transformer_blocks_1_attn_to_out_0",
        "Hunyuan_video_I2V_lora_double_blocks_1_img_attn_proj",
    ],
)
@pytest.mark.parametrize("style", ["lora_A", "kohya"])
def test_one_layer_under_all_its_names(base: str, style: str) -> None:
    found = products(pair(base, D, style=style), HUNYUAN, "hunyuan_video")
    expected = products(pair("transformer_blocks.1.attn.to_out.0", D), HUNYUAN, "hunyuan_video")
    assert list(found) == ["transformer_blocks.1.attn.to_out.0"]
    assert torch.equal(found[next(iter(found))], expected[next(iter(expected))])


@pytest.mark.parametrize("prefix", ["diffusion_model.{}", "lora_unet_{}"])
@pytest.mark.parametrize(("source", "sizes"), [("double_blocks.2.img_attn_qkv", 3), ("single_blocks.1.linear1", 7)])
def test_fused_layers_are_cut_by_rows(prefix: str, source: str, sizes: int) -> None:
    base = prefix.format(source if "diffusion" in prefix else source.replace(".", "_"))
    tensors = pair(base, sizes * D)
    found, whole = products(tensors, HUNYUAN, "hunyuan_video"), tensors[f"{base}.lora_B.weight"]
    assert torch.equal(torch.cat(list(found.values())), whole @ tensors[f"{base}.lora_A.weight"])
    assert [name.rpartition(".")[2] for name in found][:3] == ["to_q", "to_k", "to_v"]


def test_diffusers_own_converter_cuts_the_same_way() -> None:
    from diffusers.loaders.lora_conversion_utils import _convert_hunyuan_video_lora_to_diffusers

    tensors = pair("diffusion_model.double_blocks.0.img_attn_qkv", 3 * D)
    tensors |= pair("diffusion_model.double_blocks.0.img_attn_proj", D)
    theirs = _convert_hunyuan_video_lora_to_diffusers(dict(tensors))
    ours = products(tensors, HUNYUAN, "hunyuan_video")
    for name, product in ours.items():
        down, up = (theirs[f"transformer.{name}.lora_{letter}.weight"] for letter in "AB")
        assert torch.equal(up @ down, product), name
    assert len(theirs) == 2 * len(ours)


def test_framepack_knows_hunyuan_videos_names() -> None:
    assert products(pair("lora_unet_double_blocks_0_img_attn_qkv", 3 * D), HUNYUAN, "framepack")


def test_halves_and_last_layers_of_mochi() -> None:
    tensors = pair("blocks.0.mlp_x.w1", 4 * D) | pair("blocks.1.mod_y", D) | pair("blocks.0.mod_y", 4 * D)
    found = products(tensors, MOCHI, "mochi")
    plain = tensors["blocks.0.mlp_x.w1.lora_B.weight"] @ tensors["blocks.0.mlp_x.w1.lora_A.weight"]
    assert torch.equal(found["transformer_blocks.0.ff.net.0.proj"], torch.cat(list(reversed(plain.chunk(2)))))
    assert {"transformer_blocks.1.norm1_context.linear_1", "transformer_blocks.0.norm1_context.linear"} <= set(found)


@pytest.mark.parametrize("base", ["diffusion_model.img_in.proj", "lora_unet_img_in_proj", "x_embedder.proj"])
def test_a_convolution_keeps_its_window(base: str) -> None:
    tensors = {
        f"{base}.lora_A.weight": torch.ones(RANK, 4, 1, 2, 2),
        f"{base}.lora_B.weight": torch.ones(D, RANK, 1, 1, 1),
    }
    assert list(products(tensors, HUNYUAN, "hunyuan_video")) == ["x_embedder.proj"]


def shapes(*bases: str, out: int = D) -> dict[str, tuple[int, ...]]:
    return {name: tuple(t.shape) for base in bases for name, t in pair(base, out).items()}


def test_keys_that_do_not_match_are_counted_and_named() -> None:
    keys = shapes("transformer_blocks.0.attn.to_q", "down_blocks.0.attn", "lora_te_text_model_q")
    keys |= shapes("transformer_blocks.1.attn.to_q", out=D + 1)
    match = matched(FILE, keys, HUNYUAN, FAMILIES["hunyuan_video"])
    said = match.message("name")
    assert said.startswith("name: 1 layer, 2 of 8 keys match; 2 belong to text encoders")
    assert "'down_blocks.0.attn.lora_A.weight'" in said and "and 1 more" in said
    said = replace(match, text_encoder=1, filtered=1).message("name")
    assert "; 1 belongs to text encoders and is ignored" in said and "; 1 layer is outside the chosen blocks" in said


def test_a_row_more_than_fused_layers_have_is_no_row_of_theirs() -> None:
    fused = shapes("diffusion_model.double_blocks.0.img_attn_qkv", out=3 * D + 1)
    match = matched(FILE, {**shapes("transformer_blocks.1.attn.to_q"), **fused}, HUNYUAN, FAMILIES["hunyuan_video"])
    assert list(match.pairs) == ["transformer_blocks.1.attn.to_q"] and match.unmatched == sorted(fused)


def test_a_lora_of_another_model_is_refused() -> None:
    with pytest.raises(
        CheckpointError, match=r"none of 2 keys of 'some_lora\.safetensors' match, such as 'down_blocks"
    ):
        matched(FILE, shapes("down_blocks.0.attn"), HUNYUAN, FAMILIES["hunyuan_video"])
    with pytest.raises(CheckpointError, match="none of 2 keys"):  # and not RecursionError
        matched(FILE, shapes("model." * 3000 + "x"), HUNYUAN, FAMILIES["hunyuan_video"])


@pytest.mark.parametrize(
    "key", ["transformer_blocks.0.attn.to_q.oft_blocks", "transformer_blocks.1.attn.to_q.lora_mid.weight", "a.glora"]
)
def test_what_cannot_be_applied_is_named_and_the_rest_is_applied(key: str) -> None:
    match = matched(FILE, {**shapes("transformer_blocks.0.attn.to_q"), key: (1,)}, HUNYUAN, FAMILIES["hunyuan_video"])
    assert list(match.pairs) == ["transformer_blocks.0.attn.to_q"]
    assert match.unmatched == [key] and repr(key) in match.message("name")


@pytest.mark.parametrize(
    ("blocks", "kept"),
    [
        ("", 3 * 4 + 2 * 5 + 2),
        ("double", 12),
        ("single", 10),
        ("rest", 2),
        ("double 1", 4),
        ("double 0-1", 8),
        ("Double 0 - 1,single 1", 8 + 5),
        ("double, single, rest", 24),
    ],
)
def test_a_filter_keeps_what_it_names(blocks: str, kept: int) -> None:
    assert len(chosen(blocks, HUNYUAN, HUNYUAN)) == kept


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ("triple", "blocks 'triple'"),
        ("double 3", "expected double 0-2"),
        ("double 2-1", "expected double 0-2"),
        ("rest 1", "blocks 'rest 1'"),
        ("double 0-", "blocks 'double 0-'"),
    ],
)
def test_a_filter_that_is_not_understood(blocks: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        chosen(blocks, HUNYUAN, HUNYUAN)


def test_a_filter_that_leaves_nothing_or_names_what_a_model_lacks() -> None:
    with pytest.raises(InputError, match="leaves none of 1 layers"):
        chosen("single", ["transformer_blocks.0.attn.to_q"], HUNYUAN)
    with pytest.raises(InputError, match="a model with single blocks"):
        chosen("single 0", MOCHI, MOCHI)
