"""The report of a compiled step, as text and as JSON."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from zaya_jax.hardware.assumptions import ASSUMPTIONS, LINKS
from zaya_jax.hardware.data_sheets import Hardware
from zaya_jax.lab.predict.compilers.collectives import mesh_axes
from zaya_jax.lab.predict.compilers.compiled import CompiledStep
from zaya_jax.lab.predict.compilers.gpus import GPUS
from zaya_jax.lab.predict.compilers.hlo import FUSIONS, Instruction, Place, shape_bytes, walk
from zaya_jax.lab.predict.compilers.predict import Prediction, fusion_bytes, is_launch, launches

_GB, _MB = 1e9, 1e6
_LISTED = 8  # rows of a table in the text; the JSON has all
LARGE = 50e6  # bytes of a move that is listed
_MOVING = {"bitcast", "bitcast-convert", "broadcast", "concatenate", "constant", "convert", "copy", "dynamic-slice",
           "dynamic-update-slice", "get-tuple-element", "iota", "pad", "parameter", "reshape", "reverse", "slice",
           "transpose", "tuple"}  # fmt: skip
_INDEXING = {"s32", "u32", "s64", "u64", "pred"}  # what indices are computed in


def collective_rows(prediction: Prediction, axes: Mapping[str, int]) -> list[dict[str, Any]]:
    """Describe each collective of a step, those that cost the most exposed time first.

    Args:
      prediction: of the step.
      axes: number of devices along each mesh axis.
    """
    rows = []
    for collective, seconds, exposed in prediction.exposures:
        place, overlapped = collective.place, Counter[str]()
        for instruction in collective.between:
            if instruction.opcode == "while":
                loop = place.loop(instruction)
                overlapped[f"{loop.kind} ×{loop.trips}"] += 1
            elif is_launch(instruction):
                overlapped[instruction.kernel or instruction.opcode] += 1
        rows.append({
            "kind": collective.kind, "place": place.label,
            "axes": list(mesh_axes(collective.kind, collective.groups, axes)),
            "bytes": collective.bytes, "times": place.times, "seconds": seconds * place.times,
            "exposed_seconds": exposed * place.times, "overlapped": dict(overlapped),
        })  # fmt: skip
    return sorted(rows, key=lambda row: -row["exposed_seconds"])


def launch_rows(entry: Place) -> dict[str, int]:
    """Return the launches of a step, and of one pass through each kind of loop."""
    rows = {"step": launches(entry)}
    for place in walk(entry):
        if place.kind not in ("step", "loop"):
            rows[place.kind] = max(rows.get(place.kind, 0), launches(place))
    return rows


def move_rows(entry: Place, least: float = LARGE) -> list[dict[str, Any]]:
    """Describe what copies, transposes, converts or fills at least `least` bytes in the loops of a step.

    Those that move the most bytes come first; nothing that computes is among them.
    """
    rows = [
        {"bytes": moved, "times": place.times, "place": place.label, "what": _what(instruction)}
        for place in walk(entry) if place.outer is not None
        for instruction in place.instructions if (moved := _moved(place, instruction)) >= least
    ]  # fmt: skip
    return sorted(rows, key=lambda row: -row["bytes"] * row["times"])


def _moved(place: Place, instruction: Instruction) -> int:
    """Return the bytes that an instruction moves; 0 if it computes."""
    if instruction.opcode in ("copy", "copy-start", "transpose"):
        return 2 * sum(shape_bytes(place.shapes.get(name, "")) for name in instruction.operands)
    if instruction.opcode not in FUSIONS:
        return 0
    body = place.module.computations[instruction.called("calls")]
    computes = any(x.opcode not in _MOVING and x.shape.partition("[")[0] not in _INDEXING for x in body)
    return 0 if computes else fusion_bytes(place.module, instruction)


def costliest_rows(prediction: Prediction) -> list[dict[str, Any]]:
    """Describe fusions and copies of a step, the costliest first."""
    return [
        {"seconds": seconds, "times": times, "place": place.label, "what": _what(instruction),
         "bytes": shape_bytes(instruction.shape)}
        for seconds, times, place, instruction in prediction.costliest
    ]  # fmt: skip


def _what(instruction: Instruction) -> str:
    """Name an instruction by the end of its jax path."""
    path = [
        part for part in instruction.op_name.split("/") if part not in ("while", "body", "closed_call", "checkpoint")
    ]
    return f"{instruction.opcode} {'/'.join(path[-2:]) or instruction.name}"


def details(step: CompiledStep, prediction: Prediction, hardware: Hardware, axes: Mapping[str, int]) -> list[str]:
    """Return the lines that describe a compiled step."""
    memory, moves = step.memory, move_rows(step.entry)
    moved = sum(row["bytes"] * row["times"] for row in moves)
    return [
        f"  compiled for {step.devices:,} {step.gpu} in {step.seconds} s, with {step.host_bytes / _GB:.1f} GB of this "
        "machine's memory",
        "  memory per device, from the compiler",
        f"    {'state and batch':<22}{memory['arguments'] / _GB:10.2f} GB",
        f"    {'temporaries':<22}{memory['temporaries'] / _GB:10.2f} GB",
        f"    {'outputs, not donated':<22}{(memory['outputs'] - memory['donated']) / _GB:10.2f} GB",
        f"    {'sum':<22}{step.peak_memory / _GB:10.2f} GB of {hardware.allocatable / _GB:.1f}",
        "  predicted time per step",
        *(
            f"    {name:<26}{1e3 * seconds:12,.1f} ms{seconds / prediction.seconds:7.0%}"
            for name, seconds in prediction.components.items()
            if seconds > 0.002 * prediction.seconds
        ),
        *_part_lines(prediction),
        "  kernel launches",
        *(f"    {_PASS[kind]:<34}{count:8,}" for kind, count in launch_rows(step.entry).items()),
        *_collective_lines(prediction, axes),
        "  costliest fusions and copies, per step",
        *(f"    {1e3 * row['seconds']:9,.2f} ms  {row['what']}, in {row['place']}"
          for row in costliest_rows(prediction)[:_LISTED]),
        f"  copies, slices, conversions and fills of {LARGE / _MB:.0f} MB and more in loops: {len(moves)}, "
        f"{moved / _GB:,.0f} GB per step",
        *(f"    {row['times']:9,} × {row['bytes'] / _MB:,.0f} MB  {row['what']}, in {row['place']}"
          for row in moves[:_LISTED]),
        *_kernel_lines(step),
    ]  # fmt: skip


def as_json(step: CompiledStep, prediction: Prediction, axes: Mapping[str, int]) -> dict[str, Any]:
    """Return all that is known of a compiled step, as JSON values."""
    return {
        "proof": f"compiled for {step.gpu}",
        "seconds": step.seconds,
        "host_bytes": step.host_bytes,
        "memory": {**step.memory, "peak": step.peak_memory},
        "launches": launch_rows(step.entry),
        "collectives": collective_rows(prediction, axes),
        "moves": move_rows(step.entry),
        "costliest": costliest_rows(prediction),
        "kernels": [kernel._asdict() for kernel in step.kernels],
        "predicted": {"seconds": prediction.seconds, "components": prediction.components,
                      "parts": {part: cost._asdict() for part, cost in prediction.parts.items()},
                      "assumptions": {**ASSUMPTIONS._asdict(), "links": LINKS._asdict()}},
    }  # fmt: skip


def _part_lines(prediction: Prediction) -> list[str]:
    exposed = prediction.exposed_seconds
    lines = ["  predicted time by part of the step, and what the data sheet's peaks would allow",
             f"    {'':<14}{'predicted':>13}{'roofline':>14}{'TFLOP':>10}{'GB moved':>11}"]  # fmt: skip
    for part, cost in prediction.parts.items():
        lines.append(f"    {part:<14}{1e3 * cost.seconds:10,.1f} ms{1e3 * cost.roofline:11,.1f} ms"
                     f"{cost.flops / 1e12:10,.1f}{cost.bytes / _GB:11,.0f}")  # fmt: skip
    return [*lines, f"    {'collectives':<14}{1e3 * exposed:10,.1f} ms exposed"] if exposed else lines


_PASS = {
    "step": "whole step",
    "micro-batches": "one micro-batch",
    "layers forward": "one group of layers, forward",
    "layers backward": "one group of layers, backward",
    "loss": "one chunk of the loss",
}


def _collective_lines(prediction: Prediction, axes: Mapping[str, int]) -> list[str]:
    rows = collective_rows(prediction, axes)
    if not rows:
        return ["  collectives: none"]
    lines = ["  collectives, per step; 'exposed' is not hidden behind other work"]
    for row in rows[:_LISTED]:
        other = ", ".join(f"{count} {what}" for what, count in row["overlapped"].items()) or "nothing"
        lines.append(
            f"    {1e3 * row['exposed_seconds']:9,.1f} of {1e3 * row['seconds']:,.1f} ms exposed: {row['kind']} over "
            f"{' × '.join(row['axes']) or 'no mesh axis'}, {row['times']} × {row['bytes'] / _MB:,.1f} MB in "
            f"{row['place']}; overlaps with: {other[:120]}"
        )
    if len(rows) > _LISTED:
        rest = sum(row["exposed_seconds"] for row in rows[_LISTED:])
        lines.append(f"    {1e3 * rest:9,.1f} ms exposed in {len(rows) - _LISTED} others")
    return lines


def _kernel_lines(step: CompiledStep) -> list[str]:
    spilling = [kernel for kernel in step.kernels if kernel.vector_spills or kernel.scalar_spills or kernel.scratch]
    ours = {call.kernel for place in walk(step.entry) for call in place.instructions if call.kernel}
    listed = [kernel for kernel in step.kernels if kernel.name.partition("__")[0] in ours or kernel in spilling]
    most = {kernel.name.partition("__")[0]: kernel for kernel in sorted(listed, key=lambda kernel: kernel.registers)}
    spills = "spilled bytes" if GPUS[step.gpu].platform == "cuda" else "spilled registers"
    lines = [f"  {len(step.kernels)} kernels, of which {len(spilling)} spill registers or use scratch memory",
             f"    {'kernel':<30}{'registers':>10}{'shared memory':>15}{spills:>20}{'scratch':>9}"]  # fmt: skip
    for name, kernel in sorted(most.items()):
        lines.append(f"    {name[:29]:<30}{kernel.registers:>10}{kernel.shared / 1024:>11.1f} KiB"
                     f"{kernel.vector_spills + kernel.scalar_spills:>20}{kernel.scratch:>7} B")  # fmt: skip
    atomic = ", ".join(sorted(kernel.name for kernel in step.kernels if kernel.is_atomic))
    return [
        *lines,
        f"  kernels with atomic operations, whose sums differ in the last bits between runs: {atomic or 'none'}",
    ]
