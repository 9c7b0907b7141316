"""Prompts in ComfyUI's API format for the host tests: built node by node, or replayed from a shipped workflow."""

import hashlib
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = ROOT / "workflows"
REPLAYS = ROOT / "tests" / "workflows"
SAVE = "SaveVideo"
PREFIX = "anygpu_"  # of every name: ComfyUI's frontend has one index of all templates, in which a name may be once
PAINT = (f"{PREFIX}paint_", f"{PREFIX}mv_adapter", f"{PREFIX}project_picture")
CORE_SAMPLED = "_core_ksampler"
RECOVERED = "_recover_latents"
FROM_FILES = "_from_files"
TWO_PASSES = ("_super_resolution", "_two_passes")
FITTED = ("_on_an_older_gpu", "rescue_a_vae_decode")
PICTURES = "pictures"  # the id of the node that saves frames without loss

Link = list[Any]
Prompt = dict[str, dict[str, Any]]


class Graph:
    """A prompt under construction: ``add`` returns a node's id, ``link`` one of its outputs."""

    def __init__(self) -> None:
        self.prompt: dict[str, dict[str, Any]] = {}

    def add(self, kind: str, **inputs: Any) -> str:
        """The id of a new node; an input may be the result of :meth:`link`."""
        node = str(len(self.prompt) + 1)
        self.prompt[node] = {"class_type": kind, "inputs": inputs, "_meta": {"title": kind}}
        return node

    def link(self, node: str, output: int = 0) -> Link:
        """One output of a node."""
        return [node, output]


def text_to_video(model: str, text: str = "a cat walks on the grass", negative: str = "", **settings: Any) -> Graph:
    """Load, encode prompt, sample, decode, save: nodes 1 to 5."""
    graph = Graph()
    pipeline = graph.link(graph.add("AnyGPULoadPipeline", **loading(model)))
    prompt = graph.add("AnyGPUEncodePrompt", pipeline=pipeline, text=text, negative=negative)
    sample = graph.add("AnyGPUSample", pipeline=pipeline, prompt=graph.link(prompt), **sampling(**settings))
    decode = graph.add("AnyGPUDecode", pipeline=pipeline, latent=graph.link(sample))
    graph.add(SAVE, video=graph.link(decode, 1), filename_prefix="test", format="auto", codec="auto")
    return graph


def pictured(prompt: Prompt) -> Prompt:
    """The prompt with the frames of its decode node saved as pictures too; :func:`videos.pictures` reads them."""
    decode = next(node for node, made in prompt.items() if "Decode" in made["class_type"])
    inputs = {"images": [decode, 0], "filename_prefix": "frame"}
    return {**prompt, PICTURES: {"class_type": "SaveImage", "inputs": inputs, "_meta": {"title": "SaveImage"}}}


def film(seed: int) -> tuple[Graph, str]:
    """FramePack from a picture in many sections, its latents saved by the last node; and the sampler's id."""
    graph = Graph()
    pipeline = graph.link(graph.add("AnyGPULoadPipeline", **loading("FramePackI2V_HY")))
    prompt = graph.link(graph.add("AnyGPUEncodePrompt", pipeline=pipeline, text="a cat", negative=""))
    picture = graph.link(graph.add("LoadImage", image="example.png"))
    size = {"width": 64, "height": 64, "fit": "crop", "frame": 0, "strength": 1.0}
    image = graph.add("AnyGPUEncodeImage", pipeline=pipeline, image=picture, **size)
    settings = {"clip_seconds": 4.0, "fps": 30.0, "steps": 3, "cfg": 0.0, "guidance": 0.0, "seed": seed}
    rest = {"scheduler": "auto", "shift": 0.0, "cfg_start": 0.0, "cfg_end": 1.0, "window": 3}
    links = {"pipeline": pipeline, "prompt": prompt, "image": graph.link(image)}
    sample = graph.add("AnyGPUSampleFramePack", **links, **settings, **rest)
    graph.add("SaveLatent", samples=graph.link(sample), filename_prefix="latent")
    return graph, sample


def loading(model: str, **chosen: Any) -> dict[str, Any]:
    """The inputs of the load node."""
    choices = dict.fromkeys(("precision", "offload", "variant", "base", "image_encoder"), "auto")
    return {"model": model, **choices, **chosen}


def sampling(**chosen: Any) -> dict[str, Any]:
    """The inputs of the sample node: 64x64, 9 frames, 2 steps, and what is chosen."""
    usual = {
        "width": 64, "height": 64, "frames": 9, "steps": 2, "cfg": 0.0, "guidance": 0.0, "seed": 1,
        "scheduler": "auto", "shift": 0.0, "cfg_start": 0.0, "cfg_end": 1.0, "fps": 8.0,
    }  # fmt: skip
    return {**usual, **chosen}


def shipped() -> list[Path]:
    """Every shipped workflow; those that open in App mode are graphs of these again."""
    return sorted(path for path in WORKFLOWS.glob("*.json") if path.suffixes != [".app", ".json"])


def apps() -> list[Path]:
    """Every shipped workflow that opens in App mode."""
    return sorted(WORKFLOWS.glob("*.app.json"))


def filmed() -> list[Path]:
    """Shipped workflows that end in a video of our own sampler."""
    others = (CORE_SAMPLED, RECOVERED, FROM_FILES, *TWO_PASSES, *FITTED)
    ours = [workflow for workflow in shipped() if not workflow.stem.endswith(others)]
    return [workflow for workflow in ours if not workflow.stem.startswith(PAINT)]


def from_files() -> list[Path]:
    """The same from single files, which :mod:`host.single_files` writes."""
    return [workflow for workflow in shipped() if workflow.stem.endswith(FROM_FILES)]


def two_passes() -> list[Path]:
    """Shipped workflows from single files whose second pass refines upscaled latents."""
    return [workflow for workflow in shipped() if workflow.stem.endswith(TWO_PASSES)]


def core_sampled() -> list[Path]:
    """Shipped workflows in which core's sampler drives our model."""
    return [workflow for workflow in shipped() if workflow.stem.endswith(CORE_SAMPLED)]


def fitted() -> list[Path]:
    """Shipped workflows of core's own models, fitted to the device."""
    return [workflow for workflow in shipped() if workflow.stem.endswith(FITTED)]


def painted() -> list[Path]:
    """Shipped workflows that end in a textured mesh."""
    return [workflow for workflow in shipped() if workflow.stem.startswith(PAINT)]


def digest(workflow: Path) -> str:
    """The hash by which a replay knows the workflow it was made from; the same for both kinds of line ends."""
    return hashlib.sha256(workflow.read_bytes().replace(b"\r\n", b"\n")).hexdigest()


def replay_path(workflow: Path) -> Path:
    """Where the replay of a workflow is."""
    return REPLAYS / f"{workflow.stem}.api.json"


def replay(workflow: Path) -> dict[str, dict[str, Any]]:
    """The prompt that ComfyUI's own frontend made of a workflow.

    Raises:
        AssertionError: it was made from another version of the workflow.
    """
    path = replay_path(workflow)
    assert path.is_file(), f"{path.name} is missing; run `make workflows`"
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["source_sha256"] == digest(workflow), f"{path.name} is stale; run `make workflows`"
    prompt: dict[str, dict[str, Any]] = found["prompt"]
    return prompt


def shrunk(
    prompt: dict[str, dict[str, Any]], width: int = 64, height: int = 64, frames: int = 9
) -> dict[str, dict[str, Any]]:
    """A replay with size, steps and length replaced by tiny ones; the models are tiny under their published names."""
    small = {"width": width, "height": height, "frames": frames, "steps": 2, "clip_seconds": frames / 30, "window": 2}
    small["max_tokens"] = 512  # the tiny vocabularies split a prompt into more tokens than the published ones
    for node in prompt.values():
        inputs = node["inputs"]
        if node["class_type"].startswith("AnyGPU"):
            inputs.update({name: small[name] for name in small if name in inputs and not _linked(inputs[name])})
            if inputs.get("fit") == "nearest bucket":
                inputs["fit"] = "crop"  # buckets are full size
    return prompt


SCENE, SCENE_PICTURE, SCENE_CLIP = "a red square moves left on blue", "scene.png", "scene.mp4"
DEMO_RATE = 8.0  # frames per second of the clips that they were trained on


def with_demo_model(prompt: Prompt, model: str, text: str = SCENE) -> Prompt:
    """A replay with a demo model that is asked for ``text``, from the picture or clip of :data:`SCENE`."""
    given = {"LoadImage": {"image": SCENE_PICTURE}, "LoadVideo": {"file": SCENE_CLIP}}
    given["AnyGPULoadPipeline"], given["AnyGPUEncodePrompt"] = {"model": model}, {"text": text, "negative": ""}
    for node in prompt.values():
        node["inputs"].update(given.get(node["class_type"], {}))
    return prompt


CORE_SIZE = {"width": 64, "height": 64, "length": 9, "frames_number": 9, "steps": 2, "tile_size": 64}


def shrunk_core(prompt: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """A replay at 64x64, 9 frames and 2 steps, core's nodes included."""
    for node in prompt.values():
        inputs = node["inputs"]
        inputs.update({name: value for name, value in CORE_SIZE.items() if isinstance(inputs.get(name), int)})
    return shrunk(prompt)


def _linked(value: Any) -> bool:
    return isinstance(value, list)
