"""Single files of every layout in a real ComfyUI's model folders: the pipeline they compose is that of the folder."""

import shutil
from pathlib import Path

import layouts
import numpy as np
import pytest
import tiny
import torch
from safetensors.numpy import load_file
from safetensors.torch import save_file

from host.client import Client
from host.prompts import Graph, loading, sampling, text_to_video
from host.server import Server

pytestmark = pytest.mark.host

FOLDERS = {"transformer": "diffusion_models", "vae": "vae", "image_encoder": "clip_vision"}
LOAD, PROMPT, SAMPLE = "123"
MODELS = {"LTX-Video": "ltx", "HunyuanVideo": "hunyuan_video", "mochi-1-preview": "mochi"}


def put(server: Server, model: str, path: Path) -> dict[str, str]:
    """The names of a tiny checkpoint's single files, after putting them into the model folders."""
    names = {}
    for part, file in layouts.whole_set(model, server.tiny_folder, path).items():
        home = server.base / "models" / FOLDERS.get(part, "text_encoders") / model
        home.mkdir(parents=True, exist_ok=True)
        for one in (file, file.with_suffix(".json")):
            shutil.copy(one, home / f"{part}{one.suffix}")
        names[part] = f"{model}/{part}.safetensors"
    return names


def composing(**chosen: str) -> dict[str, str]:
    parts = ("vae", "text_encoder", "text_encoder_2", "image_encoder")
    return {**dict.fromkeys((*parts, "base", "task", "precision", "offload", "variant"), "auto"), **chosen}


def graph_of(files: dict[str, str]) -> Graph:
    graph = Graph()
    pipeline = graph.link(graph.add("AnyGPUComposePipeline", **composing(**files)))
    prompt = graph.add("AnyGPUEncodePrompt", pipeline=pipeline, text="a cat walks on the grass", negative="")
    graph.add("AnyGPUSample", pipeline=pipeline, prompt=graph.link(prompt), **sampling())
    return graph


def latents(server: Server, client: Client, graph: Graph) -> np.ndarray:
    keeper = graph.add("SaveLatent", samples=graph.link(SAMPLE), filename_prefix="layout")
    run = client.finished(graph.prompt)
    return load_file(server.output(run.outputs[keeper]["latents"][0]))["latent_tensor"]


def refused(client: Client, transformer: str) -> str:
    """What ComfyUI says of a file that cannot be loaded."""
    graph = graph_of({"transformer": transformer})
    graph.add("SaveLatent", samples=graph.link(SAMPLE), filename_prefix="layout")
    run = client.run(graph.prompt)
    assert run.ending == "execution_error"
    return run.message


def from_folder(server: Server, client: Client, published: str) -> np.ndarray:
    graph = text_to_video(server.model(published))
    for node in ("4", "5"):
        del graph.prompt[node]
    return latents(server, client, graph)


@pytest.mark.parametrize("published", list(MODELS))
def test_single_files_sample_what_their_folder_samples(
    server: Server, client: Client, tmp_path: Path, published: str
) -> None:
    expected = from_folder(server, client, published)
    names = put(server, MODELS[published], tmp_path)
    found = latents(server, client, graph_of({**names, "base": server.model(published)}))
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("kind", ["fp8", "gguf"])
def test_packed_files_sample_in_comfyui(server: Server, client: Client, tmp_path: Path, kind: str) -> None:
    """Weights that are a whole number of 1/16 survive both formats, so the latents are those of the plain file."""
    folder = tiny.build("mochi", server.tiny_folder) / "transformer"
    tensors = {
        name: (tensor * 4).round().clamp(-7, 7) / 16 if tensor.ndim == 2 and tensor.shape[1] % 32 == 0 else tensor
        for name, tensor in layouts.released(layouts.tensors_of(folder), layouts.layout("Mochi 1 as released")).items()
    }
    home = server.base / "models" / "diffusion_models"
    layouts.write(home / "plain.safetensors", tensors, layouts.config_in(folder))
    stored = {}
    for name, tensor in tensors.items():
        stored[name] = tensor
        if tensor.ndim == 2 and tensor.shape[1] % 32 == 0:
            stored[name] = (tensor * 16).to(torch.float8_e4m3fn)
            stored[name.replace("weight", "scale_weight")] = torch.tensor(1 / 16)
    save_file({**stored, "scaled_fp8": torch.zeros(2, dtype=torch.float8_e4m3fn)}, home / "packed.safetensors")
    names = put(server, "mochi", tmp_path)
    base, packed = server.model("mochi-1-preview"), "packed.safetensors"
    if kind == "gguf":
        packed = "packed.gguf"
        layouts.gguf_file(home / packed, tensors, "F16")
    shutil.copy(home / "plain.json", home / "packed.json")
    first, second = (
        latents(server, client, graph_of({**names, "transformer": name, "base": base}))
        for name in ("plain.safetensors", packed)
    )
    assert np.array_equal(first, second)


def test_a_name_outside_the_folders_is_refused(server: Server, client: Client, tmp_path: Path) -> None:
    outside = tmp_path / "outside.safetensors"
    save_file({"a": torch.zeros(1)}, outside)
    for name in (str(outside), "../../outside.safetensors"):
        assert f"no transformer file {name!r}" in refused(client, name)


def test_loops_of_links_and_damaged_files_do_not_break_the_list(server: Server, client: Client) -> None:
    home = server.base / "models" / "diffusion_models" / "odd"
    home.mkdir(parents=True, exist_ok=True)
    for name, target in (("loop", home), ("itself.safetensors", home / "itself.safetensors")):
        if not (home / name).is_symlink():
            (home / name).symlink_to(target)
    (home / "empty.safetensors").write_bytes(b"")
    listed = client.get("/object_info/AnyGPUComposePipeline")["AnyGPUComposePipeline"]["input"]["required"][
        "transformer"
    ]
    names = listed[1]["options"] if isinstance(listed[0], str) else listed[0]
    assert "odd/empty.safetensors" in names and len(names) == len(set(names))
    assert not any("loop" in name for name in names)
    assert "only 0 bytes" in refused(client, "odd/empty.safetensors")


def test_loading_takes_small_weights(server: Server, client: Client) -> None:
    graph = text_to_video(server.model("mochi-1-preview"))
    graph.prompt[LOAD]["inputs"] = loading("mochi-1-preview", weights="int8", text_weights="fp8")
    for node in ("4", "5"):
        del graph.prompt[node]
    assert not np.array_equal(latents(server, client, graph), from_folder(server, client, "mochi-1-preview"))


def test_mochi_s_vae_in_two_files_decodes(server: Server, client: Client, tmp_path: Path) -> None:
    """The half that is chosen finds the other beside it, and says so."""
    names = put(server, "mochi", tmp_path)
    whole = layouts.tensors_of(tiny.build("mochi", server.tiny_folder) / "vae")
    released = layouts.released(whole, layouts.layout("the VAE of Mochi 1 as released"))
    config, home = layouts.config_in(tiny.build("mochi", server.tiny_folder) / "vae"), server.base / "models/vae/halves"
    for coder in ("encoder", "decoder"):
        half = {n.removeprefix(f"{coder}."): t for n, t in released.items() if n.startswith(f"{coder}.")}
        layouts.write(home / f"{coder}.safetensors", half, config)
    frames = []
    for vae in (names["vae"], "halves/decoder.safetensors"):
        graph = graph_of({**names, "vae": vae, "base": server.model("mochi-1-preview")})
        decode = graph.add("AnyGPUDecode", pipeline=["1", 0], latent=graph.link(SAMPLE))
        keeper = graph.add("SaveImage", images=graph.link(decode), filename_prefix="halves")
        run = client.finished(graph.prompt)
        frames.append([server.output(item).read_bytes() for item in run.outputs[keeper]["images"]])
        said = "encoder of the VAE from encoder.safetensors (auto)" in run.texts_of(LOAD)[-1]
        assert said is ("halves" in vae)
    pixels = [[file[file.index(b"IDAT") :] for file in saved] for saved in frames]  # what stands before is the prompt
    assert pixels[0] == pixels[1]


def test_the_download_node_looks_and_asks_nobody(server: Server, client: Client) -> None:
    graph = Graph()
    node = graph.add("AnyGPUDownloadModel", model="LTX-Video", download="no")
    folder = server.base / "models" / "diffusers" / "LTX-Video"
    there = folder.exists()
    run = client.finished(graph.prompt)
    assert f"{folder} " in run.texts_of(node)[-1] and "nothing was downloaded" in run.texts_of(node)[-1]
    assert folder.exists() is there
