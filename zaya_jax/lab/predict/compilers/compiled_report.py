"""The report of a compiled step, as text and as JSON."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from zaya_jax.hardware.data_sheets import ASSUMPTIONS, LINKS, SLOW, Hardware
from zaya_jax.lab.predict.compilers.collectives import mesh_axes
from zaya_jax.lab.predict.compilers.compiled import CompiledStep
from zaya_jax.lab.predict.compilers.hlo import Place, walk
from zaya_jax.lab.predict.compilers.predict import Prediction, is_launch, launches
from zaya_jax.lab.predict.compilers.resources import resource_cells, resource_heads
from zaya_jax.lab.predict.step_time import span
from zaya_jax.lab.result import table_lines
from zaya_jax.run.table import NONE, Table, number, percent

_GB, _MB, _MS = 1e9, 1e6, 1e-3
_UNITS = _MS, 1e12, _GB  # of the fields of `PartCost` after the time
_LISTED = 8  # rows of a table in the text; the JSON has all
_PASS = {
    "step": "whole step",
    "micro-batches": "one micro-batch",
    "layers forward": "one group of layers, forward",
    "layers backward": "one group of layers, backward",
    "loss": "one chunk of the loss",
}


def section(title: str, heads: Iterable[str], rows: Iterable[Iterable[str]], indent: str = "  ") -> list[str]:
    """Return the lines of a table of a phase, or its title if it has no rows."""
    title, *lines = table_lines(Table(title, list(heads), list(map(list, rows)))) or [title]
    return [f"{indent}{title}", *(f"{indent}  {line}" for line in lines)]


def collective_rows(prediction: Prediction, axes: Mapping[str, int]) -> list[dict[str, Any]]:
    """Describe each collective of a step on a mesh with these `axes`, those with the most exposed time first."""
    rows = []
    for collective, seconds, exposed in prediction.exposures:
        place = collective.place
        loops = [place.loop(x) for x in collective.between if x.opcode == "while"]
        launched = [x.kernel or x.opcode for x in collective.between if is_launch(x)]
        over = list(mesh_axes(collective.kind, collective.groups, axes))
        row = {"kind": collective.kind, "place": place.label, "axes": over, "bytes": collective.bytes}
        row |= {"times": place.times, "seconds": seconds * place.times, "exposed_seconds": exposed * place.times}
        overlapped = Counter([*launched, *(f"{loop.kind} ×{loop.trips}" for loop in loops)])
        rows.append(row | {"overlapped": dict(overlapped)})
    return sorted(rows, key=lambda row: -row["exposed_seconds"])


def launch_rows(entry: Place) -> dict[str, int]:
    """Return the launches of a step, and of one pass through each kind of loop."""
    rows = {"step": launches(entry)}
    for place in walk(entry):
        if place.kind not in ("step", "loop"):
            rows[place.kind] = max(rows.get(place.kind, 0), launches(place))
    return rows


def details(step: CompiledStep, prediction: Prediction, hardware: Hardware, axes: Mapping[str, int]) -> list[str]:
    """Return the lines that describe a compiled step."""
    memory, total, exposed = step.memory, prediction.seconds, prediction.exposed_seconds
    sizes = {"state and batch": memory["arguments"], "temporaries": memory["temporaries"]}
    sizes["outputs, not donated"] = memory["outputs"] - memory["donated"]
    sizes[f"sum, of {hardware.allocatable / _GB:.1f}"] = step.peak_memory
    components = [(name, part, part / total) for name, part in prediction.components.items() if part > 0.002 * total]
    parts = [
        (name, span((cost.seconds, cost.most), lambda value: number(value, _MS)), *map(number, cost[1:4], _UNITS))
        for name, cost in prediction.parts.items()
    ]
    parts += [("collectives, exposed", number(exposed, _MS), NONE, NONE, NONE)] if exposed else []
    passes = ((_PASS[kind], str(count)) for kind, count in launch_rows(step.entry).items())
    used = f"{step.host_bytes / _GB:.1f} GB of this machine's memory"
    limits = "predicted time by part of the step, and what the data sheet's peaks would allow"
    costliest = [
        (number(x["seconds"], _MS), f"{x['times']:,}", number(x["bytes"], _MB), x["what"], x["place"])
        for x in prediction.costliest[:_LISTED]
    ]
    return [
        f"  compiled for {step.devices:,} {step.gpu} in {step.seconds} s, with {used}",
        *([f"  {step.stand_ins}"] if step.stand_ins else []),
        *section("memory per device, from the compiler", ("", "GB"), ((x, number(y, _GB)) for x, y in sizes.items())),
        *section(
            "predicted time per step", ("", "ms", ""), ((x, number(y, _MS), percent(z)) for x, y, z in components)
        ),
        *section(limits, ("", "predicted (ms)", "roofline (ms)", "TFLOP", "GB moved"), parts),
        *section("kernel launches", ("", "launches"), passes),
        *_collective_lines(collective_rows(prediction, axes)),
        *section("costliest fusions and copies, per step", ("ms", "times", "MB", "what", "place"), costliest),
        *_kernel_lines(step),
    ]


def as_json(step: CompiledStep, prediction: Prediction, axes: Mapping[str, int]) -> dict[str, Any]:
    """Return all that is known of a compiled step, as JSON values."""
    described = {"proof": f"compiled for {step.gpu}", "seconds": step.seconds, "host_bytes": step.host_bytes}
    described |= {"memory": {**step.memory, "peak": step.peak_memory}, "launches": launch_rows(step.entry)}
    described |= {"collectives": collective_rows(prediction, axes), "costliest": prediction.costliest}
    described |= {"kernels": [kernel._asdict() for kernel in step.kernels]}
    parts = {part: cost._asdict() for part, cost in prediction.parts.items()}
    predicted = {"seconds": prediction.seconds, "most": prediction.most, "parts": parts}
    predicted["components"] = prediction.components
    predicted["assumptions"] = {**ASSUMPTIONS._asdict(), "slow": SLOW._asdict(), "links": LINKS._asdict()}
    return described | {"predicted": predicted}


def _collective_lines(rows: list[dict[str, Any]]) -> list[str]:
    heads = "exposed (ms)", "all (ms)", "kind", "over", "times", "MB", "place", "overlaps with"
    cells = []
    for row in rows[:_LISTED]:
        axes, other = " × ".join(row["axes"]), (f"{count} {what}" for what, count in row["overlapped"].items())
        times = (number(row[key], _MS) for key in ("exposed_seconds", "seconds"))
        size, overlaps = number(row["bytes"], _MB), ", ".join(other)[:120] or "nothing"
        cells.append((*times, row["kind"], axes or "no mesh axis", f"{row['times']:,}", size, row["place"], overlaps))
    if others := rows[_LISTED:]:
        exposed, seconds = (number(sum(row[key] for row in others), _MS) for key in ("exposed_seconds", "seconds"))
        cells.append((exposed, seconds, f"{len(others)} others", *[NONE] * 5))
    exposed = ", per step; 'exposed' is not hidden behind other work" if rows else ": none"
    return section(f"collectives{exposed}", heads, cells)


def _kernel_lines(step: CompiledStep) -> list[str]:
    spilling = [kernel for kernel in step.kernels if kernel.spills or kernel.scratch]
    ours = {call.kernel for place in walk(step.entry) for call in place.instructions if call.kernel}
    listed = [kernel for kernel in step.kernels if kernel.family in ours or kernel in spilling]
    most = {kernel.family: kernel for kernel in sorted(listed, key=lambda kernel: kernel.registers)}
    rows = ((name[:29], *resource_cells(kernel, step.gpu)) for name, kernel in sorted(most.items()))
    title = f"{len(step.kernels)} kernels, of which {len(spilling)} spill registers or use scratch memory"
    atomic = ", ".join(sorted(kernel.name for kernel in step.kernels if kernel.is_atomic)) or "none"
    varying = f"  kernels with atomic operations, whose sums differ in the last bits between runs: {atomic}"
    return [*section(title, ("kernel", *resource_heads(step.gpu)), rows), varying]
