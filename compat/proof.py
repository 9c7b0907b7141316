"""The proof of a device: parts that measure it, in one file that grows part by part, and one picture of it.
A part that fails is a figure with its reason; a process that dies costs the part that it died in. Nothing is sent."""

from __future__ import annotations

import datetime
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import islice
from pathlib import Path

from .device.facts import GIBIBYTE, DeviceFacts
from .durable import write_file
from .errors import InputError, first_line
from .records import json_in, parse, plain, versioned
from .redaction import own_names, redact

VERSION, HEAD = 1, "anygpu_proof"
MOST_BYTES, MOST_FIGURES, MOST_TEXT = 2**20, 400, 200
SECONDS = 540.0  # after which no part begins, so that a run ends within ten minutes
ENDED = "the process ended in this part"
BAR, LEFT, ROW = 300, 300, 16  # of the picture, in its own units


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number of a proof, or the reason why it is missing or wrong."""

    what: str
    unit: str = ""
    measured: float | None = None  # in ``unit``, on the device; None where it was not
    modelled: float | None = None  # by data sheets or a forecast
    fault: str = ""  # why it could not be measured, or is wrong


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a proof: its name, and the function that yields its figures and may raise anything on the way."""

    name: str
    figures: Callable[[], Iterable[Figure]]


@dataclass(frozen=True, slots=True)
class Finished:
    name: str
    seconds: float
    figures: tuple[Figure, ...] = ()


@dataclass(frozen=True, slots=True)
class Proof:
    """All that is known of a device; ``running`` is the part that runs, or in which the process died."""

    device: str
    backend: str
    arch: str
    driver: str
    memory_gb: float
    versions: dict[str, str]
    date: str
    running: str = ""
    parts: tuple[Finished, ...] = ()

    def text(self) -> str:
        return json.dumps({HEAD: VERSION, **plain(self)}, indent=1) + "\n"


def proof_in(text: str | bytes) -> Proof:
    """The proof that a file holds; InputError for no such file, another version, unknown fields or wrong types."""
    record = versioned(json_in(text[:MOST_BYTES], "the proof"), HEAD, VERSION, "a proof")
    return parse(Proof, {name: value for name, value in record.items() if name != HEAD}, "the proof")


def proof_of(facts: DeviceFacts, versions: dict[str, str]) -> Proof:
    """A proof of the device of ``facts``, with ``versions`` by package and as yet without parts."""
    named = {name: text for name, text in {**versions, **facts.versions}.items() if name != "kernel"}
    own = {name: getattr(facts, name) for name in ("backend", "arch", "driver")}
    memory, date = round(facts.total_bytes / GIBIBYTE, 1), datetime.date.today().isoformat()
    return Proof(facts.name, **own, memory_gb=memory, versions=redact(named, own_names()), date=date)


def run_parts(
    parts: Sequence[Part], fresh: Proof, path: Path, notify: Callable[[str], None], *,
    clock: Callable[[], float] = time.monotonic, seconds: float = SECONDS, release: Callable[[], None] = lambda: None,
) -> Proof:  # fmt: skip
    """Run the parts that the file at ``path`` lacks, write the file as each ends, draw its picture, return the proof.
    ``fresh`` is an empty proof of this device; after ``seconds`` no further part begins, and the next call goes on.
    ``release`` frees what a part left on the device. Raises InputError for the file of another device or version."""
    proof, began = _opened(path, fresh), clock()
    for number, part in enumerate(parts, 1):
        head = f"part {number} of {len(parts)}: {part.name}"
        if any(done.name == part.name for done in proof.parts):
            notify(f"{head}: done before")
            continue
        if (started := clock()) - began > seconds:
            notify(f"{seconds:g} s are over: the same command goes on at part {number}")
            break
        notify(head)
        write_file(path, replace(proof, running=part.name).text())
        try:
            figures = tuple(figures_of(part))
        except KeyboardInterrupt:
            write_file(path, proof.text())
            raise
        proof = replace(proof, parts=(*proof.parts, Finished(part.name, round(clock() - started, 2), figures)))
        write_file(path, proof.text())
        release()
        faults = [f"  {figure.what}: {figure.fault}" for figure in figures if figure.fault]
        notify("\n".join([f"  {len(figures)} figures", *faults]))
    write_file(path.with_suffix(".picture.svg" if path.suffix == ".svg" else ".svg"), picture(proof))
    return proof


def figures_of(part: Part) -> Iterator[Figure]:
    """At most ``MOST_FIGURES`` figures of ``part``, without names of this machine; an error becomes the last figure."""
    names = own_names()
    try:
        for figure in islice(part.figures(), MOST_FIGURES):
            fault = redact(figure.fault, names)[:MOST_TEXT]
            yield replace(figure, measured=_short(figure.measured), modelled=_short(figure.modelled), fault=fault)
    except (Exception, SystemExit) as error:  # a device and its libraries fail in any way
        yield Figure(part.name, fault=redact(f"{type(error).__name__}: {first_line(error)}", names)[:MOST_TEXT])


def _short(value: float | None) -> float | None:
    """``value`` in five digits; None where it is None or not finite, which JSON cannot hold."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.5g}")


def _opened(path: Path, fresh: Proof) -> Proof:
    """The proof in the file at ``path``, or ``fresh`` without a file; a part in which its process died counts as done.
    Raises InputError for the proof of another device, driver or version."""
    if not path.exists():
        return fresh
    proof = proof_in(path.read_bytes())
    if (proof.device, proof.driver, proof.versions) != (fresh.device, fresh.driver, fresh.versions):
        found = f"{path.name} is the proof of {proof.device} with driver {proof.driver or 'unknown'}"
        expected = f"one of {fresh.device} with the driver and versions of now"
        raise InputError(found, expected=expected, fix="Choose another --output.")
    dead = [Finished(proof.running, 0.0, (Figure(proof.running, fault=ENDED),))] if proof.running else []
    return replace(proof, running="", parts=(*proof.parts, *dead))


def picture(proof: Proof) -> str:
    """The figures as an SVG: a bar each, blue where measured, as long as its share of the largest of its unit."""
    rows = [(part.name, each) for part in proof.parts for each in part.figures]
    values = [abs(each.measured if each.measured is not None else each.modelled or 0.0) for _, each in rows]
    largest: dict[str, float] = {}  # by unit
    for (_, each), value in zip(rows, values, strict=True):
        largest[each.unit] = max(largest.get(each.unit, 1e-30), value)  # it divides
    lines, texts = list[str](), [(8, ROW, f"{proof.device}, {proof.date}")]
    for number, ((part, each), value) in enumerate(zip(rows, values, strict=True), 2):
        kind, colour = ("measured", "#48a") if each.measured is not None else ("modelled", "#bbb")
        label, length = each.fault or f"{value:.4g} {each.unit}, {kind}", BAR * value / largest[each.unit]
        place = f'y="{number * ROW - 10}" height="12" fill="{"#c33" if each.fault else colour}"'
        lines.append(f'<rect x="{LEFT}" width="{length:.1f}" {place}/>')
        texts += [(8, number * ROW, f"{part}: {each.what}"), (LEFT + BAR + 8, number * ROW, label)]
    for x, y, text in texts:  # XML has no ESC or NUL
        lines.append(f'<text x="{x}" y="{y}">{escape("".join(filter(str.isprintable, text)))}</text>')
    size = f'width="{LEFT + 2 * BAR}" height="{ROW * (len(rows) + 3)}" font-family="sans-serif" font-size="11"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', *lines, "</svg>"]) + "\n"
