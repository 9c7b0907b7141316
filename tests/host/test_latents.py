"""Latents and prompts on disk in a real ComfyUI: saved, loaded, and recovered after the process was killed."""

import json
import os
import shutil
import signal
import urllib.request
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from anygpu.compat.checkpoints.latents import metadata_of
from PIL import Image
from safetensors.numpy import load_file, save_file

from host import lora_files, videos
from host.client import Client, Run
from host.prompts import SAVE, Graph, film, loading, pictured, sampling, text_to_video
from host.server import Server, find_host

pytestmark = pytest.mark.host

MODEL = "HunyuanVideo"
SAMPLE, DECODE = "3", "4"  # ids in text_to_video


def decoded_from(kind: str, **inputs: str) -> Graph:
    """A graph that decodes what the node ``kind`` loads."""
    graph = Graph()
    pipeline = graph.link(graph.add("AnyGPULoadPipeline", **loading(MODEL)))
    latent = graph.link(graph.add(kind, **inputs))
    decode = graph.add("AnyGPUDecode", pipeline=pipeline, latent=latent)
    graph.add(SAVE, video=graph.link(decode, 1), filename_prefix="again", format="auto", codec="auto")
    graph.prompt = pictured(graph.prompt)
    return graph


def test_saved_latents_and_prompts_give_the_same_video(server: Server, client: Client) -> None:
    graph = text_to_video(server.model(MODEL))
    latents = graph.add("AnyGPUSaveLatent", latent=graph.link(SAMPLE), filename_prefix="latents/test")
    prompts = graph.add("AnyGPUSavePrompt", prompt=graph.link("2"), filename_prefix="prompts/test")
    graph.prompt = pictured(graph.prompt)
    run = client.run(graph.prompt)
    expected = videos.pictures(server, run)
    assert run.texts_of(latents)[-1] == "output/latents/test_00001_.safetensors"
    metadata = metadata_of(server.base / "output" / "latents" / "test_00001_.safetensors")
    assert set(json.loads(metadata["prompt"])) == set(graph.prompt), "the graph that ran is in the file"
    assert run.texts_of(prompts)[-1] == "output/prompts/test_00001_.safetensors"
    listed = client.get("/object_info/AnyGPULoadLatent")["AnyGPULoadLatent"]["input"]["required"]["file"]
    assert "latents/test_00001_.safetensors [output]" in json.dumps(listed)

    again = decoded_from("AnyGPULoadLatent", file="latents/test_00001_.safetensors [output]")
    found = client.run(again.prompt)
    assert np.array_equal(videos.pictures(server, found), expected)
    assert "a cat walks on the grass" in found.texts_of("2")[-1]

    without = text_to_video(MODEL)
    without.prompt = pictured(without.prompt)
    without.prompt["2"] = {
        "class_type": "AnyGPULoadPrompt",
        "inputs": {"file": "prompts/test_00001_.safetensors [output]"},
    }
    assert np.array_equal(videos.pictures(server, client.run(without.prompt)), expected)


def test_no_saved_file_says_what_was_prompted_under_disable_metadata(server: Server, tmp_path: Path) -> None:
    """As core's own save node has it; also of latents that a ComfyUI without the flag had saved with a receipt."""
    words, signed = "an unheard of fox", text_to_video(server.model(MODEL), text="an unheard of fox")
    sampled = signed.link(SAMPLE)
    signed.add("AnyGPUSaveLatent", latent=sampled, filename_prefix="signed", not_finite="refuse")
    Client(server.url).finished(signed.prompt)
    (earlier,) = (server.base / "output").glob("signed_*.safetensors")
    assert words.encode() in earlier.read_bytes()
    quiet = Server(server.host, tmp_path, server.tiny_folder, arguments=("--disable-metadata",)).start()
    try:
        graph = text_to_video(quiet.model(MODEL), text=words)
        shutil.copy(earlier, quiet.base / "input" / "earlier.safetensors")
        again = graph.link(graph.add("AnyGPULoadLatent", file="earlier.safetensors"))
        for name, latent in (("new", graph.link(SAMPLE)), ("old", again)):
            graph.add("AnyGPUSaveLatent", latent=latent, filename_prefix=name, not_finite="refuse")
        graph.add("SaveLatent", samples=graph.link(SAMPLE), filename_prefix="cores")
        graph.add("AnyGPUSavePrompt", prompt=graph.link("2"), filename_prefix="words")
        Client(quiet.url).finished(graph.prompt)
        made = [path for path in (quiet.base / "output").rglob("*") if path.is_file()]
        assert len(made) >= 4 and not [path.name for path in made if words.encode() in path.read_bytes()]
    finally:
        quiet.stop()


def test_what_is_kept_is_listed_with_a_picture(server: Server, client: Client) -> None:
    """Newest first; the picture of a tiny model is of noise, but of the video's shape."""
    graph = text_to_video(server.model("LTX-Video"), width=96, height=64, seed=77)
    client.finished(graph.prompt)
    newest = client.get("/anygpu/latents")["latents"][0]
    assert "seed 77" in json.dumps(newest)
    with urllib.request.urlopen(f"{server.url}/anygpu/latents/{newest['id']}/picture", timeout=30) as answer:
        picture = Image.open(BytesIO(answer.read()))
    assert picture.format == "JPEG" and picture.size[0] == 160


def test_a_prefix_that_leads_out_and_a_file_that_is_gone(server: Server, client: Client) -> None:
    server.model(MODEL)
    graph = Graph()
    latent = graph.add("EmptyHunyuanLatentVideo", width=64, height=64, length=5, batch_size=1)
    graph.add("AnyGPUSaveLatent", latent=graph.link(latent), filename_prefix="../../outside")
    assert client.run(graph.prompt).message.startswith("filename_prefix '../../outside'")
    gone = decoded_from("AnyGPULoadLatent", file="gone.safetensors")
    assert client.run(gone.prompt).message.startswith("no latent file 'gone.safetensors'")
    gone = decoded_from("AnyGPURecoverLatents", kept="../secret")
    assert client.run(gone.prompt).message.startswith("no saved latents")


def test_a_musubi_cache_is_read_and_written_back(server: Server, client: Client) -> None:
    samples = np.random.default_rng(0).standard_normal((16, 3, 8, 8)).astype(np.float32)
    metadata = {"architecture": "hunyuan_video", "width": "64", "height": "64", "frame_count": "9"}
    cache = server.base / "input" / "clip_00000-009_0064x0064_hv.safetensors"
    save_file({"latents_3x8x8_float32": samples}, cache, {**metadata, "format_version": "1.0.1"})
    graph = Graph()
    latent = graph.link(graph.add("AnyGPULoadLatent", file=cache.name))
    graph.add("AnyGPUSaveMusubiCache", name="musubi/clip", latent=latent)
    client.finished(graph.prompt)
    written = server.base / "output" / "musubi" / cache.name
    assert np.array_equal(load_file(written)["latents_3x8x8_float32"], samples)
    assert metadata_of(written) == metadata_of(cache)


def test_a_framepack_video_is_cut_into_musubi_sections(server: Server, client: Client) -> None:
    for model in ("FramePackI2V_HY", "HunyuanVideo", "flux_redux_bfl"):
        server.model(model)
    graph, sample = film(seed=3)
    sampled = graph.prompt[sample]["inputs"]
    sampled["clip_seconds"] = 1.0
    links = {name: sampled[name] for name in ("prompt", "image")}
    cut = {"name": "musubi/film", "latent": graph.link(sample), "caption": "", "dtype": "bfloat16", "window": 3}
    node = graph.add("AnyGPUSaveMusubiCache", **cut, **links, order="inverted_anti_drifting")
    run = client.finished(graph.prompt)
    written = map(str.strip, run.texts_of(node)[-1].splitlines())
    paths = [server.base / name for name in written if name.startswith("output/musubi/film_")]
    *sections, text = paths
    assert len(sections) >= 2 and text.name == "film_fp_te.safetensors"
    assert metadata_of(text)["caption1"] == "a cat"
    assert all(metadata_of(path)["architecture"] == "framepack" for path in sections)


class Killed(Exception):
    """The server is no more."""


@pytest.fixture
def own(tmp_path: Path, tiny_folder: Path, server: Server) -> Iterator[Server]:
    """A server of this test alone, since it dies."""
    mine = Server(find_host(), tmp_path / "own", tiny_folder)
    mine.base.mkdir()
    try:
        yield mine.start()
    finally:
        mine.stop()


def killed(server: Server, graph: Graph, when: Callable[[str], bool]) -> Client:
    """A connection to ``server``, started again after kill -9 at a node of which ``when`` is true."""

    def kill(node: str, run: Run) -> bool:
        if when(node):
            assert server._process is not None
            os.kill(server._process.pid, signal.SIGKILL)
            server._process.wait(10)
            raise Killed
        return False

    with pytest.raises(Killed):
        Client(server.url).run(graph.prompt, cancel_when=kill)
    server.port = 0
    return Client(server.start().url)


def test_a_killed_decode_costs_nothing(own: Server) -> None:
    """kill -9 in decode; after a restart, which empties the temporary folder, the newest kept latents decode."""
    graph = text_to_video(own.model(MODEL), **sampling(width=128, height=128, frames=17))
    graph.prompt = pictured(graph.prompt)

    client = killed(own, graph, lambda node: node == DECODE)
    assert not list((own.base / "temp").glob("**/*.safetensors"))
    run = client.run(decoded_from("AnyGPURecoverLatents", kept="newest").prompt)
    recovered = videos.pictures(own, run)
    assert "seed 1" in run.texts_of("2")[-1]
    assert np.array_equal(recovered, videos.pictures(own, client.run(graph.prompt)))


def test_a_killed_framepack_goes_on_after_its_last_finished_section(own: Server) -> None:
    """kill -9 while a section is sampled; after a restart the same again samples the rest, to the same latents."""
    for model in ("FramePackI2V_HY", "HunyuanVideo", "flux_redux_bfl"):
        own.model(model)
    graph, sample = film(seed=2)

    client = killed(own, graph, lambda node: any("section 2 of" in text for text in own.unfinished()))
    again = client.finished(graph.prompt)
    assert any("continues after section" in text for text in again.texts_of(sample))
    assert not own.unfinished()
    client.free()
    fresh = client.run(graph.prompt)
    assert not any("continues after section" in text for text in fresh.texts_of(sample))
    first, second = (load_file(own.output(run.outputs["6"]["latents"][0])) for run in (again, fresh))
    assert np.array_equal(first["latent_tensor"], second["latent_tensor"]), "going on changed the video"


def test_a_lora_on_a_chain(server: Server, client: Client) -> None:
    """Its keys are counted under the node; another strength changes the video and loads nothing again."""
    server.model(MODEL)
    lora_files.write(server, "style.safetensors")

    def adapted(strength: float) -> Graph:
        graph = text_to_video(MODEL)
        lora = graph.add("AnyGPULoRA", pipeline=graph.link("1"), lora="style.safetensors", strength=strength)
        for node in (SAMPLE, DECODE):
            graph.prompt[node]["inputs"]["pipeline"] = graph.link(lora)
        graph.prompt = pictured(graph.prompt)
        return graph

    runs = [client.run(adapted(strength).prompt) for strength in (1.0, 2.0, 0.0)]
    plain = client.run(pictured(text_to_video(MODEL).prompt))
    videos_found = [videos.pictures(server, run) for run in (*runs, plain)]
    assert "style: 3 layers, 9 of 9 keys match" in runs[0].texts_of("6")[-1]
    assert "LoRA style 1, separate" in runs[0].texts_of("6")[-1]
    assert not np.array_equal(videos_found[0], videos_found[1])
    assert np.array_equal(videos_found[2], videos_found[3]), "strength 0 is the plain pipeline"
    assert not np.array_equal(videos_found[0], videos_found[3])
    assert "1" in runs[1].cached and "2" in runs[1].cached
    gone = adapted(1.0)
    gone.prompt["6"]["inputs"]["lora"] = "gone.safetensors"
    assert client.run(gone.prompt).message.startswith("no LoRA 'gone.safetensors' in")
