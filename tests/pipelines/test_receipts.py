"""A file says what made it, and is made again from that: bit for bit, or with the difference named."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import published
import pytest
import tiny
import torch
from anygpu import cli
from anygpu.compat.errors import CheckpointError, InputError
from anygpu.compat.transforms.step_cache import StepCacheSettings
from anygpu.pipelines import jobs, stages
from anygpu.pipelines.base import FINAL, ImageRequest, Latents, Prompt, PromptRequest, SampleSettings, Silent
from anygpu.pipelines.family import FITS, GuidanceStep
from anygpu.pipelines.latents import convert, recovery, store
from anygpu.pipelines.load.folder import load
from anygpu.pipelines.load.lora import with_lora
from anygpu.pipelines.movie import tags_of, write_mp4
from anygpu.pipelines.pipeline import Pipeline
from anygpu.pipelines.records import job as job_format
from anygpu.pipelines.records import receipts
from anygpu.pipelines.records.places import Machine, Places
from anygpu.pipelines.records.receipts import (
    RECEIPT,
    TAG,
    decoded_receipt,
    job_of,
    read_receipt,
    tags_for,
    with_receipt,
)
from anygpu.pipelines.requests import LoadRequest
from anygpu.pipelines.settings import of_checkpoint, with_step_cache
from anygpu.pipelines.speed import SpeedRequest
from anygpu.pipelines.vae.plan import DecodeRequest
from diffusers.pipelines.hunyuan_video1_5 import image_processor as buckets
from published import loops
from safetensors.torch import save_file

PICTURE = torch.rand(1, 64, 64, 3, generator=torch.Generator().manual_seed(0)).mul(255).round() / 255
SETTINGS = SampleSettings(64, 64, 9, 2, seed=5)


@pytest.fixture(scope="module")
def made(tiny_folder: Path):
    """A pipeline, and latents that it sampled from a picture, with their receipt."""
    pipeline = load(LoadRequest(tiny.build("ltx", tiny_folder), precision="fp32", device="cpu"))
    prompt = stages.encode_prompt(pipeline, PromptRequest("a fox", "blurry"), Silent())
    image = stages.encode_image(pipeline, ImageRequest(PICTURE, 64, 64), "crop", Silent())
    latents = stages.sample(pipeline, prompt, image, SETTINGS, Silent())
    return pipeline, prompt, image, with_receipt(latents, pipeline, prompt, image, SETTINGS)


@pytest.mark.full
def test_what_nodes_made_is_the_job_of_the_command(made: Any, tiny_folder: Path, tmp_path: Path) -> None:
    """Through a file of latents, on a machine where the model has another name and the picture lies beside it."""
    _, _, _, latents = made
    path = store.save_latent(tmp_path / "a.safetensors", convert.to_core(latents), print)
    from PIL import Image

    Image.fromarray((PICTURE[0] * 255).byte().numpy()).save(tmp_path / "whatever.png")
    shutil.copytree(tiny_folder / "ltx", tmp_path / "models" / "another name")
    machine = Machine(Places((tmp_path / "models",), (tmp_path,)), tmp_path / "state", "cpu")
    with mock.patch.object(jobs, "decoded", lambda *_: torch.zeros(1)):
        again = jobs.replay(path, machine, Silent())
    assert again.same is True and again.differences == ()
    assert again.text() == "the same latents, bit for bit"
    assert torch.equal(again.rendered.latents.samples, latents.samples)
    assert read_receipt(path)["job"]["load"] == {"precision": "fp32"}
    kept = recovery.load(tmp_path / "state" / "kept", "newest", print)
    assert kept["anygpu"]["extra"][RECEIPT]["latents"] == receipts.latents_hash(latents)


@pytest.mark.full
@pytest.mark.parametrize("sides", [(0, 0), (96, 64)])
def test_a_picture_is_replayed_at_the_size_it_chose(made: Any, sides: Any, tiny_folder: Path, tmp_path: Path) -> None:
    """Of 64x64 that was asked its shape made 96x64, of which it would make 128x64."""
    pipeline, prompt, _, _ = made
    loops.saved_picture(136, 64, tmp_path / "a.png")
    image = stages.encode_image(pipeline, ImageRequest(loops.picture(136, 64), 64, 64), FITS[0], Silent())
    asked = SampleSettings(*sides, 9, 2, seed=5)
    latents = stages.sample(pipeline, prompt, image, asked, Silent())
    path = tmp_path / "a.safetensors"
    signed = convert.to_core(with_receipt(latents, pipeline, prompt, image, asked))
    machine = Machine(Places((tiny_folder,), (tmp_path,)), tmp_path / "state", "cpu")
    with mock.patch.object(jobs, "decoded", lambda *_: torch.zeros(1)):
        assert jobs.replay(store.save_latent(path, signed, print), machine, Silent()).same is True
    job = job_of(signed["anygpu"]["extra"][RECEIPT])
    size, _ = jobs.planned_size(job, machine, pipeline)
    assert (size.width, size.height) == (96, 64)


def test_what_differs_is_named(made: Any, tiny_folder: Path, tmp_path: Path) -> None:
    pipeline, prompt, _, _ = made
    latents = stages.sample(pipeline, prompt, None, SETTINGS, Silent())
    record = with_receipt(latents, pipeline, prompt, None, SETTINGS).extra[RECEIPT]
    record["made_with"]["torch"] = "1.0"
    record["device"]["device"] = "NVIDIA GeForce GTX 1080"
    record["job"]["settings"]["seed"] = 6
    signed = replace(latents, extra={RECEIPT: record})
    path = store.save_latent(tmp_path / "a.safetensors", convert.to_core(signed), print)
    model = tmp_path / "models" / "ltx"
    shutil.copytree(tiny_folder / "ltx", model)
    (model / "model_index.json").write_text((model / "model_index.json").read_text() + "\n")
    machine = Machine(Places((model.parent,)), tmp_path / "state", "cpu")
    with mock.patch.object(jobs, "decoded", lambda *_: torch.zeros(1)):
        said = jobs.replay(path, machine, Silent()).text()
    assert said.startswith("other latents\n")
    for part in (
        "'ltx' has other content here",
        "torch '1.0', here",
        "device 'NVIDIA GeForce GTX 1080', here",
        "by at most",
    ):
        assert part in said


def test_a_video_carries_its_receipt_and_no_path(made: Any, tmp_path: Path, tiny_folder: Path) -> None:
    pipeline, _, _, latents = made
    latents = stages.with_decode_noise(pipeline, latents, 0.05, -1.0, Silent())
    record = jobs.Rendered(torch.zeros(1), latents, DecodeRequest("tiled", 64)).receipt
    path = write_mp4(torch.rand(3, 32, 32, 3), 8.0, tmp_path / "a.mp4", tags_for(record))
    assert read_receipt(path) == json.loads(json.dumps(record))
    job = job_of(read_receipt(path))
    assert (job.decode, job.decode_timestep, job.settings, job.prompt.negative) == (
        DecodeRequest("tiled", 64),
        0.05,
        SETTINGS,
        "blurry",
    )
    text = tags_of(path)[TAG]
    assert str(tiny_folder) not in text and str(Path.home()) not in text and str(tmp_path) not in text
    write_mp4(torch.rand(3, 32, 32, 3), 8.0, path)
    with pytest.raises(CheckpointError, match=r"no receipt in 'a\.mp4'"):
        read_receipt(path)


def test_settings_of_loading_come_back(made: Any, tiny_folder: Path) -> None:
    _, prompt, _, _ = made
    speed = SpeedRequest(kernels="off")
    request = LoadRequest(tiny_folder / "ltx", weights="int8", text_weights="int8", device="cpu", speed=speed)
    pipeline = with_step_cache(load(request), "fast", StepCacheSettings())
    latents = with_receipt(made[3], pipeline, prompt, None, replace(SETTINGS, sigmas=(1.0, 0.5, 0.0)))
    job = job_of(latents.extra[RECEIPT])
    assert job.load == {"weights": "int8", "text_weights": "int8"}, "where and how fast is the other machine's matter"
    assert job.settings.sigmas == (1.0, 0.5, 0.0)
    assert str(job.step_cache.settings) == str(pipeline.plan.step_cache)


def test_what_no_file_describes_is_said(made: Any) -> None:
    pipeline, prompt, image, latents = made
    other = replace(latents, samples=latents.samples + 1)  # what a node of another pack made of them
    masked = replace(SETTINGS, latents=other, noise_mask=torch.ones(1, 1, 1, 2, 2))
    foreign = Prompt(prompt.family, prompt.embeds)
    record = with_receipt(latents, pipeline, foreign, replace(image, sources=()), masked).extra[RECEIPT]
    with pytest.raises(InputError) as caught:
        job_of(record)
    for part in ("a prompt that was not encoded", "the latents that it started from", "a noise mask", "the pictures"):
        assert part in str(caught.value)
    foreign_extra = replace(latents, extra={"resolved": ["not settings"]})
    with pytest.raises(InputError, match="a receipt without a request that can be written down"):
        job_of(with_receipt(foreign_extra, pipeline, prompt, None, SETTINGS).extra[RECEIPT])
    changed = decoded_receipt(replace(latents, samples=latents.samples + 1), DecodeRequest())
    for given in (3, None, "a mask"):  # a receipt that somebody edited
        edited = replace(
            latents,
            samples=latents.samples + 1,
            extra={**latents.extra, RECEIPT: {**latents.extra[RECEIPT], "missing": given}},
        )
        assert decoded_receipt(edited, DecodeRequest())["missing"][0] == str(given)
    with pytest.raises(InputError, match="a receipt without what changed the latents after sampling"):
        job_of(changed or {})


@pytest.mark.full
def test_a_replay_takes_what_auto_became(made: Any, tiny_folder: Path, tmp_path: Path) -> None:
    """Steps and a list of guidance, of a recipe that is another in a later version; none of it is in a job's key."""
    pipeline, prompt, _, _ = made
    recipes, asked = pipeline.spec.published.recipes, SampleSettings(64, 64, 9, seed=5)
    rows = GuidanceStep(1.0, cfg=1.0), GuidanceStep(0.9, cfg=4.0, rescale=0.5)
    older = {"dev": replace(recipes["dev"], steps=3, guidance=rows)}
    with mock.patch.dict(recipes, older):
        latents = stages.sample(pipeline, prompt, None, asked, Silent())
        signed = with_receipt(latents, pipeline, prompt, None, asked)
        unsigned = json.loads(json.dumps(convert.to_core(latents)["anygpu"]["extra"]))  # as a file has it
        later = with_receipt(replace(latents, extra=unsigned), pipeline, prompt, None, asked)
        assert later.extra[RECEIPT] == signed.extra[RECEIPT]
    job = job_of(signed.extra[RECEIPT])
    assert job.settings.steps == 0 and job.resolved is not None and job.resolved.guidance_steps[1].cfg == 4.0
    assert job.key == replace(job, resolved=None).key and "resolved" not in signed.extra
    shutil.copytree(tiny_folder / "ltx", tmp_path / "models" / "ltx")
    machine = Machine(Places((tmp_path / "models",)), tmp_path / "state", "cpu")
    record = signed.extra[RECEIPT]
    path, newer = tmp_path / "a.safetensors", {"dev": replace(recipes["dev"], steps=2)}
    for resolved, same in ((job.resolved, True), (None, False)):
        record["job"] = replace(job, resolved=resolved).record()
        store.save_latent(path, convert.to_core(signed), print)
        with mock.patch.object(jobs, "decoded", lambda *_: torch.zeros(1)), mock.patch.dict(recipes, newer):
            assert jobs.replay(path, machine, Silent()).same is same


@pytest.mark.parametrize(("name", "steps"), [("ltxv-2b-0.9.6-distilled", 8), ("my ltx", 40)])
def test_a_replay_takes_the_recipe_of_a_model_that_is_called_otherwise_here(
    name: str, steps: int, tiny_folder: Path, tmp_path: Path
) -> None:
    source = tiny.build("ltx", tiny_folder)
    there = shutil.copytree(source, tmp_path / "there" / name)
    pipeline = load(LoadRequest(there, precision="fp32", device="cpu"))
    assert of_checkpoint(pipeline).sizes.defaults.steps == steps
    prompt = stages.encode_prompt(pipeline, PromptRequest("a fox"), Silent())
    asked = SampleSettings(64, 64, 9, 2, seed=5)
    signed = with_receipt(stages.sample(pipeline, prompt, None, asked, Silent()), pipeline, prompt, None, asked)
    shutil.copytree(source, tmp_path / "models" / "another-0.9.8-distilled")
    machine = Machine(Places((tmp_path / "models",)), tmp_path / "state", "cpu")
    here = jobs.load_pipeline(job := job_of(signed.extra[RECEIPT]), machine, Silent())
    assert of_checkpoint(here).sizes.defaults.steps == steps and here.variant == pipeline.variant
    assert job.key == replace(job, resolved_variant="", resolved_recipe="").key
    strange = replace(job, resolved_variant="of another family", resolved_recipe="none")
    assert jobs.load_pipeline(strange, machine, Silent()).variant == "distilled"


@pytest.mark.parametrize(
    ("names", "variant"),
    [
        (("mine", "ltxv-2b-0.9.8-distilled-lora"), "auto"),
        (("ltxv-2b-0.9.8-distilled-lora", "mine"), "dev"),
        pytest.param(("mine", "ltxv-2b-0.9.8-distilled-lora"), "dev", marks=pytest.mark.full),
        pytest.param(("ltxv-2b-0.9.8-distilled-lora", "mine"), "auto", marks=pytest.mark.full),
    ],
)
def test_a_replay_takes_the_recipe_of_a_lora_whose_folder_is_called_otherwise_here(
    names: tuple[str, str], variant: str, tiny_folder: Path, tmp_path: Path
) -> None:
    there, here = (
        tmp_path / place / name / "adapter_model.safetensors" for place, name in zip("ab", names, strict=True)
    )
    model = shutil.copytree(tiny.build("ltx", tiny_folder), tmp_path / "b" / "my ltx")
    pipeline = load(LoadRequest(model, precision="fp32", device="cpu", variant=variant))
    (layer, (rows, columns)), *_ = tiny.matrices_of(pipeline).items()
    for path in (there, here):
        path.parent.mkdir(parents=True)
        factors = {f"{layer}.lora_A.weight": torch.ones(1, columns), f"{layer}.lora_B.weight": torch.ones(rows, 1)}
        save_file(factors, path)
    pipeline = with_lora(pipeline, there, 1.0, "", "separate", Silent())
    prompt = stages.encode_prompt(pipeline, PromptRequest("a fox"), Silent())
    asked = SampleSettings(64, 64, 9, 2, seed=5)
    job = job_of(
        with_receipt(stages.sample(pipeline, prompt, None, asked, Silent()), pipeline, prompt, None, asked).extra[
            RECEIPT
        ]
    )
    again = jobs.load_pipeline(job, Machine(Places((tmp_path / "b",)), tmp_path / "state", "cpu"), Silent())
    assert again.model.recipe == pipeline.model.recipe == ("" if names[0] == "mine" else "distilled")
    defaults, expected = (of_checkpoint(each).sizes.defaults for each in (again, pipeline))
    assert defaults == expected and again.variant == pipeline.variant


@pytest.mark.full
def test_a_replay_takes_the_configuration_of_a_file_whose_folder_is_called_otherwise_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of image to video in 720p, whose shapes are those of text to video in 480p."""
    monkeypatch.setattr(receipts, "whole_of", lambda *_: "")  # of 31 GB of nothing
    there = tmp_path / "there" / "720p_i2v" / "diffusion_pytorch_model.safetensors"
    published.sparse(there, published.shapes("hunyuan_video_15"))
    with published.large_host():
        pipeline = published.composed("hunyuan_video_15", tmp_path, texts=False, transformer=there)
    job = receipts._job(pipeline, Prompt("hunyuan_video_15", {}), None, SampleSettings(1280, 720, 5, 2), None)
    assert job.resolved_model == "720p i2v" and job.task == "auto"
    (tmp_path / "models" / "mine").mkdir(parents=True)
    there.rename(tmp_path / "models" / "mine" / there.name)
    machine = Machine(Places((tmp_path / "models",)), tmp_path, "cpu")
    asked = jobs.request_of(replace(job, files={"transformer": job.model}), machine)
    assert asked.files is not None and asked.files.known == "720p i2v" and asked.model.parent.name == "mine"


def ltx_twice(folder: Path) -> tuple[list[Path], Path, Any]:
    """Models of both passes, their upscaler, and what samples one pass."""
    model, upscaler = loops.ltx("ltx_condition", folder, 1), loops.ltx_upscaler(folder)

    def sampled(pipeline: Pipeline, prompt: Prompt, before: Latents | None) -> Latents:
        size = loops.LTX_FIRST if before is None else loops.LTX_FINAL
        shown = ImageRequest(loops.picture(*loops.BUCKETED), *size, final_size=loops.LTX_FINAL)
        image = stages.encode_image(pipeline, shown, "crop", Silent(), before)
        asked = SampleSettings(*size, 9, 2, seed=5, latents=before)
        return with_receipt(stages.sample(pipeline, prompt, image, asked, Silent()), pipeline, prompt, image, asked)

    return [model, model], upscaler, sampled


def hunyuan_15_twice(folder: Path) -> tuple[list[Path], Path, Any]:
    """The same with a picture, whose second pass has a model of its own."""
    name = "hunyuan_video_15_i2v"
    models = [tiny.build(name, folder), loops.hunyuan_15_super(name, folder, "720p")]

    def sampled(pipeline: Pipeline, prompt: Prompt, before: Latents | None) -> Latents:
        asked, fit = ImageRequest(loops.picture(*loops.BUCKETED), 64, 64, control=False), FITS[0] if before else "crop"
        image = stages.encode_image(pipeline, asked, fit, Silent(), before)
        settings = SampleSettings(image.width, image.height, 5, 1, seed=5, latents=before)
        return with_receipt(
            stages.sample(pipeline, prompt, image, settings, Silent()), pipeline, prompt, image, settings
        )

    return models, loops.hunyuan_15_upscaler(folder, "720p"), sampled


@pytest.mark.parametrize("twice", [ltx_twice, pytest.param(hunyuan_15_twice, marks=pytest.mark.full)])
def test_both_passes_are_replayed(twice: Any, tiny_folder: Path, tmp_path: Path) -> None:
    """From one file, by its models and its upscaler under other names; so are latents that were only enlarged."""
    models, upscaler, sampled = twice(tiny_folder)
    (first, last), state = (load(LoadRequest(model, precision="fp32", device="cpu")) for model in models), tmp_path
    prompt = stages.encode_prompt(first, PromptRequest("a fox", "blurry"), Silent())
    with mock.patch.object(buckets, "generate_crop_size_list", loops.tenth(buckets.generate_crop_size_list)):
        low = sampled(first, prompt, None)
        high = receipts.with_upscaler(low, stages.upscale(last, low, upscaler, Silent()), upscaler, state)
        final = sampled(last, prompt, high)
        loops.saved_picture(*loops.BUCKETED, tmp_path / "whatever.png")
        shutil.copy(upscaler, tmp_path / "another name.safetensors")
        machine = Machine(Places((tmp_path, tiny_folder), (tmp_path,), state=state), state, "cpu")
        for number, latents in enumerate((high, final)):
            path = store.save_latent(tmp_path / f"{number}.safetensors", convert.to_core(latents), print)
            with mock.patch.object(jobs, "decoded", lambda *_: torch.zeros(1)):
                made = jobs.replay(path, machine, Silent())
            assert made.same is True, number
            ends = [[each.extra.get(name) for name in FINAL] for each in (made.rendered.latents, latents)]
            assert ends[0] == ends[1], "the decoded frames get another size"
    job = job_of(final.extra[RECEIPT])
    other = replace(job, settings=replace(job.settings, width=0, height=512))  # widgets, which latents replace
    planned, _ = jobs.planned_size(other, machine, last)
    assert (planned.width, planned.height) == (final.width, final.height)
    assert job.first is not None and job.first.upscalers[0].name == upscaler.name and not job.upscalers
    deep = job.record()
    for _ in range(200):
        deep = {**job.record(), "first": deep}
    with pytest.raises(InputError, match="a job of 202 passes; expected at most 3"):
        job_format.job_in(deep)


@pytest.mark.parametrize(
    "record", ["{", "[]", '{"anygpu_receipt": 2}', '{"anygpu_receipt": "x"}', '{"anygpu_receipt": NaN}']
)
def test_a_damaged_receipt_is_one_line(tmp_path: Path, record: str) -> None:
    path = write_mp4(torch.rand(2, 32, 32, 3), 8.0, tmp_path / "a.mp4", {TAG: record})
    with pytest.raises(InputError):
        read_receipt(path)


def copied(source: Path, target: Path, keep_tags: bool = True, packets: int = 99) -> Path:
    """The first packets of a video in another file, as ``ffmpeg -c copy`` writes it."""
    import av

    options = {"movflags": "use_metadata_tags"} if keep_tags and target.suffix == ".mp4" else {}
    with av.open(str(source)) as reading, av.open(str(target), "w", options=options) as writing:
        writing.metadata.update(reading.metadata)
        stream = writing.add_stream_from_template(reading.streams.video[0])
        for count, packet in enumerate(reading.demux(video=0)):
            if packet.dts is not None and count < packets:
                packet.stream = stream
                writing.mux(packet)
    return target


def test_a_receipt_survives_cutting_and_other_containers(tmp_path: Path) -> None:
    """Matroska writes names of tags in capitals."""
    record = {"anygpu_receipt": 1, "latents": "00"}
    video = write_mp4(torch.rand(6, 32, 32, 3), 8.0, tmp_path / "a.mp4", tags_for(record))
    for target, packets in (("cut.mp4", 3), ("a.mkv", 99), ("a.mov", 99)):
        if target == "a.mov":
            with pytest.raises(CheckpointError, match=r"no receipt in 'a\.mov'"):
                read_receipt(copied(video, tmp_path / target))
        else:
            assert read_receipt(copied(video, tmp_path / target, packets=packets)) == record, target


def test_a_file_that_another_program_saved_again_is_one_line(tmp_path: Path) -> None:
    from PIL import Image
    from safetensors.torch import load_file, save_file

    video = write_mp4(torch.rand(3, 32, 32, 3), 8.0, tmp_path / "a.mp4", tags_for({"anygpu_receipt": 1}))
    copied(video, tmp_path / "plain.mp4", keep_tags=False)
    Image.new("RGB", (32, 32)).save(tmp_path / "frame.png", comment="saved again")
    Image.new("RGB", (32, 32)).save(tmp_path / "frame.webp")
    (tmp_path / "cut.mp4").write_bytes(video.read_bytes()[:400])
    (tmp_path / "empty.mp4").write_bytes(b"")
    (tmp_path / "text.mkv").write_text("no video")
    latents = Latents(torch.zeros(1, 4, 2, 8, 8), "any", "text", 9, 64, 64, 8.0, 3, extra={RECEIPT: {}})
    path = store.save_latent(tmp_path / "a.safetensors", convert.to_core(latents), print)
    save_file(load_file(path), tmp_path / "again.safetensors")
    without = ("plain.mp4", "frame.png", "frame.webp", "again.safetensors")
    for name in (*without, "cut.mp4", "empty.mp4", "text.mkv", "none.mp4"):
        with pytest.raises(CheckpointError) as caught:
            read_receipt(tmp_path / name)
        assert "\n" not in str(caught.value) and name in str(caught.value)
        assert (name in without) == str(caught.value).startswith("no receipt in"), str(caught.value)


@pytest.mark.full
def test_the_command_makes_a_file_again(tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny.build("ltx", tiny_folder)
    flags = ["--width", "64", "--height", "64", "--frames", "9", "--steps", "2", "--seed", "7", "--prompt", "a fox"]
    here = ["--device", "cpu", "--state", str(tmp_path / "state")]
    video = tmp_path / "fox.mp4"
    assert cli.main(["render", "--model", str(model), *flags, *here, "--output", str(video)]) == 0
    capsys.readouterr()
    assert cli.main(["replay", str(video), "--search", str(model.parent), *here]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'fox.replay.mp4'}: the same latents, bit for bit\n"
    assert job_of(read_receipt(tmp_path / "fox.replay.mp4")) == job_of(read_receipt(video))
    capsys.readouterr()
    assert cli.main(["replay", str(video), *here]) == 1, "the demo model has the same name"
    assert "differs: 'ltx' has other content here than where it was made" in capsys.readouterr().out
    assert job_format.job_in(read_receipt(video)["job"]).model.name == "ltx"
