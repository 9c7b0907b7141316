"""Damaged instructions that the self-tests of ``kernels/self_tests.py`` notice, at the sizes that users' devices run.

A mutant changes one instruction of one kernel: its target becomes NaN or a wrong number, a mask is off by one, an
address's step is another, a result is cut off instead of rounded.
"""

import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from machine_code import amd
from machine_code.launches import Execution, compiled_for, executed

pytestmark = pytest.mark.machine
pytest.importorskip("triton", reason="lacks what this test executes: triton")

from anygpu.kernels import self_tests as subject  # noqa: E402
from anygpu.kernels.library import TRITON  # noqa: E402
from anygpu.kernels.self_tests import OPERATIONS, CaseShapes, self_tests  # noqa: E402

SEED, LEAST = 38, 54  # of 60
FUZZED, REACHED = 32, 16  # other sizes and values for a mutant that no self-test notices; those that run it, at least
NAN = 0x7FC07FC0  # in every format
COUNTS = {"poison": 36, "mask": 10, "stride": 10, "rounding": 4}
FLOAT = r"^\s*v_(?:(?:fma|fmac|add|mul|sub|div_fixup|exp|rsq)_f32|cvt_(?:f32_f16|f16_f32|pk_b?f16_f32))\w*\s+(v)(\d+),"
KINDS: dict[str, dict[str, re.Pattern[str]]] = {  # the instructions of each kind, by maker
    "sm": {
        "poison": re.compile(r"^\s*(?:fma|add|mul|sub|div|ex2|rsqrt|cvt)\.[\w.]*f(?:32|16)[\w.]*\s+%(rs?)(\d+),", re.M),
        "mask": re.compile(r"^\s*setp\.(lt)\.s32\s", re.M),
        "stride": re.compile(r"^\s*(?:shl\.b32\s+%r\d+, %r\d+|mul\.wide\.[us]32\s+%rd\d+, %r\d+), ([12])\b", re.M),
        "rounding": re.compile(r"^\s*cvt\.(rn)\.bf16", re.M),
    },
    "gfx": {
        "poison": re.compile(FLOAT, re.M),
        "mask": re.compile(r"^\s*v_cmp_(gt)_i32", re.M),
        "stride": re.compile(r"^\s*v_(?:lshlrev_b32_e32 v\d+, ([12]), |add_lshl_u32 v\d+, \w+, \w+, ([12])$)", re.M),
        "rounding": re.compile(r"^\s*(?:v_add3_u32 .*|s_movk_i32 s\d+), (0x7fff)$", re.M),
    },
}
WORSE = {"lt": "le", "gt": "ge", "rn": "rz", "0x7fff": "0", "1": "2", "2": "4"}
TARGETS = ("sm_80", "sm_90", "gfx1100", "gfx942")
CPU = torch.device("cpu")
FAULTS = ("MemoryFault", "Race", "Deadlock", "died of")
POISON = {"rs": "mov.b16 %rs{}, {:#x};", "r": "mov.b32 %r{}, {:#x};", "v": "v_mov_b32_e32 v{}, {:#x}"}
Key = tuple[str, torch.dtype]
Mutant = tuple[str, torch.dtype, str, int]  # operation, dtype, kind, which instruction of that kind


def changed(text: str, kind: str, at: re.Match[str]) -> str:
    """``text`` with the instruction at a match damaged."""
    if kind == "poison":
        end = text.index("\n", at.end())
        value = NAN & 0xFFFF if at[1] == "rs" else NAN
        return f"{text[:end]}\n\t{POISON[at[1]].format(at[2], value)}{text[end:]}"
    place = at.lastindex or 1
    return text[: at.start(place)] + WORSE[at[place]] + text[at.end(place) :]


def damaging(pattern: re.Pattern[str], kind: str, number: int) -> Callable[[str], str]:
    def mutate(text: str) -> str:
        found = [*pattern.finditer(text)]
        return changed(text, kind, found[number]) if number < len(found) else text

    return mutate


def compiled(*cell: str | torch.dtype) -> dict[Key, list[str]]:
    """The kernels of each operation and dtype at the sizes of the self-tests."""
    kernels: dict[Key, list[str]] = {}
    asked = {} if not cell else {"operations": cell[:1], "dtypes": cell[1:]}
    with executed(Execution(run=False)) as how:
        for each in self_tests(CPU, TRITON, **asked):
            kernels[each.name, each.dtype] = how.kernels
            how.kernels = []
    return kernels


def drawn(kernels: dict[Key, list[str]], kind: str, pattern: re.Pattern[str], draw: random.Random) -> Iterator[Mutant]:
    """Every mutant of a kind in random order, spread over all operations and dtypes."""
    counted = {key: len(pattern.findall(texts[-1])) for key, texts in kernels.items()}
    places = {key: draw.sample(range(total), total) for key, total in counted.items()}
    turns = [(turn, *key, number) for key, numbers in places.items() for turn, number in enumerate(numbers)]
    draw.shuffle(turns)
    for _, operation, dtype, number in sorted(turns, key=lambda each: each[0]):
        yield operation, dtype, kind, number


def notices(mutant: Mutant, kinds: dict[str, re.Pattern[str]]) -> bool:
    operation, dtype, kind, number = mutant
    with executed(Execution(mutate=damaging(kinds[kind], kind, number))):
        (cell,) = self_tests(CPU, TRITON, (operation,), (dtype,))
    assert cell.launched or any(fault in cell.fault for fault in FAULTS), cell  # and no toolchain that failed
    return not cell.right


def fuzzed(base: CaseShapes, operation: str, draw: random.Random) -> CaseShapes:
    """Other sizes for which most kernels of ``base`` are compiled alike: in the same powers of two, and as divisible by
    16."""

    def near(size: int, step: int = 1) -> int:
        least = 1 << (size - 1).bit_length() - 1
        sizes = [each for each in range(least + step, 2 * least + 1, step) if (each % 16 == 0) == (size % 16 == 0)]
        return draw.choice(sizes)

    width = near(base.gated if operation == "swiglu" else base.width, 16)
    groups = draw.choice([2, 4, base.groups])
    channels = max(near(base.clip[1]) // groups, 1) * groups
    clip = (draw.randint(2, 5), channels, *(draw.randint(2, 5) for _ in range(2)), near(base.clip[4]))
    return replace(
        base, tokens=near(base.tokens), width=width, head=near(base.head, 2), gated=width, clip=clip, groups=groups,
        batch=draw.randint(2, 7), text=near(base.text),
    )  # fmt: skip


def equivalent(mutant: Mutant, kinds: dict[str, re.Pattern[str]]) -> bool:
    """True if the damage left every byte of memory as it was, at each of many other sizes and values."""
    operation, dtype, kind, number = mutant
    known = set(compiled(operation, dtype)[operation, dtype])
    damage, draw, hits = damaging(kinds[kind], kind, number), random.Random(SEED), Counter[int]()
    randn = torch.randn

    def only_known(text: str) -> str:
        damaged = damage(text) if text in known else text
        hits[turn] += damaged != text
        return damaged

    def ran(shapes: CaseShapes, mutate: Callable[[str], str]) -> tuple[list[bytes], str]:
        own = torch.Generator().manual_seed(seed)

        def scaled(*shape: int, generator: torch.Generator) -> torch.Tensor:
            return randn(*shape, generator=own).mul_(scale)

        with executed(Execution(mutate=mutate)) as how, patch.object(torch, "randn", scaled):
            (cell,) = self_tests(CPU, TRITON, (operation,), (dtype,))
        return how.results, cell.fault

    for turn in range(FUZZED):
        shapes = fuzzed(subject.SHAPES[turn % 2], operation, draw)
        seed, scale = draw.randrange(1 << 30), 2.0 ** draw.randint(-12, 4)
        with patch.object(subject, "SHAPES", (shapes,)):
            if ran(shapes, str) != ran(shapes, only_known):
                return False
    return len(+hits) >= REACHED


@pytest.mark.parametrize("target", TARGETS)
def test_most_damaged_instructions_are_noticed(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many more than the small shapes alone notice, with which nobody would have seen the others.

    One that changes no byte at other sizes and values either is replaced by the next draw.
    Most of those missed are one of several like comparisons with an end: only the one at a shape's own end matters.
    """
    if target in amd.AMD and (reason := amd.lacks()):
        pytest.skip(reason)
    kinds = KINDS[target.rstrip("0123456789").rstrip("_")]
    draw, noticed, missed, same = random.Random(SEED), list[Mutant](), list[Mutant](), list[Mutant]()
    with compiled_for(target):
        kernels = compiled()
        for kind, pattern in kinds.items():
            left = COUNTS[kind]
            for mutant in drawn(kernels, kind, pattern, draw):
                if not left:
                    break
                if notices(mutant, kinds):
                    noticed.append(mutant)
                elif equivalent(mutant, kinds):
                    same.append(mutant)
                    continue
                else:
                    missed.append(mutant)
                left -= 1
        print(f"{target}: {len(noticed)} of {len(noticed + missed)} noticed; missed {missed}; equivalent {same}")
        assert {operation for operation, *_ in noticed + missed} == set(OPERATIONS)
        assert len(noticed + missed) == sum(COUNTS.values())
        assert len(noticed) >= LEAST, Counter(kind for _, _, kind, _ in missed)
        if target == "sm_80":
            monkeypatch.setattr(subject, "SHAPES", subject.SHAPES[:1])
            assert sum(notices(mutant, kinds) for mutant in noticed) < len(noticed)
