"""Damaged instructions that the self-tests of ``kernels/self_tests.py`` notice, at the sizes that users' devices run.

A mutant changes one instruction of one kernel: its target becomes NaN or a wrong number, a mask is off by one, an
address's step is another, a result is cut off instead of rounded.
"""

import random
import re
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch

from machine_code.launches import Execution, compiled_for, executed

pytestmark = pytest.mark.machine
pytest.importorskip("triton", reason="lacks what this test executes: triton")

from anygpu.kernels import self_tests as subject  # noqa: E402
from anygpu.kernels.library import TRITON  # noqa: E402
from anygpu.kernels.self_tests import OPERATIONS, self_tests  # noqa: E402

TARGET, SEED, LEAST = "sm_80", 38, 0.9
NAN = {"r": 0x7FC00000, "rs": 0x7E00}
KINDS: dict[str, tuple[int, re.Pattern[str]]] = {  # how many, and the instructions
    "poison": (
        36,
        re.compile(r"^\s*(?:fma|add|mul|sub|div|ex2|rsqrt|cvt)\.[\w.]*f(?:32|16)[\w.]*\s+%(rs?)(\d+),", re.M),
    ),
    "mask": (10, re.compile(r"^\s*setp\.(lt)\.s32\s", re.M)),
    "stride": (10, re.compile(r"^\s*(?:shl\.b32\s+%r\d+, %r\d+|mul\.wide\.[us]32\s+%rd\d+, %r\d+), ([12])\b", re.M)),
    "rounding": (4, re.compile(r"^\s*cvt\.(rn)\.(?:bf16|f16)", re.M)),
}
Key = tuple[str, torch.dtype]
Mutant = tuple[str, torch.dtype, str, int]  # operation, dtype, kind, which instruction of that kind


def changed(text: str, kind: str, at: re.Match[str]) -> str:
    """``text`` with the instruction at a match damaged."""
    if kind == "poison":
        end = text.index("\n", at.end())
        return f"{text[:end]}\n\tmov.b{16 if at[1] == 'rs' else 32} %{at[1]}{at[2]}, {NAN[at[1]]};{text[end:]}"
    new = {"mask": "le", "rounding": "rz"}.get(kind) or str(2 * int(at[1]))
    return text[: at.start(1)] + new + text[at.end(1) :]


def damaging(kind: str, number: int) -> Callable[[str], str]:
    def mutate(text: str) -> str:
        found = [*KINDS[kind][1].finditer(text)]
        return changed(text, kind, found[number]) if number < len(found) else text

    return mutate


def drawn() -> Iterator[Mutant]:
    """The mutants: of each kind as many as it has, spread over all operations and dtypes."""
    kernels: dict[Key, str] = {}
    with executed(Execution()) as how:
        for cell in self_tests(torch.device("cpu"), TRITON):
            kernels[cell.name, cell.dtype] = how.kernels[-1]
    draw = random.Random(SEED)
    for kind, (count, pattern) in KINDS.items():
        places = {key: draw.sample(range(total), total) for key, total in counted(kernels, pattern) if total}
        turns = [(turn, *key, number) for key, numbers in places.items() for turn, number in enumerate(numbers)]
        draw.shuffle(turns)
        for _, operation, dtype, number in sorted(turns, key=lambda each: each[0])[:count]:
            yield operation, dtype, kind, number


def counted(kernels: dict[Key, str], pattern: re.Pattern[str]) -> list[tuple[Key, int]]:
    return [(key, len(pattern.findall(text))) for key, text in kernels.items()]


def notices(mutant: Mutant) -> bool:
    operation, dtype, kind, number = mutant
    with executed(Execution(mutate=damaging(kind, number))):
        (cell,) = self_tests(torch.device("cpu"), TRITON, (operation,), (dtype,))
    return not cell.right


def test_nine_of_ten_damaged_instructions_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many more than the small shapes alone notice, with which nobody would have seen the others."""
    with compiled_for(TARGET):
        mutants = [*drawn()]
        assert {operation for operation, *_ in mutants} == set(OPERATIONS)
        missed = [mutant for mutant in mutants if not notices(mutant)]
        monkeypatch.setattr(subject, "SHAPES", subject.SHAPES[:1])
        small = sum(map(notices, mutants))
    print(f"{len(mutants) - len(missed)} of {len(mutants)} noticed, {small} by the small shapes alone", missed)
    assert len(mutants) - len(missed) >= LEAST * len(mutants), (Counter(kind for _, _, kind, _ in missed), missed)
    assert small < len(mutants) - len(missed)
