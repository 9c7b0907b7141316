"""Files of 1 kB to 2 MB that claim more than they hold: counts, copies, overlaps, depth, strides, sizes, durations."""

import io
import json
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import av
import numpy as np
from PIL import Image

BYTES = 2_000_000
CORNERS = "v 0 0 0\nv 1 0 0\nv 0 1 0\n"
PLY = "ply\nformat ascii 1.0\nelement vertex {vertices}\nproperty float x\nproperty float y\nproperty float z\n"
PLY += "element face {faces}\nproperty list uchar int vertex_indices\nend_header\n"
TRIANGLE = np.array([[0, 0, 0], [1, 0, 0], [0, 1, 0]], np.float32).tobytes()
ROOM = np.zeros((64, 3), np.float32).tobytes()


def glb(content: dict[str, Any], data: bytes = TRIANGLE + ROOM) -> bytes:
    """A GLB of one triangle shown once, but for what ``content`` replaces."""
    accessor = {"bufferView": 0, "componentType": 5126, "count": 3, "type": "VEC3"}
    whole: dict[str, Any] = {"asset": {"version": "2.0"}, "buffers": [{"byteLength": len(data)}]}
    whole |= {"bufferViews": [{"buffer": 0, "byteLength": len(data)}], "accessors": [accessor]}
    whole |= {"meshes": [{"primitives": [{"attributes": {"POSITION": 0}}]}], "nodes": [{"mesh": 0}]}
    text = json.dumps({**whole, "scenes": [{"nodes": [0]}], "scene": 0, **content}).encode()
    text, data = text + b" " * (-len(text) % 4), data + b"\0" * (-len(data) % 4)
    head = struct.pack("<IIIII", 0x46546C67, 2, 28 + len(text) + len(data), len(text), 0x4E4F534A)
    return head + text + struct.pack("<II", len(data), 0x4E4942) + data


def _accessors(**changes: Any) -> dict[str, Any]:
    return {"accessors": [{"bufferView": 0, "componentType": 5126, "count": 3, "type": "VEC3", **changes}]}


def _shown(count: int, **more: Any) -> dict[str, Any]:
    return {"nodes": [{"mesh": 0}] * count, "scenes": [{"nodes": list(range(count))}], **more}


def _chain(depth: int) -> dict[str, Any]:
    return {"nodes": [{"children": [at + 1]} for at in range(depth)] + [{"mesh": 0}]}


def _primitives(count: int, **attributes: int) -> dict[str, Any]:
    return {"meshes": [{"primitives": [{"attributes": {"POSITION": 0, **attributes}}] * count}]}


def _textured(side: int, factor: bool = False, nodes: int = 1, materials: int = 2) -> bytes:
    pictures = [png(side, side, colour=at) for at in range(materials)]
    views = [{"buffer": 0, "byteLength": 60}]
    data = TRIANGLE + np.zeros((3, 2), np.float32).tobytes()
    for picture in pictures:
        views.append({"buffer": 0, "byteOffset": len(data), "byteLength": len(picture)})
        data += picture
    uv = {"bufferView": 0, "byteOffset": 36, "componentType": 5126, "count": 3, "type": "VEC2"}
    parts = [{"attributes": {"POSITION": 0, "TEXCOORD_0": 1}, "material": at} for at in range(materials)]
    look = {"baseColorFactor": [1, 1, 1, 1]} if factor else {}
    content = {"bufferViews": views, "accessors": [*_accessors()["accessors"], uv], "meshes": [{"primitives": parts}]}
    content |= {"images": [{"bufferView": at + 1, "mimeType": "image/png"} for at in range(materials)]}
    content |= {"textures": [{"source": at} for at in range(materials)]}
    content |= {
        "materials": [{"pbrMetallicRoughness": {"baseColorTexture": {"index": at}, **look}} for at in range(materials)]
    }
    return glb({**content, **_shown(nodes)}, data)


MESHES: dict[str, tuple[Callable[[], bytes | str], str]] = {  # name: content, and what its refusal says; "" where read
    "zeros.glb": (
        lambda: glb({"accessors": [{"componentType": 5126, "count": 10**9, "type": "MAT4"}]}),
        "takes 676,000 MB",
    ),
    "zeros.gltf": (lambda: json.dumps(json.loads(glb(_accessors(count=10**12))[20:-812])), "takes 156,000,000 MB"),
    "count.glb": (lambda: glb(_accessors(count=-5)), "count -5 of accessor 0"),
    "fraction.glb": (lambda: glb(_accessors(count=1.5)), r"count 1\.5 of accessor 0"),
    "truth.glb": (lambda: glb(_accessors(count=True)), "count True of accessor 0"),
    "nodes.glb": (lambda: glb(_shown(40_000)), "to read; expected at most 2"),
    "many.glb": (lambda: glb({"nodes": [{}] * 200_000}), "200000 nodes"),
    "copies.glb": (lambda: glb(_shown(200, **_accessors(count=9_999)), TRIANGLE * 3334), "takes 2"),
    "primitives.glb": (lambda: glb(_primitives(30_000)), "takes 5"),
    "attributes.glb": (
        lambda: glb(_primitives(40, **{f"_{at}": 0 for at in range(900)}) | _accessors(count=3000), TRIANGLE * 1000),
        "takes",
    ),
    "views.glb": (lambda: glb({"bufferViews": [{"buffer": 0, "byteLength": 10**6}] * 400}, b"\0" * 10**6), "takes 4"),
    "outside.glb": (lambda: glb({"bufferViews": [{"buffer": 0, "byteLength": 10**9}]}), "bytes 0 to 1000000000"),
    "before.glb": (
        lambda: glb({"bufferViews": [{"buffer": 0, "byteOffset": -9, "byteLength": 9}]}),
        "byteOffset -9 of buffer view 0",
    ),
    "stride.glb": (
        lambda: glb({"bufferViews": [{"buffer": 0, "byteLength": 804, "byteStride": 4}], **_accessors(count=65)}),
        "byteStride 4 of accessor 0",
    ),
    "far.glb": (
        lambda: glb({"bufferViews": [{"buffer": 0, "byteLength": 804, "byteStride": 256}], **_accessors()}),
        "byteStride 256 of accessor 0",
    ),
    "chain.glb": (lambda: glb(_chain(20_000)), "20001 levels of nodes"),
    "circle.glb": (lambda: glb({"nodes": [{"children": [1]}, {"children": [0], "mesh": 0}]}), "a circle of 2 nodes"),
    "itself.glb": (lambda: glb({"nodes": [{"children": [0], "mesh": 0}]}), "a circle of 1 nodes"),
    "sparse.glb": (lambda: glb(_accessors(sparse={"count": 1})), "sparse POSITION"),
    "draco.glb": (lambda: glb({"extensionsRequired": ["KHR_draco_mesh_compression"]}), "KHR_draco_mesh_compression"),
    "instancing.glb": (lambda: glb({"extensionsRequired": ["EXT_mesh_gpu_instancing"]}), "EXT_mesh_gpu_instancing"),
    "meshopt.glb": (lambda: glb({"extensionsRequired": ["EXT_meshopt_compression"]}), "EXT_meshopt_compression"),
    "extras.glb": (
        lambda: glb({"meshes": [{**_primitives(1)["meshes"][0], "extras": [[]] * 9999}]} | _shown(900)),
        "takes",
    ),
    "shown.glb": (
        lambda: glb({"meshes": [{"name": "a" * 90_000, **_primitives(1)["meshes"][0]}]} | _shown(300)),
        "takes",
    ),
    "images.glb": (lambda: glb({"images": [{"bufferView": 0}] * 60_000}), "takes"),
    "materials.glb": (lambda: glb({"materials": [{}] * 300_000}), "300001 primitives|300002 primitives"),
    "lists.gltf": (lambda: json.dumps({"a": [[]] * 500_000}), ""),
    "deep.gltf": (lambda: "[" * 10**6, "no JSON"),
    "chunk.glb": (lambda: glb({})[:12] + b"\xff\xff\xff\xff" + glb({})[16:], "a chunk of 4294967295 bytes"),
    "names.glb": (lambda: glb({"nodes": [{"mesh": 0, "name": "a" * 50}] * 5000} | {"scenes": [{"nodes": [0]}]}), ""),
    "data.gltf": (lambda: json.dumps({"buffers": [{"uri": "data:;base64," + "A" * 99999}] * 20, "asset": {}}), ""),
    "textures.glb": (lambda: _textured(4096), ""),
    "factor.glb": (lambda: _textured(2048, factor=True), ""),
    "texture_nodes.glb": (lambda: _textured(2048, nodes=100, materials=1), ""),
    "pictures.glb": (lambda: _textured(1024, materials=24), ""),
    "materials.obj": (
        lambda: CORNERS + "".join(f"usemtl {at}\nf 1 2 3\n" for at in range(60_000)),
        r"\d+ materials .*at most 4096",
    ),
    "hidden.obj": (lambda: CORNERS + "".join(f"use\\\nmtl {at}\nf 1 2 3\n" for at in range(9_000)), r"\d+ materials"),
    "faces.obj": (lambda: CORNERS + "f 1 2 3\n" * (BYTES // 8), ""),
    "mixed.obj": (lambda: CORNERS + "f 1 2 3 1\n" + "f 1 2 3\n" * (BYTES // 8), ""),
    "polygon.obj": (lambda: CORNERS + "f" + " 1 2 3" * (BYTES // 6) + "\n", ""),
    "vertices.obj": (lambda: "v 0 0 0\n" * (BYTES // 8) + "f 1 2 3\n", ""),
    "rows.ply": (lambda: PLY.format(vertices=3, faces=1) + "0 0 0\n1 0 0\n0 1 0\n3 0 1 2\n" + "\n" * BYTES, "takes 3"),
    "breaks.ply": (lambda: PLY.format(vertices=3, faces=1) + "\x1c" * BYTES, "takes 3"),
    "vertices.ply": (lambda: PLY.format(vertices=10**12, faces=1) + "0 0 0\n", "cannot be read|no faces"),
    "negative.ply": (lambda: PLY.format(vertices=10**12, faces=-(10**12)), "-1000000000000 elements"),
    "list.ply": (
        lambda: (
            PLY.format(vertices=0, faces=9).replace("ascii", "binary_little_endian").replace("uchar", "uint")
            + "\x7f" * 99
        ),
        "cannot be read|no faces",
    ),
    "properties.ply": (
        lambda: "ply\nformat ascii 1.0\nelement a 1\n" + "property list uchar uchar a\n" * 50_000,
        "1025 lines of header",
    ),
    "count.stl": (lambda: b"\0" * 80 + struct.pack("<I", 2**32 - 1) + b"\0" * 50, "cannot be read|no faces"),
    "solids.stl": (lambda: ("solid a\n" + "vertex 0\n" * 9 + "endsolid\n") * 20_000, r"\d+ solids .*at most 4096"),
    "words.stl": (lambda: "solid a\n" + "vertex\n" * (BYTES // 7) + "endsolid\n", ""),
}


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


@cache
def deflated(count: int, unit: bytes = b"\0" * 2**20) -> bytes:
    """``count`` times ``unit``, compressed: blocks that need nothing before them, of which one is made and repeated."""
    many = max(1, 2**20 // len(unit))
    content, checksum = b"\x78\xda", 1
    for data, times in ((unit * many, count // many), (unit * (count % many), 1)):
        packer = zlib.compressobj(9, wbits=-zlib.MAX_WBITS)
        content += times * (packer.compress(data) + packer.flush(zlib.Z_FULL_FLUSH))
        for _ in range(times):
            checksum = zlib.adler32(data, checksum)
    return content + b"\x03\0" + struct.pack(">I", checksum)  # an empty block is the last


def png(width: int, height: int, *chunks: bytes, colour: int = 0, rows: int | None = None, deep: bool = False) -> bytes:
    """A PNG of one colour, RGB of 8 bits or, ``deep``, RGBA of 16, with ``rows`` of its ``height``."""
    header = _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 16 if deep else 8, 6 if deep else 2, 0, 0, 0))
    pixels = deflated(height if rows is None else rows, b"\0" + bytes([colour, *[0] * (7 if deep else 2)]) * width)
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + _chunk(b"IDAT", pixels) + _chunk(b"IEND", b"")


def _saved(kind: str, side: int, count: int = 1) -> bytes:
    file, pictures = io.BytesIO(), [Image.new("RGB", (side, side), (at % 251, 0, 0)) for at in range(min(count, 2))]
    more = {"save_all": True, "append_images": [pictures[at % 2] for at in range(1, count)]} if count > 1 else {}
    pictures[0].save(file, kind, **more, **({"lossless": True, "method": 0} if kind == "WEBP" else {}))
    return file.getvalue()


def film(frames: int, side: int, kind: str = "mp4") -> bytes:
    """A video of still black frames."""
    file, picture = io.BytesIO(), av.VideoFrame.from_ndarray(np.zeros((side, side, 3), np.uint8), format="rgb24")
    with av.open(file, "w", format=kind) as container:
        stream = container.add_stream("mpeg4" if kind == "mp4" else "libvpx", rate=30)
        stream.width, stream.height, stream.pix_fmt = side, side, "yuv420p"
        for at in range(frames):
            picture.pts = at
            container.mux(stream.encode(picture))
        container.mux(stream.encode(None))
    return file.getvalue()


def claiming(content: bytes, box: bytes, count: int) -> bytes:
    """An MP4 whose table ``box`` claims ``count`` samples."""
    at = content.index(box) + (12 if box == b"stts" else 8)
    words = struct.pack(">II", 1, count) if box == b"stsz" else struct.pack(">I", count)
    return content[:at] + words + content[at + len(words) :]


def edited(count: int) -> bytes:
    """An MP4 that claims ``count`` edits, each of as many samples, of a byte each."""
    return claiming(claiming(film(9, 64), b"stsz", count), b"elst", count) + bytes(2 * count)


def texts() -> bytes:
    return png(4, 4, _chunk(b"zTXt", b"k\0\0" + deflated(1000)))


def icon(picture: bytes) -> bytes:
    """An ICO of a PNG of 4 x 4."""
    return struct.pack("<HHHBBBBHHII", 0, 1, 1, 4, 4, 0, 0, 1, 24, len(picture), 22) + picture


def film_of(pictures: Sequence[bytes], kind: str) -> bytes:
    """A video whose frames are ``pictures``, PNGs; its header claims 4 x 4."""
    file = io.BytesIO()
    with av.open(file, "w", format=kind) as container:
        stream = container.add_stream("png", rate=1)
        stream.width, stream.height, stream.pix_fmt = 4, 4, "rgb24"
        container.start_encoding()
        for at, picture in enumerate(pictures):
            (packet := av.Packet(picture)).stream = stream
            packet.pts = packet.dts = at
            packet.time_base, packet.is_keyframe = stream.time_base, True
            container.mux(packet)
    return file.getvalue()


def in_another_header(content: bytes, meta: bool) -> bytes:
    """An MP4 whose ``moov`` begins with an empty ``meta`` box, or has a 64-bit length."""
    at = content.index(b"moov") - 4
    size = int.from_bytes(content[at : at + 4], "big")
    head = (
        struct.pack(">I4sI4sI", size + 12, b"moov", 12, b"meta", 0)
        if meta
        else struct.pack(">I4sQ", 1, b"moov", size + 8)
    )
    return content[:at] + head + content[at + 8 :]


PICTURES: dict[str, tuple[Callable[[], bytes], str]] = {
    "wide.png": (lambda: png(9000, 9000), r"at most 33,[0-9,]+ pixels a frame"),
    "claim.png": (lambda: png(9000, 9000, rows=1), r"at most 33,[0-9,]+ pixels a frame"),
    "deep.png": (lambda: png(2600, 2500, deep=True), ""),
    "deeper.png": (lambda: png(5000, 5000, deep=True), r"at most 5,[0-9,]+ pixels a frame"),
    "line.png": (lambda: png(10**7, 1), ""),
    "text.png": (texts, ""),
    "text.mov": (lambda: film_of([texts()] * 2, "mov"), ""),
    "text.avi": (lambda: film_of([texts()] * 2, "avi"), ""),
    "wide.mov": (lambda: film_of([png(9000, 9000)], "mov"), "pixels|cannot be read"),
    "icon.png": (lambda: icon(texts()), "cannot be read"),
    "profile.png": (lambda: png(4, 4, _chunk(b"iCCP", b"k\0\0" + deflated(1000))), ""),
    "unicode.png": (lambda: png(4, 4, _chunk(b"iTXt", b"k\0\1\0\0\0" + deflated(1000))), ""),
    "wide.gif": (lambda: _saved("GIF", 6000), "pixels"),
    "frames.gif": (lambda: _saved("GIF", 64, 2000), ""),
    "frames.apng": (lambda: _saved("PNG", 64, 500), ""),
    "wide.webp": (lambda: _saved("WEBP", 6000), "pixels"),
    "frames.webp": (lambda: _saved("WEBP", 64, 50), ""),
    "wide.jpg": (lambda: _saved("JPEG", 6500), "pixels"),
    "even.tiff": (lambda: _saved("TIFF", 700), ""),
    "film.mp4": (lambda: film(60, 640), ""),
    "short.mp4": (lambda: film(9, 64), ""),
    "codec.mp4": (lambda: film(9, 64).replace(b"mp4v", b"zzzz").replace(b"esds", b"zzzz"), "no decoder for its codec"),
    "film.webm": (lambda: film(20, 320, "webm"), ""),
    "samples.mp4": (lambda: claiming(film(9, 64), b"stsz", 2**30), "a table of 1073741824 samples"),
    "wide_header.mp4": (
        lambda: in_another_header(claiming(film(9, 64), b"stsz", 2**30), meta=False),
        "a table of 1073741824 samples",
    ),
    "meta.mp4": (
        lambda: in_another_header(claiming(film(9, 64), b"stsz", 2**30), meta=True),
        "a table of 1073741824 samples",
    ),
    "edits.mp4": (lambda: edited(4000), "takes 512 MB"),
    "times.mp4": (lambda: claiming(film(9, 64), b"stts", 2**30), "a table of 1073741824 samples"),
}


def _header(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def _many(item: str, each: int = 8) -> str:
    return ",".join(item.format(n=n) for n in range(BYTES // each))


def _gguf(tensors: int = 0, notes: int = 0, body: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, notes) + body + bytes(64)


def _gguf_text(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def _gguf_lists(kind: int, each: int) -> bytes:
    room = BYTES // 20 // each * each
    lists = [_gguf_text(b"%x" % n) + struct.pack("<IIQ", 9, kind, room // each) + b"\xc8" * room for n in range(20)]
    return _gguf(notes=20, body=b"".join(lists))


def _pickle() -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", b"\x80\x02" + b"]" * 20 * BYTES + b".")
        archive.writestr("a/version", "3")
    return content.getvalue()


ENTRY = '"{n:x}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'
HEADERS: dict[str, tuple[Callable[[], bytes], str]] = {
    "lists.safetensors": (lambda: _header('{"a":[' + _many("[]", 3) + "]}"), "without offsets"),
    "dicts.safetensors": (lambda: _header('{"a":[' + _many("{{}}", 3) + "]}"), "without offsets"),
    "pairs.safetensors": (lambda: _header('{"__metadata__":{' + _many('"{n:x}":"{n:x}"', 14) + "}}"), ""),
    "entries.safetensors": (lambda: _header("{" + _many(ENTRY, 56) + "}"), ""),
    "numbers.safetensors": (lambda: _header('{"a":[' + _many("1000", 5) + "]}"), "without offsets"),
    "deep.safetensors": (lambda: _header("[" * BYTES), "not JSON|takes"),
    "lists.json": (lambda: f'{{"a":[{_many("[]", 3)}]}}'.encode(), ""),
    "pairs.json": (lambda: f'{{"a":{{{_many(chr(34) + "{n:x}" + chr(34) + ":1", 10)}}}}}'.encode(), ""),
    "deep.json": (lambda: b"[" * BYTES, "cannot be read|takes"),
    "digits.json": (lambda: b'{"a":' + b"9" * BYTES + b"}", "cannot be read"),
    "tensors.gguf": (lambda: _gguf(tensors=BYTES // 33, body=b"".join(
        _gguf_text(b"%05x" % n) + struct.pack("<IQIQ", 1, 0, 0, 0) for n in range(BYTES // 33))), ""),
    "claimed.gguf": (lambda: _gguf(tensors=90_000), "cannot be read"),
    "notes.gguf": (lambda: _gguf(notes=90_000, body=b"".join(
        _gguf_text(b"%05x" % n) + struct.pack("<IB", 0, 200) for n in range(90_000))), ""),
    "bytes.gguf": (lambda: _gguf_lists(1, 1), ""),
    "shorts.gguf": (lambda: _gguf_lists(3, 2), ""),
    "texts.gguf": (lambda: _gguf(
        notes=1, body=_gguf_text(b"a") + struct.pack("<IIQ", 9, 8, BYTES // 8) + bytes(BYTES // 8 * 8)), ""),
    "pickle.bin": (_pickle, "compressed"),
}  # fmt: skip


def written(folder: Path, only: set[str] | None = None) -> Iterator[tuple[Path, str]]:
    """Each bomb as a file in ``folder``, and what its refusal says; empty where it is read."""
    for name, (made, refusal) in {**MESHES, **PICTURES, **HEADERS}.items():
        if only is None or name in only:
            content = made()
            (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode("latin-1"))
            yield folder / name, refusal
