"""What the tab is told of a pipeline and of a machine: decisions with reasons, limits, lights, first steps."""

import dataclasses
import re
from pathlib import Path

import pytest
import tiny
import torch
from anygpu.compat.decision import Decision
from anygpu.compat.device.facts import DeviceFacts, facts_for
from anygpu.compat.device.probe_store import OK, UNKNOWN, UNUSABLE, WRONG, ProbeResult
from anygpu.compat.errors import InputError
from anygpu.compat.memory.parts import Silent
from anygpu.compat.records import parse
from anygpu.compat.report import AMBER, GREEN, GREY, RED, probe_statuses
from anygpu.compat.transforms.attention import CHOICES as ATTENTIONS
from anygpu.pipelines.decisions import card_of, in_short, limit_tooltip, limits
from anygpu.pipelines.family import GuidanceStep, Recipe
from anygpu.pipelines.files.catalogue import (
    every_offer,
    first_steps,
    offer_of,
    offers,
    remedy,
    smallest_for,
    stored_for,
    variants_of,
)
from anygpu.pipelines.files.download import fetched
from anygpu.pipelines.load.folder import load
from anygpu.pipelines.registry import FAMILIES
from anygpu.pipelines.requests import LoadRequest

CPU = facts_for("cpu")
TURING = DeviceFacts(
    torch.device("cpu"), "cuda", "sm75", "cuda-old", "RTX 2080", 8 * 2**30, "2.13", emulated=("bf16",),
    versions={"torch": "2.13.0", "cuda": "13.0", "system": "Linux"},
)  # fmt: skip


@pytest.mark.parametrize("name", ["ltx", "mochi", "framepack"])
def test_every_decision_of_a_pipeline_has_a_subject_and_a_reason(name, tiny_folder):
    for provider in ("hunyuan_video", "siglip") if name == "framepack" else ():
        tiny.build(provider, tiny_folder)
    pipeline = load(LoadRequest(tiny.build(name, tiny_folder), device="cpu", search=(tiny_folder,)))
    card = card_of(pipeline)
    subjects = [decision["subject"] for decision in card["decisions"]]
    assert card["title"] == FAMILIES[pipeline.family].title and card["family"] == pipeline.family
    assert {"precision", "offload", "attention", "Conv3d"} <= set(subjects)
    assert subjects[0] == "precision"
    assert all(decision["verdict"] and decision["why"] for decision in card["decisions"]), card["decisions"]
    assert in_short(pipeline) == "fp32, offload none"
    does = {"ltx": "dev, text to video", "mochi": "text to video", "framepack": "image to video"}
    assert card["does"] == does[name]


def test_guidance_in_words():
    words = ["cfg 3", "cfg 3, STG 1 without attention in block 19, rescale 0.7"]
    assert [str(GuidanceStep(cfg=3.0, rescale=0.7, **more)) for more in ({}, {"stg": 1.0, "blocks": (19,)})] == words


def test_a_card_shows_each_decision_as_it_is_whatever_its_words_are(tiny_folder, monkeypatch):
    pipeline = load(LoadRequest(tiny.build("ltx", tiny_folder), device="cpu"))
    decisions = (
        Decision("precision", "bf16: a verdict with a colon", "because"),
        Decision("offload", "group on cuda", "too large; really", "auto"),
        Decision("weights", "kernels: off", "", "chosen"),
    )
    told = dataclasses.replace(pipeline, plan=dataclasses.replace(pipeline.plan, decisions=decisions))
    assert [tuple(each.values()) for each in card_of(told)["decisions"]][:3] == [
        ("precision", "bf16: a verdict with a colon", "because"),
        ("offload", "group on cuda", "auto: too large; really"),
        ("weights", "kernels: off", "chosen"),
    ]
    monkeypatch.setattr(type(pipeline.offloader), "device_of", lambda *_: torch.device("meta"))
    assert len(card_of(told)["decisions"]) == 3, "the convolutions of a device of the VAE's own are not the pipeline's"
    assert str(decisions[1]) == "offload group on cuda: auto: too large; really"
    assert (
        str(Decision("care", "slow", "it is off", "pytorch#1, 2026-09")) == "care slow: it is off; pytorch#1, 2026-09"
    )


def test_what_a_machine_cannot_do_is_named_with_the_reason():
    here = limits(CPU)
    assert set(here["offload"]) == {"model", "group", "sequential"} and set(here["precision"]) == {"fp16-safe"}
    assert "sage" in here["attention"] and "auto" not in here["attention"] and set(here["attention"]) <= set(ATTENTIONS)
    assert limit_tooltip(CPU, "offload").endswith("Not on this machine (CPU): model, group, sequential (on a CPU).")
    assert limit_tooltip(CPU, "steps") == ""
    there = limits(TURING)
    assert "offload" in there, "the stand-in computes on the host"
    assert "native_flash" in there["attention"] and "native_efficient" not in there["attention"]
    assert "fp16-safe" not in there.get("precision", {}), "Turing is what it is made for"


def test_lights_say_what_to_do_about_red():
    answers = {
        "matmul.fp32": ProbeResult(OK),
        "conv3d.bf16": ProbeResult(UNUSABLE, "no kernel"),
        "triton": ProbeResult(UNUSABLE, "absent"),
        "cast.bf16_to_fp32": ProbeResult(WRONG, "3 values"),
        "pad3d.fp32": ProbeResult(UNKNOWN, "not asked yet"),
    }
    shown = {status.name: status for status in probe_statuses(TURING, answers)}
    assert shown["matmul.fp32"].colour == GREEN and shown["triton"].colour == AMBER
    unlike = probe_statuses(TURING, {"sums.bf16": ProbeResult(WRONG), "float8": ProbeResult(UNUSABLE)})
    assert [status.verdict for status in unlike] == ["wrong, not used", "absent, not needed"]
    assert shown["pad3d.fp32"].colour == GREY
    assert shown["conv3d.bf16"].colour == RED and "no kernel" in shown["conv3d.bf16"].verdict
    assert "Update the driver" in shown["cast.bf16_to_fp32"].advice and shown["conv3d.bf16"].advice


def test_offers_are_of_families_and_pages_that_exist():
    revisions: dict[str, set[str]] = {}
    for family in FAMILIES.values():
        pages = set(family.published.pages) | set(FAMILIES["hunyuan_video"].published.pages)
        for offer in filter(None, (family.published.offer, *family.published.more_offers.values())):
            assert all(download.page in pages for download in offer.downloads), family
            for download in offer.downloads:
                revisions.setdefault(download.repository, set()).add(download.revision)
    assert all(len(each) == 1 for each in revisions.values()), "a repository that two families name is at one commit"
    first = ["LTX-Video", "Mochi 1", "HunyuanVideo 1.5", "HunyuanVideo", "FramePack"]
    assert list(offers()) == first and list(every_offer())[: len(first)] == first, "choices grow at the end"


@pytest.mark.parametrize(
    ("size", "said"),
    [([960, 544], "r.size [960, 544]; expected a list of 3"), ([960, 544.5, 24], "r.size[1] 544.5; expected a whole")],
)
def test_a_list_of_several_kinds_is_checked_place_by_place(size: list[float], said: str) -> None:
    record = {"name": "a", "source": "b", "steps": 1, "size": [960, 544, 24]}
    assert parse(Recipe, record, "r").size == (960, 544, 24.0)
    with pytest.raises(InputError, match=re.escape(said)):
        parse(Recipe, {**record, "size": size}, "r")


@pytest.mark.parametrize(("gigabytes", "family"), [(1, "LTX-Video"), (10, "LTX-Video"), (64, "LTX-Video")])
def test_the_smallest_is_offered_and_said_when_it_does_not_fit(gigabytes, family):
    assert smallest_for(gigabytes * 2**30)[0] == family
    text = first_steps([Path("/models/a"), Path("/models/b")], "CPU", gigabytes * 2**30)
    assert ("None fits" in text) is (gigabytes < 9)
    assert "/models/b" in text and "into /models/a/LTX-Video" in text and "https://huggingface.co/Lightricks" in text
    assert "AnyGPU Download Model can fetch it" in text


def test_what_is_downloaded_is_told_as_it_is_stored_there():
    """Tencent's, Genmo's and Lightricks' folders hold parts in fp32: more bytes than their weights take in bf16."""
    told = {title: offer.size.split(",")[0] for title, offer in every_offer().items()}
    sizes = {"LTX-Video": 28, "Mochi 1": 40, "HunyuanVideo 1.5": 53, "HunyuanVideo": 42, "FramePack": 43}
    sizes |= {"HunyuanVideo 1.5 image to video": 54, "HunyuanVideo image to video": 44, "FramePack F1": 43}
    sizes |= {"LTX-Video 0.9.5": 25}
    assert told == {title: f"{size} GB to download" for title, size in sizes.items()}
    for offer in every_offer().values():
        assert sum(download.stored_bytes for download in offer.downloads) > 0.97 * offer.total_bytes


@pytest.mark.parametrize(
    ("title", "gigabytes", "words"),
    [
        ("LTX-Video", 8, "fits in one piece as bf16, about 3.6 GiB"),
        (
            "LTX-Video",
            4,
            "ltx-video-2b-v0.9-Q4_K_M.gguf of city96/LTX-Video-gguf (1.4 GB), with t5-v1_1-xxl-encoder-Q4",
        ),
        ("HunyuanVideo", 6, "is streamed in every form; the smallest useful one is hunyuan-video-t2v-720p-q3_k_m.gguf"),
        (
            "HunyuanVideo",
            12,
            "fits in one piece as hunyuan-video-t2v-720p-q5_k_m.gguf of calcuis/hunyuan-gguf (9.4 GB)",
        ),
        ("HunyuanVideo", 16, "fits in one piece as hunyuan-video-t2v-720p-q8_0.gguf of calcuis/hunyuan-gguf (14.0 GB)"),
        ("HunyuanVideo", 48, "fits in one piece as bf16"),
        (
            "Mochi 1",
            12,
            "mochi_preview_fp8_scaled.safetensors of Comfy-Org/mochi_preview_repackaged (10.0 GB), with t5",
        ),
        ("Mochi 1", 8, "mochi-q3_k_m.gguf of calcuis/mochi (4.9 GB), with t5"),
        ("HunyuanVideo 1.5", 12, "distilled_fp8_scaled.safetensors of Comfy-Org/HunyuanVideo_1.5_repackaged (8.3 GB)"),
        ("HunyuanVideo 1.5", 8, "480p_t2v_cfg_distilled-Q5_K_S.gguf of jayn7/HunyuanVideo-1.5_T2V_480p-GGUF (5.9 GB)"),
        ("HunyuanVideo 1.5 image to video", 7, "480p_i2v_cfg_distilled-Q4_K_S.gguf of jayn7/HunyuanVideo-1.5_I2V_480p"),
        ("HunyuanVideo image to video", 12, "hunyuan-video-i2v-720p-Q4_K_M.gguf of city96/HunyuanVideo-I2V-gguf (7.9"),
        (
            "FramePack",
            24,
            "in one piece as FramePackI2V_HY_fp8_e4m3fn.safetensors of Kijai/HunyuanVideo_comfy (16.3 GB)",
        ),
        ("FramePack F1", 12, "is streamed in every form; the smallest useful one is FramePack_F1_I2V_HY_20250503_fp8"),
        ("LTX-Video 0.9.5", 4, "ltx-video-2b-v0.9.5-Q4_K_M.gguf of city96/LTX-Video-0.9.5-gguf (1.3 GB), with t5"),
    ],
)
def test_a_card_is_told_in_which_form_a_transformer_stays_on_it(title, gigabytes, words):
    assert words in stored_for(every_offer()[title], gigabytes * 2**30)
    assert stored_for(every_offer()[title], 0) == ""
    assert words in "\n".join(fetched(title, "no", [Path("/nowhere")], Silent(), card_bytes=gigabytes * 2**30))
    even = dataclasses.replace(every_offer()[title], gib={"transformer": 100.0}, quantised={})
    for room, stored in ((100, "bf16"), (53, "fp8 or GGUF Q8_0"), (30, "GGUF Q4_K_M")):  # without a byte to spare
        text = stored_for(even, (room + 2) * 2**30)
        assert f"fits in one piece as {stored}, about {room}.0 GiB" in text


def test_image_to_video_folders_are_offered_and_what_is_not_is_named():
    assert offer_of("HunyuanVideo image to video").downloads[0].folder == "HunyuanVideo-I2V"
    assert "480p_i2v" in offer_of("HunyuanVideo 1.5 image to video").downloads[0].folder
    for title in ("HunyuanVideo", "HunyuanVideo image to video"):
        assert "HunyuanVideo-I2V-33ch" in variants_of(title) and "HunyuanVideo-I2V," not in variants_of(title)
    assert "720p_i2v" in variants_of("HunyuanVideo 1.5") and variants_of("Mochi 1") == ""


def test_a_larger_model_is_not_offered_before_a_smaller_one_that_fits():
    for offer in offers().values():
        assert smallest_for(offer.largest_bytes)[1].total_bytes <= offer.total_bytes


def test_a_model_that_is_not_there_is_named_with_its_own_page():
    root = Path("/models")
    assert "lllyasviel/FramePackI2V_HY" in remedy("FramePackI2V_HY", root, 0)
    assert remedy("mine", root, 0).startswith("None fits. The smallest for this machine: LTX-Video. Download https")
    known = remedy("HunyuanVideo", root, 0)
    assert known.startswith("Download https://huggingface.co/hunyuanvideo-community/HunyuanVideo (only model_index")
    assert f"into {root / 'HunyuanVideo'}, or let AnyGPU Download Model do it" in known
    pictured = remedy("publisher/HunyuanVideo-I2V", root, 0)
    assert "tokenizer_2, image_processor) into" in pictured and "AnyGPU Download Model" in pictured
    found = remedy("mine", root, 64 * 2**30)
    assert found.startswith("The smallest that fits this machine: LTX-Video. Download https")
    assert "AnyGPU Download Model" in found
