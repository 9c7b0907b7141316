"""A ComfyUI that is killed or paused in the middle of a sampling goes on where it was once it is started again."""

import contextlib
import os
import re
import signal
from pathlib import Path

import numpy as np
import pytest
import websocket

from host.client import Client, Run
from host.server import NoHost, Server, find_host
from host.test_cancel import SAMPLE, results, watched

pytestmark = [pytest.mark.host, pytest.mark.full]

STEPS = 1000  # long enough for a first state, which comes once it costs under 1 % of the time


@pytest.mark.parametrize("how", ["killed", "paused"])
def test_a_comfyui_that_is_started_again_goes_on_after_its_last_kept_step(
    tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path, how: str
) -> None:
    try:
        base, usual = tmp_path_factory.mktemp(how), ("--preview-method", "none")  # of ComfyUI
        server = Server(find_host(), base, tiny_folder, arguments=usual).start()
    except NoHost as reason:
        pytest.skip(str(reason))
    prompt = watched(server.model("LTX-Video"), steps=STEPS).prompt
    kept = server.base / "user" / "anygpu" / "kept" / "steps"

    def killed_in_the_middle(_node: str, _run: Run) -> bool:
        if list(kept.glob("*.safetensors")):
            os.kill(server.pid, signal.SIGKILL)
        return False

    def paused_in_the_middle(_node: str, run: Run) -> bool:
        if not asked and any((node, total) == (SAMPLE, STEPS) for node, _, total in run.progress):
            asked.append(client.post("/anygpu/pause", {}))
        return False

    try:
        client, asked = Client(server.url), list[dict[str, str]]()
        if how == "paused":
            assert client.run(prompt, paused_in_the_middle, timeout=600).ending == "execution_interrupted"
            server.stop()
        else:
            with contextlib.suppress(OSError, websocket.WebSocketException):
                ended = client.run(prompt, killed_in_the_middle, timeout=600)
                pytest.fail(f"it was not killed but {ended.ending}")
            assert server._process is not None and server._process.wait(30) == -signal.SIGKILL
        client = Client(server.start().url)
        listed = client.get("/anygpu/paused")["paused"]
        assert len(listed) == len(asked)
        for run in listed:
            assert run["where"].startswith("sampling ") and run["picture"].startswith("data:image/jpeg")
            prompt = client.get(f"/anygpu/paused/{run['id']}")["prompt"]
        again = client.run(prompt, timeout=600)
        said = re.findall(r"sampling goes on after step (\d+) of 1000", "\n".join(again.texts_of(SAMPLE)))
        assert said and 0 < int(said[0]) < STEPS
        bar = [done for node, done, total in again.progress if node == SAMPLE and total == STEPS]
        assert min(bar) > int(said[0]), "no step was done twice"
        assert not list(kept.glob("*")), "nothing is left to go on with"
        assert not client.get("/anygpu/paused")["paused"], "a paused run that has gone on is listed"
        client.free()
        fresh = client.run(prompt, timeout=600)
        assert "goes on" not in "\n".join(fresh.texts_of(SAMPLE))
        for one, other in zip(results(server, again), results(server, fresh), strict=True):
            assert np.array_equal(one, other)
    finally:
        server.stop()
