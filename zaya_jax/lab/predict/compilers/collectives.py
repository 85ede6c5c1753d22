"""Find the collectives of a compiled step: where they run, over which mesh axes, and what runs meanwhile."""

import itertools
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from zaya_jax.lab.predict.compilers.hlo import Instruction, Place, shape_bytes, walk

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")


class Collective(NamedTuple):
    """One collective of a compiled step."""

    kind: str  # of `KINDS`
    place: Place  # where it runs
    start: int  # index of its start among the place's instructions
    done: int  # index of its end; `start` if it blocks
    bytes: int  # the larger of input and output on one device; of a ragged all-to-all the smaller, mostly full one
    groups: tuple[tuple[int, ...], ...]  # devices that communicate with each other

    @property
    def between(self) -> list[Instruction]:
        """Instructions that are scheduled between start and end."""
        return self.place.instructions[self.start + 1 : self.done]


def collectives(entry: Place) -> list[Collective]:
    """Return all collectives of the step."""
    return [collective for place in walk(entry) for collective in place_collectives(place)]


def place_collectives(place: Place) -> Iterator[Collective]:
    """Yield the collectives of a place, without those of its loops."""
    started: dict[str, int] = {}
    for index, instruction in enumerate(place.instructions):
        kind = instruction.opcode.removesuffix("-start").removesuffix("-done")
        if kind not in KINDS and kind != "async":
            continue
        if instruction.opcode.endswith("-start"):
            started[instruction.name] = index
            continue
        start = started.get(instruction.operands[0], index) if instruction.opcode.endswith("-done") else index
        first = place.instructions[start]
        if kind == "async":  # the collective is inside the called computation
            inner = place.computations[first.called("calls")]
            first = next((x for x in inner if x.opcode in KINDS), first)
            if first.opcode not in KINDS:
                continue
            kind = first.opcode
        operands = place.instructions[start].operands
        sizes = [shape_bytes(place.shapes.get(name, "")) for name in operands]
        # A ragged all-to-all goes from tokens to a buffer for the worst case, or back; its other operands are indices.
        ragged = kind == "ragged-all-to-all"
        size = min(sizes[:2]) if ragged else max(sum(sizes), shape_bytes(instruction.shape))
        yield Collective(kind, place, start, index, size, device_groups(first))


def device_groups(instruction: Instruction) -> tuple[tuple[int, ...], ...]:
    """Return the groups of devices of a collective, from any of HLO's three notations, or its pairs."""
    text = instruction.text
    if match := re.search(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{}]*\})\}", text):
        return tuple(tuple(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", match[1]))
    if match := re.search(r"replica_groups=(\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?)", text):
        shape = [int(size) for size in re.findall(r"\d+", match[1].partition("<=")[0])]
        return tuple(map(tuple, _iota(match[1].partition("<=")[2]).reshape(shape).tolist()))
    if match := re.search(r"replica_groups=mesh\[(.*?)\](?:, device_ids=\((.*?)\)(?= \{))? \{(.*?)\}", text):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", match[1])}
        count = int(np.prod(list(sizes.values())))
        ids = _iota(match[2]) if match[2] else np.arange(count)
        return _mesh_groups(ids.reshape(list(sizes.values())), list(sizes), re.findall(r"'(\w+)'", match[3]))
    return ()


def _iota(text: str) -> np.ndarray:
    """Return the device numbers that '[2,4]T(1,0)' stands for, flat."""
    sizes, _, order = text.partition("T")
    shape = [int(size) for size in re.findall(r"\d+", sizes)]
    numbers = np.arange(int(np.prod(shape))).reshape(shape)
    return (numbers.transpose([int(axis) for axis in re.findall(r"\d+", order)]) if order else numbers).reshape(-1)


def _mesh_groups(ids: np.ndarray, names: list[str], axes: list[str]) -> tuple[tuple[int, ...], ...]:
    inside = [names.index(axis) for axis in axes]
    outside = [index for index in range(ids.ndim) if index not in inside]
    size = int(np.prod([ids.shape[index] for index in inside]))
    return tuple(map(tuple, ids.transpose([*outside, *inside]).reshape(-1, size).tolist()))


def mesh_axes(kind: str, groups: tuple[tuple[int, ...], ...], sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Return the axes of a mesh of `sizes` that groups, or permuted pairs, run over; () if it is no product of axes."""
    ids, names = np.arange(int(np.prod(list(sizes.values())))).reshape(list(sizes.values())), list(sizes)
    nontrivial = [name for name in names if sizes[name] > 1]
    wanted = {frozenset(group) for group in groups}
    for count in range(1, len(nontrivial) + 1):
        for axes in itertools.combinations(nontrivial, count):
            every = [frozenset(group) for group in _mesh_groups(ids, names, list(axes))]
            permuted = kind == "collective-permute" and all(any(pair <= group for group in every) for pair in wanted)
            if groups and (permuted or wanted == set(every)):
                return axes
    return ()
