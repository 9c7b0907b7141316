"""Two passes in a real ComfyUI: LTX-Video latents doubled by an upscaler, refined and decoded at twice the size."""

import pytest
from safetensors.torch import save_file

from host import videos
from host.client import Client
from host.prompts import pictured, sampling, text_to_video
from host.server import Server

pytestmark = pytest.mark.host


def test_a_second_pass_refines_upscaled_latents(server: Server, client: Client) -> None:
    from diffusers.pipelines.ltx.modeling_latent_upsampler import LTXLatentUpsamplerModel

    folder = server.base / "models" / "latent_upscale_models"
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        LTXLatentUpsamplerModel(mid_channels=32, num_blocks_per_stage=1).state_dict(), folder / "tiny.safetensors"
    )
    try:
        graph = text_to_video(server.model("LTX-Video"), width=64, height=64, frames=9)
        graph.prompt["1"]["inputs"]["variant"] = "distilled"
        pipeline, prompt = graph.link("1"), graph.link("2")
        up = graph.add("AnyGPUUpscaleLatents", pipeline=pipeline, latent=graph.link("3"), upscaler="tiny.safetensors")
        size = {"width": 0, "height": 0, "frames": 0, "steps": 0}
        again = graph.add(
            "AnyGPUSample", pipeline=pipeline, prompt=prompt, latent=graph.link(up), **{**sampling(), **size}
        )
        graph.prompt["4"]["inputs"]["latent"] = graph.link(again)
        graph.prompt = pictured(graph.prompt)
        run = client.run(graph.prompt)
        assert run.ending == "execution_success", run.message
        assert "128x128, 9 frames" in run.texts_of(up)[-1] and "128x128, 9 frames" in run.texts_of(again)[-1]
        assert videos.pictures(server, run).shape[1:3] == (128, 128)
        assert "7 steps" in run.texts_of("1")[-1] and "second" not in run.texts_of(again)[-1]
    finally:
        (folder / "tiny.safetensors").unlink()
