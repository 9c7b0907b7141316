"""Every family in every offload mode, on the simulated accelerator: the CPU's result, and memory freed."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import tiny
import torch
from anygpu.compat.errors import UnsupportedError
from anygpu.pipelines import stages
from anygpu.pipelines.base import FramePackSettings, ImageRequest, Latents, PromptRequest, SampleSettings, Silent
from anygpu.pipelines.load.folder import load
from anygpu.pipelines.pipeline import Pipeline
from anygpu.pipelines.requests import LoadRequest

from simulated import accelerator

MODES = ("none", "model", "group", "sequential")
PICTURE = torch.rand(1, 64, 64, 3, generator=torch.Generator().manual_seed(0))
ROUNDING = 1e-5  # kernels see other alignments; the same sums in another order


@dataclass(frozen=True)
class Case:
    """One task of a family: its tiny checkpoints, the model first, and whether it starts from a picture."""

    checkpoints: tuple[str, ...]
    pictured: bool = False
    frames: int = 5
    side: int = 64


CASES = {
    "ltx": Case(("ltx",), frames=9),
    "ltx image": Case(("ltx",), pictured=True, frames=9),
    "hunyuan_video": Case(("hunyuan_video",)),
    "hunyuan_video image": Case(("hunyuan_video_i2v",), pictured=True),
    "hunyuan_video_15": Case(("hunyuan_video_15",)),
    "hunyuan_video_15 image": Case(("hunyuan_video_15_i2v",), pictured=True),
    "framepack": Case(("framepack", "hunyuan_video", "siglip"), pictured=True),
    "mochi": Case(("mochi",), frames=7),
}
# For what holds at any size: as many tokens of each family as LTX-Video has, which takes no smaller picture.
SMALL = {name: case if name.startswith("ltx") else replace(case, side=32) for name, case in CASES.items()}


def loaded_for(
    case: Case, folder: Any, device: Any, offload: str = "auto", precision: str = "fp32", **more: Any
) -> Any:
    paths = [tiny.build(name, folder) for name in case.checkpoints]  # model, base and image encoder
    return load(LoadRequest(*paths, precision=precision, offload=offload, device=device, **more))


def sampled(pipeline: Pipeline, case: Case, progress: Any = None, steps: int = 2) -> Latents:
    """Latents of one short run."""
    progress = progress or Silent()
    with torch.no_grad():
        image = None
        if case.pictured:
            image = stages.encode_image(pipeline, ImageRequest(PICTURE, case.side, case.side), "stretch", progress)
        looks = "image" in pipeline.spec.recipes.effective
        request = PromptRequest("a red fox", "blurry", image=PICTURE if case.pictured and looks else None)
        prompt = stages.encode_prompt(pipeline, request, progress)
        settings = SampleSettings(case.side, case.side, case.frames, steps=steps, seed=3, cfg=2.0)
        if pipeline.family == "framepack":
            framepack = FramePackSettings(case.frames / 30, window=2)
            return stages.sample_framepack(pipeline, prompt, image, settings, framepack, progress)
        return stages.sample(pipeline, prompt, image, settings, progress)


def rendered(pipeline: Pipeline, case: Case, progress: Any = None, steps: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents and frames of one short run."""
    latents = sampled(pipeline, case, progress, steps)
    with torch.no_grad():
        return latents.samples, stages.decode(pipeline, latents, progress or Silent())


class Watching(Silent):
    """Remembers the bytes on the device when sampling begins, and the stages that were reported."""

    def __init__(self) -> None:
        self.text_bytes: int | None = None
        self.pipeline: Pipeline | None = None
        self.stages: set[str] = set()

    def step(self, done: int, total: int, stage: Any, preview: Any = None) -> None:
        self.stages.add(stage.name)
        if str(stage) == "sampling" and self.text_bytes is None and self.pipeline is not None:
            text = [part for name, part in self.pipeline.parts.items() if name.startswith("text_encoder")]
            tensors = [t for part in text for t in (*part.parameters(), *part.buffers())]
            self.text_bytes = sum(t.nbytes for t in tensors if t.device.type == accelerator.NAME)


SAMPLE = ("ltx", "mochi")  # the others run in one mode here; test_matrix.py runs every family in every mode
CELLS = [
    pytest.param(
        name, offload, marks=[] if name in SAMPLE or MODES[index % len(MODES)] == offload else [pytest.mark.full]
    )
    for index, name in enumerate(CASES)
    for offload in MODES
]


@pytest.mark.parametrize(("name", "offload"), CELLS)
def test_equals_the_cpu(acc, tiny_folder, on_host, name, offload):
    case, progress = SMALL[name], Watching()
    pipeline = progress.pipeline = loaded_for(case, tiny_folder, "acc:0", offload)
    before = accelerator.memory().allocated_bytes
    latents, frames = rendered(pipeline, case, progress)
    expected_latents, expected_frames = on_host(name)
    torch.testing.assert_close(latents, expected_latents, atol=ROUNDING, rtol=ROUNDING)
    torch.testing.assert_close(frames, expected_frames, atol=ROUNDING, rtol=ROUNDING)
    assert latents.device.type == frames.device.type == "cpu"
    assert accelerator.memory().peak_bytes > 0, "nothing ran on the device"
    assert progress.text_bytes == 0, "a text encoder was on the device while sampling"
    if offload != "none":
        assert accelerator.memory().allocated_bytes == before, "weights stayed on the device"
    again, _ = rendered(pipeline, case)
    torch.testing.assert_close(again, latents, atol=ROUNDING, rtol=ROUNDING)


def test_modes_need_less_memory_in_their_order(acc, tiny_folder):
    peaks = []
    for offload in MODES:
        accelerator.reset_peak()
        pipeline = loaded_for(SMALL["mochi"], tiny_folder, "acc:0", offload)
        rendered(pipeline, SMALL["mochi"])
        peaks.append(accelerator.memory().peak_bytes)
        for part in ("transformer", "vae"):
            pipeline.offloader.release(part)
            pipeline.parts.drop(part)
    assert peaks[0] > peaks[1] >= peaks[2] >= peaks[3], peaks


@pytest.mark.parametrize("offload", MODES[1:])
def test_offload_on_a_cpu_is_refused_in_one_line(tiny_folder, offload):
    with pytest.raises(UnsupportedError, match=f"offload '{offload}' on a CPU; expected auto or none"):
        loaded_for(SMALL["mochi"], tiny_folder, "cpu", offload)


def test_the_bare_pipeline_does_not_move_a_prompt_from_the_host(acc, tiny_folder, on_host):
    """The failure that this layer exists for: embeddings on the CPU meet a transformer on the accelerator."""
    pipeline = tiny.one_shot("ltx", tiny_folder)
    with torch.no_grad():
        embeds = pipeline.encode_prompt("a red fox", do_classifier_free_guidance=False)[:2]
        pipeline.to("acc:0")
        with pytest.raises(RuntimeError, match="same device"):
            pipeline(
                prompt_embeds=embeds[0],
                prompt_attention_mask=embeds[1],
                width=64,
                height=64,
                num_frames=9,
                num_inference_steps=1,
                guidance_scale=1.0,
                output_type="latent",
                generator=torch.Generator().manual_seed(0),
            )


@pytest.mark.full
@pytest.mark.parametrize("offload", MODES)
def test_a_cancel_while_moving_or_sampling_leaves_nothing_half_moved(acc, tiny_folder, on_host, recorded, offload):
    case = SMALL["mochi"]
    pipeline = loaded_for(case, tiny_folder, "acc:0", offload)
    for stage, at in (("moving transformer", 1), ("sampling", 1), ("decoding", 8)):
        progress = recorded(cancel_at=lambda done, seen, stage=stage, at=at: seen.startswith(stage) and done >= at)
        try:
            rendered(pipeline, case, progress)
        except recorded.Cancelled:
            continue
        assert stage.startswith("moving") and offload in ("group", "sequential"), f"{stage} was never reported"
    latents, _ = rendered(pipeline, case)
    torch.testing.assert_close(latents, on_host("mochi")[0], atol=ROUNDING, rtol=ROUNDING)


@pytest.mark.full
def test_loading_in_inference_mode_and_running_outside_it_works(acc, tiny_folder, on_host):
    """ComfyUI runs nodes in inference mode; a route or another thread does not."""
    with torch.inference_mode():
        pipeline = loaded_for(SMALL["ltx"], tiny_folder, "acc:0", "model")
        rendered(pipeline, SMALL["ltx"])
    latents, _ = rendered(pipeline, SMALL["ltx"])
    torch.testing.assert_close(latents, on_host("ltx")[0], atol=ROUNDING, rtol=ROUNDING)


def test_auto_takes_the_fastest_mode_that_fits(acc, tiny_folder):
    pipeline = loaded_for(SMALL["mochi"], tiny_folder, "cpu")
    vae, transformer, text = (
        sum(t.nbytes for t in (*pipeline.parts[name].parameters(), *pipeline.parts[name].buffers()))
        for name in ("vae", "transformer", "text_encoder")
    )
    largest, modes = max(vae, transformer, text), []
    for needed in (2 * (vae + transformer + text), (vae + transformer + largest) // 2, largest // 2):
        with accelerator.limit(int(needed / 0.75)):
            modes.append(loaded_for(SMALL["mochi"], tiny_folder, "acc:0").offloader.mode)
    assert modes == ["none", "model", "group"]


def test_core_asks_for_room_before_weights_arrive(acc, tiny_folder):
    """Where the part is that needs it: the device that a host computes on may be another."""
    asked: list[tuple[int, str]] = []
    request = LoadRequest(
        tiny.build("mochi", tiny_folder), precision="fp32", offload="model", device="acc:0",
        devices={"vae": torch.device("acc:1")},
    )  # fmt: skip
    pipeline = load(request, make_room=lambda needed, device: asked.append((needed, str(device))))
    rendered(pipeline, SMALL["mochi"])
    assert [device for _, device in asked] == ["acc:0", "acc:0", "acc:1"] and min(asked)[0] > 100_000


def test_an_offload_mode_unknown_here_is_named(tiny_folder):
    with pytest.raises(Exception, match="offload 'sometimes'; expected one of auto"):
        loaded_for(replace(SMALL["mochi"]), tiny_folder, "cpu", "sometimes")
