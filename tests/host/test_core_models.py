"""Core's samplers, guidance and VAE nodes drive our models: in ComfyUI's own process, and through its server."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from anygpu.pipelines.demo import demo_models

from host import videos
from host.client import Client
from host.inside.asking import Inside
from host.prompts import CORE_SAMPLED, PREFIX, Graph, core_sampled, loading, pictured, replay, shrunk_core
from host.server import Server

pytestmark = pytest.mark.host

ROUNDING = 1e-5  # of the largest latent: two samplers add the same numbers in another order, in fp32


@pytest.mark.parametrize(
    "name",
    [
        "ltx",
        "hunyuan_video",
        pytest.param("hunyuan_video skyreels", marks=pytest.mark.full),
        "hunyuan_video_15",
        "hunyuan_video_15 image",
        "framepack",
        "mochi",
    ],
)
def test_core_euler_gives_what_ours_gives(inside: Inside, name: str) -> None:
    found = inside.play("core", "sampled_alike", name=name)
    assert found["different"] <= ROUNDING * found["scale"]
    others = ("AnyGPU_vae", "AnyGPU_text_encoder", "AnyGPU_text_encoder_2", "AnyGPU_image_encoder")
    transformers = [kind for kind in found["loaded"] if kind not in others]
    assert len(transformers) == 1, "the transformer has two patchers"
    assert found["kept"], "Recover Latents has not what core sampled"
    assert found["listed"][:2] == [name.split()[0], 3] and min(found["listed"][2:]) > 0
    assert found["thumbnail"]
    assert found["device"] < 2 * found["size"] + found["others"]


full = pytest.mark.full


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("hunyuan_video", "auto"),
        ("ltx", "fp8"),
        *(pytest.param(name, "int8", marks=full) for name in ("hunyuan_video_15", "framepack", "mochi")),
    ],
)
def test_the_model_beside_a_lora_carries_it(inside: Inside, tmp_path: Path, name: str, weights: str) -> None:
    found = inside.play("core", "adapted_alike", name=name, weights=weights, folder=str(tmp_path))
    assert not found["read"], "weights were read before they were needed"
    assert found["acts"] > 0.01 * found["scale"], "the LoRA does too little to be seen"
    assert found["ours"] <= ROUNDING * found["scale"] and found["streamed"]
    assert found["named"] and found["beside"], "layers of our own LoRA hide the weights from core's patches"
    assert found["undone"]


@pytest.mark.parametrize("weights", [pytest.param("auto", marks=full), "int8"])
def test_a_lora_in_hooks_of_core_acts_on_packed_weights_too(inside: Inside, weights: str) -> None:
    found = inside.play("core", "hooked", name="ltx", weights=weights)
    assert found["equal"] == {"NORMAL_VRAM": True, "NO_VRAM": True}
    assert found["acts"] > 0.1 and found["half"] > 0.1, "the LoRA does too little to be seen"
    assert found["undone"]


def test_packed_models_are_merged_by_their_values(inside: Inside, tmp_path: Path) -> None:
    found = inside.play("core", "merged", name="ltx", weights="int8", folder=str(tmp_path))
    assert found["acts"] > 0.1 and found["streamed"], "the packed bytes were merged too"
    assert found["beside"] <= ROUNDING * 10, "a LoRA of ours hides the weights"


@pytest.mark.parametrize("name", ["ltx", "hunyuan_video_15", "framepack", "mochi"])
def test_core_vae_nodes_give_what_ours_give(inside: Inside, name: str) -> None:
    found = inside.play("core", "decoded_alike", name=name)
    assert found["equal"] and found["tiled"] and found["encoded"]
    assert found["latents"] == found["samples"]
    assert "AnyGPU_vae" in found["listed"]


@pytest.mark.parametrize("name", ["hunyuan_video skyreels", "hunyuan_video_15 image", "framepack"])
def test_a_picture_of_another_size_is_fitted_to_the_latents(inside: Inside, name: str) -> None:
    assert inside.play("core", "resized", name=name)[-2:] == [6, 8]


def test_a_prompt_of_hunyuan_video_15_stands_in_the_chat_that_core_writes(inside: Inside) -> None:
    """The tokenizer's own template, which is a program, is not run."""
    own, core = inside.play("core", "chats")
    assert own == core and own.count("{}") == 1


def test_pictures_of_core_stand_beside_latents_as_in_its_own_class(inside: Inside) -> None:
    assert inside.play("core", "concat_alike") == [True, True]


@pytest.mark.parametrize("name", ["ltx", "hunyuan_video", "hunyuan_video_15", "framepack", "mochi"])
def test_guidance_windows_masks_and_previews_act(inside: Inside, name: str) -> None:
    found = inside.play("core", "guided", name=name)
    assert found["skips"] > 0.01, "Skip Layer Guidance did nothing"
    assert found["nothing"] < 1e-3 < found["skips"], "a layer that is not there changed the video"
    assert found["windows"] > 0.01 and found["finite"]
    assert found["others"] > 0.01
    assert found["previews"] == 3 and min(found["picture"]) > 0
    assert found["kept"] < 1e-4 < found["redrawn"], "the masked frame was sampled"
    assert len(found["schedules"]) >= 9 and found["schedules"]["simple"][0] == 1.0
    for kind, levels in found["schedules"].items():
        assert 0.0 < levels[0] <= 1.0 and levels[-1] == 0.0 and levels == sorted(levels, reverse=True), (kind, levels)
    models = [kind for kind in found["listed"] if not kind.startswith("AnyGPU_")]
    assert len(models) == 1, "clones of a MODEL were loaded beside each other"


FRAMES = {"anygpu_mochi_core_ksampler": 7}  # the next of its counts


@pytest.mark.parametrize("workflow", core_sampled(), ids=lambda path: path.stem)
def test_workflow_through_core_sampler_saves_a_video(server: Server, client: Client, workflow: Path) -> None:
    server.every_model()
    run = client.finished(shrunk_core(replay(workflow)))
    (record,) = run.files()
    found = videos.facts(server.output(record))
    assert (found.width, found.height, found.frames) == (64, 64, FRAMES.get(workflow.stem, 9))
    assert np.ptp(videos.frames(server.output(record)).astype(np.int16)) > 0
    assert record["filename"].startswith(workflow.stem)


def test_every_family_has_a_workflow_through_core_sampler() -> None:
    names = {workflow.stem.removeprefix(PREFIX).removesuffix(CORE_SAMPLED) for workflow in core_sampled()}
    assert names == {"ltx", "hunyuan_video", "hunyuan_video_15", "framepack", "mochi"}


def test_model_of_another_offload_stops_core_nodes_with_the_reason(server: Server, client: Client) -> None:
    graph = Graph()
    pipeline = graph.add("AnyGPULoadPipeline", **loading(server.model("LTX-Video"), offload="none"))
    prompt = graph.add("AnyGPUEncodePrompt", pipeline=graph.link(pipeline), text="a red fox", negative="")
    empty = graph.add("EmptyLTXVLatentVideo", width=64, height=64, length=9, batch_size=1)
    chosen = {"seed": 1, "steps": 1, "cfg": 1.0, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0}
    links = {"model": graph.link(pipeline, 1), "positive": graph.link(prompt, 1), "negative": graph.link(prompt, 2)}
    sampled = graph.add("KSampler", **chosen, **links, latent_image=graph.link(empty))
    graph.add("SaveLatent", samples=graph.link(sampled), filename_prefix="never")
    run = client.run(graph.prompt)
    assert "MODEL and VAE need offload auto or comfyui" in run.message


def test_free_memory_and_unload_models_then_the_same_again(server: Server, client: Client) -> None:
    workflow = next(path for path in core_sampled() if path.stem.startswith(f"{PREFIX}ltx"))
    prompt = pictured(shrunk_core(replay(workflow)))
    server.every_model()
    first = client.run(prompt)
    client.free()
    assert np.array_equal(videos.pictures(server, client.run(prompt)), videos.pictures(server, first))


NEEDS_FILES = {"HypernetworkLoader", "LoraLoaderModelOnly", "LoraLoaderBypassModelOnly"}
RAISES = {  # nodes that ask a MODEL for what core's own of these families does not have either
    "FreeU": "model_channels",
    "FreeU_V2": "model_channels",
    "HiDreamO1PatchSeamSmoothing": "",  # takes pictures, not videos
    "ModelNoiseScale": "multiplier",
}
SILENT = {  # nothing is left on the MODEL that could be named
    "wanBlockSwap": "does nothing, as core says",
    "UNetSelfAttentionMultiply": "changes weights by names that the family may not have",
    "UNetCrossAttentionMultiply": "as above",
    "UNetTemporalAttentionMultiply": "as above",
    "HiDreamO1PatchSeamSmoothing": "acts on latents of its own model's size",
    "MultiGPU_WorkUnits": "one device here",
    "SelectModelDevice": "one device here",
}
SLOW = {"TorchCompileModel", "ModelSamplingStableCascade"}
MERGES = {"ModelMergeAdd", "ModelMergeBlocks", "ModelMergeLTXV", "ModelMergeSimple", "ModelMergeSubtract"}  # of many


@pytest.mark.parametrize(
    "name",
    ["ltx", *(pytest.param(name, marks=full) for name in ("hunyuan_video", "hunyuan_video_15", "framepack", "mochi"))],
)
def test_each_node_of_core_acts_on_our_model_or_says_that_it_does_not(inside: Inside, name: str) -> None:
    found = inside.play("extras", "survey", name=name, left_out=sorted(NEEDS_FILES | SLOW), merges=sorted(MERGES))
    assert found.pop("unchanged")["change"] == 0.0
    assert len(found) > 45
    for node, result in found.items():
        if "error" in result:
            assert RAISES[node] in result["error"], (node, result)
        else:
            acts = result["change"] > 1e-3 or result["attention"] or result["said"] or node in SILENT
            assert acts, f"{node} has no effect on {name}, and nobody is told"
    later = {"LTXVSpatioTemporalGuidance"} & found.keys()  # since 0.32, as ModelAttentionBackend
    for node in ("EasyCache", *later, "RenormCFG", "ModelMergeSimple", "SkipLayerGuidanceDiT"):
        assert found[node]["change"] > 1e-3, node
    assert not later or found["ModelAttentionBackend"]["attention"] > 0
    assert found["ScaleROPE"]["said"] and found["ModelComputeDtype"]["said"]


def test_a_step_of_ours_that_core_s_cache_skips_leaves_the_latent_alone(inside: Inside) -> None:
    assert inside.play("extras", "skipped", name="ltx") == {"equal": True, "skips": True}


RANGE = {"sigma_max": 14.6, "sigma_min": 0.03}


@pytest.mark.parametrize(
    ("module", "kind", "inputs", "known"),
    [
        ("nodes_custom_sampler", "KarrasScheduler", {"steps": 7, **RANGE, "rho": 7.0}, True),
        ("nodes_custom_sampler", "ExponentialScheduler", {"steps": 7, **RANGE}, True),
        ("nodes_custom_sampler", "PolyexponentialScheduler", {"steps": 7, **RANGE, "rho": 1.0}, True),
        ("nodes_custom_sampler", "ManualSigmas", {"sigmas": "1.0, .75 0.5,0"}, True),
        ("nodes_align_your_steps", "AlignYourStepsScheduler", {"model_type": "SDXL", "steps": 7, "denoise": 1.0}, True),
        ("nodes_align_your_steps", "AlignYourStepsScheduler", {"model_type": "SD1", "steps": 8, "denoise": 0.5}, False),
        ("nodes_optimalsteps", "OptimalStepsScheduler", {"model_type": "Wan", "steps": 7, "denoise": 1.0}, True),
    ],
)  # fmt: skip
def test_noise_levels_are_counted_as_core_s_nodes_make_them_or_not_at_all(
    inside: Inside, module: str, kind: str, inputs: dict[str, Any], known: bool
) -> None:
    made, counted = inside.play("extras", "counted_levels", module=module, kind=kind, inputs=inputs)
    assert counted == (made if known else 0)


def test_a_node_without_effect_is_named_under_the_sampler(server: Server, client: Client) -> None:
    """So is what a demo model does otherwise; the end of core's node is not reported: it is never listed as running."""
    graph = Graph()
    load = graph.add("AnyGPULoadPipeline", **loading(next(iter(demo_models()))))
    prompt = graph.add("AnyGPUEncodePrompt", pipeline=graph.link(load), text="a red fox", negative="")
    scaled = graph.add("ScaleROPE", model=graph.link(load, 1), **dict.fromkeys(("scale_x", "scale_y", "scale_t"), 2.0),
                       **dict.fromkeys(("shift_x", "shift_y", "shift_t"), 0.0))  # fmt: skip
    empty = graph.add("EmptyLTXVLatentVideo", width=64, height=64, length=9, batch_size=1)
    chosen = {"seed": 1, "steps": 1, "cfg": 1.0, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0}
    links = {"positive": graph.link(prompt, 1), "negative": graph.link(prompt, 2), "latent_image": graph.link(empty)}
    sampled = graph.add("KSampler", model=graph.link(scaled), **links, **chosen)
    graph.add("SaveLatent", samples=graph.link(sampled), filename_prefix="scaled")
    run = client.finished(graph.prompt)
    own, option = run.texts_of(sampled)[-1].splitlines()
    assert own.startswith("the demo model draws at its own cfg: 1 →")
    assert option == "no effect on LTX-Video: the option rope_options, which its transformer does not read"
    entry = client.get("/anygpu/run")["nodes"][sampled]
    assert entry["done"] and [line.replace("->", "→") for line in entry["said"]] == [own, option]


@pytest.mark.parametrize("name", ["ltx", "hunyuan_video image", "framepack"])
def test_a_picture_without_effect_on_our_model_is_named(inside: Inside, name: str) -> None:
    (said,) = set(inside.play("extras", "unread_pictures", name=name))
    assert ("the end image" if name == "framepack" else "AnyGPU Image Conditioning") in said


def test_the_scale_that_a_node_gives_attention_counts(inside: Inside) -> None:
    assert inside.play("extras", "scaled") < 1e-6


def test_guides_of_core_and_pictures_of_another_family_are_refused(inside: Inside) -> None:
    assert "an image condition made for 'ltx'" in inside.play("extras", "picture_of_another")
    assert "guides of LTXVAddGuide" in inside.play("extras", "guided_by_core")


@pytest.mark.parametrize("name", ["ltx", *(pytest.param(name, marks=full) for name in ("hunyuan_video", "mochi"))])
def test_core_puts_our_model_and_vae_on_other_devices(inside: Inside, name: str) -> None:
    found = inside.play("extras", "on_two_devices", name=name)
    assert found["split"]["change"] <= ROUNDING and min(found["split"]["sent"]) > 0, "one device did everything"
    assert found["second"]["change"] == 0.0 and found["second"]["sent"][0] == 0
    assert found["vae"]["equal"]
    first, second, back = found["vae"]["devices"]
    assert first == back != second


def test_core_latent_upscaler_finds_the_statistics_of_the_vae(inside: Inside) -> None:
    found = inside.play("extras", "upscaled")
    assert found["shape"] == [1, 128, 2, 4, 4] and found["finite"]
    assert found["moved"] > 0.1 and found["back"] < 1e-5
