"""LoRAs on a pipeline: the sums are right, chains do not see each other, and taking one off leaves no trace."""

import gc
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from anygpu.compat import packages
from anygpu.compat.checkpoints import packed
from anygpu.compat.errors import CheckpointError, InputError, MissingPackageError, UnsupportedError
from anygpu.compat.memory import parts as part_module
from anygpu.pipelines import stages
from anygpu.pipelines.base import PromptRequest, SampleSettings, Silent
from anygpu.pipelines.files.lora_kinds import Shapes
from anygpu.pipelines.load import lora
from anygpu.pipelines.load.folder import load
from anygpu.pipelines.load.lora import with_lora
from anygpu.pipelines.pipeline import Pipeline
from anygpu.pipelines.requests import LORA_MODES, LoadRequest
from anygpu.pipelines.settings import of_checkpoint
from safetensors.torch import load_file, save_file

RANK = 4
SETTINGS = SampleSettings(32, 32, 5, steps=2, seed=3)


def sums_bound(layers: Shapes, steps: int, expected: torch.Tensor) -> float:
    """How far two fp32 runs of the same sums in another order may be apart, for latents as large as ``expected``.

    A sum of n products is off by about sqrt(n) roundings (Higham and Mary 2019), and so are sums one after another: of
    all layers, in every step.
    """
    additions = steps * sum(math.prod(inside) for _, *inside in layers.values())
    return torch.finfo(torch.float32).eps * math.sqrt(additions) * float(expected.abs().max())


def assert_same_sums(made: Any, latents: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for the order of the sums; a thousandth of the strength would move them further."""
    bound = sums_bound(made.layers, SETTINGS.steps, expected)
    assert torch.equal(expected, made.plain) or bound < 1e-3 * float((expected - made.plain).abs().max())
    assert float((latents - expected).abs().max()) <= bound


def factors_for(layers: dict[str, tuple[int, ...]], seed: int = 0) -> dict[str, torch.Tensor]:
    """Random factors and an alpha for every layer, under diffusers' names; small enough to stay near the model."""
    generator, found = torch.Generator().manual_seed(seed), {}
    for name, (rows, *inside) in layers.items():
        ones = [1] * (len(inside) - 1)
        found[f"transformer.{name}.lora_A.weight"] = torch.randn(RANK, *inside, generator=generator) * 0.1
        found[f"transformer.{name}.lora_B.weight"] = torch.randn(rows, RANK, *ones, generator=generator) * 0.1
        found[f"transformer.{name}.alpha"] = torch.tensor(2.0 if "attn" in name else float(RANK))
    return found


def added_by_hand(pipeline: Pipeline, chosen: list[tuple[dict[str, torch.Tensor], float]]) -> None:
    """The LoRAs in the weights of a pipeline that nobody else uses, in fp64."""
    module = pipeline.parts["transformer"]
    for tensors, strength in chosen:
        for key in [key for key in tensors if key.endswith("lora_A.weight")]:
            name = key.removeprefix("transformer.").removesuffix(".lora_A.weight")
            down, up = tensors[key].double(), tensors[key.replace("lora_A", "lora_B")].double()
            scale = float(tensors[f"transformer.{name}.alpha"]) / RANK
            weight = module.get_submodule(name).weight
            product = (up.flatten(1) @ down.flatten(1)).view_as(weight)
            weight.data = (weight.data.double() + strength * scale * product).to(weight.dtype)


@pytest.fixture(scope="module")
def made(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A tiny HunyuanVideo with two LoRAs, what it samples without them, and a fresh one for the asking."""
    folder = tmp_path_factory.mktemp("loras")

    def fresh() -> Pipeline:
        request = LoadRequest(tiny.build("hunyuan_video", tiny_folder), device="cpu", precision="fp32")
        return load(request)

    pipeline = fresh()
    layers = tiny.matrices_of(pipeline)
    loras = [factors_for(layers, seed) for seed in (1, 2)]
    paths = [folder / f"{name}.safetensors" for name in ("first", "second")]
    for path, tensors in zip(paths, loras, strict=True):
        save_file(tensors, path)
    prompt = stages.encode_prompt(pipeline, PromptRequest("a cat"), Silent())

    def sampled(pipe: Pipeline) -> torch.Tensor:
        return stages.sample(pipe, prompt, None, SETTINGS, Silent()).samples

    @cache
    def by_hand(*chosen: tuple[int, float]) -> torch.Tensor:
        other = fresh()
        other.parts["transformer"]
        added_by_hand(other, [(loras[index], strength) for index, strength in chosen])
        return sampled(other)

    return SimpleNamespace(
        fresh=fresh, pipeline=pipeline, layers=layers, loras=loras, paths=paths, sampled=sampled, by_hand=by_hand,
        plain=sampled(pipeline), folder=folder,
    )  # fmt: skip


def put(
    made: Any, on: Pipeline, index: int = 0, strength: float = 1.0, blocks: str = "", mode: str = "separate"
) -> Pipeline:
    return with_lora(on, made.paths[index], strength, blocks, mode, Silent())


def test_a_lora_whose_name_gives_a_recipe_changes_the_defaults_and_says_so(made: Any, recorded: Any) -> None:
    """The folder around it counts; a style after it leaves the recipe, and a name of no row is cautioned once."""
    file = made.folder / "models" / "loras" / "FastHunyuan-LoRA" / "pytorch_lora_weights.safetensors"
    unlisted = made.folder / "models" / "loras" / "hunyuan_turbo_lora.safetensors"
    file.parent.mkdir(parents=True)
    for path in (file, unlisted):
        shutil.copy(made.paths[0], path)
    progress = recorded()
    fast = put(made, with_lora(made.pipeline, file, 1.0, "", "separate", progress), 1)
    defaults = of_checkpoint(fast).sizes.defaults
    assert (defaults.steps, defaults.shift, defaults.cfg) == (6, 17.0, 1.0)
    assert of_checkpoint(made.pipeline).sizes.defaults.steps == 50
    (recipe,) = [each for each in fast.plan.decisions if each.subject == "recipe"]
    assert recipe.why.startswith("the name 'FastHunyuan-LoRA' says so; FastVideo/FastHunyuan")
    assert [f"{file.stem} changes the recipe: {recipe.verdict}"] == [x for x in progress.said if "recipe" in x]
    for strength, blocks in ((0.3, ""), (-1.0, ""), (1.0, "double 0")):
        weak = with_lora(made.pipeline, file, strength, blocks, "separate", progress)
        assert of_checkpoint(weak).sizes.defaults.steps == 50 and "recipe is not taken at" in progress.said[-1]
    progress = recorded()
    plain = with_lora(made.pipeline, unlisted, 1.0, "", "separate", progress)
    assert sum("not in the catalogue" in line for line in progress.said) == 1
    assert of_checkpoint(plain).sizes.defaults.steps == 50 and plain.plan.decisions[-1].alarming
    save_file(load_file(made.paths[0]), unlisted, {"ss_output_name": "accvid_5_steps_lora"})
    titled = with_lora(made.pipeline, unlisted, 1.0, "", "separate", Silent())
    assert of_checkpoint(titled).sizes.defaults.steps == 5, "the title in a file comes before its name"


@pytest.mark.parametrize("mode", LORA_MODES)
def test_the_sums_are_right_and_leave_no_trace(made: Any, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline, expected = made.pipeline, made.by_hand((0, 0.7))
    weights = {name: (t.data_ptr(), t.clone()) for name, t in pipeline.parts["transformer"].named_parameters()}
    own, opens = Path.open, []
    monkeypatch.setattr(Path, "open", lambda path, *how, **more: opens.append(path) or own(path, *how, **more))
    pipe = put(made, pipeline, strength=0.7, mode=mode)
    found = made.sampled(pipe)
    assert opens.count(made.paths[0]) == 1, "a LoRA file is opened once"
    assert float((expected - made.plain).abs().max()) > 0.01, "the LoRA does nothing"
    assert_same_sums(made, found, expected)
    assert torch.equal(made.sampled(pipe), found), "the second call differs"
    assert torch.equal(made.sampled(pipeline), made.plain), "the pipeline it came from has changed"
    del pipe
    gc.collect()
    assert torch.equal(made.sampled(pipeline), made.plain)
    after = dict(pipeline.parts["transformer"].named_parameters())
    assert weights.keys() == after.keys(), "layers of the LoRA are still there"
    for name, (place, before) in weights.items():
        assert after[name].data_ptr() == place and torch.equal(after[name], before), name


@pytest.mark.parametrize(
    "modes",
    [
        ("merged", "separate"),
        pytest.param(("separate", "separate"), marks=pytest.mark.full),
        pytest.param(("merged", "merged"), marks=pytest.mark.full),
    ],
)
def test_several_add_up(made: Any, modes: tuple[str, str]) -> None:
    with torch.inference_mode():  # as ComfyUI runs nodes
        pipe = put(made, put(made, made.pipeline, 0, 0.5, mode=modes[0]), 1, -0.8, mode=modes[1])
    assert_same_sums(made, made.sampled(pipe), made.by_hand((0, 0.5), (1, -0.8)))
    assert torch.equal(made.sampled(made.pipeline), made.plain)


@pytest.mark.full
def test_chains_that_share_a_pipeline_do_not_see_each_other(made: Any) -> None:
    chains = [
        put(made, made.pipeline, 0),
        put(made, made.pipeline, 1),
        put(made, made.pipeline, 0, mode="merged"),
        made.pipeline,
    ]
    expected = [made.by_hand((0, 1.0)), made.by_hand((1, 1.0)), made.by_hand((0, 1.0)), made.plain]
    first = [made.sampled(chain) for chain in chains]
    for index in (2, 0, 3, 1, 3):
        assert torch.equal(made.sampled(chains[index]), first[index])
    for latents, by_hand in zip(first, expected, strict=True):
        assert_same_sums(made, latents, by_hand)


@pytest.mark.full
def test_a_strength_changes_in_place(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No layer is made again, and the model is not read again."""
    one = made.sampled(put(made, made.pipeline, strength=1.0))
    keep = put(made, made.pipeline, strength=1.0)
    made.sampled(keep)
    monkeypatch.setattr(part_module, "_change", None)
    monkeypatch.setattr(type(made.pipeline.parts), "drop", None)
    assert_same_sums(made, made.sampled(put(made, made.pipeline, strength=0.3)), made.by_hand((0, 0.3)))
    assert torch.equal(made.sampled(keep), one)


@pytest.mark.full
def test_a_filter_touches_only_its_blocks(made: Any) -> None:
    pipe = put(made, made.pipeline, blocks="double 0, rest")
    other = made.fresh()
    other.parts["transformer"]
    kept = {k: t for k, t in made.loras[0].items() if k.startswith("transformer.transformer_blocks.0.")}
    kept |= {k: t for k, t in made.loras[0].items() if "transformer_blocks." not in k}
    added_by_hand(other, [(kept, 1.0)])
    assert_same_sums(made, made.sampled(pipe), made.sampled(other))


def test_a_merged_lora_comes_off_weights_that_a_host_has_replaced(made: Any) -> None:
    """ComfyUI's patches put other Parameters on the layers, and other ones again when they go."""
    pipeline = made.fresh()
    merged = with_lora(pipeline, made.paths[0], 1.0, "", "merged", Silent())
    layer = pipeline.parts["transformer"].get_submodule(next(iter(made.layers)))
    before = layer.weight.detach().clone()
    with merged.offloader.hold("transformer"):
        assert not torch.equal(layer.weight, before)
        layer.weight = torch.nn.Parameter(layer.weight.detach().clone())
    with pipeline.offloader.hold("transformer"):
        assert torch.equal(layer.weight, before)


@pytest.mark.parametrize("mode", ["separate", "merged"])
def test_an_alpha_that_is_put_beside_the_file_later_counts_from_then_on(made: Any, tmp_path: Path, mode: str) -> None:
    pipeline = made.fresh()
    name, (rows, columns) = next(item for item in made.layers.items() if len(item[1]) == 2)
    file = tmp_path / "adapter_model.safetensors"
    factors = {"lora_A": torch.ones(2, columns), "lora_B": torch.ones(rows, 2)}
    save_file({f"base_model.model.{name}.{key}.weight": factor for key, factor in factors.items()}, file)
    plain = pipeline.parts["transformer"].get_submodule(name)(torch.ones(columns)).detach()
    found = []
    for config in ("", '{"peft_type": "LORA", "r": 2, "lora_alpha": 4}'):
        if config:
            (tmp_path / "adapter_config.json").write_text(config)
        given = with_lora(pipeline, file, 1.0, "", mode, Silent())
        with given.offloader.hold("transformer") as module, torch.no_grad():
            found.append(module.get_submodule(name)(torch.ones(columns)))
    torch.testing.assert_close(found[1] - plain, 2 * (found[0] - plain))
    (other := tmp_path / "other.safetensors").write_bytes(file.read_bytes())
    (beside,) = lora.on(with_lora(pipeline, other, 1.0, "", mode, Silent()))
    assert set(beside.scales.values()) == {1.0}, "it may be of the other file"
    (tmp_path / "adapter_config.json").write_text('{"r": 2, "lora_al')
    with pytest.raises(CheckpointError, match=r"adapter_config\.json"):
        with_lora(pipeline, file, 1.0, "", mode, Silent())


def test_without_strength_nothing_happens_and_it_is_said(made: Any, recorded: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(lora, "host_free_bytes", lambda: 0)
    monkeypatch.setattr(lora, "swap_free_bytes", lambda: 0)
    assert with_lora(made.pipeline, made.paths[0], 0.0, "", "merged", recorded()) is made.pipeline
    progress = recorded()
    assert with_lora(made.pipeline, made.paths[0], 0.0, "", "separate", progress) is made.pipeline
    assert progress.said[-1] == "first has no effect at strength 0"
    assert progress.said[0].startswith(f"first: {len(made.layers)} layers, {len(made.loras[0])} of")


def test_notes_and_keys_tell_pipelines_apart(made: Any) -> None:
    first, stronger = put(made, made.pipeline), put(made, made.pipeline, strength=2.0)
    assert str(first.plan.decisions[-1]) == "LoRA first 1, separate"
    assert repr(first.offloader.adapters) != repr(stronger.offloader.adapters)
    assert made.pipeline.offloader.adapters is None
    assert first.offloader.adapters.key == stronger.offloader.adapters.key
    assert put(made, made.pipeline, mode="merged").offloader.adapters.key != first.offloader.adapters.key


# What cannot be done ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"strength": 11.0}, "strength 11"),
        ({"strength": float("nan")}, "strength nan"),
        ({"mode": "fused"}, "mode 'fused'"),
        ({"blocks": "double 9"}, "blocks 'double 9'"),
    ],
)
def test_choices_out_of_range(made: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        put(made, made.pipeline, **arguments)


def test_damaged_and_foreign_files(made: Any) -> None:
    broken = made.folder / "broken.safetensors"
    broken.write_bytes(made.paths[0].read_bytes()[:-100])
    with pytest.raises(CheckpointError):
        with_lora(made.pipeline, broken, 1.0, "", "separate", Silent())
    save_file({"lora_te_x.lora_down.weight": torch.zeros(2, 2)}, broken)
    with pytest.raises(CheckpointError, match="none of 1 keys of"):
        with_lora(made.pipeline, broken, 1.0, "", "separate", Silent())


def test_peft_is_asked_for_by_name(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    own = packages.imported

    def absent(name: str) -> Any:
        if name == "peft":
            raise MissingPackageError("package 'peft' cannot be imported", expected="peft", fix="Install it.")
        return own(name)

    monkeypatch.setattr(packages, "imported", absent)
    with pytest.raises(MissingPackageError, match="peft"):
        put(made, made.pipeline)
    assert put(made, made.pipeline, mode="merged") is not made.pipeline, "merging needs no peft"


def test_merging_into_8_bits_is_refused_and_leaves_the_model_usable(made: Any) -> None:
    pipeline = made.fresh()
    plain = made.sampled(pipeline)
    leaf = pipeline.parts["transformer"].get_submodule("transformer_blocks.1.attn.to_k")
    data = leaf.weight.data
    leaf.weight.data = data.to(torch.float8_e4m3fn)
    with pytest.raises(
        UnsupportedError, match=r"merging 'first' into Linear weights kept as torch\.float8_e4m3fn in 1 of"
    ):
        made.sampled(put(made, pipeline, mode="merged"))
    leaf.weight.data = data
    assert torch.equal(made.sampled(pipeline), plain)


@pytest.mark.full
@pytest.mark.parametrize("weights", ["int8", pytest.param("fp8", marks=pytest.mark.full)])
def test_packed_weights_take_a_lora_beside_them_only(
    made: Any, tiny_folder: Path, weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are not unpacked for it: what was packed stays the same tensors, and none is made dense to put it on."""
    request = LoadRequest(tiny.build("hunyuan_video", tiny_folder), device="cpu", precision="fp32", weights=weights)
    pipeline = load(request)
    plain = made.sampled(pipeline)
    stored = [leaf.stored.data_ptr() for leaf in pipeline.parts["transformer"].modules() if hasattr(leaf, "stored")]
    with monkeypatch.context() as patched:
        patched.setattr(packed.StoredLinear, "dense", lambda *_: pytest.fail("a weight was made dense"))
        with put(made, pipeline).offloader.hold("transformer"):
            pass
    found = made.sampled(put(made, pipeline))
    assert stored == [
        leaf.stored.data_ptr() for leaf in pipeline.parts["transformer"].modules() if hasattr(leaf, "stored")
    ]
    other = load(request)
    for layer in [leaf for leaf in other.parts["transformer"].modules() if isinstance(leaf, packed.StoredLinear)]:
        packed.unpack(layer)
    added_by_hand(other, [(made.loras[0], 1.0)])
    assert_same_sums(made, found, made.sampled(other))
    with pytest.raises(UnsupportedError, match="into StoredLinear weights kept as torch"):
        made.sampled(put(made, pipeline, mode="merged"))
    assert torch.equal(made.sampled(pipeline), plain)


@pytest.mark.full
def test_merges_into_16_bit_weights_without_rounding_to_them(made: Any, tmp_path: Path) -> None:
    """Weights that a bf16 file has and fp32 computes with are made dense for it, and the very tensors come back."""
    folder = tiny.build("hunyuan_video", tmp_path, dtype=torch.bfloat16)
    dense = load(LoadRequest(folder, device="cpu", precision="fp32"))
    kept = load(LoadRequest(folder, device="cpu", precision="fp32", weights="as in file"))
    stored = [leaf.stored.data_ptr() for leaf in kept.parts["transformer"].modules() if hasattr(leaf, "stored")]
    merged = [made.sampled(put(made, pipe, mode="merged")) for pipe in (dense, kept)]
    assert torch.equal(*merged) and stored
    assert torch.equal(made.sampled(kept), made.sampled(dense))
    assert stored == [leaf.stored.data_ptr() for leaf in kept.parts["transformer"].modules() if hasattr(leaf, "stored")]


@pytest.mark.full
def test_beside_rewritten_blocks(made: Any, tiny_folder: Path) -> None:
    """The kernels' references call each layer as a module, so what a LoRA put around it runs."""
    from anygpu.pipelines.speed import SpeedRequest

    path = tiny.build("hunyuan_video", tiny_folder)
    pipeline = load(LoadRequest(path, device="cpu", precision="fp32", speed=SpeedRequest(kernels="reference")))
    assert_same_sums(made, made.sampled(put(made, pipeline)), made.by_hand((0, 1.0)))
    assert_same_sums(made, made.sampled(pipeline), made.plain)


@pytest.mark.full
def test_a_failure_half_way_leaves_the_model_as_it_was(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first is merged when the second fails."""
    pipe = put(made, put(made, made.pipeline, 0, mode="merged"), 1, mode="separate")

    made.sampled(made.pipeline)
    rewrites = [order for order, _ in made.pipeline.parts.undo["transformer"].undo]
    assert rewrites, "nothing that a failure could have left undone"

    def fails(*_: Any) -> None:
        raise RuntimeError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(lora, "_inject", fails)
        with pytest.raises(RuntimeError, match="injected"):
            made.sampled(pipe)
    assert [order for order, _ in made.pipeline.parts.undo["transformer"].undo] == rewrites
    assert torch.equal(made.sampled(made.pipeline), made.plain)
    assert_same_sums(made, made.sampled(pipe), made.by_hand((0, 1.0), (1, 1.0)))


def test_a_merge_that_fails_half_way_is_not_done_twice(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    own, calls = lora.LoRA.delta, []

    def third_fails(self: lora.LoRA, layer: str) -> Any:
        calls.append(layer)
        if len(calls) == 3:
            raise MemoryError("injected")
        return own(self, layer)

    whole = made.sampled(put(made, made.pipeline, mode="merged"))
    monkeypatch.setattr(lora.LoRA, "delta", third_fails)
    made.sampled(made.pipeline)
    assert torch.equal(made.sampled(put(made, made.pipeline, mode="merged")), whole), "the sampling tries once more"
    assert len(calls) > 3 and torch.equal(made.sampled(made.pipeline), made.plain)


# Families and styles ----------------------------------------------------------------------------------------------

Converted = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


def as_kohya(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same LoRA as kohya's trainers write it."""
    found = {}
    for key, tensor in tensors.items():
        base, _, end = key.removeprefix("transformer.").partition(".lora_" if ".lora_" in key else ".alpha")
        tail = {"A.weight": ".lora_down.weight", "B.weight": ".lora_up.weight", "": ".alpha"}[end]
        found[f"lora_unet_{base.replace('.', '_')}{tail}"] = tensor
    return found


@pytest.mark.full
@pytest.mark.parametrize("family", ["ltx", "hunyuan_video_15", "mochi"])
def test_every_family_takes_both_styles(family: str, tiny_folder: Path, tmp_path: Path) -> None:
    pipeline = load(LoadRequest(tiny.build(family, tiny_folder), device="cpu", precision="fp32"))
    attention = {name: shape for name, shape in tiny.matrices_of(pipeline).items() if ".attn" in name}
    tensors = factors_for(attention)
    save_file(tensors, tmp_path / "diffusers.safetensors")
    save_file(as_kohya(tensors), tmp_path / "kohya.safetensors")
    prompt = stages.encode_prompt(pipeline, PromptRequest("a cat"), Silent())
    settings = replace(SETTINGS, frames=9 if family == "ltx" else 7 if family == "mochi" else 5, height=64, width=64)
    found = []
    for name in ("diffusers", "kohya"):
        pipe = with_lora(pipeline, tmp_path / f"{name}.safetensors", 1.0, "", "separate", Silent())
        found.append(stages.sample(pipe, prompt, None, settings, Silent()).samples)
    assert torch.equal(*found)
    added_by_hand(pipeline, [(tensors, 1.0)])
    gc.collect()
    pipe = None
    plain = stages.sample(pipeline, prompt, None, settings, Silent()).samples
    assert float((found[0] - plain).abs().max()) <= sums_bound(tiny.matrices_of(pipeline), settings.steps, plain)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("style.safetensors", ("style.safetensors", 1.0, "")),
        ("style.safetensors:0.8", ("style.safetensors", 0.8, "")),
        ("style.sft:0.5:rest", ("style.sft", 0.5, "rest")),
        ("loras/style.SAFETENSORS:-1:double 0-9, single", ("loras/style.SAFETENSORS", -1.0, "double 0-9, single")),
        ("C:\\loras\\style.safetensors::rest", ("C:\\loras\\style.safetensors", 1.0, "rest")),
    ],
)
def test_the_command_names_file_strength_and_blocks(text: str, expected: tuple[str, float, str]) -> None:
    path, strength, blocks = lora.named(text)
    assert (str(path), strength, blocks) == expected


@pytest.mark.parametrize("text", ["style", "", "style.safetensors:much", "style.safetensors0.8", "style.ckpt:1"])
def test_the_command_says_how_a_lora_is_named(text: str) -> None:
    with pytest.raises(InputError, match="LoRA '"):
        lora.named(text)


@pytest.mark.full
def test_the_command_puts_loras_on_in_turn(made: Any, tiny_folder: Path, tmp_path: Path) -> None:
    """The frames of two LoRAs by the command are those of the same two put on by hand."""
    from anygpu import cli

    model = tiny.build("hunyuan_video", tiny_folder)
    size = {"width": 32, "height": 32, "frames": 5, "steps": 2, "seed": 3, "device": "cpu", "precision": "fp32"}
    words = ["render", "--model", str(model), "--prompt", "a cat", "--state", str(tmp_path)]
    words += [word for name, value in size.items() for word in (f"--{name}", str(value))]
    chosen = ["--lora", f"{made.paths[0]}:0.7", "--lora", f"{made.paths[1]}::double"]
    frames = cli.rendered(cli._parser(True).parse_args([*words, *chosen]), Silent()).frames
    pipe = put(made, put(made, made.fresh(), 0, 0.7), 1, blocks="double")
    prompt = stages.encode_prompt(pipe, PromptRequest("a cat"), Silent())
    latents = stages.sample(pipe, prompt, None, SETTINGS, Silent())
    assert torch.equal(frames, stages.decode(pipe, latents, Silent()))
    plain = cli.rendered(cli._parser(True).parse_args(words), Silent()).frames
    assert not torch.equal(frames, plain)
