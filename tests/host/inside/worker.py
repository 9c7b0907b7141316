"""A ComfyUI without its server that plays scenes: ``python worker.py COMFYUI TINY_FOLDER``.

It runs under ComfyUI's interpreter, with ComfyUI's memory functions seeing the simulated accelerator. Each line on
stdin is a scene's name and arguments as JSON; each line on stdout that begins with ``ANSWER`` is what it returned.
"""

import importlib
import importlib.util
import json
import logging
import os
import sys
import tempfile
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
ANSWER = "ANSWER "


def start(comfyui: Path) -> None:
    """Import ComfyUI for the CPU and this pack as the package ``anygpu``, as its loader would."""
    os.chdir(comfyui)
    sys.path[0] = str(comfyui)
    sys.path.append(str(ROOT / "tests"))
    launch = importlib.import_module("host.launch")
    sys.meta_path.insert(0, launch.AfterImport())
    options = importlib.import_module("comfy.options")
    options.enable_args_parsing(False)
    importlib.import_module("comfy.cli_args").args.cpu = True
    importlib.import_module("comfy_aimdo.control").init()
    logging.basicConfig(level=logging.WARNING)
    importlib.import_module("torch").set_num_threads(1)
    spec = importlib.util.spec_from_file_location(
        "anygpu", ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
    )
    assert spec is not None and spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules["anygpu"] = package
    spec.loader.exec_module(package)


def main() -> None:
    """Answer until stdin ends."""
    comfyui, tiny_folder = (Path(argument).resolve() for argument in sys.argv[1:3])
    sys.argv = sys.argv[:1]
    start(comfyui)
    with tempfile.TemporaryDirectory() as user:  # what is kept does not go into the user's own
        importlib.import_module("folder_paths").set_user_directory(user)
        answer_scenes(tiny_folder)


def answer_scenes(tiny_folder: Path) -> None:
    """Play what is asked for on stdin."""
    device = importlib.import_module("host.inside.device")
    print(ANSWER + json.dumps({"result": device.ready(tiny_folder)}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            scenes = importlib.import_module(f"host.inside.{asked['room']}")
            answer = {"result": device.played(getattr(scenes, asked["scene"]), asked["arguments"])}
        except Exception:
            answer = {"error": traceback.format_exc()}
        print(ANSWER + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
