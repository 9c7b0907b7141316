"""A cluster of another Ray than this one, both real: refused in one line that names the versions, within 15 s."""

import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from anygpu.farm import cluster

pytestmark = [pytest.mark.farm, pytest.mark.full]
ROOT = Path(__file__).resolve().parents[2]
OLDEST, PORT = "2.52.0", 6398


def other_ray() -> Path:
    """The folder of commands of an environment with the oldest Ray, which is made once."""
    home = ROOT / ".build" / f"ray-{OLDEST}"
    if not (home / "bin" / "ray").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(home)], check=True)
        pip = [str(home / "bin" / "python"), "-m", "pip", "install", "-q", f"ray=={OLDEST}"]
        if (done := subprocess.run(pip, capture_output=True, text=True)).returncode:
            pytest.skip(f"pip has no ray {OLDEST}: {done.stderr[-200:]}")
    return home / "bin"


ASKING = """
import time
from anygpu.compat.errors import InputError
from anygpu.farm import cluster
started = time.monotonic()
try:
    cluster.connect("127.0.0.1:{port}")
except InputError as error:
    print(f"{{time.monotonic() - started:.1f}} {{error}}")
"""


def test_a_cluster_of_another_ray_is_named_within_fifteen_seconds() -> None:
    import ray

    assert ray.__version__ != OLDEST, "of the same version nothing is refused"
    environment = {**os.environ, **cluster.QUIET, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "6" * 64}
    words = ["start", "--head", f"--port={PORT}", "--num-cpus=1", "--include-dashboard=false", "--disable-usage-stats"]
    head = subprocess.Popen([str(other_ray() / "ray"), *words, "--block"], env=environment, stdout=subprocess.DEVNULL)
    try:
        until, up = time.monotonic() + 120, False
        while not up and time.monotonic() < until and head.poll() is None:
            with suppress(OSError), socket.create_connection(("127.0.0.1", PORT), timeout=1):
                up = True
            time.sleep(0.2)
        assert up
        time.sleep(5)  # until its processes have begun
        asked = [sys.executable, "-c", ASKING.format(port=PORT)]
        answer = subprocess.run(asked, env=environment, capture_output=True, text=True, timeout=120)
    finally:
        head.terminate()
        head.wait(60)
    seconds, _, said = answer.stdout.strip().partition(" ")
    assert seconds and "\n" not in said, answer.stderr[-2000:]
    assert float(seconds) < 15, said
    assert f"here Ray {ray.__version__}, Python" in said and OLDEST in said, said
