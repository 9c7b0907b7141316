"""One shipped workflow through a real ComfyUI to a saved video: the host test that `make test` runs."""

from __future__ import annotations

import pytest

from host import videos
from host.client import Client
from host.prompts import WORKFLOWS, replay, shrunk
from host.server import Server


@pytest.mark.xdist_group("host")
def test_a_shipped_workflow_saves_a_video(server: Server, client: Client) -> None:
    server.model("LTX-Video")
    run = client.run(shrunk(replay(WORKFLOWS / "ltx_text_to_video.json")))
    assert run.ending == "execution_success", run.message
    (record,) = run.files()
    assert videos.facts(server.output(record)) == videos.Facts(width=64, height=64, frames=9, fps=25)
