"""A shared machine says what it is and nothing about its owner."""

import json
import random
import string
from dataclasses import fields, replace
from pathlib import Path

import machines_page
import pytest
from anygpu import cli
from anygpu.compat import redaction
from anygpu.compat.device.facts import facts_for
from anygpu.compat.device.probe_store import ProbeResult
from anygpu.compat.errors import InputError
from anygpu.compat.memory.statistics import StageCost
from anygpu.compat.proof import Figure, Finished, Proof
from anygpu.pipelines.records import machines
from anygpu.pipelines.records.machines import machine_of
from anygpu.pipelines.report import precisions

ROOT = Path(__file__).resolve().parents[2]
SECRETS = (
    *("/home/annette/models/x.safetensors", "~/secret/file", "C:\\Users\\Annette\\a.png", "\\\\nas\\films\\a.mp4"),
    *("'/mnt/c/Users/John Smith/x'", '"/Volumes/Bo Smith\'s Disk/x"', "'\\\\nas\\Jo Smith\\x'"),
    *("annette@example.org", "https://me:pass@host.example/x?token=1", "192.168.178.20", "fe80:0:0:0:1:2:3:4"),
    *(
        "hf_abcdefghijklmnopqrst",
        "sk-abcdefghijklmnop",
        "GPU-4f9c1a52-0b1d-4a4e-9d1c-5f2b6c7d8e9f",
        "aa:bb:cc:dd:ee:ff",
    ),
)
NAMES = ("annette", "annettes-tower")
FACTS = replace(facts_for("cpu"), name="NVIDIA GeForce RTX 2060", backend="cuda", arch="sm75", driver="580.12")


@pytest.mark.parametrize("seed", range(5))
def test_no_secret_comes_through_wherever_it_stands(seed: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rng = random.Random(seed)

    def hidden() -> str:
        words = ["".join(rng.choices(string.ascii_letters + ".,()=", k=rng.randint(1, 8))) for _ in range(3)]
        words.insert(rng.randrange(4), rng.choice((*SECRETS, "Annette", "ANNETTES-TOWER")))
        return " ".join(words)

    cost = StageCost(hidden(), hidden(), hidden(), "cpu", seconds=1.0)
    monkeypatch.setattr(machines, "saved_stages", lambda _: [cost])
    monkeypatch.setattr(machines, "versions", lambda: {"torch": hidden(), hidden(): "1"})
    facts = replace(FACTS, name=hidden(), driver=hidden(), versions={"cuda": hidden()})
    probes = {"conv3d.bf16": ProbeResult("wrong", hidden(), 1.5), hidden(): ProbeResult("ok")}
    text = machine_of(facts, probes, tmp_path, NAMES, precisions()).text()
    bare = [
        *NAMES, "example.org", "192.168", "fe80", "hf_abc", "sk-abc", "4f9c1a52", "aa:bb", "secret", "films", "pass@",
        "smith",
    ]  # fmt: skip
    assert not [secret for secret in (*SECRETS, *bare) if secret.lower() in text.lower()]
    assert machines_page.machine_in(text).text() == text


def test_plain_facts_stay(tmp_path: Path) -> None:
    machine = machine_of(FACTS, {"conv3d.bf16": ProbeResult("ok", "", 1.25)}, None, NAMES, precisions())
    assert (machine.device, machine.driver, machine.arch) == ("NVIDIA GeForce RTX 2060", "580.12", "sm75")
    own_kernel = replace(FACTS, versions={"kernel": "6.8.0-annette"})
    assert machine_of(own_kernel, {}, None, (), {}).versions["kernel"] == "6.8.0"
    assert machine.versions["torch"] == FACTS.versions["torch"] and "LTX-Video" in machine.precision
    assert machine.answers[0].milliseconds in (1.2, 1.3)
    for text in ("AMD Ryzen 9 5950X 16-Core/32", "2.13.0+cu130", "torch 2.8, fp16/bf16", "6.18.44-fc-v669"):
        assert redaction.redact(text, NAMES) == text


@pytest.mark.parametrize("field", [field.name for field in fields(machines.SharedMachine)])
def test_fields_stay_whatever_the_user_is_called(field: str) -> None:
    for name in (field, field[:3], field.partition("_")[0]):
        assert machine_of(FACTS, {}, None, (name,), {}).arch == "sm75"
    assert redaction.redact("NVIDIA Maxwell of max", ("max",)) == "NVIDIA Maxwell of <name>"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"anygpu_machine": 2}, "a machine of version 2"),
        ({"anygpu_machine": "1"}, "instead of a machine"),
        ({"owner": "x"}, "unknown field 'owner' in the machine"),
        ({"memory_gb": "x"}, "the machine.memory_gb 'x'; expected a number"),
        ({"memory_gb": 2**53}, "the machine.memory_gb 9007199254740992; expected a number below 2**53"),
        ({"device": "x" * 300}, "longer texts or lists"),
        ({"runs": [{"stage": 1}]}, "the machine.runs[0]"),
    ],
)
def test_a_file_that_was_edited_is_refused_in_one_line(change: dict[str, object], said: str) -> None:
    record = json.loads(machine_of(FACTS, {}, None, NAMES, precisions()).text())
    with pytest.raises(InputError) as caught:
        machines_page.machine_in(json.dumps({**record, **change}))
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_shared_text_cannot_leave_its_cell() -> None:
    machine = replace(machine_of(FACTS, {}, None, NAMES, precisions()), device="a | b\n<script>")
    assert "| a \\| b &lt;script> |" in machines_page.page_of([machine])


def test_the_page_is_what_the_files_say() -> None:
    files = sorted((ROOT / "benchmarks" / "machines").glob("*.json"))
    assert files and (ROOT / "docs" / "machines.md").read_text(encoding="utf-8").endswith(machines_page.page())


def test_two_devices_merge_into_one_table_and_a_newer_file_replaces_an_older_one() -> None:
    def proof(device: str, date: str, measured: float) -> Proof:
        figures = (
            Figure("product", "TFLOP/s", measured, 80.0),
            Figure("auto, heads of 64", "of the largest", 1e-3),
            Figure("flash, heads of 64", fault="no kernel | here"),
            Figure("peak", "GiB", None, 5.0),
        )
        return Proof(
            device, "cuda", "sm89", "580", 12.0, {"torch": "2.13"}, date, "", (Finished("rates", 1.0, figures),)
        )

    page = machines_page.proofs_of(
        [proof("card B", "2026-11-02", 71.0), proof("card A", "2026-11-03", 61.23456), proof("card B", "2026-11-01", 1)]
    )
    row = "| rates | 1 of 2 right; flash, heads of 64: no kernel \\| here | product: {} (80) TFLOP/s; peak: - (5) GiB |"
    about = "driver 580, torch 2.13, {}. Measured; in brackets what is modelled."
    told = [line for line in page.splitlines() if line.startswith(("### ", "driver", "| rates"))]
    assert told == [
        *("### card A", about.format("2026-11-03"), row.format("61.2")),
        *("### card B", about.format("2026-11-02"), row.format("71")),
    ]


def test_the_command_shows_the_file_before_it_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = machine_of(FACTS, {}, None, NAMES, precisions())
    monkeypatch.setattr(machines, "this_machine", lambda *_: machine)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    for answer in ("n", "y"):
        monkeypatch.setattr("builtins.input", lambda _question, answer=answer: answer)
        assert cli.main(["report", "--share", str(tmp_path / "a.json"), "--state", str(tmp_path)]) == 0
        assert machine.text() in capsys.readouterr().out
        assert (tmp_path / "a.json").exists() == (answer == "y")
    assert machines_page.machine_in((tmp_path / "a.json").read_bytes()) == machine
