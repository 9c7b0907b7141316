"""One video on several processes is the video of one process, in every family."""

from __future__ import annotations

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


def on_ranks(function: str, size: int, folder: Path, built: Path, cases: list[str]) -> list[Any]:
    """What ``function`` of ``split_cases`` returns on each rank."""
    (folder / "built").write_text(str(built))
    (folder / "cases").write_text("\n".join(cases))
    return ranks.results(ranks.start("split_cases", function, size, folder), folder)


@pytest.fixture(scope="module")
def differences(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """By number of ranks, what each rank found of each case."""
    made: dict[int, Any] = {}

    def of(size: int) -> Any:
        if size not in made:
            cases = [case for number, case in PAIRS if number == size]
            made[size] = on_ranks("every_case", size, tmp_path_factory.mktemp(f"ranks{size}"), built, cases)
        return made[size]

    return of


ON_TWO = [name for name in split_cases.CASES if accelerator.available() or "offload" not in name]
PAIRS = [(2, name) for name in ON_TWO] + [(3, name) for name in ON_THREE]
PAIRS += [(4, "ltx"), (4, "hunyuan_video")]


@pytest.mark.parametrize(("size", "case"), PAIRS)
def test_split_is_whole(differences: Any, size: int, case: str) -> None:
    each = [found[case] for found in differences(size)]
    difference, largest, _ = each[0]
    dtype = DTYPES.get(case.rpartition(", ")[2], torch.float32)
    print(f"{size} ranks, {case}: {difference:.2g} of {largest:.3g}")
    assert largest > 0.1 and difference <= BOUND * torch.finfo(dtype).eps * largest
    assert len({digest for _, _, digest in each}) == 1, "all ranks have the same latents"


@pytest.mark.parametrize("size", [2, 4])
def test_branches_of_guidance_on_halves_of_the_ranks(size: int, built: Path, tmp_path: Path) -> None:
    """Equal where each branch is a call of its own; LTX-Video and Mochi have both in a batch of two on one device."""
    cases = ["ltx", "hunyuan_video", "hunyuan_video_15", "framepack", "mochi"] if size == 2 else ["ltx_condition"]
    each = on_ranks("every_branch", size, tmp_path, built, cases)
    for case in cases:
        difference, largest, _ = each[0][case]
        print(f"branches on {size} ranks, {case}: {difference:.2g} of {largest:.3g}")
        assert largest > 0.1 and difference <= 2 * BOUND * torch.finfo(torch.float32).eps * largest
        assert len({found[case][2] for found in each}) == 1


def test_regions_of_a_decode_on_all_ranks(built: Path, tmp_path: Path) -> None:
    leader, other = on_ranks("decodes", 2, tmp_path, built, [])
    for case, (equal, own, alone) in leader.items():
        print(f"decode {case}: {own} and {other[case][1]} calls of the decoder, {alone} alone")
        assert equal, case
        assert own + other[case][1] == alone and other[case][1] >= alone // 2 > 0, "each call once, shared out"


def test_the_twin_finds_every_wrong_split_and_no_right_one(built: Path, tmp_path: Path) -> None:
    models = ("ltx", "hunyuan_video_i2v", "mochi")
    only = {"time of the first tokens": "ltx", "leading tokens of all": "hunyuan_video_i2v"}
    wrong = [
        f"{model}: {fault}"
        for fault in split_cases.FAULTS
        for model in models
        if only.get(fault, model) == model and not (model == "ltx" and fault == "text before video")
    ]
    right = [f"{model}: none" for model in split_cases.MODELS]
    for said in on_ranks("twins", 2, tmp_path, built, [*wrong, *right]):
        assert [case for case in wrong if "over 2 devices" not in said[case]] == []
        assert [said[case] for case in right if said[case]] == []
