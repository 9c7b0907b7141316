"""AMD's code objects, executed by tinygrad's emulator, which translates AMD's published pseudocode instruction by
instruction; what it lacks or does otherwise than the manuals say is done here by hand.

The emulator is no package: ``TINYGRAD`` names a checkout of https://github.com/tinygrad/tinygrad (MIT), commit COMMIT.
Waits, hazards and caches are not modelled.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from .guarded import Pages
from .memory import MemoryFault, SharedMemory

AMD = {"gfx942": "cdna", "gfx950": "cdna", "gfx1100": "rdna3", "gfx1151": "rdna3", "gfx1201": "rdna4"}
COMMIT = "a9069c17"
CHECKOUT = Path(os.environ.get("TINYGRAD") or "~/tinygrad").expanduser()
CACHE = Path(__file__).resolve().parents[2] / ".build" / "machine_code"
TTMP, NULL, EXEC, LITERAL, PC = 108, 124, 126, 255, 256  # scalar registers, LITERAL a word of the instruction
SCRATCH = 255  # a vector register that no kernel uses
IN_PLACE = 0xE4  # how a lane takes another's value: here its own
BROADCAST: dict[int, Callable[[np.ndarray], np.ndarray]] = {  # of CDNA, from lane 15 of each row to the next, from 31
    0x142: lambda lanes: lanes // 16 * 16 - 1,
    0x143: lambda lanes: np.where(lanes < 32, -1, 31),
}
UNSET = 0xFFFFFFFF  # in a register that nobody wrote
ENDED = 0xFFFFFFFFFFFFFFFF  # the emulator's program counter after the last instruction
LOWEST = 4096
FORMS = {"i32": "<i", "i64": "<q", "fp32": "<f", "i1": "<?", "u1": "<?"}
WIDTHS = {"SHORT": 2, "USHORT": 2, "U16": 2, "B16": 2, "DWORD": 4, "B32": 4, "DWORDX2": 8, "B64": 8, "DWORDX3": 12,
          "B96": 12, "DWORDX4": 16, "B128": 16}  # fmt: skip


def lacks() -> str:
    """The reason why no code of AMD's can be executed here, or nothing."""
    if shutil.which("clang") is None:
        return "no clang, with which the emulator of AMD's instructions is compiled"
    if not (CHECKOUT / "test" / "mockgpu" / "amd" / "emu.py").is_file():
        return f"no tinygrad in {CHECKOUT}; name a checkout of commit {COMMIT} in TINYGRAD"
    return ""


@cache
def emulator() -> Any:
    CACHE.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("CACHEDB", str(CACHE / "emulator.db"))
    sys.path.insert(0, str(CHECKOUT))
    try:
        from test.mockgpu.amd import emu
    finally:
        sys.path.remove(str(CHECKOUT))
    return emu


@dataclass
class Wave:
    """A wave's registers, as the emulator and numpy see them, and the addresses that its functions take."""

    number: int
    shared: SharedMemory
    scalar: np.ndarray
    vector: np.ndarray  # (registers, lanes)
    counter: memoryview  # of 64 bits, of which that at PC / 2 is the program counter
    pointers: list[ctypes.c_uint64]
    accumulators: np.ndarray  # as many more vector registers on CDNA

    def active(self) -> np.ndarray:
        """The lanes that EXEC has on."""
        lanes = np.arange(self.vector.shape[1])
        return (self.scalar[EXEC + lanes // 32] >> (lanes % 32).astype(np.uint32)) & 1 == 1


# ---- instructions by hand -----------------------------------------------------------------------------------


@cache
def memory() -> np.ndarray:
    """Every byte of this process, from the address LOWEST on."""
    return np.frombuffer((ctypes.c_uint8 * ((1 << 47) - 2 * LOWEST)).from_address(LOWEST), np.uint8)


def field(instruction: Any, name: str) -> int:
    place = getattr(type(instruction), name)
    return (instruction._raw >> place.lo) & place.mask


def buffer(wave: Wave, instruction: Any) -> None:
    """Loads and stores by offset into a buffer without strides: outside of it reads give 0 and writes vanish."""
    name, scalar = instruction.op.name, wave.scalar
    resource = field(instruction, "srsrc") * 4 if hasattr(type(instruction), "srsrc") else field(instruction, "rsrc")
    low, high, size, _ = (int(word) for word in scalar[resource : resource + 4])
    plain = field(instruction, "offen") and not field(instruction, "idxen") and not high >> 16
    if not plain or scalar[field(instruction, "soffset")] or getattr(instruction, "lds", 0):
        raise NotImplementedError(f"this form of {name.lower()}")
    at = field(instruction, "ioffset" if hasattr(type(instruction), "ioffset") else "offset")
    offsets = wave.vector[field(instruction, "vaddr")].astype(np.int64) + at
    width, first = WIDTHS[name.rsplit("_", 1)[1]], field(instruction, "vdata")
    registers = wave.vector[first : first + -(-width // 4)]
    lanes = np.flatnonzero(wave.active())
    inside = lanes[offsets[lanes] + width <= size]
    places = (offsets[inside] + (low | high << 32) - LOWEST)[:, None] + np.arange(width)
    if "STORE" in name:
        memory()[places] = np.ascontiguousarray(registers.T).view(np.uint8)[inside, :width]
        return
    loaded = np.zeros((len(lanes), -(-width // 4) * 4), np.uint8)
    loaded[np.isin(lanes, inside), :width] = memory()[places]
    registers[:, lanes] = loaded.view(np.uint32).T


def permlanex16(wave: Wave, instruction: Any) -> None:
    """Each lane of a row of 16 takes from the other row the lane that its four bits in two words name."""
    lanes, active = np.arange(wave.vector.shape[1]), wave.active()
    sources = [field(instruction, name) for name in ("src1", "src2")]
    words = np.array([instruction.literal if at == LITERAL else wave.scalar[at] for at in sources], np.uint32)
    chosen = (words[lanes % 16 // 8] >> (lanes % 8 * 4).astype(np.uint32)) & 15
    source = (lanes // 16 ^ 1) * 16 + chosen
    fetch_inactive, zero = field(instruction, "opsel") & 1, field(instruction, "opsel") & 2
    target = wave.vector[field(instruction, "vdst")]
    values = wave.vector[field(instruction, "src0") - 256][source]
    if not fetch_inactive:
        values = np.where(active[source], values, np.where(bool(zero), 0, target))
    target[active] = values[active]


def swizzle(wave: Wave, instruction: Any) -> None:
    """Each lane of 32 takes that at its own number & and | or ^ xor; 0 from one that is off."""
    lanes, active = np.arange(64), wave.active()
    mask = field(instruction, "offset0") | field(instruction, "offset1") << 8
    if mask >> 15:
        raise NotImplementedError(f"ds_swizzle_b32 of {mask:#x}")
    source = lanes & 32 | ((lanes & mask & 31) | mask >> 5 & 31) ^ mask >> 10 & 31
    values = np.where(active[source], wave.vector[field(instruction, "addr")][source], 0)
    wave.vector[field(instruction, "vdst")][active] = values[active]


def exchange(wave: Wave, instruction: Any) -> None:
    """Loads and stores of shared memory, with one offset in bytes or two in elements or 64 elements."""
    form = SHARED.fullmatch(instruction.op.name)
    assert form is not None
    stores, width = form["verb"] in ("WRITE", "STORE"), int(form["bits"]) // 8
    offsets = [field(instruction, "offset0"), field(instruction, "offset1")]
    step = width * (64 if form["far"] else 1)
    offsets = [step * each for each in offsets] if form["two"] else [offsets[0] | offsets[1] << 8]
    lanes = np.flatnonzero(wave.active())
    if not len(lanes):
        return
    block, waves = np.zeros(len(lanes), np.int64), np.full(len(lanes), wave.number)
    addresses = wave.vector[field(instruction, "addr")][lanes].astype(np.int64)
    target, piece = field(instruction, "vdst"), min(width, 4)
    loaded = []
    for which, offset in enumerate(offsets):
        source = field(instruction, f"data{which}")
        for part in range(0, width, 4):
            place = addresses + offset + part
            if stores:
                values = np.ascontiguousarray(wave.vector[source + part // 4, lanes])[:, None].view(np.uint8)
                wave.shared.write(block, waves, place, values[:, :piece])
            else:
                word = np.zeros((len(lanes), 4), np.uint8)
                word[:, :piece] = wave.shared.read(block, waves, place, piece)
                loaded.append(word.view(np.uint32)[:, 0])
    for number, values in enumerate(loaded):
        wave.vector[target + number, lanes] = values


def nothing(wave: Wave, instruction: Any) -> None:
    """Caches are not modelled."""


SHARED = re.compile(
    r"DS_(?P<verb>READ|LOAD|WRITE|STORE)(?P<two>2|_2ADDR)?(?P<far>ST64|_STRIDE64)?_[BU](?P<bits>8|16|32|64|96|128)"
)
HANDS: tuple[tuple[str, Callable[[Wave, Any], None]], ...] = (
    (r"(BUFFER_GL[01]|GLOBAL|BUFFER)_INV|BUFFER_WBL2", nothing),
    (r"BUFFER_(LOAD|STORE)_\w+", buffer),
    (r"V_PERMLANEX16_B32\w*", permlanex16),
    (r"DS_SWIZZLE_B32", swizzle),
    (SHARED.pattern, exchange),
)

# ---- code ---------------------------------------------------------------------------------------------------


@dataclass
class Step:
    """One instruction: a function of the emulator with the places of its arguments, or one of HANDS."""

    instruction: Any
    size: int
    function: Callable[..., Any] | None = None
    slots: tuple[int, ...] = ()
    hand: Callable[[Wave, Any], None] | None = None
    waits: bool = False
    copied: tuple[int, np.ndarray] | None = None  # a register, and the lanes of it that go to SCRATCH before


class Image:
    """A code object in memory, with every instruction of it translated."""

    def __init__(self, code: bytes, arch: str) -> None:
        emulator()
        from tinygrad.runtime.support.elf import elf_loader

        loaded, sections, _ = elf_loader(code)
        self.arch = arch
        self.bytes = np.zeros(len(loaded) + 64, np.uint8)
        self.bytes[: len(loaded)] = loaded
        base = self.bytes.ctypes.data
        starts = {section.name: section.header.sh_addr for section in sections}
        descriptor = bytes(loaded[starts[".rodata"] : starts[".rodata"] + 64])
        self.shared, private, self.arguments, _, entry = struct.unpack_from("<IIIIq", descriptor)
        _, self.resources, properties, preload = struct.unpack_from("<IIHH", descriptor, 48)
        assert private == 0 and properties & 0xFF == 8, "registers at the start are others than these"
        self.preloaded = preload & 0x7F  # words of the arguments that are in registers, after those of their address
        start = base + starts[".rodata"] + entry
        self.entry = start + (256 if self.preloaded else 0)
        text = next(section for section in sections if section.name == ".text")
        self.steps: dict[int, Step] = {}
        while start < base + text.header.sh_addr + text.header.sh_size:
            self.steps[start] = self._step(start)
            start += self.steps[start].size

    def _other_lanes(self, instruction: Any, at: int) -> tuple[int, np.ndarray]:
        """The register that goes to SCRATCH before, since the emulator writes lanes in turn that others read then; and
        the lanes to take, since it has another notion of ``row_bcast``."""
        control, keeps = field(instruction, "dpp"), emulator()._op_name(instruction).startswith("V_MOV_B32")
        whole = field(instruction, "row_mask") == field(instruction, "bank_mask") == 15
        lanes = np.arange(64 if self.arch == "cdna" else 32)
        changes = {"vsrc0": SCRATCH}
        if control in BROADCAST:
            lanes, changes["dpp"] = BROADCAST[control](lanes), IN_PLACE
        if (not field(instruction, "bc") and (control in BROADCAST or not keeps)) or not (keeps or whole):
            raise NotImplementedError(f"lanes that {instruction!r} does not write")
        raw = instruction._raw
        for name, value in changes.items():
            place = getattr(type(instruction), name)
            raw = raw & ~(place.mask << place.lo) | value << place.lo
        code = raw.to_bytes(instruction.size(), "little")
        ctypes.memmove(at, code, len(code))
        return field(instruction, "vsrc0"), lanes

    def _step(self, at: int) -> Step:
        emu = emulator()
        code = ctypes.string_at(at, 16)
        others = {"rdna3": [emu.ir3.MUBUF], "rdna4": [emu.ir4.VBUFFER]}.get(self.arch, [])
        from tinygrad.renderer.amd import _matches

        kind = next((kind for kind in others if _matches(code, kind)), None)
        instruction = kind.from_bytes(code) if kind else emu.decode_inst(code, self.arch)
        step = Step(instruction, instruction.size())
        name = emu._op_name(instruction)
        step.hand = next((hand for pattern, hand in HANDS if re.fullmatch(pattern, name)), None)
        if step.hand:
            return step
        if "DPP16" in type(instruction).__name__:
            step.copied = self._other_lanes(instruction, at)
            code = ctypes.string_at(at, 16)
        if name.startswith("DS_") and "PERMUTE" not in name:
            raise NotImplementedError(f"{name.lower()} in shared memory")
        program, runtime = emu._get_runner(code[: instruction.size() + 4], self.arch)
        step.function, step.slots = runtime.fxn, tuple(program.arg.globals)
        step.waits = name in ("S_BARRIER", "S_BARRIER_WAIT")
        return step


def assembled(text: str, target: Any) -> bytes:
    """The code object of an assembly, as Triton makes it."""
    from triton._C.libtriton import llvm
    from triton.backends.amd.compiler import HIPBackend

    llvm.init_targets()  # as compiling does, which a kept kernel needs no more
    return HIPBackend.make_hsaco(text, {}, target)  # of the options it reads the target's name alone


@cache
def image(code: bytes, arch: str) -> Image:
    return Image(code, arch)


class Launch:
    """One launch: programs in turn, the waves of each up to their next barrier, in random order if there is one."""

    def __init__(self, code: Image, arguments: bytes, threads: int, shared: int, order: np.random.Generator | None):
        self.code, self.order, self.lanes = code, order, 64 if code.arch == "cdna" else 32
        self.waves, self.steps = threads // self.lanes, 0
        self.shared, self.size = SharedMemory(1, 0), max(shared, code.shared)
        self.arguments = Pages(max(len(arguments), code.arguments))
        self.arguments.bytes.zero_()
        self.arguments.bytes.numpy()[: len(arguments)] = np.frombuffer(arguments, np.uint8)

    def wave(self, number: int, program: int) -> Wave:
        scalar = np.full(PC + 4, UNSET, np.uint32)
        scalar[128:193], scalar[193:209], scalar[209:] = np.arange(65), -np.arange(1, 17), 0
        scalar[[*emulator().F32_INLINE]] = [*emulator().F32_INLINE.values()]
        if self.code.arch != "cdna":
            scalar[NULL] = 0
        scalar[:2] = np.array([self.arguments.address], np.uint64).view(np.uint32)
        words = self.arguments.bytes.numpy()[: 4 * self.code.preloaded].view(np.uint32)
        scalar[2 : 2 + len(words)] = words
        if self.code.arch == "rdna4":
            scalar[TTMP + 9], scalar[TTMP + 7], scalar[TTMP + 8] = program, 0, number << 25
        else:
            scalar[self.code.resources >> 1 & 31] = program
        vector = np.full((256, self.lanes), UNSET, np.uint32)
        vector[0] = number * self.lanes + np.arange(self.lanes)
        accumulators = np.full_like(vector, UNSET) if self.code.arch == "cdna" else vector
        counter = memoryview(scalar.view(np.uint64))
        counter[PC // 2] = self.code.entry
        places = (scalar.ctypes.data, vector.ctypes.data, 0, 0, 0, accumulators.ctypes.data)  # no shared, no private
        pointers = [ctypes.c_uint64(place) for place in places]
        return Wave(number, self.shared, scalar, vector, counter, pointers, accumulators)

    def run(self, programs: int) -> int:
        """Instructions that waves executed."""
        for program in range(programs):
            self.shared = SharedMemory(1, self.size)
            waves = [self.wave(number, program) for number in range(self.waves)]
            while waves:
                if self.order is not None:
                    waves = [waves[place] for place in self.order.permutation(len(waves))]
                waves = [wave for wave in waves if self.to_barrier(wave)]
                self.shared.barrier(np.ones(1, bool))
        return self.steps

    def to_barrier(self, wave: Wave) -> bool:
        """Run a wave up to its next barrier; False where it ended."""
        steps, counter, pointers = self.code.steps, wave.counter, wave.pointers
        while (at := counter[PC // 2]) != ENDED:
            if (step := steps.get(at)) is None:  # a stray write reached the counter, which is this process's memory
                raise MemoryFault(f"the program goes on at {at:#x}, outside its code")
            self.steps += 1
            if step.copied is not None:
                register, lanes = step.copied
                wave.vector[SCRATCH] = np.where(lanes < 0, 0, wave.vector[register][lanes])
            if step.hand is not None:
                step.hand(wave, step.instruction)
                counter[PC // 2] = at + step.size
            else:
                step.function(*[pointers[slot] for slot in step.slots])  # type: ignore[misc]
            if step.waits:
                return True
        return False


def packed(text: str, kinds: list[str], values: list[int | float]) -> bytes:
    """The arguments where the assembly says that a kernel looks for them."""
    listed = text[text.index(".args:") :]
    places = [int(place) for place in re.findall(r"\.offset:\s+(\d+)", listed)]
    made = bytearray(places[-1] + 8)
    for place, kind, value in zip(places, kinds, values, strict=False):
        struct.pack_into("<Q" if kind.startswith("*") else FORMS[kind], made, place, value)
    return bytes(made)
