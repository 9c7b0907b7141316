"""The texturing workflows, as ComfyUI's own frontend posts them, run to a textured GLB on tiny checkpoints."""

import io
import json
import re
import shutil
import struct
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from anygpu.paint.jobs import read_receipt
from PIL import Image
from safetensors.numpy import load_file

from host import paint_models
from host.client import Client, Run
from host.inside.asking import Inside
from host.prompts import Graph, painted, replay
from host.server import PICTURE, Server
from paint import mv_stored

pytestmark = pytest.mark.host

SMALL = {"steps": 2, "view_size": 64, "size": 64, "texture_size": 64, "resolution": 64, "frames": 3, "cells": 16}
AUTO = dict.fromkeys(("precision", "offload", "variant", "weights", "vae", "image_encoder"), "auto")
SHAPE = ("ImageOnlyCheckpointLoader", "ModelSamplingAuraFlow", "CLIPVisionEncode", "Hunyuan3Dv2Conditioning")
SHAPE += ("EmptyLatentHunyuan3Dv2", "KSampler")


def shrunk(prompt: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """A replay with small sizes; core's shape model, which has no tiny form, is a ball from its voxels on."""
    found = {}
    for key, node in prompt.items():
        if node["class_type"] in SHAPE:
            continue
        if node["class_type"] == "VAEDecodeHunyuan3D":
            node = {"class_type": "StandInVoxels", "inputs": {"cells": SMALL["cells"]}}
        inputs = node["inputs"]
        inputs.update({name: SMALL[name] for name in SMALL if name in inputs and not isinstance(inputs[name], list)})
        if node["class_type"] == "AnyGPUPaintViews" and "latent" in inputs:
            inputs["view_size"] = 128  # twice the first pass
        if "target_face_count" in inputs:
            inputs["target_face_count"] = 300
        found[key] = node
    return found


def named(prompt: dict[str, dict[str, Any]], kind: str) -> str:
    """The id of the one node of a kind."""
    (key,) = [key for key, node in prompt.items() if node["class_type"] == kind]
    return key


def glb(path: Path) -> tuple[dict[str, Any], bytes]:
    """The description and the bytes of a GLB."""
    data = path.read_bytes()
    assert data[:4] == b"glTF"
    (length,) = struct.unpack_from("<I", data, 12)
    return json.loads(data[20 : 20 + length]), data[28 + length :]


def picture(facts: dict[str, Any], data: bytes, texture: int) -> np.ndarray:
    """A texture of a GLB, (H, W, 3)."""
    view = facts["bufferViews"][facts["images"][facts["textures"][texture]["source"]]["bufferView"]]
    start = view.get("byteOffset", 0)
    return np.array(Image.open(io.BytesIO(data[start : start + view["byteLength"]])).convert("RGB"))


def saved(server: Server, prompt: dict[str, dict[str, Any]], run: Run) -> Path:
    """The GLB that a run has saved."""
    (record,) = run.outputs[named(prompt, "SaveGLB")]["3d"]
    return server.output(record)


def painted_again(client: Client, name: str) -> tuple[dict[str, dict[str, Any]], Run]:
    """The prompt that replays a mesh of the output folder, and its run, which paints the same."""
    again = Graph()
    replayed = again.add("AnyGPUReplay", file=f"3d/{name} [output]")
    again.add("SaveGLB", mesh=again.link(replayed, 3), filename_prefix="3d/again")
    run = client.finished(again.prompt)
    assert run.texts_of(replayed)[-1].startswith("the same texture, bit for bit"), run.texts
    return again.prompt, run


@pytest.mark.parametrize("workflow", painted(), ids=lambda path: path.stem)
def test_saves_a_textured_glb_and_shows_its_turntable(server: Server, client: Client, workflow: Path) -> None:
    paint_models.install(server)
    prompt = shrunk(replay(workflow))
    run = client.finished(prompt)
    facts, data = glb(saved(server, prompt, run))
    (material,) = facts["materials"]
    surface = material["pbrMetallicRoughness"]
    colours = picture(facts, data, surface["baseColorTexture"]["index"])
    assert colours.shape == (64, 64, 3)
    assert colours.std() > 1, "one colour"
    assert ("metallicRoughnessTexture" in surface) == ("pbr" in workflow.stem)
    (primitive,) = facts["meshes"][0]["primitives"]
    assert {"POSITION", "NORMAL", "TEXCOORD_0"} <= set(primitive["attributes"])
    frames = run.outputs[named(prompt, "PreviewImage")]["images"]
    pictures = [np.array(Image.open(server.output(record))).astype(int) for record in frames]
    beside = "before" in prompt[named(prompt, "AnyGPURenderTurntable")]["inputs"]
    assert [one.shape for one in pictures] == [(64, 128 if beside else 64, 3)] * 3
    assert np.abs(pictures[0] - pictures[1]).mean() > 0.5, "it does not turn"
    preview = run.outputs[named(prompt, "Preview3D")]["result"][0]
    assert (server.base / "output" / preview).read_bytes()[:4] == b"glTF"


@pytest.fixture
def graph(server: Server) -> Graph:
    """Load, render and paint: nodes 1 to 5."""
    paint_models.install(server)
    made = Graph()
    pipeline = made.add("AnyGPULoadPaintPipeline", model="hunyuan3d-paint-v2-0", **AUTO)
    image = made.add("LoadImage", image="example.png")
    mesh = made.add("AnyGPULoadMesh", mesh_file=paint_models.MESH)
    maps = made.add("AnyGPURenderViews", mesh=made.link(mesh), size=64)
    made.add(
        "AnyGPUPaintViews",
        pipeline=made.link(pipeline),
        image=made.link(image),
        normals=made.link(maps),
        positions=made.link(maps, 1),
        cameras=made.link(maps, 2),
        view_size=64,
        steps=2,
        guidance=0.0,
        seed=1,
        scheduler="auto",
        sigma_schedule="auto",
    )
    return made


def baking(graph: Graph, **changed: Any) -> Graph:
    """Bake and save behind :func:`graph`."""
    given = {"mesh": graph.link("3"), "images": graph.link("5"), "cameras": graph.link("4", 2), "texture_size": 64}
    bake = graph.add("AnyGPUBakeTexture", **{**given, "view_size": 64, **changed})
    graph.add("SaveGLB", mesh=graph.link(bake), filename_prefix="3d/test")
    return graph


@pytest.mark.parametrize(("variant", "base"), [("ig2mv", "sdxl"), ("tg2mv", "sd21")])
def test_mv_adapter_on_a_user_s_checkpoint(server: Server, client: Client, variant: str, base: str) -> None:
    """Through ComfyUI's own memory manager; twice, so that parts come back after they left."""
    paint_models.install(server)
    models = server.base / "models"
    name = mv_stored.FILES[variant, base]
    if not (models / "diffusers" / f"mine-{base}").exists():
        mv_stored.folder(base, models / "diffusers", f"mine-{base}")
    (models / "diffusion_models").mkdir(exist_ok=True)
    mv_stored.adapter_file(variant, base, models / "diffusion_models")
    graph = Graph()
    chosen = {"model": f"mine-{base}", "adapter": name, "lora": "none", "lora_strength": 1.0}
    pipeline = graph.add("AnyGPULoadMVAdapter", **chosen, precision="auto", offload="auto")
    mesh = graph.add("AnyGPULoadMesh", mesh_file=paint_models.MESH)
    given = {
        "mesh": graph.link(mesh),
        "pipeline": graph.link(pipeline),
        "view_size": 64,
        "texture_size": 64,
        "steps": 2,
    }
    if variant == "ig2mv":
        given["image"] = graph.link(graph.add("LoadImage", image="example.png"))
    textured = graph.add("AnyGPUTextureMesh", **given, seed=1, prompt="a red cat")
    graph.add("SaveGLB", mesh=graph.link(textured, 5), filename_prefix=f"3d/mv {base}")
    for seed in (1, 2):
        graph.prompt[textured]["inputs"]["seed"] = seed
        run = client.finished(graph.prompt)
    made = saved(server, graph.prompt, run)
    receipt = read_receipt(made)
    assert receipt["job"]["paint"]["seed"] == 2 and str(server.base) not in str(receipt) and "missing" not in receipt
    assert "AnyGPUTextureMesh" in glb(made)[0]["asset"]["extras"]["prompt"], "the workflow is in it too"
    again = made.rename(made.with_name("Again.GLB"))  # as other programs end it
    assert read_receipt(saved(server, *painted_again(client, again.name)))["texture"] == receipt["texture"]
    latents = client.get("/anygpu/latents")["latents"][0]
    assert ", mv_adapter, 64x64, 6 frames, seed 2" in latents["title"]


@pytest.mark.parametrize(("variant", "base"), [("ig2mv", "sdxl"), ("tg2mv", "sd21")])
def test_mv_adapter_on_what_core_has_loaded(server: Server, client: Client, variant: str, base: str) -> None:
    """The weights of the same file, and of what core saves with a LoRA; then a painting, bit for bit."""
    paint_models.install(server)
    models = server.base / "models"
    for name in ("checkpoints", "diffusion_models", "loras"):
        (models / name).mkdir(exist_ok=True)
    paint_models.base_file(base, models / "checkpoints" / f"core-{base}.safetensors")
    mv_stored.adapter_file(variant, base, models / "diffusion_models")
    mv_stored.lora_file(models / "loras" / f"{base}.safetensors", True, base)

    def run(name: str, lora: str, painted: bool, *left: str) -> Run:
        graph = Graph()
        core = graph.add("StandInCheckpoint", name=f"core-{base}.safetensors", base=base)
        given = {f"core_{each}": graph.link(core, index) for index, each in enumerate(("model", "clip", "vae"))}
        if lora:
            links = {"model": given["core_model"], "clip": given["core_clip"], "lora_name": lora}
            patched = graph.add("LoraLoader", **links, strength_model=0.7, strength_clip=0.5)
            given |= {"core_model": graph.link(patched), "core_clip": graph.link(patched, 1)}
        links = {each: given[f"core_{each}"] for each in ("model", "clip", "vae")}
        if lora:
            graph.add("CheckpointSave", **links, filename_prefix=f"checkpoints/{base}")
        chosen = {"adapter": mv_stored.FILES[variant, base], "lora": "none", "lora_strength": 1.0}
        given = {each: link for each, link in given.items() if each not in left} if name == "core" else {}
        model = "gone" if name == "core" else name
        pipeline = graph.add("AnyGPULoadMVAdapter", model=model, **chosen, precision="auto", offload="auto", **given)
        graph.add("StandInWeights", pipeline=graph.link(pipeline))
        if painted:
            mesh = graph.link(graph.add("AnyGPULoadMesh", mesh_file=paint_models.MESH))
            made = {"mesh": mesh, "pipeline": graph.link(pipeline), "view_size": 64, "texture_size": 64, "steps": 2}
            if variant == "ig2mv":
                made["image"] = graph.link(graph.add("LoadImage", image="example.png"))
            made = graph.add("AnyGPUTextureMesh", **made, seed=1, prompt="a red cat")
            graph.add("SaveImage", images=graph.link(made, 4), filename_prefix="views")
            graph.add("SaveGLB", mesh=graph.link(made, 5), filename_prefix=f"3d/core {base}")
        return client.run(graph.prompt)

    def weights(run: Run) -> list[str]:
        assert run.ending == "execution_success", run.message
        return next(each["text"] for each in run.outputs.values() if "text" in each)

    runs = [run(name, "", True) for name in ("core", f"core-{base}.safetensors")]
    assert weights(runs[0]) == weights(runs[1])
    pictures = [[np.array(Image.open(server.output(each))) for each in one.files()] for one in runs]
    assert len(pictures[0]) == 6 and np.array_equal(*pictures) and np.std(pictures[0]) > 1
    assert any("core's MODEL, CLIP and VAE" in text for _, text in runs[0].texts)
    assert paint_models.replayed(client, runs[0]).startswith("the same texture, bit for bit"), (
        "from the file that core read"
    )
    patched = run("core", f"{base}.safetensors", True)
    missing = "a receipt without core's MODEL, CLIP and VAE as one file has them;"
    assert paint_models.replayed(client, patched).startswith(missing), "with a LoRA of core's"
    with_lora = weights(patched)
    (saved,) = (server.base / "output" / "checkpoints").glob(f"{base}_*.safetensors")
    saved.rename(models / "checkpoints" / f"saved-{base}.safetensors")
    assert with_lora == weights(run(f"saved-{base}.safetensors", "", False)) != weights(runs[0])
    assert weights(run("core", "", False)) == weights(runs[0]), "the LoRA went into core's own weights"
    given = {f"core_{each}": ["9", index] for index, each in enumerate(("model", "clip", "vae"))}
    inputs = {"model": "gone", "adapter": mv_stored.FILES[variant, base], **given}
    forecast = {"1": {"class_type": "AnyGPULoadMVAdapter", "inputs": inputs}}
    told = []
    for kind in ("CheckpointLoaderSimple", "StandInCheckpoint"):
        forecast["9"] = {"class_type": kind, "inputs": {"ckpt_name": f"core-{base}.safetensors"}}
        (card,) = client.post("/anygpu/graph", {"prompt": forecast})["pipelines"]
        told.append(card["error"]["found"] if "error" in card else card["model"])
    unknown = "memory and time unknown: core_model is from StandInCheckpoint"
    assert told == [f"core-{base}.safetensors", unknown], "of the file, and of no other"
    refused = run("core", "", False, "core_clip")
    assert "no core_clip; expected core's MODEL, CLIP and VAE" in refused.message


REFUSED = {
    "none": "no core_model and no core_vae; expected core's MODEL, CLIP and VAE of Stable Diffusion XL or 2.1",
    "Flux": "core's Flux, which predicts neither noise nor velocities",
    "flow": "core's SDXL, which predicts neither noise nor velocities",
    "inpainting": "is an inpainting checkpoint",
    "SD1.5": "is Stable Diffusion 1.5",
    "EDM": "is an EDM checkpoint",
    "refiner": "is the refiner of Stable Diffusion XL",
    "unCLIP": "is an unCLIP checkpoint of Stable Diffusion 2.1",
    "packed": "core_model with packed weights or another pack's (QuantizedTensor)",
    "GGUF": "core_model with packed weights or another pack's (OtherTensor)",
    "foreign": "core_model with packed weights or another pack's (adapter.OtherLinear)",
    "ours": "AnyGPU's own network as core_model",
    "CLIP of SD1.5": "core_clip with clip_l;",
    "CLIP of Flux": "core_clip with clip_l, t5xxl;",
    "CLIP of SD2.1": "no text_encoder of sdxl in",
    "VAE of Flux": "a vae of 16 latent channels in",
}


def test_other_networks_of_core_are_refused_by_name(inside: Inside) -> None:
    found = inside.play("adapter", "refusals")
    assert {name: found[name] for name, said in REFUSED.items() if said not in found[name]} == {}
    assert found.keys() == REFUSED.keys() and not any("\n" in said for said in found.values())
    assert inside.play("adapter", "predictions") == [False, True, True]


def test_a_lora_of_core_is_that_of_the_model_that_is_connected(inside: Inside) -> None:
    found, paged = (inside.play("adapter", "patches", dynamic=dynamic) for dynamic in (False, True))
    assert found["patched"] and not found["dynamic"] and paged["dynamic"] and found["names"] == paged["names"] > 500
    assert found["right"] == paged["right"] == [True] * 3 and found["host"] == paged["host"] == ["cpu"] * 3


def test_painted_views_are_kept_when_baking_fails(client: Client, graph: Graph) -> None:
    cameras = graph.add("AnyGPUPaintCameras", choose="list", azimuths="0", elevations="0", weights="1", ortho_scale=1.2)
    run = client.run(baking(graph, cameras=graph.link(cameras)).prompt)
    assert run.ending == "execution_error"
    assert run.message.startswith("6 pictures for 1 cameras; expected one per camera.")
    graph.prompt["7"]["inputs"]["cameras"] = graph.link("4", 2)
    again = client.finished(graph.prompt)
    assert "5" in again.cached, "painted a second time"
    latents = client.get("/anygpu/latents")["latents"][0]
    assert ", paint, 64x64, 6 frames, seed" in latents["title"], "the latents of paint are kept as others"


def test_a_cancelled_painting_goes_on_after_its_last_step_in_the_same_server(
    server: Server, client: Client, graph: Graph
) -> None:
    graph.prompt["5"]["inputs"]["steps"] = 40
    graph.add("SaveLatent", samples=graph.link("5", 2), filename_prefix="views")
    steps = lambda run: [done for node, done, total in run.progress if (node, total) == ("5", 40)]  # noqa: E731
    run = client.run(graph.prompt, cancel_when=lambda _, run: bool(steps(run)) and steps(run)[-1] >= 10)
    assert run.ending == "execution_interrupted", run.message
    assert re.search(r"\bstep \d+ of 40 is saved", run.texts_of("5")[-1])
    again = client.finished(graph.prompt)
    assert steps(again)[0] > 10 and "goes on after step" in again.texts_of("5")[-1]
    client.free()
    fresh = client.finished(graph.prompt)
    assert steps(fresh)[0] == 1, "what has ended leaves no state"
    both = [server.output(run.outputs["6"]["latents"][0]) for run in (again, fresh)]
    assert np.array_equal(*(load_file(path)["latent_tensor"] for path in both))


def test_a_mesh_without_uvs_is_unwrapped_in_one_step_and_all_of_it_is_cached(server: Server, client: Client) -> None:
    paint_models.install(server)
    made = Graph()
    pipeline = made.add("AnyGPULoadPaintPipeline", model="hunyuan3d-paint-v2-0", **AUTO)
    image = made.add("LoadImage", image="example.png")
    mesh = made.add("AnyGPULoadMesh", mesh_file=paint_models.PLAIN)
    texture = made.add(
        "AnyGPUTextureMesh",
        mesh=made.link(mesh),
        image=made.link(image),
        pipeline=made.link(pipeline),
        view_size=64,
        texture_size=64,
        seed=1,
        steps=1,
    )
    made.add("SaveGLB", mesh=made.link(texture), filename_prefix="3d/test")
    run = client.finished(made.prompt)
    facts, _ = glb(saved(server, made.prompt, run))
    assert "TEXCOORD_0" in facts["meshes"][0]["primitives"][0]["attributes"]
    assert "filled from neighbouring areas" in run.texts_of(texture)[-1], "an inner node's text is under its own"
    assert client.run(made.prompt).executed == []


def uploaded(client: Client, name: str, data: bytes) -> dict[str, str]:
    """What ComfyUI answers to a file that is put into input/3d, sent as a browser does."""
    mark = "part-of-a-form"
    head = 'Content-Disposition: form-data; name="{}"'
    parts = [f"{head.format('subfolder')}\r\n\r\n3d", f'{head.format("image")}; filename="{name}"\r\n\r\n']
    body = "".join(f"--{mark}\r\n{part}\r\n" for part in parts)[:-2].encode() + data + f"\r\n--{mark}--\r\n".encode()
    kind = {"Content-Type": f"multipart/form-data; boundary={mark}"}
    with urllib.request.urlopen(urllib.request.Request(f"{client.url}/upload/image", body, kind), timeout=30) as answer:
        return json.load(answer)


def test_a_mesh_that_was_uploaded_or_saved_before_is_loaded(server: Server, client: Client) -> None:
    """As the button on the node sends it, and as SaveGLB leaves it."""
    paint_models.install(server)
    answer = uploaded(client, "mine.glb", (server.base / "input" / paint_models.MESH).read_bytes())
    assert (answer["name"], answer["subfolder"]) == ("mine.glb", "3d")
    (server.base / "output" / "3d").mkdir(parents=True, exist_ok=True)
    shutil.copyfile(server.base / "input" / paint_models.PLAIN, server.base / "output" / "3d" / "saved.obj")
    options = client.get("/object_info/AnyGPULoadMesh")["AnyGPULoadMesh"]["input"]["required"]["mesh_file"]
    listed = options[1].get("options", options[0])
    assert {"3d/mine.glb", "3d/saved.obj [output]"} <= set(listed)
    assert options[1]["file_upload"] is True
    for name in ("3d/mine.glb", "3d/saved.obj [output]"):
        made = Graph()
        pipeline = made.add("AnyGPULoadMesh", mesh_file=name)
        made.add("AnyGPURenderTurntable", mesh=made.link(pipeline), frames=1, size=16, elevation=0.0)
        made.add("PreviewImage", images=made.link("2"))
        client.finished(made.prompt)


@pytest.mark.parametrize(
    ("node", "changed", "said"),
    [
        ("1", {"model": "gone"}, "no paint model 'gone' in"),
        ("1", {"vae": "gone"}, "no folder 'gone' in"),
        ("3", {"mesh_file": "3d/gone.glb"}, "no mesh '3d/gone.glb' in"),
        ("3", {"mesh_file": "../secret.glb"}, "no mesh '../secret.glb' in"),
        ("3", {"mesh_file": "../input/3d/example.glb [output]"}, "no mesh '../input/3d/example.glb [output]' in"),
        ("5", {"view_size": 65}, "view size 65 for painting"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(client: Client, graph: Graph, node: str, changed: Any, said: str) -> None:
    graph.prompt[node]["inputs"].update(changed)
    run = client.run(baking(graph).prompt)
    assert run.ending == "execution_error"
    assert said in run.message
    assert "\n" not in run.message


def test_what_separate_nodes_made_is_painted_again(server: Server, client: Client, graph: Graph) -> None:
    bake = named(baking(graph).prompt, "AnyGPUBakeTexture")
    graph.add("SaveGLB", mesh=graph.link(bake, 5), filename_prefix="3d/steps")
    run = client.finished(graph.prompt)
    names = [record["filename"] for given in run.outputs.values() for record in given.get("3d", ())]
    painted_again(client, next(name for name in names if name.startswith("steps")))


def test_progress_previews_and_what_was_decided_stand_under_the_nodes(client: Client, graph: Graph) -> None:
    run = client.finished(baking(graph).prompt)
    assert run.previews >= 1
    assert ("5", 2, 2) in run.progress, "a step each"
    assert ("6", 6, 6) in run.progress, "a view each"
    assert "paint v2-0" in run.texts_of("1")[-1]
    assert run.texts_of("6")[-1].split("\n")[0].endswith("filled from neighbouring areas")


@pytest.mark.parametrize(
    ("name", "left_out"),
    [("anygpu_paint_turbo", "leaves light and shadow"), ("anygpu_paint_pbr_enlarged", "neither metal nor roughness")],
)
def test_with_no_model_installed_a_ring_takes_the_picture_s_colours(
    server: Server, client: Client, name: str, left_out: str
) -> None:
    paint_models.install(server)
    green = np.zeros((96, 96, 4), np.uint8)
    green[16:80, 16:80] = 40, 200, 60, 255
    Image.fromarray(green).save(server.base / "input" / "green.png")
    prompt = replay(next(path for path in painted() if path.stem == name))
    prompt[named(prompt, "LoadImage")]["inputs"]["image"] = "green.png"
    for node in prompt.values():
        node["inputs"] |= {"texture_size": 256} if "texture_size" in node["inputs"] else {}
    if "pbr" in name:
        prompt[named(prompt, "AnyGPURenderViews")]["inputs"]["size"] = 256
        prompt[named(prompt, "AnyGPUBakeTexture")]["inputs"]["view_size"] = 256
    with server.without_models():
        run = client.finished(prompt)
    said = [text for _, text in run.texts]
    for words in ("paints simple bodies", "paints at its own size", left_out):
        assert any(words in text for text in said), (words, said)
    facts, data = glb(saved(server, prompt, run))
    index = facts["materials"][0]["pbrMetallicRoughness"]["baseColorTexture"]["index"]
    red, green, blue = picture(facts, data, index).reshape(-1, 3).mean(0)
    assert green > 1.5 * max(red, blue), (red, green, blue)


@pytest.mark.full
def test_mv_adapter_paints_with_nothing_installed(server: Server, client: Client) -> None:
    """Its demo is what the node offers: the ring takes the picture's colours, twice, and the texture is baked."""
    paint_models.only_the_demo(server)
    for file in (server.base / "models").rglob("mvadapter*"):  # of another test
        file.unlink()
    offered = client.get("/object_info/AnyGPULoadMVAdapter")["AnyGPULoadMVAdapter"]["input"]["required"]
    chosen = {name: (offered[name][1].get("options") or offered[name][0])[-1] for name in ("model", "adapter")}
    assert chosen == {"model": "demo: MV-Adapter (2 MB)", "adapter": "demo: ig2mv"}
    graph = Graph()
    more = {"lora": "none", "lora_strength": 1.0, "precision": "auto", "offload": "auto"}
    pipeline = graph.add("AnyGPULoadMVAdapter", **chosen, **more)
    image = graph.add("LoadImage", image=PICTURE)
    mesh = graph.add("AnyGPULoadMesh", mesh_file=paint_models.MESH)
    maps = graph.add("AnyGPURenderViews", mesh=graph.link(mesh), pipeline=graph.link(pipeline), size=128)
    cameras = graph.link(maps, 2)
    given = {"normals": graph.link(maps), "positions": graph.link(maps, 1), "cameras": cameras}
    given |= {"image": graph.link(image), "mask": graph.link(image, 1), "view_size": 512, "steps": 0, "guidance": 0.0}
    asked = {"scheduler": "auto", "sigma_schedule": "auto", "seed": 1}
    views = graph.add("AnyGPUPaintViews", pipeline=graph.link(pipeline), **given, **asked)
    sizes = {"texture_size": 256, "view_size": 256}
    baked = graph.add("AnyGPUBakeTexture", mesh=graph.link(mesh), images=graph.link(views), cameras=cameras, **sizes)
    graph.add("SaveGLB", mesh=graph.link(baked), filename_prefix="3d/mv_demo")
    for adapter in (chosen["adapter"], "mvadapter_ig2mv_sdxl.safetensors"):
        graph.prompt[pipeline]["inputs"]["adapter"] = adapter
        run = client.finished(graph.prompt)
        said = [text for _, text in run.texts]
        for words in ("paints simple bodies", "paints at its own size", "20 steps and guidance 1"):
            assert any(words in text for text in said), (words, said)
        facts, data = glb(saved(server, graph.prompt, run))
        index = facts["materials"][0]["pbrMetallicRoughness"]["baseColorTexture"]["index"]
        colours = picture(facts, data, index).astype(float) / 255
        red, blue = (colours[..., channel] - colours[..., 2 - channel] > 0.2 for channel in (0, 2))
        assert min(red.mean(), blue.mean()) > 0.25, "above red, below blue"
    graph.prompt[pipeline]["inputs"]["adapter"] = "mvadapter_tg2mv_sdxl.safetensors"
    run = client.run(graph.prompt)
    assert run.ending == "execution_error" and "no MV-Adapter 'mvadapter_tg2mv_sdxl.safetensors' in" in run.message
