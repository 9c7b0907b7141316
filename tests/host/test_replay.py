"""A video saved by core's Save Video carries its receipt, and AnyGPU Replay makes it again."""

import pytest
import torch
from anygpu.compat.device.execution import picture_of
from anygpu.pipelines.records.receipts import job_of, read_receipt

from host.client import Client
from host.inside.asking import Inside
from host.prompts import SAVE, Graph, loading, sampling, text_to_video
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
    assert not any("--recover" in text for text in second.texts_of(again)), "ComfyUI has no flags"
    (copied,) = [file for file in second.files() if file["filename"].startswith("again")]
    assert read_receipt(server.output(copied))["latents"] == receipt["latents"]


@pytest.mark.parametrize("folder", ["pasted", "clipspace"])
def test_a_picture_that_the_frontend_put_into_a_folder_of_its_own_is_found(
    server: Server, client: Client, folder: str
) -> None:
    picture = server.base / "input" / folder / "image (1).png"
    picture.parent.mkdir(parents=True, exist_ok=True)
    picture_of(torch.rand(64, 64, 3, generator=torch.Generator().manual_seed(len(folder)))).save(picture)
    graph = Graph()
    pipeline = graph.link(graph.add("AnyGPULoadPipeline", **loading(server.model("LTX-Video"))))
    prompt = graph.link(graph.add("AnyGPUEncodePrompt", pipeline=pipeline, text="a red fox", negative=""))
    shown = graph.link(graph.add("LoadImage", image=f"{folder}/{picture.name}"))
    image = graph.add("AnyGPUEncodeImage", pipeline=pipeline, image=shown, width=64, height=64, fit="crop")
    start = sampling(steps=2, image=graph.link(image))
    sample = graph.add("AnyGPUSample", pipeline=pipeline, prompt=prompt, **start)
    decode = graph.add("AnyGPUDecode", pipeline=pipeline, latent=graph.link(sample))
    graph.add(SAVE, video=graph.link(decode, 1), filename_prefix=folder, format="auto", codec="auto")
    (record,) = client.finished(graph.prompt).files()
    graph = Graph()
    again = graph.add("AnyGPUReplay", file=f"{record['filename']} [output]")
    graph.add("PreviewAny", source=graph.link(again, 2))
    assert client.finished(graph.prompt).texts_of(again)[-1].startswith("the same latents, bit for bit")


def test_pictures_and_videos_are_read_as_core_reads_them(inside: Inside) -> None:
    assert inside.play("picture_files", "unlike_core") == []
