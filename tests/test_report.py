"""The report and the check: what they say of machines, how they look, and how the command ends."""

from dataclasses import replace

import pytest
import torch
from anygpu import cli
from anygpu.compat import check as checks
from anygpu.compat.check import AVOIDED, FAILED, NEWS, PASSED, check, exit_code
from anygpu.compat.device.facts import facts_for
from anygpu.compat.device.probe_store import OK, UNKNOWN, WRONG, ProbeResult, ProbeStore
from anygpu.compat.report import ANSWERED, CHANGES, DECIDED, DEVICE, KERNELS, KNOWN, changes_for, report_on
from anygpu.compat.transforms import conv3d_choice
from anygpu.pipelines import report
from anygpu.pipelines.base import Silent
from anygpu.pipelines.report import precisions
from simulated import accelerator, profiles

CPU = facts_for("cpu")
GOOD = {name: ProbeResult(OK) for name in ProbeStore(CPU).probes}


@pytest.fixture
def machine():
    """Makes a machine of `profiles` for a block."""
    if reason := accelerator.reason():
        pytest.skip(reason)
    return profiles.on


def lines_of(report, heading):
    return {line.subject: line for line in dict(report.sections)[heading]}


@pytest.mark.full
@pytest.mark.parametrize("name", profiles.PROFILES)
def test_the_report_has_a_reason_for_every_family_and_a_line_for_every_probe(machine, name):
    with machine(name) as profile:
        store = ProbeStore(profile.facts)
        report = report_on(profile.facts, store, precisions())
    decided = lines_of(report, DECIDED)
    assert set(decided) == set(precisions())
    assert all("transformer" in line.verdict and len(line.why) > 10 for line in decided.values())
    assert set(lines_of(report, ANSWERED)) == {probe.partition(".")[0] for probe in store}
    assert any(subject.startswith("attention") for subject in lines_of(report, KERNELS))
    assert lines_of(report, DEVICE)["device"].verdict == str(profile.facts)
    text = report.text()
    assert all("\n" not in line.why + line.verdict for _, lines in report.sections for line in lines)
    for row in dict(report.sections).get(KNOWN, ()):
        assert row.subject in text


def test_what_is_wrong_and_what_was_said_stands_in_the_report(machine):
    with machine("turing") as profile:
        text = report_on(profile.facts, ProbeStore(profile.facts), precisions()).text()
    assert "bf16 unusable" in text
    assert "slow_conv3d_forward" in text
    assert "fp16-safe" in text
    assert "pytorch#148322" in text


def test_where_conv3d_is_missing_the_report_says_what_stands_in(machine):
    with machine("no-conv3d") as profile:
        kernels = lines_of(report_on(profile.facts, ProbeStore(profile.facts), precisions()), KERNELS)
    forms = {subject: line.verdict for subject, line in kernels.items() if subject.startswith("Conv3d")}
    assert set(forms.values()) <= {"patches", "pointwise", "frames", "matmul"}


@pytest.mark.parametrize(
    ("facts", "answers", "said"),
    [
        (profiles.facts_of("turing"), {"matmul.fp32": ProbeResult(WRONG)}, "matmul.fp32: should work on this device"),
        (replace(profiles.facts_of("turing"), arch="sm61"), {}, "not for sm61.*whl/cu126"),
        (
            replace(profiles.facts_of("gfx1151"), versions={"rocm": "6.4"}),
            {"matmul.bf16": ProbeResult(WRONG)},
            "torch for ROCm 7.1",
        ),
        (
            replace(profiles.facts_of("mps-like"), versions={"macos": "13.1"}),
            {"matmul.bf16": ProbeResult(WRONG)},
            "macOS 14",
        ),
        (replace(CPU, torch_version="2.13.0+cpu"), {}, "This build of torch supports no GPU.*whl/cu130"),
    ],
)
def test_it_says_which_torch_or_driver_to_change(facts, answers, said):
    import re

    assert any(re.search(said, change) for change in changes_for(facts, {**GOOD, **answers}))


def test_a_good_machine_has_nothing_to_change():
    facts = replace(profiles.facts_of("gfx1201"), versions={"rocm": "7.14", "torch": "2.12"})
    assert changes_for(facts, GOOD) == []
    assert CHANGES not in dict(report_on(replace(facts, device=torch.device("cpu")), GOOD, precisions()).sections)


def test_the_table_is_a_picture_with_room_for_every_line(machine):
    with machine("gfx1151") as profile:
        shown = report.checked(report.hardware_report(profile.facts, None), profile.facts, None, Silent())
        second = lines_of(shown, DEVICE)["acc:1"]
    assert second.verdict and second.why.endswith("GB free"), "each further card has a row"
    assert report._further(torch.device("cpu")) == ()
    picture = report.drawn(shown)
    assert picture.shape[0] == 1
    assert picture.shape[2:] == (1600, 3)
    assert picture.shape[1] > 18 * sum(len(lines) for _, lines in shown.sections)
    assert picture.min() >= 0
    assert 0.8 < picture.max() <= 1, "there is writing on it"
    for left, right in ((0, 16), (1590, 1600)):
        assert picture[:, :, left:right].std(dim=2).max() < 1e-6, "nothing is written over an edge"


# ---- the check -----------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("name", profiles.PROFILES)
def test_the_check_passes_on_every_machine_since_auto_avoids_what_fails(machine, name, tmp_path):
    with machine(name) as profile:
        found = list(check(profile.facts, ProbeStore(profile.facts, tmp_path), precisions()))
    assert exit_code(found) == 0, [str(one) for one in found if one.status == FAILED]
    tried = {one.name.split()[0].rstrip(",") for one in found}
    assert {"conversion", "loader", "Conv3d", "attention"} <= tried
    avoided = {one.name for one in found if one.status == AVOIDED}
    assert bool(avoided) == (name in ("gfx1151",)) or name in ("turing", "gtx16xx", "no-conv3d")


def test_the_check_fails_where_something_used_is_wrong(machine, tmp_path):
    def halved(op, arguments, results):
        results[0].mul_(0.5)

    with (
        machine("no-conv3d") as profile, accelerator.hook("aten::mm", None, halved),
        accelerator.hook("aten::addmm", None, halved), accelerator.hook("aten::bmm", None, halved),
    ):  # fmt: skip
        found = list(check(profile.facts, ProbeStore(profile.facts, tmp_path), precisions()))
    assert exit_code(found) == 1
    assert any(one.status == FAILED and one.name.startswith("Conv3d") for one in found)


def test_a_conversion_that_found_no_room_does_not_fail_the_check():
    results = {"cast.fp32_to_bf16": UNKNOWN, "cast.bf16_to_fp32": WRONG, "cast.fp32_to_fp16": OK}
    found = checks._conversions({name: ProbeResult(status) for name, status in results.items()}, {"fp32", "bf16"})
    assert [one.status for one in found] == [AVOIDED, FAILED, PASSED]


def test_a_back_end_that_refuses_a_dtype_by_type_error_is_checked_to_the_end(monkeypatch):
    def refuse(*_, **__):
        raise TypeError("BFloat16 is not supported on MPS")

    monkeypatch.setattr(conv3d_choice, "convolve", refuse)
    for name in ("bits_of", "attention_for", "chunked"):
        monkeypatch.setattr(checks, name, refuse)
    found = [*checks._loader(CPU, set()), *checks._attention(CPU, {}, set())]
    assert {(one.status, one.detail) for one in found} == {(AVOIDED, "BFloat16 is not supported on MPS")}
    layer = conv3d_choice.Conv3dLayer("a", 4, 4, (3, 3, 3), conv3d_choice.Geometry(), torch.bfloat16)
    assert conv3d_choice.form_error(conv3d_choice.Conv3dMethod.NATIVE, layer, CPU.device) is None


def test_the_check_says_which_known_bugs_a_newer_driver_has_mended(machine, tmp_path):
    with machine("gfx1201") as profile:
        facts = replace(profile.facts, arch="gfx1100")
        news = [one for one in check(facts, ProbeStore(facts, tmp_path), precisions()) if one.status == NEWS]
    assert [one.name for one in news] == ["known bug gfx11_bf16_off"]


def test_a_device_that_does_not_answer_ends_the_check(monkeypatch, tmp_path):
    monkeypatch.setattr("anygpu.compat.check.device_fault", lambda device: "device lost")
    found = list(check(CPU, ProbeStore(CPU, tmp_path), precisions()))
    assert [(one.status, one.detail) for one in found] == [(FAILED, "device lost")]


# ---- the command ---------------------------------------------------------------------------------


def test_the_command_reports_and_keeps_the_answers(tmp_path, capsys):
    assert cli.main(["report", "--device", "cpu", "--state", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert all(title in said for title in precisions())
    assert "a CPU computes fp32 fastest" in said
    assert list(tmp_path.glob("probes-*.json"))


def test_the_command_checks_in_one_line_each(tmp_path, capsys):
    assert cli.main(["check", "--device", "cpu", "--state", str(tmp_path)]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert all(line.split()[0] in (PASSED, AVOIDED, FAILED, NEWS) for line in lines)
    assert last == f"{len(lines)} checks, nothing fails that would be used"


@pytest.mark.parametrize("command", ["report", "check"])
def test_an_unknown_device_is_one_line(tmp_path, capsys, command):
    assert cli.main([command, "--device", "toaster", "--state", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "'toaster' does not answer" in error


def test_an_unwritable_folder_stands_in_the_report(tmp_path, capsys):
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert cli.main(["report", "--device", "cpu", "--state", str(tmp_path / "file")]) == 0
    assert "probe results cannot be kept" in capsys.readouterr().out
