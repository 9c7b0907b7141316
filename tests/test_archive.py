"""The registry's archive alone, in an empty folder, is the whole pack: its nodes, what they read, and a clip."""

import json
from pathlib import Path

import archive
import forked
import pytest
import schemas

TESTS = Path(__file__).resolve().parent
LEFT_OUT = {"tests", "training", "benchmarks", "farm", ".github", ".venv", ".build", "Makefile", "setup.py"}
# The nodes of the pack in the folder, under another package's name, are described, and draw a clip where that is asked.
RUN = """
import sys
from pathlib import Path

folder, base, tests = map(Path, sys.argv[1:4])
draws = sys.argv[4]
sys.path.append(str(tests))
import schemas, small_comfyui

schemas.loaded_from(folder, "custom_nodes_anygpu")
with small_comfyui.comfyui(base, "custom_nodes_anygpu") as module:
    nodes = module("nodes")
    written = schemas.text_of(schemas.snapshot(nodes))
    assert nodes.__file__.startswith(str(folder))
    choice = next(name for name in module("host.folders").model_choices() if "LTX" in name)
    (pipeline, _, _) = small_comfyui.run(nodes, "LoadPipeline", model=choice).result
    if draws == "draws":
        prompt = small_comfyui.run(nodes, "EncodePrompt", pipeline=pipeline, text="a red square").result[0]
        latent = small_comfyui.run(nodes, "Sample", pipeline=pipeline, prompt=prompt, steps=1).result[0]
        frames = small_comfyui.run(nodes, "Decode", pipeline=pipeline, latent=latent).result[0][0]
        assert frames.isfinite().all() and frames.std() > 0
(base / "schemas.json").write_text(written)
"""


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return archive.unpacked(tmp_path_factory.mktemp("archive"))


def test_it_holds_what_comfyui_reads_and_nothing_of_ours_alone(pack: Path) -> None:
    assert not LEFT_OUT & {path.name for path in pack.iterdir()}
    for name in ("__init__.py", "pyproject.toml", "requirements.txt", "LICENSE", "README.md", "web/docs", "locales/zh"):
        assert (pack / name).exists(), name
    assert {path.name for path in (pack / "workflows").glob("*.json")} == {
        path.name for path in (TESTS.parent / "workflows").glob("*.json")
    }
    assert len(list((pack / "pipelines" / "demo" / "models").glob("*/README.md"))) == 5


@pytest.mark.parametrize("what", ["loads", pytest.param("draws", marks=pytest.mark.full)])
def test_its_nodes_are_the_nodes_and_run(pack: Path, tmp_path: Path, what: str) -> None:
    variables = {"PYTHONDONTWRITEBYTECODE": "1", "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = forked.run(RUN, pack, tmp_path, TESTS, what, folder=tmp_path, variables=variables)
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads((tmp_path / "schemas.json").read_text(encoding="utf-8"))
    assert written == json.loads(schemas.SNAPSHOT.read_text(encoding="utf-8"))
