"""A PTX interpreter: one lane per thread, all blocks of a launch together, the lowest program counter first."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from . import arithmetic
from .arithmetic import TYPES, Array
from .memory import GlobalMemory, SharedMemory
from .program import Instruction, Program

WARP = 32
POISON = 0xFF  # each byte of a register that nothing wrote: NaN as a float
ADDRESS = re.compile(r"\[\s*([\w%$]+)\s*(?:\+\s*(-?\d+))?\s*\]")
RUNNING, WAITING, ENDED = 0, 1, 2


class Deadlock(RuntimeError):
    """No lane can run, and not all have ended; or the lanes of a warp part before a shuffle."""


class Launch:
    """One launch of a kernel.

    Args:
        parameters: the values of the kernel's parameters, in order; missing ones are null pointers.
        blocks: the number of blocks. shared: bytes of shared memory.
        order: None runs all warps in step; a generator runs whole warps in random order between barriers.
    """

    def __init__(
        self,
        program: Program,
        parameters: list[int | float],
        blocks: int,
        shared: int,
        memory: GlobalMemory,
        order: np.random.Generator | None = None,
    ) -> None:
        self.program, self.memory, self.order = program, memory, order
        lanes = np.arange(blocks * program.threads)
        self.block, self.thread = lanes // program.threads, lanes % program.threads
        self.warp = self.thread // WARP
        self.blocks, self.global_warp = blocks, lanes // WARP
        self.shared = SharedMemory(blocks, shared)
        values = [*parameters, *[0] * (len(program.parameters) - len(parameters))]
        self.parameters = {
            name: np.array([value], TYPES["f32" if isinstance(value, float) else kind.replace("u", "s")])
            for (name, kind), value in zip(program.parameters.items(), values, strict=True)
        }
        self.registers = {
            name: np.frombuffer(bytes([POISON]) * TYPES[kind].itemsize * len(lanes), TYPES[kind]).copy()
            for name, kind in program.registers.items()
        }
        self.counter, self.state = np.zeros(len(lanes), np.int64), np.zeros(len(lanes), np.int8)
        self.chosen: int | None = None
        self.steps = 0

    def run(self) -> None:
        """Run every lane to its end.

        Raises:
            MemoryFault, Race, Deadlock: the kernel is wrong.
        """
        with np.errstate(all="ignore"):
            while (lanes := self._next()) is not None:
                self.steps += 1
                instruction = self.program.instructions[self.counter[lanes[0]]]
                self.counter[lanes] += 1
                if instruction.guard:
                    lanes = lanes[self.registers[instruction.guard][lanes] != instruction.inverted]
                if len(lanes):
                    operation = OPERATIONS.get(instruction.opcode)
                    if operation is None:
                        raise NotImplementedError(str(instruction))
                    operation(self, instruction, lanes)

    def _next(self) -> Array | None:
        """The lanes that run next, all at the same instruction; None when all have ended."""
        running = self.state == RUNNING
        if not running.any():
            waiting = self.state == WAITING
            if not waiting.any():
                return None
            self._release(waiting)
            running = self.state == RUNNING
        if self.order is not None:
            warps = self.global_warp
            if self.chosen is None or not running[warps == self.chosen].any():
                self.chosen = int(self.order.choice(np.unique(warps[running])))
            running &= warps == self.chosen
        counter = np.where(running, self.counter, np.iinfo(np.int64).max)
        return np.nonzero(counter == counter.min())[0]

    def _release(self, waiting: Array) -> None:
        """Let the blocks run on whose lanes all wait: once nothing runs, that is each block with lanes that wait."""
        ended = np.unique(self.block[self.state == ENDED])
        there = np.unique(self.block[waiting])
        if np.isin(there, ended).any():
            raise Deadlock("some lanes of a block wait at a barrier, others have ended")
        self.state[waiting] = RUNNING
        self.shared.barrier(np.isin(np.arange(self.blocks), there))

    # ---- operands -------------------------------------------------------------------------------------------

    def value(self, operand: str, kind: str, lanes: Array) -> Array:
        """An operand, as an array of the type ``kind`` with one element per lane, or with one for all."""
        to = TYPES[kind]
        if operand in self.registers:
            register = self.registers[operand][lanes]
            if register.dtype == to or to.itemsize == register.itemsize:
                return register.view(to)
            return register.astype(f"u{to.itemsize}").view(to)
        special = {"%tid.x": self.thread, "%ctaid.x": self.block}.get(operand)
        if special is not None:
            return special[lanes].astype(to)
        if operand == "global_smem":
            return np.zeros(1, to)
        if operand.startswith("0f"):
            return np.array([int(operand[2:], 16)], np.uint32).view(to)
        number = int(operand.rstrip("U"), 0) & ((1 << 8 * to.itemsize) - 1)
        return np.array([number], f"u{to.itemsize}").view(to)

    def write(self, target: str, values: Array, lanes: Array) -> None:
        """Write a register, extended to its width by the sign of the values' type; ``_`` takes what nobody needs."""
        if target == "_":
            return
        register = self.registers[target]
        if values.dtype == register.dtype or values.itemsize == register.itemsize:
            register[lanes] = np.ascontiguousarray(values).view(register.dtype)
        else:
            register[lanes] = values.astype(f"{values.dtype.kind}{register.itemsize}").view(register.dtype)

    def address(self, operand: str, lanes: Array) -> Array:
        """The address ``[register + offset]`` of each lane."""
        name, offset = ADDRESS.fullmatch(operand).groups()
        kind = "b64" if self.registers.get(name, np.empty(0, "u4")).itemsize == 8 else "b32"
        base = self.value(name, kind, lanes).astype(np.int64) + int(offset or 0)
        return np.broadcast_to(base, lanes.shape)

    def whole_warps(self, lanes: Array) -> Array:
        """``lanes`` as (warps, 32).

        Raises:
            Deadlock: a warp's lanes are not all here.
        """
        if len(lanes) % WARP or np.any(lanes[::WARP] + WARP - 1 != lanes[WARP - 1 :: WARP]):
            raise Deadlock("a shuffle or matrix move waits for lanes that went elsewhere")
        return lanes.reshape(-1, WARP)


def _pure(function: Callable[..., Array]) -> Callable[[Launch, Instruction, Array], None]:
    """An operation that computes its target from its other operands, all of the instruction's type."""

    def operation(launch: Launch, instruction: Instruction, lanes: Array) -> None:
        target, *sources = instruction.operands
        kind, flushes = instruction.modifiers[-1], "ftz" in instruction.modifiers
        values = [launch.value(source, kind, lanes) for source in sources]
        values = [arithmetic.flushed(value) for value in values] if flushes else values
        result = function(*values)
        launch.write(target, arithmetic.flushed(result) if flushes else result, lanes)

    return operation


def _multiplied(launch: Launch, instruction: Instruction, lanes: Array) -> None:
    """mul and mad: floats, the lower half of a product, or all of it."""
    target, *sources = instruction.operands
    kind, wide = instruction.modifiers[-1], "wide" in instruction.modifiers
    left, right = (launch.value(source, kind, lanes) for source in sources[:2])
    if wide:
        kind = f"{kind[0]}{2 * int(kind[1:])}"
        left, right = left.astype(TYPES[kind]), right.astype(TYPES[kind])
    result = left * right
    if instruction.opcode == "mad":
        result = result + launch.value(sources[2], kind, lanes)
    launch.write(target, result, lanes)


def _fma(launch: Launch, instruction: Instruction, lanes: Array) -> None:
    target, *sources = instruction.operands
    a, b, c = (launch.value(source, "f32", lanes) for source in sources)
    if "ftz" in instruction.modifiers:
        a, b, c = (arithmetic.flushed(x) for x in (a, b, c))
    a = -a if "minus_product" in instruction.modifiers else a
    c = -c if "minus_sum" in instruction.modifiers else c
    result = arithmetic.fma(a, b, c)
    launch.write(target, arithmetic.flushed(result) if "ftz" in instruction.modifiers else result, lanes)


def _divided(launch: Launch, instruction: Instruction, lanes: Array) -> None:
    target, *sources = instruction.operands
    a, b = (launch.value(source, instruction.modifiers[-1], lanes) for source in sources)
    if instruction.modifiers == ("full", "f32"):
        launch.write(target, arithmetic.approximated(a.astype(np.float64) / b, a, b), lanes)
    else:
        launch.write(target, arithmetic.divided(a, b)[instruction.opcode == "rem"], lanes)


def _exact_then_moved(function: Callable[[Array], Array]) -> Callable[[Array], Array]:
    return lambda x: arithmetic.approximated(function(x.astype(np.float64)), x)


def _largest(a: Array, b: Array) -> Array:
    return np.fmax(a, b) if a.dtype.kind == "f" else np.maximum(a, b)


def _shifted(launch: Launch, instruction: Instruction, lanes: Array) -> None:
    target, source, by = instruction.operands
    x = launch.value(source, instruction.modifiers[-1], lanes)
    left = instruction.opcode == "shl"
    launch.write(target, arithmetic.shifted(x, launch.value(by, "b32", lanes), left), lanes)


def _bit_field(launch: Launch, instruction: Instruction, lanes: Array) -> None:
    target, source, *place = instruction.operands
    x = launch.value(source, instruction.modifiers[-1], lanes)
    launch.write(target, arithmetic.field_of(x, *(launch.value(part, "b32", lanes) for part in place)), lanes)


def _converted(launch: Launch, instruction: Instruction, lanes: Array) -> None:
    target, *sources = instruction.operands
    *rounding, to, source = instruction.modifiers
    values = [launch.value(operand, source, lanes) for operand in sources]
    if to.endswith("x2"):
        launch.write(target, arithmetic.packed(*values, to, rounding[0]), lanes)
    else:
        launch.write(target, arithmetic.converted(*values, to, source, "".join(rounding)), lanes)


def _moved(launch: Launch, instruction: Instruction, lanes: Array) -> None:
    target, source = instruction.operands
    kind = instruction.modifiers[-1]
    if isinstance(target, tuple):
        whole, bits = launch.value(source, kind, lanes), 8 * TYPES[kind].itemsize // len(target)
        for place, part in enumerate(target):
            launch.write(part, (whole >> whole.dtype.type(bits * place)).astype(f"u{bits // 8}"), lanes)
    elif isinstance(source, tuple):
        bits = 8 * TYPES[kind].itemsize // len(source)
        parts = [launch.value(part, f"b{bits}", lanes).astype(TYPES[kind]) for part in source]
        launch.write(target, sum(part << part.dtype.type(bits * place) for place, part in enumerate(parts)), lanes)
    else:
        launch.write(target, launch.value(source, kind, lanes), lanes)


def _selected(launch: Launch, instruction: Instruction, lanes: Array) -> None:
    target, yes, no, predicate = instruction.operands
    kind = instruction.modifiers[-1]
    values = launch.value(yes, kind, lanes), launch.value(no, kind, lanes)
    launch.write(target, np.where(launch.registers[predicate][lanes], *values), lanes)


def _compared(launch: Launch, instruction: Instruction, lanes: Array) -> None:
    target, *sources = instruction.operands
    relation, kind = instruction.modifiers[0], instruction.modifiers[-1]
    a, b = (launch.value(source, kind, lanes) for source in sources)
    pairs = zip(arithmetic.halves(a, kind), arithmetic.halves(b, kind), strict=True) if kind[-2:] == "x2" else [(a, b)]
    for name, pair in zip(target.split("|"), pairs, strict=True):
        launch.registers[name][lanes] = arithmetic.compared(relation, *pair)


def _vector(operand: str | tuple[str, ...]) -> tuple[str, ...]:
    return operand if isinstance(operand, tuple) else (operand,)


def _loaded(launch: Launch, instruction: Instruction, lanes: Array) -> None:
    targets, source = _vector(instruction.operands[0]), instruction.operands[1]
    space, kind = instruction.modifiers[0], instruction.modifiers[-1]
    if space == "param":
        value = launch.parameters[source.strip("[]")]
        launch.write(targets[0], value.view(TYPES[kind]), lanes)
        return
    size = TYPES[kind].itemsize * len(targets)
    addresses = launch.address(source, lanes)
    if space == "global":
        data = launch.memory.read(addresses, size)
    else:
        data = launch.shared.read(launch.block[lanes], launch.warp[lanes], addresses, size)
    for target, column in zip(targets, np.ascontiguousarray(data).view(TYPES[kind]).T, strict=True):
        launch.write(target, column, lanes)


def _stored(launch: Launch, instruction: Instruction, lanes: Array) -> None:
    target, sources = instruction.operands[0], _vector(instruction.operands[1])
    space, kind = instruction.modifiers[0], instruction.modifiers[-1]
    columns = [np.broadcast_to(launch.value(source, kind, lanes), lanes.shape) for source in sources]
    data = np.ascontiguousarray(np.stack(columns, axis=1)).view(np.uint8)
    addresses = launch.address(target, lanes)
    if space == "global":
        launch.memory.write(addresses, data)
    else:
        launch.shared.write(launch.block[lanes], launch.warp[lanes], addresses, data)


def _shuffled(launch: Launch, instruction: Instruction, lanes: Array) -> None:
    target, source, distance, *rest = instruction.operands
    if instruction.modifiers != ("sync", "bfly", "b32") or rest != ["31", "-1"]:
        raise NotImplementedError(str(instruction))
    launch.whole_warps(lanes)
    launch.write(target, launch.registers[source][lanes ^ int(distance)], lanes)


def _matrix_moved(launch: Launch, instruction: Instruction, lanes: Array) -> None:
    """ldmatrix and stmatrix: lane 8 i + r has the address of row r of matrix i; a lane holds two elements of a row."""
    loads, trans = instruction.opcode == "ldmatrix", "trans" in instruction.modifiers
    source, registers = instruction.operands if not loads else instruction.operands[::-1]
    warps, lane = launch.whole_warps(lanes), np.arange(WARP)
    rows = launch.address(source, lanes).reshape(-1, WARP)
    for matrix, register in enumerate(_vector(registers)):
        for half in range(2):
            row, column = (2 * (lane % 4) + half, lane // 4) if trans else (lane // 4, 2 * (lane % 4) + half)
            addresses = (rows[:, 8 * matrix + row] + 2 * column).reshape(-1)
            where = launch.block[lanes], launch.warp[lanes], addresses
            parts = launch.registers[register].view(np.uint16).reshape(-1, 2)
            if loads:
                parts[warps.reshape(-1), half] = launch.shared.read(*where, 2).view(np.uint16)[:, 0]
            else:
                launch.shared.write(*where, np.ascontiguousarray(parts[lanes, half])[:, None].view(np.uint8))


def _branched(launch: Launch, instruction: Instruction, lanes: Array) -> None:
    launch.counter[lanes] = launch.program.labels[instruction.operands[0]]


def _waits(launch: Launch, instruction: Instruction, lanes: Array) -> None:
    launch.state[lanes] = WAITING


def _ends(launch: Launch, instruction: Instruction, lanes: Array) -> None:
    launch.state[lanes] = ENDED


OPERATIONS: dict[str, Callable[[Launch, Instruction, Array], None]] = {
    "add": _pure(np.add), "sub": _pure(np.subtract), "neg": _pure(np.negative), "abs": _pure(np.abs),
    "max": _pure(_largest), "min": _pure(lambda a, b: np.fmin(a, b) if a.dtype.kind == "f" else np.minimum(a, b)),
    "and": _pure(np.bitwise_and), "or": _pure(np.bitwise_or), "xor": _pure(np.bitwise_xor), "not": _pure(np.invert),
    "ex2": _pure(_exact_then_moved(np.exp2)), "rsqrt": _pure(_exact_then_moved(lambda x: 1 / np.sqrt(x))),
    "prmt": _pure(arithmetic.permuted), "mul": _multiplied, "mad": _multiplied, "fma": _fma, "div": _divided,
    "rem": _divided, "shl": _shifted, "shr": _shifted, "bfe": _bit_field, "cvt": _converted, "mov": _moved,
    "selp": _selected, "setp": _compared, "ld": _loaded, "st": _stored, "shfl": _shuffled, "bra": _branched,
    "ldmatrix": _matrix_moved, "stmatrix": _matrix_moved, "bar": _waits, "ret": _ends,
}  # fmt: skip
