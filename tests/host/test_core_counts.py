"""What a fit says of its work against what torch itself counts, and plain fp16 where a measured step leaves room."""

import re
from pathlib import Path

import pytest

from host.inside.asking import Inside
from host.test_core_fit import CLASSES, NEAR, UNETS

pytestmark = pytest.mark.host
full = pytest.mark.full

FAST = ("Wan 2.1", "MiniMax H3", "Ernie", "Hunyuan3D 2.1", "Mochi")
EXACT = 1e-5  # of sums in fp32
NARROWS = "Cosmos Predict2"  # core narrows its fp32 stream before the last layer, as only a plain step shows
LAYERS = re.compile(
    r"(?:(plain fp16|fp16-safe) in (\d+))(?: and fp16-safe in (\d+))?(?: and fp32 in \d+)? of (\d+) layers called"
)
ATTENTION = re.compile(r"attention (\d+) of (\d+)")
LOUDER = "values beyond those measured in safe fp16: this step is computed again in it"


def some(*fast: str) -> list[object]:
    every = dict.fromkeys((*fast, *CLASSES))
    return [name if name in fast else pytest.param(name, marks=full) for name in every if name not in UNETS]


@pytest.mark.parametrize("precision", ["auto", "fp16-safe"])
@pytest.mark.parametrize("peak", [0.0, 3e5])
@pytest.mark.parametrize("name", some(*FAST))
def test_torch_counts_the_layers_that_the_node_names(inside: Inside, name: str, peak: float, precision: str) -> None:
    found = inside.play("core_counted", "counted", name=name, precision=precision, peak=peak)
    *before, line = found["told"]
    assert before == [LOUDER] * (name == NARROWS and peak > 0 and precision == "auto")
    layers, attention = LAYERS.search(line), ATTENTION.search(line)
    assert layers and attention, line
    kind, first, second, called = layers.groups()
    assert (int(first) + int(second or 0), int(called)) == (found["fp16"], found["layers"]), line
    assert found["runs"] == 1, "measured and not trusted"
    assert (kind == "plain fp16") == (
        (precision == "auto" and name not in ("Ernie", "Mochi") and not before) or name == "Hunyuan3D 2.1"
    )
    if int(attention[1]) == int(attention[2]):
        assert found["attention"] == int(attention[1]), line
    else:
        assert "the rest is called without the options" in line


def test_a_run_of_one_call_is_counted_also_where_that_is_computed_again(inside: Inside) -> None:
    louder, line = inside.play("core_counted", "counted", name=NARROWS, peak=3e5)["first"]
    assert louder == LOUDER and LAYERS.match(line)


def test_a_cached_fit_follows_what_changes_behind_it(inside: Inside) -> None:
    found = inside.play("core_counted", "cached", name="Wan 2.1")
    assert not found["errors"]["fp16 behind"] <= NEAR, "core's own fp16 is right here: the test tests nothing"
    assert found["errors"]["alone"] <= NEAR and found["errors"]["alone again"] <= NEAR
    assert (
        "casts its stream" in found["told"]["fp16 behind"][0] and found["told"]["alone"] == found["told"]["alone again"]
    )
    assert "1 layers whose forward another node has replaced" in found["told"]["bypass behind"][0]
    assert len(found["told"]["alone"]) == 1 and not found["told"]["bypass again"]


@pytest.mark.parametrize(
    ("behind", "fp16", "said"),
    [("float16", 26, "plain fp16 in 26 of 26"), ("bfloat16", 0, "fp16-safe in 0 of 26 layers called (left: 26 in bf")],
)
def test_a_dtype_that_a_node_behind_sets_is_computed_in(inside: Inside, behind: str, fp16: int, said: str) -> None:
    found = inside.play("core_counted", "counted", name="Flux", behind=behind)
    assert found["told"][-1].startswith(said) and found["fp16"] == fp16, found


def test_torch_counts_the_layers_of_a_text_encoder(inside: Inside) -> None:
    found = inside.play("core_counted", "of_a_clip")
    assert found["told"] == [
        "fp16-safe in 14 of 14 layers called, attention 2 of 2 (2 by torch's fused kernel in fp16)"
    ]
    assert (found["layers"], found["fp16"], found["kept"]) == (14, 14, [True, True, True])
    assert found["error"] <= NEAR


def test_a_text_encoder_with_loud_rows_computes_in_fp32_and_says_so(inside: Inside) -> None:
    found = inside.play("core_counted", "of_a_clip", rows=100.0)
    (line,) = found["told"]
    assert line.startswith(
        "fp16-safe in 0 of 14 layers called (left: 14 in float32 by core), attention 2 of 2 (2 exact"
    )
    assert line.endswith("would amplify what fp16 rounds") and found["fp16"] == 0 and found["error"] <= EXACT


@pytest.mark.parametrize(
    ("name", "peak", "most"), [("Wan 2.1", 0.0, 1.15), ("LTXV", 0.0, 1.2), ("MiniMax H3", 0.0, 1.2), ("LTXV", 3e5, 3.0)]
)
def test_bytes_outside_products_against_plain_fp16(inside: Inside, name: str, peak: float, most: float) -> None:
    """The last: a residual that fp16 cannot hold stays fp32 (twice the bytes), and so do the norms that read it; the
    time's weights are widened. With that it is 2.8 times the bytes, and 3.0 before
    ComfyUI 0.29."""
    found = inside.play("core_counted", "bytes_outside_products", name=name, peak=peak)
    assert found["auto bytes"] <= most <= 3.0 < found["safe bytes"]
    assert found["auto kernels"] <= (1.21 if not peak else 2.5)


@pytest.mark.parametrize("name", some("Wan 2.1", "Flux", "Lumina 2"))
def test_sizes_are_kept_by_content_and_corrected(inside: Inside, tmp_path: Path, name: str) -> None:
    if name == "Mochi":
        pytest.skip("stays in safe fp16: torch's attention is called directly")
    found = inside.play("core_counted", "remembered", name=name, folder=str(tmp_path))
    runs = {which: found[which][1] for which in found if isinstance(found[which], list) and which != "told"}
    narrows = name == NARROWS
    once = {"again": 1, "corrected": 1 + narrows, "same": 1}
    assert runs == dict.fromkeys(("first", "loud", "lora", "other", "damaged"), 2) | once
    assert max(found[which][0] for which in runs) <= NEAR and found["first"][0] == found["again"][0]
    assert (found["files"], found["more"]) == (1, 3) and found["told"].count(LOUDER) == 1 + narrows


def test_layers_that_prefer_a_kernel_get_it_within_its_bounds(inside: Inside) -> None:
    found = inside.play("core_attention", "preferred")
    assert found["calls"] == ["torch.float16"] * 2 and found["error"] <= NEAR
    assert found["ways"] == {"by kernel in fp16": 2, "by torch's fused kernel in fp16": 2}


@pytest.mark.parametrize("by_node", [False, True])
def test_int8_attention_empties_containers_itself_and_takes_fp32(inside: Inside, by_node: bool) -> None:
    found = inside.play("core_attention", "in_containers", by_node=by_node)
    if found is None:
        pytest.skip("this ComfyUI has no int8 attention")
    assert found["dtypes"] == ["torch.float32"] and found["alive"] == [0, 0], "q, k and v lay beside the packed ones"
    assert found["error"] == 0.0 and found["ways"] == {"by comfy-kitchen's int8 kernel": 2}


@pytest.mark.parametrize(
    ("function", "dtype"),
    [
        *(("sage", dtype) for dtype in ("float16", "bfloat16")),
        *((own, "float16") for own in ("basic", "split", "sub_quad")),
    ],
)
def test_16_bit_operands_as_loaded_stay_within_the_kernel_s_sums(inside: Inside, function: str, dtype: str) -> None:
    found = inside.play("core_attention", "narrow_operands", function=function, dtype=dtype)
    assert found["core"] == float("inf"), "core is right here: the test tests nothing"
    assert found["ours"] <= NEAR


@pytest.mark.parametrize(
    ("core_takes", "said"),
    [
        (
            "sub_quad",
            "attention torch's fused kernel (flash): auto: torch has fused kernels for bf16 here; core takes ",
        ),
        ("pytorch", "attention as loaded: auto: torch has fused kernels for bf16 here; core takes attention_pytorch"),
        ("sage", "attention core's attention_sage: auto: values within what its sums hold"),
    ],
)
def test_radeons_missing_from_core_s_list_get_torch_s_kernel(inside: Inside, core_takes: str, said: str) -> None:
    found = inside.play("core_attention", "on_a_radeon", core_takes=core_takes)
    assert found["said"][1].startswith(said) and found["same"] == (core_takes == "pytorch")
    assert found["told"] == ["attention 4 of 4 (4 by torch's fused kernel)"] or core_takes != "sub_quad"


def test_loud_convolutions(inside: Inside) -> None:
    found = inside.play("core_counted", "loud_convolutions")
    for case, (error, line) in found["errors"].items():
        few = case.endswith("few")
        assert line == f"{'fp32' if few else 'fp16-safe'} in 1 of 1 layers called" and error <= (EXACT if few else NEAR)
    assert not found["unfit"] and found["unet"], "Conv1d counts as what safe fp16 reaches, Conv2d as a U-Net"
    assert found["after a cancel"] == 3, "weights that a cancel left unmeasured are measured by the next run"
