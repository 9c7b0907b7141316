"""Two passes in a real ComfyUI: LTX-Video latents doubled by an upscaler, refined and decoded at twice the size;
HunyuanVideo 1.5's enlarged to 720p and sampled by its super-resolution."""

import shutil

import pytest
from published import loops
from safetensors.torch import save_file

from host import single_files, videos
from host.client import Client
from host.prompts import SAVE, WORKFLOWS, Graph, Prompt, loading, pictured, replay, sampling, text_to_video
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
        run = client.finished(graph.prompt)
        assert "128x128, 9 frames" in run.texts_of(up)[-1] and "128x128, 9 frames" in run.texts_of(again)[-1]
        assert videos.pictures(server, run).shape[1:3] == (128, 128)
        assert "7 steps" in run.texts_of("1")[-1] and "second" not in run.texts_of(again)[-1]
    finally:
        (folder / "tiny.safetensors").unlink()


@pytest.mark.parametrize("shown", [False, True])
def test_its_template_runs_both_passes_of_its_model(server: Server, client: Client, shown: bool) -> None:
    """As it is opened but for sizes and lengths: the frames of 192x128 are resized to the size of its second pass, to
    whose shape a picture is cut for both."""
    name = "anygpu_ltx_two_passes"
    graph = replay(WORKFLOWS / f"{name}.json")
    (first, last), (up,) = ids(graph, "AnyGPUSample"), ids(graph, "AnyGPUUpscaleLatents")
    single_files.install(server, graph, name)
    file = server.base / "models" / "latent_upscale_models" / graph[up]["inputs"]["upscaler"]
    file.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(loops.ltx_upscaler(server.tiny_folder), file)
    try:
        graph[ids(graph, "AnyGPUEncodePrompt")[0]]["inputs"]["max_tokens"] = 512  # as in host.prompts.shrunk
        graph[first]["inputs"] |= {"width": 96, "height": 64, "frames": 9}
        graph[last]["inputs"] |= {"width": 160, "height": 96}
        if shown:
            empty = {"width": 96, "height": 64, "length": 9, "batch_size": 1}
            graph["e"] = {"class_type": "EmptyLTXVLatentVideo", "inputs": empty}
            graph["p"] = {"class_type": "LoadImage", "inputs": {"image": "example.png"}}
            for sample, of in ((first, "e"), (last, up)):
                given = {"pipeline": graph[sample]["inputs"]["pipeline"], "image": ["p", 0], "latent": [of, 0]}
                given |= {"width": 160, "height": 96, "fit": "crop"}
                graph[f"i{of}"] = {"class_type": "AnyGPUEncodeImage", "inputs": given}
                graph[sample]["inputs"]["image"] = [f"i{of}", 0]
        run = client.finished(pictured(graph))
        assert not shown or "cut to the finished video's shape" in run.texts_of("ie")[-1]
        assert {(first, 7), (last, 3)} <= {(node, steps) for node, _, steps in run.progress}
        assert "192x128, 9 frames" in run.texts_of(up)[-1]
        assert videos.pictures(server, run).shape[:3] == (9, 96, 160)
        (record,) = (made for made in run.files() if made["filename"].startswith(name))
        assert videos.facts(server.output(record)) == videos.Facts(width=160, height=96, frames=9, fps=30)
        made = Graph()
        again = made.add("AnyGPUReplay", file=f"{record['subfolder']}/{record['filename']} [output]".lstrip("/"))
        made.add(SAVE, video=made.link(again, 1), filename_prefix="again", format="auto", codec="auto")
        replayed = client.finished(made.prompt)
        assert replayed.texts_of(again)[-1].startswith("the same latents, bit for bit")
    finally:
        file.unlink()


def ids(graph: Prompt, kind: str) -> list[str]:
    """The nodes of a kind, in the order of their ids."""
    return sorted((node for node, made in graph.items() if made["class_type"] == kind), key=int)


def test_a_super_resolution_enlarges_latents_beside_their_picture(server: Server, client: Client) -> None:
    """Of one frame, with Tencent's folders as they are, but for the transformer's, which is diffusers'."""
    home, first = server.base / "models", server.model("HunyuanVideo-1.5-Diffusers-480p_i2v")
    own, up = home / "diffusers" / "HunyuanVideo-1.5-sr", home / "latent_upscale_models" / "720p_sr_distilled"
    shutil.copytree(loops.hunyuan_15_super("hunyuan_video_15_i2v", server.tiny_folder, "720p"), own)
    up.mkdir(parents=True)
    file = up / "diffusion_pytorch_model.safetensors"
    shutil.copy(loops.hunyuan_15_upscaler(server.tiny_folder, "720p"), file)
    try:
        graph = text_to_video(first, width=64, height=64, frames=1)
        again = graph.link(graph.add("AnyGPULoadPipeline", **loading("HunyuanVideo-1.5-sr")))
        picture = graph.link(graph.add("LoadImage", image="example.png"))

        def shown(pipeline: list[object], **given: object) -> list[object]:
            size = {"width": 64, "height": 64, "fit": "nearest bucket"}
            return graph.link(graph.add("AnyGPUEncodeImage", pipeline=pipeline, image=picture, **size, **given))

        image = shown(graph.link("1"), control=False)
        graph.prompt["3"]["inputs"] |= {"image": image, "width": [image[0], 1], "height": [image[0], 2]}
        name = f"{up.name}/{file.name}"
        high = graph.add("AnyGPUUpscaleLatents", pipeline=again, latent=graph.link("3"), upscaler=name)
        large = shown(again, latent=graph.link(high))
        size = {"width": 0, "height": 0, "frames": 0, "steps": 0}
        links = {"pipeline": again, "prompt": graph.link("2"), "latent": graph.link(high), "image": large}
        last = graph.add("AnyGPUSample", **links, **{**sampling(), **size})
        graph.prompt["4"]["inputs"] |= {"pipeline": again, "latent": graph.link(last)}
        graph.prompt = pictured(graph.prompt)
        run = client.finished(graph.prompt)
        assert "super-resolution to 720p: 6 steps" in run.texts_of(again[0])[-1]
        height, width = videos.pictures(server, run).shape[1:3]
        assert width * height > 900_000 and f"{width}x{height}, 1 frame" in run.texts_of(last)[-1]
        chosen = {"seed": 1, "steps": 1, "cfg": 1.0, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0}
        words = {"positive": graph.link("2", 1), "negative": graph.link("2", 2)}
        empty = graph.link(graph.add("EmptyHunyuanVideo15Latent", width=64, height=64, length=1, batch_size=1))
        sampled = graph.add("KSampler", model=graph.link(again[0], 1), latent_image=empty, **words, **chosen)
        graph.add("SaveLatent", samples=graph.link(sampled), filename_prefix="never")
        run = client.run(graph.prompt)
        assert "the MODEL of HunyuanVideo 1.5's super-resolution in one of core's samplers" in run.message
    finally:
        shutil.rmtree(own)
        shutil.rmtree(up)
