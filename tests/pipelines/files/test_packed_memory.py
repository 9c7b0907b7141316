"""What a file has packed takes no more memory than in the file, and is worth what the whole file unpacks to."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import layouts
import numpy
import pytest
import torch
from accelerate import init_empty_weights
from anygpu.compat.checkpoints import gguf_blocks, packed
from anygpu.compat.checkpoints.gguf_file import gguf_header
from anygpu.compat.checkpoints.headers import TensorEntry
from anygpu.compat.checkpoints.unpacking import unpacked
from anygpu.compat.checkpoints.weights import read_tensors
from anygpu.pipelines.files.evidence import CONFIGS
from anygpu.pipelines.files.part import PartFiles
from anygpu.pipelines.keys import renamed
from anygpu.pipelines.registry import FAMILIES
from torch import Tensor, nn

MOST = 1.05  # of the file
CODECS = ("Q4_K", "Q5_K", "Q6_K", "Q3_K", "Q2_K", "IQ4_NL", "IQ4_XS", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0")
CODECS += gguf_blocks.CODECS
NARROW = {"fp8": "F8_E4M3", "fp8 without scales": "F8_E4M3", "int8": "I8"}
ENCODERS = {
    "t5": ("T5EncoderModel", "a T5 encoder in GGUF's names"),
    "llama": ("LlamaModel", "Llama 3 in GGUF's names"),
    "qwen2_5_vl": ("Qwen2_5_VLTextModel", "Qwen 2.5 VL in GGUF's names"),
}
QUICK = {("mochi", "Q4_K"), ("llama", "Q4_K"), ("mochi", "fp8")}


def entry(name: str, shape: tuple[int, ...], way: str) -> TensorEntry:
    """A tensor as published files have it: matrices packed as ``way``, all else in 16 bits."""
    count, path = math.prod(shape), Path("model.gguf")
    if len(shape) != 2 or not name.endswith("weight"):
        return TensorEntry(path, "BF16", shape, 0, 2 * count)
    if way in NARROW:
        if packed.is_table(name) or name == "token_embd.weight":  # which quantisers of 8 bits leave alone
            return TensorEntry(path, "BF16", shape, 0, 2 * count)
        scale = None if way == "fp8 without scales" else TensorEntry(path, "F32", (), 0, 4)
        sides = {} if scale is None else {"codec": "scaled", "sides": (("scale", scale),)}
        return TensorEntry(path, NARROW[way], shape, 0, count, **sides)
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[way]]
    if shape[1] % block:
        return TensorEntry(path, "BF16", shape, 0, 2 * count)
    return TensorEntry(path, "U8", shape, 0, count // block * size, codec=way)


def published(model: str) -> tuple[dict[str, tuple[int, ...]], Any, tuple[str, str]]:
    """Shapes of a published model, its layout, and the library and class that build it."""
    if model in ENCODERS:
        import transformers

        cls, release = ENCODERS[model]
        config = json.loads((CONFIGS / f"{model}.json").read_text())
        config = config[0]["config"] if isinstance(config, list) else config
        with init_empty_weights():
            module: nn.Module = getattr(transformers, cls)(getattr(transformers, cls).config_class.from_dict(config))
        library = ("transformers", cls)
    else:
        import diffusers

        row = json.loads((FAMILIES[model].folder / "transformer.json").read_text())[0]
        with init_empty_weights():
            module = getattr(diffusers, row["config"]["_class_name"]).from_config(row["config"])
        release, library = layouts.RELEASES[model], ("diffusers", row["config"]["_class_name"])
    shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    shapes.pop("encoder.embed_tokens.weight", None)
    return shapes, layouts.layout(release), library


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "way"),
    [
        pytest.param(model, way, marks=[] if (model, way) in QUICK else [pytest.mark.full])
        for model in (*layouts.RELEASES, *ENCODERS)
        for way in ("Q4_K", "Q5_K", "Q6_K", "Q3_K", "IQ4_NL", *NARROW)
    ],
)
def test_published_sizes_take_no_more_memory_than_their_files(model, way):
    """Of the published shapes in the names of the release, modulations and reordered rows included; in bf16."""
    shapes, release, (library, cls) = published(model)
    tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    inside = {name: tuple(tensor.shape) for name, tensor in layouts.released(tensors, release).items()}
    entries = {name: entry(name, shape, way) for name, shape in inside.items()}
    in_file = sum(each.total_bytes for each in entries.values())
    named = renamed(entries, release, Path("x"))
    part = PartFiles("part", library, cls, Path("x"), {}, named, torch.bfloat16, keeps_packed=True)
    assert part.total_bytes <= MOST * in_file


def blocks(codec: str, rows: int, columns: int) -> Tensor:
    """Random packed rows, (rows, bytes), of which every value is finite and below 100."""
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[codec]]
    draw, count = numpy.random.default_rng(0), rows * columns // block
    raw = torch.from_numpy(draw.integers(0, 256, (count, size), dtype=numpy.uint8))
    while True:
        values = torch.from_numpy(gguf.quants.dequantize(raw.numpy(), gguf.GGMLQuantizationType[codec]))
        wrong = ~(values.isfinite() & (values.abs() < 100)).all(1)
        if not bool(wrong.any()):
            return raw.view(rows, -1)
        raw[wrong] = torch.from_numpy(draw.integers(0, 256, (int(wrong.sum()), size), dtype=numpy.uint8))


@pytest.mark.filterwarnings("ignore:(invalid|overflow)")
@pytest.mark.parametrize(
    ("codec", "order"),
    [
        pytest.param(
            codec,
            order,
            marks=[] if not order or codec in ("Q4_K", "Q8_0") else [pytest.mark.full],
            id=f"{codec}-{order}",
        )
        for codec in CODECS
        if codec in gguf.GGMLQuantizationType.__members__  # older releases of the package know fewer
        for order in ({}, {"swapped": True}, {"heads": 4})
    ],
)
def test_blocks_stay_packed_and_are_worth_what_the_file_unpacks_to(tmp_path, codec, order):
    """Also where the rows are in another order in the file."""
    rows, columns, path = 16, 512, tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(str(path), "tiny")
    raw = blocks(codec, rows, columns)
    writer.add_tensor("blocks.0.mod.weight", raw.numpy(), raw_dtype=gguf.GGMLQuantizationType[codec])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    read = {name: replace(each, **order) for name, each in gguf_header(path)[0].items()}
    (name, declared) = next(iter(read.items()))
    assert packed.stays_packed(name, declared)
    theirs = torch.from_numpy(gguf.quants.dequantize(raw.numpy(), gguf.GGMLQuantizationType[codec]))
    assert torch.equal(unpacked(codec, raw, {}, 0, torch.float32), theirs)
    whole = read_tensors(read, torch.float32, lambda _: None)[name]
    stored = read_tensors(read, None, lambda _: None)[name]
    linear, table = nn.Linear(columns, rows, bias=False), nn.Embedding(rows, columns)
    packed.pack(linear, stored, torch.float32, codec)
    packed.pack(table, stored, torch.bfloat16, codec)
    ids = torch.tensor([[3, 0, 15], [7, 7, 1]])
    assert linear.stored.nbytes == declared.total_bytes
    assert torch.equal(linear.weight, whole)
    assert torch.equal(table(ids), whole.bfloat16()[ids])


@pytest.mark.parametrize(("dtype", "shape", "storage"), [("F8_E4M3", (0, 8), "auto"), ("BF16", (8, 0), "fp8")])
def test_a_weight_without_values_takes_no_memory(dtype, shape, storage):
    name, empty = "transformer_blocks.0.attn.to_q.weight", TensorEntry(Path("x"), dtype, shape, 0, 0)
    part = PartFiles("transformer", "diffusers", "X", Path("x"), {}, {name: empty}, torch.bfloat16, storage=storage)
    assert replace(part, keeps_packed=True).total_bytes == 0
