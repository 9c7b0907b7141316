"""What this machine is, what it answered and what is decided on it, as lines for people; nothing is printed here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ..errors import PackError
from ..precision import NAMES, Precision, precision_for
from ..transforms.attention import attention_for, avoided_by
from ..transforms.conv3d_choice import Conv3dLayer, choose_by
from ..transforms.conv3d_forms import Geometry
from .facts import GIBIBYTE, DeviceFacts
from .probe_store import OK, UNKNOWN, ProbeResult
from .quirks import DevicePolicy, abilities, fixed, policy_for
from .wheels import AMD, PYTORCH, has_kernels, install, wheel_index

HEAD_WIDTH = 128
OPTIONAL = ("output.fp16_to_fp32", "float64", "float8", "triton", "bits.bf16_to_fp32", "sums.bf16", "sums.fp16")
"""What a device may lack without anybody missing it: there is another way for each."""

PROMISED = ("cuda", "rocm", "xpu", "mps")
"""Backends on which what fails without a known bug is news."""

LAYERS = {  # what a VAE is made of, in the words of the report
    "Conv3d, kernel = stride": ((1, 2, 2), (1, 2, 2)),
    "Conv3d, 1x1x1": ((1, 1, 1), (1, 1, 1)),
    "Conv3d, 3x3x3": ((3, 3, 3), (1, 1, 1)),
}
CARE = {  # field of Care -> what it means in a report
    "tile_pixels": "VAE tiles of at most {} pixels",
    "vae_cudnn": "MIOpen is off around the VAE",
    "retry_without_cudnn": "an unknown MIOpen error is tried once more without MIOpen",
    "benchmark": "exhaustive tuning of convolutions stays off",
    "mapped_reads": "weights are read into ordinary memory, never mapped",
    "contiguous_weights": "weights of convolutions are made contiguous",
    "masks": "no mask reaches attention",
    "streams": "group offload copies without streams",
}


@dataclass(frozen=True, slots=True)
class Line:
    """One statement: what it is about, what is so, and why."""

    subject: str
    verdict: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """Headed groups of lines, in the order in which somebody wants to read them."""

    sections: tuple[tuple[str, tuple[Line, ...]], ...]

    def text(self) -> str:
        """The whole report as plain text, one line per statement."""
        blocks = []
        for heading, lines in self.sections:
            width = max(len(line.subject) for line in lines)
            whys = [f" | {line.why}" if line.why else "" for line in lines]
            body = [f"  {line.subject:<{width}}  {line.verdict}{why}" for line, why in zip(lines, whys, strict=True)]
            blocks.append("\n".join([heading, *body]))
        return "\n\n".join(blocks)

    def summary(self) -> str:
        """The device and what to change, in a few lines."""
        named = dict(self.sections)
        changes = [line.verdict for line in named.get(CHANGES, ())]
        return "\n".join([named[DEVICE][0].verdict, *changes])


DEVICE, DECIDED, KERNELS, ANSWERED, KNOWN, CHANGES = (
    "Device", "Precision", "Kernels and care", "What the device answered", "Known bugs here", "What to change",
)  # fmt: skip


def report_on(
    facts: DeviceFacts,
    probes: Mapping[str, ProbeResult],
    families: Mapping[str, str],
    free_bytes: int | None = None,
    more: Sequence[Line] = (),
    note: str = "",
) -> Report:
    """The report for one device.

    Args:
        probes: answers by name, asked when they are read.
        families: family id to title. free_bytes: memory free now. more: decisions of other layers.
        note: why answers could not be kept.
    """
    policy = policy_for(facts)
    precisions = {title: precision_for(family, facts, "auto", probes) for family, title in families.items()}
    decided = tuple(Line(title, *_split(precision)) for title, precision in precisions.items())
    kernels = (*_kernels(facts, probes, policy, list(precisions.values())), *_care(policy), *more)
    known = tuple(Line(row.name, row.symptom, f"{row.done}; {row.source}, {row.seen}") for row in policy.rows)
    sections = [
        (DEVICE, _device(facts, free_bytes)), (DECIDED, decided), (KERNELS, kernels), (ANSWERED, _answered(probes)),
    ]  # fmt: skip
    sections += [(KNOWN, known)] if known else []
    changes = changes_for(facts, probes, policy, note)
    if changes:
        sections.append((CHANGES, tuple(Line(f"{number}.", text) for number, text in enumerate(changes, 1))))
    return Report(tuple(sections))


def changes_for(
    facts: DeviceFacts, probes: Mapping[str, ProbeResult], policy: DevicePolicy | None = None, note: str = ""
) -> list[str]:
    """What the user can do so that more works: which torch, which driver."""
    policy = policy or policy_for(facts)
    index, why = wheel_index(facts)
    said = [note] if note else []
    if not has_kernels(facts):
        kinds = ", ".join(facts.compiled)
        said.append(f"This torch was compiled for {kinds}, not for {facts.arch}. {install(index)} ({why})")
    if facts.backend == "cpu" and "+cpu" in facts.torch_version:
        said.append(
            "This torch knows no GPU. If there is one, install the build made for it: "
            f"NVIDIA {PYTORCH}cu130, Intel {PYTORCH}xpu, Radeon {PYTORCH}rocm7.2 or one of {AMD}"
        )
    mended = {row.name for row in fixed(policy, probes)}
    said += [row.remedy for row in policy.rows if row.remedy and row.name not in mended]
    expected = {*policy.wrong, *policy.costly, *OPTIONAL}
    surprises = [name for name in probes if name not in expected and probes[name].status not in (OK, UNKNOWN)]
    if surprises and facts.backend in PROMISED:
        driver = f" (now {facts.driver})" if facts.driver else ""
        torch = f" and torch: {install(index)}" if index else " and torch"
        said.append(f"{', '.join(surprises)}: should work on this device. Update the driver{driver}{torch}")
    return list(dict.fromkeys(said))


def dtypes_in_use(
    facts: DeviceFacts, probes: Mapping[str, ProbeResult] | None, families: Mapping[str, str]
) -> set[str]:
    """Names of the dtypes that ``auto`` computes anything in, for any family."""
    found: set[str] = set()
    for family in families:
        chosen = precision_for(family, facts, "auto", probes)
        parts = (chosen.transformer, chosen.compute, chosen.residual, chosen.text, chosen.vae, chosen.conv)
        found |= {NAMES[dtype] for dtype in parts if dtype is not None}
    return found


def _device(facts: DeviceFacts, free_bytes: int | None) -> tuple[Line, ...]:
    free = f"{free_bytes / GIBIBYTE:.1f} GB free" if free_bytes is not None else ""
    versions = ", ".join(f"{name} {version}" for name, version in facts.versions.items())
    lines = [Line("device", str(facts), free), Line("backend", facts.backend, f"precision table: {facts.arch_class}")]
    lines.append(Line("versions", versions))
    if facts.compiled:
        covered = "" if has_kernels(facts) else f"NOT {facts.arch}"
        lines.append(Line("torch compiled for", ", ".join(facts.compiled), covered))
    if facts.emulated:
        lines.append(Line("emulated", ", ".join(facts.emulated), "computed without units for it, slowly"))
    return tuple(lines)


def _split(precision: Precision) -> tuple[str, str]:
    verdict, _, why = str(precision).partition(": ")
    return verdict, why


def _kernels(
    facts: DeviceFacts, probes: Mapping[str, ProbeResult], policy: DevicePolicy, precisions: Sequence[Precision]
) -> list[Line]:
    """Which form a Conv3d takes and which kernel runs attention, per dtype in use."""
    lines = []
    for dtype in dict.fromkeys(precision.vae for precision in precisions):
        lines += conv3d_lines(facts, probes, dtype, policy)
    for dtype in dict.fromkeys(precision.compute or precision.transformer for precision in precisions):
        try:
            why = attention_for("auto", facts, dtype, HEAD_WIDTH, avoided_by(probes, (dtype,))).why
        except (PackError, RuntimeError) as error:  # a report goes on where a decision cannot be made
            why = f"cannot be decided ({error})"
        lines.append(Line(f"attention, {NAMES[dtype]}", *(why.removeprefix("auto: ").split("; ", 1))))
    return lines


def conv3d_lines(
    facts: DeviceFacts, probes: Mapping[str, ProbeResult] | None, dtype: torch.dtype, policy: DevicePolicy | None = None
) -> list[Line]:
    """Which form each kind of Conv3d takes in ``dtype``, and why."""
    chooser, lines = choose_by(abilities(facts, probes, policy)), []
    for subject, (kernel, stride) in LAYERS.items():
        choice = chooser(Conv3dLayer(subject, 64, 64, kernel, Geometry(stride), dtype))
        said = ("native", "works here") if choice is None else (choice.form.value, choice.why)
        lines.append(Line(f"{subject}, {NAMES[dtype]}", *said))
    return lines


def _care(policy: DevicePolicy) -> list[Line]:
    """The switches and caps that a known bug has moved from their defaults."""
    usual, lines = DevicePolicy(), []
    for name, text in CARE.items():
        value = getattr(policy, name)
        if value != getattr(usual, name):
            row = next((row for row in policy.rows if name in row.effect), None)
            lines.append(Line("care", text.format(value), row.source if row else ""))
    for name in ("allocation_bytes", "conv_bytes"):
        if getattr(policy, name):
            lines.append(Line("care", f"{name.replace('_', ' ')} at most {getattr(policy, name) / GIBIBYTE:.0f} GB"))
    return lines


def _answered(probes: Mapping[str, ProbeResult]) -> tuple[Line, ...]:
    """One line per operation: its dtypes, what they answered, and what is wrong."""
    groups: dict[str, list[str]] = {}
    for name in probes:
        groups.setdefault(name.partition(".")[0], []).append(name)
    lines = []
    for group, names in groups.items():
        verdicts = [f"{name.partition('.')[2].replace('_', ' ')} {_word(name, probes[name])}".strip() for name in names]
        details = [f"{name}: {probes[name].detail}" for name in names if probes[name].detail and name not in OPTIONAL]
        lines.append(Line(group, ", ".join(verdicts), "; ".join(details)))
    return tuple(lines)


def _word(name: str, found: ProbeResult) -> str:
    """The status, softened where nobody needs the operation."""
    return "absent, not needed" if found.status != OK and name in OPTIONAL else found.status
