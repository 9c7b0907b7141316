"""Core's packed layers in fitted models, encoders and VAEs: which path computes them, and how exactly.

The reference is comfy-kitchen's eager back end. A device that lacks a product, or has a wrong, slow or moody one, is a
stand-in for torch's own product, on a clock that says what it is told.
"""

import pytest

from host.inside.asking import Inside
from host.test_core_fit import PROFILES

pytestmark = pytest.mark.host
full = pytest.mark.full

CLOSE = 1e-3  # of a whole network whose layers are dequantised, against the same values in fp32
ROUNDED = 3e-4  # of values that are rounded to fp16 once
KINDS = (
    "int8_tensorwise", "int8 rowwise", "int8 convrot", "convrot_w4a4", "asym_w4a8_int8", "nvfp4", "mxfp8",
    "float8_e4m3fn", "float8_e5m2",
)  # fmt: skip
PAST = ("LTXV", "Wan 2.1", "MiniMax H3")  # whose feed-forwards go past their layers
LOADED = ("bf16", "fp16", "fp32")
CHOICES = {
    "raises": False,
    "wrong": False,
    "half as fast": False,
    "twice as fast": True,
    "raises for 97 to 127 rows": False,
    "ends the process": False,
}


@pytest.mark.parametrize("native", [True, pytest.param(False, marks=full)])
@pytest.mark.parametrize("kind", KINDS)
def test_every_format_is_dequantised_where_its_product_is_not_known(inside: Inside, kind: str, native: bool) -> None:
    found = inside.play("core_packed", "packed", name="Wan 2.1", kind=kind, native=native)
    assert found["error"] <= CLOSE and not found["products"] and not found["traces"], found["said"]
    assert any(f"{found['layers']} " in line and "layers dequantised: auto" in line for line in found["said"])
    emulated = kind == "convrot_w4a4"  # which no kernel of this machine's multiplies packed
    assert found["same"] != emulated, "where the product is in order nothing changes"
    if native:
        assert found["alone"] and found["core"] > 5 * CLOSE, "core multiplies nothing packed: the test tests nothing"


QUICK = {("mps-like", kind) for kind in KINDS}
QUICK |= {("gfx1151", "nvfp4"), ("xpu-like", "int8 convrot"), ("xpu-like", "float8_e5m2")}


@pytest.mark.parametrize(
    ("profile", "kind"),
    [
        pytest.param(profile, kind, marks=[] if (profile, kind) in QUICK else full)
        for profile in PROFILES
        for kind in KINDS
    ],
)
def test_every_format_runs_packed_on_every_simulated_machine(inside: Inside, profile: str, kind: str) -> None:
    """Apple has no float8: what has it is held as bytes there. tests/simulated/test_packed.py has our own loader."""
    found = inside.play("core_packed", "on_profile", name="Wan 2.1", kind=kind, profile=profile)
    assert found["error"] <= CLOSE and not found["products"] and not found["traces"] and found["packed"] == 24
    assert any("24 " in line and "layers dequantised: auto" in line for line in found["said"])
    lacking = profile == "mps-like" and (kind.startswith("float8") or kind in ("nvfp4", "mxfp8", "asym_w4a8_int8"))
    assert any("float8 weights held as bytes" in line for line in found["said"]) is lacking


@pytest.mark.parametrize("kind", ["float8_e4m3fn", "nvfp4", "mxfp8", "asym_w4a8_int8"])
def test_a_lora_on_weights_that_are_held_as_bytes_costs_what_core_s_packing_costs(inside: Inside, kind: str) -> None:
    here, there = (
        inside.play("core_packed", "on_profile", name="Wan 2.1", kind=kind, profile=profile, lora=True)
        for profile in ("mps-like", "turing")
    )
    assert here["changed"] > 4 * here["error"] and here["error"] <= 1.5 * there["error"]


@pytest.mark.parametrize("loaded", LOADED)
@pytest.mark.parametrize("name", PAST)
def test_nothing_passes_the_choice(inside: Inside, name: str, loaded: str) -> None:
    found = inside.play("core_packed", "packed", name=name, kind="int8 convrot", loaded=loaded)
    assert found["alone"] > 20 and not found["products"] and not found["traces"]
    assert found["error"] <= CLOSE
    plain = inside.play("core_packed", "packed", name=name, kind="int8 convrot", loaded=loaded, precision="as loaded")
    assert plain["alone"] > 20 and not plain["products"]
    assert loaded == "bf16" or plain["error"] <= CLOSE, "a stream in bf16 is rounded between layers"


@pytest.mark.parametrize("name", ["Wan 2.1", "LTXV"])
def test_core_s_own_product_is_taken_in_every_layer_where_it_was_chosen(inside: Inside, name: str) -> None:
    """Around an fp32 stream core alone would multiply the feed-forwards of an fp16 file dense, in fp32."""
    asked = {"kind": "int8 convrot", "loaded": "fp16", "packed_layers": "core's own", "precision": "fp16-safe"}
    found = inside.play("core_packed", "packed", name=name, **asked)
    assert found["products"] == 2 * found["layers"] and found["error"] <= 1.2 * found["core"] and not found["traces"]
    assert f"{found['layers']} int8_tensorwise layers core's own by torch's product: chosen" in found["said"]


@pytest.mark.parametrize("loaded", LOADED)
@pytest.mark.parametrize("precision", ["auto", pytest.param("fp16-safe", marks=full)])
def test_encoders_with_merged_feed_forwards_and_tied_heads(inside: Inside, loaded: str, precision: str) -> None:
    found = inside.play("core_packed", "encoder", loaded=loaded, precision=precision)
    assert found["alone"] >= 26 and not found["products"], "13 layers, and the head"
    looked_up = 2**-7 if loaded == "bf16" else 0.0  # core rounds embeddings to the dtype that it has loaded for
    assert found["error"] <= max(looked_up, (1 + (precision == "fp16-safe")) * CLOSE)
    assert found["same"] and not found["traces"]


@pytest.mark.parametrize(("product", "tries", "said"), [("unknown", 0, "dequantised"), ("trusted", 1, "core's own")])
def test_a_vae_never_falls_to_the_cpu_for_want_of_a_product(
    inside: Inside, product: str, tries: int, said: str
) -> None:
    found = inside.play("core_packed", "vae", product=product)
    assert found["error"] <= 1e-5 and found["products"] == tries and not found["told"] and not found["traces"]
    assert any(f"int8_tensorwise layers {said}" in line for line in found["said"])


def test_a_packed_bank_of_experts_is_dequantised_one_expert_at_a_time(inside: Inside) -> None:
    found = inside.play("core_packed", "experts")
    assert found["alone"] == 2 and not found["products"] and not found["left"] and found["error"] <= 1e-6
    assert [line.split(" as they are")[0] for line in found["unnamed"]] == ["1 unnamed layers left"]


@pytest.mark.parametrize(("kind", "layout"), [("int8 convrot", "WiseINT8"), ("float8_e4m3fn", "CoreFP8E4M3")])
def test_packed_weights_that_core_pages_by_itself(inside: Inside, kind: str, layout: str) -> None:
    found = inside.play("dynamic", "packed", name="Wan 2.1", kind=kind)
    assert found["dynamic"] and not found["products"] and found["layouts"] == [f"Tensor{layout}Layout"]
    assert found["alone"] or found["near"] <= CLOSE, "core dequantises fp8 here too"


def test_nothing_is_left_after_a_cancel_or_an_error(inside: Inside) -> None:
    assert inside.play("core_packed", "interrupted", name="LTXV", kind="int8 convrot") == {
        "raised": [10, 10], "traces": 0, "past": True,
    }  # fmt: skip


@pytest.mark.parametrize("stand_in", CHOICES)
def test_the_choice_is_right_on_every_clock_and_the_templates_finish(inside: Inside, stand_in: str) -> None:
    found = inside.play("core_packed", "chosen", stand_in=stand_in, names=list(PAST))
    assert found["unasked"] == "dequantise", "nobody has tested it yet"
    assert found["ends"] == (stand_in == "ends the process"), "a process ended twice"
    for error, same, line in found["results"].values():
        assert same is CHOICES[stand_in] and "tested on this device" in line
        assert same or error <= CLOSE
        assert ("core's own" in line) is CHOICES[stand_in]


@pytest.mark.parametrize("precision", ["fp16-safe", "as loaded"])
def test_a_product_that_fails_at_work_is_tried_once_and_said_once(inside: Inside, precision: str) -> None:
    found = inside.play("core_packed", "failed_at_work", name="Wan 2.1", kind="int8 convrot", precision=precision)
    assert found["worked"] == 24 and found["tries"] == 1 and not found["traces"]
    assert found["error"] <= CLOSE and found["again"] <= CLOSE
    assert found["lines"] == ["TensorWiseINT8Layout: HIPBLAS_STATUS_INVALID_VALUE; dequantised from here on"]


@pytest.mark.parametrize("kind", ["float8_e4m3fn", "mxfp8", "nvfp4"])
def test_a_model_saved_on_a_device_without_float8_is_core_s_file(inside: Inside, kind: str) -> None:
    found = inside.play("core_packed", "saved_without_float8", kind=kind)
    assert found["error"] <= 2 * found["core"] and found["same"]
    assert found["moved"] == 0, "looking up a LoRA's keys copied weights"


@pytest.mark.parametrize("layer_format", [kind for kind in KINDS if " " not in kind] + ["awq_w4a16"])
def test_values_are_dequantised_in_fp32_and_rounded_once(inside: Inside, layer_format: str) -> None:
    errors = inside.play("core_packed", "rounded", layer_format=layer_format)
    assert max(error for largest, error in errors.items() if float(largest) >= 1e-3) <= ROUNDED


CORE, DEQUANTISE = "core's own", "dequantise"
CARDS = {  # kitchen's backend for int8, W4A8 and W4A4; our path for the same, then fp8 and nvfp4; what may be asked
    "Apple": ("eee", "ddddd", 2), "RDNA 1": ("eee", "ddddd", 0), "RDNA 2": ("eee", "ddddd", 0),
    "RDNA 3": ("hhh", "cccdd", 3), "RDNA 4": ("hhh", "ccccd", 3), "RDNA 4 beside an iGPU": ("eee", "dddcd", 0),
    "CDNA 3": ("eee", "ddddd", 2), "Arc": ("eee", "ddddd", 2), "P40": ("eee", "ddddd", 2), "V100": ("eee", "ddddd", 2),
    "GTX 1660": ("cec", "ddddd", 3), "RTX 2060": ("cec", "cdcdd", 3), "RTX 2060, CUDA 12.8": ("eee", "ddddd", 2),
    "RTX 3060": ("ccc", "cccdd", 3), "RTX 3060, CUDA 12.8": ("eee", "ccddd", 2), "RTX 4090": ("ccc", "ccccd", 3),
    "RTX 5090": ("ccc", "ccccc", 3), "CPU": ("eee", "ddddd", 0),
}  # fmt: skip
WHY = {
    "RTX 2060, CUDA 12.8": "cuda: torch is built for CUDA 12.8, comfy-kitchen's kernels need 13",
    "RDNA 4 beside an iGPU": "HIP_VISIBLE_DEVICES hides an integrated one", "RDNA 1": "gfx1010",
}  # fmt: skip


@pytest.mark.parametrize("card", CARDS)
def test_each_card_takes_the_path_of_its_row_by_kitchen_s_own_registry(inside: Inside, card: str) -> None:
    found = inside.play("packed_cards", "paths", name=card)
    kernels, paths, asked = CARDS[card]
    formats = ["int8_tensorwise", "asym_w4a8_int8", "convrot_w4a4"]
    lacking = {each for each in formats if not found["paths"][each][0]}  # of an older kitchen
    had = dict(zip((*formats, "float8_e4m3fn", "nvfp4"), zip((*kernels, "", ""), paths, strict=True), strict=True))
    for each in had.keys() - lacking:
        kernel, path = had[each]
        assert found["paths"][each][1] == {"c": CORE, "d": DEQUANTISE}[path]
        assert not kernel or found["paths"][each][0][0] == kernel
    assert lacking or sum(each in found["asked"] for each in formats) == asked, (
        "a question that ends processes is asked"
    )
    assert WHY.get(card, "") in found["said"][0]
