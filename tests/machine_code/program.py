"""PTX text as a list of instructions, with its parameters, registers and labels."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field, replace

INSTRUCTION = re.compile(r"(?:@(!?)(%\w+)\s+)?([a-z][\w.:]*)\s*(.*)")
PARAMETER = re.compile(r"\.param\s+\.(\w+)\b.*?(\w+_param_\d+)")
REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+(%\w+?)<(\d+)>")
CALCULATED = ("add", "sub")  # what ptxas may fuse with a product


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction.

    Args:
        opcode: the name before the first dot; modifiers: what follows, ending with the type.
        operands: registers, numbers, labels, addresses ``[...]``, or tuples of registers.
        guard: register of the predicate, empty if there is none; inverted: it runs where the predicate is false.
    """

    opcode: str
    modifiers: tuple[str, ...]
    operands: tuple[str | tuple[str, ...], ...]
    guard: str = ""
    inverted: bool = False

    def __str__(self) -> str:
        return " ".join([".".join((self.opcode, *self.modifiers)), *map(str, self.operands)])


@dataclass
class Program:
    """A kernel: instructions, labels (name to index), parameters (name to type) in order, registers (name to type)."""

    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    parameters: dict[str, str] = field(default_factory=dict)
    registers: dict[str, str] = field(default_factory=dict)
    threads: int = 0


def parsed(text: str) -> Program:
    """The one kernel of a PTX file.

    Raises:
        ValueError: a line is not understood.
    """
    program = Program()
    for raw in text.splitlines():
        line = raw.partition("//")[0].strip().rstrip(";,").strip()
        if label := re.fullmatch(r"(\$\w+):", line):
            program.labels[label[1]] = len(program.instructions)
        elif parameter := PARAMETER.match(line):
            program.parameters[parameter[2]] = parameter[1]
        elif registers := REGISTERS.match(line):
            program.registers |= {f"{registers[2]}{n}": registers[1] for n in range(int(registers[3]))}
        elif line.startswith(".reqntid"):
            program.threads = int(line.split()[1])
        elif line and line[0] not in ".{}()":
            program.instructions.append(_instruction(line))
    return program


def _instruction(line: str) -> Instruction:
    match = INSTRUCTION.fullmatch(line)
    if match is None:
        raise ValueError(f"PTX line {line!r} is not understood")
    inverted, guard, name, rest = match.groups()
    opcode, *modifiers = name.split(".")
    operands: list[str | tuple[str, ...]] = []
    for part in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*", rest):
        inside = tuple(name.strip() for name in part.strip("{} ").split(","))
        operands.append(inside if part.startswith("{") else part.strip())
    return Instruction(opcode, tuple(modifiers), tuple(operands), guard or "", bool(inverted))


def contracted(program: Program) -> Program:
    """``program`` with each product that ptxas may fuse into a sum fused: neither has a rounding of its own."""
    counts = Counter(_written(instruction) for instruction in program.instructions)
    products = {
        instruction.operands[0]: instruction
        for instruction in program.instructions
        if (instruction.opcode, instruction.modifiers) == ("mul", ("f32",)) and counts[instruction.operands[0]] == 1
    }
    fused = [_fused(instruction, products, counts) for instruction in program.instructions]
    return replace(program, instructions=fused)


def _written(instruction: Instruction) -> str | tuple[str, ...]:
    return instruction.operands[0] if instruction.operands else ""


def _fused(instruction: Instruction, products: dict, counts: Counter) -> Instruction:
    if instruction.opcode not in CALCULATED or instruction.modifiers != ("f32",):
        return instruction
    target, left, right = instruction.operands
    product, other = (products.get(left), right) if left in products else (products.get(right), left)
    if product is None or any(counts[factor] > 1 for factor in product.operands[1:]):
        return instruction
    signs = {"add": (), "sub": ("minus_sum",) if left in products else ("minus_product",)}[instruction.opcode]
    return replace(
        instruction, opcode="fma", modifiers=(*signs, "rn", "f32"), operands=(target, *product.operands[1:], other)
    )
