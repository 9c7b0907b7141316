"""A video saved by core's Save Video carries its receipt, and AnyGPU Replay makes it again."""

import pytest
from anygpu.pipelines.records.receipts import job_of, read_receipt

from host.client import Client
from host.prompts import SAVE, Graph, text_to_video
from host.server import Server

pytestmark = pytest.mark.host


def test_a_saved_video_is_made_again(server: Server, client: Client) -> None:
    first = client.finished(text_to_video(server.model("LTX-Video"), "a red fox", seed=11, steps=3).prompt)
    (record,) = first.files()
    receipt = read_receipt(server.output(record))
    assert job_of(receipt).prompt.text == "a red fox" and str(server.base) not in str(receipt)
    graph = Graph()
    again = graph.add("AnyGPUReplay", file=f"{record['filename']} [output]")
    graph.add(SAVE, video=graph.link(again, 1), filename_prefix="again", format="auto", codec="auto")
    second = client.finished(graph.prompt)
    assert second.texts_of(again)[-1].startswith("the same latents, bit for bit")
    (copied,) = [file for file in second.files() if file["filename"].startswith("again")]
    assert read_receipt(server.output(copied))["latents"] == receipt["latents"]
