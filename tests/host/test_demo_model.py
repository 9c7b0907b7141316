"""Without any model installed, the first choice of the load node draws what it is asked, at once."""

import numpy as np
import pytest
import torch
from anygpu.pipelines.demo import demo_models
from anygpu.pipelines.demo.scenes import scene_of
from anygpu.pipelines.files.models import family_of_folder

from host.client import Client
from host.prompts import DEMO_RATE, PREFIX, WORKFLOWS, Graph, loading, pictured, replay, text_to_video
from host.server import Server
from host.videos import pictures

pytestmark = pytest.mark.host
PUBLISHED = {
    "anygpu_ltx_text_to_video": "LTX-Video",
    "anygpu_ltx_core_ksampler": "LTX-Video",
    "anygpu_hunyuan_video_text_to_video": "HunyuanVideo",
    "anygpu_hunyuan_video_15_text_to_video": "HunyuanVideo-1.5-Diffusers-480p_t2v",
    "anygpu_hunyuan_video_15_core_ksampler": "HunyuanVideo-1.5-Diffusers-480p_t2v",
    "anygpu_framepack_image_to_video": "FramePackI2V_HY",
    "anygpu_mochi_text_to_video": "mochi-1-preview",
    "anygpu_mochi_core_ksampler": "mochi-1-preview",
}


def test_a_demo_model_draws_what_is_asked_with_nothing_chosen(server: Server, client: Client) -> None:
    own = dict.fromkeys(("width", "height", "frames", "steps", "fps"), 0)
    for choice, folder in demo_models().items():
        family = family_of_folder(folder)
        if family.recipes.sections:
            continue  # it starts from a picture, in nodes of its own
        prompt = "a white square stays still on blue"
        graph = text_to_video(choice, prompt, **own)
        frames = torch.from_numpy(pictures(server, client.run(pictured(graph.prompt)))) / 255
        count = {"mochi": 7}.get(family.id, 9)
        assert frames.shape == (count, 64, 64, 3)
        assert scene_of(frames).caption == prompt


def test_the_shipped_workflows_draw_with_one_while_no_model_is_installed(server: Server, client: Client) -> None:
    with server.without_models():
        runs = {file: client.run(pictured(replay(WORKFLOWS / f"{file}.json"))) for file in PUBLISHED}
    said = [text for run in runs.values() for _, text in run.texts]  # a load that is cached says nothing again
    for file, run in runs.items():
        assert run.ending == "execution_success", run.message
        seen = scene_of(torch.from_numpy(pictures(server, run)) / 255)
        assert seen.caption == "a red circle moves left on blue", file
        assert any(f"in place of {PUBLISHED[file]!r}" in text for text in said), said


CHOICES = {folder.name: choice for choice, folder in demo_models().items()}
USUAL = ("anygpu_ltx_text_to_video", "anygpu_framepack_image_to_video")
REST = sorted(set(PUBLISHED) - set(USUAL))


@pytest.mark.parametrize("file", [*USUAL, *(pytest.param(file, marks=pytest.mark.full) for file in REST)])
def test_a_demo_model_draws_the_same_by_its_own_name_as_in_another_s_place(
    server: Server, client: Client, file: str
) -> None:
    """The shipped workflow with only its model changed: the same clip, and the same lines but for the load node's."""
    placed, chosen = pictured(replay(WORKFLOWS / f"{file}.json")), pictured(replay(WORKFLOWS / f"{file}.json"))
    (loader,) = (node for node, entry in chosen.items() if entry["class_type"] == "AnyGPULoadPipeline")
    chosen[loader]["inputs"]["model"] = CHOICES[max(filter(file.removeprefix(PREFIX).startswith, CHOICES), key=len)]
    runs = [client.run(chosen)]
    with server.without_models():
        runs.append(client.run(placed))
    assert [run.ending for run in runs] == ["execution_success"] * 2, [run.message for run in runs]
    by_name, in_place = (pictures(server, run).astype(float) for run in runs)
    assert by_name.shape == in_place.shape == (len(by_name), 64, 64, 3)
    assert np.abs(by_name - in_place).max() <= 1, (
        "the same clip, but for how a convolution rounds that was timed between"
    )
    said = [[line for _, text in run.texts for line in text.split("  \n") if "demo model" in line] for run in runs]
    other = [{line for line in lines if " fp32, offload " not in line} for lines in said]
    assert other[0] == other[1] and any("draws at its own size" in line for line in other[0])
    assert any("does not know " in line for line in other[0]) or "_core_" in file


def test_windows_of_core_s_draw_a_clip_longer_than_the_model_was_trained_for(server: Server, client: Client) -> None:
    text, graph = "a white square stays still on blue", Graph()
    pipeline = graph.add("AnyGPULoadPipeline", **loading(next(iter(demo_models()))))
    prompt = graph.add("AnyGPUEncodePrompt", pipeline=graph.link(pipeline), text=text, negative="")
    cut = {"context_length": 2, "context_overlap": 1, "context_stride": 1, "context_schedule": "standard_static"}
    more = {"closed_loop": False, "fuse_method": "pyramid", "dim": 2, "freenoise": False, "causal_window_fix": False}
    whole = {"cond_retain_index_list": "", "latent_retain_index_list": "", "split_conds_to_windows": False}
    windows = graph.add("ContextWindowsManual", model=graph.link(pipeline, 1), **cut, **more, **whole)
    empty = graph.add("EmptyLTXVLatentVideo", width=64, height=64, length=17, batch_size=1)
    chosen = {"seed": 1, "steps": 20, "cfg": 3.0, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0}
    texts = {"positive": graph.link(prompt, 1), "negative": graph.link(prompt, 2)}
    paced = graph.add("LTXVConditioning", **texts, frame_rate=DEMO_RATE)
    links = {"positive": graph.link(paced), "negative": graph.link(paced, 1), "latent_image": graph.link(empty)}
    sampled = graph.add("KSampler", model=graph.link(windows), **chosen, **links)
    graph.add("VAEDecode", samples=graph.link(sampled), vae=graph.link(pipeline, 2))
    frames = torch.from_numpy(pictures(server, client.run(pictured(graph.prompt)))) / 255
    assert frames.shape == (17, 64, 64, 3) and scene_of(frames).caption == text


def test_a_batch_is_the_videos_of_its_seeds_and_core_picks_one(server: Server, client: Client) -> None:
    own = dict.fromkeys(("width", "height", "frames", "steps", "fps"), 0)

    def graph(**settings: int) -> Graph:
        return text_to_video(next(iter(demo_models())), "a green square grows on white", **own, **settings)

    alone = [pictures(server, client.run(pictured(graph(seed=seed).prompt))) for seed in (7, 8)]
    both = graph(seed=7, batch_size=2)
    run = client.run(pictured(both.prompt))
    assert np.array_equal(pictures(server, run), np.concatenate(alone))
    assert len([record for record in run.files() if record["filename"].endswith(".mp4")]) == 2
    picked = both.add("LatentFromBatch", samples=both.link("3"), batch_index=1, length=1)
    both.prompt["4"]["inputs"]["latent"] = both.link(picked)
    assert np.array_equal(pictures(server, client.run(pictured(both.prompt))), alone[1])
