"""Text is for people: reword every sentence, and every choice, limit, colour, subject and key stays what it was."""

from typing import Any

import pytest
import tiny
import torch
from anygpu.compat.decision import Decision
from anygpu.compat.device.facts import facts_for
from anygpu.compat.device.precision import precision_for
from anygpu.compat.device.probe_store import OK, UNKNOWN, UNUSABLE, WRONG, ProbeResult, ProbeStore
from anygpu.compat.device.quirks import Verdict
from anygpu.compat.errors import PackError
from anygpu.compat.report import probe_statuses, report_on
from anygpu.compat.transforms.compile import CompileSettings
from anygpu.compat.transforms.step_cache import StepCacheSettings
from anygpu.paint.loading import PaintRequest, load_paint
from anygpu.pipelines.base import FramePackSettings, Prompt, SampleSettings
from anygpu.pipelines.decisions import card_of, in_short, limits
from anygpu.pipelines.families.framepack.pipeline import resume_key
from anygpu.pipelines.load.folder import load
from anygpu.pipelines.report import precisions
from anygpu.pipelines.requests import LoadRequest
from anygpu.pipelines.settings import with_step_cache
from anygpu.pipelines.speed import SpeedRequest
from simulated import profiles

from paint import stored

TEXTS: dict[type, tuple[str, ...]] = {  # what holds a sentence of ours, and in which fields
    Decision: ("verdict", "why"),
    Verdict: ("why",),
    ProbeResult: ("detail",),
    PackError: ("found", "expected", "fix"),
}
ANSWERS = {  # a device with a fault of each kind
    "cast.bf16_to_fp32": ProbeResult(WRONG, "3 values"),
    "attention.bf16": ProbeResult(WRONG, "head width 64: off by 3"),
    "masked_attention.fp16": ProbeResult(WRONG, "a row that the mask hides altogether becomes NaN"),
    "conv3d.bf16": ProbeResult(UNUSABLE, "no kernel"),
    "triton": ProbeResult(UNUSABLE, "absent"),
    "pad3d.fp32": ProbeResult(UNKNOWN, "not asked yet"),
}
SPEED = SpeedRequest("reference", CompileSettings(backend="eager"))


def reworded(text: str) -> str:
    """The same said with other words, order and marks; silence stays silence."""
    return f"off auto: chosen; mask (wrong): {text[::-1].replace(':', ';').swapcase()}" if text else text


@pytest.fixture
def other_words(monkeypatch):
    """Switches to a pack that says everything with other words."""

    def switch() -> None:
        for kind, names in TEXTS.items():
            original = kind.__init__

            def init(self: Any, *given: Any, _original: Any = original, _names: Any = names, **named: Any) -> None:
                _original(self, *given, **named)
                for name in _names:
                    object.__setattr__(self, name, reworded(getattr(self, name)))

            monkeypatch.setattr(kind, "__init__", init)

    return switch


def chosen(folder: Any) -> dict[str, Any]:
    """All that is decided on some machines, without a sentence."""
    made: dict[str, Any] = {}
    probes = {name: ProbeResult(OK) for name in ProbeStore(facts_for("cpu")).probes} | {
        name: ProbeResult(answer.status, answer.detail) for name, answer in ANSWERS.items()
    }
    for machine in (*profiles.PROFILES, "cpu"):
        facts = facts_for("cpu") if machine == "cpu" else profiles.facts_of(machine)
        made[machine, "limits"] = {name: set(choices) for name, choices in limits(facts).items()}
        made[machine, "colours"] = [(light.name, light.colour) for light in probe_statuses(facts, probes)]
        for family, model in precisions().items():
            for answers in (None, probes):
                precision = precision_for(model, facts, "auto", answers)
                dtypes = precision.transformer, precision.compute, precision.residual, precision.text, precision.vae
                made[machine, family, answers is None] = dtypes, precision.conv, precision.automatic
        report = report_on(facts, probes, precisions())
        made[machine, "report"] = [
            (heading, line.subject, line.alarming) for heading, lines in report.sections for line in lines
        ]
    for choices in ({}, {"attention": "native_math", "precision": "bf16", "weights": "int8", "speed": SPEED}):
        pipeline = load(LoadRequest(tiny.build("ltx", folder), device="cpu", **choices))
        pipeline = with_step_cache(pipeline, "fast", StepCacheSettings())
        prompt = Prompt("ltx", {"prompt_embeds": torch.zeros(1, 2, 4)})
        made["pipeline", len(choices)] = (
            [decision["subject"] for decision in card_of(pipeline, probes)["decisions"]],
            [(decision.subject, decision.source, decision.alarming) for decision in pipeline.plan.decisions],
            in_short(pipeline),
            pipeline.plan.speed.forms,
            sorted(pipeline.plan.speed.compiled),
            pipeline.plan.speed.attention.label,
            [step.order for step in pipeline.parts.prepare.steps],
            resume_key(pipeline, prompt, None, SampleSettings(64, 64, 9), FramePackSettings(1.0))(),
        )
    for choices in ({}, {"attention": "native_math", "offload": "none", "weights": "safetensors"}):
        painter = load_paint(PaintRequest(stored.checkpoint("paint", folder / "paint"), device="cpu", **choices))
        made["paint", len(choices)] = (
            [(decision.subject, decision.source, decision.alarming) for decision in painter.decisions],
            in_short(painter),
            painter.offloader.mode,
            (painter.precision.transformer, painter.precision.text, painter.precision.vae),
        )
    return made


def test_other_words_change_no_choice_limit_colour_subject_or_key(tiny_folder, other_words):
    before = chosen(tiny_folder)
    other_words()
    after = chosen(tiny_folder)
    assert str(Decision("kernels", "off", "no GPU")) != "kernels off: no GPU", "nothing was reworded"
    assert {key: (value, after[key]) for key, value in before.items() if after[key] != value} == {}
