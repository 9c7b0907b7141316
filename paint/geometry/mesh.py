"""Meshes as plain tensors: checked, put into the frame of the views, read and written through trimesh.

UVs are those of glTF: u to the right, v down, (0, 0) the upper left corner of the picture."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...compat.device.execution import picture_of, to_host
from ...compat.durable import write_file
from ...compat.errors import CheckpointError, InputError, PackError, reading_budget
from ...compat.packages import imported
from ..choices import MESH_FILES as FORMATS
from .cameras import HUNYUAN, Frame
from .mesh_cost import CARRIED, cost_of, prepare_to_join, reading_limits, settings_of

MANY_FACES = 100_000  # above it core's Decimate is worth its time before Unwrap
UNWRAP_SECONDS = 75e-6  # per face: core's UnwrapMesh, 37 s for 500k faces on two CPU cores
UV_TOLERANCE = 1e-3  # rounding of exporters, half a texel at 512
UNWRAP = "Use Unwrap Mesh UVs before it."
FINE = 8192  # steps of float32 over a mesh, below which a fine surface loses its shape
BESIDE_BYTES = 4 * 1024**3  # of a file that a mesh names, such as the buffer of a glTF
CALLS = 4096  # of trimesh between two checks: a millisecond
OFF_CENTRE = 0.1  # of the box, in units of a frame that leaves the mesh where it is
THIN = 1e-7  # height of a face in the frame, where the mesh is 1.15 wide: float32 positions are off by half as much
TEXTURE_PIXELS, PER_PIXEL = 64 * 1024**2, 64  # bytes that packing takes of each: measured with trimesh 5.2
MAPS = ("baseColor", "metallicRoughness", "emissive", "normal", "occlusion")
FACTORS = ("baseColorFactor", "metallicFactor", "roughnessFactor", "emissiveFactor")
TEXTURES = ("image", *(f"{name}Texture" for name in MAPS))


@dataclass(frozen=True, eq=False)
class Mesh:
    vertices: Tensor  # (N, 3) floating, any unit, glTF axes
    faces: Tensor  # (M, 3) integer, counter-clockwise from outside
    uvs: Tensor | None = None  # (N, 2) floating or None; see the module
    maps: Mapping[str, Tensor] = field(default_factory=dict)  # of a file's material, (H, W, 3) in 0..1, named as MAPS
    factors: Mapping[str, Any] = field(default_factory=dict)  # of the material, such as metallicFactor, by glTF's names
    normals: Tensor | None = None  # (N, 3) of a file's vertices
    colours: Tensor | None = None  # (N, 3 or 4) of core's


@dataclass(frozen=True, eq=False)
class Surface:
    """A checked mesh in the frame of the views."""

    vertices: Tensor  # (N, 3) float32, where its frame has them
    faces: Tensor  # (M, 3) int64, none without area
    uvs: Tensor | None  # (N, 2) float32 in 0..1, or None
    vertex_normals: Tensor  # (N, 3), unit, the mesh's own where its frame takes them, else the mean of the faces round
    face_normals: Tensor  # (M, 3), unit
    centre: Tensor  # float64 on the CPU
    scale: float  # frame = (vertex - centre) * scale
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, mesh: Mesh, device: torch.device | str | None = None, frame: Frame = HUNYUAN) -> Surface:
        """``mesh`` checked and prepared on ``device``, or where it is, in the ``frame`` of a family. Faces without area
        are dropped, and a vertex that no face names moves to one that a face does. Raises InputError where it is empty,
        not finite, names vertices outside, or has no face with an area."""
        checked_shapes(mesh)
        wrong = int((~torch.isfinite(mesh.vertices)).any(1).sum())
        if wrong:
            found = f"{wrong} of {mesh.vertices.shape[0]} vertices are NaN or infinite"
            fix = "The mesh is damaged. Generate it again, or remove these faces with Clean Mesh."
            raise InputError(found, expected="finite positions", fix=fix)
        # float64 on the CPU: a mesh far from the origin or of tiny scale keeps the digits that its float32 still has
        vertices, faces = to_host(mesh.vertices).double(), to_host(mesh.faces).long()
        named = named_by(faces, len(vertices))
        used, vertices = vertices[named], vertices.where(named[:, None], vertices[faces[0, 0]])  # no stray far away
        centre = (used.amax(0) + used.amin(0)) / 2 * frame.centred
        radius = float((used - centre).norm(dim=1).max() if frame.centred else used.abs().max())
        if radius == 0:
            raise InputError("a mesh whose vertices are all in one place", expected="a surface", fix="Export it again.")
        scale = frame.reach / radius
        vertices = (vertices - centre) * scale
        corners = vertices[faces]
        normals = torch.linalg.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0])
        areas = normals.norm(dim=1) / 2
        solid = 2 * areas > THIN * (corners - corners.roll(1, 1)).norm(dim=2).amax(1)
        if not bool(solid.any()):
            found = f"a mesh whose {faces.shape[0]} faces have no area"
            raise InputError(found, expected="a surface", fix="Export it again.")
        faces, face_normals = faces[solid], normals[solid] / (2 * areas[solid])[:, None]
        vertex_normals = _vertex_normals(mesh, frame, vertices, faces, face_normals)
        target = torch.device(device) if device is not None else mesh.vertices.device
        uvs = None if mesh.uvs is None else mesh.uvs.detach().to(target, torch.float32)
        placed = [tensor.to(torch.float32).to(target) for tensor in (vertices, vertex_normals, face_normals)]
        notes = _notes(mesh, faces, int((~solid).sum()), centre, radius)
        low, high = used.amin(0) * scale, used.amax(0) * scale
        if not frame.centred and float((low + high).abs().max()) / 2 > OFF_CENTRE:
            notes += ("the mesh lies beside the origin, so the views show it small: centre it for more detail",)
        return cls(placed[0], faces.to(target), uvs, placed[1], placed[2], centre, scale, notes)

    def areas(self) -> Tensor:
        a, b, c = (self.vertices[self.faces[:, k]] for k in range(3))
        return torch.linalg.cross(b - a, c - a).norm(dim=1) / 2

    def with_uvs(self) -> tuple[Surface, Tensor]:
        """This surface and its UVs (N, 2) in 0..1; raises InputError where they are missing, not finite or outside."""
        if self.uvs is None:
            raise InputError("a mesh without UVs", expected="a place in the texture for every face", fix=UNWRAP)
        used = self.uvs[named_by(self.faces, len(self.uvs))]
        if not bool(torch.isfinite(used).all()):
            raise InputError("UVs that are NaN or infinite", expected="numbers from 0 to 1", fix=UNWRAP)
        low, high = float(used.min()), float(used.max())
        if low < -UV_TOLERANCE or high > 1 + UV_TOLERANCE:
            found = f"UVs from {low:.3g} to {high:.3g}"
            fix = f"{UNWRAP} The mesh's texture no longer fits then."
            raise InputError(found, expected="0 to 1, because tiles and UDIMs cannot be painted", fix=fix)
        uvs = torch.nan_to_num(self.uvs).clamp(0, 1)
        if not bool((uv_areas(uvs, self.faces) > 0).any()):
            raise InputError("UVs without area", expected="a place in the texture for every face", fix=UNWRAP)
        return replace(self, uvs=uvs), uvs


def named_by(faces: Tensor, count: int) -> Tensor:
    """(N,) bool: which of ``count`` vertices a face of ``faces`` (M, 3) names."""
    named = torch.zeros(count, dtype=torch.bool, device=faces.device)
    named[faces.reshape(-1)] = True
    return named


def uv_areas(uvs: Tensor, faces: Tensor) -> Tensor:
    """(M,): area of each face in the texture, whose own area is 1."""
    a, b, c = (uvs[faces[:, k]] for k in range(3))
    return ((b[:, 0] - a[:, 0]) * (c[:, 1] - a[:, 1]) - (c[:, 0] - a[:, 0]) * (b[:, 1] - a[:, 1])).abs() / 2


def checked_shapes(mesh: Mesh) -> None:
    """Raise InputError unless a mesh has triangles whose corners are there, and a pair of UVs per vertex or none."""
    vertices, faces, uvs = mesh.vertices, mesh.faces, mesh.uvs
    if vertices.ndim != 2 or vertices.shape[-1] != 3 or faces.ndim != 2 or faces.shape[-1] != 3:
        found = f"a mesh with vertices {tuple(vertices.shape)} and faces {tuple(faces.shape)}"
        raise InputError(found, expected="(N, 3) and (M, 3): triangles", fix="Pass one triangulated mesh.")
    if not vertices.shape[0] or not faces.shape[0]:
        found = f"an empty mesh: {vertices.shape[0]} vertices, {faces.shape[0]} faces"
        fix = "Check the node that made it; a point cloud has no surface to paint."
        raise InputError(found, expected="at least one face", fix=fix)
    low, high = int(faces.min()), int(faces.max())
    if low < 0 or high >= vertices.shape[0]:
        found, expected = f"faces that name vertices {low} to {high}", f"0 to {vertices.shape[0] - 1}"
        raise InputError(found, expected=expected, fix="The mesh is damaged. Load or generate it again.")
    if uvs is not None and tuple(uvs.shape) != (vertices.shape[0], 2):
        found = f"UVs of shape {tuple(uvs.shape)} for {vertices.shape[0]} vertices"
        raise InputError(found, expected="one pair per vertex", fix="Use Unwrap Mesh UVs.")


def _vertex_normals(mesh: Mesh, frame: Frame, vertices: Tensor, faces: Tensor, face_normals: Tensor) -> Tensor:
    """(N, 3), unit: means over the faces round each vertex, or the file's own normals in a frame that takes them."""
    by_corner = face_normals.repeat_interleave(3, 0)
    if frame.by_angle:
        corners = vertices[faces]
        ahead, back = (corners.roll(way, 1) - corners for way in (-1, 1))
        angles = torch.atan2(torch.linalg.cross(ahead, back).norm(dim=2), (ahead * back).sum(2))
        by_corner = by_corner * angles.reshape(-1, 1)
    normals = torch.zeros_like(vertices).index_add_(0, faces.reshape(-1), by_corner)
    if frame.by_angle and mesh.normals is not None:  # a vertex that its file splits stays split
        own = to_host(mesh.normals).double()
        normals = torch.where(torch.isfinite(own).all(1, True) & own.any(1, True), own, normals)
    return torch.nn.functional.normalize(normals, dim=1)


def _notes(mesh: Mesh, faces: Tensor, dropped: int, centre: Tensor, radius: float) -> tuple[str, ...]:
    """Lines for the user on ``dropped`` faces, size, shared edges, and a mesh too far out for single precision."""
    notes = [f"{dropped} faces without area were dropped"] if dropped else []
    notes += size_notes(faces.shape[0])
    ends = torch.cat((faces[:, [0, 1]], faces[:, [1, 2]], faces[:, [2, 0]])).sort(1).values
    keys = (ends[:, 0] * (int(faces.max()) + 1) + ends[:, 1]).sort().values
    shared = len(keys[2:][keys[2:] == keys[:-2]].unique_consecutive())  # sorted: two places on is a third face
    if shared:
        notes.append(f"{shared} edges belong to more than two faces: normals there are mixed")
    rounding = torch.finfo(mesh.vertices.dtype).eps * float(centre.abs().max())
    if rounding > 2 * radius / FINE:
        notes.append(
            f"the mesh lies {float(centre.norm()):.3g} from the origin and is {2 * radius:.3g} wide: that far out, "
            "single precision is too coarse for a fine surface; move it to the origin before exporting"
        )
    return tuple(notes)


def size_notes(faces: int) -> list[str]:  # a line on how long unwrapping takes, for many faces
    if faces <= MANY_FACES:
        return []
    seconds = faces * UNWRAP_SECONDS
    return [f"{faces} faces: Unwrap Mesh UVs takes about {seconds:.0f} s on a CPU, less after Decimate Mesh"]


class Beside:
    """The files that a mesh file may name: those in its own folder, whatever the version of trimesh allows."""

    def __init__(self, path: Path) -> None:
        self.folder = path.resolve().parent
        self.read: dict[Path, bytes] = {}  # once, however often it is named

    def place(self, name: str) -> Path:
        """The path of a file in the folder, or in one below it, by its name or, as in glTF, by its URI.
        Raises ValueError where it is outside, also by a link, no plain file, or too large."""
        named, uri = self.folder / name.strip(), name.strip().encode()
        decoded = re.sub(rb"%([0-9A-Fa-f]{2})", lambda code: bytes.fromhex(code[1].decode()), uri)
        place = (named if named.exists() else self.folder / decoded.decode(errors="replace")).resolve()
        if not place.is_relative_to(self.folder) or not place.is_file() or place.stat().st_size > BESIDE_BYTES:
            raise ValueError(f"{name!r} is not a file in the mesh's own folder of at most {BESIDE_BYTES >> 30} GB")
        return place

    def get(self, name: str) -> bytes:  # the file's content, as trimesh asks a resolver for it; raises as place
        place = self.place(name)
        if place not in self.read:
            self.read[place] = place.read_bytes()
        return self.read[place]

    __getitem__ = get

    def keys(self) -> list[str]:
        """An empty list: trimesh asks for each file by its name."""
        return []

    def namespaced(self, namespace: str) -> Beside:
        """The files of the folder ``namespace`` below this one; raises ValueError where it is outside."""
        inner = Beside(self.folder / namespace / "mesh")
        if not inner.folder.is_relative_to(self.folder):
            raise ValueError(f"{namespace!r} is outside of the mesh's own folder")
        return inner


@contextmanager
def _reading(path: Path, check: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """Call ``check`` every :data:`CALLS` calls of the code inside: trimesh cannot be cancelled, nor a thread ended.
    Yields ``check``, to be called between steps too; what it raises is raised again at the end if a library swallows
    it. A reader's exception, but for a PackError, becomes a CheckpointError of one line."""
    raised: list[BaseException] = []  # libraries swallow exceptions: this one comes out all the same
    calls = count(1)

    def check_now() -> None:  # once ``check`` has raised, every call raises the same
        if raised:
            raise raised[0]
        try:
            check()
        except BaseException as error:
            raised.append(error)
            raise

    def on_call(*_: Any) -> None:  # as a profile function, run by Python at each call and return
        if not next(calls) % CALLS:  # Python takes off a profile function that raises: the next call puts it back
            sys.settrace(lambda *_: sys.settrace(traced) or sys.setprofile(on_call))
            check_now()
            sys.settrace(traced)

    before, traced = sys.getprofile(), sys.gettrace()
    sys.setprofile(on_call)
    try:
        yield check_now
    except PackError:
        raise
    except Exception as error:  # each format's reader raises its own kinds
        if not raised:
            found = f"mesh file {path.name!r} cannot be read ({type(error).__name__}: {error})"
            raise CheckpointError(found, expected="an intact mesh", fix="Export or download it again.") from error
    finally:
        sys.settrace(traced)
        sys.setprofile(before)
    check_now()


def load_mesh(path: Path, check: Callable[[], None] = lambda: None) -> tuple[Mesh, tuple[str, ...]]:
    """The mesh in a GLB, glTF, OBJ, PLY or STL file, and lines about it; several objects become one.
    Vertices far out move to the origin; UVs, textures and colours that cannot be kept are left out: a line says so.
    Raises InputError for another format; CheckpointError where the file is missing, damaged, empty, or takes too much
    memory; MissingPackageError without trimesh. ``check`` is called after each chunk and between the reader's calls, in
    this thread; it may raise to cancel."""
    if path.suffix.lower() not in FORMATS:
        raise InputError(f"mesh file {path.name!r}", expected=f"one of {', '.join(FORMATS)}", fix="Convert it.")
    if not path.is_file():
        raise CheckpointError(f"no mesh file {str(path)!r}", expected="a file", fix="Choose one that exists.")
    trimesh, beside = imported("trimesh"), Beside(path)
    with _reading(path, check) as check_now:
        cost = cost_of(path, lambda name: beside.place(name).stat().st_size, check_now)

        def spare() -> int:
            return reading_budget(path.stat().st_size + sum(map(len, beside.read.values()))) - cost

        with reading_limits(trimesh, spare):
            scene = trimesh.load_scene(path, resolver=beside, process=False)
        scene.delete_geometry([name for name, part in scene.geometry.items() if not hasattr(part, "faces")])
        check_now()
        blank = blank_large_textures(scene, spare())
        prepare_to_join(scene)
        normals, scene, parts = _normals_of(scene), scene.to_mesh(), scene
        maps, factors, about = ({}, {}, ["textures too large to keep"]) if blank else material_of(parts, scene, path)
    if not len(getattr(scene, "faces", ())):
        raise CheckpointError(f"no faces in {path.name!r}", expected="a mesh", fix="A point cloud cannot be painted.")
    uvs, spoilt = _uvs_of(parts, scene)
    vertices = torch.tensor(scene.vertices, dtype=torch.float64)
    if vertices.shape[1:] != (3,):
        found = f"{vertices.shape[-1]}-dimensional vertices in {path.name!r}"
        raise CheckpointError(found, expected="x, y and z of each", fix="Export or download it again.")
    faces = torch.tensor(scene.faces, dtype=torch.int64)
    if path.suffix.lower() == ".stl":  # which repeats each corner; others keep vertices apart where their UVs differ
        own = numbered(vertices + 0.0)  # no negative zeros
        vertices, faces = vertices.new_zeros(int(own.max()) + 1, 3).index_copy_(0, own, vertices), own[faces]
    vertices, moved = _near_origin(vertices)
    message = f"{len(faces)} faces, {len(vertices)} vertices, {'no' if uvs is None else 'with'} UVs"
    normals = normals if normals is not None and normals.shape == vertices.shape else None
    mesh = Mesh(vertices, faces, uvs, maps=maps if uvs is not None else {}, factors=factors, normals=normals)
    return mesh, (message, *moved, *spoilt, *about, *size_notes(len(faces)))


def _uvs_of(scene: Any, mesh: Any) -> tuple[Tensor | None, list[str]]:
    """The UVs (N, 2) of ``mesh``, which trimesh joined from the parts of ``scene``, or None; a line on why they went.
    trimesh gives parts without UVs the texture's middle, and wraps what lies outside 0..1 where it packs materials."""
    uvs = getattr(mesh.visual, "uv", None)
    uvs = torch.empty(0) if uvs is None else torch.tensor(uvs, dtype=torch.float32)
    if uvs.ndim != 2 or len(uvs) != len(mesh.vertices) or uvs.shape[1] < 2:
        return None, []
    parts = [scene.geometry[scene.graph[node][1]] for node in scene.graph.nodes_geometry]
    own = [getattr(part.visual, "uv", None) for part in parts]
    if any(each is None for each in own):
        counts = torch.tensor([len(part.faces) for part in parts])
        without = torch.tensor([each is None for each in own]).repeat_interleave(counts)
        areas = torch.tensor(mesh.area_faces)
        return None, [f"UVs were dropped: {areas[without].sum() / areas.sum():.0%} of the surface has none"]
    if own and not any(map(_has_picture, parts)):  # trimesh made a pixel of each material's colour
        uvs = torch.cat([torch.tensor(each[:, :2], dtype=torch.float32) for each in own])
    *before, after = (bool(((each < -UV_TOLERANCE) | (each > 1 + UV_TOLERANCE)).any()) for each in (*own, uvs))
    if any(before) != after:  # joining wrapped UVs outside 0 to 1, or put them outside, beside the texture it packed
        return None, ["UVs were dropped: some lie outside 0 to 1, and several materials cannot be joined there"]
    return torch.stack((uvs[:, 0], 1 - uvs[:, 1]), dim=1), []  # trimesh counts v upwards, whatever the file does


def _has_picture(part: Any) -> bool:
    return any(getattr(getattr(part.visual, "material", None), name, None) is not None for name in TEXTURES)


def _normals_of(scene: Any) -> Tensor | None:
    """(N, 3) unit, float64: the normals of a file's vertices where its nodes put them; None where some have none."""
    found = []
    for node in scene.graph.nodes_geometry:
        transform, name = scene.graph[node]
        normals = scene.geometry[name]._cache["vertex_normals"]  # the property would compute them
        if normals is None:
            return None
        inverse = torch.linalg.pinv(torch.tensor(transform[:3, :3]))  # its transpose turns normals; these are rows
        found.append(torch.nn.functional.normalize(torch.tensor(normals) @ inverse, dim=1))
    return torch.cat(found) if found else None


def _near_origin(vertices: Tensor) -> tuple[Tensor, list[str]]:
    """``vertices`` (N, 3), moved to the origin if float32, which nodes hand on, would lose their shape; then a line."""
    whole = vertices[torch.isfinite(vertices).all(1)]
    if not whole.shape[0]:
        return vertices, []
    low, high = whole.amin(0), whole.amax(0)
    centre, width = (low + high) / 2, float((high - low).max())
    if torch.finfo(torch.float32).eps * float(centre.abs().max()) <= width / FINE:
        return vertices, []
    return vertices - centre, [f"moved to the origin: it was {float(centre.norm()):.3g} away and is {width:.3g} wide"]


def blank_large_textures(scene: Any, spare: int) -> bool:
    """Replace the textures of ``scene`` by small blank ones if they have over :data:`TEXTURE_PIXELS`, or as many as
    take over ``spare`` bytes, :data:`PER_PIXEL` each, counted once per node that shows them; True if replaced. Where
    several materials become one, trimesh decodes them all to pack them, and each node has its own copy: a file of 100
    kB can take gigabytes."""
    from PIL import Image

    named = []
    for shape, geometry in scene.geometry.items():
        material = getattr(geometry.visual, "material", None)
        pictures = ((name, getattr(material, name, None)) for name in TEXTURES)
        named += [(shape, material, name, picture) for name, picture in pictures if hasattr(picture, "size")]
    nodes = scene.graph.geometry_nodes if named else {}
    pixels = sum(len(nodes.get(shape, ())) * picture.size[0] * picture.size[1] for shape, _, _, picture in named)
    share = (min(TEXTURE_PIXELS, max(spare, 0) / PER_PIXEL) / max(pixels, 1)) ** 0.5
    blank: dict[int, Any] = {}  # of another colour each: trimesh takes equal materials for one
    for _, material, name, picture in named if share < 1 else ():
        size = tuple(max(1, round(side * share)) for side in picture.size)
        blank.setdefault(id(picture), Image.new("RGB", size, len(blank) % 2**24))
        setattr(material, name, blank[id(picture)])
    return bool(blank)


def material_of(scene: Any, mesh: Any, path: Path) -> tuple[dict[str, Tensor], dict[str, Any], list[str]]:
    """Maps and factors of the material of ``mesh``, which trimesh joined from ``scene``, and lines about what is lost.
    A damaged picture is left out: the shape is what matters."""
    factors, elsewhere, without = settings_of(path)
    given = [getattr(geometry.visual, "material", None) for geometry in scene.geometry.values()]
    material = getattr(getattr(mesh, "visual", None), "material", None)
    for name in FACTORS:
        value = getattr(material, name, None)
        if value is not None:  # trimesh has the base colour's in eight bits
            scale = 255 if name == "baseColorFactor" else 1
            factors[name] = [float(each) / scale for each in value] if hasattr(value, "__len__") else float(value)
    material = material.to_pbr() if hasattr(material, "to_pbr") else material
    maps, lost, textured = {}, [], any(map(_has_picture, scene.geometry.values()))
    for name in MAPS:
        picture = getattr(material, f"{name}Texture", None)
        try:
            if picture is not None and textured and f"{name}Texture" not in elsewhere:
                values = torch.frombuffer(bytearray(picture.convert("RGB").tobytes()), dtype=torch.uint8)
                maps[name] = values.view(picture.height, picture.width, 3).float() / 255
            elif any(getattr(each, f"{name}Texture", None) is not None for each in given):
                lost.append(name)
        except Exception:  # each picture's reader raises its own kinds
            lost.append(name)
    left = "textures that are damaged, on other UVs, or that several materials cannot share, are left out"
    notes = [f"{left}: {', '.join(lost)}"] if lost else []
    notes += [f"settings of the material are left out: {', '.join(sorted(without))}"] if without else []
    looks = [part.visual for part in scene.geometry.values()]
    coloured = any(each.kind == "vertex" or "color" in getattr(each, "vertex_attributes", ()) for each in looks)
    notes += ["colours of vertices are left out"] if coloured else []
    return maps, factors, notes


def write_glb(path: Path, mesh: Mesh, texture: Tensor, metallic_roughness: Tensor | None = None) -> Path:
    return write_file(path, glb_of(mesh, texture, metallic_roughness))


def glb_of(mesh: Mesh, texture: Tensor, metallic_roughness: Tensor | None = None, **extras: str) -> bytes:
    """The bytes of a GLB with the texture, the rest of the mesh's material, and its normals, by default welded ones.
    Raises MissingPackageError without trimesh, InputError without UVs.

    Args:
        texture: (T, T, 3) in 0..1.
        metallic_roughness: the same, R metallic, G roughness as the PBR model paints them.
        extras: texts for the file's ``asset.extras``, where ComfyUI has its own."""
    trimesh = imported("trimesh")
    if mesh.uvs is None:
        raise InputError("a mesh without UVs", expected="a place in the texture for every face", fix=UNWRAP)
    rest = {name: values for name, values in mesh.maps.items() if name != "baseColor"}
    material: dict[str, Any] = {"metallicFactor": float("metallicRoughness" in rest), "roughnessFactor": 1.0}
    material |= {name: mesh.factors[name] for name in (*FACTORS[1:], "doubleSided") if name in mesh.factors}
    material |= {f"{name}Texture": picture_of(values) for name, values in rest.items()}
    material["baseColorTexture"] = picture_of(texture)
    if metallic_roughness is not None:  # glTF reads roughness from G and metallic from B
        metallic, roughness = metallic_roughness[..., 0], metallic_roughness[..., 1]
        packed = torch.stack((torch.zeros_like(metallic), roughness, metallic), dim=-1)
        material |= {"metallicRoughnessTexture": picture_of(packed), "metallicFactor": 1.0, "roughnessFactor": 1.0}
    uvs = to_host(torch.stack((mesh.uvs[:, 0], 1 - mesh.uvs[:, 1]), dim=1)).numpy()
    visual = trimesh.visual.TextureVisuals(uv=uvs, material=trimesh.visual.material.PBRMaterial(**material))
    normals = mesh.normals
    if normals is None:
        normals = welded_normals(to_host(mesh.vertices).double(), to_host(mesh.faces).long())
    vertices, faces = (to_host(each).numpy() for each in (mesh.vertices, mesh.faces))
    made = trimesh.Trimesh(vertices, faces, vertex_normals=to_host(normals).numpy(), visual=visual, process=False)

    def add(tree: dict[str, Any]) -> None:  # to the JSON, in place: extras, strengths
        tree["asset"] |= {"extras": extras} if extras else {}
        written = tree["materials"][0]
        for name, value in mesh.factors.items():  # trimesh writes no strengths
            place, _, key = name.partition(".")
            if place == CARRIED:
                written["extensions"], tree["extensionsUsed"] = {place: {key: value}}, [place]
            elif key and place in written:
                written[place][key] = value

    return made.export(file_type="glb", include_normals=True, tree_postprocessor=add)  # type: ignore[no-any-return]


def numbered(rows: Tensor) -> Tensor:
    """(N,) int64: the same number for rows of ``rows`` (N, K), of 64 bits a value, that are equal bit for bit.
    Column by column: sorting numbers is many times faster than sorting rows."""
    columns = rows.contiguous().view(torch.int64).unbind(1)
    numbers = columns[0].unique(return_inverse=True)[1]
    for column in columns[1:]:
        other = column.unique(return_inverse=True)[1]
        numbers = (numbers * (other.max() + 1) + other).unique(return_inverse=True)[1]
    return numbers


def welded(vertices: Tensor) -> Tensor:
    """(N,) int64: the same number for vertices in one place, up to rounding: 2^-20 of the mesh's width."""
    low = vertices.amin(0)
    width = (vertices.amax(0) - low).max().clamp(min=torch.finfo(vertices.dtype).tiny)
    grid = ((vertices - low) / width * 2**20).round().to(torch.int64)
    # one key a vertex: sorting numbers is many times faster than sorting rows
    return (grid[:, 0] << 42 | grid[:, 1] << 21 | grid[:, 2]).unique(return_inverse=True)[1]


def welded_normals(vertices: Tensor, faces: Tensor) -> Tensor:
    """(N, 3) unit: means over the faces round each place, weighted by area: seams that unwrapping cuts do not show."""
    used = named_by(faces, len(vertices))[:, None]
    same = welded(vertices.where(used, vertices[faces[0, 0]]))  # a stray vertex far away would coarsen its grid
    corners = vertices[faces]
    normals = torch.linalg.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0])
    sums = torch.zeros_like(vertices).index_add_(0, same[faces].reshape(-1), normals.repeat_interleave(3, 0))
    return torch.nn.functional.normalize(sums, dim=1, eps=1e-30)[same]
