"""One video on several processes is the video of one process, in every family."""

import json
from pathlib import Path
from typing import Any

import pytest
import ranks
import split_cases
import torch
from simulated import accelerator

pytestmark = pytest.mark.farm
BOUND = 8  # units in the last place of the largest value: products of fewer rows may add up in another order
DTYPES = {"bf16": torch.bfloat16, "fp16-safe": torch.float16}
ON_THREE = [*split_cases.PLAIN, "ltx, bf16", "ltx, fp16-safe", "hunyuan_video_i2v, fp16-safe", "mochi, fp16-safe"]


@pytest.fixture(scope="module")
def built(tiny_folder: Path) -> Path:
    """Where all checkpoints are."""
    for names in split_cases.MODELS.values():
        for name in names:
            split_cases.model_folder(name, tiny_folder)
    return tiny_folder


@pytest.fixture(scope="module")
def found(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """By number of ranks, what each rank found, by function of ``split_cases``."""
    made: dict[int, Any] = {}

    def on_ranks(size: int) -> Any:
        if size not in made:
            folder = tmp_path_factory.mktemp(f"ranks{size}")
            (folder / "built").write_text(str(built))
            (folder / "plan").write_text(json.dumps(PLANS[size]))
            made[size] = ranks.results(ranks.start("split_cases", "everything", size, folder), folder)
        return made[size]

    return on_ranks


ON_TWO = [name for name in split_cases.CASES if accelerator.available() or "offload" not in name]
PAIRS = [(2, name) for name in ON_TWO] + [(3, name) for name in ON_THREE]
PAIRS += [(4, "ltx"), (4, "hunyuan_video")]


BRANCHES = {2: ["ltx", "hunyuan_video", "hunyuan_video_15", "framepack", "mochi"], 4: ["ltx_condition"]}
ONLY = {"time of the first tokens": "ltx", "leading tokens of all": "hunyuan_video_i2v"}
WRONG = [
    f"{model}: {fault}"
    for fault in split_cases.FAULTS
    for model in ("ltx", "hunyuan_video_i2v", "mochi")
    if ONLY.get(fault, model) == model and not (model == "ltx" and fault == "text before video")
]
RIGHT = [f"{model}: none" for model in split_cases.MODELS]
PLANS: dict[int, dict[str, list[str]]] = {
    size: {"every_case": [case for number, case in PAIRS if number == size]} for size in (2, 3, 4)
}
PLANS[2] |= {"every_branch": BRANCHES[2], "decodes": list(split_cases.DECODES), "twins": [*WRONG, *RIGHT]}
PLANS[4] |= {"every_branch": BRANCHES[4]}


def compared(each: list[dict[str, split_cases.Compared]], case: str) -> tuple[float, float]:
    """Largest difference and value of a case, all of whose ranks have the same latents."""
    assert len({told[case][2] for told in each}) == 1, "all ranks have the same latents"
    (pair,) = [(difference, largest) for difference, largest, _ in (told[case] for told in each) if largest is not None]
    return pair


@pytest.mark.parametrize(("size", "case"), PAIRS)
def test_split_is_whole(found: Any, size: int, case: str) -> None:
    difference, largest = compared([rank["every_case"] for rank in found(size)], case)
    dtype = DTYPES.get(case.rpartition(", ")[2], torch.float32)
    print(f"{size} ranks, {case}: {difference:.2g} of {largest:.3g}")
    assert largest > 0.1 and difference <= BOUND * torch.finfo(dtype).eps * largest


@pytest.mark.parametrize("size", BRANCHES)
def test_branches_of_guidance_on_halves_of_the_ranks(size: int, found: Any) -> None:
    """Equal where each branch is a call of its own; LTX-Video and Mochi have both in a batch of two on one device."""
    for case in BRANCHES[size]:
        difference, largest = compared([rank["every_branch"] for rank in found(size)], case)
        print(f"branches on {size} ranks, {case}: {difference:.2g} of {largest:.3g}")
        assert largest > 0.1 and difference <= 2 * BOUND * torch.finfo(torch.float32).eps * largest


def test_regions_of_a_decode_on_all_ranks(found: Any) -> None:
    leader, other = [rank["decodes"] for rank in found(2)]
    assert set(leader) == set(split_cases.DECODES)
    for case, (equal, own, alone) in leader.items():
        print(f"decode {case}: {own} and {other[case][1]} calls of the decoder, {alone} alone")
        assert equal, case
        assert own + other[case][1] == alone and 9 * other[case][1] >= 4 * alone > 0, "each call once, shared out"


def test_the_twin_finds_every_wrong_split_and_no_right_one(found: Any) -> None:
    for said in (rank["twins"] for rank in found(2)):
        assert [case for case in WRONG if "over 2 devices" not in said[case]] == []
        assert [said[case] for case in RIGHT if said[case]] == []
