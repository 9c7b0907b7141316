"""A job says the same on every machine, and what is wrong with it is said in one line."""

import json
import shutil
from dataclasses import fields, replace
from pathlib import Path

import pytest
import tiny
import torch
from anygpu import cli
from anygpu.compat.checkpoints import identity
from anygpu.compat.errors import CheckpointError, InputError
from anygpu.compat.transforms.step_cache import StepCacheSettings
from anygpu.pipelines import jobs
from anygpu.pipelines.base import FramePackSettings, PromptRequest, SampleSettings, Silent
from anygpu.pipelines.demo import MODELS
from anygpu.pipelines.family import GuidanceStep
from anygpu.pipelines.latents import recovery
from anygpu.pipelines.load.folder import load
from anygpu.pipelines.movie import read_frames, write_mp4
from anygpu.pipelines.records import job as job_format
from anygpu.pipelines.records import places as places_file
from anygpu.pipelines.records.job import Adapter, Caching, Content, Picture, VideoJob, job_in, read_job, write_job
from anygpu.pipelines.records.job_folder import JobFolder, lines_of
from anygpu.pipelines.records.job_lists import Batch, queue_jobs
from anygpu.pipelines.records.places import FORMER_DEMOS, Machine, Places
from anygpu.pipelines.records.receipts import settings_of, tags_for
from anygpu.pipelines.requests import LOAD_INPUTS, LoadRequest
from anygpu.pipelines.settings import clip_frames
from anygpu.pipelines.vae.plan import DecodeRequest
from PIL import Image

FULL = VideoJob(
    model=Content("video/LTX", "ab" * 16),
    prompt=PromptRequest("a füchslein", "blurry", 77, "before {} after", 3, ("first", "second")),
    settings=SampleSettings(
        *(64, 96, 9, 2, 2**63, 24.5, 2.5, 3.0, 0.1, 0.9, 0.2, 5.0, "unipc", (1.0, 0.5, 0.0), 0.75), stg=1.5
    ),
    family="ltx",
    base=Content("base", "cd"),
    image_encoder=Content("encoder"),
    files={"transformer": Content("a.gguf", "12"), "vae": Content("v.safetensors", "34")},
    task="image",
    load={"precision": "fp16", "keep_free_gb": 1, "compile": True, "offload": "group"},
    loras=(Adapter(Content("style.safetensors", "56"), 0.5, "double 0-9", "merged"),),
    step_cache=Caching("custom", StepCacheSettings("first_block", 0.2, 4, 0.1, 0.9, "cpu")),
    pictures=(Picture(Content("a.png", "78"), 8, 0.5), Picture(Content("b.png", "9a"))),
    fit="crop",
    video=Content("v.mp4", "bc"),
    framepack=FramePackSettings(2.0, 5, "vanilla", 0.5, True),
    resolved=SampleSettings(64, 96, 9, 2, guidance_steps=(GuidanceStep(cfg=3.0, blocks=(1,)),)),
    resolved_variant="distilled",
    resolved_recipe="few steps",
    resolved_model="13B",
    upscalers=(Content("upscaler.safetensors", "de"),),
    first=VideoJob(Content("LTX"), PromptRequest("a fox"), SampleSettings(32, 32, 9, 2)),
    decode=DecodeRequest("tiled", 256, 64, 4),
    decode_timestep=0.05,
    decode_noise_scale=0.025,
)
PLAIN = VideoJob(Content("LTX"), PromptRequest("a fox"), SampleSettings(64, 64, 9, 2))


def test_every_field_comes_back(tmp_path: Path) -> None:
    usual = replace(PLAIN, load={})
    assert all(getattr(FULL, item.name) != getattr(usual, item.name) for item in fields(VideoJob)), "each is set"
    assert read_job(write_job(tmp_path / "a.json", FULL)) == FULL
    assert len(json.dumps(PLAIN.record())) < 200, "defaults are left out"
    assert job_in(PLAIN.record()) == PLAIN


def test_jobs_like_a_file_have_its_settings_where_none_are_given(tmp_path: Path) -> None:
    model, file = tmp_path / "model", tmp_path / "liked.mp4"
    model.mkdir()
    once = replace(FULL, first=None)
    write_mp4(torch.zeros(1, 16, 16, 3), 24, file, tags_for({"anygpu_receipt": 1, "job": FULL.record()}))
    with pytest.raises(InputError, match=r"'liked\.mp4' of several passes; expected a video that was sampled once"):
        settings_of(file)
    write_mp4(torch.zeros(1, 16, 16, 3), 24, file, tags_for({"anygpu_receipt": 1, "job": once.record()}))
    batch = Batch(["a fox"], [7], settings={"width": 0, "steps": 9}, load={"weights": "fp8"}, like=settings_of(file))
    queue_jobs(JobFolder(tmp_path), "liked", model, batch)
    (job,) = (job_in(json.loads(line)) for line in lines_of(tmp_path / "liked.jsonl"))
    changed = {"family": "", "model": job.model, "base": None, "image_encoder": None, "files": {}, "task": "auto"}
    changed |= {
        "pictures": (),
        "video": None,
        "upscalers": (),
        **{"resolved": None, "resolved_variant": "", "resolved_recipe": "", "resolved_model": ""},
        "load": {**FULL.load, "weights": "fp8"},
    }
    changed["prompt"] = replace(FULL.prompt, text="a fox", sections=())
    changed["settings"] = replace(FULL.settings, steps=9, seed=7, denoise=1.0)
    assert job == replace(once, **changed) and job.model.name == "model"


def test_the_key_goes_by_what_is_rendered(tmp_path: Path) -> None:
    elsewhere = replace(FULL, model=Content("other/name", "ab" * 16), family="", load={**FULL.load, "offload": "none"})
    assert elsewhere.key == FULL.key
    assert set(job_format.PLACES) <= LOAD_INPUTS.keys()
    others = [replace(FULL, settings=replace(FULL.settings, seed=3)), replace(FULL, model=Content("video/LTX", "ff"))]
    others += [replace(FULL, load={**FULL.load, "precision": "fp32"}), replace(FULL, pictures=FULL.pictures[::-1])]
    assert len({job.key for job in (FULL, *others)}) == 5
    assert others[0].model_key == FULL.model_key != others[2].model_key
    sage, sparse = (replace(FULL, load={**FULL.load, "attention": name}) for name in ("sage", "sparse"))
    assert sage.key == FULL.key != sparse.key, "sparse attention is another computation"


def test_a_replay_has_the_part_of_the_steps_that_a_checkpoint_guides() -> None:
    again = replace(PLAIN, resolved=replace(PLAIN.settings, steps=20, cfg=4.0, cfg_end=0.4))
    assert (again.sampled.cfg, again.sampled.cfg_end) == (4.0, 0.4)
    own = replace(again, settings=replace(PLAIN.settings, cfg=2.0))
    assert (own.sampled.cfg, own.sampled.cfg_end) == (2.0, 1.0)


def test_seconds_change_nothing_else_of_the_job_that_others_are_like(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    batch = Batch(["a fox"], [7], like=replace(FULL, first=None), framepack=FramePackSettings(10.0))
    (line,) = queue_jobs(JobFolder(tmp_path), "liked", tmp_path / "model", batch).lines
    assert job_in(json.loads(line)).framepack == replace(FULL.framepack, clip_seconds=10.0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"anygpu_job": 2}, "a job of version 2; expected version 1 or older. Update AnyGPU."),
        ({"anygpu_job": True}, "instead of a job"),
        ({"kind": "song"}, "a job of kind 'song'; expected 'video'"),
        ({"promt": {}}, "unknown field 'promt' in the job; expected one of base, decode"),
        ({"settings": {"width": 64, "height": 64, "frames": 9, "latents": [1]}}, "unknown field 'latents'"),
        ({"settings": {"width": "64", "height": 64, "frames": 9}}, "settings.width '64'; expected a whole number"),
        ({"settings": {"width": 64, "height": 64, "frames": True}}, "settings.frames True; expected a whole number"),
        ({"settings": {"width": 64, "height": 64}}, "no 'frames' in the job.settings"),
        ({"prompt": {"text": 3}}, "the job.prompt.text 3; expected a text"),
        ({"loras": [{"file": {"name": "a", "content": None}}]}, "loras[0].file.content None; expected a text"),
        ({"load": {"precison": "fp16"}}, "unknown field 'precison' in the job.load"),
        ({"load": {"compile": 1}}, "the job.load.compile 1; expected a value such as False"),
        ({"pictures": {}}, "the job.pictures {}; expected a list [...]"),
    ],
)
def test_what_is_wrong_is_one_line(change: dict[str, object], said: str) -> None:
    with pytest.raises(InputError) as caught:
        job_in({**PLAIN.record(), **change})
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_number_that_json_does_not_have(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"anygpu_job": NaN}', encoding="utf-8")
    with pytest.raises(InputError, match="is not JSON"):
        read_job(tmp_path / "a.json")


def test_what_no_file_can_have_is_refused() -> None:
    masked = replace(PLAIN, settings=replace(PLAIN.settings, noise_mask=torch.ones(1, 1, 1, 2, 2)))
    with pytest.raises(InputError, match=r"settings\.noise_mask is set"):
        masked.record()


def test_a_model_is_known_by_its_content(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = tiny.build("ltx", tiny_folder), tmp_path / "there" / "renamed"
    content = Places().content(here)
    shutil.copytree(here, there)
    (there / "README.md").write_text("other files do not count")
    (there / "ltx-0.9.safetensors").write_bytes(b"nor those beside the pipeline")
    assert Places((tmp_path / "there",)).model(content) == there
    weights = there / "vae" / "diffusion_pytorch_model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-9] ^= 1
    weights.write_bytes(data)
    with pytest.raises(CheckpointError, match="no 'ltx' in"):
        Places((tmp_path / "there",)).model(content)
    there.rename(there.with_name("ltx"))
    with pytest.raises(CheckpointError, match="'ltx' with other content"):
        Places((tmp_path / "there",)).model(content)
    lenient = Places((tmp_path / "there",), differences=[])
    assert lenient.model(content) == there.with_name("ltx") and len(lenient.differences or []) == 1
    former = Content("ltx", next(iter(FORMER_DEMOS)))
    assert lenient.model(former) and "with the demo model of version 0.1.0" in (lenient.differences or [])[-1]
    with pytest.raises(CheckpointError, match=r"the demo model of version 0\.1\.0"):
        Places((tmp_path / "there",)).model(former)
    with pytest.raises(CheckpointError):
        Places((tmp_path / "there",)).model(Content("../there/ltx"))
    large = tmp_path / "large.safetensors"
    monkeypatch.setattr(identity, "WHOLE_BYTES", 1000)
    hashes = {identity.content_of(large) for values in (b"a", b"b") if large.write_bytes(values * 10**6)}
    assert len(hashes) == 2, "a file of which only samples are read"


def test_a_file_that_cannot_be_read_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locked, good = tmp_path / "model.safetensors", tmp_path / "good" / "model.safetensors"
    good.parent.mkdir()
    for path in (locked, good):
        path.write_bytes(path.parent.name.encode())
    content, by_samples = Places().content(good), identity._by_samples

    def refused(path: Path) -> str:
        if path == locked:
            raise PermissionError(13, "Permission denied")
        return by_samples(path)

    monkeypatch.setattr(identity, "_by_samples", refused)
    assert Places((tmp_path,)).model(content) == good
    good.unlink()
    for differences in (None, []):
        with pytest.raises(CheckpointError, match="Permission denied"):
            Places((tmp_path,), differences=differences).model(content)


def test_equal_is_what_has_every_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two models that samples do not tell apart: each is found by its whole hash, and their jobs are two."""
    for name, value in {"WHOLE_BYTES": 1000, "SAMPLES": 2, "SAMPLE_BYTES": 100}.items():
        monkeypatch.setattr(identity, name, value)
    paths = [tmp_path / name / "model.safetensors" for name in "ab"]
    for path, middle in zip(paths, (b"1", b"2"), strict=True):
        path.parent.mkdir()
        path.write_bytes(bytes(5000) + middle + bytes(5000))
    contents = [Places().content(path, check=lambda: None) for path in paths]
    assert contents[0].content == contents[1].content and contents[0].whole != contents[1].whole
    for content, path in zip(contents, paths, strict=True):
        assert Places((tmp_path,)).model(content, lambda: None) == path
        assert Places((tmp_path,)).model(replace(content, whole="")) in paths, "an old file still finds its model"
    planned = Places((tmp_path,))
    assert planned.model(contents[1]) in paths, "a plan does not wait for a hash"
    assert planned.model(contents[1], lambda: None) == paths[1]
    with pytest.raises(CheckpointError, match="with other content"):
        Places((tmp_path / "a",)).model(contents[1], lambda: None)
    jobs = [replace(PLAIN, model=content) for content in (*contents, replace(contents[0], whole=""))]
    assert len({job.key for job in jobs}) == 3 == len({job.model_key for job in jobs})
    assert replace(PLAIN, model=replace(contents[0], name="elsewhere")).key == jobs[0].key
    assert job_in(json.loads(json.dumps(jobs[0].record()))) == jobs[0]


def test_pictures_of_another_size_are_not_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, side in (("a", 32), ("b", 64), ("c", 96)):
        write_mp4(torch.rand(1, side, 32, 3), 8.0, tmp_path / f"{name}.mp4")
    wanted, decoded = Places().picture(tmp_path / "c.mp4"), list[str]()
    assert wanted.size == (32, 96)
    plain = places_file.content_in
    monkeypatch.setattr(places_file, "content_in", lambda path, *rest: decoded.append(path.name) or plain(path, *rest))
    assert Places(files=(tmp_path,)).frames(replace(wanted, name="gone.mp4"))[0].shape == (1, 96, 32, 3)
    assert decoded == ["c.mp4"]


def test_a_job_file_is_the_flags(tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, picture = str(tiny.build("ltx", tiny_folder)), tmp_path / "a.mp4"
    write_mp4(torch.rand(1, 64, 64, 3, generator=torch.Generator().manual_seed(0)), 8.0, picture)
    flags = ["--model", model, "--prompt", "a fox", "--width", "64", "--height", "64", "--frames", "9", "--steps", "2"]
    flags += ["--seed", "7", "--image", str(picture), "--scheduler", "unipc"]
    here = ["--device", "cpu", "--state", str(tmp_path / "state"), "--output", str(tmp_path / "out.mp4")]
    file = tmp_path / "job.json"
    assert cli.main(["render", *flags, "--save-job", str(file), "--state", str(tmp_path / "state")]) == 0
    assert not (tmp_path / "out.mp4").exists()
    assert str(tmp_path) not in file.read_text(encoding="utf-8") and model not in file.read_text(encoding="utf-8")
    assert cli.main(["render", *flags, *here]) == 0
    assert cli.main(["render", "--job", str(file), "--search", str(Path(model).parent), *here]) == 0
    store = tmp_path / "state" / "kept"
    first, second = (recovery.load(store, item.id, print)["samples"] for item in recovery.listing(store))
    assert torch.equal(first, second)
    assert read_frames(tmp_path / "out.mp4")[0].shape[0] == 9
    capsys.readouterr()
    assert cli.main(["render", "--job", str(file), "--steps", "3", *here]) == 2
    assert "--steps beside --job" in capsys.readouterr().err


@pytest.mark.parametrize("decode", ["chunked", "draft"])
def test_a_decode_that_cannot_be_is_refused_before_the_sampling(tiny_folder, tmp_path, capsys, decode) -> None:
    model = str(tiny.build("ltx", tiny_folder))
    words = ["render", "--model", model, "--prompt", "a fox", "--device", "cpu", "--state", str(tmp_path)]
    assert cli.main([*words, "--decode", decode, "--output", str(tmp_path / "out.mp4")]) == 2
    assert "the latents are kept" not in (told := capsys.readouterr().err) and decode in told.splitlines()[-1]


def test_the_newest_latents_are_those_of_the_model(tiny_folder: Path, tmp_path: Path) -> None:
    """Another family's were sampled later."""
    commands = []
    for family, pixels in (("ltx", 32), ("mochi", 64)):
        model, film = str(tiny.build(family, tiny_folder)), str(tmp_path / f"{family}.mp4")
        commands.append(["render", "--model", model, "--device", "cpu", "--state", str(tmp_path), "--output", film])
        size = ["--width", str(pixels), "--height", str(pixels), "--frames", "9", "--steps", "2"]
        assert cli.main([*commands[-1], "--prompt", "a fox", *size]) == 0
    assert cli.main([*commands[0], "--recover", "newest"]) == 0


@pytest.mark.full
def test_one_pipeline_serves_jobs_that_share_a_model(tiny_folder: Path, tmp_path: Path) -> None:
    places = Places()
    job = replace(PLAIN, model=places.content(tiny.build("ltx", tiny_folder)))
    machine = Machine(places, tmp_path, "cpu")
    pipeline, other = (jobs.load_pipeline(job, machine, Silent()) for _ in range(2))
    made = jobs.run(job, machine, Silent(), pipeline)
    assert torch.equal(made.frames, jobs.run(job, machine, Silent(), other).frames)


def test_seconds_of_a_model_without_sections_are_said_to_have_no_effect(tiny_folder: Path, recorded) -> None:
    pipeline, told = load(LoadRequest(tiny.build("ltx", tiny_folder), device="cpu")), recorded()
    job = replace(PLAIN, framepack=FramePackSettings(10.0))
    assert jobs.as_run(job, pipeline, told.notify).framepack is None
    assert told.said == ["seconds and sections have no effect on LTX-Video: its length is in frames"]


def test_frames_of_a_model_with_sections_are_said_to_have_no_effect(recorded) -> None:
    """Those of a receipt are the ones that its seconds make."""
    pipeline, framepack = load(LoadRequest(MODELS / "framepack", device="cpu")), FramePackSettings(1.0)
    made = clip_frames(pipeline, framepack, 30.0)
    for frames, said in ((0, 0), (made, 0), (made + 4, 1)):
        job = replace(PLAIN, settings=replace(PLAIN.settings, frames=frames, fps=30.0), framepack=framepack)
        jobs.as_run(job, pipeline, (told := recorded()).notify)
        lines = [line for line in told.said if line.startswith("frames has no effect")]
        assert lines == said * ["frames has no effect on FramePack: its length is in seconds"]


@pytest.mark.parametrize("place", ["kept", "jobs"])
def test_sections_are_said_to_be_kept_where_recover_finds_them(tmp_path, recorded, monkeypatch, place) -> None:
    """On a disk that was full for a moment, and of a farm's job, whose folder of unfinished sections is removed."""
    photo, state, write = Content("photo.png"), tmp_path / "state", recovery._write
    Image.effect_noise((64, 64), 90).convert("RGB").save(tmp_path / photo.name)
    job = VideoJob(Content("m"), PromptRequest("a cat"), SampleSettings(0, 0, 0, 2), pictures=(Picture(photo),))
    pipeline, told = load(LoadRequest(MODELS / "framepack", precision="fp32", device="cpu")), recorded()
    fails = [place == "kept"]
    monkeypatch.setattr(recovery, "_write", lambda *given: not (fails and fails.pop()) and write(*given))
    machine = Machine(Places(known={photo: tmp_path / photo.name}), state, "cpu", unfinished=state / place)
    with torch.no_grad():
        latents = jobs.sample(job, machine, told, pipeline)
    (line,) = (line for line in told.said if "--recover" in line)
    found = recovery.load(state / "kept", line.split("--recover ")[1].split()[0], print)
    assert torch.equal(found["samples"], latents.samples)
