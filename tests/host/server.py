"""A real ComfyUI with this pack attached, in a temporary base directory: found, checked, started, stopped.

Nothing is installed into it and none of its files change. ``COMFYUI_PATH`` names the checkout, else
``~/comfy/ComfyUI``; ``COMFYUI_PYTHON`` its interpreter, else its ``.venv`` or ``venv``.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import tiny
from anygpu.compat.checkpoints.latents import metadata_of, record_in
from anygpu.pipelines.demo.scenes import COLOURS
from PIL import Image

from .prompts import SCENE_CLIP, SCENE_PICTURE

ROOT = Path(__file__).resolve().parents[2]
PACK, STAND_INS, GPU, OLDER, WATCHING = "anygpu", "stand_ins", "simulated_gpu", "older_gpu", "watching"
START_SECONDS = 180
PICTURE, CLIP = "example.png", "example.mp4"
COLOUR = re.compile(r"\x1b\[[0-9;]*m")

# The names under which people download the models, and the tiny checkpoint that stands in for each.
PUBLISHED = {
    "LTX-Video": "ltx",
    "LTX-Video-0.9.5": "ltx_condition",
    "HunyuanVideo": "hunyuan_video",
    "HunyuanVideo-I2V": "hunyuan_video_i2v",
    "HunyuanVideo-I2V-33ch": "hunyuan_video_i2v_33ch",
    "HunyuanVideo-1.5-Diffusers-480p_t2v": "hunyuan_video_15",
    "HunyuanVideo-1.5-Diffusers-480p_i2v": "hunyuan_video_15_i2v",
    "FramePackI2V_HY": "framepack",
    "FramePack_F1_I2V_HY_20250503": "framepack_f1",
    "flux_redux_bfl": "siglip",
    "mochi-1-preview": "mochi",
}

ASK_VERSIONS = """
import sys
from importlib import metadata
from packaging.requirements import Requirement
for line in sys.argv[1:]:
    wanted = Requirement(line)
    try:
        found = metadata.version(wanted.name)
    except metadata.PackageNotFoundError:
        found = None
    if found is None or not wanted.specifier.contains(found, prereleases=True):
        print(line)
"""


class NoHost(Exception):
    """There is no ComfyUI that the tests could use; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Host:
    """A ComfyUI checkout and the interpreter it runs under."""

    root: Path
    python: Path


def find_host() -> Host:
    """The ComfyUI of this machine, with everything this pack requires.

    Raises:
        NoHost: no checkout, no interpreter, or a package that the pack requires is missing there.
    """
    root = Path(os.environ.get("COMFYUI_PATH") or "~/comfy/ComfyUI").expanduser()
    if not (root / "main.py").is_file():
        raise NoHost(f"no ComfyUI in {root}; name a checkout in COMFYUI_PATH")
    named = os.environ.get("COMFYUI_PYTHON")
    places = [root / name / place for name in (".venv", "venv") for place in ("bin/python", "Scripts/python.exe")]
    python = Path(named).expanduser() if named else next((place for place in places if place.is_file()), None)
    if python is None or not python.is_file():
        raise NoHost(f"no interpreter for {root}; name one in COMFYUI_PYTHON, or make {root / '.venv'}")
    missing = missing_requirements(python)
    if missing:
        quoted = " ".join(f'"{line}"' for line in missing)
        raise NoHost(f"the interpreter of {root} lacks what this pack requires; run: {python} -m pip install {quoted}")
    return Host(root, python)


def missing_requirements(python: Path) -> list[str]:
    """The lines of ``requirements.txt`` that the packages of an interpreter do not satisfy."""
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    wanted = [line for line in (line.split("#")[0].strip() for line in lines) if line]
    found = subprocess.run([python, "-c", ASK_VERSIONS, *wanted], capture_output=True, text=True, timeout=60)
    if found.returncode:
        raise NoHost(f"{python} cannot list its packages: {found.stderr.strip().splitlines()[-1:]}")
    return found.stdout.split("\n")[:-1]


@dataclass
class Server:
    """One running ComfyUI.

    Args:
        host: the checkout. base: an empty folder for its models, inputs, outputs and settings.
        tiny_folder: where tiny checkpoints are built. attach: whether the pack is there.
        gpu: whether ComfyUI computes on the simulated accelerator; on the CPU otherwise.
        older: whether that counts as an RTX 2060, with core's large classes in small sizes.
        watched: whether each file, socket and process that it touches is written down.
        arguments: further arguments of ComfyUI. bytecode: where compiled modules are kept; else each start compiles.
        pack: the folder of the pack.
    """

    host: Host
    base: Path
    tiny_folder: Path
    attach: bool = True
    stand_ins: bool = False
    gpu: bool = False
    older: bool = False
    watched: bool = False
    arguments: tuple[str, ...] = ()
    bytecode: Path | None = None
    pack: Path = ROOT
    port: int = 0
    start_seconds: float = 0.0
    ended_with: int | None = None
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def url(self) -> str:
        """Where it answers, without a slash at the end."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """The process that runs; 0 before and after."""
        return 0 if self._process is None else self._process.pid

    @property
    def log(self) -> str:
        """Everything it has written so far, without colours."""
        return COLOUR.sub("", (self.base / "server.log").read_text(encoding="utf-8", errors="replace"))

    def start(self) -> Server:
        """Itself, once it answers.

        Raises:
            RuntimeError: it ended or did not answer; with the end of its log.
        """
        self._install()
        self.port = self.port or free_port()
        started = time.monotonic()
        with (self.base / "server.log").open("wb") as log:
            self._process = subprocess.Popen(
                self._command(),
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environment(self.bytecode),
                start_new_session=True,
            )
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() - started > START_SECONDS:
                self.stop()
                raise RuntimeError(f"ComfyUI did not start:\n{self.log[-4000:]}")
            time.sleep(0.1)
        self.start_seconds = time.monotonic() - started
        return self

    def stop(self) -> None:
        """End the process and what it started."""
        if self._process is None:
            return
        for ending in (signal.SIGTERM, signal.SIGKILL if hasattr(signal, "SIGKILL") else signal.SIGTERM):
            if self._process.poll() is None:
                self._process.send_signal(ending)
                try:
                    self._process.wait(10)
                except subprocess.TimeoutExpired:
                    continue
        self.ended_with = self._process.returncode
        self._process = None

    def model(self, published: str) -> str:
        """The name ``published``, after putting its tiny checkpoint under that name among the models."""
        return self.weights_on(tiny.build(PUBLISHED[published], self.tiny_folder), published)

    @contextmanager
    def without_models(self) -> Iterator[Path]:
        """The folder of pipelines, empty for a while."""
        models = self.base / "models" / "diffusers"
        away = models.rename(models.with_name("away"))
        models.mkdir()
        try:
            yield models
        finally:
            models.rmdir()
            away.rename(models)

    def every_model(self) -> None:
        """Put every tiny checkpoint among the models."""
        for published in PUBLISHED:
            self.model(published)

    def weights_on(self, folder: Path, name: str) -> str:
        """``name``, after linking ``folder`` under it among the models."""
        link = self.base / "models" / "diffusers" / name
        if not link.exists():
            link.symlink_to(folder, target_is_directory=True)
        return name

    def unfinished(self) -> list[str]:
        """What the kept latents of samplings that were cut short say of themselves."""
        kept = (self.base / "user" / "anygpu" / "kept").glob("*.safetensors")
        found = [record_in(metadata_of(path), path).get("unfinished", "") for path in kept]
        return [text for text in found if text]

    def output(self, record: dict[str, str]) -> Path:
        """The file that an output record of a node names."""
        return self.base / record.get("type", "output") / record.get("subfolder", "") / record["filename"]

    def _command(self) -> list[str]:
        flags = [
            "--cpu", "--base-directory", self.base, "--extra-model-paths-config", self.base / "attached.yaml",
            "--disable-all-custom-nodes", *(("--whitelist-custom-nodes", *self._packs()) if self.attach else ()),
            "--disable-api-nodes", "--database-url", "sqlite:///:memory:", "--port", self.port, "--preview-method",
            "latent2rgb",
        ]  # fmt: skip
        launcher = Path(__file__).with_name("launch.py")
        return [str(part) for part in (self.host.python, launcher, self.host.root, *flags, *self.arguments)]

    def _packs(self) -> dict[str, Path]:
        """Name to folder of the packs that are attached."""
        packs = {STAND_INS: self.stand_ins, GPU: self.gpu, OLDER: self.older, WATCHING: self.watched}
        beside = [name for name, wanted in packs.items() if wanted]
        return {PACK: self.pack, **{name: Path(__file__).with_name(name) for name in beside}} if self.attach else {}

    def _install(self) -> None:
        """The folders of the base directory, the pack in one of its own, and a picture and a clip to load."""
        packs = self.base / "packs"
        for folder in (packs, self.base / "models" / "diffusers", self.base / "input", self.base / "custom_nodes"):
            folder.mkdir(parents=True, exist_ok=True)
        for name, folder in self._packs().items():
            if not (packs / name).exists():
                (packs / name).symlink_to(folder, target_is_directory=True)
        attached = f"attached:\n  custom_nodes: {json.dumps(str(packs))}\n"
        (self.base / "attached.yaml").write_text(attached, encoding="utf-8")
        picture = self.host.root / "input" / PICTURE
        if picture.is_file():
            shutil.copyfile(picture, self.base / "input" / PICTURE)
        else:
            Image.fromarray(moving_picture(0, 256, 256)).save(self.base / "input" / PICTURE)
        write_clip(self.base / "input" / CLIP)
        scene = scene_pictures()
        Image.fromarray(scene[0]).save(self.base / "input" / SCENE_PICTURE)
        write_clip(self.base / "input" / SCENE_CLIP, scene)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/system_stats", timeout=2) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False


@contextmanager
def served(base: Path, tiny_folder: Path, before: Callable[[Server], object] = bool, **chosen: Any) -> Iterator[Server]:
    """A running ComfyUI, stopped at the end; skips, and says what to do, where there is none.

    Args:
        before: what is done with it before it starts. chosen: as :class:`Server` takes it.
    """
    try:
        host = find_host()
    except NoHost as reason:
        pytest.skip(str(reason))
    running = Server(host, base, tiny_folder, **chosen)
    before(running)
    try:
        yield running.start()
    finally:
        running.stop()


def write_clip(path: Path, pictures: Sequence[np.ndarray] | None = None, fps: int = 8) -> None:
    """Write pictures (height, width, 3) uint8 as H.264; without any, a clip of a moving square."""
    pictures = [moving_picture(index, 96, 64) for index in range(17)] if pictures is None else pictures
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=fps)
        stream.width, stream.height, stream.pix_fmt = pictures[0].shape[1], pictures[0].shape[0], "yuv420p"
        for picture in pictures:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())


def scene_pictures() -> list[np.ndarray]:
    """Seventeen pictures of :data:`SCENE`, in the colours of the demo models' world."""
    pictures = [np.full((64, 64, 3), COLOURS["blue"], np.uint8) for _ in range(17)]
    for index, picture in enumerate(pictures):
        picture[22:42, 40 - 2 * index : 60 - 2 * index] = COLOURS["red"]
    return pictures


def moving_picture(index: int, width: int, height: int) -> np.ndarray:
    """Frame ``index`` of a bright square that moves over a gradient, (height, width, 3) uint8."""
    rows, columns = np.mgrid[:height, :width]
    picture = np.stack([rows * 255 // height, columns * 255 // width, np.full_like(rows, 96)], axis=-1).astype(np.uint8)
    left = (index * 3) % max(1, width - 24)
    picture[height // 3 : height // 3 + 24, left : left + 24] = (250, 230, 60)
    return picture


def free_port() -> int:
    """A port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment(bytecode: Path | None = None) -> dict[str, str]:
    """One thread per operation, no network, and no bytecode beside the sources of checkout and host.

    Args:
        bytecode: a folder for it.
    """
    chosen = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUTF8": "1"}
    if bytecode is not None:
        chosen |= {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(bytecode)}
    dropped = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    return {**{name: value for name, value in os.environ.items() if name not in dropped}, **chosen}


def tiny_home() -> Path:
    """Where scripts build tiny checkpoints; tests use the folder of their fixture."""
    folder = ROOT / ".build" / "tiny-host"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def main() -> None:
    """Serve until interrupted, to look at the workflows by hand: ``python -m host.server [port]`` in ``tests``."""
    import tempfile

    try:
        host = find_host()
    except NoHost as reason:
        sys.exit(str(reason))
    with tempfile.TemporaryDirectory(prefix="anygpu-host-") as folder:
        server = Server(host, Path(folder), tiny_home(), port=int(sys.argv[1]) if len(sys.argv) > 1 else 0)
        try:
            server.start().every_model()
            print(f"{server.url} (base directory {folder}); Ctrl-C ends it", flush=True)
            while server._answers():
                time.sleep(2)
        except KeyboardInterrupt:
            pass
        finally:
            server.stop()


if __name__ == "__main__":
    main()
