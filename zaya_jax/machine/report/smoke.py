"""The tables of the smoke test: its parts, predictions beside measurements, and the results of each part."""

import statistics
from typing import Any

from zaya_jax.machine.report.tables import TABLES
from zaya_jax.run.table import Table, make_pairs, make_table, number, quantity, share

_END = {"failed": "FAIL", "skipped": "SKIP"}


def smoke_tables(result: dict[str, Any]) -> list[Table]:
    """Make the tables of a result of the smoke test."""
    parts = result["parts"]
    ends = [{"part": name, "status": next((_END[key] for key in _END if key in part), "PASS"), **part}
            for name, part in parts.items()]  # fmt: skip
    tables = [
        make_table("Parts", ends, {"part": "part", "status": "status", "time (s)": quantity("seconds", unit=1.0)}),
        comparison_table(result["comparison"]),
        make_table("Training step", [part for part in parts.values() if "step_seconds" in part], {
            "layout": "layout", "devices": "devices", "layers": "layers", "tokens": "tokens",
            "median (ms)": lambda row: number(statistics.median(row["step_seconds"]), 1e-3),
            "tokens/s": quantity("tokens_per_second", unit=1.0),
            "TFLOP/s per device": quantity("tflops_per_second", unit=1.0), "MFU": share("mfu"),
            "peak memory (GB)": quantity("peak_bytes", unit=1e9),
        }),
    ]  # fmt: skip
    for part in parts.values():
        if "errors" in part:
            tables.append(_operations(part))
        elif "rooflines" in part:
            tables.append(_kernels(part))
        elif "heldout" in part:
            tables.append(_training(part))
        elif "scaling" in part:
            tables += TABLES["context"](part)
        elif "network" in part:
            tables += TABLES["describe"](part)
    return tables


def comparison_table(rows: list[dict[str, Any]]) -> Table:
    """Make the table of predictions and measurements from `comparison.as_json`."""
    return make_table("Predictions and measurements", rows, {
        **{key: key for key in ("part", "quantity", "unit")},
        **{key: quantity(key, unit=1.0) for key in ("predicted", "estimated", "measured")},
        "measured/predicted": quantity("ratio", unit=1.0),
    }, *dict.fromkeys(f"Not predicted: {row['why']}" for row in rows if row["why"]))  # fmt: skip


def _operations(part: dict[str, Any]) -> Table:
    rows = [{"operation": name, **row} for name, row in part["errors"].items()]
    return make_table("Errors against double precision", rows, {
        "operation": "operation", "relative error": lambda row: f"{row['error']:.2e}",
        "tolerance": lambda row: f"{row['tolerance']:.2e}",
    })  # fmt: skip


def _kernels(part: dict[str, Any]) -> Table:
    limits, rows = part["rooflines"], [{"case": name, **row} for name, row in part["results"].items()]
    remarks = [f"XLA reaches {number(limits['copy'], 1e9)} GB/s in copies and {number(limits['dense'], 1e12)} TFLOP/s "
               "in dense bf16 matmuls."]  # fmt: skip
    if part["emulated"]:
        remarks.append("Without a GPU, kernels run emulated at a small size; do not compare these times with a GPU.")
    return make_table("Kernels", rows, {
        "case": "case", **{f"{name} (µs)": quantity("median_seconds", side, unit=1e-6) for name, side in (
            ("kernel", "kernel"), ("reference", "reference"), ("PyTorch", "peer"))},
        "GB/s": quantity("bytes_per_second", unit=1e9), "TFLOP/s": quantity("flops_per_second", unit=1e12),
    }, *remarks)  # fmt: skip


def _training(part: dict[str, Any]) -> Table:
    resumed = f"differs by {part['resumed_difference']:.2g} nats/token"
    return make_pairs("Training", {
        "parameters": f"{part['parameters']:,}", "tokens of a step": f"{part['tokens_per_step']:,}",
        "steps": f"{len(part['losses'])}", "first loss (nats/token)": number(part["losses"][0]),
        "last loss (nats/token)": number(part["losses"][-1]), "held-out loss (nats/token)": number(part["heldout"]),
        "resumed run": "bitwise the same" if part["resumed_bitwise"] else resumed,
    })  # fmt: skip
