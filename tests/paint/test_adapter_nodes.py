"""MV-Adapter by its nodes on a small ComfyUI: step by step, in one node, and what the side bar tells of it."""

import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from anygpu.compat.errors import CheckpointError, InputError
from anygpu.paint.baking import projection
from anygpu.paint.baking.projection import Projected
from anygpu.paint.geometry import pose as poses
from anygpu.paint.texturing import TEXEL_BYTES, Texture
from small_comfyui import comfyui, run

from paint import mv_stored, stored
from paint.shapes import box

MASK = torch.zeros(1, 48, 64)
MASK[:, :4] = 1
IMAGE = torch.rand(1, 48, 64, 3, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def core(tmp_path_factory):
    base = tmp_path_factory.mktemp("comfyui")
    with comfyui(base) as module:
        models = base / "models"
        for folder in ("checkpoints", "diffusion_models", "diffusers", "loras"):
            (models / folder).mkdir(parents=True, exist_ok=True)
        mv_stored.single_file("sdxl", models / "checkpoints" / "mine.safetensors")
        mv_stored.folder("sd21", models / "diffusers", "mine-too")
        mv_stored.tokenizer(base / "sd1_tokenizer")  # as ComfyUI has it
        for key in mv_stored.FILES:
            mv_stored.adapter_file(*key, models / "diffusion_models")
        stored.checkpoint("paint", models / "diffusers")
        nodes = module("nodes")
        yield SimpleNamespace(
            run=lambda name, **given: run(nodes, name, **given),
            said=lambda: module("host.progress").PromptServer.instance.texts[-1][0],
            folders=module("host.folders"),
            meshes=module("host.meshes"),
            memory=module("host.memory_manager"),
            nodes=nodes,
        )


def mesh():
    given = box()
    return SimpleNamespace(
        vertices=given.vertices[None], faces=given.faces[None], uvs=given.uvs[None], vertex_counts=None
    )


def loaded(core, variant="ig2mv", base="sdxl", **chosen):
    model = "mine.safetensors" if base == "sdxl" else "mine-too"
    given = {"model": model, "adapter": mv_stored.FILES[variant, base], "precision": "fp32", **chosen}
    return core.run("LoadMVAdapter", **given).result[0]


@pytest.mark.parametrize(("occluded", "metal"), [(32, 2), (2, 32), (8, 8)])
def test_occlusion_and_metal_of_different_sizes_both_keep_their_detail(core, occluded, metal):
    maps = {name: torch.rand(side, side, 3) for name, side in (("occlusion", occluded), ("metallicRoughness", metal))}
    loaded = core.meshes.to_core(replace(box(), maps=maps))
    kept, side = loaded.metallic_roughness[0], max(occluded, metal)
    assert loaded.occlusion_in_mr and kept.shape == (side, side, 3) and kept.is_contiguous()
    if occluded == side:
        assert torch.equal(kept[..., 0], maps["occlusion"][..., 0])
    if metal == side:
        assert torch.equal(kept[..., 1:], maps["metallicRoughness"][..., 1:])
    painted = Texture(torch.rand(4, 4, 3), *torch.rand(2, 4, 4), torch.ones(4, 4).bool(), share=1.0, notes=())
    after = core.meshes.with_texture(loaded, painted).metallic_roughness[0]
    assert torch.equal(after[..., 0], kept[..., 0]), "what is painted smaller takes no detail away"


def test_what_is_there_is_listed(core):
    assert {"mine.safetensors", "mine-too"} == set(core.folders.base_models())
    assert set(core.folders.adapters()) == set(mv_stored.FILES.values())
    with pytest.raises(CheckpointError, match=r"no MV-Adapter 'other.safetensors' in .*; expected a file such as"):
        core.run("LoadMVAdapter", model="mine.safetensors", adapter="other.safetensors")
    with pytest.raises(CheckpointError, match="no checkpoint 'other' in"):
        core.run("LoadMVAdapter", model="other", adapter=mv_stored.FILES["ig2mv", "sdxl"])
    kind = next(kind for kind in core.nodes.NODES if kind.GET_SCHEMA().node_id == "AnyGPULoadMVAdapter")
    stamps = [
        kind.fingerprint_inputs(model, mv_stored.FILES["ig2mv", "sdxl"]) for model in ("mine.safetensors", "mine-too")
    ]
    assert stamps[0] != stamps[1] and all(stamps)


def test_step_by_step_and_in_one_node(core, monkeypatch):
    pipeline, asked = loaded(core, base="sdxl"), []
    monkeypatch.setattr(core.memory, "make_room", lambda needed, _device: asked.append(needed))
    for name, less in (("TURNS", (0,)), ("HEIGHTS", (0,)), ("STARTS", 1), ("LAST", 2)):
        monkeypatch.setattr(poses, name, less)
    monkeypatch.setattr(projection, "SIZES", (128, 256))
    assert "ig2mv" in core.said() and "VAE fp32" in core.said()
    normals, positions, cameras, mask = core.run("RenderViews", mesh=mesh(), pipeline=pipeline, size=64).result
    assert positions[mask == 0].eq(0.5).all() and len(cameras) == 6
    given = {"pipeline": pipeline, "normals": normals, "positions": positions, "cameras": cameras, "view_size": 64}
    given |= {"image": IMAGE, "mask": MASK, "steps": 1, "prompt": "a red cat"}
    pictures, _, latent = core.run("PaintViews", **given).result
    assert pictures.shape == (6, 64, 64, 3) and latent["anygpu"]["family"] == "mv_adapter"
    again = core.run("PaintViews", **{**given, "latent": latent, "denoise": 0.5}).result[0]
    assert (again - pictures).abs().max() > 1e-3
    baked = {"mesh": mesh(), "images": pictures, "cameras": cameras, "texture_size": 64, "view_size": 128}
    textured, colour, _, _, painted, _ = core.run("BakeTexture", **baked).result
    assert torch.equal(textured.texture, colour) and asked == [TEXEL_BYTES * 64**2]
    detailed, base, projected, _ = core.run("ProjectPicture", mesh=textured, front=IMAGE, front_mask=MASK).result
    assert torch.equal(detailed.texture, base) and projected.shape == colour.shape[:3]
    alone = core.run("RenderTurntable", mesh=textured, frames=1, size=16).result[0]
    assert alone.shape == (1, 16, 16, 3) and core.said() == "1 frames of 16 pixels"
    before = copy.copy(textured)
    before.faces = torch.cat((before.faces, before.faces[:, :1, :1].expand(-1, -1, 3)), dim=1)
    both = core.run("RenderTurntable", mesh=textured, before=before, frames=1, size=16).result[0]
    assert torch.equal(both, torch.cat((alone, alone), dim=2))
    assert "1 faces without area were dropped" in core.said()
    plan = core.run("MemoryPlan", pipeline=pipeline, width=64, height=64, frames=6).result[0]
    assert "MV-Adapter ig2mv, 6 views of 64 pixels" in plan and ", with guidance" in plan.partition("\n")[0], plan
    assert colour.shape == (1, 64, 64, 3) and painted.mean() > 0.4
    one = {"mesh": mesh(), "image": IMAGE, "mask": MASK, "pipeline": pipeline, "view_size": 64, "texture_size": 64}
    _, base_color, _, _, views, _ = core.run("TextureMesh", **one, steps=1, prompt="a red cat").result
    assert torch.equal(views, pictures) and base_color.shape == (1, 64, 64, 3)
    assert "% of the surface painted" in core.said().partition("\n")[0]


def test_the_factor_of_the_base_colour_is_in_what_is_shown_and_projected_on(core, monkeypatch):
    """glTF's factor is linear, as core's vertex colours are; a texture is not."""
    given, red = mesh(), [1.0, 0.25, 0.0]
    shown = {"frames": 1, "size": 32, "elevation": 0.0, "background": 0.0}

    def middle(texture=None, vertex_colors=None, **material):
        given.texture, given.vertex_colors, given.material = texture, vertex_colors, material
        return core.run("RenderTurntable", mesh=given, **shown).result[0][0, 16, 16]

    wanted = middle(torch.tensor(red).pow(1 / 2.2).expand(1, 4, 4, 3))
    tint, grey = [*red, 0.5], torch.full((1, 4, 4, 3), 0.5)
    torch.testing.assert_close(middle(torch.ones(1, 4, 4, 3), base_color_factor=tint), wanted)
    torch.testing.assert_close(middle(base_color_factor=tint), wanted)
    torch.testing.assert_close(middle(None, torch.tensor(red).expand(1, len(box().vertices), 3)), wanted)
    monkeypatch.setattr("anygpu.paint.texturing.with_detail", lambda _, colour, *__: Projected(colour, colour[0], ()))
    middle(grey, base_color_factor=tint, roughness_factor=0.5)
    made = core.run("ProjectPicture", mesh=given, front=IMAGE).result[0]
    torch.testing.assert_close(made.texture, grey * torch.tensor(red).pow(1 / 2.2))
    assert made.material == {"base_color_factor": [1.0, 1.0, 1.0, 0.5], "roughness_factor": 0.5}
    assert given.material["base_color_factor"] == tint and torch.equal(given.texture, grey)


@pytest.mark.parametrize(("scheduler", "solver"), [("auto", "euler_ancestral"), ("ddim", "ddim")])
def test_delight_has_its_publisher_s_solver(core, monkeypatch, scheduler, solver):
    def made(_pipeline, pictures, chosen, *_):
        assert chosen.scheduler == solver and len(pictures) == 1
        return torch.zeros(1, chosen.size, chosen.size, 3)

    monkeypatch.setattr("anygpu.paint.sampling.delight.delight_images", made)
    core.run("DelightImage", pipeline=SimpleNamespace(request=None), image=IMAGE, scheduler=scheduler)
    assert core.said() == "1 of 512x512"


@pytest.mark.full
def test_the_normals_of_a_mesh_reach_the_maps(core):
    own, pipeline = torch.tensor([0.0, 0.0, 1.0]).repeat(1, len(box().vertices), 1), loaded(core, "tg2mv")
    maps = []
    for normals in (None, own, own[:, 1:]):  # of other vertices: the last are not taken
        given = mesh()
        given.normals = normals
        maps.append(core.run("RenderViews", mesh=given, pipeline=pipeline, size=64).result[0])
    assert (maps[1] == torch.tensor([0.5, 0.0, 0.5])).all(-1).any() and not torch.equal(maps[0], maps[1])
    assert torch.equal(maps[0], maps[2])
    assert torch.equal(core.meshes.to_core(replace(box(), normals=own[0])).normals, own)


def test_a_clean_mesh_keeps_the_colours_and_the_material_that_it_had_without_uvs(core):
    given, colours = mesh(), torch.rand(1, len(box().vertices) + 1, 4)
    given.uvs, given.vertex_colors, given.material = None, colours, {"roughness_factor": 0.5}
    given.vertices = torch.cat((torch.full((1, 1, 3), 9.0), given.vertices), dim=1)  # the first is on no face
    given.faces = given.faces + 1
    made = core.run("CleanMesh", mesh=given, floaters=0.0, degenerate=True, broken=True).result[0]
    assert torch.equal(made.vertex_colors, colours[:, 1:]) and made.material == given.material


@pytest.mark.full
def test_words_alone_texture_a_mesh(core):
    pipeline = loaded(core, "tg2mv", "sd21")
    given = {"mesh": mesh(), "pipeline": pipeline, "view_size": 64, "texture_size": 64, "steps": 1}
    with pytest.raises(InputError, match="no prompt for tg2mv"):
        core.run("TextureMesh", **given)
    views = [core.run("TextureMesh", **given, prompt=words).result[4] for words in ("a red cat", "a blue dog")]
    assert (views[0] - views[1]).abs().max() > 1e-3


def test_a_picture_is_asked_for_where_it_is_needed(core):
    hunyuan = core.run("LoadPaintPipeline", model=stored.FOLDERS["paint"], precision="fp32").result[0]
    for pipeline, name in ((loaded(core), "mv_adapter ig2mv"), (hunyuan, "paint v2-0")):
        for shape in (mesh(), SimpleNamespace(**{**vars(mesh()), "uvs": None})):  # which unwrapping would come before
            with pytest.raises(InputError, match=f"no image for {name}"):
                core.run("TextureMesh", mesh=shape, pipeline=pipeline, view_size=64, texture_size=64)
    maps = core.run("RenderViews", mesh=mesh(), pipeline=hunyuan, size=64).result[:3]
    with pytest.raises(InputError, match="cameras of another family for mv_adapter"):
        given = dict(zip(("normals", "positions", "cameras"), maps, strict=True))
        core.run("PaintViews", pipeline=loaded(core), image=IMAGE, view_size=64, steps=1, **given)


def test_the_first_wrong_choice_is_named(core):
    with pytest.raises(InputError, match="no core_clip and no core_vae; expected core's MODEL, CLIP and VAE"):
        loaded(core, core_model=object())
    with pytest.raises(CheckpointError, match="is made for sd21, and the checkpoint is sdxl"):
        core.run("LoadMVAdapter", model="mine.safetensors", adapter=mv_stored.FILES["ig2mv", "sd21"])
