"""The tables of a result, by verb."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from zaya_jax.run.table import NONE, Cell, Row, Table, make_table, number, percent, quantity, same, share

Result = dict[str, Any]

UNITS = {"FLOP/s": (1e12, "TFLOP/s"), "bytes/s": (1e9, "GB/s")}  # unit of a result → scale and unit of a table
_SCALES = {"µs": 1e-6, "ms": 1e-3, "GFLOP": 1e9, "GB/s": 1e9, "TFLOP/s": 1e12, "MiB": 2.0**20}  # of units in heads
CONTEXT = "memory per device (bytes) and time (s) of context-parallel attention, forward and backward"  # a benchmark


def _table(title: str, rows: Iterable[Row], columns: Mapping[str, str | Cell], *remarks: str) -> Table:
    """Make a table; below a head that is or ends in a unit of `_SCALES`, values at nested keys are in that unit."""
    cells = {}
    for head, column in columns.items():
        unit = _SCALES.get(head.rpartition("(")[2].rstrip(")"))
        if unit is not None and isinstance(column, str):
            cells[head] = quantity(*column.split("."), unit=unit)
        else:
            cells[head] = column
    return make_table(title, rows, cells, *remarks)


def _memory(result: Result) -> list[Table]:
    speed = {"GB/s": "bytes_per_second"}
    times = {"shortest (ms)": "min", "mean (ms)": "mean", "longest (ms)": "max"}
    own = {"operation": "operation", "bytes": "bytes", **speed, "of triad": share("of_triad")}
    sweep = {"operation": "operation", "array (bytes)": "bytes", **speed, **times}
    return [
        _table("BabelStream", result["results"], sweep, "The rate is that of the shortest call."),
        _table("The model's memory-bound operations", result["operations"], own),
    ]


def _gemm(result: Result) -> list[Table]:
    def of_maximum(row: Row) -> str:
        warm, maximum = row.get("warm_flops_per_second"), result["maximum"]
        return percent(warm / maximum) if warm and maximum else NONE

    families: dict[str, list[Row]] = {}
    for row in result["results"]:
        families.setdefault(row["family"], []).append(row)
    fastest = f"The maximum is the fastest square's speed, {number(result['maximum'], 1e12)} TFLOP/s."
    speeds = {f"{name} (TFLOP/s)": f"{name}_flops_per_second" for name in ("warm", "cold")}
    columns = {"product": "name", "GFLOP": "flops", **speeds, "warm, of maximum": of_maximum}
    return [
        _table(f"Family {family.replace('_', '–')}", rows, columns, *([fastest] if family == "square" else []))
        for family, rows in families.items()
    ]


def message_table(messages: Sequence[Row]) -> Table:
    """Make the table of the collectives of a step, with their measured times."""

    def together(row: Row) -> str:
        return number(row["times"] * row["seconds"], 1e-3)

    columns: dict[str, str | Cell] = {"operation": "operation", "axes": lambda row: ", ".join(row["axes"])}
    columns |= {"bytes": "bytes", "times per step": "times", "each (µs)": "seconds", "together (ms)": together}
    return _table("Messages of a step", messages, columns)


def _storage(result: Result) -> list[Table]:
    reads = {"pattern": "pattern", "page cache": "cache", "threads": "threads"}
    reads |= {"reads/s": quantity("operations_per_second", unit=1.0), "GB/s": "bytes_per_second"}
    saves = {"training stalls": "stall", "checkpoint is durable": "commit"}
    saves |= {f"restored and verified, {cache}": cache for cache in ("cold", "warm")}
    packed = {"well packed": "1", "limit of well packed": "2", "scattered": "8"}
    steps = {"phase": "phase", "sequences": "sequences", "tokens of each": "context"}
    steps |= {f"{name} (ms)": f"shortest_step_seconds.{key}" for name, key in packed.items()}
    times = [[name, number(statistics.median(result["saves"][key]), 1e-3)] for name, key in saves.items()]
    pages, memory = "Random reads are of 4 KiB, sequential ones of 4 MiB.", number(result["available_memory"], 1e9)
    fits = f"The page cache can hold up to {memory} GB: prepared data that fits is read from the storage once."
    return [
        _table("Reads", result["reads"], {**reads, "was cached": share("cached")}, pages),
        Table(f"Checkpoint of {result['size']}", ["", "median (ms)"], times),
        _table("Shortest step that the storage can feed", result["phases"], steps, fits),
        _traffic(result),
    ]


def _traffic(result: Result) -> Table:
    rows = [[name, number(count, 1e6)] for name, count in result["traffic"].items()]
    return Table("Network traffic", ["interface", "MB"], rows)


def _predicted(row: Row) -> str:
    """Return the predicted milliseconds of a part of a step, a range from its fast to its slow end; '–' for none."""
    ends = [number(seconds, 1e-3) for key in ("predicted", "most") if (seconds := row.get(key)) is not None]
    return " to ".join(dict.fromkeys(ends)) or NONE


def _step(result: Result) -> list[Table]:
    step, what, untraced = result["seconds"], result["what"], result["untraced_seconds"]
    rows, remarks = [{"part": name, **row} for name, row in result["parts"].items()], []
    if result["overlap"] is not None:
        rows.append({"part": "exposed collectives", "measured": result["exposed_collectives"]})
        remarks.append(f"Other operations overlap with {percent(result['overlap'])} of the time of collectives.")
    rows += [{"part": "unattributed", "measured": result["unattributed"]}, {"part": what, "measured": step}]
    if untraced is not None:
        times = f"{number(untraced, 1e-3)} ms ({step / untraced:.2f}× with it)"
        remarks.append(f"Without the profiler, a {what} takes {times}.")
    if estimated := result.get("estimated_seconds"):
        error = estimated / (untraced or step) - 1
        remarks.append(f"The dry run estimates {number(estimated, 1e-3)} ms, {error:+.0%} against the measurement.")
    if result["not_predicted"]:
        remarks.append(f"Not predicted: {result['not_predicted']}")
    remarks += result.get("warnings", [])
    columns = {"part": "part", "measured (ms)": "measured", "share": lambda row: percent(row["measured"] / step)}
    columns |= {"predicted (ms)": _predicted, "roofline (ms)": "roofline"}
    longest = {"time (ms)": quantity("ms", unit=1.0), "calls": quantity("calls", unit=1.0)}
    longest |= same("part", "opcode", "instruction")
    return [
        _table(f"Time of a {what} by part", rows, columns, *remarks),
        make_table("The instructions that take longest", result.get("instructions", []), longest),
    ]


def _context(result: Result) -> list[Table]:
    def median(row: Row) -> str:
        return number(statistics.median(row["seconds"]), 1e-3)

    case = {"tokens": "length", "attention": "attention"}
    rows = {"devices": "devices", "compiled (MiB)": "bytes_per_device", "peak (MiB)": "peak", "median (ms)": median}
    return [_table("Context-parallel attention: memory per device and time", result["results"], case | rows)]


def _sizing(result: Result) -> list[Table]:
    columns = {**same("rule", "status", "value"), "predicted loss": share("loss"), "change": "advice"}
    return [make_table(f"Phase {phase}", findings, columns) for phase, findings in result["phases"].items()]


_MAKERS = (_memory, _gemm, _storage, _step, _context, _sizing)
TABLES: dict[str, Callable[[Result], list[Table]]] = {make.__name__.removeprefix("_"): make for make in _MAKERS}
