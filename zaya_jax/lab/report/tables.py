"""The tables of a result, by verb."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from zaya_jax.run.table import NONE, Row, Table, make_pairs, make_table, number, percent, quantity, share

_MICRO, _MILLI, _GIGA, _TERA, _MEBI = 1e-6, 1e-3, 1e9, 1e12, 2.0**20
Result = dict[str, Any]

UNITS = {"FLOP/s": (1e12, "TFLOP/s"), "bytes/s": (1e9, "GB/s")}  # unit of a result → scale and unit of a table


def _describe(machine: Result) -> list[Table]:
    network = machine["network"]
    ports = {name: [port["state"], f"{port['speed']:,} Mb/s" if port["speed"] else None]
             for name, port in network["interfaces"].items()}  # fmt: skip
    ports |= {name: [port["link_layer"], port["state"], port["rate"]] for name, port in network["rdma"].items()}
    plugins = {name: f"{', '.join(plugin['files'])} ({'' if plugin['loaded'] else 'not '}loaded)"
               for name, plugin in network["plugins"].items()}  # fmt: skip
    return [
        make_pairs("Machine", {
            "devices": f"{machine['devices']} × {machine['device']}", "platform": machine["platform"],
            "runtime": machine["runtime"], "memory of a device (GB)": number(machine["device_bytes"], _GIGA),
            "memory of the host (GB)": number(machine["host_bytes"], _GIGA), "Linux kernel": machine["kernel"],
            **{f"driver {name}": version for name, version in machine["drivers"].items()}, "preset": machine["preset"],
        }),
        make_pairs("Network", {name: ", ".join(filter(None, port)) for name, port in ports.items()} | plugins),
        make_pairs("Environment", machine["environment"]),
    ]  # fmt: skip


def _preflight(result: Result) -> list[Table]:
    rows = []
    for check in result["checks"]:
        scale, unit = UNITS.get(check["unit"], (1.0, check["unit"]))
        rows.append(check | {"value": number(check["value"], scale), "unit": unit})
    return [make_table("Checks", rows, {name: name for name in ("check", "status", "value", "unit", "message")})]


def _memory(result: Result) -> list[Table]:
    speed = {"GB/s": quantity("bytes_per_second", unit=_GIGA)}
    return [
        make_table("BabelStream", result["results"], {
            "operation": "operation", "array (bytes)": "bytes", **speed, "shortest (ms)": quantity("min", unit=_MILLI),
            "mean (ms)": quantity("mean", unit=_MILLI), "longest (ms)": quantity("max", unit=_MILLI),
        }, "The rate is that of the shortest call."),
        make_table("The model's memory-bound operations", result["operations"], {
            "operation": "operation", "bytes": "bytes", **speed, "of triad": share("of_triad"),
        }),
        make_table("Triad in C with OpenMP", [result["stream"]] if "stream" in result else [], {
            "compiler": "compiler", **speed, "ours / C": quantity("ratio", unit=1.0),
        }),
    ]  # fmt: skip


def _gemm(result: Result) -> list[Table]:
    def of_maximum(row: Row) -> str:
        warm, maximum = row.get("warm_flops_per_second"), result["maximum"]
        return percent(warm / maximum) if warm and maximum else NONE

    families: dict[str, list[Row]] = {}
    for row in result["results"]:
        families.setdefault(row["family"], []).append(row)
    fastest = f"The maximum is the fastest square's speed, {number(result['maximum'], _TERA)} TFLOP/s."
    return [
        make_table(f"Family {family.replace('_', '–')}", rows, {
            "product": "name", "GFLOP": quantity("flops", unit=_GIGA),
            "warm (TFLOP/s)": quantity("warm_flops_per_second", unit=_TERA),
            "cold (TFLOP/s)": quantity("cold_flops_per_second", unit=_TERA), "warm, of maximum": of_maximum,
        }, *([fastest] if family == "square" else []))
        for family, rows in families.items()
    ]  # fmt: skip


def _collectives(result: Result) -> list[Table]:
    case = {
        "operation": "operation", "dtype": "dtype", "devices": "devices", "groups": "groups",
        "axes": lambda row: ", ".join(row["axes"]),
    }  # fmt: skip
    fit = {
        f"{name}{bound}": quantity(key, field, unit=unit)
        for name, key, unit in (("α (µs)", "alpha_seconds", _MICRO), ("β (GB/s)", "beta_bytes_per_second", _GIGA))
        for field, bound in (("value", ""), ("low", " from"), ("high", " to"))
    }
    rows = {
        f"{place}{name}": quantity(half, field, unit=unit)
        for half, place in (("out_of_place", ""), ("in_place", "in place, "))
        for name, field, unit in (("median (µs)", "p50", _MICRO), ("p99 (µs)", "p99", _MICRO),
                                  ("algorithm (GB/s)", "algbw", _GIGA), ("bus (GB/s)", "busbw", _GIGA))
    }  # fmt: skip
    if any("peer_busbw" in row for row in result["results"]):
        rows["nccl-tests, bus (GB/s)"] = quantity("peer_busbw", unit=_GIGA)
    return [
        make_table("Fit of time = α + size / β", result["fits"], {
            **case, **fit, "half of β at (bytes)": quantity("half_bytes", unit=1.0),
            "90 % of β at (bytes)": quantity("knee_bytes", unit=1.0),
        }, "α is the latency, β the algorithm bandwidth, each with its 95 % confidence interval.",
           "– as the end of an interval means that the measurements give no upper bound."),
        message_table(result.get("messages", [])),
        make_table("Times and bandwidths", result["results"], {**case, "bytes": "bytes", **rows, "wrong": "wrong"}),
        _traffic(result),
    ]  # fmt: skip


def message_table(messages: Sequence[Row]) -> Table:
    """Make the table of the collectives of a step, with their measured times."""
    return make_table("Messages of a step", messages, {
        "operation": "operation", "axes": lambda row: ", ".join(row["axes"]), "bytes": "bytes",
        "times per step": "times", "each (µs)": quantity("seconds", unit=_MICRO),
        "together (ms)": lambda row: number(row["times"] * row["seconds"], _MILLI),
    })  # fmt: skip


def _storage(result: Result) -> list[Table]:
    saves = {"training stalls": "stall", "checkpoint is durable": "commit", "restored and verified, cold": "cold",
             "restored and verified, warm": "warm"}  # fmt: skip
    packed = {"well packed": "1", "limit of well packed": "2", "scattered": "8"}
    return [
        make_table("Reads", result["reads"], {
            "pattern": "pattern", "page cache": "cache", "threads": "threads",
            "reads/s": quantity("operations_per_second", unit=1.0), "GB/s": quantity("bytes_per_second", unit=_GIGA),
            "was cached": share("cached"),
        }, "Random reads are of 4 KiB, sequential ones of 4 MiB."),
        Table(f"Checkpoint of {result['size']}", ["", "median (ms)"],
              [[name, number(statistics.median(result["saves"][key]), _MILLI)] for name, key in saves.items()]),
        make_table("Shortest step that the storage can feed", result["phases"], {
            "phase": "phase", "sequences": "sequences", "tokens of each": "context",
            **{f"{name} (ms)": quantity("shortest_step_seconds", key, unit=_MILLI) for name, key in packed.items()},
        }, f"The page cache can hold up to {number(result['available_memory'], _GIGA)} GB: prepared data that fits is "
           "read from the storage once."),
        _traffic(result),
    ]  # fmt: skip


def _traffic(result: Result) -> Table:
    rows = [[name, number(count, 1e6)] for name, count in result["traffic"].items()]
    return Table("Network traffic", ["interface", "MB"], rows)


def _step(result: Result) -> list[Table]:
    step, what, untraced = result["seconds"], result["what"], result["untraced_seconds"]
    rows = [{"part": name, **row} for name, row in result["parts"].items()]
    if result["overlap"] is not None:
        rows.append({"part": "exposed collectives", "measured": result["exposed_collectives"]})
    rows += [{"part": "unattributed", "measured": result["unattributed"]}, {"part": what, "measured": step}]
    remarks = []
    if result["overlap"] is not None:
        remarks.append(f"Other operations overlap with {percent(result['overlap'])} of the time of collectives.")
    if untraced is not None:
        remarks.append(
            f"Without the profiler, a {what} takes {number(untraced, _MILLI)} ms ({step / untraced:.2f}× with it)."
        )
    if estimated := result.get("estimated_seconds"):
        error = estimated / (untraced or step) - 1
        remarks.append(f"The dry run estimates {number(estimated, _MILLI)} ms, {error:+.0%} against the measurement.")
    if result["not_predicted"]:
        remarks.append(f"Not predicted: {result['not_predicted']}")
    remarks += result.get("warnings", [])
    return [
        make_table(f"Time of a {what} by part", rows, {
            "part": "part", "measured (ms)": quantity("measured", unit=_MILLI),
            "share": lambda row: percent(row["measured"] / step),
            "predicted (ms)": quantity("predicted", unit=_MILLI), "roofline (ms)": quantity("roofline", unit=_MILLI),
        }, *remarks),
        make_table("The instructions that take longest", result.get("instructions", []), {
            "time (ms)": quantity("ms", unit=1.0), "calls": quantity("calls", unit=1.0),
            **{name: name for name in ("part", "opcode", "instruction")},
        }),
    ]  # fmt: skip


def _context(result: Result) -> list[Table]:
    scaling = [{"length": int(length), "attention": kind, **power}
               for length, kinds in result["scaling"].items() for kind, power in kinds.items() if power]  # fmt: skip
    case = {"tokens": "length", "attention": "attention"}
    return [
        make_table("Context-parallel attention: memory per device and time", result["results"], {
            **case, "devices": "devices", "compiled (MiB)": quantity("bytes_per_device", unit=_MEBI),
            "peak (MiB)": quantity("peak", unit=_MEBI),
            "median (ms)": lambda row: number(statistics.median(row["seconds"]), _MILLI),
        }),
        make_table("Exponent of memory per device against the number of devices", scaling, {
            **case, "fitted": lambda row: f"{row['exponent']:.2f}",
            "between the two largest numbers": lambda row: f"{row['last']:.2f}",
        }, "-1 is ideal: twice the devices, half the memory on each."),
    ]  # fmt: skip


def _sizing(result: Result) -> list[Table]:
    columns = {"rule": "rule", "status": "status", "value": "value", "predicted loss": share("loss"),
               "change": "advice"}  # fmt: skip
    phases = result["phases"]
    reasons = {finding["rule"]: finding for findings in phases.values() for finding in findings}
    return [
        *(make_table(f"Phase {phase}", findings, columns) for phase, findings in phases.items()),
        make_table("Rules", reasons.values(), {name: name for name in ("rule", "reason", "source")}),
    ]


TABLES: dict[str, Callable[[Result], list[Table]]] = {
    "describe": _describe, "preflight": _preflight, "memory": _memory, "gemm": _gemm, "collectives": _collectives,
    "storage": _storage, "step": _step, "context": _context, "sizing": _sizing,
}  # fmt: skip
