"""The image of the recipes, built by buildah from the Dockerfile and started by the compose files' commands.

No registry of images is asked: debootstrap's Debian 12 with a Python 3.11 in /usr/local stands in for python:3.11-slim.
This machine's own settings of pip and apt, and the folders of wheels that they name, are mounted while the image is
built, and are not in it. torch is the version of constraints.txt, from $TORCH_INDEX or pip's own index. Head, worker
and stranger have processes, a root and a network of their own, which end with the test. Beyond the recipes' commands
`watch` is told `--device cpu`, and each box has room for one worker. Needs root, buildah, debootstrap, iproute2 and
unshare (``make test-image``).
"""

import ast
import os
import re
import shlex
import shutil
import string
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from anygpu.pipelines.records.job_folder import JobFolder
from anygpu.pipelines.records.receipts import read_receipt

pytestmark = [pytest.mark.farm, pytest.mark.full]
ROOT = Path(__file__).resolve().parents[2]
RECIPES, BASE = ROOT / "farm" / "recipes", ROOT / ".build" / "farm-base.tar"
BOXES = {"head": "10.77.0.1", "worker": "10.77.0.2", "stranger": "10.77.0.3"}
PATH = "/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"
PYTHON = "/usr/local/lib/python3.11/site-packages"
ONE_CORE = {"RAY_OVERRIDE_RESOURCES": '{"CPU": 1}'}  # a box has room for one worker, as one with one card has
PROMPT, SIZE = "a red fox", ("--width", "64", "--height", "64", "--frames", "9", "--steps", "4")
# KubeRay's probes of a head: ray-operator/controllers/ray/utils/util.go and constant.go
PROBE = "wget --tries 1 -T 2 -q -O- http://localhost:{}/{} | grep success"
PROBES = [PROBE.format(52365, "api/local_raylet_healthz"), PROBE.format(8265, "api/gcs_healthz")]


def done(*words: object, **more: Any) -> str:
    """What a command prints; its end is shown where it fails."""
    ended = subprocess.run([*map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **more)
    assert ended.returncode == 0, f"{words}\n{ended.stdout[-6000:]}"
    return ended.stdout


def pip_settings() -> dict[str, str]:
    """What pip is told on this machine by its files and the environment, and to take the torch of constraints.txt."""
    listed = re.findall(
        r"^(global|install|:env:)\.([\w-]+)=(.*)$", done(sys.executable, "-m", "pip", "config", "list"), re.M
    )
    settings = {
        name: ast.literal_eval(value)
        for where in ("global", "install", ":env:")
        for of, name, value in listed
        if of == where
    }
    settings["constraint"] = f"{settings.get('constraint', '')} {ROOT / 'constraints.txt'}".strip()
    return settings


def mounts_of(settings: dict[str, str], folder: Path) -> list[str]:
    """Flags of buildah by which a build has ``settings`` of pip, what they name, and this machine's of apt."""
    config = folder / "pip.conf"
    config.write_text("\n".join(["[global]", *(f"{name} = {value}" for name, value in settings.items())]) + "\n")
    words = [word for value in settings.values() for word in value.split()]
    paths = {Path(word[7:]).parent if word.startswith("file://") else Path(word) for word in words}
    flags = [f"--volume={path}:{path}:ro" for path in sorted(paths) if path.is_absolute() and path.exists()]
    return [*flags, f"--volume={config}:/etc/pip.conf:ro", "--volume=/etc/apt/apt.conf.d:/etc/apt/apt.conf.d:ro"]


@dataclass
class Farm:
    """Images, and the boxes in which they run."""

    folder: Path
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def buildah(self) -> list[str]:
        """The command, with a store of its own."""
        return ["buildah", f"--root={self.folder}/store", f"--runroot={self.folder}/run", "--storage-driver=vfs"]

    def timed(self, step: str, work: Callable[[], object]) -> None:
        """Do ``work`` and print how long it took."""
        begin = time.monotonic()
        work()
        self.seconds[step] = time.monotonic() - begin
        print(f"\n{step}: {self.seconds[step]:.0f} s", flush=True)

    def base(self) -> None:
        """Debian 12 with Python 3.11 in /usr/local, kept in .build for the next time."""
        if not BASE.exists():
            root = self.folder / "debian"
            done("debootstrap", "--variant=minbase", "--include=python3-venv,ca-certificates", "bookworm", root)
            done("chroot", root, "python3", "-m", "venv", "/usr/local")
            BASE.parent.mkdir(exist_ok=True)
            done("tar", "-C", root, "-cf", BASE.with_suffix(".part"), ".")
            BASE.with_suffix(".part").rename(BASE)
            shutil.rmtree(root)
        box = done(*self.buildah, "from", "scratch").split()[-1]
        done(*self.buildah, "add", "--quiet", box, BASE, "/")
        done(*self.buildah, "config", f"--env=PATH={PATH}", box)
        done(*self.buildah, "commit", "--quiet", "--rm", box, "farm-base")

    def build(self, *flags: str, source: Path = RECIPES / "Dockerfile", name: str = "anygpu-farm") -> None:
        """The image ``name``, from this tree."""
        how = ("--isolation=chroot", "--network=host", "--pull-never", f"--file={source}", f"--tag={name}")
        done(*self.buildah, "build", *how, *flags, ROOT)

    def root_of(self, image: str, box: str) -> Path:
        """The files of a new box."""
        done(*self.buildah, "from", "--pull-never", f"--name={box}", f"localhost/{image}")
        return Path(done(*self.buildah, "mount", box).strip())

    def network(self) -> None:
        """One for each box, joined by a bridge that the head has."""
        for box in BOXES:
            done("ip", "netns", "add", self.name(box))
        done("ip", "-n", self.name("head"), "link", "add", "eth0", "type", "bridge")
        for box, address in BOXES.items():
            if box != "head":
                pair = (box, "type", "veth", "peer", "name", "eth0", "netns", self.name(box))
                done("ip", "-n", self.name("head"), "link", "add", *pair)
                done("ip", "-n", self.name("head"), "link", "set", box, "master", "eth0", "up")
            done("ip", "-n", self.name(box), "address", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                done("ip", "-n", self.name(box), "link", "set", device, "up")

    def name(self, box: str) -> str:
        """The box's network, which no other run of this test has."""
        return f"{box}-{os.getpid()}"

    def words(self, box: str, *command: str, env: dict[str, str] | None = None, token: bool = False) -> list[str]:
        """The command line of a process in a box, with the folders and the secret that the recipes mount."""
        volumes = ["farm:/farm", "models:/models:ro", *(["ray_token:/run/secrets/ray_token:ro"] if token else [])]
        flags = [f"--volume={self.folder}/srv/{volume}" for volume in volumes]
        flags += [f"--env={name}={value}" for name, value in (env or {}).items()]
        own = ["ip", "netns", "exec", self.name(box), "unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
        return [*own, *self.buildah, "run", "--isolation=chroot", "--network=host", *flags, box, "--", *command]

    def start(self, box: str, *command: str, **how: Any) -> subprocess.Popen[bytes]:
        """The same, begun; what it prints is in a file named after the box."""
        with self.log(box).open("a") as output:
            self.started.append(subprocess.Popen(self.words(box, *command, **how), stdout=output, stderr=output))
        return self.started[-1]

    def log(self, box: str) -> Path:
        """What the box's processes print."""
        return self.folder / f"{box}.txt"

    def wait(self, what: str, condition: Callable[[], bool], seconds: float = 240) -> None:
        """Until ``condition``; fails where a process has ended before, or it takes too long."""
        until = time.monotonic() + seconds
        while not condition():
            texts = [f"{box}: {self.log(box).read_text()[-3000:]}" for box in BOXES if self.log(box).exists()]
            ended = [process.args for process in self.started if process.poll() is not None]
            assert not ended and time.monotonic() < until, f"no {what}\n{ended}\n" + "\n".join(texts)
            time.sleep(0.25)

    def end(self) -> None:
        """Nothing is left: neither processes, networks, mounts nor files."""
        for process in self.started:
            process.kill()  # and with the first process of its namespace all others
            process.wait(60)
        for box in BOXES:
            subprocess.run(["ip", "netns", "delete", self.name(box)], capture_output=True)
        left = [line for line in Path("/proc/mounts").read_text().splitlines() if str(self.folder) in line]
        for line in left:
            subprocess.run(["umount", "--lazy", line.split()[1]], capture_output=True)
        shutil.rmtree(self.folder, ignore_errors=True)
        commands = []
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                commands.append(entry.read_bytes().decode(errors="replace"))
        assert not left and not [command for command in commands if str(self.folder) in command]


def recipe(box: str) -> tuple[list[str], dict[str, str]]:
    """The command of a compose file, which has no GPU here, and its environment."""
    (service,) = yaml.safe_load((RECIPES / f"compose.{box}.yaml").read_text(encoding="utf-8"))["services"].values()
    command = string.Template(service["command"]).substitute(HEAD=BOXES["head"], OWN=BOXES[box])
    assert box == "worker" or command.count("--models /models") == 1
    return shlex.split(command.replace("--models /models", "--models /models --device cpu")), service["environment"]


@pytest.fixture(scope="module")
def farm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Farm]:
    """The image, and boxes in which it can be started."""
    from pip._internal.models.index import PyPI

    made = Farm(tmp_path_factory.mktemp("image"))
    try:
        shutil.copytree(ROOT / "pipelines" / "demo" / "models" / "ltx", made.folder / "srv" / "models" / "LTX-Video")
        (made.folder / "srv" / "farm").mkdir()
        settings = pip_settings()
        index = os.environ.get("TORCH_INDEX") or settings.get("index-url", PyPI.simple_url)
        flags = ["--from=localhost/farm-base", f"--build-arg=TORCH_INDEX={index}", *mounts_of(settings, made.folder)]
        made.timed("base", made.base)
        made.timed("image", lambda: made.build(*flags))
        print(done(*made.buildah, "images", "--format", "{{.Name}} {{.Size}}", "anygpu-farm"))
        made.timed("boxes", lambda: [made.root_of("anygpu-farm", box) for box in BOXES])
        made.network()
        yield made
    finally:
        made.end()


def pack() -> set[Path]:
    """The files of the working tree that belong into the image."""
    rooms = [path.parent for path in ROOT.glob("*/__init__.py")]
    inside = (path for room in rooms for path in room.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    top = [*ROOT.glob("*.py"), ROOT / "pyproject.toml", ROOT / "requirements.txt"]
    return {path.relative_to(ROOT) for path in (*inside, *top)}


def files_in(root: Path) -> set[Path]:
    """Its files, but for bytecode."""
    return {path.relative_to(root) for path in root.rglob("*") if path.is_file() and path.suffix != ".pyc"}


def test_a_build_is_given_the_pack_and_nothing_else(farm: Farm) -> None:
    source = farm.folder / "Dockerfile"
    source.write_text("FROM scratch\nCOPY . /\n")
    farm.build(source=source, name="context")
    assert files_in(farm.root_of("context", "context")) == pack() | {Path("LICENSE"), Path("README.md")}


def test_the_image_holds_the_pack_what_it_needs_and_nothing_of_this_machine(farm: Farm) -> None:
    root = Path(done(*farm.buildah, "mount", "stranger").strip())
    assert files_in(root / PYTHON.lstrip("/") / "anygpu") == pack() - {Path("setup.py")}
    assert not (root / "src").exists() and not list((root / "var/lib/apt/lists").iterdir())
    program = (
        "python -m pip config list; python -m pip check; python -c 'import ray, boto3; print(ray.__version__)';"
        "echo 'int main(void) { return 0; }' | gcc -x c - -o /tmp/compiled && /tmp/compiled && echo compiled"
    )
    versions = yaml.safe_load((RECIPES / "kuberay.yaml").read_text(encoding="utf-8"))["spec"]["rayClusterSpec"]
    said = done(*farm.words("stranger", "sh", "-c", program)).splitlines()
    assert said == ["No broken requirements found.", versions["rayVersion"], "compiled"]


def test_kuberay_s_probes_are_answered_in_the_image(farm: Farm) -> None:
    token = {"RAY_AUTH_TOKEN": "6" * 64}
    ports = "--port=6379 --dashboard-agent-listen-port=52365 --dashboard-host=0.0.0.0 --metrics-export-port=8080"
    asked = " && ".join(PROBES)
    program = f"ray start --head {ports} && until ({asked}); do sleep 1; done"
    said = done(*farm.words("stranger", "bash", "-c", program, env=token), timeout=240)
    assert said.splitlines()[-2:].count("success") >= 1, said


def frames(path: Path) -> Any:
    """The pixels of a video, (F, H, W, 3), uint8."""
    import av
    import numpy

    with av.open(str(path)) as container:
        return numpy.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def test_two_boxes_render_what_one_renders_and_let_nobody_in_without_the_token(farm: Farm) -> None:
    from anygpu.farm.render import job_of

    shared = JobFolder(farm.folder / "srv" / "farm")
    keep = "umask 077 && ray get-auth-token --generate && cp ~/.ray/auth_token /farm/ray_token"
    done(*farm.words("worker", "sh", "-c", keep))
    (shared.root / "ray_token").rename(shared.root.parent / "ray_token")
    for seed in (0, 3):
        alone = ("anygpu", "render", "--model", "/models/LTX-Video", "--prompt", PROMPT, *SIZE, "--device", "cpu")
        render = farm.words("stranger", *alone, "--seed", str(seed), "--output", f"/farm/alone{seed}.mp4")
        farm.timed(f"seed {seed} without the farm", lambda words=render: done(*words))

    def ready() -> bool:
        states = shared.workers()
        return len({state["host"] for state in states}) == 2

    def begin() -> None:
        for box in ("head", "worker"):
            command, environment = recipe(box)
            farm.start(box, *command, env={**environment, **ONE_CORE}, token=True)
        farm.wait("two workers", ready)

    farm.timed("start of head and worker until both have a worker", begin)
    (shared.root / "prompts.txt").write_text(f"{PROMPT}\n")
    queue = ("queue", "/farm", "--model", "/models/LTX-Video", "--prompts", "/farm/prompts.txt", "--seeds", "0-3")
    done(*farm.words("worker", "anygpu-farm", *queue, *SIZE))
    farm.timed("four jobs", lambda: farm.wait("four results", lambda: len(list(shared.results.glob("*.json"))) == 4))
    farm.wait("four said to be finished", lambda: sum(state["finished"] for state in shared.workers()) == 4)
    assert all(state["finished"] for state in shared.workers()), "each box has rendered"
    jobs = [job_of(line) for line in (shared.root / "jobs.jsonl").read_text(encoding="utf-8").splitlines()]
    videos = {job.settings.seed: shared.results / f"{job.key}.mp4" for job in jobs}
    latents = {seed: read_receipt(path)["latents"] for seed, path in videos.items()}  # x264 may code frames otherwise
    for seed in (0, 3):
        assert latents[seed] == read_receipt(shared.root / f"alone{seed}.mp4")["latents"]
    assert frames(videos[0]).shape == (9, 64, 64, 3) and latents[0] != latents[3]
    refused(farm)


def refused(farm: Farm) -> None:
    """Who has no token, or another, ends with an error, and the cluster stays as it was."""
    command, environment = recipe("worker")
    command = [word.replace(BOXES["worker"], BOXES["stranger"]) for word in command]
    for token in ({"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_TOKEN_PATH": "", "RAY_AUTH_TOKEN": "0" * 64}, {}):
        words = farm.words("stranger", *command, env={**environment, **token})
        said = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120)
        why = "InvalidAuthToken" if token else "RAY_AUTH_TOKEN_PATH is set but file cannot be opened"
        assert said.returncode != 0 and why in said.stdout, said.stdout[-3000:]
    known = f"GcsClient(address='{BOXES['head']}:6379').get_all_node_info().values()"  # those that left, too
    program = f"from ray._raylet import GcsClient; print('boxes', *(node.node_manager_address for node in {known}))"
    said = done(*farm.words("head", "python", "-c", program, env=environment, token=True))
    assert sorted(said.split("boxes")[-1].split()) == [BOXES["head"], BOXES["worker"]], said
