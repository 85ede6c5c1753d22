"""Predict the time of a compiled step, instruction by instruction. A prediction, not a measurement.

Each instruction takes as long as its FLOPs or its bytes at a fraction of the data sheet's peak, whichever is longer,
and at least a launch. A collective hides behind what is scheduled between its start and its end.
"""

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from zaya_jax.config import ModelConfig
from zaya_jax.hardware.assumptions import ASSUMPTIONS, LINKS
from zaya_jax.hardware.data_sheets import Hardware
from zaya_jax.hardware.network import collective_seconds
from zaya_jax.lab.predict.compilers.collectives import Collective, place_collectives
from zaya_jax.lab.predict.compilers.hlo import FUSIONS, ITEM_BYTES, Instruction, Module, Place, arrays, shape_bytes
from zaya_jax.model.arithmetic import attention_flops_per_token
from zaya_jax.ops.parts import OTHER, part_of


class Cost(NamedTuple):
    """The work of an instruction."""

    component: str  # of the prediction, such as 'matmuls'
    bytes: float  # read and written
    flops: float = 0.0  # floating-point operations
    fraction: float = 1.0  # of the peak that the operations reach
    fp32: bool = False  # whether they are in fp32; fp64 counts as fp32, which is faster

    def seconds(self, hardware: Hardware) -> float:
        """Return the predicted time."""
        compute, memory = self._at_peaks(hardware)
        return max(compute / self.fraction, memory / ASSUMPTIONS.memory, ASSUMPTIONS.launch)

    def roofline(self, hardware: Hardware) -> float:
        """Return the seconds that it takes at the data sheet's peaks, without a launch."""
        return max(self._at_peaks(hardware))

    def _at_peaks(self, hardware: Hardware) -> tuple[float, float]:
        compute = self.flops / (hardware.fp32_peak if self.fp32 else hardware.peak)
        return compute, self.bytes / hardware.bandwidth


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


class Prediction(NamedTuple):
    """The predicted time of a step."""

    seconds: float  # of the whole step
    components: dict[str, float]  # seconds by component; collectives count as far as they are exposed
    parts: dict[str, PartCost]  # what each part of the step costs, see `ops.parts`, the costliest first
    exposures: list[Exposure]  # of each collective
    # (seconds, times, place, instruction) of fusions and copies, from the costliest
    costliest: list[tuple[float, int, Place, Instruction]]

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
    """Predict the time of a step on `hardware`.

    The collectives of a place share the network, one after another in the order of their starts.

    Args:
      entry: the compiled step.
      hardware: data sheet.
      shares: what kernels compute of their shapes.
    """
    components, exposures = defaultdict[str, float](float), list[Exposure]()
    moves, parts = list[tuple[float, int, Place, Instruction]](), dict[str, PartCost]()

    def run(place: Place) -> float:
        now, network = 0.0, 0.0  # seconds until the device, and the network, are free
        finished = dict[int, float]()
        ends = {collective.done: collective for collective in place_collectives(place)}
        begins = {collective.start: collective for collective in ends.values()}
        for index, instruction in enumerate(place.instructions):
            if index in begins:
                network = finished[index] = max(now, network) + _collective_seconds(begins[index], hardware)
            if index in ends:
                collective = ends[index]
                exposed = max(0.0, finished[collective.start] - now)
                exposures.append(Exposure(collective, _collective_seconds(collective, hardware), exposed))
                components[f"exposed {collective.kind}"] += exposed * place.times
                now += exposed
            elif instruction.opcode == "while":
                loop = place.loop(instruction)
                now += loop.trips * run(loop)
            elif (cost := instruction_cost(place, instruction, shares)) is not None:
                seconds = cost.seconds(hardware)
                components[cost.component] += seconds * place.times
                part = instruction_part(place, instruction)
                once = (seconds, cost.roofline(hardware), cost.flops, cost.bytes)
                before = parts.get(part, PartCost())
                parts[part] = PartCost(*(x + place.times * more for x, more in zip(before, once, strict=True)))
                if cost.component in ("fusions", "copies"):
                    moves.append((seconds * place.times, place.times, place, instruction))
                now += seconds
        return now

    seconds = run(entry)
    moves.sort(key=lambda move: -move[0])
    by_seconds = dict(sorted(components.items(), key=lambda item: -item[1]))
    parts = dict(sorted(parts.items(), key=lambda item: -item[1].seconds))
    return Prediction(seconds, by_seconds, parts, exposures, moves)


def instruction_part(place: Place, instruction: Instruction) -> str:
    """Return the part of the step that an instruction belongs to.

    If it has no name, that is the part of its body, of its loop, or of the nearest instruction that takes its result or
    makes its operands.
    """
    near, seen = {instruction.name: instruction}, set[str]()
    while near:
        if parts := [part for x in near.values() if (part := _named_part(place, x)) != OTHER]:
            return parts[0]
        seen |= near.keys()
        near = {x.name: x for name in near for x in place.neighbours[name] if x.name not in seen}
    return OTHER


def _named_part(place: Place, instruction: Instruction) -> str:
    inside = place.module.computations.get(instruction.called("calls"), ())
    parts = (part_of(x.op_name) for x in (instruction, *reversed(inside)))
    return next((part for part in parts if part != OTHER), place.part)


def is_launch(instruction: Instruction) -> bool:
    """True if an instruction launches a kernel; collectives do not count."""
    return instruction.opcode in (*FUSIONS, "custom-call", "copy", "copy-start", "sort")


def launches(place: Place) -> int:
    """Count the kernels that one run of a place launches, with those of loops in it."""
    own = sum(map(is_launch, place.instructions))
    return own + sum(loop.trips * launches(loop) for loop in place.loops())


def _collective_seconds(collective: Collective, hardware: Hardware) -> float:
    groups = collective.groups
    if not groups or max(map(len, groups)) < 2:
        return 0.0
    devices = groups[0]
    if collective.kind == "collective-permute":
        devices = next((pair for pair in groups if len({x // hardware.node_size for x in pair}) > 1), groups[0])
    n = len(devices)
    share = 1.0 if collective.kind == "collective-permute" else (n - 1) / n
    sent = collective.bytes * share * (2 if collective.kind == "all-reduce" else 1)
    return ASSUMPTIONS.latency + collective_seconds(collective.kind, sent, devices, hardware, LINKS)


def instruction_cost(place: Place, instruction: Instruction, shares: Shares = WHOLE) -> Cost | None:
    """Return what an instruction costs; None if it launches nothing. `shares` are as in `predict`."""
    if not is_launch(instruction):
        return None
    read = [place.shapes.get(name, "") for name in instruction.operands]
    moved = shape_bytes(instruction.shape) + sum(map(shape_bytes, read))
    if instruction.opcode in FUSIONS:
        return Cost("fusions", fusion_bytes(place.module, instruction))
    if instruction.opcode == "sort":
        return Cost("sorts", moved)
    if instruction.opcode.startswith("copy"):
        return Cost("copies", 2 * sum(map(shape_bytes, read)))
    if instruction.kernel:
        shapes = [array for shape in (*read, instruction.shape) for array in arrays(shape)]
        share = {"grouped": shares.rows, "attention": shares.keys}.get(instruction.kernel.partition("_")[0], 1.0)
        rows = 1.0
        if instruction.kernel.startswith("grouped"):  # one layer of a stack [l, e, p, q]
            rows, shapes = shares.rows, [(dtype, sizes[-3:]) for dtype, sizes in shapes]
        moved = sum(ITEM_BYTES[dtype] * math.prod(sizes) * (rows if len(sizes) == 2 else 1) for dtype, sizes in shapes)
        flops = share * _kernel_flops(instruction.kernel, shapes)
        fp32 = not any(dtype in ("bf16", "f16") for dtype, _ in shapes)
        family = re.sub(r"_(forward|backward.*|transposed|outer|polynomial)$", "", instruction.kernel)
        return Cost(f"kernel {family}", moved, flops, ASSUMPTIONS.kernel, fp32)
    if "matmul" in instruction.custom_call or "gemm" in instruction.custom_call:
        dtype, out = arrays(instruction.shape)[0]  # the second result is a workspace
        contracted = re.findall(r'"lhs_contracting_dimensions":\[([^\]]*)\]', instruction.text)
        left = arrays(read[0])[0]
        size = math.prod(left[1][int(axis)] for axis in re.findall(r"\d+", contracted[0])) if contracted else 1
        fp32 = left[0] in ("f32", "f64")
        moved = sum(map(shape_bytes, read)) + ITEM_BYTES[dtype] * math.prod(out)
        name = "matmuls in fp32" if fp32 else "matmuls"
        return Cost(name, moved, 2.0 * math.prod(out) * size, ASSUMPTIONS.matmul, fp32)
    return Cost("other calls", moved)


_Arrays = Sequence[tuple[str, tuple[int, ...]]]


def _grouped(shapes: _Arrays) -> float:
    """Each row of the tokens meets one matrix of the stack."""
    matrices = max((sizes for _, sizes in shapes if len(sizes) == 3), key=math.prod, default=(0, 0, 0))
    rows = max((sizes[0] for _, sizes in shapes if len(sizes) == 2 and sizes[1] in matrices), default=0)
    return 2.0 * rows * matrices[1] * matrices[2]


def _symmetric(shapes: _Arrays) -> float:
    """Half of a product of a matrix with its transpose, or of two symmetric ones."""
    stack = max((sizes for _, sizes in shapes if len(sizes) >= 2), key=math.prod, default=(0, 0))
    return float(math.prod(stack) * min(stack[-2:]))


def _attention(shapes: _Arrays) -> float:
    """Scores and values over the causal half; queries and keys are the first operands with heads."""
    queries, keys, *_ = (sizes for _, sizes in shapes if len(sizes) == 4)
    batch, tokens, heads, size = queries
    return 4.0 * batch * tokens * keys[1] * heads * size / 2


def _class_sort(shapes: _Arrays) -> float:
    """For each 1,024 tokens, all tokens are compared with 32 classes and added up."""
    ((tokens,),) = (sizes for _, sizes in shapes[:1])
    return 2.0 * tokens * tokens / 1024 * 32


# FLOPs by the start of a kernel's name; kernels that only move bytes are not listed. Of the forward pass' two products
# per pair of query and key, attention's gradient computes four for the keys and three for the queries.
_FLOPS: tuple[tuple[str, Callable[[_Arrays], float]], ...] = (
    ("attention_join", lambda _: 0.0),
    ("attention_decode", lambda shapes: 2.0 * _attention(shapes)),  # the last queries see all keys
    ("attention_backward_keys", lambda shapes: 2.0 * _attention(shapes)),
    ("attention_backward_queries", lambda shapes: 1.5 * _attention(shapes)),
    ("attention", _attention),
    ("grouped", _grouped),
    ("gram", _symmetric),
    ("class_sort", _class_sort),
)


def _kernel_flops(kernel: str, shapes: _Arrays) -> float:
    return next((count(shapes) for start, count in _FLOPS if kernel.startswith(start)), 0.0)


def fusion_bytes(module: Module, instruction: Instruction) -> int:
    """Return the bytes that a fusion reads and writes; slices and updates in place count as much as they touch."""
    body = module.computations[instruction.called("calls")]
    by_name = {x.name: x for x in body}
    users: dict[str, list[Instruction]] = {}
    for x in body:
        for operand in x.operands:
            users.setdefault(operand, []).append(x)

    def read(name: str) -> int:
        parts = 0
        for user in users.get(name, ()):
            if user.opcode in ("bitcast", "get-tuple-element"):
                parts += read(user.name)
            elif user.opcode in ("dynamic-slice", "slice", "gather") and user.operands[0] == name:
                parts += shape_bytes(user.shape)
            elif not (user.opcode == "dynamic-update-slice" and user.operands[0] == name):
                return shape_bytes(by_name[name].shape)
        return min(parts, shape_bytes(by_name[name].shape))

    def written(name: str) -> int:
        x = by_name[name]
        if x.opcode == "bitcast":
            return written(x.operands[0])
        if x.opcode == "tuple":
            return sum(map(written, x.operands))
        return shape_bytes(by_name[x.operands[1]].shape if x.opcode == "dynamic-update-slice" else x.shape)

    return sum(read(x.name) for x in body if x.opcode == "parameter") + written(body[-1].name)
