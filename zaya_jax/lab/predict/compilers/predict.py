"""Predict the time of a compiled step; a collective hides behind what is scheduled between its start and its end."""

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from zaya_jax.config import ModelConfig
from zaya_jax.hardware.data_sheets import Hardware
from zaya_jax.lab.predict.compilers.collectives import Collective, place_collectives
from zaya_jax.lab.predict.compilers.hlo import FUSIONS, ITEM_BYTES, Instruction, Place, arrays, shape_bytes, walk
from zaya_jax.lab.predict.step_time import Timeline, Work, collective_seconds
from zaya_jax.model.arithmetic import attention_flops_per_token
from zaya_jax.ops.parts import OTHER, part_of


class Exposure(NamedTuple):
    """The predicted time of a collective, and how much of it no other work hides, each time it runs."""

    collective: Collective
    seconds: float
    exposed: float


class PartCost(NamedTuple):
    """The cost of a part of the step, without collectives."""

    seconds: float = 0.0  # predicted
    roofline: float = 0.0  # seconds at the data sheet's peaks, instruction by instruction
    flops: float = 0.0  # floating-point operations
    bytes: float = 0.0  # read and written
    most: float = 0.0  # seconds at the slow end of what is not known of the device


class Prediction(NamedTuple):
    """The predicted time of a step."""

    seconds: float  # of the whole step
    components: dict[str, float]  # seconds by component; collectives count as far as they are exposed
    parts: dict[str, PartCost]  # what each part of the step costs, see `ops.parts`, the costliest first
    exposures: list[Exposure]  # of each collective
    costliest: list[dict[str, Any]]  # fusions and copies, and whether each only `moves` its `bytes`; by their seconds
    most: float = 0.0  # seconds of the whole step at the slow end of what is not known of the device

    @property
    def exposed_seconds(self) -> float:
        """Seconds of a step in which the device waits for collectives."""
        return sum(exposure.exposed * exposure.collective.place.times for exposure in self.exposures)


class Shares(NamedTuple):
    """Shares of the shapes that kernels compute, which a program does not tell."""

    rows: float = 1.0  # fraction of the rows of the experts' kernels that hold tokens; the rest is skipped
    keys: float = 1.0  # keys that a query sees on average, relative to all before it; less than 1 with windows


WHOLE = Shares()


def phase_shares(config: ModelConfig, context: int, axes: Mapping[str, int]) -> Shares:
    """Return the shares of a step: experts get tokens evenly, windows are those of the layers."""
    whole = dataclasses.replace(config, layer_pattern=("full",), sliding_window=None)
    keys = attention_flops_per_token(config, context) / attention_flops_per_token(whole, context)
    return Shares(1 / axes["expert"], keys)


def predict(entry: Place, hardware: Hardware, shares: Shares = WHOLE) -> Prediction:
    """Predict the time of a compiled step on `hardware`, of whose kernels `shares` are computed.

    Branches of conditions count nothing: a usual step runs none that has work.
    """
    fast, slow = (_predict(entry, device, shares) for device in (hardware, hardware.slowest))
    parts = {part: cost._replace(most=slow.parts[part].seconds) for part, cost in fast.parts.items()}
    return fast._replace(parts=parts, most=slow.seconds)


def _predict(entry: Place, hardware: Hardware, shares: Shares) -> Prediction:
    components, parts = defaultdict[str, float](float), defaultdict[str, PartCost](PartCost)
    exposures, costliest = list[Exposure](), list[dict[str, Any]]()

    def run(place: Place) -> float:
        timeline, finished = Timeline(), dict[int, float]()
        ends = {collective.done: collective for collective in place_collectives(place)}
        begins = {collective.start: _collective_seconds(collective, hardware) for collective in ends.values()}
        for index, instruction in enumerate(place.instructions):
            if index in begins:
                finished[index] = timeline.start(begins[index])
            if (collective := ends.get(index)) is not None:
                exposed = timeline.wait(finished[collective.start])
                exposures.append(Exposure(collective, begins[collective.start], exposed))
                components[f"exposed {collective.kind}"] += exposed * place.times
            elif instruction.opcode == "while":
                loop = place.loop(instruction)
                timeline.now += loop.trips * run(loop)
            elif (work := instruction_work(place, instruction, shares)) is not None:
                part = instruction_part(place, instruction)
                seconds = work.within(part).seconds(hardware)
                timeline.now += seconds
                components[work.component] += seconds * place.times
                once = (seconds, work.roofline(hardware), work.flops, work.bytes, 0.0)
                parts[part] = PartCost(*(x + place.times * more for x, more in zip(parts[part], once, strict=True)))
                if work.component in ("fusions", "scatters", "copies"):
                    row = {"seconds": seconds * place.times, "times": place.times, "place": place.label}
                    moves = _only_moves(place, instruction)
                    costliest.append(row | {"what": instruction.title, "bytes": work.bytes, "moves": moves})
        return timeline.now

    seconds = run(entry)
    by_time = dict(sorted(components.items(), key=lambda item: -item[1]))
    by_part = dict(sorted(parts.items(), key=lambda item: -item[1].seconds))
    return Prediction(seconds, by_time, by_part, exposures, sorted(costliest, key=lambda row: -row["seconds"]))


def instruction_part(place: Place, instruction: Instruction) -> str:
    """Return the part of an instruction: by its name, else of its body or loop, or its nearest named neighbour."""
    near, seen = {instruction.name: instruction}, set[str]()
    while near:
        if parts := [part for x in near.values() if (part := _named_part(place, x)) != OTHER]:
            return parts[0]
        seen |= near.keys()
        near = {x.name: x for name in near for x in place.neighbours[name] if x.name not in seen}
    return OTHER


def _named_part(place: Place, instruction: Instruction) -> str:
    inside = place.computations.get(instruction.called("calls"), ())
    parts = (part_of(x.op_name) for x in (instruction, *reversed(inside)))
    return next((part for part in parts if part != OTHER), place.part)


def launched(entry: Place, shares: Shares = WHOLE) -> Iterator[tuple[Place, Instruction, str, Work]]:
    """Yield what a program launches: place, instruction, part of the step and work."""
    for place in walk(entry):
        for instruction in place.instructions:
            if (work := instruction_work(place, instruction, shares)) is not None:
                yield place, instruction, instruction_part(place, instruction), work


def is_launch(instruction: Instruction) -> bool:
    """True if an instruction launches a kernel; collectives do not count."""
    opcodes = (*FUSIONS, "custom-call", "copy", "copy-start", "sort")
    return instruction.opcode in opcodes and instruction.custom_call != "AllocateBuffer"


def launches(place: Place) -> int:
    """Count the kernels that one run of a place launches, with those of loops in it."""
    own = sum(map(is_launch, place.instructions))
    return own + sum(loop.trips * launches(loop) for loop in place.loops())


def _collective_seconds(collective: Collective, hardware: Hardware) -> float:
    kind, groups, sent = collective.kind, collective.groups, float(collective.bytes)
    if not groups or max(map(len, groups)) < 2:
        return 0.0
    devices = groups[0]
    if kind == "collective-permute":  # a pair between nodes, if there is one
        devices = next((pair for pair in groups if len({x // hardware.node_size for x in pair}) > 1), devices)
    else:
        sent *= (len(devices) - 1) / len(devices) * (2 if kind == "all-reduce" else 1)
    return hardware.reached.latency + collective_seconds(kind, sent, devices, hardware, hardware.links)


def instruction_work(place: Place, instruction: Instruction, shares: Shares = WHOLE) -> Work | None:
    """Return the work of an instruction; None if it launches nothing. `shares` are as in `predict`."""
    if not is_launch(instruction):
        return None
    read = [place.shapes.get(name, "") for name in instruction.operands]
    moved = shape_bytes(instruction.shape) + sum(map(shape_bytes, read))
    if instruction.opcode in FUSIONS:
        body = place.computations[instruction.called("calls")]
        scatters = any(inside.opcode == "scatter" for inside in body)  # which wait for each other
        return Work("scatters" if scatters else "fusions", fusion_bytes(place, instruction))
    if instruction.opcode == "sort":
        return Work("sorts", moved)
    if instruction.opcode.startswith("copy"):
        return Work("copies", 2 * sum(map(shape_bytes, read)))
    if instruction.kernel:
        return _kernel_work(instruction.kernel, arrays(" ".join((*read, instruction.shape))), shares)
    if "matmul" in instruction.custom_call or "gemm" in instruction.custom_call:
        dtype, out = arrays(instruction.shape)[0]  # the second result is a workspace
        left_dtype, left = arrays(read[0])[0]
        contracted = instruction.attribute(r'"lhs_contracting_dimensions":\[([^\]]*)\]')
        flops = 2.0 * math.prod(out) * math.prod(left[int(axis)] for axis in re.findall(r"\d+", contracted))
        moved, fp32 = sum(map(shape_bytes, read)) + ITEM_BYTES[dtype] * math.prod(out), left_dtype in ("f32", "f64")
        return Work("matmuls in fp32" if fp32 else "matmuls", moved, flops, fp32=fp32)
    return Work("other calls", moved)


_Arrays = Sequence[tuple[str, tuple[int, ...]]]


def _kernel_work(name: str, shapes: _Arrays, shares: Shares) -> Work:
    share = {"grouped": shares.rows, "attention": shares.keys}.get(name.partition("_")[0], 1.0)
    rows = 1.0
    if name.startswith("grouped"):  # one layer of stacks: [l, e, p, q], and [l, t, q], both argument and result or read
        kept = {(dtype, sizes[1:]) for dtype, sizes in shapes if len(sizes) == 3}
        rows, shapes = shares.rows, [*kept, *((dtype, sizes[-3:]) for dtype, sizes in shapes if len(sizes) != 3)]
    elif name == "residual_norm_backward":  # it may read one layer of [l, t, d]
        tokens_width = next(sizes for _, sizes in shapes if len(sizes) == 2)
        shapes = [(dtype, tokens_width if sizes[1:] == tokens_width else sizes) for dtype, sizes in shapes]
    elif name == "cca_mix_step":  # it writes one slot of each row of a cache [b, t, x]
        shapes = [(dtype, (sizes[0], sizes[2]) if len(sizes) == 3 else sizes) for dtype, sizes in shapes]
    tokens = rows * max((sizes[0] for _, sizes in shapes if len(sizes) == 2), default=0)

    def moved_share(sizes: tuple[int, ...]) -> float:
        """Return which part of an array is moved: of a stack of experts, those that get one of the tokens."""
        if len(sizes) == 3 and name.startswith("grouped"):
            return 1 - (1 - 1 / sizes[0]) ** tokens
        return rows if len(sizes) == 2 else 1.0

    moved = sum(ITEM_BYTES[dtype] * math.prod(sizes) * moved_share(sizes) for dtype, sizes in shapes)
    fp32 = not any(dtype in ("bf16", "f16") for dtype, _ in shapes)
    family = re.sub(r"_(forward|backward.*|transposed|outer|polynomial|step)$", "", name)
    return Work(f"kernel {family}", moved, share * _kernel_flops(name, shapes), "kernel", fp32, kernel=name)


def _kernel_flops(kernel: str, shapes: _Arrays) -> float:
    """Return the FLOPs of a kernel; 0 for those that only move bytes."""
    by_rank = defaultdict[int, list[tuple[int, ...]]](list)
    for _, sizes in shapes:
        by_rank[len(sizes)].append(sizes)
    if kernel.startswith("attention") and kernel != "attention_join":
        # Two products, of scores and values, over the causal half; of them, the gradient computes four for the keys and
        # three for the queries, and the last queries of a decode step see all keys.
        (batch, tokens, heads, size), (_, keys, *_), *_ = by_rank[4]
        products = 4 if kernel.endswith(("_decode", "_keys")) else 3 if kernel.endswith("_queries") else 2
        return float(products * batch * tokens * keys * heads * size)
    if kernel.startswith("grouped"):  # each row of the tokens meets one matrix of the stack
        matrices = max(by_rank[3], key=math.prod, default=(0, 0, 0))
        rows = max((sizes[0] for sizes in by_rank[2] if sizes[1] in matrices), default=0)
        return 2.0 * rows * matrices[1] * matrices[2]
    if kernel.startswith("gram"):  # half of a product of a matrix with its transpose, or of two symmetric ones
        stack = max((sizes for _, sizes in shapes if len(sizes) >= 2), key=math.prod, default=(0, 0))
        return float(math.prod(stack) * min(stack[-2:]))
    if kernel == "class_sort":  # for each 1,024 tokens, all tokens are compared with 32 classes and added up
        return 2.0 * by_rank[1][0][0] ** 2 / 1024 * 32
    return 0.0


_MOVING = re.compile(
    "bitcast|bitcast-convert|broadcast|concatenate|constant|convert|copy|(dynamic-)?slice|dynamic-update-slice|"
    "get-tuple-element|iota|pad|parameter|reshape|reverse|transpose|tuple"
)
_INDEXING = {"s32", "u32", "s64", "u64", "pred"}  # what indices are computed in


def _only_moves(place: Place, instruction: Instruction) -> bool:
    """Return whether a copy or fusion computes nothing but indices."""
    rest = (x for x in place.computations.get(instruction.called("calls"), ()) if not _MOVING.fullmatch(x.opcode))
    return all(x.shape.partition("[")[0] in _INDEXING for x in rest)


_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # index of the operand that is written into the first, in place


def fusion_bytes(place: Place, instruction: Instruction) -> int:
    """Return the bytes that a fusion reads and writes; slices and updates in place count as much as they touch."""
    body = place.computations[instruction.called("calls")]
    sizes, by_name = {x.name: shape_bytes(x.shape) for x in body}, {x.name: x for x in body}

    def read(name: str) -> int:
        parts = 0
        for user in (x for x in body if name in x.operands):
            if user.opcode in ("bitcast", "get-tuple-element"):
                parts += read(user.name)
            elif user.opcode in ("dynamic-slice", "slice", "gather") and user.operands[0] == name:
                parts += sizes[user.name]
            elif not (user.opcode in _UPDATES and user.operands[0] == name):
                return sizes[name]
        return min(parts, sizes[name])

    def written(name: str) -> int:
        x = by_name[name]
        if x.opcode in ("bitcast", "tuple"):
            return sum(map(written, x.operands))
        return sizes[x.operands[_UPDATES[x.opcode]] if x.opcode in _UPDATES else name]

    return sum(read(x.name) for x in body if x.opcode == "parameter") + written(body[-1].name)
