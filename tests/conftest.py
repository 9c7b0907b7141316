"""What every test shares: one thread, tiny checkpoints built once, and a progress that remembers."""

import errno
import gc
import hashlib
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from functools import wraps
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# The root's own kernels/ and nodes/ would hide the PyPI package `kernels` and ComfyUI's `nodes`.
sys.path[:] = [entry for entry in sys.path if Path(entry or Path.cwd()).resolve() != ROOT]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Simulated devices compute with oneDNN, whose bf16 convolutions for AMX are wrong at some strides (pytorch#169688).
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")


def pytest_addoption(parser: pytest.Parser) -> None:
    """How long the full run looks for files that break a reader, and Windows' rules for files."""
    parser.addoption("--fuzz-seconds", type=float, default=600.0, help="of each fuzzer in tests/fuzz")
    parser.addoption("--windows-rules", action="store_true", help="files obey Windows' rules (tests/windows.py)")


def pytest_configure(config: pytest.Config) -> None:
    """Look for garbage seldom, which is a twentieth of a run. End a worker's forks with it: they hold its pipes, and
    after a crash a run would wait for the last of them."""
    gc.set_threshold(30_000, 20, 50)
    if not hasattr(config, "workerinput") or sys.platform != "linux":
        return
    import ctypes

    library, parents = ctypes.CDLL(None), [os.getpid()]

    def end_with_parent() -> None:
        library.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG of linux/prctl.h
        if os.getppid() != parents[0]:  # it has died already
            os._exit(1)

    os.register_at_fork(before=lambda: parents.__setitem__(0, os.getpid()), after_in_child=end_with_parent)


@pytest.fixture(scope="session", autouse=True)
def no_values_without_memory() -> Iterator[None]:
    """Draw no first values of weights on ``meta``, which keeps none: torch does so in Python, one by one."""
    init = getattr(sys.modules.get("torch.nn"), "init", None)  # which the tests have imported, where they need it
    with pytest.MonkeyPatch.context() as patch:
        for name in ("kaiming_uniform_", "uniform_", "normal_") if init else ():
            draw = getattr(init, name)
            patch.setattr(init, name, lambda *a, _draw=draw, **k: a[0] if a and a[0].is_meta else _draw(*a, **k))
        yield


@pytest.fixture(autouse=True)
def windows_rules(request: pytest.FixtureRequest) -> Iterator[None]:
    """Windows' rules for files, where they are asked for."""
    if not request.config.getoption("--windows-rules"):
        yield
        return
    import windows

    with pytest.MonkeyPatch.context() as patch:
        windows.apply(patch)
        yield


@pytest.fixture
def quota(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Once called, no file reaches the disk: a quota is exceeded, which nobody who asks for the free space is told."""

    def full(_: int) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    return lambda: monkeypatch.setattr(os, "fsync", full)


@pytest.fixture(autouse=True)
def failed_forecasts() -> Iterator[list[str]]:
    """What a forecast stumbled over, which a page turns into a line: a test fails that leaves something here."""
    failed: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger("anygpu.pipelines.forecast.times")
    handler.emit = lambda record: failed.append(f"{record.getMessage()}: {record.exc_info}")  # type: ignore[method-assign]
    logger.addHandler(handler)
    yield failed
    logger.removeHandler(handler)
    assert not failed


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Small tensors run slower on many threads, and two workers share two cores."""
    import torch
    from anygpu.compat.device import probes, work

    torch.set_num_threads(1)
    measured, usual = work.measured_pace, work.Pace(2e10, 1e10, 1e10, 1e10, 1e-6)  # a second for each dtype and width

    @wraps(measured)
    def paced(device: torch.device, *how: object, **more: object) -> work.Pace:
        return usual if device.type == "cpu" else measured(device, *how, **more)

    work.measured_pace = paced
    probes.PRODUCTS = (probes.PRODUCTS[0], (70, 256, 256))  # devices are simulated here, by one core


@pytest.fixture(scope="session")
def tiny_folder() -> Path:
    """Where tiny checkpoints are built once: ``tiny.build(name, tiny_folder)`` returns at once the second time."""
    digest = hashlib.sha256()
    for source in sorted((ROOT / "tests" / "tiny").glob("*.py")):
        digest.update(source.read_bytes())
    for package in ("diffusers", "transformers", "torch"):  # each version may save in a layout of its own
        digest.update(version(package).encode())
    folder = ROOT / ".build" / f"tiny-{digest.hexdigest()[:12]}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


WALKED = 100_000  # objects that make a collection slow: half a second for each million


def freeze() -> None:
    """Keep what was imported and cached out of later garbage collections, of which tests ask for hundreds."""
    if len(gc.get_objects()) >= WALKED:
        gc.collect()
        gc.freeze()


def pytest_collection_finish() -> None:
    freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Freeze between files alone: what a fixture of a file holds then would never be freed."""
    done = yield
    if nextitem is None or nextitem.path != item.path:
        freeze()
    return done


LISTED_SKIPS = (  # what a machine may lack; anything else that is skipped fails the run
    "this ComfyUI has no such class",  # an older release
    "no ComfyUI in",
    "no ComfyUI-GGUF in",
    "no ComfyUI-KJNodes in",
    "no interpreter for",
    "lacks what this pack requires",
    "no tinygrad in",
    "no clang",
    "needs a C++ compiler",
    "is built on Linux and macOS only",
    "no build on this system",
    "without its C++ headers",
    "needs torch 2.9 or newer",
    "the fuzzer atheris is not installed",
    "needs symbolic links",  # with --windows-rules
    "needs named pipes",
    "needs POSIX limits",
)
_unlisted: list[str] = []
_left_out: set[str] = set()  # tests of files that are not imported


# Tables of which `make test` and `make test-host` run these cells, and `make test-full` and `make test-full-host` all;
# a table that is not here runs whole.
SAMPLES: dict[str, tuple[str, ...]] = {
    "test_core_fit.py::test_bytes_of_scores_stay_within_the_budget": ("LTX-2", "Wan 2.1", "MiniMax H3", "SDXL"),
    "test_core_fit.py::test_every_simulated_machine_gives_what_fp32_gives": (
        "Wan 2.1-no-conv3d",
        "Wan 2.1-mps-like",
        "Wan 2.1-gtx16xx",
    ),
    "test_core_fit.py::test_safe_fp16_on_simulated_machines": ("gfx1151",),
    "test_core_fit.py::test_a_machine_that_needs_nothing_gives_the_very_object_back": ("xpu-like",),
    "test_core_fit.py::test_a_vae_decodes_and_encodes_where_there_is_no_conv3d": ("Wan 2.1", "LTX", "Mochi"),
    "test_core_fit.py::test_a_wrong_decode_is_done_again_in_fp32_and_said": ("SD-values",),
    "test_core_fit.py::test_every_sampling_is_kept_and_comes_back": ("LTX-2",),
    "test_core_fit.py::test_what_lies_on_top_or_below_works_as_before": (
        "lora", "lowvram", "attention above", "context windows", "cfg nodes", "compile above",
    ),
    "test_families.py::test_equals_the_cpu": ("mochi-group", "ltx image-model"),
    "test_families.py::test_a_cancel_while_moving_or_sampling_leaves_nothing_half_moved": ("group",),
    "test_families.py::test_modes_need_less_memory_in_their_order": (),
    "test_fp16.py::test_a_family_is_near_fp32_in_every_offload_mode_twice_in_a_row": ("mochi-sequential",),
    "test_fp16.py::test_auto_falls_back_to_fp32_after_one_step_and_says_so": ("none",),
    "test_tiny.py::test_the_video_depends_on_every_input": ("ltx",),
    "test_tiny.py::test_layout_is_the_published_one_and_files_are_always_the_same": ("ltx", "framepack"),
    "test_attention.py::test_math_in_chunks_gives_the_same_video": ("ltx",),
    "test_attention.py::test_mochi_obeys_in_every_offload_mode_each_pipeline_its_own": ("group",),
    "test_attention_processors.py::test_blocks_compile_into_one_graph_with_the_fused_kernel": ("ltx",),
    "test_attention_processors.py::test_vae_equals_upstream_without_a_mask": (
        "hunyuan_video decode",
        "hunyuan_video_15 decode",
    ),
    "test_vae_policy.py::test_a_decode_of_zeros_is_done_again_in_fp32": ("framepack-sequential",),
    "test_vae_policy.py::test_a_black_picture_is_found_where_casts_are_sound": ("hunyuan_video",),
    "test_vae_policy.py::test_an_encode_of_zeros_is_done_again_in_fp32": ("ltx",),
    "test_vae_policy.py::test_latents_of_zeros_are_found_before_sampling": ("ltx",),
    "test_vae_policy.py::test_a_missing_kernel_is_left_for_fp32_and_then_for_the_cpu": (),
    "test_vae_policy.py::test_nan_in_one_part_is_found_before_the_next_is_computed": (),
    "test_vae_policy.py::test_out_of_memory_goes_layer_by_layer_and_then_to_the_cpu": (),
    "test_report.py::test_the_check_passes_on_every_machine_since_auto_avoids_what_fails": ("turing", "mps-like"),
    "test_profiles.py::test_gfx1151_gives_zeros_on_the_device_only": ("float",),
    "test_device.py::test_flags_survive_the_new_switches_of_torch": ("cuda.matmul.fp32_precision",),
    "test_conv3d.py::test_vae_without_conv3d": ("hunyuan_vae", "mochi_vae"),
    "test_conv3d.py::test_no_conv3d_compiled": ("layer",),
    "test_conv3d.py::test_no_conv3d_for_decoders": ("group-mochi_vae", "none-hunyuan_vae", "sequential-ltx_vae"),
    "test_conv3d.py::test_probes_lead_to_a_form_that_works": (
        "turing-dtype0-Conv3dMethod.FP32",
        "mps-like-dtype4-Conv3dMethod.FRAMES",
    ),
    "test_two_cards.py::test_parts_on_different_devices_give_the_same_video": (
        "ltx-acc:1-acc:0-acc:0", "hunyuan_video-acc:1-cpu-cpu",
    ),
    "test_overlap.py::test_streaming_takes_what_the_slower_of_link_and_device_must_take": (
        "locked-0-group", "staged-1-sequential",
    ),
    "test_prove.py::test_the_whole_command_on_the_simulated_device": (),
    "test_prove.py::test_a_card_of_4_gb_stands_for_no_larger_one": (),
    "test_savings.py::test_a_shorter_video_saves_what_the_clock_sees_and_comes_where_nothing_else_is_left": (),
    "test_lossy_times.py::test_a_step_cache_saves_what_the_clock_sees": ("first_block",),
    "test_lora.py::test_beside_the_rewrites_of_a_machine": ("gfx1151-merged-none",),
    "test_guard.py::test_a_run_is_guarded_and_a_wrong_product_does_not_reach_the_video": ("ltx",),
    "test_copies.py::test_a_family_gives_the_same_bits_and_copies_no_float_of_16_bits": ("ltx-auto-dtype0-none",),
    "test_draft.py::test_a_draft_is_the_cpus": ("group",),
    "test_shortages.py::test_a_shortage_while_a_part_steps_down_leaves_it_whole": ("group-True",),
    "test_strict.py::test_weights_have_no_second_copy_where_memory_is_shared": ("model",),
    "test_vae_policy.py::test_tiled_and_full_do_as_they_say": ("ltx",),
    "test_vae_policy.py::test_no_float64_reaches_the_device": ("ltx_condition-mps-like",),
    "test_strict.py::test_weights_reach_a_device_that_refuses_set_data": ("mochi-group", "ltx image-none"),
    "test_strict.py::test_shared_memory_gives_the_same_video": ("mochi-model",),
    "test_baking_device.py::test_a_device_gives_what_the_cpu_gives": (),
    "test_bake.py::test_pictures_may_have_another_size_than_the_maps": (),
    "test_counts.py::test_a_clip_and_prompts_by_time_are_counted_within_two_percent": (),
    "test_each_family.py::test_every_input_changes_the_latents": (
        "ltx image", "mochi", "hunyuan_video image", "hunyuan_video_15 image",
    ),
    "test_savings.py::test_a_step_cache_saves_the_share_that_a_run_skips": (),
    "test_resident.py::test_a_family_keeps_what_fits_as_its_forecast_says": (),
    "test_paint_receipts.py::test_several_pictures_enlarged_views_and_detail_are_repeated": (),
    "test_paint_receipts.py::test_what_separate_nodes_make_is_painted_again_bit_for_bit": ("True",),
    "test_sparse_attention.py::test_it_equals_its_publishers": ("grid0-65536",),
    "test_baking_device.py::test_a_picture_is_projected_where_the_mesh_is": (),
    "test_hunyuan_video_15_super.py::test_it_has_its_publishers_recipe_and_size": ("720p",),
    "test_fit.py::test_auto_finishes_within_a_share_of_the_full_offloader": (),
    "test_adapter_painting.py::test_from_a_mesh_to_its_texture": ("ig2mv-sdxl", "tg2mv-sd21"),
    "test_tiny.py::test_glyphs_reach_the_video": (),
    "test_offloader.py::test_paint_twice_in_a_row": (),
    "test_painting.py::test_another_scheduler": ("unipc",),
    "test_painting.py::test_a_second_larger_pass_starts_from_the_first": (),
    "test_lora.py::test_every_offloader": ("separate-group",),
    "test_lora.py::test_the_sums_are_right_and_leave_no_trace": ("separate",),
    "test_compile.py::test_what_is_no_fault_of_the_compiler_is_raised": ("error0",),
    "test_compile.py::test_other_strengths_of_a_lora_are_the_same_graph": (),
    "test_speed.py::test_kernels_compile_and_offload_twice_in_a_row": ("ltx-group-True",),
    "test_speed.py::test_first_block_works_with_compiled_blocks": (),
    "test_fused.py::test_a_block_on_a_gpu_is_one_graph_with_an_operation_per_site": ("ltx",),
    "test_formats.py::test_a_composed_pipeline_has_the_weights_of_its_folder": ("mochi", "hunyuan_video_15_i2v"),
    "test_hunyuan_video_15.py::test_stages_give_the_one_shot_video": ("hunyuan_video_15_i2v",),
    "test_hunyuan_video_15.py::test_latents_are_identical_from_the_same_tokens": (),
    "test_hunyuan_video.py::test_stages_give_the_one_shot_video": ("hunyuan_video_i2v_33ch",),
    "test_hunyuan_video.py::test_latents_are_identical_from_the_same_embeddings": ("hunyuan_video",),
    "test_framepack.py::test_stages_give_the_one_shot_video": ("framepack-True-3.0",),
    "test_adapter_painting.py::test_each_offload_mode_gives_what_the_cpu_gives": ("('tg2mv', 'sd21')-group",),
    "test_adapter_painting.py::test_half_precision_is_near": (),
    "test_adapter_painting.py::test_words_seed_guidance_scales_and_a_second_pass_are_seen": (),
    "test_adapter_painting.py::test_work_is_counted_once_for_every_stage": (),
    "test_adapter_painting.py::test_what_was_not_taught_is_said": (),
    "test_adapter_loading.py::test_a_single_file_and_a_folder_are_one_checkpoint": ("sdxl",),
    "test_adapter_loading.py::test_a_lora_of_the_base_is_merged": ("True",),
    "test_mv_adapter.py::test_six_views_equal_the_published_processors": (
        "sdxl-ig2mv-True-scales0",
    ),
    "test_projection.py::test_several_pictures_have_their_places_and_a_plain_background_is_enough": (),
    "test_savings.py::test_what_a_change_saves_is_what_the_clock_sees": (),
    "test_resident.py::test_what_fits_stays_and_the_rest_is_copied_in_each_forward": (
        "2-unpinned", "12-pinned", "22-unpinned", "32-pinned",
    ),
    "test_outside.py::test_a_machine_whose_driver_misbehaves_is_described": (
        "torch.cuda.get_device_properties-cuda", "torch.version.hip-rocm", "torch.xpu.get_arch_list-xpu",
        "torch_xla.runtime.device_type-xla", "platform.mac_ver-mps", "ctypes.CDLL-cuda",
    ),
    "test_quirks.py::test_auto_runs_nothing_that_the_rows_of_a_machine_name": (
        "gtx16_fp16_nan", "conv3d_without_cudnn", "gfx115x_bf16_partial", "mps_time_pad", "cpu_fp16_conv3d",
    ),
    "test_guard.py::test_a_wrong_result_is_named_replaced_and_kept": (
        "addmm", "bmm", "convolution", "attention, masked", "native_group_norm", "_to_copy", "cat",
    ),
    "test_others.py::test_a_few_tensors_beside_a_models_name_another_task": (
        "hunyuan_video-HunyuanCustom with audio-Wan2GP-more2",
        "hunyuan_video_15 meanflow-OmniWeaving-Tencent's own-mm_in.linear_1.weight mm_in.linear_2.weight",
        "ltx 2B-VACE for LTX-Video-its own code-more9",
    ),
    "test_fp16.py::test_finite_at_4e6_and_a_tenth_of_the_error_of_bf16": (
        "scaled-ltx-", "scaled-ltx-sinks", "fp32 output-ltx-branches", "scaled-hunyuan_video-branches",
        "scaled-framepack-branches", "fp32 output-hunyuan_video, image-branches",
        "scaled-hunyuan_video, image, single-branches", "fp32 output-hunyuan_video_15-branches",
        "fp32 output-mochi-", "scaled-mochi-branches", "scaled-mochi, last-branches", "fp32 output-mochi, last-sinks",
    ),
    "test_fp16.py::test_packed_layers_give_the_bits_of_their_values_and_stay_packed": (
        "scaled-ltx-int8", "fp32 output-hunyuan_video-fp8", "scaled-framepack-fp8",
        "fp32 output-hunyuan_video, image-int8", "scaled-hunyuan_video, image, single-fp8",
        "scaled-hunyuan_video_15-int8", "fp32 output-mochi-fp8", "scaled-mochi, last-int8",
    ),
    "test_fp16.py::test_stored_products_around_an_fp32_residual_are_finite_and_near": (
        "scaled-ltx-", "scaled-ltx-sinks", "fp32 output-hunyuan_video-sinks", "scaled-framepack-sinks",
        "fp32 output-hunyuan_video, image-sinks", "scaled-hunyuan_video, image, single-sinks",
        "scaled-hunyuan_video_15-sinks", "fp32 output-mochi-sinks", "scaled-mochi, last-sinks",
    ),
    "test_attention.py::test_chunks_equal_torchs_math": (
        "self-none-torch.bfloat16", "self-floating-torch.bfloat16", "odd-causal-torch.bfloat16",
        "wide head-padding-torch.float16", "odd-rows-torch.float16", "self-hidden row-torch.float16",
        *(f"{shape}-{mask}-torch.float32" for shape in ("self", "odd", "one query", "one key", "wide head")
          for mask in ("none", "causal", "padding", "rows", "hidden row", "floating")),
    ),
    "test_report.py::test_the_report_has_a_reason_for_every_family_and_a_line_for_every_probe": (
        "turing", "gfx1151", "xpu-like",
    ),
    "test_fp16.py::test_packed_weights_stay_packed_and_compute_to_the_bits_of_their_values": ("ltx-fp8-model",),
    "test_conv3d.py::test_equals_conv3d_bit_for_bit": (
        "Conv3dMethod.NATIVE", "Conv3dMethod.PATCHES", "Conv3dMethod.POINTWISE", "Conv3dMethod.FRAMES",
    ),
    "test_counts.py::test_a_node_counts_what_the_tab_counts": ("ltx",),
    "test_placement.py::test_each_part_computes_where_a_run_is_quickest": (
        "names1-rooms1-101-saves 17 min of 62 min", "names2-rooms2-000-would not be quicker with acc:1 (Slow card)",
        "names5-rooms5-000-no part of it fits on acc:1", "names7-rooms7-000-fits neither on acc:0 nor on acc:1",
    ),
    "test_planned.py::test_planned_and_sampled_sizes_are_equal": ("demo ltx", "demo hunyuan_video", "demo mochi"),
    "test_draft.py::test_a_draft_is_at_most_a_tenth_of_the_work": ("hunyuan_video",),
    "test_draft.py::test_a_latent_frame_at_a_time_is_all_of_them_at_once": ("hunyuan_video", "mochi"),
    "test_each_family.py::test_other_solvers_and_noise_levels_run": ("ltx image", "hunyuan_video image", "mochi"),
    "test_each_family.py::test_bf16_is_near_fp32": (),
    "test_each_family.py::test_a_cancel_leaves_the_next_run_as_a_fresh_one": ("ltx image", "mochi"),
    "test_each_family.py::test_a_video_is_started_from_and_a_mask_keeps_its_part": ("hunyuan_video image",),
    "test_resume.py::test_a_sampling_goes_on_after_its_last_step": ("ltx-3",),
    "test_prove.py::test_it_runs_on_a_cpu": (),
    "test_counted_bytes.py::test_planes_of_a_decode": (),
    "test_times.py::test_painting_is_counted_within_two_percent": (),
    "test_times.py::test_delighting_is_counted_within_two_percent": (),
    "test_needs.py::test_turbo_at_full_size_is_forecast": (),
    "test_mv_adapter.py::test_fp16_operands_around_an_fp32_stream": (),
    "test_adapter_painting.py::test_a_checkpoint_of_velocities_is_converted": (),
    "test_projection.py::test_a_picture_of_another_shape_changes_nothing_and_says_so": (),
    "test_projection.py::test_a_given_direction_is_kept": (),
    "test_projection.py::test_a_picture_that_cuts_the_object_is_held_against_more_of_the_outline": (),
    "test_projection.py::test_a_brighter_picture_leaves_no_seam_above_that_of_the_painted_views": (),
    "test_projection.py::test_texels_that_the_picture_does_not_show_squarely_stay_bit_for_bit": ("pear",),
}  # fmt: skip


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no file whose every test has a mark that is left out: a fifth of all tests and of their start."""
    if collection_path.suffix != ".py":
        return None
    text = collection_path.read_text(encoding="utf-8")
    line = re.search(r"^pytestmark = .*", text, re.MULTILINE)
    marks = re.findall(r"pytest\.mark\.(\w+)", line[0]) if line else []
    if not {f"not {mark}" for mark in marks} & set(config.option.markexpr.split(" and ")):
        return None
    _left_out.update(f"{collection_path.name}::{name}" for name in re.findall(r"^def (test_\w+)", text, re.MULTILINE))
    return True


LONG = ("test_wheel.py", "test_archive.py", "test_render.py")  # files that would keep one worker when the other is done


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the cells beyond a sample to `make test-full`; a sample of tests or cells that are gone is an error. Long
    files come first."""
    collected: set[str] = set()
    for item in items:
        table, _, cell = f"{item.path.name}::{item.name}".partition("[")
        collected |= {table, f"{table}[{cell}"}
        if table in SAMPLES and cell.removesuffix("]") not in SAMPLES[table]:
            item.add_marker(pytest.mark.full)
    wanted = [f"{table}[{cell}]" for table, cells in SAMPLES.items() for cell in cells] + list(SAMPLES)
    items.sort(key=lambda item: item.path.name not in LONG)
    gone = sorted(name for name in set(wanted) - collected if name.partition("[")[0] not in _left_out)
    if gone and not config.option.file_or_dir:  # the whole suite
        raise pytest.UsageError(f"SAMPLES in tests/conftest.py names what no test is called: {', '.join(gone)}")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Remember each skip whose reason is not listed."""
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if not any(listed in reason for listed in LISTED_SKIPS):
            _unlisted.append(f"{report.nodeid}: {reason}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A run in which something unlisted was skipped has failed."""
    if _unlisted and session.exitstatus == 0:
        session.exitstatus = 1


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what was skipped without being listed."""
    for line in _unlisted:
        terminalreporter.write_line(f"skipped without being listed in tests/conftest.py: {line}", red=True)


@pytest.fixture
def acc() -> Iterator[object]:
    """The first simulated device, with counters at zero."""
    from simulated import accelerator

    if reason := accelerator.reason():
        pytest.skip(reason)
    with accelerator.fresh() as device:
        yield device


class Recorded:
    """A progress that keeps what it was told, and cancels when ``cancel_at`` says so.

    Args:
        cancel_at: from (done, stage) to whether the user cancels at that moment.
    """

    class Cancelled(BaseException):
        """What a cancel raises here; ComfyUI's is a BaseException too."""

    def __init__(self, cancel_at: Callable[[int, str], bool] | None = None) -> None:
        self.steps: list[tuple[int, int, str]] = []
        self.said: list[str] = []
        self.previews: list[object] = []
        self.checks = 0
        self.cancel_at = cancel_at

    def step(self, done: int, total: int, stage: object, preview: Callable[[], object] | None = None) -> None:
        self.steps.append((done, total, str(stage)))
        if preview is not None:
            self.previews.append(preview())
        if self.cancel_at is not None and self.cancel_at(done, str(stage)):
            raise self.Cancelled

    def check(self) -> None:
        self.checks += 1

    def notify(self, text: str) -> None:
        self.said.append(text)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> type[Recorded]:
    """The class :class:`Recorded`, to make one with or without a cancel. Nothing was told once before."""
    monkeypatch.setattr("anygpu.compat.memory.parts._told", set())
    return Recorded
