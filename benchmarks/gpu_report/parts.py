"""The parts of the report, in the order in which they run, and their sizes."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu_report.decode import measure_decode
from benchmarks.gpu_report.determinism import measure_determinism
from benchmarks.gpu_report.figures import kernel_figures
from benchmarks.gpu_report.state import measure_state
from benchmarks.gpu_report.step import measure_step
from benchmarks.gpu_report.supervisor import measure_supervisor
from benchmarks.gpu_report.training import measure_training
from benchmarks.gpu_report.tuning import measure_tuned_step, measure_tuning
from benchmarks.kernels import bench_kernels
from zaya_jax.lab.measure import context_attention as context
from zaya_jax.lab.measure.collectives.programs import check_collectives
from zaya_jax.ops.registry import OPERATIONS, check_operations
from zaya_jax.ops.selfcheck import EXAMPLE
from zaya_jax.ops.target import current_target


class Part(NamedTuple):
    """A part of the report; `work` can be pickled."""

    seconds: float  # it is ended after them
    work: Callable[[], dict[str, Any]]


def make_parts(small: bool, devices: int, folder: Path) -> dict[str, Part]:
    """Return the parts after the first, by name.

    Args:
      small: whether the device is a CPU, so that sizes are small.
      devices: number of devices.
      folder: of the recordings.
    """
    parts = {
        "operations": Part(60, functools.partial(_operations, small)),
        "determinism": Part(110, functools.partial(measure_determinism, small)),
        "step": Part(100, functools.partial(measure_step, small, "data")),
        "training": Part(170, functools.partial(measure_training, small)),
        "supervisor": Part(150, functools.partial(measure_supervisor, small, 145)),
        "state": Part(230, functools.partial(measure_state, small, 220)),
        "kernels": Part(90, functools.partial(_kernels, small)),
        "tune": Part(270, functools.partial(measure_tuning, small, 240)),
        "step_tuned": Part(100, functools.partial(measure_tuned_step, small, folder / "tune.json")),
        "decode": Part(70, functools.partial(measure_decode, small)),
    }
    if not small:  # on a CPU it is the same program
        parts["step_deterministic"] = Part(100, functools.partial(measure_step, small, "data", True))
    if devices > 1:
        sizes = context.Sizes((512,), "float32", degrees=(1, 4)) if small else context.GPU
        parts |= {
            "collectives": Part(60, check_collectives),
            "step_fsdp": Part(100, functools.partial(measure_step, small, "fsdp")),
            "context": Part(180, functools.partial(context.measure_context, sizes, 2 if small else 5)),
        }
    return parts


def _operations(small: bool) -> dict[str, Any]:
    names, dtypes = (("residual_norm", "router"), ("float32",)) if small else (OPERATIONS, ("float32", "bfloat16"))
    result = check_operations(current_target(), EXAMPLE, dtypes, tuple(names))
    errors = {f"error of {name}": [row["error"], f"of {row['tolerance']:g}"] for name, row in result["errors"].items()}
    return result | {"figures": errors}


def _kernels(small: bool) -> dict[str, Any]:
    result = bench_kernels(("residual_norm",) if small else (), 2 if small else 5, None)
    kept = {key: result[key] for key in ("emulated", "rooflines", "results", "failed") if key in result}
    return kept | {"figures": kernel_figures(result, result["hardware"]["device"])}
