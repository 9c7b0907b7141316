"""Whole runs under ComfyUI's memory manager where room is short, core's nodes between, beside others' ways to run."""

import math

import pytest

from host.inside.asking import Inside

pytestmark = pytest.mark.host

FAMILIES = ("ltx", "hunyuan_video", "hunyuan_video_15", "framepack", "mochi")
SHARES = (1.0, 0.6, 0.4)
LEAST = 0.3  # of the full offloader: a text of 256 tokens takes a fifth of tiny LTX-Video
SAMPLED = {"ltx": (0.4, LEAST)}  # the other families and shares run with the long host tests
full = pytest.mark.full
ROUNDING = 1e-5  # frames in 0..1, fp32: another implementation adds the same numbers in another order


@pytest.mark.parametrize(
    ("name", "shares"), [*SAMPLED.items(), *(pytest.param(name, (*SHARES, LEAST), marks=full) for name in FAMILIES)]
)
def test_a_whole_run_fits_into_any_share_of_its_full_offloader(
    inside: Inside, name: str, shares: tuple[float, ...]
) -> None:
    found = inside.play("whole", "at_shares", name=name, shares=list(shares))
    assert found["weights"] >= 0.75, "the activations would hide what the weights do"
    for run in found["runs"]:
        assert run["different"] == [0.0, 0.0, 0.0], f"latents, core's picture, frames: {run}"
        said = [line for line in run["said"] if not line.startswith("the published script")]  # of a short prompt
        assert run["refusals"] == 0 and said == [], f"more was asked for than there is: {run}"
        assert 0 < run["peak"] <= run["share"]
        assert run["to_host"] < 0.02 + found["core"], "weights were copied back, beside those of core's VAE"
    assert found["left"] == 0


@pytest.mark.parametrize("name", ["ltx", *(pytest.param(name, marks=full) for name in FAMILIES[1:])])
def test_core_nodes_drive_ours_where_room_is_short(inside: Inside, name: str) -> None:
    found = inside.play("whole", "core_streamed", name=name)
    assert found["different"]["40 %"] <= ROUNDING and found["different"]["none"] == 0.0, "latents and frames"
    assert found["refusals"] == 0 and found["resident"] < 1.0


SURVIVED = {  # by stage, what is said when the run goes on
    "text": "encoding the prompt ran out of memory: again",
    "text moves": "memory ran out while the text_encoder was loading: continuing",
    "sampling moves": "memory ran out while the transformer was loading: continuing",
    "first step": "sampling ran out of memory: continuing",
    "last step": "sampling ran out of memory: continuing",
    "decoding moves": "memory ran out while the vae was loading: continuing",
    "decoding": "ran out of memory: again",
}


@pytest.mark.parametrize("name", ["ltx", *(pytest.param(name, marks=full) for name in FAMILIES[1:])])
def test_running_out_of_memory_at_any_stage_loses_nothing(inside: Inside, name: str) -> None:
    found = inside.play("whole", "starved", name=name)
    assert set(found) == set(SURVIVED)
    for stage, run in found.items():
        assert run["sprung"], f"nothing ran out of memory: {stage}"
        assert any(SURVIVED[stage] in line for line in run["said"]), (stage, run)
        assert run["different"] <= ROUNDING, stage


def test_others_move_more_and_hold_what_comfyui_cannot_see(inside: Inside) -> None:
    found = inside.play("ways", "compared", shares=[1.0, LEAST])
    rows = {row["way"]: row for row in found["rows"]}
    assert max(row["different"] for row in rows.values()) <= ROUNDING, "they did not run the same"
    whole, least = rows["AnyGPU, comfyui, 100%"], rows[f"AnyGPU, comfyui, {LEAST:.0%}"]
    by_hand, group = rows["unload all, move whole parts"], rows["bare diffusers, group"]
    assert whole["again_to_device_bytes"] < by_hand["again_to_device_bytes"] / 2, "it does not stay between runs"
    assert max(whole["to_host_bytes"], least["to_host_bytes"]) < by_hand["to_host_bytes"] / 50
    assert least["peak_bytes"] <= LEAST * found["full"] < group["peak_bytes"]
    assert least["again_to_device_bytes"] < group["again_to_device_bytes"]
    assert all(row["kept_bytes"] == row["known_bytes"] for row in (whole, least)), "ComfyUI cannot evict all of it"
    assert rows["bare diffusers, none"]["kept_bytes"] > 0 == rows["bare diffusers, none"]["known_bytes"]


def test_what_cannot_fit_or_is_gone_is_refused_before_anything_is_read(inside: Inside) -> None:
    small = inside.play("mistakes", "refused", limit=400_000)
    assert "0.4 MB left on acc:0 for the largest layer of the transformer" in small and " MB more" in small
    gone = inside.play("mistakes", "refused", devices={"vae": "acc:7"})
    assert gone.startswith("device 'acc:7' does not answer") and "\n" not in small + gone
    assert inside.play("mistakes", "refused", limit=8_000_000) == ""


def test_the_offload_may_change_between_sample_and_decode(inside: Inside) -> None:
    found = inside.play("mistakes", "offload_changed")
    assert len(found["different"]) == 8 and max(found["different"].values()) <= ROUNDING
    assert found["left"] == 0


def test_two_pipelines_may_share_a_part(inside: Inside) -> None:
    found = inside.play("mistakes", "shared_part")
    assert all(found["equal"])
    assert max(found["held"]) <= 1.0 + 1e-3, "the part was on the device twice"
    assert (found["left"], found["classes"]) == (0, 0)


def test_beside_dynamic_vram_our_patchers_are_the_base_class(inside: Inside) -> None:
    found = inside.play("dynamic", "beside_core", name="ltx")
    assert found["theirs"] == ["ModelPatcherDynamic", True]
    assert found["ours"] == ["PartPatcher"] and not found["dynamic"] and not found["base"]
    assert all(found["equal"]) and found["sampler"] == 0.0
    (theirs, partly), (left, ours), (back, again), _ = found["seen"]
    assert math.isclose(theirs, 1.0, rel_tol=1e-3) and partly < 1.0, "core's did not make ours leave"
    assert left == 0.0 and ours == 1.0, "ours did not make core's leave"
    assert math.isclose(back, 1.0, rel_tol=1e-3) and again < 1.0
    assert found["freed"] == [0, 0]
