"""Meshes that name files of others, and textures far larger than their files: nothing outside the folder is opened."""

import io
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trimesh
from anygpu.compat.errors import CheckpointError
from anygpu.paint.geometry import mesh as meshes
from anygpu.paint.geometry.mesh import Beside, load_mesh
from PIL import Image

from hostile import bombs

OBJ = "{mtl}\nv 0 0 0\nv 1 0 0\nv 0 1 0\nvt 0 0\nvt 1 0\nvt 0 1\nusemtl m\nf 1/1 2/2 3/3\n"
PLY = """ply
format ascii 1.0
comment TextureFile {name}
element vertex 3
property float x
property float y
property float z
element face 1
property list uchar int vertex_indices
end_header
0 0 0
1 0 0
0 1 0
3 0 1 2
"""
_watched: list[str] | None = None


def _watch(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open" and _watched is not None and arguments:
        _watched.append(str(arguments[0]))


sys.addaudithook(_watch)  # sees what is opened by whatever version of trimesh; there is no way to take one off


@pytest.fixture
def opened() -> Iterator[list[str]]:
    """Every path that is opened from here on."""
    global _watched
    _watched = []
    yield _watched
    _watched = None


def gltf(uri: str) -> str:
    """A glTF of one triangle whose buffer is at ``uri``."""
    buffer = {"uri": uri, "byteLength": 36}
    view, accessor = (
        {"buffer": 0, "byteLength": 36},
        {"bufferView": 0, "componentType": 5126, "count": 3, "type": "VEC3"},
    )
    content = {"asset": {"version": "2.0"}, "buffers": [buffer], "bufferViews": [view], "accessors": [accessor]}
    content |= {"meshes": [{"primitives": [{"attributes": {"POSITION": 0}}]}], "nodes": [{"mesh": 0}]}
    return json.dumps({**content, "scenes": [{"nodes": [0]}], "scene": 0})


@pytest.mark.parametrize("name", ["{secret}", "../secret.txt", "%2e%2e/secret.txt", "sub/../../secret.txt", "link.txt"])
@pytest.mark.parametrize("kind", ["obj", "map", "ply", "gltf"])
def test_no_file_outside_the_folder_is_opened(tmp_path: Path, opened: list[str], kind: str, name: str) -> None:
    secret, folder = tmp_path / "secret.txt", tmp_path / "mesh"
    secret.write_text("newmtl m\n" * 4, encoding="utf-8")
    folder.mkdir()
    (folder / "link.txt").symlink_to(secret)
    named, suffix = name.format(secret=secret), "obj" if kind == "map" else kind
    if kind == "map":
        (folder / "own.mtl").write_text(f"newmtl m\nmap_Kd {named}\n", encoding="utf-8")
    texts = {"obj": OBJ.format(mtl=f"mtllib {named}"), "map": OBJ.format(mtl="mtllib own.mtl")}
    texts |= {"ply": PLY.format(name=named), "gltf": gltf(named)}
    (folder / f"a.{suffix}").write_text(texts[kind], encoding="utf-8")
    opened.clear()
    try:
        found, _ = load_mesh(folder / f"a.{suffix}")
        assert len(found.faces) == 1
    except CheckpointError as error:
        assert kind == "gltf" and "cannot be read" in error.found
    real = {os.path.realpath(path) for path in opened}
    assert str(secret) not in real and str(folder / f"a.{suffix}") in real


def test_files_beside_the_mesh_are_read(tmp_path: Path) -> None:
    positions = np.array([[0, 0, 0], [1, 0, 0], [0, 1, 0]], dtype=np.float32)
    (tmp_path / "sub").mkdir()
    for name, uri in (("a b.bin", "a%20b.bin"), ("é.bin", "%C3%A9.bin"), ("5%20.bin", "5%20.bin"), ("a.bin", "a.bin")):
        (tmp_path / "sub" / name).write_bytes(positions.tobytes())
        (tmp_path / "a.gltf").write_text(gltf(f"sub/{uri}"), encoding="utf-8")
        assert np.array_equal(load_mesh(tmp_path / "a.gltf")[0].vertices.numpy(), positions)
    resolver = Beside(tmp_path / "a.gltf")
    assert resolver.namespaced("sub").get("a.bin") == positions.tobytes()
    for name in ("..", "/etc", "sub/../.."):
        with pytest.raises(ValueError, match="outside"):
            resolver.namespaced(name)


def bomb(side: int) -> bytes:
    picture = io.BytesIO()
    Image.new("RGB", (side, side)).save(picture, "PNG")
    return picture.getvalue()


def test_a_picture_far_larger_than_its_file_is_not_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two materials are packed into one, for which trimesh decodes all pictures; their shapes stay."""
    monkeypatch.setattr(meshes, "TEXTURE_PIXELS", 64 * 64)
    scene = trimesh.Scene()
    for index, side in enumerate((512, 256)):
        image = Image.open(io.BytesIO(bomb(side)))
        material = trimesh.visual.material.PBRMaterial(baseColorTexture=image, name=str(index))
        uv = np.array([[0, 0], [1, 0], [0, 1]])
        visual = trimesh.visual.TextureVisuals(uv=uv, material=material)
        scene.add_geometry(trimesh.Trimesh(np.eye(3) + index, [[0, 1, 2]], visual=visual, process=False))
    (tmp_path / "a.glb").write_bytes(scene.export(file_type="glb"))
    decoded = []
    load = Image.Image.load
    monkeypatch.setattr("PIL.PngImagePlugin.PngImageFile.load", lambda self: decoded.append(self.size) or load(self))
    found, _ = load_mesh(tmp_path / "a.glb")
    assert len(found.faces) == 2 and found.uvs is not None and not decoded


@pytest.mark.parametrize("suffix", [".glb", ".obj"])
def test_no_picture_but_of_five_formats_is_opened(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow hands an EPS, which is a program, to Ghostscript."""
    ran = []
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", lambda *_, **__: ran.append(1) or Image.new("RGB", (8, 8)).im)
    monkeypatch.setattr("PIL.EpsImagePlugin.has_ghostscript", lambda: True)
    for kind, expected in (("PNG", {"baseColor"}), ("EPS", set())):
        picture = io.BytesIO()
        Image.new("RGB", (8, 8)).save(picture, kind)
        (tmp_path / "a.png").write_bytes(picture.getvalue())
        named = {"images": [{"uri": "a.png"}], "textures": [{"source": 0}], **looking("baseColorTexture")}
        (tmp_path / "a.glb").write_bytes(bombs.glb(named))
        (tmp_path / "a.mtl").write_text("newmtl a\nmap_Kd a.png\n", encoding="utf-8")
        faces = "vt 0 0\nvt 1 0\nvt 0 1\nmtllib a.mtl\nusemtl a\nf 1/1 2/2 3/3\n"
        (tmp_path / "a.obj").write_text(bombs.CORNERS + faces, encoding="utf-8")
        assert set(load_mesh(tmp_path / f"a{suffix}")[0].maps) == expected
    assert not ran and Image.open(tmp_path / "a.png").format == "EPS", "others open what they like"


def looking(*textures: str, extension: str = "") -> dict[str, Any]:
    """What a glTF says of one triangle whose material has picture 0 as its ``textures``."""
    given = {name: {"index": 0} for name in textures}
    look = {"extensions": {extension: given}} if extension else {"pbrMetallicRoughness": given}
    part = {"attributes": {"POSITION": 0, "TEXCOORD_0": 1}, "material": 0}
    accessors = [{"bufferView": 0, "componentType": 5126, "count": 3, "type": kind} for kind in ("VEC3", "VEC2")]
    return {"materials": [look], "meshes": [{"primitives": [part]}], "accessors": accessors}


@pytest.mark.parametrize("side", [16, 1024])
def test_a_glossy_material_is_converted_where_there_is_room(tmp_path: Path, side: int) -> None:
    (tmp_path / "a.png").write_bytes(bomb(side))
    glossy = looking("diffuseTexture", "specularGlossinessTexture", extension="KHR_materials_pbrSpecularGlossiness")
    content = {"images": [{"uri": "a.png"}], "textures": [{"source": 0}], **glossy}
    (tmp_path / "a.glb").write_bytes(bombs.glb(content))
    maps = load_mesh(tmp_path / "a.glb")[0].maps
    assert set(maps) == ({"baseColor", "metallicRoughness"} if side == 16 else {"baseColor"})


def test_texture_coordinates_of_one_number_are_none(tmp_path: Path) -> None:
    """Wavefront allows ``vt u``."""
    corners = "v 0 0 0\nv 1 0 0\nv 0 1 0\nvt 0.1\nvt 0.2\nvt 0.3\nf 1/1 2/2 3/3\n"
    (tmp_path / "flat.obj").write_text(corners, encoding="utf-8")
    found, said = load_mesh(tmp_path / "flat.obj")
    assert found.uvs is None and said[0] == "1 faces, 3 vertices, no UVs"


@pytest.mark.parametrize("corners", ["v 0\nv 1\nv 2\n", "v 0 0\nv 1 0\nv 0 1\n"])
def test_vertices_without_all_three_coordinates_are_no_mesh(tmp_path: Path, corners: str) -> None:
    (tmp_path / "flat.obj").write_text(f"{corners}f 1 2 3\n", encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"-dimensional vertices in .flat\.obj.; expected x, y and z of each"):
        load_mesh(tmp_path / "flat.obj")
