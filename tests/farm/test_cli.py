"""The command `anygpu-farm` where it needs no Ray."""

from pathlib import Path

import pytest
from anygpu.farm import cli
from anygpu.pipelines.records.job_folder import JobFolder
from anygpu.pipelines.records.job_lists import Batch, queue_jobs


def test_cancel_ends_the_jobs_it_means_and_names_a_key_that_none_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model").mkdir()
    folder = JobFolder(tmp_path / "farm")
    first, second = queue_jobs(folder, "foxes", tmp_path / "model", Batch(["a fox"], [1, 2])).keys
    assert cli.main(["cancel", str(folder.root), first[:12]]) == 0
    assert folder.cancelled() == {first} and not capsys.readouterr().err
    assert cli.main(["cancel", str(folder.root), second[:12], "xyz"]) == 2
    assert folder.cancelled() == {first, second}
    assert "whose key begins with 'xyz'; expected the first digits of a key" in capsys.readouterr().err
