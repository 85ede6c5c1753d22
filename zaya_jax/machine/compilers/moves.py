"""Find what a compiled step copies, transposes, converts or fills in its loops without computing anything."""

from typing import NamedTuple

from zaya_jax.machine.compilers.hlo import Instruction, Place, shape_bytes, walk
from zaya_jax.machine.compilers.predict import fusion_bytes

LARGE = 50e6  # bytes
_MOVING = {"bitcast", "bitcast-convert", "broadcast", "concatenate", "constant", "convert", "copy", "dynamic-slice",
           "dynamic-update-slice", "get-tuple-element", "iota", "pad", "parameter", "reshape", "reverse", "slice",
           "transpose", "tuple"}  # fmt: skip
_INDEXING = {"s32", "u32", "s64", "u64", "pred"}  # what indices are computed in


class Move(NamedTuple):
    """An instruction of a loop that only moves bytes, and how many it reads and writes each time."""

    place: Place
    instruction: Instruction
    bytes: int


def moves_in_loops(entry: Place, least: float = LARGE) -> list[Move]:
    """Return the moves of at least `least` bytes in the loops of a step, those that move the most bytes first."""
    moves = [
        Move(place, instruction, moved)
        for place in walk(entry)
        if place.outer is not None
        for instruction in place.instructions
        if (moved := _moved(place, instruction)) >= least
    ]
    return sorted(moves, key=lambda move: -move.bytes * move.place.times)


def _moved(place: Place, instruction: Instruction) -> int:
    """Return the bytes that an instruction moves; 0 if it computes."""
    if instruction.opcode in ("copy", "copy-start", "transpose"):
        return 2 * sum(shape_bytes(place.shapes.get(name, "")) for name in instruction.operands)
    if instruction.opcode != "fusion":
        return 0
    body = place.module.computations[instruction.called("calls")]
    computes = any(x.opcode not in _MOVING and x.shape.partition("[")[0] not in _INDEXING for x in body)
    return 0 if computes else fusion_bytes(place.module, instruction)
