"""Read a scheduled HLO module from its text: computations, instructions, loops and their trip counts."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from zaya_jax.ops.parts import LAYERS, OTHER, part_of

_BY_SIZE = {1: "pred s8 u8 f8e4m3fn f8e5m2", 2: "s16 u16 bf16 f16", 4: "s32 u32 f32", 8: "s64 u64 f64"}
ITEM_BYTES = {dtype: size for size, dtypes in _BY_SIZE.items() for dtype in dtypes.split()}
FUSIONS = "fusion", "fusion-start"  # opcodes; the second is of copies that run beside other work
_COMPUTATION = re.compile(r"(ENTRY )?%([\w.\-]+) \(.*\) -> .* \{")
_INSTRUCTION = re.compile(r"(?:ROOT )?%([\w.\-]+) = (.*)")
_OPCODE = re.compile(r"([\w\-]+)\(")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
_NAME = re.compile(r"%([\w.\-]+)")


class Instruction(NamedTuple):
    """An instruction of a scheduled computation."""

    name: str  # unique in the module
    shape: str  # of its result, as HLO text
    opcode: str  # as HLO text
    operands: tuple[str, ...]  # names of the operands
    text: str  # everything after the opcode's bracket: operands, attributes, metadata, backend configuration

    @property
    def op_name(self) -> str:
        """The path of the jax operation that it comes from; empty if unknown."""
        return self.attribute(r'op_name="([^"]*)"')

    @property
    def title(self) -> str:
        """Opcode, and the end of the path of the jax operation; the name of an instruction without one."""
        wrappers = ("while", "body", "closed_call", "checkpoint")
        path = [part for part in self.op_name.split("/") if part not in wrappers]
        return f"{self.opcode} {'/'.join(path[-2:]) or self.name}"

    @property
    def custom_call(self) -> str:
        """Target of a custom call; empty for other instructions."""
        return self.attribute(r'custom_call_target="([^"]+)"')

    def attribute(self, pattern: str) -> str:
        """Return the first group of the first match of `pattern` in the attributes; empty if there is none."""
        match = re.search(pattern, self.text)
        return match[1] if match else ""

    @property
    def kernel(self) -> str:
        """Name of a Pallas kernel; empty for other instructions."""
        return self.attribute(r'op_name="[^"]*?([^"/]+)/(?:pallas_call|mpmd_map)"')

    def called(self, attribute: str) -> str:
        """Return the computation that an attribute such as 'body' or 'calls' names; empty if there is none."""
        return self.attribute(rf"\b{attribute}=%([\w.\-]+)")


@dataclass(eq=False)
class Place:
    """A computation that runs by itself: the entry, or the body of a loop."""

    computations: dict[str, list[Instruction]]  # of the module, in the order in which their instructions run
    computation: str  # its name
    trips: int = 1  # how often the loop's body runs each time
    outer: "Place | None" = None  # the place around it; None for the entry
    op_name: str = ""  # path of the jax operation that the loop comes from; empty if unknown
    counted: bool = True  # whether `trips` is known; if not, it is 1

    @property
    def instructions(self) -> list[Instruction]:
        """The instructions, in the order in which they run."""
        return self.computations[self.computation]

    @property
    def times(self) -> int:
        """The number of times it runs in a step."""
        return self.trips * (1 if self.outer is None else self.outer.times)

    @cached_property
    def shapes(self) -> dict[str, str]:
        """Shape of each instruction, by name."""
        return {instruction.name: instruction.shape for instruction in self.instructions}

    @cached_property
    def neighbours(self) -> dict[str, list[Instruction]]:
        """The instructions that take the result of each, and then those that make its operands, by its name."""
        by_name = {instruction.name: instruction for instruction in self.instructions}
        near = defaultdict[str, list[Instruction]](list)
        for instruction in self.instructions:
            for operand in instruction.operands:
                near[operand].append(instruction)
        for name, x in by_name.items():
            near[name] += [by_name[operand] for operand in x.operands if operand in by_name]
        return near

    def loops(self) -> Iterator["Place"]:
        """Yield the loops that start in this place."""
        return (self.loop(instruction) for instruction in self.instructions if instruction.opcode == "while")

    def loop(self, instruction: Instruction) -> "Place":
        """Return the place of a `while` of this place."""
        patterns = (r'known_trip_count":\{"n":"(\d+)"', r'op_name="[^"]*/micro_batches_(\d+)/while"')
        trips = next(filter(None, map(instruction.attribute, patterns)), "")
        return Place(
            self.computations, instruction.called("body"), int(trips or 1), self, instruction.op_name, bool(trips)
        )

    @property
    def kind(self) -> str:
        """The work of the place: 'step', 'micro-batches', 'layers forward', 'layers backward', 'loss' or 'loop'."""
        if self.outer is None:
            return "step"
        # A loop that XLA rewrote has lost its own path, but its instructions have theirs.
        inside = (x.op_name for x in self.instructions if x.opcode != "while")
        path = self.op_name or max(inside, key=len, default="")
        if part_of(path) == "loss":
            return "loss"
        if re.search(rf"[(/]{LAYERS}[)/]", path):
            return "layers backward" if "transpose(jvp" in path else "layers forward"
        if any(loop.kind.startswith("layers") for loop in self.loops()):
            return "micro-batches"
        return "loop"

    @cached_property
    def part(self) -> str:
        """The part of the step that a loop belongs to; `OTHER` for the entry."""
        if self.outer is None:
            return OTHER
        if (own := part_of(self.op_name)) != OTHER:
            return own
        inside = Counter(part_of(x.op_name) for x in self.instructions if part_of(x.op_name) != OTHER)
        return max(inside, key=inside.__getitem__, default=self.outer.part)

    @property
    def label(self) -> str:
        """Kinds and trip counts from the outermost place, such as 'step > micro-batches ×4 > layers forward ×20'."""
        return "step" if self.outer is None else f"{self.outer.label} > {self.kind} ×{self.trips}"


def walk(place: Place) -> Iterator[Place]:
    """Yield a place and all loops within it, outermost first."""
    yield place
    for loop in place.loops():
        yield from walk(loop)


def parse(text: str) -> Place:
    """Parse the text of a scheduled module, and return its entry; ValueError if it has none."""
    computations: dict[str, list[Instruction]] = {}
    current: list[Instruction] | None = None
    entry = ""
    for line in text.splitlines():
        if match := _COMPUTATION.fullmatch(line):
            current = computations[match[2]] = []
            entry = match[2] if match[1] else entry
        elif line.startswith("}"):
            current = None
        elif current is not None and (instruction := _parse_instruction(line)):
            current.append(instruction)
    if not entry:
        raise ValueError("The HLO module has no entry computation.")
    return Place(computations, entry)


def _parse_instruction(line: str) -> Instruction | None:
    match = _INSTRUCTION.match(re.sub(r"/\*.*?\*/", "", line.strip()))
    if not match:
        return None
    name, rest = match.groups()
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.find(" ")  # of the shape
    if not (opcode := _OPCODE.match(rest, end + 1)):
        return None
    start = opcode.end()
    operands = _NAME.findall(rest[start : _closing(rest, start - 1)])
    return Instruction(name, rest[:end], opcode[1], tuple(operands), rest[start:])


def _closing(text: str, start: int) -> int:
    """Return the index of the bracket that closes the one at `start`."""
    depth = 0
    for index in range(start, len(text)):
        depth += (text[index] == "(") - (text[index] == ")")
        if depth == 0:
            return index
    return len(text)


def arrays(shape: str) -> list[tuple[str, tuple[int, ...]]]:
    """Return dtype and dimensions of each array in the text of a shape."""
    found = ((dtype, sizes) for dtype, sizes in _ARRAY.findall(shape) if dtype in ITEM_BYTES)
    return [(dtype, tuple(int(size) for size in sizes.split(",") if size)) for dtype, sizes in found]


def shape_bytes(shape: str) -> int:
    """Return the bytes of all arrays in the text of a shape."""
    return sum(ITEM_BYTES[dtype] * math.prod(sizes) for dtype, sizes in arrays(shape))
