"""Run a browser script against a real ComfyUI with every tiny checkpoint: ``python drive.py SCRIPT.mjs [arguments]``.

COMFYUI_FRONTEND names the folder of another frontend than the installed one.

Exits with the script's status. Where there is no host, Node.js or Chromium it says so and exits with 0 for tests
(``run.mjs``, ``paint.mjs``), which are skipped then, and with 1 for scripts that were to make files.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:1] = [str(HERE.parent), str(HERE)]  # the folder of the package `host` first, as pytest has it

import help_pictures  # noqa: E402
import layouts  # noqa: E402
from heavy import build_heavy  # noqa: E402
from PIL import Image  # noqa: E402

from host import lora_files, paint_models  # noqa: E402
from host.server import PUBLISHED, Host, NoHost, Server, find_host, tiny_home  # noqa: E402

TESTS = (
    "run.mjs",
    "views.mjs",
    "widgets.mjs",
    "templates.mjs",
    "memory.mjs",
    "paint.mjs",
    "searches.mjs",
    "windows.mjs",
)
SEARCHING = "searches.mjs"  # beside a server without the pack; with the installed frontend, then with the newest
ON_A_GPU = ("memory.mjs", "help.mjs")  # on the simulated accelerator, with models whose weights outweigh the rest
STANDING_IN = (
    "paint.mjs",
    "templates.mjs",
    "views.mjs",
    "widgets.mjs",
    "author.mjs",
    "workflows.mjs",
)  # for core's own models, which are not here
PICTURES = HERE.parents[1] / "docs" / "images"
LOG_END = 8000  # characters of ComfyUI's log that are shown where a script fails
PACKAGE, FRONTENDS = "comfyui-frontend-package", 6
FOUND = ("diffusion_models/wan2.2_ti2v_5B_fp16.safetensors", "vae/wan2.2_vae.safetensors")  # by the search of models
EMPTY = (2).to_bytes(8, "little") + b"{}"  # a safetensors file without tensors
SAVED = ("wan_walk.json", "wan_run.json", "portrait.json")  # workflows of the user, found by the search of workflows
LORAS = ("style.safetensors", "motion.safetensors")  # of the workflow with LoRAs


def drive(script: str, arguments: list[str]) -> int:
    """The status of the script; its output goes to the terminal."""
    node = shutil.which("node")
    chromium = os.environ.get("CHROMIUM") or "/usr/bin/chromium"
    try:
        host = find_host()
        if node is None:
            raise NoHost("no Node.js")
        if not Path(chromium).is_file():
            raise NoHost(f"no Chromium at {chromium}; name one in CHROMIUM")
    except NoHost as reason:
        print(f"skipped: {reason}" if script in TESTS else f"{script} cannot run: {reason}")
        return 0 if script in TESTS else 1
    if not (HERE / "node_modules" / "playwright-core").is_dir():
        subprocess.run([shutil.which("npm") or "npm", "ci", "--no-audit", "--no-fund"], cwd=HERE, check=True)
    if script == SEARCHING:
        return search(host, [node, str(HERE / script), *arguments], {**os.environ, "CHROMIUM": chromium})
    with base_folder("--pictures" in arguments) as folder:
        gpu, started = script in ON_A_GPU, time.time()
        named = os.environ.get("COMFYUI_FRONTEND")
        shown = ("--front-end-root", str(Path(named).expanduser())) if named else ()
        server = Server(host, Path(folder), tiny_home(), stand_ins=script in STANDING_IN, gpu=gpu, arguments=shown)
        try:
            if gpu:
                lend_heavy(server)
            server.start().every_model()
            for name in LORAS:
                lora_files.write(server, name)
            demo = script == "paint.mjs" and "--pictures" in arguments
            (paint_models.only_the_demo if demo else paint_models.install)(server)
            told = {"COMFYUI_URL": server.url, "COMFYUI_BASE": folder, "COMFYUI_PID": str(server.pid)}
            variables = {**os.environ, **told, "CHROMIUM": chromium}
            status = subprocess.run([node, str(HERE / script), *arguments], env=variables, timeout=7200).returncode
            if status:
                print(server.log[-LOG_END:], file=sys.stderr)
        finally:
            server.stop()
    if "--pictures" in arguments:
        lighten([path for path in PICTURES.glob("*.png") if path.stat().st_mtime >= started])
    if script == "help.mjs":
        help_pictures.written()
    return status


def search(host: Host, command: list[str], variables: dict[str, str]) -> int:
    """The status of a script that compares a server with the pack and one without, with each frontend."""
    status, tried = 0, frontends(every="--every" in command)
    asked = f"from importlib.metadata import version; print(version({PACKAGE!r}))"
    installed = subprocess.run([str(host.python), "-c", asked], capture_output=True, text=True).stdout.strip()
    again = "--newest" in command or any(installed in folder.parts for folder in tried)
    for frontend in (*tried, *(() if again else (None,))):
        print(f"frontend: {frontend or 'installed'}", flush=True)
        with tempfile.TemporaryDirectory(prefix="anygpu-browser-") as folder, ExitStack() as stack:
            shown = () if frontend is None else ("--front-end-root", str(frontend))
            urls = {}
            for name, attach in (("COMFYUI_URL", True), ("COMFYUI_BARE", False)):
                server = Server(host, Path(folder) / name, tiny_home(), attach=attach, arguments=shown)
                for model in FOUND:
                    (server.base / "models" / model).parent.mkdir(parents=True, exist_ok=True)
                    (server.base / "models" / model).write_bytes(EMPTY)
                saved = server.base / "user" / "default" / "workflows"
                saved.mkdir(parents=True)
                for workflow in SAVED:
                    (saved / workflow).write_text('{"nodes": [], "links": [], "version": 0.4}', encoding="utf-8")
                stack.callback(server.stop)
                urls[name] = server.start().url
            status |= subprocess.run(command, env={**variables, **urls}, timeout=1800).returncode
    return status


def frontends(every: bool) -> list[Path]:
    """The newest frontend, or that of ``COMFYUI_FRONTEND``; ``every``: the five minor versions before it too."""
    if named := os.environ.get("COMFYUI_FRONTEND"):
        return [Path(named).expanduser()]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    told = subprocess.run([*pip, "index", "versions", PACKAGE], capture_output=True, text=True).stdout
    listed = re.findall(r"\d+\.\d+\.\d+", told.partition("versions:")[2])
    newest = {}
    for version in listed:  # the newest first
        newest.setdefault(version.rpartition(".")[0], version)
    if not newest:
        print("the newest frontend was not tried: pip cannot list it; name its folder in COMFYUI_FRONTEND")
    folders = []
    for version in list(newest.values())[: FRONTENDS if every else 1]:
        folders.append(HERE.parents[1] / ".build" / "frontends" / version / PACKAGE.replace("-", "_") / "static")
        if not folders[-1].exists():
            subprocess.run([*pip, "install", "--quiet", "--no-deps", "--target", str(folders[-1].parents[1]),
                            f"{PACKAGE}=={version}"], check=True)  # fmt: skip
    return folders


@contextmanager
def base_folder(seen: bool) -> Iterator[str]:
    """An empty folder for ComfyUI's files, for as long as the block runs.

    Args:
        seen: whether pictures show its path, which then is one that a user may have
    """
    if not seen:
        with tempfile.TemporaryDirectory(prefix="anygpu-browser-") as folder:
            yield folder
        return
    folder = Path(tempfile.gettempdir()) / "ComfyUI"
    folder.mkdir()
    try:
        yield str(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def lend_heavy(server: Server) -> None:
    """Put heavy checkpoints among the models, under the published names, and LTX-Video's transformer as one file."""
    for name in ("ltx", "hunyuan_video"):
        published = next(key for key, status_light in PUBLISHED.items() if status_light == name)
        (server.base / "models" / "diffusers").mkdir(parents=True, exist_ok=True)
        server.weights_on(build_heavy(name, tiny_home()), published)
    files = layouts.whole_set("ltx", tiny_home(), server.base / "single")
    for part, place in (("transformer", "diffusion_models"), ("vae", "vae"), ("text_encoder", "text_encoders")):
        target = server.base / "models" / place / f"ltx_{part}.safetensors"
        target.parent.mkdir(parents=True, exist_ok=True)
        for suffix in (".safetensors", ".json"):  # the second says its sizes, which are not published ones
            files[part].with_suffix(suffix).replace(target.with_suffix(suffix))


def lighten(screenshots: list[Path]) -> None:
    """Save screenshots again with 256 colours of their own, a third of the bytes."""
    for path in screenshots:
        with Image.open(path) as picture:
            if picture.mode == "RGB":
                few = picture.convert("RGB").quantize(256, Image.Quantize.MEDIANCUT, kmeans=3, dither=Image.Dither.NONE)
                few.save(path, optimize=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # or the server would outlive this
    sys.exit(drive(sys.argv[1], sys.argv[2:]))
