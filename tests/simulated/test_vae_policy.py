"""Founding failure 5 and its kin: a VAE on a faulty device gives the right picture or a clear error, never black."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from anygpu.compat.checkpoints.weights import described
from anygpu.compat.device.probe_store import ProbeStore
from anygpu.compat.errors import InputError, UnsupportedError
from anygpu.compat.memory.transfer import transfer_for
from anygpu.pipelines import stages
from anygpu.pipelines.base import ImageRequest, Latents, Silent
from anygpu.pipelines.forecast.memory import forecast
from anygpu.pipelines.load.folder import load
from anygpu.pipelines.pipeline import Pipeline
from anygpu.pipelines.requests import LoadRequest
from anygpu.pipelines.sizes import Size
from anygpu.pipelines.vae import fallback as vae
from anygpu.pipelines.vae import plan as vae_plan
from anygpu.pipelines.vae.plan import DecodeRequest

from simulated import accelerator, profiles

BF16 = torch.bfloat16
FOLDERS = {
    "ltx": ("ltx",),
    "ltx_condition": ("ltx_condition",),
    "hunyuan_video": ("hunyuan_video_i2v",),
    "hunyuan_video_15": ("hunyuan_video_15_i2v",),
    "framepack": ("framepack", "hunyuan_video", "siglip"),
    "mochi": ("mochi",),
}
FULL = pytest.mark.full
PICTURE = torch.rand(1, 64, 64, 3, generator=torch.Generator().manual_seed(0))
ROUNDING = 1e-5  # the same sums in another order
BF16_WEIGHTS = 0.05  # frames in 0..1 from weights rounded to eight bits, in a network of random weights
AUTOMATIC, CHOSEN = "assumed for this test", "chosen for this test"


@pytest.fixture(autouse=True)
def plugged():
    if reason := accelerator.reason():
        pytest.skip(reason)
    with torch.no_grad():
        yield


@pytest.fixture
def unplanned(monkeypatch):
    """A device that does not tell its free memory, so that the first attempt is made without a plan."""
    monkeypatch.setattr(vae_plan, "free_bytes", lambda device: None)


def loaded_on(
    device: Any, name: str, folder: Path, offload: str = "model", dtype: torch.dtype = BF16, why: str = AUTOMATIC
) -> Pipeline:
    """A tiny pipeline with its VAE in ``dtype``, as a table or a user that knows nothing of the fault would have it."""
    model, *others = (tiny.build(each, folder) for each in FOLDERS[name])
    base, encoder = others or (None, None)
    choice = "bf16" if dtype is BF16 else "fp32"
    pipeline = load(LoadRequest(model, base, encoder, precision=choice, offload=offload, device=device))
    return replace(
        pipeline,
        device=replace(pipeline.device, precision=replace(pipeline.precision, why=why, automatic=why == AUTOMATIC)),
    )


def latents_for(pipeline: Pipeline, side: int = 0, frames: int = 2) -> Latents:
    """Random latents; a side of 0 is the smallest of two cells or more."""
    spatial, temporal = pipeline.spec.sizes.ratios
    side = side or max(32, 2 * spatial)
    channels = int(pipeline.configs["vae"].get("latent_channels", 16))
    shape = (1, channels, frames, side // spatial, side // spatial)
    samples = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    return Latents(samples, pipeline.family, "text", (frames - 1) * temporal + 1, side, side, 24.0, 0)


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max())


@pytest.fixture(scope="module")
def reference(tiny_folder):
    """The CPU's fp32 frames of each pipeline."""
    kept: dict[str, torch.Tensor] = {}

    def of(name: str) -> torch.Tensor:
        if name not in kept:
            pipeline = loaded_on("cpu", name, tiny_folder, "none", torch.float32)
            with torch.no_grad():
                kept[name] = stages.decode(pipeline, latents_for(pipeline), Silent())
        return kept[name]

    return of


# ---- bf16 turns into zeros (Radeon) ----------------------------------------------------------------


def test_founding_failure_5_the_bare_way_loads_and_decodes_zeros(tiny_folder):
    """Upload and cast on the device, as a plain loader and a plain decode do it."""
    from diffusers import AutoencoderKLMochi

    folder = tiny.build("mochi", tiny_folder) / "vae"
    module = AutoencoderKLMochi.from_pretrained(folder, torch_dtype=BF16)
    with profiles.on("gfx1151") as machine:
        module.to(machine.device).float()
        assert all(not bool(weight.any()) for weight in module.parameters()), "weights"
        latents = torch.randn(1, 12, 1, 4, 4).to(BF16).to(machine.device)
        assert not bool(latents.float().cpu().any()), "latents, cast on the device"
        assert not bool(latents.cpu().float().any()), "latents, copied in bf16"
        module.to(BF16).cpu()
    module = AutoencoderKLMochi.from_pretrained(folder, torch_dtype=BF16)
    with profiles.on("gfx1151") as machine:
        frames = module.to(machine.device).decode(latents.cpu().to(machine.device), return_dict=False)[0]
        assert not bool(frames.cpu().float().isfinite().all()) or float(frames.cpu().float().std()) == 0.0, "frames"


@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=["bf16", "fp32"])
def test_founding_failure_5_our_loader_brings_every_weight_there(tiny_folder, tmp_path, dtype):
    """A bf16 file in both precisions: what is on the device is what the file says, widened on the host."""
    import shutil

    from safetensors.torch import load_file, save_file

    model = tmp_path / "mochi"
    shutil.copytree(tiny.build("mochi", tiny_folder), model, symlinks=False)
    (file,) = {entry.file for entry in described(sorted((model / "vae").glob("*.safetensors"))).values()}
    stored = {name: tensor.to(BF16) for name, tensor in load_file(file).items()}
    save_file(stored, file)
    with profiles.on("gfx1151") as machine:
        choice = "bf16" if dtype is BF16 else "fp32"
        pipeline = load(LoadRequest(model, precision=choice, offload="none", device=machine.facts))
        with pipeline.offloader.hold("vae") as module:
            way = transfer_for(machine.device, dtype)
            for name, tensor in module.state_dict().items():
                assert tensor.device == machine.device and tensor.dtype is dtype
                assert torch.equal(way.to_host_fp32(tensor), stored[name].float()), name
        pipeline.offloader.release("vae")
        assert all(torch.equal(t, stored[n].to(dtype)) for n, t in pipeline.parts["vae"].state_dict().items()), "back"


@pytest.mark.parametrize(
    ("name", "offload"),
    [
        ("ltx_condition", "none"),
        ("framepack", "sequential"),
        ("mochi", "group"),
        ("hunyuan_video_15", "model"),
        *(
            pytest.param(name, mode, marks=FULL)
            for name, mode in [("ltx", "none"), ("ltx_condition", "sequential"), ("hunyuan_video", "group")]
        ),
    ],
)
def test_a_decode_of_zeros_is_done_again_in_fp32(tiny_folder, reference, recorded, name, offload):
    with profiles.on("gfx1151") as machine:
        pipeline, progress = loaded_on(machine.facts, name, tiny_folder, offload), recorded()
        weights = {n: t.clone() for n, t in pipeline.parts["vae"].state_dict().items()}
        frames = stages.decode(pipeline, latents_for(pipeline), progress)
        assert machine.hits, "no fault was met"
    assert distance(frames, reference(name)) < BF16_WEIGHTS
    assert float(frames.std()) > 0.01
    said = [text for text in progress.said if text.startswith("decoding")]
    assert said and "again whole in fp32" in said[-1] and "CPU" not in " ".join(said)
    pipeline.offloader.release("vae")
    for key, tensor in pipeline.parts["vae"].state_dict().items():
        assert tensor.dtype is weights[key].dtype and torch.equal(tensor.cpu(), weights[key]), f"{key} was changed"


@pytest.mark.full
@pytest.mark.parametrize(
    "name", ["ltx", "hunyuan_video", *(pytest.param(name, marks=FULL) for name in ("framepack", "hunyuan_video_15"))]
)
def test_an_encode_of_zeros_is_done_again_in_fp32(tiny_folder, recorded, name):
    request = ImageRequest(PICTURE, 64, 64, vision=torch.zeros(1, 729, 32) if name == "framepack" else None)
    if name == "hunyuan_video_15":
        request = replace(request, vision=torch.zeros(1, 729, 32))

    def tensors(pipeline: Pipeline, progress: Any) -> dict[str, torch.Tensor]:
        return dict(stages.encode_image(pipeline, request, "stretch", progress).tensors)

    expected = tensors(loaded_on("cpu", name, tiny_folder, "none", torch.float32), Silent())
    with profiles.on("gfx1151") as machine:
        progress = recorded()
        found = tensors(loaded_on(machine.facts, name, tiny_folder), progress)
    assert any(text.startswith("encoding") and "again whole in fp32" in text for text in progress.said), progress.said
    for key, tensor in found.items():
        assert tensor.device.type == "cpu" and tensor.dtype is torch.float32
        assert distance(tensor, expected[key]) < 0.1 * (1 + float(expected[key].abs().max())), key


@pytest.mark.parametrize("name", ["ltx", "framepack"])
def test_latents_of_zeros_are_found_before_sampling(tiny_folder, recorded, name):
    vision = torch.zeros(1, 729, 32) if name == "framepack" else None
    for why in (AUTOMATIC, CHOSEN):
        with profiles.on("gfx1151", without=("_bf16_to_fp32_zeros",)) as machine:
            pipeline, progress = loaded_on(machine.facts, name, tiny_folder, why=why), recorded()
            _stock_convolutions(pipeline)
            request = ImageRequest(PICTURE, 64, 64, vision=vision, prepare=False)
            if why == AUTOMATIC:
                found = stages.encode_image(pipeline, request, "stretch", progress)
                assert progress.said == ["encoding image whole in bf16 gave nothing but zeros: again whole in fp32"]
                assert all(bool(t.any()) for key, t in found.tensors.items() if key.startswith(("start", "moments")))
            else:
                with pytest.raises(UnsupportedError, match="the VAE gave nothing but zeros while encoding image"):
                    stages.encode_image(pipeline, request, "stretch", progress)


@pytest.mark.full
def test_a_video_is_encoded_with_the_same_care(tiny_folder, recorded):
    clip = torch.rand(7, 64, 64, 3, generator=torch.Generator().manual_seed(2))
    with profiles.on("gfx1151") as machine:
        pipeline, progress = loaded_on(machine.facts, "mochi", tiny_folder), recorded()
        found = stages.encode_video(pipeline, clip, 64, 64, "stretch", 0, progress)
    assert bool(found.samples.any()) and any("again" in text for text in progress.said)


@pytest.mark.parametrize("name", ["mochi", "hunyuan_video"])
def test_a_black_picture_is_found_where_casts_are_sound(tiny_folder, reference, recorded, name):
    """Convolutions alone give zeros here: what comes out is what tells."""
    with profiles.on("gfx1151", without=("_bf16_to_fp32_zeros",)) as machine:
        pipeline, progress = loaded_on(machine.facts, name, tiny_folder), recorded()
        _stock_convolutions(pipeline)
        frames = stages.decode(pipeline, latents_for(pipeline), progress)
        assert machine.hits.get("bf16 convolution")
    assert progress.said == ["decoding whole in bf16 gave one colour: again whole in fp32"]
    assert distance(frames, reference(name)) < BF16_WEIGHTS


def test_a_chosen_precision_gives_an_error_instead(tiny_folder, recorded):
    with profiles.on("gfx1151") as machine:
        pipeline, progress = loaded_on(machine.facts, "mochi", tiny_folder, why=CHOSEN), recorded()
        told = r"the VAE gave .* while decoding whole in bf16.*Choose precision auto"
        with pytest.raises(UnsupportedError, match=told):
            stages.decode(pipeline, latents_for(pipeline), progress)
        assert not progress.said


@pytest.mark.full
@pytest.mark.parametrize(
    "name", ["hunyuan_video", *(pytest.param(name, marks=FULL) for name in ("hunyuan_video_15", "framepack"))]
)
def test_auto_decodes_in_fp16_on_a_turing_in_half_of_the_memory_and_again_in_fp32_what_overflows(
    tiny_folder, reference, recorded, name
):
    model, *others = (tiny.build(each, tiny_folder) for each in FOLDERS[name])
    base, encoder = others or (None, None)
    with profiles.on("turing") as machine:
        pipeline, wide = (
            load(LoadRequest(model, base, encoder, precision=choice, offload="model", device=machine.facts))
            for choice in ("auto", "fp32")
        )
        latents, progress = latents_for(pipeline), recorded()
        frames, expected = (stages.decode(each, latents, progress) for each in (pipeline, wide))
        assert pipeline.precision.vae is torch.float16 and distance(frames, expected) < BF16_WEIGHTS / 8
        assert not [text for text in progress.said if "again" in text]
        peaks = [forecast(each, Size(704, 480, 33)).stages[-1].activations for each in (pipeline, wide)]
        assert peaks[0] == pytest.approx(peaks[1] / 2, rel=0.15)
        first = next(m for m in pipeline.parts["vae"].decoder.modules() if isinstance(m, torch.nn.Conv3d))
        first.weight.data *= 3e4 / float(first.weight.abs().max())  # its results, not its weights, leave fp16's range
        frames = stages.decode(pipeline, latents, progress)
    assert progress.said[-1].endswith("gave NaN or infinite values: again whole in fp32")
    assert bool(frames.isfinite().all()) and float(frames.std()) > 0.01


# ---- missing kernels and NaN -----------------------------------------------------------------------


def test_a_missing_kernel_is_left_for_fp32_and_then_for_the_cpu(tiny_folder, reference, recorded):
    for machine_name, told in (("turing", "again whole in fp32"), ("no-conv3d", "on the CPU")):
        with profiles.on(machine_name) as machine:
            pipeline, progress = loaded_on(machine.facts, "hunyuan_video", tiny_folder), recorded()
            _stock_convolutions(pipeline)
            frames = stages.decode(pipeline, latents_for(pipeline), progress)
            assert machine.hits
        assert told in progress.said[-1] and "failed" in progress.said[0], progress.said
        assert distance(frames, reference("hunyuan_video")) < BF16_WEIGHTS


def test_nan_in_one_part_is_found_before_the_next_is_computed(acc, tiny_folder, recorded):
    calls = []

    def spoil(name, arguments, results):
        calls.append(name)
        results[0].fill_(float("nan"))

    pipeline = loaded_on(acc, "mochi", tiny_folder, dtype=torch.float32, why=CHOSEN)
    latents, form = latents_for(pipeline, frames=6), DecodeRequest("chunked", frames=2)
    with accelerator.hook("aten::convolution*", after=spoil), pytest.raises(UnsupportedError, match="NaN or infinite"):
        stages.decode(pipeline, latents, recorded(), form=form)
    once = len(calls)
    calls.clear()
    with accelerator.hook("aten::convolution*", before=lambda name, arguments: calls.append(name)):
        stages.decode(pipeline, latents, Silent(), form=form)
    assert once < len(calls), "the second chunk of frames was decoded although the first was NaN"


def test_miopen_is_left_for_one_more_try_and_that_is_kept(acc, tiny_folder, reference, recorded, tmp_path):
    def refuse(name, arguments):
        if torch.backends.cudnn.enabled:
            raise RuntimeError("miopenStatusUnknownError")

    enabled = torch.backends.cudnn.enabled
    pipeline = loaded_on(acc, "mochi", tiny_folder, dtype=torch.float32, why=CHOSEN)
    for again in (True, False):
        progress = recorded()
        pipeline = replace(
            pipeline, device=replace(pipeline.device, probes=ProbeStore(pipeline.facts, tmp_path))
        )  # a new session
        with accelerator.hook("aten::convolution*", before=refuse):
            frames = stages.decode(pipeline, latents_for(pipeline), progress)
        assert any(line.endswith("again whole in fp32 without MIOpen") for line in progress.said) == again
        assert distance(frames, reference("mochi")) < ROUNDING
        assert torch.backends.cudnn.enabled == enabled


def test_a_mistake_of_ours_is_not_hidden_by_another_attempt(acc, tiny_folder, recorded, monkeypatch):
    pipeline, progress = loaded_on(acc, "mochi", tiny_folder, dtype=torch.float32), recorded()
    monkeypatch.setattr(vae.Transfer, "to_device", lambda self, tensor: tensor)
    with pytest.raises(RuntimeError, match="same device"):
        stages.decode(pipeline, latents_for(pipeline), progress)
    assert not progress.said


# ---- memory ----------------------------------------------------------------------------------------


def test_out_of_memory_goes_layer_by_layer_and_then_to_the_cpu(acc, tiny_folder, reference, recorded, unplanned):
    pipeline = loaded_on(acc, "hunyuan_video", tiny_folder, dtype=torch.float32)
    latents = latents_for(pipeline, side=128, frames=1)
    settings = dict(vars(pipeline.parts["vae"]))
    for limit, told in ((60, "layer by layer"), (1, "on the CPU")):
        progress = recorded()
        with accelerator.limit(_peak(pipeline, latents) * limit // 100):
            frames = stages.decode(pipeline, latents, progress)
        assert "ran out of memory" in progress.said[0] and told in progress.said[-1], progress.said
        assert frames.shape == (1, 128, 128, 3)
        assert distance(frames, stages.decode(pipeline, latents, Silent())) < ROUNDING, "no seams"
    after = vars(pipeline.parts["vae"])
    assert {n: v for n, v in after.items() if "til" in n} == {n: v for n, v in settings.items() if "til" in n}
    assert accelerator.memory().allocated_bytes == 0


def test_on_the_cpu_a_causal_decoder_s_chunks_begin_again(acc, tiny_folder, reference, recorded, unplanned):
    """The frames before are remembered by layer, and the layers there are another copy's."""
    pipeline, calls, most = loaded_on(acc, "mochi", tiny_folder, dtype=torch.float32), [], [10**9]
    latents, form = latents_for(pipeline), DecodeRequest("chunked")

    def run_out(name, arguments):
        calls.append(name)
        if len(calls) > most[0]:
            raise torch.OutOfMemoryError("out of memory")

    with accelerator.hook("aten::convolution*", before=run_out):
        stages.decode(pipeline, latents, Silent(), form=form)
        most[0], calls[:] = len(calls) // 2, []
        frames = stages.decode(pipeline, latents, progress := recorded(), form=form)
    assert "on the CPU" in progress.said[-1]
    assert distance(frames, reference("mochi")) < ROUNDING


def test_out_of_memory_takes_the_other_parts_off_first(acc, tiny_folder, reference, recorded, unplanned):
    pipeline, progress = loaded_on(acc, "mochi", tiny_folder, "none", torch.float32), recorded()
    latents = latents_for(pipeline)
    needed = _peak(pipeline, latents)
    with pipeline.offloader.hold("transformer"):
        pass
    with accelerator.limit(needed + 1024):
        frames = stages.decode(pipeline, latents, progress)
    assert progress.said == ["decoding whole in fp32 ran out of memory: again without transformer on the device"]
    assert distance(frames, reference("mochi")) < ROUNDING


def test_a_vae_that_is_on_the_device_gives_no_room_where_others_would_leave_it(acc, tiny_folder):
    pipeline = loaded_on(acc, "mochi", tiny_folder, "none", torch.float32)
    pipeline.offloader.make_room = lambda needed, device: None
    plan = vae_plan.ladder_for(pipeline, (6, 16, 16), DecodeRequest())
    room = int(vae_plan.SPARE * plan.needed_bytes(plan.methods[0])) + 1  # for the activations without the weights
    facts = replace(pipeline.facts, total_bytes=room)
    pipeline = replace(pipeline, device=replace(pipeline.device, facts=facts))
    for _ in range(2):
        assert not vae_plan.ladder_for(pipeline, (6, 16, 16), DecodeRequest()).method.whole
        with pipeline.offloader.hold("vae"):
            pass


@pytest.mark.full
def test_fp32_asks_for_its_room_and_the_cpu_takes_a_causal_decoder_s_chunks(acc, tiny_folder, recorded):
    pipeline, progress, asked = loaded_on(acc, "mochi", tiny_folder), recorded(), []
    pipeline.offloader.make_room = lambda needed, device: asked.append(needed)

    def refuse(name, arguments):
        raise RuntimeError("no kernel image")

    with accelerator.hook("aten::convolution*", before=refuse):
        stages.decode(pipeline, latents_for(pipeline), progress)
    weights = pipeline.weights["vae"].total
    assert asked[1] - 2 * weights == pytest.approx(2 * (asked[0] - weights), abs=2)
    assert progress.said[-1] == "decoded in chunks of 1 latent frame in fp32 on the CPU (slow)"
    for frames in (0, 2):
        stages.decode(pipeline, latents_for(pipeline), progress, form=DecodeRequest("cpu", frames=frames))
        assert progress.said[-1].startswith(f"decoded in chunks of {frames or 1} latent frame")


def test_memory_that_never_suffices_stays_an_out_of_memory_error(acc, tiny_folder):
    pipeline = loaded_on(acc, "mochi", tiny_folder, dtype=torch.float32, why=CHOSEN)
    latents = latents_for(pipeline)
    told = r"expected more free memory\. The input is kept: choose offload"
    with accelerator.limit(1024), pytest.raises(torch.OutOfMemoryError, match=told):
        stages.decode(pipeline, latents, Silent(), "full")
    assert bool(stages.decode(pipeline, latents, Silent()).isfinite().all()), "the input is whole"


@pytest.mark.parametrize("name", ["ltx", "hunyuan_video_15", "framepack"])
def test_tiled_and_full_do_as_they_say(acc, tiny_folder, recorded, monkeypatch, name):
    monkeypatch.setattr(vae_plan, "TILES", (64,))
    pipeline = loaded_on(acc, name, tiny_folder, dtype=torch.float32, why=CHOSEN)
    latents, calls = latents_for(pipeline, side=128, frames=1), []
    frames = {}
    for method in ("full", "tiled"):
        handle = pipeline.parts.read("vae").decoder.register_forward_hook(lambda *_: calls.append(1))
        frames[method] = stages.decode(pipeline, latents, recorded(), method)
        handle.remove()
        assert (len(calls) > 1) == (method == "tiled"), (method, len(calls))
        calls.clear()
    assert frames["full"].shape == frames["tiled"].shape
    with pytest.raises(InputError, match="decode method 'fast'; expected one of auto, full, tiled"):
        stages.decode(pipeline, latents, Silent(), "fast")


# ---- machines --------------------------------------------------------------------------------------


def test_radeon_switches_are_set_for_the_vae_alone(tiny_folder, recorded):
    seen = []
    cudnn = torch.backends.cudnn
    before = cudnn.enabled, cudnn.benchmark
    with profiles.on("gfx1151") as machine:
        pipeline = loaded_on(machine.facts, "mochi", tiny_folder, dtype=torch.float32)
        handle = pipeline.parts.read("vae").decoder.register_forward_hook(
            lambda *_: seen.append((cudnn.enabled, cudnn.benchmark))
        )
        cudnn.benchmark = True
        try:
            stages.decode(pipeline, latents_for(pipeline), recorded())
            assert cudnn.benchmark, "the switch was not restored"
        finally:
            handle.remove()
            cudnn.enabled, cudnn.benchmark = before
    assert seen == [(False, False)]


def test_large_pictures_go_through_a_radeon_in_tiles(tiny_folder, recorded, monkeypatch):
    """A convolution of 512 x 512 pixels aborts the process there, so it is never tried, unless full is asked for."""
    monkeypatch.setattr(profiles, "ABORT_PIXELS", 100 * 100)
    capped = replace(vae_plan.policy_for(profiles.facts_of("gfx1151")), tile_pixels=64)
    monkeypatch.setattr(vae_plan, "policy_for", lambda facts: capped)
    with profiles.on("gfx1151") as machine:
        pipeline, progress = loaded_on(machine.facts, "hunyuan_video", tiny_folder, dtype=torch.float32), recorded()
        stages.decode(pipeline, latents_for(pipeline, side=128, frames=1), progress)
        assert "large conv3d" not in machine.hits and progress.said[0].startswith("decoded in tiles of 64 pixels")
        stages.decode(pipeline, latents_for(pipeline, side=128, frames=1), progress, "full")
        assert "may crash the process" in progress.said[1]


@pytest.mark.parametrize(
    ("name", "machine_name"),
    [
        ("ltx_condition", "mps-like"),
        ("hunyuan_video_15", "xpu-like"),
        ("mochi", "mps-like"),
        *(
            pytest.param(name, machine, marks=FULL)
            for name in ("hunyuan_video", "framepack")
            for machine in ("mps-like", "xpu-like")
        ),
    ],
)
def test_no_float64_reaches_the_device(tiny_folder, recorded, machine_name, name):
    with profiles.on(machine_name, without=("_contiguous_conv3d_wrong", "_time_pad_corrupts")) as machine:
        pipeline, progress = loaded_on(machine.facts, name, tiny_folder, dtype=torch.float32, why=CHOSEN), recorded()
        frames = stages.decode(pipeline, latents_for(pipeline), progress)
        if name in ("ltx_condition", "framepack"):
            vision = torch.zeros(1, 729, 32) if name == "framepack" else None
            stages.encode_image(pipeline, ImageRequest(PICTURE, 64, 64, vision=vision), "stretch", progress)
        assert "float64" not in machine.hits and not [text for text in progress.said if "again" in text]
    assert bool(frames.isfinite().all())


@pytest.mark.full
def test_one_buffer_stays_below_the_cap_of_an_intel_gpu(tiny_folder, recorded, monkeypatch):
    cap = 3 * 2**20
    capped = replace(vae_plan.policy_for(profiles.facts_of("xpu-like")), allocation_bytes=cap)
    with profiles.on("xpu-like", allocation_bytes=cap) as machine:
        pipeline = loaded_on(machine.facts, "hunyuan_video", tiny_folder, dtype=torch.float32, why=CHOSEN)
        latents = latents_for(pipeline, side=128)
        with pytest.raises(torch.OutOfMemoryError):
            stages.decode(pipeline, latents, Silent(), "full")
        assert machine.hits.pop("allocation")
        monkeypatch.setattr(vae_plan, "policy_for", lambda facts: capped)
        progress = recorded()
        frames = stages.decode(pipeline, latents, progress)
        assert not machine.hits and not any("again" in said for said in progress.said)
    assert bool(frames.isfinite().all())


@pytest.mark.parametrize(("limit_mib", "tile"), [(0, 0), (1000, 0), (100, 256), (40, 128), (10, 64), (1, 64)])
def test_the_first_tile_is_the_largest_that_fits_the_cap(tiny_folder, monkeypatch, limit_mib, tile):
    pipeline = loaded_on("cpu", "mochi", tiny_folder, "none", torch.float32)
    capped = replace(vae_plan.policy_for(pipeline.facts), allocation_bytes=limit_mib * 2**20)
    monkeypatch.setattr(vae_plan, "policy_for", lambda facts: capped)
    for form, expected in ((DecodeRequest(), tile), (DecodeRequest("full"), 0)):
        assert vae_plan.Ladder(pipeline, "decoder", (3, 512, 512), form, 0).method.tile == expected


@pytest.mark.parametrize(
    ("name", "frames", "most", "expected"),
    [
        ("hunyuan_video", 129, (65, 256), (256, 0)),  # its decoder never gets more than a window
        ("mochi", 37, (12, 512), (0, 2)),  # chunks are exact and no larger
        ("mochi", 37, (12, 256), (256, 2)),
    ],
)
def test_the_cap_is_for_what_the_decoder_gets_at_once(tiny_folder, monkeypatch, name, frames, most, expected):
    pipeline = loaded_on("cpu", name, tiny_folder, "none", torch.float32)
    cap = vae_plan.largest_buffer_bytes(pipeline.configs["vae"], *most, most[1], 4)
    capped = replace(vae_plan.policy_for(pipeline.facts), allocation_bytes=cap)
    monkeypatch.setattr(vae_plan, "policy_for", lambda facts: capped)
    method = vae_plan.Ladder(pipeline, "decoder", (frames, 512, 512), DecodeRequest(), 0, 2**50).method
    assert (method.tile, method.frames) == expected


def test_planes_of_a_chunk_need_its_frames_alone(acc, tiny_folder, monkeypatch):
    pipeline, cells = loaded_on(acc, "mochi", tiny_folder, "none", torch.float32), (28, 60, 106)
    plan = vae_plan.ladder_for(pipeline, cells, DecodeRequest())
    monkeypatch.setattr(vae_plan, "host_free_bytes", lambda: vae_plan.plane_bytes(pipeline, plan.area) // 20)
    streamed = next(each for each in plan.methods if each.stream)
    assert plan.fitting(int(vae_plan.SPARE * plan.needed_bytes(streamed)) + 1) == streamed


def test_parts_on_a_mac_are_found_by_the_name_that_tensors_have(tiny_folder, monkeypatch):
    pipeline = loaded_on("cpu", "mochi", tiny_folder, "none", torch.float32)
    monkeypatch.setattr(pipeline.offloader, "device_of", lambda part: torch.device("mps"))
    plan = vae_plan.Ladder(pipeline, "decoder", (3, 64, 64), DecodeRequest(), 0, room=2**40)
    part = SimpleNamespace(parameters=lambda: [SimpleNamespace(device=torch.device("mps:0"))])
    plan.pipeline = SimpleNamespace(parts={"transformer": part})
    assert plan.others() == ["transformer"]


# ---- what goes in ----------------------------------------------------------------------------------


def test_latents_are_checked_before_anything_runs(tiny_folder, recorded):
    pipeline, progress = loaded_on("cpu", "mochi", tiny_folder, "none", torch.float32), recorded()
    latents = latents_for(pipeline)
    spoiled = latents.samples.clone()
    spoiled[0, 0, 0, 0, 0] = float("nan")
    with pytest.raises(InputError, match=r"1 of .* values of the latents are NaN"):
        stages.decode(pipeline, replace(latents, samples=spoiled), progress)
    assert not progress.steps
    empty = stages.decode(pipeline, replace(latents, samples=torch.zeros_like(latents.samples)), progress)
    assert bool(empty.isfinite().all()), "an empty latent is one's own choice"


def _peak(pipeline: Pipeline, latents: Latents) -> int:
    """Bytes that a whole decode needs at most."""
    accelerator.reset_peak()
    stages.decode(pipeline, latents, Silent(), "full")
    return accelerator.memory().peak_bytes


def _stock_convolutions(pipeline: Pipeline) -> None:
    """The VAE without the rewrites that would spare it the fault."""
    pipeline.parts.read("vae")
    pipeline.parts.undo.pop("vae")()
