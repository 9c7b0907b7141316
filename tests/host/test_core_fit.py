"""Core's own classes, tiny, through core's guider, fitted to machines without fast bf16."""

import os
from pathlib import Path

import pytest

from host.inside.asking import Inside

pytestmark = pytest.mark.host
full = pytest.mark.full

NEAR = 2e-3  # relative to core's fp32: the rounding of fp16 operands
CLASSES = (
    "LTXV", "LTX-2", "Wan 2.1", "Wan 2.2", "HunyuanVideo", "HunyuanVideo 1.5", "Mochi", "MiniMax H3", "Kandinsky 5",
    "Cosmos", "Cosmos Predict2", "Flux", "Qwen-Image", "Z-Image", "Lumina 2", "SD3", "SDXL", "Hunyuan3D 2",
)  # fmt: skip
PROFILES = ("turing", "gtx16xx", "no-conv3d", "gfx1151", "gfx1201", "mps-like", "xpu-like")
UNETS = ("SDXL",)  # published to run in plain fp16: safe fp16 only where the user asks for it
VAES = ("SD", "Wan 2.1", "Wan 2.2", "LTX", "LTX-2", "HunyuanVideo", "HunyuanVideo 1.5", "Mochi", "MiniMax H3")
KJNODES = (
    "WanVideoNAG", "WanVideoEnhanceAVideoKJ", "WanChunkFeedForward", "CFGZeroStarAndInit", "LTXVEnhanceAVideoKJ",
    "LTXVChunkFeedForward", "LTX2AttentionTunerPatch", "MiniMaxChunkFeedForward", "MiniMaxLowVRAMAttention",
)  # fmt: skip
AROUND = (
    "lora", "lowvram", "fp8", "attention above", "context windows", "cfg nodes", "compile below", "compile above",
    *(pytest.param(where, marks=full) for where in ("inductor below", "inductor above")),
)  # fmt: skip


@pytest.mark.parametrize("name", CLASSES)
def test_safe_fp16_is_near_fp32_where_plain_fp16_is_not(inside: Inside, name: str) -> None:
    precision, how = ("fp16-safe", "chosen") if name in UNETS else ("auto", "auto")
    found = inside.play("core_fit", "near_fp32", name=name, precision=precision)
    assert found["plain"] > 10 * NEAR, "the residual does not leave fp16's range: the test tests nothing"
    assert found["safe"] <= NEAR
    assert found["restored"] and not found["traces"], "something of ours stayed on core's modules"
    assert found["said"][0].startswith(f"precision fp16-safe: {how}: core would compute in fp32")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "Wan 2.1",
            "plain fp16 in 26 of 27 layers called (left: 1 Conv3d), attention 4 of 4 (4 by torch's fused kernel); ",
        ),
        ("Ernie", "fp16-safe in 17 and fp32 in 4 of 21 layers called, attention 0 of 2, the rest is called without "),
        (
            "Hunyuan3D 2.1",
            "plain fp16 in 35 of 35 layers called, attention 0 of 6, the rest is called without the options",
        ),
    ],
)
def test_the_first_call_says_what_was_counted(inside: Inside, name: str, said: str) -> None:
    found = inside.play("core_fit", "told", name=name)
    assert [line[: len(said)] for line in found["told"]] == [said], "said once, whatever the number of calls"
    assert found["layers"] == int(said.split(" of ")[1].split()[0]) and not found["traces"]
    casts = name == "Hunyuan3D 2.1"
    assert found["equal"] == casts, "what nothing of ours reaches is core's own, bit for bit"
    assert found["told"][0].endswith("casts its stream, and it computes as without this fit") == casts
    assert not any("overflow" in line for line in found["decided"])


@pytest.mark.parametrize("name", ["Wan 2.1", "SD3"])
def test_each_fit_equals_the_last_choice_alone(inside: Inside, name: str) -> None:
    found = inside.play("core_fit", "refitted", name=name)
    assert len(found["pairs"]) == 64 and not [pair for pair, equal in found["pairs"].items() if not equal]
    assert found["different"] >= 3, "the choices give the same: the test tests nothing"
    assert found["loaded"] and found["as core"], "as loaded is the MODEL that came in"
    assert found["others"], "what another node had set was taken back too"


@pytest.mark.parametrize("scene", ["clips_refitted", "vaes_refitted"])
def test_each_fit_of_a_clip_or_vae_equals_the_last_choice_alone(inside: Inside, scene: str) -> None:
    found = inside.play("core_fit_vaes", scene)
    assert found["acts"] and found.get("core", True)
    assert not [pair for pair, equal in found["pairs"].items() if not equal]


@pytest.mark.parametrize("precision", ["fp32", "fp16-safe"])
def test_a_layer_that_takes_one_dtype_keeps_the_network_in_it(inside: Inside, precision: str) -> None:
    found = inside.play("core_foreign", "fixed_in_dtype", precision="auto")
    assert found["same"] and "takes no other dtype" in found["said"][0], found
    refused = inside.play("core_foreign", "fixed_in_dtype", precision=precision)["refused"]
    assert refused.startswith(f"UnsupportedError: precision {precision} with layers of core_foreign.HalfOnly")


@pytest.mark.parametrize("function", ["basic", "split", "sub_quad", "sub_quad in chunks", "pytorch", "math"])
def test_no_attention_function_of_cores_gives_other_values(inside: Inside, function: str) -> None:
    found = inside.play("core_attention", "by_function", function=function)
    assert found["reached"] and found["fp16"] > 3, "nothing was computed in fp16: the test tests nothing"
    assert not {name: error for name, error in found["errors"].items() if not error <= NEAR}


@pytest.mark.parametrize("function", ["sage with fp16 sums", "flash", "another node's"])
def test_other_kernels_are_given_what_they_bear(inside: Inside, function: str) -> None:
    found = inside.play("core_attention", "by_another", function=function)
    assert found["calls"] > 3 and found["dtypes"] == ["torch.float16"]
    assert not {name: error for name, error in found["errors"].items() if not error <= NEAR}


@pytest.mark.parametrize("factor", [1.0, 1e2, 1e4])
@pytest.mark.parametrize("name", ["LTXV", "SD3"])
def test_loud_queries_keys_and_values_stay_near_fp32(inside: Inside, name: str, factor: float) -> None:
    found = inside.play("core_attention", "loud", name=name, factor=factor)
    assert found["error"] <= NEAR, found["told"]


def test_a_kernel_that_the_user_chose_is_left_to_core(inside: Inside) -> None:
    found = inside.play("core_attention", "chosen_by_flag")
    assert found["said"] == "attention as loaded: auto: ComfyUI was started with --use-split-cross-attention"
    assert found["told"] == "fp16-safe in 23 and fp32 in 3 of 27 layers called (left: 1 Conv3d)"


@pytest.mark.parametrize("profile", ["turing", "gfx1151"])
def test_safe_fp16_on_simulated_machines(inside: Inside, profile: str) -> None:
    found = inside.play("core_fit", "near_fp32", name="Wan 2.2", profile=profile)
    assert found["plain"] > 10 * NEAR and found["safe"] <= NEAR and found["restored"] and not found["traces"]


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("name", [name if name == "Wan 2.1" else pytest.param(name, marks=full) for name in CLASSES])
def test_every_simulated_machine_gives_what_fp32_gives(inside: Inside, name: str, profile: str) -> None:
    found = inside.play("core_fit", "everywhere", name=name, profile=profile)
    assert found["error"] <= NEAR, found["said"]
    if name == "Wan 2.1" and profile in ("no-conv3d", "mps-like"):
        assert found["alone"] > NEAR, "core's patch embedding works here: the test tests nothing"
        assert not found["same"]


@pytest.mark.parametrize(("profile", "rows"), [("mps-like", 4), ("gfx1201", 1), ("xpu-like", 0)])
def test_calls_that_a_driver_gets_wrong_are_reason_enough_for_a_fit(inside: Inside, profile: str, rows: int) -> None:
    found = inside.play("core_fit", "plain_calls_alone", profile=profile)
    assert len(found["care"]) == rows and bool(found["seen"]) == bool(rows) != found["same"], found


@pytest.mark.parametrize(("name", "adapted"), [("LTX-2", False), ("Wan 2.1", True)])
def test_bf16_weights_keep_their_values_on_a_device_that_damages_them(inside: Inside, name: str, adapted: bool) -> None:
    found = inside.play("core_fit", "bits_kept", name=name, profile="gfx1151", adapted=adapted)
    assert found["alone"] > 0.5, "core alone is right here: the test tests nothing"
    assert found["error"] <= NEAR and not found["bf16"]
    assert found["back"], "weights came back from the device damaged"
    assert found["shared"] and found["before"], "the MODEL that came in was changed, or copied twice"
    assert found["bytes"] < 1.05, "all but a few weights are as large as before"
    assert any(line.startswith("weights cast from bf16 on the host: auto: this device") for line in found["said"])
    assert any(line.startswith("weights bf16: this device changes them") for line in found["left"])


@pytest.mark.parametrize("profile", ["gfx1201", "xpu-like"])
def test_a_machine_that_needs_nothing_gives_the_very_object_back(inside: Inside, profile: str) -> None:
    found = inside.play("core_fit", "unchanged", name="Wan 2.1", profile=profile)
    assert found["same"] and all(" as loaded: auto" in line for line in found["said"][:2]), found["said"]
    assert found["kept"], "latents are kept on such a machine where the user asks for it"


@pytest.mark.parametrize("name", CLASSES)
def test_bytes_of_scores_stay_within_the_budget(inside: Inside, name: str) -> None:
    found = inside.play("core_fit", "bounded", name=name)
    assert found["largest"] <= found["budget"]
    assert found["whole"] > found["largest"], "no call was computed in chunks: the test tests nothing"
    assert found["error"] <= 1e-5


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("size", [1e2, 1e5])
def test_what_a_control_net_adds_between_blocks_is_measured(inside: Inside, size: float, late: bool) -> None:
    found = inside.play("core_fit", "controlled", size=size, late=late)
    assert max(found["errors"]) <= NEAR and found["acts"] > 0.1


@pytest.mark.parametrize("what", AROUND)
def test_what_lies_on_top_or_below_works_as_before(inside: Inside, what: str) -> None:
    found = inside.play("core_fit", "on_top", name="Wan 2.1", what=what)
    assert found["error"] <= NEAR and not found["traces"]
    assert found["acts"] > 0.01, "what lies there does nothing: the test tests nothing"
    assert found["calls"] or what != "attention above"


@pytest.mark.parametrize(("name", "precision"), [("Wan 2.1", "fp16-safe"), ("Flux", "fp32"), ("LTX-2", "fp16-safe")])
def test_a_step_that_core_s_cache_skips_leaves_the_latent_alone(inside: Inside, name: str, precision: str) -> None:
    found = inside.play("core_fit", "skipped", name=name, precision=precision)
    assert found == {"equal": True, "skips": True}


def test_a_step_that_is_run_again_is_not_skipped_by_core_s_cache(inside: Inside) -> None:
    assert inside.play("core_fit", "run_again", name="Wan 2.1") == {"equal": True, "acts": True}
    assert inside.play("doctor", "run_again", name="Wan 2.1") == [1, 2, 3, 4, 5]


FOREIGN = {
    "A": "core_foreign.Holder.OwnForward.Linear", "B": "core_foreign.Holder.OwnCast.Linear",
    "C": "core_foreign.Holder.Packed.Linear", "D": "core_foreign.Holder.Recorder.Linear",
    "F": "core_foreign.QuantLinear", "wrapped": "core_foreign.Holder.Wrapped.Linear",
    "property": "core_foreign.Holder.Property.Linear", "subclass in torch's": "linear.Linear with Packed8 weights",
    "subclass in core's": "ops.manual_cast.Linear with Packed8 weights",
    **{
        pack: f"core_packs.{name}"
        for pack, name in {
            "INT8-Fast": "Int8TensorwiseOps.Linear", "QuantOps": "HybridBNB4bitOps.Linear",
            "bitsandbytes NF4": "ForgeLoader4Bit", "nunchaku SVDQ": "SVDQW4A4Linear", "nunchaku AWQ": "AWQW4A16Linear",
            "RamTorch": "RamTorchLinear", "block int8": "BlockInt8Ops.Linear", "imatrix": "ImatrixOps.Linear",
            "NVFP4": "Fp4Ops.Linear", "W4A8": "W4A8Ops.Linear",
        }.items()
    },
}  # fmt: skip


LEFT = ("D", "wrapped", "property", "RamTorch", "imatrix", "nunchaku SVDQ", "nunchaku AWQ")
PACKED = [form for form in FOREIGN if form not in LEFT]
BOTH = pytest.mark.parametrize("name", ["Flux", pytest.param("Wan 2.1", marks=full)])


@pytest.mark.parametrize("form", PACKED)
@BOTH
def test_what_another_pack_has_packed_is_multiplied_by_it_in_safe_fp16(inside: Inside, name: str, form: str) -> None:
    found = inside.play("core_foreign", "in_a_model", name=name, form=form, peak=3e5)
    assert found["error"] <= max(NEAR, found["own"]) and not found["traces"]
    assert not found["plain"] <= 10 * found["error"], "the residual does not leave fp16's range"
    assert found["calls"][0] == found["calls"][1] > 20, "asked once for their size, and in each step for a product"
    more = ["layers called, attention", "layers called (left: 1 Conv3d), attention"][name == "Wan 2.1"]
    count = found["layers"]
    assert found["told"][0].startswith(f"fp16-safe in {count} of {count + (name == 'Wan 2.1')} {more}")
    assert f"in safe fp16 by {FOREIGN[form]}: {found['layers']} layers" in found["said"]


@pytest.mark.parametrize("form", LEFT)
@BOTH
def test_layers_of_other_packs_are_left_and_named(inside: Inside, name: str, form: str) -> None:
    """Those of nunchaku in a network of its own, whose attention and MLP hand 16-bit values past their forward."""
    found = inside.play("core_foreign", "in_a_model", name=name, form=form, around="nunchaku" in form)
    assert found["equal"] and not found["traces"], found["error"]
    assert found["calls"][0] == found["calls"][1] and found["calls"][0] > 20
    assert f"left to {FOREIGN[form]}: {found['layers']} layers" in found["said"]
    assert "of its products are left to another pack" in found["said"][0]


@pytest.mark.parametrize("precision", ["auto", pytest.param("fp16-safe", marks=full)])
@pytest.mark.parametrize("form", [*FOREIGN, "E"])
def test_a_few_layers_of_another_pack_are_left_and_the_rest_is_fitted(
    inside: Inside, form: str, precision: str
) -> None:
    found = inside.play("core_foreign", "in_a_model", name="Flux", form=form, every=17, precision=precision)
    assert found["said"][0].startswith("precision fp16-safe"), "nothing was fitted: the test tests nothing"
    assert found["error"] <= max(NEAR, 2 * found["own"]) and not found["equal"] and not found["traces"]
    assert found["calls"][0] == found["calls"][1]
    subject = "in safe fp16 by" if form in PACKED or "nunchaku" in form else "left to"
    assert form == "E" or f"{subject} {FOREIGN[form]}: {found['layers']} layers" in found["said"]


@pytest.mark.parametrize("form", FOREIGN)
def test_text_encoders_with_layers_of_another_pack(inside: Inside, form: str) -> None:
    """What is packed goes through its own forward in safe fp16, the rest as it would without a fit."""
    found, packed = inside.play("core_foreign", "in_a_clip", form=form), form in PACKED or "nunchaku" in form
    assert found["calls"][0] == found["calls"][1] > 10 and found["restored"]
    assert found["equal"] != packed and found["error"] <= max(NEAR, found["own"])
    assert found["fp16"] == (found["layers"] if packed else 0)
    assert f"{'in safe fp16 by' if packed else 'left to'} {FOREIGN[form]}: {found['layers']} layers" in found["said"]
    assert not packed or f"fp16-safe in {found['layers']} of {found['layers']} layers called" in found["told"]


def test_convolutions_of_other_packs_are_left_and_named(inside: Inside) -> None:
    found = inside.play("core_foreign", "foreign_convolutions")
    assert found["ours"] == [False] * 6 + [True] * 2 and found["hooked"] == [7]
    assert found["named"] == [
        "types.Own", "ops.manual_cast.Conv2d with int8 weights", "ops.manual_cast.Conv2d with Packed8 weights",
        "types.Own", "ops.manual_cast.Conv3d with int8 weights", "ops.manual_cast.Conv3d with Packed8 weights",
        "", "",
    ]  # fmt: skip


def test_layers_that_unpack_their_own_bytes_are_asked_for_values(inside: Inside) -> None:
    """As those of GGUF files, whose bytes core's cast would take for numbers."""
    found = inside.play("core_packed", "unpacked_by_the_layer", name="Wan 2.1")
    assert found["error"] <= NEAR and found["casts"] > 20


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_a_model_of_comfyui_gguf_is_near_its_own_fp32(inside: Inside, tmp_path: Path, kind: str) -> None:
    """The other pack itself, from a checkout that COMFYUI_GGUF names."""
    checkout = Path(os.environ.get("COMFYUI_GGUF") or "~/comfy/ComfyUI-GGUF").expanduser()
    if not (checkout / "ops.py").is_file():
        pytest.skip(f"no ComfyUI-GGUF in {checkout}; name a checkout in COMFYUI_GGUF")
    found = inside.play("core_gguf", "fitted", checkout=str(checkout), folder=str(tmp_path), kind=kind)
    assert found["theirs"] > 20 and found["patcher"] == "GGUFModelPatcher"
    assert found["plain"] > 10 * NEAR, "the residual does not leave fp16's range: the test tests nothing"
    assert found["safe"] <= NEAR and found["restored"] and not found["traces"]
    assert found["lora"] <= NEAR and found["acts"] > 0.01
    assert found["said"][0].startswith("precision fp16-safe: auto")


@pytest.mark.parametrize("node", KJNODES)
def test_patches_of_kjnodes_are_near_their_own_fp32(inside: Inside, node: str) -> None:
    """The other pack itself, from a checkout that COMFYUI_KJNODES names."""
    checkout = Path(os.environ.get("COMFYUI_KJNODES") or "~/comfy/ComfyUI-KJNodes").expanduser()
    if not (checkout / "nodes").is_dir():
        pytest.skip(f"no ComfyUI-KJNodes in {checkout}; name a checkout in COMFYUI_KJNODES")
    found = inside.play("kjnodes", "beside", checkout=str(checkout), name=node)
    assert not max(found["plain"]) <= 10 * NEAR, "the residual does not leave fp16's range: the test tests nothing"
    assert max(found["fit"]) <= NEAR and max(found["doctor"]) == 0.0 and not found["said"]
    assert found["changes"] > 0.01 or "Chunk" in node or "LowVRAM" in node, "the patch changes nothing"


def test_a_model_whose_weights_core_pages_by_itself_is_fitted(inside: Inside) -> None:
    """Under core's dynamic VRAM, with a stand-in for the addresses that only its driver can reserve."""
    found = inside.play("dynamic", "fitted", name="Wan 2.1")
    assert found["dynamic"] and found["error"] <= NEAR and not found["traces"]


def test_parts_of_fast_that_meet_safe_fp16_are_named(inside: Inside) -> None:
    said = inside.play("core_fit", "under_fast", features=["fp16_accumulation", "cublas_ops", "autotune"])
    assert [line.split()[1] for line in said] == ["cublas_ops", "fp16_accumulation"]


def test_a_unet_is_left_as_loaded_and_said(inside: Inside) -> None:
    found = inside.play("core_fit", "of_convolutions")
    assert found["same"] and "of its weights are not in Linear layers, as in networks made for fp16" in found["said"][0]
    assert found["refusal"].startswith("precision fp16-safe here: the network has no layers that core casts")


def test_clones_merges_saves_and_the_collector_find_the_model_as_before(inside: Inside) -> None:
    found = inside.play("core_fit", "as_before", name="LTXV")
    merged = found.pop("merged")
    assert found == dict.fromkeys(found, True)
    assert merged <= 1e-5, "a merge with the same weights is another model"


@pytest.mark.parametrize("name", ["Wan 2.1", "LTX-2", "SD3"])
def test_every_sampling_is_kept_and_comes_back(inside: Inside, name: str, tmp_path: Path) -> None:
    (kept,) = inside.play("core_fit", "kept_samplings", name=name, folder=str(tmp_path))
    assert kept["equal"] and kept["count"] == (2 if name == "LTX-2" else 1)
    assert kept["seed"] == 5 and not kept["unfinished"] and kept["family"]


def test_a_cancelled_sampling_is_kept_as_far_as_it_came(inside: Inside, tmp_path: Path) -> None:
    (kept,) = inside.play("core_fit", "kept_samplings", name="Wan 2.1", folder=str(tmp_path), stop_at=2)
    assert kept["unfinished"] == "step 2 of 3" and kept["shapes"] == [[1, 16, 3, 8, 8]]


@pytest.mark.parametrize("name", [pytest.param(name, marks=[full] * (name == "LTX-2")) for name in VAES])
def test_a_vae_decodes_and_encodes_where_there_is_no_conv3d(inside: Inside, name: str) -> None:
    found = inside.play("core_fit_vaes", "without_conv3d", name=name)
    assert found["core_fault"] or name == "SD", "core's own VAE works here: the test tests nothing"
    assert found["decode"] <= 1e-5 and found["encode"] <= 1e-5
    assert not [line for line in found["said"] if "; now " in line]  # H3's random decoder really is loud


@pytest.mark.parametrize("name", ["Wan 2.1", "HunyuanVideo"])
def test_a_vae_in_bf16_keeps_its_values_on_a_device_that_damages_them(inside: Inside, name: str) -> None:
    found = inside.play("core_fit_vaes", "bits_kept", name=name, profile="gfx1151")
    assert found["alone"] > 0.1, "core alone is right here: the test tests nothing"
    assert found["error"] <= 1e-5 and found["back"] and not found["bf16"] and found["before"]
    assert found["on_host"] <= 1e-5, "the CPU's network is another one, and needs its masks too"
    assert any(line.startswith("weights cast from bf16 on the host") for line in found["said"])


@pytest.mark.parametrize(("name", "fault"), [("SD", "values"), ("SD", "colour"), ("SD", "engine")])
def test_a_wrong_decode_is_done_again_in_fp32_and_said(inside: Inside, name: str, fault: str) -> None:
    found = inside.play("core_fit_vaes", "rescued", name=name, fault=fault)
    assert found["error"] <= NEAR, "fp16 weights, computed in fp32"
    assert found["said"][-1] == "decode: fp32" and "; now fp32" in found["said"][-2]
    assert found["said"][0].endswith("; now fp32" if fault == "engine" else "; now as it is once more")
    assert found["again"] and not found["later"], "the next decode begins with what worked"
    assert found["dtype"] == "torch.float16" and not found["patches"], "the VAE that came in was changed"


def test_sound_is_decoded_once_and_has_no_window(inside: Inside) -> None:
    found = inside.play("core_fit_vaes", "audio_decoded")
    assert found == {"shape": [1, 40 * 4096, 2], "lengths": [40], "said": []}


def test_a_shortage_on_the_way_to_the_cpu_leaves_the_next_decode_as_it_was(inside: Inside) -> None:
    found = inside.play("core_fit_vaes", "short_on_the_host", name="SD")
    assert found["ends"].keys() == {""} and found["ends"][""] >= 10, found
    assert found["listed"] <= 1, "core's list keeps what has left the host, and warns of it at each load"


@pytest.mark.full
def test_injections_hold_an_announced_change_of_method_against_that_method(inside: Inside) -> None:
    """Tiles of LTX show seams, which are right where the run says that it takes tiles."""
    assert inside.play("injected", "in_tiles", name="LTX") == ["survived", "wrong"]


@pytest.mark.full
def test_injections_do_not_count_weights_that_a_proof_on_the_cpu_would_have_moved(inside: Inside) -> None:
    ends = inside.play("injected", "proven_or_not", name="SD")
    assert ends and all(end.endswith((": survived", ": explained", ": unmet")) for end in ends), ends


def test_a_decode_that_runs_out_of_memory_goes_to_smaller_tiles(inside: Inside) -> None:
    found = inside.play("core_fit_vaes", "rescued", name="SD", fault="memory", edge=20)
    assert found["said"][0].endswith("out of memory; now fp32, all other models freed")
    assert found["said"][-1].startswith("decode: fp32, in tiles of ")
    assert found["error"] < 1.0 and found["later"], "shortage is tried anew each time"


def test_tiles_for_want_of_memory_are_not_kept_where_they_also_went_wrong_once(inside: Inside) -> None:
    found = inside.play("core_fit_vaes", "rescued", name="SD", fault="memory and once", edge=20)
    assert any("once more" in line for line in found["said"]) and "now fp32, all other models" in found["later"][0]


@pytest.mark.parametrize("name", [pytest.param(name, marks=[full] * (name != "SD")) for name in VAES])
def test_no_finite_fault_of_a_decode_is_silent(inside: Inside, name: str) -> None:
    found = inside.play("core_fit_vaes", "spoilt", name=name)
    assert len(found) == 8
    for fault, each in found.items():
        assert each["error"] <= NEAR and each["said"][-1] == "decode: fp32", (fault, each)
    once = {} if name != "SD" else inside.play("core_fit_vaes", "spoilt", name=name, times=1)
    assert all(each["said"][-1] == "decode: as it is" for each in once.values()), once


def test_the_cpu_computes_the_whole_only_after_every_other_way(inside: Inside) -> None:
    found = inside.play("core_fit_vaes", "on_a_bad_device", name="SD")
    assert found["error"] <= 1e-5 and found["said"][-2].endswith("now fp32, on the CPU, about 1 min"), found
    assert "once more" in found["said"][0] and "loaded again" not in " ".join(found["said"])


@pytest.mark.parametrize("name", [pytest.param(name, marks=[full] * (name != "SD")) for name in VAES])
def test_a_sound_decode_is_no_alarm(inside: Inside, name: str) -> None:
    """HunyuanVideo's random network divides a flat frame by its norm: of the fade, 16 bits make something else."""
    found = inside.play("core_fit_vaes", "sound", name=name)
    alarms = {key: each for key, each in found.items() if any("; now " in line for line in each["said"])}
    assert len(found) == 16 and len(alarms) <= 2 * (name == "HunyuanVideo")
    assert all(each["core"] > 0.1 and each["fitted"] <= 1e-6 for each in alarms.values()), "a false alarm"


def test_sound_decodes_of_other_cells_frames_or_pixel_spaces_are_no_alarm(inside: Inside) -> None:
    assert inside.play("core_fit_vaes", "seldom") == {"tiny": [], "others": []}


def test_a_decode_that_really_is_one_colour_is_given(inside: Inside) -> None:
    found = inside.play("core_fit_vaes", "one_colour", name="SD")
    assert found["values"] == [0.75] and found["said"] == [
        "really one colour: the CPU in fp32 agrees",
        "decode: as it is",
    ]


@full
@pytest.mark.parametrize("name", ["SD", "Wan 2.1"])
def test_looking_at_a_decode_adds_at_most_three_hundredths_of_its_bytes(inside: Inside, name: str) -> None:
    found = inside.play("core_fit_vaes", "looked_at", name=name)
    assert found["plain"] < found["fitted"] <= 1.03 * found["plain"]


def test_latents_are_kept_before_the_first_try(inside: Inside) -> None:
    assert inside.play("core_fit_vaes", "kept_before", name="Wan 2.1") == {"kept": 1, "equal": True}


def test_latents_that_the_disk_refused_are_saved_before_the_next_decode(inside: Inside) -> None:
    assert inside.play("core_fit_vaes", "saved_after_a_refusal") == 2


def test_what_no_decode_can_save_is_refused_with_the_cause(inside: Inside) -> None:
    assert "The sampling went wrong, not the VAE" in inside.play("core_fit_vaes", "refused", name="SD", fault="latents")
    assert "also in fp32 on the CPU" in inside.play("core_fit_vaes", "refused", name="SD", fault="weights")


@pytest.mark.parametrize("name", ["Mochi", "HunyuanVideo", "HunyuanVideo 1.5"])
def test_with_the_masks_core_s_vae_gives_what_the_publisher_s_code_gives(inside: Inside, name: str) -> None:
    """As kept in tests/fixtures/vae; HunyuanVideo's with its norms over the whole piece, where core has two latents."""
    found = inside.play("core_fit_vaes", "as_published", name=name)
    assert found.pop("said"), "on by default, and not told"
    assert found.pop("off"), "the masks cannot be switched off"
    for side, (core, fitted) in found.items():
        assert fitted <= NEAR, side
        assert core > 10 * NEAR or (name, side) == ("Mochi", "decode"), "core has this mask again: take ours out"


def test_no_other_vae_is_given_a_mask(inside: Inside) -> None:
    """They are told by what they are built of, not by name."""
    found = inside.play("core_fit_vaes", "masked")
    assert set(found) == {*VAES, "Cosmos"}
    assert {name for name, count in found.items() if count} == {"HunyuanVideo", "HunyuanVideo 1.5", "Mochi"}


@pytest.mark.parametrize(
    "name", ["T5", *(pytest.param(name, marks=full) for name in ("Llama", "Qwen 2.5 VL", "Gemma 2", "Gemma 3"))]
)
def test_text_encoders_in_safe_fp16_and_with_bounded_attention(inside: Inside, name: str) -> None:
    found = inside.play("core_fit_vaes", "text_fitted", name=name)
    assert found["same"], "core's fp32 is finite everywhere: nothing is needed"
    assert found["changed"] and found["safe"] <= NEAR and found["worn"] > 10
    assert found["restored"] and not found["left"], "the CLIP that came in was changed"
    assert found["chunks"] and found["bounded"] <= 1e-5
    assert any("holds NaN or infinite values" in line for line in found["said"])


def test_a_fitted_clip_under_cores_select_clip_device(inside: Inside) -> None:
    found = inside.play("core_fit_vaes", "on_second_device", name="T5")
    assert found["changed"], "safe fp16 acts on the first device"
    first, second = found["devices"]
    assert first == second and first.endswith(":1")
    assert found["before"] and found["after"], "another device, the same text"


@pytest.mark.parametrize("way", ["_conv_forward", "padding_mode"])
def test_what_another_pack_changes_in_a_vae_stays_changed(inside: Inside, way: str) -> None:
    """Packs for seamless textures copy a VAE whole and set a method, or the padding, on each convolution."""
    found = inside.play("core_fit_vaes", "changed_in_place", way=way)
    plain = found["errors"].pop("plain")
    assert plain > 0.05 and max(found["errors"].values()) < 1e-4 and not found["said"], found


def test_core_s_own_cancel_inside_a_forward_leaves_no_mode_of_ours(inside):
    """Core's is a BaseException, after which torch calls no hook."""
    assert inside.play("core_attention", "cancelled") == [0, 0]


def test_a_fitted_model_runs_under_the_guard_of_its_device(inside):
    found = inside.play("core_attention", "guarded")
    assert found["seen"] and all(len(shape) == 5 for shape in found["seen"]) and found["on_cpu"]
    assert (found["vaes"], found["clips"]) == (1, 4), "both children of the encoder, in both texts"
    assert found["calls"] == [*range(len(found["seen"]) + 5)], "by the calls of its device, too"


@pytest.mark.parametrize("order", ["before", "behind"])
def test_a_doctor_on_either_side_looks_at_what_the_fit_lets_through(inside: Inside, order: str) -> None:
    found = inside.play("fit_beside", "with_a_doctor", order=order)
    assert found["again"] and found["error"] <= 1e-3 and found["doctor"] == []


def test_caches_that_core_makes_in_the_weights_dtype_follow_the_stream(inside: Inside) -> None:
    found = inside.play("fit_beside", "self_forcing")
    assert max(found["fitted"], found["again"]) <= max(found["plain"], 1e-3)


def test_a_call_that_is_computed_again_leaves_one_step_in_core_s_caches(inside: Inside) -> None:
    found = inside.play("fit_beside", "self_forcing_once_more")
    assert found["error"] == 0.0
    assert found["said"][0].startswith("step 2 of 2, positive prompt: the same step run again was right")


@pytest.mark.parametrize("precision", ["auto", "fp16-safe"])
def test_layers_are_fitted_as_before_once_core_s_bypass_lora_has_gone(inside: Inside, precision: str) -> None:
    """Core leaves a layer's own forward on it."""
    found = inside.play("fit_beside", "after_a_bypass_lora", precision=precision)
    assert found["after"] == found["before"] and "replaced" not in str(found["before"])
    text = inside.play("fit_beside", "text_after_a_bypass_lora")
    assert text["unfitted"] == 0.0 and text["fitted"] <= NEAR


def test_a_prompts_keys_and_values_do_not_outlive_a_fit(inside: Inside) -> None:
    assert inside.play("fit_beside", "prompt_caches") == {"spoilt": False, "fitted": True, "after": True}


@pytest.mark.parametrize("fault", ["dead half", "dead frames", "noise"])
def test_fit_vae_rescues_a_decode_behind_a_doctor_too(inside: Inside, fault: str) -> None:
    found = inside.play("fit_beside", "vae_behind_a_doctor", fault=fault)
    assert found["error"] <= 1e-3 and found["said"] == ["decode: fp32"] and found["told"] == []


def test_a_dark_picture_is_no_fault(inside: Inside) -> None:
    found = inside.play("fit_beside", "dark_picture")
    assert found["mean"] < 0.1 and found["said"] == []


def test_lines_of_a_cancelled_sampling_end_with_it(inside: Inside) -> None:
    found = inside.play("fit_beside", "cancelled_lines")
    assert len(found["told"]) == 1 and "loaded again" in found["told"][0]
    assert found["shown"] == ["no fault in 4 steps"]


def test_a_change_of_a_fitted_clones_weights_leaves_the_plain_encoder_alone(inside: Inside) -> None:
    assert inside.play("fit_beside", "cloned_encoder") == {"left": 0, "same": True}


def test_a_status_claims_no_fit_where_calls_are_core_s(inside: Inside) -> None:
    found = inside.play("fit_beside", "statuses")
    nothing = "nothing to change on this device"
    assert found == {"fitted": "fitted to this device", "kept": nothing, "back": nothing, "nothing": nothing}
