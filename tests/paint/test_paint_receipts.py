"""A texture's receipt in its GLB: read back, painted again bit for bit, and what is refused."""

import json
import struct
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from anygpu.compat.errors import CheckpointError, InputError
from anygpu.paint import jobs
from anygpu.paint.adapter_loading import AdapterRequest, load_adapter
from anygpu.paint.baking import projection
from anygpu.paint.baking.bake import BakeSettings
from anygpu.paint.choices import PLACES
from anygpu.paint.geometry.cameras import camera_table
from anygpu.paint.geometry.mesh import Mesh, load_mesh, write_glb
from anygpu.paint.loading import PaintRequest, load_paint
from anygpu.paint.pictures import cut_out
from anygpu.paint.sampling.delight import DelightSettings, delight_images
from anygpu.paint.sampling.painting import PaintInputs, PaintSettings
from anygpu.paint.step_receipts import baked_record, marked, painted_record, projected_record, remember, sign
from anygpu.paint.texturing import (
    OneStep,
    Texture,
    maps_of,
    painted_views,
    references_of,
    texture_of,
    textured,
    with_detail,
)
from anygpu.pipelines.base import Silent
from anygpu.pipelines.movie import read_frames, transparency
from anygpu.pipelines.records.places import Machine, Places
from PIL import Image
from published import paint_loops

from paint import mv_stored, stored
from paint.shapes import box

SETTINGS = OneStep(PaintSettings(64, 1, seed=5), BakeSettings(64, 128), prompt="a red cat")


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A folder with a checkpoint, adapters of both kinds, and a cut-out picture."""
    root = tmp_path_factory.mktemp("receipts")
    mv_stored.folder("sd21", root, "mine")
    for variant in ("ig2mv", "tg2mv"):
        mv_stored.adapter_file(variant, "sd21", root)
    mv_stored.lora_file(root / "lora.safetensors", True, "sd21")
    pixels = (torch.rand(48, 64, 4, generator=torch.Generator().manual_seed(0)) * 255).byte()
    Image.fromarray(pixels.numpy(), "RGBA").save(root / "cat.png")
    return root


def machine(home: Path, enlarged=None) -> Machine:
    return Machine(Places((home,), (home,), state=home / "state"), home / "state", "cpu", enlarged=enlarged)


@pytest.fixture(scope="module")
def signed(home) -> Path:
    """The GLB of a painting as AnyGPU Texture Mesh does it, of a mesh that is in no other file."""
    lora = {"lora": home / "lora.safetensors", "lora_strength": 0.5}
    request = AdapterRequest(
        home / "mine", home / mv_stored.FILES["ig2mv", "sd21"], device="cpu", precision="fp32", **lora
    )
    pipeline, mesh = (
        load_adapter(request),
        replace(box(), uvs=torch.stack((box().uvs[:, 0], 1 - (1 - box().uvs[:, 1])), 1)),
    )
    image, mask = read_frames(home / "cat.png", 1)[0], transparency(home / "cat.png", (48, 64))
    texture, _, cameras = textured(mesh, cut_out(image, mask), pipeline, None, SETTINGS)
    asked = partial(jobs.asked_job, pipeline, None, mesh, image, mask, SETTINGS)
    receipt = jobs.receipt_of(asked, pipeline, mesh, texture, cameras, jobs.missing_of(pipeline, None, None))
    return jobs.Textured(mesh, texture, receipt).write(home / "cat.glb")


def test_a_texture_is_painted_again_bit_for_bit(home, signed):
    record = jobs.read_receipt(signed)
    assert str(home) not in str(record) and len(record["cameras"]) == 6 and "missing" not in record
    asked = record["job"]["paint"]
    assert (asked["steps"], asked["guidance"], asked["scheduler"]) == (1, 3.0, "euler_ancestral"), "as it ran"
    again = jobs.replay(signed, machine(home), Silent())
    assert again.same and again.differences == () and again.text() == "the same texture, bit for bit"
    once_more = again.rendered.write(home / "again.glb")
    assert jobs.read_receipt(once_more)["texture"] == record["texture"]
    weaker = edited(signed, home / "other.glb", {**record, "job": {**record["job"], "lora_strength": 0.0}})
    assert jobs.replay(weaker, machine(home), Silent()).same is False


def test_what_is_not_there_is_named(home, signed, tmp_path):
    record = jobs.read_receipt(signed)
    with pytest.raises(CheckpointError, match=r"no receipt in 'plain.glb'"):
        jobs.read_receipt(write_glb(tmp_path / "plain.glb", box(), torch.zeros(4, 4, 3)))
    picture = record["job"]["picture"]
    lost = {**record["job"], "picture": {**picture, "content": "0" * 32}}
    with pytest.raises(CheckpointError, match="expected content 0000"):
        jobs.replay(edited(signed, tmp_path / "a.glb", {**record, "job": lost}), machine(home), Silent())
    with pytest.raises(InputError, match=r"steps 1000000; expected 0 to 1000"):
        many = {**record["job"], "paint": {"steps": 1000000}}
        jobs.replay(edited(signed, tmp_path / "d.glb", {**record, "job": many}), machine(home), Silent())
    with pytest.raises(InputError, match="without the mask with which it was painted"):
        masked = {**record, "job": {**record["job"], "mask": "0" * 32}}
        jobs.replay(edited(signed, tmp_path / "b.glb", masked), machine(home), Silent())
    core = "core's MODEL, CLIP and VAE as one file has them"
    with pytest.raises(InputError, match=f"a receipt without {core}"):
        jobs.replay(
            edited(
                signed, tmp_path / "c.glb", {**record, "missing": ["core's MODEL, CLIP and VAE as one file has them"]}
            ),
            machine(home),
            Silent(),
        )


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Iterator[Path]:
    """A folder with a paint and a delight model, which needs a text encoder, and a cut-out picture."""
    root = tmp_path_factory.mktemp("steps")
    paint_loops.delight(root), stored.checkpoint("paint", root)
    for seed, name in enumerate(("cat", "tail")):
        pixels = (torch.rand(48, 64, 4, generator=torch.Generator().manual_seed(seed)) * 255).byte()
        Image.fromarray(pixels.numpy(), "RGBA").save(root / f"{name}.png")
    (root / "double.pth").write_bytes(b"enlarge")
    maps, _, _ = maps_of(box(), camera_table("0, 180", "0, 0", "1, 1"), size=96)
    for place, colours, seen in zip(("front", "back"), maps.position, maps.mask, strict=True):
        pixels = (torch.cat((colours, seen[..., None].float()), -1) * 255).byte()
        Image.fromarray(pixels.numpy(), "RGBA").save(root / f"{place}.png")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(projection, "SIZES", (128, 256))
        yield root


def doubled(file: Path, views: torch.Tensor) -> torch.Tensor:
    """Views (V, S, S, 3) enlarged by an "upscale model", whose file is read."""
    return views.repeat_interleave(2, 1).repeat_interleave(2, 2) * len(file.read_bytes()) / 8


@cache
def steps_of(models: Path, evened: bool, more: bool) -> tuple[Mesh, torch.Tensor, dict]:
    """The mesh that separate nodes paint, its views, and what marks them: cameras and maps that one node has not."""
    pipeline, delight = (
        load_paint(PaintRequest(models / stored.FOLDERS[kind], device="cpu", precision="fp32"))
        for kind in ("paint", "delight")
    )
    files = [models / f"{name}.png" for name in ("cat", "tail")[: 1 + more]]
    image = torch.cat([read_frames(file, 1)[0] for file in files])
    mask = torch.cat([transparency(file, (48, 64)) for file in files])
    mesh = replace(box(), uvs=torch.stack((box().uvs[:, 0], 1 - (1 - box().uvs[:, 1])), 1))
    maps, table, _ = maps_of(mesh, camera_table("0, 120", "20, 0", "1, 0.5", 1.3), "paint", "flat", 96)
    for each in (maps.normal, maps.position):
        marked(each, "maps", mesh=mesh, size=96, shading="flat", cameras=table)
    settings, given = DelightSettings(steps=1, size=64, seed=3), (image, mask)
    if evened:
        light = delight_images(delight, cut_out(*given), settings, True, Silent())
        facts = {"request": delight.request, "settings": settings, "recenter": True}
        given = marked(light, "evened", image=image, mask=mask, **facts), None
    asked = OneStep(PaintSettings(64, 2, 1.5, seed=5), prompt="", cameras=table)
    pictures = references_of(pipeline, cut_out(*given), None, settings, Silent())
    painted = painted_views(pipeline, PaintInputs(pictures, maps.normal, maps.position, table), asked.paint, Silent())
    named = dict(zip(("normals", "positions", "image", "mask"), (maps.normal, maps.position, *given), strict=True))
    return (
        mesh,
        painted.views,
        {"record": painted_record(pipeline, named, asked, None), "both": False, "cameras": table},
    )


def test_light_taken_out_of_a_picture_that_gets_another_mask_is_missing(models: Path):
    pipeline = load_paint(PaintRequest(models / stored.FOLDERS["paint"], device="cpu", precision="fp32"))
    facts = {"request": pipeline.request, "settings": DelightSettings(), "recenter": True, "image": None, "mask": None}
    image = marked(torch.rand(1, 8, 8, 3), "evened", **facts)
    others = {"image": image, "normals": None, "positions": None}
    masks, asked = (None, torch.ones(1, 8, 8)), OneStep(PaintSettings(64, 1))
    said = [painted_record(pipeline, {**others, "mask": mask}, asked, None) for mask in masks]
    assert ["how light was taken out of its picture" in each["missing"] for each in said] == [False, True]


@pytest.mark.full
def test_inputs_without_effect_are_not_missing_and_the_vae_of_delight_is(models: Path):
    kinds = ("paint", "delight")
    paint, light = (load_paint(PaintRequest(models / stored.FOLDERS[kind], device="cpu")) for kind in kinds)
    image, dino, asked = torch.rand(1, 8, 8, 3), torch.rand(1, 2, 1536), OneStep(PaintSettings(64))
    other = replace(light, request=replace(light.request, vae=models))
    pbr = replace(paint, family="paint_pbr", variant="v2-1")
    for pipeline, delight, states, missing in (
        (paint, light, dino, []),
        (paint, other, None, ["a delight model of another precision or VAE"]),
        (pbr, other, None, []),
        (pbr, None, dino, ["states of another image encoder"]),
    ):
        assert jobs.missing_of(pipeline, delight, states) == missing
        job = jobs.asked_job(pipeline, delight, box(), image, None, asked)
        assert (job.delight is not None) == (pipeline is paint)
    for denoise, missing in ((0.5, True), (1.0, False)):
        start = replace(asked, paint=PaintSettings(64, latents=torch.zeros(6, 4, 8, 8), denoise=denoise))
        record = painted_record(paint, dict.fromkeys(("image", "mask", "normals", "positions")), start, None)
        assert ("the latents that it started from" in record["missing"]) == missing


def in_steps(models: Path, evened: bool, change=lambda made: made, more: bool = False) -> dict:
    """The receipt in ``steps.glb`` of separate nodes, with a bake that one node has not."""
    mesh, views, facts = steps_of(models, evened, more)
    table, views, baking = facts["cameras"], marked(views.clone(), "views", **facts), BakeSettings(64, 128, "scatter")
    remember("graph" * more, facts)
    larger = ("graph", models / "double.pth") if more else None
    views = doubled(larger[1], views) if more else change(views)
    texture = texture_of(mesh, table, views, None, baking)
    record = baked_record(views, None, mesh, table, baking, texture, larger)
    for place in ("front", "back") if more else ():
        texture, record = detailed(models, mesh, texture, record, place)
    jobs.Textured(mesh, texture, record).write(models / "steps.glb")
    return record


def detailed(models: Path, mesh: Mesh, texture: Texture, record: dict, place: str) -> tuple[Texture, dict]:
    """A texture and its receipt after AnyGPU Project Picture with the file of a ``place``, its camera given."""
    before, after = (SimpleNamespace(texture=texture.colour[None].clone(), metallic_roughness=None) for _ in range(2))
    sign(before, record, texture)
    file, table = models / f"{place}.png", camera_table([PLACES[place]], [0.0], [1.0])
    given = {place: read_frames(file, 1)[0], f"{place}_mask": transparency(file, (96, 96))}
    made = with_detail(mesh, texture.colour, {place: cut_out(*given.values())}, table)
    assert made.weight.any(), made.notes
    after.texture = made.texture[None]
    return replace(texture, colour=made.texture), projected_record(before, after, mesh, given, table)


@pytest.mark.parametrize("evened", [False, pytest.param(True, marks=pytest.mark.full)])
def test_what_separate_nodes_make_is_painted_again_bit_for_bit(models, evened):
    record = in_steps(models, evened)
    asked = record["job"]
    assert "missing" not in record and (asked["maps"], asked["shading"], asked["ortho_scale"]) == (96, "flat", 1.3)
    assert ("delight" in asked) == evened and len(asked["views"]) == 2
    again = jobs.replay(models / "steps.glb", machine(models), Silent())
    assert again.same and again.differences == ()
    assert {name: again.rendered.receipt[name] for name in ("texture", "job")} == {
        name: record[name] for name in ("texture", "job")
    }


def test_several_pictures_enlarged_views_and_detail_are_repeated(models):
    record = in_steps(models, False, more=True)
    job = record["job"]
    assert "missing" not in record and str(models) not in str(record)
    assert len(job["more_pictures"]) == 1 and job["upscaler"]["name"] == "double.pth"
    assert [list(each["pictures"]) for each in job["details"]] == [["front"], ["back"]]
    again = jobs.replay(models / "steps.glb", machine(models, doubled), Silent())
    assert again.same and again.differences == () and again.rendered.receipt["job"] == job
    fewer = edited(models / "steps.glb", models / "less.glb", {**record, "job": {**job, "more_pictures": []}})
    with pytest.raises(InputError, match="without the mask with which it was painted"):
        jobs.replay(fewer, machine(models, doubled), Silent())
    with pytest.raises(InputError, match=r"views enlarged by 'double.pth'; expected ComfyUI"):
        jobs.replay(models / "steps.glb", machine(models), Silent())


@pytest.mark.full
def test_detail_on_another_texture_or_mesh_is_named_and_not_repeated(models):
    record, given = in_steps(models, False), {"front": torch.zeros(1, 8, 8, 3)}
    mesh = load_mesh(models / "steps.glb")[0]
    texture = Texture(torch.full((64, 64, 3), 0.5), None, None, torch.ones(64, 64, dtype=torch.bool), 1.0, ())
    other, moved = "the texture as AnyGPU made it", replace(mesh, vertices=mesh.vertices * 2)
    for changed, shape, missing in (
        ({"texture": torch.zeros(1, 64, 64, 3)}, mesh, other),
        ({"metallic_roughness": torch.ones(1, 2, 2, 3)}, mesh, other),
        ({}, moved, "the mesh that was painted"),
    ):
        before, after = (SimpleNamespace(texture=texture.colour[None] * 1, metallic_roughness=None) for _ in range(2))
        sign(before, record, texture)
        vars(before).update(changed)
        assert projected_record(before, after, shape, given, None)["missing"] == [missing]


@pytest.mark.parametrize("change", [torch.clone, lambda made: made.mul_(0.5), lambda made: marked(made, "maps")])
def test_views_that_other_nodes_changed_are_named_and_not_repeated(models, change):
    assert in_steps(models, False, change)["missing"] == ["the views as AnyGPU Paint Views gave them"]
    with pytest.raises(InputError, match="a receipt without the views as AnyGPU Paint Views gave them"):
        jobs.replay(models / "steps.glb", machine(models), Silent())


@pytest.mark.parametrize(
    "extras", [[], "x", {"anygpu": 1}, {"anygpu": "{" * 50000}, {"anygpu": '{"anygpu_receipt": 99}'}]
)
def test_a_foreign_header_is_refused_in_one_line(signed, tmp_path, extras):
    with pytest.raises((CheckpointError, InputError)) as caught:
        jobs.read_receipt(edited(signed, tmp_path / "foreign.glb", extras))
    assert len(str(caught.value).splitlines()) == 1


def edited(path: Path, target: Path, extras: object) -> Path:
    """A copy of a GLB whose receipt is another, or whose extras are, where they are no receipt."""
    data = path.read_bytes()
    (length,) = struct.unpack_from("<I", data, 12)
    header = json.loads(data[20 : 20 + length])
    receipt = isinstance(extras, dict) and "anygpu" not in extras
    header["asset"]["extras"] = {"anygpu": json.dumps(extras)} if receipt else extras
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 4)
    body = data[20 + length :]
    target.write_bytes(
        struct.pack("<4sIIII", b"glTF", 2, 20 + len(text) + len(body), len(text), 0x4E4F534A) + text + body
    )
    return target
