"""Our pipelines under ComfyUI's memory manager, in its own process, on a device whose memory is counted and limited."""

from pathlib import Path

import pytest

from host.inside.asking import Inside

pytestmark = pytest.mark.host

CASES = (
    "ltx", "hunyuan_video", "hunyuan_video image", "hunyuan_video_15", "hunyuan_video_15 image", "framepack", "mochi",
)  # fmt: skip
FAMILIES = ("ltx", "hunyuan_video", "hunyuan_video_15", "framepack", "mochi")
SAMPLED = ("ltx", "mochi")  # the other families' shares run in make test-full's share of the host tests
ACCOUNT_ROWS = 24  # the last stages of a pipeline, which its account keeps
full = pytest.mark.full


@pytest.mark.parametrize("name", CASES)
def test_equals_the_cpu_with_room_for_all_and_for_nothing(inside: Inside, name: str) -> None:
    found = inside.play("memory", "full_and_none", name=name)
    assert found["offload"] == "offload comfyui on acc:0"
    assert (found["full"], found["none"]) == (0.0, 0.0), "the same kernels on the same bits"
    assert found["none_peak"] < found["full_peak"]
    assert (found["left"], found["classes"]) == (0, 0), "something stayed after Unload Models"


@pytest.mark.parametrize("name", ["ltx", *(pytest.param(name, marks=full) for name in CASES[1:])])
def test_a_device_that_zeroes_bf16_on_its_way_to_the_host_gives_the_same_bits(inside: Inside, name: str) -> None:
    assert inside.play("memory", "zeroed", name=name) == {"equal": [True, True], "zeroed": 0, "offload": "comfyui"}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in SAMPLED else [full]) for name in FAMILIES])
def test_any_share_of_the_weights_gives_the_same_latents(inside: Inside, name: str) -> None:
    shares = [1.0, 0.6, 0.4, 0.25, 0.15] if name not in SAMPLED else [0.4, 0.15]
    found = inside.play("memory", "shares", name=name, shares=shares)
    assert found["weights"] >= 0.8, "the activations would hide what the weights do"
    beside = (
        1.0 / found["weights"] - 1.0 + found["largest"]
    )  # room for activations, which are not there yet when the weights come
    for run in found["runs"]:
        assert run["equal"] and run["refusals"] == 0, run
        assert run["resident"] <= run["share"] + beside + 1e-9
        assert run["to_host"] < 0.02, "weights were copied back"
    assert [run["resident"] for run in found["runs"]] == sorted(
        (run["resident"] for run in found["runs"]), reverse=True
    )


@pytest.mark.parametrize("count", [2, pytest.param(1, marks=full)])
def test_the_hosts_own_streams_copy_our_weights(inside: Inside, count: int) -> None:
    """In an order that the clock accepts: a layer computes after its copy, a buffer is filled after its layer.

    This transformer's fused attention reads four norms at once, and each stream has one buffer.
    """
    found = inside.play("memory", "async_offload", name="hunyuan_video", count=count)
    assert found["equal"] and found["beside"] > 1.5, "two steps bring all layers twice"
    assert found["waited"] < 0.1, found


@pytest.mark.parametrize("names", [FAMILIES[:2] + FAMILIES[4:], pytest.param(FAMILIES, marks=full)])
def test_pipelines_in_turn_evict_each_other_and_leave_nothing(inside: Inside, names: tuple[str, ...]) -> None:
    found = inside.play("memory", "evictions", names=list(names))
    assert all(found["equal"])
    assert 0 < found["together"] <= found["limit"] and found["on_device"] > 0
    assert found["freed"] == 0, "device memory waited for the garbage collector"
    assert (found["alive"], found["listed"]) == (0, 0), "something outlived the graph"


def test_a_cancel_is_obeyed_inside_a_step_and_while_weights_move(inside: Inside) -> None:
    found = inside.play("memory", "cancelled")
    assert found["inside a step"] <= 1, "operators ran on after the cancel"
    assert found["moving"] != "not obeyed" and found["moving, left"] in (0.0, 1.0), "the part is half moved"
    assert found["inside a step, next"] and found["moving, next"]


def test_unloading_everything_leaves_the_part_as_it_was_read(inside: Inside) -> None:
    found = inside.play("memory", "out_of_memory")
    assert found["resident"] > 0
    assert (found["left"], found["classes"]) == (0, 0)
    # What is copied are the tables of core's noise schedule, which are not weights.
    assert found["copied"] < found["resident"] / 20, "weights that are at home already were copied back"
    assert found["equal"] and (found["on"], found["released"]) == ("acc", "cpu")


def test_a_core_model_and_ours_make_each_other_leave(inside: Inside) -> None:
    found = inside.play("memory", "beside_core", name="ltx")
    (theirs, _), (left, ours), (back, partly), _ = found["seen"]
    assert theirs == 1.0 and left < 1.0 and ours == 1.0, "ours did not make core's leave"
    assert back == 1.0 and partly < 1.0, "core's did not make ours leave"
    assert all(found["equal"])


@pytest.mark.parametrize("weights", ["auto", "fp8"])
def test_core_lora_patches_act_at_any_offloader_and_are_undone(inside: Inside, weights: str) -> None:
    found = inside.play("memory", "lora", name="hunyuan_video", weights=weights)
    assert found["added"] == found["keys"] > 0
    assert found["first"].startswith("diffusion_model.") and "network" not in found["first"]
    assert found["changes"] > 0.01 and found["streamed"] == 0.0 and found["undone"]


PACKED = {("ltx", "fp8"), ("hunyuan_video", "Q8_0")}  # the other pairs run in make test-full's share


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        pytest.param(name, weights, marks=[] if (name, weights) in PACKED else [full])
        for name in FAMILIES
        for weights in ("fp8", "int8", "bf16", "Q8_0", "w4a8")
    ],
)
def test_packed_weights_stream_with_a_lora_beside_them(inside: Inside, tmp_path: Path, name: str, weights: str) -> None:
    found = inside.play("memory", "packed", name=name, weights=weights, folder=str(tmp_path))
    assert found["layers"] > 8 and found["away"], "packed weights stayed on the device"
    assert found["lora"] > 0.01, "the LoRA does too little to be seen"
    assert found["full"] == found["none"] == [0.0, 0.0, 0.0], "without, with and again without the LoRA"
    assert found["classes"] == 0


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == "ltx" else [full]) for n in FAMILIES])
def test_packed_weights_stream_under_fp16_safe(inside: Inside, tmp_path: Path, name: str) -> None:
    asked = {"name": name, "weights": "int8", "folder": str(tmp_path), "precision": "fp16-safe"}
    found = inside.play("memory", "packed", **asked)
    assert found["layers"] > 8 and found["away"] and found["lora"] > 0.01
    assert found["full"] == found["none"] == [0.0, 0.0, 0.0], "our own offloader, bit for bit"


@pytest.mark.parametrize("name", ["mochi", *(pytest.param(n, marks=full) for n in ("ltx", "hunyuan_video_15"))])
def test_sixteen_bits_of_a_file_stream_and_are_widened_for_fp32(inside: Inside, tmp_path: Path, name: str) -> None:
    found = inside.play("memory", "narrow", name=name, folder=str(tmp_path))
    assert found["dtypes"] == ["torch.bfloat16"] and found["packed"] == 0
    assert found["full"] == found["none"] == 0.0, "the CPU's fp32, bit for bit"


@pytest.mark.parametrize("weights", ["fp8", pytest.param("int8", marks=full)])
def test_any_share_of_packed_weights_gives_the_same_latents(inside: Inside, weights: str) -> None:
    found = inside.play("memory", "shares", name="ltx", shares=[0.5, 0.15], weights=weights)
    beside = 1.0 / found["weights"] - 1.0 + found["largest"]
    for run in found["runs"]:
        assert run["equal"] and run["refusals"] == 0, run
        assert run["resident"] <= run["share"] + beside + 1e-9, "packed weights count as fixed"
        assert run["to_host"] < 0.02, "weights were copied back"


@pytest.mark.parametrize(("name", "runs"), [("ltx", 3), pytest.param("mochi", 50, marks=full)])
def test_run_after_run_memory_is_where_it_began(inside: Inside, name: str, runs: int) -> None:
    found = inside.play("memory", "many", name=name, runs=runs)
    assert found["first"] == found["last"] > 0
    assert found["grown"] * runs <= ACCOUNT_ROWS and found["listed"] == 0


def test_running_out_of_memory_inside_a_step_streams_more_and_goes_on(inside: Inside) -> None:
    found = inside.play("memory", "shortage")
    assert found["equal"] and found["calls"] == found["steps"] + 2, "a finished step was sampled again"
    assert found["said"][0].endswith("with the other models off the device, after the last finished step")
    assert "of the transformer streamed" in found["said"][1]
    assert 0.3 < found["resident"] < 0.7, "half of the weights should have left"
    assert found["moved"] > 0, "the account saw nothing move"


@pytest.mark.parametrize(
    ("flag", "weights"),
    [
        ("lowvram", "auto"),
        ("reserve", "auto"),
        ("disable-smart-memory", "auto"),
        ("lowvram", "fp8"),
        ("reserve", "fp8"),
    ],
)
def test_comfyui_flags_are_obeyed_with_the_same_result(inside: Inside, flag: str, weights: str) -> None:
    found = inside.play("memory", "flagged", flag=flag, weights=weights)
    assert found["equal"]
    assert found["free"] >= found["reserve"], "what was to stay free is in use"


def test_a_part_can_compute_on_the_host(inside: Inside) -> None:
    found = inside.play("memory", "apart")
    assert found["devices"] == ["cpu", "acc"] and found["text_bytes"] == 0
    assert found["finite"]


def test_caches_see_the_patchers_and_nothing_is_read_early(inside: Inside) -> None:
    found = inside.play("memory", "handle", name="ltx")
    assert found["read"] == found["lazily"] == []
    assert found["seen"] and found["one"] and not found["dynamic"]
    assert found["models"] == ["AnyGPU_text_encoder", "AnyGPU_vae", "LTX"]
    assert len(found["text"]) < 200


def test_pages_of_a_file_that_does_not_fit_are_never_locked(inside: Inside) -> None:
    found = inside.play("memory", "locked")
    assert all(count > 0 for count in found["unpinned"]), "ComfyUI locks what is streamed"
    assert found["disk-backed"] == [0, 0, 0, 0], "streamed, leaving, and the same for a clone"


def test_a_packed_layer_is_not_made_dense_to_come_or_leave(inside: Inside) -> None:
    found = inside.play("memory", "dense_asked")
    assert found["layers"] > 8 and found["freed"] > 0 and found["dense"] == 0
    places = [found[name] for name in ("acc", "acc:0", "acc:7", "cpu")]
    assert places == ["acc:0", "acc:0", "meta", "meta"], "a device without a number is the one that tensors are on"


def test_a_model_that_nobody_holds_any_more_counts_nothing(inside: Inside) -> None:
    without, beside, expected, done = inside.play("memory", "one_dead")
    assert without == beside >= expected > 0
    assert done.endswith("of the transformer streamed"), "it leaves for ever, and a step is tried again for ever"


def test_room_is_not_made_from_parts_that_the_same_stage_uses(inside: Inside) -> None:
    first, second, third = inside.play("memory", "short_beside")
    assert first == "with the other models off the device"
    assert second.endswith("streamed") and third.endswith("streamed"), "they would leave and come back for ever"


@pytest.mark.parametrize("streamed", [False, True])
def test_a_shortage_while_comfyui_moves_a_part_leaves_it_whole(inside: Inside, streamed: bool) -> None:
    found = inside.play("memory", "short_anywhere", streamed=streamed, places=40)
    assert found["steps"] > 20 and not found["told"] and found["different"] == 0, found


def test_memory_that_ran_out_once_is_asked_for_again_by_the_next_stage(inside: Inside) -> None:
    found = inside.play("memory", "refused_once")
    first, _, last = found["seen"]
    assert found["sprung"] and 0 < first[0] < 1.0, "half of it goes on"
    assert last == [1.0, 1.0], "the other model left for room that nobody needs"


@pytest.mark.parametrize(
    ("name", "gpu_only"),
    [
        pytest.param(name, only, marks=[] if name == "hunyuan_video image" and only else full)
        for name in CASES
        for only in (False, True)
    ],
)
def test_high_vram_keeps_what_it_can_and_gives_back_what_is_asked(inside: Inside, name: str, gpu_only: bool) -> None:
    """Under --highvram and --gpu-only ComfyUI's own place for models that leave is the device itself."""
    found = inside.play("memory", "high_vram", name=name, gpu_only=gpu_only)
    assert found["different"] == 0.0 and found["stays"] > 0 and found["loaded"] == 1.0
    assert "of the transformer streamed" in found["done"] and found["freed"] > 0.3, "it said that it freed"
    assert found["again"] < 0.7, "what ran out is not loaded whole again"
    assert found["left"] == 0


def test_the_card_that_computes_waits_for_what_is_streamed_to_it(inside: Inside) -> None:
    assert inside.play("memory", "waiting", guarded=True) == [[0, 0], [1, 1]]
    assert [0, 1] in inside.play("memory", "waiting", guarded=False), "the other card waits in its stead"


def test_where_memory_is_shared_no_weight_is_held_twice(inside: Inside) -> None:
    found = inside.play("memory", "shared_memory", name="ltx")
    assert (found["twice, shared False"], found["twice, shared True"]) == (1.0, 0.0)
    for shared in (False, True):
        assert found[f"different, shared {shared}"] == found[f"streamed, shared {shared}"] == 0.0
        assert found[f"same, shared {shared}"], "weights came back damaged"
    assert found["classes"] == 0
