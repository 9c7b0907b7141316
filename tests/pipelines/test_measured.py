"""What the report and the load node recommend follows from rows of this device alone, and says where they come from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from anygpu.compat.device.facts import facts_for
from anygpu.pipelines.measured import COMMAND, ELSEWHERE, advice, advised
from anygpu.pipelines.report import hardware_report

FACTS = replace(facts_for("cpu"), name="Some GPU", backend="cuda")
HEAD = "date,device,torch,family,model,form,clip_s,over_neither,warm_up_s,pays_after,rounds,line\n"


def table(folder: Path, *rows: str, device: str = "Some GPU") -> Path:
    path = folder / "clips.csv"
    body = [f"2026-11-22,{device},2.13,ltx,LTX-Video,{row},5,any" for row in rows]
    path.write_text(HEAD + "\n".join(body) + "\n", encoding="utf-8")
    return path


def test_nothing_measured_says_how(tmp_path):
    other = table(tmp_path, "neither,10,1.0,10,", "both,5,2.0,70,12", device="Other GPU")
    for path in (other, tmp_path / "absent.csv"):
        (line,) = advice(FACTS, path)
        assert (line.verdict, line.why) == ("not measured on this device", COMMAND)
        (line,) = advice(FACTS, path, tmp_path / "benchmarks" / "clips.py")
        assert (line.verdict, line.why) == ("not measured on this device", ELSEWHERE), "no command that is not there"
        assert advised(FACTS, "ltx", path) == ()


def test_the_fastest_form_wins_with_its_price(tmp_path):
    path = table(tmp_path, "neither,10,1.0,10,", "kernels,8,1.25,8.5,1", "compile,7,1.43,67,20", "both,6.5,1.54,66,17")
    (line,) = advice(FACTS, path)
    assert line.subject == "clips of LTX-Video" and line.verdict == "kernels auto, compile on"
    assert line.why == "1.54x over neither, from clip 17 on; torch 2.13, 2026-11-22"
    assert advised(FACTS, "mochi", path) == ()
    (note,) = advised(FACTS, "ltx", path)
    assert note.startswith("fastest for LTX-Video on this device: kernels auto, compile on (1.54x")


def test_a_switch_that_gains_nothing_is_not_recommended(tmp_path):
    path = table(
        tmp_path, "neither,10,1.0,10,", "kernels,8,1.25,8.5,1", "compile,10.5,0.95,67,", "both,7.95,1.26,66,99"
    )
    assert advice(FACTS, path)[0].verdict == "kernels auto, compile off"
    newer = path.read_text() + "2026-11-23,Some GPU,2.14,ltx,LTX-Video,both,4,2.5,66,9,5,any\n"
    path.write_text(newer)
    assert advice(FACTS, path)[0].verdict == "kernels auto, compile on"


def test_the_report_has_the_lines(tmp_path):
    assert (
        "kernels and compile" in hardware_report("cpu", tmp_path).text()
        or "clips of" in hardware_report("cpu", tmp_path).text()
    )
