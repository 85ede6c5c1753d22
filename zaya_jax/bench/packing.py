"""Planning bins of whole documents: seconds, memory and padding for many documents."""

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from zaya_jax.bench.memory import PeakMemory
from zaya_jax.data.bins import pack
from zaya_jax.machine.subprocesses import run_in_subprocess

CONTEXTS = (4096, 32768, 131072)

_MEDIAN, _SIGMA = 900, 1.2  # tokens of a document: lognormal


class Planned(NamedTuple):
    """What a plan took, and what it is."""

    seconds: float
    peak_bytes: int  # resident, of the whole process
    bins: int
    padding: float  # part of the bins' tokens that stand for nothing


def measure_planning(documents: int, repeats: int) -> dict[str, Any]:
    """Plan `documents` at each of `CONTEXTS`, each plan in a process of its own; medians of `repeats`."""
    results = {}
    for context in CONTEXTS:
        runs = []
        for _ in range(repeats):
            with run_in_subprocess(planning, documents, context) as plan:
                runs.append(plan())
        seconds = statistics.median(run.seconds for run in runs)
        peak = max(run.peak_bytes for run in runs)
        print(f"planning {documents:,} documents at {context:,}: {seconds:.1f} s, {peak / 2**30:.2f} GiB, "
              f"padding {100 * runs[0].padding:.4f} %", flush=True)  # fmt: skip
        results[str(context)] = {
            "seconds": [round(run.seconds, 2) for run in runs],
            "peak_bytes": peak,
            "bins": runs[0].bins,
            "padding": round(runs[0].padding, 7),
        }
    return results


def planning(documents: int, context: int) -> Callable[[], Planned]:
    """A function that plans lognormal documents and returns what that took."""
    sizes = np.random.default_rng(0).lognormal(np.log(_MEDIAN), _SIGMA, documents)
    return functools.partial(_plan, np.clip(sizes, 1, context).astype(np.int64), context)


def _plan(sizes: np.ndarray, context: int) -> Planned:
    with PeakMemory() as peak:
        start = time.perf_counter()
        bins = len(pack(sizes, context))
        seconds = time.perf_counter() - start
    return Planned(seconds, peak.bytes, bins, 1 - int(sizes.sum()) / (bins * context))
