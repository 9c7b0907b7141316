"""Meshes are checked where they enter: what cannot be painted is said in one line, the rest is put into the frame."""

import json
import struct
import sys
import types
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from anygpu.compat.errors import CheckpointError, InputError, MissingPackageError
from anygpu.paint.geometry import mesh as meshes
from anygpu.paint.geometry.mesh import Mesh, Surface, load_mesh, numbered, welded, welded_normals, write_glb
from anygpu.paint.geometry.turntable import looked_up
from hostile.bombs import glb
from paint.shapes import box, sphere
from PIL import Image

BOX = box()


def changed(**parts) -> Mesh:
    return Mesh(**({"vertices": BOX.vertices, "faces": BOX.faces, "uvs": BOX.uvs} | parts))


def with_value(tensor: torch.Tensor, value: float) -> torch.Tensor:
    other = tensor.clone()
    other[0, 0] = value
    return other


def test_a_file_s_material_comes_with_the_mesh_and_what_is_lost_is_named(tmp_path):
    trimesh = pytest.importorskip("trimesh")
    colours = {"baseColor": (200, 10, 10), "metallicRoughness": (0, 100, 50), "normal": (128, 120, 255)}
    colours |= {"occlusion": (77, 0, 0), "emissive": (1, 2, 3)}

    def part(offset, without=None, **factors):
        chosen = {name: colour for name, colour in colours.items() if name != without}
        pictures = {f"{name}Texture": Image.new("RGB", (4, 8), colour) for name, colour in chosen.items()}
        material = trimesh.visual.material.PBRMaterial(**pictures, **factors)
        visual = trimesh.visual.TextureVisuals(uv=BOX.uvs.numpy(), material=material)
        moved = (BOX.vertices + torch.tensor(offset)).numpy()
        return trimesh.Trimesh(moved, BOX.faces.numpy(), visual=visual, process=False)

    one = part((0.0, 0.0, 0.0), metallicFactor=0.25, baseColorFactor=[255, 0, 51, 255])
    (tmp_path / "one.glb").write_bytes(one.export(file_type="glb"))
    mesh, notes = load_mesh(tmp_path / "one.glb")
    assert {name: tuple((values[0, 0] * 255).round().int().tolist()) for name, values in mesh.maps.items()} == colours
    assert mesh.maps["normal"].shape == (8, 4, 3)
    assert mesh.factors["metallicFactor"] == 0.25
    assert mesh.factors["baseColorFactor"] == [1, 0, 0.2, 1]
    assert not any("textures" in note for note in notes)
    painted, _ = load_mesh(write_glb(tmp_path / "painted.glb", mesh, torch.ones(4, 4, 3)))
    assert painted.maps["baseColor"].eq(1).all() and painted.factors["metallicFactor"] == 0.25
    assert all(torch.equal(painted.maps[name], mesh.maps[name]) for name in colours if name != "baseColor")
    two = trimesh.Scene([one, part((3.0, 0.0, 0.0), without="normal", roughnessFactor=0.5)])
    (tmp_path / "two.glb").write_bytes(two.export(file_type="glb"))
    mesh, notes = load_mesh(tmp_path / "two.glb")
    assert {"baseColor", "metallicRoughness"} <= set(mesh.maps) and "normal" not in mesh.maps
    assert any(note.startswith("textures that are damaged, on") and note.endswith("left out: normal") for note in notes)


@pytest.mark.parametrize(
    ("first", "second", "note"),
    [
        (None, 1.0, "UVs were dropped: 80% of the surface has none"),
        (3.0, 1.0, "UVs were dropped: some lie outside 0 to 1, and several materials cannot be joined there"),
        (1.0, 1.0, ""),
    ],
)
def test_uvs_that_joining_would_spoil_are_dropped_and_said(tmp_path, first, second, note):
    """trimesh gives a part without UVs the middle of the texture, and wraps each vertex by itself."""
    trimesh = pytest.importorskip("trimesh")
    parts = []
    for colour, side, tiles in (("red", 2.0, first), ("blue", 1.0, second)):
        material = trimesh.visual.material.PBRMaterial(baseColorTexture=Image.new("RGB", (4, 4), colour))
        uv = None if tiles is None else BOX.uvs.numpy() * tiles
        visual = trimesh.visual.TextureVisuals(uv=uv, material=material)
        parts.append(trimesh.Trimesh(side * BOX.vertices.numpy(), BOX.faces.numpy(), visual=visual, process=False))
    (tmp_path / "two.glb").write_bytes(trimesh.Scene(parts).export(file_type="glb"))
    mesh, notes = load_mesh(tmp_path / "two.glb")
    assert (mesh.uvs is None) == (not mesh.maps) == bool(note) == any(line == note for line in notes)
    assert notes[0].endswith("no UVs" if note else "with UVs")


def two_boxes(path: Path, **materials) -> Path:
    """A GLB of two boxes, the second twice as large; each value is what their materials have of one setting."""
    trimesh = pytest.importorskip("trimesh")
    parts = []
    for at in range(2):
        material = trimesh.visual.material.PBRMaterial(**{name: values[at] for name, values in materials.items()})
        visual = trimesh.visual.TextureVisuals(uv=BOX.uvs.numpy() * [1, -1] + [0, 1], material=material)
        parts.append(trimesh.Trimesh((1 + at) * BOX.vertices, BOX.faces, visual=visual, process=False))
    path.write_bytes(trimesh.Scene(parts).export(file_type="glb"))
    return path


@pytest.mark.parametrize("sizes", [((16, 16), (8, 8)), ((512, 512), (512, 256)), ((64, 64), (64, 64))])
def test_joined_textures_are_found_where_the_uvs_say_or_dropped(tmp_path, sizes):
    """trimesh may put one of them beside the picture that it makes of all."""
    pictures = [Image.new("RGB", size, colour) for size, colour in zip(sizes, ("red", "blue"), strict=True)]
    mesh, notes = load_mesh(two_boxes(tmp_path / "two.glb", baseColorTexture=pictures))
    assert (mesh.uvs is None) == (not mesh.maps) == any("several materials cannot be joined" in note for note in notes)
    if mesh.uvs is not None:
        colours = looked_up(mesh.maps["baseColor"], Surface.of(mesh).with_uvs()[1])
        second = mesh.vertices.abs().amax(1) > 1.5 * BOX.vertices.abs().max()
        assert second.sum() == 24 and torch.equal(colours[:, 2] > colours[:, 0], second), "blue"


def test_joined_materials_keep_what_their_factors_and_textures_say(tmp_path):
    """glTF 2.0, 3.9: factors multiply the linear colour, roughness is in green, metal in blue, and occlusion in red."""
    given = {"baseColorTexture": (200, 60, 10), "occlusionTexture": (255, 51, 0)}
    given["metallicRoughnessTexture"] = (40, 200, 100)
    pictures = {name: [Image.new("RGB", (16, 16), colour)] * 2 for name, colour in given.items()}
    factors = [[255, 255, 255, 255], [128, 255, 255, 255]]
    pictures |= {"baseColorFactor": factors, "roughnessFactor": [1.0, 0.5], "metallicFactor": [1.0, 0.25]}
    mesh, _ = load_mesh(two_boxes(tmp_path / "two.glb", **pictures, name=["a", "b"]))
    colours = (looked_up(mesh.maps["baseColor"], mesh.uvs) * 255).round().int().unique(dim=0).tolist()
    assert colours == [[round(200 * (128 / 255) ** (1 / 2.2)), 60, 10], [200, 60, 10]]
    rough = (looked_up(mesh.maps["metallicRoughness"], mesh.uvs) * 255).round().int()[:, 1:].unique(dim=0).tolist()
    assert rough == [[100, 25], [200, 100]]
    assert "occlusion" not in mesh.maps or mesh.maps["occlusion"].eq(1).all()


def test_an_obj_without_a_material_has_no_picture(tmp_path):
    """trimesh invents one of two by two grey pixels."""
    lines = [f"v {x} {y} {z}" for x, y, z in BOX.vertices.tolist()] + [f"vt {u} {v}" for u, v in BOX.uvs.tolist()]
    lines += ["f " + " ".join(f"{corner + 1}/{corner + 1}" for corner in face) for face in BOX.faces.tolist()]
    (tmp_path / "box.obj").write_text("\n".join(lines))
    mesh, _ = load_mesh(tmp_path / "box.obj")
    assert mesh.uvs is not None and not mesh.maps


def test_uvs_of_materials_without_a_texture_stay_as_large_as_they_are(tmp_path):
    """trimesh makes a pixel of each material's colour, and as small a place for its faces."""
    mesh, _ = load_mesh(two_boxes(tmp_path / "two.glb", baseColorFactor=[[255, 0, 0, 255], [0, 0, 255, 255]]))
    assert not mesh.maps
    torch.testing.assert_close(mesh.uvs, BOX.uvs.repeat(2, 1))


def test_the_frame_is_the_published_one():
    shifted = changed(vertices=BOX.vertices * torch.tensor([3.0, 1.0, 1.0]) + torch.tensor([5.0, -2.0, 9.0]))
    surface = Surface.of(shifted)
    assert surface.vertices.norm(dim=1).max() == pytest.approx(0.575)
    assert (surface.vertices.amax(0) + surface.vertices.amin(0)).abs().max() < 1e-6
    back = surface.vertices.double() / surface.scale + surface.centre
    torch.testing.assert_close(back.float(), shifted.vertices)


@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1e6, 1e30])
def test_any_scale_gives_the_same_surface(scale):
    torch.testing.assert_close(Surface.of(changed(vertices=BOX.vertices * scale)).vertices, Surface.of(BOX).vertices)


def test_far_from_the_origin_is_said_when_digits_are_missing():
    near, far = (Surface.of(changed(vertices=BOX.vertices + torch.tensor([shift, 0, 0]))) for shift in (50.0, 40_000.0))
    assert near.notes == ()
    assert "single precision is too coarse" in far.notes[0]
    torch.testing.assert_close(near.vertices, Surface.of(BOX).vertices, atol=1e-5, rtol=0)
    precise = Surface.of(changed(vertices=BOX.vertices.double() + 40_000.0))
    assert precise.notes == ()
    torch.testing.assert_close(precise.vertices, Surface.of(BOX).vertices)


@pytest.mark.parametrize(
    ("mesh", "text"),
    [
        (
            changed(vertices=torch.zeros(0, 3), faces=torch.zeros(0, 3, dtype=torch.long), uvs=None),
            "an empty mesh: 0 vertices",
        ),
        (changed(faces=torch.zeros(0, 3, dtype=torch.long)), "24 vertices, 0 faces"),
        (changed(vertices=BOX.vertices[None]), r"vertices \(1, 24, 3\)"),
        (changed(faces=torch.zeros(5, 4, dtype=torch.long)), r"faces \(5, 4\)"),
        (changed(vertices=with_value(BOX.vertices, torch.nan)), "1 of 24 vertices are NaN"),
        (changed(vertices=with_value(BOX.vertices, torch.inf)), "NaN or infinite"),
        (changed(faces=BOX.faces + 1), "name vertices 1 to 24; expected 0 to 23"),
        (changed(faces=BOX.faces - 1), "name vertices -1"),
        (changed(vertices=torch.ones(24, 3)), "all in one place"),
        (changed(vertices=BOX.vertices[:, :1].expand(-1, 3)), "12 faces have no area"),
        (changed(uvs=BOX.uvs[:3]), r"UVs of shape \(3, 2\) for 24 vertices"),
    ],
)
def test_what_is_no_surface_is_refused(mesh, text):
    with pytest.raises(InputError, match=text):
        Surface.of(mesh)


@pytest.mark.parametrize(
    ("uvs", "text"),
    [
        (None, "a mesh without UVs"),
        (with_value(BOX.uvs, torch.nan), "UVs that are NaN"),
        (BOX.uvs * 3, "UVs from .* to 2.98"),
        (BOX.uvs - 0.5, "UVs from -0.49"),
        (torch.full((24, 2), 0.5), "UVs without area"),
    ],
)
def test_uvs_that_cannot_be_painted_are_refused(uvs, text):
    surface = Surface.of(changed(uvs=uvs))
    with pytest.raises(InputError, match=f"{text}.*Unwrap Mesh UVs"):
        surface.with_uvs()


def test_rounding_of_uvs_is_forgiven_and_unused_vertices_do_not_matter():
    vertices = torch.cat((BOX.vertices, torch.full((1, 3), 100.0)))
    uvs = torch.cat(
        (
            (BOX.uvs - BOX.uvs.amin(0)) / (BOX.uvs.amax(0) - BOX.uvs.amin(0)) * 1.001 - 0.0005,
            torch.full((1, 2), torch.nan),
        )
    )
    surface, used = Surface.of(Mesh(vertices, BOX.faces, uvs)).with_uvs()
    assert (used[:-1].min(), used[:-1].max()) == (0, 1)
    torch.testing.assert_close(surface.vertices[:-1], Surface.of(BOX).vertices)


def test_faces_without_area_are_left_out_and_said():
    repeated, line = torch.tensor([[3, 3, 1]]), torch.tensor([[24, 25, 26]])
    vertices = torch.cat((BOX.vertices, torch.linspace(0, 0.9, 3)[:, None].expand(-1, 3)))
    surface = Surface.of(Mesh(vertices, torch.cat((repeated, BOX.faces, line))))
    assert torch.equal(surface.faces, BOX.faces)
    assert surface.notes == ("2 faces without area were dropped",)
    assert surface.vertex_normals.isfinite().all()


def test_slivers_that_rounding_keeps_open_are_faces_without_area():
    """Their direction is noise: a pole of a sphere may come out with its normals turned inside."""
    sliver = torch.tensor([[0.0, 0.0, 1.0], [0.0, 1e-8, 1.0], [0.5, 0.0, 1.0]])
    mesh = Mesh(torch.cat((BOX.vertices, sliver)), torch.cat((BOX.faces, torch.tensor([[24, 25, 26]]))))
    assert torch.equal(Surface.of(mesh).faces, BOX.faces)


def test_edges_of_more_than_two_faces_are_counted():
    fan = torch.tensor([[0, 1, 2], [0, 1, 3], [1, 0, 4], [0, 1, 5]])
    places = torch.rand(8, 3, generator=torch.Generator().manual_seed(0))
    more = torch.cat((fan, torch.tensor([[2, 0, 6], [0, 2, 7]])))
    for faces, count in ((fan, "1 edges"), (fan[:2], ""), (more, "2 edges")):
        notes = [note for note in Surface.of(Mesh(places, faces)).notes if "more than two faces" in note]
        assert [note.split(" belong")[0] for note in notes] == [count] * bool(count)


def test_many_faces_are_said_with_the_time(monkeypatch):
    monkeypatch.setattr(meshes, "MANY_FACES", 10)
    assert "12 faces: Unwrap Mesh UVs takes about 0 s" in Surface.of(BOX).notes[0]


def test_vertices_in_one_place_get_one_number():
    places = torch.tensor([[0.0, 0, 0], [1, 0, 0], [-0.0, 1e-7, 0], [0, 1, 0], [1, 0, 0]])
    assert welded(places).tolist() == [0, 2, 0, 1, 2]
    assert welded(BOX.vertices).unique().numel() == 8


def test_equal_rows_get_one_number():
    rows = torch.randint(-2, 3, (200, 3), generator=torch.Generator().manual_seed(0))
    wanted = rows.unique(dim=0, return_inverse=True)[1]
    assert wanted.max() > 50
    for found in (numbered(rows), numbered(rows.double() / 3)):
        assert torch.equal(found[:, None] == found, wanted[:, None] == wanted)


def test_normals_go_on_across_seams():
    mesh = sphere(16, 32)
    normals = welded_normals(mesh.vertices, mesh.faces)
    assert (normals - mesh.vertices).norm(dim=1).max() < 0.05


def test_a_vertex_far_away_that_no_face_names_changes_nothing() -> None:
    mesh = sphere(16, 32)
    more = torch.cat((mesh.vertices, torch.full((1, 3), 1e7)))
    expected = welded_normals(mesh.vertices.double(), mesh.faces)
    assert torch.equal(welded_normals(more.double(), mesh.faces)[:-1], expected)
    one, other = (welded(Surface.of(Mesh(points, mesh.faces)).vertices) for points in (mesh.vertices, more))
    assert len(one.unique()) == len(other.unique())


@pytest.mark.parametrize("name", ["shape.fbx", "shape"])
def test_other_formats_are_refused(tmp_path, name):
    with pytest.raises(InputError, match=r"mesh file .*\.glb, \.gltf, \.obj, \.ply, \.stl"):
        load_mesh(tmp_path / name)


def test_a_missing_file_is_said(tmp_path):
    with pytest.raises(CheckpointError, match="no mesh file"):
        load_mesh(tmp_path / "shape.glb")


def test_without_trimesh_the_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "trimesh", None)
    (tmp_path / "shape.obj").write_text("v 0 0 0\n")
    with pytest.raises(MissingPackageError, match="trimesh"):
        load_mesh(tmp_path / "shape.obj")
    with pytest.raises(MissingPackageError, match="trimesh"):
        write_glb(tmp_path / "shape.glb", BOX, torch.zeros(2, 2, 3))


def pretend(monkeypatch: pytest.MonkeyPatch, pipeline: object) -> None:
    """A trimesh that reads ``pipeline`` from every file."""

    def load_scene(path, process, resolver):
        if isinstance(pipeline, Exception):
            raise pipeline
        graph = types.SimpleNamespace(nodes_geometry=())
        parts = {"geometry": {}, "delete_geometry": lambda names: None}
        return types.SimpleNamespace(to_mesh=lambda: pipeline, graph=graph, **parts)

    monkeypatch.setattr(pytest.importorskip("trimesh"), "load_scene", load_scene)


def test_uvs_are_turned_to_count_downwards(tmp_path, monkeypatch):
    uvs = [[0.0, 0.25], [0.5, 1.0], [1.0, 0.0]]
    shape = types.SimpleNamespace(
        vertices=torch.eye(3).tolist(), faces=[[0, 1, 2]], visual=types.SimpleNamespace(uv=uvs)
    )
    pretend(monkeypatch, shape)
    (tmp_path / "shape.glb").write_bytes(b"")
    mesh, notes = load_mesh(tmp_path / "shape.glb")
    assert mesh.uvs is not None
    assert mesh.uvs.tolist() == [[0.0, 0.75], [0.5, 0.0], [1.0, 1.0]]
    assert notes == ("1 faces, 3 vertices, with UVs",)


@pytest.mark.parametrize(
    ("pipeline", "text"),
    [
        (ValueError("bad header"), "cannot be read .ValueError: bad header"),
        (types.SimpleNamespace(faces=[]), "no faces in"),
    ],
)
def test_damaged_and_faceless_files_are_said(tmp_path, monkeypatch, pipeline, text):
    pretend(monkeypatch, pipeline)
    (tmp_path / "shape.ply").write_bytes(b"")
    with pytest.raises(CheckpointError, match=text):
        load_mesh(tmp_path / "shape.ply")


def gltf(path: Path) -> dict:
    """The JSON part of a GLB."""
    data = path.read_bytes()
    length = struct.unpack("<I", data[12:16])[0]
    return json.loads(data[20 : 20 + length])


if find_spec("trimesh"):

    def test_a_glb_comes_back_as_it_was_written(tmp_path):
        texture = torch.rand(8, 8, 3, generator=torch.Generator().manual_seed(0))
        surfaces = torch.zeros(8, 8, 3)
        surfaces[..., 0], surfaces[..., 1] = 0.2, 0.8
        path = write_glb(tmp_path / "box.glb", BOX, texture, surfaces)
        mesh, _ = load_mesh(path)
        torch.testing.assert_close(mesh.vertices.float(), BOX.vertices)
        assert torch.equal(mesh.faces, BOX.faces)
        torch.testing.assert_close(mesh.uvs, BOX.uvs)
        material = gltf(path)["materials"][0]["pbrMetallicRoughness"]
        assert {"baseColorTexture", "metallicRoughnessTexture"} <= set(material)

    def test_metal_and_roughness_lie_in_the_channels_of_gltf(tmp_path):
        import io

        from PIL import Image

        surfaces = torch.tensor([0.2, 0.8, 0.0]).expand(8, 8, 3)
        path = write_glb(tmp_path / "box.glb", BOX, torch.zeros(8, 8, 3), surfaces)
        described, data = gltf(path), path.read_bytes()
        start = 28 + struct.unpack("<I", data[12:16])[0]
        texture = described["materials"][0]["pbrMetallicRoughness"]["metallicRoughnessTexture"]["index"]
        view = described["bufferViews"][described["images"][described["textures"][texture]["source"]]["bufferView"]]
        part = data[start + view.get("byteOffset", 0) :][: view["byteLength"]]
        assert Image.open(io.BytesIO(part)).convert("RGB").getpixel((3, 3)) == (0, 204, 51)

    def test_no_part_of_a_gltf_mesh_is_lost_where_trimesh_draws_a_name_twice(tmp_path, monkeypatch):
        import trimesh

        monkeypatch.setattr(trimesh.util, "unique_id", lambda *_, **__: "0c0ffe")
        path = tmp_path / "parts.glb"
        path.write_bytes(glb({"meshes": [{"primitives": [{"attributes": {"POSITION": 0}}] * 5}]}))
        assert len(load_mesh(path)[0].faces) == 5

    def test_uvs_are_read_without_a_material_but_not_in_normalized_integers(tmp_path):
        path = write_glb(tmp_path / "box.glb", BOX, torch.ones(4, 4, 3))
        described, data = gltf(path), path.read_bytes()
        (primitive,), rest = described["meshes"][0]["primitives"], data[28 + struct.unpack("<I", data[12:16])[0] :]
        del primitive["material"], described["materials"]
        path.write_bytes(glb(described, rest))
        torch.testing.assert_close(load_mesh(path)[0].uvs, BOX.uvs)
        described["accessors"][primitive["attributes"]["TEXCOORD_0"]]["normalized"] = True
        path.write_bytes(glb(described, rest))
        assert load_mesh(path)[0].uvs is None

    def test_lines_and_points_beside_a_mesh_are_left_out(tmp_path):
        parts = [{"attributes": {"POSITION": 0}, "mode": mode} for mode in (4, 1, 0)]
        (tmp_path / "parts.glb").write_bytes(glb({"meshes": [{"primitives": parts}]}))
        assert len(load_mesh(tmp_path / "parts.glb")[0].faces) == 1

    def test_triangle_fans_which_trimesh_would_leave_out_are_refused(tmp_path):
        parts = [{"attributes": {"POSITION": 0}, "mode": mode} for mode in (4, 6)]
        (tmp_path / "parts.glb").write_bytes(glb({"meshes": [{"primitives": parts}]}))
        with pytest.raises(CheckpointError, match=r"1 triangle fans in mesh file 'parts.glb'.*Export it as triangles"):
            load_mesh(tmp_path / "parts.glb")

    def test_colours_of_vertices_are_named_where_they_are_lost(tmp_path):
        head = "ply\nformat ascii 1.0\nelement vertex 3\n"
        head += "".join(f"property float {axis}\n" for axis in "xyz")
        head += "".join(f"property uchar {colour}\n" for colour in ("red", "green", "blue"))
        body = "element face 1\nproperty list uchar int vertex_indices\nend_header\n"
        body += "0 0 0 255 0 0\n1 0 0 0 255 0\n0 1 0 0 0 255\n3 0 1 2\n"
        (tmp_path / "scan.ply").write_text(head + body)
        assert "colours of vertices are left out" in load_mesh(tmp_path / "scan.ply")[1]
        path = write_glb(tmp_path / "both.glb", BOX, torch.ones(4, 4, 3))
        described, rest = gltf(path), path.read_bytes()[28 + struct.unpack("<I", path.read_bytes()[12:16])[0] :]
        attributes = described["meshes"][0]["primitives"][0]["attributes"]
        attributes["COLOR_0"] = attributes["POSITION"]  # beside its UVs
        path.write_bytes(glb(described, rest))
        assert "colours of vertices are left out" in load_mesh(path)[1]

    def test_settings_of_a_material_come_along_or_are_named(tmp_path):
        def read(first, **second):
            described["materials"] = [first, second][: 1 + bool(second)]
            parts = [{**primitive, "material": at} for at in range(len(described["materials"]))]
            (tmp_path / "made.glb").write_bytes(glb({**described, "meshes": [{"primitives": parts}]}, data))
            return load_mesh(tmp_path / "made.glb")

        normals = Mesh(**{**vars(BOX), "maps": {"normal": torch.rand(4, 4, 3)}})
        described, data = gltf(path := write_glb(tmp_path / "box.glb", normals, torch.ones(4, 4, 3))), path.read_bytes()
        data, primitive = data[28 + struct.unpack("<I", data[12:16])[0] :], described["meshes"][0]["primitives"][0]
        base, normal = ({"index": index} for index in range(2))
        extension = "KHR_materials_emissive_strength"
        strength = {extension: {"emissiveStrength": 3}}
        material = {"doubleSided": False, "extensions": strength, "normalTexture": {**normal, "scale": 0.5}}
        mesh, notes = read({**material, "pbrMetallicRoughness": {"metallicFactor": 0.2}})
        found = {"normalTexture.scale": 0.5, f"{extension}.emissiveStrength": 3}
        assert mesh.factors == {**found, "doubleSided": False, "metallicFactor": 0.2}
        assert len(notes) == 1 and mesh.maps.keys() == {"normal"}
        odd = {"extensions": {extension: {"emissiveStrength": "3"}}, "normalTexture": {**normal, "scale": float("nan")}}
        assert not found.keys() & read({**odd, "doubleSided": "no"})[0].factors.keys(), "a stranger's, no number"
        moved = {"baseColorTexture": {**base, "extensions": {"KHR_texture_transform": {"scale": [2, 2]}}}}
        mesh, notes = read({"normalTexture": {**normal, "texCoord": 1}, "pbrMetallicRoughness": moved})
        assert not mesh.maps and notes[1].endswith("are left out: baseColor, normal")
        mesh, notes = read({"alphaMode": "BLEND", "pbrMetallicRoughness": {"baseColorTexture": base}})
        assert notes[1:] == ("settings of the material are left out: alphaMode, metallicFactor, 1 by default",)
        mesh, notes = read(material, doubleSided=True, extensions={"KHR_materials_clearcoat": {}})
        assert not found.keys() & mesh.factors.keys()
        assert notes[-1].endswith(
            f": KHR_materials_clearcoat, {extension}.emissiveStrength, doubleSided, normalTexture.scale"
        )

    def test_settings_of_a_material_are_written_as_they_were_read(tmp_path):
        maps = {name: torch.rand(4, 4, 3) for name in ("normal", "occlusion", "emissive")}
        factors = {
            "metallicFactor": 0.2,
            "roughnessFactor": 0.4,
            "emissiveFactor": [1.0, 0.5, 0.0],
            "doubleSided": True,
        }
        factors |= {"normalTexture.scale": 0.5, "occlusionTexture.strength": 0.25}
        factors |= {"KHR_materials_emissive_strength.emissiveStrength": 3}
        mesh = Mesh(**{**vars(BOX), "maps": maps, "factors": factors})
        path = write_glb(tmp_path / "box.glb", mesh, torch.ones(4, 4, 3))
        read, notes = load_mesh(path)
        assert read.factors == factors and len(notes) == 1
        assert gltf(path)["extensionsUsed"] == ["KHR_materials_emissive_strength"]

    @pytest.mark.parametrize("suffix", ["obj", "ply", "stl"])
    def test_other_formats_are_read(tmp_path, suffix):
        import trimesh

        path = tmp_path / f"box.{suffix}"
        trimesh.Trimesh(BOX.vertices.numpy(), BOX.faces.numpy(), process=False).export(path)
        mesh, notes = load_mesh(path)
        assert Surface.of(mesh).faces.shape[0] == 12
        assert mesh.uvs is None
        assert "no UVs" in notes[0]
        assert mesh.vertices.shape[0] == (8 if suffix == "stl" else 24)


def test_faces_of_an_obj_that_count_backwards_are_read_right_or_refused(tmp_path):
    """trimesh counts from the end of the whole file: right where no vertex follows."""
    one, other = "v 0 0 0\nv 1 0 0\nv 1 1 0\n", "v 5 0 0\nv 6 0 0\nv 6 1 0\n"
    path = tmp_path / "mesh.obj"
    path.write_text(f"{one}{other}f -6 -5 -4\nf -3 -2 -1\n")
    mesh, _ = load_mesh(path)
    assert sorted(mesh.vertices[mesh.faces].sum((1, 2)).tolist()) == [3.0, 18.0]
    path.write_text(f"o a\n{one}f -3 -2 -1\no b\n{other}f -3 -2 -1\n")
    with pytest.raises(CheckpointError, match="3 vertices after faces that count backwards in mesh file"):
        load_mesh(path)
