"""ComfyUI's own functions fail or lie when this pack asks them: the same clip; a failure is said and leaves nothing."""

from pathlib import Path

import pytest

from host.inside.asking import Inside

pytestmark = pytest.mark.host
QUESTIONS = ("get_torch_device", "get_free_memory", "extra_reserved_memory", "minimum_inference_memory")
ORDERS = ("load_models_gpu", "free_memory", "throw_exception_if_processing_interrupted")
BEHAVIOURS = ["runtime", "os", "attribute", "process", "0", "-1", "None", "'much'", "()", "(-1, 5)", "1.5"]
full = pytest.mark.full


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_that_fails_or_lies_changes_no_clip(inside: Inside, question: str) -> None:
    found = inside.play("hostile", "asked", name="ltx", question=question, behaviours=["runtime", "None"])
    assert set(found.values()) == {0.0}, found


@full
@pytest.mark.parametrize("name", ["mochi", "framepack"])
@pytest.mark.parametrize("question", QUESTIONS)
def test_any_answer_changes_no_clip(inside: Inside, question: str, name: str) -> None:
    found = inside.play("hostile", "asked", name=name, question=question, behaviours=BEHAVIOURS)
    assert set(found.values()) == {0.0}, found


@pytest.mark.parametrize("order", ORDERS)
def test_an_order_that_fails_is_said_and_leaves_nothing(inside: Inside, order: str) -> None:
    found = inside.play("hostile", "ordered", name="ltx", order=order)
    assert "illegal memory access" in found["raised"] and found["left"] == 0
    assert found["next"] == 0.0


def test_a_farm_that_dies_meanwhile_says_so_in_one_line(inside: Inside, tmp_path: Path) -> None:
    said = inside.play("hostile", "dying_farm", folder=str(tmp_path))
    assert list(said) == ["ready", "submit", "standing", "result"]
    assert all(text.startswith("the farm at 'auto' failed (The actor is dead") for text in said.values()), said


def test_a_cancel_ends_jobs_that_are_still_being_handed_over(inside: Inside, tmp_path: Path) -> None:
    assert inside.play("hostile", "slow_farm", folder=str(tmp_path)) == ["ready", "submit", "cancel"]
