"""Implementations of operations measured on the device with `machine kernels --tune`, and a step that uses them."""

import os
import tempfile
from pathlib import Path
from typing import Any

import jax

from benchmarks.gpu_report.figures import Figures
from benchmarks.gpu_report.step import measure_step
from zaya_jax.lab.measure.tune import DECIDING, totals, tune
from zaya_jax.ops.kernel_table import REFERENCE, own_table
from zaya_jax.run.files import json_text, read_json, write_atomically
from zaya_jax.run.writing import make_folder


def measure_tuning(small: bool, seconds: float) -> dict[str, Any]:
    """Time the implementations of all operations at the sizes of configs/bench_8b.yaml, or of one at a small size.

    Args:
      small: whether kernels are emulated.
      seconds: after which no further operation is timed.

    Returns:
      For JSON: the `table`, and `figures`: the time of the fastest implementation, of the default and of XLA.
    """
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder  # this process' table is the report's, not the user's own
        table = tune(None, [], 1 if small else 3, seconds, ("residual_norm",) if small else DECIDING)
    figures: Figures = {}
    for name, row in table["operations"].items():
        for size in row["sizes"]:
            by_variant, title = totals(size), f"{name}, {size['rows']:,} rows"
            # The first kernel to be timed is the default, with its default tiles; it may have failed.
            default = next((variant for variant in size["seconds"] if variant != REFERENCE), REFERENCE)
            fastest = min(by_variant, key=by_variant.__getitem__, default=REFERENCE)
            for what, variant in (("fastest", fastest), ("default", default), ("XLA", REFERENCE)):
                if variant in by_variant:  # XLA's may have failed, too
                    figures[f"{title}: {what}"] = [round(1e3 * by_variant[variant], 4), "ms"]
    return {"table": table, "figures": figures}


def measure_tuned_step(small: bool, recording: Path) -> dict[str, Any]:
    """Time and trace a step with the table of `measure_tuning`, whose recording is a file; see `measure_step`."""
    table = read_json(recording).get("table") if recording.exists() else None
    if table is None:
        return {"skipped": "There is no table of measured kernels: run the part `tune` first."}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        path = own_table(jax.devices()[0].device_kind)
        make_folder(path.parent)
        write_atomically(path, json_text(table))
        return measure_step(small, "data")
