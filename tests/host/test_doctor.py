"""The doctor beside core's models and beside ours, in ComfyUI's own process and through its server."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import tiny
from safetensors.numpy import load_file, save_file

from host.client import Client
from host.core_page import DOCTORED, FINITE, NOT_FINITE
from host.inside.asking import Inside
from host.prompts import Graph, loading, sampling
from host.server import Server

pytestmark = pytest.mark.host
full = pytest.mark.full


@pytest.mark.parametrize("name", ["Wan 2.1", *(pytest.param(name, marks=full) for name in ("LTXV", "Flux", "SD3"))])
def test_nan_in_every_layer_of_a_model_of_core_is_named(inside: Inside, name: str) -> None:
    found = inside.play("doctor", "nan_everywhere", name=name)
    assert not found["wrong"] and found["right"] > 40
    assert len(found["unused"]) <= 2, found["unused"]


def test_weights_that_core_casts_while_it_loads_are_not_taken_for_damage(inside: Inside) -> None:
    found = inside.play("dynamic", "cast_while_loading", name="Wan 2.1")
    assert found["dynamic"] and found["casts"] > 3 and not found["wrong"] and found["damaged"] == 1, found


def test_no_hook_of_the_doctor_stays_where_memory_runs_out(inside: Inside) -> None:
    ends = inside.play("injected", "hooks", name="Wan 2.1")
    assert ends.keys() == {""} and ends[""] >= 8, ends


@pytest.mark.parametrize("name", ["LTXV", *(pytest.param(name, marks=full) for name in ("Wan 2.1", "Kandinsky 5"))])
def test_an_overflow_is_offered_a_repair_that_later_runs_keep(inside: Inside, name: str) -> None:
    found = inside.play("doctor", "overflowing", name=name)
    assert found["broken"]
    assert "step 1 of 1, positive prompt: infinite values first from block 1 of 2" in found["offered"]
    assert "Set repair to keep" in found["offered"] and "put AnyGPU Fit Model before" in found["offered"]
    assert found["kept"]["error"] < 1e-2 and not found["kept"]["said"], "the offer was not kept"
    assert found["again"] == found["kept"] and found["traces"] == 0


def test_a_broken_attention_kernel_is_offered_another_one_which_later_runs_keep(inside: Inside) -> None:
    """Whichever kernel core or another node has put there: torch's own is not the only one."""
    found = inside.play("doctor", "broken_attention", name="Wan 2.1")
    assert "NaN first from block 1 of 2, self-attention, " in found["offered"]
    assert "with another attention, exact and in fp32 the result is right" in found["offered"]
    assert found["first"] < 1e-5 and found["error"] < 1e-5 and not found["said"]


def test_watching_is_a_few_operations_per_block_and_a_fiftieth_of_the_weights(inside: Inside) -> None:
    """A published block has some hundred operations."""
    found = inside.play("doctor", "cost", name="Wan 2.1")
    assert 0 < found["added"] <= 70 and found["step"] > 100 and found["hooks"] == 0, found


@full
def test_watching_takes_less_than_a_hundredth_of_a_step(inside: Inside) -> None:
    """On average over a sampling of twenty, at 1,280 tokens: published videos have many more to each weight."""
    found = inside.play("doctor", "timed", steps=20)
    assert 0 < found["watching"] < 0.01 * found["whole"], found


MODELS = list(DOCTORED)


@pytest.mark.parametrize(
    ("names", "faults", "count"),
    [
        pytest.param(["Flux"], list(FINITE), 6, id="some"),
        pytest.param(MODELS, list(FINITE), 168, id="a third finite", marks=full),
        pytest.param(MODELS, list(NOT_FINITE), 335, id="the others", marks=full),
    ],
)
def test_injected_faults_are_named_and_repaired_in_five_steps(
    inside: Inside, names: list[str], faults: list[str], count: int
) -> None:
    found = inside.play("doctor_faults", "many", names=names, faults=faults, count=count)
    assert sum(found["tried"].values()) == count and len(set(found["tried"].values())) == 1
    assert all(found["right"][fault] >= 0.95 * tried for fault, tried in found["tried"].items()), found["wrong"]
    assert found["runs"] <= 5, "of the network, after the step that failed"


@pytest.mark.parametrize(("names", "count"), [(["Wan 2.1", "SDXL"], 4), pytest.param(MODELS, 200, marks=full)])
def test_sound_runs_are_silent_and_the_same(inside: Inside, names: list[str], count: int) -> None:
    found = inside.play("doctor_faults", "clean", names=names, count=count)
    assert found["runs"] >= count and not found["said"] and not found["changed"]


@pytest.mark.parametrize("lora", [False, True])
def test_weights_that_change_on_the_device_are_named_and_loaded_again(inside: Inside, lora: bool) -> None:
    for how, found in inside.play("doctor_faults", "on_the_device", name="Wan 2.1", lora=lora).items():
        assert found["sound"] and found["device"] != "cpu" and found["wrong"] > 0, how
        assert found["named"] and len(found["said"]) == 1 and max(found["errors"]) < 1e-5, (how, found)


@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn"])
def test_a_lora_that_core_streams_in_part_is_no_damage(inside: Inside, dtype: str) -> None:
    """Core rounds a weight that it patches at each use otherwise than one that it has patched."""
    found = inside.play("doctor_faults", "streamed_with_a_lora", name="Wan 2.1", dtype=dtype)
    assert max(found["shares"]) == 1 and min(found["shares"]) < 0.7, found["shares"]
    assert not found["said"] and not found["errors"], found


@pytest.mark.parametrize(
    ("name", "key"), [("Wan 2.1", "blocks.0.modulation"), ("LTXV", "transformer_blocks.0.scale_shift_table")]
)
def test_a_patch_that_core_leaves_out_is_no_damage(inside: Inside, name: str, key: str) -> None:
    found = inside.play("doctor", "patched_beside_children", name=name, key=key)
    assert found["same"] == [True] * 4 and not found["said"]


def test_a_lora_that_widens_a_layer_is_sampled_as_core_does(inside: Inside) -> None:
    """As FLUX.1's for control pictures do: core pads the weight."""
    found = inside.play("doctor", "widened_by_a_lora")
    assert found["same"] and not found["said"], found


def test_weights_that_change_between_two_steps_are_said_at_the_end(inside: Inside) -> None:
    found = inside.play("doctor_faults", "between_steps", name="Wan 2.1")
    sound, said, after = found["ends"]
    assert sound == after == "no fault in 3 steps"
    assert "weight on the card is not what was loaded; loaded again; run again, earlier steps may be wrong" in said
    assert found["errors"][0] > 0.05 and found["errors"][1] < 1e-5


def test_weights_that_change_on_the_device_are_named_where_their_file_is_gone(inside: Inside) -> None:
    for how, found in inside.play("doctor_faults", "on_the_device", name="Wan 2.1", lora=False, gone=True).items():
        assert found["named"] and "its file cannot be read from here: load the model again" in found["said"][0], how


@pytest.mark.parametrize("name", ["Wan 2.1", "LTXV"])
def test_a_text_that_holds_nan_is_told_from_a_fault_of_the_model(inside: Inside, name: str) -> None:
    said = inside.play("doctor", "with_bad_text", name=name)
    assert "NaN in what the network is given (the text): the fault lies before it" in said
    assert "Look at the node before" in said


@pytest.mark.parametrize("name", ["SD", "Wan 2.1"])
def test_a_repair_of_a_whole_vae_of_core_is_its_fp32(inside: Inside, name: str) -> None:
    found = inside.play("doctor", "vae_in_fp32", name=name)
    assert found["repaired"] <= 1e-3 and found["alone"] > 2 * found["repaired"], found


def test_repairs_of_one_vae_are_not_those_of_another_of_its_size(inside: Inside) -> None:
    """As Wan 2.1's and Qwen-Image's; core keeps no name of a VAE's file."""
    first, again, another, unread = inside.play("doctor", "names_of_vaes", name="Wan 2.1")
    assert first == again != another
    assert unread.endswith(" bytes, []")


@full
@pytest.mark.parametrize("name", ["SD", "Wan 2.1"])
def test_nan_and_one_colour_in_a_vae_of_core_are_named(inside: Inside, name: str) -> None:
    found = inside.play("doctor", "nan_in_a_vae", name=name)
    assert found["same"] and not found["wrong"] and found["right"] > 40 and len(found["unused"]) <= 4
    assert "; decode: one colour first from vae.decoder." in found["colour"]


def test_doctor_and_fit_model_go_together_in_both_orders(inside: Inside) -> None:
    for order, result in inside.play("doctor", "beside_fit", name="Wan 2.1").items():
        assert result["error"] < 2e-3, order
        assert "diffusion_model.blocks.0.ffn.2 (Linear, fp16)" in result["said"], order


def test_a_lora_in_bypass_mode_is_no_fault(inside: Inside) -> None:
    assert inside.play("doctor", "bypassed", name="Wan 2.1") == {"error": 0.0, "said": []}
    assert inside.play("doctor", "of_nothing") == 0


@full
def test_a_compiled_model_is_searched_too(inside: Inside) -> None:
    found = inside.play("doctor", "compiled", name="Wan 2.1")
    assert found["error"] < 1e-6 and "diffusion_model.blocks.0.ffn.2 (" in found["said"]


def test_our_model_is_watched_in_core_s_sampler(inside: Inside) -> None:
    found = inside.play("doctor", "beside_ours", name="ltx")
    assert found["same"] and not found["said"]
    layer, _, own = found["place"].rpartition(".")
    assert f"diffusion_model.{layer} (" in found["error"] and f"% of its {own} is NaN" in found["error"]


LOUD = "transformer_blocks.0.ff.net.2.weight"
MODEL = "LTX-Video-loud"


@pytest.fixture
def loud(server: Server, tmp_path: Path) -> str:
    """A model whose residual leaves the range of fp16 in its first block."""
    folder = tmp_path / MODEL
    shutil.copytree(tiny.build("ltx", server.tiny_folder), folder)
    file = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    weights = load_file(file)
    weights[LOUD] = weights[LOUD] * 5e5 / np.abs(weights[LOUD]).max() / 10
    save_file(weights, file, {"format": "pt"})
    link = server.base / "models" / "diffusers" / MODEL
    link.unlink(missing_ok=True)
    link.symlink_to(folder, target_is_directory=True)
    return MODEL


def watched(model: str, precision: str, repair: str, core: bool) -> tuple[Graph, str]:
    """A short video by our sampler or by core's, behind the doctor; and the doctor's id."""
    graph = Graph()
    load = graph.add("AnyGPULoadPipeline", **loading(model, precision=precision))
    links = {"pipeline": graph.link(load), "model": graph.link(load, 1), "vae": graph.link(load, 2)}
    doctor = graph.add("AnyGPUDoctor", **links, repair=repair)
    prompt = graph.add("AnyGPUEncodePrompt", pipeline=graph.link(load), text="a red fox", negative="")
    if core:
        empty = graph.add("EmptyLTXVLatentVideo", width=64, height=64, length=9, batch_size=1)
        chosen = {"seed": 1, "steps": 2, "cfg": 2.0, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0}
        links = {
            "positive": graph.link(prompt, 1),
            "negative": graph.link(prompt, 2),
            "latent_image": graph.link(empty),
        }
        sampled = graph.add("KSampler", model=graph.link(doctor, 1), **links, **chosen)
        frames = graph.add("VAEDecode", samples=graph.link(sampled), vae=graph.link(doctor, 2))
    else:
        links = {"pipeline": graph.link(doctor), "prompt": graph.link(prompt)}
        sampled = graph.add("AnyGPUSample", **links, **sampling())
        frames = graph.add("AnyGPUDecode", pipeline=graph.link(doctor), latent=graph.link(sampled), fps=8.0)
    graph.add("SaveImage", images=graph.link(frames), filename_prefix="watched")
    return graph, doctor


@pytest.mark.parametrize("core", [pytest.param(False, marks=full, id="our sampler"), pytest.param(True, id="core's")])
def test_a_video_that_would_be_black_is_explained_repaired_and_stays_repaired(
    server: Server, client: Client, loud: str, core: bool
) -> None:
    network = "diffusion_model" if core else "transformer"
    run = client.run(watched(loud, "fp16", "forget", core)[0].prompt)
    assert f"first from block 1 of 2, MLP, {network}.transformer_blocks.0.ff.net.2 (" in run.message
    offered = client.run(watched(loud, "fp16", "offer", core)[0].prompt)
    assert "in safe fp16" in offered.message and "Set repair to keep" in offered.message
    for _ in range(2):
        client.free()
        graph, doctor = watched(loud, "fp16", "keep", core)
        kept = client.finished(graph.prompt)
        assert "saved repair: " in kept.texts_of(doctor)[0] and "no fault in 2 steps" in kept.texts_of(doctor)[-1]
        assert len(kept.files()) == 9
    client.run(watched(loud, "fp16", "forget", core)[0].prompt)
    again = client.run(watched(loud, "fp16", "offer", core)[0].prompt)
    assert again.ending == "execution_error", "what was kept was not forgotten"


def test_a_healthy_model_is_one_line(server: Server, client: Client) -> None:
    graph, doctor = watched(server.model("LTX-Video"), "auto", "offer", core=True)
    run = client.finished(graph.prompt)
    assert run.texts_of(doctor) == ["watching", "no fault in 2 steps"]


def test_the_doctor_wants_something_to_watch(server: Server, client: Client) -> None:
    graph = Graph()
    doctor = graph.add("AnyGPUDoctor", repair="offer")
    sampled = graph.add("AnyGPUDecode", pipeline=graph.link(doctor), latent=graph.link(doctor), fps=8.0)
    graph.prompt[sampled]["inputs"]["latent"] = graph.link(
        graph.add("EmptyLTXVLatentVideo", width=64, height=64, length=9, batch_size=1)
    )
    graph.add("SaveImage", images=graph.link(sampled), filename_prefix="never")
    assert client.run(graph.prompt).message.startswith("nothing connected to AnyGPU Doctor")
