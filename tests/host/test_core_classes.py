"""Every class of core's list as a double: what Fit Model reaches, what it says of that, and how far it is from fp32."""

import re

import pytest

from host.core_page import HEADS, NEAR, PAGE, ROWS, STEADY, SUITE, UNSAMPLED, counts, table
from host.core_threads import THREADS
from host.inside.asking import Inside
from host.test_core_fit import CLASSES as FITTED

pytestmark = pytest.mark.host
CLASSES = {row[0]: row for row in table("classes") if row[0] not in UNSAMPLED}
FUNCTIONS = ("attention_basic", "attention_split", "attention_sub_quad", "attention_pytorch")
FULL = pytest.mark.full
AMPLIFY = ("Qwen-Image", "SD 1.5")  # of which the first was off by half at a late step, with rows times 10,000
NARROWED = ("Flux", "Lens", "Trellis 2")  # by core in a stream of fp16: the guidance, and noise levels
EMULATED = ("Wan 2.1", "Flux", "HunyuanVideo", "Lumina 2", "Kandinsky 5", "SD3")
EXACT = 2e-4  # of networks that amplify the rounding of fp32 a thousandfold too
SAFE = re.compile(r"fp16-safe in (\d+)")
FP32 = re.compile(r"fp32 in (\d+)|(\d+) in float32 by core")
OF = re.compile(r"(\d+) of (\d+)")


@pytest.fixture(scope="module")
def about(inside: Inside) -> dict:
    return inside.play("core_sweep", "networks")


def test_each_class_of_core_has_a_double(about: dict) -> None:
    missing = {row: kind for row, kind in about["classes"].items() if kind not in about["doubles"].values()}
    for row in UNSAMPLED:
        missing.pop(row, None)
    assert not missing, "core runs classes that no double stands for: add a Case to tests/host/inside/core_classes.py"
    assert set(about["doubles"]) == set(CLASSES), "docs/core-models.md is old: make core-classes"


@pytest.mark.parametrize("name", CLASSES)
def test_what_is_said_of_a_class_is_what_was_counted_below(inside: Inside, about: dict, name: str) -> None:
    found = inside.play("core_sweep", "reached", name=name)
    if found is None:
        pytest.skip("this ComfyUI has no such class")
    assert not found["traces"] and len(found["told"]) == 1
    layers, _, attention = found["told"][0].partition("attention ")
    named = SAFE.search(layers)  # not of a network that casts its stream by itself
    safe, called = int(named[1]) if named else 0, int(OF.search(layers)[2])
    assert safe == found["safe"], "layers that were said to be in safe fp16 were not, or the other way round"
    assert called == found["called"], "a layer was called that is not counted"
    assert sum(int(one or other) for one, other in FP32.findall(layers)) == found["fp32"], "as above, in fp32"
    reached, calls = map(int, OF.match(attention).groups())
    assert reached == found["attention"][0] and calls in (
        found["attention"][1],
        found["attention"][1] + found["direct"],
    )
    assert not any("another pack" in line or "overflow" in line for line in found["decided"] + found["told"])
    if f"ComfyUI {about['version']}," in PAGE.read_text(encoding="utf-8"):
        assert list(counts(found)) == CLASSES[name][2:4], "docs/core-models.md is old: make core-classes"


@pytest.mark.parametrize("name", [name for name in CLASSES if name not in FITTED])
def test_a_loud_layer_of_each_other_class(inside: Inside, name: str) -> None:
    within(inside.play("core_sweep", "errors", name=name, scenes=["loud"]))


@pytest.mark.parametrize("name", [name if name in NARROWED else pytest.param(name, marks=FULL) for name in CLASSES])
def test_numbers_of_a_batch_are_not_rounded_and_late_steps_are_within_the_bound(inside: Inside, name: str) -> None:
    within(inside.play("core_sweep", "errors", name=name, scenes=STEADY, late=True))


@pytest.mark.full
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("name", CLASSES)
def test_loud_rows_and_values_in_each_attention_of_core(inside: Inside, name: str, function: str) -> None:
    within(inside.play("core_sweep", "errors", name=name, scenes=STEADY + ROWS, function=function))


@FULL
@pytest.mark.parametrize(
    ("name", "most", "draws", "chosen"),
    [
        ("Krea 2", NEAR, 1, {"width": 128, "txtdim": 64, "features": 128}),
        ("SD 1.5", NEAR, 6, {}),
        ("PiD", 1.9e-3, 6, {}),
    ],
)
def test_other_draws_and_widths_of_a_double(inside: Inside, name: str, most: float, draws: int, chosen: dict) -> None:
    for seed in range(draws):
        found = inside.play("core_sweep", "drawn", name=name, scenes=STEADY, seed=seed, late=True, **chosen)
        assert max(each["fit"] for each in found.values()) <= most, seed


@pytest.mark.parametrize("kernel", ["sage", "int8"])
@pytest.mark.parametrize("name", ["LTXV", *(pytest.param(each, marks=FULL) for each in EMULATED)])
def test_a_package_s_kernel_is_given_what_it_computes_as_well_as_before(inside: Inside, name: str, kernel: str) -> None:
    """In emulation: int8 operands, and for SageAttention sums in fp16."""
    found = inside.play("core_sweep", "emulated", name=name, kernel=kernel, scenes=STEADY + ROWS)
    if found is None:
        pytest.skip("this ComfyUI has no such class or kernel")
    assert found["own"] > 1e-3, "the kernel is exact: the test tests nothing"
    said = {"sage": "by attention_sage", "int8": "by comfy-kitchen's int8 kernel"}[kernel]
    for scene, each in found["scenes"].items():
        assert each["error"] <= max(NEAR, 1.2 * found["own"]), (scene, each)
        assert (said if scene in STEADY else "exact in fp32") in each["told"]


@pytest.mark.parametrize("name", [each if each in AMPLIFY else pytest.param(each, marks=FULL) for each in CLASSES])
def test_a_network_with_loud_rows_computes_each_step_in_fp32_and_says_so(inside: Inside, name: str) -> None:
    for rows in ROWS[-1:] if name == AMPLIFY[0] else ROWS:
        found = inside.play("core_sweep", "levels", name=name, rows=rows)
        if found is None:
            pytest.skip("this ComfyUI has no such class")
        (line,), safe = found["told"], SAFE.search(found["told"][0])
        bound = NEAR if line.startswith("plain fp16") else EXACT  # some layers, whose rows are even, stay in fp16
        assert found["error"] <= bound or not found["finite"], (rows, line)
        assert ("amplify what fp16 rounds" in line or "casts its stream" in line) and (safe is None or safe[1] == "0")


def within(found: dict | None) -> None:
    """Check the errors of each scene in which core's fp32 is finite; plain fp16 must not do where the scene is loud."""
    if found is None:
        pytest.skip("this ComfyUI has no such class")
    for scene, errors in found.items():
        assert not errors["finite"] or errors["fit"] <= NEAR, (scene, errors)
        assert scene != "loud" or errors["half"] > 10 * errors["fit"] or not errors["finite"], "nothing is loud"


@pytest.mark.parametrize("row", UNSAMPLED)
def test_networks_that_core_s_nodes_call_by_themselves_are_left_and_said(inside: Inside, row: str) -> None:
    found = inside.play("core_sweep", "unsampled", row=row)
    if found is None:
        pytest.skip("this ComfyUI has no such class")
    assert found["same"] and "without the sampler" in found["decided"][0] and len(found["decided"]) == 1


def test_a_residual_of_1e7_and_of_1e12(inside: Inside) -> None:
    found = inside.play("core_threads", "large", name="MiniMax H3", peak=1e7)
    if found is None:
        pytest.skip("this ComfyUI has no such class")
    assert found <= NEAR
    assert inside.play("core_threads", "large", name="MiniMax H3", peak=1e12) <= NEAR


def test_a_second_decode_that_is_black(inside: Inside) -> None:
    found = inside.play("core_threads", "second_decode", fault="black")
    assert found["first"] <= NEAR and found["second"] <= NEAR and found["said"]


@pytest.mark.parametrize("fault", ["noise", "false colour"])
def test_a_second_decode_of_noise_or_false_colour(inside: Inside, fault: str) -> None:
    found = inside.play("core_threads", "second_decode", fault=fault)
    assert found["first"] <= NEAR and found["second"] <= NEAR
    assert "other pixels than the CPU makes" in found["said"][0]


def test_a_schedule_that_leaks(inside: Inside) -> None:
    found = inside.play("core_threads", "leaked_schedule", name="Wan 2.1")
    (said,) = found["said"]
    assert found["error"] > NEAR and said.startswith(
        "the copy of model_sampling.sigmas on the card is not what was loaded"
    )


def test_a_schedule_of_another_node_is_let_be(inside: Inside) -> None:
    assert inside.play("core_threads", "another_schedule", name="SDXL") == {"finite": True, "said": []}


def test_an_attention_that_is_wrong_for_views(inside: Inside) -> None:
    found = inside.play("core_threads", "views", name="Wan 2.1")
    assert found["trusted"] > 10 * NEAR and found["error"] <= NEAR
    assert any("views of few tokens" in line for line in found["said"])


def test_nan_that_comes_once(inside: Inside) -> None:
    found = inside.play("core_threads", "once", name="Wan 2.1")
    assert found["error"] <= NEAR and found["said"]


def test_fp8_weights_on_a_mac(inside: Inside) -> None:
    assert inside.play("core_threads", "without_fp8", name="Wan 2.1")["error"] <= NEAR


def test_a_release_is_run_with_each_file_of_this_layer() -> None:
    """But for what is asked of a package of its own: core's templates."""
    files = {path.name for path in (PAGE.parents[1] / "tests/host").glob("test_core_*.py")}
    assert files - {"test_core_templates.py"} == set(SUITE.values()) - {"test_doctor.py"}
    assert {len(row) for row in table("releases")} == {len(HEADS["releases"])}, "docs/core-models.md is old"


def test_the_table_of_threads_is_what_the_tests_hold() -> None:
    assert table("threads") == [[each.numbers, each.reported, each.now, f"`{each.test}`"] for each in THREADS]
    for each in THREADS:
        file, _, name = each.test.partition("::")
        assert f"def {name}(" in (PAGE.parents[1] / "tests/host" / file).read_text(encoding="utf-8"), each.test
