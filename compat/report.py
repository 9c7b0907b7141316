"""The hardware report as lines of text: the machine, its probe results, and the decisions. Prints nothing itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from .decision import AUTO, Decision
from .device.facts import GIBIBYTE, DeviceFacts, allocator_settings
from .device.packed_paths import INTEGERS, kitchen_decisions
from .device.precision import DTYPES, NAMES, ModelPrecision, Precision, precision_for
from .device.probe_store import OK, PACKED, UNKNOWN, UNUSABLE, WRONG, ProbeResult, Probes
from .device.quirks import DevicePolicy, abilities, fixed, policy_for
from .device.wheels import AMD, PYTORCH, has_kernels, install, wheel_index
from .errors import PackError
from .probe_results import GELU
from .transforms.attention import attention_for, avoided_by
from .transforms.conv3d_choice import Conv3dLayer, choose_by
from .transforms.conv3d_methods import Geometry

HEAD_WIDTH = 128
OPTIONAL = (
    *("output.fp16_to_fp32", "float64", "float8", "triton", "bits.bf16_to_fp32", "sums.bf16", "sums.fp16"),
    *(f"{GELU}.{name}" for name in DTYPES),
    *(PACKED + layer_format for layer_format in INTEGERS),
)
"""Probes that may fail without harm: AnyGPU does without what each tests."""
UNNEEDED = {WRONG: "wrong, not used", UNUSABLE: "absent, not needed"}  # the words for an optional probe that fails
PROMISED = ("cuda", "rocm", "xpu", "mps")  # backends that should work: a failure without a known bug is a surprise
LAYERS = {  # what a VAE is made of, in the words of the report
    "kernel = stride": ((1, 2, 2), (1, 2, 2)),
    "1x1x1": ((1, 1, 1), (1, 1, 1)),
    "3x3x3": ((3, 3, 3), (1, 1, 1)),
}
GREEN, AMBER, RED, GREY = "green", "amber", "red", "grey"


@dataclass(frozen=True, slots=True)
class Report:
    """Groups of lines with headings, in reading order."""

    sections: tuple[tuple[str, tuple[Decision, ...]], ...]

    def text(self) -> str:
        blocks = []
        for heading, lines in self.sections:
            width = max((len(line.subject) for line in lines), default=0)
            body = [f"  {line.subject:<{width}}  {line.verdict}{line.reason and f' | {line.reason}'}" for line in lines]
            blocks.append("\n".join([heading, *body]))
        return "\n\n".join(blocks)

    def summary(self) -> str:
        named = dict(self.sections)
        return "\n".join([named[DEVICE][0].verdict, *(line.verdict for line in named.get(CHANGES, ()))])


MISSED = "Wrong in runs here"
DEVICE, DECIDED, KERNELS, ANSWERED, FILES, KNOWN, CHANGES = (
    "Device", "Precision", "Kernels and care", "What the device answered", "Packed files, with the Fit nodes",
    "Known bugs here", "What to change",
)  # fmt: skip


def report_on(
    facts: DeviceFacts, probes: Mapping[str, ProbeResult], families: Mapping[str, ModelPrecision],
    free_bytes: int | None = None, note: str = "", wrong: Mapping[str, str] | None = None,
) -> Report:  # fmt: skip
    """The report for one device. ``families`` maps a model's title to its dtypes, ``wrong`` each operation that was
    wrong in a run here to the path that replaces it; ``note`` leads the advice."""
    policy = policy_for(facts)
    precisions = {title: precision_for(model, facts, "auto", probes) for title, model in families.items()}
    decided = tuple(replace(precision.decision, subject=title) for title, precision in precisions.items())
    kernels = (*_kernels(facts, probes, policy, list(precisions.values())), *policy.care())
    packed = tuple(kitchen_decisions(facts, probes))
    known = tuple(Decision(row.name, row.symptom, row.done, f"{row.source}, {row.seen}") for row in policy.rows)
    sections = [
        (DEVICE, _device(facts, free_bytes)), (DECIDED, decided), (KERNELS, kernels), (ANSWERED, _answered(probes)),
    ]  # fmt: skip
    missed = tuple(Decision(key, f"{path} instead", alarming=True) for key, path in (wrong or {}).items())
    sections += [section for section in ((FILES, packed), (KNOWN, known), (MISSED, missed)) if section[1]]
    if changes := changes_for(facts, probes, policy, note):
        sections.append((CHANGES, tuple(Decision(f"{number}.", text) for number, text in enumerate(changes, 1))))
    return Report(tuple(sections))


def changes_for(
    facts: DeviceFacts, probes: Mapping[str, ProbeResult], policy: DevicePolicy | None = None, note: str = ""
) -> list[str]:
    """Advice, a sentence each: changes of torch, driver or settings after which more would work here."""
    policy = policy or policy_for(facts)
    index, why = wheel_index(facts)
    messages = [note] if note else []
    if not has_kernels(facts):
        kinds = ", ".join(facts.compiled)
        messages.append(f"This torch was compiled for {kinds}, not for {facts.arch}. {install(index)} ({why})")
    if facts.backend == "cpu" and "+cpu" in facts.torch_version:
        messages.append(
            "This build of torch supports no GPU. If you have one, install the build for it: "
            f"NVIDIA {PYTORCH}cu130, Intel {PYTORCH}xpu, Radeon {PYTORCH}rocm7.2 or one of {AMD}"
        )
    if not policy.expandable_segments and "expandable_segments:True" in allocator_settings():
        messages.append("Leave expandable_segments out of PYTORCH_ALLOC_CONF: on this card it gives NaN.")
    mended = {row.name for row in fixed(policy, probes)}
    messages += [row.remedy for row in policy.rows if row.remedy and row.name not in mended]
    expected = {*policy.wrong, *policy.costly, *OPTIONAL}
    surprises = [name for name in probes if name not in expected and probes[name].status not in (OK, UNKNOWN)]
    if surprises and facts.backend in PROMISED:
        messages.append(f"{', '.join(surprises)}: should work on this device. {_advice_on_surprise(facts)}")
    return list(dict.fromkeys(messages))


def dtypes_in_use(facts: DeviceFacts, probes: Probes, families: Mapping[str, ModelPrecision]) -> set[str]:
    """The names of all dtypes in which ``auto`` computes some part of some family here."""
    names: set[str] = set()
    for family in families.values():
        chosen = precision_for(family, facts, "auto", probes)
        parts = (chosen.transformer, chosen.compute, chosen.residual, chosen.text, chosen.vae, chosen.conv)
        names |= {NAMES[dtype] for dtype in parts if dtype is not None}
    return names


def _device(facts: DeviceFacts, free_bytes: int | None) -> tuple[Decision, ...]:
    """The lines on the device itself: name, free memory, back end, versions, architectures of this torch."""
    free = f"{free_bytes / GIBIBYTE:.1f} GB free" if free_bytes is not None else ""
    versions = ", ".join(f"{name} {version}" for name, version in facts.versions.items())
    table = f"precision table: {facts.arch_class}"
    lines = [Decision("device", str(facts), free), Decision("backend", facts.backend, table)]
    lines.append(Decision("versions", versions))
    if facts.compiled:
        covered = "" if has_kernels(facts) else f"NOT {facts.arch}"
        lines.append(Decision("torch compiled for", ", ".join(facts.compiled), covered, alarming=bool(covered)))
    if facts.emulated:
        lines.append(Decision("emulated", ", ".join(facts.emulated), "emulated slowly"))
    return tuple(lines)


def _kernels(
    facts: DeviceFacts, probes: Mapping[str, ProbeResult], policy: DevicePolicy, precisions: Sequence[Precision]
) -> list[Decision]:
    """The lines on Conv3d and attention, in each dtype that ``precisions`` use."""
    lines = []
    for dtype in dict.fromkeys(precision.vae for precision in precisions):
        forms = conv3d_methods(facts, probes, dtype, policy)
        lines += [replace(form, subject=f"Conv3d, {kind}, {NAMES[dtype]}") for kind, form in forms.items()]
    for dtype in dict.fromkeys(precision.compute or precision.transformer for precision in precisions):
        try:
            decision = attention_for(AUTO, facts, dtype, HEAD_WIDTH, avoided_by(probes, (dtype,))).decision
        except (PackError, RuntimeError) as error:  # a report goes on where a decision cannot be made
            decision = Decision("attention", "cannot be decided", str(error), alarming=True)
        lines.append(replace(decision, subject=f"attention, {NAMES[dtype]}"))
    return lines


def conv3d_methods(
    facts: DeviceFacts, probes: Probes, dtype: torch.dtype, policy: DevicePolicy | None = None
) -> dict[str, Decision]:
    """The method of each kind of Conv3d (:data:`LAYERS`) in ``dtype``, with the reason."""
    chooser, forms = choose_by(abilities(facts, probes, policy)), {}
    for kind, (kernel, stride) in LAYERS.items():
        choice = chooser(Conv3dLayer(kind, 64, 64, kernel=kernel, geometry=Geometry(stride), dtype=dtype))
        form = ("native", "works here") if choice is None else (choice.form.value, choice.why)
        forms[kind] = Decision("Conv3d", *form, source=AUTO)
    return forms


def conv3d_decision(facts: DeviceFacts, probes: Probes, dtype: torch.dtype) -> Decision:
    """One decision on Conv3d in ``dtype``: the method that all kinds share, else each kind with its own."""
    forms = conv3d_methods(facts, probes, dtype)
    first = next(iter(forms.values()))
    if len({form.verdict for form in forms.values()}) == 1:
        return first
    named = "; ".join(f"{kind} {form.verdict}" for kind, form in forms.items())
    return replace(first, verdict=named, why="; ".join(dict.fromkeys(form.why for form in forms.values())))


def _answered(probes: Mapping[str, ProbeResult]) -> tuple[Decision, ...]:
    """One line for each operation that probes test: the result for each dtype, and the details of failures."""
    groups: dict[str, list[str]] = {}
    for name in probes:
        groups.setdefault(name.partition(".")[0], []).append(name)
    lines = []
    for group, names in groups.items():
        verdicts = []
        for name in names:
            status, operands = probes[name].status, name.partition(".")[2].replace("_", " ")
            verdicts.append(f"{operands} {UNNEEDED.get(status, status) if name in OPTIONAL else status}".strip())
        details = [f"{name}: {probes[name].detail}" for name in names if probes[name].detail and name not in OPTIONAL]
        alarming = any(probes[name].status in (WRONG, UNUSABLE) and name not in OPTIONAL for name in names)
        lines.append(Decision(group, ", ".join(verdicts), "; ".join(details), alarming=alarming))
    return tuple(lines)


@dataclass(frozen=True, slots=True)
class ProbeStatus:
    """One probe as the panel shows it: its name, colour, result, and advice."""

    name: str
    colour: str
    verdict: str
    advice: str = ""


def probe_statuses(facts: DeviceFacts, probes: Mapping[str, ProbeResult]) -> list[ProbeStatus]:
    """The status of each probe: green is right, amber slow or not needed, red wrong or unusable, grey not asked."""
    return [_status(name, probes[name], facts, policy_for(facts)) for name in probes]


def _status(name: str, answer: ProbeResult, facts: DeviceFacts, policy: DevicePolicy) -> ProbeStatus:
    """The status of a probe by ``answer``; the advice is the known bug's remedy, else :func:`_advice_on_surprise`."""
    slow = policy.costly.get(name)
    if answer.status == UNKNOWN:
        return ProbeStatus(name, GREY, answer.detail or "not tested yet", "Run the probes.")
    if answer.status == OK and slow is not None:
        return ProbeStatus(name, AMBER, f"right, but slow: {slow.symptom}", slow.done)
    if answer.status == OK:
        return ProbeStatus(name, GREEN, "right")
    if name in OPTIONAL:
        return ProbeStatus(name, AMBER, UNNEEDED[answer.status], "Nothing to do: AnyGPU does not need it.")
    row = policy.wrong.get(name) or slow
    advice = _advice_on_surprise(facts) if row is None else ". ".join(filter(None, (row.done, row.remedy)))
    return ProbeStatus(name, RED, str(answer), advice)


def _advice_on_surprise(facts: DeviceFacts) -> str:
    """The advice on a probe that fails without a known bug."""
    if facts.backend not in PROMISED:
        return "Nothing to do: AnyGPU uses another way on this device."
    index, _ = wheel_index(facts)
    known = f" (now {facts.driver})" if facts.driver else ""
    driver = "macOS" if facts.backend == "mps" else f"the driver{known}"
    return f"Update {driver} and torch." + (f" {install(index)}" if index else "")
