"""The nodes on a small ComfyUI: their schemas are as written down, and a run gives what the stages give."""

import dataclasses
import importlib.util
import inspect
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import layouts
import pytest
import schemas
import small_comfyui
import tiny
import torch
from anygpu.compat.errors import InputError, UnsupportedError
from anygpu.compat.memory.statistics import MemoryStats
from anygpu.compat.output_check import NotFinite
from anygpu.compat.repairs import Repair, RepairStore
from anygpu.compat.transforms.step_cache import StepCacheSettings
from anygpu.pipelines import stages
from anygpu.pipelines.base import ImageRequest, PromptRequest, SampleSettings, Silent
from anygpu.pipelines.load.folder import LoadRequest, load
from anygpu.pipelines.records.job import job_in
from anygpu.pipelines.sizes import beside_transformer
from anygpu.pipelines.vae.plan import DecodeMethod
from published import loops
from safetensors.torch import save_file
from small_comfyui import BaseModel, Interrupted, Linear, ModelPatcher, WrapperExecutor, comfyui
from torch import nn
from torch.nn import functional

SIZE = {"width": 64, "height": 64, "frames": 9}
SAMPLING = {"steps": 2, "cfg": 3.0, "seed": 5}
DRAWN = {**SIZE, **SAMPLING}
DECODED = {"fps": 12.0, "method": "tiled", "tile_size": 64, "tile_overlap": 16, "frames_per_chunk": 0}
DECODED |= {"decode_timestep": -1.0, "decode_noise_scale": -1.0}  # which this model does not take


class ComfyUI:
    """The pack's nodes on one small ComfyUI with a tiny LTX-Video; ``schemas`` are those without any model."""

    def __init__(self, module: Callable[[str], Any]) -> None:
        self.module, self.nodes = module, module("nodes")
        self.schemas = schemas.snapshot(self.nodes)
        self.management = module("host.progress").comfy.model_management
        self.messages = module("host.progress").PromptServer.instance

    def run(self, node: str, **inputs: Any) -> Any:
        return small_comfyui.run(self.nodes, node, **inputs)

    @property
    def said(self) -> str:
        """The text under the node that ended last."""
        return self.messages.texts[-1][0]


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Iterator[ComfyUI]:
    base = tmp_path_factory.mktemp("comfyui")
    with comfyui(base) as module:
        made = ComfyUI(module)
        (base / "models" / "diffusers" / "LTX-Video").symlink_to(tiny.build("ltx", tiny_folder))
        yield made


@pytest.fixture(scope="module")
def loaded(core: ComfyUI) -> tuple[Any, ...]:
    """Pipeline, MODEL and VAE of the load node."""
    return core.run("LoadPipeline", model="LTX-Video", precision="fp32").result


@pytest.fixture(scope="module")
def prompts(core: ComfyUI, loaded: tuple[Any, ...]) -> tuple[Any, ...]:
    """The prompt, and both sides of it for core's nodes."""
    return core.run("EncodePrompt", pipeline=loaded[0], text="a fox", negative="blurry").result


@pytest.fixture(scope="module")
def latent(core: ComfyUI, loaded: tuple[Any, ...], prompts: tuple[Any, ...]) -> Any:
    """LATENT of the sample node."""
    return core.run("Sample", pipeline=loaded[0], prompt=prompts[0], **DRAWN).result[0]


def test_every_schema_is_as_written_down(core: ComfyUI) -> None:
    before = json.loads(schemas.SNAPSHOT.read_text(encoding="utf-8"))
    assert list(core.schemas) == list(before), "python tests/schemas.py, where a change is meant"
    for node_id, schema in before.items():
        assert core.schemas[node_id] == schema, (
            f"{node_id}: users' workflows hold this; python tests/schemas.py, if meant"
        )


def test_an_input_that_is_left_out_has_the_default_of_its_widget(core: ComfyUI) -> None:
    for node in core.nodes.NODES:
        widgets = {item.id: item.given["default"] for item in node.GET_SCHEMA().inputs if "default" in item.given}
        for name, given in inspect.signature(node.execute).parameters.items():
            if name in widgets and given.default is not given.empty:
                assert given.default == widgets[name], f"{node.__name__}: {name}"


def test_the_chain_of_nodes_gives_what_the_stages_give(core: ComfyUI, loaded, latent, tiny_folder: Path) -> None:
    shown = core.run("Decode", pipeline=loaded[0], latent=latent)
    run = core.module("host.server.panel").last_run()["nodes"][small_comfyui.ComfyNode.hidden.unique_id]
    assert run["done"] and 0 < sum(run["stages"].values()) <= run["seconds"] + 1e-6 and min(run["stages"].values()) >= 0
    assert "64x64, 9 frames" in core.said and all(window == "window" for _, window in core.messages.texts)
    ours = load(LoadRequest(tiny.build("ltx", tiny_folder), precision="fp32", device="cpu"))
    prompt = stages.encode_prompt(ours, PromptRequest("a fox", "blurry"), Silent())
    made = stages.sample(ours, prompt, None, SampleSettings(**DRAWN), Silent())
    assert torch.equal(latent["samples"], made.samples)
    frames, film = shown.result[0][0], shown.result[1][0]
    assert torch.equal(frames, stages.decode(ours, made, Silent())) and frames.shape == (9, 64, 64, 3)
    assert film.receipt is not None and film.given[0].given == ()
    assert isinstance(loaded[2], core.module("host.core_models").CoreVAE)
    small, _, folder, _, fps = shown.ui[0][:5]
    assert folder == "temp" and fps == made.fps and small.shape == frames.shape


def test_what_the_decode_node_shows_is_what_its_receipt_decodes(core: ComfyUI, loaded, latent) -> None:
    """With every input changed: what the node alone did to the frames, a replay would not do."""
    asked = {}
    for each in core.schemas["AnyGPUDecode"]["inputs"]:
        if each.get("advanced"):
            assert each["name"] in DECODED or each["kind"] == "BOOLEAN", f"give {each['name']} a value in DECODED"
            asked[each["name"]] = DECODED.get(each["name"], not each.get("default"))
    frames, films = core.run("Decode", pipeline=loaded[0], latent=latent, **asked).result
    form = job_in(films[0].receipt["job"]).decode
    latents = core.module("pipelines.latents.convert").from_core(loaded[0], latent, Silent().notify)
    assert torch.equal(frames[0], stages.decode(loaded[0], latents, Silent(), form=form))
    assert (form.method, form.tile, form.overlap, form.frames) == ("tiled", 64, 16, 0)


def test_core_s_schedule_has_the_shift_of_the_checkpoint(core: ComfyUI, loaded) -> None:
    pipeline, patchers = loaded[0], dict(loaded[0].offloader.patchers)
    for shift, dynamic, expected in ((7.0, False, {"shift": 7.0}), (7.0, True, {}), (1.0, False, {})):
        tools = {"scheduler": {"shift": shift, "use_dynamic_shifting": dynamic}}
        model = core.module("host.core_models").model_of(dataclasses.replace(pipeline, tools=tools))
        assert model.model.config.sampling_settings == expected
    pipeline.offloader.patchers.update(patchers)


def test_a_demo_is_told_in_two_lines_and_what_it_draws_instead_goes_to_the_run(core: ComfyUI) -> None:
    demo = core.run("LoadPipeline", model="demo: LTX-Video (3 MB)").result[0]
    first, second = core.said.splitlines()
    assert first.startswith("demo model, LTX-Video: ") and second.startswith("model draws coloured shapes at 64")
    core.run("EncodePrompt", pipeline=demo, text="a fox", negative="")
    entry = core.module("host.server.panel").last_run()["nodes"][small_comfyui.ComfyNode.hidden.unique_id]
    assert len(entry["demo"]) == 1 and entry["demo"] == entry["said"] and "instead of this text" in entry["demo"][0]


@pytest.mark.parametrize("own", [{}, {"cfg": 4.0, "cfg_end": 0.4}])
def test_a_demo_model_s_own_cfg_is_for_one_sampling(core: ComfyUI, loaded, own) -> None:
    """Core hands the same guider to the next run, which says again what it does; one that ends early guides none."""
    found, seen = core.module("host.core_models"), []
    pipeline = core.module("pipelines.settings").with_defaults(loaded[0], own)
    guider = found.CFGGuider()
    guider.cfg, guider.model_options, guider.model_patcher = 800.0, {}, loaded[1]
    latents = torch.zeros(1, loaded[0].configs["transformer"]["in_channels"], 2, 2, 2)

    def sample(noise, latent_image, denoise_mask=None, latent_shapes=None):
        seen.append((guider.cfg, loaded[1].model.diffusion_model.demo))
        raise Interrupted

    for _ in range(2):
        with pytest.raises(Interrupted):
            found._at_own_size(pipeline, WrapperExecutor(sample, guider, []), latents, latents)
        assert guider.cfg == 800 and not loaded[1].model.diffusion_model.demo
    assert seen[0] == seen[1] and seen[0][0] < 800 and "draws at its own cfg: 800" in seen[0][1]
    assert not own or seen[0][0] == 1


def test_core_s_sampler_can_call_the_model(core: ComfyUI, loaded, prompts) -> None:
    pipeline, model, vae = loaded
    core.management.load_models_gpu([model])
    x = torch.randn(1, pipeline.configs["transformer"]["in_channels"], 2, 2, 2)
    (context, extra), network = prompts[1][0], model.model.diffusion_model
    velocity = network(x, torch.tensor([0.5]), context, {"cond_or_uncond": [0]}, **extra)
    assert velocity.shape == x.shape and velocity.isfinite().all() and model.loaded_size() == model.model_size() > 0
    wrapped = {"wrappers": {"diffusion_model": [lambda executor, *given, **named: 2 * executor(*given, **named)]}}
    assert torch.equal(network(x, torch.tensor([0.5]), context, wrapped, **extra), 2 * velocity)
    needed = beside_transformer(pipeline, SampleSettings(128, 64, 9), window=2)
    assert model.model.memory_required((3, x.shape[1], 2, 2, 4)) == 3 * needed
    frames = vae.decode(torch.zeros(1, x.shape[1], 2, 2, 2))
    assert frames.shape == (1, 9, 64, 64, 3)
    first, second = frames[0], torch.rand(frames.shape[1:])
    assert torch.equal(vae.encode(torch.stack((first, second))), torch.cat([*map(vae.encode, (first, second))]))
    assert vae.encode(first).shape == (1, x.shape[1], 2, 2, 2)


def test_an_override_may_hand_on_a_mask_of_each_sample(core: ComfyUI) -> None:
    def override(attend: Any, q: Any, k: Any, v: Any, heads: int, mask: Any, **form: Any) -> Any:
        return attend(q, k, v, heads, mask[:, 0], attn_precision=None, **form)

    own, operands, mask = functional.scaled_dot_product_attention, torch.randn(3, 2, 4, 5, 8), torch.randn(2, 1, 5, 5)
    attend = core.module("host.diffusion_model")._overridden(override, {})
    assert torch.equal(attend(own, *operands, mask), own(*operands, mask))


def test_a_share_of_the_weights_has_those_in_compiled_blocks(core: ComfyUI) -> None:
    network = nn.ModuleDict({"block": nn.Sequential(nn.Linear(4, 4))})
    weights = core.module("host.core.weights").LoadedWeights(bytes={"block.0.weight": 64, "block.0.bias": 16})
    layer, network["block"] = network["block"][0], torch.compile(network["block"], backend="eager")
    seen = [each for _ in range(50) for each in weights._next(SimpleNamespace(model=network), False, False)]
    assert {name: id(module) for name, module, _ in seen} == dict.fromkeys(weights.bytes, id(layer))


def test_a_layer_that_core_casts_gives_what_it_gave_and_obeys_its_patches(core: ComfyUI) -> None:
    casting, stats = core.module("host.casting"), MemoryStats()
    layer, x = nn.Linear(4, 3), torch.randn(2, 4)
    expected = layer(x)
    assert casting.install_cast_layers(layer, torch.device("cpu"), stats) and torch.equal(layer(x), expected)
    assert not casting.install_cast_layers(layer, torch.device("cpu"), stats), "nothing had to change"
    layer.comfy_cast_weights = True
    assert torch.equal(layer(x), expected) and stats.moved_bytes == 0, "they were here"
    layer.weight_function, layer.bias_function = [torch.zeros_like], [lambda bias: bias + 1]
    assert torch.equal(layer(x), (layer.bias + 1).expand(2, 3))
    casting.restore_layers(layer)
    assert type(layer) is nn.Linear and torch.equal(layer(x), expected)


def test_a_packed_layer_whose_scale_cannot_come_is_as_before(core: ComfyUI) -> None:
    class Unmovable(torch.Tensor):
        to = Mock(side_effect=torch.OutOfMemoryError)

    layer, rows, scale = nn.Linear(4, 3), torch.ones(3, 4, dtype=torch.int8), torch.ones(3, 1).as_subclass(Unmovable)
    core.module("compat.checkpoints.packed").pack(layer, rows, torch.float32, "scaled", {"scale": scale})
    core.module("host.casting").install_cast_layers(layer, torch.device("cpu"))
    stored, bias = layer.stored, layer.bias
    with pytest.raises(torch.OutOfMemoryError), layer._tensors_on(torch.device("meta")):
        pytest.fail("the rows came, the scale did not")
    assert layer.stored is stored and layer.bias is bias and layer.scale is scale


@pytest.mark.parametrize(
    ("patches", "expected"),
    [
        ({"attn1_output_patch": [1], "attn1_patch": [], "attn2_patch": []}, []),
        ({"attn2_output_patch": [1]}, ["attn2_output_patch, a place that its transformer does not have"]),
        (
            {"attn1_output_patch": [1], "attn1_patch": [1]},
            ["attn1_output_patch, whose attn1_patch has none", "attn1_patch, a place that its"],
        ),
    ],
)
def test_a_patch_without_effect_is_named_with_its_reason(core: ComfyUI, patches: Any, expected: list[str]) -> None:
    block = SimpleNamespace(attn=nn.Identity())
    transformer, options = SimpleNamespace(transformer_blocks=[block]), {"patches": patches, "cond_or_uncond": [0, 1]}
    said = list(core.module("host.diffusion_model").unread(options, {}, "Mochi 1", transformer))
    assert len(said) == len(expected) and all(map(str.__contains__, said, expected)), said


def test_latents_are_saved_loaded_and_rendered_again(core: ComfyUI, loaded, latent) -> None:
    record = core.run("SaveLatent", latent=latent).ui["latents"][0]
    name = f"{record['subfolder']}/{record['filename']} [output]"
    again = core.run("LoadLatent", file=name).result[0]
    assert torch.equal(again["samples"], latent["samples"])
    replayed = core.run("Replay", file=name)
    assert torch.equal(replayed.result[0]["samples"], latent["samples"]) and "bit for bit" in replayed.result[2]
    assert torch.equal(core.run("RecoverLatents").result[0]["samples"], latent["samples"])


def test_the_doctor_says_what_is_kept_and_what_is_forgotten(core: ComfyUI, loaded) -> None:
    store, repair = RepairStore(core.module("host.folders").state_folder()), Repair("vae.decoder", "fp32")
    for choice, kept, line in (
        ("forget", (), ""),
        ("keep", (repair,), "saved repair: "),
        ("forget", (repair,), "repairs are deleted"),
    ):
        for one in kept:
            store.add(str(loaded[0].model.source), one)
        watched = core.run("Doctor", pipeline=loaded[0], repair=choice)
        assert watched.result[0].run.doctor is not None and core.said.startswith("watching")
        assert [text for text in ("saved repair: ", "repairs are deleted") if text in core.said] == (
            [line] if line else []
        )
    assert all("connect" in str(blocked.given) for blocked in watched.result[1:])


def test_the_doctor_watches_a_model_of_core_s(core: ComfyUI) -> None:
    model, _ = fitted(core)
    network, x, closely, added, gain = model.model.diffusion_model, torch.ones(3, 32), [], 1e-6, 1.0
    with torch.no_grad():  # sums that are 0
        network.layers[0].weight.copy_(torch.tensor((1.0, -1.0)).repeat(32, 16)), network.layers[0].bias.zero_()
    network.layers[0].register_forward_hook(lambda _layer, _given, output: output + added)

    def attend(q: Any, k: Any, v: Any, heads: int) -> Any:
        return gain * small_comfyui.attention_pytorch(q, k, v, heads)

    def called(x: torch.Tensor, transformer_options: Any) -> torch.Tensor:
        closely.append("optimized_attention_override" in transformer_options)
        output = network(x)
        if closely[-1]:
            operands = torch.randn(3, 1, 7, 8, generator=torch.Generator().manual_seed(0))
            transformer_options["optimized_attention_override"](attend, *operands, 2)
        return output

    watched = core.run("Doctor", model=model).result[1]
    (call,), model.model.current_patcher = watched.wrappers["apply_model"]["anygpu_doctor"], watched
    said = len(core.messages.texts)
    run = lambda: WrapperExecutor(called, model.model, [call]).execute(x, transformer_options={"wrappers": {}})  # noqa: E731
    for added, looked in ((1e-6, [True]), (2e-5, [False]), (0.0, [False, True]), (2e-5, [False]), (1e-9, [False])):
        closely.clear()
        assert torch.equal(run(), network(x)) and closely == looked, added
    added = 1e-3
    with pytest.raises(
        NotFinite, match=r"a product unlike its weights first from block 1 of 2, diffusion_model\.layers\.0"
    ):
        run()
    added, gain = 0.0, 2.0
    with pytest.raises(NotFinite, match="attention unlike its operands first from diffusion_model "):
        run()
    assert len(core.messages.texts) == said
    with torch.no_grad():
        network.layers[1].weight.zero_()
    core.run("Doctor", model=model)
    assert "layers.1.weight holds nothing but zeros" in core.messages.texts[said][0]


def test_a_cancel_ends_the_text_of_the_node(core: ComfyUI, loaded, prompts) -> None:
    core.management.interrupted = True
    try:
        with pytest.raises(Interrupted):
            core.run("Sample", pipeline=loaded[0], prompt=prompts[0], **DRAWN)
    finally:
        core.management.interrupted = False
    assert core.said.startswith("cancelled")


def test_a_run_pauses_after_a_step_and_goes_on_there(core: ComfyUI, loaded, prompts, monkeypatch) -> None:
    paused, steps = core.module("host.server.paused"), DRAWN | {"steps": 4, "seed": 9}
    whole = core.run("Sample", pipeline=loaded[0], prompt=prompts[0], **steps).result[0]
    prompt, workflow = {"7": {"class_type": "AnyGPUSample", "inputs": {}}}, {"nodes": []}
    executed = {"7": prompt["7"] | {"is_changed": [math.nan]}}  # core's addition, which a browser cannot read
    running, flags = [(0, "a1", executed, {"extra_pnginfo": {"workflow": workflow}}, ["7"])], {}
    queue = SimpleNamespace(get_current_queue_volatile=lambda: (running, []), set_flag=flags.__setitem__)
    with pytest.raises(core.module("compat.errors").InputError, match="no run to pause"):
        paused.request()
    monkeypatch.setattr(core.messages, "prompt_queue", queue, raising=False)
    paused.request()
    with pytest.raises(Interrupted):
        core.run("Sample", pipeline=loaded[0], prompt=prompts[0], **steps)
    assert core.said.startswith("paused at sampling 1/4") and flags == {"unload_models": True, "free_memory": True}
    (listed,) = paused.listing()
    assert (listed["id"], listed["where"]) == ("a1", "sampling 1/4")
    kept = paused.resumable("a1")
    assert kept["prompt"] == prompt and kept["workflow"] == workflow
    running[0] = (0, "a2", {"7": {**prompt["7"], "inputs": {"seed": 1}}}, *running[0][3:])
    core.run("Sample", pipeline=loaded[0], prompt=prompts[0], **steps | {"seed": 1})
    paused.forget("../a1")
    assert [run["id"] for run in paused.listing()] == ["a1"], "another prompt forgets nothing"
    running[0] = (0, "a3", prompt, *running[0][3:])
    resumed = core.run("Sample", pipeline=loaded[0], prompt=prompts[0], **steps).result[0]
    assert "goes on after step 1 of 4" in core.said and torch.equal(resumed["samples"], whole["samples"])
    assert not paused.listing(), "it has gone on"
    paused.request()
    running[0] = (0, "another", *running[0][2:])
    core.run("Sample", pipeline=loaded[0], prompt=prompts[0], **steps)  # it began after the click
    waits, wanted = iter([None, None]), paused.wanted_run
    monkeypatch.setattr(paused, "wanted_run", lambda: next(waits, wanted()))
    paused.request()
    with pytest.raises(Interrupted):
        core.run("Sample", pipeline=loaded[0], prompt=prompts[0], **steps | {"seed": 2})
    assert paused.listing()[0]["where"] == "sampling 3/4"
    core.run("Sample", pipeline=loaded[0], prompt=prompts[0], **steps | {"seed": 2})
    assert not paused.listing(), "its one step that is left is saved by none"


def test_core_s_sampler_is_not_said_to_run_where_it_has_nothing_to_say(core: ComfyUI, loaded) -> None:
    """Nobody tells of its end, and the tab offers Pause as long as a node runs."""
    network = SimpleNamespace(demo="", notify=None)
    patcher = SimpleNamespace(model=SimpleNamespace(diffusion_model=network), object_patches={})
    core.module("host.core_models")._report_start(patcher)
    nodes = core.module("host.server.panel").last_run()["nodes"]
    assert nodes and all(entry["done"] for entry in nodes.values())


def test_a_step_cache_is_put_on_and_named(core: ComfyUI, loaded) -> None:
    cached = core.run("StepCache", pipeline=loaded[0]).result[0]
    assert cached.plan.step_cache is not None and loaded[0].plan.step_cache is None
    assert cached.patcher is cached.offloader.patcher, "by which ComfyUI's caches know a model"


def test_tools(core: ComfyUI, loaded) -> None:
    text, bars = core.run("MemoryPlan", pipeline=loaded[0], **SIZE).result
    assert "64x64" in text and bars.shape[-1] == 3 and core.said.startswith(text.partition("\n")[0])
    text, table = core.run("HardwareReport").result
    assert "cpu" in text and table.ndim == 4
    assert core.said.startswith("CPU as cpu")
    model = next(name for name in core.schemas["AnyGPUDownloadModel"]["inputs"][0]["options"] if "LTX" in name)
    assert core.run("DownloadModel", model=model).result[0]
    assert "nothing was downloaded" in core.said


def test_a_batch_is_made_one_by_one(core: ComfyUI, loaded, prompts, latent) -> None:
    both = core.run("Sample", pipeline=loaded[0], prompt=prompts[0], **DRAWN, batch_size=2).result[0]
    assert core.said.startswith("64x64, 9 frames at 25 fps; 2 videos, seeds 5 to 6; fp32")
    assert len(both["samples"]) == 2 and torch.equal(both["samples"][:1], latent["samples"])
    frames, films = core.run("Decode", pipeline=loaded[0], latent=both).result
    assert core.said.startswith("64x64, 9 frames at 25 fps; 2 videos") and len(frames) == len(films) == 2
    film = core.run("Decode", pipeline=loaded[0], latent=latent, fps=24025 / 1002).result[1][0]
    assert film.given[0].frame_rate.denominator <= 1001, "as NTSC's"


def test_a_picture_is_encoded_at_its_size(core: ComfyUI, loaded) -> None:
    asked = {"image": torch.rand(1, 64, 96, 3), "width": 96, "height": 64, "fit": "crop"}
    assert core.run("EncodeImage", pipeline=loaded[0], **asked).result[1:] == (96, 64)


def test_upscaled_latents_keep_their_noise_mask(core: ComfyUI, loaded, latent, tmp_path: Path, monkeypatch) -> None:
    folders, mask = core.module("host.folders"), torch.rand(1, 1, 2, 2, 2)
    monkeypatch.setattr(folders, "upscalers", lambda: {"tiny": loops.ltx_upscaler(tmp_path)})
    given = {"pipeline": loaded[0], "upscaler": "tiny"}
    plain = core.run("UpscaleLatents", **given, latent=latent).result[0]
    high = core.run("UpscaleLatents", **given, latent={**latent, "noise_mask": mask}).result[0]
    assert torch.equal(high["samples"], plain["samples"]) and "noise_mask" not in plain
    assert torch.equal(high["noise_mask"], mask)
    kind = core.module("nodes.latents").UpscaleLatents
    assert kind.fingerprint_inputs("tiny", latent=latent) != kind.fingerprint_inputs("another")


def test_a_lora_is_put_on_and_named(core: ComfyUI, loaded, prompts) -> None:
    assert core.run("LoRA", pipeline=loaded[0], lora="none").result[0] is loaded[0] and core.said == "no LoRA chosen"
    path = Path(core.module("host.folders").folder_paths.get_folder_paths("loras")[0]) / "mine.safetensors"
    weight = loaded[0].parts.read("transformer").transformer_blocks[0].attn1.to_q.weight
    sides = {"A": torch.ones(1, weight.shape[1]), "B": torch.ones(weight.shape[0], 1)}
    layer = "transformer.transformer_blocks.0.attn1.to_q.lora"
    save_file({f"{layer}_{side}.weight": factor for side, factor in sides.items()}, path)
    changed, model = core.run("LoRA", pipeline=loaded[0], lora=path.name, strength=0.5).result
    assert core.said.startswith("LoRA mine 0.5, separate  \nmine: 1 layer")
    assert changed is not loaded[0]
    assert list(model.patches) == ["diffusion_model.transformer_blocks.0.attn1.to_q.weight"]
    assert core.run("LoRA", pipeline=loaded[0], lora=path.name, strength=0.0).result[0] is loaded[0]
    assert core.said.startswith("no effect")
    for name in ("ltxv-097-distilled-lora.safetensors", "an-ic-lora.SAFETENSORS"):  # a recipe, a caution come after it
        path = path.rename(path.with_name(name))
        core.run("LoRA", pipeline=loaded[0], lora=path.name, strength=0.5)
        assert core.said.startswith(f"LoRA {path.stem} 0.5, separate"), name


def test_jobs_that_all_failed_are_told_with_the_first_reason(core: ComfyUI) -> None:
    module = core.module("host.farm")
    jobs, progress = SimpleNamespace(name="mine"), core.module("host.progress").NodeProgress(None)
    with pytest.raises(InputError, match="no job of 'mine' is done, 1 failed"):
        core.module("nodes.farm").results(jobs, module.Collected((), {"ab": "no model."}, 0), progress)


def test_meshes_are_looked_up_before_a_model_is_hashed_and_a_cancel_ends_their_queue(
    core: ComfyUI, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, checks = core.module("host.farm"), list[Any]()
    content_class, cancelled = core.module("pipelines.records.job").Content, Mock(side_effect=Interrupted)

    def content(_places: Any, path: Path, _name: str = "", check: Any = None) -> Any:
        checks.append(check)
        return content_class(path.name, "0" * 64)

    monkeypatch.setattr(module.Places, "content", content)
    monkeypatch.setattr(module, "paint_path", lambda name: tmp_path / name)
    monkeypatch.setattr(module.folder_paths, "get_input_directory", lambda: str(tmp_path))
    (tmp_path / "meshes").mkdir()
    for name in ("torus.glb", "torus.png"):
        (tmp_path / "meshes" / name).write_bytes(b"")
    folder = module.JobFolder(tmp_path / "farm")
    models, own = module.PaintModels("paint", "delight"), (module.NONE, [0, 1], 1, cancelled)
    with pytest.raises(core.module("compat.errors").CheckpointError, match="no folder of pictures or meshes 'gone'"):
        module.queue_meshes(folder, "x", models, "gone", *own)
    assert not checks
    with pytest.raises(Interrupted):
        module.queue_meshes(folder, "x", models, "meshes", *own)
    assert checks == [cancelled] * 4 and not folder.job_files()


def test_a_list_of_farms_may_begin_with_a_byte_order_mark(core: ComfyUI) -> None:
    module = core.module("host.farm")
    path = module.state_folder() / module.ADDRESSES
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("ray://one:10001\n", encoding="utf-8-sig")
    assert module.farm_address("ray://one:10001") == "ray://one:10001"


def test_the_picture_shown_of_a_farm_is_of_the_own_jobs(core: ComfyUI, monkeypatch: pytest.MonkeyPatch) -> None:
    module, seen = core.module("host.farm"), list[str]()
    workers = [{"worker": f"w{index}", "job": key, "total": 8} for index, key in enumerate(("other", "done", "own"))]
    standings = [{"done": done, "failed": {}, "workers": workers} for done in (["done"], ["own"])]
    gateway = SimpleNamespace(standing=SimpleNamespace(remote=lambda _keys: standings.pop(0)))
    monkeypatch.setattr(module, "_pause", lambda _progress: None)
    monkeypatch.setattr(module._Farm, "answer", lambda _farm, call: call)
    monkeypatch.setattr(module._Farm, "_fetch", lambda *_: None)
    progress = SimpleNamespace(check=lambda: None, lines=[], step=lambda *_: seen.append(farm.worker))
    farm = module._Farm(None, gateway, progress)
    farm.fetch(SimpleNamespace(folder=SimpleNamespace(write_workers=lambda *_: None)), ["done", "own"])
    assert seen == ["w2", ""]


class Network(nn.Module):
    """Linears of core's."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.ModuleList((Linear(32, 32), Linear(32, 32))).to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[1](self.layers[0](x))


def fitted(core: ComfyUI, dtype: torch.dtype = torch.float32, **inputs: Any) -> tuple[Any, Any]:
    """A MODEL of two Linears, and what Fit Model makes of it."""
    model = BaseModel()
    model.diffusion_model = Network(dtype)
    patcher = ModelPatcher(model)
    return patcher, core.run("FitModel", model=patcher, **inputs).result[0]


@pytest.mark.parametrize("safe", [False, True])
def test_attention_in_any_layout_is_core_s(core: ComfyUI, monkeypatch, safe: bool) -> None:
    module, function, inner = core.module("host.core.attention"), small_comfyui.attention_pytorch, set()
    monkeypatch.setattr(module, "fused_kernel", lambda *_: 2)
    joined = {"skip_output_reshape": False} if safe else {}  # as core gives more rows than its SDP_BATCH_LIMIT
    calls = lambda *given, **named: inner.add(named.get(module.INNER)) or function(*given, **named | joined)  # noqa: E731
    monkeypatch.setattr(module, "attention_pytorch", calls)
    plain = torch.randn(3, 2, 6, 16, generator=torch.Generator().manual_seed(0)).unbind()
    heads, mask = [tensor.unflatten(-1, (2, 8)).transpose(1, 2) for tensor in plain], torch.zeros(6, 6)
    mask[:, 4:] = -1e4
    for named in ({}, {"mask": mask, "scale": 0.5}):
        expected = function(*plain, 2, **named)
        for given, skipped, split in ((plain, False, False), (plain, False, True), (heads, True, False)):
            named |= {"skip_reshape": skipped, "skip_output_reshape": split}
            found = module.AttentionOverride(module.Attention(), safe)(function, *given, 2, **named)
            found = found.transpose(1, 2).flatten(2) if split else found
            torch.testing.assert_close(found, expected, rtol=0, atol=2e-3 if safe else 1e-6)
    assert inner == {True if safe else None}
    machine = core.module("host.core.machine")
    monkeypatch.setattr(machine, "fused_kernel", lambda *operands: len(operands) < 4)  # none with a mask
    assert not dataclasses.replace(machine.machine_of("cpu")).kernels(torch.float32).fused


def test_blocks_whose_sizes_fit_are_trusted_until_they_grow(core: ComfyUI, tmp_path: Path) -> None:
    module, network, x = core.module("host.core.calibration"), Network(torch.float32), torch.randn(3, 32)
    sizes = module.Calibration(tmp_path / "sizes.json", True)
    nn.init.zeros_(network.layers[1].bias)
    assert not sizes.is_plain(network)
    with sizes.measured(network):
        network(x)
    sizes.write()
    again = module.Calibration(sizes.path, True)
    assert again.sizes == sizes.sizes and again.is_plain(network)
    for gain, trusted in ((1, True), (7, True), (1000, False), (0, False)):
        with again.trusted(network) as held:
            network.layers[1](network.layers[0](x) * gain) if gain < 9 else network(x * gain)
        assert held() is trusted, gain
    again.sizes["layers.1"].share = 2.0
    for rows, plain in ((9.0, True), (1.0, False)):
        again.sizes["layers.0"].rows = rows
        assert again.is_plain(network) is plain, "few rows are plain only where all is"


def test_a_proof_window_is_what_its_frames_are_and_lies_where_they_are_dead(core: ComfyUI) -> None:
    module, whole = core.module("host.core.vae_window"), torch.randn(1, 4, 5, 40, 20)
    decoded = lambda latents: latents.movedim(1, -1).repeat_interleave(2, 2).repeat_interleave(2, 3)  # noqa: E731
    window = module.ProofWindow(whole, False, 0, 4, 9, 2)
    inside = window.inner(decoded(window.latents))
    assert torch.equal(inside, window.frames_of(decoded(whole))) and inside.shape == (1, 1, 16, 24, 4)
    causal = lambda latents: decoded(latents).repeat_interleave(4, 1)[:, 3:]  # noqa: E731
    assert torch.equal(window.inner(causal(window.latents)), window.frames_of(causal(whole)))
    not_causal = lambda latents: causal(latents + latents[:, :, [*range(1, latents.shape[2]), -1]])  # noqa: E731
    for frame, count in ((0, 5), (3, 4), (5, 8)):
        window = module.ProofWindow(torch.cat((whole, whole[:, :, :2] * 0), 2), False, 0, frame, 9, 2)
        inside = window.inner(not_causal(window.latents))
        assert inside.shape[1] == count and torch.equal(inside, window.frames_of(not_causal(window.whole)))
    vae, frames = SimpleNamespace(latent_dim=3), torch.rand(1, 5, 80, 40, 3)
    frames[:, 3, 20:40, 10:20] = 0.5
    found = module.ProofWindow.of(vae, whole, frames)
    assert (found.frame, found.row // 5, found.column // 5) == (3, 3, 1)


def test_core_s_vae_begins_where_the_device_can_and_tiles_by_its_own_cells(core: ComfyUI, monkeypatch) -> None:
    module, methods = core.module("host.core.vae"), [DecodeMethod(torch.float32, tile=tile) for tile in (0, 256, 128)]
    monkeypatch.setattr(module, "policy_for", lambda _facts: SimpleNamespace(tile_pixels=128))
    own = SimpleNamespace(machine=SimpleNamespace(facts=None), method=DecodeMethod(torch.float32, tile=64))
    assert module.FittedVAE._first_method(own, "decode", [*methods, own.method]) is own.method
    own.method = methods[1]
    assert [module.FittedVAE._first_method(own, name, methods) for name in ("decode", "decode_tiled")] == methods[:0:-1]
    compressed = {"spacial_compression_decode": lambda: 8, "temporal_compression_decode": lambda: 4}
    vae = SimpleNamespace(latent_dim=3, decode_tiled=lambda _given, **chosen: chosen, **compressed)
    expected = {"tile_x": 32, "tile_y": 32, "overlap": 8, "tile_t": 16, "overlap_t": 4}
    assert module._in_tiles(vae, "decode", torch.zeros(1, 4, 3, 8, 8), 256) == expected


def test_an_infinite_weight_of_a_text_encoder_is_named(core: ComfyUI) -> None:
    encoder = Network(torch.float32)
    nn.init.constant_(encoder.layers[1].weight, float("inf"))
    (fault,) = core.module("host.core.clip")._faults(encoder)
    assert fault.verdict.startswith("layers.1.weight holds") and fault.alarming


def test_a_part_is_taken_from_who_held_it(core: ComfyUI, monkeypatch) -> None:
    manager, module, sent = core.module("host.memory_manager"), nn.Linear(2, 2), []
    monkeypatch.setattr(manager.casting, "send_home", sent.append)
    one, two = (manager.Holder(SimpleNamespace(read=lambda _: module), "part") for _ in range(2))
    one.fill()
    patcher, other = ModelPatcher(one), ModelPatcher(BaseModel())
    core.management.load_models_gpu([patcher, other])
    two.fill()
    assert patcher not in [item.model for item in core.management.current_loaded_models]
    assert one.content is None and two.content is module
    del one, patcher
    assert not sent, "another holds it"
    del two
    assert sent == [module]


def test_a_part_that_lies_on_the_host_is_read_again(core: ComfyUI, loaded, monkeypatch) -> None:
    offloader, dropped = loaded[0].offloader, []
    monkeypatch.setattr(type(offloader.parts), "drop", lambda _parts, name: dropped.append(name))
    for device, expected in (("meta", []), ("cpu", ["vae"])):
        monkeypatch.setattr(type(offloader), "device_of", lambda _self, _part, device=device: torch.device(device))
        offloader.release("vae")
        assert dropped == expected, device


def test_files_behind_a_linked_folder_are_offered_once(core: ComfyUI, tmp_path: Path, monkeypatch) -> None:
    files, linked = core.module("host.model_files"), tmp_path / "elsewhere"
    (tmp_path / "vae").mkdir(), linked.mkdir(), (linked / "a.safetensors").touch()
    (tmp_path / "vae" / "b").symlink_to(linked), (linked / "loop").symlink_to(linked)
    monkeypatch.setattr(files, "roots", lambda _keys: [tmp_path / "vae"])
    assert files.file_choices("vae") == ["auto", "b/a.safetensors"]


def test_new_files_that_auto_may_take_compose_the_pipeline_again(core: ComfyUI, tiny_folder: Path, tmp_path) -> None:
    made = layouts.whole_set("ltx", tiny_folder, tmp_path)["text_encoder"].read_bytes()
    folder = Path(core.module("host.folders").folder_paths.get_folder_paths("text_encoders")[0])
    given = dict.fromkeys(("transformer", "vae", "text_encoder", "text_encoder_2", "image_encoder", "base"), "auto")
    files, stamps = (folder / "t5.safetensors", folder / "another.safetensors"), []
    for file, content in ((files[0], b""), (files[1], b""), (files[0], made), (files[0], b"")):
        file.write_bytes(content)
        stamps.append(core.module("nodes.loaders").ComposePipeline.fingerprint_inputs(**given))
    assert [len(stamp) for stamp in stamps] == [0, 0, 1, 0], "only files of models that it may be"


class Foreign(nn.Linear):
    """A Linear that another pack computes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def test_a_network_is_left_to_another_pack_by_its_share_of_all_products(core: ComfyUI) -> None:
    ownership = core.module("host.core.ownership")
    network = nn.Sequential(Linear(32, 32), nn.Conv2d(32, 32, 1), nn.Conv3d(32, 32, 1), Foreign(10, 32))
    assert ownership.why_left(network) == ""  # 320 of 3392
    network.append(Foreign(2, 32))
    assert ownership.why_left(network).startswith("11% of its products")
    takes = map(ownership.takes_any_dtype, (Foreign(2, 2), Foreign(2, 2).half(), nn.LayerNorm(2).half()))
    assert [*takes] == [True, False, True]
    mixed, cast = nn.Sequential(Linear(2, 2), Foreign(2, 2)).bfloat16(), core.module("host.core.weights")._cast
    assert [each.weight.dtype for each in cast(mixed, lambda *_: torch.half, True)] == [torch.half, torch.bfloat16]


def test_bits_have_a_sum_in_packed_weights_too(core: ComfyUI) -> None:
    checksum, x = core.module("host.core.weights").checksum, torch.randn(4, 8)
    both = SimpleNamespace(a=x, b=x.flip(0), __tensor_flatten__=lambda: (("a", "b"), None))
    assert checksum(both) == checksum(x) + checksum(x.flip(0)) != 2 * checksum(x)


def test_a_model_that_needs_nothing_passes_through_fit_model(core: ComfyUI, loaded) -> None:
    model, same = fitted(core)
    assert same is model and core.said.startswith("nothing to change on this device")
    assert "precision fp32 as loaded" in core.said and "latents not kept" in core.said
    assert core.run("FitModel", model=loaded[1]).result[0] is loaded[1] and "decides this on its load node" in core.said


def test_what_fit_model_changes_is_done_and_taken_back_again(core: ComfyUI) -> None:
    model, fit = fitted(core, torch.bfloat16, precision="fp32", attention="bounded", keep_latents="always")
    assert fit is not model and core.said.startswith("fitted") and "core would compute in bf16" in core.said
    assert (
        fit.get_model_object("manual_cast_dtype") is torch.float32
        and model.get_model_object("manual_cast_dtype") is None
    )
    assert list(fit.wrappers) == ["apply_model", "outer_sample"] and not model.wrappers
    (wrapper,), x = fit.wrappers["apply_model"]["anygpu_fit"], torch.randn(3, 32)
    model.model.current_weight_patches_uuid = None
    network = model.model.diffusion_model
    output = WrapperExecutor(lambda x, *_args, **_given: network(x), model.model, [wrapper]).execute(x)
    assert torch.equal(output, network(x))
    again = core.run("FitModel", model=fit, precision="as loaded").result[0]
    assert "an earlier fit taken back" in core.said and again.get_model_object("manual_cast_dtype") is None
    with pytest.raises(UnsupportedError, match="fp16-safe"):
        fitted(core, precision="fp16-safe")
    model = BaseModel()
    model.diffusion_model, bare = nn.Sequential(nn.LayerNorm(4)), ModelPatcher(model)
    assert core.run("FitModel", model=bare).result[0] is bare, "no layer of core's is needed but for fp16-safe"
    module, machine = core.module("host.core.machine"), core.module("host.core.machine").machine_of("cpu")
    assert machine is module.machine_of("cpu"), "its kernels are asked once"
    (decided, _) = module.fit_for(machine, torch.float32, "auto", "auto").decisions
    assert (decided.verdict, decided.why) == ("fp32 as loaded", "this device computes fp32 well")
    for usable, why in ((True, ""), (False, "damaged")):
        verdict = SimpleNamespace(
            verdict=lambda _operation, usable=usable: SimpleNamespace(usable=usable, why="damaged")
        )
        lack = core.module("host.core.weights").damage_to_bf16(network, SimpleNamespace(abilities=verdict))
        assert lack == why


def test_one_node_fits_what_is_connected_and_has_a_line_for_each_part(core: ComfyUI, loaded) -> None:
    model, single = fitted(core, torch.bfloat16, precision="fp32")
    alone, _, missing = core.run("Fit", model=model, precision="fp32").result
    assert alone.get_model_object("manual_cast_dtype") is single.get_model_object("manual_cast_dtype") is torch.float32
    (wrapper,) = alone.wrappers["apply_model"]["anygpu_fit"]
    wrapper.tell("fp16-safe in 2 of 2 layers called")
    line = "model: fitted to this device; precision fp32; attention as loaded; latents kept"
    wrapper.tell("fp16-safe in 2 of 2 layers called")
    assert core.said == f"{line}; fp16-safe in 2 of 2 layers called"
    assert "connect clip to AnyGPU Fit" in str(missing.given)
    assert core.run("Fit", model=loaded[1], vae=loaded[2]).result[:2] == loaded[1:3]
    nothing = "nothing to change on this device"
    assert core.said.split("  \n") == [f"{part}: {nothing}; {part} as it is" for part in ("model", "vae")]
    with pytest.raises(InputError, match="precision fp32 without a MODEL"):
        core.run("Fit", vae=loaded[2], precision="fp32")
    lora = {"lora_name": "wan2.2_i2v_lightx2v_4steps_lora.safetensors"}
    sampler = {"model": ["7", 0], "latent_image": ["9", 0], "steps": 20}
    prompt = {"5": {"class_type": "LoraLoaderModelOnly", "inputs": lora}}
    prompt["8"] = {"class_type": "KSampler", "inputs": sampler}
    hidden = small_comfyui.ComfyNode.hidden
    for name in ("Fit", "FitModel"):
        prompt["7"] = {"class_type": f"AnyGPU{name}", "inputs": {"model": ["5", 0]}}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hidden, "prompt", prompt)
            core.run(name, model=model)
        assert "lightx2v_4steps_lora in a graph with 20 steps; expected 4 steps, cfg 1" in core.said, name


def test_what_is_advanced_may_be_left_out(core: ComfyUI) -> None:
    for node_id, schema in core.schemas.items():
        inputs = schema["inputs"]
        first = next((index for index, item in enumerate(inputs) if item.get("advanced")), len(inputs))
        assert all(item.get("optional") for item in inputs[first:]), f"{node_id}: core lists a required one first"


def test_prompts_exported_before_newer_inputs_are_whole(core: ComfyUI) -> None:
    newer = 0
    for path in sorted((Path(__file__).parent / "fixtures" / "saved").glob("*.json")):
        for node in json.loads(path.read_text(encoding="utf-8"))["prompt"].values():
            offered = {item["name"]: item for item in core.schemas.get(node["class_type"], {}).get("inputs", ())}
            absent = offered.keys() - node["inputs"].keys()
            assert all(offered[name].get("optional") for name in absent), f"{path.name}: {node['class_type']}"
            choices = {name: offered[name]["options"] for name in offered.keys() - absent if "options" in offered[name]}
            for name, options in choices.items():
                ours = options[0] == "auto" and len(options) > 1  # and no choice of files, none of which are here
                assert not ours or node["inputs"][name] in options, f"{path.name}: {node['class_type']}.{name}"
            newer += len(absent)
    assert newer > 300, "nothing is newer than the exports"


def test_the_menu_holds_what_most_people_need(core: ComfyUI) -> None:
    made = [kind.GET_SCHEMA() for kind in core.nodes.NODES]
    hidden = {schema.node_id for schema in made if getattr(schema, "is_dev_only", False)}
    farm = {"AnyGPUQueueJobs", "AnyGPUFarm"}
    assert farm.isdisjoint(hidden) if importlib.util.find_spec("ray") else farm <= hidden
    assert len(made) - len(hidden - farm) <= 30
    assert made[0].node_id == "AnyGPULoadPipeline" and not {"AnyGPULoadPipeline", "AnyGPUFit"} & hidden


def test_lists_of_widgets_are_no_links_in_the_history_of_a_node(core) -> None:
    boxes = {"class_type": "CreateBoundingBoxes", "inputs": {"editor_state": [{"x": 1}, {"x": 2}], "name": ["3", "1"]}}
    prompt = {"1": boxes, "2": {"class_type": "AnyGPUPaintViews", "inputs": {"image": ["1", 0]}}}
    assert json.loads(core.module("host.meshes").history({**prompt, "3": {}}, "2")) == prompt


@pytest.mark.parametrize(("name", "file"), [("pictures", "fox.png"), ("meshes", "fox.glb")])
def test_a_file_more_in_its_folder_queues_jobs_again(core: ComfyUI, name: str, file: str) -> None:
    """ComfyUI answers from its cache where this is the same. A name outside its input folder is no folder."""
    folder = Path(core.module("host.farm").folder_paths.get_input_directory()) / "foxes"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / file).touch()
    stamp = core.module("nodes.farm").QueueJobs.fingerprint_inputs
    before, outside = stamp(**{name: "foxes"}), stamp(**{name: "../input/foxes"})
    (folder / f"another {file}").touch()
    assert stamp(**{name: "foxes"}) != before and stamp(**{name: "../input/foxes"}) == outside


@pytest.mark.parametrize("name", ["model", "paint_model", "delight", "image_encoder", "adapter"])
def test_a_model_that_was_replaced_queues_jobs_again(core: ComfyUI, name: str, tmp_path: Path, monkeypatch) -> None:
    """Jobs name their models by content, so that those of before would be found nowhere."""
    tables = ("models", "base_models", "paint_models", "paint_providers", "adapters")
    for table in tables:
        (tmp_path / table).mkdir()
        (tmp_path / table / "config.json").write_text("{}", encoding="utf-8")
        monkeypatch.setattr(core.module("host.folders"), table, lambda table=table: {table: tmp_path / table})
    stamp = core.module("nodes.farm").QueueJobs.fingerprint_inputs
    for table in tables[:1] if name == "model" else tables[1:]:
        given = {name: table, "meshes": "none" if name == "model" else "foxes", "prompts": None, "width": 64}
        before = stamp(**given)
        (tmp_path / table / "config.json").write_text('{"another": 1}', encoding="utf-8")
        assert stamp(**given) != before and stamp(**given) == stamp(**given)


def test_what_a_node_expands_into_is_told_under_the_node_itself(core: ComfyUI, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as Texture Mesh, which unwraps a mesh without UVs: the canvas has no node of the inner one's id."""
    panel, progress = core.module("host.server.panel"), core.module("host.progress")
    graph = SimpleNamespace(get_display_node_id=lambda name: name.partition(".")[0])
    monkeypatch.setattr(panel, "get_progress_state", lambda: SimpleNamespace(dynprompt=graph))
    progress.NodeProgress("12.0.0.2").finish("painted")
    assert core.messages.events[-1][0]["node"] == "12" and panel.last_run()["nodes"]["12"]["status"] == "painted"
    progress.NodeProgress("12.0.0.2")
    assert panel.stop("12.0.0.2", "cancelled")["status"] == "cancelled"


def test_a_model_or_a_mesh_by_a_link_has_a_fingerprint(core: ComfyUI) -> None:
    """ComfyUI says None for it; an error would run everything again each time."""
    assert core.module("host.requests").used_folders(None, None, None) == []
    assert core.module("host.meshes").file_stamp(None) is None


def test_greedy_cameras_need_no_lists(core: ComfyUI) -> None:
    with pytest.raises(InputError, match="no mesh for greedy cameras"):
        core.run("PaintCameras", choose="greedy", azimuths="", elevations="", weights="")


def test_an_input_that_is_left_out_has_the_value_that_its_schema_says(core: ComfyUI) -> None:
    from anygpu.host.requests import ADAPTER_INPUTS, FILE_INPUTS, FOLDER_INPUTS, PAINT_INPUTS
    from anygpu.paint.sampling.delight import DelightSettings
    from anygpu.paint.sampling.painting import PaintSettings

    settings = {
        "Sample": SampleSettings,
        "SampleFramePack": SampleSettings,
        "PaintViews": PaintSettings,
        "DelightImage": DelightSettings,
        "StepCache": StepCacheSettings,
        "EncodePrompt": PromptRequest,
        "EncodeImage": ImageRequest,
    }
    tables: dict[str, dict[str, Any]] = {
        f"AnyGPU{node}": {field.name: field.default for field in dataclasses.fields(kind)}
        for node, kind in settings.items()
    }
    tables["AnyGPULoadPipeline"] = {**FOLDER_INPUTS, "profile": False}
    tables["AnyGPUComposePipeline"] = {**FILE_INPUTS, "profile": False}
    tables["AnyGPULoadPaintPipeline"] = PAINT_INPUTS
    tables["AnyGPULoadMVAdapter"] = ADAPTER_INPUTS
    others = {}
    for kind in core.nodes.NODES:
        node_id = kind.GET_SCHEMA().node_id
        named = inspect.signature(kind.execute).parameters
        for item in core.schemas[node_id]["inputs"]:
            if not item.get("optional") or "default" not in item:
                continue
            name = item["name"]
            used = named[name].default if name in named else tables.get(node_id, {}).get(name, "nothing")
            if used != item["default"]:
                others[f"{node_id}.{name}"] = used, item["default"]
    assert not others, "what is used, and what the schema says"


def test_the_ring_of_the_demo_needs_no_file(core: ComfyUI) -> None:
    listed = next(item for item in core.schemas["AnyGPULoadMesh"]["inputs"] if item["name"] == "mesh_file")
    assert listed["options"] == ["demo: ring"]
    (mesh,) = core.run("LoadMesh", mesh_file="demo: ring").result
    vertices, faces = mesh.given
    assert vertices.shape[0] == 1 and faces.shape[1] == 2 * 32 * 64 and core.said == "the ring of the demo"
    stamp, root = core.module("host.meshes").file_stamp, core.module("host.meshes").folder_paths.get_input_directory()
    (file := Path(root, "mine.ply")).write_bytes(b"ply")
    assert stamp(file.name) == [(file.name, file.stat().st_mtime, 3)] and stamp("gone.ply") is None
    (mesh := Path(root, "mine[1].obj")).write_bytes(b"obj")
    before = stamp(mesh.name)
    mesh.with_suffix(".mtl").write_bytes(b"newmtl")
    assert stamp(mesh.name) == [*before, ("mine[1].mtl", mesh.with_suffix(".mtl").stat().st_mtime, 6)][::-1]
    inputs = {"1": {}, "2": {"mesh": ["1", 0], "seed": 4, "text": "4"}, "3": {"mesh": ["2", 1], "box": ["4"]}, "4": {}}
    prompt = {name: {"inputs": given} for name, given in inputs.items()}
    before = core.module("host.meshes").history(prompt, "3")
    assert json.loads(before) == {name: prompt[name] for name in "123"}, "a list of one value is no link"


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("LoadMesh", {"mesh_file": 3}),
        ("LoadMesh", {"model_3d": "a"}),
        ("LoadPipeline", {"model": {}}),
        ("Fit", {"vae": []}),
    ],
)
def test_a_value_of_another_kind_than_its_input_is_one_line(core: ComfyUI, name: str, given: dict[str, Any]) -> None:
    """A node that passes on anything, such as core's Switch, is not checked by ComfyUI."""
    with pytest.raises(Exception, match=r"of type \w+; expected") as caught:
        core.run(name, **given)
    assert type(caught.value).__name__ == "InputError" and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["a\0b", "x" * 5000, "x/" * 5000, "../up.glb"])
def test_a_mesh_that_no_folder_can_hold_is_one_line(core: ComfyUI, name: str) -> None:
    with pytest.raises(Exception, match="no mesh"):
        core.run("LoadMesh", mesh_file=name)
