"""A class of devices that somebody adds to the precision table, or splits off, loses nothing that its devices had."""

from dataclasses import replace

import pytest
import torch
from anygpu.compat.device import precision as precisions
from anygpu.compat.device.facts import facts_for
from anygpu.compat.device.quirks import abilities, policy_for
from anygpu.compat.device.work import pace_of
from anygpu.compat.errors import PackError
from anygpu.compat.memory.transfer import maps_files
from anygpu.compat.report import report_on
from anygpu.compat.transforms import attention, attention_kernels, fp16
from anygpu.pipelines.decisions import limits
from anygpu.pipelines.forecast.fit import plan_line
from anygpu.pipelines.forecast.page import memory_plan
from anygpu.pipelines.load.folder import load
from anygpu.pipelines.registry import FAMILIES
from anygpu.pipelines.requests import LoadRequest
from anygpu.pipelines.sizes import Size
from simulated.profiles import MACHINES
from tiny import build

CPU = facts_for("cpu")
UNKNOWN = {"backend": "npu", "arch": "", "arch_class": "other", "name": "npu device"}
SILENT = {"backend": "cuda", "arch": "", "arch_class": "other", "name": "cuda:0"}  # its driver does not answer
BEHIND = {"backend": "xla", "arch": "TT", "arch_class": "xla", "name": "TT behind XLA"}
DEVICES = {name: machine.facts for name, machine in MACHINES.items()}
DEVICES |= {"a modern NVIDIA": {**DEVICES["turing"], "arch": "sm89", "arch_class": "cuda-sm80+", "emulated": ()}}
DEVICES |= {"cpu": {}, "another vendor's": UNKNOWN, "a silent driver": SILENT, "behind XLA": BEHIND}


def facts_of(name: str, added: str = ""):
    facts = replace(CPU, **DEVICES[name])
    return replace(facts, arch_class=added) if added else facts


@pytest.fixture
def added(monkeypatch):
    """From a device to the same in a class of its own, with the row that it had."""

    def made(name: str):
        monkeypatch.setitem(precisions.PRECISION, "made up", precisions.PRECISION[facts_of(name).arch_class])
        return facts_of(name, "made up")

    return made


def answer(ask, *given):
    """What is answered, or why not."""
    try:
        return ask(*given)
    except PackError as error:
        return str(error)


def answers(facts) -> dict[str, object]:
    """All that the tables say of a device."""
    models = (
        *(family.rewrites.precision for family in FAMILIES.values()),
        precisions.PAINT,
        precisions.HALF_TEXT,
        precisions.PLAIN,
    )
    return {
        "limits": limits(facts),
        "precision": [
            answer(precisions.precision_for, model, facts, choice) for model in models for choice in precisions.CHOICES
        ],
        "attention": {choice: attention_kernels.reason_against(choice, facts) for choice in attention.CHOICES},
        "kernels": {
            choice: answer(attention_kernels.require_usable, choice, facts, torch.float32, 64)
            for choice in attention_kernels.EXPLICIT
        },
        "fp16 sums": answer(fp16.require_fp16_sums, facts, torch.float16),
        "quirks": policy_for(facts),
        "operators": abilities(facts),
        "transfers": maps_files(facts, None),
        "rates": pace_of(facts, None, torch.float16),
        "report": [
            line for _, lines in report_on(facts, {}, {}, 0).sections for line in lines if line.subject != "backend"
        ],
    }


@pytest.mark.parametrize("name", DEVICES)
def test_a_class_of_its_own_changes_no_answer(added, name):
    before, after = answers(facts_of(name)), answers(added(name))
    assert {key: (before[key], after[key]) for key in before if before[key] != after[key]} == {}


def test_another_vendor_s_device_runs_torch_s_own_attention_and_no_vendor_s():
    for name in ("another vendor's", "a silent driver"):
        told = {choice: attention_kernels.reason_against(choice, facts_of(name)) for choice in attention.CHOICES}
        assert told["native_flash"] == "" and told["native_cudnn"] and told["flash"], name


def test_a_pipeline_is_loaded_and_forecast_the_same(added, tiny_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "anygpu.compat.device.facts._system_bytes", lambda *_: 64 * 2**30
    )  # others take memory meanwhile

    def told(facts):
        request = LoadRequest(
            build("ltx", tiny_folder), device=facts, state=tmp_path, attention="native_flash", quiet=True
        )
        pipeline = load(request)
        return pipeline.plan.decisions, plan_line(pipeline), memory_plan(pipeline, Size(64, 64, 9))[0]

    before, after = told(facts_of("another vendor's")), told(added("another vendor's"))
    assert before == after
