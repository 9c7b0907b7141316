"""The memory that a mesh file takes, known from its counts before trimesh, which has no limits, builds anything."""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from graphlib import CycleError, TopologicalSorter
from importlib.util import find_spec
from itertools import chain, count
from math import isfinite, prod
from pathlib import Path
from typing import Any

from ...compat.checkpoints.headers import reading
from ...compat.errors import READING_TIMES, TOKEN_BYTES, CheckpointError, afford, first_line, json_cost, json_within
from ..choices import GAMMA

MOST_PARTS = 100_000  # nodes or primitives
MOST_DEPTH = 1_000  # of nodes: trimesh's time grows with its square
MOST_GROUPS = 4_096  # materials of an OBJ, solids of an STL: 3 s, and the time grows with the square
LATER = "vertices after faces that count backwards"
MOST_PROPERTIES = 1_024  # of a PLY: the same
STRIDES = 252  # bytes, by the specification of glTF
CHUNK = 1 << 20
JOIN = "Join its repeated parts and export it again."
# Measured with trimesh 5.2, in bytes
PER_NODE, PER_PART, PER_ROW = 1_300, 8_192, 170
COMPONENTS = {"SCALAR": 1, "VEC2": 2, "VEC3": 3, "VEC4": 4, "MAT2": 4, "MAT3": 9, "MAT4": 16}
COMPONENT_BYTES = {5120: 1, 5121: 1, 5122: 2, 5123: 2, 5125: 4, 5126: 4}
UNREAD = ("EXT_meshopt_compression", "KHR_meshopt_compression", "EXT_mesh_gpu_instancing")  # by trimesh
DECODERS = {"KHR_draco_mesh_compression": "DracoPy", **dict.fromkeys(UNREAD, "")}  # extension -> its package
ROW_ENDS = (b"\n", b"\r", b"\v", b"\f", b"\x1c", b"\x1d", b"\x1e", b"\xc2\x85", b"\xe2\x80\xa8", b"\xe2\x80\xa9")
PICTURES = ("PNG", "JPEG", "WEBP", "BMP", "TGA")  # that textures are; others start programs or have no limits
GLOSSY_BYTES = 300  # of a pixel that trimesh 5.2 converts from KHR_materials_pbrSpecularGlossiness
_patching = threading.Lock()
STRENGTHS = ("scale", "strength", "emissiveStrength")
CARRIED, CONVERTED = "KHR_materials_emissive_strength", "KHR_materials_pbrSpecularGlossiness"  # by us, by trimesh
Check = Callable[[], None]


def cost_of(path: Path, size_of: Callable[[str], int], check: Check) -> int:
    """The bytes of memory that reading a mesh file takes, without its textures: counted from the header of a glTF or
    PLY, else :data:`READING_TIMES` its size. Raises CheckpointError for more than :func:`reading_budget`, an impossible
    header, or more materials or solids than trimesh takes in reasonable time.

    Args:
        size_of: bytes of a file beside it, by name.
        check: called after each chunk that is read; may raise to cancel."""
    suffix, size, subject = path.suffix.lower(), path.stat().st_size, f"mesh file {path.name!r}"
    if suffix in (".glb", ".gltf"):
        text = json_of(path)
        cost = json_cost(text)
        try:
            header = json_within(text.decode("utf-8", "replace") or "{}", subject)  # trimesh says that it is empty
        except ValueError as error:
            raise _impossible(path, f"no JSON ({error})", "the JSON of a glTF") from error
        del text
        check()
        names = {b["uri"] for b in header.get("buffers", ()) if "base64," not in b.get("uri", "base64,")}
        return afford(subject, cost + _gltf_cost(path, header, check), size + sum(map(size_of, names)), JOIN)
    if suffix == ".ply":
        return afford(subject, PER_ROW * _ply_rows(path, check), size, JOIN)
    _few_groups(path, suffix, check)
    return READING_TIMES * size


@contextmanager
def reading_limits(trimesh: Any, spare: Callable[[], int]) -> Iterator[None]:
    """Patch trimesh, for one reader at a time, while the block runs. This thread opens :data:`PICTURES` alone. Glossy
    materials are converted as long as they fit into ``spare`` bytes; others keep only their diffuse picture. Parts of a
    glTF are numbered: of two with one random 24-bit name one would be lost. Parts without a material keep their UVs;
    UVs in normalized integers are dropped."""
    from PIL import Image
    from trimesh.exchange import gltf
    from trimesh.visual import gloss, material, texture

    numbers, glossy, here = count(), list[int](), threading.get_ident()
    home: Any = gltf if hasattr(gltf, "specular_to_pbr") else gloss  # trimesh 4 looks it up in the first

    def open_known(*file: Any, **options: Any) -> Any:
        return opened(*file, **options | ({"formats": PICTURES} if threading.get_ident() == here else {}))

    def converted(**look: Any) -> Any:  # in place of trimesh's specular_to_pbr
        sizes = [value.size for value in look.values() if hasattr(value, "convert")] or [(1, 1)]
        glossy.append(prod(map(max, zip(*sizes, strict=True))))  # both become as wide and as high as the larger
        whole = GLOSSY_BYTES * sum(glossy) <= spare()
        return convert(**look) if whole else {"baseColorTexture": look.get("diffuseTexture")}

    def with_materials(header: Any, **given: Any) -> Any:  # in place of trimesh's _read_buffers
        materials = header.setdefault("materials", [])
        for primitive in (each for mesh in header.get("meshes", ()) for each in mesh["primitives"]):
            uvs = primitive["attributes"].pop("TEXCOORD_0", None)
            if uvs is not None and not header["accessors"][uvs].get("normalized"):  # which trimesh would not divide
                primitive["attributes"]["TEXCOORD_0"] = uvs
                primitive.setdefault("material", len(materials))
        return read(header=header | {"materials": [*materials, {}]}, **given)

    with _patching:
        random_name, opened, convert = trimesh.util.unique_id, Image.open, home.specular_to_pbr
        invented, texture.empty_material = texture.empty_material, material.SimpleMaterial  # a grey picture of 2x2
        trimesh.util.unique_id, Image.open = lambda *_, **__: f"part {next(numbers)}", open_known
        home.specular_to_pbr, read, gltf._read_buffers = converted, gltf._read_buffers, with_materials
        try:
            yield
        finally:
            trimesh.util.unique_id, Image.open, home.specular_to_pbr = random_name, opened, convert
            gltf._read_buffers, texture.empty_material = read, invented


def prepare_to_join(scene: Any) -> None:
    """Multiply the factors of several materials into their textures, by glTF: trimesh would multiply colours without
    gamma, and red in place of blue by the metallic factor; and it takes occlusion from any channel, not from red."""

    def multiplied(picture: Any, shares: list[float]) -> Any:  # each channel by its share
        return picture.convert("RGB").point([round(value * share) for share in shares for value in range(256)])

    looks = {id(look): look for look in (getattr(part.visual, "material", None) for part in scene.geometry.values())}
    for look in (each for each in looks.values() if hasattr(each, "baseColorTexture") and len(looks) > 1):
        if look.baseColorTexture is not None and look.baseColorFactor is not None:
            shares = [(int(each) / 255) ** (1 / GAMMA) for each in look.baseColorFactor[:3]]
            look.baseColorTexture, look.baseColorFactor = multiplied(look.baseColorTexture, shares), None
        if look.metallicRoughnessTexture is not None:
            shares = [1.0 if each is None else each for each in (1.0, look.roughnessFactor, look.metallicFactor)]
            look.metallicRoughnessTexture = multiplied(look.metallicRoughnessTexture, shares)
            look.roughnessFactor = look.metallicFactor = None
        if look.occlusionTexture is not None:
            look.occlusionTexture = look.occlusionTexture.convert("RGB").getchannel("R")


def extras_of(path: Path) -> Mapping[str, Any]:
    """The texts in a GLB's ``asset.extras``; empty where there are none.
    Raises CheckpointError for a file that is no GLB, or whose header takes too much memory."""
    try:
        with reading(path):
            header = json_within(json_of(path), f"mesh file {path.name!r}")
    except ValueError as error:
        found = f"mesh file {path.name!r} has no readable header ({first_line(error)})"
        raise CheckpointError(found, expected="a GLB", fix="Choose another file.") from error
    asset = header.get("asset") if isinstance(header, dict) else None
    extras = asset.get("extras") if isinstance(asset, dict) else None
    return extras if isinstance(extras, dict) else {}


def settings_of(path: Path) -> tuple[dict[str, Any], set[str], set[str]]:
    """Settings of a glTF's only material that trimesh does not read, keyed as ``normalTexture.scale``; its textures on
    other or transformed UVs; and the settings that are lost: all, of several materials. Other formats have none."""
    text = json_of(path).decode("utf-8", "replace") if path.suffix.lower() in (".glb", ".gltf") else ""
    header = json_within(text or "{}", path.name)
    used = {primitive.get("material") for mesh in header.get("meshes", ()) for primitive in mesh["primitives"]}
    found, elsewhere, lost = dict[str, Any](), set[str](), set[str]()
    for material in (header["materials"][index] for index in used if index is not None):
        extensions = material.get("extensions", {})
        flat = {**material, **material.get("pbrMetallicRoughness", {}), **extensions}
        for place, each in ((place, each) for place, each in flat.items() if isinstance(each, dict)):
            numbers = {key: each[key] for key in STRENGTHS if isinstance(each.get(key), (int, float))}
            found |= {f"{place}.{key}": value for key, value in numbers.items() if isfinite(value)}
            if each.get("texCoord") or "KHR_texture_transform" in each.get("extensions", ()):
                elsewhere.add(place)
        if "doubleSided" in flat:  # trimesh says no where a file is silent
            found["doubleSided"] = bool(flat["doubleSided"])
        lost |= {*extensions, *(["alphaMode"] if flat.get("alphaMode") in ("MASK", "BLEND") else [])}
        if "baseColorTexture" in flat and not {"metallicFactor", "metallicRoughnessTexture", CONVERTED} & flat.keys():
            lost.add("metallicFactor, 1 by default")
    lost -= {CARRIED, CONVERTED}
    return (found, elsewhere, lost) if len(used) == 1 else ({}, elsewhere, lost | {*found})


def _limited(path: Path, count: int, most: int, things: str, fix: str = "Join them and export it again.") -> None:
    if count > most:
        raise CheckpointError(f"{count} {things} in mesh file {path.name!r}", expected=f"at most {most}", fix=fix)


def _impossible(path: Path, found: str, expected: str, fix: str = "Export or download it again.") -> CheckpointError:
    return CheckpointError(f"{found} in mesh file {path.name!r}", expected=expected, fix=fix)


def json_of(path: Path) -> bytes:
    """The JSON of a glTF: the whole file, or the first chunk of a GLB. Raises CheckpointError where that is cut off."""
    if path.suffix.lower() == ".gltf":
        return path.read_bytes()
    with path.open("rb") as file:
        length = int.from_bytes(file.read(20)[12:16], "little")
        if length > path.stat().st_size:
            raise _impossible(path, f"a chunk of {length} bytes", f"at most the file's {path.stat().st_size}")
        return file.read(length)


def _gltf_cost(path: Path, header: Mapping[str, Any], check: Check) -> int:
    """Bytes that trimesh takes to build what the JSON of a glTF describes, each node's copy included. Raises
    CheckpointError for a compression that it cannot read, impossible numbers, and too many parts or nodes."""

    def whole(table: Mapping[str, Any], key: str, where: str, least: int, default: int | None = None) -> int:
        value = table.get(key, default)  # a whole number from ``least``, or CheckpointError
        if type(value) is not int or value < least:
            raise _impossible(path, f"{key} {value!r} of {where}", f"a whole number from {least}")
        return value

    for name in header.get("extensionsRequired", ()):
        if name in DECODERS and not (DECODERS[name] and find_spec(DECODERS[name])):
            raise _impossible(path, f"the extension {name}", "plain vertices", "Export it without this extension.")
    views, accessors = header.get("bufferViews", []), header.get("accessors", [])
    cost, sizes = 0, []
    for index, view in enumerate(views):
        start, length = (whole(view, key, f"buffer view {index}", 0, 0) for key in ("byteOffset", "byteLength"))
        held = header["buffers"][view["buffer"]].get("byteLength", start + length)
        if start + length > held:
            raise _impossible(path, f"buffer view {index}, bytes {start} to {start + length}", f"at most {held}")
        cost += length
    for index, accessor in enumerate(accessors):
        each = COMPONENTS[accessor["type"]] * COMPONENT_BYTES[accessor["componentType"]]
        sizes.append(whole(accessor, "count", f"accessor {index}", 1) * each)
        stride = views[accessor["bufferView"]].get("byteStride", each) if "bufferView" in accessor else each
        if stride != each and not (type(stride) is int and each <= stride <= STRIDES):
            raise _impossible(path, f"byteStride {stride!r} of accessor {index}", f"{each} to {STRIDES} bytes")
    check()
    shown = _times_shown(path, header, check)
    parts = len(header.get("images", ())) + len(header.get("materials", ()))
    for index, mesh in enumerate(header.get("meshes", ())):
        copied, primitives = [mesh.get(key) for key in ("name", "extras", "extensions")], mesh["primitives"]
        described = TOKEN_BYTES // 2 * len(json.dumps(copied)) * len(primitives)  # each time
        parts += len(primitives) * (1 + shown[index])
        _limited(path, parts, MOST_PARTS, "primitives, images and materials")
        built = sum(_built(path, primitive, accessors, sizes) for primitive in primitives)
        cost += built + described + shown[index] * (7 * built // 2 + described)  # a node's copy takes 3.5 times a part
    return cost + sum(sizes) + PER_PART * parts + PER_NODE * len(header.get("nodes", ()))


def _built(path: Path, primitive: Mapping[str, Any], accessors: list[Any], sizes: list[int]) -> int:
    """Bytes of one primitive: 64 bits for each number of its vertices and faces; ``sizes``: bytes of each accessor.
    Raises CheckpointError for a triangle fan, and for sparse or normalized numbers that trimesh would misread."""
    attributes, indices, mode = primitive["attributes"], primitive.get("indices"), primitive.get("mode", 4)
    _limited(path, int(mode == 6), 0, "triangle fans", "Export it as triangles.")  # trimesh leaves them out
    for name, index in (("indices", indices), *((name, attributes.get(name)) for name in ("POSITION", "TEXCOORD_0"))):
        if index is None:
            continue
        sparse, normalized = "sparse" in accessors[index], accessors[index].get("normalized")
        if sparse or (normalized and name == "POSITION"):  # trimesh ignores both: the mesh would be wrong
            found = f"{'sparse' if sparse else 'normalized'} {name}"
            raise _impossible(path, found, "plain numbers", "Export it without them.")
    corners = accessors[attributes["POSITION"] if indices is None else indices]["count"]
    return int(2 * sum(sizes[index] for index in attributes.values()) + 24 * (corners / 3 if mode == 4 else corners))


def _times_shown(path: Path, header: Mapping[str, Any], check: Check) -> Counter[int]:
    """Number of times that the nodes of a glTF show each mesh: once per edge of the graph, as trimesh walks it. Raises
    CheckpointError for a circle of nodes, and for too many nodes or levels."""
    nodes, scenes = header.get("nodes", []), header.get("scenes", [])
    _limited(path, len(nodes), MOST_PARTS, "nodes")
    roots = set(scenes[header.get("scene", 0)].get("nodes", ())) if scenes else set()
    below, left = dict[int, set[int]](), list(roots)
    while left:
        if (node := left.pop()) not in below:
            below[node] = set(nodes[node].get("children", ()))
            left += below[node]
    check()
    sorter, depth = TopologicalSorter(below), 0
    try:
        sorter.prepare()
    except CycleError as error:
        raise _impossible(path, f"a circle of {len(error.args[1]) - 1} nodes", "a tree") from error
    while sorter.is_active():
        depth += 1
        sorter.done(*sorter.get_ready())
    _limited(path, depth, MOST_DEPTH, "levels of nodes", "Export it without its hierarchy.")
    return Counter(nodes[node]["mesh"] for node in chain(roots, *below.values()) if "mesh" in nodes[node])


def _ply_rows(path: Path, check: Check) -> int:
    """Number of lines of an ASCII PLY, each of which becomes an array in trimesh; 0 for a binary one, or one without an
    ``end_header``. Raises CheckpointError for a header of too many lines or with a negative count."""
    with path.open("rb") as file:
        header: list[list[bytes]] = []
        while not header or b"end_header" not in header[-1]:
            line = file.readline(CHUNK)
            if not line:
                return 0
            header.append(line.split())
            _limited(path, len(header), MOST_PROPERTIES, "lines of header", "Export it with fewer properties.")
        for words in header:
            if words[2:] and b"element" in words[0] and int(words[2]) < 0:
                raise _impossible(path, f"{int(words[2])} elements", "0 or more")
        if b"ascii" not in b" ".join(header[1]).lower():
            return 0
        rows = 0
        for chunk in iter(lambda: file.read(CHUNK), b""):
            rows += sum(map(chunk.count, ROW_ENDS))
            check()
        return rows


def _few_groups(path: Path, suffix: str, check: Check) -> None:
    """Raise CheckpointError for more than :data:`MOST_GROUPS` materials of an OBJ, or solids of any other file; and for
    vertices of an OBJ after faces that count backwards, as trimesh counts from the end of the file."""
    found, solids, backwards = set[bytes](), 0, False
    with path.open("rb") as file:
        for lines in iter(lambda: file.readlines(CHUNK), []):
            text = b"".join(lines).replace(b"\r", b"").replace(b"\\\n", b"")
            if suffix == ".obj":
                found.update(re.findall(rb"usemtl [^\n]*", text))
                first = re.search(rb"^f [^\n#]*?-", text, re.M)
                after = text if backwards else text[first.end() :] if first else b""
                backwards |= first is not None
                _limited(path, len(re.findall(rb"^vt? ", after, re.M)), 0, LATER, "Export it with absolute indices.")
            else:
                solids += text.lower().count(b"endsolid")
            _limited(path, max(len(found), solids), MOST_GROUPS, "materials" if suffix == ".obj" else "solids")
            check()
