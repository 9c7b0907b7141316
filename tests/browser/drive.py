"""Run a browser script against a real ComfyUI with every tiny checkpoint: ``python drive.py SCRIPT.mjs [arguments]``.

Exits with the script's status, or with 0 and the reason where there is no host, no Node.js or no Chromium.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[0] = str(HERE.parent)  # the folder of the package `host`, as pytest has it

from host.server import NoHost, Server, find_host, tiny_home  # noqa: E402


def drive(script: str, arguments: list[str]) -> int:
    """The status of the script; its output goes to the terminal."""
    node = shutil.which("node")
    chromium = os.environ.get("CHROMIUM") or "/usr/bin/chromium"
    if node is None or not Path(chromium).is_file():
        print(f"skipped: {'no Node.js' if node is None else f'no Chromium at {chromium}; name one in CHROMIUM'}")
        return 0
    try:
        host = find_host()
    except NoHost as reason:
        print(f"skipped: {reason}")
        return 0
    if not (HERE / "node_modules" / "playwright-core").is_dir():
        subprocess.run([shutil.which("npm") or "npm", "ci", "--no-audit", "--no-fund"], cwd=HERE, check=True)
    with tempfile.TemporaryDirectory(prefix="anygpu-browser-") as folder:
        server = Server(host, Path(folder), tiny_home())
        try:
            server.start().every_model()
            variables = {**os.environ, "COMFYUI_URL": server.url, "CHROMIUM": chromium}
            return subprocess.run([node, str(HERE / script), *arguments], env=variables, timeout=1200).returncode
        finally:
            server.stop()


if __name__ == "__main__":
    sys.exit(drive(sys.argv[1], sys.argv[2:]))
