"""``anygpu prove`` from end to end without a GPU: on the CPU, the simulated device, and a small and a faulty one."""

import contextlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from anygpu import cli
from anygpu.compat import measures, probe_results
from anygpu.compat.device import probes
from anygpu.compat.device.facts import facts_for
from anygpu.compat.device.work import Pace
from anygpu.compat.measures import device_parts
from anygpu.compat.probe_results import probe_results_of
from anygpu.compat.proof import Figure, proof_in
from anygpu.pipelines import stacks
from anygpu.pipelines.registry import FAMILIES
from anygpu.pipelines.stacks import StackSizes, stack_figures, stack_parts

from simulated import accelerator

GIB = 2**30
MARGIN = 0.15  # of a forecast: what the planner leaves free


def proved(folder: Path, device: str) -> dict[str, dict[str, Figure]]:
    """The figures of a whole run by part and name."""
    words = ["prove", "--tiny", "--device", device, "--output", str(folder / "a.json"), "--state", str(folder)]
    assert cli.main(words) == 0
    parts = proof_in((folder / "a-tiny.json").read_bytes()).parts
    assert (folder / "a-tiny.svg").stat().st_size > 1000
    return {part.name: {figure.what: figure for figure in part.figures} for part in parts}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates and products of a transformer's size cost minutes on a CPU; others test them."""
    monkeypatch.setattr(probes, "PRODUCTS", probes.PRODUCTS[:1])
    monkeypatch.setattr(probe_results, "packed_probes", lambda facts: {})
    monkeypatch.setattr(stacks, "TINY", replace(stacks.TINY, cards=(6,)))
    pace = Pace(2e12, 1e12, 1e12, 1e11, 5e-6)
    monkeypatch.setattr(measures, "measured_pace", lambda device, dtype: pace)
    for module in (measures, stacks):
        monkeypatch.setattr(module, "pace_of", lambda *_: pace)


def test_the_whole_command_on_the_simulated_device(acc, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = proved(tmp_path, str(acc))
    names = ["probes", "kernels fp32", "rates fp32", "attention fp32", "Conv3d fp32", "Fit", "8-bit products"]
    decoders = [f"decode {family}" for family in FAMILIES if family != "framepack"]
    assert list(found) == [*names, *(f"memory {family}" for family in FAMILIES), *decoders]
    for part in decoders:
        (peak, _, whole) = found[part].values()
        assert peak.what == "peak on 8 GiB, whole in fp32" and not peak.fault and not whole.fault
        assert abs(peak.measured / peak.modelled - 1) <= MARGIN, part
        assert whole.what == "decode, whole in fp32" and whole.measured and whole.modelled
    assert not [figure for part in names[1:6] for figure in found[part].values() if figure.fault]
    for family in FAMILIES:
        mine = found[f"memory {family}"]
        peaks = [figure for figure in mine.values() if figure.what.startswith("peak")]
        assert peaks and all(figure.measured and figure.modelled and not figure.fault for figure in peaks)
        assert {"forward", "forward, streamed"} <= set(mine)
    told = capsys.readouterr().out
    assert "part 1 of 16: probes" in told and "16 of 16 parts" in told
    before = (tmp_path / "a-tiny.json").read_bytes()
    proved(tmp_path, str(acc))
    assert (tmp_path / "a-tiny.json").read_bytes() == before, "all parts were there"
    assert capsys.readouterr().out.count("done before") == 16


@pytest.mark.full
def test_a_card_is_as_small_as_wanted_and_forecasts_hold(acc, tmp_path: Path) -> None:
    """Weights of 8.6 MB: they stay, come by block, and by layer; torch gives out no more than the card has."""
    sizes = StackSizes(blocks=4, width=64, height=64, frames=9, cards=(0.002, 0.004, 0.016, 1.0), published=False)
    facts = facts_for(acc)
    family = FAMILIES["ltx"]
    found = list(stack_figures(family, facts, probe_results_of(facts, tmp_path), sizes))
    peaks = [figure for figure in found if "peak" in figure.what]
    modes = [figure.what.rpartition(" ")[2] for figure in peaks]
    assert modes[-1] == "none" and {"group", "sequential"} & set(modes), modes
    for card, figure in zip(sizes.cards, peaks, strict=True):
        assert not figure.fault and figure.measured is not None and figure.measured <= card, figure
    whole = peaks[-1]
    assert whole.modelled is not None and abs(whole.measured / whole.modelled - 1) <= MARGIN
    assert accelerator.memory().capacity_bytes > GIB, "the limit is lifted"


def test_out_of_memory_is_a_figure(acc, tmp_path: Path) -> None:
    sizes = StackSizes(blocks=2, width=64, height=64, frames=9, cards=(0.0001, 1.0), published=False)
    facts = facts_for(acc)
    found = list(stack_figures(FAMILIES["ltx"], facts, probe_results_of(facts, tmp_path), sizes))
    peaks = {figure.what: figure for figure in found if "peak" in figure.what}
    assert "memory" in peaks["peak on 0.0001 GiB"].fault and not peaks["peak on 1 GiB, offload none"].fault


def test_a_card_of_4_gb_stands_for_no_larger_one(acc, tmp_path: Path) -> None:
    with accelerator.limit(4 * GIB):
        facts = facts_for(acc)
        parts = {part.name: part for part in stack_parts(facts, probe_results_of(facts, tmp_path), stacks.TINY)}
        found = {figure.what: figure for figure in parts["memory mochi"].figures()}
    assert not [name for name in found if "peak on" in name]
    assert found["forward"].measured is not None


def test_without_diffusers_plain_blocks_stand_in(acc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("diffusers", "transformers"):
        monkeypatch.setitem(sys.modules, package, None)
    sizes, facts = stacks.TINY, facts_for(acc)
    (first, *_) = stack_parts(facts, probe_results_of(facts, tmp_path), sizes)
    found = list(first.figures())
    assert found and all(figure.what.startswith("plain blocks, ") for figure in found)
    peaks = [figure for figure in found if "peak" in figure.what]
    assert peaks and all(figure.measured and figure.modelled is None and not figure.fault for figure in peaks)


def test_a_kernel_that_is_refused_or_wrong_is_named(acc, tmp_path: Path) -> None:
    facts = facts_for(acc)
    parts = {part.name: part for part in device_parts(facts, probe_results_of(facts, tmp_path), measures.TINY)}

    def refuse(op: str, arguments: list) -> None:
        if op.endswith("_mm") or arguments[0].ndim == 5:
            raise RuntimeError("no engine for this")

    def spoil(op: str, arguments: list, results: list) -> None:
        results[0].mul_(1.5)

    def faults(part: str) -> dict[str, str]:
        return {figure.what: figure.fault for figure in parts[part].figures()}

    with contextlib.ExitStack() as stack:
        for pattern, before, after in (("aten::convolution*", refuse, None), ("aten::addmm", None, spoil),
                                       ("aten::_scaled_mm", refuse, None)):  # fmt: skip
            stack.enter_context(accelerator.hook(pattern, before, after))
        conv, fit, eight = faults("Conv3d fp32"), faults("Fit"), faults("8-bit products")
    assert conv["3x3x3, native, to fp64"] == "fails or is wrong" and not conv["1x1x1, pointwise, to fp64"]
    assert fit["fp32"] == "wrong"
    assert eight == {
        "int8, to its own operands": "", "int8": "",
        "float8_e4m3fn": "RuntimeError: no engine for this",
    }  # fmt: skip


def test_values_beyond_fp16_are_a_fault_in_no_dtype_of_a_sound_device() -> None:
    every = replace(measures.TINY, dtypes=(torch.float32, torch.bfloat16, torch.float16))
    found = {figure.what: figure.fault for figure in measures.fit_errors(facts_for("cpu"), every)}
    assert found == {"fp32": "", "bf16": "", "safe fp16": ""}


def test_it_runs_on_a_cpu(tmp_path: Path) -> None:
    found = proved(tmp_path, "cpu")
    assert found["memory ltx"]["forward"].measured and not [name for name in found["memory ltx"] if "peak" in name]
    assert not [figure for figure in found["Conv3d fp32"].values() if figure.fault]
    assert all(figure.measured for figure in found["decode ltx"].values())
    assert StackSizes().cards == (6, 8, 12, 16, 24)


@pytest.mark.full
@pytest.mark.skipif(sys.platform == "win32", reason="makes links")
def test_a_python_with_torch_alone_is_enough(tmp_path: Path) -> None:
    """No diffusers, safetensors, psutil, Pillow or numpy: plain blocks stand in for the families' own."""
    library, bare = Path(torch.__file__).parents[1], tmp_path / "library"
    bare.mkdir()
    needed = ("torch", "torchgen", "functorch", "sympy", "mpmath", "networkx", "jinja2", "markupsafe", "filelock",
              "fsspec", "typing_extensions.py", "setuptools", "_distutils_hack", "triton")  # fmt: skip
    for name in filter(lambda name: (library / name).exists(), needed):
        (bare / name).symlink_to(library / name)
    (bare / "anygpu").symlink_to(Path(cli.__file__).parent)
    words = ["prove", "--tiny", "--device", "cpu", "--output", str(tmp_path / "a.json"), "--state", str(tmp_path)]
    variables = {"PYTHONPATH": str(bare), "PATH": "", "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    variables["ONEDNN_MAX_CPU_ISA"] = os.environ["ONEDNN_MAX_CPU_ISA"]  # see tests/conftest.py
    command = [sys.executable, "-S", "-m", "anygpu.cli", *words]
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    parts = proof_in((tmp_path / "a-tiny.json").read_bytes()).parts
    figures = [figure for part in parts for figure in part.figures]
    assert len(parts) == 16 and not [figure for figure in figures if figure.fault]
    assert sum(figure.what == "plain blocks, forward" for figure in figures) == len(FAMILIES)
