"""Detail, enlarged views and kept materials through core's own nodes, in a real ComfyUI."""

import pytest
import torch
from anygpu.paint.demo import ring
from PIL import Image

from host import paint_models, videos
from host.client import Client
from host.prompts import Graph
from host.server import Server
from host.test_paint import glb, named, picture, saved

pytestmark = pytest.mark.host

VIDEO = {"filename_prefix": "video/turn", "format": "auto", "codec": "auto"}
COLOURS = {
    "baseColor": (200, 10, 10),
    "metallicRoughness": (0, 100, 50),
    "normal": (128, 120, 255),
    "occlusion": (77, 0, 0),
    "emissive": (1, 2, 3),
}


def in_materials() -> bytes:
    """A GLB of the ring with every map that glTF has."""
    trimesh = pytest.importorskip("trimesh")
    mesh = ring()
    maps = {f"{name}Texture": Image.new("RGB", (8, 8), colour) for name, colour in COLOURS.items()}
    material = trimesh.visual.material.PBRMaterial(**maps, emissiveFactor=[1, 0.5, 0.25], roughnessFactor=0.5)
    uvs = torch.stack((mesh.uvs[:, 0], 1 - mesh.uvs[:, 1]), dim=1).numpy()
    visual = trimesh.visual.TextureVisuals(uv=uvs, material=material)
    made = trimesh.Trimesh(mesh.vertices.numpy(), mesh.faces.numpy(), visual=visual, process=False)
    return made.export(file_type="glb")


def chain(server: Server, upscale: bool = False, project: bool = False) -> Graph:
    """Load, clean, render, bake the normals as if they were painted views; save."""
    (server.base / "input" / "3d").mkdir(parents=True, exist_ok=True)
    (server.base / "input" / "3d" / "materials.glb").write_bytes(in_materials())
    made = Graph()
    loaded = made.add("AnyGPULoadMesh", mesh_file="3d/materials.glb")
    mesh = made.add("AnyGPUCleanMesh", mesh=made.link(loaded), floaters=0.005, degenerate=True, broken=True)
    maps = made.add("AnyGPURenderViews", mesh=made.link(mesh), size=128)
    views = made.link(maps)
    if upscale:
        paint_models.enlarging(server.base / "models" / "upscale_models" / "double.safetensors", 2)
        model = made.add("UpscaleModelLoader", model_name="double.safetensors")
        views = made.link(made.add("ImageUpscaleWithModel", upscale_model=made.link(model), image=views))
    given = {"images": views, "cameras": made.link(maps, 2), "texture_size": 128, "view_size": 256}
    last = made.add("AnyGPUBakeTexture", mesh=made.link(mesh), **given)
    if project:
        front = made.add("ImageFromBatch", image=made.link(maps), batch_index=0, length=1)
        last = made.add("AnyGPUProjectPicture", mesh=made.link(last), front=made.link(front))
    turn = {"frames": 2, "size": 32, "elevation": 10.0}
    frames = made.add("AnyGPURenderTurntable", mesh=made.link(last), before=made.link(loaded), **turn)
    made.add("SaveGLB", mesh=made.link(last), filename_prefix="3d/detail")
    made.add("SaveVideo", video=made.link(made.add("CreateVideo", images=made.link(frames), fps=12.0)), **VIDEO)
    return made


@pytest.mark.parametrize("project", [False, True])
def test_maps_that_are_not_painted_stay_in_the_saved_file(server: Server, client: Client, project: bool) -> None:
    made = chain(server, project=project)
    run = client.finished(made.prompt)
    (record,) = run.outputs[named(made.prompt, "SaveVideo")]["images"]
    film = videos.frames(server.output(record))
    assert film.shape[1:] == (32, 64, 3), "before and after side by side"
    before, after = film[0, :, :32].astype(int), film[0, :, 32:].astype(int)
    assert before[..., 0].std() > 10 and abs(before - after).mean() > 5
    facts, data = glb(saved(server, made.prompt, run))
    (material,) = facts["materials"]
    surface = material["pbrMetallicRoughness"]
    assert picture(facts, data, surface["baseColorTexture"]["index"]).std() > 10, "painted"
    red, green, blue = picture(facts, data, surface["metallicRoughnessTexture"]["index"])[0, 0]
    assert (red, green, blue) == (77, 100, 50)
    assert material["occlusionTexture"]["index"] == surface["metallicRoughnessTexture"]["index"]
    assert tuple(picture(facts, data, material["normalTexture"]["index"])[0, 0]) == COLOURS["normal"]
    assert tuple(picture(facts, data, material["emissiveTexture"]["index"])[0, 0]) == COLOURS["emissive"]
    assert surface["roughnessFactor"] == 0.5 and material["emissiveFactor"] == [1, 0.5, 0.25]
    if project:
        assert any("front: outlines agree by" in text for _, text in run.texts)


def test_views_are_enlarged_by_core_s_upscale_models_before_they_are_baked(server: Server, client: Client) -> None:
    if "ImageUpscaleWithModel" not in client.get("/object_info"):
        pytest.skip("this ComfyUI has no upscale models: spandrel or torchvision is broken")
    plain, enlarged = (glb_of(server, client, upscale) for upscale in (False, True))
    assert abs(plain.astype(int) - enlarged).mean() < 3 and (plain != enlarged).any()


def glb_of(server: Server, client: Client, upscale: bool):
    made = chain(server, upscale)
    run = client.finished(made.prompt)
    facts, data = glb(saved(server, made.prompt, run))
    return picture(facts, data, facts["materials"][0]["pbrMetallicRoughness"]["baseColorTexture"]["index"])


def test_pictures_enlarged_views_and_detail_of_separate_nodes_are_repeated(server: Server, client: Client) -> None:
    """PBR as published, with two pictures, and a picture of the mesh on it; then once more with what ran before."""
    if "ImageUpscaleWithModel" not in client.get("/object_info"):
        pytest.skip("this ComfyUI has no upscale models: spandrel or torchvision is broken")
    paint_models.install(server)
    paint_models.enlarging(server.base / "models" / "upscale_models" / "double.safetensors", 2)
    Image.new("RGB", Image.open(server.base / "input" / "example.png").size, (9, 99, 199)).save(
        server.base / "input" / "blue.png"
    )
    made = Graph()
    chosen = dict.fromkeys(("precision", "offload", "variant", "weights", "vae"), "auto")
    chosen |= {"model": "hunyuan3d-paintpbr-v2-1", "image_encoder": paint_models.DINO}
    pipeline = made.add("AnyGPULoadPaintPipeline", **chosen)
    mesh = made.add("AnyGPULoadMesh", mesh_file=paint_models.MESH)
    maps = made.add("AnyGPURenderViews", mesh=made.link(mesh), pipeline=made.link(pipeline), size=64)
    pictures = [made.link(made.add("LoadImage", image=name)) for name in ("example.png", "blue.png")]
    both = made.add("ImageBatch", image1=pictures[0], image2=pictures[1])
    given = {"normals": made.link(maps), "positions": made.link(maps, 1), "cameras": made.link(maps, 2)}
    given |= {"view_size": 64, "steps": 1, "guidance": 0.0, "seed": 1, "scheduler": "auto"}
    views = made.add("AnyGPUPaintViews", pipeline=made.link(pipeline), image=made.link(both), **given)
    model = made.add("UpscaleModelLoader", model_name="double.safetensors")
    larger = [
        made.add("ImageUpscaleWithModel", upscale_model=made.link(model), image=made.link(views, n)) for n in (0, 1)
    ]
    given = {"images": made.link(larger[0]), "metallic_roughness": made.link(larger[1]), "cameras": made.link(maps, 2)}
    baked = made.add("AnyGPUBakeTexture", mesh=made.link(mesh), **given, texture_size=64, view_size=128)
    detailed = made.add(
        "AnyGPUProjectPicture", mesh=made.link(baked), front=made.link(made.add("LoadImage", image="front.png"))
    )
    made.add("SaveGLB", mesh=made.link(detailed, 3), filename_prefix="3d/all")
    Image.open(front_of(server, client)).convert("RGB").save(server.base / "input" / "front.png")
    for size in (64, 96):
        made.prompt[baked]["inputs"]["texture_size"] = size
        run = client.run(made.prompt)
        assert run.ending == "execution_success", run.message
    assert views in run.cached and any("detail on" in text for _, text in run.texts), run.texts
    assert paint_models.replayed(client, run).startswith("the same texture, bit for bit")
    made.prompt[larger[1]]["inputs"]["image"] = made.link(views)
    assert "without the views as AnyGPU Paint Views gave them;" in paint_models.replayed(
        client, client.run(made.prompt)
    )


def front_of(server: Server, client: Client):
    """A picture of the mesh from the front, its normals on white."""
    made = Graph()
    mesh = made.add("AnyGPULoadMesh", mesh_file=paint_models.MESH)
    maps = made.add("AnyGPURenderViews", mesh=made.link(mesh), size=128)
    front = made.add("ImageFromBatch", image=made.link(maps), batch_index=0, length=1)
    made.add("SaveImage", images=made.link(front), filename_prefix="front")
    run = client.run(made.prompt)
    assert run.ending == "execution_success", run.message
    (record,) = run.files()
    return server.output(record)
