"""Tensor names of HunyuanVideo in single files: as released, as ComfyUI saves them, in diffusers' names.

Sources: diffusers' conversion scripts; ComfyUI's ``supported_models``, and its ``diffusers_convert`` for the VAE.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ...keys import SAME, Layout, Row, embedder_rows

REFINED = "txt_in.individual_token_refiner.blocks.#"
REFINER = "context_embedder.token_refiner.refiner_blocks.#"
REFINER_MARK = "txt_in.individual_token_refiner.blocks.0.norm1.weight"


def _norms(source: str, plain: str, query: str, key: str) -> Iterable[Row]:
    """Query and key norms: ``_q_norm.weight`` in the release, ``.norm.query_norm.scale`` or ``.weight`` in ComfyUI."""
    for letter, word, target in (("q", "query", query), ("k", "key", key)):
        own, comfy = f"{source}{plain}{letter}_norm.weight", f"{source}.norm.{word}_norm"
        yield Row(f"{own}|{comfy}.weight|{comfy}.scale", target)


def _double(stream: str, norm: str, names: tuple[str, ...], feed: str) -> Iterable[Row]:
    source, target = f"double_blocks.#.{stream}", "transformer_blocks.#"
    q, k, v, out, norm_q, norm_k = (f"{target}.attn.{name}" for name in names)
    yield Row(f"{source}_mod.linear.*|{source}_mod.lin.*", f"{target}.{norm}.linear.*")
    yield Row(f"{source}_attn_qkv.*|{source}_attn.qkv.*", f"{q}.* {k}.* {v}.*")
    for letter, one in zip("qkv", (q, k, v), strict=True):
        yield Row(f"{source}_attn_{letter}.*", f"{one}.*")
    yield from _norms(f"{source}_attn", "_", f"{norm_q}.weight", f"{norm_k}.weight")
    yield Row(f"{source}_attn_proj.*|{source}_attn.proj.*", f"{out}.*")
    yield Row(f"{source}_mlp.fc1.*|{source}_mlp.0.*", f"{target}.{feed}.net.0.proj.*")
    yield Row(f"{source}_mlp.fc2.*|{source}_mlp.2.*", f"{target}.{feed}.net.2.*")


COMMON: tuple[Row, ...] = (
    Row("img_in.*", "x_embedder.*"),
    Row("txt_in.input_embedder.*", "context_embedder.proj_in.*"),
    *embedder_rows("txt_in.t_embedder", "context_embedder.time_text_embed.timestep_embedder"),
    *embedder_rows("txt_in.c_embedder", "context_embedder.time_text_embed.text_embedder", "linear_1 linear_2"),
    Row(f"{REFINED}.norm1.*", f"{REFINER}.norm1.*"),
    Row(f"{REFINED}.norm2.*", f"{REFINER}.norm2.*"),
    Row(
        f"{REFINED}.self_attn_qkv.*|{REFINED}.self_attn.qkv.*",
        f"{REFINER}.attn.to_q.* {REFINER}.attn.to_k.* {REFINER}.attn.to_v.*",
    ),
    Row(f"{REFINED}.self_attn_proj.*|{REFINED}.self_attn.proj.*", f"{REFINER}.attn.to_out.0.*"),
    Row(f"{REFINED}.mlp.fc1.*|{REFINED}.mlp.0.*", f"{REFINER}.ff.net.0.proj.*"),
    Row(f"{REFINED}.mlp.fc2.*|{REFINED}.mlp.2.*", f"{REFINER}.ff.net.2.*"),
    Row(f"{REFINED}.adaLN_modulation.1.*", f"{REFINER}.norm_out.linear.*"),
    *_double("img", "norm1", ("to_q", "to_k", "to_v", "to_out.0", "norm_q", "norm_k"), "ff"),
    *_double(
        "txt",
        "norm1_context",
        ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out", "norm_added_q", "norm_added_k"),
        "ff_context",
    ),
    Row("final_layer.linear.*", "proj_out.*"),
    Row("final_layer.adaLN_modulation.1.*", "norm_out.linear.*", swapped=True),
)

SINGLE = "single_transformer_blocks.#"
TRANSFORMER: tuple[Row, ...] = (
    *COMMON,
    *embedder_rows("time_in", "time_text_embed.timestep_embedder"),
    *embedder_rows("guidance_in", "time_text_embed.guidance_embedder"),
    *embedder_rows("vector_in", "time_text_embed.text_embedder", "in_layer out_layer"),
    Row("single_blocks.#.modulation.linear.*|single_blocks.#.modulation.lin.*", f"{SINGLE}.norm.linear.*"),
    Row(
        "single_blocks.#.linear1.*",
        f"{SINGLE}.attn.to_q.* {SINGLE}.attn.to_k.* {SINGLE}.attn.to_v.* {SINGLE}.proj_mlp.*",
        first_square=True,
    ),
    Row("single_blocks.#.linear2.*", f"{SINGLE}.proj_out.*"),
    *_norms("single_blocks.#", ".", f"{SINGLE}.attn.norm_q.weight", f"{SINGLE}.attn.norm_k.weight"),
)

ATTENTION = ("q", "k", "v")


def _vae(names: Iterable[str]) -> tuple[Row, ...]:
    """HunyuanVideo's VAE in the names of Stable Diffusion's, whose decoder counts its blocks from the other end."""
    numbers = (re.match(r"decoder\.up\.(\d+)\.", name) for name in names)
    blocks = 1 + max((int(match[1]) for match in numbers if match), default=3)
    rows: list[Row] = [Row("quant_conv.*", "quant_conv.*"), Row("post_quant_conv.*", "post_quant_conv.*")]
    for coder, down, kind in (("encoder", True, "down"), ("decoder", False, "up")):
        rows += [Row(f"{coder}.{end}.*", f"{coder}.{end}.*") for end in ("conv_in", "conv_out")]
        rows.append(Row(f"{coder}.norm_out.*", f"{coder}.conv_norm_out.*"))
        for index in range(blocks):
            source, target = f"{coder}.{kind}.{index}", f"{coder}.{kind}_blocks.{index if down else blocks - 1 - index}"
            rows.append(Row(f"{source}.block.#.nin_shortcut.*", f"{target}.resnets.#.conv_shortcut.*"))
            rows.append(Row(f"{source}.block.#.*", f"{target}.resnets.#.*"))
            rows.append(Row(f"{source}.{kind}sample.*", f"{target}.{kind}samplers.0.*"))
        rows += [Row(f"{coder}.mid.block_{n}.*", f"{coder}.mid_block.resnets.{n - 1}.*") for n in (1, 2)]
        middle = f"{coder}.mid_block.attentions.0"
        rows.append(Row(f"{coder}.mid.attn_1.norm.*", f"{middle}.group_norm.*"))
        rows += [Row(f"{coder}.mid.attn_1.{one}.*", f"{middle}.to_{one}.*", flat=True) for one in ATTENTION]
        rows.append(Row(f"{coder}.mid.attn_1.proj_out.*", f"{middle}.to_out.0.*", flat=True))
    return tuple(rows)


LAYOUTS: tuple[Layout, ...] = (
    Layout(
        "hunyuan_video/transformer",
        "HunyuanVideo as released or as ComfyUI saves it",
        (REFINER_MARK, "single_blocks.0.linear1.weight", "vector_in.in_layer.weight"),
        TRANSFORMER,
    ),
    Layout(
        "hunyuan_video/transformer",
        "HunyuanVideo in diffusers' names",
        ("transformer_blocks.0.norm1_context.linear.weight", "single_transformer_blocks.0.proj_mlp.weight"),
        SAME,
        absent=("clean_x_embedder.proj.weight",),
    ),
    Layout(
        "hunyuan_video/vae",
        "the VAE of HunyuanVideo in Stable Diffusion's names",
        ("decoder.mid.block_1.norm1.weight", "encoder.down.0.block.0.conv1.conv.weight"),
        _vae,
    ),
    Layout(
        "hunyuan_video/vae",
        "the VAE of HunyuanVideo",
        ("decoder.mid_block.attentions.0.group_norm.weight", "encoder.down_blocks.0.resnets.0.conv1.conv.weight"),
        SAME,
    ),
)
