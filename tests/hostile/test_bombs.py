"""Small files that claim far more than they hold: refused by their numbers or read in little memory, and cancelled."""

import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import av
import numpy as np
import pytest
import torch
import trimesh
from anygpu.compat.checkpoints import identity
from anygpu.compat.checkpoints.gguf_file import gguf_header
from anygpu.compat.checkpoints.headers import entries_and_notes
from anygpu.compat.checkpoints.identity import picture_content
from anygpu.compat.checkpoints.weights import read_json
from anygpu.compat.errors import CheckpointError, reading_budget
from anygpu.paint.geometry.mesh import load_mesh
from anygpu.paint.networks.weights import weights_in
from anygpu.pipelines import movie
from anygpu.pipelines.movie import Allowance, content_in, read_frames, size_in, transparency, write_mp4
from anygpu.pipelines.records import places as picture_index
from anygpu.pipelines.records.job import Content
from anygpu.pipelines.records.places import Places
from PIL import ExifTags, Image

from hostile import bombs

LONG = {"materials.glb", "images.glb", "many.glb", "nodes.glb", "primitives.glb", "chain.glb", "attributes.glb"}
LONG |= {"materials.obj", "solids.stl", "rows.ply", "breaks.ply", "deep.gltf", "extras.glb", "properties.ply"}
LONG |= {"lists.safetensors", "dicts.safetensors", "numbers.safetensors", "pickle.bin"}
LONG |= {"wide.png", "wide.gif", "wide.webp", "wide.jpg", "deeper.png"}
EVERY = {**bombs.MESHES, **bombs.PICTURES, **bombs.HEADERS}
QUICK = sorted(name for name, (_, said) in EVERY.items() if said and name not in LONG)
CHILD = """
import resource, sys
from pathlib import Path
resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
from hostile import test_bombs
test_bombs.measure(Path(sys.argv[1]))
"""


class Cancel(Exception):
    """What the host raises."""


HEADER_READERS: dict[str, Callable[[Path], object]] = {
    ".safetensors": lambda path: len(entries_and_notes(path)[0]),
    ".gguf": lambda path: len(gguf_header(path)[0]),
    ".json": lambda path: len(read_json(path, "settings")),
    ".bin": lambda path: len(weights_in(path, "UNet").shapes),
}


def cancelling(at: int) -> tuple[Callable[[], None], list[int]]:
    """A check that cancels when it is asked for the ``at``-th time, and the times it was asked."""
    asked: list[int] = []

    def check() -> None:
        asked.append(len(asked) + 1)
        if len(asked) == at:
            raise Cancel

    return check, asked


def read(path: Path, check: Callable[[], None] = lambda: None) -> int:
    """Bytes of what the reader of a file gives back."""
    if path.name in bombs.HEADERS:
        HEADER_READERS[path.suffix](path)
        return 0
    if path.name in bombs.MESHES:
        mesh, _ = load_mesh(path, check)
        return sum(part.nbytes for part in (mesh.vertices, mesh.faces, mesh.uvs) if part is not None)
    return read_frames(path, check=check)[0].nbytes


def measure(folder: Path) -> None:
    """Fail for a bomb that takes more memory than ten times its file, 200 MB and what reading it gives back."""
    read_frames(next(iter(bombs.written(folder, {"frames.gif"})))[0])
    read(next(iter(bombs.written(folder, {"texture_nodes.glb"})))[0])  # what is imported once
    count, whole = 0, bombs.BYTES
    for bombs.BYTES in (whole, whole // 3, whole // 9):
        for path, said in bombs.written(folder):
            Path("/proc/self/clear_refs").write_text("5")  # the peak is what is there now
            before, kept, text = peak(), 0, ""
            try:
                kept = read(path)
            except CheckpointError as error:
                text = str(error)
            took = peak() - before
            assert took <= reading_budget(path.stat().st_size) + kept, f"{path.name} took {took:,} bytes"
            expected = whole > bombs.BYTES or re.search(said, text)
            assert "\n" not in text and expected, f"{path.name}: {text or 'read'}, not {said!r}"
            count += 1
    assert count >= 200
    print(f"{count} files")


def peak() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0])


@pytest.mark.full
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux, which tells peaks of memory")
def test_no_bomb_takes_more_than_ten_times_its_file_and_200_mb(tmp_path: Path) -> None:
    tests = Path(__file__).parent.parent
    run = subprocess.run([sys.executable, "-c", CHILD, tmp_path], cwd=tests, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    assert int(run.stdout.split()[0]) >= 200


def test_a_bomb_is_refused_by_its_numbers(tmp_path: Path) -> None:
    seen = []
    for path, said in bombs.written(tmp_path, set(QUICK)):
        with pytest.raises(CheckpointError, match=said) as caught:
            read(path)
        assert "\n" not in str(caught.value)
        seen.append(path.name)
    assert sorted(seen) == QUICK


@pytest.mark.parametrize(
    "name",
    ["names.glb", "short.mp4", *(pytest.param(name, marks=pytest.mark.full) for name in ("mixed.obj", "frames.gif"))],
)
def test_a_cancel_ends_a_reader_where_it_is(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bombs, "BYTES", 400_000)
    path, _ = next(bombs.written(tmp_path, {name}))
    read(path)  # what it imports and keeps is called once
    never, whole = cancelling(0)
    read(path, never)
    assert len(whole) > 2, "asked at every chunk"
    threads = threading.active_count()
    for at in (1, len(whole) // 2, len(whole) - 1):  # finalisers are calls too, so the last may not come again
        check, asked = cancelling(at)
        with pytest.raises(Cancel):
            read(path, check)
        assert len(asked) == at and threading.active_count() == threads and sys.getprofile() is None


def test_a_cancel_ends_a_mesh_that_swallows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python takes off what raises the cancel, so it is put back."""
    done = []

    def swallowing(*_: Any, **__: Any) -> None:
        for step in range(40):
            with suppress(BaseException):
                for _ in range(10_000):
                    len("")
                done.append(step)

    monkeypatch.setattr(trimesh, "load_scene", swallowing)
    check, _ = cancelling(6)
    with pytest.raises(Cancel):
        load_mesh(next(bombs.written(tmp_path, {"names.glb"}))[0], check)
    assert len(done) < 4 and sys.getprofile() is None and sys.gettrace() is None


def ordinary(folder: Path) -> list[Path]:
    """Files as people have them, in every format: quads and materials, nodes in nodes, textures, colours."""
    ball = trimesh.creation.icosphere(3)
    uv = np.random.default_rng(0).random((len(ball.vertices), 2))
    scene = trimesh.Scene()
    for at in range(3):
        material = trimesh.visual.material.PBRMaterial(
            baseColorTexture=Image.new("RGB", (64 + 32 * at, 64), (at, 0, 0)), baseColorFactor=[255, 9, 9, 255]
        )
        visual = trimesh.visual.TextureVisuals(uv=uv, material=material)
        part = trimesh.Trimesh(ball.vertices, ball.faces, visual=visual, process=False)
        parent = f"node {at - 1}" if at else None
        scene.add_geometry(part, node_name=f"node {at}", parent_node_name=parent, transform=np.diag([2, 2, 2, 1]))
    for name, whole in (("scene.glb", scene), ("ball.stl", ball), ("ball.ply", ball), ("ball.obj", ball)):
        whole.export(folder / name)
    (folder / "text.stl").write_text(trimesh.exchange.stl.export_stl_ascii(ball))
    (folder / "text.ply").write_bytes(trimesh.exchange.ply.export_ply(ball, encoding="ascii"))
    for name, content in trimesh.exchange.gltf.export_gltf(scene).items():
        (folder / name.replace("model", "scene")).write_bytes(content)
    mtl = "".join(f"newmtl m{at}\nKd 0.{at} 0 0\n" for at in range(3))
    (folder / "parts.mtl").write_text(mtl)
    lines = "".join(f"v {x} {y} 0\nvt {x / 9} {y / 9}\n" for x in range(9) for y in range(9))
    quads = "".join(f"usemtl m{at % 3}\nf {at}/{at} {at + 1}/{at + 1} {at + 10}/{at + 10}\n" for at in range(1, 70))
    (folder / "parts.obj").write_text(f"mtllib parts.mtl\n{lines}{quads}f 1/1 2/2 11/11 10/10\n")
    return sorted(path for path in folder.iterdir() if path.suffix in (".glb", ".gltf", ".obj", ".ply", ".stl"))


def test_ordinary_meshes_are_what_trimesh_reads(tmp_path: Path) -> None:
    paths = ordinary(tmp_path)
    assert len(paths) == 8
    for path in paths:
        mesh, _ = load_mesh(path)
        scene = trimesh.load_scene(path, process=False)
        whole = scene.to_mesh()
        corners = torch.tensor(whole.triangles, dtype=torch.float64)
        assert torch.equal(mesh.vertices[mesh.faces], corners), path.name
        if mesh.uvs is not None:
            own = np.concatenate([part.visual.uv for part in scene.dump()])  # to_mesh has but a pixel of each colour
            expected = torch.tensor(own if path.name == "parts.obj" else whole.visual.uv, dtype=torch.float32)
            assert torch.equal(mesh.uvs, torch.stack((expected[:, 0], 1 - expected[:, 1]), 1)), path.name


def frames_before(path: Path) -> torch.Tensor:
    """All frames of whole blocks, as core reads them in one list: of some formats in 8 bits, of others in floats."""
    with av.open(str(path)) as container:
        frames = list(container.decode(video=0))
    if frames[0].format.name in ("yuvj420p", "rgb24", "rgba", "pal8"):
        read = [torch.from_numpy(frame.to_ndarray(format="rgb24")).float() / 255 for frame in frames]
    else:
        read = [torch.from_numpy(frame.to_ndarray(format="gbrpf32le")) for frame in frames]
    return torch.stack(read).rot90(frames[0].rotation // 90, (1, 2))


def test_pictures_and_their_contents_are_as_before(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (40, 64, 3), np.uint8)
    picture = Image.fromarray(noise)
    for suffix in ("png", "jpg", "webp", "bmp", "tiff"):
        picture.save(tmp_path / f"a.{suffix}", icc_profile=b"a profile")
    picture.save(tmp_path / "a.gif", save_all=True, append_images=[picture.rotate(90 * at) for at in (1, 2, 3)])
    Image.fromarray(noise.repeat(9, 0)).save(tmp_path / "photo.jpg", quality=95)  # FFmpeg takes small ones by content
    for at, suffix in enumerate(("mov", "avi")):
        shown = bombs.png(4, 4, colour=90 + at), bombs.png(4, 4, colour=7)
        (tmp_path / f"frames.{suffix}").write_bytes(bombs.film_of(shown, suffix))
    write_mp4(torch.rand(9, 32, 48, 3, generator=torch.Generator().manual_seed(0)), 12.0, tmp_path / "a.mp4")
    for path in sorted(tmp_path.iterdir()):
        expected = frames_before(path)
        assert torch.equal(read_frames(path)[0], expected), path.name
        assert torch.equal(read_frames(path, 1)[0], expected[:1]), path.name
        assert content_in(path, lambda: None, Allowance()) == picture_content(expected), path.name
    levels = torch.arange(256, dtype=torch.uint8).repeat(3).view(1, 16, 16, 3)
    assert torch.equal((levels.float() / 255).mul(255).round().to(torch.uint8), levels), "8 bits come back"


@pytest.mark.parametrize("suffix", ["png", "webp", "tiff"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_pictures_are_turned_as_core_s_load_image_turns_them(tmp_path: Path, suffix: str, orientation: int) -> None:
    path, noise = tmp_path / f"a.{suffix}", np.random.default_rng(0).integers(0, 256, (40, 64, 4), np.uint8)
    (exif := Image.Exif())[ExifTags.Base.Orientation] = orientation
    Image.fromarray(noise).save(path, exif=exif, lossless=True)
    turns = {2: 2, 3: 2, 5: 3, 6: 3, 7: 1, 8: 1}.get(orientation, 0)  # to the left, as core turns, which mirrors none
    alpha = torch.from_numpy(noise[..., 3]).float().div(255).rot90(turns)
    assert torch.allclose(transparency(path, alpha.shape)[0], 1 - alpha, atol=5e-3)
    Image.fromarray(noise).convert("RGB").save(path, exif=exif, lossless=True)
    core = frames_before(path)
    assert torch.allclose(core[0], torch.from_numpy(noise[..., :3]).float().div(255).rot90(turns), atol=5e-3)
    assert torch.equal(read_frames(path)[0], core)
    content = Content("away.png", picture_content(core), size=(core.shape[2], core.shape[1]))
    assert torch.equal(Places(files=(tmp_path,)).frames(content)[0], core)


@pytest.mark.skipif(not hasattr(av.VideoStream, "set_display_rotation"), reason="this PyAV writes no rotation")
def test_a_video_is_turned_as_core_s_load_video_turns_it(tmp_path: Path) -> None:
    with av.open(str(path := tmp_path / "a.mp4"), "w") as container:
        stream = container.add_stream("mpeg4", rate=8)
        stream.width, stream.height, stream.pix_fmt = 64, 32, "yuv420p"
        stream.set_display_rotation(90)
        levels = np.random.default_rng(0).integers(0, 256, (32, 64, 3), np.uint8)
        container.mux([*stream.encode(av.VideoFrame.from_ndarray(levels)), *stream.encode(None)])
    assert torch.equal(read_frames(path)[0], frames_before(path)) and read_frames(path)[0].shape[1:3] == (64, 32)


def test_a_search_decodes_each_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[str] = []

    def counted(path: Path, *rest: Any) -> str:
        decoded.append(path.name)
        return content_in(path, *rest)

    monkeypatch.setattr(picture_index, "content_in", counted)
    monkeypatch.setattr(identity, "RESTING_NS", 0)  # files of this moment are not remembered
    folder, state = tmp_path / "files", tmp_path / "state"
    folder.mkdir()
    for at in range(4):
        Image.new("RGB", (8, 8), (at, 0, 0)).save(folder / f"{at}.png")
    (folder / "5.png").write_bytes(b"none")
    content = Content("away.png", content_in(folder / "3.png", lambda: None, Allowance()))
    assert Places(files=(folder,), state=state).frames(content)[0].shape == (1, 8, 8, 3)
    assert decoded == [f"{at}.png" for at in range(4)]
    Places(files=(folder,), state=state).frames(content)
    assert len(decoded) == 4, "the index knows them"
    Image.new("RGB", (9, 9)).save(folder / "0.png")
    other = Content("away.png", "0" * 32)
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"no .away\.png"):
            Places(files=(folder,), state=state).frames(other)
    assert decoded[4:] == ["0.png", "5.png"], "what changed, and what is no picture, once"
    Image.new("RGB", (8, 8), (9, 0, 0)).save(folder / "6.png")
    later = Content("away.png", content_in(folder / "6.png", lambda: None, Allowance()))
    with monkeypatch.context() as share, pytest.raises(CheckpointError, match=r"no .away\.png"):
        share.setattr(movie, "_require_samples", Mock(side_effect=OSError(5, "Input/output error")))
        Places(files=(folder,), state=state).frames(later)
    assert Places(files=(folder,), state=state).frames(later)[0].shape == (1, 8, 8, 3), "the share is there again"
    (state / picture_index.FILE).write_text("[" * 99999)
    assert Places(files=(folder,), state=state).frames(content)[0].shape == (1, 8, 8, 3)


def test_a_search_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a stated number of pixels, and with a cancel."""
    for at in range(9):
        Image.new("RGB", (10, 10), (at, 0, 0)).save(tmp_path / f"{at}.png")
    monkeypatch.setattr("anygpu.pipelines.records.places.MOST_SOUGHT", 700)
    seen: list[int] = []
    with pytest.raises(CheckpointError, match="the search ends after 700 pixels"):
        Places(files=(tmp_path,)).frames(Content("away.png", "0" * 32), lambda: seen.append(1))
    assert 7 < len(seen) <= 9 + 8, "one for each file, one for each frame"
    check, asked = cancelling(3)
    with pytest.raises(Cancel):
        Places(files=(tmp_path,)).frames(Content("away.png", "0" * 32), check)
    assert len(asked) == 3


def test_a_video_without_a_decoder_has_no_size(tmp_path: Path) -> None:
    assert [size_in(path) for path, _ in bombs.written(tmp_path, {"codec.mp4", "short.mp4"})] == [(64, 64), ()]
